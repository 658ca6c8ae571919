"""Networks of heads: errors carried through them, their proof, and rechecks of it. Attacked by oracles that know nothing of it."""

import copy
import math
from dataclasses import replace
from fractions import Fraction

import balls
import numpy as np
import pytest
import torch

import partita as pa
from partita.arithmetic.precision import DOUBLE, SINGLE
from partita.compiler.compiled import Compiled
from partita.errors import FormatError, ShapeError, ToleranceError, UnsupportedError
from partita.functions import parse
from partita.functions.target import graph_target, make_target
from partita.heads.network import AttentionNetwork
from partita.heads.wiring import Affine, Group, Wiring
from partita.proofs import PROOFS, Certificate, Given, model_digest
from partita.proofs.carried_errors import cut_boxes, joint_ranges, propagate, require_bounded
from partita.proofs.claim import claim, describe_function
from partita.proofs.local_errors import local_error
from partita.proofs.network_proof import Part, same_as_wiring

FLOATS = {DOUBLE: np.float64, SINGLE: np.float32}
UNARY = ["sin(x)", "x**2", "exp(-x)", "relu(x)", "1/(3 + x)", "tanh(2*x) - x", "abs(x)"]
BINARY = ["x*y", "max(x, y)", "x/(4 + y**2)", "sqrt(x**2 + y**2 + 1)"]


def chosen(rows, width, start=0):
    """Reads of channels by their index."""
    return Affine(np.eye(width)[rows], np.zeros(len(rows)), start)


def dense(weight, bias=None, start=0, exact=None):
    weight = np.atleast_2d(np.asarray(weight, float))
    return Affine(weight, np.zeros(len(weight)) if bias is None else np.asarray(bias, float), start, exact or {})


# a hand-made network: 2 exp(−x0² − x1²) sin(x0) + 0.5
PRODUCT = Wiring(
    2,
    (
        (Group(0, chosen([0, 1], 2)), Group(3, chosen([0], 2))),
        (Group(1, dense([[1.0, 1.0]], start=2)),),
        (Group(2, dense([[0.0, 1.0], [1.0, 0.0]], start=4)),),
    ),
    dense([[2.0]], [0.5], start=6),
)
PARTS = {"x**2": [(-1, 1)], "exp(-x)": [(-0.01, 2.01)], "x*y": [(0, 1.1), (-1.1, 1.1)], "sin(x)": [(-1, 1)]}
FUNCTION = "2*exp(-(x0**2 + x1**2))*sin(x0) + 0.5"


class Deployed:
    """A network whose heads err by at most ε as an adversary likes, run in floats, beside the exact one in balls.

    Heads return numbers of the dtype, so ε must not be below the rounding of their values.
    """

    def __init__(self, wiring, graphs, errors, precision, rng):
        self.wiring, self.graphs, self.errors, self.rng = wiring, graphs, errors, rng
        self.number = FLOATS[precision]

    def off(self, z, how):
        """|deployed − exact| of every output at a point, as balls. `how` chooses the errors of the heads."""
        exact, run = [balls.exact(x) for x in z], list(np.asarray(z).astype(self.number))
        for layer in self.wiring.layers:
            made, ran = [], []
            for group in layer:
                u, v = self.read(group.reads, exact, run)
                graph, k = self.graphs[group.head], self.graphs[group.head].num_inputs
                for i in range(0, len(u), k):
                    made += self.values(graph, u[i : i + k])
                    # a head of the dtype, off by up to its bound: rounding its value, and inputs that it reads, is part of that
                    seen = [self.seen(group.reads, i + j, z, v[i + j]) for j in range(k)]
                    value = self.values(graph, [balls.exact(x) for x in seen])[0]
                    bound = balls.exact(self.errors[group.head])
                    got = self.number(float(value) + how(self.rng) * self.errors[group.head] * (1 - 1e-9))
                    while abs(balls.exact(float(got)) - value) > bound:  # rounded too far: towards the value
                        nearer = np.nextafter(got, self.number(float(value)))
                        assert nearer != got, "no number of the dtype is within the bound of this head"
                        got = nearer
                    ran.append(got)
            exact += made
            run += ran
        wanted, got = self.read(self.wiring.output, exact, run)
        return [abs(balls.exact(float(b)) - a) for a, b in zip(wanted, got)]

    def seen(self, given, row, z, read):
        """What a head is claimed to be about: an input that is read as it is, before it is rounded, and other reads themselves."""
        columns = np.flatnonzero(given.weight[row])
        alone = len(columns) == 1 and given.weight[row, columns[0]] == 1 and given.bias[row] == 0
        is_input = alone and given.start + columns[0] < self.wiring.inputs
        return float(z[given.start + columns[0]] if is_input else read)

    @staticmethod
    def values(graph, point):
        results = []
        for node in graph.nodes:
            if node.operation == "input":
                results.append(point[int(node.parameters[0])])
            elif node.operation == "const":
                results.append(balls.arb(node.parameters[0]))
            else:
                results.append(balls.BALLS[node.operation](*(results[k] for k in node.arguments), *node.parameters))
        return [results[k] for k in graph.outputs]

    def read(self, given, exact, run):
        """Rows of an affine map: exactly, and as floats from the stored numbers, summed in some order."""
        wanted, got = [], []
        weight, bias = given.weight.astype(self.number), given.bias.astype(self.number)
        for row in range(given.rows):
            terms = [balls.exact(given.exact.get((row, -1), Fraction(given.bias[row])))]
            terms += [
                balls.exact(given.exact.get((row, c), Fraction(given.weight[row, c]))) * exact[given.start + c]
                for c in range(given.weight.shape[1])
            ]
            wanted.append(sum(terms[1:], terms[0]))
            order = self.rng.permutation(given.weight.shape[1])
            total = self.number(0)
            for c in order:
                total = self.number(total + self.number(weight[row, c] * run[given.start + c]))
            got.append(self.number(total + bias[row]))
        return wanted, got


def random_network(rng):
    """A few layers of a few functions, with weights that are floats, ones, and fractions that are not."""
    graphs = [parse(t, ["x"]) for t in rng.choice(UNARY, 3, replace=False)]
    graphs += [parse(t, ["x", "y"]) for t in rng.choice(BINARY, 2, replace=False)]
    inputs = channels = int(rng.integers(2, 4))
    layers = []
    for _ in range(int(rng.integers(1, 4))):
        groups, made = [], 0
        for head in rng.choice(len(graphs), 2, replace=False):
            uses, k = int(rng.integers(1, 3)), graphs[head].num_inputs
            groups.append(Group(int(head), random_map(rng, uses * k, channels)))
            made += uses
        layers.append(tuple(groups))
        channels += made
    return graphs, Wiring(inputs, tuple(layers), random_map(rng, 2, channels))


def random_map(rng, rows, channels):
    weight = np.zeros((rows, channels))
    exact = {}
    for row in range(rows):
        if rng.random() < 0.4:
            weight[row, rng.integers(channels)] = 1.0
            continue
        for c in rng.choice(channels, 2, replace=False):
            weight[row, c] = rng.choice([1.0, -1.0, rng.normal() / 2, 1 / 3])
            if weight[row, c] == 1 / 3:
                exact[row, int(c)] = Fraction(1, 3)
    bias = np.where(rng.random(rows) < 0.3, rng.normal(size=rows) / 2, 0.0)
    return Affine(weight, bias, 0, exact)


@pytest.mark.parametrize("precision", [DOUBLE, SINGLE], ids=lambda p: p.name)
@pytest.mark.parametrize("seed", range(8))
def test_random_networks_never_exceed_their_bounds(seed, precision):
    rng = np.random.default_rng(seed)
    graphs, wiring = random_network(rng)
    errors = [float(10.0 ** rng.uniform(-5, -3)) for _ in graphs]
    lo, hi = -rng.random(wiring.inputs), rng.random(wiring.inputs) + 0.1
    ranges = joint_ranges(wiring, graphs, lo, hi, boxes=32)
    carried = propagate(wiring, graphs, errors, lo[None], hi[None], precision=precision, ranges=ranges)
    points = lo + (hi - lo) * rng.random((12, wiring.inputs))
    at = propagate(wiring, graphs, errors, points, points, precision=precision)
    deployed = Deployed(wiring, graphs, errors, precision, rng)
    ways = (lambda r: 1.0, lambda r: -1.0, lambda r: r.choice([-1.0, 1.0]))
    with balls.bits(200):
        for z, there in zip(points, at.output_error):
            for way in ways:
                for o, off in enumerate(deployed.off(z, way)):
                    for bound in (there[o], carried.output_error[0, o], carried.shares(len(graphs)).total[0, o]):
                        assert not off > balls.arb(float(bound)), (z, o)


def test_the_bound_of_a_chain_is_attained():
    """Growing functions, all errors of one sign: nothing is lost but what slopes vary."""
    graphs, rng = [parse("exp(x)", ["x"])], np.random.default_rng(0)
    wiring = Wiring(
        1, ((Group(0, chosen([0], 1)),), (Group(0, dense([[0.5]], start=1)),)), dense([[3.0, 2.0]], start=1)
    )
    x = np.array([[0.3]])
    carried = propagate(wiring, graphs, [1e-6], x, x, precision=DOUBLE)
    with balls.bits(200):
        off = float(Deployed(wiring, graphs, [1e-6], DOUBLE, rng).off([0.3], lambda r: 1.0)[0])
    assert 0.999 * carried.output_error[0, 0] < off <= carried.output_error[0, 0]
    assert carried.bound == pytest.approx(carried.output_error[0, 0])
    slope = math.exp(0.5 * math.exp(0.3))
    assert carried.output_error[0, 0] == pytest.approx(1e-6 * (3 + 2 * (1 + 0.5 * slope)), rel=1e-5)
    assert carried.gains[0, 0].tolist() == pytest.approx([0.0, 3 + slope, 2.0], rel=1e-5)


CHAIN = Wiring(
    1,
    (
        (Group(0, dense([[1 / 3]], [0.7], exact={(0, 0): Fraction(1, 3)})),),
        (Group(0, dense([[3.0]], start=1)),),
    ),
    dense([[1 / 3]], start=2, exact={(0, 0): Fraction(1, 3)}),
)


def rough(wiring):
    """The same exact network with numbers stored to three digits."""
    layers = tuple(tuple(replace(g, reads=rough_map(g.reads)) for g in layer) for layer in wiring.layers)
    return replace(wiring, layers=layers, output=rough_map(wiring.output))


def rough_map(given):
    exact = {(r, c): Fraction(given.weight[r, c]) for r, c in np.ndindex(given.weight.shape)}
    return replace(given, weight=given.weight.round(3), exact=exact | dict(given.exact))


@pytest.mark.parametrize("missing", ["head errors", "slopes", "coefficients"])
def test_the_oracle_notices_what_is_missing(missing):
    """A bound from wrong premises is exceeded, by the same network that keeps the right one."""
    exp, x, rng = parse("exp(x)", ["x"]), np.array([[0.9]]), np.random.default_rng(0)
    wiring = rough(CHAIN) if missing == "coefficients" else CHAIN
    stored = tuple((Group(0, dense(g.reads.weight, g.reads.bias, g.reads.start)),) for (g,) in wiring.layers)
    right = {"wiring": wiring, "graphs": [exp], "errors": [1e-3]}
    wrong = {
        "head errors": {"errors": [0.9e-3]},
        "slopes": {"graphs": [parse("x", ["x"])]},
        "coefficients": {"wiring": Wiring(1, stored, wiring.output)},
    }[missing]
    with balls.bits(200):
        seen = float(Deployed(wiring, [exp], [1e-3], DOUBLE, rng).off(x[0].tolist(), lambda r: -1.0)[0])
    true, false = (propagate(**given, box_lo=x, box_hi=x, precision=DOUBLE).bound for given in (right, right | wrong))
    assert false < seen <= true < 1.5 * seen


def test_the_oracle_notices_rounding():
    """A long sum in float32 exceeds a bound for float64."""
    x = np.random.default_rng(0).random((1, 400)).astype(np.float32).astype(float)
    wiring = Wiring(400, (), dense(np.ones((1, 400))))
    single, double = (propagate(wiring, [], [], x, x, precision=p).bound for p in (SINGLE, DOUBLE))
    with balls.bits(200):
        seen = float(Deployed(wiring, [], [], SINGLE, np.random.default_rng(1)).off(x[0].tolist(), lambda r: 1.0)[0])
    assert double < seen <= single


def test_inputs_that_are_read_as_they_are_need_no_slope():
    """sqrt on [0, 1] is infinitely steep. For an input read by index that is the head's own affair; for other reads it is not."""
    graphs = [parse("sqrt(x)", ["x"])]
    lo, hi = np.zeros((1, 1)), np.ones((1, 1))
    for precision in (DOUBLE, SINGLE):
        for sign in (1.0, -1.0):
            a, b = (lo, hi) if sign > 0 else (-hi, -lo)
            alone = Wiring(1, ((Group(0, dense([[sign]])),),), dense([[1.0]], start=1))
            carried = propagate(alone, graphs, [1e-3], a, b, precision=precision)
            require_bounded(carried, graphs)
            assert carried.output_error[0, 0] == 1e-3
            assert (carried.reads[0][0].reach_lo, carried.reads[0][0].reach_hi) == (0.0, 1.0)  # not a float beyond
    scaled = Wiring(1, ((Group(0, dense([[0.5]])),),), dense([[1.0]], start=1))
    twice = Wiring(1, ((Group(0, chosen([0], 1)),), (Group(0, chosen([0], 1, 1)),)), dense([[1.0]], start=2))
    for wiring in (scaled, twice):
        carried = propagate(wiring, graphs, [1e-3], lo, hi, precision=DOUBLE)
        assert np.isinf(carried.output_error).all() and carried.bound == math.inf
        with pytest.raises(UnsupportedError, match=r"sqrt\(x0\) in layer .*slope has no bound"):
            require_bounded(carried, graphs)


def test_float32_inputs_are_rounded_before_affine_maps():
    graphs = [parse("sin(x)", ["x"])]
    wiring = Wiring(1, ((Group(0, dense([[1.0]], [1.0])),),), dense([[1.0]], start=1))
    x = np.array([[1000.1]])
    single, double = (propagate(wiring, graphs, [0.0], x, x, precision=p).reads[0][0].error for p in (SINGLE, DOUBLE))
    moved = abs(float(np.float32(1000.1)) - 1000.1)
    assert single.item() >= moved + abs(float(np.float32(1000.1) + np.float32(1)) - float(np.float32(1000.1)) - 1)
    assert double.item() < 1e-12
    assert propagate(wiring, graphs, [0.0], x, x, precision=SINGLE).shares(1).inputs[0, 0] >= moved * 0.5


def test_what_underflows_is_not_zero():
    """Products of tiny numbers: an error that no float holds still counts, and meets an infinite slope as one."""
    graphs = [parse("relu(x)", ["x"]), parse("sqrt(abs(x))", ["x"])]
    reads = dense([[1e-200]], start=1)
    wiring = Wiring(1, ((Group(0, chosen([0], 1)),), (Group(1, reads),)), dense([[1.0]], start=2))
    zero = np.zeros((1, 1))
    carried = propagate(wiring, graphs, [1e-200, 0.0], zero, zero, precision=DOUBLE)
    assert 0 < carried.reads[1][0].error.item() < 1e-300 and np.isinf(carried.output_error).all()
    assert carried.gains[0, 0, 1] == math.inf and carried.bound == math.inf
    single = propagate(wiring, graphs, [1.0, 0.0], zero + 1, zero + 1, precision=SINGLE).reads[1][0]
    assert single.error.item() >= 1e-200  # float32 stores the weight as 0
    subnormal = Wiring(1, ((Group(0, dense([[1e-40]])),),), dense([[1.0]], start=1))
    stored = propagate(subnormal, graphs, [0.0], zero + 1, zero + 1, precision=SINGLE).reads[0][0].stored.item()
    assert stored >= abs(float(np.float32(1e-40)) - 1e-40) > 0


def test_overflow_and_infinite_ranges_have_no_bound_and_no_nan():
    graphs = [parse("x**2", ["x"]), parse("1/x", ["x"])]
    lo, hi = np.array([[-1.0, 2.0]]), np.array([[1.0, 3.0]])
    big = Wiring(2, ((Group(0, chosen([0], 2)),),), dense([[1.0, 0.0, 1e38]]))
    wide = propagate(big, graphs, [1e-3], lo, hi, precision=SINGLE)
    assert np.isinf(wide.output_error).all() and np.isfinite(
        propagate(big, graphs, [1e-3], lo, hi, precision=DOUBLE).bound
    )
    with pytest.raises(UnsupportedError, match="overflow float32"):
        require_bounded(wide, graphs)
    for value in (math.inf, math.nan, 1e300):
        broken = propagate(Wiring(2, (), dense([[value, 0.0]])), [], [], lo, hi, precision=SINGLE)
        assert np.isinf(broken.output_error).all()
    first, second = Group(1, chosen([0, 1], 2)), Group(0, chosen([0, 1], 2, 2))
    pole = Wiring(2, ((first,), (second,)), dense([[1, 0, 0, 0, 0, 1]]))
    carried = propagate(pole, graphs, [1e-3, 1e-3], lo, hi, precision=DOUBLE)
    assert not np.isnan(carried.error).any() and not np.isnan(carried.gains).any()
    assert np.isinf(carried.error[0, 4]) and np.isfinite(carried.error[0, 5])  # nothing leaks to what does not read it
    assert np.isfinite(carried.output_error).all()
    with pytest.raises(UnsupportedError, match=r"1/x0 in layer 1 reads \[-1, 1\]; .*pole"):
        require_bounded(carried, graphs)


def test_batches_are_the_boxes_one_by_one():
    rng = np.random.default_rng(5)
    graphs, wiring = random_network(rng)
    lo = rng.uniform(-1, 1, (7, wiring.inputs))
    hi = lo + rng.random((7, wiring.inputs)) * (np.arange(7) % 2)[:, None]
    errors = [1e-4] * len(graphs)
    together = propagate(wiring, graphs, errors, lo, hi, precision=DOUBLE)
    for k in range(7):
        alone = propagate(wiring, graphs, errors, lo[k : k + 1], hi[k : k + 1], precision=DOUBLE)
        assert together.output_error[k].tolist() == pytest.approx(alone.output_error[0].tolist(), rel=1e-12)
        assert together.gains[k].ravel().tolist() == pytest.approx(alone.gains[0].ravel().tolist(), rel=1e-12)
    with pytest.raises(ShapeError, match="expected \\(batch"):
        propagate(wiring, graphs, errors, lo[0], hi[0], precision=DOUBLE)
    crooked = Wiring(2, ((Group(0, chosen([0], 2)),),), dense([[1.0, 0.0, 0.0]]))
    with pytest.raises(ShapeError, match="multiple of 2"):
        propagate(crooked, [parse("x*y", ["x", "y"])], [0.0], lo[:, :2], hi[:, :2], precision=DOUBLE)


def test_reads_that_share_an_input_are_looked_at_together():
    """u = x², v = x² + x⁴ − x²: as independent channels u − v reaches [−2, 1]; as a function of x it is −x⁴."""
    graphs = [parse("x**2", ["x"]), parse("x*y", ["x", "y"]), parse("1/x", ["x"])]
    wiring = Wiring(
        1,
        (
            (Group(0, chosen([0], 1)),),
            (Group(1, dense([[0.0, 1.0], [0.0, 1.0]])),),
            (Group(2, dense([[0.0, -1.0, 1.0]], [0.5], exact={(0, -1): Fraction(1, 2)})),),
        ),
        dense([[1.0]], start=3),
    )
    lo, hi = np.array([-1.0]), np.array([1.0])
    ranges = joint_ranges(wiring, graphs, lo, hi)
    assert ranges[0] == [None] and ranges[1][0] is None  # an input, and a function of one read: nothing to gain
    assert 0.24 < ranges[2][0].lo[0] <= 0.25 and 0.5 <= ranges[2][0].hi[0] < 0.51  # x⁴ − x² + 1/2
    known, free = (
        propagate(wiring, graphs, [1e-6] * 3, lo[None], hi[None], precision=DOUBLE, ranges=r) for r in (ranges, None)
    )
    assert known.bound < 1e-3 and free.bound == math.inf
    many = Group(0, chosen([0] * 3000, 1)), Group(0, dense([[1.0] * 3000], start=1))
    huge = Wiring(1, tuple((group,) for group in many), dense([[1.0]], start=3001))
    assert joint_ranges(huge, graphs, lo, hi) == [[None], [None]]


def test_coefficients_that_no_float_holds_are_exact_in_joint_ranges():
    graphs = [parse("x", ["x"])]
    exact = {(0, 0): Fraction(1, 3), (0, 1): Fraction(-(10**40) - 1, 10**40)}
    wiring = Wiring(
        1, ((Group(0, chosen([0], 1)),), (Group(0, dense([[1 / 3, -1.0]], exact=exact)),)), dense([[1.0]], start=2)
    )
    found = joint_ranges(wiring, graphs, np.array([1.0]), np.array([1.0]))[1][0]
    value = Fraction(1, 3) - 1 - Fraction(1, 10**40)
    assert Fraction(found.lo[0]) <= value <= Fraction(found.hi[0]) and found.hi[0] - found.lo[0] < 1e-14


@pytest.mark.parametrize(
    ("text", "domain"), [("relu(x)", [(-3, 3)]), ("clamp(x, -1, 1)", [(-3, 3)]), ("max(x, y)", [(-1, 1)] * 2)]
)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_local_errors(text, domain, dtype):
    """Between the error seen in a box and the bound on all of it, and tiny away from the kinks."""
    c = pa.compile(text, domain, tolerance=1e-2, method="pieces", dtype=dtype)
    bound, rng = local_error(c.head, c.target.graph, c.certificate), np.random.default_rng(1)
    box = c.target.box
    x, r = box.sample(4000, rng), 10.0 ** rng.uniform(-8, -1, (4000, 1))
    lo, hi = box.clamp(x - r), box.clamp(x + r)
    found = np.fmin(bound(lo, hi), c.error_bound)
    y = lo + (hi - lo) * rng.random(x.shape)
    with torch.no_grad():
        seen = np.abs(c.head.evaluate(torch.from_numpy(y).to(dtype)).double().numpy() - c.target(y))[:, 0]
    assert (seen <= found + 1e-15).all()
    assert np.median(found) < 0.01 * c.error_bound and found.max() == c.error_bound
    assert (seen > 0.5 * found)[found > 1e-4].any()  # it is not far from the truth
    reads = Wiring(
        box.dimension, ((Group(0, chosen(range(box.dimension), box.dimension)),),), dense([[1.0]], start=box.dimension)
    )
    at = propagate(
        reads,
        [c.target.graph],
        [c.error_bound],
        x,
        x,
        precision=SINGLE if dtype == torch.float32 else DOUBLE,
        local=[bound],
    )
    assert np.median(at.output_error) < 0.01 * c.error_bound


def test_heads_that_are_not_made_of_pieces_have_no_local_error():
    c = pa.compile("sin(x)", "[-1,1]", tolerance=1e-2, method="fitted")
    assert local_error(c.head, c.target.graph, c.certificate) is None


# ---- the proof


@pytest.fixture(scope="module")
def made():
    """Heads with claims, for the hand-made network."""
    found = []
    for text, domain in PARTS.items():
        graph, box = parse(text, ["x", "y"][: len(domain)]), pa.Box.of(domain)
        c = pa.compile(graph, box, tolerance=1e-3)
        found.append((c.head, Part(graph, box, c.certificate)))
    return found


def network(heads, wiring=PRODUCT, inputs=2):
    return AttentionNetwork(heads, wiring, input_shapes=((inputs,),), output_shape=())


def certified(net, parts, text=FUNCTION, domain="[-1,1]^2"):
    target = make_target(text, domain) if isinstance(text, str) else text
    proved = PROOFS["network"].prove(net, target, Given(earlier=parts))
    return claimed(net, describe_function(target, np.zeros((0, 1)), np.zeros((0, 1))), target, proved)


def claimed(net, function, target, proved):
    certificate = claim(
        net,
        function,
        target.domains,
        proved.terms,
        dtype=net.dtype,
        theorem="carried-errors",
        details={"type": "network"},
        proof=proved.details,
    )
    return Compiled(net, None, certificate, target)


@pytest.fixture(scope="module")
def compiled(made):
    return certified(network([head for head, _ in made]), [part for _, part in made])


def failing(c):
    return [check.name for check in pa.recheck(c) if not check.holds]


def test_a_network_is_proved_and_never_refuted(compiled, made):
    rng = np.random.default_rng(0)
    points = np.concatenate([compiled.target.box.sample(300, rng), compiled.target.box.corners(), np.zeros((1, 2))])
    assert not balls.is_refuted(compiled, points)
    seen = max(map(float, balls.errors(compiled, points)))
    assert 0.1 * compiled.error_bound < seen
    terms = compiled.certificate.terms
    assert [t.name for t in terms] == ["head 0", "head 1", "head 2", "head 3", "rounding"]
    assert {t.source for t in terms} == {"approximation", "rounding"}
    assert terms[0].inputs["uses"] == 2.0 and terms[0].inputs["bound"] == made[0][1].certificate.error_bound
    assert balls.is_refuted(replace_bound(compiled, 0.5 * seen), points)  # the oracle would notice


def replace_bound(c, bound):
    return replace(c, certificate=replace(c.certificate, error_bound=bound))


def test_a_recheck_repeats_everything(compiled):
    checks = pa.recheck(compiled)
    assert all(check.holds and check.checked for check in checks)
    said = " ".join(check.name for check in checks)
    for what in ("wiring", "head for x0^2 on [-1,1], ", "head for x0*x1", "head 2", "rounding", "sum"):
        assert what in said
    read = Certificate.from_json(compiled.certificate.to_json())
    assert failing(replace(compiled, certificate=read)) == []


def test_parts_are_proved_where_no_proof_is_given(compiled, made):
    """Without `earlier` the proof does the heads' proofs again, and refuses a claim that is too good."""
    proof, parts = PROOFS["network"], [part for _, part in made]
    details = compiled.certificate.proof
    again = proof.prove(compiled.head, compiled.target, Given(details=details))
    assert [t.value for t in again.terms] == [t.value for t in compiled.certificate.terms]
    better = with_bound(parts[1], 0.5)
    stated = {**details, "parts": [p.to_json() for p in (parts[0], better, *parts[2:])]}
    with pytest.raises(ToleranceError, match=r"exp\(-x0\).* is not confirmed"):
        proof.prove(compiled.head, compiled.target, Given(details=stated))


def with_bound(part, factor):
    """A part whose claim is better than it was proved by this factor."""
    terms = tuple(replace(t, value=factor * t.value) for t in part.certificate.terms)
    lower = factor * part.certificate.error_bound * (1 + 1e-12)
    return replace(part, certificate=replace(part.certificate, terms=terms, error_bound=lower))


def planted(c, parts=None, **changes):
    """The same network with other claims in its certificate, which adds up."""
    proof = dict(c.certificate.proof)
    if parts is not None:
        proof["parts"] = [p.to_json() for p in parts]
    return replace(c, certificate=replace(c.certificate, proof=proof, **changes))


def test_planted_errors_are_caught(compiled, made):
    """One head's bound, its box, a gain, a function, a kind: each alone makes a recheck fail."""
    parts = [part for _, part in made]
    lowered = planted(compiled, [with_bound(parts[0], 0.9), *parts[1:]])
    assert any("head for x0^2" in name for name in failing(lowered))
    terms = compiled.certificate.terms
    for k in range(len(terms)):  # a gain that was dropped, a rounding that was forgotten
        fewer = tuple(replace(t, value=0.5 * t.value) if i == k else t for i, t in enumerate(terms))
        assert failing(planted(compiled, terms=fewer, error_bound=compiled.error_bound)) == [terms[k].name]
    missing = planted(compiled, terms=terms[1:])
    assert "head 0" in failing(missing)
    box = pa.Box([0.1], [1.9])
    smaller = replace(
        parts[1], box=box, certificate=replace(parts[1].certificate, domain={"arguments": [box.description]})
    )
    names = failing(planted(compiled, [parts[0], smaller, *parts[2:]]))
    assert names == ["proof"]
    reasons = [
        check.detail for check in pa.recheck(planted(compiled, [parts[0], smaller, *parts[2:]])) if not check.holds
    ]
    assert "exp(-x0)" in reasons[0] and "its box does not hold" in reasons[0]
    assert "parts" in failing(planted(compiled, parts[:3]))
    vouched = replace(parts[3], certificate=replace(parts[3].certificate, kind="proved_given"))
    assert any("sin(x0)" in name for name in failing(planted(compiled, [*parts[:3], vouched])))
    swapped = replace(parts[3], graph=parse("sin(x) + x", ["x"]))
    assert any("sin(x0)" in name for name in failing(planted(compiled, [*parts[:3], swapped])))


def test_changed_tensors_are_caught(compiled, made):
    """A weight, a bias, a value of a head: the hash says so, and so does the proof if the hash is made to fit."""
    for change in (
        lambda net: net.output.weight.mul_(1.001),
        lambda net: net.output.bias.add_(0.001),
        lambda net: net.heads[1].values.mul_(1.01),
    ):
        net = copy.deepcopy(compiled.head)
        with torch.no_grad():
            change(net)
        changed = replace(compiled, head=net)
        assert "tensors" in failing(changed)
        digest = model_digest(net.state_dict())
        model = {**compiled.certificate.model, "sha256": digest, "wiring_sha256": net.wiring_sha256()}
        forged = replace(changed, certificate=replace(compiled.certificate, model=model))
        names = failing(forged)
        assert "tensors" not in names and names != []


def test_the_wiring_must_make_the_function(compiled, made):
    heads, parts = [head for head, _ in made], [part for _, part in made]
    graphs = [part.graph for part in parts]
    graph, box = compiled.target.graph, compiled.target.box
    assert same_as_wiring(graph, PRODUCT, graphs, box)
    assert same_as_wiring(parse("sin(x0)*exp(-x1**2 - x0**2)*2 + 1/2", ["x0", "x1"]), PRODUCT, graphs, box)
    for other in ("2*exp(-(x0**2 + x1**2))*sin(x1) + 0.5", "2*exp(-(x0**2 + x1**2))*sin(x0) + 0.5000001", "x0 + x1"):
        assert not same_as_wiring(parse(other, ["x0", "x1"]), PRODUCT, graphs, box)
        with pytest.raises(UnsupportedError, match="affine forms differ"):
            certified(network(heads), parts, other)
    third = replace(PRODUCT, output=dense([[2 / 3]], [0.5], 6, {(0, 0): Fraction(2, 3)}))
    assert same_as_wiring(parse("2/3*(exp(-(x0**2 + x1**2))*sin(x0)) + 0.5", ["x0", "x1"]), third, graphs, box)
    c = certified(network(heads, third), parts, "2/3*(exp(-(x0**2 + x1**2))*sin(x0)) + 0.5")
    assert "coefficients" in [t.name for t in c.certificate.terms] and failing(c) == []


@pytest.mark.parametrize("low", [-1.0, 0.25])
def test_the_square_of_a_root_is_not_what_is_under_it_where_it_counts_as_0(low):
    """The network is relu(x), which is x only where that is positive; its parts are called √x and x²."""
    texts, domains = ("sqrt(relu(x))", "x**2"), ([(low, 1)], [(-0.1, 1.1)])
    made = [pa.compile(t, pa.Box.of(d), tolerance=1e-2) for t, d in zip(texts, domains)]
    wiring = Wiring(1, ((Group(0, chosen([0], 1)),), (Group(1, chosen([1], 2)),)), dense([[1.0]], start=2))
    root, claims = parse("sqrt(x)", ["x"]), [c.certificate for c in made]
    claims[0] = replace(claims[0], function={**claims[0].function, "sha256": root.sha256})
    graphs = (root, made[1].target.graph)
    parts = [Part(g, c.target.box, said) for g, c, said in zip(graphs, made, claims)]
    net, domain = network([c.head for c in made], wiring, inputs=1), f"[{low},1]"
    if low > 0:
        certified(net, parts, "x", domain)
    else:
        with pytest.raises(UnsupportedError, match="affine forms differ"):
            certified(net, parts, "x", domain)
    assert same_as_wiring(parse("x", ["x"]), wiring, graphs, pa.Box.of(domain))  # if the root has values


def test_nothing_is_learned_from_logarithms_that_may_be_undefined():
    """√(x²) is x where log(x) has a value, and nothing is known where it may have none."""
    graphs = [parse(text, ["x"]) for text in ("exp(log(x)/2)", "x**2", "sqrt(x)")]
    first = (Group(0, chosen([0], 1)), Group(1, chosen([0], 1)))
    wiring = Wiring(1, (first, (Group(2, chosen([2], 3)),)), dense([[1.0]], start=3))
    x, box = parse("x", ["x"]), pa.Box.of("[-1,1]")
    assert same_as_wiring(x, wiring, graphs, box) and not same_as_wiring(x, wiring, graphs, box, undefined=[0])


def test_a_domain_that_is_cut_into_boxes(compiled, made):
    """A smaller bound, which a recheck confirms with the stored cuts and not without them; cuts that are not cuts are refused."""
    parts, cuts = [part for _, part in made], [[-0.5, 0.0, 0.5], [0.0]]
    proved = PROOFS["network"].prove(compiled.head, compiled.target, Given(earlier=parts, details={"cuts": cuts}))
    assert proved.details["cuts"] == cuts and proved.bound < 0.99 * compiled.error_bound
    c = claimed(compiled.head, compiled.certificate.function, compiled.target, proved)
    assert failing(replace(c, certificate=Certificate.from_json(c.certificate.to_json()))) == []
    assert not balls.is_refuted(c, c.target.box.sample(300, np.random.default_rng(4)))
    assert failing(replace(c, certificate=replace(c.certificate, proof={**c.certificate.proof, "cuts": []}))) != []
    lo, hi = cut_boxes(np.array([-1.0, -1.0]), np.array([1.0, 1.0]), cuts)
    assert len(lo) == 8 and (hi - lo).prod(axis=1).sum() == 4.0  # they cover the domain
    many = np.linspace(-0.9, 0.9, 100).tolist()
    for wrong in ([[0.0]], [[0.5, 0.0], []], [[1.0], []], [[math.nan], []], [["x"], []], 3, [many, many]):
        with pytest.raises(FormatError, match="cuts"):
            PROOFS["network"].prove(compiled.head, compiled.target, Given(earlier=parts, details={"cuts": wrong}))


def test_a_function_that_is_its_wiring(compiled, made):
    """Without an expression f is what the wiring makes of the heads' functions, and the certificate must say so."""
    parts = [part for _, part in made]
    target = replace(compiled.target, graph=None, ask=None, label="net")
    c = certified_as_wiring(compiled.head, parts, target)
    assert failing(c) == [] and c.certificate.proof["meaning"] == "wiring"
    other = {**c.certificate.function, "type": "black box"}
    assert failing(replace(c, certificate=replace(c.certificate, function=other))) == ["function"]
    for meaning, about in (("wiring", compiled.target), ("graph", target), ("anything", target)):
        with pytest.raises(UnsupportedError, match="does not fit"):
            PROOFS["network"].prove(compiled.head, about, Given(earlier=parts, details={"meaning": meaning}))


def certified_as_wiring(net, parts, target):
    proved = PROOFS["network"].prove(net, target, Given(earlier=parts))
    digest = net.function_sha256([p.graph.to_json() for p in parts])
    return claimed(net, {"type": "network", "text": "net", "sha256": digest}, target, proved)


def test_bad_structure_is_refused_with_the_reason(made):
    """A head that reads a pole, or outside its box, or is too steep; claims about other heads; other norms."""
    heads, parts = [head for head, _ in made], [part for _, part in made]
    exp = heads[1], parts[1]
    far = Wiring(1, ((Group(0, dense([[1.0]], [0.02])),),), dense([[1.0]], start=1))
    with pytest.raises(
        UnsupportedError, match=r"exp\(-x0\) on .* may read input 0 anywhere in .* its box does not hold"
    ):
        certified(network([exp[0]], far, 1), [exp[1]], "exp(-x - 0.02)", "[0,2]")
    proof, net, target = PROOFS["network"], network(heads), make_target(FUNCTION, "[-1,1]^2")
    with pytest.raises(ShapeError, match="expected 4"):
        proof.prove(net, target, Given(earlier=parts[:2]))
    with pytest.raises(UnsupportedError, match="expected a claim that is proved"):
        proof.prove(net, target, Given(earlier=parts[::-1]))
    with pytest.raises(UnsupportedError, match="supremum norm"):
        proof.prove(net, target, Given(earlier=parts, norm=2.0))
    with pytest.raises(UnsupportedError, match="expected a AttentionNetwork"):
        proof.prove(heads[0], graph_target(parts[0].graph, (parts[0].box,), "x"), Given(earlier=parts))
    c = pa.compile("1/x", "[0.1,4]", tolerance=0.5)
    pole = Wiring(1, ((Group(0, chosen([0], 1)),), (Group(1, dense([[1.0]], start=1)),)), dense([[1.0]], start=2))
    reciprocal = Part(c.target.graph, c.target.box, c.certificate)
    with pytest.raises(UnsupportedError, match=r"1/x0 in layer 2 reads .*may contain a pole"):
        certified(network([heads[0], c.head], pole, 1), [parts[0], reciprocal], "1/x**2*1", "[-1,1]")


def test_parts_are_read_and_never_trusted(made):
    part = made[2][1]
    data = part.to_json()
    again = Part.from_json(data)
    assert again.graph == part.graph and again.box == part.box and again.certificate == part.certificate
    assert again.to_json() == data
    for broken in (
        None, [], {}, {**data, "more": 1}, {**data, "box": {"lo": ["0x1p0"], "hi": ["0x0p0"]}}, {**data, "box": {"lo": [1]}},
        {**data, "box": {"lo": ["nan", "0x0p0"], "hi": ["0x1p0", "0x1p0"]}}, {**data, "graph": {}},
        {**data, "certificate": {**data["certificate"], "kind": "holy"}}, {**data, "certificate": "proved"},
    ):  # fmt: skip
        with pytest.raises(FormatError):
            Part.from_json(broken)
    for many in (None, {}, "parts", [data, data]):
        with pytest.raises(FormatError, match="expected 1, one for each head"):
            Part.all_from_json(many, [made[2][0]])


@pytest.mark.parametrize("text", ["sqrt(x0*x0*x1)", "sqrt(x0*x1)*x2"])
def test_a_head_that_is_read_where_a_slope_has_no_bound_is_refused(text):
    """The root of a product near 0: whatever the error of the product is, it is too large."""
    with pytest.raises(UnsupportedError, match="slope has no bound"):
        pa.compile(text, pa.Box([0.0] * 3, [1.0] * 3), tolerance=1e-2, method="layers")
