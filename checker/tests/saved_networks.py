"""Small networks of heads: what they read, what they return, and which function that is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fractions import Fraction as F
from pathlib import Path
from typing import NamedTuple

import torch
from composing import Row, compose

import partita as pa


class Wired(NamedTuple):
    """parts: (function, box, tolerance) of every head. layers: groups (head, rows). bound: as claimed."""

    function: str | None
    box: tuple[Sequence[float], Sequence[float]]
    parts: Sequence[tuple[str, Sequence[float], Sequence[float], float]]
    layers: Sequence[Sequence[tuple[int, Sequence[Row]]]]
    output: Sequence[Row]
    bound: Callable[[Sequence[float]], float]
    dtype: str = "float64"


def of(channel: int) -> Row:
    return {channel: 1.0}, 0.0


def total(channels: Sequence[int]) -> Row:
    return dict.fromkeys(channels, 1.0), 0.0


TINY = 1e-13  # more than rounding takes
WEIGHTS = [[0.5, -1.25, 0.75], [1.0, 0.25, -0.5], [-0.375, 0.625, 1.5], [0.125, -0.875, 0.25]]
SINES = " + ".join(f"sin({1 + i / 50}*x{i} + {i / 8})" for i in range(100))
# the gain of each head is worked out by hand: |w| times the largest slopes on the way to the output
NETWORKS: dict[str, Wired] = {
    "sum": Wired(
        "sin(3*x0) + sin(3*x1) + sin(3*x2)",
        ([-1.0] * 3, [1.0] * 3),
        [("sin(3*x0)", [-1.0], [1.0], 1e-6)],
        [[(0, [of(0), of(1), of(2)])]],
        [total([3, 4, 5])],
        lambda e: 3 * e[0] + TINY,
    ),
    "layers": Wired(
        "2*exp(sin(x0)/3 + x1/7) - x1",
        ([-1.0] * 2, [1.0] * 2),
        [("sin(x0)", [-1.0], [1.0], 1e-6), ("exp(x0)", [-0.5], [0.5], 1e-6)],
        [[(0, [of(0)])], [(1, [({2: F(1, 3), 1: F(1, 7)}, 0.0)])]],
        [({3: 2.0, 1: -1.0}, 0.0)],
        lambda e: 2 * (e[1] + 1.5271 * e[0] / 3) + TINY,  # exp(sin(1)/3 + 1/7) = 1.52705…
    ),
    "layers float32": Wired(
        "2*exp(sin(x0)/3 + x1/7) - x1",
        ([-1.0] * 2, [1.0] * 2),
        [("sin(x0)", [-1.0], [1.0], 1e-3), ("exp(x0)", [-0.5], [0.5], 1e-3)],
        [[(0, [of(0)])], [(1, [({2: F(1, 3), 1: F(1, 7)}, 0.0)])]],
        [({3: 2.0, 1: -1.0}, 0.0)],
        lambda e: 2 * (e[1] + 1.526 * e[0] / 3) + 2e-6,
        "float32",
    ),
    "product": Wired(
        "sin(x0)*exp(x1), sin(x0) - exp(x1)",
        ([-1.0] * 2, [1.0] * 2),
        [
            ("sin(x0)", [-1.0], [1.0], 1e-6),
            ("exp(x0)", [-1.0], [1.0], 1e-6),
            ("x0*x1", [-1.0, 0.0], [1.0, 3.0], 1e-3),
        ],
        [[(0, [of(0)]), (1, [of(1)])], [(2, [of(2), of(3)])]],
        [of(4), ({2: 1.0, 3: -1.0}, 0.0)],
        lambda e: e[2] + 2.7183 * e[0] + e[1] + 1e-11,
    ),
    "entangled": Wired(  # through the layers the range of what is inverted holds 0
        "1/(sqrt(x0^2 + x1) - x0)",
        ([1.0, 1.0], [2.0, 2.0]),
        [("x0^2", [1.0], [2.0], 1e-6), ("sqrt(x0)", [1.9], [6.1], 1e-6), ("1/x0", [0.23], [0.74], 1e-4)],
        [[(0, [of(0)])], [(1, [total([1, 2])])], [(2, [({3: 1.0, 0: -1.0}, 0.0)])]],
        [of(4)],
        lambda e: e[2] + 18 * (e[1] + 0.36 * e[0]) + 1e-11,  # 1/0.23607² = 17.94…, 1/(2√2) = 0.3535…
    ),
    "network": Wired(  # three inputs, four neurons, two outputs: the wiring is the function
        None,
        ([-1.0] * 3, [1.0] * 3),
        [("tanh(x0)", [-3.0], [3.0], 1e-5)],
        [[(0, [(dict(enumerate(row)), 0.25) for row in WEIGHTS])]],
        [({3: 0.5, 4: -0.25, 5: 1.5, 6: 0.75}, 0.125), ({3: 0.75, 5: -0.5}, 0.0)],
        lambda e: 3 * e[0] + TINY,
    ),
    "hundred": Wired(
        SINES,
        ([-1.0] * 100, [1.0] * 100),
        [("sin(x0)", [-3.0], [15.5], 1e-6)],
        [[(0, [({i: 1 + i / 50}, i / 8) for i in range(100)])]],
        [total(range(100, 200))],
        lambda e: 100 * e[0] + 1e-11,
    ),
    "affine": Wired(
        "2*x0 - x1/3 + 1", ([-1.0] * 2, [1.0] * 2), [], [], [({0: 2.0, 1: F(-1, 3)}, 1.0)], lambda e: 1e-15
    ),
}


def save(name: str, folder: Path, place: Path) -> Path:
    wired = NETWORKS[name]
    dtype = {"float64": torch.float64, "float32": torch.float32}[wired.dtype]
    parts = [pa.compile(f, pa.Box(lo, hi), tolerance=e, dtype=dtype) for f, lo, hi, e in wired.parts]
    bound = wired.bound([part.error_bound for part in parts])
    rest = {"bound": bound, "function": wired.function, "dtype": wired.dtype}
    return compose(folder, place, pa.Box(*wired.box), parts, wired.layers, wired.output, **rest)
