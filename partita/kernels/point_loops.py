"""The sum over the cells that matter for one point, in plain float64 arithmetic.

The same source runs twice: interpreted, on lists and memory views, and compiled by numba (`point_native`), on arrays. Both give the
same bits: every operation is one IEEE 754 operation in the order written here, nothing is fused or reordered, and both call the
C library's `exp`. An exponential is always added to a sum in the loop that forms it, so that the compiler cannot take a vector
of four at once, which would be another function.

Running terms. `x − c` is formed first, then `R/2·d·d`, the difference to the best score, and exp (within 1 unit in the last place):
this is what `score-rounding` assumes with 8 units. Grid and train weights are multiplied by the reciprocal of their sum, and a
grid is summed axis after axis, so that a term passes through `Σ_i width_i` additions. Scattered cells are summed with weights
relative to the best one and divided at the end: the same number of roundings. Heads in float32 are run in float64 on the input
rounded to float32, and the result is rounded once: every rounding error is smaller than the one counted. Exponents below −746
give exp = 0. Nothing is flushed to zero: the caller checks that the thread keeps subnormal numbers.
"""

from __future__ import annotations

from math import exp

import numpy as np

__all__ = [
    "axis_weights",
    "exponentials",
    "finished",
    "grid_entry",
    "grid_point",
    "placed",
    "scattered_entry",
    "scattered_point",
    "train_entry",
    "train_point",
    "window_sum",
]

LEAST_EXPONENT = -746.0  # e^x is 0 in float64 below


def axis_weights(x, centers, first, count, width, rate, weights, at):
    """Put the softmax of `−rate (x − c)²` over the window around x at `weights[at]`; returns where the window starts.

    The axis has `count` centers, the first at `centers[first]`. `centers[k] ≤ x < centers[k+1]` is settled by comparison.
    """
    start = 0
    if width < count:
        low, last, k = centers[first], count - 2, 0
        guess = (x - low) * ((count - 1) / (centers[first + count - 1] - low))
        if guess >= last:
            k = last
        elif guess > 0:  # not for NaN
            k = int(guess)
        if k > 0 and x < centers[first + k]:
            k -= 1
        if k < last and x >= centers[first + k + 1]:
            k += 1
        start = min(max(k - width // 2 + 1, 0), count - width)
    begin = first + start - at
    difference = x - centers[first + start]
    least = rate * difference * difference
    for k in range(at, at + width):
        difference = x - centers[begin + k]
        score = rate * difference * difference
        weights[k] = score
        if score < least:
            least = score
    total = 0.0
    for k in range(at, at + width):
        e = exp(least - weights[k])
        weights[k] = e
        total += e
    scale = 1.0 / total
    for k in range(at, at + width):
        weights[k] *= scale
    return start


def window_sum(table, step, cell, counts, widths, scratch, end):
    """`Σ Π_i w_i·table[cell]` over a window, axis after axis, for `step` columns; the sums are left at `scratch[end]`.

    The weights of the axes lie in `scratch` one after the other and end at `end`. `cell` is the first one of the window. The last
    axis is summed last, so that the numbers of a row are added to sums of their own, which take turns in the processor.
    """
    last = len(counts) - 1
    begin, length, rows, at = end - widths[last], widths[last] * step, 1, cell * step
    for i in range(last):
        rows *= widths[i]
    for b in range(rows):
        index, axis, weights, stride, given = b, last - 1, begin, counts[last] * step, -1
        while axis >= 0:  # one entry more on this axis; its last one ends it
            weights -= widths[axis]
            k, sums = index % widths[axis], end + axis * length
            weight = scratch[weights + k]
            if given < 0:
                if k == 0:
                    for j in range(length):
                        scratch[sums + j] = weight * table[at + j]
                else:
                    for j in range(length):
                        scratch[sums + j] += weight * table[at + j]
            elif k == 0:
                for j in range(length):
                    scratch[sums + j] = weight * scratch[given + j]
            else:
                for j in range(length):
                    scratch[sums + j] += weight * scratch[given + j]
            if k + 1 < widths[axis]:
                at += stride
                break
            at -= k * stride
            given = sums
            index //= widths[axis]
            stride *= counts[axis]
            axis -= 1
    for o in range(step):
        total = 0.0
        for k in range(widths[last]):
            place = k * step + o
            total += scratch[begin + k] * (scratch[end + place] if last > 0 else table[at + place])
        scratch[end + o] = total


def grid_point(z, scratch, out, counts, widths, rates, centers, values, slopes, origin):
    """Fill `out` with a grid head's outputs at z.

    Args, flat:
        counts, widths: of centers and of the window on each axis.
        rates: `R_i/2`.
        centers: of all axes, joined.
        values: `(cells, out)`.
        slopes: `(cells, out, m)`, or nothing.
        origin: `(m,)`, or nothing without slopes.
        scratch: `Σ_i width_i + m·width_m·columns` numbers, columns = out, or out·m with slopes.
    """
    m, first, end, cell = len(counts), 0, 0, 0
    for i in range(m):
        start = axis_weights(z[i], centers, first, counts[i], widths[i], rates[i], scratch, end)
        cell = cell * counts[i] + start
        first += counts[i]
        end += widths[i]
    window_sum(values, len(out), cell, counts, widths, scratch, end)
    for o in range(len(out)):
        out[o] = scratch[end + o]
    if len(slopes) > 0:
        window_sum(slopes, len(out) * m, cell, counts, widths, scratch, end)
        for o in range(len(out)):
            for i in range(m):
                out[o] += (z[i] - origin[i]) * scratch[end + o * m + i]


def scattered_point(z, scratch, out, sizes, rates, centers, powers, values, slopes):
    """Fill `out` with a scattered head's outputs at z: all cells whose weight is not 0.

    Args, flat:
        sizes: N, and the number of powers, N or 0.
        rates: `R/2`, one number.
        centers: `(N, m)`.
        powers: `(N,)`, or nothing.
        values: `(N, out)`.
        slopes: `(N, out, m)`, or nothing.
        scratch: N numbers.
    """
    m, outs, keys, rate = len(z), len(out), sizes[0], rates[0]
    best = 0.0
    for j in range(keys):
        score, at = 0.0, j * m
        for i in range(m):
            difference = z[i] - centers[at + i]
            score -= difference * difference
        if sizes[1] > 0:
            score += powers[j]
        score *= rate
        scratch[j] = score
        if j == 0 or score > best:
            best = score
    for o in range(outs):
        out[o] = 0.0
    total = 0.0
    for j in range(keys):
        trails = scratch[j] - best
        if trails < LEAST_EXPONENT:
            continue
        e = exp(trails)
        total += e
        for o in range(outs):
            value, at = values[j * outs + o], (j * outs + o) * m
            if len(slopes) > 0:
                for i in range(m):
                    value += slopes[at + i] * (z[i] - centers[j * m + i])
            out[o] += e * value
    scale = 1.0 / total
    for o in range(outs):
        out[o] *= scale


def train_point(z, scratch, out, counts, ranks, rates, centers, cores):
    """Fill `out` with a tensor-train head's outputs at z, the product of its averaged matrices from the left.

    Args, flat:
        counts: of the centers on each axis.
        ranks: r_0 = 1, r_1, …, r_m = outputs.
        rates: `R_i/2`.
        centers: of all axes, joined.
        cores: all of them, `(r_{i−1}, P_i, r_i)`, joined.
        scratch: `max P_i + 3 max r_i` numbers.
    """
    longest, widest = 0, 1
    for i in range(len(counts)):
        longest, widest = max(longest, counts[i]), max(widest, ranks[i + 1])
    row, new, mean = longest, longest + widest, longest + 2 * widest
    scratch[row] = 1.0
    first, at = 0, 0
    for i in range(len(counts)):
        count, right = counts[i], ranks[i + 1]
        axis_weights(z[i], centers, first, count, count, rates[i], scratch, 0)
        first += count
        for r in range(right):
            scratch[new + r] = 0.0
        for left in range(ranks[i]):
            for r in range(right):
                scratch[mean + r] = 0.0
            for k in range(count):
                weight = scratch[k]
                for r in range(right):
                    scratch[mean + r] += weight * cores[at + r]
                at += right
            for r in range(right):
                scratch[new + r] += scratch[row + left] * scratch[mean + r]
        row, new = new, row
    for o in range(len(out)):
        out[o] = scratch[row + o]


# ---- compiled only: the checks and the sum in one call. A point arrives as bytes, and a head as one array of integers and one of
# floats, because every array that is passed costs a tenth of a microsecond. These functions are in this file because numba's
# cache looks at the file of the outermost function alone.


def exponentials(x, out):
    """`out = exp(x)` as the loops call it; returns the sum."""
    total = 0.0
    for i in range(len(x)):
        e = exp(x[i])
        out[i] = e
        total += e
    return total


def placed(packed, integers, numbers, x):
    """Fill x with the packed point and say whether there is an answer. Rule 0 refuses points outside, 1 clamps, 2 allows."""
    z, rule, single, m = np.frombuffer(packed, np.float64), integers[0], integers[1], integers[3]
    if len(z) != m or numbers[0] * 0.5 == 0.0:  # this thread flushes subnormal numbers
        return False
    for i in range(m):
        t, lo, hi = z[i], numbers[1 + i], numbers[1 + m + i]
        if rule == 0 and not lo <= t <= hi:
            return False
        if rule == 1:
            t = lo if t < lo else hi if t > hi else t
        x[i] = np.float64(np.float32(t)) if single > 0 else t
        if not (np.isfinite(z[i]) and np.isfinite(x[i])):
            return False
    return True


def finished(found, single, out):
    """Copy the outputs to `out`, rounded to float32 if the head is in it; returns the first, NaN if one is not finite.

    `out` is written and never read, so the number returned is right even if another thread writes to the same `out`.
    """
    fine = True
    for o in range(len(out)):
        if single > 0:
            found[o] = np.float64(np.float32(found[o]))
        fine = fine and np.isfinite(found[o])
        out[o] = found[o]
    return found[0] if fine else np.nan


def grid_entry(packed, out, integers, numbers, values, slopes, origin):
    """A grid head's outputs at a packed point, checked, into `out`; returns the first, or NaN if there is no answer."""
    m = integers[3]
    held = np.empty(m + len(out) + integers[2])
    x, found, scratch = held[:m], held[m : m + len(out)], held[m + len(out) :]
    if not placed(packed, integers, numbers, x):
        return np.nan
    counts, widths = integers[4 : 4 + m], integers[4 + m : 4 + 2 * m]
    rates = 1 + 2 * m
    centers = rates + m
    r, c = numbers[rates:centers], numbers[centers:]
    grid_point(x, scratch, found, counts, widths, r, c, values, slopes, origin)
    return finished(found, integers[1], out)


def scattered_entry(packed, out, integers, numbers):
    """The same for a scattered head."""
    m, keys = integers[3], integers[4]
    held = np.empty(m + len(out) + integers[2])
    x, found, scratch = held[:m], held[m : m + len(out)], held[m + len(out) :]
    if not placed(packed, integers, numbers, x):
        return np.nan
    rates = 1 + 2 * m
    centers = rates + 1
    powers = centers + keys * m
    values = powers + integers[5]
    slopes = values + keys * len(out)
    r, c, p = numbers[rates:centers], numbers[centers:powers], numbers[powers:values]
    scattered_point(x, scratch, found, integers[4:6], r, c, p, numbers[values:slopes], numbers[slopes:])
    return finished(found, integers[1], out)


def train_entry(packed, out, integers, numbers):
    """The same for a tensor-train head."""
    m = integers[3]
    held = np.empty(m + len(out) + integers[2])
    x, found, scratch = held[:m], held[m : m + len(out)], held[m + len(out) :]
    if not placed(packed, integers, numbers, x):
        return np.nan
    counts, ranks = integers[4 : 4 + m], integers[4 + m : 5 + 2 * m]
    rates = 1 + 2 * m
    centers = rates + m
    cores = centers
    for i in range(m):
        cores += counts[i]
    r, c = numbers[rates:centers], numbers[centers:cores]
    train_point(x, scratch, found, counts, ranks, r, c, numbers[cores:])
    return finished(found, integers[1], out)
