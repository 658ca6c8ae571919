"""Planes, pictures, the page of a model and the command: exact on the plane, self-contained, long inputs, clear refusals."""

import dataclasses
import json
import re
import sys

import numpy as np
import pytest
import torch
from torch import nn

import partita as pa
from partita.cli import main
from partita.cli.inspect_command import load_inputs
from partita.errors import DomainError, ShapeError, UnsupportedError
from partita.inspection.planes import view
from partita.inspection.reading import read_queries
from partita.inspection.snapshots import Snapshot
from partita.plots.model_page import write_inspection
from partita.plots.plane_plots import plot_heads, plot_plane

pytest.importorskip("matplotlib")


def make(queries=60, keys=30, dim=5, seed=0, **options):
    rng = np.random.default_rng(seed)
    scale = np.linspace(2, 0.2, dim)
    return Snapshot(
        scale * rng.normal(size=(queries, dim)) + 1,
        rng.normal(size=(keys, dim)),
        rng.normal(size=(keys, 2)),
        0.5,
        **options,
    )


@pytest.mark.parametrize(
    "plane", ["principal", (3, 1), (np.zeros(5), np.arange(5.0), np.ones(5))], ids=["principal", "two", "own"]
)
def test_the_plane_is_a_true_slice(plane):
    snapshot = make()
    seen = view(snapshot, plane=plane, pixels=16)
    assert np.allclose(seen.axes @ seen.axes.T, np.eye(2))
    whole = snapshot.max_affine()
    inside = seen.window.sample(300, np.random.default_rng(1))
    lifted = seen.origin + inside @ seen.axes
    labels = whole.cell(lifted)
    assert seen.partition.cell(inside).tolist() == labels.tolist()
    assert np.allclose(seen.partition.margin(inside), whole.margin(lifted))
    area = sum(
        0.5 * abs(np.dot(p[:, 0], np.roll(p[:, 1], 1)) - np.dot(p[:, 1], np.roll(p[:, 0], 1)))
        for p in seen.shapes
        if len(p)
    )
    assert area == pytest.approx(float(np.prod(seen.window.hi - seen.window.lo)))  # the cells fill the window
    assert seen.margins.shape == (16, 16) and seen.cells.tolist() == read_queries(snapshot).cells.tolist()
    assert set(labels) <= {j for j, p in enumerate(seen.shapes) if len(p)}


def test_the_principal_plane_holds_most():
    snapshot = make()
    best = view(snapshot).held
    assert best > max(view(snapshot, plane=(i, j)).held for i in range(5) for j in range(i)) - 1e-9
    assert view(make(dim=2)).held == pytest.approx(1.0) and view(make(dim=1)).held == pytest.approx(1.0)
    assert view(make(queries=1)).points.shape == (1, 2)


@pytest.mark.parametrize(
    ("plane", "error", "words"),
    [
        ("best", UnsupportedError, "principal"),
        ((0, 0), UnsupportedError, "two different"),
        ((0, 5), UnsupportedError, "R\\^5"),
        ((np.zeros(5), np.ones(5), 2 * np.ones(5)), UnsupportedError, "parallel"),
        ((np.zeros(4), np.ones(4), np.arange(4)), ShapeError, "three of"),
    ],
)
def test_impossible_planes(plane, error, words):
    with pytest.raises(error, match=words):
        view(make(), plane=plane)


@pytest.mark.parametrize("suffix", [".svg", ".png", ".pdf"])
def test_pictures(suffix, tmp_path):
    plot_plane(view(make()), tmp_path / f"one{suffix}", title="a head")
    assert (tmp_path / f"one{suffix}").read_bytes()[:4] in (b"<?xm", b"\x89PNG", b"%PDF")
    views = {
        ("a", 0): view(make()),
        ("a", 2): view(make(dim=1)),
        ("a.long.name.of.some.layer", 1): view(make(causal=True)),
    }
    plot_heads(views, tmp_path / f"all{suffix}", notes={("a", 0): "0.5"})
    assert (tmp_path / f"all{suffix}").stat().st_size > 1000
    with pytest.raises(UnsupportedError, match=r"\.svg"):
        plot_plane(view(make()), tmp_path / "one.jpg")


def test_relative_biases_are_shown_for_one_position():
    bias = -0.3 * np.abs(np.arange(60)[:, None] - np.arange(30)[None])
    snapshot = make(mask=bias)
    first, last = view(snapshot, position=0, pixels=8), view(snapshot, pixels=8)
    assert not np.array_equal(first.margins, last.margins)
    assert np.array_equal(last.margins, view(snapshot, position=59, pixels=8).margins)


def test_long_inputs_make_small_files(tmp_path):
    seen = view(make(queries=4000, keys=4000), pixels=24)
    plot_plane(seen, tmp_path / "long.svg")
    assert (tmp_path / "long.svg").stat().st_size < 3_000_000


def test_a_page_that_needs_nothing_else(tmp_path):
    torch.manual_seed(0)
    model = nn.TransformerEncoder(
        nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 2, enable_nested_tensor=False
    ).eval()
    with torch.no_grad(), pa.inspect.capture(model) as heads:
        model(torch.randn(2, 12, 16))
    page = write_inspection(heads, tmp_path / "out", title="a <small> model")
    assert sorted(p.name for p in page.files) == ["heads.csv", "heads.png", "heads.svg", "index.html", "report.json"]
    text = (tmp_path / "out" / "index.html").read_text()
    assert not re.search(r'(?:src|href)="(?!data:)', text) and "<script" not in text and "a &lt;small&gt; model" in text
    assert text.count("<tr>") == 2 + 2 + 4 and "layers.1.self_attn" in text and "data:image/svg+xml" in text
    bare = write_inspection(heads, tmp_path / "bare", figures=False)
    assert sorted(p.name for p in bare.files) == ["heads.csv", "index.html", "report.json"]


MODULE = """
import torch
from torch import nn

def encoder():
    torch.manual_seed(0)
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 1, enable_nested_tensor=False)

def inputs():
    return {"src": torch.ones(1, 5, 16), "mask": torch.ones(5, 5).triu(1).bool()}

def number():
    return 3

def broken():
    raise ValueError("oops")
"""


@pytest.fixture
def here(folder, monkeypatch, capsys):
    """The command in this process: arguments to exit code, stdout, stderr."""

    def run(*arguments):
        monkeypatch.chdir(folder)
        monkeypatch.setattr(sys, "argv", ["partita", "inspect", *arguments])
        monkeypatch.setattr(sys, "path", [str(folder), *sys.path])
        monkeypatch.delitem(sys.modules, "mine", raising=False)
        with pytest.raises(SystemExit) as stop:
            main()
        return stop.value.code, *capsys.readouterr()

    return run


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "mine.py").write_text(MODULE)
    np.save(tmp_path / "x.npy", np.random.default_rng(0).normal(size=(2, 9, 16)).astype(np.float32))
    return tmp_path


def test_the_command_writes_a_report_and_says_whose_code_it_runs(folder, here):
    code, printed, errors = here("mine:encoder", "--inputs", "x.npy", "--out", "report", "--no-figures")
    assert code == 0, errors
    assert "your own code" in errors and "layers.0.self_attn:1" in printed
    data = json.loads((folder / "report" / "report.json").read_text())
    assert len(data["heads"]) == 2 and data["heads"][0]["figures"]["queries"] == 18
    code, _, errors = here("mine:encoder", "--inputs", "x.npy", "--out", "report")
    assert code == 1 and "--overwrite" in errors


def test_the_command_takes_inputs_from_a_function_and_prints_json(here):
    arguments = ("--inputs", "mine:inputs", "--out", "r", "--no-figures", "--json", "--head", "1", "--tokens", "3")
    code, printed, _ = here("mine:encoder", *arguments)
    data = json.loads(printed)
    assert code == 0 and [h["head"] for h in data["heads"]] == [1] and data["heads"][0]["figures"]["queries"] == 3


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["mine:number", "--inputs", "x.npy"], 64, "expected an nn.Module"),
        (["mine:broken", "--inputs", "x.npy"], 1, "oops"),
        (["mine:nothing", "--inputs", "x.npy"], 64, "no function"),
        (["mien:encoder", "--inputs", "x.npy"], 64, "there is no module 'mien'"),
        (["mine", "--inputs", "x.npy"], 64, "MODULE:FUNCTION"),
        (["mine:encoder", "--inputs", "x.txt"], 64, "MODULE:FUNCTION"),
        (["mine:encoder", "--inputs", "y.npy"], 64, "y.npy"),
    ],
)
def test_the_command_refuses_with_reasons(folder, here, arguments, code, words):
    found, _, errors = here(*arguments, "--out", "r")
    assert found == code and words in errors and not (folder / "r").exists()


def test_inputs_are_never_unpickled(tmp_path):
    from safetensors.numpy import save_file

    np.save(tmp_path / "bad.npy", np.array([object()], dtype=object))
    with pytest.raises(DomainError, match="arrays of numbers"):
        load_inputs(str(tmp_path / "bad.npy"))
    np.savez(tmp_path / "a.npz", src=np.ones((1, 2)))
    save_file({"src": np.ones((1, 2))}, tmp_path / "a.safetensors")
    for name in ("a.npz", "a.safetensors"):
        args, kwargs = load_inputs(str(tmp_path / name))
        assert args == () and torch.equal(kwargs["src"], torch.ones(1, 2, dtype=torch.float64))


def test_padding_has_no_cell_in_the_picture():
    rng, mask = np.random.default_rng(2), np.arange(30) < 6
    padded = make(queries=30, seed=3, mask=mask[None], padding=~mask)
    cut = Snapshot(padded.queries[:6], padded.keys[:6], padded.values[:6], padded.scale)
    seen, truth = view(padded), view(cut)
    assert seen.keys.tolist() == list(range(6)) and len(seen.shapes) == 30
    assert [p.tolist() for p in seen.shapes[:6]] == [p.tolist() for p in truth.shapes]
    assert not any(len(p) for p in seen.shapes[6:])
    assert np.array_equal(seen.margins, truth.margins)
    every = view(dataclasses.replace(padded, mask=None))
    assert any(len(p) for p in every.shapes[6:])  # without the mask these keys do have cells there

    bias = np.where(rng.random((30, 30)) < 0.7, rng.normal(size=(30, 30)), -np.inf)
    bias[4], bias[-1] = -np.inf, np.where(np.arange(30) < 9, bias[-1], -np.inf)
    row = make(queries=30, seed=3, mask=bias)
    assert view(row).keys.tolist() == np.flatnonzero(np.isfinite(bias[-1])).tolist()
    assert view(row).named.endswith("scored as query 29")
    with pytest.raises(UnsupportedError, match="query 4 sees no key"):
        view(row, position=4)
