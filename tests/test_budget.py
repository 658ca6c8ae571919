"""Budgets: work stops, and what it says then is still true."""

import numpy as np
import pytest

import partita as pa
from partita.compiler.clock import Clock
from partita.errors import BudgetSpentError, UnsupportedError
from partita.proofs.bisection import prove_boxes
from partita.proofs.grid_proof import prove_grid
from partita.proofs.taylor_proof import soft_grid_of

SQUARE = pa.Box([-1, -1], [1, 1])


def spent(*_):
    raise BudgetSpentError("the budget was spent")


def test_a_proof_that_is_stopped_says_something_true():
    c = pa.compile("sin(3*x0) + x0*cos(2*x1)", SQUARE, tolerance=1e-3, method="fitted")
    grid = soft_grid_of(c.head)
    corners = SQUARE.lo.ravel(), SQUARE.hi.ravel()
    whole = prove_grid(grid, c.target.graph, *corners, goal=1e-3)
    assert whole.settled
    cut = prove_grid(grid, c.target.graph, *corners, goal=1e-12, max_boxes=1)
    assert not cut.settled and whole.least <= cut.bound < 100
    assert prove_grid(grid, c.target.graph, *corners, goal=1e-3, progress=spent).bound >= whole.least


def test_a_bisection_that_is_stopped_says_something_true():
    c = pa.compile("abs(x0^2 + x1 - 0.2)", SQUARE, tolerance=0.1, method="adaptive")
    cut = prove_boxes(c.head, c.target.graph, SQUARE, target=0.1, progress=spent)
    assert cut.bound > 0.1 and np.isfinite(cut.bound) and cut.boxes < 100


def test_compile_stops():
    with pytest.raises(BudgetSpentError, match="budget of 1e-09 seconds"):
        pa.compile("exp(sin(x0*5)) + x1^2", SQUARE, tolerance=1e-6, budget=1e-9, method="fitted")
    assert pa.compile("x0 + x1", SQUARE, tolerance=1e-6, budget=600).certificate.kind == "proved"
    for bad in (0, -1, float("nan"), float("inf")):
        with pytest.raises(UnsupportedError, match="seconds"):
            pa.compile("x0", pa.Box([0], [1]), tolerance=0.1, budget=bad)


def test_the_clock_passes_progress_on():
    seen = []
    report = Clock(1000.0, lambda *what: seen.append(what)).until(0.5)
    report("proof", 1, 2)
    assert seen == [("proof", 1, 2)] and Clock(None, None).until(0.5) is None
    with pytest.raises(BudgetSpentError, match="proof"):
        Clock(1e-9, None).until(1.0)("proof", 1, 2)
