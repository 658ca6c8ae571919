"""Torch functions and modules as graphs: run once on tensors that remember what was done to them, then compared with the function.

Every number of a `Traced` tensor is a node of a graph under construction. Two rows go through together: each must come out as the
same graph of its own row, which shows that rows do not see each other. What cannot be said as a graph (randomness, values that
steer control flow, numpy code, unknown operators) is refused with the reason.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_any, tree_map

from partita.errors import NotTraceableError, PartitaError, UnsupportedError
from partita.functions.graph import Graph, GraphBuilder
from partita.functions.operations import Node
from partita.functions.torch_operators import COMPARISONS, LOGIC, MOVES, RULES
from partita.functions.torch_rules import Rules
from partita.geometry.domains import Array

__all__ = ["compare", "trace"]

_ROWS = 2
_AGREE = {torch.float64: 1e-9, torch.float32: 1e-5}  # of the largest value


class Traced(torch.Tensor):
    """A tensor without data: `positions` says which node each number is."""

    positions: torch.Tensor
    rules: Rules

    @staticmethod
    def of(positions: torch.Tensor, rules: Rules, dtype: torch.dtype) -> Traced:
        made = torch.Tensor._make_wrapper_subclass(Traced, positions.shape, strides=positions.stride(), dtype=dtype)
        made.positions, made.rules = positions, rules
        return made

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"Traced{tuple(self.shape)}"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        return _apply(func, args, kwargs or {})


class _Watch(TorchDispatchMode):
    """Sees the operators that touch no traced tensor too: those that draw random numbers are refused."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags:
            raise UnsupportedError(f"it draws random numbers ({func.name()}); call .eval() on modules with dropout")
        if tree_any(_is_traced, (args, kwargs)):
            return _apply(func, args, kwargs or {})
        return func(*args, **(kwargs or {}))


def _is_traced(x: Any) -> bool:
    return isinstance(x, Traced)


def _apply(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """One operator on arguments of which at least one is traced."""
    name = operator.overloadpacket.__name__
    first = _first_traced((*args, *kwargs.values()))
    rules, kwargs = first.rules, {k: v for k, v in kwargs.items() if k not in _NO_MEANING}
    if name in ("_to_copy", "to"):
        return _cast(first, kwargs.get("dtype") or first.dtype)
    if name.endswith("_") and (name[:-1] in RULES or name[:-1] in _WRITES):
        return _written(_of_truths(name[:-1], args), args, kwargs, rules)
    if name in MOVES:
        return _moved(operator, args, kwargs, first)
    if name not in RULES or "out" in kwargs:
        raise UnsupportedError(f"it calls {operator.name()}, which has no meaning as a graph here")
    name, dtype = _of_truths(name, args), kwargs.pop("dtype", None)
    if dtype is not None and not dtype.is_floating_point:
        raise UnsupportedError(f"it asks {operator.name()} for {dtype}")
    result = RULES[name](rules, *(_operand(a, rules, name, i) for i, a in enumerate(args)), **kwargs)
    kind = torch.bool if name in COMPARISONS | LOGIC else torch.float64 if first.dtype == torch.bool else first.dtype
    made = tree_map(lambda p: Traced.of(p, rules, kind), result)
    if name in ("max", "min") and operator._overloadname == "dim":
        return made, Traced.of(torch.full_like(result, -1), rules, torch.int64)
    return made


def _of_truths(name: str, args: tuple[Any, ...]) -> str:
    """What an operator is when all it is given are truth values: torch's True + True is True, not 2."""
    values = args[1:3] if name == "where" else args[:2] if name in _OF_TRUTHS else args[:1]
    if not all(isinstance(x, torch.Tensor) and x.dtype == torch.bool for x in values):
        return name
    if name in _NOT_OF_TRUTHS:
        raise UnsupportedError(f"it calls {name} on truth values; use &, | and ~, or .double() first")
    return _OF_TRUTHS.get(name, name)


def _operand(x: Any, rules: Rules, name: str, place: int) -> Any:
    """Positions for tensors and for numbers that stand for tensors; plain arguments as they are."""
    condition = name in LOGIC or (name == "where" and place == 0)
    if isinstance(x, Traced):
        if x.dtype == torch.int64:
            raise UnsupportedError("it uses the place of a maximum or minimum")
        if condition and x.dtype != torch.bool:
            raise UnsupportedError("it uses numbers as truth values; compare them with something")
        return x.positions if x.dtype != torch.bool or condition else rules.each(rules.number, x.positions)
    if isinstance(x, torch.Tensor):
        return rules.constants(torch.where(x, 1.0, -1.0) if condition else x)
    number = isinstance(x, (int, float)) and not isinstance(x, bool)
    return rules.constants(float(x)) if number and place < _TENSORS.get(name, 0) else x


_NO_MEANING = frozenset(["memory_format", "layout", "device", "pin_memory", "non_blocking"])
_WRITES = frozenset(["copy", "fill", "zero"])
_OF_TRUTHS = {
    **dict.fromkeys(["add", "maximum", "fmax"], "logical_or"),
    **dict.fromkeys(["mul", "minimum", "fmin"], "logical_and"),
}
_NOT_OF_TRUTHS = frozenset(
    ["where", "amax", "amin", "max", "min", "zeros_like", "ones_like", "full_like", "empty_like"]
)
# how many leading arguments of an operator may be numbers that mean tensors
_TENSORS = {
    **dict.fromkeys(
        [
            "add",
            "sub",
            "rsub",
            "mul",
            "div",
            "pow",
            "gt",
            "ge",
            "lt",
            "le",
            "minimum",
            "maximum",
            "heaviside",
            "hypot",
            "copy",
            "fill",
        ],
        2,
    ),
    **dict.fromkeys(["clamp", "clamp_min", "clamp_max", "where"], 3),
}


def _cast(x: Traced, dtype: torch.dtype) -> Traced:
    if x.dtype == torch.bool and dtype.is_floating_point:
        return Traced.of(x.rules.each(x.rules.number, x.positions), x.rules, dtype)
    if dtype != x.dtype and not (dtype.is_floating_point and x.dtype.is_floating_point):
        raise UnsupportedError(f"it turns {x.dtype} into {dtype}")
    return Traced.of(x.positions.clone(), x.rules, dtype)


def _moved(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any], first: Traced) -> Any:
    """Data that only changes place: the operator itself, on positions."""
    rules = first.rules
    indexing = operator.overloadpacket.__name__ in ("index", "index_select")

    def place(x: Any) -> Any:
        if not isinstance(x, torch.Tensor) or (indexing and not isinstance(x, Traced)):
            return x
        if (x.dtype == torch.bool) != (first.dtype == torch.bool):
            raise UnsupportedError("it puts truth values and numbers side by side; use .double() first")
        if isinstance(x, Traced):
            return x.positions
        return rules.constants(torch.where(x, 1.0, -1.0) if x.dtype == torch.bool else x)

    if indexing and tree_any(_is_traced, args[1:]):
        raise UnsupportedError("it selects entries by a value of its input")
    result = operator(*tree_map(place, args), **kwargs)
    return tree_map(lambda p: Traced.of(p, rules, first.dtype) if isinstance(p, torch.Tensor) else p, result)


def _written(name: str, args: tuple[Any, ...], kwargs: dict[str, Any], rules: Rules) -> Any:
    """Operators that write into their first argument; views of positions share memory as views of numbers do."""
    goal = args[0]
    if not isinstance(goal, Traced):
        raise UnsupportedError("it writes its input into an ordinary tensor; make that one by zeros_like, or use stack")
    if (goal.dtype == torch.bool) != (name in COMPARISONS | LOGIC):
        raise UnsupportedError("it writes numbers over truth values, or truth values over numbers")
    if name in _WRITES:
        new = rules.constants(0.0) if name == "zero" else _operand(args[1], rules, name, 1)
    else:
        new = RULES[name](rules, *(_operand(a, rules, name, i) for i, a in enumerate(args)), **kwargs)
    goal.positions.copy_(new)
    return goal


def _first_traced(values: Any) -> Traced:
    found: list[Traced] = []
    tree_map(lambda x: found.append(x) if isinstance(x, Traced) else None, values)
    return max(found, key=lambda t: t.dtype != torch.bool)


def trace(
    function: Callable[..., Any], shapes: Sequence[tuple[int, ...]], *, dtype: torch.dtype = torch.float64
) -> Graph:
    """The graph of a function of batches, `(batch, *shape)` per argument, or a NotTraceableError that says why there is none."""
    m = sum(math.prod(s) for s in shapes)
    rules = Rules(GraphBuilder(_ROWS * m))
    inputs = torch.tensor([rules.add("input", parameters=(i,)) for i in range(_ROWS * m)]).reshape(_ROWS, m)
    parts = torch.split(inputs, [math.prod(s) for s in shapes], dim=1)
    given = [Traced.of(p.reshape(_ROWS, *s), rules, dtype) for p, s in zip(parts, shapes)]
    label = getattr(function, "__name__", type(function).__name__)
    try:
        with torch.no_grad(), _Watch():
            answer = function(*given)
        return _rows(answer, rules, m)
    except NotTraceableError:
        raise
    except UnsupportedError as error:
        raise NotTraceableError(f"{label} is no graph: {error}.") from None
    except Exception as error:  # whatever the function does when it is not given numbers
        if ".numpy()" in str(error) or "__array__" in str(error):
            raise NotTraceableError(f"{label} leaves torch for numpy, where it cannot be followed.") from None
        reason = f"{type(error).__name__}: {error}".split("\n")[0][:200]
        raise NotTraceableError(f"{label} cannot be followed ({reason}).") from None


def _rows(answer: Any, rules: Rules, m: int) -> Graph:
    """The graph of each row, which must be one and the same."""
    if not isinstance(answer, Traced):
        raise UnsupportedError(
            f"its answer, a {type(answer).__name__}, does not come from its input by torch operations"
        )
    if answer.ndim == 0 or len(answer) != _ROWS:
        raise UnsupportedError(f"it answers with shape {tuple(answer.shape)} for a batch of {_ROWS}")
    positions = _cast(answer, torch.float64).positions if answer.dtype == torch.bool else answer.positions
    graphs = []
    for row in range(_ROWS):
        found = rules.builder.finish(positions[row].reshape(-1).tolist(), tuple(positions.shape[1:]))
        nodes = [_renamed(node, row * m, m) for node in found.nodes]
        if not any(node.operation == "input" for node in nodes):
            raise UnsupportedError("its answer does not depend on its input")
        graphs.append(Graph(m, tuple(nodes), found.outputs, found.output_shape))
    if graphs[0] != graphs[1]:
        raise UnsupportedError("it treats the rows of a batch differently")
    return graphs[0]


def _renamed(node: Node, start: int, m: int) -> Node:
    if node.operation != "input":
        return node
    index = int(node.parameters[0]) - start
    if not 0 <= index < m:
        raise UnsupportedError("a row's answer depends on the other rows of its batch")
    return Node("input", (), (index,))


def compare(graph: Graph, answers: Array, points: Array, *, dtype: torch.dtype = torch.float64) -> str | None:
    """Where a graph and a function's answers `(n, out)` at points differ by more than rounding can explain, or None."""
    try:
        here = graph.enclose(points, points)
    except PartitaError as error:
        return str(error)
    expected = graph.evaluate(points).reshape(len(points), -1)
    if expected.shape != answers.shape:
        return f"the trace answers with shape {expected.shape[1:]}, the function with {answers.shape[1:]}"
    allowed = _AGREE[dtype] * np.abs(answers).max(axis=0) + 16 * np.where(here.is_entire, 0.0, here.radius)
    off = np.abs(expected - answers)
    bad = np.flatnonzero(~(off <= allowed).all(axis=1))
    if not bad.size:
        return None
    i = int(bad[0])
    return f"at {points[i].tolist()} the function says {answers[i].tolist()} and its trace {expected[i].tolist()}"
