"""A head with few keys as an expression: what is proved about expressions then holds for the stored head in exact arithmetic."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

import numpy as np

from partita.errors import UnsupportedError
from partita.functions.graph import Graph, GraphBuilder
from partita.geometry.envelopes import Rows
from partita.heads.grid_head import GridHead
from partita.heads.head import FoldedHead
from partita.heads.scattered_head import ScatteredHead
from partita.proofs.soft_maximum import exact

__all__ = ["MOST_KEYS", "head_graph", "minus"]

MOST_KEYS = 8  # every two of which have a node of their own: enclosing 16 keys in two variables takes minutes


def head_graph(head: FoldedHead) -> Graph:
    """The head with its stored numbers, in exact arithmetic: `V_0(z) + Σ_j (V_j(z) − V_0(z))/(1 + Σ_{k≠j} exp(s_k(z) − s_j(z)))`.

    Scores of keys with one temperature differ by affine functions of z, whose coefficients are sums and products of stored numbers.
    They enter as they are, each as a sum of floats. Every denominator is at least 1.

    Args:
        head: a grid head or a scattered head with at most 8 keys, its values constant or affine.

    Raises:
        UnsupportedError: another head, more keys, or a coefficient that overflows float64.

    >>> import torch
    >>> centers, values = torch.tensor([[-1.0], [1.0]]), torch.tensor([[-1.0], [1.0]])
    >>> graph = head_graph(ScatteredHead(centers, 1.0, values, input_shapes=((1,),), output_shape=()))
    >>> bool(abs(graph.evaluate([[0.3]])[0] - np.tanh(0.3)) < 1e-15)
    True
    """
    if not isinstance(head, GridHead | ScatteredHead) or head.num_keys > MOST_KEYS:
        raise UnsupportedError(
            f"a {type(head).__name__} with {head.num_keys:,} keys is too large an expression; expected a grid head or a scattered "
            f"head with at most {MOST_KEYS} keys."
        )
    centers, rates, powers, values, slopes = _stored(head)
    builder = GraphBuilder(head.dimension)
    z = [builder.add("input", parameters=(i,)) for i in range(head.dimension)]
    # s_j(z) = a_j·z + b_j, less R|z|²/2, which all of them have
    tilts, levels = centers * rates, (rates[0] * powers - (rates * centers * centers).sum(axis=1)) / 2

    def lead(k: int, j: int) -> int:
        return _affine(builder, z, tilts[k] - tilts[j], levels[k] - levels[j])

    weights = []
    for j in range(1, len(centers)):
        if len(centers) == 2:  # whose slope can be enclosed where an exponential overflows
            weights.append(builder.add("sigmoid", lead(1, 0)))
            continue
        others = [builder.add("exp", lead(k, j)) for k in range(len(centers)) if k != j]
        one = builder.add("const", parameters=(1.0,))
        weights.append(builder.add("div", one, builder.add("sum", one, *others)))
    outputs = []
    for o in range(values.shape[1]):
        terms = [_affine(builder, z, slopes[0, o], values[0, o])]
        for j, weight in enumerate(weights, start=1):
            step = _affine(builder, z, slopes[j, o] - slopes[0, o], values[j, o] - values[0, o])
            terms.append(builder.add("mul", step, weight))
        outputs.append(builder.add("sum", *terms) if len(terms) > 1 else terms[0])
    return builder.finish(outputs, head.output_shape)


def minus(one: Graph, other: Graph) -> Graph:
    """The difference of two functions with the same inputs and outputs."""
    builder = GraphBuilder(one.num_inputs)
    ends = []
    for graph in (one, other):
        places = list[int]()
        for node in graph.nodes:
            arguments = (places[k] for k in node.arguments)
            places.append(builder.add(node.operation, *arguments, parameters=node.parameters))
        ends.append([places[k] for k in graph.outputs])
    return builder.finish([builder.add("sub", a, b) for a, b in zip(*ends)], one.output_shape)


def _stored(head: GridHead | ScatteredHead) -> tuple[Rows, Rows, Rows, Rows, Rows]:
    """Centers `(N, m)`, rates `(m,)`, powers `(N,)`, values at z = 0 `(N, out)` and their slopes `(N, out, m)`, exactly."""
    m, rates = head.dimension, exact(head.inverse_temperature)
    if isinstance(head, GridHead):
        axes = [exact(axis) for axis in head.axes]
        centers = np.stack([a.ravel() for a in np.meshgrid(*axes, indexing="ij")], axis=1)
        powers = np.full(len(centers), Fraction(0))
        about = centers if head.origin is None else np.broadcast_to(exact(head.origin), centers.shape)
    else:
        centers, rates = exact(head.centers), np.broadcast_to(rates, m)
        powers = np.full(len(centers), Fraction(0)) if head.powers is None else exact(head.powers)
        about = centers
    values = exact(head.values)
    slopes = np.full((*values.shape, m), Fraction(0)) if head.value_slopes is None else exact(head.value_slopes)
    return centers, rates, powers, values - (slopes * about[:, None]).sum(axis=2), slopes


def _affine(builder: GraphBuilder, z: Sequence[int], slopes: Rows, constant: Fraction) -> int:
    """`slopes·z + constant`."""
    terms = [
        term
        for node, slope in zip(z, slopes)
        for part in _floats(slope)
        for term in [builder.add("mul", builder.add("const", parameters=(part,)), node)]
    ]
    terms += [builder.add("const", parameters=(part,)) for part in _floats(constant)]
    if not terms:
        return builder.add("const", parameters=(0.0,))
    return terms[0] if len(terms) == 1 else builder.add("sum", *terms)


def _floats(number: Fraction) -> list[float]:
    """Floats that add up to a number whose denominator is a power of two."""
    parts = []
    while number:
        try:
            part = float(number)
        except OverflowError:
            part = 0.0
        if not part:
            raise UnsupportedError("a difference of stored numbers leaves the range of float64. Rescale the variables.")
        parts.append(part)
        number -= Fraction(part)
    return parts
