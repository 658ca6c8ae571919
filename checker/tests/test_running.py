"""Heads that do not run as their claims assume: uneven grids, overflow, numbers below the smallest normal one; and resources."""

from __future__ import annotations

import math
import os
import random
import shutil
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from flint import arb
from forging import Files, forge, put_together, take_apart
from partita_check import bounds, verdict
from partita_check.bounds import Gaps, mixing, sums
from partita_check.cli import run
from partita_check.clock import clock
from partita_check.reading import Head

import partita as pa

VERIFIED, REFUTED, UNKNOWN, MALFORMED = 0, 1, 2, 3
SINGLE = {"dtype": torch.float32}
BASES = {
    "hard": ("0.75*sin(1.5*x0)", 0.2, {"method": "hard", **SINGLE}),
    "tuned": ("0.75*sin(1.5*x0)", 0.05, {"method": "tuned", **SINGLE}),
    "affine": ("0.75*sin(1.5*x0)", 0.05, {"method": "affine", **SINGLE}),
    "adaptive": ("0.75*tanh(4.5*x0)", 0.05, {"method": "adaptive", **SINGLE}),
    "fitted": ("0.75*sin(1.5*x0)", 1e-6, {"method": "fitted"}),
}


@pytest.fixture(scope="session")
def bases(tmp_path_factory):
    place, made = tmp_path_factory.mktemp("bases"), dict[str, Path]()

    def get(name: str) -> Path:
        if name not in made:
            function, tolerance, options = BASES[name]
            made[name] = pa.compile(function, pa.Box([-1], [1]), tolerance=tolerance, **options).save(place / name)
        return made[name]

    return get


def scaled(files: Files, wide: int, tall: int) -> None:
    """`2^tall·f(x/2^wide)` on a box that is 2^wide times as large: the same head, with other exponents everywhere."""
    s, t = 2.0**wide, 2.0**tall
    powers = {
        "centers_0": s,
        "centers": s,
        "origin": s,
        "inverse_temperature": s**-2,
        "powers": s * s,
        "values": t,
        "value_slopes": t / s,
    }
    for name, tensor in files.tensors.items():
        tensor[2] = [x * powers[name.removeprefix("head.")] for x in tensor[2]]
        if not all(map(math.isfinite, tensor[2])):
            raise OverflowError
    for box in files.boxes:
        box["lo"], box["hi"] = [(-s).hex()], [s.hex()]
    for graph in files.graphs:
        first, second = (n for n in graph["nodes"] if n["op"] == "const")
        first["params"], second["params"] = [(0.75 * t).hex()], [(float.fromhex(second["params"][0]) / s).hex()]
    files.certificate["witness"] = None
    files.bound = 1.05 * t * files.bound


def as_run(folder: Path, monkeypatch: pytest.MonkeyPatch) -> float:
    """The largest error of the head as partita runs it, its preconditions not looked at; infinite if it returns NaN."""
    with monkeypatch.context() as patch:
        patch.setattr("partita.heads.head.FoldedHead.check_range", lambda *a: None)
        patch.setattr("partita.heads.grid_head._require_even_axes", lambda *a: None)
        patch.setattr("partita.kernels.guards.require_finite", lambda *a: None)
        c = pa.load(folder)
        (lo,), (hi,) = c.target.domain.lo, c.target.domain.hi
        x = lo + (hi - lo) * np.linspace(0, 1, 4001)[:, None]
        with np.errstate(all="ignore"):
            error = np.abs(c.head(x).numpy().astype(float) - c.target.graph.evaluate(x))
    return math.inf if np.isnan(error).any() else float(error.max())


SCALES = [
    (0, 0),
    (10, -10),
    (-10, 20),
    (40, 0),
    (63, 0),
    (66, 0),
    (70, 0),
    (72, 3),
    (75, -60),
    (-60, 0),
    (-70, 0),
    (0, -120),
    (0, -135),
    (0, -143),
    (0, 100),
    (0, 127),
    (60, 120),
    (-40, 100),
    (500, 0),
    (520, 0),
    (0, -1060),
    (0, -1070),
    (0, 1020),
]


@pytest.mark.parametrize("name", [pytest.param(b, marks=[pytest.mark.slow] * (b == "tuned")) for b in BASES])
@pytest.mark.parametrize("budget", [0.5, pytest.param(5.0, marks=pytest.mark.slow)])
def test_what_is_verified_holds_as_run_at_every_scale(bases, name, budget, tmp_path, monkeypatch):
    for wide, tall in SCALES:
        files = take_apart(bases(name))
        try:
            scaled(files, wide, tall)
            folder = put_together(files, tmp_path / f"{wide},{tall}")
        except (OverflowError, ValueError):  # not even the attacker can write this
            continue
        ordinary = (wide, tall) in SCALES[:3]
        error, (report, code) = as_run(folder, monkeypatch), run(folder, budget=60.0 if ordinary else budget)
        assert code != VERIFIED or error <= files.bound, (wide, tall, report)
        if ordinary:
            assert code == VERIFIED, report.get("reason")  # the control: ordinary scales are no obstacle
        if math.isinf(error):
            with pytest.raises(pa.errors.FormatError, match="cannot run"):
                pa.load(folder)


def uneven(files: Files, gaps: list[float], window: int) -> None:
    """A grid over [0, 1] of f(x) = x with these gaps, and a bound that it would keep if its windows were found."""
    total, ends = sum(gaps), np.cumsum(gaps)
    centers = [(end - gap / 2) / total for end, gap in zip(ends.tolist(), gaps)]
    rate = 24 / min(b - a for a, b in pairwise(centers)) ** 2
    count = len(centers)
    files.tensors = {
        "head.centers_0": ["F64", [count], centers],
        "head.values": ["F64", [count, 1], centers],
        "head.inverse_temperature": ["F64", [1], [rate]],
    }
    files.description["head"]["half_windows"] = files.certificate["model"]["half_windows"] = [window]
    files.certificate["witness"] = None
    files.bound = 0.75 * max(gaps) / total


@pytest.fixture(scope="session")
def identity(tmp_path_factory):
    c = pa.compile("x0", pa.Box([0], [1]), tolerance=0.05, method="hard")
    return c.save(tmp_path_factory.mktemp("identity") / "head")


@pytest.mark.parametrize("budget", [1.0, pytest.param(20.0, marks=pytest.mark.slow)])
def test_uneven_grids_are_verified_only_if_their_windows_are_found(identity, budget, tmp_path, monkeypatch):
    source, seen = random.Random(3), {True: 0, False: 0}
    for k in range(14):
        spread, count = source.choice([0.02, 0.3, 1.0, 3.0]), source.choice([6, 24, 40])
        gaps = sorted(1 + spread * source.random() for _ in range(count))
        files = take_apart(identity)
        uneven(files, gaps, source.choice([1, 2]))
        folder = put_together(files, tmp_path / str(k))
        error, (report, code) = as_run(folder, monkeypatch), run(folder, budget=budget)
        assert code != VERIFIED or error <= files.bound, report
        seen[code == VERIFIED] += 1
        if error > files.bound:
            with pytest.raises(pa.errors.FormatError, match="equally spaced"):
                pa.load(folder)
    assert min(seen.values()) >= 3


def test_a_checker_that_did_not_ask_would_verify_what_does_not_run(identity, bases, tmp_path, monkeypatch):
    """The control of the two laws above."""
    folders = [forge(identity, tmp_path / "a", lambda f: uneven(f, [1.0] * 12 + [2.0] * 12, 2))]

    def two_cells(files: Files) -> None:
        """A line from two tangents, so far apart that |z − c|² overflows float32."""
        wide, steep = 1e20, float(np.float32(1e-20))
        center = float(np.float32(5e19))
        numbers = {"centers": [-center, center], "values": [-center * steep, center * steep], "powers": [0.0, 0.0]}
        numbers["value_slopes"] = [steep, steep]
        for name, found in numbers.items():
            shape = {"powers": [2], "value_slopes": [2, 1, 1]}.get(name, [2, 1])
            files.tensors[f"head.{name}"] = ["F32", shape, [float(np.float32(x)) for x in found]]
        files.tensors["head.inverse_temperature"][2] = [float(np.float32(3e-38))]
        for box in files.boxes:
            box["lo"], box["hi"] = [(-wide).hex()], [wide.hex()]
        nodes = [
            {"op": "const", "args": [], "params": [steep.hex()]},
            {"op": "input", "args": [], "params": [0]},
            {"op": "mul", "args": [0, 1], "params": []},
        ]
        for graph in files.graphs:
            graph["nodes"], graph["outputs"] = nodes, [2]
        files.certificate["witness"], files.bound = None, 1e-3

    folders.append(forge(bases("adaptive"), tmp_path / "b", two_cells))
    for folder in folders:
        assert as_run(folder, monkeypatch) > take_apart(folder).bound
        report, code = run(folder, budget=10.0)
        assert code == UNKNOWN and "does not run" in report["reason"], report
        with monkeypatch.context() as patch:
            patch.setattr(verdict, "obstacle", lambda *a: "")
            assert run(folder, budget=8.0)[1] == VERIFIED


def test_half_an_inverse_temperature_must_be_normal(bases, tmp_path):
    def soften(files: Files) -> None:
        files.tensors["head.inverse_temperature"][2] = [2.0**-126]

    folder = forge(bases("tuned"), tmp_path / "a", soften)
    assert run(folder, budget=5.0)[1] in (UNKNOWN, REFUTED)
    with pytest.raises(pa.errors.FormatError, match="not a normal float32"):
        pa.load(folder)


def test_underflow_is_counted(monkeypatch):
    """Values that are subnormal in float32: every product rounds to a multiple of 2⁻¹⁴⁹, and relative terms do not see it."""
    source = np.random.default_rng(0)
    centers = np.linspace(-1.5, 1.5, 16).astype(np.float32)
    values = (source.normal(size=16) * 2.0**-142).astype(np.float32)
    head = Head(
        "grid",
        "float32",
        16,
        (tuple(map(float, centers)),),
        (),
        (25.0,),
        (tuple(map(float, values)),),
        None,
        None,
        None,
        (8,),
    )
    gaps = [Gaps(head.axes[0], (-1.0, 1.0), 25.0, 8)]
    spread, largest = float(values.max()) - float(values.min()), arb(float(abs(values).max()))

    def allowed() -> float:
        return float((mixing(gaps, "float32") * spread + sums(head, ((-1.0, 1.0),), gaps, "float32", largest)).upper())

    x = source.uniform(-1, 1, 5000).astype(np.float32)

    def output(kind: type) -> np.ndarray:
        d = x.astype(kind)[:, None] - centers.astype(kind)
        s = kind(-12.5) * d * d
        e = np.exp(s - s.max(axis=1, keepdims=True))
        return (e / e.sum(axis=1, keepdims=True) * values.astype(kind)).sum(axis=1).astype(np.float64)

    worst = float(abs(output(np.float32) - output(np.float64)).max())
    assert 0 < worst <= allowed()
    monkeypatch.setitem(bounds.TINIEST, "float32", arb(0))
    assert worst > allowed()


# --- files and resources -------------------------------------------------------------------------------------------


def lengthen(files: Files, nodes: int) -> None:
    """The same function with many additions of 0 behind it."""
    for graph in files.graphs:
        zero = len(graph["nodes"])
        graph["nodes"].append({"op": "const", "args": [], "params": [(0.0).hex()]})
        for k in range(nodes):
            last = len(graph["nodes"]) - 1 if k else graph["outputs"][0]
            graph["nodes"].append({"op": "add", "args": [last, zero], "params": []})
        graph["outputs"] = [len(graph["nodes"]) - 1]


@pytest.mark.parametrize("name, nodes", [("fitted 2-D", 5_000), ("affine 2-D", 5_000), ("pieces", 10_000)])
def test_the_budget_is_kept(heads, name, nodes, tmp_path):
    folder = forge(heads(name), tmp_path / "long", lambda files: lengthen(files, nodes))
    for budget in (0.2, 1.5):
        start = time.process_time()  # at most the time on the clock, and the same on a busy machine
        report, code = run(folder, budget=budget)
        assert time.process_time() - start < budget + 1.0 and code in (VERIFIED, UNKNOWN), report


def test_memory_is_bounded(heads, tmp_path):
    """A graph of 60,000 nodes in 1 GiB of address space, the function compared with a typed one."""
    resource = pytest.importorskip("resource")
    folder = forge(heads("pieces"), tmp_path / "long", lambda files: lengthen(files, 60_000))

    def confine() -> None:
        resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))

    for more in ([], ["--function", "abs(x)"]):
        command = [sys.executable, "-m", "partita_check", str(folder), "--budget", "2", *more]
        done = subprocess.run(command, capture_output=True, text=True, preexec_fn=confine)
        assert done.returncode in (REFUTED, UNKNOWN) and "MemoryError" not in done.stdout, done.stdout + done.stderr


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs pipes")
@pytest.mark.parametrize("file", ["head.json", "certificate.json", "head.safetensors"])
def test_only_regular_files_of_modest_size_are_read(heads, file, tmp_path):
    def replaced(kind: str) -> Path:
        folder = tmp_path / kind
        shutil.copytree(heads("fitted 1-D"), folder)
        (folder / file).unlink()
        return folder / file

    os.mkfifo(replaced("pipe"))
    replaced("zeros").symlink_to("/dev/zero")
    replaced("folder").mkdir()
    with open(replaced("large"), "wb") as sparse:
        sparse.truncate(6 << 30)
    start = time.process_time()
    large = "header" if file == "head.safetensors" else "bytes"  # tables may be large
    for kind, word in (("pipe", "regular"), ("zeros", "regular"), ("folder", "regular"), ("large", large)):
        report, code = run(tmp_path / kind)
        assert code == MALFORMED and file in report["reason"] and word in report["reason"], report
    assert time.process_time() - start < 2


def test_both_schemas_of_certificates_are_read(heads, tmp_path):
    def second(files: Files) -> None:
        files.certificate["schema"] = 2
        for term in files.certificate["terms"]:
            term["source"] = "approximation"
        for assumption in files.certificate["assumptions"]:
            assumption["about"] = "platform"

    assert run(forge(heads("fitted 2-D"), tmp_path / "a", second), budget=30.0)[1] == VERIFIED

    def third(files: Files) -> None:
        files.certificate["schema"] = 3

    report, code = run(forge(heads("fitted 2-D"), tmp_path / "b", third))
    assert code == MALFORMED and "schema" in report["reason"]


@pytest.mark.parametrize(
    "change",
    [
        lambda f: f.description["target"].update(label="cos(x0)"),
        lambda f: f.certificate["function"].update(text="cos(x0)"),
        lambda f: f.certificate["model"].update(type="scattered"),
        lambda f: f.certificate["domain"]["arguments"][0].update(hi=[(2.0).hex()]),
        lambda f: f.certificate.update(semantics="float32"),
    ],
)
def test_files_that_disagree_are_malformed(heads, change, tmp_path):
    assert run(forge(heads("fitted 1-D"), tmp_path / "a", change), budget=5.0)[1] == MALFORMED


def test_other_points_than_the_certificate_s_are_malformed(heads, tmp_path):
    def move(files: Files) -> None:
        files.tensors["domain.0.points"][2][0] += 1e-3

    report, code = run(forge(heads("cloud"), tmp_path / "a", move), budget=5.0)
    assert code == MALFORMED, report


def test_a_spent_budget_leaves_no_deadline_behind(bases) -> None:
    run(bases("fitted"), budget=1e-9)
    clock.tick()  # raised TimeOver while the deadline of the last run still stood
