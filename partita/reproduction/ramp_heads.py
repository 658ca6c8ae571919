"""The second paper's O(1/(nH)): the interpolation points shared among H heads, constructed, and trained as its authors did."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from partita.geometry import Box
from partita.ramps.multi_head_ramps import multi_head_ramp
from partita.reproduction.experiment import Experiment, Outcome, Quotation, Setup, Verdict
from partita.reproduction.ramp_targets import PUBLISHED_SEED, RampData, ramp_task, relative_errors
from partita.reproduction.sequence_models import Job, NetworkShape, train_networks
from partita.reproduction.statistics import group_means, log_slope, rank_correlation
from partita.reproduction.table import Table, Tables

__all__ = ["EXPERIMENT", "Settings"]

_ENDS = (-25.0, 25.0)
_RERUN = {1: 0.144, 2: 0.060, 4: 0.031, 8: 0.019, 16: 0.015}  # of the public scripts, p = 60, three seeds each
_BAND = 5.0


@dataclass(frozen=True)
class Settings:
    """Tokens and heads of the constructed networks; the trained ones have n = 50, p = 60."""

    tokens: tuple[int, ...] = (10, 50)
    long_tokens: tuple[int, ...] = (1000, 10_000)
    heads: tuple[int, ...] = (1, 2, 4, 8, 16)
    dim: int = 10
    samples: int = 1000
    trained_tokens: int = 50
    trained_heads: tuple[int, ...] = (1, 2, 4, 8)
    width: int = 32
    columns: int = 60
    seeds: int = 2
    epochs: int = 50


def run(setup: Setup) -> Tables:
    """`constructed`: error against H for each n, as nn.MultiheadAttention and folded; `trained`: the published networks."""
    settings: Settings = setup.settings
    rows = []
    for n in (*settings.tokens, *settings.long_tokens):
        form = "module" if n in settings.tokens else "folded"
        data = RampData.draw(PUBLISHED_SEED + setup.seed, samples=max(2, 40_000 // n), tokens=n, dim=settings.dim)
        for heads in settings.heads:
            rows.append(_constructed(data, heads, form))
    return {"constructed": Table.of(rows), "trained": _trained(settings, setup)}


def _constructed(data: RampData, heads: int, form: Any) -> dict[str, Any]:
    token = Box([-5.0] * data.x.shape[2], [5.0] * data.x.shape[2])
    made = multi_head_ramp(data.slopes, data.offsets, _ENDS, heads=heads, domain=token, form=form)
    x = data.moved(made.ends, made.spacing)
    with torch.no_grad():
        parts = [made.network(part)[..., 0] for part in torch.from_numpy(x).split(200)]
    truth = ((x * data.slopes).sum(axis=2) + data.offsets).clip(*_ENDS)
    return {
        "tokens": data.x.shape[1],
        "heads": heads,
        "form": form,
        "anchors": made.anchors,
        "error_bound": made.error_bound,
        "worst_seen": np.abs(torch.cat(parts).numpy() - truth).max(),
    }


def _trained(settings: Settings, setup: Setup) -> Table:
    first = PUBLISHED_SEED + setup.seed
    data = [
        RampData.draw(first + s, samples=settings.samples, tokens=settings.trained_tokens, dim=settings.dim)
        for s in range(settings.seeds)
    ]
    task = ramp_task(data, [50.0] * len(data), settings.width)
    wanted = [(heads, s) for heads in settings.trained_heads for s in range(settings.seeds)]
    jobs = [Job(NetworkShape(settings.columns, heads, settings.width), first + s, s) for heads, s in wanted]
    trained = train_networks(jobs, task, epochs=settings.epochs, device=setup.device, progress=setup.progress)
    errors = relative_errors(trained, jobs, task)
    return Table.of(
        {"heads": heads, "seed": s, **error, "rerun_mse": _RERUN.get(heads)}
        for (heads, s), error in zip(wanted, errors)
    )


def verdict(tables: Tables) -> Verdict:
    """Constructed: exponent in (n − 2)H − 1 within −1 ± 0.1. Trained: falls with H, and as fast as 1/H."""
    built, trained = tables["constructed"], tables["trained"]
    law = log_slope(built["anchors"] - 1, built["worst_seen"])
    rate = law.within(-1.1, -0.9) and bool((built["worst_seen"] <= built["error_bound"]).all())
    falls = rank_correlation(trained["heads"], trained["relative_rmse"])
    decay = log_slope(trained["heads"], trained["relative_rmse"])
    improves, follows = falls.p_falls < 0.01, decay.high <= -0.9
    outcome: Outcome = "holds" if rate and improves and follows else "mixed" if rate or improves else "fails"
    levels, means, _ = group_means(trained["heads"], trained["mse_all_channels"])
    known = [(h, m, _RERUN[int(h)]) for h, m in zip(levels, means) if int(h) in _RERUN]
    near = all(1 / _BAND <= m / r <= _BAND for _, m, r in known)
    compared = ", ".join(f"H = {h:.0f}: {m:.2g} ({r:.2g})" for h, m, r in known)
    sentence = (
        f"Constructed networks, {built['tokens'].min():,} to {built['tokens'].max():,} tokens: error like the number of "
        f"shared points to the power {law}, from {built['worst_seen'].max():.2g} to {built['worst_seen'].min():.2g}, "
        f"{'all within' if (built['worst_seen'] <= built['error_bound']).all() else 'not all within'} the bounds. "
        f"The published networks, p = 60: the error {'falls' if improves else 'is not shown to fall'} with H ({falls}), like H to "
        f"the power {decay}, {'as fast as' if follows else 'more slowly than' if decay.low > -0.9 else 'not clearly slower than'} "
        f"1/H. Mean squared errors, and in brackets what "
        f"a rerun of the public scripts gave: {compared}, {'within' if near else 'not within'} a factor of {_BAND:g}."
    )
    numbers = {
        "exponent": law.value,
        "rho_trained": falls.rho,
        "exponent_trained": decay.value,
        "near_rerun": float(near),
    }
    return Verdict(outcome, sentence, numbers)


def control(seed: int) -> Tables:
    """More heads that bring nothing, and trained ones that scatter and rise."""
    rng = np.random.default_rng(seed)
    built = [
        {"tokens": 50, "heads": h, "anchors": 48 * h, "error_bound": 1.0, "worst_seen": 0.5 * rng.uniform(0.9, 1.1)}
        for h in (1, 2, 4, 8, 16)
    ]
    trained = [
        {"heads": h, "relative_rmse": 0.1 + 0.01 * h * rng.random(), "mse_all_channels": 0.1}
        for h in (1, 2, 4, 8, 16)
        for _ in range(3)
    ]
    return {"constructed": Table.of(built), "trained": Table.of(trained)}


EXPERIMENT = Experiment(
    name="ramp-heads",
    title="Ramps: error against the number of heads",
    source="2504.15956, multi-head theorem and its second experiment",
    claim=(
        "H heads over the n columns of the sequence itself share the interpolation points and reach O(1/(nH)); the error of "
        "trained networks decays like that. Only a summary of this paper is at hand; the quotations are from it."
    ),
    quotations=(
        Quotation(
            "Multi-head attention achieves O(1/(nH)) precision by distributing interpolation workload across H heads",
            "Key Results",
            of_summary=True,
        ),
        Quotation(
            "Keep p fixed, increase H, compare error decay rate against O(1/(nH)) bound",
            "Architecture Onboarding, first 3 experiments",
            of_summary=True,
        ),
    ),
    criterion=(
        "Constructed networks: the exponent of the largest error seen in the number of shared points less one has a "
        "95 % interval within −1 ± 0.1, and no error exceeds its bound. The published networks, trained: Spearman's ρ of the "
        "relative error with H is negative, p < 0.01 (it falls), and the 95 % interval of its exponent in H lies at or "
        "below −0.9 (it falls like the bound). Holds if all three, mixed if the first or the second, fails otherwise."
    ),
    method=(
        "Constructed: n − 2 points and two sentinels per head, hard, H = 1 to 16; n = 10 and 50 as an nn.MultiheadAttention, n "
        "= 1,000 and 10,000 folded. Trained: the authors' network and data (see ramp-rate) at p = 60; the heads share a "
        "width of 32. Full size: H = 1 to 16, ten seeds."
    ),
    run=run,
    verdict=verdict,
    control=control,
    settings={
        "tiny": Settings(
            tokens=(6,),
            long_tokens=(200,),
            heads=(1, 2, 4),
            dim=3,
            samples=120,
            trained_tokens=6,
            trained_heads=(1, 2, 4),
            width=8,
            columns=12,
            epochs=1,
        ),
        "default": Settings(),
        "full": Settings(tokens=(10, 50, 100), trained_heads=(1, 2, 4, 8, 16), seeds=10),
    },
    revision=3,
    seconds={"tiny": 1, "default": 100, "full": 1500},
)
