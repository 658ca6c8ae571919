"""Softmax attention over scattered points on a GPU, in Triton.

Points are sorted along a Hilbert curve and cut into blocks of `BLOCK` neighbours with their bounding boxes; 32 blocks make a
superblock. Each block of queries gets the list of key blocks whose boxes can hold a score within `cut` of the worst of the best
scores in it: first the superblocks, then their blocks. One warp sums the list: each lane holds one key, the block's queries lie
in registers, and nothing is exchanged between lanes until the list ends. Long lists are cut into segments, which other warps sum.
The order of summation depends on the data alone, so that equal calls give equal bits; there are no atomics.

Arithmetic. With the energy `x_ij = |q_i − k_j|² − p_j`, from differences taken first, the weights are `2^(c·(x_ref − x_ij))`
with `c = R·log₂e/2`, rounded once, and `x_ref` the energy of one key of the list: an error of `x_ref` cancels. Squares are added by
fused multiply-adds in one order everywhere, so that the weight of the reference is exactly 1. A score is off by at most
`(m + 6)·u·R·(|q − k|² + |p|)/2`: m + 2 roundings of differences, squares and their sum, one of the power, one of the difference to
the reference, one of c, one of the product (u the unit roundoff). The exponential is `ex2.approx.ftz` in float32, off by 2.4 u on
an H200, with results below 2^-126 flushed to zero; in float64 it is libdevice's `exp2`, 1 ulp. Weights stay below 2^60, so that
a flushed weight is far below the rounding of the sum. A sum adds at most `SEGMENT·BLOCK/LANES` terms in a lane and the lanes as a
tree, in the dtype; segments are added in float64. There are no matrix products, hence no TF32. Gradients take the weights from the
stored logarithm of the sum, rounded to the dtype: they are off by a factor `1 ± u·|lse|` more, and are computed in float64 where
that matters (`LARGEST_LSE`).

Queries that are not finite get NaN and touch no other query; they add nothing to the gradients of keys and values. Keys and
powers must be finite.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, ParamSpec, TypeVar

import torch
import triton
from torch import Tensor

from partita.kernels import scattered_triton_programs as programs

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
_AXIS = 65_535  # programs along the second and third axis of a launch
FLAG = 1 << 40  # more than there are entries
LARGEST_LSE = 1e5  # of a float32 gradient: weights from larger ones would be off by more than a hundredth
GAP = 60.0  # binary orders that the reference may lie below the best score

_P = ParamSpec("_P")
_T = TypeVar("_T")


class Points(NamedTuple):
    """Points in blocks: sorted, one row per coordinate, padded to whole superblocks."""

    size: int
    order: Tensor  # (size,) int64: the sorted points' numbers
    codes: Tensor  # (size,) int64, sorted
    sorted: Tensor  # (m, padded); queries that are not finite are 0
    valid: Tensor  # (padded,) int8: finite, and no padding
    boxes: Tensor  # (2, m, blocks): lower and upper corners
    terms: Tensor  # (blocks,): the largest term of the block's points
    super_boxes: Tensor  # (2, m, superblocks)
    super_terms: Tensor  # (superblocks,)

    @property
    def blocks(self) -> int:
        return -(-self.size // BLOCK)


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


def _on_own_device(function: Callable[_P, _T]) -> Callable[_P, _T]:
    """Launch on the device of the first argument, whichever is current."""

    @functools.wraps(function)
    def wrapped(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        with torch.cuda.device_of(args[0]):
            return function(*args, **kwargs)

    return wrapped


def _bits(dimension: int) -> int:
    return min(30, 63 // dimension)


def _codes(points: Tensor, low: Tensor, high: Tensor) -> Tensor:
    n, m = points.shape
    codes = torch.empty(n, dtype=torch.int64, device=points.device)
    programs.codes_kernel[(triton.cdiv(n, 256),)](
        points, low, high, codes, n, M=m, BITS=_bits(m), SIZE=256, num_warps=4
    )
    return codes


def _arranged(points: Tensor, codes: Tensor | None, term: Tensor | None, clean: bool = True) -> Points:
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
    programs.arrange_kernel[(supers,)](
        points, order, points if term is None else term, at, valid, boxes, terms, super_boxes, super_terms, n, padded, supers,
        M=m, CLEAN=clean, TERM=term is not None, BLOCK=BLOCK, SUPER=SUPER, num_warps=4,
    )  # fmt: skip
    boxes, super_boxes = boxes.view(2, m, -1), super_boxes.view(2, m, -1)
    return Points(n, order, codes, at.view(m, padded), valid, boxes, terms, super_boxes, super_terms)


def _columns(source: Tensor, points: Points, other: float = 0.0) -> Tensor:
    """`(size, …)` in the original order as `(columns, padded)` in the sorted one; `other` for points that are not finite."""
    flat = source.detach().reshape(points.size, -1).contiguous()
    padded, width = points.valid.shape[0], flat.shape[1]
    target = flat.new_empty(width, padded)
    grid = (triton.cdiv(padded, 512) * width,)
    programs.columns_kernel[grid](
        flat, points.order, points.valid, target, points.size, width, padded, OTHER=other, SIZE=512
    )
    return target


@_on_own_device
def build_index(keys: Tensor, powers: Tensor | None) -> DeviceIndex:
    """Sort keys `(N, m)`, `N ≥ 1`, with their powers `(N,)`, and measure their blocks."""
    keys = keys.detach().contiguous()
    m = keys.shape[1]
    low, high = torch.aminmax(keys, dim=0)
    term = None if powers is None else powers.detach().contiguous()
    points = _arranged(keys, _codes(keys, low, high) if m <= PRUNED else None, term, clean=False)
    return DeviceIndex(points, low, high, None if term is None else _columns(term, points)[0])


# ---------------------------------------------------------------- which blocks count


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
    found, found_counts = torch.empty(coarse * (supers + 1), dtype=torch.int32, device=device).split(
        [coarse * supers, coarse]
    )
    found_missed, missed = torch.empty(coarse + count, dtype=dtype, device=device).split([coarse, count])
    counts = torch.empty(count, dtype=torch.int64, device=device)
    programs.coarse_kernel[(coarse,)](
        rows.super_boxes, rows.super_terms, rows.super_terms.shape[0], columns.super_boxes, columns.super_terms, supers,
        chosen.start // SUPER, rate, cut, slack, found, found_counts, found_missed,
        M=m, POINTS=SUPER * BLOCK, SIZE=256, num_warps=4,
    )  # fmt: skip

    def fine(fill: bool, ends: Tensor, entries: Tensor, owners: Tensor) -> None:
        programs.fine_kernel[(count,)](
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
    step = max(1, ITEMS // segments)
    for begin in range(0, len(chosen), step):
        count = min(step, len(chosen) - begin)
        some, nothing = flags[begin : begin + count], flags  # there are no lists
        yield Lists(
            nothing, nothing, nothing, nothing, some, flagged, nothing, count * segments, chosen.start + begin, count, segments
        )  # fmt: skip


def _halves(chosen: range) -> tuple[range, range]:
    middle = chosen.start + triton.cdiv(len(chosen), 2 * SUPER) * SUPER
    return range(chosen.start, middle), range(middle, chosen.stop)


# ---------------------------------------------------------------- the sum


def _rows_per_program(dimension: int, dtype: torch.dtype, columns: int) -> int:
    """How many rows a program holds in registers beside `columns` sums of each."""
    words = (min(dimension, PRUNED) + 2 * columns) * (1 if dtype == torch.float32 else 2)
    return 16 if words <= 10 else 8 if words <= 20 else 4 if words <= 40 else 2


def _gradient_rows(numbers: int, dtype: torch.dtype) -> int:
    """The same for gradients, which hold so many numbers of each row."""
    words = numbers * (1 if dtype == torch.float32 else 2)
    return 16 if words <= 10 else 8 if words <= 22 else 4 if words <= 44 else 2


def _groups(tiles: int, items: int) -> Iterator[range]:
    """Tiles of outputs whose sums over all segments are held at once."""
    step = min(tiles, _AXIS, max(1, 2 * ITEMS // max(items, 1)))
    return (range(begin, min(begin + step, tiles)) for begin in range(0, tiles, step))


def _rate_tensor(rate: Tensor | float, like: Tensor) -> Tensor:
    if isinstance(rate, Tensor):
        return rate.detach().to(like.device)
    return torch.full((), rate, dtype=torch.float64, device=like.device)


@_on_own_device
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
    depth = queries.new_empty(count)
    for begin in range(0, count, QUERIES):
        part = slice(begin, begin + QUERIES)
        _sum_chunk(
            queries[part], index, columns, sloped, rate, cut, (output[part], lse[part], dropped[part], depth[part])
        )
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
        programs.home_kernel[(rows.super_terms.shape[0],)](
            rows.sorted, rows.codes, rows.valid, rows.size, rows.valid.shape[0], keys.sorted, keys.codes, powers, keys.size,
            keys.valid.shape[0], energies, rows.terms, rows.super_terms, keys.size.bit_length(),
            M=m, POWERS=index.powers is not None, WINDOW=WINDOW, BLOCK=BLOCK, SUPER=SUPER, num_warps=4,
        )  # fmt: skip
    outs = values.shape[0]
    tile = 1 if outs == 1 else 2 if outs == 2 else 4
    per_program = min(BLOCK, _rows_per_program(m, queries.dtype, 1 + tile))
    parts = BLOCK // per_program
    points = rows.sorted, rows.valid.shape[0]
    columns = keys.sorted, keys.valid.shape[0], keys.size, keys.blocks, powers
    for some in _lists(rows, keys, rate, cut, range(rows.blocks)):
        items, lists = some.items, (some.entries, some.owners, some.ends, some.counts)
        shape: dict[str, Any] = {
            "BLOCK": BLOCK,
            "DENSE": some.segments > 0,
            "SEGMENT": SEGMENT,
            "FLAG": FLAG,
            "num_warps": 1,
        }
        inner = shape | {
            "LANES": LANES,
            "ROWS": per_program,
            "M": m,
            "FAR": not pruned,
            "POWERS": index.powers is not None,
        }
        if some.flagged and items:
            least = queries.new_empty(items, BLOCK)
            programs.best_kernel[(items, parts)](
                *points, *columns, *lists, some.flags, some.segments, some.first, least, **inner
            )
            programs.settle_kernel[(some.rows,)](
                least, energies, some.ends, some.counts, some.flags, some.segments, some.first, keys.blocks, **shape
            )
        for group in _groups(triton.cdiv(outs, tile), items):
            partial = queries.new_empty(len(group), items, 1 + tile, BLOCK)
            if items:
                programs.sum_kernel[(items, parts, len(group))](
                    *points, energies, *columns, values, values if slopes is None else slopes, outs, rate, *lists,
                    some.segments, some.first, partial, items, group.start,
                    TILE=tile, SLOPES=slopes is not None, **inner,
                )  # fmt: skip
            programs.finish_kernel[(some.rows, len(group))](
                partial, items, energies, rows.terms, some.missed, rows.valid, rows.order, rows.size, outs, rate, cut,
                some.ends, some.counts, some.segments, some.first, keys.blocks, group.start, *results,
                TILE=tile, LANES=LANES, **shape,
            )  # fmt: skip


# ---------------------------------------------------------------- gradients


class _Pass(NamedTuple):
    """What one launch of the gradient kernel sums."""

    dims: int = 0
    last: int = 0
    tile: int = 0
    jacobian: bool = False


@_on_own_device
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
    if lse.dtype == torch.float32 and len(lse) and float(lse.detach().nan_to_num().abs().max()) > LARGEST_LSE:
        return _gradients_in_double(grad_output, grad_lse, queries, index, values, slopes, rate, cut, needs)
    wants_queries, wants_keys, wants_values, wants_powers, wants_slopes, wants_rate = needs
    queries, index_points = queries.detach().contiguous(), index.points
    rate = _rate_tensor(rate, queries)
    columns = _columns(values, index_points)
    sloped = columns if slopes is None else _columns(slopes, index_points)
    (count, m), outs = queries.shape, columns.shape[0]
    keys = index_points.size
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
    given = _Given(index, columns, sloped, slopes is not None, rate, cut)
    for begin in range(0, count, QUERIES):
        part = slice(begin, begin + QUERIES)
        some = queries[part]
        rows = _arranged(some, _codes(some, index.low, index.high) if m <= PRUNED else None, energies[part])
        levels = _columns(energies[part], rows, -math.inf)[0]
        upstream = _columns(beside[part], rows, 0.0)
        if wants_queries or wants_rate:
            near = None if grad_queries is None else grad_queries[part]
            last = None if by_rate is None else by_rate[part]
            _add_gradients(given, rows, levels, upstream, False, near, last, None, None)
        if any(g is not None for g in on_keys):
            alone = begin == 0 and count <= QUERIES
            parts = on_keys if alone else [None if g is None else torch.empty_like(g) for g in on_keys]
            _add_gradients(given, rows, levels, upstream, True, parts[0], parts[3], parts[1], parts[2])
            if not alone:
                for total, one in zip(on_keys, parts):
                    if total is not None and one is not None:
                        total += one
    grad_rate = None if by_rate is None else (-0.5 * by_rate.sum()).to(queries.dtype)
    return [grad_queries, on_keys[0], on_keys[1], on_keys[3], on_keys[2], grad_rate]


def _gradients_in_double(
    grad_output: Tensor, grad_lse: Tensor | None, queries: Tensor, index: DeviceIndex, values: Tensor, slopes: Tensor | None,
    rate: Tensor | float, cut: float, needs: Sequence[bool],
) -> list[Tensor | None]:  # fmt: skip
    """The same in float64, from a forward pass of its own."""
    points = index.points
    keys = torch.empty(points.size, index.dimension, dtype=torch.float64, device=queries.device)
    keys[points.order] = points.sorted[:, : points.size].T.double()
    powers = None
    if index.powers is not None:
        powers = torch.empty_like(keys[:, 0])
        powers[points.order] = index.powers[: points.size].double()
    grad, at, given = grad_output.detach().double(), queries.detach().double(), values.detach().double()
    slanted = None if slopes is None else slopes.detach().double()
    prepared = build_index(keys, powers)
    output, lse, *_ = sum_on_device(at, prepared, given, slanted, rate, cut)
    beside = None if grad_lse is None else grad_lse.detach().double()
    found = gradients_on_device(grad, beside, at, prepared, given, slanted, rate, cut, output, lse, needs)
    return [None if g is None else g.to(queries.dtype) for g in found]


class _Given(NamedTuple):
    """What stays the same over the chunks of queries."""

    prepared: DeviceIndex
    values: Tensor
    slopes: Tensor
    sloped: bool
    rate: Tensor
    cut: float


def _add_gradients(
    given: _Given, queries: Points, levels: Tensor, upstream: Tensor, of_keys: bool,
    near: Tensor | None, last: Tensor | None, sums: Tensor | None, jacobians: Tensor | None,
) -> None:  # fmt: skip
    """Fill the gradients of the queries' points, or of the keys' points, powers (`last`), values and slopes."""
    keys, m, outs = given.prepared.points, given.prepared.dimension, given.values.shape[0]
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
    dtype, nothing = given.values.dtype, given.values
    powers = nothing if given.prepared.powers is None else given.prepared.powers
    for some in _lists(rows, columns, given.rate, given.cut, range(rows.blocks)):
        for one in passes:
            width = one.dims + one.last + one.tile
            dim_tiles = triton.cdiv(m, one.dims) if one.dims else 1
            tiles = triton.cdiv(outs, one.tile) if one.tile else dim_tiles * (outs if one.jacobian else 1)
            per_program = _gradient_rows(min(m, PRUNED) + 2 + (outs if few else 0) + 2 * width, dtype)
            lists = some.ends, some.counts, some.segments, some.first
            shape: dict[str, Any] = {
                "M": m, "DIMS": one.dims, "LAST": one.last, "TILE": one.tile, "DIM_TILES": dim_tiles,
                "JACOBIAN": one.jacobian, "KEYS": of_keys, "DENSE": some.segments > 0, "BLOCK": BLOCK,
                "SEGMENT": SEGMENT, "FLAG": FLAG, "num_warps": 1,
            }  # fmt: skip
            for group in _groups(tiles, some.items):
                partial = levels.new_empty(len(group), some.items, width, BLOCK)
                if some.items:
                    programs.gradient_kernel[(some.items, BLOCK // per_program, len(group))](
                        rows.sorted, rows.valid.shape[0], columns.sorted, columns.valid.shape[0], columns.size,
                        columns.blocks, levels, upstream, queries.valid.shape[0], given.values, given.slopes, powers,
                        keys.valid.shape[0], outs, given.rate, some.entries, some.owners, *lists, partial, some.items,
                        group.start, OUT=outs if few else 0, SLOPES=given.sloped, POWERS=given.prepared.powers is not None,
                        FAR=far, ROWS=per_program, LANES=LANES, **shape,
                    )  # fmt: skip
                programs.collect_kernel[(some.rows, len(group))](
                    partial, some.items, rows.valid, rows.order, rows.size, outs, given.rate, *lists, columns.blocks,
                    group.start, jacobians if one.jacobian else nothing if near is None else near,
                    nothing if last is None else last, nothing if sums is None else sums, **shape,
                )  # fmt: skip
