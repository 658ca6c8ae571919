"""Heads whose values are a tensor train: the head, the cross approximation, the fit, and what they must not claim."""

import copy
import functools
import math

import numpy as np
import pytest
import torch

import partita as pa
from partita.errors import DomainError, NonFiniteValueError, ShapeError, SizeError, ToleranceError
from partita.geometry import Box, ProductGrid
from partita.heads import GridHead, literal_layers
from partita.heads.train_head import TrainHead, rounded_cores
from partita.kernels import train_torch as train_module
from partita.search.train_cross import _Sweeps, cross_approximation
from partita.search.train_fit import TrainLimits, fit_train, held_out_error

CASES = {  # counts, ranks between the axes, input shapes, output shape
    "one axis": ((6,), (), ((1,),), ()),
    "three axes": ((4, 3, 5), (2, 3), ((3,),), ()),
    "vector": ((3, 4, 2), (3, 2), ((3,),), (2,)),
    "sequence": ((2, 3, 2, 3), (2, 4, 2), ((2, 2),), (2, 2)),
    "two arguments": ((3, 2, 4), (2, 2), ((1,), (2,)), (3,)),
    "single keys": ((1, 5, 1), (1, 2), ((3,),), ()),
}


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """The matrices are small: threads would mostly wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def unit_box(m):
    return Box(-np.ones(m), np.ones(m))


def random_head(name, dtype=torch.float64, seed=0):
    counts, inner, inputs, output = CASES[name]
    rng, ranks = np.random.default_rng(seed), (1, *inner, math.prod(output))
    numpy_dtype = np.float32 if dtype == torch.float32 else np.float64
    grid = ProductGrid.uniform(unit_box(len(counts)), counts, dtype=numpy_dtype)
    cores = [torch.from_numpy(rng.normal(size=(a, p, b))).to(dtype) for a, p, b in zip(ranks, counts, ranks[1:])]
    rates = 0.5 + 3 * rng.random(len(counts))
    return TrainHead(grid, rates.astype(numpy_dtype), cores, input_shapes=inputs, output_shape=output), grid


def full_tensor(cores):
    """The whole tensor, `(P_1, …, P_m, out)`."""
    table = np.ones((1, 1))
    for core in cores:
        table = np.einsum("...a,apb->...pb", table, np.asarray(core, dtype=np.float64))
    return table[0]


def by_hand(head, points):
    """One softmax over the listed cells in extended precision, sharing no code with the library."""
    axes = [a.double().numpy() for a in head.axes]
    centers = np.stack([c.ravel() for c in np.meshgrid(*axes, indexing="ij")], axis=1).astype(np.longdouble)
    rates = head.inverse_temperature.double().numpy()
    scores = -0.5 * (rates * (points[:, None].astype(np.longdouble) - centers) ** 2).sum(axis=2)
    weights = np.exp(scores - scores.max(axis=1, keepdims=True))
    values = full_tensor([c.detach().double() for c in head.cores]).reshape(len(centers), -1)
    return ((weights / weights.sum(axis=1, keepdims=True)) @ values).astype(np.float64)


def queries(m, dtype=torch.float64, count=40):
    return torch.from_numpy(1.3 * unit_box(m).sample(count, np.random.default_rng(5))).to(dtype)


# ---- the head


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("name", CASES)
def test_the_head_is_the_grid_head_of_its_expanded_values(name, dtype):
    head, grid = random_head(name, dtype)
    counts, _, inputs, output = CASES[name]
    z = queries(len(counts), dtype)
    values = torch.from_numpy(full_tensor([c.double() for c in head.cores]).reshape(grid.num_cells, -1)).to(dtype)
    rates = head.inverse_temperature.numpy()
    same = GridHead(grid, rates, values, half_windows=max(counts), input_shapes=inputs, output_shape=output)
    atol = 1e-12 if dtype == torch.float64 else 1e-4
    assert np.allclose(head.evaluate(z).numpy(), by_hand(head, z.double().numpy()), rtol=0, atol=atol)
    assert torch.allclose(head.evaluate(z), same.evaluate(z), rtol=0, atol=atol)
    assert torch.allclose(head.evaluate(z), head.evaluate_dense(z), rtol=0, atol=atol)
    assert torch.allclose(head.values, values, rtol=0, atol=atol)


def test_a_wrong_entry_of_a_core_is_noticed():
    """Negative control: the comparison above sees one entry that moved."""
    head, _ = random_head("three axes")
    z = queries(3)
    before = by_hand(head, z.numpy())
    head.core_1[1, 2, 0] += 1e-6
    assert np.abs(head.evaluate(z).numpy() - before).max() > 1e-8


@pytest.mark.parametrize("name", CASES)
def test_shapes_batches_and_chunks(name, monkeypatch):
    head, _ = random_head(name)
    _, _, inputs, output = CASES[name]
    rng = np.random.default_rng(1)
    arguments = [torch.from_numpy(rng.normal(size=(4, 5, *shape))) for shape in inputs]
    whole = head(*arguments)
    assert whole.shape == (4, 5, *output)
    assert torch.equal(head(*(a[1, 2] for a in arguments)), head(*(a[1:2, 2:3] for a in arguments))[0, 0])
    assert head(*(a[:0] for a in arguments)).shape == (0, 5, *output)
    monkeypatch.setattr(train_module, "_AT_ONCE", 64)
    assert torch.allclose(head(*arguments), whole, rtol=0, atol=1e-13)


@pytest.mark.parametrize("name", ["three axes", "vector"])
def test_gradients_in_z_and_in_the_cores(name):
    head, _ = random_head(name)
    names = set(head.state_dict())
    stored = head.num_parameters
    head.unfreeze()
    z = queries(3, count=5).requires_grad_()
    assert torch.autograd.gradcheck(head.evaluate, (z,))
    assert torch.autograd.gradcheck(lambda *cores: torch.func.functional_call(head, _named(cores), (z,)), head.cores)
    assert {n for n, _ in head.named_parameters()} == {f"core_{i}" for i in range(3)}
    head.evaluate(z).sum().backward()
    assert all(core.grad is not None for core in head.cores)
    head.freeze()
    assert not list(head.parameters()) and set(head.state_dict()) == names and head.num_parameters == stored


def _named(cores):
    return {f"core_{i}": core for i, core in enumerate(cores)}


@pytest.mark.parametrize("name", CASES)
def test_a_small_head_can_be_written_out(name):
    head, _ = random_head(name)
    _, _, inputs, _ = CASES[name]
    rng = np.random.default_rng(2)
    arguments = [torch.from_numpy(rng.normal(size=(7, *shape))) for shape in inputs]
    expected = head(*arguments)
    for form in ("log", "indexed"):
        assert torch.allclose(literal_layers(head, form)(*arguments), expected, rtol=0, atol=1e-9)
    assert torch.allclose(head.as_attention()(*arguments), expected, rtol=0, atol=1e-9)


def test_a_large_head_is_not_written_out():
    m = 300
    grid = ProductGrid.uniform(unit_box(m), 32)
    head = TrainHead(grid, 9.0, [torch.ones(1, 32, 1)] * m, input_shapes=((m,),), output_shape=())
    assert head.num_keys == 32**300 and head.num_parameters == 2 * 32 * m + m and head.dtype == torch.float32
    z = torch.zeros(2, m)
    assert torch.allclose(head(z), torch.ones(2), atol=1e-4)
    assert head.middle().shape == (m,) and "keys" in repr(head)
    for wanted in (head.as_attention, head.affine_scores, lambda: head.evaluate_dense(z), lambda: head.values):
        with pytest.raises(SizeError, match=r"[Cc]all the head"):
            wanted()
    with pytest.raises(SizeError):
        literal_layers(head, "indexed")


def test_a_head_survives_copies_casts_and_export():
    head, _ = random_head("vector")
    z = queries(3)
    twin, _ = random_head("vector", seed=1)
    assert not torch.allclose(twin(z), head(z))
    twin.load_state_dict(head.state_dict())
    assert torch.equal(twin(z), head(z)) and torch.equal(copy.deepcopy(head)(z), head(z))
    assert torch.allclose(copy.deepcopy(head).float()(z.float()).double(), head(z), atol=1e-5)
    program = torch.export.export(head, (z,), dynamic_shapes=(({0: torch.export.Dim("batch", max=1 << 40)},),))
    assert torch.allclose(program.module()(z[:7]), head(z[:7]), rtol=0, atol=1e-13)


@pytest.mark.parametrize(
    "shapes", [[(1, 4, 2)], [(1, 4, 2), (3, 5, 1)], [(1, 4, 2), (2, 5, 2)], [(1, 5, 2), (2, 4, 1)], [(1, 4), (4, 5, 1)]]
)
def test_cores_that_do_not_fit_are_refused(shapes):
    grid = ProductGrid.uniform(unit_box(2), (4, 5))
    with pytest.raises(ShapeError, match="cores have shapes"):
        TrainHead(grid, 1.0, [torch.zeros(s) for s in shapes], input_shapes=((2,),), output_shape=())
    with pytest.raises(DomainError):
        TrainHead(grid, -1.0, [torch.zeros(1, 4, 1), torch.zeros(1, 5, 1)], input_shapes=((2,),), output_shape=())


# ---- rounding and the cross


def random_train(sizes, rank, outputs=1, seed=0):
    rng, m = np.random.default_rng(seed), len(sizes)
    ranks = [1, *[rank] * (m - 1), outputs]
    return [rng.normal(size=(ranks[i], sizes[i], ranks[i + 1])) for i in range(m)]


def test_rounding_finds_the_rank_and_keeps_its_promise():
    cores = random_train((5, 6, 4, 5), 3, outputs=2)
    padded = [np.concatenate([c, c], axis=2) if i < 3 else c for i, c in enumerate(cores)]
    padded = [np.concatenate([c, 0.5 * c], axis=0) if i > 0 else c for i, c in enumerate(padded)]
    exact, tensors = full_tensor(padded), [torch.from_numpy(c) for c in padded]
    short = rounded_cores(tensors, 1e-9)
    assert [c.shape[2] for c in short] == [3, 3, 3, 2]
    assert np.allclose(full_tensor(short), exact, atol=1e-10)
    scale = math.sqrt((exact**2).sum() / (5 * 6 * 4 * 5))
    for share in (0.5, 0.1, 0.01):
        coarse = full_tensor(rounded_cores(tensors, share * scale))
        assert math.sqrt(((coarse - exact) ** 2).sum() / (5 * 6 * 4 * 5)) <= share * scale
    assert max(c.shape[2] for c in rounded_cores(tensors, 0.7 * scale)[:-1]) < 3  # negative control: it does cut


@pytest.mark.parametrize("outputs", [1, 3])
@pytest.mark.parametrize("sizes", [(6, 7, 5, 8), (9, 4), (12,), (3, 1, 5, 4, 2)])
def test_the_cross_recovers_a_low_rank_tensor(sizes, outputs):
    exact = full_tensor(random_train(sizes, 3, outputs))
    asked = 0

    def sample(index):
        nonlocal asked
        asked += len(index)
        return exact[tuple(index.T)]

    found = cross_approximation(sample, sizes, tolerance=1e-8, outputs=outputs, seed=1)
    assert found.status == "reached" and found.error_estimate <= 1e-8
    assert np.abs(full_tensor(found.cores) - exact).max() <= 1e-7
    assert max(c.shape[0] for c in found.cores) <= 3 * outputs
    again = cross_approximation(sample, sizes, tolerance=1e-8, outputs=outputs, seed=1)
    assert all(np.array_equal(a, b) for a, b in zip(found.cores, again.cores))


@pytest.mark.parametrize("direction", ["rightwards", "leftwards"])
@pytest.mark.parametrize("outputs", [1, 3])
def test_one_sweep_in_either_direction_interpolates(direction, outputs):
    sizes, rng = (9, 12, 11, 9), np.random.default_rng(2)
    exact = full_tensor(random_train(sizes, 8, outputs))
    sweeps = _Sweeps(lambda index: exact[tuple(index.T)], sizes, outputs)
    sweeps.add(np.column_stack([rng.integers(sizes, size=(60, 4)), np.arange(60) % outputs]))
    getattr(sweeps, direction)(1e-10, 64)
    assert np.abs(full_tensor(sweeps.cores) - exact).max() <= 1e-8
    interpolating = sweeps.cores[:-1] if direction == "rightwards" else sweeps.cores[1:]
    assert max(np.abs(core).max() for core in interpolating) <= 1.05 + 1e-9  # rows of largest volume


def test_the_cross_does_not_claim_a_tensor_of_full_rank():
    exact = np.random.default_rng(3).normal(size=(8, 8, 8, 8))
    found = cross_approximation(lambda index: exact[tuple(index.T)][:, None], (8,) * 4, tolerance=1e-3, rank=6)
    assert found.status == "rank" and found.error_estimate > 0.1
    assert np.abs(full_tensor(found.cores)[..., 0] - exact).max() >= found.error_estimate * (1 - 1e-12)


# ---- the fit


class Function:
    """A function that remembers where it was asked."""

    def __init__(self, f, box):
        self.f, self.lo, self.hi = f, np.full(box.dimension, np.inf), np.full(box.dimension, -np.inf)
        self.count = 0

    def __call__(self, points):
        self.lo, self.hi = np.minimum(self.lo, points.min(axis=0)), np.maximum(self.hi, points.max(axis=0))
        self.count += len(points)
        return self.f(points)


def seen_error(fit, f, count=3000, seed=99):
    z = fit.grid.box.sample(count, np.random.default_rng(seed))
    with torch.no_grad():
        got = fit.head()(torch.from_numpy(z).reshape(count, *fit.grid.box.shape)).numpy().reshape(count, -1)
    return float(np.abs(got - np.reshape(f(z), got.shape)).max())


FAR = Box(np.array([1000.0, -3.0, 0.1]), np.array([1000.5, 5.0, 0.2]))
FUNCTIONS = {
    "product": (unit_box(8), lambda z: np.prod(1 + 0.5 * np.sin(z * np.arange(1, 9) / 4), axis=1), 1e-7, 1),
    "sum": (unit_box(8), lambda z: np.sin(z * np.arange(1, 9) / 4).sum(axis=1), 1e-8, 2),
    "wave": (unit_box(10), lambda z: np.cos(z.sum(axis=1)), 1e-8, 2),
    "peak": (unit_box(10), lambda z: 1 / (1 + (z**2).sum(axis=1)), 1e-6, 10),
    "peak aside": (unit_box(12), lambda z: 1 / (1 + ((z - 0.37) ** 2).sum(axis=1)), 1e-5, 12),
    "constant": (unit_box(6), lambda z: np.full(len(z), 2.5), 1e-9, 1),
    "zero": (unit_box(3), lambda z: np.zeros(len(z)), 1e-9, 1),
    "one variable": (unit_box(7), lambda z: np.sin(3 * z[:, 4]), 1e-8, 1),
    "one dimension": (unit_box(1), lambda z: np.exp(z[:, 0]), 1e-9, 1),
    "far and unequal": (FAR, lambda z: np.sin(z[:, 0] - 1000) * np.exp(z[:, 1] / 3) + np.sqrt(z[:, 2]), 1e-6, 2),
    "sequence": (Box.sequence(-1, 1, tokens=3, dim=2), lambda z: np.exp(-(z**2).sum(axis=1)), 1e-7, 1),
    "large": (unit_box(4), lambda z: 1e30 * np.cos(z.sum(axis=1)), 1e22, 2),
    "small": (unit_box(4), lambda z: 1e-30 * np.cos(z.sum(axis=1)), 1e-38, 2),
}


@functools.cache
def fitted(name):
    box, f, tolerance, _ = FUNCTIONS[name]
    asked = Function(f, box)
    return fit_train(asked, box, tolerance=tolerance), asked


@pytest.mark.parametrize("name", FUNCTIONS)
def test_low_rank_functions_are_fitted(name):
    box, f, tolerance, rank = FUNCTIONS[name]
    fit, asked = fitted(name)
    assert fit.reached and fit.status == "reached" and fit.error_estimate <= tolerance
    assert seen_error(fit, f) <= tolerance
    assert max(fit.ranks) <= rank and fit.ranks[0] == fit.ranks[-1] == 1
    assert fit.evaluations == asked.count and fit.worst.samples <= asked.count
    assert (asked.lo >= box.lo.ravel()).all() and (asked.hi <= box.hi.ravel()).all()
    assert fit.head().num_keys == math.prod(fit.grid.counts)


def test_a_peak_that_random_points_do_not_see_is_fitted():
    """In 12 dimensions no uniform point comes near it; the head is right there all the same."""
    fit, _ = fitted("peak aside")
    assert abs(float(fit.head()(torch.full((12,), 0.37, dtype=torch.float64))) - 1) <= fit.tolerance


def test_axes_along_which_nothing_happens_cost_one_key():
    fit, _ = fitted("one variable")
    assert [count for i, count in enumerate(fit.grid.counts) if i != 4] == [1] * 6


def test_vector_outputs_share_one_train():
    def f(z):
        s = z.sum(axis=1)
        return np.stack([np.cos(s), np.sin(s), np.exp(-(z**2).sum(axis=1))], axis=1)

    fit = fit_train(f, unit_box(6), tolerance=1e-7, outputs=3)
    assert fit.reached and seen_error(fit, f) <= 1e-7 and fit.ranks[-1] == 3 and max(fit.ranks) <= 4
    assert fit.head()(torch.zeros(6, dtype=torch.float64)).shape == (3,)
    assert fit.head(output_shape=(1, 3))(torch.zeros(2, 6, dtype=torch.float64)).shape == (2, 1, 3)


def test_a_fit_in_float32_has_its_own_estimate():
    box, f, _, _ = FUNCTIONS["wave"]
    fit, _ = fitted("wave")
    single = held_out_error(fit.head(dtype=torch.float32), f, box)
    assert fit.error_estimate < 1e-8 < single.error < 1e-4


def test_the_same_seed_gives_the_same_fit():
    box, f, tolerance, _ = FUNCTIONS["sum"]
    one, two, other = (fit_train(f, box, tolerance=tolerance, seed=s) for s in (3, 3, 4))
    assert all(np.array_equal(a, b) for a, b in zip(one.cores, two.cores)) and one.worst == two.worst
    assert other.reached and one.worst != other.worst


@pytest.mark.parametrize("axis", [0, 4, 9])
def test_a_perturbed_core_is_noticed(axis):
    """Negative control of the estimate: one entry of one core moves by a millionth."""
    box, f, tolerance, _ = FUNCTIONS["wave"]
    head = fitted("wave")[0].head()
    assert held_out_error(head, f, box, seed=1).error <= tolerance
    head.cores[axis][0, head.counts[axis] // 2, 0] += 1e-6
    assert held_out_error(head, f, box, seed=1).error > 10 * tolerance


HIGH_RANK = np.random.default_rng(0).normal(size=(6, 6))
FAILURES = {
    "rank": (unit_box(6), lambda z: np.cos(np.einsum("ni,ij,nj->n", z, HIGH_RANK, z)), {"rank": 8}),
    "points": (unit_box(3), lambda z: np.abs(z[:, 0] - z[:, 1] / 3) + z[:, 2], {}),
    "evaluations": (unit_box(6), lambda z: np.cos(np.einsum("ni,ij,nj->n", z, HIGH_RANK, z)), {"evaluations": 60_000}),
    "seconds": (unit_box(4), lambda z: np.cos(z.sum(axis=1)), {"seconds": 0.0}),
}


@pytest.mark.parametrize("status", FAILURES)
def test_failure_is_reported_with_the_error_reached(status):
    box, f, limits = FAILURES[status]
    fit = fit_train(f, box, tolerance=1e-5, limits=TrainLimits(**limits))
    assert not fit.reached and fit.status == status
    assert fit.error_estimate > 1e-5
    assert seen_error(fit, f) <= 2 * fit.error_estimate
    if status == "evaluations":
        assert fit.evaluations <= 60_000
    if status == "seconds":
        assert fit.grid.counts == (1, 1, 1, 1)


def test_noise_is_not_fitted():
    """A function with errors of 1e-6 inside cannot be had to 1e-9, and the status does not say that it was."""
    fit = fit_train(
        lambda z: np.round(np.cos(z.sum(axis=1)), 6), unit_box(3), tolerance=1e-9, limits=TrainLimits(rank=8)
    )
    assert not fit.reached and 1e-7 < fit.error_estimate < 1e-4


def test_progress_counts_evaluations():
    told = []
    fit = fit_train(
        lambda z: z[:, 0] * z[:, 1],
        unit_box(2),
        tolerance=1e-6,
        progress=lambda what, done, of: told.append((what, done)),
    )
    assert told[-1] == ("evaluations", fit.evaluations) and told == sorted(told, key=lambda t: t[1])


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"tolerance": 0.0}, ToleranceError),
        ({"tolerance": math.nan}, ToleranceError),
        ({"outputs": 2}, ShapeError),
        ({"outputs": 0}, DomainError),
        ({"limits": TrainLimits(evaluations=100)}, DomainError),
        ({"ask": lambda z: np.log(z[:, 0])}, NonFiniteValueError),
    ],
)
@pytest.mark.filterwarnings("ignore:invalid value")
def test_misuse_is_refused(change, error):
    arguments = {"ask": lambda z: z[:, 0], "tolerance": 1e-3, **change}
    with pytest.raises(error):
        fit_train(arguments.pop("ask"), unit_box(2), **arguments)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_trains_are_compiled_saved_and_loaded(dtype, tmp_path):
    c = pa.compile("cos(x0 + x1 + x2 + x3)", pa.Box([-1] * 4, [1] * 4), tolerance=1e-2, method="train", dtype=dtype)
    assert isinstance(c.head, TrainHead) and c.certificate.kind == "estimated" and c.error_estimate <= 1e-2
    d = pa.load(c.save(tmp_path / "head"))
    z = np.random.default_rng(0).uniform(-1, 1, (50, 4))
    assert np.array_equal(c(z), d(z)) and c(z).dtype == np.dtype(str(dtype).removeprefix("torch."))
    assert d.certificate == c.certificate and all(check.holds for check in pa.recheck(d))
