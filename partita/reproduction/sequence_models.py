"""Small attention networks on sequences, trained as one batched model: copies differ in columns, heads and seed.

Every token has an affine query of its own, `q_i = A_i x_i + c_i` (what a sum of linear maps `Σ P Z Q + C` can do); keys and values
are p trained columns, the interpolation points of the second paper; H heads share the width. A second layer attends from token
to token.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from partita.reproduction.batched import BatchedAdam

__all__ = ["SequenceCopy", "Task", "train_sequences"]


@dataclass(frozen=True)
class SequenceCopy:
    """One network: its interpolation columns, its heads, its seed."""

    columns: int
    heads: int
    seed: int


@dataclass(frozen=True, eq=False)
class Task:
    """Sequences `(samples, tokens, dim)` and targets `(samples, tokens, out)`; copy i learns `targets[which[i]]`."""

    inputs: Tensor  # (tasks, samples, tokens, dim)
    targets: Tensor  # (tasks, samples, tokens, out)
    which: tuple[int, ...]

    @property
    def held_out(self) -> int:
        return self.inputs.shape[1] // 5


class _Networks:
    """Parameters with a leading copy axis, one number of heads for all; columns beyond a copy's own are masked."""

    def __init__(self, copies: list[SequenceCopy], task: Task, *, width: int, layers: int, device: str) -> None:
        tokens, dim = task.inputs.shape[2:]
        self.layers, self.heads = layers, copies[0].heads
        most = max(c.columns for c in copies)
        shapes = {
            "a": ((tokens, dim, width), dim),
            "c": ((tokens, width), 0),
            "keys": ((most, width), width),
            "values": ((most, width), width),
            "out": ((tokens, width, task.targets.shape[-1]), width),
        }
        if layers == 2:
            shapes |= dict.fromkeys(("w_q", "w_k", "w_v"), ((width, width), width))
        made: dict[str, list[Tensor]] = {name: [] for name in shapes}
        for copy in copies:
            g = torch.Generator().manual_seed(copy.seed)
            for name, (shape, fan) in shapes.items():
                made[name].append(torch.randn(shape, generator=g) / max(fan, 1) ** 0.5 * (fan > 0))
        self.parameters = {name: torch.stack(drawn).to(device).requires_grad_() for name, drawn in made.items()}
        absent = torch.stack([torch.arange(most) >= c.columns for c in copies])
        self.absent = absent[:, None, None, None, :].to(device)  # copies, batch, heads, tokens, columns

    def _split(self, x: Tensor) -> Tensor:
        """`(…, rows, width)` to `(…, heads, rows, width / heads)`."""
        out: Tensor = x.unflatten(-1, (self.heads, -1)).transpose(-2, -3)
        return out

    def __call__(self, x: Tensor) -> Tensor:
        """`(copies, batch, tokens, dim)` to `(copies, batch, tokens, out)`."""
        p = self.parameters
        q = self._split(torch.einsum("mbtd,mtdw->mbtw", x, p["a"]) + p["c"][:, None])
        keys, values = (self._split(p[name])[:, None] for name in ("keys", "values"))
        scores = q @ keys.transpose(-1, -2) / q.shape[-1] ** 0.5
        weights = torch.softmax(scores.masked_fill(self.absent, -torch.inf), dim=-1)
        h = (weights @ values).transpose(-2, -3).flatten(-2)
        if self.layers == 2:
            q, k, v = ((h @ p[name][:, None]) for name in ("w_q", "w_k", "w_v"))
            h = h + torch.nn.functional.scaled_dot_product_attention(q, k, v)
        return torch.einsum("mbtw,mtwo->mbto", h, p["out"])


def train_sequences(
    copies: list[SequenceCopy],
    task: Task,
    *,
    width: int,
    layers: int,
    epochs: int,
    batch: int = 32,
    rate: float = 1e-3,
    device: str = "cpu",
    progress: Callable[[float, float], None] = lambda done, of: None,
) -> Tensor:
    """Adam on the mean squared error; predictions on the held-out last fifth, `(copies, samples, tokens, out)`.

    Copies with the same number of heads are one batched model.
    """
    inputs, targets = task.inputs.to(device), task.targets.to(device)
    trained = inputs.shape[1] - task.held_out
    steps = trained // batch
    groups = [[i for i, c in enumerate(copies) if c.heads == h] for h in sorted({c.heads for c in copies})]
    predicted: dict[int, Tensor] = {}
    for number, members in enumerate(groups):
        net = _Networks([copies[i] for i in members], task, width=width, layers=layers, device=device)
        adam = BatchedAdam(net.parameters, torch.full((len(members),), rate, device=device))
        which = torch.tensor([task.which[i] for i in members], device=device)
        g = torch.Generator().manual_seed(copies[0].seed)
        for epoch in range(epochs):
            order = torch.randperm(trained, generator=g).to(device)
            for step in range(steps):
                rows = order[step * batch : (step + 1) * batch]
                loss = ((net(inputs[:, rows][which]) - targets[:, rows][which]) ** 2).mean(dim=(1, 2, 3)).sum()
                adam.step(loss)
                progress(number + (epoch * steps + step + 1) / (epochs * steps), len(groups))
        with torch.no_grad():
            predicted |= dict(zip(members, net(inputs[:, trained:][which]).cpu()))
    return torch.stack([predicted[i] for i in range(len(copies))])
