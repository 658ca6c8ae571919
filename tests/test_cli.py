"""The command line: results on stdout, reasons on stderr, exit codes that mean something."""

import json
import subprocess
import sys

import numpy as np
import pytest

from partita.cli import parse_domain
from partita.errors import DomainError


def partita_version() -> str:
    from importlib import metadata

    return metadata.version("partita")


EXPRESSION = "sin(3*x0) + x0*cos(2*x1)"


def partita(*arguments, stdin=None, cwd=None):
    return subprocess.run(
        [sys.executable, "-m", "partita", *map(str, arguments)], capture_output=True, text=True, input=stdin, cwd=cwd
    )


@pytest.fixture(scope="module")
def head(tmp_path_factory):
    place = tmp_path_factory.mktemp("cli") / "head"
    answer = partita("compile", EXPRESSION, "--domain", "[-1,1]^2", "--tolerance", "0.2", "--out", place, "--json")
    assert answer.returncode == 0, answer.stderr
    summary = json.loads(answer.stdout)
    assert summary["kind"] == "proved" and summary["worst_error_seen"] <= summary["error_bound"] <= 0.2
    return place


def test_plan_in_words_and_as_json():
    words = partita("plan", EXPRESSION, "--domain", "[-1,1]^2", "--tolerance", "1e-2")
    assert words.returncode == 0 and "keys" in words.stdout and "proved" in words.stdout
    data = json.loads(partita("plan", EXPRESSION, "--domain", "[-1,1]x[-1,1]", "--tolerance", "1e-2", "--json").stdout)
    assert f"{data['keys']:,} keys" in words.stdout and data["error_bound"] <= 1e-2


def test_eval_reads_csv_with_or_without_a_header(head, tmp_path):
    (tmp_path / "points.csv").write_text("x,y\n0.5,-0.25\n# a remark\n\n-1,1\n")
    answer = partita("eval", head, tmp_path / "points.csv")
    values = [float(line) for line in answer.stdout.split()]
    expected = [np.sin(1.5) + 0.5 * np.cos(-0.5), np.sin(-3) - np.cos(2)]
    assert np.abs(np.array(values) - expected).max() <= 0.2
    again = json.loads(partita("eval", head, "-", "--json", stdin="0.5 -0.25\n-1 1\n").stdout)
    assert np.allclose(np.ravel(again["values"]), values) and again["kind"] == "proved"


def test_eval_takes_no_broken_line_for_a_header(head):
    assert "line 1" in partita("eval", head, "-", stdin="0.1O,0\n0.5,0\n").stderr


def test_eval_outside_the_domain(head):
    assert partita("eval", head, "-", stdin="2,0\n").returncode == 1
    assert partita("eval", head, "-", "--outside", "clamp", stdin="2,0\n").returncode == 0


@pytest.mark.parametrize("suffix", [".svg", ".png"])
def test_plot_writes_a_picture(head, tmp_path, suffix):
    out = tmp_path / f"cells{suffix}"
    assert partita("plot", head, "--out", out).returncode == 0
    assert out.read_bytes()[:5] in (b"<?xml", b"\x89PNG\r")


def test_export_and_verify(head, tmp_path):
    data = json.loads(partita("export", head, "--onnx", tmp_path / "head.onnx", "--json").stdout)
    assert data["bytes"] == (tmp_path / "head.onnx").stat().st_size > 0
    checks = json.loads(partita("verify", head, "--json").stdout)
    assert checks["holds"] and all(c["holds"] for c in checks["checks"])
    assert partita("verify", head).returncode == 0


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["plan", EXPRESSION, "--tolerance", "1"], 64, "--domain"),
        (["plan", EXPRESSION, "--domain", "[-1,1]^2", "--tolerance", "much"], 64, "tolerance"),
        (["plan", EXPRESSION, "--domain", "[-1,1", "--tolerance", "1"], 64, "reads?|read"),
        (["plan", EXPRESSION, "--domain", "[1,-1]^2", "--tolerance", "1"], 64, "axis 0"),
        (["plan", "x0 +", "--domain", "[-1,1]", "--tolerance", "1"], 64, "expected"),
        (["plan", "x0", "--domain", "[-1,1]", "--tolerance", "1", "--dtype", "int8"], 64, "float64"),
        (["bake"], 64, "bake"),
        ([], 64, ""),
        (["plan", "x0", "--domain", "[-1,1]", "--tolerance", "-1"], 64, "> 0"),
        (["plan", "x0", "--domain", "[-1,1]^8", "--tolerance", "1e-9", "--method", "hard"], 1, "best tolerance"),
        (["eval", "nowhere", "points.csv"], 1, "not a folder"),
    ],
)
def test_exit_codes(arguments, code, words, tmp_path):
    answer = partita(*arguments, cwd=tmp_path)
    assert answer.returncode == code
    assert not words or __import__("re").search(words, answer.stderr)
    assert "Traceback" not in answer.stderr and list(tmp_path.iterdir()) == []


def test_compile_does_not_overwrite(head):
    answer = partita("compile", "x0", "--domain", "[0,1]", "--tolerance", "0.1", "--out", head)
    assert answer.returncode == 1 and "exists" in answer.stderr and "--overwrite" in answer.stderr
    assert partita("--version").stdout.strip() == partita_version()


def test_help_teaches():
    told = partita("--help").stdout
    assert "partita plan" in told and "..." not in told.split("Commands:")[1]  # every summary fits
    for command in ("plan", "compile", "eval", "plot", "export", "verify"):
        answer = partita(command, "--help")
        assert answer.returncode == 0 and "--json" in answer.stdout


@pytest.mark.parametrize(
    ("text", "lo", "hi"),
    [
        ("[-1,1]^2", [-1, -1], [1, 1]),
        ("[0,1]x[-2,3]", [0, -2], [1, 3]),
        (" [ 0 , 1e3 ] ", [0], [1000]),
        ("[0,1]^2x[2,3]", [0, 0, 2], [1, 1, 3]),
        ("[0,1] × [1,2]", [0, 1], [1, 2]),
    ],
)
def test_domains(text, lo, hi):
    box = parse_domain(text)
    assert box.lo.tolist() == lo and box.hi.tolist() == hi


@pytest.mark.parametrize("text", ["", "[0,1", "0,1", "[0,1]^", "[0,1]^0x", "[a,b]", "[0,1][0,1]", "[0,1]^-1", "[0;1]"])
def test_bad_domains(text):
    with pytest.raises(DomainError):
        parse_domain(text)


def test_attack_and_bounds_speak_of_a_saved_head(head):
    found = partita("attack", head, "--samples", 500, "--restarts", 4, "--json")
    data = json.loads(found.stdout)
    assert found.returncode == 0 and data["refuted"] is False
    false = partita("attack", head, "--bound", data["error"] / 2, "--samples", 500, "--restarts", 4)
    assert false.returncode == 1 and "REFUTED" in false.stdout
    told = partita("bounds", head)
    assert told.returncode == 0 and "output 0 lies in" in told.stdout and "∂f/∂x1" in told.stdout


def test_a_budget_ends_the_work():
    answer = partita(
        "compile", EXPRESSION, "--domain", "[-1,1]^2", "--tolerance", "1e-6", "--out", "never", "--budget", "1e-9"
    )
    assert answer.returncode == 1 and "BudgetSpentError" in answer.stderr
