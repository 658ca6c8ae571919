"""The page without a server: under a sub-path of a plain file server, with a gallery of ready heads."""

import functools
import http.server
import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import partita as pa
from partita.studio import PAGE
from partita.studio.gallery import PAGE_FUNCTIONS, READY, gallery, write_page

SOME = ("pieces", "ramp", "black-box")
QUICK = "painter=canvas"


class QuietFiles(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_: Any) -> None: ...


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    """The address of the page below a sub-path, and its folder."""
    root = tmp_path_factory.mktemp("site")
    index = write_page(root / "docs" / "studio", SOME)
    assert index.is_file()
    handler = functools.partial(QuietFiles, directory=str(root))
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/docs/studio/", index.parent
    server.shutdown()
    server.server_close()
    thread.join()


def test_the_gallery_says_what_partita_says(site: tuple[str, Path]) -> None:
    heads = {head["name"]: head for head in json.loads((site[1] / "gallery.json").read_text(encoding="utf-8"))["heads"]}
    assert set(heads) == set(SOME)
    c = pa.compile("max(abs(x), max(abs(y), 0.3))", "[-1,1]^2", tolerance=0.01, method="pieces")
    head = heads["pieces"]
    assert (head["keys"], head["bound"], head["kind"]) == (c.num_keys, c.error_bound, "proved")
    points = np.random.default_rng(0).uniform(-1, 1, (200, 2))
    wire = head["head"]
    apart = points[:, None] - np.array(wire["centers"])
    exponents = -0.5 * (apart**2 @ np.array(wire["rates"])) + np.array(wire["biases"])
    weights = np.exp(exponents - exponents.max(axis=1, keepdims=True))
    values = np.array(wire["values"]) + (apart * np.array(wire["slopes"])).sum(axis=2)
    net = (weights * values).sum(axis=1) / weights.sum(axis=1)
    np.testing.assert_allclose(net, np.asarray(c(points)).ravel(), rtol=0, atol=1e-9)
    black = heads["black-box"]
    assert black["kind"] == "proved_given"
    assert any("4" in a["statement"] for a in black["assumptions"])


def test_names_of_the_gallery_are_different() -> None:
    assert len({ready.name for ready in READY}) == len(READY)
    assert gallery(())["heads"] == []


@pytest.mark.slow
def test_the_whole_gallery_is_small(tmp_path: Path) -> None:
    write_page(tmp_path)
    heads = json.loads((tmp_path / "gallery.json").read_text(encoding="utf-8"))["heads"]
    assert [head["name"] for head in heads] == [ready.name for ready in READY]
    assert (tmp_path / "gallery.json").stat().st_size < 250_000
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) < 600_000
    assert all(head["tolerance_met"] for head in heads)
    runge = next(head for head in heads if head["name"] == "runge")

    def f(x: Any) -> Any:
        return 1 / (1 + 25 * x**2)

    x = np.linspace(-1, 1, 20_001)
    needed = next(
        n
        for n in range(30, 120)
        if np.abs(np.polynomial.chebyshev.chebval(x, np.polynomial.chebyshev.chebinterpolate(f, n - 1)) - f(x)).max()
        <= runge["bound"]
    )
    assert 2 * runge["keys"] < needed  # "more than twice as many coefficients"


def test_every_example_of_the_playground_is_stored(site: tuple[str, Path], open_page: Callable[..., Any]) -> None:
    page = open_page(f"{site[0]}?{QUICK}", width=900, height=600)
    examples = page.evaluate("async () => (await import('./playground.js')).EXAMPLES")
    assert {(f, d) for _, f, d in examples} <= set(PAGE_FUNCTIONS)


def test_the_static_page_asks_for_its_own_files_only(
    site: tuple[str, Path], open_page: Callable[..., Any], screenshots: Path
) -> None:
    address, folder = site
    page = open_page(f"{address}?{QUICK}#tab=compile")
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.reload()
    page.wait_for_selector("[data-testid=gallery-ramp]")
    assert "partita studio" in page.inner_text("[data-testid=no-server]")
    for name, title in (("ramp", "min(max(x"), ("pieces", "max(abs(x)"), ("black-box", "abs(sin(4*x))")):
        page.click(f"[data-testid=gallery-{name}]")
        page.wait_for_selector(f"[data-testid=result-title]:has-text('{title}')")
        assert page.get_attribute(f"[data-testid=gallery-{name}]", "aria-pressed") == "true"
        assert page.query_selector("[data-testid=terms] tbody tr")
        assert page.query_selector("[data-testid=result-pictures] canvas, [data-testid=result-pictures] svg")
    page.screenshot(path=screenshots / "static-gallery.png", full_page=True)
    assert not page.query_selector("[data-testid=check]")  # nothing that needs a server
    page.go_back()
    page.wait_for_selector("[data-testid=result-title]:has-text('max(abs(x)')")
    page.click("[data-testid=open-in-playground]")
    for _ in range(200):
        if page.evaluate("() => window.studio.figures().refined"):
            break
        page.wait_for_timeout(50)
    assert len(page.evaluate("() => window.studio.head().centers")) == 5
    page.click("[data-testid=tab-lessons]")
    page.wait_for_selector("[data-testid=lesson-title]")
    names = {path.name for path in folder.iterdir()} | {""}
    assert asked
    for url in asked:
        assert url.startswith(address), url
        assert url.split("#")[0].split("?")[0].removeprefix(address) in names, url


def test_the_page_has_no_address_of_elsewhere() -> None:
    for path in PAGE.iterdir():
        text = path.read_text(encoding="utf-8")
        found = [part for part in text.split("http")[1:] if part.startswith(("://", "s://"))]
        assert all(part.startswith("://www.w3.org/") for part in found), path.name  # the name space of SVG
