"""What a notebook or a prompt shows of results: short, readable, escaped, without scripts and colours of its own."""

from __future__ import annotations

import html.parser
import re

import pytest
import torch

import partita as pa
from partita.arithmetic.notebook_cards import card
from partita.reproduction import Finished, Table, Verdict

TEXT = "where(x > 0.25 and x < 0.5, x, 0)"


@pytest.fixture(scope="module")
def views():
    c = pa.compile(TEXT, (0, 1), tolerance=0.3, norm=1, method="hard")
    plan = pa.plan(TEXT, (0, 1), tolerance=0.3, norm=1, method="hard")
    model = torch.nn.MultiheadAttention(8, 2, batch_first=True).eval()
    z = torch.randn(4, 6, 8, generator=torch.Generator().manual_seed(0))
    with pa.inspect.capture(model) as heads, torch.no_grad():
        model(z, z, z)
    table = Table.of([{"keys": 4, "error": 0.5}, {"keys": 8, "error": 0.25}])
    return {
        "compiled": c,
        "plan": plan,
        "certificate": c.certificate,
        "attack": pa.attack(c, bound=9.0, samples=64),
        "inspection": pa.inspect.read(heads, budget=0),
        "table": table,
        "run": Finished("a<b>", {"sizes": table}, Verdict("holds", "5 < 6 & more"), {}),
    }


class Reader(html.parser.HTMLParser):
    """Tags that are opened and closed in turn, and the text between them."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: set[str] = set()
        self.text = ""

    def handle_starttag(self, tag, attrs):
        assert {name for name, _ in attrs} <= {"style"}
        self.open.append(tag)
        self.tags.add(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data + "\n"


def shown(text: str) -> str:
    reader = Reader()
    reader.feed(text)
    reader.close()
    assert reader.open == [] and reader.tags <= {"div", "strong", "table", "tr", "th", "td"}
    return reader.text


NAMES = ["compiled", "plan", "certificate", "attack", "inspection", "table", "run"]


@pytest.mark.parametrize("name", NAMES)
def test_cards_are_small_plain_html_for_light_and_dark_pages(views, name):
    card_of = views[name]._repr_html_()
    assert shown(card_of).strip() and len(card_of) < 20_000
    colours = re.findall(r"(?:color|background|border[\w-]*):([^;\"]*)", card_of)
    assert all(c in ("inherit", "transparent", "collapse") or c.endswith("currentColor") for c in colours)


def test_cards_say_what_a_reader_looks_for(views):
    text = shown(views["compiled"]._repr_html_())
    assert TEXT in text and "proved: L1 error ≤" in text and "[0,1]" in text
    assert "the certificate will be proved" in shown(views["plan"]._repr_html_())
    assert "not refuted" in shown(views["attack"]._repr_html_())
    assert "a random head of the same shape" in shown(views["inspection"]._repr_html_())
    assert "5 < 6 & more" in shown(views["run"]._repr_html_())


def test_text_from_outside_is_escaped():
    attack = "<script>alert(1)</script>"
    assert attack not in card(attack, {attack: attack}, columns=[attack], rows=[[attack]], note=attack)
    assert shown(card(attack)).strip() == attack
    with pytest.raises(AssertionError):  # negative control: the reader of this test notices a script
        shown(f"<div>{attack}</div>")


def test_long_tables_are_cut_and_counted():
    assert "and 950 more rows" in shown(card("t", columns=["n"], rows=[[k] for k in range(1000)]))


@pytest.mark.parametrize("name", NAMES)
def test_a_prompt_shows_a_few_readable_lines(views, name):
    text = repr(views[name])
    assert len(text.splitlines()) <= 5 and len(text) < 400
    assert not re.search(r"tensor\(|array\(|request=|terms=\(|object at 0x", text)


def test_a_plan_at_the_prompt_says_size_error_and_what_comes_next(views):
    lines = repr(views["plan"]).splitlines()
    assert lines[0] == f"Plan for '{TEXT}' on [0,1], tolerance 0.3"
    assert "keys" in lines[1] and "bytes" in lines[1] and "will be proved" in lines[2] and "pa.build" in lines[3]


def test_printed_layers_name_every_weight_with_its_shape():
    c = pa.compile("2*x", (0, 1), tolerance=0.15, method="hard")
    for form in ("indexed", "log"):
        layers = c.layers(form)
        text = str(layers)
        for name, tensor in layers.state_dict().items():
            assert f"{name.split('.')[-1]} {tuple(tensor.shape)}" in text
        assert f"error bound {layers.error_bound:.6g}" in text
    layers.attention.w_v.mul_(2)
    assert "changed after it was certified" in str(layers)
