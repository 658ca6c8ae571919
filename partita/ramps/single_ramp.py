"""The second paper's ramp: `Range_[a,b](w_i·x_i + t_i)` for every token of a sequence, by one head with p anchors."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import ArrayLike

from partita.arithmetic.arguments import require_dtype
from partita.arithmetic.precision import Precision
from partita.arithmetic.rounding import add_up, mul_up, up
from partita.errors import DomainError, ShapeError, SizeError
from partita.geometry.domains import Array, Box, BoxLike
from partita.geometry.grid import ProductGrid
from partita.proofs.certificate import Certificate, Term
from partita.proofs.claim import claim, require_ordinary
from partita.ramps.anchors import best_sharpness, half_window_for, ramp_constant, require_ramp
from partita.ramps.ramp_head import RampHead, anchor_grid

__all__ = ["HARD_SHARPNESS", "Ramp", "checked_affine", "checked_ends", "query_size", "ramp", "resolve_sharpness"]

HARD_SHARPNESS = 1024.0  # 0.492 of a spacing; the limit is 0.5
MOST_ANCHORS = {torch.float64: 1 << 40, torch.float32: 1 << 20}  # their numbers are floats of the dtype


@dataclass(frozen=True, eq=False)
class Ramp:
    """A ramp head, the partition of its u-axis into the anchors' cells, and what is proved about it on `domain`."""

    head: RampHead
    partition: ProductGrid
    certificate: Certificate
    domain: Box

    @property
    def error_bound(self) -> float:
        return self.certificate.error_bound

    @property
    def spacing(self) -> float:
        """Δ = (b − a)/(p − 1)."""
        return (self.head.ends[1] - self.head.ends[0]) / (self.head.anchors - 1)

    @property
    def beta(self) -> float:
        """β = RΔ/2 = κ/(2Δ), the paper's inverse temperature: scores are `−β k(L_0 + L_k − 2u)` up to a constant."""
        return float(self.head.sharpness) / (2 * self.spacing)

    def exact(self, x: ArrayLike) -> Array:
        """`Range_[a,b](w_i·x_i + t_i)` in float64, for tokens `(…, tokens, dim)`: what the head is compared with."""
        slopes, offsets = self.head.slopes.double().numpy(), self.head.offsets.double().numpy()
        low, high = self.head.ends
        return np.asarray(np.clip((np.asarray(x, float) * slopes).sum(axis=-1) + offsets, low, high))


def ramp(
    slopes: ArrayLike,
    offsets: ArrayLike,
    ends: tuple[float, float],
    *,
    anchors: int,
    domain: BoxLike,
    sharpness: float | str | None = None,
    beta: float | None = None,
    output: tuple[int, int] = (0, 1),
    dtype: torch.dtype = torch.float64,
) -> Ramp:
    """A head that computes `min(max(w_i·x_i + t_i, a), b)` for every token i at once, in one coordinate of the output.

    `|net − ramp| ≤ Δ·C(p, κ)`, `Δ = (b − a)/(p − 1)`, with C exact (`ramp_constant`): 0.062 at the best finite temperature κ = 5.4,
    towards 0.5 when hard; so O(1/p), also where w·x + t lies outside [a, b]. Rounding in the dtype is added, term by term.

    That rate needs a temperature that follows p. `sharpness` fixes κ, so the paper's β = κ/(2Δ) grows like p; this is the
    default, and `Ramp.beta` says which β was chosen. `beta` fixes β itself. Then κ = 2βΔ falls, the error is at most
    `√(Δ/(πβ)) + Δ/2`, tends to the first term, and falls like p^{−1/2} only.

    *Theorem*: `ramp`, `ramp-fixed-beta` (the second paper's single-head result; the constants are ours).

    Args:
        slopes: w, `(tokens, dim)`, or `(dim,)` for one w and any number of tokens.
        offsets: t, `(tokens,)` or a number.
        ends: (a, b).
        anchors: p ≥ 2, both ends included.
        domain: the box of single tokens, `(dim,)`: rounding depends on how large w·x can get.
        sharpness: κ = RΔ² = 2βΔ, or "best" (the default), or "hard" (κ = 1024).
        beta: β, the paper's inverse temperature, in place of `sharpness`.
        output: (coordinate, out_dim) of the output tokens.

    Raises:
        DomainError: a ≥ b, p < 2, κ or a number out of the dtype's range, or both `sharpness` and `beta`.
        ShapeError: slopes, offsets and domain that do not fit.

    >>> built = ramp([1.0], 0.0, (0, 1), anchors=11, domain=Box([-2], [2]))
    >>> round(built.error_bound, 5), built.head(torch.tensor([[-1.5], [0.52], [1.7]])).shape
    (0.00619, torch.Size([3, 1]))
    >>> round(built.beta, 1), round(ramp([1.0], 0.0, (0, 1), anchors=1001, domain=Box([-2], [2])).beta)  # β grows with p
    (27.2, 2720)
    >>> round(ramp([1.0], 0.0, (0, 1), anchors=1001, domain=Box([-2], [2]), beta=27.2).error_bound, 5)  # 50 times the best
    0.00312
    """
    domain = Box.of(domain)
    w, t = checked_affine(slopes, offsets, domain, dtype)
    low, high = checked_ends(ends)
    if not 0 <= output[0] < output[1]:
        raise ShapeError(f"output is {output}; expected (coordinate, out_dim) with 0 ≤ coordinate < out_dim.")
    kappa = resolve_sharpness(sharpness, anchors, beta=beta, width=high - low)
    if anchors > MOST_ANCHORS[dtype]:
        raise SizeError(
            f"{anchors:,} anchors; {Precision.of(dtype).name} resolves at most {MOST_ANCHORS[dtype]:,}. Use "
            "float64, or fewer anchors."
        )
    require_ordinary(
        dtype, spacing=(high - low) / (anchors - 1), largest_number=max(high, -low, query_size(w, t, domain, dtype))
    )
    window = half_window_for(kappa)
    head = RampHead(
        torch.tensor(w, dtype=dtype),
        torch.tensor(t, dtype=dtype),
        ends=(low, high),
        anchors=anchors,
        sharpness=kappa,
        half_window=window,
        output=output,
    )
    terms = _terms(head, domain, w, t, window)
    certificate = claim(
        head,
        {"type": "ramp", "ends": [low, high], "tokens": len(w)},
        [domain],
        terms,
        dtype=dtype,
        theorem="ramp" if beta is None else "ramp-fixed-beta",
        details={"type": "ramp", "anchors": anchors, "sharpness": kappa},
        facts={
            "spacing": (high - low) / (anchors - 1),
            "constant": float(terms[0].inputs["constant"]),
            "beta": kappa * (anchors - 1) / (2 * (high - low)),
        },
    )
    return Ramp(head, anchor_grid((low, high), anchors), certificate, domain)


def resolve_sharpness(
    sharpness: float | str | None, anchors: int, *, beta: float | None = None, width: float = 1.0, default: str = "best"
) -> float:
    """κ as a number, from κ itself, a word, or β and the width b − a: `κ = 2β(b − a)/(p − 1)`.

    "best" depends on p only for p < 4.
    """
    if beta is not None:
        if sharpness is not None:
            raise DomainError(f"sharpness is {sharpness!r} and beta is {beta!r}; expected one of them: κ = 2βΔ.")
        if not 0 < beta < np.inf:
            raise DomainError(f"beta is {beta!r}; expected a finite number > 0.")
        require_ramp(anchors, HARD_SHARPNESS)
        sharpness = 2 * beta * width / (anchors - 1)
    chosen = default if sharpness is None else sharpness
    if isinstance(chosen, str):
        if chosen not in ("best", "hard"):
            raise DomainError(f"sharpness is {chosen!r}; expected a number, 'best' or 'hard'.")
        require_ramp(anchors, HARD_SHARPNESS)
        return HARD_SHARPNESS if chosen == "hard" else best_sharpness(min(anchors, 64))
    require_ramp(anchors, chosen)
    return float(chosen)


def checked_ends(ends: tuple[float, float]) -> tuple[float, float]:
    """(a, b), finite and in order."""
    low, high = (float(e) for e in ends)
    if not (np.isfinite([low, high]).all() and low < high):
        raise DomainError(f"the ramp has a = {low:g} and b = {high:g}; expected finite a < b.")
    return low, high


def checked_affine(slopes: ArrayLike, offsets: ArrayLike, domain: Box, dtype: torch.dtype) -> tuple[Array, Array]:
    """w `(tokens, dim)` and t `(tokens,)`, checked against the box of a token; and the dtype."""
    require_dtype(dtype)
    if not isinstance(domain, Box):
        raise DomainError(f"the domain is {domain!r}; expected the box of a token, say pa.Box([-1, -1], [1, 1]).")
    w = np.atleast_2d(np.asarray(slopes, dtype=np.float64))
    t = np.atleast_1d(np.asarray(offsets, dtype=np.float64))
    t = np.broadcast_to(t, (len(w),)).copy() if t.size == 1 else t
    if w.ndim != 2 or t.shape != (len(w),) or w.shape[1:] != domain.shape or not np.isfinite([*w.flat, *t]).all():
        raise ShapeError(
            f"slopes have shape {np.shape(slopes)}, offsets {np.shape(offsets)}, tokens {domain.shape}; expected finite "
            "(tokens, dim), (tokens,) and a box of shape (dim,)."
        )
    most = torch.finfo(dtype).max / 16
    for what, array in (("coordinates", [domain.lo, domain.hi]), ("slopes", w), ("offsets", t)):
        if (largest := float(np.abs(array).max())) > most:
            raise DomainError(
                f"{what} of the ramp reach {largest:.3g}, which overflows {str(dtype).removeprefix('torch.')} "
                f"(limit {most:.3g}); rescale the tokens."
            )
    return w, t


def query_size(w: Array, t: Array, domain: Box, dtype: torch.dtype) -> float:
    """`max_i (|w_i|·|x| + |t_i|)` over the domain, rounded up: what u rounds relative to.

    Numbers below the dtype's normal ones lose up to `LEAST` instead; that is added in units of the unit roundoff.
    """
    reach = np.maximum(np.abs(domain.lo), np.abs(domain.hi)).ravel()
    lost = Precision.of(dtype).tiniest / Precision.of(dtype).unit * (np.abs(w).max(axis=0) + reach + 4).sum()
    return float(up((np.abs(w) @ reach + np.abs(t)).max() * (1 + 1e-12) + lost, 2))


def _terms(head: RampHead, domain: Box, w: Array, t: Array, window: int) -> list[Term]:
    """The approximation, and what the dtype's roundings of u, of its place among the anchors, of the weights and of the sum add."""
    u = Precision.of(head.dtype).unit
    low, high = head.ends
    kappa, p, dim = float(head.sharpness), head.anchors, w.shape[1]
    spacing, largest = float(up((high - low) / (p - 1), 2)), max(abs(low), abs(high))
    constant = ramp_constant(min(p, 2 * window), kappa)
    approximation = mul_up(spacing, constant)
    size = query_size(w, t, domain, head.dtype)
    queries = mul_up(1.01 * (dim + 4) * u, size)
    place = mul_up(1.01 * u, add_up(4 * (high - low), largest, size))
    spread = 10 if kappa >= 1 else 16  # soft weights are as wide as their window
    weights = mul_up(1.01 * u * (24 + 2 * kappa + spread * (window + 1) ** 2), spacing)
    outputs = mul_up(1.01 * u, add_up(6 * (high - low), 2 * largest))
    return [
        Term("approximation", approximation, "Δ · C(p, κ)", "ramp", {"spacing": spacing, "constant": constant}),
        Term("query rounding", queries, "(dim + 4)u · max(|w|·|x| + |t|)", "score-rounding", {"size": size}),
        Term("place rounding", place, "u(4(b − a) + max(|a|, |b|) + max|u|)", "ramp", {"u": u}),
        Term("score rounding", weights, f"u(24 + 2κ + {spread}(q + 1)²) · Δ", "ramp", {"sharpness": kappa}),
        Term("output rounding", outputs, "u(6(b − a) + 2 max(|a|, |b|))", "ramp", {"u": u}),
    ]
