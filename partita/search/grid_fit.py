"""Fitted heads: the smallest product grid of softmax keys, and values on it, that stay within a tolerance of f on a box.

f is evaluated only inside the box, in relative units, so the box may be far from zero, and its sides and the values of f may
have any scale. Errors here are sampled: estimates, not bounds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from typing import Literal

import numpy as np

from partita.arithmetic.progress import Progress, report
from partita.errors import BudgetSpentError, ShapeError, ToleranceError
from partita.geometry.domains import Array, Box
from partita.search.axis_fit import AxisChoice
from partita.search.grid_search import Goal, GridSearch, Trial
from partita.search.sampled_function import Ask, Sampled, SamplesSpent
from partita.search.tensor_fit import spread_of

__all__ = ["GridFit", "Status", "fit_grid", "fit_values"]

Status = Literal["fitted", "stagnates", "too many samples", "rounding", "stopped"]

_SAMPLES = 4_000_000


@dataclass(frozen=True, eq=False)
class GridFit:
    """A product grid with fitted values: the smallest within the tolerance, or the best found and why it is not.

    Attributes:
        status: "fitted"; "stagnates": a kink, a jump or noise keeps the error from falling, or an axis would need more
            keys than are considered (204 in one dimension, 128 in two, 48 in three); "too many samples": f would have
            to be evaluated more often than allowed; "rounding": the dtype or the allowed spread has no room for such values;
            "stopped": a budget was spent.
        counts, ghosts, sharpness, rates: on each axis P_i (ghosts included), g_i at each end, κ_i = R_i h_i², R_i.
        values: `(ΠP_i, out)`, cells numbered as by ProductGrid; empty when nothing could be tried.
        error_estimate: the largest |f − net| seen at the fit's samples and at others kept out of it; infinite without values.
        samples: the number of points at which f was evaluated.
        size: the largest |f| among the first of them.
    """

    status: Status
    counts: tuple[int, ...]
    ghosts: tuple[int, ...]
    sharpness: tuple[float, ...]
    rates: tuple[float, ...]
    values: Array
    error_estimate: float
    samples: int
    size: float = 0.0

    @property
    def fitted(self) -> bool:
        return self.status == "fitted"

    @property
    def num_cells(self) -> int:
        return len(self.values)

    @property
    def largest(self) -> float:
        """max |V|."""
        return float(np.abs(self.values).max(initial=0.0))

    @property
    def spread(self) -> float:
        """max V − min V of the worst component: rounding of the head is proportional to it."""
        return spread_of(self.values)


def fit_grid(
    ask: Ask,
    box: Box,
    *,
    tolerance: float,
    outputs: int,
    storage: type[np.floating] = np.float64,
    max_spread: float = math.inf,
    max_value: float = math.inf,
    max_samples: int = _SAMPLES,
    progress: Progress | None = None,
) -> GridFit:
    """The smallest fitted grid found with `|f − net| ≤ tolerance` wherever it was looked at.

    `net(x) = Σ_k V_k Π_i softmax(−R_i(x_i − c_i)²/2)_{k_i}`, centers `ProductGrid.uniform(box, counts, ghosts=ghosts)`.

    Args:
        ask: flat points `(n, m)` of the box to values `(n, out)`.
        tolerance: in the units of f; nine tenths of it are used.
        storage: centers, rates and values are rounded to this dtype before the error is estimated.
        max_spread: the largest max V − min V that the caller's arithmetic can bear.
        max_value: the largest |V| allowed.
        max_samples: the largest number of points at which f may be evaluated.

    Raises:
        ToleranceError: a tolerance that is not a positive number.

    >>> fit = fit_grid(lambda z: np.tanh(5 * z), Box([-1], [1]), tolerance=1e-8, outputs=1)
    >>> fit.status, fit.counts, fit.error_estimate < 1e-8
    ('fitted', (2,), True)
    """
    if not (tolerance > 0 and math.isfinite(tolerance)):
        raise ToleranceError(f"fit_grid: the tolerance is {tolerance}, expected a finite number > 0.")

    def work(search: GridSearch) -> Status:
        if search.run():
            return "fitted"
        return "rounding" if search.goal.below_rounding or search.spread_too_far else "stagnates"

    f = Sampled(ask, box, outputs, max_samples)
    return _searched(f, lambda: Goal.of(f, tolerance, storage, max_spread, max_value), work, progress)


def fit_values(
    ask: Ask,
    box: Box,
    counts: Sequence[int],
    *,
    outputs: int,
    ghosts: Sequence[int] | None = None,
    rates: Sequence[float] | None = None,
    storage: type[np.floating] = np.float64,
    max_spread: float = math.inf,
    max_samples: int = _SAMPLES,
) -> GridFit:
    """Values for a grid of given size, their largest error nearly as small as it can be.

    Ghosts and rates are searched unless both are given. The status is "fitted" whatever the error: see `error_estimate`.

    Args:
        counts, ghosts, rates: P_i (ghosts included), g_i and R_i for each axis; the rest as for `fit_grid`.

    Raises:
        ShapeError: not one count (and one number of ghosts, one rate) for each axis.
    """
    given = [x for x in (counts, ghosts, rates) if x is not None]
    if any(len(x) != box.dimension for x in given) or len(given) == 2:
        raise ShapeError(
            f"fit_values over R^{box.dimension}: found {len(counts)} counts, ghosts {ghosts} and rates {rates}; "
            "expected one count for each axis, and ghosts and rates for each axis or neither."
        )

    def work(search: GridSearch) -> Status:
        axes, _ = search.draw(search.f.first_lines())
        if ghosts is None or rates is None:
            search.squeeze(search.balanced(axes, counts))
        else:
            search.squeeze([AxisChoice(p, g, 1.0) for p, g in zip(counts, ghosts)], tuple(rates))
        return "fitted"

    f, modest = Sampled(ask, box, outputs, max_samples), math.sqrt(float(np.finfo(storage).eps))
    return _searched(f, lambda: Goal.of(f, modest * f.scale, storage, max_spread), work, None)


@np.errstate(all="ignore")  # numbers out of range end in a refusal
def _searched(
    f: Sampled,
    goal: Callable[[], Goal],
    work: Callable[[GridSearch], Status],
    progress: Progress | None,
) -> GridFit:
    """What a search for the goal leaves behind, also when it runs out of samples, or of time with a grid that meets the goal."""
    search: GridSearch | None = None
    status: Status = "too many samples"
    with _one_thread(), suppress(SamplesSpent):
        f.find_scale()
        aim = goal()
        if not _storable(f, aim.storage):
            return _result("rounding", f, None)
        search = GridSearch(f, aim, partial(report, progress))
        try:
            status = work(search)
        except BudgetSpentError:
            status = "stopped"
            if search.best is None:
                search.settle()
    if search is None:
        return _result(status, f, None)
    return _result("fitted" if search.met else status, f, search.best)


def _one_thread() -> AbstractContextManager[object]:
    """The matrices are small: BLAS threads that wait for one another on a busy machine cost more than they give."""
    try:
        from threadpoolctl import threadpool_limits
    except ImportError:
        return nullcontext()
    out: AbstractContextManager[object] = threadpool_limits(limits=1, user_api="blas")
    return out


def _storable(f: Sampled, storage: type[np.floating]) -> bool:
    """Whether the dtype has room for f's values and for κ/h² with every sharpness and spacing that the search may choose."""
    limits, logs = np.finfo(storage), 2 * np.log10(f.box.sides)
    rates = (logs < -4 - math.log10(limits.tiny)).all() and (logs > 8 - math.log10(limits.max)).all()
    return bool(rates) and f.scale * max(f.size, 1.0) < float(limits.max) / 16


def _result(status: Status, f: Sampled, trial: Trial | None) -> GridFit:
    if trial is None:
        none = (0,) * f.box.dimension
        return GridFit(status, none, none, (), (), np.empty((0, f.outputs)), math.inf, f.asked)
    spacing = [s / (c.count - 2 * c.ghosts) for s, c in zip(f.box.sides.tolist(), trial.choices)]
    return GridFit(
        status,
        tuple(c.count for c in trial.choices),
        tuple(c.ghosts for c in trial.choices),
        tuple(r * h * h for r, h in zip(trial.rates, spacing)),
        trial.rates,
        trial.values,
        trial.error * f.scale,
        f.asked,
        f.size * f.scale,
    )
