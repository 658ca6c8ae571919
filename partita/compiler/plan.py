"""The planner: from tolerance, domain and what is known of f to sizes, before anything is allocated."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from partita.certify.certificate import Term, total
from partita.certify.deployment import UNIT_ROUNDOFF
from partita.certify.grid_bounds import grid_terms
from partita.certify.scattered_bounds import rate_for, scattered_terms
from partita.compiler.knowledge import Knowledge, gather
from partita.compiler.spacing import SpacingRule
from partita.constructions.construction import semantics_of
from partita.constructions.on_grid import GridRecipe, grid_facts
from partita.constructions.small_domain import CoverRecipe, scattered_facts
from partita.errors import SizeError, ToleranceError, UnsupportedError
from partita.geometry.covers import farthest_point_cover
from partita.geometry.domains import Box, Domain, PointCloud
from partita.geometry.grid import ProductGrid
from partita.targets.knowledge import Jumps, Modulus
from partita.targets.target import Target, make_target

__all__ = ["DEFAULT_MAX_BYTES", "DEFAULT_SHARPNESS", "Options", "Plan", "make_plan", "plan"]

DEFAULT_SHARPNESS = 64.0  # κ = R h²: two centers per axis hold all but 1e-13 of the mass
DEFAULT_MAX_BYTES = 4 << 30
_NUMPY: dict[torch.dtype, type[np.floating]] = {torch.float64: np.float64, torch.float32: np.float32}


@dataclass(frozen=True)
class Options:
    """What the caller asked for, checked once.

    Attributes:
        tolerance: ε. norm: p, math.inf for the supremum. dtype: of the head. sharpness: κ = R h². max_bytes: refuse larger heads.
    """

    tolerance: float
    norm: float
    dtype: torch.dtype
    sharpness: float
    max_bytes: int

    @classmethod
    def checked(
        cls, tolerance: float, norm: float | str, dtype: torch.dtype, sharpness: float, max_bytes: int
    ) -> Options:
        try:
            power = math.inf if norm == "inf" else float(norm)
        except (TypeError, ValueError):
            power = math.nan
        if not power >= 1:
            raise UnsupportedError(f"norm is {norm!r}; expected 'inf' or a number p ≥ 1.")
        if not (isinstance(tolerance, (int, float, np.number)) and 0 < tolerance < math.inf):
            raise ToleranceError(f"tolerance is {tolerance!r}; expected a finite number > 0.")
        if dtype not in _NUMPY:
            raise UnsupportedError(
                f"dtype is {dtype}: heads are certified in torch.float64 and torch.float32; others may be cast "
                f"afterwards, uncertified."
            )
        if not 1 <= sharpness < math.inf:
            raise UnsupportedError(
                f"sharpness is {sharpness}; expected a finite κ = R h² of at least 1 (from 8 on a head is called hard)."
            )
        return cls(float(tolerance), power, dtype, float(sharpness), int(max_bytes))

    @property
    def item_bytes(self) -> int:
        return 4 if self.dtype == torch.float32 else 8

    @property
    def semantics(self) -> str:
        return semantics_of(self.dtype)


@dataclass(frozen=True, eq=False)
class Plan:
    """A head before it exists: how large, how sharp, how good, and why.

    Attributes:
        keys, parameters, bytes: of the folded head.
        error_bound: what the certificate will say or slightly more, |f| being bounded before it is known at the centers.
        why: sentences that explain the numbers.
    """

    target: Target
    knowledge: Knowledge
    recipe: GridRecipe | CoverRecipe
    keys: int
    parameters: int
    bytes: int
    sharpness: float
    error_bound: float
    why: tuple[str, ...]

    @property
    def counts(self) -> tuple[int, ...] | None:
        """Keys per axis; None for scattered centers."""
        return self.recipe.counts if isinstance(self.recipe, GridRecipe) else None

    @property
    def kind(self) -> str:
        """The kind of claim that building it will give."""
        filled = isinstance(self.target.domain, PointCloud) and self.target.domain.fill_distance > 0
        return "proved_given" if self.knowledge.declared or filled else "proved"

    def to_json(self) -> dict[str, Any]:
        return {
            "function": self.target.label,
            "domain": [str(d) for d in self.target.domains],
            "tolerance": self.recipe.tolerance,
            "method": "hard",
            "kind": self.kind,
            "keys": self.keys,
            "keys_per_axis": self.counts,
            "parameters": self.parameters,
            "bytes": self.bytes,
            "sharpness": self.sharpness,
            "dtype": self.recipe.semantics,
            "error_bound": self.error_bound,
            "why": list(self.why),
        }

    def __str__(self) -> str:
        return "\n".join(self.why)


def plan(
    function: Any,
    domain: Domain | tuple[Box, Box],
    *,
    tolerance: float,
    lipschitz: float | Sequence[float] | None = None,
    modulus: Modulus | None = None,
    jumps: Jumps | None = None,
    norm: float | str = "inf",
    dtype: torch.dtype = torch.float64,
    sharpness: float = DEFAULT_SHARPNESS,
    max_bytes: int = DEFAULT_MAX_BYTES,
    vectorize: bool = False,
) -> Plan:
    """Sizes, sharpness and bound of the head that `compile` would build, and why. Arguments as in `compile`.

    >>> import partita as pa
    >>> print(pa.plan("2*x0", pa.Box([0.0], [1.0]), tolerance=0.15).why[0])
    7 keys
    """
    options = Options.checked(tolerance, norm, dtype, sharpness, max_bytes)
    return make_plan(make_target(function, domain, vectorize=vectorize), options, lipschitz, modulus, jumps)


def make_plan(
    target: Target,
    options: Options,
    lipschitz: float | Sequence[float] | None,
    modulus: Modulus | None,
    jumps: Jumps | None,
) -> Plan:
    knowledge = gather(target, norm=options.norm, lipschitz=lipschitz, modulus=modulus, jumps=jumps)
    return (_plan_cover if isinstance(target.domain, PointCloud) else _plan_grid)(target, knowledge, options)


def _plan_grid(target: Target, knowledge: Knowledge, options: Options) -> Plan:
    """Start from cells that use up the whole tolerance, then make room for what windows and rounding add."""
    box = target.domain.bounding_box()
    rule = SpacingRule(knowledge.known, options.norm, options.sharpness, box, target.num_outputs, _NUMPY[options.dtype])
    aim = options.tolerance
    while True:
        counts = rule.counts(aim)
        _refuse_large(counts, rule, target, options)
        recipe = GridRecipe(
            counts,
            tuple(rule.rates(counts).tolist()),
            rule.half_windows(counts),
            options.norm,
            options.tolerance,
            options.dtype,
        )
        terms = _predicted_terms(target, knowledge, recipe)
        bound = total(terms)
        if bound <= options.tolerance:
            break
        rest = bound - sum(t.value for t in terms if t.name in ("approximation", "jumps"))
        if rest >= 0.5 * options.tolerance:
            raise ToleranceError(_floor_message(target, options, terms))
        aim = min(aim * (1 - 1e-9), aim - (bound - options.tolerance) * (1 + 1e-9))
    keys = math.prod(counts)
    parameters = keys * target.num_outputs + sum(counts) + len(counts)
    size = parameters * options.item_bytes
    window = " × ".join(str(min(2 * q, c)) for q, c in zip(recipe.half_windows, counts))
    why = (
        f"{' × '.join(map(str, counts))} = {keys:,} keys" if len(counts) > 1 else f"{keys:,} keys",
        *rule.explain(counts, terms[0]),
        f"what is known of f is {knowledge.source}",
        f"{parameters:,} stored numbers, {_size(size)} in {options.semantics}; a query looks at {window} of the keys",
    )
    return Plan(target, knowledge, recipe, keys, parameters, size, options.sharpness, bound, why)


def _predicted_terms(target: Target, knowledge: Knowledge, recipe: GridRecipe) -> list[Term]:
    """The terms of the bound, with |f| ≤ magnitude in place of the values that nobody has asked for yet."""
    box = target.domain.bounding_box()
    axes = ProductGrid.uniform(box, recipe.counts, dtype=_NUMPY[recipe.dtype]).axes
    u = UNIT_ROUNDOFF[recipe.semantics]
    roundings = (1 if recipe.dtype != torch.float64 else 0) + (64 if target.graph is not None else 0) * UNIT_ROUNDOFF[
        "float64"
    ] / u
    facts = grid_facts(
        list(axes),
        box,
        recipe,
        outputs=target.num_outputs,
        largest=knowledge.magnitude,
        spread=2 * knowledge.magnitude,
        value_error=roundings * u * knowledge.magnitude,
    )
    return grid_terms(facts, knowledge.known, recipe.norm)


def _head_bytes(counts: tuple[int, ...], target: Target, options: Options) -> int:
    return (math.prod(counts) * target.num_outputs + sum(counts)) * options.item_bytes


def _refuse_large(counts: tuple[int, ...], rule: SpacingRule, target: Target, options: Options) -> None:
    size = _head_bytes(counts, target, options)
    if size <= options.max_bytes:
        return
    low = high = options.tolerance
    while _head_bytes(rule.counts(high), target, options) > options.max_bytes:
        low, high = high, 2 * high
    for _ in range(30):
        middle = math.sqrt(low * high)
        fits = _head_bytes(rule.counts(middle), target, options) <= options.max_bytes
        low, high = (low, middle) if fits else (middle, high)
    raise SizeError(
        f"tolerance {options.tolerance:g} needs {' × '.join(map(str, counts))} = {math.prod(counts):.4g} keys, "
        f"{_size(size)} of values; "
        f"max_bytes allows {_size(options.max_bytes)}. The best tolerance that fits is about {high * 1.001:.4g} "
        f"({math.prod(rule.counts(high)):,} keys); or raise max_bytes."
    )


def _size(count: float) -> str:
    for unit in ("bytes", "KiB", "MiB", "GiB", "TiB"):
        if count < 1024 or unit == "TiB":
            return f"{count:.4g} {unit}"
        count /= 1024
    return ""


def _floor_message(target: Target, options: Options, terms: list[Term]) -> str:
    floor = sum(t.value for t in terms if t.name not in ("approximation", "jumps"))
    parts = ", ".join(f"{t.name} {t.value:.2g}" for t in terms if t.name not in ("approximation", "jumps"))
    advice = " Use dtype=torch.float64, or ask" if options.dtype == torch.float32 else " Ask"
    return (
        f"tolerance {options.tolerance:g} is below what {options.semantics} can promise for {target.label}: "
        f"rounding and window alone "
        f"are {floor:.3g} ({parts}).{advice} for more than {2.1 * floor:.3g}."
    )


def _plan_cover(target: Target, knowledge: Knowledge, options: Options) -> Plan:
    cloud, modulus = target.domain, knowledge.known.modulus
    if not isinstance(cloud, PointCloud) or not math.isinf(options.norm) or modulus is None:
        raise UnsupportedError(
            "on a PointCloud the norm must be 'inf' (it has no volume) and the Lipschitz constant one number "
            "for the Euclidean distance."
        )
    softness = 4e-2 / options.sharpness  # the share of ρ² that a finite temperature may add
    rounding = 2e-2 if options.dtype == torch.float32 else 1e-9  # the share of the tolerance kept for it
    scale = math.sqrt(1 + max(softness, 1e-4)) * (1 + rounding)
    allowed = (
        math.inf
        if modulus.constant == 0
        else (options.tolerance * (1 - rounding) / modulus.constant) ** (1 / modulus.exponent) / scale
    )
    if allowed < cloud.fill_distance:
        best = modulus.constant * (cloud.fill_distance * scale) ** modulus.exponent * (1 + rounding)
        raise ToleranceError(
            f"tolerance {options.tolerance:g} is below ω(fill_distance) = {best:.4g}: between samples that leave "
            f"gaps of {cloud.fill_distance:g} nothing "
            "better can be promised. Give more points, or ask for more."
        )
    cover = farthest_point_cover(cloud.flat, radius=allowed - cloud.fill_distance)
    radius, cells = cover.radius + cloud.fill_distance, len(cover.centers)
    parameters = cells * (cloud.dimension + target.num_outputs) + 1
    size = parameters * options.item_bytes
    if size > options.max_bytes:
        raise SizeError(f"a cover by {cells:,} balls needs {_size(size)}; max_bytes allows {_size(options.max_bytes)}.")
    recipe = CoverRecipe(
        cover, _cover_rate(cells, radius, softness, allowed, options), options.tolerance, options.dtype
    )
    value_error = knowledge.magnitude * (UNIT_ROUNDOFF[options.semantics] + 64 * UNIT_ROUNDOFF["float64"])
    facts = scattered_facts(
        cloud, recipe, largest=knowledge.magnitude, spread=2 * knowledge.magnitude, value_error=value_error
    )
    terms = scattered_terms(facts, modulus)
    if total(terms) > options.tolerance:
        raise ToleranceError(_floor_message(target, options, terms))
    why = (
        f"{cells:,} keys: balls of radius {cover.radius:.4g} that cover {len(cloud.points):,} points",
        f"the error is at most L·√(ρ² + 2W/R), ρ = {cover.radius:.4g} + {cloud.fill_distance:g} between points, "
        f"so ρ ≤ tolerance/L = {options.tolerance / max(modulus.constant, 1e-300):.4g}",
        f"what is known of f is {knowledge.source}",
        f"{parameters:,} stored numbers, {_size(size)} in {options.semantics}",
    )
    return Plan(target, knowledge, recipe, cells, parameters, size, recipe.rate * radius**2, total(terms), why)


def _cover_rate(cells: int, radius: float, softness: float, allowed: float, options: Options) -> float:
    """R such that a finite temperature adds no more than its share to ρ², or a hundredth of the radius allowed if ρ is smaller."""
    if cells == 1 or math.isinf(allowed):
        return 1.0
    added = max(softness * radius**2, 1e-4 * allowed**2)
    return float(np.asarray(rate_for(added, cells), dtype=_NUMPY[options.dtype]))
