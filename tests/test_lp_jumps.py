"""The L_p bound near jumps: above the error measured by quadrature, and not far above it."""

import numpy as np
import pytest
import torch
from dense import Cells

import partita as pa
from partita.proofs import center_values

LINE, SQUARE = pa.Box([-1], [1]), pa.Box([-1, -1], [1, 1])
FAR = pa.Box([1000, 1000], [1001, 1001])
CASES = [
    ("sign(k0 - q0)", (LINE, LINE), 1, 0.3, {}, 1.3),
    ("sign(k0 - q0)", (LINE, LINE), 2, 0.6, {}, 1.3),
    ("sign(x0 - x1)", SQUARE, 1, 0.3, {"dtype": torch.float32}, 1.3),
    ("sign(x0 - x1)", FAR, 1, 0.2, {}, 1.3),
    ("sign(x0 - x1)", SQUARE, 1, 0.5, {"sharpness": 8.0}, 1.5),
    ("2*sign(x0 - 0.1), sign(x1 + x0)", SQUARE, 1, 2.0, {}, 2.0),
    ("step(x0^2 + x1^2 - 0.5)", SQUARE, 1, 0.4, {}, 2.0),
    ("step(x0 - 0.3) + x0", LINE, 1.5, 0.2, {}, 2.0),
    ("step(x0 + 0.4) + step(x0 - 0.5)", LINE, 1, 0.1, {}, 2.0),
]


def measured(c: pa.Compiled, p: float) -> float:
    """The L_p error by the midpoint rule, of the stored tensors as one softmax: no code of the library."""
    box, cells = c.target.box, Cells.of(c.head.state_dict())
    n = 20_011 if box.dimension == 1 else 241
    axes = [a + (b - a) * (np.arange(n) + 0.5) / n for a, b in zip(box.lo.ravel(), box.hi.ravel())]
    points = np.stack([a.ravel() for a in np.meshgrid(*axes, indexing="ij")], axis=1)
    off = np.abs(cells.in_floats(points) - c.target(points)) ** p
    return float(off.sum(axis=1).mean() * box.volume) ** (1 / p)


@pytest.mark.parametrize(
    ("text", "domain", "p", "tolerance", "options", "loose"), CASES, ids=[str(c[:3]) for c in CASES]
)
def test_the_bound_is_above_the_error_and_close_to_it(text, domain, p, tolerance, options, loose):
    c = pa.compile(text, domain, tolerance=tolerance, norm=p, method="hard", **options)
    error = measured(c, p)
    assert error <= c.error_bound <= tolerance
    assert c.error_bound <= loose * error
    assert all(check.holds for check in pa.recheck(c))


def test_weights_that_are_too_small_are_noticed(monkeypatch):
    """Negative control: half of the weights make a bound that quadrature refutes."""
    of = center_values._AxisParts.of

    def halved(*arguments):
        parts = of(*arguments)
        return center_values._AxisParts(parts.lo, parts.hi, 0.5 * parts.mass)

    honest = pa.compile("sign(x0 - x1)", SQUARE, tolerance=0.3, norm=1, method="hard")
    monkeypatch.setattr(center_values._AxisParts, "of", staticmethod(halved))
    facts = center_values.GridFacts.of(honest.head, SQUARE)
    known = pa.plan("sign(x0 - x1)", SQUARE, tolerance=0.3, norm=1, method="hard").knowledge.known
    claimed = sum(t.value for t in center_values.grid_terms(facts, known, 1.0))
    assert claimed < measured(honest, 1)


def test_values_on_the_wrong_side_are_seen():
    """Control: the integral is that of the stored values, so a head with changed values has another bound."""
    c = pa.compile("sign(x0 - x1)", SQUARE, tolerance=0.3, norm=1, method="hard")
    known = pa.plan("sign(x0 - x1)", SQUARE, tolerance=0.3, norm=1, method="hard").knowledge.known
    honest = center_values.grid_terms(center_values.GridFacts.of(c.head, SQUARE), known, 1.0)
    c.head.values.neg_()
    turned = center_values.grid_terms(center_values.GridFacts.of(c.head, SQUARE), known, 1.0)
    assert sum(t.value for t in turned) > 1.5 * sum(t.value for t in honest)


def test_few_samples_beside_a_jump_do_not_refute_a_proof():
    """Four of 4,096 points near the jump would be an error of twice the true one."""
    c = pa.compile("sign(x0)", pa.Box([-1], [1]), tolerance=0.01, norm=1)
    assert c.certificate.kind == "proved" and c.error_bound <= 0.01


def test_cells_beside_a_jump_are_integrated_in_parts_of_any_size(monkeypatch):
    """Only the centers in use are tabulated, so many or few at once."""
    c = pa.compile("step(x0 - x1) + x0", SQUARE, tolerance=0.5, norm=2, method="hard")
    monkeypatch.setattr(center_values, "_SMALL_BOXES_AT_ONCE", 1)
    facts = center_values.GridFacts.of(c.head, SQUARE, c.certificate.model["value_error"])
    known = pa.plan("step(x0 - x1) + x0", SQUARE, tolerance=0.5, norm=2, method="hard").knowledge.known
    again = center_values.grid_terms(facts, known, 2.0)
    for stated, found in zip(c.certificate.terms, again):
        assert found.value == pytest.approx(stated.value, rel=1e-9)
