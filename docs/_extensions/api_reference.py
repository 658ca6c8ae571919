"""The API reference, generated from the library itself.

`:::{public} partita.plots` documents everything in the `__all__` of a module, `:::{public} partita: compile plan` some names of it.
`:::{commands}` shows what every command prints with `--help`. Neither repeats anything that the code says.
"""

from __future__ import annotations

import ast
import inspect
import os
import subprocess
import sys
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import typer
from docstrings import to_rst
from docutils import nodes
from docutils.parsers.rst import Directive
from docutils.statemachine import StringList
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment
from sphinx.util.docutils import SphinxDirective
from sphinx.util.nodes import make_refnode

WIDTH = 88  # of the help texts, in characters

HOMES: dict[
    str, str
] = {}  # "partita.compiler.compiled.Compiled" to "partita.Compiled", for everything documented so far


class Public(SphinxDirective):
    """Documents the public names of a module, each with autodoc."""

    required_arguments = 1
    final_argument_whitespace = True

    def run(self) -> list[nodes.Node]:
        module, _, names = self.arguments[0].partition(":")
        home = import_module(module.strip())
        lines = ["```{eval-rst}"]
        for name in names.split() or home.__all__:
            value = getattr(home, name)
            full = f"{home.__name__}.{name}"
            if _home(value) and HOMES.setdefault(_home(value), full) != full:
                continue  # documented under a shorter name
            lines += [f".. auto{_kind(value)}:: {full}", ""]
        holder = nodes.container()
        self.state.nested_parse(StringList([*lines, "```"], source="api"), self.content_offset, holder)  # type: ignore[arg-type]
        return holder.children


def _home(value: Any) -> str:
    """Where a class or function is defined; empty for data."""
    return f"{value.__module__}.{value.__qualname__}" if hasattr(value, "__qualname__") else ""


def _kind(value: Any) -> str:
    if inspect.isclass(value):
        return "exception" if issubclass(value, BaseException) else "class"
    return "function" if callable(value) else "data"


class Commands(SphinxDirective):
    """One section per command, with its `--help`."""

    def run(self) -> list[nodes.Node]:
        found: list[nodes.Node] = []
        for name, text in help_texts().items():
            section = nodes.section(ids=[nodes.make_id(name)], names=[name])
            section += nodes.title(name, "", nodes.literal(name, name))
            section += nodes.literal_block(text, text, language="text", classes=["help"])
            self.state.document.note_explicit_target(section)
            found.append(section)
        return found


@cache
def help_texts() -> dict[str, str]:
    """`partita …` to what it prints with `--help`; `partita-check` runs in a process of its own, as it shares no code."""
    from partita.cli import app

    group: Any = typer.main.get_command(app)
    texts = {"partita": _help(group, "partita", None)}
    parent = group.context_class(group, info_name="partita")
    for name in group.list_commands(parent):
        texts[f"partita {name}"] = _help(group.get_command(parent, name), name, parent)
    check = [sys.executable, "-m", "partita_check", "--help"]
    printed = subprocess.run(
        check, capture_output=True, text=True, check=True, env={**os.environ, "COLUMNS": str(WIDTH)}
    )
    return {**texts, "partita-check": printed.stdout.rstrip()}


def _help(command: Any, name: str, parent: Any) -> str:
    context = command.context_class(
        command, info_name=name, parent=parent, max_content_width=WIDTH, terminal_width=WIDTH
    )
    return str(command.get_help(context)).rstrip()


def rewrite_docstring(app: Sphinx, what: str, name: str, value: Any, options: Any, lines: list[str]) -> None:
    """Docstrings as reStructuredText."""
    text = "\n".join(lines)
    try:
        lines[:] = to_rst(text).split("\n")
    except ValueError as error:
        raise ValueError(f"the docstring of {name}: {error}") from error


def skip_deprecated(app: Sphinx, what: str, name: str, value: Any, skip: bool, options: Any) -> bool | None:
    """Leaves out old names of members, and fields of named tuples without a text of their own."""
    text = getattr(value, "__doc__", None) or ""
    return True if text.startswith(("Deprecated: use", "Alias for field number")) else None


@cache
def definitions(path: Path) -> dict[str, int]:
    """The classes, functions and methods of a file, and the lines they begin on."""
    found: dict[str, int] = {}

    def visit(node: ast.AST, prefix: str) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                found.setdefault(prefix + child.name, child.lineno)
                visit(child, f"{prefix}{child.name}.")
            elif isinstance(child, ast.If | ast.Try):
                visit(child, prefix)

    visit(ast.parse(path.read_text(encoding="utf-8")), "")
    return found


def source_of(module: str, fullname: str) -> tuple[str, int] | None:
    """The module and the line where a documented object is defined; None for what has no place of its own."""
    name, _, member = fullname.partition(".")
    value = inspect.unwrap(getattr(import_module(module), name))
    home, qualified = getattr(value, "__module__", None), getattr(value, "__qualname__", None)
    if home is None or qualified is None or not home.startswith("partita"):
        return None
    path = inspect.getsourcefile(import_module(home))
    line = definitions(Path(path)).get(f"{qualified}.{member}" if member else qualified) if path else None
    return None if line is None else (home, line)


def linkcode_resolve(domain: str, info: dict[str, str]) -> str | None:
    """For sphinx.ext.linkcode. The API pages lie one folder deep."""
    found = source_of(info["module"], info["fullname"]) if domain == "py" and info["module"] else None
    return f"../{source_page(found[0])}.html#L{found[1]}" if found else None


def source_page(module: str) -> str:
    """The page of a module's source, without its ending."""
    return f"_source/{module}"


def find_type(app: Sphinx, env: BuildEnvironment, node: Any, contnode: Any) -> nodes.reference | None:
    """Types in signatures are written with their home, `partita.compiler.compiled.Compiled`: link to where they are documented."""
    if node.get("refdomain") != "py" or app.builder.format != "html":
        return None
    objects = env.domains.python_domain.objects
    if len(_CLASSES) == 0:
        for name in sorted(objects, reverse=True):
            if objects[name].objtype in ("class", "exception"):
                _CLASSES[name.rpartition(".")[2]] = name
    target = node["reftarget"]
    name = HOMES.get(target, _CLASSES.get(target.rpartition(".")[2], ""))
    if name not in objects:
        return None
    found = objects[name]
    return make_refnode(app.builder, node["refdoc"], found.docname, found.node_id, contnode, name)


_CLASSES: dict[str, str] = {}  # the last part of a class's name to the whole of it; filled when the first link is made


def remember(app: Sphinx) -> None:
    """What earlier builds documented: pages that have not changed are not read again."""
    _CLASSES.clear()
    HOMES.update(getattr(app.env, "partita_homes", {}))


def keep(app: Sphinx, env: BuildEnvironment) -> list[str]:
    env.partita_homes = dict(HOMES)  # type: ignore[attr-defined]
    return []


def setup(app: Sphinx) -> dict[str, Any]:
    directives: dict[str, type[Directive]] = {"public": Public, "commands": Commands}
    for name, directive in directives.items():
        app.add_directive(name, directive)
    app.connect("autodoc-process-docstring", rewrite_docstring)
    app.connect("autodoc-skip-member", skip_deprecated)
    app.connect("missing-reference", find_type)
    app.connect("builder-inited", remember)
    app.connect("env-updated", keep)
    return {"parallel_read_safe": False, "parallel_write_safe": True}
