"""Checks in shards, their merge, and the bounds of shards that a certificate lists."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Sequence
from fractions import Fraction
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest
from forging import Files, forge
from partita_check import __version__, reading, shards, verdict
from partita_check.cli import main, run, run_merge, run_shard
from partita_check.merging import read_result, write_result
from partita_check.polynomials import Ends
from partita_check.reading import read_folder, sha256_of
from partita_check.shards import Shard

import partita as pa

VERIFIED, REFUTED, UNKNOWN, MALFORMED, USAGE = 0, 1, 2, 3, 64
DIVIDED = ["fitted 1-D", "fitted 2-D", "fitted float32", "vector", "tokens", "adaptive", "affine"]
UNDIVIDED = ["fitted L2", "cloud", "black box", "black box tangents"]  # the first shard proves them
WHOLE = ["hard", "pieces", *UNDIVIDED]  # every shard proves the first two, for which there is a short proof


def check_in(count: int, folder: Path, place: Path, budget: float = 60.0) -> list[Path]:
    """Check every shard and write its result; the files in order."""
    place.mkdir(exist_ok=True)
    paths = []
    for k in range(1, count + 1):
        _, code, result = run_shard(folder, Shard(k, count), budget)
        assert result is not None and code in (VERIFIED, REFUTED, UNKNOWN)
        paths.append(place / f"{k}-of-{count}.json")
        write_result(result, paths[-1])
    return paths


@pytest.fixture(scope="module")
def results(heads, tmp_path_factory) -> Callable[[str, int], list[Path]]:
    """(name of a head, n) → the results of its n shards."""
    place, made = tmp_path_factory.mktemp("shards"), dict[tuple[str, int], list[Path]]()

    def get(name: str, count: int) -> list[Path]:
        if (name, count) not in made:
            made[name, count] = check_in(count, heads(name), place / f"{name.replace(' ', '-')}-{count}")
        return made[name, count]

    return get


# --- the cut -----------------------------------------------------------------------------------------------------------


def boxes_of(count: int, folder: Path) -> list[Ends]:
    """The boxes of all shards of a head."""
    stored, found = read_folder(folder), list[Ends]()
    for k in range(1, count + 1):
        found += verdict.Checker(stored, stored.claim.bound, Shard(k, count)).starts
    return found


def problem_of(boxes: Sequence[Ends], folder: Path) -> str:
    """Why boxes do not cover the domain of a head, as it sees it, exactly once: by their volumes, and by points of it."""
    stored = read_folder(folder)
    ends = verdict.Checker(stored, stored.claim.bound).ends
    volumes = [math.prod(Fraction(b) - Fraction(a) for a, b in box) for box in [ends, *boxes]]
    if volumes[0] != sum(volumes[1:]):
        return f"the volumes add up to {float(sum(volumes[1:]) / volumes[0])} of that of the domain"
    source = random.Random(1)
    points = [tuple(a + (b - a) * source.random() for a, b in ends) for _ in range(500)]
    points += [tuple(side[k] for side in ends) for k in (0, 1)]
    missed = [p for p in points if not any(all(a <= x <= b for x, (a, b) in zip(p, box)) for box in boxes)]
    return f"no box holds {missed[0]}" if missed else ""


@pytest.mark.parametrize("count", [1, 2, 3, 7, 100])
@pytest.mark.parametrize("name", ["fitted 1-D", "fitted 2-D", "fitted float32", "adaptive", "fitted L2", "hard"])
def test_the_cells_of_all_shards_are_the_domain(heads, name, count):
    assert problem_of(boxes_of(count, heads(name)), heads(name)) == ""


def drop_a_cell(monkeypatch, number: int) -> None:
    """A mistake that a checker could make: a cell that belongs to no shard."""
    own = Shard.own
    monkeypatch.setattr(Shard, "own", lambda shard, divided: [k for k in own(shard, divided) if k != number])


@pytest.mark.parametrize("number", [0, 5, 31])
def test_a_cell_that_is_dropped_is_missed(heads, monkeypatch, number):
    """Negative control of the test above."""
    drop_a_cell(monkeypatch, number)
    assert "volumes" in problem_of(boxes_of(3, heads("fitted 2-D")), heads("fitted 2-D"))


def test_outer_cells_reach_to_where_inputs_are_rounded(heads, monkeypatch):
    stored = read_folder(heads("fitted float32"))
    checker = verdict.Checker(stored, stored.claim.bound)
    assert all(a < lo and hi < b for (a, b), lo, hi in zip(checker.ends, stored.lo, stored.hi))
    cells = Shard.cells  # the control: a cut of the plain domain
    monkeypatch.setattr(Shard, "cells", lambda shard, plain, ends, widths: cells(shard, plain, plain, widths))
    assert "volumes" in problem_of(boxes_of(3, heads("fitted float32")), heads("fitted float32"))


def test_every_cell_belongs_to_one_shard():
    for of in (1, 2, 3, 7, 513, 5000):
        for divided in (True, False):
            owned = [k for number in range(1, of + 1) for k in Shard(number, of).own(divided)]
            assert sorted(owned) == list(range(Shard(1, of).count(divided)))
    assert Shard(1, 5000).count(True) < 5000 and Shard(4999, 5000).own(True) == []
    assert (
        max(len(Shard(k, 7).own(True)) for k in range(1, 8)) - min(len(Shard(k, 7).own(True)) for k in range(1, 8)) <= 1
    )


# --- verdicts ----------------------------------------------------------------------------------------------------------


NUMBERS = [(name, count) for name in ("fitted 1-D", "fitted 2-D", "pieces") for count in (1, 2, 7)]


@pytest.mark.parametrize("name, count", [*NUMBERS, *((name, 3) for name in DIVIDED + WHOLE)])
def test_shards_of_a_true_claim_are_merged_into_verified(heads, results, name, count):
    report, code = run_merge(heads(name), results(name, count))
    whole, _ = run(heads(name), budget=60.0)
    assert code == VERIFIED and len(report["shards"]) == count
    assert {k: report.get(k) for k in ("verdict", "claim", "bracket")} == {
        k: whole.get(k) for k in ("verdict", "claim", "bracket")
    }
    assert all("verified" in line for line in report["shards"])
    assert sum("nothing to prove" in line for line in report["shards"]) == (count - 1 if name in UNDIVIDED else 0)


def test_shards_divide_the_boxes(heads, results):
    """No shard measures nearly as many boxes as the whole check, and all together about as many."""

    def boxes(text: str) -> int:
        return int(text.split(" boxes")[0].split()[-1].replace(",", ""))

    whole = boxes(run(heads("fitted 2-D"), budget=60.0)[0]["method"])
    each = [boxes(read_result(path).method) for path in results("fitted 2-D", 3)]
    assert max(each) < 0.6 * whole and sum(each) < 2 * whole


def test_more_shards_than_cells(heads, monkeypatch, tmp_path):
    monkeypatch.setattr(shards, "MOST_CELLS", 4)
    paths = check_in(7, heads("fitted 1-D"), tmp_path / "shards")
    report, code = run_merge(heads("fitted 1-D"), paths)
    assert code == VERIFIED and sum("0 of 4 cells" in line for line in report["shards"]) == 3
    assert run_merge(heads("fitted 1-D"), paths[:4])[1] == MALFORMED  # they cover it, but were to be seven


@pytest.mark.parametrize("name", ["fitted 2-D", "vector", "hard"])
def test_a_claim_below_the_error_is_refuted_by_shards(heads, name, tmp_path):
    def lower(files: Files) -> None:
        files.bound = 0.99 * float.fromhex(files.certificate["witness"]["error"])

    forged = forge(heads(name), tmp_path / "forged", lower)
    report, code = run_merge(forged, check_in(2, forged, tmp_path / "shards"))
    assert code == REFUTED and "shard 1/2" in report["reason"] and report["worst point"]


def blind(monkeypatch) -> None:
    """A checker that looks at no points, so that only boxes can tell."""
    monkeypatch.setattr(verdict.Checker, "look", lambda *a: False)


def just_below(files: Files) -> None:
    """Wrong in small places only: around the points of the largest error."""
    files.bound = 0.97 * float.fromhex(files.certificate["witness"]["error"])


@pytest.mark.parametrize("name, count", [("fitted 2-D", 3), ("adaptive", 7), ("fitted float32", 2)])
def test_one_place_where_a_claim_is_wrong_is_in_one_of_the_shards(heads, monkeypatch, name, count, tmp_path):
    blind(monkeypatch)
    forged = forge(heads(name), tmp_path / "forged", just_below)
    paths = check_in(count, forged, tmp_path / "shards", budget=0.7)
    outcomes = [read_result(path).outcome for path in paths]
    report, code = run_merge(forged, paths)
    assert "unknown" in outcomes and code == UNKNOWN and "the best bound that could be proved" in report["reason"]


def test_a_dropped_cell_would_verify_a_claim_that_is_wrong_there(heads, monkeypatch, tmp_path):
    """Negative control of the test above: the cells with the only places where the claim is wrong belong to no shard."""
    blind(monkeypatch)
    forged = forge(heads("adaptive"), tmp_path / "forged", just_below)
    own, bad = Shard.own, []
    for cell in range(Shard(1, 2).count(True)):
        monkeypatch.setattr(Shard, "own", lambda shard, divided, cell=cell: [cell])
        bad += [cell] if run_shard(forged, Shard(1, 2), 0.5)[1] != VERIFIED else []
    assert 0 < len(bad) < 8, "the claim is wrong in a few cells"
    monkeypatch.setattr(Shard, "own", lambda shard, divided: [k for k in own(shard, divided) if k not in bad])
    assert run_merge(forged, check_in(2, forged, tmp_path / "dropped"))[1] == VERIFIED
    monkeypatch.setattr(Shard, "own", own)
    assert run_merge(forged, check_in(2, forged, tmp_path / "all", budget=1.0))[1] == UNKNOWN


def test_an_unknown_shard_makes_the_merge_unknown(heads, results, tmp_path):
    """One shard had too little time; the others are verified."""
    paths = list(results("fitted 2-D", 3))
    late = read_result(paths[1])._replace(outcome="unknown", reason="the time budget ran out", proved=math.inf)
    paths[1] = tmp_path / "late.json"
    write_result(late, paths[1])
    report, code = run_merge(heads("fitted 2-D"), paths)
    assert code == UNKNOWN and report["reason"] == "shard 2/3: the time budget ran out" and "bracket" not in report


def test_every_shard_has_the_whole_budget(heads, monkeypatch, tmp_path):
    """The clock starts again with every shard, and a shard whose time is over says so."""
    given = []
    start = type(verdict.clock).start
    monkeypatch.setattr(
        type(verdict.clock), "start", lambda clock, seconds: (given.append(seconds), start(clock, seconds))[1]
    )
    for k in (1, 2):
        run_shard(heads("fitted 1-D"), Shard(k, 2), 17.0)
    assert given == [17.0, 17.0]
    blind(monkeypatch)
    forged = forge(heads("fitted 2-D"), tmp_path / "forged", just_below)
    report, code, result = run_shard(forged, Shard(1, 2), 0.3)
    assert code == UNKNOWN and result is not None and "the time budget ran out" in report["reason"] == result.reason


def test_an_estimate_is_unknown_in_shards_too(heads, tmp_path):
    report, code = run_merge(heads("estimate"), check_in(2, heads("estimate"), tmp_path / "shards"))
    assert code == UNKNOWN and "estimate" in report["reason"]


@pytest.mark.parametrize("name", ["layers", "product", "affine"])
def test_networks_share_the_proofs_of_their_parts(networks, name, tmp_path):
    paths = check_in(2, networks(name), tmp_path / "shards")
    assert run_merge(networks(name), paths)[1] == VERIFIED and run(networks(name), budget=60.0)[1] == VERIFIED
    covered = [read_result(path).ground for path in paths]
    assert set(covered[0]) == ({"domain"} if name == "affine" else {f"part {k}" for k in range(len(covered[0]))})
    assert name == "affine" or all(len(own) == 8 and cells == 16 for g in covered for cells, own in g.values())
    assert run_merge(networks(name), paths[:1])[1] == MALFORMED


def test_a_wrong_part_of_a_network_is_not_verified_by_shards(networks, monkeypatch, tmp_path):
    def lower(files: Files) -> None:
        part = files.certificate["proof"]["parts"][0]["certificate"]
        part["error_bound"] = (0.9 * float.fromhex(part["witness"]["error"])).hex()

    forged = forge(networks("layers"), tmp_path / "forged", lower)
    assert run_merge(forged, check_in(2, forged, tmp_path / "shards"))[1] == REFUTED
    blind(monkeypatch)
    assert run_merge(forged, check_in(2, forged, tmp_path / "again", budget=1.0))[1] == UNKNOWN


def test_the_first_shard_of_a_descent_has_all_of_it(tmp_path):
    unit = pa.Box([-1, -1], [1, 1])
    descent = pa.in_context.gradient_descent("squared", 4, 0.3, x=unit, y=pa.Box([-1], [1]), w=unit, prompt_length=50)
    folder = descent.save(tmp_path / "descent", examples=50)
    paths = check_in(3, folder, tmp_path / "shards")
    report, code = run_merge(folder, paths)
    assert code == VERIFIED == run(folder)[1]
    assert [line.split(";")[0] for line in report["shards"]] == [
        "1/3: verified, 1 of 1 cells",
        "2/3: verified, 0 of 1 cells",
        "3/3: verified, 0 of 1 cells",
    ]


# --- what a merge refuses ------------------------------------------------------------------------------------------------


def refusal(folder: Path, paths: Sequence[Path]) -> str:
    """Why a merge is refused."""
    report, code = run_merge(folder, paths)
    assert code == MALFORMED and report["verdict"] == "malformed" and "shards" not in report, report
    return str(report["reason"])


def test_the_order_of_the_files_does_not_matter(heads, results):
    found = [run_merge(heads("fitted 2-D"), paths) for paths in permutations(results("fitted 2-D", 3))]
    assert found[0][1] == VERIFIED and all(other == found[0] for other in found)


def test_gaps_are_refused(heads, results):
    one, two, three = results("fitted 2-D", 3)
    assert "Missing: shard 2/3" in refusal(heads("fitted 2-D"), [one, three])
    assert "Missing: shard 1/3, 3/3" in refusal(heads("fitted 2-D"), [two])
    many = results("fitted 1-D", 7)
    assert "Missing: shard 2/7, 3/7, 4/7, 5/7, 6/7, 7/7" in refusal(heads("fitted 1-D"), many[:1])


def test_overlaps_are_refused(heads, results):
    one, two, three = results("fitted 2-D", 3)
    assert "shard 2/3 is there twice" in refusal(heads("fitted 2-D"), [one, two, three, two])
    other = results("fitted 2-D", 2)
    assert "other cuts overlap" in refusal(heads("fitted 2-D"), [one, other[1], three])
    assert "other cuts overlap" in refusal(heads("fitted 2-D"), [*other, one])


def test_results_for_other_heads_are_refused(heads, results, tmp_path):
    paths = results("fitted 2-D", 2)
    assert "another head" in refusal(heads("fitted 1-D"), paths)
    assert "another head" in refusal(heads("fitted 2-D"), [paths[0], results("fitted 1-D", 2)[1]])

    def higher(files: Files) -> None:
        files.bound = 1.5 * files.bound

    relaxed = forge(heads("fitted 2-D"), tmp_path / "relaxed", higher)  # the same tensors under another certificate
    assert "certificate.json has another hash" in refusal(relaxed, paths) or "another head" in refusal(relaxed, paths)


def test_files_that_change_during_a_check_are_noticed(heads, monkeypatch, tmp_path):
    folder = forge(heads("fitted 1-D"), tmp_path / "head", lambda files: None)

    def touched(checker: verdict.Checker) -> str:
        forge(folder, folder, lambda files: files.description.update(why=["changed"]))
        return ""

    monkeypatch.setattr(verdict.Checker, "contradiction", touched)
    report, code, result = run_shard(folder, Shard(1, 2))
    assert code == MALFORMED and result is None and "changed while they were checked" in report["reason"]


def resealed(data: dict[str, Any]) -> dict[str, Any]:
    plain = {k: v for k, v in data.items() if k != "seal"}
    return {**plain, "seal": sha256_of(plain)}


EDITS: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "another number": (lambda d: d.update(shard=1), "twice"),
    "number beyond the last": (lambda d: d.update(shard=4), "not the number of a shard"),
    "number 0": (lambda d: d.update(shard=0), "not the number of a shard"),
    "number true": (lambda d: d.update(shard=True), "not the number of a shard"),
    "number as text": (lambda d: d.update(shard="2"), "not the number of a shard"),
    "fewer shards": (lambda d: d.update(of=2), "other cuts overlap"),
    "too many shards": (lambda d: d.update(of=10**6), "not the number of a shard"),
    "fewer cells": (lambda d: d["ground"]["domain"].update(own=d["ground"]["domain"]["own"][1:]), "does not cover"),
    "other cells": (lambda d: d["ground"]["domain"].update(own=[0, 3, 6]), "does not cover"),
    "a coarser cut": (lambda d: d["ground"]["domain"].update(cells=16), "does not cover"),
    "cells as floats": (lambda d: d["ground"]["domain"].update(own=[1.0]), "whole numbers"),
    "no ground": (lambda d: d.update(ground={}), "does not cover"),
    "more ground": (lambda d: d["ground"].update(more={"cells": 1, "own": [0]}), "does not cover"),
    "a proof above the claim": (lambda d: d.update(proved=(1.0).hex()), "above the bound claimed"),
    "no proof": (lambda d: d.update(proved=None), "above the bound claimed"),
    "negative proof": (lambda d: d.update(proved=(-1.0).hex()), "negative"),
    "another claim": (lambda d: d.update(claimed=(1.0).hex()), "another bound"),
    "no claim": (lambda d: d.update(claimed=None), "above the bound claimed"),
    "NaN": (lambda d: d.update(seen="nan"), "finite hex float"),
    "a float": (lambda d: d.update(seen=0.1), "finite hex float"),
    "unknown without a reason": (lambda d: d.update(outcome="unknown"), "reason"),
    "verified with a reason": (lambda d: d.update(reason="the time budget ran out"), "reason"),
    "another outcome": (lambda d: d.update(outcome="fine"), "outcome"),
    "outcome malformed": (lambda d: d.update(outcome="malformed", reason="x"), "outcome"),
    "an assumption": (lambda d: d.update(given=["f is small"]), "assumptions"),
    "given as text": (lambda d: d.update(given="x"), "list"),
    "another version": (lambda d: d.update(checker="0.0.1"), "written by partita-check '0.0.1'"),
    "another format": (lambda d: d.update(format="partita-head"), "not the result of a shard"),
    "a later format": (lambda d: d.update(version=2), "version"),
    "version as a float": (lambda d: d.update(version=1.0), "other fields"),
    "another hash": (lambda d: d["files"].update({"head.safetensors": "0" * 64}), "another head"),
    "no hash": (lambda d: d["files"].pop("head.safetensors"), "another head"),
    "one file more": (lambda d: d["files"].update({"head.onnx": "0" * 64}), "another head"),
    "a short hash": (lambda d: d["files"].update({"head.json": "0"}), "sha256"),
    "a point elsewhere": (lambda d: d.update(where=[(9.0).hex()] * 2), "not a point of the domain"),
    "a point of other dimension": (lambda d: d.update(where=[(0.0).hex()]), "not a point of the domain"),
    "a new field": (lambda d: d.update(note="checked by me"), "other fields"),
    "a lost field": (lambda d: d.pop("given"), "not the result of a shard"),
}


@pytest.mark.parametrize("name", EDITS)
def test_results_edited_by_hand_are_refused(heads, results, name, tmp_path):
    """Without the seal every edit is seen; with a new seal those that contradict the rest of the file, the head or the others."""
    change, said = EDITS[name]
    one, two, three = results("fitted 2-D", 3)
    data = json.loads(two.read_text())
    change(data)
    edited = tmp_path / "edited.json"
    edited.write_text(json.dumps(data))
    refusal(heads("fitted 2-D"), [one, edited, three])
    edited.write_text(json.dumps(resealed(data)))
    assert said in refusal(heads("fitted 2-D"), [one, edited, three])


def test_a_file_that_is_only_written_anew_is_believed(heads, results, tmp_path):
    """The control of the test above: edits are refused, not other layouts of the same data."""
    one, two, three = results("fitted 2-D", 3)
    again = tmp_path / "again.json"
    again.write_text(json.dumps(resealed(json.loads(two.read_text())), indent=4, sort_keys=True))
    assert run_merge(heads("fitted 2-D"), [one, again, three])[1] == VERIFIED


def test_damaged_files_are_refused(heads, results, tmp_path):
    one, two = results("fitted 2-D", 2)
    original, source = two.read_bytes(), random.Random(5)
    damaged = tmp_path / "damaged.json"
    for _ in range(60):
        data = bytearray(original)
        if source.random() < 0.3:
            del data[source.randrange(len(data) - 1) :]
        else:
            data[source.randrange(len(data))] = source.randrange(256)
        damaged.write_bytes(data)
        try:
            same = json.loads(data) == json.loads(original)
        except ValueError:
            same = False
        assert same or refusal(heads("fitted 2-D"), [one, damaged])
    for text in ("", "[]", "{}", "[" * 100_000, '{"a": NaN}', '{"format": "partita-check-shard"}'):
        damaged.write_text(text)
        refusal(heads("fitted 2-D"), [one, damaged])
    assert "is missing" in refusal(heads("fitted 2-D"), [one, tmp_path / "nowhere.json"])
    assert "not a regular file" in refusal(heads("fitted 2-D"), [one, tmp_path])


def test_a_result_says_what_it_covers(heads, results):
    data = json.loads(results("fitted 2-D", 3)[1].read_text())
    assert data["checker"] == __version__ and (data["shard"], data["of"]) == (2, 3)
    assert data["ground"] == {"domain": {"cells": 32, "own": list(range(1, 32, 3))}}
    assert set(data["files"]) == {"head.json", "head.safetensors", "certificate.json"}
    assert data["outcome"] == "verified" and float.fromhex(data["proved"]) <= float.fromhex(data["claimed"])


# --- the command -------------------------------------------------------------------------------------------------------


def test_the_command(heads, capsys, tmp_path):
    folder, paths = str(heads("vector")), [str(tmp_path / f"{k}.json") for k in (1, 2)]
    for k, path in enumerate(paths, 1):
        assert main([folder, "--shard", f"{k}/2", "--out", path]) == VERIFIED
    assert "verified, on this shard alone" in capsys.readouterr().out
    assert main([folder, "--shard", "1/2"]) == VERIFIED
    assert capsys.readouterr().out == Path(paths[0]).read_text()
    assert main([folder, "--merge", *reversed(paths)]) == VERIFIED
    assert "the proofs of 2 shards" in capsys.readouterr().out
    assert main([folder, "--function", "sin(x), cos(x)", "--json", "--merge", *paths]) == VERIFIED
    assert json.loads(capsys.readouterr().out)["verdict"] == "verified"
    assert main([folder, "--function", "sin(x), sin(x)", "--merge", *paths]) == REFUTED
    assert main([folder, "--merge", paths[0]]) == MALFORMED
    assert main([str(tmp_path / "nowhere"), "--shard", "1/2", "--out", paths[0]]) == MALFORMED
    assert read_result(Path(paths[0])).outcome == "verified"  # it was not written over
    capsys.readouterr()
    wrong = [
        ["--shard", "0/2"],
        ["--shard", "3/2"],
        ["--shard", "1"],
        ["--shard", "1/2/3"],
        ["--shard", "-1/2"],
        ["--shard", "1/200000"],
        ["--shard", "1/2", "--sampled"],
        ["--shard", "1/2", "--function", "sin(x), cos(x)"],
        ["--shard", "1/2", "--merge", paths[0]],
        ["--merge", paths[0], "--sampled"],
        ["--out", paths[0]],
        ["--shard", "1/2", "--out", str(tmp_path / "nowhere" / "1.json")],
        ["--shard", "1/2", "--out", str(tmp_path)],
    ]
    for arguments in wrong:
        with pytest.raises(SystemExit) as stop:
            main([folder, *arguments])
        assert stop.value.code == USAGE
    assert "usage" in capsys.readouterr().err


def test_a_result_that_cannot_be_written_is_printed(heads, capsys, monkeypatch, tmp_path):
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("partita_check.cli.write_result", full)
    assert main([str(heads("vector")), "--shard", "1/2", "--out", str(tmp_path / "1.json")]) == USAGE
    printed = capsys.readouterr()
    assert "No space left" in printed.err and '"seal"' in printed.out


def test_help_teaches_shards(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["--help"])
    text = capsys.readouterr().out
    assert stop.value.code == 0 and "--shard 2/3 --out 2.json" in text and "not signed" in text


# --- shards that a certificate lists -------------------------------------------------------------------------------------


LONG = {  # every proof that lists shards
    "taylor": ("sin(3*x) + x*cos(2*y)", [[-1, 1]] * 2, 1e-6, {}),
    "cells": ("sin(3*x)", [[-1, 1]], 1e-2, {"method": "affine"}),
    "boxes": ("tanh(40*x)", [[-1, 1]], 1e-2, {"method": "adaptive"}),
}


@pytest.fixture(scope="module")
def long(tmp_path_factory) -> Callable[[str], Path]:
    """name of a proof → a head whose certificate lists the shards of it, although it is short."""
    place, made = tmp_path_factory.mktemp("long"), dict[str, Path]()

    def get(name: str) -> Path:
        if name not in made:
            function, ends, tolerance, options = LONG[name]
            with pytest.MonkeyPatch.context() as patch:
                for proof in ("grid_proof", "cell_proof", "bisection"):
                    patch.setattr(f"partita.proofs.{proof}.SHARDED", 1)
                c = pa.compile(function, pa.Box.of(ends), tolerance=tolerance, **options)
            assert c.certificate.proof["method"] == name and len(c.certificate.proof["shards"]) == 16
            made[name] = c.save(place / name)
        return made[name]

    return get


@pytest.mark.parametrize("name", LONG)
def test_listed_bounds_of_shards_are_accepted(long, name):
    assert run(long(name), budget=60.0)[1] == VERIFIED


def largest(files: Files) -> int:
    values = list(map(float.fromhex, files.certificate["proof"]["shards"]))
    return values.index(max(values))


def lower_the_largest(files: Files) -> None:
    files.certificate["proof"]["shards"] = [(0.5 * files.bound).hex()] * 16


def raise_one(files: Files) -> None:
    files.certificate["proof"]["shards"][3] = (2 * files.bound).hex()


def no_shards(files: Files) -> None:
    files.certificate["proof"]["shards"] = []


def not_a_list(files: Files) -> None:
    files.certificate["proof"]["shards"] = files.certificate["proof"]["shards"][largest(files)]


def plain_numbers(files: Files) -> None:
    files.certificate["proof"]["shards"] = list(map(float.fromhex, files.certificate["proof"]["shards"]))


def negative_shard(files: Files) -> None:
    files.certificate["proof"]["shards"].append((-1.0).hex())


def nothing_for_a_list(files: Files) -> None:
    files.certificate["proof"]["shards"] = None


def too_many_shards(files: Files) -> None:
    files.certificate["proof"]["shards"] *= 1000


def lower_the_term(files: Files) -> None:
    next(t for t in files.certificate["terms"] if t["name"] == "approximation")["value"] = (0.0).hex()


def no_term(files: Files) -> None:
    files.certificate["terms"] = files.certificate["terms"][1:]


def two_terms(files: Files) -> None:
    files.certificate["terms"] *= 2


FORGED = [
    lower_the_largest,
    raise_one,
    no_shards,
    not_a_list,
    plain_numbers,
    negative_shard,
    nothing_for_a_list,
    too_many_shards,
    lower_the_term,
    no_term,
    two_terms,
]


@pytest.mark.parametrize("change", FORGED, ids=lambda c: c.__name__)
def test_a_forged_list_of_shards_is_malformed(long, monkeypatch, change, tmp_path):
    forged = forge(long("taylor"), tmp_path / "forged", change)
    report, code = run(forged, budget=30.0)
    assert code == MALFORMED and report["reason"]
    monkeypatch.setattr(reading, "_same_maximum", lambda *a: None)  # the control: the claim itself is true
    assert run(forged, budget=30.0)[1] == VERIFIED


def test_a_forged_list_in_a_part_of_a_network_is_malformed(networks, tmp_path):
    def list_shards(files: Files) -> None:
        files.certificate["proof"]["parts"][0]["certificate"]["proof"]["shards"] = [(1.0).hex()]

    report, code = run(forge(networks("layers"), tmp_path / "forged", list_shards), budget=30.0)
    assert code == MALFORMED and "largest bound of a shard" in report["reason"]
