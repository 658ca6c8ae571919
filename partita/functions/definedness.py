"""Where f is defined: proved over boxes by interval arithmetic, or from the constraints of a region by exact polynomials."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction

import numpy as np
import scipy

from partita.functions.graph import Graph, GraphBuilder
from partita.functions.regions import Piece, Region, halved
from partita.geometry.domains import Array, Box

__all__ = ["has_values", "is_bounded", "undefined_root"]

Terms = dict[tuple[int, ...], Fraction]

_BOXES = 20_000
_NARROWEST = 2.0**-16  # of the longest side: boxes this small around a pole are not halved again
_MOST_TERMS = 400
_LEAST = {"sqrt": 0.0, "log": math.ulp(0.0), "acosh": 1.0}  # of the arguments for which there is a value
_NEGLIGIBLE = 1e-9  # of its size, by which the argument of a square root may be negative: what rounding makes of 0


def is_bounded(graph: Graph, box: Box) -> bool:
    """Whether f is proved to be defined and bounded on the whole box."""
    lo, hi, looked = box.lo.ravel()[None], box.hi.ravel()[None], 0
    while len(lo) and looked < _BOXES // 4:
        middle = 0.5 * lo + 0.5 * hi
        radius = np.maximum(hi - middle, middle - lo) * (1 + 1e-15)
        rest = ~np.isfinite(graph.taylor(middle, radius, 0).remainder).all(axis=0)
        looked += len(lo)
        if rest.any() and (hi - lo)[rest].max(axis=0).max() <= _NARROWEST * box.sides.max():
            return False
        lo, hi = halved(lo[rest], hi[rest], box.sides)
    return not len(lo)


def has_values(graph: Graph, box: Box) -> bool:
    """Whether all roots, logarithms and acosh of f are seen to have a value on the whole box.

    Proofs about f alone need not know: they count a root without a value as 0, or claim nothing there.
    """
    asked = [(node.arguments[0], _LEAST[node.operation]) for node in graph.nodes if node.operation in _LEAST]
    if not asked:
        return True
    arguments = Graph(graph.num_inputs, graph.nodes, tuple(k for k, _ in asked), (len(asked),))
    found = arguments.enclose(box.lo.reshape(1, -1), box.hi.reshape(1, -1)).lo[0]
    return bool((found >= [least for _, least in asked]).all())


def undefined_root(graph: Graph, region: Region) -> str:
    """Why a square root or an acosh of f is not proved to be defined on the region; an empty text if all are.

    The argument `a` of a root, or that of an acosh less 1, is at least 0 where intervals say so, and on all of a piece where
    `a + Σ λ_k g_k` is at least 0 for some `λ_k ≥ 0` and the piece's constraints `g_k ≤ 0`. Branches of `where` may be undefined
    where they are not chosen, so such functions are left to the claim, which says what it takes an undefined root to be.
    """
    if any(node.operation == "where" for node in graph.nodes):
        return ""
    for node in graph.nodes:
        if node.operation in ("sqrt", "acosh"):
            argument = _part(graph, node.arguments[0], less=1.0 if node.operation == "acosh" else 0.0)
            for piece in region.pieces:
                place = None if _follows(argument, piece) else _negative_place(argument, piece)
                if place is not None:
                    shown = np.round(place, 6).tolist()
                    what = f"the square root of {argument.infix()[:120]}" if node.operation == "sqrt" else "an acosh"
                    return f"{what} is not proved to be defined near {shown}"
    return ""


def _part(graph: Graph, output: int, less: float = 0.0) -> Graph:
    """The graph of one node, less a number."""
    builder, places = GraphBuilder(graph.num_inputs), list[int]()
    for node in graph.nodes[: output + 1]:
        places.append(builder.add(node.operation, *(places[k] for k in node.arguments), parameters=node.parameters))
    found = places[output]
    return builder.finish([builder.add("sub", found, builder.add("const", parameters=(less,))) if less else found], ())


def _negative_place(argument: Graph, piece: Piece) -> Array | None:
    """The middle of a box of the piece on which the argument may be negative; None if there is none."""
    box = piece.box
    lo, hi, looked = box.lo.ravel()[None], box.hi.ravel()[None], 0
    size = max(
        float(np.abs(argument.enclose(p, p).hi).max()) for p in (box.corners(64), (box.lo + box.hi).reshape(1, -1) / 2)
    )
    while len(lo):
        kept = ~piece.outside(lo, hi)
        lo, hi = lo[kept], hi[kept]
        kept = ~(argument.enclose(lo, hi).lo[:, 0] >= -_NEGLIGIBLE * size)
        lo, hi, looked = lo[kept], hi[kept], looked + len(kept)
        if looked > _BOXES:
            out: Array = 0.5 * lo[0] + 0.5 * hi[0]
            return out
        lo, hi = halved(lo, hi, box.sides)
    return None


def _follows(argument: Graph, piece: Piece) -> bool:
    """Whether `argument ≥ 0` follows from the constraints of the piece, all of them polynomials: exact, up to roundings."""
    wanted = _expanded(argument)
    parts = [p for p in (_expanded(c.graph) for c in piece.constraints) if p is not None]
    if wanted is None or not parts:
        return False
    zero = (0,) * argument.num_inputs
    names = sorted({e for p in (wanted, *parts) for e in p if e != zero})
    matrix = np.array([[float(p.get(e, 0)) for p in parts] for e in names])
    weights, _ = scipy.optimize.nnls(matrix, -np.array([float(wanted.get(e, 0)) for e in names]))
    reach = np.maximum(np.abs(piece.box.lo), np.abs(piece.box.hi)).ravel()
    total, size = dict(wanted), Fraction(0)
    for weight, part in zip(weights.tolist(), parts):
        for e, value in part.items():
            total[e] = total.get(e, Fraction(0)) + Fraction(weight) * value
    for e, value in wanted.items():
        size += abs(value) * _monomial(reach, e)
    least = total.pop(zero, Fraction(0)) - sum((abs(v) * _monomial(reach, e) for e, v in total.items()), Fraction(0))
    return bool(least >= -Fraction(_NEGLIGIBLE) * size)


def _monomial(reach: Sequence[float] | Array, exponents: tuple[int, ...]) -> Fraction:
    out = Fraction(1)
    for r, k in zip(reach, exponents):
        out *= Fraction(float(r)) ** k
    return out


def _expanded(graph: Graph) -> Terms | None:
    """The polynomial that a graph is, exactly; None if it is none, or has too many terms."""
    zero, values = (0,) * graph.num_inputs, list[Terms | None]()
    for node in graph.nodes:
        inner = [values[k] for k in node.arguments]
        values.append(
            None
            if None in inner
            else _operated(node.operation, [p for p in inner if p is not None], node.parameters, zero)
        )
    return values[graph.outputs[0]]


def _operated(operation: str, inner: list[Terms], parameters: Sequence[float], zero: tuple[int, ...]) -> Terms | None:
    if operation == "input":
        axis = int(parameters[0])
        return {tuple(int(i == axis) for i in range(len(zero))): Fraction(1)}
    if operation == "const":
        return {zero: Fraction(parameters[0])}
    if operation in ("add", "sum"):
        return _combined([(Fraction(1), p) for p in inner])
    if operation == "sub":
        return _combined([(Fraction(1), inner[0]), (Fraction(-1), inner[1])])
    if operation == "neg":
        return _combined([(Fraction(-1), inner[0])])
    if operation == "mul":
        return _product(*inner)
    if operation == "div" and set(inner[1]) == {zero} and inner[1][zero]:
        return _combined([(1 / inner[1][zero], inner[0])])
    if operation == "pow" and 0 <= int(parameters[0]) <= 8:
        out: Terms | None = {zero: Fraction(1)}
        for _ in range(int(parameters[0])):
            out = None if out is None else _product(out, inner[0])
        return out
    return None


def _combined(parts: Sequence[tuple[Fraction, Terms]]) -> Terms:
    out: Terms = {}
    for factor, part in parts:
        for e, value in part.items():
            out[e] = out.get(e, Fraction(0)) + factor * value
    return {e: v for e, v in out.items() if v}


def _product(a: Terms, b: Terms) -> Terms | None:
    if len(a) * len(b) > _MOST_TERMS:
        return None
    out: Terms = {}
    for (e, x), (f, y) in ((p, q) for p in a.items() for q in b.items()):
        key = tuple(i + j for i, j in zip(e, f))
        out[key] = out.get(key, Fraction(0)) + x * y
    return {e: v for e, v in out.items() if v}
