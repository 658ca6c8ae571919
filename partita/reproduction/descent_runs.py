"""Gradient descent in context: attention layers against exact steps over T steps, and against the optimum."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from scipy.optimize import minimize

from partita.compiler.in_context import gradient_descent
from partita.geometry import Box
from partita.reproduction.experiment import Experiment, Outcome, Quotation, Setup, Verdict
from partita.reproduction.table import Table, Tables

__all__ = ["EXPERIMENT", "Settings"]


@dataclass(frozen=True)
class Settings:
    """Features, examples per prompt, prompts, steps, and the steps at which rows are written."""

    dim: int = 5
    examples: int = 40
    prompts: int = 8
    steps: int = 60
    every: int = 5


_PROBLEMS = (("linear", "squared", 0.0, 0.8), ("ridge", "squared", 0.2, 0.8), ("logistic", "logistic", 0.05, 2.0))


def run(setup: Setup) -> Tables:
    """`steps`: drift from exact descent, its bound, and the distance of both from the optimum, the worst over prompts."""
    settings: Settings = setup.settings
    rows = []
    for number, (name, loss, ridge, rate) in enumerate(_PROBLEMS):
        rng = np.random.default_rng(setup.seed + number)
        x = rng.uniform(-1, 1, (settings.prompts, settings.examples, settings.dim))
        w = rng.uniform(-1, 1, (settings.prompts, 1, settings.dim))
        y = _labels((x * w).sum(axis=2), loss, rng)
        network = gradient_descent(
            loss,
            settings.steps,
            rate,
            x=Box([-1.0] * settings.dim, [1.0] * settings.dim),
            y=Box([0.0], [1.0]) if loss == "logistic" else Box([-3.0], [3.0]),
            w=Box([-8.0] * settings.dim, [8.0] * settings.dim),
            ridge=ridge,
            prompt_length=settings.examples,
        )
        prompt = np.concatenate([x, y[..., None]], axis=2)
        with torch.no_grad():
            followed = network.trajectory(torch.from_numpy(prompt)).numpy()
        exact, bounds = network.exact(prompt), np.stack([network.error_bounds_at(one) for one in prompt])
        best = np.array([_optimum(px, py, loss, ridge) for px, py in zip(x, y)])
        for step in range(0, settings.steps + 1, settings.every):
            rows.append(
                {
                    "problem": name,
                    "step": step,
                    "drift": np.linalg.norm(followed[:, step] - exact[:, step], axis=1).max(),
                    "drift_bound": bounds[:, step].max(),
                    "network_to_optimum": np.linalg.norm(followed[:, step] - best, axis=1).max(),
                    "descent_to_optimum": np.linalg.norm(exact[:, step] - best, axis=1).max(),
                }
            )
        setup.progress(number + 1, len(_PROBLEMS))
    return {"steps": Table.of(rows)}


def _labels(s: np.ndarray, loss: str, rng: np.random.Generator) -> np.ndarray:
    """Noisy values of w·x, or classes drawn with the logistic odds of 3w·x."""
    if loss == "logistic":
        out: np.ndarray = (rng.random(s.shape) < 1 / (1 + np.exp(-3 * s))).astype(float)
        return out
    return np.clip(s + 0.1 * rng.standard_normal(s.shape), -3, 3)


def _optimum(x: np.ndarray, y: np.ndarray, loss: str, ridge: float) -> np.ndarray:
    """The minimiser of the mean loss and λ|w|²/2: in closed form, or by Newton's method in scipy."""
    n, d = x.shape
    if loss == "squared":
        return np.linalg.solve(x.T @ x / n + ridge * np.eye(d), x.T @ y / n)

    def value(w: np.ndarray) -> tuple[float, np.ndarray]:
        s = x @ w
        mean = float((np.logaddexp(0, s) - y * s).mean() + ridge * w @ w / 2)
        return mean, x.T @ (1 / (1 + np.exp(-s)) - y) / n + ridge * w

    return np.asarray(minimize(value, np.zeros(d), jac=True, method="BFGS", options={"gtol": 1e-9}).x)


def verdict(tables: Tables) -> Verdict:
    """Every iterate within its bound, and the last as far from the optimum as exact descent, up to 1 % or 10⁻⁶."""
    table = tables["steps"]
    words, good = [], []
    for problem in table.distinct("problem"):
        rows = table.where(problem=problem)
        kept = bool((rows["drift"] <= rows["drift_bound"] + 1e-12).all())
        ends = rows["network_to_optimum"][-1], rows["descent_to_optimum"][-1]
        good.append(kept and abs(ends[0] - ends[1]) <= max(0.01 * ends[1], 1e-6))
        words.append(
            f"{problem}: drift after {rows['step'][-1]} steps {rows['drift'][-1]:.1e} (bound "
            f"{rows['drift_bound'][-1]:.1e}), optimum at {ends[0]:.1e} (exact descent {ends[1]:.1e})"
        )
    outcome: Outcome = "holds" if all(good) else "mixed" if any(good) else "fails"
    return Verdict(outcome, "; ".join(words) + ".", {"problems_followed": float(np.mean(good))})


def control(seed: int) -> Tables:
    """A network that drifts away from exact descent."""
    rng = np.random.default_rng(seed)
    return {
        "steps": Table.of(
            {
                "problem": problem,
                "step": step,
                "drift": 0.02 * step * rng.uniform(0.9, 1.1) + 0.01,
                "drift_bound": 1e-3,
                "network_to_optimum": 0.5,
                "descent_to_optimum": 0.9**step,
            }
            for problem in ("linear", "ridge", "logistic")
            for step in range(0, 60, 10)
        )
    }


EXPERIMENT = Experiment(
    name="in-context",
    title="Gradient descent in context",
    source="2504.15956, in-context learning",
    claim=(
        "Softmax attention simulates gradient descent on the examples in its prompt, and so fits linear, ridge and "
        "logistic regression in context. Only a summary of this paper is at hand; the quotation is from it."
    ),
    quotations=(
        Quotation(
            "The method extends to in-context learning, demonstrating attention can simulate gradient descent and approximate "
            "statistical models",
            "Key Results",
            of_summary=True,
        ),
    ),
    criterion=(
        "For each of the three problems: after every step the network is within its proved drift bound of exact "
        "gradient descent, and after the last one its distance from the optimum differs from exact descent's by at "
        "most 1 % of it (or 10⁻⁶). Holds if all, mixed if some, fails if none."
    ),
    method=(
        "Prompts of 40 examples with 5 features, 60 steps; tokens [x_i, y_i] and their mirror images, scores ε times "
        "the loss's slope. Rows hold the worst of 8 prompts. The optimum: the normal equations, or BFGS for the "
        "logistic loss."
    ),
    run=run,
    verdict=verdict,
    control=control,
    settings={
        "tiny": Settings(dim=2, examples=10, prompts=2, steps=10),
        "default": Settings(),
        "full": Settings(dim=20, examples=200, prompts=100, steps=300),
    },
    seconds={"tiny": 1, "default": 1, "full": 200},
)
