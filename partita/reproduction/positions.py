"""No positional encodings: the paper's layers beside standard blocks that lack positions, against the proved lower bound."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from partita.compiler.compile import compile as compile_function
from partita.functions.target import Target, make_target
from partita.geometry import Box
from partita.papers.equivariance import EquivarianceGap, equivariance_gap
from partita.plots.colours import COLOURS, INK
from partita.plots.style import clean, new_figure
from partita.reproduction.experiment import Experiment, Outcome, Quotation, Setup, Verdict
from partita.reproduction.table import Table, Tables

__all__ = ["EXPERIMENT", "Settings", "draw_positions"]

_KINDS = ("the paper's layers", "block without positions", "block with one-hot positions")


@dataclass(frozen=True)
class Settings:
    """Targets on two tokens, the share of the lower bound that the paper's layers are built for, seeds and steps of training."""

    targets: tuple[str, ...] = ("x0; 0.5*x1", "x1; x1", "x0*x1; x0 - x1", "sin(2*x0); x1^2")
    share: float = 0.8
    seeds: int = 2
    steps: int = 300
    points: int = 2000


class _Block(nn.Module):
    """A standard encoder block between token-wise maps; `positions` appends the one-hot position to each token."""

    def __init__(self, *, positions: bool) -> None:
        super().__init__()
        self.positions = positions
        self.into, self.out = nn.Linear(3 if positions else 1, 16), nn.Linear(16, 1)
        self.block = nn.TransformerEncoderLayer(16, 2, 64, dropout=0.0, batch_first=True)

    def forward(self, z: torch.Tensor) -> torch.Tensor:
        if self.positions:
            z = torch.cat([z, torch.eye(2, dtype=z.dtype).expand(*z.shape[:-2], 2, 2)], dim=-1)
        out: torch.Tensor = self.out(self.block(self.into(z)))
        return out


def _trained(target: Target, positions: bool, settings: Settings, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    block, rng = _Block(positions=positions).double(), np.random.default_rng(seed)
    optimizer = torch.optim.Adam(block.parameters(), 0.005)
    for _ in range(settings.steps):
        z = rng.uniform(-1, 1, (128, 2, 1))
        wanted = torch.from_numpy(target(z.reshape(-1, 2))).reshape(-1, 2, 1)
        loss = (block(torch.from_numpy(z)) - wanted).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return block.eval()


def _errors(layer: nn.Module, target: Target, gap: EquivarianceGap, points: np.ndarray) -> dict[str, float]:
    """Worst errors on random points, and on the two sequences of the lower bound."""
    pair = np.stack([gap.point, gap.point[list(gap.order)]])
    with torch.no_grad():
        found = [
            float(
                (layer(torch.from_numpy(z)) - torch.from_numpy(target(z.reshape(-1, 2))).reshape(-1, 2, 1)).abs().max()
            )
            for z in (points, pair)
        ]
    return {"worst_seen": max(found), "at_the_pair": found[1]}


def run(setup: Setup) -> Tables:
    """A row per target and layer: the proved lower bound without positions, errors, and the bound of the paper's layers."""
    settings: Settings = setup.settings
    box, rows = Box.sequence(-1, 1, tokens=2, dim=1), []
    for number, text in enumerate(settings.targets):
        target, gap = make_target(text, box), equivariance_gap(text, box, seed=setup.seed)
        points = np.random.default_rng(setup.seed).uniform(-1, 1, (settings.points, 2, 1))
        compiled = compile_function(text, box, tolerance=settings.share * gap.lower_bound, method="hard")
        common = {"target": text, "lower_bound": gap.lower_bound}
        found = _errors(compiled.layers(form="log"), target, gap, points)
        rows.append({**common, "layer": _KINDS[0], "seed": 0, "error_bound": compiled.error_bound, **found})
        for seed in range(settings.seeds):
            for kind, positions in zip(_KINDS[1:], (False, True)):
                trained = _trained(target, positions, settings, setup.seed + seed)
                found = _errors(trained, target, gap, points)
                rows.append({**common, "layer": kind, "seed": seed, "error_bound": float("nan"), **found})
        setup.progress(number + 1, len(settings.targets))
    return {"layers": Table.of(rows)}


def verdict(tables: Tables) -> Verdict:
    """The paper's layers beat the lower bound for every target, and no block without positions does."""
    t = tables["layers"]
    paper, blind, encoded = (t.where(layer=kind) for kind in _KINDS)
    beats = (paper["worst_seen"] < paper["lower_bound"]) & (paper["error_bound"] < paper["lower_bound"])
    obeys = blind["at_the_pair"] >= blind["lower_bound"] * (1 - 1e-9)
    below = encoded["worst_seen"] < encoded["lower_bound"]
    outcome: Outcome = "holds" if beats.all() and obeys.all() else "mixed" if beats.all() else "fails"
    sentence = (
        f"For {int(beats.sum())} of {len(paper)} asymmetric targets the paper's layers are, proved and seen, nearer than any layer "
        f"without positions can be. {int(obeys.sum())} of {len(blind)} trained blocks without positions obey that lower bound; "
        f"{int(below.sum())} of {len(encoded)} trained blocks with one-hot positions get below it. The paper's layers need no "
        "encoding of their own because their Linear holds one: its Q_i and R differ from column to column."
    )
    numbers = {"beat": float(beats.mean()), "obey": float(obeys.mean()), "with_positions_below": float(below.mean())}
    return Verdict(outcome, sentence, numbers)


def control(seed: int) -> Tables:
    """Layers of the paper that are no better than layers without positions."""
    rng, rows = np.random.default_rng(seed), []
    for text in ("a", "b"):
        least = float(rng.uniform(0.3, 1))
        for kind in _KINDS:
            error = least * float(rng.uniform(1.05, 2))
            rows.append(
                {
                    "target": text,
                    "lower_bound": least,
                    "layer": kind,
                    "seed": 0,
                    "error_bound": 1.1 * error,
                    "worst_seen": error,
                    "at_the_pair": error,
                }
            )
    return {"layers": Table.of(rows)}


def draw_positions(tables: Tables) -> Any:
    """Worst errors per target and layer, over the proved lower bound."""
    t = tables["layers"]
    figure, panels = new_figure(1, width=6.4)
    panel, targets = panels[0, 0], t.distinct("target")
    for number, kind in enumerate(_KINDS):
        rows = t.where(layer=kind)
        places = [targets.index(text) + (number - 1) * 0.2 for text in rows["target"]]
        panel.plot(places, rows["worst_seen"] / rows["lower_bound"], "os^"[number], label=kind, color=COLOURS[number])
    panel.axhline(1.0, color=INK, linewidth=0.9)
    panel.set_xticks(range(len(targets)), targets, fontsize=7)
    panel.set_yscale("log")
    clean(panel, "worst error over the proved lower bound for layers without positions")
    figure.legend(*panel.get_legend_handles_labels(), loc="outside lower center", ncols=len(_KINDS))
    return figure


EXPERIMENT = Experiment(
    name="positions",
    title="Positions without positional encodings",
    source="2504.19901, section 1 (no positional encodings)",
    claim="Attention with an attached linear layer needs no positional encodings to approximate functions of positions.",
    quotations=(
        Quotation(
            "our results demonstrate that the expressive power of transformers arises from *only* the (softmax) attention module "
            "and an attached linear layer, without additional components such as positional encodings or feed - forward "
            "networks (FFNs)",
            "section 1",
        ),
    ),
    criterion=(
        "For each target a lower bound on the error of every permutation-equivariant layer is proved (theorem equivariance-gap). "
        "Holds if the paper's layers stay below it for every target, by their own bound and on all points tried, and every trained "
        "block without positions is above it at the two sequences of the bound. Mixed if only the first is true."
    ),
    method=(
        "Functions of two tokens whose outputs depend on the order. The paper's layers are those of Theorem 4.1 in the log form, "
        "for a tolerance of 0.8 times the lower bound. The blocks are `nn.TransformerEncoderLayer` between token-wise linear maps, "
        "trained with Adam on the mean squared error, without positions and with one-hot positions. The second part of the "
        "criterion is a theorem; training cannot change it. The paper runs no such experiment."
    ),
    run=run,
    verdict=verdict,
    control=control,
    settings={
        "tiny": Settings(targets=("x1; x1",), seeds=1, steps=20, points=100),
        "default": Settings(),
        "full": Settings(seeds=10, steps=3000, points=20_000),
    },
    seconds={"tiny": 1, "default": 25, "full": 1500},
)
