"""Graph nodes for numbers that torch computes: rules for scalars, and their application to arrays of node positions.

A Boolean is a node c that means "c ≥ 0".
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from partita.errors import UnsupportedError
from partita.functions.branches import branch
from partita.functions.graph import MAX_NODES, GraphBuilder
from partita.functions.operations import MAX_EXPONENT

__all__ = ["Positions", "Rules", "axes_of"]

Positions = torch.Tensor  # int64, positions of nodes


class Rules:
    """The rules with the builder they add nodes to."""

    def __init__(self, builder: GraphBuilder) -> None:
        self.builder = builder

    def add(self, operation: str, *arguments: int, parameters: tuple[float | int, ...] = ()) -> int:
        if len(self.builder.nodes) > 2 * MAX_NODES:
            raise UnsupportedError(f"it has more than {MAX_NODES:,} scalar operations")
        return self.builder.add(operation, *arguments, parameters=parameters)

    def constant(self, value: float) -> int:
        return self.add("const", parameters=(float(value),))

    def constants(self, values: Any) -> Positions:
        """Positions of constants for an array of numbers."""
        array = np.asarray(values.detach().cpu() if isinstance(values, torch.Tensor) else values, dtype=np.float64)
        if not np.isfinite(array).all():
            raise UnsupportedError("it has a constant that is not finite")
        flat = [self.constant(v) for v in array.ravel().tolist()]
        return torch.tensor(flat, dtype=torch.int64).reshape(array.shape)

    def value(self, node: int) -> float | None:
        """The number a node is, if it is a constant."""
        found = self.builder.nodes[node]
        return float(found.parameters[0]) if found.operation == "const" else None

    def each(self, rule: Callable[..., int], *arrays: Positions) -> Positions:
        """A rule for scalars applied to arrays that broadcast."""
        spread = torch.broadcast_tensors(*arrays)
        flat = [rule(*nodes) for nodes in zip(*(a.reshape(-1).tolist() for a in spread))]
        return torch.tensor(flat, dtype=torch.int64).reshape(spread[0].shape)

    def reduce(
        self, x: Positions, dims: Sequence[int] | int | None, keep: bool, rule: Callable[[list[int]], int]
    ) -> Positions:
        """A rule for lists applied along the given axes."""
        axes = axes_of(x, dims)
        rest = [i for i in range(x.ndim) if i not in axes]
        lists = x.permute(*rest, *axes).reshape(*(x.shape[i] for i in rest), -1)
        flat = [rule(row) for row in lists.reshape(-1, lists.shape[-1]).tolist()]
        shape = [1 if i in axes else n for i, n in enumerate(x.shape)] if keep else [x.shape[i] for i in rest]
        return torch.tensor(flat, dtype=torch.int64).reshape(shape)

    # ---- scalars ----------------------------------------------------------------------------------

    def total(self, nodes: list[int]) -> int:
        if not nodes:
            return self.constant(0.0)
        return nodes[0] if len(nodes) == 1 else self.add("sum", *nodes)

    def scaled(self, factor: int, x: int) -> int | None:
        """factor · x, None where one of them is the constant 0: what a sum does not need."""
        return None if 0.0 in (self.value(factor), self.value(x)) else self.product(factor, x)

    def product(self, a: int, b: int) -> int:
        """a · b; a factor 1 is left out."""
        return b if self.value(a) == 1.0 else a if self.value(b) == 1.0 else self.add("mul", a, b)

    def dot(self, a: list[int], b: list[int]) -> int:
        return self.total([p for p in map(self.scaled, a, b) if p is not None])

    def power(self, base: int, exponent: int) -> int:
        value = self.value(exponent)
        if value is not None and value == int(value) and abs(value) <= MAX_EXPONENT:
            return self.add("pow", base, parameters=(int(value),))
        if value is not None and abs(value) == 0.5:
            root = self.add("sqrt", base)
            return root if value > 0 else self.add("pow", root, parameters=(-1,))
        return self.add("exp", self.add("mul", exponent, self.add("log", base)))

    def negated(self, condition: int) -> int:
        return self.add("where", condition, self.constant(-1.0), self.constant(1.0))

    def choose(self, condition: int, yes: int, no: int) -> int:
        """yes where the condition holds; a negated condition swaps the branches instead."""
        node = self.builder.nodes[condition]
        if node.operation == "where" and [self.value(k) for k in node.arguments[1:]] == [-1.0, 1.0]:
            return branch(self.builder, node.arguments[0], no, yes)
        return branch(self.builder, condition, yes, no)

    def number(self, condition: int) -> int:
        """1 where the condition holds, else 0."""
        return self.choose(condition, self.constant(1.0), self.constant(0.0))

    def gelu(self, x: int, approximate: str) -> int:
        """x Φ(x), or its tanh form."""
        if approximate == "none":
            inner = self.add("erf", self.add("mul", x, self.constant(math.sqrt(0.5))))
        else:
            cube = self.add("mul", self.constant(0.044715), self.add("pow", x, parameters=(3,)))
            inner = self.add("tanh", self.add("mul", self.constant(math.sqrt(2 / math.pi)), self.add("add", x, cube)))
        half = self.add("mul", self.constant(0.5), x)
        return self.add("mul", half, self.add("add", self.constant(1.0), inner))

    def leaky(self, x: int, slope: float) -> int:
        """max(x, slope·x) for slopes up to 1, min beyond."""
        other = self.add("mul", self.constant(slope), x)
        return self.add("max" if slope <= 1 else "min", x, other)

    def clamp(self, x: int, least: int | None, most: int | None) -> int:
        low = None if least is None else self.value(least)
        high = None if most is None else self.value(most)
        if low is not None and high is not None and low <= high:
            return self.add("clamp", x, parameters=(low, high))
        x = x if least is None else self.add("max", x, least)
        return x if most is None else self.add("min", x, most)

    def sign(self, x: int) -> int:
        not_positive = self.add("where", self.add("neg", x), self.constant(0.0), self.constant(1.0))
        return self.add("where", x, not_positive, self.constant(-1.0))

    def smooth_softplus(self, x: int, beta: float) -> int:
        """ln(1 + e^{βx})/β = −ln σ(−βx)/β."""
        inside = self.add("log", self.add("sigmoid", self.product(self.constant(-beta), x)))
        return self.add("neg", inside) if beta == 1 else self.add("div", inside, self.constant(-beta))

    def softplus(self, x: int, beta: float, threshold: float) -> int:
        """ln(1 + e^{βx})/β, and x itself where βx > threshold, as torch computes it: a jump of e^{−threshold}/β."""
        left = self.add("sub", self.constant(threshold), self.product(self.constant(beta), x))
        return self.add("where", left, self.smooth_softplus(x, beta), x)

    def elu(self, x: int, alpha: float, scale: float, input_scale: float) -> int:
        """x above 0, α(eˣ − 1) below."""
        below = self.add("sub", self.add("exp", self.product(self.constant(input_scale), x)), self.constant(1.0))
        both = self.add("where", x, x, self.product(self.constant(alpha), below))
        return self.product(self.constant(scale), both)

    def hard_sigmoid(self, x: int) -> int:
        """clamp(x + 3, 0, 6)/6."""
        raised = self.add("clamp", self.add("add", x, self.constant(3.0)), parameters=(0.0, 6.0))
        return self.add("div", raised, self.constant(6.0))

    def half_of_exponentials(self, operation: str, x: int) -> int:
        """(eˣ ± e⁻ˣ)/2."""
        both = self.add(operation, self.add("exp", x), self.add("exp", self.add("neg", x)))
        return self.add("div", both, self.constant(2.0))

    def heaviside(self, x: int, at_zero: int) -> int:
        not_positive = self.add("where", self.add("neg", x), at_zero, self.constant(1.0))
        return self.add("where", x, not_positive, self.constant(0.0))

    def softmax(self, row: list[int]) -> list[int]:
        """1/Σ_k e^{x_k − x_i}: differences, so that enclosures stay narrow."""
        out = []
        for x in row:
            terms = [self.constant(1.0) if k == x else self.add("exp", self.add("sub", k, x)) for k in row]
            out.append(self.add("div", self.constant(1.0), self.total(terms)))
        return out

    def along(self, x: Positions, dim: int, rule: Callable[[list[int]], list[int]]) -> Positions:
        """A rule from lists to lists of the same length, along one axis."""
        moved = x.movedim(dim, -1)
        rows = [rule(row) for row in moved.reshape(-1, moved.shape[-1]).tolist()]
        return torch.tensor(rows, dtype=torch.int64).reshape(moved.shape).movedim(-1, dim)

    def matmul(self, a: Positions, b: Positions) -> Positions:
        """Products over the last axis of a and the last but one of b, batched."""
        lead = torch.broadcast_shapes(a.shape[:-2], b.shape[:-2])
        left, right = a.expand(*lead, *a.shape[-2:]), b.expand(*lead, *b.shape[-2:]).transpose(-1, -2)
        shape = (*lead, a.shape[-2], b.shape[-1])
        rows, columns = left.reshape(-1, *left.shape[-2:]).tolist(), right.reshape(-1, *right.shape[-2:]).tolist()
        flat = [self.dot(r, c) for block, other in zip(rows, columns) for r in block for c in other]
        return torch.tensor(flat, dtype=torch.int64).reshape(shape)


def axes_of(x: Positions, dims: Sequence[int] | int | None) -> list[int]:
    """The axes meant by torch's `dim`: all of them for None or an empty list."""
    given = range(x.ndim) if dims is None or (not isinstance(dims, int) and not len(dims)) else dims
    return sorted({d % x.ndim for d in ([given] if isinstance(given, int) else given)}) if x.ndim else []
