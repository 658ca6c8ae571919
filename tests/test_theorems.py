"""Every theorem that the code cites is stated in docs/theorems.md, and every one stated there is cited by the code."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

import pytest
from citations import Citation, citations, keys_in_text, stated_keys

import partita
from partita import papers, ramps
from partita.methods import METHODS

PACKAGE = Path(partita.__file__).parent
PAGE = PACKAGE.parent / "docs" / "theorems.md"
ABOUT = {f.__name__: f for f in (papers.indicator, papers.reassignment, papers.relu_head, ramps.ramp)}
ABOUT |= {type(m).__name__: type(m) for m in METHODS}


def cited_keys(sources: Iterable[Path]) -> dict[str, list[str]]:
    """Key to the files that cite it."""
    found: dict[str, list[str]] = {}
    for path in sorted(sources):
        for key in keys_in_source(path.read_text(encoding="utf-8")):
            found.setdefault(key, []).append(path.name)
    return found


def keys_in_source(source: str) -> set[str]:
    return {citation.key for citation in citations(source)}


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
    invented = keys_in_source(f'{docstring}\nTerm("x", 1.0, "y", "perpetual-motion")')
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
    assert keys_in_source(source) == keys


def test_a_citation_names_its_owner_and_its_line() -> None:
    docstring = '"""Width times height.\n\n        *Theorem*: `one`,\n        `two`.\n        """'
    source = f'class Box:\n    def area(self):\n        {docstring}\n        return Term("a", 1.0, "f", "three")\n'
    one, two, three = ("one", 5, True), ("two", 6, True), ("three", 8, False)
    assert citations(source) == [
        Citation(key, "Box.area", line, documented) for key, line, documented in (one, three, two)
    ]


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
