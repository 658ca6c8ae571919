"""Two-layer universality: the first layer makes bumps that peak at the centers of a grid, the second selects f there."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from partita.arithmetic.rounding import add_up, exp_up, expm1_up, mul_up
from partita.errors import DomainError, NothingKnownError, ShapeError, SizeError
from partita.functions.derivatives import lipschitz_bounds
from partita.functions.target import Target, make_target
from partita.geometry.domains import Array, Box, BoxLike
from partita.geometry.grid import ProductGrid
from partita.heads.forms import indexed_self
from partita.heads.head import flatten_inputs
from partita.heads.layers import LinearSum, SelfNetwork
from partita.heads.scores import AffineScores
from partita.kernels.guards import certified
from partita.proofs.center_values import value_table
from partita.proofs.certificate import Certificate, Term
from partita.proofs.claim import claim, describe_function
from partita.proofs.form_rounding import literal_rounding
from partita.ramps.anchors import best_sharpness, ramp_constant
from partita.ramps.literal_ramps import ramp_layers
from partita.ramps.multi_head_ramps import MultiHeadRamp, best_shared_sharpness, multi_head_ramp, shared_constant
from partita.ramps.single_ramp import ramp

__all__ = ["BumpNetwork", "LayerThenSoftmax", "TwoLayers", "two_layers"]

_MOST_CELLS = 1 << 14
_SOFTENING = 0.02  # how much of the bound the first layer's errors may add


class TwoLayers(nn.Module):
    """`Attn₂ ∘ Linear₂ ∘ Attn₁ ∘ Linear₁`: first one head in the paper's form or an `nn.MultiheadAttention`, then one head."""

    def __init__(self, first: SelfNetwork | MultiHeadRamp, second: SelfNetwork) -> None:
        super().__init__()
        self.first, self.second = first, second

    @property
    def num_parameters(self) -> int:
        return self.first.num_parameters + self.second.num_parameters

    @certified
    def forward(self, z: Any) -> Tensor:
        out: Tensor = self.second(self.first(z))
        return out


class LayerThenSoftmax(nn.Module):
    """`V softmax(A·bumps)`: the same with the second attention replaced by a linear map, a softmax and a linear map.

    Buffers: `scores` A, `(cells, ramps)`; `values` V, `(cells, outputs)`.
    """

    scores: Tensor
    values: Tensor

    def __init__(
        self, first: SelfNetwork | MultiHeadRamp, scores: Tensor, values: Tensor, output_shape: tuple[int, ...]
    ) -> None:
        super().__init__()
        self.first, self.output_shape = first, output_shape
        self.register_buffer("scores", scores)
        self.register_buffer("values", values)

    @property
    def num_parameters(self) -> int:
        return self.first.num_parameters + self.scores.numel() + self.values.numel()

    @certified
    def forward(self, z: Any) -> Tensor:
        _, lead = flatten_inputs((z,), (self.first.input_shape,), self.values.dtype)
        ramps = self.first(z)[..., 0].reshape(-1, self.scores.shape[1])  # the others are 0
        weights = torch.softmax(ramps @ self.scores.transpose(0, 1), dim=1)
        return (weights @ self.values).reshape(*lead, *self.output_shape)


@dataclass(frozen=True, eq=False)
class BumpNetwork:
    """Both networks of the theorem, with one claim that holds for either.

    Attributes:
        anchors: of the first layer.
        sharpness: β, of the second softmax.
        heads: of the first layer.
    """

    two_layers: TwoLayers
    layer_then_softmax: LayerThenSoftmax
    partition: ProductGrid
    certificate: Certificate
    target: Target
    anchors: int
    sharpness: float
    heads: int = 1

    @property
    def error_bound(self) -> float:
        return self.certificate.error_bound


@dataclass(frozen=True, eq=False)
class _Bumps:
    """The first layer, what its ramps are off by, its anchors and its heads."""

    network: SelfNetwork | MultiHeadRamp
    error_bound: float
    anchors: int
    heads: int


def two_layers(
    function: Any,
    domain: BoxLike,
    *,
    cells: int,
    heads: int | Literal["auto"] | None = None,
    dtype: torch.dtype = torch.float64,
) -> BumpNetwork:
    """`f` on a box of sequences by two attention layers with `cells` bumps per coordinate: explicit weights, proved error.

    Layer 1 computes ramps `r_{i,k} = Range_[0,1]((z_i − c_k)/h_i + 1)`, so that `r_{i,k} − r_{i,k+1}` is a hat of height 1 at
    c_k; the bump of cell v is the sum of its hats. Layer 2 attends with `β·bump_v` and reads f(v).
    `|net − f| ≤ e^{2δ} Σ_i L_i(h_i/2 + side_i(P − 1)e^{−β/2})`, δ = 2βm·(ramp error), plus rounding: the grid's own bound, as
    a single layer has it (`grid-moments`), and then what the detour costs.

    With `heads`, layer 1 is an `nn.MultiheadAttention`: the m(P + 1) ramps are its tokens, and its heads share the anchors
    (`multi_head_ramp`), so a sequence of that length carries (m(P + 1) − 2)H of them. Without, it is one head over a sequence that
    its Linear lengthens to as many columns as there are anchors.

    *Theorem*: `bump-networks` (the second paper's two-layer result; constants ours).

    Args:
        function: an expression, or a Graph: its Lipschitz constants are proved.
        domain: a box `(tokens, dim)` or `(m,)`.
        cells: P ≥ 2.
        heads: of layer 1; "auto" for as many as keep the ramps' part of the bound at 2 %. Fewer make the bound larger.

    Raises:
        NothingKnownError: a black box.
        ShapeError: heads < 1, or 2 cells in one dimension with `heads`.
        SizeError: more than 16,384 cells.

    >>> built = two_layers("sin(3*x)", Box([-1], [1]), cells=8, heads="auto")
    >>> built.heads, type(built.two_layers.first).__name__, built.two_layers.first.attention.num_heads
    (156, 'MultiHeadRamp', 156)
    """
    domain = Box.of(domain)
    target = make_target(function, domain)
    if target.graph is None:
        raise NothingKnownError("two_layers needs f as an expression, from which its bound is proved.")
    m = domain.dimension
    if cells < 2 or cells**m > _MOST_CELLS:
        kind = DomainError if cells < 2 else SizeError
        raise kind(
            f"{cells} cells per coordinate in {m} dimensions; expected at least 2 per coordinate and at most "
            f"{_MOST_CELLS:,} in all."
        )
    beta = 2 * math.log(4000.0 * cells * cells)
    needed = 4 * beta * m / _SOFTENING  # anchors times spacings of error
    grid = ProductGrid.uniform(Box(domain.lo.ravel(), domain.hi.ravel()), cells)
    if heads is None:
        first = _single_head(grid, domain, 2 + math.ceil(needed * ramp_constant(64, best_sharpness(64))), dtype)
    else:
        first = _several_heads(grid, domain, heads, needed, dtype)
    values, value_error = value_table(target, grid, dtype)
    slopes = beta * _selection(cells, m)
    width = first.network.attention.embed_dim if isinstance(first.network, MultiHeadRamp) else 1
    spread = np.zeros((*slopes.shape, width))
    spread[:, :, 0] = slopes  # tokens of layer 1 have their ramp in the first coordinate
    scores = AffineScores(spread.reshape(len(slopes), -1), np.zeros(grid.num_cells), values.double().numpy())
    second = indexed_self(
        scores,
        input_shape=(m * (cells + 1), width),
        output_shape=target.output_shape,
        inverse_temperature=beta,
        dtype=dtype,
    )
    terms = _terms(target, grid, first, second, beta, value_error)
    network = TwoLayers(first.network, second)
    single = LayerThenSoftmax(first.network, torch.tensor(slopes, dtype=dtype), values, target.output_shape)
    certificate = claim(
        network,
        describe_function(target, np.zeros((0, m)), np.zeros((0, target.num_outputs))),
        [domain],
        terms,
        dtype=dtype,
        theorem="bump-networks",
        details={"type": "two layers"},
        facts={
            "anchors": float(first.anchors),
            "heads": float(first.heads),
            "cells": float(grid.num_cells),
            "sharpness": beta,
        },
    )
    return BumpNetwork(network, single, grid, certificate, target, first.anchors, beta, first.heads)


def _hats(grid: ProductGrid) -> tuple[Array, Array]:
    """w and t of the P + 1 ramps per coordinate, whose differences are the hats."""
    m, cells = grid.dimension, grid.counts[0]
    slopes, offsets = np.zeros((m * (cells + 1), m)), np.zeros(m * (cells + 1))
    for i, (low, side) in enumerate(zip(grid.box.lo, grid.box.sides)):
        h = side / cells
        rows = slice(i * (cells + 1), (i + 1) * (cells + 1))
        slopes[rows, i] = 1 / h
        offsets[rows] = 1 - (low / h + np.arange(cells + 1) + 0.5)
    return slopes, offsets


def _reading(slopes: Array, domain: Box, constant: Tensor) -> LinearSum:
    """A Linear whose row 0 is `w_j·z`, z the whole sequence, on column j; the constant adds the rest."""
    m = domain.dimension
    dim, tokens = (domain.shape[1], domain.shape[0]) if len(domain.shape) == 2 else (m, 1)
    left, right = np.zeros((m, constant.shape[0], dim)), np.zeros((m, tokens, constant.shape[1]))
    for k in range(m):
        left[k, 0, k % dim] = 1.0
        right[k, k // dim, : len(slopes)] = slopes[:, k]
    return LinearSum(torch.tensor(left, dtype=constant.dtype), torch.tensor(right, dtype=constant.dtype), constant)


def _single_head(grid: ProductGrid, domain: Box, anchors: int, dtype: torch.dtype) -> _Bumps:
    """The first layer as one head: all ramps over the same anchors, read from the whole sequence by one Linear."""
    slopes, offsets = _hats(grid)
    kappa = best_sharpness(64)
    built = ramp(slopes, offsets, (0.0, 1.0), anchors=anchors, domain=grid.box, sharpness=kappa, dtype=dtype)
    layers = ramp_layers(built)
    network = SelfNetwork(
        _reading(slopes, domain, layers.linear.constant),
        layers.attention,
        form="bumps",
        input_shape=domain.shape,
        output_shape=(len(slopes), 1),
    ).claiming(error_bound=layers.error_bound, rounding=layers.rounding)
    return _Bumps(network, layers.error_bound, anchors, 1)


def _several_heads(grid: ProductGrid, domain: Box, heads: int | str, needed: float, dtype: torch.dtype) -> _Bumps:
    """The first layer as an `nn.MultiheadAttention` of m(P + 1) tokens, read from the whole sequence by one Linear."""
    slopes, offsets = _hats(grid)
    if len(slopes) < 4:
        raise ShapeError(
            "2 cells in one dimension make 3 ramps; several heads need 4. Use 3 cells or more, or heads=None."
        )
    if heads == "auto":
        count, p = 1, len(slopes) - 2
        while p < (least := 2 + needed * shared_constant(p, best_shared_sharpness(p))):
            count = max(count + 1, math.ceil(least / (len(slopes) - 2)))  # the constant grows slowly with p
            p = (len(slopes) - 2) * count
    elif isinstance(heads, int) and heads >= 1:
        count = heads
    else:
        raise ShapeError(f"heads is {heads!r}; expected a whole number ≥ 1, 'auto', or None for a single head.")
    built = multi_head_ramp(slopes, offsets, (0.0, 1.0), heads=count, domain=grid.box, sharpness="best", dtype=dtype)
    assert isinstance(built.network, MultiHeadRamp)
    network = MultiHeadRamp(
        _reading(slopes, domain, built.network.linear.constant), built.network.attention, input_shape=domain.shape
    )
    return _Bumps(network, built.error_bound, built.anchors, count)


def _selection(cells: int, dimension: int) -> Array:
    """`(P^m, m(P + 1))`: row v has +1 at its ramps and −1 at the next ones: the sum of its hats."""
    index = np.stack(np.unravel_index(np.arange(cells**dimension), (cells,) * dimension), axis=1)
    found = np.zeros((len(index), dimension * (cells + 1)))
    for i in range(dimension):
        rows = np.arange(len(index))
        found[rows, i * (cells + 1) + index[:, i]] += 1.0
        found[rows, i * (cells + 1) + index[:, i] + 1] -= 1.0
    return found


def _terms(
    target: Target, grid: ProductGrid, first: _Bumps, second: SelfNetwork, beta: float, value_error: float
) -> list[Term]:
    assert target.graph is not None
    box = grid.box
    bounds = lipschitz_bounds(target.graph, box.lo, box.hi, relative_gap=0.02)
    if not bounds.is_lipschitz:
        raise NothingKnownError(f"{target.label} jumps or is infinitely steep near {bounds.rough_lo[0].tolist()}.")
    cells, m = grid.counts[0], grid.dimension
    leak = mul_up(float(cells - 1), exp_up(-beta / 2 * (1 - 1e-12)))
    grid_part = add_up(*(mul_up(float(c), s / cells / 2 * (1 + 1e-12)) for c, s in zip(bounds.per_axis, box.sides)))
    leaked = add_up(*(mul_up(float(c), float(s), leak) for c, s in zip(bounds.per_axis, box.sides)))
    delta = mul_up(2 * beta * m * (1 + 1e-12), first.error_bound)
    softened = mul_up(expm1_up(2 * delta), add_up(grid_part, leaked))
    tokens = np.zeros((m * (cells + 1), second.input_shape[-1]))
    tokens[:, 0] = 1.0 + first.error_bound  # the ramps; the other coordinates are 0
    ends = tokens.ravel()
    rounding = literal_rounding(second, -ends, ends)
    return [
        Term("approximation", grid_part, "Σ_i L_i h_i/2", "bump-networks", {"cells": float(cells)}),
        Term("leakage", leaked, "Σ_i L_i side_i (P − 1)e^{−β/2}", "bump-networks", {"sharpness": beta}),
        Term("bumps", softened, "(e^{2δ} − 1)·(approximation + leakage)", "bump-networks", {"delta": delta}),
        Term("rounding", rounding, "of the second layer's tensors", "score-rounding", {}),
        Term("stored values", value_error, "max |V_j − f(v_j)|", "score-rounding", {"error": value_error}),
    ]
