"""The loops of `point_loops` compiled by numba, behind one call that takes a packed point. Imported only where numba is.

A point arrives as bytes and the constants of a head as one array of integers and one of floats, because every array that is passed
costs a tenth of a microsecond.
"""

from __future__ import annotations

from math import exp

import numpy as np
from numba.extending import register_jitable

from partita.kernels import point_loops
from partita.kernels.native_code import loop

__all__ = ["ENTRIES", "exponentials"]

for _helper in (point_loops.axis_weights, point_loops.window_sum):
    register_jitable(_helper)

_grid_point = loop(point_loops.grid_point)
_scattered_point = loop(point_loops.scattered_point)
_train_point = loop(point_loops.train_point)


@loop
def exponentials(x, out):
    """`out = exp(x)` as the loops call it; returns the sum."""
    total = 0.0
    for i in range(len(x)):
        e = exp(x[i])
        out[i] = e
        total += e
    return total


@loop
def _placed(packed, integers, numbers, x):
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


@loop
def _finished(out, single):
    """Round the outputs to float32 if the head is in it; returns the first, NaN if one is not finite."""
    fine = True
    for o in range(len(out)):
        if single > 0:
            out[o] = np.float64(np.float32(out[o]))
        fine = fine and np.isfinite(out[o])
    return out[0] if fine else np.nan


@loop
def _grid(packed, out, integers, numbers, values, slopes, origin):
    m = integers[3]
    held = np.empty(m + integers[2])
    x, scratch = held[:m], held[m:]
    if not _placed(packed, integers, numbers, x):
        return np.nan
    counts, widths = integers[4 : 4 + m], integers[4 + m : 4 + 2 * m]
    rates = 1 + 2 * m
    centers = rates + m
    r, c = numbers[rates:centers], numbers[centers:]
    _grid_point(x, scratch, out, counts, widths, r, c, values, slopes, origin)
    return _finished(out, integers[1])


@loop
def _scattered(packed, out, integers, numbers):
    m, keys = integers[3], integers[4]
    held = np.empty(m + integers[2])
    x, scratch = held[:m], held[m:]
    if not _placed(packed, integers, numbers, x):
        return np.nan
    rates = 1 + 2 * m
    centers = rates + 1
    powers = centers + keys * m
    values = powers + integers[5]
    slopes = values + keys * len(out)
    r, c, p = numbers[rates:centers], numbers[centers:powers], numbers[powers:values]
    _scattered_point(x, scratch, out, integers[4:6], r, c, p, numbers[values:slopes], numbers[slopes:])
    return _finished(out, integers[1])


@loop
def _train(packed, out, integers, numbers):
    m = integers[3]
    held = np.empty(m + integers[2])
    x, scratch = held[:m], held[m:]
    if not _placed(packed, integers, numbers, x):
        return np.nan
    counts, ranks = integers[4 : 4 + m], integers[4 + m : 5 + 2 * m]
    rates = 1 + 2 * m
    centers = rates + m
    cores = centers
    for i in range(m):
        cores += counts[i]
    r, c = numbers[rates:centers], numbers[centers:cores]
    _train_point(x, scratch, out, counts, ranks, r, c, numbers[cores:])
    return _finished(out, integers[1])


ENTRIES = {"grid": _grid, "scattered": _scattered, "train": _train}
