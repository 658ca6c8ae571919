"""Robustness: perturb the constructed weights; how far the output moves, and how far the score-rounding bound lets it."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch

from partita.compiler.compile import compile as compile_function
from partita.geometry import Box
from partita.heads import DotProductAttention
from partita.reproduction.experiment import Experiment, Outcome, Setup, Verdict
from partita.reproduction.statistics import log_slope
from partita.reproduction.table import Table, Tables

__all__ = ["EXPERIMENT", "Settings"]

_EXPRESSION = "sin(3*x0) + x0*cos(2*x1)"


@dataclass(frozen=True)
class Settings:
    """The heads' tolerances, relative perturbations of the keys, repetitions and points."""

    heads: tuple[tuple[str, float], ...] = (("hard", 0.2), ("tuned", 0.02), ("fitted", 1e-4))
    sizes: tuple[float, ...] = tuple(10.0 ** (-k / 2) for k in range(14, -1, -1))
    repeats: int = 5
    points: int = 2000


def run(setup: Setup) -> Tables:
    """A row per head, size and repetition: the largest change of a score, of the output, and the bound for it."""
    settings: Settings = setup.settings
    rng = np.random.default_rng(setup.seed)
    x = torch.from_numpy(rng.uniform(-1, 1, (settings.points, 2)))
    box, rows = Box([-1.0, -1.0], [1.0, 1.0]), []
    for number, (method, tolerance) in enumerate(settings.heads):
        c = compile_function(_EXPRESSION, box, tolerance=tolerance, method=method)
        plain, truth = c.head.as_attention(), torch.from_numpy(c.target(x.numpy()))[:, 0]
        for size in settings.sizes:
            for repeat in range(settings.repeats):
                moved, bound, delta, off = _perturbed(plain, x, truth, size, rng)
                rows.append(
                    {
                        "head": method,
                        "keys": c.num_keys,
                        "size": size,
                        "repeat": repeat,
                        "score_change": delta,
                        "output_change": moved,
                        "change_bound": bound,
                        "error": off,
                    }
                )
        setup.progress(number + 1, len(settings.heads))
    return {"perturbations": Table.of(rows)}


def _perturbed(
    plain: DotProductAttention, x: torch.Tensor, truth: torch.Tensor, size: float, rng: np.random.Generator
) -> tuple[float, float, float, float]:
    """Every entry of the keys times 1 + size·N(0, 1): the largest change of the output, its bound, of a score, and the error.

    `|Δnet| ≤ ½(e^{2δ} − 1)·Σ w_j|V_j − net|`, δ the largest change of a score at the point, or `tanh(δ/2)·(max V − min V)`
    if that is less.
    """
    q = plain.query(x)
    shaken = plain.key * (1 + size * torch.from_numpy(rng.standard_normal(plain.key.shape)))
    before, after = q @ plain.key.T, q @ shaken.T
    change = after - before
    delta = (change.max(dim=1).values - change.min(dim=1).values) / 2  # a common shift changes nothing
    weights, values = torch.softmax(before, dim=1), plain.value[:, 0]
    was, now = weights @ values, torch.softmax(after, dim=1) @ values
    spread = (weights * (values[None] - was[:, None]).abs()).sum(dim=1)
    wide = torch.tanh(delta / 2) * float(values.max() - values.min())
    bound = torch.minimum(0.5 * torch.expm1((2 * delta).clamp_max(600)) * spread, wide)
    rounding = 1e-12 * float(values.abs().max())
    moved = (now - was).abs()
    worst = int((moved - bound).argmax()) if bool((moved > bound + rounding).any()) else int(moved.argmax())
    return float(moved[worst]), float(bound[worst]) + rounding, float(delta.max()), float((now - truth).abs().max())


def verdict(tables: Tables) -> Verdict:
    """No output moves further than the bound; and for small perturbations the change is proportional to their size."""
    table = tables["perturbations"]
    kept = table["output_change"] <= table["change_bound"] * (1 + 1e-7)
    words, linear = [], []
    for head in table.distinct("head"):
        rows = table.where(head=head)
        small = rows.take(
            [i for i in range(len(rows)) if rows["score_change"][i] < 0.1 and rows["output_change"][i] > 1e-9]
        )
        doubled = rows["size"][rows["error"] > 2 * rows["error"][rows["size"] == rows["size"].min()].mean()]
        tells = f"{doubled.min():.0e}" if len(doubled) else "none"
        law = log_slope(small["size"], small["output_change"]) if len(set(small["size"])) > 2 else None
        if law is not None:
            linear.append(law.within(0.9, 1.1))
        words.append(
            f"{head}: exponent {law if law is not None else '–'}, error doubled from a relative perturbation of {tells}"
        )
    outcome: Outcome = "holds" if kept.all() and linear and all(linear) else "fails" if not kept.all() else "mixed"
    tight = float(np.median(table["output_change"] / table["change_bound"]))
    sentence = (
        f"{int(kept.sum())} of {len(table)} perturbed heads stay within the bound (the median uses {100 * tight:.0f} "
        "% of it); " + "; ".join(words) + "."
    )
    return Verdict(outcome, sentence, {"kept": float(kept.mean()), "tightness": tight})


def control(seed: int) -> Tables:
    """Outputs that jump by a constant however small the perturbation."""
    rng = np.random.default_rng(seed)
    return {
        "perturbations": Table.of(
            {
                "head": "hard",
                "size": s,
                "score_change": 10 * s,
                "output_change": 0.5 * rng.uniform(0.8, 1.2),
                "change_bound": math.tanh(5 * s),
                "error": 0.5,
            }
            for s in Settings().sizes
        )
    }


EXPERIMENT = Experiment(
    name="robustness",
    title="Perturbed weights",
    source="2504.19901, Theorem 4.1 (how exact its weights must be is left open)",
    claim=(
        "The construction does not hang on exact weights: the output moves continuously with them, by no more than "
        "the scores' changes allow (ours: the score-rounding bound)."
    ),
    criterion=(
        "In every perturbed head the largest change of the output is at most ½(e^{2δ} − 1)·Σ w|V − net| (or "
        "tanh(δ/2) times the values' "
        "spread), δ the largest change of a score; and while δ < 0.1 the exponent of change against size has a 95 % "
        "interval within "
        "1 ± 0.1. Fails if a bound is broken, mixed if only the exponent is off."
    ),
    method=(
        "sin 3x + x cos 2y on [−1, 1]²: hard, tuned and fitted heads as plain q, k, v; every entry of the keys "
        "multiplied by 1 + s·N(0, 1), s from 10⁻⁷ to 1."
    ),
    run=run,
    verdict=verdict,
    control=control,
    settings={
        "tiny": Settings(
            heads=(("tuned", 0.1),), sizes=tuple(10.0**-k for k in range(6, 0, -1)), repeats=2, points=200
        ),
        "default": Settings(),
        "full": Settings(repeats=50, points=20_000),
    },
    seconds={"tiny": 1, "default": 12, "full": 600},
)
