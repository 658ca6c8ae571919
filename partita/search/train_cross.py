"""Cross approximation: a tensor of low rank from a few of its fibers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import scipy
from numpy.typing import NDArray

from partita.geometry.domains import Array
from partita.search.train_axes import Spent

__all__ = ["Cross", "Index", "cross_approximation", "entries", "worst_entry"]

Index = NDArray[np.int64]

_SEARCHED = 256  # entries of each of three kinds among which a sweep looks for its worst errors
_PATIENCE = 3  # sweeps without progress before the cross gives up


@dataclass(frozen=True, eq=False)
class Cross:
    """A train of samples, the largest error that its own search found, and why it stopped ("reached" or a limit)."""

    cores: tuple[Array, ...]
    error_estimate: float
    status: str
    known: Index


def entries(cores: Sequence[Array], index: Index) -> Array:
    """Entries `(n, out)` of a train at multi-indices `(n, m)`."""
    rows = np.ones((len(index), 1))
    for core, at in zip(cores, index.T):
        longer = np.empty((len(index), core.shape[2]))
        for k in np.unique(at):  # few different matrices, many rows
            longer[at == k] = rows[at == k] @ core[:, k]
        rows = longer
    return rows


def _dominant_rows(matrix: Array, tolerance: float, rank: int) -> tuple[Index, Array]:
    """Rows I and coefficients with `matrix ≈ B·matrix[I]`, `|B| ≤ 1.05`: maxvol on its leading singular vectors."""
    u, s, _ = np.linalg.svd(matrix, full_matrices=False)
    kept = int(np.clip((s > max(tolerance, 1e-14 * s[0])).sum(), 1, rank))
    rows = np.array(scipy.linalg.qr(u[:, :kept].T, mode="economic", pivoting=True)[2][:kept], dtype=np.int64)
    b = np.linalg.solve(u[rows, :kept].T, u[:, :kept].T).T
    for _ in range(4 * kept + 16):
        i, j = divmod(int(np.abs(b).argmax()), kept)
        if abs(b[i, j]) <= 1.05:
            break
        step = b[i] / b[i, j]
        step[j] -= 1 / b[i, j]
        b -= np.outer(b[:, j].copy(), step)
        rows[j] = i
    return rows, b


class _Sweeps:
    """Alternating cross: `left[i]` and `right[i]` are the multi-indices kept on both sides of the bond before axis i.

    Right ones end with the number of an output: the outputs are one more mode, of which every sample gives all entries.
    """

    def __init__(self, sample: Callable[[Index], Array], sizes: tuple[int, ...], outputs: int) -> None:
        self.sample, self.sizes, m = sample, sizes, len(sizes)
        self.left = [np.zeros((int(i == 0), i), dtype=np.int64) for i in range(m)]
        self.right = [np.zeros((0, m - i + 1), dtype=np.int64) for i in range(m)]
        self.right.append(np.arange(outputs)[:, None])
        self.cores: list[Array] = [np.zeros((1, n, 1)) for n in sizes]

    def add(self, pivots: Index) -> None:
        """Enrich every bond by the two halves of these entries, `(k, m + 1)`."""
        for i in range(1, len(self.sizes)):
            self.left[i] = np.unique(np.concatenate([self.left[i], pivots[:, :i]]), axis=0)
            self.right[i] = np.unique(np.concatenate([self.right[i], pivots[:, i:]]), axis=0)

    def block(self, i: int) -> Array:
        """Samples `(left, N_i, right)` around axis i."""
        left, right, n, m = self.left[i], self.right[i + 1], self.sizes[i], len(self.sizes)
        tails, which = np.unique(right[:, :-1], axis=0, return_inverse=True)
        index = np.empty((len(left), n, len(tails), m), dtype=np.int64)
        index[..., :i] = left[:, None, None]
        index[..., i] = np.arange(n)[:, None]
        index[..., i + 1 :] = tails
        answers = self.sample(index.reshape(-1, m)).reshape(len(left), n, len(tails), -1)
        return answers[:, :, which.ravel(), right[:, -1]]

    def rightwards(self, tolerance: float, rank: int) -> None:
        for i, n in enumerate(self.sizes[:-1]):
            block = self.block(i)
            rows, core = _dominant_rows(block.reshape(-1, block.shape[2]), tolerance, rank)
            self.left[i + 1] = np.column_stack([self.left[i][rows // n], rows % n])
            self.cores[i] = core.reshape(len(block), n, -1)
        self.cores[-1] = self.block(len(self.sizes) - 1)

    def leftwards(self, tolerance: float, rank: int) -> None:
        for i in range(len(self.sizes) - 1, 0, -1):
            block = self.block(i)
            a, n, b = block.shape
            rows, core = _dominant_rows(block.transpose(1, 2, 0).reshape(n * b, a), tolerance, rank)
            self.right[i] = np.column_stack([rows // b, self.right[i + 1][rows % b]])
            self.cores[i] = core.T.reshape(-1, n, b)
        self.cores[0] = self.block(0)

    def errors(self, index: Index) -> Array:
        return np.abs(self.sample(index) - entries(self.cores, index))


def worst_entry(
    errors: Callable[[Index], Array], sizes: tuple[int, ...], count: int, *, known: Index, rng: np.random.Generator
) -> tuple[float, Index]:
    """The largest error found and the worst entries with their outputs, `(count, m + 1)`.

    Looked at are random entries, special ones (ends and middles of the axes, the diagonal, the known ones) and mixtures of both in
    all proportions; the worst of them climb along every axis in turn.
    """
    shape, last = (_SEARCHED, len(sizes)), np.array(sizes) - 1
    uniform, special = rng.integers(sizes, size=shape), rng.integers(3, size=shape) * last // 2
    if len(known):
        special[::2] = rng.choice(known, len(special[::2]))
    diagonal = np.rint(np.linspace(0, 1, 33)[:, None] * last).astype(np.int64)
    mixed = np.where(rng.random(shape) < rng.random((_SEARCHED, 1)), special, uniform)
    index = np.concatenate([uniform, special, mixed, diagonal, known])
    index = index[np.argsort(errors(index).max(axis=1))[-count:]]
    for axis in rng.permutation(len(sizes)):
        fibers = np.repeat(index, sizes[axis], axis=0)
        fibers[:, axis] = np.tile(np.arange(sizes[axis]), len(index))
        index[:, axis] = errors(fibers).max(axis=1).reshape(len(index), -1).argmax(axis=1)
    found = errors(index)
    return float(found.max()), np.column_stack([index, found.argmax(axis=1)])


def cross_approximation(
    sample: Callable[[Index], Array],
    sizes: tuple[int, ...],
    *,
    tolerance: float,
    outputs: int = 1,
    rank: int = 64,
    known: Index | None = None,
    seed: int = 0,
) -> Cross:
    """A train for a tensor of which only single entries can be evaluated, within the tolerance at all entries that were checked.

    Sweeps to and fro pick on every bond the rows of largest volume (maxvol) among a few fibers; after each sweep the worst
    entries of a search enrich all bonds, until the search finds nothing above the tolerance.

    Args:
        sample: multi-indices `(n, m)` to entries `(n, outputs)`. sizes: N_i.
        known: entries to look at and around in every search, `(k, m)`.
    """
    rng, sweeps = np.random.default_rng(seed), _Sweeps(sample, sizes, outputs)
    known = np.empty((0, len(sizes)), dtype=np.int64) if known is None else known
    start = np.concatenate([known[:2], rng.integers(sizes, size=(2, len(sizes)))])
    sweeps.add(np.column_stack([start, np.arange(len(start)) % outputs]))
    best, idle, ranks, rightwards, largest = None, 0, 0, True, 1
    while best is None or (best.status != "reached" and idle < _PATIENCE):
        try:
            (sweeps.rightwards if rightwards else sweeps.leftwards)(0.05 * tolerance, rank)
            largest, total = (combine(len(core) for core in sweeps.cores) for combine in (max, sum))
            error, pivots = worst_entry(sweeps.errors, sizes, max(4, largest // 3), known=known, rng=rng)
        except Spent as spent:
            if best is None:
                raise
            return replace(best, status=str(spent))
        idle = 0 if best is None or error < 0.7 * best.error_estimate or total > ranks else idle + 1
        if best is None or error < best.error_estimate:
            best = Cross(tuple(sweeps.cores), error, "reached" if error <= tolerance else "stalled", known)
        ranks, rightwards = max(ranks, total), not rightwards
        sweeps.add(pivots)
    return replace(best, status="rank") if best.status != "reached" and largest >= rank else best
