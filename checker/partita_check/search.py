"""Best-first bisection of boxes: the largest bound first, until all meet the target or the time runs out."""

from __future__ import annotations

import heapq
import math
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from flint import arb

from partita_check.clock import TimeOver
from partita_check.polynomials import Ends, halves, up

__all__ = ["Measured", "search"]

LOOKS = 8  # boxes between two suspects that are looked at


class Measured(NamedTuple):
    """`sup |f − net| ≤ bound` on a box; the axis to halve next; a point that is likely bad; what the halves inherit."""

    bound: float
    axis: int
    suspect: tuple[float, ...] | None = None
    state: Any = None


def search(
    measure: Callable[[Ends, Any], Measured],
    starts: Sequence[Ends],
    goal: Callable[[], float],
    deadline: float,
    norm: float = math.inf,
    outputs: int = 1,
    refuted: Callable[[tuple[float, ...]], bool] = lambda point: False,
) -> tuple[float, int]:
    """A bound of the error over some boxes (of its L_p norm), and from how many smaller ones; it holds whenever the search ends.

    The search ends at `deadline`, or when the budget of the whole check is spent while a box is measured. After a point that
    refutes the claim some boxes were not measured, and there is no bound.

    Halves share their midpoint, so that the boxes always cover. In L_p the sum over the leaves of `outputs · volume · bound^p` is
    refined where it is largest.
    """
    heap, boxes, supremum = list[tuple[float, int, Ends, Measured]](), 0, math.isinf(norm)

    def add(ends: Ends, state: Any) -> bool:
        """Measure one box; whether its suspect refutes the claim."""
        nonlocal boxes
        boxes += 1
        found = measure(ends, state)
        volume = math.prod((arb(b) - arb(a) for a, b in ends), start=arb(1))
        share = (
            found.bound if supremum or not 0 < found.bound < math.inf else up(volume * arb(found.bound) ** arb(norm))
        )
        heapq.heappush(heap, (-share, boxes, ends, found))
        suspect = found.suspect if supremum and boxes % LOOKS == 1 else None
        return suspect is not None and found.bound > goal() and refuted(suspect)

    def bound() -> float:
        if supremum:
            return max(stuck, -heap[0][0] if heap else -math.inf)
        total = sum((arb(-entry[0]) for entry in heap), arb(stuck)) * outputs
        return up(total ** (1 / arb(norm))) if total > 0 else 0.0 if total == 0 else math.inf

    stuck, look, stop = -math.inf if supremum else 0.0, 1, False
    try:
        for ends in starts:
            stop = stop or add(ends, None)
    except TimeOver:
        return math.inf, boxes
    while heap and not stop and time.monotonic() < deadline:
        if supremum or boxes >= look:
            if bound() <= goal():
                break
            look = boxes + boxes // 4 + 8
        whole = heapq.heappop(heap)
        share, _, ends, found = whole
        parts = halves(ends, found.axis)
        if ends in parts:  # it cannot be halved
            stuck = max(stuck, -share) if supremum else up(arb(stuck) - arb(share))
            continue
        try:
            for half in parts:
                stop = stop or add(half, found.state)
        except TimeOver:
            heapq.heappush(heap, whole)  # its halves do not cover it yet; a half counted twice does no harm
            break
    return (math.inf if stop else bound()), boxes
