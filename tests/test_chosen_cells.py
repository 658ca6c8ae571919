"""Heads on the caller's own scattered keys: what was given is what is evaluated, and its bound is true and close."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from partita_check.cli import run

import partita as pa
from partita import errors
from partita.compiler.clock import Clock
from partita.functions.target import make_target
from partita.heads.scattered_head import ScatteredHead
from partita.proofs import bisection
from partita.proofs.bisection import prove_boxes
from tests.test_planted import edited

SQUARE, LINE = pa.Box([-1, -1], [1, 1]), pa.Box([-1], [1])
WAVES = "sin(3*x0) + x0*cos(2*x1)"


def scattered(count: int, m: int, seed: int = 0, lo: float = -1.0, hi: float = 1.0) -> np.ndarray:
    return np.random.default_rng(seed).uniform(lo, hi, (count, m))


def by_hand(points, centers, rate, values, powers=0.0, slopes=None) -> np.ndarray:
    """`Σ_j softmax_j(−R(|z − c_j|² − p_j)/2)(V_j + J_j(z − c_j))` from what the caller gave, `(n, out)`."""
    offset = points[:, None] - centers
    scores = -0.5 * rate * ((offset**2).sum(axis=2) - powers)
    weights = np.exp(scores - scores.max(axis=1, keepdims=True))
    weights /= weights.sum(axis=1, keepdims=True)
    held = np.broadcast_to(values, (len(points), *values.shape))
    if slopes is not None:
        held = held + np.einsum("jom,njm->njo", slopes, offset)
    return np.einsum("nj,njo->no", weights, held)


def verdict(c: pa.Compiled, folder) -> str:
    report, code = run(c.save(folder), budget=60)
    return {0: "verified", 1: "refuted"}.get(code, str(report))


CASES = {
    "square": (WAVES, SQUARE, {"centers": scattered(16, 2), "inverse_temperature": 20}),
    "sloped": (WAVES, SQUARE, {"centers": scattered(16, 2), "inverse_temperature": 20, "values": "affine"}),
    "hard": (WAVES, SQUARE, {"centers": scattered(16, 2), "inverse_temperature": 1e6, "values": "affine"}),
    "very soft": (WAVES, SQUARE, {"centers": scattered(16, 2), "inverse_temperature": 1e-3, "values": "affine"}),
    "line": ("sin(3*x)", LINE, {"centers": [-0.6, 0.1, 0.8], "inverse_temperature": 9}),
    "one key": ("exp(x)", LINE, {"centers": [[0.1]], "inverse_temperature": 5}),
    "equal centers": (
        "x0*x1",
        SQUARE,
        {"centers": np.zeros((4, 2)), "inverse_temperature": 5, "values": [1.0, -2, 3, 4]},
    ),
    "dead key": (
        "x0*x1",
        SQUARE,
        {"centers": scattered(9, 2), "powers": [0] * 8 + [-50], "inverse_temperature": 300},
    ),
    "vector": (
        "sin(x0), x0*x1",
        SQUARE,
        {"centers": scattered(12, 2, 1), "inverse_temperature": 10, "values": "affine"},
    ),
    "space": (
        "sin(x0)*x1 + x2",
        pa.Box([0] * 3, [1] * 3),
        {"centers": scattered(12, 3, 2, 0), "inverse_temperature": 30, "values": "affine"},
    ),
    "region": (
        "sqrt(1 - x0*x0 - x1*x1)",
        pa.Ball([0, 0], 0.9),
        {"centers": scattered(9, 2), "inverse_temperature": 10, "values": "affine"},
    ),
    "kink": (
        "abs(x0) + max(x1, 0)",
        SQUARE,
        {"centers": np.r_[scattered(8, 2), [[0, 0]]], "inverse_temperature": 50, "values": "affine"},
    ),
    "jump": ("step(x0 - 0.2) + x1", SQUARE, {"centers": scattered(9, 2), "inverse_temperature": 50}),
    "huge": ("1e200*sin(3*x)", LINE, {"centers": scattered(6, 1), "inverse_temperature": 5, "values": "affine"}),
    "tiny": ("1e-200*sin(3*x)", LINE, {"centers": scattered(6, 1), "inverse_temperature": 5, "values": "affine"}),
    "badly scaled": (
        "sin(3e6*x0) + x1/1e5",
        pa.Box([0, 0], [1e-6, 1e5]),
        {"centers": scattered(9, 2, 0, 0) * [1e-6, 1e5], "inverse_temperature": 1e-8, "values": "affine"},
    ),
    "float32 far away": (
        "sin(3*x0)*x1",
        pa.Box([100, -1], [101, 5]),
        {
            "centers": np.array([100.5, 2]) + scattered(9, 2),
            "inverse_temperature": 4,
            "values": "affine",
            "dtype": torch.float32,
        },
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_the_bound_is_true_close_and_verified(case, tmp_path):
    function, domain, options = CASES[case]
    c = pa.head(function, domain, **options)
    assert c.certificate.kind == "proved" and c.certificate.facts["complete"] == 1
    points = c.target.domain.sample(20_000, np.random.default_rng(5))
    seen = max(float(c.errors_at(points).max()), c.certificate.witness.error)
    assert seen <= c.error_bound <= 1.11 * seen
    assert verdict(c, tmp_path / "head") == "verified"
    again = pa.load(tmp_path / "head")
    assert again.error_bound == c.error_bound and not again.certificate.has_tolerance
    assert all(check.holds for check in pa.recheck(again))
    lower = tuple(replace(t, value=0.8 * t.value) for t in c.certificate.terms)
    proof = dict(c.certificate.proof)
    if "shards" in proof:
        proof["shards"] = [0.8 * bound for bound in proof["shards"]]
    claim = replace(
        c.certificate, error_bound=0.8 * c.error_bound, tolerance=0.8 * c.error_bound, terms=lower, proof=proof
    )
    smaller = replace(c, certificate=claim)
    if case in ("sloped", "very soft", "line", "vector", "float32 far away"):
        assert not all(check.holds for check in pa.recheck(smaller))
    assert verdict(smaller, tmp_path / "lower") == "refuted"


def test_a_jump_in_float32_is_rechecked():
    """Its inputs are moved by rounding, perhaps across the jump, and f has no modulus to say what that does."""
    c = pa.head(*CASES["jump"][:2], **CASES["jump"][2], dtype=torch.float32)
    assert c.certificate.kind == "proved" and all(check.holds for check in pa.recheck(c))


def test_a_function_that_is_its_cells_is_verified(tmp_path):
    """Polynomials are interpolated without a remainder, so that the checker sees nothing but rounding."""
    c = pa.head("2*x0 - x1 + 0.3", SQUARE, centers=scattered(16, 2), inverse_temperature=20, values="affine")
    assert c.error_bound < 1e-13 and all(check.holds for check in pa.recheck(c))
    assert verdict(c, tmp_path / "head") == "verified"


def test_what_is_given_is_what_is_evaluated():
    rng, centers = np.random.default_rng(3), scattered(9, 2) * 1.3
    values, slopes, powers = rng.normal(size=(9, 2)), rng.normal(size=(9, 2, 2)), rng.uniform(0, 0.1, 9)
    c = pa.head(
        "x0, x1",
        SQUARE,
        centers=centers,
        powers=powers,
        values=values,
        slopes=slopes,
        inverse_temperature=7,
    )
    points = SQUARE.sample(300, rng)
    assert np.abs(c(points) - by_hand(points, centers, 7, values, powers, slopes)).max() < 1e-12
    assert np.array_equal(c.partition.powers, powers)
    flat = pa.head("x0*x1", SQUARE, centers=centers, values=values[:, 0], slopes=slopes[:, 0], inverse_temperature=7)
    expected = by_hand(points, centers, 7, values[:, :1], 0.0, slopes[:, :1])[:, 0]
    assert np.abs(flat(points) - expected).max() < 1e-12


def test_centers_outside_take_f_from_the_edge():
    centers = np.array([[-2.0, 0.3], [0.5, 0.5], [0.2, 7.0]])
    inside = SQUARE.clamp(centers)
    f = lambda z: np.sin(3 * z[:, 0]) + z[:, 0] * np.cos(2 * z[:, 1])  # noqa: E731
    c = pa.head(WAVES, SQUARE, centers=centers, inverse_temperature=3)
    assert np.abs(c.head.values.numpy()[:, 0] - f(inside)).max() < 1e-14
    assert "2 centers lie outside" in c.explain()
    sloped = pa.head(WAVES, SQUARE, centers=centers, inverse_temperature=3, values="affine").head
    at_edge = sloped.values[:, 0].numpy() + (sloped.value_slopes[:, 0].numpy() * (inside - centers)).sum(axis=1)
    assert np.abs(at_edge - f(inside)).max() < 1e-12  # the plane touches f at the edge
    step = 1e-6 * np.eye(2)
    rise = np.stack([(f(inside + e) - f(inside - e)) / 2e-6 for e in step], axis=1)
    assert np.abs(sloped.value_slopes[:, 0].numpy() - rise).max() < 1e-7


def test_attacks_survive_huge_values():
    assert not pa.attack(pa.head(*CASES["huge"][:2], **CASES["huge"][2])).refuted


def test_where_f_has_no_slope_any_will_do():
    c = pa.head("sqrt(x)", pa.Box([0], [1]), centers=[0, 0.5], values="affine", inverse_temperature=50)
    assert torch.isfinite(c.head.value_slopes).all() and np.isfinite(c.error_bound)


def test_everything_else_works_on_such_a_head(tmp_path):
    from partita.plots import plot_head

    c = pa.head(WAVES, SQUARE, centers=scattered(16, 2), inverse_temperature=20, values="affine")
    points = SQUARE.sample(2000, np.random.default_rng(0))
    ranges = c.bound_range()[0]
    assert ranges.lo <= c(points).min() and c(points).max() <= ranges.hi
    with pytest.raises(errors.UnsupportedError, match="scattered"):
        c.bound_slope(0)
    assert not pa.attack(c).refuted
    assert c.layers().error_bound >= c.error_bound
    assert "→" in c.report() and "affine" in c.report() and "no tolerance was set" in c.explain()
    assert plot_head(c, tmp_path / "head.svg")
    with pytest.raises(errors.UnsupportedError, match="inverse_temperature=R"):
        c.with_sharpness(2.0)
    changed = pa.head(WAVES, SQUARE, centers=scattered(16, 2), inverse_temperature=20)
    changed.head.values[3] += 1
    with pytest.raises(errors.UnsupportedError, match="changed"):
        changed.require_unchanged()


def test_a_wrong_value_is_noticed(tmp_path):
    """Negative controls: the proof sees the stored numbers, and a certificate of others does not hold for them."""
    c = pa.head(WAVES, SQUARE, centers=scattered(16, 2), inverse_temperature=300)
    values = c.head.values.numpy()[:, 0].copy()
    values[5] += 4
    wrong = pa.head(WAVES, SQUARE, centers=scattered(16, 2), inverse_temperature=300, values=values)
    assert wrong.error_bound > 2 > c.error_bound
    digest = {**c.certificate.model, "sha256": wrong.certificate.model["sha256"]}
    lie = replace(wrong, certificate=replace(c.certificate, model=digest))
    assert verdict(lie, tmp_path / "lie") == "refuted"
    assert not all(check.holds for check in pa.recheck(lie))


def random_head(rng, rate: float, *, m: int = 2, out: int = 2) -> ScatteredHead:
    """Keys, powers, values and slopes at random: no relation to any function."""
    keys = int(rng.integers(2, 14))
    return ScatteredHead(
        torch.from_numpy(rng.uniform(-1.5, 1.5, (keys, m))),
        rate,
        torch.from_numpy(rng.normal(size=(keys, out))),
        powers=torch.from_numpy(rng.uniform(0, 0.3, keys)),
        value_slopes=torch.from_numpy(rng.normal(size=(keys, out, m))),
        input_shapes=((m,),),
        output_shape=(out,),
    )


def worst_ratio(rate: float, trials: int, **options) -> float:
    """The largest of error seen over bound on a small box, where the expansion decides, for random heads."""
    worst, target = 0.0, make_target("sin(x0) + x1, x0*x1", pa.Box([0.1, -0.2], [0.25, 0.0]))
    box, rng = target.box, np.random.default_rng(7)
    points = np.concatenate([box.sample(2000, rng), box.corners()])
    for _ in range(trials):
        head = random_head(rng, rate)
        proof = prove_boxes(head, target.graph, box, target=1e-9, expand=True, max_boxes=1, **options)
        c = [t.numpy() for t in (head.centers, head.values, head.powers, head.value_slopes)]
        net = by_hand(points, c[0], rate, c[1], c[2], c[3])
        worst = max(worst, float(np.abs(net - target(points)).max()) / proof.bound)
    return worst


@pytest.mark.parametrize("rate", [1e-3, 1.0, 6.0, 40.0])
def test_an_expanded_head_stays_below_its_bound(rate):
    assert worst_ratio(rate, 40) <= 1


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("line + rest +", "line + 0 * rest +"),
        ("incline + mean(", "incline + 0 * mean("),
        ("np.abs(f.linear - tilt).sum(axis=2)", "0 * np.abs(f.linear - tilt).sum(axis=2)"),
    ],
)
def test_an_expansion_that_leaves_something_out_is_caught(old, new, monkeypatch):
    monkeypatch.setattr(bisection._Measure, "_expanded", edited(bisection._Measure._expanded, old, new))
    assert max(worst_ratio(rate, 30) for rate in (6.0, 40.0)) > 1


def test_rounded_scores_bring_back_weights_that_vanish():
    """At the middle of the box the second weight is below the least positive float; scores of 1e17 are off by 16 and more."""
    c = pa.head(
        "0*x",
        pa.Box([0], [1e-3]),
        centers=[-1008.87260509879, -1008.8725943229352],
        powers=[0.0, -0.021742951391970366],
        values=[0.0, 1.0],
        inverse_temperature=131276072641.91261,
    )
    points = np.append(np.linspace(0, 1e-3, 2001), 0.0009996102026983296)[:, None]
    assert 1e-11 < np.abs(c(points)).max() <= c.error_bound


def test_more_boxes_never_loosen_the_bound():
    c = pa.head(WAVES, SQUARE, centers=scattered(40, 2), inverse_temperature=30)
    seen, before = c.certificate.witness.error, np.inf
    for most in (1, 5, 20, 80, 300):
        proof = prove_boxes(c.head, c.target.graph, SQUARE, target=seen, expand=True, max_boxes=most)
        assert seen <= proof.bound <= before
        before = proof.bound
    assert not proof.complete or proof.bound <= 1.1 * seen


def test_a_budget_ends_with_a_true_bound_that_says_so(tmp_path):
    def spent(what, *_):
        if what in ("attack", "proof"):
            raise errors.BudgetSpentError("the budget was spent")

    given = {"centers": scattered(60, 2), "inverse_temperature": 30, "values": "affine"}
    cut = pa.head(WAVES, SQUARE, **given, progress=spent)
    whole = pa.head(WAVES, SQUARE, **given, budget=600)
    assert (cut.certificate.facts["complete"], whole.certificate.facts["complete"]) == (0, 1)
    assert whole.certificate.witness.error <= whole.error_bound < cut.error_bound < np.inf
    assert "not the tightest" in cut.explain() and "not the tightest" not in whole.explain()
    again = pa.load(cut.save(tmp_path / "cut"))
    assert "not the tightest" in again.explain() and all(check.holds for check in pa.recheck(again))
    with pytest.raises(errors.UnsupportedError, match="seconds"):
        pa.head(WAVES, SQUARE, **given, budget=-1)


def test_a_proof_that_was_cut_short_is_repeated_to_the_box():
    """More boxes would forget more cells, and the bound of the sums would be another."""
    box, left = pa.Box([499.75] * 3, [500.75] * 3), [12]

    def spent(what, *_):
        left[0] -= what == "proof"
        if what == "attack" or not left[0]:
            raise errors.BudgetSpentError("the budget was spent")

    root = "sqrt((2*x0 - 1000.5)*(2*x0 - 1000.5) + (2*x2 - 1000.5)*(2*x2 - 1000.5))"
    centers = 500.25 + scattered(17, 3, 2, -0.5, 0.5)
    c = pa.head(root, box, centers=centers, inverse_temperature=1.5e5, values="affine", progress=spent)
    assert c.certificate.facts["complete"] == 0
    assert all(check.holds for check in pa.recheck(c))


def test_moduli_of_f_are_not_waited_for():
    def spent(what, *_):
        if what == "slopes":
            raise errors.BudgetSpentError("the budget was spent")

    for f in ("step(x0 - 0.2) + x1", "sqrt(abs(x0))*x1"):
        c = pa.head(f, SQUARE, centers=scattered(5, 2), inverse_temperature=9, progress=spent)
        assert c.certificate.kind == "proved"
        with pytest.raises(errors.BudgetSpentError):
            pa.head(f, SQUARE, keys=3, progress=spent)


def test_black_boxes_are_estimated_and_say_so():
    f = lambda z: np.sin(3 * z[:, 0]) + z[:, 0] * np.cos(2 * z[:, 1])  # noqa: E731
    given = {"centers": scattered(12, 2), "inverse_temperature": 20, "trace": False}
    for values in ("centers", "affine"):
        c = pa.head(f, SQUARE, values=values, **given)
        assert c.certificate.kind == "estimated" and c.error_bound == np.inf and c.error_estimate > 0
        known = pa.head(WAVES, SQUARE, centers=given["centers"], inverse_temperature=20, values=values)
        points = SQUARE.sample(200, np.random.default_rng(0))
        assert np.abs(c(points) - known(points)).max() < 1e-6
        assert all(check.holds for check in pa.recheck(c))
    declared = pa.head(f, SQUARE, lipschitz=4.3, **given)
    assert declared.certificate.kind == "estimated" and "proves nothing for scattered keys" in declared.explain()


GIVEN = {"centers": scattered(4, 2), "inverse_temperature": 5.0}


@pytest.mark.parametrize(
    ("error", "text", "options"),
    [
        (errors.UnsupportedError, "neither keys nor centers", {"centers": None}),
        (errors.UnsupportedError, "both keys and centers", {"keys": 4}),
        (errors.UnsupportedError, "inverse_temperature given with keys=", {"centers": None, "keys": 4}),
        (errors.UnsupportedError, "sharpness given with centers=", {"sharpness": 2.0}),
        (errors.UnsupportedError, "ghosts given with centers=", {"ghosts": 1}),
        (errors.UnsupportedError, "finite R > 0", {"inverse_temperature": None}),
        (errors.UnsupportedError, "finite R > 0", {"inverse_temperature": 0}),
        (errors.UnsupportedError, "finite R > 0", {"inverse_temperature": -1.0}),
        (errors.UnsupportedError, "finite R > 0", {"inverse_temperature": float("inf")}),
        (errors.UnsupportedError, "finite R > 0", {"inverse_temperature": [1.0, 2.0]}),
        (errors.DomainError, "float32", {"inverse_temperature": 1e300, "dtype": torch.float32}),
        (errors.UnsupportedError, "float64", {"dtype": torch.bfloat16}),
        (errors.ShapeError, r"expected \(N, 2\)", {"centers": np.zeros((3, 3))}),
        (errors.ShapeError, r"expected \(N, 2\)", {"centers": np.zeros((0, 2))}),
        (errors.ShapeError, r"expected \(N, 2\)", {"centers": [0.0, 1.0]}),
        (errors.ShapeError, "centers", {"centers": [[0.0], [0.0, 1.0]]}),
        (errors.NonFiniteValueError, r"centers holds nan at index \[1, 0\]", {"centers": [[0, 0], [np.nan, 0]]}),
        (errors.ShapeError, r"powers has the shape \(3,\); expected \(4,\)", {"powers": [0, 0, 0]}),
        (errors.NonFiniteValueError, "powers holds inf", {"powers": [0, 0, 0, np.inf]}),
        (errors.UnsupportedError, "'centers', 'affine' or an array", {"values": "fitted"}),
        (errors.ShapeError, "values has the shape", {"values": np.zeros(3)}),
        (errors.NonFiniteValueError, "values holds nan", {"values": np.full(4, np.nan)}),
        (errors.ShapeError, "slopes has the shape", {"values": np.zeros(4), "slopes": np.zeros(4)}),
        (errors.UnsupportedError, "values='affine'", {"values": "affine", "slopes": np.zeros((4, 2))}),
        (errors.SizeError, "max_bytes", {"max_bytes": 50}),
    ],
)
def test_what_does_not_fit_is_named(error, text, options):
    with pytest.raises(error, match=text):
        pa.head(WAVES, SQUARE, **{**GIVEN, **options})


def test_arrays_are_for_centers_only():
    with pytest.raises(errors.UnsupportedError, match="values"):
        pa.head(WAVES, SQUARE, keys=2, values=np.zeros(4))


class _Stopped(Clock):
    """A clock whose time is up whenever something of the list is reported."""

    on: tuple[str, ...] = ()

    def until(self, share):
        def report(what, done, of):
            if what in self.on:
                raise errors.BudgetSpentError(f"the time is up during {what}.")

        return report


def test_a_bound_needs_no_slopes_that_took_too_long(monkeypatch):
    """The bisection reads f by itself, so that the time to read its slopes may run out; on a grid they are needed."""
    monkeypatch.setattr("partita.compiler.chosen_head.Clock", type("Stopped", (_Stopped,), {"on": ("slopes",)}))
    text, box = "where(x < 0, x, sin(9*x))", pa.Box([-1.0], [1.0])
    c = pa.head(text, box, centers=[[-0.5], [0.5]], values="centers", inverse_temperature=5.0, budget=1.0)
    assert c.certificate.kind == "proved" and math.isfinite(c.error_bound)
    with pytest.raises(errors.BudgetSpentError):
        pa.head(text, box, keys=(4,), sharpness=2.0, budget=1.0)


@pytest.mark.parametrize(("keys", "samples"), [(40, 2048), (4096, 512), (100_000, 256)])
def test_the_first_look_is_bounded(monkeypatch, keys, samples):
    """No clock stops it, so the pairs of a sample and a key are counted."""
    monkeypatch.setattr("partita.compiler.chosen_head.Clock", type("Stopped", (_Stopped,), {"on": ("attack", "proof")}))
    centers = np.linspace(-1, 1, keys)[:, None]
    c = pa.head("sin(3*x)", pa.Box([-1.0], [1.0]), centers=centers, values="centers", inverse_temperature=1e4)
    assert c.certificate.witness is not None and c.certificate.witness.samples == samples + 2  # and two corners
