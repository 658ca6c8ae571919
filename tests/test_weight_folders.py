"""The weights of a head as numbers and pictures: blocks are what their names say, files hold the tensors, all or nothing."""

from __future__ import annotations

import itertools
import json
import math
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from dense import layers_oracle as oracle
from matplotlib.figure import Figure
from matplotlib.text import Text
from method_cases import compiled, sample
from test_cli import partita

import partita as pa
from partita.errors import AlreadyExistsError, OutsideDomainError, ShapeError, SizeError
from partita.plots import layer_folder as folder_module
from partita.plots import layer_matrices, layer_plots, layers_figure, write_layers
from partita.plots.layer_matrices import Block, LayersAt, Matrix, layers_at
from partita.plots.layer_plots import _coarsened, _shades, attention_figure, draw_flow, matrix_figure

CASES = ["mixed", "vector 2-D typed", "three tokens of one", "cross", "cross sequences"]
FORMS = ["log", "indexed"]


@cache
def four_cells() -> pa.Compiled:
    return pa.compile("x0*x1", pa.Box([-1, -1], [1, 1]), tolerance=1.2, method="hard")


def found_at(case: str, form: str) -> tuple[pa.Compiled, LayersAt]:
    c = compiled(case)
    return c, layers_at(c, c.layers(form), sample(c)[0])


def parts(matrix: Matrix):
    """Every block of a matrix with the name that stands in it."""
    rows, columns = (np.cumsum([0, *(b.size for b in blocks)]) for blocks in (matrix.rows, matrix.columns))
    assert (rows[-1], columns[-1]) == matrix.values.shape
    for i, names in enumerate(matrix.names):
        for j, name in enumerate(names):
            yield name, matrix.values[rows[i] : rows[i + 1], columns[j] : columns[j + 1]]


def contradictions(matrix: Matrix, rate: float) -> list[str]:
    """Blocks that are not what their name says."""
    wrong = []
    for name, block in parts(matrix):
        d, n = block.shape
        expected = {
            "0": np.zeros((d, n)),
            "1": np.ones((d, n)),
            "R": np.full((d, n), rate),
            "X_1": np.tile(np.eye(d), n // d),
            "-X_1": -np.tile(np.eye(d), n // d),
        }.get(name)
        if name.startswith("I"):
            expected = np.eye(d, n)
        if expected is not None and not np.array_equal(block, expected):
            wrong.append(f"{matrix.file}: {name}")
        if expected is None and name and not block.any():
            wrong.append(f"{matrix.file}: {name} is zero")
    return wrong


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("case", CASES)
def test_blocks_are_what_their_names_say(case: str, form: str) -> None:
    c, found = found_at(case, form)
    rate = c.head.sharpest_rate()
    assert [x for m in found.matrices for x in contradictions(m, rate)] == []
    named = [name for m in found.matrices for row in m.names for name in row if name]
    assert len(named) > 30  # not the fallback, which names nothing
    for m in found.matrices:  # negative control: one entry of a zero block
        if any(name == "0" and block.size for name, block in parts(m)):
            block = next(block for name, block in parts(m) if name == "0")
            before, block[0, 0] = block[0, 0], 1e-3
            assert contradictions(m, rate) != []
            block[0, 0] = before


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("case", CASES)
def test_the_matrices_multiply_to_the_output(case: str, form: str) -> None:
    c, found = found_at(case, form)
    m = {x.file: x.values for x in found.matrices}
    keys = "linear" if "linear_at_z" in m else "linear_k"
    asked = m["linear_at_z"] if keys == "linear" else m["linear_q_at_z"]
    assert np.allclose(m["w_k"] @ m[f"{keys}_at_z"], m["k"], atol=1e-12)
    assert np.allclose(m["w_q"] @ asked, m["q"], atol=1e-12)
    assert np.allclose(m["k"].T @ m["q"], m["scores"], atol=1e-9)
    assert np.allclose(m["v"] @ m["softmax"] @ m["w_o"], m["output"], atol=1e-9)
    assert (
        np.abs(np.ravel(found.output) - c.head(*split(c, found.at)).ravel().numpy()).max() <= 2 * found.network.rounding
    )
    assert found.mass.sum() == pytest.approx(1) and found.indicator.sum(axis=0) == pytest.approx(1)
    assert found.mass.argmax() == found.cell  # a hard head, away from boundaries


def split(c: pa.Compiled, flat: np.ndarray) -> list[torch.Tensor]:
    cuts = np.cumsum([0] + [int(np.prod(s)) for s in c.head.input_shapes])
    return [torch.from_numpy(flat[a:b].reshape(1, *s)) for a, b, s in zip(cuts, cuts[1:], c.head.input_shapes)]


def read_csv(path: Path) -> np.ndarray:
    return np.loadtxt(path, delimiter=",", ndmin=2, comments="#")


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_layers(four_cells(), tmp_path_factory.mktemp("weights") / "log", at=[0.3, 0.4])


def test_the_files_hold_the_tensors(weights: Path) -> None:
    network, tensors = four_cells().layers("log"), np.load(weights / "tensors.npz")
    for name, tensor in network.state_dict().items():
        assert np.array_equal(tensors[name], tensor.numpy())
    for name in ("w_k", "w_q", "w_v", "w_o"):
        assert np.array_equal(read_csv(weights / f"{name}.csv"), tensors[f"attention.{name}"])
    assert np.array_equal(read_csv(weights / "softmax.csv"), tensors["softmax"])
    out = oracle({k: tensors[k] for k in network.state_dict()}, np.array([[0.3], [0.4]]))
    assert out == pytest.approx(read_csv(weights / "output.csv"))
    summary = json.loads((weights / "layers.json").read_text())
    assert summary["error_bound"] == network.error_bound and summary["stored_numbers"] == network.num_parameters
    for m in summary["matrices"]:
        assert read_csv(weights / f"{m['file']}.csv").shape == tuple(m["shape"])
        assert (weights / f"{m['file']}.svg").read_bytes()[:5] == b"<?xml"


def test_the_page_names_every_matrix_and_equation(weights: Path) -> None:
    page = (weights / "index.html").read_text()
    for text in (
        "(B.5)",
        "(B.6)",
        "(B.10)",
        "(B.13)",
        "(B.14)",
        "(B.15)",
        "softmax(KᵀQ)",
        "W_O",
        "error ≤",
        "stored numbers",
    ):
        assert text in page, text
    assert "\\mathrm" not in page and page.count("<img") == 1 + len(
        json.loads((weights / "layers.json").read_text())["matrices"]
    )
    assert (weights / "w_k.csv").read_text().splitlines()[2].startswith("# rows: 1, 1, n=1; columns: 1, dG=")


def test_all_or_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, weights: Path) -> None:
    c = four_cells()
    with pytest.raises(AlreadyExistsError, match="exists"):
        write_layers(c, weights)
    (tmp_path / "mine").mkdir()
    with pytest.raises(AlreadyExistsError, match="not a folder with layers"):
        write_layers(c, tmp_path / "mine", overwrite=True)

    def fails(*_: object) -> str:
        raise OSError("no space left")

    monkeypatch.setattr(folder_module, "_csv", fails)
    with pytest.raises(OSError, match="space"):
        write_layers(c, tmp_path / "out")
    assert [p.name for p in tmp_path.iterdir()] == ["mine"]


def test_too_large_and_outside_are_refused_with_the_number(monkeypatch: pytest.MonkeyPatch) -> None:
    c = four_cells()
    with pytest.raises(OutsideDomainError, match="outside"):
        layers_figure(c, at=[2.0, 0.0])
    with pytest.raises(ShapeError, match="takes 2"):
        layers_figure(c, at=[0.5])
    assert layer_matrices.MOST_NUMBERS == 1 << 24
    network = c.layers("log")
    formed = 9 * 8 + 2 * 8 * 8  # Linear(Z), KᵀQ and its softmax
    monkeypatch.setattr(layer_matrices, "MOST_NUMBERS", network.num_parameters + formed)
    assert layers_at(c, network)
    monkeypatch.setattr(layer_matrices, "MOST_NUMBERS", network.num_parameters + formed - 1)
    with pytest.raises(SizeError, match=f"8 columns.*{network.num_parameters + formed} numbers") as refused:
        layers_figure(c)
    assert "indexed" in refused.value.hint
    assert layers_at(c, c.layers("indexed"))


def test_large_matrices_are_coarsened_by_their_largest_entry_and_small_ones_are_not() -> None:
    rng = np.random.default_rng(0)
    part = rng.normal(size=(7, 10))
    coarse = _coarsened(part, 3, 4)
    assert coarse.shape == (3, 3)
    for i, j in np.ndindex(3, 3):
        block = part[3 * i : 3 * i + 3, 4 * j : 4 * j + 4]
        assert coarse[i, j] == block.ravel()[np.abs(block).argmax()]
    assert np.array_equal(_coarsened(part, 1, 1), part)
    c, found = found_at("sine 1-D typed", "log")
    drawn = texts(matrix_figure(next(m for m in found.matrices if m.file == "w_k")))
    assert not any("pixel" in t for t in drawn) and any(f"3 × {2 * c.num_keys + 1}" in t for t in drawn)
    whole = (Block("", 2000),)
    wide = Matrix("A", "a", "", "here", "", np.eye(2000), whole, whole, (("",),))
    assert any("each pixel: largest of up to" in t for t in texts(matrix_figure(wide)))


def texts(figure: Figure) -> list[str]:
    return [t.get_text() for t in figure.findobj(Text)]


def faults(figure: Figure) -> list[str]:
    """Texts that overlap another or leave the figure."""
    figure.draw_without_rendering()
    boxes = []
    for axes in itertools.chain(figure.axes, *(a.child_axes for a in figure.axes)):
        shown = [a.get_majorticklabels() for a in (axes.xaxis, axes.yaxis)]
        inside = [a.get_view_interval() for a in (axes.xaxis, axes.yaxis)]
        for labels, span, at in zip(shown, inside, (0, 1)):
            for label in labels:
                label.set_visible(axes.axison and min(span) <= label.get_position()[at] <= max(span))
    for t in figure.findobj(Text):
        if t.get_text() and t.get_visible():
            boxes.append((t.get_text(), t.get_window_extent().padded(-1)))
    width, height = figure.bbox.size
    cut = [text for text, b in boxes if b.x0 < -1 or b.y0 < -1 or b.x1 > width + 1 or b.y1 > height + 1]
    return cut + [f"{a} | {b}" for (a, x), (b, y) in itertools.combinations(boxes, 2) if x.overlaps(y)]


def test_no_text_overlaps_or_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    found, tokens = (layers_at(c, c.layers("log")) for c in (four_cells(), compiled("three tokens of one")))
    assert faults(draw_flow(found)) == faults(attention_figure(tokens)) == []
    monkeypatch.setattr(layer_plots, "_wide", lambda *_: 0.0)  # negative control: texts are not measured
    assert faults(attention_figure(tokens)) != []


def test_small_entries_are_white_and_counted() -> None:
    assert _shades(np.array([1e-9, 0.0, -1e-4, 2e-3, -1.0]), 1.0).mask.tolist() == [True, True, True, False, False]
    assert _shades(np.array([0.25, 1.0]), 1.0).tolist() == [
        0.15 + 0.85 * 0.5,
        1.0,
    ]  # the square root, from the faintest shade on
    found = layers_at(four_cells(), four_cells().layers("log"), [0.3, 0.4])
    softmax = next(m for m in found.matrices if m.file == "softmax")
    drawn = texts(matrix_figure(softmax))
    assert "(6 entries are white but not zero: below 0.00075)" in drawn
    assert "0" in drawn and "0.75" in drawn and "−0.75" not in drawn  # the colours of weights begin at 0
    linear = next(m for m in found.matrices if m.file == "linear_c")
    assert not any("white" in t for t in texts(matrix_figure(linear)))


def test_cells_of_the_plane_are_drawn_with_their_mass() -> None:
    soft = pa.compile("x0*x1", pa.Box([-1, -1], [1, 1]), tolerance=0.7, method="hard", sharpness=8.0)
    drawn = texts(attention_figure(found := layers_at(soft, soft.layers("indexed"), [0.3, 0.4])))
    assert f"indicator of cell {found.cell}" in drawn
    assert {f"{x:.2f}" for x in found.mass if x >= 0.005} <= set(drawn)
    assert {str(j) for j in range(len(found.mass))} <= set(drawn)


def test_values_affine_in_z_are_not_called_signs() -> None:
    c = pa.compile("x*x", pa.Box([0], [1]), tolerance=0.1, method="affine")
    found = layers_at(c, c.layers("log"))
    assert np.abs(next(m for m in found.matrices if m.file == "v").values).max() != 1
    assert [x for m in found.matrices for x in contradictions(m, 0.0) if x.endswith("X_1")] == []


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    head = compiled("mixed").save(tmp_path / "head")
    monkeypatch.setattr(folder_module, "_draw", lambda _, folder: (folder / "layers.svg").write_text("<svg/>"))
    arguments = ("--form", "indexed", "--at", "0.1,-0.2", "--no-pictures", "--json")
    answer = partita("layers", head, "--out", tmp_path / "w", *arguments)
    data = json.loads(answer.stdout)
    assert answer.returncode == 0 and data["at"] == [0.1, -0.2] and data["form"] == "indexed"
    assert "W_V" in (tmp_path / "w" / "index.html").read_text() and not list((tmp_path / "w").glob("*.svg"))
    again = partita("layers", head, "--out", tmp_path / "w")
    assert again.returncode == 1 and "--overwrite" in again.stderr
    assert partita("layers", head, "--out", tmp_path / "w", "--overwrite").returncode == 0
    assert json.loads((tmp_path / "w" / "layers.json").read_text())["form"] == "log"
    assert (tmp_path / "w" / "layers.svg").exists()
    for wrong, code in (("x,y", 64), ("0.1", 1), ("7,7", 1)):
        assert partita("layers", head, "--out", tmp_path / "n", "--at", wrong).returncode == code
    assert partita("layers", head, "--out", tmp_path / "n", "--form", "sparse").returncode == 64
    refused = partita("layers", head, "--out", tmp_path / "n", "--tolerance", "1e-3")
    assert refused.returncode == 1 and "rounding" in refused.stderr and not (tmp_path / "n").exists()
    assert math.isfinite(data["error_bound"])
