"""Grids of one variable with affine values, on intervals much wider than their centers: what rounding adds on each part."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from flint import arb

from partita_check.bounds import SMALLEST, TINIEST, UNIT
from partita_check.clock import clock
from partita_check.polynomials import up
from partita_check.reading import Head

__all__ = ["is_line", "line_running"]

STEPS, AROUND = 4, 4  # intervals per gap between centers, and gaps beyond the last center that are cut like that


def is_line(head: Head) -> bool:
    """Whether the head has one input and one output, slopes, and windows of all its keys."""
    one = len(head.axes) == 1 and len(head.values) == 1 and head.keys > 1
    return one and head.slopes is not None and 2 * head.windows[0] >= head.keys


def _intervals(centers: list[float], lo: float, hi: float) -> Iterator[tuple[float, float]]:
    gap = max(b - a for a, b in pairwise(centers))
    first, last = centers[0] - AROUND * gap, centers[-1] + AROUND * gap
    count = int((last - first) / gap * STEPS) + 1
    edges = [first + (last - first) * k / count for k in range(count + 1)]
    step = AROUND * gap
    while edges[-1] < hi or edges[0] > lo:
        edges = [edges[0] - step, *edges, edges[-1] + step]
        step *= 2
    inside = [lo, *(e for e in edges if lo < e < hi), hi]
    return pairwise(inside)


def line_running(head: Head, lo: float, hi: float, semantics: str) -> arb:
    """What rounded scores and sums add to the error of the exact head on [lo, hi].

    With e the key that is best in the middle of an interval, `Σ_j (w̃_j − w_j)(V_j − V_e) ≤ (e^{2δ} − 1) Σ_j w_j|V_j − V_e|`, and
    `w_j ≤ e^{s_j − s_e}`, which is largest at an end, as score differences are affine. A score is off by `7u s + 16u`.
    """
    unit, centers, rate = UNIT[semantics], list(head.axes[0]), arb(head.rates[0])
    slopes, origin = head.slopes or (), arb((head.origin or (0.0,))[0])
    lines = [(arb(v), arb(s)) for v, s in zip(head.values[0], slopes)]
    worst, count = arb(0), 2 * len(centers) + 4 + 4 + 5
    for a, b in _intervals(centers, lo, hi):
        clock.tick()
        ends, middle = (arb(a), arb(b)), a / 2 + b / 2
        best = min(range(len(centers)), key=lambda j: abs(centers[j] - middle))
        far = max((abs(x - c) for x in ends for c in (centers[0], centers[-1])), key=up)
        delta = 1.01 * unit * (7 * rate * far * far / 2 + 16) + TINIEST[semantics] * (2 + far)
        moved, tall, lost = arb(0), arb(0), arb(0)
        for j, (value, slope) in enumerate(lines):
            lead = [
                rate * (arb(centers[j]) - centers[best]) * (x - (arb(centers[j]) + centers[best]) / 2) for x in ends
            ]
            most = max(*lead, arb(0) if j == best else lead[0], key=up)
            most = most if most < 0 else arb(0)
            apart = [abs(value - lines[best][0] + (slope - lines[best][1]) * (x - origin)) for x in ends]
            size = abs(value) + abs(slope) * max((abs(x - origin) for x in ends), key=up)
            grown = (2 * delta + most).exp() - most.exp()
            moved += grown.abs_upper() * max(apart, key=up)
            share = 2 * delta + most
            tall += size * (share.exp() if share < 0 and j != best else 1)
            lost += SMALLEST[semantics] * size
        reach = max((abs(x - origin) for x in ends), key=up)
        lost += 4 * len(lines) * TINIEST[semantics] * (2 + reach)
        worst = max(worst, moved + 1.01 * count * unit * tall + 8 * len(lines) * lost, key=up)
    return worst
