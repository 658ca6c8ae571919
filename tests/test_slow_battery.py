"""The worked example of a slow simulator runs, and gives the same head with processes and without."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import partita as pa

pytest.importorskip("onnxruntime")

EXAMPLE = Path(__file__).parent.parent / "examples/slow_battery.py"


def run(folder, workers):
    """What the example prints, in a process of its own: others are started that read the script again."""
    command = [sys.executable, str(EXAMPLE), "--quick", "--out", str(folder), "--workers", str(workers)]
    return subprocess.run(command, capture_output=True, text=True, check=True, cwd=folder.parent).stdout


def test_the_example_runs(tmp_path):
    said = run(tmp_path / "out", 0)
    for part in (
        "one call of the simulator",
        "calls in",
        "estimated error",
        "attack: ",
        "loaded again: ",
        "ONNX: 10,000 points",
    ):
        assert part in said
    c = pa.load(tmp_path / "out/head")
    assert c.certificate.kind == "estimated" and c.error_estimate <= 0.05 and c.evaluations > 200
    error = float(re.search(r"attack: ([\d.]+) mV", said)[1])
    assert 0.5 * c.error_estimate < error / 1000 < 3 * c.error_estimate


@pytest.mark.slow
def test_with_processes_and_from_the_checkpoint_it_says_the_same(tmp_path):
    figures = re.compile(r"\d+ calls in|Compiled.*|attack: .*|loaded again: .*")
    first = figures.findall(run(tmp_path / "out", 2))
    again = figures.findall(run(tmp_path / "out", 0))  # every answer is kept
    other = figures.findall(run(tmp_path / "other", 0))
    assert first == again == other and len(first) == 4
