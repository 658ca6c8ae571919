"""`method="paper"`: the recipe of the corrected proof, its cost beside ours, and the paper's order of the cells."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from method_cases import request
from partita_check.cli import run

import partita as pa
from partita import errors
from partita.functions.regularity import Declared
from partita.functions.target import make_target
from partita.methods import METHODS, Refusal, Request, Size, cells_in_paper_order
from partita.methods.paper import Paper
from partita.methods.planner import best_plan

EXAMPLES = {
    "line": ("sin(3*x0)", pa.Box([-1], [1]), 0.1, {}),
    "square": ("x0*x1", pa.Box([-1, -1], [1, 1]), 0.4, {}),
    "unequal sides": ("x0 + x1/2", pa.Box([0, -3], [0.7, 2]), 0.9, {}),
    "sequence": ("sin(x0) - x1; x0*x1", pa.Box.sequence(-1, 1, tokens=2, dim=1), 1.2, {}),
    "pair": ("sin(k0)*q0", (pa.Box([-1], [1]), pa.Box([0], [2])), 0.6, {}),
    "float32": ("x0*x1", pa.Box([3, -1], [4, 1]), 1.5, {"dtype": torch.float32}),
    "L2": ("x0*x1", pa.Box([0, 0], [1, 1]), 0.2, {"norm": 2}),
    "Hölder": (
        lambda z: np.sqrt(np.abs(z[:, 0])),
        pa.Box([-1], [1]),
        0.6,
        {"modulus": pa.Modulus(1.0, 0.5), "trace": False},
    ),
}


def built(name: str, **more) -> pa.Compiled:
    function, domain, tolerance, options = EXAMPLES[name]
    return pa.compile(function, domain, method="paper", **{"tolerance": tolerance, **options, **more})


def closeness(c: pa.Compiled, epsilon: float) -> float:
    """δ from the moduli of the certificate, on its own."""
    known, m = c.certificate.known, c.partition.dimension
    found = []
    if "modulus" in known:
        found.append((epsilon / 3 / known["modulus"]["constant"]) ** (1 / known["modulus"]["exponent"]) / math.sqrt(m))
    if "per_axis" in known:
        found.append(epsilon / 3 / sum(known["per_axis"]))
    return max(found)


def supremum_tolerance(c: pa.Compiled, tolerance: float) -> float:
    if c.certificate.norm == "inf":
        return tolerance
    return tolerance / (np.prod(c.partition.box.sides) * c.head.num_outputs) ** (1 / float(c.certificate.norm))


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_recipe_is_the_theorems(name):
    """δ with ω_∞(δ) ≤ ε/3, the least number of cells above side/δ per axis, one R = 8/(3δ²)·ln(6B₀G/ε), midpoints, f at them."""
    c = built(name)
    epsilon, facts = supremum_tolerance(c, EXAMPLES[name][2]), c.certificate.facts
    delta = closeness(c, epsilon)
    assert facts["closeness"] == pytest.approx(delta, rel=1e-9)
    assert c.partition.counts == tuple(int(n) for n in np.floor(c.partition.box.sides / facts["closeness"]) + 1)
    rates = c.head.inverse_temperature.double().numpy()
    needed = 8 / (3 * delta**2) * math.log(6 * facts["bound_of_f"] * c.num_keys / epsilon)
    assert len(set(rates.tolist())) == 1
    assert needed * (1 - 1e-9) <= rates[0] <= needed * (1 + 1e-6) and rates[0] == facts["inverse_temperature"]
    for axis, lo, side in zip(c.partition.axes, c.partition.box.lo.ravel(), c.partition.box.sides):
        middles = lo + side * (np.arange(len(axis)) + 0.5) / len(axis)
        assert np.allclose(axis, middles, rtol=1e-6, atol=1e-6)
    values = c.target(c.partition.centers_of(np.arange(c.num_keys)))
    assert np.allclose(c.head.values.double().numpy(), values, atol=1e-6)
    assert facts["bound_of_f"] >= np.abs(values).max()


@pytest.mark.parametrize("name", EXAMPLES)
def test_both_parts_of_the_papers_bound_hold(name):
    """Summed over all cells, in another way than the head: J₀ gives at most paper_near, J₁ at most paper_far, each ≤ ε/3."""
    c = built(name)
    epsilon, facts = supremum_tolerance(c, EXAMPLES[name][2]), c.certificate.facts
    factor = EXAMPLES[name][2] / epsilon
    near, far = facts["paper_near"] / factor, facts["paper_far"] / factor
    assert near <= epsilon / 3 * (1 + 1e-9) and far <= epsilon / 3 * (1 + 1e-4)
    assert facts["paper_bound"] <= 2 / 3 * EXAMPLES[name][2] * (1 + 1e-4)
    centers = c.partition.centers_of(np.arange(c.num_keys))
    h = c.partition.box.sides / np.array(c.partition.counts)
    rng = np.random.default_rng(4)
    points = c.partition.box.sample(60, rng).reshape(60, -1)
    corners = np.clip(centers[rng.integers(len(centers), size=60)] + h / 2, None, c.partition.box.hi.ravel())

    def parts(rate: float) -> tuple[float, float]:
        worst = np.zeros(2)
        for z in np.vstack([points, corners]):
            scores = -rate * ((z - centers) ** 2).sum(axis=1) / 2
            weights = np.exp(scores - scores.max())
            weights /= weights.sum()
            off = np.abs(c.target(centers) - c.target(z[None])).max(axis=1)
            close = np.abs(z - centers).max(axis=1) <= facts["closeness"]
            worst = np.maximum(worst, [weights[close] @ off[close], 2 * facts["bound_of_f"] * weights[~close].sum()])
        return worst[0], worst[1]

    first, second = parts(facts["inverse_temperature"])
    assert first <= near and second <= far
    assert parts(facts["inverse_temperature"] / 100)[1] > far  # control: a hundredth of R leaks


def test_the_papers_bound_is_above_the_certified_one():
    """Lipschitz: the moments give about ε/6, the proof 2ε/3, and the worst error seen is what the moments say."""
    c = built("line")
    assert c.certificate.witness.error <= c.error_bound <= 1.01 * 0.1 / 6
    assert c.error_bound < c.certificate.facts["paper_bound"] <= 2 * 0.1 / 3
    assert {t.theorem for t in c.certificate.terms} <= {
        "grid-moments",
        "axis-telescoping",
        "window-tail",
        "score-rounding",
    }


def test_its_cost_stands_beside_ours():
    """On the same request: six times as many cells per axis as hard, and a row of "auto" that builds nothing."""
    box, f = pa.Box([-1, -1], [1, 1]), "sin(3*x0) + x0*cos(2*x1)"
    auto = pa.plan(f, box, tolerance=0.3)
    row = next(c for c in auto.candidates if c.method == "paper")
    hard = pa.plan(f, box, tolerance=0.3, method="hard")
    paper = pa.plan(f, box, tolerance=0.3, method="paper")
    assert row.keys == paper.keys and row.parameters == paper.parameters and "not built" in row.note
    assert paper.keys == pytest.approx(36 * hard.keys, rel=0.1)
    assert not row.chosen and auto.method != "paper" and "δ = " in str(paper)


@pytest.mark.parametrize("case", ["kink typed", "vector 2-D typed", "torch 2-D", "curve typed", "constant"])
def test_auto_chooses_the_same_without_it(case, monkeypatch):
    """It is asked last and only for a forecast: the chosen plan does not change, and f is not called more often."""
    asked = replace(request("auto", case), method="auto")
    calls = 0

    def counted(*points):
        nonlocal calls
        calls += 1
        return answers(*points)

    answers = asked.target.ask
    assert answers is not None
    found = []
    for methods in (METHODS, [m for m in METHODS if m.name != "paper"]):
        monkeypatch.setattr("partita.methods.METHODS", methods)
        calls = 0
        target = replace(asked.target, ask=counted)
        plan = best_plan(replace(asked, target=target, _found={}))
        found.append((plan.method, plan.keys, plan.parameters, plan.why, calls))
    assert found[0] == found[1]
    assert "paper" not in (found[0][0], found[1][0])


def test_keys_beyond_counting_are_a_row_and_not_an_error():
    """10^300 keys and more: the forecast is a refusal without an exception, so that "auto" reports its own obstacle."""
    box = pa.Box([-1] * 120, [1] * 120)

    def total(z: np.ndarray) -> np.ndarray:
        return z.sum(axis=1)

    target, declared = make_target(total, box, trace=False), Declared(lipschitz=11.0)
    forecast = Paper().forecast(Request(target, 0.5, declared=declared))
    assert (
        isinstance(forecast, Refusal) and forecast.error is None and "more keys than can be counted" in forecast.reason
    )
    with pytest.raises(errors.SizeError, match="more keys than can be counted"):
        pa.plan(total, box, tolerance=0.5, method="paper", lipschitz=11.0, trace=False)
    fewer = Paper().forecast(Request(target, 2000.0, declared=declared))
    assert isinstance(fewer, Size) and fewer.keys == 1


def test_what_it_refuses():
    with pytest.raises(errors.SizeError, match="paper's recipe"):
        pa.compile("sin(9*x0)*x1", pa.Box([-1, -1], [1, 1]), tolerance=1e-6, method="paper")
    with pytest.raises(errors.PartitaError, match="continuous"):
        pa.compile("step(x0)", pa.Box([-1], [1]), tolerance=0.3, norm=2, method="paper")
    with pytest.raises(errors.PartitaError, match="point cloud"):
        pa.compile("x0", pa.PointCloud(np.zeros((3, 1))), tolerance=0.3, method="paper")
    with pytest.raises(errors.PartitaError, match="known"):
        pa.compile(lambda z: np.sin(z[:, 0]), pa.Box([-1], [1]), tolerance=0.3, method="paper", trace=False)
    with pytest.raises(errors.PartitaError, match="sharpness"):
        pa.compile("x0", pa.Box([-1], [1]), tolerance=0.3, sharpness=8.0, method="paper")


@pytest.mark.parametrize("f, tolerance", [("0*x0 + 3", 0.1), ("0*x0", 0.1), ("1e-9*sin(x0)", 0.1), ("x0", 100.0)])
def test_constants_and_tiny_functions_take_one_key(f, tolerance):
    """6B₀G/ε may be below e, even 0: the logarithm is at least 1, and R stays positive."""
    c = pa.compile(f, pa.Box([-1, 0], [1, 5]), tolerance=tolerance, method="paper")
    assert c.num_keys == 1 and c.error_bound <= tolerance and c.certificate.facts["paper_far"] == 0
    assert float(c.head.inverse_temperature.min()) > 0


def test_a_pair_of_sequences():
    """Theorem 4.2 with n = 2 tokens: G² pairs of cells, both literal forms."""
    boxes = (pa.Box.sequence(0, 1, tokens=2, dim=1), pa.Box.sequence(-1, 0, tokens=2, dim=1))
    c = pa.compile(lambda k, q: torch.tanh(k + q) / 4, boxes, tolerance=1.0, lipschitz=0.5, method="paper")
    assert (
        c.partition.counts == (3,) * 4
        and c.certificate.theorem == "cross-attention"
        and c.head.input_shapes == ((2, 1), (2, 1))
    )
    k, q = (torch.from_numpy(b.sample(20, np.random.default_rng(1)).reshape(20, 2, 1)) for b in boxes)
    assert (c(k, q) - torch.tanh(k + q) / 4).abs().max() <= c.error_bound
    for form in ("log", "indexed"):
        assert torch.allclose(c.layers(form)(k, q), c(k, q), atol=1e-9, rtol=0)


# --- Remark B.1 ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("counts", [(4,), (3, 3), (2, 3), (3, 3, 3), (2, 4, 3)])
def test_cells_in_the_order_of_remark_b_1(counts):
    """`s = Σ_i k_i P^{i−1}`, with the base of each axis its own: v_s is the center with indices k."""
    grid = pa.ProductGrid.uniform(pa.Box([-1] * len(counts), [1] * len(counts)), counts)
    order = cells_in_paper_order(grid)
    for s, cell in enumerate(order):
        k, rest = [], s
        for count in counts:
            k.append(rest % count)
            rest //= count
        assert np.array_equal(grid.centers_of([cell])[0], [axis[i] for axis, i in zip(grid.axes, k)])
    assert sorted(order) == list(range(grid.num_cells))
    assert len(counts) == 1 or not np.array_equal(order, np.arange(grid.num_cells))  # ours differs from two axes on


def test_pairs_in_the_order_of_b_38():
    """Row idG + jd belongs to (v_i, v_j): the cell of z_K slowest, Remark B.1 within each."""
    grid = pa.ProductGrid.uniform(pa.Box([-1] * 4, [1] * 4), (2, 3, 2, 2))
    order = cells_in_paper_order(grid, (2, 2))
    keys, queries = (pa.ProductGrid(pa.Box([-1, -1], [1, 1]), grid.axes[i : i + 2]) for i in (0, 2))
    first, second = cells_in_paper_order(keys), cells_in_paper_order(queries)
    expected = [[*keys.centers_of([i])[0], *queries.centers_of([j])[0]] for i in first for j in second]
    assert np.array_equal(grid.centers_of(order), expected)
    with pytest.raises(errors.DomainError, match="add up to 4"):
        cells_in_paper_order(grid, (2, 1))


def test_the_literal_layers_in_the_papers_order():
    """Row 0 of Linear and the columns of W_K permuted by cell, everything else as it is: the same network."""
    c = built("sequence")
    layers, n, d = c.layers("log"), 2, 1
    order = cells_in_paper_order(c.partition)
    columns = np.concatenate([half * c.num_keys * d + order * d for half in (0, 1)])
    z = torch.from_numpy(c.partition.box.sample(10, np.random.default_rng(0)).reshape(10, n, d))
    expected = layers(z)
    linear, attention = layers.linear, layers.attention
    row = linear(z.transpose(1, 2))[:, 0]
    printed_first = c.partition.centers_of(order[:2])
    assert np.allclose(
        printed_first[1] - printed_first[0], [2 / c.partition.counts[0], 0]
    )  # v_1 moves on the first axis
    rows = torch.cat([row[:, None, columns], linear.constant[None, 1:].expand(len(z), -1, -1)], dim=1)
    w_k = attention.w_k.clone()
    w_k[:, 1:] = attention.w_k[:, 1:][:, columns]
    weights = torch.softmax((w_k @ rows).transpose(1, 2) @ (attention.w_q @ rows), dim=1)
    got = attention.w_v @ rows @ weights @ attention.w_o
    assert torch.allclose(got.transpose(1, 2), expected, atol=1e-10, rtol=0)
    w_k[:, 1:] = attention.w_k[:, 1:]  # control: permuting the products alone mixes up the cells
    weights = torch.softmax((w_k @ rows).transpose(1, 2) @ (attention.w_q @ rows), dim=1)
    assert (attention.w_v @ rows @ weights @ attention.w_o - got).abs().max() > 0.1


@pytest.mark.slow
@pytest.mark.parametrize("name", ["sequence", "pair", "float32"])
def test_saved_heads_are_verified_by_the_checker(name, tmp_path):
    """The laws verify one head on a line; these take it some ten seconds each."""
    folder = built(name).save(tmp_path / "head")
    assert run(folder, budget=120.0)[1] == 0
    assert all(check.holds for check in pa.recheck(pa.load(folder)))
