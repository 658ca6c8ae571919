"""Softmax attention over scattered points on a GPU, in Triton.

Points are sorted along a Hilbert curve and cut into blocks of `BLOCK` neighbours with their bounding boxes; 32 blocks make a
superblock. Each block of queries gets the list of key blocks whose boxes can hold a score within `cut` of the worst of the best
scores in it: first the superblocks, then their blocks. One warp sums the list: each lane holds one key, the block's queries lie
in registers, and nothing is exchanged between lanes until the list ends. Long lists are cut into segments, which other warps sum.
The order of summation depends on the data alone, so that equal calls give equal bits; there are no atomics.

Arithmetic. With the energy `x_ij = |q_i − k_j|² − p_j`, from differences taken first, the weights are `2^(c·x_ref − c·x_ij)` with
`c = R·log₂e/2`, rounded once, and `x_ref` the energy of one key of the query's list, the same for all of them: an error of
`x_ref` cancels. A score is wrong by at most `(m + 4)·u·R·(|q − k|² + |p|)/2`: m + 1 roundings of the squares and their sum, one of
the power, one of c, one of the fused multiply-add (u the unit roundoff). The exponential is `ex2.approx.ftz` in float32, 2 ulp by
NVIDIA's PTX manual, with results below 2^-126 flushed to zero; in float64 it is libdevice's `exp2`, 1 ulp. A flushed weight is below
2^-126 of one that is counted. At most `SEGMENT·BLOCK/32 + 5` terms are added after each other in the dtype; segments are added in
float64.

Queries that are not finite get NaN and touch no other query; they add nothing to the gradients of keys and values. Keys and
powers must be finite.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = ["BLOCK", "DeviceIndex", "build_index", "gradients_on_device", "sum_on_device"]

BLOCK = 16  # points per block
SUPER = 32  # blocks per superblock
SEGMENT = 128  # blocks summed by one program before the sums are combined
PRUNED = 8  # dimensions up to which boxes are used
QUERIES = 1 << 21  # sorted and summed at once
ENTRIES = 1 << 26  # list entries held at once
ITEMS = 1 << 20  # segments held at once where every block counts
LANES = 32  # columns summed at once: one per lane of a warp
WINDOW = 32  # keys tried for the first guess of the best score
WIDE = 4  # superblocks tested at once by one warp
FLAG = 1 << 40  # more than there are entries
GAP = 60.0  # binary orders that the reference may lie below the best score

_HALF_LOG2E = tl.constexpr(0.7213475204444817)


class Points(NamedTuple):
    """Points in blocks: sorted, one row per coordinate, padded to whole superblocks."""

    count: int
    order: Tensor  # (count,) int64: the sorted points' numbers
    codes: Tensor  # (count,) int64, sorted
    sorted: Tensor  # (m, padded); points that are not finite are 0
    valid: Tensor  # (padded,) int8: finite, and no padding
    boxes: Tensor  # (2, m, blocks): lower and upper corners
    terms: Tensor  # (blocks,): the largest term of the block's points
    super_boxes: Tensor  # (2, m, superblocks)
    super_terms: Tensor  # (superblocks,)

    @property
    def blocks(self) -> int:
        return -(-self.count // BLOCK)


class DeviceIndex(NamedTuple):
    """Keys prepared once and queried often."""

    points: Points
    low: Tensor  # (m,): the corners of the keys' box
    high: Tensor
    powers: Tensor | None  # (padded,) sorted

    @property
    def dimension(self) -> int:
        return int(self.points.sorted.shape[0])


class Lists(NamedTuple):
    """For each block of rows from number `first` on, the blocks of columns that count; all of them where `segments > 0`."""

    entries: Tensor  # numbers of blocks of columns
    owners: Tensor  # (items,): the row of a segment, −1 for none
    ends: Tensor  # (rows,) int64: running totals of counts
    counts: Tensor  # (rows,) int64: entries, plus FLAG for rows whose reference could lie far below the best score
    flags: Tensor  # (rows,) int64: the same with FLAG where there are no lists
    flagged: int
    missed: Tensor  # (rows,): the sum left out is at most this, times 2^(−c·limit)
    items: int  # segments, with some room between those of different rows
    first: int
    rows: int
    segments: int  # of each row, where every block counts; 0 where there are lists


# ---------------------------------------------------------------- sorting


@triton.jit
def _turn(x, y, bit):
    """One step of the Hilbert transform (Skilling 2004) on the first coordinate and another one."""
    t = tl.where((y & bit) != 0, bit - 1, 0)
    swap = tl.where((y & bit) != 0, 0, (x ^ y) & (bit - 1))
    return x ^ t ^ swap, y ^ swap


@triton.jit
def _codes_kernel(points, low, high, codes, n, M: tl.constexpr, BITS: tl.constexpr, SIZE: tl.constexpr):
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
def _arrange_kernel(
    points, order, term, sorted_points, valid, boxes, terms, super_boxes, super_terms, n, padded, supers,
    M: tl.constexpr, TERM: tl.constexpr, BLOCK: tl.constexpr, SUPER: tl.constexpr,
):  # fmt: skip
    """Copy one superblock of points in order; boxes and largest terms of its blocks and its own."""
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
        tl.store(sorted_points + d * wide + slot, z)
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
def _columns_kernel(source, order, valid, target, n, width, padded, OTHER: tl.constexpr, SIZE: tl.constexpr):
    """`target[c, s] = source[order[s], c]`; OTHER in the padding and for points that are not finite."""
    slot = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    c = tl.program_id(1)
    live = tl.load(valid + slot, mask=slot < n, other=0) != 0
    row = tl.load(order + slot, mask=slot < n, other=0).to(tl.int64)
    z = tl.load(source + row * width + c, mask=live, other=OTHER)
    tl.store(target + c * tl.cast(padded, tl.int64) + slot, z, mask=slot < padded)


def _bits(dimension: int) -> int:
    return min(30, 63 // dimension)


def _codes(points: Tensor, low: Tensor, high: Tensor) -> Tensor:
    n, m = points.shape
    codes = torch.empty(n, dtype=torch.int64, device=points.device)
    _codes_kernel[(triton.cdiv(n, 256),)](points, low, high, codes, n, M=m, BITS=_bits(m), SIZE=256, num_warps=4)
    return codes


def _arranged(points: Tensor, codes: Tensor | None, term: Tensor | None) -> Points:
    """Sort points `(n, m)` by their codes; as they come without codes."""
    n, m = points.shape
    supers = triton.cdiv(n, SUPER * BLOCK)
    padded = supers * SUPER * BLOCK
    device, dtype = points.device, points.dtype
    if codes is None:
        codes = order = torch.arange(n, device=device)
    else:
        codes, order = torch.sort(codes, stable=True)
    space = torch.empty(m * padded + (2 * m + 1) * (supers * SUPER + supers), dtype=dtype, device=device)
    pieces = [m * padded, 2 * m * supers * SUPER, supers * SUPER, 2 * m * supers, supers]
    at, boxes, terms, super_boxes, super_terms = space.split(pieces)
    valid = torch.empty(padded, dtype=torch.int8, device=device)
    _arrange_kernel[(supers,)](
        points, order, points if term is None else term, at, valid, boxes, terms, super_boxes, super_terms, n, padded, supers,
        M=m, TERM=term is not None, BLOCK=BLOCK, SUPER=SUPER, num_warps=4,
    )  # fmt: skip
    boxes, super_boxes = boxes.view(2, m, -1), super_boxes.view(2, m, -1)
    return Points(n, order, codes, at.view(m, padded), valid, boxes, terms, super_boxes, super_terms)


def _columns(source: Tensor, points: Points, other: float = 0.0) -> Tensor:
    """`(count, …)` in the original order as `(columns, padded)` in the sorted one; `other` for points that are not finite."""
    flat = source.detach().reshape(points.count, -1).contiguous()
    padded, width = points.valid.shape[0], flat.shape[1]
    target = flat.new_empty(width, padded)
    grid = (triton.cdiv(padded, 512), width)
    _columns_kernel[grid](flat, points.order, points.valid, target, points.count, width, padded, OTHER=other, SIZE=512)
    return target


def build_index(keys: Tensor, powers: Tensor | None) -> DeviceIndex:
    """Sort keys `(N, m)`, `N ≥ 1`, with their powers `(N,)`, and measure their blocks."""
    keys = keys.detach().contiguous()
    m = keys.shape[1]
    low, high = torch.aminmax(keys, dim=0)
    term = None if powers is None else powers.detach().contiguous()
    points = _arranged(keys, _codes(keys, low, high) if m <= PRUNED else None, term)
    return DeviceIndex(points, low, high, None if term is None else _columns(term, points)[0])


# ---------------------------------------------------------------- which blocks count


@triton.jit
def _home_kernel(
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
        e = tl.zeros_like(q[0])
        for d in tl.static_range(M):
            z = q[d] - tl.load(keys + d * key_wide + at)
            e += z * z
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
    missed = tl.where(some & (keep == 0), weight * tl.exp2(c * (limit - e)), 0.0)
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
def _coarse_kernel(
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
def _fine_kernel(
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
        for s in range(0, _item_of(own + 1, end, SEGMENT) - item, SUPER * WIDE):
            tl.store(owners + item + s + lane, tl.where(s + lane < used, own, -1), mask=item + s + lane < _item_of(own + 1, end, SEGMENT))
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
        before = tl.load(found_missed + coarse) * tl.exp2(c * (row_term - tl.load(super_terms + own // SUPER + first // SUPER)))
        tl.store(missed + own, tl.sum(lost, 0) + tl.where(row_term > float("-inf"), before, 0.0))


def _lists(rows: Points, columns: Points, rate: Tensor, cut: float, chosen: range) -> Iterator[Lists]:
    """The lists for the blocks of rows numbered `chosen` (whole superblocks), in parts that fit in memory."""
    device, m = rows.sorted.device, rows.sorted.shape[0]
    dtype, count = rows.sorted.dtype, len(chosen)
    if m > PRUNED:
        flags = torch.full((count,), FLAG, dtype=torch.int64, device=device)
        yield from _dense(chosen, columns, flags, count)
        return
    supers, coarse = columns.super_terms.shape[0], triton.cdiv(count, SUPER)
    if coarse > 1 and coarse * supers > 2 * ENTRIES:
        for half in _halves(chosen):
            yield from _lists(rows, columns, rate, cut, half)
        return
    slack = 2 * (m + 6) * torch.finfo(dtype).eps
    found, found_counts = torch.empty(coarse * (supers + 1), dtype=torch.int32, device=device).split([coarse * supers, coarse])
    found_missed, missed = torch.empty(coarse + count, dtype=dtype, device=device).split([coarse, count])
    counts = torch.empty(count, dtype=torch.int64, device=device)
    _coarse_kernel[(coarse,)](
        rows.super_boxes, rows.super_terms, rows.super_terms.shape[0], columns.super_boxes, columns.super_terms, supers,
        chosen.start // SUPER, rate, cut, slack, found, found_counts, found_missed,
        M=m, POINTS=SUPER * BLOCK, SIZE=256, num_warps=4,
    )  # fmt: skip

    def fine(fill: bool, ends: Tensor, entries: Tensor, owners: Tensor) -> None:
        _fine_kernel[(count,)](
            rows.boxes, rows.terms, rows.super_terms, rows.terms.shape[0], columns.boxes, columns.terms,
            columns.terms.shape[0], chosen.start, rate, cut, slack, found, found_counts, found_missed, supers,
            counts, missed, ends, entries, owners,
            FILL=fill, M=m, BLOCK=BLOCK, SUPER=SUPER, WIDE=WIDE, SEGMENT=SEGMENT, GAP=GAP, FLAG=FLAG, num_warps=1,
        )  # fmt: skip

    fine(False, counts, counts, counts)
    ends = counts.cumsum(0)
    flagged, entries = divmod(int(ends[-1].item()), FLAG)
    if 2 * entries > count * columns.blocks:
        yield from _dense(chosen, columns, counts, flagged)
    elif entries > ENTRIES and coarse > 1:
        for half in _halves(chosen):
            yield from _lists(rows, columns, rate, cut, half)
    else:
        items = entries // SEGMENT + count
        listed, owners = torch.empty(entries + items, dtype=torch.int32, device=device).split([entries, items])
        fine(True, ends, listed, owners)
        yield Lists(listed, owners, ends, counts, counts, flagged, missed, items, chosen.start, count, 0)


def _dense(chosen: range, columns: Points, flags: Tensor, flagged: int) -> Iterator[Lists]:
    """All blocks of columns for every row."""
    segments = triton.cdiv(columns.blocks, SEGMENT)
    step, missed = max(1, ITEMS // segments), torch.zeros(min(len(chosen), max(1, ITEMS // segments)), device=flags.device)
    for begin in range(0, len(chosen), step):
        count = min(step, len(chosen) - begin)
        some = flags[begin : begin + count]
        yield Lists(flags, flags, flags, flags, some, flagged, missed, count * segments, chosen.start + begin, count, segments)


def _halves(chosen: range) -> tuple[range, range]:
    middle = chosen.start + triton.cdiv(len(chosen), 2 * SUPER) * SUPER
    return range(chosen.start, middle), range(middle, chosen.stop)


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
    e = z[0] * z[0]
    for d in tl.static_range(1, M):
        e += z[d] * z[d]
    return e


@triton.jit
def _far_squares(points, padded, at, cols, col_padded, col, M, ROWS: tl.constexpr, LANES: tl.constexpr):
    """The same for many dimensions, one after the other."""
    e = tl.zeros([ROWS, LANES], points.dtype.element_ty)
    for d in range(M):
        q = tl.load(points + d * tl.cast(padded, tl.int64) + at)
        z = q[:, None] - tl.load(cols + d * tl.cast(col_padded, tl.int64) + col)[None, :]
        e += z * z
    return e


@triton.jit
def _best_kernel(
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
def _settle_kernel(
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
def _sum_kernel(
    points, padded, energies, keys, key_padded, key_count, key_blocks, powers, values, slopes, outs, rate,
    entries, owners, ends, counts, segments, first, partial, items,
    M: tl.constexpr, POWERS: tl.constexpr, SLOPES: tl.constexpr, TILE: tl.constexpr, DENSE: tl.constexpr, FAR: tl.constexpr,
    BLOCK: tl.constexpr, ROWS: tl.constexpr, LANES: tl.constexpr, SEGMENT: tl.constexpr, FLAG: tl.constexpr,
):  # fmt: skip
    """`Σ 2^(c(x_ref − x))` and the same sum times the values, over one segment."""
    item = tl.program_id(0)
    inner = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    out = tl.program_id(2) * TILE
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
def _finish_kernel(
    partial, items, energies, terms, missed, valid, order, n, outs, rate, cut, ends, counts, segments, first, blocks,
    output, lse, dropped, depth, TILE: tl.constexpr, DENSE: tl.constexpr, BLOCK: tl.constexpr, LANES: tl.constexpr,
    SEGMENT: tl.constexpr, FLAG: tl.constexpr,
):  # fmt: skip
    """Add the segments of a block of queries in float64 and write its results where its queries came from."""
    row = tl.program_id(0)
    inner = tl.arange(0, BLOCK)
    out = tl.program_id(1) * TILE
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


def _rows_per_program(dimension: int, dtype: torch.dtype, columns: int) -> int:
    """How many rows a program holds in registers beside `columns` sums of each."""
    words = (min(dimension, PRUNED) + 2 * columns) * (1 if dtype == torch.float32 else 2)
    return 16 if words <= 10 else 8 if words <= 20 else 4 if words <= 40 else 2


def _rate_tensor(rate: Tensor | float, like: Tensor) -> Tensor:
    if isinstance(rate, Tensor):
        return rate.detach().to(like.device)
    return torch.full((), rate, dtype=torch.float64, device=like.device)


def sum_on_device(
    queries: Tensor, index: DeviceIndex, values: Tensor, slopes: Tensor | None, rate: Tensor | float, cut: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Softmax attention of queries over the keys of an index.

    Args:
        queries: `(Q, m)`.
        index: of the keys, `build_index`.
        values: `(N, out)`, in the keys' original order.
        slopes: `(N, out, m)`: the value of a key is `V_j + J_j (q − k_j)`.
        rate: the inverse temperature R, a number or a tensor without dimensions.
        cut: blocks of keys whose scores all lie further than this below a query's best one may be left out.

    Returns:
        The output `(Q, out)`; the logarithm of the sum of exponentials `(Q,)`; a bound `(Q,)` on the logarithm of the share
        of the softmax that was left out, `−inf` where nothing was; the largest number of additions `(Q,)` that a term of
        these sums passes through.
    """
    queries = queries.detach().contiguous()
    rate = _rate_tensor(rate, queries)
    columns = _columns(values, index.points)
    sloped = None if slopes is None else _columns(slopes, index.points)
    outs = columns.shape[0]
    count = len(queries)
    output, lse, dropped = queries.new_empty(count, outs), queries.new_empty(count), queries.new_empty(count)
    depth = torch.empty(count, dtype=torch.int32, device=queries.device)
    for begin in range(0, count, QUERIES):
        part = slice(begin, begin + QUERIES)
        _sum_chunk(queries[part], index, columns, sloped, rate, cut, (output[part], lse[part], dropped[part], depth[part]))
    return output, lse, dropped, depth


def _sum_chunk(
    queries: Tensor, index: DeviceIndex, values: Tensor, slopes: Tensor | None, rate: Tensor, cut: float,
    results: tuple[Tensor, Tensor, Tensor, Tensor],
) -> None:  # fmt: skip
    m, keys = queries.shape[1], index.points
    pruned = m <= PRUNED
    rows = _arranged(queries, _codes(queries, index.low, index.high) if pruned else None, None)
    energies = queries.new_empty(rows.valid.shape[0])
    powers = keys.sorted if index.powers is None else index.powers
    if pruned:
        _home_kernel[(rows.super_terms.shape[0],)](
            rows.sorted, rows.codes, rows.valid, rows.count, rows.valid.shape[0], keys.sorted, keys.codes, powers, keys.count,
            keys.valid.shape[0], energies, rows.terms, rows.super_terms, keys.count.bit_length(),
            M=m, POWERS=index.powers is not None, WINDOW=WINDOW, BLOCK=BLOCK, SUPER=SUPER, num_warps=4,
        )  # fmt: skip
    outs = values.shape[0]
    tile = 1 if outs == 1 else 2 if outs == 2 else 4
    tiles = triton.cdiv(outs, tile)
    per_program = min(BLOCK, _rows_per_program(m, queries.dtype, 1 + tile))
    parts = BLOCK // per_program
    points = rows.sorted, rows.valid.shape[0]
    columns = keys.sorted, keys.valid.shape[0], keys.count, keys.blocks, powers
    for some in _lists(rows, keys, rate, cut, range(rows.blocks)):
        items, lists = some.items, (some.entries, some.owners, some.ends, some.counts)
        shape: dict[str, Any] = {"BLOCK": BLOCK, "DENSE": some.segments > 0, "SEGMENT": SEGMENT, "FLAG": FLAG, "num_warps": 1}
        inner = shape | {"LANES": LANES, "ROWS": per_program, "M": m, "FAR": not pruned, "POWERS": index.powers is not None}
        if some.flagged and items:
            least = queries.new_empty(items, BLOCK)
            _best_kernel[(items, parts)](*points, *columns, *lists, some.flags, some.segments, some.first, least, **inner)
            _settle_kernel[(some.rows,)](
                least, energies, some.ends, some.counts, some.flags, some.segments, some.first, keys.blocks, **shape
            )
        partial = queries.new_empty(tiles, items, 1 + tile, BLOCK)
        if items:
            _sum_kernel[(items, parts, tiles)](
                *points, energies, *columns, values, values if slopes is None else slopes, outs, rate, *lists,
                some.segments, some.first, partial, items, TILE=tile, SLOPES=slopes is not None, **inner,
            )  # fmt: skip
        _finish_kernel[(some.rows, tiles)](
            partial, items, energies, rows.terms, some.missed, rows.valid, rows.order, rows.count, outs, rate, cut,
            some.ends, some.counts, some.segments, some.first, keys.blocks, *results, TILE=tile, LANES=LANES, **shape,
        )  # fmt: skip


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
def _gradient_kernel(
    points, padded, cols, col_padded, col_count, col_blocks, levels, upstream, query_padded, values, slopes, powers, key_padded,
    outs, rate, entries, owners, ends, counts, segments, first, partial, items,
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
    tile = tl.program_id(2)
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
        if DIMS > 0 and not JACOBIAN or LAST:
            if KEYS:
                share = -_side(upstream, outs, query_padded, at, col, False) + tl.zeros([ROWS, LANES], dtype)
            else:
                share = -own_delta + tl.zeros([ROWS, LANES], dtype)
            if OUT > 0:
                for o in tl.static_range(OUT):
                    share += own[o] * _side(upstream if KEYS else values, o, query_padded if KEYS else key_padded, at, col, False)
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
                        pull = w * _against(upstream, query_padded, slopes, key_padded, outs, axis, M, at, col, KEYS, ROWS, LANES)
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
    base = partial + (tile.to(tl.int64) * items + item) * (width * BLOCK) + inner
    for i in tl.static_range(DIMS):
        tl.store(base + i * BLOCK, tl.sum(near[i], 1))
    if LAST:
        tl.store(base + DIMS * BLOCK, tl.sum(last, 1))
    for o in tl.static_range(TILE):
        tl.store(base + (DIMS + LAST + o) * BLOCK, tl.sum(sums[o], 1))


@triton.jit
def _collect_kernel(
    partial, items, valid, order, n, outs, rate, ends, counts, segments, first, blocks, near, last, sums,
    M: tl.constexpr, DIMS: tl.constexpr, LAST: tl.constexpr, TILE: tl.constexpr, DIM_TILES: tl.constexpr, JACOBIAN: tl.constexpr,
    KEYS: tl.constexpr, DENSE: tl.constexpr, BLOCK: tl.constexpr, SEGMENT: tl.constexpr, FLAG: tl.constexpr,
):  # fmt: skip
    """Add the segments of a row in float64 and write the gradients where its points came from."""
    row = tl.program_id(0)
    tile = tl.program_id(1)
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
            total += tl.load(partial + (tile.to(tl.int64) * items + item + s) * (width * BLOCK) + i * BLOCK + inner)
        if i < DIMS:
            d = (tile % DIM_TILES) * DIMS + i
            place = target * M + d
            if JACOBIAN:
                place = (target * outs + tile // DIM_TILES) * M + d
            tl.store(near + place, tl.where(good, total, float("nan")), mask=live & (inner * 0 + d < M))
        elif i < DIMS + LAST:
            if tile == 0:
                if KEYS:
                    total = total * (tl.load(rate).to(tl.float64) * 0.5)
                tl.store(last + target, tl.where(good, total, 0.0), mask=live)
        else:
            o = tile * TILE + i - DIMS - LAST
            tl.store(sums + target * outs + o, total, mask=live & (inner * 0 + o < outs))


class _Pass(NamedTuple):
    """What one launch of the gradient kernel sums."""

    dims: int = 0
    last: int = 0
    tile: int = 0
    jacobian: bool = False


def gradients_on_device(
    grad_output: Tensor,
    grad_lse: Tensor | None,
    queries: Tensor,
    index: DeviceIndex,
    values: Tensor,
    slopes: Tensor | None,
    rate: Tensor | float,
    cut: float,
    output: Tensor,
    lse: Tensor,
    needs: Sequence[bool],
) -> list[Tensor | None]:
    """Gradients of `sum_on_device`.

    Args:
        grad_output: `(Q, out)`, upstream.
        grad_lse: `(Q,)`, upstream, or None for zero.
        queries, index, values, slopes, rate: as in the forward pass.
        cut: blocks of keys with scores further than this below the logarithm of the sum may be left out.
        output: `(Q, out)`, of the forward pass.
        lse: `(Q,)`, of the forward pass.
        needs: which of queries, keys, values, powers, slopes and rate.

    Returns:
        Six gradients in the original order, None for what is not needed.
    """
    wants_queries, wants_keys, wants_values, wants_powers, wants_slopes, wants_rate = needs
    queries, index_points = queries.detach().contiguous(), index.points
    rate = _rate_tensor(rate, queries)
    columns = _columns(values, index_points)
    sloped = columns if slopes is None else _columns(slopes, index_points)
    (count, m), outs = queries.shape, columns.shape[0]
    keys = index_points.count
    grad_queries = torch.empty_like(queries) if wants_queries else None
    by_rate = torch.zeros(count, dtype=torch.float64, device=queries.device) if wants_rate else None
    on_keys = [
        queries.new_zeros(keys, m) if wants_keys else None,
        queries.new_zeros(keys, outs) if wants_values else None,
        queries.new_zeros(keys, outs, m) if wants_slopes else None,
        queries.new_zeros(keys) if wants_powers else None,
    ]
    delta = (grad_output.detach() * output.detach()).sum(1, keepdim=True)
    if grad_lse is not None:
        delta = delta - grad_lse.detach()[:, None]
    beside = torch.cat([grad_output.detach(), delta.to(queries.dtype)], 1)
    energies = (lse.detach().double() * (-2 / rate.double())).to(queries.dtype)
    tables = _Tables(index, columns, sloped, slopes is not None, rate, cut)
    for begin in range(0, count, QUERIES):
        part = slice(begin, begin + QUERIES)
        some = queries[part]
        rows = _arranged(some, _codes(some, index.low, index.high) if m <= PRUNED else None, energies[part])
        levels = _columns(energies[part], rows, -math.inf)[0]
        upstream = _columns(beside[part], rows, 0.0)
        if wants_queries or wants_rate:
            near = None if grad_queries is None else grad_queries[part]
            last = None if by_rate is None else by_rate[part]
            tables.add_gradients(rows, levels, upstream, False, near, last, None, None)
        if any(g is not None for g in on_keys):
            alone = begin == 0 and count <= QUERIES
            parts = on_keys if alone else [None if g is None else torch.empty_like(g) for g in on_keys]
            tables.add_gradients(rows, levels, upstream, True, parts[0], parts[3], parts[1], parts[2])
            if not alone:
                for total, one in zip(on_keys, parts):
                    if total is not None and one is not None:
                        total += one
    grad_rate = None if by_rate is None else -0.5 * by_rate.sum()
    return [grad_queries, on_keys[0], on_keys[1], on_keys[3], on_keys[2], grad_rate]


class _Tables(NamedTuple):
    """What stays the same over the chunks of queries."""

    index: DeviceIndex
    values: Tensor
    slopes: Tensor
    sloped: bool
    rate: Tensor
    cut: float

    def add_gradients(
        self, queries: Points, levels: Tensor, upstream: Tensor, of_keys: bool,
        near: Tensor | None, last: Tensor | None, sums: Tensor | None, jacobians: Tensor | None,
    ) -> None:  # fmt: skip
        """Fill the gradients of the queries' points, or of the keys' points, powers (`last`), values and slopes."""
        keys, m, outs = self.index.points, self.index.dimension, self.values.shape[0]
        rows, columns = (keys, queries) if of_keys else (queries, keys)
        far, few = m > PRUNED, outs <= 4
        dims = 4 if far else m
        tile = min(4, triton.next_power_of_2(outs))
        passes = []
        if near is not None or last is not None:
            together = sums is not None and few and not far
            passes.append(_Pass(dims if near is not None else 0, int(last is not None), tile if together else 0))
            if sums is not None and not together:
                passes.append(_Pass(tile=tile))
        elif sums is not None:
            passes.append(_Pass(tile=tile))
        if jacobians is not None:
            passes.append(_Pass(dims, jacobian=True))
        dtype, nothing = self.values.dtype, self.values
        powers = nothing if self.index.powers is None else self.index.powers
        for some in _lists(rows, columns, self.rate, self.cut, range(rows.blocks)):
            for one in passes:
                width = one.dims + one.last + one.tile
                dim_tiles = triton.cdiv(m, one.dims) if one.dims else 1
                tiles = triton.cdiv(outs, one.tile) if one.tile else dim_tiles * (outs if one.jacobian else 1)
                words = (min(m, PRUNED) + 2 + (outs if few else 0) + 2 * width) * (1 if dtype == torch.float32 else 2)
                per_program = min(BLOCK, 16 if words <= 10 else 8 if words <= 22 else 4 if words <= 44 else 2)
                partial = levels.new_empty(tiles, some.items, width, BLOCK)
                lists = some.ends, some.counts, some.segments, some.first
                shape: dict[str, Any] = {
                    "M": m, "DIMS": one.dims, "LAST": one.last, "TILE": one.tile, "DIM_TILES": dim_tiles,
                    "JACOBIAN": one.jacobian, "KEYS": of_keys, "DENSE": some.segments > 0, "BLOCK": BLOCK,
                    "SEGMENT": SEGMENT, "FLAG": FLAG, "num_warps": 1,
                }  # fmt: skip
                if some.items:
                    _gradient_kernel[(some.items, BLOCK // per_program, tiles)](
                        rows.sorted, rows.valid.shape[0], columns.sorted, columns.valid.shape[0], columns.count, columns.blocks,
                        levels, upstream, queries.valid.shape[0], self.values, self.slopes, powers, keys.valid.shape[0],
                        outs, self.rate, some.entries, some.owners, *lists, partial, some.items,
                        OUT=outs if few else 0, SLOPES=self.sloped, POWERS=self.index.powers is not None, FAR=far,
                        ROWS=per_program, LANES=LANES, **shape,
                    )  # fmt: skip
                _collect_kernel[(some.rows, tiles)](
                    partial, some.items, rows.valid, rows.order, rows.count, outs, self.rate, *lists, columns.blocks,
                    jacobians if one.jacobian else nothing if near is None else near, nothing if last is None else last,
                    nothing if sums is None else sums, **shape,
                )  # fmt: skip
