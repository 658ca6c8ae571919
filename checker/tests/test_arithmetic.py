"""The checker's primitives against mpmath at 60 digits and against points of their balls, with planted bugs that are caught."""

from __future__ import annotations

import math
import random
from fractions import Fraction

import mpmath
import pytest
from flint import acb, arb, arb_series
from partita_check import bounds, graph, polynomials
from partita_check.bounds import Gaps, lambert, mixing, steepest, sums
from partita_check.cells import Cells
from partita_check.graph import Malformed, parse
from partita_check.pieces import affine_pieces
from partita_check.polynomials import Basis, enclose, left_out, norm, pieces_above, up
from partita_check.reading import Head, parse_json, parse_tensors

mpmath.mp.dps = 60
EXPRESSIONS = [
    "sin(3*x) + x*cos(2*y)",
    "exp(x*y) - tanh(2*x + y)",
    "1/(1 + 25*(x^2 + y^2))",
    "log(2 + x)*sqrt(3 + y) + atan(x*y)",
    "sigmoid(3*x)*erf(y) + tan(x/2)",
    "(2 + x)^-2 + (x - y)^3",
    "max(x, y)*abs(x + y) + relu(x) - min(x, 0.2)",
    "clamp(3*x, -1, 1) + where(y, x, x^2)",
    "sum(x, y, x*y) + cosh(x) - sinh(y)",
    "asinh(3*x)*acosh(2.5 + y) + atanh(x/2)",
    "where(x > y, x, x^2) + floor(3*x) - ceil(y)",
    "where(0 < x <= 0.5 or y < 0 and not x > 0.7, x*y, 1)",
]
MP = {
    "sin": mpmath.sin,
    "cos": mpmath.cos,
    "tan": mpmath.tan,
    "exp": mpmath.exp,
    "log": mpmath.log,
    "sqrt": mpmath.sqrt,
    "atan": mpmath.atan,
    "tanh": mpmath.tanh,
    "erf": mpmath.erf,
    "sigmoid": lambda x: 1 / (1 + mpmath.exp(-x)),
    "abs": abs,
    "relu": lambda x: max(x, mpmath.mpf(0)),
    "neg": lambda x: -x,
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "div": lambda a, b: a / b,
    "min": min,
    "max": max,
    "sum": lambda *a: sum(a[1:], a[0]),
    "where": lambda c, a, b: a if c >= 0 else b,
    "asinh": mpmath.asinh,
    "acosh": mpmath.acosh,
    "atanh": mpmath.atanh,
    "floor": mpmath.floor,
}


def exact(g: graph.Graph, point: list[float]) -> mpmath.mpf:
    """f at a point, by mpmath."""
    values = []
    for name, args, params in g.nodes:
        a = [values[k] for k in args]
        if name == "input":
            values.append(mpmath.mpf(point[params[0]]))
        elif name == "const":
            values.append(mpmath.mpf(params[0]))
        elif name == "pow":
            values.append(a[0] ** params[0])
        elif name == "clamp":
            values.append(min(max(a[0], mpmath.mpf(params[0])), mpmath.mpf(params[1])))
        else:
            values.append(MP[name](*a))
    return values[g.outputs[0]]


def holds(ball: arb, value: mpmath.mpf) -> bool:
    middle, radius = (
        mpmath.mpf(str(ball.mid().str(40, radius=False))),
        mpmath.mpf(str(ball.rad().str(40, radius=False))),
    )
    return abs(middle - value) <= radius * (1 + mpmath.mpf(10) ** -9) + abs(value) * mpmath.mpf(10) ** -35


def boxes(count: int, seed: int = 0):
    source = random.Random(seed)
    for _ in range(count):
        ends = []
        for _ in range(2):
            width = 10 ** source.uniform(-6, 0)
            lo = source.uniform(-1, 1 - width)
            ends.append((lo, lo + width))
        yield tuple(ends), [[source.uniform(a, b) for a, b in ends] for _ in range(4)]


def enclosures_hold(text: str, count: int = 40) -> bool:
    g = parse(text, ["x0", "x1"])
    for ends, points in boxes(count):
        ball = g.evaluate(polynomials.balls(ends)[0])[0]
        if not all(holds(ball, exact(g, p)) for p in points if ball.is_finite()):
            return False
        if not all(holds(g.evaluate([arb(x) for x in p])[0], exact(g, p)) for p in points[:1]):
            return False
    return True


@pytest.mark.parametrize(
    ("text", "degrees"),
    [
        ("2*x - y + 0.3", (1, 1)),
        ("(x - y)^3*x/7 + y", (4, 3)),
        ("max(x*x, y) + clamp(3*x, -1, 1) - abs(y)*floor(x)", (2, 1)),
        ("where(x > y, y^2, x)", (1, 2)),
        ("x*sin(y) + y/(2 + y)", (1, math.inf)),
        ("x^-1 + sqrt(2)*y", (math.inf, 1)),
        ("exp(x)*y", (math.inf, 1)),
    ],
)
def test_degrees_of_polynomials(text, degrees):
    assert parse(text, ["x", "y"]).degrees == degrees


def test_polynomials_of_low_degree_leave_nothing():
    """A degree that is told too low would lose a remainder: x^4 is not its interpolant of degree 3."""
    box = ((0.5, 1.0), (-0.25, 0.5))
    table, rests = enclose(parse("x^3*y - y^2", ["x", "y"]), box, 3, {}, 1, 1)
    assert [float(r) for r in rests] == [0, 0] and up(table[0]) - (0.125 * -0.25 - 0.0625) < 1e-12
    assert enclose(parse("x^4 + y", ["x", "y"]), box, 3, {}, 1, 1)[1][0] > 0


@pytest.mark.parametrize("text", EXPRESSIONS)
def test_balls_hold_the_function(text):
    assert enclosures_hold(text)


def test_a_wrong_primitive_is_noticed(monkeypatch):
    monkeypatch.setattr(graph, "_power", lambda x, exponent: x.mid() ** exponent if isinstance(x, arb) else x)
    assert not enclosures_hold("(x - y)^3 + 0*y")


@pytest.mark.parametrize("text", EXPRESSIONS)
def test_slopes_hold_difference_quotients(text):
    g, jumps = parse(text, ["x0", "x1"]), "where" in text
    for ends, points in boxes(25, 1):
        for i in range(2):
            given = [arb_series([b, 1], 2) if k == i else b for k, b in enumerate(polynomials.balls(ends)[0])]
            slope = g.evaluate(given)[0]
            slope = slope[1] if isinstance(slope, arb_series) else slope * 0
            for p in points:
                q = [points[0][k] if k == i else x for k, x in enumerate(p)]
                if slope.is_finite() and q[i] != p[i]:
                    quotient = (exact(g, p) - exact(g, q)) / (mpmath.mpf(p[i]) - mpmath.mpf(q[i]))
                    assert abs(quotient) <= mpmath.mpf(up(slope.abs_upper())) * (1 + mpmath.mpf(10) ** -12)
                assert slope.is_finite() or jumps


def test_a_jump_has_no_slope():
    g = parse("step(x)", ["x0"])
    assert not g.evaluate([arb_series([arb(0, 1), 1], 2)])[0][1].is_finite()
    assert math.isinf(up(steepest(g, ((-1.0, 1.0),), 0, lambda attained: 1.0, 0.2)))


def test_what_is_undefined_is_not_finite():
    beyond = (("x*log(-x)", 1.0), ("x*log(x)", -1.0), ("x^0.3", -1.0), ("x^0.3*log(x)", -1.0))
    for text, at in (("log(x)", -1.0), ("1/x", 0.0), ("x^-1", 0.0), ("log(x)", 0.0), *beyond):
        assert not parse(text, ["x0"]).evaluate([arb(at, 0.5)])[0].is_finite()
    for text in ("log(x)", "sqrt(x)", "1/x", "atan(x)", "tanh(x)", "sigmoid(x)", "tan(x)"):
        assert not parse(text, ["x0"]).evaluate([acb(arb(0, 4), arb(0, 4))])[0].abs_upper().is_finite(), text
    root = parse("sqrt(x)", ["x0"])
    assert root.evaluate([arb(0, 1)])[0].contains(0) and root.evaluate([arb(0, 1)])[0] <= 1.01
    assert root.evaluate([arb(-2)])[0] == 0  # continued by 0, as certificates say


def remainders_hold(text: str, columns: int, rows: int, count: int = 25) -> bool:
    g = parse(text, ["x0", "x1"])
    for ends, points in boxes(count, 2):
        for choices in g.branches(polynomials.balls(ends)[0], 8) or []:
            for n in (2, 5):
                b, rests = enclose(g, ends, n, choices, columns, rows)
                rest = sum(rests, arb(0))
                for p in points if rest.is_finite() and not g_has_kinks(g) else []:
                    t = [(arb(x) - a) / (arb(b_) - a) for x, (a, b_) in zip(p, ends)]
                    value = bernstein(b, n, t)
                    error = abs(value - g.evaluate([arb(x) for x in p])[0])
                    if not error.lower() <= rest.upper() + 1e-15:
                        return False
    return True


def g_has_kinks(g: graph.Graph) -> bool:
    return any(name in graph._KINKS or name == "clamp" for name, _, _ in g.nodes)


def bernstein(b: list[arb], n: int, t: list[arb]) -> arb:
    rows = [[math.comb(n, j) * s**j * (1 - s) ** (n - j) for j in range(n + 1)] for s in t]
    return sum((rows[0][i] * rows[1][j] * b[i * (n + 1) + j] for i in range(n + 1) for j in range(n + 1)), arb(0))


@pytest.mark.parametrize("text", [t for t in EXPRESSIONS if "max" not in t and "clamp" not in t])
def test_polynomials_with_their_rest_hold_the_function(text):
    assert remainders_hold(text, 3, 3) and remainders_hold(text, 1, 1)


def test_a_pole_inside_an_ellipse_is_met(monkeypatch):
    """The boundary of an ellipse tells nothing of a pole inside: with it alone the remainder would be false."""
    assert remainders_hold("1/(1 + 400*x^2) + 0*y", 3, 3)
    whole = polynomials.tiles

    def rim(radius: int, columns: int, rows: int) -> tuple[acb, ...]:
        return tuple(t for t in whole(radius, 40, 40) if abs(t.mid()).lower() > 0.45 * radius)

    monkeypatch.setattr(polynomials, "tiles", rim)
    assert not remainders_hold("1/(1 + 400*x^2) + 0*y", 3, 3)


def test_a_forgotten_remainder_is_noticed(monkeypatch):
    monkeypatch.setattr(polynomials, "left_out", lambda size, radius, n: left_out(size, radius, n) / 1e6)
    assert not remainders_hold("exp(x*y) - tanh(2*x + y)", 3, 3)


def test_tiles_cover_the_ellipse():
    for rho in polynomials.RADII:
        for k in range(200):
            angle, scale = math.pi * k / 199, (k * 7 % 200) / 199
            t = (
                scale
                * (rho * complex(math.cos(angle), math.sin(angle)) + complex(math.cos(angle), -math.sin(angle)) / rho)
                / 2
            )
            for shape in ((3, 3), (1, 1)):
                assert any(tile.contains(acb(t.real, abs(t.imag))) for tile in polynomials.tiles(rho, *shape)), (rho, t)


def test_parts_of_a_polynomial_bound_it():
    source = random.Random(4)
    basis = Basis.of(3)
    for _ in range(20):
        b = [arb(source.uniform(-1, 1)) for _ in range(16)]
        seen = max(abs(bernstein(b, 3, [arb(i) / 20, arb(j) / 20])).lower() for i in range(21) for j in range(21))
        assert seen <= norm(b)
        assert not list(pieces_above(b, basis, 2, norm(b), 100))
        parts = list(pieces_above(b, basis, 2, arb(0.9) * seen, 10_000))
        assert parts and max(part[0] for part in parts) >= seen * 0.99  # below what is attained it must give up


@pytest.mark.parametrize(
    "text",
    [
        "abs(x - y) + max(x, 0.3)",
        "min(2*x, y, -x)/3 - relu(y)",
        "clamp(x, -0.5, 0.25) - 2*abs(y)",
        "-max(x, y) + x*3",
        "sum(x, y)",
    ],
)
def test_affine_pieces_are_the_function(text):
    source, g = random.Random(9), parse(text, ["x0", "x1"])
    above, below = affine_pieces(g)
    for _ in range(50):
        p = [Fraction(source.uniform(-1, 1)) for _ in range(2)]
        top, low = (max(row[0] + row[1] * p[0] + row[2] * p[1] for row in rows) for rows in (above, below))
        assert abs(float(top - low) - float(exact(g, [float(x) for x in p]))) < 1e-14
    assert affine_pieces(parse("sin(x)", ["x0"])) is None and affine_pieces(parse("x*y", ["x0", "x1"])) is None


@pytest.mark.parametrize("kappa", [5.0, 16.0, 64.0])
@pytest.mark.parametrize("power", [1, 2])
def test_moments_are_not_exceeded(kappa, power):
    count, source = 12, random.Random(5)
    centers = [(k + 0.5) / count for k in range(count)]
    rate = kappa * count**2
    gaps = Gaps(centers, (0.0, 1.0), rate, count)
    top, mean = up(gaps.reach(arb(power), False)), up(gaps.reach(arb(power), True))
    values = []
    for x in [k / count for k in range(count + 1)] + [source.random() for _ in range(4000)]:
        w = [math.exp(-rate * ((x - c) ** 2 - min((x - d) ** 2 for d in centers)) / 2) for c in centers]
        values.append(sum(a * abs(x - c) ** power for a, c in zip(w, centers)) / sum(w))
    assert max(values) <= top * (1 + 1e-12) and top <= (1.2 if kappa < 8 else 1.002) * max(values)
    drawn = values[count + 1 :]
    assert sum(drawn) / len(drawn) <= 1.05 * mean and mean < top


def test_the_soft_maximum_lemma():
    source = random.Random(6)
    for n in (2, 5, 40):
        for _ in range(200):
            y = [source.expovariate(0.5) for _ in range(n)]
            w = [math.exp(v - max(y)) for v in y]
            assert max(y) - sum(a * b for a, b in zip(w, y)) / sum(w) <= up(lambert(n)) * (1 + 1e-12)
    assert abs(float(lambert(2).mid()) - 0.27846) < 1e-5


def test_rounding_terms_cover_float32_runs():
    """A head run in float32 stays within the terms of the exact one; a tenth of a unit less, and it would not."""
    import numpy as np

    source = np.random.default_rng(0)
    centers = np.linspace(-1.5, 1.5, 16).astype(np.float32)
    values = source.normal(size=16).astype(np.float32) * 100
    rate = np.float32(25.0)
    head = Head(
        "grid",
        "float32",
        16,
        (tuple(map(float, centers)),),
        (),
        (float(rate),),
        (tuple(map(float, values)),),
        None,
        None,
        None,
        (8,),
    )
    gaps = [Gaps(head.axes[0], (-1.0, 1.0), head.rates[0], 8)]
    spread, largest = float(values.max()) - float(values.min()), arb(float(abs(values).max()))
    allowed = up(mixing(gaps, "float32") * spread + sums(head, ((-1.0, 1.0),), gaps, "float32", largest))
    x = source.uniform(-1, 1, 20_000).astype(np.float32)

    def run(kind):
        d = x.astype(kind)[:, None] - centers.astype(kind)
        s = kind(-0.5) * kind(rate) * d * d
        e = np.exp(s - s.max(axis=1, keepdims=True))
        return (e / e.sum(axis=1, keepdims=True) * values.astype(kind)).sum(axis=1)

    worst = float(abs(run(np.float32).astype(np.float64) - run(np.float64)).max())
    assert allowed / 100 < worst < allowed


def test_weights_on_boxes_are_not_exceeded():
    source = random.Random(8)
    for _ in range(20):
        centers = tuple((source.uniform(-1, 1), source.uniform(-1, 1)) for _ in range(6))
        powers = tuple(source.uniform(0, 0.3) for _ in range(6))
        head = Head("scattered", "float64", 6, (), centers, (30.0, 30.0), ((0.0,) * 6,), None, None, powers, ())
        cells = Cells(head, None, ((-1.0, 1.0), (-1.0, 1.0)), "real", None)
        ends = tuple((a, a + 0.2) for a in (source.uniform(-1, 0.8), source.uniform(-1, 0.8)))
        _, middle, radius = polynomials.balls(ends)
        scores = {j: cells.score(j, middle) for j in range(6)}
        tilts = {j: cells.tilts(j, radius) for j in range(6)}
        off = {j: arb(source.uniform(0.0, 0.5)) for j in range(6)}  # what rounding may do to each score
        for j in range(6):
            bound = cells._weight(j, list(range(6)), scores, tilts, off)
            for _ in range(20):
                z = [arb(source.uniform(a, b)) for a, b in ends]
                w = [(cells.score(k, z) + source.choice([-1, 1]) * off[k]).exp() for k in range(6)]
                assert not w[j] / sum(w, arb(0)) > bound


@pytest.mark.parametrize(
    "text",
    [
        "",
        "x +",
        "import os",
        "__import__('os')",
        "x.real",
        "f(x)",
        "lambda: 1",
        "x if x else y",
        "1e999",
        "x@y",
        "x, y; x",
        "sin()",
    ],
)
def test_what_is_no_expression_is_refused(text):
    with pytest.raises(Malformed):
        parse(text, ["x0", "x1"])


def test_expressions_are_read_as_they_are_meant():
    for text, point, value in (
        ("-x^2", 3.0, -9.0),
        ("2^-x", 1.0, 0.5),
        ("x^0.5", 4.0, 2.0),
        ("1 - 2 - x", 3.0, -4.0),
        ("sign(x)", -2.0, -1.0),
    ):
        assert abs(parse(text, ["x0"]).evaluate([arb(point)])[0] - value) < 1e-12
    assert parse("x, y", ["x0", "x1"]).shape == (2,) and parse("x; y", ["x0", "x1"]).shape == (2, 1)
    with pytest.raises(Malformed):
        parse("(" * 1000 + "x" + ")" * 1000, ["x0"])


def test_infix_reads_back():
    for text in [*EXPRESSIONS, "x - (y - x)", "x/(y/2)", "-(x + y)^2", "2*(-x)", "x - -3", "(x^2)^3"]:
        g = parse(text, ["x0", "x1"])
        assert parse(g.infix(["x0", "x1"]), ["x0", "x1"]).canonical() == g.canonical(), g.infix(["x0", "x1"])


def test_readers_refuse_what_overlaps_or_is_cut():
    good = b'{"a": {"dtype": "F64", "shape": [1], "data_offsets": [0, 8]}}'
    data = len(good).to_bytes(8, "little") + good + b"\0" * 8
    assert parse_tensors(data)["a"].numbers[0] == 0.0
    bad = [
        data[:-1],
        data + b"\0",
        data.replace(b"F64", b"I64"),
        data.replace(b"[0, 8]", b"[8, 0]"),
        data.replace(b"[1]", b"[2]"),
        data[:-8] + b"\xff" * 8,
        b"\xff" * 16,
        b"",
    ]
    twice = good[:-1] + b", " + good[1:].replace(b'"a"', b'"b"')
    for case in [*bad, len(twice).to_bytes(8, "little") + twice + b"\0" * 8]:
        with pytest.raises((Malformed, ValueError)):
            parse_tensors(case)
    with pytest.raises(Malformed):
        parse_json(b'{"a": Infinity}', "x")


def test_constants_are_what_the_standard_says():
    assert float(bounds.UNIT["float64"].mid()) == 2.0**-53 and float(bounds.UNIT["float32"].mid()) == 2.0**-24


def test_floor_follows_the_branches_of_a_box_and_no_others():
    g = parse("floor(2*x) + x", ["x0"])
    box = [arb(0.5, 0.3)]  # 2x from 0.4 to 1.6
    found = g.branches(box, 8)
    assert found is not None and sorted(g.evaluate([arb(0.25)], c)[0].mid() for c in found) == [0.25, 1.25]
    assert g.evaluate([acb(0.3, 0.01)])[0].is_finite() is False  # not analytic unless a branch is chosen
    assert g.evaluate([acb(0.3, 0.01)], found[0])[0].is_finite()


@pytest.mark.parametrize(("text", "inside", "outside"), [("acosh(x)", 1.5, 0.5), ("atanh(x)", 0.5, 1.5)])
def test_inverse_functions_are_not_used_beyond_their_cuts(text, inside, outside):
    g = parse(text, ["x0"])
    assert g.evaluate([acb(inside, 0.1)])[0].is_finite() and not g.evaluate([acb(outside, 0.1)])[0].is_finite()
    assert not parse("asinh(x)", ["x0"]).evaluate([acb(0.1, 1.5)])[0].is_finite()


def test_comparisons_are_read_and_branches_that_meet_become_extrema():
    names = ["x0", "x1"]
    assert parse("where(x > 0, x, 0.1*x)", names).canonical() == parse("max(0.1*x, x)", names).canonical()
    assert parse("where(x >= 0, x, y)", names).canonical() == parse("where(x, x, y)", names).canonical()
    assert parse("where(x > 0, x, y)", names).canonical() == parse("where(-x, y, x)", names).canonical()
    assert parse("where(x > 0, x, y)", names).canonical() != parse("where(x >= 0, x, y)", names).canonical()
    for text in ("x > 1", "where(x == 1, x, y)", "where(x > 0 and y, x, y)", "sin(x < 1)"):
        with pytest.raises(Malformed):
            parse(text, names)
