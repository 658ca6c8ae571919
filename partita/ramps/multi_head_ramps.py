"""The second paper's multi-head ramp: the anchors shared among H heads, with sentinels.

As an `nn.MultiheadAttention`, or folded: the same function, each head in coordinates of its own, for long sequences.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor, nn

from partita.arithmetic.precision import Precision
from partita.arithmetic.rounding import add_up, expm1_up, mul_up
from partita.errors import DomainError, ShapeError, SizeError, ToleranceError, UnsupportedError
from partita.geometry.domains import Array, Box, BoxLike
from partita.heads.head import flatten_inputs
from partita.heads.layers import LinearSum
from partita.kernels.guards import certified
from partita.proofs.certificate import Certificate, Term, total
from partita.proofs.claim import claim, require_ordinary
from partita.ramps.anchors import half_window_for, ramp_constant, sharing_excess, window_excess
from partita.ramps.literal_ramps import require_ordinary_scores
from partita.ramps.ramp_head import AnchoredRamp
from partita.ramps.single_ramp import MOST_ANCHORS, checked_affine, checked_ends, query_size, resolve_sharpness

__all__ = [
    "FoldedSharedRamp",
    "MultiHeadRamp",
    "SharedRamp",
    "best_shared_sharpness",
    "multi_head_ramp",
    "shared_constant",
    "sharpness_needed",
]

_AT_ONCE = 1 << 22  # weights that the folded form holds at a time
_MOST_SCALARS = 1 << 27  # of the module's embedding and projections: a gigabyte in float64
_FILLER = 60.0  # by so much the spare key of an outer head trails the end anchor that it repeats


def sharpness_needed(anchors: int, slack: float) -> float:
    """κ at which sharing p anchors adds at most `slack` spacings: `ln((p − 1)/slack)` and a little. *Theorem*: `shared-anchors`."""
    if not slack > 0:
        raise DomainError(f"slack is {slack!r} spacings; expected a number > 0.")
    kappa = max(1.0, math.log(max(anchors - 1, 1) / slack))
    while (anchors - 1) * sharing_excess(kappa) > slack:
        kappa += 0.01
    return kappa


def best_shared_sharpness(anchors: int) -> float:
    """The κ with the least `C(p, κ) + (p − 1)S(κ)` spacings, to half a unit: it grows like ln p. *Theorem*: `shared-anchors`.

    >>> best_shared_sharpness(16), best_shared_sharpness(100_000)
    (6.0, 16.0)
    """
    kappa = 5.0
    while shared_constant(anchors, kappa + 0.5) < shared_constant(anchors, kappa):
        kappa += 0.5
    return kappa


def shared_constant(anchors: int, sharpness: float) -> float:
    """`C(p, κ) + (p − 1)S(κ)`: the error of shared anchors in spacings, apart from rounding. *Theorem*: `shared-anchors`.

    C is the same for every p ≥ 64 but for 1e-15.
    """
    constant = ramp_constant(min(anchors, 64), sharpness)
    return add_up(constant, mul_up(anchors - 1.0, sharing_excess(sharpness)))


class MultiHeadRamp(nn.Module):
    """`Linear` (a sequence to n tokens of width E) and then a plain `nn.MultiheadAttention`.

    A token becomes `[u_i − o, one-hot(i), 0 …]`: the one-hot part lets column j hold another anchor in every head.

    Shapes: `(…, *input_shape)` to `(…, tokens, embed_dim)`; the ramp stands at `coordinate`, the rest is 0.
    """

    def __init__(self, linear: LinearSum, attention: nn.MultiheadAttention, *, input_shape: tuple[int, ...]) -> None:
        super().__init__()
        self.linear, self.attention, self.input_shape = linear, attention, input_shape

    @property
    def tokens(self) -> int:
        """n: columns of `Linear(X)`."""
        return self.linear.constant.shape[1]

    @property
    def num_parameters(self) -> int:
        """Stored scalars, zeros and ones included."""
        return sum(t.numel() for t in (*self.parameters(), *self.buffers()))

    def embed(self, x: Any) -> Tensor:
        """`Linear(X)`, `(batch, tokens, embed_dim)`: what the attention reads."""
        flat, _ = flatten_inputs((x,), (self.input_shape,), self.linear.constant.dtype)
        rows = (self.input_shape[0] if len(self.input_shape) == 2 else 1, self.input_shape[-1])
        embedded: Tensor = self.linear(flat.reshape(-1, *rows).transpose(1, 2))
        return embedded.transpose(1, 2)

    @certified
    def forward(self, x: Any, attn_mask: Tensor | None = None) -> Tensor:
        if attn_mask is not None and bool((attn_mask if attn_mask.dtype == torch.bool else attn_mask != 0).any()):
            raise UnsupportedError(
                "masks are not supported: column j holds the j-th anchor of every head, which every token may need. "
                "For a causal mask use prefix_ramp, whose anchors stand before the sequence."
            )
        _, lead = flatten_inputs((x,), (self.input_shape,), self.linear.constant.dtype)
        z = self.embed(x)
        out: Tensor = self.attention(z, z, z, need_weights=False)[0]
        return out.reshape(*lead, self.tokens, -1)


class FoldedSharedRamp(AnchoredRamp):
    """The multi-head ramp without one-hot positions: H softmaxes per token, each over the keys of its head around u.

    With `s = (u − a)/Δ` and c the cell of s among the keys of a head, its scores are `κ i((s − c) − i/2)` for the keys c + i.
    No large numbers are subtracted and nothing is stored per token but w and t: for sequences of any length, and float32.

    Shapes: `(…, tokens, dim)` to `(…, tokens, 1)`.
    """

    def __init__(
        self, slopes: Tensor, offsets: Tensor, *, ends: tuple[float, float], anchors: int, heads: int, sharpness: float
    ) -> None:
        super().__init__(slopes, offsets, ends=ends, anchors=anchors, sharpness=sharpness)
        self.heads = heads

    @certified
    def forward(self, x: Any) -> Tensor:
        flat, lead = flatten_inputs((x,), (tuple(self.slopes.shape),), self.slopes.dtype)
        u = ((flat.reshape(-1, *self.slopes.shape) * self.slopes).sum(dim=2) + self.offsets).reshape(-1)
        step = max(1, _AT_ONCE // (self.heads * self._width))
        parts = [self._ramp(part) for part in torch.split(u, step)]
        return torch.cat(parts).reshape(*lead, len(self.slopes), 1)

    @property
    def _width(self) -> int:
        """Keys of a head that are summed: all, own and sentinels, or the 2q around u."""
        return min(2 * half_window_for(float(self.sharpness)), self.anchors // self.heads + 2)

    def _ramp(self, u: Tensor) -> Tensor:
        p, own, width = self.anchors, self.anchors // self.heads, self._width
        s = self.in_spacings(u)[:, None]
        first = own * torch.arange(self.heads, dtype=u.dtype, device=u.device)  # of each head's own anchors
        least, most = (first - 1).clamp(min=0), (first + own).clamp(max=p - 1)  # of its keys, sentinels included
        cell = torch.minimum(torch.maximum(s.floor(), least), most - 1)
        start = torch.maximum(torch.minimum(cell - (width // 2 - 1), most - (width - 1)), least)
        i = (start - cell)[..., None] + torch.arange(width, dtype=u.dtype, device=u.device)
        scores = self.sharpness * i * ((s - cell)[..., None] - i / 2)
        key = cell[..., None] + i
        weights = torch.softmax(scores.masked_fill(key > most[:, None], -torch.inf), dim=-1)
        mine = (key >= first[:, None]) & (key < first[:, None] + own)
        values = torch.where(mine, key - (p - 1) / 2, torch.zeros_like(key))
        middle = self.low + self.spacing * ((p - 1) / 2)
        return middle + self.spacing * (weights * values).sum(dim=(1, 2))


@dataclass(frozen=True, eq=False)
class SharedRamp:
    """A multi-head ramp and what is proved about it.

    Attributes:
        network: `nn.MultiheadAttention` behind a Linear, or the folded form.
        sharpness: κ.
    """

    network: MultiHeadRamp | FoldedSharedRamp
    certificate: Certificate
    anchors: int
    spacing: float
    ends: tuple[float, float]
    sharpness: float

    @property
    def error_bound(self) -> float:
        return self.certificate.error_bound

    @property
    def beta(self) -> float:
        """β = κ/(2Δ), the paper's inverse temperature."""
        return self.sharpness / (2 * self.spacing)


@dataclass(frozen=True, eq=False)
class _Keys:
    """Per head and column: the anchor's place `(H, n)`, how much its score is lowered, and the value it holds."""

    places: Array
    lowered: Array
    values: Array
    centers: Array


def multi_head_ramp(
    slopes: ArrayLike,
    offsets: ArrayLike,
    ends: tuple[float, float],
    *,
    heads: int,
    domain: BoxLike,
    anchors: int | None = None,
    sharpness: float | str | None = None,
    beta: float | None = None,
    coordinate: int = 0,
    form: Literal["module", "folded"] = "module",
    dtype: torch.dtype = torch.float64,
) -> SharedRamp:
    """`Range_[a,b](w_i·x_i + t_i)` for all n tokens by H heads over the n columns they have: spacing `(b − a)/((n − 2)H − 1)`.

    Head h holds n − 2 neighbouring anchors and, as *sentinels* of value 0, the anchors next to them in the neighbouring heads;
    where u lies elsewhere a sentinel wins and the head returns 0; the outputs of the heads add up. (An outer head repeats its end
    anchor, lowered, in place of the sentinel that it lacks.) `|net − ramp| ≤ Δ·C(p, κ) + (b − a)·S(κ)`, `S(κ) ≈ e^{−κ}`: the
    sharing costs `(p − 1)e^{−κ}` spacings, so κ must grow like ln p (`sharpness_needed`), and the paper's β = κ/(2Δ) like p ln p.
    A fixed β is therefore refused once p is large.

    *Theorem*: `shared-anchors` (the second paper's O(1/(nH)); the constant and the sharpness are ours).

    Args:
        slopes: w, `(tokens, dim)` with tokens ≥ 4.
        offsets: t, `(tokens,)` or a number.
        heads: H.
        anchors: how many are to be shared, (n − 2)H if not given; must be that number.
        coordinate: where the ramp goes, below embed_dim; 0 if folded.
        sharpness: κ, "hard" (the default) or "best", the κ with the least bound.
        beta: β, in place of `sharpness`: κ = 2βΔ.
        form: "module" for an `nn.MultiheadAttention`, whose tensors grow like n²; "folded" for the same function in memory n, with
            outputs `(…, tokens, 1)`.

    `embed_dim` is the least multiple of H that holds `[u, one-hot]` and gives every head two coordinates.

    Raises:
        ShapeError: fewer than 4 tokens, or anchors that H heads do not share evenly.
        ToleranceError: κ too small for so many anchors.
        SizeError: a module too large, or one whose dot products round by more than a spacing.

    >>> built = multi_head_ramp(np.ones((1000, 1)), 0.0, (0, 1), heads=4, domain=Box([-1], [2]), form="folded", sharpness="best")
    >>> built.anchors, round(built.error_bound / built.spacing, 2), built.network(torch.zeros(1000, 1)).shape
    (3992, 0.24, torch.Size([1000, 1]))
    """
    domain = Box.of(domain)
    w, t = checked_affine(slopes, offsets, domain, dtype)
    n, dim = w.shape
    p = _share(n, heads, anchors)
    low, high = checked_ends(ends)
    if sharpness == "best":
        kappa = best_shared_sharpness(p)
    else:
        kappa = resolve_sharpness(sharpness, p, beta=beta, width=high - low, default="hard")
    _require_sharp(p, kappa)
    embed = heads * math.ceil(max(n + 1, 2 * heads) / heads)
    network: MultiHeadRamp | FoldedSharedRamp
    if form == "folded":
        if coordinate:
            raise ShapeError(f"the output coordinate is {coordinate}; expected 0, the only one of the folded form.")
        network, terms = _folded(w, t, domain, (low, high), p, heads, kappa, dtype)
    elif form == "module":
        require_ordinary_scores(dtype, (low, high), (high - low) / (p - 1), kappa, query_size(w, t, domain, dtype))
        if not 0 <= coordinate < embed:
            raise ShapeError(
                f"the output coordinate is {coordinate}; expected 0 to {embed - 1} (embed_dim is {embed})."
            )
        _refuse_large(n, dim, embed)
        keys = _keys(low, high, p, heads)
        linear = _embedding(w, t, (low + high) / 2, embed, dtype)
        attention = _attention(keys, kappa, (high - low) / (p - 1), (low + high) / 2, embed, coordinate, dtype)
        network = MultiHeadRamp(linear, attention, input_shape=(n, dim))
        terms = _terms(w, t, domain, (low, high), p, heads, kappa, dtype)
        _refuse_rounding(terms, p, n, high - low, dtype)
    else:
        raise UnsupportedError(f"form is {form!r}; expected 'module' or 'folded'.")
    certificate = claim(
        network,
        {"type": "ramp", "ends": [low, high], "tokens": n},
        [domain],
        terms,
        dtype=dtype,
        theorem="shared-anchors",
        details={"type": "multi-head ramp", "heads": heads, "sharpness": kappa},
        facts={
            "anchors": float(p),
            "embed_dim": float(embed),
            "sharpness_needed": sharpness_needed(p, 0.01),
            "beta": kappa * (p - 1) / (2 * (high - low)),
        },
    )
    return SharedRamp(network, certificate, p, (high - low) / (p - 1), (low, high), kappa)


def _refuse_large(tokens: int, dim: int, embed: int) -> None:
    """A SizeError before tensors of gigabytes are allocated: one-hot positions make them grow like the square of the tokens."""
    scalars = dim * tokens * tokens + 4 * embed * embed
    if scalars > _MOST_SCALARS:
        raise SizeError(
            f"nn.MultiheadAttention for {tokens:,} tokens would store {scalars:,} numbers, most of them for one-hot positions; the "
            f"limit is {_MOST_SCALARS:,}. Use form='folded', which computes the same function."
        )


def _share(tokens: int, heads: int, anchors: int | None) -> int:
    if tokens < 4:
        raise ShapeError(
            f"{tokens} token(s); expected at least 4: a head has one key per token, two of them sentinels. "
            "Use `ramp`, whose Linear lengthens the sequence."
        )
    if not isinstance(heads, int) or heads < 1 or (anchors is not None and anchors != (tokens - 2) * heads):
        raise ShapeError(
            f"{anchors} anchors in {heads} heads over {tokens} tokens; expected (tokens − 2)·heads = "
            f"{(tokens - 2) * heads}, {tokens - 2} anchors per head. Choose another number of heads."
        )
    return (tokens - 2) * heads


def _require_sharp(anchors: int, kappa: float) -> None:
    """Sharing may add at most half a spacing: beyond, the heads disagree by more than the anchors are apart."""
    excess = (anchors - 1) * sharing_excess(kappa)
    if excess > 0.5:
        raise ToleranceError(
            f"sharpness κ = {kappa:.3g} with {anchors:,} shared anchors: sharing adds {excess:.2g} spacings. Use κ ≥ "
            f"{sharpness_needed(anchors, 0.5):.2f} for half a spacing, κ ≥ "
            f"{sharpness_needed(anchors, 0.01):.2f} for a hundredth."
        )


def _refuse_rounding(terms: list[Term], anchors: int, tokens: int, width: float, dtype: torch.dtype) -> None:
    """A SizeError where rounding would move the output farther than the anchors' spacing does."""
    rounding = min(total(terms[2:]), width)
    if rounding > terms[0].value:
        raise SizeError(
            f"{anchors:,} anchors in heads of {tokens - 2} as dot products in {Precision.of(dtype).name}: rounding moves "
            "the output by "
            f"up to {rounding:.2g}, the spacing by {terms[0].value:.2g}. Use form='folded', float64, fewer tokens per head, or "
            "fewer heads."
        )


def _keys(low: float, high: float, p: int, heads: int) -> _Keys:
    """Columns of head h: left sentinel, its own anchors, right sentinel."""
    own = p // heads
    index = np.arange(heads)[:, None] * own + np.arange(-1, own + 1)
    outer = (index < 0) | (index >= p)
    index = index.clip(0, p - 1)
    places = low + (high - low) * (index / (p - 1)) - (low + high) / 2
    sentinel = np.zeros(index.shape, dtype=bool)
    sentinel[:, [0, -1]] = True
    values = np.where(sentinel & ~outer, 0.0, places)
    return _Keys(places, np.where(outer, _FILLER, 0.0), values, (places[:, 0] + places[:, -1]) / 2)


def _embedding(w: Array, t: Array, middle: float, embed: int, dtype: torch.dtype) -> LinearSum:
    """Row 0: u_i − o; rows 1 … n: the identity; zeros below."""
    n, dim = w.shape
    constant = np.zeros((embed, n))
    constant[0] = t - middle
    constant[1 : n + 1] = np.eye(n)
    left = np.zeros((dim, embed, dim))
    right = np.zeros((dim, n, n))
    for c in range(dim):
        left[c, 0, c] = 1.0
        right[c] = np.diag(w[:, c])
    return LinearSum(*(torch.tensor(a, dtype=dtype) for a in (left, right, constant)))


def _attention(
    keys: _Keys, kappa: float, spacing: float, middle: float, embed: int, coordinate: int, dtype: torch.dtype
) -> nn.MultiheadAttention:
    """Per head: query `√(E/H)·R·(u − c_h, 1)`, key `(L − c_h, −(L − c_h)²/2 − lowered/R)`, value `(L − o or 0, 0 …)`.

    torch divides scores by √(E/H); the query carries that factor. c_h is the middle of the head's own anchors.
    """
    heads, n = keys.places.shape
    size, rate = embed // heads, kappa / spacing**2
    in_weight, in_bias = np.zeros((3, heads, size, embed)), np.zeros((3, heads, size))
    scale = math.sqrt(size) * rate
    away = keys.places - keys.centers[:, None]
    in_weight[0, :, 0, 0] = scale
    in_bias[0, :, 0] = -scale * keys.centers
    in_bias[0, :, 1] = scale
    in_weight[1, :, 0, 1 : n + 1] = away
    in_weight[1, :, 1, 1 : n + 1] = -0.5 * away**2 - keys.lowered / rate
    in_weight[2, :, 0, 1 : n + 1] = keys.values
    out_weight, out_bias = np.zeros((embed, heads, size)), np.zeros(embed)
    out_weight[coordinate, :, 0] = 1.0
    out_bias[coordinate] = middle
    attention = nn.MultiheadAttention(embed, heads, batch_first=True, dtype=dtype)
    tensors = {
        "in_proj_weight": in_weight.reshape(3 * embed, embed),
        "in_proj_bias": in_bias.reshape(3 * embed),
        "out_proj.weight": out_weight.reshape(embed, embed),
        "out_proj.bias": out_bias,
    }
    attention.load_state_dict({name: torch.tensor(a, dtype=dtype) for name, a in tensors.items()}, strict=True)
    return attention.eval().requires_grad_(False)


def _terms(
    w: Array, t: Array, domain: Box, ends: tuple[float, float], p: int, heads: int, kappa: float, dtype: torch.dtype
) -> list[Term]:
    """Approximation, sharing, and rounding: if every score of every head is off by at most δ, every weight is off by a factor
    within `e^{±2δ}`, and all weights on anchors together are at most 1 + 2S(κ), each with a value of at most (b − a)/2.

    Queries of head h are `u − c_h`, up to `max|u| + (b − a)/2`; its keys are within n/2 spacings of c_h.
    """
    low, high = ends
    u = Precision.of(dtype).unit
    spacing = (high - low) / (p - 1) * (1 + 1e-12)
    n, dim = w.shape
    size = add_up(query_size(w, t, domain, dtype), abs(low + high) / 2)
    approximation = mul_up(spacing, ramp_constant(p, kappa))
    sharing = mul_up((high - low) * (1 + 1e-12), sharing_excess(kappa * (1 - 1e-6)))
    reach = (n / 2 + 2) * (size / spacing + p / 2 + n / 2 + 2)  # |query||key| in units of R Δ²
    delta = mul_up(1.01 * u, 24 * kappa * reach + 400)
    moved = mul_up(expm1_up(min(2 * delta, 700.0)), (high - low) / 2, 1 + 2 * sharing_excess(kappa * (1 - 1e-6)))
    sums = mul_up(
        1.01 * u, add_up((3 * dim + 10) * size, (n + heads + 24) * (high - low), 4 * max(abs(low), abs(high)))
    )
    return [
        Term("approximation", approximation, "Δ · C(p, κ)", "ramp", {"spacing": spacing}),
        Term("sharing", sharing, "(b − a) · S(κ)", "shared-anchors", {"sharpness": kappa}),
        Term("score rounding", moved, "(e^{2δ} − 1)(1 + 2S)(b − a)/2", "score-rounding", {"delta": delta}),
        Term("summation", sums, "γ · (|u| + b − a + |a| + |b|)", "score-rounding", {"u": u, "size": size}),
    ]


def _folded(
    w: Array, t: Array, domain: Box, ends: tuple[float, float], p: int, heads: int, kappa: float, dtype: torch.dtype
) -> tuple[FoldedSharedRamp, list[Term]]:
    """The folded form and its bound: a misplaced s moves the ramp by as much; weights are off by `e^{±8ut}`, t behind the best.

    In head h weights sum to W_h on its own anchors, `Σ W_h ≤ 1 + 2S ≤ 2`, and `Σ w t ≤ 2q/e` per head.
    """
    low, high = ends
    if p > MOST_ANCHORS[dtype]:
        raise SizeError(
            f"{p:,} anchors; {Precision.of(dtype).name} resolves at most {MOST_ANCHORS[dtype]:,}. Use float64, or fewer heads."
        )
    size = query_size(w, t, domain, dtype)
    require_ordinary(dtype, spacing=(high - low) / (p - 1), largest_number=max(high, -low, size))
    made = FoldedSharedRamp(
        torch.tensor(w, dtype=dtype),
        torch.tensor(t, dtype=dtype),
        ends=ends,
        anchors=p,
        heads=heads,
        sharpness=kappa,
    )
    stored, u, q = float(made.sharpness), Precision.of(dtype).unit, half_window_for(float(made.sharpness))
    spacing, largest, width = (high - low) / (p - 1) * (1 + 1e-12), max(abs(low), abs(high)), (high - low) * (1 + 1e-12)
    places = mul_up(1.01 * u, add_up(mul_up(float(w.shape[1] + 5), size), 4 * width, largest))
    weights = mul_up(1.01 * u * (96 + 8 * stored + 32 * q * (heads + 1)), width)
    outputs = mul_up(1.01 * u, add_up(8 * width, 4 * largest))
    return made, [
        Term("approximation", mul_up(spacing, ramp_constant(p, stored)), "Δ · C(p, κ)", "ramp", {"spacing": spacing}),
        Term("sharing", mul_up(width, sharing_excess(stored * (1 - 1e-6))), "(b − a) · S(κ)", "shared-anchors", {}),
        Term("window", mul_up(width, float(heads), window_excess(stored, q)), "keys beyond 2q", "ramp", {}),
        Term("place rounding", places, "u((dim + 5)·max|u| + 4(b − a) + max(|a|, |b|))", "ramp", {"size": size}),
        Term("score rounding", weights, "u(96 + 8κ + 32q(H + 1))(b − a)", "shared-anchors", {"sharpness": stored}),
        Term("output rounding", outputs, "u(8(b − a) + 4max(|a|, |b|))", "ramp", {"u": u}),
    ]
