"""Plans of hard heads: the fewest keys, known before anything is built. What is planned is built: test_method_laws.py."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import partita as pa
from partita.errors import SizeError
from partita.methods.method import size_text


def test_planning_allocates_nothing_large_and_builds_nothing():
    asked = []

    def f(z):
        asked.append(len(z))
        return z[:, 0]

    planned = pa.plan(f, pa.Box([0, 0], [1, 1]), method="hard", tolerance=1e-4, lipschitz=1.0)
    assert planned.keys > 10**7 and sum(asked) < 15_000  # the trace is compared with f


@settings(max_examples=60, derandomize=True, deadline=None)
@given(
    m=st.integers(1, 5),
    tolerance=st.floats(0.02, 3),
    sides=st.lists(st.floats(0.01, 100), min_size=5, max_size=5),
    constants=st.lists(st.floats(0, 5), min_size=5, max_size=5),
)
def test_no_axis_can_lose_a_cell(m, tolerance, sides, constants):
    """Fewest keys: with one cell less on any axis the rule would break (or the plan was refused for its size)."""
    box = pa.Box(np.zeros(m), np.array(sides[:m]))
    try:
        counts = pa.plan(
            lambda z: 0 * z[:, 0],
            box,
            method="hard",
            tolerance=tolerance,
            lipschitz=constants[:m],
            max_bytes=1 << 40,
            trace=False,
        ).counts
    except pa.PartitaError:
        return
    moves = np.array(constants[:m]) * np.array(sides[:m])
    assert (moves / np.array(counts)).sum() / 2 <= tolerance
    for i in range(m):
        fewer = np.array(counts)
        fewer[i] -= 1
        assert fewer[i] == 0 or (moves / fewer).sum() / 2 * 1.001 > tolerance


def test_unequal_sides_get_near_cubic_cells():
    counts = pa.plan(lambda z: z[:, 0], pa.Box([0, 0], [1, 10]), method="hard", tolerance=0.05, lipschitz=1.0).counts
    assert math.isclose(counts[1] / counts[0], 10, rel_tol=0.1)


def test_one_variable_only_needs_one_axis():
    assert pa.plan("sin(x1)", pa.Box([0, 0], [1, 1]), method="hard", tolerance=0.1).counts in ((1, 5), (1, 6))
    assert pa.plan("3 + 0*x0", pa.Box([0], [1]), method="hard", tolerance=0.1).keys == 1


def test_sharper_heads_need_no_more_keys():
    box = pa.Box([-1, -1], [1, 1])
    soft, hard = (pa.plan("x0*x1", box, method="hard", tolerance=0.01, sharpness=k).keys for k in (2.0, 64.0))
    assert soft > 1.5 * hard


def test_lp_norms_ask_for_fewer_keys_than_the_supremum_on_a_unit_cube():
    box = pa.Box([0, 0, 0], [1, 1, 1])
    keys = [
        pa.plan(lambda z: z[:, 0], box, method="hard", tolerance=0.05, lipschitz=1.0, norm=p).keys
        for p in (1, 2, 8, "inf")
    ]
    assert keys == sorted(keys) and keys[0] < keys[-1] / 3


def test_float32_halves_the_bytes():
    sizes = [
        pa.plan("x0*x1", pa.Box([0, 0], [1, 1]), method="hard", tolerance=0.05, dtype=d).bytes
        for d in (torch.float32, torch.float64)
    ]
    assert math.isclose(sizes[1] / sizes[0], 2, rel_tol=0.05)


def test_explanations_carry_the_numbers():
    text = str(pa.plan("sin(3*x0) + x0*cos(2*x1)", pa.Box([-1, -1], [1, 1]), method="hard", tolerance=0.05))
    assert (
        "12,879 keys" in text
        and "halving the tolerance multiplies the keys by about 4" in text
        and "interval arithmetic" in text
    )


def test_sizes_beyond_float64_are_written_as_powers_of_ten() -> None:
    assert size_text(10**400) == "10^388.0 TiB"
    assert size_text(1536) == "1.5 KiB"
    with pytest.raises(SizeError, match=r"10\^\d{3}"):
        pa.compile("+".join(f"sin(9*x{i})" for i in range(60)), "[-1,1]^60", tolerance=1e-9, method="hard")
