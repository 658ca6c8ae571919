"""Every lesson opens in a real browser, and the figures it shows are partita's."""

import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import partita as pa
from partita.functions.target import make_target
from partita.geometry.domains import Box
from partita.geometry.moments import AxisGeometry, moment_bounds, soft_maximum_gap, temperature_for_leakage
from partita.heads.scattered_head import ScatteredHead
from partita.ramps.anchors import ramp_constant
from partita.studio import PAGE
from partita.studio.gallery import PAGE_FUNCTIONS, lesson_data

NAMES = re.findall(r'^    name: "([\w-]+)"', (PAGE / "lesson_list.js").read_text(encoding="utf-8"), re.MULTILINE)


QUICK = "painter=canvas"  # quicker than WebGL in software; tests/test_studio_playground.py tests both


@pytest.fixture
def lesson(open_page: Callable[..., Any], static_page: Any) -> Callable[..., Any]:
    """lesson(name) opens a lesson without a server and waits until the playground shows it."""

    def opened(name: str, **options: Any) -> Any:
        page = open_page(f"{static_page.address}?{QUICK}#tab=lessons&lesson={name}", **options)
        settled(page, name)
        return page

    return opened


def go_to(page: Any, name: str) -> None:
    page.select_option("[data-testid=lesson-choose]", name)
    settled(page, name)


def move(page: Any, knob: str, step: int) -> None:
    """Move a slider of the open lesson."""
    page.fill(f"[data-testid=knob-{knob}]", str(step))
    settled(page, page.evaluate("() => window.studio.state().lesson"))


def settled(page: Any, name: str) -> None:
    """Wait until the card and the head are those of the lesson, and the errors were refined."""
    for _ in range(400):
        shown = page.evaluate("() => ({state: window.studio.state(), figures: window.studio.figures()})")
        if shown["state"]["lesson"] == name and shown["figures"]["refined"]:
            break
        page.wait_for_timeout(40)
    else:
        raise AssertionError(f"the lesson {name} did not settle: {shown}")
    for _ in range(4):  # the refined error is drawn, told to the card, and drawn there
        page.evaluate("() => new Promise((done) => requestAnimationFrame(() => done()))")


def figure(page: Any, name: str) -> float:
    """A figure of the card, with all its digits."""
    return float(page.get_attribute(f"[data-testid=figure-{name}]", "data-value"))


def drawn(page: Any) -> dict[str, Any]:
    """The head on the page."""
    head: dict[str, Any] = page.evaluate("() => window.studio.head()")
    return head


def largest_error(page: Any, function: Callable[[Any], Any], points: int = 20_001) -> float:
    """The error of partita's head with the page's keys, in one dimension."""
    wire = drawn(page)
    head = ScatteredHead(
        torch.tensor(wire["centers"], dtype=torch.float64),
        wire["rates"][0],
        torch.tensor(wire["values"], dtype=torch.float64)[:, None],
        input_shapes=((1,),),
        output_shape=(),
    )
    x = np.linspace(-1, 1, points)
    return float(np.abs(head(torch.from_numpy(x)[:, None]).numpy() - function(x)).max())


def test_the_lessons_data_is_what_python_computes() -> None:
    written = (PAGE / "lesson_data.js").read_text(encoding="utf-8")
    new = lesson_data()
    functions, fitted = (text.split("export const FITTED")[0] for text in (written, new)), []
    assert len(set(functions)) == 1  # graphs: bit for bit
    for text in (written, new):
        fitted.append([float(x) for x in re.findall(r"-?\d+\.?\d*(?:e-?\d+)?", text.split("export const FITTED")[1])])
    np.testing.assert_allclose(fitted[0], fitted[1], rtol=1e-3, atol=1e-3)  # of a least-squares problem, six digits


def test_the_stored_graphs_are_the_parsers() -> None:
    lines = (PAGE / "lesson_data.js").read_text(encoding="utf-8").splitlines()
    stored = [json.loads(line.strip().rstrip(",")) for line in lines if line.startswith('  {"text"')]
    assert [(entry["text"], entry["domain"]) for entry in stored] == list(PAGE_FUNCTIONS)
    for entry in stored:
        graph = make_target(entry["text"], Box.of(entry["domain"])).graph
        assert graph is not None
        assert {key: entry["graph"][key] for key in graph.to_json()} == graph.to_json()


def test_there_are_eight_steps_to_the_theorem_and_six_beyond() -> None:
    assert len(NAMES) == 14
    assert NAMES.index("theorem") == 7
    assert {"leakage", "wrong-end", "ghosts", "chebyshev", "ramp", "descent"} == set(NAMES[8:])


def test_every_lesson_opens_and_goes_on(lesson: Callable[..., Any], screenshots: Path) -> None:
    page = lesson(NAMES[0], width=1000, height=640)
    for k, name in enumerate(NAMES):
        settled(page, name)
        said = page.inner_text("#lesson-card")
        assert f"{k + 1} of 14" in said
        assert len(page.query_selector_all(".lesson-text p")) == 2
        assert page.get_attribute("[data-testid=lesson-formula] math", "aria-label")
        assert page.evaluate("() => document.querySelector('.lesson-formula math').getBoundingClientRect().height") > 15
        one = page.evaluate("() => window.studio.state().d") == "[-1,1]"
        assert page.is_visible("[data-testid=graphs]" if one else "[data-testid=picture]")
        assert f"lesson={name}" in page.url
        page.screenshot(path=screenshots / f"lesson-{k + 1:02}-{name}.png")
        if k + 1 < len(NAMES):
            page.keyboard.press("n") if k % 2 else page.click("[data-testid=lesson-next]")
    assert page.is_disabled("[data-testid=lesson-next]")
    page.keyboard.press("p")
    settled(page, NAMES[-2])
    page.go_back()
    settled(page, NAMES[-1])


def test_a_lesson_survives_reload_and_starts_over(lesson: Callable[..., Any]) -> None:
    page = lesson("theorem", width=900, height=600)
    page.focus("[data-testid=knob-cells]")
    page.keyboard.press("ArrowRight")
    settled(page, "theorem")
    assert len(drawn(page)["centers"]) == 25
    page.reload()
    settled(page, "theorem")
    assert len(drawn(page)["centers"]) == 25
    assert page.input_value("[data-testid=knob-cells]") == "3"
    page.click("[data-testid=lesson-again]")
    settled(page, "theorem")
    assert len(drawn(page)["centers"]) == 16


def test_typing_n_into_a_field_does_not_leave_the_lesson(lesson: Callable[..., Any]) -> None:
    page = lesson("border")
    page.focus("[data-testid=function]")
    page.keyboard.type("n")
    assert page.evaluate("() => window.studio.state().lesson") == "border"


def the_promise_of_the_theorem_holds(page: Any) -> None:
    for count in (4, 8):
        move(page, "cells", count - 2)
        rate, half, promise = drawn(page)["rates"][0], 1 / count, figure(page, "promise")
        assert promise == pytest.approx(3 * half * math.sqrt(2) * 1.0013468, rel=1e-5)  # λ at κ = 8, by `grid-moments`
        axis = AxisGeometry.of(np.linspace(-1 + half, 1 - half, count), -1.0, 1.0)
        assert promise == pytest.approx(3 * math.sqrt(2 * moment_bounds(axis, rate, 2)[0]), rel=1e-3)
        assert figure(page, "seen") <= promise


def the_soft_maximum_stays_below_its_bound(page: Any) -> None:
    for step in (25,):
        move(page, "rate", step)
        rate = drawn(page)["rates"][0]
        assert figure(page, "bound") == pytest.approx(soft_maximum_gap(5) / rate, rel=1e-6)
        assert 0 < figure(page, "seen") <= figure(page, "bound")


def leakage_is_that_of_proposition_3_2_corrected(page: Any) -> None:
    centers = np.array(drawn(page)["centers"])
    query = np.array([-0.1, -0.2])
    scores = -((query - centers) ** 2).sum(axis=1) / 2
    margin = np.sort(scores)[-1] - np.sort(scores)[-2]
    assert figure(page, "margin") == pytest.approx(margin, rel=1e-12)
    assert figure(page, "needed") == pytest.approx(temperature_for_leakage(3, margin, 0.01), rel=1e-9)
    assert figure(page, "printed") == pytest.approx(margin * (math.log(2) - math.log(0.01)), rel=1e-12)
    for asked in (40.0, figure(page, "needed"), figure(page, "printed")):
        page.evaluate("(R) => window.studio.parts.state.update({R})", asked)
        settled(page, "leakage")
        rate = drawn(page)["rates"][0]  # six digits
        weights = np.exp(rate * (scores - scores.max()))
        outside = 1 - weights.max() / weights.sum()
        assert figure(page, "outside") == pytest.approx(outside, rel=1e-9)
        assert outside <= figure(page, "bound") <= 1
    assert figure(page, "left") > 0.5  # what the printed R leaves outside


def soft_beats_hard_with_the_same_keys(page: Any) -> None:
    hard, best = figure(page, "hard"), figure(page, "best")
    assert best < hard / 5
    seen = []
    for step in (2, 17, 36):
        move(page, "rate", step)
        seen.append(figure(page, "seen"))
        assert seen[-1] == pytest.approx(largest_error(page, lambda x: np.sin(3 * x)), rel=1e-3)
    assert seen[1] < seen[0]  # first it falls, then it rises
    assert seen[1] < seen[2]
    assert page.is_visible(".lesson-chart")


def ghosts_lower_the_error_as_the_text_says(page: Any) -> None:
    seen = []
    for ghosts in range(4):
        move(page, "ghosts", ghosts)
        assert page.inner_text("[data-testid=figure-outside]") == str(2 * ghosts)
        seen.append(figure(page, "seen"))
        assert seen[-1] == pytest.approx(largest_error(page, lambda x: np.sin(3 * x)), rel=1e-2)
    assert 0.009 < seen[0] < 0.012  # "from 0.01"
    assert seen[3] < 5e-6  # "to a few millionths"
    assert seen == sorted(seen, reverse=True)


def chebyshev_is_interpolation_with_as_many_coefficients(page: Any) -> None:
    def runge(x: Any) -> Any:
        return 1 / (1 + 25 * x**2)

    x = np.linspace(-1, 1, 20_001)
    for step, n in ((0, 8), (4, 24)):
        move(page, "count", step)
        polynomial = np.polynomial.chebyshev.chebinterpolate(runge, n - 1)
        error = np.abs(np.polynomial.chebyshev.chebval(x, polynomial) - runge(x)).max()
        assert figure(page, "chebyshev") == pytest.approx(error, rel=0.02)  # on the graph's grid
        assert figure(page, "seen") == pytest.approx(largest_error(page, runge), rel=1e-3)
        assert figure(page, "seen") < figure(page, "chebyshev")


def the_ramps_error_is_the_constant_of_the_theorem(page: Any) -> None:
    assert figure(page, "ratio") == pytest.approx(ramp_constant(9, 5.44), rel=1e-3)
    assert ramp_constant(1000, 5.44) == pytest.approx(0.0619, abs=5e-5)  # what the text says of long rows
    move(page, "kappa", 26)
    assert 0.45 < figure(page, "ratio") < 0.5  # "half the spacing"


def descent_by_attention_follows_exact_descent(page: Any) -> None:
    wire = drawn(page)
    x = np.array([[1.0, c[0]] for c in wire["centers"]])
    y = np.array(wire["values"])
    for steps in (3, 20):
        move(page, "steps", steps)
        w, exact = np.zeros(2), np.zeros(2)
        for _ in range(steps):
            r = 0.05 * (x @ w - y)
            w = w - (np.sinh(r) @ x) / np.cosh(r).sum() / 0.05
            exact = exact - (x @ exact - y) @ x / len(x)
        shown = [float(part) for part in page.inner_text("[data-testid=figure-w]").strip("()").split(",")]
        assert shown == pytest.approx(w.tolist(), abs=1e-6)
        assert figure(page, "apart") == pytest.approx(np.linalg.norm(w - exact), abs=1e-9)
        assert figure(page, "error") <= figure(page, "bound") + 1e-15  # floats


FIGURES = {
    "maximum": the_soft_maximum_stays_below_its_bound,
    "theorem": the_promise_of_the_theorem_holds,
    "leakage": leakage_is_that_of_proposition_3_2_corrected,
    "wrong-end": soft_beats_hard_with_the_same_keys,
    "ghosts": ghosts_lower_the_error_as_the_text_says,
    "chebyshev": chebyshev_is_interpolation_with_as_many_coefficients,
    "ramp": the_ramps_error_is_the_constant_of_the_theorem,
    "descent": descent_by_attention_follows_exact_descent,
}


def test_the_figures_are_partitas(lesson: Callable[..., Any]) -> None:
    page = lesson("maximum", width=900, height=600)
    for name, check in FIGURES.items():
        go_to(page, name)
        check(page)


def test_the_python_of_a_lesson_gives_the_bound_of_the_page(open_page: Callable[..., Any], studio_server: Any) -> None:
    page = open_page(f"{studio_server.address}&{QUICK}#tab=lessons&lesson=ramp")
    settled(page, "ramp")
    page.wait_for_selector('[data-testid=proved]:has-text("≤")')
    page.click("[data-testid=python]")
    page.wait_for_selector("[data-testid=python-text] >> pre:has-text('pa.head')")
    text = page.inner_text("[data-testid=python-text] pre")
    found: dict[str, Any] = {}
    exec(text, found)  # the text that the page offers to copy
    shown = page.evaluate("() => window.studio.figures()")
    assert shown["kind"] == "proved"
    assert shown["seen"] <= found["c"].error_bound * (1 + 1e-9)
    assert found["c"].error_bound / 1.3 <= shown["bound"] <= 1.3 * found["c"].error_bound  # both have a time limit


@pytest.mark.parametrize(("width", "scheme"), [(390, "light"), (1280, "dark")])
def test_lessons_fit_a_phone_and_the_dark(
    lesson: Callable[..., Any], screenshots: Path, width: int, scheme: str
) -> None:
    page = lesson("theorem", width=width, height=844, scheme=scheme)
    assert page.evaluate("() => document.documentElement.scrollWidth") <= width
    page.screenshot(path=screenshots / f"lesson-theorem-{width}-{scheme}.png", full_page=True)


def test_pa_is_this_one() -> None:
    assert Path(pa.__file__).parent == PAGE.parents[1]
