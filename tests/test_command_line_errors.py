"""What the command line says when something is wrong: as JSON under --json, in its own words, and without overwriting files."""

import json
import re
from pathlib import Path

import pytest
from test_cli import EXPRESSION, partita

import partita as pa
from partita.cli import COMMANDS

PLAN = ("--domain", "[-1,1]^2", "--tolerance", "0.1")


@pytest.fixture(scope="module")
def head(tmp_path_factory):
    place = tmp_path_factory.mktemp("saved") / "head"
    return pa.compile(EXPRESSION, pa.Box([-1, -1], [1, 1]), tolerance=0.2).save(place)


@pytest.fixture
def places(head, tmp_path):
    """Names in the arguments below: a head, files that exist, and places that do not."""
    (tmp_path / "empty.csv").write_text("")
    (tmp_path / "header.csv").write_text("# exported\n\nx0,x1\n")
    (tmp_path / "far.csv").write_text("x0,x1\n7,7\n")
    (tmp_path / "there.svg").write_text("a picture")
    (tmp_path / "there.onnx").write_text("a network")
    (tmp_path / "broken.py").write_text("def f(z):\n    raise RuntimeError('down')\n")
    return {"HEAD": str(head), **{p.name: str(p) for p in tmp_path.iterdir()}, "new": str(tmp_path / "new")}


WRONG = [
    (["plan", "x0 +", *PLAN], 64, "ExpressionError"),
    (["plan", EXPRESSION, "--domain", "[1,-1]^2", "--tolerance", "0.1"], 64, "DomainError"),
    (["plan", EXPRESSION, "--tolerance", "0.1"], 64, "UsageError"),
    (["plan", EXPRESSION, *PLAN, "--method", "magic"], 64, "UnsupportedError"),
    (["compile", EXPRESSION, *PLAN, "--out", "HEAD"], 1, "AlreadyExistsError"),
    (["compile", "broken.py:f", *PLAN, "--out", "new"], 1, "TargetFailedError"),
    (["head", EXPRESSION, "--domain", "[-1,1]^2", "--keys", "4", "--sharpness", "-1"], 64, "UnsupportedError"),
    (["head", "broken.py:f", "--domain", "[-1,1]^2", "--keys", "4"], 1, "TargetFailedError"),
    (["eval", "HEAD", "empty.csv"], 64, "DomainError"),
    (["eval", "HEAD", "header.csv"], 64, "DomainError"),
    (["eval", "HEAD", "far.csv"], 1, "OutsideDomainError"),
    (["eval", "new", "far.csv"], 1, "TruncatedFileError"),
    (["plot", "HEAD", "--out", "there.svg"], 1, "AlreadyExistsError"),
    (["plot", "HEAD", "--out", "new", "--output", "x"], 64, "UsageError"),
    (["layers", "HEAD", "--out", "new", "--at", "left"], 64, "DomainError"),
    (["export", "HEAD", "--onnx", "there.onnx"], 1, "AlreadyExistsError"),
    (["verify", "new"], 1, "TruncatedFileError"),
    (["attack", "HEAD", "--bound", "-1"], 64, "DomainError"),
    (["attack", "HEAD", "--function", "broken.py:f"], 64, "UnsupportedError"),
    (["bounds", "new"], 1, "TruncatedFileError"),
    (["reproduce", "nothing"], 64, "UnsupportedError"),
    (["inspect", "nowhere:model", "--inputs", "far.csv", "--out", "new"], 64, "UnsupportedError"),
    (["studio", "--no-browser", "--port", "99999"], 64, "UsageError"),
    (["bake"], 64, "UsageError"),
]


def named(arguments, places):
    return [places.get(a, a.replace("broken.py", places["broken.py"])) for a in arguments]


@pytest.mark.parametrize(
    ("arguments", "code", "kind"), WRONG, ids=lambda v: " ".join(v[:3]) if isinstance(v, list) else ""
)
def test_errors_under_json_are_json(arguments, code, kind, places):
    words = partita(*named(arguments, places))
    answer = partita(*named(arguments, places), "--json")
    told = json.loads(answer.stdout)["error"]  # one object and nothing else
    assert answer.returncode == words.returncode == told["exit_code"] == code
    assert told["type"] == kind and told["message"].splitlines()[0] in words.stderr
    assert words.stdout == "" and told["message"] not in answer.stderr  # without --json it goes to stderr


def test_every_command_is_among_them():
    assert {arguments[0] for arguments, _, _ in WRONG} == {*COMMANDS, "bake"}


@pytest.mark.parametrize("name", ["empty.csv", "header.csv"])
def test_eval_of_an_empty_table(name, places):
    answer = partita("eval", places["HEAD"], places[name])
    assert answer.returncode == 64 and "no points; expected 2 numbers" in answer.stderr and answer.stdout == ""


def test_a_header_may_follow_a_remark(places):
    answer = partita("eval", places["HEAD"], "-", stdin="# exported\nx0,x1\n0.5,0.5\n")
    assert answer.returncode == 0 and len(answer.stdout.split()) == 1
    twice = partita("eval", places["HEAD"], "-", stdin="x0,x1\nx0,x1\n0.5,0.5\n")
    assert twice.returncode == 64 and "line 2" in twice.stderr  # negative control: one header only


@pytest.mark.parametrize(
    ("command", "option", "name"), [("plot", "--out", "there.svg"), ("export", "--onnx", "there.onnx")]
)
def test_files_are_overwritten_on_request_only(command, option, name, places, monkeypatch):
    def written(compiled, path, **_):  # what is written is tested elsewhere
        Path(path).write_text("new")
        return Path(path)

    monkeypatch.setattr("partita.cli.plot_command.plot_head", written)
    monkeypatch.setattr(pa.Compiled, "export_onnx", written)
    place = Path(places[name])
    refused = partita(command, places["HEAD"], option, place)
    assert refused.returncode == 1 and "exists already" in refused.stderr and "--overwrite" in refused.stderr
    assert place.read_text().startswith("a ")
    assert partita(command, places["HEAD"], option, place, "--overwrite").returncode == 0 and place.read_text() == "new"
    assert partita(command, places["HEAD"], option, places["new"]).returncode == 0


PYTHON = re.compile(r"\b[a-z_]+=(?:True|'|\w)|\b(?:pa|c|torch)\.[a-zA-Z_]+|\bmax_\w+|\bon_error")


@pytest.mark.parametrize(
    ("arguments", "advice"),
    [
        (["compile", EXPRESSION, *PLAN, "--out", "HEAD"], r"use --overwrite\."),
        (["eval", "HEAD", "far.csv"], "Use --outside clamp or --outside allow."),
        (["plan", EXPRESSION, *PLAN, "--method", "magic"], "--method is 'magic'"),
        (["plan", EXPRESSION, *PLAN, "--norm", "0.5"], "--norm is '0.5'"),
        (["plan", EXPRESSION, *PLAN, "--on-error", "ignore"], "--on-error is 'ignore'"),
        (["plan", EXPRESSION, *PLAN, "--max-excluded", "2"], "--max-excluded is 2.0"),
        (["plan", EXPRESSION, *PLAN, "--on-error", "exclude"], "Leave --on-error out"),
        (["plan", EXPRESSION, *PLAN, "--max-bytes", "8", "--method", "hard"], "--max-bytes"),
        (["plan", "1e6 + x0", *PLAN[:3], "0.05", "--dtype", "float32", "--method", "hard"], "float32 can promise"),
        (["plan", "step(x0)", *PLAN], "--norm 1"),
        (["plan", "log(x0)", "--domain", "[0,1]", "--tolerance", "0.1"], "--norm|--domain|domain"),
        (["compile", EXPRESSION, *PLAN, "--out", "new", "--outside", "ignore"], "--outside is 'ignore'"),
        (["compile", EXPRESSION, *PLAN, "--out", "new", "--sharpness", "-1"], "--sharpness is"),
        (["layers", "HEAD", "--out", "new", "--tolerance", "1e-9", "--no-pictures"], "--tolerance"),
        (["layers", "HEAD", "--out", "new", "--form", "round"], "form"),
    ],
)
def test_advice_is_in_the_words_of_the_command_line(arguments, advice, places):
    told = partita(*named(arguments, places)).stderr
    assert re.search(advice, told) and not PYTHON.search(told), told
