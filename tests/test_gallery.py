"""The gallery: every cell is complete and short, runs by itself, and draws a picture whose labels keep apart."""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any

import pytest
from test_pictures import collisions

pytest.importorskip("matplotlib")

from matplotlib.figure import Figure

BOOK = json.loads((Path(__file__).parent.parent / "docs" / "gallery.ipynb").read_text())
CODE = {cell["id"]: "".join(cell["source"]) for cell in BOOK["cells"] if cell["cell_type"] == "code"}
MOST = 12  # lines, not counting imports and empty ones
SLOW = {  # they take seconds each; the build of the site runs them too
    "the-cells-of-a-ring-code",
    "from-soft-to-hard-code",
    "the-weights-of-a-layer-code",
    "a-surface-with-its-cells-on-the-floor-code",
    "why-small-heads-are-soft-code",
    "the-temperature-that-suits-a-head-code",
    "a-region-with-a-hole-code",
    "a-black-box-with-a-kink-code",
    "a-surrogate-as-an-onnx-file-code",
}


def lines(code: str) -> int:
    kept = [line for line in code.splitlines() if line.strip() and not line.startswith(("import ", "from "))]
    return len(kept)


def result(code: str) -> Any:
    """What a cell shows: the value of its last line, run without the other cells."""
    tree = ast.parse(code)
    last = tree.body.pop()
    assert isinstance(last, ast.Expr)
    names: dict[str, Any] = {}
    exec(compile(tree, "cell", "exec"), names)
    return eval(compile(ast.Expression(last.value), "cell", "eval"), names)


def test_every_picture_has_a_heading_a_sentence_and_few_lines() -> None:
    first, *rest = BOOK["cells"]
    assert "".join(first["source"]).startswith("# Gallery") and len(CODE) >= 12
    assert [cell["cell_type"] for cell in rest] == ["markdown", "code"] * len(CODE)
    for cell in rest[::2]:
        heading, empty, said = "".join(cell["source"]).split("\n", 2)
        assert heading.startswith("## ") and not empty and said.endswith(".")
    assert {name: lines(code) for name, code in CODE.items() if lines(code) > MOST} == {}
    assert lines("import os\n\n" + "x = 1\n" * 13) == 13
    assert all(max(map(len, code.splitlines())) <= 120 for code in CODE.values())


def test_no_outputs_are_stored() -> None:
    cells = [cell for cell in BOOK["cells"] if cell["cell_type"] == "code"]
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in cells)
    assert set(CODE) >= SLOW


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] if n in SLOW else []) for n in CODE])
def test_a_cell_draws_its_picture(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if "onnx" in name:
        pytest.importorskip("onnxruntime")
    monkeypatch.chdir(tmp_path)
    figure = result(CODE[name])
    assert isinstance(figure, Figure) and len(figure._repr_png_()) < 400_000
    if "weights-of-a-layer" not in name:  # entries are written on their blocks there
        assert list(collisions(figure)) == []


def test_cells_do_not_share_names() -> None:
    with pytest.raises(NameError):
        result("c.num_keys")  # what another cell defined
