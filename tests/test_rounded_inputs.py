"""Inputs are float64 numbers in the box; a float32 head sees them rounded, perhaps beyond the end of the box.

Each test has a head and a point whose error an unwidened proof misses. The controls take the widening away and see that it does.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

import partita as pa
from partita.arithmetic.precision import BFLOAT, DOUBLE, SINGLE, Precision
from partita.compiler.recheck import recheck
from partita.functions import regularity
from partita.functions.regularity import Known, gather, where_rounded
from partita.functions.target import Target, make_target
from partita.heads.grid_head import GridHead
from partita.proofs import cell_proof
from partita.proofs.cell_proof import CellProof
from partita.proofs.proof import Given, Proof, Proved
from partita.proofs.taylor_proof import TaylorProof

FAR = 2.0**20  # float32 numbers are an eighth apart from here on
STEP = 0.125
LO = FAR + 0.0624  # is rounded to FAR


def line(lo: float, hi: float) -> pa.Box:
    return pa.Box([lo], [hi])


def head_on(target: Target, centers: list[float], rate: float, values: list[float], slopes: list[float] | None = None):
    grid = pa.ProductGrid(target.box, (np.array(centers),))
    table = torch.tensor(values, dtype=torch.float32)[:, None]
    tilt = None if slopes is None else torch.tensor(slopes, dtype=torch.float32)[:, None, None]
    origin = None if slopes is None else torch.zeros(1, dtype=torch.float32) + FAR
    return GridHead(
        grid,
        rate,
        table,
        value_slopes=tilt,
        origin=origin,
        half_windows=1,
        input_shapes=((1,),),
        output_shape=(),
    )


def proved(proof: Proof, head: GridHead, target: Target, known: Known | None = None, **details: object) -> Proved:
    known = known or (None if target.graph is None else gather(target, norm=math.inf).known)
    return proof.prove(head, target, Given(known=known, details=details, aim=0.1, sharpen=False))


def worst(head: GridHead, target: Target) -> float:
    """The largest error at the ends, at all float32 numbers of a short box, and just below and above what rounds to others."""
    lo, hi = float(target.box.lo[0]), float(target.box.hi[0])
    numbers = np.arange(FAR - STEP, hi + STEP, STEP)
    ties = numbers + STEP / 2
    points = np.concatenate([[lo, hi], numbers, ties, np.nextafter(ties, 0), np.nextafter(ties, np.inf)])
    points = points[(points >= lo) & (points <= hi)][:, None]
    with torch.no_grad():
        out = head.evaluate(torch.from_numpy(points).to(torch.float32)).double().numpy()
    return float(np.abs(out - target(points)).max())


def step_down() -> tuple[GridHead, Target]:
    """tanh exactly, by two centers: flat in the box, and steep where its lower end is rounded to."""
    target = make_target(f"tanh(50*(x - {FAR!r}))", line(LO, FAR + 4))
    return head_on(target, [FAR - 1, FAR + 1], 50.0, [-1.0, 1.0]), target


def steep_then_flat() -> tuple[GridHead, Target]:
    """Two affine cells that follow f: one beyond the end of the box, and one inside, where f is 0."""
    target = make_target(f"max(0, 100*({LO!r} - x))", line(LO, FAR + 1))
    return head_on(target, [FAR - 0.875, FAR + 1], 1e4, [6.24, 0.0], [-100.0, 0.0]), target


CASES = [(step_down, TaylorProof()), (steep_then_flat, CellProof())]


@pytest.fixture
def no_widening(monkeypatch):
    """A function that makes the box of the target the box of its slopes, as it was."""
    return lambda: monkeypatch.setattr(regularity, "where_rounded", lambda target, precision: target)


@pytest.mark.parametrize("case, proof", CASES, ids=lambda x: getattr(x, "name", getattr(x, "__name__", "")))
def test_f_is_steeper_where_inputs_are_rounded_to(case, proof, no_widening):
    head, target = case()
    seen = worst(head, target)
    assert seen <= proved(proof, head, target).bound
    no_widening()
    assert seen > proved(proof, head, target).bound  # the control: slopes over the box alone


def test_declared_constants_hold_in_the_box_only(no_widening):
    head, target = step_down()
    declared = Known(pa.Modulus(0.5))
    assert worst(head, target) <= proved(TaylorProof(), head, target, declared).bound
    no_widening()
    assert worst(head, target) > proved(TaylorProof(), head, target, declared).bound


def test_compiled_heads_hold_where_they_were_refuted_before(no_widening):
    text, box = f"tanh(5*(x - {FAR!r}))", line(LO, FAR + 4)
    options = {"tolerance": 0.6, "dtype": torch.float32, "method": "fitted"}
    c = pa.compile(text, box, **options)
    assert isinstance(c.head, GridHead)
    assert 0.31 < worst(c.head, make_target(text, box)) <= c.certificate.error_bound
    assert all(check.holds for check in recheck(c))
    no_widening()
    with pytest.raises(pa.errors.ProofRefutedError):
        pa.compile(text, box, **options)


def test_an_f_that_ends_with_the_box_keeps_its_hard_heads():
    """√(x − 0.7) has no value at 0.69999998, which 0.7 is rounded to: values at centers do not need one, Taylor proofs do."""
    text, box = "sqrt(x - 0.7)", line(0.7, 1.7)
    c = pa.compile(text, box, tolerance=0.1, dtype=torch.float32, method="hard")
    ends = torch.tensor([[0.7], [1.7]], dtype=torch.float64)
    assert np.abs(c(ends).numpy().ravel() - [0.0, 1.0]).max() <= c.certificate.error_bound < 0.1
    target = make_target(text, box)
    head = head_on(target, [0.75], 1.0, [0.5])
    assert proved(TaylorProof(), head, target).bound == math.inf


def kinked() -> tuple[GridHead, Target]:
    """Centers at 3 and 8 eighths of a box of 11: farther from its ends than half a gap and the overlap, where f turns."""
    turn = FAR + 0.054
    target = make_target(f"abs(x - {turn!r})", line(FAR, FAR + 1.375))
    return head_on(target, [FAR + 0.375, FAR + 1.0], 1e5, [-0.054, -0.054], [1.0, 1.0]), target


def test_the_last_cells_reach_to_the_ends_of_the_box(monkeypatch):
    head, target = kinked()
    seen = worst(head, target)
    assert seen == pytest.approx(0.108, rel=1e-3)
    assert seen <= proved(CellProof(), head, target).bound

    def cut(centers, reach, axes, lo, hi):
        return np.maximum(centers - reach, lo), np.minimum(centers + reach, hi)

    monkeypatch.setattr(cell_proof, "_cell_boxes", cut)
    assert seen > proved(CellProof(), head, target).bound  # the control: half a gap and the overlap to either side


@pytest.mark.parametrize("count", [11, 21, 45])
def test_tangents_hold_where_float32_numbers_are_few(count):
    """f and its second derivative are declared in the box, and f is asked nowhere else."""
    lo, hi = LO, FAR + count * STEP

    def bent(z: np.ndarray) -> np.ndarray:
        assert ((z >= lo) & (z <= hi)).all()
        return np.cos(2 * (z[:, 0] - FAR))

    box = line(lo, hi)
    c = pa.compile(bent, box, tolerance=1.2, hessian=4.0, dtype=torch.float32, method="affine", trace=False)
    assert isinstance(c.head, GridHead)
    assert worst(c.head, make_target(bent, box, trace=False)) <= c.certificate.error_bound


@pytest.mark.parametrize("precision, dtype", [(SINGLE, torch.float32), (BFLOAT, torch.bfloat16)])
def test_rounded_inputs_lie_between_the_rounded_ends(precision: Precision, dtype: torch.dtype):
    source = np.random.default_rng(0)
    scale = 10.0 ** source.uniform(-42, 30, 400)
    ends = np.sort(source.normal(size=(2, 400)) * scale, axis=0)
    lo, hi = precision.rounded_ends(ends[0], ends[1])
    points = np.concatenate([ends, ends[0] + (ends[1] - ends[0]) * source.uniform(size=(64, 400))])
    points = np.clip(points, ends[0], ends[1])
    rounded = torch.from_numpy(points).to(torch.float32).to(dtype).double().numpy()
    assert ((rounded >= lo) & (rounded <= hi)).all() and (lo <= ends[0]).all() and (hi >= ends[1]).all()
    assert ((rounded < ends[0]) | (rounded > ends[1])).any()  # the control: the ends themselves are not enough
    off = np.abs(rounded - points).max(axis=0)
    assert all(d <= precision.moved_by(float(r), 1) for d, r in zip(off, np.abs(ends).max(axis=0)))
    assert (off > precision.value_unit * np.abs(ends).max(axis=0)).any()  # subnormal numbers


def test_boxes_that_float32_holds_are_not_widened():
    target = make_target("sqrt(x) + y", pa.Box([0, -3], [1, 0.1]))
    grown = where_rounded(target, SINGLE)
    assert grown.box.lo.tolist() == [0.0, -3.0] and grown.box.hi.tolist() == [1.0, float(np.float32(0.1))]
    assert where_rounded(target, DOUBLE) is target
    held = make_target("sqrt(x) + y", pa.Box([0, -3], [1, 0.125]))
    assert where_rounded(held, SINGLE) is held and where_rounded(held, BFLOAT) is not held


def test_disks_are_widened_with_the_box_around_them():
    disk = pa.Region("[-0.7, 0.7]^2", "x**2 + y**2 <= 0.49")
    grown = where_rounded(make_target("x*y", disk), SINGLE).box
    around = disk.bounding_box()
    assert (grown.lo <= np.minimum(around.lo, np.float32(around.lo))).all() and (grown.hi >= around.hi).all()


def test_inputs_rounded_across_a_jump_are_counted():
    """Numbers between 0.29999999702 and 0.3 are rounded across it."""
    target = make_target("sign(x - 0.3)", line(-1, 1))
    known = gather(target, norm=2.0).known
    head = head_on(target, [0.0], 1.0, [0.0])

    def rounding(known: Known) -> float:
        found = TaylorProof().prove(head, target, Given(norm=2.0, known=known, aim=2.0, sharpen=False))
        return next(t.value for t in found.terms if t.name == "input rounding")

    crossed = 2 * math.sqrt(0.3 - (float(np.float32(0.3)) - 2.0**-26))
    assert rounding(known) >= crossed > 1e-4
    assert rounding(replace(known, jumps=None)) == 0.0  # the control
