"""Evaluators, autograd, symmetry and the hard limit of the folded heads."""

import copy
import subprocess
import sys

import numpy as np
import pytest
import torch
from method_cases import PAIRS, compiled, sample

import partita as pa
from partita.errors import ShapeError, SizeError, UnsupportedError
from partita.heads import GridHead, ScatteredHead
from partita.kernels import native

NAMES = [case.name for method, case in PAIRS if method.name == "hard"]
EVALUATORS = {
    "default": lambda head, z: head.evaluate(z),
    "torch": lambda head, z: head.evaluate(z.clone().requires_grad_()).detach(),
    "module": lambda head, z: head(*_split(head, z)).reshape(len(z), -1),
}


def _split(head, z):
    cuts = np.cumsum([0] + [int(np.prod(s)) for s in head.input_shapes])
    return [z[:, a:b].reshape(len(z), *s) for a, b, s in zip(cuts, cuts[1:], head.input_shapes)]


def deployment(c: pa.Compiled) -> float:
    return sum(t.value for t in c.certificate.terms if t.name in ("window", "score rounding", "summation"))


@pytest.mark.parametrize("evaluator", EVALUATORS)
@pytest.mark.parametrize("name", NAMES)
def test_every_evaluator_equals_dense_within_its_terms(name, evaluator):
    c = compiled(name)
    z = torch.from_numpy(sample(c)).to(c.head.dtype)
    difference = (EVALUATORS[evaluator](c.head, z) - c.head.evaluate_dense(z)).abs().max().item()
    assert difference <= 2 * deployment(c)


def test_a_window_that_is_too_narrow_is_noticed():
    """Negative control: κ = 4 with two centers per axis drops 10⁻¹ of the mass, and the law above would see it."""
    grid = pa.ProductGrid.uniform(pa.Box([-1], [1]), [12])
    h = 2 / 12
    head = GridHead(
        grid, 4 / h**2, torch.randn(12, 1, dtype=torch.float64), half_windows=1, input_shapes=((1,),), output_shape=()
    )
    z = torch.linspace(-1, 1, 301, dtype=torch.float64)[:, None]
    assert (head.evaluate(z) - head.evaluate_dense(z)).abs().max() > 1e-3


@pytest.mark.skipif(not native.AVAILABLE, reason="needs numba")
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("counts", [(1,), (7,), (1, 5), (4, 1, 3), (3, 4, 2, 5), (2, 2, 2, 2, 2, 2), (40, 3)])
@pytest.mark.parametrize("half_window", [1, 2, 3])
def test_native_and_torch_paths_agree_everywhere(counts, half_window, dtype, monkeypatch):
    monkeypatch.setattr(native, "WORTH", 0)  # small batches go through torch otherwise
    rng = np.random.default_rng(len(counts))
    box = pa.Box(-np.ones(len(counts)), np.ones(len(counts)))
    numpy_dtype = np.float32 if dtype == torch.float32 else np.float64
    grid = pa.ProductGrid.uniform(box, counts, dtype=numpy_dtype)
    rates = 20 / (2 / np.array(counts)) ** 2
    values = torch.from_numpy(rng.normal(size=(grid.num_cells, 3))).to(dtype)
    head = GridHead(grid, rates, values, half_windows=half_window, input_shapes=((len(counts),),), output_shape=(3,))
    points = np.concatenate(
        [
            box.sample(64, rng),
            box.corners(),
            grid.centers_of(rng.integers(grid.num_cells, size=16)),
            3 * box.sample(16, rng),
        ]
    )
    edges = np.stack([rng.choice((a[1:] + a[:-1]) / 2 if len(a) > 1 else a, 16) for a in grid.axes], axis=1)
    z = torch.from_numpy(np.concatenate([points, edges])).to(dtype)
    tolerance = 1e-12 if dtype == torch.float64 else 2e-5
    assert torch.allclose(head.evaluate(z), EVALUATORS["torch"](head, z), rtol=0, atol=tolerance)


@pytest.mark.parametrize("name", ["soft", "cross", "sequence 2x2"])
def test_gradients_in_z_and_in_the_values(name):
    c = compiled(name)
    head = copy.deepcopy(c.head).unfreeze()
    z = torch.from_numpy(sample(c)[:5]).clone().requires_grad_()
    assert torch.autograd.gradcheck(lambda t: head.evaluate(t), (z,), eps=1e-7, atol=1e-4, rtol=1e-3)
    head.evaluate(z).sum().backward()
    assert head.values.grad is not None and torch.isclose(
        head.values.grad.sum(), torch.tensor(5.0 * head.values.shape[1]).double()
    )


def test_gradients_of_a_scattered_head():
    rng = torch.Generator().manual_seed(0)
    centers, values, powers = (
        torch.randn(*s, generator=rng, dtype=torch.float64) for s in ((400, 3), (400, 2), (400,))
    )
    slopes = torch.randn(400, 2, 3, generator=rng, dtype=torch.float64)
    head = ScatteredHead(
        centers, 2.0, values, powers=0.1 * powers, value_slopes=slopes, input_shapes=((3,),), output_shape=(2,)
    )
    z = torch.randn(6, 3, generator=rng, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda t: head.evaluate(t), (z,))
    assert torch.allclose(head.evaluate(z), head.evaluate_dense(z), atol=1e-12)


@pytest.mark.parametrize("rate", [0.01, 5.0, 500.0, 1e6])
def test_scattered_heads_find_every_cell_that_matters(rate):
    rng = torch.Generator().manual_seed(1)
    centers, values, powers = (
        torch.randn(*s, generator=rng, dtype=torch.float64) for s in ((3000, 2), (3000, 1), (3000,))
    )
    head = ScatteredHead(centers, rate, values, powers=0.01 * powers, input_shapes=((2,),), output_shape=())
    z = torch.randn(300, 2, generator=rng, dtype=torch.float64)
    assert torch.allclose(head.evaluate(z), head.evaluate_dense(z), rtol=0, atol=1e-11)


@pytest.mark.parametrize("name", ["curve in R4", "finite set"])
def test_permuting_cells_changes_nothing(name):
    c = compiled(name)
    order = torch.randperm(c.num_keys, generator=torch.Generator().manual_seed(0))
    head = c.head
    other = ScatteredHead(
        head.centers[order],
        float(head.inverse_temperature),
        head.values[order],
        input_shapes=head.input_shapes,
        output_shape=head.output_shape,
    )
    z = torch.from_numpy(sample(c))
    assert torch.allclose(head.evaluate(z), other.evaluate(z), atol=1e-12)
    swapped = ScatteredHead(
        head.centers[order],
        float(head.inverse_temperature),
        head.values,
        input_shapes=head.input_shapes,
        output_shape=head.output_shape,
    )
    assert not torch.allclose(head.evaluate(z), swapped.evaluate(z), atol=1e-3)  # negative control


def test_a_common_affine_function_on_the_scores_changes_nothing():
    c = compiled("torch 2-D")
    attention = c.head.as_attention()
    z = torch.from_numpy(sample(c))
    before = attention(z)
    attention.key[:, 0] += 0.7
    attention.key[:, 2] -= 3.0
    assert torch.allclose(attention(z), before, atol=1e-10)
    attention.key[5, 2] += 300.0
    assert not torch.allclose(attention(z), before, atol=1e-3)  # negative control: one key only


def test_the_hard_limit_is_a_table_lookup():
    c = pa.compile("sin(3*x0) + x1", pa.Box([-1, -1], [1, 1]), method="hard", tolerance=0.3, sharpness=1e6)
    points = sample(c, 500)
    points = points[c.partition.margin(points) > 1e-3]
    table = c.head.values.numpy()[c.partition.cell(points)]
    assert np.allclose(c.head.evaluate(torch.from_numpy(points)).numpy(), table, atol=1e-12)


def test_weights_are_a_partition_of_unity():
    c = compiled("soft")
    head = copy.deepcopy(c.head)
    head.values.fill_(2.5)
    assert torch.allclose(head.evaluate(torch.from_numpy(sample(c))), torch.tensor(2.5).double(), atol=1e-14)


def test_state_dict_is_plain_tensors_and_freezing_keeps_its_names():
    head = copy.deepcopy(compiled("torch 2-D").head)
    names = set(head.state_dict())
    assert names == {"centers_0", "centers_1", "inverse_temperature", "values"}
    assert not list(head.parameters())
    assert [n for n, _ in head.unfreeze().named_parameters()] == ["values"] and set(head.state_dict()) == names
    assert not list(head.freeze().parameters()) and set(head.state_dict()) == names
    other = copy.deepcopy(head)
    other.values.zero_()
    other.load_state_dict(head.state_dict())
    assert torch.equal(other.values, head.values)


def test_counts_of_keys_and_numbers():
    c = compiled("vector 2-D typed")
    p, q = c.head.counts
    assert c.num_keys == p * q and c.num_parameters == 2 * p * q + p + q + 2
    cloud = compiled("curve in R4")
    assert cloud.num_parameters == cloud.num_keys * (4 + 1) + 1


def test_head_inputs_of_the_wrong_shape():
    head = compiled("sequence 2x2").head
    assert head(torch.zeros(2, 2, dtype=torch.float64)).shape == (2, 2)
    assert head(torch.zeros(4, 5, 2, 2)).shape == (4, 5, 2, 2)
    assert head(torch.zeros(0, 2, 2)).shape == (0, 2, 2)
    with pytest.raises(ShapeError, match="2, 2"):
        head(torch.zeros(3, 2))
    with pytest.raises(ShapeError, match="takes 2"):
        compiled("cross").head(torch.zeros(3, 2))
    with pytest.raises(ShapeError, match="batch"):
        compiled("cross").head(torch.zeros(3, 1), torch.zeros(4, 1))


def test_as_attention_refuses_what_it_cannot_list_or_express():
    grid = pa.ProductGrid.uniform(pa.Box([0] * 3, [1] * 3), 400)
    huge = GridHead.__new__(GridHead)
    torch.nn.Module.__init__(huge)
    huge.input_shapes, huge.output_shape, huge.counts = ((3,),), (), grid.counts
    huge.register_buffer("values", torch.zeros(1, 1))
    with pytest.raises(SizeError, match="64,000,000"):
        huge.as_attention()
    affine = ScatteredHead(
        torch.zeros(2, 1),
        1.0,
        torch.zeros(2, 1),
        value_slopes=torch.zeros(2, 1, 1),
        input_shapes=((1,),),
        output_shape=(),
    )
    with pytest.raises(UnsupportedError, match="affine"):
        affine.as_attention()


MEMORY = """
import sys, torch
import partita as pa
from partita.heads import GridHead
from partita.kernels import native
native.AVAILABLE = native.AVAILABLE and sys.argv[1] == "native"
grid = pa.ProductGrid.uniform(pa.Box([0]*3, [1]*3), 216)
values = torch.ones(grid.num_cells, 1, dtype=torch.float64)
head = GridHead(grid, 64 * 216.0**2, values, half_windows=1, input_shapes=((3,),), output_shape=())
out = head.evaluate(torch.rand(100_000, 3, dtype=torch.float64))
assert torch.allclose(out, torch.ones_like(out))
print(next(line for line in open("/proc/self/status") if line.startswith("VmHWM")).split()[1])
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads peak memory from /proc")
@pytest.mark.parametrize("path", ["native", pytest.param("torch", marks=pytest.mark.slow)])
def test_many_queries_on_ten_million_cells_fit_in_a_gibibyte(path):
    answer = subprocess.run([sys.executable, "-c", MEMORY, path], capture_output=True, text=True, check=True)
    assert int(answer.stdout) < 1 << 20  # KiB
