"""Planes, pictures, the page of a model and the command: exact on the plane, self-contained, long inputs, clear refusals."""

import dataclasses
import json
import math
import re
import sys
import zlib
from html.parser import HTMLParser
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

import partita as pa
from partita.cli import main
from partita.cli.inspect_command import load_inputs
from partita.errors import DomainError, ShapeError, UnsupportedError
from partita.inspection.captured_heads import HeadRecord
from partita.inspection.figures import Figures
from partita.inspection.planes import view
from partita.inspection.reading import read_queries
from partita.inspection.snapshots import Snapshot
from partita.inspection.token_ids import labels_of
from partita.plots.head_details import head_details
from partita.plots.model_page import FIGURE_WORDS, write_inspection
from partita.plots.pattern_plots import plot_pattern
from partita.plots.plane_plots import plot_heads, plot_plane

pytest.importorskip("matplotlib")


def make(queries=60, keys=30, dim=5, seed=0, **options):
    rng = np.random.default_rng(seed)
    scale = np.linspace(2, 0.2, dim)
    return Snapshot(
        scale * rng.normal(size=(queries, dim)) + 1,
        rng.normal(size=(keys, dim)),
        rng.normal(size=(keys, 2)),
        0.5,
        **options,
    )


@pytest.mark.parametrize(
    "plane", ["principal", (3, 1), (np.zeros(5), np.arange(5.0), np.ones(5))], ids=["principal", "two", "own"]
)
def test_the_plane_is_a_true_slice(plane):
    snapshot = make()
    seen = view(snapshot, plane=plane, pixels=16)
    assert np.allclose(seen.axes @ seen.axes.T, np.eye(2))
    whole = snapshot.max_affine()
    inside = seen.window.sample(300, np.random.default_rng(1))
    lifted = seen.origin + inside @ seen.axes
    labels = whole.cell(lifted)
    assert seen.partition.cell(inside).tolist() == labels.tolist()
    assert np.allclose(seen.partition.margin(inside), whole.margin(lifted))
    area = sum(
        0.5 * abs(np.dot(p[:, 0], np.roll(p[:, 1], 1)) - np.dot(p[:, 1], np.roll(p[:, 0], 1)))
        for p in seen.shapes
        if len(p)
    )
    assert area == pytest.approx(float(np.prod(seen.window.hi - seen.window.lo)))  # the cells fill the window
    assert seen.margins.shape == (16, 16) and seen.cells.tolist() == read_queries(snapshot).cells.tolist()
    assert set(labels) <= {j for j, p in enumerate(seen.shapes) if len(p)}


def test_the_principal_plane_holds_most():
    snapshot = make()
    best = view(snapshot).held
    assert best > max(view(snapshot, plane=(i, j)).held for i in range(5) for j in range(i)) - 1e-9
    assert view(make(dim=2)).held == pytest.approx(1.0) and view(make(dim=1)).held == pytest.approx(1.0)
    assert view(make(queries=1)).points.shape == (1, 2)


@pytest.mark.parametrize(
    ("plane", "error", "words"),
    [
        ("best", UnsupportedError, "principal"),
        ((0, 0), UnsupportedError, "two different"),
        ((0, 5), UnsupportedError, "R\\^5"),
        ((np.zeros(5), np.ones(5), 2 * np.ones(5)), UnsupportedError, "parallel"),
        ((np.zeros(4), np.ones(4), np.arange(4)), ShapeError, "three of"),
    ],
)
def test_impossible_planes(plane, error, words):
    with pytest.raises(error, match=words):
        view(make(), plane=plane)


@pytest.mark.parametrize("suffix", [".svg", ".png", ".pdf"])
def test_pictures(suffix, tmp_path):
    plot_plane(view(make()), tmp_path / f"one{suffix}", title="a head")
    assert (tmp_path / f"one{suffix}").read_bytes()[:4] in (b"<?xm", b"\x89PNG", b"%PDF")
    views = {
        ("a", 0): view(make()),
        ("a", 2): view(make(dim=1)),
        ("a.long.name.of.some.layer", 1): view(make(causal=True)),
    }
    plot_heads(views, tmp_path / f"all{suffix}", notes={("a", 0): "0.5"})
    assert (tmp_path / f"all{suffix}").stat().st_size > 1000
    with pytest.raises(UnsupportedError, match=r"\.svg"):
        plot_plane(view(make()), tmp_path / "one.jpg")


def test_relative_biases_are_shown_for_one_position():
    bias = -0.3 * np.abs(np.arange(60)[:, None] - np.arange(30)[None])
    snapshot = make(mask=bias)
    first, last = view(snapshot, position=0, pixels=8), view(snapshot, pixels=8)
    assert not np.array_equal(first.margins, last.margins)
    assert np.array_equal(last.margins, view(snapshot, position=59, pixels=8).margins)


def test_long_inputs_make_small_files(tmp_path):
    seen = view(make(queries=4000, keys=4000), pixels=24)
    plot_plane(seen, tmp_path / "long.svg")
    assert (tmp_path / "long.svg").stat().st_size < 3_000_000


def test_a_page_that_needs_nothing_else(tmp_path):
    torch.manual_seed(0)
    model = nn.TransformerEncoder(
        nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 2, enable_nested_tensor=False
    ).eval()
    with torch.no_grad(), pa.inspect.capture(model) as heads:
        model(torch.randn(2, 12, 16))
    page = write_inspection(heads, tmp_path / "out", title="a <small> model")
    names = ["heads.csv", "heads.png", "heads.svg", "index.html", "report.json", "report.schema.json"]
    assert sorted(p.name for p in page.files) == names
    text = (tmp_path / "out" / "index.html").read_text()
    assert "a &lt;small&gt; model" in text and loaded(text) == []
    data = embedded(text)
    assert [layer["name"] for layer in data["layers"]] == ["layers.0.self_attn", "layers.1.self_attn"]
    assert len(data["heads"]) == 4 and all(h["audit"]["points"] for h in data["heads"])
    rows = {(r.layer, r.head): r for r in page.report.heads}
    for head in data["heads"]:
        report = rows[data["layers"][head["layer"]]["name"], head["head"]]
        for about, one, null in zip(data["figures"], head["figures"], head["null"]):
            for shown, key in ((one, about["name"]), (null, f"null_{about['name']}")):
                number = report.row().get(key, math.nan)  # no random head has linear programs
                assert shown is None if math.isnan(number) else shown == pytest.approx(number, rel=1e-5)
    bare = write_inspection(heads, tmp_path / "bare", figures=False)
    assert sorted(p.name for p in bare.files) == ["heads.csv", "index.html", "report.json", "report.schema.json"]


def embedded(text):
    """The data of a page."""
    return json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)[1])


def loaded(text):
    """Everything that a page could load: addresses of elements and of styles, and addresses of other hosts anywhere."""
    found = []

    class Addresses(HTMLParser):
        def handle_starttag(self, tag, attributes):
            given = dict(attributes)
            names = ("src", "href", "srcset", "data", "poster", "action", "background")
            found.extend(v for k, v in given.items() if k in names and not v.startswith(("data:", "#")))

    Addresses().feed(text)
    found += re.findall(r"url\((?!['\"]?data:)[^)]*\)|@import[^;]*", text)
    return found + [a for a in re.findall(r"https?://[^\s\"'<]+", text) if a != "http://www.w3.org/2000/svg"]


def test_loaded_addresses_are_noticed():
    page = '<img src="a.png"><style>@import "x.css"; a { b: url(c.png) }</style><a href="#d"><i style="b: url(data:x)">'
    assert loaded(page) == ["a.png", '@import "x.css"', "url(c.png)"]
    assert loaded("fetch('https://cdn.org/x.js')") == ["https://cdn.org/x.js"]


MODULE = """
import torch
from torch import nn

def encoder():
    torch.manual_seed(0)
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 1, enable_nested_tensor=False)

def inputs():
    return {"src": torch.ones(1, 5, 16), "mask": torch.ones(5, 5).triu(1).bool()}

def linear():
    return nn.Linear(16, 2)

def number():
    return 3

def broken():
    raise ValueError("oops")
"""


@pytest.fixture
def here(folder, monkeypatch, capsys):
    """The command in this process: arguments to exit code, stdout, stderr."""

    def run(*arguments):
        monkeypatch.chdir(folder)
        monkeypatch.setattr(sys, "argv", ["partita", "inspect", *arguments])
        monkeypatch.setattr(sys, "path", [str(folder), *sys.path])
        monkeypatch.delitem(sys.modules, "mine", raising=False)
        with pytest.raises(SystemExit) as stop:
            main()
        return stop.value.code, *capsys.readouterr()

    return run


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "mine.py").write_text(MODULE)
    np.save(tmp_path / "x.npy", np.random.default_rng(0).normal(size=(2, 9, 16)).astype(np.float32))
    return tmp_path


def test_the_command_writes_a_report_and_says_whose_code_it_runs(folder, here):
    code, printed, errors = here("mine:encoder", "--inputs", "x.npy", "--out", "report", "--no-figures")
    assert code == 0, errors
    assert "your own code" in errors and "layers.0.self_attn:1" in printed
    data = json.loads((folder / "report" / "report.json").read_text())
    assert len(data["heads"]) == 2 and data["heads"][0]["figures"]["queries"] == 18
    code, _, errors = here("mine:encoder", "--inputs", "x.npy", "--out", "report")
    assert code == 1 and "--overwrite" in errors


def test_the_command_takes_tokens_from_a_file(folder, here):
    (folder / "words.json").write_text(json.dumps([[f"w{i}" for i in range(9)]] * 2))
    arguments = ("mine:encoder", "--inputs", "x.npy", "--no-figures")
    code, _, errors = here(*arguments, "--out", "report", "--labels", "words.json")
    assert code == 0, errors
    assert embedded((folder / "report" / "index.html").read_text())["tokens"] == {"0": [f"w{i}" for i in range(9)]}
    for text in ("not JSON", '{"a": 1}', "[[1.5]]"):
        (folder / "words.json").write_text(text)
        code, _, errors = here(*arguments, "--out", "other", "--labels", "words.json")
        assert code == 64 and ("JSON" in errors or "per sequence" in errors) and not (folder / "other").exists()
    (folder / "words.json").write_text(json.dumps([["a"] * 8] * 2))
    expected = "sequence 0 has 8 tokens; expected 9, as in layers.0.self_attn. Give one list"
    for more in ((), ("--stream",)):
        code, _, errors = here(*arguments, *more, "--out", "other", "--labels", "words.json")
        assert code == 1 and expected in errors and not (folder / "other").exists()
        assert ("--labels words.json" in errors) == (not more)
    code, _, errors = here(*arguments, "--stream", "--tokens", "4", "--out", "other", "--labels", "words.json")
    assert code == 64 and "leave one of the three out" in errors and not (folder / "other").exists()


def test_the_command_takes_inputs_from_a_function_and_prints_json(here):
    arguments = ("--inputs", "mine:inputs", "--out", "r", "--no-figures", "--json", "--head", "1", "--tokens", "3")
    code, printed, _ = here("mine:encoder", *arguments)
    data = json.loads(printed)
    assert code == 0 and [h["head"] for h in data["heads"]] == [1] and data["heads"][0]["figures"]["queries"] == 3


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["mine:number", "--inputs", "x.npy"], 64, "expected an nn.Module"),
        (["mine:broken", "--inputs", "x.npy"], 1, "oops"),
        (["mine:nothing", "--inputs", "x.npy"], 64, "no function"),
        (["mien:encoder", "--inputs", "x.npy"], 64, "there is no module 'mien'"),
        (["mine", "--inputs", "x.npy"], 64, "MODULE:FUNCTION"),
        (["mine:encoder", "--inputs", "x.txt"], 64, "MODULE:FUNCTION"),
        (["mine:encoder", "--inputs", "y.npy"], 64, "y.npy"),
        (
            ["mine:encoder", "--inputs", "x.npy", "--layers", "decoder.*", "--head", "7"],
            64,
            "--layers decoder.* --head 7 matches no head of mine:encoder. Its layers are layers.0.self_attn (2 heads).",
        ),
        (["mine:linear", "--inputs", "x.npy"], 64, "mine:linear computed no attention that can be recorded"),
    ],
)
def test_the_command_refuses_with_reasons(folder, here, arguments, code, words):
    found, _, errors = here(*arguments, "--out", "r")
    assert found == code and words in errors and not (folder / "r").exists()
    assert "with capture" not in errors


def test_inputs_are_never_unpickled(tmp_path):
    from safetensors.numpy import save_file

    np.save(tmp_path / "bad.npy", np.array([object()], dtype=object))
    with pytest.raises(DomainError, match="arrays of numbers"):
        load_inputs(str(tmp_path / "bad.npy"))
    np.savez(tmp_path / "a.npz", src=np.ones((1, 2)))
    save_file({"src": np.ones((1, 2))}, tmp_path / "a.safetensors")
    for name in ("a.npz", "a.safetensors"):
        args, kwargs = load_inputs(str(tmp_path / name))
        assert args == () and torch.equal(kwargs["src"], torch.ones(1, 2, dtype=torch.float64))


def test_padding_has_no_cell_in_the_picture():
    rng, mask = np.random.default_rng(2), np.arange(30) < 6
    padded = make(queries=30, seed=3, mask=mask[None], padding=~mask)
    cut = Snapshot(padded.queries[:6], padded.keys[:6], padded.values[:6], padded.scale)
    seen, truth = view(padded), view(cut)
    assert seen.keys.tolist() == list(range(6)) and len(seen.shapes) == 30
    assert [p.tolist() for p in seen.shapes[:6]] == [p.tolist() for p in truth.shapes]
    assert not any(len(p) for p in seen.shapes[6:])
    assert np.array_equal(seen.margins, truth.margins)
    every = view(dataclasses.replace(padded, mask=None))
    assert any(len(p) for p in every.shapes[6:])  # without the mask these keys do have cells there

    bias = np.where(rng.random((30, 30)) < 0.7, rng.normal(size=(30, 30)), -np.inf)
    bias[4], bias[-1] = -np.inf, np.where(np.arange(30) < 9, bias[-1], -np.inf)
    row = make(queries=30, seed=3, mask=bias)
    assert view(row).keys.tolist() == np.flatnonzero(np.isfinite(bias[-1])).tolist()
    assert view(row).named.endswith("scored as query 29")
    with pytest.raises(UnsupportedError, match="query 4 sees no key"):
        view(row, position=4)


def unpacked(packed):
    """What head_details packed, by the description in its file."""
    raw = zlib.decompress(packed)
    length = int.from_bytes(raw[:4], "little")
    header = json.loads(raw[4 : 4 + length])
    arrays = {
        name: np.frombuffer(raw, f"<{kind}", size, 4 + length + offset)
        for name, (kind, offset, size) in header["arrays"].items()
    }
    return header, arrays


def details(*snapshots, labels=(), **options):
    record = HeadRecord("layer", 0, snapshots)
    report = pa.inspect.read(record)
    return unpacked(head_details(record, view(snapshots[0], pixels=12), report.heads[0].cells, labels, **options))


def softmax(snapshot):
    """Weights `(queries, keys)`, written out."""
    scores = snapshot.scale * np.einsum("qd,kd->qk", *(a.astype(float) for a in (snapshot.queries, snapshot.keys)))
    if snapshot.causal:
        scores = np.where(np.arange(scores.shape[1])[None] <= np.arange(len(scores))[:, None], scores, -np.inf)
    weights = np.exp(scores - scores.max(axis=1, keepdims=True))
    return scores, weights / weights.sum(axis=1, keepdims=True)


@pytest.mark.parametrize("causal", [False, True])
def test_what_the_page_holds_of_a_head_is_the_head(causal):
    snapshot = make(queries=30, keys=30, causal=causal)
    (scores, weights), shown = softmax(snapshot), view(snapshot, pixels=12)
    header, arrays = details(snapshot)
    assert np.cumsum(arrays["position"]).tolist() == list(range(30))
    assert arrays["cell"].tolist() == scores.argmax(axis=1).tolist()
    best = np.sort(scores, axis=1)
    assert np.allclose(arrays["margin"].astype(float), best[:, -1] - best[:, -2], rtol=1e-3)
    assert np.allclose(arrays["leakage"].astype(float), 1 - weights.max(axis=1), rtol=1e-3, atol=1e-4)
    assert np.abs(arrays["pattern"].reshape(30, 30) / 255 - np.sqrt(weights)).max() < 0.003
    side = shown.window.hi - shown.window.lo
    points = np.stack([arrays["x"], arrays["y"]], axis=1) / 4095 * side + shown.window.lo
    assert np.abs((points - shown.points) / side).max() < 1.3e-4
    corners, start = arrays["corners"].reshape(-1, 2) / 4095 * side + shown.window.lo, 0
    for key, size in zip(arrays["shapeKey"].cumsum(), arrays["shapeSize"]):
        assert np.abs((corners[start : start + size] - shown.shapes[key]) / side).max() < 1.3e-4
        start += size
    assert start == len(corners) and arrays["shade"].shape == (144,) and arrays["shade"].max() <= 63
    more = arrays["moreKey"].reshape(30, 3)
    for query in range(2, 30):
        second = np.argsort(-weights[query])[1]
        assert more[query, 0] == second or weights[query, second] < 1e-4
    stored, exact = arrays["weight"].reshape(30, 4).astype(float), -np.sort(-weights, axis=1)[:, :4]
    assert np.allclose(np.where(exact < 1e-4, 0, exact), stored, rtol=5e-3)  # two digits
    assert (np.diff(stored, axis=1) <= 0).all()
    decided = [row["margin"] for row in header["decided"]]
    assert decided == sorted(decided, reverse=True) and header["decided"][0]["query"] == np.argmax(
        np.where(np.isfinite(best[:, -2]), best[:, -1] - best[:, -2], -1)
    )
    assert header["cells"][0]["queries"] == np.bincount(scores.argmax(axis=1)).max()
    assert header["tokens"] == [] and header["sequences"] == []


def test_long_patterns_are_shown_in_blocks_and_queries_thinned():
    snapshot = make(queries=300, keys=200, dim=4)
    _, weights = softmax(snapshot)
    _, arrays = details(snapshot)
    blocks = np.stack([weights[i : i + 5] for i in range(0, 300, 5)]).mean(axis=1).reshape(60, 50, 4).sum(axis=2)
    assert np.abs(arrays["pattern"].reshape(60, 50) / 255 - np.sqrt(blocks)).max() < 0.003
    header, arrays = details(snapshot, queries=64)
    places = np.cumsum(arrays["position"])
    assert len(places) == 64 and places[0] == 0 and places[-1] == 299 and header["queries"] == 300


def test_tokens_are_named_where_they_are_known():
    words = [[f"a{i}" for i in range(30)], [f"b{i}" for i in range(30)]]
    header, _ = details(make(queries=30, seed=1), make(queries=30, seed=2), labels=words)
    assert header["keyTokens"] and header["queryTokens"] and len(header["sequences"]) == 2
    for row in header["decided"] + header["tied"]:
        prefix = "ab"[row["sequence"]]
        before, token, after = row["queryText"]
        assert token == f"{prefix}{row['query']}" and row["keyText"][1] == f"{prefix}{row['key']}"
        assert before == [f"{prefix}{i}" for i in range(max(0, row["query"] - 3), row["query"])] and len(after) <= 3
    assert sum(count for _, count in header["tokens"]) <= 60 and header["tokens"][0][0][0] in "ab"
    short, _ = details(make(queries=30), labels=[["too", "few"]])  # not these tokens: nothing is named wrongly
    assert not short["keyTokens"] and not short["queryTokens"] and short["decided"][0]["queryText"] is None


@pytest.mark.parametrize("shape", [{"queries": 1}, {"keys": 1}, {"queries": 1, "keys": 1}, {"dim": 1}])
def test_small_heads_have_details(shape):
    header, arrays = details(make(**shape))
    assert len(arrays["cell"]) == header["queries"]
    assert (header["decided"] == []) == (shape.get("keys") == 1)


def test_labels_of_tokens():
    ids = torch.tensor([[3, 1], [2, 2]])
    both = SimpleNamespace(convert_ids_to_tokens=lambda ids: [f"<{i}>" for i in ids])
    assert labels_of(ids, both) == [["<3>", "<1>"], ["<2>", "<2>"]]
    assert labels_of(np.array([3, 1]), SimpleNamespace(decode=lambda ids: f"d{ids[0]}")) == [["d3", "d1"]]
    assert labels_of((("a", "b"), [])) == [["a", "b"], []] and labels_of([]) == []
    for wrong in ("text", 3, [1.5], [["a", 1]], [["a"], "b"]):
        with pytest.raises(UnsupportedError, match="expected a list of strings"):
            labels_of(wrong)
    with pytest.raises(UnsupportedError, match="convert_ids_to_tokens"):
        labels_of([[1]], object())


def test_every_figure_has_words():
    names = {item.name for item in dataclasses.fields(Figures)}
    assert names <= set(FIGURE_WORDS)


def plain_head(rng, tokens=512):
    return Snapshot(*rng.normal(size=(3, tokens, 16)).astype("f4"), 0.5, causal=True)


def full_head(rng, tokens=512):
    """Every key has a cell in the window, which makes the most polygons: a Voronoi diagram in the plane."""
    queries, keys, values = rng.normal(size=(3, tokens, 2))
    return Snapshot(queries, keys, values, 40.0, mask=-20 * (keys**2).sum(axis=1)[None])


@pytest.mark.parametrize("kind", [plain_head, full_head])
@pytest.mark.parametrize("side", [3, pytest.param(12, marks=pytest.mark.slow)])
def test_the_page_of_many_heads_is_small(side, kind, tmp_path):
    rng, words = np.random.default_rng(0), [[f"token{i}" for i in range(512)]]
    heads = [HeadRecord(f"layers.{k}.attention", h, (kind(rng),)) for k in range(side) for h in range(side)]
    page = write_inspection(heads, tmp_path, figures=False, budget=0, tokens=words)
    if kind is full_head:
        assert sum(len(shape) > 0 for shape in view(heads[0].snapshots[0], pixels=8).shapes) > 450
    once = 100_000  # script, style and tokens, whatever the number of heads
    assert page.files[0].stat().st_size < once + (5_000_000 - once) * side**2 / 144


def test_pictures_of_patterns(tmp_path):
    weights = np.tril(np.ones((4, 4))) / np.arange(1, 5)[:, None]
    words = ["the", "$x$", "a_very_long_token_indeed", "\n"]
    pattern = SimpleNamespace(weights=weights, query_labels=words, key_labels=words)
    for suffix in (".svg", ".png", ".pdf"):
        figure = plot_pattern(pattern, tmp_path / f"p{suffix}", title="a head")
        assert (tmp_path / f"p{suffix}").stat().st_size > 1000
    shown = [label.get_text() for label in figure.axes[0].get_yticklabels()]
    assert shown == ["the", r"\$x\$", "a_very_long_tok…", "↵"]
    assert np.array_equal(figure.axes[0].images[0].get_array(), weights)
    long = SimpleNamespace(weights=np.full((100, 90), 1 / 90), query_labels=range(100), key_labels=range(90))
    assert len(plot_pattern(long).axes[0].get_xticklabels()) < 20
    with pytest.raises(ShapeError, match="label per row"):
        plot_pattern(SimpleNamespace(weights=weights, query_labels=words[:3], key_labels=words))
    with pytest.raises(UnsupportedError, match="pattern is int without weights"):
        plot_pattern(3)


def test_a_page_of_heads_that_were_read_while_the_model_ran(tmp_path):
    torch.manual_seed(0)
    with pa.inspect.capture(stream=True) as heads:
        pa.inspect.record(*(torch.randn(2, 3, 40, 8) for _ in range(3)), is_causal=True)
    page = write_inspection(heads, tmp_path)
    text = (tmp_path / "index.html").read_text()
    assert "the keys were not kept" in text and not (tmp_path / "heads.svg").exists()
    assert [head.figures.queries for head in page.report.heads] == [80, 80, 80]
    with pytest.raises(UnsupportedError, match="their keys were not kept"):
        pa.inspect.audit(heads, rule=pa.inspect.TopK(2))


def test_labels_that_do_not_fit_are_refused(tmp_path):
    torch.manual_seed(0)
    with pa.inspect.capture() as heads:
        pa.inspect.record(*(torch.randn(2, 1, 9, 4) for _ in range(3)))
    for wrong, words in (
        ([["x"] * 9, ["x"] * 8], "sequence 1 has 8 tokens; expected 9, as in attention. Give one list"),
        (["x"] * 9, "there are tokens for 1 sequence; expected at least 2, as in attention. Give one list"),
    ):
        with pytest.raises(ShapeError, match=words):
            write_inspection(heads, tmp_path / "a", figures=False, tokens=wrong)
    assert not (tmp_path / "a").exists()
    fitting = write_inspection(heads, tmp_path / "b", figures=False, tokens=[["x"] * 9] * 2)
    assert fitting.report.heads[0].roles.copies == 18
    assert embedded(fitting.files[0].read_text())["tokens"] == {"0": ["x"] * 9}


def test_labels_of_cross_attention_name_the_keys_or_the_queries(tmp_path):
    torch.manual_seed(0)
    with pa.inspect.capture() as heads:
        pa.inspect.record(torch.randn(1, 1, 5, 4), torch.randn(1, 1, 7, 4), torch.randn(1, 1, 7, 4))
    for count in (5, 7):
        page = write_inspection(heads, tmp_path / str(count), figures=False, tokens=["x"] * count)
        assert embedded(page.files[0].read_text())["tokens"] == {"0": ["x"] * count}
    with pytest.raises(ShapeError, match="sequence 0 has 6 tokens; expected 7, one per key, or 5, one per query"):
        write_inspection(heads, tmp_path / "6", figures=False, tokens=["x"] * 6)


def test_labels_come_too_late_for_heads_that_were_read_while_the_model_ran(tmp_path):
    with pa.inspect.capture(stream=True) as heads:
        pa.inspect.record(*(torch.randn(1, 1, 9, 4) for _ in range(3)))
    with pytest.raises(UnsupportedError, match="cannot be applied now"):
        write_inspection(heads, tmp_path / "a", figures=False, tokens=["x"] * 9)
