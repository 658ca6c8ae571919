"""Heads of two keys, `A + B tanh(φ)`, against quotients of two exponentials and against polynomials of degree two.

Every node of f is a quotient of sums of polynomials times exponentials of affine functions, in rational arithmetic. A function
that such a head represents ends as `(p₀ + p₁e^l)/(1 + d e^l)`, or as a polynomial.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from itertools import pairwise
from typing import NamedTuple

from flint import arb, fmpq

from partita_check.bounds import STORED, UNIT
from partita_check.cells import Cells
from partita_check.clock import clock
from partita_check.graph import Graph
from partita_check.polynomials import INF, Ends, balls, down, up

__all__ = ["Form", "two_key_bound", "two_key_form"]

MOST_NODES, MOST_TERMS, MOST_BITS = 4096, 4096, 4096
STEPS = 8  # slabs of φ per unit, up to ±24; beyond they double
FAR = 24
Row = tuple[Fraction, ...]  # the constant, then the slopes
Monomial = tuple[int, ...]  # its variables, in order; at most two
Sum = dict[Row, dict[Monomial, Fraction]]  # exponents to polynomials


class Strange(Exception):
    """f is not of the form that is looked for."""


class Form(NamedTuple):
    """f of every output: values p of two keys and half their score difference φ, or, where there is none, a polynomial.

    `turn`: φ without `ln(weight)/2`.
    """

    polynomials: tuple[tuple[dict[Monomial, Fraction], ...], ...]
    turn: Row | None
    weight: Fraction


def _shifted(a: Row, b: Row, sign: int = 1) -> Row:
    return tuple(x + sign * y for x, y in zip(a, b))


def _cleaned(found: Sum) -> Sum:
    kept = {k: {v: c for v, c in p.items() if c} for k, p in found.items()}
    return {k: p for k, p in kept.items() if p}


def _plus(a: Sum, b: Sum, times: Fraction = Fraction(1)) -> Sum:
    found = {k: dict(p) for k, p in a.items()}
    for k, p in b.items():
        own = found.setdefault(k, {})
        for v, c in p.items():
            own[v] = own.get(v, Fraction(0)) + times * c
    return _cleaned(found)


def _times(a: Sum, b: Sum) -> Sum:
    found: Sum = {}
    if sum(map(len, a.values())) * sum(map(len, b.values())) > MOST_TERMS:
        raise Strange
    for j, p in a.items():
        for k, q in b.items():
            clock.tick()
            own = found.setdefault(_shifted(j, k), {})
            for v, c in p.items():
                for w, d in q.items():
                    key = tuple(sorted(v + w))
                    if len(key) > 2:
                        raise Strange
                    own[key] = own.get(key, Fraction(0)) + c * d
    return _cleaned(found)


class Quotient(NamedTuple):
    """Below the line are constants times exponentials, all positive, the least of which, in the order of rows, is `1·e⁰`."""

    top: Sum
    below: Sum

    @staticmethod
    def of(top: Sum, below: Sum) -> Quotient:
        constants = [p[()] for p in below.values() if set(p) == {()}]
        if not constants or len(constants) < len(below) or min(constants) < 0 < max(constants):
            raise Strange
        least = min(below)
        scale = 1 / below[least][()]

        def moved(part: Sum) -> Sum:
            return {_shifted(k, least, -1): {v: c * scale for v, c in p.items()} for k, p in part.items()}

        return Quotient(moved(top), moved(below))


def _walk(graph: Graph) -> Iterator[Quotient]:
    """The quotients of all nodes, in order."""
    zero, values = (Fraction(0),) * (graph.inputs + 1), list[Quotient]()
    one: Sum = {zero: {(): Fraction(1)}}

    def number(c: float | Fraction) -> Quotient:
        return Quotient({zero: {(): Fraction(c)}} if c else {}, one)

    def product(a: Quotient, b: Quotient) -> Quotient:
        return Quotient.of(_times(a.top, b.top), _times(a.below, b.below))

    def line(a: Quotient, times: int) -> Row:
        if a.below != one or set(a.top) - {zero} or any(len(v) > 1 for v in a.top.get(zero, {})):
            raise Strange
        found = list(zero)
        for v, c in a.top.get(zero, {}).items():
            found[v[0] + 1 if v else 0] = times * c
        return tuple(found)

    for name, args, params in graph.nodes:
        clock.tick()
        a = [values[k] for k in args]
        if name == "input":
            found = Quotient({zero: {(params[0],): Fraction(1)}}, one)
        elif name == "const":
            found = number(params[0])
        elif name in ("add", "sum", "sub"):
            found = a[0]
            for b in a[1:]:
                sign = Fraction(-1 if name == "sub" else 1)
                if found.below == b.below:
                    found = Quotient(_plus(found.top, b.top, sign), b.below)
                else:
                    crossed = _plus(_times(found.top, b.below), _times(b.top, found.below), sign)
                    found = Quotient.of(crossed, _times(found.below, b.below))
        elif name == "neg":
            found = Quotient(_plus({}, a[0].top, Fraction(-1)), a[0].below)
        elif name == "mul":
            found = product(*a)
        elif name == "div":
            found = product(a[0], Quotient.of(a[1].below, a[1].top))
        elif name == "pow":
            base = a[0] if params[0] >= 0 else Quotient.of(a[0].below, a[0].top)
            found = number(1)
            for _ in range(abs(params[0])):
                found = product(found, base)
        elif name == "exp":
            found = Quotient({line(a[0], 1): {(): Fraction(1)}}, one)
        elif name in ("tanh", "sigmoid"):
            risen: Sum = {line(a[0], 2 if name == "tanh" else 1): {(): Fraction(1)}}
            found = Quotient.of(_plus(risen, one, Fraction(-1)) if name == "tanh" else risen, _plus(risen, one))
        else:
            raise Strange
        parts = (c for part in found for k, p in part.items() for c in (*k, *p.values()))
        if any(max(c.numerator.bit_length(), c.denominator.bit_length()) > MOST_BITS for c in parts):
            raise Strange
        values.append(found)
        yield found


def two_key_form(graph: Graph) -> Form | None:
    """The form of f, or None if it has another one."""
    if len(graph.nodes) > MOST_NODES:
        return None
    try:
        values = list(_walk(graph))
        outputs = [values[k] for k in graph.outputs]
        divided = [f.below for f in outputs if len(f.below) > 1]
        if not divided:
            zero = (Fraction(0),) * (graph.inputs + 1)
            if any(set(f.top) - {zero} for f in outputs):
                return None
            return Form(tuple((f.top.get(zero, {}),) for f in outputs), None, Fraction(1))
        below = divided[0]
        if len(below) != 2 or any(b != below for b in divided):
            return None
        (low, _), (high, weight) = sorted(below.items())
        rows = []
        for f in outputs:
            top = f.top if f.below == below else _times(f.top, below)
            pair = top.get(low, {}), {v: c / weight[()] for v, c in top.get(high, {}).items()}
            if set(top) - {low, high} or any(len(v) > 1 for p in pair for v in p) or not any(high[1:]):
                return None
            rows.append(pair)
        return Form(tuple(rows), tuple(x / 2 for x in high), weight[()])
    except Strange:
        return None


def _ball(x: Fraction) -> arb:
    return arb(fmpq(x.numerator, x.denominator))


def _row(polynomial: Mapping[Monomial, Fraction], m: int) -> list[arb]:
    """The affine part of a polynomial."""
    return [_ball(polynomial.get(v, Fraction(0))) for v in [(), *((i,) for i in range(m))]]


def _at(row: Sequence[arb], z: Sequence[arb]) -> arb:
    return sum((a * x for a, x in zip(row[1:], z)), row[0])


def _over(row: Sequence[arb], middle: Sequence[arb], radius: Sequence[arb]) -> arb:
    """`sup |b + a·z|` over a box."""
    return abs(_at(row, middle)) + sum((abs(a) * r for a, r in zip(row[1:], radius)), arb(0))


def slabs(turn: Sequence[arb], ends: Ends) -> Iterator[tuple[arb, Ends]]:
    """Intervals of φ that cover its range over a box, and for each a box that holds all points where φ lies in it."""
    box = balls(ends)[0]
    whole = _at(turn, box)
    least, most = down(whole), up(whole)
    edges = [k / STEPS for k in range(-FAR * STEPS, FAR * STEPS + 1)]
    while edges[-1] < max(most, -least):
        edges = [2 * edges[0], *edges, 2 * edges[-1]]
    inside = [least, *(e for e in edges if least < e < most), most]
    for low, high in pairwise(inside):
        clock.tick()
        span, part = arb(low).union(high), list[tuple[float, float]]()
        for i, (a, b) in enumerate(ends):
            slope = turn[i + 1]
            rest = turn[0] + sum((t * x for k, (t, x) in enumerate(zip(turn[1:], box)) if k != i), arb(0))
            found = (span - rest) / slope if not slope.contains(0) else INF
            lower, upper = (max(a, down(found)), min(b, up(found))) if found.is_finite() else (a, b)
            part.append((lower, upper) if lower <= upper else (a, b))
        yield span, tuple(part)


def two_key_bound(form: Form, cells: Cells, ends: Ends) -> arb:
    """A bound of |f − net| over a box, for the head as it is run; where f is a polynomial, without the rounding of its inputs.

    With `φ̃` the stored φ: where f is `Σ_j w_j V_j`, `|net − f| ≤ Σ_j w̃_j|Ṽ_j − V_j| + |B||φ̃ − φ|/cosh²`. Where f is a polynomial,
    `f − A = κBφ̃ + r`, `|net − f| ≤ |B||tanh φ̃ − κφ̃| + |r|`, and `|tanh t − t + t³/3| ≤ 2t⁵/15` for |t| ≤ 1. Scores that are
    off by δ_j move φ̃ by (δ₀ + δ₁)/2, and a base other than e by 2u of itself. A stored input moves f by its slope,
    `Σ_j w_j V_j' + Bφ'/cosh²`, times u|z|.
    """
    m, outputs, (_, middle, radius) = cells.m, cells.outputs, balls(ends)
    keys = [[[cells.value(j, o, [arb(0)] * m), *cells.slope(j, o)] for o in range(outputs)] for j in (0, 1)]
    swing = [[(b - a) / 2 for a, b in zip(keys[0][o], keys[1][o])] for o in range(outputs)]
    level = [[(b + a) / 2 for a, b in zip(keys[0][o], keys[1][o])] for o in range(outputs)]
    zeros = [arb(0)] * m
    tilts = [[r * c / 2 for r, c in zip(cells.rates * m, center)] for center in cells.centers]
    turn = [(cells.score(1, zeros) - cells.score(0, zeros)) / 2, *(b - a for a, b in zip(*tilts))]
    read, true = arb(0), list[arb]()
    if form.turn is None:
        read = max(
            (_polynomial(form.polynomials[o][0], level[o], swing[o], turn, middle, radius) for o in range(outputs)),
            key=up,
        )
        values: list[list[list[arb]]] = keys
    else:
        true = [*map(_ball, form.turn)]
        true[0] += _ball(form.weight).log() / 2
        values = [[_row(form.polynomials[o][j], m) for o in range(outputs)] for j in (0, 1)]
        if sum((a * b for a, b in zip(true[1:], turn[1:])), arb(0)) < 0:  # the keys are in the other order
            true, values = [-x for x in true], values[::-1]
    worst, unit, narrow = arb(0), UNIT[cells.semantics], cells.semantics not in ("real", "float64")
    for span, part in slabs(turn, ends):
        box, center, wide = balls(part)
        off = [cells.delta(cells.size_of_score(j, box)) for j in (0, 1)]
        shift = (off[0] + off[1]) / 2 + 2.02 * unit * span.abs_upper()
        away = _over([a - b for a, b in zip(turn, true)], center, wide) if true else arb(0)
        shared, (by, least, _) = _shared(span, shift), STORED[cells.semantics]
        moved = [(x.abs_upper() * by + least) if narrow else arb(0) for x in box]
        weights = [1 / (1 + (2 * (x - shift)).exp()) for x in (span.lower(), (-span).lower())]
        for o in range(outputs):
            height = _over(swing[o], center, wide)
            found = height * shift * shared
            if true:
                half = [(b - a) / 2 for a, b in zip(values[0][o], values[1][o])]
                near = sum((abs(t) * s for t, s in zip(true[1:], moved)), away)
                steep = _over(half, center, [w + s for w, s in zip(wide, moved)]) * _shared(span, near)
                found += steep * away
                for i, step in enumerate(moved):
                    ends_of = [
                        abs((1 - x) * values[0][o][i + 1] + (1 + x) * values[1][o][i + 1]) / 2
                        for x in _turned(span, near)
                    ]
                    found += step * (max(ends_of, key=up) + steep * abs(true[i + 1]))
            for j in (0, 1):
                rounded = cells.value_error(j, o, box)
                held = _over(keys[j][o], center, wide) + rounded
                apart = _over([a - b for a, b in zip(keys[j][o], values[j][o])], center, wide)
                found += weights[j] * (apart + rounded + 1.01 * 12 * unit * held)
            worst = max(worst, found if found.is_finite() else INF, key=up)
    return worst + read + cells.lost


def _turned(span: arb, moved: arb) -> list[arb]:
    """The ends of tanh within `moved` of an interval."""
    return [(span.lower() - moved).tanh(), (span.upper() + moved).tanh()]


def _shared(span: arb, moved: arb) -> arb:
    """`sup 1/cosh²` within `moved` of an interval."""
    near = (span.abs_lower() - moved).lower()
    return (1 / near.cosh() ** 2).upper() if near > 0 else arb(1)


def _polynomial(
    f: Mapping[Monomial, Fraction],
    level: Sequence[arb],
    swing: Sequence[arb],
    turn: Sequence[arb],
    middle: Sequence[arb],
    radius: Sequence[arb],
) -> arb:
    """`sup |f − A − B tanh φ|` over the box, with t = z − middle: `sup |B| sup |tanh φ − κφ| + sup |r|`."""
    m, reach, height = len(middle), _over(turn, middle, radius), _over(swing, middle, radius)
    square = [
        [_ball(f.get((min(i, j), max(i, j)), Fraction(0))) * (1 if i == j else arb(0.5)) for j in range(m)]
        for i in range(m)
    ]
    line = _row(f, m)
    own = [_at(line, middle) + sum((square[i][j] * middle[i] * middle[j] for i in range(m) for j in range(m)), arb(0))]
    own += [line[i + 1] + 2 * sum((square[i][j] * middle[j] for j in range(m)), arb(0)) for i in range(m)]
    b, s, a = ([_at(row, middle), *row[1:]] for row in (turn, swing, level))
    bent = [[(s[i + 1] * b[j + 1] + s[j + 1] * b[i + 1]) / 2 for j in range(m)] for i in range(m)]
    i, j = max(
        ((i, j) for i in range(m) for j in range(m)),
        key=lambda at: abs(float((bent[at[0]][at[1]] * radius[at[0]] * radius[at[1]]).mid())),
    )
    slope = (square[i][j] / bent[i][j]).mid() if not bent[i][j].contains(0) else arb(0)
    rest = abs(own[0] - a[0] - slope * s[0] * b[0])
    rest += sum(
        (abs(own[k + 1] - a[k + 1] - slope * (s[0] * b[k + 1] + b[0] * s[k + 1])) * radius[k] for k in range(m)), arb(0)
    )
    rest += sum(
        (abs(square[i][j] - slope * bent[i][j]) * radius[i] * radius[j] for i in range(m) for j in range(m)), arb(0)
    )
    reach, left = reach.upper(), 1 - slope
    if not reach <= 1:
        return height + abs(slope) * reach * height + rest
    high = abs(left * reach - reach**3 / 3)
    if left > 0 and left < reach * reach:
        high = max(high, 2 * left * left.sqrt() / 3, key=up)
    elif not (left <= 0 or left >= reach * reach):
        high = abs(left) * reach + reach**3 / 3
    return height * (high + 2 * reach**5 / 15) + rest
