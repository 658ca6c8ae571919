"""Positions: what layers without them cannot do, and what shared token weights with encodings can, against their bounds."""

import itertools

import numpy as np
import pytest
import torch
from torch import nn

import partita as pa
from partita.errors import (
    DomainError,
    NotContinuousError,
    NothingKnownError,
    ShapeError,
    SizeError,
    ToleranceError,
    UnsupportedError,
)
from partita.functions.target import make_target
from partita.heads.layers import LinearSum
from partita.papers import (
    equivariance_gap,
    linear_as_attention,
    positional_head,
    rotary_convolution,
    shared_weights,
)

TWO, THREE = (pa.Box.sequence(-1, 1, tokens=n, dim=1) for n in (2, 3))
ASYMMETRIC = {  # targets with one output per token, and their exact distance from equivariant functions
    "x0; 0*x1": 0.5,
    "x1; x1": 1.0,
    "x0; x1^2": 1.0,
    "x0; x1": 0.0,
    "x0*x1; x0*x1": 0.0,
}


def test_the_lower_bound_is_half_the_asymmetry_and_is_attained():
    """The middle of f over all orders is equivariant, and no farther from f than the bound."""
    grid = np.linspace(-1, 1, 41)
    points = np.stack(np.meshgrid(grid, grid, indexing="ij"), axis=-1)
    functions = {
        "x0; 0*x1": lambda a, b: (a, 0 * b),
        "x1; x1": lambda a, b: (b, b),
        "x0; x1^2": lambda a, b: (a, b**2),
        "x0; x1": lambda a, b: (a, b),
        "x0*x1; x0*x1": lambda a, b: (a * b, a * b),
    }
    for text, exact in ASYMMETRIC.items():
        gap = equivariance_gap(text, TWO)
        assert exact * (1 - 1e-9) <= gap.lower_bound <= exact, text
        a, b = points[..., 0], points[..., 1]
        here, there = functions[text](a, b), functions[text](b, a)
        middle = (here[0] + there[1]) / 2, (here[1] + there[0]) / 2
        assert max(np.abs(m - h).max() for m, h in zip(middle, here)) == pytest.approx(exact, abs=1e-12)
        assert np.allclose(middle[0], middle[1].T)  # the middle is equivariant


class Encoder(nn.Module):
    """A standard block without positions between two token-wise maps."""

    def __init__(self, dim: int, out: int, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.into, self.out = nn.Linear(dim, 16), nn.Linear(16, out)
        self.block = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)

    def forward(self, z):
        return self.out(self.block(self.into(z)))


@pytest.mark.parametrize("text", ["x0; 2*x1; x2*x0", "sin(3*x1); x0; max(x2, x0)", "x2; x2; x2"])
def test_every_equivariant_layer_obeys_the_bound_at_the_witness(text):
    gap = equivariance_gap(text, THREE)
    assert gap.lower_bound > 0.4
    pair = torch.tensor(np.stack([gap.point, gap.point[list(gap.order)]]))
    f = make_target(text, THREE)
    wanted = torch.from_numpy(f(pair.reshape(2, -1).numpy())).reshape(2, 3, 1)
    for seed in range(8):
        layer = Encoder(1, 1, seed).double().eval()
        with torch.no_grad():
            error = float((layer(pair) - wanted).abs().max())
        assert error >= gap.lower_bound - 1e-9
    positions = torch.eye(3, dtype=torch.float64).expand(2, 3, 3)
    encoded = Encoder(4, 1, 0).double()  # negative control: with positions the same block fits the two sequences
    optimizer = torch.optim.Adam(encoded.parameters(), 0.01)
    for _ in range(150):
        loss = (encoded(torch.cat([pair, positions], dim=2)) - wanted).abs().max()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert float(loss.detach()) < 0.5 * gap.lower_bound


def test_training_does_not_beat_the_bound():
    gap = equivariance_gap("x1; x1; x1", THREE)
    layer = Encoder(1, 1, 0).double()
    optimizer, rng = torch.optim.Adam(layer.parameters(), 0.01), np.random.default_rng(0)
    for _ in range(100):
        z = torch.tensor(rng.uniform(-1, 1, (64, 3, 1)))
        loss = (layer(z) - z[:, 1:2]).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    pair = torch.tensor(np.stack([gap.point, gap.point[list(gap.order)]]))
    assert float((layer(pair) - pair[:, 1:2]).abs().max().detach()) >= gap.lower_bound - 1e-9


def test_shifts_invariants_and_longer_sequences():
    box = pa.Box.sequence(-1, 1, tokens=4, dim=2)
    cyclic = "; ".join(f"x{(2 * i - 2) % 8}, x{(2 * i + 1) % 8}" for i in range(4))  # token i − 1, coordinate 0
    assert equivariance_gap(cyclic, box, group="shifts").lower_bound == 0
    assert equivariance_gap(cyclic, box).lower_bound > 0.99
    pooled = equivariance_gap("x0 - x2", box)
    assert not pooled.acts_on_output and 1.99 < pooled.lower_bound <= 2
    assert equivariance_gap("x0 + x2 + x4 + x6", box).lower_bound == 0
    long = equivariance_gap("; ".join(["x7"] * 8), pa.Box.sequence(0, 3, tokens=8, dim=1), samples=100)
    assert 1.49 < long.lower_bound <= 1.5 and sorted(long.order) == list(range(8))
    shifted = pa.Box([[-1], [0]], [[1], [2]])  # only tokens in [0, 1] can change places
    assert 0.49 < equivariance_gap("x0; x0", shifted).lower_bound <= 0.5


def test_gaps_that_cannot_be_computed_are_refused():
    with pytest.raises(NothingKnownError, match="as an expression"):
        equivariance_gap(lambda z: np.sort(z, axis=1), TWO)
    with pytest.raises(ShapeError, match="box of sequences"):
        equivariance_gap("x0", pa.Box([-1], [1]))
    with pytest.raises(DomainError, match="no common point"):
        equivariance_gap("x0; x1", pa.Box([[0], [2]], [[1], [3]]))
    with pytest.raises(UnsupportedError, match="rotations"):
        equivariance_gap("x0; x1", TWO, group="rotations")


def random_linear(rng, terms, rows, columns, dtype=torch.float64):
    tensors = (
        rng.normal(size=(terms, rows[1], rows[0])),
        rng.normal(size=(terms, *columns)),
        rng.normal(size=(rows[1], columns[1])),
    )
    return LinearSum(*(torch.tensor(t, dtype=dtype) for t in tensors))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("columns", [(1, 1), (3, 3), (5, 9), (6, 2)])
def test_an_attention_with_one_hot_positions_is_the_linear(columns, dtype):
    rng = np.random.default_rng(0)
    linear = random_linear(rng, 3, (2, 4), columns, dtype)
    attention = linear_as_attention(linear)
    z = torch.tensor(rng.uniform(-1, 1, (20, 2, columns[0])), dtype=dtype)
    exact = LinearSum(*(t.double() for t in (linear.left, linear.right, linear.constant)))(z.double())
    bound = attention.rounding_bound(np.ones((2, columns[0])))
    error = (attention(z).double() - exact).abs().amax(dim=(0, 2)).numpy()
    assert (error <= bound).all() and bound.max() < (1e-9 if dtype == torch.float64 else 0.5)
    y = attention.encoded(z)  # the layer as it is written: shared W_Q, W_K = [0 I] and W_V on encoded tokens
    assert torch.equal(y[0, 2:], torch.eye(y.shape[2], dtype=dtype))
    keys, queries = y[:, None, 2:], attention.w_q @ y[:, None, 2:]
    written = (attention.w_v @ y[:, None] @ torch.softmax(keys.transpose(-1, -2) @ queries, dim=-2)).sum(dim=1)
    assert torch.allclose(written[..., : columns[1]], attention(z), atol=1e-12 if dtype == torch.float64 else 1e-3)
    # the weights are shared: an attention matrix for each head, independent of the tokens, with positive entries
    weights = torch.softmax(attention.w_q, dim=-2)
    assert (weights > 0).all() and torch.allclose(weights.sum(dim=-2), torch.ones((), dtype=dtype), atol=1e-5)


def test_without_the_encodings_it_is_not():
    """Negative control: the same heads with one encoding for all positions."""
    rng = np.random.default_rng(1)
    linear = random_linear(rng, 2, (2, 2), (4, 4))
    attention = linear_as_attention(linear)
    z = torch.tensor(rng.uniform(-1, 1, (8, 2, 4)))
    blind = linear_as_attention(linear)
    blind.w_q.copy_(blind.w_q.mean(dim=2, keepdim=True).expand_as(blind.w_q))  # every position asks the same question
    assert float((attention(z) - linear(z)).abs().max()) < 1e-12 < 0.1 < float((blind(z) - linear(z)).abs().max())


@pytest.mark.parametrize("text", ["x0*x1; x0 - x1", "x1, x0; sin(2*x2), x3*x0"])
def test_theorem_4_1_with_shared_token_weights(text):
    dim = 1 if "x3" not in text else 2
    box = pa.Box.sequence(-1, 1, tokens=2, dim=dim)
    c = pa.compile(text, box, tolerance=0.4 if dim == 1 else 1.5, method="hard")
    network = c.layers(form="log")
    shared = shared_weights(network)
    rng = np.random.default_rng(2)
    z = torch.tensor(rng.uniform(-1, 1, (30, 2, dim)))
    rounding = shared.rounding_bound(box)
    assert rounding < 1e-4
    f = torch.from_numpy(c.target(z.reshape(30, -1).numpy())).reshape(30, *c.target.output_shape)
    assert float((shared(z) - f).abs().max()) <= c.error_bound + rounding
    assert float((shared(z) - c(z)).abs().max()) <= 2 * rounding
    assert float((shared(z[0]) - c(z[0])).abs().max()) <= 2 * rounding
    blind = shared_weights(network)  # negative control
    blind.first.w_q.copy_(blind.first.w_q.mean(dim=2, keepdim=True).expand_as(blind.first.w_q))
    assert float((blind(z) - c(z)).abs().max()) > 0.5
    assert dim == 2 or float((blind(z) - f).abs().max()) > c.error_bound + rounding
    with pytest.raises(UnsupportedError, match="mixes tokens"):
        shared_weights(c.layers(form="indexed"))


def test_large_linears_are_refused():
    zeros = torch.zeros
    with pytest.raises(SizeError, match="3,000 columns"):
        linear_as_attention(LinearSum(zeros(1, 1, 1), zeros(1, 1, 3000), zeros(1, 3000)))


FUNCTIONS = ["x0 + x1", "sin(2*x0)*x1", "abs(x0 - x1)"]
SQUARE = pa.Box([-1, -1], [1, 1])
ONE_HOT = np.hstack([np.zeros((3, 2)), 2 * np.eye(3)])
ADDITIVE = np.array([[0.0, 0.0], [3.5, 0.5], [-1.0, 4.0]])


def exactly(z):
    a, b = z[..., 0], z[..., 1]
    return np.stack([(a + b)[:, 0], (np.sin(2 * a) * b)[:, 1], np.abs(a - b)[:, 2]], axis=1)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("encodings", [ONE_HOT, ADDITIVE], ids=["one-hot", "additive"])
def test_one_shared_head_computes_another_function_at_each_position(encodings, dtype):
    built = positional_head(FUNCTIONS, encodings, SQUARE, tolerance=0.25, dtype=dtype)
    assert built.error_bound <= 0.25
    rng = np.random.default_rng(3)
    z = np.concatenate([rng.uniform(-1, 1, (3000, 3, 2)), rng.choice([-1.0, 1.0], (64, 3, 2))])
    z = z.astype(np.float32).astype(np.float64)
    error = np.abs(built(z)[..., 0].double().numpy() - exactly(z)).max()
    assert 0.3 * built.error_bound < error <= built.error_bound
    # one map for all tokens: a token answers by its encoding, wherever it stands
    order = [2, 0, 1]
    tokens = built.encoded(z[:5])
    assert torch.equal(built.head(tokens[:, order]), built.head(tokens)[:, order])
    if dtype == torch.float64:
        network = built.layers()
        assert torch.allclose(network(z[:20]), built(z[:20]), atol=1e-8)
        held = network.linear.constant[: encodings.shape[1], :3]
        assert torch.equal(held, torch.tensor(encodings.T))  # the encodings are columns of the paper's R
        blind = built.layers()  # negative control: R without them
        blind.linear.constant[: encodings.shape[1], :3] = 0
        gap = equivariance_gap(
            "; ".join(t.replace("x1", f"x{2 * i + 1}").replace("x0", f"x{2 * i}") for i, t in enumerate(FUNCTIONS)),
            pa.Box.sequence(-1, 1, tokens=3, dim=2),
        )
        pair = np.stack([gap.point, gap.point[list(gap.order)]])
        assert np.abs(blind(pair)[..., 0].numpy() - exactly(pair)).max() >= gap.lower_bound - 1e-9 > built.error_bound


@pytest.mark.parametrize("scale", [1.0, 30.0, 1000.0])
@pytest.mark.parametrize("layers_in", [torch.float64, torch.float32])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_the_layers_of_a_positional_head_have_a_bound_of_their_own(scale, dtype, layers_in):
    built = positional_head(FUNCTIONS, scale * ADDITIVE, SQUARE, tolerance=0.25, dtype=dtype)
    network = built.layers(dtype=layers_in, tolerance=10.0)
    z = np.random.default_rng(7).uniform(-1, 1, (1000, 3, 2))
    error = np.abs(network(z)[..., 0].double().numpy() - exactly(z)).max()
    assert error <= network.error_bound and network.dtype == layers_in
    assert network.rounding < (1e-3 if layers_in == torch.float64 else 4.5)  # 4.5: the spread of the values
    if layers_in == torch.float64:
        assert built.error_bound < built.layers(dtype=layers_in).error_bound <= 0.25
    elif scale == 1000.0:  # the bound of the head is false for its layers, which are refused unless asked for
        assert error > built.error_bound
        with pytest.raises(ToleranceError, match=r"tokenwise form in float32.*smaller encodings"):
            built.layers(dtype=layers_in)


def test_the_bound_of_positional_layers_is_about_their_tensors():
    """Negative control: with other encodings in R the error exceeds the bound, and the bound is withdrawn."""
    built = positional_head(FUNCTIONS, ADDITIVE, SQUARE, tolerance=0.25)
    network = built.layers()
    bound, z = network.error_bound, np.random.default_rng(8).uniform(-1, 1, (200, 3, 2))
    network.linear.constant[:2, :3] *= 0.9
    assert np.abs(network(z)[..., 0].numpy() - exactly(z)).max() > bound
    with pytest.raises(UnsupportedError, match="changed or cast"):
        _ = network.error_bound
    with pytest.raises(UnsupportedError, match=r"dtype is torch\.float16"):
        built.layers(dtype=torch.float16)


def test_the_terms_of_the_positional_bound_are_needed():
    built = positional_head(FUNCTIONS, ADDITIVE, SQUARE, tolerance=0.25)
    z = np.random.default_rng(4).uniform(-1, 1, (2000, 3, 2))
    soft = positional_head(FUNCTIONS, ADDITIVE, SQUARE, tolerance=0.25)
    soft.head.inverse_temperature.mul_(0.02)
    assert np.abs(soft(z)[..., 0].numpy() - exactly(z)).max() > built.error_bound  # R too small
    moved = positional_head(FUNCTIONS, ADDITIVE[[1, 2, 0]], SQUARE, tolerance=0.25)
    tokens = moved.encoded(z)
    assert (
        np.abs(built.head(tokens)[..., 0].numpy() - exactly(z)).max() > built.error_bound
    )  # the encodings of other positions


def test_the_mass_that_other_positions_get_is_within_its_term():
    built = positional_head(["x", "3 - x"], [[0.0], [2.3]], pa.Box([-1], [1]), tolerance=0.5)
    other = next(t for t in built.terms if t.name == "other positions")
    centers, rate = built.head.centers[:, 0].numpy(), float(built.head.inverse_temperature)
    z = np.linspace(-1, 1, 2001)[:, None]
    weights = np.exp(-rate / 2 * ((z - centers) ** 2 - ((z - centers) ** 2).min(axis=1, keepdims=True)))
    mass = weights[:, len(centers) // 2 :].sum(axis=1) / weights.sum(axis=1)
    assert 0 < mass.max() <= other.inputs["leak"]
    assert other.value >= other.inputs["leak"] * 6  # values from −1 to 4, bounded by twice the largest


def test_positional_heads_at_the_edges():
    single = positional_head(["x^2"], [[0.0]], pa.Box([-1], [1]), tolerance=0.05)
    assert single.error_bound <= 0.05 and single(np.zeros((1, 1))).shape == (1, 1)
    constants = positional_head(["0*x + 3", "0*x - 3"], [[0.0], [2.5]], pa.Box([-1], [1]), tolerance=1e-6)
    assert np.allclose(constants(np.array([[0.5], [0.5]])).numpy().ravel(), [3, -3], atol=1e-6)
    wide = pa.Box([1e6], [1e6 + 4])
    far = positional_head(["sin(x)", "cos(x)"], [[0.0], [100.0]], wide, tolerance=0.05)
    z = np.random.default_rng(5).uniform(1e6, 1e6 + 4, (500, 2, 1))
    exact = np.stack([np.sin(z[:, 0]), np.cos(z[:, 1])], axis=1)
    assert np.abs(far(z).numpy() - exact).max() <= far.error_bound <= 0.05
    back = positional_head(
        ["x - 2e4", "2e4 - x"], [[-2e4], [-2e4 + 9]], pa.Box([2e4], [2e4 + 4]), tolerance=0.2, dtype=torch.float32
    )
    z = np.random.default_rng(6).uniform(
        2e4, 2e4 + 4, (2000, 2, 1)
    )  # x is rounded before the encoding brings it near 0
    exact = np.stack([z[:, 0] - 2e4, 2e4 - z[:, 1]], axis=1)
    moved = float(np.abs(z - z.astype(np.float32)).max())
    assert moved > 5e-4 and next(iter(back.terms)).inputs["moved"] > moved
    assert np.abs(back(z).double().numpy() - exact).max() <= back.error_bound
    vector = positional_head(["x, -x", "x^2, 1 + 0*x"], [[0.0], [3.0]], pa.Box([-1], [1]), tolerance=0.1)
    assert vector(np.zeros((7, 2, 1))).shape == (7, 2, 2)


def test_positional_heads_that_cannot_be_built_are_refused():
    box = pa.Box([-1], [1])
    with pytest.raises(DomainError, match=r"positions 0 and 1.*0 apart"):
        positional_head(["x", "-x"], [[0.0], [1.9]], box, tolerance=0.1)
    with pytest.raises(NotContinuousError, match="may jump"):
        positional_head(["sign(x)"], [[0.0]], box, tolerance=0.1)
    with pytest.raises(NothingKnownError):
        positional_head([np.sin], [[0.0]], box, tolerance=0.1)
    with pytest.raises(ShapeError, match="one row of encodings per function"):
        positional_head(["x"], [[0.0], [3.0]], box, tolerance=0.1)
    for tolerance in (1e-7, 1e-13):
        with pytest.raises(SizeError, match="keys"):
            positional_head(["x"], [[0.0]], box, tolerance=tolerance)
    with pytest.raises(ToleranceError, match=r"float32 moves x \+ e by up to"):
        positional_head(["x", "-x"], [[0.0], [1e6]], box, tolerance=0.1, dtype=torch.float32)
    with pytest.raises(ShapeError, match=r"expected \(…, 1, 1\)"):
        positional_head(["x"], [[0.0]], box, tolerance=0.1)(np.zeros((2, 1)))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("tokens", [1, 2, 3, 8, 25])
def test_rotary_encodings_reach_every_circular_convolution(tokens, dtype):
    rng = np.random.default_rng(tokens)
    kernel = rng.normal(size=(tokens, 2, 3)).astype(np.float32).astype(np.float64)
    layer = rotary_convolution(kernel, dtype=dtype)
    x = rng.uniform(-1, 1, (10, tokens, 3)).astype(np.float32).astype(np.float64)
    exact = np.zeros((10, tokens, 2))
    for i, k in itertools.product(range(tokens), repeat=2):
        exact[:, i] += x[:, (i - k) % tokens] @ kernel[k].T
    bound = layer.error_bound_for(1.0)
    assert (
        np.abs(layer(torch.tensor(x)).double().numpy() - exact).max()
        <= bound
        < (1e-8 if dtype == torch.float64 else 1.0)
    )
    rolled = layer(torch.tensor(np.roll(x, 1, axis=1)))
    assert torch.allclose(
        torch.roll(layer(torch.tensor(x)), 1, dims=1), rolled, atol=1e-4 if dtype == torch.float32 else 1e-11
    )
    scores = layer.scores().double()
    lag = (np.arange(tokens)[:, None] - np.arange(tokens)) % tokens  # scores depend on i − j alone
    for head in scores.numpy():
        assert all(np.ptp(head[lag == k]) < 1e-3 * (np.abs(head).max() + 1) for k in range(tokens))


def test_rotary_layers_keep_the_symmetry_that_the_bound_is_about():
    """f = token 0 at every position is no convolution: every shift-equivariant layer errs by at least the gap."""
    box = pa.Box.sequence(-1, 1, tokens=4, dim=1)
    gap = equivariance_gap("x0; x0; x0; x0", box, group="shifts")
    assert 0.99 < gap.lower_bound <= 1
    pair = np.stack([gap.point, gap.point[list(gap.order)]])
    for seed in range(10):
        layer = rotary_convolution(np.random.default_rng(seed).normal(size=(4, 1, 1)))
        assert np.abs(layer(torch.tensor(pair)).numpy() - pair[:, :1]).max() >= gap.lower_bound - 1e-9
    broken = rotary_convolution(np.eye(4)[1][:, None, None])
    broken.w_v.mul_(1.001)  # negative control of the bound
    x = torch.ones(4, 1, dtype=torch.float64)
    assert float((broken(x) - 1).abs().max()) > rotary_convolution(np.eye(4)[1][:, None, None]).error_bound_for(1.0)
    with pytest.raises(ShapeError, match="kernel"):
        rotary_convolution(np.eye(3))
