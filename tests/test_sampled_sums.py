"""Black boxes that are sums of functions of one or two variables: found by sampling, estimated, and refused with the reason."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

import partita as pa
from partita.errors import NonFiniteValueError, ToleranceError
from partita.functions.target import make_target
from partita.heads import AttentionNetwork
from partita.search.interactions import SumOfTerms, represented


class Box:
    """A function of rows that cannot be traced, and how many rows it was asked for."""

    def __init__(self, rows) -> None:
        self.rows, self.count = rows, 0

    def __call__(self, x):
        x = np.frombuffer(np.ascontiguousarray(x, dtype=np.float64).tobytes()).reshape(np.shape(x))
        self.count += len(x)
        return self.rows(x)


def cube(m: int) -> pa.Box:
    return pa.Box([-1.0] * m, [1.0] * m)


def additive(x):
    return np.sin(3 * x[:, 0]) + np.exp(x[:, 1]) + x[:, 2] ** 2 + np.cos(x[:, 3]) + np.tanh(x[:, 4]) + 1 / (3 + x[:, 5])


def with_pair(x):
    return np.sin(2 * x[:, 1] * x[:, 3]) + np.exp(x[:, 0]) + x[:, 2] ** 2


def rotated(x):
    return np.sin(x[:, 0] + x[:, 1]) + x[:, 2] ** 2 + np.exp(x[:, 3])


def three_way(x):
    return x[:, 0] * x[:, 1] * x[:, 2] + x[:, 3] ** 2


def two_outputs(x):
    return np.stack([np.sin(x[:, 0]) + x[:, 1], np.exp(x[:, 2]) + x[:, 3] ** 2], axis=1)


def largest_error(c: pa.Compiled, rows, m: int) -> float:
    x = np.random.default_rng(5).uniform(-1, 1, (4000, m))
    with torch.no_grad():
        got = c.head.evaluate(torch.from_numpy(x).to(c.head.dtype)).double().numpy()
    return float(np.abs(got - rows(x).reshape(got.shape)).max())


def reads(c: pa.Compiled) -> set[tuple[int, ...]]:
    """The variables that each head reads."""
    groups = [group for layer in c.head.wiring.layers for group in layer]
    return {tuple(int(i) for i in group.reads.chosen) for group in groups}


def found_in(rows, m: int, tolerance: float = 1e-4) -> SumOfTerms | str:
    return represented(make_target(Box(rows), cube(m)), cube(m), tolerance)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_an_additive_black_box_becomes_heads(dtype: torch.dtype) -> None:
    f = Box(additive)
    c = pa.compile(f, cube(6), tolerance=1e-3, dtype=dtype)
    assert c.certificate.kind == "estimated" and c.certificate.error_bound == math.inf
    assert isinstance(c.head, AttentionNetwork) and c.head.num_layers == 1
    assert reads(c) == {(i,) for i in range(6)}
    assert largest_error(c, additive, 6) <= 1e-3
    assert c.certificate.error >= 0.3 * largest_error(c, additive, 6)  # the estimate is about what is seen elsewhere
    assert f.count <= 1500 and "nothing is proved" in c.explain()


def test_every_evaluation_is_counted() -> None:
    f = Box(additive)
    c = pa.compile(f, cube(6), tolerance=1e-3, method="heads")
    assert f.count <= c.target.calls.rows <= f.count + 2  # tracing was tried with two rows
    limited = Box(additive)
    with pytest.warns(pa.errors.ToleranceMissedWarning):
        pa.compile(limited, cube(6), tolerance=1e-3, max_evaluations=100)
    assert limited.count <= 100


def test_many_variables_cost_few_evaluations() -> None:
    rates = 1 + np.arange(40) / 30

    def rows(x):
        return np.sin(rates * x + np.arange(40) / 7).sum(axis=1)

    f = Box(rows)
    c = pa.compile(f, cube(40), tolerance=1e-2)
    assert isinstance(c.head, AttentionNetwork) and len(c.head.heads) == 40
    assert largest_error(c, rows, 40) <= 1e-2 and f.count <= 4000
    assert "not looked for" in c.report()  # one head on a grid of 2^40 keys or more


def test_a_declared_slope_still_gives_the_stronger_claim() -> None:
    """With a slope declared, one hard head has a proved claim; a smaller network with an estimate does not replace it."""
    c = pa.compile(Box(lambda x: np.sin(x / 8).sum(axis=1)), cube(4), tolerance=0.2, lipschitz=0.25)
    assert c.certificate.kind == "proved_given"


@pytest.mark.parametrize(
    ("rows", "pairs", "singles"),
    [(with_pair, {(1, 3)}, {(0,), (2,)}), (rotated, {(0, 1)}, {(2,), (3,)})],
)
def test_pairs_that_interact_are_found(rows, pairs, singles) -> None:
    found = found_in(rows, 4)
    assert isinstance(found, SumOfTerms) and set(found.variables) == pairs | singles
    x = np.random.default_rng(0).uniform(-1, 1, (50, 4))
    assert np.abs(found(x)[:, 0] - rows(x)).max() <= 1e-13
    c = pa.compile(Box(rows), cube(4), tolerance=1e-3, method="heads")
    assert c.certificate.kind == "estimated" and reads(c) == pairs | singles
    assert largest_error(c, rows, 4) <= 1e-3


def test_overlapping_pairs_add_up() -> None:
    def rows(x):
        return np.sin(x[:, 0] * x[:, 1]) + np.exp(x[:, 1] * x[:, 2]) + x[:, 0] * x[:, 2] + x[:, 1] + x[:, 3] ** 3

    found = found_in(rows, 4)
    assert isinstance(found, SumOfTerms) and set(found.variables) == {(0, 1), (0, 2), (1, 2), (3,)}
    x = np.random.default_rng(0).uniform(-1, 1, (50, 4))
    assert np.abs(found(x)[:, 0] - rows(x)).max() <= 1e-13


def test_three_variables_that_interact_are_refused() -> None:
    with pytest.raises(ToleranceError, match=r"three or more variables interact: .* off by 0"):
        pa.compile(Box(three_way), cube(4), tolerance=1e-3, method="heads")
    c = pa.compile(Box(three_way), cube(4), tolerance=1e-2)  # another method has it
    assert not isinstance(c.head, AttentionNetwork) and "three or more variables interact" in c.report()
    found = found_in(lambda x: additive(x) + 1e-9 * x[:, 0] * x[:, 1] * x[:, 2], 6)
    assert isinstance(found, SumOfTerms)  # within the tolerance it is none


def test_too_many_pairs_are_refused() -> None:
    with pytest.raises(ToleranceError, match="45 pairs of variables interact; up to 24"):
        pa.compile(Box(lambda x: x.sum(axis=1) ** 2), cube(10), tolerance=1e-3, method="heads")


def test_several_outputs() -> None:
    c = pa.compile(Box(two_outputs), cube(4), tolerance=1e-3, method="heads")
    assert c.certificate.kind == "estimated" and c.head.output_shape == (2,)
    assert largest_error(c, two_outputs, 4) <= 1e-3
    assert len(c.head.heads) == 4  # terms that an output does not have need no head


def test_constants_need_no_head() -> None:
    c = pa.compile(Box(lambda x: np.sin(2 * x[:, 3]) + 5), cube(6), tolerance=1e-3, method="heads")
    assert reads(c) == {(3,)} and largest_error(c, lambda x: np.sin(2 * x[:, 3]) + 5, 6) <= 1e-3
    with pytest.raises(ToleranceError, match="f looks constant"):
        pa.compile(Box(lambda x: np.full(len(x), 3.0)), cube(6), tolerance=1e-3, method="heads")
    c = pa.compile(Box(lambda x: np.full(len(x), 3.0)), cube(6), tolerance=1e-3)
    assert c.num_keys == 1 and largest_error(c, lambda x: np.full(len(x), 3.0), 6) <= 1e-12


def test_what_stands_in_the_way_is_said() -> None:
    def jump(x):
        return (x[:, 0] > 0.1) + x[:, 1]

    with pytest.raises(
        ToleranceError, match=r"the term in x0 may take 0\.00045 of the tolerance, and no head is that close"
    ):
        pa.compile(Box(jump), cube(2), tolerance=1e-3, method="heads")
    with pytest.raises(ToleranceError, match="below what values of f are rounded by"):
        pa.compile(Box(additive), cube(6), tolerance=1e-14, method="heads")
    with pytest.raises(ToleranceError, match="needs 6 heads in a layer; max_heads allows 3"):
        pa.compile(Box(additive), cube(6), tolerance=1e-3, method="heads", max_heads=3)


@pytest.mark.filterwarnings("ignore:invalid value")
def test_values_that_are_not_finite() -> None:
    with pytest.raises(NonFiniteValueError, match="NaN or infinite"):
        pa.compile(Box(lambda x: np.sqrt(x[:, 0]) + x[:, 1]), cube(3), tolerance=1e-3, method="heads")


def test_a_rare_interaction_is_never_called_proved() -> None:
    """Random points miss a bump in a corner: the claim is an estimate, and the attack finds the bump."""

    def rows(x):
        return x.sum(axis=1) + 5 * np.exp(-200 * ((x - 0.9) ** 2).sum(axis=1))

    c = pa.compile(Box(rows), cube(6), tolerance=1e-2, method="heads")
    assert c.certificate.kind == "estimated" and c.certificate.error_bound == math.inf
    assert pa.attack(c).error > 1.0


def test_an_ordinary_miss_is_found_by_the_estimate() -> None:
    """A kink along a corner that few mixed differences see: the finished head is compared with f there, and refused."""

    def rows(x):
        return np.sin(x).sum(axis=1) + 3 * np.maximum(x[:, 0] + x[:, 1] - 1.6, 0)

    assert isinstance(found_in(rows, 6), SumOfTerms)
    with pytest.raises(ToleranceError, match="at fresh points, above the tolerance"):
        pa.compile(Box(rows), cube(6), tolerance=1e-2, method="heads")
