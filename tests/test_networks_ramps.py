"""Ramps by several heads, in `nn.MultiheadAttention`, under masks and in Transformer blocks; two-layer networks."""

import numpy as np
import pytest
import torch
from torch import nn

import partita as pa
from partita.errors import DomainError, NothingKnownError, ShapeError, SizeError, ToleranceError, UnsupportedError
from partita.networks import encoder_ramp, prefix_ramp
from partita.ramps import multi_head_ramp, ramp, sharpness_needed, two_layers
from partita.ramps.anchors import ramp_constant, sharing_excess
from partita.ramps.multi_head_ramps import MultiHeadRamp, best_shared_sharpness, shared_constant

ENDS = (-0.7, 2.1)
BOX = pa.Box([-1, -1], [1, 1])


def shared(n, heads, sharpness="hard", dtype=torch.float64, **options):
    rng = np.random.default_rng(n * heads)
    w, t = rng.normal(size=(n, 2)), 0.2 * rng.normal(size=n)
    return w, t, multi_head_ramp(w, t, ENDS, heads=heads, domain=BOX, sharpness=sharpness, dtype=dtype, **options)


def sequences(w, t, spacing, count=1500, seed=0):
    """Random sequences, corners, and tokens moved to where u lies beside a middle between anchors."""
    rng = np.random.default_rng(seed)
    x = np.concatenate([rng.uniform(-1, 1, size=(count, *w.shape)), rng.choice([-1.0, 1.0], size=(50, *w.shape))])
    u = (x * w).sum(-1) + t
    aim = ENDS[0] + (np.floor((u - ENDS[0]) / spacing) + 0.5 + 0.02 * rng.standard_normal(u.shape)) * spacing
    moved = (x + ((aim - u) / (w**2).sum(-1))[..., None] * w).clip(-1, 1)
    x[::2] = moved[::2]
    return x.astype(np.float32).astype(np.float64)


def exact(x, w, t):
    return ((x * w).sum(-1) + t).clip(*ENDS)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize(
    ("n", "heads", "sharpness"), [(4, 1, "hard"), (4, 2, 12.0), (4, 8, "best"), (6, 4, 14.0), (10, 16, 20.0)]
)
def test_shared_anchors_are_within_their_bound(n, heads, sharpness, dtype):
    if dtype == torch.float32 and n == 10:
        with pytest.raises(SizeError, match="float32"):
            shared(n, heads, sharpness, dtype)
        return
    w, t, built = shared(n, heads, sharpness, dtype, coordinate=1)
    x = sequences(w, t, built.spacing)
    with torch.no_grad():
        out = built.network(torch.from_numpy(x)).double().numpy()
    error = np.abs(out[..., 1] - exact(x, w, t)).max()
    assert error <= built.error_bound
    assert built.anchors == (n - 2) * heads and not np.delete(out, 1, axis=-1).any()
    assert error > 0.9 * built.certificate.terms[0].value  # negative control: the constant is needed


def test_the_error_falls_like_one_over_the_shared_anchors():
    sizes, errors = [], []
    for n, heads in [(4, 4), (6, 8), (4, 64), (18, 32)]:
        w, t, built = shared(n, heads)
        x = sequences(w, t, built.spacing, count=max(200, 12_000 // n))
        with torch.no_grad():
            out = built.network(torch.from_numpy(x)).numpy()
        sizes.append((n - 2) * heads - 1)
        errors.append(np.abs(out[..., 0] - exact(x, w, t)).max())
    assert abs(np.polyfit(np.log(sizes), np.log(errors), 1)[0] + 1) <= 0.02


def test_the_tensors_load_into_a_plain_multihead_attention():
    w, t, built = shared(6, 4, 14.0)
    attention = built.network.attention
    fresh = nn.MultiheadAttention(attention.embed_dim, attention.num_heads, batch_first=True, dtype=torch.float64)
    fresh.load_state_dict(attention.state_dict(), strict=True)
    assert attention.embed_dim % attention.num_heads == 0 and attention.embed_dim >= 6 + 1
    z = built.network.embed(torch.from_numpy(sequences(w, t, built.spacing, count=40)))
    with torch.no_grad():
        out, weights = fresh(z, z, z, average_attn_weights=False)
    assert torch.allclose(out, attention(z, z, z, need_weights=False)[0], atol=1e-12)
    assert torch.allclose(weights.sum(-1), torch.ones(1, dtype=torch.float64))
    with torch.no_grad():
        fresh.in_proj_weight[0].mul_(1.01)
        assert not torch.allclose(fresh(z, z, z)[0], out, atol=1e-6)  # negative control


@pytest.mark.parametrize("kappa", [6.0, 9.0])
def test_sharing_costs_what_the_theorem_says(kappa):
    """Against one head with the same anchors: at most (b − a)S(κ), and at least a quarter of it somewhere."""
    n, heads = 6, 4
    p = (n - 2) * heads
    u = np.linspace(-0.9, 2.3, 4001)
    places = np.linspace(*ENDS, p)
    exponent = -0.5 * kappa * ((u[:, None] - places) / (places[1] - places[0])) ** 2
    g = np.exp(exponent - exponent.max(axis=1, keepdims=True))
    middle = sum(ENDS) / 2
    single = (g * (places - middle)).sum(1) / g.sum(1)
    several = np.zeros_like(u)
    for h in range(heads):
        own = np.arange(h * (n - 2), (h + 1) * (n - 2))
        keys = np.arange(max(own[0] - 1, 0), min(own[-1] + 2, p))
        several += (g[:, own] * (places[own] - middle)).sum(1) / g[:, keys].sum(1)
    cost = np.abs(several - single).max()
    allowed = (ENDS[1] - ENDS[0]) * sharing_excess(kappa)
    assert 0.25 * allowed < cost <= allowed
    built = multi_head_ramp(np.ones((n, 1)), 0.0, ENDS, heads=heads, domain=pa.Box([-1], [2.3]), sharpness=kappa)
    tokens = np.repeat(u[:, None, None], n, axis=1).clip(-1, 2.3)
    with torch.no_grad():
        out = built.network(torch.from_numpy(tokens)).numpy()[..., 0]
    assert np.abs(out - (several + middle)[:, None]).max() < 1e-9


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize(("n", "heads", "sharpness"), [(4, 1, "hard"), (4, 8, "best"), (7, 3, 14.0), (40, 5, "best")])
def test_the_folded_form_is_the_same_function(n, heads, sharpness, dtype):
    """Against every weight of every head, in numpy, and against the module where there is one."""
    w, t, built = shared(n, heads, sharpness, dtype, form="folded")
    x = sequences(w, t, built.spacing, count=300)
    with torch.no_grad():
        out = built.network(torch.from_numpy(x)).double().numpy()[..., 0]
    places = np.linspace(*ENDS, built.anchors)
    u, expected = ((x * w).sum(-1) + t)[..., None], np.full(x.shape[:2], sum(ENDS) / 2)
    for h in range(heads):
        own = np.arange(h * (n - 2), (h + 1) * (n - 2))
        keys = np.arange(max(own[0] - 1, 0), min(own[-1] + 2, built.anchors))
        score = -0.5 * built.sharpness * ((u - places[keys]) / built.spacing) ** 2
        weights = np.exp(score - score.max(axis=-1, keepdims=True))
        values = np.where(np.isin(keys, own), places[keys] - sum(ENDS) / 2, 0.0)
        expected += (weights @ values) / weights.sum(axis=-1)
    assert np.abs(out - exact(x, w, t)).max() <= built.error_bound
    if dtype == torch.float64:
        assert np.abs(out - expected).max() < 1e-9
        module = shared(n, heads, sharpness)[2]
        with torch.no_grad():
            assert np.abs(module.network(torch.from_numpy(x)).numpy()[..., 0] - out).max() < 1e-9
    with torch.no_grad():  # negative control: anchors that are off by a spacing
        built.network.low.add_(built.spacing)
        assert (
            np.abs(built.network(torch.from_numpy(x)).double().numpy()[..., 0] - exact(x, w, t)).max()
            > built.error_bound
        )


@pytest.mark.parametrize(("n", "dtype"), [(1000, torch.float64), (10_000, torch.float64), (10_000, torch.float32)])
def test_shared_anchors_on_long_sequences(n, dtype):
    rng = np.random.default_rng(n)
    w, t = rng.normal(size=(n, 2)), 0.2 * rng.normal(size=n)
    errors, sizes = [], []
    for heads in (1, 4, 16):
        built = multi_head_ramp(w, t, ENDS, heads=heads, domain=BOX, sharpness="best", form="folded", dtype=dtype)
        x = sequences(w, t, built.spacing, count=3)[:6]
        with torch.no_grad():
            out = built.network(torch.from_numpy(x)).double().numpy()[..., 0]
        error = np.abs(out - exact(x, w, t)).max()
        assert error <= built.error_bound
        if dtype == torch.float64:
            assert error > 0.8 * built.certificate.terms[0].value  # negative control: the constant is needed
        errors.append(error)
        sizes.append(built.anchors - 1)
    if dtype == torch.float64:
        assert (
            abs(np.polyfit(np.log(sizes), np.log(errors), 1)[0] + 1) < 0.15
        )  # κ, and with it the constant, grows with ln p
        with pytest.raises(SizeError, match="folded"):
            multi_head_ramp(w[:9000], t[:9000], ENDS, heads=1, domain=BOX, sharpness="best") if n == 10_000 else (
                multi_head_ramp(w, t, ENDS, heads=16, domain=BOX)
            )


def test_the_best_shared_temperature():
    for p in (16, 1000, 10**5):
        kappa = best_shared_sharpness(p)
        assert all(shared_constant(p, kappa) <= shared_constant(p, k) * 1.0001 for k in (kappa - 1, kappa + 1))
        assert shared_constant(p, kappa) < shared_constant(p, 60.0)


def test_sharpness_that_sharing_needs():
    for p, slack in [(16, 0.01), (1000, 0.1), (10**5, 0.001)]:
        kappa = sharpness_needed(p, slack)
        assert (p - 1) * sharing_excess(kappa) <= slack < (p - 1) * sharing_excess(kappa - 0.2)
    with pytest.raises(ToleranceError, match="κ ≥"):
        shared(10, 16, 5.44)
    with pytest.raises(ToleranceError, match="κ ≥"):
        multi_head_ramp(
            np.ones((50, 1)), 0.0, ENDS, heads=16, domain=pa.Box([-1], [1]), beta=25.0
        )  # a fixed β is too soft


@pytest.mark.parametrize(
    ("kind", "match", "options"),
    [
        (DomainError, "a < b", {"ends": (1.0, 0.0)}),
        (ShapeError, "at least", {"slopes": np.ones((3, 1))}),
        (ShapeError, "anchors per head", {"anchors": 13}),
        (ShapeError, "anchors per head", {"heads": 0}),
        (ShapeError, "embed_dim", {"coordinate": 99}),
        (ShapeError, "slopes", {"slopes": np.ones((5, 2))}),
        (ShapeError, "finite", {"slopes": np.full((5, 1), np.nan)}),
        (DomainError, "finite", {"ends": (0.0, np.inf)}),
        (ShapeError, "anchors per head", {"heads": 1.5}),
        (UnsupportedError, "float16", {"dtype": torch.float16}),
        (DomainError, "sharpness", {"sharpness": -1.0}),
        (DomainError, "one of them", {"sharpness": 20.0, "beta": 1.0}),
        (UnsupportedError, "folded", {"form": "dense"}),
        (ShapeError, "folded", {"form": "folded", "coordinate": 1}),
    ],
)
def test_bad_multi_head_ramps(kind, match, options):
    given = {"slopes": np.ones((5, 1)), "ends": (0.0, 1.0), "heads": 4, "domain": pa.Box([-1], [1])} | options
    with pytest.raises(kind, match=match):
        multi_head_ramp(given.pop("slopes"), 0.0, given.pop("ends"), **given)


def test_a_mask_is_refused_and_an_empty_one_is_not():
    w, t, built = shared(4, 2, 12.0)
    x = torch.from_numpy(sequences(w, t, built.spacing, count=10))
    causal = torch.ones(4, 4, dtype=torch.bool).triu(1)
    with pytest.raises(UnsupportedError, match="prefix_ramp"):
        built.network(x, attn_mask=causal)
    with torch.no_grad():
        assert torch.equal(built.network(x, attn_mask=torch.zeros(4, 4, dtype=torch.bool)), built.network(x))
        z = built.network.embed(x)
        hidden = built.network.attention(z, z, z, need_weights=False, attn_mask=causal)[0]
        assert (hidden - built.network(x)).abs().max() > 0.1  # negative control: it would be wrong


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("p", "dtype"), [(8, torch.float64), (300, torch.float64), (60, torch.float32)])
def test_anchors_before_the_sequence_stand_a_causal_mask(p, dtype, causal):
    rng = np.random.default_rng(p)
    w, t = rng.normal(size=(5, 2)), 0.2 * rng.normal(size=5)
    built = ramp(w, t, ENDS, anchors=p, domain=BOX, output=(1, 3), dtype=dtype)
    network = prefix_ramp(built, 5, causal=causal)
    x = sequences(w, t, built.spacing, count=300)
    with torch.no_grad():
        out = network(torch.from_numpy(x)).double().numpy()
    error = np.abs(out[..., 1] - exact(x, w, t)).max()
    assert 0.7 * built.certificate.terms[0].value < error <= network.error_bound
    assert not out[..., [0, 2]].any()
    fresh = nn.MultiheadAttention(4, 1, batch_first=True, dtype=dtype)
    fresh.load_state_dict(network.attention.state_dict(), strict=True)
    with pytest.raises(ShapeError):
        prefix_ramp(built, 6)


@pytest.mark.parametrize(("n", "heads", "sharpness"), [(4, 1, 12.0), (6, 4, 12.0), (8, 8, 16.0), (4, 40, 16.0)])
def test_inside_a_pre_norm_encoder_layer(n, heads, sharpness):
    w, t, built = shared(n, heads, sharpness)
    block = encoder_ramp(built)
    x = sequences(w, t, built.spacing, count=300)
    with torch.no_grad():
        out = block(torch.from_numpy(x)).numpy()
        z = block.embed(torch.from_numpy(x)).numpy()
        plain = built.network(torch.from_numpy(x)).numpy()[..., 0]
    assert np.abs(out[..., -1] - exact(x, w, t)).max() <= block.error_bound
    assert np.array_equal(out[..., :-1], z[..., :-1])  # the residual keeps the token
    assert 0 < np.abs(out[..., -1] - plain).max() <= block.error_bound - built.error_bound  # LayerNorm does move it
    fresh = nn.TransformerEncoderLayer(block.layer.self_attn.embed_dim, heads, dim_feedforward=1, dtype=torch.float64)
    fresh.load_state_dict(block.layer.state_dict(), strict=True)


def test_where_a_block_makes_a_ramp_impossible():
    _, _, built = shared(4, 2, 12.0)
    with pytest.raises(UnsupportedError, match="causal mask hides"):
        encoder_ramp(built, causal=True)
    with pytest.raises(UnsupportedError, match="norm_first"):
        encoder_ramp(built, norm_first=False)
    with pytest.raises(UnsupportedError, match="float64"):
        encoder_ramp(shared(4, 2, 12.0, torch.float32)[2])
    with pytest.raises(UnsupportedError, match="folded"):
        encoder_ramp(shared(4, 2, 12.0, form="folded")[2])
    # negative control: with a small constant in its place LayerNorm spoils the answer
    block = encoder_ramp(built)
    block.size = 1.0
    x = torch.from_numpy(np.random.default_rng(0).uniform(-1, 1, size=(50, 4, 2)))
    with torch.no_grad():
        assert (block(x)[..., -1] - built.network(x)[..., 0]).abs().max() > 100 * block.error_bound


TARGETS = [
    ("sin(3*x)", pa.Box([-1], [1]), 8),
    ("sin(3*x0) + x0*cos(2*x1)", pa.Box([-1, 0], [1, 2]), 6),
    ("x0*x1, x2; x3, x0 - x3", pa.Box.sequence(-1, 1, tokens=2, dim=2), 3),
    ("abs(x0 - 0.3); x0 + x1; x2", pa.Box.sequence(0, 1, tokens=3, dim=1), 4),
]


@pytest.mark.parametrize(
    ("text", "box", "cells", "heads"),
    [*((*t, None) for t in TARGETS), (*TARGETS[0], "auto"), (*TARGETS[1], "auto"), (*TARGETS[2], 100)],
    ids=str,
)
def test_two_layers_and_one_layer_then_softmax(text, box, cells, heads):
    built = two_layers(text, box, cells=cells, heads=heads)
    assert isinstance(built.two_layers.first, MultiHeadRamp) == (heads is not None)
    rng = np.random.default_rng(0)
    edges = box.lo.ravel() + box.sides / cells * rng.integers(0, cells + 1, size=(300, box.dimension))
    points = np.concatenate(
        [box.sample(500, rng), box.corners(), edges, box.clamp(edges + 1e-3 * rng.standard_normal(edges.shape))]
    )[:: 1 if heads is None else 16]  # many heads are slow
    z = torch.from_numpy(points.reshape(-1, *box.shape))
    f = built.target(points)
    answers = [network(z).numpy() for network in (built.two_layers, built.layer_then_softmax)]
    for answer in answers:
        assert answer.shape[1:] == built.target.output_shape
        error = np.abs(answer.reshape(len(points), -1) - f).max()
        assert 0.2 * built.error_bound < error <= built.error_bound
    assert np.allclose(*answers, rtol=0, atol=1e-9)
    blunt = built.layer_then_softmax
    blunt.scores.mul_(0.01)  # negative control: without the sharpness the bumps select nothing
    assert np.abs(blunt(z).numpy().reshape(len(points), -1) - f).max() > built.error_bound


@pytest.mark.parametrize("heads", [1, 7, 60])
def test_a_first_layer_with_several_heads_against_the_dense_evaluation(heads):
    """Every weight of both layers in numpy, from the theorem's formulas; fewer heads have a larger bound, which still holds."""
    box, cells, m = pa.Box.sequence(-1, 1, tokens=2, dim=1), 5, 2
    built = two_layers("sin(3*x0) + x0*cos(2*x1)", box, cells=cells, heads=heads)
    z = np.random.default_rng(0).uniform(-1, 1, (60, m))
    n, h, p = m * (cells + 1), 2 / cells, built.anchors
    assert p == (n - 2) * heads and built.two_layers.first.attention.num_heads == heads == built.heads
    centers = -1 + h * (np.arange(cells + 1) + 0.5)
    u = np.concatenate([(z[:, i, None] - centers) / h + 1 for i in range(m)], axis=1)
    kappa, places, ramps = best_shared_sharpness(p), np.linspace(0, 1, p), np.full(u.shape, 0.5)
    for head in range(heads):
        own = np.arange(head * (n - 2), (head + 1) * (n - 2))
        keys = np.arange(max(own[0] - 1, 0), min(own[-1] + 2, p))
        score = -0.5 * kappa * ((u[..., None] - places[keys]) * (p - 1)) ** 2
        g = np.exp(score - score.max(axis=-1, keepdims=True))
        ramps += (g @ np.where(np.isin(keys, own), places[keys] - 0.5, 0.0)) / g.sum(axis=-1)
    hats = [ramps[:, i * (cells + 1) :][:, :cells] - ramps[:, i * (cells + 1) + 1 :][:, :cells] for i in range(m)]
    bumps = built.sharpness * (hats[0][:, :, None] + hats[1][:, None, :]).reshape(len(z), -1)
    weights = np.exp(bumps - bumps.max(axis=1, keepdims=True))
    grid = np.stack(np.meshgrid(centers[:-1], centers[:-1], indexing="ij"), axis=-1).reshape(-1, 2)
    expected = weights @ (np.sin(3 * grid[:, 0]) + grid[:, 0] * np.cos(2 * grid[:, 1])) / weights.sum(axis=1)
    answer = built.two_layers(torch.from_numpy(z)[..., None]).detach().numpy().ravel()
    assert np.abs(answer - expected).max() < 1e-8
    truth = np.sin(3 * z[:, 0]) + z[:, 0] * np.cos(2 * z[:, 1])
    assert np.abs(answer - truth).max() <= built.error_bound
    if heads == 60:
        few = two_layers("sin(3*x0) + x0*cos(2*x1)", box, cells=cells, heads=7)
        assert built.error_bound < few.error_bound
        with torch.no_grad():  # negative control: layer 1 matters
            built.two_layers.first.attention.in_proj_bias.mul_(1.01)
        assert np.abs(built.two_layers(torch.from_numpy(z)[..., None]).detach().numpy().ravel() - expected).max() > 1e-3


def test_the_bumps_are_hats():
    built = two_layers("sin(3*x)", pa.Box([-1], [1]), cells=4)
    x = torch.linspace(-1, 1, 81, dtype=torch.float64)[:, None]
    ramps = built.two_layers.first(x)[..., 0].numpy()
    hats = ramps[:, :-1] - ramps[:, 1:]
    centers = built.partition.axes[0]
    expected = np.maximum(1 - np.abs(x.numpy() - centers) / 0.5, 0)
    assert np.abs(hats - expected).max() <= 2e-3


def test_bad_two_layer_networks():
    with pytest.raises(NothingKnownError):
        two_layers(lambda z: np.sin(z[:, 0]), pa.Box([-1], [1]), cells=4)
    with pytest.raises(DomainError, match="at least 2"):
        two_layers("x0", pa.Box([-1], [1]), cells=1)
    with pytest.raises(SizeError, match="at most"):
        two_layers("x0*x1", BOX, cells=1000)
    for heads in (0, 2.5, "many"):
        with pytest.raises(ShapeError, match="heads"):
            two_layers("x0", pa.Box([-1], [1]), cells=4, heads=heads)
    with pytest.raises(ShapeError, match="3 cells"):
        two_layers("x0", pa.Box([-1], [1]), cells=2, heads=1)
    with pytest.raises(NothingKnownError, match="jumps"):
        two_layers("step(x0)", pa.Box([-1], [1]), cells=4)


def test_the_constant_of_shared_anchors_is_that_of_one_head():
    assert ramp_constant(16, 12.0) == pytest.approx(
        shared(4, 8, 12.0)[2].certificate.terms[0].value / shared(4, 8, 12.0)[2].spacing
    )
