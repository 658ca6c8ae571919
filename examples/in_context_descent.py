"""Gradient descent inside an attention-only network, for three losses, compared with exact descent and scikit-learn."""

from __future__ import annotations

import numpy as np
import torch
from sklearn.linear_model import LogisticRegression, Ridge

import partita as pa


def main() -> None:
    rng = np.random.default_rng(0)
    x_box, w_box = pa.Box([-1] * 4, [1] * 4), pa.Box([-4] * 4, [4] * 4)
    truth = np.array([1.0, -2.0, 0.5, 0.0])
    x = rng.uniform(-1, 1, size=(500, 4))
    line = x @ truth
    real = (line + 0.2 * rng.standard_normal(500)).clip(-4, 4)
    labels = (rng.random(500) < 1 / (1 + np.exp(-line))).astype(float)
    ridge = 0.01
    cases = [
        ("squared", pa.Box([-4], [4]), real, 2.0, Ridge(alpha=ridge * 500, fit_intercept=False)),
        ("logistic", pa.Box([0], [1]), labels, 8.0, LogisticRegression(C=1 / (ridge * 500), fit_intercept=False)),
        ("log(cosh(r))", pa.Box([-4], [4]), real, 2.0, None),
    ]
    for loss, y_box, y, step_size, reference in cases:
        gd = pa.in_context.gradient_descent(loss, 100, step_size, x=x_box, y=y_box, w=w_box, ridge=ridge)
        prompt = np.column_stack([x, y])
        attained, exact = gd.trajectory(prompt).numpy(), gd.exact(prompt)
        drift, bounds = np.linalg.norm(attained - exact, axis=1), gd.error_bounds_at(prompt)
        print(f"{loss}: {gd.slope.keys} keys per example for the slope, ε = {gd.facts.epsilon:.2g}")
        for step in (1, 10, 100):
            print(f"  step {step:>3}: drift from exact descent {drift[step]:.2g}, proved ≤ {bounds[step]:.2g}")
        print(f"  w = {np.round(attained[-1], 4).tolist()}")
        if reference is not None:
            print(f"  {type(reference).__name__}: {np.round(reference.fit(x, y).coef_.ravel(), 4).tolist()}")
        assert (drift <= bounds).all()
    gd = pa.in_context.gradient_descent("squared", 20, 1.0, x=x_box, y=pa.Box([-4], [4]), w=w_box)
    for examples in (10, 1000, 10_000):  # one network works for every length of prompt
        x = rng.uniform(-1, 1, size=(examples, 4))
        w = gd(torch.from_numpy(np.column_stack([x, x @ truth])))
        print(f"{examples:>6} examples: w = {np.round(w.numpy(), 3).tolist()} after 20 steps")


if __name__ == "__main__":
    main()
