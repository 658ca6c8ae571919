"""Two layers, sequence to sequence: a random ReLU network on the flattened sequence, trained and constructed."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from partita.geometry import Box
from partita.networks.from_mlp import attention_from_mlp
from partita.ramps.bump_networks import two_layers
from partita.reproduction.experiment import Experiment, Outcome, Setup, Verdict
from partita.reproduction.sequence_models import SequenceCopy, Task, train_sequences
from partita.reproduction.statistics import log_slope, rank_correlation
from partita.reproduction.table import Table, Tables

__all__ = ["EXPERIMENT", "Settings"]


@dataclass(frozen=True)
class Settings:
    """As published: n = 20, d = 5, ten hidden units; sweeps of columns p at one head and of heads H at the smallest p."""

    tokens: int = 20
    dim: int = 5
    units: int = 10
    samples: int = 1000
    width: int = 32
    columns: tuple[int, ...] = (5, 10, 20, 40, 80)
    heads: tuple[int, ...] = (1, 2, 4, 8, 16)
    seeds: int = 3
    epochs: int = 30
    tolerances: tuple[float, ...] = (0.3, 0.1, 0.03, 0.01, 1e-3, 1e-4)
    cells: tuple[int, ...] = (4, 6, 8, 12, 16, 24, 32)


def _network(settings: Settings, seed: int) -> nn.Sequential:
    """A random ReLU network from the flattened sequence to a sequence."""
    g, m = torch.Generator().manual_seed(seed), settings.tokens * settings.dim
    layers = nn.Linear(m, settings.units).double(), nn.Linear(settings.units, m).double()
    with torch.no_grad():
        for layer in layers:
            layer.weight.copy_(torch.randn(layer.weight.shape, generator=g).double() / layer.in_features**0.5)
            layer.bias.copy_(0.1 * torch.randn(layer.bias.shape, generator=g).double())
    return nn.Sequential(layers[0], nn.ReLU(), layers[1])


def run(setup: Setup) -> Tables:
    """`trained`: relative error against p and H; `constructed`: the same ReLU network as attention; `bumps`: the paper's layers."""
    settings: Settings = setup.settings
    return {
        "trained": _trained(settings, setup),
        "constructed": _constructed(settings, setup.seed),
        "bumps": _bumps(settings, setup.seed),
    }


def _trained(settings: Settings, setup: Setup) -> Table:
    n, d = settings.tokens, settings.dim
    inputs, targets = [], []
    for s in range(settings.seeds):
        g = torch.Generator().manual_seed(1000 + setup.seed + s)
        x = torch.rand(settings.samples, n, d, generator=g)
        with torch.no_grad():
            y = _network(settings, setup.seed + s)(x.double().flatten(1)).reshape(-1, n, d).float()
        inputs.append(x - 0.5)
        targets.append((y - y.mean(dim=0)) / y.std(dim=0).mean())  # what an affine layer could do is not counted
    jobs = [("p", p, 1, s) for p in settings.columns for s in range(settings.seeds)]
    jobs += [("H", settings.columns[1], h, s) for h in settings.heads for s in range(settings.seeds)]
    task = Task(torch.stack(inputs), torch.stack(targets), tuple(s for _, _, _, s in jobs))
    predicted = train_sequences(
        [SequenceCopy(p, h, setup.seed + s) for _, p, h, s in jobs],
        task,
        width=settings.width,
        layers=2,
        epochs=settings.epochs,
        rate=3e-3,
        device=setup.device,
        progress=setup.progress,
    )
    rows = []
    for i, (sweep, p, h, s) in enumerate(jobs):
        truth = task.targets[s, -task.held_out :]
        error = float((predicted[i] - truth).square().mean().sqrt() / truth.std())
        rows.append({"sweep": sweep, "columns": p, "heads": h, "seed": s, "relative_rmse": error})
    return Table.of(rows)


def _constructed(settings: Settings, seed: int) -> Table:
    m, net = settings.tokens * settings.dim, _network(settings, seed)
    x = torch.rand(2000, m, generator=torch.Generator().manual_seed(seed)).double()
    rows = []
    for tolerance in settings.tolerances:
        made = attention_from_mlp(net, Box([0.0] * m, [1.0] * m), tolerance)
        with torch.no_grad():
            error = float((made(x) - net(x)).abs().max())
        rows.append({"tolerance": tolerance, "keys": made.keys, "error_bound": made.error_bound, "worst_seen": error})
    return Table.of(rows)


def _bumps(settings: Settings, seed: int) -> Table:
    """The paper's two layers, bumps and selection, where a grid can be built: two tokens of dimension one."""
    x = np.random.default_rng(seed).uniform(-1, 1, (2000, 2, 1))
    truth = np.sin(3 * x[:, 0, 0]) + x[:, 0, 0] * np.cos(2 * x[:, 1, 0])
    rows = []
    for cells in settings.cells:
        made = two_layers("sin(3*x0) + x0*cos(2*x1)", Box.sequence(-1, 1, tokens=2, dim=1), cells=cells)
        with torch.no_grad():
            got = torch.cat([made.two_layers(part).reshape(-1) for part in torch.from_numpy(x).split(100)]).numpy()
        rows.append({"cells": cells, "error_bound": made.error_bound, "worst_seen": np.abs(got - truth).max()})
    return Table.of(rows)


def verdict(tables: Tables) -> Verdict:
    """Constructed: within every tolerance. Trained: error falls with p and with H (Spearman, p < 0.01 each)."""
    built, trained, bumps = tables["constructed"], tables["trained"], tables["bumps"]
    kept = bool(((built["worst_seen"] <= built["error_bound"]) & (built["error_bound"] <= built["tolerance"])).all())
    law = log_slope(bumps["cells"], bumps["worst_seen"])
    kept = kept and bool((bumps["worst_seen"] <= bumps["error_bound"]).all()) and law.high < 0
    ranks = {}
    for sweep, column in (("p", "columns"), ("H", "heads")):
        rows = trained.where(sweep=sweep)
        ranks[sweep] = rank_correlation(rows[column], rows["relative_rmse"])
    falls = [rank.p_falls < 0.01 for rank in ranks.values()]
    parts = [kept, *falls]
    outcome: Outcome = "holds" if all(parts) else "mixed" if any(parts) else "fails"
    sentence = (
        "Constructed: the target's ReLU network as attention is within every tolerance down to "
        f"{built['tolerance'].min():g} ({built['keys'][-1]} keys)"
        + (", and" if kept else " (not all of it holds), and")
        + " the paper's bumps and selection, on two "
        f"tokens, have error like cells^{law}. Trained two-layer networks: relative error "
        f"{trained['relative_rmse'].min():.2f} to {trained['relative_rmse'].max():.2f}, with p {ranks['p']}, with H "
        f"{ranks['H']}."
    )
    return Verdict(
        outcome, sentence, {"rho_p": ranks["p"].rho, "rho_heads": ranks["H"].rho, "constructed": float(kept)}
    )


def control(seed: int) -> Tables:
    """Constructions that miss, and trained networks that get worse with p and H."""
    rng = np.random.default_rng(seed)
    built = [{"tolerance": t, "keys": 20, "error_bound": t, "worst_seen": 2 * t} for t in (0.1, 0.01)]
    trained = [
        {"sweep": sweep, "columns": k, "heads": k, "seed": s, "relative_rmse": 0.3 + 0.01 * k * rng.random()}
        for sweep in ("p", "H")
        for k in (1, 2, 4, 8, 16)
        for s in range(3)
    ]
    bumps = [{"cells": c, "error_bound": 1.0, "worst_seen": 1.5 * rng.uniform(0.9, 1.1)} for c in (4, 8, 16, 32)]
    return {"constructed": Table.of(built), "trained": Table.of(trained), "bumps": Table.of(bumps)}


EXPERIMENT = Experiment(
    name="two-layers",
    title="Two layers, sequence to sequence",
    source="2504.15956, two-layer theorem and its sequence-to-sequence experiment",
    claim=(
        "Two attention layers without a feed-forward network approximate sequence-to-sequence functions; errors fall "
        "as p and H grow."
    ),
    criterion=(
        "Constructed: the target's ReLU network as attention is within its bound and the bound within the tolerance, "
        "for every tolerance; the paper's bumps and selection are within their bound and their error falls with the "
        "cells (95 % interval of the exponent below 0). Trained: Spearman's ρ of the relative error with p, and with "
        "H, negative, p < 0.01. Holds if all three, fails if none, mixed otherwise."
    ),
    method=(
        "Target: a random ReLU network of ten units on the flattened sequence, X uniform in [0, 1], 20 tokens of "
        "dimension 5. Trained: a layer of p interpolation columns and H heads, then token-to-token attention, a "
        "linear read-out, no feed-forward network, Adam. Constructed: every ReLU as a head of two keys. The paper's "
        "own two layers need a grid over all coordinates, here 100: they are built where that is possible, for a "
        "function of two tokens."
    ),
    run=run,
    verdict=verdict,
    control=control,
    settings={
        "tiny": Settings(
            tokens=3,
            dim=2,
            units=4,
            samples=80,
            width=8,
            columns=(2, 4),
            heads=(1, 2),
            seeds=2,
            epochs=1,
            tolerances=(0.1, 0.01),
            cells=(4, 8, 12),
        ),
        "default": Settings(),
        "full": Settings(samples=5000, seeds=11, epochs=100),
    },
    seconds={"tiny": 1, "default": 60, "full": 2000},
)
