"""Every theorem that the code cites is stated in docs/theorems.md, and every one stated there is cited by the code."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable
from pathlib import Path

import pytest

import partita
from partita import papers, ramps
from partita.methods import METHODS

PACKAGE = Path(partita.__file__).parent
PAGE = PACKAGE.parent / "docs" / "theorems.md"
ABOUT = {f.__name__: f for f in (papers.indicator, papers.reassignment, papers.relu_head, ramps.ramp)}
ABOUT |= {type(m).__name__: type(m) for m in METHODS}

_KEY = r"`([a-z][a-z0-9]*(?:-[a-z0-9]+)*)`"
_CITATION = re.compile(rf"\*Theorem\*:\s*((?:{_KEY}(?:\s*\([^`)]*\))?(?:,|;| and)?\s*(?:in L_p\s+)?)+)")
_KEY_IN_TEXT = re.compile(_KEY)


def keys_in_text(text: str) -> set[str]:
    """The keys of every `*Theorem*: …` list in a docstring."""
    return {key for match in _CITATION.finditer(text) for key in _KEY_IN_TEXT.findall(match.group(1))}


def _strings(node: ast.expr | None) -> set[str]:
    """String constants that an expression may evaluate to: a literal, or either arm of a conditional."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return {node.value}
    return _strings(node.body) | _strings(node.orelse) if isinstance(node, ast.IfExp) else set()


def _called(node: ast.Call) -> str:
    return node.func.id if isinstance(node.func, ast.Name) else getattr(node.func, "attr", "")


def _named(node: ast.keyword | ast.Assign) -> str | None:
    """The keyword, or the one name that is assigned to."""
    if isinstance(node, ast.keyword):
        return node.arg
    return node.targets[0].id if len(node.targets) == 1 and isinstance(node.targets[0], ast.Name) else None


def keys_in_code(tree: ast.AST) -> set[str]:
    """Keys passed as `theorem=…`, assigned to a name `theorem`, or given as the fourth argument of a Term."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, (ast.keyword, ast.Assign)) and _named(node) == "theorem":
            found |= _strings(node.value)
        elif isinstance(node, ast.Call) and _called(node) == "Term" and len(node.args) > 3:
            found |= _strings(node.args[3])
    return found


def keys_in_docstrings(tree: ast.AST) -> set[str]:
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    texts = (ast.get_docstring(node) or "" for node in ast.walk(tree) if isinstance(node, documented))
    return {key for text in texts for key in keys_in_text(text)}


def cited_keys(sources: Iterable[Path]) -> dict[str, list[str]]:
    """Key to the files that cite it."""
    found: dict[str, list[str]] = {}
    for path in sorted(sources):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for key in keys_in_docstrings(tree) | keys_in_code(tree):
            found.setdefault(key, []).append(path.name)
    return found


def stated_keys(page: str) -> list[str]:
    """The `## key` headings, in order."""
    return re.findall(r"^## (\S+)\s*$", page, flags=re.MULTILINE)


def unstated(cited: Iterable[str], page: str) -> list[str]:
    """Cited keys that the page does not state."""
    return sorted(set(cited) - set(stated_keys(page)))


def uncited(cited: Iterable[str], page: str) -> list[str]:
    """Stated keys that no code cites."""
    return sorted(set(stated_keys(page)) - set(cited))


def sections(page: str) -> dict[str, str]:
    parts = re.split(r"^## (\S+)\s*$", page, flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2]))


@pytest.fixture(scope="module")
def page() -> str:
    return PAGE.read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def cited() -> dict[str, list[str]]:
    return cited_keys(PACKAGE.rglob("*.py"))


def test_every_cited_key_is_stated(cited: dict[str, list[str]], page: str) -> None:
    assert len(cited) >= 16
    assert unstated(cited, page) == []


def test_every_stated_key_is_cited_once_stated_once(cited: dict[str, list[str]], page: str) -> None:
    assert uncited(cited, page) == []
    assert len(stated_keys(page)) == len(set(stated_keys(page)))


def test_invented_and_forgotten_keys_are_reported(page: str) -> None:
    docstring = '"""Wonders. *Theorem*: `grid-moments`, `free-lunch` (9.9)."""'
    source = ast.parse(f'{docstring}\nTerm("x", 1.0, "y", "perpetual-motion")')
    invented = keys_in_docstrings(source) | keys_in_code(source)
    assert invented == {"grid-moments", "free-lunch", "perpetual-motion"}
    assert unstated(invented, page) == ["free-lunch", "perpetual-motion"]
    assert uncited(invented, "## grid-moments\n\n## nobody-cites-me\n") == ["nobody-cites-me"]


@pytest.mark.parametrize(
    ("source", "keys"),
    [
        ('Term("a", 1.0, "f", "one")', {"one"}),
        ('Certificate(theorem="two")', {"two"}),
        ('theorem = "three" if flat else "four"', {"three", "four"}),
        ('kind = "proved"', set()),
    ],
)
def test_keys_are_read_from_code(source: str, keys: set[str]) -> None:
    assert keys_in_code(ast.parse(source)) == keys


@pytest.mark.parametrize("name", ABOUT)
def test_every_construction_cites_a_stated_theorem(name: str, page: str) -> None:
    keys = keys_in_text(ABOUT[name].__doc__ or "")
    assert keys, f"{name} cites no theorem"
    assert unstated(keys, page) == []


def test_a_docstring_without_a_citation_is_noticed() -> None:
    assert keys_in_text("Returns `self_attention` heads, by the theorem of `somebody`.") == set()


def test_every_section_is_complete(page: str) -> None:
    parts = ("**Statement.**", "**Proof idea.**", "**In the paper.**")
    missing = [(key, part) for key, text in sections(page).items() for part in parts if part not in text]
    assert missing == []


def test_a_section_without_a_proof_is_noticed() -> None:
    assert "**Proof idea.**" not in sections("## a\n\n**Statement.** 1 = 1.\n")["a"]
