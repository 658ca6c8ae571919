"""ONNX files in others' hands: one set of operators, any batch, and in ONNX Runtime the values that the certificate is about.

Every method of METHODS is enrolled by itself, with the first case of tests/method_cases.py that it has a head for; the tests marked
slow run all of METHODS × cases. `KINDS` has the shapes, domains and dtypes that those leave out.
"""

from __future__ import annotations

import copy
import json
from collections import Counter
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from method_cases import CASES, PAIRS, Case, applies, compiled, finished, sample

import partita as pa
from partita import errors
from partita.arithmetic.precision import Precision
from partita.geometry.grid import ProductGrid
from partita.heads.grid_head import GridHead
from partita.heads.head import Head
from partita.kernels.grid_torch import axis_start
from partita.kernels.trace_modes import exporting
from partita.methods import METHODS, Method
from partita.proofs.worst_point import errors_at
from partita.storage import export_onnx
from partita.storage.onnx_export import ONNX_OPSET

ort = pytest.importorskip("onnxruntime")

# Each of these is in all of three lists, for opset 18 and for both float32 and float64:
# - docs/OperatorKernels.md of microsoft/onnxruntime (the CPU kernels; onnxruntime-web's WebAssembly build has the same ones);
# - "The following operators are implemented and tested" in README.md of sonos/tract, which is tested up to opset 18;
# - Operators.md of onnx for opset 18.
# All but And, Max, Min and Or are also in onnxruntime-web's docs/webgpu-operators.md; WebGPU has no float64.
READ_EVERYWHERE = {
    *(
        "Add",
        "And",
        "Cast",
        "Concat",
        "Equal",
        "Gather",
        "GreaterOrEqual",
        "Less",
        "LessOrEqual",
        "MatMul",
        "Max",
        "Min",
    ),
    *("Mul", "Neg", "Or", "ReduceMin", "ReduceSum", "Reshape", "Slice", "Softmax", "Squeeze", "Sub", "Transpose"),
    *("Unsqueeze", "Where"),
}
TENSORS = {torch.float64: onnx.TensorProto.DOUBLE, torch.float32: onnx.TensorProto.FLOAT}
BATCHES = (0, 1, 7, 1000)
EVERY_METHOD = pytest.mark.parametrize("method", METHODS, ids=lambda method: method.name)


def is_exported(case: Case) -> bool:
    return case.dtype in TENSORS  # half types are refused, see below


def example(method: Method) -> pa.Compiled:
    """Of the first case for which the method has a head."""
    for case in CASES:
        if is_exported(case) and applies(method, case):
            found = finished(case.name, method.name)
            if isinstance(found, pa.Compiled):
                return found
    raise AssertionError(f"no case in tests/method_cases.py has a head by {method.name}: add one")


# method, case, what the pair adds to the first ones of the methods
KINDS = {
    ("hard", "sequence 2x2"): "tokens in and out; a window, weighted by products over the whole axis",
    ("hard", "single 2-D"): "windows of two axes in float32",
    ("hard", "vector 2-D typed"): "windows, several outputs",
    ("affine", "kink 1-D"): "affine values in a window",
    ("affine", "single typed"): "affine values in float32",
    ("fitted", "single typed"): "whole axes in float32",
    ("fitted", "cross typed"): "two inputs",
    ("hard", "cross sequences"): "two inputs of several tokens",
    ("hard", "curve in R4"): "a point cloud: scattered constant values",
    ("hard", "curve single"): "the same in float32",
    ("adaptive", "single 2-D"): "scattered affine values in float32",
    ("pieces", "tokens typed"): "pieces, tokens",
    ("train", "single typed"): "a tensor train in float32",
    ("train", "vector 2-D typed"): "a tensor train with several outputs",
    ("layers", "single typed"): "maps between layers in float32",
    ("layers", "mixed"): "maps between layers",
}
LONGER = {  # the same operators as others of the list
    *(("hard", "vector 2-D typed"), ("hard", "curve single"), ("hard", "cross sequences"), ("affine", "kink 1-D")),
    *(("affine", "single typed"), ("pieces", "tokens typed"), ("train", "vector 2-D typed"), ("layers", "mixed")),
}


def graph_of(path: Path) -> onnx.ModelProto:
    model = onnx.load(path)
    onnx.checker.check_model(model, full_check=True)
    return model


def faults(model: onnx.ModelProto, dtype: torch.dtype) -> list[str]:
    """What others might not read."""
    found = [f"operator {op}" for op in {node.op_type for node in model.graph.node} - READ_EVERYWHERE]
    if [(o.domain, o.version) for o in model.opset_import] != [("", ONNX_OPSET)] or model.ir_version != 8:
        found.append(f"opset {model.opset_import}, format {model.ir_version}")
    if model.functions or any(node.domain for node in model.graph.node):
        found.append("functions, or operators of another domain")
    kinds = {v.type.tensor_type.elem_type for v in (*model.graph.input, *model.graph.output)}
    if kinds != {TENSORS[dtype]}:
        found.append(f"inputs and outputs are of types {kinds}")
    inner = {t.data_type for t in model.graph.initializer} | {
        v.type.tensor_type.elem_type for v in model.graph.value_info
    }
    if dtype == torch.float32 and onnx.TensorProto.DOUBLE in inner:
        found.append("float64 in a float32 graph")
    for value in (*model.graph.input, *model.graph.output):
        first, *rest = value.type.tensor_type.shape.dim
        if first.dim_param != "batch" or not all(d.dim_value > 0 for d in rest):
            found.append(f"shape of {value.name}: {value.type.tensor_type.shape}")
    return found


def points_for(c: pa.Compiled, count: int) -> np.ndarray:
    """So many points of the domain, the corners among them if there is room."""
    points = sample(c, max(count, 1))
    return points[len(points) - count :] if len(points) >= count else np.resize(points, (count, points.shape[1]))


def feed(session: ort.InferenceSession, head: Head, points: np.ndarray) -> dict[str, np.ndarray]:
    cuts = np.cumsum([int(np.prod(s)) for s in head.input_shapes])[:-1]
    parts = np.split(points, cuts, axis=1)
    number = str(head.dtype).removeprefix("torch.")
    return {
        i.name: part.reshape(len(points), *shape).astype(number)
        for i, part, shape in zip(session.get_inputs(), parts, head.input_shapes)
    }


def allowed(c: pa.Compiled, values: np.ndarray) -> float:
    """How far two evaluations of one head may be apart: each is within the rounding terms of the exact one.

    Where the proof counts rounding in another term (networks, tensor trains), 200 units of the values.
    """
    counted = 2 * sum(t.value for t in c.certificate.terms if t.source == "rounding")
    return max(counted, 200 * Precision.of(c.head.dtype).unit * float(np.abs(values).max(initial=1.0)))


class InRuntime:
    """A head that ONNX Runtime evaluates, as far as `errors_at` needs one."""

    def __init__(self, c: pa.Compiled, session: ort.InferenceSession) -> None:
        self.head, self.session, self.dtype = c.head, session, c.head.dtype

    def evaluate(self, flat: torch.Tensor) -> torch.Tensor:
        (found,) = self.session.run(["value"], feed(self.session, self.head, flat.double().numpy()))
        return torch.from_numpy(found.reshape(len(flat), -1))


def check(c: pa.Compiled, path: Path) -> Counter[str]:
    """The laws of one exported head. Returns how often it has each operator."""
    model, session = graph_of(path), ort.InferenceSession(path)
    assert faults(model, c.head.dtype) == []
    assert b".py" not in path.read_bytes() and not any(node.metadata_props for node in model.graph.node)
    assert all(p.is_file() for p in path.parent.iterdir())  # no draft is left
    assert [i.name for i in session.get_inputs()] == (["z"] if len(c.head.input_shapes) == 1 else ["z_k", "z_q"])
    runtime = InRuntime(c, session)
    for count in BATCHES:
        points = points_for(c, count)
        flat = torch.from_numpy(points).to(c.head.dtype)
        with torch.no_grad():
            expected = c.head.evaluate(flat).double().numpy()
        (found,) = session.run(["value"], feed(session, c.head, points))
        assert found.shape == (count, *c.head.output_shape) and found.dtype == np.dtype(str(c.head.dtype)[6:])
        assert np.abs(found.reshape(expected.shape) - expected).max(initial=0.0) <= allowed(c, expected)
        if count and c.certificate.norm == "inf" and c.certificate.kind != "estimated":
            assert errors_at(runtime, c.target, points).max() <= c.error_bound
    return Counter(node.op_type for node in model.graph.node)


@EVERY_METHOD
def test_every_method_runs_in_onnxruntime(method: Method, tmp_path: Path) -> None:
    c = example(method)
    check(c, c.export_onnx(tmp_path / "head.onnx"))


@pytest.mark.parametrize(
    ("method", "case"),
    [pytest.param(*pair, id="-".join(pair), marks=[pytest.mark.slow] * (pair in LONGER)) for pair in KINDS],
)
def test_every_kind_of_head_runs_in_onnxruntime(method: str, case: str, tmp_path: Path) -> None:
    c = compiled(case, method)
    check(c, c.export_onnx(tmp_path / "head.onnx"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "case"), [pytest.param(m, c, id=f"{m.name}-{c.name}") for m, c in PAIRS if is_exported(c)]
)
def test_every_pair_of_the_table_runs_in_onnxruntime(method: Method, case: Case, tmp_path: Path) -> None:
    c = finished(case.name, method.name)
    if not isinstance(c, pa.Compiled):
        pytest.skip(f"{type(c).__name__}: {c}")
    check(c, c.export_onnx(tmp_path / "head.onnx"))


@cache
def plain() -> pa.Compiled:
    return pa.compile("sin(3*x0) + x1", pa.Box([-1, -1], [1, 1]), tolerance=1e-3, dtype=torch.float32)


@pytest.fixture(scope="module")
def plain_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return plain().export_onnx(tmp_path_factory.mktemp("plain") / "head.onnx")


# --- controls ----------------------------------------------------------------------------------------------------------


def test_a_graph_that_others_cannot_read_is_noticed(plain_file: Path) -> None:
    model = graph_of(plain_file)
    assert faults(model, torch.float32) == []

    def changed(kind: str) -> onnx.ModelProto:
        other = onnx.ModelProto()
        other.CopyFrom(model)
        if kind == "operator":
            other.graph.node[0].op_type = "GatherND"
        elif kind == "domain":
            other.graph.node[0].domain = "com.microsoft"
        elif kind == "opset":
            other.opset_import[0].version = 20
        elif kind == "batch":
            other.graph.input[0].type.tensor_type.shape.dim[0].dim_value = 3
        else:
            other.graph.initializer[0].data_type = onnx.TensorProto.DOUBLE
        return other

    words = {
        "operator": "GatherND",
        "domain": "another domain",
        "opset": "opset",
        "batch": "shape of z",
        "dtype": "float64",
    }
    for kind, word in words.items():
        assert any(word in fault for fault in faults(changed(kind), torch.float32)), kind
    assert faults(model, torch.float64) != []


def test_other_values_and_a_smaller_bound_are_noticed(tmp_path: Path, plain_file: Path) -> None:
    """The laws of `check` fail for a file of another head, and for a bound below the error."""
    c = plain()
    other = copy.deepcopy(c.head)
    with torch.no_grad():
        next(t for name, t in other.state_dict().items() if name.endswith("values")).mul_(1.5)
    with pytest.raises(AssertionError):
        check(c, export_onnx(other, tmp_path / "other.onnx"))
    check(c, plain_file)
    with pytest.raises(AssertionError):
        check(replace(c, certificate=replace(c.certificate, error_bound=c.error_bound / 1e3)), plain_file)


# --- windows -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", TENSORS, ids=str)
@pytest.mark.parametrize(("count", "width"), [(7, 2), (7, 6), (40, 4), (1026, 2), (1030, 4), (5000, 6)])
def test_windows_found_by_counting_are_those_of_the_kernels(dtype: torch.dtype, count: int, width: int) -> None:
    """`axis_start` in an exported graph compares and adds; everywhere else it guesses and corrects."""
    rng = np.random.default_rng(count)
    centers = torch.from_numpy(1e3 + (np.arange(count) + rng.uniform(-0.3, 0.3, count)) / count).to(dtype)
    assert bool((centers.diff() > 0).all())
    between = torch.from_numpy(rng.uniform(1e3 - 0.1, 1e3 + 1.1, 3000)).to(dtype)
    beyond = torch.tensor([-1e30, 1e30, -torch.inf, torch.inf, torch.nan], dtype=dtype)
    x = torch.cat([centers, torch.nextafter(centers, -torch.inf * torch.ones(())), between, beyond])
    expected = axis_start(x, centers, width)
    with exporting():
        found = axis_start(x, centers, width)
    finite = x.isfinite()
    assert torch.equal(found[finite], expected[finite])
    assert found.min() >= 0 and found.max() <= count - width  # infinity and NaN, too


@pytest.mark.parametrize("dtype", TENSORS, ids=str)
def test_a_long_axis_is_searched_in_two_steps(dtype: torch.dtype, tmp_path: Path) -> None:
    """20,000 centers on an axis: no table of points × centers, and the values are those of the head."""
    count = 20_000
    grid = ProductGrid(pa.Box([-1], [1]), (np.linspace(-1, 1, count),))
    values = torch.sin(torch.linspace(-3, 3, count, dtype=torch.float64)).to(dtype)[:, None]
    options = {"half_windows": 4, "input_shapes": ((1,),), "output_shape": ()}
    head = GridHead(grid, 4 * (count / 2) ** 2, values, **options)
    path = export_onnx(head, tmp_path / "head.onnx")
    model, session = graph_of(path), ort.InferenceSession(path)
    assert faults(model, dtype) == []
    shapes = [v.type.tensor_type.shape.dim for v in model.graph.value_info]
    tables = [max(d.dim_value for d in shape) for shape in shapes if shape and shape[0].dim_param == "batch"]
    assert tables and max(tables) <= 2 * count**0.5
    z = np.random.default_rng(0).uniform(-1.01, 1.01, (500, 1)).astype(values.numpy().dtype)
    (found,) = session.run(None, {"z": z})
    assert np.abs(found - head(torch.from_numpy(z)).numpy()).max() <= 1e3 * Precision.of(dtype).unit


# --- inputs that nobody should give ------------------------------------------------------------------------------------

ODD = [np.nan, np.inf, -np.inf, 1e30, -1e30]


@pytest.mark.parametrize(
    ("name", "outside"),
    [(("hard", "single 2-D"), "allow"), (("hard", "single 2-D"), "clamp"), (("adaptive", "mixed"), "mark")],
    ids=["allow", "clamp", "mark"],
)
def test_odd_inputs_spoil_no_other_row(name: tuple[str, str], outside: str, tmp_path: Path) -> None:
    """NaN gives NaN, infinity and huge numbers give what the rule says, and no index leaves its table."""
    c = compiled(name[1], name[0])
    path = c.export_onnx(tmp_path / "head.onnx", outside=outside)
    session = ort.InferenceSession(path)
    assert faults(graph_of(path), c.head.dtype) == []
    good = np.full((len(ODD), 2), 0.25)
    bad = good.copy()
    bad[:, 0] = ODD
    (found,) = session.run(None, feed(session, c.head, np.concatenate([bad, good])))
    (alone,) = session.run(None, feed(session, c.head, good))
    rows, last = found[: len(ODD)].reshape(len(ODD), -1), found[len(ODD) :]
    assert np.array_equal(last, alone) and np.isfinite(alone).all()
    assert np.isnan(rows[0]).all()
    if outside == "mark":
        assert np.isnan(rows).all()
    elif outside == "clamp":
        ends = good.copy()
        ends[:, 0] = np.clip(ODD, c.target.box.lo.ravel()[0], c.target.box.hi.ravel()[0])
        (expected,) = session.run(None, feed(session, c.head, ends[1:]))
        assert np.array_equal(rows[1:], expected.reshape(len(ODD) - 1, -1))


def test_a_union_of_regions_marks_what_lies_in_neither(tmp_path: Path) -> None:
    c = compiled("union L2", "hard")
    path = c.export_onnx(tmp_path / "head.onnx", outside="mark")
    z = np.random.default_rng(1).uniform(-2, 3, (2000, 2))
    (found,) = ort.InferenceSession(path).run(None, {"z": z})
    assert np.array_equal(np.isfinite(found), c.target.domain.contains(z)) and 0 < np.isfinite(found).mean() < 1
    assert set(faults(graph_of(path), torch.float64)) <= {
        "operator Pow"
    }  # the inequalities have operators of their own


# --- dtypes ------------------------------------------------------------------------------------------------------------


def test_a_file_has_the_dtype_that_was_proved(tmp_path: Path, plain_file: Path) -> None:
    """There is no conversion at export: a float32 head has a claim of its own, with the rounding of float32."""
    double = pa.compile("sin(3*x0) + x1", pa.Box([-1, -1], [1, 1]), tolerance=1e-3)
    said = {}
    for path in (double.export_onnx(tmp_path / "head.onnx"), plain_file):
        session = ort.InferenceSession(path)
        said[session.get_inputs()[0].type] = session.get_modelmeta().custom_metadata_map
    single, wide = said["tensor(float)"], said["tensor(double)"]
    assert (single["partita.dtype"], wide["partita.dtype"]) == ("float32", "float64")
    assert float(single["partita.error_bound"]) == plain().error_bound != double.error_bound
    with pytest.raises(errors.UnsupportedError, match=r"dtype=torch\.float32"):
        compiled("half typed", "fitted").export_onnx(tmp_path / "half.onnx")


def test_the_page_about_the_format_lists_the_operators() -> None:
    page = (Path(__file__).parent.parent / "docs/format.md").read_text(encoding="utf-8")
    listed = page.split("these operators only: ")[1].split(".")[0]
    assert set(listed.split(", ")) == READ_EVERYWHERE


def test_the_metadata_is_plain_text_and_json(plain_file: Path) -> None:
    said = {p.key: p.value for p in onnx.load(plain_file).metadata_props}
    assert all(key.startswith("partita.") for key in said)
    assert json.loads(said["partita.domain"])[0]["lo"] == [-1.0, -1.0]
