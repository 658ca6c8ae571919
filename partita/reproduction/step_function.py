"""Figure 4: one head trained on a step function; where its max-affine function turns against where the target jumps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import scipy
import torch

from partita.reproduction.experiment import Experiment, Outcome, Quotation, Setup, Verdict
from partita.reproduction.function_heads import FunctionHeads, turning_points
from partita.reproduction.table import Table, Tables

__all__ = ["EXPERIMENT", "Settings"]

_LO, _HI = -1.0, 1.0
_NEAR = 0.025 * (_HI - _LO)


@dataclass(frozen=True)
class Settings:
    """Trained heads, jumps per target, keys per head, points per step (a grid) and Adam steps."""

    seeds: int = 24
    jumps: int = 4
    keys: tuple[int, ...] = (5, 8, 16)
    points: int = 400
    steps: int = 3000
    rate: float = 0.03


def _targets(settings: Settings, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Jumps `(seeds, jumps)` at least 0.2 apart and levels `(seeds, jumps + 1)` at least 0.4 apart from their neighbours."""
    rng = np.random.default_rng(seed)
    jumps: list[np.ndarray] = []
    levels: list[np.ndarray] = []
    while len(jumps) < settings.seeds:
        at, level = np.sort(rng.uniform(-0.85, 0.85, settings.jumps)), rng.uniform(-1, 1, settings.jumps + 1)
        if np.diff(at, prepend=_LO, append=_HI).min() > 0.2 and np.abs(np.diff(level)).min() > 0.4:
            jumps.append(at)
            levels.append(level)
    return np.array(jumps), np.array(levels)


def run(setup: Setup) -> Tables:
    """`jumps`: how far each jump is from the nearest turning point, and from random ones; `curves`: trained heads."""
    settings: Settings = setup.settings
    jumps, levels = _targets(settings, setup.seed)
    rng = np.random.default_rng(setup.seed + 1)
    x = torch.linspace(_LO, _HI, settings.points, dtype=torch.float64)[:, None]
    piece = (x[None, :, 0].numpy() > jumps[:, :, None]).sum(axis=1)
    wanted = torch.from_numpy(np.take_along_axis(levels, piece, axis=1))
    rows, curves, bends = [], [], []
    for number, keys in enumerate(settings.keys):
        heads = FunctionHeads.random(settings.seeds, keys, 1, width=2, seed=setup.seed, scale=2.0)
        for step, trained in heads.trained(  # noqa: B007
            lambda step: (x, wanted),
            steps=settings.steps,
            rate=settings.rate,
            look_at=set(range(0, settings.steps, max(1, settings.steps // 20))),
        ):
            setup.progress(number + step / settings.steps, len(settings.keys))
        error = ((trained(x) - wanted) ** 2).mean(dim=1).sqrt()
        for seed in range(settings.seeds):
            turns = turning_points(trained.partition(seed), _LO, _HI)
            bends += [
                {"keys": keys, "seed": seed, "turn": turn, "distance": np.abs(jumps[seed] - turn).min()}
                for turn in turns
            ]
            drawn = rng.uniform(_LO, _HI, (400, max(len(turns), 1)))
            for jump in jumps[seed]:
                distance = np.abs(turns - jump).min() if len(turns) else _HI - _LO
                rows.append(
                    {
                        "keys": keys,
                        "seed": seed,
                        "jump": jump,
                        "turning_points": len(turns),
                        "rmse": float(error[seed]),
                        **_against_chance(distance, np.abs(drawn - jump).min(axis=1)),
                    }
                )
        curves += _curve(trained, x, wanted, int(error.argsort()[len(error) // 2]), keys)
    return {"jumps": Table.of(rows), "turns": Table.of(bends), "curves": Table.of(curves)}


def _against_chance(distance: float, chance: np.ndarray) -> dict[str, float]:
    """A distance, the median of what turning points drawn at random give, and the share of those draws that are nearer."""
    return {
        "distance": distance,
        "distance_at_random": float(np.median(chance)),
        "nearer_at_random": float((chance < distance).mean()),
    }


def _curve(heads: FunctionHeads, x: torch.Tensor, wanted: torch.Tensor, seed: int, keys: int) -> list[dict[str, Any]]:
    """The head of median error: target, output and max-affine function (scaled to unit range)."""
    output, scores = heads(x)[seed], heads.partition(seed).scores(x.numpy()).max(axis=1)
    scores = (scores - scores.min()) / max(float(np.ptp(scores)), 1e-12)
    some = range(0, len(x), max(1, len(x) // 200))
    return [
        {
            "keys": keys,
            "seed": seed,
            "x": float(x[i]),
            "target": float(wanted[seed, i]),
            "head": float(output[i]),
            "max_affine": scores[i],
        }
        for i in some
    ]


def verdict(tables: Tables) -> Verdict:
    """For each number of keys, turning points are close to jumps, and jumps to turning points: nearer than at random, and near."""
    jumps, turns = tables["jumps"], tables["turns"]
    numbers: dict[str, float] = {}
    words, passed = [], []
    for keys in jumps.distinct("keys"):
        rows, bends = jumps.where(keys=keys), turns.where(keys=keys)
        sides = (
            ("jumps", rows["distance"], rows["nearer_at_random"]),
            ("turns", bends["distance"], _nearer_at_random(rows, bends)),
        )
        close = {}
        for name, distance, nearer in sides:
            p = float(scipy.stats.wilcoxon(nearer - 0.5, alternative="less").pvalue) if len(distance) else 1.0
            middle = float(np.median(distance)) if len(distance) else np.inf
            passed.append(p < 0.01 and middle <= _NEAR)
            near = float((distance <= _NEAR).mean()) if len(distance) else 0.0
            close[name] = f"median distance {middle:.3f} (p = {p:.0e}), {100 * near:.0f} % within {_NEAR:g}"
            numbers |= {f"{name}_median_distance_{keys}_keys": middle, f"{name}_near_{keys}_keys": near}
        words.append(
            f"{keys} keys: turning points to the nearest jump {close['turns']}; jumps to the nearest turning point "
            f"{close['jumps']}"
        )
    outcome: Outcome = "holds" if all(passed) else "mixed" if any(passed) else "fails"
    return Verdict(outcome, f"On [−1, 1], over {len(set(jumps['seed']))} targets: " + ". ".join(words) + ".", numbers)


def _nearer_at_random(jumps: Table, turns: Table) -> np.ndarray:
    """For each turning point, the share of [−1, 1] that is nearer to a jump of its target."""
    x, shares = np.linspace(_LO, _HI, 2001), []
    for seed, distance in zip(turns["seed"], turns["distance"]):
        at = jumps.where(seed=int(seed))["jump"]
        shares.append((np.abs(x[:, None] - at).min(axis=1) < distance).mean())
    return np.array(shares)


def control(seed: int) -> Tables:
    """Turning points drawn at random."""
    rng, rows, bends = np.random.default_rng(seed), [], []
    for s in range(24):
        at, turns = rng.uniform(-0.8, 0.8, 4), rng.uniform(_LO, _HI, 6)
        for jump in at:
            near = np.abs(rng.uniform(_LO, _HI, (400, 6)) - jump).min(axis=1)
            rows.append({"keys": 8, "seed": s, "jump": jump} | _against_chance(np.abs(turns - jump).min(), near))
        bends += [{"keys": 8, "seed": s, "turn": turn, "distance": np.abs(at - turn).min()} for turn in turns]
    return {"jumps": Table.of(rows), "turns": Table.of(bends)}


EXPERIMENT = Experiment(
    name="step-function",
    title="A head trained on a step function",
    source="2504.19901, appendix D.1, Figure 4",
    claim=(
        "When a single head is trained on a step function, the max-affine function of its scores turns at points "
        "close to the jumps, and its cells resemble the steps: the partition is learned."
    ),
    quotations=(
        Quotation(
            "The max-affine function generated in the attention score matrix turns at points close to the switching points in "
            "the step function. This generates a partition in the input domain that resembles the distribution of the flat "
            "parts in the step function.",
            "appendix D.1",
        ),
    ),
    criterion=(
        "For each number of keys, both ways. Turning points: nearer to a jump than a point drawn at random (the share of the "
        "domain that is nearer lies below one half, one-sided Wilcoxon test, p < 0.01), and within 2.5 % of the domain's width "
        "in the median. Jumps: nearer to a turning point than to as many drawn at random, and within 2.5 % in the median. Holds "
        "if all are so, fails if none is."
    ),
    amended=("The tests of the turning points were added. By those of the jumps alone the claim holds as well."),
    method=(
        "Step functions on [−1, 1] with four random jumps, one per seed; heads of Proposition 3.2's form with 5 keys "
        "(as many as there are steps), 8 and 16, random start, Adam on the mean squared error. The paper shows one "
        "head and gives no numbers. A jump without a turning point in the head counts with the nearest one, however "
        "far."
    ),
    run=run,
    verdict=verdict,
    control=control,
    settings={
        "tiny": Settings(seeds=4, keys=(8,), points=100, steps=150),
        "default": Settings(),
        "full": Settings(seeds=200, steps=6000),
    },
    seconds={"tiny": 0.5, "default": 30, "full": 800},
    revision=2,
)
