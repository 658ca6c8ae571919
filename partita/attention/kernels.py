"""The windowed product-grid sum as native loops (extra: `fast`): the torch path's arithmetic without its temporaries.

Queries go in blocks, and every inner loop runs over the queries of a block: the compiler makes vector instructions of
the window search and of the softmax weights, exponential included, and the reads of the values need not wait for each
other.
"""

from __future__ import annotations

import os

import numpy as np

from partita.errors import MissingExtraError

try:
    from numba import njit, prange
except ImportError:  # the torch path does the same, slower
    AVAILABLE = False
else:
    AVAILABLE = True

__all__ = ["AVAILABLE", "grid_window_sum"]

_PROCESS = os.getpid()
_BLOCK = 128  # queries whose weights are held at once
_BLOCK_ENTRIES = 1 << 15  # window rows held at once: wide windows get smaller blocks
_CHUNK = 2048  # queries that one thread takes at a time; fewer than two chunks start no threads
_LONG_VECTOR = 8  # outputs from which on a cell's values are read in one run
_SMALLEST_EXPONENT = -708.0  # e^x below is taken as 0
_SHIFTER = 6755399441055744.0  # 1.5·2⁵²: adding it rounds to an integer and leaves that integer in the low bits

if AVAILABLE:
    # numpy's error model: a division does not branch, so that loops vectorise
    _loop = njit(cache=True, nogil=True, error_model="numpy")
    _fused = njit(cache=True, nogil=True, error_model="numpy", fastmath={"contract"})  # a·b + c may round once

    @_fused
    def _exp(x):
        """`e^x` for x ≤ 0, in float64 within 2 ulp: `2ⁿ·e^r`, `|r| ≤ ln 2/2`, by Taylor's polynomial of degree 13.

        The remainder is below `0.35¹⁴/14! < 5·10⁻¹⁸`; ln 2 is subtracted in two parts, the first short enough that n
        times it is exact. NaN stays NaN.
        """
        t = _SMALLEST_EXPONENT if x < _SMALLEST_EXPONENT else np.float64(x)
        shifted = t * 1.4426950408889634 + _SHIFTER
        n = shifted - _SHIFTER
        r = (t - n * 6.93147180369123816490e-01) - n * 1.90821492927058770002e-10
        p = r / 6227020800 + 1 / 479001600
        p = p * r + 1 / 39916800
        p = p * r + 1 / 3628800
        p = p * r + 1 / 362880
        p = p * r + 1 / 40320
        p = p * r + 1 / 5040
        p = p * r + 1 / 720
        p = p * r + 1 / 120
        p = p * r + 1 / 24
        p = p * r + 1 / 6
        p = p * r + 1 / 2
        power = np.int64((np.float64(shifted).view(np.int64) + 1023) << 52).view(np.float64)
        return 0.0 if x < _SMALLEST_EXPONENT else ((p * r + 1) * r + 1) * power

    @_loop
    def _window_starts(x, centers, width, start):
        """The first of the `width` centers around each x; `centers[k] ≤ x < centers[k+1]` is settled by comparison."""
        count = len(centers)
        last = count - 2
        per_unit = (count - 1) / (centers[count - 1] - centers[0])
        for i in range(len(x)):
            guess = np.floor((x[i] - centers[0]) * per_unit)
            guess = guess if guess > 0 else 0.0  # NaN too
            start[i] = np.int64(guess if guess < last else last)
        for i in range(len(x)):
            k = start[i]
            k = max(k - (x[i] < centers[np.uint64(k)]), 0)
            k = min(k + (x[i] >= centers[np.uint64(k + 1)]), last)
            start[i] = min(max(k - width // 2 + 1, 0), count - width)

    @_loop
    def _two_weights(x, centers, rate, start, gap, weights):
        """The softmax over two centers: the nearer gets `1/(1 + e^{−|s₀−s₁|})`, one exponential."""
        for i in range(len(x)):
            left, right = x[i] - centers[np.uint64(start[i])], x[i] - centers[np.uint64(start[i] + 1)]
            gap[i] = rate * left * left - rate * right * right
        for i in range(len(x)):
            e = _exp(-abs(gap[i]))
            near = 1 / (1 + e)
            far = e * near
            weights[0, i] = near if gap[i] <= 0 else far
            weights[1, i] = far if gap[i] <= 0 else near

    @_loop
    def _weights(x, centers, rate, start, smallest, weights):
        """Fill `weights`, `(width, n)`, with the softmax of `−rate (x − c)²` over the window."""
        total = smallest
        smallest[:] = np.inf
        for row in range(len(weights)):
            for i in range(len(x)):
                d = x[i] - centers[np.uint64(start[i] + row)]
                weights[row, i] = rate * d * d
                smallest[i] = min(smallest[i], weights[row, i])
        for row in range(len(weights)):
            for i in range(len(x)):
                weights[row, i] = _exp(smallest[i] - weights[row, i])
        total[:] = 0
        for row in range(len(weights)):
            for i in range(len(x)):
                total[i] += weights[row, i]
        for row in range(len(weights)):
            for i in range(len(x)):
                weights[row, i] /= total[i]

    @_fused
    def _gather(values, cells, shift, step, weights, sums):
        """`sums[i] = Σ_a weights[a, i]·values[cells[i] + shift + a·step]`; the first two in one pass."""
        width, n = len(weights), len(cells)
        if width == 1:
            for i in range(n):
                sums[i] = weights[0, i] * values[np.uint64(cells[i] + shift)]
            return
        first, second = weights[0], weights[1]
        for i in range(n):
            at = cells[i] + shift
            sums[i] = first[i] * values[np.uint64(at)] + second[i] * values[np.uint64(at + step)]
        for a in range(2, width):
            for i in range(n):
                sums[i] += weights[a, i] * values[np.uint64(cells[i] + shift + a * step)]

    @_fused
    def _fold(sums, filled, weights, n):
        """`sums[b] ← Σ_a weights[a]·sums[b·width + a]` in place: one axis less; returns how many are left."""
        width = len(weights)
        for b in range(filled // width):
            row = sums[b]
            for i in range(n):
                row[i] = weights[0, i] * sums[b * width, i]
            for a in range(1, width):
                for i in range(n):
                    row[i] += weights[a, i] * sums[b * width + a, i]
        return filled // width

    @_fused
    def _gather_vectors(values, cells, rows, widths, weights, products, out):
        """`out[i] = Σ_b products[b] Σ_a weights[last, a, i]·V[cells[i] + rows[b] + a]` for long vectors V[cell]."""
        last, step = len(widths) - 1, out.shape[1]
        for i in range(len(cells)):
            products[0], filled = 1, 1
            for axis in range(last):
                width = widths[axis]
                for b in range(filled - 1, -1, -1):  # backwards: entry b spreads over b·width … b·width + width − 1
                    here = products[b]
                    for a in range(width):
                        products[b * width + a] = here * weights[axis, a, i]
                filled *= width
            total = out[i]
            total[:] = 0
            for b in range(len(rows)):
                for a in range(widths[last]):
                    scaled, at = products[b] * weights[last, a, i], (cells[i] + rows[b] + a) * step
                    for o in range(step):
                        total[o] += scaled * values[np.uint64(at + o)]

    @_loop
    def _rows_of_window(counts, widths):
        """Cell numbers of the window's innermost rows, relative to its first cell."""
        rows = np.zeros(1, np.int64)
        for i in range(len(counts) - 1):
            rows = (rows.reshape(-1, 1) * counts[i] + np.arange(widths[i])).ravel()
        return rows * counts[-1]

    @_loop
    def _sum_serially(points, centers, firsts, counts, rates, widths, values, out):
        m, step = points.shape[1], out.shape[1]
        rows = _rows_of_window(counts, widths)
        block = max(8, min(_BLOCK, _BLOCK_ENTRIES // len(rows)))
        coordinate, scratch = np.empty(block, points.dtype), np.empty(block, points.dtype)
        starts, cells = np.empty(block, np.int64), np.empty(block, np.int64)
        weights = np.empty((m, widths.max(), block), points.dtype)
        sums = np.empty((len(rows), block), points.dtype)
        for begin in range(0, len(points), block):
            n = min(block, len(points) - begin)
            x, start, cell = coordinate[:n], starts[:n], cells[:n]
            cell[:] = 0
            for i in range(m):
                axis = centers[firsts[i] : firsts[i] + counts[i]]
                x[:] = points[begin : begin + n, i]
                start[:] = 0
                if widths[i] < counts[i]:
                    _window_starts(x, axis, widths[i], start)
                for j in range(n):
                    cell[j] = cell[j] * counts[i] + start[j]
                if widths[i] == 2:
                    _two_weights(x, axis, rates[i], start, scratch, weights[i])
                else:
                    _weights(x, axis, rates[i], start, scratch, weights[i, : widths[i]])
            if step >= _LONG_VECTOR:
                _gather_vectors(values, cell, rows, widths, weights, sums.ravel()[: len(rows)], out[begin : begin + n])
                continue
            cell *= step
            for o in range(step):
                for b in range(len(rows)):
                    _gather(values, cell, rows[b] * step + o, step, weights[m - 1, : widths[m - 1]], sums[b])
                filled = len(rows)
                for i in range(m - 2, -1, -1):
                    filled = _fold(sums, filled, weights[i, : widths[i]], n)
                out[begin : begin + n, o] = sums[0, :n]

    @njit(cache=True, nogil=True, parallel=True)
    def _sum_in_parallel(points, centers, firsts, counts, rates, widths, values, out):
        for chunk in prange((len(points) + _CHUNK - 1) // _CHUNK):
            part = slice(chunk * _CHUNK, min(len(points), (chunk + 1) * _CHUNK))
            _sum_serially(points[part], centers, firsts, counts, rates, widths, values, out[part])


def grid_window_sum(points, centers, firsts, counts, rates, widths, values, out):  # numpy arrays, all contiguous
    """`out[n, o] = Σ_cells Π_i softmax_i(x_n)·values[cell, o]` over the window around each point.

    Args: points `(n, m)`; centers of all axes joined, axis i at `firsts[i]`, `counts[i]` long; rates `R_i/2`;
    widths of the windows; values `(cells, out)` row-major; out `(n, out)`.
    """
    if not AVAILABLE:
        raise MissingExtraError("the native kernel needs the extra 'fast': pip install 'partita[fast]'.")
    # threads of the process that forked this one are not here: work alone then
    threaded = len(points) >= 2 * _CHUNK and os.getpid() == _PROCESS
    work = _sum_in_parallel if threaded else _sum_serially
    work(points, centers, firsts, counts, rates, widths, values.reshape(-1), out)
