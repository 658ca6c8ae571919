"""The playground in a real browser: drag, keys, sliders, one and two variables, addresses, the fallback, access."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from browser_harness import PAGE, wait_until

import partita as pa
from partita.functions import parse

FIVE = "keys=-0.5,-0.5;0.5,-0.5;0,0.5;-0.6,0.7;0.7,0.6"


def head(page: Any) -> Any:
    return page.evaluate("() => studio.head()")


def key(page: Any, j: int) -> Any:
    return page.evaluate(f"() => studio.state().keys[{j}]")


def place(page: Any, j: int, kind: str = "cells") -> tuple[float, float]:
    spot = page.evaluate(f"() => studio.picture.placeOf({j}, {json.dumps(kind)})")
    return spot["x"], spot["y"]


def drag(page: Any, start: tuple[float, float], by: tuple[float, float]) -> None:
    page.mouse.move(*start)
    page.mouse.down()
    for step in range(1, 5):
        page.mouse.move(start[0] + by[0] * step / 4, start[1] + by[1] * step / 4)
    page.mouse.up()


def at(server: Any, hash_: str) -> str:
    return f"{server.address}#{hash_}"


def test_drag_add_remove_back_and_reload(studio_server: Any, open_page: Any, screenshots: Path):
    page = open_page(at(studio_server, FIVE))
    assert page.evaluate("() => studio.painter") == "webgl2"
    before, address = head(page), page.url
    drag(page, place(page, 2), (60, 40))
    wait_until(page, f"location.href !== {json.dumps(address)}")
    moved = key(page, 2)
    assert moved["x"][0] > 0.1
    assert moved["x"][1] < 0.5
    assert page.url != address
    assert "keys=" in page.url
    wait_until(page, f"studio.head().centers[2][0] === {moved['x'][0]}")
    after = head(page)
    assert after["centers"][2] == moved["x"]
    assert after["values"][2] != before["values"][2]  # values follow f
    page.get_by_test_id("pane-cells").wait_for()
    page.screenshot(path=screenshots / "playground.png")

    x, y = place(page, 2)  # an empty place: halfway to the next key
    page.mouse.dblclick((x + place(page, 3)[0]) / 2, (y + place(page, 3)[1]) / 2)
    wait_until(page, "studio.state().keys.length === 6")
    page.get_by_test_id("remove").click()
    wait_until(page, "studio.state().keys.length === 5")

    shown = page.url
    page.reload()
    wait_until(page, "window.studio !== undefined")
    page.evaluate("studio.ready")
    assert page.url == shown
    assert key(page, 2) == moved
    page.go_back()
    wait_until(page, "studio.state().keys.length === 6")
    page.go_back()
    page.go_back()
    wait_until(page, "studio.head().centers[2][0] === 0")
    assert head(page)["centers"] == before["centers"]


def test_the_picture_paints_in_one_call(static_page: Any, open_page: Any):
    import random

    rng = random.Random(5)
    keys = ";".join(f"{rng.uniform(-1, 1):.3f},{rng.uniform(-1, 1):.3f}" for _ in range(64))
    page = open_page(f"{static_page.address}#R=400&keys={keys}")
    page.wait_for_timeout(500)  # until the picture rests
    figures = page.evaluate("""async () => {
        const { state } = studio.parts, times = [];
        let calls = 0;
        Object.defineProperty(studio.picture, "quality", { get: () => 1, set() {} });
        const gl = studio.picture.painter.gl;
        for (const name of ["drawArrays", "drawElements", "drawArraysInstanced"]) { const old = gl[name].bind(gl);
            gl[name] = (...a) => { calls += 1; old(...a); }; }
        for (let k = 0; k < 4; k += 1) {
            const keys = state.get().keys.map((key, j) => (j === 7 ? {...key, x: [0.1 * k, 0.2]} : key)),
                count = studio.frame.count;
            state.update({ keys }, { live: true });
            while (studio.frame.count === count) await new Promise((done) => setTimeout(done, 5));
            times.push(studio.frame.scriptMs);
        }
        return { calls, times, draws: studio.frame.draws };
    }""")
    assert figures["calls"] == 4  # one per frame
    assert figures["draws"] == 1
    print("milliseconds of script per frame at 64 keys:", figures["times"])
    before, first = -1, page.evaluate("studio.frame.count")
    count = first
    for _ in range(20):  # until the picture rests: what slow frames left out is painted once more
        if before == count:
            break
        page.wait_for_timeout(700)
        before, count = count, page.evaluate("studio.frame.count")
    assert before == count  # nothing is painted while nothing changes
    assert count - first <= 4


def test_temperature_from_soft_to_hard(studio_server: Any, open_page: Any, screenshots: Path):
    page = open_page(at(studio_server, FIVE), scheme="dark")
    slider = page.get_by_test_id("rate")
    seen = []
    for value in ("100", "500", "1000"):
        slider.fill(value)
        wait_until(page, f"document.getElementById('rate').value === '{value}'")
        page.wait_for_timeout(60)
        seen.append(page.evaluate("() => studio.state().R"))
    assert seen[0] < seen[1] < seen[2] == pytest.approx(5e4)
    assert "R=50000" in page.url
    page.get_by_test_id("hard").check()
    wait_until(page, "studio.state().R === 'hard'")
    assert "R=hard" in page.url
    value = wait_until(page, "studio.parts.playground.valueOf(4, [0.7, 0.6])")
    wait_until(page, f"studio.evaluate([0.7, 0.6]) === {value}")
    page.get_by_text("The hard head is the limit").wait_for()
    page.screenshot(path=screenshots / "playground-hard-dark.png")


def test_powers_make_a_key_dead(studio_server: Any, open_page: Any, screenshots: Path):
    page = open_page(at(studio_server, f"cells=power&{FIVE};0.02,0.48"))
    assert page.evaluate("() => studio.figures().dead") == []
    page.get_by_test_id("key-6").click()
    page.get_by_test_id("field-power").fill("-0.8")
    wait_until(page, "studio.figures().dead.length === 1")
    assert page.evaluate("() => studio.figures().dead") == [5]
    assert "dead" in page.get_by_test_id("key-6").text_content()
    assert "dead" in page.get_by_test_id("key-title").text_content()
    assert "dead" in (page.get_by_test_id("key-6").get_attribute("class") or "")
    page.screenshot(path=screenshots / "playground-dead.png")
    page.get_by_test_id("cells-voronoi").check(force=True)
    wait_until(page, "studio.figures().dead.length === 0")


def test_max_affine_cells_and_affine_values(studio_server: Any, open_page: Any):
    page = open_page(at(studio_server, f"cells=affine&values=affine&follow=0&{FIVE}"))
    page.get_by_test_id("key-1").click()
    page.get_by_test_id("field-slope-x").fill("-3")
    wait_until(page, "studio.head().centers[0][0] === -3")
    page.get_by_test_id("field-offset").fill("-1")
    page.get_by_test_id("field-value-slope-y").fill("2")
    wait_until(page, "studio.head().slopes[0][1] === 2")
    found = head(page)
    rate = found["rates"][0]
    scores = [sum(c * x for c, x in zip(center, (0.3, -0.2), strict=True)) for center in found["centers"]]
    offsets = [
        b / rate - sum(c * c for c in center) / 2 for b, center in zip(found["biases"], found["centers"], strict=True)
    ]
    assert offsets[0] == pytest.approx(-1.0, abs=1e-5)
    weights = page.evaluate(
        """() => { const s = studio.head(), e = s.centers.map((c,
            j) => s.biases[j] - s.rates[0] / 2 * ((0.3 - c[0]) ** 2 + (-0.2 - c[1]) ** 2)); return e; }"""
    )
    best = max(range(5), key=lambda j: scores[j] + offsets[j])
    assert best == max(range(5), key=weights.__getitem__)


def test_one_variable(studio_server: Any, open_page: Any, screenshots: Path):
    page = open_page(at(studio_server, "f=sin(3*x)&d=[-1,1]&keys=-0.6;0;0.6"))
    assert not page.get_by_test_id("picture").is_visible()
    assert page.get_by_test_id("graph-scores").is_visible()
    spot = page.evaluate("() => studio.parts.playground.graphs.placeOf(1)")
    drag(page, (spot["x"], spot["y"] - 40), (50, 0))
    wait_until(page, "studio.state().keys[1].x[0] > 0.1")
    page.get_by_test_id("add").click()
    wait_until(page, "studio.state().keys.length === 4")
    assert page.locator("[data-testid=graph-weights] path").count() >= 4
    page.screenshot(path=screenshots / "playground-one-variable.png")
    page.get_by_test_id("example").select_option(label="Waves")
    wait_until(page, "studio.head().centers[0].length === 2")
    assert page.get_by_test_id("picture").is_visible()


def test_keyboard_alone(studio_server: Any, open_page: Any):
    """Tab reaches the picture; arrows move a key, Insert adds one, Delete removes it; every control has a name."""
    page = open_page(at(studio_server, FIVE))
    reached = []
    for _ in range(40):
        page.keyboard.press("Tab")
        reached.append(page.evaluate("() => document.activeElement.dataset.testid || document.activeElement.id"))
        if reached[-1] == "picture":
            break
    assert reached[-1] == "picture", reached
    page.keyboard.press("PageDown")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("Shift+ArrowUp")
    wait_until(page, "studio.state().keys[1].x[1] > -0.4")
    assert key(page, 1)["x"] == pytest.approx([0.52, -0.3])
    page.keyboard.press("Insert")
    wait_until(page, "studio.state().keys.length === 6")
    page.keyboard.press("Delete")
    wait_until(page, "studio.state().keys.length === 5")
    wait_until(page, "document.getElementById('live').textContent.length > 0")
    unnamed = page.evaluate("""() => [...document.querySelectorAll("input, select, button, textarea, [tabindex='0']")]
        .filter((e) => !(e.labels?.length || e.getAttribute("aria-label") || e.textContent.trim()))
        .map((e) => e.outerHTML.slice(0, 80))""")
    assert unnamed == []
    unmarked = page.evaluate(
        """() => [...document.querySelectorAll("#playground input, #playground select, #playground button")]
            .filter((e) => !e.dataset.testid).map((e) => e.outerHTML.slice(0, 80))"""
    )
    assert unmarked == []


def test_typed_functions_and_errors_under_the_caret(studio_server: Any, open_page: Any):
    page = open_page(at(studio_server, FIVE), allow=["422"])
    field = page.get_by_test_id("function")
    field.fill("sin(3*x) + foo(y)")
    wait_until(page, "!document.getElementById('function-error').hidden")
    caret = page.locator("#function-error .caret").text_content()
    line, marks = caret.split("\n")
    assert line[marks.index("^")] == "f"
    assert page.evaluate("() => studio.state().f") == "sin(3*x) + x*cos(2*y)"  # the last good function stays
    field.fill("x^2 + y")
    wait_until(page, "studio.state().f === 'x^2 + y'")
    assert page.locator("#function-error").is_hidden()
    wait_until(page, "Math.abs(studio.head().values[0] + 0.25) < 1e-12")
    page.get_by_test_id("domain").fill("[0,4] x [0,1]")
    wait_until(page, "studio.state().d === '[0,4] x [0,1]'")
    wait_until(page, "studio.head().centers[0][0] === 1")
    assert key(page, 0)["x"] == pytest.approx([1.0, 0.25])  # keys keep their place in the box
    page.get_by_test_id("domain").fill("[0,4] x [0,")
    wait_until(page, "!document.getElementById('domain-error').hidden")


def test_the_bound_is_about_the_state(studio_server: Any, open_page: Any):
    """On release the server's bound arrives, is not below what is seen, and belongs to the head that is shown."""
    page = open_page(at(studio_server, FIVE))
    bound = wait_until(page, "studio.figures().bound", 60)
    figures = page.evaluate("() => studio.figures()")
    assert figures["kind"] == "proved"
    assert figures["seen"] <= bound
    wire = head(page)
    c = pa.head(
        "sin(3*x) + x*cos(2*y)",
        "[-1,1]^2",
        centers=wire["centers"],
        inverse_temperature=wire["rates"][0],
        values=wire["values"],
    )
    assert bound == pytest.approx(c.error_bound, rel=0.2)
    assert "≤" in page.get_by_test_id("proved").text_content()
    drag(page, place(page, 0), (30, -30))
    wait_until(page, "studio.state().keys[0].x[0] > -0.49")
    assert page.evaluate("() => studio.figures().bound") is None  # stale at once
    again = wait_until(page, "studio.figures().bound", 60)
    assert again != bound


def test_two_tabs_do_not_disturb_each_other(studio_server: Any, open_page: Any):
    first = open_page(at(studio_server, FIVE))
    second = first.context.new_page()
    second.goto(at(studio_server, "f=x*y&" + FIVE))
    wait_until(second, "window.studio !== undefined")
    second.evaluate("studio.ready")
    second.get_by_test_id("add").click()
    wait_until(second, "studio.state().keys.length === 6")
    assert first.evaluate("() => studio.state().keys.length") == 5
    assert first.evaluate("() => studio.state().f") == "sin(3*x) + x*cos(2*y)"


def test_without_webgl(static_page: Any, open_page: Any, screenshots: Path):
    """The fallback paints the same picture: colours of cells agree away from borders and dots."""
    page = open_page(f"{static_page.address}?painter=canvas#{FIVE}")
    assert page.evaluate("() => studio.painter") == "canvas"
    page.wait_for_timeout(500)
    drag(page, place(page, 2), (40, 40))
    wait_until(page, "studio.state().keys[2].x[0] > 0.05")
    page.wait_for_timeout(500)
    page.screenshot(path=screenshots / "playground-canvas.png")
    page.get_by_text("A proved bound needs the server").wait_for()
    other = open_page(f"{static_page.address}#{page.url.split('#')[1]}")
    points = [(0.2, 0.3), (0.5, 0.06), (0.8, 0.9), (0.05, 0.5)]
    script = """(points) => new Promise((done) => {
        const { picture } = studio, pane = picture.panes[1], image = new Image();
        picture.paint();
        image.onload = () => {
            const c = document.createElement("canvas"), g = c.getContext("2d"), s = picture.canvas.width / picture.width;
            c.width = image.width; c.height = image.height; g.drawImage(image, 0, 0);
            done(points.map(([x, y]) => Array.from(g.getImageData((pane.x + x * pane.size) * s,
                (pane.y + y * pane.size) * s, 1, 1).data)));
        };
        image.src = picture.canvas.toDataURL();
    })"""
    ours, theirs = (p.evaluate(script, points) for p in (page, other))
    for a, b in zip(ours, theirs, strict=True):
        assert max(abs(x - y) for x, y in zip(a, b, strict=True)) <= 24, (ours, theirs)
    assert len({tuple(colour) for colour in ours}) > 1


def test_a_phone(static_page: Any, open_page: Any, screenshots: Path):
    page = open_page(f"{static_page.address}#{FIVE}", width=390, height=844, has_touch=True)
    assert page.evaluate("() => document.documentElement.scrollWidth") <= 390
    x, y = place(page, 2)
    page.touchscreen.tap(x + 14, y + 14)  # within reach of a finger
    wait_until(page, "document.getElementById('key-title').textContent.startsWith('Key 3')")
    page.screenshot(path=screenshots / "playground-phone.png", full_page=True)
    small = page.evaluate("""() => [...document
        .querySelectorAll("button, select, [role=option], input[type=range], input[type=text], input[type=number]")]
        .filter((e) => e.offsetParent && e.getBoundingClientRect().height < 24).map((e) => e.outerHTML.slice(0, 60))""")
    assert small == []


def test_numbers_too_fine_for_float32(static_page: Any, open_page: Any):
    """Values of ±1e7 that nearly cancel: the shader would show noise, so float64 script fills the picture."""
    keys = ";".join(f"{x},{y},0,{4e7 * x * y}" for x in (-0.5, 0.5) for y in (-0.5, 0.5))
    page = open_page(f"{static_page.address}#follow=0&R=0.02&keys={keys}")
    needs = page.evaluate("() => studio.picture.needs")
    assert needs["head"]
    assert page.evaluate("() => studio.picture.painter.field.head.length") >= 32 * 32
    wait_until(page, "studio.picture.painter.field.n === 160")
    n, field = page.evaluate("() => [studio.picture.painter.field.n, Array.from(studio.picture.painter.field.head)]")
    expected = page.evaluate(f"() => studio.evaluate([-1 + (2 * 40 + 1) / {n}, -1 + (2 * 9 + 1) / {n}])")
    assert field[9 * n + 40] == pytest.approx(expected, rel=1e-6)
    plain = open_page(f"{static_page.address}#{FIVE}")
    assert not any(plain.evaluate("() => studio.picture.needs").values())


def test_text_has_contrast():
    """4.5 : 1 for ink, muted and accent text on the backgrounds that carry them, in both themes."""
    style = (PAGE / "style.css").read_text()

    def luminance(colour: str) -> float:
        parts = [int(colour[k : k + 2], 16) / 255 for k in (1, 3, 5)]
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
        return sum(w * c for w, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True))

    for block in (style.split(":root {")[1].split("}")[0], style.split(':root[data-theme="dark"] {')[1].split("}")[0]):
        colours = dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6})", block))
        for text, ground in [("ink", "background"), ("ink", "panel"), ("muted", "background"), ("muted", "panel"),
            ("accent", "background"), ("on-accent", "accent"), ("background", "ink")]:  # fmt: skip
            light, dark = sorted((luminance(colours[text]), luminance(colours[ground])), reverse=True)
            assert (light + 0.05) / (dark + 0.05) >= 4.5, (text, ground)


@pytest.mark.parametrize(("f", "domain"), [("sinh(x)*cos(2*y)", "[-1,1]^2"), ("cos(2*x) - 0.25", "[0,3]")])
def test_what_the_printer_does_not_know_is_sampled_by_the_server(
    f: str, domain: str, studio_server: Any, open_page: Any
):
    page = open_page(f"{studio_server.address}&painter=canvas")

    def renamed(route: Any) -> None:
        answer = route.fetch()
        route.fulfill(response=answer, body=answer.text().replace('"cos"', '"mystery"'))

    page.route("**/api/function", renamed)
    page.get_by_test_id("function").fill(f)
    page.get_by_test_id("domain").fill(domain)
    wait_until(page, f"studio.state().d === {json.dumps(domain)} && studio.state().f === {json.dumps(f)}", 40.0)
    wait_until(page, "document.querySelector('#caption').textContent.includes('The server samples')", 40.0)
    dimension = pa.Box.of(domain).dimension
    exact = parse(f, ["x", "y"][:dimension])
    found = wait_until(page, "studio.figures().refined && studio.head()", 40.0)  # a frame after the caption
    assert found["dimension"] == dimension
    for center, value in zip(found["centers"], found["values"]):  # f at the centers, between samples
        assert value == pytest.approx(float(exact.evaluate([center[:dimension]])[0]), abs=2e-3)
    assert float(page.get_by_test_id("seen").inner_text()) > 0
