"""A head whose stored tensors were changed is evaluated as what it now is: never through a window or a tree of the old tensors."""

import copy
import pickle

import numpy as np
import pytest
import torch

import partita as pa
from partita.errors import DomainError, ShapeError
from partita.geometry import Box, ProductGrid
from partita.heads import GridHead, ScatteredHead, TrainHead
from partita.kernels import native
from partita.kernels.axis_windows import displacement
from partita.kernels.grid_torch import axis_start
from partita.ramps import ramp

SQUARE = Box([-1, -1], [1, 1])
SHAPES = {"input_shapes": ((2,),), "output_shape": (2,)}


def make(kind: str, dtype: torch.dtype = torch.float64):
    """A sharp head of each kind, whose windows or trees leave most cells out."""
    generator = torch.Generator().manual_seed(5)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    grid = ProductGrid.uniform(SQUARE, [40, 12], dtype=np.float32)
    rates = [64 * 20.0**2, 64 * 6.0**2]
    if kind == "grid":
        return GridHead(grid, rates, random(480, 2), half_windows=2, **SHAPES)
    if kind == "affine grid":
        return GridHead(grid, rates, random(480, 2), value_slopes=random(480, 2, 2), half_windows=2, **SHAPES)
    if kind == "scattered":
        parts = {"powers": random(600) / 400, "value_slopes": random(600, 2, 2)}
        return ScatteredHead(random(600, 2) / 2, 4e3, random(600, 2), **parts, **SHAPES)
    return TrainHead(grid, rates, [random(1, 40, 3), random(3, 12, 2)], **SHAPES)


def assign(head, name, new):
    setattr(head, name, new)


def load(head, name, new):
    head.load_state_dict(head.state_dict() | {name: new})


def copy_in_place(head, name, new):
    head.get_buffer(name).copy_(new)


def add_in_place(head, name, new):
    head.get_buffer(name).add_(new - head.get_buffer(name))


def set_data(head, name, new):
    head.get_buffer(name).data = new


def write_data(head, name, new):
    head.get_buffer(name).data.copy_(new)


def write_numpy(head, name, new):
    head.get_buffer(name).numpy()[...] = new.numpy()


WAYS = [assign, load, copy_in_place, add_in_place, set_data, write_data, write_numpy]


def changed_to(name: str, old: torch.Tensor) -> torch.Tensor:
    if name == "inverse_temperature":
        return torch.full_like(old, 1.0)  # from sharp to soft: every cell matters
    if name.startswith("centers_"):
        return old + 0.3 * (old[1] - old[0]) * torch.sin(7 * torch.arange(len(old)))
    return old.flip(0) * 1.25 + 0.125


@torch.no_grad()
def gap(head, seed: int = 0) -> float:
    """How far the head is from one softmax over all its cells, in units in the last place of the largest value."""
    z = torch.from_numpy(SQUARE.sample(400, np.random.default_rng(seed))).to(head.dtype)
    dense = head.evaluate_dense(z)
    fast, tracked = head.evaluate(z), head.evaluate(z.clone().requires_grad_()).detach()
    size = float(dense.abs().max()) * torch.finfo(head.dtype).eps
    return max(float((fast - dense).abs().max()), float((tracked - dense).abs().max())) / size


@pytest.fixture(autouse=True)
def native_for_small_batches(monkeypatch):
    monkeypatch.setattr(native, "WORTH", 0, raising=False)


KINDS = ["grid", "affine grid", "scattered", "train"]
BUFFERS = [(kind, name) for kind in KINDS for name in make(kind).state_dict()]


@pytest.mark.parametrize("way", WAYS, ids=lambda w: w.__name__)
@pytest.mark.parametrize(("kind", "name"), BUFFERS)
def test_a_changed_buffer_is_used(kind, name, way):
    head = make(kind)
    head(torch.zeros(3, 2))  # windows and trees are built
    z = torch.tensor([[0.3, -0.1]], dtype=torch.float64)
    before = head.evaluate_dense(z)
    new = changed_to(name, head.get_buffer(name).clone())
    way(head, name, new)
    assert torch.allclose(head.get_buffer(name), new, rtol=1e-12)
    assert gap(head) < 5e3
    assert not torch.equal(head.evaluate_dense(z), before)


def test_the_old_window_would_be_noticed():
    """Negative control: the window that fits R = 64/h² leaves out most of the mass at R = 1."""
    head = make("grid")
    given = head.half_windows
    head.inverse_temperature.fill_(1.0)
    assert gap(head) < 5e3
    head._windows.current = lambda _: given
    assert gap(head) > 1e9


def test_the_given_window_comes_back_with_the_given_tensors():
    head = make("grid")
    given, rates = head.half_windows, head.inverse_temperature.clone()
    head.inverse_temperature /= 100
    assert head.half_windows != given and head.record()["half_windows"] == list(head.half_windows)
    head.inverse_temperature.copy_(rates)
    assert head.half_windows == given


@pytest.mark.parametrize("rate", [-1.0, 0.0, 1e-300, 5e-324, 1e-30])
def test_any_rate_is_evaluated_as_it_stands(rate):
    for kind in KINDS:
        head = make(kind)
        head(torch.zeros(3, 2))
        head.inverse_temperature.fill_(rate)
        assert gap(head) < 5e3


def test_centers_in_any_order_are_evaluated_as_they_stand():
    head = make("grid")
    head.centers_0.copy_(head.centers_0.flip(0))
    assert head.half_windows[0] == 20 and gap(head) < 5e3
    head = make("grid")
    head.centers_0[-1] = 50.0  # far from evenly spaced
    assert head.half_windows[0] == 20 and gap(head) < 5e3
    head.centers_0 = torch.linspace(-1, 1, 5, dtype=torch.float64)
    with pytest.raises(ShapeError, match="expected"):
        head(torch.zeros(1, 2))


@pytest.mark.parametrize("kind", KINDS)
def test_copies_casts_pickles_and_state_dicts_keep_working(kind):
    head = make(kind)
    z = torch.from_numpy(SQUARE.sample(50, np.random.default_rng(1)))
    expected, names = head(z), set(head.state_dict())
    for again in (copy.deepcopy(head), pickle.loads(pickle.dumps(head)), head.to(torch.float64)):
        assert torch.equal(again(z), expected) and set(again.state_dict()) == names
        if kind.endswith("grid"):
            assert again.half_windows == (2, 2)
    other = copy.deepcopy(head)
    other.inverse_temperature.mul_(1e-3)
    assert torch.equal(head(z), expected) and gap(other) < 5e3
    single = copy.deepcopy(head).to(torch.float32)
    assert gap(single) < 5e4
    assert torch.allclose(single(z).double(), head(z), atol=0.02)
    fresh = make(kind)
    fresh.inverse_temperature.fill_(1.0)
    fresh.load_state_dict(head.state_dict())
    assert torch.equal(fresh(z), expected)
    head.unfreeze()
    assert torch.allclose(head(z), expected, rtol=1e-12, atol=1e-12)


def test_a_compiled_graph_refuses_changed_tensors():
    head = make("grid")
    z = torch.from_numpy(SQUARE.sample(5, np.random.default_rng(1)))
    compiled = torch.compile(head, backend="eager", fullgraph=True)
    assert torch.allclose(compiled(z), head(z), rtol=1e-12)
    head.inverse_temperature.fill_(1.0)
    with pytest.raises(RuntimeError, match="changed after compiling"):
        compiled(z)
    torch._dynamo.reset()
    assert gap(head) < 5e3  # this is what finds the new window
    again = torch.compile(head, backend="eager", fullgraph=True)
    assert torch.allclose(again(z), head.evaluate_dense(z), rtol=1e-12)
    torch._dynamo.reset()


def test_a_compiled_expression_head_is_what_its_tensors_say():
    """R = 1 used to give 0.186 where the softmax over all cells gives 0.00085."""
    c = pa.compile("sin(3*x)", pa.Box([-1], [1]), tolerance=1e-3, method="hard")
    z = torch.linspace(-1, 1, 301, dtype=torch.float64)[:, None]
    c.head(z)
    c.head.inverse_temperature.fill_(1.0)
    assert (c.head.evaluate(z) - c.head.evaluate_dense(z)).abs().max() < 1e-12


@pytest.mark.parametrize("way", WAYS, ids=lambda w: w.__name__)
@pytest.mark.parametrize("name", ["slopes", "offsets", "low", "spacing", "sharpness"])
def test_a_changed_ramp_is_used(name, way):
    head = ramp([1.5, 0.5], 0.25, (0.0, 1.0), anchors=41, domain=SQUARE, sharpness="hard").head
    new = head.get_buffer(name) / 64 if name == "sharpness" else head.get_buffer(name) * 1.5 + 0.01
    way(head, name, new)
    x = torch.from_numpy(SQUARE.sample(300, np.random.default_rng(0)))
    u = (x * head.slopes).sum(dim=1) + head.offsets
    anchors = head.low + head.spacing * torch.arange(41)
    weights = torch.softmax(-0.5 * head.sharpness / head.spacing**2 * (u[:, None] - anchors) ** 2, dim=1)
    assert torch.allclose(head(x)[:, 0], weights @ anchors, rtol=1e-11, atol=1e-11)
    grid = head.as_grid_head()
    assert torch.allclose(grid(u[:, None]), head(x)[:, 0], rtol=1e-9, atol=1e-9)


def test_a_ramp_without_a_sharpness_is_refused():
    head = ramp([1.5], 0.25, (0.0, 1.0), anchors=41, domain=Box([-1], [1])).head
    for bad in (0.0, -1.0, np.inf, np.nan):
        head.sharpness.fill_(bad)
        with pytest.raises(DomainError, match="sharpness"):
            head(torch.zeros(1, 1))


# ---- where a window can be used at all --------------------------------------------------------------------------------


@pytest.mark.parametrize("q", [1, 3])
def test_windows_are_found_on_every_axis_that_is_accepted(q):
    rng = np.random.default_rng(2)
    for _ in range(200):
        axis = np.sort(np.arange(24.0) + rng.uniform(-1, 1, 24) * rng.choice([0.1, 0.5, 1.0]))
        if (np.diff(axis) <= 1e-3).any() or displacement(axis) >= 1:
            continue
        grid = ProductGrid(Box([axis[0] - 1], [axis[-1] + 1]), (axis,))
        head = GridHead(
            grid, 1.0, torch.zeros(24, 1, dtype=torch.float64), half_windows=q, input_shapes=((1,),), output_shape=()
        )
        x = torch.from_numpy(
            np.concatenate([rng.uniform(axis[0] - 1, axis[-1] + 1, 200), axis, np.nextafter(axis, -9)])
        )
        cell = (torch.searchsorted(torch.from_numpy(axis), x, right=True) - 1).clamp(0, 22)
        assert torch.equal(axis_start(x, head.axes[0], 2 * q), (cell - q + 1).clamp(0, 24 - 2 * q))


@pytest.mark.parametrize(
    "axis", [np.geomspace(1, 1e6, 30), np.r_[0.0, 1e-9, 2e-9, np.arange(1.0, 20)], [0.0, 1e-310, 2e-310]]
)
def test_uneven_axes_need_the_whole_window(axis):
    axis = np.asarray(axis)
    grid = ProductGrid(Box([axis[0] - 1], [axis[-1] + 1]), (axis,))
    values = torch.zeros(len(axis), 1, dtype=torch.float64)
    parts = {"input_shapes": ((1,),), "output_shape": ()}
    with pytest.raises(DomainError, match="spacings from its place"):
        GridHead(grid, 1.0, values, half_windows=1, **parts)
    GridHead(grid, 1.0, values, half_windows=len(axis), **parts)
