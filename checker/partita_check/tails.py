"""Functions without a bound in L_p: f clipped at M, and a bound of the L_p norm of what is cut off, from the graph alone."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from flint import arb, arb_series

from partita_check.graph import Graph
from partita_check.limits import LogProduct, ball, powers_of, scaled_power
from partita_check.polynomials import INF

__all__ = ["clipped", "tail_norm"]

AFFINE = ("input", "const", "add", "sub", "neg", "sum", "mul", "div")


def clipped(graph: Graph, clip: float) -> Graph:
    """Every output clamped to [−clip, clip], also where it has a pole."""
    nodes, outputs = list(graph.nodes), list[int]()
    for k in graph.outputs:
        nodes.append(("clip", (k,), (-clip, clip)))
        outputs.append(len(nodes) - 1)
    return Graph(graph.inputs, tuple(nodes), tuple(outputs), graph.shape)


@dataclass(frozen=True)
class _Line:
    """w = slope·x + … in one variable: a lower bound of |slope|, whether 0 lies inside, the volume of the other axes."""

    slope: arb
    sides: int
    others: arb


def tail_norm(graph: Graph, box: Sequence[arb], sides: Sequence[arb], clip: float, p: arb) -> arb:
    """A bound of `‖(|f| − clip)₊‖_p` over the box; infinite where a term without a bound is not C·|u|^{−α} or C·log|u|.

    `(Σ_k s_k + b − M)₊ ≤ Σ_k (s_k − m)₊` with `m = (M − |b|)/K`. For `C|u|^{−α}` and `ρ = (C/m)^{1/α}` the integral over one side
    of 0 is `m^p ρ·Γ(1/α − p)Γ(p + 1)/(α·Γ(1/α + 1))`; for `C|log(c|u|^r)|` it is `e^{−m/(Cr)} c^{−1/r}(Cr)^p Γ(p + 1)`.
    """
    values, total = graph.all_values(box), arb(0)
    for output in graph.outputs:
        terms, bounded = list[tuple[arb, Fraction, _Line, LogProduct | None]](), arb(0)
        for k in _summands(graph, output):
            if values[k].is_finite():
                bounded += values[k].abs_upper()
                continue
            found = _singular(graph, values, box, sides, k)
            if found is None:
                return INF
            terms.append(found)
        if not terms:
            if not bounded <= clip:
                return INF
            continue
        cut = (arb(clip) - bounded) / len(terms)
        if not cut > 0:
            return INF
        total += sum((_tail(*term, cut.lower(), p, values) for term in terms), arb(0)) ** p
    return total ** (1 / p) if total > 0 else arb(0)


def _tail(
    size: arb, power: Fraction, line: _Line, log: LogProduct | None, cut: arb, p: arb, values: Sequence[arb]
) -> arb:
    if log is None:
        alpha = ball(power)
        if not (alpha * p < 1 and cut >= size):
            return INF
        reach = (size / cut) ** (1 / alpha)
        inside = cut**p * reach * (1 / alpha - p).gamma() * (p + 1).gamma() / (alpha * (1 / alpha + 1).gamma())
    else:
        r, top = ball(log.inner), values[log.argument].upper()
        if not (top.is_finite() and top > 0 and cut >= size * top.log()):
            return INF
        inside = (-cut / (size * r)).exp() * log.scale ** (-1 / r) * (size * r) ** p * (p + 1).gamma()
    return (inside * line.sides * line.others / line.slope).abs_upper() ** (1 / p)


def _summands(graph: Graph, start: int) -> list[int]:
    found, waiting = list[int](), [start]
    while waiting:
        k = waiting.pop()
        if graph.nodes[k][0] in ("add", "sub", "neg", "sum"):
            waiting += graph.nodes[k][1]
        else:
            found.append(k)
    return found


def _singular(
    graph: Graph, values: Sequence[arb], box: Sequence[arb], sides: Sequence[arb], k: int
) -> tuple[arb, Fraction, _Line, LogProduct | None] | None:
    """The size, power, line and logarithm of a product with one factor that has no bound."""
    parts = powers_of(graph.nodes, k, poles=True)
    if parts is None:
        return None
    size, base, alpha, log = arb(1), -1, Fraction(0), None
    for node, power in parts.items():
        value = values[node]
        if power > 0 and value.is_finite():
            size *= value.abs_upper() ** ball(power)
        elif power < 0 and value.is_finite() and value.abs_lower() > 0:
            size *= value.abs_lower() ** ball(power)
        elif base < 0 and power < 0 and value.is_finite():
            base, alpha = node, -power
        elif base < 0 and power == 1 and graph.nodes[node][0] == "log":
            argument = graph.nodes[node][1][0]
            inside = scaled_power(graph.nodes, argument)
            if inside is None:
                return None
            base, log = inside[1], LogProduct(inside[1], argument, Fraction(1), inside[2], inside[0], ())
        else:
            return None
    line = _line(graph, box, sides, base) if base >= 0 else None
    return None if line is None or not size > 0 else (size.abs_upper(), alpha, line, log)


def _line(graph: Graph, box: Sequence[arb], sides: Sequence[arb], base: int) -> _Line | None:
    needed, waiting = set[int](), [base]
    while waiting:
        k = waiting.pop()
        name, args, _ = graph.nodes[k]
        factors = args if name == "mul" else args[1:] if name == "div" else ()
        if name not in AFFINE or (factors and not any(graph.nodes[j][0] == "const" for j in factors)):
            return None
        if k not in needed:
            needed.add(k)
            waiting += args
    slopes, only = list[arb](), Graph(graph.inputs, graph.nodes[: base + 1], (base,), ())
    for i in range(len(box)):
        found = only.evaluate([arb_series([x, 1], 2) if i == j else x for j, x in enumerate(box)])[0]
        slopes.append(found[1] if isinstance(found, arb_series) else arb(0))
    moving = [i for i, s in enumerate(slopes) if not s.is_zero()]
    if len(moving) != 1 or not slopes[moving[0]].abs_lower() > 0:
        return None
    value = only.evaluate(list(box))[0]
    others = math.prod((side for i, side in enumerate(sides) if i != moving[0]), start=arb(1))
    one = value >= 0 or value <= 0
    return _Line(slopes[moving[0]].abs_lower(), 1 if one else 2, others)
