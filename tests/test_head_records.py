"""`Head.record`, `Head.from_record` and `Head.partition`: a head as plain data, and back."""

import json
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch

from partita.errors import DomainError, FormatError, ShapeError
from partita.geometry import Box, PowerDiagram, ProductGrid
from partita.heads import HEAD_TYPES, FoldedHead, GridHead, ScatteredHead, TrainHead, head_from_record

CORPUS = sorted(p for p in (Path(__file__).parent / "corpus").iterdir() if (p / "head.json").exists())
FOLDED = [kind for kind, head in HEAD_TYPES.items() if issubclass(head, FoldedHead)]  # networks: test_network_module.py
DTYPES = [torch.float64, torch.float32]
SQUARE = Box([-1, -1], [1, 1])


def make(kind: str, dtype: torch.dtype = torch.float64):
    """One head of each kind over the square, with every optional tensor."""
    generator = torch.Generator().manual_seed(3)
    shapes = {"input_shapes": ((2,),), "output_shape": (3,)}
    grid = ProductGrid.uniform(SQUARE, [5, 6], dtype=np.float32)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    if kind == "grid":
        slopes = random(30, 3, 2)
        return GridHead(grid, [9.0, 8.0], random(30, 3), value_slopes=slopes, half_windows=[1, 2], **shapes)
    if kind == "scattered":
        parts = {"powers": random(7) / 8, "value_slopes": random(7, 3, 2)}
        return ScatteredHead(random(7, 2), 5.0, random(7, 3), **parts, **shapes)
    return TrainHead(grid, [9.0, 8.0], [random(1, 5, 4), random(4, 6, 3)], **shapes)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", FOLDED)
def test_a_head_comes_back_from_its_record(kind, dtype):
    head = make(kind, dtype)
    record = json.loads(json.dumps(head.record()))
    again = head_from_record(record, head.state_dict(), SQUARE)
    assert type(again) is type(head) and again.record() == head.record()
    assert {k: v.tolist() for k, v in again.state_dict().items()} == {
        k: v.tolist() for k, v in head.state_dict().items()
    }
    z = torch.rand(50, 2, dtype=torch.float64) * 2 - 1
    assert torch.equal(again(z), head(z))


@pytest.mark.parametrize("folder", CORPUS, ids=lambda p: p.name)
def test_recorded_heads_are_read_and_written_as_they_are(folder):
    """Entry by entry and in the order in which the files hold them."""
    description = json.loads((folder / "head.json").read_text())
    tensors = safetensors.torch.load_file(folder / "head.safetensors")
    own = {name.removeprefix("head."): t for name, t in tensors.items() if name.startswith("head.")}
    m = sum(int(np.prod(s)) for s in description["head"]["input_shapes"])
    head = head_from_record(description["head"], own, Box(-np.ones(m), np.ones(m)))
    assert json.dumps(head.record()) == json.dumps(description["head"])
    assert set(head.state_dict()) == set(own)
    assert all(torch.equal(head.state_dict()[name], tensor) for name, tensor in own.items())
    assert head.partition(Box(-np.ones(m), np.ones(m))).num_cells == head.num_keys


def test_the_partition_is_made_of_the_stored_centers():
    grid, train, scattered = (make(kind).partition(SQUARE) for kind in ("grid", "train", "scattered"))
    assert isinstance(grid, ProductGrid) and isinstance(train, ProductGrid) and isinstance(scattered, PowerDiagram)
    assert all(np.array_equal(a, b) for a, b in zip(grid.axes, train.axes)) and grid.box == SQUARE
    head = make("scattered")
    assert np.array_equal(scattered.centers, head.centers.numpy())
    assert np.array_equal(scattered.powers, head.powers.numpy())
    z = SQUARE.sample(200, np.random.default_rng(0))
    scores = head.affine_scores()
    assert np.array_equal(scattered.cell(z), (scores.slopes @ z.T + scores.offsets[:, None]).argmax(axis=0))


NONSENSE = {
    "a list as type": ({"type": ["grid"]}, {}),
    "no type": ({"type": None}, {}),
    "another type": ({"type": "pickle"}, {}),
    "no shapes": ({"input_shapes": None}, {}),
    "no inputs": ({"input_shapes": []}, {}),
    "a fractional shape": ({"input_shapes": [[2.0]]}, {}),
    "a Boolean shape": ({"output_shape": [True]}, {}),
    "a negative shape": ({"output_shape": [-3]}, {}),
    "a shape that does not fit the domain": ({"input_shapes": [[3]]}, {}),
    "another output": ({"output_shape": [2]}, {}),
    "another dtype": ({"dtype": "float32"}, {}),
    "a half type, of which no tensor is": ({"dtype": "float16"}, {}),
    "an unknown dtype": ({"dtype": "float8"}, {}),
    "a dtype as torch writes it": ({"dtype": "torch.float64"}, {}),
    "a dtype that is no text": ({"dtype": ["float64"]}, {}),
    "a tensor too many": ({}, {"extra": torch.zeros(1)}),
    "a tensor missing": ({}, {"inverse_temperature": None}),
    "rates of another shape": ({}, {"inverse_temperature": torch.ones(5, dtype=torch.float64)}),
    "an infinite rate": ({}, {"inverse_temperature": torch.tensor([np.inf, 1.0])}),
    "a negative rate": ({}, {"inverse_temperature": torch.tensor([-1.0, 1.0], dtype=torch.float64)}),
}
GRID_NONSENSE = {
    "no windows": ({"half_windows": None}, {}),
    "windows as text": ({"half_windows": "11"}, {}),
    "one window": ({"half_windows": [1]}, {}),
    "a window of 0": ({"half_windows": [0, 1]}, {}),
    "a fractional window": ({"half_windows": [1.5, 1]}, {}),
    "a huge window": ({"half_windows": [10**30, 1]}, {}),
    "slopes without origin": ({}, {"origin": None}),
    "an origin of another shape": ({}, {"origin": torch.zeros(3, dtype=torch.float64)}),
    "centers out of order": ({}, {"centers_0": torch.linspace(1, -1, 5, dtype=torch.float64)}),
}
SCATTERED_NONSENSE = {
    "powers of another shape": ({}, {"powers": torch.zeros(1, dtype=torch.float64)}),
    "slopes of another shape": ({}, {"value_slopes": torch.zeros(7, 3, 1, dtype=torch.float64)}),
}
TRAIN_NONSENSE = {
    "cores that do not multiply": ({}, {"core_0": torch.zeros(1, 5, 2, dtype=torch.float64)}),
    "centers out of order": ({}, {"centers_1": torch.zeros(6, dtype=torch.float64)}),
}


@pytest.mark.parametrize(
    ("kind", "what"),
    [(kind, what) for kind in FOLDED for what in NONSENSE]
    + [
        (kind, what)
        for kind, cases in (("grid", GRID_NONSENSE), ("scattered", SCATTERED_NONSENSE), ("train", TRAIN_NONSENSE))
        for what in cases
    ],
)
def test_nonsense_is_refused(kind, what):
    head = make(kind)
    cases = NONSENSE | {"grid": GRID_NONSENSE, "scattered": SCATTERED_NONSENSE, "train": TRAIN_NONSENSE}[kind]
    changes, replaced = cases[what]
    tensors = {k: v for k, v in (head.state_dict() | replaced).items() if v is not None}
    if what == "a negative rate" and kind == "scattered":
        tensors["inverse_temperature"] = torch.tensor(-1.0, dtype=torch.float64)
    record = head.record() | changes
    with pytest.raises((FormatError, ShapeError, DomainError)) as found:
        head_from_record(record, tensors, SQUARE)
    if changes and what != "another output":
        assert found.type is FormatError
    with pytest.raises(FormatError):
        head_from_record({k: v for k, v in head.record().items() if k != "dtype"}, head.state_dict(), SQUARE)
