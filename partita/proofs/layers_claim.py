"""What is proved about the paper's layers: the error of the exact head, and what one form in one dtype rounds."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TypeVar

from partita.arithmetic.precision import Precision
from partita.arithmetic.rounding import add_up, div_up, mul_up, pow_up
from partita.errors import ToleranceError
from partita.geometry.domains import Box
from partita.heads.forms import token_mixing
from partita.heads.head import FoldedHead
from partita.heads.layers import LiteralNetwork
from partita.proofs.certificate import Term, total
from partita.proofs.form_rounding import LayersRounding, layers_rounding

__all__ = ["claim_layers"]

Network = TypeVar("Network", bound=LiteralNetwork)


def claim_layers(
    network: Network,
    head: FoldedHead,
    terms: Iterable[Term],
    box: Box,
    *,
    tolerance: float,
    norm: str = "inf",
    estimate: float | None = None,
    mean_distance: float = math.inf,
) -> Network:
    """The layers with their `error_bound`, in the norm of the claim about the head.

    `‖f − layers‖ ≤ ‖f − head‖ + (volume · outputs)^{1/p} · sup|head − layers|`, the head in exact arithmetic and the layers as they
    run; the factor is 1 for the supremum. Inputs that the dtype rounds count as rounded scores and values, so the bound holds for
    every input of the domain, whether the dtype holds it or not. *Theorem*: `layers-rounding`.

    Args:
        network: the head in one of the forms of `literal_layers`, or token-wise.
        terms: of the bound of `‖f − head‖`.
        box: the domain, or the box around it.
        tolerance: the largest error to accept; infinity accepts any.
        norm: "inf", or p as certificates write it.
        estimate: the error of the head where it is only sampled; the layers then have no error bound.
        mean_distance: `Proof.mean_distance` of the proof that the terms come from.

    Raises:
        ToleranceError: the bound (for an estimate: the estimate and the rounding together) exceeds the tolerance.
    """
    scores, lo, hi = head.affine_scores(), box.lo.ravel(), box.hi.ravel()
    rounded = layers_rounding(network, lo, hi, offset_error=scores.offset_error, value_error=scores.value_error)
    exact = total(t for t in terms if t.source != "input")
    factor, mean = _factor(box, head, norm), math.inf
    if network.form in ("indexed", "tokenwise") and estimate is None and math.isfinite(mean_distance):
        mean = mul_up(mean_distance, exact)
        if network.form == "indexed":
            mean = _mean_distance(mean, head, mul_up(rounded.spread, factor))
    rounding = rounded.bound(mean, factor)
    bound = math.inf if estimate is not None else add_up(exact, rounding)
    _require(network, rounded, bound, rounding, estimate, tolerance)
    return network.claiming(error_bound=bound, rounding=rounding, norm=norm)


def _factor(box: Box, head: FoldedHead, norm: str) -> float:
    """`(volume · outputs)^{1/p}`: L_p integrates and sums over outputs, the supremum does neither."""
    if norm == "inf":
        return 1.0
    return mul_up(pow_up(mul_up(box.volume, float(head.num_outputs)), 1 / float(norm)), 1 + 1e-12)


def _mean_distance(mean: float, head: FoldedHead, spread: float) -> float:
    """`Σ w|V − f|` over the columns of the indexed form, from that over the cells.

    A query sees its own token's columns and, with weight 1 − q, those of other tokens, whose values are at most the spread and
    twice the mean away from f.
    """
    tokens = head.output_shape[0] if len(head.output_shape) == 2 else 1
    leak = div_up(tokens - 1.0, math.exp(token_mixing(tokens)[0]) * (1 - 1e-12) + tokens - 1) if tokens > 1 else 0.0
    return add_up(mul_up(add_up(1.0, mul_up(2.0, leak)), mean), mul_up(leak, spread))


def _require(
    network: LiteralNetwork,
    rounded: LayersRounding,
    bound: float,
    rounding: float,
    estimate: float | None,
    tolerance: float,
) -> None:
    reached = bound if estimate is None else estimate + rounding
    if reached <= tolerance:
        return
    precision = Precision.of(network.dtype)
    known = f"is proved to be at most {bound:.4g}" if estimate is None else f"is estimated at {reached:.4g}"
    steps = ["dtype=torch.float64"] if precision.rounds_inputs else []
    if network.form == "log" and rounded.score_error < 1:  # both forms have these scores: beyond, neither selects cells
        steps.append("form='indexed', which takes no logarithms")
    steps += ["smaller encodings"] if network.form == "tokenwise" else []
    steps += ["a head with fewer keys, compiled with a larger tolerance"]
    raise ToleranceError(
        f"the {network.form} form in {precision.name}: the error of its layers {known}, of which {rounding:.3g} is rounding, and "
        f"the tolerance is {tolerance:g}. Its scores are dot products, which may be off by {rounded.score_error:.2g}",
        f"Use {', or '.join(steps)}. Or accept these layers with {_accepting(reached)}.",
    )


def _accepting(error: float) -> str:
    """A tolerance of three digits that admits this error."""
    if math.isinf(error):
        return "tolerance=math.inf"
    digit = 10.0 ** (math.floor(math.log10(error)) - 2)
    return f"tolerance={math.ceil(error / digit) * digit:.3g}"
