"""Searches for the worst point of a head: its error is a lower end for the bracket of a claim, and may refute the claim."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import torch

from partita.arithmetic.progress import Progress, report
from partita.errors import (
    BudgetSpentError,
    CurvatureContradictedError,
    LipschitzContradictedError,
    ProofRefutedError,
)
from partita.functions.regions import Domain, Region
from partita.functions.tails import norm_seen
from partita.functions.target import Target
from partita.geometry.domains import Array, Box
from partita.geometry.grid import ProductGrid
from partita.geometry.partitions import Partition
from partita.heads.head import Head
from partita.proofs.certificate import Certificate, Witness

__all__ = ["ATTACK", "attacked", "errors_at", "require_unrefuted", "search_worst"]

_ROUNDS = 24  # of a local search
_BEST, _SAMPLES_FOR_EACH = 32, 32  # points that it starts from; fewer where few samples are asked for, as f may be slow
_FEW = 10  # dimensions: the corners that `Box.corners` lists differ in the first few coordinates only
ATTACK, _SAMPLES = 2048, 4096  # points of a search, and of a mean; fewer where f is a black box


def errors_at(head: Head, target: Target, points: Array) -> Array:
    """`|f − head|_∞` at flat points `(n, m)`; for an expression less what f's own evaluation in float64 may be off.

    NaN where f failed and such points are left out: there is nothing to compare with.
    """
    with torch.no_grad():
        got = head.evaluate(torch.from_numpy(np.ascontiguousarray(points)).to(head.dtype)).double().numpy()
    error = np.abs(got - target(points))
    error = np.where(np.isnan(error), np.inf, error)  # a head that has no value is as wrong as can be
    if target.graph is not None:
        enclosure = target.graph.enclose(points, points)
        known = np.isfinite(enclosure.lo) | np.isfinite(enclosure.hi)
        error = np.maximum(error - np.where(known, 2 * enclosure.radius, 0.0), 0.0)
    worst: Array = error.max(axis=1)
    if target.excluding is not None:
        worst[target.failed(points)] = np.nan
    return worst


def search_worst(
    error: Callable[[Array], Array],
    domain: Domain,
    *,
    partition: Partition | None = None,
    samples: int = 4096,
    seed: int = 0,
    progress: Progress | None = None,
) -> Witness:
    """The largest `error(points)` found: random points, corners, cell corners and edges, then shrinking local search.

    The local search asks for six times as many points as there are samples, but for no more than 6,144. It ends early where
    `progress` says that a budget is spent.

    Args:
        error: flat points `(n, m)` to nonnegative numbers `(n,)`; NaN for points that do not count.
        partition: a grid to take cell corners from, or scattered centers to start near.
    """
    rng = np.random.default_rng(seed)
    points = [domain.sample(samples, rng), domain.corners()]
    if isinstance(domain, Box) and domain.dimension > _FEW:
        points.append(_random_corners(domain, len(points[1]), seed))
    if isinstance(partition, ProductGrid):
        points.append(_cell_corners(partition, samples, rng))
    candidates = domain.clamp(np.concatenate(points))
    errors, asked = _counted(error(candidates)), len(candidates)
    order = np.argsort(errors)[-min(_BEST, max(1, samples // _SAMPLES_FOR_EACH)) :]
    best, best_error = candidates[order], errors[order]
    box = domain if isinstance(domain, Box) else domain.bounding_box()
    step = box.sides * (0.5 / max(2.0, samples ** (1 / domain.dimension)))
    for done in range(_ROUNDS):
        try:
            report(progress, "attack", done, _ROUNDS)
        except BudgetSpentError:
            break
        trial = domain.clamp(np.repeat(best, 8, axis=0) + step * rng.standard_normal((8 * len(best), domain.dimension)))
        trial_error = _counted(error(trial)).reshape(len(best), 8)
        asked += trial.shape[0]
        pick = trial_error.argmax(axis=1)
        better = trial_error[np.arange(len(best)), pick] > best_error
        best[better] = trial.reshape(len(best), 8, -1)[np.arange(len(best)), pick][better]
        best_error[better] = trial_error[np.arange(len(best)), pick][better]
        step = step * 0.7
    worst = int(best_error.argmax())
    return Witness(tuple(best[worst].tolist()), float(best_error[worst]), asked)


def attacked(
    head: Head,
    target: Target,
    partition: Partition | None,
    seed: int = 0,
    progress: Progress | None = None,
    *,
    samples: int = ATTACK,
) -> Witness:
    """The worst point of a search; of a black box, which may be slow, the worst of some samples and of what is known already."""
    error = partial(errors_at, head, target)
    if target.graph is not None:
        return search_worst(error, target.domain, partition=partition, samples=samples, seed=seed, progress=progress)
    points = target.domain.sample(target.calls.allowance(ATTACK), np.random.default_rng(seed))
    points = np.concatenate([points, target.answered()[0]])
    errors = _counted(error(points))
    worst = int(errors.argmax())
    return Witness(tuple(points[worst].tolist()), float(errors[worst]), len(points))


def require_unrefuted(head: Head, target: Target, certificate: Certificate, witness: Witness, seed: int = 0) -> None:
    """Nothing, if no point that was seen contradicts the claim.

    Raises:
        ProofRefutedError: a claim of kind proved is wrong: a bug.
        LipschitzContradictedError, CurvatureContradictedError: what the caller declared is false, or f does not always return
            the same value.
    """
    if certificate.kind == "estimated":  # there is no bound to refute
        return
    seen = witness.error if certificate.norm == "inf" else _mean_error(head, target, float(certificate.norm), seed)
    if seen <= certificate.error_bound:  # NaN refutes as well
        return
    found = (
        f"{target.label} and the head differ by {seen:.6g} in L{certificate.norm}, more than the bound "
        f"{certificate.error_bound:.6g} (worst point seen: {list(witness.point)})"
    )
    if certificate.kind == "proved":
        raise ProofRefutedError(
            found, "This is a bug in partita: please report the function, the domain and the tolerance."
        )
    contradicted = CurvatureContradictedError if certificate.rests_on("curvature") else LipschitzContradictedError
    raise contradicted(
        found, "A declared property of the function is false, or the function does not always return the same value."
    )


def _mean_error(head: Head, target: Target, p: float, seed: int) -> float:
    """The L_p error over uniform samples less six standard errors, by the largest output only: an estimate from below."""
    box, domain = target.box, target.domain
    count = _SAMPLES if target.graph is not None else target.calls.allowance(_SAMPLES)
    points = box.sample(count, np.random.default_rng(seed))
    inside = domain.contains(points)
    if isinstance(domain, Region):  # points within roundings of the edge do not count
        points = domain.clamp(points)
    errors = _counted(errors_at(head, target, points))
    return norm_seen(np.where(inside, errors, 0.0)[:, None], p, box.volume) if len(points) else 0.0


def _counted(errors: Array) -> Array:
    """0 in place of NaN, for points that do not count."""
    out: Array = np.where(np.isnan(errors), 0.0, errors)
    return out


def _random_corners(box: Box, count: int, seed: int) -> Array:
    high = np.random.default_rng([seed, 1]).integers(0, 2, (count, box.dimension)) == 1
    return np.where(high, box.hi.ravel(), box.lo.ravel())


def _cell_corners(grid: ProductGrid, count: int, rng: np.random.Generator) -> Array:
    """Random corners of cells, nudged to either side: where values at centers are farthest from f."""
    columns = []
    for axis, lo, hi in zip(grid.axes, grid.box.lo.ravel(), grid.box.hi.ravel()):
        edges = np.concatenate([[lo], (axis[1:] + axis[:-1]) / 2, [hi]])
        gap = (hi - lo) / len(axis)
        columns.append(rng.choice(edges, count) + gap * rng.choice([0.0, 1e-9, -1e-9, 1e-3, -1e-3, 0.02, -0.02], count))
    return np.stack(columns, axis=1)
