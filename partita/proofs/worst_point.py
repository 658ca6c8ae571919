"""Searches for the worst point of a head: its error is a lower end for the bracket of a claim, and may refute the claim."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from partita.functions.regions import Domain
from partita.functions.target import Target
from partita.geometry.domains import Array, Box
from partita.geometry.grid import ProductGrid
from partita.geometry.partitions import Partition
from partita.heads.head import FoldedHead
from partita.proofs.certificate import Witness

__all__ = ["errors_at", "search_worst"]


def errors_at(head: FoldedHead, target: Target, points: Array) -> Array:
    """`|f − head|_∞` at flat points `(n, m)`; for an expression less what f's own evaluation in float64 may be off."""
    with torch.no_grad():
        got = head.evaluate(torch.from_numpy(np.ascontiguousarray(points)).to(head.dtype)).double().numpy()
    error = np.abs(got - target(points))
    error = np.where(np.isnan(error), np.inf, error)  # a head that has no value is as wrong as can be
    if target.graph is not None:
        enclosure = target.graph.enclose(points, points)
        known = np.isfinite(enclosure.lo) | np.isfinite(enclosure.hi)
        error = np.maximum(error - np.where(known, 2 * enclosure.radius, 0.0), 0.0)
    worst: Array = error.max(axis=1)
    return worst


def search_worst(
    error: Callable[[Array], Array],
    domain: Domain,
    *,
    partition: Partition | None = None,
    samples: int = 4096,
    seed: int = 0,
) -> Witness:
    """The largest `error(points)` found: random points, corners, cell corners and edges, then shrinking local search.

    Args:
        error: flat points `(n, m)` to nonnegative numbers `(n,)`.
        partition: a grid to take cell corners from, or scattered centers to start near.
    """
    rng = np.random.default_rng(seed)
    points = [domain.sample(samples, rng), domain.corners()]
    if isinstance(partition, ProductGrid):
        points.append(_cell_corners(partition, samples, rng))
    candidates = domain.clamp(np.concatenate(points))
    errors, asked = error(candidates), len(candidates)
    order = np.argsort(errors)[-32:]
    best, best_error = candidates[order], errors[order]
    box = domain if isinstance(domain, Box) else domain.bounding_box()
    step = box.sides * (0.5 / max(2.0, samples ** (1 / domain.dimension)))
    for _ in range(24):
        trial = domain.clamp(np.repeat(best, 8, axis=0) + step * rng.standard_normal((8 * len(best), domain.dimension)))
        trial_error = error(trial).reshape(len(best), 8)
        asked += trial.shape[0]
        pick = trial_error.argmax(axis=1)
        better = trial_error[np.arange(len(best)), pick] > best_error
        best[better] = trial.reshape(len(best), 8, -1)[np.arange(len(best)), pick][better]
        best_error[better] = trial_error[np.arange(len(best)), pick][better]
        step = step * 0.7
    worst = int(best_error.argmax())
    return Witness(tuple(best[worst].tolist()), float(best_error[worst]), asked)


def _cell_corners(grid: ProductGrid, count: int, rng: np.random.Generator) -> Array:
    """Random corners of cells, nudged to either side: where values at centers are farthest from f."""
    columns = []
    for axis, lo, hi in zip(grid.axes, grid.box.lo.ravel(), grid.box.hi.ravel()):
        edges = np.concatenate([[lo], (axis[1:] + axis[:-1]) / 2, [hi]])
        gap = (hi - lo) / len(axis)
        columns.append(rng.choice(edges, count) + gap * rng.choice([0.0, 1e-9, -1e-9, 1e-3, -1e-3, 0.02, -0.02], count))
    return np.stack(columns, axis=1)
