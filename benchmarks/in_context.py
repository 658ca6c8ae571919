"""Functions read from prompts: the fixed layer beside other ways to read the same prompt.

    python benchmarks/in_context.py

Prints the table of docs/in-context.md, in a few seconds on one core. Prompts are jittered grids; every method sees the same pairs.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import scipy

import partita as pa

METHODS = ("layer", "nearest neighbour", "best bandwidth", "midpoint")


def waves(z: np.ndarray) -> np.ndarray:
    """|∇| ≤ 1."""
    return np.sin(3 * z[:, 0]) * np.cos(2 * z[:, -1]) / np.sqrt(13)


def cone(z: np.ndarray) -> np.ndarray:
    """|∇| = 1, with a kink."""
    return np.linalg.norm(z - 0.3, axis=1)


def jittered(m: int, per_axis: int, rng: np.random.Generator) -> np.ndarray:
    """One point in each cell of a grid of [−1, 1]^m."""
    axis = -1 + (2 * np.arange(per_axis) + 1) / per_axis
    grid = np.stack(np.meshgrid(*[axis] * m), axis=-1).reshape(-1, m)
    return grid + rng.uniform(-0.5, 0.5, grid.shape) / per_axis


def answers(g: pa.in_context.PromptFunction, x: np.ndarray, y: np.ndarray, q: np.ndarray) -> dict[str, np.ndarray]:
    """What each method returns at q. The bandwidth is chosen by leaving out one pair; the midpoint knows L, as the layer does."""
    distance = scipy.spatial.distance.cdist(q, x)

    def averaged(rate: float, d: np.ndarray) -> np.ndarray:
        weight = np.exp(-rate / 2 * (d**2 - d.min(axis=1, keepdims=True) ** 2))
        return weight @ y / weight.sum(axis=1)

    own = scipy.spatial.distance.cdist(x, x) + np.diag(np.full(len(x), 1e6))
    best = min(np.geomspace(0.01, 100, 40) * g.facts.rate, key=lambda r: float(np.abs(averaged(r, own) - y).mean()))
    low, high = (y - distance).max(axis=1), (y + distance).min(axis=1)
    found = g(x, y, q).numpy(), y[distance.argmin(axis=1)], averaged(best, distance), (low + high) / 2
    return dict(zip(METHODS, found))


def rows(say: Callable[[str], None] = print) -> None:
    """One row per dimension and function: fill distance, bound, and the largest error of each method on 4,000 queries."""
    say("| m | f | pairs | fill distance ρ | bound of the layer | " + " | ".join(METHODS) + " |")
    say("|---" * (5 + len(METHODS)) + "|")
    for m, per_axis, rho in ((1, 40, 0.05), (2, 20, 0.125), (3, 12, 0.25)):
        g = pa.in_context.function(
            lipschitz=1.0, fill_distance=rho, tolerance=1.2 * rho, box=pa.Box([-1] * m, [1] * m), max_pairs=2048
        )
        for f in (waves, cone):
            rng = np.random.default_rng(0)
            x, q = jittered(m, per_axis, rng), rng.uniform(-1, 1, (4000, m))
            q = q[scipy.spatial.KDTree(x).query(q)[0] <= rho]
            worst = {name: np.abs(a - f(q)).max() for name, a in answers(g, x, f(x), q).items()}
            errors = " | ".join(f"{worst[name]:.4f}" for name in METHODS)
            say(f"| {m} | {f.__name__} | {len(x):,} | {rho:g} | {g.error_bound:.4f} | {errors} |")


if __name__ == "__main__":
    rows()
