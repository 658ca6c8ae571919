"""A fitted smoother as a head that takes the raw features: scales fold into centers and powers."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from partita.geometry.domains import Array
from partita.geometry.partitions import PowerDiagram
from partita.heads.scattered_head import ScatteredHead
from partita.learn.smoothing import Smoother

__all__ = ["Scaling", "fold"]


@dataclass(frozen=True, eq=False)
class Scaling:
    """`x̃ = S(x − μ)`, one scale per feature. Args: mean `(m,)`, scale `(m,)`."""

    mean: Array
    scale: Array

    def __call__(self, points: Array) -> Array:
        return (points - self.mean) * self.scale

    def inverse(self, scaled: Array) -> Array:
        """Raw features; where the scale is 0, the mean."""
        inverse = np.divide(1.0, self.scale, out=np.zeros_like(self.scale), where=self.scale > 0)
        return self.mean + scaled * inverse


def fold(
    smoother: Smoother, scaling: Scaling, spread: Array, *, output_shape: tuple[int, ...]
) -> tuple[ScatteredHead, PowerDiagram]:
    """The same function of the raw features as a head, and the cells of its scores in raw space.

    With `γ_j = c_j − μ` in raw units, `−R|S(x − c_j)|²/2` and `R(S²γ_j·(x − μ) − |Sγ_j|²/2)` differ by a function of x alone,
    which no softmax sees. So centers `μ + tS²γ_j`, powers `|tS²γ_j|² − t|Sγ_j|²` and inverse temperature `R/t` give the same
    weights, for every t > 0; t balances the two sides. If all scales are equal, t = 1/S² leaves the centers where they are and
    the powers 0. A bias b_j of a key adds `2tb_j/R` to its power.
    Scores round like R times the ratio of the largest to the smallest spread of a feature.

    Args:
        spread: `(m,)`, a typical size of `x − μ`.
    """
    keys = smoother.keys
    squared = scaling.scale**2
    lengths = float(np.linalg.norm(spread)), float(np.linalg.norm(squared * spread))
    t = lengths[0] / lengths[1] if min(lengths) > 0 else 1.0 / float(squared.max() or 1.0)
    places = t * scaling.scale * keys.centers  # Sγ is the scaled center
    powers = (places**2).sum(axis=1) - t * (keys.centers**2).sum(axis=1)
    values, slopes = smoother.values, None
    if smoother.slopes is not None:
        slopes = smoother.slopes * scaling.scale
        moved = np.einsum("jok,jk->jo", slopes, places)  # values are told at the centers, which have moved
        values = values + moved - np.einsum("jok,jk->jo", smoother.slopes, keys.centers)
    isotropic = bool((scaling.scale == scaling.scale[0]).all())
    if isotropic:
        powers = np.zeros_like(powers)
    if keys.bias is not None:
        powers = powers + (2 * t / keys.rate) * keys.bias
    plain = isotropic and keys.bias is None
    centers = scaling.mean + places
    head = ScatteredHead(
        torch.from_numpy(centers),
        keys.rate / t,
        torch.from_numpy(np.ascontiguousarray(values)),
        powers=None if plain else torch.from_numpy(powers),
        value_slopes=None if slopes is None else torch.from_numpy(np.ascontiguousarray(slopes)),
        input_shapes=((len(scaling.mean),),),
        output_shape=output_shape,
    )
    return head, PowerDiagram(centers, None if plain else powers)
