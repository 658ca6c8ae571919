"""The sums over scattered keys as plain torch operations: the reference, and the way where there is no native kernel."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from partita.kernels.trace_modes import is_exporting

__all__ = ["Nodes", "Sums", "gradients", "sum_all", "sum_listed", "sum_near"]

_AT_ONCE = 1 << 22  # numbers held by one step
_AT_ONCE_ON_DEVICES = 1 << 27  # accelerators wait for work more than for memory
# outputs (n, out); log-sum-exp, the log of the share left out, at most, and the additions a weight passes through, (n,)
Sums = tuple[Tensor, Tensor, Tensor, Tensor]


def _step(device: torch.device, per_query: int) -> int:
    return max(1, (_AT_ONCE if device.type == "cpu" else _AT_ONCE_ON_DEVICES) // max(per_query, 1))


def sum_listed(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    powers: Tensor | None,
    slopes: Tensor | None,
    rate: Tensor,
    cells: Tensor,
) -> tuple[Tensor, Tensor]:
    """`Σ_j softmax_j(−R(|q − k_j|² − p_j)/2)·(V_j + J_j(q − k_j))` over listed keys, and the log of the sum of exponentials.

    Args:
        queries: `(n, m)`. keys: `(N, m)`. values: `(N, out)`. powers: `(N,)`. slopes: `(N, out, m)`. rate: R, no dimensions.
        cells: key numbers, `(n, k)` or `(1, k)` for all queries; −1 for none.
    """
    own_powers, own_slopes = (None if t is None else t[cells] for t in (powers, slopes))
    return _sum_given(queries, keys[cells], values[cells], own_powers, own_slopes, rate, cells < 0)


def _sum_given(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    powers: Tensor | None,
    slopes: Tensor | None,
    rate: Tensor,
    absent: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """The same over keys `(n or 1, k, m)` with values, powers and slopes of their own; `absent` ones have no weight."""
    difference = queries[:, None, :] - keys
    scores = -(difference * difference).sum(dim=2)
    if powers is not None:
        scores = scores + powers
    scores = 0.5 * rate * scores
    if absent is not None:
        scores = scores.masked_fill(absent, -math.inf)
    weights, lse = torch.softmax(scores, dim=1), torch.logsumexp(scores, dim=1)
    if slopes is None and is_exporting() and values.shape[0] == 1:
        return weights @ values[0], lse  # without a table of queries × keys × outputs
    held = values if slopes is None else values + (slopes * difference[:, :, None, :]).sum(dim=3)
    return (weights[:, :, None] * held).sum(dim=1), lse


def sum_all(
    queries: Tensor, keys: Tensor, values: Tensor, powers: Tensor | None, slopes: Tensor | None, rate: Tensor
) -> tuple[Tensor, Tensor]:
    """The same over all keys: one softmax, nothing left out."""
    own_powers, own_slopes = (None if t is None else t[None] for t in (powers, slopes))
    tables = keys[None], values[None], own_powers, own_slopes, rate, None
    if torch.compiler.is_compiling():
        return _sum_given(queries, *tables)
    step = _step(queries.device, len(keys) * (keys.shape[1] + values.shape[1]))
    parts = [_sum_given(some, *tables) for some in (torch.split(queries, step) if len(queries) else [queries])]
    return torch.cat([out for out, _ in parts]), torch.cat([lse for _, lse in parts])


class Nodes(NamedTuple):
    """Boxes of keys: order `(nodes, size)`, the keys of each node, −1 for none; lo, hi `(m, nodes)`; top, the largest powers."""

    order: Tensor
    lo: Tensor
    hi: Tensor
    top: Tensor


def _near_nodes(
    queries: Tensor, keys: Tensor, powers: Tensor | None, boxes: Nodes, reach: float
) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """The keys that may matter, for some queries after the other: rows, key numbers `(rows, k)`, keys left out `(rows,)`.

    Args:
        queries: `(n, m)`, without NaN. keys: `(N, m)`. powers: `(N,)`.
        boxes: of the keys, in float64.
        reach: nodes whose bound of `|q − k|² − p` exceeds the least by more are left out.
    """
    order, lo, hi, top = boxes
    nodes, m = len(top), len(lo)
    rows = _step(queries.device, nodes * (m + 1))
    for begin in range(0, len(queries), rows):
        q = queries[begin : begin + rows].detach().double()
        gaps = torch.maximum(lo - q[:, :, None], q[:, :, None] - hi).clamp(min=0)
        bounds = gaps.square().sum(dim=1) - top
        first = order[bounds.argmin(dim=1)]
        difference = q[:, None, :] - keys.detach().double()[first]
        least = difference.square().sum(dim=2)
        if powers is not None:
            least = least - powers.detach().double()[first]
        least = least.masked_fill(first < 0, math.inf).amin(dim=1)
        rounded = 2.0**-48 * (least.abs() + reach + top.abs().max())  # of a bound, at most
        matter = (bounds <= (least + reach + rounded)[:, None]).sum(dim=1)
        chosen = torch.topk(bounds, int(matter.max()), dim=1, largest=False).indices
        cells = order[chosen].flatten(1)
        yield slice(begin, begin + len(q)), cells, len(keys) - (cells >= 0).sum(dim=1)


def _lists(
    queries: Tensor,
    keys: Tensor,
    powers: Tensor | None,
    rate: Tensor,
    outputs: int,
    nodes: Nodes | None,
    cut: float,
) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """Rows, key numbers and keys left out, in steps that fit into memory; all keys for all queries without nodes."""
    width = keys.shape[1] + outputs
    if nodes is None:
        everything, none = torch.arange(len(keys), device=queries.device)[None], torch.zeros(1, device=queries.device)
        step = _step(queries.device, len(keys) * width)
        for first in range(0, len(queries), step):
            yield slice(first, first + step), everything, none
        return
    plain = torch.nan_to_num(queries.detach())  # NaN looks anywhere, and stays NaN
    for rows, cells, left in _near_nodes(plain, keys, powers, nodes, 2 * cut / float(rate.detach())):
        step = _step(queries.device, cells.shape[1] * width)
        for first in range(0, len(cells), step):
            end = min(first + step, len(cells))
            yield slice(rows.start + first, rows.start + end), cells[first:end], left[first:end]


def sum_near(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    powers: Tensor | None,
    slopes: Tensor | None,
    rate: Tensor,
    nodes: Nodes,
    cut: float,
) -> Sums:
    """The same over the keys that may matter; those whose score trails the best by more than `cut` may be left out."""
    if not len(queries):
        none = queries.new_empty(0)
        return queries.new_empty(0, values.shape[1]), none, none, none
    parts = []
    for rows, cells, left in _lists(queries, keys, powers, rate, values.shape[1], nodes, cut):
        out, lse = sum_listed(queries[rows], keys, values, powers, slopes, rate, cells)
        dropped = torch.log(left.to(lse.dtype)) - cut  # no score left out exceeds the best less the cut
        parts.append((out, lse, dropped, torch.full_like(lse, cells.shape[1])))
    out, lse, dropped, depth = (torch.cat(some) for some in zip(*parts))
    return out, lse, dropped, depth


def gradients(
    grad: Tensor,
    grad_lse: Tensor,
    queries: Tensor,
    tensors: tuple[Tensor, Tensor, Tensor | None, Tensor | None, Tensor],
    output: Tensor,
    lse: Tensor,
    nodes: Nodes | None,
    cut: float,
) -> list[Tensor | None]:
    """Gradients in queries, keys, values, powers, slopes and R: the formulas of `scattered_loops.scattered_gradients`."""
    keys, values, powers, slopes, rate = tensors
    made = [None if t is None else torch.zeros_like(t) for t in (queries, *tensors)]
    in_queries, in_keys, in_values, in_powers, in_slopes, in_rate = made
    assert in_queries is not None and in_keys is not None and in_values is not None and in_rate is not None
    for rows, cells, _ in _lists(queries, keys, powers, rate, values.shape[1], nodes, cut):
        g, q = grad[rows], queries[rows]
        cells = cells.expand(len(q), -1)
        flat, absent = cells.clamp(min=0).flatten(), cells < 0
        difference = q[:, None, :] - keys[cells]
        square = (difference * difference).sum(dim=2) - (0 if powers is None else powers[cells])
        weights = torch.exp(-0.5 * rate * square - lse[rows, None]).masked_fill(absent, 0)
        pulls = (values[cells] * g[:, None, :]).sum(dim=2) + (grad_lse[rows] - (g * output[rows]).sum(dim=1))[:, None]
        tilts = None
        if slopes is not None and in_slopes is not None:
            tilts = (slopes[cells] * g[:, None, :, None]).sum(dim=2)
            pulls = pulls + (tilts * difference).sum(dim=2)
            along = (weights[:, :, None] * difference)[:, :, None, :] * g[:, None, :, None]
            in_slopes.index_add_(0, flat, along.flatten(0, 1))
        pulls = pulls * weights
        moved = rate * pulls[:, :, None] * difference
        if tilts is not None:
            moved = moved - weights[:, :, None] * tilts
        in_queries[rows] = -moved.sum(dim=1)
        in_keys.index_add_(0, flat, moved.flatten(0, 1))
        in_values.index_add_(0, flat, (weights[:, :, None] * g[:, None, :]).flatten(0, 1))
        if in_powers is not None:
            in_powers.index_add_(0, flat, (rate / 2 * pulls).flatten())
        in_rate -= (pulls * square).sum() / 2
    return made
