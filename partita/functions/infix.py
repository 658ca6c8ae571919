"""Nodes written as text that the expression parser reads back to the same nodes."""

import math
from collections.abc import Mapping, Sequence
from decimal import Decimal

from partita.errors import ExpressionLimitError, UnsupportedError
from partita.functions.operations import Node

__all__ = ["infix"]

MAX_CHARACTERS = 100_000
_BINARY = {"add": (" + ", 1), "sub": (" - ", 1), "mul": ("*", 2), "div": ("/", 2)}
_UNARY, _POWER, _ATOM = 3, 4, 5


def infix(nodes: Sequence[Node], outputs: Sequence[int], shape: tuple[int, ...], names: Sequence[str]) -> str:
    """The outputs as text: "a" for a scalar, "a, b" for a vector, "a, b; c, d" for tokens.

    A single component keeps its separator: "a," has the shape (1,) and "a, b;" the shape (1, 2).
    Raises `ExpressionLimitError` when shared nodes, written out, are too long; `UnsupportedError` beyond two axes.
    """
    texts: dict[int, tuple[str, int]] = {}
    last = {k: position for position, node in enumerate(nodes) for k in node.arguments}
    last |= dict.fromkeys(outputs, len(nodes))
    for position, node in enumerate(nodes):
        texts[position] = _text(node, nodes, texts, names)
        if len(texts[position][0]) > MAX_CHARACTERS:
            raise ExpressionLimitError(
                f"infix: found more than {MAX_CHARACTERS} characters; to_json shares common parts"
            )
        for k in node.arguments:  # a sum of n terms has n beginnings, of a quadratic number of characters together
            if last[k] == position:
                texts.pop(k, None)
    parts = [texts[k][0] for k in outputs]
    if len(shape) == 0:
        return parts[0]
    if len(shape) == 1:
        return ", ".join(parts) + ("," if shape == (1,) else "")
    if len(shape) == 2:
        rows = [", ".join(parts[i : i + shape[1]]) for i in range(0, len(parts), shape[1])]
        return "; ".join(rows) + (";" if shape[0] == 1 else "")
    raise UnsupportedError(f"infix: found outputs of shape {shape}, expected at most two axes; use to_json")


def _text(
    node: Node, nodes: Sequence[Node], texts: Mapping[int, tuple[str, int]], names: Sequence[str]
) -> tuple[str, int]:
    """The text of one node and how tightly it binds."""

    def argument(k: int, level: int) -> str:
        text, binding = texts[node.arguments[k]]
        return text if binding >= level else f"({text})"

    operation, parameters = node.operation, node.parameters
    if operation == "input":
        return names[int(parameters[0])], _ATOM
    if operation == "const":
        return _number(parameters[0]), _UNARY if math.copysign(1.0, parameters[0]) < 0 else _ATOM
    if operation == "pow":
        return f"{argument(0, _ATOM)}^{parameters[0]}", _POWER
    if operation == "neg":  # -3 is a number, -(3) the negation of one
        literal = nodes[node.arguments[0]].operation == "const"
        return f"-({texts[node.arguments[0]][0]})" if literal else f"-{argument(0, _POWER)}", _UNARY
    if operation in _BINARY:
        symbol, level = _BINARY[operation]
        right = argument(1, level + 1)
        return argument(0, level) + symbol + (f"({right})" if right.startswith("-") else right), level
    listed = [texts[k][0] for k in node.arguments] + [_number(p) for p in parameters]
    return f"{operation}({', '.join(listed)})", _ATOM


def _number(value: float) -> str:
    """A text that reads back as the same float64 number: integers in full where that takes up to 24 digits, else the shortest."""
    text = repr(value).removesuffix(".0")
    return str(int(value)) if 2**53 < abs(value) < 1e24 and int(value) != Decimal(text) else text
