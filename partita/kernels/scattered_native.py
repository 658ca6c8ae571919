"""The sums over scattered keys, and their gradients, as native loops (extra: `fast`). All arithmetic is in float64.

Queries are sorted by the leaf that they lie in. Blocks of them share the leaves that may matter to one of them; each query then
takes those of its own. A leaf is left out if `|q − box|² − max p`, which no key in it undercuts by more than `m + 2` roundings,
exceeds that of a key of the query's own leaf by `2·cut/R`: the score of a key left out trails the best one by the cut.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from partita.kernels import native
from partita.kernels.key_tree import KeyTree

__all__ = ["Tables", "gradients_natively", "sum_natively"]

_BLOCK = 32  # queries that share a list of leaves, at most
_AT_ONCE = 1 << 20  # queries sorted at once
Array = NDArray[np.float64]
Integers = NDArray[np.int64]


class Tables(NamedTuple):
    """Values `(leaves + 1, columns, LEAF)` and slopes `(leaves + 1, outputs, m, LEAF)`, flat, in the order of a tree."""

    values: Array
    slopes: Array  # empty for none
    outputs: int

    @classmethod
    def of(cls, tree: KeyTree, values: Array, slopes: Array | None) -> Tables:
        """Values `(N, out)`, slopes `(N, out, m)` or None; columns are filled up to a multiple of four unless there is one."""
        outputs = values.shape[1]
        columns = outputs if outputs == 1 else -(-outputs // 4) * 4
        tilts = np.empty(0) if slopes is None else tree.placed(slopes, slopes[0].size).reshape(-1)
        return cls(tree.placed(values, columns).reshape(-1), tilts, outputs)


class _Batch(NamedTuple):
    """Queries in the order of their leaves, and the arguments that all loops take."""

    queries: Array
    order: Integers
    loop_arguments: tuple[Any, ...]  # from homes to block

    @property
    def axes(self) -> tuple[int, ...]:
        """A tuple whose length the compiler knows."""
        return tuple(range(self.queries.shape[1]))

    def run(self, loop: Callable[..., object], rows: slice, *more: Any) -> None:
        """Call a loop for some queries; `more` are its last arguments."""
        homes, *others = self.loop_arguments
        loop(self.axes, self.queries.reshape(-1), self.order[rows], homes[rows], *others, *more)


def _batch(queries: Array, tree: KeyTree, tables: Tables, rate: float, cut: float) -> _Batch:
    homes = _homes(queries, tree)
    order = _sorted(homes, tree.leaves)
    keys = tree.keys.reshape(-1), tree.boxes.reshape(-1), tree.levels, tree.sizes
    scale = rate / 2, 2 * cut / rate, tree.slack, _BLOCK
    return _Batch(queries, order, (homes[order], *keys, tables.values, tables.slopes, *scale))


def _homes(queries: Array, tree: KeyTree) -> Integers:
    """The leaf that each query lies in, −1 for NaN."""
    from partita.kernels.scattered_loops import home_leaves

    axes, flat, homes = tuple(range(queries.shape[1])), queries.reshape(-1), np.empty(len(queries), np.int64)

    def descend(rows: slice) -> None:
        home_leaves(axes, flat, rows.start, rows.stop, tree.planes, tree.cuts, homes)

    native.compiled_once(("homes", len(axes)), lambda: descend(slice(0, 0)))
    native.in_parts(len(queries), descend)
    return homes


def _sorted(homes: Integers, leaves: int) -> Integers:
    from partita.kernels.scattered_loops import sort_by_number

    order = np.empty(len(homes), np.int64)
    native.compiled_once("sort", lambda: sort_by_number(homes[:0], 0, 0, order[:0]))
    sort_by_number(homes, -1, leaves - 1, order)
    return order


def sum_natively(
    queries: Array, tree: KeyTree, tables: Tables, rate: float, cut: float
) -> tuple[Array, Array, Array, Array]:
    """Outputs `(n, out)`, log-sum-exp, the log of the share left out, at most, and the additions a weight passes through, `(n,)`.

    Args:
        queries: `(n, m)`, contiguous.
        tree, tables: the keys and what they hold.
        rate: R > 0.
        cut: keys whose score trails the best by more may be left out.
    """
    from partita.kernels.scattered_loops import sum_scattered

    n = len(queries)
    made = np.empty((n, tables.outputs)), np.empty(n), np.empty(n), np.empty(n)
    for first in range(0, n, _AT_ONCE):
        some = slice(first, first + _AT_ONCE)
        batch, parts = _batch(queries[some], tree, tables, rate, cut), [a[some] for a in made]

        def run(rows: slice, batch: _Batch = batch, parts: list[Array] = parts) -> None:
            batch.run(sum_scattered, rows, *parts)

        native.compiled_once(("scattered", len(batch.axes)), lambda: run(slice(0, 0)))
        native.in_parts(len(batch.order), run, least=256)
    return made


def gradients_natively(
    queries: Array,
    grads: tuple[Array, Array, Array],
    tree: KeyTree,
    tables: Tables,
    rate: float,
    cut: float,
    needs: Sequence[bool],
) -> list[Array | None]:
    """Gradients in queries, keys, values, powers, slopes and R, in the order of the keys given; None where none is needed.

    Every thread adds up its own; they are summed in the order of the threads.

    Args:
        queries, tree, tables, rate, cut: see `sum_natively`.
        grads: the gradients of the outputs `(n, out)` and of the log-sum-exp `(n,)`, and the outputs `(n, out)`.
        needs: of which tensors, in the order above.
    """
    from partita.kernels.scattered_loops import scattered_gradients

    (n, m), held, outputs = queries.shape, len(tree.order), tables.outputs
    in_queries = np.empty((n, m))
    shapes = (m, held), (outputs, held), (held,), (outputs * m if len(tables.slopes) else 0, held), (1,)
    totals = [np.zeros(s) for s in shapes]
    wanted = np.array(needs, dtype=np.bool_)
    for first in range(0, n, _AT_ONCE):
        some = slice(first, first + _AT_ONCE)
        batch = _batch(queries[some], tree, tables, rate, cut)
        given = [a[some] for a in grads]
        parts: dict[int, list[Array]] = {}

        def run(
            rows: slice,
            batch: _Batch = batch,
            given: list[Array] = given,
            parts: dict[int, list[Array]] = parts,
            some: slice = some,
        ) -> None:
            own = parts[rows.start] = [np.zeros(s) for s in shapes]
            batch.run(scattered_gradients, rows, held, *given, wanted, in_queries[some], *own)

        native.compiled_once(("scattered gradients", m), lambda: run(slice(0, 0)))
        native.in_parts(len(batch.order), run, least=256)
        for start in sorted(parts):
            for total, own in zip(totals, parts[start]):
                total += own
    back = np.empty(held, np.int64)
    back[tree.order] = np.arange(held)
    in_keys, in_values, in_powers, in_slopes, in_rate = totals
    made = (
        in_queries,
        in_keys.T[back],
        in_values.T[back],
        in_powers[back],
        in_slopes.T[back].reshape(held, outputs, -1),
        in_rate.reshape(()),
    )
    return [a if needed else None for a, needed in zip(made, needs)]
