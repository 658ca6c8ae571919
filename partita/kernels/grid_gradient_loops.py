"""The loops behind the gradients of the product-grid sum, in points, values and slopes; compiled by numba when first used.

With `g` the factor of the outputs, the derivative along axis i is the same sum with the derivatives of that axis' weights,
`−R w(d − Σ w d)`, `d = x − c`, in place of the weights. All m of them are carried through one pass over the cells.
"""

from __future__ import annotations

import numpy as np

from partita.kernels.grid_loops import axis_weights, two_rows
from partita.kernels.native_code import fused_part, loop, part, summed_part

__all__ = ["add_whole_gradients", "add_window_gradients"]


@part
def _pulls(points, centers, firsts, counts, rates, widths, whole, cells, left, start, weights, mean, pulls):
    """The derivatives of the weights of a block, `(m, width, n)`; `whole`: of all centers. rates: R/2."""
    n = len(points)
    for j in range(n):
        left[j] = cells[j]
    for i in range(len(counts) - 1, -1, -1):
        width, factor = counts[i] if whole else widths[i], -2 * rates[i]
        for j in range(n):
            start[j] = firsts[i] + (0 if whole else left[j] % counts[i])
            left[j] //= counts[i]
            mean[j] = 0
        for a in range(width):
            share, pull = weights[i, a], pulls[i, a]
            for j in range(n):
                pull[j] = points[j, i] - centers[np.uint64(start[j] + a)]
            for j in range(n):
                mean[j] += share[j] * pull[j]
        for a in range(width):
            share, pull = weights[i, a], pulls[i, a]
            for j in range(n):
                pull[j] = factor * share[j] * (pull[j] - mean[j])


# ---- windows ---------------------------------------------------------------------------------------------------------


@summed_part
def _gather_scalars(values, cells, shift, columns, first, stride, grad, scalars):
    """`scalars[j] = Σ_o grad[j, o]·values[(cells[j] + shift)·columns + first + o·stride]`."""
    for j in range(len(cells)):
        at = (cells[j] + shift) * columns + first
        total = grad[j, 0] * values[np.uint64(at)]
        for o in range(1, grad.shape[1]):
            total += grad[j, o] * values[np.uint64(at + o * stride)]
        scalars[j] = total


@fused_part
def _fold_fields(fields, filled, axis, widths, weights, pulls, n):
    """One axis less of every field, in place: field 0 is the sum, field 1 + i its derivative along axis i."""
    width = widths[axis]
    plain, own = fields[0], fields[1 + axis]
    for b in range(filled // width):
        for j in range(n):
            own[b, j] = pulls[axis, 0, j] * plain[b * width, j]
        for a in range(1, width):
            for j in range(n):
                own[b, j] += pulls[axis, a, j] * plain[b * width + a, j]
    for f in range(len(fields)):
        if f == 0 or f > 1 + axis:
            field = fields[f]
            for b in range(filled // width):
                row = field[b]
                for j in range(n):
                    row[j] = weights[axis, 0, j] * field[b * width, j]
                for a in range(1, width):
                    for j in range(n):
                        row[j] += weights[axis, a, j] * field[b * width + a, j]
    return filled // width


@part
def _window_points(points, grad, values, slopes, origin, cells, rows, widths, weights, pulls, total, one, fields, out):
    """The gradient in the points of a block. fields: `(2m + 1, rows, n)`: sum, m derivatives, m sums of slopes."""
    n, m, outputs = len(points), len(widths), grad.shape[1]
    last, tilted = m - 1, len(slopes) > 0
    for b in range(len(rows)):
        for f in range(2 * m + 1 if tilted else m + 1):
            for j in range(n):
                fields[f, b, j] = 0
        for a in range(widths[last]):
            share, pull = weights[last, a], pulls[last, a]
            _gather_scalars(values, cells, rows[b] + a, outputs, np.int64(0), np.int64(1), grad, total)
            for k in range(m if tilted else 0):
                _gather_scalars(slopes, cells, rows[b] + a, outputs * m, k, m, grad, one)
                for j in range(n):
                    total[j] += (points[j, k] - origin[k]) * one[j]
                    fields[1 + m + k, b, j] += share[j] * one[j]
            for j in range(n):
                fields[0, b, j] += share[j] * total[j]
                fields[m, b, j] += pull[j] * total[j]
    filled = len(rows)
    for axis in range(last - 1, -1, -1):
        filled = _fold_fields(fields if tilted else fields[: m + 1], filled, axis, widths, weights, pulls, n)
    for k in range(m):
        for j in range(n):
            out[j, k] = fields[1 + k, 0, j]
        for j in range(n if tilted else 0):
            out[j, k] += fields[1 + m + k, 0, j]


@fused_part
def _window_tables(points, grad, origin, cells, rows, widths, weights, shares, in_values, in_slopes):
    """Add a block's gradients in values and slopes. shares: `(rows, n)`, the product of the weights of all axes but the last."""
    n, m, outputs = len(points), len(widths), grad.shape[1]
    for j in range(n):
        shares[0, j] = 1
    filled = 1
    for axis in range(m - 1):
        for b in range(filled - 1, -1, -1):  # downwards: what is still to be spread lies below
            for a in range(widths[axis] - 1, -1, -1):
                for j in range(n):
                    shares[b * widths[axis] + a, j] = shares[b, j] * weights[axis, a, j]
        filled *= widths[axis]
    for j in range(n):
        for b in range(len(rows)):
            for a in range(widths[m - 1]):
                share = shares[b, j] * weights[m - 1, a, j]
                at = (cells[j] + rows[b] + a) * outputs
                for o in range(outputs if len(in_values) else 0):
                    in_values[np.uint64(at + o)] += share * grad[j, o]
                for o in range(outputs if len(in_slopes) else 0):
                    for k in range(m):
                        away = points[j, k] - origin[k]
                        in_slopes[np.uint64((at + o) * m + k)] += share * grad[j, o] * away


@loop
def add_window_gradients(points, grad, axes, rows, tables, floats, integers, weights, pulls, fields, found):
    """Fill the gradient in the points and add to those in values and slopes, over each point's window; each may be empty.

    Scratch: floats `(4, block)`, integers `(3, block)`, weights and pulls `(m, width, block)`, fields `(2m + 1, rows, block)`.
    """
    centers, firsts, counts, rates, widths = axes
    values, slopes, origin = tables
    in_points, in_values, in_slopes = found
    block = floats.shape[1]
    for begin in range(0, len(points), block):
        end = min(begin + block, len(points))
        n, some, factors = end - begin, points[begin:end], grad[begin:end]
        x, start, cells = floats[0, :n], integers[0, :n], integers[1, :n]
        axis_weights(some, centers, firsts, counts, rates, widths, np.bool_(False), x, start, floats[1], cells, weights)
        if len(in_points):
            left, mean = integers[2, :n], floats[1, :n]
            _pulls(
                some, centers, firsts, counts, rates, widths, np.bool_(False), cells, left, start, weights, mean, pulls
            )
            total, one, out = floats[2, :n], floats[3, :n], in_points[begin:end]
            _window_points(
                some, factors, values, slopes, origin, cells, rows, widths, weights, pulls, total, one, fields, out
            )
        if len(in_values) or len(in_slopes):
            _window_tables(some, factors, origin, cells, rows, widths, weights, fields[0], in_values, in_slopes)


# ---- all cells -------------------------------------------------------------------------------------------------------


@fused_part
def _contract_fields(values, column, order, counts, strides, weights, pulls, sums, n):
    """As `grid_loops._contract`, with the derivatives along every axis: `sums[0, 0]` and `sums[1 + i, 0]`.

    sums: `(m + 1, m + 3, n)`: fields, levels. Field 1 + i is filled from the level of axis i on.
    """
    last, inner = len(order) - 1, order[-1]
    step, own, pulled = strides[inner], weights[inner, : counts[inner]], pulls[inner, : counts[inner]]
    if last == 0:
        two_rows(values, column, column, step, own, sums[0, 0], sums[0, 1], np.int64(0), n)
        two_rows(values, column, column, step, pulled, sums[1, 0], sums[1, 1], np.int64(0), n)
        return
    outer = 1
    for k in range(last - 1):
        outer *= counts[order[k]]
    middle = order[last - 1]
    for b in range(outer):
        index, start = b, column
        for k in range(last - 2, -1, -1):
            start += index % counts[order[k]] * strides[order[k]]
            index //= counts[order[k]]
        total, own_slope, inner_slope = sums[0, last - 1], sums[1 + middle, last - 1], sums[1 + inner, last - 1]
        for i in range(n):
            total[i] = 0
            own_slope[i] = 0
            inner_slope[i] = 0
        for a in range(0, counts[middle], 2):
            first, both = start + a * strides[middle], a + 1 < counts[middle]
            second = first + strides[middle] if both else first
            r, s, t, u = sums[0, last], sums[0, last + 1], sums[1, last], sums[1, last + 1]
            two_rows(values, first, second, step, own, r, s, np.int64(0), n)
            two_rows(values, first, second, step, pulled, t, u, np.int64(0), n)
            one, two = weights[middle, a], weights[middle, a + int(both)]
            three, four = pulls[middle, a], pulls[middle, a + int(both)]
            if not both:
                for i in range(n):
                    s[i] = 0
                    u[i] = 0
            for i in range(n):
                total[i] = total[i] + one[i] * r[i] + two[i] * s[i]
                own_slope[i] = own_slope[i] + three[i] * r[i] + four[i] * s[i]
                inner_slope[i] = inner_slope[i] + one[i] * t[i] + two[i] * u[i]
        index = b
        for k in range(last - 2, -1, -1):  # one entry more on this axis; the last one ends it
            axis = order[k]
            a = index % counts[axis]
            for f in range(len(order) + 1):
                known = f == 0 or f == 1 + axis
                for later in range(k + 1, last + 1):
                    known = known or f == 1 + order[later]
                if not known:
                    continue
                share = pulls[axis, a] if f == 1 + axis else weights[axis, a]
                behind, below = sums[0 if f == 1 + axis else f, k + 1], sums[f, k]
                if a == 0:
                    for i in range(n):
                        below[i] = share[i] * behind[i]
                else:
                    for i in range(n):
                        below[i] += share[i] * behind[i]
            if a + 1 < counts[axis]:
                break
            index //= counts[axis]


@summed_part
def _dot(x, y, n):
    """`Σ_i x_i y_i`, in an order that the compiler chooses."""
    total = x[0] * 0
    for i in range(n):
        total += x[i] * y[i]
    return total


@part
def _whole_table(factor, column, order, counts, strides, weights, digits, sums, found, n):
    """Add `Σ_j factor_j Π_i weights[i, a_i, j]` to every cell's entry; `sums`, `(m + 1, n)`, holds products in progress."""
    last, inner, cells = len(order) - 1, order[-1], 1
    for k in range(last):
        cells *= counts[order[k]]
        digits[k] = 0
    for j in range(n):
        sums[0, j] = factor[j]
    first = 0  # the first axis, in the order given, whose entry is not that of the cell before
    for _ in range(cells):
        start = column
        for k in range(last):
            start += digits[k] * strides[order[k]]
            if k >= first:
                share, before, behind = weights[order[k], digits[k]], sums[k], sums[k + 1]
                for j in range(n):
                    behind[j] = before[j] * share[j]
        for a in range(counts[inner]):
            found[start + a * strides[inner]] += _dot(weights[inner, a], sums[last], n)
        first = last
        while first > 0:
            first -= 1
            digits[first] += 1
            if digits[first] < counts[order[first]]:
                break
            digits[first] = 0


@loop
def add_whole_gradients(points, grad, axes, order, strides, tables, floats, integers, weights, pulls, sums, found):
    """The same over all cells; see `grid_loops.sum_whole` for the order and the strides, of values and of slopes.

    Scratch: floats, integers, weights and pulls as above; sums `(m + 1, m + 3, block)`.
    """
    centers, firsts, counts, rates, widths = axes
    values, slopes, origin = tables
    in_points, in_values, in_slopes = found
    m, outputs, block, digits = len(counts), grad.shape[1], floats.shape[1], strides[2]
    for begin in range(0, len(points), block):
        end = min(begin + block, len(points))
        n, some = end - begin, points[begin:end]
        x, start, cells = floats[0, :n], integers[0, :n], integers[1, :n]
        factor, tilt = floats[2], floats[3]
        axis_weights(some, centers, firsts, counts, rates, widths, np.bool_(True), x, start, floats[1], cells, weights)
        if len(in_points):
            left, mean = integers[2, :n], floats[1, :n]
            _pulls(
                some, centers, firsts, counts, rates, widths, np.bool_(True), cells, left, start, weights, mean, pulls
            )
            for j in range(n):
                for k in range(m):
                    in_points[begin + j, k] = 0
        for o in range(outputs):
            for j in range(n):
                factor[j] = grad[begin + j, o]
            if len(in_points):
                _contract_fields(values, o, order, counts, strides[0], weights, pulls, sums, n)
                for k in range(m):
                    for j in range(n):
                        in_points[begin + j, k] += factor[j] * sums[1 + k, 0, j]
            if len(in_values):
                _whole_table(factor, o, order, counts, strides[0], weights, digits, sums[0], in_values, n)
            for c in range(m if len(slopes) else 0):
                for j in range(n):
                    tilt[j] = factor[j] * (some[j, c] - origin[c])
                if len(in_points):
                    _contract_fields(slopes, o * m + c, order, counts, strides[1], weights, pulls, sums, n)
                    for k in range(m):
                        for j in range(n):
                            in_points[begin + j, k] += tilt[j] * sums[1 + k, 0, j]
                    for j in range(n):
                        in_points[begin + j, c] += factor[j] * sums[0, 0, j]
                if len(in_slopes):
                    at = o * m + c
                    _whole_table(tilt, at, order, counts, strides[1], weights, digits, sums[0], in_slopes, n)
