"""Laws of the producer, one room each, quick enough to be run against every mutant (benchmarks/mutation.py).

Proofs are compared with the exact head in balls, terms with the formulas of docs/theorems.md in exact fractions.
"""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from balls import bits, is_refuted, values
from flint import arb

import partita as pa
from partita.functions import parse
from partita.functions.moduli import Modulus
from partita.functions.regularity import AxisLipschitz, Known
from partita.geometry.moments import AxisGeometry, distance_bounds, dropped_mass, soft_maximum_gap, window_for
from partita.heads import ScatteredHead
from partita.heads.scattered_head import exponent_cut
from partita.proofs import GridFacts, ScatteredFacts, grid_terms, scattered_terms
from partita.proofs.bisection import box_terms, prove_boxes
from partita.proofs.box_lists import CellTable
from partita.proofs.center_values import soft_terms
from partita.proofs.certificate import Term, total
from partita.proofs.grid_proof import SoftGrid, prove_grid
from partita.proofs.running import added_terms, running_terms
from partita.proofs.weight_series import WeightSeries, slope_series, weight_series

# --- bisection -------------------------------------------------------------------------------------------------------

BOX = {1: pa.Box([-1], [1]), 2: pa.Box([-1, 0], [1, 2])}
# expression, dimension, cells, R, with powers, with slopes
HEADS = {
    "one cell": ("exp(x0)", 1, 1, 1.0, False, True),
    "soft": ("sin(3*x0)", 1, 5, 3.0, False, False),
    "sharp": ("abs(x0 - 0.1)", 1, 6, 400.0, True, True),
    "plane": ("x0*x1 - 0.3*x0^2", 2, 7, 30.0, True, True),
    "vector": ("tanh(x0 + x1), x0", 2, 4, 5.0, False, False),
    "many cells": ("cos(2*x0)", 1, 40, 900.0, True, False),
}


def scattered(name: str, dtype: torch.dtype = torch.float64, seed: int = 3) -> tuple[ScatteredHead, object, pa.Box]:
    """A head with random centers, powers, values and slopes: nothing about it is good."""
    text, m, n, rate, powers, slopes = HEADS[name]
    rng, box, graph = np.random.default_rng(seed), BOX[m], parse(text, [f"x{i}" for i in range(m)])
    out = len(graph.outputs)
    draw = lambda *shape: torch.from_numpy(rng.normal(size=shape)).to(dtype)  # noqa: E731
    centers = torch.from_numpy(box.sample(n, rng)).to(dtype)
    head = ScatteredHead(
        centers,
        rate,
        draw(n, out),
        powers=0.05 * draw(n) if powers else None,
        value_slopes=draw(n, out, m) if slopes else None,
        input_shapes=((m,),),
        output_shape=graph.output_shape,
    )
    return head, graph, box


def exact_net(head: ScatteredHead, z: list[float]) -> list[arb]:
    """The softmax of the stored tensors in balls."""
    table = [
        None if t is None else t.double().tolist() for t in (head.centers, head.powers, head.values, head.value_slopes)
    ]
    centers, powers, constants, slopes = table
    scores, cells = [], []
    for j, center in enumerate(centers):
        offset = [arb(x) - arb(c) for x, c in zip(z, center, strict=True)]
        squared = sum((d * d for d in offset), arb(0))
        scores.append(arb(float(head.inverse_temperature)) / 2 * ((arb(powers[j]) if powers else arb(0)) - squared))
        tilt = (
            [sum((arb(s) * d for s, d in zip(row, offset, strict=True)), arb(0)) for row in slopes[j]]
            if slopes
            else None
        )
        cells.append([arb(v) + (tilt[k] if tilt else arb(0)) for k, v in enumerate(constants[j])])
    weights = [(s - scores[0]).exp() for s in scores]
    whole = sum(weights, arb(0))
    return [sum((w * v[k] for w, v in zip(weights, cells, strict=True)), arb(0)) / whole for k in range(len(cells[0]))]


def mixed_errors(head: ScatteredHead, graph, points: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """`max_out |f − net|` and `Σ_j w_j max_out |f − V_j|` in floats."""
    centers, constants = head.centers.double().numpy(), head.values.double().numpy()
    offset = points[:, None] - centers
    scores = -(offset**2).sum(axis=2) + (0 if head.powers is None else head.powers.double().numpy())
    scores = 0.5 * float(head.inverse_temperature) * scores
    w = np.exp(scores - scores.max(axis=1, keepdims=True))
    w /= w.sum(axis=1, keepdims=True)
    cells = constants[None] + (
        0 if head.value_slopes is None else np.einsum("jom,njm->njo", head.value_slopes.double().numpy(), offset)
    )
    off = cells - graph.evaluate(points).reshape(len(points), 1, -1)
    return np.abs((w[:, :, None] * off).sum(axis=1)).max(axis=1), (w * np.abs(off).max(axis=2)).sum(axis=1)


def dense(box: pa.Box, count: int = 4000) -> np.ndarray:
    return np.concatenate([box.sample(count, np.random.default_rng(1)), box.corners()])


@pytest.mark.parametrize("name", HEADS)
def test_bisection_bounds_the_exact_head_and_is_close_to_the_mixture(name: str) -> None:
    head, graph, box = scattered(name)
    points = dense(box)
    net, mixed = mixed_errors(head, graph, points)
    proof = prove_boxes(head, graph, box, target=1.1 * float(mixed.max()))
    assert mixed.max() <= proof.bound * (1 + 1e-12) and proof.bound <= 1.1 * mixed.max()
    assert proof.magnitude >= np.abs(graph.evaluate(points)).max() and proof.seen <= proof.bound
    with bits(200):
        for z in points[np.argsort(net)[-3:]].tolist():
            worst = max((abs(a - b) for a, b in zip(exact_net(head, z), values(graph, z), strict=True)), key=arb.mid)
            assert worst <= arb(proof.bound)


def test_bisection_is_exact_where_nothing_varies() -> None:
    """One cell, f constant: the bound is the distance, outward by a rounding only."""
    head = ScatteredHead(
        torch.zeros(1, 1, dtype=torch.float64),
        1.0,
        torch.tensor([[0.1]], dtype=torch.float64),
        input_shapes=((1,),),
        output_shape=(),
    )
    bound = prove_boxes(head, parse("0.3 + 0*x0", ["x0"]), BOX[1], target=1.0).bound
    exact = Fraction(0.3) - Fraction(0.1)
    assert exact <= Fraction(bound) <= exact * (1 + Fraction(1, 10**10))


@pytest.mark.parametrize("max_boxes", [1, 2, 3, 8, 21])
def test_bisection_may_stop_at_any_time(max_boxes: int) -> None:
    head, graph, box = scattered("plane")
    seen = float(mixed_errors(head, graph, dense(box))[0].max())
    proof = prove_boxes(head, graph, box, target=1e-3, max_boxes=max_boxes)
    assert proof.bound >= seen and proof.boxes <= max_boxes + 2


def test_bisection_of_turned_boxes_covers_the_domain() -> None:
    head, graph, box = scattered("plane")
    mixed = float(mixed_errors(head, graph, dense(box))[1].max())
    turn = np.array([[0.8, -0.6], [0.6, 0.8]])
    proof = prove_boxes(head, graph, box, target=1.1 * mixed, axes=turn)
    assert mixed <= proof.bound <= 1.1 * mixed


@pytest.mark.parametrize("norm", [1.0, 2.0, 4.0])
def test_means_over_leaves_bound_the_mean(norm: float) -> None:
    head, graph, box = scattered("plane")
    t = (np.arange(200) + 0.5) / 200
    points = np.stack([a.ravel() for a in np.meshgrid(2 * t - 1, 2 * t)], axis=1)
    errors = mixed_errors(head, graph, points)[0]
    mean = float((errors**norm).mean() * 4.0) ** (1 / norm)
    proof = prove_boxes(head, graph, box, target=1.5 * mean, norm=norm, max_boxes=20_000)
    assert mean <= proof.mean_bound <= 2.5 * mean


def test_bisection_missing_its_target_says_where() -> None:
    head, graph, box = scattered("sharp")
    mixed = mixed_errors(head, graph, dense(box))[1]
    proof = prove_boxes(head, graph, box, target=0.5 * float(mixed.max()), give_up=5)
    places, least = proof.missed
    assert proof.bound >= mixed.max() and len(places) == len(least) > 0 and least.max() > 0.5 * mixed.max()
    assert (mixed_errors(head, graph, places)[1] >= 0.4 * least).all()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("name", ["soft", "sharp", "plane", "many cells"])
def test_heads_as_they_run_keep_their_bound(name: str, dtype: torch.dtype) -> None:
    head, graph, box = scattered(name, dtype)
    u = torch.finfo(dtype).eps / 2
    points = dense(box)
    mixed = float(mixed_errors(head, graph, points)[1].max())
    proof = prove_boxes(head, graph, box, target=1.02 * mixed, unit_roundoff=u)
    terms = {t.name: t.value for t in box_terms(head, proof, box)}
    ran = head.evaluate(torch.from_numpy(points).to(dtype)).double().numpy()
    assert np.abs(ran - graph.evaluate(points).reshape(len(points), -1)).max() <= sum(terms.values())
    assert terms["approximation"] == proof.bound and 0 <= terms["window"] < 1e-9
    least = 2 * proof.near_cells * u * (float(np.abs(graph.evaluate(points)).max()) + proof.bound)
    assert least <= terms["summation"] <= 60 * least + 1e-5 * mixed


def test_terms_of_a_scattered_head_are_those_of_the_theorem() -> None:
    """`window-tail` for what the cut leaves out, and the sums; scores so large that rounding moves the cut."""
    head, graph, box = scattered("plane", torch.float32)
    head.inverse_temperature.fill_(1e14)
    proof = prove_boxes(head, graph, box, target=10.0, max_boxes=3, unit_roundoff=2.0**-24)
    far = np.maximum(
        np.abs(box.lo.ravel() - head.centers.double().numpy()), np.abs(box.hi.ravel() - head.centers.double().numpy())
    )
    powers, steep = head.powers.double().numpy(), head.value_slopes.double().abs().numpy()
    cut = exponent_cut(7) * (1 - 1e-6) - 10 * 2.0**-52 * float(head.inverse_temperature) * (
        (far**2).sum(axis=1).max() + np.ptp(powers)
    )
    largest = (head.values.double().abs().numpy() + np.einsum("nom,nm->no", steep, far)).max()
    found = by_name(box_terms(head, proof, box))
    assert found["window"] == pytest.approx(min(7 * math.exp(-cut), 1.0) * 2 * largest, rel=1e-5, abs=0)
    sums = 1.01 * (2 * proof.near_cells + 2 + 16) * 2.0**-24 * (proof.magnitude + proof.bound)
    assert found["summation"] == pytest.approx(sums + 2 * proof.forgotten * largest, rel=1e-5, abs=0)


@pytest.mark.parametrize("unit", [0.0, 2.0**-24, 2.0**-53])
def test_the_largest_value_is_that_of_the_head_as_it_runs(unit: float) -> None:
    """`|V_j| + |J_j||z − c_j|` in exact fractions, and m + 3 roundings of it."""
    head, _, box = scattered("plane")
    lo, hi = box.lo.ravel().tolist(), box.hi.ravel().tolist()
    sizes = []
    for center, value, slope in zip(
        head.centers.tolist(), head.values.tolist(), head.value_slopes.tolist(), strict=True
    ):
        far = [max(abs(Fraction(a) - Fraction(c)), abs(Fraction(b) - Fraction(c))) for a, b, c in zip(lo, hi, center)]
        sizes.append(abs(Fraction(value[0])) + sum(abs(Fraction(s)) * d for s, d in zip(slope[0], far)))
    found = Fraction(CellTable.of(head, box, unit).largest(box))
    assert (
        max(sizes) * (1 + 5 * Fraction(unit)) <= found <= max(sizes) * (1 + 20 * Fraction(unit) + Fraction(1, 10**11))
    )


def test_rounding_grows_the_bound_of_a_sharp_head() -> None:
    """Scores of 10⁵ in float32 are off by 10⁻²: weights near a border are anybody's, and the proof knows."""
    centers = torch.tensor([[-3.0], [3.0]])
    box, graph = pa.Box([-1e-5], [1e-5]), parse("sigmoid(60000*x0)", ["x0"])
    head = ScatteredHead(centers, 1e4, torch.tensor([[0.0], [1.0]]), input_shapes=((1,),), output_shape=())
    exact, single = (
        prove_boxes(head, graph, box, target=1e-3, max_boxes=400, unit_roundoff=u) for u in (0.0, 2.0**-24)
    )
    points = np.linspace(-1e-5, 1e-5, 401)[:, None]
    ran = head.evaluate(torch.from_numpy(points).float()).double().numpy()
    off = float(np.abs(ran - graph.evaluate(points)[:, None]).max())
    assert off > 1e-3 and single.bound >= off and single.bound > 1.0001 * exact.bound


# --- proofs on grids -------------------------------------------------------------------------------------------------


def test_grid_proofs_count_their_own_rounding() -> None:
    """Values of 10⁸ that cancel to 0: the exact head is a constant, and the bound is no smaller than what is not quite so."""
    axis = np.linspace(-1.25, 1.25, 6)
    grid = SoftGrid((axis,), (4.0,), np.full((6, 1), 1e8 + 0.1))
    proof = prove_grid(grid, parse("100000000 + 0*x0", ["x0"]), -np.ones(1), np.ones(1), goal=1.0)
    exact = Fraction(1e8 + 0.1) - 10**8
    assert exact <= Fraction(proof.bound) <= exact + Fraction(1, 10**4)
    assert Fraction(proof.least) <= exact


def slopes_outside(found: WeightSeries, centers: np.ndarray, rate: float, middle: float, radius: float) -> int:
    """How many slopes of weights leave their polynomial by more than the remainder, `w_p' = R w_p (c_p − Σ w c)` in balls."""
    count = 0
    with bits(300):
        for t in (-1.0, -0.375, 0.0, 0.5, 1.0):
            x = arb(middle) + arb(radius) * arb(t)
            scores = [-(x - arb(c)) * (x - arb(c)) * arb(rate) / 2 for c in centers.tolist()]
            terms = [(s - scores[0]).exp() for s in scores]
            whole = sum(terms, arb(0))
            mean = sum((w * arb(c) for w, c in zip(terms, centers.tolist(), strict=True)), arb(0)) / whole
            for p, c in enumerate(centers.tolist()):
                slope = arb(rate) * terms[p] / whole * (arb(c) - mean)
                line = sum((arb(q) * arb(t) ** k for k, q in enumerate(found.coefficients[0, :, p].tolist())), arb(0))
                count += not abs(slope - line) <= arb(float(found.remainder[0, p]))
    return count


@pytest.mark.parametrize("degree", [1, 4])
@pytest.mark.parametrize("radius", [0.0, 0.05, 0.25])
@pytest.mark.parametrize("shift", [0.0, 1e6])
def test_slopes_of_weights(degree: int, radius: float, shift: float) -> None:
    centers, rate = np.linspace(-1.25, 1.25, 6) + shift, 4.0
    for middle in (0.1 + shift, -0.93 + shift):
        at = np.array([middle]), np.array([radius])
        weights = weight_series(centers, rate, *at, degree=degree)
        found = slope_series(weights, centers, rate, at[0])
        assert slopes_outside(found, centers, rate, middle, radius) == 0
        weaker = WeightSeries(found.coefficients, found.remainder / (60 if radius else 1e4))
        assert slopes_outside(weaker, centers, rate, middle, radius) > 0  # the remainder is not far from what is needed


@pytest.mark.parametrize("seed", range(6))
def test_slopes_of_weights_count_their_own_rounding(seed: int) -> None:
    """Weights taken for exact, and constant: `R q (a − Σ q a)` in fractions is within the remainder of its float."""
    rng = np.random.default_rng(seed)
    series, centers, rate, middle = rng.normal(size=(1, 4, 5)), np.sort(rng.normal(size=5)), 3.7, 0.1
    series[:, 1:] = 0.0  # so that nothing lies beyond the degree, and rounding is all there is
    found = slope_series(WeightSeries(series, np.zeros((1, 5))), centers, rate, np.array([middle]))
    q = [Fraction(x) for x in series[0, 0].tolist()]
    away = [Fraction(c) - Fraction(middle) for c in centers.tolist()]
    mean = sum(x * a for x, a in zip(q, away, strict=True))
    for p in range(5):
        exact = Fraction(rate) * q[p] * (away[p] - mean)
        off = abs(exact - Fraction(float(found.coefficients[0, 0, p])))
        remainder = Fraction(float(found.remainder[0, p]))
        reach = abs(away[p]) + sum(abs(x * a) for x, a in zip(q, away, strict=True))
        assert off <= remainder <= Fraction(1, 10**12)
        assert (
            remainder >= 15 * Fraction(2) ** -53 * Fraction(rate) * abs(q[p]) * reach
        )  # counted: 5 + 3 + 6 and one more


@pytest.mark.parametrize("max_boxes", [1, 3, 10])
def test_grid_proofs_may_stop_at_any_time(max_boxes: int) -> None:
    grid = SoftGrid((np.linspace(-1.25, 1.25, 6),), (4.0,), np.zeros((6, 1)))
    graph = parse("1/(0.01 + (x0 - 0.3)^2)", ["x0"])
    proof = prove_grid(grid, graph, -np.ones(1), np.ones(1), goal=101.0, max_boxes=max_boxes)
    assert proof.bound >= 100.0


@pytest.mark.parametrize("method", ["fitted", "affine", "adaptive", "hard"])
def test_claims_hold_in_balls(method: str) -> None:
    c = pa.compile("exp(x0)*sin(2*x0)", BOX[1], tolerance=0.05, method=method)
    points = np.concatenate([dense(BOX[1], 30), [c.certificate.witness.point], np.linspace(-1, 1, 61)[:, None]])
    assert not is_refuted(c, points) and c.error_bound <= 0.05


# --- terms -----------------------------------------------------------------------------------------------------------

NUMBERS = {
    "mass_left_out": 1e-3,
    "score_error": 0.01,
    "operations": 37.0,
    "unit_roundoff": 2.0**-24,
    "largest": 3.3,
    "spread": 5.1,
    "factor": 1.7,
}


def is_just_above(found: float, exact: Fraction) -> bool:
    return exact <= Fraction(found) <= exact * (1 + Fraction(1, 10**12))


def power_of_e(x: float) -> Fraction:
    """eˣ from above, to 10⁻¹⁵."""
    with bits(200):
        return Fraction(float(arb(x).exp().upper())) * (1 + Fraction(1, 10**15))


def by_name(terms: list[Term]) -> dict[str, float]:
    assert len({t.name for t in terms}) == len(terms)
    return {t.name: t.value for t in terms}


def test_terms_of_running_a_head() -> None:
    q = {name: Fraction(x) for name, x in NUMBERS.items()}
    sums = Fraction(1.01) * q["operations"] * q["unit_roundoff"] * q["largest"] * q["factor"]
    added = by_name(added_terms(**NUMBERS))
    assert added.keys() == {"window", "score rounding", "summation"}
    assert is_just_above(added["window"], q["mass_left_out"] * q["spread"] * q["factor"])
    assert is_just_above(added["score rounding"], q["score_error"] / 2 * q["spread"] * q["factor"])
    assert is_just_above(added["summation"], sums)
    running = by_name(running_terms(0.3, value_error=1e-4, **NUMBERS))
    assert is_just_above(running["window"], q["mass_left_out"] * q["spread"] * q["factor"])
    growth = (power_of_e(2 * NUMBERS["score_error"]) - 1) * Fraction(0.3)
    assert (
        growth * (1 - Fraction(1, 10**12)) <= Fraction(running["score rounding"]) <= growth * (1 + Fraction(1, 10**12))
    )
    assert is_just_above(running["summation"], sums) and is_just_above(
        running["stored values"], Fraction(1e-4) * q["factor"]
    )
    assert "stored values" not in by_name(running_terms(0.3, value_error=0.0, **NUMBERS))
    assert total([Term("a", 0.1, "", ""), Term("b", 0.2, "", "")]) >= Fraction(0.1) + Fraction(0.2)


def facts(semantics: str = "float64", **changes) -> GridFacts:
    axes = tuple(AxisGeometry.of(np.linspace(-0.9, 0.9, n), -1.0, 1.0) for n in (10, 5))
    given = {
        "axes": axes,
        "rates": (300.0, 120.0),
        "half_windows": (2, 1),
        "volume": 4.0,
        "outputs": 2,
        "reach": 1.5,
        "largest": 3.0,
        "spread": 5.0,
        "value_error": 1e-5,
        "semantics": semantics,
    }
    return GridFacts(**{**given, **changes})


@pytest.mark.parametrize("semantics", ["float64", "float32"])
@pytest.mark.parametrize("norm", [math.inf, 2.0, 100.0])
def test_terms_of_values_at_the_centers(norm: float, semantics: str) -> None:
    """Every term as docs/theorems.md states it, from the moments alone."""
    given, u = facts(semantics), {"float64": 2.0**-53, "float32": 2.0**-24}[semantics]
    averaged, factor = norm <= 64, 1.0 if math.isinf(norm) else 8.0 ** (1 / norm)
    euclid = [
        distance_bounds(a, r, max(norm, 2.0) if averaged else 2.0)[averaged] for a, r in zip(given.axes, given.rates)
    ]
    single = [distance_bounds(a, r, norm if averaged else 1.0)[averaged] for a, r in zip(given.axes, given.rates)]
    isotropic = 2.0 * math.sqrt(sum(d * d for d in euclid)) * factor
    per_axis = (1.5 * single[0] + 0.5 * single[1]) * factor
    reach = [min(2 * q, a.count) * a.gap_max + a.overhang for a, q in zip(given.axes, given.half_windows)]
    delta = u * (8 * sum(r / 2 * d * d for r, d in zip(given.rates, reach)) + 32)
    if semantics == "float32" and math.isfinite(norm):
        delta += sum(2 * r * u * given.reach * d for r, d in zip(given.rates, reach))
    dropped = sum(dropped_mass(a, r, q) for a, r, q in zip(given.axes, given.rates, given.half_windows))
    expected = {
        "approximation": min(isotropic, per_axis),
        "window": dropped * 5.0 * factor,
        "score rounding": math.expm1(2 * delta) * min(isotropic, per_axis),
        "summation": 1.01 * (4 * 2 + 4 + 2 + 12 + 8) * u * 3.0 * factor,
        "stored values": 1e-5 * factor,
    }
    if semantics == "float32":
        expected["input rounding"] = min(2.0 * u * 1.5, 2.0 * u * 1.5) * factor
    found = by_name(grid_terms(given, Known(Modulus(2.0), AxisLipschitz((1.5, 0.5))), norm))
    assert found == {name: pytest.approx(value, rel=1e-9, abs=0) for name, value in expected.items()}
    assert found["approximation"] >= expected["approximation"] * (1 - 1e-15)
    one = by_name(grid_terms(given, Known(per_axis=AxisLipschitz((1.5, 0.5))), norm))
    assert one["approximation"] == pytest.approx(per_axis, rel=1e-9)
    other = by_name(grid_terms(given, Known(Modulus(2.0, 0.5)), math.inf))
    two = [distance_bounds(a, r, 2.0)[0] for a, r in zip(given.axes, given.rates)]
    assert other["approximation"] == pytest.approx(2.0 * math.sqrt(math.hypot(*two)), rel=1e-9)


@pytest.mark.parametrize("semantics", ["float64", "float32"])
def test_terms_of_soft_heads(semantics: str) -> None:
    given, u = facts(semantics), {"float64": 2.0**-53, "float32": 2.0**-24}[semantics]
    second = [distance_bounds(a, r, 2.0)[0] for a, r in zip(given.axes, given.rates)]
    mean = 2.04 * u * (8 * sum(r / 2 * d * d for r, d in zip(given.rates, second)) + 32)
    dropped = sum(dropped_mass(a, r, q) for a, r, q in zip(given.axes, given.rates, given.half_windows))
    found = by_name(soft_terms(given, Known(Modulus(2.0)), 2.0))
    expected = {
        "window": dropped * 5.0 * math.sqrt(8),
        "score rounding": mean / 2 * 5.0 * math.sqrt(8),
        "summation": 1.01 * (2 * 6 + 12 + 8) * u * 3.0 * math.sqrt(8),
    }
    if semantics == "float32":
        expected["input rounding"] = 2.0 * u * 1.5 * math.sqrt(8)
    assert found == {name: pytest.approx(value, rel=1e-9, abs=0) for name, value in expected.items()}


def test_windows_are_the_smallest_that_drop_little_enough() -> None:
    given = facts()
    for mass in (1e-3, 1e-9, 1e-15):
        windows = window_for(given.axes, (3.0, 2.0), mass)
        for axis, rate, q in zip(given.axes, (3.0, 2.0), windows):
            assert dropped_mass(axis, rate, q) <= mass and (q == 1 or dropped_mass(axis, rate, q - 1) > mass)


@pytest.mark.parametrize("semantics", ["float64", "float32"])
def test_terms_of_values_at_scattered_centers(semantics: str) -> None:
    u = {"float64": 2.0**-53, "float32": 2.0**-24}[semantics]
    given = ScatteredFacts(
        cells=50,
        dimension=3,
        radius=0.2,
        rate=40.0,
        exponent_cut=30.0,
        near_cells=9,
        reach=2.0,
        largest=3.0,
        spread=5.0,
        value_error=1e-5,
        center_shift=1e-7,
        semantics=semantics,
    )
    distance = math.sqrt(0.2**2 + 2 * soft_maximum_gap(50) / 40.0)
    delta = u * (11 * (20.0 * 0.04 + 30.0) + 16)
    expected = {
        "approximation": 2.0 * distance,
        "window": 50 * math.exp(-30.0 * (1 - 1e-6)) * 5.0,
        "score rounding": math.expm1(2 * delta) * 2.0 * distance,
        "summation": 1.01 * (18 + 3 + 16) * u * 3.0,
        "stored values": 1e-5,
        "stored centers": 2.0 * 1e-7,
    }
    if semantics == "float32":
        expected["input rounding"] = 2.0 * u * 2.0
    found = by_name(scattered_terms(given, Modulus(2.0)))
    assert found == {name: pytest.approx(value, rel=1e-9, abs=0) for name, value in expected.items()}
