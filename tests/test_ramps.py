"""The second paper's ramps: one head for all tokens, its constant, its layers, and the heads of two keys."""

import math

import mpmath
import numpy as np
import pytest
import torch
from dense import layers_oracle as oracle

import partita as pa
from partita.errors import DomainError, ShapeError, SizeError, ToleranceError, UnsupportedError
from partita.papers import max_affine_head, reassignment_layers, relu_head, sigmoid_head, silu_head, tanh_head
from partita.ramps import ramp, ramp_layers
from partita.ramps.anchors import (
    best_sharpness,
    fixed_beta_error,
    half_window_for,
    ramp_constant,
    soft_ramp_constant,
    window_excess,
)

ENDS = (-0.7, 2.1)
TOKEN = pa.Box([-3.0], [3.0])


def exact_mean(x: mpmath.mpf, anchors: int, kappa: float) -> mpmath.mpf:
    """E(x) over anchors 0 … p − 1, without the library."""
    weights = [mpmath.exp(-mpmath.mpf(kappa) * (x - k) ** 2 / 2) for k in range(anchors)]
    return mpmath.fsum(k * w for k, w in enumerate(weights)) / mpmath.fsum(weights)


def attack_points(p: int, rng: np.random.Generator, count: int = 20_000) -> np.ndarray:
    """Values of u: everywhere, at the ends and beyond, beside the middles between anchors, where a ramp errs most."""
    low, high = ENDS
    spacing = (high - low) / (p - 1)
    cells = rng.integers(0, p - 1, count)
    offsets = 0.5 + np.concatenate([rng.uniform(-0.5, 0.5, count // 2), 0.02 * rng.standard_normal(count - count // 2)])
    near_ends = np.concatenate(
        [low + 2 * spacing * rng.uniform(-1, 1, 500), high + 2 * spacing * rng.uniform(-1, 1, 500)]
    )
    points = np.concatenate(
        [low + (cells + offsets) * spacing, near_ends, [low, high, -3.0, 3.0], rng.uniform(-3, 3, 500)]
    )
    return points.clip(-3, 3)


def seen(built, u: np.ndarray) -> np.ndarray:
    """|head − ramp| at values of u, with w = 1, t = 0, in float64."""
    u = u.astype(np.float32 if built.head.dtype == torch.float32 else np.float64).astype(np.float64)
    answer = built.head(torch.from_numpy(u)[:, None]).double().numpy()[:, 0]
    return np.abs(answer - u.clip(*ENDS))


@pytest.mark.parametrize("kappa", [1.0, 2.5, 4.0, 5.4, 8.0, 64.0])
@pytest.mark.parametrize("p", [2, 3, 12])
def test_the_constant_is_the_supremum(p, kappa):
    with mpmath.workdps(30):
        grid = np.unique(np.concatenate([np.linspace(0, (p - 1) / 2, 150), 0.5 + np.linspace(-0.5, 0.5, 300)]))
        largest = max(abs(exact_mean(mpmath.mpf(x), p, kappa) - x) for x in grid)
    assert largest <= ramp_constant(p, kappa) <= float(largest) * 1.01
    assert not largest <= 0.9 * ramp_constant(p, kappa)  # negative control


@pytest.mark.parametrize(("kappa", "constant"), [(4.0, 0.120), (5.4, 0.063), (8.0, 0.135), (1e6, 0.5)])
def test_the_constants_of_the_design(kappa, constant):
    assert abs(ramp_constant(1000, kappa) - constant) < 1e-3


def test_the_formula_of_the_ends_and_the_best_temperature():
    """At the ends the bias is Σ k e^{−κk²/2}/Σ e^{−κk²/2}; below the best κ it is what counts."""
    for kappa in (3.0, 4.0, 5.0):
        weights = [mpmath.exp(-mpmath.mpf(kappa) * k * k / 2) for k in range(40)]
        edge = mpmath.fsum(k * w for k, w in enumerate(weights)) / mpmath.fsum(weights)
        assert edge <= ramp_constant(200, kappa) <= float(edge) * (1 + 1e-4)
    best = best_sharpness(64)
    assert 5.3 < best < 5.6
    assert all(ramp_constant(64, best) <= ramp_constant(64, k) * 1.001 for k in (5.0, 5.3, 5.6, 6.0))


@pytest.mark.parametrize("kappa", [2.0, 5.44, 64.0])
def test_a_window_changes_next_to_nothing(kappa):
    q = half_window_for(kappa)
    short, long = 2 * q, 2 * q + 31
    x = mpmath.mpf(q) - mpmath.mpf("0.3")
    with mpmath.workdps(40):
        moved = abs(exact_mean(x, short, kappa) - exact_mean(x, long, kappa))
    assert moved <= window_excess(kappa, q) < 1e-15


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("sharpness", ["best", "hard", 1.0, 2.5])
@pytest.mark.parametrize("p", [2, 3, 16, 1000, 100_000])
def test_the_head_is_within_its_bound_and_not_within_less(p, sharpness, dtype):
    built = ramp([1.0], 0.0, ENDS, anchors=p, domain=TOKEN, sharpness=sharpness, dtype=dtype)
    error = seen(built, attack_points(p, np.random.default_rng(p)))
    assert error.max() <= built.error_bound
    assert built.error_bound <= 0.75 * built.spacing
    if p <= 1000:
        assert error.max() > 0.9 * built.certificate.terms[0].value  # a bound 10 % smaller would be false


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("sharpness", ["hard", "best"])
def test_the_error_falls_like_one_over_p(sharpness, dtype):
    sizes = np.array([16, 64, 256, 1024, 4096, 16_384, 100_000])
    sizes = sizes if sharpness == "hard" else sizes[:4]
    errors = []
    for p in sizes:
        built = ramp([1.0], 0.0, ENDS, anchors=int(p), domain=TOKEN, sharpness=sharpness, dtype=dtype)
        errors.append(seen(built, attack_points(int(p), np.random.default_rng(0))).max())
    slope = np.polyfit(np.log(sizes - 1), np.log(errors), 1)[0]
    assert abs(slope + 1) <= 0.02


def fixed_beta_errors(sizes, beta, dtype=torch.float64):
    """The head's largest error and the built ramp for each p at one β, attacked at the ends, where soft heads err most."""
    for p in sizes:
        built = ramp([1.0], 0.0, ENDS, anchors=int(p), domain=TOKEN, beta=beta, dtype=dtype)
        u = np.concatenate([attack_points(int(p), np.random.default_rng(0), 4000), *([e] * 2 for e in ENDS)])
        yield built, seen(built, u).max()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("beta", [0.05, 1.0, 25.0])
def test_at_a_fixed_beta_the_error_is_what_the_theorem_says(beta, dtype):
    for built, error in fixed_beta_errors((2, 3, 40, 1000, 30_000), beta, dtype):
        spacing, p = built.spacing, built.head.anchors
        kappa, limit = 2 * beta * spacing, math.sqrt(spacing / (math.pi * beta))
        assert built.beta == pytest.approx(beta, rel=1e-6)
        assert error <= built.error_bound
        assert error <= fixed_beta_error(spacing, beta) + 1e-5 * (dtype == torch.float32)
        if dtype == torch.float64:
            assert built.error_bound <= fixed_beta_error(spacing, beta) * (1 + 1e-6)
        cut = math.exp(min(kappa / 8 - kappa * (p - 0.5) ** 2 / 2, 50.0))
        least = limit * (1 - math.sqrt(kappa / math.e) - cut) / (1 + math.sqrt(2 * kappa / math.pi))
        assert error >= least - 1e-5 * (dtype == torch.float32)
        if kappa < 1e-3 and p >= 1000:
            assert error > 0.95 * limit  # negative control: the limit is attained
            assert error > 5 * ramp_constant(p, best_sharpness(64)) * spacing


def test_a_fixed_beta_falls_like_the_root_and_a_growing_one_like_one_over_p():
    sizes = np.array([300, 3000, 30_000, 300_000])
    root = [error for _, error in fixed_beta_errors(sizes, 1.0)]
    assert abs(np.polyfit(np.log(sizes - 1), np.log(root), 1)[0] + 0.5) < 0.02
    assert [b.beta for b, _ in fixed_beta_errors([300, 3000], 1.0)] == pytest.approx([1.0, 1.0])
    best = [ramp([1.0], 0.0, ENDS, anchors=int(p), domain=TOKEN) for p in sizes]
    slopes = np.polyfit(np.log(sizes - 1), np.log([[b.error_bound, b.beta] for b in best]), 1)[0]
    assert np.abs(slopes - [-1, 1]).max() < 0.01  # negative control: the error falls like 1/p exactly as β grows like p


@pytest.mark.parametrize("kappa", [1e-5, 1e-3, 0.03, 0.3, 1.0, 5.0, 6.0, 40.0])
def test_the_closed_form_holds_for_every_row_and_temperature(kappa):
    """Against the exact mean at whole and half numbers and between, for one-sided rows and short ones."""
    with mpmath.workdps(25):
        for p in (2, 3, 9, min(400, int(12 / math.sqrt(kappa)) + 10)):
            x = [mpmath.mpf(v) for v in (0, 0.25, 0.5, 0.75, 1, 1.5, (p - 1) / 2)]
            worst = max(abs(exact_mean(v, p, kappa) - v) for v in x if v <= p - 1)
            assert worst <= soft_ramp_constant(kappa)
            halves = max(abs(exact_mean(v, p, kappa) - v) for v in x if 2 * v == int(2 * v) and v <= p - 1)
            assert halves <= soft_ramp_constant(kappa) - 0.5 + 1e-12
    if kappa <= 1e-3:
        assert worst > 0.2 * soft_ramp_constant(kappa)


@pytest.mark.parametrize("n", [1, 2, 7, 10_000])
def test_every_token_has_its_own_ramp(n):
    rng = np.random.default_rng(n)
    w, t = rng.normal(size=(n, 3)), 0.3 * rng.normal(size=n)
    built = ramp(w, t, ENDS, anchors=100_000 if n == 10_000 else 50, domain=pa.Box([-1] * 3, [1] * 3), output=(2, 4))
    x = rng.uniform(-1, 1, size=(2, n, 3))
    out = built.head(torch.from_numpy(x)).numpy()
    assert out.shape == (2, n, 4)
    assert np.abs(out[..., 2] - ((x * w).sum(-1) + t).clip(*ENDS)).max() <= built.error_bound
    assert not out[..., [0, 1, 3]].any()
    swapped = np.abs(out[..., 2] - ((x[:, ::-1] * w).sum(-1) + t).clip(*ENDS)).max()
    assert n == 1 or swapped > 10 * built.error_bound  # negative control: tokens are told apart


def test_one_slope_serves_any_number_of_tokens():
    built = ramp([0.5, -1.0], 0.2, ENDS, anchors=40, domain=pa.Box([-1, -1], [1, 1]))
    for shape in [(2,), (5, 2), (3, 4, 2)]:
        assert built.head(torch.zeros(shape, dtype=torch.float64)).shape == (*shape[:-1], 1)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_it_is_the_first_papers_head_in_one_dimension(dtype):
    built = ramp([1.0], 0.0, ENDS, anchors=40, domain=TOKEN, sharpness=5.4, dtype=dtype)
    u = torch.from_numpy(np.random.default_rng(0).uniform(*ENDS, 500)).to(dtype)[:, None]
    grid = built.head.as_grid_head()
    tolerance = 1e-12 if dtype == torch.float64 else 1e-5
    assert torch.allclose(built.head(u)[:, 0], grid(u), rtol=0, atol=tolerance)
    nearest = np.abs(u.double().numpy() - np.linspace(*ENDS, 40)).argmin(axis=1)
    assert np.array_equal(built.partition.cell(u.double().numpy()), nearest)
    assert not torch.allclose(built.head(u)[:, 0] + 1e-3, grid(u), rtol=0, atol=tolerance)


@pytest.mark.parametrize(
    ("p", "dtype"),
    [(2, torch.float64), (16, torch.float64), (500, torch.float64), (16, torch.float32), (200, torch.float32)],
)
@pytest.mark.parametrize("sharpness", ["best", "hard"])
@pytest.mark.parametrize("tokens", [1, 5])
def test_the_layers_are_within_their_bound(tokens, sharpness, p, dtype):
    rng = np.random.default_rng(p)
    w, t = rng.normal(size=(tokens, 2)), 0.3 * rng.normal(size=tokens)
    built = ramp(
        w, t, ENDS, anchors=p, domain=pa.Box([-1, -1], [1, 1]), sharpness=sharpness, output=(1, 2), dtype=dtype
    )
    layers = ramp_layers(built)
    x = np.concatenate([rng.uniform(-1, 1, size=(1000, tokens, 2)), rng.choice([-1.0, 1.0], size=(50, tokens, 2))])
    x = x.astype(np.float32).astype(np.float64)
    x = _towards_kinks(x, w, t, built.spacing, rng).astype(np.float32).astype(np.float64).clip(-1, 1)
    out = layers(torch.from_numpy(x)).double().numpy()
    error = np.abs(out[..., 1] - ((x * w).sum(-1) + t).clip(*ENDS)).max()
    assert error <= layers.error_bound
    assert not out[..., 0].any()
    assert built.error_bound <= layers.error_bound * (1 + 1e-6) or dtype == torch.float32
    if dtype == torch.float64 and tokens == 1:
        assert error > 0.85 * layers.error_bound  # negative control: a smaller bound would be false


def _towards_kinks(x, w, t, spacing, rng):
    """Half of the sequences moved so that u comes to lie near the middle between two anchors."""
    u = (x * w).sum(-1) + t
    aim = ENDS[0] + (np.floor((u - ENDS[0]) / spacing) + 0.5 + 0.02 * rng.standard_normal(u.shape)) * spacing
    moved = x + ((aim - u) / (w**2).sum(-1))[..., None] * w
    x[::2] = moved[::2]
    return x


def test_the_layers_tensors_say_what_they_should():
    """The oracle multiplies the named tensors with numpy; tampering with one shows."""
    built = ramp([[1.0, 0.5], [0.2, -1.0]], [0.1, 0.3], ENDS, anchors=9, domain=pa.Box([-1, -1], [1, 1]), sharpness=6.0)
    network = ramp_layers(built)
    x = np.random.default_rng(0).uniform(-1, 1, size=(2, 2))
    expected = built.head(torch.from_numpy(x)).numpy()
    assert np.allclose(
        oracle({k: v.numpy() for k, v in network.state_dict().items()}, x.T).T, expected, rtol=0, atol=1e-11
    )
    network.attention.w_k.mul_(1.1)
    assert not np.allclose(network(torch.from_numpy(x)).numpy(), expected, rtol=0, atol=1e-4)


def test_fewer_anchors_than_tokens():
    built = ramp(np.ones((5, 1)), 0.0, (0, 1), anchors=2, domain=TOKEN, sharpness=4.0)
    x = torch.linspace(-1, 2, 5, dtype=torch.float64).reshape(5, 1)
    assert torch.allclose(ramp_layers(built)(x), built.head(x), atol=1e-12)


@pytest.mark.parametrize("sharpness", ["best", "hard"])
def test_layers_refuse_what_their_dtype_does_not_carry(sharpness):
    built = ramp([1.0], 0.0, ENDS, anchors=4096, domain=TOKEN, sharpness=sharpness, dtype=torch.float32)
    with pytest.raises(SizeError, match=r"At most \d+ anchors fit in float32"):
        ramp_layers(built)
    ramp_layers(ramp([1.0], 0.0, ENDS, anchors=4096, domain=TOKEN, sharpness=sharpness))  # float64 does
    u = torch.from_numpy(attack_points(4096, np.random.default_rng(0), 500).astype(np.float32))[:, None, None]
    forced = ramp_layers(ramp([1.0], 0.0, ENDS, anchors=4096, domain=TOKEN, sharpness=sharpness)).float()
    error = (forced(u)[:, 0, 0].double() - u[:, 0, 0].double().clamp(*ENDS)).abs().max().item()
    assert error > built.error_bound  # the reason: as dot products it would be worse than what the folded head promises


@pytest.mark.parametrize(
    ("kind", "match", "options"),
    [
        (DomainError, "a < b", {"ends": (1.0, 1.0)}),
        (DomainError, "a < b", {"ends": (2.0, -1.0)}),
        (DomainError, "a < b", {"ends": (0.0, math.inf)}),
        (DomainError, "integer ≥ 2", {"anchors": 1}),
        (DomainError, "integer ≥ 2", {"anchors": 2.5}),
        (DomainError, "sharpness", {"sharpness": 1e-9}),
        (DomainError, "sharpness", {"beta": 1e9}),
        (DomainError, "one of them", {"beta": 1.0, "sharpness": 4.0}),
        (DomainError, "beta", {"beta": -1.0}),
        (DomainError, "beta", {"beta": math.inf}),
        (DomainError, "beta", {"beta": math.nan}),
        (DomainError, "integer ≥ 2", {"beta": 1.0, "anchors": 1}),
        (DomainError, "best", {"sharpness": "soft"}),
        (ShapeError, "slopes", {"slopes": [[1.0, 2.0]]}),
        (ShapeError, "offsets", {"offsets": [1.0, 2.0, 3.0]}),
        (ShapeError, "finite", {"slopes": [math.nan]}),
        (ShapeError, "coordinate", {"output": (2, 2)}),
        (UnsupportedError, "float16", {"dtype": torch.float16}),
        (SizeError, "float32", {"dtype": torch.float32, "anchors": 1 << 22}),
    ],
)
def test_bad_ramps(kind, match, options):
    given = {"slopes": [1.0], "offsets": 0.0, "ends": (0.0, 1.0), "anchors": 8, "domain": TOKEN} | options
    with pytest.raises(kind, match=match):
        ramp(given.pop("slopes"), given.pop("offsets"), given.pop("ends"), **given)


def test_layers_for_another_number_of_tokens():
    with pytest.raises(ShapeError, match="slopes for 2"):
        ramp_layers(ramp(np.ones((2, 1)), 0.0, (0, 1), anchors=4, domain=TOKEN), 3)


BOX = pa.Box([-2, 1], [2, 3])
W, T = np.array([1.5, -0.7]), 0.3


def points_and_line(count=5000):
    x = np.concatenate([BOX.sample(count, np.random.default_rng(0)), BOX.corners()]).astype(np.float32).astype(float)
    return x, x @ W + T


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("tolerance", [0.1, 1e-3])
def test_relu_in_two_keys(tolerance, dtype):
    built = relu_head(W, T, BOX, tolerance=tolerance, dtype=dtype)
    x, u = points_and_line()
    beta = 0.2785 / tolerance
    near = x - ((u - 1.2785 / beta * np.random.default_rng(1).uniform(-2, 2, len(u))) / (W @ W))[:, None] * W
    x = np.concatenate([x, near[BOX.contains(near)]]).astype(np.float32).astype(float)
    error = np.abs(built.head(torch.from_numpy(x)).double().numpy() - np.maximum(x @ W + T, 0))
    assert built.head.num_keys == 2
    assert error.max() <= built.certificate.error_bound <= tolerance
    assert error.max() > 0.9 * built.certificate.terms[0].value  # 0.2785/β is attained: 10 % less would be false


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize(
    ("build", "exact"),
    [
        (silu_head, lambda u: u / (1 + mpmath.exp(-u))),
        (tanh_head, mpmath.tanh),
        (sigmoid_head, lambda u: 1 / (1 + mpmath.exp(-u))),
    ],
)
def test_silu_tanh_and_sigmoid_are_exact(build, exact, dtype):
    built = build(W, T, BOX, dtype=dtype)
    x, _ = points_and_line(300)
    out = built.head(torch.from_numpy(x)).double().numpy()[:, 0]
    with mpmath.workdps(30):
        lines = [mpmath.fdot(map(mpmath.mpf, row), map(mpmath.mpf, W)) + mpmath.mpf(T) for row in x]
        error = max(abs(mpmath.mpf(o) - exact(u)) for o, u in zip(out, lines))
        wrong = max(abs(mpmath.mpf(o) - exact(u * mpmath.mpf("1.01"))) for o, u in zip(out, lines))
    assert error <= built.certificate.error_bound < (1e-12 if dtype == torch.float64 else 1e-3)
    assert wrong > built.certificate.error_bound  # negative control
    assert built.head.num_keys == 2
    network = reassignment_layers(built, 1)
    assert np.abs(network(torch.from_numpy(x[:, None])).double().numpy()[:, 0, 0] - out).max() <= 1e-9 + 1e-4 * (
        dtype == torch.float32
    )


@pytest.mark.parametrize("pieces", [1, 3, 8])
def test_max_affine_functions_are_within_the_soft_maximum(pieces):
    rng = np.random.default_rng(pieces)
    a, b = rng.normal(size=(pieces, 2)), rng.normal(size=pieces)
    built = max_affine_head(a, b, BOX, tolerance=0.01)
    x = BOX.sample(4000, rng)
    error = np.abs(built.head(torch.from_numpy(x)).numpy() - (x @ a.T + b).max(axis=1)).max()
    assert error <= built.certificate.error_bound <= 0.01
    assert built.head.num_keys <= pieces


def test_bad_heads_of_two_keys():
    with pytest.raises(ShapeError, match="slope"):
        tanh_head([1.0], 0.0, BOX)
    with pytest.raises(DomainError, match="the slope is 0"):
        silu_head([0.0, 0.0], 1.0, BOX)
    with pytest.raises(ShapeError, match="offsets"):
        max_affine_head([[1.0, 2.0]], [0.0, 1.0], BOX, tolerance=0.1)
    with pytest.raises(ToleranceError):
        relu_head(W, T, BOX, tolerance=1e-9, dtype=torch.float32)
