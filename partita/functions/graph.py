"""The expression graph, which defines f in a claim: a list of operations in single assignment form, with exact constants.

One walk over the list serves every interpretation: numbers (numpy, torch), enclosures of values (`Interval`), of values
with slopes (`Dual`) and by polynomials (`TaylorModel`). A constant is a float64 number and means
exactly its value; front ends write other numbers as sums and quotients of constants.
"""

import hashlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from partita.arithmetic import Basis, Dual, Interval, TaylorModel, TaylorModels
from partita.errors import DomainError, FormatError, ShapeError
from partita.functions.infix import infix
from partita.functions.limits import Limit, limits
from partita.functions.operations import OPERATIONS, Node, encode, is_count
from partita.functions.program import Linear, Step, program

__all__ = ["Graph", "GraphBuilder"]

MAX_NODES = 100_000
MAX_INPUTS = 100_000
MAX_RANK = 8
MAX_DEGREE = 64
_KEYS = {"inputs", "nodes", "outputs", "shape"}
_EXPECTED = {
    "graph": f"an object with the keys {sorted(_KEYS)}",
    "inputs": f"a whole number of inputs, at most {MAX_INPUTS}",
    "nodes": f"a list of at most {MAX_NODES} nodes",
    "outputs": "a list of at least one position of a node",
    "shape": "a list of whole numbers whose product is the number of outputs",
}


@dataclass(frozen=True)
class Graph:
    """f : ℝᵐ → ℝ^output_shape, m = num_inputs, as nodes that refer to earlier nodes; `outputs` in row-major order.

    Raises `FormatError` for unknown operations, wrong arities or parameters, references forward, non-finite constants.

    >>> builder = GraphBuilder(1)
    >>> graph = builder.finish([builder.add("sin", builder.add("input", parameters=(0,)))], ())
    >>> graph.infix(), graph.evaluate([[0.0]]).tolist()
    ('sin(x0)', [0.0])
    """

    num_inputs: int
    nodes: tuple[Node, ...]
    outputs: tuple[int, ...]
    output_shape: tuple[int, ...]

    def __post_init__(self) -> None:
        _require(is_count(self.num_inputs, MAX_INPUTS + 1), "inputs", self.num_inputs)
        _require(len(self.nodes) <= MAX_NODES, "nodes", f"{len(self.nodes)} of them")
        for position, node in enumerate(self.nodes):
            fault = node.fault(position, self.num_inputs)
            _require(not fault, f"node {position}", fault)
        exist = len(self.outputs) > 0 and all(is_count(k, len(self.nodes)) for k in self.outputs)
        _require(exist, "outputs", self.outputs)
        whole = len(self.output_shape) <= MAX_RANK and all(is_count(k, MAX_NODES + 1) for k in self.output_shape)
        _require(whole and math.prod(self.output_shape) == len(self.outputs), "shape", self.output_shape)

    @np.errstate(all="ignore")
    def evaluate(self, x: ArrayLike) -> NDArray[np.float64]:
        """f at the rows of x, (batch, m) → (batch, *output_shape); NaN and inf where f is undefined or overflows."""
        x = np.asarray(x, np.float64)
        self._check_columns(x.shape)
        values = self._walk("numpy", partial(list, np.ascontiguousarray(x.T)), np.float64)
        columns = [np.broadcast_to(value, x.shape[:1]) for value in values]
        return np.stack(columns, axis=1).reshape(x.shape[0], *self.output_shape)

    def evaluate_torch(self, z: torch.Tensor) -> torch.Tensor:
        """f at the rows of z in its dtype and on its device, (batch, m) → (batch, *output_shape); differentiable."""
        self._check_columns(tuple(z.shape))
        values = self._walk("torch", partial(z.unbind, 1), lambda v: torch.full((), v, dtype=z.dtype, device=z.device))
        columns = [value.expand(z.shape[0]) for value in values]
        return torch.stack(columns, dim=1).reshape(z.shape[0], *self.output_shape)

    @np.errstate(all="ignore")
    def enclose(self, lo: ArrayLike, hi: ArrayLike) -> Interval:
        """Enclosures (boxes, outputs) of f over the boxes lo ≤ x ≤ hi, (boxes, m).

        They hold f(x) for every x of the box at which f is defined; [-inf, inf] where f is undefined on all of it.
        """
        lo, hi = self._boxes(lo, hi)
        values = self._walk("enclose", partial(Interval.variables, lo, hi), Interval.constant, _undefined_stays)
        return Interval.stacked(values, lo.shape[1:])

    @np.errstate(all="ignore")
    def enclose_gradient(self, lo: ArrayLike, hi: ArrayLike) -> tuple[Interval, Interval]:
        """`enclose`, with slopes g (boxes, outputs, m): |f(x) - f(y)| ≤ sup |g|₂ |x - y|₂ where g is finite."""
        lo, hi = self._boxes(lo, hi)
        dim = self.num_inputs
        duals = self._walk(
            "enclose", partial(Dual.variables, lo, hi), partial(Dual.constant, dim=dim), _undefined_stays
        )
        return Dual.stacked(duals, lo.shape[1:], dim)

    @np.errstate(all="ignore")
    def taylor(self, centers: ArrayLike, radii: ArrayLike, degree: int) -> TaylorModels:
        """Polynomials with proved remainders on the boxes of centers c and radii r ≥ 0, (boxes, m), in exact arithmetic:
            |f(c + r ∘ t) - Σ_{|α| ≤ degree} coefficients[:, α] t^α| ≤ remainder   for every t ∈ [-1, 1]ᵐ

        The remainder is inf where f is not proved to be defined and bounded on the whole box. Raises `DomainError` for
        centers or radii that are not finite, radii < 0 and degrees outside 0, …, 64; `SizeError` for more than 100 000
        monomials.

        >>> builder = GraphBuilder(1)
        >>> graph = builder.finish([builder.add("exp", builder.add("input", parameters=(0,)))], ())
        >>> models = graph.taylor([[0.0]], [[0.5]], 2)
        >>> models.coefficients[0, :, 0].round(9).tolist(), bool(models.remainder[0, 0] <= 0.5**3 / 6 * 1.65)
        ([1.0, 0.5, 0.125], True)
        """
        centers, radii = self._boxes(centers, radii)
        if not (np.isfinite(centers).all() and np.isfinite(radii).all() and (radii >= 0.0).all()):
            raise DomainError(
                "Graph.taylor: found centers or radii that are NaN or infinite, or radii < 0; expected finite centers and radii ≥ 0"
            )
        if not is_count(degree, MAX_DEGREE + 1):
            raise DomainError(f"Graph.taylor: found the degree {degree!r}, expected an integer from 0 to {MAX_DEGREE}")
        basis, boxes = Basis.of(self.num_inputs, degree), centers.shape[1]
        variables = partial(TaylorModel.variables, basis, centers, radii)
        models = self._walk("enclose", variables, partial(TaylorModel.constant, basis), _undefined_stays)
        return TaylorModels.of(models, boxes)

    def to_json(self) -> dict[str, Any]:
        """The graph as JSON values; floats as hexadecimal strings, so nothing is rounded."""
        nodes = [node.to_json() for node in self.nodes]
        return {
            "inputs": self.num_inputs,
            "nodes": nodes,
            "outputs": list(self.outputs),
            "shape": list(self.output_shape),
        }

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> "Graph":
        """The graph that `to_json` wrote. Raises `FormatError` for anything else."""
        _require(
            isinstance(data, Mapping) and set(data) == _KEYS, "graph", list(data) if isinstance(data, Mapping) else data
        )
        for key in ("nodes", "outputs", "shape"):
            _require(isinstance(data[key], list) and len(data[key]) <= MAX_NODES, key, type(data[key]).__name__)
        nodes = tuple(Node.from_json(node) for node in data["nodes"])
        return Graph(data["inputs"], nodes, tuple(data["outputs"]), tuple(data["shape"]))

    @cached_property
    def sha256(self) -> str:
        """The hash of the canonical JSON: sorted keys, no blanks, ASCII."""
        text = json.dumps(self.to_json(), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode("ascii")).hexdigest()

    def infix(self, variables: Sequence[str] | None = None) -> str:
        """The outputs as text, "a, b" for a vector and "a, b; c, d" for tokens, that `parse` reads back.

        Raises `ExpressionLimitError` when shared nodes, written out, exceed 100 000 characters.
        """
        names = [f"x{i}" for i in range(self.num_inputs)] if variables is None else list(variables)
        return infix(self.nodes, self.outputs, self.output_shape, names)

    def _walk(
        self,
        rule: str,
        variables: Callable[[], Sequence[Any]],
        constant: Callable[[float], Any],
        after: Callable[[str, list[Any], Any], Any] | None = None,
    ) -> list[Any]:
        """The outputs under one interpretation; values are freed after their last use."""
        program, after, found = self._program, after if self._is_partial else None, self.limits
        inputs, values = variables(), dict[int, Any]()
        for step in program:
            if isinstance(step.work, Linear):
                sums = _LINEAR[rule](list(map(values.__getitem__, step.work.terms)), step.work.matrix)
                values.update(zip(step.work.results, sums, strict=True))
            else:
                node = self.nodes[step.work]
                if node.operation == "input":
                    value = inputs[int(node.parameters[0])]
                elif node.operation == "const":
                    value = constant(node.parameters[0])
                else:
                    arguments = list(map(values.__getitem__, node.arguments))
                    value = getattr(OPERATIONS[node.operation], rule)(*arguments, *node.parameters)
                    value = after(node.operation, arguments, value) if after else value
                    if found and step.work in found:
                        value = found[step.work].at(rule, value, values)
                values[step.work] = value
            for k in step.released:
                del values[k]
        return list(map(values.__getitem__, self.outputs))

    @cached_property
    def limits(self) -> Mapping[int, Limit]:
        """The nodes that have a limit where their parts have none, by position: what f means there (`partita.functions.limits`)."""
        return limits(self.nodes)

    @property
    def num_steps(self) -> int:
        """Array operations of one evaluation, layers of a network counted as one each."""
        return len(self._program)

    @cached_property
    def _is_partial(self) -> bool:
        return any(OPERATIONS[node.operation].partial for node in self.nodes)

    @cached_property
    def _program(self) -> tuple[Step, ...]:
        return program(self.nodes, self.outputs, {k: limit.reads for k, limit in self.limits.items()})

    def _check_columns(self, shape: tuple[int, ...]) -> None:
        if len(shape) != 2 or shape[1] != self.num_inputs:
            raise ShapeError(f"Graph: found an array of shape {shape}, expected (batch, {self.num_inputs})")

    def _boxes(self, lo: ArrayLike, hi: ArrayLike) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """The ends of the boxes, axis by axis: (m, boxes)."""
        lo, hi = np.broadcast_arrays(np.asarray(lo, np.float64), np.asarray(hi, np.float64))
        self._check_columns(lo.shape)
        return np.ascontiguousarray(lo.T), np.ascontiguousarray(hi.T)


class GraphBuilder:
    """Collects nodes, each distinct one once, and returns the graph in the order of a walk from the outputs.

    Graphs with the same nodes are therefore equal, in whatever order they were built.
    """

    def __init__(self, num_inputs: int) -> None:
        self.num_inputs = num_inputs
        self.nodes: list[Node] = []
        self._positions: dict[tuple[Any, ...], int] = {}

    def add(self, operation: str, *arguments: int, parameters: tuple[float | int, ...] = ()) -> int:
        """The position of this node, new or shared."""
        key = (operation, arguments, tuple(map(encode, parameters)))
        if key not in self._positions:
            self._positions[key] = len(self.nodes)
            self.nodes.append(Node(operation, arguments, parameters))
        return self._positions[key]

    def finish(self, outputs: Sequence[int], output_shape: tuple[int, ...]) -> Graph:
        """The graph of the nodes that the outputs need."""
        order: dict[int, int] = {}
        stack = [(k, False) for k in reversed(outputs)]
        while stack:
            k, arguments_done = stack.pop()
            if k in order:
                continue
            if arguments_done:
                order[k] = len(order)
            else:
                stack += [(k, True), *((a, False) for a in reversed(self.nodes[k].arguments))]
        old = [self.nodes[k] for k in order]
        nodes = tuple(Node(n.operation, tuple(order[a] for a in n.arguments), n.parameters) for n in old)
        return Graph(self.num_inputs, nodes, tuple(order[k] for k in outputs), output_shape)


def _numpy_sums(terms: list[Any], matrix: NDArray[np.float64]) -> list[Any]:
    return list(matrix @ np.stack(np.broadcast_arrays(*terms)).reshape(len(terms), -1))


def _torch_sums(terms: list[torch.Tensor], matrix: NDArray[np.float64]) -> list[torch.Tensor]:
    stacked = torch.stack(torch.broadcast_tensors(*terms)).reshape(len(terms), -1)
    return list(torch.as_tensor(matrix, dtype=stacked.dtype, device=stacked.device) @ stacked)


def _enclosed_sums(terms: list[Any], matrix: NDArray[np.float64]) -> list[Any]:
    sums: list[Any] = type(terms[0]).weighted_sums(terms, matrix)
    return sums


_LINEAR: Mapping[str, Callable[..., list[Any]]] = {
    "numpy": _numpy_sums,
    "torch": _torch_sums,
    "enclose": _enclosed_sums,
}


def _undefined_stays(operation: str, arguments: list[Any], value: Any) -> Any:
    """A function of an undefined value is undefined; only `where` may ignore an undefined branch."""
    deciding = arguments[:1] if operation == "where" else arguments
    for argument in deciding:
        value = value.forget(argument.is_entire)
    return value


def _require(condition: bool, part: str, found: Any) -> None:
    if not condition:
        expected = _EXPECTED.get(part, "a node as docs/format.md describes it")
        raise FormatError(f"graph, {part}: found {str(found)[:200]}, expected {expected}")
