"""Propositions 3.2 and 3.3: indicators and reassigned values, as heads and as the paper's layers."""

import numpy as np
import pytest
import torch
from dense import layers_oracle as oracle

import partita as pa
from partita.errors import DomainError, ShapeError, UnsupportedError
from partita.papers import indicator, reassignment, reassignment_layers
from partita.proofs import literal_rounding

BOX = pa.Box([-2, -2], [2, 2])


def partition(cells: int = 6, seed: int = 0) -> pa.MaxAffine:
    rng = np.random.default_rng(seed)
    return pa.MaxAffine(rng.normal(size=(cells, 2)), 0.3 * rng.normal(size=cells))


def tokens_with_margin(p: pa.MaxAffine, margin: float, count: int = 4000) -> np.ndarray:
    points = BOX.sample(count, np.random.default_rng(1)).astype(np.float32).astype(np.float64)
    return points[p.margin(points) >= margin]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("margin", [0.02, 0.2, 1.0])
@pytest.mark.parametrize("epsilon", [0.3, 1e-3])
def test_indicator_is_within_epsilon_where_the_margin_is(epsilon, margin, dtype):
    p = partition()
    built = indicator(p, BOX, margin=margin, epsilon=epsilon, dtype=dtype)
    points = tokens_with_margin(p, margin)
    out = built.head(torch.from_numpy(points)).double().numpy()
    error = np.abs(out - p.indicator(points)).max()
    assert error <= built.certificate.error_bound <= epsilon
    assert built.certificate.kind == "proved_given"


def test_indicator_claims_nothing_at_the_boundary():
    """Negative control: without the margin the error is ½, far above the bound."""
    p = pa.MaxAffine([[1.0, 0.0], [-1.0, 0.0]], [0.0, 0.0])
    built = indicator(p, BOX, margin=0.1, epsilon=1e-3)
    error = np.abs(built.head(torch.zeros(1, 2)).numpy() - p.indicator(np.zeros((1, 2)))).max()
    assert error > 100 * built.certificate.error_bound


@pytest.mark.parametrize("affine", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_reassigned_values_constant_and_affine(affine, dtype):
    p, rng = partition(), np.random.default_rng(2)
    values = rng.normal(size=(6, 3))
    slopes = rng.normal(size=(6, 3, 2)) if affine else None
    built = reassignment(p, values, BOX, margin=0.1, tolerance=0.01, value_slopes=slopes, dtype=dtype)
    points = tokens_with_margin(p, 0.1)
    cell = p.cell(points)
    expected = values[cell] + (np.einsum("nom,nm->no", slopes[cell], points) if affine else 0)
    error = np.abs(built.head(torch.from_numpy(points)).double().numpy() - expected).max()
    assert error <= built.certificate.error_bound <= 0.01


def test_the_bound_of_reassignment_is_attained_up_to_rounding():
    """V = (1, −1) at exactly the margin: the error is 2‖V‖ε₀, not ‖V‖ε₀."""
    p = pa.MaxAffine([[1.0], [-1.0]], [0.0, 0.0])
    built = reassignment(p, [[1.0], [-1.0]], pa.Box([-1], [1]), margin=0.5, tolerance=0.01)
    error = abs(float(built.head(torch.tensor([[0.25]], dtype=torch.float64))) - 1)
    assert 0.95 * built.certificate.terms[0].value <= error <= built.certificate.error_bound


@pytest.mark.parametrize("tokens", [1, 3, 6])
@pytest.mark.parametrize("kind", ["indicator", "constant", "affine"])
def test_layers_of_section_3_look_up_every_token(kind, tokens):
    p, rng = partition(), np.random.default_rng(3)
    if kind == "indicator":
        built = indicator(p, BOX, margin=0.1, epsilon=1e-3)
    else:
        slopes = rng.normal(size=(6, 2, 2)) if kind == "affine" else None
        built = reassignment(p, rng.normal(size=(6, 2)), BOX, margin=0.1, tolerance=1e-3, value_slopes=slopes)
    network = reassignment_layers(built, tokens)
    z = torch.from_numpy(BOX.sample(40 * tokens, rng).reshape(40, tokens, 2))
    expected = built.head(z)
    assert torch.allclose(network(z), expected, rtol=0, atol=1e-9)
    tensors = {k: t.numpy() for k, t in network.state_dict().items()}
    assert np.allclose(oracle(tensors, z[0].numpy().T).T, expected[0].numpy(), rtol=0, atol=1e-9)
    network.attention.w_k.mul_(1.1)
    assert not torch.allclose(network(z), expected, atol=1e-6)  # negative control


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("kind", ["indicator", "constant", "affine"])
def test_layers_hold_their_bound_at_every_length(kind, dtype):
    """n = 1 … 3N: more tokens than cells are padded with dominated components, as the paper's "without loss of generality"."""
    p, rng = partition(cells=3), np.random.default_rng(6)
    values, slopes = np.eye(3), None
    if kind == "indicator":
        built = indicator(p, BOX, margin=0.1, epsilon=0.02, dtype=dtype)
    else:
        values, slopes = rng.normal(size=(3, 2)), rng.normal(size=(3, 2, 2)) if kind == "affine" else None
        built = reassignment(p, values, BOX, margin=0.1, tolerance=0.02, value_slopes=slopes, dtype=dtype)
    points = tokens_with_margin(p, 0.1)
    for n in range(1, 10):
        network = reassignment_layers(built, n)
        assert network.num_keys == (3 * n if kind == "affine" else max(3, n))
        z = points[: len(points) // n * n].reshape(-1, n, 2)
        cell = p.cell(z.reshape(-1, 2)).reshape(-1, n)
        expected = values[cell] + (0 if slopes is None else np.einsum("bnom,bnm->bno", slopes[cell], z))
        got = network(torch.from_numpy(z).to(dtype)).double().numpy()
        lo, hi = (np.tile(end.ravel(), n) for end in (BOX.lo, BOX.hi))
        spread = built.certificate.terms[0].inputs["spread"]
        allowed = built.certificate.error_bound + (1e-12 + np.exp(-45)) * spread + literal_rounding(network, lo, hi)
        assert np.abs(got - expected).max() <= allowed
        tensors = {k: t.double().numpy() for k, t in network.state_dict().items()}
        assert np.abs(oracle(tensors, z[0].T).T - expected[0]).max() <= allowed


def test_components_that_are_not_dominated_are_noticed(monkeypatch):
    """Negative control: padded components at the height of the first one take mass from it."""
    p = partition(cells=3)
    built = reassignment(p, [[1.0], [0.0], [-1.0]], BOX, margin=0.1, tolerance=1e-3)
    monkeypatch.setattr("partita.heads.tokenwise_layers.DOMINATED", -5.0)
    points = tokens_with_margin(p, 0.1)
    z = points[: len(points) // 9 * 9].reshape(-1, 9, 2)
    got = reassignment_layers(built, 9)(torch.from_numpy(z)).numpy()
    expected = np.array([[1.0], [0.0], [-1.0]])[p.cell(z.reshape(-1, 2)).reshape(-1, 9)]
    assert np.abs(got - expected).max() > 10 * built.certificate.error_bound


def test_affine_values_of_several_tokens_need_token_sharpness():
    """With S = 0 every token's value leaks into every other: the reason for the extra rows."""
    p, rng = partition(), np.random.default_rng(4)
    built = reassignment(
        p, rng.normal(size=(6, 1)), BOX, margin=0.1, tolerance=1e-3, value_slopes=rng.normal(size=(6, 1, 2))
    )
    z = torch.from_numpy(BOX.sample(3, rng)[None])
    assert not torch.allclose(reassignment_layers(built, 3, token_leak=0.5)(z), built.head(z), atol=1e-2)


def test_bad_reassignments_are_refused():
    p = partition()
    with pytest.raises(ShapeError):
        reassignment(p, np.zeros((5, 1)), BOX, margin=0.1, tolerance=0.1)
    with pytest.raises(DomainError, match="margin"):
        indicator(p, BOX, margin=0.0, epsilon=0.1)
    with pytest.raises(UnsupportedError, match="tokens"):
        reassignment_layers(indicator(p, BOX, margin=0.1, epsilon=0.1), 0)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("kind", ["indicator", "constant", "affine"])
def test_layers_of_section_3_agree_within_the_rounding_bound(kind, dtype):
    p, rng = partition(), np.random.default_rng(5)
    if kind == "indicator":
        built = indicator(p, BOX, margin=0.1, epsilon=0.05, dtype=dtype)
    else:
        slopes = rng.normal(size=(6, 2, 2)) if kind == "affine" else None
        built = reassignment(
            p, rng.normal(size=(6, 2)), BOX, margin=0.1, tolerance=0.1, value_slopes=slopes, dtype=dtype
        )
    network = reassignment_layers(built, 3, token_leak=1e-9)
    z = torch.from_numpy(BOX.sample(600, rng).reshape(200, 3, 2)).to(dtype)
    running = sum(t.value for t in built.certificate.terms if t.name != "leakage")
    # near a boundary the head itself rounds so far
    folded = literal_rounding(reassignment_layers(built, 1), BOX.lo, BOX.hi)
    allowed = network.rounding + running + folded
    assert (network(z).double() - built.head(z).double()).abs().max().item() <= allowed
