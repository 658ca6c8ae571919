"""The tutorials run from top to bottom, without a warning, with small outputs; they are stored without outputs.

Each notebook runs in a kernel of its own, in an empty folder, as the build of the site runs it.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

NEEDS = 'notebooks need the extra "docs": pip install -e ".[docs]"'
nbformat = pytest.importorskip("nbformat", reason=NEEDS)
nbclient = pytest.importorskip("nbclient", reason=NEEDS)
pytest.importorskip("ipykernel", reason=NEEDS)

v4: Any = nbformat.v4

ROOT = Path(__file__).parent.parent
NOTEBOOKS = sorted((ROOT / "docs/tutorials").glob("*.ipynb"))
SLOW = ["ten-dimensions"]  # all of them together would take more than a minute; `make docs` runs it too
MOST_BYTES = 300_000  # of an executed notebook
MOST_SECONDS = 300  # of one cell: it hangs
MOST_PROCESSOR_SECONDS = 120  # of a notebook; an idle core takes less than 20

# Warnings are errors while the cells run, and for nothing that the kernel does before and after.
_BEFORE = "import warnings\nwarnings.simplefilter('error')"
_AFTER = "import time, warnings\nwarnings.resetwarnings()\nprint(time.process_time())"


def test_there_are_tutorials() -> None:
    assert len(NOTEBOOKS) >= 5


def faults(notebook: Any, name: str) -> list[str]:
    """What is wrong with a stored notebook: outputs, counters, ids that change, metadata of somebody's editor, a missing title."""
    nbformat.validate(notebook)
    found = [f"id {cell.id}" for k, cell in enumerate(notebook.cells, 1) if cell.id != f"{name}-{k:02d}"]
    for cell in notebook.cells:
        if cell.cell_type == "code" and (cell.outputs or cell.execution_count is not None):
            found.append(f"{cell.id} has outputs")
        if not set(cell.metadata) <= {"tags"} or not set(cell.metadata.get("tags", ())) <= {"hide-input"}:
            found.append(f"{cell.id} has metadata")
    found += [f"metadata {key}" for key in set(notebook.metadata) - {"kernelspec", "language_info"}]
    if notebook.metadata.get("language_info") != {"name": "python"}:
        found.append("language_info holds more than the name")
    if not notebook.cells or not notebook.cells[0].source.startswith("# "):
        found.append("no title")
    return found


def executed(notebook: Any, folder: Path) -> tuple[Any, float]:
    """The notebook with its outputs, and the processor time of its kernel in seconds."""
    cells = [v4.new_code_cell(_BEFORE), *notebook.cells, v4.new_code_cell(_AFTER)]
    run = v4.new_notebook(cells=cells, metadata=notebook.metadata)
    nbclient.NotebookClient(run, timeout=MOST_SECONDS, resources={"metadata": {"path": str(folder)}}).execute()
    *run.cells, last = run.cells[1:]
    return run, float(last.outputs[0].text)


@pytest.fixture(autouse=True)
def this_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel is a process of its own: it shall import what this process imports."""
    monkeypatch.setenv("PYTHONPATH", ":".join([str(ROOT), str(ROOT / "checker"), *filter(None, sys.path)]))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_tutorial_is_stored_without_outputs(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert faults(nbformat.reads(text, as_version=4), path.stem) == []
    assert json.loads(text)["nbformat_minor"] >= 5 and text.endswith("}\n")


@pytest.mark.parametrize(
    "path", [pytest.param(p, marks=[pytest.mark.slow] * (p.stem in SLOW), id=p.stem) for p in NOTEBOOKS]
)
@pytest.mark.filterwarnings("ignore")  # of the client and its sockets; those of the cells are errors in the kernel
def test_a_tutorial_runs(path: Path, tmp_path: Path) -> None:
    notebook, seconds = executed(nbformat.read(path, as_version=4), tmp_path)
    assert len(nbformat.writes(notebook)) <= MOST_BYTES, "smaller figures, or fewer"
    assert seconds <= MOST_PROCESSOR_SECONDS
    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    pictures = [o for o in outputs if "image/png" in o.get("data", {})]
    assert pictures and list(tmp_path.iterdir()) == []  # files of a tutorial go to a folder of its own
    said = [o.text for o in outputs if o.output_type == "stream" and o.name == "stderr"]
    assert all("compiling native kernels" in text for text in said), said


@pytest.mark.filterwarnings("ignore")
def test_a_notebook_that_fails_or_warns_is_noticed(tmp_path: Path) -> None:
    for source in ("1 / 0", "import warnings; warnings.warn('careful')"):
        with pytest.raises(nbclient.exceptions.CellExecutionError):
            executed(v4.new_notebook(cells=[v4.new_code_cell(source)]), tmp_path)
    run, _ = executed(v4.new_notebook(cells=[v4.new_code_cell("import partita; print(partita.__file__)")]), tmp_path)
    assert Path(run.cells[0].outputs[0].text.strip()).is_relative_to(ROOT)


def test_a_notebook_that_was_saved_by_an_editor_is_noticed() -> None:
    clean = {"kernelspec": {"name": "python3", "display_name": "Python 3"}, "language_info": {"name": "python"}}
    title = v4.new_markdown_cell("# Title", id="a-01")
    assert faults(v4.new_notebook(cells=[title], metadata=clean), "a") == []
    run = v4.new_code_cell("1", id="a-02", execution_count=1)
    folded = v4.new_code_cell("1", id="a-02", metadata={"collapsed": True})
    for cells, metadata in (
        ([title, run], clean),
        ([title, folded], clean),
        ([title, v4.new_code_cell("1", id="x")], clean),
        ([v4.new_code_cell("1", id="a-01")], clean),
        ([title], {**clean, "widgets": {}}),
        (
            [title],
            {
                "kernelspec": {"name": "python3", "display_name": "Python 3"},
                "language_info": {"name": "python", "version": "3.11.2"},
            },
        ),
    ):
        assert faults(v4.new_notebook(cells=cells, metadata=metadata), "a") != []
