"""A head on scattered centers as it will be stored."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from partita.functions.target import Target
from partita.geometry.domains import Array
from partita.heads.scattered_head import ScatteredHead
from partita.proofs.bisection import BoxProof
from partita.proofs.construction import semantics_of

__all__ = ["AdaptiveRecipe"]


@dataclass(frozen=True, eq=False)
class AdaptiveRecipe:
    """A head on scattered centers as it is stored, and what is known of it.

    Attributes:
        centers `(N, m)`, powers `(N,)` or None if equal, values `(N, out)`, slopes `(N, out, m)` or None, rate R: rounded to dtype.
        axes: directions along which the boxes of the proof are cut, `(m, m)`, None for those of z.
        proof: None for a black box. error_bound: of the stored head as it is run; infinite without a proof.
        error_seen: the largest error in the last check. leaves, evaluations, active: of the search; `active` directions matter.
    """

    centers: Array
    powers: Array | None
    values: Array
    slopes: Array | None
    rate: float
    tolerance: float
    dtype: torch.dtype
    error_seen: float
    axes: Array | None = None
    proof: BoxProof | None = None
    error_bound: float = math.inf
    leaves: int = 1
    evaluations: int = 0
    active: int = 0

    @property
    def semantics(self) -> str:
        return semantics_of(self.dtype)

    @property
    def keys(self) -> int:
        return len(self.centers)

    @property
    def parameters(self) -> int:
        """Stored scalars."""
        parts = (self.centers, self.powers, self.values, self.slopes)
        return sum(p.size for p in parts if p is not None) + 1

    @property
    def holds(self) -> bool:
        """Whether the tolerance is met: proved, or as far as the last check could see."""
        return (self.error_seen if self.proof is None else self.error_bound) <= self.tolerance

    @property
    def rank(self) -> tuple[bool, float]:
        """Recipes that hold come first, the smaller the better; among the others those with the smaller error."""
        error = self.error_seen if self.proof is None else self.error_bound
        return not self.holds, float(self.parameters) if self.holds else error

    def head(self, target: Target) -> ScatteredHead:
        def stored(array: Array | None) -> torch.Tensor | None:
            return None if array is None else torch.tensor(array).to(self.dtype)

        return ScatteredHead(
            torch.tensor(self.centers).to(self.dtype),
            self.rate,
            torch.tensor(self.values).to(self.dtype),
            powers=stored(self.powers),
            value_slopes=stored(self.slopes),
            input_shapes=target.input_shapes,
            output_shape=target.output_shape,
        )
