"""Gradients, ranges and trends of heads: proved, and near what is attained."""

import mpmath
import numpy as np
import pytest
import torch

import partita as pa
from partita.compiler import bounds as properties
from partita.compiler.bounds import bound_slope
from partita.errors import DomainError, UnsupportedError
from partita.functions import parse
from partita.functions.differentiate import derivative
from partita.geometry import Box, ProductGrid
from partita.heads import GridHead, ScatteredHead
from partita.proofs.grid_proof import SoftGrid, prove_grid
from partita.proofs.head_graphs import MOST_KEYS, head_graph
from partita.proofs.weight_series import WeightSeries, slope_series, weight_series

SQUARE = pa.Box([-1, -1], [1, 1])
TEXTS = [
    "x0^3*sin(x1) - 2*x0",
    "exp(x0*x1)/(2 + x1^2)",
    "log(x0 + 3)*sqrt(x1 + 2)",
    "tan(x0/2) + atan(3*x1)*cos(x0)",
    "tanh(x0 - x1)*sigmoid(2*x1) + erf(x0)",
    "abs(x0 - 0.3) + relu(x1)*x0",
    "max(x0, x1^2) - min(x0, 0.2)",
    "clamp(x0*2, -1, 1)*x1",
    "where(x0 - x1, x0^2, 3*x1)",
    "sum(x0, x1, x0*x1, 3)",
    "(x0 + 2)^-3 + x1^0 + x1^1",
    "x1, x0*x1; 5, x0",
]


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("axis", [0, 1])
def test_derivatives_are_those_of_autograd(text, axis):
    graph = parse(text, ["x0", "x1"])
    z = torch.from_numpy(np.random.default_rng(0).uniform(-1, 1, (200, 2))).requires_grad_()
    out = graph.evaluate_torch(z).reshape(200, -1)
    expected = [
        torch.autograd.grad(o.sum(), z, retain_graph=True)[0][:, axis].numpy()
        if o.requires_grad
        else 0 * z[:, 0].detach().numpy()
        for o in out.T
    ]
    found = derivative(graph, axis)
    assert found.output_shape == graph.output_shape
    assert np.abs(found.evaluate(z.detach().numpy()).reshape(200, -1) - np.stack(expected, 1)).max() < 1e-12


def _true_slope(centers, rate, x):
    with mpmath.workdps(60):
        scores = [mpmath.exp(-mpmath.mpf(rate) * (mpmath.mpf(x) - mpmath.mpf(c)) ** 2 / 2) for c in centers]
        total = mpmath.fsum(scores)
        weights = [s / total for s in scores]
        mean = mpmath.fsum(w * mpmath.mpf(c) for w, c in zip(weights, centers))
        return [mpmath.mpf(rate) * w * (mpmath.mpf(c) - mean) for w, c in zip(weights, centers)]


@pytest.mark.parametrize("seed", range(6))
def test_slope_series_enclose_the_slopes(seed):
    """Against 60 digits, at the ends and inside, no tolerance; and a remainder a hundred times smaller would be false."""
    rng = np.random.default_rng(seed)
    centers = np.sort(rng.uniform(-1.5, 1.5, int(rng.integers(1, 9))))
    rate, middle, radius = float(10 ** rng.uniform(-1, 2.5)), rng.uniform(-1, 1, 3), 10.0 ** rng.uniform(-3, -1, 3)
    degree = int(rng.integers(1, 9))
    series = slope_series(weight_series(centers, rate, middle, radius, degree=degree), centers, rate, middle)
    ratios = []
    for n in range(3):
        for t in (-1.0, -0.4, 0.0, 0.7, 1.0):
            x = mpmath.mpf(float(middle[n])) + mpmath.mpf(float(radius[n])) * t
            for p, truth in enumerate(_true_slope(centers, rate, x)):
                with mpmath.workdps(60):
                    got = mpmath.fsum(
                        mpmath.mpf(float(c)) * mpmath.mpf(t) ** k for k, c in enumerate(series.coefficients[n, :, p])
                    )
                    off = abs(got - truth)
                    assert off <= mpmath.mpf(float(series.remainder[n, p]))
                    ratios.append(float(off / mpmath.mpf(float(series.remainder[n, p]))))
    assert len(centers) == 1 or max(ratios) > 1e-3


@pytest.mark.parametrize(
    ("text", "box", "tolerance"),
    [
        ("sin(3*x0) + x0*cos(2*x1)", SQUARE, 1e-5),
        ("1/(1 + 25*x0^2)", pa.Box([-1], [1]), 1e-3),
        pytest.param("x0*x1*sin(x2)", pa.Box([-1] * 3, [1] * 3), 5e-2, marks=pytest.mark.slow),
        pytest.param("exp(-x0^2 - x1^2)*sin(2*x2)", pa.Box([-1] * 3, [1] * 3), 1e-2, marks=pytest.mark.slow),
        ("x0*x1, sin(x0)", SQUARE, 1e-3),
        ("tanh(3*x0)*1e5", pa.Box([100], [101]), 1.0),
    ],
)
def test_gradient_errors_hold_and_are_tight(text, box, tolerance):
    c = pa.compile(text, box, tolerance=tolerance, method="fitted")
    found = c.bound_gradient_error()
    z = torch.from_numpy(np.concatenate([box.sample(20000, np.random.default_rng(9)), box.corners()])).requires_grad_()
    out = c.head.evaluate(z)
    truth = c.target.graph.evaluate_torch(z).reshape(len(z), -1)
    worst = np.zeros(box.dimension)
    for k in range(out.shape[1]):
        error = torch.autograd.grad((out[:, k] - truth[:, k]).sum(), z, retain_graph=True)[0]
        worst = np.maximum(worst, error.abs().amax(0).numpy())
    noise = 1e-9 * max(1.0, float(truth.detach().abs().max()))
    assert (worst <= np.array(found.bounds) + noise).all()
    assert (np.array(found.bounds) <= 1.5 * np.array(found.seen) + noise).all()


def test_a_planted_error_in_the_slopes_is_noticed(monkeypatch):
    """The law above can fail: slopes without the mean of the centers are not those of the weights."""
    c = pa.compile("sin(3*x0)", pa.Box([-1], [1]), tolerance=1e-4, method="fitted")
    honest = c.bound_gradient_error().bounds[0]

    def wrong(weights, centers, rate, middle):
        found = slope_series(weights, centers, rate, middle)
        return WeightSeries(1.001 * found.coefficients, found.remainder)

    monkeypatch.setattr("partita.proofs.grid_proof.slope_series", wrong)
    assert c.bound_gradient_error().bounds[0] > 1.5 * honest


HEADS = [
    ("sin(3*x0) + x0*cos(2*x1)", {"tolerance": 1e-4, "method": "fitted"}),
    ("sin(2*x0) + 0.3*x1", {"tolerance": 0.5, "method": "hard"}),
    pytest.param(
        "sin(3*x0) + x0*cos(2*x1)",
        {"tolerance": 0.3, "method": "hard"},
        id="thousands of keys",
        marks=pytest.mark.slow,
    ),
    ("sin(3*x0)", {"tolerance": 0.02, "method": "affine"}),
    ("max(x0, x1), x0 - x1", {"tolerance": 0.02, "method": "pieces"}),
    ("abs(x0^2 + x1 - 0.2)", {"tolerance": 0.1, "method": "adaptive"}),
    ("tanh(x0) + 0.1*x1", {"tolerance": 1e-3, "method": "fitted", "dtype": torch.float32}),
]


@pytest.mark.parametrize(("text", "options"), HEADS, ids=lambda v: v if isinstance(v, str) else v["method"])
def test_ranges_hold_and_are_tight(text, options):
    c = pa.compile(text, SQUARE, **options)
    z = np.concatenate([SQUARE.sample(50000, np.random.default_rng(3)), SQUARE.corners()])
    values = c(z).reshape(len(z), -1).astype(float)
    for k, found in enumerate(c.bound_range()):
        assert found.lo <= values[:, k].min() and values[:, k].max() <= found.hi
        assert found.hi - found.lo <= 1.15 * np.ptp(values[:, k])


def test_ranges_of_large_values():
    """A fitted head's values reach far beyond the head: their hull would say little."""
    c = pa.compile("1/(1 + 25*x0^2)", pa.Box([-1], [1]), tolerance=1e-8, method="fitted")
    found = c.bound_range()[0]
    assert -0.01 < found.lo < 0.04 and 1.0 - 1e-6 < found.hi < 1.01 and c.head.values.abs().max() > 1.1


@pytest.mark.parametrize(
    ("text", "trend"),
    [("tanh(2*x0) + x1^2", "increasing"), ("-exp(x0)*(2 + x1)", "decreasing"), ("sin(4*x0)", "unknown")],
)
def test_trends(text, trend):
    c = pa.compile(text, SQUARE, tolerance=1e-4, method="fitted")
    found = c.bound_slope(0)[0]
    assert found.trend == trend and found.lo <= found.seen_lo <= found.seen_hi <= found.hi


def test_what_cannot_be_asked():
    c = pa.compile("sin(3*x0) + x1", SQUARE, tolerance=0.001, method="affine")
    assert c.num_keys > MOST_KEYS
    with pytest.raises(UnsupportedError, match="jump from cell to cell"):
        c.bound_gradient_error()
    smooth = pa.compile("sin(x0)", SQUARE, tolerance=0.1, method="fitted")
    with pytest.raises(DomainError, match="axis is 2"):
        smooth.bound_slope(2)
    black = pa.compile(lambda z: np.sin(z[:, 0]), SQUARE, tolerance=0.1, method="fitted")
    with pytest.raises(UnsupportedError, match="black box"):
        black.bound_gradient_error()
    cloud = pa.compile("x0", pa.PointCloud([[0.0], [1.0]]), tolerance=0.1, method="hard")
    with pytest.raises(UnsupportedError, match="Box"):
        cloud.bound_range()


@pytest.mark.parametrize("kind", ["grid", "grid affine", "scattered", "scattered affine"])
@pytest.mark.parametrize("m", [1, 2])
def test_a_head_with_few_keys_is_an_expression(kind, m):
    generator = torch.Generator().manual_seed(m)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    n, shapes = (5, 4)[m - 1], {"input_shapes": ((m,),), "output_shape": (2,)}
    slopes = random(n, 2, m) if "affine" in kind else None
    if "grid" in kind:
        grid = ProductGrid.uniform(Box(-np.ones(m), np.ones(m)), (5, 2)[m - 1])
        head = GridHead(grid, 3.0 + np.arange(m), random(n, 2), value_slopes=slopes, half_windows=5, **shapes)
    else:
        head = ScatteredHead(random(n, m), 3.0, random(n, 2), powers=random(n), value_slopes=slopes, **shapes)
    graph, z = head_graph(head), random(200, m)
    assert np.abs(graph.evaluate(z.numpy()) - head.evaluate_dense(z).numpy()).max() < 1e-12
    inside = z.clamp(-1, 1).requires_grad_()
    slope = torch.autograd.grad(head.evaluate(inside)[:, 1].sum(), inside)[0][:, 0]
    found = bound_slope(head, Box(-np.ones(m), np.ones(m)), 0)[1]
    assert found.lo <= float(slope.min()) and float(slope.max()) <= found.hi
    assert found.hi - found.lo <= 1.6 * (found.seen_hi - found.seen_lo)


@pytest.mark.parametrize("text", ["tanh(3*x0 + x1)", "x0*x1", "max(x0, x1)", "x0/(1 + exp(-4*x0))"])
def test_two_keys_have_bounds_of_their_own(text):
    c = pa.compile(text, SQUARE, tolerance=1e-2)
    points = SQUARE.sample(20000, np.random.default_rng(3))
    z = torch.from_numpy(points).requires_grad_()
    values = c.head.evaluate(z)
    slopes = torch.autograd.grad(values.sum(), z)[0].numpy()
    (found,), low, high = c.bound_range(), values.detach().min().item(), values.detach().max().item()
    assert found.lo <= low and high <= found.hi and found.hi - found.lo <= 1.2 * (high - low)
    error = c.bound_gradient_error()
    for axis in (0, 1):
        (slope,) = c.bound_slope(axis)
        rounding = 1e-14  # of the gradients that autograd computes; the bounds are for exact arithmetic
        assert slope.lo - rounding <= slopes[:, axis].min() and slopes[:, axis].max() <= slope.hi + rounding
        truth = derivative(c.target.graph, axis).evaluate(points).reshape(-1)
        assert np.abs(truth - slopes[:, axis]).max() <= error.bounds[axis] + rounding


def test_two_sharp_keys_have_slopes():
    """The exponential of the scores overflows float64 over half of the domain."""
    c = pa.compile("abs(x0)", pa.Box([-1], [1]), tolerance=1e-6)
    assert c.num_keys == 2
    (slope,), error = c.bound_slope(0), c.bound_gradient_error()
    assert -1.3 < slope.lo <= -1 and 1 <= slope.hi < 1.3
    assert 1 <= error.bounds[0] < 1.3  # on one side of the kink the head has the slope of the middle


def test_the_proof_along_an_axis_is_about_that_axis():
    grid = SoftGrid(
        (np.linspace(-1, 1, 5), np.linspace(-1, 1, 4)), (4.0, 6.0), np.random.default_rng(0).normal(size=(5, 4, 1))
    )
    zero = parse("0*x0", ["x0", "x1"])
    both = [prove_grid(grid, zero, np.array([-1.0, -1]), np.array([1.0, 1]), goal=1e3, along=i).bound for i in (0, 1)]
    swapped = SoftGrid(grid.axes[::-1], grid.rates[::-1], grid.values.transpose(1, 0, 2))
    again = [
        prove_grid(swapped, zero, np.array([-1.0, -1]), np.array([1.0, 1]), goal=1e3, along=i).bound for i in (1, 0)
    ]
    assert np.allclose(both, again, rtol=1e-6) and both[0] != both[1]
    assert properties.Range(0.0, 1.0, 0.1, 0.9).trend == "increasing"
