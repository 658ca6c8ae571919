"""Heads that the producer writes, small. The checker itself never imports the producer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

import partita as pa


def line(lo: float = -1.0, hi: float = 1.0) -> pa.Box:
    return pa.Box([lo], [hi])


def square() -> pa.Box:
    return pa.Box([-1, -1], [1, 1])


def cloud() -> pa.PointCloud:
    points = np.random.default_rng(0).random((60, 2)) * [1, 0.1]
    return pa.PointCloud(points, fill_distance=0.01)


HEADS: dict[str, tuple[Any, Callable[[], Any], float, dict[str, Any]]] = {
    "fitted 1-D": ("sin(3*x)", line, 1e-8, {}),
    "fitted 2-D": ("sin(3*x) + x*cos(2*y)", square, 1e-6, {}),
    "fitted float32": ("sin(3*x) + x*cos(2*y)", square, 1e-3, {"dtype": torch.float32}),
    "steep float32": ("1/(1 + 100*x^2)", line, 1e-3, {"dtype": torch.float32}),
    "fitted kink": ("abs(x)*sin(x)", line, 1e-2, {}),
    "fitted root": ("sqrt(x + 0.1)", lambda: line(0.0, 1.0), 1e-3, {}),
    "fitted L2": ("sin(3*x)", line, 1e-3, {"norm": 2}),
    "vector": ("sin(x), cos(x)", line, 1e-5, {}),
    "tokens": ("x0*x1; tanh(x1)", lambda: pa.Box.sequence(-1, 1, tokens=2, dim=1), 1e-2, {}),
    "cross": ("sin(k0)*q0", lambda: (line(), line()), 1e-4, {}),
    "tuned": ("sin(3*x)", line, 1e-2, {"method": "tuned"}),
    "corrected": ("sin(3*x)", line, 1e-3, {"method": "corrected"}),
    "hard": ("sin(3*x) + x*cos(2*y)", square, 0.5, {"method": "hard"}),
    "hard float32": ("tanh(x + 2*y)", square, 0.5, {"method": "hard", "dtype": torch.float32}),
    "affine": ("sin(3*x)", line, 1e-2, {"method": "affine"}),
    "affine 2-D": ("sin(x)*y", square, 5e-2, {"method": "affine"}),
    "adaptive": ("tanh(40*x)", line, 1e-2, {"method": "adaptive"}),
    "pieces": ("abs(x)", line, 1e-2, {"method": "pieces"}),
    "pieces 2-D": ("max(x, y, 0.3) - 2*y", square, 1e-2, {}),
    "concave pieces float32": ("min(x, 0.5 - x)", line, 1e-2, {"dtype": torch.float32}),
    "jump L2": ("step(x)", line, 0.3, {"norm": 2}),
    "black box": (lambda z: np.sin(3 * z[:, 0]), line, 0.1, {"lipschitz": 3.0, "method": "hard"}),
    "black box float32": (
        lambda z: np.sin(3 * z[:, 0]),
        line,
        0.1,
        {"lipschitz": 3.0, "method": "hard", "dtype": torch.float32},
    ),
    "black box modulus": (
        lambda z: np.sqrt(np.abs(z[:, 0])),
        line,
        0.25,
        {"modulus": pa.Modulus(1.0, 0.5), "method": "hard"},
    ),
    "black box jumps": (
        lambda z: np.where(z[:, 0] > 0.1, 1.0, 0.0),
        line,
        0.3,
        {"lipschitz": 0.0, "jumps": pa.Jumps(1.0, 2.0), "norm": 2, "method": "hard"},
    ),
    "black box tangents": (lambda z: np.sin(3 * z[:, 0]), line, 0.02, {"hessian": 9.0}),
    "black box tangents float32": (
        lambda z: np.sin(z[:, 0]) + z[:, 1] ** 2 / 2,
        square,
        0.05,
        {"hessian": 1.0, "dtype": torch.float32},
    ),
    "black box tangents per axis": (
        lambda z: np.sin(3 * z[:, 0]) + z[:, 0] * z[:, 1] / 8,
        square,
        0.05,
        {"hessian": (9.125, 0.125), "dtype": torch.float32},
    ),
    "black box pair tangents": (
        lambda k, q: np.sin(k[:, 0]) * q[:, 0],
        lambda: (line(), line()),
        0.1,
        {"hessian": 1.5},
    ),
    "pair pieces": ("max(k0, q0 - 0.3)", lambda: (line(), line()), 0.01, {"method": "pieces"}),
    "pair pieces float32": (
        "abs(k0 - 2*q0)",
        lambda: (line(), line()),
        0.05,
        {"method": "pieces", "dtype": torch.float32},
    ),
    "convex": ("abs(x) + x^2", line, 0.02, {"method": "convex"}),
    "cloud": ("sin(3*x) + y", cloud, 0.3, {}),
    "cloud black box": (lambda z: np.sin(z[:, 0]) + z[:, 1], cloud, 0.3, {"lipschitz": 1.5}),
    "estimate": (lambda z: np.sin(3 * z[:, 0]), line, 1e-3, {}),
}
