"""Which code cites which theorem: the keys in docstrings (`*Theorem*: …`) and in the terms of certificates.

tests/test_theorems.py compares them with the sections of theorems.md; the site links both ways.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

__all__ = ["CITATION", "KEY", "Citation", "citations", "keys_in_text", "modules", "stated_keys"]

KEY = re.compile(r"`([a-z][a-z0-9]*(?:-[a-z0-9]+)*)`")
CITATION = re.compile(
    rf"\*Theorem\*:\s*((?:{KEY.pattern}(?:\s*\([^`)]*\))?(?:,|;| and)?\s*(?:in L_p\s+)?)+)",
)

_Documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True, order=True)
class Citation:
    """One place that cites a theorem.

    Attributes:
        key: the theorem's key.
        owner: the function, method or class it stands in, `Compiled.with_sharpness`; empty at the top of a module.
        line: its line in the file, from 1.
        in_docstring: whether the owner's docstring cites it, and not only its code.
    """

    key: str
    owner: str
    line: int
    in_docstring: bool


def keys_in_text(text: str) -> set[str]:
    """The keys of every `*Theorem*: …` list in a docstring."""
    return {key for match in CITATION.finditer(text) for key in KEY.findall(match.group(1))}


def stated_keys(page: str) -> list[str]:
    """The `## key` headings, in order."""
    return re.findall(r"^## (\S+)\s*$", page, flags=re.MULTILINE)


def citations(source: str) -> list[Citation]:
    """Every citation in the text of a module: keys in docstrings, keys passed as `theorem=…`, assigned to a name `theorem`,
    or given as the fourth argument of a Term."""
    if re.search(r"[Tt]heorem|Term\(", source) is None:
        return []  # most modules; reading them takes a while
    lines = source.splitlines()
    return sorted(set(_found(ast.parse(source), "", lines)))


def _found(node: ast.AST, owner: str, lines: list[str]) -> Iterator[Citation]:
    if isinstance(node, _Documented):
        if not isinstance(node, ast.Module):
            owner = f"{owner}.{node.name}" if owner else node.name
        for key in keys_in_text(ast.get_docstring(node) or ""):
            yield Citation(key, owner, _line(key, node.body[0], lines), True)
    for value in _theorems(node):
        for key in _strings(value):
            yield Citation(key, owner, value.lineno, False)
    for child in ast.iter_child_nodes(node):
        yield from _found(child, owner, lines)


def _line(key: str, docstring: ast.stmt, lines: list[str]) -> int:
    """The line of a docstring on which the key is cited: the first one with the key at or after `*Theorem*`."""
    numbers = range(docstring.lineno, (docstring.end_lineno or docstring.lineno) + 1)
    cited = next(n for n in numbers if "*Theorem*" in lines[n - 1])
    return next((n for n in numbers if n >= cited and f"`{key}`" in lines[n - 1]), cited)


def _theorems(node: ast.AST) -> Iterable[ast.expr]:
    """The expressions of a node that name a theorem."""
    if isinstance(node, ast.keyword) and node.arg == "theorem":
        return [node.value]
    if isinstance(node, ast.Assign) and len(node.targets) == 1:
        target = node.targets[0]
        return [node.value] if isinstance(target, ast.Name) and target.id == "theorem" else []
    if isinstance(node, ast.Call) and len(node.args) > 3:
        called = node.func.id if isinstance(node.func, ast.Name) else getattr(node.func, "attr", "")
        return [node.args[3]] if called == "Term" else []
    return []


def _strings(node: ast.expr) -> set[str]:
    """String constants that an expression may evaluate to: a literal, or either arm of a conditional."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return {node.value}
    return _strings(node.body) | _strings(node.orelse) if isinstance(node, ast.IfExp) else set()


def modules(package: Path) -> Iterator[tuple[str, Path]]:
    """The dotted name and the file of every module of a package."""
    for path in sorted(package.rglob("*.py")):
        parts = path.relative_to(package.parent).with_suffix("").parts
        yield ".".join(parts[:-1] if parts[-1] == "__init__" else parts), path
