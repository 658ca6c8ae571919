"""The product-grid sum as native loops (extra: `fast`): the torch path's arithmetic without its temporaries.

Queries go in blocks, and every inner loop runs over the queries of a block: the compiler makes vector instructions of
the window search and of the softmax weights, exponential included, and the reads of the values need not wait for each
other. Where windows cover much of the grid (`whole`), every query reads the same values, so that one load serves the
block. Either way axis after axis is summed: an output passes through `Σ_i width_i` additions, not `Π_i width_i`.

The loops (`native_loops`) are compiled by numba when a batch is first worth it, once per installation, and loaded from numba's
cache afterwards. Smaller batches go through torch, always: the two differ in the last digits, so that what a batch gives must not
depend on what was computed before it. Certificates hold for both.
"""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from partita.errors import MissingExtraError

__all__ = ["AVAILABLE", "WORTH", "grid_sum", "worth_it"]

AVAILABLE = find_spec("numba") is not None  # the torch path does the same, slower

# A batch that reads so many stored numbers is run natively: torch would need half a second. 0: every batch
WORTH = 1 << 23
_LEAST_READS = 1 << 8  # a query costs torch as much as so many reads, or more
_BLOCK = 128  # queries whose weights are held at once
_BLOCK_ENTRIES = 1 << 15  # window rows held at once: wide windows get smaller blocks
_BLOCK_WHOLE = 256  # the same where all queries of a block read the same values
_CHUNK = 2048  # queries that are worth a thread

_SECONDS = 5  # that compiling takes on one core

Floats = NDArray[Any]  # float64 or float32, as the head
# centers, firsts, counts, rates, widths
Axes = tuple[Floats, NDArray[np.int64], NDArray[np.int64], Floats, NDArray[np.int64]]
Tables = tuple[Floats, Floats, Floats]  # values, slopes, origin

# loops that this process has used: their dtype, whether they run over all cells
_loaded: set[tuple[np.dtype[Any], bool]] = set()


if hasattr(os, "register_at_fork"):
    # threads of the process that forked this one are not here, and torch would wait for them forever
    os.register_at_fork(after_in_child=lambda: torch.set_num_threads(1))


def worth_it(queries: int, reads: int) -> bool:
    """Whether to use the native loops for a batch of so many queries, each of which reads so many stored numbers."""
    return AVAILABLE and queries * max(reads, _LEAST_READS) >= WORTH


def grid_sum(
    points: Floats,
    centers: Floats,
    firsts: NDArray[np.int64],
    counts: NDArray[np.int64],
    rates: Floats,
    widths: NDArray[np.int64],
    whole: bool,
    values: Floats,
    slopes: Floats,
    origin: Floats,
    out: Floats,
) -> None:
    """`out[n, o] = Σ_cells Π_i softmax_i(x_n)·(values[cell, o] + slopes[cell, o]·(x_n − origin))` over each point's window.

    Args, contiguous arrays of one dtype:
        points: `(n, m)`.
        centers: of all axes joined, axis i at `firsts[i]`, `counts[i]` long.
        rates: `R_i/2`.
        widths: of the windows.
        whole: run over all cells with weight zero outside the window, instead of gathering the window.
        values: `(cells, out)` row-major.
        slopes: `(cells, out, m)`, or empty for none.
        origin: `(m,)`, or empty without slopes.
        out: `(n, out)`, filled.
    """
    if not AVAILABLE:
        raise MissingExtraError.of("the native kernel needs", "fast")
    axes = centers, firsts, counts, rates, widths
    tables = values.reshape(-1), slopes.reshape(-1), origin
    sum_part = _sum_whole if whole else _sum_windows
    key = points.dtype, whole
    if key not in _loaded:
        with _announced():
            sum_part(points[:1], axes, tables, out[:1])
        _loaded.add(key)
    threads = min(torch.get_num_threads(), len(points) // _CHUNK)
    if threads < 2:
        sum_part(points, axes, tables, out)
        return
    ends = [len(points) * k // threads for k in range(threads + 1)]
    parts = [slice(a, b) for a, b in itertools.pairwise(ends)]
    with ThreadPoolExecutor(threads) as pool:  # the loops release the interpreter lock
        list(pool.map(lambda part: sum_part(points[part], axes, tables, out[part]), parts))


def _sum_windows(points: Floats, axes: Axes, tables: Tables, out: Floats) -> None:
    from partita.heads.native_loops import sum_windows

    _, _, counts, _, widths = axes
    rows = np.zeros(1, np.int64)
    for count, width in zip(counts[:-1], widths[:-1]):
        rows = (rows[:, None] * count + np.arange(width)).ravel()
    scratch = _Scratch(points, out, tables, max(8, min(_BLOCK, _BLOCK_ENTRIES // len(rows))))
    weights, sums = scratch.floats(len(counts), int(widths.max())), scratch.floats(len(rows))
    vectors = np.empty((len(rows), max(out.shape[1], scratch.tilts.shape[1])), out.dtype)
    lines = scratch.floats(2), scratch.integers
    sum_windows(points, axes, rows * counts[-1], *tables, *lines, weights, sums, vectors, scratch.tilts, out)


def _sum_whole(points: Floats, axes: Axes, tables: Tables, out: Floats) -> None:
    from partita.heads.native_loops import sum_whole

    counts = axes[2]
    scratch = _Scratch(points, out, tables, _BLOCK_WHOLE)
    weights, sums = scratch.floats(len(counts), int(counts.max())), scratch.floats(len(counts) + 1)
    sum_whole(points, axes, *tables, scratch.floats(2), scratch.integers, weights, sums, scratch.tilts, out)


class _Scratch:
    """Arrays that the loops work in, for blocks of at most so many queries."""

    def __init__(self, points: Floats, out: Floats, tables: Tables, block: int) -> None:
        self.block, self.dtype = max(1, min(block, len(points))), points.dtype
        self.integers = np.empty((2, self.block), np.int64)
        slopes = self.block if len(tables[1]) else 0
        self.tilts = np.empty((slopes, out.shape[1] * points.shape[1]), points.dtype)

    def floats(self, *shape: int) -> Floats:
        return np.empty((*shape, self.block), self.dtype)


@contextmanager
def _announced() -> Iterator[None]:
    """Says on stderr that numba compiles, if it does: most often the loops come from its cache."""
    from numba.core import event

    from partita.heads.native_loops import CACHED

    class Announcement(event.Listener):
        told = False

        def on_start(self, event: object) -> None:
            if not self.told:
                often = "once" if CACHED else "no folder for numba's cache can be written; set NUMBA_CACHE_DIR"
                print(f"partita: compiling native kernels ({often}, about {_SECONDS} s) …", file=sys.stderr, flush=True)
            self.told = True

        def on_end(self, event: object) -> None:
            pass

    with event.install_listener("numba:compile", Announcement()):
        yield
