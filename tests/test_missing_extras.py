"""An extra that is not installed: the message names a command that fits how partita itself was installed."""

import ast
import importlib.metadata
import json
import sys
from pathlib import Path

import pytest

import partita as pa
from partita.errors import MissingExtraError
from partita.plots import plot_head

ROOT = Path(__file__).parent.parent
NEEDS = [
    "torch>=2.6",
    "matplotlib>=3.8; extra == 'plot'",
    'onnx>=1.16 ; extra == "onnx"',
    'onnxscript; extra == "onnx"',
]


class Installed:
    """What importlib.metadata says of an installed package."""

    requires = NEEDS

    def __init__(self, origin: dict | None, installer: str = "pip"):
        self.files = {"INSTALLER": f"{installer}\n"} | (
            {} if origin is None else {"direct_url.json": json.dumps(origin)}
        )

    def read_text(self, name: str) -> str | None:
        return self.files.get(name)


def command(monkeypatch, installed: Installed | None, extra: str = "plot") -> str:
    def distribution(name):
        if installed is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return installed

    monkeypatch.setattr(importlib.metadata, "distribution", distribution)
    return MissingExtraError.of("plots need", extra).hint.removeprefix("Run: ")


@pytest.mark.parametrize(
    ("origin", "expected"),
    [
        (None, 'pip install "partita[plot]"'),
        ({"url": "file://{here}", "dir_info": {"editable": True}}, 'pip install -e "{here}[plot]"'),
        ({"url": "file://{here}", "dir_info": {}}, 'pip install "{here}[plot]"'),
        ({"url": "file://{here}/a.whl", "archive_info": {}}, 'pip install "{here}/a.whl[plot]"'),
        ({"url": "file:///gone/a.whl", "archive_info": {}}, 'pip install "matplotlib>=3.8"'),
        (
            {"url": "https://code.example/partita.git", "vcs_info": {"vcs": "git", "commit_id": "abc"}},
            'pip install "partita[plot] @ git+https://code.example/partita.git@abc"',
        ),
        (
            {"url": "https://code.example/a.whl", "archive_info": {}},
            'pip install "partita[plot] @ https://code.example/a.whl"',
        ),
    ],
    ids=["index", "editable", "folder", "wheel", "folder that is gone", "repository", "address"],
)
def test_the_command_fits_the_installation(origin, expected, monkeypatch, tmp_path):
    here = tmp_path / "a folder"
    here.mkdir()
    (here / "a.whl").touch()
    if origin and "{here}" in origin["url"]:
        origin = {**origin, "url": origin["url"].replace("{here}", here.as_posix().replace(" ", "%20"))}
    assert command(monkeypatch, Installed(origin)) == expected.replace("{here}", str(here))


def test_other_ways_to_have_partita(monkeypatch):
    assert command(monkeypatch, Installed(None, "uv")) == 'uv pip install "partita[plot]"'
    assert command(monkeypatch, None) == f'pip install -e "{ROOT}[plot]"'  # source files on PYTHONPATH
    gone = {"url": "file:///gone", "dir_info": {}}
    assert command(monkeypatch, Installed(gone), "onnx") == 'pip install "onnx>=1.16" "onnxscript"'


@pytest.mark.parametrize(
    ("hidden", "use", "extra"),
    [
        ("matplotlib", lambda c, folder: plot_head(c, folder / "x.svg"), "plot"),
        ("onnx", lambda c, folder: c.export_onnx(folder / "x.onnx"), "onnx"),
        ("onnxscript", lambda c, folder: c.export_onnx(folder / "x.onnx"), "onnx"),
    ],
)
def test_whoever_needs_a_missing_extra_is_told_what_to_run(hidden, use, extra, tmp_path, monkeypatch):
    c = pa.compile("x0", pa.Box([0, 0], [1, 1]), tolerance=0.1)
    monkeypatch.setitem(sys.modules, hidden, None)
    with pytest.raises(MissingExtraError) as error:
        use(c, tmp_path)
    hint = MissingExtraError.of("", extra).hint
    assert str(error.value).endswith(f" the extra {extra!r}, which is not installed. {hint}") and f"[{extra}]" in hint
    assert list(tmp_path.iterdir()) == []


def commands_written_out(source: str) -> list[str]:
    """Strings of a module that name an install command of their own."""
    if "pip install" not in source:
        return []
    strings = [n.value for n in ast.walk(ast.parse(source)) if isinstance(n, ast.Constant) and isinstance(n.value, str)]
    return [s for s in strings if "pip install" in s]


def test_there_is_one_mechanism():
    found = [p.name for p in (ROOT / "partita").rglob("*.py") if commands_written_out(p.read_text(encoding="utf-8"))]
    assert found == ["errors.py"]
    assert commands_written_out("raise Error(\"run pip install 'partita[x]'\")")  # negative control
