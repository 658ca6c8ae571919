"""How much dropping keys can change a softmax output: masses bounded without exponentials, balls around values, the bound.

`attend_blocks` uses these functions while it runs, and `pa.inspect.audit` afterwards, so that both state the same bound.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional

__all__ = [
    "LEAST_SHARE",
    "LOG2_E",
    "change_bound",
    "distances",
    "needed_tiles",
    "norms",
    "score_drift",
    "tile_sums",
    "tiles_of",
    "upper_masses",
    "value_balls",
    "value_extent",
]

LOG2_E = math.log2(math.e)
LEAST_SHARE = 0.942  # slightly below (e/2)·ln 2 = 0.94208…, the minimum of 2^f/(1 + f) for 0 ≤ f ≤ 1
_FORMATS = {torch.float64: (52, 1023, torch.int64), torch.float32: (23, 127, torch.int32)}


def upper_masses(exponents: Tensor) -> Tensor:
    """`2^⌊t⌋(1 + t − ⌊t⌋)` for t ≤ 0, which is at least `2^t` and at most `2^t/LEAST_SHARE`; 0 for t = −∞.

    *Theorem*: `dropped-keys`. No exponential is computed: t in fixed point plus the exponent bias is the bit pattern of the result.

    Args:
        exponents: t, float64 or float32. Values below the least normal exponent are rounded up to it.
    """
    digits, bias, integers = _FORMATS[exponents.dtype]
    fixed = (exponents.clamp(min=1 - bias) * 2.0**digits).to(integers) + (bias << digits)
    return fixed.view(exponents.dtype).masked_fill(exponents == -torch.inf, 0.0)  # the same bits, read as a float


def tiles_of(tensor: Tensor, width: int, fill: float) -> Tensor:
    """The last axis cut into tiles, `(…, tiles, width)`; the last tile is padded.

    Args:
        tensor: `(…, keys)`.
        width: keys per tile.
        fill: what the last tile is padded with.
    """
    tiles: Tensor = functional.pad(tensor, (0, -tensor.shape[-1] % width), value=fill).unflatten(-1, (-1, width))
    return tiles


def tile_sums(masses: Tensor, width: int) -> Tensor:
    """Sums over tiles of keys, `(…, tiles)`.

    Args:
        masses: `(…, keys)`.
        width: keys per tile.
    """
    return tiles_of(masses, width, 0.0).sum(dim=-1)


def needed_tiles(best: Tensor, threshold: float | Tensor) -> Tensor:
    """Which rows need which tiles: those where `exp(tile max − running max) ≥ threshold`, `(…, rows, tiles)`.

    The running maximum includes the tile, so that every row needs the first tile that it sees. A row needs no tile that it does
    not see. Tiles with NaN scores are kept.

    Args:
        best: `(…, rows, tiles)`, the largest score of each tile in natural units, −∞ where the row sees no key of it.
        threshold: from 0 to 1; a number, or a tensor that broadcasts.
    """
    gap = best - best.cummax(dim=-1).values
    least = torch.as_tensor(threshold, dtype=best.dtype, device=best.device).log()
    return (best != -torch.inf) & ~(gap < least)


def norms(vectors: Tensor) -> Tensor:
    """Euclidean norms, `(…)`, of `(…, dim)`. Scaled so that squares neither overflow nor underflow.

    Args:
        vectors: `(…, dim)`.
    """
    size = _size(vectors, (-1,)) if vectors.shape[-1] else vectors.new_ones(*vectors.shape[:-1], 1)
    found: Tensor = torch.linalg.vector_norm(vectors / size, dim=-1) * size[..., 0]
    return found


def distances(points: Tensor, centers: Tensor) -> Tensor:
    """Euclidean distances `(batch, n, m)` of points `(batch, n, dim)` and centers `(batch, m, dim)`, scaled as in `norms`.

    Args:
        points: `(batch, n, dim)`.
        centers: `(batch, m, dim)`.
    """
    size = _size(torch.cat([points, centers], dim=1), (-2, -1)) if points.shape[-1] else 1.0
    return torch.cdist(points / size, centers / size, compute_mode="donot_use_mm_for_euclid_dist") * size


def _size(vectors: Tensor, axes: tuple[int, ...]) -> Tensor:
    """The largest absolute value over some axes (kept as length 1); 1 where it is 0 or not finite."""
    largest = vectors.abs().amax(dim=axes, keepdim=True)
    return torch.where((largest > 0) & (largest < torch.inf), largest, 1.0)


def value_balls(values: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Centers `(…, tiles, dim)` and radii `(…, tiles)` of balls that enclose the values of each tile.

    Args:
        values: `(…, keys, dim)`.
        width: keys per tile.
    """
    keys, dim = values.shape[-2:]
    tiles = -(-keys // width)
    index = torch.arange(tiles * width, device=values.device).clamp(max=keys - 1)  # padded with the last vector
    cut = values.index_select(-2, index).unflatten(-2, (tiles, width))
    centers = cut.mean(dim=-2)
    radii = norms(cut - centers[..., None, :]).amax(dim=-1)
    return centers, radii * (1 + (dim + 8) * _unit(values.dtype)) + _least(values.dtype)


def value_extent(values: Tensor, centers: Tensor, radii: Tensor) -> tuple[Tensor, Tensor]:
    """Upper bounds on the distance between two means of values and on their norms; both `(…)`.

    Args:
        values: `(…, keys, dim)`.
        centers: of `value_balls`.
        radii: of `value_balls`.
    """
    up = 1 + (values.shape[-1] + 8) * _unit(values.dtype)
    middle = centers.mean(dim=-2, keepdim=True)
    spread = 2 * (norms(centers - middle) + radii).amax(dim=-1) * up
    return spread, norms(values).amax(dim=-1) * up + _least(values.dtype)


def score_drift(products: Tensor, largest: Tensor, dim: int, unit: float) -> Tensor:
    """How far rounding may move a score and its exponent, `(d + 16)u(|scale||q| max|k| + |largest score|)`.

    Args:
        products: `|scale||q| max|k|`.
        largest: the largest absolute score that matters.
        dim: d, the dimension of the keys.
        unit: u, the unit roundoff of the product.
    """
    return (dim + 16) * unit * (products + largest)


def change_bound(
    weighted: Tensor,
    upper: Tensor,
    kept: Tensor,
    *,
    drift: Tensor,
    spread: Tensor,
    largest: Tensor,
    terms: int,
) -> Tensor:
    """`Σ_b U_b(|o − c_b| + r_b)/(Z + Σ_b L_b)` over tiles b that were dropped, rounded up; 0 where nothing was dropped.

    *Theorem*: `dropped-keys`. `L_b = LEAST_SHARE·U_b`. The effect of rounded scores on masses and on o is included, so that
    the bound holds for the exact change and for one computed separately in the same precision from the same numbers. The largest
    distance between means of values is also a bound; the smaller of the two is returned.

    Args:
        weighted: `Σ_b U_b(|o − c_b| + r_b)`.
        upper: `Σ_b U_b`.
        kept: Z, the mass of the keys that were kept, relative to the same maximum as U.
        drift: how far a score may be off.
        spread: largest possible distance between the outputs with and without the keys.
        largest: largest norm of a value.
        terms: number of keys plus dimension of the values, for rounded sums.
    """
    rounding = 4 * (terms + 16) * _unit(weighted.dtype)
    grown = torch.expm1(4 * drift)
    moved = grown * spread + rounding * largest  # error of o in |o − c_b|
    found = (1 + grown) * (weighted + moved * upper) / (kept + LEAST_SHARE * upper)
    found = found * (1 + rounding) + _least(weighted.dtype)  # underflow must not give 0
    found = torch.fmin(found, spread)  # fmin: huge scores may give inf/inf
    return torch.where(upper > 0, found, 0.0)


def _least(dtype: torch.dtype) -> float:
    """The least normal number, which exceeds the rounding error of subnormal results."""
    return torch.finfo(dtype).tiny


def _unit(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).eps / 2
