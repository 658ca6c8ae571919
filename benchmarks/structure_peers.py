"""Peers of the networks of heads in benchmarks/structure.py: sparse grids of Chebyshev points and trained feed-forward networks.

They see the function as a black box on [−1, 1]^m. Their errors are the largest at 10,000 random points: estimates, not bounds.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

HIGHEST_LEVEL = 9  # 513 points on an axis
Array = NDArray[np.float64]
Function = Callable[[Array], Array]
Index = tuple[tuple[int, int], ...]  # (axis, level ≥ 1) of the axes that an index refines; the other axes have level 0


@dataclass(frozen=True)
class Peer:
    """What a peer stores, the largest error at random points, and how long it took; `met` is False if it gave up."""

    name: str
    stored: int
    error: float
    seconds: float
    met: bool
    note: str = ""


@cache
def new_nodes(level: int) -> Array:
    """The Clenshaw–Curtis nodes that a level adds: 1, 2, 2, 4, 8, … of them."""
    if level == 0:
        return np.zeros(1)
    if level == 1:
        return np.array([-1.0, 1.0])
    return -np.cos(np.pi * np.arange(1, 1 << level, 2) / (1 << level))


def basis(level: int, x: Array) -> Array:
    """`(len(x), new nodes)`: polynomials that are 1 at one new node of a level, and 0 at all its other nodes, old and new."""
    if level == 0:
        return np.ones((len(x), 1))
    nodes = np.concatenate([new_nodes(k) for k in range(level + 1)])
    new = new_nodes(level)
    out = np.empty((len(x), len(new)))
    for column, node in enumerate(new):
        others = nodes[nodes != node]
        out[:, column] = np.prod((x[:, None] - others) / (node - others), axis=1)
    return out


@cache
def basis_at_nodes(level: int, at: int) -> Array:
    return basis(level, new_nodes(at))


class SparseGrid:
    """Chebyshev interpolation on a sparse grid, as hierarchical coefficients; indices may be added in any admissible order."""

    def __init__(self, function: Function, tests: Array) -> None:
        self.function, self.m = function, tests.shape[1]
        self.tests = tests
        self.columns: dict[tuple[int, int], Array] = {}  # basis polynomials at the test points
        self.coefficients: dict[Index, Array] = {}
        self.left = function(tests)  # what is not interpolated yet, at the test points

    def add(self, index: Index) -> float:
        """Add the nodes of an index; the largest coefficient in absolute value."""
        axes, levels = [a for a, _ in index], [k for _, k in index]
        nodes = np.zeros((math.prod(len(new_nodes(k)) for k in levels), self.m))
        for column, values in zip(axes, np.meshgrid(*map(new_nodes, levels), indexing="ij")):
            nodes[:, column] = values.ravel()
        found = self.function(nodes).reshape([len(new_nodes(k)) for k in levels])
        for below in itertools.product(*(range(k + 1) for k in levels)):
            if below != tuple(levels):
                known = self.coefficients[tuple((a, k) for a, k in zip(axes, below) if k)]
                part = known.reshape([len(new_nodes(k)) for k in below])
                for axis, (lower, level) in enumerate(zip(below, levels)):
                    part = np.moveaxis(np.tensordot(basis_at_nodes(lower, level), part, (1, axis)), 0, axis)
                found = found - part
        self.coefficients[index] = found
        part = np.broadcast_to(found.reshape(-1), (len(self.tests), found.size))
        for axis, level in index:
            part = np.einsum(
                "nij,ni->nj", part.reshape(len(self.tests), len(new_nodes(level)), -1), self._column(axis, level)
            )
        self.left = self.left - part[:, 0]
        return float(np.abs(found).max())

    def _column(self, axis: int, level: int) -> Array:
        if (axis, level) not in self.columns:
            self.columns[axis, level] = basis(level, self.tests[:, axis])
        return self.columns[axis, level]

    @property
    def error(self) -> float:
        return float(np.abs(self.left).max())

    @property
    def stored(self) -> int:
        """Coefficients that are not 0 up to rounding."""
        largest = max(float(np.abs(c).max()) for c in self.coefficients.values())
        return int(sum(np.count_nonzero(np.abs(c) > 1e-13 * largest) for c in self.coefficients.values()))


def levels_of(m: int, level: int) -> Iterator[Index]:
    """The indices whose levels add up to this."""
    for count in range(min(m, level) + 1):
        for axes in itertools.combinations(range(m), count):
            for cuts in itertools.combinations(range(1, level), count - 1) if count else [()]:
                if count or level == 0:
                    ends = (0, *cuts, level)
                    yield tuple((a, hi - lo) for a, lo, hi in zip(axes, ends, ends[1:])) if count else ()


def smolyak(function: Function, tests: Array, tolerance: float, seconds: float, most: int = 1_000_000) -> Peer:
    """The smallest level of Smolyak's grid that meets the tolerance."""
    began, grid = time.process_time(), SparseGrid(function, tests)
    for level in itertools.count():
        for index in levels_of(grid.m, level):
            grid.add(index)
            if time.process_time() - began > seconds or len(grid.coefficients) > most:
                taken = time.process_time() - began
                return Peer("Smolyak", grid.stored, grid.error, taken, False, f"in level {level}")
        if grid.error <= tolerance:
            return Peer("Smolyak", grid.stored, grid.error, time.process_time() - began, True, f"level {level}")
    raise AssertionError


def adaptive_grid(function: Function, tests: Array, tolerance: float, seconds: float) -> Peer:
    """The dimension-adaptive grid of Gerstner and Griebel: the index with the largest coefficient is refined next.

    Every fourth time it is an index of the lowest level instead, as a coefficient may be 0 by symmetry.
    """
    began, grid = time.process_time(), SparseGrid(function, tests)
    front, done = {(): grid.add(())}, set[Index]()
    for step in itertools.count():
        taken = time.process_time() - began
        if not front or grid.error <= tolerance or taken > seconds:
            return Peer("adaptive sparse grid", grid.stored, grid.error, taken, grid.error <= tolerance)
        index = min(front, key=lambda i: (sum(k for _, k in i) if step % 4 == 0 else 0, -front[i]))
        del front[index]
        done.add(index)
        levels = dict(index)
        for axis in range(grid.m):
            finer = levels | {axis: levels.get(axis, 0) + 1}
            if finer[axis] <= HIGHEST_LEVEL and all(lowered(finer, a) in done for a in finer):
                key = tuple(sorted(finer.items()))
                front[key] = grid.add(key)
    raise AssertionError


def lowered(levels: dict[int, int], axis: int) -> Index:
    return tuple(sorted((a, k - (a == axis)) for a, k in levels.items() if k - (a == axis)))


WIDTHS, ADAM_SHARE = (16, 32, 64), 0.25


def trained_network(function: Function, tests: Array, tolerance: float, seconds: float, seed: int = 0) -> Peer:
    """Two hidden layers with GELU, trained by Adam and then L-BFGS; the smallest width that meets the tolerance in time.

    Every width has the same share of the time. If none meets the tolerance, the best one is shown.
    """
    torch.optim.Adam([torch.zeros(1, requires_grad=True)]).step()  # the first optimizer of a process loads for seconds
    began, best = time.process_time(), None
    for width in WIDTHS:
        torch.manual_seed(seed)
        m = tests.shape[1]
        model = nn.Sequential(nn.Linear(m, width), nn.GELU(), nn.Linear(width, width), nn.GELU(), nn.Linear(width, 1))
        error = _train(model.double(), function, tests, tolerance, seconds / len(WIDTHS))
        stored = sum(p.numel() for p in model.parameters())
        found = Peer("trained MLP", stored, error, time.process_time() - began, error <= tolerance, f"width {width}")
        if found.met:
            return found
        if best is None or error < best.error:
            best = found
    assert best is not None
    return Peer(best.name, best.stored, best.error, time.process_time() - began, False, best.note)


def _train(
    model: nn.Module, function: Function, tests: Array, tolerance: float, seconds: float, points: int = 8192
) -> float:
    """Train a model in the given processor seconds, less if it meets the tolerance; its error at the test points."""
    began, rng = time.process_time(), np.random.default_rng(1)
    z = rng.uniform(-1, 1, (points, tests.shape[1]))
    values, goal = function(z), function(tests)
    shift, scale = values.mean(), values.std()
    x, y = torch.from_numpy(z), torch.from_numpy((values - shift) / scale)[:, None]

    def error() -> float:
        with torch.no_grad():
            out = model(torch.from_numpy(tests)).numpy()[:, 0]
        return float(np.abs(out * scale + shift - goal).max())

    adam = torch.optim.Adam(model.parameters())
    while (spent := (time.process_time() - began) / seconds) < ADAM_SHARE:
        for group in adam.param_groups:
            group["lr"] = 1e-5 + 5e-3 * (1 + math.cos(math.pi * spent / ADAM_SHARE))
        batch = torch.randint(points, (256,))
        adam.zero_grad()
        ((model(x[batch]) - y[batch]) ** 2).mean().backward()
        adam.step()
    newton = torch.optim.LBFGS(
        model.parameters(),
        max_iter=50,
        history_size=100,
        tolerance_grad=0,
        tolerance_change=0,
        line_search_fn="strong_wolfe",
    )

    def loss() -> torch.Tensor:
        newton.zero_grad()
        out = ((model(x) - y) ** 2).mean()
        out.backward()
        return out

    least = error()
    while time.process_time() - began < seconds and least > tolerance:
        newton.step(loss)
        least = min(least, error())
    return least
