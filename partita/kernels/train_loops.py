"""The loops behind sums over tensor trains and their gradients: compiled by numba when first used.

Axis by axis the queries of a block are sorted by the window of centers that matters to them. Those that share a window read
the same entries of the core, so that every inner loop runs over queries.
"""

from __future__ import annotations

import numpy as np

from partita.kernels.grid_loops import softmax_weights, two_rows, window_starts
from partita.kernels.native_code import fused_part, loop, part, summed_part

__all__ = ["add_train_gradients", "sum_train"]


@part
def _sort_axis(points, axis, centers, width, guess, tally, order, start):
    """`order`: the queries sorted by the first center of their window, which `start` lists in that order."""
    n, count = len(points), len(centers)
    if width == count:
        for j in range(n):
            order[j] = j
            start[j] = 0
        return
    x = guess[0]
    for j in range(n):
        x[j] = points[j, axis]
    window_starts(x[:n], centers, width, start)
    for k in range(count + 1):
        tally[k] = 0
    for j in range(n):
        tally[start[j] + 1] += 1
    for k in range(count):
        tally[k + 1] += tally[k]
    for j in range(n):
        k = start[j]
        order[tally[k]] = j
        tally[k] += 1
    first = 0
    for k in range(count):  # tally[k] is now where the queries of window k end
        for j in range(first, tally[k]):
            start[j] = k
        first = tally[k]


@part
def _weigh_axis(points, axis, centers, rate, width, order, start, lines, weights):
    """Softmax weights `(width, n)` in the order given."""
    n, x = len(points), lines[0, : len(points)]
    for j in range(n):
        x[j] = points[order[j], axis]
    softmax_weights(x, centers, rate, start, lines[1], weights[:width])


@part
def _move_rows(rows, rank, place, order, moved):
    """`rows` from the order in which query q is at `place[q]` to `order`."""
    for a in range(rank):
        given, taken = rows[a], moved[a]
        for j in range(len(order)):
            taken[j] = given[np.uint64(place[order[j]])]


@part
def _place(order, place):
    for j in range(len(order)):
        place[order[j]] = j


@fused_part
def _add_two(share, r, s, lo, hi, is_first, both, one, two):
    """`one += share·r` and `two += share·s` for the queries lo ≤ i < hi; set, if they are the first."""
    share, r, s, one, two = share[lo:hi], r[lo:hi], s[lo:hi], one[lo:hi], two[lo:hi]
    if is_first and both:
        for i in range(len(r)):
            one[i] = share[i] * r[i]
            two[i] = share[i] * s[i]
    elif is_first:
        for i in range(len(r)):
            one[i] = share[i] * r[i]
    elif both:
        for i in range(len(r)):
            one[i] += share[i] * r[i]
            two[i] += share[i] * s[i]
    else:
        for i in range(len(r)):
            one[i] += share[i] * r[i]


@part
def _times_core(core, shape, rows, weights, start, r, s, n, product):
    """`product[b] = Σ_{a,k} rows[a]·weights[k]·core[a, start + k, b]` for every query of a block."""
    left, count, right, width = shape
    lo = np.int64(0)
    while lo < n:
        hi, first = lo + 1, start[lo] * right
        while hi < n and start[hi] == start[lo]:
            hi += 1
        for b in range(0, right, 2):
            both = int(b + 1 < right)
            for t in range(min(left, width)):  # the longer sum is the inner one
                if left >= width:
                    at, share = first + t * right + b, weights[t]
                    two_rows(core, at, at + both, count * right, rows[:left], r, s, lo, hi)
                else:
                    at, share = first + t * count * right + b, rows[t]
                    two_rows(core, at, at + both, right, weights[:width], r, s, lo, hi)
                _add_two(share, r, s, lo, hi, t == 0, both == 1, product[b], product[b + both])
        lo = hi


@loop
def sum_train(points, axes, cores, shapes, lines, rows, weights, integers, tally, out):
    """Fill `out`, `(n, r_m)`.

    axes: centers, firsts, counts, rates R/2. cores: all of them, flat. shapes: `(m, 5)`, for each core r_{i−1}, P_i, r_i, the width
    of the window, and where the core begins. Scratch: lines `(4, block)`, rows `(2, rank, block)`, weights `(width, block)`,
    integers `(3, block)`.
    """
    centers, firsts, counts, rates = axes
    block = lines.shape[1]
    for begin in range(0, len(points), block):
        some = points[begin : min(begin + block, len(points))]
        n = len(some)
        order, start, place = integers[0, :n], integers[1, :n], integers[2, :n]
        for j in range(n):
            rows[0, 0, j] = 1
            place[j] = j
        for i in range(len(counts)):
            axis, width = centers[firsts[i] : firsts[i] + counts[i]], shapes[i, 3]
            _sort_axis(some, i, axis, width, lines, tally, order, start)
            _weigh_axis(some, i, axis, rates[i], width, order, start, lines, weights)
            _move_rows(rows[0], shapes[i, 0], place, order, rows[1])
            shape = (shapes[i, 0], shapes[i, 1], shapes[i, 2], width)
            _times_core(cores[shapes[i, 4] :], shape, rows[1], weights, start, lines[2], lines[3], n, rows[0])
            _place(order, place)
        for o in range(out.shape[1]):
            for j in range(n):
                out[begin + j, o] = rows[0, o, place[j]]


# ---- gradients -------------------------------------------------------------------------------------------------------


@part
def _pull_axis(points, axis, centers, rate, width, order, start, weights, mean, pulls):
    """The derivatives of the weights, `−R w(d − Σ w d)`, `d = x − c`; rate: R/2."""
    n = len(order)
    for j in range(n):
        mean[j] = 0
    for k in range(width):
        share, pull = weights[k], pulls[k]
        for j in range(n):
            pull[j] = points[order[j], axis] - centers[np.uint64(start[j] + k)]
        for j in range(n):
            mean[j] += share[j] * pull[j]
    for k in range(width):
        share, pull = weights[k], pulls[k]
        for j in range(n):
            pull[j] = -2 * rate * share[j] * (pull[j] - mean[j])


@summed_part
def _dot(x, y):
    """`Σ_i x_i y_i`, in an order that the compiler chooses."""
    total = x[0] * y[0]
    for i in range(1, len(x)):
        total += x[i] * y[i]
    return total


@part
def _times_column(core, shape, columns, weights, start, r, s, n, product):
    """`product[a] = Σ_{k,b} weights[k]·core[a, start + k, b]·columns[b]`: `_times_core` from the other side."""
    left, count, right, width = shape
    lo, step = np.int64(0), count * right
    while lo < n:
        hi, first = lo + 1, start[lo] * right
        while hi < n and start[hi] == start[lo]:
            hi += 1
        for a in range(0, left, 2):
            both = int(a + 1 < left)
            for t in range(min(right, width)):
                if right >= width:
                    at, share = first + a * step + t * right, weights[t]
                    two_rows(core, at, at + both * step, np.int64(1), columns[:right], r, s, lo, hi)
                else:
                    at, share = first + a * step + t, columns[t]
                    two_rows(core, at, at + both * step, right, weights[:width], r, s, lo, hi)
                _add_two(share, r, s, lo, hi, t == 0, both == 1, product[a], product[a + both])
        lo = hi


@part
def _add_core(shape, rows, columns, weights, start, pair, n, found):
    """`found[a, start + k, b] += Σ_j rows[a, j]·weights[k, j]·columns[b, j]`."""
    left, count, right, width = shape
    lo = np.int64(0)
    while lo < n:
        hi = lo + 1
        while hi < n and start[hi] == start[lo]:
            hi += 1
        own = pair[lo:hi]
        for a in range(left):
            row = rows[a][lo:hi]
            for b in range(right):
                column = columns[b][lo:hi]
                for i in range(len(own)):
                    own[i] = row[i] * column[i]
                for k in range(width):
                    found[(a * count + start[lo] + k) * right + b] += _dot(own, weights[k][lo:hi])
        lo = hi


@loop
def add_train_gradients(points, grad, axes, cores, shapes, lines, rows, weights, pulls, integers, tally, found):
    """Fill the gradient in the points and add to those in the cores, flat; each may be empty.

    Scratch as for `sum_train`, with rows `(m + 3, rank, block)`, weights `(m, width, block)`, integers `(2m + 2, block)`.
    """
    centers, firsts, counts, rates = axes
    in_points, in_cores = found
    block, m = lines.shape[1], len(counts)
    spare, one, two = m, m + 1, m + 2
    for begin in range(0, len(points), block):
        some = points[begin : min(begin + block, len(points))]
        n = len(some)
        place = integers[2 * m, :n]
        for j in range(n):
            rows[spare, 0, j] = 1
            place[j] = j
        for i in range(m):  # the rows before each axis, in its own order
            axis, width = centers[firsts[i] : firsts[i] + counts[i]], shapes[i, 3]
            order, start = integers[2 * i, :n], integers[2 * i + 1, :n]
            _sort_axis(some, i, axis, width, lines, tally, order, start)
            _weigh_axis(some, i, axis, rates[i], width, order, start, lines, weights[i])
            _move_rows(rows[spare], shapes[i, 0], place, order, rows[i])
            shape = (shapes[i, 0], shapes[i, 1], shapes[i, 2], width)
            if i + 1 < m:
                core = cores[shapes[i, 4] :]
                _times_core(core, shape, rows[i], weights[i], start, lines[2], lines[3], n, rows[spare])
            _place(order, place)
        for o in range(grad.shape[1]):
            for j in range(n):
                rows[one, o, place[j]] = grad[begin + j, o]
        for i in range(m - 1, -1, -1):  # columns from the right; they come in the order of the axis behind
            axis, width = centers[firsts[i] : firsts[i] + counts[i]], shapes[i, 3]
            order, start = integers[2 * i, :n], integers[2 * i + 1, :n]
            shape, core = (shapes[i, 0], shapes[i, 1], shapes[i, 2], width), cores[shapes[i, 4] :]
            _move_rows(rows[one], shapes[i, 2], place, order, rows[two])
            if len(in_points):
                _pull_axis(some, i, axis, rates[i], width, order, start, weights[i], lines[0], pulls)
                _times_core(core, shape, rows[i], pulls, start, lines[2], lines[3], n, rows[spare])
                for j in range(n):
                    lines[1, j] = 0
                for b in range(shapes[i, 2]):
                    moved, column = rows[spare, b], rows[two, b]
                    for j in range(n):
                        lines[1, j] += moved[j] * column[j]
                for j in range(n):
                    in_points[begin + order[j], i] = lines[1, j]
            if len(in_cores):
                _add_core(shape, rows[i], rows[two], weights[i], start, lines[1], n, in_cores[shapes[i, 4] :])
            if i > 0:
                _times_column(core, shape, rows[two], weights[i], start, lines[2], lines[3], n, rows[one])
            _place(order, place)
