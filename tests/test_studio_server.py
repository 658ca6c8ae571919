"""The studio's server and the wire: what the page asks and gets."""

from __future__ import annotations

import io
import json
import math
import signal
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch

import partita as pa
from partita.errors import MissingExtraError, UnsupportedError
from partita.functions.graph import Graph
from partita.geometry import Box

pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")
from studio_process import COMMAND, ROOT, Running, all_gone

from partita.compiler.request_options import method_names
from partita.studio import serve
from partita.studio.jobs import MOST_KEYS
from partita.studio.server import METHODS_SAY
from partita.studio.wire import drawn_keys, graph_values, head_values

TEXT, DOMAIN = "sin(3*x) + x*cos(2*y)", "[-1,1]^2"


@pytest.fixture(scope="module")
def studio():
    with Running() as running:
        yield running
        workers = running.workers()
        assert running.stop(signal.SIGTERM) == (0, "", "") and all_gone(workers)


@pytest.fixture(scope="module")
def compiled(studio):
    """A compiled head."""
    found = studio.finished(studio.job(kind="compile", text=TEXT, domain=DOMAIN, tolerance=0.1, method="fitted"))
    assert found["state"] == "done", found
    return found["result"]


def on_the_wire(wire: dict, points: np.ndarray, output: int = 0) -> np.ndarray:
    """The formula of the wire, summed over every key."""
    wire = json.loads(json.dumps(wire))
    chosen = wire["outputs"][output] if "outputs" in wire else wire
    away = points[:, None, :] - np.array(wire["centers"])[None]
    exponents = -0.5 * (np.array(wire["rates"]) * away**2).sum(axis=2)
    if wire["biases"] is not None:
        exponents = exponents + np.array(wire["biases"])
    weights = np.exp(exponents - exponents.max(axis=1, keepdims=True))
    values = np.array(chosen["values"])
    if chosen["slopes"] is not None:
        values = values + (away * np.array(chosen["slopes"])).sum(axis=2)
    return (weights * values).sum(axis=1) / weights.sum(axis=1)


CASES = {
    "fitted": (TEXT, DOMAIN, 0.1),
    "hard": ("x", "[0,2]", 0.1),
    "tuned": ("sin(x) + y", "[0,1] x [-2,3]", 0.3),
    "corrected": ("sin(x) + y", "[0,1] x [-2,3]", 0.3),
    "affine": ("exp(x)*y", "[0,1] x [300,310]", 0.5),
    "adaptive": ("exp(-20*x^2)", "[-1,1]", 0.2),
    "pieces": ("abs(x) - max(y, 0.3)", DOMAIN, 0.05),
    "lines": ("log(1 + exp(x))", "[-40,60]", 0.01),
    "two_keys": ("y*tanh(2*x) + x", DOMAIN, 0.1),
    "convex": ("x^2 + y^2", DOMAIN, 0.3),
    "train": ("sin(x)*y", DOMAIN, 0.1),
    "paper": ("x/4", "[0,1]", 0.1),
}


NETWORKS = {"heads": "sin(x) + exp(y)", "layers": "exp(sin(3*x)*y)"}


@pytest.mark.parametrize("method", [m for m in method_names() if m != "auto" and m not in NETWORKS])
def test_the_wire_says_what_the_head_computes(method):
    text, domain, tolerance = CASES[method]
    c = pa.compile(text, domain, tolerance=tolerance, method=method)
    wire = head_values(c.head)
    assert wire is not None and wire["dimension"] == c.head.dimension
    points = Box.of(domain).sample(500, np.random.default_rng(0))
    expected = c.head.evaluate(torch.from_numpy(points))[:, 0].double().numpy()
    size = np.abs(expected).max() + np.abs(wire["values"]).max()
    assert np.abs(on_the_wire(wire, points) - expected).max() <= 1e-12 * size
    broken = {**wire, "rates": [2 * r for r in wire["rates"]]}  # negative control
    assert method in ("hard", "paper", "pieces") or np.abs(on_the_wire(broken, points) - expected).max() > 1e-9 * size


@pytest.mark.parametrize("method", NETWORKS)
def test_a_network_has_no_keys_to_send(method):
    c = pa.compile(NETWORKS[method], DOMAIN, tolerance=0.1, method=method)
    assert c.partition is None and head_values(c.head) is None


def test_the_wire_of_vectors_and_of_float32():
    c = pa.compile("sin(x), y, x*y", DOMAIN, tolerance=0.2, dtype=torch.float32)
    wire = head_values(c.head)
    points = Box.of(DOMAIN).sample(200, np.random.default_rng(1))
    points = points.astype(np.float32).astype(np.float64)
    expected = c.head.evaluate(torch.from_numpy(points).float()).double().numpy()
    for k in range(3):
        assert np.abs(on_the_wire(wire, points, k) - expected[:, k]).max() < 1e-5 * max(1, np.abs(wire["values"]).max())


def test_large_heads_are_not_sent():
    assert head_values(pa.head("x + y", DOMAIN, keys=(64, 64)).head) is not None
    assert head_values(pa.head("x + y", DOMAIN, keys=(65, 64)).head) is None and MOST_KEYS < 64 * 65
    assert head_values(pa.head("x + y + z", "[0,1]^3", keys=2).head) is None


def test_a_drawn_head_is_read_exactly():
    wire = {
        "rates": [4.0, 4.0],
        "centers": [[0.1, 0.2], [0.5, -1]],
        "biases": [0.5, 0],
        "values": [1, 2],
        "slopes": None,
    }
    keys = drawn_keys(wire, 2)
    assert keys.rate == 4 and keys.powers.tolist() == [0.25, 0] and keys.slopes is None
    for change, field in (
        ({"rates": [4.0, 5.0]}, "head.rates"),
        ({"rates": [4.0]}, "head.rates"),
        ({"rates": [-1, -1]}, "head.rates"),
        ({"centers": [[0.1], [0.2]]}, "head.centers"),
        ({"centers": []}, "head.centers"),
        ({"centers": [[0.0, 0.0]] * 5000}, "head.centers"),
        ({"values": [1]}, "head.values"),
        ({"values": [1, "2"]}, "head.values"),
        ({"values": [1, math.inf]}, "head.values"),
        ({"values": [1, True]}, "head.values"),
        ({"biases": [1, None]}, "head.biases"),
        ({"slopes": [[1, 1]]}, "head.slopes"),
    ):
        with pytest.raises(pa.PartitaError) as caught:
            drawn_keys(wire | change, 2)
        assert caught.value.where == field, change


def test_hello(studio):
    told = studio.get("/api/hello").json
    assert told["version"] == pa.__version__
    assert [m["name"] for m in told["methods"]] == list(METHODS_SAY) and set(METHODS_SAY) == set(method_names())
    assert told["limits"]["keys"] == MOST_KEYS and "c" not in told["downloads"]


def test_the_function_is_its_graph(studio):
    told = studio.post("/api/function", {"text": TEXT, "domain": "[-1,1] x [0,pi]"}).json
    assert "limits" not in told["graph"]
    graph = Graph.from_json(told["graph"])
    assert told["label"] == TEXT and told["dimension"] == 2 and told["outputs"] == 1
    assert told["box"] == {"lo": [-1, 0], "hi": [1, math.pi]}
    assert graph.evaluate([[0.5, 0.25]])[0] == pytest.approx(math.sin(1.5) + 0.5 * math.cos(0.5))


def test_the_graph_has_its_values_at_removable_singularities(studio):
    told = studio.post("/api/function", {"text": "sin(3*x)/x + y*log(y) + erf(2*x)/x + 1/(1+x)", "domain": DOMAIN}).json
    limits, nodes = told["graph"]["limits"], told["graph"]["nodes"]
    assert all(nodes[node]["op"] in ("div", "mul") and watched < node for node, watched, _ in limits)
    assert [float.fromhex(value) for _, _, value in limits] == [3.0, 0.0, pytest.approx(4 / math.sqrt(math.pi))]


@pytest.mark.parametrize(
    ("text", "domain", "where", "marked"),
    [
        ("sin(3*x) + foo(y)", DOMAIN, "function", "foo"),
        ("sin(3*x) + ", DOMAIN, "function", ""),
        ("x**70", DOMAIN, "function", "**"),
        ("x $ y", DOMAIN, "function", "$"),
        ("os:system", DOMAIN, "function", ":"),
        ("x", "[0,1] x [2,1]", "domain", "[2,1]"),
        ("x", "[0,1] x [ a+ ,1]", "domain", "a+"),
        ("x", "(0,1)", "domain", "(0,1)"),
        ("x", "[0,1]^2 as 3 tokens of 7", "domain", "as 3 tokens of 7"),
    ],
)
def test_errors_know_their_place(studio, text, domain, where, marked):
    answer = studio.post("/api/function", {"text": text, "domain": domain})
    error = answer.error
    assert answer.status == 422 and error["where"] == where
    typed = text if where == "function" else domain
    assert typed[error["start"] : error["end"]] == marked and error["end"] > error["start"]
    assert "\n" not in error["short"] and error["short"] in error["message"]


def test_samples_are_values_of_the_function(studio):
    points = [[0.5, 0.25], [-1, 1]]
    told = studio.post("/api/sample", {"text": f"{TEXT}, x", "domain": DOMAIN, "points": points, "output": 1}).json
    assert told["values"] == [0.5, -1]
    told = studio.post("/api/sample", {"text": "log(x)", "domain": "[-1,1]", "grid": [4]}).json
    assert told["values"] == [None, None, pytest.approx(math.log(0.25)), pytest.approx(math.log(0.75))]
    body = {"text": "x0 + 10*x1 + 100*x2", "domain": "[0,1]^3", "grid": [2, 1], "axes": [2, 0], "at": [0.1, 0.2, 0.3]}
    assert studio.post("/api/sample", body).json["values"] == pytest.approx([0.5 + 2 + 25, 0.5 + 2 + 75])
    for change in (
        {"output": 1},
        {"axes": [0, 0]},
        {"axes": [0, 3]},
        {"grid": [2, 0.5]},
        {"grid": [600, 600]},
        {"at": [1]},
    ):
        assert studio.post("/api/sample", body | change).status == 422, change
    assert studio.post("/api/sample", {"text": "x", "domain": DOMAIN}).error["where"] == "points"


def test_a_compiled_head(studio, compiled):
    c = pa.compile(TEXT, DOMAIN, tolerance=0.1, method="fitted", budget=30)
    assert compiled["bound"] == c.error_bound and compiled["kind"] == "proved" and compiled["tolerance_met"]
    assert [t["name"] for t in compiled["terms"]] == [t.name for t in c.certificate.terms]
    assert compiled["seen"] <= compiled["bound"] and len(compiled["seen_at"]) == 2
    assert compiled["head"] == head_values(c.head) and compiled["graph"] == graph_values(c.target.graph)
    rows = compiled["report"]["rows"]
    assert [row["method"] for row in rows if row["chosen"]] == ["fitted"]
    assert set(rows[0]) == set(compiled["report"]["columns"]) and compiled["explain"] == c.explain()
    body = {"head": compiled["head_id"], "grid": [5, 5], "output": 0}
    values = studio.post("/api/sample", body).json["values"]
    line = -1 + 2 * (np.arange(5) + 0.5) / 5
    points = np.stack([a.ravel() for a in np.meshgrid(line, line, indexing="ij")], axis=1)
    assert values == c.head.evaluate(torch.from_numpy(points))[:, 0].tolist()


HEAD = {
    "rates": [20.0, 20.0],
    "centers": [[-0.5, -0.5], [0.5, -0.5], [0.0, 0.5]],
    "biases": [0.0, 0.1, 0.2],
    "values": [-1.0, 0.5, 0.2],
    "slopes": [[1.0, 0.0], [0.0, 1.0], [0.0, 0.0]],
}


def test_the_bound_of_a_drawn_head(studio):
    told = studio.finished(studio.job(kind="bound", text=TEXT, domain=DOMAIN, head=HEAD, seconds=2))
    assert told["state"] == "done", told
    result = told["result"]
    points = Box.of(DOMAIN).sample(2000, np.random.default_rng(2))
    x, y = points.T
    errors = np.abs(np.sin(3 * x) + x * np.cos(2 * y) - on_the_wire(HEAD, points))
    assert result["kind"] == "proved" and errors.max() <= result["bound"] <= 4 * errors.max()
    assert result["seen"] <= result["bound"] and len(result["seen_at"]) == 2 and isinstance(result["complete"], bool)
    assert sum(t["value"] for t in result["terms"]) == pytest.approx(result["bound"]) and result["explain"]
    vector = {"kind": "bound", "text": f"0, {TEXT}", "domain": DOMAIN, "head": HEAD, "seconds": 2}
    second = studio.finished(studio.job(**vector, output=1))["result"]
    assert errors.max() <= second["bound"] <= 4 * errors.max()
    told = studio.finished(studio.job(**vector | {"head": {**HEAD, "values": [1, 2]}}))
    assert told["state"] == "failed" and told["error"]["where"] == "head.values", told


def test_every_refusal_of_a_compile_is_the_library_s(studio):
    told = studio.finished(studio.job(kind="compile", text="step(x)", domain="[-1,1]", tolerance=0.1))
    assert told["state"] == "failed" and told["error"]["type"] == "NotContinuousError", told
    for change, where in (
        ({"text": "sin(", "tolerance": 0.1}, "function"),
        ({"tolerance": 0.1, "method": "magic"}, "method"),
        ({"tolerance": 0.1, "dtype": "int8"}, "dtype"),
        ({"tolerance": "small"}, "tolerance"),
        ({"tolerance": 0.1, "norm": "two"}, "norm"),
    ):
        told = studio.finished(studio.job(**{"kind": "compile", "text": "x", "domain": "[0,1]"} | change))
        assert told["state"] == "failed" and told["error"]["where"] == where, told


def test_the_verdict_of_the_checker(studio, compiled):
    pytest.importorskip("partita_check")
    pytest.importorskip("flint")
    told = studio.finished(studio.job(kind="check", head=compiled["head_id"]))
    assert told["state"] == "done", told
    assert told["result"]["verdict"] == "verified" and "proved" in told["result"]["text"]
    assert "/" not in told["result"]["text"].splitlines()[0]  # no path of this machine


@pytest.mark.parametrize(("what", "begins"), [("head", b"PK"), ("svg", b"<?xml"), ("png", b"\x89PNG")])
def test_downloads(studio, compiled, what, begins, tmp_path):
    if what != "head":
        pytest.importorskip("matplotlib")
    told = studio.finished(studio.job(kind="export", head=compiled["head_id"], what=what))
    assert told["state"] == "done", told
    answer = studio.get(f"/api/downloads/{told['result']['download']}")
    assert answer.body.startswith(begins) and len(answer.body) == told["result"]["bytes"]
    assert answer.headers["Content-Disposition"] == f'attachment; filename="{told["result"]["name"]}"'
    if what == "head":
        zipfile.ZipFile(io.BytesIO(answer.body)).extractall(tmp_path)
        assert pa.load(tmp_path / "head").error_bound == compiled["bound"]


@pytest.mark.slow
def test_onnx(studio, compiled):
    pytest.importorskip("onnxscript")
    told = studio.finished(studio.job(kind="export", head=compiled["head_id"], what="onnx"))
    assert told["state"] == "done" and told["result"]["name"].endswith(".onnx"), told
    assert studio.get(f"/api/downloads/{told['result']['download']}").status == 200


def test_a_port_in_use_and_a_missing_extra(studio, monkeypatch):
    with pytest.raises(UnsupportedError, match="is in use"):
        serve(studio.port, browser=False)
    told = subprocess.run([*COMMAND, "--port", str(studio.port)], capture_output=True, text=True)
    assert told.returncode == 64 and "in use" in told.stderr and "Traceback" not in told.stderr and not told.stdout
    monkeypatch.setitem(sys.modules, "partita.studio.server", None)
    monkeypatch.delitem(sys.modules, "partita.studio.server")
    monkeypatch.setitem(sys.modules, "fastapi", None)
    with pytest.raises(MissingExtraError, match=r"the extra 'studio'"):
        serve(browser=False)


def test_the_server_itself_loads_nothing_heavy():
    code = (
        "import sys; import partita.studio.server; print([m for m in ('torch', 'numpy', 'scipy') if m in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "[]"


def test_the_address_as_json():
    with subprocess.Popen([*COMMAND, "--json"], stdout=subprocess.PIPE, text=True) as server:
        assert json.loads(server.stdout.readline())["address"].startswith("http://127.0.0.1:")
        server.send_signal(signal.SIGINT)
        assert server.wait(20) == 0 and server.stdout.read() == ""


def test_the_help_says_what_it_does():
    told = subprocess.run([*COMMAND[:4], "--help"], capture_output=True, text=True).stdout
    assert "--no-browser" in told and "--port" in told and "token" in told and "127.0.0.1" in told


def test_every_file_of_the_page_is_served(studio):
    for path in (ROOT / "partita" / "studio" / "page").iterdir():
        answer = studio.ask("GET", f"/{path.name}", headers={"X-Partita-Token": ""})
        assert answer.status == 200 and answer.body == Path(path).read_bytes(), path
