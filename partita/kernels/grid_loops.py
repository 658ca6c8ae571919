"""The loops of the native kernels: imported, and compiled by numba, when `native` decides that a batch is worth it.

Only loops over arrays: operations on whole arrays would be compiled too, each with its own error messages, and take most of the
time. Scratch arrays come from the caller.
"""

from __future__ import annotations

import numpy as np

from partita.kernels.native_code import exp_native, fused_part, loop, part

__all__ = ["axis_weights", "softmax_weights", "sum_whole", "sum_windows", "two_rows", "window_starts"]

_LONG_VECTOR = 8  # outputs from which on a cell's values are read in one run


@part
def window_starts(x, centers, width, start):
    """The first of the `width` centers around each x; `centers[k] ≤ x < centers[k+1]` is settled by comparison."""
    count = len(centers)
    last = count - 2
    first = np.float64(centers[0])  # differences in float32 could miss by more than a cell
    per_unit = (count - 1) / (np.float64(centers[count - 1]) - first)
    for i in range(len(x)):
        guess = np.floor((np.float64(x[i]) - first) * per_unit)
        guess = guess if guess > 0 else 0.0  # NaN too
        start[i] = np.int64(guess if guess < last else last)
    for i in range(len(x)):
        k = start[i]
        k = max(k - (x[i] < centers[np.uint64(k)]), 0)
        k = min(k + (x[i] >= centers[np.uint64(k + 1)]), last)
        start[i] = min(max(k - width // 2 + 1, 0), count - width)


@part
def _two_weights(x, centers, rate, start, gap, weights):
    """The softmax over two centers: the nearer gets `1/(1 + e^{−|s₀−s₁|})`, one exponential."""
    for i in range(len(x)):
        left, right = x[i] - centers[np.uint64(start[i])], x[i] - centers[np.uint64(start[i] + 1)]
        gap[i] = rate * left * left - rate * right * right
    for i in range(len(x)):
        e = exp_native(-abs(gap[i]))
        near = 1 / (1 + e)
        far = e * near
        weights[0, i] = near if gap[i] <= 0 else far
        weights[1, i] = far if gap[i] <= 0 else near


@part
def softmax_weights(x, centers, rate, start, smallest, weights):
    """Fill `weights`, `(width, n)`, with the softmax of `−rate (x − c)²` over the window; x is overwritten."""
    total, n = x, len(x)
    for i in range(n):
        smallest[i] = np.inf
    for row in range(len(weights)):
        scores = weights[row]
        if len(weights) == len(centers):  # the window is the axis: one center for all queries
            c = centers[row]
            for i in range(n):
                d, least = x[i] - c, smallest[i]
                score = rate * d * d
                scores[i] = score
                smallest[i] = score if score < least else least  # NaN: the weights become NaN
        else:
            for i in range(n):
                d = x[i] - centers[np.uint64(start[i] + row)]
                scores[i] = rate * d * d
            for i in range(n):
                smallest[i] = np.minimum(smallest[i], scores[i])
    for i in range(n):
        total[i] = 0
    for row in range(len(weights)):
        scores = weights[row]
        for i in range(n):
            e = exp_native(smallest[i] - scores[i])
            scores[i] = e
            total[i] += e
    for i in range(n):
        total[i] = 1 / total[i]
    for row in range(len(weights)):
        for i in range(n):
            weights[row, i] *= total[i]


@fused_part
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


@fused_part
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


@fused_part
def _gather_vectors(values, cells, rows, widths, weights, sums, out):
    """The same for long vectors `V[cell]`, one query after the other; `sums`, `(rows, step)`, holds one vector per row."""
    last, step = len(widths) - 1, out.shape[1]
    for i in range(len(cells)):
        for b in range(len(rows)):
            row, at = sums[b], (cells[i] + rows[b]) * step
            for o in range(step):
                row[o] = 0
            for a in range(widths[last]):
                scale = weights[last, a, i]
                for o in range(step):
                    row[o] += scale * values[np.uint64(at + a * step + o)]
        filled = len(rows)
        for axis in range(last - 1, -1, -1):
            filled //= widths[axis]
            for b in range(filled):
                row, first, scale = sums[b], sums[b * widths[axis]], weights[axis, 0, i]
                for o in range(step):
                    row[o] = scale * first[o]
                for a in range(1, widths[axis]):
                    other, scale = sums[b * widths[axis] + a], weights[axis, a, i]
                    for o in range(step):
                        row[o] += scale * other[o]
        for o in range(step):
            out[i, o] = sums[0, o]


@part
def _spread(weights, width, start, n):
    """Window weights moved to their places among all centers of the axis, zeros elsewhere: adding those does not round."""
    for row in range(len(weights) - 1, -1, -1):  # downwards: what is still to be moved lies below
        for i in range(n):
            k = row - start[i]
            weights[row, i] = weights[np.uint64(k), i] if 0 <= k < width else 0


@fused_part
def two_rows(values, first, second, step, weights, r, s, lo, hi):
    """`r = Σ_a weights[a]·values[first + a·step]` and s the same from `second`; four weights a pass, each used twice.

    For the queries lo ≤ i < hi of a block.
    """
    # slices, because numba does not see that an index from lo on is not negative
    count, n, r, s = len(weights), hi - lo, r[lo:hi], s[lo:hi]
    begin = count % 4 if count % 4 else min(count, 4)
    p0, q0, w0 = values[first], values[second], weights[0][lo:hi]
    p1, q1, w1 = values[first + (begin > 1) * step], values[second + (begin > 1) * step], weights[int(begin > 1)][lo:hi]
    p2, q2, w2 = (
        values[first + 2 * (begin > 2) * step],
        values[second + 2 * (begin > 2) * step],
        weights[2 * (begin > 2)][lo:hi],
    )
    if begin == 1:
        for i in range(n):
            r[i] = p0 * w0[i]
            s[i] = q0 * w0[i]
    elif begin == 2:
        for i in range(n):
            r[i] = p0 * w0[i] + p1 * w1[i]
            s[i] = q0 * w0[i] + q1 * w1[i]
    elif begin == 3:
        for i in range(n):
            r[i] = p0 * w0[i] + p1 * w1[i] + p2 * w2[i]
            s[i] = q0 * w0[i] + q1 * w1[i] + q2 * w2[i]
    else:
        p3, q3, w3 = values[first + 3 * step], values[second + 3 * step], weights[3][lo:hi]
        for i in range(n):
            r[i] = p0 * w0[i] + p1 * w1[i] + p2 * w2[i] + p3 * w3[i]
            s[i] = q0 * w0[i] + q1 * w1[i] + q2 * w2[i] + q3 * w3[i]
    for a in range(begin, count, 4):
        p, q = first + a * step, second + a * step
        p0, p1, p2, p3 = values[p], values[p + step], values[p + 2 * step], values[p + 3 * step]
        q0, q1, q2, q3 = values[q], values[q + step], values[q + 2 * step], values[q + 3 * step]
        w0, w1, w2, w3 = weights[a][lo:hi], weights[a + 1][lo:hi], weights[a + 2][lo:hi], weights[a + 3][lo:hi]
        for i in range(n):
            r[i] = r[i] + p0 * w0[i] + p1 * w1[i] + p2 * w2[i] + p3 * w3[i]
            s[i] = s[i] + q0 * w0[i] + q1 * w1[i] + q2 * w2[i] + q3 * w3[i]


@fused_part
def _contract(values, column, order, counts, strides, weights, sums, n):
    """`sums[0] = Σ_cells Π_i weights[i, j_i]·values[Σ_i j_i strides_i + column]`, depth first: sums in progress stay in the cache.

    The axes are summed in the order given, the last one first: the longest, which leaves the least behind.
    """
    last, inner = len(order) - 1, order[-1]
    step, own = strides[inner], weights[inner, : counts[inner]]
    r, s = sums[last], sums[last + 1]
    if last == 0:
        two_rows(values, column, column, step, own, r, s, np.int64(0), n)
        return
    outer, middle, total = 1, order[last - 1], sums[last - 1]
    for k in range(last - 1):
        outer *= counts[order[k]]
    shares = weights[middle]
    for b in range(outer):
        index, start = b, column
        for k in range(last - 2, -1, -1):
            start += index % counts[order[k]] * strides[order[k]]
            index //= counts[order[k]]
        for a in range(0, counts[middle], 2):
            first, both = start + a * strides[middle], a + 1 < counts[middle]
            two_rows(values, first, first + strides[middle] if both else first, step, own, r, s, np.int64(0), n)
            one, two = shares[a], shares[a + int(both)]
            if not both:
                for i in range(n):
                    s[i] = 0
            if a == 0:
                for i in range(n):
                    total[i] = one[i] * r[i] + two[i] * s[i]
            else:
                for i in range(n):
                    total[i] = total[i] + one[i] * r[i] + two[i] * s[i]
        index = b
        for k in range(last - 2, -1, -1):  # one entry more on this axis; the last one ends it
            a = index % counts[order[k]]
            share, behind, below = weights[order[k], a], sums[k + 1], sums[k]
            if a == 0:
                for i in range(n):
                    below[i] = share[i] * behind[i]
            else:
                for i in range(n):
                    below[i] += share[i] * behind[i]
            if a + 1 < counts[order[k]]:
                break
            index //= counts[order[k]]


@fused_part
def _add_tilted(points, origin, tilts, out):
    """`out[i, o] += Σ_k (points[i, k] − origin[k])·tilts[i, o·m + k]`."""
    m = len(origin)
    for i in range(len(out)):
        for o in range(out.shape[1]):
            for k in range(m):
                out[i, o] += (points[i, k] - origin[k]) * tilts[i, o * m + k]


@part
def axis_weights(points, centers, firsts, counts, rates, widths, whole, x, start, scratch, cells, weights):
    """Softmax weights `(m, width, n)` of a block's queries, and the first cell of their windows; `whole`: of all centers."""
    n = len(x)
    for j in range(n):
        cells[j] = 0
    for i in range(len(counts)):
        axis = centers[firsts[i] : firsts[i] + counts[i]]
        for j in range(n):
            x[j] = points[j, i]
            start[j] = 0
        if widths[i] < counts[i]:
            window_starts(x, axis, widths[i], start)
        for j in range(n):
            cells[j] = cells[j] * counts[i] + start[j]
        if widths[i] == 2:
            _two_weights(x, axis, rates[i], start, scratch, weights[i])
        else:
            softmax_weights(x, axis, rates[i], start, scratch, weights[i, : widths[i]])
        if whole and widths[i] < counts[i]:
            _spread(weights[i, : counts[i]], widths[i], start, n)


@part
def _sum_window(values, cells, scaled, rows, widths, weights, sums, vectors, out):
    """One table of values, `(cells, step)` flat, for the queries of a block: `out`, `(n, step)`."""
    n, m, step = len(cells), len(widths), out.shape[1]
    if step >= _LONG_VECTOR:
        _gather_vectors(values, cells, rows, widths, weights, vectors, out)
        return
    for i in range(n):
        scaled[i] = cells[i] * step
    for o in range(step):
        for b in range(len(rows)):
            _gather(values, scaled, rows[b] * step + o, step, weights[m - 1, : widths[m - 1]], sums[b])
        filled = len(rows)
        for i in range(m - 2, -1, -1):
            filled = _fold(sums, filled, weights[i, : widths[i]], n)
        for i in range(n):
            out[i, o] = sums[0, i]


@loop
def sum_windows(points, axes, rows, values, slopes, origin, floats, integers, weights, sums, vectors, tilts, out):
    """Fill `out` with the sums over each point's window; see `grid_native.grid_sum`.

    axes: what describes the grid. rows: cell numbers of the window's innermost rows, relative to its first cell. Scratch: floats
    and integers `(2, block)`, weights `(m, width, block)`, sums `(rows, block)`, vectors `(rows, out)`, tilts `(block, out·m)`.
    """
    centers, firsts, counts, rates, widths = axes
    block = floats.shape[1]
    for begin in range(0, len(points), block):
        end = min(begin + block, len(points))
        n, some, answers = end - begin, points[begin:end], out[begin:end]
        x, start, cells = floats[0, :n], integers[0, :n], integers[1, :n]
        axis_weights(some, centers, firsts, counts, rates, widths, np.bool_(False), x, start, floats[1], cells, weights)
        _sum_window(values, cells, start, rows, widths, weights, sums, vectors, answers)
        if len(slopes):
            _sum_window(slopes, cells, start, rows, widths, weights, sums, vectors, tilts[:n])
            _add_tilted(some, origin, tilts, answers)


@part
def _sum_all(values, order, counts, strides, weights, sums, out):
    """One table of values, all cells, for the queries of a block."""
    for o in range(out.shape[1]):
        _contract(values, o, order, counts, strides, weights, sums, len(out))
        for i in range(len(out)):
            out[i, o] = sums[0, i]


@loop
def sum_whole(points, axes, order, strides, values, slopes, origin, floats, integers, weights, sums, tilts, out):
    """The same over all cells, with weight zero outside the window: every query reads the same values.

    order: of the axes, the last one summed first. strides: along each axis, of the values and of the slopes. sums:
    `(m + 1, block)`.
    """
    centers, firsts, counts, rates, widths = axes
    block = floats.shape[1]
    for begin in range(0, len(points), block):
        end = min(begin + block, len(points))
        n, some, answers = end - begin, points[begin:end], out[begin:end]
        x, start, cells = floats[0, :n], integers[0, :n], integers[1, :n]
        axis_weights(some, centers, firsts, counts, rates, widths, np.bool_(True), x, start, floats[1], cells, weights)
        _sum_all(values, order, counts, strides[0], weights, sums, answers)
        if len(slopes):
            _sum_all(slopes, order, counts, strides[1], weights, sums, tilts[:n])
            _add_tilted(some, origin, tilts, answers)
