"""What a claim assumes besides arithmetic: moduli of f, which are attacked if the caller declared them, and where f is defined."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from partita.errors import LipschitzContradictedError
from partita.functions.regularity import Known, sample_pairs
from partita.functions.target import Target
from partita.geometry.domains import Array
from partita.proofs.certificate import Assumption

__all__ = ["PairTable", "steepest_table", "undefined_roots", "vouched", "worst_ratio"]


_PLACES = 4096  # boxes in which f is looked for a value
_PAIRS = 1024
_REMEMBERED = 512  # points, of which all pairs are tested
_MODELLED, _STEEPEST = 1 << 14, 8  # pairs


def vouched(target: Target, known: Known, *, declared: bool, table: PairTable | None = None) -> list[Assumption]:
    """The moduli as assumptions, attacked where the caller vouches for them: on sampled pairs, and on `table` if there is one.

    Raises:
        LipschitzContradictedError: a pair of points moves faster than declared.
    """
    statements = [str(k) for k in (known.modulus, known.per_axis) if k is not None]
    partial = undefined_roots(target) + _undefined_places(target)
    if not declared:
        off = "" if known.jumps is None else f", {known.jumps}"
        return [Assumption(" and ".join(statements) + off, "interval arithmetic", about="regularity"), *partial]
    tables = [t for t in (_answered_table(target), _sampled_table(target), table) if t is not None]
    ratio = max((worst_ratio(target.label, known, t) for t in tables), default=0.0)
    attack = " and ".join(t.name for t in tables)
    if known.jumps is not None:
        found = [Assumption(s, "caller", about="regularity") for s in statements]
        found.append(Assumption(str(known.jumps), "caller", ratio, f"its height, on {attack}", "regularity"))
    else:
        found = [Assumption(s, "caller", ratio, attack, "regularity") for s in statements]
    found += partial
    if target.graph is None:
        text = "f always returns the same value at the same point, as it did when probed"
        found.append(Assumption(text, "caller", about="function"))
    return found


def undefined_roots(target: Target) -> list[Assumption]:
    """The assumption about points where a square root or an acosh is undefined, for expressions that have one."""
    used = set() if target.graph is None else {node.operation for node in target.graph.nodes}
    names = [name for operation, name in (("sqrt", "a square root"), ("acosh", "an acosh")) if operation in used]
    return [Assumption(f"where {n} is undefined, the claim takes its value to be 0", "construction") for n in names]


def _undefined_places(target: Target) -> list[Assumption]:
    """A modulus of f covers the points where f is defined; stated unless f is proved to be defined everywhere."""
    if target.graph is None:
        return []
    box = target.box
    parts = max(1, int(_PLACES ** (1 / box.dimension)))
    radius = box.sides / parts / 2
    reach = radius * (1 + 1e-9) + 1e-15 * np.maximum(np.abs(box.lo), np.abs(box.hi)).ravel()
    middles = [a + r * (2 * np.arange(parts) + 1) for a, r in zip(box.lo.ravel(), radius)]
    centers = np.stack([g.ravel() for g in np.meshgrid(*middles, indexing="ij")], axis=1)
    if target.region is not None:
        centers = centers[~target.region.outside(centers - reach, centers + reach)]
    if np.isfinite(target.graph.taylor(centers, np.broadcast_to(reach, centers.shape), 1).remainder).all():
        return []
    return [Assumption("the claim covers only the points of the domain at which f is defined", "construction")]


@dataclass(frozen=True, eq=False)
class PairTable:
    """Pairs of points `(n, m)` and how far f moves between them, `(n,)`; `scale` is max|f|, which f itself rounds relative to."""

    x: Array
    y: Array
    moved: Array
    scale: float
    name: str


def _sampled_table(target: Target) -> PairTable | None:
    x, y = sample_pairs(
        target.domain, pairs=_PAIRS if target.graph is not None else target.calls.allowance(2 * _PAIRS) // 2
    )
    if not len(x):
        return None
    f_x, f_y = target(x), target(y)
    return PairTable(x, y, np.abs(f_x - f_y).max(axis=1), float(np.abs(f_x).max()), f"{len(x):,} pairs")


def _answered_table(target: Target) -> PairTable | None:
    """All pairs of points at which a black box was evaluated anyway."""
    points, values = (part[:_REMEMBERED] for part in target.answered())
    i, j = np.triu_indices(len(points), 1)
    moved = np.abs(values[i] - values[j]).max(axis=1, initial=0.0)
    name = f"all pairs of {len(points):,} points"
    return PairTable(points[i], points[j], moved, float(np.abs(values).max()), name) if len(i) else None


def steepest_table(target: Target, model: Callable[[Array], Array]) -> PairTable:
    """Pairs between which a model of a black box moves fastest, with f itself there: a few evaluations where they matter."""
    x, y = sample_pairs(target.domain, pairs=_MODELLED, seed=2)
    moved = np.abs(model(x) - model(y)).max(axis=1) / np.sqrt(((x - y) ** 2).sum(axis=1))
    near = np.argsort(moved)[-_STEEPEST:]
    f_x, f_y = target(x[near]), target(y[near])
    scale = float(np.abs(f_x).max(initial=0.0))
    return PairTable(
        x[near], y[near], np.abs(f_x - f_y).max(axis=1), scale, f"the {_STEEPEST} steepest pairs of a model"
    )


def worst_ratio(label: str, known: Known, table: PairTable) -> float:
    """The largest observed/allowed movement; an error if it exceeds 1 by more than rounding can explain."""
    step = np.abs(table.y - table.x)
    distance = np.sqrt((step**2).sum(axis=1))
    noise = 1e-14 * table.scale
    worst = 0.0
    for allowed, text, least in _allowances(known, step, distance):
        with np.errstate(divide="ignore", over="ignore"):
            ratio = np.where(table.moved > noise, (table.moved - noise) / np.maximum(allowed, 1e-300), 0.0)
        i = int(ratio.argmax())
        worst = max(worst, float(ratio[i]))
        if ratio[i] > 1 + 1e-9:
            raise LipschitzContradictedError(
                f"{label} moves by {table.moved[i]:.6g} between {table.x[i].tolist()} and {table.y[i].tolist()} "
                f"(distance {distance[i]:.3g}), {ratio[i]:.4g} times what the declared {text} allows; "
                f"{least(float(ratio[i]))}. "
                "(Rounding inside f counts too: a function that returns float32 needs a little more than its exact constant.)"
            )
    return worst


def _allowances(known: Known, step: Array, distance: Array) -> list[tuple[Array, str, Callable[[float], str]]]:
    """How far f may move between points `step` apart, by each thing that is known; across a jump by its height only.

    With the name of what is known, and what to declare instead if f moves a number of times as far.
    """

    def at_least(value: float) -> Callable[[float], str]:
        return lambda ratio: f"declare at least {ratio * value:.6g}"

    if known.jumps is not None:
        height = known.jumps.height
        return [(np.full_like(distance, height), f"height {height:g} of its jumps", at_least(height))]
    found = []
    if known.modulus is not None:
        constant, multiply = known.modulus.constant, lambda ratio: f"multiply it by {ratio:.6g}"
        name = "modulus" if known.modulus.expression else f"constant {constant:g}"
        found.append((known.modulus.at(distance), name, multiply if known.modulus.expression else at_least(constant)))
    if known.per_axis is not None:
        constants = known.per_axis.constants
        larger = at_least(constants[0]) if len(constants) == 1 else lambda ratio: f"multiply them by {ratio:.6g}"
        found.append((step @ np.array(constants), f"constants {constants} per axis", larger))
    return found
