"""The pages say what the commands print, and everything on them can be pasted.

The pages are README.md, CONTRIBUTING.md, checker/README.md and every docs/**/*.md but the report, which `partita reproduce`
writes. Notebooks are run by tests of their own.

The blocks of a page run in order, in one namespace and one empty folder: ```python as Python, ```sh line by line as commands. A
python block whose first line is `# name.py` is also saved under that name. Every other block is ```text. A comment before a
block, with the reason, exempts it:

    <!-- not run: needs the network -->

A fenced block after one of these comments is the output of a command:

    <!-- output of the snippet above -->                 what the nearest ```python block before it prints
    <!-- output of: partita-check head/ -->              what the command prints
    <!-- rows of: python benchmarks/lesson.py -->        a table whose rows this benchmark prints

Text must match word for word, numbers within 1 %,
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
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
import typer
from safetensors.numpy import load_file
from typer.testing import CliRunner

from partita.cli import app
from partita.errors import PartitaError

ROOT = Path(__file__).parent.parent
PAGES = [
    "README.md",
    "CONTRIBUTING.md",
    "checker/README.md",
    *(
        p.relative_to(ROOT).as_posix()
        for p in sorted((ROOT / "docs").rglob("*.md"))
        if "_build" not in p.parts and p.name != "report.md"
    ),
]
SLOW_PAGES = ["docs/methods.md", "docs/certificates.md", "docs/learning.md"]
MOST_EXEMPTIONS = 16  # benchmarks that take minutes, installations
SLOW_ROWS = {("tuned", "0.001"), ("fitted", "1e-08")}

_BLOCK = re.compile(
    r"^(?:<!-- (?P<comment>[^\n]*) -->\n)?```(?P<language>[^\n]*)\n(?P<body>.*?)^```$", re.MULTILINE | re.DOTALL
)
_OUTPUT = re.compile(r"output of(?: the snippet above|: (?P<command>.+))")
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
    """What `partita …`, `partita-check …`, `printf …` or `cc …` prints. The first two run in this process. All must succeed."""
    program, *arguments = shlex.split(line, comments=True)
    if program == "partita":
        result = CliRunner().invoke(app, arguments, catch_exceptions=False)
        if result.exit_code:
            raise AssertionError(f"{line!r} ended with {result.exit_code}: {result.output}")
        return result.stdout
    if program in ("printf", "cc"):
        return subprocess.run(line, shell=True, capture_output=True, text=True, check=True).stdout
    if program != "partita-check":
        raise ValueError(
            f"{line!r}: only partita, partita-check, printf and cc can be run here; for others use <!-- not run: reason -->"
        )
    from partita_check.cli import main

    with contextlib.redirect_stdout(io.StringIO()) as printed:
        code = main(arguments)
    if code != (2 if "--sampled" in arguments else 0):  # a spot check proves nothing, and says so
        raise AssertionError(f"{line!r} ended with {code}: {printed.getvalue()}")
    return printed.getvalue()


def run_page(page: str) -> list[Shown]:
    """Run every snippet and command of a page, top to bottom, in an empty folder."""
    found: list[Shown] = []
    names: dict[str, object] = {"__name__": "page"}
    printed = ""
    torch.manual_seed(0)  # snippets build untrained networks
    # pages may change how numpy prints: other tests in this process must not see it
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder), np.printoptions():
        for block in _BLOCK.finditer(page):
            comment, body = block["comment"] or "", block["body"]
            if comment.startswith("not run: "):
                continue
            if block["language"] == "python":
                if name := re.match(r"# (\w+\.py)\n", body):
                    Path(name[1]).write_text(body, encoding="utf-8")
                with contextlib.redirect_stdout(io.StringIO()) as out:
                    exec(compile(body, "snippet", "exec"), names)
                printed = out.getvalue()
            elif block["language"] == "sh":
                printed = "".join(run_command(line) for line in body.splitlines())
            elif output := _OUTPUT.fullmatch(comment):
                source = output["command"] or "the snippet above"
                text = run_command(source) if output["command"] else printed
                found.append(Shown(block.start("body"), block.end("body"), source, body, text))
    return found


def unread_blocks(page: str) -> list[str]:
    """Blocks that are neither run nor text nor exempted with a reason, and fences that are not blocks of their own."""
    found = [b[0] for b in _BLOCK.finditer(page) if b["language"] not in ("python", "sh", "text")]
    found += [b[0] for b in _BLOCK.finditer(page) if re.fullmatch(r"not run:?\s*", b["comment"] or "")]
    return found + re.findall(r"^[ >]*```.*$", _BLOCK.sub("", page), flags=re.MULTILINE)


def exemptions(page: str) -> list[str]:
    """The reasons why blocks of a page are not run."""
    comments = [b["comment"] or "" for b in _BLOCK.finditer(page)]
    return [c.removeprefix("not run: ") for c in comments if c.startswith("not run: ")]


def undefined_names(pages: dict[str, str]) -> str:
    """What ruff says about names that the python blocks of each page, read in order, do not define."""
    with tempfile.TemporaryDirectory() as folder:
        for name, page in pages.items():
            code = "\n".join(b["body"] for b in _BLOCK.finditer(page) if b["language"] == "python")
            (Path(folder) / f"{name.replace('/', '_')}.py").write_text(code, encoding="utf-8")
        command = [sys.executable, "-m", "ruff", "check", "--isolated", "--no-cache", "--select", "F821,E9", folder]
        return subprocess.run(command, capture_output=True, text=True).stdout


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


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] * (n in SLOW_PAGES)) for n in PAGES])
def test_everything_on_a_page_runs_and_prints_what_the_page_shows(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))  # `partita inspect` adds folders, as Python does
    monkeypatch.delitem(sys.modules, "my_models", raising=False)  # of another page
    shown = run_page((ROOT / name).read_text(encoding="utf-8"))
    wrong = {s.source: found for s in shown if (found := differences(s.text, s.printed))}
    assert wrong == {}, f"{name} has drifted; `python tests/test_docs.py` rewrites it: {wrong}"


def test_every_block_is_run_or_says_why_not() -> None:
    pages = {name: (ROOT / name).read_text(encoding="utf-8") for name in PAGES}
    assert {name: found for name, page in pages.items() if (found := unread_blocks(page))} == {}
    assert sum(len(exemptions(page)) for page in pages.values()) <= MOST_EXEMPTIONS
    assert undefined_names(pages) == "All checks passed!\n"
    assert sum(len(_OUTPUT.findall(page)) for page in pages.values()) > 20  # outputs are shown, and compared


def test_a_block_that_cannot_be_pasted_is_noticed() -> None:
    for page in ("```\npartita --help\n```\n", "  ```python\n  1\n  ```\n", "<!-- not run: -->\n```sh\nls\n```\n"):
        assert unread_blocks(page), page
    marked = "<!-- not run: needs a GPU -->\n```sh\nrm -rf /\n```\n"
    assert unread_blocks(marked) == [] and exemptions(marked) == ["needs a GPU"] and run_page(marked) == []
    assert "undefined" in undefined_names({"a": "```python\nx = 1\n```\n```python\nprint(x, undefined)\n```\n"})
    for wrong in ("partita verify a/ · partita bounds a/", "partita verify nowhere/", "partita-check nowhere/"):
        with pytest.raises((AssertionError, PartitaError)):
            run_page(f"```sh\n{wrong}\n```\n")
    saved = "```python\n# held.py\nVALUE = 7\n```\n```python\nfrom pathlib import Path\nprint(Path('held.py').read_text())\n```\n"
    (shown,) = run_page(saved + "<!-- output of the snippet above -->\n```text\n# held.py\nVALUE = 7\n\n```\n")
    assert differences(shown.text, shown.printed) == []


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
    """Fenced blocks of commands, and inline code."""
    fence = re.compile(r"^```(\w*)\n(.*?)^```$", flags=re.MULTILINE | re.DOTALL)
    blocks = [text for language, text in fence.findall(page) if language in ("", "sh")]
    return "\n".join(blocks + re.findall(r"`([^`\n]+)`", fence.sub("", page)))


@pytest.mark.parametrize(
    "name",
    [*PAGES, "docs/reproduction/report.md", *(f"examples/{p.name}" for p in sorted((ROOT / "examples").glob("*.py")))],
)
def test_commands_and_scripts_that_a_page_names_exist(name: str) -> None:
    assert unknown_commands((ROOT / name).read_text(encoding="utf-8")) == []


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
        if _OUTPUT.search((ROOT / each).read_text(encoding="utf-8")):
            rewrite(each)
