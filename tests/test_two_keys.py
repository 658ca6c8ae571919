"""Heads of two keys: which functions they represent, that their bounds hold, and that the checker confirms them."""

from __future__ import annotations

import copy
import math
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import mpmath
import numpy as np
import pytest
import torch
from balls import bits, values
from flint import arb
from partita_check.cli import run
from resealing import forge

import partita as pa
from partita.errors import SizeError, ToleranceError, UnsupportedError
from partita.functions.expressions import parse
from partita.functions.quotients import Logistic, Quadratic, two_key_form
from partita.methods.two_keys import two_keys_draft
from partita.proofs import PROOFS, Given
from partita.proofs.two_key_proof import misread, stored_form

VERIFIED = 0
SQUARE = pa.Box([-1, -1], [1, 1])
LINE = pa.Box([-4], [4])


def form(text: str, box: pa.Box = LINE) -> Logistic | Quadratic:
    return two_key_form(parse(text, ["x", "y", "z"][: box.dimension]), box)


def rows(found: Logistic | Quadratic) -> list[list[Fraction]]:
    """All numbers of a form; the keys of a logistic one in the order in which φ rises along the first axis."""
    if isinstance(found, Quadratic):
        return [found.level.ravel().tolist(), found.squares.ravel().tolist()]
    sign = 1 if found.turn[1] >= 0 else -1
    return [(sign * found.turn).tolist(), found.level.ravel().tolist(), (sign * found.swing).ravel().tolist()]


SAME = [
    ("tanh(x)", "(exp(x) - exp(-x))/(exp(x) + exp(-x))", "1 - 2/(exp(2*x) + 1)", "2*sigmoid(2*x) - 1"),
    ("sigmoid(3*x - 1)", "1/(1 + exp(1 - 3*x))", "exp(3*x)/(exp(3*x) + exp(1))", "1 - sigmoid(1 - 3*x)"),
    ("x*sigmoid(x)", "x/(1 + exp(-x))", "x*(1 + tanh(x/2))/2", "x*exp(x)/(1 + exp(x))"),
    ("x^2", "x*x", "(x + 1)*(x - 1) + 1", "0.5*(x + x)*x"),
]


@pytest.mark.parametrize("texts", SAME, ids=[texts[0] for texts in SAME])
def test_it_does_not_matter_how_a_function_is_written(texts: tuple[str, ...]) -> None:
    first = rows(form(texts[0]))
    assert all(rows(form(text)) == first for text in texts[1:])
    assert rows(form(f"{texts[0]} + x/1000")) != first  # control


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("sin(x)", "the operation sin"),
        ("tanh(x)^2", "more than two exponentials"),
        ("x^3", "more than two factors"),
        ("x/(exp(x) - 1)", "may be 0"),
        ("x*exp(x)", "not divided"),
        ("tanh(x*x)", "not affine"),
        ("x^2*tanh(x)", "not affine"),
        ("1/x", "other than exponentials"),
        ("tanh(2)*x*x", "irrational"),
    ],
)
def test_other_functions_are_refused_with_the_reason(text: str, problem: str) -> None:
    with pytest.raises(UnsupportedError, match=problem):
        form(text)


def test_numbers_of_thousands_of_digits_are_refused() -> None:
    with pytest.raises(SizeError):
        form("(0.1*x + 0.3)^2 * " + "*".join(["(1/3 + 0.1)^60"] * 8))


# --- heads and their bounds --------------------------------------------------------------------------------------------

EXACT = [
    ("tanh(x)", pa.Box([-3], [3]), {}),
    ("tanh(40*x - 7)", pa.Box([-1], [2]), {}),
    ("sigmoid(x)", pa.Box([-5000], [5000]), {}),
    ("x/(1 + exp(-x))", pa.Box([-5000], [5000]), {}),
    ("3*x - 2*tanh(x/9) + 1", pa.Box([-20], [70]), {}),
    ("1/(1 + 7*exp(-x))", pa.Box([-9], [9]), {}),
    ("tanh(3*x - 2*y + 1)", SQUARE, {}),
    ("(x*exp(x) + y*exp(y))/(exp(x) + exp(y))", pa.Box([-6, -3], [5, 8]), {}),
    ("y*tanh(5*x) + x, sigmoid(10*x) - y", SQUARE, {}),
    ("x*sigmoid(x)", pa.Box([-60], [60]), {"dtype": torch.float32}),
    ("tanh(x - 1000)", pa.Box([998], [1003]), {"dtype": torch.float32}),
]
PRODUCTS = [
    ("x*y", SQUARE, 1e-9, {}),
    ("x*y", SQUARE, 0.3, {}),
    ("(x + 1)*(y - 2)", pa.Box([0, -3], [1000, 5]), 1e-3, {}),
    ("x^2", pa.Box([3], [5]), 1e-6, {}),
    ("x^2 - 2*y^2", SQUARE, 1e-6, {}),
    ("x*(y - 3*z) + z", pa.Box([-1, 0, 2], [1, 5, 3]), 1e-6, {}),
    ("x*y, 1 - x*z, z", pa.Box([-1] * 3, [2] * 3), 1e-6, {}),
    ("x*y", SQUARE, 1e-3, {"dtype": torch.float32}),
]


def worst(c: pa.Compiled, count: int = 2000) -> float:
    """The largest error at random points, corners and points where φ is small, a lower bound of it, f in balls."""
    box, rng = c.target.box, np.random.default_rng(1)
    lo, hi = box.lo.ravel(), box.hi.ravel()
    corners = np.where(rng.random((64, len(lo))) < 0.5, lo, hi)
    centers = np.clip(c.head.centers.double().numpy().mean(axis=0) + rng.normal(size=(count, len(lo))), lo, hi)
    halves = np.where(
        rng.random((64, len(lo))) < 0.5, (lo + 3 * hi) / 4, np.where(rng.random((64, len(lo))) < 0.5, lo, hi)
    )
    points = np.concatenate([rng.uniform(lo, hi, (count, len(lo))), corners, centers, halves])
    points = points.astype(c.head.dtype.__str__().removeprefix("torch.")).astype(np.float64).clip(lo, hi)
    ran = c.head.evaluate(torch.from_numpy(points).to(c.head.dtype)).double().numpy()
    assert c.target.graph is not None
    guess = np.abs(ran - c.target(points)).max(axis=1)
    found = 0.0
    with bits(200):
        for i in np.argsort(guess)[-40:]:
            exact = values(c.target.graph, points[i].tolist())
            found = max(found, *(float((abs(arb(y) - x)).abs_lower()) for y, x in zip(ran[i].tolist(), exact)))
    return found


@pytest.mark.parametrize(("text", "box", "options"), EXACT, ids=[f"{t} {o}" for t, _, o in EXACT])
def test_logistic_functions_are_exact(text: str, box: pa.Box, options: dict, tmp_path: Path) -> None:
    c = pa.compile(text, box, tolerance=1e-2, method="two_keys", **options)
    unit = torch.finfo(c.head.dtype).eps / 2
    size = max(1.0, float(np.abs(c.target(box.corners())).max()), float(np.abs(box.corners()).max()))
    assert c.num_keys == 2 and worst(c) <= c.error_bound <= 200 * unit * size
    assert all(check.holds for check in pa.recheck(c))
    report, code = run(c.save(tmp_path / "head"), budget=20.0)
    assert code == VERIFIED and "closed form" in str(report["method"]), report


@pytest.mark.parametrize(
    ("text", "box", "tolerance", "options"), PRODUCTS, ids=[f"{t} {e:g} {o}" for t, _, e, o in PRODUCTS]
)
def test_products_within_the_tolerance(text: str, box: pa.Box, tolerance: float, options: dict, tmp_path: Path) -> None:
    c = pa.compile(text, box, tolerance=tolerance, method="two_keys", **options)
    found = worst(c)
    assert c.num_keys == 2 and found <= c.error_bound <= tolerance
    assert found > 0.6 * c.certificate.terms[0].value  # the bound cannot be much smaller
    assert all(check.holds for check in pa.recheck(c))
    report, code = run(c.save(tmp_path / "head"), budget=20.0)
    assert code == VERIFIED and "closed form" in str(report["method"]), report
    forge(tmp_path / "head", error_bound=(0.95 * found).hex())
    assert run(tmp_path / "head", budget=2.0)[1] != VERIFIED  # control


def test_a_product_of_nine_digits_under_auto() -> None:
    c = pa.compile("x*y", "[-1,1]^2", tolerance=1e-9)
    assert (c.num_keys, c.num_parameters) == (2, 11) and c.candidates[0].method == "two_keys"
    with pytest.raises(
        ToleranceError, match=r"two_keys: tolerance 1e-11 is below what two keys in float64 can promise: 2"
    ):
        pa.compile("x*y", "[-1,1]^2", tolerance=1e-11, method="two_keys")


def test_a_tolerance_that_rounding_takes_part_of() -> None:
    """Close to the floor the head that errs least is found."""
    floor = float(
        np.sum(
            [
                t.value
                for t in two_keys_draft(pa.compile("x*y", SQUARE, tolerance=2.1e-10).target, tolerance=2.1e-10).terms
            ]
        )
    )
    assert 1.5e-10 < floor <= 2.1e-10


@pytest.mark.parametrize("text", ["x^2 + y^2", "x*y + z*x + y*z"])
def test_sums_of_products_are_refused(text: str) -> None:
    with pytest.raises(ToleranceError, match="sum of several products"):
        pa.compile(text, pa.Box([-1] * 3, [1] * 3), tolerance=1e-3, method="two_keys")


def test_cross_attention_reads_the_query_with_its_weights() -> None:
    pair = pa.Box([0], [1]), pa.Box([-1], [2])
    for text in ("k0*q0", "(k0 + 2)*(3*q0 - 1) - k0"):
        c = pa.compile(text, pair, tolerance=1e-8, method="two_keys")
        assert not c.head.has_query_values and worst(c) <= c.error_bound
        assert not c.head.value_slopes[:, :, 1].any() and c.head.value_slopes[:, :, 0].any()
    for text in ("q0*sigmoid(q0)", "k0*q0 + q0*q0", "k0*k0 + q0"):
        with pytest.raises(ToleranceError, match=r"z_Q|several products"):
            pa.compile(text, pair, tolerance=1e-3, method="two_keys")
    assert pa.compile("q0*sigmoid(q0)", pair, tolerance=1e-8, method="two_keys", query_values=True).num_keys == 2


def test_a_limit_on_values_is_kept() -> None:
    c = pa.compile("x*y", SQUARE, tolerance=1e-3, method="two_keys", max_value=20)
    assert c.head.largest_value([-1, -1], [1, 1]) <= 20
    with pytest.raises(SizeError, match="max_value"):
        pa.compile("x*y", SQUARE, tolerance=1e-6, method="two_keys", max_value=20)


# --- the proof ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reach", ["1e-5", "0.01", "0.25"])
@pytest.mark.parametrize("rest", ["-0.1", "0", "0.1", "0.25", "0.3333", "0.5", "2"])
def test_the_distance_of_tanh_from_a_line(reach: str, rest: str) -> None:
    """Against a fine grid in 40 digits; at the slopes that are used it is almost attained."""
    with mpmath.workdps(40):
        r, slope = mpmath.mpf(reach), 1 - mpmath.mpf(rest) * mpmath.mpf(reach) ** 2
        seen = max(abs(mpmath.tanh(r * k / 400) - slope * r * k / 400) for k in range(401))
    found = misread(1 - Fraction(rest) * Fraction(reach) ** 2, Fraction(reach))
    assert float(seen) <= found <= 1.2 * float(seen)


@pytest.mark.parametrize("name", ["centers", "inverse_temperature", "values", "value_slopes"])
@pytest.mark.parametrize("text", ["x*sigmoid(x)", "x^2"])
def test_a_changed_tensor_is_in_the_bound(name: str, text: str) -> None:
    """Whatever the numbers are, the bound is about them: f is not confused with what was meant."""
    c = pa.compile(text, pa.Box([-2], [3]), tolerance=1e-4, method="two_keys")
    head = copy.deepcopy(c.head)
    tensor = head.get_buffer(name)
    tensor.view(-1)[-1] *= 1.01
    proved = PROOFS["two_keys"].prove(head, c.target, Given())
    changed = replace(c, head=head)
    seen = worst(changed)
    assert seen > 2 * c.error_bound and seen <= proved.bound <= 40 * seen


def test_the_form_of_a_stored_head_is_the_head() -> None:
    c = pa.compile("y*tanh(x) + x, y", pa.Box([-1, 0], [2, 1]), tolerance=1e-3, method="two_keys")
    middle, radii = (tuple(map(Fraction, v)) for v in ([0.5, 0.5], [1.5, 0.5]))
    found, t = stored_form(c.head, middle, radii), np.array([1.0, -0.3, 0.8])
    z = torch.tensor([[0.5 - 0.3 * 1.5, 0.5 + 0.8 * 0.5]], dtype=torch.float64)
    made = found.level.astype(float) @ t + found.swing.astype(float) @ t * math.tanh(found.turn.astype(float) @ t)
    assert c.head.evaluate(z)[0].numpy() == pytest.approx(made, rel=1e-14)


def test_the_checker_does_not_take_another_function(tmp_path: Path) -> None:
    """The tensors of one function with the claim of another, sealed: two keys that almost fit."""
    c = pa.compile("tanh(x)", pa.Box([-3], [3]), tolerance=1e-3, method="two_keys")
    other = pa.compile("tanh(1.0001*x)", pa.Box([-3], [3]), tolerance=1e-3, method="two_keys")
    wrong = replace(other, head=c.head)
    assert PROOFS["two_keys"].prove(c.head, other.target, Given()).bound > 2e-5
    assert {check.name for check in pa.recheck(wrong) if not check.holds} >= {"tensors", "stored scores"}


@pytest.mark.parametrize(("text", "box"), [("x*y", SQUARE), ("tanh(x)", LINE), ("x^2", pa.Box([3], [5]))])
def test_ranges_of_heads_whose_values_cancel(text: str, box: pa.Box) -> None:
    """Values of 10,000 that cancel do not make the range as wide."""
    c = pa.compile(text, box, tolerance=1e-8, method="two_keys")
    (found,) = c.bound_range()
    assert found.lo <= found.seen_lo <= found.seen_hi <= found.hi
    assert found.hi - found.lo <= 1.5 * (found.seen_hi - found.seen_lo)
