"""The checker is small and its own: standard library and python-flint, nothing of the producer."""

from __future__ import annotations

import ast
import io
import sys
import tokenize
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SOURCES = sorted((ROOT / "partita_check").glob("*.py"))
# Of code; docstrings and comments are not counted. Beyond 2,900: networks of heads took 1,150 (reading the wiring, canonical forms,
# intervals, ranges, errors carried through the layers), descent in context 370, heads of two keys 270, shards and merges 360,
# mapped files 30.
MOST_LINES = 5_430


def foreign_imports(source: str) -> list[str]:
    """Imports that are neither the standard library, python-flint nor the checker itself."""
    names = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names += [a.name for a in node.names]
        elif isinstance(node, ast.ImportFrom):
            names.append("." * node.level + (node.module or ""))
    allowed = {*sys.stdlib_module_names, "flint", "partita_check"}
    return [name for name in names if name.split(".")[0] not in allowed]


def unsafe(source: str) -> list[str]:
    calls = [ast.unparse(n.func) for n in ast.walk(ast.parse(source)) if isinstance(n, ast.Call)]
    return [
        c for c in calls if c in ("eval", "exec", "compile", "__import__", "importlib.import_module", "pickle.loads")
    ]


def code_lines(source: str) -> int:
    """Lines that are not blank, comment or docstring."""
    documented: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and ast.get_docstring(node) is not None:
            documented |= set(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
    skipped = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in skipped:
            lines |= set(range(token.start[0], token.end[0] + 1))
    return len(lines - documented)


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: p.name)
def test_nothing_is_shared_with_the_producer(path):
    source = path.read_text()
    assert foreign_imports(source) == [] and unsafe(source) == [] and ast.get_docstring(ast.parse(source))


def test_a_foreign_import_is_noticed():
    for line in ("import torch", "from partita.storage import load_parts", "import numpy as np", "from . import x"):
        assert foreign_imports(line)
    assert unsafe("eval('1')") and not foreign_imports("from flint import arb")


def test_it_stays_small():
    assert code_lines('"""Doc."""\n\n# comment\nx = 1\n') == 1
    assert sum(code_lines(p.read_text()) for p in SOURCES) <= MOST_LINES
