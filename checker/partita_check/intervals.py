"""Values and slopes of a graph over a box, as intervals with exact ends.

A ball is wide by its radius, which has 30 bits: good near a point, poor on a long interval, where it forgets that exp is
positive. Here every operation works on the two ends, in ball arithmetic at these points, and is rounded outward. So functions that
rise or fall have exact ranges. Two operations are in no file: `linear`, an affine function, and `meet`, a value that is known to
lie between two numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from flint import arb, arb_series

from partita_check.clock import clock
from partita_check.graph import EVERY, NAN, Graph

__all__ = ["UNKNOWN", "Interval", "Slopes", "gradient", "is_known", "values_over"]

Interval = tuple[arb, arb]
Slopes = Mapping[int, Interval]  # along the axes that a value depends on
UNKNOWN: Interval = (arb("-inf"), arb("inf"))  # perhaps not even defined
ZERO, ONE, BOTH, RISE = ((arb(a), arb(b)) for a, b in ((0, 0), (1, 1), (-1, 1), (0, 1)))


def is_known(x: Interval) -> bool:
    return bool(x[0].is_finite() and x[1].is_finite())


def _outward(a: arb, b: arb) -> Interval:
    low, high = a.lower(), b.upper()
    return (low, high) if low.is_finite() and high.is_finite() else UNKNOWN


def _ball(x: Interval) -> arb:
    return x[0].union(x[1]) if is_known(x) else NAN


def _hull(*parts: Interval) -> Interval:
    return (min(p[0] for p in parts), max(p[1] for p in parts)) if all(map(is_known, parts)) else UNKNOWN


def _add(x: Interval, y: Interval) -> Interval:
    return _outward(x[0] + y[0], x[1] + y[1])


def _neg(x: Interval) -> Interval:
    return -x[1], -x[0]


def _mul(x: Interval, y: Interval) -> Interval:
    if not (is_known(x) and is_known(y)):
        return UNKNOWN
    if x[0] == x[1]:
        x, y = y, x
    if y[0] == y[1]:
        c = y[0]
        return _outward(x[0] * c, x[1] * c) if c >= 0 else _outward(x[1] * c, x[0] * c)
    products = [a * b for a in x for b in y]
    return min(p.lower() for p in products), max(p.upper() for p in products)


def _recip(x: Interval) -> Interval:
    return _outward(1 / x[1], 1 / x[0]) if is_known(x) and (x[0] > 0 or x[1] < 0) else UNKNOWN


def _power(x: Interval, n: int) -> Interval:
    if not is_known(x):
        return UNKNOWN
    if n <= 0:
        return _recip(_power(x, -n)) if n else ONE
    ends = [end**n for end in x]
    if n % 2 or x[0] >= 0:
        return _outward(ends[0], ends[1])
    return _outward(ends[1], ends[0]) if x[1] <= 0 else (arb(0), max(end.upper() for end in ends))


def _rising(name: str) -> Callable[[Interval], Interval]:
    """A function that rises, by its values at the ends."""

    def found(x: Interval) -> Interval:
        return _outward(getattr(x[0], name)(), getattr(x[1], name)()) if is_known(x) else UNKNOWN

    return found


def _from(name: str, least: int) -> Callable[[Interval], Interval]:
    """sqrt and acosh: 0 to the left of where they are defined, as in `graph.py`."""

    def found(x: Interval) -> Interval:
        ends = [getattr(end, name)() if end > least else arb(0) for end in x]
        return _outward(ends[0], ends[1]) if is_known(x) else UNKNOWN

    return found


def _log(x: Interval) -> Interval:
    return _outward(x[0].log(), x[1].log()) if is_known(x) and x[0] > 0 else UNKNOWN


def _atanh(x: Interval) -> Interval:
    return _outward(x[0].atanh(), x[1].atanh()) if is_known(x) and x[0] > -1 and x[1] < 1 else UNKNOWN


def _sigmoid(x: Interval) -> Interval:
    return _outward(1 / (1 + (-x[0]).exp()), 1 / (1 + (-x[1]).exp())) if is_known(x) else UNKNOWN


def _holds(x: Interval, first: arb, period: arb) -> bool:
    """Whether an interval may hold one of the points `first + k·period`."""
    least, most = ((x[0] - first) / period).lower().ceil(), ((x[1] - first) / period).upper().floor()
    return not least > most


def _wave(shift: int) -> Callable[[Interval], Interval]:
    """cos (0) and sin (1), which is cos moved by π/2."""

    def found(x: Interval) -> Interval:
        if not is_known(x):
            return UNKNOWN
        pi, ends = arb.pi(), [end.sin() if shift else end.cos() for end in x]
        low = arb(-1) if _holds(x, pi * (2 + shift) / 2, 2 * pi) else min(end.lower() for end in ends)
        high = arb(1) if _holds(x, pi * shift / 2, 2 * pi) else max(end.upper() for end in ends)
        return low, high

    return found


def _tan(x: Interval) -> Interval:
    if not is_known(x) or _holds(x, arb.pi() / 2, arb.pi()):
        return UNKNOWN
    return _outward(x[0].tan(), x[1].tan())


def _abs(x: Interval) -> Interval:
    if not is_known(x) or x[0] >= 0:
        return x
    return _neg(x) if x[1] <= 0 else (arb(0), max(-x[0], x[1]))


def _clamp(x: Interval, low: arb, high: arb) -> Interval:
    return (min(max(x[0], low), high), min(max(x[1], low), high)) if is_known(x) else UNKNOWN


def _clip(x: Interval, low: arb, high: arb) -> Interval:
    """Also where x is not known: nothing is claimed about points where f is undefined."""
    return _clamp(x, low, high) if is_known(x) else (low, high)


def _meet(x: Interval, low: arb, high: arb) -> Interval:
    found = (max(x[0], low), min(x[1], high)) if is_known(x) else (low, high)
    return found if found[0] <= found[1] else (low, high)


_cos, _sin, _sqrt = _wave(0), _wave(1), _from("sqrt", 0)
_UNARY: dict[str, Callable[[Interval], Interval]] = {
    "neg": _neg,
    "log": _log,
    "sqrt": _sqrt,
    "sin": _sin,
    "cos": _cos,
    "tan": _tan,
    "acosh": _from("acosh", 1),
    "atanh": _atanh,
    "sigmoid": _sigmoid,
    "abs": _abs,
    "relu": lambda x: (max(x[0], arb(0)), max(x[1], arb(0))) if is_known(x) else UNKNOWN,
    "floor": lambda x: _outward(x[0].floor(), x[1].floor()) if is_known(x) else UNKNOWN,
    **{name: _rising(name) for name in ("exp", "atan", "tanh", "asinh", "erf")},
}


def _square(x: Interval) -> Interval:
    return _power(x, 2)


def _plus(x: Interval, c: int) -> Interval:
    return _add(x, (arb(c), arb(c)))


# φ'(x), from x and φ(x)
_SLOPES: dict[str, Callable[[Interval, Interval], Interval]] = {
    "neg": lambda x, y: (arb(-1), arb(-1)),
    "exp": lambda x, y: y,
    "log": lambda x, y: _recip(x),
    "sqrt": lambda x, y: _recip(_add(y, y)) if x[0] > 0 else UNKNOWN,
    "sin": lambda x, y: _cos(x),
    "cos": lambda x, y: _neg(_sin(x)),
    "tan": lambda x, y: _plus(_square(y), 1),
    "atan": lambda x, y: _recip(_plus(_square(x), 1)),
    "tanh": lambda x, y: _neg(_plus(_square(y), -1)),
    "asinh": lambda x, y: _recip(_sqrt(_plus(_square(x), 1))),
    "acosh": lambda x, y: _recip(_sqrt(_plus(_square(x), -1))) if x[0] > 1 else UNKNOWN,
    "atanh": lambda x, y: _recip(_neg(_plus(_square(x), -1))),
    "sigmoid": lambda x, y: _neg(_add(_square(_add(y, (arb(-0.5), arb(-0.5)))), (arb(-0.25), arb(-0.25)))),
    "erf": lambda x, y: _mul(_UNARY["exp"](_neg(_square(x))), _outward(2 / arb.pi().sqrt(), 2 / arb.pi().sqrt())),
    "abs": lambda x, y: ONE if x[0] >= 0 else (arb(-1), arb(-1)) if x[1] <= 0 else BOTH,
    "relu": lambda x, y: ONE if x[0] >= 0 else ZERO if x[1] <= 0 else RISE,
    "floor": lambda x, y: ZERO if is_known(y) and y[0] == y[1] else UNKNOWN,
}


def values_over(graph: Graph, box: Sequence[Interval]) -> list[Interval]:
    """The values of all nodes."""
    return [value for value, _ in _walk(graph, box, ())]


def gradient(graph: Graph, box: Sequence[Interval], axes: Sequence[int]) -> tuple[Interval, Slopes]:
    """The value of the first output over a box, and its slopes along some axes.

    Between any two points of the box f moves by no more than slopes of these intervals allow: at a kink both sides count, and at a
    jump a slope is unknown.
    """
    value, slopes = list(_walk(graph, box, axes))[graph.outputs[0]]
    return value, {i: slopes.get(i, ZERO) for i in axes}


def _walk(graph: Graph, box: Sequence[Interval], axes: Sequence[int]) -> Iterator[tuple[Interval, Slopes]]:
    found = list[tuple[Interval, Slopes]]()
    for k, (name, args, params) in enumerate(graph.nodes):
        if k % EVERY == 0:
            clock.tick()
        if name == "input":
            (i,) = params
            found.append((box[i], {i: ONE} if i in axes else {}))
        elif name == "const":
            found.append(((arb(params[0]), arb(params[0])), {}))
        else:
            values, inner = [found[a][0] for a in args], [found[a][1] for a in args]
            value = _value(name, values, params, len(set(args)) < len(args))
            moving = {i for slopes in inner for i in slopes}
            slopes: Slopes = {i: _slope(name, values, [s.get(i, ZERO) for s in inner], params, value) for i in moving}
            limit = graph.limits.get(k)
            if limit is not None and not is_known(value):
                value, slopes = _limit(limit, found, moving)
            found.append((value, slopes))
        yield found[-1]


def _value(name: str, x: list[Interval], params: tuple[Any, ...], same: bool) -> Interval:
    if name in _UNARY:
        return _UNARY[name](x[0])
    if name == "linear":
        total = (params[-1].lower(), params[-1].upper())
        for w, part in zip(params, x):
            total = _add(total, _mul(part, (w.lower(), w.upper())))
        return total
    if name in ("add", "sum"):
        total = x[0]
        for part in x[1:]:
            total = _add(total, part)
        return total
    if name == "sub":
        return _add(x[0], _neg(x[1]))
    if name == "mul":
        return _square(x[0]) if same else _mul(*x)
    if name == "div":
        return _mul(x[0], _recip(x[1]))
    if name == "pow":
        return _power(x[0], params[0])
    if name in ("clamp", "clip", "meet"):
        return {"clamp": _clamp, "clip": _clip, "meet": _meet}[name](x[0], arb(params[0]), arb(params[1]))
    if not all(map(is_known, x)):
        return UNKNOWN
    if name == "where":
        return x[1] if x[0][0] >= 0 else x[2] if x[0][1] < 0 else _hull(x[1], x[2])
    choose = {"min": min, "max": max}[name]
    return choose(x[0][0], x[1][0]), choose(x[0][1], x[1][1])


def _slope(name: str, x: list[Interval], d: list[Interval], params: tuple[Any, ...], value: Interval) -> Interval:
    """The slope of one node along one axis, from the slopes of its arguments."""
    if name == "meet":  # the same function
        return d[0]
    if not is_known(value):
        return UNKNOWN
    if name in _SLOPES:
        return _mul(_SLOPES[name](x[0], value), d[0])
    if name == "linear":
        return _value("linear", d, (*params[:-1], arb(0)), False)
    if name in ("add", "sum", "sub"):
        return _value(name, d, (), False)
    if name == "mul":
        return _add(_mul(d[0], x[1]), _mul(x[0], d[1]))
    if name == "div":
        return _mul(_add(d[0], _neg(_mul(value, d[1]))), _recip(x[1]))
    if name == "pow":
        n = params[0]
        return _mul(_mul(_power(x[0], n - 1), (arb(n), arb(n))), d[0]) if n else ZERO
    if name in ("clamp", "clip"):
        low, high = params
        inside, outside = x[0][0] >= low and x[0][1] <= high, x[0][1] <= low or x[0][0] >= high
        return d[0] if inside else ZERO if outside else _hull(d[0], ZERO)
    if name == "where":
        return d[1] if x[0][0] >= 0 else d[2] if x[0][1] < 0 else UNKNOWN
    first, second = (0, 1) if name == "max" else (1, 0)
    if x[first][0] >= x[second][1]:
        return d[0]
    return d[1] if x[first][1] <= x[second][0] else _hull(d[0], d[1])


def _limit(limit: Any, found: list[tuple[Interval, Slopes]], axes: set[int]) -> tuple[Interval, Slopes]:
    """A limit where the operations have no value, by balls."""
    plain = limit.value(NAN, [_ball(value) for value, _ in found])
    value, slopes = (plain.lower(), plain.upper()) if plain.is_finite() else UNKNOWN, dict[int, Interval]()
    for i in axes:
        series = [arb_series([_ball(v), _ball(s[i])], 2) if i in s else _ball(v) for v, s in found]
        tilted = limit.value(arb_series([NAN, NAN], 2), series)
        slope = tilted[1] if isinstance(tilted, arb_series) else NAN
        slopes[i] = (slope.lower(), slope.upper()) if slope.is_finite() else UNKNOWN
    return value, slopes
