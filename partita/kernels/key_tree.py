"""Keys on the CPU, sorted for the native loops: leaves of a k-d tree with their boxes."""

from __future__ import annotations

from dataclasses import dataclass

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
        keys: `(leaves + 1, 1 + m, LEAF)`: −p, then the coordinates. −p is inf for places without a key: the last leaf has none.
        boxes: `(groups, 1 + 2m, LEAF)`: minus the largest power of each node, the lower and the upper ends of its box. The eight
            nodes of a group have one parent; groups go level after level from the leaves up, the last one is the top.
        levels: the group that each level starts with, and their number. sizes: nodes of each level.
        slack: what rounding may change of `|q − box|² − max p` besides its relative error: some units of the largest |p|.
        cuts: `(leaves, 4)`, the planes between the leaves (`scattered_loops.order_by_cells`); their number is `planes`, none
            without numba.
    """

    order: Integers
    keys: Array
    boxes: Array
    levels: Integers
    sizes: Integers
    slack: float
    planes: int
    cuts: Integers

    @classmethod
    def of(cls, keys: Array, powers: Array | None) -> KeyTree:
        """Sort keys `(N, m)`, N ≥ 1, all finite."""
        count, m = keys.shape
        leaves = -(-count // LEAF)
        order, planes, cuts = _sorted(np.ascontiguousarray(keys), leaves)
        places = (leaves + 1) * LEAF
        filled = np.concatenate([order, np.repeat(order[-1:], places - count)])
        table = np.empty((leaves + 1, 1 + m, LEAF))
        table[:, 1:] = keys[filled].reshape(-1, LEAF, m).transpose(0, 2, 1)
        bias = np.full(places, np.inf)
        bias[:count] = 0.0 if powers is None else -powers[order]
        table[:, 0] = bias.reshape(-1, LEAF)
        nodes, levels = np.concatenate([table[:-1].min(axis=2), table[:-1, 1:].max(axis=2)], axis=1), []
        while True:
            groups = np.zeros((-(-len(nodes) // LEAF), LEAF, 1 + 2 * m))
            groups[:, :, 0] = np.inf
            groups.reshape(-1, 1 + 2 * m)[: len(nodes)] = nodes
            levels.append((np.ascontiguousarray(groups.transpose(0, 2, 1)), len(nodes)))
            if len(groups) == 1:
                break
            starts = np.arange(0, len(nodes), LEAF)
            low = np.minimum.reduceat(nodes[:, : 1 + m], starts)
            nodes = np.concatenate([low, np.maximum.reduceat(nodes[:, 1 + m :], starts)], axis=1)
        slack = 0.0 if powers is None else 2.0**-48 * float(np.abs(powers).max())
        boxes, sizes = np.concatenate([g for g, _ in levels]), np.array([n for _, n in levels])
        return cls(order, table, boxes, np.cumsum([0, *(len(g) for g, _ in levels)]), sizes, slack, planes, cuts)

    @property
    def leaves(self) -> int:
        """How many leaves hold keys."""
        return len(self.keys) - 1

    def level(self, number: int) -> tuple[Array, Array, Array]:
        """Lower and upper ends `(m, nodes)` and largest powers `(nodes,)` of a level, 0 for the leaves."""
        some = self.boxes[self.levels[number] : self.levels[number + 1]]
        flat = some.transpose(1, 0, 2).reshape(some.shape[1], -1)[:, : self.sizes[number]]
        m = len(flat) // 2
        return flat[1 : 1 + m], flat[1 + m :], -flat[0]

    def placed(self, table: Array, columns: int) -> Array:
        """`(N, …)` as `(leaves + 1, columns, LEAF)` in the order of the keys, zeros where there is no key or column."""
        count, leaves = len(self.order), len(self.keys)
        flat = table.reshape(count, -1)
        out = np.zeros((leaves * LEAF, columns))
        out[:count, : flat.shape[1]] = flat[self.order]
        return np.ascontiguousarray(out.reshape(leaves, LEAF, columns).transpose(0, 2, 1))


def _sorted(keys: Array, leaves: int) -> tuple[Integers, int, Integers]:
    """Row numbers of the keys, leaf after leaf, and the planes between them."""
    order, cuts = np.arange(len(keys)), np.zeros((leaves, 4), np.int64)
    if native.AVAILABLE:
        from partita.kernels.scattered_loops import order_by_cells

        along = np.empty(len(keys))
        native.compiled_once("cells", lambda: order_by_cells(keys[:1], order[:1], along[:1], cuts))
        return order, order_by_cells(keys, order, along, cuts), cuts
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
    return order, 0, cuts
