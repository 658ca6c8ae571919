"""Turn a feed-forward network trained on handwritten digits into an attention-only network; most predictions are proved equal."""

from __future__ import annotations

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import nn

import partita as pa


def trained(x: torch.Tensor, y: torch.Tensor, activation: nn.Module) -> nn.Sequential:
    torch.manual_seed(0)
    mlp = nn.Sequential(nn.Linear(64, 32), activation, nn.Linear(32, 32), activation, nn.Linear(32, 10))
    optimizer = torch.optim.Adam(mlp.parameters(), lr=0.01, weight_decay=1e-4)
    for _ in range(200):
        optimizer.zero_grad()
        nn.functional.cross_entropy(mlp(x), y).backward()
        optimizer.step()
    return mlp.eval()


def main() -> None:
    digits = load_digits()
    x, y = torch.tensor(digits.data / 16, dtype=torch.float32), torch.tensor(digits.target)
    order = torch.from_numpy(np.random.default_rng(0).permutation(len(x)))
    train, test = order[:1200], order[1200:]
    box = pa.Box(np.zeros(64), np.ones(64))
    for name, activation, tolerance in (("ReLU", nn.ReLU(), 1.0), ("ReLU", nn.ReLU(), 1e-3), ("GELU", nn.GELU(), 1e-3)):
        mlp = trained(x[train], y[train], activation)
        net = pa.attention_from_mlp(mlp, box, tolerance)
        with torch.no_grad():
            logits, answers = mlp(x[test]), net(x[test].double())
        top = logits.double().topk(2).values
        margin = (top[:, 0] - top[:, 1]).numpy()
        # the margin comes from the model in float32, so its own rounding error counts too
        own = net.reference_error_at(x[test], torch.float32)
        everywhere = margin > 2 * (net.error_bound + own)
        here = margin > 2 * (net.error_bound_at(x[test]) + own)
        same = (logits.argmax(1) == answers.argmax(1)).numpy()
        accuracy = (logits.argmax(1) == y[test]).double().mean().item()
        error = (answers - logits).abs().max().item()
        print(
            f"{name}, tolerance {tolerance:g}: {net.keys} keys in {len(net.layers)} layers; test accuracy {accuracy:.3f}"
        )
        print(
            f"  |attention − mlp|: proved ≤ {net.error_bound:.3g} on the whole cube, {error:.3g} seen on {len(test)} test images"
        )
        print(
            f"  prediction proved equal: {everywhere.sum()} by the bound on the cube, {here.sum()} by the bound at the image"
        )
        rest = np.flatnonzero(~here)
        if rest.size:
            print(
                f"  of the other {rest.size}: {same[rest].sum()} agree when run; their margins reach from {margin[rest].min():.2g} "
                f"to {margin[rest].max():.2g}"
            )
        assert same[here].all() and same[everywhere].all()


if __name__ == "__main__":
    main()
