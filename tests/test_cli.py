"""The command line: results on stdout, reasons on stderr, exit codes that mean something."""

import importlib
import inspect
import io
import json
import re
import subprocess
import sys
from contextlib import chdir, redirect_stderr, redirect_stdout
from dataclasses import dataclass

import numpy as np
import pytest

import partita as pa
from partita.cli import COMMANDS, main
from partita.cli.common import parse_domain
from partita.errors import DomainError

EXPRESSION = "sin(3*x0) + x0*cos(2*x1)"


@dataclass
class Answer:
    returncode: int
    stdout: str
    stderr: str


def partita(*arguments, stdin="", cwd="."):
    """The command line in this process: importing torch again takes seconds."""
    out, err, lines = io.StringIO(), io.StringIO(), io.StringIO(stdin)
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(err), chdir(cwd):
        patch.setattr(sys, "stdin", lines)
        with pytest.raises(SystemExit) as stopped:
            main([str(a) for a in arguments])
    return Answer(stopped.value.code or 0, out.getvalue(), err.getvalue())


def in_a_process(*arguments):
    return subprocess.run([sys.executable, "-m", "partita", *map(str, arguments)], capture_output=True, text=True)


@pytest.fixture(scope="module")
def head(tmp_path_factory):
    place = tmp_path_factory.mktemp("cli") / "head"
    answer = in_a_process("compile", EXPRESSION, "--domain", "[-1,1]^2", "--tolerance", "0.2", "--out", place, "--json")
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
        (["eval", "nowhere", "points.csv"], 1, "does not exist"),
    ],
)
def test_exit_codes(arguments, code, words, tmp_path):
    answer = partita(*arguments, cwd=tmp_path)
    assert answer.returncode == code
    assert not words or re.search(words, answer.stderr)
    assert "Traceback" not in answer.stderr and list(tmp_path.iterdir()) == []


def test_compile_does_not_overwrite(head):
    answer = partita("compile", "x0", "--domain", "[0,1]", "--tolerance", "0.1", "--out", head)
    assert answer.returncode == 1 and "exists" in answer.stderr and "--overwrite" in answer.stderr


def test_the_version():
    assert partita("--version").stdout.strip() == pa.__version__


def test_help_shows_every_command_on_one_line():
    told = partita("--help")
    assert told.returncode == 0 and "partita plan" in told.stdout
    lines = told.stdout.split("Commands:")[1].strip().splitlines()
    assert [line.split()[0] for line in lines] == list(COMMANDS)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_its_own_help(command):
    answer = partita(command, "--help")
    assert answer.returncode == 0 and "--json" in answer.stdout
    function = getattr(importlib.import_module(f"partita.cli.{command}_command"), f"{command}_command")
    assert inspect.getdoc(function).splitlines()[0].split(".")[0] in " ".join(answer.stdout.split())


def test_compile_command_takes_the_options_of_compile():
    """The command line passes options on: each is one of `pa.compile`, a part of one, or about files and printing."""
    command = importlib.import_module("partita.cli.compile_command").compile_command
    own = {"expression", "region", "table", "inputs", "outputs", "workers", "scheduler", "out", "overwrite", "as_json"}
    assert set(inspect.signature(command).parameters) - own <= set(inspect.signature(pa.compile).parameters)


@pytest.mark.parametrize("text", ["", "x,y\n", "# nothing\n\n"], ids=["empty", "header only", "remarks only"])
def test_eval_of_no_points_says_so(head, tmp_path, text):
    (tmp_path / "points.csv").write_text(text)
    for answer in (partita("eval", head, tmp_path / "points.csv"), partita("eval", head, "-", stdin=text)):
        assert answer.returncode == 64 and "no points" in answer.stderr and answer.stdout == ""


def test_of_a_black_box_that_is_not_stored_nothing_is_said_to_be_checked(tmp_path):
    c = pa.compile(lambda z: np.sin(3 * z[:, 0]), pa.Box([-1], [1]), tolerance=0.1)
    assert "seen in 256 samples" in c.explain()
    folder = c.save(tmp_path / "head")
    told = partita("verify", folder).stdout
    assert any(line.startswith("–") and "estimate" in line for line in told.splitlines()) and "✓" in told
    checks = json.loads(partita("verify", folder, "--json").stdout)["checks"]
    assert [check["checked"] for check in checks if check["name"] == "estimate"] == [False]
    answer = partita("attack", folder, "--json")
    assert answer.returncode == 2 and json.loads(answer.stdout)["claimed"] is False
    assert "compile it again" in pa.load(folder).report().lower()


def test_a_plan_claims_nothing():
    """Only what was built has a bound: the table of a plan has no ≤."""
    told = partita("plan", EXPRESSION, "--domain", "[-1,1]^2", "--tolerance", "1e-2").stdout
    assert "→" in told and "≤" not in told.split("→")[1].splitlines()[0]


def test_attack_of_an_estimate_refutes_nothing(tmp_path):
    c = pa.compile(lambda z: np.sin(3 * z[:, 0]), pa.Box([-1], [1]), tolerance=0.1, trace=False)
    found = pa.attack(c, samples=100, restarts=1)
    assert not found.claimed and not found.refuted and "nothing to refute" in str(found)
    known = pa.compile("sin(3*x)", pa.Box([-1], [1]), tolerance=0.1, method="train").save(tmp_path / "head")
    answer = partita("attack", known, "--json")
    data = json.loads(answer.stdout)
    assert answer.returncode == 2 and data["claimed"] is data["refuted"] is False
    refuted = partita("attack", known, "--bound", "1e-12", "--json")
    assert refuted.returncode == 1 and json.loads(refuted.stdout)["refuted"]  # negative control: a bound of one's own


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
