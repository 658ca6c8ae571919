"""The Triton programs of `scattered_triton`: sorting points into blocks, listing the blocks that count, sums and gradients.

Names in capitals are settled when a program is compiled. Points lie one row per coordinate, sorted and padded to whole superblocks.
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = [
    "arrange_kernel",
    "best_kernel",
    "coarse_kernel",
    "codes_kernel",
    "collect_kernel",
    "columns_kernel",
    "fine_kernel",
    "finish_kernel",
    "gradient_kernel",
    "home_kernel",
    "settle_kernel",
    "sum_kernel",
]

_HALF_LOG2E = tl.constexpr(0.7213475204444817)


# ---------------------------------------------------------------- sorting


@triton.jit
def _turn(x, y, bit):
    """One step of the Hilbert transform (Skilling 2004) on the first coordinate and another one."""
    t = tl.where((y & bit) != 0, bit - 1, 0)
    swap = tl.where((y & bit) != 0, 0, (x ^ y) & (bit - 1))
    return x ^ t ^ swap, y ^ swap


@triton.jit
def codes_kernel(points, low, high, codes, n, M: tl.constexpr, BITS: tl.constexpr, SIZE: tl.constexpr):
    """Numbers of the cells along a Hilbert curve through the cube over the box from `low` to `high`."""
    at = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    edge = tl.load(high) - tl.load(low)
    for d in tl.static_range(1, M):
        edge = tl.maximum(edge, tl.load(high + d) - tl.load(low + d))
    per_unit = tl.where(edge > 0, (1 << BITS) / edge, 0.0)
    x = ()
    for d in tl.static_range(M):
        z = tl.load(points + at.to(tl.int64) * M + d, mask=at < n, other=0.0)
        z = (z - tl.load(low + d)) * per_unit
        z = tl.where(z > 0, z, 0.0)  # NaN too
        z = tl.where(z < (1 << BITS), z, (1 << BITS) - 1)
        x = x + (tl.minimum(z.to(tl.int32), (1 << BITS) - 1),)
    for b in tl.static_range(BITS - 1):
        first, _ = _turn(x[0], x[0], 1 << (BITS - 1 - b))
        x = (first,) + x[1:]
        for d in tl.static_range(1, M):
            first, other = _turn(x[0], x[d], 1 << (BITS - 1 - b))
            x = (first,) + x[1:d] + (other,) + x[d + 1 :]
    for d in tl.static_range(1, M):
        x = x[:d] + (x[d] ^ x[d - 1],) + x[d + 1 :]
    last = x[M - 1]
    flip = tl.zeros_like(last)
    for b in tl.static_range(BITS - 1):
        flip ^= tl.where((last & (1 << (BITS - 1 - b))) != 0, (1 << (BITS - 1 - b)) - 1, 0)
    code = tl.zeros([SIZE], tl.int64)
    for b in tl.static_range(BITS):
        for d in tl.static_range(M):
            code = code * 2 + (((x[d] ^ flip) >> (BITS - 1 - b)) & 1)
    tl.store(codes + at, code, mask=at < n)


@triton.jit
def arrange_kernel(
    points, order, term, sorted_points, valid, boxes, terms, super_boxes, super_terms, n, padded, supers,
    M: tl.constexpr, CLEAN: tl.constexpr, TERM: tl.constexpr, BLOCK: tl.constexpr, SUPER: tl.constexpr,
):  # fmt: skip
    """Copy one superblock of points in order (CLEAN: 0 for those that are not finite), with the boxes and largest terms."""
    own = tl.program_id(0)
    slot = own * (SUPER * BLOCK) + tl.arange(0, SUPER)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    live = slot < n
    source = tl.load(order + slot, mask=live, other=0).to(tl.int64)
    dtype = sorted_points.dtype.element_ty
    finite = live
    for d in tl.static_range(M):
        z = tl.load(points + source * M + d, mask=live, other=0.0)
        finite &= tl.abs(z) < float("inf")
    block = own * SUPER + tl.arange(0, SUPER)
    wide = tl.cast(padded, tl.int64)
    blocks = tl.cast(supers, tl.int64) * SUPER
    for d in tl.static_range(M):
        z = tl.load(points + source * M + d, mask=finite, other=0.0)
        if CLEAN:
            tl.store(sorted_points + d * wide + slot, z)
        else:
            tl.store(sorted_points + d * wide + slot, tl.load(points + source * M + d, mask=live, other=0.0))
        low = tl.min(tl.where(finite, z, float("inf")), 1)
        high = tl.max(tl.where(finite, z, float("-inf")), 1)
        tl.store(boxes + d * blocks + block, low)
        tl.store(boxes + (M + d) * blocks + block, high)
        tl.store(super_boxes + d * supers + own, tl.min(low, 0))
        tl.store(super_boxes + (M + d) * supers + own, tl.max(high, 0))
    tl.store(valid + slot, finite.to(tl.int8))
    if TERM:
        t = tl.load(term + source, mask=finite, other=0.0)
    else:
        t = tl.zeros([SUPER, BLOCK], dtype)
    largest = tl.max(tl.where(finite, t, float("-inf")), 1)
    tl.store(terms + block, largest)
    tl.store(super_terms + own, tl.max(largest, 0))


@triton.jit
def columns_kernel(source, order, valid, target, n, width, padded, OTHER: tl.constexpr, SIZE: tl.constexpr):
    """`target[c, s] = source[order[s], c]`; OTHER in the padding and for points that are not finite."""
    blocks = tl.cdiv(padded, SIZE)
    slot = (tl.program_id(0) % blocks) * SIZE + tl.arange(0, SIZE)
    c = (tl.program_id(0) // blocks).to(tl.int64)
    live = tl.load(valid + slot, mask=slot < n, other=0) != 0
    row = tl.load(order + slot, mask=slot < n, other=0).to(tl.int64)
    z = tl.load(source + row * width + c, mask=live, other=OTHER)
    tl.store(target + c * padded + slot, z, mask=slot < padded)


# ---------------------------------------------------------------- which blocks count


@triton.jit
def home_kernel(
    points, codes, valid, n, padded, keys, key_codes, powers, key_count, key_padded, energies, terms, super_terms, steps,
    M: tl.constexpr, POWERS: tl.constexpr, WINDOW: tl.constexpr, BLOCK: tl.constexpr, SUPER: tl.constexpr,
):  # fmt: skip
    """The least energy of each query among the keys next to it along the curve, and the largest of those in each block."""
    own = tl.program_id(0)
    slot = own * (SUPER * BLOCK) + tl.arange(0, SUPER * BLOCK)
    live = slot < n
    code = tl.load(codes + slot, mask=live, other=0)
    low = tl.zeros([SUPER * BLOCK], tl.int32)
    high = tl.zeros([SUPER * BLOCK], tl.int32) + key_count
    for _ in range(steps):
        middle = (low + high) // 2
        less = tl.load(key_codes + tl.minimum(middle, key_count - 1)) < code
        open_ = low < high
        low, high = tl.where(open_ & less, middle + 1, low), tl.where(open_ & (less == 0), middle, high)
    start = tl.maximum(tl.minimum(low - WINDOW // 2, key_count - WINDOW), 0)
    wide, key_wide = tl.cast(padded, tl.int64), tl.cast(key_padded, tl.int64)
    q = ()
    for d in tl.static_range(M):
        q = q + (tl.load(points + d * wide + slot),)
    best = tl.zeros_like(q[0]) + float("inf")
    for j in range(WINDOW):
        at = tl.minimum(start + j, key_count - 1)
        z = ()
        for d in tl.static_range(M):
            z = z + (q[d] - tl.load(keys + d * key_wide + at),)
        e = _squares(z, M)
        if POWERS:
            e -= tl.load(powers + at)
        best = tl.minimum(best, e)
    tl.store(energies + slot, best)
    worst = tl.where(tl.load(valid + slot) != 0, best, float("-inf"))
    largest = tl.max(tl.reshape(worst, [SUPER, BLOCK]), 1)
    tl.store(terms + own * SUPER + tl.arange(0, SUPER), largest)
    tl.store(super_terms + own, tl.max(largest, 0))


@triton.jit
def _tested(row, row_term, boxes, at, count, col_term, shift, c, slack, weight, M: tl.constexpr):
    """Which boxes of columns count, what bounds the sum over the others, and the least energies possible."""
    e = tl.zeros_like(col_term)
    for d in tl.static_range(M):
        low = tl.load(boxes + d * count + at)
        high = tl.load(boxes + (M + d) * count + at)
        gap = tl.maximum(tl.maximum(low - row[M + d], row[d] - high), 0.0)
        e += gap * gap
    e = tl.where(e < float("inf"), e - slack * (e + tl.abs(row_term) + tl.abs(col_term)), e)
    limit = row_term + col_term + shift
    keep = e <= limit
    some = col_term > float("-inf")
    gone = tl.maximum(weight * tl.exp2(c * (limit - e)), 1e-30)  # more than what is flushed to zero
    missed = tl.where(some & (keep == 0), gone, 0.0)
    return keep & some, missed, e - col_term


@triton.jit
def _factor(rate, dtype: tl.constexpr):
    """`R·log₂e/2`; never zero, so that its product with an infinite energy is infinite."""
    return tl.maximum(tl.load(rate).to(tl.float64) * _HALF_LOG2E, 1.2e-38).to(dtype)


@triton.jit
def _box(boxes, at, count, M: tl.constexpr):
    row = ()
    for d in tl.static_range(2 * M):
        row = row + (tl.load(boxes + d * count + at),)
    return row


@triton.jit
def _entries_of(row, ends, counts, FLAG: tl.constexpr):
    """Where the list of a row begins and ends."""
    end = (tl.load(ends + row) % FLAG).to(tl.int32)
    return end - (tl.load(counts + row) % FLAG).to(tl.int32), end


@triton.jit
def _item_of(row, begin, SEGMENT: tl.constexpr):
    """The number of a row's first segment: there is always room for the segments of the rows before it."""
    return begin // SEGMENT + row


@triton.jit
def coarse_kernel(
    row_boxes, row_terms, row_count, col_boxes, col_terms, col_count, first, rate, cut, slack, found, counts, missed,
    M: tl.constexpr, POINTS: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """Superblocks of columns that count for a superblock of rows."""
    own = tl.program_id(0)
    super_row = own + first
    r = tl.load(rate).to(tl.float64)
    dtype = row_terms.dtype.element_ty
    shift, c = (2 * cut / r).to(dtype), _factor(rate, dtype)
    row = _box(row_boxes, super_row, row_count, M)
    row_term = tl.load(row_terms + super_row)
    run = 0
    lost = tl.zeros([SIZE], dtype)
    base = found + own.to(tl.int64) * col_count
    for begin in range(0, col_count, SIZE):
        at = begin + tl.arange(0, SIZE)
        col_term = tl.load(col_terms + at, mask=at < col_count, other=float("-inf"))
        safe = tl.minimum(at, col_count - 1)
        keep, gone, _ = _tested(row, row_term, col_boxes, safe, col_count, col_term, shift, c, slack, POINTS, M)
        keep = keep.to(tl.int32)
        tl.store(base + run + tl.cumsum(keep, 0) - keep, at, mask=keep != 0)
        run += tl.sum(keep, 0)
        lost += gone
    tl.store(counts + own, run)
    tl.store(missed + own, tl.sum(lost, 0))


@triton.jit
def fine_kernel(
    row_boxes, row_terms, super_terms, row_count, col_boxes, col_terms, col_count, first, rate, cut, slack,
    found, found_counts, found_missed, supers, counts, missed, ends, entries, owners,
    FILL: tl.constexpr, M: tl.constexpr, BLOCK: tl.constexpr, SUPER: tl.constexpr, WIDE: tl.constexpr, SEGMENT: tl.constexpr,
    GAP: tl.constexpr, FLAG: tl.constexpr,
):  # fmt: skip
    """Blocks of columns that count for a block of rows: counted, or written down (FILL)."""
    own = tl.program_id(0)
    r = tl.load(rate).to(tl.float64)
    dtype = row_terms.dtype.element_ty
    shift, c = (2 * cut / r).to(dtype), _factor(rate, dtype)
    row = _box(row_boxes, own + first, row_count, M)
    row_term = tl.load(row_terms + own + first)
    coarse = own // SUPER
    base = found + coarse.to(tl.int64) * supers
    lane = tl.arange(0, SUPER * WIDE)
    total = tl.zeros([SUPER * WIDE], tl.int32)
    lost = tl.zeros([SUPER * WIDE], dtype)
    least = tl.zeros([SUPER * WIDE], dtype) + float("inf")
    run = 0
    if FILL:
        begin, end = _entries_of(own, ends, counts, FLAG)
        used = (end - begin + SEGMENT - 1) // SEGMENT
        item = _item_of(own, begin, SEGMENT)
        room = _item_of(own + 1, end, SEGMENT) - item
        for s in range(0, room, SUPER * WIDE):
            tl.store(owners + item + s + lane, tl.where(s + lane < used, own, -1), mask=s + lane < room)
    some = tl.load(found_counts + coarse)
    for i in range(0, some, WIDE):
        live = i + lane // SUPER < some
        at = tl.load(base + i + lane // SUPER, mask=live, other=0) * SUPER + lane % SUPER
        col_term = tl.load(col_terms + at, mask=live, other=float("-inf"))
        keep, gone, possible = _tested(row, row_term, col_boxes, at, col_count, col_term, shift, c, slack, BLOCK, M)
        if FILL:
            one = keep.to(tl.int32)
            tl.store(entries + begin + run + tl.cumsum(one, 0) - one, at, mask=keep)
            run += tl.sum(one, 0)
        else:
            total += keep.to(tl.int32)
            lost += gone
            least = tl.minimum(least, tl.where(keep, possible, float("inf")))
    if not FILL:
        flag = c * (row_term - tl.min(least, 0)) > GAP
        tl.store(counts + own, tl.sum(total, 0).to(tl.int64) + tl.where(flag, FLAG, 0).to(tl.int64))
        before = tl.load(found_missed + coarse)
        nearer = tl.exp2(c * (row_term - tl.load(super_terms + own // SUPER + first // SUPER)))
        before = tl.where(before > 0, tl.maximum(before * nearer, 1e-30), 0.0)
        tl.store(missed + own, tl.sum(lost, 0) + tl.where(row_term > float("-inf"), before, 0.0))


# ---------------------------------------------------------------- the sum


@triton.jit
def _span(item, owners, ends, counts, segments, blocks, SEGMENT: tl.constexpr, DENSE: tl.constexpr, FLAG: tl.constexpr):
    """The row of a segment, and where its blocks begin and end in the list."""
    if DENSE:
        row = item // segments
        begin = (item % segments) * SEGMENT
        end = tl.minimum(begin + SEGMENT, blocks)
    else:
        owner = tl.load(owners + item)
        row = tl.maximum(owner, 0)
        first, last = _entries_of(row, ends, counts, FLAG)
        begin = first + (item - _item_of(row, first, SEGMENT)) * SEGMENT
        end = tl.where(owner < 0, begin, tl.minimum(begin + SEGMENT, last))
    return row, begin, end


@triton.jit
def _segments_of(row, ends, counts, segments, blocks, SEGMENT: tl.constexpr, DENSE: tl.constexpr, FLAG: tl.constexpr):
    """The first segment of a row, the number of its segments, and that of its blocks."""
    if DENSE:
        return row * segments, segments, blocks
    else:
        begin, end = _entries_of(row, ends, counts, FLAG)
        return _item_of(row, begin, SEGMENT), (end - begin + SEGMENT - 1) // SEGMENT, end - begin


@triton.jit
def _block_columns(entries, slot, end, lane, count, DENSE: tl.constexpr, BLOCK: tl.constexpr):
    """The points of the lanes, and which of them exist."""
    if DENSE:
        block = slot
    else:
        block = tl.load(entries + slot, mask=slot < end, other=0)
    col = block * BLOCK + lane
    live = (slot < end) & (col < count)
    return tl.where(live, col, 0), live


@triton.jit
def _rows_of(source, padded, at, M: tl.constexpr):
    z = ()
    for d in tl.static_range(M):
        z = z + (tl.load(source + d * tl.cast(padded, tl.int64) + at),)
    return z


@triton.jit
def _differences(points, cols, col_padded, col, live, other: tl.constexpr, M: tl.constexpr):
    """`q − k` per coordinate, `(rows, lanes)` each; lanes without a point lie at `other` in the first one."""
    z = ()
    for d in tl.static_range(M):
        k = tl.load(cols + d * tl.cast(col_padded, tl.int64) + col)
        if d == 0 and other != 0:
            k = tl.where(live, k, other)
        z = z + (points[d][:, None] - k[None, :],)
    return z


@triton.jit
def _squares(z, M: tl.constexpr):
    """`Σ z²` with roundings that are the same in every program: a reference is then exactly the energy of its key."""
    e = z[0] * z[0]
    for d in tl.static_range(1, M):
        e = tl.fma(z[d], z[d], e)
    return e


@triton.jit
def _far_squares(points, padded, at, cols, col_padded, col, M, ROWS: tl.constexpr, LANES: tl.constexpr):
    """The same for many dimensions, one after the other."""
    e = tl.zeros([ROWS, LANES], points.dtype.element_ty)
    for d in range(M):
        q = tl.load(points + d * tl.cast(padded, tl.int64) + at)
        z = q[:, None] - tl.load(cols + d * tl.cast(col_padded, tl.int64) + col)[None, :]
        e = tl.fma(z, z, e)
    return e


@triton.jit
def best_kernel(
    points, padded, keys, key_padded, key_count, key_blocks, powers, entries, owners, ends, counts, flags, segments, first,
    partial, M: tl.constexpr, POWERS: tl.constexpr, DENSE: tl.constexpr, FAR: tl.constexpr,
    BLOCK: tl.constexpr, ROWS: tl.constexpr, LANES: tl.constexpr, SEGMENT: tl.constexpr, FLAG: tl.constexpr,
):  # fmt: skip
    """The least energy over a segment, for flagged rows."""
    item = tl.program_id(0)
    inner = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    row, begin, end = _span(item, owners, ends, counts, segments, key_blocks, SEGMENT, DENSE, FLAG)
    end = tl.where(tl.load(flags + row) >= FLAG, end, begin)
    at = (row + first) * BLOCK + inner
    lane = tl.arange(0, LANES)
    if not FAR:
        q = _rows_of(points, padded, at, M)
    least = tl.zeros([ROWS, LANES], points.dtype.element_ty) + float("inf")
    for t in range(begin, end, LANES // BLOCK):
        col, live = _block_columns(entries, t + lane // BLOCK, end, lane % BLOCK, key_count, DENSE, BLOCK)
        if FAR:
            e = _far_squares(points, padded, at, keys, key_padded, col, M, ROWS, LANES)
        else:
            e = _squares(_differences(q, keys, key_padded, col, live, 0, M), M)
        if POWERS:
            e -= tl.load(powers + col)[None, :]
        least = tl.minimum(least, tl.where(live[None, :], e, float("inf")))
    tl.store(partial + item.to(tl.int64) * BLOCK + inner, tl.min(least, 1))


@triton.jit
def settle_kernel(
    partial, energies, ends, counts, flags, segments, first, blocks,
    DENSE: tl.constexpr, BLOCK: tl.constexpr, SEGMENT: tl.constexpr, FLAG: tl.constexpr,
):  # fmt: skip
    """The least energy over all segments of a flagged row."""
    row = tl.program_id(0)
    inner = tl.arange(0, BLOCK)
    item, count, _ = _segments_of(row, ends, counts, segments, blocks, SEGMENT, DENSE, FLAG)
    if tl.load(flags + row) >= FLAG:
        least = tl.zeros([BLOCK], energies.dtype.element_ty) + float("inf")
        for s in range(count):
            least = tl.minimum(least, tl.load(partial + (item + s).to(tl.int64) * BLOCK + inner))
        tl.store(energies + (row + first) * BLOCK + inner, least)


@triton.jit
def sum_kernel(
    points, padded, energies, keys, key_padded, key_count, key_blocks, powers, values, slopes, outs, rate,
    entries, owners, ends, counts, segments, first, partial, items, skip,
    M: tl.constexpr, POWERS: tl.constexpr, SLOPES: tl.constexpr, TILE: tl.constexpr, DENSE: tl.constexpr, FAR: tl.constexpr,
    BLOCK: tl.constexpr, ROWS: tl.constexpr, LANES: tl.constexpr, SEGMENT: tl.constexpr, FLAG: tl.constexpr,
):  # fmt: skip
    """`Σ 2^(c(x_ref − x))` and the same sum times the values, over one segment."""
    item = tl.program_id(0)
    inner = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    out = (tl.program_id(2) + skip) * TILE
    row, begin, end = _span(item, owners, ends, counts, segments, key_blocks, SEGMENT, DENSE, FLAG)
    dtype: tl.constexpr = points.dtype.element_ty
    c = _factor(rate, dtype)
    at = (row + first) * BLOCK + inner
    lane = tl.arange(0, LANES)
    wide = tl.cast(key_padded, tl.int64)
    reference = tl.load(energies + at)[:, None]
    if not FAR:
        q = _rows_of(points, padded, at, M)
    total = tl.zeros([ROWS, LANES], dtype)
    sums = ()
    for o in tl.static_range(TILE):
        sums = sums + (tl.zeros([ROWS, LANES], dtype),)
    for t in range(begin, end, LANES // BLOCK):
        col, live = _block_columns(entries, t + lane // BLOCK, end, lane % BLOCK, key_count, DENSE, BLOCK)
        if FAR:
            e = _far_squares(points, padded, at, keys, key_padded, col, M, ROWS, LANES)
            z = ()
        else:
            z = _differences(q, keys, key_padded, col, live, 0 if SLOPES or POWERS else float("inf"), M)
            e = _squares(z, M)
        if POWERS:
            e -= tl.where(live, tl.load(powers + col), float("-inf"))[None, :]
        elif SLOPES or FAR:
            e += tl.where(live, 0.0, float("inf"))[None, :]
        w = tl.exp2(c * (reference - e))
        total += w
        new = ()
        for o in tl.static_range(TILE):
            number = tl.minimum(out + o, outs - 1).to(tl.int64)
            v = tl.load(values + number * wide + col)[None, :]
            if SLOPES:
                v = tl.zeros([ROWS, LANES], dtype) + v
                if FAR:
                    for d in range(M):
                        k = tl.load(keys + d * wide + col)[None, :]
                        x = tl.load(points + d * tl.cast(padded, tl.int64) + at)[:, None]
                        v += tl.load(slopes + (number * M + d) * wide + col)[None, :] * (x - k)
                else:
                    for d in tl.static_range(M):
                        v += tl.load(slopes + (number * M + d) * wide + col)[None, :] * z[d]
            new = new + (sums[o] + w * v,)
        sums = new
    base = partial + (tl.program_id(2).to(tl.int64) * items + item) * ((TILE + 1) * BLOCK) + inner
    tl.store(base, tl.sum(total, 1))
    for o in tl.static_range(TILE):
        tl.store(base + (o + 1) * BLOCK, tl.sum(sums[o], 1))


@triton.jit
def finish_kernel(
    partial, items, energies, terms, missed, valid, order, n, outs, rate, cut, ends, counts, segments, first, blocks,
    skip, output, lse, dropped, depth, TILE: tl.constexpr, DENSE: tl.constexpr, BLOCK: tl.constexpr, LANES: tl.constexpr,
    SEGMENT: tl.constexpr, FLAG: tl.constexpr,
):  # fmt: skip
    """Add the segments of a block of queries in float64 and write its results where its queries came from."""
    row = tl.program_id(0)
    inner = tl.arange(0, BLOCK)
    out = (tl.program_id(1) + skip) * TILE
    item, count, entries = _segments_of(row, ends, counts, segments, blocks, SEGMENT, DENSE, FLAG)
    total = tl.zeros([BLOCK], tl.float64)
    sums = ()
    for o in tl.static_range(TILE):
        sums = sums + (tl.zeros([BLOCK], tl.float64),)
    for s in range(count):
        base = partial + (tl.program_id(1).to(tl.int64) * items + item + s) * ((TILE + 1) * BLOCK) + inner
        total += tl.load(base)
        new = ()
        for o in tl.static_range(TILE):
            new = new + (sums[o] + tl.load(base + (o + 1) * BLOCK),)
        sums = new
    at = (row + first) * BLOCK + inner
    live = at < n
    good = tl.load(valid + at) != 0
    target = tl.load(order + at, mask=live, other=0)
    total = tl.where(good, total, float("nan"))
    for o in tl.static_range(TILE):
        tl.store(output + target * outs + out + o, sums[o] / total, mask=live & (inner * 0 + out + o < outs))
    if out == 0:
        r = tl.load(rate).to(tl.float64)
        best = tl.load(energies + at).to(tl.float64)
        size = tl.log(total)
        tl.store(lse + target, size - 0.5 * r * best, mask=live)
        if DENSE:
            gone = size * 0 + float("-inf")
        else:
            limit = tl.load(terms + row + first).to(tl.float64) + 2 * cut / r
            gone = tl.log(tl.load(missed + row).to(tl.float64)) - 0.5 * r * (limit - best) - size
        tl.store(dropped + target, gone, mask=live)
        longest = (tl.minimum(entries, SEGMENT) * BLOCK + LANES - 1) // LANES + 6 + count  # lanes, their tree, segments
        tl.store(depth + target, inner * 0 + longest, mask=live)


# ---------------------------------------------------------------- gradients


@triton.jit
def _side(source, number, padded, at, col, ROWS_OWN: tl.constexpr):
    """One column of what belongs to the rows or to the lanes, ready to be broadcast."""
    base = source + tl.cast(number, tl.int64) * tl.cast(padded, tl.int64)
    if ROWS_OWN:
        return tl.load(base + at)[:, None]
    else:
        return tl.load(base + col)[None, :]


@triton.jit
def _against(
    upstream, query_padded, table, key_padded, outs, shift, stride, at, col,
    KEYS: tl.constexpr, ROWS: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """`Σ_o g_o·table[o·stride + shift]` for all pairs."""
    total = tl.zeros([ROWS, LANES], table.dtype.element_ty)
    for o in range(outs):
        g = _side(upstream, o, query_padded, at, col, not KEYS)
        total += g * _side(table, o * stride + shift, key_padded, at, col, KEYS)
    return total


@triton.jit
def gradient_kernel(
    points, padded, cols, col_padded, col_count, col_blocks, levels, upstream, query_padded, values, slopes, powers, key_padded,
    outs, rate, entries, owners, ends, counts, segments, first, partial, items, skip,
    M: tl.constexpr, DIMS: tl.constexpr, LAST: tl.constexpr, TILE: tl.constexpr, OUT: tl.constexpr, DIM_TILES: tl.constexpr,
    JACOBIAN: tl.constexpr, SLOPES: tl.constexpr, POWERS: tl.constexpr, KEYS: tl.constexpr, DENSE: tl.constexpr,
    FAR: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, LANES: tl.constexpr, SEGMENT: tl.constexpr, FLAG: tl.constexpr,
):  # fmt: skip
    """Sums over one segment of keys for a block of queries, or of queries for a block of keys (KEYS).

    With the weights w and `a = w·(g·(V − output) + g_lse)` these are, as asked for: DIMS coordinates of the gradient of the
    rows' points, or of the slopes of one output (JACOBIAN); Σ a·x, or Σ a for keys (LAST); Σ w·g for TILE outputs.
    """
    item = tl.program_id(0)
    inner = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    tile = tl.program_id(2) + skip
    dim = (tile % DIM_TILES) * DIMS
    out = tile * TILE if TILE > 0 else tile // DIM_TILES
    row, begin, end = _span(item, owners, ends, counts, segments, col_blocks, SEGMENT, DENSE, FLAG)
    dtype: tl.constexpr = points.dtype.element_ty
    r = tl.load(rate).to(tl.float64)
    c = _factor(rate, dtype)
    steep = (-r).to(dtype)
    at = (row + first) * BLOCK + inner
    lane = tl.arange(0, LANES)
    if not FAR:
        q = _rows_of(points, padded, at, M)
    if KEYS:
        if POWERS:
            own_power = tl.load(powers + at)[:, None]
    else:
        reference = tl.load(levels + at)[:, None]
        own_delta = _side(upstream, outs, query_padded, at, lane, True)
    own = ()
    for o in tl.static_range(OUT):
        own = own + (_side(values if KEYS else upstream, o, key_padded if KEYS else query_padded, at, lane, True),)
    near = ()
    for d in tl.static_range(DIMS):
        near = near + (tl.zeros([ROWS, LANES], dtype),)
    last = tl.zeros([ROWS, LANES], dtype)
    sums = ()
    for o in tl.static_range(TILE):
        sums = sums + (tl.zeros([ROWS, LANES], dtype),)
    for t in range(begin, end, LANES // BLOCK):
        col, live = _block_columns(entries, t + lane // BLOCK, end, lane % BLOCK, col_count, DENSE, BLOCK)
        if FAR:
            x = _far_squares(points, padded, at, cols, col_padded, col, M, ROWS, LANES)
        else:
            z = _differences(q, cols, col_padded, col, live, 0, M)
            x = _squares(z, M)
        if KEYS:
            if POWERS:
                x -= own_power
            level = tl.where(live, tl.load(levels + col), float("-inf"))[None, :]
        else:
            if POWERS:
                x -= tl.load(powers + col)[None, :]
            level = reference + tl.where(live, 0.0, float("-inf"))[None, :]
        w = tl.exp2(tl.minimum(c * (level - x), 0.0))
        if (DIMS > 0 and not JACOBIAN) or LAST:
            if KEYS:
                share = -_side(upstream, outs, query_padded, at, col, False) + tl.zeros([ROWS, LANES], dtype)
            else:
                share = -own_delta + tl.zeros([ROWS, LANES], dtype)
            if OUT > 0:
                for o in tl.static_range(OUT):
                    share += own[o] * _side(
                        upstream if KEYS else values, o, query_padded if KEYS else key_padded, at, col, False
                    )
            else:
                share += _against(upstream, query_padded, values, key_padded, outs, 0, 1, at, col, KEYS, ROWS, LANES)
            if SLOPES:
                for j in range(M):
                    tilt = _against(upstream, query_padded, slopes, key_padded, outs, j, M, at, col, KEYS, ROWS, LANES)
                    tilt *= _side(points, j, padded, at, col, True) - _side(cols, j, col_padded, at, col, False)
                    share += -tilt if KEYS else tilt
            a = w * share
            if LAST:
                last += a if KEYS else a * x
        if DIMS > 0:
            new = ()
            for i in tl.static_range(DIMS):
                axis = tl.minimum(dim + i, M - 1)
                if FAR:
                    step = _side(points, axis, padded, at, col, True) - _side(cols, axis, col_padded, at, col, False)
                else:
                    step = z[i]
                if JACOBIAN:
                    more = -w * _side(upstream, out, query_padded, at, col, False) * step
                else:
                    more = steep * a * step
                    if SLOPES:
                        pull = w * _against(
                            upstream, query_padded, slopes, key_padded, outs, axis, M, at, col, KEYS, ROWS, LANES
                        )
                        more += -pull if KEYS else pull
                new = new + (near[i] + more,)
            near = new
        if TILE > 0:
            more_sums = ()
            for o in tl.static_range(TILE):
                number = tl.minimum(out + o, outs - 1)
                more_sums = more_sums + (sums[o] + w * _side(upstream, number, query_padded, at, col, False),)
            sums = more_sums
    width: tl.constexpr = DIMS + LAST + TILE
    base = partial + (tl.program_id(2).to(tl.int64) * items + item) * (width * BLOCK) + inner
    for i in tl.static_range(DIMS):
        tl.store(base + i * BLOCK, tl.sum(near[i], 1))
    if LAST:
        tl.store(base + DIMS * BLOCK, tl.sum(last, 1))
    for o in tl.static_range(TILE):
        tl.store(base + (DIMS + LAST + o) * BLOCK, tl.sum(sums[o], 1))


@triton.jit
def collect_kernel(
    partial, items, valid, order, n, outs, rate, ends, counts, segments, first, blocks, skip, near, last, sums,
    M: tl.constexpr, DIMS: tl.constexpr, LAST: tl.constexpr, TILE: tl.constexpr, DIM_TILES: tl.constexpr, JACOBIAN: tl.constexpr,
    KEYS: tl.constexpr, DENSE: tl.constexpr, BLOCK: tl.constexpr, SEGMENT: tl.constexpr, FLAG: tl.constexpr,
):  # fmt: skip
    """Add the segments of a row in float64 and write the gradients where its points came from."""
    row = tl.program_id(0)
    tile = tl.program_id(1) + skip
    inner = tl.arange(0, BLOCK)
    item, count, _ = _segments_of(row, ends, counts, segments, blocks, SEGMENT, DENSE, FLAG)
    at = (row + first) * BLOCK + inner
    live = at < n
    good = tl.load(valid + at) != 0
    target = tl.load(order + at, mask=live, other=0)
    width: tl.constexpr = DIMS + LAST + TILE
    for i in tl.static_range(width):
        total = tl.zeros([BLOCK], tl.float64)
        for s in range(count):
            place = (tl.program_id(1).to(tl.int64) * items + item + s) * (width * BLOCK)
            total += tl.load(partial + place + i * BLOCK + inner)
        if i < DIMS:
            d = (tile % DIM_TILES) * DIMS + i
            goal = target * M + d
            if JACOBIAN:
                goal = (target * outs + tile // DIM_TILES) * M + d
            tl.store(near + goal, tl.where(good, total, float("nan")), mask=live & (inner * 0 + d < M))
        elif i < DIMS + LAST:
            if tile == 0:
                if KEYS:
                    total = total * (tl.load(rate).to(tl.float64) * 0.5)
                tl.store(last + target, tl.where(good, total, 0.0), mask=live)
        else:
            o = tile * TILE + i - DIMS - LAST
            tl.store(sums + target * outs + o, total, mask=live & (inner * 0 + o < outs))
