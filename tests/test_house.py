"""The house: imports go one way, few public names, examples run, files stay readable."""

import ast
import inspect
import re
import runpy
import sys
import tomllib
from pathlib import Path

import pytest

import partita
from partita import plots

ROOT = Path(__file__).parent.parent
ORDER = [
    "moved",
    "errors",
    "arithmetic",
    "workers",
    "geometry",
    "functions",
    "kernels",
    "heads",
    "proofs",
    "distributed",
    "search",
    "methods",
    "papers",
    "ramps",
    "networks",
    "storage",
    "learn",
    "compiler",
    "inspection",
    "plots",
    "reproduction",
    "studio",
    "cli",
]
OLD_NAMES = {"attention", "certify", "constructions", "experiments", "targets"}  # of rooms, deprecated
SOURCES = sorted(p for p in (ROOT / "partita").rglob("*.py") if p.stem not in OLD_NAMES)


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


def parameters_of(value: object) -> list[str]:
    """The arguments that a function, method or constructor takes; none for what has no signature."""
    try:
        names = list(inspect.signature(value).parameters)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return []
    return [n for n in names if n not in ("self", "cls") and not n.startswith("_")]


def listed(text: str) -> list[str]:
    """What the Args or Attributes section of a docstring lists, one name at the start of a line."""
    found = []
    for section in re.findall(r"^(?:Args|Attributes):\n((?:(?: {4}.*)?\n)*)", inspect.cleandoc(text) + "\n\n", re.M):
        found += re.findall(r"^ {4}(\w+): \S", section, re.M)
    return found


def lacking(name: str, value: object, *, example: bool) -> list[str]:
    """What the docstring of a public name lacks: the text itself, an argument on its own line, an example that runs."""
    text = inspect.getdoc(value) or ""
    if not text or text == inspect.getdoc(type(value)):
        return [f"{name}: no docstring"]
    found = [f"{name}: argument {p}" for p in parameters_of(value) if p not in listed(text)]
    return [*found, f"{name}: example"] if example and ">>> " not in text else found


def public_members(cls: type) -> dict[str, object]:
    """Methods and properties that partita itself defines."""
    found = {}
    for name in (n for n in dir(cls) if not n.startswith("_")):
        value = inspect.getattr_static(cls, name)
        home = next(base for base in cls.__mro__ if name in vars(base))
        if home.__module__.startswith("partita") and (callable(value) or hasattr(value, "__get__")):
            found[name] = value.__func__ if isinstance(value, (classmethod, staticmethod)) else value
    return found


def public_names() -> dict[str, object]:
    """Everything in `partita.__all__`; of its modules, and of `partita.plots`, everything in theirs."""
    names: dict[str, object] = {f"plots.{name}": getattr(plots, name) for name in plots.__all__}
    for name in partita.__all__:
        value = getattr(partita, name)
        names[name] = value
        if inspect.ismodule(value):
            names |= {f"{name}.{inner}": getattr(value, inner) for inner in value.__all__}
    return names


PUBLIC = public_names()


def test_few_public_names():
    assert len(partita.__all__) <= 40


@pytest.mark.parametrize("name", PUBLIC)
def test_public_names_are_documented(name):
    value = PUBLIC[name]
    if inspect.ismodule(value):
        assert value.__doc__
        return
    # results that only inspection returns need no example of their own: the functions that return them have one
    example = not (inspect.isclass(value) and name.startswith("inspect."))
    found = lacking(name, value, example=example)
    if inspect.isclass(value):
        for member, method in public_members(value).items():
            found += lacking(f"{name}.{member}", method, example=False)
    assert found == []


def test_a_poor_docstring_is_noticed():
    def bare(x): ...

    def crowded(x, y):
        """Sum.

        Args:
            x: one. y: other.
        """

    def good(x, y):
        """Sum.

        Args:
            x: one,
                over two lines.
            y: other.

        >>> good(1, 2)
        """

    class Silent:
        """Holds nothing.

        >>> Silent()
        """

        def method(self): ...

    Silent.__module__ = "partita.silent"
    assert lacking("bare", bare, example=True) == ["bare: no docstring"]
    assert lacking("crowded", crowded, example=True) == ["crowded: argument y", "crowded: example"]
    assert lacking("good", good, example=True) == []
    assert list(public_members(Silent)) == ["method"] and "rows" in public_members(partita.inspect.ModelReport)
    assert lacking("method", public_members(Silent)["method"], example=False) == ["method: no docstring"]


def twins(paths: list[Path]) -> dict[str, list[Path]]:
    """Files of one name, except those that every room has."""
    names: dict[str, list[Path]] = {}
    for path in paths:
        names.setdefault(path.name, []).append(path)
    return {n: found for n, found in names.items() if len(found) > 1 and n not in ("__init__.py", "__main__.py")}


def test_no_two_files_of_one_name():
    assert twins(SOURCES) == {}
    assert list(twins([Path("a/plan.py"), Path("b/plan.py"), Path("a/__init__.py"), Path("b/__init__.py")])) == [
        "plan.py"
    ]


def shadowed(source: str, modules: set[str]) -> list[str]:
    """Names that a room's __init__ imports although modules of the room have them: `room.name` would be one or the other."""
    imports = [n for n in ast.walk(ast.parse(source)) if isinstance(n, ast.ImportFrom)]
    return [a.asname or a.name for n in imports for a in n.names if (a.asname or a.name) in modules]


def test_no_module_is_shadowed_by_what_its_room_re_exports():
    found = {}
    for init in (p for p in SOURCES if p.name == "__init__.py"):
        modules = {p.stem for p in init.parent.glob("*.py")} | {p.name for p in init.parent.iterdir() if p.is_dir()}
        found[init.parent.name] = shadowed(init.read_text(), modules)
    assert {room: names for room, names in found.items() if names} == {}
    source = "from partita.compiler.plan import plan, Plan"
    assert shadowed(source, {"plan"}) == ["plan"] and shadowed(source, {"planner"}) == []  # negative control


def test_one_version():
    texts = [(ROOT / place).read_text() for place in ("pyproject.toml", "checker/pyproject.toml")]
    assert {tomllib.loads(text)["project"]["version"] for text in texts} == {partita.__version__}


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


LONG_EXAMPLES = {"inspect_digits.py"}  # trains a model


@pytest.mark.parametrize(
    "example",
    [
        pytest.param(p, marks=[pytest.mark.slow] * (p.name in LONG_EXAMPLES), id=p.name)
        for p in sorted((ROOT / "examples").glob("*.py"))
        if p.name not in ("demo.py", "slow_battery.py")  # test_wheels.py and test_slow_battery.py run them
    ],
)
def test_examples_run(example, tmp_path, monkeypatch, capfd):
    arguments = ["--out", str(tmp_path / "out")] if "--out" in example.read_text() else []
    arguments += ["--quick"] if "--quick" in example.read_text() else []
    monkeypatch.setattr(sys, "argv", [str(example), *arguments])
    monkeypatch.chdir(tmp_path)
    runpy.run_path(str(example), run_name="__main__")
    assert capfd.readouterr().out


def test_the_readme_names_commands_and_files_that_exist():
    readme = (ROOT / "README.md").read_text()
    for link in re.findall(r"\]\(((?!http)[^)]+)\)", readme):
        assert (ROOT / link).exists(), link
    makefile = (ROOT / "Makefile").read_text()
    targets = set(re.findall(r"`make (\w+)`", readme))
    assert targets >= {"demo", "docs", "studio", "test"}
    assert [name for name in targets if not re.search(rf"^{name}:", makefile, re.M)] == []
    assert "make test" in (ROOT / ".ci/run").read_text()
