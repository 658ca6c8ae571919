"""The planner: from tolerance, domain and what is known of f to sizes, before anything is allocated."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from partita.certify.certificate import Term, total
from partita.certify.grid_bounds import Known, grid_terms, window_for
from partita.certify.scattered_bounds import rate_for
from partita.compiler.knowledge import Knowledge, gather
from partita.constructions.on_grid import GridRecipe, grid_facts
from partita.constructions.small_domain import CoverRecipe
from partita.errors import SizeError, ToleranceError, UnsupportedError
from partita.geometry.covers import farthest_point_cover
from partita.geometry.domains import Array, Box, Domain, PointCloud
from partita.geometry.grid import ProductGrid
from partita.geometry.moments import AxisGeometry, moment_bounds
from partita.targets.knowledge import Jumps, Modulus
from partita.targets.target import Target, make_target

__all__ = ["DEFAULT_SHARPNESS", "Plan", "make_plan", "plan"]

DEFAULT_SHARPNESS = 64.0  # κ = R h²: two centers per axis hold all but 1e-13 of the mass, and the covering radius is met to 1e-6
DEFAULT_MAX_BYTES = 4 << 30
_DTYPES = {torch.float64: np.float64, torch.float32: np.float32}


@dataclass(frozen=True, eq=False)
class Plan:
    """A head before it exists: how large, how sharp, how good, and why.

    Attributes:
        keys, parameters, bytes: of the folded head. counts: keys per axis (None for scattered centers).
        error_bound: the terms' sum, with |f| bounded before it is known at the centers.
        kind: of the certificate that building it will give.
        why: sentences that explain the number.
    """

    target: Target
    knowledge: Knowledge
    recipe: GridRecipe | CoverRecipe
    keys: int
    parameters: int
    bytes: int
    sharpness: float
    error_bound: float
    terms: tuple[Term, ...]
    why: tuple[str, ...]

    @property
    def counts(self) -> tuple[int, ...] | None:
        return self.recipe.counts if isinstance(self.recipe, GridRecipe) else None

    @property
    def kind(self) -> str:
        filled = isinstance(self.target.domain, PointCloud) and self.target.domain.fill_distance > 0
        return "proved_given" if self.knowledge.declared or filled else "proved"

    def to_json(self) -> dict[str, Any]:
        return {
            "function": self.target.label,
            "domain": " , ".join(str(d) for d in self.target.domains),
            "tolerance": self.recipe.tolerance,
            "kind": self.kind,
            "method": "hard",
            "keys": self.keys,
            "keys_per_axis": self.counts,
            "parameters": self.parameters,
            "bytes": self.bytes,
            "sharpness": self.sharpness,
            "dtype": self.recipe.semantics,
            "error_bound": self.error_bound,
            "terms": {t.name: t.value for t in self.terms},
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
    """Sizes, sharpness and bound of the head that `compile` would build, and why they are what they are.

    >>> from partita import Box, plan
    >>> plan("sin(3*x0) + x0*cos(2*x1)", Box([-1, -1], [1, 1]), tolerance=0.05).counts
    (83, 59)
    """
    target = make_target(function, domain, vectorize=vectorize)
    return make_plan(
        target, tolerance=tolerance, lipschitz=lipschitz, modulus=modulus, jumps=jumps, norm=norm, dtype=dtype, sharpness=sharpness, max_bytes=max_bytes
    )


def make_plan(
    target: Target,
    *,
    tolerance: float,
    lipschitz: float | Sequence[float] | None,
    modulus: Modulus | None,
    jumps: Jumps | None,
    norm: float | str,
    dtype: torch.dtype,
    sharpness: float,
    max_bytes: int,
) -> Plan:
    power = _norm(norm)
    tolerance = float(tolerance)
    if not (tolerance > 0 and math.isfinite(tolerance)):
        raise ToleranceError(f"tolerance is {tolerance}; expected a finite number > 0.")
    if dtype not in _DTYPES:
        raise UnsupportedError(f"dtype {dtype}: heads are certified in torch.float64 and torch.float32; cast afterwards at your own risk.")
    if not (sharpness >= 1 and math.isfinite(sharpness)):
        raise UnsupportedError(f"sharpness is {sharpness}; expected a finite κ = R h² of at least 1 (8 and more is called hard).")
    if power < 1:
        raise UnsupportedError(f"norm is {norm}; expected 'inf' or a number p ≥ 1.")
    knowledge = gather(target, norm=power, lipschitz=lipschitz, modulus=modulus, jumps=jumps)
    if isinstance(target.domain, PointCloud):
        return _plan_cover(target, knowledge, tolerance, power, dtype, sharpness, max_bytes)
    return _plan_grid(target, knowledge, tolerance, power, dtype, sharpness, max_bytes)


def _norm(norm: float | str) -> float:
    try:
        return math.inf if norm == "inf" else float(norm)
    except (TypeError, ValueError):
        raise UnsupportedError(f"norm is {norm!r}; expected 'inf' or a number p ≥ 1.") from None


# --- product grids -------------------------------------------------------------------------------------------------


def _plan_grid(
    target: Target, knowledge: Knowledge, tolerance: float, norm: float, dtype: torch.dtype, sharpness: float, max_bytes: int
) -> Plan:
    box = target.domain
    assert isinstance(box, Box)
    rule = _SpacingRule(knowledge.known, norm, sharpness, box, target.num_outputs)
    aim = tolerance
    for _ in range(60):
        counts = rule.counts(aim)
        _refuse_large(counts, rule, tolerance, target, dtype, max_bytes)
        recipe = _recipe(box, counts, norm, tolerance, dtype, sharpness)
        terms = _predicted_terms(target, knowledge, recipe)
        bound = total(terms)
        if bound <= tolerance:
            return _grid_plan(target, knowledge, recipe, terms, bound, rule)
        overhead = bound - terms[0].value - sum(t.value for t in terms if t.name == "jumps")
        if overhead >= tolerance:
            break
        aim = min(aim * (1 - 1e-7), aim * tolerance / bound)
        overhead_share = overhead / tolerance
        if overhead_share > 1e-9:
            aim = min(aim, (tolerance - overhead) * (1 - 1e-9)) if terms[0].value >= bound / 2 else aim
    raise ToleranceError(_floor_message(target, tolerance, terms, dtype))


def _recipe(box: Box, counts: tuple[int, ...], norm: float, tolerance: float, dtype: torch.dtype, sharpness: float) -> GridRecipe:
    spacing = box.sides / np.array(counts)
    rates = tuple(float(r) for r in np.asarray(sharpness / spacing**2, dtype=_DTYPES[dtype]).astype(float))
    geometry = [AxisGeometry(c, h, h, h / 2) for c, h in zip(counts, spacing)]
    return GridRecipe(counts, rates, window_for(geometry, rates, 1e-13), norm, tolerance, dtype)


def _predicted_terms(target: Target, knowledge: Knowledge, recipe: GridRecipe) -> list[Term]:
    box = target.domain
    assert isinstance(box, Box)
    axes = ProductGrid.uniform(box, recipe.counts, dtype=_DTYPES[recipe.dtype]).axes
    u = 2.0 ** (-24 if recipe.dtype == torch.float32 else -53)
    value_error = knowledge.magnitude * (u if recipe.dtype == torch.float32 else 0) + (64 * 2.0**-53 * knowledge.magnitude if target.graph else 0)
    facts = grid_facts(
        list(axes), box, recipe, outputs=target.num_outputs, largest=knowledge.magnitude, spread=2 * knowledge.magnitude, value_error=value_error
    )
    return grid_terms(facts, knowledge.known, recipe.norm)


def _grid_plan(target: Target, knowledge: Knowledge, recipe: GridRecipe, terms: list[Term], bound: float, rule: _SpacingRule) -> Plan:
    keys = math.prod(recipe.counts)
    parameters = keys * target.num_outputs + sum(recipe.counts) + len(recipe.counts)
    size = parameters * (4 if recipe.dtype == torch.float32 else 8)
    why = (
        f"{' × '.join(map(str, recipe.counts))} = {keys:,} keys",
        *rule.explain(recipe, terms),
        f"what is known of f was {knowledge.source}",
        f"{parameters:,} stored numbers, {size / 2**20:.3g} MiB in {recipe.semantics}; window of {' × '.join(str(min(2 * q, c)) for q, c in zip(recipe.half_windows, recipe.counts))} cells per query",
    )
    return Plan(target, knowledge, recipe, keys, parameters, size, rule.sharpness, bound, tuple(terms), why)


@dataclass(frozen=True, eq=False)
class _SpacingRule:
    """How wide cells may be: `C·(unit·√Σh_i²)^α·factor ≤ ε` or `Σ L_i·unit·h_i·factor ≤ ε`, whichever needs fewer cells."""

    known: Known
    norm: float
    sharpness: float
    box: Box
    outputs: int

    @property
    def factor(self) -> float:
        return 1.0 if math.isinf(self.norm) else (self.box.volume * self.outputs) ** (1 / self.norm)

    def unit(self, power: float) -> float:
        """`E|x − v|^p` to the 1/p for spacing 1 at this sharpness: ½ for a hard supremum, ½(p+1)^{−1/p} for a hard average."""
        moment = moment_bounds(AxisGeometry(64, 1.0, 1.0, 0.5), self.sharpness, power)[not math.isinf(self.norm)]
        return moment ** (1 / power)

    def counts(self, tolerance: float) -> tuple[int, ...]:
        """The fewest cells among what the known moduli allow."""
        if self.known.jumps is not None:
            return self._counts_with_jumps(tolerance)
        return min(self._candidates(tolerance), key=math.prod)

    def _candidates(self, tolerance: float) -> list[tuple[int, ...]]:
        found = []
        if self.known.modulus is not None:
            found.append(self._isotropic(tolerance))
        if self.known.per_axis is not None:
            found.append(self._per_axis(tolerance))
        return found

    def _isotropic(self, tolerance: float) -> tuple[int, ...]:
        modulus = self.known.modulus
        assert modulus is not None
        sides = self.box.sides
        if modulus.constant == 0:
            return (1,) * len(sides)
        power = 2.0 if math.isinf(self.norm) else max(modulus.exponent * self.norm, 2.0)
        radius = (tolerance / (modulus.constant * self.factor)) ** (1 / modulus.exponent) / self.unit(power)
        return _fewest(sides, [1.0] * len(sides), radius * radius, start=np.ceil(sides * math.sqrt(len(sides)) / radius))

    def _per_axis(self, tolerance: float) -> tuple[int, ...]:
        per_axis = self.known.per_axis
        assert per_axis is not None
        constants, sides = np.array(per_axis.constants), self.box.sides
        allowance = tolerance / (self.unit(1.0 if math.isinf(self.norm) else self.norm) * self.factor)
        counts, free = np.ones(len(sides)), constants > 0
        for _ in range(len(sides) + 1):  # water-filling: an axis that one cell settles leaves its share to the others
            share = (allowance - (constants * sides)[~free].sum()) / max(free.sum(), 1)
            settled = free & (constants * sides <= share)
            if not settled.any():
                break
            free &= ~settled
        if free.any():
            counts[free] = np.ceil((constants * sides)[free] / share)
        return _fewest(sides, constants, allowance, start=counts, square=False)

    def _counts_with_jumps(self, tolerance: float) -> tuple[int, ...]:
        """Jumps make the bound fall like h^{1/p}: bisect on a common refinement of the smooth counts."""
        low, high = 1e-6, 1.0
        for _ in range(50):
            middle = math.sqrt(low * high)
            low, high = (middle, high) if self._jump_bound(middle) * self.factor**0 <= tolerance else (low, middle)
        return self._shape(low)

    def _shape(self, fraction: float) -> tuple[int, ...]:
        return tuple(int(c) for c in np.ceil(self.box.sides / (fraction * self.box.sides.max())))

    def _jump_bound(self, fraction: float) -> float:
        counts = self._shape(fraction)
        recipe = _recipe(self.box, counts, self.norm, 1.0, torch.float64, self.sharpness)
        axes = tuple(AxisGeometry(c, s / c, s / c, s / c / 2) for c, s in zip(counts, self.box.sides))
        from partita.certify.grid_bounds import GridFacts

        facts = GridFacts(axes, recipe.rates, recipe.half_windows, self.box.volume, self.outputs, 1.0, 0.0, 0.0, 0.0, "float64")
        return total(grid_terms(facts, self.known, self.norm))

    def explain(self, recipe: GridRecipe, terms: list[Term]) -> list[str]:
        spacing = self.box.sides / np.array(recipe.counts)
        widths = f"{spacing.min():.4g}" if np.ptp(spacing) < 1e-3 * spacing.max() else " × ".join(f"{h:.3g}" for h in spacing)
        m = len(recipe.counts)
        approximation = terms[0]
        lines = []
        if approximation.theorem == "axis-telescoping":
            parts = " + ".join(f"{approximation.inputs[f'L{i}']:.4g}·{approximation.inputs[f'distance{i}']:.3g}" for i in range(m))
            lines.append(f"cells are {widths} wide: the error is at most Σ L_i·E|x_i − v_i| = {parts} ≤ {approximation.value:.4g}")
        else:
            c, e, d = (approximation.inputs[k] for k in ("constant", "exponent", "distance"))
            power = "" if e == 1 else f"^{e:g}"
            lines.append(f"cells are {widths} wide: the error is at most L·ρ{power} = {c:.4g}·{d:.4g}{power} ≤ {approximation.value:.4g}, ρ the covering radius")
        if m > 1 or not math.isinf(self.norm):
            lines.append(f"halving the tolerance multiplies the keys by about {2 ** (m / (self.known.modulus.exponent if self.known.modulus else 1)):.3g}: that is the price of {m} dimension{'s' * (m > 1)}")
        return lines


def _fewest(sides: Array, weights: Sequence[float] | Array, allowance: float, *, start: Array, square: bool = True) -> tuple[int, ...]:
    """Lower the counts one axis at a time while `Σ w_i h_i²` (or `Σ w_i h_i`) stays within the allowance; fewest cells win."""
    w = np.asarray(weights, dtype=float)
    power = 2 if square else 1

    def used(counts: Array) -> Array:
        return w * (sides / counts) ** power

    best: tuple[int, ...] | None = None
    for order in (np.argsort(-np.asarray(start)), np.argsort(np.asarray(start))):
        counts = np.maximum(np.asarray(start, dtype=float), 1.0)
        while used(counts).sum() > allowance * (1 + 1e-12):  # the rounding of the starting guess
            counts = np.where(w > 0, counts + 1, counts)
        for i in order:
            left = allowance - (used(counts).sum() - used(counts)[i])
            needed = 1.0 if w[i] == 0 else math.ceil(sides[i] * (w[i] / left) ** (1 / power) * (1 - 1e-13)) if left > 0 else counts[i]
            counts[i] = max(1.0, min(counts[i], needed))
        found = tuple(int(c) for c in counts)
        if best is None or math.prod(found) < math.prod(best):
            best = found
    assert best is not None
    return best


def _refuse_large(counts: tuple[int, ...], rule: _SpacingRule, tolerance: float, target: Target, dtype: torch.dtype, max_bytes: int) -> None:
    item = 4 if dtype == torch.float32 else 8
    size = (math.prod(counts) * target.num_outputs + sum(counts)) * item
    if size <= max_bytes:
        return
    low, high = tolerance, tolerance
    while (math.prod(rule.counts(high)) * target.num_outputs + sum(rule.counts(high))) * item > max_bytes:
        low, high = high, high * 2
    for _ in range(40):
        middle = math.sqrt(low * high)
        fits = (math.prod(rule.counts(middle)) * target.num_outputs + sum(rule.counts(middle))) * item <= max_bytes
        low, high = (low, middle) if fits else (middle, high)
    raise SizeError(
        f"tolerance {tolerance:g} needs {' × '.join(map(str, counts))} = {math.prod(counts):,} keys, {size / 2**30:,.3g} GiB of values; "
        f"max_bytes allows {max_bytes / 2**30:.3g} GiB. The best tolerance that fits is {high:.3g} "
        f"({math.prod(rule.counts(high)):,} keys); or raise max_bytes."
    )


def _floor_message(target: Target, tolerance: float, terms: list[Term], dtype: torch.dtype) -> str:
    floor = sum(t.value for t in terms if t.name not in ("approximation", "jumps", "score rounding"))
    parts = ", ".join(f"{t.name} {t.value:.3g}" for t in terms)
    other = " Use dtype=torch.float64," if dtype == torch.float32 else ""
    return (
        f"tolerance {tolerance:g} is below what {str(dtype).removeprefix('torch.')} can promise for {target.label}: rounding alone is "
        f"about {floor:.3g} ({parts}).{other} Ask for more than {1.5 * floor:.3g}."
    )


# --- covers --------------------------------------------------------------------------------------------------------


def _plan_cover(
    target: Target, knowledge: Knowledge, tolerance: float, norm: float, dtype: torch.dtype, sharpness: float, max_bytes: int
) -> Plan:
    cloud, modulus = target.domain, knowledge.known.modulus
    assert isinstance(cloud, PointCloud)
    if not math.isinf(norm) or modulus is None:
        raise UnsupportedError("a PointCloud has no volume: norm must be 'inf', and the Lipschitz constant one number for the Euclidean distance.")
    slack = min(0.5, 4.0 / sharpness) * 1e-2
    rounding = 1e-5 if dtype == torch.float32 else 1e-12
    allowed = math.inf if modulus.constant == 0 else (tolerance * (1 - rounding) / modulus.constant) ** (1 / modulus.exponent) / math.sqrt(1 + slack)
    radius = allowed * (1 - rounding) - cloud.fill_distance
    if radius < 0:
        best = modulus.constant * (cloud.fill_distance * math.sqrt(1 + slack)) ** modulus.exponent * (1 + 2 * rounding)
        raise ToleranceError(
            f"tolerance {tolerance:g} is below ω(fill_distance) = {best:.4g}: between samples {cloud.fill_distance:g} apart nothing better can be "
            "promised. Give more points, or ask for more."
        )
    cover = farthest_point_cover(cloud.flat, radius=radius)
    total_radius = cover.radius + cloud.fill_distance
    cells = len(cover.centers)
    gap = _smallest_gap(cover.centers)
    rate = rate_for(total_radius, cells, slack) if total_radius > 0 else 8 * (math.log(max(cells, 2)) + 45) / max(gap, 1e-300) ** 2
    rate = float(np.asarray(rate, dtype=_DTYPES[dtype])) if cells > 1 else 1.0
    recipe = CoverRecipe(cover, rate, tolerance, dtype)
    parameters = cells * (cloud.dimension + target.num_outputs) + 1
    why = (
        f"{cells:,} keys: balls of radius {cover.radius:.4g} that cover {len(cloud.points):,} points, {cloud.fill_distance:g} between them",
        f"the error is at most L·√(ρ² + 2W/R): ρ = {total_radius:.4g} must stay below tolerance/L = {tolerance / max(modulus.constant, 1e-300):.4g}",
        f"what is known of f was {knowledge.source}",
        f"{parameters:,} stored numbers",
    )
    softness = rate * total_radius**2
    predicted = modulus.constant * (total_radius * math.sqrt(1 + slack)) ** modulus.exponent
    return Plan(target, knowledge, recipe, cells, parameters, parameters * (4 if dtype == torch.float32 else 8), softness, predicted, (), why)


def _smallest_gap(centers: Array) -> float:
    from scipy.spatial import KDTree

    if len(centers) < 2:
        return 1.0
    distance, _ = KDTree(centers).query(centers, k=2)
    return float(distance[:, 1].min())
