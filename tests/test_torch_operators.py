"""What each torch operator means as a graph, against torch itself: every operator, keyword and documented branch, on both sides.

A row is a function of a column x and of points `z = (x, y)`. The rows together must call every operator that the tracer knows.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from partita.functions import tracing
from partita.functions.torch_operators import MOVES, RULES, UNROUNDED
from partita.functions.torch_rules import Rules
from partita.functions.tracing import trace

aten = torch.ops.aten
PLACES = [0.0, 0.5, 1.0, 3.0, 6.0, 19.0, 20.0, 30.0]  # where some operator changes its formula
EDGES = sorted({s * (p + d) for p in PLACES for s in (-1, 1) for d in (-1e-4, -1e-9, 0.0, 1e-9, 1e-4)})
LINE = np.column_stack([EDGES, np.roll(EDGES, 7)])
SMALL = LINE / 16  # for what overflows or loses all digits far out
POSITIVE = np.abs(LINE) + 0.25
MATRIX = torch.tensor([[1.0, 2.0, -0.5], [3.0, 0.0, 0.25]], dtype=torch.float64)
SQUARE = MATRIX[:, :2]
X = lambda rule: lambda z: rule(z[:, 0])  # noqa: E731
XY = lambda rule: lambda z: rule(z[:, 0], z[:, 1])  # noqa: E731


def _in_place(*writes):
    def function(z):
        y = z * 1.0
        for write in writes:
            write(y)
        return y

    return function


# name: function, or (function, points)
TABLE = {
    # elementwise functions of one argument
    **{f"{r.__name__}": X(r) for r in (torch.neg, torch.sin, torch.cos, torch.atan, torch.tanh, torch.sigmoid)},
    **{f"{r.__name__}": X(r) for r in (torch.erf, torch.erfc, torch.abs, torch.relu, torch.square, torch.sign)},
    **{f"{r.__name__}": X(r) for r in (torch.asinh, torch.floor, torch.ceil)},
    "acosh": X(lambda x: torch.acosh(x.abs() + 1)),
    "atanh": (X(torch.atanh), SMALL / 2),
    **{f"{r.__name__}": (X(r), SMALL) for r in (torch.exp, torch.exp2, torch.expm1, torch.sinh, torch.cosh, torch.tan)},
    **{f"{r.__name__}": (X(r), POSITIVE) for r in (torch.log, torch.sqrt, torch.rsqrt, torch.reciprocal, torch.log1p)},
    # activations, with the arguments that change their branches
    "softplus": X(F.softplus),
    "softplus, beta 2": X(lambda x: F.softplus(x, beta=2)),
    "softplus, beta 0.1, threshold 3": X(lambda x: F.softplus(x, beta=0.1, threshold=3)),
    "softplus, threshold 1": X(lambda x: F.softplus(x, threshold=1)),
    "softplus, beta -1": (X(lambda x: F.softplus(x, beta=-1, threshold=20)), SMALL),
    "mish": X(F.mish),
    "gelu": X(F.gelu),
    "gelu, tanh": X(lambda x: F.gelu(x, approximate="tanh")),
    "silu": X(F.silu),
    "elu": X(F.elu),
    "elu, alpha 0.3": X(lambda x: F.elu(x, alpha=0.3)),
    "selu": X(F.selu),
    "leaky relu": X(F.leaky_relu),
    "leaky relu, slope 3": X(lambda x: F.leaky_relu(x, 3.0)),
    "leaky relu, slope -2": X(lambda x: F.leaky_relu(x, -2.0)),
    "hardtanh": X(F.hardtanh),
    "hardtanh, ends": X(lambda x: F.hardtanh(x, -3.0, 6.0)),
    "relu6": X(F.relu6),
    "hardsigmoid": X(F.hardsigmoid),
    "hardswish": X(F.hardswish),
    "logsigmoid": (X(lambda x: -F.softplus(-x)), SMALL),
    # arithmetic
    "add, alpha": XY(lambda x, y: torch.add(x, y, alpha=0.3)),
    "sub, alpha": XY(lambda x, y: torch.sub(x, y, alpha=2)),
    "rsub": XY(lambda x, y: torch.rsub(x, y, alpha=3) + (1 - x)),
    "mul": XY(lambda x, y: x * y * 0.1),
    "div": (XY(lambda x, y: x / y + 1 / y), POSITIVE),
    "hypot": XY(torch.hypot),
    "pow": (XY(lambda x, y: x**3 + x**-2 + x**0.5 + x**-0.5 + x**1.7 + 2**x + x**y), POSITIVE / 8),
    "pow, odd and even": X(lambda x: x**3 + x**2 + x**0 + x**1),
    "minimum": XY(lambda x, y: torch.minimum(x, y) + torch.fmin(x, 2 * y)),
    "maximum": XY(lambda x, y: torch.maximum(x, y) + torch.fmax(x, 2 * y) + torch.max(x, y)),
    "clamp": X(lambda x: x.clamp(-3, 6)),
    "clamp, one end": X(lambda x: x.clamp(min=-3) + x.clamp(max=6) + x.clip(-1)),
    "clamp, empty": X(lambda x: x.clamp(6, -3)),
    "clamp, tensors": XY(lambda x, y: torch.clamp(x, -y.abs(), y) + torch.clamp(x, min=y) + torch.clamp(x, max=y)),
    "clamp_min": X(lambda x: aten.clamp_min(x, -3.0) + aten.clamp_max(x, 6.0)),
    "heaviside": X(lambda x: torch.heaviside(x, torch.tensor(0.3, dtype=torch.float64))),
    # truth values
    "gt": XY(lambda x, y: torch.where(x > y, x, y + 1) + (x > 3)),
    "ge": XY(lambda x, y: torch.where(x >= y, x, y + 1) + (x >= 3)),
    "lt": XY(lambda x, y: torch.where(x < y, x, y + 1) + (x < 3)),
    "le": XY(lambda x, y: torch.where(x <= y, x, y + 1) + (x <= 3)),
    "and": XY(lambda x, y: torch.where((x > 0) & (y > 0), x, 7.0) + torch.logical_and(x > 1, y > 1)),
    "or": XY(lambda x, y: torch.where((x > 0) | (y > 0), x, 7.0) + torch.logical_or(x > 1, y > 1)),
    "not": XY(lambda x, y: torch.where(~(x > 0), x, y) + torch.logical_not(y > 1)),
    "where of numbers": X(lambda x: torch.where(x > 3, 0.1, 0.7)),  # float32 numbers
    "truth times number": X(lambda x: (x > 3) * 0.1 + x),  # 0.1 as float32
    "truth in integers": X(lambda x: ((x > 3) * 2 - 1) * x),
    "counts": lambda z: (
        (z > 1).sum(1) * z[:, 0] - (-(z > 3).sum(1)).double() + torch.maximum((z > 0).sum(1), (z > 1).sum(1))
    ),
    "truth as integers": X(lambda x: (x > 0).long() * x + torch.where(x > 1, 1, 2) * x + (x > 3).double()),
    # reductions
    "sum": lambda z: z.sum(1) + z.sum(1, keepdim=True)[:, 0] + torch.stack([z, z], 1).sum((1, 2)),
    "mean": lambda z: z.mean(1) + z.mean(-1, keepdim=True)[:, 0],
    "amax": lambda z: z.amax(1) + z.amin(1) + torch.stack([z, -z], 1).amax((1, 2)),
    "max": lambda z: z.max(1).values + z.min(dim=1, keepdim=True).values[:, 0],
    "max of all": lambda z: torch.stack([row.max() + 2 * row.min() + row.sum() + row.prod() for row in z]),
    "prod": (lambda z: z.prod(1) + z.prod(1, keepdim=True)[:, 0], SMALL),
    "var": (lambda z: z.var(1) + z.var(1, correction=0) + z.var(1, unbiased=False, keepdim=True)[:, 0], SMALL),
    "var, default": (lambda z: torch.var(z, 1, correction=None), SMALL),
    "std": (lambda z: torch.cat([z, z + 1], 1).std(1) + torch.cat([z, z + 1], 1).std(1, correction=0.5), SMALL),
    "logsumexp": (lambda z: z.logsumexp(1) + z.logsumexp(1, keepdim=True)[:, 0], SMALL),
    "norm": lambda z: z.norm(dim=1) + z.norm(p=1, dim=1) + z.norm(p=math.inf, dim=1, keepdim=True)[:, 0],
    "vector norm": lambda z: torch.linalg.vector_norm(z, dim=1) + torch.linalg.vector_norm(z, 1, dim=1),
    "softmax": (lambda z: z.softmax(1) + torch.stack([z, 2 * z], 1).softmax(1)[:, 0], SMALL),
    "log_softmax": (lambda z: z.log_softmax(1), SMALL),
    "attention": (lambda z: F.scaled_dot_product_attention(z[:, :, None], z[:, :, None], z[:, :, None])[..., 0], SMALL),
    "safe softmax": (lambda z: aten._safe_softmax(z, 1), SMALL),
    "layer norm": (lambda z: F.layer_norm(z, (2,)) + F.layer_norm(z, (2,), SQUARE[0], SQUARE[1], 0.5), SMALL),
    "native layer norm": (lambda z: torch.cat(aten.native_layer_norm(z, [2], None, None, 0.25), 1), SMALL),
    # products
    "mm": lambda z: z @ MATRIX,
    "addmm": nn.Linear(2, 3).double(),
    "bmm": lambda z: torch.bmm(z[:, :, None], z[:, None, :]),
    "mv": lambda z: torch.mv(z, SQUARE[0]),
    "dot": lambda z: torch.stack([torch.dot(row, SQUARE[1]) for row in z]),
    "cdist": lambda z: torch.cdist(z, SQUARE) + torch.cdist(z, SQUARE, p=1) + torch.cdist(z, SQUARE, p=math.inf),
    # new tensors, casts and writing
    "like": lambda z: z + torch.zeros_like(z) + torch.ones_like(z) + torch.full_like(z, 0.1),
    "full_like in float32": lambda z: z + torch.full_like(z, 0.1, dtype=torch.float32),
    "empty_like": lambda z: torch.empty_like(z).copy_(z),
    "casts that round nothing": lambda z: z.double().to(torch.float64) + (z > 1).half() + (z > 3).float(),
    "copy": _in_place(lambda y: y[:, 0].copy_(y[:, 1]), lambda y: y[:, 1].fill_(0.1)),
    "zero": _in_place(lambda y: y[:, 0].zero_(), lambda y: y[:, 1].add_(0.3).mul_(y[:, 1])),
    "truth into numbers": _in_place(lambda y: y[:, 0].gt_(3.0), lambda y: y[:, 1].copy_(y[:, 1] > 1)),
    "truth into truth": lambda z: (z > 0).logical_and_(z < 3) * z,
    # data that moves
    "views": lambda z: z.view(-1, 1, 2).permute(2, 0, 1).transpose(0, 1).squeeze(2).unsqueeze(1).reshape(-1, 2),
    "unsafe view": lambda z: aten._unsafe_view(z, [-1, 2, 1]).expand(-1, 2, 3),
    "parts": lambda z: z.t()[0, :, None] + torch.cat(z.split(1, dim=1)[::-1], 1) + torch.stack(z.unbind(1), 1),
    "sizes": lambda z: torch.cat(z.split([1, 1], dim=1), 1) + torch.cat(z.chunk(2, 1), 1) + z.narrow(1, 0, 2),
    "copies": lambda z: (
        z.clone() + z.detach() + z.flip(1) + z.roll(1, 1) + z.repeat(1, 2)[:, 1:3] + aten.alias(z) + aten.lift_fresh(z)
    ),
    "selection": lambda z: z[:, [1, 0]] + z.index_select(1, torch.tensor([1, 1])) + z[..., 1:].expand(-1, 2),
    "diagonal": lambda z: torch.stack([z, 2 * z], 1).diagonal(dim1=1, dim2=2) + z.unfold(1, 2, 1)[:, 0],
    "fresh": lambda z: z * torch.tensor([0.1, 0.7], dtype=torch.float64),
}


def row(name):
    found = TABLE[name]
    return found if isinstance(found, tuple) else (found, LINE)


@pytest.fixture
def called(monkeypatch):
    """The names of the operators that traced tensors are given to."""
    names, real = set(), tracing._apply
    monkeypatch.setattr(
        tracing, "_apply", lambda f, a, k: (names.add(f.overloadpacket.__name__.removesuffix("_")), real(f, a, k))[1]
    )
    return names


def largest_error(name) -> float:
    """Between torch and the graph of its trace, relative where values are large."""
    function, points = row(name)
    with torch.no_grad():
        expected = function(torch.from_numpy(points)).double().numpy()
    graph = trace(function, [(2,)])
    assert graph.output_shape == expected.shape[1:] and np.isfinite(expected).all()
    return float((np.abs(graph.evaluate(points) - expected) / (1 + np.abs(expected))).max())


@pytest.mark.parametrize("name", TABLE)
def test_operators_mean_what_torch_computes(name):
    assert largest_error(name) < 2e-14


def test_the_table_calls_every_operator(called):
    for name in TABLE:
        trace(row(name)[0], [(2,)])
    known = {*RULES, *MOVES, "_to_copy", *tracing._WRITES}
    assert known - called == set()
    assert set(RULES) >= UNROUNDED


# --- negative controls: a rule that leaves out a branch is seen ------------------------------------------------------

WRONG = {
    "softplus": ("softplus", lambda r, x, beta, threshold: r.smooth_softplus(x, beta)),
    "gelu, tanh": ("gelu", lambda r, x, approximate, real=Rules.gelu: real(r, x, "none")),
    "leaky relu, slope 3": ("leaky", lambda r, x, slope: r.add("max", x, r.add("mul", r.constant(slope), x))),
    "heaviside": ("heaviside", lambda r, x, at_zero: r.add("where", x, r.constant(1.0), r.constant(0.0))),
}


@pytest.mark.parametrize("name", WRONG)
def test_negative_control_a_missing_branch_is_seen(name, monkeypatch):
    monkeypatch.setattr(Rules, *WRONG[name])
    assert largest_error(name) > 1e-13
