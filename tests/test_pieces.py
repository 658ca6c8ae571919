"""Piecewise affine functions: their pieces are exact, their heads are within the bound, and the bound is nearly attained.

The oracle is a second reading of the same random expression in Fractions, which knows nothing of pieces.
"""

import math
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
import torch
from flint import fmpq
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from scipy.optimize import linprog

from partita.errors import DomainError, PartitaError, ShapeError, SizeError, ToleranceError, UnsupportedError
from partita.functions.expressions import parse
from partita.functions.graph import Graph, GraphBuilder
from partita.functions.piecewise import recognise
from partita.functions.target import make_target
from partita.geometry.domains import Box, PointCloud
from partita.geometry.envelopes import _is_proof, leading, within
from partita.heads import ScatteredHead
from partita.methods.pieces import piecewise_affine, softest_pieces
from partita.proofs.soft_maximum import PieceFacts, pieces_terms

QUICK = settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
NUMBERS = st.sampled_from([0.0, 1.0, -1.0, 0.5, 2.0, -3.0, 0.1, -0.7, 1.25, 1e8, 1e-8])


def unit(m):
    return Box([-1.0] * m, [1.0] * m)


def build(function, box, tolerance, dtype=torch.float64):
    target = make_target(function, box)
    recipe = softest_pieces(target.graph, target.domain.bounding_box(), tolerance=tolerance, dtype=dtype)
    return target, recipe, piecewise_affine(target, recipe)


def rational(x):
    return fmpq(*float(x).as_integer_ratio())


def exact_values(graph, points):
    """The graph by the rules of arithmetic on rational numbers, `(n, out)`: no pieces, no maxima of sums."""
    rules = {
        "add": lambda a, b: a + b,
        "sub": lambda a, b: a - b,
        "mul": lambda a, b: a * b,
        "div": lambda a, b: a / b,
        "neg": lambda a: -a,
        "sum": lambda *a: sum(a, fmpq(0)),
        "abs": abs,
        "max": max,
        "min": min,
        "relu": lambda a: max(a, fmpq(0)),
    }
    out = []
    constants = [rational(node.parameters[0]) if node.operation == "const" else None for node in graph.nodes]
    for x in points:
        values = []
        for node, constant in zip(graph.nodes, constants):
            a = [values[k] for k in node.arguments]
            if node.operation == "input":
                values.append(rational(x[node.parameters[0]]))
            elif constant is not None:
                values.append(constant)
            elif node.operation == "clamp":
                lo, hi = map(rational, node.parameters)
                values.append(min(max(a[0], lo), hi))
            elif node.operation == "pow":
                values.append(a[0] ** node.parameters[0])
            else:
                values.append(rules[node.operation](*a))
        out.append([Fraction(int(values[k].p), int(values[k].q)) for k in graph.outputs])
    return out


def error(construction, graph, points):
    """`|net − f|` at the points, f exact, `(n, out)`."""
    head = construction.head
    with torch.no_grad():
        got = head.evaluate(torch.from_numpy(np.ascontiguousarray(points)).to(head.dtype)).double().tolist()
    want = exact_values(graph, points.tolist())
    return np.array([[abs(float(Fraction(g) - w)) for g, w in zip(*rows)] for rows in zip(got, want)])


def near_kinks(graph, box, rng, count):
    """Points around where f bends on random segments: bisection on the curvature of f itself, then a little to either side."""
    lo, hi = box.lo.ravel(), box.hi.ravel()
    points = []
    for _ in range(count):
        a, b = box.sample(2, rng)
        for _ in range(45):
            middle, quarter = (a + b) / 2, [(3 * a + b) / 4, (a + 3 * b) / 4]
            f = graph.evaluate(np.array([a, quarter[0], middle, quarter[1], b])).reshape(5, -1)
            bend = [np.abs(f[0] - 2 * f[1] + f[2]).max(), np.abs(f[2] - 2 * f[3] + f[4]).max()]
            a, b = (a, middle) if bend[0] >= bend[1] else (middle, b)
        direction = rng.standard_normal(len(lo)) * (hi - lo)
        steps = np.concatenate([-np.geomspace(1e-13, 1, 60), [0.0], np.geomspace(1e-13, 1, 60)])
        points.append(np.clip(middle + steps[:, None] * direction, lo, hi))
    return np.concatenate(points)


def attacked(construction, graph, box, *, samples=300, kinks=30):
    """The largest error of any output at random points, corners and kinks."""
    rng = np.random.default_rng(0)
    points = [box.sample(samples, rng), box.corners(64), near_kinks(graph, box, rng, kinks)]
    return error(construction, graph, np.concatenate(points)).max()


def relu_network(inputs, widths, seed):
    """A graph of a random network, the last layer affine."""
    rng, builder = np.random.default_rng(seed), GraphBuilder(inputs)
    layer = [builder.add("input", parameters=(i,)) for i in range(inputs)]

    def affine():
        terms = [builder.add("mul", builder.add("const", parameters=(float(rng.normal()),)), node) for node in layer]
        return builder.add("sum", *terms, builder.add("const", parameters=(float(rng.normal() / 2),)))

    for width in widths:
        layer = [builder.add("relu", affine()) for _ in range(width)]
    return builder.finish([affine()], ())


# the pieces


@st.composite
def graphs(draw, inputs, outputs=1):
    builder = GraphBuilder(inputs)
    nodes = [builder.add("input", parameters=(i,)) for i in range(inputs)]
    for _ in range(draw(st.integers(2, 7))):
        operation = draw(
            st.sampled_from(["add", "sub", "neg", "mul", "div", "abs", "max", "min", "relu", "clamp", "sum"])
        )
        first, second, third = (draw(st.sampled_from(nodes)) for _ in range(3))
        constant = builder.add("const", parameters=(draw(NUMBERS),))
        constant = builder.add("neg", constant) if draw(st.booleans()) else constant
        if operation == "mul":
            node = builder.add("mul", *draw(st.permutations([first, constant])))
        elif operation == "div":
            node = builder.add("div", first, builder.add("const", parameters=(draw(NUMBERS.filter(bool)),)))
        elif operation == "clamp":
            node = builder.add("clamp", first, parameters=tuple(sorted([draw(NUMBERS), draw(NUMBERS)])))
        elif operation == "sum":
            node = builder.add("sum", first, second, third, constant)
        elif operation in ("neg", "abs", "relu"):
            node = builder.add(operation, first)
        else:
            node = builder.add(operation, first, draw(st.sampled_from([second, constant])))
        nodes.append(node)
    return builder.finish([nodes[-1 - k] for k in range(outputs)], () if outputs == 1 else (outputs,))


def recognised(graph, box):
    try:
        return recognise(graph, box)
    except SizeError:
        assume(False)


@QUICK
@given(st.data(), st.integers(1, 4), st.integers(0, 1000))
def test_pieces_are_the_function(data, inputs, seed):
    graph = data.draw(graphs(inputs, outputs=data.draw(st.integers(1, 2))))
    lo = data.draw(st.sampled_from([-1.0, 0.25, 1e6, -3e-7]))
    box = Box([lo] * inputs, [lo + 2.0 ** data.draw(st.integers(-3, 3))] * inputs)
    found = recognised(graph, box)
    points = np.concatenate([box.sample(20, np.random.default_rng(seed)), box.corners(16)]).tolist()
    for x, want in zip(points, exact_values(graph, points)):
        assert list(found.evaluate(x)) == want  # exactly, as Fractions


def test_a_wrong_piece_is_noticed():
    found = recognise(parse("max(x, y)", ["x", "y"]), unit(2))
    tampered = replace(found, convex=(found.convex[0][:1],))
    x = [[0.5, -0.5], [-0.5, 0.5]]
    assert [found.evaluate(p)[0] for p in x] == [Fraction(1, 2)] * 2
    assert [tampered.evaluate(p)[0] for p in x] != [Fraction(1, 2)] * 2


@pytest.mark.parametrize(
    ("text", "convex", "concave"),
    [
        ("3*x - 2*y/7 + 1", 1, 1),
        ("abs(x)", 2, 1),
        ("-abs(x)", 1, 2),
        ("-2*max(x, -0.5)", 1, 2),
        ("abs(x) + abs(y) + abs(x - y)", 6, 1),  # of eight patterns of signs two are idle
        ("max(x, y) + min(x, y)", 1, 1),  # x + y
        ("abs(x) - abs(x) + y", 1, 1),
        ("relu(x) - 2*relu(x - 0.5) + relu(x - 1)", 2, 2),  # the last hinge opens at the end of the box
        ("clamp(x, -2, 2)", 1, 1),
        ("max(x + 5, y)", 1, 1),
        ("max(max(x, y), max(x, -y))", 3, 1),
        ("x^1 + 2^-3*abs(y)^1 + x^0", 2, 1),
        ("(1/3 + 2*3)^2*abs(x)/(0.5 - 2)", 1, 2),
        ("-(1 + 1)*abs(x)*min(-(2 - 1), 7)", 2, 1),
    ],
)
def test_idle_pieces_are_left_out(text, convex, concave):
    found = recognise(parse(text, ["x", "y"]), unit(2))
    assert (len(found.convex[0]), len(found.concave[0])) == (convex, concave)


@pytest.mark.parametrize(
    "text",
    [
        "sin(x)",
        "x*y",
        "1/x",
        "x^2",
        "exp(1)*x",
        "sqrt(2)*x",
        "where(x, x, y)",
        "x/(1 - 1)",
        "0^-1 + x",
        "max(x, tanh(y))",
    ],
)
def test_what_is_not_piecewise_affine_is_refused(text):
    graph = parse(text, ["x", "y"])
    with pytest.raises(UnsupportedError):
        recognise(graph, unit(2))
    with pytest.raises(UnsupportedError):
        softest_pieces(graph, unit(2), tolerance=0.1, dtype=torch.float64)


def test_too_many_pieces_and_too_long_numbers_are_refused():
    wide = " + ".join(f"abs(x{i})" for i in range(13))
    names = [f"x{i}" for i in range(13)]
    with pytest.raises(SizeError):
        recognise(parse(wide, names), unit(13))
    with pytest.raises(SizeError):
        recognise(parse("x*" + "*".join(["0.1^64"] * 12), ["x"]), unit(1))
    with pytest.raises(ShapeError):
        recognise(parse("x", ["x"]), unit(2))


def test_unused_nodes_do_not_matter():
    bent = GraphBuilder(1)
    bent.add("sin", bent.add("input", parameters=(0,)))
    graph = Graph(1, tuple(bent.nodes), (0,), ())
    assert recognise(graph, unit(1)).evaluate([0.25]) == (Fraction(1, 4),)


# which pieces matter


def lead_by_scipy(rows, t, others):
    """`max_z (row_t − max others)` over the cube, by another solver, in floats."""
    m = rows.shape[1] - 1
    bounds = [(-1, 1)] * m + [(None, None)]
    a = np.array([[*(rows[k, 1:] - rows[t, 1:]), 1.0] for k in others], dtype=float)
    b = np.array([rows[t, 0] - rows[k, 0] for k in others], dtype=float)
    return -linprog(c=[0.0] * m + [-1.0], A_ub=a, b_ub=b, bounds=bounds).fun


@pytest.mark.parametrize(("m", "count", "seed"), [(1, 12, 0), (2, 25, 1), (3, 30, 2), (4, 20, 3)])
def test_leading_pieces_are_those_that_a_linear_program_finds(m, count, seed):
    rng = np.random.default_rng(seed)
    slopes = rng.integers(-9, 10, (count, m))
    rows = np.column_stack([-(slopes**2).sum(axis=1) // 12 + rng.integers(-3, 4, count), slopes]).astype(object)
    rows = np.concatenate([rows, rows[:3]])  # repeated ones are to be listed once
    kept = leading(rows)
    assert len(set(map(tuple, rows[kept]))) == len(kept)
    for t in range(len(rows)):
        others = [k for k in kept if tuple(rows[k]) != tuple(rows[t])]
        ahead = lead_by_scipy(rows, t, others)
        same = any(tuple(rows[k]) == tuple(rows[t]) for k in kept)
        assert (ahead > 1e-7) <= same  # nothing needed is left out
        assert same <= (ahead > -1e-7)  # nothing idle is kept, ties aside


@pytest.mark.parametrize(("m", "seed"), [(1, 0), (2, 1), (3, 2)])
def test_what_trails_is_left_out_and_nothing_else(m, seed):
    rng = np.random.default_rng(seed)
    slopes = rng.integers(-9, 10, (40, m))
    rows = np.column_stack([-(slopes**2).sum(axis=1) // 12 + rng.integers(-9, 4, 40), slopes]).astype(object)
    for margin in (Fraction(1, 3), Fraction(4), Fraction(10**9)):
        kept = set(within(rows, margin).tolist())
        for t in range(40):
            best = lead_by_scipy(rows, t, [k for k in range(40) if k != t])
            assert (best > 1e-7 - float(margin)) <= (t in kept)
        assert margin < 10 or len(kept) == 40
    assert len(within(rows, Fraction(1, 3))) < 40  # the margin does leave out some


def test_a_wrong_proof_is_not_believed():
    """1 on average of x and −x is refused, 0 is accepted; a negative share is not."""
    others = np.array([[0, 1], [0, -1]], dtype=object)
    assert _is_proof(np.array([0, 0], dtype=object), others, 0, {0: 1, 1: 1})
    assert not _is_proof(np.array([1, 0], dtype=object), others, 0, {0: 1, 1: 1})
    assert not _is_proof(np.array([0, 0], dtype=object), others, 1, {0: 1, 1: 1})
    assert not _is_proof(np.array([0, 3], dtype=object), others, 0, {0: 2, 1: -1})
    assert not _is_proof(np.array([-9, 0], dtype=object), others, 0, {0: 0, 1: 0})


# the heads

CASES = [
    ("kink", "abs(x0 - 0.3)", unit(1), 1e-2, torch.float64),
    ("kink single", "abs(x0 - 0.3)", unit(1), 1e-2, torch.float32),
    ("sharp", "abs(x0 - 0.3)", unit(1), 1e-10, torch.float64),
    ("hat", "relu(x0) - 2*relu(x0 - 0.5) + relu(x0 - 1)", Box([-1], [2]), 1e-3, torch.float64),
    ("hat soft", "relu(x0) - 2*relu(x0 - 0.5) + relu(x0 - 1)", Box([-1], [2]), 0.3, torch.float64),
    ("clamp", "clamp(3*x0, -1, 1) - x0/3", Box([-1], [2]), 1e-3, torch.float32),
    ("norm", "abs(x0) + abs(x1) + abs(x0 - x1)", unit(2), 1e-3, torch.float64),
    ("nest", "max(min(x0, x1), min(-x0, 0.3*x1 + 0.1))", unit(2), 1e-3, torch.float64),
    ("median", "max(min(x0, x1), min(max(x0, x1), x2))", unit(3), 1e-3, torch.float64),
    ("four", "max(max(x0, x1), max(x2, x3)) - min(x0, x3)", unit(4), 1e-2, torch.float64),
    ("vector", "abs(x0), max(x0, x1, -x1) - abs(x1), x0/3", unit(2), 1e-3, torch.float64),
    ("vector single", "abs(x0), max(x0, x1) - abs(x1), x0/3", unit(2), 1e-2, torch.float32),
    ("far", "abs(x0 - 1000000.3)", Box([1e6], [1e6 + 1]), 1e-6, torch.float64),
    ("far single", "abs(x0 - 1000000.3)", Box([1e6], [1e6 + 1]), 0.2, torch.float32),
    ("unequal", "abs(x0/1000000 - x1)", Box([-1e6, -1], [1e6, 1]), 1e-6, torch.float64),
    ("steep", "100000000*abs(x0 - 0.1)", unit(1), 1e-3, torch.float64),
    ("flat", "0.00000001*abs(x0 - 0.1)", unit(1), 1e-12, torch.float64),
    ("steep and flat", "100000000*abs(x0), 0.00000001*abs(x1)", unit(2), 1e-5, torch.float64),
    ("network 1", relu_network(1, (3, 3), 3), unit(1), 1e-3, torch.float64),
    ("network 2", relu_network(2, (3, 3), 3), unit(2), 1e-3, torch.float64),
    ("network 3", relu_network(3, (3, 3), 3), unit(3), 1e-2, torch.float32),
    ("network 4", relu_network(4, (3, 3), 3), unit(4), 1e-3, torch.float64),
]


@pytest.mark.parametrize(("function", "box", "tolerance", "dtype"), [c[1:] for c in CASES], ids=[c[0] for c in CASES])
def test_the_bound_holds_at_kinks_and_elsewhere(function, box, tolerance, dtype):
    function = function.replace("max(x0, x1, -x1)", "max(x0, max(x1, -x1))") if isinstance(function, str) else function
    target, recipe, built = build(function, box, tolerance, dtype)
    certificate = built.certificate
    assert certificate.kind == "proved" and certificate.theorem == "max-affine-values"
    assert certificate.error_bound == recipe.error_bound <= tolerance
    assert built.head.num_parameters == recipe.parameters and built.head.num_keys == recipe.keys
    assert built.head.dtype == dtype and built.partition.num_cells == recipe.keys
    assert attacked(built, target.graph, box) <= certificate.error_bound
    again = pieces_terms(built.head, target.graph, box)
    assert [(t.name, t.value) for t in again] == [(t.name, t.value) for t in certificate.terms]


@QUICK
@given(st.data(), st.integers(1, 3), st.sampled_from([torch.float64, torch.float32]))
def test_random_functions_stay_within_their_bound(data, inputs, dtype):
    graph = data.draw(graphs(inputs, outputs=data.draw(st.integers(1, 2))))
    box = Box([-1.0] * inputs, [0.5] * inputs)
    try:
        scale = max(1e-3, float(np.abs(graph.evaluate(box.corners())).max()))
        _, _, built = build(graph, box, scale * 10.0 ** -data.draw(st.integers(1, 3)), dtype)
    except (SizeError, ToleranceError, DomainError):
        assume(False)
    assert attacked(built, graph, box, samples=50, kinks=8) <= built.certificate.error_bound


def lambert(t):
    """w with w·e^w = t, by bisection."""
    lo, hi = 0.0, 1.0 + t
    for _ in range(200):
        lo, hi = ((lo + hi) / 2, hi) if (lo + hi) / 2 * math.exp((lo + hi) / 2) < t else (lo, (lo + hi) / 2)
    return lo


def test_the_bound_is_attained_at_a_kink():
    """N = 2: the worst error beside the kink of |x| is W(1/e)/R = 0.2785/R, and the bound is that."""
    target, _, built = build("abs(x)", unit(1), 1e-3)
    rate = built.certificate.terms[0].inputs["rate"]
    x = np.linspace(-10, 10, 20001)[:, None] / rate
    worst = error(built, target.graph, x).max()
    assert worst == pytest.approx(lambert(1 / math.e) / rate, rel=1e-6)
    assert 0.99 * built.certificate.error_bound <= worst <= built.certificate.error_bound
    assert lambert(1 / math.e) == pytest.approx(0.2785, abs=1e-4)


@pytest.mark.parametrize("pieces", [3, 10, 60])
def test_many_pieces_need_the_larger_constant(pieces):
    """N pieces of which N − 1 trail together lose W((N−1)/e)/R; with the constant of two pieces the bound would be false."""
    slopes = np.random.default_rng(pieces).uniform(0.5, 1.5, (pieces - 1, 6))
    builder = GraphBuilder(6)
    inputs = [builder.add("input", parameters=(i,)) for i in range(6)]
    top = builder.add("const", parameters=(0.0,))
    for row in slopes:
        terms = [builder.add("mul", builder.add("const", parameters=(float(a),)), x) for a, x in zip(row, inputs)]
        top = builder.add("max", top, builder.add("sum", *terms, builder.add("const", parameters=(-1.0,))))
    graph = builder.finish([top], ())
    target, _, built = build(graph, Box([-0.5] * 6, [0.5] * 6), 0.5)
    rate = built.certificate.terms[0].inputs["rate"]
    points = np.linspace(-0.5, 0.5, 400)[:, None] * np.linspace(0.9, 1.1, 6)
    worst = error(built, target.graph, np.clip(points, -0.5, 0.5)).max()
    assert worst <= built.certificate.error_bound
    assert worst > 1.5 * lambert(1 / math.e) / rate  # negative control: the term for two pieces is refuted


def test_an_affine_function_is_one_key_and_only_rounds():
    for text, box in [
        ("3*x - 2*y + 0.1", unit(2)),
        ("x/3 + y - 5", Box([1e6, -1], [1e6 + 1, 1])),
        ("0*x + 7", unit(2)),
    ]:
        target, recipe, built = build(text, box, 1e-6)
        scale = np.abs(target(box.corners())).max()
        assert (recipe.keys, recipe.rate) == (1, 1.0)
        assert attacked(built, target.graph, box) <= built.certificate.error_bound <= 1e-14 * (1 + scale)
        assert built.certificate.terms[0].value == 0
    _, _, single = build("3*x - 2*y + 0.1", unit(2), 1e-4, torch.float32)
    assert single.certificate.error_bound <= 1e-5


def test_shapes_are_the_targets():
    box = Box.sequence(-1, 1, tokens=3, dim=1)
    _, _, built = build("relu(x0 - x1); abs(x2); x1", box, 1e-2)
    z = torch.from_numpy(box.sample(5, np.random.default_rng(0))).reshape(5, 3, 1)
    want = torch.stack([torch.relu(z[:, 0] - z[:, 1]), z[:, 2].abs(), z[:, 1]], dim=1)
    assert built.head(z).shape == (5, 3, 1) and (built.head(z) - want).abs().max() <= 1e-2
    pair = (Box([-1], [1]), Box([0], [2]))
    _, _, crossed = build("max(k0, q0)", pair, 1e-2)
    assert crossed.head(torch.tensor([[0.5]]), torch.tensor([[1.5]])).item() == pytest.approx(1.5, abs=1e-2)


def test_clouds_are_covered_by_their_bounding_box():
    cloud = PointCloud(np.random.default_rng(0).normal(size=(50, 3)), fill_distance=0.1)
    target, _, built = build("abs(x0) - max(x1, x2)", cloud, 1e-2)
    points = np.concatenate([cloud.sample(300, np.random.default_rng(1)), cloud.corners()])
    assert error(built, target.graph, points).max() <= built.certificate.error_bound <= 1e-2


# the terms, one by one


def exact_head(built, target, recipe, points):
    """Σ softmax(R·(g_i + h_j)) (g_i − h_j) over all pairs of pieces, from the exact pieces, in extended precision."""
    rate = np.longdouble(built.certificate.terms[0].inputs["rate"])
    p = recipe.pieces
    t = (points.astype(np.longdouble) - np.array(p.middle, dtype=float)) / np.array(p.radii, dtype=float)
    columns = []
    for g, h in zip(p.convex, p.concave):
        top = [rows[:, 0].astype(np.longdouble) + t @ rows[:, 1:].T.astype(np.longdouble) for rows in (g, h)]
        weights = [np.exp(rate * (y - y.max(axis=1, keepdims=True))) for y in top]
        means = [(w * y).sum(axis=1) / w.sum(axis=1) for w, y in zip(weights, top)]
        columns.append(means[0] - means[1])
    return np.stack(columns, axis=1)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize(
    "function", ["abs(x0) + abs(x1 - x0) - abs(x1)", relu_network(2, (3, 3), 3), "abs(x0), x0 + relu(x1)"]
)
def test_rounding_terms_cover_what_the_dtype_does(function, dtype):
    """Head against the exact softmax of the exact pieces at points that the dtype holds: all terms but temperature and input."""
    box = unit(2)
    target, recipe, built = build(function, box, 1e-2, dtype)
    number = np.float32 if dtype == torch.float32 else np.float64
    points = np.random.default_rng(0).uniform(-1, 1, (4000, 2)).astype(number).astype(float)
    got = built.head.evaluate(torch.from_numpy(points).to(dtype)).double().numpy()
    off = np.abs(got - exact_head(built, target, recipe, points)).max()
    names = ("temperature", "input rounding")
    allowed = sum(t.value for t in built.certificate.terms if t.name not in names)
    assert 0 < off <= allowed <= 200 * off  # it does round, and not a thousand times less than counted


@pytest.mark.parametrize(
    ("text", "box"),
    [
        ("abs(x0/3 - x1)", unit(2)),
        ("abs(x0/3000 - x1)", Box([-3e3, -1], [3e3, 1])),
        ("abs(x0 - 1000.1)", Box([1e3], [1e3 + 1])),
    ],
)
def test_scores_are_off_by_no_more_than_delta(text, box):
    """The weights that the head computes, read off by values (1, 0) and (0, 1): their logarithms are R times the pieces ± δ."""
    _, recipe, built = build(text, box, 0.2, torch.float32)
    terms = {t.name: t.inputs for t in built.certificate.terms}
    head, rate = built.head, terms["temperature"]["rate"]
    delta = terms["score rounding"]["delta"] + terms["stored scores"]["delta"]
    shapes = {"input_shapes": head.input_shapes, "output_shape": (2,)}
    bare = ScatteredHead(head.centers, float(head.inverse_temperature), torch.eye(2), powers=head.powers, **shapes)
    points = box.sample(20000, np.random.default_rng(0)).astype(np.float32)
    weights = bare.evaluate(torch.from_numpy(points)).double().numpy()
    clear = weights.min(axis=1) > 1e-30
    p = recipe.pieces
    t = (points.astype(float) - np.array(p.middle, dtype=float)) / np.array(p.radii, dtype=float)
    first, second = (p.convex[0].astype(float) @ np.column_stack([np.ones(len(t)), t]).T)[:, clear]
    off = np.abs(np.log(weights[clear, 0] / weights[clear, 1]) - rate * (first - second)).max()
    assert clear.sum() > 50 and 0.005 * delta < off / 2 <= delta


def test_affine_values_round_by_no_more_than_their_term():
    """One key: its weight is 1, so all that rounds is `V + J(z − c)`."""
    box = Box([0.3] * 5, [0.9] * 5)
    target, _, built = build(" + ".join(f"{k + 1}*x{k}" for k in range(5)), box, 1e-3, torch.float32)
    points = box.sample(3000, np.random.default_rng(0)).astype(np.float32).astype(float)
    terms = {t.name: t.value for t in built.certificate.terms}
    off = error(built, target.graph, points).max()
    assert terms["stored values"] < 0.5 * off and off <= terms["stored values"] + terms["value rounding"]


@pytest.mark.parametrize("keys", [7, 200])
def test_sums_round_by_no_more_than_their_term(keys):
    """All values equal: the exact head is constant, so what is left is the rounding of weights and sums."""
    rng = np.random.default_rng(keys)
    centers = torch.from_numpy(rng.uniform(-1, 1, (keys, 2))).float()
    head = ScatteredHead(centers, 5.0, torch.full((keys, 1), 3.3), input_shapes=((2,),), output_shape=())
    off = (
        (
            head.evaluate(torch.rand(5000, 2, generator=torch.Generator().manual_seed(0)) * 2 - 1).double()
            - float(head.values[0, 0])
        )
        .abs()
        .max()
        .item()
    )
    numbers = {"cells": keys, "tuples": 6.0, "keys": keys, "dimension": 2, "rate": 5e9, "semantics": "float32"}
    sizes = {"score_error": 0.0, "score_size": 0.0, "value_error": 0.0, "value_size": 0.0, "largest": 3.3, "moved": 0.0}
    terms = {t.name: t.value for t in PieceFacts(**numbers, **sizes).terms()}
    assert 0 < off <= terms["summation"]


def test_left_out_cells_do_not_matter():
    """More than 256 keys: the search leaves cells out, and planning has left out pairs of pieces."""
    builder, rng = GraphBuilder(2), np.random.default_rng(0)
    x = [builder.add("input", parameters=(i,)) for i in range(2)]
    terms = []
    for sign in (1.0, -1.0):
        for _ in range(9):
            a, b, c = (builder.add("const", parameters=(float(v),)) for v in rng.normal(size=3))
            line = builder.add(
                "sum", builder.add("mul", a, x[0]), builder.add("mul", b, x[1]), builder.add("mul", c, c)
            )
            terms.append(builder.add("mul", builder.add("const", parameters=(sign,)), builder.add("abs", line)))
    graph = builder.finish([builder.add("sum", *terms)], ())
    target, recipe, built = build(graph, unit(2), 0.05)
    pairs = len(recipe.pieces.convex[0]) * len(recipe.pieces.concave[0])
    assert 256 < recipe.keys < pairs
    points = unit(2).sample(2000, np.random.default_rng(1))
    head = built.head
    dense = head.evaluate_dense(torch.from_numpy(points)).numpy()
    near = head.evaluate(torch.from_numpy(points)).numpy()
    terms = {t.name: t.value for t in built.certificate.terms}
    assert np.abs(near - dense).max() <= terms["window"] + terms["summation"] + terms["score rounding"]
    assert np.abs(dense - exact_head(built, target, recipe, points)).max() <= 1e-12  # also with all pairs
    assert attacked(built, graph, unit(2)) <= built.certificate.error_bound


# negative controls


def without_key(head, j):
    keep = [k for k in range(head.num_keys) if k != j]
    parts = {"powers": head.powers[keep], "value_slopes": head.value_slopes[keep]}
    rate = float(head.inverse_temperature)
    shapes = {"input_shapes": head.input_shapes, "output_shape": head.output_shape}
    return ScatteredHead(head.centers[keep], rate, head.values[keep], **parts, **shapes)


def test_a_missing_piece_is_found():
    target, _, built = build("max(min(x0, x1), min(-x0, 0.3*x1 + 0.1))", unit(2), 1e-3)
    found = 0
    for j in range(built.head.num_keys):
        broken = replace(built, head=without_key(built.head, j))
        found += attacked(broken, target.graph, unit(2), kinks=15) > built.certificate.error_bound
        with pytest.raises(ShapeError):
            pieces_terms(broken.head, target.graph, unit(2))
    assert found >= 6  # the others are pairs of cells that only touch


def test_a_temperature_term_that_is_too_small_is_refuted():
    target, _, built = build("abs(x) + abs(y)", unit(2), 1e-3)
    term = built.certificate.terms[0]
    forged = built.certificate.error_bound - term.value + 0.9 * 2 * lambert(1 / math.e) / term.inputs["rate"]
    worst = attacked(built, target.graph, unit(2))
    near = np.stack(np.meshgrid(*[np.linspace(-2, 2, 81) / term.inputs["rate"]] * 2), axis=-1).reshape(-1, 2)
    worst = max(worst, error(built, target.graph, near).max())
    assert forged < worst <= built.certificate.error_bound
    assert term.value * term.inputs["rate"] < math.log(4)  # and below the usual ln N


@pytest.mark.parametrize(
    ("tensor", "term"), [("values", "stored values"), ("value_slopes", "stored values"), ("powers", "stored scores")]
)
def test_tampered_tensors_change_the_terms(tensor, term):
    target, _, built = build("abs(x0) - relu(x1)", unit(2), 1e-3)
    before = {t.name: t.value for t in built.certificate.terms}
    getattr(built.head, tensor).view(-1)[0] += 1e-3
    after = {t.name: t.value for t in pieces_terms(built.head, target.graph, unit(2))}
    assert after[term] > before[term] + 2e-4


def test_other_functions_and_temperatures_do_not_pass_for_this_one():
    target, _, built = build("abs(x0)", unit(1), 1e-3)
    terms = pieces_terms(built.head, parse("2*abs(x0)", ["x0"]), unit(1))
    assert sum(t.value for t in terms) > 0.1
    with pytest.raises(UnsupportedError):
        pieces_terms(built.head, parse("sin(x0)", ["x0"]), unit(1))
    built.head.inverse_temperature *= 0.5
    assert pieces_terms(built.head, target.graph, unit(1))[0].value > 1e-3
    built.head.inverse_temperature *= 0
    with pytest.raises(DomainError):
        pieces_terms(built.head, target.graph, unit(1))


def test_tolerances_below_rounding_are_refused_with_the_number():
    graph = parse("1000*abs(x0)", ["x0"])
    with pytest.raises(ToleranceError, match="Use a tolerance above") as caught:
        softest_pieces(graph, unit(1), tolerance=1e-4, dtype=torch.float32)
    asked = float(str(caught.value).split("above ")[1].split(" ")[0])
    assert softest_pieces(graph, unit(1), tolerance=1.5 * asked, dtype=torch.float32).error_bound <= 1.5 * asked
    assert softest_pieces(graph, unit(1), tolerance=1e-4, dtype=torch.float64).error_bound <= 1e-4
    with pytest.raises(PartitaError):
        softest_pieces(parse("abs(x0)", ["x0"]), unit(1), tolerance=1e-320, dtype=torch.float64)


def test_black_boxes_have_no_pieces():
    target = make_target(lambda z: np.abs(z[:, 0]), unit(1))
    recipe = softest_pieces(parse("abs(x0)", ["x0"]), unit(1), tolerance=0.1, dtype=torch.float64)
    with pytest.raises(UnsupportedError):
        piecewise_affine(target, recipe)
