"""The pages say what the commands print.

A fenced block after one of these comments is the output of a command:

    <!-- output of the snippet above -->                 what the nearest ```python block before it prints
    <!-- output of: partita-check head/ -->              what the command prints
    <!-- rows of: python benchmarks/lesson.py -->        a table whose rows this benchmark prints

The python blocks of a page run in order, in one namespace and one empty folder. Text must match word for word, numbers within 1 %,
because the last digits differ between processors. Times and runs of spaces do not count.

`python tests/test_docs.py` rewrites the blocks (not the rows of the lesson) from what the commands print now.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import json
import math
import os
import re
import shlex
import sys
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import typer
from safetensors.numpy import load_file
from typer.testing import CliRunner

from partita.cli import app

ROOT = Path(__file__).parent.parent
PAGES = [
    "README.md",
    "docs/format.md",
    "docs/in-context.md",
    "docs/inspection.md",
    "docs/positions.md",
    "docs/weights.md",
]
SNIPPETS_ONLY = ["docs/second-paper.md"]
SLOW_SNIPPETS = ["docs/methods.md", "docs/certificates.md", "docs/learning.md"]
SLOW_ROWS = {("tuned", "0.001"), ("fitted", "1e-08")}

_BLOCK = re.compile(
    r"^```python\n(?P<code>.*?)^```$"
    r"|^<!-- output of(?: the snippet above|: (?P<command>[^\n]+)) -->\n```text\n(?P<output>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)
_NUMBER = re.compile(r"(?<![\w.])[-+−]?\d[\d,]*\.?\d*(?:e[-+]?\d+)?(?!\w)")
_SECONDS = re.compile(r"\b\d+(?:\.\d+)? (?:s|seconds)\b")


@dataclass(frozen=True)
class Shown:
    """An output block of a page: where it stands, what it shows, and what its command prints now."""

    start: int
    end: int
    source: str
    text: str
    printed: str


def run_command(line: str) -> str:
    """What `partita …` or `partita-check …` prints, run in this process."""
    program, *arguments = shlex.split(line)
    if program == "partita":
        return CliRunner().invoke(app, arguments, catch_exceptions=False).stdout
    if program != "partita-check":
        raise ValueError(f"{line!r}: only partita and partita-check can be run here")
    from partita_check.cli import main

    with contextlib.redirect_stdout(io.StringIO()) as printed:
        main(arguments)
    return printed.getvalue()


def run_page(page: str) -> list[Shown]:
    """Run every snippet and command of a page, top to bottom, in an empty folder."""
    found: list[Shown] = []
    names: dict[str, object] = {"__name__": "page"}
    printed = ""
    torch.manual_seed(0)  # snippets build untrained networks
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        for block in _BLOCK.finditer(page):
            if block["code"] is not None:
                with contextlib.redirect_stdout(io.StringIO()) as out:
                    exec(compile(block["code"], "snippet", "exec"), names)
                printed = out.getvalue()
                continue
            source = block["command"] or "the snippet above"
            text = run_command(source) if block["command"] else printed
            found.append(Shown(block.start("output"), block.end("output"), source, block["output"], text))
    return found


def differences(shown: str, printed: str) -> list[str]:
    """Lines that differ in a word, or in a number by more than 1 %."""
    old, new = (_SECONDS.sub("… s", text).rstrip("\n").split("\n") for text in (shown, printed))
    if len(old) != len(new):
        return [f"{len(old)} lines are shown, {len(new)} are printed:\n{printed}"]
    return [f"shown:   {a}\nprinted: {b}" for a, b in zip(old, new) if not _same(a, b)]


def _same(shown: str, printed: str) -> bool:
    words = [" ".join(_NUMBER.sub("#", line).split()) for line in (shown, printed)]
    a, b = ([_value(n) for n in _NUMBER.findall(line)] for line in (shown, printed))
    return words[0] == words[1] and all(math.isclose(x, y, rel_tol=0.01) for x, y in zip(a, b, strict=True))


def _value(number: str) -> float:
    return float(number.replace(",", "").replace("−", "-"))


@cache
def lesson() -> ModuleType:
    """benchmarks/lesson.py, which prints the rows of the lesson's table."""
    folder = ROOT / "benchmarks"
    spec = importlib.util.spec_from_file_location("lesson", folder / "lesson.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(folder))  # it imports its neighbour
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(folder))
    return module


def lesson_rows() -> list[str]:
    page = (ROOT / "docs/lesson.md").read_text(encoding="utf-8")
    table = page.split("<!-- rows of: python benchmarks/lesson.py -->\n")[1].split("\n\n")[0]
    return table.splitlines()[2:]


def _row_cases() -> list[object]:
    cases: list[object] = []
    for row in lesson_rows():
        method, tolerance, *_ = (cell.strip() for cell in row.strip("|").split("|"))
        slow = [pytest.mark.slow] if (method, tolerance) in SLOW_ROWS else []
        cases.append(pytest.param(row, method, float(tolerance), marks=slow, id=f"{method}-{tolerance}"))
    return cases


@pytest.mark.parametrize("name", PAGES)
def test_a_page_shows_what_its_commands_print(name: str) -> None:
    shown = run_page((ROOT / name).read_text(encoding="utf-8"))
    assert shown, f"{name} shows no output"
    wrong = {s.source: found for s in shown if (found := differences(s.text, s.printed))}
    assert wrong == {}, f"{name} has drifted; `python tests/test_docs.py` rewrites it: {wrong}"


@pytest.mark.parametrize("name", [*SNIPPETS_ONLY, *(pytest.param(n, marks=pytest.mark.slow) for n in SLOW_SNIPPETS)])
def test_the_snippets_of_a_page_run(name: str) -> None:
    page = (ROOT / name).read_text(encoding="utf-8")
    assert "```python" in page
    run_page(page)


@pytest.mark.parametrize(("row", "method", "tolerance"), _row_cases())
def test_the_lesson_shows_what_its_benchmark_prints(row: str, method: str, tolerance: float) -> None:
    assert differences(row, lesson().row(method, tolerance)) == []


def test_the_lesson_states_the_best_sharpness_that_its_benchmark_prints() -> None:
    page = (ROOT / "docs/lesson.md").read_text(encoding="utf-8")
    text = page.split("<!-- lines of: python benchmarks/lesson.py -->\n```text\n")[1].split("```")[0]
    assert differences(text, "\n".join(lesson().sharpness_lines(lesson().sharpness_curve()))) == []


def saved_heads() -> list[Path]:
    """The recorded heads: every method, dtype and kind of domain."""
    return sorted(p.parent for p in (ROOT / "tests/corpus").glob("*/head.json"))


def undocumented(page: str, folders: list[Path]) -> set[str]:
    """What saved heads hold and the page does not name: keys, tensors, and the words that certain keys take."""
    missing: set[str] = set()
    for folder in folders:
        for file in ("head.json", "certificate.json"):
            missing |= set(json.loads((folder / file).read_text())) ^ _named_keys(page, file)
        certificate = json.loads((folder / "certificate.json").read_text())
        words = [certificate["kind"], certificate["semantics"], certificate["model"]["type"]]
        words += [a["vouched_by"] for a in certificate["assumptions"]]
        words += [certificate["proof"][key] for key in ("method",) if key in certificate["proof"]]
        words += [re.sub(r"_[1-9]\d*$", "_0", name) for name in load_file(folder / "head.safetensors")]
        missing |= {word for word in words if f"`{word}`" not in page}
    return missing


def _named_keys(page: str, file: str) -> set[str]:
    """Names in the first column of the table under a heading."""
    section = page.split(f"## `{file}`")[1].split("\n## ")[0]
    rows = re.findall(r"^\| (`[^|]*) \|", section, flags=re.MULTILINE)
    return {key for row in rows for key in re.findall(r"`(\w+)`", row)}


def test_the_format_names_everything_that_saved_heads_hold() -> None:
    page, heads = (ROOT / "docs/format.md").read_text(encoding="utf-8"), saved_heads()
    assert len(heads) > 40
    assert undocumented(page, heads) == set()
    for word in ("`seal`", "`boxes`", "`head.origin`", "`construction`"):  # negative control
        assert undocumented(page.replace(word, "`wax`"), heads) != set(), word


def unknown_commands(page: str) -> list[str]:
    """`partita …` commands, options and `python FILE` scripts that a page names and that do not exist."""
    group: Any = typer.main.get_command(app)  # its commands are imported when they are asked for
    commands = {name: group.get_command(None, name) for name in group.list_commands(None)}
    missing = []
    for name, rest in re.findall(r"(?<![\w./-])partita ([a-z]+)\b([^\n·`]*)", _code(page)):
        known = {option for parameter in getattr(commands.get(name), "params", []) for option in parameter.opts}
        options = re.findall(r"(?<![\w-])--[a-z-]+", rest.split("  #")[0])
        missing += [f"partita {name}"] if name not in commands else [f"{name} {o}" for o in options if o not in known]
    scripts = re.findall(r"(?:python|pytest) ([\w/]+\.py)", page)
    return missing + [script for script in scripts if not (ROOT / script).exists()]


def _code(page: str) -> str:
    """Fenced blocks without a language, and inline code."""
    fence = re.compile(r"^```(\w*)\n(.*?)^```$", flags=re.MULTILINE | re.DOTALL)
    blocks = [text for language, text in fence.findall(page) if not language]
    return "\n".join(blocks + re.findall(r"`([^`\n]+)`", fence.sub("", page)))


@pytest.mark.parametrize(
    "path", [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))], ids=lambda p: p.name
)
def test_commands_and_scripts_that_a_page_names_exist(path: Path) -> None:
    assert unknown_commands(path.read_text(encoding="utf-8")) == []


def test_a_command_that_does_not_exist_is_noticed() -> None:
    page = "```\npartita plot head/ --out x.svg  ·  partita fly head/\n```\n`partita eval head/ --wings`, `python tests/moon.py`"
    assert unknown_commands(page) == ["partita fly", "eval --wings", "tests/moon.py"]


def test_a_page_that_has_drifted_is_noticed() -> None:
    page = "```python\nprint('error', 2.5e-07, 'in 1.25 s')\n```\n\n<!-- output of the snippet above -->\n```text\n{}\n```\n"
    for text, same in [
        ("error 2.51e-07 in 7 s", True),
        ("error   2.5e-07 in 1.25 s", True),
        ("error 2.9e-07 in 1.25 s", False),
        ("bound 2.5e-07 in 1.25 s", False),
        ("error 2.5e-07 in 1.25 s\nmore", False),
    ]:
        (shown,) = run_page(page.format(text))
        assert (differences(shown.text, shown.printed) == []) is same, text
    with pytest.raises(NameError):
        run_page("```python\nundefined\n```\n")
    with pytest.raises(ValueError, match="only partita"):
        run_command("rm -rf /")


def rewrite(name: str) -> None:
    """Put what the commands print now into the page."""
    path = ROOT / name
    page = path.read_text(encoding="utf-8")
    for shown in reversed(run_page(page)):
        page = page[: shown.start] + shown.printed.rstrip("\n") + "\n" + page[shown.end :]
    path.write_text(page, encoding="utf-8")


if __name__ == "__main__":
    os.chdir(ROOT)
    for each in PAGES:
        rewrite(each)
