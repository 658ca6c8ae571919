"""The compile pane in a real browser: forms, progress, cancel, errors under the caret, the report, the checker, downloads."""

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from browser_harness import StudioServer

import partita as pa

QUICK = "painter=canvas"
LOST = ("ERR_CONNECTION_REFUSED", "Failed to load resource")


@pytest.fixture
def pane(open_page: Callable[..., Any], studio_server: Any) -> Callable[..., Any]:
    """pane("&f=…") opens the compile tab with these entries."""

    def opened(entries: str = "", **options: Any) -> Any:
        page = open_page(f"{studio_server.address}&{QUICK}#tab=compile{entries}", **options)
        page.set_default_timeout(60_000)
        page.wait_for_selector('[data-testid=compile-method] option[value="fitted"]', state="attached")
        return page

    return opened


def compiled(page: Any, title: str, method: str) -> None:
    """Wait for a head of this function and method."""
    page.wait_for_selector(f"[data-testid=result-title]:has-text('{title}')")
    page.wait_for_selector(f"[data-testid=result-method]:text-is('{method}')")


def test_compile_report_checker_downloads_and_python(pane: Callable[..., Any], screenshots: Path) -> None:
    page = pane("&f=x*y&tol=0.01")
    assert page.input_value("[data-testid=compile-f]") == "x*y"
    assert not page.query_selector("[data-testid=result-title]")  # a link fills the form and waits for the button
    page.click("[data-testid=compile-run]")
    compiled(page, "x*y", "fitted")
    c = pa.compile("x*y", "[-1,1]^2", tolerance=0.01)
    assert page.inner_text("[data-testid=result-keys]") == str(c.num_keys)
    assert page.inner_text("[data-testid=result-numbers]") == str(c.num_parameters)
    bound = float(page.get_attribute("[data-testid=result-bound]", "data-value"))
    assert bound == pytest.approx(c.error_bound, rel=1e-12)
    assert page.inner_text("[data-testid=result-kind]") == "proved"
    terms = page.query_selector_all("[data-testid=terms] tbody tr")
    assert len(terms) == len(c.certificate.terms)
    assert "IEEE 754" in page.inner_text("[data-testid=assumptions]")
    assert page.is_visible("[data-testid=result-pictures] canvas")
    page.screenshot(path=screenshots / "compile-result.png", full_page=True)

    page.focus("[data-testid=method-affine]")  # a method of the report, by keyboard
    page.keyboard.press("Enter")
    compiled(page, "x*y", "affine")
    assert "method=affine" in page.url
    assert page.is_visible("[data-testid=method-fitted]")  # the report of all methods stays

    page.click("[data-testid=check]")
    page.wait_for_selector("[data-testid=verdict-word]")
    assert page.inner_text("[data-testid=verdict-word]") == "verified"
    assert "verdict      verified" in page.inner_text("[data-testid=verdict-text]")

    for what, ending in (("head", ".zip"), ("onnx", ".onnx"), ("svg", ".svg")):
        with page.expect_download() as waiting:
            page.click(f"[data-testid=download-{what}]")
        assert waiting.value.suggested_filename.endswith(ending)
        assert Path(waiting.value.path()).stat().st_size > 500
    assert not page.query_selector("[data-testid=download-c]")  # listed once the library writes C

    page.click("[data-testid=show-python]")
    found: dict[str, Any] = {}
    text = page.inner_text("[data-testid=result] [data-testid=python-text]")
    exec(re.sub(r"^c\.save.*$", "", text, flags=re.MULTILINE), found)  # the text that the page offers to copy
    bound = float(page.get_attribute("[data-testid=result-bound]", "data-value"))
    assert found["c"].error_bound == pytest.approx(bound, rel=1e-12)


def test_a_reload_fills_the_form_and_the_playground_opens_the_head(pane: Callable[..., Any]) -> None:
    page = pane()
    page.click("[data-testid=example-2]")
    compiled(page, "max(abs(x), max(abs(y), 0.3))", "pieces")
    page.click("[data-testid=open-in-playground]")
    page.wait_for_selector("[data-testid=keys]")
    state = page.evaluate("() => window.studio.state()")
    assert (state["tab"], len(state["keys"]), state["follow"]) == ("playground", 5, False)
    for _ in range(100):
        if page.evaluate("() => window.studio.figures().refined"):
            break
        page.wait_for_timeout(50)
    assert 0.002 < page.evaluate("() => window.studio.figures().seen") < 0.0091
    page.go_back()
    page.wait_for_selector("[data-testid=result-title]")  # the result is still there
    page.reload()
    page.wait_for_selector("[data-testid=compile-run]")
    assert page.input_value("[data-testid=compile-f]") == "max(abs(x), max(abs(y), 0.3))"
    assert page.input_value("[data-testid=compile-tol]") == "0.01"
    assert not page.query_selector("[data-testid=result-title]")  # the button compiles, a reload does not


def test_errors_stand_under_their_field(pane: Callable[..., Any]) -> None:
    page = pane("&tol=0.1", allow=["422"])
    for field, text, good, caret, said in (
        ("f", "sin(3*x) + cso(y)", "x + y", "           ^^^", "did you mean cos"),
        ("d", "[-1,1", "[-1,1]^2", "^^^^^", "cannot be read"),
        ("tol", "-1", "0.1", None, "greater than 0"),
    ):
        page.fill(f"[data-testid=compile-{field}]", text)
        page.click("[data-testid=compile-run]")
        page.wait_for_selector(f"[data-testid=compile-{field}-error]:visible")
        assert said in page.inner_text(f"[data-testid=compile-{field}-error]")
        assert page.get_attribute(f"[data-testid=compile-{field}]", "aria-invalid") is not None
        assert page.evaluate("() => document.activeElement.dataset.testid") == f"compile-{field}"
        if caret:
            assert page.inner_text(f"[data-testid=compile-{field}-error] pre").split("\n") == [text, caret]
        page.fill(f"[data-testid=compile-{field}]", good)
    page.keyboard.press("Enter")
    page.wait_for_selector("[data-testid=result-title]")
    assert not page.query_selector(".field-error:visible")


def test_cancel_keeps_the_form(pane: Callable[..., Any], screenshots: Path) -> None:
    page = pane("&f=exp(-20*(x^2%2By^2-0.4)^2)&tol=0.001&method=adaptive")
    page.click("[data-testid=compile-run]")
    page.wait_for_selector("[data-testid=compile-cancel]:visible")
    page.wait_for_selector("[data-testid=compile-progress]:has-text(' s')")
    assert page.is_disabled("[data-testid=compile-run]")
    page.screenshot(path=screenshots / "compile-progress.png")
    page.click("[data-testid=compile-cancel]")
    page.wait_for_selector("[data-testid=compile-run]:enabled")
    assert not page.is_visible("[data-testid=compile-cancel]")
    assert page.input_value("[data-testid=compile-tol]") == "0.001"
    page.fill("[data-testid=compile-f]", "x + y")
    page.fill("[data-testid=compile-tol]", "0.1")
    page.select_option("[data-testid=compile-method]", "auto")
    page.click("[data-testid=compile-run]")  # the worker is free again
    page.wait_for_selector("[data-testid=result-title]:has-text('x + y')")


def test_three_inputs_are_shown_in_slices(pane: Callable[..., Any], screenshots: Path) -> None:
    page = pane("&f=x*y%2Bz&d=[-1,1]^3&tol=0.1", width=390, height=844)
    page.click("[data-testid=compile-run]")
    page.wait_for_selector("[data-testid=result-pictures] >> text=samples by the server")
    page.fill("[data-testid=slice-2]", "-0.5")
    page.wait_for_selector("[data-testid=result-pictures] >> text=x2 = −0.5")
    assert page.evaluate("() => document.documentElement.scrollWidth") <= 390
    page.screenshot(path=screenshots / "compile-slices-390.png", full_page=True)


@pytest.fixture
def own_server(browser: Any) -> Iterator[StudioServer]:
    server = StudioServer()
    yield server
    server.stop(kill=True)


def test_a_lost_server_loses_nothing(open_page: Callable[..., Any], own_server: StudioServer) -> None:
    page = open_page(f"{own_server.address}&{QUICK}#tab=compile&f=x*y&tol=0.1", allow=LOST)
    page.set_default_timeout(60_000)
    own_server.stop(kill=True)
    page.fill("[data-testid=compile-f]", "x + y")
    place = page.locator("[data-testid=compile-run]").bounding_box()
    # a click leaves the field, which asks the server: the banner comes before the button is released
    page.click("[data-testid=compile-run]")
    page.wait_for_selector("[data-testid=banner]:visible")
    assert page.locator("[data-testid=compile-run]").bounding_box() == place
    page.wait_for_selector("[data-testid=compile-problem]:visible")
    assert page.input_value("[data-testid=compile-f]") == "x + y"
    again = StudioServer(own_server.port or 0)
    try:
        page.goto(f"{again.address}&{QUICK}{page.evaluate('() => location.hash')}")  # a new server has a new token
        page.wait_for_selector("[data-testid=compile-run]")
        assert page.input_value("[data-testid=compile-f]") == "x + y"
        page.click("[data-testid=compile-run]")
        page.wait_for_selector("[data-testid=result-title]:has-text('x + y')")
    finally:
        again.stop()
