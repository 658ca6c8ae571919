"""benchmarks/speed.py runs, tells missed targets from met ones, and fills its page. Nothing is timed here that must be fast."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

ROOT = Path(__file__).parent.parent


@pytest.fixture
def part(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Imports a file of the benchmark by name."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))

    def named(name: str) -> ModuleType:
        return importlib.import_module(name)

    yield named
    for name in [n for n in sys.modules if n.startswith("speed")]:
        del sys.modules[name]


def test_a_quick_run_writes_its_tables_and_errors(tmp_path: Path) -> None:
    out = tmp_path / "cpu.json"
    command = [sys.executable, str(ROOT / "benchmarks/speed.py"), "--quick", "--only", "grids", "--out", str(out)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    found = json.loads(out.read_text(encoding="utf-8"))
    assert found["quick"] is True and found["machine"]["packages"]["torch"]
    (section,) = found["sections"].values()
    times, errors, fitted = section["tables"]
    for row in times["rows"]:
        cells = dict(zip((c[0] for c in times["columns"]), row))
        assert cells["cells"] in (1000, 1024) and 0 < cells["scipy"] < 1e9
    for m, _, ours, in_torch, *_ in errors["rows"]:
        assert m in (2, 3) and ours < 1e-13 and in_torch < 1e-13
    assert all(row[5] < 1e-12 for row in fitted["rows"])  # rounding
    assert times["title"] in done.stdout


def test_an_unknown_section_or_a_missing_gpu_is_refused() -> None:
    program = str(ROOT / "benchmarks/speed.py")
    done = subprocess.run([sys.executable, program, "--only", "moon"], capture_output=True, text=True)
    assert done.returncode == 2 and "error" in done.stderr and "scattered" in done.stderr


def test_targets_are_read_in_the_right_direction(part: Any) -> None:
    measure = part("speed_measure")
    section = measure.Section("s", "about")
    section.target("fast enough", 12.0, 10.0, least=True)
    section.target("too slow", 9.0, 10.0, least=True)
    section.target("small enough", 1e-7, 1e-6, "")
    section.target("too large", float("nan"), 1e-6, "")
    section.target("missing", None, 3.0)
    assert [t["holds"] for t in section.targets] == [True, False, True, False, False]
    text = measure.rendered(vars(section))
    assert text.count("holds") == 2 and text.count("FAILS") == 3 and "not measured" in text


def test_peers_find_the_smallest_table_within_a_tolerance(part: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    peers, z = part("speed_peers"), np.random.default_rng(0).uniform(-1, 1, (500, 2))

    def f(x: Any, y: Any) -> Any:
        return np.sin(3 * x) + x * np.cos(2 * y)

    exact = f(*z.T)
    for peer in peers.peers(2):
        if peer.family == "Chebyshev, numba":
            continue  # compiling takes seconds
        counts = peer.counts(f, 2, 1e-2, z, exact)
        assert counts is not None and peer.errors[counts] <= 1e-2, peer.name
        assert np.abs(peer.make(f, counts)(z)[:, 0] - exact).max() <= 1e-2, peer.name
        assert peer.errors[peers._fewer(counts, 0)] > 1e-2 if peer.each_axis else True
    monkeypatch.setattr(peers, "MOST_NUMBERS", 10**5)
    linear = peers.Peer("linear", "scipy", peers.scipy_linear)
    assert linear.counts(f, 2, 1e-9, z[:20], exact[:20]) is None  # too many numbers


def test_stored_results_fill_their_blocks_and_no_others(part: Any) -> None:
    report = part("speed_report")
    page = (ROOT / "docs/benchmarks.md").read_text(encoding="utf-8")
    named = {(m[2], m[3]) for m in report.BLOCK.finditer(page)}
    speed = part("speed")
    wanted = {("cpu", n) for n in (*speed.CPU, "machine")} | {("gpu", n) for n in (*speed.GPU, "machine")}
    assert named == wanted
    table = {"title": "A table", "columns": [["m", "count"], ["ns", "number"]], "rows": [[2, 1234.5]], "shown": True}
    section = {"name": "point", "about": "", "tables": [table], "targets": [], "notes": ["said"], "seconds": 0.0}
    stored = {"cpu": {"sections": {"point": section}, "machine": part("speed_measure").machine("cpu")}}
    before, after = (
        {m.group(2, 3): m[4] for m in report.BLOCK.finditer(p)} for p in (page, report.filled(page, stored))
    )
    assert after["cpu", "point"] == "A table\nm     ns\n2  1,234\n\nsaid\n"
    assert "numpy" in after["cpu", "machine"] and "Python" in after["cpu", "machine"]
    assert all(after[n] == before[n] for n in named - {("cpu", "point"), ("cpu", "machine")})
