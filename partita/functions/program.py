"""The order in which a graph is computed: node by node, except that weighted sums of the same terms are one matrix product.

A dense layer of a network is n sums over the same m terms. As n·m single nodes it would take n·m array operations per batch; as one
step it takes one. The meaning of the graph is the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from partita.functions.operations import Node

__all__ = ["Linear", "Step", "program"]

_FEWEST_TERMS = 4  # with fewer, single operations are as fast


@dataclass(frozen=True, eq=False)
class Linear:
    """The sums `Σ_k matrix[i, k] · terms_k` for the nodes `results`."""

    results: tuple[int, ...]
    terms: tuple[int, ...]
    matrix: NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Step:
    """One node, or several sums at once; `released` are the nodes that nothing reads later."""

    work: int | Linear
    released: tuple[int, ...]


def program(
    nodes: Sequence[Node], outputs: Sequence[int], also: Mapping[int, tuple[int, ...]] | None = None
) -> tuple[Step, ...]:
    """The steps of a graph, in an order in which everything is computed before it is read.

    Args:
        also: earlier nodes that a node reads besides its arguments.
    """
    also = also or {}
    groups: dict[tuple[int, ...], dict[int, list[float]]] = {}
    for position, node in enumerate(nodes):
        if node.operation == "sum" and len(node.arguments) >= _FEWEST_TERMS:
            weighted = [_weighted(nodes, k) for k in node.arguments]
            terms = tuple(k for k, _ in weighted)
            if len(set(terms)) == len(terms):
                groups.setdefault(terms, {})[position] = [w for _, w in weighted]
    joint = {min(sums): Linear(tuple(sums), terms, np.array(list(sums.values()))) for terms, sums in groups.items()}
    summed = {k for group in joint.values() for k in group.results}
    work = list(_reverse_needed(nodes, outputs, joint, summed, also))[::-1]
    last: dict[int, int] = {}
    for number, task in enumerate(work):
        last |= dict.fromkeys(_reads(nodes, task, also), number)
    released: list[list[int]] = [[] for _ in work]
    for k, number in last.items():
        if k not in outputs:
            released[number].append(k)
    return tuple(Step(task, tuple(gone)) for task, gone in zip(work, released))


def _weighted(nodes: Sequence[Node], k: int) -> tuple[int, float]:
    """Term and weight of a summand: (x, c) for c·x or x·c, (itself, 1) otherwise."""
    if nodes[k].operation == "mul":
        for constant, other in (nodes[k].arguments, nodes[k].arguments[::-1]):
            if nodes[constant].operation == "const" and nodes[other].operation != "const":
                return other, float(nodes[constant].parameters[0])
    return k, 1.0


def _reads(nodes: Sequence[Node], task: int | Linear, also: Mapping[int, tuple[int, ...]]) -> tuple[int, ...]:
    return task.terms if isinstance(task, Linear) else (*nodes[task].arguments, *also.get(task, ()))


def _reverse_needed(
    nodes: Sequence[Node],
    outputs: Sequence[int],
    joint: dict[int, Linear],
    summed: set[int],
    also: Mapping[int, tuple[int, ...]],
) -> Iterator[int | Linear]:
    """What has to be computed, last first, without the products that only a joint sum reads."""
    needed = set(outputs)
    for position in reversed(range(len(nodes))):
        task: int | Linear = joint.get(position, position)
        wanted = bool(needed.intersection(task.results)) if isinstance(task, Linear) else position in needed
        if wanted and (isinstance(task, Linear) or position not in summed):
            needed.update(_reads(nodes, task, also))
            yield task
