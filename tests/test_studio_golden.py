"""The numbers in the browser are those of Python.

Tolerances. float64 script: 1e-13 relative to the larger of 1 and the largest value, for functions; for heads 1e-13 plus 1e-15
times the exponents that matter, times the spread of the values. float32 shader, with u = 2^-24: 96 u relative to the largest
value, plus the change of the function when its input moves by 8 u of the box; for heads the bound that painter_gl.js states.
"""

import json
import math
from typing import Any

import numpy as np
import pytest
import torch
from browser_harness import PAGE, stored_function

from partita.functions import parse
from partita.functions.operations import OPERATIONS
from partita.heads.scattered_head import ScatteredHead
from partita.plots.colours import palette

UNIT = 2.0**-24
BOXES = {"unit": ([-1.0, -1.0], [1.0, 1.0]), "far": ([99.0, -3.0], [101.0, 5.0]), "positive": ([0.0, 0.5], [4.0, 3.0])}
EXPRESSIONS = [
    ("x + y", "unit"), ("x - 3*y", "unit"), ("x*y", "far"), ("x/(y^2 + 1)", "far"), ("-x", "unit"), ("x^2", "far"),
    ("x^3 - y^5", "unit"), ("(x + 3)^-2", "unit"), ("x^7*y^11", "unit"), ("(1 + x^2)^-3", "unit"), ("x^0", "unit"),
    ("exp(x*y)", "unit"), ("exp(-20*(x^2 + y^2))", "unit"), ("log(2 + x)", "unit"), ("log(x)", "positive"), ("sqrt(x)",
    "positive"),
    ("sqrt(x^2 + y^2)", "unit"), ("sin(3*x) + x*cos(2*y)", "unit"), ("sin(40*x)", "unit"), ("cos(x*y)", "far"),
    ("tan(x)", "unit"),
    ("tan(0.7*x + y)", "unit"), ("atan(5*x)", "unit"), ("atan(x/y)", "positive"), ("atan(1000*x + y)", "unit"),
    ("tanh(3*x)", "unit"), ("tanh(0.001*x)", "unit"),
    ("tanh(50*y)", "unit"), ("asinh(4*x)", "unit"), ("asinh(1e6*y)", "unit"), ("acosh(2 + x)", "unit"), ("acosh(1 + x)",
    "positive"), ("atanh(0.9*x)", "unit"),
    ("sigmoid(5*x)", "unit"), ("sigmoid(-200*y)", "unit"), ("erf(x)", "unit"), ("erf(4*x + y)", "unit"), ("erf(0.01*x)",
    "unit"), ("abs(x - y)", "unit"),
    ("min(x, y)", "unit"), ("max(x, y, 0.2)", "unit"), ("relu(x - 0.3)", "unit"), ("floor(3*x + 0.1)", "unit"),
    ("ceil(2*y + 0.3)", "unit"), ("clamp(2*x, -0.5, 0.7)", "unit"),
    ("where(x^2 + y^2 < 0.5, 1, 0)", "unit"), ("where(x > y and y > 0, x, -y)", "unit"), ("sign(x)", "unit"),
    ("step(x - 0.25)", "unit"), ("sinh(x) + cosh(y)", "unit"),
    ("x^0.3", "positive"), ("2^x", "unit"), ("sin(10*x)/(10*x)", "unit"), ("x*log(abs(x))", "unit"), ("tanh(x)/(2*x)",
    "unit"), ("erf(3*x)/x", "unit"),
    ("log(x)", "unit"), ("sqrt(y)", "unit"), ("1/x", "unit"), ("acosh(x)", "unit"), ("atanh(1.5*x)", "unit"),
    ("where(x, 1/0.0 - 1/0.0, y)", "unit"),
    ("1e-30*x + 1e-31", "unit"), ("1e20*x^3 + y", "unit"), ("pi*x + e*y", "unit"),
    ("0.1 + 0.2*x + 0.3*y + 0.4*x*y + 0.5*x^2", "unit"),
]  # fmt: skip


def graph_of(text: str) -> Any:
    return parse(text, ["x0", "x1"], {"x": "x0", "y": "x1"})


def grid(lo: list[float], hi: list[float], n: int) -> np.ndarray:
    """The middles of n × n squares, first axis fastest: the pixels of a pane."""
    share = (np.arange(n) + 0.5) / n
    x, y = (lo[i] + share * (hi[i] - lo[i]) for i in range(2))
    return np.stack([np.tile(x, n), np.repeat(y, n)], axis=1)


@pytest.fixture(scope="module")
def golden(browser: Any, static_page: Any) -> Any:
    """The static page with the modules under test as window.lab."""
    page = browser.new_page()
    page.goto(static_page.address)
    page.evaluate("""async () => {
        const [graph, head, state, colours, gl, canvas] = await Promise.all(["graph", "head", "state", "colours",
            "painter_gl", "painter_canvas"].map((n) => import(`./${n}.js`)));
        window.lab = { graph, head, state, colours, painter: gl.GlPainter.create(document.createElement("canvas")),
            fallback: new canvas.CanvasPainter(document.createElement("canvas")) };
    }""")
    yield page
    page.close()


def numbers(values: Any) -> np.ndarray:
    return np.array([float(v) for v in values])


SCRIPT = (
    """([graph, points]) => { const f = lab.graph.compileNodes(graph); return f && points.map((p) => String(f(p))); }"""
)
SHADER = """([graph, box, n]) => {
    if (!lab.painter.setFunction(graph)) return null;
    lab.painter.setHead(null); lab.painter.setField(null);
    return Array.from(lab.painter.read("function", n, box), String);
}"""


def test_every_operation_is_printed_and_tested():
    text = (PAGE / "graph.js").read_text()
    used = {node.operation for expression, _ in EXPRESSIONS for node in graph_of(expression).nodes}
    assert all(f"  {name}: [" in text for name in OPERATIONS)
    assert set(OPERATIONS) - used <= {"sum"}  # which the parser does not write; below
    assert len(EXPRESSIONS) >= 60


def wire(text: str) -> dict[str, Any]:
    return stored_function(text, "", [0, 0], [1, 1])["graph"]


def as_javascript(values: np.ndarray) -> np.ndarray:
    return np.asarray(values, float)


def test_functions_in_float64(golden: Any):
    for text, where in EXPRESSIONS:
        lo, hi = BOXES[where]
        points = np.concatenate([grid(lo, hi, 9), [lo, hi, [0.0, 0.5], [0.0, 0.0]]])
        expected = graph_of(text).evaluate(points)
        found = numbers(golden.evaluate(SCRIPT, [wire(text), points.tolist()]))
        assert np.array_equal(np.isnan(found), np.isnan(expected)), text
        finite = np.isfinite(expected)
        assert np.array_equal(found[~finite & ~np.isnan(expected)], expected[~finite & ~np.isnan(expected)]), text
        scale = np.maximum(1.0, np.abs(expected[finite]))
        assert (np.abs(found[finite] - expected[finite]) <= 1e-13 * scale).all(), text


def test_sums_and_hexadecimal_floats(golden: Any):
    nodes = [{"op": "input", "args": [], "params": [i]} for i in range(2)]
    nodes.append({"op": "const", "args": [], "params": [(1 / 3).hex()]})
    for arguments in ([0], [0, 1], [0, 1, 2], [2, 0, 1, 2, 0]):
        graph = {
            "inputs": 2,
            "nodes": [*nodes, {"op": "sum", "args": arguments, "params": []}],
            "outputs": [3],
            "shape": [],
        }
        (found,) = numbers(golden.evaluate(SCRIPT, [graph, [[0.25, -4.5]]]))
        assert found == sum([0.25, -4.5, 1 / 3][k] for k in arguments)
    hard = [0.1, -1.5, 5e-324, 2.2250738585072014e-308, 1.7976931348623157e308, 0.0, -0.0, 1.0, math.pi, 2.0**-1030 * 3]
    found = golden.evaluate("(texts) => texts.map((t) => String(lab.graph.parseFloatHex(t)))", [x.hex() for x in hard])
    assert [float(x) for x in found] == hard


def test_functions_in_the_shader(golden: Any):
    n = 24
    worst = 0.0
    for text, where in EXPRESSIONS:
        lo, hi = BOXES[where]
        points, graph = grid(lo, hi, n), graph_of(text)
        expected = graph.evaluate(points)
        raw = golden.evaluate(SHADER, [wire(text), {"lo": lo, "hi": hi}, n])
        assert raw is not None, text
        found = numbers(raw)
        reach = 8 * UNIT * max(map(abs, [*lo, *hi]))
        moved = [
            graph.evaluate(points + reach * np.array(way))
            for way in [(1, 0), (-1, 0), (0, 1), (0, -1), (1, 1), (-1, -1)]
        ]
        near = np.array([expected, *moved])
        safe = np.isfinite(near).all(axis=0) | np.isnan(near).all(
            axis=0
        )  # away from an edge of the set where f is defined
        assert safe.mean() > 0.9, text
        assert np.array_equal(np.isnan(found[safe]), np.isnan(expected[safe])), text
        finite = safe & np.isfinite(expected)
        if not finite.any():
            continue
        largest = np.abs(expected[finite]).max()
        allowed = 96 * UNIT * largest + 2 * np.abs(near - expected).max(axis=0)[finite]
        excess = (np.abs(found[finite] - expected[finite]) / allowed).max()
        worst = max(worst, excess)
        assert excess <= 1.0, (text, excess)
    assert worst > 0.01  # the bound is not empty: float32 is that coarse


def test_a_wrong_constant_is_noticed(golden: Any):
    graph = wire("sin(3*x) + x*cos(2*y)")
    changed = json.loads(json.dumps(graph))
    node = next(node for node in changed["nodes"] if node["op"] == "const")
    node["params"] = [(float.fromhex(node["params"][0]) * (1 + 1e-12)).hex()]
    points = grid(*BOXES["unit"], 5).tolist()
    right, wrong = (numbers(golden.evaluate(SCRIPT, [g, points])) for g in (graph, changed))
    assert np.abs(right - wrong).max() > 1e-13
    node["params"] = [(float.fromhex(node["params"][0]) * (1 + 1e-4)).hex()]
    box = dict(zip(("lo", "hi"), BOXES["unit"], strict=True))
    right, wrong = (numbers(golden.evaluate(SHADER, [g, box, 8])) for g in (graph, changed))
    assert np.abs(right - wrong).max() > 96 * UNIT * 2


def test_an_unknown_operation_is_left_to_the_server(golden: Any):
    graph = wire("sin(x)")
    graph["nodes"][-1]["op"] = "constructor"
    assert golden.evaluate("(g) => [lab.graph.compileNodes(g), lab.graph.glsl(g)]", graph) == [None, None]
    graph["nodes"][-1]["op"] = "bessel"
    assert golden.evaluate("(g) => [lab.graph.compileNodes(g), lab.graph.glsl(g)]", graph) == [None, None]


def some_heads() -> list[dict[str, Any]]:
    """About twenty heads: soft and hard, powers, affine values, one and two variables, large R, huge and tiny values."""
    rng = np.random.default_rng(7)
    heads = []
    for m, n, rate, spread, powers, slopes, lo, hi in [
        (2, 1, 1.0, 1.0, False, False, -1.0, 1.0), (2, 2, 10.0, 1.0, False, False, -1.0, 1.0),
        (2, 11, 60.0, 1.0, False, False, -1.0, 1.0), (2, 64, 400.0, 3.0, True, False, -1.0, 1.0),
        (2, 64, 400.0, 3.0, True, True, -1.0, 1.0), (2, 30, 1e4, 1.0, False, True, -1.0, 1.0),
        (2, 30, 1e6, 1.0, True, False, -1.0, 1.0), (2, 20, 5.0, 1e9, True, True, -1.0, 1.0),
        (2, 20, 5.0, 1e-12, True, False, -1.0, 1.0), (2, 12, 0.01, 1.0, False, False, -1.0, 1.0),
        (2, 25, 1e-4, 1.0, False, True, -1e3, 1e3), (2, 25, 1e6, 1.0, True, False, 1.0, 1.01),
        (2, 300, 900.0, 1.0, False, False, -1.0, 1.0), (1, 1, 3.0, 1.0, False, False, -1.0, 1.0),
        (1, 7, 60.0, 1.0, False, False, -1.0, 1.0), (1, 33, 2e3, 1.0, True, True, -1.0, 1.0),
        (1, 9, 1e7, 1.0, False, True, 0.0, 0.1), (1, 16, 0.5, 1e6, True, False, -5.0, 5.0),
        (2, 40, 120.0, 1.0, True, True, 99.0, 101.0), (2, 6, 1e3, 1e-3, False, True, -1.0, 1.0),
    ]:  # fmt: skip
        side = hi - lo
        centers = rng.uniform(lo, hi, (n, m))
        heads.append(
            {
                "rates": [rate] * m,
                "centers": centers.tolist(),
                "biases": (0.5 * rate * rng.uniform(-0.02, 0.02, n) * side**2).tolist() if powers else None,
                "values": (spread * rng.standard_normal(n)).tolist(),
                "slopes": (spread / side * rng.standard_normal((n, m))).tolist() if slopes else None,
                "dimension": m,
                "box": {"lo": [lo] * 2, "hi": [hi] * 2},
            }
        )
    return heads


def python_values(head: dict[str, Any], points: np.ndarray) -> np.ndarray:
    """partita's own ScatteredHead in float64."""
    m, n, rate = head["dimension"], len(head["values"]), head["rates"][0]
    powers = None if head["biases"] is None else torch.tensor(head["biases"], dtype=torch.float64) * (2 / rate)
    slopes = None if head["slopes"] is None else torch.tensor(head["slopes"], dtype=torch.float64).reshape(n, 1, m)
    made = ScatteredHead(
        torch.tensor(head["centers"], dtype=torch.float64), rate, torch.tensor(head["values"], dtype=torch.float64)[:, None],
        powers=powers, value_slopes=slopes, input_shapes=((m,),), output_shape=(1,),
    )  # fmt: skip
    return made(torch.tensor(points[:, :m], dtype=torch.float64)).numpy()[:, 0]


def parts(head: dict[str, Any], points: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Exponents and values V_j at the points, (points, keys)."""
    m = head["dimension"]
    apart = points[:, None, :m] - np.array(head["centers"])[None]
    exponents = -0.5 * head["rates"][0] * (apart**2).sum(-1) + (
        0.0 if head["biases"] is None else np.array(head["biases"])
    )
    values = np.array(head["values"]) + (0.0 if head["slopes"] is None else (apart * np.array(head["slopes"])).sum(-1))
    return exponents, np.broadcast_to(values, exponents.shape)


def relevant(exponents: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """At each point: the largest |E_j| and |V_j| among the keys that have any weight."""
    matters = exponents >= exponents.max(axis=1, keepdims=True) - 40
    return np.where(matters, np.abs(exponents), 0).max(axis=1), np.where(matters, np.abs(values), 0).max(axis=1)


HEAD_SCRIPT = """([wire, hard, points]) => { const h = lab.head.headOf(wire, {hard});
    return points.map((p) => String(lab.head.evaluate(h, p[0], p[1]))); }"""
HEAD_SHADER = """([wire, hard, n, painter]) => {
    const p = lab[painter]; p.setField(null); p.setFunction(null); p.setHead(lab.head.headOf(wire, {hard}));
    return ["head", "cells"].map((kind) => Array.from(p.read(kind, n, wire.box), String));
}"""


def test_heads_in_float64(golden: Any):
    heads = some_heads()
    assert len(heads) >= 20
    for number, head in enumerate(heads):
        points = grid(head["box"]["lo"], head["box"]["hi"], 9)
        expected = python_values(head, points)
        found = numbers(golden.evaluate(HEAD_SCRIPT, [head, False, points.tolist()]))
        exponent, value = relevant(*parts(head, points))
        assert (np.abs(found - expected) <= (1e-13 + 2e-15 * exponent) * value + 1e-300).all(), number
        exponents, values = parts(head, points)
        winner = exponents.argmax(axis=1)
        hard = numbers(golden.evaluate(HEAD_SCRIPT, [head, True, points.tolist()]))
        assert np.allclose(hard, values[np.arange(len(points)), winner], rtol=1e-13, atol=1e-13 * value.max())


def test_heads_in_the_shader(golden: Any):
    n, worst = 20, 0.0
    for number, head in enumerate(some_heads()):
        if head["dimension"] == 1:
            continue  # graphs are drawn by script
        lo, hi = head["box"]["lo"], head["box"]["hi"]
        points = grid(lo, hi, n)
        expected = python_values(head, points)
        soft, cells = (numbers(x) for x in golden.evaluate(HEAD_SHADER, [head, False, n, "painter"]))
        exponents, values = parts(head, points)
        middle, rate = (np.array(lo) + hi) / 2, head["rates"][0]
        size = np.abs(points - middle).max() + np.abs(np.array(head["centers"]) - middle).max()
        apart = np.abs(points[:, None] - np.array(head["centers"])[None]).max(-1)
        bias = (
            np.zeros(len(head["values"]))
            if head["biases"] is None
            else np.max(head["biases"]) - np.array(head["biases"])
        )
        coarse = UNIT * (4 * rate * size * apart + 4 * (0.5 * rate * 2 * apart**2 + bias))
        matters = exponents - exponents.max(axis=1, keepdims=True) >= -40
        off = np.where(matters, coarse, 0).max(axis=1)
        spread = np.where(matters, values, -np.inf).max(axis=1) - np.where(matters, values, np.inf).min(axis=1)
        slope = 0.0 if head["slopes"] is None else np.abs(head["slopes"]).max()
        largest = np.where(matters, np.abs(values), 0).max(axis=1)
        allowed = 2 * off * spread + 8 * UNIT * largest + 4 * UNIT * slope * size
        ratio = (np.abs(soft - expected) / allowed).max()
        worst = max(worst, ratio)
        assert ratio <= 1.0, (number, ratio)
        lead = np.sort(exponents, axis=1)
        clear = np.ones(len(points), bool) if exponents.shape[1] == 1 else lead[:, -1] - lead[:, -2] > 2 * off
        assert clear.mean() > 0.8
        assert np.array_equal(cells[clear], exponents.argmax(axis=1)[clear]), number
    assert worst > 0.003


def test_the_canvas_has_the_same_numbers(golden: Any):
    head = some_heads()[4]
    points = grid(head["box"]["lo"], head["box"]["hi"], 8)
    soft, cells = (numbers(x) for x in golden.evaluate(HEAD_SHADER, [head, False, 8, "fallback"]))
    assert np.abs(soft - python_values(head, points)).max() <= 2 * UNIT * np.abs(soft).max()
    assert np.array_equal(cells, parts(head, points)[0].argmax(axis=1))


def test_a_canvas_may_be_composed_before_a_new_function_is_painted(golden: Any):
    """A finer picture that is ready asks for a frame; the function may be another one by then, or the panes."""
    drawn = golden.evaluate(
        """([first, second]) => {
        const painter = lab.fallback, kinds = ["function", "cells", "head", "error"];
        const theme = {ink: "#111111", soft: "#888888", panel: "#eeeeee", background: "#ffffff", accent: "#0055cc",
            tints: Array(6).fill("#3366aa")};
        const scene = {box: {lo: [-1, -1], hi: [1, 1]}, valueRange: [-1, 1], errorRange: 1, tint: "key", theme, ratio: 1,
            panes: kinds.map((kind, k) => ({kind, x: 50 * k, y: 0, size: 50}))};
        painter.resize(200, 50, 1);
        painter.setField(null);
        const centre = () => Array.from(painter.context.getImageData(25, 25, 1, 1).data);
        painter.setFunction(first);
        painter.paint(scene);
        const old = centre();
        painter.setFunction(second);
        painter.compose();
        const kept = centre();
        painter.paint(scene);
        const out = [old, kept, centre()];
        painter.stop();
        return out;
    }""",
        [stored_function(text, "[-1,1]^2", [-1, -1], [1, 1])["graph"] for text in ("x - 0.9", "x + 0.9")],
    )
    old, kept, new = drawn
    assert old == kept != new


def test_cells_and_dead_keys(golden: Any):
    """Areas by clipping against counts on a fine grid; a key is dead where no point of the grid is its own."""
    for head in some_heads()[2:5]:
        areas, dead = golden.evaluate(
            "(w) => { const c = lab.head.cellsOf(lab.head.headOf(w), w.box); return [Array.from(c.areas), Array.from(c.dead)]; }",
            head,
        )
        exponents, _ = parts(head, grid(head["box"]["lo"], head["box"]["hi"], 400))
        counts = np.bincount(exponents.argmax(axis=1), minlength=len(areas)) / 400**2 * 4.0
        assert np.abs(np.array(areas) - counts).max() < 0.02
        assert sum(areas) == pytest.approx(4.0, rel=1e-9)
        assert ((np.array(dead) == 1) <= (counts == 0)).all()
        assert np.array(dead)[np.array(areas) == 0.0].all()
    line = {
        "rates": [5.0],
        "centers": [[-0.5], [0.0], [0.5]],
        "biases": [0.0, -10.0, 0.0],
        "values": [1, 2, 3],
        "slopes": None,
        "box": {"lo": [-1], "hi": [1]},
    }
    dead = golden.evaluate("(w) => Array.from(lab.head.cellsOf(lab.head.headOf(w), w.box).dead)", line)
    assert dead == [0, 1, 0]


def test_the_largest_error_seen(golden: Any):
    """Close to the true supremum of a hard head, from below: f = x on two cells has its largest error 1/2 at their ends."""
    seen = golden.evaluate("""() => {
        const box = {lo: [-1, -1], hi: [1, 1]}, head = lab.head.headOf({rates: [1, 1], centers: [[-0.5, 0], [0.5, 0]],
            biases: null, values: [-0.5, 0.5], slopes: null}, {hard: true});
        const search = new lab.head.ErrorSearch((p) => p[0], box, 2);
        return [search.coarse(head).seen, search.refine(head, lab.head.cellsOf(head, box)).seen];
    }""")
    assert 0.4 < seen[0] <= seen[1] <= 0.5
    assert seen[1] > 0.5 - 1e-8


def test_addresses_are_read_back(golden: Any):
    """A state, written and read, is the same up to six digits; written again, the same text."""
    found = golden.evaluate("""() => {
        const { initial, fromHash, toHash } = lab.state, out = [];
        const line = (n) => Array.from({length: n}, (_, k) => ({x: [Math.sin(k)], p: Math.cos(k) * 1e-7, v: k * 1e9 / 7,
            g: [-k / 3]}));
        const plane = (n) => Array.from({length: n}, (_, k) => ({x: [Math.sin(k), -Math.cos(k)], p: k % 3 / 7, v: -k,
            g: [0, k / 9]}));
        for (const patch of [{}, {f: "where(x < y & 1, a=b;c, 'é')", d: "[0,1] x [-2,3]"}, {R: "hard", keys: plane(64)},
            {d: "[-1,1]", keys: line(5), R: 1e-9},
            {tab: "lessons", lesson: "ghosts", overlay: {name: "chebyshev", value: 8}}, {cells: "affine",
                values: "affine", follow: false, tint: "key", show: ["error"], output: 3},
            {tab: "compile", tol: 1e-6, method: "soft", dtype: "float32"}, {d: "[0,5]^2"}]) {
            const state = {...initial(), ...patch}, text = toHash(state), {state: back, notes} = fromHash(text);
            out.push([state, back, notes, text, toHash(back)]);
        }
        return out;
    }""")
    for state, back, notes, text, again in found:
        assert notes == []
        assert text == again
        for name, value in state.items():
            if name == "keys" and "keys=" not in text:
                continue
            assert back[name] == _six(value), name
        assert len(text) < 4000


def _six(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _six(part) for name, part in value.items()}
    if isinstance(value, list):
        return [_six(part) for part in value]
    return float(f"{value:.6g}") if isinstance(value, float) else value


@pytest.mark.parametrize(
    "text",
    [
        "#R=-1",
        "#keys=1,2,x",
        "#tab=nowhere",
        "#f=%E0%A4%A",
        "#nothing=1",
        "#constructor=1",
        "#__proto__=1",
        "#keys=1,2;3",
        "#tol=0",
        "#output=-2",
        "#overlay=a b",
        "#show=all",
        "#R=NaN",
    ],
)
def test_bad_addresses_leave_a_note(golden: Any, text: str):
    state, notes = golden.evaluate("(t) => { const r = lab.state.fromHash(t); return [r.state, r.notes]; }", text)
    first = golden.evaluate("() => lab.state.initial()")
    assert len(notes) == 1
    assert state == first


def test_colours_are_those_of_the_plots(golden: Any):
    found = golden.evaluate("() => ({light: lab.colours.LIGHT, dark: lab.colours.DARK, maps: lab.colours.MAPS})")
    expected = palette()
    assert found == expected
    style = (PAGE / "style.css").read_text()
    blocks = {
        "light": style.split(":root {")[1].split("}")[0],
        "dark": style.split(':root[data-theme="dark"] {')[1].split("}")[0],
    }
    for theme, block in blocks.items():
        for name in ("background", "panel", "rule", "soft", "muted", "ink", "accent"):
            assert f"--{name}: {expected[theme][name]};" in block, (theme, name)
    automatic = style.split(':root:not([data-theme="light"]) {')[1].split("}")[0]
    assert automatic.split() == blocks["dark"].split()


def test_the_page_is_small_and_asks_for_nothing_else():
    files = [file for file in PAGE.iterdir() if file.is_file()]
    assert sum(file.stat().st_size for file in files) < 600_000
    for file in files:
        text = file.read_text()
        for word in ("eval(", "new Function", "innerHTML = `", "https://"):
            assert word not in text, (file.name, word)
