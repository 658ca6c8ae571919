"""Published relaxations of softmax attention beside the Taylor forms of this library, on the same small heads. One thread.

python benchmarks/relaxations.py            # all tables, about a minute
python benchmarks/relaxations.py --markdown # as they stand in docs/soundness.md

Every head is `net(z) = Σ_j softmax_j(a_j·z + b_j) V_j`. The peers are our own implementations of published bounds, vectorised
over boxes and computed in plain floats, without outward rounding, which favours them:
    intervals      interval bound propagation through exp, sum and quotient
    differences    intervals of w_j = 1/Σ_k exp(s_k − s_j), whose exponents are affine, so their ranges are exact
    CROWN          linear bounds backward through exp (tangent, chord), sum, reciprocal (tangent, chord) and product
                   (McCormick's planes): softmax as auto_LiRPA and Shi et al. (2020) bound it
    CROWN, 1/Σexp  linear bounds backward through 1/Σ_k exp(s_k − s_j): the decomposition of Wei et al. (2023), with lines
The Taylor forms are `prove_grid` (product grids) and `prove_boxes` (any centers), outward rounding included.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
os.environ.setdefault("MKL_NUM_THREADS", "1")

import numpy as np
import torch
from accuracy import show

import partita as pa
from partita.functions import Graph, parse
from partita.heads import ScatteredHead
from partita.proofs.bisection import prove_boxes
from partita.proofs.grid_proof import SoftGrid, prove_grid

Array = np.ndarray


@dataclass(frozen=True)
class Lines:
    """Linear bounds on boxes `c + [−r, r]`: lower `p·(z − c) + q`, upper likewise; slopes `(n, k, m)`, constants `(n, k)`."""

    low_slope: Array
    low: Array
    high_slope: Array
    high: Array

    def ends(self, radius: Array) -> tuple[Array, Array]:
        """The least and the largest value over the box."""
        reach = radius[:, None, :]
        return (
            self.low - (np.abs(self.low_slope) * reach).sum(axis=2),
            self.high + (np.abs(self.high_slope) * reach).sum(axis=2),
        )

    def mixed(self, weights: Array) -> Lines:
        """Bounds of `Σ_k weights[k] x_k` for weights of any sign, one number per box."""
        up, down = np.maximum(weights, 0), np.minimum(weights, 0)
        return Lines(
            (self.low_slope * up[..., None] + self.high_slope * down[..., None]).sum(axis=1, keepdims=True),
            (self.low * up + self.high * down).sum(axis=1, keepdims=True),
            (self.high_slope * up[..., None] + self.low_slope * down[..., None]).sum(axis=1, keepdims=True),
            (self.high * up + self.low * down).sum(axis=1, keepdims=True),
        )


@dataclass(frozen=True)
class Head:
    """Scores `slopes·z + offsets`, one value each; `grid` where it is a product grid."""

    name: str
    slopes: Array
    offsets: Array
    values: Array
    dim: int
    grid: SoftGrid | None = None
    scattered: ScatteredHead | None = None

    def at(self, z: Array) -> Array:
        s = z @ self.slopes.T + self.offsets
        w = np.exp(s - s.max(axis=1, keepdims=True))
        return (w * self.values).sum(axis=1) / w.sum(axis=1)


Relaxation = Callable[[Head, Array, Array], Lines]


def _flat(low: Array, high: Array, dim: int) -> Lines:
    zero = np.zeros((*low.shape, dim))
    return Lines(zero, low, zero, high)


def _scores(head: Head, center: Array, radius: Array) -> tuple[Array, Array]:
    """Scores at the centers and how far they move, `(n, N)` each; a common shift changes no weight."""
    middle = center @ head.slopes.T + head.offsets
    return middle - middle.max(axis=1, keepdims=True), radius @ np.abs(head.slopes).T


def intervals(head: Head, center: Array, radius: Array) -> Lines:
    middle, reach = _scores(head, center, radius)
    low, high = np.exp(middle - reach), np.exp(middle + reach)
    least = low / (high.sum(axis=1, keepdims=True) - high + low)
    most = high / (low.sum(axis=1, keepdims=True) - low + high)
    return _flat(least, most, head.dim).mixed(head.values)


def differences(head: Head, center: Array, radius: Array) -> Lines:
    middle, move = _pairs(head, center, radius)
    reach = np.abs(move) @ radius[:, None, :, None]
    least = 1 / np.exp(middle + reach[..., 0]).sum(axis=2)
    most = 1 / np.exp(middle - reach[..., 0]).sum(axis=2)
    return _flat(least, most, head.dim).mixed(head.values)


def _pairs(head: Head, center: Array, radius: Array) -> tuple[Array, Array]:
    """`s_k − s_j` at the centers, `(n, j, k)`, and its slopes, `(j, k, m)`."""
    middle, _ = _scores(head, center, radius)
    return middle[:, None, :] - middle[:, :, None], head.slopes[None] - head.slopes[:, None]


def _exp_lines(middle: Array, reach: Array) -> tuple[Array, Array, Array, Array]:
    """exp on `middle ± reach`: slope and value at the middle of the tangent there and of the chord."""
    low, high = np.exp(middle - reach), np.exp(middle + reach)
    chord = np.where(reach > 1e-12, (high - low) / np.maximum(2 * reach, 1e-300), np.exp(middle))
    return np.exp(middle), np.exp(middle), chord, (low + high) / 2


def _reciprocal_lines(least: Array, most: Array) -> tuple[Array, Array, Array, Array]:
    """1/x on [least, most]: slope and constant of the tangent at the geometric mean, then of the chord."""
    touch = np.sqrt(least * most)
    return -1 / touch**2, 2 / touch, -1 / (least * most), 1 / least + 1 / most


def crown(head: Head, center: Array, radius: Array) -> Lines:
    middle, reach = _scores(head, center, radius)
    tangent, at_tangent, chord, at_chord = _exp_lines(middle, reach)
    e = Lines(tangent[..., None] * head.slopes, at_tangent, chord[..., None] * head.slopes, at_chord)
    low, high = np.exp(middle - reach), np.exp(middle + reach)
    least, most = low.sum(axis=1), high.sum(axis=1)
    slope_low, const_low, slope_high, const_high = _reciprocal_lines(least, most)
    total = e.mixed(np.ones_like(middle))
    r_low_slope, r_low = (
        slope_low[:, None, None] * total.high_slope,
        slope_low[:, None] * total.high + const_low[:, None],
    )
    r_high_slope, r_high = (
        slope_high[:, None, None] * total.low_slope,
        slope_high[:, None] * total.low + const_high[:, None],
    )
    r_least = 1 / most[:, None]
    weights = Lines(
        low[..., None] * r_low_slope + r_least[..., None] * e.low_slope,
        low * r_low + r_least * e.low - low * r_least,
        high[..., None] * r_high_slope + r_least[..., None] * e.high_slope,
        high * r_high + r_least * e.high - high * r_least,
    )
    return weights.mixed(head.values)


def crown_of_differences(head: Head, center: Array, radius: Array) -> Lines:
    middle, move = _pairs(head, center, radius)
    reach = (np.abs(move) @ radius[:, None, :, None])[..., 0]
    tangent, at_tangent, chord, at_chord = _exp_lines(middle, reach)
    q_low_slope, q_low = np.einsum("njk,jkm->njm", tangent, move), at_tangent.sum(axis=2)
    q_high_slope, q_high = np.einsum("njk,jkm->njm", chord, move), at_chord.sum(axis=2)
    least, most = np.exp(middle - reach).sum(axis=2), np.exp(middle + reach).sum(axis=2)
    slope_low, const_low, slope_high, const_high = _reciprocal_lines(least, most)
    weights = Lines(
        slope_low[..., None] * q_high_slope,
        slope_low * q_high + const_low,
        slope_high[..., None] * q_low_slope,
        slope_high * q_low + const_high,
    )
    return weights.mixed(head.values)


PEERS: dict[str, Relaxation] = {
    "intervals": intervals,
    "differences": differences,
    "CROWN": crown,
    "CROWN, 1/Σexp": crown_of_differences,
}


def grid_head(text: str, dim: int, tolerance: float) -> Head:
    """A head that compile made, as a softmax of affine scores."""
    c = pa.compile(text, pa.Box([-1] * dim, [1] * dim), tolerance=tolerance, method="fitted")
    axes = tuple(a.double().numpy() for a in c.head.axes)
    rates = np.array(c.head.inverse_temperature.double().tolist())
    centers = np.stack([g.ravel() for g in np.meshgrid(*axes, indexing="ij")], axis=1)
    values = c.head.values.double().numpy()
    grid = SoftGrid(axes, tuple(rates.tolist()), values.reshape(*c.head.counts, 1))
    name = f"{text}, {c.num_keys} keys"
    return Head(name, centers * rates, -0.5 * (centers**2 * rates).sum(axis=1), values[:, 0], dim, grid=grid)


def random_head(keys: int = 16, dim: int = 4, seed: int = 0) -> Head:
    """Attention with normal keys and values: `softmax(2 k_j·z) V_j`, which is a head of centers and powers."""
    rng = np.random.default_rng(seed)
    slopes, values = 2.0 * rng.normal(size=(keys, dim)) / np.sqrt(dim), rng.normal(size=keys)
    scattered = ScatteredHead(
        torch.from_numpy(slopes),
        1.0,
        torch.from_numpy(values)[:, None],
        powers=torch.from_numpy((slopes**2).sum(axis=1)),
        input_shapes=((dim,),),
        output_shape=(),
    )
    return Head(f"random attention, {keys} keys in R^{dim}", slopes, np.zeros(keys), values, dim, scattered=scattered)


def true_range(head: Head, center: Array, radius: Array, rng: np.random.Generator) -> tuple[float, float]:
    """The range over one box, from inside: random points, corners, then points around the best."""
    found = []
    for sign in (1, -1):
        z = center + radius * rng.uniform(-1, 1, (2000, head.dim))
        z = np.concatenate([z, center + radius * rng.choice([-1.0, 1.0], (200, head.dim))])
        for step in (0.1, 0.02, 0.004):
            best = z[np.argsort(sign * head.at(z))[-20:]]
            near = np.repeat(best, 20, axis=0) + step * radius * rng.normal(size=(400, head.dim))
            z = np.concatenate([best, np.clip(near, center - radius, center + radius)])
        found.append(sign * float((sign * head.at(z)).max()))
    return found[1], found[0]


def our_width(head: Head, center: Array, radius: Array, truth: tuple[float, float]) -> float:
    """Twice a bound of |net − middle|, by the proof that fits the head, on one box."""
    middle, zero = sum(truth) / 2, parse("0*x0", [f"x{i}" for i in range(head.dim)])
    goal = 1.02 * (truth[1] - truth[0]) / 2 + 1e-13 * np.abs(head.values).max()
    if head.grid is not None:
        moved = SoftGrid(head.grid.axes, head.grid.rates, head.grid.values - middle)
        return 2 * prove_grid(moved, zero, center - radius, center + radius, goal=goal).bound
    box = pa.Box((center - radius).tolist(), (center + radius).tolist())
    graph = parse(f"{middle!r} + 0*x0".replace("np.float64", ""), [f"x{i}" for i in range(head.dim)])
    return 2 * prove_boxes(head.scattered, graph, box, target=goal, max_boxes=1).bound


def width_rows(heads: list[Head], boxes: int = 12) -> Iterator[tuple[str, ...]]:
    yield ("width of the range over the true one (ms per box)", "radius", *PEERS, "Taylor form or bisection")
    for head in heads:
        for size in (0.01, 0.05, 0.2, 0.5):
            rng = np.random.default_rng(1)
            center = rng.uniform(-1 + size, 1 - size, (boxes, head.dim))
            radius = np.full_like(center, size)
            truths = [true_range(head, c, r, rng) for c, r in zip(center, radius)]
            width = np.array([b - a for a, b in truths])
            cells = []
            for relaxation in PEERS.values():
                low, high = relaxation(head, center, radius).ends(radius)
                start = time.process_time()
                for _ in range(5):
                    relaxation(head, center, radius).ends(radius)
                spent = (time.process_time() - start) / 5 / boxes
                cells.append(f"{np.median((high - low)[:, 0] / width):.3g} ({1e3 * spent:.2g})")
            start = time.process_time()
            ours = np.array([our_width(head, c, r, t) for c, r, t in zip(center, radius, truths)])
            spent = (time.process_time() - start) / boxes
            yield (head.name, f"{size:g}", *cells, f"{np.median(ours / width):.3g} ({1e3 * spent:.2g})")


def error_bounds(head: Head, graph: Graph, relaxation: Relaxation, center: Array, radius: Array) -> Array:
    """Bounds of |f − net| on boxes, f by its Taylor polynomial of degree 1 with its remainder: the best line there is."""
    model, net = graph.taylor(center, radius, 1), relaxation(head, center, radius)
    slope, rest = model.coefficients[0, 1:].T / np.where(radius > 0, radius, 1.0), model.remainder[0]
    upper = (slope - net.low_slope[:, 0], model.coefficients[0, 0] - net.low[:, 0])
    lower = (slope - net.high_slope[:, 0], model.coefficients[0, 0] - net.high[:, 0])
    high = upper[1] + (np.abs(upper[0]) * radius).sum(axis=1) + rest
    low = lower[1] - (np.abs(lower[0]) * radius).sum(axis=1) - rest
    return np.maximum(high, -low)


def boxes_needed(head: Head, graph: Graph, relaxation: Relaxation, goal: float, budget: int) -> tuple[bool, float, int]:
    """Best-first bisection until the goal is proved or the budget spent: whether it was, the bound reached, the boxes."""
    center, radius = np.zeros((1, head.dim)), np.ones((1, head.dim))
    bound, looked = error_bounds(head, graph, relaxation, center, radius), 1
    while bound.max() > goal and looked < budget:
        order = np.argsort(bound)
        chosen, rest = order[-256:], order[:-256]
        chosen, rest = chosen[bound[chosen] > goal], np.concatenate([rest, chosen[bound[chosen] <= goal]])
        axis = radius[chosen].argmax(axis=1)
        half, rows = radius[chosen].copy(), np.arange(len(chosen))
        half[rows, axis] /= 2
        left, right = center[chosen].copy(), center[chosen].copy()
        left[rows, axis] -= half[rows, axis]
        right[rows, axis] += half[rows, axis]
        fresh, size = np.concatenate([left, right]), np.concatenate([half, half])
        center, radius = np.concatenate([center[rest], fresh]), np.concatenate([radius[rest], size])
        bound = np.concatenate([bound[rest], error_bounds(head, graph, relaxation, fresh, size)])
        looked += len(fresh)
    return bool(bound.max() <= goal), float(bound.max()), looked


def proof_rows(budget: int = 60_000) -> Iterator[tuple[str, ...]]:
    yield ("boxes (seconds) to prove 1.1 times the error", "error", *PEERS, "Taylor form")
    cases = [
        ("sin(3*x0)", 1, 1e-2),
        ("sin(3*x0)", 1, 1e-6),
        ("exp(x0)", 1, 1e-4),
        ("sin(3*x0) + x0*cos(2*x1)", 2, 1e-2),
    ]
    for text, dim, tolerance in cases:
        head, graph = grid_head(text, dim, tolerance), parse(text, [f"x{i}" for i in range(dim)])
        z = np.random.default_rng(0).uniform(-1, 1, (40_000, dim))
        z[:2000] = np.sign(z[:2000]) if dim > 1 else np.linspace(-1, 1, 2000)[:, None]
        seen = float(np.abs(graph.evaluate(z) - head.at(z)).max())
        cells = []
        for relaxation in PEERS.values():
            start = time.process_time()
            done, bound, boxes = boxes_needed(head, graph, relaxation, 1.1 * seen, budget)
            spent = time.process_time() - start
            cells.append(f"{boxes:,} ({spent:.2g})" if done else f"> {boxes:,} ({spent:.2g}): {bound / seen:.3g} times")
        start = time.process_time()
        proof = prove_grid(head.grid, graph, -np.ones(dim), np.ones(dim), goal=1.1 * seen)
        spent = time.process_time() - start
        cells.append(f"{proof.boxes:,} ({spent:.2g})" if proof.settled else "no")
        yield (head.name, f"{seen:.3g}", *cells)


def trap_rows() -> Iterator[tuple[str, ...]]:
    """A head whose two scores are −26 and −60: all weight is on the first key."""
    yield ("scores −26 and −60, V = (1, 0), on a point", "value")
    scores = np.array([-26.0, -60.0])
    yield ("the head", f"{np.exp(scores - scores.max())[0] / np.exp(scores - scores.max()).sum():.6g}")
    e = np.exp(scores)
    yield (
        "upper bound by exp(s)/(Σ exp(s) + 10⁻⁶), as an epsilon against division by 0 has it",
        f"{e[0] / (e.sum() + 1e-6):.3g}",
    )
    yield ("upper bound by 1/Σ exp(s_k − s_j)", f"{1 / np.exp(scores - scores[0]).sum():.6g}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--markdown", action="store_true", help="tables as Markdown")
    given = parser.parse_args()
    torch.set_num_threads(1)
    heads = [
        grid_head("sin(3*x0)", 1, 1e-6),
        grid_head("exp(x0)*sin(9*x0)", 1, 1e-6),
        grid_head("sin(3*x0) + x0*cos(2*x1)", 2, 1e-6),
        random_head(),
    ]
    for rows in (width_rows(heads), proof_rows(), trap_rows()):
        show(rows, given.markdown)


if __name__ == "__main__":
    main()
