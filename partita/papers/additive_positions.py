"""Additive positions: one head, shared by all tokens, that computes another function at each position."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor, nn

from partita.arithmetic.arguments import real_array, require_dtype, require_number
from partita.arithmetic.precision import Precision
from partita.arithmetic.rounding import add_up, div_up, down, exp_up, mul_up, sqrt_up, sub_down, up
from partita.errors import (
    DomainError,
    NonFiniteValueError,
    NotContinuousError,
    NothingKnownError,
    ShapeError,
    SizeError,
    ToleranceError,
)
from partita.functions.derivatives import lipschitz_bounds
from partita.functions.target import Target, make_target
from partita.geometry.domains import Array, Box, BoxLike
from partita.geometry.grid import ProductGrid
from partita.geometry.moments import soft_maximum_gap
from partita.heads.head import real_tensor
from partita.heads.layers import LinearSum, SelfNetwork
from partita.heads.scattered_head import ScatteredHead, exponent_cut
from partita.heads.tokenwise_layers import tokenwise_layers
from partita.proofs.center_values import value_table
from partita.proofs.certificate import Term, total
from partita.proofs.claim import require_ordinary
from partita.proofs.layers_claim import claim_layers
from partita.proofs.running import running_terms

__all__ = ["PositionalHead", "positional_head"]

_MOST_KEYS = 100_000


@dataclass(frozen=True, eq=False)
class PositionalHead:
    """One head that computes another function at each position, from `x_i + e_i` alone.

    Attributes:
        head: the head on encoded tokens, the same for all positions.
        encodings: e, `(tokens, width)`, width ≥ dim.
        domain: the box of one token.
        targets: f_i.
        terms: of the bound.
        tolerance: that was asked for.
    """

    head: ScatteredHead
    encodings: Array
    domain: Box
    targets: tuple[Target, ...]
    terms: tuple[Term, ...]
    tolerance: float

    @property
    def error_bound(self) -> float:
        """Proved: `|net(x + e_i) − f_i(x)|_∞` for every position i and every x of the box, rounding included."""
        return total(self.terms)

    def encoded(self, x: Any) -> Tensor:
        """`[x_i; 0] + e_i`, `(…, tokens, width)`."""
        z = real_tensor("tokens", x).to(self.head.dtype)
        tokens, width = self.encodings.shape
        if z.dim() < 2 or z.shape[-2:] != (tokens, self.domain.dimension):
            raise ShapeError(f"tokens have shape {tuple(z.shape)}; expected (…, {tokens}, {self.domain.dimension}).")
        padded = nn.functional.pad(z, (0, width - z.shape[-1]))
        return padded + torch.tensor(self.encodings, dtype=self.head.dtype)

    def __call__(self, x: Any) -> Tensor:
        """`(…, tokens, dim)` to `(…, tokens, out)`."""
        out: Tensor = self.head(self.encoded(x))
        return out

    def layers(self, *, dtype: torch.dtype | None = None, tolerance: float | None = None) -> SelfNetwork:
        """The paper's layers: `Linear(X) = [X 0; 0 0; 0 I] + R`, and R holds the encodings in its first columns.

        Their `error_bound` is proved for these layers as they run, on tokens of the domain: that of the head plus `rounding`. Their
        scores are dot products of encoded tokens and keys, which round more than the head's distances where encodings are large.

        *Theorem*: `layers-rounding`.

        Args:
            dtype: of the layers, torch.float64 or torch.float32; that of the head if None.
            tolerance: the largest error bound to accept; that of the head if None. `math.inf` accepts any.

        Raises:
            ToleranceError: the error bound exceeds the tolerance.
            SizeError: the tensors would be too large.
            UnsupportedError: another dtype.

        >>> built = positional_head(["x", "-x"], [[0], [4]], Box([-1], [1]), tolerance=0.1)
        >>> built.error_bound < built.layers().error_bound < 0.1
        True
        """
        if dtype is not None:
            require_dtype(dtype)
        tokens, dim = len(self.encodings), self.domain.dimension
        network = tokenwise_layers(self.head, tokens, encodings=self.encodings, dtype=dtype)
        left = network.linear.left[:, :, :dim].contiguous()
        network = SelfNetwork(
            LinearSum(left, network.linear.right, network.linear.constant),
            network.attention,
            form=network.form,
            input_shape=(tokens, dim),
            output_shape=network.output_shape,
        )
        return claim_layers(
            network,
            self.head,
            self.terms,
            Box(np.tile(self.domain.lo, (tokens, 1)), np.tile(self.domain.hi, (tokens, 1))),
            tolerance=self.tolerance if tolerance is None else tolerance,
            mean_distance=1.0,  # the terms bound Σ_j w_j |V_j − f_i(x)|
        )


def positional_head(
    functions: Sequence[Any],
    encodings: ArrayLike,
    domain: BoxLike,
    *,
    tolerance: float,
    dtype: torch.dtype = torch.float64,
) -> PositionalHead:
    """One head, shared by all tokens, that computes f_i at position i: its keys are `v_j + e_i`, its values `f_i(v_j)`.

    `|net(x + e_i) − f_i(x)| ≤ L√(ρ² + 2W((G−1)/e)/R) + (n−1)G e^{−R(s²−ρ²)/2}·D`, ρ the covering radius of the G centers v_j, s the
    distance between the boxes `domain + e_i`, D the spread of the values.

    *Theorem*: `additive-positions`.

    Args:
        functions: f_i, one expression on the domain per position.
        encodings: e, `(tokens, width)` with width ≥ dim. Tokens are padded with zeros to that width, so one-hot encodings in
            coordinates of their own are `[0; λI]`.
        domain: the box of one token, `(dim,)`.
        tolerance: of the error, rounding included.
        dtype: torch.float64 or torch.float32.

    Raises:
        ShapeError: encodings and functions do not fit together.
        NonFiniteValueError: an encoding is NaN or infinite.
        DomainError: the boxes `domain + e_i` of two positions touch: x + e_i does not tell the position.
        NothingKnownError: a function is a black box.
        NotContinuousError: a function is not Lipschitz.
        SizeError: more than 100,000 keys.
        ToleranceError: rounding alone exceeds the tolerance.

    >>> built = positional_head(["x", "x^2", "-x"], [[0], [4], [8]], Box([-1], [1]), tolerance=0.1)
    >>> built(torch.tensor([[0.5], [0.5], [0.5]])).shape, built.error_bound <= 0.1
    (torch.Size([3, 1]), True)
    """
    domain = Box.of(domain)
    e, tolerance = real_array("encodings", encodings), require_number("tolerance", tolerance)
    require_dtype(dtype)
    functions = [functions] if isinstance(functions, str) or not isinstance(functions, Sequence) else functions
    if not isinstance(domain, Box):
        raise DomainError(f"the domain is {domain!r}; expected the pa.Box of one token.")
    if domain.lo.ndim != 1 or e.ndim != 2 or e.shape[1] < domain.dimension or len(e) != len(functions) or not len(e):
        raise ShapeError(
            f"{len(functions)} functions, encodings {e.shape}, the domain {domain.shape}; expected one row of encodings per "
            "function, at least as wide as a token (dim,)."
        )
    if not np.isfinite(e).all():
        row = int(np.flatnonzero(~np.isfinite(e).all(axis=1))[0])
        raise NonFiniteValueError(f"the encoding of position {row} is {e[row].tolist()}; expected finite numbers.")
    targets = tuple(make_target(f, domain) for f in functions)
    if any(t.graph is None for t in targets) or len({t.output_shape for t in targets}) > 1:
        raise NothingKnownError("positional_head needs every f_i as an expression, all with the same shape of output.")
    apart = _apart(e, domain)
    slope, spread = _slopes(targets, domain)
    precision = Precision.of(dtype)
    reach = float(np.maximum(np.abs(domain.lo), np.abs(domain.hi)).sum() + np.abs(e).sum(axis=1).max()) * (1 + 1e-12)
    moved = mul_up(4.0, precision.unit, reach)  # storing x, e and the centers, and adding
    left = tolerance - 3 * slope * moved
    if left <= 0:
        raise ToleranceError(
            f"tolerance {tolerance:g}: rounding in {precision.name} moves x + e by up to {moved:.3g} and so f by up to "
            f"{slope * moved:.3g}",
            f"Use a larger tolerance{', smaller encodings, or float64' if precision.rounds_inputs else ' or smaller encodings'}.",
        )
    wanted = min(0.8 * left / slope if slope else math.inf, 0.5 * apart, float(np.linalg.norm(domain.sides)))
    exact = np.ceil(domain.sides * math.sqrt(domain.dimension) / (2 * wanted) * (1 - 1e-12)).clip(1)
    keys = len(e) * float(exact.prod())
    if keys > _MOST_KEYS:
        raise SizeError(
            f"tolerance {tolerance:g} needs {keys:.3g} keys with Lipschitz constant {slope:.3g}; at most {_MOST_KEYS:,} are built."
        )
    counts = exact.astype(int)
    grid = ProductGrid.uniform(domain, tuple(map(int, counts)))
    centers = grid.centers_of(np.arange(grid.num_cells))
    tables = [value_table(t, centers, dtype) for t in targets]
    rho = float(up(float(np.linalg.norm(domain.sides / (2 * counts))), 8)) * (1 + 1e-12)
    rate = float(precision.number(_rate(slope, spread, left, rho, apart, len(e), len(centers))))
    padded = np.zeros((len(e), len(centers), e.shape[1]))
    padded[:, :, : domain.dimension] = centers
    placed = (padded + e[:, None]).reshape(-1, e.shape[1])
    require_ordinary(dtype, inverse_temperature=rate, squared_length=float((placed**2).sum(axis=1).max()) + 1.0)
    head = ScatteredHead(
        torch.tensor(placed, dtype=dtype),
        rate,
        torch.cat([values for values, _ in tables]),
        input_shapes=((e.shape[1],),),
        output_shape=targets[0].output_shape or (1,),
    )
    largest = float(head.values.abs().max())
    terms = _terms(
        (slope, spread, rho, apart, rate),
        (len(e), len(centers), e.shape[1]),
        moved,
        largest,
        max(w for _, w in tables),
        dtype,
    )
    if total(terms) > tolerance:
        raise ToleranceError(
            f"tolerance {tolerance:g}: {total(terms):.3g} can be proved in {precision.name}",
            f"Use a larger tolerance{', or float64' if precision.rounds_inputs else ''}.",
        )
    return PositionalHead(head, e, domain, targets, tuple(terms), float(tolerance))


def _apart(e: Array, domain: Box) -> float:
    """The least distance between the boxes of two positions, rounded down; infinite for one position."""
    if len(e) == 1:
        return math.inf
    gap = np.abs(e[:, None] - e[None])
    gap[..., : domain.dimension] = np.maximum(gap[..., : domain.dimension] - domain.sides, 0)
    distance = np.sqrt((gap**2).sum(axis=2))
    distance[np.arange(len(e)), np.arange(len(e))] = np.inf
    found = float(down(distance.min() - 4e-16 * (np.abs(e).max() + np.abs(domain.sides).max()), 16))
    if not found > 0:
        i, j = np.unravel_index(int(distance.argmin()), distance.shape)
        raise DomainError(
            f"the boxes of positions {i} and {j}, the domain plus their encodings, are {max(found, 0.0):g} apart, so x + e does "
            "not tell the position and no head shared by all tokens can tell f_i from f_j",
            "Use encodings that are farther apart than the domain is wide, or coordinates of their own.",
        )
    return found


def _slopes(targets: Sequence[Target], domain: Box) -> tuple[float, float]:
    """The largest proved Lipschitz constant, and a bound of the difference of any two values."""
    largest = slope = 0.0
    for target in targets:
        assert target.graph is not None
        found = lipschitz_bounds(target.graph, domain.lo, domain.hi)
        if not found.is_lipschitz:
            raise NotContinuousError(
                f"{target.label} may jump or be infinitely steep near {found.rough_lo[0].tolist()}; expected Lipschitz functions."
            )
        slope, largest = max(slope, found.euclidean), max(largest, found.magnitude)
    return slope, mul_up(2.0, largest)


def _rate(slope: float, spread: float, tolerance: float, rho: float, apart: float, tokens: int, cells: int) -> float:
    """R for which softness takes the bound to 0.97 of the tolerance, and other positions a thousandth of it."""
    room = (0.97 * tolerance / slope) ** 2 - rho**2 if slope else math.inf
    soft = 2 * soft_maximum_gap(cells) / room if room > 0 else math.inf
    far = 0.0
    if tokens > 1 and spread:
        far = 2 * math.log(max(2.0, 1000 * (tokens - 1) * cells * spread / tolerance)) / (apart**2 - rho**2)
    return max(soft, far, 1.0 / max(rho, 1e-150) ** 2)


def _terms(
    facts: tuple[float, float, float, float, float],
    sizes: tuple[int, int, int],
    moved: float,
    largest: float,
    value_error: float,
    dtype: torch.dtype,
) -> list[Term]:
    slope, spread, rho, apart, rate = facts
    tokens, cells, width = sizes
    u = Precision.of(dtype).unit
    near = add_up(rho, moved)
    softness = div_up(mul_up(2.0, soft_maximum_gap(cells)), rate)
    distance = add_up(sqrt_up(add_up(mul_up(near, near), softness)), moved)
    key = "additive-positions"
    approximation = Term(
        "approximation",
        mul_up(slope, distance),
        "L√(ρ² + 2W((G−1)/e)/R)",
        key,
        {"constant": slope, "radius": rho, "softness": softness, "moved": moved},
    )
    leak = 0.0
    if tokens > 1:
        least = max(0.0, sub_down(apart, moved))
        gap = sub_down(float(down(least * least)), float(up(near * near)))
        leak = min(1.0, mul_up(float((tokens - 1) * cells), exp_up(-float(down(rate / 2 * gap, 2)))))
    other = Term(
        "other positions",
        mul_up(leak, spread),
        "(n−1)G e^{−R(s²−ρ²)/2} · spread",
        key,
        {"leak": leak, "apart": apart, "spread": spread},
    )
    cut = exponent_cut(tokens * cells)
    score = add_up(mul_up(rate / 2, near, near), cut)
    running = running_terms(
        add_up(approximation.value, other.value),
        mass_left_out=mul_up(float(tokens * cells), exp_up(-cut * (1 - 1e-6))),
        score_error=mul_up(u, add_up(mul_up(float(width + 8), score), 16.0)),
        operations=float(2 * tokens * cells + width + 16),
        unit_roundoff=u,
        largest=largest,
        spread=spread,
        value_error=value_error,
    )
    return [approximation, other, *running]
