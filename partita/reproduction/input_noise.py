"""Noise against precision: heads trained on noisy inputs of a known function; from selecting to averaging?"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from partita.reproduction.experiment import Experiment, Outcome, Setup, Verdict
from partita.reproduction.function_heads import FunctionHeads
from partita.reproduction.statistics import rank_correlation
from partita.reproduction.table import Table, Tables
from partita.reproduction.temperature import plane_points

__all__ = ["EXPERIMENT", "Settings"]


@dataclass(frozen=True)
class Settings:
    """Noise levels, heads per level, keys, Adam steps and points per step."""

    levels: tuple[float, ...] = (0.0, 0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.6, 0.72)
    seeds: int = 5
    keys: int = 32
    steps: int = 1500
    points: int = 256


def _function(x: torch.Tensor) -> torch.Tensor:
    """A smooth checkerboard: cells that a head can select."""
    return torch.tanh(4 * torch.sin(3 * x[..., 0])) * torch.tanh(4 * torch.sin(3 * x[..., 1] + 1))


def run(setup: Setup) -> Tables:
    """`heads`: norms, entropy (on inputs noised as in training, and clean), the scores' spread and the error of each head."""
    settings: Settings = setup.settings
    rng = np.random.default_rng(setup.seed)
    levels = [level for level in settings.levels for _ in range(settings.seeds)]
    seeds = [seed for _ in settings.levels for seed in range(settings.seeds)]
    start = FunctionHeads.random(settings.seeds, settings.keys, 2, width=3, seed=setup.seed, scale=2.0)
    heads = FunctionHeads(*(p[seeds] for p in (start.w_k, start.w_q, start.values)))
    sigma = torch.tensor(levels)[:, None, None]

    def batch(_step: int) -> tuple[torch.Tensor, torch.Tensor]:
        x = plane_points(settings.points, rng)
        noise = torch.from_numpy(rng.standard_normal((settings.seeds, settings.points, 2)))
        return x + sigma * noise[seeds], _function(x).expand(len(levels), -1)

    look = set(range(0, settings.steps, max(1, settings.steps // 50)))
    for step, trained in heads.trained(batch, steps=settings.steps, rate=0.02, look_at=look):  # noqa: B007
        setup.progress(step, settings.steps)
    x, _ = batch(0)
    clean = plane_points(settings.points, np.random.default_rng(1))
    w_k, w_q = trained.norms()
    columns = {
        "w_k": w_k,
        "w_q": w_q,
        "entropy": trained.entropy(x),
        "entropy_clean": trained.entropy(clean),
        "rmse_clean": ((trained(clean) - _function(clean)) ** 2).mean(dim=1).sqrt(),
    }
    return {
        "heads": Table.of(
            {"level": level, "seed": seed} | {n: float(c[i]) for n, c in columns.items()}
            for i, (level, seed) in enumerate(zip(levels, seeds))
        )
    }


def verdict(tables: Tables) -> Verdict:
    """The product of the norms falls with the noise and the weights' entropy rises (Spearman, p < 0.01 each)."""
    t = tables["heads"]
    scale = rank_correlation(t["level"], t["w_k"] * t["w_q"])
    softer, softer_clean = (rank_correlation(t["level"], t[name]) for name in ("entropy", "entropy_clean"))
    falls, rises = scale.p_falls < 0.01, softer.p_rises < 0.01
    outcome: Outcome = "holds" if falls and rises else "mixed" if falls or rises else "fails"
    ends = [t["level"] == t["level"].max(), t["level"] == t["level"].min()]
    product = t["w_k"] * t["w_q"]
    sentence = (
        f"From no noise to {t['level'].max():g}: ‖W_K‖·‖W_Q‖ ×{product[ends[0]].mean() / product[ends[1]].mean():.2f} "
        f"({scale}); entropy of the weights {t['entropy'][ends[1]].mean():.2f} → {t['entropy'][ends[0]].mean():.2f} "
        f"({softer}), on clean inputs → {t['entropy_clean'][ends[0]].mean():.2f} ({softer_clean})."
    )
    return Verdict(
        outcome, sentence, {"rho_norms": scale.rho, "rho_entropy": softer.rho, "rho_entropy_clean": softer_clean.rho}
    )


def control(seed: int) -> Tables:
    """Heads that do not depend on the noise."""
    rng = np.random.default_rng(seed)
    return {
        "heads": Table.of(
            {
                "level": level,
                "seed": s,
                "w_k": 3 + w[0],
                "w_q": 3 + w[1],
                "entropy": 0.5 + w[2],
                "entropy_clean": 0.5 + w[3],
            }
            for level in Settings().levels
            for s in range(5)
            for w in [0.1 * rng.standard_normal(4)]
        )
    }


EXPERIMENT = Experiment(
    name="input-noise",
    title="Noise against precision",
    source="2504.19901, section 6, in miniature",
    claim=(
        "With noise on its input a trained head lowers the norms of W_K and W_Q and blurs its partition: from "
        "selecting to averaging."
    ),
    criterion=(
        "Spearman's ρ between the noise level and ‖W_K‖·‖W_Q‖ is negative, and with the entropy of the attention "
        "weights on inputs noised as in training positive, each with one-sided p < 0.01. Holds if both, mixed if "
        "one, fails if neither."
    ),
    method=(
        "A smooth checkerboard on [−1, 1]², heads of 32 keys, fresh Gaussian noise on the input in every step, the "
        "clean value as target; the same starts and points at every level."
    ),
    run=run,
    verdict=verdict,
    control=control,
    settings={
        "tiny": Settings(levels=(0.0, 0.3, 0.6), seeds=2, keys=8, steps=60, points=64),
        "default": Settings(),
        "full": Settings(levels=tuple(round(0.03 * k, 2) for k in range(25)), seeds=20, keys=64, steps=5000),
    },
    seconds={"tiny": 0.5, "default": 20, "full": 1800},
)
