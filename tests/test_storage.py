"""Files: tampering, truncation, versions, hostile JSON, atomicity; where ONNX files may be written."""

import json
import os
import shutil
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from method_cases import compiled
from resealing import forge, reseal

import partita as pa
from partita import errors, storage
from partita.geometry.grid import ProductGrid
from partita.heads.grid_head import GridHead
from partita.heads.scattered_head import ScatteredHead
from partita.storage import files

ort = pytest.importorskip("onnxruntime")
FILES = ["head.safetensors", "head.json", "certificate.json"]


@pytest.fixture
def folder(tmp_path):
    return pa.compile("sin(3*x0) + x1", pa.Box([-1, -1], [1, 1]), method="hard", tolerance=0.4).save(tmp_path / "head")


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
    if changes.keys() & {"domain", "function", "semantics"}:
        with pytest.raises(errors.TamperedFileError, match="belongs to another head"):
            pa.load(folder)
    else:
        assert not all(check.holds for check in pa.recheck(pa.load(folder)))


def described(folder, part):
    return json.loads((folder / "head.json").read_text())[part]


def other_domain(folder):
    (box,) = described(folder, "domains")
    reseal(folder, domains=[{**box, "hi": [(2.0).hex()] * 2}])


def other_constant(folder):
    target = described(folder, "target")
    next(n for n in target["graph"]["nodes"] if n["op"] == "const")["params"] = [(5.0).hex()]
    reseal(folder, target=target)


def other_label(folder):
    reseal(folder, target={**described(folder, "target"), "label": "cos(x0)"})


def no_graph(folder):
    reseal(folder, target={**described(folder, "target"), "graph": None})


def other_type(folder):
    model = json.loads((folder / "certificate.json").read_text())["model"]
    forge(folder, model={**model, "type": "scattered"})


@pytest.mark.parametrize("change", [other_domain, other_constant, other_label, no_graph, other_type])
def test_parts_that_disagree_are_refused(folder, change):
    """head.json and certificate.json each with valid hashes, about two different things."""
    change(folder)
    with pytest.raises(errors.TamperedFileError, match="belongs to another head"):
        pa.load(folder)


def test_other_points_or_another_name_are_refused(tmp_path):
    import safetensors.torch

    c = compiled("curve in R4")
    folder = c.save(tmp_path / "points")
    tensors = safetensors.torch.load_file(folder / "head.safetensors")
    tensors["domain.0.points"][0, 0] += 1e-3
    safetensors.torch.save_file(tensors, folder / "head.safetensors")
    reseal(folder)
    with pytest.raises(errors.TamperedFileError, match="domain"):
        pa.load(folder)
    folder = compiled("kink 1-D").save(tmp_path / "name")
    reseal(folder, target={"label": "another", "graph": None})
    with pytest.raises(errors.TamperedFileError, match="name of the function"):
        pa.load(folder)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs pipes")
@pytest.mark.parametrize("name", FILES)
def test_only_regular_files_of_a_readable_size_are_read(folder, name):
    path, kept = folder / name, folder / "kept"
    path.rename(kept)

    def refused(match):
        with pytest.raises(errors.FormatError, match=match):
            pa.load(folder)
        path.rmdir() if path.is_dir() else path.unlink()

    os.mkfifo(path)
    refused("pipe")
    path.symlink_to("/dev/zero")
    refused("device")
    path.mkdir()
    refused("folder")
    with open(path, "wb") as sparse:
        sparse.truncate(1 << 40)
    refused("bytes")
    path.symlink_to(kept)  # the control: a link to a regular file is that file
    pa.load(folder)


def head_with(**changes):
    """A small head in float32, one thing of it changed."""
    given = {
        "centers": torch.tensor([[-0.5], [0.5]]),
        "inverse_temperature": 8.0,
        "values": torch.tensor([[1.0], [2.0]]),
    }
    given |= {"powers": torch.zeros(2), "value_slopes": torch.zeros(2, 1, 1), **changes}
    return ScatteredHead(given.pop("centers"), given.pop("inverse_temperature"), given.pop("values"), **given, **SHAPES)


def grid_with(axis=(-0.75, -0.25, 0.25, 0.75), window=1, rate=16.0, values=(1.0, 2.0, 3.0, 4.0), dtype=torch.float64):
    grid = ProductGrid(pa.Box([-1], [1]), (np.array(axis),))
    values = torch.tensor(values, dtype=dtype)[:, None]
    return GridHead(grid, rate, values, half_windows=window, **SHAPES)


SHAPES = {"input_shapes": ((1,),), "output_shape": ()}
ONE, WIDE = pa.Box([-1], [1]), pa.Box([-1e20], [1e20])
SINGLE = torch.float32


@pytest.mark.parametrize(
    ("head", "domain", "match"),
    [
        (grid_with(rate=1e-320), ONE, "not a normal float64"),
        (grid_with(rate=2.0**-126, dtype=SINGLE), ONE, "not a normal float32"),
        (grid_with(values=(1.0, 2.0, 3e38, 4.0), dtype=SINGLE), ONE, "a value"),
        (grid_with(rate=2.0, dtype=SINGLE), WIDE, "score"),
        (grid_with(dtype=SINGLE), pa.Box([-1e39], [1e39]), "an input"),
        (head_with(), WIDE, "z − c"),
        (head_with(inverse_temperature=2.0**-140), ONE, "not a normal float32"),
        (head_with(powers=torch.tensor([0.0, 3e38])), ONE, "powers"),
        (head_with(values=torch.tensor([[1.0], [3.2e38]])), ONE, "a value"),
        (head_with(value_slopes=torch.full((2, 1, 1), 3e38)), ONE, "a slope"),
    ],
)
def test_heads_that_cannot_be_run_are_refused(head, domain, match):
    with pytest.raises(errors.DomainError, match=match):
        head.check_range(domain.lo, domain.hi)


@pytest.mark.parametrize("axis", [(-0.75, -0.7, -0.65, 0.75), (-0.75, 0.65, 0.7, 0.75)])
def test_windows_on_uneven_axes_are_refused(axis):
    with pytest.raises(errors.DomainError, match="equally spaced"):
        grid_with(axis=axis)


def test_heads_that_can_be_run_are_not_refused():
    """The control: windows that cover the axis need no even spacing; subnormal values and slightly uneven centers are fine."""
    for head in (
        grid_with(),
        grid_with(axis=(-0.75, -0.7, -0.65, 0.75), window=2),
        grid_with(axis=(-0.75, -0.3, 0.2, 0.75)),
        grid_with(values=(1e-44, 2e-44, 0.0, 4e-45), dtype=SINGLE),
        head_with(),
        head_with(powers=torch.tensor([1e-44, 0.0]), values=torch.tensor([[1e-44], [0.0]])),
    ):
        head.check_range(ONE.lo, ONE.hi)


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
        {"schema": 3},
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
    with pytest.raises(errors.TamperedFileError, match="belongs to another head"):
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
    with pytest.raises(errors.AlreadyExistsError, match="not overwritten"):
        c.save(mine, overwrite=True)
    assert (mine / "chapter.txt").read_text() == "years of work"


def test_a_black_box_comes_back_without_its_function(tmp_path):
    d = pa.load(compiled("kink 1-D").save(tmp_path / "head"))
    assert d(np.array([[0.5]])).shape == (1,)
    with pytest.raises(errors.TargetFailedError, match="does not store"):
        d.attack()


# --- ONNX ----------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs pipes")
def test_onnx_replaces_regular_files_and_nothing_else(tmp_path):
    c, place = compiled("constant"), tmp_path / "head.onnx"
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "pipe")
    for name, kind in (("pipe", "pipe"), ("folder", "folder"), ("link", "pipe")):
        with pytest.raises(errors.AlreadyExistsError, match=f"is a {kind}"):
            c.export_onnx(tmp_path / name)
    with pytest.raises(errors.AlreadyExistsError, match="is a device"):
        c.export_onnx("/dev/null")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["folder", "link", "pipe"]
    place.write_bytes(b"an older export")
    (tmp_path / "same").symlink_to(place)
    c.export_onnx(tmp_path / "same")
    assert (tmp_path / "same").is_symlink() and place.read_bytes() != b"an older export"
    ort.InferenceSession(place)


def test_an_export_that_fails_leaves_the_older_file(tmp_path, monkeypatch):
    (tmp_path / "head.onnx").write_bytes(b"an older export")
    monkeypatch.setattr(torch.onnx, "export", lambda *a, **k: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        compiled("constant").export_onnx(tmp_path / "head.onnx")
    assert [p.read_bytes() for p in tmp_path.iterdir()] == [b"an older export"]


def full_disk(*_: object, **__: object) -> None:
    raise OSError(28, "No space left on device")


def test_files_are_written_whole_or_not_at_all(tmp_path, monkeypatch):
    """What was there stays, and nothing else is left over, when a disk is full at any file."""
    model = torch.nn.MultiheadAttention(8, 2, batch_first=True).eval()
    x = torch.randn(4, 12, 8, generator=torch.Generator().manual_seed(0))
    with torch.no_grad(), pa.inspect.capture(model) as heads:
        model(x, x, x)
    watch = pa.inspect.TrainingWatch(model, (x, x, x))
    watch(0)
    thresholds = pa.inspect.calibrate(heads, error=0.1)
    writers = {
        "report": lambda: pa.inspect.read(heads).save(tmp_path / "report"),
        "patterns": lambda: pa.inspect.export_patterns(heads, tmp_path / "patterns.json"),
        "thresholds": lambda: thresholds.save(tmp_path / "thresholds.json"),
        "watch": lambda: watch.save(tmp_path / "watch.json"),
    }
    for write in writers.values():
        write()
    before = {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}
    assert len(before) == 7
    monkeypatch.setattr(os, "replace", full_disk)
    for name, write in writers.items():
        with pytest.raises(OSError, match="space"):
            write()
        assert {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()} == before, name
    monkeypatch.undo()
    writers["watch"]()
    assert {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()} == before


def test_threads_may_write_one_file_at_a_time(tmp_path):
    (tmp_path / "real").mkdir()
    link = tmp_path / "link.json"
    link.symlink_to(tmp_path / "real" / "file.json")
    texts = [f"{k}" * 10_000 for k in range(4)]

    def write(text: str) -> None:
        for _ in range(50):
            files.write_whole(link, text)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(write, texts))
    assert link.read_text() in texts and link.is_symlink()
    assert [p.name for p in (tmp_path / "real").iterdir()] == ["file.json"]
