"""Affine values on hard grids: second order, proved cell by cell."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

import partita as pa
from partita.functions.target import make_target
from partita.search.affine_cells import affine_cells

SQUARE = pa.Box([-1, -1], [1, 1])
SMOOTH = "sin(3*x0) + x0*cos(2*x1)"


@pytest.mark.parametrize(
    ("expression", "box", "tolerance", "options"),
    [
        ("sin(3*x0)", pa.Box([-1], [1]), 1e-3, {}),
        (SMOOTH, SQUARE, 1e-2, {}),
        (SMOOTH, SQUARE, 2e-2, {"dtype": torch.float32}),
        ("exp(x0)*x1, x0 - x1", SQUARE, 2e-2, {}),
        ("sin(k0)*q0", (pa.Box([0], [1]), pa.Box([-1], [1])), 1e-2, {}),
        ("abs(x0 - 0.31)", pa.Box([-1], [1]), 1e-2, {}),
        ("tanh(x0/100) + x1", pa.Box([-300, 5], [300, 6]), 1e-2, {}),
        (SMOOTH, SQUARE, 2e-2, {"norm": 2}),
    ],
    ids=str,
)
def test_bounds_hold_and_are_close(expression, box, tolerance, options):
    c = pa.compile(expression, box, tolerance=tolerance, method="affine", **options)
    assert c.certificate.kind == "proved" and c.error_bound <= tolerance
    seen = c.attack(samples=20000, seed=3).error
    if "norm" not in options:
        assert seen <= c.error_bound <= 1.5 * seen
    assert all(check.holds for check in pa.recheck(c))


def test_the_error_is_of_second_order():
    keys = [pa.compile("sin(3*x0)", pa.Box([-1], [1]), tolerance=t, method="affine").num_keys for t in (1e-2, 1e-4)]
    assert 8 <= keys[1] / keys[0] <= 12  # a hundredth of the error for ten times the cells


def test_a_black_box_is_estimated():
    c = pa.compile(lambda z: np.sin(3 * z[:, 0]), pa.Box([-1], [1]), tolerance=1e-3, method="affine")
    assert c.certificate.kind == "estimated" and c.error_estimate <= 1e-3


def test_f_is_asked_inside_only_and_affine_functions_are_exact():
    asked = []

    def f(z):
        asked.append(z.copy())
        return 2 * z[:, 0] - 3 * z[:, 1]

    box = pa.Box([0.0, 1.0], [1.0, 3.0])
    grid = pa.ProductGrid.uniform(box, [3, 2])
    values, slopes = affine_cells(make_target(f, box), grid)
    assert box.contains(np.concatenate(asked)).all()
    assert np.allclose(slopes[:, 0], [2, -3]) and np.allclose(values[:, 0], 2 * 0.5 - 3 * 2.0)


@pytest.mark.parametrize("what", ["values", "value_slopes"])
def test_a_changed_cell_is_noticed(what):
    """Negative control: the re-check finds the cell again, and the attack too."""
    c = pa.compile(SMOOTH, SQUARE, tolerance=2e-2, method="affine")
    with torch.no_grad():
        getattr(c.head, what)[c.num_keys // 2] += 1.0
    failed = {check.name for check in pa.recheck(c) if not check.holds}
    assert "approximation" in failed
    assert c.attack(samples=20000, seed=1).error > c.certificate.error_bound


def test_leaving_the_overlap_out_would_be_wrong():
    """Negative control: at a low sharpness neighbours enter, and only the term beyond the overlap keeps the claim true."""
    plan = pa.plan("exp(3*x0)", pa.Box([-1], [1]), tolerance=0.5, method="affine")
    soft = replace(plan.draft, rates=tuple(r * 2 / 4096 for r in plan.draft.rates))
    built = plan.maker.build(replace(plan, draft=soft))
    c = replace(pa.build(plan), head=built.head, certificate=built.certificate)
    seen = c.attack(samples=20000, seed=2).error
    assert c.certificate.terms[0].inputs["cells"] < seen <= c.error_bound


def test_layers_carry_affine_values():
    c = pa.compile("sin(x0)*x1", SQUARE, tolerance=0.1, method="affine")
    z = torch.rand(20, 2, dtype=torch.float64) * 2 - 1
    assert (c.layers("indexed")(z) - c.head(z)).abs().max() < 1e-9
    with pytest.raises(pa.PartitaError):
        c.head.as_attention()
    assert math.isfinite(c.certificate.facts["largest_value"])
