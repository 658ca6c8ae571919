"""What torch's operators compute, as graph nodes: one rule each.

An array of node positions is an int64 tensor, so whatever only moves data (views, slices, concatenation) is torch's own operator
applied to the positions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from typing import Any

import torch

from partita.errors import UnsupportedError
from partita.functions.torch_rules import Positions, Rules, axes_of

__all__ = ["COMPARISONS", "LOGIC", "MOVES", "RULES", "UNROUNDED", "WHOLE"]


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


MOVES = _names(
    "view _unsafe_view permute transpose t expand select slice unsqueeze squeeze cat stack split split_with_sizes unbind clone "
    "detach alias lift_fresh flip roll repeat index index_select diagonal unfold"
)
COMPARISONS = _names("gt ge lt le")
LOGIC = _names("logical_and logical_or logical_not bitwise_and bitwise_or bitwise_not")

# operators whose result is one of their arguments, up to sign, a constant, or an integer next to one: they round nothing
UNROUNDED = COMPARISONS | _names(
    "neg abs relu sign floor ceil where minimum maximum fmin fmax amin amax min max clamp clamp_min clamp_max hardtanh heaviside "
    "zeros_like ones_like full_like empty_like"
)
# operators on integers: bounds of the arguments' absolute values to one of the result (for sum: per term)
WHOLE: Mapping[str, Callable[..., int]] = {
    **dict.fromkeys(["add", "sub", "rsub"], lambda a, b: a + b),
    "mul": lambda a, b: a * b,
    "where": lambda condition, a, b: max(a, b),
    **dict.fromkeys(["minimum", "maximum"], lambda a, b: max(a, b)),
    **dict.fromkeys(["neg", "abs"], lambda a: a),
    "sum": lambda a, *_: a,
}


def _use(name: str, r: Rules, *arguments: Any) -> Positions:
    """Another rule."""
    result: Positions = RULES[name](r, *arguments)
    return result


def _unary(operation: str) -> Callable[..., Positions]:
    return lambda r, x: r.each(lambda n: r.add(operation, n), x)


def _binary(operation: str) -> Callable[..., Positions]:
    return lambda r, x, y: r.each(lambda a, b: r.add(operation, a, b), x, y)


def _with_factor(operation: str) -> Callable[..., Positions]:
    """add and sub, whose second argument may carry a factor alpha."""

    def rule(r: Rules, x: Positions, y: Positions, alpha: float = 1) -> Positions:
        if alpha != 1:
            y = _use("mul", r, r.constants(float(alpha)), y)
        return r.each(lambda a, b: r.add(operation, a, b), x, y)

    return rule


def _square(r: Rules, x: Positions) -> Positions:
    return r.each(lambda n: r.add("pow", n, parameters=(2,)), x)


def _folded(operation: str) -> Callable[..., Positions]:
    """A binary operation folded along axes; what torch returns beside it (where the maximum is) is not followed."""

    def rule(r: Rules, x: Positions, dim: Any = None, keepdim: bool = False) -> Positions:
        return r.reduce(x, dim, keepdim, lambda row: reduce(lambda a, b: r.add(operation, a, b), row))

    return rule


def _sum(r: Rules, x: Positions, dim: Any = None, keepdim: bool = False, dtype: Any = None) -> Positions:
    return r.reduce(x, dim, keepdim, r.total)


def _mean(r: Rules, x: Positions, dim: Any = None, keepdim: bool = False, dtype: Any = None) -> Positions:
    count = math.prod(x.shape[i] for i in axes_of(x, dim))
    return _use("div", r, _sum(r, x, dim, keepdim), r.constants(float(count)))


def _norm(
    r: Rules, x: Positions, ord: float = 2, dim: Any = None, keepdim: bool = False, dtype: Any = None
) -> Positions:
    if ord == 1:
        return _sum(r, _use("abs", r, x), dim, keepdim)
    if ord == math.inf:
        return _use("amax", r, _use("abs", r, x), dim, keepdim)
    if ord != 2:
        raise UnsupportedError(f"it computes a norm of order {ord}; supported are 1, 2 and inf")
    return _use("sqrt", r, _sum(r, _square(r, x), dim, keepdim))


def _variance(
    r: Rules, x: Positions, dim: Any = None, correction: float | None = None, keepdim: bool = False
) -> Positions:
    correction = 1 if correction is None else correction
    free = math.prod(x.shape[i] for i in axes_of(x, dim)) - correction
    if free <= 0:
        raise UnsupportedError("it computes a variance of too few numbers")
    squares = _square(r, _use("sub", r, x, _mean(r, x, dim, True)))
    return _use("div", r, _sum(r, squares, dim, keepdim), r.constants(float(free)))


def _cdist(r: Rules, x: Positions, y: Positions, p: float, *_: Any) -> Positions:
    return _norm(r, _use("sub", r, x[..., :, None, :], y[..., None, :, :]), p, -1)


def _gt(r: Rules, x: Positions, y: Positions) -> Positions:
    return r.each(lambda a, b: r.negated(r.add("sub", b, a)), x, y)


def _ge(r: Rules, x: Positions, y: Positions) -> Positions:
    return r.each(lambda a, b: r.add("sub", a, b), x, y)


def _addmm(r: Rules, bias: Positions, a: Positions, b: Positions, beta: float = 1, alpha: float = 1) -> Positions:
    if beta != 1 or alpha != 1:
        raise UnsupportedError("it calls addmm with beta or alpha other than 1, which is not supported")
    return _use("add", r, r.matmul(a, b), bias)


def _clamp(r: Rules, x: Positions, least: Any = None, most: Any = None) -> Positions:
    none = torch.full((), -1)
    low, high = (none if end is None else end for end in (least, most))
    return r.each(lambda a, b, c: r.clamp(a, None if b < 0 else b, None if c < 0 else c), x, low, high)


def _layer_norm(
    r: Rules, x: Positions, shape: Sequence[int], weight: Any, bias: Any, eps: float
) -> tuple[Positions, ...]:
    dims = list(range(x.ndim - len(shape), x.ndim))
    mean = _mean(r, x, dims, True)
    middle = _use("sub", r, x, mean)
    spread = _use("add", r, _mean(r, _square(r, middle), dims, True), r.constants(eps))
    out = _use("div", r, middle, _use("sqrt", r, spread))
    out = out if weight is None else _use("mul", r, out, weight)
    return (out if bias is None else _use("add", r, out, bias)), mean, _use("rsqrt", r, spread)


def _softmax(r: Rules, x: Positions, dim: int, *_: Any) -> Positions:
    return r.along(x, dim, r.softmax)


def _log_softmax(r: Rules, x: Positions, dim: int, *_: Any) -> Positions:
    return _use("log", r, _softmax(r, x, dim))


def _filled(value: float) -> Callable[..., Positions]:
    return lambda r, x, *_, **__: torch.full(x.shape, r.constant(value), dtype=torch.int64)


RULES: Mapping[str, Callable[..., Any]] = {
    **{
        n: _unary(n)
        for n in ("neg", "exp", "log", "sqrt", "sin", "cos", "tan", "atan", "tanh", "sigmoid", "erf", "abs", "relu")
    },
    **{n: _unary(n) for n in ("asinh", "acosh", "atanh", "floor")},
    **{
        name: _binary(operation)
        for name, operation in {"minimum": "min", "maximum": "max", "fmin": "min", "fmax": "max"}.items()
    },
    "add": _with_factor("add"),
    "sub": _with_factor("sub"),
    "rsub": lambda r, x, y, alpha=1: _use("sub", r, y, x, alpha),
    "mul": lambda r, x, y: r.each(r.product, x, y),
    "div": _binary("div"),
    "hypot": lambda r, x, y: _use("sqrt", r, _use("add", r, _square(r, x), _square(r, y))),
    "pow": lambda r, x, y: r.each(r.power, x, y),
    "reciprocal": lambda r, x: r.each(lambda n: r.add("div", r.constant(1.0), n), x),
    "rsqrt": lambda r, x: r.each(lambda n: r.add("div", r.constant(1.0), r.add("sqrt", n)), x),
    "exp2": lambda r, x: r.each(lambda n: r.power(r.constant(2.0), n), x),
    "expm1": lambda r, x: r.each(lambda n: r.add("sub", r.add("exp", n), r.constant(1.0)), x),
    "log1p": lambda r, x: r.each(lambda n: r.add("log", r.add("add", r.constant(1.0), n)), x),
    "sinh": lambda r, x: r.each(lambda n: r.half_of_exponentials("sub", n), x),
    "cosh": lambda r, x: r.each(lambda n: r.half_of_exponentials("add", n), x),
    "erfc": lambda r, x: r.each(lambda n: r.add("sub", r.constant(1.0), r.add("erf", n)), x),
    "silu": lambda r, x: r.each(lambda n: r.add("mul", n, r.add("sigmoid", n)), x),
    "gelu": lambda r, x, approximate="none": r.each(lambda n: r.gelu(n, approximate), x),
    "leaky_relu": lambda r, x, slope=0.01: r.each(lambda n: r.leaky(n, slope), x),
    "hardtanh": lambda r, x, least=-1.0, most=1.0: r.each(
        lambda n: r.add("clamp", n, parameters=(float(least), float(most))), x
    ),
    "softplus": lambda r, x, beta=1, threshold=20: r.each(lambda n: r.softplus(n, float(beta), float(threshold)), x),
    "elu": lambda r, x, alpha=1.0, scale=1.0, input_scale=1.0: r.each(lambda n: r.elu(n, alpha, scale, input_scale), x),
    "mish": lambda r, x: r.each(lambda n: r.add("mul", n, r.add("tanh", r.smooth_softplus(n, 1.0))), x),
    "hardsigmoid": lambda r, x: r.each(r.hard_sigmoid, x),
    "hardswish": lambda r, x: r.each(lambda n: r.add("mul", n, r.hard_sigmoid(n)), x),
    "ceil": lambda r, x: r.each(lambda n: r.add("neg", r.add("floor", r.add("neg", n))), x),
    "clamp": _clamp,
    "clamp_min": lambda r, x, least: _clamp(r, x, least),
    "clamp_max": lambda r, x, most: _clamp(r, x, None, most),
    "sign": lambda r, x: r.each(r.sign, x),
    "where": lambda r, c, x, y: r.each(r.choose, c, x, y),
    "gt": _gt,
    "ge": _ge,
    "lt": lambda r, x, y: _gt(r, y, x),
    "le": lambda r, x, y: _ge(r, y, x),
    "logical_and": _binary("min"),
    "bitwise_and": _binary("min"),
    "logical_or": _binary("max"),
    "bitwise_or": _binary("max"),
    "logical_not": lambda r, x: r.each(r.negated, x),
    "bitwise_not": lambda r, x: r.each(r.negated, x),
    "heaviside": lambda r, x, at_zero: r.each(r.heaviside, x, at_zero),
    "sum": _sum,
    "mean": _mean,
    "amax": _folded("max"),
    "amin": _folded("min"),
    "max": _folded("max"),
    "min": _folded("min"),
    "var": _variance,
    "std": lambda r, x, *a, **k: _use("sqrt", r, _variance(r, x, *a, **k)),
    "logsumexp": lambda r, x, dim, keepdim=False: _use("log", r, _sum(r, _use("exp", r, x), dim, keepdim)),
    "prod": _folded("mul"),
    "linalg_vector_norm": _norm,
    "mm": lambda r, a, b: r.matmul(a, b),
    "bmm": lambda r, a, b: r.matmul(a, b),
    "mv": lambda r, a, b: r.matmul(a, b[:, None])[:, 0],
    "dot": lambda r, a, b: r.matmul(a[None], b[:, None])[0, 0],
    "addmm": _addmm,
    "_cdist_forward": _cdist,
    "_softmax": _softmax,
    "_safe_softmax": _softmax,
    "_log_softmax": _log_softmax,
    "native_layer_norm": _layer_norm,
    "zeros_like": _filled(0.0),
    "ones_like": _filled(1.0),
    "full_like": lambda r, x, value, **_: torch.full(x.shape, r.constant(value), dtype=torch.int64),
    "empty_like": lambda r, x, **_: torch.full_like(x, -2),  # read before it is written to, it is refused
}
