"""Theorems and code, linked both ways, and the pages of source that the links lead to.

- A docstring's `*Theorem*: key` leads to the section (the role `theorem`); so does every key in a page of source.
- Every section of theorems.md ends with the code that cites it: the API reference where it is public, the source otherwise.
- In prose, code such as `pa.compile`, `Compiled.save` or `grid-moments` leads to what it names.

The pages of source are written here and not by sphinx.ext.viewcode, which shows only modules with documented objects.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from html import escape
from pathlib import Path
from typing import Any

from api_reference import HOMES, source_page
from citations import Citation, citations, modules, stated_keys
from docutils import nodes
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import PythonLexer
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment
from sphinx.util.nodes import make_refnode

import partita

PACKAGE = Path(partita.__file__).parent
PAGE = "theorems"


@cache
def sources() -> dict[str, tuple[str, list[Citation]]]:
    """Every module: its text, and the theorems it cites."""
    texts = {name: path.read_text(encoding="utf-8") for name, path in modules(PACKAGE)}
    return {name: (text, citations(text)) for name, text in texts.items()}


@cache
def theorems(folder: str) -> frozenset[str]:
    """The keys that theorems.md states."""
    return frozenset(stated_keys((Path(folder) / f"{PAGE}.md").read_text(encoding="utf-8")))


def theorem_role(
    name: str, raw: str, text: str, line: int, inliner: Any, options: Any = None, content: Any = ()
) -> Any:
    """`:theorem:` + key: a link to its section; a key that is not stated is an error of the build."""
    env = inliner.document.settings.env
    if text not in theorems(env.srcdir.__fspath__()):
        problem = inliner.reporter.error(
            f"no theorem is called {text!r}; {PAGE}.md has one section per key.", line=line
        )
        return [inliner.problematic(raw, raw, problem)], [problem]
    return [_theorem(env.app.builder, env.docname, text)], []


def _theorem(builder: Any, docname: str, key: str) -> nodes.reference:
    return make_refnode(builder, docname, PAGE, key, nodes.literal(key, key, classes=["theorem"]), f"Theorem {key}")


def link_pages(app: Sphinx, doctree: nodes.document, docname: str) -> None:
    """Code in prose becomes links; sections of theorems.md get the list of the code that cites them."""
    if app.builder.format != "html":
        return
    keys = theorems(str(app.srcdir))
    known = _documented(app.env)
    for literal in list(doctree.findall(nodes.literal)):
        if not _is_prose(literal):
            continue
        text = literal.astext()
        if "-" in text and text in keys:
            literal.replace_self(_theorem(app.builder, docname, text))
        elif name := known.get(re.sub(r"\((?:…|\.\.\.)?\)$", "", text)):
            found = app.env.domains.python_domain.objects[name]
            link = make_refnode(app.builder, docname, found.docname, found.node_id, literal.deepcopy(), name)
            literal.replace_self(link)
    if docname == PAGE:
        for section in doctree.findall(nodes.section):
            if section["ids"][0] in keys:
                section += _cited_by(app, section["ids"][0])


def _is_prose(node: nodes.Node) -> bool:
    """Not in a title, a link or a signature."""
    while node.parent is not None:
        node = node.parent
        if isinstance(node, nodes.title | nodes.reference | nodes.TextElement) and not isinstance(node, _PROSE):
            return False
    return True


_PROSE = (nodes.paragraph, nodes.term, nodes.emphasis, nodes.strong, nodes.caption)


def _documented(env: BuildEnvironment) -> dict[str, str]:
    """How prose names documented objects: `pa.x` and `partita.x`, and the plain name of a class or of its member."""
    found: dict[str, str] = {}
    for name in env.domains.python_domain.objects:
        short = name.removeprefix("partita.")
        parts = name.split(".")
        first = next((i for i, part in enumerate(parts) if part[:1].isupper()), None)
        plain = ".".join(parts[first:]) if first is not None else None
        for alias in (
            name,
            f"pa.{short}",
            f"pa.{short}".replace("pa.inspection.", "pa.inspect.").replace("pa.compiler.in_context.", "pa.in_context."),
        ):
            found.setdefault(alias, name)
        if plain is not None and (plain not in found or name.count(".") < found[plain].count(".")):
            found[plain] = name
    return found


def _cited_by(app: Sphinx, key: str) -> nodes.container:
    """The list of code that cites a theorem: public objects first, then the rest, each once."""
    objects = app.env.domains.python_domain.objects
    public: dict[str, nodes.Node] = {}
    other: dict[str, nodes.Node] = {}
    for module, (_, cited) in sources().items():
        for citation in cited:
            if citation.key != key:
                continue
            name = f"{module}.{citation.owner}".rstrip(".")
            documented = _public_name(name) if citation.in_docstring else None
            if documented in objects:
                found = objects[documented]
                node = nodes.literal(documented, documented)
                public[documented] = make_refnode(app.builder, PAGE, found.docname, found.node_id, node, documented)
            else:
                address = f"{source_page(module)}.html#L{citation.line}"
                text = name.removeprefix("partita.")
                node = nodes.literal(text, text)
                other.setdefault(text, nodes.reference("", "", node, refuri=address, internal=True))
    links = [*(public[name] for name in sorted(public)), *(other[name] for name in sorted(other))]
    paragraph = nodes.paragraph("", "", nodes.strong("In the code.", "In the code."), nodes.Text(" "))
    for i, link in enumerate(links):
        if i:
            paragraph += nodes.Text(", ")
        paragraph += link
    return nodes.container("", paragraph, classes=["cited-by"])


def _public_name(name: str) -> str | None:
    """The name under which an object that lives at `name` is documented."""
    parts = name.split(".")
    for end in range(len(parts), 1, -1):
        if home := HOMES.get(".".join(parts[:end])):
            return ".".join([home, *parts[end:]])
    return None


def source_pages(app: Sphinx) -> Iterator[tuple[str, dict[str, Any], str]]:
    """One page per module that is documented or cites a theorem."""
    if app.builder.format != "html":
        return
    homes = {".".join(name.split(".")[:i]) for name in HOMES for i in range(2, name.count(".") + 1)}
    for module, (text, cited) in sources().items():
        if cited or module in homes:
            title = escape(module)
            body = f"<h1>{title}</h1>\n<p>The source of <code>{title}</code>, version {app.config.release}.</p>\n"
            body += f'<div class="highlight source"><pre>{_numbered(text, cited)}</pre></div>'
            yield source_page(module), {"title": module, "body": body, "parents": []}, "page.html"


def _numbered(text: str, cited: list[Citation]) -> str:
    """Highlighted lines with an anchor each, and the keys of theorems as links."""
    lines = str(highlight(text, PythonLexer(stripnl=False), HtmlFormatter(nowrap=True))).split("\n")
    for citation in cited:
        link = f'<a class="theorem" href="../{PAGE}.html#{citation.key}">{citation.key}</a>'
        pattern = rf"(?<![\w#>-]){re.escape(citation.key)}(?![\w<-])"
        lines[citation.line - 1] = re.sub(pattern, link, lines[citation.line - 1], count=1)
    width = len(str(len(lines)))
    number = '<span id="L{0}"><a class="line" href="#L{0}">{1}</a>{2}</span>'
    return "\n".join(number.format(i, str(i).rjust(width), line) for i, line in enumerate(lines, 1))


def share_navigation(app: Sphinx, pagename: str, templatename: str, context: dict[str, Any], doctree: Any) -> None:
    """The pages of source lie in one folder and are not in the tree themselves, so one tree serves them all. Making it is slow."""
    if pagename.startswith("_source/"):
        make = context["toctree"]
        context["toctree"] = lambda **options: _shared(make, tuple(sorted(options.items())))


_SHARED: dict[Any, str] = {}


def _shared(make: Any, options: tuple[Any, ...]) -> str:
    if options not in _SHARED:
        _SHARED[options] = make(**dict(options))
    return _SHARED[options]


def outdated(app: Sphinx, env: BuildEnvironment, *_: Any) -> list[str]:
    """The page of theorems depends on all the code."""
    return [PAGE]


def setup(app: Sphinx) -> dict[str, Any]:
    app.add_role("theorem", theorem_role)
    app.connect("doctree-resolved", link_pages)
    app.connect("html-collect-pages", source_pages)
    app.connect("html-page-context", share_navigation, priority=100)
    app.connect("builder-inited", lambda app: _SHARED.clear())
    app.connect("env-get-outdated", outdated)
    return {"parallel_read_safe": False, "parallel_write_safe": True}
