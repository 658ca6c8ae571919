"""What the checker says of true claims, of forged ones, and of damaged files."""

from __future__ import annotations

import json
import random
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from forging import Files, forge, put_together, take_apart
from partita_check import cells, reading, soft, verdict
from partita_check.cli import main, run
from partita_check.reading import read_folder
from saved_heads import HEADS

import partita as pa

VERIFIED, REFUTED, UNKNOWN, MALFORMED = 0, 1, 2, 3


LONGER = {"hard float32", "pieces 2-D", "affine 2-D", "jump L2"}  # their methods and dtypes are there without them


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] * (n in LONGER)) for n in HEADS if n != "estimate"]
)
def test_true_claims_are_verified(heads, name):
    report, code = run(heads(name), budget=60.0)
    assert code == VERIFIED, report
    given = str(report["verdict"])
    assert ("given" in given) == ("black box" in name or "cloud" in name)
    if "black box" in name:
        assert "cannot be checked" in given
    elif "L2" not in name and "cloud" not in name:
        assert "ratio" in report["bracket"]


@pytest.mark.parametrize("name", ["hard", "vector", "fitted float32"])
def test_tables_that_are_mapped_are_checked_like_those_that_are_read(heads, name, tmp_path, monkeypatch):
    expected = run(heads(name))
    mapped, original = [], reading.mmap.mmap
    monkeypatch.setattr(reading, "READ_UP_TO", 0)
    monkeypatch.setattr(reading.mmap, "mmap", lambda *given, **named: mapped.append(given) or original(*given, **named))
    assert run(heads(name)) == expected and len(mapped) == 1 and expected[1] == VERIFIED
    folder = Path(shutil.copytree(heads(name), tmp_path / "changed"))
    data = bytearray((folder / "head.safetensors").read_bytes())
    data[-3] ^= 1
    (folder / "head.safetensors").write_bytes(data)
    assert run(folder)[1] == MALFORMED
    assert run(forge(heads(name), tmp_path / "forged", flip_value), budget=20.0)[1] in (REFUTED, UNKNOWN)


def test_an_estimate_is_never_verified(heads):
    report, code = run(heads("estimate"))
    assert code == UNKNOWN and "estimate" in report["reason"] and report["verdict"] != "verified"


@pytest.mark.parametrize("name", ["fitted 2-D", "hard", "affine 2-D", "adaptive", "vector", "fitted float32"])
def test_bounds_below_the_witness_are_refuted(heads, name, tmp_path):
    def lower(files: Files) -> None:
        files.bound = 0.99 * float.fromhex(files.certificate["witness"]["error"])

    report, code = run(forge(heads(name), tmp_path / "forged", lower), budget=20.0)
    assert code == REFUTED and report["worst point"], report


def number(files: Files, tensor: str, place: int, new) -> None:
    files.tensors[f"head.{tensor}"][2][place] = new(files.tensors[f"head.{tensor}"][2][place])


def middle(files: Files) -> int:
    """A cell in the middle of the domain: those outside hold no weight, and may say what they like."""
    return len(files.tensors["head.values"][2]) // 2 + 2


def change_values(files):
    number(files, "values", middle(files), lambda v: v + 200 * files.bound)


def flip_value(files):
    number(files, "values", middle(files), lambda v: -v - 1)


def scale_values(files):
    files.tensors["head.values"][2] = [1.001 * v for v in files.tensors["head.values"][2]]


def swap_values(files):
    v = files.tensors["head.values"][2]
    k = middle(files)
    v[k], v[k + 1] = v[k + 1], v[k]


def move_center(files):
    number(files, "centers_0", 3, lambda c: c + 0.01)


def sharpen(files):
    number(files, "inverse_temperature", 0, lambda r: 1.2 * r)


def soften(files):
    number(files, "inverse_temperature", 0, lambda r: r / 1.2)


def swap_axes(files):
    t = files.tensors
    t["head.inverse_temperature"][2].reverse()
    t["head.centers_0"], t["head.centers_1"] = t["head.centers_1"], t["head.centers_0"]
    shape = [t["head.centers_0"][1][0], t["head.centers_1"][1][0]]
    assert t["head.values"][1][0] == shape[0] * shape[1]


def enlarge(files):
    for box in files.boxes:
        box["hi"][0] = (1.5).hex()


def flip_sign_of_an_end(files):
    for box in files.boxes:
        box["lo"][0] = "-0x1.8000000000000p+0"


def enlarge_in_one_file(files):
    files.boxes[0]["hi"][0] = (1.5).hex()


def change_operation(files):
    for graph in files.graphs:
        node = next(n for n in graph["nodes"] if n["op"] == "sin")
        node["op"] = "cos"


def change_constant(files):
    for graph in files.graphs:
        node = next(n for n in graph["nodes"] if n["op"] == "const")
        node["params"][0] = (float.fromhex(node["params"][0]) * (1 + 1e-4)).hex()


def flip_constant(files):
    for graph in files.graphs:
        node = next(n for n in graph["nodes"] if n["op"] == "const")
        node["params"][0] = (-float.fromhex(node["params"][0])).hex()


def swap_inputs(files):
    for graph in files.graphs:
        for node in graph["nodes"]:
            if node["op"] == "input":
                node["params"][0] = 1 - node["params"][0]


def another_output(files):
    for graph in files.graphs:
        graph["outputs"][0] -= 1


def graph_in_one_file(files):
    files.description["target"]["graph"]["nodes"][0]["op"] = "cos"


def lower_bound(files):
    files.bound = 0.5 * files.bound


def lower_bound_slightly(files):
    files.bound = 0.97 * float.fromhex(files.certificate["witness"]["error"])


def much_lower_bound(files):
    files.bound = 0.01 * files.bound


def below_rounding(files):
    """More than the exact head errs by, less than running it in float64 may add."""
    files.bound = 1.5 * float.fromhex(files.certificate["witness"]["error"])


def negative_bound(files):
    files.certificate["error_bound"] = "-" + files.certificate["error_bound"]


def no_bound(files):
    files.certificate["error_bound"] = None


def supremum_of_a_mean(files):
    files.certificate["norm"] = "inf"


def narrow_window(files):
    files.description["head"]["half_windows"] = [1] * len(files.description["head"]["half_windows"])


def other_semantics(files):
    files.certificate["semantics"] = {"float64": "float32", "float32": "float64"}[files.certificate["semantics"]]


def claim_float64(files):
    files.certificate["semantics"] = files.description["head"]["dtype"] = "float64"


def narrow_claim(files):
    """The same numbers said to be run in float32: the bound has no room for that arithmetic."""
    for tensor in files.tensors.values():
        tensor[0] = "F32"
    files.certificate["semantics"] = files.description["head"]["dtype"] = "float32"


def upgrade(files):
    files.certificate["kind"] = "proved"


def upgrade_estimate(files):
    files.certificate |= {"kind": "proved", "error_bound": files.certificate["error_estimate"], "error_estimate": None}


def upgrade_estimate_given(files):
    upgrade_estimate(files)
    files.certificate |= {
        "kind": "proved_given",
        "known": {"modulus": {"constant": (3.0).hex(), "exponent": (1.0).hex()}},
    }
    files.certificate["assumptions"].append({"statement": "|f(x) − f(y)|_∞ ≤ 3·|x − y|₂", "vouched_by": "caller"})


def drop_assumptions(files):
    files.certificate["assumptions"] = []


def quiet_constant(files):
    files.certificate["known"]["modulus"]["constant"] = (1.5).hex()
    files.bound = 0.6 * files.bound


def lower_constant(files):
    """A smaller constant, said aloud: the table of values contradicts it."""
    quiet_constant(files)
    for a in files.certificate["assumptions"]:
        a["statement"] = a["statement"].replace("≤ 3·", "≤ 1.5·")


def drop_an_output(files):
    files.description["head"]["output_shape"] = [1]
    files.tensors["head.values"][1][1] = 1
    del files.tensors["head.values"][2][1::2]


def swap_outputs(files):
    v = files.tensors["head.values"][2]
    v[0::2], v[1::2] = v[1::2], v[0::2]


def drop_a_center(files):
    files.tensors["head.centers_0"][1] = [files.tensors["head.centers_0"][1][0] - 1]
    files.tensors["head.centers_0"][2].pop()
    files.tensors["head.values"][1][0] -= 1
    files.tensors["head.values"][2].pop()


def tilt(files):
    number(files, "value_slopes", 2, lambda s: s + 3.0)


def tilt_pieces(files):
    number(files, "value_slopes", 0, lambda s: s * (1 + 1e-6))


def shift_values(files):
    """Down: a soft maximum lies below the maximum, so that shifting a piece up would make the head better."""
    number(files, "values", 0, lambda v: v - 1e-6)


def sharpen_one(files):
    number(files, "inverse_temperature", 0, lambda r: r * (1 - 1e-6))


def shift_power(files):
    number(files, "powers", 2, lambda p: p + 0.05)


def wider_fill(files):
    for box in files.boxes:
        box["fill_distance"] = (0.05).hex()


def lower_curvature(files):
    """The constant used is no longer the one assumed."""
    files.certificate["known"]["curvature"] = (float.fromhex(files.certificate["known"]["curvature"]) / 2).hex()


def lower_curvature_of_one_axis(files):
    known = files.certificate["known"]
    known["curvature"] = [known["curvature"][0], (float.fromhex(known["curvature"][1]) / 2).hex()]


def one_curvature_for_all_axes(files):
    files.certificate["known"]["curvature"] = files.certificate["known"]["curvature"][1]


def curvature_of_too_few_axes(files):
    files.certificate["known"]["curvature"] = files.certificate["known"]["curvature"][:1]


def lower_jumps(files):
    files.certificate["known"]["jumps"]["tube"] = [(0.01).hex()]
    files.bound = 0.1 * files.bound


MUTATIONS = {
    "fitted 2-D": [
        change_values,
        flip_value,
        scale_values,
        swap_values,
        move_center,
        sharpen,
        soften,
        enlarge,
        flip_sign_of_an_end,
        enlarge_in_one_file,
        change_operation,
        change_constant,
        flip_constant,
        swap_inputs,
        another_output,
        graph_in_one_file,
        lower_bound,
        lower_bound_slightly,
        negative_bound,
        no_bound,
        narrow_window,
        other_semantics,
        narrow_claim,
        swap_axes,
    ],
    "fitted 1-D": [drop_a_center, move_center, below_rounding],
    "fitted float32": [claim_float64, other_semantics],
    "steep float32": [lower_bound_slightly, change_values, enlarge],
    "vector": [drop_an_output, swap_outputs],
    "hard": [lower_bound_slightly, flip_value],
    "affine 2-D": [tilt, change_values, enlarge],
    "adaptive": [tilt, shift_power, lower_bound],
    "pieces": [tilt_pieces, shift_values, lower_bound_slightly, sharpen_one],
    "pieces 2-D": [tilt_pieces, shift_values, lower_bound_slightly],
    "jump L2": [supremum_of_a_mean, much_lower_bound],
    "black box": [upgrade, drop_assumptions, quiet_constant, lower_constant, change_values, lower_bound],
    "black box jumps": [lower_jumps, drop_assumptions],
    "black box tangents": [lower_curvature, drop_assumptions, upgrade, lower_bound],
    "black box tangents per axis": [
        lower_curvature_of_one_axis,
        one_curvature_for_all_axes,
        curvature_of_too_few_axes,
        lower_bound,
    ],
    "estimate": [upgrade_estimate, upgrade_estimate_given],
    "cloud": [upgrade, wider_fill, drop_assumptions],
}
CASES = [(name, change) for name, changes in MUTATIONS.items() for change in changes]


def test_there_are_many_ways_to_lie():
    assert len({change for _, change in CASES}) >= 20


@pytest.mark.parametrize("name, change", CASES, ids=[f"{n}: {c.__name__}" for n, c in CASES])
@pytest.mark.parametrize("budget", [0.6, pytest.param(3.0, marks=pytest.mark.slow)])
def test_false_claims_are_rejected(heads, name, change, budget, tmp_path):
    report, code = run(forge(heads(name), tmp_path / "forged", change), budget=budget)
    assert code in (REFUTED, UNKNOWN, MALFORMED), report


def test_true_changes_are_accepted(heads, tmp_path):
    """The control: an attacker who changes nothing that matters is believed, so rejections above are about the lies."""

    def harmless(files: Files) -> None:
        files.certificate["witness"], files.description["why"] = None, ["forged"]
        files.bound = 1.01 * files.bound

    assert run(forge(heads("fitted 2-D"), tmp_path / "a", harmless), budget=30.0)[1] == VERIFIED
    assert run(put_together(take_apart(heads("vector")), tmp_path / "b"), budget=30.0)[1] == VERIFIED


def test_terms_of_the_certificate_are_not_believed(heads, tmp_path):
    def forget(files: Files) -> None:
        files.certificate["terms"], files.certificate["proof"] = [], {"method": "trust me"}

    assert run(forge(heads("fitted 2-D"), tmp_path / "a", forget), budget=30.0)[1] == VERIFIED


def edit(value, source: random.Random):
    """One random change somewhere inside a JSON value."""
    if isinstance(value, dict) and value:
        key = source.choice(sorted(value))
        if source.random() < 0.1:
            return {k: v for k, v in value.items() if k != key}
        return {**value, key: edit(value[key], source)}
    if isinstance(value, list) and value:
        place = source.randrange(len(value))
        return [edit(v, source) if k == place else v for k, v in enumerate(value)]
    return source.choice(
        [None, True, -1, 0, 3, 1e300, "", "x", "0x1p0", (2.0).hex(), (-1.0).hex(), [], {}, [[]], {"a": 1}, 10**18]
    )


@pytest.mark.parametrize("name", ["fitted 2-D", "adaptive", "black box"])
@pytest.mark.parametrize(("count", "budget"), [(25, 0.25), pytest.param(200, 0.5, marks=pytest.mark.slow)])
def test_edited_and_resealed_files_never_break_the_checker(heads, name, count, budget, tmp_path):
    source = random.Random(7)
    for k in range(count):
        files = take_apart(heads(name))
        bound, graph = files.bound, json.dumps([files.description["target"]["graph"], files.description["domains"]])
        tensors = json.dumps(files.tensors)
        part = source.choice(["description", "certificate", "tensors"])
        setattr(files, part, edit(getattr(files, part), source))
        try:
            folder = put_together(files, tmp_path / str(k))
        except Exception:  # not even the attacker can write this
            continue
        report, code = run(folder, budget=budget)
        assert code in (0, 1, 2, 3)
        if code == VERIFIED:  # then the change was harmless
            said = json.dumps([files.description["target"]["graph"], files.description["domains"]])
            assert (said, json.dumps(files.tensors)) == (graph, tensors) and files.bound >= bound, report


@pytest.mark.parametrize("file", ["head.json", "certificate.json", "head.safetensors"])
def test_damaged_files_are_malformed(heads, file, tmp_path):
    source = random.Random(3)
    original = (heads("fitted 1-D") / file).read_bytes()
    shutil.copytree(heads("fitted 1-D"), tmp_path / "h")
    for _ in range(60):
        data = bytearray(original)
        if source.random() < 0.3:
            del data[source.randrange(len(data)) :]
        else:
            for _ in range(source.choice([1, 1, 8])):
                data[source.randrange(len(data))] = source.randrange(256)
        (tmp_path / "h" / file).write_bytes(data)
        code = run(tmp_path / "h", budget=1.0)[1]
        blank = file == "head.json" and code != MALFORMED and json.loads(data) == json.loads(original)
        assert code == MALFORMED or bytes(data) == original or blank
    (tmp_path / "h" / file).unlink()
    assert run(tmp_path / "h")[1] == MALFORMED


def test_hostile_json_and_tensors_are_malformed(heads, tmp_path):
    shutil.copytree(heads("fitted 1-D"), tmp_path / "h")
    for text in (
        "[" * 100_000,
        '{"a": NaN}',
        '{"a": 1, "a": 2}',
        '{"a": 1e999}',
        "[]",
        "",
        '{"a": ' + "9" * 5000 + "}",
        "\xff",
    ):
        (tmp_path / "h" / "head.json").write_text(text, encoding="latin-1")
        assert run(tmp_path / "h")[1] == MALFORMED
    assert run(tmp_path / "nowhere")[1] == MALFORMED


def planted(monkeypatch, bug):
    """Errors that a checker could make."""
    if bug == "no remainder":
        monkeypatch.setattr("partita_check.polynomials.left_out", lambda size, radius, n: size * 0)
    elif bug == "no rounding":
        monkeypatch.setattr(verdict, "mixing", lambda *a: verdict.arb(0))
        monkeypatch.setattr(verdict, "sums", lambda *a: verdict.arb(0))
    elif bug == "no weights":
        monkeypatch.setattr(cells.Cells, "_weight", lambda *a: verdict.arb(0))
    elif bug == "half the box":
        monkeypatch.setattr(soft, "pieces_above", lambda b, basis, m, target, most: iter(()))


@pytest.mark.parametrize(
    "name, change, bug",
    [
        ("fitted 1-D", below_rounding, "no rounding"),
        ("adaptive", lower_bound, "no weights"),
        ("fitted 2-D", lower_bound, "half the box"),
    ],
)
def test_a_checker_with_a_bug_would_believe_the_lie(heads, monkeypatch, tmp_path, name, change, bug):
    """Negative control of the tests above: they fail if the checker forgets what is planted here."""
    planted(monkeypatch, bug)
    monkeypatch.setattr(verdict.Checker, "look", lambda *a: False)  # and does not look at points
    folder = forge(heads(name), tmp_path / "forged", change)
    assert run(folder, budget=3.0)[1] == VERIFIED
    monkeypatch.undo()
    assert run(folder, budget=3.0)[1] != VERIFIED


def test_moved_inputs_are_counted_where_f_is_steep(monkeypatch, tmp_path):
    """Two cells are tanh(20x) exactly; the claim is all rounding, and an eighth of it is what storing inputs moves f by."""
    compiled = pa.compile("tanh(20*x)", pa.Box([-1], [1]), tolerance=1e-2, dtype=torch.float32, method="fitted")
    source = compiled.save(tmp_path / "source")
    assert run(source, budget=10.0)[1] == VERIFIED

    def lower(files: Files) -> None:
        files.bound = 0.8 * files.bound

    forged = forge(source, tmp_path / "forged", lower)
    assert run(forged, budget=0.5)[1] == UNKNOWN
    monkeypatch.setattr(verdict.Checker, "moved_by_inputs", lambda checker: verdict.arb(0))  # the control
    assert run(forged, budget=10.0)[1] == VERIFIED


def test_slopes_are_taken_where_stored_inputs_lie(monkeypatch, tmp_path):
    """float32 numbers are 1/8 apart here: the lower end of the box is stored as 2²⁰, where f is steeper than in the box."""
    text, box = "tanh(5*(x - 1048576))", pa.Box([2**20 + 0.0624], [2**20 + 4])
    source = pa.compile(text, box, tolerance=0.6, dtype=torch.float32, method="fitted").save(tmp_path / "source")
    assert run(source, budget=10.0)[1] == VERIFIED

    def lower(files: Files) -> None:
        files.bound, files.certificate["witness"] = 0.3118, None  # an error of 0.3127 is attained

    forged = forge(source, tmp_path / "forged", lower)
    assert run(forged, budget=0.5)[1] != VERIFIED
    moved = verdict.Checker.moved_by_inputs

    def over_the_box(checker: verdict.Checker) -> verdict.arb:
        ends, checker.ends = checker.ends, tuple(zip(checker.stored.lo, checker.stored.hi))
        found, checker.ends = moved(checker), ends
        return found

    monkeypatch.setattr(verdict.Checker, "moved_by_inputs", over_the_box)  # the control
    assert run(forged, budget=10.0)[1] == VERIFIED


def test_keys_that_read_backwards_are_not_believed(monkeypatch, tmp_path):
    """`sup |p tanh(tilt·z) − z|` was bounded for tilt > 0 only: keys with their places exchanged got a bound that is too low."""
    interval = pa.Box([-1], [1])
    source = pa.compile("k0 + q0", (interval, interval), tolerance=0.05, method="pieces").save(tmp_path / "source")

    def exchange(files: Files) -> None:
        places = files.tensors["head.centers"][2]
        places[1], places[3] = places[3], places[1]
        files.bound, files.certificate["witness"] = 1.955, None  # the error in a corner is 1.9557

    forged = forge(source, tmp_path / "forged", exchange)
    assert run(source, budget=5.0)[1] == VERIFIED and run(forged, budget=0.5)[1] == REFUTED
    monkeypatch.setattr(verdict.Checker, "look", lambda *a: False)
    monkeypatch.setattr(verdict.Checker, "by_boxes", lambda checker: (float("inf"), ""))
    assert run(forged, budget=5.0)[1] == UNKNOWN
    monkeypatch.setattr(verdict, "misread", lambda *a: verdict.arb(0.9))  # the control
    assert run(forged, budget=5.0)[1] == VERIFIED


def test_the_function_that_is_asked_for_must_be_the_stored_one(heads):
    same = ["sin(3*x) + x*cos(2*y)", "x1*0 + sin(3*x0)", "cos(y*2)*x + sin(x*3)", "sin(3*x0) - -(x0*cos(2*x1))"]
    codes = [run(heads("fitted 2-D"), function=text, budget=30.0)[1] for text in same]
    assert codes == [VERIFIED, REFUTED, VERIFIED, REFUTED]
    report, code = run(heads("fitted 2-D"), function="sin(3*x) + x*cos(2.0000001*y)")
    assert code == REFUTED and "another function" in report["reason"]
    assert run(heads("black box"), function="sin(3*x)")[1] == REFUTED


def test_a_spot_check_never_says_verified(heads, tmp_path):
    report, code = run(heads("fitted 2-D"), sampled=50)
    assert code == UNKNOWN and report["verdict"] == "spot check" and "verified" not in json.dumps(report)
    report, code = run(forge(heads("fitted 2-D"), tmp_path / "a", lower_bound), sampled=2000)
    assert code == REFUTED


def test_a_spent_budget_says_how_far_it_got(heads):
    report, code = run(heads("fitted 2-D"), budget=1e-9)
    assert code == UNKNOWN and "time budget ran out" in report["reason"]


def test_the_command(heads, capsys):
    assert main([str(heads("vector"))]) == 0
    assert "sin(x0), cos(x0)" in capsys.readouterr().out
    assert main([str(heads("vector")), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["verdict"] == "verified"
    for wrong in ([], ["--budget", "-1", "x"], ["--what", "x"], [str(heads("vector")), "--function", "import os"]):
        with pytest.raises(SystemExit) as stop:
            main(wrong)
        assert stop.value.code == 64
    assert "usage" in capsys.readouterr().err
    code = "import sys, partita_check.cli; sys.exit(any(m.split('.')[0] in ('torch', 'numpy', 'partita') for m in sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parent.parent).returncode == 0


@pytest.mark.parametrize("kind", ["grid", "scattered"])
def test_heads_in_many_dimensions_do_not_exhaust_memory(kind, heads, tmp_path):
    """One key in 40 dimensions: neither the corners of the box nor the coefficients of a polynomial are listed."""
    m = 40

    def widen(files: Files) -> None:
        files.description["head"] |= {"type": kind, "input_shapes": [[m]], "output_shape": [], "half_windows": [1] * m}
        files.certificate["model"] = {"type": kind}
        rates, shape = ([1.0] * m, [m]) if kind == "grid" else ([1.0], [])
        files.tensors = {"head.inverse_temperature": ["F64", shape, rates], "head.values": ["F64", [1, 1], [0.0]]}
        files.tensors |= {"head.centers": ["F64", [1, m], [0.0] * m]} if kind == "scattered" else {}
        files.tensors |= {f"head.centers_{i}": ["F64", [1], [0.0]] for i in range(m if kind == "grid" else 0)}
        for box in files.boxes:
            box |= {"shape": [m], "lo": [(-1.0).hex()] * m, "hi": [(1.0).hex()] * m}
        for graph in files.graphs:
            graph["inputs"] = m
        files.certificate["witness"], files.bound = None, 1e3

    folder = forge(heads("fitted 1-D"), tmp_path / "forged", widen)
    checker = verdict.Checker(read_folder(folder), 1e3)
    assert "by_boxes" not in [attempt.__name__ for attempt in verdict.attempts(checker)]
    assert run(folder, budget=3.0)[1] in (VERIFIED, UNKNOWN)
