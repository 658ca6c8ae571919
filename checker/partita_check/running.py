"""What a head needs so that it runs as the rounding terms assume: windows that are found, no overflow, no rounded R/2.

Rounding terms count relative errors, and numbers that underflow as lost. Neither covers a number that overflows, half an R that
is below the smallest normal number, or a window that does not hold the centers around a point: evaluators guess its place from
evenly spaced centers and correct the guess by one. A head that breaks one of these rules is never verified.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from flint import arb

from partita_check.bounds import LARGEST, SMALLEST, STORED, UNIT, Gaps
from partita_check.clock import clock
from partita_check.polynomials import Ends, up
from partita_check.reading import Head

__all__ = ["obstacle"]


def obstacle(head: Head, ends: Ends, gaps: Sequence[Gaps], semantics: str) -> str:
    """Why no bound holds for this head as it is run on this box; an empty string if nothing stands in the way."""
    return next(_obstacles(head, ends, gaps, semantics), "")


def _obstacles(head: Head, ends: Ends, gaps: Sequence[Gaps], semantics: str) -> Iterator[str]:
    name, most, least = semantics, LARGEST[semantics], 2 * SMALLEST[semantics]
    for rate in head.rates:
        if not arb(rate) >= least:
            yield f"the inverse temperature {rate:.4g} is below {up(least):.4g}: half of it is not a normal {name} number"
    for i, (axis, gap) in enumerate(zip(head.axes, gaps)):
        problem = _misplaced(axis, gap.width, semantics)
        if problem:
            yield f"the centers of axis {i} are not evenly spaced: {problem}"
        if not gap.rate * gap.window * gap.window / 2 < most:
            yield f"scores on axis {i} overflow {name}"
    for what, size in _sizes(head, ends):
        clock.tick()
        limit = STORED[semantics][2] if what.startswith(("inputs", "values")) else most
        if not size < limit:
            yield f"{what} may reach {up(size):.4g}, and {name} holds numbers up to {limit:.4g} only"


def _misplaced(axis: Sequence[float], width: int, semantics: str) -> str:
    """The window starts at a guess, `(x − c_0)(P − 1)/(c_{P−1} − c_0)`, which must be right to within one place.

    As the guess grows with x, it is enough that every center lies within one spacing, less the rounding of the guess, of its place.
    """
    count = len(axis)
    if width == count:
        return ""
    first, span = arb(axis[0]), arb(axis[-1]) - arb(axis[0])
    room = 1 - count * (3 * UNIT[semantics] + 4 * SMALLEST[semantics] / span)
    for k, center in enumerate(axis):
        if k % 1024 == 0:
            clock.tick()
        place = (arb(center) - first) * (count - 1) / span
        if not abs(place - k) <= room:
            return f"center {k} is {float(place):.6g} mean gaps from the first one, so the window would be misplaced"
    return ""


def _farthest(ends: tuple[float, float], *points: float) -> arb:
    """`max |z − c|` over an interval and some points c."""
    return arb(max(up(abs(arb(end) - arb(point))) for end in ends for point in points))


def _sizes(head: Head, ends: Ends) -> Iterator[tuple[str, arb]]:
    """What is formed while the head runs, and how large it may get."""
    m, outputs = len(ends), len(head.values)
    for i, pair in enumerate(ends):
        yield f"inputs on axis {i}", _farthest(pair, 0.0)
    tall = arb(max(max(map(abs, v)) for v in head.values))
    if head.axes:
        for i, (axis, pair) in enumerate(zip(head.axes, ends)):
            yield f"z − c on axis {i}", _farthest(pair, axis[0], axis[-1])
        if head.slopes is not None and head.origin is not None:
            away = [_farthest(pair, o) for pair, o in zip(ends, head.origin)]
            steep = [arb(max(map(abs, head.slopes[i::m]))) for i in range(m)]
            tall += sum((s * d for s, d in zip(steep, away)), arb(0))
        yield "values", tall
        return
    power = arb(max(map(abs, head.powers), default=0.0)) if head.powers is not None else arb(0)
    for j, center in enumerate(head.centers):
        far = [_farthest(pair, c) for pair, c in zip(ends, center)]
        square = sum((d * d for d in far), arb(0)) + 2 * power
        yield f"|z − c|² and powers of cell {j}", square
        yield f"scores of cell {j}", square * head.rates[0] / 2
        for o in range(outputs):
            start = (j * outputs + o) * m
            slopes = head.slopes[start : start + m] if head.slopes is not None else ()
            value = abs(arb(head.values[o][j]))
            yield f"values of cell {j}", sum((abs(s) * d for s, d in zip(slopes, far)), value)
