"""The Triton programs behind `grid_triton`: what one block of queries does.

A tile is `(lanes, queries, outputs)`. Lanes are the centers of the last axis' window, on neighbouring threads; where that window is
wide, or all windows are whole axes, there is one lane and the last axis is summed like the others. Axis after axis is summed, by
functions that call themselves with the next axis: the compiler writes all of it out. Tuples hold one entry per axis or per center.
"""

from __future__ import annotations

import triton
import triton.language as tl

from partita.kernels.triton_code import axis_cell, power

__all__ = [
    "grid_collect_block",
    "grid_slope_block",
    "grid_spread_block",
    "grid_sum_block",
]


@triton.jit
def _start(x, centers, count, WIDTH: tl.constexpr, WHOLE: tl.constexpr):
    """The cell of x, 0 on a whole axis, and the first center of its window."""
    if WHOLE:
        return 0, 0
    else:
        k = axis_cell(x, centers, count)
        return k, tl.minimum(tl.maximum(k - WIDTH // 2 + 1, 0), count - WIDTH)


@triton.jit
def _least(x, cell, centers, half, WIDTH: tl.constexpr, WHOLE: tl.constexpr):
    """The least of `½R(x − c)²` over the window."""
    d = x - tl.load(centers + cell)
    least = half * d * d
    if WHOLE:
        for k in range(1, WIDTH):
            d = x - tl.load(centers + k)
            least = tl.minimum(least, half * d * d)
    else:  # one of the two centers around x is the nearest
        d = x - tl.load(centers + cell + 1)
        least = tl.minimum(least, half * d * d)
    return least


@triton.jit
def _place_in_bricks(j, step, unit, BITS: tl.constexpr):
    return (j >> BITS) * step + (j & ((1 << BITS) - 1)) * unit


@triton.jit
def _to_odd(start, step, unit):
    """In bricks of two cells: how far the next cell lies behind a window's cells 0, 2, 4, …"""
    return tl.where(start % 2 == 1, step - unit, unit)


@triton.jit
def _held_axis(x, near, half, start, WIDTH: tl.constexpr, WINDOW: tl.constexpr, SLOPED: tl.constexpr):
    """The softmax weights of an axis as a tuple; with SLOPED a second one of their derivatives, `2·half·w_k(Σ w d − d_k)`.

    Only the WINDOW centers from `start` on count; the weights of others are 0, or 10⁻³⁰⁰ at most.
    """
    differences = ()
    scores = ()
    least = x
    for k in tl.static_range(WIDTH):
        d = x - tl.load(near + k)
        s = half * d * d
        if WINDOW < WIDTH:
            s = tl.where((start <= k) & (k < start + WINDOW), s, float("inf"))
        if SLOPED:
            differences = differences + (d,)
        scores = scores + (s,)
        if k == 0:
            least = s
        else:
            least = tl.minimum(least, s)
    powers = ()
    mass = x - x  # NaN if x is not finite
    for k in tl.static_range(WIDTH):
        e = power(least - scores[k], 0)
        powers = powers + (e,)
        mass += e
    scale = 1.0 / mass
    weights = ()
    for k in tl.static_range(WIDTH):
        weights = weights + (powers[k] * scale,)
    turns = ()
    if SLOPED:
        mean = x - x
        for k in tl.static_range(WIDTH):
            mean += weights[k] * differences[k]
        for k in tl.static_range(WIDTH):
            turns = turns + (2 * half * weights[k] * (mean - differences[k]),)
    return weights, turns


@triton.jit
def _loose_axis(x, near, half, least, WIDTH: tl.constexpr):
    """What it takes to compute weights of an axis one by one: x, centers, R/2, least score, 1/Σ e, `Σ w (x − c)`."""
    mass = x - x
    moment = x - x
    for k in range(WIDTH):
        d = x - tl.load(near + k)
        e = power(least - half * d * d, 0)
        mass += e
        moment += e * d
    return x, near, half, least, 1.0 / mass, moment / mass


@triton.jit
def _lane_axis(x, near, half, lane, WIDTH: tl.constexpr, LANES: tl.constexpr):
    """The weights of the last axis along the lanes, and their derivatives."""
    d = x - tl.load(near + tl.minimum(lane, WIDTH - 1))
    s = half * d * d
    e = power(tl.min(s, axis=0, keep_dims=True) - s, 0)
    if LANES > WIDTH:
        e = tl.where(lane < WIDTH, e, 0.0)
    weights = e * (1.0 / (tl.sum(e, axis=0, keep_dims=True) + (x - x)))
    return weights, 2 * half * weights * (tl.sum(weights * d, axis=0, keep_dims=True) - d)


@triton.jit
def _cell(value, tilt, away, mask, M: tl.constexpr, AFFINE: tl.constexpr, MASKED: tl.constexpr):
    """What one cell holds, `V` or `V + J(x − o)`."""
    if MASKED:
        v = tl.load(value, mask=mask, other=0.0)
    else:
        v = tl.load(value)
    if AFFINE:
        for i in tl.static_range(M):
            if MASKED:
                v += tl.load(tilt + i, mask=mask, other=0.0) * away[i]
            else:
                v += tl.load(tilt + i) * away[i]
    return v


@triton.jit
def _mean(
    value,
    tilt,
    away,
    mask,
    steps,
    tilt_steps,
    axes,
    zero,
    AXIS: tl.constexpr,
    LAST: tl.constexpr,
    LOOSE: tl.constexpr,
    WIDTHS: tl.constexpr,
    M: tl.constexpr,
    AFFINE: tl.constexpr,
    MASKED: tl.constexpr,
    BITS: tl.constexpr,
    HALVINGS: tl.constexpr,
    UNROLL: tl.constexpr,
):
    """The mean over the windows of axes AXIS … LAST − 1, of the cells from `value` on."""
    if AXIS == LAST:
        return _cell(value, tilt, away, mask, M, AFFINE, MASKED)
    else:
        WIDTH: tl.constexpr = WIDTHS[AXIS]
        if AXIS >= LOOSE:
            weights, _, odd = axes[AXIS]
            for k in tl.static_range(WIDTH):
                part = _mean(
                    value + odd if BITS[AXIS] and k % 2 == 1 else value, tilt, away, mask, steps, tilt_steps, axes, zero,
                    AXIS + 1, LAST, LOOSE, WIDTHS, M, AFFINE, MASKED, BITS, HALVINGS, UNROLL,
                )  # fmt: skip
                if k == 0:
                    total = weights[k] * part
                else:
                    total += weights[k] * part
                if not BITS[AXIS] or k % 2 == 1:
                    value += steps[AXIS]
                if AFFINE:
                    tilt += tilt_steps[AXIS]
            return total
        else:
            x, near, half, least, scale, _ = axes[AXIS]
            total = zero
            mass = x - x
            for k in tl.range(0, WIDTH, loop_unroll_factor=UNROLL):
                d = x - tl.load(near + k)
                if AXIS == 0:  # passed through once: divided by the sum of the weights at the end
                    e = power(least - half * d * d, HALVINGS)
                    mass += e
                else:
                    e = power(least - half * d * d, 0) * scale
                total += e * _mean(
                    value, tilt, away, mask, steps, tilt_steps, axes, zero,
                    AXIS + 1, LAST, LOOSE, WIDTHS, M, AFFINE, MASKED, BITS, HALVINGS, UNROLL,
                )  # fmt: skip
                value += steps[AXIS]
                if AFFINE:
                    tilt += tilt_steps[AXIS]
            if AXIS == 0:
                total = total * (1.0 / mass)
            return total


@triton.jit
def _mean_and_slopes(
    value,
    tilt,
    away,
    mask,
    steps,
    tilt_steps,
    axes,
    zero,
    AXIS: tl.constexpr,
    LAST: tl.constexpr,
    LOOSE: tl.constexpr,
    WIDTHS: tl.constexpr,
    M: tl.constexpr,
    AFFINE: tl.constexpr,
    MASKED: tl.constexpr,
    BITS: tl.constexpr,
):
    """The same mean, then its derivatives along axes LAST − 1, …, AXIS by way of the weights, as a tuple."""
    if AXIS == LAST:
        return (_cell(value, tilt, away, mask, M, AFFINE, MASKED),)
    else:
        WIDTH: tl.constexpr = WIDTHS[AXIS]
        INNER: tl.constexpr = LAST - AXIS
        if AXIS >= LOOSE:
            weights, turns, odd = axes[AXIS]
            for k in tl.static_range(WIDTH):
                part = _mean_and_slopes(
                    value + odd if BITS[AXIS] and k % 2 == 1 else value, tilt, away, mask, steps, tilt_steps, axes, zero,
                    AXIS + 1, LAST, LOOSE, WIDTHS, M, AFFINE, MASKED, BITS,
                )  # fmt: skip
                sums = ()
                for j in tl.static_range(INNER):
                    if k == 0:
                        sums = sums + (weights[k] * part[j],)
                    else:
                        sums = sums + (total[j] + weights[k] * part[j],)
                if k == 0:
                    own = turns[k] * part[0]
                else:
                    own += turns[k] * part[0]
                total = sums
                if not BITS[AXIS] or k % 2 == 1:
                    value += steps[AXIS]
                if AFFINE:
                    tilt += tilt_steps[AXIS]
            return total + (own,)
        else:
            x, near, half, least, scale, mean = axes[AXIS]
            total = ()
            for j in tl.static_range(INNER):
                total = total + (zero,)
            own = zero
            for k in range(WIDTH):
                d = x - tl.load(near + k)
                w = power(least - half * d * d, 0) * scale
                part = _mean_and_slopes(
                    value, tilt, away, mask, steps, tilt_steps, axes, zero,
                    AXIS + 1, LAST, LOOSE, WIDTHS, M, AFFINE, MASKED, BITS,
                )  # fmt: skip
                sums = ()
                for j in tl.static_range(INNER):
                    sums = sums + (total[j] + w * part[j],)
                own += 2 * half * w * (mean - d) * part[0]
                total = sums
                value += steps[AXIS]
                if AFFINE:
                    tilt += tilt_steps[AXIS]
            return total + (own,)


@triton.jit
def _add_four(place, a, b, c, d):
    """Add to four float32 numbers in one step. `place` is a multiple of 16 bytes. For devices from compute capability 9.0 on."""
    tl.inline_asm_elementwise(
        "red.relaxed.gpu.global.add.v4.f32 [$1], {$2, $3, $4, $5}; mov.u32 $0, 0;",
        "=r,l,f,f,f,f",
        [place.to(tl.int64), a, b, c, d],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def _add_two(place, a, b):
    """Add to two float32 numbers in one step. `place` is a multiple of 8 bytes. For devices from compute capability 9.0 on."""
    tl.inline_asm_elementwise(
        "red.relaxed.gpu.global.add.v2.f32 [$1], {$2, $3}; mov.u32 $0, 0;",
        "=r,l,f,f",
        [place.to(tl.int64), a, b],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def _spread(
    out, at, share, mask, steps, axes, pitch,
    AXIS: tl.constexpr, LAST: tl.constexpr, LOOSE: tl.constexpr, WIDTHS: tl.constexpr, TOGETHER: tl.constexpr,
):  # fmt: skip
    """Add `share` times the weights of axes AXIS … LAST − 1 to the cells of `out` from number `at` on.

    With TOGETHER > 1, so many neighbouring cells at once. Their number in the table must be a multiple of TOGETHER, so there are as
    many tables, `pitch` apart: the one with number s holds cell c at c − s.
    """
    WIDTH: tl.constexpr = WIDTHS[AXIS] if len(WIDTHS) > AXIS else 1
    if AXIS == LAST:
        if TOGETHER == 1:
            tl.atomic_add(out + at, share, mask=mask, sem="relaxed")
        else:
            weights, _, _ = axes[LAST]
            beyond = at & (TOGETHER - 1)
            place = out + (at - beyond) + beyond.to(tl.int64) * pitch
            for k in tl.static_range(0, WIDTH, TOGETHER):
                if TOGETHER == 4:
                    _add_four(
                        place + k, share * weights[k], share * weights[k + 1],
                        share * weights[k + 2], share * weights[k + 3],
                    )  # fmt: skip
                else:
                    _add_two(place + k, share * weights[k], share * weights[k + 1])
    else:
        if AXIS >= LOOSE:
            weights, _, _ = axes[AXIS]
            for k in tl.static_range(WIDTH):
                _spread(out, at, weights[k] * share, mask, steps, axes, pitch, AXIS + 1, LAST, LOOSE, WIDTHS, TOGETHER)
                at += steps[AXIS]
        else:
            x, near, half, least, scale, _ = axes[AXIS]
            for k in range(WIDTH):
                d = x - tl.load(near + k)
                w = power(least - half * d * d, 0) * scale
                _spread(out, at, w * share, mask, steps, axes, pitch, AXIS + 1, LAST, LOOSE, WIDTHS, TOGETHER)
                at += steps[AXIS]


@triton.jit
def _windows(
    points, rows, inside, lane, centers, counts, rates, origin, steps, tilt_steps, units, outs,
    M: tl.constexpr, WIDTHS: tl.constexpr, WHOLE: tl.constexpr, AFFINE: tl.constexpr, WIDE: tl.constexpr, BITS: tl.constexpr,
    LOOSE: tl.constexpr, LANES: tl.constexpr, SLOPED: tl.constexpr, ONCE: tl.constexpr,
):  # fmt: skip
    """The windows of a block's queries.

    Returns:
        what is known of each axis' weights (`_held_axis` or `_loose_axis`; with ONCE, a loose first axis is divided by its sum
        later), x − origin, the number of the first cell in values and in slopes, the weights along the lanes and their derivatives.
    """
    axes = ()
    away = ()
    at = lane * 0 if BITS[M - 1] else lane * outs
    tilt_at = lane * (outs * M)
    last = rows
    turn = rows
    for i in tl.static_range(M):
        x = tl.load(points + rows * M + i, mask=inside, other=0.0)
        half = tl.load(rates + i) * 0.5
        cell, start = _start(x, centers[i], counts[i], WIDTHS[i], WHOLE[i])
        if AFFINE:
            away = away + (x - tl.load(origin + i),)
        near = centers[i] + start
        if i < LOOSE:
            least = _least(x, cell, centers[i], half, WIDTHS[i], WHOLE[i])
            if ONCE and i == 0:
                axes = axes + ((x, near, half, least, x, x),)
            else:
                axes = axes + (_loose_axis(x, near, half, least, WIDTHS[i]),)
        elif i < M - 1 or LANES == 1:
            weights, turns = _held_axis(x, near, half, 0, WIDTHS[i], WIDTHS[i], SLOPED)
            axes = axes + ((weights, turns, _to_odd(start, steps[i], units[i]) if BITS[i] else 0),)
        else:
            last, turn = _lane_axis(x, near, half, lane, WIDTHS[i], LANES)
        if BITS[i]:
            if i == M - 1:
                start += lane
            at += _place_in_bricks(start, steps[i], units[i], BITS[i])
        elif not WHOLE[i]:
            if WIDE:
                start = start.to(tl.int64)
            at += start * steps[i]
            if AFFINE:
                tilt_at += start * tilt_steps[i]
    return axes, away, at, tilt_at, last, turn


@triton.jit(do_not_specialize=["n"])
def grid_sum_block(
    points, centers, counts, rates, values, slopes, origin, out, n, outs, steps, tilt_steps, units,
    M: tl.constexpr, WIDTHS: tl.constexpr, WHOLE: tl.constexpr, AFFINE: tl.constexpr, WIDE: tl.constexpr,
    BITS: tl.constexpr, LOOSE: tl.constexpr, LANES: tl.constexpr, COLUMNS: tl.constexpr, BLOCKS: tl.constexpr, MASKED: tl.constexpr,
    HALVINGS: tl.constexpr, UNROLL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(0).to(tl.int64) * BLOCK
    rows = tl.arange(0, BLOCK)[None, :, None]
    inside = rows < tl.minimum(n - first, BLOCK).to(tl.int32)
    points += first * M
    out += first * outs
    lane = tl.arange(0, LANES)[:, None, None]
    column = tl.arange(0, COLUMNS)[None, None, :]
    axes, away, at, tilt_at, last, _ = _windows(
        points, rows, inside, lane, centers, counts, rates, origin, steps, tilt_steps, units, outs,
        M, WIDTHS, WHOLE, AFFINE, WIDE, BITS, LOOSE, LANES, False, True,
    )  # fmt: skip
    value = values + column + at
    tilt = slopes + column * M + tilt_at if AFFINE else slopes
    LAST: tl.constexpr = M - 1 if LANES > 1 else M
    zero = tl.zeros([LANES, BLOCK, COLUMNS], values.dtype.element_ty)
    for block in range(BLOCKS):
        there = column < outs - block * COLUMNS
        total = _mean(
            value + block * COLUMNS, tilt + block * COLUMNS * M if AFFINE else tilt, away, there & (lane < WIDTHS[M - 1]),
            steps, tilt_steps, axes, zero,
            0, LAST, LOOSE, WIDTHS, M, AFFINE, MASKED, BITS, HALVINGS, UNROLL,
        )  # fmt: skip
        if LANES > 1:
            total = tl.sum(last * total, axis=0, keep_dims=True)
        tl.store(out + (rows * outs + column) + block * COLUMNS, total, mask=inside & there)


@triton.jit(do_not_specialize=["n"])
def grid_slope_block(
    grad, points, centers, counts, rates, values, slopes, origin, out, n, outs, steps, tilt_steps, units,
    M: tl.constexpr, WIDTHS: tl.constexpr, WHOLE: tl.constexpr, AFFINE: tl.constexpr, WIDE: tl.constexpr,
    BITS: tl.constexpr, LOOSE: tl.constexpr, LANES: tl.constexpr, COLUMNS: tl.constexpr, BLOCKS: tl.constexpr, MASKED: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """The gradient of the queries."""
    first = tl.program_id(0).to(tl.int64) * BLOCK
    rows = tl.arange(0, BLOCK)[None, :, None]
    inside = rows < tl.minimum(n - first, BLOCK).to(tl.int32)
    points += first * M
    grad += first * outs
    out += first * M
    lane = tl.arange(0, LANES)[:, None, None]
    column = tl.arange(0, COLUMNS)[None, None, :]
    axes, away, at, tilt_at, last, turn = _windows(
        points, rows, inside, lane, centers, counts, rates, origin, steps, tilt_steps, units, outs,
        M, WIDTHS, WHOLE, AFFINE, WIDE, BITS, LOOSE, LANES, True, False,
    )  # fmt: skip
    value = values + column + at
    tilt = slopes + column * M + tilt_at if AFFINE else slopes
    LAST: tl.constexpr = M - 1 if LANES > 1 else M
    zero = tl.zeros([LANES, BLOCK, COLUMNS], values.dtype.element_ty)
    sums = ()
    for i in tl.static_range(M):
        sums = sums + (zero,)
    for block in range(BLOCKS):
        there = column < outs - block * COLUMNS
        mask = there & (lane < WIDTHS[M - 1])
        g = tl.load(grad + (rows * outs + column) + block * COLUMNS, mask=inside & there, other=0.0)
        found = _mean_and_slopes(
            value + block * COLUMNS, tilt + block * COLUMNS * M if AFFINE else tilt, away, mask,
            steps, tilt_steps, axes, zero, 0, LAST, LOOSE, WIDTHS, M, AFFINE, MASKED, BITS,
        )  # fmt: skip
        added = ()
        for i in tl.static_range(M):
            if i == LAST:
                part = turn * found[0]
            elif LANES > 1:
                part = last * found[LAST - i]
            else:
                part = found[LAST - i]
            if AFFINE:
                direct = _mean(
                    tilt + block * COLUMNS * M + i, tilt, away, mask, tilt_steps, tilt_steps, axes, zero,
                    0, LAST, LOOSE, WIDTHS, M, False, MASKED, BITS, 0, 1,
                )  # fmt: skip
                if LANES > 1:
                    direct = last * direct
                part += direct
            added = added + (sums[i] + g * part,)
        sums = added
    for i in tl.static_range(M):
        total = tl.sum(tl.sum(sums[i], axis=2, keep_dims=True), axis=0, keep_dims=True)
        tl.store(out + rows * M + i, total, mask=inside)


@triton.jit(do_not_specialize=["n"])
def grid_spread_block(
    grad, points, order, centers, counts, rates, out, n, outs, pitch, size, copies, steps,
    M: tl.constexpr, WIDTHS: tl.constexpr, WHOLE: tl.constexpr, WIDE: tl.constexpr, BITS: tl.constexpr,
    ORDERED: tl.constexpr, TOGETHER: tl.constexpr,
    LOOSE: tl.constexpr, LANES: tl.constexpr, COLUMNS: tl.constexpr, BLOCKS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The gradient of the values, added up by atomic additions; `copies` tables of `size` numbers share the work.

    With ORDERED, the queries are taken in the order of `order`.
    """
    pid = tl.program_id(0)
    first = pid.to(tl.int64) * BLOCK
    rows = tl.arange(0, BLOCK)[None, :, None]
    inside = rows < tl.minimum(n - first, BLOCK).to(tl.int32)
    if ORDERED:
        rows = tl.load(order + first + rows, mask=inside, other=0)
    else:
        points += first * M
        grad += first * outs
    lane = tl.arange(0, LANES)[:, None, None]
    column = tl.arange(0, COLUMNS)[None, None, :]
    axes, _, at, _, last, _ = _windows(
        points, rows, inside, lane, centers, counts, rates, rates, steps, steps, steps, outs,
        M, WIDTHS, WHOLE, False, WIDE, BITS, LOOSE, LANES, False, False,
    )  # fmt: skip
    LAST: tl.constexpr = M - 1 if LANES > 1 or TOGETHER > 1 else M
    out += (pid % copies).to(tl.int64) * size
    at = tl.broadcast_to(at + column, [LANES, BLOCK, COLUMNS])
    for block in range(BLOCKS):
        there = inside & (lane < WIDTHS[M - 1]) & (column < outs - block * COLUMNS)
        g = tl.load(grad + (rows * outs + column) + block * COLUMNS, mask=there, other=0.0)
        if LANES > 1:
            g = g * last
        _spread(out, at + block * COLUMNS, g, there, steps, axes, pitch, 0, LAST, LOOSE, WIDTHS, TOGETHER)


@triton.jit
def _added(totals, share, axes, AT: tl.constexpr, AXIS: tl.constexpr, COUNTS: tl.constexpr, M: tl.constexpr):
    """`totals`, one per cell, with `share` times the weights of axes AXIS … added from cell number AT on: a part of them."""
    COUNT: tl.constexpr = COUNTS[AXIS]
    weights, _, _ = axes[AXIS]
    sums = ()
    for k in tl.static_range(COUNT):
        if AXIS == M - 1:
            sums = sums + (totals[AT * COUNT + k] + weights[k] * share,)
        else:
            sums = sums + _added(totals, weights[k] * share, axes, AT * COUNT + k, AXIS + 1, COUNTS, M)
    return sums


@triton.jit(do_not_specialize=["n"])
def grid_collect_block(
    grad, points, centers, counts, rates, values, slopes, out, n, outs,
    M: tl.constexpr, COUNTS: tl.constexpr, WIDTHS: tl.constexpr, WHOLE: tl.constexpr,
    CELLS: tl.constexpr, SLOPED: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The gradient of the values of a small table: each thread sums over its part of the queries, in registers.

    With SLOPED, for one axis and one output, the gradient of the queries too.
    """
    part = tl.program_id(0)
    output = tl.program_id(1)
    rows = tl.arange(0, BLOCK)[None, :, None]
    zero = tl.zeros([1, BLOCK, 1], out.dtype.element_ty)
    totals = ()
    for c in tl.static_range(CELLS):
        totals = totals + (zero,)
    first = part.to(tl.int64) * BLOCK
    while first < n:
        inside = rows < tl.minimum(n - first, BLOCK).to(tl.int32)
        here = points + first * M
        g = tl.load(grad + first * outs + (rows * outs + output), mask=inside, other=0.0)
        if M == 1:
            x = tl.load(here + rows, mask=inside, other=0.0)
            half = tl.load(rates) * 0.5
            cell, start = _start(x, centers[0], counts[0], WIDTHS[0], WHOLE[0])
            least = _least(x, cell, centers[0], half, WIDTHS[0], WHOLE[0])
            near = centers[0] + start
            mass = x - x
            moment = x - x
            mean = x - x
            turned = x - x
            for k in range(WIDTHS[0]):
                d = x - tl.load(near + k)
                e = power(least - half * d * d, 0)
                mass += e
                if SLOPED:
                    v = tl.load(values + (start + k))
                    moment += e * d
                    mean += e * v
                    turned += e * d * v
            scale = 1.0 / mass
            if SLOPED:
                slope = 2 * half * (moment * scale * mean - turned) * scale
                tl.store(slopes + first + rows, g * slope, mask=inside)
            g = g * scale
            sums = ()
            for k in tl.static_range(CELLS):
                d = x - tl.load(centers[0] + k)
                e = power(least - half * d * d, 0)
                if not WHOLE[0]:
                    e = tl.where((start <= k) & (k < start + WIDTHS[0]), e, 0.0)
                sums = sums + (totals[k] + e * g,)
            totals = sums
        else:
            axes = ()
            for i in tl.static_range(M):
                x = tl.load(here + rows * M + i, mask=inside, other=0.0)
                half = tl.load(rates + i) * 0.5
                _, start = _start(x, centers[i], counts[i], WIDTHS[i], WHOLE[i])
                weights, turns = _held_axis(x, centers[i], half, start, COUNTS[i], WIDTHS[i], False)
                axes = axes + ((weights, turns, 0),)
            totals = _added(totals, g, axes, 0, 0, COUNTS, M)
        first += PARTS * BLOCK
    out += ((part * outs + output) * CELLS).to(tl.int64) * BLOCK
    for c in tl.static_range(CELLS):
        tl.store(out + (c * BLOCK + rows), totals[c])
