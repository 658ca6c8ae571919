"""Laws of geometry/moments.py, against sums written out here in numpy and mpmath. Every law has a negative control."""

from __future__ import annotations

import itertools
import math
from fractions import Fraction

import mpmath
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from partita.errors import DomainError
from partita.geometry.moments import (
    AxisGeometry,
    dropped_mass,
    leakage,
    moment_bounds,
    soft_maximum_gap,
    temperature_for_leakage,
)

POWERS = [1.0, 1.5, 2.0, 3.0]
COUNTS = [1, 2, 3, 7, 16, 40]
UNEVEN = [[1.0, 1e-3, 1.0], [1e-3] * 9 + [20.0] + [1e-3] * 9, [50.0, 0.03], [0.05, 1.0, 0.05, 4.0]]
SHARPNESSES = [1.0, 2.0, 4.0, 8.0, 16.0, 40.0, 100.0]

fixed = settings(derandomize=True, max_examples=60, deadline=None, database=None)


# --- oracles ---------------------------------------------------------------------------------------------------------


def softmax(exponents: np.ndarray) -> np.ndarray:
    terms = np.exp(exponents - exponents.max(axis=-1, keepdims=True))
    return terms / terms.sum(axis=-1, keepdims=True)


def moment(centers: np.ndarray, points: np.ndarray, rate: float, power: float) -> np.ndarray:
    """E|x − c|^p under softmax(−R(x − c)²/2), summed over all centers, one number per point."""
    distance = np.abs(points[:, None] - centers)
    return (softmax(-rate / 2 * distance**2) * distance**power).sum(axis=1)


def exact_moment(centers: list[float], x: float, rate: float, power: float) -> mpmath.mpf:
    """The same in 50 digits."""
    with mpmath.workdps(50):
        distance = [abs(mpmath.mpf(x) - mpmath.mpf(c)) for c in centers]
        mass = [mpmath.exp(-mpmath.mpf(rate) * d * d / 2) for d in distance]
        return mpmath.fsum(w * d ** mpmath.mpf(power) for w, d in zip(mass, distance)) / mpmath.fsum(mass)


def edge_moment(sharpness: float, power: float) -> mpmath.mpf:
    """E|x − v|^p at the cell edges of a lattice of spacing 1: `2^{−p} Σ (2j+1)^p q^{j(j+1)/2} / Σ q^{j(j+1)/2}`."""
    with mpmath.workdps(50):
        q = mpmath.exp(-mpmath.mpf(sharpness))
        mass = [q ** (j * (j + 1) // 2) for j in range(60)]
        odd = [mpmath.mpf(2 * j + 1) ** mpmath.mpf(power) for j in range(60)]
        return mpmath.fsum(a * b for a, b in zip(odd, mass)) / mpmath.fsum(mass) / 2 ** mpmath.mpf(power)


def dense_points(centers: np.ndarray, lo: float, hi: float, count: int = 6001) -> np.ndarray:
    middles = (centers[1:] + centers[:-1]) / 2
    candidates = np.concatenate([np.linspace(lo, hi, count), centers, middles])
    return candidates[(candidates >= lo) & (candidates <= hi)]


def window_outside(centers: np.ndarray, points: np.ndarray, rate: float, half_window: int) -> np.ndarray:
    """Mass outside the 2q centers around each point (q on either side, pushed inside at the ends)."""
    count, width = len(centers), 2 * half_window
    left = np.clip(np.searchsorted(centers, points, side="right") - 1, 0, count - 2)
    start = np.clip(left - half_window + 1, 0, count - width)
    index = np.arange(count)
    outside = (index < start[:, None]) | (index >= start[:, None] + width)
    return np.where(outside, softmax(-rate / 2 * (points[:, None] - centers) ** 2), 0.0).sum(axis=1)


# --- the checkers that laws and negative controls share ---------------------------------------------------------------


def covers(bound: float, measured: np.ndarray | float) -> bool:
    """Whether the bound is nowhere below what was measured (numpy's own rounding allowed for, some 1e-13)."""
    return bool(np.all(np.asarray(measured, dtype=float) <= bound * (1 + 1e-13)))


def is_sharp(bound: float, measured: float, relative: float) -> bool:
    """Whether the bound is at least the measured supremum and at most `relative` above it."""
    return covers(bound, measured) and bound <= measured * (1 + relative)


def uniform(count: int, spacing: float = 1.0, offset: float = 0.0) -> tuple[np.ndarray, float, float]:
    """`count` centers and the ends of the cells around them: an overhang of half a gap."""
    return offset + spacing * (np.arange(count) + 0.5), offset, offset + spacing * count


def jittered(count: int, seed: int, amount: float) -> tuple[np.ndarray, float, float]:
    centers, lo, hi = uniform(count)
    return centers + amount * np.random.default_rng(seed).uniform(-0.5, 0.5, count), lo, hi


def average_over(centers: np.ndarray, lo: float, hi: float, rate: float, power: float) -> float:
    """The mean of E|x − c|^p over [lo, hi], Gauss-Legendre on 16 pieces between all centers, middles and ends."""
    knots = np.unique(np.concatenate([[lo, hi], centers, (centers[1:] + centers[:-1]) / 2]))
    knots = knots[(knots >= lo) & (knots <= hi)]
    fine = np.unique(np.concatenate([np.linspace(a, b, 17) for a, b in itertools.pairwise(knots)]))
    nodes, quadrature = np.polynomial.legendre.leggauss(8)
    middle, radius = (fine[1:] + fine[:-1]) / 2, np.diff(fine) / 2
    points = (middle[:, None] + radius[:, None] * nodes).ravel()
    return float((moment(centers, points, rate, power) * (radius[:, None] * quadrature).ravel()).sum() / (hi - lo))


# --- moments: never below the truth -----------------------------------------------------------------------------------


@pytest.mark.parametrize("power", POWERS)
@pytest.mark.parametrize("sharpness", SHARPNESSES)
@pytest.mark.parametrize("count", COUNTS)
def test_moments_bound_uniform_grids(count: int, sharpness: float, power: float) -> None:
    centers, lo, hi = uniform(count)
    supremum, average = moment_bounds(AxisGeometry.of(centers, lo, hi), sharpness, power)
    assert covers(supremum, moment(centers, dense_points(centers, lo, hi), sharpness, power))
    assert covers(average, average_over(centers, lo, hi, sharpness, power))


@given(
    count=st.integers(1, 40),
    sharpness=st.floats(1, 100),
    power=st.sampled_from(POWERS),
    seed=st.integers(0, 10**6),
    amount=st.floats(0, 0.9),
    left=st.floats(0, 3),
    right=st.floats(0, 3),
)
@fixed
def test_moments_bound_jittered_grids_with_any_overhang(
    count: int, sharpness: float, power: float, seed: int, amount: float, left: float, right: float
) -> None:
    centers, *_ = jittered(count, seed, amount)
    lo, hi = centers[0] - left, centers[-1] + max(right, 0.01)
    supremum, average = moment_bounds(AxisGeometry.of(centers, lo, hi), sharpness, power)
    assert covers(supremum, moment(centers, dense_points(centers, lo, hi, 3001), sharpness, power))
    assert covers(average, average_over(centers, lo, hi, sharpness, power))


@pytest.mark.parametrize("power", POWERS)
@pytest.mark.parametrize("rate", [1e-2, 0.3, 2.0, 30.0])
@pytest.mark.parametrize("gaps", UNEVEN)
def test_moments_bound_very_uneven_gaps(gaps: list[float], rate: float, power: float) -> None:
    centers = np.concatenate([[0.0], np.cumsum(gaps)])
    for overhang in (0.0, 0.4, 30.0):
        lo, hi = -overhang, centers[-1] + overhang
        supremum, average = moment_bounds(AxisGeometry.of(centers, lo, hi), rate, power)
        assert covers(supremum, moment(centers, dense_points(centers, lo, hi, 4001), rate, power))
        assert covers(average, average_over(centers, lo, hi, rate, power))


@pytest.mark.parametrize(("offset", "spacing"), [(1e8, 1e-6), (-1e8, 3e-7), (0.0, 1e-12), (7.0, 1e5), (1e15, 3.0)])
def test_moments_bound_rounded_centers(offset: float, spacing: float) -> None:
    """Far from the origin float64 makes the gaps uneven; the bound is for the centers as they are."""
    centers, lo, hi = uniform(12, spacing, offset)
    rate = 10 / spacing**2
    supremum, _ = moment_bounds(AxisGeometry.of(centers, lo, hi), rate, 2.0)
    for x in dense_points(centers, lo, hi, 25):
        assert exact_moment(centers.tolist(), float(x), rate, 2.0) <= supremum


def test_moments_of_one_center() -> None:
    supremum, average = moment_bounds(AxisGeometry.of(np.array([0.3]), 0.0, 1.0), 5.0, 3.0)
    assert is_sharp(supremum, 0.7**3, 1e-9)
    assert covers(average, (0.7**4 + 0.3**4) / 4)


def test_shrunken_moments_are_caught() -> None:
    centers, lo, hi = uniform(40)
    supremum, average = moment_bounds(AxisGeometry.of(centers, lo, hi), 16.0, 2.0)
    measured = moment(centers, dense_points(centers, lo, hi), 16.0, 2.0)
    assert not covers(supremum * (1 - 1e-5), measured)
    assert not covers(average * (1 - 1e-2), average_over(centers, lo, hi, 16.0, 2.0))


def test_hard_bound_is_caught_on_a_soft_head() -> None:
    """(h/2)², the limit of sharp heads, is not a bound at κ = 4."""
    centers, lo, hi = uniform(16)
    assert not covers(0.25, moment(centers, dense_points(centers, lo, hi), 4.0, 2.0))


# --- moments: sharp ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("sharpness", "ratio"), [(2, 1.4157), (4, 1.0696), (8, 1.00135), (16, 1.0000005)])
def test_edge_formula_gives_the_published_ratios(sharpness: float, ratio: float) -> None:
    measured = float(2 * mpmath.sqrt(edge_moment(sharpness, 2.0)))
    assert measured == pytest.approx(ratio, rel=5e-5 if sharpness < 16 else 1e-7)


@pytest.mark.parametrize("sharpness", [1.0, 2.0, 8.0, 30.0])
def test_edge_formula_is_the_supremum_of_a_long_grid(sharpness: float) -> None:
    """Dense samples inside a long grid never exceed the edge value, and the edge attains it."""
    centers, lo, hi = uniform(40)
    inside = np.linspace(lo + 15, hi - 15, 10001)
    measured = moment(centers, inside, sharpness, 2.0)
    assert covers(float(edge_moment(sharpness, 2.0)), measured)
    assert measured.max() == pytest.approx(float(edge_moment(sharpness, 2.0)), rel=1e-12)
    assert abs(inside[measured.argmax()] % 1.0 - 0.5) > 0.499  # centers sit at k + ½, edges at k


@pytest.mark.parametrize("power", POWERS)
@pytest.mark.parametrize("sharpness", [8.0, 12.0, 16.0, 40.0, 100.0])
@pytest.mark.parametrize("count", [2, 7, 40])
def test_supremum_is_within_a_thousandth(count: int, sharpness: float, power: float) -> None:
    centers, lo, hi = uniform(count, 0.37, -3.0)
    supremum, _ = moment_bounds(AxisGeometry.of(centers, lo, hi), sharpness / 0.37**2, power)
    assert is_sharp(supremum, 0.37**power * float(edge_moment(sharpness, power)) * (1 - 2e-12), 1e-3)


@pytest.mark.parametrize("power", POWERS)
@pytest.mark.parametrize(("sharpness", "relative"), [(8.0, 0.1), (16.0, 0.01), (40.0, 0.003), (100.0, 0.002)])
def test_average_over_whole_cells_is_close_on_long_grids(sharpness: float, relative: float, power: float) -> None:
    centers, lo, hi = uniform(40)
    _, average = moment_bounds(AxisGeometry.of(centers, lo, hi), sharpness, power)
    assert is_sharp(average, average_over(centers, lo, hi, sharpness, power), relative)


def test_a_loose_bound_is_not_called_sharp() -> None:
    assert not is_sharp(0.25 * 1.01, 0.25, 1e-3)
    assert not is_sharp(0.25 * 0.999, 0.25, 1e-3)


# --- geometry ---------------------------------------------------------------------------------------------------------


@given(st.lists(st.floats(-1e6, 1e6), min_size=2, max_size=12, unique=True), st.floats(0, 10), st.floats(0, 10))
@fixed
def test_gaps_and_overhang_enclose_the_exact_ones(values: list[float], left: float, right: float) -> None:
    centers = np.sort(np.array(values))
    lo, hi = centers[0] - left, centers[-1] + right
    geometry = AxisGeometry.of(centers, lo, hi)
    exact = [Fraction(b) - Fraction(a) for a, b in itertools.pairwise(centers.tolist())]
    overhang = max(Fraction(centers[0]) - Fraction(lo), Fraction(hi) - Fraction(centers[-1]))
    assert Fraction(geometry.gap_min) <= min(exact) and Fraction(geometry.gap_max) >= max(exact)
    assert Fraction(geometry.overhang) >= overhang
    assert Fraction(geometry.covering_radius) >= max(max(exact) / 2, overhang)


@pytest.mark.parametrize("centers", [[0.0, 0.0], [1.0, 0.5]])
def test_centers_that_do_not_increase_are_refused(centers: list[float]) -> None:
    with pytest.raises(DomainError, match="increase strictly"):
        AxisGeometry.of(np.array(centers), 0.0, 1.0)


# --- windows ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("half_window", [1, 2, 3, 5])
@pytest.mark.parametrize("sharpness", [1.0, 4.0, 16.0, 64.0])
@pytest.mark.parametrize("amount", [0.0, 0.6])
def test_dropped_mass_bounds_every_point(amount: float, sharpness: float, half_window: int) -> None:
    centers, lo, hi = jittered(24, 5, amount)
    bound = dropped_mass(AxisGeometry.of(centers, lo, hi), sharpness, half_window)
    points = dense_points(centers, lo - 2, hi + 2, 20001)
    assert covers(bound, window_outside(centers, points, sharpness, half_window))


def test_nothing_is_dropped_by_a_window_that_holds_all() -> None:
    centers, lo, hi = uniform(6)
    assert dropped_mass(AxisGeometry.of(centers, lo, hi), 1.0, 3) == 0.0


@pytest.mark.parametrize("half_window", [1, 2])
def test_shrunken_or_shifted_windows_are_caught(half_window: int) -> None:
    centers, lo, hi = uniform(24)
    geometry = AxisGeometry.of(centers, lo, hi)
    points = np.concatenate([centers, centers - 1e-9])  # worst at a center, where the window leans to one side
    measured = window_outside(centers, points, 16.0, half_window)
    assert not covers(0.49 * dropped_mass(geometry, 16.0, half_window), measured)
    assert not covers(dropped_mass(geometry, 16.0, half_window + 1), measured)


# --- the soft maximum -------------------------------------------------------------------------------------------------


def soft_maximum_loss(scores: np.ndarray, beta: float) -> float:
    return float(scores.max() - (softmax(beta * scores) * scores).sum())


def largest_loss_found(cells: int) -> float:
    """Search over one leader and equal deficits t, where the loss is (N−1)te^{−t}/(1 + (N−1)e^{−t})."""
    deficits = np.linspace(0, 3 + math.log(cells), 20001)
    others = (cells - 1) * np.exp(-deficits)
    return float((deficits * others / (1 + others)).max())


@given(
    scores=st.lists(st.floats(-30, 30), min_size=1, max_size=30),
    beta=st.floats(0.01, 50),
)
@fixed
def test_soft_maximum_loses_at_most_the_lemma(scores: list[float], beta: float) -> None:
    loss = soft_maximum_loss(np.array(scores), beta)
    assert loss >= -1e-12
    assert covers(soft_maximum_gap(len(scores)) / beta + 1e-12, loss)


@pytest.mark.parametrize("cells", [2, 3, 10, 1000, 10**6])
def test_soft_maximum_gap_is_lambert_and_attained(cells: int) -> None:
    exact = float(mpmath.lambertw((cells - 1) / mpmath.e).real)
    assert is_sharp(soft_maximum_gap(cells), exact, 1e-8)
    assert is_sharp(soft_maximum_gap(cells), largest_loss_found(cells), 1e-6)
    best = np.full(min(cells, 1000), -(1 + exact))
    best[0] = 0.0
    if cells <= 1000:
        assert soft_maximum_loss(best, 1.0) == pytest.approx(exact, rel=1e-9)


def test_soft_maximum_of_two_and_one() -> None:
    assert soft_maximum_gap(2) == pytest.approx(0.2784645, abs=1e-7)
    assert soft_maximum_gap(1) == 0.0


@pytest.mark.parametrize("cells", [2, 10, 1000])
def test_a_smaller_soft_maximum_gap_is_caught(cells: int) -> None:
    assert not covers(0.9999 * soft_maximum_gap(cells), largest_loss_found(cells))


# --- leakage ----------------------------------------------------------------------------------------------------------


def leaked(cells: int, rate: float, margin: float) -> mpmath.mpf:
    """The mass outside the best cell when all others trail by exactly the margin, in 50 digits."""
    with mpmath.workdps(50):
        others = (cells - 1) * mpmath.exp(-mpmath.mpf(rate) * mpmath.mpf(margin))
        return others / (1 + others)


@given(
    deficits=st.lists(st.floats(0, 20), min_size=1, max_size=40),
    rate=st.floats(0.01, 40),
    margin=st.floats(0.001, 5),
)
@fixed
def test_leakage_bounds_every_score_list_with_that_margin(deficits: list[float], rate: float, margin: float) -> None:
    scores = np.concatenate([[0.0], -margin - np.array(deficits)])
    assert covers(leakage(len(scores), rate, margin) + 1e-15, 1 - softmax(rate * scores)[0])


@pytest.mark.parametrize(
    ("cells", "margin", "epsilon"), [(2, 0.1, 0.5), (11, 0.1, 0.01), (1000, 3.0, 1e-12), (5, 1e-6, 0.9)]
)
def test_temperature_keeps_the_leak_below_epsilon_and_no_lower(cells: int, margin: float, epsilon: float) -> None:
    rate = temperature_for_leakage(cells, margin, epsilon)
    assert leaked(cells, rate, margin) <= epsilon
    assert leakage(cells, rate, margin) == pytest.approx(epsilon, rel=1e-9)


def test_the_printed_temperature_is_caught() -> None:
    """Proposition 3.2 prints R ≥ Δ(ln(N−1) − ln ε); with Δ = 0.1, N = 11, ε = 0.01 that leaks 0.9 and not 0.01."""
    printed = 0.1 * (math.log(10) - math.log(0.01))
    assert not leaked(11, printed, 0.1) <= 0.01


def test_a_shrunken_leakage_is_caught() -> None:
    assert covers(leakage(11, 100.0, 0.1), float(leaked(11, 100.0, 0.1)))
    assert not covers(0.999 * leakage(11, 100.0, 0.1), float(leaked(11, 100.0, 0.1)))


def test_leakage_is_a_mass() -> None:
    assert leakage(10**6, 1e-9, 1e-9) == 1.0
    assert leakage(1, 1.0, 1.0) < 1e-300


@pytest.mark.parametrize(("margin", "epsilon"), [(0.0, 0.1), (-1.0, 0.1), (1.0, 0.0), (1.0, 1.0), (math.nan, 0.1)])
def test_impossible_leakage_is_refused(margin: float, epsilon: float) -> None:
    with pytest.raises(DomainError, match="margin"):
        temperature_for_leakage(3, margin, epsilon)
