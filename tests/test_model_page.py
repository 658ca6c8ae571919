"""The page of a model in a real browser: axes, filter, sorting, a head's panel, the address, keys, hostile names, no requests."""

import json
import urllib.parse
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from browser_harness import wait_until

import partita as pa
from partita.inspection.captured_heads import HeadRecord
from partita.inspection.report import ModelReport
from partita.inspection.snapshots import Snapshot
from partita.plots.model_page import write_inspection

WORDS = ["the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog", "and", "sleeps"]
EVIL = "</script><img src=x onerror=window.hit=1><script>window.hit=1</script>"


def records(layers: int = 3, heads: int = 3, tokens: int = 24, name: str = "layers.{}.attention") -> list[HeadRecord]:
    rng = np.random.default_rng(0)

    def snapshot(scale: float) -> Snapshot:
        queries, keys, values = rng.normal(size=(3, tokens, 8))
        return Snapshot(queries, keys, values, scale, causal=True)

    return [
        HeadRecord(name.format(k), h, (snapshot(0.2 + 0.3 * k), snapshot(0.2 + 0.3 * h)))
        for k in range(layers)
        for h in range(heads)
    ]


class Written:
    def __init__(self, folder: Path, heads: Any, **options: Any) -> None:
        page = write_inspection(heads, folder, figures=False, budget=0, **options)
        self.report: ModelReport = page.report
        self.address = page.files[0].as_uri()


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Written:
    tokens = [[WORDS[(3 * i + k) % len(WORDS)] for i in range(24)] for k in range(2)]
    return Written(tmp_path_factory.mktemp("model"), records(), tokens=tokens, title="A model")


@pytest.fixture
def visit(open_page: Any) -> Any:
    return lambda address, **options: open_page(address, named="page", **options)


def shown(page: Any) -> list[str]:
    return [name.split(":")[0][7] + ":" + name.split(":")[1] for name in page.evaluate("() => page.shown()")]


def state(page: Any) -> dict[str, Any]:
    found: dict[str, Any] = page.evaluate("() => page.state()")
    return found


def in_address(page: Any) -> dict[str, str]:
    return dict(urllib.parse.parse_qsl(urllib.parse.urlsplit(page.url).fragment))


def test_axes_and_points(written: Written, visit: Any, screenshots: Path):
    page = visit(written.address)
    page.get_by_test_id("x").select_option("margin")
    page.get_by_test_id("y").select_option("leakage")
    spots = {s["name"]: s for s in page.evaluate("() => page.spots()")}
    by_margin = sorted(written.report.heads, key=lambda h: h.figures.margin)
    by_leakage = sorted(written.report.heads, key=lambda h: h.figures.leakage)
    assert sorted(spots, key=lambda n: spots[n]["x"]) == [h.name for h in by_margin]
    assert sorted(spots, key=lambda n: -spots[n]["y"]) == [h.name for h in by_leakage]
    assert "nats" in page.get_by_test_id("meaning").inner_text()
    linear = spots[by_margin[4].name]["x"]
    page.get_by_test_id("logx").check()
    assert {s["name"]: s["x"] for s in page.evaluate("() => page.spots()")}[by_margin[4].name] != linear
    assert in_address(page) == {"x": "margin", "y": "leakage", "logx": "1"}
    page.get_by_test_id("swap").click()
    assert (state(page)["x"], state(page)["y"], state(page)["logy"]) == ("leakage", "margin", True)
    assert page.locator("#scatter .null").count() == 9
    page.get_by_test_id("nulls").uncheck()
    assert page.locator("#scatter .null").count() == 0
    page.get_by_test_id("y").select_option("dead")  # nothing is dead: zeros have no place on a logarithmic axis
    said = page.get_by_test_id("meaning").inner_text()
    assert "9 heads are not shown: a logarithmic axis needs positive values." in said
    page.get_by_test_id("logy").uncheck()
    assert "not shown" not in page.get_by_test_id("meaning").inner_text()
    assert page.get_by_test_id("legend").inner_text().startswith("layers")
    page.screenshot(path=screenshots / "model.png")


def test_filter_and_sort(written: Written, visit: Any):
    page = visit(written.address)
    assert page.get_by_test_id("shown").inner_text() == "9 of 9 heads"
    for text, expected in [
        ("*.1.*", ["1:0", "1:1", "1:2"]),
        ("layers.2 attention:1", ["2:1"]),
        ("LAYERS.0.", ["0:0", "0:1", "0:2"]),
        ("nothing", []),
        ("*.1", []),  # a pattern is of the whole name
        ("(", []),
    ]:
        page.get_by_test_id("filter").fill(text)
        assert shown(page) == expected, text
        assert page.locator("#table tbody tr").count() == len(expected)
        assert page.locator("#scatter .point:not(.faded)").count() == len(expected)
        assert page.get_by_text("No head matches.", exact=True).is_visible() == (not expected)
    page.get_by_test_id("reset").click()
    assert len(shown(page)) == 9 and in_address(page) == {}

    margins = {f"{h.layer[7]}:{h.head}": h.figures.margin for h in written.report.heads}
    page.get_by_test_id("sort-margin").click()
    assert shown(page) == sorted(margins, key=lambda n: -margins[n])
    page.get_by_test_id("sort-margin").click()
    assert shown(page) == sorted(margins, key=lambda n: margins[n])
    assert page.locator("th[aria-sort]").get_attribute("aria-sort") == "ascending"
    middle = sorted(margins.values())[4]
    assert page.locator("#by option").first.inner_text() == "choose a figure"
    assert page.get_by_test_id("low").is_disabled() and page.get_by_test_id("high").is_disabled()
    page.get_by_test_id("by").select_option("margin")
    assert page.get_by_test_id("low").is_enabled() and page.get_by_test_id("high").is_enabled()
    page.get_by_test_id("low").fill(str(middle - 1e-5))
    assert len(shown(page)) == 5
    page.get_by_test_id("high").fill(str(middle + 1e-5))
    assert [margins[n] for n in shown(page)] == [middle]
    page.get_by_test_id("every").check()
    assert page.locator("#table th").count() == 2 + page.locator("#x option").count()


def test_a_head_opens_with_its_plane_its_tokens_and_its_audit(written: Written, visit: Any, screenshots: Path):
    page = visit(written.address)
    spot = next(s for s in page.evaluate("() => page.spots()") if s["name"] == "layers.1.attention:2")
    page.get_by_test_id("scatter").click(position={"x": spot["x"], "y": spot["y"]})
    page.get_by_test_id("plane").wait_for()
    name = page.get_by_test_id("head-name").inner_text()
    assert name == in_address(page)["head"]
    painted = page.evaluate("""() => ["plane", "pattern"].map((id) => {
        const canvas = document.querySelector(`[data-testid="${id}"]`);
        const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
        return new Set(Array.from({ length: data.length / 4 }, (_, k) => data.slice(4 * k, 4 * k + 3).join())).size;
    })""")
    assert min(painted) > 20  # colours: something was drawn
    head = next(h for h in written.report.heads if h.name == name)
    fullest = max(head.cells, key=lambda c: c.queries)
    first = page.get_by_test_id("cells").locator("tbody tr").first.inner_text()
    assert f"key {fullest.key} of sequence" in first and str(fullest.queries) in first
    assert page.get_by_test_id("decided").locator("tbody tr").count() == 10
    assert page.get_by_test_id("sequences").locator("tbody tr").count() == 2
    audit = page.get_by_test_id("audit")
    assert audit.locator("polyline").count() == 6  # bound, change and oracle of TopK and of SkipBlocks
    rows = audit.get_by_test_id("audit-table").locator("tbody tr")
    assert rows.count() == 5 + 6 and page.get_by_test_id("skipped-nothing").count() == 0
    first = [t for t in rows.locator("td:first-child").all_text_contents() if t.startswith("TopK")]
    assert first == ["TopK(16)", "TopK(8)", "TopK(4)", "TopK(2)", "TopK(1)"]
    titles = page.locator(".cards h3").all_inner_texts()
    assert titles.index("Audit: what skipping keys costs") < titles.index("Clearest queries")
    assert titles.index("Clearest queries") < titles.index("Figures")

    page.get_by_test_id("query").fill("7")
    said = page.get_by_test_id("query-said").inner_text()
    detail = page.evaluate("(name) => page.detail(name).then((d) => ({ cell: d.cell[7], sequence: d.sequence }))", name)
    assert f"query 7 {WORDS[21 % len(WORDS)]} is in the cell of key {detail['cell']} " in said
    assert in_address(page)["query"] == "7"
    page.screenshot(path=screenshots / "head.png", full_page=True)
    page.get_by_test_id("next").click()
    wait_until(page, f"page.state().head !== {json.dumps(name)}")
    page.go_back()
    wait_until(page, f"document.querySelector('[data-testid=head-name]').textContent === {json.dumps(name)}")
    page.get_by_test_id("close").click()
    page.get_by_test_id("planes").wait_for()
    assert "head" not in in_address(page)


def test_the_links_of_the_lists_are_those_of_the_drawn_sequence(written: Written, visit: Any):
    page = visit(written.address + "#head=layers.0.attention%3A1")
    for name in ("decided", "tied"):
        card = page.locator(".card", has=page.get_by_test_id(name))
        assert "Only sequence 0 is drawn, so only its queries are links." in card.inner_text()
        rows = card.locator("tbody tr").all()
        drawn = ["of sequence 0" in row.inner_text() for row in rows]
        assert [row.locator("button").count() == 1 for row in rows] == drawn
        if name == "decided":
            assert any(drawn) and not all(drawn)


def planted(tokens: int = 32) -> list[HeadRecord]:
    """Four heads: the first looks at the previous token and gives others no weight at all; the others are random and vague."""
    rng, keys = np.random.default_rng(0), np.eye(tokens)
    first = Snapshot(np.roll(keys, -1, axis=1), keys, rng.normal(size=(tokens, 4)), 2000.0, causal=True)
    others = [Snapshot(*rng.normal(size=(3, tokens, 8)), 0.1, causal=True) for _ in range(3)]
    return [HeadRecord("block", number, (snapshot,)) for number, snapshot in enumerate([first, *others])]


@pytest.fixture(scope="module")
def with_sentences(tmp_path_factory: pytest.TempPathFactory) -> Written:
    return Written(tmp_path_factory.mktemp("planted"), planted())


def test_the_table_says_what_each_head_does(with_sentences: Written, visit: Any):
    page = visit(with_sentences.address, width=1300)
    assert page.get_by_test_id("counts").inner_text().startswith("4 heads in 1 layer, 32 keys in 1 sequence.")
    assert "what it does" in page.locator("#table thead").inner_text()
    for k, head in enumerate(with_sentences.report.heads):
        cell = page.locator(f'[data-row="{k}"] .what')
        assert cell.inner_text() == head.sentence == cell.get_attribute("title")
    assert "previous token" in with_sentences.report.heads[0].sentence
    inside = """() => { const t = document.querySelector("#table"), box = t.parentElement.getBoundingClientRect();
        return [...t.querySelectorAll("th, td")].every((c) => c.getBoundingClientRect().right <= box.right + 0.5); }"""
    assert page.evaluate(inside)
    page.get_by_test_id("every").check()
    assert not page.evaluate(inside)  # every figure is too much for the width: the table scrolls by itself
    assert page.evaluate("() => document.querySelector('#table').parentElement.scrollWidth > 1300")
    assert page.evaluate("() => document.documentElement.scrollWidth <= innerWidth")
    assert "null" not in page.locator("body").inner_text().lower()


def test_an_audit_without_skipped_tiles_says_so_and_zeros_have_a_place(with_sentences: Written, visit: Any):
    page = visit(with_sentences.address + "#head=block%3A1")
    said = page.get_by_test_id("skipped-nothing")
    assert said.inner_text() == "SkipBlocks skipped no tile at any threshold up to 0.3."
    audit = page.get_by_test_id("audit")
    assert audit.locator("polyline").count() == 3 and audit.locator("circle").count() >= 3 * 5  # TopK of 1 to 16 keys
    assert audit.get_by_test_id("audit-table").locator("tbody tr").count() == 5 + 6
    assert audit.locator("svg.curve .zero").count() == 0

    # the other keys of this head have no weight: dropping them changes nothing
    page = visit(with_sentences.address + "#head=block%3A0")
    audit = page.get_by_test_id("audit")
    assert audit.locator("svg.curve .zero").text_content() == "0"
    assert audit.locator("svg.curve .break").count() == 2 and "(log; below the gap: 0)" in audit.inner_text()
    assert "Points on the line 0 change nothing." in audit.inner_text()
    heights = audit.locator("svg.curve circle").evaluate_all("(all) => all.map((c) => Number(c.getAttribute('cy')))")
    bottom = float(audit.locator("svg.curve .zero").get_attribute("y")) - 4
    assert heights.count(bottom) >= 5


LABELS = """() => { const all = [], draw = CanvasRenderingContext2D.prototype.fillText;
    CanvasRenderingContext2D.prototype.fillText = function (text, x, y, ...more) {
        const size = this.measureText(text), from = { left: 0, center: size.width / 2, right: size.width }[this.textAlign];
        const move = this.getTransform(), corners = [];
        for (const u of [x - from, x - from + size.width]) {
            for (const v of [y - size.actualBoundingBoxAscent, y + size.actualBoundingBoxDescent]) {
                const p = move.transformPoint({ x: u, y: v });
                corners.push([p.x / devicePixelRatio, p.y / devicePixelRatio]);
            }
        }
        const box = [0, 1].map((k) => [Math.min(...corners.map((c) => c[k])), Math.max(...corners.map((c) => c[k]))]);
        all.push([text, ...box[0], ...box[1]]);
        return draw.call(this, text, x, y, ...more);
    };
    const query = document.querySelector('[data-testid="query"]');
    query.value = "0";
    query.dispatchEvent(new Event("input"));
    const canvas = document.querySelector('[data-testid="pattern"]');
    return [all, canvas.clientWidth, canvas.clientHeight]; }"""


@pytest.mark.parametrize("width", [1400, 420])
@pytest.mark.parametrize("kind", ["words", "short words", "positions", "many positions"])
def test_labels_of_the_pattern_neither_overlap_nor_leave_the_picture(
    kind: str, width: int, visit: Any, tmp_path: Path, screenshots: Path
):
    """Nor do they leave much room for nothing."""
    tokens = {"words": [f"unbelievable{i}" for i in range(32)], "short words": ["gjM"[i % 3] for i in range(32)]}.get(
        kind
    )
    heads = records(1, 1, tokens=1200 if kind == "many positions" else 32)
    given = None if tokens is None else [tokens, tokens]
    page = visit(
        Written(tmp_path, heads, tokens=given, audit=False).address + "#head=layers.0.attention%3A0", width=width
    )
    page.get_by_test_id("pattern").wait_for()
    labels, wide, high = page.evaluate(LABELS)
    assert len(labels) >= 8 and ("words" not in kind or len(labels) >= 2 * 11)
    for k, (text, left, right, top, bottom) in enumerate(labels):
        assert left >= 0 and right <= wide and top >= -4 and bottom <= high, text
        for other in labels[:k]:
            assert right < other[1] or other[2] < left or bottom < other[3] or other[4] < top, (text, other)
    assert high - max(label[4] for label in labels) < 12
    assert min(label[1] for label in labels) < 12
    page.screenshot(path=screenshots / f"pattern-{kind.replace(' ', '-')}-{width}.png", full_page=True)


def test_the_bars_of_a_query_say_what_the_other_keys_have(visit: Any, tmp_path: Path):
    keys, values = np.eye(8), np.eye(8)
    weights = np.array([0.999, 0.00053, 0.0004, 7e-05])
    shares = [
        np.full(8, 1 / 8),
        np.concatenate([weights, np.full(4, 1e-9)]),
        np.array([0.4, 0.3, 0.15, 0.1, *[0.0125] * 4]),
    ]
    queries = np.log(np.stack(shares))
    heads = [HeadRecord("block", 0, (Snapshot(queries, keys, values, 1.0),))]
    page = visit(Written(tmp_path, heads, audit=False).address + "#head=block%3A0&query=0", width=420)

    def bars() -> list[list[str]]:
        cells = page.locator(".bars > *").all_inner_texts()
        return [[cells[k], cells[k + 2]] for k in range(0, len(cells), 3)]

    page.get_by_test_id("other-keys").wait_for()
    assert [number for _, number in bars()] == ["0.13"] * 4 + ["0.5"] and bars()[-1][0] == "all other keys"
    page.get_by_test_id("query").fill("1")
    assert bars() == [["key 0", ">0.99"], ["key 1", "0.00053"], ["key 2", "0.0004"]]
    right = page.locator(".bars").evaluate("(box) => box.getBoundingClientRect().right")
    assert page.locator(".bars .number").evaluate_all(
        f"(all) => all.every((e) => e.getBoundingClientRect().left + e.scrollWidth <= {right} + 0.5)"
    )
    page.get_by_test_id("query").fill("2")
    assert bars()[-1] == ["all other keys", "0.05"]


def test_a_query_that_sees_one_key_gives_it_all_its_weight(with_sentences: Written, visit: Any):
    page = visit(with_sentences.address + "#head=block%3A1&query=0")
    page.locator(".bars .number").wait_for()
    assert page.locator(".bars .number").all_inner_texts() == ["1"]


@pytest.mark.parametrize("nulls", [0, 1])
def test_names_cover_neither_each_other_nor_points(nulls: int, visit: Any, tmp_path: Path, screenshots: Path):
    page = visit(
        Written(tmp_path, records(18, 12, tokens=12), audit=False).address + f"#names=1&nulls={nulls}", width=1400
    )
    boxes, circles = page.evaluate("""() => ["name", "point, #scatter .null"].map((what) =>
        [...document.querySelectorAll(`#scatter .${what}`)].map((e) => e.getBoundingClientRect())
            .map((b) => [b.left, b.right, b.top, b.bottom]))""")
    assert len(circles) == 216 * (1 + nulls) and 5 <= len(boxes) < 216
    for k, (left, right, top, bottom) in enumerate(boxes):
        for a, b, c, d in boxes[:k]:
            assert right <= a or b <= left or bottom - 1 <= c or d - 1 <= top
        for a, b, c, d in circles:
            x, y, size = (a + b) / 2, (c + d) / 2, (b - a) / 2
            near = (x - min(max(x, left), right)) ** 2 + (y - min(max(y, top + 1), bottom - 1)) ** 2
            assert near >= (size - 0.5) ** 2
    page.screenshot(path=screenshots / f"names-{nulls}.png")


def test_pointing_at_a_head_lights_it_up_everywhere(written: Written, visit: Any):
    page = visit(written.address)
    page.locator('[data-row="4"]').hover()
    assert page.locator("#scatter circle.lit").count() == 1 and page.locator("#scatter .to-null").count() == 1
    assert page.locator('[data-plane="4"].lit').count() == 1
    spot = page.evaluate("() => page.spots()")[0]
    page.get_by_test_id("scatter").hover(position={"x": spot["x"], "y": spot["y"]})
    assert page.locator("#table tr.lit").count() == 1
    assert page.get_by_test_id("tip").is_visible() and "(" in page.get_by_test_id("tip").inner_text()
    wait_until(page, "document.querySelectorAll('canvas[data-done]').length === 9")  # every small plane is drawn


def test_an_address_shows_what_its_sender_saw(written: Written, visit: Any):
    sent = "#x=margin&y=cells&filter=*.2.*&sort=-cells&head=layers.2.attention%3A1&query=5&names=1"
    page = visit(written.address + sent)
    assert page.get_by_test_id("head-name").inner_text() == "layers.2.attention:1"
    assert page.get_by_test_id("query").input_value() == "5" and page.get_by_test_id("filter").input_value() == "*.2.*"
    assert len(shown(page)) == 3 and page.locator("#scatter .name").count() == 3
    page.get_by_text("Skip to the chosen head").focus()
    page.keyboard.press("Enter")
    assert in_address(page) == dict(urllib.parse.parse_qsl(sent[1:]))
    assert page.evaluate("() => document.activeElement.id") == "detail"
    page.get_by_test_id("reset").click()
    assert in_address(page) == {"x": "margin", "y": "cells", "head": "layers.2.attention:1", "query": "5", "names": "1"}
    page = visit(written.address + "#x=nonsense&y=__proto__&head=no%3A1&by=constructor&sort=what&query=x")
    assert state(page)["x"] == "effective_keys" and state(page)["head"] == "" and len(shown(page)) == 9


def test_the_keyboard_is_enough(written: Written, visit: Any):
    page = visit(written.address)
    page.get_by_test_id("scatter").focus()
    for key in ("ArrowRight", "ArrowRight", "ArrowUp", "ArrowLeft", "ArrowDown"):
        page.keyboard.press(key)
    active = page.get_by_test_id("scatter").get_attribute("aria-activedescendant")
    name = page.locator(f"#{active}").get_attribute("data-head")
    page.keyboard.press("Enter")
    wait_until(page, f"page.state().head === {json.dumps(name)}")
    page.keyboard.press("Escape")
    wait_until(page, "page.state().head === ''")
    page.get_by_test_id("head-3").focus()
    page.keyboard.press("Enter")
    wait_until(page, "page.state().head !== ''")
    assert page.evaluate("() => document.activeElement.dataset.testid") == "head-3"  # though the table was drawn again
    page.get_by_test_id("next").focus()
    for k in (4, 5):
        page.keyboard.press("Enter")
        wait_until(page, f"page.state().head === page.shown()[{k}]")
        wait_until(page, "document.activeElement.dataset.testid === 'next'")
    page.get_by_test_id("query").focus()
    page.keyboard.press("Escape")
    wait_until(page, "page.state().head === ''")
    unnamed = page.evaluate("""() => [...document.querySelectorAll("button, input, select")].filter((e) =>
        !(e.textContent.trim() || e.getAttribute("aria-label") || e.labels?.length)).map((e) => e.outerHTML)""")
    assert unnamed == []


@pytest.mark.parametrize(("width", "scheme"), [(390, "light"), (390, "dark"), (1600, "dark")])
def test_it_fits_narrow_and_wide_screens(width: int, scheme: str, written: Written, visit: Any, screenshots: Path):
    page = visit(written.address + "#head=layers.2.attention%3A1&query=5", width=width, scheme=scheme)
    page.get_by_test_id("plane").wait_for()
    assert page.evaluate("() => document.documentElement.scrollWidth <= innerWidth")
    page.screenshot(path=screenshots / f"model-{width}-{scheme}.png", full_page=True)
    page.get_by_test_id("close").click()
    page.get_by_test_id("layers").wait_for()
    assert page.evaluate("() => document.documentElement.scrollWidth <= innerWidth")


def test_links_and_numbers_of_queries_lead_to_the_query(written: Written, visit: Any):
    page = visit(written.address + "#head=layers.2.attention%3A1", width=1300)
    page.get_by_test_id("tied").locator("button.link").first.click()
    assert page.get_by_test_id("query").input_value() == state(page)["query"] != ""
    top = page.evaluate("() => document.querySelector('[data-testid=\"query\"]').getBoundingClientRect().top")
    assert 0 <= top < page.viewport_size["height"]
    page.get_by_test_id("query").fill("600")  # there is no such query
    page.get_by_test_id("query").blur()
    assert page.get_by_test_id("query").input_value() == state(page)["query"] != "600"


def test_the_table_shows_the_chosen_head_and_every_axis_has_ticks(visit: Any, tmp_path: Path):
    page = visit(Written(tmp_path, records(12, 6, tokens=12), title="Many").address, width=1300)
    page.get_by_test_id("plane-70").click()
    wait_until(page, "page.state().head !== ''")
    row, box = page.locator("#table tr.chosen").bounding_box(), page.locator(".heads .scroll").bounding_box()
    assert box["y"] <= row["y"] and row["y"] + row["height"] <= box["y"] + box["height"]
    page.get_by_test_id("logx").check()
    for name in ("queries", "keys", "cells", "distance", "leakage"):
        page.get_by_test_id("x").select_option(name)
        assert page.locator("#scatter text[text-anchor=middle]").count() >= 2, name


def test_heads_that_were_streamed_have_no_empty_planes(visit: Any, tmp_path: Path):
    with pa.inspect.capture(stream=True) as heads:
        torch.nn.functional.scaled_dot_product_attention(*torch.randn(3, 1, 2, 40, 8), is_causal=True)
    page = visit(Written(tmp_path, heads).address)
    assert page.get_by_test_id("planes").locator("button").count() == 2
    assert page.get_by_test_id("planes").locator("canvas").count() == 0
    assert "were not computed (the keys were not kept)" in page.get_by_test_id("counts").inner_text()
    page.get_by_test_id("y").select_option("dead")
    assert "2 heads are not shown: a figure is not defined there." in page.get_by_test_id("meaning").inner_text()


def test_without_random_heads_the_page_speaks_of_none(visit: Any, tmp_path: Path):
    for null in (True, False):
        with pa.inspect.capture(stream=True, null=null) as heads:
            torch.nn.functional.scaled_dot_product_attention(*torch.randn(3, 1, 2, 40, 8), is_causal=True)
        page = visit(Written(tmp_path / str(null), heads).address)
        assert page.get_by_test_id("nulls").is_visible() == null
        for part in ("table", "layers"):
            assert ("(" in page.get_by_test_id(part).inner_text()) == null, part
        page.get_by_test_id("head-1").click()
        assert ("(" in page.get_by_test_id("figures").inner_text()) == null
        assert ("random head" in page.inner_text("body")) == null
        assert page.locator("#scatter .null").count() == (2 if null else 0)


def test_parts_of_names_that_all_layers_share_are_left_out(visit: Any, tmp_path: Path):
    names = ["encoder.layers.0.self_attn", "decoder.layers.0.self_attn", "decoder.layers.0.encoder_attn"]
    heads = [HeadRecord(name, 0, record.snapshots) for name, record in zip(names, records(3, 1))]
    page = visit(Written(tmp_path, heads).address)
    wanted = ["encoder.self_attn", "decoder.self_attn", "decoder.encoder_attn"]
    assert page.locator(".row-name").all_inner_texts() == wanted
    assert page.locator("#table tbody button").all_text_contents() == [f"{name}:0" for name in wanted]


def test_names_and_tokens_that_look_like_markup_do_nothing(visit: Any, tmp_path: Path):
    heads = records(2, 2, name="layer{}" + EVIL)
    page = visit(Written(tmp_path, heads, tokens=[[EVIL] * 24, ["@@script@@"] * 24], title=EVIL).address)
    page.get_by_test_id("head-1").click()
    page.get_by_test_id("decided").wait_for()
    page.get_by_test_id("query").fill("5")
    assert (
        EVIL in page.get_by_test_id("head-name").inner_text() and EVIL in page.get_by_test_id("query-said").inner_text()
    )
    assert page.evaluate("() => window.hit") is None and page.locator("img").count() == 0
    page.evaluate("() => { location.hash = '#filter=' + encodeURIComponent('<img src=y onerror=window.hit=2>'); }")
    wait_until(page, "page.shown().length === 0")
    assert page.evaluate("() => window.hit") is None


def test_the_policy_forbids_other_scripts_and_requests(written: Written, visit: Any):
    page = visit(written.address, allow=["Content Security Policy", "Content-Security-Policy"])
    blocked = page.evaluate("""async () => {
        const added = document.createElement("script");
        added.textContent = "window.hit = 1";
        document.body.append(added);
        document.body.insertAdjacentHTML("beforeend", "<b onclick='window.hit = 1'>x</b>");
        document.body.lastElementChild.click();
        const answer = await fetch("data:,x").then(() => "fetched", () => "refused");
        return [window.hit ?? null, answer];
    }""")
    assert blocked == [None, "refused"]
