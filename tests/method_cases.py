"""The table that every law of tests/test_method_laws.py runs over: all of METHODS times the cases below.

A method is enrolled by being in METHODS, a function or domain by a line in CASES. Each case is small enough for every method.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import cache
from typing import Any

import numpy as np
import torch

import partita as pa
from partita.compiler.request_options import request_for
from partita.errors import ToleranceError
from partita.methods import METHODS, Method, Plan, Request
from partita.methods.planner import best_plan
from partita.methods.request import DEFAULT_MAX_BYTES

SINGLE = {"dtype": torch.float32}
HALF = {"dtype": torch.bfloat16}
SMALL = {"max_bytes": 1 << 14}  # so that searches end soon, for heads that do not exist or would be large
MIXED = "sin(3*x0) + x0*cos(2*x1)"


@dataclass(frozen=True, eq=False)
class Case:
    """One function, domain and tolerance, with options of `pa.compile` other than the method.

    `kinds`: what it is a case of; `test_every_kind_of_case_is_in_the_table` says which are needed. `inside`: which points of the
    box a region holds, in rational arithmetic.
    """

    name: str
    kinds: str
    function: Any
    domain: Callable[[], Any]
    tolerance: float
    options: dict[str, Any] = field(default_factory=dict)
    inside: Callable[[Fraction, Fraction], bool] | None = None

    def __post_init__(self) -> None:
        if callable(self.function):
            self.options.setdefault("trace", False)  # black boxes, unless the options say so

    @property
    def is_plain(self) -> bool:
        """Whether one Lipschitz constant is declared, the least that is true, and the claim is about a supremum in float64."""
        return isinstance(self.options.get("lipschitz"), float) and not {"norm", "dtype"} & set(self.options)

    @property
    def dtype(self) -> torch.dtype:
        return self.options.get("dtype", torch.float64)

    def kept(self, points: np.ndarray) -> np.ndarray:
        """Which points lie in the domain, as rational numbers."""
        if self.inside is None:
            return np.ones(len(points), bool)
        return np.array([self.inside(*map(Fraction, point)) for point in points.tolist()])

    def compile(self, **options: Any) -> pa.Compiled:
        return pa.compile(self.function, self.domain(), tolerance=self.tolerance, **{**self.options, **options})


def line() -> pa.Box:
    return pa.Box([-1], [1])


def square() -> pa.Box:
    return pa.Box([-1, -1], [1, 1])


def tokens() -> pa.Box:
    return pa.Box.sequence(-1, 1, tokens=2, dim=2)


def pair() -> tuple[pa.Box, pa.Box]:
    return pa.Box([0], [1]), pa.Box([0], [1])


def cone() -> pa.Region:
    return pa.Region(pa.Box([0, -1], [1, 1]), "0.25 <= x0 <= 1 and -x0 <= x1 <= x0")


def _circle(points: int) -> np.ndarray:
    t = np.linspace(0, 2 * np.pi, points, endpoint=False)
    return np.stack([np.cos(t), np.sin(t), 0.5 * np.sin(2 * t), 0 * t], axis=1)


def _waves(z: np.ndarray) -> np.ndarray:
    return np.sin(3 * z[:, 0]) + z[:, 0] * np.cos(2 * z[:, 1])


CASES = [
    Case("sine 1-D typed", "1-D expression smooth", "sin(5*x)", lambda: pa.Box([-2], [2]), 0.2),
    Case("kink typed", "1-D expression kink", "abs(x0 - 0.3)", line, 0.1),
    Case("convex", "1-D expression kink smooth", "abs(x0 - 0.2) + x0^2", line, 0.05),
    Case("steep typed", "1-D expression steep", "sqrt(abs(x0 - 0.3)) + x0*log(abs(x0))", line, 0.2),
    Case("mixed", "2-D expression smooth", MIXED, square, 0.4),
    Case("logistic", "1-D expression smooth", "x0/(1 + exp(-3*x0))", lambda: pa.Box([-2], [3]), 0.05),
    Case("straight ends", "1-D expression smooth", "0.5*x0*(1 + erf(x0)) - 3", lambda: pa.Box([-12], [20]), 0.02),
    Case("straight single", "1-D expression float32", "log(1 + exp(x0))", lambda: pa.Box([-12], [20]), 0.05, SINGLE),
    Case("constant", "2-D expression constant", "0*x0 + 3", lambda: pa.Box([0, 0], [1, 1]), 0.1),
    Case("vector 2-D typed", "2-D expression vector", "x0*x1, x0 - x1", square, 0.25),
    Case("cube", "3-D expression smooth", "sin(x0)*x1 + x2", lambda: pa.Box([0] * 3, [1] * 3), 0.4),
    Case("tokens typed", "sequence expression vector", "x0 - x1, x2; x3, x0 - x3", tokens, 1.0, {**SMALL}),
    Case(
        "two tokens typed",
        "sequence expression vector",
        "sin(x0) - x1; x0*x1",
        lambda: pa.Box.sequence(-1, 1, tokens=2, dim=1),
        1.2,
        {**SMALL},
    ),
    Case("cross typed", "pair expression vector", "sin(k0) * q0, q0 - k0", lambda: (line(), pa.Box([0], [2])), 0.3),
    Case("cross pieces", "pair expression kink", "max(k0, 2*q0 - 0.5)", pair, 0.2),
    Case("tiny scale", "1-D expression scaled", "1e-9*sin(1e6*x0)", lambda: pa.Box([0], [3e-6]), 3e-10),
    Case(
        "traced 2-D",
        "2-D expression smooth",
        lambda z: torch.tanh(z[:, 0]) + z[:, 0] * z[:, 1],
        square,
        0.8,
        {"trace": True},
    ),
    Case("soft", "2-D expression smooth", "x0*x1", square, 0.4, {"sharpness": 8.0}),
    # black boxes: what is declared of them decides what is claimed
    Case("undeclared", "2-D undeclared smooth", _waves, square, 0.2),
    Case("torch 2-D", "2-D declared smooth", _waves, square, 0.4, {"lipschitz": 4.0}),
    Case("kink 1-D", "1-D declared kink", lambda z: np.abs(z[:, 0] - 0.3), line, 0.05, {"lipschitz": 1.0}),
    Case(
        "cone 3-D",
        "3-D declared kink",
        lambda z: np.linalg.norm(z, axis=1),
        lambda: pa.Box([-1] * 3, [1] * 3),
        0.4,
        {"lipschitz": 1.0},
    ),
    Case(
        "square root",
        "1-D declared hölder",
        lambda z: np.sqrt(np.abs(z[:, 0])),
        line,
        0.25,
        {"modulus": pa.Modulus(1.0, 0.5)},
    ),
    Case(
        "unequal sides",
        "2-D declared scaled",
        lambda z: z[:, 0] + np.sin(z[:, 1] / 10),
        lambda: pa.Box([0, -50], [1, 50]),
        0.5,
        {"lipschitz": [1.0, 0.1]},
    ),
    Case(
        "far from zero",
        "1-D declared scaled",
        lambda z: np.sin(z[:, 0]),
        lambda: pa.Box([1e6], [1e6 + 1]),
        0.02,
        {"lipschitz": 1.0},
    ),
    Case(
        "sequence 2x2",
        "sequence declared vector",
        lambda z: torch.tanh(z.flip(1) + 0.5 * z),
        tokens,
        1.2,
        {"lipschitz": 1.5, **SMALL},
    ),
    Case(
        "three tokens of one",
        "sequence declared vector",
        lambda z: z.cumsum(1) / 2,
        lambda: pa.Box.sequence(0, 1, tokens=3, dim=1),
        0.4,
        {"lipschitz": 1.0, **SMALL},
    ),
    Case("cross", "pair declared", lambda k, q: k[:, 0] * q[:, 0], pair, 0.1, {"lipschitz": 1.5}),
    Case(
        "cross sequences",
        "pair sequence declared vector",
        lambda k, q: torch.tanh(k + q),
        lambda: (pa.Box.sequence(0, 1, tokens=2, dim=1), pa.Box.sequence(-1, 0, tokens=2, dim=1)),
        0.8,
        {"lipschitz": 1.5, **SMALL},
    ),
    Case("cross hessian", "pair hessian", lambda k, q: np.sin(k[:, 0]) * q[:, 0], pair, 0.1, {"hessian": 2.0}),
    Case("hessian", "2-D hessian smooth", _waves, square, 0.2, {"hessian": 10.0}),
    # point clouds
    Case("curve typed", "cloud expression", "x0*x1 + x2", lambda: pa.PointCloud(_circle(400), fill_distance=0.02), 0.3),
    Case(
        "curve in R4",
        "cloud declared",
        lambda z: z[:, 0] * z[:, 1] + z[:, 2],
        lambda: pa.PointCloud(_circle(2000), fill_distance=0.01),
        0.3,
        {"lipschitz": 2.0},
    ),
    Case(
        "finite set",
        "cloud sequence declared vector",
        lambda z: z.sum(2),
        lambda: pa.PointCloud(np.random.default_rng(0).normal(size=(60, 2, 2))),
        0.1,
        {"lipschitz": 2.0},
    ),
    # regions: f may be undefined around them
    Case(
        "disc typed",
        "region 2-D expression smooth",
        "x0*x1/(x0**2 + x1**2 + 1)",
        lambda: pa.Ball([0, 0], 1),
        0.3,
        inside=lambda x, y: x * x + y * y <= 1,
    ),
    Case(
        "cone typed",
        "region 2-D expression smooth float32",
        "log(x0 + x1 + 0.25)",
        cone,
        0.4,
        SINGLE,
        lambda x, y: 4 * x >= 1 and x <= 1 and abs(y) <= x,
    ),
    Case(
        "simplex",
        "region 2-D declared smooth",
        lambda z: np.log(z[:, 0] + z[:, 1]),
        lambda: pa.Simplex([[1, 0], [0, 1], [1, 1]]),
        0.2,
        {"lipschitz": 1.42},
        lambda x, y: x <= 1 and y <= 1 and x + y >= 1,
    ),
    Case(
        "union L2",
        "region 2-D declared Lp",
        lambda z: z[:, 0] + np.sqrt(np.where(z[:, 0] - z[:, 1] <= 1.5, 0.0, -1.0)),
        lambda: pa.Ball([0, 0], 1) | pa.Box([0, 1], [2, 2]),
        0.4,
        {"lipschitz": 1.0, "norm": 2},
        lambda x, y: x * x + y * y <= 1 or (0 <= x <= 2 and 1 <= y <= 2),
    ),
    # float32
    Case("single typed", "2-D expression float32", "sin(x0)*x1", lambda: pa.Box([3, -1], [4, 1]), 0.3, SINGLE),
    Case("half typed", "2-D expression bfloat16", "sin(x0)*x1", lambda: pa.Box([3, -1], [4, 1]), 0.4, HALF),
    Case("single pieces", "1-D expression kink float32", "abs(x0 - 0.25)", line, 0.05, SINGLE),
    Case(
        "single 2-D",
        "2-D declared float32",
        lambda z: z[:, 0] * z[:, 1],
        square,
        0.25,
        {"lipschitz": 1.5, **SINGLE},
    ),
    Case("single hessian", "2-D hessian float32", _waves, square, 0.3, {"hessian": 10.0, **SINGLE}),
    Case(
        "cross single",
        "pair declared float32",
        lambda k, q: k[:, 0] * q[:, 0],
        pair,
        0.1,
        {"lipschitz": 1.5, **SINGLE},
    ),
    Case(
        "curve single",
        "cloud declared float32",
        lambda z: z[:, 0] * z[:, 1],
        lambda: pa.PointCloud(_circle(2000), fill_distance=0.01),
        0.2,
        {"lipschitz": 1.5, **SINGLE},
    ),
    # finite norms
    Case("L3.5 typed", "2-D expression Lp", "x0*x1", lambda: pa.Box([0, 0], [1, 1]), 0.1, {"norm": 3.5}),
    Case("L2 single", "2-D expression Lp float32", "x0*x1", square, 0.3, {"norm": 2, **SINGLE}),
    Case("L2 typed step", "1-D expression Lp jump", "step(x0 - 0.3) + x0", line, 0.3, {"norm": 2, **SMALL}),
    Case("unbounded typed", "1-D expression Lp unbounded", "log(abs(x0 - 0.3))", line, 0.3, {"norm": 1}),
    Case("L1 kink", "1-D declared Lp kink", lambda z: np.abs(z[:, 0]), line, 0.02, {"lipschitz": 1.0, "norm": 1}),
    Case(
        "L1.5 Hölder",
        "1-D declared Lp hölder",
        lambda z: np.sqrt(np.abs(z[:, 0])),
        line,
        0.1,
        {"modulus": pa.Modulus(1.0, 0.5), "norm": 1.5},
    ),
    Case(
        "L2 declared jump",
        "1-D declared Lp jump",
        lambda z: np.sign(z[:, 0] - 0.1),
        line,
        0.3,
        {"lipschitz": 0.0, "jumps": pa.Jumps(height=2.0, tube=2.0), "norm": 2, **SMALL},
    ),
    Case("L2 hessian", "2-D hessian Lp", _waves, square, 0.3, {"hessian": 10.0, "norm": 2}),
    Case("L2 cross", "pair declared Lp", lambda k, q: k[:, 0] * q[:, 0], pair, 0.05, {"lipschitz": 1.5, "norm": 2}),
]
BY_NAME = {case.name: case for case in CASES}


@cache
def _request(case: str) -> Request:
    row, options = BY_NAME[case], dict(BY_NAME[case].options)
    declared = {name: options.pop(name, None) for name in ("lipschitz", "modulus", "hessian", "jumps")}
    defaults = {
        "norm": "inf",
        "dtype": torch.float64,
        "sharpness": None,
        "vectorize": False,
        "trace": None,
        "max_bytes": DEFAULT_MAX_BYTES,
    }
    return request_for(
        row.function,
        row.domain(),
        tolerance=row.tolerance,
        method="hard",
        accept="strongest",
        declared=declared,
        **{**defaults, **options},
    )


def request(method: str, case: str) -> Request:
    """What `pa.compile` asks the planner for."""
    return replace(_request(case), method=method)


def applies(method: Method, case: Case) -> bool:
    takes_sharpness = "sharpness" not in case.options or method.takes_sharpness
    return takes_sharpness and method.applies(request(method.name, case.name)) is None


@cache
def planned(case: str, method: str = "hard") -> Plan | pa.PartitaError:
    """The plan, as `pa.plan` gives it, or why there is none."""
    try:
        return best_plan(request(method, case))
    except pa.PartitaError as error:
        return error


@cache
def finished(case: str, method: str) -> pa.Compiled | pa.PartitaError:
    """The head, or why there is none: no plan, or a finished head that misses the tolerance."""
    plan = planned(case, method)
    try:
        return pa.build(plan) if isinstance(plan, Plan) else plan
    except ToleranceError as error:
        return error


def compiled(case: str, method: str = "hard") -> pa.Compiled:
    """What `pa.compile` gives, made once per session. Change nothing of it: make a copy."""
    found = finished(case, method)
    if not isinstance(found, pa.Compiled):
        raise found
    return found


PAIRS = [(method, case) for method in METHODS for case in CASES if applies(method, case)]
HARD = [
    case.name for method, case in PAIRS if method.name == "hard" and not {"cloud", "region"} & set(case.kinds.split())
]


def inputs_for(c: pa.Compiled, points: np.ndarray, dtype: torch.dtype | None = None) -> tuple[torch.Tensor, ...]:
    """Flat points `(n, m)` as the head's arguments."""
    cuts = np.cumsum([0] + [int(np.prod(s)) for s in c.head.input_shapes])
    tensors = (
        torch.from_numpy(points[:, a:b].reshape(len(points), *s))
        for a, b, s in zip(cuts, cuts[1:], c.head.input_shapes)
    )
    return tuple(t.to(dtype or c.head.dtype) for t in tensors)


def sample(c: pa.Compiled, count: int = 200, seed: int = 3) -> np.ndarray:
    """Points of the domain that the head's dtype holds exactly."""
    points = np.concatenate([c.target.domain.sample(count, np.random.default_rng(seed)), c.target.domain.corners(32)])
    if c.head.dtype == torch.float32:
        rounded = points.astype(np.float32).astype(np.float64)
        points = rounded[c.target.domain.contains(rounded)]
    return points
