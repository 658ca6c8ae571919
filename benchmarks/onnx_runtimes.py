"""Whether other runtimes do what certificates allow: how far their exponentials are off, and heads of every kind run in them.

Run from the repository's root: `python benchmarks/onnx_runtimes.py` for ONNX Runtime on this CPU. With
`--web FOLDER`, where `npm install onnxruntime-web` was run in FOLDER, the same files also run in its WebAssembly build under node.

Exponentials are read off softmaxes of pairs (0, x): where e^x is too small to change the sum they are outputs, elsewhere they are
quotients of the two, so that the divisions count too. The reference is numpy's in 80 bits.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
from onnx import TensorProto, helper

sys.path.insert(0, "tests")
import test_onnx as law
from method_cases import compiled

from partita.methods import METHODS
from partita.storage.onnx_export import ONNX_OPSET

POINTS = 1_000_000
# name: type, unit roundoff, e^x is normal down to here, and does not change 1 + e^x below here
DTYPES = {
    "float32": (TensorProto.FLOAT, 2.0**-24, -87.3, -17.5),
    "float64": (TensorProto.DOUBLE, 2.0**-53, -708.0, -38.0),
}


def softmax_file(path: Path, kind: int) -> None:
    ends = [helper.make_tensor_value_info(name, kind, ["n", 2]) for name in "xy"]
    graph = helper.make_graph([helper.make_node("Softmax", ["x"], ["y"], axis=1)], "softmax", ends[:1], ends[1:])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", ONNX_OPSET)], ir_version=8), path)


def arguments(dtype: str) -> np.ndarray:
    least = DTYPES[dtype][2]
    spread = np.random.default_rng(0).uniform(np.log(2.0**-20), np.log(-least), POINTS)
    return (-np.exp(spread)).astype(dtype)


def exponential_error(x: np.ndarray, y: np.ndarray) -> float:
    """The largest relative error of the exponentials in softmaxes `y` of the pairs (0, x), in units u."""
    _, unit, _, alone = DTYPES[str(x.dtype)]
    wide, exact = y.astype(np.longdouble), np.exp(x.astype(np.longdouble))
    found = np.where(x < alone, wide[:, 1], wide[:, 1] / wide[:, 0])
    return float(np.abs(found / exact - 1).max()) / unit


def cases(folder: Path) -> list[dict[str, object]]:
    """Export a head of every kind with inputs and the head's own values: one JSON record each."""
    heads = {method.name: law.example(method) for method in METHODS}
    heads |= {f"{method}, {case}": compiled(case, method) for method, case in law.KINDS}
    found: list[dict[str, object]] = []
    for name, c in heads.items():
        path = c.export_onnx(folder / f"{len(found)}.onnx")
        points = law.points_for(c, 1000)
        inputs = law.feed(onnxruntime.InferenceSession(path), c.head, points)
        expected = c.head(*(law.torch.from_numpy(v) for v in inputs.values())).detach().numpy()
        shown = {key: [list(v.shape), v.astype(float).ravel().tolist()] for key, v in inputs.items()}
        found.append(
            {
                "name": name,
                "file": str(path),
                "dtype": str(c.head.dtype).removeprefix("torch."),
                "inputs": shown,
                "expected": expected.astype(float).ravel().tolist(),
                "allowed": law.allowed(c, expected),
            }
        )
    return found


def in_python(found: list[dict[str, object]], folder: Path) -> dict[str, object]:
    differences = []
    for case in found:
        inputs = {k: np.array(v, str(case["dtype"])).reshape(shape) for k, (shape, v) in case["inputs"].items()}  # type: ignore[attr-defined]
        (got,) = onnxruntime.InferenceSession(case["file"]).run(None, inputs)
        differences.append(float(np.abs(got.ravel() - np.array(case["expected"])).max()))
    errors = {}
    for dtype in DTYPES:
        x = arguments(dtype)
        pairs = np.stack([np.zeros_like(x), x], axis=1)
        (y,) = onnxruntime.InferenceSession(folder / f"{dtype}.onnx").run(None, {"x": pairs})
        errors[dtype] = exponential_error(x, y)
    return {
        "version": f"ONNX Runtime {onnxruntime.__version__}, CPU",
        "differences": differences,
        "exponentials": errors,
    }


def in_node(found: list[dict[str, object]], folder: Path, web: Path) -> dict[str, object]:
    (folder / "cases.json").write_text(json.dumps(found))
    for dtype in DTYPES:
        arguments(dtype).tofile(folder / f"{dtype}.x")
    script = Path(__file__).with_suffix(".mjs")
    module = (web / "node_modules/onnxruntime-web/dist/ort.wasm.min.mjs").resolve()
    told = subprocess.run(["node", script, folder, module], check=True, capture_output=True, text=True)
    said: dict[str, object] = json.loads(told.stdout)
    said["exponentials"] = {
        d: exponential_error(arguments(d), np.fromfile(folder / f"{d}.y", d).reshape(-1, 2)) for d in DTYPES
    }
    return said


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else "")
    parser.add_argument("--web", type=Path, help="where onnxruntime-web is installed")
    web = parser.parse_args().web
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for dtype, (kind, *_) in DTYPES.items():
            softmax_file(folder / f"{dtype}.onnx", kind)
        found = cases(folder)
        results = [in_python(found, folder)] + ([in_node(found, folder, web)] if web else [])
    print("| runtime | heads | within what is allowed | e^x, float32 | e^x, float64 |\n|---|---|---|---|---|")
    for result in results:
        differences, errors = result["differences"], result["exponentials"]
        assert isinstance(differences, list) and isinstance(errors, dict)
        kept = sum(d <= case["allowed"] for d, case in zip(differences, found))
        cells = [str(result["version"]), str(len(found)), str(kept), *(f"{errors[d]:.1f}u" for d in DTYPES)]
        print(f"| {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
