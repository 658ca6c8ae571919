"""The paper's layers: their bound, sizes, limits, and that every tensor matters. That they are the head: test_method_laws.py."""

import copy
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from balls import bits
from dense import Cells
from flint import arb
from method_cases import compiled, inputs_for, sample
from torch.utils._python_dispatch import TorchDispatchMode

import partita as pa
from partita.errors import ShapeError, SizeError, ToleranceError, UnsupportedError
from partita.heads import (
    CrossNetwork,
    GridHead,
    LinearSum,
    ScatteredHead,
    SelfAttention,
    SelfNetwork,
    literal_layers,
    token_mixing,
)
from partita.heads.tokenwise_layers import tokenwise_layers
from partita.papers import reassignment, reassignment_layers
from partita.proofs import dot_product_rounding, layers_rounding

FORMS = ["log", "indexed"]


def flat_ends(c: pa.Compiled) -> tuple[np.ndarray, np.ndarray]:
    box = c.target.domain.bounding_box()
    return box.lo.ravel(), box.hi.ravel()


def head_rounding(c: pa.Compiled) -> float:
    return sum(t.value for t in c.certificate.terms if t.name in ("window", "score rounding", "summation"))


def layers_of(c: pa.Compiled, form: str, dtype: torch.dtype) -> SelfNetwork | CrossNetwork:
    """As they are, however much they round."""
    return c.layers(form, dtype=dtype, tolerance=math.inf)


def outputs(network: torch.nn.Module, c: pa.Compiled, points: np.ndarray, dtype: torch.dtype) -> np.ndarray:
    with torch.no_grad():
        return network(*inputs_for(c, points, dtype)).double().reshape(len(points), -1).numpy()


# --- the bound -----------------------------------------------------------------------------------------------------------

SELF = ["mixed", "vector 2-D typed", "tokens typed"]  # a scalar, a vector, a sequence
CROSS = ["cross", "cross typed", "cross sequences"]
KINDS = [(k, m) for k in (*SELF, *CROSS) for m in ("hard", "affine") if k in SELF or m == "hard"]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("kind", "method"), KINDS)
def test_the_bound_covers_the_worst_error_seen(kind, method, form, dtype):
    """Against f, and against the exact head by an oracle of its own: balls for float64, float64 for float32."""
    c = compiled(kind, method)
    try:
        network = layers_of(c, form, dtype)
    except UnsupportedError as error:
        pytest.skip(str(error))
    points = c.target.domain.sample(400, np.random.default_rng(1))
    points = np.concatenate([points, c.target.domain.corners(16)])
    got, cells = outputs(network, c, points, dtype), Cells.of(c.head.state_dict())
    assert np.abs(got - c.target(points)).max() <= network.error_bound
    assert network.dtype == dtype and c.certificate.exact_bound < network.error_bound
    if dtype == torch.float64:
        few = points[-2:]
        with bits(160):
            exact = np.array([[float(y.mid()) for y in cells.in_balls(z)] for z in few.tolist()])
        off = np.abs(got[-2:] - exact).max()
    else:
        exact = cells.in_floats(points)
        off = np.abs(got - exact).max()
    assert off <= network.rounding < 0.5  # and it says something
    allowed = network.rounding
    with torch.no_grad():  # negative control: a part in a thousand on W_O, in float32 a half
        network.attention.w_o.mul_(1.001 if dtype == torch.float64 else 1.5)
    assert np.abs(outputs(network, c, points[-len(exact) :], dtype) - exact).max() > allowed
    with pytest.raises(UnsupportedError, match="changed"):
        network.error_bound  # noqa: B018


def test_the_log_form_in_single_precision_says_how_wrong_it_is():
    """It erred by 0.4 at a tolerance of 0.003, without a word."""
    c = pa.compile("sin(3*x)", pa.Box([-1], [1]), tolerance=0.003, method="hard", dtype=torch.float32)
    with pytest.raises(ToleranceError, match=r"float32.*at most.*rounding") as refused:
        c.layers("log")
    assert all(word in refused.value.hint for word in ("torch.float64", "fewer keys", "tolerance=4.0"))
    with pytest.raises(ToleranceError):
        c.layers("indexed")  # no better: its scores are off by as much, so that it is not advised
    assert "indexed" not in refused.value.hint
    layers = layers_of(c, "log", torch.float32)
    points = np.linspace(-1, 1, 801)[:, None]
    error = np.abs(outputs(layers, c, points, torch.float32) - np.sin(3 * points)).max()
    assert 0.1 < error <= layers.error_bound
    assert c.layers("log", dtype=torch.float64).error_bound <= 0.003
    assert c.layers("log", tolerance=5.0).error_bound == layers.error_bound <= 5


def test_scores_that_are_off_multiply_the_error_of_a_hard_head():
    """Near cells hold nearly equal values, so the indexed form loses little; the log form's columns hold ±1."""
    c = pa.compile("sin(3*x)", pa.Box([-1], [1]), tolerance=0.1, method="hard", dtype=torch.float32)
    log, indexed = (layers_of(c, form, torch.float32) for form in FORMS)
    assert 5 * indexed.rounding < log.rounding
    with pytest.raises(ToleranceError, match="indexed"):
        c.layers("log")
    assert indexed.rounding < layers_rounding(indexed, *flat_ends(c)).bound() / 4


def test_a_cast_network_claims_nothing():
    layers = compiled("mixed").layers("indexed")
    assert layers.error_bound < 0.4 and copy.deepcopy(layers).error_bound == layers.error_bound
    with pytest.raises(UnsupportedError, match="cast"):
        layers.float().error_bound  # noqa: B018
    assert literal_layers(compiled("mixed").head, "log").error_bound == math.inf
    with pytest.raises(UnsupportedError, match="float64 or"):
        compiled("mixed").layers(dtype=torch.float16)


def test_numbers_that_the_dtype_does_not_hold_leave_no_bound():
    c = pa.compile("sin(1e30*x0)", pa.Box([0], [3e-30]), tolerance=0.3, method="hard")  # R is 1e61
    assert c.layers("log").error_bound <= 0.3
    with pytest.raises(ToleranceError, match="at most inf"):
        c.layers("log", dtype=torch.float32)
    assert layers_of(c, "indexed", torch.float32).error_bound == math.inf


def test_a_slope_that_all_cells_share_costs_nothing():
    """Tangents of x² near 100 differ by less than 1, and all together change by 200."""
    c = pa.compile("x0*x0", pa.Box([100], [101]), tolerance=0.01, method="affine")
    assert layers_rounding(c.layers("indexed"), *flat_ends(c)).spread < 2
    few = layers_rounding(literal_layers(c.head, "indexed", torch.float32), *flat_ends(c))
    points = np.linspace(100, 101, 500)[:, None]
    got = outputs(layers_of(c, "indexed", torch.float32), c, points, torch.float32)
    assert np.abs(got - Cells.of(c.head.state_dict()).in_floats(points)).max() <= few.bound() < 2


def test_layers_of_a_changed_head_are_refused():
    c = pa.compile("2*x", pa.Box([0], [1]), tolerance=0.15, method="hard")
    c.head.values.mul_(1.5)
    with pytest.raises(UnsupportedError, match="changed"):
        c.layers()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_in_another_norm_the_bound_is_of_that_norm(dtype):
    c = pa.compile("x0*x1", pa.Box([0, 0], [3, 1]), tolerance=0.3, norm=2, method="hard")
    layers = layers_of(c, "log", dtype)
    assert layers.norm == "2" and layers.error_bound > c.certificate.exact_bound
    side = (np.arange(120) + 0.5) / 120
    points = np.stack([g.ravel() for g in np.meshgrid(3 * side, side)], axis=1)
    error = outputs(layers, c, points, dtype)[:, 0] - points.prod(axis=1)
    assert math.sqrt(3 * (error**2).mean()) <= layers.error_bound
    error = c.head.affine_scores().offset_error
    pointwise = layers_rounding(layers, *flat_ends(c), offset_error=error).bound()
    assert layers.rounding == pytest.approx(math.sqrt(3) * pointwise)  # (volume · outputs)^{1/2}


def test_an_estimate_has_no_bound_and_its_rounding_counts_against_the_tolerance():
    c = pa.compile("sin(3*x)", pa.Box([-1], [1]), tolerance=0.1, method="train", dtype=torch.float32)
    assert c.certificate.kind == "estimated"
    layers = c.layers("indexed")
    assert layers.error_bound == math.inf and layers.rounding < 0.1
    with pytest.raises(ToleranceError, match="estimated"):
        c.layers("indexed", tolerance=c.error_estimate * 1.0001)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e5])
def test_powers_rates_and_scales(form, dtype, scale):
    """Scattered centers with powers that cancel their squares, and a grid with another rate on each axis."""
    rng = np.random.default_rng(4)
    box = pa.Box([scale, -scale], [2 * scale, scale])
    centers = 30 * scale * rng.normal(size=(12, 2))
    powers = (centers**2).sum(axis=1) + 0.01 * scale**2 * rng.normal(size=12)
    shapes = {"input_shapes": ((2,),), "output_shape": (2,)}
    scattered = ScatteredHead(
        torch.tensor(centers),
        0.5 / scale**2,
        torch.tensor(rng.normal(size=(12, 2))),
        powers=torch.tensor(powers),
        **shapes,
    )
    grid = pa.ProductGrid.uniform(box, (3, 4))
    rates = np.array([9.0, 2.5]) / scale**2
    on_grid = GridHead(grid, rates, torch.tensor(rng.normal(size=(12, 2))), half_windows=(2, 2), **shapes)
    for head in (scattered, on_grid):
        network, scores = literal_layers(head, form, dtype), head.affine_scores()
        errors = {"offset_error": scores.offset_error, "value_error": scores.value_error}
        allowed = layers_rounding(network, box.lo, box.hi, **errors).bound()
        points = box.sample(5, rng)
        with torch.no_grad():
            got = network(torch.from_numpy(points)).double().numpy()
        with bits(200):
            exact = np.array(
                [[float(y.mid()) for y in Cells.of(head.state_dict()).in_balls(z)] for z in points.tolist()]
            )
        assert (
            np.abs(got - exact).max()
            <= allowed
            < (1e-7 if dtype == torch.float64 else 1.0) * (1 + (head is scattered) * 9)
        )


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("affine", [False, True])
def test_tokenwise_layers_have_a_bound_of_their_own(affine, dtype):
    rng = np.random.default_rng(7)
    partition, box = pa.MaxAffine(rng.normal(size=(6, 2)), 0.3 * rng.normal(size=6)), pa.Box([-1, -1], [1, 1])
    values, slopes = rng.normal(size=(6, 2)), rng.normal(size=(6, 2, 2)) if affine else None
    made = reassignment(partition, values, box, margin=0.2, tolerance=0.05, value_slopes=slopes, dtype=dtype)
    network = reassignment_layers(made, 3, token_leak=1e-3)
    points = box.sample(6000, rng).astype(np.float32).astype(np.float64)
    scores = np.sort(points @ partition.slopes.T + partition.offsets, axis=1)
    points = points[scores[:, -1] - scores[:, -2] >= 0.2][:600]
    cell = partition.cell(points)
    expected = values[cell] + (np.einsum("nom,nm->no", slopes[cell], points) if affine else 0)
    with torch.no_grad():
        got = network(torch.from_numpy(points.reshape(-1, 3, 2))).double().reshape(-1, 2).numpy()
    assert np.abs(got - expected).max() <= network.error_bound < 0.1
    assert made.certificate.error_bound < network.error_bound


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_the_bound_for_dot_products_is_rounded_outward(dtype):
    """Against its own formula in ball arithmetic, for tensors whose sums do not fit into float64."""
    rng = np.random.default_rng(3)
    for _ in range(40):
        m, n = int(rng.integers(1, 5)), int(rng.integers(1, 40))
        tensors = [torch.tensor(rng.normal(size=shape), dtype=dtype) for shape in ((n, m + 1), (n, 2), (m,))]
        attention = SimpleNamespace(key=tensors[0], value=tensors[1], origin=tensors[2])
        lo = rng.normal(size=m)
        hi = lo + rng.uniform(0, 1, m)
        key, value, origin = (t.double().tolist() for t in tensors)
        u = arb(torch.finfo(dtype).eps) / 2
        far = [max(abs(arb(a) - arb(o)), abs(arb(b) - arb(o))) for a, b, o in zip(lo.tolist(), hi.tolist(), origin)]
        size = [max(abs(a), abs(b)) for a, b in zip(lo.tolist(), hi.tolist())]
        products = max(sum((abs(arb(k)) * r for k, r in zip(row, far)), abs(arb(row[-1]))) for row in key) * (m + 7)
        stored = max(sum((abs(arb(k)) * r for k, r in zip(row, size)), arb(0)) for row in key) * 3
        moved = (arb(2.02) * (products + stored) * u + 40 * u).expm1()
        exact = (moved + arb(2.02) * (n + 16) * u) * max(abs(x) for row in value for x in row)
        found = dot_product_rounding(attention, lo, hi)
        assert exact.upper() <= found
        assert not exact <= found * (1 - 1e-12)  # negative control: no room for anything else


def test_rounding_bounds_are_not_vacuous_in_float64():
    c = compiled("torch 2-D")
    assert c.layers("log").rounding < 1e-9
    assert c.layers("indexed").rounding < 1e-9
    assert dot_product_rounding(c.head.as_attention(), *flat_ends(c)) < 1e-9


# --- the tensors ---------------------------------------------------------------------------------------------------------


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
    assert difference > layers_rounding(network, *flat_ends(c)).bound() + head_rounding(c)


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


class Largest(TorchDispatchMode):
    """Watches how many numbers any operation returns, views of stored tensors aside."""

    def __init__(self, network: torch.nn.Module) -> None:
        super().__init__()
        self.stored, self.most = {t.untyped_storage().data_ptr() for t in network.buffers()}, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for t in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(t, torch.Tensor) and t.untyped_storage().data_ptr() not in self.stored:
                self.most = max(self.most, t.numel())
        return out


@pytest.mark.parametrize("form", FORMS)
def test_a_large_batch_takes_little_memory(form):
    """801 queries at 1,001 keys took 13 GB in the log form, whose Linear(Z) has 4 million numbers for each."""
    c = pa.compile("sin(3*x)", pa.Box([-1], [1]), tolerance=0.003, method="hard")
    layers, z = c.layers(form), torch.linspace(-1, 1, 801, dtype=torch.float64)[:, None]
    with Largest(layers) as seen, torch.no_grad():
        out = layers(z)
    assert seen.most <= 1 << 23  # 64 MiB
    assert (out - torch.sin(3 * z[:, 0])).abs().max() <= layers.error_bound


@pytest.mark.parametrize("case", ["sine 1-D typed", "sequence 2x2", "cross sequences"])
@pytest.mark.parametrize("form", FORMS)
def test_steps_change_nothing_but_rounding(form, case, monkeypatch):
    """The batch in steps; and, where not even one input fits, the columns too."""
    c = compiled(case)
    layers, inputs = c.layers(form), inputs_for(c, sample(c)[:12])
    whole, columns = layers(*inputs), layers.num_keys
    held = 2 * len(layers.attention.w_k) + 2 * len(layers.attention.w_v) + 3 * len(layers.attention.w_o[0])
    for numbers in (3 * held * columns, held * columns // 3):
        monkeypatch.setattr("partita.heads.layers._AT_ONCE", numbers)
        with Largest(layers) as seen, torch.no_grad():
            again = layers(*inputs)
        assert (again - whole).abs().max() <= 2 * layers.rounding
        assert seen.most <= numbers + held * columns
    assert layers(*(z[:0] for z in inputs)).shape == whole[:0].shape
    monkeypatch.setattr(
        torch, "exp", lambda x: x.exp() + 1e-3
    )  # negative control: this is how the last one is computed
    assert (layers(*inputs) - whole).abs().max() > 2 * layers.rounding


def test_layers_export_with_any_batch():
    c = compiled("mixed")
    layers, z = c.layers("log"), torch.from_numpy(sample(c)[:9])
    dynamic = ({0: torch.export.Dim("batch", max=1 << 40)},)
    program = torch.export.export(layers, (z[:3],), dynamic_shapes=dynamic).module()
    assert (program(z) - layers(z)).abs().max() <= 2 * layers.rounding


@pytest.mark.parametrize(("cells", "tokens", "affine"), [(20_000, 2, False), (3_000, 8, True), (200, 1_000, True)])
def test_tokenwise_layers_are_refused_before_anything_is_allocated(cells, tokens, affine):
    slopes = torch.zeros(cells, 1, 2) if affine else None
    shapes = {"input_shapes": ((2,),), "output_shape": (1,)}
    head = ScatteredHead(torch.rand(cells, 2), 9.0, torch.zeros(cells, 1), value_slopes=slopes, **shapes)
    with pytest.raises(SizeError, match="GiB"):
        tokenwise_layers(head, tokens)
