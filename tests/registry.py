"""The constructions that every law is tested on: add a line here and it is enrolled everywhere."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
import torch

import partita as pa


@dataclass(frozen=True)
class Case:
    """One call of `pa.compile`: small enough that even the log form of its layers fits. Hard heads unless the options say so."""

    name: str
    function: Any
    domain: Callable[[], Any]
    tolerance: float
    options: dict[str, Any] = field(default_factory=dict)
    true_lipschitz: float | None = None  # of the 2-norm, where it is declared

    def __post_init__(self) -> None:
        self.options.setdefault("method", "hard")
        if callable(self.function):
            self.options.setdefault("trace", False)  # black boxes, unless the options say so


def _circle(points: int = 2000) -> np.ndarray:
    t = np.linspace(0, 2 * np.pi, points, endpoint=False)
    return np.stack([np.cos(t), np.sin(t), 0.5 * np.sin(2 * t), 0 * t], axis=1)


def _mix(z: torch.Tensor) -> torch.Tensor:
    return torch.tanh(z.flip(1) + 0.5 * z)


CASES = [
    Case("kink 1-D", lambda z: np.abs(z[:, 0] - 0.3), lambda: pa.Box([-1], [1]), 0.05, {"lipschitz": 1.0}, 1.0),
    Case("sine 1-D typed", "sin(5*x)", lambda: pa.Box([-2], [2]), 0.2),
    Case("constant", "0*x0 + 3", lambda: pa.Box([0, 0], [1, 1]), 0.1),
    Case("one variable of two", "exp(x1)", lambda: pa.Box([0, 0], [1, 1]), 0.1),
    Case(
        "torch 2-D",
        lambda z: torch.sin(3 * z[:, 0]) + z[:, 0] * torch.cos(2 * z[:, 1]),
        lambda: pa.Box([-1, -1], [1, 1]),
        0.4,
        {"lipschitz": 4.0},
        4.0,
    ),
    Case(
        "traced 2-D",
        lambda z: torch.sin(3 * z[:, 0]) + torch.relu(z[:, 0] - z[:, 1]),
        lambda: pa.Box([-1, -1], [1, 1]),
        0.8,
        {"trace": True},
    ),
    Case("vector 2-D typed", "x0*x1, max(x0, x1)", lambda: pa.Box([-1, -1], [1, 1]), 0.25),
    Case("tokens typed", "x0*x1, x2; x3, x0 - x3", lambda: pa.Box.sequence(-1, 1, tokens=2, dim=2), 1.0),
    Case(
        "cone 3-D", lambda z: np.linalg.norm(z, axis=1), lambda: pa.Box([-1] * 3, [1] * 3), 0.3, {"lipschitz": 1.0}, 1.0
    ),
    Case("sequence 2x2", _mix, lambda: pa.Box.sequence(-1, 1, tokens=2, dim=2), 0.9, {"lipschitz": 1.5}, 1.5),
    Case(
        "three tokens of one",
        lambda z: z.cumsum(1) / 2,
        lambda: pa.Box.sequence(0, 1, tokens=3, dim=1),
        0.25,
        {"lipschitz": 1.0},
        1.0,
    ),
    Case("far from zero", lambda z: np.sin(z[:, 0]), lambda: pa.Box([1e6], [1e6 + 1]), 0.02, {"lipschitz": 1.0}, 1.0),
    Case(
        "unequal sides",
        lambda z: z[:, 0] + np.sin(z[:, 1] / 10),
        lambda: pa.Box([0, -50], [1, 50]),
        0.5,
        {"lipschitz": [1.0, 0.1]},
    ),
    Case(
        "tiny scale",
        lambda z: 1e-9 * np.sin(z[:, 0] * 1e6),
        lambda: pa.Box([0], [1e-5]),
        1e-10,
        {"lipschitz": 1e-3},
        1e-3,
    ),
    Case(
        "square root",
        lambda z: np.sqrt(np.abs(z[:, 0])),
        lambda: pa.Box([-1], [1]),
        0.25,
        {"modulus": pa.Modulus(1.0, 0.5)},
    ),
    Case("soft", "x0*x1", lambda: pa.Box([-1, -1], [1, 1]), 0.4, {"sharpness": 8.0}),
    Case(
        "single 2-D",
        lambda z: z[:, 0] * z[:, 1],
        lambda: pa.Box([-1, -1], [1, 1]),
        0.25,
        {"lipschitz": 1.5, "dtype": torch.float32},
        1.5,
    ),
    Case("single typed", "tanh(x0 + 2*x1)", lambda: pa.Box([3, -1], [4, 1]), 0.3, {"dtype": torch.float32}),
    Case(
        "cross",
        lambda k, q: (k * q).sum(-1),
        lambda: (pa.Box([0, 0], [1, 1]), pa.Box([0, 0], [1, 1])),
        0.5,
        {"lipschitz": 2.0},
        2.0,
    ),
    Case("cross typed", "sin(k0) * q0, q0 - k0", lambda: (pa.Box([-1], [1]), pa.Box([0], [2])), 0.3),
    Case(
        "cross sequences",
        lambda k, q: torch.tanh(k + q),
        lambda: (pa.Box.sequence(0, 1, tokens=2, dim=1), pa.Box.sequence(-1, 0, tokens=2, dim=1)),
        0.5,
        {"lipschitz": 1.5},
        1.5,
    ),
    Case(
        "cross single",
        lambda k, q: k[:, 0] * q[:, 0],
        lambda: (pa.Box([0], [1]), pa.Box([0], [1])),
        0.1,
        {"lipschitz": 1.5, "dtype": torch.float32},
        1.5,
    ),
    Case(
        "curve in R4",
        lambda z: z[:, 0] * z[:, 1] + z[:, 2],
        lambda: pa.PointCloud(_circle(), fill_distance=0.01),
        0.3,
        {"lipschitz": 2.0},
    ),
    Case("curve typed", "x0*x1 + x2", lambda: pa.PointCloud(_circle(400), fill_distance=0.02), 0.3),
    Case(
        "curve single",
        lambda z: z[:, 0] * z[:, 1],
        lambda: pa.PointCloud(_circle(), fill_distance=0.01),
        0.2,
        {"lipschitz": 1.5, "dtype": torch.float32},
    ),
    Case(
        "finite set",
        lambda z: z.sum(2),
        lambda: pa.PointCloud(np.random.default_rng(0).normal(size=(60, 2, 2))),
        0.1,
        {"lipschitz": 2.0},
    ),
]

LP_CASES = [
    Case("L2 typed", "sin(3*x0) + x0*cos(2*x1)", lambda: pa.Box([-1, -1], [1, 1]), 0.2, {"norm": 2}),
    Case("L1 kink", lambda z: np.abs(z[:, 0]), lambda: pa.Box([-1], [1]), 0.02, {"lipschitz": 1.0, "norm": 1}),
    Case("L3.5 vector", "x0*x1, x0 - x1", lambda: pa.Box([0, 0], [1, 1]), 0.1, {"norm": 3.5}),
    Case(
        "L1.5 Hölder",
        lambda z: np.sqrt(np.abs(z[:, 0])),
        lambda: pa.Box([-1], [1]),
        0.1,
        {"modulus": pa.Modulus(1.0, 0.5), "norm": 1.5},
    ),
    Case("L2 typed step", "step(x0 - 0.3) + x0", lambda: pa.Box([-1], [1]), 0.1, {"norm": 2}),
    Case("L1 typed step along a line", "where(x0 - x1, x0, 0 - 1)", lambda: pa.Box([-1, -1], [1, 1]), 0.2, {"norm": 1}),
    Case(
        "L2 declared jump",
        lambda z: np.sign(z[:, 0] - 0.1),
        lambda: pa.Box([-1], [1]),
        0.1,
        {"lipschitz": 0.0, "jumps": pa.Jumps(height=2.0, tube=2.0), "norm": 2},
    ),
    Case(
        "L2 cross",
        lambda k, q: k[:, 0] * q[:, 0],
        lambda: (pa.Box([0], [1]), pa.Box([0], [1])),
        0.05,
        {"lipschitz": 1.5, "norm": 2},
    ),
]


@cache
def compiled(case_name: str) -> pa.Compiled:
    case = next(c for c in CASES + LP_CASES if c.name == case_name)
    return pa.compile(case.function, case.domain(), tolerance=case.tolerance, **case.options)


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
