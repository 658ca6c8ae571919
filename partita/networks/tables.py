"""Tables: a smooth function of one or two numbers as one small head with constant values, for use inside larger networks."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from partita.arithmetic.precision import Precision
from partita.arithmetic.rounding import mul_up, up
from partita.errors import NotContinuousError, SizeError
from partita.functions.derivatives import lipschitz_bounds
from partita.functions.graph import Graph
from partita.functions.regularity import AxisLipschitz, Knowledge, Known
from partita.functions.target import Target, graph_target
from partita.geometry.domains import Array, Box
from partita.heads.grid_head import GridHead
from partita.methods.grids import GridDraft
from partita.methods.hard import values_at_centers
from partita.methods.request import Request
from partita.methods.soft_values import soft_construction
from partita.proofs.claim import Construction
from partita.search.grid_fit import fit_grid

__all__ = ["Table", "TableGrid", "tabulate"]

_HARD_SHARPNESS = 8.0
_MOST_KEYS = 1 << 16


@dataclass(frozen=True)
class TableGrid:
    """Where the keys of a table come from: centers `middle + slope/rate` on a product grid, the last axis fastest.

    It tells a checker where to look. Bounds do not use it.

    Attributes:
        counts: keys along each axis.
        rates: the inverse temperature of each axis.
        middle: what the scores are relative to.
    """

    counts: tuple[int, ...]
    rates: tuple[float, ...]
    middle: tuple[float, ...]


@dataclass(frozen=True, eq=False)
class Table:
    """`z ↦ Σ_j softmax_j(slopes_j·z + offsets_j)·values_j`, within `error` of f on the box in exact arithmetic.

    Attributes:
        slopes: `(keys, m)`.
        offsets, values: `(keys,)`.
    """

    slopes: Array
    offsets: Array
    values: Array
    box: Box
    error: float
    construction: Construction
    grid: TableGrid

    @property
    def spread(self) -> float:
        return float(up(np.ptp(self.values)))

    def rounding(self, semantics: str) -> float:
        """What dot-product scores, a dense softmax and sums in the dtype add, tensors stored in it: `δ/2·spread + γ max|V|`."""
        u = Precision.of(semantics).unit
        reach = np.maximum(np.abs(self.box.lo), np.abs(self.box.hi)).ravel()
        score = float((np.abs(self.slopes) @ reach + np.abs(self.offsets)).max())
        delta = mul_up(1.01 * u, 2 * (len(reach) + 6) * score + 24)
        largest = float(np.abs(self.values).max())
        return mul_up(1.0, 0.5 * delta * self.spread + 1.01 * u * (len(self.values) + 32) * largest)


def tabulate(graph: Graph, box: Box, tolerance: float, *, lipschitz: tuple[float, ...] | None = None) -> Table:
    """The smallest table found whose *proved* error is within the tolerance: fitted values, or values at centers where f has kinks.

    Args:
        lipschitz: per axis, if somebody else has proved them; else they are proved here.

    Raises:
        SizeError: kinks, and a tolerance that would need more than 65,536 keys.
        NotContinuousError: f jumps.
    """
    constants = _proved_lipschitz(graph, box) if lipschitz is None else lipschitz
    target = graph_target(graph, (box,), graph.infix())
    built = _fitted(target, box, tolerance) or _at_centers(target, box, constants, tolerance)
    head = built.head
    assert isinstance(head, GridHead)
    scores, middle = head.affine_scores(shift=True), head.middle()
    rates = head.inverse_temperature.double().tolist()
    return Table(
        slopes=scores.slopes,
        offsets=scores.offsets - scores.slopes @ middle,
        values=scores.values[:, 0],
        box=box,
        error=built.certificate.error_bound,
        construction=built,
        grid=TableGrid(tuple(map(len, head.axes)), tuple(rates), tuple(middle.tolist())),
    )


def _proved_lipschitz(graph: Graph, box: Box) -> tuple[float, ...]:
    bounds = lipschitz_bounds(graph, box.lo.ravel(), box.hi.ravel(), relative_gap=0.1, max_boxes=20_000)
    if not bounds.is_lipschitz:
        raise NotContinuousError(
            f"{graph.infix()} jumps, or is infinitely steep, near {bounds.rough_lo[0].tolist()}; a table needs a "
            f"continuous function."
        )
    return tuple(float(c) for c in bounds.per_axis)


def _fitted(target: Target, box: Box, tolerance: float) -> Construction | None:
    """Fitted values, sharpened twice if the proof falls short of what was sampled; None where the function has kinks."""
    for share in (0.9, 0.3, 0.1):
        fit = fit_grid(target, box, tolerance=share * tolerance, outputs=1, max_spread=1e6)
        if not fit.fitted:
            return None
        windows = tuple((count + 1) // 2 for count in fit.counts)
        draft = GridDraft(fit.counts, fit.rates, windows, fit.ghosts, fit.values)
        built = soft_construction(Request(target, tolerance), draft, None, name="fitted", theorem="fitted-values")
        if built.certificate.error_bound <= tolerance:
            return built
    return None


def _at_centers(target: Target, box: Box, lipschitz: tuple[float, ...], tolerance: float) -> Construction:
    """Values at the centers of a grid at κ = 8: error `Σ_i L_i h_i/2` and a little."""
    share = 0.98 * tolerance / box.dimension
    counts = tuple(max(1, math.ceil(1.08 * c * s / 2 / share)) for c, s in zip(lipschitz, box.sides))
    keys = math.prod(counts)
    if keys > _MOST_KEYS:
        raise SizeError(
            f"no fitted table of {target.label} was found (kinks, or too small a tolerance), and a table of values at "
            f"centers within {tolerance:.2g} needs {' × '.join(map(str, counts))} = {keys:,} keys, more than "
            f"{_MOST_KEYS:,}. Allow a larger error, or shrink the boxes."
        )
    rates = tuple(float(_HARD_SHARPNESS / (s / n) ** 2) for s, n in zip(box.sides, counts))
    windows = tuple((count + 1) // 2 for count in counts)
    known = Known(per_axis=AxisLipschitz(tuple(float(c) for c in lipschitz)))
    knowledge = Knowledge(known, declared=False, magnitude=math.inf, source="proved by interval arithmetic")
    return values_at_centers(Request(target, tolerance), GridDraft(counts, rates, windows), knowledge)
