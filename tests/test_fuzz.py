"""Functions from strangers: text, sympy trees and torch functions are read or refused; what is read means one thing everywhere.

Texts are drawn by kind and seed: valid ones from a grammar, mutated ones, garbage, deep, huge and long ones; they are never run.
Trees are drawn with long integers and fractions, torch functions with chains of casts.
"""

from __future__ import annotations

import builtins
import collections
import itertools
import os
import pickle
import random
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from fractions import Fraction
from functools import reduce

import numpy as np
import pytest
import sympy
import torch
from balls import exact_value, holds, settle, values

from partita.arithmetic import Interval
from partita.errors import ExpressionError, ExpressionLimitError, NotTraceableError
from partita.functions import Graph, expressions, infix, parse, tracing
from partita.functions.expressions import FUNCTIONS, MAX_CHARACTERS, MAX_NODES
from partita.functions.operations import MAX_EXPONENT
from partita.functions.sympy_trees import _Reader, from_sympy

VARIABLES = ["x0", "x1"]
ALIASES = {"x": "x0", "y": "x1"}
PATIENCE = 20  # seconds for one text: beyond, it hangs
NUMBERS = ("0", "1", "2.5", ".5", "3.", "1e-3", "7E+2", "0.1", "1e300", "1e-320", "12345678901234567890", "pi", "e")
PIECES = (
    *NUMBERS,
    *FUNCTIONS,
    "x0",
    "x1",
    "x",
    "y",
    *"+-*/^(),;",
    "**",
    "<",
    ">=",
    " and ",
    " or ",
    " not ",
    " ",
    "\t",
    "\n",
    "_",
    ".",
    "'",
    '"',
    "\\",
    "\0",
)
STRANGE = "²½πｘ𝑥∞−×÷√\u200b\u202e\ufeff\ud7ff💥Ａ０é＋"


def valid_text(rng: random.Random, depth: int = 4) -> str:
    """An expression of the language, with blanks and both signs of powers."""
    blank = rng.choice(["", "", "", " ", "\n "])
    kind = rng.random()
    if depth == 0 or kind < 0.25:
        return blank + rng.choice([*VARIABLES, *ALIASES, *NUMBERS])
    inner = [valid_text(rng, depth - 1) for _ in range(3)]
    if kind < 0.55:
        return (
            f"({inner[0]}){blank}{rng.choice('+-*/')}{inner[1]}" if rng.random() < 0.5 else f"{inner[0]} - ({inner[1]})"
        )
    if kind < 0.65:
        exponent = rng.choice([str(rng.randint(-64, 64)), "0.5", "2", "3", f"({inner[1]})"])
        return f"({inner[0]}){rng.choice(['^', '**'])}{exponent}"
    if kind < 0.72:
        return f"-({inner[0]})"
    name = rng.choice(list(FUNCTIONS))
    if name == "clamp":
        return f"clamp({inner[0]}, {-rng.random():.3f}, {rng.random():.3f})"
    if name == "where" and rng.random() < 0.6:
        return f"where({condition(rng, inner)}, {inner[0]}, {inner[1]})"
    count = {"min": rng.randint(2, 4), "max": rng.randint(2, 4), "sum": rng.randint(1, 6), "where": 3}.get(name, 1)
    return f"{name}({', '.join((inner * 2)[:count])})"


def condition(rng: random.Random, inner: list[str]) -> str:
    """A comparison, a chain of them, or a few joined ones."""
    signs = ("<", "<=", ">", ">=", "≤", "≥")
    parts = [f"{a} {rng.choice(signs)} {b}" for a, b in itertools.pairwise(inner)]
    chain = f"{parts[0]} {rng.choice(signs)} 0"
    joined = rng.choice([" and ", " or ", " && ", " || "])
    return rng.choice([parts[0], chain, joined.join(parts), f"not ({joined.join(parts)})", f"not {chain}"])


def shaped_text(rng: random.Random) -> str:
    """A scalar, a vector or a sequence of tokens."""
    part = lambda: valid_text(rng, rng.randint(0, 4))  # noqa: E731
    return rng.choice(
        [part, part, lambda: f"{part()}, {part()}", lambda: f"{part()},", lambda: f"{part()}; {part()}"]
    )()


def mutated_text(rng: random.Random) -> str:
    """A valid text after one to eight edits."""
    text = list(shaped_text(rng))
    for _ in range(rng.randint(1, 8)):
        i, j = (rng.randrange(len(text) + 1) for _ in range(2))
        edit = rng.randrange(5)
        if edit == 0:
            del text[i : i + rng.randint(1, 3)]
        elif edit == 1:
            text.insert(i, rng.choice(PIECES))
        elif edit == 2:
            text[i:i] = text[min(i, j) : max(i, j)]
        elif edit == 3:
            text[i : i + 1] = rng.choice(STRANGE)
        else:
            text = [*text[j:], *text[:j]]
    return "".join(text)


def garbage_text(rng: random.Random) -> str:
    """Pieces of the language in any order, bytes, or any characters of Unicode."""
    count = rng.randint(0, 60)
    kind = rng.randrange(3)
    if kind == 0:
        return "".join(rng.choice(PIECES) for _ in range(count))
    if kind == 1:
        return rng.randbytes(count).decode("latin-1")
    return "".join(chr(rng.choice([rng.randrange(0x250), rng.randrange(0x110000)])) for _ in range(count))


def extreme_text(rng: random.Random) -> str:
    """Deep nesting, huge numbers and exponents, very long texts."""
    n = rng.choice([10, 49, 50, 51, 200, 1990, 2010, 50_000])
    opening = rng.choice(["(", "-", "sin(", "x^", "min(x, ", "-(", "((", "2^-"])
    return rng.choice(
        [
            opening * n + "x" + ")" * (n * opening.count("(")),
            opening * n,
            rng.choice("0123456789") * n,
            f"1e{rng.choice(['', '-', '+'])}{'9' * rng.randint(1, 6)}",
            "0." + "0" * n + "1",
            f"x^{rng.choice(['', '-'])}{rng.choice([63, 64, 65, 1000, 10**30])}",
            f"x^64.{'0' * (n % 100)}1",
            "^".join(["9"] * min(n, 3000)),
            "+".join(["x*y"] * min(n, 3000)),
            ", ".join(["x"] * min(n, 3000)),
            ";".join(["x,y"] * min(n, 3000)),
            " " * n + "x",
            "sum(" + ",".join(["x"] * min(n, 3000)) + ")",
            "a" * n,
            "sin" * n + "(x)",
        ]
    )


KINDS: dict[str, Callable[[random.Random], str]] = {
    "valid": shaped_text,
    "mutated": mutated_text,
    "garbage": garbage_text,
    "extreme": extreme_text,
}

_FORBIDDEN = [(builtins, name) for name in ("eval", "exec", "compile", "__import__", "open")]
_FORBIDDEN += [(os, "system"), (subprocess, "Popen"), (pickle, "loads")]


@contextmanager
def watched() -> Iterator[None]:
    """Nothing may be evaluated, imported, opened or started inside, and nothing may take forever."""

    def forbidden(*_: object, **__: object) -> None:
        raise AssertionError("reading an expression called what it must not")

    def expired(*_: object) -> None:
        raise AssertionError(f"a text took more than {PATIENCE} seconds")

    before, kept = signal.signal(signal.SIGALRM, expired), [getattr(*place) for place in _FORBIDDEN]
    signal.setitimer(signal.ITIMER_REAL, PATIENCE)
    for place in _FORBIDDEN:
        setattr(*place, forbidden)
    try:
        yield
    finally:
        for place, real in zip(_FORBIDDEN, kept, strict=True):
            setattr(*place, real)
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def fault(text: str) -> str | None:
    """What is wrong with the reading of a text: None where it is refused by an `ExpressionError`, or read and all laws hold."""
    try:
        with watched():
            graph = parse(text, VARIABLES, ALIASES)
    except ExpressionError as error:
        return None if 0 < len(str(error)) < 3 * MAX_CHARACTERS else "a message without words or end"
    if len(text) > MAX_CHARACTERS or len(graph.nodes) > MAX_NODES:
        return "a graph beyond the limits"
    if any(abs(node.parameters[0]) > MAX_EXPONENT for node in graph.nodes if node.operation == "pow"):
        return "an exponent beyond the limits"
    return _not_the_same(graph) or _not_enclosed(graph)


def _not_the_same(graph: Graph) -> str | None:
    """Whether the text printed from a graph reads as another graph; shared parts may make it too long to read."""
    try:
        again = parse(graph.infix(), VARIABLES)
    except ExpressionLimitError:
        return None
    return None if again == graph and again.sha256 == graph.sha256 else "infix reads as another graph"


LO, HI = np.array([[0.5, -0.25], [-1.0, 2.0]]), np.array([[0.5, -0.25], [1.5, 2.5]])
POINTS = ((0.5, -0.25), (0.75, 2.25))


def _not_enclosed(graph: Graph) -> str | None:
    """Whether a value leaves its enclosure, in balls; the plain evaluation must answer in its shape."""
    if graph.evaluate(LO).shape != (2, *graph.output_shape):
        return "an evaluation of another shape"
    if len(graph.nodes) > 60:
        return None
    found = graph.enclose(LO, HI)
    for box, point in enumerate(POINTS):
        for output in range(len(graph.outputs)):
            ends = float(found.lo[box, output]), float(found.hi[box, output])
            if settle(lambda ends=ends, point=point, k=output: holds(*ends, values(graph, point)[k])) is False:
                return "a value outside its enclosure"
    return None


def faults(kind: str, count: int, seed: int) -> collections.Counter[str]:
    """The faults of so many texts, counted."""
    rng, found = random.Random(f"{kind} {seed}"), collections.Counter()
    for _ in range(count):
        problem = fault(KINDS[kind](rng))
        found.update([problem] if problem else [])
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_texts_are_read_or_refused(kind: str) -> None:
    assert not faults(kind, 1200, seed=0)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(1, 6))
def test_a_hundred_thousand_texts(kind: str, seed: int) -> None:
    assert not faults(kind, 5000, seed)


def test_most_valid_texts_are_read() -> None:
    """The grammar is one that the parser knows: what it refuses are powers of constants and sizes."""
    rng, read = random.Random(1), 0
    for _ in range(300):
        try:
            read += bool(parse(shaped_text(rng), VARIABLES, ALIASES))
        except ExpressionLimitError:
            continue
    assert read > 250


# --- sympy trees with numbers that float64 does not hold -------------------------------------------------------------


def number(rng: random.Random) -> sympy.Expr:
    """An integer or fraction of up to 200 bits, often next to a power of 2 or of 10."""
    near = rng.choice([2, 10]) ** rng.randint(0, 60) + rng.randint(-2, 2)
    top = rng.choice([near, rng.getrandbits(rng.randint(1, 200)), rng.randint(-9, 9)])
    bottom = rng.choice([1, 1, near, rng.getrandbits(rng.randint(1, 200)), rng.randint(1, 9)])
    return sympy.Rational(top, bottom or 1) if rng.random() < 0.9 else sympy.Float(f"0.{rng.getrandbits(160)}", 50)


def tree(rng: random.Random, depth: int = 4) -> sympy.Expr:
    """Sums, products, powers and extrema of variables and numbers."""
    kind = rng.random()
    if depth == 0 or kind < 0.15:
        return number(rng) if rng.random() < 0.5 else sympy.Symbol(rng.choice(VARIABLES))
    a, b = tree(rng, depth - 1), tree(rng, depth - 1)
    if kind < 0.4:
        return a + b
    if kind < 0.7:
        return a * b
    if kind < 0.8:
        return a ** rng.randint(0, 3)
    return rng.choice([sympy.Max, sympy.Min])(a, b) if kind < 0.95 else sympy.Abs(a)


def exact_tree(expression: sympy.Expr, point: dict[str, Fraction]) -> Fraction:
    """The value of such a tree in rational arithmetic, from its own structure."""
    if expression.is_Symbol:
        return point[str(expression)]
    if expression.is_Rational or expression.is_Float:
        return Fraction(int(sympy.Rational(expression).p), int(sympy.Rational(expression).q))
    parts = [exact_tree(part, point) for part in expression.args]
    if expression.is_Pow:
        return parts[0] ** int(expression.exp)
    if expression.is_Add or expression.is_Mul:
        return reduce(lambda a, b: a + b if expression.is_Add else a * b, parts)
    return {sympy.Max: max, sympy.Min: min, sympy.Abs: lambda values: abs(values[0])}[expression.func](parts)


def tree_faults(count: int, seed: int) -> collections.Counter[str]:
    """Trees whose graph has another value in rational arithmetic, or an enclosure without it."""
    rng, found = random.Random(f"tree {seed}"), collections.Counter()
    for _ in range(count):
        expression, point = tree(rng), [rng.uniform(-1, 1) for _ in VARIABLES]
        try:
            graph = from_sympy(expression, VARIABLES)
            truth = exact_tree(expression, {n: Fraction(v) for n, v in zip(VARIABLES, point)})
        except (ExpressionError, ZeroDivisionError):
            continue
        found["read"] += 1
        found["another value"] += exact_value(graph, point) != truth
        ends = graph.enclose([point], [point])
        lo, hi = float(ends.lo[0, 0]), float(ends.hi[0, 0])
        found["a value outside its enclosure"] += (np.isfinite(lo) and truth < lo) or (np.isfinite(hi) and truth > hi)
    return found


def test_numbers_of_sympy_trees_keep_their_value() -> None:
    found = tree_faults(400, seed=0)
    assert found.pop("read") > 300 and not found.total()


def test_negative_control_rounded_numbers_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_Reader, "_rational", lambda reader, value: reader._constant(float(value)))
    found = tree_faults(100, seed=0)
    assert found["another value"] > 30 and found["a value outside its enclosure"] > 5


# --- torch functions with chains of casts ----------------------------------------------------------------------------

STEPS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    **{
        str(d): lambda x, d=d: x.to(d)
        for d in (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int64)
    },
    "sin": torch.sin,
    "negative": lambda x: -x,
    "larger": lambda x: torch.maximum(x, torch.tensor(0.1)),
    "offset": lambda x: x + 1000.0,
    "third": lambda x: x / 3,
    "float32 factor": lambda x: x * torch.tensor([0.3]),
    "float64 factor": lambda x: x * torch.tensor([0.3], dtype=torch.float64),
    "mask": lambda x: (x > 0.2) * 0.1,
    "masked": lambda x: (x > 0.2) * x,
    "choice": lambda x: torch.where(x > 0.2, x, 0.7),
    "count": lambda x: torch.stack([x > 0, x > 0.5], 1).sum(1),
    "written": lambda x: torch.zeros_like(x).add_(x),
    "written as float32": lambda x: torch.zeros_like(x, dtype=torch.float32).copy_(x),
}


def cast_faults(count: int, seed: int) -> collections.Counter[str]:
    """Chains that are traced although torch computes something else: beyond what float64 explains."""
    rng, found = random.Random(f"casts {seed}"), collections.Counter()
    z = torch.linspace(-1, 1, 257, dtype=torch.float64)[:, None]
    for _ in range(count):
        names = [rng.choice(list(STEPS)) for _ in range(rng.randint(1, 5))]

        def chain(z: torch.Tensor, names: list[str] = names) -> torch.Tensor:
            return 1000.0 + 0 * z[:, 0] + reduce(lambda x, name: STEPS[name](x), names, z[:, 0])

        try:
            graph = tracing.trace(chain, [(1,)])
        except NotTraceableError:
            found["refused"] += 1
            continue
        found["read"] += 1
        found["another value"] += bool(np.abs(graph.evaluate(z.numpy()) - chain(z).double().numpy()).max() > 1e-11)
    return found


def test_casts_are_followed_or_refused() -> None:
    found = cast_faults(600, seed=0)
    assert found["read"] > 100 and found["refused"] > 100 and not found["another value"]


@pytest.mark.parametrize(
    "guard", ["_rounded", *(pytest.param(g, marks=pytest.mark.slow) for g in ("_require_no_rounding", "_is_narrower"))]
)
def test_negative_control_casts_that_are_dropped_are_caught(guard: str, monkeypatch: pytest.MonkeyPatch) -> None:
    lax = {"_require_no_rounding": lambda *_: None, "_is_narrower": lambda *_: False, "_rounded": lambda x, _: x}
    monkeypatch.setattr(tracing, guard, lax[guard])
    assert cast_faults(300, seed=0)["another value"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 6))
def test_thousands_of_trees_and_casts(seed: int) -> None:
    trees = tree_faults(4000, seed)
    assert trees.pop("read") > 3000 and not trees.total()
    assert not cast_faults(5000, seed)["another value"]


# --- negative controls -----------------------------------------------------------------------------------------------


def test_negative_control_a_parser_that_evaluates_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    real = expressions._Parser._literal
    monkeypatch.setattr(
        expressions._Parser, "_literal", lambda parser, token: float(eval(token.text)) or real(parser, token)
    )
    with pytest.raises(AssertionError, match="must not"):
        fault("x + 2.5")


def test_negative_control_endless_reading_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[__name__], "PATIENCE", 0.2)
    monkeypatch.setattr(expressions._Parser, "_operand", lambda parser, depth: all(n >= 0 for n in itertools.count()))
    with pytest.raises(AssertionError, match="took more than"):
        fault("x + 1")


@pytest.mark.parametrize(
    ("limit", "text"),
    [
        ("MAX_CHARACTERS", " " * MAX_CHARACTERS + "x"),
        ("MAX_NODES", "+".join(["x"] * (MAX_NODES - 1) + ["y"])),
        ("MAX_EXPONENT", "x^65"),
    ],
)
def test_negative_control_limits_that_are_gone_are_caught(
    limit: str, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert fault(text) is None
    monkeypatch.setattr(expressions, limit, 10**6)
    try:
        assert "beyond the limits" in str(fault(text))
    except Exception as error:  # the graph has its own limit of exponents
        assert limit == "MAX_EXPONENT" and "64" in str(error)


def test_negative_control_nesting_without_a_limit_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(expressions, "MAX_DEPTH", 10**6)
    monkeypatch.setattr(expressions, "MAX_CHARACTERS", 10**6)
    with pytest.raises(RecursionError):
        fault("(" * 50_000)


def test_negative_control_lost_parentheses_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(infix._BINARY, "sub", (" - ", 0))
    assert faults("valid", 300, seed=0)["infix reads as another graph"] > 0


def test_negative_control_wrong_enclosures_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Interval, "exp", lambda x: Interval.point(np.exp(x.lo)))
    assert faults("valid", 600, seed=0)["a value outside its enclosure"] > 0
