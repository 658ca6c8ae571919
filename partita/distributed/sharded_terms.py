"""What running a head in slices adds to its error: the terms of one process, with the roundings of the merge counted in."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import astuple, dataclass, fields, replace
from typing import Any

import numpy as np
from torch import Tensor

from partita.arithmetic.precision import Precision
from partita.arithmetic.rounding import add_up, exp_up, expm1_up, mul_up, sub_up
from partita.errors import UnsupportedError
from partita.geometry.domains import Array
from partita.geometry.moments import AxisGeometry, soft_maximum_gap
from partita.heads.grid_head import GridHead
from partita.heads.head import DivisibleHead, numbers
from partita.heads.scattered_head import ScatteredHead, exponent_cut
from partita.proofs.certificate import Term
from partita.proofs.running import EXP_UNITS, SCORE_UNITS, added_terms

__all__ = ["OwnSizes", "WholeHead", "merged_terms", "own_sizes"]

_INFLATE = 1 + 1e-12  # covers the float64 rounding of sums of a few terms


@dataclass(frozen=True)
class WholeHead:
    """What all processes know.

    Attributes:
        num_keys: of the whole head.
        ranks: how many processes.
        dimension: m.
        precision: of the dtype.
        score_units: roundings of a score relative to its size.
        exponentials: how many make a weight.
        affine: whether values depend on z.
    """

    num_keys: int
    ranks: int
    dimension: int
    precision: Precision
    score_units: float
    exponentials: int
    affine: bool

    @classmethod
    def of(cls, head: DivisibleHead, ranks: int) -> WholeHead:
        """From the head before it is cut."""
        m, grid = head.dimension, isinstance(head, GridHead)
        units = (SCORE_UNITS, m) if grid else (float(m + 8), 1)
        affine = head.state_dict().get("value_slopes") is not None
        return cls(head.num_keys, ranks, m, Precision.of(head.dtype), *units, affine)


@dataclass(frozen=True)
class OwnSizes:
    """What a slice contributes, for inputs in a box.

    Attributes:
        dropped: the largest share of its weight that windows or cuts leave out.
        operations: that a term of a sum passes through.
        largest: of the values. reach: how far slopes carry, 0 for constant values.
        gap: the largest gap between neighbouring centers on the axis that is cut. first, last: the ends there. rate: R on it.
        others: `Σ_i R_i ρ_i²/2` over the other axes, ρ_i their covering radii.
        nearest: a bound of the best key's `R(|z − c|² − p)/2`, infinite for grids. power: `R·max|p|`.
        lows, highs: the least and the largest value of each output.
    """

    dropped: float = 0.0
    operations: float = 0.0
    largest: float = 0.0
    reach: float = 0.0
    gap: float = 0.0
    first: float = math.inf
    last: float = -math.inf
    rate: float = 0.0
    others: float = 0.0
    nearest: float = math.inf
    power: float = 0.0
    lows: tuple[float, ...] = ()
    highs: tuple[float, ...] = ()

    @classmethod
    def of(cls, row: Sequence[float]) -> OwnSizes:
        """From `numbers`."""
        plain = len(astuple(cls())) - 2
        outputs = (len(row) - plain) // 2
        known: dict[str, Any] = {f.name: number for f, number in zip(fields(cls), row[:plain])}
        return cls(**known, lows=tuple(row[plain : plain + outputs]), highs=tuple(row[plain + outputs :]))

    def numbers(self) -> list[float]:
        """All of them in a row."""
        *plain, lows, highs = astuple(self)
        return [*map(float, plain), *lows, *highs]


def own_sizes(
    part: DivisibleHead | None, axis: int, outside: Sequence[Tensor], outputs: int, lo: Array, hi: Array
) -> OwnSizes:
    """The sizes of a slice.

    Args:
        part: its head; None if it is empty.
        axis: that is cut.
        outside: the nearest center of the slices on either side, for a grid.
        outputs: how many.
        lo, hi: the box of the inputs as the head sees them, `(m,)`.
    """
    if part is None:
        return OwnSizes(lows=(math.inf,) * outputs, highs=(-math.inf,) * outputs)
    held = part.state_dict()
    low, high = held["values"].aminmax(dim=0)
    affine, m = held.get("value_slopes") is not None, len(lo)
    common = OwnSizes(
        largest=part.largest_value(lo, hi) * (_INFLATE if affine else 1.0),
        operations=float(m + 16 + (m + 4) * affine),
        lows=tuple(low.double().tolist()),
        highs=tuple(high.double().tolist()),
    )
    if isinstance(part, GridHead):
        return _grid_sizes(common, part, axis, outside, lo, hi)
    if isinstance(part, ScatteredHead):
        return _scattered_sizes(common, part, lo, hi)
    raise UnsupportedError(
        f"no bound is known for slices of a {type(part).__name__}; expected a GridHead or a ScatteredHead."
    )


def _grid_sizes(
    common: OwnSizes, part: GridHead, axis: int, outside: Sequence[Tensor], lo: Array, hi: Array
) -> OwnSizes:
    axes, rates, m = [numbers(a) for a in part.axes], numbers(part.inverse_temperature).tolist(), len(lo)
    covering = [AxisGeometry.of(a, x, y).covering_radius for a, x, y in zip(axes, lo, hi)]
    centers = np.sort(np.concatenate([axes[axis], *map(numbers, outside)]))
    reach = 0.0
    if part.origin is not None:
        origin = numbers(part.origin)
        reach = float(np.maximum(np.abs(lo - origin), np.abs(hi - origin)).sum()) * _INFLATE
    return replace(
        common,
        dropped=part.dropped(),
        operations=common.operations + 4.0 * sum(part.widths) + 6 * m,
        reach=reach,
        gap=AxisGeometry.of(centers, centers[0], centers[-1]).gap_max,
        first=float(centers[0]),
        last=float(centers[-1]),
        rate=rates[axis],
        others=add_up(0.0, *(mul_up(0.5, r, d, d) for i, (r, d) in enumerate(zip(rates, covering)) if i != axis)),
    )


def _scattered_sizes(common: OwnSizes, part: ScatteredHead, lo: Array, hi: Array) -> OwnSizes:
    centers, rate = numbers(part.centers), float(part.inverse_temperature)
    powers = np.zeros(len(centers)) if part.powers is None else numbers(part.powers)
    far = np.maximum(np.abs(centers - lo), np.abs(hi - centers))
    square = (far * far).sum(axis=1)
    nearest = float((square - powers + 1e-14 * (square + np.abs(powers))).min())
    cut = exponent_cut(len(centers))
    return replace(
        common,
        dropped=mul_up(float(len(centers)), exp_up(-cut * (1 - 1e-6))),
        operations=common.operations + 4.0 * len(centers),
        reach=0.0 if part.value_slopes is None else float(far.sum(axis=1).max()) * _INFLATE,
        nearest=mul_up(0.5, rate, max(nearest, 0.0)),
        power=mul_up(rate, float(np.abs(powers).max())),
    )


def merged_terms(
    head: WholeHead, slices: Sequence[OwnSizes], lo: float, hi: float, mean_error: float | None = None
) -> list[Term]:
    """Bounds of `|sharded(z) − net(z)|`. *Theorem*: `merged-slices`.

    A weight passes through the scores of its slice three times: in its numerator, in the slice's own sum, and in the log-sum-exp
    that the slices are merged by. With `T = ln N + 45`, keys that trail the best one by more than 2T count as left out, so that no
    score that matters is larger than `σ = min_j S_j + 2T`. Under the weights the mean of S is at most `min_j S_j + W((N−1)/e)`.

    Args:
        head: what all processes know.
        slices: the sizes of all of them.
        lo, hi: the ends of the box on the axis that is cut.
        mean_error: a bound of `Σ_j w_j|V_j − f|`, or None.
    """
    p, m, cut = head.precision, head.dimension, exponent_cut(head.num_keys)
    held = [s for s in slices if s.highs and s.highs[0] >= s.lows[0]]
    best = min(s.nearest for s in held)
    if math.isfinite(held[0].first):  # a grid
        ends = min(s.first for s in held), max(s.last for s in held)
        radius = max(max(s.gap for s in held) / 2, sub_up(ends[0], lo), sub_up(hi, ends[1]))
        best = add_up(mul_up(0.5, held[0].rate, radius, radius), held[0].others)
    size = add_up(best, max(s.power for s in held))
    others = (3 * head.exponentials + 1) * EXP_UNITS, (m + 12) * (cut - 45)

    def score_error(size: float) -> float:
        return mul_up(p.unit, add_up(mul_up(3 * head.score_units + m + 8, size), *others), _INFLATE)

    delta = score_error(add_up(size, 2 * cut))
    mean = mul_up(2.1, score_error(add_up(size, soft_maximum_gap(head.num_keys))))
    beyond = mul_up(4.0 * head.num_keys, exp_up(-cut * (1 - 1e-5)), exp_up(2 * min(delta, 2.0)))
    largest = max(s.largest for s in held)
    outputs = zip(*(zip(s.lows, s.highs) for s in held))
    spread = max(sub_up(max(high for _, high in ends), min(low for low, _ in ends)) for ends in map(list, outputs))
    operations = max(s.operations for s in held) + 2.0 * head.ranks + 16
    mass = min(add_up(max(s.dropped for s in held), beyond), 1.0)
    window, scores, summation = added_terms(
        mass_left_out=mass,
        score_error=min(delta, mean) if delta <= 0.01 else delta,
        operations=operations,
        unit_roundoff=p.unit,
        largest=largest,
        spread=mul_up(2.0, largest) if head.affine else spread,
    )
    lost = mul_up(operations, p.tiniest, max(s.reach for s in held))  # of averaged slopes
    if mean_error is not None and delta < 300:  # the weights that are kept are larger by 1/(1 − mass)
        moved = mul_up(add_up(expm1_up(mul_up(2.0, delta)), 2 * mass if mass < 0.5 else math.inf), mean_error)
        if moved < scores.value:
            scores = replace(scores, value=moved, formula="(e^{2δ} − 1) · mean error", inputs={"delta": delta})
    return [window, scores, replace(summation, value=add_up(summation.value, lost))]
