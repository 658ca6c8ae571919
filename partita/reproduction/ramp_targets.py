"""What the second paper's runs learn: `Range_[a,b](w_i·x_i + t_i)` for every token, X uniform in [−5, 5], w and t normal."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from partita.reproduction.sequence_models import Task

__all__ = ["RampData", "ramp_task", "relative_errors"]


@dataclass(frozen=True, eq=False)
class RampData:
    """Per-token slopes `(tokens, dim)` and offsets `(tokens,)`, and sequences `(samples, tokens, dim)`."""

    slopes: np.ndarray
    offsets: np.ndarray
    x: np.ndarray

    @classmethod
    def draw(cls, seed: int, *, samples: int, tokens: int, dim: int, reach: float = 5.0) -> RampData:
        rng = np.random.default_rng(seed)
        slopes, offsets = rng.standard_normal((tokens, dim)), rng.standard_normal(tokens)
        return cls(slopes, offsets, rng.uniform(-reach, reach, (samples, tokens, dim)))

    @property
    def queries(self) -> np.ndarray:
        """u, `(samples, tokens)`."""
        out: np.ndarray = (self.x * self.slopes).sum(axis=2) + self.offsets
        return out

    def ramp(self, width: float) -> np.ndarray:
        """`Range_[−width/2, width/2](u)`."""
        out: np.ndarray = np.clip(self.queries, -width / 2, width / 2)
        return out


def ramp_task(data: list[RampData], widths: list[float], which: list[int], channels: int) -> Task:
    """Task k: data k clipped to widths[k], in the first of `channels` output channels, the others zero (as published)."""
    targets = torch.zeros(len(data), *data[0].x.shape[:2], channels)
    for k, (drawn, width) in enumerate(zip(data, widths)):
        targets[k, :, :, 0] = torch.from_numpy(drawn.ramp(width))
    inputs = torch.from_numpy(np.stack([d.x for d in data])).float() / 5  # the scale is Linear's business
    return Task(inputs, targets, tuple(which))


def relative_errors(predicted: torch.Tensor, task: Task) -> list[dict[str, float]]:
    """Per copy: root mean square error of the ramp over the ramp's own deviation, and the raw error over all channels."""
    rows = []
    for copy, k in enumerate(task.which):
        truth = task.targets[k, -task.held_out :]
        off = predicted[copy] - truth
        rows.append(
            {
                "relative_rmse": float(off[..., 0].square().mean().sqrt() / truth[..., 0].std()),
                "mse_all_channels": float(off.square().mean()),
            }
        )
    return rows
