"""The operators of heads that factorise over axes (grids, tensor trains, ramps): torch's rules, gradients, and answers."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import partita as pa
from partita.heads import FoldedHead, GridHead, TrainHead
from partita.kernels import (
    grid_native,
    grid_torch,
    native,
    ramp_native,
    ramp_torch,
    train_native,
    train_operator,
    train_torch,
)
from partita.kernels.grid_torch import GridOperands
from partita.kernels.ramp_torch import RampOperands
from partita.kernels.trace_modes import wants_operator
from partita.kernels.train_torch import TrainOperands
from partita.ramps import ramp

DOUBLE, SINGLE = torch.float64, torch.float32
needs_numba = pytest.mark.skipif(not native.AVAILABLE, reason="needs numba")
PATHS = ["torch", pytest.param("native", marks=needs_numba)]
CUBE = pa.Box([-1.0] * 3, [1.0] * 3)


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = DOUBLE) -> Tensor:
    return torch.from_numpy(np.random.default_rng(seed).normal(size=shape)).to(dtype)


def grid_head(*, affine: bool, sharpness: float, half_windows: Any, dtype: torch.dtype = DOUBLE) -> GridHead:
    counts = (5, 6)
    grid = pa.ProductGrid.uniform(pa.Box([-1, -1], [1, 1]), counts, dtype=np.float32)
    slopes = normal(30, 2, 2, seed=1, dtype=dtype) if affine else None
    shapes = {"input_shapes": ((2,),), "output_shape": (2,)}
    rates = sharpness * (np.array(counts) / 2) ** 2
    return GridHead(grid, rates, normal(30, 2, dtype=dtype), value_slopes=slopes, half_windows=half_windows, **shapes)


def train_head(*, sharpness: float, dtype: torch.dtype = DOUBLE) -> TrainHead:
    counts = (9, 4, 7)
    grid = pa.ProductGrid.uniform(CUBE, counts, dtype=np.float32)
    cores = [normal(1, 9, 3, dtype=dtype), normal(3, 4, 5, seed=1, dtype=dtype), normal(5, 7, 2, seed=2, dtype=dtype)]
    rates = sharpness * (np.array(counts) / 2) ** 2
    return TrainHead(grid, rates, cores, input_shapes=((3,),), output_shape=(2,))


class Kind(NamedTuple):
    """A head, and the operator that it runs."""

    make: Callable[..., nn.Module]
    operator: str
    dimension: int


KINDS = {
    "window": Kind(lambda **k: grid_head(affine=True, sharpness=64.0, half_windows=1, **k), "grid_sum", 2),
    "whole": Kind(lambda **k: grid_head(affine=False, sharpness=0.7, half_windows=9, **k), "grid_sum", 2),
    "affine whole": Kind(lambda **k: grid_head(affine=True, sharpness=0.7, half_windows=(9, 2), **k), "grid_sum", 2),
    "sharp train": Kind(lambda **k: train_head(sharpness=400.0, **k), "train_sum", 3),
    "soft train": Kind(lambda **k: train_head(sharpness=0.7, **k), "train_sum", 3),
    "ramp": Kind(
        lambda dtype=DOUBLE: ramp([0.7, 0.4], 0.1, (-0.5, 0.75), anchors=9, domain=pa.Box([-1, -1], [1, 1]), dtype=dtype).head,
        "ramp_sum",
        2,
    ),
}  # fmt: skip
FOLDED = [name for name in KINDS if name != "ramp"]


def queries(kind: str, count: int = 7, dtype: torch.dtype = DOUBLE) -> Tensor:
    return torch.from_numpy(np.random.default_rng(3).uniform(-1, 1, (count, KINDS[kind].dimension))).to(dtype)


@pytest.fixture(params=PATHS)
def path(request, monkeypatch):
    """Which loops run; native ones for the smallest batch."""
    monkeypatch.setattr(native, "WORTH", 0 if request.param == "native" else 1 << 60)
    return request.param


def operands(head: nn.Module) -> tuple[Any, ...]:
    if isinstance(head, FoldedHead):
        return tuple(head.operands)
    return head.low, head.spacing, head.sharpness, head.anchors, head.width


def call(kind: str, head: nn.Module, z: Tensor) -> Tensor:
    """The operator itself, on points or on the queries of a ramp."""
    given = z if isinstance(head, FoldedHead) else head.queries(z)
    return getattr(torch.ops.partita, KINDS[kind].operator)(given, *operands(head))


def plain(kind: str, head: nn.Module, z: Tensor) -> Tensor:
    if isinstance(head, GridHead):
        return grid_torch.grid_sum(z, head.operands)
    if isinstance(head, TrainHead):
        return train_torch.train_sum(z, head.operands)
    return ramp_torch.ramp_sum(head.queries(z), RampOperands(*operands(head)))


# ---- torch's rules ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["affine whole", "sharp train", "ramp"])
def test_operators_keep_torchs_rules(kind, path):
    head, z = KINDS[kind].make(), queries(kind, 4)
    if isinstance(head, FoldedHead):
        head.unfreeze()
    given = z if isinstance(head, FoldedHead) else head.queries(z)
    rest = operands(head)
    operator = getattr(torch.ops.partita, KINDS[kind].operator)
    torch.library.opcheck(operator, (given.detach().requires_grad_(), *rest))
    backward = getattr(torch.ops.partita, KINDS[kind].operator + "_backward")
    values = head.value_names if isinstance(head, FoldedHead) else ()
    needs = {"grid_sum": [[True, True, True]], "train_sum": [[True, False, True, True]], "ramp_sum": []}
    factor = torch.ones_like(operator(given, *rest).detach())
    constants = [
        [t.detach() for t in r] if values and isinstance(r, list) and isinstance(r[0], Tensor) else r for r in rest
    ]
    constants = [t.detach() if isinstance(t, Tensor) else t for t in constants]
    arguments = (factor, given.detach(), *constants, *needs[KINDS[kind].operator])
    torch.library.opcheck(backward, arguments, test_utils=("test_schema", "test_faketensor"))


@pytest.mark.parametrize("kind", KINDS)
def test_first_and_second_derivatives(kind, path):
    head, z = KINDS[kind].make(), queries(kind, 2).requires_grad_()
    parts = [z]
    if isinstance(head, FoldedHead):
        head.unfreeze()
        if isinstance(head, GridHead) and head.value_slopes is not None:
            head.value_slopes = head.value_slopes.clone().requires_grad_()
            parts.append(head.value_slopes)
        parts += list(head.parameters())

    def run(*given: Tensor) -> Tensor:
        return head(given[0])

    assert torch.autograd.gradcheck(run, tuple(parts), eps=1e-5, atol=1e-5, rtol=1e-4, fast_mode=True)
    assert torch.autograd.gradgradcheck(run, tuple(parts), eps=1e-5, atol=1e-4, rtol=1e-4, fast_mode=True)


@pytest.mark.parametrize("kind", ["affine whole", "sharp train", "ramp"])
def test_derivatives_in_centers_and_temperatures(kind, path):
    head, z = KINDS[kind].make(), queries(kind, 2)
    operator, rest = getattr(torch.ops.partita, KINDS[kind].operator), operands(head)
    if kind == "ramp":
        run = lambda *moved: operator(head.queries(z), *moved, *rest[3:])  # noqa: E731
        given = [t.clone().requires_grad_() for t in rest[:3]]
    else:
        run = lambda rates, *centers: operator(z, list(centers), rates, *rest[2:])  # noqa: E731
        given = [t.clone().requires_grad_() for t in (rest[1], *rest[0])]
    assert torch.autograd.gradcheck(run, given, eps=1e-5, atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("kind", ["affine whole", "sharp train", "ramp"])
def test_many_gradients_at_once(kind, path):
    head, z = KINDS[kind].make(), queries(kind, 3).requires_grad_()
    out = head(z).reshape(-1)
    rows = torch.eye(len(out), dtype=DOUBLE)
    (together,) = torch.autograd.grad(out, z, rows, is_grads_batched=True, retain_graph=True)
    alone = [torch.autograd.grad(out, z, row, retain_graph=True)[0] for row in rows]
    assert torch.allclose(together, torch.stack(alone), rtol=1e-10, atol=1e-12)
    functional = torch.func.grad(lambda x: head(x).sum())(z.detach())
    assert torch.allclose(functional, sum(alone), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("kind", ["window", "soft train", "ramp"])
def test_compiled_graphs_hold_the_operator_and_exported_ones_plain_operations(kind, path):
    head, z = KINDS[kind].make(), queries(kind)
    seen: list[str] = []

    def keep(graph: torch.fx.GraphModule, _: Sequence[Tensor]) -> Callable[..., Any]:
        seen.extend(str(node.target) for node in graph.graph.nodes)
        return graph.forward

    torch._dynamo.reset()
    compiled = torch.compile(head, fullgraph=True, backend=keep)
    assert torch.equal(compiled(z), call(kind, head, z).reshape(head(z).shape))
    assert any("partita" in name for name in seen)
    torch._dynamo.reset()
    program = torch.export.export(head, (z,))
    targets = [str(node.target) for node in program.graph.nodes if node.op == "call_function"]
    assert targets and not any("partita" in name for name in targets)
    assert torch.allclose(program.module()(z), head(z), rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("kind", ["window", "soft train"])
def test_compiled_gradients_equal_eager_ones(kind, path):
    head, z = KINDS[kind].make().unfreeze(), queries(kind)
    torch._dynamo.reset()
    compiled = torch.compile(head, fullgraph=True, backend="aot_eager", dynamic=True)
    for count in (7, 4):
        found = []
        for run in (compiled, head):
            x = z[:count].clone().requires_grad_()
            found.append(torch.autograd.grad(run(x).square().sum(), [x, *head.parameters()]))
        assert all(torch.allclose(a, b, rtol=1e-10, atol=1e-11) for a, b in zip(*found))
    torch._dynamo.reset()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["window", "soft train", "ramp"])
def test_inductor(kind, path):
    head, z = KINDS[kind].make(), queries(kind)
    torch._dynamo.reset()
    assert torch.allclose(torch.compile(head, fullgraph=True)(z), head(z), rtol=1e-12, atol=1e-13)
    torch._dynamo.reset()


@pytest.mark.parametrize("kind", KINDS)
def test_settings_of_torch_change_nothing(kind):
    """Where torch multiplies matrices: native loops know no settings."""
    head, z = KINDS[kind].make(dtype=SINGLE), queries(kind, 40, SINGLE)
    expected = call(kind, head, z)
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("medium")
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert call(kind, head, z).equal(expected) or kind == "ramp"  # autocast changes w·x before the operator
            if kind == "soft train":  # negative control: matrix products without the operator
                assert (plain(kind, head, z) - expected).abs().max() > 1e-4
            x = z.clone().requires_grad_()
            (inside,) = torch.autograd.grad(head(x).sum(), x)
    finally:
        torch.set_float32_matmul_precision(before)
    x = z.clone().requires_grad_()
    assert torch.equal(torch.autograd.grad(head(x).sum(), x)[0], inside)


# ---- batches ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_strides_single_points_empty_batches_and_threads(kind, path):
    head, z = KINDS[kind].make(), queries(kind, 50)
    expected = call(kind, head, z)
    strided = torch.stack([z, z], dim=2)[:, :, 0]
    assert not strided.is_contiguous() and torch.equal(call(kind, head, strided), expected)
    assert torch.allclose(call(kind, head, z[7:8]), expected[7:8], rtol=1e-13, atol=1e-14)
    empty = z[:0].clone().requires_grad_()
    out = call(kind, head, empty)
    assert out.shape == expected[:0].shape
    assert torch.autograd.grad(out.sum(), empty)[0].shape == empty.shape
    with ThreadPoolExecutor(4) as pool:
        assert all(torch.equal(found, expected) for found in pool.map(lambda _: call(kind, head, z), range(8)))


@pytest.mark.parametrize("kind", KINDS)
def test_a_query_that_is_no_number_harms_no_other(kind, path):
    head, z = KINDS[kind].make(), queries(kind, 9)
    bad = z.clone()
    bad[4, 0] = torch.nan
    others = [0, 1, 2, 3, 5, 6, 7, 8]
    found, expected = call(kind, head, bad), call(kind, head, z)
    assert found[4].isnan().all() and torch.equal(found[others], expected[others])
    gradients = []
    for points in (bad, z):
        x = points.clone().requires_grad_()
        gradients.append(torch.autograd.grad(call(kind, head, x).sum(), x)[0])
    assert gradients[0][4].isnan().any() and torch.equal(gradients[0][others], gradients[1][others])


@needs_numba
@pytest.mark.parametrize("kind", FOLDED)
def test_threads_add_up_gradients_in_a_fixed_order(kind, monkeypatch):
    monkeypatch.setattr(native, "WORTH", 0)
    head, z = KINDS[kind].make().unfreeze(), queries(kind, 6500)
    found = {}
    for threads in (1, 3):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        runs = [torch.autograd.grad(head(z).sum(), list(head.parameters())) for _ in range(2)]
        assert all(torch.equal(a, b) for a, b in zip(*runs))
        found[threads] = runs[0]
    assert all(torch.allclose(a, b, rtol=1e-11, atol=1e-10) for a, b in zip(found[1], found[3]))


def test_small_batches_on_a_cpu_run_without_the_operator():
    """An operator costs more than a small batch does."""
    head, z = KINDS["window"].make(), queries("window")
    assert wants_operator(z)
    with _Operators() as seen:
        head(z)
        assert seen.names and not any("partita" in name for name in seen.names)
        head(z.clone().requires_grad_())  # gradients must not depend on torch's settings
        assert "partita.grid_sum.default" in seen.names


@needs_numba
def test_large_batches_run_in_the_operator():
    head, z = KINDS["window"].make(), queries("window", 40_000)
    with _Operators() as seen:
        head(z)
    assert "partita.grid_sum.default" in seen.names


class _Operators(TorchDispatchMode):
    """Which operators run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.append(str(function))
        return function(*args, **(kwargs or {}))


# ---- the same sums and gradients by every kernel -----------------------------------------------------------------------


@needs_numba
@pytest.mark.parametrize("whole", [False, True])
def test_native_grid_gradients_equal_those_of_torch(whole, monkeypatch):
    rule = {"native": 1e9, "torch": 1e9} if whole else {"native": 0.0, "torch": 0.0}
    monkeypatch.setattr(grid_torch, "_CELLS_PER_READ", rule)
    monkeypatch.setattr(grid_torch, "_CELLS_PER_READ_IN_1D", rule["torch"])
    rng = np.random.default_rng(0)
    for counts, outputs, affine in itertools.product(
        [(1,), (6,), (5, 3), (3, 1, 4), (2, 3, 3, 2)], [1, 9], [False, True]
    ):
        m, cells = len(counts), int(np.prod(counts))
        grid = GridOperands(
            [torch.linspace(-1, 1, c, dtype=DOUBLE) if c > 1 else torch.zeros(1, dtype=DOUBLE) for c in counts],
            torch.from_numpy(rng.uniform(0.1, 30, m)),
            [min(c, int(rng.choice([2, 4]))) for c in counts],
            normal(cells, outputs),
            normal(cells, outputs, m, seed=1) if affine else None,
            normal(m, seed=2) if affine else None,
        )
        z, grad = normal(300, m, seed=3), normal(300, outputs, seed=4)
        for needs in ([True, True, affine], [True, False, False], [False, True, False]):
            found = grid_native.grid_gradients(grad, z, grid, needs)
            _assert_near(found, grid_torch.grid_gradients(grad, z, grid, needs))
        moved = z.clone().requires_grad_()  # and torch's own derivative of the plain sum
        (own,) = torch.autograd.grad(grid_torch.grid_sum(moved, grid), moved, grad)
        _assert_near([grid_native.grid_gradients(grad, z, grid, [True, False, False])[0]], [own])


@needs_numba
@pytest.mark.parametrize("sharpness", [0.5, 20.0, 400.0])
def test_native_trains_equal_those_of_torch(sharpness):
    rng = np.random.default_rng(1)
    for counts, ranks in (((1,), (1, 2)), ((31,), (1, 3)), ((20, 2, 9), (1, 5, 2, 1)), ((3, 40), (1, 17, 4))):
        m = len(counts)
        train = TrainOperands(
            [torch.linspace(-1, 1, c, dtype=DOUBLE) if c > 1 else torch.zeros(1, dtype=DOUBLE) for c in counts],
            torch.tensor([sharpness * c * c / 4 for c in counts], dtype=DOUBLE),
            [torch.from_numpy(rng.normal(size=(a, c, b))) for a, c, b in zip(ranks, counts, ranks[1:])],
        )
        z, grad = normal(700, m, seed=3) * 0.8, normal(700, ranks[-1], seed=4)
        _assert_near([train_native.train_sum(z, train)], [train_torch.train_sum(z, train)])
        moved = z.clone().requires_grad_()
        (own,) = torch.autograd.grad(train_torch.train_sum(moved, train), moved, grad)
        for needs in ([True] * (m + 1), [True] + [False] * m, [False] + [True] * m):
            got = train_native.train_gradients(grad, z, train, needs)
            expected = train_torch.train_gradients(grad, z, train, needs)
            _assert_near([got[0], *got[1]], [expected[0], *expected[1]])
            if needs[0]:
                _assert_near([got[0]], [own])


@needs_numba
@pytest.mark.parametrize("sharpness", [1e-2, 5.4, 1024.0, 1e6])
def test_native_ramps_equal_those_of_torch(sharpness):
    for anchors, width in ((2, 2), (3, 2), (11, 8), (10**6, 30)):
        low, spacing, kappa = (torch.tensor(x, dtype=DOUBLE) for x in (0.7, 2 / (anchors - 1), sharpness))
        given = RampOperands(low, spacing, kappa, anchors, min(width, anchors))
        u, grad = torch.cat([normal(300) * 2, torch.tensor([1e30, -1e30, 0.7, 2.7])]), normal(304, seed=1)
        _assert_near([ramp_native.ramp_sum(u, given)], [ramp_torch.ramp_sum(u, given)])
        scale = 1 + sharpness * width * width
        found, expected = ramp_native.ramp_gradient(grad, u, given), ramp_torch.ramp_gradient(grad, u, given)
        _assert_near([found / scale], [expected / scale])


def _assert_near(found: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    for a, b in zip(found, expected, strict=True):
        assert a.shape == b.shape
        if b.numel():
            assert float((a - b).abs().max()) <= 300 * 2.0**-53 * (1 + float(b.abs().max()))


# ---- adversarial queries: within the roundings that are counted ------------------------------------------------------


def train_oracle(train: TrainHead, z: Tensor) -> tuple[np.ndarray, np.ndarray]:
    """The train in extended precision, and what roundings may do to it in units of u: `P + r + 4` of the products of absolute
    values an axis, and scores off by `5u R d²/2 + 16u`.
    """
    x = z.double().numpy().astype(np.longdouble)
    row, size, moved = np.ones((len(x), 1)), np.ones((len(x), 1)), np.zeros((len(x), 1))
    count = 0
    for i, (centers, core) in enumerate(zip(train.axes, train.cores)):
        s = float(train.inverse_temperature[i]) / 2 * (x[:, i, None] - centers.double().numpy()) ** 2
        w = np.exp(s.min(axis=1, keepdims=True) - s)
        w /= w.sum(axis=1, keepdims=True)
        off = 5 * s + 16
        g = core.detach().double().numpy().astype(np.longdouble)
        mean, absolute, wrong = (
            np.einsum("nk,akb->nab", v, h) for v, h in ((w, g), (w, np.abs(g)), (w * (off + (w * off).sum(1)[:, None]), np.abs(g)))
        )  # fmt: skip
        moved = np.einsum("na,nab->nb", moved, absolute) + np.einsum("na,nab->nb", size, wrong)
        row, size = np.einsum("na,nab->nb", row, mean), np.einsum("na,nab->nb", size, absolute)
        count += core.shape[0] + core.shape[1] + 4
    return row, count * size + moved


FAR = [[0.0, 0.0, 0.0], [1e3, -1e3, 5.0], [-30.0, 0.9, 1e4], [1.0, -1.0, 1.0], [0.999999, 1e-12, -1e-300]]


@pytest.mark.parametrize("dtype", [DOUBLE, SINGLE], ids=str)
@pytest.mark.parametrize("sharpness", [1e-12, 0.3, 50.0, 1e5])
def test_trains_stay_within_the_counted_roundings(sharpness, dtype, path):
    head = train_head(sharpness=sharpness, dtype=dtype)
    z = torch.cat([queries("soft train", 60), torch.tensor(FAR, dtype=DOUBLE)]).to(dtype)
    truth, roundings = train_oracle(head, z)
    allowed = 1.01 * torch.finfo(dtype).eps / 2 * roundings + 1e6 * torch.finfo(dtype).tiny
    tracked = head.evaluate(z.clone().requires_grad_()).detach()
    for found in (head.evaluate(z), tracked, call("soft train", head, z), head.evaluate_dense(z[:60])):
        n = len(found)
        assert (np.abs(found.double().numpy() - truth[:n]) <= allowed[:n] * (1 if n > 60 else 20)).all()


@needs_numba
def test_a_window_that_is_too_narrow_is_noticed(monkeypatch):
    head, z = train_head(sharpness=50.0), queries("soft train", 60)
    truth, roundings = train_oracle(head, z)
    monkeypatch.setattr(train_native, "_NEGLIGIBLE", 1e9)
    train_native._width.cache_clear()
    wrong = train_native.train_sum(z, head.operands)
    monkeypatch.undo()
    train_native._width.cache_clear()
    right = train_native.train_sum(z, head.operands)
    off = [float((np.abs(found.numpy() - truth) / (2.0**-53 * roundings)).max()) for found in (wrong, right)]
    assert off[0] > 10 and off[1] <= 1


@needs_numba
@pytest.mark.parametrize("dtype", [np.float64, np.float32])
def test_the_exponential_is_within_two_units(dtype):
    from numba import njit

    from partita.kernels.native_code import exp_native

    @njit
    def fill(x, y):
        for i in range(len(x)):
            y[i] = exp_native(x[i])

    least = -708.0 if dtype == np.float64 else -87.0
    rng = np.random.default_rng(0)
    x = np.concatenate(
        [rng.uniform(least, 0, 20_000), -rng.exponential(1, 20_000), -np.log(2) * (np.arange(120) + 0.5) / 2]
    )
    x = np.maximum(x, least).astype(dtype)
    y = np.empty_like(x)
    fill(x, y)
    exact = np.exp(x.astype(np.longdouble))
    assert (np.abs(y - exact) <= 2 * np.spacing(exact.astype(dtype))).all()
    edges = np.array([0.0, 2 * least, -np.inf, np.nan], dtype)
    ends = np.empty_like(edges)
    fill(edges, ends)
    assert ends[0] == 1 and ends[1] == ends[2] == 0 and np.isnan(ends[3])


def test_few_queries_of_a_train_stay_in_torch():
    """The native loops run over queries that share a window: 256 queries have 8 in each, and the loops would be slower."""
    centers = [torch.linspace(-1, 1, 32, dtype=DOUBLE)] * 3
    cores = [torch.ones(a, 32, b, dtype=DOUBLE) for a, b in itertools.pairwise((1, 64, 64, 1))]
    train = TrainOperands(centers, torch.ones(3, dtype=DOUBLE), cores)
    few, many = torch.zeros(256, 3, dtype=DOUBLE), torch.zeros(1024, 3, dtype=DOUBLE)
    assert native.worth_it(len(few), train.reads) == native.AVAILABLE
    assert not train_operator.runs_natively(few, train)
    assert train_operator.runs_natively(many, train) == native.AVAILABLE
