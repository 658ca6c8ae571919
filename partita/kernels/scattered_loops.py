"""Native loops over scattered keys: the tree of boxes, the keys that matter to each query, and their weighted sums.

Keys lie in leaves of eight (`LEAF`), leaves in nodes of eight, and so on; a node is known by its box and by the largest power in
it. What is left out is decided for whole leaves by `|q − box|² − max p`, a lower bound of `|q − k|² − p`. Inner loops run over
the axes, whose number is the length of the tuple `axes`: the compiler knows it; the eight keys of a leaf are two vectors of four.

Leaves that trail the best score by more than `_FAR + m` are far. Their weights are within 6·10⁻⁹, not 2 ulp: they are added up by
themselves, and once more with exact ones if they exceed 2⁻²⁸ of the others. So they move a sum by less than 2⁻⁵⁵ of it.
"""

from __future__ import annotations

import math

import numpy as np

from partita.kernels.native_code import (
    append_set,
    at_most,
    exp2_four,
    exp2_short,
    four,
    fours_from,
    fused_part,
    inlined_part,
    larger_four,
    least_of,
    least_part,
    loop,
    part,
    prefetch,
    put_four,
    smaller_four,
    summed_part,
    total_of,
)

__all__ = [
    "LEAF",
    "home_leaves",
    "order_by_cells",
    "scattered_gradients",
    "sort_by_number",
    "sum_scattered",
]

LEAF = 8  # keys in a leaf, and nodes in a node: two vectors of four, one of eight
_FAR = 18.0  # scores that trail by this and one per axis: the weights beyond sum up to some 2⁻²⁸ of all where keys are dense
_NEGLIGIBLE = 2.0**-28
_EXACT, _SHORT = (), (0,)  # exponentials: the compiler knows the length of a tuple
_OVERSHOOT = 30.0  # e to this power is the largest weight relative to the reference score
_IN_CACHE = 64  # leaves, whose keys the nearest cache holds
_AHEAD = 8  # queries, whose keys are read into the cache
_TOGETHER = 8  # queries that go down the tree side by side
_NEIGHBOURS = 2  # leaves in a row whose queries share a list
_LOG_2 = math.log(2.0)
_ROUNDINGS = 2.0**-48  # that bounds and squares pass through, in units of float64


@part
def _select(along, order, first, last, middle):
    """Rearrange `[first, last)` so that no entry before `middle` exceeds one behind it (Hoare's quickselect)."""
    low, high = first, last - 1
    while low < high:
        a, b, c = along[low], along[(low + high) // 2], along[high]
        pivot = max(min(a, b), min(max(a, b), c))
        i, j = low, high
        while i <= j:
            while along[i] < pivot:
                i += 1
            while along[j] > pivot:
                j -= 1
            if i <= j:
                along[i], along[j] = along[j], along[i]
                order[i], order[j] = order[j], order[i]
                i += 1
                j -= 1
        if middle <= j:
            high = j
        elif middle >= i:
            low = i
        else:
            return


@loop
def order_by_cells(points, order, along, cuts):
    """Sort row numbers into the leaves of a k-d tree, in place: every node is cut across its longest side.

    Cuts fall between whole nodes of the next level, so that leaves, and nodes of eight, of 64, … leaves are runs of the order.

    Args:
        points: `(n, m)`. order: `arange(n)` at first. along: scratch `(n,)`.
        cuts: `(leaves, 4)`, filled with the planes: the first child, the second one, the axis, the bits of the place. Points
            with a smaller coordinate belong to the first child. A child c < 0 is the leaf −1 − c. Plane 0 is the first, if any.

    Returns:
        How many planes there are.
    """
    starts, ends, above, held, planes = np.empty(128, np.int64), np.empty(128, np.int64), np.empty(128, np.int64), 1, 0
    starts[0], ends[0], above[0] = 0, len(order), -1
    while held > 0:
        held -= 1
        first, last, parent = starts[held], ends[held], above[held]
        if parent >= 0:
            cuts[parent // 2, parent % 2] = -1 - first // LEAF
        if last - first <= LEAF:
            continue
        axis, widest = 0, -1.0
        for d in range(points.shape[1]):
            low, high = np.inf, -np.inf
            for i in range(first, last):
                x = points[order[i], d]
                low, high = min(low, x), max(high, x)
            if high - low > widest:
                axis, widest = d, high - low
        if widest == 0:
            continue
        for i in range(first, last):
            along[i] = points[order[i], axis]
        unit = LEAF
        while unit * LEAF < last - first:
            unit *= LEAF
        middle = first + max(1, (last - first + unit - 1) // unit // 2) * unit
        _select(along, order, first, last, middle)
        cuts[planes, 2], cuts[planes, 3] = axis, np.float64(along[middle]).view(np.int64)
        if parent >= 0:
            cuts[parent // 2, parent % 2] = planes
        starts[held], ends[held], above[held] = first, middle, 2 * planes
        starts[held + 1], ends[held + 1], above[held + 1] = middle, last, 2 * planes + 1
        held += 2
        planes += 1
    return planes


@part
def _box_distance(axes, low, high, at, boxes, lane):
    """`|[low, high] − box|² − max p` for four nodes, whose first row starts at `lane`; low and high are read from `at` on."""
    m = len(axes)
    total = fours_from(boxes, lane)
    for d in range(len(axes)):
        below = fours_from(boxes, lane + (1 + d) * LEAF) - four(high[np.uint64(at + d)])
        above = four(low[np.uint64(at + d)]) - fours_from(boxes, lane + (1 + m + d) * LEAF)
        gap = larger_four(larger_four(below, above), four(0.0))
        total = gap * gap + total
    return total


@loop
def home_leaves(axes, points, first, last, planes, cuts, homes):
    """The leaf that each of the points from `first` to `last` lies in, −1 for NaN."""
    now = np.empty(_TOGETHER, np.int64)
    for k in range(first, last, _TOGETHER):  # so many at a time: none waits for what another one reads
        now[:] = min(planes, 1) - 1
        moving = planes
        while moving > 0:
            moving = 0
            for j in range(_TOGETHER):
                plane, at = np.uint64(max(now[j], 0)), min(k + j, last - 1) * len(axes)
                place = np.int64(cuts[plane, 3]).view(np.float64)
                side = 0 if points[np.uint64(at + cuts[plane, 2])] < place else 1
                now[j] = cuts[plane, np.uint64(side)] if now[j] >= 0 else now[j]
                moving += 1 if now[j] >= 0 else 0
        for j in range(min(_TOGETHER, last - k)):
            homes[k + j] = -1 - now[j]
            for d in range(len(axes)):
                x = points[(k + j) * len(axes) + d]
                homes[k + j] = homes[k + j] if x == x else -1


@loop
def sort_by_number(numbers, least, most, order):
    """Row numbers in the order of numbers from `least` to `most`, in place: counting sort."""
    starts = np.zeros(most - least + 2, np.int64)
    for i in range(len(numbers)):
        starts[numbers[i] - least + 1] += 1
    for j in range(1, len(starts)):
        starts[j] += starts[j - 1]
    for i in range(len(numbers)):
        order[starts[numbers[i] - least]] = i
        starts[numbers[i] - least] += 1


@part
def _prefetch_rows(table, first, count):
    """Start to read rows of eight numbers."""
    for row in range(first, first + count):
        prefetch(table, row * LEAF)


@part
def _descend(axes, low, high, boxes, levels, sizes, limit, here, below):
    """The leaves within `limit` of the box [low, high], in `here`, and their number."""
    here[0], held, size = 0, 1, (1 + 2 * len(axes)) * LEAF  # the root, whose children are the top level
    bound = four(limit)
    for level in range(len(sizes) - 1, -1, -1):
        found = 0
        for i in range(held):
            at, first = (levels[level] + here[i]) * size, here[i] * LEAF
            count = min(LEAF, sizes[level] - first)
            bits = at_most(_box_distance(axes, low, high, 0, boxes, at), bound)
            bits |= at_most(_box_distance(axes, low, high, 0, boxes, at + 4), bound) << 4
            bits &= (1 << count) - 1
            found = append_set(below, found, first, bits & 15)
            found = append_set(below, found, first + 4, bits >> 4)
        held = found
        for i in range(held):
            here[i] = below[i]
    return held


@part
def _copy_boxes(boxes, here, count, copy, rows):
    """The boxes of some leaves, side by side; the last four are filled up with boxes that are infinitely far."""
    for k in range(count):
        into, at = k // LEAF * rows * LEAF + k % LEAF, here[k] // LEAF * rows * LEAF + here[k] % LEAF
        for row in range(rows):
            copy[np.uint64(into + row * LEAF)] = boxes[np.uint64(at + row * LEAF)]
    for k in range(count, count + 3):
        copy[k // LEAF * rows * LEAF + k % LEAF] = np.inf


@part
def _choose(axes, points, at, boxes, count, near_limit, limit, near, far):
    """Numbers of the boxes within the first limit of a point, and of those within the second one only; how many of each."""
    size, held, more = (1 + 2 * len(axes)) * LEAF, 0, 0
    inner, outer = four(near_limit), four(limit)
    for k in range(0, count, 4):
        distance = _box_distance(axes, points, points, at, boxes, k // LEAF * size + k % LEAF)
        valid = (1 << min(4, count - k)) - 1
        bits = at_most(distance, inner) & valid
        held = append_set(near, held, k, bits)
        more = append_set(far, more, k, at_most(distance, outer) & valid & ~bits)
    return held, more


@part
def _limit(best, reach, slack):
    """`best + reach`, and so much more that rounding leaves nothing out: bounds are off by some units of their size."""
    return best + reach + slack + _ROUNDINGS * (abs(best) + reach)


@part
def _end_of_block(homes, first, block):
    """The end of a run of at most `block` queries from `first` on whose leaves are neighbours."""
    last, home = first + 1, homes[first]
    while last < len(homes) and last - first < block and homes[last] - home < _NEIGHBOURS:
        last += 1
    return last


@part
def _excess(axes, points, q, keys, at):
    """`|q − k|² − p` for four keys, whose row −p starts at `at`."""
    t = fours_from(keys, at)
    for d in range(len(axes)):
        x = four(points[np.uint64(q + d)]) - fours_from(keys, at + (1 + d) * LEAF)
        t = x * x + t
    return t


@part
def _nearest_in(axes, points, row, keys, leaf, best):
    """The least `|q − k|² − p` in a leaf, or `best` if that is less."""
    at, q = leaf * LEAF * (1 + len(axes)), row * len(axes)
    least = smaller_four(_excess(axes, points, q, keys, at), _excess(axes, points, q, keys, at + 4))
    return min(best, least_of(least))


@part
def _nearest_near(axes, points, row, keys, boxes, here, count, best, bearable):
    """The least `|q − k|² − p` in the leaves `here` if a box undercuts `best` by more than is bearable, else `best`."""
    size, q, least = (1 + 2 * len(axes)) * LEAF, row * len(axes), four(best)
    for k in range(0, count, 4):
        least = smaller_four(_box_distance(axes, points, points, q, boxes, k // LEAF * size + k % LEAF), least)
    if best - least_of(least) > bearable:
        for k in range(count):
            best = _nearest_in(axes, points, row, keys, here[k], best)
    return best


@part
def _exp2(short, x):
    return exp2_short(x) if len(short) else exp2_four(x)


@inlined_part
def _sum_one(short, axes, points, row, keys, values, here, chosen, count, scale, near):
    """`Σ 2^{scale (near − |q − k|² + p)}` over chosen leaves, and the same with one value per key; leaves go in pairs."""
    size, q, rate, shift = (1 + len(axes)) * LEAF, row * len(axes), four(scale), four(near)
    total, one, two = four(0.0), four(0.0), four(0.0)
    for k in range(0, count, 2):
        a, b = here[np.uint64(chosen[np.uint64(k)])], here[np.uint64(chosen[np.uint64(k + 1)])]
        e = _exp2(short, rate * (shift - _excess(axes, points, q, keys, a * size)))
        f = _exp2(short, rate * (shift - _excess(axes, points, q, keys, a * size + 4)))
        g = _exp2(short, rate * (shift - _excess(axes, points, q, keys, b * size)))
        h = _exp2(short, rate * (shift - _excess(axes, points, q, keys, b * size + 4)))
        total = total + ((e + f) + (g + h))
        one = g * fours_from(values, b * LEAF) + (e * fours_from(values, a * LEAF) + one)
        two = h * fours_from(values, b * LEAF + 4) + (f * fours_from(values, a * LEAF + 4) + two)
    return total_of(total), total_of(one + two)


@part
def _sum_four(axes, points, row, keys, values, stride, column, here, chosen, count, scale, near):
    """The same with four of the values of each key: values of a leaf are `(stride, LEAF)`, here columns from `column` on."""
    size, q, rate, shift = (1 + len(axes)) * LEAF, row * len(axes), four(scale), four(near)
    total, s0, s1, s2, s3 = four(0.0), four(0.0), four(0.0), four(0.0), four(0.0)
    for k in range(count):
        leaf = here[np.uint64(chosen[np.uint64(k)])]
        v = (leaf * stride + column) * LEAF
        e = exp2_four(rate * (shift - _excess(axes, points, q, keys, leaf * size)))
        f = exp2_four(rate * (shift - _excess(axes, points, q, keys, leaf * size + 4)))
        total = total + (e + f)
        s0 = s0 + (e * fours_from(values, v) + f * fours_from(values, v + 4))
        s1 = s1 + (e * fours_from(values, v + LEAF) + f * fours_from(values, v + LEAF + 4))
        s2 = s2 + (e * fours_from(values, v + 2 * LEAF) + f * fours_from(values, v + 2 * LEAF + 4))
        s3 = s3 + (e * fours_from(values, v + 3 * LEAF) + f * fours_from(values, v + 3 * LEAF + 4))
    return total_of(total), total_of(s0), total_of(s1), total_of(s2), total_of(s3)


@part
def _sum_tilted(axes, points, row, keys, slopes, stride, column, here, chosen, count, scale, near):
    """`Σ_j w_j J_j·(q − k_j)` for one output; slopes of a leaf are `(stride, m, LEAF)`."""
    m, size, q, rate, shift = len(axes), (1 + len(axes)) * LEAF, row * len(axes), four(scale), four(near)
    total = four(0.0)
    for k in range(2 * count):
        leaf = here[np.uint64(chosen[np.uint64(k // 2)])]
        at, v = leaf * size + k % 2 * 4, (leaf * stride + column) * m * LEAF + k % 2 * 4
        tilt = four(0.0)
        for d in range(len(axes)):
            x = four(points[np.uint64(q + d)]) - fours_from(keys, at + (1 + d) * LEAF)
            tilt = fours_from(slopes, v + d * LEAF) * x + tilt
        total = exp2_four(rate * (shift - _excess(axes, points, q, keys, at))) * tilt + total
    return total_of(total)


@loop
def sum_scattered(
    axes,
    points,
    order,
    homes,
    keys,
    boxes,
    levels,
    sizes,
    values,
    slopes,
    half,
    reach,
    slack,
    block,
    out,
    lse,
    dropped,
    depth,
):
    """Outputs, log-sum-exp and the share left out, for the queries `order`, at most `block` of them at a time.

    Arrays are passed one by one and rows by number, and functions called for every query call none that is not inlined: arrays
    would be counted as references, query by query.

    Args:
        axes: a tuple of m numbers.
        points: `(n, m)` queries, flat; homes: the leaves of the queries `order`, or −1 for NaN.
        keys, boxes, levels, sizes: see `key_tree.KeyTree`; tables are flat.
        values: `(leaves + 1, outputs or more, LEAF)`, flat; slopes: `(leaves + 1, outputs, m, LEAF)`, flat, or empty.
        half: R/2; reach: leaves whose bound exceeds the best by more are left out; slack: what rounding may change of a bound,
            besides its relative error.
        out: `(n, outputs)`; lse: `(n,)`; dropped: `(n,)`, the log of a bound on the share of the weights left out;
            depth: `(n,)`, how many additions a weight passes through, at most.
    """
    m, rows, leaves, scale = len(axes), 1 + 2 * len(axes), sizes[0], half / _LOG_2
    size, stride, outputs = leaves + 2 * LEAF, len(values) // (leaves + 1) // LEAF, out.shape[1]
    # sums of several numbers gain little by short exponentials
    close = (_FAR + m) / half if stride == 1 and not len(slopes) else np.inf
    here, below = np.empty(size, np.int64), np.empty(size, np.int64)
    chosen, distant = np.empty(size, np.int64), np.empty(size, np.int64)
    nearby, near, low, high = np.empty(rows * size), np.empty(block), np.empty(m), np.empty(m)
    highest = np.inf  # minus the largest power: `|q − k|² − p` is at least this
    for j in range(sizes[len(sizes) - 1]):
        highest = min(highest, boxes[levels[len(sizes) - 1] * rows * LEAF + j])
    begin = 0
    while begin < len(order) and homes[begin] < 0:  # NaN queries come first
        for o in range(out.shape[1]):
            out[order[begin], o] = np.nan
        lse[order[begin]] = np.nan
        dropped[order[begin]] = np.nan
        depth[order[begin]] = 0.0
        begin += 1
    last = begin
    while last < len(order):
        first = last
        last = _end_of_block(homes, first, block)
        for d in range(m):
            low[d], high[d] = np.inf, -np.inf
        worst = -np.inf
        for i in range(first, last):
            row = order[i]
            if i + _AHEAD < len(order):
                ahead = homes[i + _AHEAD]
                prefetch(points, order[i + _AHEAD] * m)
                _prefetch_rows(boxes, ahead // LEAF * rows, rows)
                _prefetch_rows(keys, ahead * (1 + m), 1 + m)
            for d in range(m):
                low[d], high[d] = min(low[d], points[row * m + d]), max(high[d], points[row * m + d])
            near[i - first] = _nearest_in(axes, points, row, keys, homes[i], np.inf)
            worst = max(worst, near[i - first])
        count = _descend(axes, low, high, boxes, levels, sizes, _limit(worst, reach, slack), here, below)
        for k in range(min(count, _IN_CACHE)):
            _prefetch_rows(keys, here[k] * (1 + m), 1 + m)
            _prefetch_rows(values, here[k] * stride, 1)
        _copy_boxes(boxes, here, count, nearby, rows)
        here[count] = leaves  # the leaf without keys: leaves go in pairs
        for i in range(first, last):
            row, best = order[i], near[i - first]
            # a key may be so much nearer than the one seen that weights would overflow
            if half * (best - highest) > _OVERSHOOT:
                best = _nearest_near(axes, points, row, keys, nearby, here, count, best, _OVERSHOOT / half)
            limit = _limit(best, reach, slack)
            inner, total = min(_limit(best, close, slack), limit), 0.0
            while True:
                held, more = _choose(axes, points, row * m, nearby, count, inner, limit, chosen, distant)
                chosen[held] = distant[more] = count
                if stride > 1:
                    break
                total, s0 = _sum_one(_EXACT, axes, points, row, keys, values, here, chosen, held, scale, best)
                if more > 0:
                    beyond, s1 = _sum_one(_SHORT, axes, points, row, keys, values, here, distant, more, scale, best)
                    total, s0, inner = total + beyond, s0 + s1, limit
                    if beyond > _NEGLIGIBLE * total:  # once more, all of them exact
                        continue
                out[row, 0] = s0 / total
                break
            if stride > 1:
                for column in range(0, stride, 4):
                    total, s0, s1, s2, s3 = _sum_four(
                        axes, points, row, keys, values, stride, column, here, chosen, held, scale, best
                    )
                    sums = (s0, s1, s2, s3)
                    for o in range(min(4, outputs - column)):
                        out[row, column + o] = sums[o] / total
            if len(slopes):
                for column in range(outputs):
                    tilt = _sum_tilted(
                        axes, points, row, keys, slopes, outputs, column, here, chosen, held, scale, best
                    )
                    out[row, column] += tilt / total
            lse[row] = math.log(total) - half * best
            left = (leaves - held - more) * LEAF
            depth[row] = held + more + LEAF
            dropped[row] = math.log(left) - half * reach - math.log(total) if left > 0 else -np.inf


@least_part
def _least(distances, count, least):
    for k in range(count):
        least = min(least, distances[k])
    return least


@summed_part
def _total(a, count):
    total = 0.0
    for k in range(count):
        total += a[k]
    return total


@summed_part
def _dot(a, b, count):
    total = 0.0
    for k in range(count):
        total += a[k] * b[k]
    return total


@fused_part
def _add_scaled(out, scale, a, count):
    for k in range(count):
        out[k] += scale * a[k]


@fused_part
def _add_product(out, scale, a, b, count):
    for k in range(count):
        out[k] += scale * a[k] * b[k]


@part
def _softmax_row(axes, points, at, keys, powers, count, scale, offsets, scores, weights):
    """`q − k`, `|q − k|² − p` and the softmax of `−scale (|q − k|² − p) ln 2` for keys side by side, `(m, count)`."""
    for d in range(len(axes)):
        for k in range(count):
            offsets[d, k] = points[np.uint64(at + d)] - keys[d, k]
    for k in range(count):
        t = -powers[k]
        for d in range(len(axes)):
            t += offsets[d, k] * offsets[d, k]
        scores[k] = t
    best = _least(scores, count, np.inf)
    for k in range(0, count, 4):
        put_four(weights, k, exp2_four(four(scale) * (four(best) - fours_from(scores, k))))
    share = 1 / _total(weights, count)
    for k in range(count):
        weights[k] *= share


@part
def _copy_block(axes, here, count, held, keys, values, slopes, outputs, ckeys, cpowers, cvalues, cslopes, places):
    """Keys, powers, values and slopes of some leaves side by side, one row per coordinate; how many keys there are."""
    m, n = len(axes), 0
    stride = len(values) * (1 + m) // len(keys)
    for c in range(count):
        for j in range(LEAF):
            if here[c] * LEAF + j < held:
                at = here[c]
                places[n] = at * LEAF + j
                cpowers[n] = -keys[at * (1 + m) * LEAF + j]
                for d in range(m):
                    ckeys[d, n] = keys[(at * (1 + m) + 1 + d) * LEAF + j]
                for o in range(outputs):
                    cvalues[o, n] = values[(at * stride + o) * LEAF + j]
                if len(slopes):
                    for o in range(outputs * m):
                        cslopes[o, n] = slopes[(at * outputs * m + o) * LEAF + j]
                n += 1
    return n


@loop
def scattered_gradients(
    axes,
    points,
    order,
    homes,
    keys,
    boxes,
    levels,
    sizes,
    values,
    slopes,
    half,
    reach,
    slack,
    block,
    held,
    grad,
    grad_lse,
    output,
    needs,
    in_points,
    in_keys,
    in_values,
    in_powers,
    in_slopes,
    in_rate,
):
    """The gradients of `Σ grad·output + Σ grad_lse·lse` for the queries `order`; see `sum_scattered` for the other arguments.

    With the weights w and `a = w (g·(V − output) + g_lse)`: `−R Σ_k a (q − k)` for a query, `R Σ_q a (q − k)` for a key, `Σ_q w g`
    for a value, `R/2 Σ_q a` for a power, `Σ_q w g (q − k)` for a slope, and `−Σ a (|q − k|² − p)/2` for R.

    Args:
        held: N, keys that are not there to fill up the last leaf.
        grad: `(n, outputs)`; grad_lse: `(n,)`; output: what the forward pass gave.
        needs: of which tensors, in the order below.
        in_points: `(n, m)`, set.
        in_keys, in_values, in_powers, in_slopes, in_rate: `(m, N)`, `(outputs, N)`, `(N,)`, `(outputs·m, N)`, `(1,)`, added to, in
            the order of the tree.
    """
    m, size, scale, outputs = len(axes), sizes[0] + LEAF, half / _LOG_2, grad.shape[1]
    here, below = np.empty(size, np.int64), np.empty(size, np.int64)
    low, high, places = np.empty(m), np.empty(m), np.empty(held, np.int64)
    ckeys, cpowers, cvalues = np.empty((m, held)), np.empty(held), np.empty((outputs, held))
    cslopes = np.empty((outputs * m if len(slopes) else 0, held))
    gkeys, gpowers, gvalues, gslopes = (
        np.empty((m, held)),
        np.empty(held),
        np.empty((outputs, held)),
        np.empty(cslopes.shape),
    )
    offsets, scores, weights, pulls, tilts = (
        np.empty((m, held)),
        np.empty(held + 4),
        np.empty(held + 4),
        np.empty(held),
        np.empty((m if len(slopes) else 0, held)),
    )
    begin = 0
    while begin < len(order) and homes[begin] < 0:  # NaN queries come first
        for d in range(m):
            in_points[order[begin], d] = np.nan
        begin += 1
    last = begin
    while last < len(order):
        first = last
        last = _end_of_block(homes, first, block)
        for d in range(m):
            low[d], high[d] = np.inf, -np.inf
        far = -np.inf
        for i in range(first, last):
            row = order[i]
            for d in range(m):
                low[d], high[d] = min(low[d], points[row * m + d]), max(high[d], points[row * m + d])
            far = max(far, _nearest_in(axes, points, row, keys, homes[i], np.inf))
        count = _descend(axes, low, high, boxes, levels, sizes, _limit(far, reach, slack), here, below)
        n = _copy_block(
            axes, here, count, held, keys, values, slopes, outputs, ckeys, cpowers, cvalues, cslopes, places
        )
        for k in range(n):
            gpowers[k] = 0.0
            for d in range(m):
                gkeys[d, k] = 0.0
            for o in range(outputs):
                gvalues[o, k] = 0.0
            for o in range(len(gslopes)):
                gslopes[o, k] = 0.0
        for i in range(first, last):
            row = order[i]
            _softmax_row(axes, points, row * m, ckeys, cpowers, n, scale, offsets, scores, weights)
            constant = grad_lse[row]
            for o in range(outputs):
                constant -= grad[row, o] * output[row, o]
            for k in range(n):
                pulls[k] = constant
            for o in range(outputs):
                _add_scaled(pulls, grad[row, o], cvalues[o], n)
                if needs[2]:
                    _add_scaled(gvalues[o], grad[row, o], weights, n)
            for d in range(len(tilts)):
                for k in range(n):
                    tilts[d, k] = 0.0
                for o in range(outputs):
                    _add_scaled(tilts[d], grad[row, o], cslopes[o * m + d], n)
                    if needs[4]:
                        _add_product(gslopes[o * m + d], grad[row, o], weights, offsets[d], n)
                _add_product(pulls, 1.0, tilts[d], offsets[d], n)
            for k in range(n):
                pulls[k] *= weights[k]
            for d in range(m):
                in_points[row, d] = -2 * half * _dot(pulls, offsets[d], n)
                if needs[1]:
                    _add_product(gkeys[d], 2 * half, pulls, offsets[d], n)
                if len(tilts):
                    in_points[row, d] += _dot(weights, tilts[d], n)
                    if needs[1]:
                        _add_product(gkeys[d], -1.0, weights, tilts[d], n)
            if needs[3]:
                _add_scaled(gpowers, half, pulls, n)
            if needs[5]:
                in_rate[0] -= 0.5 * _dot(pulls, scores, n)
        for k in range(n):
            at = places[k]
            in_powers[at] += gpowers[k] if needs[3] else 0.0
            if needs[1]:
                for d in range(m):
                    in_keys[d, at] += gkeys[d, k]
            if needs[2]:
                for o in range(outputs):
                    in_values[o, at] += gvalues[o, k]
            if needs[4]:
                for o in range(len(gslopes)):
                    in_slopes[o, at] += gslopes[o, k]
