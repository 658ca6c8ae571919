"""Noise against precision: heads trained on noisy inputs of a known function; from selecting to averaging?"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from partita.reproduction.experiment import Experiment, Outcome, Quotation, Setup, Verdict
from partita.reproduction.function_heads import FunctionHeads
from partita.reproduction.statistics import group_means, rank_correlation
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
    (w_k, w_q), (k_spectral, q_spectral) = trained.frobenius(), trained.norms()
    columns = {
        "w_k": w_k,
        "w_q": w_q,
        "w_k_spectral": k_spectral,
        "w_q_spectral": q_spectral,
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
    """Both norms fall with the noise and the weights' entropy rises (Spearman, p < 0.01 each)."""
    t = tables["heads"]
    names = ("w_k", "w_q", "entropy", "entropy_clean")
    rank = {n: rank_correlation(t["level"], t[n]) for n in names}
    falls, rises = all(rank[n].p_falls < 0.01 for n in ("w_k", "w_q")), rank["entropy"].p_rises < 0.01
    outcome: Outcome = "holds" if falls and rises else "mixed" if falls or rises else "fails"
    last, first = t["level"] == t["level"].max(), t["level"] == t["level"].min()
    ratio = {n: t[n][last].mean() / t[n][first].mean() for n in ("w_k", "w_q")}
    peaks = {n: group_means(t["level"], t[n]) for n in ("w_k", "w_q")}
    peak = {n: (mean.max() / mean[0], level[mean.argmax()]) for n, (level, mean, _) in peaks.items()}
    sentence = (
        f"From no noise to {t['level'].max():g}: ‖W_K‖ ×{ratio['w_k']:.2f} ({rank['w_k']}; largest ×{peak['w_k'][0]:.2f} at "
        f"{peak['w_k'][1]:g}), ‖W_Q‖ ×{ratio['w_q']:.2f} ({rank['w_q']}; largest ×{peak['w_q'][0]:.2f} at {peak['w_q'][1]:g}); "
        f"entropy of the weights {t['entropy'][first].mean():.2f} → {t['entropy'][last].mean():.2f} ({rank['entropy']}), on clean "
        f"inputs → {t['entropy_clean'][last].mean():.2f} ({rank['entropy_clean']})."
    )
    return Verdict(outcome, sentence, {f"rho_{n}": r.rho for n, r in rank.items()})


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
    quotations=(
        Quotation(
            "Observe if the model reduces $W_K, W_Q$ norms (blurring the partition) to average out noise, effectively switching "
            'from "hard selection" to "soft smoothing."',
            "First 3 experiments, Noise vs. Partition Precision",
            of_summary=True,
        ),
        Quotation(
            "our theory suggests the scale of W_K, W_Q decreases when the input data contains more noise", "section 6"
        ),
    ),
    criterion=(
        "Spearman's ρ between the noise level and the Frobenius norms of W_K and of W_Q is negative, and with the entropy of the "
        "attention weights on inputs noised as in training positive, each with one-sided p < 0.01. Holds if the norms and the "
        "entropy are so, mixed if only one of the two is, fails if neither."
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
    revision=2,
)
