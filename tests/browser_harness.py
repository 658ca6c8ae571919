"""A real browser on a real server, for the tests of the studio; conftest.py makes these fixtures known to every test.

    browser          one chromium for the whole process, with WebGL2 in software
    studio_server    `partita studio` in a process of its own, one per test file; `.address` is the line that it printed
    static_page      the page's files alone, as in the documentation, with a gallery.json of some functions; `.address`
    open_page        open_page(address, ...) -> a page whose console errors, failures and requests are collected; after the
                     test none of them may have been an error, and no request may have gone to another host
    screenshots      a folder for pictures: PARTITA_SCREENSHOTS where it is set, otherwise a temporary one
Where chromium or Playwright is missing these tests are skipped, with the command that installs it.
"""

from __future__ import annotations

import http.server
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from partita.functions import parse
from partita.functions.graph import Graph
from partita.functions.limits import LogLimit, Quotient

PAGE = Path(__file__).parent.parent / "partita" / "studio" / "page"
INSTALL = "install chromium (Debian: apt-get install chromium) and pip install 'partita[dev]' for playwright"
_ARGUMENTS = ["--no-sandbox", "--use-gl=angle", "--use-angle=swiftshader", "--enable-unsafe-swiftshader"]
_CSP = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_TYPES = {".html": "text/html", ".js": "text/javascript", ".css": "text/css", ".json": "application/json"}


@cache
def chromium() -> str | None:
    """The path of Debian's chromium or of Chrome, or None."""
    return next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    sync_api = pytest.importorskip("playwright.sync_api", reason=INSTALL)
    if chromium() is None:
        pytest.skip(f"no chromium found; {INSTALL}")
    with sync_api.sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=chromium(), args=_ARGUMENTS)
        yield started
        started.close()


class StudioServer:
    """`partita studio --no-browser` in a process of its own."""

    def __init__(self, port: int = 0) -> None:
        command = [sys.executable, "-m", "partita", "studio", "--no-browser", "--port", str(port)]
        root = str(PAGE.parents[2])
        paths = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
        environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment
        )
        assert self.process.stdout is not None
        self.address = self.process.stdout.readline().strip()
        if not self.address.startswith("http://127.0.0.1:"):
            self.stop()
            raise AssertionError(f"partita studio printed {self.address!r}, expected its address")
        self.port = urlsplit(self.address).port

    def stop(self, *, kill: bool = False) -> int:
        """End the process, by Ctrl-C's signal or by force; returns its exit status."""
        if self.process.poll() is None:
            self.process.kill() if kill else self.process.terminate()
        status = self.process.wait(timeout=20)
        if self.process.stdout:
            self.process.stdout.close()
        return status


@pytest.fixture(scope="module")
def studio_server(browser: Any) -> Iterator[StudioServer]:  # the browser first: without one nothing is started
    pytest.importorskip("fastapi", reason="pip install 'partita[studio]'")
    server = StudioServer()
    yield server
    server.stop()


def wire_graph(graph: Graph) -> dict[str, Any]:
    """A graph as the server sends it: `to_json` and the values at removable singularities."""
    found = []
    for node, limit in graph.limits.items():
        if isinstance(limit, Quotient):
            at_zero = 2 / 3.141592653589793**0.5 if limit.function == "erf" else 1.0
            found.append([node, limit.base, (float(limit.ratio) * at_zero).hex()])
        elif isinstance(limit, LogLimit):
            found.append([node, limit.argument, (0.0).hex()])
    return {**graph.to_json(), "limits": found}


def stored_function(text: str, domain: str, lo: Sequence[float], hi: Sequence[float]) -> dict[str, Any]:
    """A function as gallery.json stores it."""
    names = [f"x{i}" for i in range(len(lo))]
    graph = parse(text, names, dict(zip("xyz", names, strict=False)))
    box = {"lo": list(lo), "hi": list(hi)}
    about = {"label": text, "box": box, "dimension": len(lo), "outputs": len(graph.outputs)}
    return {"text": text, "domain": domain, "graph": wire_graph(graph), **about}


EXAMPLES = [
    ("sin(3*x) + x*cos(2*y)", "[-1,1]^2", [-1, -1], [1, 1]),
    ("exp(-4*(x^2 + y^2))", "[-1,1]^2", [-1, -1], [1, 1]),
    ("sin(3*x)", "[-1,1]", [-1], [1]),
]


class StaticPage:
    """The page's files on a port of 127.0.0.1, with the headers of the studio's server and a gallery.json."""

    def __init__(self, gallery: dict[str, Any]) -> None:
        stored = {"gallery.json": json.dumps(gallery).encode()}

        class Files(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                name = urlsplit(self.path).path.lstrip("/") or "index.html"
                file = PAGE / name
                body = stored.get(name) or (file.read_bytes() if "/" not in name and file.is_file() else None)
                self.send_response(404 if body is None else 200)
                self.send_header("Content-Type", _TYPES.get(Path(name).suffix, "text/plain"))
                self.send_header("Content-Security-Policy", _CSP)
                self.end_headers()
                self.wfile.write(body or b"")

            def log_message(self, *_: Any) -> None: ...

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Files)
        self.address = f"http://127.0.0.1:{self.server.server_port}/"
        self.thread = threading.Thread(target=self.server.serve_forever, daemon=True)
        self.thread.start()

    def stop(self) -> None:
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()


@pytest.fixture(scope="module")
def static_page(browser: Any) -> Iterator[StaticPage]:
    page = StaticPage({"functions": [stored_function(*example) for example in EXAMPLES], "heads": []})
    yield page
    page.stop()


def wait_until(page: Any, condition: str, seconds: float = 20.0) -> Any:
    """The value of a JavaScript expression once it is true. The page's own rules forbid Playwright's wait_for_function."""
    end = time.monotonic() + seconds
    while not (value := page.evaluate(condition)):
        assert time.monotonic() < end, f"not true within {seconds} s: {condition}"
        page.wait_for_timeout(25)
    return value


@pytest.fixture
def open_page(browser: Any) -> Iterator[Callable[..., Any]]:
    contexts: list[Any] = []
    problems: list[str] = []
    hosts: set[str | None] = set()

    def opened(
        address: str,
        *,
        width: int = 1280,
        height: int = 800,
        scheme: str = "light",
        allow: Sequence[str] = (),
        named: str = "studio",
        **options: Any,
    ) -> Any:
        """A page at the address; console errors that contain a text of `allow` are expected. `named`: its object in window."""
        context = browser.new_context(viewport={"width": width, "height": height}, color_scheme=scheme, **options)
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(20_000)
        context.on("page", lambda other: watch(other, allow))
        watch(page, allow)
        page.goto(address)
        wait_until(page, f"window.{named} !== undefined")
        page.evaluate(f"window.{named}.ready")
        return page

    def watch(page: Any, allow: Sequence[str]) -> None:
        if getattr(page, "watched", False):
            return
        page.watched = True

        def note(text: str) -> None:
            if not any(part in text for part in allow):
                problems.append(text)

        page.on("console", lambda m: note(f"console {m.type}: {m.text} {m.location}") if m.type == "error" else None)
        page.on("pageerror", lambda error: note(f"uncaught: {error}"))
        page.on("request", lambda request: hosts.add(urlsplit(request.url).hostname))

    yield opened
    for context in contexts:
        context.close()
    assert not problems, "\n".join(problems)
    assert hosts <= {"127.0.0.1", None}, f"requests left the machine: {hosts}"  # None: data: and blob: addresses


@pytest.fixture(scope="session")
def screenshots(tmp_path_factory: pytest.TempPathFactory) -> Path:
    kept = os.environ.get("PARTITA_SCREENSHOTS")
    folder = Path(kept) if kept else tmp_path_factory.mktemp("screenshots")
    folder.mkdir(parents=True, exist_ok=True)
    return folder
