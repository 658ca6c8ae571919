"""The operations of the expression graph, one entry each.

An entry gives the arity, the types of the constant parameters and the meaning for numpy arrays, for torch tensors,
and for enclosures, where one rule serves `Interval` and `Dual` alike. `partial` marks operations that are undefined at
some real arguments; there [-inf, inf] also stands for "undefined".
"""

import math
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import reduce
from types import MappingProxyType
from typing import Any

import numpy as np
import scipy
import torch

from partita.arithmetic.interval import product_of_nodes
from partita.errors import FormatError

__all__ = ["MAX_EXPONENT", "OPERATIONS", "Node", "Operation", "encode", "is_count"]


MAX_EXPONENT = 64


@dataclass(frozen=True)
class Operation:
    """One operation: `arity` arguments (None: one or more), then the constant `parameters`, each an int or a float."""

    arity: int | None
    numpy: Callable[..., Any]
    torch: Callable[..., Any]
    enclose: Callable[..., Any]
    parameters: tuple[type, ...] = ()
    partial: bool = False


def _leaf(kind: type) -> Operation:
    """An operation without arguments, whose value the walk over the graph supplies."""
    return Operation(0, _supplied, _supplied, _supplied, parameters=(kind,))


def _supplied(*_: Any) -> Any:
    raise NotImplementedError("inputs and constants are supplied by Graph, not computed")


def _both(arity: int, rule: Callable[..., Any], enclose: Callable[..., Any] | None = None, **options: Any) -> Operation:
    """An operation that reads the same in numpy and torch, and in enclosures unless they have a rule of their own."""
    return Operation(arity, rule, rule, enclose or rule, **options)


def _method(
    name: str, numpy: Callable[..., Any], torch: Callable[..., Any], *, arity: int = 1, **options: Any
) -> Operation:
    """An operation that enclosures provide as the method `name`."""
    alone = arity == 1 and not options.get("parameters")
    enclose = operator.methodcaller(name) if alone else lambda x, *rest: getattr(x, name)(*rest)
    return Operation(arity, numpy, torch, enclose, **options)


def _sum(*terms: Any) -> Any:
    return reduce(operator.add, terms)


def _numpy_where(c: Any, a: Any, b: Any) -> Any:
    """a where c ≥ 0, b where c < 0, NaN where c is NaN."""
    return np.where(c >= 0, a, np.where(c < 0, b, np.nan))


def _torch_where(c: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.where(c >= 0, a, torch.where(c < 0, b, torch.full_like(c, torch.nan)))


OPERATIONS: Mapping[str, Operation] = MappingProxyType(
    {
        "input": _leaf(int),
        "const": _leaf(float),
        "add": _both(2, operator.add),
        "sub": _both(2, operator.sub),
        "mul": _both(2, operator.mul, product_of_nodes),
        "div": _both(2, operator.truediv, partial=True),
        "neg": _both(1, operator.neg),
        "pow": _method("pow_int", lambda x, k: np.power(x, float(k)), torch.pow, parameters=(int,), partial=True),
        "sum": Operation(None, _sum, _sum, _sum),
        "exp": _method("exp", np.exp, torch.exp),
        "log": _method("log", np.log, torch.log, partial=True),
        "sqrt": _method("sqrt", np.sqrt, torch.sqrt, partial=True),
        "sin": _method("sin", np.sin, torch.sin),
        "cos": _method("cos", np.cos, torch.cos),
        "tan": _method("tan", np.tan, torch.tan, partial=True),
        "atan": _method("atan", np.arctan, torch.atan),
        "tanh": _method("tanh", np.tanh, torch.tanh),
        "asinh": _method("asinh", np.arcsinh, torch.asinh),
        "acosh": _method("acosh", np.arccosh, torch.acosh, partial=True),
        "atanh": _method("atanh", np.arctanh, torch.atanh, partial=True),
        "sigmoid": _method("sigmoid", lambda x: scipy.special.expit(x), torch.sigmoid),
        "erf": _method("erf", lambda x: scipy.special.erf(x), torch.erf),
        "abs": _method("absolute", np.abs, torch.abs),
        "min": _method("minimum", np.minimum, torch.minimum, arity=2),
        "max": _method("maximum", np.maximum, torch.maximum, arity=2),
        "relu": _method("relu", lambda x: np.maximum(x, 0.0), torch.relu),
        "floor": _method("floor", np.floor, torch.floor),
        "clamp": _method("clamp", np.clip, torch.clamp, parameters=(float, float)),
        "where": _method("where_sign", _numpy_where, _torch_where, arity=3),
    }
)


@dataclass(frozen=True)
class Node:
    """One operation, the positions of its arguments in the list of nodes, and its constant parameters."""

    operation: str
    arguments: tuple[int, ...] = ()
    parameters: tuple[float | int, ...] = ()

    def fault(self, position: int, num_inputs: int) -> str | None:
        """What is wrong with this node at this position of a graph, or None."""
        operation = OPERATIONS.get(self.operation)
        if operation is None:
            return f"the unknown operation {self.operation!r}"
        if len(self.arguments) != operation.arity and (operation.arity is not None or not self.arguments):
            return f"{self.operation} of {len(self.arguments)} arguments"
        if not all(is_count(k, position) for k in self.arguments):
            return f"{self.operation} of {self.arguments}, which are not all earlier nodes"
        if tuple(map(type, self.parameters)) != operation.parameters:
            return f"{self.operation} with the parameters {self.parameters}"
        if not all(map(math.isfinite, self.parameters)):
            return f"{self.operation} with a parameter that is not finite"
        return self._fault_of_value(num_inputs)

    def _fault_of_value(self, num_inputs: int) -> str | None:
        if self.operation == "input" and not is_count(self.parameters[0], num_inputs):
            return f"input {self.parameters[0]} of {num_inputs}"
        if self.operation == "pow" and abs(self.parameters[0]) > MAX_EXPONENT:
            return f"the exponent {self.parameters[0]}, beyond ±{MAX_EXPONENT}"
        if self.operation == "clamp" and self.parameters[0] > self.parameters[1]:
            return f"clamp to [{self.parameters[0]}, {self.parameters[1]}], which is empty"
        return None

    def to_json(self) -> dict[str, Any]:
        """The node as JSON values, floats in hexadecimal."""
        return {"op": self.operation, "args": list(self.arguments), "params": [encode(p) for p in self.parameters]}

    @staticmethod
    def from_json(data: Any) -> "Node":
        """The node that `to_json` wrote, its parts typed; `Graph` checks how it fits. Raises `FormatError`."""
        if not isinstance(data, Mapping) or set(data) != {"op", "args", "params"}:
            raise FormatError(
                f"graph: found the node {str(data)[:200]}, expected an object with the keys op, args, params"
            )
        if not (isinstance(data["op"], str) and isinstance(data["args"], list) and isinstance(data["params"], list)):
            raise FormatError(
                f"graph: found the node {str(data)[:200]}, expected a text op and lists of args and params"
            )
        return Node(data["op"], tuple(data["args"]), tuple(map(_decode, data["params"])))


def is_count(value: Any, end: int) -> bool:
    """Whether value is one of the integers 0, …, end - 1."""
    return type(value) is int and 0 <= value < end


def encode(parameter: float | int) -> str | int:
    """A float as its exact hexadecimal text, an integer as itself."""
    return parameter.hex() if isinstance(parameter, float) else parameter


def _decode(text: Any) -> float | int:
    """The parameter that `encode` wrote; one number has one text."""
    if type(text) is int:
        return text
    try:
        value = float.fromhex(text)
    except (TypeError, ValueError, OverflowError):
        value = math.nan
    if not math.isfinite(value) or value.hex() != text:
        raise FormatError(
            f"graph: found the parameter {str(text)[:60]!r}, expected an integer or float.hex() of a finite number"
        )
    return value
