"""The second paper's attention networks as its authors trained them: copies that differ in seed and task are one batched model.

*Mapping*: one linear map per token to width E, times a modulation `(n, E)` that starts at 1, followed by p − n learned tokens, each
constant over channels at the start, in equal steps from −1 to 1. *Attention*: multi-head self-attention with biases, scores over
√(E/H), output projection. The first n tokens are the output. Two layers: mapping, attention, a linear map, attention, a linear map.

An anchored head has one key channel and one value channel overwritten by the interpolation points: key channel E − 1 by
`k(L_k + L_0) − 2k` and a random value channel by L_k.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from partita.reproduction.batched import BatchedAdam

__all__ = ["Job", "NetworkShape", "Task", "Trained", "train_networks"]


@dataclass(frozen=True)
class NetworkShape:
    """What copies of one batch share.

    Attributes:
        columns: p ≥ the tokens of the task.
        heads: H, a divisor of the width.
        width: E.
        layers: 1 or 2.
        beta: multiplies the scores.
        anchored: whether the interpolation points overwrite a key channel and a value channel.
    """

    columns: int
    heads: int
    width: int
    layers: int = 1
    beta: float = 1.0
    anchored: bool = False


@dataclass(frozen=True)
class Job:
    """One network: its shape, its seed, the task it learns, and the ends of its anchors (where it has any)."""

    shape: NetworkShape
    seed: int
    task: int
    ends: tuple[float, float] = (0.0, 0.0)


@dataclass(frozen=True, eq=False)
class Task:
    """Sequences and targets by number; the last fifth is held out."""

    inputs: Tensor  # (tasks, samples, tokens, dim)
    targets: Tensor  # (tasks, samples, tokens, out)

    @property
    def held_out(self) -> int:
        return self.inputs.shape[1] // 5


@dataclass(frozen=True, eq=False)
class Trained:
    """Predictions on the held-out sequences, `(samples, tokens, out)`; attention weights `(samples, tokens, columns)` of head 0."""

    predicted: Tensor
    weights: Tensor


class _Networks:
    """Parameters with a leading copy axis."""

    def __init__(self, jobs: Sequence[Job], task: Task, device: str) -> None:
        shape = jobs[0].shape
        tokens, dim = task.inputs.shape[2:]
        self.shape, self.tokens = shape, tokens
        layers = {"map": (dim, shape.width)}
        for layer in range(shape.layers):
            layers |= {f"{part}{layer}": (shape.width, shape.width) for part in ("query", "key", "value", "out")}
        if shape.layers == 2:
            layers |= {"between": (shape.width, shape.width), "last": (shape.width, task.targets.shape[-1])}
        made: dict[str, list[Tensor]] = {}
        channels = []
        for job in jobs:
            g = torch.Generator().manual_seed(job.seed)
            for name, (fan_in, fan_out) in layers.items():
                weight, bias = _start(name, fan_in, fan_out, g)
                made.setdefault(name, []).append(weight)
                made.setdefault(f"{name}_bias", []).append(bias)
            made.setdefault("modulation", []).append(torch.ones(tokens, shape.width))
            if (extra := shape.columns - tokens) > 0:
                steps = torch.linspace(-1, 1, extra)[:, None].expand(-1, shape.width)
                made.setdefault("extra", []).append(steps.clone())
            channels.append(int(torch.randint(shape.width, (1,), generator=g)))
        self.parameters = {name: torch.stack(drawn).to(device).requires_grad_() for name, drawn in made.items()}
        if shape.anchored:
            k = torch.arange(shape.columns)
            points = torch.stack([torch.linspace(*job.ends, shape.columns) for job in jobs])
            self.anchor_keys = (k * (points + points[:, :1]) - 2 * k)[:, None, :, None].to(device)
            self.anchor_values = points[:, None, :, None].to(device)
            chosen = torch.nn.functional.one_hot(torch.tensor(channels), shape.width).bool()
            self.anchor_channel = chosen[:, None, None, :].to(device)

    def _linear(self, name: str, x: Tensor) -> Tensor:
        out: Tensor = x @ self.parameters[name][:, None] + self.parameters[f"{name}_bias"][:, None, None]
        return out

    def _attend(self, layer: int, x: Tensor, queries: int) -> tuple[Tensor, Tensor]:
        """Multi-head self-attention from the first `queries` tokens: outputs, and the weights."""
        shape = self.shape
        q = self._linear(f"query{layer}", x[:, :, :queries])
        k, v = self._linear(f"key{layer}", x), self._linear(f"value{layer}", x)
        if shape.anchored:
            k = torch.cat([k[..., :-1], self.anchor_keys.expand(*k.shape[:-1], 1)], dim=-1)
            v = torch.where(self.anchor_channel, self.anchor_values, v)
        q, k, v = (t.unflatten(-1, (shape.heads, -1)).transpose(-2, -3) for t in (q, k, v))
        scale = shape.beta / math.sqrt(shape.width / shape.heads)
        weights = torch.softmax(q @ k.transpose(-1, -2) * scale, dim=-1)
        read = (weights @ v).transpose(-2, -3).flatten(-2)
        return self._linear(f"out{layer}", read), weights

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """`(copies, batch, tokens, dim)` to outputs `(copies, batch, tokens, out)` and the first layer's weights."""
        h = self._linear("map", x) * self.parameters["modulation"][:, None]
        if "extra" in self.parameters:
            h = torch.cat([h, self.parameters["extra"][:, None].expand(-1, x.shape[1], -1, -1)], dim=2)
        if self.shape.layers == 1:
            return self._attend(0, h, self.tokens)
        h, weights = self._attend(0, h, self.shape.columns)
        out, _ = self._attend(1, self._linear("between", h), self.tokens)
        return self._linear("last", out), weights


def _start(name: str, fan_in: int, fan_out: int, g: torch.Generator) -> tuple[Tensor, Tensor]:
    """As torch starts `nn.Linear` and `nn.MultiheadAttention`: ±1/√fan_in with a bias alike; ±√(3/(2E)) for queries, keys and
    values, ±1/√E for the output projection, both with zero biases.
    """
    attention = name[:-1] in ("query", "key", "value", "out")
    reach = math.sqrt(1.5 / fan_in) if attention and not name.startswith("out") else 1 / math.sqrt(fan_in)
    weight, bias = ((2 * torch.rand(size, generator=g) - 1) * reach for size in ((fan_in, fan_out), (fan_out,)))
    return weight, torch.zeros_like(bias) if attention else bias


def train_networks(
    jobs: Sequence[Job],
    task: Task,
    *,
    epochs: int,
    batch: int = 32,
    rate: float = 1e-3,
    device: str = "cpu",
    progress: Callable[[float, float], None] = lambda done, of: None,
) -> list[Trained]:
    """Adam on the mean squared error, each network with batches of its own order; in the order of the jobs.

    Networks of one shape are one batched model. None of them feels the others.
    """
    inputs, targets = task.inputs.to(device), task.targets.to(device)
    trained = inputs.shape[1] - task.held_out
    steps = trained // batch
    groups = {job.shape: [i for i, other in enumerate(jobs) if other.shape == job.shape] for job in jobs}
    found: dict[int, Trained] = {}
    for number, members in enumerate(groups.values()):
        group = [jobs[i] for i in members]
        net = _Networks(group, task, device)
        adam = BatchedAdam(net.parameters, torch.full((len(group),), rate, device=device))
        which = torch.tensor([job.task for job in group], device=device)[:, None]
        orders = [torch.Generator().manual_seed(job.seed + 1) for job in group]
        for epoch in range(epochs):
            order = torch.stack([torch.randperm(trained, generator=g) for g in orders]).to(device)
            for step in range(steps):
                rows = order[:, step * batch : (step + 1) * batch]
                off = net(inputs[which, rows])[0] - targets[which, rows]
                adam.step(off.square().mean(dim=(1, 2, 3)).sum())
                progress(number + (epoch * steps + step + 1) / (epochs * steps), len(groups))
        found |= dict(zip(members, _held_out(net, inputs[which[:, 0], trained:])))
    return [found[i] for i in range(len(jobs))]


@torch.no_grad()
def _held_out(net: _Networks, x: Tensor) -> list[Trained]:
    """Every copy's answers to its own sequences, in parts that fit in memory."""
    predicted, weights = [], []
    for part in x.split(256, dim=1):
        out, attention = net(part)
        predicted.append(out.cpu())
        weights.append(attention[:, :, 0].cpu())
    return [Trained(*both) for both in zip(torch.cat(predicted, dim=1), torch.cat(weights, dim=1))]
