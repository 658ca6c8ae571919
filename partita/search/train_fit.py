"""Many variables: the values of a product-grid head as a tensor train, fitted to a black box by cross approximation.

On a grid of Chebyshev points the samples of f are a tensor with one mode per variable. If its ranks are low, a few of its
fibers determine it. Nothing here is proved: errors are sampled at held-out points and are estimates, not bounds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from partita.arithmetic.precision import DOUBLE
from partita.errors import DomainError, ToleranceError
from partita.geometry.domains import Array, Box
from partita.geometry.grid import ProductGrid
from partita.heads.train_head import TrainHead, rounded_cores
from partita.proofs.certificate import Witness
from partita.proofs.proof import Progress
from partita.proofs.worst_point import search_worst
from partita.search.train_axes import (
    FRESH,
    Ask,
    Asked,
    Spent,
    TrainAxis,
    TrainLimits,
    choose_axis,
    fibers_of,
    landmarks,
    last_word,
    place,
)
from partita.search.train_cross import Cross, Index, cross_approximation, entries, worst_entry

__all__ = ["TrainFit", "TrainLimits", "fit_train", "held_out_error"]


@dataclass(frozen=True, eq=False)
class TrainFit:
    """A fitted train and what was seen of its error.

    Attributes:
        grid: the centers, ghosts included. rates: R_i per axis.
        cores: `(r_{i−1}, P_i, r_i)`, `r_m` the outputs.
        status: "reached", or what stopped the fit: "rank", "evaluations", "seconds", "stalled" (sweeps no longer help),
            "points" (so many Chebyshev points do not resolve an axis), "above" (refined twice, the held-out error still exceeds
            the tolerance).
        worst: the largest `|f − head|` seen, its place, and the number of fresh points; `error_estimate` is that error. It
            is an estimate: it bounds nothing between the points.
        scale: the largest |f| seen. evaluations: of f, held-out points included.
    """

    grid: ProductGrid
    rates: tuple[float, ...]
    cores: tuple[Array, ...]
    status: str
    tolerance: float
    worst: Witness
    scale: float
    evaluations: int

    @property
    def error_estimate(self) -> float:
        return self.worst.error

    @property
    def reached(self) -> bool:
        return self.status == "reached"

    @property
    def ranks(self) -> tuple[int, ...]:
        return (1, *(core.shape[2] for core in self.cores))

    def head(self, *, dtype: torch.dtype = torch.float64, output_shape: tuple[int, ...] | None = None) -> TrainHead:
        """The head over the box's shape; several outputs are a vector unless `output_shape` says otherwise.

        The estimate is about float64; `held_out_error` gives that of any other dtype.
        """
        outputs = self.cores[-1].shape[2]
        shape = output_shape if output_shape is not None else () if outputs == 1 else (outputs,)
        cores = [torch.from_numpy(core).to(dtype) for core in self.cores]
        return TrainHead(self.grid, self.rates, cores, input_shapes=(self.grid.box.shape,), output_shape=shape)


def held_out_error(head: TrainHead, ask: Ask, box: Box, *, seed: int = 0) -> Witness:
    """The largest `|f − head|` over fresh points and a search for worse ones: an estimate from below of the true error.

    Half of the points are uniform. The others lie at and between corners, and at, between and around landmarks (the middle and
    points where f is large or small), which uniform points hardly see in many dimensions.
    """
    rng, n, m = np.random.default_rng(seed), FRESH, box.dimension
    marks = rng.choice(landmarks(ask, box, rng), n)
    ends = np.where(rng.random((n, m)) < 0.5, box.lo.ravel(), box.hi.ravel())
    z, kind, share = box.sample(n, rng), np.arange(n)[:, None] % 6, rng.random((n, 1))
    z = np.where((kind < 2) & (rng.random((n, m)) < share), np.where(kind == 0, ends, marks), z)
    z = box.clamp(np.where(kind == 2, marks + share**2 * (z - marks), z))

    def error(points: Array) -> Array:
        with torch.no_grad():
            got = head.evaluate(torch.from_numpy(points).to(head.inverse_temperature)).double().cpu().numpy()
        out: Array = np.abs(got - np.reshape(ask(points), got.shape)).max(axis=1)
        return out

    seen, found = error(z), search_worst(error, box, samples=1024, seed=seed)
    samples, i = found.samples + n, int(seen.argmax())
    if seen[i] <= found.error:
        return replace(found, samples=samples)
    return Witness(tuple(z[i].tolist()), float(seen[i]), samples)


@np.errstate(all="ignore")  # numbers out of range end in a refusal
def fit_train(
    ask: Ask,
    box: Box,
    *,
    tolerance: float,
    outputs: int = 1,
    limits: TrainLimits | None = None,
    seed: int = 0,
    progress: Progress | None = None,
) -> TrainFit:
    """A head with `Π P_i` keys, whose values are a tensor train, for a function of many variables.

    Chebyshev points, centers and temperatures of each axis are chosen on fibers of f; f on the grid of Chebyshev points is
    approximated by a train (`cross_approximation`) and rounded; the frame fit `V = A⁺f` of each axis turns samples into values
    core by core; fresh points show the error. If the train met its share of the tolerance and the head did not, everything
    is done again more finely. f is evaluated only inside the box.

    Hypotheses: none is checked beyond the points evaluated; the error is an *estimate*, whatever the status.

    Args:
        ask: flat points `(n, m)` to values `(n, outputs)`.
        tolerance: absolute, for the largest error over the outputs.

    Returns:
        What was fitted, also when a limit stopped it: `status` says so and `error_estimate` how far it got.

    >>> fit = fit_train(lambda z: np.cos(z.sum(axis=1)), Box(-np.ones(6), np.ones(6)), tolerance=1e-6)
    >>> fit.status, max(fit.ranks)
    ('reached', 2)
    """
    limits = limits or TrainLimits()
    _require(tolerance, outputs, limits, last_word(box))
    asked, rng = Asked(ask, box, outputs, limits, progress), np.random.default_rng(seed)
    best, status = None, "above"
    for share in (1.0, 0.1, 0.01):
        try:
            fit, stopped = _attempt(asked, share * tolerance, rng)
        except Spent as spent:
            status = str(spent)
            break
        best = fit if best is None or fit.error_estimate < best.error_estimate else best
        status = "reached" if fit.error_estimate <= tolerance else stopped
        if status != "above":
            break
    best = best or _constant(asked, rng)
    return replace(best, status=status, tolerance=tolerance, evaluations=asked.count, scale=asked.scale)


def _require(tolerance: float, outputs: int, limits: TrainLimits, last_word: int) -> None:
    if not (tolerance > 0 and math.isfinite(tolerance)):
        raise ToleranceError(f"fit_train: tolerance is {tolerance}; expected a positive number.")
    if outputs < 1 or limits.evaluations <= last_word or limits.rank < 1 or limits.points < 3:
        raise DomainError(
            f"fit_train: {outputs} output(s) within {limits}; expected at least 1 output, rank 1, 3 points per axis and more than "
            f"{last_word:,} evaluations, needed for the final error check."
        )


def _attempt(asked: Asked, tolerance: float, rng: np.random.Generator) -> tuple[TrainFit, str]:
    """Axes, cross, rounding, values: a fit, and its status should the fit miss the tolerance. Each part has a share of it."""
    box = asked.box
    marks = landmarks(asked, box, rng)
    bases, share = np.concatenate([marks, box.sample(4, rng)]), tolerance / (4 * box.dimension)
    fibers = [fibers_of(asked, i, bases=bases, tolerance=share) for i in range(box.dimension)]
    axes = [choose_axis(coefficients, share) for coefficients, _ in fibers]
    nodes = [place(box, i, axis.nodes) for i, axis in enumerate(axes)]
    cross = cross_approximation(
        lambda index: asked(np.column_stack([x[k] for x, k in zip(nodes, index.T)])),
        tuple(len(x) for x in nodes),
        tolerance=tolerance / 4,
        outputs=asked.outputs,
        rank=asked.limits.rank,
        known=np.stack([np.abs(marks[:, i, None] - x).argmin(axis=1) for i, x in enumerate(nodes)], axis=1),
        seed=int(rng.integers(1 << 31)),
    )
    samples = _rounded(cross, tolerance / 8, rng)
    stopped = cross.status if cross.status != "reached" else "above" if all(done for _, done in fibers) else "points"
    return _assembled(asked, axes, samples, rng), stopped


def _rounded(cross: Cross, tolerance: float, rng: np.random.Generator) -> Sequence[Array]:
    """The train rounded as far as no entry that a search looks at moves by more than the tolerance.

    What rounding promises is a mean square, and in many dimensions a peak hardly counts in a mean.
    """
    tensors = [torch.from_numpy(np.ascontiguousarray(core)) for core in cross.cores]
    sizes = tuple(core.shape[1] for core in cross.cores)
    for allowed in tolerance * 10.0 ** -np.arange(1, 7):
        shorter = [core.numpy() for core in rounded_cores(tensors, allowed)]

        def moved(index: Index, shorter: Sequence[Array] = shorter) -> Array:
            return np.abs(entries(cross.cores, index) - entries(shorter, index))

        if worst_entry(moved, sizes, 32, known=cross.known, rng=rng)[0] <= tolerance:
            return shorter
    return cross.cores


def _constant(asked: Asked, rng: np.random.Generator) -> TrainFit:
    """One key per axis and the value in the middle: what is left when a limit leaves no room for a sweep."""
    value = asked.anyway((asked.box.lo + asked.box.hi).reshape(1, -1) / 2)
    samples = [np.ones((1, 1, 1))] * (asked.box.dimension - 1) + [value[None]]
    return _assembled(asked, [choose_axis(np.ones((1, 1)), 1.0)] * asked.box.dimension, samples, rng)


def _assembled(asked: Asked, axes: list[TrainAxis], samples: Sequence[Array], rng: np.random.Generator) -> TrainFit:
    """Samples to values, core by core, and the held-out error of the head that they make."""
    counts, ghosts = [a.count for a in axes], [a.ghosts for a in axes]
    spacing = asked.box.sides / (np.array(counts) - 2 * np.array(ghosts))
    fit = TrainFit(
        grid=ProductGrid.uniform(asked.box, counts, ghosts=ghosts),
        rates=tuple(DOUBLE.rates(np.array([a.sharpness for a in axes]), spacing).tolist()),
        cores=tuple(axis.values(core) for axis, core in zip(axes, samples)),
        status="above",
        tolerance=math.inf,
        worst=Witness((), math.inf, 0),
        scale=asked.scale,
        evaluations=asked.count,
    )
    return replace(fit, worst=held_out_error(fit.head(), asked.anyway, asked.box, seed=int(rng.integers(1 << 31))))
