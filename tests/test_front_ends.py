"""Functions that people have, torch and sympy, as graphs: right where they are accepted, refused with the reason elsewhere."""

import math
from fractions import Fraction

import numpy as np
import pytest
import sympy
import torch
import torch.nn.functional as F
from balls import exact_value
from torch import nn

import partita as pa
from partita.arithmetic import Interval
from partita.errors import ExpressionError, NotTraceableError
from partita.functions import parse
from partita.functions.graph import Graph, GraphBuilder
from partita.functions.piecewise import recognise
from partita.functions.program import Linear, program
from partita.functions.sympy_trees import from_sympy
from partita.functions.target import make_target
from partita.functions.tracing import compare, trace

POINTS = np.random.default_rng(0).uniform(-1, 1, (64, 2))
MATRIX = torch.tensor([[1.0, 2.0], [3.0, 0.0]], dtype=torch.float64)


def _written(z):
    y = z.clone()
    y[:, 0] = 2 * y[:, 1]
    y += 1
    return y.sum(1)


def _filled(z):
    out = torch.zeros_like(z)
    out[:, 1] = z[:, 0] ** 2
    out[:, 0].fill_(3.0)
    return out


def _copied(z):
    y = z * 1.0
    y.t().contiguous().mul_(7.0)  # a copy: y stays
    y.t()[0].mul_(3.0)  # no copy
    return y


TRACED = {
    "arithmetic": lambda z: (1 - z[:, 0]) / (2 + z[:, 1] ** 2) - 3 * z[:, 0],
    "functions": lambda z: torch.sin(z[:, 0]).exp() + torch.atan(z[:, 1]) * torch.tanh(z[:, 0]),
    "powers": lambda z: z[:, 0] ** 3 + z[:, 1].abs() ** 0.5 + 2 ** z[:, 0] + (z[:, 0] ** 2 + 1) ** -1.7,
    "matrix": lambda z: z @ MATRIX,
    "einsum": lambda z: torch.einsum("bi,ij,bj->b", z, MATRIX, z),
    "norm": lambda z: z.norm(dim=1),
    "softmax": lambda z: torch.softmax(3 * z, dim=1),
    "log-sum-exp": lambda z: torch.logsumexp(z, 1) + F.log_softmax(z, dim=1)[:, 0],
    "where": lambda z: torch.where(z[:, 0] > 0.2, z[:, 1] ** 2, -z[:, 0]),
    "Booleans": lambda z: ((z[:, 0] > 0) & (z[:, 1] <= 0.5)).double() * z[:, 1] + (~(z[:, 0] < 0)) * 2.0,
    "truth values": lambda z: torch.where(
        ((z[:, 0] > 0) * (z[:, 1] < 0.5) + (z[:, 0] > -0.5)) & torch.tensor(True), z[:, 1], z[:, 0]
    ),
    "copies": _copied,
    "maximum": lambda z: z.max(dim=1).values + z.amin(1) + torch.maximum(z[:, 0], z[:, 1]),
    "clamp": lambda z: z.clamp(-0.5, 0.5).sum(1) + z[:, 0].clamp(min=0),
    "writing": _written,
    "filling": _filled,
    "statistics": lambda z: torch.stack([z.mean(1), z.var(1), z.std(1), z.prod(1)], dim=1),
    "distances": lambda z: torch.cdist(z, MATRIX),
    "layer norm": lambda z: F.layer_norm(z, (2,)),
    "activations": lambda z: (
        F.softplus(z) + F.elu(z) + F.mish(z) + F.hardswish(z) + F.hardsigmoid(z) + torch.sign(z) + F.silu(z)
    ),
    "shapes": lambda z: torch.cat([z, z.flip(1)], dim=1).reshape(len(z), 2, 2).transpose(1, 2),
    "attention": lambda z: F.scaled_dot_product_attention(z[:, :, None], z[:, :, None], z[:, :, None])[:, :, 0],
    "hyperbolic": lambda z: (
        torch.sinh(z[:, 0]) + torch.cosh(z[:, 1]) + torch.expm1(z[:, 0]) + torch.log1p(z[:, 1] ** 2)
    ),
}


@pytest.mark.parametrize("name", TRACED)
def test_traces_say_what_torch_says(name):
    function = TRACED[name]
    graph = trace(function, [(2,)])
    expected = function(torch.from_numpy(POINTS)).numpy()
    assert graph.output_shape == expected.shape[1:]
    assert np.abs(graph.evaluate(POINTS) - expected).max() < 1e-14
    again = graph.evaluate_torch(torch.from_numpy(POINTS)).numpy()
    assert np.abs(again - expected).max() < 1e-14
    enclosed = graph.enclose(POINTS, POINTS)
    flat = expected.reshape(len(POINTS), -1)
    assert (enclosed.lo - 1e-14 <= flat).all() and (flat <= enclosed.hi + 1e-14).all()


def _swallowing(attempt, error=Exception):
    """A function that catches what tracing raises, and goes on as if nothing had happened."""

    def function(z):
        try:
            attempt(z)
        except error:
            return torch.sin(z[:, 0])
        return torch.sin(z[:, 0]) + (torch.abs(z[:, 0] - 0.3) < 1e-7)

    return function


def _narrow_writing(z):
    out = torch.zeros_like(z, dtype=torch.float32)
    out[:, 0] = z[:, 0]
    return out[:, 0] + 1000.0


def _doubled(z):
    count = (z[:, 0] > 0).long()
    for _ in range(60):
        count = count + count
    return count * z[:, 1]


REFUSED = {
    "random": (lambda z: z[:, 0] + torch.rand(len(z)), "random"),
    "control flow": (lambda z: z[:, 0] if z[0, 0] > 0 else z[:, 1], "_local_scalar_dense"),
    "numpy": (lambda z: torch.from_numpy(np.sin(np.asarray(z)))[:, 0], "numpy"),
    "other rows": (lambda z: z[:, 0] - z[:, 0].mean(), "other rows"),
    "row numbers": (lambda z: z[:, 0] * torch.arange(len(z)), "differently"),
    "constant": (lambda z: torch.ones(len(z)), "did not compute from its input"),
    "zero": (lambda z: torch.zeros_like(z)[:, 0], "does not depend"),
    "selection": (lambda z: z[z[:, 0] > 0], "selects"),
    "rounding": (lambda z: z.round(), "aten::round"),
    "position": (lambda z: z.argmax(1) * 1.0, "argmax"),
    "place": (lambda z: z.max(dim=1).indices * 1.0, "index of a maximum"),
    "ordinary": (lambda z: torch.zeros(2, dtype=torch.float64).copy_(z[:, 0]), "ordinary tensor"),
    "truth of numbers": (lambda z: torch.where(torch.logical_not((z - 0.3).abs()), z + 5, z), "numbers as truth"),
    "truth or numbers": (lambda z: torch.cat([z, z.abs() > 1e-7], dim=1), "side by side"),
    "largest truth": (lambda z: torch.where((z > 0).amax(1), z[:, 0], z[:, 1]), "amax on truth values"),
    "integers asked for": (lambda z: z.sum(1, dtype=torch.int64), "int64"),
    "swallowed bool": (_swallowing(lambda z: bool((z > 0).any())), "catches an error that tracing raises"),
    "swallowed item": (_swallowing(lambda z: z[0, 0].item()), "catches"),
    "swallowed numpy": (_swallowing(lambda z: z.numpy()), "catches"),
    "swallowed array": (_swallowing(lambda z: np.sin(z)), "catches"),
    "swallowed list": (_swallowing(lambda z: z.tolist()), "catches"),
    "swallowed operator": (_swallowing(lambda z: z.round()), "catches"),
    "swallowed randomness": (_swallowing(lambda z: torch.rand(2), BaseException), "catches"),
    "half": (lambda z: 1e6 + z[:, 0].half().double(), "rounds float64 to float16"),
    "float": (lambda z: 1000 + z[:, 0].float().double(), "rounds float64 to float32"),
    "bfloat16": (lambda z: z.to(torch.bfloat16).sum(1), "rounds float64 to bfloat16"),
    "as tensor": (lambda z: torch.as_tensor(z, dtype=torch.float32), "rounds float64 to float32"),
    "type as": (lambda z: z.type_as(torch.ones(1)), "rounds float64 to float32"),
    "written narrow": (_narrow_writing, "rounds float64 to float32"),
    "added narrow": (lambda z: torch.zeros_like(z, dtype=torch.float32).add_(z), "rounds float64 to float32"),
    "narrow beside a number": (
        lambda z: torch.stack([row[0] * torch.ones(2) for row in z]),
        "rounds float64 to float32",
    ),
    "sum in float32": (lambda z: z.sum(1, dtype=torch.float32), "rounds float64 to float32"),
    "softmax in float32": (lambda z: z.softmax(1, dtype=torch.float32), "rounds float64 to float32"),
    "sums of masks in float32": (
        lambda z: (z[:, 0] > 0) * 0.1 + 0.7 + 0 * z[:, 0],
        "computes aten::add.Tensor in float32",
    ),
    "quotients of counts": (lambda z: (z > 0).sum(1) / 3 + 0 * z[:, 0], "computes aten::div.Tensor in float32"),
    "integers that overflow": (_doubled, "integers beyond 2"),
    "integers that float64 lacks": (lambda z: ((z[:, 0] > 0) * (2**53 + 1) - 2**53) * z[:, 1], "integers beyond 2"),
    "small integers": (lambda z: (z > 0).to(torch.uint8) * z, "turns bool into uint8"),
    "truncated": (lambda z: z.long() * 1.0, "turns float64 into int64"),
    "bits": (lambda z: z.view(torch.int64) * 1.0, "bits"),
    "complex": (lambda z: (z * 1j).imag, "complex"),
    "unwritten": (lambda z: torch.empty_like(z) + z, "before writing"),
    "place returned": (lambda z: z.max(dim=1).indices, "index of a maximum"),
    "rounding mode": (lambda z: torch.div(z, 2, rounding_mode="floor"), "rounding_mode"),
    "numbers into truth": (lambda z: (z > 0).copy_(z) * z, "into a tensor of bool"),
    "infinite": (lambda z: z[:, 0] + math.inf, "not finite"),
    "dropout": (nn.Sequential(nn.Dropout(0.5)), "random"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_graph_is_refused_with_the_reason(name):
    function, reason = REFUSED[name]
    with pytest.raises(NotTraceableError, match=reason):
        trace(function, [(2,)])


def test_casts_that_round_nothing_are_traced():
    graph = trace(lambda z: z.double() + (z > 0).float() * z + (z > 0).half(), [(2,)])
    z = torch.from_numpy(POINTS)
    assert np.array_equal(graph.evaluate(POINTS), (z + (z > 0) * z + (z > 0)).numpy())
    single = trace(lambda z: z.double() * 3 + z, [(2,)], dtype=torch.float32)
    assert single.infix() == "x0*3 + x0, x1*3 + x1"
    with pytest.raises(NotTraceableError, match="rounds float64 to float32"):
        trace(lambda z: (z.double() / 3).float(), [(2,)], dtype=torch.float32)


def test_numbers_are_those_of_the_dtype():
    """In float32 torch compares with float32(0.1); so does the trace, where 0.1 itself would change the value by 1."""
    edge = float(np.float32(0.1))
    function = lambda z: torch.where(z[:, 0] > 0.1, 1.0, 0.0) + z[:, 0]  # noqa: E731
    graph = trace(function, [(1,)], dtype=torch.float32)
    assert graph.evaluate([[edge]])[0] == function(torch.tensor([[edge]])).item() == edge
    mask = trace(lambda z: (z[:, 0] > 0) * 0.1 + z[:, 0], [(1,)])  # a mask times 0.1 is float32
    assert mask.evaluate([[0.5]])[0] == 0.5 + edge


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch itself, when it first compiles
def test_functions_under_torch_compile_are_used_as_written():
    @torch.compile(backend="eager")
    def f(z):
        return torch.sin(z[:, 0])

    network = nn.Sequential(nn.Linear(1, 3), nn.Tanh())
    for function, label in ((f, "f"), (torch.compile(network), "Sequential")):
        target = make_target(function, pa.Box([0], [1]), trace=True)
        assert target.graph is not None and label in target.origin
    inside = make_target(lambda z: f(z) + 1 if isinstance(z, torch.Tensor) else np.sin(z[:, 0]) + 1, pa.Box([0], [1]))
    assert inside.graph is not None and inside.graph.infix() == "sin(x0) + 1"


def test_targets_say_what_f_means():
    box = pa.Box([0], [1])
    assert make_target("x/3 + 0.5", box).meaning == ""
    assert make_target("0.1*x + pi", box).meaning == "in the expression, 0.1, pi mean the nearest float64 number"
    assert "torch's own rounding in float64" in make_target(lambda z: z[:, 0], box).meaning
    assert "black box (not traced)" in make_target(lambda z: z[:, 0], box, trace=False).origin


def test_products_of_truth_values_are_truth_values():
    """A product that is false on a spot too small for samples: read as the number 0 it was taken for "0 ≥ 0", true."""
    graph = trace(lambda z: torch.where((z[:, 0].abs() > 1e-7) * (z[:, 1] < 9), z[:, 0], z[:, 0] + 5), [(2,)])
    assert graph.evaluate(np.zeros((1, 2))).item() == 5.0
    doubly = trace(lambda z: ((z[:, 0] >= 0.3) + (z[:, 0] <= 0.3)) * z[:, 1], [(2,)])
    assert doubly.evaluate(np.array([[0.3, 0.7]])).item() == 0.7


ACTIVATIONS = [nn.ReLU(), nn.LeakyReLU(0.2), nn.Tanh(), nn.GELU(), nn.GELU("tanh"), nn.Sigmoid(), nn.SiLU()]


@pytest.mark.parametrize(
    "activation",
    [
        pytest.param(
            a, marks=[pytest.mark.slow] * (isinstance(a, nn.LeakyReLU | nn.Sigmoid | nn.SiLU) or "tanh" in str(a))
        )
        for a in ACTIVATIONS
    ],
    ids=str,
)
def test_networks_are_proved(activation):
    torch.manual_seed(1)
    network = nn.Sequential(nn.Linear(2, 6), activation, nn.Linear(6, 5), activation, nn.Linear(5, 1))
    c = pa.compile(network, pa.Box([-1, -1], [1, 1]), tolerance=0.05)
    assert c.certificate.kind == "proved" and "compared" in c.explain()
    z = np.random.default_rng(2).uniform(-1, 1, (2000, 2))
    with torch.no_grad():
        truth = network.double()(torch.from_numpy(z)).numpy()
    assert np.abs(c(z) - truth).max() <= c.error_bound


def test_a_trace_that_differs_is_refused():
    """A function that behaves otherwise in a large batch: the trace, made with two rows, is not what it does."""

    def fickle(z):
        return z[:, 0] if len(z) < 100 else z[:, 0] + 1e-3

    with pytest.raises(NotTraceableError, match="differs from its trace"):
        make_target(fickle, pa.Box([0], [1]), trace=True)
    target = make_target(fickle, pa.Box([0], [1]))
    assert target.graph is None and "black box" in target.origin
    assert make_target(lambda z: z[:, 0], pa.Box([0], [1])).graph is not None


def test_comparison_sees_small_differences():
    graph = parse("x0 + x1", ["x0", "x1"])
    answers = POINTS.sum(axis=1, keepdims=True)
    assert compare(graph, answers, POINTS) is None
    answers[17] += 1e-6
    assert "the function returns" in str(compare(graph, answers, POINTS))


def test_tracing_can_be_asked_for_and_left_out():
    box = pa.Box([0], [1])
    assert pa.compile(lambda z: z[:, 0], box, tolerance=0.1, trace=False).certificate.kind == "estimated"
    assert pa.compile(lambda z: z[:, 0], box, tolerance=0.1).certificate.kind == "proved"
    with pytest.raises(NotTraceableError, match="once per point"):
        pa.compile(lambda z: z[0], box, tolerance=0.1, vectorize=True, trace=True)
    c = pa.compile(lambda z: np.sin(z[:, 0]), box, tolerance=0.1)
    assert c.certificate.kind == "estimated" and "black box" in c.explain()


def test_traced_heads_are_stored_whole(tmp_path):
    c = pa.compile(lambda z: torch.sin(z[:, 0]) * z[:, 1], pa.Box([0, 0], [1, 1]), tolerance=1e-3)
    assert c.target.label == "sin(x0)*x1"
    again = pa.load(c.save(tmp_path / "head"))
    assert again.target.graph == c.target.graph and all(check.holds for check in pa.recheck(again))


# ---- sympy ------------------------------------------------------------------------------------------

x, y = sympy.symbols("x y")
SYMPY = {
    "polynomial": x**3 - 2 * x * y + sympy.Rational(1, 3),
    "quotient": (x + 1) / (y**2 + 2) / 7,
    "functions": sympy.exp(-(x**2)) * sympy.sin(3 * y) + sympy.tanh(x) + sympy.erf(y) + sympy.atan(x),
    "roots": sympy.sqrt(x + 2) + (y + 2) ** sympy.Rational(-3, 2) + (x + 2) ** sympy.Rational(1, 3),
    "constants": sympy.pi * x + sympy.E * y + sympy.Float("0.1"),
    "hyperbolic": sympy.sinh(x) + sympy.cosh(y) + sympy.sec(x) + 1 / sympy.cosh(y),
    "extrema": sympy.Max(x, y, 0) + sympy.Min(x, 2 * y) + sympy.Abs(x - y),
    "pieces": sympy.Piecewise((x, x > y), (y**2, (x < 0) & (y >= 0)), (1, True)),
    "signs": sympy.sign(x - sympy.Rational(1, 4)) + sympy.Heaviside(y),
}


@pytest.mark.parametrize("name", SYMPY)
def test_sympy_trees_say_what_sympy_says(name):
    tree = SYMPY[name]
    graph = from_sympy(tree, ["x0", "x1"], {"x": "x0", "y": "x1"})
    expected = [float(tree.subs({x: float(a), y: float(b)})) for a, b in POINTS]
    assert np.abs(graph.evaluate(POINTS) - expected).max() < 1e-13


def test_sympy_vectors_and_compile():
    assert from_sympy(sympy.Matrix([x, y]), ["x", "y"]).output_shape == (2,)
    assert from_sympy(sympy.Matrix([[x, y], [y, x]]), ["x", "y"]).output_shape == (2, 2)
    assert from_sympy([x, y, x * y], ["x", "y"]).output_shape == (3,)
    c = pa.compile(sympy.sin(3 * x) + x * sympy.cos(2 * y), pa.Box([-1, -1], [1, 1]), tolerance=1e-3)
    assert c.certificate.kind == "proved" and all(check.holds for check in pa.recheck(c))


NUMBERS = [
    *(sympy.Integer(n) for n in (0, -7, 2**53, 2**53 + 1, -(2**60 + 1), 3**80, 10**300 + 1)),
    *(
        sympy.Rational(p, q)
        for p, q in ((1, 3), (-2, 7), (10**17 + 1, 10**17), (2**70 + 1, 3**60), (10**400 + 1, 10**400))
    ),
    *(sympy.Rational(1, q) for q in (10**30, 2**60 + 1, 10**350)),
    *(
        sympy.Float(text, digits)
        for text, digits in (("0.1", 15), ("0.1", 50), ("1e-300", 40), ("5e-324", 15), ("-1e300", 300))
    ),
]


@pytest.mark.parametrize("number", NUMBERS, ids=lambda n: f"{str(n)[:12]}, {len(str(n))} characters")
def test_numbers_of_sympy_trees_are_exact(number):
    graph = from_sympy(number + 0 * x, ["x"])
    exact = Fraction(int(sympy.Rational(number).p), int(sympy.Rational(number).q))
    assert exact_value(graph) == exact
    found, near = graph.enclose([[0.0]], [[0.0]]), float(exact)
    assert Fraction(float(found.lo[0, 0])) <= exact <= Fraction(float(found.hi[0, 0]))
    assert found.hi[0, 0] - found.lo[0, 0] <= 1e-14 * abs(near) + 1e-306
    assert parse(graph.infix(), ["x0"]) == graph


def test_thirds_and_named_numbers_are_exact_in_sympy_trees():
    assert from_sympy(sympy.Rational(1, 3) + 0 * x + x, ["x"]).infix() == "sum(1/3, x0)"
    assert from_sympy(sympy.pi * x, ["x"]).infix() == "4*atan(1)*x0"
    for number in (sympy.pi, sympy.E, sympy.GoldenRatio, sympy.TribonacciConstant):
        found = from_sympy(number, ["x"]).enclose([[0.0]], [[0.0]])
        lo, hi = (sympy.Rational(float(end[0, 0])) for end in (found.lo, found.hi))
        assert lo < number.evalf(60) < hi and hi - lo < 1e-13


CANCELLING = {
    "integer": (sympy.Max((2**53 + 1) * x, 0) - sympy.Max(2**53 * x, 0), Fraction(3, 4)),
    "rational": (10**17 * (sympy.Max(sympy.Rational(10**17 + 1, 10**17) * x, 0) - sympy.Max(x, 0)), Fraction(3, 4)),
    "power": ((2**60 + 1) * x**2 - 2**60 * x**2, Fraction(9, 16)),
}


@pytest.mark.parametrize("name", CANCELLING)
def test_no_interpretation_rounds_a_number_of_a_sympy_tree(name):
    """f(3/4) is not 0: rounded to float64, the two numbers are one."""
    tree, truth = CANCELLING[name]
    graph = from_sympy(tree, ["x"])
    assert exact_value(graph, [0.75]) == truth
    point = np.array([[0.75]])
    model = graph.taylor(point, np.zeros((1, 1)), 2)
    near, far = float(model.coefficients[0, 0, 0]), float(model.remainder[0, 0])
    for found in (
        graph.enclose(point, point),
        graph.enclose_gradient(point, point)[0],
        Interval([[near - far]], [[near + far]]),
    ):
        assert found.lo[0, 0] <= truth <= found.hi[0, 0]
    if name != "power":
        assert recognise(graph, pa.Box([-1], [1])).evaluate([0.75]) == (truth,)


def test_branches_with_long_numbers_meet():
    long = sympy.Rational(2**60 + 1, 3)
    graph = from_sympy(sympy.Piecewise((long * x, x > 0), (2 * long * x, True)), ["x"])
    assert all(node.operation != "where" for node in graph.nodes)


@pytest.mark.parametrize(
    ("tree", "reason"),
    [
        (sympy.Symbol("w") + 1, "symbol w"),
        (sympy.gamma(x), "gamma"),
        (sympy.Piecewise((x, x > 0)), "everything else"),
        (sympy.Integer(10) ** 400 * x, "too large"),
        (sympy.Float("1e-700") * x, "too small"),
        (sympy.Rational(3**2000, 2**3000 + 1) * x, "too long"),
        (sympy.Catalan * x, "Catalan"),
        (sympy.Function("exp")(x), "found exp"),
        (sympy.Piecewise((x, sympy.Eq(x, 0)), (1, True)), "condition"),
    ],
)
def test_sympy_refusals(tree, reason):
    with pytest.raises(ExpressionError, match=reason):
        from_sympy(tree, ["x", "y"])


# ---- sums of the same terms, together ---------------------------------------------------------------


def _dense(weights):
    """Σ_k weights[i, k] · sin(x_k) as single products and sums."""
    builder = GraphBuilder(weights.shape[1])
    terms = [builder.add("sin", builder.add("input", parameters=(k,))) for k in range(weights.shape[1])]
    rows = []
    for row in weights.tolist():
        products = [builder.add("mul", builder.add("const", parameters=(w,)), t) for w, t in zip(row, terms)]
        rows.append(builder.add("sum", *products))
    return builder.finish(rows, (len(rows),))


def test_a_layer_is_one_step():
    graph = _dense(np.random.default_rng(0).normal(size=(7, 5)))
    steps = program(graph.nodes, graph.outputs)
    layers = [s.work for s in steps if isinstance(s.work, Linear)]
    assert len(layers) == 1 and layers[0].matrix.shape == (7, 5) and len(steps) == 5 + 5 + 1
    assert len(graph.nodes) > 70


def _one_by_one(graph: Graph) -> Graph:
    """The same function with sums of two, which are not taken together."""
    builder, place = GraphBuilder(graph.num_inputs), {}
    for k, node in enumerate(graph.nodes):
        arguments = [place[a] for a in node.arguments]
        if node.operation == "sum":
            total = arguments[0]
            for a in arguments[1:]:
                total = builder.add("add", total, a)
            place[k] = total
        else:
            place[k] = builder.add(node.operation, *arguments, parameters=node.parameters)
    return builder.finish([place[k] for k in graph.outputs], graph.output_shape)


def test_taking_sums_together_changes_no_enclosure_by_more_than_rounding():
    graph = _dense(np.random.default_rng(1).normal(size=(6, 5)) * [1e-8, 1, 1e8, 0, 1])
    single = _one_by_one(graph)
    rng = np.random.default_rng(2)
    lo = rng.uniform(-1, 1, (40, 5))
    hi = lo + rng.uniform(0, 0.5, (40, 5)) * (rng.uniform(size=(40, 1)) < 0.7)
    size = 1e9
    for first, second in zip(
        (graph.enclose(lo, hi), *graph.enclose_gradient(lo, hi)),
        (single.enclose(lo, hi), *single.enclose_gradient(lo, hi)),
    ):
        assert np.abs(first.lo - second.lo).max() < 1e-13 * size and np.abs(first.hi - second.hi).max() < 1e-13 * size
    together, apart = (g.taylor((lo + hi) / 2, (hi - lo) / 2, 4) for g in (graph, single))
    assert np.abs(together.coefficients - apart.coefficients).max() < 1e-13 * size
    assert np.abs(together.remainder - apart.remainder).max() < 1e-12 * size
    assert np.allclose(graph.evaluate(lo), single.evaluate(lo), rtol=1e-12, atol=1e-6)


@pytest.mark.parametrize("seed", range(20))
def test_weighted_sums_enclose_exact_sums(seed):
    """Against exact rational arithmetic, at the ends that make each sum extreme: no tolerance."""
    rng = np.random.default_rng(seed)
    n, boxes = int(rng.integers(1, 40)), 5
    matrix = rng.normal(size=(3, n)) * 10.0 ** rng.integers(-20, 20, (3, n)) * (rng.uniform(size=(3, n)) < 0.8)
    lo = rng.normal(size=(n, boxes)) * 10.0 ** rng.integers(-12, 12, (n, 1))
    hi = lo + np.abs(rng.normal(size=(n, boxes))) * (rng.uniform(size=(n, boxes)) < 0.5)
    found = Interval.weighted_sums([Interval(a, b) for a, b in zip(lo, hi)], matrix)
    for row, interval in zip(matrix, found):
        for j in range(boxes):
            ends = [
                sorted((Fraction(c) * Fraction(a), Fraction(c) * Fraction(b)))
                for c, a, b in zip(row, lo[:, j], hi[:, j])
            ]
            assert interval.lo[j] <= sum(e[0] for e in ends) and sum(e[1] for e in ends) <= interval.hi[j]


def test_weighted_sums_forget_what_is_unbounded_and_only_that():
    terms = [Interval([0.0, 0.0], [1.0, np.inf]), Interval([1.0, 1.0], [2.0, 2.0])]
    both, second = Interval.weighted_sums(terms, np.array([[1.0, 1.0], [0.0, 1.0]]))
    assert both.is_entire.tolist() == [False, True] and second.is_entire.tolist() == [False, False]
    zero = Interval.weighted_sums([Interval.point([0.0])] * 4, np.ones((1, 4)))[0]
    assert zero.lo[0] == zero.hi[0] == 0.0


def test_sums_that_underflow_are_not_zero():
    tiny = "1e-200*(1e-200*x0)"
    graph = parse(
        f"sum({tiny}, {tiny.replace('x0', 'x1')}, {tiny.replace('x0', 'sin(x0)')}, {tiny.replace('x0', 'cos(x1)')})*1e200*1e200",
        ["x0", "x1"],
    )
    found = graph.enclose([[0.5, 0.5]], [[0.6, 0.6]])
    assert found.lo[0, 0] < 0 < 2.36 < found.hi[0, 0]
    assert graph.taylor([[0.5, 0.5]], [[0.1, 0.1]], 3).remainder[0, 0] >= 1.0


def test_what_is_undefined_stays_so_in_a_sum():
    graph = parse("sum(0*log(x0 - 0.5), x0, x1, x0*x1)", ["x0", "x1"])
    assert graph.enclose([[0.3, 0.5]], [[0.31, 0.6]]).is_entire.all()
    value, slope = graph.enclose_gradient([[0.3, 0.5]], [[0.31, 0.6]])
    assert value.is_entire.all() and slope.is_entire.all()
    assert np.isinf(graph.taylor([[0.3, 0.5]], [[0.01, 0.1]], 2).remainder).all()
    assert not graph.enclose([[0.7, 0.5]], [[0.8, 0.6]]).is_entire.any()


def test_slopes_across_a_pole_are_unknown():
    slope = parse("tan(x0)", ["x0"]).enclose_gradient([[1.0]], [[2.0]])[1]
    assert slope.is_entire.all()


# ---- branches that meet ------------------------------------------------------------------------------


def test_branches_that_meet_are_continuous():
    cases = {
        "leaky": lambda z: torch.where(z[:, 0] > 0, z[:, 0], 0.1 * z[:, 0]),
        "absolute": lambda z: torch.where(z[:, 0] >= z[:, 1], z[:, 0] - z[:, 1], z[:, 1] - z[:, 0]),
        "of a network": lambda z: torch.where((s := torch.sin(z[:, 0]) + z[:, 1]) < 0, 0.25 * s, s),
        "shifted": lambda z: torch.where(z[:, 0] <= 0.5, 3 + z[:, 0], 2.5 + 2 * z[:, 0]),
    }
    for function in cases.values():
        graph = trace(function, [(2,)])
        assert all(node.operation != "where" for node in graph.nodes)
        assert np.abs(graph.evaluate(POINTS) - function(torch.from_numpy(POINTS)).numpy()).max() < 1e-15
    c = pa.compile(cases["leaky"], pa.Box([-1, -1], [1, 1]), tolerance=1e-3)
    assert c.candidates[0].method == "pieces" and c.num_keys == 2


@pytest.mark.parametrize(
    "function",
    [
        lambda z: torch.where(z[:, 0] > 0, z[:, 0] + 1, z[:, 0]),
        lambda z: torch.where(z[:, 0] > 0, z[:, 1], z[:, 0]),
        lambda z: torch.where(z[:, 0] > 1e-9, z[:, 0], 0.1 * z[:, 0]),
        lambda z: torch.where(z[:, 0] ** 2 > 0.5, z[:, 0], 0 * z[:, 0]),
    ],
)
def test_branches_that_may_jump_stay_branches(function):
    graph = trace(function, [(2,)])
    assert any(node.operation == "where" for node in graph.nodes)
    assert np.array_equal(graph.evaluate(POINTS), function(torch.from_numpy(POINTS)).numpy())


def test_pieces_of_sympy_meet_too():
    graph = from_sympy(sympy.Piecewise((x + y, x > 0), (y - x, True)), ["x", "y"])
    assert all(node.operation != "where" for node in graph.nodes)
    assert np.abs(graph.evaluate(POINTS) - (POINTS[:, 1] + np.abs(POINTS[:, 0]))).max() < 1e-15


def test_shared_nodes_are_worked_out_once():
    def doubling(z):
        y = z[:, 0]
        for _ in range(60):
            y = y + y
        return torch.where(y > 0, y, 0.5 * y)

    graph = trace(doubling, [(2,)])
    assert all(node.operation != "where" for node in graph.nodes)


def test_small_outputs_beside_large_ones_are_compared():
    graph = parse("1e9*x0, x1", ["x0", "x1"])
    answers = np.stack([1e9 * POINTS[:, 0], POINTS[:, 1]], axis=1)
    assert compare(graph, answers, POINTS) is None
    answers[3, 1] += 1e-3
    assert compare(graph, answers, POINTS) is not None
