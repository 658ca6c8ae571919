"""Taylor proofs of soft grids: polynomials that enclose the weights, bounds that hold, and bugs that are noticed."""

import math

import flint
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import partita as pa
from partita.functions.expressions import parse
from partita.proofs import grid_proof
from partita.proofs import weight_series as series_module
from partita.proofs.grid_proof import SoftGrid, prove_grid
from partita.proofs.polynomials import bound_ranges, half_maps
from partita.proofs.weight_series import weight_series


def uniform_axis(
    keys: int, ghosts: int, kappa: float, lo: float = -1.0, hi: float = 1.0
) -> tuple[np.ndarray, float, float]:
    h = (hi - lo) / (keys - 2 * ghosts)
    return lo + h * (np.arange(keys) - ghosts + 0.5), kappa / h**2, h


def exact_weights(centers: np.ndarray, rate: float, x: flint.arb) -> list[flint.arb]:
    """The softmax in balls of 200 bits."""
    scores = [-(x - flint.arb(float(c))) * (x - flint.arb(float(c))) * flint.arb(rate) / 2 for c in centers]
    terms = [(s - scores[0]).exp() for s in scores]
    total = sum(terms, flint.arb(0))
    return [t / total for t in terms]


def broken(centers: np.ndarray, rate: float, middle: float, radius: float, found: series_module.WeightSeries) -> bool:
    """Whether some weight leaves its polynomial by more than the remainder, judged in balls."""
    flint.ctx.prec = 200
    for t in (-1.0, -0.7, -0.25, 0.0, 0.4, 0.9, 1.0):
        weights = exact_weights(centers, rate, flint.arb(middle) + flint.arb(radius) * flint.arb(t))
        for p, w in enumerate(weights):
            value = flint.arb(0)
            for c in found.coefficients[0, ::-1, p]:
                value = value * flint.arb(t) + flint.arb(float(c))
            if not abs(w - value) <= flint.arb(float(found.remainder[0, p])):
                return True
    return False


@settings(max_examples=60, derandomize=True, deadline=None)
@given(
    keys=st.integers(1, 14),
    kappa=st.floats(0.05, 30),
    width=st.floats(0, 1.0),
    place=st.floats(-1.3, 1.3),
    degree=st.integers(0, 12),
    shift=st.sampled_from([0.0, 1e6, -3e3]),
)
def test_polynomials_enclose_the_weights(keys, kappa, width, place, degree, shift):
    centers, rate, h = uniform_axis(keys, 0, kappa)
    centers, middle, radius = centers + shift, place + shift, width * h / 2
    found = weight_series(centers, rate, np.array([middle]), np.array([radius]), degree=degree)
    assert np.isfinite(found.coefficients).all() and (found.remainder >= 0).all()
    assert not broken(centers, rate, middle, radius, found)


@pytest.mark.parametrize("degree", [2, 4, 6])
def test_remainders_are_close_to_the_truth_and_fall_with_the_width(degree):
    centers, rate, h = uniform_axis(16, 4, 0.7)
    t = np.linspace(-1, 1, 101)
    last = math.inf
    for radius in (h / 2, h / 4, h / 8):
        found = weight_series(centers, rate, np.array([0.1]), np.array([radius]), degree=degree)
        scores = -rate / 2 * (0.1 + radius * t[:, None] - centers) ** 2
        weights = np.exp(scores - scores.max(axis=1, keepdims=True))
        weights /= weights.sum(axis=1, keepdims=True)
        polynomial = np.polynomial.polynomial.polyval(t, found.coefficients[0]).T
        seen, claimed = np.abs(weights - polynomial).max(axis=0).sum(), found.remainder.sum()
        assert seen <= claimed <= 12 * seen
        assert claimed <= 1.5 * last / 2 ** (degree + 1) or last is math.inf
        last = claimed


def test_a_remainder_too_small_is_noticed():
    """Negative control: the oracle sees a remainder that is too small."""
    centers, rate, h = uniform_axis(8, 2, 1.0)
    found = weight_series(centers, rate, np.array([0.2]), np.array([h / 2]), degree=3)
    assert not broken(centers, rate, 0.2, h / 2, found)
    weaker = series_module.WeightSeries(found.coefficients, found.remainder / 15)
    assert broken(centers, rate, 0.2, h / 2, weaker)


def test_rounding_is_inside_the_remainder_of_a_point():
    """On intervals of radius 0 the remainder is rounding alone: there is some, and without it the claim would be false."""
    centers, rate, _ = uniform_axis(11, 3, 0.6)
    middle = np.linspace(-1, 1, 40)
    found = weight_series(centers, rate, middle, np.zeros(40), degree=1)
    assert 0 < found.remainder.max() < 1e-14
    exact = [
        broken(
            centers,
            rate,
            m,
            0.0,
            series_module.WeightSeries(found.coefficients[i : i + 1], 0 * found.remainder[i : i + 1]),
        )
        for i, m in enumerate(middle)
    ]
    assert any(exact)


@settings(max_examples=50, derandomize=True, deadline=None)
@given(seed=st.integers(0, 10**6), dimension=st.integers(1, 3), degree=st.integers(1, 5))
def test_ranges_of_polynomials(seed, dimension, degree):
    rng = np.random.default_rng(seed)
    exponents = tuple(sorted(grid_proof._exponents(dimension, degree), key=lambda e: (sum(e), [-k for k in e])))
    coefficients = rng.normal(size=(len(exponents), 6)) * 0.5 ** np.array([sum(e) for e in exponents])[:, None]
    remainder = rng.uniform(0, 0.01, 6)
    t = np.concatenate([rng.uniform(-1, 1, (3000, dimension)), rng.choice([-1.0, 1.0], (200, dimension))])
    powers = np.prod(t[:, None, :] ** np.array(exponents), axis=2)
    seen = np.abs(powers @ coefficients).max(axis=0)
    goal = 1.02 * float((seen + remainder).max())
    found = bound_ranges(coefficients, remainder, exponents, goal=goal)
    assert (found.bounds >= seen).all() and found.least <= found.largest
    assert found.largest <= max(goal, 1.3 * float((seen + remainder).max()))
    loose = np.abs(coefficients).sum(axis=0) + remainder
    assert (found.bounds <= loose * (1 + 1e-12)).all()


def test_halves_are_the_same_polynomial():
    exponents = ((0, 0), (1, 0), (0, 1), (2, 0), (1, 1), (0, 2))
    c = np.arange(1.0, 7.0)
    t = np.array([0.3, -0.8])
    for axis in (0, 1):
        for side, middle in ((0, -0.5), (1, 0.5)):
            moved = half_maps(exponents)[axis][side] @ c
            at = t.copy()
            at[axis] = middle + t[axis] / 2
            value = sum(k * np.prod(at ** np.array(e)) for k, e in zip(c, exponents))
            assert value == pytest.approx(
                sum(k * np.prod(t ** np.array(e)) for k, e in zip(moved, exponents)), rel=1e-14
            )


EXPRESSIONS = {
    "sin(3*x0)": (1, 12, 3, 0.7),
    "abs(x0 - 0.1)": (1, 12, 2, 2.0),
    "exp(x0*x1)": (2, 8, 2, 1.0),
    "max(x0, x1)": (2, 8, 1, 2.0),
    "tanh(x0 + 2*x1), x0*x1": (2, 9, 2, 1.2),
    "1/(3 + x0 + x1*x2)": (3, 6, 1, 1.0),
    "x0*x1 - x2*x3": (4, 4, 1, 1.0),
}


def sampled_grid(text: str, seed: int = 0) -> tuple[SoftGrid, object, int]:
    """A soft grid with f at the centers plus noise: values need not be good to be bounded."""
    m, keys, ghosts, kappa = EXPRESSIONS[text]
    centers, rate, _ = uniform_axis(keys, ghosts, kappa)
    graph = parse(text, [f"x{i}" for i in range(m)], {})
    points = np.stack([g.ravel() for g in np.meshgrid(*[np.clip(centers, -1, 1)] * m, indexing="ij")], axis=1)
    values = graph.evaluate(points).reshape(len(points), -1)
    values = values + 1e-3 * np.random.default_rng(seed).normal(size=values.shape)
    return SoftGrid((centers,) * m, (rate,) * m, values.reshape(*(keys,) * m, -1)), graph, m


def errors_at(grid: SoftGrid, graph, points: np.ndarray) -> np.ndarray:
    """`|f − net|` by plain numpy."""
    net = np.broadcast_to(grid.values, (len(points), *grid.values.shape))
    for i, (centers, rate) in enumerate(zip(grid.axes, grid.rates)):
        scores = -rate / 2 * (points[:, i, None] - centers) ** 2
        w = np.exp(scores - scores.max(axis=1, keepdims=True))
        net = np.einsum("np,np...->n...", w / w.sum(axis=1, keepdims=True), net)
    return np.abs(net - graph.evaluate(points).reshape(len(points), -1)).max(axis=1)


def dense_points(m: int, seed: int = 1) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return np.concatenate([rng.uniform(-1, 1, (4000, m)), rng.choice([-1.0, 0.1, 1.0], (200, m))])


@pytest.mark.parametrize("text", EXPRESSIONS)
def test_bounds_hold_and_are_close(text):
    grid, graph, m = sampled_grid(text)
    seen = float(errors_at(grid, graph, dense_points(m)).max())
    proof = prove_grid(grid, graph, -np.ones(m), np.ones(m), goal=1.25 * seen)
    assert proof.settled and seen <= proof.bound <= 1.25 * seen
    assert proof.least <= proof.bound


@pytest.mark.parametrize("text", [pytest.param(t, marks=[pytest.mark.slow] * t.startswith("max")) for t in EXPRESSIONS])
def test_what_is_false_is_not_proved(text):
    """Negative control: a goal below an error that was seen."""
    grid, graph, m = sampled_grid(text)
    seen = float(errors_at(grid, graph, dense_points(m)).max())
    proof = prove_grid(grid, graph, -np.ones(m), np.ones(m), goal=0.98 * seen)
    assert not proof.settled and proof.bound >= seen


def test_a_spike_between_the_samples_is_seen():
    """f is a soft grid's own function plus a spike 1e-4 wide: no sample meets it, the proof does."""
    place = 0.31415926
    text = f"0.5*exp(0 - ((x0 - {place})/0.0001)^2)"
    graph = parse(text, ["x0"], {})
    centers, rate, _ = uniform_axis(10, 2, 1.0)
    grid = SoftGrid((centers,), (rate,), np.zeros((10, 1)))
    assert errors_at(grid, graph, np.linspace(-1, 1, 500)[:, None]).max() < 1e-3
    proof = prove_grid(grid, graph, -np.ones(1), np.ones(1), goal=0.01)
    assert not proof.settled and proof.bound >= 0.5
    wide = prove_grid(grid, graph, -np.ones(1), np.ones(1), goal=0.6)
    assert wide.settled and wide.bound >= 0.5


def zero_grid(keys: int = 6) -> SoftGrid:
    centers, rate, _ = uniform_axis(keys, 1, 1.0)
    return SoftGrid((centers,), (rate,), np.zeros((keys, 1)))


def bound_of(text: str, grid: SoftGrid) -> float:
    return prove_grid(grid, parse(text, ["x0"], {}), -np.ones(1), np.ones(1), goal=50.0).bound


def without_the_first_box(lo, hi, counts, real=grid_proof._product_boxes):
    middle, radius = real(lo, hi, counts)
    return middle[1:], radius[1:]


def with_half_boxes(lo, hi, counts, real=grid_proof._product_boxes):
    middle, radius = real(lo, hi, counts)
    return middle, radius / 2


def without_remainders(*args, real=weight_series, **options):
    found = real(*args, **options)
    return series_module.WeightSeries(found.coefficients, 0 * found.remainder)


@pytest.mark.parametrize(
    ("name", "bug", "text", "values"),
    [
        ("_product_boxes", without_the_first_box, "40*exp(0 - 40*(x0 + 1))", np.zeros(6)),
        ("_product_boxes", with_half_boxes, "x0", np.zeros(6)),
        ("weight_series", without_remainders, "0*x0", np.array([9.0, -9, 9, -9, 9, -9])),
    ],
    ids=["a box is missing", "boxes are too small", "no remainders"],
)
def test_planted_bugs_make_false_claims(monkeypatch, name, bug, text, values):
    """Each bug claims less than an error that is there; the code as it stands does not."""
    grid = SoftGrid(zero_grid().axes, zero_grid().rates, values[:, None])
    if name == "weight_series":  # wide boxes and a low degree, so that remainders are all there is
        monkeypatch.setattr(grid_proof, "_opening", lambda *_: (1, (1,)))
        monkeypatch.setattr(grid_proof, "_REMAINDER_SHARE", 1e9)
    seen = float(errors_at(grid, parse(text, ["x0"], {}), np.linspace(-1, 1, 4001)[:, None]).max())
    assert bound_of(text, grid) >= seen
    monkeypatch.setattr(grid_proof, name, bug)
    assert bound_of(text, grid) < seen


@pytest.mark.parametrize("method", ["fitted", "tuned", "corrected"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_certified_heads_survive_an_attack(method, dtype):
    c = pa.compile("sin(2*x0) + x1*x1", pa.Box([-1, 0], [1, 2]), tolerance=2e-2, method=method, dtype=dtype)
    assert c.certificate.kind == "proved" and c.error_bound <= 2e-2
    assert c.attack(samples=20000, seed=5).error <= c.error_bound <= 1.6 * c.certificate.witness.error
    assert all(check.holds for check in pa.recheck(c))


def test_a_changed_value_breaks_the_certificate_and_the_recheck_says_so():
    c = pa.compile("sin(2*x0) + x1*x1", pa.Box([-1, 0], [1, 2]), tolerance=1e-3, method="fitted")
    with torch.no_grad():
        c.head.values[c.num_keys // 2] += 0.1
    failed = {check.name for check in pa.recheck(c) if not check.holds}
    assert {"tensors", "approximation"} <= failed
    assert c.attack(samples=5000).error > c.certificate.error_bound


@pytest.mark.parametrize("rate", [1e8, 1e12])
def test_a_value_of_zero_does_not_hide_an_infinite_remainder(rate):
    """∞ · 0 was NaN, which no comparison counted: a step function was "proved" equal to x."""
    grid = SoftGrid((np.array([-1.0, 0.0, 1.0]),), (rate,), np.array([[-1.0], [0.0], [1.0]]))
    proof = prove_grid(grid, parse("x0", ["x0"]), np.array([-1.0]), np.array([1.0]), goal=0.6, max_boxes=1 << 13)
    assert proof.bound >= 0.5 >= proof.least


def test_ranges_of_unknown_polynomials_are_unknown():
    found = bound_ranges(np.zeros((2, 1)), np.array([np.nan]), ((0,), (1,)), goal=1.0)
    assert not found.settled and found.largest == np.inf
