"""The function of a claim: a graph of operations, read, shown, typed in, compared, and evaluated in balls.

One walk serves real balls (`arb`), complex balls (`acb`) and first-order series over balls (`arb_series`). Where an operation is
not proved to be defined, or a pole may lie in the ball, the result is not finite, and nothing not finite is ever accepted.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from flint import acb, arb, arb_series

__all__ = ["Graph", "Malformed", "parse", "read_graph"]

MAX_NODES, MAX_EXPONENT, MAX_TEXT, MAX_TYPED, MAX_DEPTH = 100_000, 64, 100_000, 2_000, 50
_UNARY = ("exp", "log", "sqrt", "sin", "cos", "tan", "atan", "tanh", "sigmoid", "erf", "abs", "relu")
_ARITY = dict.fromkeys((*_UNARY, "neg", "pow", "clamp"), 1) | {"where": 3, "input": 0, "const": 0}
_ARITY |= dict.fromkeys(("add", "sub", "mul", "div", "min", "max"), 2)
_PARAMETERS: dict[str, tuple[type, ...]] = {"input": (int,), "const": (float,), "pow": (int,), "clamp": (float, float)}
_KINKS = ("abs", "relu", "min", "max", "clamp", "where")
Node = tuple[str, tuple[int, ...], tuple[Any, ...]]
Choices = Mapping[tuple[int, int], bool]


class Malformed(Exception):
    """The files, or a typed function, are not what they should be."""


class Undecided(Exception):
    """A kink lies in the box: the sign of this decision, (node, part), is not known."""


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
        values: list[Any] = []
        for position, (name, args, params) in enumerate(self.nodes):
            given = [values[k] for k in args]
            if name == "input":
                values.append(point[params[0]])
            elif name == "const":
                values.append(arb(params[0]))
            elif name in _KINKS:
                values.append(_kink(position, name, given, params, choices))
            else:
                values.append(_smooth(name, given, params))
        return [values[k] for k in self.outputs]

    def branches(self, box: Sequence[arb], most: int) -> list[Choices] | None:
        """Choices for every kink, one set per analytic branch that f may follow somewhere in the box; None if too many."""
        found, waiting = [], [dict[tuple[int, int], bool]()]
        while waiting:
            choices = waiting.pop()
            if len(found) + len(waiting) >= most:
                return None
            taken = dict(choices)
            try:
                self.evaluate(box, _Recorder(taken))
                found.append(taken)
            except Undecided as kink:
                waiting += [{**choices, kink.args[0]: side} for side in (True, False)]
        return found

    def component(self, output: int) -> tuple[Graph, tuple[int, ...]]:
        """One output as a function of the inputs that it uses, and which these are."""
        needed, waiting = set[int](), [self.outputs[output]]
        while waiting:
            k = waiting.pop()
            if k not in needed:
                needed.add(k)
                waiting += self.nodes[k][1]
        order = {old: new for new, old in enumerate(sorted(needed))}
        used = sorted({self.nodes[k][2][0] for k in needed if self.nodes[k][0] == "input"})
        nodes = []
        for k in order:
            name, args, params = self.nodes[k]
            nodes.append((name, tuple(order[a] for a in args), (used.index(params[0]),) if name == "input" else params))
        return Graph(len(used), tuple(nodes), (order[self.outputs[output]],), ()), tuple(used)

    def infix(self, names: Sequence[str]) -> str:
        """The outputs as text; "a, b" for vectors, "a, b; c, d" for tokens."""
        texts: list[tuple[str, int]] = []
        for name, args, params in self.nodes:
            texts.append(_text(name, [texts[k] for k in args], params, names))
            if len(texts[-1][0]) > MAX_TEXT:
                return f"an expression of {len(self.nodes)} operations, too long to print"
        parts = [texts[k][0] for k in self.outputs]
        width = self.shape[-1] if len(self.shape) > 1 else len(parts)
        return "; ".join(", ".join(parts[k : k + width]) for k in range(0, len(parts), width))

    def canonical(self) -> tuple[Any, ...]:
        """Equal for graphs that compute the same sums and products of the same parts, in whatever order."""
        keys: list[Any] = []
        for name, args, params in self.nodes:
            keys.append(_canonical(name, [keys[k] for k in args], params))
        return self.shape, tuple(_label(keys[k]) for k in self.outputs)


class _Recorder(dict[tuple[int, int], bool]):
    """Choices that also note, in the dictionary they were made from, what the signs on the box decided."""

    def __init__(self, taken: dict[tuple[int, int], bool]) -> None:
        super().__init__(taken)
        self.taken = taken


def _kink(position: int, name: str, a: list[Any], params: tuple[Any, ...], choices: Choices | None) -> Any:
    if name == "clamp":
        raised = _choose((position, 0), a[0] - arb(params[0]), a[0], arb(params[0]), choices)
        return _choose((position, 1), arb(params[1]) - raised, raised, arb(params[1]), choices)
    left, right, decision = {
        "abs": lambda: (a[0], -a[0], a[0]),
        "relu": lambda: (a[0], arb(0), a[0]),
        "max": lambda: (a[0], a[1], a[0] - a[1]),
        "min": lambda: (a[1], a[0], a[0] - a[1]),
        "where": lambda: (a[1], a[2], a[0]),
    }[name]()
    return _choose((position, 0), decision, left, right, choices, jumps=name == "where")


def _choose(
    key: tuple[int, int], decision: Any, left: Any, right: Any, choices: Choices | None, jumps: bool = False
) -> Any:
    """`left` where the decision is ≥ 0, else `right`; both are enclosed where choices do not say and the sign is open."""
    if choices is not None and key in choices:
        return left if choices[key] else right
    sign = _value(decision)
    if isinstance(sign, acb):
        raise ValueError("a kink of a complex argument needs a choice")
    if sign >= 0 or sign < 0:
        if isinstance(choices, _Recorder):
            choices.taken[key] = bool(sign >= 0)
        return left if sign >= 0 else right
    if choices is not None:
        raise Undecided(key)
    if not any(isinstance(x, arb_series) for x in (decision, left, right)):
        return left.union(right)
    slope = arb("nan") if jumps else _slope(left).union(_slope(right))
    return arb_series([_value(left).union(_value(right)), slope], 2)


def _value(x: Any) -> Any:
    return x[0] if isinstance(x, arb_series) else x


def _slope(x: Any) -> arb:
    return x[1] if isinstance(x, arb_series) else arb(0)


def _smooth(name: str, a: list[Any], params: tuple[Any, ...]) -> Any:
    x = a[0]
    try:
        if name == "div":
            return x / a[1] if _apart_from_zero(a[1]) else arb("nan")
        if name == "pow" or (name == "mul" and x is a[1]):
            return _power(x, params[0] if params else 2)
        if name in ("log", "sqrt"):
            return _half_line(name, x)
        if name == "sum":
            return sum(a[1:], x)
        if name == "tanh" and isinstance(x, arb_series):
            value = x[0].tanh()
            return arb_series([value, (1 - value) * (1 + value) * x[1]], 2)
        if name == "sigmoid":
            grown = (-_value(x)).exp() + 1
            value = 1 / grown if _apart_from_zero(grown) else arb("nan")
            return arb_series([value, value * (1 - value) * x[1]], 2) if isinstance(x, arb_series) else value
        if name == "atan" and isinstance(x, acb) and not abs(x.imag) < 1:
            return arb("nan")
        return _RULES[name](*a) if name in _RULES else getattr(x, name)()
    except (ValueError, ZeroDivisionError, OverflowError):
        return arb("nan")


_RULES: dict[str, Callable[..., Any]] = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "neg": lambda a: -a,
}


def _apart_from_zero(x: Any) -> bool:
    """Whether no point of the ball is 0: also what makes a quotient of complex balls analytic."""
    return bool(_value(x).abs_lower() > 0)


def _power(x: Any, exponent: int) -> Any:
    if exponent == 0:
        return arb(1)
    if isinstance(x, arb) and exponent % 2 == 0:
        x = arb(0).union(x.abs_upper()) if x.contains(0) else x
    base, result, k = x, None, abs(exponent)
    while k:
        if k & 1:
            result = base if result is None else result * base
        base, k = base * base, k >> 1
    if exponent > 0:
        return result
    return 1 / result if _apart_from_zero(result) else arb("nan")


def _half_line(name: str, x: Any) -> Any:
    """log and sqrt to the right of 0; a real square root is continued by 0 where it has no value."""
    value = _value(x)
    if (value.real if isinstance(value, acb) else value) > 0:
        return getattr(x, name)()
    if name == "log" or isinstance(value, acb) or not value.is_finite():
        return arb("nan")
    top = value.upper()
    enclosed = arb(0).union(top.sqrt()) if top > 0 else arb(0)
    return enclosed if isinstance(x, arb) or top < 0 else arb_series([enclosed, arb("nan")], 2)


def read_graph(data: Any) -> Graph:
    """The graph of a JSON value; `Malformed` for unknown operations, wrong arities, references forward, odd numbers."""

    def need(condition: Any, where: Any) -> None:
        if not condition:
            raise Malformed(f"graph: {str(where)[:120]}")

    need(isinstance(data, dict) and set(data) == {"inputs", "nodes", "outputs", "shape"}, "keys")
    count = data["inputs"]
    need(
        type(count) is int
        and 0 < count <= 64
        and all(isinstance(data[k], list) for k in ("nodes", "outputs", "shape")),
        "parts",
    )
    need(len(data["nodes"]) <= MAX_NODES and len(data["outputs"]) <= 4096, "too many nodes or outputs")
    nodes: list[Node] = []
    for entry in data["nodes"]:
        need(isinstance(entry, dict) and set(entry) == {"op", "args", "params"}, entry)
        name, args, params = entry["op"], entry["args"], entry["params"]
        need(isinstance(name, str) and (name == "sum" or name in _ARITY) and isinstance(args, list), entry)
        need(len(args) == _ARITY.get(name, len(args)) and (args or name != "sum"), entry)
        need(all(type(k) is int and 0 <= k < len(nodes) for k in args) and isinstance(params, list), entry)
        kinds = _PARAMETERS.get(name, ())
        need(len(params) == len(kinds), entry)
        read = tuple(_parameter(p, kind) for p, kind in zip(params, kinds))
        need(None not in read, entry)
        need(name != "input" or 0 <= read[0] < count, entry)  # type: ignore[operator]
        need(name != "pow" or abs(read[0]) <= MAX_EXPONENT, entry)  # type: ignore[arg-type]
        need(name != "clamp" or read[0] <= read[1], entry)  # type: ignore[operator]
        nodes.append((name, tuple(args), read))
    outputs, shape = data["outputs"], data["shape"]
    need(outputs and all(type(k) is int and 0 <= k < len(nodes) for k in outputs), "outputs")
    need(
        len(shape) <= 8 and all(type(k) is int and 0 < k <= 4096 for k in shape) and math.prod(shape) == len(outputs),
        "shape",
    )
    return Graph(count, tuple(nodes), tuple(outputs), tuple(shape))


def _parameter(value: Any, kind: type) -> float | int | None:
    if kind is int:
        return value if type(value) is int else None
    try:
        number = float.fromhex(value) if isinstance(value, str) else math.nan
    except (ValueError, OverflowError):
        return None
    return number if math.isfinite(number) and number.hex() == value else None


_SYMBOLS = {"add": (" + ", 1), "sub": (" - ", 1), "mul": ("*", 2), "div": ("/", 2)}


def _text(name: str, args: list[tuple[str, int]], params: tuple[Any, ...], names: Sequence[str]) -> tuple[str, int]:
    """The text of one node and how tightly it binds: sums 1, products 2, minus 3, powers 4, atoms 5."""

    def inner(k: int, level: int) -> str:
        return args[k][0] if args[k][1] >= level else f"({args[k][0]})"

    if name == "input":
        return names[params[0]], 5
    if name == "const":
        text = repr(params[0]).removesuffix(".0")
        return text, 3 if text.startswith("-") else 5
    if name == "pow":
        return f"{inner(0, 5)}^{params[0]}", 4
    if name == "neg":
        return f"-{inner(0, 4)}", 3
    if name in _SYMBOLS:
        symbol, level = _SYMBOLS[name]
        return inner(0, level) + symbol + inner(1, level + 1), level
    return f"{name}({', '.join([t for t, _ in args] + [repr(p).removesuffix('.0') for p in params])})", 5


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


_TOKEN = re.compile(r"((?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)|([A-Za-z_]\w*)|(\*\*|[-+*/^(),;])|\s+", re.ASCII)
_LEVEL = {"+": 10, "-": 10, "*": 20, "/": 20, "^": 40}
_NAMES = {"+": "add", "-": "sub", "*": "mul", "/": "div"}


def parse(text: str, names: Sequence[str]) -> Graph:
    """The graph of a typed expression in these variables (also x, y, z for up to three, and x0, x1, …); never Python."""
    if len(text) > MAX_TYPED:
        raise Malformed(f"expression of {len(text)} characters, expected at most {MAX_TYPED}")
    places = {f"x{i}": i for i in range(len(names))} | {name: i for i, name in enumerate(names)}
    if len(names) <= 3 and names[0] == "x0":
        places |= {letter: i for i, letter in enumerate("xyz"[: len(names)])}
    return _Parser(text, places, len(names)).graph()


class _Parser:
    """Precedence climbing: ^ binds to the right, then unary minus, then * and /, then + and -."""

    def __init__(self, text: str, places: Mapping[str, int], inputs: int) -> None:
        self.places, self.inputs, self.nodes = places, inputs, list[Node]()
        self.tokens, self.at = [*self._tokens(text), ""], 0

    def _tokens(self, text: str) -> Iterator[str]:
        column = 0
        while column < len(text):
            match = _TOKEN.match(text, column)
            if match is None:
                raise Malformed(f"expression: unexpected {text[column]!r} at {column}")
            column = match.end()
            if not match.group().isspace():
                yield match.group().replace("**", "^")

    def take(self, expected: str | None = None) -> str:
        token = self.tokens[self.at]
        if expected is not None and token != expected:
            raise Malformed(f"expression: found {token or 'the end'!r}, expected {expected!r}")
        self.at += token != ""
        return token

    def accept(self, token: str) -> bool:
        return self.tokens[self.at] == token and bool(self.take())

    def add(self, name: str, *args: int, params: tuple[Any, ...] = ()) -> int:
        self.nodes.append((name, args, params))
        if len(self.nodes) > 4 * 500:
            raise Malformed("expression: too many operations")
        return len(self.nodes) - 1

    def graph(self) -> Graph:
        rows, comma, semicolon = [[self.expression(0, 0)]], False, False
        while self.tokens[self.at]:
            if self.accept(","):
                comma = True
                if self.tokens[self.at] not in ("", ";"):
                    rows[-1].append(self.expression(0, 0))
            else:
                self.take(";")
                semicolon = True
                if self.tokens[self.at]:
                    rows.append([self.expression(0, 0)])
        if len({len(row) for row in rows}) > 1:
            raise Malformed("expression: tokens of different lengths")
        outputs = tuple(k for row in rows for k in row)
        shape = (len(rows), len(rows[0])) if semicolon else (len(outputs),) if comma else ()
        return Graph(self.inputs, tuple(self.nodes), outputs, shape)

    def expression(self, binding: int, depth: int) -> int:
        if depth > MAX_DEPTH:
            raise Malformed(f"expression: more than {MAX_DEPTH} levels of nesting")
        left = self.operand(depth)
        while _LEVEL.get(self.tokens[self.at], 0) > binding:
            symbol = self.take()
            right = self.expression(_LEVEL[symbol] - (symbol == "^"), depth + 1)
            left = self.power(left, right) if symbol == "^" else self.add(_NAMES[symbol], left, right)
        return left

    def operand(self, depth: int) -> int:
        token = self.take()
        if token == "(":
            inner = self.expression(0, depth + 1)
            self.take(")")
            return inner
        if token == "-":
            inner = self.expression(30, depth + 1)
            value = self.literal(inner)
            return self.add("neg", inner) if value is None else self.add("const", params=(-value,))
        if token[:1].isdigit() or token[:1] == ".":
            value = float(token)
            if math.isinf(value):
                raise Malformed(f"expression: {token} is too large")
            return self.add("const", params=(value,))
        if token in self.places and self.tokens[self.at] != "(":
            return self.add("input", params=(self.places[token],))
        if token in ("pi", "e") and self.tokens[self.at] != "(":
            return self.add("const", params=(math.pi if token == "pi" else math.e,))
        self.take("(")
        args = [self.expression(0, depth + 1)]
        while self.accept(","):
            args.append(self.expression(0, depth + 1))
        self.take(")")
        return self.call(token, args)

    def literal(self, node: int) -> float | None:
        return self.nodes[node][2][0] if self.nodes[node][0] == "const" else None

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
        if name in _UNARY and count == 1:
            return self.add(name, x)
        if name in ("min", "max") and count > 1:
            for other in args[1:]:
                x = self.add(name, x, other)
            return x
        if name == "sum":
            return self.add("sum", *args)
        if name == "where" and count == 3:
            return self.add("where", *args)
        if name == "clamp" and count == 3:
            low, high = self.literal(args[1]), self.literal(args[2])
            if low is None or high is None:
                return self.add("min", self.add("max", x, args[1]), args[2])
            return self.add("clamp", x, params=(low, high))
        if name in ("sinh", "cosh") and count == 1:
            both = self.add("sub" if name == "sinh" else "add", self.add("exp", x), self.add("exp", self.add("neg", x)))
            return self.add("div", both, self.add("const", params=(2.0,)))
        if name == "square" and count == 1:
            return self.add("pow", x, params=(2,))
        zero, one = self.add("const", params=(0.0,)), self.add("const", params=(1.0,))
        if name == "step" and count == 1:
            return self.add("where", x, one, zero)
        if name == "sign" and count == 1:
            inner = self.add("where", self.add("neg", x), zero, one)
            return self.add("where", x, inner, self.add("const", params=(-1.0,)))
        raise Malformed(f"expression: {name[:40] or 'the end'!r} with {count} arguments is not known")
