"""Errata of arXiv 2504.19901 (`docs/errata.md`): each printed formula, literally in numpy, failing as stated.

Where the paper is right the same formula is shown to hold, and what partita builds holds at the same parameters.
Matrices are in the paper's orientation, dim × tokens. Numbers of equations are the paper's.
"""

from __future__ import annotations

import math
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from test_quotations import PAPERS, squeezed, texts_of

import partita as pa
from partita.errors import NonFiniteValueError
from partita.geometry import AxisGeometry, farthest_point_cover, moment_bounds, temperature_for_leakage
from partita.papers import indicator, reassignment, reassignment_layers
from partita.reproduction.registry import EXPERIMENTS


def hard(function, domain, **options) -> pa.Compiled:
    """The paper's kind of head, values placed at centers."""
    return pa.compile(function, domain, method="hard", **options)


# --- the paper's layers, literally -----------------------------------------------------------------------------------


def softmax(scores: np.ndarray) -> np.ndarray:
    """Down each column, as in the paper."""
    powers = np.exp(scores - scores.max(axis=0))
    return powers / powers.sum(axis=0)


def printed_grid(half_side: float, count: int, dimension: int) -> np.ndarray:
    """Definition B.1: `(2Dk − DP)/P`, k = 0 … P−1, on every axis."""
    axis = (2 * half_side * np.arange(count) - half_side * count) / count
    return np.stack(np.meshgrid(*[axis] * dimension, indexing="ij"), axis=-1).reshape(-1, dimension)


def first_row(products: np.ndarray, d: int, stride: int) -> np.ndarray:
    """`Σ_j v_j·z Σ_{s<d} (e_{j·stride+s+1} + e_{j·stride+s+dG+1})ᵀ`: printed with stride 1, right with stride d."""
    row = np.zeros(2 * d * len(products))
    for j, product in enumerate(products):
        for s in range(d):
            row[j * stride + s] += product
            row[j * stride + s + d * len(products)] += product
    return row


def log_network(z, centers, values, *, rate, bound, stride) -> np.ndarray:
    """Attn ∘ Linear of section B.1 (and of C.1 with other centers), all five matrices multiplied out.

    z: (n, d), one sequence. values: (G, d, n), f(ṽ_j). bound: B₀. Returns d × n.
    """
    cells, d, n = values.shape
    columns = 2 * d * cells
    linear = np.vstack([first_row(centers @ z.ravel(), d, stride), np.eye(columns)])
    norms = np.tile(np.repeat(-(centers**2).sum(axis=1) / 2, d), 2)
    logs = [np.log(1 + sign * values / bound).reshape(cells * d, n).T for sign in (1, -1)]
    w_k = np.vstack([np.eye(1, 1 + columns), np.append(0, norms), np.hstack([np.zeros((n, 1)), *logs])])
    w_q = np.zeros((2 + n, 1 + columns))
    w_q[:2, 1 : 1 + n], w_q[2:, 1 : 1 + n] = rate, np.eye(n)
    identities = np.tile(np.eye(d), cells)
    w_v = np.hstack([np.zeros((d, 1)), identities, -identities])
    w_o = np.vstack([d * bound * np.eye(n), np.zeros((columns - n, n))])
    return w_v @ linear @ softmax((w_k @ linear).T @ (w_q @ linear)) @ w_o


def folded(points: np.ndarray, centers: np.ndarray, values: np.ndarray, rate: float) -> np.ndarray:
    """(B.15) for a batch, (points, m) to (points, out)."""
    return softmax(rate * (centers @ points.T - (centers**2).sum(axis=1, keepdims=True) / 2)).T @ values


def waves(z) -> np.ndarray:
    """A test function of sequences, (batch, n, d) to (batch, n, d), 2.5-Lipschitz."""
    z = np.asarray(z)
    return np.sin(2 * z) + 0.5 * np.roll(z.reshape(len(z), -1), 1, axis=1).reshape(z.shape)


def compiled_waves(tokens: int, dim: int, tolerance: float):
    """The compiled head with its centers, its values as the paper's d × n matrices, and its R."""
    c = hard(waves, pa.Box.sequence(-1, 1, tokens=tokens, dim=dim), tolerance=tolerance, lipschitz=2.5)
    assert len(set(c.partition.counts)) == 1  # one spacing, one R, as in the paper
    centers = c.partition.centers_of(np.arange(c.num_keys))
    values = waves(centers.reshape(-1, tokens, dim)).transpose(0, 2, 1)
    return c, centers, values, c.head.sharpest_rate()


class Cross:
    """The blocks of section B.3 for d = n = 1, one grid for both inputs. Linear_K: stride 1 printed, G corrected."""

    def __init__(self, z_k: float, z_q: float, centers: np.ndarray, table: np.ndarray, *, rate, bound, stride) -> None:
        g = len(centers)
        self.rate, self.bound, self.table = rate, bound, table
        row = np.zeros(g * g)
        for j, v in enumerate(centers):
            for s in range(g):  # the second half of the columns repeats the first
                row[j * stride + s] += v * z_k
        self.x_k = row[None]
        self.x_q = (centers * z_q)[:, None]
        norms = -(centers**2) / 2
        self.w_0 = (norms[:, None] + norms).reshape(1, -1)
        self.w_1 = np.tile(rate * np.eye(g), g)  # W̄_1 holds R e_j
        self.w_t, self.w_e = np.log(1 + table / bound).reshape(1, -1), np.log(1 - table / bound).reshape(1, -1)

    def output(self, *, rate_again: float = 1.0) -> float:
        """`W_V Z_K softmax(KᵀQ) W_O`, KᵀQ as displayed above (B.31); (B.32) puts another R before `W_1ᵀX_Q`."""
        common = (self.rate * self.x_k + self.rate * self.w_0).T + rate_again * self.w_1.T @ self.x_q
        weights = softmax(np.vstack([common + self.w_t.T, common + self.w_e.T]))
        half = len(weights) // 2
        return float(weights[:half].sum() - weights[half:].sum()) * self.bound


PAIR_TOLERANCE = 0.5


def pair(k, q) -> np.ndarray:
    """A test function of two scalars, |pair| < 2, 2.3-Lipschitz."""
    return np.sin(np.asarray(k)[:, 0]) + np.cos(2 * np.asarray(q)[:, 0])


@pytest.fixture(scope="module")
def cross():
    c = hard(pair, (pa.Box([-1], [1]), pa.Box([-1], [1])), tolerance=PAIR_TOLERANCE, lipschitz=2.3)
    assert c.partition.counts[0] == c.partition.counts[1] > 2
    rng = np.random.default_rng(9)
    return c, c.partition.axes[0], rng.uniform(-1, 1, (40, 2))


def cross_errors(cross, *, stride: int, rate_again: float = 1.0) -> np.ndarray:
    c, centers, points = cross
    grid = np.stack(np.meshgrid(centers, centers, indexing="ij"), axis=-1).reshape(-1, 2)
    table = pair(grid[:, :1], grid[:, 1:]).reshape(len(centers), -1)
    blocks = [
        Cross(k, q, centers, table, rate=c.head.sharpest_rate(), bound=2.0, stride=stride).output(rate_again=rate_again)
        for k, q in points
    ]
    return np.abs(np.array(blocks) - pair(points[:, :1], points[:, 1:]))


# --- 1: Propositions 3.2 and 3.3 -------------------------------------------------------------------------------------

STAR = pa.MaxAffine([[1.0, 0.0], [-0.5, 0.8], [-0.5, -0.8]], [0.0, 0.1, 0.0])


def deep_points(margin: float) -> np.ndarray:
    """Points where the best score of STAR leads by at least `margin`, some of them only just."""
    points = np.random.default_rng(1).uniform(-2, 2, (20000, 2))
    return points[STAR.margin(points) >= margin]


@pytest.mark.parametrize("margin, printed_holds", [(0.05, False), (0.2, False), (0.5, False), (1.0, True), (1.5, True)])
def test_erratum_1_proposition_3_2_multiplies_by_the_margin(margin, printed_holds):
    """A.2: `R ≥ Δ(ln(N−1) − ln ε)` leaves 0.66 of the mass outside at N = 3, ε = 0.01, Δ = 0.05; enough once Δ ≥ 1."""
    cells, epsilon, points = 3, 0.01, deep_points(margin)
    printed = margin * (math.log(cells - 1) - math.log(epsilon))
    wanted = STAR.indicator(points).T
    worst = np.abs(softmax(printed * STAR.scores(points).T) - wanted).max()
    assert worst <= epsilon if printed_holds else worst > 5 * epsilon
    if margin == 0.05:
        assert worst > 0.6
    ours = temperature_for_leakage(cells, margin, epsilon)
    assert ours == pytest.approx((math.log(cells - 1) - math.log(epsilon)) / margin)
    assert np.abs(softmax(ours * STAR.scores(points).T) - wanted).max() <= epsilon
    built = indicator(STAR, pa.Box([-2, -2], [2, 2]), margin=margin, epsilon=epsilon)
    head = built.head(torch.tensor(points)).numpy()
    assert np.abs(head - wanted.T).max() <= built.certificate.error_bound <= epsilon


@pytest.mark.parametrize("values, printed_holds", [((1.0, -1.0), False), ((3.0, -3.0), False), ((1.0, 0.0), True)])
def test_erratum_1_proposition_3_3_needs_twice_the_norm_of_v(values, printed_holds):
    """A.3: `‖V softmax − F‖_∞ ≤ ‖V‖_∞ ε₀`; V = (1, −1) attains 2‖V‖ε₀. True for values of one sign."""
    margin, leaked = 0.25, 0.01
    rate = math.log((1 - leaked) / leaked) / margin  # two cells at exactly the margin: exactly ε₀ of the mass leaks
    error = abs(np.array(values) @ softmax(rate * np.array([[margin], [0.0]])) - values[0]).item()
    norm = max(map(abs, values))
    assert error == pytest.approx((1 if printed_holds else 2) * norm * leaked)
    assert (error <= norm * leaked * (1 + 1e-9)) == printed_holds
    assert error <= 2 * norm * leaked * (1 + 1e-9)
    split, tolerance = pa.MaxAffine([[1.0], [0.0]], [0.0, 0.0]), norm * leaked
    built = reassignment(split, [[v] for v in values], pa.Box([-1], [1]), margin=margin, tolerance=tolerance)
    at_the_margin = torch.tensor([[margin]], dtype=torch.float64)
    assert abs(built.head(at_the_margin).item() - values[0]) <= built.certificate.error_bound <= tolerance


# --- 2: block sizes of section A.2 -----------------------------------------------------------------------------------


def printed_linear_a2(x: np.ndarray, cells: int) -> np.ndarray:
    """(A.2): `[I_d; 0_{n×d}] X [I_n 0_{n×(N−n)}] + [0_{d×N}; I_N]`."""
    d, n = x.shape
    copied = np.vstack([np.eye(d), np.zeros((n, d))]) @ x @ np.eye(n, cells)
    return copied + np.vstack([np.zeros((d, cells)), np.eye(cells)])


def printed_query_a2(d: int, cells: int) -> np.ndarray:
    """W_Q of A.2: `[I_d 0_{1×d} 0_{1×(N−d)}; 0_{1×d} 1_{1×d} 0_{1×(N−d)}]`."""
    rest = np.zeros((1, cells - d))
    return np.block([[np.eye(d), np.zeros((1, d)), rest], [np.zeros((1, d)), np.ones((1, d)), rest]])


def test_erratum_2_linear_of_proposition_3_2_does_not_add_up():
    """(A.2): d + n rows plus d + N rows: 5 and 7 at d = 2, n = 3, N = 5. Right only for n = N."""
    x = np.random.default_rng(2).standard_normal((2, 3))
    with pytest.raises(ValueError, match=r"\(5,5\) \(7,5\)"):
        printed_linear_a2(x, cells=5)
    assert printed_linear_a2(x, cells=3).shape == (5, 3)


def test_erratum_2_query_of_proposition_3_2_is_no_matrix():
    """W_Q of A.2: `I_d` beside `0_{1×d}` at d = 2; for d = 1 it is a matrix, d + 1 by d + N."""
    with pytest.raises(ValueError):
        printed_query_a2(d=2, cells=5)
    assert printed_query_a2(d=1, cells=5).shape == (2, 6)


def test_erratum_2_query_of_proposition_3_2_forgets_offsets():
    """W_Q of A.2: `1_{1×d}` must be `1_{1×n}`. At d = 1, n = N = 3 all blocks fit, and tokens 2, 3 lose their b_j."""
    partition = pa.MaxAffine([[-1.0], [0.0], [1.0]], [0.0, 0.5, 0.0])
    x, rate = np.array([[-0.1, 0.1, 0.2]]), 200.0  # all three in the middle cell
    linear = printed_linear_a2(x, cells=3)
    w_k = rate * np.vstack([np.append(0, partition.slopes), np.append(0, partition.offsets)])
    wanted = partition.indicator(x.T).T
    error = np.abs(softmax((w_k @ linear).T @ (printed_query_a2(1, 3) @ linear)) - wanted).max(axis=0)
    assert error[0] < 1e-9 and (error[1:] > 0.99).all()
    right = np.array([[1.0, 0, 0, 0], [0, 1.0, 1.0, 1.0]])
    assert np.abs(softmax((w_k @ linear).T @ (right @ linear)) - wanted).max() < 1e-9
    layers = reassignment_layers(indicator(partition, pa.Box([-1], [1]), margin=0.2, epsilon=1e-9), tokens=3)
    assert np.abs(layers(torch.tensor(x.T)[None])[0].numpy().T - wanted).max() <= 1e-9


def test_erratum_2_w_o_drops_columns_not_rows():
    """End of A.2: `softmax(KᵀQ)W_O = softmax(KᵀQ)_{1:n,:}` is n × N beside N × n; W_O keeps the first n *columns*."""
    d, n, cells = 2, 2, 3
    points = np.array([[1.0, 0.3], [-1.0, 1.0]])
    scores = np.hstack([50 * STAR.scores(points).T, np.zeros((cells, cells - n))])
    weights, w_o, wanted = softmax(scores), np.eye(cells, n), STAR.indicator(points).T
    with pytest.raises(ValueError):
        weights[:n] - wanted
    assert np.array_equal(weights @ w_o, weights[:, :n])
    assert np.abs(weights @ w_o - wanted).max() < 1e-6
    layers = reassignment_layers(indicator(STAR, pa.Box([-2, -2], [2, 2]), margin=0.5, epsilon=1e-6), tokens=n)
    assert np.array_equal(layers.attention.w_o.numpy(), w_o)
    assert layers.linear.constant.shape == (d + cells, cells)
    assert layers.attention.w_q.shape == layers.attention.w_k.shape == (d + 1, d + cells)
    assert np.abs(layers(torch.tensor(points)[None])[0].numpy().T - wanted).max() <= 1e-6


@pytest.mark.parametrize("outputs, printed_holds", [(2, False), (3, False), (1, True)])
def test_erratum_2_w_v_of_proposition_3_3_has_one_row_of_zeros(outputs, printed_holds):
    """A.3: `W_V = [0_{1×d} V_1 … V_N]` with V_i in R^{d_out}; the zeros need d_out rows."""
    d, cells = 2, 3
    columns = np.random.default_rng(2).standard_normal((outputs, cells))
    printed = [np.zeros((1, d)), *(columns[:, [i]] for i in range(cells))]
    if printed_holds:
        assert np.hstack(printed).shape == (1, d + cells)
    else:
        with pytest.raises(ValueError):
            np.hstack(printed)
    built = reassignment(STAR, columns.T, pa.Box([-2, -2], [2, 2]), margin=0.5, tolerance=1e-6)
    w_v = reassignment_layers(built, tokens=2).attention.w_v.numpy()
    assert np.array_equal(w_v, np.hstack([np.zeros((outputs, d)), columns]))


# --- 3: Definition B.1 -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dimension", [1, 2])
@pytest.mark.parametrize("half_side, count", [(1.0, 8), (3.0, 5)])
def test_erratum_3_definition_b_1_lists_corners(dimension, half_side, count):
    """Below (B.16): `‖Z − v_jm‖_∞ ≤ D/g`. The printed centers are 2D/P away from +D. Plus D/P they are right."""
    box = pa.Box([-half_side] * dimension, [half_side] * dimension)
    points = np.vstack([np.full(dimension, half_side), box.sample(500, np.random.default_rng(3))])
    centers, claimed = printed_grid(half_side, count, dimension), half_side / count
    printed = np.abs(points[:, None] - centers).max(axis=2).min(axis=1)
    assert printed[0] == pytest.approx(2 * claimed)
    inside = (points <= half_side - claimed).all(axis=1)  # the paper's claim is right away from the upper faces
    assert inside.any() and printed[inside].max() <= claimed * (1 + 1e-12)
    grid = pa.ProductGrid.uniform(box, count)
    ours = grid.centers_of(np.arange(grid.num_cells))
    assert np.allclose(ours, centers + claimed)
    assert np.abs(points[:, None] - ours).max(axis=2).min(axis=1).max() <= claimed * (1 + 1e-12)


def test_erratum_3_head_on_printed_centers_misses_its_tolerance():
    """f(x) = x on [−1,1], ε = 0.1: P = 10 cells suffice at centers; at Definition B.1's corners the error is 0.2."""
    c = hard("x0", pa.Box([-1], [1]), tolerance=0.1001)
    points = np.linspace(-1, 1, 2001)[:, None]
    corners = printed_grid(1.0, c.num_keys, 1)
    assert c.num_keys == 10
    assert np.abs(folded(points, corners, corners, c.head.sharpest_rate()) - points).max() == pytest.approx(0.2)
    assert c.errors_at(points).max() <= c.error_bound <= 0.1001


def test_erratum_3_the_argument_uses_neighbours_that_do_not_exist():
    """Below (B.16): `‖v_jm − Z‖² ≤ ‖v_jm + Δ − Z‖²` for every Δ; v_jm + Δ may be no center. D = 1, P = 8, Z = 1."""
    z, width = 1.0, 0.25
    corners = printed_grid(1.0, 8, 1)[:, 0]
    nearest = corners[np.abs(corners - z).argmin()]
    assert not np.isclose(corners, nearest + width).any()
    assert (nearest - z) ** 2 > (nearest + width - z) ** 2
    grid = pa.ProductGrid.uniform(pa.Box([-1], [1]), 8)
    centers, points = grid.axes[0], np.linspace(-1, 1, 401)
    ours = centers[grid.locate(points[:, None])[:, 0]]
    assert not np.isclose(centers, ours[-1] + width).any()  # the neighbour is missing here too …
    for step in (-width, 0.0, width):  # … but the inequality holds, since no point lies beyond half a cell
        assert ((ours - points) ** 2 <= (ours + step - points) ** 2 + 1e-15).all()


# --- 4: signs in (B.4) and (B.6) -------------------------------------------------------------------------------------


def test_erratum_4_b_4_has_the_wrong_sign():
    """(B.4): `E − T = 2f/B₀` with (B.1), (B.2); at f = 0.5, B₀ = 1 it is −1. Remark B.3's `T − E` is right."""
    f, bound = np.linspace(-0.5, 0.5, 5), 1.0
    e, t = 1 - f / bound, 1 + f / bound
    assert (e - t)[-1] == -1.0 != (2 * f / bound)[-1] == 1.0
    assert np.array_equal(t - e, 2 * f / bound) and np.array_equal(e + t, np.full(5, 2.0))


def test_erratum_4_following_b_4_returns_minus_f():
    """With E before T in W_K, as (B.4) would have it, `W_V = [0 X₁ −X₁]` gives −f; T before E, as in W_K, gives f."""
    c, centers, values, rate = compiled_waves(1, 1, 0.5)
    z = np.array([[0.4]])
    ours = c.layers("log")(torch.tensor(z)[None])[0].numpy().T
    swapped = log_network(z, centers, -values, rate=rate, bound=4.0, stride=1)  # E(f) = T(−f)
    assert np.allclose(swapped, -ours, atol=1e-9) and abs(ours.item()) > 0.5
    assert np.allclose(log_network(z, centers, values, rate=rate, bound=4.0, stride=1), ours, atol=1e-9)
    log_t = c.layers("log").attention.w_k[2, 1 : 1 + c.num_keys].numpy()
    assert np.array_equal(np.sign(log_t), np.sign(values[:, 0, 0]))


@pytest.mark.parametrize("count, printed_holds", [(8, False), (2, True)])
def test_erratum_4_b_6_drops_the_minus(count, printed_holds):
    """(B.6), first line: `+|v_j|²/2` in Kᵀ selects the outermost center, 0.875 for z = 0.1 with P = 8.

    Harmless only where all |v_j| agree (P = 2).
    """
    grid = pa.ProductGrid.uniform(pa.Box([-1], [1]), count)
    centers, z, rate = grid.axes[0], 0.1, 50.0
    k_transposed = np.stack([centers * z, centers**2 / 2], axis=1)
    printed = k_transposed @ np.array([rate, rate])
    assert (printed.argmax() == np.abs(centers - z).argmin()) == printed_holds
    last_line = rate * (centers * z - centers**2 / 2)
    assert np.allclose(printed - last_line, rate * centers**2)
    assert last_line.argmax() == np.abs(centers - z).argmin() == grid.cell([[z]])[0]
    if not printed_holds:
        assert centers[printed.argmax()] == 0.875


def test_erratum_4_our_keys_carry_the_minus():
    """Row 1 of the log form's W_K is −|v_j|²/2 (up to the common term that changes no weight)."""
    c, centers, _, _ = compiled_waves(1, 2, 0.72)
    row = c.layers("log").attention.w_k[1, 1:].numpy()
    expected = np.tile(np.repeat(-(centers**2).sum(axis=1) / 2, 2), 2)
    assert np.ptp(row - expected) < 1e-12 and np.ptp(row + expected) > 0.5


# --- 5: logarithms of zero -------------------------------------------------------------------------------------------


def test_erratum_5_t_vanishes_where_f_attains_its_bound():
    """Remark B.3: `T, E > 0`. f(x) = x, D = 1, B₀ = ‖f‖ = 1: v_0 = −1 of Definition B.1 has T = 0; the layer is NaN."""
    centers, z = printed_grid(1.0, 8, 1), np.array([[0.3]])
    values = centers[:, :, None]
    with np.errstate(divide="ignore", invalid="ignore"):
        assert np.log(1 + values / 1.0).min() == -np.inf
        assert np.isnan(log_network(z, centers, values, rate=200.0, bound=1.0, stride=1)).all()
    strict = [log_network(z, centers, values, rate=200.0, bound=b, stride=1).item() for b in (1.01, 2.0, 10.0)]
    assert np.ptp(strict) < 1e-12  # any B > max|f(v_j)| will do
    c = hard("x0", pa.Box([-1], [1]), tolerance=0.13)
    layers = c.layers("log")
    assert all(bool(torch.isfinite(b).all()) for b in layers.buffers())
    points = torch.linspace(-1, 1, 201, dtype=torch.float64)[:, None]
    assert (layers(points) - points[:, 0]).abs().max() <= 0.13


def test_erratum_5_the_zero_function_divides_by_zero():
    """(B.1): `f/B₀` with f ≡ 0, B₀ = 0 is NaN."""
    with np.errstate(invalid="ignore"):
        assert np.isnan(1 - np.zeros(3) / np.zeros(3)).all()
    layers = hard("0*x0", pa.Box([-1], [1]), tolerance=0.1).layers("log")
    assert torch.equal(layers(torch.zeros(3, 1, dtype=torch.float64)), torch.zeros(3, dtype=torch.float64))


# --- 6: overlapping columns ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tokens, dim, tolerance", [(1, 2, 0.6), (2, 2, 1.7), (1, 1, 0.3), (2, 1, 0.6)])
def test_erratum_6_columns_of_theorem_4_1_overlap(tokens, dim, tolerance):
    """Linear of B.1: columns `e_{j+s+1}` overlap for d ≥ 2 (right for d = 1); `e_{jd+s+1}` gives (B.5)."""
    c, centers, values, rate = compiled_waves(tokens, dim, tolerance)
    inputs = np.random.default_rng(6).uniform(-1, 1, (12, tokens, dim))
    errors = {
        stride: max(
            np.abs(log_network(z, centers, values, rate=rate, bound=4.0, stride=stride).T - waves(z[None])[0]).max()
            for z in inputs
        )
        for stride in (1, dim)
    }
    ours = np.abs(c.layers("log")(torch.tensor(inputs)).numpy() - waves(inputs)).max()
    assert errors[dim] == pytest.approx(ours, abs=1e-8) and ours <= c.error_bound <= tolerance
    assert errors[1] > 1.2 * tolerance if dim > 1 else errors[1] == errors[dim]


def test_erratum_6_b_5_is_not_what_the_sum_gives():
    """(B.5) shows `[v_0·z 1_{1×d} …]`; at d = 2, G = 3 and products 1, 2, 3 the printed sum is (1, 3, 5, 3, 0, 0)."""
    products = np.array([1.0, 2.0, 3.0])
    assert first_row(products, 2, stride=1)[:6].tolist() == [1, 3, 5, 3, 0, 0]
    assert first_row(products, 2, stride=2).tolist() == [1, 1, 2, 2, 3, 3] * 2
    assert first_row(products, 1, stride=1).tolist() == [1, 2, 3] * 2


def test_erratum_6_columns_of_theorem_5_1_overlap():
    """Linear of C.1 repeats `e_{j+s+1}`: at d = 2, n = 1 the error on an arc is far above the tolerance 0.3."""
    angle = np.linspace(0, 1.5, 60)
    cloud = np.stack([np.cos(angle), np.sin(angle)], axis=1)[:, None]
    c = hard(waves, pa.PointCloud(cloud), tolerance=0.3, lipschitz=2.5)
    centers, rate = c.partition.centers, c.head.sharpest_rate()
    values = waves(centers[:, None]).transpose(0, 2, 1)
    errors = {
        stride: max(
            np.abs(log_network(z, centers, values, rate=rate, bound=4.0, stride=stride).T - waves(z[None])[0]).max()
            for z in cloud[::3]
        )
        for stride in (1, 2)
    }
    assert errors[1] > 3 * 0.3 and errors[2] <= 0.3
    assert np.abs(c.layers("log")(torch.tensor(cloud)).numpy() - waves(cloud)).max() <= c.error_bound <= 0.3


def test_erratum_6_columns_of_linear_k_overlap_even_for_d_1(cross):
    """Linear_K of B.3: `e_{j+s+1}`, s < dG, overlaps for every d once G ≥ 2; `e_{jdG+s+1}` gives X_K of (B.28)."""
    c, centers, points = cross
    printed, right = cross_errors(cross, stride=1), cross_errors(cross, stride=len(centers))
    assert printed.max() > 1.5 * PAIR_TOLERANCE and right.max() <= PAIR_TOLERANCE
    k, q = (torch.tensor(points[:, i : i + 1]) for i in (0, 1))
    ours = np.abs(c.layers("log")(k, q).numpy() - pair(k, q))
    assert np.allclose(ours, right, atol=1e-9) and ours.max() <= c.error_bound <= PAIR_TOLERANCE


# --- 7: how large R must be ------------------------------------------------------------------------------------------


def tail_bound(argument: float, *, bound: float, cells: int) -> float:
    """`2B₀G exp(−3Rδ²/8)` at `R = 8 ln(argument)/(3δ²)`, δ cancels."""
    return 2 * bound * cells * math.exp(-math.log(argument))


@pytest.mark.parametrize("epsilon, printed_holds", [(0.01, False), (0.1, False), (1.0, False), (2.0, True), (3, True)])
@pytest.mark.parametrize("bound, cells", [(1.0, 100), (20.0, 64)])
def test_erratum_7_b_21_does_not_reach_a_third_of_epsilon(epsilon, printed_holds, bound, cells):
    """(B.21): at `R = 8/(3δ²)·ln(3/2·B₀Gε)` the tail is 4/(3ε), 13.3 at ε = 0.1, not ε/3: true only for ε ≥ 2."""
    printed = tail_bound(1.5 * bound * cells * epsilon, bound=bound, cells=cells)
    assert printed == pytest.approx(4 / (3 * epsilon))
    assert (printed <= epsilon / 3 * (1 + 1e-12)) == printed_holds
    assert tail_bound(6 * bound * cells / epsilon, bound=bound, cells=cells) == pytest.approx(epsilon / 3)


def test_erratum_7_b_21_can_ask_for_a_negative_temperature():
    """(B.21) for f(x) = 0.1x on [−1,1], ε = 0.05: δ = 1/6, G = 13, R = −223, and the error is 0.19."""
    epsilon, slope, count = 0.05, 0.1, 13
    delta = epsilon / (3 * slope)
    assert count > 2 / delta
    grid = pa.ProductGrid.uniform(pa.Box([-1], [1]), count)
    centers, points = grid.axes[0][:, None], np.linspace(-1, 1, 401)[:, None]

    def worst(argument: float) -> tuple[float, float]:
        rate = 8 / (3 * delta**2) * math.log(argument)
        return rate, np.abs(folded(points, centers, slope * centers, rate) - slope * points).max()

    rate, error = worst(1.5 * slope * count * epsilon)
    assert rate < -200 and error > 3.5 * epsilon
    rate, error = worst(6 * slope * count / epsilon)
    assert rate > 400 and error <= epsilon
    c = hard("0.1*x0", pa.Box([-1], [1]), tolerance=epsilon)
    assert c.num_keys <= count and c.errors_at(points).max() <= c.error_bound <= epsilon


@pytest.mark.parametrize("count, printed_holds", [(4, False), (3, False), (1, True)])
def test_erratum_7_b_46_counts_g_pairs_where_there_are_g_squared(count, printed_holds):
    """(B.46): `‖η₁‖ < G`. With G = 4 cells on each side, 15 of the 16 pairs lie in E₁ (δ = 0.1, z at a center)."""
    box, delta = pa.Box([-1, -1], [1, 1]), 0.1
    grid = pa.ProductGrid.uniform(box, count)
    scores = grid.scores(grid.centers_of([0]))[0]
    far = int((scores.max() - scores > delta).sum())
    assert (far < count) == printed_holds
    assert far <= grid.num_cells == count**2
    with_g, with_pairs = (tail_bound(6 * 1.0 * g / 0.05, bound=1.0, cells=count**2) for g in (count, count**2))
    assert with_g == pytest.approx(count * 0.05 / 3) and with_pairs == pytest.approx(0.05 / 3)


@pytest.mark.parametrize("equation, stated, substituted", [("B.46", 3 / 2, 2 / 3), ("C.12", 3 / 2, 2 / 3)])
def test_erratum_7_b_46_and_c_12_use_two_constants(equation, stated, substituted):
    """(B.46), (C.12): R is asked for with 3/2, substituted with 2/3; the tails are 13.3 and 30 at ε = 0.1, not 1/30."""
    epsilon, bound, cells = 0.1, 2.0, 50
    tails = [tail_bound(c * bound * cells * epsilon, bound=bound, cells=cells) for c in (stated, substituted)]
    assert tails == pytest.approx([40 / 3, 30.0]), equation
    assert min(tails) > 300 * epsilon / 3
    assert tail_bound(6 * bound * cells / epsilon, bound=bound, cells=cells) == pytest.approx(epsilon / 3)


# --- 8: a score gap is half a squared length -------------------------------------------------------------------------


def farthest_member(half_side: float, delta: float, count: int) -> float:
    """`max |v_j − v_jm|` over j in J₀ and z in [−D, D], one axis, the edges of the cells among the z. Exact up to 1e-9."""
    centers = pa.ProductGrid.uniform(pa.Box([-half_side], [half_side]), count).axes[0]
    edges = (centers[1:] + centers[:-1]) / 2
    points = np.concatenate([np.linspace(-half_side, half_side, 101), edges])
    scores = points[:, None] * centers - centers**2 / 2
    best = scores.max(axis=1, keepdims=True)
    nearest = centers[(best - scores <= 1e-9).argmax(axis=1)]  # the smallest label, as in the paper
    return float(np.abs(centers - nearest[:, None])[best - scores <= delta + 1e-9].max())


@pytest.mark.parametrize(
    "half_side, delta, count, printed_holds",
    [(1.0, 0.1, 21, False), (2.0, 0.5, 9, False), (20.0, 3.0, 24, False), (20.0, 4.0, 19, True), (40.0, 9.0, 9, True)],
)
def test_erratum_8_j_0_is_a_score_gap_used_as_a_distance(half_side, delta, count, printed_holds):
    """(B.19) takes `‖v_j − v_jm‖_∞ ≤ δ` from j ∈ J₀; at δ = 0.1 members are 0.48 away, at δ = 3 still 3.33."""
    assert count > 2 * half_side / delta  # as the paper chooses g
    h, farthest = 2 * half_side / count, farthest_member(half_side, delta, count)
    assert (farthest <= delta) == printed_holds
    assert farthest <= math.sqrt(2 * delta + h * h / 4) + h / 2 + 1e-9  # what a score gap does say
    if delta == 0.1:
        assert farthest > 4 * delta
    if delta == 3.0:
        assert farthest == pytest.approx(10 / 3)
    centers, points = pa.ProductGrid.uniform(pa.Box([-half_side], [half_side]), count).axes[0], np.linspace(-1, 1, 101)
    points, rate = points * half_side, 8 / h**2  # ours: no J₀; the second moment bounds the error of f(x) = x
    moment, _ = moment_bounds(AxisGeometry.of(centers, -half_side, half_side), rate, 2.0)
    error = np.abs(folded(points[:, None], centers[:, None], centers[:, None], rate)[:, 0] - points).max()
    assert error <= math.sqrt(moment) <= 1.002 * h / 2 <= delta


@pytest.mark.parametrize("delta, printed_holds", [(0.5, False), (2.7, False), (3.9, False), (4.0, True), (6.0, True)])
def test_erratum_8_the_threshold_is_four(delta, printed_holds):
    """Over all widths h < δ the members of J₀ stay within δ exactly if δ ≥ 4: `k(k−1)h² ≤ 2δ` and kh > δ exclude each other."""
    widths = delta / np.concatenate([1.0005 + np.linspace(0, 0.999, 40), np.linspace(2, 6, 15)])
    held = [farthest_member(12 * h, delta, 24) <= delta * (1 + 1e-9) for h in widths]
    assert all(held) == printed_holds
    for h, holds in zip(widths, held):  # the formula of the page, cell by cell
        k = math.floor(delta / h + 1e-12) + 1
        assert holds == (k * (k - 1) * h * h > 2 * delta + 1e-9)
    # 8/3, which this page once gave, is not enough
    assert farthest_member(20.0, 3.0, 24) > 3.0 > 8 / 3


def gaps(z: np.ndarray, centers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """g_i of every center at z, `(G, m)`, and which centers are farther than δ = 1 in the ∞-norm."""
    away = (z - centers) ** 2
    return away - away[away.sum(axis=1).argmin()], np.abs(z - centers).max(axis=1) > 1.0


@pytest.mark.parametrize("dimension, count", [(1, 7), (2, 5), (3, 4), (5, 3)])
@pytest.mark.parametrize("width", [1.0, 0.8, 0.3])
def test_erratum_8_the_repaired_gap_holds_in_any_dimension(dimension, count, width):
    """J₁ = {‖v_j − z‖_∞ > δ}, δ = 1, cells at most δ wide: every g_i ≥ 0 and one > 3δ²/4, so the score trails by 3δ²/8."""
    half = count * width / 2
    box = pa.Box([-half] * dimension, [half] * dimension)
    grid = pa.ProductGrid.uniform(box, count)
    centers = grid.centers_of(np.arange(grid.num_cells))
    rng = np.random.default_rng(8)
    edges = rng.integers(0, count + 1, (40, dimension)) * width - half  # corners of cells, where it is tightest
    worst = np.inf
    for z in np.vstack([box.sample(40, rng), edges, np.clip(edges + 1e-9, -half, half)]):
        g, far = gaps(z, centers)
        assert g.min() >= -1e-12
        worst = min(worst, g[far].max(axis=1).min() if far.any() else np.inf)
    assert worst > 0.75 - 1e-6 and (width < 1 or dimension > 3 or worst < 2.01)
    if dimension == 5 and width == 1:  # |z − v_jm|₂ ≤ δ/2, as printed, is far from true
        assert max(np.linalg.norm(z - centers, axis=1).min() for z in edges) > 1.0


def smallest_gap(centers: np.ndarray, end: float) -> float:
    """The least g of a center farther than δ = 1 from z, over z in [−end, end], one axis."""
    found = np.inf
    for z in np.linspace(-end, end, 4001):
        g, far = gaps(np.array([z]), centers[:, None])
        found = min(found, g[far].min(initial=np.inf))
    return found


@pytest.mark.parametrize("width", [1.0, 0.75, 0.667, 0.501, 0.4, 0.1])
def test_erratum_8_the_repaired_gap_holds_for_corners_too(width):
    """Definition B.1's corners, z up to h beyond the last: a second case in the proof, the same 3δ²/4, attained at h = δ/2."""
    count = math.ceil(4 / width)
    half = count * width / 2
    corners = printed_grid(half, count, 1)[:, 0]
    assert np.abs(corners - half).min() == pytest.approx(width)  # twice as far as from a midpoint
    assert smallest_gap(corners, half) > 0.75
    if width == 0.501:
        assert smallest_gap(corners, half) < 0.76
    assert smallest_gap(corners + width / 2, half) > 8 / 9 - 1e-9  # midpoints do a little better


@pytest.mark.parametrize("width, holds", [(1.0, True), (1.4, True), (1.6, False), (1.9, False)])
def test_erratum_8_the_repaired_gap_needs_narrow_cells(width, holds):
    """Control: with cells of 1.9δ a cell of J₁ trails by 0.1δ², and the exponent −3Rδ²/8 is out of reach."""
    half = 5 * width / 2
    centers = pa.ProductGrid.uniform(pa.Box([-half], [half]), 5).axes[0]
    assert (smallest_gap(centers, half) > 0.75) == holds
    if width == 1.9:
        assert smallest_gap(centers, half) / 2 < 0.11


def test_erratum_8_the_repaired_gap_needs_a_product_grid():
    """Control: of (0, 0) and (1.2, −0.6) the first is nearest to z = (0.7, 0), but not on the first axis."""
    z = np.array([0.7, 0.0])
    g, _ = gaps(z, np.array([[0.0, 0.0], [1.2, -0.6]]))
    assert g.min() < -0.2
    product = np.array([[x, y] for x in (0.0, 1.2) for y in (0.0, -0.6)])
    assert gaps(z, product)[0].min() >= 0


def test_erratum_8_the_repaired_gap_needs_one_r():
    """Control: a small R on one axis lets cells of J₁ keep their weight, though the other axis has the R of erratum 7."""
    epsilon, bound, delta, count = 0.1, 1.0, 1.0, 8
    grid = pa.ProductGrid.uniform(pa.Box([-4, -4], [4, 4]), count)
    centers = grid.centers_of(np.arange(grid.num_cells))
    needed = 8 / (3 * delta**2) * math.log(6 * bound * grid.num_cells / epsilon)
    z = np.array([0.0, 0.49])
    for rates, holds in (((needed, needed), True), ((2 * needed, needed), True), ((needed, 0.05), False)):
        weights = softmax(-0.5 * ((z - centers) ** 2 @ np.array(rates))[:, None])[:, 0]
        far = np.abs(z - centers).max(axis=1) > delta
        assert (2 * bound * weights[far].sum() <= epsilon / 3) == holds


@pytest.mark.parametrize("dimension, count", [(1, 41), (2, 24), (3, 13)])
def test_erratum_8_the_repaired_proof_reaches_epsilon(dimension, count):
    """ε/3 from J₀ and ε/3 from J₁ with the R of erratum 7, each summed over all cells. Control: a small R leaks more."""
    epsilon, box = 0.6, pa.Box([-1] * dimension, [1] * dimension)
    grid = pa.ProductGrid.uniform(box, count)
    delta, centers = 2 / count, grid.centers_of(np.arange(grid.num_cells))
    slope, bound = epsilon / 3 / delta / dimension, float(dimension)  # h = δ exactly

    def f(z):
        return np.sin(slope * z).sum(axis=1)

    points = np.vstack([box.sample(30, np.random.default_rng(9)), [box.hi], [np.zeros(dimension)]])
    points = np.clip(np.vstack([points, (np.round(points / delta - 0.5) + 0.5) * delta]), -1, 1)  # edges of cells
    off = np.abs(f(centers)[:, None] - f(points))
    far = np.abs(centers[:, None] - points).max(axis=2) > delta * (1 + 1e-12)

    def parts(log: float) -> tuple[float, float]:
        rate = 8 / (3 * delta**2) * log
        weights = softmax(rate * (centers @ points.T - (centers**2).sum(axis=1, keepdims=True) / 2))
        return (weights * off * ~far).sum(axis=0).max(), 2 * bound * (weights * far).sum(axis=0).max()

    near, leaked = parts(math.log(6 * bound * len(centers) / epsilon))
    assert epsilon / 12 < near <= epsilon / 3 and leaked <= epsilon / 3
    assert parts(0.05)[1] > epsilon / 3


@pytest.mark.parametrize("tokens, dim, printed_holds", [(1, 1, True), (1, 2, False), (4, 4, False)])
def test_erratum_8_half_delta_is_not_a_euclidean_distance(tokens, dim, printed_holds):
    """(B.21) puts `|v_jm − Z|₂ ≤ δ/2` where only the ∞-norm is known: √(dn)·δ/2, which is 2δ for dn = 16."""
    delta, box = 1.0, pa.Box.sequence(-1, 1, tokens=tokens, dim=dim)
    grid = pa.ProductGrid.uniform(box, 2)  # cells of side δ
    corner = np.zeros((1, box.dimension))
    difference = corner - grid.centers_of(grid.cell(corner))
    distance = float(np.linalg.norm(difference))
    assert np.abs(difference).max() == delta / 2
    assert (distance <= delta / 2) == printed_holds
    assert (distance**2 - delta**2 <= (delta / 2) ** 2 - delta**2) == printed_holds
    assert distance == math.sqrt(box.dimension) * delta / 2
    assert distance <= grid.covering_radius <= distance * (1 + 1e-12)


def test_erratum_8_theorem_5_1_knows_only_delta():
    """(C.12) also uses `|v_jm − Z|₂ ≤ δ/2`, δ = ε/(3L), where (C.6) gives δ: the exponent −3Rδ²/8 becomes 0."""
    epsilon, lipschitz = 0.39, 1.0
    delta = epsilon / (3 * lipschitz)
    points = np.linspace(0, 1, 41)[:, None]
    cover = farthest_point_cover(points, radius=delta)
    nearest = np.abs(points - cover.centers[:, 0]).min(axis=1).max()
    assert nearest == pytest.approx(0.125) and 1.9 * delta / 2 < nearest <= delta
    c = hard(lambda z: np.sin(z[:, 0]), pa.PointCloud(points), tolerance=epsilon, lipschitz=lipschitz)
    assert c.errors_at(points).max() <= c.error_bound <= epsilon
    assert c.num_keys < len(cover.centers)  # ρ → ε/L needs fewer balls than ε/(3L)


# --- 9: Theorem 4.2 --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cells, printed_holds", [(3, False), (1, True)])
def test_erratum_9_linear_k_has_g_rows_where_w_k_expects_one(cells, printed_holds):
    """Linear_K has 2dG² + G rows (`e_{2dG²+j+1}`), W_K of (B.30) takes 2dG² + 1: 21 and 19 at d = 1, G = 3."""
    columns = 2 * cells**2
    linear_k = np.vstack([np.eye(columns), np.zeros((cells, columns))])
    for j in range(cells):
        linear_k[columns + j, j : j + cells] += 1.0
    w_k = np.zeros((2 + cells + 1, columns + 1))
    if printed_holds:
        assert (w_k @ linear_k).shape == (2 + cells + 1, columns)
    else:
        with pytest.raises(ValueError, match="19"):
            w_k @ linear_k


def test_erratum_9_our_linear_k_has_one_row_of_products(cross):
    """2dG² + 1 rows, and the layers give what the folded head gives."""
    c, _, points = cross
    k, q = (torch.tensor(points[:, i : i + 1]) for i in (0, 1))
    layers = c.layers("log")
    columns = 2 * c.num_keys
    assert layers.linear_k.constant.shape == (columns + 1, columns)
    assert layers.attention.w_k.shape[1] == columns + 1
    for form in ("log", "indexed"):
        assert torch.allclose(c.layers(form)(k, q), c(k, q), atol=1e-9, rtol=0)


def test_erratum_9_b_32_counts_r_twice(cross):
    """(B.32): `R W₁ᵀX_Q` though W̄₁ already holds R: the query's cell is lost. KᵀQ above it has R once and is right."""
    c, centers, points = cross
    rate = c.head.sharpest_rate()
    printed, right = (cross_errors(cross, stride=len(centers), rate_again=r) for r in (rate, 1.0))
    assert rate > 100 and printed.max() > 2 * PAIR_TOLERANCE > 2 * right.max()
    # R² v·z_Q − R|v|²/2 is largest at an end: the middle cells are never chosen
    chosen = {int(np.argmax(rate**2 * centers * q - rate * centers**2 / 2)) for q in points[:, 1]}
    assert chosen <= {0, len(centers) - 1}
    assert c.errors_at(points).max() <= c.error_bound <= PAIR_TOLERANCE
    w_q = c.layers("log").attention.w_q.numpy()
    assert sorted({*w_q[w_q != 0].tolist()}) == pytest.approx([1.0, rate])


@pytest.mark.parametrize("rate, printed_holds", [(40.0, False), (1.0, True)])
def test_erratum_9_the_restated_w_k_of_c_1_counts_r_twice(rate, printed_holds):
    """Parameter count of C.1: R in W_K *and* in W_Q gives scores R²(v·z − |v|²/2), R times those of (C.1)."""
    centers, z = np.array([-0.5, 0.1, 0.7]), 0.3
    w_k = np.array([rate * centers * z, -rate * centers**2 / 2])  # times Linear(Z), T and E left out
    scores = w_k.T @ np.array([rate, rate])
    wanted = rate * (centers * z - centers**2 / 2)
    assert np.allclose(scores, rate * wanted)
    assert np.allclose(scores, wanted) == printed_holds
    cloud = pa.PointCloud(np.linspace(-1, 1, 30)[:, None])
    c = hard(lambda z: np.sin(z[:, 0]), cloud, tolerance=0.3, lipschitz=1.0)
    layers = c.layers("log")
    assert layers.attention.w_k[0, 0] == 1.0 and layers.attention.w_q.max() == c.head.sharpest_rate()


@pytest.mark.parametrize("bound, printed_holds", [(2.0, False), (5.0, False), (1.5, False), (1.0, True)])
def test_erratum_9_b_39_divides_by_b_0_twice(bound, printed_holds):
    """(B.39): `Σ w_ij f(v_i, v_j)/B₀` is f/B₀: half of f at B₀ = 2. `W_O = dB₀ I` has already cancelled it."""
    centers, rate = pa.ProductGrid.uniform(pa.Box([-1], [1]), 6).axes[0], 2000.0
    table = np.sin(centers)[:, None] * np.ones(6) * 0.9
    z_k, z_q = centers[4], centers[1]
    scores = rate * ((centers * z_k - centers**2 / 2)[:, None] + centers * z_q - centers**2 / 2)
    printed = float((softmax(scores.reshape(-1, 1))[:, 0] * table.ravel() / bound).sum())
    assert printed == pytest.approx(table[4, 1] / bound)
    assert (abs(printed - table[4, 1]) < 1e-9) == printed_holds
    layers = Cross(z_k, z_q, centers, table, rate=rate, bound=bound, stride=6)
    assert layers.output() == pytest.approx(table[4, 1])


def test_erratum_9_indices_of_b_39_drift(cross):
    """(B.39): `f(v_{i−1}, v_{j−1})` with i, j from 0: v_{−1} does not exist, elsewhere it is the wrong cell's value."""
    c, centers, _ = cross
    numbered = dict(enumerate(centers))
    with pytest.raises(KeyError):
        numbered[0 - 1]
    i, j = 2, 2
    at = np.array([[centers[i]]]), np.array([[centers[j]]])
    drifted = pair(np.array([[numbered[i - 1]]]), np.array([[numbered[j - 1]]]))
    assert abs(drifted - pair(*at)).item() > 0.3
    assert abs(c(*at) - pair(*at)).item() < 1e-6


@pytest.mark.parametrize("d, n, printed_holds", [(2, 3, False), (3, 1, False), (2, 2, True)])
def test_erratum_9_w_t_is_n_by_dg(d, n, printed_holds):
    """W_T^(j) is declared d × Gn; G blocks ln(T)ᵀ side by side are n × dG. W̄₁ is declared G × d and is G × dG."""
    cells = 4
    w_t = np.hstack([np.log(np.full((d, n), 1.5)).T for _ in range(cells)])
    assert w_t.shape == (n, d * cells)
    assert (w_t.shape == (d, cells * n)) == printed_holds
    w_1 = np.hstack([np.eye(cells)[:, [j]] @ np.ones((1, d)) for j in range(cells)])
    assert w_1.shape == (cells, d * cells) != (cells, d)
    w_1_and_t = np.vstack([w_1, w_t])  # as they stand in W_K
    assert w_1_and_t.shape == (cells + n, d * cells)
    if not printed_holds:
        with pytest.raises(ValueError):
            np.vstack([w_1, np.zeros((d, cells * n))])


def test_erratum_9_our_rows_of_logarithms_are_n_by_dg():
    """n = 3 tokens of d = 2: the last n rows of the log form's W_K are n × 2dG."""
    boxes = (pa.Box([-1], [1]), pa.Box([-1], [1]))
    base = np.arange(6.0).reshape(3, 2) / 6

    def sequence(k, q):
        return base * (np.asarray(k)[:, :, None] + np.asarray(q)[:, :, None])

    c = hard(sequence, boxes, tolerance=0.9, lipschitz=1.2)
    layers = c.layers("log")
    assert layers.attention.w_k.shape == (2 + 1 + 3, 2 * 2 * c.num_keys + 1)
    k, q = (torch.linspace(-0.9, 0.8, 5, dtype=torch.float64)[:, None] for _ in range(2))
    assert torch.allclose(layers(k, q), c(k, q), atol=1e-9, rtol=0)


def test_erratum_9_neighbours_live_in_2dn_dimensions():
    """Below (B.42): Δ ∈ (2D/g)·{−1,0,1}^{dn} is added to v_η ∈ R^{2dn}; at dn = 2 that is 2 numbers plus 4."""
    grid = pa.ProductGrid.uniform(pa.Box([-1] * 4, [1] * 4), 3)
    v = grid.centers_of([40])[0]
    with pytest.raises(ValueError):
        v + 2 / 3 * np.array([1.0, 0.0])
    steps = 2 / 3 * np.stack(np.meshgrid(*[[-1, 0, 1]] * 4, indexing="ij"), axis=-1).reshape(-1, 4)
    assert len(steps) == 3**4
    assert np.array_equal(np.sort(grid.cell(v + steps)), np.arange(grid.num_cells))


@pytest.mark.parametrize("cells, n, printed_holds", [(3, 2, False), (3, 1, False), (1, 2, False), (1, 1, True)])
def test_erratum_9_w_q_is_no_matrix(cells, n, printed_holds):
    """W_Q of B.3: `I_G 0_{1×n}` and `0_{1×G} I_n`; the zeros are G × n and n × G."""
    rate = np.full((1, n), 7.0)

    def blocks(beside_g: np.ndarray, beside_n: np.ndarray) -> np.ndarray:
        top = [np.zeros((1, cells)), rate]
        return np.block([top, top, [np.eye(cells), beside_g], [beside_n, np.eye(n)]])

    if printed_holds:
        assert blocks(np.zeros((1, n)), np.zeros((1, cells))).shape == (2 + cells + n, cells + n)
    else:
        with pytest.raises(ValueError):
            blocks(np.zeros((1, n)), np.zeros((1, cells)))
    w_q, x_q = blocks(np.zeros((cells, n)), np.zeros((n, cells))), np.ones((cells, n))
    assert np.array_equal(w_q @ np.vstack([x_q, np.eye(n)]), np.vstack([rate.repeat(2, 0), x_q, np.eye(n)]))


@pytest.mark.parametrize("cells, printed_holds", [(4, False), (1, True)])
def test_erratum_9_columns_sum_to_2dg_squared(cells, printed_holds, cross):
    """Above (B.33): a column of ones "equals to 1·2dG = 2dG"; it has 2dG² entries. Weights 1/(2dG) would sum to G."""
    d = 3
    column = np.exp(np.zeros(2 * d * cells**2))
    assert (column.sum() == 2 * d * cells) == printed_holds
    assert (column / (2 * d * cells)).sum() == pytest.approx(cells) and column.sum() == 2 * d * cells**2
    c, _, _ = cross
    assert c.layers("log").attention.w_v.shape[1] - 1 == 2 * c.num_keys  # G² pairs, d = 1


@pytest.mark.parametrize("cells, printed_holds", [(3, False), (1, True)])
def test_erratum_9_the_second_half_of_b_28_stops_at_0(cells, printed_holds):
    """(B.28), middle line: the second half of the last row is `Σ_{j=0}^{1−1} v_j·z_K …`, the first has j up to G − 1."""
    products, d = np.arange(1.0, cells + 1), 2

    def half(last: int) -> np.ndarray:
        row = np.zeros(d * cells**2)
        for j in range(last + 1):
            row[j * d * cells : (j + 1) * d * cells] += products[j]  # the columns of erratum 6
        return row

    x_k = np.repeat(products, d * cells)
    assert np.array_equal(half(cells - 1), x_k)
    assert np.array_equal(half(1 - 1), x_k) == printed_holds


@pytest.mark.parametrize("cells, printed_holds", [(4, False), (1, True)])
def test_erratum_9_b_43_sums_g_of_g_squared_pairs(cells, printed_holds):
    """(B.43): `Σ_{η=0}^{G−1}` of the weights is said to be 1; η is a pair, and G of the G² terms hold a part of the mass."""
    grid = pa.ProductGrid.uniform(pa.Box([-1, -1], [1, 1]), cells)
    weights = softmax(20 * grid.scores([[0.6, 0.1]]).T)[:, 0]
    assert (abs(weights[:cells].sum() - 1) < 1e-12) == printed_holds
    assert weights.sum() == pytest.approx(1) and len(weights) == cells**2
    if cells == 4:
        assert weights[:cells].sum() < 1e-6  # the pairs (0, j), of which z_K = 0.6 is far


def test_erratum_9_the_rows_above_b_37_subtract_the_first_cell():
    """Above (B.37): `T(v_i, v_j) − E(v_i, v_0)` in every row j; right only for j = 0."""
    bound, f = 2.0, np.sin(np.arange(5.0))  # f(v_i, v_j) for one i
    t, e = 1 + f / bound, 1 - f / bound
    printed = t - e[0]
    assert np.allclose(printed, (f + f[0]) / bound)
    assert np.isclose(printed, 2 * f / bound).tolist() == [True, False, False, False, False]
    assert np.allclose(t - e, 2 * f / bound)


@pytest.mark.parametrize("rate, printed_holds", [(30.0, False), (1.0, False)])
def test_erratum_9_the_parts_of_b_38_do_not_multiply_to_it(rate, printed_holds):
    """Above (B.38): `exp(v_i·z_K − |v_i|²/2)` and `v_j·z_Q`; (B.38) is `exp(R(…))` of their sum and of −|v_j|²/2."""
    v, z_k, z_q = np.array([-0.5, 0.0, 0.5]), 0.3, -0.2
    exact = np.exp(rate * ((v * z_k - v**2 / 2)[:, None] + v * z_q - v**2 / 2))
    printed = np.exp(v * z_k - v**2 / 2)[:, None] * (v * z_q)
    assert np.allclose(printed, exact) == printed_holds
    assert (printed <= 0).any() and (exact > 0).all()
    right = np.exp(rate * (v * z_k - v**2 / 2))[:, None] * np.exp(rate * (v * z_q - v**2 / 2))
    assert np.allclose(right, exact)


@pytest.mark.parametrize("rate, printed_holds", [(40.0, False), (1.0, True)])
def test_erratum_9_b_35_is_not_multiplied_by_r(rate, printed_holds):
    """Below (B.38): `X_2 · R[exp(…) ⊙ (…)]` in the sum that computes (B.35); the output would be R f."""
    centers = pa.ProductGrid.uniform(pa.Box([-1], [1]), 6).axes[0]
    table = np.cos(centers)[:, None] * np.ones(6)
    scores = rate * ((centers * 0.2 - centers**2 / 2)[:, None] + centers * -0.4 - centers**2 / 2)
    powers = np.exp(scores)
    right, printed = (powers * table).sum() / powers.sum(), (rate * (powers * table)).sum() / powers.sum()
    assert np.isclose(printed, right) == printed_holds and np.isclose(printed, rate * right)
    layers = Cross(0.2, -0.4, centers, table, rate=rate, bound=2.0, stride=6)
    assert layers.output() == pytest.approx(right)


@pytest.mark.parametrize("cells, n, printed_holds", [(3, 2, False), (3, 3, True)])
def test_erratum_9_w_1_x_q_has_n_columns(cells, n, printed_holds):
    """Above (B.31): `W₁ᵀX_Q` is given the size dG² × G; W₁ is G × dG² and X_Q is G × n."""
    d = 2
    w_1 = np.hstack([np.repeat(np.eye(cells), d, axis=1)] * cells)
    product = w_1.T @ np.ones((cells, n))
    assert w_1.shape == (cells, d * cells**2) and product.shape == (d * cells**2, n)
    assert (product.shape == (d * cells**2, cells)) == printed_holds


def test_erratum_9_the_affine_functions_of_a_pair_take_2dn_numbers():
    """Definition B.3: `Aff_{i,j} ∈ R^{dn} → R`; its slope [v_i; v_j] has 2dn numbers, 4 where an input has 2."""
    grid = pa.ProductGrid.uniform(pa.Box([-1] * 4, [1] * 4), 2)  # two inputs with dn = 2
    slopes, z_k, z_q = grid.to_max_affine().slopes, np.array([0.3, -0.2]), np.array([0.1, 0.7])
    with pytest.raises(ValueError):
        slopes @ z_k
    scores = slopes @ np.concatenate([z_k, z_q])
    pairs = pa.ProductGrid.uniform(pa.Box([-1] * 2, [1] * 2), 2).to_max_affine().slopes
    assert np.allclose(scores.reshape(4, 4), (pairs @ z_k)[:, None] + pairs @ z_q)


def test_erratum_9_w_v_is_not_square():
    """Section 2: `W_V ∈ R^{D×D}`; B.1 and B.3 use d × D. A D × D one returns D rows, here 17 where f has 2."""
    c, _, _, _ = compiled_waves(1, 2, 1.8)
    layers, z = c.layers("log"), torch.tensor([[[0.3, -0.2]]], dtype=torch.float64)
    w_v, height = layers.attention.w_v.numpy(), layers.linear.constant.shape[0]
    assert height == 17 and w_v.shape == (2, height)
    linear = layers.linear(z.transpose(1, 2))
    attended = (linear @ layers.attention.weights(linear) @ layers.attention.w_o)[0].numpy()
    square = np.vstack([w_v, np.zeros((height - 2, height))])
    target = waves(z.numpy())[0].T
    assert (square @ attended).shape == (height, 1) != target.shape
    assert np.abs(w_v @ attended - target).max() <= c.error_bound


# --- 10: the corollaries ---------------------------------------------------------------------------------------------


def integral(function, delta: float, pieces: int = 40000) -> float:
    """∫_δ^1 by midpoints in ln x."""
    edges = np.linspace(math.log(delta), 0.0, pieces + 1)
    x = np.exp((edges[1:] + edges[:-1]) / 2)
    return float((function(x) * x).sum() * (edges[1] - edges[0]))


@pytest.fixture(scope="module")
def clipped():
    """A head for max(x, 0.01)^(−1/2) on [0,1]: bounded, as every head is."""

    def clip(z):
        return np.maximum(np.asarray(z)[:, 0], 0.01) ** -0.5

    return hard(clip, pa.Box([0], [1]), tolerance=1.0, lipschitz=500.0)


def test_erratum_10_integrable_is_neither_bounded_nor_in_l_2(clipped):
    """Corollary 4.1.1 with p = 2: f = x^(−1/2) on (0,1] is integrable, ∫f = 2; ∫_δ |f − net|² grows like ln(1/δ)."""
    deltas = [1e-6, 1e-12, 1e-24, 1e-48]
    once = [integral(lambda x: x**-0.5, d) for d in deltas]
    assert once[-1] == pytest.approx(2.0, abs=1e-4)
    assert np.allclose([integral(lambda x: 1 / x, d) for d in deltas], -np.log(deltas))

    def off(x, p):
        return np.abs(x**-0.5 - clipped(x[:, None])) ** p

    squares = [integral(lambda x: off(x, 2), d) for d in deltas]
    assert all(b - a > 0.9 * math.log(c / d) for a, b, c, d in zip(squares, squares[1:], deltas, deltas[1:]))
    assert squares[-1] > 100
    first = [integral(lambda x: off(x, 1), d) for d in deltas]  # p = 1, where integrable is the right hypothesis
    assert first[-1] - first[0] < 2.1e-3 and first[-1] < 0.2


def test_erratum_10_partita_clips_a_pole_in_l_1_and_refuses_it_in_l_2():
    """x^(−1/2) on [0,1] is in L_1, where it is clipped and its tail is part of the bound, and not in L_2 or L_∞."""
    c = pa.compile("1/sqrt(x0)", pa.Box([0], [1]), tolerance=0.2, norm=1)
    off = integral(lambda x: np.abs(x**-0.5 - c(x[:, None])), 1e-12)
    assert c.certificate.kind == "proved" and off <= c.error_bound <= 0.2
    with pytest.raises(NonFiniteValueError, match="not in L2"):
        pa.compile("1/sqrt(x0)", pa.Box([0], [1]), tolerance=0.2, norm=2)
    with pytest.raises(NonFiniteValueError, match="finite"):
        hard("1/sqrt(x0)", pa.Box([0], [1]), tolerance=0.2)


def test_erratum_10_the_exceptional_set_needs_f_minus_attn():
    """End of B.2: `∫_{D_δ} |f − Attn|^p ≤ Δ·B_p^p`. f = −1 on [0, 0.1], 1 beyond; g ≡ 1: 0.4 against 0.1 at p = 2."""
    measure, bound, power = 0.1, 1.0, 2
    f_there, net = -1.0, 1.0  # the constant head: Attn = g
    integral_there = measure * abs(f_there - net) ** power
    assert integral_there == pytest.approx(0.4) and integral_there > measure * bound**power
    assert integral_there <= measure * (2 * bound) ** power
    # (B.25) as printed measures {|Attn − g| > ε₀}, empty; the set that matters is {|Attn − f| > ε₀}
    x = (np.arange(1000) + 0.5) / 1000
    f, g = np.where(x < 0.1, -1.0, 1.0), np.ones(1000)
    assert (np.abs(net - g) > 0.01).mean() == 0.0 and (np.abs(net - f) > 0.01).mean() == pytest.approx(0.1)


def test_erratum_10_our_jump_term_uses_the_height_of_f_minus_net():
    """The same f compiled in L_2: the declared height is that of the jump, 2, not the bound of |f|, 1."""

    def step(z):
        return np.where(np.asarray(z)[:, 0] < 0.1, -1.0, 1.0)

    c = hard(step, pa.Box([0], [1]), tolerance=0.2, norm=2, lipschitz=0.0, jumps=pa.Jumps(height=2.0, tube=2))
    x = (np.arange(200000) + 0.5) / 200000
    seen = math.sqrt(((c(x[:, None]) - step(x[:, None])) ** 2).mean())
    assert 0 < seen <= c.error_bound <= 0.2
    assert next(t for t in c.certificate.terms if t.name == "jumps").inputs["height"] == 2.0


@pytest.mark.parametrize("power, bound, printed_holds", [(2, 4.0, False), (3, 8.0, False), (1, 4, True), (2, 1, True)])
def test_erratum_10_the_choice_of_measure_lacks_a_power(power, bound, printed_holds):
    """End of B.2 and B.4: `Δ ≤ ε^p/(B_p·2^p)` makes Δ^{1/p}B_p = (ε/2)·B_p^{1−1/p}, 0.1 at ε = 0.1, p = 2, B_p = 4."""
    epsilon = 0.1
    printed = (epsilon**power / (bound * 2**power)) ** (1 / power) * bound
    assert printed == pytest.approx(epsilon / 2 * bound ** (1 - 1 / power))
    assert (printed <= epsilon / 2 * (1 + 1e-12)) == printed_holds
    assert (epsilon**power / (2 * bound) ** power) ** (1 / power) * bound == pytest.approx(epsilon / 2)


# --- 11 and 12: Theorem 5.1 ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dimension, printed_holds", [(1, True), (4, False), (9, False)])
def test_erratum_11_a_2_norm_constant_is_used_with_the_infinity_norm(dimension, printed_holds):
    """Above (C.9): `‖Z₁ − Z₂‖_∞ ≤ ε/(3L)` gives |f(Z₁) − f(Z₂)| ≤ ε/3. f = Σz_i/√m, L = 1: √m times as much."""
    epsilon, lipschitz = 0.3, 1.0
    f = np.full(dimension, 1 / math.sqrt(dimension))
    assert np.linalg.norm(f) == pytest.approx(lipschitz)
    step = np.full(dimension, epsilon / (3 * lipschitz))
    moved = float(f @ step)
    assert moved == pytest.approx(math.sqrt(dimension) * epsilon / 3)
    assert (moved <= epsilon / 3 * (1 + 1e-12)) == printed_holds
    assert moved <= lipschitz * np.linalg.norm(step) * (1 + 1e-12)


def test_erratum_11_our_bound_keeps_the_2_norm():
    """f = Σz_i/2 on [−1,1]⁴, L = 1: at a corner the error exceeds L·max h/2, what ∞-closeness would promise."""
    box = pa.Box([-1] * 4, [1] * 4)
    c = hard(lambda z: z.sum(1) / 2, box, tolerance=0.6, lipschitz=1.0)
    closeness = max(1 / p for p in c.partition.counts)  # ∞-distance to the nearest center
    corner = np.full((1, 4), -1 + 1e-3)
    assert 1.5 * closeness < c.errors_at(corner)[0] <= c.error_bound <= 0.6
    assert c.error_bound >= c.partition.covering_radius


def test_erratum_11_the_number_of_balls_is_no_power():
    """C.1 keeps `N_x = P^{dn}` from Theorem 4.1: 7 balls in R² are no P², neither 2² nor 3² centers do."""
    angle = 2 * np.pi * np.arange(7) / 7
    points = np.stack([np.cos(angle), np.sin(angle)], axis=1)
    c = hard(lambda z: np.sin(z[:, 0]), pa.PointCloud(points), tolerance=0.3, lipschitz=1.0)
    assert c.num_keys == 7 and math.isqrt(7) ** 2 != 7
    four = farthest_point_cover(points, max_balls=4)
    assert four.radius > 0.1 and c.certificate.facts["covering_radius"] <= 0.3
    assert c.errors_at(points).max() <= c.error_bound <= 0.3


def test_erratum_11_f_is_not_defined_at_centers_outside_the_domain():
    """Theorem 5.1 needs f(v_j). f = xy/|(x,y)|, L = 1, on the circle of radius ε/3: one ball covers it, f(0) is NaN."""
    epsilon = 0.03
    angle = np.linspace(0, 2 * np.pi, 64, endpoint=False)
    circle = epsilon / 3 * np.stack([np.cos(angle), np.sin(angle)], axis=1)

    def f(z):
        z = np.asarray(z)
        return z[:, 0] * z[:, 1] / np.hypot(z[:, 0], z[:, 1])

    center = np.zeros((1, 2))
    assert np.linalg.norm(circle - center, axis=1).max() <= epsilon / 3 * (1 + 1e-12)
    with np.errstate(invalid="ignore"):
        assert np.isnan(f(center)).all()
    c = hard(f, pa.PointCloud(circle), tolerance=epsilon / 10, lipschitz=1.0)
    centers = c.partition.centers
    assert all((circle == v).all(axis=1).any() for v in centers)  # ours are points of the domain
    assert c.errors_at(circle).max() <= c.error_bound <= epsilon / 10


@pytest.mark.parametrize("tokens, dim", [(3, 2), (1, 1), (2, 4)])
def test_erratum_12_the_parameters_are_three_dn_n(tokens, dim):
    """End of C.1: `dnN + 2dN + 2dnN + n = 4dnN + 2dN + n`; the sum is 3dnN + 2dN + n. Still O(dnN)."""
    points = np.random.default_rng(12).random((20, tokens, dim))
    c = hard(lambda z: np.sin(np.asarray(z)), pa.PointCloud(points), tolerance=0.3, lipschitz=1.0)
    n, d, cells = tokens, dim, c.num_keys
    summed = d * n * cells + 2 * d * cells + 2 * d * n * cells + n
    printed = 4 * d * n * cells + 2 * d * cells + n
    assert printed - summed == d * n * cells > 0 and printed <= 4 / 3 * summed
    assert summed == 3 * d * n * cells + 2 * d * cells + n
    assert c.certificate.facts["paper_count"] == summed + 2 * n
    layers = c.layers("log")  # counted on the layers themselves
    attention = layers.attention
    counted = c.partition.centers.size + attention.w_k[1:, 1:].numel() + int(attention.w_o.ne(0).sum())
    assert counted == summed
    assert counted + int(((attention.w_q != 0) & (attention.w_q != 1)).sum()) == summed + 2 * n


def test_erratum_12_r_is_a_parameter():
    """Remark C.1 counts what differs according to f or the domain and is not 0 or 1: R, 2n entries of W_Q, does and is."""
    points = np.random.default_rng(12).random((20, 3, 2))
    w_q = [
        hard(lambda z, a=a: a * np.sin(np.asarray(z)), pa.PointCloud(points[:count]), tolerance=0.3, lipschitz=a)
        .layers("log")
        .attention.w_q
        for a, count in ((1.0, 20), (2.0, 20), (1.0, 10))
    ]
    entries = [(w != 0) & (w != 1) for w in w_q]
    assert [int(e.sum()) for e in entries] == [2 * 3] * 3
    rates = [float(w[e][0]) for w, e in zip(w_q, entries)]
    assert len(set(rates)) == 3 and all((w[e] == r).all() for w, e, r in zip(w_q, entries, rates))
    assert 3 * 2 * 3 * 20 + 2 * 2 * 20 + 3 * 3 == 449


# --- 13: sentences that do not match the proofs ----------------------------------------------------------------------


def test_erratum_13_f_is_not_in_w_v():
    """Step 4 of both sketches: "We place f(v_j) in the 'value matrix' W_V"; in B.1 it is 0, 1, −1 for every f. W_K has f."""
    box, w_v, w_k, w_o = pa.Box.sequence(-1, 1, tokens=2, dim=1), [], [], []
    for f in ("sin(x0); x1", "cos(x1) - 2; x0"):
        attention = hard(f, box, tolerance=0.6, lipschitz=1.0).layers("log").attention
        w_v.append(attention.w_v.numpy()), w_k.append(attention.w_k.numpy()), w_o.append(attention.w_o.numpy())
    assert all(set(np.unique(w)) == {-1.0, 0.0, 1.0} for w in w_v)
    assert w_v[0].shape == w_v[1].shape and np.array_equal(*w_v)
    assert np.array_equal(w_k[0][:2], w_k[1][:2]) and not np.allclose(w_k[0][2:], w_k[1][2:])
    assert not np.allclose(*w_o)  # d B₀
    with_values = hard("sin(x0); x1", box, tolerance=0.6, lipschitz=1.0).layers("indexed").linear.constant.numpy()
    assert np.abs(np.sin(np.linspace(-1, 1, 2)).max()) > 0 and not set(np.unique(with_values)) <= {-1.0, 0.0, 1.0}


@pytest.mark.parametrize("dim, tokens, printed_holds", [(2, 3, False), (2, 1, False), (1, 3, True)])
def test_erratum_13_the_excluded_region_lies_in_r_dn(dim, tokens, printed_holds):
    """Propositions 3.2, 3.3: "arbitrarily small Lebesgue measure in R^n" of a region of X ∈ R^{d×n}: R^{dn}, R^n if d = 1."""
    partition = STAR if dim == 2 else pa.MaxAffine([[1.0], [-1.0]], [0.0, 0.0])
    inputs = np.random.default_rng(13).uniform(-2, 2, (4000, tokens, dim))
    assert (inputs[0].size == tokens) == printed_holds
    near = (partition.margin(inputs.reshape(-1, dim)) < 0.2).reshape(-1, tokens)
    share = near.mean()
    assert near.any(axis=1).mean() == pytest.approx(1 - (1 - share) ** tokens, abs=0.02)
    # n of the dn numbers, here the first coordinates, do not decide whether X is excluded
    moved = inputs.copy()
    moved[:, :, 1:] = np.random.default_rng(14).uniform(-2, 2, moved[:, :, 1:].shape)
    again = (partition.margin(moved.reshape(-1, dim)) < 0.2).reshape(-1, tokens)
    assert np.array_equal(near, again) == printed_holds


def test_erratum_13_the_closest_center_is_not_the_sphere_containing_z():
    """C.1: "the closest center to Z is the sphere containing Z". Centers 0 and 1, radius 0.9, Z = 0.6: two spheres."""
    centers, z = np.array([0.0, 1.0]), 0.6
    away = np.abs(z - centers)
    containing, closest = np.flatnonzero(away <= 0.9), int(away.argmin())
    assert containing.tolist() == [0, 1] and closest == 1 != containing[0]
    assert away[closest] <= 0.9  # (C.6) holds: the sphere of the closest center contains Z
    rng = np.random.default_rng(13)
    spheres, points = rng.uniform(-1, 1, (30, 2)), rng.uniform(-1, 1, (500, 2))
    distances = np.linalg.norm(points[:, None] - spheres, axis=2)
    covered = (distances <= 0.4).any(axis=1)
    assert covered.any() and (distances.min(axis=1)[covered] <= 0.4).all()
    assert ((distances <= 0.4).sum(axis=1) > 1).any()
    radii = np.array([2.0, 0.5])  # unequal radii: Z = 1.8 is in the sphere around 0, the center 3 is closer
    away = np.abs(1.8 - np.array([0.0, 3.0]))
    assert away.argmin() == 1 and (away <= radii).tolist() == [True, False]


def test_erratum_13_the_caption_of_figure_3_names_another_noise():
    """Caption: "injected label-noise ratio"; text: "the coefficient multiplying the standard Gaussian noise", 0 to 0.72."""
    levels = np.arange(0, 0.72 + 1e-9, 0.03)
    assert len(levels) == 25 and levels[-1] == pytest.approx(0.72)
    rng = np.random.default_rng(3)
    images, labels = rng.random((1000, 4)), rng.integers(0, 10, 1000)
    gaussian = images + levels[-1] * rng.standard_normal(images.shape)
    swapped = np.where(rng.random(1000) < levels[-1], rng.integers(0, 10, 1000), labels)
    assert (gaussian != images).all() and (swapped != labels).mean() == pytest.approx(0.9 * 0.72, abs=0.05)
    assert (gaussian < 0).any() and set(swapped) <= set(range(10))  # only one of them leaves the data's own range
    experiment = EXPERIMENTS["weight-scale"]
    assert "label noise" in experiment.method.lower() + experiment.claim.lower()  # we run both


# --- what is printed ---------------------------------------------------------------------------------------------------

PRINTED = {
    "A.3, W_V": r"W_V := \begin{bmatrix} 0_{1 \times d} & V_1 & V_2 & \dots & V_{N_{\text{MaxAff}}} \end{bmatrix}",
    "B.1, J_0": r"J_0 &:= \{j \mid \text{MaxAff}(\tilde{Z}) - \text{Aff}_j(\tilde{Z}) \leq \delta\}",
    "B.3, W_Q": r"0_{1 \times G} & R1_{1 \times n} \\ I_G & 0_{1 \times n} \\ 0_{1 \times G} & I_n",
    "B.3, a column of ones": r"Thus the sum of all entries in this column equals to $1 \cdot 2dG = 2dG$.",
    "(B.28)": r"\sum_{j=0}^{1-1} v_j^\top \tilde{Z}_K",
    "(B.43)": r"\left\| \sum_{\eta=0}^{G-1} \frac{\exp",
    "above (B.37)": r"T(\tilde{v}_i, v_1) - E(\tilde{v}_i, v_0)",
    "above (B.38), K": r"\exp\left(v_i^\top \tilde{Z}_K - \frac{\|v_i\|_2^2}{2}\right) 1_{d \times n}",
    "above (B.38), Q": r"&= (Q_1)_{jd+1:(j+1)d,:} \\ &= v_j^\top \tilde{Z}_Q 1_{d \times n}.",
    "computing (B.35)": r"\cdot R [\exp((RX_K^\top + RW_0^\top)1_{1 \times n} + RW_1^\top X_Q)",
    "above (B.31)": r"\end{bmatrix}_{dG^2 \times G}",
    "Definition B.3": r"Let $\text{Aff}_{i,j} \in \mathbb{R}^{dn} \rightarrow \mathbb{R}$",
    "section 4.1, Step 4": "We place $f(v_j)$ in the “value matrix” W_V",
    "B.1, Step 4": r"We place $f(\tilde{v}_j)$ in the “value matrix” W_V",
    "B.1, W_V": r"W_V := \begin{bmatrix} 0_d & X_1 & -X_1 \end{bmatrix}",
    "Proposition 3.2": r"with exception of a region of arbitrarily small Lebesgue measure in \mathbb{R}^n . Here",
    "Proposition 3.3": r"with exception of a region of arbitrarily small Lebesgue measure in \mathbb{R}^n .",
    "above (C.6)": "the closest center to Z is the sphere containing Z",
    "Figure 3, caption": r"we plot the ℓ_2 -norm of W_K and W_Q against the injected label-noise ratio",
    "section 6, text": "noise level (the coefficient multiplying the standard Gaussian noise) gradually adding from 0 to 0.72",
    "Remark C.1": "By trainable parameters we denote the parameters that differs according to f",
    "C.1, count": r"dnN_x + 2dN_x + 2dnN_x + n = 4dnN_x + 2dN_x + n",
}


@pytest.mark.skipif(not PAPERS.is_dir(), reason="the papers are not beside the repository")
@pytest.mark.parametrize("place", PRINTED)
def test_the_slips_are_printed_so(place):
    text = texts_of("2504.19901", summary=False)[0]
    assert squeezed(PRINTED[place]) in text
    assert squeezed(PRINTED[place])[::-1] not in text  # control


# --- the page --------------------------------------------------------------------------------------------------------


def named_tests(page: str) -> set[str]:
    """The tests that docs/errata.md names, those in the tables by the end of their name."""
    found = set(re.findall(r"`(test_erratum_\w+)`", page))
    for part in re.split(r"^## ", page, flags=re.MULTILINE)[1:]:
        prefix = re.search(r"Test \(`(test_erratum_\d+_)…`\)", part)
        if prefix is not None:
            rows = [row for row in part.splitlines() if row.startswith("| ")][1:]
            found |= {prefix[1] + name for row in rows for name in re.findall(r"`(\w+)`", row.split(" | ")[-1])}
    return found


def test_the_page_names_every_test_and_no_other():
    page = (Path(__file__).parent.parent / "docs" / "errata.md").read_text(encoding="utf-8")
    written = {name for name in globals() if name.startswith("test_erratum_")}
    assert named_tests(page) == written
    assert named_tests(page.replace("`w_q_is_no_matrix`", "")) != written  # control
