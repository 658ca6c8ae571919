"""Keys on the CPU, sorted for the native loops: leaves of a k-d tree with their boxes."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from partita.kernels import native

__all__ = ["LEAF", "KeyTree"]

LEAF = 8  # keys in a leaf, and nodes in a node
Array = NDArray[np.float64]
Integers = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class KeyTree:
    """Keys and powers in leaves of eight, nodes of eight leaves, and so on, each with its box and its largest power.

    Attributes:
        order: `(N,)`, the key at each place.
        keys: `(leaves + 1, m, LEAF)`. powers: `(leaves + 1, LEAF)`, −inf for places without a key: the last leaf has none.
        lo, hi: boxes, `(m, nodes)`, level after level from the leaves up. top: the largest power of each node.
        levels: where each level starts, and the end. The last level has at most eight nodes.
        cuts, cut_axes, cut_places, children: the planes between the leaves (`scattered_loops.order_by_cells`); none without numba.
    """

    order: Integers
    keys: Array
    powers: Array
    lo: Array
    hi: Array
    top: Array
    levels: Integers
    cuts: int
    cut_axes: Integers
    cut_places: Array
    children: Integers

    @classmethod
    def of(cls, keys: Array, powers: Array | None) -> KeyTree:
        """Sort keys `(N, m)`, N ≥ 1, all finite."""
        count, m = keys.shape
        leaves = -(-count // LEAF)
        order, cuts, axes, cut_places, children = _sorted(np.ascontiguousarray(keys), leaves)
        places = (leaves + 1) * LEAF
        filled = np.concatenate([order, np.repeat(order[-1:], places - count)])
        placed = np.zeros(count) if powers is None else powers[order]
        bias = np.concatenate([placed, np.full(places - count, -np.inf)]).reshape(-1, LEAF)
        table = np.ascontiguousarray(keys[filled].reshape(-1, LEAF, m).transpose(0, 2, 1))
        lo, hi, top = [table[:-1].min(axis=2).T], [table[:-1].max(axis=2).T], [bias[:-1].max(axis=1)]
        while lo[-1].shape[1] > LEAF:
            starts = np.arange(0, lo[-1].shape[1], LEAF)
            lo.append(np.minimum.reduceat(lo[-1], starts, axis=1))
            hi.append(np.maximum.reduceat(hi[-1], starts, axis=1))
            top.append(np.maximum.reduceat(top[-1], starts))
        levels = np.cumsum([0, *(len(t) for t in top)])
        boxes = [np.ascontiguousarray(np.concatenate(some, axis=-1)) for some in (lo, hi, top)]
        return cls(order, table, bias, boxes[0], boxes[1], boxes[2], levels, cuts, axes, cut_places, children)

    @cached_property
    def slack(self) -> float:
        """What rounding may change of `|q − box|² − max p` besides its relative error: some units of the largest |p|."""
        return 2.0**-48 * float(np.abs(self.powers[np.isfinite(self.powers)]).max())

    def placed(self, table: Array, columns: int) -> Array:
        """`(N, …)` as `(leaves + 1, columns, LEAF)` in the order of the keys, zeros where there is no key or column."""
        count, leaves = len(self.order), len(self.powers)
        flat = table.reshape(count, -1)
        out = np.zeros((leaves * LEAF, columns))
        out[:count, : flat.shape[1]] = flat[self.order]
        return np.ascontiguousarray(out.reshape(leaves, LEAF, columns).transpose(0, 2, 1))


def _sorted(keys: Array, leaves: int) -> tuple[Integers, int, Integers, Array, Integers]:
    """Row numbers of the keys, leaf after leaf, and the cuts between them."""
    order, cuts = np.arange(len(keys)), (np.zeros(leaves, np.int64), np.zeros(leaves), np.zeros((leaves, 2), np.int64))
    if native.AVAILABLE:
        from partita.kernels.scattered_loops import order_by_cells

        along = np.empty(len(keys))
        native.compiled_once("cells", lambda: order_by_cells(keys[:1], order[:1], along[:1], *cuts))
        return order, order_by_cells(keys, order, along, *cuts), *cuts
    parts = [(0, len(keys))]
    while parts:  # the same tree, cut by numpy
        first, last = parts.pop()
        some = keys[order[first:last]]
        sides = np.ptp(some, axis=0)
        if last - first <= LEAF or not sides.any():
            continue
        unit = LEAF
        while unit * LEAF < last - first:
            unit *= LEAF
        middle = max(1, -(-(last - first) // unit) // 2) * unit
        order[first:last] = order[first:last][np.argpartition(some[:, sides.argmax()], middle)]
        parts += [(first, first + middle), (first + middle, last)]
    return order, 0, *cuts
