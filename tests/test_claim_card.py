"""Cards: what they say is the claim and nothing more, whatever is written in them stays text, and their code runs."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from markdown_it import MarkdownIt
from markdown_it.token import Token
from method_cases import CASES, applies, compiled, finished
from typer.testing import CliRunner

import partita as pa
from partita.cli import app
from partita.methods import METHODS
from partita.proofs import Assumption

HEADS = {
    "proved": ("fitted", "single typed"),
    "proved_given": ("hard", "torch 2-D"),
    "estimated": ("tuned", "undeclared"),
    "two inputs": ("hard", "cross sequences"),
    "tokens": ("pieces", "tokens typed"),
    "network": ("layers", "mixed"),
    "L2, region": ("hard", "union L2"),
    "point cloud": ("hard", "curve single"),
    "half": ("fitted", "half typed"),
}
EVERY_HEAD = pytest.mark.parametrize("name", HEADS)


def head(name: str) -> pa.Compiled:
    method, case = HEADS[name]
    return compiled(case, method)


def read(card: str) -> list[Token]:
    """As GitHub reads it: CommonMark with tables and HTML."""
    return MarkdownIt("commonmark", {"html": True}).enable(["table", "strikethrough"]).parse(card)


def structure(card: str) -> list[str]:
    return [inner.type for token in read(card) for inner in (token, *(token.children or ()))]


def tables(card: str) -> list[list[list[str]]]:
    """Rows of cells, as text; the line of headings first."""
    found: list[list[list[str]]] = []
    for before, token in zip([None, *read(card)], read(card)):
        if token.type == "table_open":
            found.append([])
        elif token.type == "tr_open":
            found[-1].append([])
        elif token.type == "inline" and before is not None and before.type in ("td_open", "th_open"):
            found[-1][-1].append("".join(t.content for t in token.children or ()))
    return found


# --- what it says ------------------------------------------------------------------------------------------------------


@EVERY_HEAD
def test_the_numbers_are_those_of_the_certificate_and_never_smaller(name: str, tmp_path: Path) -> None:
    c = head(name)
    card, certificate = c.card(), c.certificate
    facts = dict(next(table for table in tables(card) if ["kind", certificate.kind] in table))
    assert facts["arithmetic"] == certificate.semantics
    assert facts["norm"] == ("supremum" if certificate.norm == "inf" else f"L{certificate.norm}")
    saved = c.save(tmp_path / "head") / "certificate.json"
    assert hashlib.sha256(saved.read_bytes()).hexdigest() in card
    assert all(pa_text(a.statement) in pa_text(plain(card)) for a in certificate.assumptions)
    if certificate.kind == "estimated":
        assert float(facts["largest error seen"]) == pytest.approx(certificate.error, rel=1e-3)
        return
    assert certificate.error_bound <= float(facts["error bound"]) <= certificate.error_bound * (1 + 2e-5)
    (terms,) = (table for table in tables(card) if table[0][0] == "term")
    assert [row[0] for row in terms[1:]] == [t.name for t in certificate.terms]
    for row, term in zip(terms[1:], certificate.terms):
        assert term.value <= float(row[1]) <= term.value * (1 + 2e-5)
        assert row[4] == term.theorem


def plain(card: str) -> str:
    return "\n".join("".join(t.content for t in token.children or ()) or token.content for token in read(card))


def pa_text(text: str) -> str:
    return " ".join(text.split())


def test_a_number_is_rounded_up_even_where_the_nearest_is_smaller() -> None:
    c = head("proved")
    bound = 0.1000000000001
    card = replace(c, certificate=replace(c.certificate, error_bound=bound)).card()
    assert "by more than 0.100001." in card and f"{bound:.6g}" == "0.1"


def test_an_estimate_is_never_called_a_bound_or_proved() -> None:
    """Of every method and case that gives one. The control: every other card uses both words."""
    estimated = [c for c in CASES if "undeclared" in c.kinds.split()]
    found = [finished(case.name, m.name) for m in METHODS for case in estimated if applies(m, case)]
    cards = [c.card() for c in found if isinstance(c, pa.Compiled) and c.certificate.kind == "estimated"]
    assert len(cards) >= 4
    for card in cards:
        assert not re.search("bound|prove|guarantee|certified", card, re.IGNORECASE), card
        assert "Estimated from samples" in card
    for name in ("proved", "proved_given", "network"):
        assert re.search("bound", head(name).card()) and re.search("Proved", head(name).card())


def test_a_bound_that_rests_on_the_caller_says_so() -> None:
    assert "**Proved, if the assumptions of the caller below hold:**" in head("proved_given").card()
    assert "**Proved:**" in head("proved").card()


@pytest.mark.parametrize(
    ("rule", "words"), [("allow", "nothing about it"), ("clamp", "nearest point"), ("mark", "NaN")]
)
def test_what_happens_outside_the_domain(rule: str, words: str) -> None:
    assert words in head("proved").card(outside=rule)
    assert (
        sum(other in head("proved").card(outside=rule) for other in ("nothing about it", "nearest point", "NaN")) == 1
    )


def test_rules_that_no_file_has_are_refused() -> None:
    with pytest.raises(pa.PartitaError, match="'allow', 'clamp', 'mark'"):
        head("proved").card(outside="raise")
    with pytest.raises(pa.PartitaError, match="needs a box or a region"):
        head("point cloud").card(outside="mark")


# --- text stays text ---------------------------------------------------------------------------------------------------

HOSTILE = [
    "a | b | c",
    "`code` ``` more",
    "<script>alert(1)</script> <b>",
    "line\n\n# heading\n\n- item\n\n```python\nprint(1)\n```\n| a | b |\n|---|---|",
    "[link](http://example.org) ![image](x.png) &amp; **strong** _it_ ~~no~~ $x$ \\",
    "\\| \\` trailing \\\\",
    "\ttab\r\n> quote",
    "- item",
    "12. item",
    "---",
]


@pytest.mark.parametrize("text", HOSTILE)
def test_nothing_that_a_caller_writes_becomes_markdown(text: str) -> None:
    """The structure is that of a harmless card, and the text arrives letter by letter."""

    def card(label: str) -> str:
        def f(z: np.ndarray) -> np.ndarray:
            return z[:, 0]

        f.__name__ = label
        c = pa.compile(f, pa.Box([0], [1]), tolerance=0.2, lipschitz=1.0, method="hard", trace=False)
        said = (*c.certificate.assumptions, Assumption(label, "caller"))
        function = {**c.certificate.function, "meaning": label}
        return replace(c, certificate=replace(c.certificate, assumptions=said, function=function)).card()

    found = card(text)
    assert structure(found) == structure(card("harmless"))
    assert not any("html" in kind or "image" in kind or kind == "link_open" for kind in structure(found))
    shown = [token.content.strip() for token in read(found) if token.type == "code_block"]
    assert shown[0] == " ".join(text.split())
    assert plain(found).count(" ".join(text.split())) == 3


def test_the_structure_would_notice_text_that_is_not_escaped() -> None:
    """Control of the law above."""
    for text in HOSTILE[1:4]:
        assert structure(f"- harmless\n\n{text}\n") != structure("- harmless\n\nharmless\n")
    assert len(tables("| a | b |\n|---|---|\n| a | b | c | d |")[0][1]) == 2  # a cell that a bar has cut in two is lost


def test_a_long_function_is_cut() -> None:
    c = pa.compile(" + ".join(["x0"] * 900), pa.Box([0], [1]), tolerance=1.0, method="pieces")
    line = next(token.content for token in read(c.card()) if token.type == "code_block")
    assert len(line) < 2100 and "characters" in line


# --- its code runs -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [n for n in HEADS if n not in ("proved_given", "tokens")])
def test_its_code_runs(name: str, tmp_path: Path) -> None:
    c, cleared = head(name), io.StringIO()
    c.save(tmp_path / "head")
    if name != "half":
        pytest.importorskip("onnxruntime")
        c.export_onnx(tmp_path / "a file.onnx")
    card = c.card(onnx="a file.onnx")
    blocks = [token.content for token in read(card) if token.type == "fence" and token.info == "python"]
    assert len(blocks) == (1 if name == "half" else 2)
    with contextlib.chdir(tmp_path), contextlib.redirect_stdout(cleared):
        for block in blocks:
            exec(compile(block, "card", "exec"), {})
            print("---")
    values = [
        np.array(re.findall(r"-?\d+\.?\d*(?:e[-+]\d+)?", said), float) for said in cleared.getvalue().split("---")[:-1]
    ]
    assert all(len(v) == c.head.num_outputs for v in values)
    assert np.allclose(values[0], values[-1], rtol=1e-5, atol=1e-6)


def test_every_onnx_file_has_its_card(tmp_path: Path) -> None:
    onnx = pytest.importorskip("onnx")
    c = head("proved")
    model = onnx.load(c.export_onnx(tmp_path / "wave.onnx", outside="mark"))
    assert model.doc_string == c.card(onnx="wave.onnx", outside="mark") and '"wave.onnx"' in model.doc_string


def test_cards_on_the_command_line(tmp_path: Path) -> None:
    pytest.importorskip("onnx")
    place, run = str(head("proved").save(tmp_path / "head")), CliRunner()
    command = [
        "export",
        place,
        "--onnx",
        str(tmp_path / "a.onnx"),
        "--card",
        str(tmp_path / "a.md"),
        "--outside",
        "mark",
    ]
    told = run.invoke(app, [*command, "--json"])
    assert told.exit_code == 0 and json.loads(told.stdout)["card"] == str(tmp_path / "a.md")
    text = (tmp_path / "a.md").read_text(encoding="utf-8")
    assert text == head("proved").card(onnx="a.onnx", outside="mark")
    (tmp_path / "a.onnx").unlink()
    (tmp_path / "a.md").write_text("mine")
    refused = run.invoke(app, command)
    assert refused.exit_code != 0 and (tmp_path / "a.md").read_text() == "mine" and not (tmp_path / "a.onnx").exists()
    assert run.invoke(app, [*command, "--overwrite"]).exit_code == 0


def test_a_card_of_a_network_has_a_term_for_each_head() -> None:
    (terms,) = (table for table in tables(head("network").card()) if table[0][0] == "term")
    assert sum(row[0].startswith("head ") for row in terms) == len(head("network").head.heads)  # type: ignore[arg-type]


def test_half_types_have_no_onnx_code() -> None:
    assert head("half").head.dtype == torch.bfloat16 and "onnxruntime" not in head("half").card()


def test_files_that_were_written_are_the_ones_it_runs() -> None:
    single, both = head("proved"), head("two inputs")
    assert "onnxruntime" in single.card() and "_eval" not in single.card()
    card = both.card(onnx=None, c="wave")
    assert "onnxruntime" not in card and "void wave_eval(const double *in, double *out);" in card
    assert "(4 in, 2 out)" in card and "-DWAVE_SELFTEST" in card and "partita.load" in card
    assert "void wave_eval(const float *in, float *out);" in single.card(c="wave")
