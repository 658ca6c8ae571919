"""The house: imports go one way, few public names, examples run, files stay readable."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

import partita

ROOT = Path(__file__).parent.parent
ORDER = [
    "errors",
    "arithmetic",
    "geometry",
    "functions",
    "heads",
    "proofs",
    "search",
    "methods",
    "papers",
    "ramps",
    "networks",
    "storage",
    "compiler",
    "learn",
    "inspection",
    "plots",
    "reproduction",
    "cli",
]
SOURCES = sorted((ROOT / "partita").rglob("*.py"))


def room(module: str) -> str:
    return module.split(".")[1] if module.count(".") else ""


def uphill_imports(name: str, source: str) -> list[str]:
    """Imports in a module that go up the order or sideways into the package itself."""
    own = ORDER.index(room(name))
    found = []
    for node in ast.walk(ast.parse(source)):
        modules = (
            [node.module or ""]
            if isinstance(node, ast.ImportFrom)
            else [a.name for a in node.names]
            if isinstance(node, ast.Import)
            else []
        )
        if isinstance(node, ast.ImportFrom) and node.module == "partita":
            modules = [f"partita.{a.name}" for a in node.names]
        if own < ORDER.index("cli"):  # commands use the public names, as everybody else
            found += [m for m in modules if m == "partita"]
        found += [m for m in modules if m.startswith("partita.") and ORDER.index(room(m)) > own]
    return found


@pytest.mark.parametrize(
    "path",
    [p for p in SOURCES if p.name not in ("__init__.py", "__main__.py") or p.parent.name != "partita"],
    ids=lambda p: str(p.relative_to(ROOT)),
)
def test_imports_go_down_the_line(path):
    name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
    assert uphill_imports(name, path.read_text()) == []


def test_an_uphill_import_is_noticed():
    assert uphill_imports("partita.geometry.grid", "from partita.heads.head import FoldedHead") == [
        "partita.heads.head"
    ]
    assert uphill_imports("partita.geometry.grid", "import partita.errors") == []
    assert uphill_imports("partita.geometry.grid", "import partita as pa") == ["partita"]
    assert uphill_imports("partita.cli.common", "import partita as pa") == []


def test_every_room_is_in_the_line():
    rooms = {p.relative_to(ROOT / "partita").parts[0].removesuffix(".py") for p in SOURCES} - {"__init__", "__main__"}
    assert rooms == set(ORDER)


def test_few_public_names_and_all_documented():
    assert len(partita.__all__) <= 25
    assert all(getattr(partita, name).__doc__ for name in partita.__all__)


def test_every_module_says_what_it_is_for():
    assert [p for p in SOURCES if not ast.get_docstring(ast.parse(p.read_text()))] == []


def unsafe(source: str) -> list[str]:
    """Calls of eval, exec, compile, __import__ or torch.load, and imports of pickle."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call):
            found.append(ast.unparse(node.func))
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            found += [f"import {name}" for name in [*(a.name for a in node.names), getattr(node, "module", None)]]
    return [f for f in found if f in ("eval", "exec", "compile", "__import__", "torch.load", "import pickle")]


def test_nothing_from_outside_is_evaluated_or_unpickled():
    assert {p.name: unsafe(p.read_text()) for p in SOURCES if unsafe(p.read_text())} == {}
    assert unsafe("eval(x)") == ["eval"] and unsafe("import pickle") == ["import pickle"]  # negative control


@pytest.mark.parametrize("example", sorted((ROOT / "examples").glob("*.py")), ids=lambda p: p.name)
def test_examples_run(example, tmp_path):
    arguments = ["--out", str(tmp_path / "out")] if "--out" in example.read_text() else []
    answer = subprocess.run([sys.executable, str(example), *arguments], capture_output=True, text=True, cwd=tmp_path)
    assert answer.returncode == 0, answer.stderr
    assert answer.stdout and "Traceback" not in answer.stderr


def test_the_readme_names_commands_and_files_that_exist():
    readme = (ROOT / "README.md").read_text()
    for link in re.findall(r"\]\(((?!http)[^)]+)\)", readme):
        assert (ROOT / link).exists(), link
    makefile = (ROOT / "Makefile").read_text()
    assert all(re.search(rf"^{name}:", makefile, re.M) for name in ("demo", "test"))
    assert "make test" in (ROOT / ".ci/run").read_text()
