"""Files: round trips, tampering, truncation, versions, hostile JSON, atomicity; ONNX within the rounding bound."""

import json
import shutil

import numpy as np
import pytest
import torch
from registry import CASES, LP_CASES, compiled, inputs_for, sample

import partita as pa
from partita import errors, storage
from partita.storage.saving import canonical

ort = pytest.importorskip("onnxruntime")
NAMES = [c.name for c in CASES + LP_CASES]
FILES = ["head.safetensors", "head.json", "certificate.json"]


@pytest.fixture
def folder(tmp_path):
    return pa.compile("sin(3*x0) + x1", pa.Box([-1, -1], [1, 1]), method="hard", tolerance=0.4).save(tmp_path / "head")


@pytest.mark.parametrize("name", NAMES)
def test_round_trip(name, tmp_path):
    c = compiled(name)
    d = pa.load(c.save(tmp_path / "head"))
    points = sample(c)
    assert torch.equal(c.head(*inputs_for(c, points)), d.head(*inputs_for(c, points)))
    assert d.certificate == c.certificate and d.why == c.why and d.outside == c.outside
    assert d.num_keys == c.num_keys and d.num_parameters == c.num_parameters
    assert np.array_equal(d.partition.cell(points[:20]), c.partition.cell(points[:20]))
    if c.target.graph is not None:
        assert np.array_equal(d.target(points), c.target(points))
        assert d.attack(samples=500).error <= d.error_bound or d.certificate.norm != "inf"


@pytest.mark.parametrize("name", NAMES)
def test_stored_certificates_are_confirmed_by_a_recheck(name, tmp_path):
    checks = pa.recheck(pa.load(compiled(name).save(tmp_path / "head")))
    assert len(checks) >= 7 and [c for c in checks if not c.holds] == []


@pytest.mark.parametrize(
    "change",
    [
        lambda c: {"error_bound": c.error_bound / 2},
        lambda c: {"tolerance": c.error_bound / 2},
        lambda c: {"terms": (type(c.terms[0])("approximation", c.terms[0].value / 2, "", ""), *c.terms[1:])},
        lambda c: {"known": {"modulus": {"constant": 0.1, "exponent": 1.0}, "per_axis": [0.1, 0.1]}},
        lambda c: {"model": {**c.model, "value_error": 0.0}},
        lambda c: {"model": {**c.model, "sha256": "0" * 64}},
        lambda c: {"function": {**c.function, "sha256": "0" * 64}},
    ],
    ids=["bound", "tolerance", "term", "constants", "value error", "tensors", "function"],
)
def test_false_certificates_fail_the_recheck(change):
    from dataclasses import replace

    c = compiled("vector 2-D typed")
    forged = replace(c, certificate=replace(c.certificate, **change(c.certificate)))
    assert not all(check.holds for check in pa.recheck(forged))


def test_changed_values_fail_the_recheck():
    c = pa.compile("x0*x1", pa.Box([-1, -1], [1, 1]), method="hard", tolerance=0.3)
    c.head.values[3] += 0.01
    assert {check.name for check in pa.recheck(c) if not check.holds} >= {"tensors", "values"}


@pytest.mark.parametrize("name", FILES)
def test_a_missing_file(folder, name):
    (folder / name).unlink()
    with pytest.raises(errors.TruncatedFileError, match=name):
        pa.load(folder)


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("keep", [0, 10, 0.5, 0.99])
def test_a_truncated_file(folder, name, keep):
    data = (folder / name).read_bytes()
    (folder / name).write_bytes(data[: int(keep * len(data)) if keep < 1 else keep])
    with pytest.raises((errors.TruncatedFileError, errors.TamperedFileError)):
        pa.load(folder)


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("seed", range(12))
def test_a_flipped_bit_is_noticed(folder, name, seed):
    data = bytearray((folder / name).read_bytes())
    rng = np.random.default_rng(seed)
    data[rng.integers(len(data))] ^= 1 << int(rng.integers(8))
    (folder / name).write_bytes(bytes(data))
    with pytest.raises(errors.FormatError):
        pa.load(folder)


def reseal(folder, **changes):
    """Rewrite head.json with a valid seal, as an attacker who knows the format would."""
    import hashlib

    description = json.loads((folder / "head.json").read_text())
    description.pop("seal")
    description.update(changes)
    description["sha256"] = {
        n: hashlib.sha256((folder / n).read_bytes()).hexdigest() for n in ("head.safetensors", "certificate.json")
    }
    description["seal"] = hashlib.sha256(canonical(description)).hexdigest()
    (folder / "head.json").write_text(json.dumps(description))


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"version": 2}, errors.NewerVersionError),
        ({"version": 0}, errors.FormatError),
        ({"version": "1"}, errors.FormatError),
        ({"format": "other"}, errors.FormatError),
        ({"domains": []}, errors.FormatError),
        ({"domains": [{"type": "torus"}]}, errors.FormatError),
        (
            {"domains": [{"type": "box", "shape": [2], "lo": ["0x1p0", "0x1p0"], "hi": ["0x0p0", "0x0p0"]}]},
            errors.PartitaError,
        ),
        ({"head": {"type": "grid"}}, errors.FormatError),
        ({"head": {"type": "pickle", "input_shapes": [[2]], "output_shape": []}}, errors.FormatError),
        (
            {"head": {"type": "grid", "input_shapes": [[2]], "output_shape": [3], "half_windows": [1, 1]}},
            errors.PartitaError,
        ),
        (
            {
                "target": {
                    "label": "f",
                    "graph": {
                        "inputs": 2,
                        "nodes": [{"op": "system", "args": [], "params": []}],
                        "outputs": [0],
                        "shape": [],
                    },
                }
            },
            errors.FormatError,
        ),
        ({"target": None}, errors.FormatError),
        ({"version": True}, errors.FormatError),
        ({"why": 3}, errors.FormatError),
        (
            {"head": {"type": "grid", "input_shapes": [[2]], "output_shape": [], "half_windows": [0, 1]}},
            errors.FormatError,
        ),
        (
            {"head": {"type": "grid", "input_shapes": [[2]], "output_shape": [], "half_windows": [1.5, 1]}},
            errors.FormatError,
        ),
        (
            {"head": {"type": "grid", "input_shapes": [[2]], "output_shape": [], "half_windows": [10**30, 1]}},
            errors.FormatError,
        ),
        (
            {"head": {"type": "grid", "input_shapes": [[2]], "output_shape": [1], "half_windows": [1, 1]}},
            errors.FormatError,
        ),
        ({"domains": [{"type": "box", "shape": [1], "lo": ["0x1p99999"], "hi": ["0x1p0"]}]}, errors.FormatError),
        ({"outside": "explode"}, errors.PartitaError),
    ],
    ids=str,
)
def test_resealed_nonsense_is_refused(folder, changes, error):
    reseal(folder, **changes)
    with pytest.raises(error):
        pa.load(folder)


def forge(folder, **changes):
    """Rewrite certificate.json and reseal, as an attacker who knows the format would."""
    certificate = json.loads((folder / "certificate.json").read_text())
    certificate.update(changes)
    (folder / "certificate.json").write_text(json.dumps(certificate))
    reseal(folder)


SMALL = (0.01).hex()


@pytest.mark.parametrize(
    "changes",
    [
        {
            "domain": {
                "arguments": [{"type": "box", "shape": [2], "lo": [(-100.0).hex()] * 2, "hi": [(100.0).hex()] * 2}]
            }
        },
        {"function": {"type": "graph", "text": "cos(x0)", "sha256": "0" * 64}},
        {"semantics": "float32"},
        {"known": {"modulus": {"constant": SMALL, "exponent": (1.0).hex()}, "per_axis": [SMALL, SMALL]}},
        {
            "known": {"modulus": {"constant": SMALL, "exponent": (1.0).hex()}, "per_axis": [SMALL, SMALL]},
            "assumptions": [{"statement": "f ≤ 1", "vouched_by": "caller", "worst_ratio": SMALL, "attack": ""}],
            "witness": None,
        },
        {"known": {}},
        {"known": {"modulus": {"foo": 1}}},
        {"model": {"sha256": None}},
    ],
    ids=["domain", "text", "semantics", "constants", "false caller", "nothing", "nonsense", "no value error"],
)
def test_resealed_forgeries_fail_the_recheck_or_the_load(folder, changes):
    if "model" in changes:
        changes = {"model": {"sha256": json.loads((folder / "certificate.json").read_text())["model"]["sha256"]}}
    forge(folder, **changes)
    assert not all(check.holds for check in pa.recheck(pa.load(folder)))


@pytest.mark.parametrize(
    "changes",
    [
        {"semantics": "exact"},
        {"kind": "certain"},
        {"norm": "abc"},
        {"error_bound": "much"},
        {"error_bound": None},
        {"tolerance": "0x1p999999"},
        {"terms": []},
        {"terms": [{"name": "approximation", "value": (-0.05).hex(), "formula": "", "theorem": "", "inputs": {}}]},
        {"terms": [{"name": "a", "value": SMALL, "formula": "", "theorem": "", "inputs": {}}] * 2},
        {"model": []},
        {"function": None},
        {"witness": {"point": "abc", "error": SMALL, "samples": 1}},
        {"schema": 2},
        {"extra": 1},
    ],
    ids=str,
)
def test_impossible_certificates_are_refused(folder, changes):
    forge(folder, **changes)
    with pytest.raises(errors.FormatError):
        pa.load(folder)


def test_a_certificate_of_another_head_is_refused(folder, tmp_path):
    other = pa.compile("x0 - x1", pa.Box([-1, -1], [1, 1]), method="hard", tolerance=0.4).save(tmp_path / "other")
    shutil.copy(other / "certificate.json", folder / "certificate.json")
    reseal(folder)
    with pytest.raises(errors.TamperedFileError, match="not about this head"):
        pa.load(folder)


def test_not_finite_tensors_are_refused(folder):
    import safetensors.torch

    tensors = safetensors.torch.load_file(folder / "head.safetensors")
    tensors["head.values"][0] = float("nan")
    safetensors.torch.save_file(tensors, folder / "head.safetensors")
    reseal(folder)
    with pytest.raises(errors.FormatError, match="NaN"):
        pa.load(folder)


@pytest.mark.parametrize(
    "text",
    [
        '{"a": NaN}',
        '{"a": Infinity}',
        '{"a": 1, "a": 2}',
        "[" * 100 + "]" * 100,
        "[1, 2]",
        "nonsense",
        '{"a": ' * 70 + "1" + "}" * 70,
    ],
)
def test_hostile_json(tmp_path, text):
    (tmp_path / "x.json").write_text(text)
    with pytest.raises(errors.FormatError):
        storage.read_json(tmp_path / "x.json")


def test_saving_is_all_or_nothing(tmp_path, monkeypatch):
    c = compiled("sine 1-D typed")
    monkeypatch.setattr("partita.storage.saving.canonical", lambda _: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        c.save(tmp_path / "head")
    assert list(tmp_path.iterdir()) == []


def test_saving_never_overwrites_unasked(tmp_path):
    c = compiled("sine 1-D typed")
    place = c.save(tmp_path / "head")
    with pytest.raises(errors.AlreadyExistsError, match="overwrite=True"):
        c.save(place)
    c.save(place, overwrite=True)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["head"] and sorted(p.name for p in place.iterdir()) == sorted(
        FILES
    )
    mine = tmp_path / "thesis"
    mine.mkdir()
    (mine / "chapter.txt").write_text("years of work")
    with pytest.raises(errors.AlreadyExistsError, match="left alone"):
        c.save(mine, overwrite=True)
    assert (mine / "chapter.txt").read_text() == "years of work"


def test_a_black_box_comes_back_without_its_function(tmp_path):
    d = pa.load(compiled("kink 1-D").save(tmp_path / "head"))
    assert d(np.array([[0.5]])).shape == (1,)
    with pytest.raises(errors.TargetFailedError, match="not stored"):
        d.attack()


# --- ONNX ----------------------------------------------------------------------------------------------------------

ONNX_NAMES = [
    "kink 1-D",
    "vector 2-D typed",
    "sequence 2x2",
    "cross sequences",
    "single 2-D",
    "curve in R4",
    "curve single",
    "far from zero",
    "constant",
]


@pytest.mark.parametrize("name", ONNX_NAMES)
def test_onnxruntime_reproduces_the_head_within_the_rounding_terms(name, tmp_path):
    c = compiled(name)
    session = ort.InferenceSession(c.export_onnx(tmp_path / "head.onnx"))
    names = [i.name for i in session.get_inputs()]
    assert names == (["z"] if len(c.head.input_shapes) == 1 else ["z_k", "z_q"])
    rounding = sum(t.value for t in c.certificate.terms if t.name in ("window", "score rounding", "summation"))
    for count in (1, 7, 150):  # dynamic batch
        inputs = inputs_for(c, sample(c)[:count])
        with torch.no_grad():
            expected = c.head(*inputs).numpy()
        (got,) = session.run(None, {n: z.numpy() for n, z in zip(names, inputs)})
        assert got.shape == expected.shape and got.dtype == expected.dtype
        assert np.abs(got.astype(float) - expected).max() <= 2 * rounding
    assert [p.name for p in tmp_path.iterdir()] == ["head.onnx"]
