"""A corpus of compiled heads, recorded once: every method, dtype, norm and kind of domain.

`python tests/pinned.py --record` compiles every row and writes it to `tests/corpus/`; `test_pinned.py` compiles it again and
compares. Record again only in a commit that says which figures changed and why.
"""

from __future__ import annotations

import json
import platform
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import scipy
import torch
from threadpoolctl import threadpool_limits

import partita as pa

FOLDER = Path(__file__).parent / "corpus"
SINGLE = {"dtype": torch.float32}
MIXED = "sin(3*x0) + x0*cos(2*x1)"


@dataclass(frozen=True)
class Row:
    """One call of `pa.compile`. `slack`: how far stored values may move on another machine, in units in the last place."""

    name: str
    function: Any
    domain: Callable[[], Any]
    tolerance: float
    options: dict[str, Any] = field(default_factory=dict)
    slack: float = 64.0


def line() -> pa.Box:
    return pa.Box([-1], [1])


def square() -> pa.Box:
    return pa.Box([-1, -1], [1, 1])


def cube() -> pa.Box:
    return pa.Box([-1] * 3, [1] * 3)


def pair() -> tuple[pa.Box, pa.Box]:
    return pa.Box([-1], [1]), pa.Box([0], [2])


def tokens() -> pa.Box:
    return pa.Box.sequence(-1, 1, tokens=2, dim=2)


def curve(fill: float = 0.02) -> pa.PointCloud:
    t = 2 * np.pi * np.arange(400) / 400
    return pa.PointCloud(np.stack([np.cos(t), np.sin(t), 0.5 * np.sin(2 * t)], axis=1), fill_distance=fill)


def waves(z: np.ndarray) -> np.ndarray:
    return np.sin(3 * z[:, 0]) + z[:, 0] * np.cos(2 * z[:, 1])


def root(z: np.ndarray) -> np.ndarray:
    return np.sqrt(np.abs(z[:, 0]))


def sign(z: np.ndarray) -> np.ndarray:
    return np.sign(z[:, 0] - 0.1)


def product(k: np.ndarray, q: np.ndarray) -> np.ndarray:
    return k[:, 0] * q[:, 0]


def layer(z: torch.Tensor) -> torch.Tensor:
    return torch.tanh(z @ torch.tensor([[1.0, -0.5], [0.25, 2.0]], dtype=z.dtype)).sum(1)


GHOSTS = 2.0**13  # ghost values rest on differences over 2e-4 of a side, which multiply the last digits by 5,000
FITTED = 2.0**24  # least squares amplify the last digits of another BLAS
ROWS = [
    Row("hard-line", "sin(5*x)", line, 0.1, {"method": "hard"}),
    Row("hard-square-float32", "tanh(x0 + 2*x1)", lambda: pa.Box([3, -1], [4, 1]), 0.3, {"method": "hard", **SINGLE}),
    Row("hard-black-box", waves, square, 0.3, {"method": "hard", "lipschitz": 4.0, "trace": False}),
    Row("hard-per-axis-float32", waves, square, 0.4, {"method": "hard", "lipschitz": [4.0, 2.0], **SINGLE}),
    Row("hard-hoelder", root, line, 0.25, {"method": "hard", "modulus": pa.Modulus(1.0, 0.5)}),
    Row("hard-soft", "x0*x1", square, 0.4, {"method": "hard", "sharpness": 8.0}),
    Row("hard-sequence", "x0*x1, x2; x3, x0 - x3", tokens, 1.0, {"method": "hard"}),
    Row("hard-cross", "sin(k0) * q0, q0 - k0", pair, 0.3, {"method": "hard"}),
    Row("hard-cross-float32", product, pair, 0.3, {"method": "hard", "lipschitz": 2.5, **SINGLE}),
    Row("hard-l2", MIXED, square, 0.5, {"method": "hard", "norm": 2}),
    Row("hard-l1-step", "step(x0 - 0.3) + x0", line, 0.1, {"method": "hard", "norm": 1}),
    Row("hard-l2-float32", "x0*x1", square, 0.3, {"method": "hard", "norm": 2, **SINGLE}),
    Row(
        "hard-l2-jumps",
        sign,
        line,
        0.1,
        {"method": "hard", "lipschitz": 0.0, "jumps": pa.Jumps(height=2.0, tube=2.0), "norm": 2},
    ),
    Row("hard-l2-cross", product, pair, 0.2, {"method": "hard", "lipschitz": 2.5, "norm": 2}),
    Row("paper", "sin(2*x0)", line, 0.3, {"method": "paper"}),
    Row("paper-cross-float32", product, pair, 2.0, {"method": "paper", "lipschitz": 2.5, **SINGLE}),
    Row("cover", "x0*x1 + x2", curve, 0.3),
    Row("cover-black-box-float32", waves, curve, 0.4, {"lipschitz": 4.0, **SINGLE}),
    Row("cover-finite", "x0 + x1*x2", lambda: curve(0.0), 0.2),
    Row("tuned", "sin(2*x0) + x1", square, 0.05, {"method": "tuned"}),
    Row("tuned-float32", "exp(x0)*x1", square, 0.05, {"method": "tuned", **SINGLE}),
    Row("tuned-black-box", waves, square, 0.05, {"method": "tuned"}, GHOSTS),
    Row("tuned-sharpness", "exp(x0)", line, 0.05, {"method": "tuned", "sharpness": 2.0}, GHOSTS),
    Row("corrected", MIXED, square, 1e-3, {"method": "corrected"}),
    Row("corrected-float32", "sin(2*x0) - x1", square, 1e-2, {"method": "corrected", **SINGLE}),
    Row("corrected-l2", MIXED, square, 1e-2, {"method": "corrected", "norm": 2}),
    Row("fitted", MIXED, square, 1e-6, {}, FITTED),
    Row("fitted-float32", MIXED, square, 1e-3, {"method": "fitted", **SINGLE}, FITTED),
    Row("fitted-cube", "sin(x0)*x1 + x2", cube, 1e-3, {"method": "fitted"}, FITTED),
    Row("fitted-l1", MIXED, square, 1e-3, {"norm": 1}, FITTED),
    Row("fitted-l3.5-float32", MIXED, square, 1e-2, {"norm": 3.5, "method": "fitted", **SINGLE}, FITTED),
    Row("fitted-black-box", waves, square, 1e-4, {}, FITTED),
    Row("fitted-cross", "sin(k0)*q0", pair, 1e-4, {}, FITTED),
    Row("fitted-sequence", "tanh(x0 + x3), x1; x2*x0, x3", tokens, 1e-1, {"method": "fitted"}, FITTED),
    Row("fitted-traced", layer, square, 1e-3, {}, FITTED),
    Row("affine", MIXED, square, 0.05, {"method": "affine"}),
    Row("affine-float32", "exp(x0) - x1^2", square, 0.02, {"method": "affine", **SINGLE}),
    Row("affine-l2", MIXED, square, 0.1, {"method": "affine", "norm": 2}),
    Row("affine-black-box", waves, square, 0.05, {"method": "affine"}),
    Row("affine-cross", "k0*q0, k0^2", pair, 0.05, {"method": "affine"}),
    Row("tangents", waves, square, 0.05, {"method": "affine", "hessian": 10.0}),
    Row("tangents-float32", waves, square, 0.1, {"method": "affine", "hessian": 10.0, **SINGLE}),
    Row("tangents-l2", waves, square, 0.05, {"method": "affine", "hessian": 10.0, "norm": 2}),
    Row("adaptive-kink", "abs(x0 + 0.7*x1)", square, 0.1, {"method": "adaptive"}, FITTED),
    Row("adaptive-peak", "1/(1 + 400*x0^2)", line, 0.02, {"method": "adaptive"}, FITTED),
    Row("adaptive-float32", "exp(2*x0)", line, 0.02, {"method": "adaptive", **SINGLE}, FITTED),
    Row("adaptive-black-box", waves, square, 0.2, {"method": "adaptive"}, FITTED),
    Row("pieces", "abs(x0 - 0.25) + x1", square, 1e-3, {}),
    Row("pieces-affine", "2*x0 - x1 + 0.25", square, 1e-9, {}),
    Row("pieces-float32", "abs(x0), relu(x0 - 0.25)", line, 1e-2, {"method": "pieces", **SINGLE}),
    Row("pieces-cross", "max(k0, q0)", pair, 1e-2, {"method": "pieces"}),
    Row("train", "exp(x0*x1) + x2", cube, 1e-4, {"method": "train"}, FITTED),
    Row(
        "train-float32",
        "cos(x0 + x1 + x2 + x3)",
        lambda: pa.Box([-1] * 4, [1] * 4),
        1e-3,
        {"method": "train", **SINGLE},
        FITTED,
    ),
    Row("train-black-box", waves, square, 1e-3, {"method": "train"}, FITTED),
]


@contextmanager
def one_thread() -> Iterator[None]:
    """Sums in one order: the bits must not depend on how many cores are idle."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with threadpool_limits(1):
            yield
    finally:
        torch.set_num_threads(before)


def compiled(row: Row) -> pa.Compiled:
    with one_thread():
        return pa.compile(row.function, row.domain(), tolerance=row.tolerance, **row.options)


def machine() -> dict[str, str]:
    """What decides the last digits: processor, its widest vectors, Python and the libraries that compute."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    said = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    vectors = said.get("flags", "").split()
    return {
        "processor": said.get("model name", platform.processor()),
        "vectors": next((name for name in ("avx512f", "avx2", "avx") if name in vectors), ""),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "scipy": scipy.__version__,
    }


def record(names: list[str]) -> None:
    for row in ROWS:
        if names and row.name not in names:
            continue
        place = FOLDER / row.name
        shutil.rmtree(place, ignore_errors=True)
        c = compiled(row)
        c.save(place)
        print(f"{row.name}: {c!r}", flush=True)
    (FOLDER / "machine.json").write_text(json.dumps(machine(), indent=1) + "\n")


if __name__ == "__main__":
    if sys.argv[1:2] != ["--record"]:
        sys.exit("usage: python tests/pinned.py --record [NAME …]")
    record(sys.argv[2:])
