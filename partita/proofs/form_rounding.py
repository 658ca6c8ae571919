"""How far apart two forms of one head may be in floating point: the score-rounding bound, form by form.

If every score is off by at most δ, every weight is off by a factor within e^{±2δ}, so `|Δnet| ≤ (e^{2δ} − 1)·max|V|`; sums of N
products add `γ_N max|V|` in any order. *Theorem*: `score-rounding`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from partita.arithmetic.precision import Precision
from partita.arithmetic.rounding import add_up, div_up, expm1_up, mul_up, sub_down
from partita.geometry.domains import Array
from partita.heads.head import DotProductAttention
from partita.heads.layers import LinearSum, LiteralNetwork, Projection
from partita.heads.scores import AffineScores

__all__ = ["LayersRounding", "dot_product_rounding", "layers_rounding", "line_rounding", "literal_rounding"]

_AT_ONCE = 1 << 22  # entries of Linear(Z) that are looked at together
_MADE = 4 * 2.0**-53  # what float64 rounds of a slope or an offset before it is stored
_LOGARITHM = 16 * 2.0**-53  # the same of logarithms of T and E, which are below 1, of S, and of q⁻¹
_EXP = 17.0  # units of roundoff: the exponential is within 8 units in the last place, and its argument was shifted


def dot_product_rounding(attention: DotProductAttention, lo: Array, hi: Array) -> float:
    """Bound of |as_attention() − exact head| for z in [lo, hi], flat: `(e^{2δ} − 1 + γ_N)·max|V|`. *Theorem*: `score-rounding`."""
    u = Precision.of(attention.key.dtype).unit
    lo_t, hi_t, origin = torch.tensor(lo).ravel(), torch.tensor(hi).ravel(), attention.origin.double()
    relative = torch.maximum((lo_t - origin).abs(), (hi_t - origin).abs())
    absolute = torch.maximum(lo_t.abs(), hi_t.abs())
    key = attention.key.double().abs()
    # δ: the products and their sum round relative to |k||q|; storing the origin and z rounds relative to |k||z|
    pad = 1 + (key.shape[1] + 8) * 2.0**-52  # these sums round too
    products = mul_up(_most(key[:, :-1] @ relative + key[:, -1]), pad, key.shape[1] + 6.0)
    stored = mul_up(_most(key[:, :-1] @ absolute), pad, 3.0)
    delta = mul_up(u, add_up(products, stored))
    moved = expm1_up(min(add_up(mul_up(2.02, delta), 40 * u), 700.0))
    return mul_up(add_up(min(moved, 2.0), mul_up(2.02 * (len(key) + 16), u)), _most(attention.value.double().abs()))


@np.errstate(over="ignore", under="ignore", invalid="ignore", divide="ignore")
def line_rounding(scores: AffineScores, lo: float, hi: float, dtype: torch.dtype) -> float:
    """Bound of |net − exact head| on [lo, hi] for a head of one input and one output that runs as products and a softmax.

    `net(x) = Σ_j softmax_j(α_j x + β_j)(γ_j x + ε_j)`, its numbers stored in the dtype. On an interval, e being the best key in its
    middle, scores that are off by δ move it by at most `(e^{2δ} − 1) Σ_j w_j|V_j − V_e|`, `w_j ≤ min(1, e^{s_j − s_e})`. A score
    has the roundings of its two stored numbers, a product and a sum, of subtracting the largest, and of exp:
    `δ = 1.01u(7(|α_j x| + |β_j|) + 17)`.
    Values have five, sums 2P + 8. Infinite where a score may overflow. *Theorem*: `straight-ends`.
    """
    precision, count = Precision.of(dtype), len(scores.slopes)
    alpha, beta, epsilon = scores.slopes[:, 0], scores.offsets - scores.offsets.mean(), scores.values[:, 0]
    gamma = np.zeros(count) if scores.value_slopes is None else scores.value_slopes[:, 0, 0]
    pairs = _between_crossings(alpha, beta, lo, hi)
    at = (alpha * pairs[:, :, None] + beta).mean(axis=1)
    best, rows = at.argmax(axis=1), np.arange(len(pairs))
    reach = np.abs(pairs).max(axis=1)[:, None]
    size = (np.abs(alpha) * reach + np.abs(beta)).max(axis=1)
    delta = (
        1.01 * precision.unit * (7 * size + 17) + 3 * scores.offset_error + 4 * 2.0**-53 * size + 8 * precision.tiniest
    )
    step, height = alpha - alpha[best][:, None], beta - beta[best][:, None]
    lead = (step[:, None] * pairs[:, :, None] + height[:, None]).max(axis=1)
    lead += 8 * 2.0**-53 * (np.abs(step) * reach + np.abs(height)) + 3 * scores.offset_error
    weight, twice = np.minimum(lead, 0.0), 2 * delta[:, None]
    grown = np.where(twice < 1, np.expm1(twice) * np.exp(weight), np.exp(np.minimum(twice + weight, 700.0)))
    tall = np.abs(gamma) * reach + np.abs(epsilon)
    apart = (gamma - gamma[best][:, None])[:, None] * pairs[:, :, None] + (epsilon - epsilon[best][:, None])[:, None]
    apart = np.abs(apart).max(axis=1) + 8 * 2.0**-53 * (tall + tall[rows, best][:, None])
    share = np.exp(np.minimum(twice + weight, 0.0))
    share[rows, best] = 1.0
    rounded = 1.01 * (2 * count + 13) * precision.unit * (share * tall).sum(axis=1)
    lost = 4 * count * (precision.smallest * tall.max() + precision.tiniest * (1 + reach.max()))
    total = ((grown * apart).sum(axis=1) + rounded).max() * (1 + 1e-9) + lost + 2 * scores.value_error
    overflows = size.max() > precision.largest / 16 or tall.max() > precision.largest / 16
    return math.inf if overflows or not math.isfinite(total) else float(total)


def _between_crossings(alpha: Array, beta: Array, lo: float, hi: float) -> Array:
    """Intervals that cover [lo, hi], short where two scores cross and longer away from there, `(n, 2)`."""
    i, j = np.triu_indices(len(alpha), 1)
    slope, height = alpha[i] - alpha[j], beta[j] - beta[i]
    crossing, scale = height / slope, 1 / np.abs(slope)
    steps = np.concatenate([[0.0], 2.0 ** np.arange(-2, 10)])
    edges = (crossing[:, None] + scale[:, None] * np.concatenate([-steps, steps])).ravel()
    doubling = np.concatenate(
        [lo + (hi - lo) * 2.0 ** -np.arange(0, 12.0), hi - (hi - lo) * 2.0 ** -np.arange(0, 12.0)]
    )
    edges = np.concatenate([edges[np.isfinite(edges)], doubling, [lo, hi]])
    edges = np.unique(np.clip(edges, lo, hi))
    return np.stack([edges[:-1], edges[1:]], axis=1) if len(edges) > 1 else np.array([[lo, hi]])


@dataclass(frozen=True)
class LayersRounding:
    """How far the paper's layers, as they run on z in a box, may be from the same layers in exact arithmetic.

    Storing the tensors counts as rounding: the comparison is with the tensors that were meant.

    Attributes:
        score_error: δ, how far a score may be off, exponential included.
        spread: the largest difference between the values of two columns, for one row of W_V.
        gain: the largest sum of |W_O| down a column: what W_O makes of an error.
        summed: what values, sums and W_O round, whatever the scores do.
    """

    score_error: float
    spread: float
    gain: float
    summed: float

    def bound(self, mean_distance: float = math.inf, factor: float = 1.0) -> float:
        """`gain · min(δ/2 · spread · factor, (e^{2δ} − 1) · mean distance) + summed · factor`.

        *Theorem*: `layers-rounding`, `score-rounding`.

        Args:
            mean_distance: a bound of `Σ_c w_c |V_c − y|` over the columns c and their exact weights, y any number per query, in the
                norm of the claim.
            factor: carries a supremum over to that norm.
        """
        if not math.isfinite(self.summed):
            return math.inf
        moved = mul_up(min(mul_up(0.5, self.score_error), 1.0), self.spread, factor)
        if math.isfinite(mean_distance):
            moved = min(moved, mul_up(expm1_up(mul_up(2.0, self.score_error)), mean_distance))
        return add_up(mul_up(self.gain, moved), mul_up(self.summed, factor))


_UNKNOWN = LayersRounding(math.inf, math.inf, math.inf, math.inf)


def layers_rounding(
    network: LiteralNetwork, lo: Array, hi: Array, *, offset_error: float = 0.0, value_error: float = 0.0
) -> LayersRounding:
    """What a network of the paper's layers rounds for z in [lo, hi], flat, from the magnitudes of its named tensors.

    A score is a sum of products of `W_K (P Z Q + C)` and `W_Q (P' Z' Q' + C')`. In any order of evaluation a summand passes through
    as many roundings as it has factors and the sums have other summands, and every factor was rounded when it was stored. Zeros
    do not round. Numbers that may overflow make the bound infinite. *Theorem*: `layers-rounding`.

    Args:
        offset_error: how far the offsets of scores may have been off before they were stored (`AffineScores.offset_error`).
        value_error: the same of values.
    """
    attention, precision = network.attention, Precision.of(network.dtype)
    used = attention.w_o.ne(0).any(dim=1).nonzero().squeeze(1)
    (keys_from, queries_from), (size_k, size_q), middle, half = network.linears, *_inputs(network, lo, hi, precision)
    queries, steps_q = _magnitude(attention.w_q, queries_from, size_q, used, precision)
    score = products = steps_k = steps_v = 0.0
    low, high, tall = (torch.full((len(attention.w_v),), x, dtype=torch.float64) for x in (math.inf, -math.inf, 0.0))
    for columns in _cuts(keys_from):
        keys, steps = _magnitude(attention.w_k, keys_from, size_k, columns, precision)
        score, steps_k = max(score, _most(keys.T @ queries)), max(steps_k, steps)
        products = max(products, _most(keys.gt(0).double().T @ queries.gt(0).double()))
        values, steps = _magnitude(attention.w_v, keys_from, size_k, columns, precision)
        steps_v, tall = max(steps_v, steps), torch.maximum(tall, values.amax(dim=1))
        mean, around = _range(attention.w_v, keys_from, middle, half, columns)
        low, high = torch.minimum(low, (mean - around).amin(dim=1)), torch.maximum(high, (mean + around).amax(dim=1))
    largest, gain = _most(tall), _most(attention.w_o.double().abs().sum(dim=0))
    mixed = _most(attention.w_o.ne(0).double().sum(dim=0))
    # products of keys and queries, their sums, and 2 for subtracting the largest score
    steps = steps_k + steps_q + products + 2
    pad = 1 + (steps + steps_v + mixed + 32) * 2.0**-51  # the sums above were rounded too
    score, largest, gain = score * pad, largest * pad, gain * pad
    limit = precision.largest / 16
    if not (max(score, _most(queries)) < limit and max(gain, 1.0, network.num_keys) * largest < limit):
        return _UNKNOWN
    # exponentials and products that underflow
    vanished = mul_up(2.0 * network.num_keys + steps + 64, precision.smallest)
    delta = add_up(
        mul_up(add_up(_gamma(steps, precision), _MADE), score),
        mul_up(1.01 * _EXP, precision.unit),
        8 * _LOGARITHM,
        mul_up(vanished, add_up(1.0, _most(queries) * pad)),
        offset_error,
    )
    stored, averaged = add_up(_gamma(steps_v, precision), _MADE), _gamma(2.0 * network.num_keys + 8, precision)
    relative = add_up(stored, averaged, _gamma(mixed + 2, precision), _LOGARITHM)
    # products of the three are below 3 · relative²; `lost` is what underflow takes
    lost = mul_up(vanished, add_up(1.0, 2.0 * largest))
    errors = mul_up(gain, add_up(mul_up(relative, add_up(1.0, 3.0 * relative), largest), lost))
    spread = add_up(_most(high - low) * pad, mul_up(2.0, add_up(stored, pad - 1), largest), 2.0 * value_error)
    # in the log form a wrong value is in the scores, and W_O does not enlarge it
    return LayersRounding(delta, spread, gain, add_up(errors, mul_up(max(gain, 1.0), value_error)))


def literal_rounding(network: LiteralNetwork, lo: Array, hi: Array) -> float:
    """Bound of |layers() − exact head| for z in [lo, hi], flat, from the magnitudes of the named tensors alone."""
    return layers_rounding(network, lo, hi).bound()


def _gamma(steps: float, precision: Precision) -> float:
    """`nu/(1 − nu)`: what n roundings in a row may change, relative to the result; infinite if that is all of it."""
    total = mul_up(steps, precision.unit)
    return div_up(total, sub_down(1.0, total)) if total < 0.5 else math.inf


def _most(tensor: Tensor) -> float:
    """The largest entry; infinite where one overflowed, 0 of none."""
    found = float(tensor.max()) if tensor.numel() else 0.0
    return math.inf if math.isnan(found) else found


def _cuts(linear: LinearSum) -> Iterator[slice]:
    """The columns of Linear(Z), some at a time."""
    rows, columns = linear.constant.shape
    step = max(1, _AT_ONCE // (rows + linear.right.shape[0] * linear.right.shape[1]))
    return (slice(start, start + step) for start in range(0, columns, step))


def _inputs(
    network: LiteralNetwork, lo: Array, hi: Array, precision: Precision
) -> tuple[tuple[Tensor, Tensor], Tensor, Tensor]:
    """Matrices `(dim, tokens)`: the sizes that the inputs of both Linears reach, and middle and half width of the first's box."""
    shapes = network.input_shapes
    low, high = (torch.tensor(end, dtype=torch.float64).ravel() for end in (lo, hi))
    size = torch.maximum(low.abs(), high.abs()) * (1 + 4 * precision.unit) + precision.tiniest
    middle = low / 2 + high / 2
    half = torch.maximum(high - middle, middle - low) * (1 + 2.0**-50) + precision.tiniest
    first = math.prod(shapes[0])

    def matrix(flat: Tensor, shape: tuple[int, ...]) -> Tensor:
        return flat.reshape(shape).T if len(shape) == 2 else flat[:, None]

    keys, queries = matrix(size[:first], shapes[0]), matrix(size[-math.prod(shapes[-1]) :], shapes[-1])
    return (keys, queries), matrix(middle[:first], shapes[0]), matrix(half[:first], shapes[0])


def _magnitude(
    weight: Tensor, linear: LinearSum, size: Tensor, columns: Tensor | slice, precision: Precision
) -> tuple[Tensor, float]:
    """Entrywise bound of `|W·Linear(Z)|` for |Z| ≤ size, and the roundings that a summand passes through, storing included.

    `W P Z Q` has three products (that with P is exact if P is made of 0 and ±1), `W C` one, and a sum of k has k − 1 additions.
    Below float64 the input rounds, and so do the stored factors, three and two.
    """
    parts = _parts(linear, columns)
    sizes = _projection(weight.double().abs(), [t.double().abs() for t in parts])
    counts = _projection(weight.ne(0).double(), [t.ne(0).double() for t in parts])
    summands = max(1.0, _most(counts(torch.ones_like(size)[None])))
    moves = bool((replace(counts, constant=torch.zeros_like(counts.constant))(torch.ones_like(size)[None]) > 0).any())
    plain = bool((linear.left.eq(0) | linear.left.abs().eq(1)).all())
    stored = (4 if moves else 2) * precision.rounds_inputs
    return sizes(size[None])[0], float(stored + (3 - plain if moves else 1) + summands - 1)


def _range(weight: Tensor, linear: LinearSum, middle: Tensor, half: Tensor, columns: slice) -> tuple[Tensor, Tensor]:
    """`W·Linear(Z)` at the middle, and how far each column reaches to each side of it, less what the first column does.

    A function common to all columns does not change how far apart they are.
    """
    projection = _projection(weight.double(), [t.double() for t in _parts(linear, columns)])
    slopes = torch.einsum("tar,tcd->arcd", projection.left, projection.right)
    common = torch.einsum("tar,tc->arc", projection.left, linear.right[..., 0].double())
    around = ((slopes - common[..., None]).abs() * half[None, :, :, None]).sum(dim=(1, 2))
    return projection(middle[None])[0], around


def _parts(linear: LinearSum, columns: Tensor | slice) -> tuple[Tensor, Tensor, Tensor]:
    return linear.left, linear.right[..., columns], linear.constant[:, columns]


def _projection(weight: Tensor, parts: list[Tensor]) -> Projection:
    return Projection.of(weight, LinearSum(*parts))
