"""Theorem 4.2 and Corollary 4.2.1: one cross-attention layer approximates any continuous function of two sequences."""

from __future__ import annotations

import math

from partita.errors import UnsupportedError
from partita.functions.target import Target
from partita.methods.on_grid import GridRecipe, build_on_grid
from partita.proofs.center_values import Known
from partita.proofs.construction import Construction, Progress

__all__ = ["cross_attention"]


def cross_attention(
    target: Target, recipe: GridRecipe, known: Known, *, declared: bool, progress: Progress | None = None
) -> Construction:
    """The head of Theorem 4.2: cells are pairs of a K-grid and a Q-grid, `softmax_{ij}(R(v_i·z_K − |v_i|²/2 +
    v_j·z_Q − |v_j|²/2))`.

    Folded, that is the product grid in `m_K + m_Q` dimensions, so the bound is that of `self_attention`; in the layers the part
    in z_K is made by `Linear_K`, and v_j sits in the key where it meets z_Q in the query.

    *Theorem*: `cross-attention` (4.2); in L_p `cross-attention-lp` (4.2.1).

    Hypotheses and args as in `self_attention`, with a pair of boxes as domain.
    """
    if len(target.domains) != 2:
        raise UnsupportedError("cross-attention takes two arguments: give a pair of boxes as the domain.")
    theorem = "cross-attention" if math.isinf(recipe.norm) else "cross-attention-lp"
    return build_on_grid(target, recipe, known, declared=declared, theorem=theorem, progress=progress)
