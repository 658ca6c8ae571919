"""The site builds without a warning, all its links lead somewhere, nothing on it comes from outside, and search works offline.

One build, without running the notebooks, serves all tests of this file; `make docs` runs them.
"""

from __future__ import annotations

import html
import inspect
import json
import os
import posixpath
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from html.parser import HTMLParser
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from urllib.parse import unquote, urlsplit

import pytest
from citations import citations, stated_keys
from typer.testing import CliRunner

import partita
from partita.cli import COMMANDS, app

pytest.importorskip("sphinx")
pytest.importorskip("myst_nb")

from docstrings import inline, to_rst
from docutils import nodes

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
ROOMS = ("distributed", "errors", "inspection", "learn", "compiler.in_context", "papers", "plots", "proofs", "ramps")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")

_ASSETS = {
    "script": "src",
    "img": "src",
    "iframe": "src",
    "source": "src",
    "audio": "src",
    "video": "src",
    "object": "data",
    "embed": "src",
}
_CSS_ADDRESS = re.compile(r"""(?:url\(\s*|@import\s+)["']?([^"')\s]+)""")


@dataclass
class Page(HTMLParser):
    """The anchors, links and assets of a page."""

    text: str
    ids: set[str] = field(default_factory=set)
    links: list[str] = field(default_factory=list)
    assets: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()
        self.feed(self.text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        found = {name: value or "" for name, value in attributes}
        self.ids |= {found[name] for name in ("id", "name") if name in found}
        if tag == "a" and "href" in found:
            self.links.append(found["href"])
        elif tag == "link" and found.get("rel") not in ("index", "search", "next", "prev", "canonical"):
            self.assets.append(found.get("href", ""))
        elif tag in _ASSETS and found.get(_ASSETS[tag]):
            self.assets.append(found[_ASSETS[tag]])
        self.assets += _CSS_ADDRESS.findall(found.get("style", ""))
        self.assets += [part.split()[0] for part in found.get("srcset", "").split(",") if part.split()]


@dataclass(frozen=True)
class Site:
    """A folder of built pages, by their path in it."""

    folder: Path
    printed: str
    pages: dict[str, Page]


def read_site(folder: Path, printed: str = "") -> Site:
    paths = sorted(folder.rglob("*.html"))
    return Site(folder, printed, {p.relative_to(folder).as_posix(): Page(p.read_text(encoding="utf-8")) for p in paths})


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Site:
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "-b", "html", "-D", "nb_execution_mode=off"]
    command += ["-D", "studio_heads=smooth"]  # one ready head is enough here
    command += ["-d", str(folder / "doctrees"), str(DOCS), str(folder / "html")]
    run = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": _path()})
    assert run.returncode == 0, run.stdout + run.stderr
    return read_site(folder / "html", run.stdout + run.stderr)


def _path() -> str:
    given = os.environ.get("PYTHONPATH")
    return os.pathsep.join([str(ROOT), str(ROOT / "checker"), *([given] if given else [])])


def sources() -> Iterator[str]:
    """The pages of docs/, without their endings."""
    for path in sorted([*DOCS.rglob("*.md"), *DOCS.rglob("*.ipynb")]):
        name = path.relative_to(DOCS)
        if not any(part.startswith((".", "_")) for part in name.parts):
            yield name.with_suffix("").as_posix()


def is_external(address: str) -> bool:
    return bool(urlsplit(address).netloc) or urlsplit(address).scheme not in ("", "data")


def broken_links(site: Site) -> list[str]:
    """Links and assets of the site's own that lead nowhere."""
    files = {p.relative_to(site.folder).as_posix() for p in site.folder.rglob("*") if p.is_file()}
    broken = []
    for name, page in site.pages.items():
        for address in {*page.links, *page.assets}:
            parts = urlsplit(address)
            if parts.scheme or parts.netloc:
                continue
            target = (
                posixpath.normpath(posixpath.join(posixpath.dirname(name), unquote(parts.path))) if parts.path else name
            )
            anchored = (
                parts.fragment and target in site.pages and target != "studio/index.html"
            )  # the studio's state is there
            if target not in files or (anchored and unquote(parts.fragment) not in site.pages[target].ids):
                broken.append(f"{name}: {address}")
    return broken


def foreign_assets(site: Site) -> list[str]:
    """What a browser would fetch from elsewhere: scripts, styles, pictures, frames, and addresses in style sheets."""
    found = [f"{name}: {a}" for name, page in site.pages.items() for a in page.assets if is_external(a)]
    for path in sorted(site.folder.rglob("*.css")):
        addresses = _CSS_ADDRESS.findall(path.read_text(encoding="utf-8"))
        found += [f"{path.name}: {a}" for a in addresses if is_external(a)]
    return found


def sections(page: str) -> dict[str, str]:
    """The HTML of every section of a page by its id, up to the next section."""
    parts = re.split(r'<section [^>]*?id="([^"]+)"[^>]*>', page)
    return dict(zip(parts[1::2], parts[2::2]))


def unlinked_theorems(site: Site) -> set[str]:
    """Theorems whose section does not lead to code that cites them, or whose citing code does not lead to the section."""
    stated = sections(site.pages["theorems.html"].text)
    wrong = set()
    for key in stated_keys((DOCS / "theorems.md").read_text(encoding="utf-8")):
        cited_by = re.findall(r'<div class="[^"]*cited-by.*?</div>', stated.get(key, ""), flags=re.DOTALL)
        links = re.findall(r'href="([^"#]+)#([^"]+)"', "".join(cited_by))
        back = [_leads_back(site, page, anchor, key) for page, anchor in links]
        if not links or not all(back):
            wrong.add(key)
    return wrong


def _leads_back(site: Site, page: str, anchor: str, key: str) -> bool:
    """Whether the documented object, or the line of source, has a link to the theorem."""
    found = site.pages.get(page)
    if found is None or anchor not in found.ids:
        return False
    text = found.text.split(f'id="{anchor}"', 1)[1]
    text = text.split("\n" if page.startswith("_source/") else '<dt class="sig', 1)[0]  # the line, or the docstring
    return f'theorems.html#{key}"' in text


@cache
def citing_modules() -> dict[str, set[str]]:
    """The source page of every module that cites theorems, and their keys."""
    package = Path(partita.__file__).parent
    found = {}
    for path in package.rglob("*.py"):
        parts = path.relative_to(package.parent).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        if keys := {c.key for c in citations(path.read_text(encoding="utf-8"))}:
            found[f"_source/{name}.html"] = keys
    return found


def public_names() -> Iterator[str]:
    for name in partita.__all__:
        if not inspect.ismodule(getattr(partita, name)):
            yield f"partita.{name}"
    known = {id(getattr(partita, name)) for name in partita.__all__}
    for room in ROOMS:
        home = import_module(f"partita.{room}")
        yield from (f"partita.{room}.{name}" for name in home.__all__ if id(getattr(home, name)) not in known)


def test_the_build_prints_no_warning(site: Site) -> None:
    assert site.printed == ""


def test_every_page_is_in_the_sidebar(site: Site) -> None:
    listed = {(site.folder / a).resolve() for a in _sidebar(site.pages["index.html"].text)}
    missing = [name for name in sources() if name != "index" and (site.folder / f"{name}.html").resolve() not in listed]
    assert missing == []
    assert len(list(sources())) > 35


def _sidebar(page: str) -> list[str]:
    tree = page.split('class="sidebar-tree"')[1].split("</aside>")[0]
    return [unquote(urlsplit(address).path) for address in re.findall(r'href="([^"]+)"', tree)]


def test_all_links_and_anchors_lead_somewhere(site: Site) -> None:
    assert broken_links(site) == []
    assert sum(len(page.links) for page in site.pages.values()) > 5000


def test_nothing_is_loaded_from_outside(site: Site) -> None:
    assert foreign_assets(site) == []
    scripts = [p for p in site.folder.rglob("*.js") if "mathjax" in p.name.lower() or "require" in p.name.lower()]
    assert scripts == []


def test_broken_links_and_foreign_assets_are_noticed(tmp_path: Path) -> None:
    (tmp_path / "a.html").write_text(
        '<p id="here"><a href="#here">good</a><a href="#there">bad</a><a href="b.html">bad</a><a href="https://x.org/">out</a>'
        '<script src="//cdn.org/x.js"></script><img src="https://x.org/y.png"><img src="data:image/png;base64,AA">'
        '<div style="background: url(http://x.org/z.png)"></div>'
    )
    (tmp_path / "s.css").write_text('@import "https://fonts.org/f.css"; a { background: url("data:image/svg+xml,x") }')
    site = read_site(tmp_path)
    assert sorted(broken_links(site)) == ["a.html: #there", "a.html: b.html"]
    assert [found.split(": ")[1] for found in foreign_assets(site)] == [
        "//cdn.org/x.js", "https://x.org/y.png", "http://x.org/z.png", "https://fonts.org/f.css",
    ]  # fmt: skip


def test_theorems_and_code_are_linked_both_ways(site: Site) -> None:
    assert unlinked_theorems(site) == set()
    modules = citing_modules()
    assert len(modules) > 40
    for name, keys in modules.items():
        assert {key for key in keys if f'theorems.html#{key}"' not in site.pages[name].text} == set(), name


def test_a_theorem_without_links_is_noticed(site: Site) -> None:
    def without(name: str, text: str) -> Site:
        page = site.pages[name]
        assert text in page.text
        return Site(site.folder, "", {**site.pages, name: Page(page.text.replace(text, ""))})

    assert unlinked_theorems(without("theorems.html", 'href="_source/partita.proofs.weight_series.html#L42"')) == {
        "weight-series"
    }
    assert "max-affine-partition" in unlinked_theorems(
        without("api/partitions.html", 'theorems.html#max-affine-partition"')
    )


def test_every_public_name_is_documented(site: Site) -> None:
    text = "".join(page.text for name, page in site.pages.items() if name.startswith("api/"))
    names = list(public_names())
    assert len(names) > 100
    assert [name for name in names if f'id="{name}"' not in text] == []
    assert 'id="partita.fly"' not in text
    assert (
        re.search(r"~~~|\*Theorem\*|:param |:theorem:|<cite>|system-message", text) is None
    )  # markup that was not understood


def test_examples_and_arguments_are_shown(site: Site) -> None:
    text = site.pages["api/compile.html"].text
    entry = text.split('id="partita.compile"')[1].split('id="partita.plan"')[0]
    plain = re.sub(r"<[^>]+>", "", entry)
    assert "highlight-pycon" in entry and ">>> c.certificate.kind" in plain.replace("&gt;", ">")
    for argument in inspect.signature(partita.compile).parameters:
        assert re.search(rf"<strong>{argument}</strong>", entry), argument
    assert 'href="../_source/partita.compiler.compile.html#L' in entry
    assert 'href="#partita.Compiled"' in entry


@pytest.mark.parametrize("name", ["", *COMMANDS])
def test_the_help_of_every_command_is_what_it_prints(site: Site, name: str) -> None:
    full = f"partita {name}".strip()
    section = sections(site.pages["api/command-line.html"].text)[full.replace(" ", "-")]
    shown = html.unescape(re.sub(r"<[^>]+>", "", section.split("<pre>")[1].split("</pre>")[0]))
    printed = CliRunner().invoke(app, [*([name] if name else []), "--help"], prog_name="partita").stdout
    assert re.sub(r"[\s-]+", "", shown) == re.sub(r"[\s-]+", "", printed)  # the width differs


def test_code_in_prose_leads_to_the_reference(site: Site) -> None:
    assert 'href="api/compile.html#partita.compile"' in site.pages["methods.html"].text
    assert 'href="api/partitions.html#partita.geometry.Partition.margin"' in site.pages["theorems.html"].text
    assert 'href="theorems.html#box-bisection"' in site.pages["certificates.html"].text


def test_formulas_need_no_script() -> None:
    offline = import_module("offline")

    page = SimpleNamespace(body=[])
    with pytest.raises(nodes.SkipNode):
        offline.inline_formula(page, nodes.math("", r"e^{-R\Delta} \le \varepsilon"))
    (mathml,) = page.body
    assert mathml.startswith("<math") and "<msup>" in mathml and "ε" in mathml


def test_the_search_index_holds_the_words_of_the_pages(site: Site) -> None:
    index = json.loads(
        (site.folder / "searchindex.js").read_text(encoding="utf-8").removeprefix("Search.setIndex(").rstrip(");\n")
    )
    pages = index["docnames"]

    def found(word: str) -> set[str]:
        places = index["terms"].get(word, [])
        return {pages[i] for i in (places if isinstance(places, list) else [places])}

    assert "theorems" in found("leak") and "certificates" in found("outward")
    assert found("perpetuummobile") == set()
    assert set(pages) == set(sources())


def _browser() -> object:
    sync_api = pytest.importorskip("playwright.sync_api")
    if CHROMIUM is None:
        pytest.skip("chromium is not installed; on Debian: apt-get install chromium")
    return sync_api.sync_playwright()


def test_search_and_pages_work_from_the_folder(site: Site) -> None:
    """Opened as files, as someone does who has no server: nothing is asked of the network."""
    with _browser() as playwright:  # type: ignore[attr-defined]
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 390, "height": 844})
        asked: list[str] = []
        page.on("request", lambda request: asked.append(request.url))
        page.goto(f"{site.folder.as_uri()}/search.html?q=power+diagram")
        page.wait_for_selector("#search-results li a", timeout=20_000)
        results = page.locator("#search-results li a").all_inner_texts()
        for name in ("index.html", "theorems.html", "api/compile.html", "benchmarks.html"):
            page.goto(f"{site.folder.as_uri()}/{name}", wait_until="load")
            assert page.evaluate("document.documentElement.scrollWidth") <= 390, f"{name} is wider than a phone"
        browser.close()
    assert any("Theorems" in text or "PowerDiagram" in text for text in results)
    assert [url for url in asked if not url.startswith(("file:", "data:"))] == []


def test_the_studio_stands_in_its_page(site: Site) -> None:
    page = site.pages["studio.html"]
    assert "studio/index.html" in page.assets and "studio/index.html" in page.links
    heads = json.loads((site.folder / "studio/gallery.json").read_text(encoding="utf-8"))["heads"]
    assert [head["name"] for head in heads] == ["smooth"]


@pytest.mark.parametrize(
    ("docstring", "rst"),
    [
        ("`|f − g| ≤ ε` for x_0 and *all* y.", "``|f − g| ≤ ε`` for x\\_0 and *all* y."),
        ("a * b | c", "a \\* b \\| c"),
        ("`x`s and (`y`)", "``x``\\ s and (\\ ``y``\\ )"),
        ("*Theorem*: `grid-moments`, `regions`.", "*Theorem*\\ : :theorem:`grid-moments`\\ , :theorem:`regions`\\ ."),
        ("the theorem of `somebody`", "the theorem of ``somebody``"),
    ],
)
def test_docstrings_become_text_and_code(docstring: str, rst: str) -> None:
    assert inline(docstring) == rst


def test_sections_and_examples_of_docstrings() -> None:
    text = "One line.\n\nArgs:\n    x: the `point`,\n        twice.\n    y, z: more.\n\nReturns:\n    A `Box`: it.\n\n"
    text += "Raises:\n    DomainError: no.\n\n>>> 1 + 1\n2\n>>> for i in ():\n...     pass\n"
    rst = to_rst(text)
    assert ":param x: the ``point``\\ ,\n    twice.\n:param y, z: more." in rst
    assert ":returns: A ``Box``\\ : it." in rst and ":raises DomainError: no." in rst
    assert ".. code-block:: pycon\n\n    >>> 1 + 1\n    2\n    >>> for i in ():\n    ...     pass" in rst
    with pytest.raises(ValueError, match="not an entry"):
        to_rst("Args:\n    x: one\n    not an entry\n")
