"""Native loops over scattered keys: the tree of boxes, the keys that matter to each query, and their weighted sums.

Keys lie in leaves of eight (`LEAF`), leaves in nodes of eight, and so on; a node is known by its box and by the largest power in
it. What is left out is decided for whole leaves by `|q − box|² − max p`, a lower bound of `|q − k|² − p`. Inner loops run over
the eight keys of a leaf and over the axes, whose number is the length of the tuple `axes`: the compiler knows it.
"""

from __future__ import annotations

import math

import numpy as np

from partita.kernels.native_code import exp2_native, fused_part, least_part, loop, part, summed_part

__all__ = [
    "LEAF",
    "home_leaves",
    "order_by_cells",
    "scattered_gradients",
    "settle_leaves",
    "sort_by_number",
    "sum_scattered",
]

LEAF = 8  # keys in a leaf, and nodes in a node: two vectors of four, one of eight
_OVERSHOOT = 30.0  # e to this power is the largest weight relative to the reference score
_NEIGHBOURS = 4  # leaves in a row whose queries share a list
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
def order_by_cells(points, order, along, cut_axes, cut_places, children):
    """Sort row numbers into the leaves of a k-d tree, in place: every node is cut across its longest side.

    Cuts fall between whole nodes of the next level, so that leaves, and nodes of eight, of 64, … leaves are runs of the order.

    Args:
        points: `(n, m)`. order: `arange(n)` at first. along: scratch `(n,)`.
        cut_axes, cut_places, children: filled with the cuts, `(leaves,)`, `(leaves,)` and `(leaves, 2)`: points with a smaller
            coordinate belong to the first child. A child c < 0 is the leaf −1 − c. Cut 0 is the first, if there is any.
    """
    starts, ends, above, held, cuts = np.empty(128, np.int64), np.empty(128, np.int64), np.empty(128, np.int64), 1, 0
    starts[0], ends[0], above[0] = 0, len(order), -1
    while held > 0:
        held -= 1
        first, last, parent = starts[held], ends[held], above[held]
        if parent >= 0:
            children[parent // 2, parent % 2] = -1 - first // LEAF
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
        cut_axes[cuts], cut_places[cuts] = axis, along[middle]
        if parent >= 0:
            children[parent // 2, parent % 2] = cuts
        starts[held], ends[held], above[held] = first, middle, 2 * cuts
        starts[held + 1], ends[held + 1], above[held + 1] = middle, last, 2 * cuts + 1
        held += 2
        cuts += 1
    return cuts


@fused_part
def _box_distances(axes, low, high, at, lo, hi, top, first, count, out):
    """`|[low, high] − box|² − max p` for `count` nodes from `first` on; low and high are read from `at` on."""
    for j in range(count):
        total = 0.0
        for d in range(len(axes)):
            below, above = (
                lo[d, np.uint64(first + j)] - high[np.uint64(at + d)],
                low[np.uint64(at + d)] - hi[d, np.uint64(first + j)],
            )
            gap = max(max(below, above), 0.0)
            total += gap * gap
        out[j] = total - top[np.uint64(first + j)]


@loop
def home_leaves(axes, points, order, nodes, steps, cut_axes, cut_places, children):
    """Move every point `steps` cuts down the tree, from the cut in `nodes`; a leaf l is −1 − l, and stays. Points go in `order`."""
    for k in range(len(order)):
        i = order[k]
        at, node, left = i * len(axes), nodes[i], steps
        while node >= 0 and left > 0:
            side = 0 if points[np.uint64(at + cut_axes[np.uint64(node)])] < cut_places[np.uint64(node)] else 1
            node, left = children[np.uint64(node), np.uint64(side)], left - 1
        nodes[i] = node


@loop
def settle_leaves(axes, points, nodes):
    """Leaf numbers from 0 on in place of −1 − l, and −1 for points that hold NaN."""
    for i in range(len(nodes)):
        nodes[i] = -1 - nodes[i]
        for d in range(len(axes)):
            if points[i * len(axes) + d] != points[i * len(axes) + d]:
                nodes[i] = -1


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


@fused_part
def _descend(axes, low, high, lo, hi, top, levels, limit, here, below, distances):
    """The leaves within `limit` of the box [low, high]: their number, and whether `here` lists them (else `below` does)."""
    here[0], held = 0, 1  # the root, whose children are the top level
    for level in range(len(levels) - 2, -1, -1):
        size, found = levels[level + 1] - levels[level], 0
        for i in range(held):
            first = here[i] * LEAF
            count = min(LEAF, size - first)
            _box_distances(axes, low, high, 0, lo, hi, top, levels[level] + first, count, distances)
            for j in range(count):
                below[found] = first + j
                found += 1 if distances[j] <= limit else 0
        held = found
        for i in range(held):
            here[i] = below[i]
    return held


@part
def _limit(best, reach, slack):
    """`best + reach`, and so much more that rounding leaves nothing out: bounds are off by some units of their size."""
    return best + reach + slack + _ROUNDINGS * (abs(best) + reach)


@part
def _end_of_block(order, homes, first, block):
    """The end of a run of at most `block` queries from `first` on whose leaves are neighbours."""
    last, home = first + 1, homes[order[first]]
    while last < len(order) and last - first < block and homes[order[last]] - home < _NEIGHBOURS:
        last += 1
    return last


@least_part
def _nearest_in(axes, points, row, keys, powers, leaf, best):
    """The least `|q − k|² − p` in a leaf, or `best` if that is less."""
    at, base, q = leaf * LEAF, leaf * LEAF * len(axes), row * len(axes)
    for j in range(LEAF):
        t = -powers[np.uint64(at + j)]
        for d in range(len(axes)):
            x = points[np.uint64(q + d)] - keys[np.uint64(base + d * LEAF + j)]
            t += x * x
        best = min(best, t)
    return best


@fused_part
def _weight(axes, points, q, keys, base, powers, at, j, scale, near):
    """`2^{scale (near − |q − k|² + p)}` for the key j of a leaf."""
    t = -powers[np.uint64(at + j)]
    for d in range(len(axes)):
        x = points[np.uint64(q + d)] - keys[np.uint64(base + d * LEAF + j)]
        t += x * x
    return exp2_native(scale * (near - t))


@summed_part
def _sum_one(axes, points, row, keys, powers, values, leaves, count, scale, near):
    """`Σ 2^{scale (near − |q − k|² + p)}` over some leaves, and the same with one value per key; leaves go in pairs."""
    m, q, total, first = len(axes), row * len(axes), 0.0, 0.0
    for k in range(0, count, 2):
        one, two = leaves[k] * LEAF, leaves[k + 1] * LEAF
        a, b = 0.0, 0.0
        for j in range(LEAF):
            e = _weight(axes, points, q, keys, one * m, powers, one, j, scale, near)
            f = _weight(axes, points, q, keys, two * m, powers, two, j, scale, near)
            a += e + f
            b += e * values[np.uint64(one + j)] + f * values[np.uint64(two + j)]
        total += a
        first += b
    return total, first


@summed_part
def _sum_four(axes, points, row, keys, powers, values, stride, column, leaves, count, scale, near):
    """The same with four of the values of each key: values of a leaf are `(stride, LEAF)`, here columns from `column` on."""
    m, q = len(axes), row * len(axes)
    total, s0, s1, s2, s3 = 0.0, 0.0, 0.0, 0.0, 0.0
    for k in range(count):
        at, v = leaves[k] * LEAF, (leaves[k] * stride + column) * LEAF
        a, b0, b1, b2, b3 = 0.0, 0.0, 0.0, 0.0, 0.0
        for j in range(LEAF):
            e = _weight(axes, points, q, keys, at * m, powers, at, j, scale, near)
            a += e
            b0 += e * values[np.uint64(v + j)]
            b1 += e * values[np.uint64(v + LEAF + j)]
            b2 += e * values[np.uint64(v + 2 * LEAF + j)]
            b3 += e * values[np.uint64(v + 3 * LEAF + j)]
        total += a
        s0, s1, s2, s3 = s0 + b0, s1 + b1, s2 + b2, s3 + b3
    return total, s0, s1, s2, s3


@summed_part
def _sum_tilted(axes, points, row, keys, powers, slopes, stride, column, leaves, count, scale, near):
    """`Σ_j w_j J_j·(q − k_j)` for one output; slopes of a leaf are `(stride, m, LEAF)`."""
    m, q, total = len(axes), row * len(axes), 0.0
    for k in range(count):
        at, v = leaves[k] * LEAF, (leaves[k] * stride + column) * m * LEAF
        a = 0.0
        for j in range(LEAF):
            tilt = 0.0
            for d in range(len(axes)):
                x = points[np.uint64(q + d)] - keys[np.uint64(at * m + d * LEAF + j)]
                tilt += slopes[np.uint64(v + d * LEAF + j)] * x
            a += _weight(axes, points, q, keys, at * m, powers, at, j, scale, near) * tilt
        total += a
    return total


@part
def _write(axes, points, row, keys, powers, values, slopes, leaves, count, scale, near, out):
    """All outputs of one query from its leaves; returns the sum of its weights."""
    stride, outputs = len(values) // len(powers), out.shape[1]
    total = 0.0
    if stride == 1:
        total, s0 = _sum_one(axes, points, row, keys, powers, values, leaves, count, scale, near)
        out[row, 0] = s0 / total
    else:
        for column in range(0, stride, 4):
            total, s0, s1, s2, s3 = _sum_four(
                axes, points, row, keys, powers, values, stride, column, leaves, count, scale, near
            )
            sums = (s0, s1, s2, s3)
            for o in range(min(4, outputs - column)):
                out[row, column + o] = sums[o] / total
    if len(slopes):
        for column in range(outputs):
            tilt = _sum_tilted(axes, points, row, keys, powers, slopes, outputs, column, leaves, count, scale, near)
            out[row, column] += tilt / total
    return total


@least_part
def _least(distances, count, least):
    for k in range(count):
        least = min(least, distances[k])
    return least


@loop
def sum_scattered(
    axes,
    points,
    order,
    homes,
    keys,
    powers,
    lo,
    hi,
    top,
    levels,
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

    Arrays are passed one by one and rows by number: slices and tuples of arrays would be counted as references, query by query.

    Args:
        axes: a tuple of m numbers.
        points: `(n, m)` queries, flat; homes: `(n,)` their leaves, or −1 for NaN.
        keys: `(leaves + 1, m, LEAF)`, flat; powers: `(leaves + 1, LEAF)`, flat, −inf for places without a key. The last leaf has
            none.
        lo, hi, top: boxes `(m, nodes)` and largest powers `(nodes,)`, level after level from the leaves up; levels: where each
            level starts, and the end.
        values: `(leaves + 1, outputs or more, LEAF)`, flat; slopes: `(leaves + 1, outputs, m, LEAF)`, flat, or empty.
        half: R/2; reach: leaves whose bound exceeds the best by more are left out; slack: what rounding may change of a bound,
            besides its relative error.
        out: `(n, outputs)`; lse: `(n,)`; dropped: `(n,)`, the log of a bound on the share of the weights left out;
            depth: `(n,)`, how many additions a weight passes through, at most.
    """
    m, size, scale = len(axes), levels[1] + LEAF, half / _LOG_2
    here, below, chosen = np.empty(size, np.int64), np.empty(size, np.int64), np.empty(size, np.int64)
    distances, clo, chi, ctop = np.empty(size), np.empty((m, size)), np.empty((m, size)), np.empty(size)
    near, low, high = np.empty(block), np.empty(m), np.empty(m)
    highest = -np.inf  # the largest power: `|q − k|² − p` is at least −highest
    for node in range(levels[len(levels) - 2], levels[len(levels) - 1]):
        highest = max(highest, top[node])
    begin = 0
    while begin < len(order) and homes[order[begin]] < 0:  # NaN queries come first
        for o in range(out.shape[1]):
            out[order[begin], o] = np.nan
        lse[order[begin]] = np.nan
        dropped[order[begin]] = np.nan
        depth[order[begin]] = 0.0
        begin += 1
    last = begin
    while last < len(order):
        first = last
        last = _end_of_block(order, homes, first, block)
        for d in range(m):
            low[d], high[d] = np.inf, -np.inf
        far = -np.inf
        for i in range(first, last):
            row = order[i]
            for d in range(m):
                low[d], high[d] = min(low[d], points[row * m + d]), max(high[d], points[row * m + d])
            near[i - first] = _nearest_in(axes, points, row, keys, powers, homes[row], np.inf)
            far = max(far, near[i - first])
        count = _descend(axes, low, high, lo, hi, top, levels, _limit(far, reach, slack), here, below, distances)
        for k in range(count):
            for d in range(m):
                clo[d, k], chi[d, k] = lo[d, here[k]], hi[d, here[k]]
            ctop[k] = top[here[k]]
        for i in range(first, last):
            row, best = order[i], near[i - first]
            _box_distances(axes, points, points, row * m, clo, chi, ctop, 0, count, distances)
            # the best key may be so much nearer than the one seen that weights would overflow
            if half * (best + highest) > _OVERSHOOT and half * (best - _least(distances, count, best)) > _OVERSHOOT:
                for k in range(count):
                    if distances[k] < best:
                        best = _nearest_in(axes, points, row, keys, powers, here[k], best)
            limit, held = _limit(best, reach, slack), 0
            for k in range(count):
                chosen[held] = here[k]
                held += 1 if distances[k] <= limit else 0
            chosen[held] = levels[1]  # the leaf without keys: leaves go in pairs
            total = _write(axes, points, row, keys, powers, values, slopes, chosen, held, scale, best, out)
            lse[row] = math.log(total) - half * best
            left = (levels[1] - held) * LEAF
            depth[row] = held + LEAF
            dropped[row] = math.log(left) - half * reach - math.log(total) if left > 0 else -np.inf


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


@fused_part
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
    for k in range(count):
        weights[k] = exp2_native(scale * (best - scores[k]))
    share = 1 / _total(weights, count)
    for k in range(count):
        weights[k] *= share


@part
def _copy_block(
    axes, here, count, held, keys, powers, values, slopes, outputs, ckeys, cpowers, cvalues, cslopes, places
):
    """Keys, powers, values and slopes of some leaves side by side, one row per coordinate; how many keys there are."""
    m, stride, n = len(axes), len(values) // len(powers), 0
    for c in range(count):
        for j in range(LEAF):
            if here[c] * LEAF + j < held:
                at = here[c]
                places[n] = at * LEAF + j
                cpowers[n] = powers[at * LEAF + j]
                for d in range(m):
                    ckeys[d, n] = keys[(at * m + d) * LEAF + j]
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
    powers,
    lo,
    hi,
    top,
    levels,
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
    m, size, scale, outputs = len(axes), levels[1] + LEAF, half / _LOG_2, grad.shape[1]
    here, below, distances = np.empty(size, np.int64), np.empty(size, np.int64), np.empty(size)
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
        np.empty(held),
        np.empty(held),
        np.empty(held),
        np.empty((m if len(slopes) else 0, held)),
    )
    begin = 0
    while begin < len(order) and homes[order[begin]] < 0:  # NaN queries come first
        for d in range(m):
            in_points[order[begin], d] = np.nan
        begin += 1
    last = begin
    while last < len(order):
        first = last
        last = _end_of_block(order, homes, first, block)
        for d in range(m):
            low[d], high[d] = np.inf, -np.inf
        far = -np.inf
        for i in range(first, last):
            row = order[i]
            for d in range(m):
                low[d], high[d] = min(low[d], points[row * m + d]), max(high[d], points[row * m + d])
            far = max(far, _nearest_in(axes, points, row, keys, powers, homes[row], np.inf))
        count = _descend(axes, low, high, lo, hi, top, levels, _limit(far, reach, slack), here, below, distances)
        n = _copy_block(
            axes, here, count, held, keys, powers, values, slopes, outputs, ckeys, cpowers, cvalues, cslopes, places
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
