"""One step of gradient descent as attention: examples and their mirror images, softmax over their slopes."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn

from partita.networks.losses import LossSlope

__all__ = ["DescentLayer"]


class DescentLayer(nn.Module):
    """One step: `w ← S w + softmax(±ε r)·(∓(η/ε) x)`, `r_i = ∂ℓ/∂s(w·x_i, y_i)`, S = (1 − ηλ)I.

    Each example counts twice, as (x_i, r_i) and mirrored as (−x_i, −r_i): the tokens are doubled by a Linear map. Then
    `Σ softmax·x = Σ sinh(εr_i)x_i/Σ cosh(εr_i) = ε·gradient + O(ε³)`, for any number of examples. For a squared loss r is itself a
    product of query and key; otherwise a first attention looks it up: queries are the examples, keys `α_k w`.
    """

    mirror: Tensor
    read: Tensor
    shrink: Tensor
    query: Tensor
    query_offset: Tensor
    key_slopes: Tensor
    key_labels: Tensor
    key_offsets: Tensor
    table: Tensor
    direct: Tensor
    embed: Tensor
    signs: Tensor

    def __init__(
        self, slope: LossSlope, dim: int, *, step_size: float, ridge: float, epsilon: float, dtype: torch.dtype
    ) -> None:
        super().__init__()
        eye = np.eye(dim + 1)
        self.has_table = slope.keys > 0
        tensors = {
            "mirror": np.hstack([eye, -eye]),
            "read": -(step_size / epsilon) * eye[:, :dim],
            "shrink": (1 - step_size * ridge) * np.eye(dim),
            "query": epsilon * eye[:dim],
            "query_offset": -epsilon * eye[dim],
        }
        if self.has_table:
            tensors |= {
                "key_slopes": slope.slopes[:, 0][None],
                "key_labels": np.outer(eye[dim], slope.slopes[:, 1]),
                "key_offsets": slope.offsets,
                "table": slope.values[:, None],
                "direct": slope.direct[1] * eye[:, dim:],
                "embed": eye[:, :dim],
                "signs": epsilon * np.array([[1.0, -1.0]]),
            }
        for name, array in tensors.items():
            self.register_buffer(name, torch.tensor(np.ascontiguousarray(array), dtype=dtype))

    def mirrored(self, prompt: Tensor) -> Tensor:
        """`(batch, n, d + 1)` to `(batch, 2n, d + 1)`: every token and its mirror image."""
        return torch.unflatten(prompt @ self.mirror, -1, (2, self.mirror.shape[0])).flatten(1, 2)

    def forward(self, w: Tensor, prompt: Tensor, doubled: Tensor) -> Tensor:
        """`(batch, 1, d)` to the same."""
        if self.has_table:
            scores = (self.slopes(w, prompt) @ self.signs).flatten(1, 2).unsqueeze(1)
        else:
            scores = (w @ self.query + self.query_offset) @ doubled.transpose(1, 2)
        return w @ self.shrink + torch.softmax(scores, dim=2) @ (doubled @ self.read)

    def slopes(self, w: Tensor, prompt: Tensor) -> Tensor:
        """`r_i`, `(batch, n, 1)`, looked up by an attention whose keys come from w."""
        keys = self.embed @ (w.transpose(1, 2) @ self.key_slopes) + self.key_labels
        weights = torch.softmax(prompt @ keys + self.key_offsets, dim=2)
        return weights @ self.table + prompt @ self.direct
