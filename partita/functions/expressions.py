"""A small language for functions, read by its own tokenizer and Pratt parser: text in, `Graph` out, never Python.

    expression   numbers, variables, pi, e, + - * / ^ (or **), unary -, parentheses, function calls
    a, b         a vector of two values, output_shape (2,); a trailing comma makes a vector of one
    a, b; c, d   a sequence of two tokens, output_shape (2, 2); a trailing semicolon makes a sequence of one
    where(c, a, b)   a where c ≥ 0, b elsewhere
    where(x > y, a, b)   a where the comparison holds, b elsewhere; also < <= >=, chains 0 < x <= y, and, or, not
From tight to loose: ^ (to the right), unary -, * and /, + and -, comparisons, not, and, or. So -x^2 is -(x^2) and 2^-x is 2^(-x).
Comparisons are exact: x > y is false at x = y, in the graph and in floats (the sign of a float difference is exact).
x^k with a literal integer k is a power, x^0.5 a square root, any other power exp(b log a), which needs a > 0.
Literals, pi and e mean the nearest float64 number, exactly (`rounded_literals` lists those that differ from what is written);
constants are not folded.
"""

import difflib
import math
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from functools import reduce

from partita.errors import ExpressionError, ExpressionLimitError
from partita.functions.branches import Truth
from partita.functions.graph import Graph, GraphBuilder
from partita.functions.operations import MAX_EXPONENT

__all__ = [
    "CONSTANTS",
    "FUNCTIONS",
    "MAX_CHARACTERS",
    "MAX_DEPTH",
    "MAX_NODES",
    "function_names",
    "parse",
    "rounded_literals",
]

MAX_CHARACTERS = 20_000  # reading and printing take under a second and 10 MB, growing in proportion: docs/soundness.md
MAX_NODES = 10_000
MAX_DEPTH = 50
CONSTANTS: Mapping[str, float] = {"pi": math.pi, "e": math.e}
_OR, _AND, _NOT, _COMPARISON, _SUM, _PRODUCT, _UNARY, _POWER = 2, 4, 6, 8, 10, 20, 30, 40
_INFIX = {"+": ("add", _SUM), "-": ("sub", _SUM), "*": ("mul", _PRODUCT), "/": ("div", _PRODUCT), "^": ("pow", _POWER)}
_LOGIC = {"or": _OR, "and": _AND, **dict.fromkeys(("<", "<=", ">", ">="), _COMPARISON)}
_SAME = {"**": "^", "≤": "<=", "≥": ">=", "&&": "and", "||": "or"}
_SYNONYMS = {"ln": "log", "heaviside": "step", "ceiling": "ceil"}
_TOKEN = re.compile(
    r"(?P<number>(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)|(?P<name>[A-Za-z_]\w*)|(?P<symbol>\*\*|&&|\|\||[<>]=|[≤≥<>]|[-+*/^(),;])|(?P<blank>\s+)",
    re.ASCII,
)
_NAME = re.compile(r"[A-Za-z_]\w*", re.ASCII)
Rule = Callable[..., int]


def parse(text: str, variables: Sequence[str], aliases: Mapping[str, str] | None = None) -> Graph:
    """The graph of an expression in the variables, in their order; an alias is another name of a variable.

    Raises `ExpressionError`, with the place marked, for text outside the language, and `ExpressionLimitError` beyond
    20,000 characters, 10,000 nodes, 50 levels of nesting or exponents of ±64.

    >>> parse("sin(3*x) + x*y^2", ["x0", "x1"], {"x": "x0", "y": "x1"}).infix()
    'sin(3*x0) + x0*x1^2'
    """
    if not isinstance(text, str):
        raise ExpressionError(f"expression: found a {type(text).__name__}, expected text such as 'sin(3*x)'")
    if len(text) > MAX_CHARACTERS:
        raise ExpressionLimitError(f"expression: found {len(text)} characters, expected at most {MAX_CHARACTERS}")
    names = {name: position for position, name in enumerate(variables)}
    if len(names) < len(variables) or not all(map(_NAME.fullmatch, names)):
        raise ExpressionError(f"expression: found the variables {list(variables)}, expected distinct names such as x0")
    names |= {alias: names[name] for alias, name in (aliases or {}).items() if name in names and alias not in names}
    return _Parser(text, tuple(variables), names).graph()


def rounded_literals(text: str, variables: Collection[str] = ()) -> tuple[str, ...]:
    """The literals and constants of an expression that float64 does not hold, in the order of their first use.

    >>> rounded_literals("0.5*x + 0.1*sin(pi*x) + 9007199254740993*x", ["x"])
    ('0.1', 'pi', '9007199254740993')
    """
    found: dict[str, None] = {}
    for match in _TOKEN.finditer(text):
        token, kind = match.group(), match.lastgroup
        constant = kind == "name" and token in CONSTANTS and token not in variables
        if token not in found and (constant or (kind == "number" and not _is_held(token))):
            found[token] = None
    return tuple(found)


def _is_held(literal: str) -> bool:
    """Whether float64 holds the number that is written; in decimals, for powers of ten may be enormous."""
    try:
        return Decimal(literal) == Decimal(float(literal))
    except InvalidOperation:  # an exponent of twenty digits
        return False


@dataclass(frozen=True)
class _Token:
    kind: str  # number, name, symbol or end
    text: str
    column: int
    length: int = 1  # as it was written: `**` is the token ^

    def __str__(self) -> str:
        return "the end" if self.kind == "end" else f"{self.text!r}"


class _Parser:
    """One reading of one text. `depth` counts nesting; without it, recursion goes one level per precedence at most."""

    def __init__(self, text: str, variables: tuple[str, ...], names: Mapping[str, int]) -> None:
        self.text, self.variables, self.names = text, variables, names
        self.builder, self.count = GraphBuilder(len(variables)), 0
        self.tokens, self.position = self._tokenize(), 0

    @property
    def next(self) -> _Token:
        return self.tokens[self.position]

    def graph(self) -> Graph:
        """The whole text: rows of values."""
        rows = [self._row()]
        is_sequence = self._accept(";")
        while is_sequence and not (self.next.kind == "end" and len(rows) == 1):
            rows.append(self._row())
            if len(rows[-1][0]) != len(rows[0][0]):
                raise self.error(f"found a token of {len(rows[-1][0])} values, expected {len(rows[0][0])} as at first")
            if not self._accept(";"):
                break
        if self.next.kind != "end":
            raise self.error(f"found {self.next}, expected an operator, ',', ';' or the end{self._missing_operator()}")
        outputs = [node for values, _ in rows for node in values]
        vector = (len(outputs),) if rows[0][1] else ()
        return self.builder.finish(outputs, (len(rows), len(rows[0][0])) if is_sequence else vector)

    def _row(self) -> tuple[list[int], bool]:
        """Values between commas, and whether there was a comma."""
        values = [self._number(0)]
        has_comma = False
        while self._accept(","):
            if not has_comma and (self.next.kind == "end" or self.next.text == ";"):
                return values, True
            has_comma = True
            values.append(self._number(0))
        return values, has_comma

    def _expression(self, binding: int, depth: int) -> int | Truth:
        """The longest expression from here whose operators bind tighter than `binding`."""
        start = self.next
        left = self._operand(depth)
        while self._level(self.next) > binding:
            token = self._take()
            if token.text in _INFIX:
                operation, level = _INFIX[token.text]
                number = self._as_number(left, start)
                if operation == "pow":
                    left = self._power(number, self._number(self._deeper(depth, token), level - 1), token)
                else:
                    left = self.add(operation, number, self._number(depth, level))
            elif _LOGIC[token.text] == _COMPARISON:
                left = self._comparison(self._as_number(left, start), token, depth)
            else:
                first = self._as_truth(left, start)
                left = first.joined(token.text, self._truth(depth, _LOGIC[token.text]), self.add)
        return left

    def _level(self, token: _Token) -> int:
        if token.kind == "symbol" or token.text in ("and", "or"):
            return _INFIX[token.text][1] if token.text in _INFIX else _LOGIC.get(token.text, 0)
        return 0

    def _number(self, depth: int, binding: int = 0) -> int:
        start = self.next
        return self._as_number(self._expression(binding, depth), start)

    def _truth(self, depth: int, binding: int) -> Truth:
        start = self.next
        return self._as_truth(self._expression(binding, depth), start)

    def _as_number(self, value: int | Truth, start: _Token) -> int:
        if isinstance(value, Truth):
            raise self.error(
                "found a comparison, expected a number: comparisons are the first argument of where(…, a, b)", start
            )
        return value

    def _as_truth(self, value: int | Truth, start: _Token) -> Truth:
        if not isinstance(value, Truth):
            raise self.error("found a number beside and, or, not; expected a comparison such as x > 0", start)
        return value

    def _comparison(self, left: int, token: _Token, depth: int) -> Truth:
        """a < b, and chains a < b <= c, which hold if each part does."""
        found: Truth | None = None
        while True:
            right = self._number(depth, _COMPARISON)
            part = Truth.compared(token.text, left, right, self.add, self.literal)
            found = part if found is None else found.joined("and", part, self.add)
            if _LOGIC.get(self.next.text) != _COMPARISON:
                return found
            left, token = right, self._take()

    def _operand(self, depth: int) -> int | Truth:
        """A number, a name, a call, a negation or a parenthesis."""
        token = self._take()
        if token.kind == "name" and token.text == "not":
            return self._truth(self._deeper(depth, token), _NOT).opposite
        if token.kind == "number":
            return self.constant(self._literal(token))
        if token.kind == "name":
            return self._call(token, self._deeper(depth, token)) if self.next.text == "(" else self._name(token)
        if token.text == "-":
            return self._negation(self._deeper(depth, token))
        if token.text == "(":
            inner = self._expression(0, self._deeper(depth, token))
            self._expect(")")
            return inner
        raise self.error(f"found {token}, expected a number, a name, '-' or '('", token)

    def _negation(self, depth: int) -> int:
        """-operand; the sign of a literal is part of it, unless the literal is the base of a power."""
        token, after = self.next, self.tokens[min(self.position + 1, len(self.tokens) - 1)]
        constant = (
            token.kind == "name" and token.text in CONSTANTS and token.text not in self.names and after.text != "("
        )
        if (token.kind == "number" or constant) and after.text != "^":
            self._take()
            return self.constant(-(CONSTANTS[token.text] if constant else self._literal(token)))
        return self.add("neg", self._number(depth, _UNARY))

    def _power(self, base: int, exponent: int, token: _Token) -> int:
        """base ^ exponent: an integer power, a square root, or exp(exponent · log base)."""
        value = self.literal(exponent)
        if value is not None:
            if abs(value) > MAX_EXPONENT:
                raise self.error(
                    f"found the exponent {value:g}, expected one within ±{MAX_EXPONENT}", token, limit=True
                )
            if value == int(value):
                return self.add("pow", base, parameters=(int(value),))
            if value == 0.5:
                return self.add("sqrt", base)
        return self.add("exp", self.add("mul", exponent, self.add("log", base)))

    def _name(self, token: _Token) -> int:
        if token.text in self.names:
            return self.add("input", parameters=(self.names[token.text],))
        if token.text in CONSTANTS:
            return self.constant(CONSTANTS[token.text])
        if token.text in FUNCTIONS:
            raise self.error(f"{token.text} is a function: expected {token.text}(…)", token)
        listed = ", ".join(self.variables[:12]) + (", …" if len(self.variables) > 12 else "")
        numbered = re.fullmatch(r"[a-z]\d+", token.text)  # a variable that the domain does not have
        hint = "" if numbered else _did_you_mean(token.text, [*self.names, *CONSTANTS, *FUNCTIONS])
        letters = [name for name in self.names if name in ("x", "y", "z")]
        if token.text in ("x", "y", "z"):
            named = f", also named {', '.join(letters)}" if letters else ""
            hint = named or "; x, y and z are names of up to three variables"
        elif not numbered:
            hint += f"; constants: {', '.join(CONSTANTS)}; functions: {function_names()}"
        raise self.error(f"{token.text} is unknown: this domain has {listed}{hint}", token)

    def _call(self, token: _Token, depth: int) -> int:
        if token.text not in FUNCTIONS:
            hint = _did_you_mean(token.text, FUNCTIONS)
            raise self.error(f"{token.text} is not a function{hint}; the functions are {function_names()}", token)
        self._expect("(")
        start = self.next
        first = self._expression(0, depth)
        truth = first if isinstance(first, Truth) and token.text == "where" else None
        arguments = [-1 if truth is not None else self._as_number(first, start)]
        while self._accept(","):
            arguments.append(self._number(depth))
        self._expect(")")
        least, most, rule = FUNCTIONS[token.text]
        if truth is not None and len(arguments) == most:
            return truth.choose(self.builder, *arguments[1:])
        if not least <= len(arguments) <= most:
            expected = least if least == most else f"at least {least}"
            raise self.error(f"{token.text}: found {len(arguments)} arguments, expected {expected}", token)
        return rule(self, token, *arguments)

    def constant(self, value: float) -> int:
        """The node of a literal."""
        return self.add("const", parameters=(value,))

    def literal(self, node: int) -> float | None:
        """The number that a node stands for, if it is a literal."""
        return self.builder.nodes[node].parameters[0] if self.builder.nodes[node].operation == "const" else None

    def add(self, operation: str, *arguments: int, parameters: tuple[float | int, ...] = ()) -> int:
        """A node, counted against the limit even if it is shared."""
        self.count += 1
        if self.count > MAX_NODES:
            raise self.error(f"found more than {MAX_NODES} nodes, expected fewer: split the expression", limit=True)
        return self.builder.add(operation, *arguments, parameters=parameters)

    def _tokenize(self) -> list[_Token]:
        tokens, column = [], 0
        while column < len(self.text):
            match = _TOKEN.match(self.text, column)
            if match is None:
                expected = "expected numbers, names or one of + - * / ^ ( ) , ; < <= > >="
                if self.text[column] in "=!":
                    expected += "; the comparisons in where(x > y, a, b) are <, <=, > and >="
                elif self.text[column] in "&|":
                    expected += "; comparisons are joined by and, or"
                raise self.error(f"found {self.text[column]!r}, {expected}", column=column)
            if match.lastgroup != "blank":
                text = _SAME.get(match.group(), match.group())
                tokens.append(_Token(str(match.lastgroup), text, column, len(match.group())))
            column = match.end()
        return [*tokens, _Token("end", "", len(self.text))]

    def _literal(self, token: _Token) -> float:
        value = float(token.text)
        if math.isinf(value):
            raise self.error(f"found {token.text}, expected a number below 1.8e308", token)
        return value

    def _take(self) -> _Token:
        token = self.next
        self.position += token.kind != "end"
        return token

    def _accept(self, symbol: str) -> bool:
        return self.next.text == symbol and bool(self._take())

    def _expect(self, symbol: str) -> None:
        if not self._accept(symbol):
            raise self.error(f"found {self.next}, expected an operator or {symbol!r}{self._missing_operator()}")

    def _deeper(self, depth: int, token: _Token) -> int:
        if depth >= MAX_DEPTH:
            raise self.error(f"found more than {MAX_DEPTH} levels of nesting", token, limit=True)
        return depth + 1

    def _missing_operator(self) -> str:
        return "; a product needs its *" if self.next.kind in ("name", "number") or self.next.text == "(" else ""

    def error(
        self, message: str, token: _Token | None = None, *, column: int | None = None, limit: bool = False
    ) -> ExpressionError:
        """The error with the text and a mark below the place."""
        token = token or (self.next if column is None else _Token("symbol", "?", column))
        column, width = token.column, min(token.length, 40)
        start = max(0, column - 40)
        shown = "".join(c if c.isprintable() else " " for c in self.text[start : column + 40])
        marked = f"{message}\n  {shown}\n  {' ' * (column - start)}{'^' * width}"
        kind = ExpressionLimitError if limit else ExpressionError
        return kind(f"expression: {marked}").at(column, column + token.length, message)


def _did_you_mean(name: str, known: Iterable[str]) -> str:
    known = list(known)
    close = [_SYNONYMS[name]] if _SYNONYMS.get(name) in known else difflib.get_close_matches(name, known, n=1)
    return f"; did you mean {close[0]}?" if close else ""


def _operation(name: str) -> Rule:
    """The function that is one operation of the graph."""
    return lambda parser, _, *arguments: parser.add(name, *arguments)


def _repeated(name: str) -> Rule:
    """A binary operation over a list, from the left."""
    return lambda parser, _, *arguments: reduce(lambda a, b: parser.add(name, a, b), arguments)


def _clamp(parser: _Parser, token: _Token, x: int, least: int, most: int) -> int:
    """The operation `clamp` for literal bounds, min(max(x, least), most) for others."""
    low, high = parser.literal(least), parser.literal(most)
    if low is None or high is None:
        return parser.add("min", parser.add("max", x, least), most)
    if low > high:
        raise parser.error(f"clamp: found the bounds {low:g} > {high:g}, expected the smaller first", token)
    return parser.add("clamp", x, parameters=(low, high))


def _half_of_exponentials(operation: str) -> Rule:
    """(eˣ ± e⁻ˣ) / 2."""

    def rule(parser: _Parser, _: _Token, x: int) -> int:
        both = parser.add(operation, parser.add("exp", x), parser.add("exp", parser.add("neg", x)))
        return parser.add("div", both, parser.constant(2.0))

    return rule


def _sign(parser: _Parser, _: _Token, x: int) -> int:
    """-1, 0 or 1."""
    at_least_zero = parser.add("where", parser.add("neg", x), parser.constant(0.0), parser.constant(1.0))
    return parser.add("where", x, at_least_zero, parser.constant(-1.0))


def _ceil(parser: _Parser, _: _Token, x: int) -> int:
    return parser.add("neg", parser.add("floor", parser.add("neg", x)))


_HYPERBOLIC = ("asinh", "acosh", "atanh")
_UNARY_NAMES = (
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
FUNCTIONS: Mapping[str, tuple[int, int, Rule]] = {
    **{name: (1, 1, _operation(name)) for name in _UNARY_NAMES},
    "sinh": (1, 1, _half_of_exponentials("sub")),
    "cosh": (1, 1, _half_of_exponentials("add")),
    "ceil": (1, 1, _ceil),
    "sign": (1, 1, _sign),
    "step": (1, 1, lambda parser, _, x: parser.add("where", x, parser.constant(1.0), parser.constant(0.0))),
    "square": (1, 1, lambda parser, _, x: parser.add("pow", x, parameters=(2,))),
    "min": (2, MAX_NODES, _repeated("min")),
    "max": (2, MAX_NODES, _repeated("max")),
    "sum": (1, MAX_NODES, _operation("sum")),
    "clamp": (3, 3, _clamp),
    "where": (3, 3, _operation("where")),
}


def function_names() -> str:
    """All functions of the language, in one line.

    >>> "asinh" in function_names().split(", ")
    True
    """
    return ", ".join(sorted(FUNCTIONS))
