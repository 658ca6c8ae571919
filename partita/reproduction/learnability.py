"""Learnability: the construction, training from it, and training from a random start, with the same keys on one chart."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from partita.reproduction.experiment import Experiment, Outcome, Setup, Verdict
from partita.reproduction.function_heads import FunctionHeads
from partita.reproduction.statistics import more_often
from partita.reproduction.table import Table, Tables
from partita.search.tensor_fit import softmax_matrix

__all__ = ["EXPERIMENT", "Settings"]

_STARTS = ("from the construction (hard)", "from the construction (soft)", "from random")
_SHARPNESS = {"hard": 32.0, "soft": 3.0}


@dataclass(frozen=True)
class Settings:
    """Keys per axis, heads per start, Adam steps, points per step, points where errors are looked for (per axis)."""

    side: int = 8
    seeds: int = 8
    steps: int = 3000
    points: int = 512
    test_side: int = 81


def _function(x: np.ndarray) -> np.ndarray:
    out: np.ndarray = np.sin(3 * x[..., 0]) + x[..., 0] * np.cos(2 * x[..., 1])
    return out


def _grid(side: int, reach: float = 1.0) -> tuple[np.ndarray, np.ndarray]:
    """Centers of side × side cells of [−reach, reach]² along an axis and as points."""
    axis = reach * (-1 + (2 * np.arange(side) + 1) / side)
    return axis, np.stack([g.ravel() for g in np.meshgrid(axis, axis, indexing="ij")], axis=1)


def run(setup: Setup) -> Tables:
    """`training`: error against steps for each start; `constructed`: heads that are never trained; `heads`: where they ended."""
    settings: Settings = setup.settings
    test_axis = np.linspace(-1, 1, settings.test_side)
    test = torch.from_numpy(np.stack([g.ravel() for g in np.meshgrid(test_axis, test_axis, indexing="ij")], axis=1))
    truth = torch.from_numpy(_function(test.numpy()))
    starts = _starts(settings, setup.seed)
    rng = np.random.default_rng(setup.seed)
    look = set(np.unique(np.geomspace(1, settings.steps, 16).astype(int)).tolist()) | {0}
    rows, ends = [], []

    def batch(_step: int) -> tuple[torch.Tensor, torch.Tensor]:
        x = rng.uniform(-1, 1, (settings.points, 2))
        return torch.from_numpy(x), torch.from_numpy(_function(x))

    for number, (name, heads) in enumerate(starts.items()):
        first = heads
        for step, trained in heads.trained(batch, steps=settings.steps, rate=0.01, look_at=look):
            error = (trained(test) - truth).abs()
            for i in range(heads.copies):
                rows.append(
                    {
                        "start": name,
                        "seed": i,
                        "step": step,
                        "sup_error": float(error[i].max()),
                        "rmse": float((error[i] ** 2).mean().sqrt()),
                    }
                )
            setup.progress(number + step / settings.steps, len(starts))
        ends += [{"start": name, "seed": i, **_cells(first, trained, i, test.numpy())} for i in range(heads.copies)]
    return {"training": Table.of(rows), "constructed": _constructed(settings, test_axis), "heads": Table.of(ends)}


def _starts(settings: Settings, seed: int) -> dict[str, FunctionHeads]:
    _, centers = _grid(settings.side)
    h, values = 2 / settings.side, _function(centers)
    made = {
        name: FunctionHeads.constructed(centers, _SHARPNESS[kind] / h**2, values)
        for name, kind in zip(_STARTS, ("hard", "soft"))
    }
    return made | {_STARTS[2]: FunctionHeads.random(settings.seeds, settings.side**2, 2, width=3, seed=seed, scale=2.0)}


def _constructed(settings: Settings, test: np.ndarray) -> Table:
    """Heads with as many keys whose weights come from a formula or a linear solve."""
    side, rows = settings.side, []
    points = np.stack([g.ravel() for g in np.meshgrid(test, test, indexing="ij")], axis=1)
    truth = _function(points).reshape(len(test), -1)
    nodes = -np.cos(np.pi * (np.arange(3 * side) + 0.5) / (3 * side))
    samples = _function(np.stack(np.meshgrid(nodes, nodes, indexing="ij"), axis=-1))
    for name, kappa, reach in (
        ("hard", _SHARPNESS["hard"], 1.0),
        ("soft", _SHARPNESS["soft"], 1.0),
        ("fitted", 0.7, 1.6),
    ):
        axis, centers = _grid(side, reach)
        rate = kappa / (2 * reach / side) ** 2
        values = _function(centers).reshape(side, side)
        if name == "fitted":
            inverse = np.linalg.pinv(softmax_matrix(nodes, axis, rate), rcond=1e-10)
            values = inverse @ samples @ inverse.T
        weights = softmax_matrix(test, axis, rate)
        error = np.abs(weights @ values @ weights.T - truth)
        rows.append({"values": name, "keys": side**2, "sup_error": error.max(), "rmse": np.sqrt((error**2).mean())})
    return Table.of(rows)


def _cells(start: FunctionHeads, end: FunctionHeads, copy: int, points: np.ndarray) -> dict[str, float]:
    """How many cells the domain meets, and the share of points that keep the cell they had at the start."""
    before, after = (heads.partition(copy).cell(points) for heads in (start, end))
    return {
        "cells_at_start": len(np.unique(before)),
        "cells_at_end": len(np.unique(after)),
        "points_that_kept_their_cell": float((before == after).mean()),
        "norms_product": float(np.prod([float(n[copy]) for n in end.norms()])),
    }


def verdict(tables: Tables) -> Verdict:
    """Random starts end above the hard construction with as many keys, in most seeds (sign test, p < 0.05)."""
    training, constructed = tables["training"], tables["constructed"]
    last = training.where(step=int(training["step"].max()))
    random = last.where(start=_STARTS[2])["sup_error"]
    fixed = {row["values"]: row["sup_error"] for row in constructed.rows()}
    worse, better = int((random > fixed["hard"]).sum()), int((random < fixed["hard"]).sum())
    p_worse, p_better = more_often(worse, worse + better), more_often(better, worse + better)
    outcome: Outcome = "holds" if p_worse < 0.05 else "fails" if p_better < 0.05 else "mixed"
    kept = {start: float(np.median(last.where(start=start)["sup_error"])) for start in _STARTS}
    sentence = (
        f"Sup error with {constructed['keys'][0]} keys: constructed hard {fixed['hard']:.2g}, soft "
        f"{fixed['soft']:.2g}, fitted {fixed['fitted']:.1g}; trained "
        + ", ".join(f"{name} {error:.2g}" for name, error in kept.items())
        + f" (median). Random starts end below the hard construction in {better} of {len(random)} seeds "
        f"(p = {min(p_better, p_worse):.1g}), and above the fitted one in {int((random > fixed['fitted']).sum())}."
    )
    return Verdict(
        outcome, sentence, {"median_random": kept[_STARTS[2]], "hard": fixed["hard"], "fitted": fixed["fitted"]}
    )


def control(seed: int) -> Tables:
    """Training that finds a tenth of the construction's error from every random start."""
    rng = np.random.default_rng(seed)
    rows = [
        {"start": start, "seed": i, "step": 100, "sup_error": 0.05 * rng.uniform(0.5, 1.5)}
        for start in _STARTS
        for i in range(8)
    ]
    fixed = [{"values": n, "keys": 64, "sup_error": e} for n, e in (("hard", 0.5), ("soft", 0.1), ("fitted", 1e-3))]
    return {"training": Table.of(rows), "constructed": Table.of(fixed)}


EXPERIMENT = Experiment(
    name="learnability",
    title="Constructed, trained from the construction, trained from random",
    source="2504.19901, section 7 (limitations)",
    claim=(
        "The proofs are constructive, not prescriptive: gradient-based training may not find weights as good as the "
        "construction's."
    ),
    criterion=(
        "Sup error at the end of training from random starts against the hard construction with as many keys, seed "
        "by seed: the claim holds if random starts end above it in most seeds (sign test, one-sided p < 0.05), fails "
        "if below, mixed if neither."
    ),
    method=(
        "sin 3x + x cos 2y on [−1, 1]², 8 × 8 keys, Adam on the mean squared error over fresh points; the "
        "construction at κ = 32 and κ = 3, and fitted values on a wider grid beside it."
    ),
    run=run,
    verdict=verdict,
    control=control,
    settings={
        "tiny": Settings(side=4, seeds=2, steps=40, points=64, test_side=21),
        "default": Settings(),
        "full": Settings(side=12, seeds=32, steps=20_000),
    },
    seconds={"tiny": 0.5, "default": 20, "full": 3000},
)
