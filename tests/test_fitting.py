"""Laws of fitted grids, against sums written out here in numpy. Every law has a negative control."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from numpy.polynomial import chebyshev
from scipy.optimize import linprog

from partita.errors import ShapeError, ToleranceError
from partita.geometry.domains import Box
from partita.search.axis_fit import AxisChoice, AxisSearch, chebyshev_points
from partita.search.grid_fit import GridFit, fit_grid, fit_values
from partita.search.sampled_function import Sampled, Tests, landmarks
from partita.search.tensor_fit import Frame, evaluate_points, evaluate_tensor

Tests.__test__ = False  # a class of test points, not of tests


# --- oracles ---------------------------------------------------------------------------------------------------------


def centers_of(box: Box, counts, ghosts, dtype=np.float64) -> list[np.ndarray]:
    """`lo + h(k − g + ½)`, `h = side/(P − 2g)`, in the dtype."""
    ends = zip(box.lo.ravel().tolist(), box.hi.ravel().tolist())
    steps = [(hi - lo) / (p - 2 * g) for (lo, hi), p, g in zip(ends, counts, ghosts)]
    lows = box.lo.ravel().tolist()
    axes = [lo + h * (np.arange(p) - g + 0.5) for lo, h, p, g in zip(lows, steps, counts, ghosts)]
    return [a.astype(dtype).astype(np.float64) for a in axes]


def net(points, box, counts, ghosts, rates, values, dtype=np.float64) -> np.ndarray:
    """The head as a softmax over all cells at once: scores `−Σ_i R_i(x_i − c_i)²/2`, cells row-major."""
    cells = np.array(list(itertools.product(*centers_of(box, counts, ghosts, dtype))))
    scores = -0.5 * ((points[:, None, :] - cells) ** 2 * np.array(rates)).sum(axis=2)
    weights = np.exp(scores - scores.max(axis=1, keepdims=True))
    return weights @ values / weights.sum(axis=1, keepdims=True)


def largest_error(f, box: Box, fit: GridFit, seed: int = 11, count: int = 1500, dtype=np.float64) -> float:
    points = np.concatenate([box.sample(count, np.random.default_rng(seed)), box.corners(64)])
    return float(
        np.abs(net(points, box, fit.counts, fit.ghosts, fit.rates, fit.values, dtype) - column(f, points)).max()
    )


def column(f, points: np.ndarray) -> np.ndarray:
    return np.asarray(f(points), dtype=float).reshape(len(points), -1)


def asked(f, box: Box, count: list[int] | None = None):
    """f with one column per output, which notices points outside the box."""

    def ask(points):
        assert box.contains(points).all()
        if count is not None:
            count[0] += len(points)
        return column(f, points)

    return ask


def coefficients_needed(f, tolerance: float) -> int:
    """The least n for which interpolation at n Chebyshev points on [−1, 1] is within the tolerance."""
    fine = np.linspace(-1, 1, 1501)
    for n in range(1, 200):
        series = chebyshev.Chebyshev.interpolate(f, n - 1)
        if np.abs(series(fine) - f(fine)).max() <= tolerance:
            return n
    raise AssertionError("not resolved")


def cube(m: int, lo: float = -1.0, hi: float = 1.0) -> Box:
    return Box(np.full(m, lo), np.full(m, hi))


SMOOTH = {
    "sin 3x + x cos 2y": (2, 1e-6, 110, lambda z: np.sin(3 * z[:, 0]) + z[:, 0] * np.cos(2 * z[:, 1])),
    "1/(1+25|x|²)": (2, 1e-4, 900, lambda z: 1 / (1 + 25 * (z**2).sum(axis=1))),
    "exp(−x²−2y²) sin 4z": (3, 1e-5, 1000, lambda z: np.exp(-(z[:, 0] ** 2) - 2 * z[:, 1] ** 2) * np.sin(4 * z[:, 2])),
}
ONE = {
    "exp": np.exp,
    "sin 3x": lambda x: np.sin(3 * x),
    "sin(10x+1)": lambda x: np.sin(10 * x + 1),
    "Runge": lambda x: 1 / (1 + 25 * x**2),
    "tanh 5x": lambda x: np.tanh(5 * x),
    "exp(−20x²)": lambda x: np.exp(-20 * x**2),
    "log(1.2+x)": lambda x: np.log(1.2 + x),
}


# --- the whole ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SMOOTH)
def test_few_keys_meet_the_tolerance_at_points_never_asked(name):
    m, tolerance, most, f = SMOOTH[name]
    box, count = cube(m), [0]
    fit = fit_grid(asked(f, box, count), box, tolerance=tolerance, outputs=1)
    assert fit.fitted and fit.num_cells == math.prod(fit.counts) == len(fit.values) <= most
    assert fit.error_estimate <= 0.9001 * tolerance
    assert largest_error(f, box, fit) <= 1.02 * fit.error_estimate
    assert fit.samples == count[0]
    # tampered: one value moved by 2 % of the spread, or ghosts forgotten, and the oracle notices
    moved = fit.values.copy()
    moved[len(moved) // 2] += 0.02 * fit.spread
    assert largest_error(f, box, _with(fit, values=moved)) > tolerance
    if any(fit.ghosts):
        assert largest_error(f, box, _with(fit, ghosts=(0,) * m)) > tolerance


def _with(fit: GridFit, **changes) -> GridFit:
    return GridFit(**{**{k: getattr(fit, k) for k in fit.__dataclass_fields__}, **changes})


def test_four_dimensions_and_four_outputs():
    matrix = np.random.default_rng(5).normal(size=(4, 4))
    matrix *= 1.5 / np.linalg.norm(matrix, 2)
    f, box = (lambda z: np.tanh(z @ matrix.T)), cube(4)
    fit = fit_grid(asked(f, box), box, tolerance=1e-3, outputs=4)
    assert fit.fitted and fit.num_cells <= 1500 and fit.values.shape == (fit.num_cells, 4)
    assert largest_error(f, box, fit, count=300) <= 1e-3
    assert largest_error(f, box, _with(fit, values=fit.values[:, ::-1]), count=300) > 1e-3


def test_fewer_keys_than_chebyshev_coefficients():
    ratios = []
    for f in ONE.values():
        fit = fit_grid(asked(f, cube(1)), cube(1), tolerance=1e-6, outputs=1, max_spread=1e8)
        assert fit.fitted and fit.spread <= 1e8
        ratios.append(fit.num_cells / coefficients_needed(f, 1e-6))
    assert math.exp(np.mean(np.log(ratios))) <= 0.7


@pytest.mark.parametrize("scale", [1e-150, 1e-8, 1e8, 1e150])
def test_the_scale_of_values_does_not_matter(scale):
    f, box = (lambda z: np.sin(3 * z[:, 0]) * np.cos(z[:, 1])), cube(2)
    fit = fit_grid(asked(lambda z: scale * f(z), box), box, tolerance=1e-6 * scale, outputs=1)
    plain = fit_grid(asked(f, box), box, tolerance=1e-6, outputs=1)
    assert fit.fitted and fit.counts == plain.counts and fit.ghosts == plain.ghosts
    assert fit.error_estimate == pytest.approx(scale * plain.error_estimate, rel=0.05)


@pytest.mark.parametrize(
    ("lo", "hi"), [((1e6, 1e6), (1e6 + 1, 1e6 + 2)), ((0.0, 0.0), (1.0, 1e4)), ((-3e-9, 7.0), (1e-9, 7.5))]
)
def test_boxes_far_from_zero_and_sides_that_differ(lo, hi):
    box = Box(lo, hi)

    def f(z):
        unit = (z - box.lo) / box.sides
        return np.sin(3 * unit[:, 0]) * np.exp(unit[:, 1])

    fit = fit_grid(asked(f, box), box, tolerance=1e-6, outputs=1)
    assert fit.fitted and fit.num_cells <= 60
    assert largest_error(f, box, fit) <= 1e-6
    assert largest_error(lambda z: 1.00001 * f(z), box, fit) > 1e-6


def test_an_axis_that_f_ignores_gets_one_key():
    box = cube(3)
    fit = fit_grid(asked(lambda z: np.cos(2 * z[:, 1]), box), box, tolerance=1e-5, outputs=1)
    assert fit.fitted and fit.counts[0] == fit.counts[2] == 1 < fit.counts[1]
    constant = fit_grid(asked(lambda z: np.full(len(z), 3.5), box), box, tolerance=1e-9, outputs=1)
    assert constant.counts == (1, 1, 1) and constant.values.tolist() == [[3.5]] and constant.error_estimate == 0


def test_a_centered_tanh_is_two_keys():
    """softmax over two keys is a logistic function: tanh 5x on [−1, 1] has h = 1 and R = 10."""
    fit = fit_grid(lambda z: np.tanh(5 * z), cube(1), tolerance=1e-9, outputs=1)
    assert fit.counts == (2,) and fit.rates[0] == pytest.approx(10, rel=1e-6)
    assert fit_grid(lambda z: np.tanh(5 * z - 0.1), cube(1), tolerance=1e-9, outputs=1).num_cells > 2


def test_ten_digits_in_one_and_two_dimensions():
    for m, f in ((1, lambda z: np.sin(3 * z[:, 0])), (2, lambda z: np.exp(z[:, 0] * z[:, 1]) * np.cos(4 * z[:, 0]))):
        fit = fit_grid(asked(f, cube(m)), cube(m), tolerance=1e-10, outputs=1, max_spread=1e4)
        assert fit.fitted and fit.num_cells <= 17 * 20 ** (m - 1)  # 320 or 323, as the BLAS rounds
        assert largest_error(f, cube(m), fit) <= 1e-10


# --- limits ------------------------------------------------------------------------------------------------------------


def test_values_spread_no_farther_than_allowed():
    f, box = SMOOTH["sin 3x + x cos 2y"][3], cube(2)
    free, bound = (fit_grid(asked(f, box), box, tolerance=1e-6, outputs=1, max_spread=s) for s in (math.inf, 20.0))
    assert bound.fitted and bound.spread <= 20 < free.spread  # without the limit they do
    assert free.num_cells < bound.num_cells
    assert largest_error(f, box, bound) <= 1e-6
    assert not fit_grid(asked(f, box), box, tolerance=1e-6, outputs=1, max_spread=1.0).fitted  # f itself spreads 3.4


def test_single_precision_storage_is_what_is_estimated():
    f, box = (lambda z: np.sin(3 * z[:, 0]) + z[:, 1] ** 2), Box([0, 0], [1, 0.1])
    fit = fit_grid(asked(f, box), box, tolerance=1e-4, outputs=1, storage=np.float32)
    assert fit.fitted
    assert (fit.values == fit.values.astype(np.float32)).all()
    assert all(r == float(np.float32(r)) for r in fit.rates)
    assert largest_error(f, box, fit, dtype=np.float32) <= 1.02 * fit.error_estimate
    double = fit_grid(asked(f, box), box, tolerance=1e-4, outputs=1)
    assert not (double.values == double.values.astype(np.float32)).all()


ROUGH = {
    "jump": (1, 1e-2, lambda z: np.sign(z[:, 0] - 0.1)),
    "jump across": (2, 1e-2, lambda z: (z[:, 0] + z[:, 1] > 0.3).astype(float)),
    "small jump": (1, 1e-3, lambda z: np.sin(z[:, 0]) + 3e-3 * (z[:, 0] > 0.31)),
    "kink": (1, 1e-5, lambda z: np.abs(z[:, 0] - 0.123)),
    "ridge": (2, 1e-4, lambda z: np.maximum(z[:, 0], z[:, 1])),
    "noise": (
        2,
        1e-6,
        lambda z: np.sin(3 * z[:, 0]) + 1e-3 * np.sin(1e7 * z.sum(axis=1) + 1e4 * np.cos(1e5 * z[:, 0])),
    ),
    "frequency": (1, 1e-6, lambda z: np.cos(900 * z[:, 0])),
}


@pytest.mark.parametrize("name", ROUGH)
def test_what_cannot_be_fitted_is_said_and_nothing_is_claimed(name):
    m, tolerance, f = ROUGH[name]
    fit = fit_grid(asked(f, cube(m)), cube(m), tolerance=tolerance, outputs=1)
    assert fit.status == "stagnates" and not fit.fitted
    assert fit.error_estimate > tolerance and fit.num_cells == math.prod(fit.counts) > 0
    seen = largest_error(f, cube(m), fit)
    assert seen <= 1.3 * fit.error_estimate


def test_noise_below_the_tolerance_does_not_matter():
    m, _, f = ROUGH["noise"]
    fit = fit_grid(asked(f, cube(m)), cube(m), tolerance=1e-2, outputs=1)
    assert fit.fitted and fit.num_cells <= 12


def test_a_jump_between_test_points_is_found():
    """A steep head can follow a jump at all samples; bisection between samples meets it where it cannot."""
    box, place = cube(1), 0.1003
    f = Sampled(lambda z: np.sign(z - place), box, outputs=1, most=10_000)
    points = Tests.of(f, [40], seed=0).points[:, 0]
    assert np.abs(points - place).min() < 1e-9
    smooth = Sampled(lambda z: z, box, outputs=1, most=10_000)
    assert np.abs(Tests.of(smooth, [40], seed=0).points[:, 0] - place).min() > 1e-9  # nothing to find


def test_zooming_finds_a_sharp_peak_of_the_error():
    place, nothing = 0.1234, ([np.zeros(1)], [1.0], np.zeros((1, 1)))
    f = Sampled(lambda z: np.exp(-50 * np.abs(z - place)), cube(1), outputs=1, most=2000)
    tests = Tests.of(f, [20], seed=0)
    seen, _ = tests.worst(*nothing)
    zoomed, where = tests.zoom(*nothing)
    assert seen < 0.98 and zoomed > 0.999 and abs(where[0] - place) < 1e-4


def test_tolerances_below_rounding():
    for tolerance in (1e-16, 1e-300):
        fit = fit_grid(lambda z: np.sin(3 * z), cube(1), tolerance=tolerance, outputs=1)
        assert fit.status == "rounding" and fit.error_estimate > tolerance
    assert fit_grid(lambda z: np.sin(3 * z), cube(1), tolerance=1e-13, outputs=1).fitted
    far = fit_grid(lambda z: 1e12 + np.sin(3 * z), cube(1), tolerance=1e-6, outputs=1)
    assert far.status == "rounding"
    for side in (1e-200, 1e200):  # κ/h² is no float64
        fit = fit_grid(np.sign, Box([0], [side]), tolerance=1e-6, outputs=1)
        assert fit.status == "rounding" and fit.num_cells == 0 and fit.error_estimate == math.inf
    assert fit_grid(lambda z: 1e150 * z, cube(1), tolerance=1e146, outputs=1, storage=np.float32).status == "rounding"


def test_the_number_of_samples_is_respected():
    box = cube(6)
    for most, status in ((100, "too many samples"), (200_000, "too many samples")):
        count = [0]
        hard = asked(lambda z: np.cos(4 * z.sum(axis=1)), box, count)
        fit = fit_grid(hard, box, tolerance=1e-3, outputs=1, max_samples=most)
        assert fit.status == status and fit.samples == count[0] <= most and fit.num_cells == 0
    count = [0]
    easy = asked(lambda z: np.sin(3 * z[:, 0]), cube(1), count)
    fit = fit_grid(easy, cube(1), tolerance=1e-6, outputs=1, max_samples=1000)
    assert fit.fitted and count[0] <= 1000


def test_samples_spent_while_looking_for_less_do_not_spoil_what_was_found():
    f, box = SMOOTH["1/(1+25|x|²)"][3], cube(2)
    enough = fit_grid(asked(f, box), box, tolerance=1e-4, outputs=1).samples
    for most in (enough - 200, enough - 1000):
        fit = fit_grid(asked(f, box), box, tolerance=1e-4, outputs=1, max_samples=most)
        assert fit.fitted == (fit.error_estimate <= 0.9001e-4) and fit.samples <= most


def test_five_dimensions():
    box = cube(5)
    fit = fit_grid(asked(lambda z: np.cos(z).prod(axis=1), box), box, tolerance=1e-3, outputs=1, max_samples=2_000_000)
    assert fit.fitted and fit.num_cells <= 5**5
    assert largest_error(lambda z: np.cos(z).prod(axis=1), box, fit, count=100) <= 1e-3


def test_wrong_input_is_refused():
    for tolerance in (0.0, -1.0, math.nan, math.inf):
        with pytest.raises(ToleranceError, match="tolerance"):
            fit_grid(lambda z: z, cube(1), tolerance=tolerance, outputs=1)
    with pytest.raises(ShapeError, match="returned shape"):
        fit_grid(lambda z: z[:, 0], cube(1), tolerance=1e-3, outputs=1)
    with pytest.raises(ShapeError, match="one count"):
        fit_values(lambda z: z, cube(1), (3, 3), outputs=1)
    with pytest.raises(ShapeError, match="neither"):
        fit_values(lambda z: z, cube(1), (3,), ghosts=(1,), outputs=1)


def test_progress_is_told_what_is_tried():
    said: list[tuple[str, int, int]] = []
    fit_grid(lambda z: np.sin(3 * z), cube(1), tolerance=1e-4, outputs=1, progress=lambda *what: said.append(what))
    assert said and any("keys" in what for what, _, _ in said)


# --- given sizes ---------------------------------------------------------------------------------------------------------


def test_values_for_a_given_grid_beat_least_squares():
    f, box = SMOOTH["sin 3x + x cos 2y"][3], cube(2)
    rates = (0.5 / 0.5**2,) * 2  # κ = 0.5, spacing 2/4
    fit = fit_values(asked(f, box), box, (12, 12), ghosts=(4, 4), rates=rates, outputs=1)
    assert fit.counts == (12, 12) and fit.ghosts == (4, 4) and fit.rates == rates
    assert largest_error(f, box, fit) <= 1.02 * fit.error_estimate <= 6e-8
    searched = fit_values(asked(f, box), box, (12, 12), outputs=1)
    assert searched.error_estimate < 1e-9 and searched.counts == (12, 12)
    assert largest_error(f, box, searched) <= 1.05 * searched.error_estimate


def test_given_sizes_keep_the_spread():
    free, bound = (fit_values(lambda z: np.sin(3 * z), cube(1), (16,), outputs=1, max_spread=s) for s in (1e6, 5.0))
    assert bound.spread <= 5 < free.spread and free.error_estimate < bound.error_estimate < 1e-7


# --- the parts ---------------------------------------------------------------------------------------------------------


def test_contractions_are_the_softmax_over_all_cells():
    rng = np.random.default_rng(0)
    box, counts, ghosts, rates = Box([0, -1, 2], [1, 3, 2.5]), (3, 5, 4), (0, 1, 1), (7.0, 1.5, 40.0)
    values = rng.normal(size=(*counts, 2))
    axes = [np.sort(rng.uniform(a, b, n)) for a, b, n in zip(box.lo, box.hi, (4, 2, 3))]
    points = np.array(list(itertools.product(*axes)))
    expected = net(points, box, counts, ghosts, rates, values.reshape(-1, 2))
    centers = centers_of(box, counts, ghosts)
    np.testing.assert_allclose(evaluate_points(points, centers, rates, values), expected, atol=1e-14)
    np.testing.assert_allclose(evaluate_tensor(axes, centers, rates, values).reshape(-1, 2), expected, atol=1e-14)
    assert np.abs(evaluate_points(points, centers, rates, values[::-1]) - expected).max() > 1e-3


def test_ridge_regression_on_a_product():
    rng = np.random.default_rng(1)
    first, second = rng.random((7, 3)), rng.random((6, 4))
    samples, pull = rng.normal(size=(7, 6, 2)), rng.normal(size=(3, 4, 2))
    values, fitted = Frame.of([first, second]).nearest(samples, 0.3, pull)
    whole = np.concatenate([np.kron(first, second), 0.3 * np.eye(12)])
    expected = np.linalg.lstsq(whole, np.concatenate([samples.reshape(42, 2), pull.reshape(12, 2)]), rcond=None)[0]
    np.testing.assert_allclose(values.reshape(12, 2), expected, atol=1e-12)
    np.testing.assert_allclose(fitted.reshape(42, 2), whole[:42] @ expected, atol=1e-12)


@pytest.mark.parametrize("f", [np.exp, np.abs, lambda x: 1 / (1 + 25 * x**2)])
def test_the_largest_error_is_nearly_the_least_possible(f):
    """Against linear programming over all values."""
    points, matrix = chebyshev_points(40), np.exp(-8 * (chebyshev_points(40)[:, None] - np.linspace(-1.2, 1.2, 9)) ** 2)
    matrix /= matrix.sum(axis=1, keepdims=True)
    plain = matrix @ np.linalg.lstsq(matrix, f(points), rcond=None)[0]
    scale = np.abs(plain - f(points)).max()
    one = np.ones((40, 1))
    limit = (
        scale
        * linprog(
            np.r_[np.zeros(9), 1.0],
            A_ub=np.block([[matrix, -one], [-matrix, -one]]),
            b_ub=np.r_[f(points), -f(points)] / scale,
            bounds=[(None, None)] * 9 + [(0, None)],
        ).fun
    )
    frame = Frame.of([matrix])
    assert limit < 0.95 * scale
    good = frame.fit(f(points)[:, None], 1.08 * limit, reach=1e6, rounds=60)
    assert good.within and good.error <= 1.08 * limit
    assert np.abs(matrix @ good.values[:, 0] - f(points)).max() == pytest.approx(good.error, rel=1e-6)
    assert not frame.fit(f(points)[:, None], 0.97 * limit, reach=1e6, rounds=60).within  # less is impossible


def test_values_stay_within_reach():
    points, centers = chebyshev_points(40), np.linspace(-2, 2, 9)
    matrix = np.exp(-((points[:, None] - centers) ** 2))
    matrix /= matrix.sum(axis=1, keepdims=True)
    f = np.sin(3 * points)[:, None]
    free, bound = (Frame.of([matrix]).fit(f, 1e-3, reach=r, rounds=200) for r in (1e9, 15.0))
    assert np.ptp(free.values) > 40 > 30 >= np.ptp(bound.values)
    assert free.within and bound.within and bound.error <= 1e-3


def test_an_axis_search_measures_least_squares():
    points = chebyshev_points(65)
    search = AxisSearch(np.sin(5 * points)[:, None], 1e-4, 1e8, 40)
    choice = search.choices(9)[0]
    assert choice.count == 9 and all(search.choices(9)[0].error <= c.error for c in search.choices(9))
    spacing = 2 / (9 - 2 * choice.ghosts)
    centers = spacing * (np.arange(9) - 4)
    matrix = np.exp(-0.5 * choice.sharpness / spacing**2 * (points[:, None] - centers) ** 2)
    matrix /= matrix.sum(axis=1, keepdims=True)
    best = np.abs(matrix @ np.linalg.lstsq(matrix, np.sin(5 * points), rcond=1e-14)[0] - np.sin(5 * points)).max()
    assert choice.error == pytest.approx(best, rel=0.3)  # on half the points
    assert search.error_of(AxisChoice(9, choice.ghosts, 2 * choice.sharpness)) > 2 * choice.error
    fewest = search.fewest(1e-4)
    assert fewest is not None and search.error(fewest) <= 1e-4 < min(search.error(fewest - 1), search.error(fewest - 2))


def test_landmarks_hold_the_places_where_people_put_kinks():
    places = landmarks(Box([-1, 0], [3, 2]), 1000)
    for point in ([0, 1], [1, 1], [-1, 0], [3, 2], [0, 0.5]):
        assert (places == point).all(axis=1).any()
    assert not (places == [0.1, 1]).all(axis=1).any() and len(landmarks(cube(6), 100)) == 0
