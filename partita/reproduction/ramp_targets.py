"""What the second paper's runs learn: `Range_[a,b](w_i·x_i + t_i)` for every token, X uniform in [−5, 5], w and t normal."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from partita.reproduction.sequence_models import Job, Task, Trained

__all__ = ["PUBLISHED_SEED", "RampData", "ramp_task", "relative_errors"]

PUBLISHED_SEED = 1234  # of the first published run; the others follow


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

    def moved(self, ends: tuple[float, float], spacing: float, *, reach: float = 5.0) -> np.ndarray:
        """x with every second sequence moved along w to where ramps err most: beside a middle between anchors, or to an end."""
        rng, u = np.random.default_rng(0), self.queries[::2]
        aim = ends[0] + (np.floor((u - ends[0]) / spacing) + 0.5 + 0.02 * rng.standard_normal(u.shape)) * spacing
        aim = np.where(rng.random(u.shape) < 0.2, np.where(u < sum(ends) / 2, *ends), aim)
        x = self.x.copy()
        x[::2] += ((aim - u) / (self.slopes**2).sum(axis=1))[..., None] * self.slopes
        return x.clip(-reach, reach)


def ramp_task(data: Sequence[RampData], widths: Sequence[float], channels: int) -> Task:
    """Task k: data k clipped to widths[k], in the first of `channels` output channels, the others zero (as published)."""
    targets = torch.zeros(len(data), *data[0].x.shape[:2], channels)
    for k, (drawn, width) in enumerate(zip(data, widths)):
        targets[k, :, :, 0] = torch.from_numpy(drawn.ramp(width))
    return Task(torch.from_numpy(np.stack([d.x for d in data])).float(), targets)


def relative_errors(trained: Sequence[Trained], jobs: Sequence[Job], task: Task) -> list[dict[str, float]]:
    """Per network: root mean square error of the ramp over the ramp's own deviation, and the published error over all channels."""
    rows = []
    for found, job in zip(trained, jobs):
        truth = task.targets[job.task, -task.held_out :]
        off = found.predicted - truth
        rows.append(
            {
                "relative_rmse": float(off[..., 0].square().mean().sqrt() / truth[..., 0].std()),
                "mse_all_channels": float(off.square().mean()),
            }
        )
    return rows
