"""The expression graph: its four interpretations agree, its file format is strict, its text reads back."""

import copy
import json

import numpy as np
import pytest
import torch

from partita.errors import ExpressionLimitError, FormatError, ShapeError, UnsupportedError
from partita.functions import Graph, parse
from partita.functions.graph import GraphBuilder
from partita.functions.operations import OPERATIONS, Node

POINTS = 200
SAMPLES = {
    "input": "x0",
    "const": "2.5",
    "add": "x0 + x1",
    "sub": "x0 - x1",
    "mul": "x0*x1",
    "div": "x0/(x1 + 3)",
    "neg": "-x0",
    "pow": "x0^3 + (x1 + 3)^-2",
    "sum": "sum(x0, x1, x0*x1, 1)",
    "exp": "exp(x0)",
    "log": "log(x0 + 3)",
    "sqrt": "sqrt(x0 + 3)",
    "sin": "sin(3*x0)",
    "cos": "cos(3*x0)",
    "tan": "tan(x0/2)",
    "atan": "atan(x0)",
    "tanh": "tanh(x0)",
    "sigmoid": "sigmoid(x0)",
    "erf": "erf(x0)",
    "asinh": "asinh(3*x0)",
    "acosh": "acosh(x0 + 3)",
    "atanh": "atanh(x0/4)",
    "floor": "floor(2*x0)",
    "abs": "abs(x0)",
    "min": "min(x0, x1)",
    "max": "max(x0, x1)",
    "relu": "relu(x0)",
    "clamp": "clamp(x0, -0.5, 0.5)",
    "where": "where(x0, x1, x1 + 0.25)",
}


def points() -> np.ndarray:
    return np.random.default_rng(21).uniform(-2, 2, (POINTS, 2))


def test_every_operation_has_a_sample() -> None:
    assert SAMPLES.keys() == OPERATIONS.keys()


@pytest.mark.parametrize("operation", SAMPLES)
def test_numpy_and_torch_agree(operation: str) -> None:
    graph = parse(SAMPLES[operation], ["x0", "x1"])
    assert operation in {node.operation for node in graph.nodes}
    expected = graph.evaluate(points())
    np.testing.assert_allclose(
        graph.evaluate_torch(torch.from_numpy(points())).numpy(), expected, rtol=1e-13, atol=1e-14
    )
    single = graph.evaluate_torch(torch.from_numpy(points()).float())
    assert single.dtype == torch.float32
    np.testing.assert_allclose(single.numpy(), expected, rtol=2e-5, atol=1e-5)


@pytest.mark.parametrize("operation", SAMPLES)
@pytest.mark.parametrize("width", [0.0, 1e-3, 1.0])
def test_enclosures_hold_the_values(operation: str, width: float) -> None:
    graph = parse(SAMPLES[operation], ["x0", "x1"])
    rng = np.random.default_rng(22)
    lo = points()
    found, slopes = graph.enclose_gradient(lo, lo + width)
    plain = graph.enclose(lo, lo + width)
    assert (found.lo == plain.lo).all() and (found.hi == plain.hi).all()
    assert plain.shape == (POINTS, 1) and slopes.shape == (POINTS, 1, 2)
    for _ in range(5):
        values = graph.evaluate(np.minimum(lo + width * rng.random(lo.shape), lo + width))
        slack = 1e-14 * (1 + np.abs(values))
        assert (plain.lo[:, 0] <= values + slack).all() and (values - slack <= plain.hi[:, 0]).all()


@pytest.mark.parametrize("operation", SAMPLES)
@pytest.mark.parametrize("width", [1e-3, 1.0])
def test_slopes_bound_every_difference(operation: str, width: float) -> None:
    graph = parse(SAMPLES[operation], ["x0", "x1"])
    rng = np.random.default_rng(23)
    lo = points()
    slopes = graph.enclose_gradient(lo, lo + width)[1]
    steepest = np.linalg.norm(slopes.magnitude[:, 0], axis=1)
    for _ in range(5):
        x, y = (lo + width * rng.random(lo.shape) for _ in range(2))
        moved = np.abs(graph.evaluate(x) - graph.evaluate(y))
        with np.errstate(invalid="ignore"):
            allowed = steepest * np.linalg.norm(x - y, axis=1)
        assert (moved <= allowed + 1e-13).all()


def test_undefined_stays_undefined_except_in_a_branch_not_taken() -> None:
    lo, hi = [[-2.0]], [[-1.0]]
    assert parse("tanh(log(x))", ["x"]).enclose(lo, hi).is_entire.all()
    assert parse("clamp(sqrt(x), 0, 1)", ["x"]).enclose(lo, hi).is_entire.all()
    guarded = parse("where(x, sqrt(x), 7)", ["x"])
    assert guarded.enclose(lo, hi).hi.item() == 7.0
    assert np.isnan(parse("where(log(x), 1, 2)", ["x"]).evaluate(lo)).all()


def test_undefined_values_come_back_in_silence() -> None:
    graph = parse("log(x), 1/x, exp(1000*x), 0/0", ["x"])
    values = graph.evaluate([[-1.0], [0.0], [1.0]])
    assert values.shape == (3, 4)
    assert np.isnan(values[0, 0]) and np.isinf(values[1, :2]).all() and np.isinf(values[2, 2])


@pytest.mark.parametrize(
    ("text", "shape"),
    [("1", ()), ("x,", (1,)), ("x, 2", (2,)), ("x; 2", (2, 1)), ("x, 1;", (1, 2)), ("1, x; x, 2", (2, 2))],
)
def test_shapes(text: str, shape: tuple[int, ...]) -> None:
    graph = parse(text, ["x"])
    assert graph.output_shape == shape
    assert graph.evaluate(np.ones((5, 1))).shape == (5, *shape)
    assert tuple(graph.evaluate_torch(torch.ones(5, 1)).shape) == (5, *shape)
    assert parse(graph.infix(["x"]), ["x"]) == graph


@pytest.mark.parametrize("shape", [(3, 3), (3,), (2, 2, 1)])
def test_inputs_of_another_shape_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ShapeError, match=r"expected \(batch, 2\)"):
        parse("x*y", ["x", "y"]).evaluate(np.zeros(shape))


def test_common_parts_are_shared_and_order_is_canonical() -> None:
    assert len(parse("sin(x) + sin(x)*sin(x)", ["x"]).nodes) == 4
    builder = GraphBuilder(2)
    builder.add("exp", builder.add("input", parameters=(1,)))
    right, left = builder.add("input", parameters=(1,)), builder.add("input", parameters=(0,))
    assert builder.finish([builder.add("sub", left, right)], ()) == parse("a - b", ["a", "b"])


@pytest.mark.parametrize("operation", SAMPLES)
def test_json_round_trip(operation: str) -> None:
    graph = parse(SAMPLES[operation], ["x0", "x1"])
    text = json.dumps(graph.to_json())
    again = Graph.from_json(json.loads(text))
    assert again == graph and again.sha256 == graph.sha256


def test_the_hash_sees_every_bit() -> None:
    texts = ["0.1*x", "0.10000000000000002*x", "-0*x", "0*x", "x*0.1"]
    assert len({parse(text, ["x"]).sha256 for text in texts}) == len(texts)


def _mutations() -> dict[str, object]:
    good = parse("clamp(x, 0, 1) + x^2", ["x"]).to_json()

    def changed(*path: object, value: object) -> object:
        data = copy.deepcopy(good)
        place = data
        for key in path[:-1]:
            place = place[key]
        place[path[-1]] = value
        return data

    return {
        "not an object": [good],
        "no nodes": changed("nodes", value=[]),
        "nodes not a list": changed("nodes", value={}),
        "extra key": {**good, "note": 1},
        "missing key": {k: v for k, v in good.items() if k != "shape"},
        "extra key in a node": changed("nodes", 0, value={**good["nodes"][0], "note": 1}),
        "unknown operation": changed("nodes", 1, "op", value="eval"),
        "operation not text": changed("nodes", 1, "op", value=3),
        "arity": changed("nodes", 1, "args", value=[0, 0]),
        "args not a list": changed("nodes", 1, "args", value=0),
        "forward reference": changed("nodes", 1, "args", value=[3]),
        "own reference": changed("nodes", 1, "args", value=[1]),
        "negative reference": changed("nodes", 1, "args", value=[-1]),
        "boolean reference": changed("nodes", 1, "args", value=[False]),
        "float reference": changed("nodes", 1, "args", value=[0.0]),
        "missing parameter": changed("nodes", 1, "params", value=[]),
        "decimal parameter": changed("nodes", 1, "params", value=["0.5", "1.0"]),
        "plain float parameter": changed("nodes", 1, "params", value=[0.5, 1.0]),
        "integer for a float": changed("nodes", 1, "params", value=[0, 1]),
        "infinite parameter": changed("nodes", 1, "params", value=["-inf", "inf"]),
        "nan parameter": changed("nodes", 1, "params", value=["nan", "nan"]),
        "huge parameter": changed("nodes", 1, "params", value=["0x1p99999", (1.0).hex()]),
        "empty clamp": changed("nodes", 1, "params", value=[(1.0).hex(), (0.0).hex()]),
        "large exponent": changed("nodes", 2, "params", value=[65]),
        "no such input": changed("nodes", 0, "params", value=[1]),
        "negative input": changed("nodes", 0, "params", value=[-1]),
        "inputs as text": changed("inputs", value="1"),
        "many inputs": changed("inputs", value=10**9),
        "no such output": changed("outputs", value=[9]),
        "no output": changed("outputs", value=[]),
        "shape": changed("shape", value=[2]),
        "negative shape": changed("shape", value=[-1, -1]),
        "long shape": changed("shape", value=[1] * 99),
        "too many nodes": changed("nodes", value=good["nodes"][:1] * 100_001),
    }


@pytest.mark.parametrize("name", _mutations())
def test_other_files_are_refused(name: str) -> None:
    with pytest.raises(FormatError, match=r"found .* expected"):
        Graph.from_json(_mutations()[name])


def test_negative_control_the_unchanged_file_is_accepted() -> None:
    good = parse("clamp(x, 0, 1) + x^2", ["x"])
    assert Graph.from_json(good.to_json()) == good


def test_nodes_are_checked_however_the_graph_is_built() -> None:
    with pytest.raises(FormatError, match="unknown operation"):
        Graph(1, (Node("system"),), (0,), ())


def test_text_that_would_explode_is_refused() -> None:
    builder = GraphBuilder(1)
    node = builder.add("input", parameters=(0,))
    for _ in range(60):
        node = builder.add("mul", node, node)
    graph = builder.finish([node], ())
    assert graph.evaluate([[1.0]]).tolist() == [1.0]
    with pytest.raises(ExpressionLimitError, match="to_json"):
        graph.infix()
    with pytest.raises(UnsupportedError, match="two axes"):
        Graph(1, graph.nodes[:1], (0,), (1, 1, 1)).infix()


def test_long_graphs_do_not_recurse() -> None:
    builder = GraphBuilder(1)
    node = builder.add("input", parameters=(0,))
    for _ in range(5000):
        node = builder.add("sin", node)
    graph = builder.finish([node], ())
    assert Graph.from_json(graph.to_json()) == graph
    assert graph.enclose([[0.5]], [[0.6]]).shape == (1, 1)
