"""One fixed layer reads every Lipschitz function from its prompt: along random and worst prompts, against its bounds."""

import copy

import numpy as np
import pytest
import scipy
import torch

import partita as pa
from partita.errors import (
    DomainError,
    LipschitzContradictedError,
    NonFiniteValueError,
    OutsideDomainError,
    ShapeError,
    SizeError,
    ToleranceError,
    UnsupportedError,
)
from partita.geometry.covers import fill_distance_bounds
from partita.networks import prompt_attention

LINE, SQUARE, CUBE = (pa.Box([-1.0] * m, [1.0] * m) for m in (1, 2, 3))
FAR = pa.Box([1000.0, -3.0], [1001.0, 5.0])
CASES = {  # box, L, ρ, tolerance, pairs
    "line": (LINE, 1.0, 0.1, 0.15, 80),
    "square": (SQUARE, 2.0, 0.25, 0.8, 400),
    "cube": (CUBE, 1.0, 0.5, 0.7, 500),
    "far": (FAR, 3.0, 0.5, 2.0, 300),
}


def layer(name, dtype=torch.float64, **options):
    box, lipschitz, rho, tolerance, _ = CASES[name]
    if dtype == torch.float32:
        options.setdefault("largest", 8 * lipschitz)
    return pa.in_context.function(
        lipschitz=lipschitz, fill_distance=rho, tolerance=tolerance, box=box, max_pairs=512, dtype=dtype, **options
    )


def single(x):
    """Numbers that float32 has as well."""
    return np.asarray(x).astype(np.float32).astype(np.float64)


def lipschitz_function(rng, box, lipschitz, kind):
    """Distances, lower and upper envelopes of cones (what McShane's extension gives), smooth waves: slope at most L."""
    m, corners = box.dimension, rng.uniform(box.lo, box.hi, (12, box.dimension))
    heights = rng.uniform(-1, 1, 12) * lipschitz
    direction = rng.standard_normal(m)
    direction *= lipschitz / np.linalg.norm(direction)

    def cones(z):
        return lipschitz * np.linalg.norm(z[:, None] - corners, axis=2)

    return {
        "distance": lambda z: cones(z).min(axis=1),
        "lower": lambda z: (heights + cones(z)).min(axis=1),
        "upper": lambda z: (heights - cones(z)).max(axis=1),
        "between": lambda z: ((heights - cones(z)).max(axis=1) + (heights + cones(z)).min(axis=1)) / 2,
        "plane": lambda z: (z - box.lo) @ direction,
        "wave": lambda z: np.sin((z - box.lo) @ direction),
    }[kind]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("name", CASES)
def test_every_function_is_read_within_the_bounds_along_random_prompts(name, dtype):
    box, lipschitz, rho, tolerance, pairs = CASES[name]
    g, rng = layer(name, dtype), np.random.default_rng(0)
    assert lipschitz * rho < g.error_bound <= tolerance
    for kind in ("distance", "lower", "upper", "between", "plane", "wave"):
        f = lipschitz_function(rng, box, lipschitz, kind)
        x, q = (
            single(rng.uniform(box.lo, box.hi, (pairs, box.dimension))),
            rng.uniform(box.lo, box.hi, (200, box.dimension)),
        )
        q = q[np.linalg.norm(q[:, None] - x, axis=2).min(axis=1) <= rho]
        assert len(q) > 120
        error = np.abs(g(x, f(x), q).double().numpy() - f(q))
        bounds = g.error_bound_at(x, f(x), q)
        assert (error <= bounds).all() and (bounds <= g.error_bound).all(), kind


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_the_bound_at_a_query_is_attained(dtype):
    """f(z) = L|z − q| is 0 at the query and its values are the distances themselves."""
    g, rng = layer("square", dtype), np.random.default_rng(1)
    x = single(rng.uniform(-1, 1, (300, 2)))
    for q in single(rng.uniform(-1, 1, (20, 2))):
        y = 2.0 * np.linalg.norm(x - q, axis=1)
        error, bound = float(g(x, y, q[None], check="none")[0]), g.error_bound_at(x, y, q[None])[0]
        assert 0.98 * bound <= error <= bound
        if dtype == torch.float64:
            assert error > 0.99999 * bound
            understated = copy.copy(g)
            understated.facts = type(g.facts)(**{**vars(g.facts), "lipschitz": 1.99})
            assert error > understated.error_bound_at(x, y, q[None])[0]  # negative control


def worst_prompt(g, pairs):
    """One pair at ρ from the query 0 and all others where the soft-maximum lemma is attained."""
    rate, rho = g.facts.rate, g.facts.fill_distance
    gap = float(scipy.special.lambertw((pairs - 1) / np.e).real)
    x = np.full((pairs, 1), np.sqrt(rho**2 + 2 * (gap + 1) / rate))
    x[0] = rho
    return x


def test_the_bound_for_all_prompts_is_nearly_attained_and_breaks_where_it_must():
    g = pa.in_context.function(lipschitz=1.0, fill_distance=0.1, tolerance=0.15, box=LINE, max_pairs=512)
    x = worst_prompt(g, 512)
    error = float(g(x, np.abs(x[:, 0]), [[0.0]])[0])
    assert 0.9 * g.error_bound < error <= g.error_bound
    softer = pa.in_context.function(lipschitz=1.0, fill_distance=0.1, tolerance=0.3, box=LINE, max_pairs=512)
    assert softer.facts.rate < g.facts.rate / 4
    x = worst_prompt(softer, 512)
    assert float(softer(x, np.abs(x[:, 0]), [[0.0]])[0]) > g.error_bound  # R too small
    x = worst_prompt(g, 512)
    assert float(g(x, 1.5 * np.abs(x[:, 0]), [[0.0]])[0]) > g.error_bound  # L understated
    sparse = np.array([[0.4], [-0.4]])
    assert float(g(sparse, np.abs(sparse[:, 0]), [[0.0]], check="none")[0]) > g.error_bound  # too few pairs
    few = pa.in_context.function(lipschitz=1.0, fill_distance=0.1, tolerance=0.15, box=LINE, max_pairs=4)
    many = worst_prompt(few, 512)  # one more reason: more pairs than R was chosen for
    spread = np.exp(-few.facts.rate / 2 * many[:, 0] ** 2)
    assert spread @ many[:, 0] / spread.sum() > few.error_bound


def test_nothing_that_sees_the_prompt_can_do_better_than_the_ratio_says():
    g = layer("line", noise=0.02)
    x = np.array([[-0.5], [0.5]])
    f = lambda z: np.abs(np.abs(z[:, 0]) - 0.5) + 0.02  # noqa: E731
    y = np.zeros(2)  # consistent with f and with −f
    q = np.array([[0.6]])
    assert np.abs(f(x) - y).max() <= 0.02
    worst = max(abs(float(g(x, y, q)[0]) - s * f(q)[0]) for s in (-1, 1))
    assert worst >= 0.1 + 0.02 - 1e-12
    assert g.optimal_ratio == pytest.approx(g.error_bound / (0.1 + 0.02))


def test_noise_adds_itself():
    g, rng = layer("line", noise=0.03), np.random.default_rng(2)
    x = rng.uniform(-1, 1, (80, 1))
    q = np.linspace(-0.9, 0.9, 200)[:, None]
    q = q[np.abs(q - x.T).min(axis=1) <= 0.1]
    for y in (x[:, 0] + 0.03, x[:, 0] + rng.uniform(-0.03, 0.03, 80)):
        error = np.abs(g(x, y, q).numpy() - q[:, 0])
        assert (error <= g.error_bound_at(x, y, q)).all() and error.max() <= g.error_bound
    deaf = layer("line")  # negative control: undeclared noise at the worst query breaks the bound at a query
    q, y = np.array([[0.2]]), np.abs(x[:, 0] - 0.2) + 0.03
    assert float(deaf(x, y, q, check="none")[0]) > deaf.error_bound_at(x, y, q)[0]


@pytest.mark.parametrize("outputs", [1, 3])
def test_the_written_layer_and_the_torch_module_are_the_same_function(outputs):
    g, rng = layer("far"), np.random.default_rng(3)
    x, q = rng.uniform(FAR.lo, FAR.hi, (200, 2)), rng.uniform(FAR.lo, FAR.hi, (7, 2))
    y = rng.uniform(-1, 1, (200, outputs))
    answer = g(x, y, q, check="none")
    middle = (FAR.lo + FAR.hi) / 2
    score = g.facts.rate * ((q - middle) @ (x - middle).T - 0.5 * ((x - middle) ** 2).sum(axis=1))
    weight = np.exp(score - score.max(axis=1, keepdims=True))
    assert np.allclose(answer, weight @ y / weight.sum(axis=1, keepdims=True), atol=1e-9)
    tokens, queries = g.tokens(x, y), g.query_tokens(q, outputs)
    assert tokens.shape == (3 + outputs, 200) and np.allclose(tokens[2], ((x - middle) ** 2).sum(axis=1))
    written = g.layer(outputs, 7)
    assert torch.allclose(written(tokens[None], queries[None])[0].T, answer, atol=1e-12)
    attention = prompt_attention(g, outputs)
    out, _ = attention(queries.T[None], tokens.T[None], tokens.T[None])
    assert torch.allclose(out[0, :, 3:], answer, atol=1e-12)
    other = layer("far").layer(outputs, 7)  # nothing depends on f, X or N
    assert all(torch.equal(a, b) for a, b in zip(written.buffers(), other.buffers()))


def test_batches_vectors_and_gradients():
    g, rng = layer("square"), np.random.default_rng(4)
    x, q = rng.uniform(-1, 1, (3, 400, 2)), rng.uniform(-0.9, 0.9, (3, 5, 2))
    y = np.stack([x[..., 0], np.abs(x[..., 1])], axis=-1)
    batch = g(x, y, q)
    assert batch.shape == (3, 5, 2) and g.error_bound_at(x, y, q).shape == (3, 5)
    for one in range(3):
        assert torch.allclose(batch[one], g(x[one], y[one], q[one]), atol=1e-12)
    assert torch.allclose(batch[..., 0], g(x, y[..., 0], q), atol=1e-12)
    assert g(x[0], y[0], q).shape == (3, 5, 2)  # one prompt, three lists of queries
    parts = [torch.tensor(t[0, :6], requires_grad=True) for t in (x, y[..., 0], q)]
    assert torch.autograd.gradcheck(lambda *t: g(*t, check="none"), parts)
    assert g(x[0], y[0, :, 0], np.empty((0, 2))).shape == (0,)
    compiled = torch.export.export(g, tuple(torch.tensor(t[0]) for t in (x, y[..., 0], q))).module()
    assert torch.allclose(compiled(*(torch.tensor(t[0]) for t in (x, y[..., 0], q))), batch[0, :, 0], atol=1e-12)


def test_one_pair_and_many_queries():
    g = pa.in_context.function(lipschitz=1.0, fill_distance=2.0, tolerance=2.1, box=LINE, max_pairs=1)
    assert g([[0.5]], [3.0], np.linspace(-1, 1, 1000)[:, None]).tolist() == [3.0] * 1000


def test_the_fill_distance_of_prompts_is_enclosed():
    rng = np.random.default_rng(5)
    for box, count in ((LINE, 7), (SQUARE, 30), (CUBE, 60), (FAR, 25)):
        x = rng.uniform(box.lo, box.hi, (count, box.dimension))
        low, high = fill_distance_bounds(x, box)
        seen = np.linalg.norm(rng.uniform(box.lo, box.hi, (20_000, 1, box.dimension)) - x, axis=2).min(axis=1).max()
        assert seen <= high and low <= high <= 1.011 * low
    low, high = fill_distance_bounds(
        np.array([[-0.5, -0.5], [0.5, 0.5], [-0.5, 0.5], [0.5, -0.5]]), SQUARE, accuracy=1e-6
    )
    assert low <= np.sqrt(0.5) <= high <= np.sqrt(0.5) * (1 + 1e-5)
    g, axis = layer("square"), np.linspace(-0.875, 0.875, 8)
    grid = np.stack(np.meshgrid(axis, axis), axis=-1).reshape(-1, 2)
    assert 0.125 * np.sqrt(2) <= g.check(grid, grid[:, 0]) <= 0.25
    g(grid, grid[:, 0], [[0.0, 0.0]], check="fill")
    g.check(np.delete(grid, 27, axis=0), np.delete(grid[:, 0], 27))  # exactly 0.25
    with pytest.raises(OutsideDomainError, match=r"between 0\.27\d* and 0\.2\d*, declared was 0\.25; .* ≤ 0\.7"):
        gone = [27, 28]
        g(np.delete(grid, gone, axis=0), np.delete(grid[:, 0], gone), [[0.9, 0.9]], check="fill")


def test_prompts_that_the_bound_does_not_cover_are_refused():
    g = layer("line")
    x = np.linspace(-1, 1, 21)[:, None]
    y = x[:, 0]
    for error, match, call in [
        (
            OutsideDomainError,
            r"query 1 is 0\.2 from the nearest of 10 pairs.*fill_distance 0\.1",
            (x[::2][:10], y[::2][:10], [[0.0], [1.0]]),
        ),
        (OutsideDomainError, "1 of 21 pairs lie outside the box", (x + 0.01, y, [[0.0]])),
        (OutsideDomainError, "1 of 2 queries lie outside the box", (x, y, [[0.0], [1.2]])),
        (OutsideDomainError, "y reaches 1e.30", (x, y * 1e30, [[0.0]])),
        (SizeError, "513 pairs.*max_pairs = 512", (np.zeros((513, 1)), np.zeros(513), [[0.0]])),
        (ShapeError, r"X \(21, 1\), y \(20,\)", (x, y[:20], [[0.0]])),
        (ShapeError, r"Q \(1, 2\)", (x, y, [[0.0, 0.0]])),
        (ShapeError, r"X \(0, 1\)", (x[:0], y[:0], [[0.0]])),
        (ShapeError, "a str that is not an array", ("x", y, [[0.0]])),
        (ShapeError, "complex64", (torch.zeros(1, 1, dtype=torch.complex64), y[:1], [[0.0]])),
        (NonFiniteValueError, "y has 1 numbers", (x, np.where(y == 0, np.nan, y), [[0.0]])),
    ]:
        with pytest.raises(error, match=match):
            g(*call)
    with pytest.raises(UnsupportedError, match=r"built for float64 and cast to torch\.float32"):
        layer("line").float()(x, y, [[0.0]])
    with pytest.raises(UnsupportedError, match="check is 'maybe'"):
        g(x, y, [[0.0]], check="maybe")
    with pytest.raises(LipschitzContradictedError, match=r"pairs 0 and 1 are 0\.1 apart and their values 0\.2"):
        g.check(x, 2 * y)
    assert g.check(x, y) <= 0.1 * (1 + 1e-9)


def test_layers_that_cannot_be_built_are_refused():
    ask = {"lipschitz": 1.0, "fill_distance": 0.1, "tolerance": 0.15, "box": LINE}
    with pytest.raises(
        ToleranceError, match=r"not above lipschitz · fill_distance \+ noise = 0\.15.*fill_distance below 0\.1"
    ):
        pa.in_context.function(**ask, noise=0.05)
    with pytest.raises(ToleranceError, match="too little for rounding in float32"):
        pa.in_context.function(**{**ask, "tolerance": 0.1000001}, dtype=torch.float32)
    with pytest.raises(ToleranceError, match=r"sums of 4,096 values up to 1e.15"):
        pa.in_context.function(**ask, largest=1e15)
    for change in (
        {"lipschitz": 0.0},
        {"fill_distance": -1.0},
        {"tolerance": np.nan},
        {"box": [0, 1, 2]},
        {"max_pairs": 0},
        {"noise": -1.0},
    ):
        with pytest.raises(DomainError, match="domain" if "box" in change else next(iter(change))):
            pa.in_context.function(**{**ask, **change})
    with pytest.raises(UnsupportedError, match="float16"):
        pa.in_context.function(**ask, dtype=torch.float16)


def test_scores_that_are_affine_in_x_cannot_do_it():
    """Three equally spaced points: the middle one never gets more than a third of the mass (`in-context-squares`)."""
    rng = np.random.default_rng(6)
    x, step = np.array([[-0.5], [0.0], [0.5]]), 0.5
    tent = np.array([0.0, step, 0.0])
    for _ in range(200):
        slope, scale = rng.normal(scale=10 ** rng.uniform(-2, 3)), rng.choice([1.0, rng.uniform(0.5, 4)])
        weight = np.exp(slope * x[:, 0] - (slope * x[:, 0]).max())
        weight /= weight.sum()
        constant = 1e9  # a constant function is L-Lipschitz
        errors = [abs(scale * weight @ (s * tent) - s * step) for s in (-1, 1)]
        errors += [abs(scale * constant * s - constant * s) for s in (-1, 1)]
        assert max(errors) >= 2 / 3 * step * (1 - 1e-6)
    g = pa.in_context.function(lipschitz=1.0, fill_distance=0.25, tolerance=0.3, box=pa.Box([-0.5], [0.5]), max_pairs=3)
    assert abs(float(g(x, tent, [[0.0]])[0]) - step) <= g.error_bound < 2 / 3 * step  # with the square it can
