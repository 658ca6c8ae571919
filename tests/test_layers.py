"""The paper's layers: sizes, limits, and that every tensor matters. That they are the head: test_method_laws.py."""

import numpy as np
import pytest
import torch
from method_cases import compiled, inputs_for, sample

import partita as pa
from partita.errors import ShapeError, SizeError, UnsupportedError
from partita.heads import LinearSum, ScatteredHead, SelfAttention, literal_layers, token_mixing
from partita.heads.tokenwise_layers import tokenwise_layers
from partita.proofs import dot_product_rounding, literal_rounding

FORMS = ["log", "indexed"]


def flat_ends(c: pa.Compiled) -> tuple[np.ndarray, np.ndarray]:
    box = c.target.domain.bounding_box()
    return box.lo.ravel(), box.hi.ravel()


def head_rounding(c: pa.Compiled) -> float:
    return sum(t.value for t in c.certificate.terms if t.name in ("window", "score rounding", "summation"))


def test_rounding_bounds_are_not_vacuous_in_float64():
    c = compiled("torch 2-D")
    assert literal_rounding(c.layers("log"), *flat_ends(c)) < 1e-9
    assert literal_rounding(c.layers("indexed"), *flat_ends(c)) < 1e-9
    assert dot_product_rounding(c.head.as_attention(), *flat_ends(c)) < 1e-9


@pytest.mark.parametrize(
    "tensor", ["attention.w_k", "attention.w_q", "attention.w_v", "attention.w_o", "linear.constant", "linear.right"]
)
@pytest.mark.parametrize("form", FORMS)
def test_a_changed_tensor_is_noticed(form, tensor):
    """Negative control: every named tensor matters."""
    c = compiled("sequence 2x2")
    network = c.layers(form)
    network.state_dict()[tensor].mul_(1.05)
    inputs = inputs_for(c, sample(c))
    difference = (network(*inputs) - c.head(*inputs)).abs().max().item()
    assert difference > literal_rounding(network, *flat_ends(c)) + head_rounding(c)


def test_sizes_are_those_of_the_theorem():
    c = compiled("sequence 2x2")  # n = d = 2
    cells = c.num_keys
    log, indexed = c.layers("log"), c.layers("indexed")
    assert log.num_keys == 2 * 2 * cells
    assert log.attention.w_k.shape == (2 + 2, 1 + log.num_keys)
    assert indexed.num_keys == 2 * cells
    assert indexed.attention.w_k.shape == (2 + 1, 2 * 2 + 2 + 2)
    cross = compiled("cross sequences")
    assert cross.layers("indexed").attention.w_k.shape[0] == 1 + 2 + 2


@pytest.mark.parametrize("tokens", [1, 2, 7, 1000])
def test_token_mixing_is_undone_exactly(tokens):
    s, unmix = token_mixing(tokens)
    q = np.exp(s * np.eye(tokens))
    q /= q.sum(axis=0)
    assert np.abs(q @ unmix - np.eye(tokens)).max() < 1e-12
    assert np.linalg.cond(unmix) < 1.1


def test_the_log_form_refuses_what_does_not_fit_and_shows_the_number():
    c = pa.compile("x0*x1", pa.Box([-1, -1], [1, 1]), method="hard", tolerance=0.02)
    with pytest.raises(SizeError, match="8,192"):
        c.layers("log")
    assert c.layers("indexed").num_keys == c.num_keys


def test_unknown_form_is_refused():
    with pytest.raises(UnsupportedError, match="indexed"):
        literal_layers(compiled("cross").head, "sparse")


def test_linear_is_a_sum_of_left_and_right_products():
    g = torch.Generator().manual_seed(0)
    p, q, c = (torch.randn(*s, generator=g, dtype=torch.float64) for s in ((3, 4, 2), (3, 5, 6), (4, 6)))
    z = torch.randn(7, 2, 5, generator=g, dtype=torch.float64)
    expected = torch.stack([sum(p[i] @ z[b] @ q[i] for i in range(3)) + c for b in range(7)])
    assert torch.allclose(LinearSum(p, q, c)(z), expected)
    with pytest.raises(ShapeError):
        LinearSum(p, q, c[:3])


def test_attention_skips_only_columns_that_w_o_drops():
    g = torch.Generator().manual_seed(1)
    w_k, w_q, w_v = (torch.randn(*s, generator=g, dtype=torch.float64) for s in ((3, 4), (3, 4), (2, 4)))
    w_o = torch.zeros(6, 2, dtype=torch.float64)
    w_o[1, 0], w_o[4, 1] = 2.0, -1.0
    z = torch.randn(1, 4, 6, generator=g, dtype=torch.float64)
    attention = SelfAttention(w_k=w_k, w_q=w_q, w_v=w_v, w_o=w_o)
    assert torch.allclose(attention(z), w_v @ z @ attention.weights(z) @ w_o)


@pytest.mark.parametrize("form", ["log", "indexed"])
def test_a_large_batch_takes_no_more_memory_than_a_step(form, monkeypatch):
    """6,000 inputs of a log form with 1,720 columns once asked for 140 GB at one go."""
    c = compiled("sine 1-D typed")
    layers = c.layers(form)
    z = torch.from_numpy(sample(c))[:40]
    whole, most = layers(z), []
    linear = type(layers.linear).forward

    def spied(self, batch):
        most.append(len(batch) * self.constant.numel())
        return linear(self, batch)

    monkeypatch.setattr(type(layers.linear), "forward", spied)
    monkeypatch.setattr("partita.heads.layers._AT_ONCE", 3 * layers.linear.constant.numel())
    assert torch.allclose(layers(z), whole, rtol=1e-12, atol=1e-12)
    assert max(most) <= 3 * layers.linear.constant.numel() and len(most) == 14
    assert layers(z[:0]).shape == whole[:0].shape


@pytest.mark.parametrize(("cells", "tokens", "affine"), [(20_000, 2, False), (3_000, 8, True), (200, 1_000, True)])
def test_tokenwise_layers_are_refused_before_anything_is_allocated(cells, tokens, affine):
    slopes = torch.zeros(cells, 1, 2) if affine else None
    shapes = {"input_shapes": ((2,),), "output_shape": (1,)}
    head = ScatteredHead(torch.rand(cells, 2), 9.0, torch.zeros(cells, 1), value_slopes=slopes, **shapes)
    with pytest.raises(SizeError, match="GiB"):
        tokenwise_layers(head, tokens)
