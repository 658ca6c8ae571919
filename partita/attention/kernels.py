"""The windowed product-grid sum as one native loop (extra: `fast`). Same arithmetic as the torch path, no temporaries.

Per query: one softmax of 2q numbers per axis, then `Σ Π_i w_i[a_i] · V[cell]` over the window, innermost axis as one run.
"""

from __future__ import annotations

import math

import numpy as np

try:
    from numba import njit, prange
except ImportError:  # the torch path does the same, slower
    AVAILABLE = False
else:
    AVAILABLE = True

__all__ = ["AVAILABLE", "grid_window_sum"]

if AVAILABLE:

    @njit(cache=True, inline="always")
    def _axis_weights(x, centers, first, count, rate, width, weights):  # type: ignore[no-untyped-def]
        """Fill `weights[:width]` with the softmax of `−rate (x − c)²` over the window; return its first index."""
        k = 0
        if count > 1:
            step = (centers[first + count - 1] - centers[first]) / (count - 1)
            k = min(max(int(math.floor((x - centers[first]) / step)), 0), count - 2)
            if x < centers[first + k]:
                k = max(k - 1, 0)
            elif x >= centers[first + k + 1]:
                k = min(k + 1, count - 2)
        start = min(max(k - width // 2 + 1, 0), count - width)
        smallest = np.inf
        for a in range(width):
            d = x - centers[first + start + a]
            weights[a] = rate * d * d
            smallest = min(smallest, weights[a])
        total = weights[0] * 0
        for a in range(width):
            weights[a] = math.exp(smallest - weights[a])
            total += weights[a]
        for a in range(width):
            weights[a] /= total
        return start

    @njit(cache=True, parallel=True, nogil=True)
    def grid_window_sum(points, centers, firsts, counts, rates, widths, values, out):  # type: ignore[no-untyped-def]
        """`out[n, o] = Σ_cells Π_i softmax_i(x_n)·values[cell, o]` over the window around each point.

        Args: points `(n, m)`; centers of all axes joined, axis i at `firsts[i]`, `counts[i]` long; rates `R_i/2`;
        widths of the windows; values `(cells, out)` row-major; out `(n, out)`.
        """
        n, m = points.shape
        last, out_dim = m - 1, values.shape[1]
        outer = 1
        for i in range(last):
            outer *= widths[i]
        widest = widths.max()
        blocks = (n + 255) // 256
        for block in prange(blocks):
            axis = np.empty(widest, points.dtype)
            inner = np.empty(widest, points.dtype)
            weight, cell = np.empty(outer, points.dtype), np.empty(outer, np.int64)
            for row in range(block * 256, min(n, (block + 1) * 256)):
                weight[0], cell[0] = 1, 0
                filled = 1
                for i in range(last):
                    w = widths[i]
                    start = _axis_weights(points[row, i], centers, firsts[i], counts[i], rates[i], w, axis)
                    for b in range(filled - 1, -1, -1):  # backwards: entry b spreads over b·w … b·w + w − 1
                        here, base = weight[b], cell[b] * counts[i] + start
                        for a in range(w - 1, -1, -1):
                            weight[b * w + a] = here * axis[a]
                            cell[b * w + a] = base + a
                    filled *= w
                w = widths[last]
                start = _axis_weights(points[row, last], centers, firsts[last], counts[last], rates[last], w, inner)
                for o in range(out_dim):
                    out[row, o] = 0
                for b in range(filled):
                    base, here = cell[b] * counts[last] + start, weight[b]
                    for a in range(w):
                        scaled = here * inner[a]
                        for o in range(out_dim):
                            out[row, o] += scaled * values[base + a, o]

else:

    def grid_window_sum(*_arguments):  # type: ignore[no-untyped-def]
        raise NotImplementedError("numba is not installed")
