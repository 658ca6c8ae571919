"""Convex functions as maxima of planes: sizes, signs, and that the bound is not about convexity."""

import numpy as np
import pytest
import torch
from dense import Cells

import partita as pa
from partita.errors import PartitaError
from partita.functions.target import make_target
from partita.search.tangent_planes import Samples, bending, fewest_planes

LINE, SQUARE = pa.Box([-1], [1]), pa.Box([-1, -1], [1, 1])


@pytest.mark.parametrize(
    ("text", "box", "tolerance", "most"),
    [
        ("x0^2", LINE, 0.01, 8),
        ("exp(x0)", LINE, 0.01, 6),
        ("abs(x0) + x0^2", LINE, 1e-3, 24),
        ("0 - x0^2 - abs(x0 - 0.2)", LINE, 0.01, 9),
        ("log(exp(x0) + exp(x1))", SQUARE, 0.03, 9),
        ("x0^2 + x1^2", SQUARE, 0.1, 20),
        ("2*x0 - 1", LINE, 0.1, 1),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_planes_are_few_and_the_bound_holds(text, box, tolerance, most, dtype):
    c = pa.compile(text, box, tolerance=tolerance, method="convex", dtype=dtype)
    points = np.concatenate([box.sample(3000, np.random.default_rng(0)), box.corners(4)])
    with torch.no_grad():
        ran = c.head.evaluate(torch.from_numpy(points).to(dtype)).double().numpy()
    held = Cells.of(c.head.state_dict()).in_floats(points)
    error = max(np.abs(a - c.target(points)).max() for a in (ran, held))
    assert error <= c.error_bound <= tolerance and c.num_keys <= most
    assert c.certificate.kind == "proved" and c.certificate.theorem == "convex-planes"


def test_scores_are_the_values_up_to_the_temperature():
    """What makes it a soft maximum: differences of scores are R times differences of values."""
    head = pa.compile("x0^2", LINE, tolerance=0.01, method="convex").head
    slopes = head.value_slopes.numpy()[:, 0, 0]
    scores = float(head.inverse_temperature) * head.centers.numpy()[:, 0]
    rate = np.ptp(scores) / np.ptp(slopes)
    assert rate > 0 and np.allclose(np.diff(scores), rate * np.diff(slopes), rtol=1e-9, atol=1e-9 * np.ptp(scores))


def test_chords_on_a_line_are_as_few_as_there_can_be():
    """x² on [−1, 1]: on an interval of length ℓ no affine function is closer than ℓ²/8, so 2/√(8ε) of them are needed."""
    samples = Samples.of(make_target("x0^2", LINE), 1)
    for level in (0.021, 1e-3):
        planes = fewest_planes(samples, level, 1000)
        assert len(planes) == int(np.ceil(2 / np.sqrt(8 * level))) and planes.error <= level
    assert fewest_planes(samples, 1e-3, 5) is None


@pytest.mark.parametrize("text", ["sin(3*x0)", "x0^3", "sin(x0)"])
def test_what_is_neither_convex_nor_concave_is_refused(text):
    with pytest.raises(PartitaError, match="neither convex nor concave"):
        pa.compile(text, LINE, tolerance=0.01, method="convex")


def test_a_small_bump_between_the_samples_is_not_believed():
    """Negative control: convex wherever it was sampled, but not convex. The proof finds the bump, or the head has it."""
    text = "x0^2 + 0.05*exp(0 - 1e12*(x0 - 0.123456789)^2)"
    assert bending(make_target(text, LINE)) == 1
    try:
        c = pa.compile(text, LINE, tolerance=0.02, method="convex")
    except PartitaError:
        return
    at = np.array([[0.123456789]])
    assert abs(float(c.head.evaluate(torch.from_numpy(at))) - float(c.target(at)[0, 0])) <= c.error_bound


def test_it_is_reached_by_auto_where_it_is_smallest():
    c = pa.compile("abs(x0) + x0^2", LINE, tolerance=1e-3)
    assert c.candidates[0].method == "convex"
    others = [row.parameters for row in c.candidates[1:] if row.kind == "proved" and row.parameters]
    assert all(c.num_parameters <= p for p in others)
    pair = pa.compile("k0^2 + q0^2", (LINE, LINE), tolerance=0.1)
    assert "convex" in pair.report() and pair.candidates[0].method != "convex"
