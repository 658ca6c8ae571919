"""The second paper's O(1/(nH)): the interpolation points shared among H heads, constructed and trained."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from partita.geometry import Box
from partita.ramps.multi_head_ramps import multi_head_ramp
from partita.reproduction.experiment import Experiment, Outcome, Setup, Verdict
from partita.reproduction.ramp_targets import RampData, ramp_task, relative_errors
from partita.reproduction.sequence_models import SequenceCopy, train_sequences
from partita.reproduction.statistics import log_slope, rank_correlation
from partita.reproduction.table import Table, Tables

__all__ = ["EXPERIMENT", "Settings"]


@dataclass(frozen=True)
class Settings:
    """Tokens n and heads H of the constructed networks; the trained ones have n = `tokens[-1]`, p = `columns`."""

    tokens: tuple[int, ...] = (10, 50)
    heads: tuple[int, ...] = (1, 2, 4, 8, 16)
    dim: int = 10
    samples: int = 1000
    width: int = 32
    columns: int = 60
    seeds: int = 3
    epochs: int = 50


def run(setup: Setup) -> Tables:
    """`constructed`: error against H for each n; `trained`: error against H at fixed p."""
    settings: Settings = setup.settings
    token, rows = Box([-5.0] * settings.dim, [5.0] * settings.dim), []
    for n in settings.tokens:
        data = RampData.draw(setup.seed, samples=100_000 // n, tokens=n, dim=settings.dim)
        truth = data.ramp(50.0)
        for heads in settings.heads:
            made = multi_head_ramp(data.slopes, data.offsets, (-25.0, 25.0), heads=heads, domain=token)
            with torch.no_grad():
                parts = [made.network(x)[..., 0] for x in torch.from_numpy(data.x).split(200)]
            error = np.abs(torch.cat(parts).numpy() - truth)
            rows.append(
                {
                    "tokens": n,
                    "heads": heads,
                    "anchors": made.anchors,
                    "error_bound": made.error_bound,
                    "worst_seen": error.max(),
                }
            )
    return {"constructed": Table.of(rows), "trained": _trained(settings, setup)}


def _trained(settings: Settings, setup: Setup) -> Table:
    n = settings.tokens[-1]
    data = [
        RampData.draw(setup.seed + s, samples=settings.samples, tokens=n, dim=settings.dim)
        for s in range(settings.seeds)
    ]
    jobs = [(heads, s) for heads in settings.heads for s in range(settings.seeds)]
    task = ramp_task(data, [50.0] * len(data), [s for _, s in jobs], settings.width)
    copies = [SequenceCopy(settings.columns, heads, setup.seed + s) for heads, s in jobs]
    predicted = train_sequences(
        copies,
        task,
        width=settings.width,
        layers=1,
        epochs=settings.epochs,
        device=setup.device,
        progress=setup.progress,
    )
    errors = relative_errors(predicted, task)
    return Table.of({"heads": heads, "seed": s, **error} for (heads, s), error in zip(jobs, errors))


def verdict(tables: Tables) -> Verdict:
    """Constructed: exponent of the error in (n − 2)H − 1 within −1 ± 0.1. Trained: error falls with H (Spearman, p < 0.01)."""
    built, trained = tables["constructed"], tables["trained"]
    law = log_slope(built["anchors"] - 1, built["worst_seen"])
    rate = law.within(-1.1, -0.9) and bool((built["worst_seen"] <= built["error_bound"]).all())
    falls = rank_correlation(trained["heads"], trained["relative_rmse"])
    learned = falls.p_falls < 0.01
    outcome: Outcome = "holds" if rate and learned else "mixed" if rate or learned else "fails"
    ends = [
        trained["relative_rmse"][trained["heads"] == end].mean()
        for end in (trained["heads"].min(), trained["heads"].max())
    ]
    sentence = (
        f"Constructed networks: error like the number of shared points to the power {law}, from "
        f"{built['worst_seen'].max():.2g} to {built['worst_seen'].min():.2g}. Trained, H from "
        f"{trained['heads'].min()} to {trained['heads'].max()}: relative error {ends[0]:.3f} → {ends[1]:.3f} "
        f"({falls})."
    )
    return Verdict(outcome, sentence, {"exponent": law.value, "rho_trained": falls.rho})


def control(seed: int) -> Tables:
    """More heads that bring nothing, and trained ones that scatter and rise."""
    rng = np.random.default_rng(seed)
    built = [
        {"tokens": 50, "heads": h, "anchors": 48 * h, "error_bound": 1.0, "worst_seen": 0.5 * rng.uniform(0.9, 1.1)}
        for h in (1, 2, 4, 8, 16)
    ]
    trained = [{"heads": h, "relative_rmse": 0.1 + 0.01 * h * rng.random()} for h in (1, 2, 4, 8, 16) for _ in range(3)]
    return {"constructed": Table.of(built), "trained": Table.of(trained)}


EXPERIMENT = Experiment(
    name="ramp-heads",
    title="Ramps: error against the number of heads",
    source="2504.15956, multi-head theorem and its second experiment",
    claim=(
        "H heads over the n columns of the sequence itself share the interpolation points and reach O(1/(nH)); "
        "trained networks improve with H."
    ),
    criterion=(
        "Constructed networks: the exponent of the largest error seen in the number of shared points less one has a "
        "95 % interval within −1 ± 0.1, and no error exceeds its bound. Trained networks: Spearman's ρ of relative "
        "error with H is negative, p < 0.01. Holds if both, mixed if one, fails if neither."
    ),
    method=(
        "Constructed: n − 2 points and two sentinels per head, hard, as an nn.MultiheadAttention, n = 10 and 50, H = "
        "1 to 16. Trained: the published setup (see ramp-rate) at p = 60; the heads share a width of 32."
    ),
    run=run,
    verdict=verdict,
    control=control,
    settings={
        "tiny": Settings(tokens=(6,), heads=(1, 2, 4), dim=3, samples=120, width=8, columns=12, seeds=2, epochs=1),
        "default": Settings(),
        "full": Settings(tokens=(10, 50, 100), seeds=11),
    },
    revision=2,
    seconds={"tiny": 1, "default": 180, "full": 2000},
)
