"""Theorem 4.1 and Corollary 4.1.1: one self-attention layer after one Linear approximates any continuous function."""

from __future__ import annotations

import math

from partita.errors import UnsupportedError
from partita.functions.target import Target
from partita.methods.on_grid import GridRecipe, build_on_grid
from partita.proofs.center_values import Known
from partita.proofs.construction import Construction, Progress

__all__ = ["self_attention"]


def self_attention(
    target: Target, recipe: GridRecipe, known: Known, *, declared: bool, progress: Progress | None = None
) -> Construction:
    """The head of Theorem 4.1: `net(z) = Σ_j softmax_j(R(v_j·z − |v_j|²/2)) f(v_j)` over the centers of a product grid.

    Claim, with `ω` the modulus of f and E the mean under the softmax: `sup|net − f| ≤ ω(√Σ_i sup E(x_i − v_i)²)`, which at
    sharpness κ = R h² ≥ 8 is within 0.14 % of ω(covering radius), and no rule that sees f only at those centers can
    promise less than that.

    *Theorem*: `self-attention` (4.1, its proof replaced by `grid-moments`); in L_p `self-attention-lp` (4.1.1, by `lp-moments` and
    `lp-jumps`, without Lusin).

    Hypotheses: f obeys `known` (interval arithmetic vouches if f is a graph, else the caller); f is finite at every center
    (checked); arithmetic as in the certificate's platform line.

    Args:
        target: one argument, domain a box.
        recipe: counts, inverse temperatures, windows, norm, dtype: what the planner chose.
        known: the modulus, per-axis constants and jumps of f.
        declared: whether the caller vouches for `known`.
    """
    if len(target.domains) != 1:
        raise UnsupportedError("self-attention takes one argument; a function of two is built by cross_attention.")
    theorem = "self-attention" if math.isinf(recipe.norm) else "self-attention-lp"
    return build_on_grid(target, recipe, known, declared=declared, theorem=theorem, progress=progress)
