"""Gradient descent by attention: against exact gradient descent at every step, and against scikit-learn at the end."""

from functools import cache

import numpy as np
import pytest
import torch
from sklearn.linear_model import LinearRegression, LogisticRegression, Ridge
from traced import ALLOWED, operations, strangers, symbolic_operations

import partita as pa
from partita.arithmetic.interval import Interval
from partita.compiler.in_context import GradientDescent
from partita.errors import (
    DomainError,
    ExpressionError,
    NotContinuousError,
    OutsideDomainError,
    ShapeError,
    UnsupportedError,
)
from partita.networks import descent_attention
from partita.networks.losses import loss_slope

X, W = pa.Box([-1] * 3, [1] * 3), pa.Box([-3] * 3, [3] * 3)
REAL, LABELS = pa.Box([-2], [2]), pa.Box([0], [1])
TRUTH = np.array([1.0, -0.5, 0.3])
HUBER = "where(abs(r) - 1, abs(r) - 0.5, 0.5*r^2)"
LOSSES = {
    "squared": (REAL, 0.0),
    "ridge": (REAL, 0.1),
    "logistic": (LABELS, 0.02),
    "log(cosh(r))": (REAL, 0.0),
    "sqrt(1 + (s - y)^2)": (REAL, 0.01),
    "exp(s/3) - s*y": (REAL, 0.0),
    "log(1 + exp(s)) - y*s": (LABELS, 0.02),
    HUBER: (REAL, 0.05),
}


def prompt(examples: int, y_box: pa.Box, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    x = rng.uniform(-1, 1, size=(examples, 3))
    line = x @ TRUTH
    if y_box is LABELS:
        y = (rng.random(examples) < 1 / (1 + np.exp(-4 * line))).astype(float)
    else:
        y = (line + 0.1 * rng.standard_normal(examples)).clip(-2, 2)
    return np.column_stack([x, y]).astype(np.float32).astype(np.float64)


@cache
def descent(loss: str, steps: int, step_size: float = 0.5, **options):
    y_box, ridge = LOSSES[loss]
    return pa.in_context.gradient_descent(loss, steps, step_size, x=X, y=y_box, w=W, ridge=ridge, **options), y_box


def slow_descent(loss: str, examples: np.ndarray, steps: int, step_size: float, ridge: float) -> np.ndarray:
    """Gradient descent in plain Python, one example at a time, with slopes by hand."""
    slopes = {
        "squared": lambda s, y: s - y,
        "ridge": lambda s, y: s - y,
        "logistic": lambda s, y: 1 / (1 + np.exp(-s)) - y,
        "log(cosh(r))": lambda s, y: np.tanh(s - y),
        "sqrt(1 + (s - y)^2)": lambda s, y: (s - y) / np.sqrt(1 + (s - y) ** 2),
        "log(1 + exp(s)) - y*s": lambda s, y: 1 / (1 + np.exp(-s)) - y,
        "exp(s/3) - s*y": lambda s, y: np.exp(s / 3) / 3 - y,
        HUBER: lambda s, y: np.clip(s - y, -1, 1),
    }
    w = np.zeros(3)
    path = [w]
    for _ in range(steps):
        gradient = sum(slopes[loss](x @ w, y) * x for x, y in zip(examples[:, :3], examples[:, 3])) / len(examples)
        w = w - step_size * (gradient + ridge * w)
        path.append(w)
    return np.stack(path)


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("examples", [10, 300])
def test_every_step_is_within_its_bound(loss, examples):
    gd, y_box = descent(loss, 12)
    data = prompt(examples, y_box)
    exact = slow_descent(loss, data, 12, 0.5, LOSSES[loss][1])
    attained = gd.trajectory(data).numpy()
    drift = np.linalg.norm(attained - exact, axis=1)
    bounds = gd.error_bounds_at(data)
    assert np.allclose(gd.exact(data), exact, atol=1e-12)
    assert (drift <= bounds).all() and bounds[-1] <= gd.error_bound_for(examples) * (1 + 1e-9)
    assert np.linalg.norm(attained[-1] - attained[0]) > 0.1  # it does move
    assert gd.error_bound_for(examples) < 1  # and the bound says something
    wrong = slow_descent(loss, data, 12, 0.5 * 1.05, LOSSES[loss][1])
    assert (np.linalg.norm(attained - wrong, axis=1) > bounds)[
        1:
    ].any()  # negative control: another step size is told apart


def test_the_old_name_of_the_bound_works_and_warns():
    gd, _ = descent("squared", 12)
    with pytest.warns(DeprecationWarning, match="GradientDescent.error_bound is now GradientDescent.error_bound_for"):
        assert gd.error_bound(examples=5) == gd.error_bound_for(5)


@pytest.mark.parametrize("examples", [10, 1000, 10_000])
def test_squared_loss_to_six_digits_after_one_step_and_four_after_a_hundred(examples):
    gd, _ = descent("squared", 100)
    data = prompt(examples, REAL, seed=examples)
    attained, exact = gd.trajectory(data).numpy(), gd.exact(data)
    relative = np.linalg.norm(attained - exact, axis=1)[1:] / np.linalg.norm(exact, axis=1)[1:]
    assert relative[0] <= 1e-6
    assert relative[-1] <= 1e-4


@pytest.mark.parametrize(
    ("loss", "steps", "step_size"), [("squared", 60, 2.0), ("ridge", 60, 2.0), ("logistic", 250, 8.0)]
)
def test_the_end_is_scikit_learns_optimum(loss, steps, step_size):
    gd, y_box = descent(loss, steps, step_size)
    data = prompt(400, y_box)
    x, y, ridge = data[:, :3], data[:, 3], LOSSES[loss][1]
    if loss == "squared":
        optimum = LinearRegression(fit_intercept=False).fit(x, y).coef_
    elif loss == "ridge":
        optimum = Ridge(alpha=ridge * len(x), fit_intercept=False, tol=1e-12).fit(x, y).coef_
    else:
        fitted = LogisticRegression(C=1 / (ridge * len(x)), fit_intercept=False, tol=1e-12, max_iter=1000).fit(x, y)
        optimum = fitted.coef_[0]
    attained = gd(torch.from_numpy(data)).numpy()
    assert np.abs(attained - optimum).max() < 1e-5
    assert np.abs(gd.trajectory(data)[1].numpy() - optimum).max() > 1e-2  # negative control: one step is not enough


@pytest.mark.parametrize("loss", ["squared", "logistic", "log(cosh(r))", "sqrt(1 + (s - y)^2)"])
def test_the_graph_is_products_additions_and_softmax(loss):
    built, y_box = descent(loss, 12)
    gd = GradientDescent(built.layer, built.slope, built.facts, (X, y_box, W), steps=2)
    data = torch.from_numpy(prompt(7, y_box))[None]
    assert strangers(gd, data) == set()
    assert operations(gd, data)["_softmax"] == (2 if loss == "squared" else 4)
    assert set(symbolic_operations(gd)) <= ALLOWED
    assert strangers(lambda z: gd(z) * gd(z), data) == {"mul"}  # negative control


def test_one_network_serves_prompts_of_any_length_and_batches():
    gd, _ = descent("squared", 4)
    for examples in (1, 3, 50):
        data = np.stack([prompt(examples, REAL, seed=k) for k in range(2)])
        batch = gd(torch.from_numpy(data)).numpy()
        assert np.allclose(batch, [gd(torch.from_numpy(row)).numpy() for row in data], atol=1e-12)
    order = np.random.default_rng(0).permutation(50)
    assert np.allclose(gd(torch.from_numpy(data[0][order])), batch[0], atol=1e-9)  # examples have no order


def test_the_step_error_is_of_second_order_in_epsilon():
    data, errors = prompt(40, REAL), []
    for epsilon in (0.4, 0.2, 0.1):
        gd, _ = descent("squared", 1, epsilon=epsilon)
        errors.append(np.linalg.norm(gd.trajectory(data).numpy()[1] - gd.exact(data)[1]))
        assert errors[-1] <= gd.error_bounds_at(data)[1] <= 20 * errors[-1]
    slope = np.polyfit(np.log([0.4, 0.2, 0.1]), np.log(errors), 1)[0]
    assert abs(slope - 2) < 0.1


def test_one_example_attains_the_formula():
    """n = 1: tanh(εr)/ε instead of r; a tenth of the bound's leading term would be false."""
    gd = pa.in_context.gradient_descent(
        "squared", 1, 1.0, x=pa.Box([-1], [1]), y=pa.Box([-1], [1]), w=pa.Box([-2], [2]), epsilon=0.3
    )
    data = np.array([[1.0, 1.0]])
    error = np.linalg.norm(gd.trajectory(data).numpy()[1] - gd.exact(data)[1])
    assert abs(error - (1 - np.tanh(0.3) / 0.3)) < 1e-12
    assert error <= gd.error_bounds_at(data)[1] <= 2.2 * error


def test_a_squared_step_is_a_plain_multihead_attention():
    gd, _ = descent("squared", 12)
    attention, data = descent_attention(gd), prompt(20, REAL)
    tokens = gd.layer.mirrored(torch.from_numpy(data)[None])
    w = gd.trajectory(data)
    state = torch.cat([w[3], torch.ones(1, dtype=torch.float64)])[None, None]
    step = w[3] + attention(state, tokens, tokens, need_weights=False)[0][0, 0, :3]
    assert torch.allclose(step, w[4], rtol=0, atol=1e-10)
    assert not torch.allclose(step, w[5], rtol=0, atol=1e-4)  # negative control
    for loss in ("ridge", "logistic"):
        with pytest.raises(UnsupportedError, match="single attention"):
            descent_attention(descent(loss, 12)[0])


def test_single_precision_and_another_start():
    gd, _ = descent("ridge", 30, dtype=torch.float32, initial=(0.5, 0.5, -0.5), epsilon=0.05, prompt_length=100)
    data = prompt(100, REAL)
    drift = np.linalg.norm(gd.trajectory(data).double().numpy() - gd.exact(data), axis=1)
    assert (drift <= gd.error_bounds_at(data)).all()
    assert gd.trajectory(data).dtype == torch.float32 and drift[-1] < 1e-3


def test_what_is_known_of_losses():
    s, y = Interval(-3.0, 3.0), Interval(-1.0, 1.0)
    smooth = loss_slope("log(cosh(r))", s, y, None)
    assert smooth.error <= 1e-7 and smooth.keys < 40
    assert smooth.curvature[1] >= 1.0 and smooth.largest >= np.tanh(4)
    in_both = loss_slope("log(cosh(y - s))", s, y, None)  # seen to be a function of s − y
    assert in_both.keys == smooth.keys and np.allclose(in_both.slopes, smooth.slopes, atol=1e-6)
    assert np.allclose(in_both.slopes[:, 0], -in_both.slopes[:, 1])
    kinked = loss_slope(HUBER, s, y, None)
    assert 1e-4 < kinked.error < 0.02 and kinked.curvature[0] <= 0 and kinked.curvature[1] >= 1
    assert loss_slope("squared", s, y, None).keys == 0 and loss_slope("logistic", s, Interval(0.0, 1.0), None).keys == 2


@pytest.mark.parametrize(
    ("kind", "match", "options"),
    [
        (DomainError, "steps", {"steps": 0}),
        (DomainError, "step_size", {"step_size": 0.0}),
        (DomainError, "ridge", {"ridge": -1.0}),
        (DomainError, "λ > 0", {"loss": "ridge"}),
        (DomainError, "epsilon", {"epsilon": -1.0}),
        (DomainError, "initial", {"initial": [9.0, 0.0, 0.0]}),
        (DomainError, "labels", {"loss": "logistic"}),
        (DomainError, "expected a pa.Box", {"x": ([-1], [1])}),
        (ShapeError, "have shapes", {"w": pa.Box([-1], [1])}),
        (NotContinuousError, "may jump by 2", {"loss": "abs(r)"}),
        (NotContinuousError, "may jump", {"loss": "abs(s - y)"}),
        (NotContinuousError, "may jump", {"loss": "r^4 + 0.01*abs(r - 0.1)"}),  # a small one beside steep slopes
        (NotContinuousError, "no finite bound", {"loss": "log(s + 3)"}),
        (ExpressionError, "not a function", {"loss": "hinge(s, y)"}),
        (UnsupportedError, "float16", {"dtype": torch.float16}),
    ],
)
def test_bad_descents(kind, match, options):
    given = {"loss": "squared", "steps": 3, "step_size": 0.1, "x": X, "y": REAL, "w": W} | options
    with pytest.raises(kind, match=match):
        pa.in_context.gradient_descent(given.pop("loss"), given.pop("steps"), given.pop("step_size"), **given)


def test_bad_prompts():
    gd, _ = descent("squared", 3)
    data = prompt(5, REAL)
    with pytest.raises(ShapeError, match="tokens"):
        gd(torch.from_numpy(data[:, :3]))
    with pytest.raises(ShapeError, match="prompt has shape"):
        gd(torch.from_numpy(data[0]))
    with pytest.raises(ShapeError, match="prompt has shape"):
        gd(torch.zeros(0, 4, dtype=torch.float64))
    for column in (0, 3):
        outside = data.copy()
        outside[2, column] = 5.0
        with pytest.raises(OutsideDomainError, match="declared boxes"):
            gd(torch.from_numpy(outside))
    with pytest.raises(OutsideDomainError, match="leaves its box at step"):
        pa.in_context.gradient_descent("squared", 50, 30.0, x=X, y=REAL, w=W)(torch.from_numpy(data))
    one = np.array([[1.0, 0.0, 0.0, 0.9]])
    drift, end = gd.error_bounds_at(one)[1], gd.trajectory(one)[1, 0].item()
    tight = pa.in_context.gradient_descent(
        "squared", 1, 0.5, x=X, y=REAL, w=pa.Box([-3] * 3, [end + drift / 4, 3, 3]), epsilon=gd.facts.epsilon
    )
    tight(torch.from_numpy(one))
    with pytest.raises(
        OutsideDomainError, match="declare a larger box"
    ):  # the attained iterate is inside, the exact may not be
        tight.error_bounds_at(one)


@pytest.mark.slow
def test_ten_thousand_examples_of_every_loss():
    for loss in LOSSES:
        gd, y_box = descent(loss, 10)
        data = prompt(10_000, y_box)
        drift = np.linalg.norm(gd.trajectory(data).numpy() - gd.exact(data), axis=1)
        assert (drift <= gd.error_bounds_at(data)).all()


@pytest.mark.parametrize(("x", "w", "dim"), [(3.0, 20.0, 2), (3.0, 20.0, 1), (1.0, 20.0, 2)])
def test_a_loss_over_huge_boxes_is_tabulated_or_refused(x, w, dim):
    """exp(0.3 s) over s in ±120 spans fifteen orders of magnitude; the search for a table once ended in an IndexError."""
    boxes = {"x": pa.Box([-x] * dim, [x] * dim), "y": pa.Box([-1.0], [1.0]), "w": pa.Box([-w] * dim, [w] * dim)}
    try:
        found = pa.in_context.gradient_descent("exp(0.3*s) - s*y", 3, 0.1, **boxes)
    except pa.errors.SizeError as refused:
        assert "shrink the boxes" in str(refused)
    else:
        assert np.isfinite(found.error_bound_for(10))
