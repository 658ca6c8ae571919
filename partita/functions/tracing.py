"""Torch functions and modules as graphs: run once on tensors that record what is done to them, then compared with the function.

Every number of a `Traced` tensor is a node of a graph under construction. Two rows go through together: each must come out as the
same graph of its own row, which shows that rows do not see each other. What a graph cannot express (randomness, control flow that
depends on values, numpy code, casts that round, unknown operators) is refused with the reason. A refusal counts even if the
function catches it.

The graph is the function in exact arithmetic: the rounding of operations in the dtype of the input is not part of it. Rounding to a
narrower dtype is; a graph cannot express it, so it is refused. Torch itself decides which dtype an operation computes in.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import reduce
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_any, tree_flatten, tree_map

from partita.errors import NotTraceableError, PartitaError, UnsupportedError
from partita.functions.graph import Graph, GraphBuilder
from partita.functions.operations import Node
from partita.functions.torch_operators import COMPARISONS, LOGIC, MOVES, RULES, UNROUNDED, WHOLE
from partita.functions.torch_rules import Rules
from partita.geometry.domains import Array

__all__ = ["TRACED_ROWS", "compare", "trace"]

TRACED_ROWS = 2
_AGREE = {torch.float64: 1e-12, torch.float32: 1e-5}  # of the largest value
_PLACE, _UNWRITTEN = -1, -2  # positions of numbers that no node stands for
_UNREADABLE = {_PLACE: "it uses the index of a maximum or minimum", _UNWRITTEN: "it reads memory before writing to it"}


class _Run:
    """One trace: the rules, the dtype of the input, and the first refusal."""

    def __init__(self, rules: Rules, dtype: torch.dtype) -> None:
        self.rules, self.dtype = rules, dtype
        self.refusal: Exception | None = None

    @contextmanager
    def noting(self) -> Iterator[None]:
        """Remembers the first exception inside; the function may catch it, the trace does not forget it."""
        try:
            yield
        except Exception as error:
            self.refusal = self.refusal or error
            raise


class Traced(torch.Tensor):
    """A tensor without data: `positions` says which node each number is, `most` bounds the numbers of an integer tensor."""

    positions: torch.Tensor
    run: _Run
    most: int

    @staticmethod
    def of(positions: torch.Tensor, run: _Run, dtype: torch.dtype, most: int = 1) -> Traced:
        made = torch.Tensor._make_wrapper_subclass(Traced, positions.shape, strides=positions.stride(), dtype=dtype)
        made.positions, made.run, made.most = positions, run, most
        return made

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"Traced{tuple(self.shape)}"

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Every function and method of torch comes by here first, also those that only fail, such as `numpy()`."""
        with _traced_in((args, kwargs))[0].run.noting(), torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        return _apply(func, args, kwargs or {})


class _Watch(TorchDispatchMode):
    """Sees the operators that touch no traced tensor too: those that draw random numbers are refused."""

    def __init__(self, run: _Run) -> None:
        TorchDispatchMode.__init__(self)
        self.run = run

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with self.run.noting():
            if torch.Tag.nondeterministic_seeded in func.tags:
                raise UnsupportedError(f"it draws random numbers ({func.name()}); call .eval() on modules with dropout")
            if tree_any(_is_traced, (args, kwargs)):
                return _apply(func, args, kwargs or {})
            return func(*args, **(kwargs or {}))


def _is_traced(x: Any) -> bool:
    return isinstance(x, Traced)


def _traced_in(values: Any) -> list[Traced]:
    return [x for x in tree_flatten(values)[0] if isinstance(x, Traced)]


def _apply(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """One operator on arguments of which at least one is traced."""
    name = operator.overloadpacket.__name__
    first = max(_traced_in((args, kwargs)), key=lambda t: t.dtype != torch.bool)
    kwargs = {k: v for k, v in kwargs.items() if k not in _NO_MEANING}
    if name == "_to_copy":
        return _cast(first, kwargs.get("dtype") or first.dtype)
    if name in MOVES:
        return _moved(operator, args, kwargs, first)
    if name.endswith("_") and name[:-1] in _WRITES:
        return _overwritten(name[:-1], args, first.run)
    writes = name.endswith("_") and name[:-1] in RULES
    name = name[:-1] if writes else name
    if name not in RULES or "out" in kwargs:
        raise UnsupportedError(f"it calls {operator.name()}, which is not supported")
    name = _of_truths(name, args)
    results, dtypes, most = _computed(operator, name, args, kwargs, first.run, writes=writes)
    if writes:
        return _into(args[0], results[0], dtypes[0], most)
    made = [Traced.of(p, first.run, dtype, most) for p, dtype in zip(results, dtypes)]
    if name in ("max", "min") and operator._overloadname == "dim":
        made.append(Traced.of(torch.full_like(results[0], _PLACE), first.run, torch.int64))
    return made[0] if len(made) == 1 else tuple(made)


def _computed(
    operator: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], run: _Run, *, writes: bool
) -> tuple[list[torch.Tensor], list[torch.dtype], int]:
    """The positions of what an operator returns, their dtypes, and a bound of integers among them."""
    bare_args, bare_kwargs = tree_map(_without_data, (args, kwargs))
    pure = getattr(torch.ops.aten, operator.overloadpacket.__name__[:-1]) if writes else operator
    answers = pure(*bare_args, **bare_kwargs)
    dtypes = [a.dtype for a in (answers if isinstance(answers, (tuple, list)) else [answers])]
    dtype = torch.result_type(*bare_args[:2]) if name in COMPARISONS else dtypes[0]
    operands = [_operand(a, run, name, i, dtype) for i, a in enumerate(args)]
    most = _require_precision(operator.name(), name, dtype, args, kwargs, run)
    options = {k: _rounded(v, dtype) for k, v in kwargs.items() if k != "dtype"}
    try:
        result = RULES[name](run.rules, *operands, **options)
    except TypeError:
        given = f" ({', '.join(options)})" if options else ""
        raise UnsupportedError(f"it calls {operator.name()} with arguments that are not supported{given}") from None
    return list(result) if isinstance(result, tuple) else [result], dtypes, most


def _without_data(x: Any) -> Any:
    """What torch needs to say which dtype a result has: a tensor of the same shape and dtype."""
    if isinstance(x, torch.Tensor):
        shape = x.positions.shape if isinstance(x, Traced) else x.shape
        return torch.empty(shape, dtype=x.dtype, device="meta")
    return x


def _require_precision(
    called: str, name: str, dtype: torch.dtype, args: tuple[Any, ...], kwargs: dict[str, Any], run: _Run
) -> int:
    """Refuses an operation that rounds more than the dtype of the input, or leaves exact integers; returns a bound of integers."""
    if dtype.is_complex:
        raise UnsupportedError(f"it computes {called} with complex numbers")
    tensors = [x for x in tree_flatten((args, kwargs))[0] if isinstance(x, torch.Tensor)]
    for x in [] if name.endswith("_like") else _traced_in((args, kwargs)):
        _require_no_rounding(x, dtype, f"it calls {called}, which")
    if dtype == torch.bool:
        return 1
    if dtype.is_floating_point:
        exact = name in UNROUNDED or (name == "mul" and any(x.dtype == torch.bool for x in tensors))
        if not exact and _is_narrower(dtype, run.dtype):
            raise UnsupportedError(
                f"it computes {called} in {_short(dtype)}, which rounds more than its {_short(run.dtype)} input; call .double() "
                "on the arguments"
            )
        return 1
    if dtype != torch.int64 or name not in WHOLE or set(kwargs) - {"dtype"}:
        raise UnsupportedError(f"it computes {called} in {_short(dtype)}; call .double() on the arguments")
    most = WHOLE[name](*(_size(x) for x in args if isinstance(x, (int, torch.Tensor)) and not isinstance(x, bool)))
    if name == "sum":
        most *= args[0].positions.numel()
    if most > 2**53:
        raise UnsupportedError(f"it computes {called} on integers beyond 2^53; call .double() on the arguments")
    return int(most)


def _size(x: int | torch.Tensor) -> int:
    """The largest absolute value of an integer, or in a tensor of integers or truth values."""
    if isinstance(x, Traced):
        return x.most
    return abs(x) if isinstance(x, int) else max((abs(int(v)) for v in x.reshape(-1).tolist()), default=0)


def _require_no_rounding(x: Traced, dtype: torch.dtype, subject: str) -> None:
    """Refuses a conversion of traced numbers that may change them."""
    if x.dtype == torch.bool or x.dtype == dtype or dtype == torch.bool:
        return
    if x.dtype.is_floating_point:
        fits = dtype.is_floating_point and not _is_narrower(dtype, x.dtype)
    else:
        fits = dtype.is_floating_point and x.most <= 2 / torch.finfo(dtype).eps
    if not fits:
        raise UnsupportedError(
            f"{subject} rounds {_short(x.dtype)} to {_short(dtype)}, and a graph has no rounding; keep {_short(x.dtype)}"
        )


def _is_narrower(dtype: torch.dtype, other: torch.dtype) -> bool:
    """Whether a floating dtype does not hold all numbers of another."""
    return torch.promote_types(dtype, other) != dtype


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _of_truths(name: str, args: tuple[Any, ...]) -> str:
    """What an operator is when all it is given are truth values: torch's True + True is True, not 2."""
    values = args[1:3] if name == "where" else args[:2] if name in _OF_TRUTHS else args[:1]
    if not all(isinstance(x, torch.Tensor) and x.dtype == torch.bool for x in values):
        return name
    if name in _NOT_OF_TRUTHS:
        raise UnsupportedError(f"it calls {name} on truth values; use &, | and ~, or .double() first")
    return _OF_TRUTHS.get(name, name)


def _operand(x: Any, run: _Run, name: str, place: int, dtype: torch.dtype) -> Any:
    """Positions for tensors and for numbers that stand for tensors; plain arguments as they are, numbers in the dtype."""
    condition = name in LOGIC or (name == "where" and place == 0)
    if isinstance(x, Traced):
        if condition and x.dtype != torch.bool:
            raise UnsupportedError("it uses numbers as truth values; use a comparison, such as x != 0")
        return _positions(x) if condition else _numbers(x)
    if isinstance(x, torch.Tensor):
        return run.rules.constants(torch.where(x, 1.0, -1.0) if condition else x.to(dtype))
    number = isinstance(x, (int, float)) and not isinstance(x, bool)
    return run.rules.constants(_rounded(x, dtype)) if number and place < _TENSORS.get(name, 0) else _rounded(x, dtype)


def _positions(x: Traced) -> torch.Tensor:
    """The positions, all of which must be of numbers that are known."""
    for sign, reason in _UNREADABLE.items():
        if (x.positions == sign).any():
            raise UnsupportedError(reason)
    return x.positions


def _numbers(x: Traced) -> torch.Tensor:
    """The positions; of truth values, those of 1 and 0."""
    return x.run.rules.each(x.run.rules.number, _positions(x)) if x.dtype == torch.bool else _positions(x)


def _rounded(x: Any, dtype: torch.dtype) -> Any:
    """A Python number as torch converts it before it computes in a floating dtype; anything else as it is."""
    if not isinstance(x, float) or not dtype.is_floating_point:
        return x
    return float(torch.tensor(x, dtype=torch.float64).to(dtype))


_NO_MEANING = frozenset(["memory_format", "layout", "device", "pin_memory", "non_blocking"])
_WRITES = frozenset(["copy", "fill", "zero"])
_OF_TRUTHS = {
    **dict.fromkeys(["add", "maximum", "fmax"], "logical_or"),
    **dict.fromkeys(["mul", "minimum", "fmin"], "logical_and"),
}
_NOT_OF_TRUTHS = frozenset(
    ["where", "amax", "amin", "max", "min", "zeros_like", "ones_like", "full_like", "empty_like"]
)
_TWO = "add sub rsub mul div pow gt ge lt le minimum maximum heaviside hypot"
# how many leading arguments of an operator may be numbers that mean tensors
_TENSORS = {**dict.fromkeys(_TWO.split(), 2), **dict.fromkeys(["clamp", "clamp_min", "clamp_max", "where"], 3)}


def _cast(x: Traced, dtype: torch.dtype) -> Traced:
    """The same numbers in another dtype, refused where that rounds."""
    if dtype == x.dtype:
        return Traced.of(x.positions.clone(), x.run, dtype, x.most)
    if not (dtype.is_floating_point or (x.dtype == torch.bool and dtype == torch.int64)):
        raise UnsupportedError(f"it turns {_short(x.dtype)} into {_short(dtype)}")
    _require_no_rounding(x, dtype, "it")
    return Traced.of(_numbers(x).clone(), x.run, dtype)


def _moved(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any], first: Traced) -> Any:
    """Data that only changes place: the operator itself, on positions."""
    rules, name = first.run.rules, operator.overloadpacket.__name__
    indexing = name in ("index", "index_select")
    if tree_any(lambda a: isinstance(a, torch.dtype), (args, kwargs)):
        raise UnsupportedError(f"it calls {operator.name()}, which reads the bits of a number as another type")
    if indexing and tree_any(_is_traced, args[1:]):
        raise UnsupportedError("it selects entries by a value of its input")
    data = [x for x in tree_flatten(args[:1])[0] if isinstance(x, torch.Tensor)]
    dtype = reduce(torch.promote_types, (x.dtype for x in data))
    most = max((_size(x) for x in data), default=1) if dtype == torch.int64 else 1

    def place(x: Any) -> Any:
        if not isinstance(x, torch.Tensor) or (indexing and not isinstance(x, Traced)):
            return x
        if (x.dtype == torch.bool) != (dtype == torch.bool):
            raise UnsupportedError("it puts truth values and numbers side by side; use .double() first")
        if isinstance(x, Traced):
            _require_no_rounding(x, dtype, f"it calls {operator.name()}, which")
            return x.positions
        return rules.constants(torch.where(x, 1.0, -1.0) if x.dtype == torch.bool else x.to(dtype))

    result = operator(*tree_map(place, args), **kwargs)
    return tree_map(lambda p: Traced.of(p, first.run, dtype, most) if isinstance(p, torch.Tensor) else p, result)


def _overwritten(name: str, args: tuple[Any, ...], run: _Run) -> Traced:
    """copy_, fill_ and zero_: their dtype is that of the tensor they write to."""
    goal, value = args[0], 0.0 if name == "zero" else args[1]
    if isinstance(value, Traced):
        return _into(goal, _positions(value), value.dtype, value.most)
    exact = torch.as_tensor(value, dtype=torch.float64 if isinstance(value, float) else None)
    stored = exact.to(goal.dtype)
    return _into(goal, run.rules.constants(stored), torch.float64 if goal.dtype == torch.bool else goal.dtype)


def _into(goal: Any, positions: torch.Tensor, dtype: torch.dtype, most: int = 1) -> Traced:
    """Writes values of a dtype into a traced tensor; views of positions share memory as views of numbers do."""
    if not isinstance(goal, Traced):
        raise UnsupportedError("it writes its input into an ordinary tensor; make that one by zeros_like, or use stack")
    if not (goal.dtype.is_floating_point or goal.dtype == dtype == torch.bool):
        raise UnsupportedError(f"it writes {_short(dtype)} values into a tensor of {_short(goal.dtype)}")
    value = Traced.of(positions, goal.run, dtype, most)
    _require_no_rounding(value, goal.dtype, "it writes into a tensor, which")
    goal.positions.copy_(positions if goal.dtype == torch.bool else _numbers(value))
    return goal


def trace(
    function: Callable[..., Any], shapes: Sequence[tuple[int, ...]], *, dtype: torch.dtype = torch.float64
) -> Graph:
    """The graph of a function of batches, in exact arithmetic.

    Code under `torch.compile` is traced as it was written.

    Args:
        function: takes one tensor `(batch, *shape)` per shape and returns `(batch, *output_shape)`.
        shapes: the shapes of the arguments, without the batch.
        dtype: of the tensors that the function is given; operations in a narrower dtype are refused.

    Raises:
        NotTraceableError: the function is not a graph; the message says why.

    >>> trace(lambda z: torch.sin(z[:, 0]) + 1, [(1,)]).infix()
    'sin(x0) + 1'
    """
    m = sum(math.prod(s) for s in shapes)
    rules = Rules(GraphBuilder(TRACED_ROWS * m))
    run = _Run(rules, dtype)
    inputs = torch.tensor([rules.add("input", parameters=(i,)) for i in range(TRACED_ROWS * m)]).reshape(TRACED_ROWS, m)
    parts = torch.split(inputs, [math.prod(s) for s in shapes], dim=1)
    given = [Traced.of(p.reshape(TRACED_ROWS, *s), run, dtype) for p, s in zip(parts, shapes)]
    label = getattr(function, "__name__", type(function).__name__)
    try:
        with torch.no_grad(), _uncompiled(), _Watch(run):
            answer = function(*given)
        if run.refusal is not None:
            raise UnsupportedError(f"it catches an error that tracing raises ({_first_line(run.refusal)})")
        return _rows(answer, rules, m)
    except NotTraceableError:
        raise
    except UnsupportedError as error:
        raise NotTraceableError(f"{label} cannot be traced: {error}.") from None
    except Exception as error:  # whatever the function does when it is not given numbers
        if ".numpy()" in str(error) or "__array__" in str(error):
            raise NotTraceableError(f"{label} cannot be traced: it converts its input to numpy.") from None
        raise NotTraceableError(f"{label} cannot be traced ({type(error).__name__}: {_first_line(error)}).") from None


def _uncompiled() -> AbstractContextManager[Any]:
    """Inside, code under `torch.compile` runs as it was written. Without the compiler loaded (it takes seconds) there is none."""
    return torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext()


def _first_line(error: Exception) -> str:
    return str(error).split("\n")[0][:200]


def _rows(answer: Any, rules: Rules, m: int) -> Graph:
    """The graph of each row, which must be one and the same."""
    if not isinstance(answer, Traced):
        raise UnsupportedError(
            f"it returns a {type(answer).__name__} that torch operations did not compute from its input"
        )
    if answer.ndim == 0 or len(answer) != TRACED_ROWS:
        raise UnsupportedError(f"it returns shape {tuple(answer.shape)} for a batch of {TRACED_ROWS}")
    positions = _numbers(answer)
    graphs = []
    for row in range(TRACED_ROWS):
        found = rules.builder.finish(positions[row].reshape(-1).tolist(), tuple(positions.shape[1:]))
        nodes = [_renamed(node, row * m, m) for node in found.nodes]
        if not any(node.operation == "input" for node in nodes):
            raise UnsupportedError("its value does not depend on its input")
        graphs.append(Graph(m, tuple(nodes), found.outputs, found.output_shape))
    if graphs[0] != graphs[1]:
        raise UnsupportedError("it treats the rows of a batch differently")
    return graphs[0]


def _renamed(node: Node, start: int, m: int) -> Node:
    if node.operation != "input":
        return node
    index = int(node.parameters[0]) - start
    if not 0 <= index < m:
        raise UnsupportedError("the value of a row depends on the other rows of its batch")
    return Node("input", (), (index,))


def compare(graph: Graph, answers: Array, points: Array, *, dtype: torch.dtype = torch.float64) -> str | None:
    """Where a graph and a function's answers `(n, out)` at points differ by more than rounding can explain, or None."""
    try:
        here = graph.enclose(points, points)
    except PartitaError as error:
        return str(error)
    expected = graph.evaluate(points).reshape(len(points), -1)
    if expected.shape != answers.shape:
        return f"the trace returns shape {expected.shape[1:]}, the function {answers.shape[1:]}"
    allowed = _AGREE[dtype] * np.abs(answers).max(axis=0) + 64 * np.where(here.is_entire, 0.0, here.radius)
    off = np.abs(expected - answers)
    bad = np.flatnonzero(~(off <= allowed).all(axis=1))
    if not bad.size:
        return None
    i = int(bad[0])
    return f"at {points[i].tolist()} the function returns {answers[i].tolist()} and its trace {expected[i].tolist()}"
