"""Networks of heads: true claims, planted errors, hostile files, and the arithmetic under them."""

from __future__ import annotations

import copy
import json
import math
import random
import struct
import time

import pytest
from flint import arb, fmpq
from forging import Files, forge, take_apart
from partita_check import forms, network, propagation
from partita_check.cli import main, run
from partita_check.forms import Atoms, forms_of, same_function
from partita_check.graph import Malformed, parse
from partita_check.intervals import gradient, is_known, values_over
from partita_check.propagation import Part, Propagation, Ranges
from partita_check.ranges import above, below, largest_slope, span
from partita_check.reading import read_folder
from partita_check.verdict import Verdict
from partita_check.wiring import Row, Use, Wiring, read_wiring
from saved_networks import NETWORKS, Wired, of

VERIFIED, REFUTED, UNKNOWN, MALFORMED = 0, 1, 2, 3
LONG = {"circuit", "hundred"}
TRUE = [pytest.param(n, marks=[pytest.mark.slow] * (n in LONG)) for n in NETWORKS if n != "estimate"]


@pytest.mark.parametrize("name", TRUE)
def test_true_claims_are_verified(networks, name):
    report, code = run(networks(name), budget=120.0)
    assert code == VERIFIED and report["verdict"] == "verified", report
    stored = read_folder(networks(name))
    assert len(report.get("parts", [])) == len(stored.heads) and all(
        "verified" in line for line in report.get("parts", [])
    )
    assert report["propagation"][0].startswith("output")
    assert "network" in report["keys"] and "≤ largest error ≤" in report["bracket"]


def test_an_estimate_is_never_verified(networks):
    report, code = run(networks("estimate"))
    assert code == UNKNOWN and "estimate" in report["reason"] and "network" in report["keys"]


# ---- planted errors: an attacker changes one thing and recomputes every hash


def part(files: Files, i: int) -> dict:
    return files.certificate["proof"]["parts"][i]


def lower_part_bound(files):
    own = part(files, 0)["certificate"]
    own["error_bound"] = (0.5 * float.fromhex(own["error_bound"])).hex()


def lower_bound(files):
    files.bound = 0.999 * files.bound


def lower_rounding(files):
    files.bound = 0.9 * files.bound


def below_the_truth(files):
    files.bound = 0.3 * files.bound


def change_weight(files):
    """The output's: the network is another function now."""
    files.tensors["head.output.weight"][2][0] *= 1 + 1e-6


def change_read(files):
    files.tensors["head.layers.1.0.weight"][2][0] *= 1 + 1e-3


def change_fraction(files):
    """The exact coefficient, not the stored one: f is no longer what the wiring says."""
    files.description["head"]["layers"][1][0]["reads"]["exact"][0][2] = "2/7"


def drop_fraction(files):
    del files.description["head"]["layers"][1][0]["reads"]["exact"]


def swap_reads(files):
    rows = files.description["head"]["layers"][1][0]["reads"]["rows"]
    rows[0], rows[1] = rows[1], rows[0]


def read_another_channel(files):
    files.description["head"]["layers"][0][0]["reads"]["rows"][0][0] = [1]


def shrink_box(files):
    for box in (part(files, 1)["box"], part(files, 1)["certificate"]["domain"]["arguments"][0]):
        box["hi"][0] = (0.4).hex()


def shrink_box_in_one_place(files):
    part(files, 1)["box"]["hi"][0] = (0.4).hex()


def other_part_function(files):
    for graph in (part(files, 0)["graph"], part(files, 0)["certificate"]["function"]["graph"]):
        node = next(n for n in graph["nodes"] if n["op"] == "sin")
        node["op"] = "tanh"


def other_function(files):
    for graph in files.graphs:
        node = next(n for n in graph["nodes"] if n["op"] == "sin")
        node["op"] = "tanh"


def part_function_in_one_place(files):
    node = next(n for n in part(files, 0)["graph"]["nodes"] if n["op"] == "sin")
    node["op"] = "tanh"


def drop_output_term(files):
    files.description["head"]["output"]["rows"][0][0].pop()


def read_forward(files):
    """A head of the first layer reads the channel that it writes."""
    reads = files.description["head"]["layers"][0][0]["reads"]
    reads["width"] += 1
    reads["rows"][0][0] = [reads["width"] - 1]


def swap_layers(files):
    files.description["head"]["layers"].reverse()
    t = files.tensors
    for name in [n for n in t if n.startswith("head.layers.1.")]:
        t[name.replace("layers.1", "layers.0")] = t.pop(name)


def change_values(files):
    values = files.tensors["head.heads.0.values"][2]
    values[len(values) // 2] += 1e-3


def exchange_heads(files):
    for layer in files.description["head"]["layers"]:
        layer[0]["head"] = 1 - layer[0]["head"]


def drop_part(files):
    files.certificate["proof"]["parts"].pop()


def estimated_part(files):
    own = part(files, 0)["certificate"]
    own |= {"kind": "estimated", "error_estimate": own["error_bound"], "error_bound": None}


def part_in_the_mean(files):
    part(files, 0)["certificate"]["norm"] = "2.0"


def part_in_exact_arithmetic(files):
    part(files, 0)["certificate"]["semantics"] = "real"


def assumed_part(files):
    part(files, 0)["certificate"]["kind"] = "proved_given"


def enlarge(files):
    for box in files.boxes:
        box["hi"][0] = (1.5).hex()


def claim_float64(files):
    """A float32 network said to be run in float64, with a smaller bound: its weights are still rounded to float32."""
    for tensor in files.tensors.values():
        tensor[0] = "F64"
    for record in (files.description["head"], *files.description["head"]["heads"]):
        record["dtype"] = "float64"
    for certificate in (files.certificate, *(p["certificate"] for p in files.certificate["proof"]["parts"])):
        certificate["semantics"] = "float64"
    files.bound = 0.3 * files.bound


def narrow(files):
    """A float64 network said to be run in float32: its bound has no room for that."""
    for tensor in files.tensors.values():
        tensor[0] = "F32"
    for record in (files.description["head"], *files.description["head"]["heads"]):
        record["dtype"] = "float32"
    for certificate in (files.certificate, *(p["certificate"] for p in files.certificate["proof"]["parts"])):
        certificate["semantics"] = "float32"


def forget_the_function(files):
    """The wiring as its own function, with a graph in the other file."""
    files.certificate["function"] = {"type": "network", "text": files.certificate["function"]["text"], "sha256": ""}


def unknown_tensor(files):
    files.tensors["head.layers.7.0.weight"] = ["F64", [1], [1.0]]


def too_many_weights(files):
    files.tensors["head.output.weight"] = ["F64", [2], [2.0, 2.0]]


def no_such_head(files):
    files.description["head"]["layers"][0][0]["head"] = 9


def empty_layer(files):
    files.description["head"]["layers"].append([])


def read_twice(files):
    files.description["head"]["output"]["rows"][0][0] *= 2


def scale_the_function(files):
    """A network that is its own function: then its output weights are the function's, and the network is still right."""
    files.tensors["head.output.weight"][2][0] *= 0.5


PLANTED = {
    "sum": [
        lower_part_bound,
        lower_bound,
        below_the_truth,
        read_another_channel,
        other_part_function,
        other_function,
        part_function_in_one_place,
        drop_output_term,
        read_forward,
        change_values,
        drop_part,
        estimated_part,
        part_in_the_mean,
        part_in_exact_arithmetic,
        assumed_part,
        enlarge,
        narrow,
        forget_the_function,
        unknown_tensor,
        too_many_weights,
        no_such_head,
        empty_layer,
        read_twice,
    ],
    "layers": [
        lower_part_bound,
        lower_bound,
        change_weight,
        change_read,
        change_fraction,
        drop_fraction,
        shrink_box,
        shrink_box_in_one_place,
        swap_layers,
        exchange_heads,
        enlarge,
    ],
    "layers float32": [lower_bound, change_read, claim_float64],
    "product": [swap_reads, lower_bound, change_values],
    "entangled": [lower_bound, lower_part_bound],
    "neurons": [lower_bound, change_values, below_the_truth, lower_part_bound],
    "affine": [lower_rounding, below_the_truth],
}
CASES = [(name, change) for name, changes in PLANTED.items() for change in changes]


@pytest.mark.parametrize("name, change", CASES, ids=[f"{n}: {c.__name__}" for n, c in CASES])
def test_planted_errors_are_found(networks, name, change, tmp_path):
    report, code = run(forge(networks(name), tmp_path / "forged", change), budget=4.0)
    assert code in (REFUTED, UNKNOWN, MALFORMED), report


def test_the_verdict_says_what_is_wrong(networks, tmp_path):
    """Which outcome, and which reason, of the errors above."""
    expected = [
        ("sum", lower_part_bound, REFUTED, "part 0"),
        ("sum", below_the_truth, REFUTED, "the error at this point"),
        ("sum", lower_bound, UNKNOWN, "add up to"),
        ("layers", change_fraction, UNKNOWN, "was not shown to be"),
        ("layers", shrink_box, UNKNOWN, "and its part's claim is about [-0.5, 0.4]"),
        ("sum", read_forward, MALFORMED, "a later layer's, or none"),
        ("sum", drop_part, MALFORMED, "does not list every head"),
    ]
    for k, (name, change, outcome, reason) in enumerate(expected):
        report, code = run(forge(networks(name), tmp_path / str(k), change), budget=10.0)
        assert code == outcome and reason in report["reason"], report


def test_true_changes_are_accepted(networks, tmp_path):
    """The control: whoever changes nothing that matters is believed."""

    def harmless(files: Files) -> None:
        files.certificate["witness"], files.certificate["terms"], files.bound = None, [], 1.01 * files.bound
        files.certificate["proof"] = {"parts": files.certificate["proof"]["parts"], "cuts": "nonsense"}

    def cut(files: Files) -> None:
        files.certificate["proof"]["cuts"] = [[(0.25).hex()], [(-0.5).hex(), (0.5).hex()]]

    for k, (name, change) in enumerate((("layers", harmless), ("layers", cut), ("neurons", scale_the_function))):
        assert run(forge(networks(name), tmp_path / str(k), change), budget=30.0)[1] == VERIFIED


def test_cuts_of_the_domain_are_used(networks, tmp_path):
    """One exponential is steep where the other is flat: a bound that needs that is met on small boxes only."""

    def lower(files: Files) -> None:
        files.certificate["witness"] = None
        files.bound = 0.9 * files.bound

    def cut(files: Files) -> None:
        lower(files)
        files.certificate["proof"]["cuts"] = [
            [(k / 8).hex() for k in range(-7, 8)],
            [(k / 8).hex() for k in range(-7, 8)],
        ]

    assert run(forge(networks("far"), tmp_path / "a", lower), budget=10.0)[1] == UNKNOWN
    assert run(forge(networks("far"), tmp_path / "b", cut), budget=20.0)[1] == VERIFIED


@pytest.mark.parametrize(
    "name, change, bug",
    [
        ("sum", lower_part_bound, "parts"),
        ("sum", other_function, "forms"),
        ("layers", shrink_box, "boxes"),
        ("layers", lower_bound, "slopes"),
        ("affine", lower_rounding, "rounding"),
        ("entangled", lower_bound, "slopes"),
    ],
)
def test_a_checker_with_a_bug_would_believe_the_lie(networks, monkeypatch, tmp_path, name, change, bug):
    """Negative control of the tests above: they fail if the checker forgets one of its steps."""
    folder = forge(networks(name), tmp_path / "forged", change)
    assert run(folder, budget=10.0)[1] != VERIFIED
    if bug == "parts":
        monkeypatch.setattr(network, "check", lambda part, shard: Verdict("verified"))
    elif bug == "forms":
        monkeypatch.setattr(network, "same_function", lambda *a: "")
    elif bug == "boxes":
        whole = Part._make
        monkeypatch.setattr(network, "Part", lambda g, ends, e: whole((g, ((-9.0, 9.0),) * len(ends), e)))
    elif bug == "slopes":
        monkeypatch.setattr(propagation, "largest_slope", lambda *a: arb(0.1))
    else:
        monkeypatch.setattr(propagation, "UNIT", {"float64": arb(0)})
    monkeypatch.setattr(network, "_attack", lambda *a: None)
    assert run(folder, budget=10.0)[1] == VERIFIED


def edit(value, source: random.Random):
    """One random change somewhere inside a JSON value."""
    if isinstance(value, dict) and value:
        key = source.choice(sorted(value))
        if source.random() < 0.1:
            return {k: v for k, v in value.items() if k != key}
        return {**value, key: edit(value[key], source)}
    if isinstance(value, list) and value:
        place = source.randrange(len(value))
        if source.random() < 0.1:
            return value[:place] + value[place + 1 :]
        return [edit(v, source) if k == place else v for k, v in enumerate(value)]
    return source.choice([None, True, -1, 0, 1, 3, 1e300, "", "1/3", (2.0).hex(), [], {}, [[]], {"a": 1}, 10**18])


@pytest.mark.parametrize(("count", "budget"), [(60, 0.5), pytest.param(600, 1.0, marks=pytest.mark.slow)])
def test_edited_and_resealed_networks_never_break_the_checker(networks, count, budget, tmp_path):
    source, rejected = random.Random(11), 0
    for k in range(count):
        name = source.choice(["sum", "layers", "product", "neurons"])
        files = take_apart(networks(name))
        before = copy.deepcopy(files)
        where = source.choice(["record", "record", "proof", "description", "certificate", "tensors"])
        if where == "record":
            files.description["head"] = edit(files.description["head"], source)
        elif where == "proof":
            files.certificate["proof"] = edit(files.certificate["proof"], source)
        else:
            setattr(files, where, edit(getattr(files, where), source))
        try:
            folder = forge(networks(name), tmp_path / str(k), lambda out, new=files: vars(out).update(vars(new)))
        except Exception:  # not even the attacker can write this
            continue
        report, code = run(folder, budget=budget)
        assert code in (VERIFIED, REFUTED, UNKNOWN, MALFORMED)
        rejected += code != VERIFIED
        if code == VERIFIED and name != "neurons":  # then the change was harmless, or f changed with it
            same = [(f.description["target"]["graph"], f.description["domains"]) for f in (files, before)]
            assert same[0] == same[1] and files.bound >= 0.99 * before.bound, report
    assert rejected > count / 2


def wired(rows, uses=(), inputs=2):
    return Wiring(inputs, 1, tuple(uses), tuple(rows))


def row(weights, bias=0.0, exact=None):
    exact = {k: fmpq(*x) for k, x in (exact or {}).items()}
    products = sum(abs(w) != 1 for w in weights.values())
    return Row(tuple(weights), tuple(map(arb, weights.values())), arb(bias), exact, products)


def test_hostile_wirings_are_malformed():
    good = {"start": 0, "width": 2, "rows": [[[0], [1], True]], "exact": [[0, 1, "1/3"]]}

    class Numbers:
        def __init__(self, *numbers):
            self.numbers, self.shape = list(numbers), (len(numbers),)

    def read(output, layers=(), tensors=None, outputs=1):
        held = {"output.weight": Numbers(0.3), "output.bias": Numbers(1.0)} if tensors is None else tensors
        return read_wiring({"layers": list(layers), "output": output}, held, 2, [1], outputs)

    group = {"head": 0, "reads": {"start": 0, "width": 2, "rows": [[[1], [], False]]}}
    found = read(good, [[group]])
    assert found.output[0].exact == {1: fmpq(1, 3)} and found.uses[0].rows[0].plain
    assert [len(found.uses), found.layers, found.output[0].roundings] == [1, 1, 3]
    bad = [
        {**good, "start": -1},
        {**good, "width": 4},
        {**good, "width": 0},
        {**good, "width": True},
        {**good, "rows": []},
        {**good, "rows": [[[0], [0], True]]},
        {**good, "rows": [[[1, 0], [], True]]},
        {**good, "rows": [[[0], [5], True]]},
        {**good, "rows": [[[0], [1], 1]]},
        {**good, "rows": [[[0], [1], True]] * 2},
        {**good, "rows": 10**9, "dense": True},
        {**good, "rows": 1, "dense": False},
        {**good, "exact": [[0, 2, "1/3"]]},
        {**good, "exact": [[1, 0, "1/3"]]},
        {**good, "exact": [[0, 1, "2/6"]]},
        {**good, "exact": [[0, 1, "1/0"]]},
        {**good, "exact": [[0, 1, "1/-3"]]},
        {**good, "exact": [[0, 1, "0.3"]]},
        {**good, "exact": [[0, 1, "9" * 5000 + "/7"]]},
        {**good, "exact": [[0, 1, "1/3"], [0, 1, "1/3"]]},
        {**good, "more": 1},
    ]
    for output in bad:
        with pytest.raises(Malformed):
            read(output, [[group]])
    for layers in (
        [],
        [[]],
        [[{**group, "head": 1}]],
        [[{**group, "head": -1}]],
        [[{"head": 0}]],
        [5],
        [[group], [{}]],
    ):
        with pytest.raises(Malformed):
            read(good, layers)
    with pytest.raises(Malformed, match="unknown tensors"):
        read(good, [[group]], {"output.weight": Numbers(0.3), "output.bias": Numbers(1.0), "what": Numbers(1.0)})


def test_a_large_wiring_keeps_to_its_budget(networks, tmp_path):
    """A head that is used forty thousand times: the time that is given is what is taken."""

    def many(files: Files) -> None:
        record = files.description["head"]
        record["layers"][0][0]["reads"] |= {"rows": [[[k % 3], [], False] for k in range(40_000)]}
        record["output"] |= {"width": 40_003, "rows": [[list(range(3, 40_003)), [], False]]}

    folder, start = forge(networks("sum"), tmp_path / "forged", many), time.monotonic()
    assert run(folder, budget=2.0)[1] in (REFUTED, UNKNOWN)
    assert time.monotonic() - start < 30


# ---- canonical forms

SAME = [
    ("2*x0*(3*x1)", "6*(x1*x0)"),
    ("x0/x1", "x0*(1/x1)"),
    ("(x0*x1)*(x2*x3)", "x3*(x2*(x1*x0))"),
    ("max(x0, max(x1, x2))", "max(max(x2, x0), x1)"),
    ("x0^2", "x0*x0"),
    ("sqrt(x0)^2 + 1", "1 + x0"),
    ("1/(2*x0)", "0.5/x0"),
    ("(2*x0 + 2*x1)*x2", "2*(x2*(x1 + x0))"),
    ("1/(1/x0)", "x0"),
    ("sin(2*x0 + x1 - x1)", "sin(x0 + x0)"),
    ("x0/(x1*x2)", "(x0/x1)/x2"),
    ("(x0 - x1)*(x1 - x0)", "-(x0 - x1)^2"),
    ("sqrt(x0)*sqrt(x0)*x1/sqrt(x2)/sqrt(x2)", "x0*x1/x2"),
    ("(2*x0)^3", "8*x0^3"),
    ("min(x0, x0)", "x0"),
    ("x0 - x0", "0*x1"),
]
DIFFERENT = [
    ("x0/x0", "1 + 0*x0"),
    ("x0 + x1", "x0 + 2*x1"),
    ("max(x0, x1)", "min(x0, x1)"),
    ("max(x0, x1)", "max(x0, x2)"),
    ("sin(x0)", "sin(-x0)"),
    ("x0*x1", "x0*x2"),
    ("x0^3", "x0^2"),
    ("sqrt(x0)", "x0"),
    ("exp(x0)", "exp(x0 + 1e-300)"),
    ("1/x0", "x0"),
    ("x0/x1", "x1/x0"),
    ("clamp(x0, 0, 1)", "clamp(x0, 0, 2)"),
    ("where(x0, x1, x2)", "where(x0, x2, x1)"),
]


def form(text, atoms):
    return forms_of(parse(text, ["x0", "x1", "x2", "x3"]), [atoms.atom("input", i) for i in range(4)], atoms)[0]


@pytest.mark.parametrize("a, b", SAME)
def test_equal_forms(a, b):
    atoms = Atoms()
    assert form(a, atoms) == form(b, atoms)
    source = random.Random(1)
    for _ in range(20):  # what is called equal is equal
        point = [arb(source.uniform(0.1, 2)) for _ in range(4)]
        left, right = (parse(t, ["x0", "x1", "x2", "x3"]).evaluate(point)[0] for t in (a, b))
        assert left.overlaps(right)


@pytest.mark.parametrize("a, b", DIFFERENT)
def test_different_forms(a, b):
    atoms = Atoms()
    assert form(a, atoms) != form(b, atoms)


def test_forms_do_not_mix_up_what_they_share():
    """A sum that is extended in place must be nobody else's."""
    atoms = Atoms()
    assert form("(x0 + x1 + x2)*(x0 + x1)", atoms) == form("(x0 + x1)*(x2 + x1 + x0)", atoms)
    assert form("sin(x0 + x1) + (x0 + x1 + 1) + (x0 + x1)", atoms) == form("2*(x1 + x0) + 1 + sin(x1 + x0)", atoms)
    wanted = form("(x0 + x1)*(x0 + x1 + x2)", atoms)
    for text in ("(1*(x0 + x1))*((x0 + x1) + x2)", "sqrt(x0 + x1)*((x0 + x1) + x2)*sqrt(x0 + x1)"):
        assert form(text, atoms) == wanted
    assert form("(x0 + x1) - 1*(x0 + x1)", atoms) == {} and form("x2 + ((x0 + x1) - (x0 + x1)/1)", atoms) == form(
        "x2", atoms
    )


def test_long_and_hostile_forms():
    text = " + ".join(f"{k}*sin({k}*x0)" for k in range(1, 800))
    assert len(form(text, Atoms())) == 799
    with pytest.raises(forms.Unfit):
        form("((((2.5^64)^64)^64)^64)*x0", Atoms())
    with pytest.raises(forms.Unfit):
        form("x0/(1 - 1)", Atoms())


def test_a_function_must_be_defined_where_the_wiring_is():
    """log(x0) − log(x0) has the form 0, and no value at −1."""
    nothing = wired([row({0: 1.0})])
    for text, found in (("x0 + log(x1) - log(x1)", "undefined"), ("x0 + 0*(1/x1)", "undefined"), ("x0", "")):
        assert same_function(parse(text, ["x0", "x1"]), nothing, []) == found
    assert "was not shown" in same_function(parse("x1", ["x0", "x1"]), nothing, [])


def test_powers_of_roots_keep_their_fractions():
    """The sign of x0 − 1 is not known, that of its root is: exp(q log √a) is a^(q/2), and no other power."""
    parts = [parse(text, ["x0"]) for text in ("sqrt(x0)", "log(x0)", "exp(x0)")]
    for q, same in ((1.5, None), (2.5, None), (2.0, "x0 - 1"), (3.0, "(x0 - 1)*sqrt(x0 - 1)")):
        uses = [Use(0, 1, (row({0: 1.0}, -1.0),)), Use(1, 2, (row({1: 1.0}),)), Use(2, 3, (row({2: q}),))]
        wiring = wired([row({3: 1.0})], uses, inputs=1)
        for text in ("sqrt(x0 - 1)", "x0 - 1", "(x0 - 1)*sqrt(x0 - 1)"):
            assert (same_function(parse(text, ["x0"]), wiring, parts, [0]) == "") == (text == same)


def test_what_is_learned_late_counts_below_the_line():
    """w = 1/v − ½ is divided by before its logarithm shows that it is positive: log(1/w) is −log(w) nevertheless."""
    parts = [parse("1/x0", ["x0"]), parse("log(x0)", ["x0"])]
    v, w = row({0: 1.0}, -0.5), row({1: 1.0}, -0.5)
    uses = [Use(0, 1, (v,)), Use(0, 2, (w,)), Use(1, 3, (v,)), Use(1, 4, (w,)), Use(1, 5, (row({2: 1.0}),))]
    wiring = wired([row({5: 1.0, 0: 1.0})], uses, inputs=1)
    for text, same in (("x0", False), ("x0 + log(x0 - 0.5)", False), ("x0 - log(1/(x0 - 0.5) - 0.5)", True)):
        assert (same_function(parse(text, ["x0"]), wiring, parts, [0]) == "") == same, text


@pytest.mark.parametrize("low", [-1.0, 0.25])
def test_the_square_of_a_root_is_not_what_is_under_it_where_it_counts_as_0(low, tmp_path):
    """The network is relu(x0), which is x0 only where that is positive; its parts are called √x0 and x0²."""
    parts = [("sqrt(relu(x0))", [[low, 1.0]], 1e-2), ("x0^2", [[-0.1, 1.1]], 1e-2)]
    honest = Wired("relu(x0)", [[low, 1.0]], parts, [[(0, [of(0)])], [(1, [of(1)])]], [of(2)]).compiled()
    x = {"op": "input", "args": [], "params": [0]}

    def rename(files: Files) -> None:
        for graph in (part(files, 0)["graph"], part(files, 0)["certificate"]["function"]["graph"]):
            graph |= {"nodes": [x, {"op": "sqrt", "args": [0], "params": []}], "outputs": [1]}
        for graph in files.graphs:
            graph |= {"nodes": [x], "outputs": [0]}

    stored = read_folder(forge(honest.save(tmp_path / "honest"), tmp_path / "forged", rename))
    assert stored.graph.infix(["x0"]) == "x0" and stored.parts[0].function.infix(["x0"]) == "sqrt(x0)"
    assert (network.other_function(stored, stored.graph) == "") == (low > 0)


@pytest.mark.parametrize("text", ["exp(0.5*log(x0))", "x0*log(x0)"])
def test_nothing_is_learned_from_logarithms_that_may_be_undefined(text):
    """A limit at 0 hides that x0 is negative somewhere: x0 is no root of its square there."""
    parts = [parse(t, ["x0"]) for t in (text, "x0^2", "sqrt(x0)")]
    uses = [Use(0, 1, (row({0: 1.0}),)), Use(1, 1, (row({0: 1.0}),)), Use(2, 2, (row({2: 1.0}),))]
    wiring, x = wired([row({3: 1.0})], uses, inputs=1), parse("x0", ["x0"])
    assert same_function(x, wiring, parts) == "" and "not shown" in same_function(x, wiring, parts, [], [0])


# ---- intervals, ranges and slopes

FUNCTIONS = [
    "sin(3*x0) + cos(x1)",
    "tan(x0/2)*x1",
    "exp(-x0^2)*x1",
    "log(2 + x0)/(3 + x1)",
    "sqrt(1.5 + x0*x1)",
    "atan(2*x0) - tanh(x1) + sigmoid(3*x0)",
    "erf(x0)*x1^3",
    "abs(x0)*relu(x1) + max(x0, x1) - min(x0, 2*x1)",
    "clamp(x0 + x1, -0.5, 0.7)",
    "asinh(x0) + atanh(x1/2) + acosh(3 + x0)",
    "where(x0 - x1, x0, x1^2)",
    "floor(2*x0) + x1",
    "x0^-2 + x1^4",
    "sin(x0)/x0 + x1",
    "x0^0.5*x1",
    "x0*log(abs(x0)) + x1",
    "(x0 - x1)^2 - x0*x1",
]


@pytest.mark.parametrize("text", FUNCTIONS)
def test_intervals_hold_values_and_differences(text):
    graph, source, finite = parse(text, ["x0", "x1"]), random.Random(3), 0
    for _ in range(60):
        corners = [sorted(source.uniform(-1.4, 1.4) for _ in range(2)) for _ in range(2)]
        scale = source.choice([1.0, 0.1, 0.01])
        ends = [(a, a + (b - a) * scale) for a, b in corners]
        box = [(arb(a), arb(b)) for a, b in ends]
        value, slopes = gradient(graph, box, [0, 1])
        for _ in range(6):
            x, y = ([source.uniform(a, b) for a, b in ends] for _ in range(2))
            u, v = (graph.evaluate([arb(c) for c in p])[0] for p in (x, y))
            if not is_known(value):
                continue
            assert u.is_finite() and not (u < value[0]) and not (u > value[1])
            if all(map(is_known, slopes.values())):
                finite += 1
                moved = [
                    (d * s[0]).union(d * s[1]) for d, s in zip([arb(b) - arb(a) for a, b in zip(x, y)], slopes.values())
                ]
                assert (v - u).overlaps(sum(moved, arb(0)))
    assert finite > 20


def test_ends_of_intervals_are_exact():
    """What balls lose on long intervals: exp stays positive, sin ends at 1, tanh and erf stay below 1."""
    box = [(arb(-30), arb(0))]
    for text, low, high in (
        ("1/exp(x0)", 1.0, math.exp(30)),
        ("sin(x0)", -1.0, 1.0),
        ("tanh(x0)", -1.0, 0.0),
        ("x0^2", 0.0, 900.0),
        ("cos(x0/100)", math.cos(0.3), 1.0),
    ):
        graph = parse(text, ["x0"])
        a, b = values_over(graph, box)[graph.outputs[0]]
        assert abs(float(a) - low) <= 1e-15 * abs(low) and abs(float(b) - high) <= 1e-12 * abs(high), text


def test_rounding_of_ends():
    third = arb(1) / 3
    assert below(third) < third < above(third) and above(third) == math.nextafter(below(third), 1)
    assert above(arb(0.5)) == below(arb(0.5)) == 0.5 and above(arb("nan")) == math.inf


@pytest.mark.parametrize("text", [t for t in FUNCTIONS if "floor" not in t and "where" not in t and "^-2" not in t])
def test_ranges_and_slopes_hold_what_is_seen(text):
    graph, source = parse(text, ["x0", "x1"]), random.Random(5)
    ends = ((0.2, 1.1), (-0.7, 0.9))
    low, high = span(graph, ends, 200, 1e-3)
    steep = [largest_slope(graph, ends, i, 200, 1e-3) for i in range(2)]
    values, slopes = [], []
    for _ in range(400):
        point = [arb(source.uniform(a, b)) for a, b in ends]
        values.append(graph.evaluate(point)[0])
        slopes.append(gradient(graph, [(x, x) for x in point], [0, 1])[1])
    assert all(low <= v <= high for v in values)
    assert all(abs(s[i][0]) <= steep[i] for s in slopes for i in range(2))
    seen = max(map(float, values)) - min(map(float, values))
    assert high - low < 1.3 * seen + 1e-9  # and little more
    assert all(steep[i] < 1.3 * max(abs(float(s[i][0])) for s in slopes) + 1e-9 for i in range(2))


def test_a_pole_has_no_range():
    low, high = span(parse("1/(x0 - 0.5)", ["x0"]), ((0.0, 1.0),), 200, 1e-3)
    assert low == -math.inf and high == math.inf
    assert largest_slope(parse("sqrt(x0)", ["x0"]), ((0.0, 1.0),), 0, 200, 1e-3) == math.inf


# ---- errors


def carried(wiring, parts, box, semantics="float64"):
    found = Propagation(wiring, Ranges(parts, 64, 1e-6), box, semantics)
    return found, found.run()


def test_errors_by_hand():
    """0.5·sin(3x0 + x1/3 + 1) + 2·x1: δ = |0.333… − 1/3| + rounding, ε is the head's, and slopes are at most 1."""
    graph, epsilon = parse("sin(x0)", ["x0"]), 1e-6
    reads = row({0: 3.0, 1: 1 / 3}, 1.0, {1: (1, 3)})
    wiring = wired([row({2: 0.5, 1: 2.0})], [Use(0, 1, (reads,))])
    found, (error,) = carried(wiring, [Part(graph, ((-9.0, 9.0),), epsilon)], ((-1.0, 1.0),) * 2)
    u, third = 2.0**-53, float(abs(arb(1 / 3) - arb(1) / 3))
    rounded = 3 * u * (3 + 1 / 3 + 1)  # two products, two sums: three roundings at most for each term
    own = 2 * u * (2 + 0.5 * (1 + epsilon))
    assert float(error) == pytest.approx(0.5 * (epsilon + third + rounded) + own, rel=1e-9, abs=0)
    assert error > 0.5 * epsilon and found.budget()[0] == 0
    assert sum(map(float, found.budget()[1].values())) == pytest.approx(float(error), rel=1e-12, abs=0)
    _, (error,) = carried(wired([row({0: 0.25}, 0.5, {0: (1, 3), -1: (2, 5)})]), [], ((-2.0, 1.0),) * 2)
    assert float(error) == pytest.approx(2 / 12 + 0.1, rel=1e-9)  # numbers that are stored badly


def test_inputs_in_float32():
    """An input that a head reads as it is adds nothing: the head's claim covers it. Elsewhere it is rounded."""
    part = Part(parse("sin(x0)", ["x0"]), ((-1.0, 1.0),), 1e-4)
    plain, negative = row({0: 1.0}), row({0: -1.0})
    for reads in (plain, negative):
        _, (error,) = carried(wired([row({1: 1.0})], [Use(0, 1, (reads,))], 1), [part], ((-1.0, 1.0),), "float32")
        assert error == arb(1e-4)
    _, (error,) = carried(wired([plain], (), 1), [], ((-1.0, 1.0),), "float32")
    assert float(error) == pytest.approx(2.0**-24, rel=1e-6, abs=0)
    scaled = Use(0, 1, (row({0: 0.75}),))
    _, (error,) = carried(wired([row({1: 1.0})], [scaled], 1), [part], ((-1.0, 1.0),), "float32")
    assert float(error) == pytest.approx(
        1e-4 + 2 * 0.75 * 2.0**-24, rel=1e-6, abs=0
    )  # of the input, and of the product


def single(x: float) -> float:
    return struct.unpack("<f", struct.pack("<f", x))[0]


TEXTS = ["sin(x0)", "exp(-x0)", "x0^2", "tanh(2*x0) - x0", "abs(x0)", "1/(3 + x0^2)"]


def random_network(source, stored):
    """Two layers of three uses, with weights that are ones, floats, and fractions that are not."""

    def random_row(channels):
        columns = sorted(source.sample(range(channels), source.choice([1, 1, 2, 3])))
        exact, weights = {}, {}
        for k, j in enumerate(columns):
            weights[j] = source.choice([1.0, -1.0, stored(source.uniform(-1, 1)), stored(1 / 3)])
            if weights[j] == stored(1 / 3):
                exact[k] = (1, 3)
        bias = source.choice([0.0, 0.0, stored(source.uniform(-1, 1))])
        return row(weights, bias, exact)

    parts = [Part(parse(t, ["x0"]), ((-1e3, 1e3),), source.choice([1e-3, 1e-6])) for t in source.sample(TEXTS, 3)]
    uses = [Use(head, layer, (random_row(3 if layer == 1 else 6),)) for layer in (1, 2) for head in range(3)]
    return parts, Wiring(3, 2, tuple(uses), (random_row(9), random_row(9)))


@pytest.mark.parametrize("semantics", ["float64", "float32"])
def test_no_run_of_a_network_exceeds_its_errors(semantics):
    """An adversary chooses the errors of the heads and the order of sums; every operation is rounded."""
    source, stored, closest = random.Random(8), single if semantics == "float32" else float, 0.0
    unit = 2.0**-23 if semantics == "float32" else 2.0**-52
    for _ in range(40):
        parts, wiring = random_network(source, stored)
        box = tuple(sorted(source.uniform(-1, 1) for _ in range(2)) for _ in range(3))
        _, errors = carried(wiring, parts, tuple((a, b) for a, b in box), semantics)
        for _ in range(10):
            point = [source.choice([a, b, source.uniform(a, b)]) for a, b in box]
            exact, run = [arb(x) for x in point], [stored(x) for x in point]

            def read(given, run=run):
                total, terms = 0.0, [stored(float(w) * run[j]) for w, j in zip(given.weights, given.columns)]
                for term in source.sample([*terms, float(given.bias)], len(terms) + 1):
                    total = stored(total + term)
                return total

            for use in wiring.uses:
                part, (given,) = parts[use.head], use.rows
                seen = read(given)
                if given.plain and given.columns[0] < 3:  # the head's claim is about the input before it is rounded
                    seen = point[given.columns[0]] * float(given.weights[0])
                value = float(part.graph.evaluate([arb(seen)])[0])
                room = part.error - unit * (abs(value) + part.error)  # a head returns numbers of the dtype
                run.append(stored(value + source.choice([-1, 1]) * room))
                exact += part.graph.evaluate([given.read_exactly(exact)])
            for given, bound in zip(wiring.output, errors):
                error = abs(arb(read(given)) - given.read_exactly(exact))
                assert error <= bound * (1 + 1e-9) + 1e-15
                closest = max(closest, float(error / bound))
    assert closest > 0.5  # the adversary is not far from what is allowed


def test_an_unbounded_slope_is_bridged_by_a_modulus_or_refused():
    """√x moves by at most √δ, however steep it is; a jump by no bound at all."""
    reads = row({0: 0.5, 1: 0.5})
    wiring = wired([row({2: 1.0})], [Use(0, 1, (reads,))])
    _, (error,) = carried(wiring, [Part(parse("sqrt(x0)", ["x0"]), ((-0.1, 1.1),), 1e-4)], ((0.0, 1.0),) * 2)
    assert 1e-4 + 1e-8 < error < 1e-4 + 4e-8
    with pytest.raises(propagation.Stuck, match="no bounded slope"):
        carried(wiring, [Part(parse("where(x0 - 0.5, 1, 0)", ["x0"]), ((-0.1, 1.1),), 1e-4)], ((0.0, 1.0),) * 2)
    with pytest.raises(propagation.Stuck, match="a pole may lie there"):
        carried(wiring, [Part(parse("1/(x0 - 0.3)", ["x0"]), ((-0.1, 1.1),), 1e-4)], ((0.0, 1.0),) * 2)
    with pytest.raises(propagation.Stuck, match="overflows float64"):
        carried(wired([row({0: 1e308, 1: 1e308})]), [], ((-9.0, 9.0),) * 2)


# ---- the command


def test_the_command_lists_parts_and_propagation(networks, capsys):
    assert main([str(networks("layers"))]) == 0
    shown = capsys.readouterr().out
    for text in ("2 uses of 2 heads, 2 layers", "0: sin(x0) for x0 in [-1, 1]", "output 0, error ≤", "coefficients:"):
        assert text in shown
    assert main([str(networks("layers")), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert len(report["parts"]) == 2 and report["verdict"] == "verified" and report["propagation"]
    assert main([str(networks("neurons"))]) == 0
    assert "by definition (called 'hand-made')" in capsys.readouterr().out


def test_the_function_that_is_asked_for_must_be_the_stored_one(networks):
    same = run(networks("layers"), function="2*exp(sin(x0)/3 + x1/7) - x1")[1]
    other = run(networks("layers"), function="2*exp(sin(x0)/3 + x1/8) - x1")[1]
    assert (same, other) == (VERIFIED, REFUTED)
    rows = [
        "0.5*x0 - 1.25*x1 + 0.75*x2",
        "x0 + 0.25*x1 - 0.5*x2",
        "-0.375*x0 + 0.625*x1 + 1.5*x2",
        "0.125*x0 - 0.875*x1 + 0.25*x2",
    ]
    a, b, c, d = (f"sin({r} + 0.25)" for r in rows)
    text = f"0.5*{a} - 0.25*{b} + 1.5*{c} + 0.75*{d} + 0.125, 0.75*{a} - 0.5*{c}"
    assert run(networks("neurons"), function=text)[1] == VERIFIED
    assert run(networks("neurons"), function=text.replace("1.5*sin", "1.25*sin"))[1] == REFUTED


def test_a_spot_check_never_says_verified(networks, tmp_path):
    report, code = run(networks("sum"), sampled=20)
    assert code == UNKNOWN and report["verdict"] == "spot check"
    assert run(forge(networks("sum"), tmp_path / "a", below_the_truth), sampled=200)[1] == REFUTED


def test_a_spent_budget_says_so(networks):
    report, code = run(networks("layers"), budget=1e-9)
    assert code == UNKNOWN and "time budget ran out" in report["reason"]
