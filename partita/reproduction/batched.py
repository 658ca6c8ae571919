"""Many small models trained at once: parameters with a leading model axis, one backward pass, Adam with rates per model.

Models that share a step share its kernel launches: seventy-five networks cost little more than the widest of their products.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

__all__ = ["BatchedAdam", "column", "spectral_norms", "uniform_layer"]


def column(values: Tensor, like: Tensor) -> Tensor:
    """One number per model, shaped to multiply a tensor whose first axis is the model."""
    return values.reshape(-1, *([1] * (like.dim() - 1)))


def uniform_layer(
    models: int, fan_in: int, fan_out: int, generators: list[torch.Generator], copies: list[int]
) -> Tensor:
    """`(models, fan_in, fan_out)`, entries uniform in ±1/√fan_in; model i is drawn from generator `copies[i]`.

    Models with the same generator start equal: what then differs between them is what was done to them.
    """
    drawn = [(2 * torch.rand(fan_in, fan_out, generator=g) - 1) / fan_in**0.5 for g in generators]
    return torch.stack([drawn[i] for i in copies])


class BatchedAdam:
    """Adam with decoupled weight decay, learning rate and decay per model.

    `m ← β₁m + (1−β₁)g`, `v ← β₂v + (1−β₂)g²`, `θ ← θ(1 − ηλ) − η m̂/(√v̂ + ε)`.

    Args:
        parameters: by name, each `(models, …)`, changed in place.
        rates, decays: η and λ, `(models,)`.
        decayed: the names to which λ applies; all of them if None.
    """

    def __init__(
        self,
        parameters: Mapping[str, Tensor],
        rates: Tensor,
        decays: Tensor | None = None,
        *,
        decayed: set[str] | None = None,
        betas: tuple[float, float] = (0.9, 0.999),
        epsilon: float = 1e-8,
    ) -> None:
        self.parameters = dict(parameters)
        self.rates, self.decays, self.decayed = rates, decays, decayed
        self.betas, self.epsilon, self.steps = betas, epsilon, 0
        self.first = {name: torch.zeros_like(p) for name, p in self.parameters.items()}
        self.second = {name: torch.zeros_like(p) for name, p in self.parameters.items()}

    @torch.no_grad()
    def step(self, loss: Tensor, *, scale: float = 1.0) -> None:
        """One step down the gradient of a loss that sums over the models; `scale` multiplies the rates (a schedule)."""
        names = list(self.parameters)
        gradients = torch.autograd.grad(loss, [self.parameters[n] for n in names])
        self.steps += 1
        b1, b2 = self.betas
        correct1, correct2 = 1 - b1**self.steps, 1 - b2**self.steps
        for name, g in zip(names, gradients):
            p, m, v = self.parameters[name], self.first[name], self.second[name]
            m.lerp_(g, 1 - b1)
            v.mul_(b2).addcmul_(g, g, value=1 - b2)
            rate = column(self.rates, p) * scale
            if self.decays is not None and (self.decayed is None or name in self.decayed):
                p.mul_(1 - rate * column(self.decays, p))
            p.sub_(rate / correct1 * m / ((v / correct2).sqrt_().add_(self.epsilon)))


def spectral_norms(matrices: Tensor) -> Tensor:
    """The largest singular value of each `(models, a, b)`, in float64 on the CPU."""
    out: Tensor = torch.linalg.matrix_norm(matrices.detach().cpu().double(), ord=2)
    return out
