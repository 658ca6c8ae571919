"""Gradient descent in context: true claims are verified, forged ones never are."""

from __future__ import annotations

import copy
import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flint import arb
from forging import Files, forge, put_together, take_apart
from partita_check import descent
from partita_check.cli import main, run
from partita_check.descent import Bounds, read_descent

import partita as pa

VERIFIED, REFUTED, UNKNOWN, MALFORMED = 0, 1, 2, 3
HUBER = "where(abs(r) - 1, abs(r) - 0.5, 0.5*r^2)"
X, Y, W, LABELS = pa.Box([-1, 0], [1, 2]), pa.Box([-1], [1]), pa.Box([-1, -1], [1, 2]), pa.Box([0], [1])
DESCENTS: dict[str, tuple[str, pa.Box, dict[str, Any]]] = {
    "squared": ("squared", Y, {}),
    "ridge": ("ridge", Y, {"ridge": 0.1, "initial": [0.25, -0.1]}),
    "ridge float32": ("ridge", Y, {"ridge": 0.1, "initial": [0.3, -0.1], "dtype": torch.float32}),
    "logistic": ("logistic", LABELS, {"ridge": 0.02}),
    "logistic float32": ("logistic", LABELS, {"ridge": 0.02, "dtype": torch.float32}),
    "residual": ("sqrt(1 + (s - y)^2)", Y, {"ridge": 0.01}),
    "residual float32": ("sqrt(1 + (s - y)^2)", Y, {"ridge": 0.01, "dtype": torch.float32}),
    "two variables": ("s^2/4 + cos(y)*sin(s/2)", Y, {}),
    "kinks": (HUBER, Y, {"ridge": 0.05, "table_tolerance": 0.1}),
}
LIMIT = 100  # examples


def build(name: str) -> pa.in_context.GradientDescent:
    loss, y, options = DESCENTS[name]
    return pa.in_context.gradient_descent(loss, 6, 0.3, x=X, y=y, w=W, prompt_length=LIMIT, **options)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """name → folder of the saved descent."""
    place = tmp_path_factory.mktemp("descents")

    def get(name: str) -> Path:
        folder = place / name.replace(" ", "-")
        return folder if folder.exists() else build(name).save(folder, examples=LIMIT)

    return get


@pytest.mark.parametrize("name", DESCENTS)
def test_true_claims_are_verified(saved, name):
    report, code = run(saved(name), budget=60.0)
    assert code == VERIFIED, report
    assert ("given" in str(report["verdict"])) == (name == "kinks")
    assert "ratio" in report["bracket"] and "at most 100 examples" in report["domain"][0]


def test_the_function_can_be_required(saved, capsys):
    assert main([str(saved("logistic")), "--function", "sigmoid(s) - y"]) == VERIFIED
    assert main([str(saved("logistic")), "--function", "sigmoid(s) + y"]) == REFUTED
    assert "another function" in capsys.readouterr().out
    assert main([str(saved("squared")), "--sampled", "5"]) == UNKNOWN  # a spot check proves nothing


def scaled(*names: str, by: float) -> Callable[[Files], None]:
    def change(files: Files) -> None:
        for name in names:
            entry = files.tensors[f"layer.{name}"]
            entry[2] = [by * value for value in entry[2]]

    return change


def moved(name: str, by: float, place: int = 0) -> Callable[[Files], None]:
    def change(files: Files) -> None:
        numbers = files.tensors[name][2]
        numbers[place] = float(np.float32(numbers[place] + by))

    return change


def says(key: str, new: Any) -> Callable[[Files], None]:
    """Another number in what the claim says of the exact descent."""

    def change(files: Files) -> None:
        old = files.certificate["function"][key]
        files.certificate["function"][key] = new.hex() if isinstance(old, str) else new

    return change


def wider(argument: int) -> Callable[[Files], None]:
    def change(files: Files) -> None:
        box = files.certificate["domain"]["arguments"][argument]
        box["hi"] = [(2 * float.fromhex(end)).hex() for end in box["hi"]]

    return change


def longer_and_said(files: Files) -> None:
    """The network takes ten times as many steps, and all files say so."""
    for place in (files.certificate["function"], files.certificate["model"], files.description["model"]):
        place["steps"] *= 10


def table_bound_halved(files: Files) -> None:
    """As if the producer had proved half the error of its table."""
    term = next(term for term in files.certificate["terms"] if term["name"] == "slope table")
    half = float.fromhex(term["value"]) / 2
    term["value"], files.bound = half.hex(), files.bound - half


def other_slope(files: Files) -> None:
    """The claim is about the slope s − y − y."""
    graph = files.certificate["function"]["graph"]
    y = next(k for k, node in enumerate(graph["nodes"]) if node["op"] == "input" and node["params"] == [1])
    graph["nodes"].append({"op": "sub", "args": [graph["outputs"][0], y], "params": []})
    graph["outputs"] = [len(graph["nodes"]) - 1]


def no_grid(files: Files) -> None:
    files.certificate["proof"]["table"]["rates"] = [(1e-9).hex()] * len(files.certificate["proof"]["table"]["rates"])


EPSILON = ("query", "query_offset", "signs")
FORGERIES: dict[str, tuple[str, Callable[[Files], None], set[int]]] = {
    "step size": ("squared", says("step_size", 0.31), {REFUTED}),
    "step size, slightly": ("ridge", says("step_size", 0.3 * (1 + 1e-6)), {REFUTED, UNKNOWN}),
    "step size of a table": ("residual", says("step_size", 0.31), {REFUTED}),
    "ridge": ("ridge", says("ridge", 0.11), {REFUTED}),
    "start": ("squared", says("initial", [(1e-3).hex(), (0.0).hex()]), {REFUTED}),
    "steps of the exact descent": ("squared", says("steps", 7), {MALFORMED}),
    "ten times the steps": ("squared", longer_and_said, {UNKNOWN}),
    "examples": ("squared", says("examples", 10**6), {UNKNOWN}),
    "epsilon": ("squared", scaled("query", "query_offset", by=1.01), {REFUTED}),
    "epsilon of a table": ("logistic", scaled(*EPSILON, by=1.01), {REFUTED}),
    "epsilon 64 times, read too": (
        "logistic",
        lambda files: (scaled(*EPSILON, by=64.0)(files), scaled("read", by=1 / 64)(files)),
        {REFUTED, UNKNOWN},
    ),
    "one sign": ("logistic", moved("layer.signs", 1e-3), {MALFORMED}),
    "read": ("ridge", scaled("read", by=1.001), {REFUTED}),
    "shrink": ("ridge", scaled("shrink", by=1.001), {REFUTED}),
    "mirror": ("squared", moved("layer.mirror", 0.5), {MALFORMED}),
    "stored start": ("squared", moved("initial", 0.01), {REFUTED}),
    "a value of the table": ("residual", moved("layer.table", 0.01, 4), {REFUTED, UNKNOWN}),
    "a value of the table, slightly": ("residual", moved("layer.table", 1e-5, 4), {REFUTED, UNKNOWN}),
    "an offset of the table": ("residual", moved("layer.key_offsets", 0.01, 4), {REFUTED, UNKNOWN}),
    "a key of the table": ("logistic", moved("layer.key_slopes", 0.01, 1), {REFUTED, UNKNOWN}),
    "a key reads more than s - y": ("residual", moved("layer.key_labels", 0.01, -5), {REFUTED, UNKNOWN}),
    "what the table leaves to y": ("logistic", moved("layer.direct", 0.01, 2), {REFUTED}),
    "table bound": ("residual", table_bound_halved, {UNKNOWN}),
    "table bound, two variables": ("two variables", table_bound_halved, {UNKNOWN}),
    "another grid": ("residual", no_grid, {UNKNOWN, MALFORMED}),
    "slope of another loss": ("squared", other_slope, {REFUTED, UNKNOWN}),
    "slope of another loss, table": ("logistic", other_slope, {REFUTED, UNKNOWN}),
    "box of x": ("squared", wider(0), {UNKNOWN, REFUTED}),
    "box of y": ("residual", wider(1), {UNKNOWN, REFUTED}),
    "box of w": ("squared", wider(2), {UNKNOWN, REFUTED}),
}


@pytest.mark.parametrize("name", FORGERIES)
def test_forged_claims_are_never_verified(saved, tmp_path, name):
    source, change, expected = FORGERIES[name]
    report, code = run(forge(saved(source), tmp_path / "forged", change), budget=20.0)
    assert code in expected, report


@pytest.mark.parametrize("name", [name for name in FORGERIES if MALFORMED not in FORGERIES[name][2]])
def test_the_proof_alone_verifies_no_forged_claim(saved, tmp_path, monkeypatch, name):
    """Without the attack, which refutes most of them first."""
    monkeypatch.setattr(descent, "PROMPTS", 0)
    source, change, _ = FORGERIES[name]
    report, code = run(forge(saved(source), tmp_path / "forged", change), budget=20.0)
    assert code == UNKNOWN, report


@pytest.mark.parametrize("name", ["squared", "logistic", "residual", "ridge float32"])
def test_bounds_below_the_error_seen_are_refuted(saved, tmp_path, name):
    stored = read_descent(saved(name))
    seen = descent.check_descent(stored, sampled=64).seen
    assert 0 < seen < stored.bound

    def lower(files: Files) -> None:
        files.bound = seen / 2

    report, code = run(forge(saved(name), tmp_path / "forged", lower), budget=20.0)
    assert code == REFUTED and report["worst point"], report


def test_a_slope_that_may_jump_rests_on_a_listed_assumption(saved, tmp_path):
    def proved(files: Files) -> None:
        files.certificate["kind"] = "proved"

    def unlisted(files: Files) -> None:
        files.certificate["assumptions"] = files.certificate["assumptions"][1:]

    for change in (proved, unlisted):
        report, code = run(forge(saved("kinks"), tmp_path / change.__name__, change))
        assert code == MALFORMED and "continuously differentiable" in report["reason"]


def test_a_changed_file_does_not_match_its_hash(saved, tmp_path):
    folder = forge(saved("squared"), tmp_path / "changed", lambda files: None)
    assert run(folder)[1] == VERIFIED
    data = bytearray((folder / "descent.safetensors").read_bytes())
    data[-1] ^= 1
    (folder / "descent.safetensors").write_bytes(data)
    assert run(folder)[1] == MALFORMED


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize(("loss", "y"), [("squared", Y), ("logistic", LABELS)])
def test_running_networks_stay_within_what_the_checker_proves(tmp_path, dtype, loss, y):
    """The checker's own bounds are smaller than the producer's: they must hold too, rounding included."""
    options = {"x": X, "y": y, "w": pa.Box([-4, -4], [4, 4]), "dtype": dtype, "prompt_length": 50}
    gd = pa.in_context.gradient_descent(loss, 8, 0.2, **options)
    found = Bounds(read_descent(gd.save(tmp_path / "descent", examples=50)))
    bound, source = float(found.after_all_steps(arb(0)).upper()), np.random.default_rng(0)
    assert bound < 0.8 * gd.error_bound_for(50)
    worst = 0.0
    for examples in (1, 2, 10, 50):
        x = source.choice([0.0, 1.0], size=(30, examples, 2)) * [2, 2] - [1, 0]
        labels = source.choice([y.lo[0], y.hi[0]], size=(30, examples, 1))
        prompts = torch.tensor(np.concatenate([x, labels], axis=2)).to(dtype)
        drift = gd.trajectory(prompts)[:, -1].double().numpy() - gd.exact(prompts)[:, -1]
        worst = max(worst, float(np.linalg.norm(drift, axis=1).max()))
    assert 0 < worst <= bound


@pytest.mark.parametrize("name", ["ridge float32", "logistic float32", "residual float32"])
def test_rounding_terms_cover_what_float32_does_to_one_layer(saved, name):
    """The layer in float32 against its own tensors in float64, on random prompts."""
    gd, stored = build(name), read_descent(saved(name))
    found, real = Bounds(stored), Bounds(stored._replace(claim=stored.claim._replace(semantics="real")))
    allowed = float((found.step_error(arb(0)) - real.step_error(arb(0))).lower())
    source, exact = np.random.default_rng(1), copy.deepcopy(gd.layer).double()
    ends = np.array([*stored.x, stored.y]).T
    prompts = torch.tensor(source.uniform(*ends, size=(500, LIMIT, 3)).clip(*ends)).float()
    w = torch.tensor(source.uniform(*np.array(stored.w).T, size=(500, 1, 2))).float()
    here, there = (
        (layer, w.to(kind), prompts.to(kind)) for layer, kind in ((gd.layer, w.dtype), (exact, torch.float64))
    )
    steps = [layer(w, z, layer.mirrored(z)).double() for layer, w, z in (here, there)]
    assert 0 < float((steps[0] - steps[1]).norm(dim=2).max()) <= allowed
    if stored.layer.values:
        slopes = [layer.slopes(w, z).double() for layer, w, z in (here, there)]
        assert 0 < float((slopes[0] - slopes[1]).abs().max()) <= float(found.slope_rounding.lower())


def test_the_error_of_the_table_is_carried_by_the_step(saved):
    """If r̃ − r is t at every example, the step moves by ηt·mean x."""
    found = Bounds(read_descent(saved("logistic")))
    moved_by = float((found.step_error(arb(1e-3)) - found.step_error(arb(0))).lower())
    assert moved_by >= 0.3 * 1e-3 * math.sqrt(5) * (1 - 1e-9)


def test_one_example_attains_the_difference_of_a_softmax_step(tmp_path):
    """n = 1: the gradient is tanh(εr)/ε instead of r. In exact arithmetic the bound of one step is that, to the last digits."""
    box = pa.Box([-1], [1])
    gd = pa.in_context.gradient_descent("squared", 1, 1.0, x=box, y=box, w=box, epsilon=0.3, initial=[-1.0])
    stored = read_descent(gd.save(tmp_path / "descent", examples=1))
    exact = stored._replace(claim=stored.claim._replace(semantics="real"))
    step = float(Bounds(exact).step_error(arb(0)).upper())
    attained = 2 - math.tanh(0.6) / 0.3  # x = 1, y = 1, w = -1
    assert attained <= step <= attained * (1 + 2e-3)
    assert float(Bounds(exact).drift([([arb(1)], arb(1))]).mid()) == pytest.approx(attained)


def test_nothing_in_a_descent_makes_the_checker_crash(saved, tmp_path):
    """Numbers, words and lists anywhere in the files are replaced; the report is always one of the four."""
    source, original = random.Random(3), take_apart(saved("logistic"))
    for round_ in range(60):
        files = copy.deepcopy(original)
        place: Any = source.choice([files.certificate, files.description])
        while True:
            key = source.choice(list(place) if isinstance(place, dict) else range(len(place)))
            if not (isinstance(place[key], (dict, list)) and place[key]) or source.random() < 0.2:
                break
            place = place[key]
        place[key] = source.choice([None, -1, 0, 10**15, "x", "0x0.0p+0", [], {}, [1], (-1.0).hex(), (1e300).hex()])
        if not (isinstance(files.certificate.get("model"), dict) and isinstance(files.certificate["function"], dict)):
            continue  # the hashes that a forger repairs are in there
        assert run(put_together(files, tmp_path / str(round_)), budget=10.0)[1] in (
            VERIFIED,
            REFUTED,
            UNKNOWN,
            MALFORMED,
        )
