"""Functions made of affine pieces, `f = max G − max H`, found in exact arithmetic."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

from partita_check.clock import clock
from partita_check.graph import Graph

__all__ = ["affine_pieces"]

MOST = 200
MOST_HELD, MOST_BITS = 100_000, 10_000  # rows of all nodes together, and binary digits of a number
Row = tuple[Fraction, ...]  # the constant, then the slopes
Pieces = tuple[list[Row], list[Row]]


def _plus(a: Sequence[Row], b: Sequence[Row]) -> list[Row]:
    if len(a) * len(b) > MOST:
        raise OverflowError("too many pieces")
    return list(dict.fromkeys(tuple(x + y for x, y in zip(p, q)) for p in a for q in b))


def _digits(pieces: Pieces) -> int:
    return max(
        max(x.numerator.bit_length(), x.denominator.bit_length()) for rows in pieces for row in rows for x in row
    )


def _maximum(a: Pieces, b: Pieces) -> Pieces:
    """`max(g₁ − h₁, g₂ − h₂) = max(g₁ + h₂, g₂ + h₁) − (h₁ + h₂)`, and maxima of maxima are maxima."""
    return list(dict.fromkeys(_plus(a[0], b[1]) + _plus(b[0], a[1]))), _plus(a[1], b[1])


def _minus(a: Pieces) -> Pieces:
    return a[1], a[0]


def _times(a: Pieces, factor: Fraction) -> Pieces:
    g, h = a if factor >= 0 else _minus(a)
    return [tuple(abs(factor) * x for x in row) for row in g], [tuple(abs(factor) * x for x in row) for row in h]


def affine_pieces(graph: Graph) -> Pieces | None:
    """G and H of a scalar graph, or None if it is not made of affine pieces, of too many, or of too long numbers."""
    zero, values, held = (Fraction(0),) * (graph.inputs + 1), list[Pieces](), 0

    def number(a: Pieces) -> Fraction | None:
        return a[0][0][0] - a[1][0][0] if len(a[0]) == len(a[1]) == 1 and a[0][0][1:] == a[1][0][1:] else None

    def constant(c: float) -> Pieces:
        return [(Fraction(c), *zero[1:])], [zero]

    try:
        for name, args, params in graph.nodes:
            clock.tick()
            a = [values[k] for k in args]
            if name == "input":
                found = [tuple(Fraction(k == params[0] + 1) for k in range(len(zero)))], [zero]
            elif name == "const":
                found = constant(params[0])
            elif name in ("add", "sum", "sub"):
                found = a[0]
                for b in a[1:]:
                    g, h = b if name != "sub" else _minus(b)
                    found = _plus(found[0], g), _plus(found[1], h)
            elif name == "mul" and (factor := number(a[0])) is not None:
                found = _times(a[1], factor)
            elif name in ("mul", "div") and (factor := number(a[1])) is not None:
                found = _times(a[0], factor if name == "mul" else 1 / factor)
            elif name in ("neg", "abs", "relu"):
                minus = _minus(a[0])
                found = minus if name == "neg" else _maximum(a[0], minus if name == "abs" else constant(0.0))
            elif name in ("max", "min"):
                found = _maximum(*a) if name == "max" else _minus(_maximum(_minus(a[0]), _minus(a[1])))
            elif name == "clamp":
                low, high = _maximum(a[0], constant(params[0])), constant(-params[1])
                found = _minus(_maximum(_minus(low), high))
            else:
                return None
            values.append(found)
            held += len(found[0]) + len(found[1])
            if held > MOST_HELD or _digits(found) > MOST_BITS:
                return None
    except (OverflowError, ZeroDivisionError):
        return None
    return values[graph.outputs[0]]
