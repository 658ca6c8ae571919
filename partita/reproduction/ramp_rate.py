"""The second paper's O(1/p): ramps by one head with p interpolation points, constructed and trained."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from partita.geometry import Box
from partita.ramps.single_ramp import ramp
from partita.reproduction.experiment import Experiment, Outcome, Setup, Verdict
from partita.reproduction.ramp_targets import RampData, ramp_task, relative_errors
from partita.reproduction.sequence_models import SequenceCopy, train_sequences
from partita.reproduction.statistics import Slope, log_slope, rank_correlation
from partita.reproduction.table import Table, Tables

__all__ = ["EXPERIMENT", "Settings"]


@dataclass(frozen=True)
class Settings:
    """Tokens, dim and samples as published; anchors of the constructed heads, columns and widths of the trained ones."""

    tokens: int = 50
    dim: int = 10
    samples: int = 1000
    width: int = 32
    anchors: tuple[int, ...] = (10, 20, 40, 60, 70, 80, 90, 100, 110, 120, 240, 480, 960)
    columns: tuple[int, ...] = (60, 90, 120)
    ranges: tuple[float, ...] = (10.0, 30.0, 50.0)
    seeds: int = 3
    epochs: int = 50


def run(setup: Setup) -> Tables:
    """`constructed`: error against p, hard and at the best temperature; `trained`: error against p and against |b − a|."""
    settings: Settings = setup.settings
    data = [
        RampData.draw(setup.seed + s, samples=settings.samples, tokens=settings.tokens, dim=settings.dim)
        for s in range(settings.seeds)
    ]
    built = Table.of(row for p in settings.anchors for row in _constructed(data[0], p, settings))
    return {"constructed": built, "trained": _trained(data, settings, setup), "targets": _targets(data[0], settings)}


def _constructed(data: RampData, anchors: int, settings: Settings) -> list[dict[str, Any]]:
    token, rows = Box([-5.0] * settings.dim, [5.0] * settings.dim), []
    truth = data.ramp(50.0)
    for sharpness in ("hard", "best"):
        made = ramp(data.slopes, data.offsets, (-25.0, 25.0), anchors=anchors, domain=token, sharpness=sharpness)
        with torch.no_grad():
            error = np.abs(made.head(torch.from_numpy(data.x))[..., 0].numpy() - truth)
        rows.append(
            {
                "sharpness": sharpness,
                "anchors": anchors,
                "error_bound": made.error_bound,
                "worst_seen": error.max(),
                "relative_rmse": np.sqrt((error**2).mean()) / truth.std(),
            }
        )
    return rows


def _trained(data: list[RampData], settings: Settings, setup: Setup) -> Table:
    """All p at [−25, 25] and all widths at the smallest p, every seed, as one batch."""
    jobs = [("p", p, 50.0, s) for p in settings.columns for s in range(settings.seeds)]
    jobs += [("range", settings.columns[0], r, s) for r in settings.ranges for s in range(settings.seeds)]
    widths = sorted({width for _, _, width, _ in jobs})
    which = [widths.index(width) * settings.seeds + s for _, _, width, s in jobs]
    task = ramp_task(data * len(widths), [w for w in widths for _ in data], which, settings.width)
    copies = [SequenceCopy(p, 1, setup.seed + s) for _, p, _, s in jobs]
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
    return Table.of(
        {"sweep": sweep, "columns": p, "range": width, "seed": s, **error}
        for (sweep, p, width, s), error in zip(jobs, errors)
    )


def _targets(data: RampData, settings: Settings) -> Table:
    """How many targets the ramp clips at all, by width."""
    u = data.queries
    return Table.of(
        {
            "range": r,
            "share_clipped": (np.abs(u) > r / 2).mean(),
            "zero_channels": settings.width - 1,
            "deviation": data.ramp(r).std(),
        }
        for r in settings.ranges
    )


def verdict(tables: Tables) -> Verdict:
    """Constructed: both exponents within −1 ± 0.1. Trained: error falls with p (Spearman, p < 0.01)."""
    built, trained = tables["constructed"], tables["trained"]
    laws: dict[str, Slope] = {}
    for name in built.distinct("sharpness"):
        rows = built.where(sharpness=name)
        laws[name] = log_slope(rows["anchors"] - 1, rows["worst_seen"])
    kept = bool((built["worst_seen"] <= built["error_bound"]).all())
    rate = kept and all(law.within(-1.1, -0.9) for law in laws.values())
    sweep = trained.where(sweep="p")
    falls = rank_correlation(sweep["columns"], sweep["relative_rmse"])
    learned = falls.p_falls < 0.01
    outcome: Outcome = "holds" if rate and learned else "mixed" if rate or learned else "fails"
    gain = [float(built.where(sharpness=n)["worst_seen"][-1]) for n in laws]
    sentence = (
        f"Constructed heads: error like (p − 1)^{laws['hard']} hard and {laws['best']} at the best temperature, where "
        f"it is {gain[0] / gain[1]:.1f} times smaller. Trained heads, p from {sweep['columns'].min()} to "
        f"{sweep['columns'].max()}: relative error {sweep['relative_rmse'].mean():.3f}, "
        f"{'falling' if learned else 'not falling'} with p ({falls})."
    )
    numbers = {f"exponent_{n}": law.value for n, law in laws.items()} | {"rho_trained": falls.rho}
    return Verdict(outcome, sentence, numbers)


def control(seed: int) -> Tables:
    """Errors like p^−½, and trained ones that scatter and rise."""
    built = [
        {"sharpness": s, "anchors": p, "error_bound": 9.0, "worst_seen": p**-0.5}
        for s in ("hard", "best")
        for p in (10, 40, 160)
    ]
    rng = np.random.default_rng(seed)
    trained = [
        {"sweep": "p", "columns": p, "relative_rmse": 0.1 + 1e-3 * p * rng.random()}
        for p in (60, 80, 100, 120)
        for _ in range(3)
    ]
    return {"constructed": Table.of(built), "trained": Table.of(trained)}


EXPERIMENT = Experiment(
    name="ramp-rate",
    title="Ramps: error against the number of interpolation points",
    source="2504.15956, single-head theorem and its first experiment",
    claim=(
        "One head with p interpolation points approximates truncated linear functions of every token with error "
        "O(1/p), and trained heads follow."
    ),
    criterion=(
        "Constructed heads: the exponent of the largest error seen in p − 1 has a 95 % interval within −1 ± 0.1, "
        "hard and at the best temperature, and no error exceeds its bound. Trained heads: Spearman's ρ of relative "
        "error with p is negative, p < 0.01. Holds if both, mixed if one, fails if neither."
    ),
    method=(
        "X uniform in [−5, 5], 50 tokens of dimension 10, w and t normal, [a, b] = [−25, 25], Adam at 10⁻³, batches "
        "of 32, as published; trained heads have p trained columns of width 32 and an affine query per token. In "
        "this setup few targets are clipped at all and 31 of 32 output channels are zero (table targets), so a raw "
        "mean square error flatters: ours is relative to the ramp's own deviation, the raw one stands beside it."
    ),
    run=run,
    verdict=verdict,
    control=control,
    settings={
        "tiny": Settings(
            tokens=6,
            dim=3,
            samples=120,
            width=8,
            anchors=(10, 40, 160),
            columns=(8, 16),
            ranges=(10.0, 50.0),
            seeds=2,
            epochs=1,
        ),
        "default": Settings(),
        "full": Settings(columns=(60, 70, 80, 90, 100, 110, 120), ranges=(10.0, 20.0, 30.0, 40.0, 50.0), seeds=11),
    },
    revision=2,
    seconds={"tiny": 1, "default": 100, "full": 2000},
)
