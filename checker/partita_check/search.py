"""Best-first bisection of a box: the largest bound first, until all meet the target or the time is over."""

from __future__ import annotations

import heapq
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from flint import arb

from partita_check.polynomials import up

__all__ = ["Found", "Measured", "search"]

Ends = tuple[float, ...]


@dataclass(frozen=True)
class Measured:
    """`sup |f − net| ≤ bound` on a box; the axis to halve next; a point that is likely bad; what the halves inherit."""

    bound: float
    axis: int
    suspect: tuple[float, ...] | None = None
    state: Any = None


@dataclass(frozen=True)
class Found:
    """What a search proved: the bound (of the supremum, or of the L_p norm), from how many boxes; whether time ran out."""

    bound: float
    boxes: int
    spent: bool


def search(
    measure: Callable[[Ends, Ends, Any], Measured],
    lo: Sequence[float],
    hi: Sequence[float],
    *,
    target: float | Callable[[], float],
    norm: float,
    outputs: int,
    deadline: float,
    refuted: Callable[[tuple[float, ...]], bool] = lambda point: False,
) -> Found:
    """Bound the error over the box [lo, hi]. Halves share their midpoint, so that the boxes always cover it.

    In L_p the sum over the leaves of `outputs · volume · bound^p` is refined where it is largest.
    """
    boxes, heap = 0, list[tuple[float, int, Ends, Ends, Measured]]()
    supremum = math.isinf(norm)
    goal = target if callable(target) else lambda: target

    def add(lo: Ends, hi: Ends, state: Any) -> bool:
        """Measure one box; whether its suspect refutes the claim."""
        nonlocal boxes
        boxes += 1
        found = measure(lo, hi, state)
        share = found.bound if supremum else up(_share(lo, hi, found.bound, norm))
        heapq.heappush(heap, (-share, boxes, lo, hi, found))
        return supremum and found.suspect is not None and found.bound > goal() and refuted(found.suspect)

    stop, stuck, look = add(tuple(lo), tuple(hi), None), arb(0), 1
    while heap and not stop and time.monotonic() < deadline:
        if supremum and -heap[0][0] <= goal():
            break
        if not supremum and boxes >= look:
            if _root(_total(heap, stuck), norm, outputs) <= goal():
                break
            look = boxes + boxes // 4 + 8
        share, _, lo, hi, found = heapq.heappop(heap)
        axis = found.axis
        middle = lo[axis] / 2 + hi[axis] / 2
        if not lo[axis] < middle < hi[axis]:  # it cannot be halved
            stuck = stuck - share if not supremum else max(stuck, arb(-share))
            continue
        left, right = (*hi[:axis], middle, *hi[axis + 1 :]), (*lo[:axis], middle, *lo[axis + 1 :])
        stop = add(lo, left, found.state) or add(right, hi, found.state)
    spent = time.monotonic() >= deadline
    if not supremum:
        return Found(_root(_total(heap, stuck), norm, outputs), boxes, spent)
    return Found(max(up(stuck) if stuck > 0 else 0.0, -heap[0][0] if heap else 0.0), boxes, spent)


def _share(lo: Ends, hi: Ends, bound: float, norm: float) -> arb:
    volume = math.prod((arb(b) - arb(a) for a, b in zip(lo, hi)), start=arb(1))
    return volume * arb(bound) ** arb(norm) if 0 < bound < math.inf else arb(0) if bound == 0 else arb("inf")


def _total(heap: list[tuple[float, int, Ends, Ends, Measured]], done: arb) -> arb:
    return sum((arb(-entry[0]) for entry in heap), done)


def _root(total: arb, norm: float, outputs: int) -> float:
    return up((total * outputs) ** (1 / arb(norm))) if total > 0 else 0.0 if total == 0 else math.inf
