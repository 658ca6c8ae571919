"""Laws of the Triton kernels for grids, tensor trains and ramps; `test_grid_triton.py` runs them, interpreted or on a GPU."""

import math
import os

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from partita.geometry.domains import Box
from partita.geometry.grid import ProductGrid
from partita.heads.grid_head import GridHead
from partita.heads.train_head import TrainHead
from partita.kernels import grid_triton, ramp_triton, train_triton
from partita.kernels.grid_torch import axis_start
from partita.kernels.triton_code import power
from partita.ramps.ramp_head import RampHead

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of the interpreter, at NaN and infinity
needs_gpu = pytest.mark.skipif(INTERPRETED, reason="too large for the interpreter")

# counts, widths, outputs, affine
GRIDS = [
    ((40,), (4,), 1, False),
    ((46,), (42,), 1, False),  # more weights than are held
    ((45,), (45,), 2, False),
    ((26, 13), (6, 4), 3, False),
    ((4, 5), (4, 5), 1, True),
    ((17, 9, 9), (4, 2, 4), 1, True),
    ((3, 4, 5), (3, 4, 5), 1, False),
    ((15, 14), (14, 12), 1, False),  # more cells than are written out
    ((20, 30), (2, 2), 70, False),
    ((2, 3, 1), (2, 3, 1), 1, False),
    ((9, 3), (4, 3), 1, True),  # a whole axis beside a window
    ((3, 40), (3, 4), 1, False),
    ((5, 4, 5, 4, 5), (2, 4, 2, 2, 2), 1, False),
]


def to_device(*tensors):
    return [None if t is None else t.detach().to(DEVICE) for t in tensors]


def grid_head(counts, widths, outputs, affine, dtype=torch.float64, seed=0) -> GridHead:
    """A head with random values and centers up to 0.95 of a spacing from their places among equally spaced ones."""
    rng = np.random.default_rng(seed)
    axes = []
    for count in counts:
        axis = np.linspace(-1, 1, count) if count > 1 else np.zeros(1)
        moved = rng.uniform(-0.95, 0.95, max(count - 2, 0)) * 2 / max(count - 1, 1)
        axis[1:-1] += moved
        axes.append(np.unique(axis) if len(np.unique(axis)) == count else np.linspace(-1, 1, count))
    grid = ProductGrid(Box(-2 * np.ones(len(counts)), 2 * np.ones(len(counts))), tuple(np.sort(a) for a in axes))
    cells = math.prod(counts)
    slopes = torch.tensor(rng.standard_normal((cells, outputs, len(counts))), dtype=dtype) if affine else None
    sharp = [8.0 if w <= 6 else 1.0 for w in widths]
    return GridHead(
        grid,
        [k * (max(count - 1, 1) / 2) ** 2 for k, count in zip(sharp, counts)],
        torch.tensor(rng.standard_normal((cells, outputs)), dtype=dtype),
        value_slopes=slopes,
        half_windows=[(w + 1) // 2 for w in widths],
        input_shapes=((len(counts),),),
        output_shape=(outputs,),
    )


def in_float64(head) -> GridHead:
    """The same numbers and windows in float64: a head whose dtype is changed widens its windows."""
    axes = tuple(a.double().numpy() for a in head.axes)
    return GridHead(
        ProductGrid(Box(-2 * np.ones(len(axes)), 2 * np.ones(len(axes))), axes),
        head.inverse_temperature.double().numpy(),
        head.values.double(),
        value_slopes=None if head.value_slopes is None else head.value_slopes.double(),
        origin=None if head.origin is None else head.origin.double(),
        half_windows=head.half_windows,
        input_shapes=head.input_shapes,
        output_shape=head.output_shape,
    )


def queries(head, n=60, seed=1):
    """Random points, points at centers and halfway, far outside."""
    rng = np.random.default_rng(seed)
    x = rng.uniform(-1.3, 1.3, (n, len(head.counts)))
    for i, axis in enumerate(head.axes):
        centers = axis.double().numpy()
        x[: n // 3, i] = rng.choice(centers, n // 3)
    x[-1], x[-2] = 1.9, -1.9
    return torch.tensor(x, dtype=head.dtype)


def arguments(head, x):
    centers = to_device(*head.axes)
    x, rates, values, slopes, origin = to_device(
        x, head.inverse_temperature, head.values, head.value_slopes, head.origin
    )
    return x, centers, rates, list(head.widths), values, slopes, origin


def running_error(head, x, unit) -> float:
    """What `score-rounding` allows: δ in the scores, and the roundings of the sums."""
    delta = 16.0 * len(head.counts)
    for i, width in enumerate(head.widths):
        start = axis_start(x[:, i], head.axes[i], width)
        near = head.axes[i][start[:, None] + torch.arange(width)].double()
        away = (x[:, i, None].double() - near).abs().max().item()
        delta += 8 * float(head.inverse_temperature[i]) * away**2 / 2
    largest = head.largest_value(x.numpy().min(axis=0), x.numpy().max(axis=0))
    operations = 2 * sum(head.widths) + 6 * len(head.counts) + 8 + (2 * len(head.counts) + 4)
    return unit * (delta + 1.01 * operations) * largest


@pytest.mark.parametrize("case", GRIDS, ids=str)
def test_sums_and_gradients_are_those_of_the_torch_path(case):
    head = grid_head(*case)
    x = queries(head).requires_grad_()
    constants = [head.values.requires_grad_()]
    if head.value_slopes is not None:
        constants.append(head.value_slopes.requires_grad_())
    expected = head(x)
    grad = torch.randn_like(expected)
    gradients = torch.autograd.grad((expected * grad).sum(), [x, *constants])
    given = arguments(head, x)
    found = grid_triton.sum_on_device(*given).cpu()
    assert (found - expected).abs().max() <= 2 * running_error(head, x.detach(), 2.0**-53)
    for deterministic in (False, True)[: 1 + (math.prod(head.counts) > 8 * math.prod(head.widths))]:
        torch.use_deterministic_algorithms(deterministic)
        try:
            answers = grid_triton.gradients_on_device(*to_device(grad), *given, [True, True, case[3]])
        finally:
            torch.use_deterministic_algorithms(False)
        for answer, wanted in zip(answers, gradients):
            assert (answer.cpu() - wanted).abs().max() <= 1e-13 * (1 + wanted.abs().max())


@pytest.mark.parametrize("case", [((40, 30), (4, 4), 1, True), ((9, 8, 7), (2, 4, 4), 1, False)], ids=str)
def test_float32_stays_within_the_running_terms(case):
    head = grid_head(*case, dtype=torch.float32)
    x = queries(head, 200)
    exact = in_float64(head)(x.double())
    found = grid_triton.sum_on_device(*arguments(head, x)).cpu()
    allowed = running_error(head, x, 2.0**-24)
    assert (found.double() - exact).abs().max() <= allowed
    moved = arguments(head, x)
    moved[1][0] = moved[1][0] + 1e-3  # centers a little off are noticed
    assert (grid_triton.sum_on_device(*moved).cpu().double() - exact).abs().max() > allowed


@pytest.mark.parametrize("case", [((9, 10, 7), (2, 4, 4), 1, False), ((17, 19), (4, 4), 1, False)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_bricks_hold_the_same_values(case, dtype, monkeypatch):
    head = grid_head(*case, dtype=dtype)
    x = queries(head, 200)
    given, grad = arguments(head, x), *to_device(torch.randn(200, 1, dtype=dtype))
    results = []
    for least in (1 << 60, 0):
        monkeypatch.setattr(grid_triton, "_BRICKED_FROM", least)
        gradients = grid_triton.gradients_on_device(grad, *given, [True, True, False])
        results.append([grid_triton.sum_on_device(*given), *gradients[:2]])
    (plain, slopes, spread), (bricked, bricked_slopes, bricked_spread) = results
    close = 4 * torch.finfo(dtype).eps  # bricks of two run along lanes, else in order
    assert (plain - bricked).abs().max() <= close * plain.abs().max()
    assert (slopes - bricked_slopes).abs().max() <= 16 * close * slopes.abs().max()
    assert (spread - bricked_spread).abs().max() <= 16 * torch.finfo(dtype).eps * spread.abs().max()  # atomic additions


def test_large_tables_with_whole_windows_are_collected_by_products(monkeypatch):
    head = grid_head((5, 4, 3), (4, 4, 3), 2, False)
    given, grad = arguments(head, queries(head)), *to_device(torch.randn(60, 2, dtype=torch.float64))
    small = grid_triton.gradients_on_device(grad, *given, [False, True, False])[1]
    monkeypatch.setattr(grid_triton, "_SUMS_HELD", 0)
    monkeypatch.setattr(grid_triton, "_AT_ONCE", 1000)  # several steps
    products = grid_triton.gradients_on_device(grad, *given, [False, True, False])[1]
    assert (small - products).abs().max() <= 1e-14 * small.abs().max()


def test_bricks_hold_each_cell_where_the_kernels_look():
    counts, table = (9, 10, 7), torch.randn(630, 1)
    bricks = grid_triton._Bricks.of(counts, 4)
    cells = np.indices(counts).reshape(3, -1)
    places = sum(
        (c >> b) * step + (c & ((1 << b) - 1)) * unit
        for c, b, step, unit in zip(cells, bricks.bits, bricks.steps(), bricks.units())
    )
    assert bricks.bits == (1, 1, 2) and len(set(places)) == 630
    assert torch.equal(bricks.stored(table).flatten()[places], table[:, 0])


@pytest.mark.parametrize("case", [((16, 13), (4, 4), 1, False), ((45,), (41,), 1, False)], ids=str)
def test_nan_stays_in_its_row(case):
    head = grid_head(*case)
    x = queries(head, 9)
    clean = grid_triton.sum_on_device(*arguments(head, x))
    for bad in (math.nan, math.inf) if len(head.counts) > 1 else (math.nan,):
        spoiled = x.clone()
        spoiled[4, -1], spoiled[6, 0] = bad, bad
        found = grid_triton.sum_on_device(*arguments(head, spoiled))
        slopes = grid_triton.gradients_on_device(
            torch.ones_like(clean), *arguments(head, spoiled), [True, False, False]
        )
        spoiled_rows, rows = [4, 6], [0, 1, 2, 3, 5, 7, 8]
        assert found[spoiled_rows].isnan().all() and torch.equal(found[rows], clean[rows])
        assert slopes[0][spoiled_rows].isnan().all() and slopes[0][rows].isfinite().all()


def test_no_queries_give_no_answers():
    head = grid_head((16, 13), (4, 4), 2, True)
    given = arguments(head, queries(head)[:0])
    assert grid_triton.sum_on_device(*given).shape == (0, 2)
    points, values, slopes = grid_triton.gradients_on_device(given[0].new_empty(0, 2), *given, [True, True, True])
    assert points.shape == (0, 2) and not values.any() and not slopes.any()
    assert values.shape == head.values.shape and slopes.shape == head.value_slopes.shape


def test_windows_are_found_where_the_axis_is_long_and_far_from_zero():
    """float32 centers near 1000 whose spacing is a few units in the last place."""
    axis = (1000 + np.arange(5000) * 2.0**-11).astype(np.float32).astype(np.float64)
    head = GridHead(
        ProductGrid(Box([999.0], [1003.0]), (axis,)),
        8 * 2.0**22,
        torch.arange(5000, dtype=torch.float32)[:, None],
        half_windows=2,
        input_shapes=((1,),),
        output_shape=(),
    )
    x = torch.tensor(np.random.default_rng(0).choice(axis, 200)[:, None], dtype=torch.float32)
    found = grid_triton.sum_on_device(*arguments(head, x)).cpu()
    assert (found[:, 0] - head(x)).abs().max() <= 5000 * 2.0**-20


@triton.jit
def _powers(t, out, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, power(tl.load(t + at), 0))


@pytest.mark.parametrize("dtype, far, units", [(torch.float32, 87.0, 4.2), (torch.float64, 689.0, 2.0)], ids=str)
def test_the_exponential_keeps_its_word(dtype, far, units):
    """Within so many u (of float32: 2.1 ulp), and 1.5|t|u for the rounding of the score to powers of two."""
    t = -torch.tensor(np.random.default_rng(0).uniform(0, 1, 1 << 16), dtype=dtype)
    t[: 1 << 15] *= far
    found = torch.empty_like(t).to(DEVICE)
    _powers[(16,)](t.to(DEVICE), found, BLOCK=1 << 12)
    exact = np.exp(t.numpy().astype(np.longdouble))
    off = np.abs((found.cpu().numpy() - exact) / exact)
    assert (off <= (units + 1.5 * np.abs(t.numpy())) * torch.finfo(dtype).eps / 2).all()


@triton.jit
def _count_up(out, n):
    total = 0
    for _ in range(n):
        total += 1
    tl.store(out, total)


def runs_loops_of_any_length() -> bool:
    """Not so for the interpreter of Triton 3.6 with numpy 2.5: an array of one number is no longer an index."""
    out = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    try:
        _count_up[(1,)](out, 3)
    except Exception:
        return False
    return out.item() == 3


@pytest.mark.skipif(not runs_loops_of_any_length(), reason="this interpreter cannot run the kernels")
@pytest.mark.parametrize("ranks", [(1, 3, 4, 1), (1, 20, 70, 2)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_trains_are_those_of_the_torch_path(ranks, dtype):
    rng = np.random.default_rng(0)
    counts = (6, 3, 5)
    cores = [torch.tensor(rng.standard_normal((ranks[i], counts[i], ranks[i + 1]))) for i in range(3)]
    grid = ProductGrid(Box(-np.ones(3), np.ones(3)), tuple(np.linspace(-1, 1, c) for c in counts))
    head = TrainHead(grid, [3.0, 1.0, 6.0], cores, input_shapes=((3,),), output_shape=(ranks[-1],))
    x = torch.tensor(rng.uniform(-1.2, 1.2, (50, 3))).to(dtype).double().requires_grad_()
    stored = [core.to(dtype).double().requires_grad_() for core in head.cores]
    for i, core in enumerate(stored):
        head._buffers[f"core_{i}"] = core
    expected = head(x)
    grad = torch.randn_like(expected).to(dtype).double()
    wanted = torch.autograd.grad((expected * grad).sum(), [x, *stored])
    point, rates, given, *cores = (t.to(dtype) for t in to_device(x, head.inverse_temperature, grad, *stored))
    centers = [a.to(dtype) for a in to_device(*head.axes)]
    scale = 200 * torch.finfo(dtype).eps
    found = train_triton.sum_on_device(point, centers, rates, cores).cpu()
    assert (found - expected).abs().max() <= scale * expected.abs().max()
    of_points, of_cores = train_triton.gradients_on_device(given, point, centers, rates, cores)
    for answer, target in zip([of_points, *of_cores], wanted):
        assert (answer.cpu() - target).abs().max() <= scale * target.abs().max()
    assert train_triton.sum_on_device(point[:0], centers, rates, cores).shape == (0, ranks[-1])


@pytest.mark.parametrize("anchors, half_window, kappa", [(2, 1, 8.0), (100, 3, 4.0), (7, 4, 1.0)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_ramps_are_those_of_the_torch_path(anchors, half_window, kappa, dtype):
    head = RampHead(
        torch.ones(1, 1, dtype=dtype),
        torch.zeros(1, dtype=dtype),
        ends=(-1.0, 2.0),
        anchors=anchors,
        sharpness=kappa,
        half_window=half_window,
        output=(0, 1),
    )
    u = torch.tensor(np.random.default_rng(0).uniform(-2, 3, 300), dtype=dtype)
    u[0], u[1], u[2] = 1e30, -1e30, math.nan
    at = u.clone().requires_grad_()
    expected = head(at[:, None])[:, 0]
    grad = torch.randn_like(expected)
    (wanted,) = torch.autograd.grad((expected * grad).sum(), at)
    given = (*to_device(u, head.low, head.spacing, head.sharpness), anchors, head.width)
    found, slopes = ramp_triton.sum_on_device(*given), ramp_triton.gradients_on_device(*to_device(grad), *given)
    close = {"rtol": 0, "atol": 64 * (1 + kappa) * torch.finfo(dtype).eps, "equal_nan": True}
    torch.testing.assert_close(found.cpu(), expected.detach(), **close)
    torch.testing.assert_close(slopes.cpu(), wanted, **close)
    assert found.isnan().sum() == 1 and slopes.isnan().sum() == 1


@needs_gpu
def test_the_same_batch_gives_the_same_bits():
    head = grid_head((100, 90, 80), (4, 4, 4), 1, False, dtype=torch.float32)
    given = arguments(head, torch.rand(1 << 20, 3) * 2 - 1)
    first = grid_triton.sum_on_device(*given)
    assert all(torch.equal(first, grid_triton.sum_on_device(*given)) for _ in range(3))
    grad = torch.randn_like(first)
    torch.use_deterministic_algorithms(True)
    try:
        answers = [grid_triton.gradients_on_device(grad, *given, [True, True, False]) for _ in range(3)]
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(a, b) for other in answers[1:] for a, b in zip(answers[0], other))


@needs_gpu
@pytest.mark.parametrize("in_order", [False, True], ids=["as they come", "by slabs"])
@pytest.mark.parametrize(
    "case",
    [((19, 13, 21), (4, 4, 4)), ((31, 22), (2, 2)), ((30, 23), (4, 6)), ((40, 50), (4, 8)), ((500,), (6,))],
    ids=str,
)
def test_additions_of_several_cells_are_those_of_one(case, in_order, monkeypatch):
    monkeypatch.setattr(grid_triton, "_BRICKED_FROM", 0 if in_order else 1 << 60)
    head = grid_head(*case, 1, False, dtype=torch.float32)
    n = 20_011
    given = arguments(head, torch.rand(n, len(case[0])) * 2.2 - 1.1)
    grad = torch.randn(n, 1, device=DEVICE)
    grid = grid_triton._Grid.of(*given[:4])
    assert grid_triton._added_together(grid, grad) == math.gcd(case[1][-1], 4)
    assert (grid_triton._by_slabs(grid, 1) is not None) == in_order
    found = grid_triton.gradients_on_device(grad, *given, [False, True, False])[1]
    exact = grid_triton.gradients_on_device(
        *(
            grad.double(),
            given[0].double(),
            [c.double() for c in given[1]],
            given[2].double(),
            given[3],
            given[4].double(),
        ),
        *(None, None, [False, True, False]),
    )[1]
    assert (found - exact).abs().max() <= 1e-5 * exact.abs().max()


@needs_gpu
def test_gradients_can_be_captured_in_a_graph(monkeypatch):
    monkeypatch.setattr(grid_triton, "_BRICKED_FROM", 0)
    head = grid_head((30, 23), (4, 4), 1, False, dtype=torch.float32)
    given, grad = arguments(head, torch.rand(5000, 2) * 2 - 1), torch.randn(5000, 1, device=DEVICE)
    plain = grid_triton.gradients_on_device(grad, *given, [True, True, False])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = grid_triton.gradients_on_device(grad, *given, [True, True, False])
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(captured[0], plain[0]) and torch.allclose(captured[1], plain[1], atol=1e-4)


@needs_gpu
def test_tables_of_more_than_two_billion_numbers():
    axes = [torch.linspace(-1, 1, c, device=DEVICE) for c in (1300, 1300, 1300)]
    values = torch.zeros(1300**3, 1, device=DEVICE)
    values[-1] = 1.0
    rates = torch.full((3,), 8 * 649.5**2, device=DEVICE)
    x = torch.tensor([[1.0, 1.0, 1.0], [-1.0, -1.0, -1.0]], device=DEVICE)
    found = grid_triton.sum_on_device(x, axes, rates, [4, 4, 4], values)[:, 0]
    assert found[0] > 0.9 and found[1] == 0
    grad = grid_triton.gradients_on_device(torch.ones(2, 1, device=DEVICE), x, axes, rates, [4, 4, 4], values)[1]
    assert grad[-1] > 0.9 and grad[0] > 0.9


@needs_gpu
def test_many_queries_take_no_memory_beside_their_answers():
    head = grid_head((40, 40, 40), (4, 4, 4), 1, False, dtype=torch.float32)
    given = arguments(head, torch.zeros(1, 3))
    x = torch.rand(100_000_000, 3, device=DEVICE) * 2 - 1
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    out = grid_triton.sum_on_device(x, *given[1:])
    assert torch.cuda.max_memory_allocated() - before <= out.numel() * 4 + (1 << 22)
    few = grid_triton.sum_on_device(x[-1000:].clone(), *given[1:])
    assert torch.equal(out[-1000:], few)
