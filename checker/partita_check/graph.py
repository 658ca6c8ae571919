"""The function of a claim: a graph of operations, read, shown, typed in, compared, and evaluated in balls.

One walk serves real balls (`arb`), complex balls (`acb`) and first-order series over balls (`arb_series`). Where an operation
is not proved to be defined, or a pole may lie in the ball, the result is not finite, and nothing not finite is ever accepted.
"""

from __future__ import annotations

import ast
import hashlib
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property, partial
from typing import Any

from flint import acb, arb, arb_series

from partita_check.clock import clock
from partita_check.limits import Limit, find_limits

__all__ = ["Graph", "Malformed", "need", "parse", "read_graph", "read_hex"]

MAX_NODES, MAX_EXPONENT, MAX_TEXT, MAX_TYPED = 100_000, 64, 10_000, 20_000
MAX_HELD = 1_000 * MAX_TEXT  # characters of all nodes while a graph is printed
MAX_PARTS = 1_000_000  # parts of sums and products over all nodes; a sum of n terms has n² / 2
MAX_COPIED = 1_000_000  # nodes of one-output graphs; beyond that they share the whole graph
EVERY = 256  # nodes between two looks at the clock
_HYPERBOLIC = ("asinh", "acosh", "atanh")
_UNARY = (
    "exp",
    "log",
    "sqrt",
    "sin",
    "cos",
    "tan",
    "atan",
    "tanh",
    *_HYPERBOLIC,
    "sigmoid",
    "erf",
    "abs",
    "relu",
    "floor",
)
_ARITY = dict.fromkeys((*_UNARY, "neg", "pow", "clamp"), 1) | {"where": 3, "input": 0, "const": 0}
_ARITY |= dict.fromkeys(("add", "sub", "mul", "div", "min", "max"), 2)
_PARAMETERS = {"input": (int,), "const": (float,), "pow": (int,), "clamp": (float, float)}
# what decides (left where it is ≥ 0), left, right
_KINKS: dict[str, Callable[..., tuple[Any, Any, Any]]] = {
    "abs": lambda x: (x, x, -x),
    "relu": lambda x: (x, x, arb(0)),
    "max": lambda x, y: (x - y, x, y),
    "min": lambda x, y: (x - y, y, x),
    "where": lambda c, x, y: (c, x, y),
}
NAN = arb("nan")
Node = tuple[str, tuple[int, ...], tuple[Any, ...]]
Choices = Mapping[tuple[int, int], int]  # at kinks whether the left branch is meant, at floor its value
Step = tuple[int, tuple[int, ...], Callable[..., Any] | None, Callable[..., Any] | None, Limit | None]


class Malformed(Exception):
    """The files, or a typed function, are not what they should be."""


class Undecided(Exception):
    """A kink or a jump lies in the box: this decision, (node, part), is open; then what it may be."""


def need(condition: Any, problem: Any) -> None:
    if not condition:
        raise Malformed(str(problem)[:200])


@dataclass(frozen=True)
class Graph:
    """f : ℝ^inputs → ℝ^shape; nodes (operation, arguments, parameters) refer backwards, constants are exact."""

    inputs: int
    nodes: tuple[Node, ...]
    outputs: tuple[int, ...]
    shape: tuple[int, ...]

    def evaluate(self, point: Sequence[Any], choices: Choices | None = None) -> list[Any]:
        """Enclosures of the outputs over a box of balls. With `choices`, kinks follow the chosen branches, and a kink that
        is neither chosen nor decided by its sign on the box raises `Undecided`; without, both branches are enclosed."""
        values = self.all_values(point, choices)
        return [values[k] for k in self.outputs]

    def all_values(self, point: Sequence[Any], choices: Choices | None = None) -> list[Any]:
        """The enclosures of all nodes."""
        return self._walk([None] * len(self.nodes), self._steps(None), point, choices)

    def moved(self, values: Sequence[Any], axis: int, point: Sequence[Any], choices: Choices | None) -> list[Any]:
        """The enclosures of all nodes at a point that differs in one input from the point with these `values`."""
        return self._walk(list(values), self._steps(axis), point, choices)

    def _walk(self, values: list[Any], steps: list[Step], point: Sequence[Any], choices: Choices | None) -> list[Any]:
        for count, (position, args, plain, kink, limit) in enumerate(steps):
            if count % EVERY == 0:
                clock.tick()
            a = [values[k] for k in args]
            try:
                value = plain(*a) if plain else kink(choices, *a) if kink else point[self.nodes[position][2][0]]
            except (ValueError, ZeroDivisionError, OverflowError):
                value = NAN
            values[position] = limit.value(value, values) if limit else value
        return values

    def _steps(self, axis: int | None) -> list[Step]:
        """What is computed again when an input moves; everything for None."""
        if None not in self._programs:
            self._programs[None] = [_step(k, node, self.limits.get(k)) for k, node in enumerate(self.nodes)]
        if axis not in self._programs:
            dependent = list[bool]()
            for name, args, params in self.nodes:
                dependent.append(any(dependent[k] for k in args) or (name == "input" and params[0] == axis))
            self._programs[axis] = [step for step, new in zip(self._programs[None], dependent) if new]
        return self._programs[axis]

    @cached_property
    def _programs(self) -> dict[int | None, list[Step]]:
        return {}

    @cached_property
    def limits(self) -> Mapping[int, Limit]:
        """Nodes that have a limit where their parts have none."""
        return find_limits(self.nodes)

    @cached_property
    def degrees(self) -> tuple[float, ...]:
        """Of the first output as a polynomial in each input, whatever kinks choose; infinite where it may be none."""
        found = list[list[float]]()
        for k, (name, args, params) in enumerate(self.nodes):
            if k % EVERY == 0:
                clock.tick()
            if name == "input":
                found.append([float(i == params[0]) for i in range(self.inputs)])
            else:
                rows = zip(*(found[a] for a in args)) if args else ((),) * self.inputs
                found.append([_degree(name, row, params) for row in rows])
        return tuple(found[self.outputs[0]])

    def branches(self, box: Sequence[arb], most: int) -> list[Choices] | None:
        """Choices for every kink, one set per analytic branch that f may follow somewhere in the box; None if too many."""
        found, waiting = list[Choices](), [dict[tuple[int, int], int]()]
        while waiting:
            choices = _Recorder(waiting.pop())
            if len(found) + len(waiting) >= most:
                return None
            try:
                self.evaluate(box, choices)
                found.append({**choices, **choices.decided})
            except Undecided as kink:
                waiting += [{**choices, kink.args[0]: side} for side in kink.args[1]]
        return found

    def component(self, output: int) -> tuple[Graph, tuple[int, ...]]:
        """One output as a function of the inputs that it uses, and which these are; of all inputs if the copies get large."""
        clock.tick()
        if len(self.nodes) * len(self.outputs) > MAX_COPIED:
            return Graph(self.inputs, self.nodes, (self.outputs[output],), ()), tuple(range(self.inputs))
        needed, waiting = set[int](), [self.outputs[output]]
        while waiting:
            k = waiting.pop()
            if k not in needed:
                needed.add(k)
                waiting += self.nodes[k][1]
        order = {old: new for new, old in enumerate(sorted(needed))}
        used = sorted({self.nodes[k][2][0] for k in needed if self.nodes[k][0] == "input"})
        nodes = []
        for name, args, params in (self.nodes[k] for k in order):
            nodes.append((name, tuple(order[a] for a in args), (used.index(params[0]),) if name == "input" else params))
        return Graph(len(used), tuple(nodes), (order[self.outputs[output]],), ()), tuple(used)

    def infix(self, names: Sequence[str]) -> str:
        """The outputs as text; "a, b" for vectors, "a, b; c, d" for tokens."""
        texts, held = list[tuple[str, int]](), 0
        for name, args, params in self.nodes:
            length = sum(len(texts[k][0]) for k in args)
            held += length
            if length > MAX_TEXT or held > MAX_HELD:
                return f"an expression of {len(self.nodes):,} operations, too long to print"
            texts.append(_text(name, [texts[k] for k in args], params, names))
        parts = [texts[k][0] for k in self.outputs]
        width = self.shape[-1] if len(self.shape) > 1 else len(parts)
        return "; ".join(", ".join(parts[k : k + width]) for k in range(0, len(parts), width))

    def canonical(self) -> tuple[Any, ...] | None:
        """Equal for graphs that compute the same sums and products of the same parts, in whatever order.

        None for a graph with more parts than an expression that someone typed can have.
        """
        keys, parts = list[Any](), 0
        for name, args, params in self.nodes:
            keys.append(_canonical(name, [keys[k] for k in args], params))
            parts += len(keys[-1][1])
            if parts > MAX_PARTS:
                return None
        return self.shape, tuple(_label(keys[k]) for k in self.outputs)


class _Recorder(dict[tuple[int, int], int]):
    """Choices that note what else the signs on the box decided."""

    def __init__(self, choices: Choices) -> None:
        super().__init__(choices)
        self.decided: dict[tuple[int, int], int] = {}


def _degree(name: str, of: Sequence[float], params: tuple[Any, ...]) -> float:
    """The degree of a node in one input, from those of its arguments; a floor is a constant once it is chosen."""
    if name in ("add", "sub", "sum", "neg", *_KINKS, "clamp"):
        return max(of)
    if name == "mul":
        return sum(of)
    if name == "pow" and params[0] > 0:
        return float(params[0] * of[0])
    if name == "div" and of[1] == 0:
        return of[0]
    return math.inf if any(of) and name != "floor" else 0.0


def _value(x: Any) -> Any:
    return x[0] if isinstance(x, arb_series) else x


def _choose(key: Any, choices: Choices | None, decision: Any, left: Any, right: Any, jumps: bool = False) -> Any:
    """`left` where the decision is ≥ 0, else `right`; both are enclosed where choices do not say and the sign is open."""
    if left is right:
        return left
    if choices is not None and key in choices:
        return left if choices[key] else right
    sign = _value(decision)
    if sign >= 0 or sign < 0:
        if isinstance(choices, _Recorder):
            choices.decided[key] = bool(sign >= 0)
        return left if sign >= 0 else right
    if choices is not None:
        raise Undecided(key, (True, False))
    if not any(isinstance(x, arb_series) for x in (decision, left, right)):
        return left.union(right)
    slopes = [x[1] if isinstance(x, arb_series) else arb(0) for x in (left, right)]
    return arb_series([_value(left).union(_value(right)), NAN if jumps else slopes[0].union(slopes[1])], 2)


def _step(position: int, node: Node, limit: Limit | None) -> Step:
    """How one node is computed: from its arguments, or, at kinks, from choices and arguments; inputs in neither way."""
    name, args, params = node
    plain, kink = _PLAIN.get(name), None
    if name == "const":
        plain = partial(arb, params[0])
    elif name == "pow":
        plain = partial(_power, exponent=params[0])
    elif name in ("clamp", "clip"):
        kink = partial(_clamp, position, params[0], params[1], name == "clip")
    elif name == "floor":
        kink = partial(_floor, position)
    elif name in _KINKS:
        kink = partial(_kink, position, name)
    return position, args, plain, kink, limit


def _kink(position: int, name: str, choices: Choices | None, *a: Any) -> Any:
    return _choose((position, 0), choices, *_KINKS[name](*a), jumps=name == "where")


def _floor(position: int, choices: Choices | None, x: Any) -> Any:
    """The largest integer ≤ x: a constant, which is also how it is continued, except on balls that reach over an integer."""
    key, value = (position, 0), _value(x)
    if choices is not None and key in choices:
        return arb(choices[key])
    if not isinstance(value, arb) or not value.is_finite():
        return NAN
    first, last = (end.floor().unique_fmpz() for end in (value.lower(), value.upper()))
    if first is None or last is None:
        return NAN
    least, most = int(first), int(last)
    if least == most:
        if isinstance(choices, _Recorder):
            choices.decided[key] = least
        return arb(least)
    if choices is not None:
        raise Undecided(key, range(least, min(most + 1, least + MAX_EXPONENT)))
    enclosed = arb(least).union(arb(most))
    return arb_series([enclosed, NAN], 2) if isinstance(x, arb_series) else enclosed


def _clamp(position: int, low: float, high: float, poles: bool, choices: Choices | None, x: Any) -> Any:
    """x between two numbers; with `poles`, also where x is not finite: nothing is claimed about points where f is undefined."""
    unchosen = isinstance(x, acb) and (position, 0) not in (choices or {})
    if poles and (unchosen or not _value(x).is_finite()):
        return arb(low).union(arb(high)) if isinstance(x, arb) else NAN
    raised = _choose((position, 0), choices, x - low, x, arb(low))
    return _choose((position, 1), choices, high - raised, raised, arb(high))


def _tanh(x: Any) -> Any:
    if not isinstance(x, arb_series):
        return x.tanh()
    value = x[0].tanh()
    return arb_series([value, (1 - _power(value, 2)) * x[1]], 2)


def _sigmoid(x: Any) -> Any:
    grown = (-_value(x)).exp() + 1
    value = 1 / grown if _apart_from_zero(grown) else NAN
    return arb_series([value, (0.25 - _power(value - 0.5, 2)) * x[1]], 2) if isinstance(x, arb_series) else value


def _atan(x: Any) -> Any:
    return x.atan() if not isinstance(x, acb) or abs(x.imag) < 1 else NAN


def _inverse(name: str, x: Any) -> Any:
    """asinh, acosh and atanh: off their branch cuts, with the slopes 1/√(1 + x²), 1/√(x² − 1), 1/(1 − x²)."""
    value = _value(x)
    real = value.real if isinstance(value, acb) else value
    if isinstance(value, acb) and name == "asinh":
        return x.asinh() if abs(value.imag) < 1 else NAN
    if name == "atanh" and not abs(real) < 1:
        return NAN
    if name == "acosh" and not real > 1:  # a real acosh is continued by 0 where it has no value, as a root is
        top = NAN if isinstance(value, acb) or not value.is_finite() else value.upper()
        enclosed = arb(0).union(top.acosh()) if top > 1 else arb(0) if top <= 1 else NAN
        return enclosed if not isinstance(x, arb_series) or top < 1 else arb_series([enclosed, NAN], 2)
    if isinstance(value, acb):
        return getattr(value, name)()
    low, high = (getattr(end, name)() for end in (value.lower(), value.upper()))  # all of them increase
    found, square = low.union(high), _power(value, 2)
    if not isinstance(x, arb_series):
        return found
    inside = 1 - square if name == "atanh" else square + 1 if name == "asinh" else square - 1
    return arb_series([found, (1 / inside if name == "atanh" else 1 / inside.sqrt()) * x[1]], 2)


def _apart_from_zero(x: Any) -> bool:
    """Whether no point of the ball is 0: also what makes a quotient of complex balls analytic."""
    return bool(_value(x).abs_lower() > 0)


def _power(x: Any, exponent: int) -> Any:
    if isinstance(x, arb_series) and exponent:
        return arb_series([_power(x[0], exponent), exponent * _power(x[0], exponent - 1) * x[1]], 2)
    if isinstance(x, arb) and exponent > 1 and not x.is_exact():  # monotone on either side of 0
        ends = [_power(end, exponent) for end in (x.lower(), x.upper())]
        return ends[0].union(ends[1]).union(0) if x.contains(0) else ends[0].union(ends[1])
    base, result, k = x, arb(1), abs(exponent)
    while k:
        base, result, k = base * base, result * base if k & 1 else result, k >> 1
    return result if exponent >= 0 else 1 / result if _apart_from_zero(result) else NAN


def _half_line(name: str, x: Any) -> Any:
    """log and sqrt to the right of 0; a real square root is continued by 0 where it has no value."""
    value = _value(x)
    if (value.real if isinstance(value, acb) else value) > 0:
        return getattr(x, name)()
    if name == "log" or isinstance(value, acb) or not value.is_finite():
        return NAN
    top = value.upper()
    enclosed = arb(0).union(top.sqrt()) if top > 0 else arb(0)
    return enclosed if isinstance(x, arb) or top < 0 else arb_series([enclosed, NAN], 2)


_PLAIN: dict[str, Callable[..., Any]] = {
    "add": operator.add,
    "sub": operator.sub,
    "neg": operator.neg,
    "mul": lambda x, y: _power(x, 2) if x is y else x * y,
    "div": lambda x, y: x / y if _apart_from_zero(y) else NAN,
    "sum": lambda x, *others: sum(others, x),
    "log": partial(_half_line, "log"),
    "sqrt": partial(_half_line, "sqrt"),
    "tanh": _tanh,
    "sigmoid": _sigmoid,
    "atan": _atan,
    **{name: partial(_inverse, name) for name in _HYPERBOLIC},
    **{name: operator.methodcaller(name) for name in ("exp", "sin", "cos", "tan", "erf")},
}


def read_hex(value: Any, what: str) -> float:
    """A finite number from the only hexadecimal text that stands for it."""
    try:
        number = float.fromhex(value) if isinstance(value, str) and len(value) < 40 else math.nan
    except (ValueError, OverflowError):
        number = math.nan
    need(math.isfinite(number) and number.hex() == value, f"{what}: expected a finite hex float, found {value!r}")
    return number


def read_graph(data: Any) -> Graph:
    """The graph of a JSON value; `Malformed` for unknown operations, wrong arities, references forward, invalid numbers."""
    need(isinstance(data, dict) and set(data) == {"inputs", "nodes", "outputs", "shape"}, "graph: wrong keys")
    count, outputs, shape = data["inputs"], data["outputs"], data["shape"]
    need(type(count) is int and all(isinstance(x, list) for x in (data["nodes"], outputs, shape)), "graph: wrong types")
    need(0 < len(data["nodes"]) <= MAX_NODES and 0 < len(outputs) <= 4096, "graph: no nodes or outputs, or too many")
    nodes: list[Any] = []
    for entry in data["nodes"]:
        if len(nodes) % EVERY == 0:
            clock.tick()
        need(isinstance(entry, dict) and set(entry) == {"op", "args", "params"}, entry)
        name, args, params = entry["op"], entry["args"], entry["params"]
        need(isinstance(args, list) and isinstance(params, list) and (name == "sum" or name in _ARITY), entry)
        need(len(args) == _ARITY.get(name, max(len(args), 1)), entry)
        need(all(type(k) is int and 0 <= k < len(nodes) for k in args), entry)
        kinds = _PARAMETERS.get(name, ())
        need(len(params) == len(kinds), entry)
        need(all(type(p) is int or kind is float for p, kind in zip(params, kinds)), entry)
        read = tuple(p if kind is int else read_hex(p, "graph") for p, kind in zip(params, kinds))
        need(name != "input" or 0 <= read[0] < count, entry)
        need((name != "pow" or abs(read[0]) <= MAX_EXPONENT) and (name != "clamp" or read[0] <= read[1]), entry)
        nodes.append((name, tuple(args), read))
    need(all(type(k) is int and 0 <= k < len(nodes) for k in outputs), "graph: an output is not a node")
    need(len(shape) <= 8 and all(type(k) is int and 0 < k <= 4096 for k in shape), "graph: the shape is invalid")
    need(math.prod(shape) == len(outputs), "graph: the shape does not fit the number of outputs")
    return Graph(count, tuple(nodes), tuple(outputs), tuple(shape))


def _text(name: str, args: list[tuple[str, int]], params: tuple[Any, ...], names: Sequence[str]) -> tuple[str, int]:
    """The text of one node and how tightly it binds: sums 1, products 2, minus 3, powers 4, atoms 5."""
    symbol, level = {"add": (" + ", 1), "sub": (" - ", 1), "mul": ("*", 2), "div": ("/", 2)}.get(name, ("", 5))
    if symbol:
        level_of_right = level + 1 if level == 1 or args[1][1] != 3 else 5
        parts = [t if bind >= least else f"({t})" for (t, bind), least in zip(args, (level, level_of_right))]
        return symbol.join(parts), level
    numbers = [repr(p).removesuffix(".0") for p in params]
    if name in ("input", "const"):
        return names[params[0]] if name == "input" else numbers[0], 3 if numbers[0].startswith("-") else 5
    if name in ("pow", "neg"):
        text, bind = args[0]
        text = text if bind >= (5 if name == "pow" else 4) else f"({text})"
        return (f"{text}^{numbers[0]}", 4) if name == "pow" else (f"-{text}", 3)
    return f"{name}({', '.join([t for t, _ in args] + numbers)})", 5


def _canonical(name: str, args: list[Any], params: tuple[Any, ...]) -> Any:
    """A key: sums and products are sorted lists of labelled parts, differences are sums, quotients are left alone."""
    if name in ("neg", "sub"):
        last = args[-1]
        negated = ("const", (), (-last[2][0],)) if last[0] == "const" else ("neg", (_label(last),), ())
        if name == "neg":
            return negated
        name, args = "add", [args[0], negated]
    if name in ("add", "sum", "mul"):
        kind = "mul" if name == "mul" else "add"
        return kind, tuple(sorted(k for a in args for k in (a[1] if a[0] == kind else (_label(a),)))), ()
    labels = map(_label, args)
    return name, tuple(sorted(labels) if name in ("min", "max") else labels), params


def _label(key: Any) -> str:
    return hashlib.sha256(repr(key).encode()).hexdigest()


def parse(text: str, names: Sequence[str]) -> Graph:
    """The graph of a typed expression in these variables (also x, y, z for up to three, and x0, x1, …): read as a syntax tree,
    never run. `a, b` is a vector, `a, b; c, d` a sequence of tokens."""
    need(len(text) <= MAX_TYPED, f"expression of {len(text)} characters, expected at most {MAX_TYPED}")
    places = {f"x{i}": i for i in range(len(names))} | {name: i for i, name in enumerate(names)}
    if len(names) <= 3 and names[0] == "x0":
        places |= {letter: i for i, letter in enumerate("xyz"[: len(names)])}
    for typed, python in (("^", "**"), ("≤", "<="), ("≥", ">="), ("&&", " and "), ("||", " or ")):
        text = text.replace(typed, python)
    rows, reader = text.rstrip().removesuffix(";").split(";"), _Reader(places)
    try:
        trees = [ast.parse(row.strip(), mode="eval").body for row in rows]
        lines = [[reader.read(t) for t in (tree.elts if isinstance(tree, ast.Tuple) else [tree])] for tree in trees]
    except (SyntaxError, ValueError, OverflowError, MemoryError, RecursionError) as error:
        raise Malformed(f"expression: {error}") from None
    need(len({len(line) for line in lines}) == 1 and lines[0], "expression: the tokens have different lengths")
    vector = (len(lines[0]),) if isinstance(trees[0], ast.Tuple) else ()
    shape = (len(lines), len(lines[0])) if ";" in text else vector
    return Graph(len(names), tuple(reader.nodes), tuple(k for line in lines for k in line), shape)


def _is_condition(tree: ast.expr) -> bool:
    return isinstance(tree, ast.Compare | ast.BoolOp) or (
        isinstance(tree, ast.UnaryOp) and isinstance(tree.op, ast.Not)
    )


class _Reader:
    """Syntax trees to nodes: numbers, variables, pi, e, + - * / ^, and the functions of the language."""

    def __init__(self, places: Mapping[str, int]) -> None:
        self.places, self.nodes, self.known = places, list[Any](), dict[Any, int]()

    def add(self, name: str, *args: int, params: tuple[Any, ...] = ()) -> int:
        """The position of a node; the same node is stored once, so that equal parts are seen to be equal."""
        key = (name, args, tuple(map(repr, params)))
        if key not in self.known:
            self.known[key] = len(self.nodes)
            self.nodes.append((name, args, params))
        return self.known[key]

    def constant(self, value: float) -> int:
        need(math.isfinite(value), "expression: a number is too large")
        return self.add("const", params=(value,))

    def literal(self, node: int) -> float | None:
        return self.nodes[node][2][0] if self.nodes[node][0] == "const" else None

    def read(self, tree: ast.expr) -> int:
        if isinstance(tree, ast.Constant) and isinstance(tree.value, int | float) and not isinstance(tree.value, bool):
            return self.constant(float(tree.value))
        if isinstance(tree, ast.Name) and tree.id in self.places:
            return self.add("input", params=(self.places[tree.id],))
        if isinstance(tree, ast.Name) and tree.id in ("pi", "e"):
            return self.constant(math.pi if tree.id == "pi" else math.e)
        if isinstance(tree, ast.UnaryOp) and isinstance(tree.op, ast.USub):
            inner = self.read(tree.operand)
            value = self.literal(inner)
            return self.add("neg", inner) if value is None else self.constant(-value)
        if isinstance(tree, ast.BinOp):
            left, right, kind = self.read(tree.left), self.read(tree.right), type(tree.op)
            names = {ast.Add: "add", ast.Sub: "sub", ast.Mult: "mul", ast.Div: "div"}
            need(kind in names or kind is ast.Pow, "expression: unknown operator")
            return self.add(names[kind], left, right) if kind in names else self.power(left, right)
        if not (isinstance(tree, ast.Call) and isinstance(tree.func, ast.Name)):
            raise Malformed("expression: found an unknown name or unsupported syntax")
        need(not tree.keywords and tree.args, "expression: a function needs positional arguments")
        if tree.func.id == "where" and len(tree.args) == 3 and _is_condition(tree.args[0]):
            node, negated = self.condition(tree.args[0])
            yes, no = self.read(tree.args[1]), self.read(tree.args[2])
            return self.branch(node, no, yes) if negated else self.branch(node, yes, no)
        return self.call(tree.func.id, [self.read(a) for a in tree.args])

    def condition(self, tree: ast.expr) -> tuple[int, bool]:
        """(c, negated): it holds where c ≥ 0, or where c < 0 if it is negated."""
        if isinstance(tree, ast.UnaryOp) and isinstance(tree.op, ast.Not):
            node, negated = self.condition(tree.operand)
            return node, not negated
        if isinstance(tree, ast.BoolOp):
            found = [self.condition(part) for part in tree.values]
            return self.joined(found, isinstance(tree.op, ast.And))
        need(isinstance(tree, ast.Compare), "expression: expected a comparison")
        assert isinstance(tree, ast.Compare)
        sides, found = [self.read(side) for side in (tree.left, *tree.comparators)], []
        for symbol, a, b in zip(tree.ops, sides, sides[1:]):
            need(isinstance(symbol, ast.Lt | ast.LtE | ast.Gt | ast.GtE), "expression: the comparisons are < <= > >=")
            a, b = (b, a) if isinstance(symbol, ast.LtE | ast.Gt) else (a, b)
            one_side = self.add("neg", b) if self.literal(a) == 0 and self.literal(b) != 0 else None
            apart = a if self.literal(b) == 0 else self.add("sub", a, b) if one_side is None else one_side
            found.append((apart, isinstance(symbol, ast.Lt | ast.Gt)))
        return self.joined(found, True)

    def joined(self, parts: list[tuple[int, bool]], both: bool) -> tuple[int, bool]:
        """From the left: min for and, max for or; the other way round for two conditions that are negated."""
        node, negated = parts[0]
        for other, opposite in parts[1:]:
            if negated and opposite:
                node = self.add("max" if both else "min", node, other)
                continue
            signs = self.constant(-1.0), self.constant(1.0)
            pair = [self.add("where", k, *signs) if n else k for k, n in ((node, negated), (other, opposite))]
            node, negated = self.add("min" if both else "max", *pair), False
        return node, negated

    def branch(self, condition: int, yes: int, no: int) -> int:
        """max or min if yes − no is a multiple of the condition, so that the branches meet; else where."""
        decides, first, second = (self.form(k) for k in (condition, yes, no))
        apart = {k: first.get(k, 0) - second.get(k, 0) for k in (*first, *second)}
        place = next((k for k, factor in decides.items() if factor), None)
        slope = None if place is None else apart.get(place, Fraction(0)) / decides[place]
        if slope is None or any(apart.get(k, 0) != slope * decides.get(k, 0) for k in (*apart, *decides)):
            return self.add("where", condition, yes, no)
        return self.add("max" if slope >= 0 else "min", yes, no)

    def form(self, k: int) -> dict[int, Fraction]:
        """The node as an affine function of nodes that are not affine; -1 stands for 1."""
        name, args, params = self.nodes[k]
        inner = [self.form(j) for j in args] if name in ("add", "sub", "neg", "sum", "mul", "div") else []
        fixed = [{-1} >= set(f) for f in inner]
        if name == "const":
            return {-1: Fraction(params[0])} if params[0] else {}
        if name in ("add", "sub", "neg", "sum"):
            total, last = dict[int, Fraction](), len(inner) - 1 if name in ("sub", "neg") else None
            for place, part in enumerate(inner):
                for j, factor in part.items():
                    total[j] = total.get(j, Fraction(0)) + (-factor if place == last else factor)
            return {j: factor for j, factor in total.items() if factor}
        if name in ("mul", "div") and any(f and inner[i] for i, f in enumerate(fixed) if name == "mul" or i):
            place = 0 if name == "mul" and fixed[0] and inner[0] else 1
            factor = inner[place].get(-1, Fraction(0))
            if factor:
                return {j: c * factor if name == "mul" else c / factor for j, c in inner[1 - place].items()}
        return {k: Fraction(1)}

    def power(self, base: int, exponent: int) -> int:
        value = self.literal(exponent)
        if value is not None and value == int(value) and abs(value) <= MAX_EXPONENT:
            return self.add("pow", base, params=(int(value),))
        if value == 0.5:
            return self.add("sqrt", base)
        return self.add("exp", self.add("mul", exponent, self.add("log", base)))

    def call(self, name: str, args: list[int]) -> int:
        """A function of the language, lowered to operations of the graph."""
        x, count = args[0], len(args)
        if (name in _UNARY and count == 1) or name == "sum" or (name == "where" and count == 3):
            return self.add(name, *args)
        if name in ("min", "max") and count > 1:
            for other in args[1:]:
                x = self.add(name, x, other)
            return x
        if name == "clamp" and count == 3:
            ends = self.literal(args[1]), self.literal(args[2])
            raised = self.add("clamp", x, params=ends) if None not in ends else self.add("max", x, args[1])
            return raised if None not in ends else self.add("min", raised, args[2])
        if name == "ceil" and count == 1:
            return self.add("neg", self.add("floor", self.add("neg", x)))
        known = count == 1 and name in ("sinh", "cosh", "square", "step", "sign")
        need(known, f"expression: there is no function {name} of {count} arguments")
        if name == "square":
            return self.add("pow", x, params=(2,))
        if name in ("sinh", "cosh"):
            both = self.add("sub" if name == "sinh" else "add", self.add("exp", x), self.add("exp", self.add("neg", x)))
            return self.add("div", both, self.constant(2.0))
        zero, one = self.constant(0.0), self.constant(1.0)
        if name == "step":
            return self.add("where", x, one, zero)
        return self.add("where", x, self.add("where", self.add("neg", x), zero, one), self.constant(-1.0))
