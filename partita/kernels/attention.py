"""`partita.attend`: softmax attention over points, pruned to a tolerance, with a bound of what that and rounding changed."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from partita.arithmetic.precision import Precision
from partita.errors import DomainError, ShapeError, UnsupportedError
from partita.kernels.attend_operator import Operands, attend_near, share_left_out, sum_scattered
from partita.kernels.key_index import KeyIndex
from partita.kernels.trace_modes import wants_operator

__all__ = ["Attended", "attend"]

_LONGEST_CUT = {torch.float64: 746.0, torch.float32: 105.0}  # e^{−cut} underflows: a dense softmax has zeros there too


class Attended(NamedTuple):
    """What `attend` returns.

    Attributes:
        output: `(Q, out)`, the weighted means of the values.
        lse: `(Q,)`, `log Σ_j exp(−R(|q − k_j|² − p_j)/2)`.
        bound: `(Q,)`, an upper bound of how far each output lies from exact arithmetic over all keys.

    >>> import torch, partita as pa
    >>> x = torch.tensor([[0.0], [1.0]])
    >>> pa.attend(x, x, x, inverse_temperature=50.0, tolerance=1e-6)._fields
    ('output', 'lse', 'bound')
    """

    output: Tensor
    lse: Tensor
    bound: Tensor


def attend(
    queries: Tensor,
    keys: Tensor | KeyIndex,
    values: Tensor,
    *,
    inverse_temperature: float | Tensor,
    powers: Tensor | None = None,
    tolerance: float,
) -> Attended:
    """Softmax attention over points: `Σ_j w_j V_j` with weights `w_j ∝ exp(−R(|q − k_j|² − p_j)/2)`.

    Keys whose weights cannot matter are skipped, in boxes. This is the inner loop of kernel regression, mean shift, Hopfield
    retrieval and Sinkhorn iterations at small temperature. Where nothing can be left out (high temperatures, more than eight
    dimensions, few keys), every key is summed. Differentiable in queries, keys, values, powers and inverse temperature; the
    bound is not.

    Args:
        queries: `(Q, m)`, float64 or float32. NaN gives NaN in its own row.
        keys: `(N, m)`, or a `KeyIndex`, which is prepared once for many calls.
        values: `(N, out)`.
        inverse_temperature: R > 0, a number or a tensor without dimensions.
        powers: p, `(N,)`, or None for zero. A `KeyIndex` has its own.
        tolerance: how much leaving keys out may change an output, absolutely (and `lse`, relative to 1). Rounding comes on top;
            the bound covers both. 0 leaves out only keys whose weights underflow.

    Raises:
        ShapeError: shapes, dtypes or devices that do not fit together.
        DomainError: an inverse temperature that is not finite and > 0, a negative tolerance, keys, powers or values that are not
            finite.

    >>> import torch, partita as pa
    >>> _ = torch.manual_seed(0)
    >>> keys = torch.rand(5000, 2, dtype=torch.float64)
    >>> values = torch.sin(3 * keys[:, :1])
    >>> found = pa.attend(keys[:4], pa.KeyIndex(keys), values, inverse_temperature=1e5, tolerance=1e-9)
    >>> dense = torch.softmax(-0.5e5 * torch.cdist(keys[:4], keys) ** 2, dim=1) @ values
    >>> bool((found.output - dense).abs().max() <= found.bound.max()), bool(found.bound.max() < 1e-8)
    (True, True)
    """
    index = keys if isinstance(keys, KeyIndex) else KeyIndex(keys, powers)
    if index is keys and powers is not None:
        raise UnsupportedError("powers were given with a KeyIndex; expected them in KeyIndex(keys, powers).")
    keys, powers = index.keys, index.powers
    _require_shapes(queries, keys, values)
    rate = torch.as_tensor(inverse_temperature, dtype=queries.dtype, device=queries.device)
    if rate.dim():
        raise ShapeError(f"inverse_temperature has shape {tuple(rate.shape)}; expected a number.")
    if not 0 <= tolerance < math.inf:
        raise DomainError(f"tolerance is {tolerance}; expected a finite number ≥ 0.")
    found = values.detach()
    high, low = found.amax(dim=0), found.amin(dim=0)
    spread, largest = float((high - low).max()), float(torch.maximum(high, -low).max())
    if not (math.isfinite(spread) and 0 < float(rate.detach()) < math.inf):
        raise DomainError(
            f"values spread over {spread}, inverse_temperature is {float(rate.detach())}; expected finite values and a finite "
            "number > 0."
        )
    given = Operands(keys, values, powers, None, rate, _cut(len(keys), spread, tolerance, queries.dtype))
    tracked = torch.is_grad_enabled() and any(
        t is not None and t.requires_grad for t in (queries, keys, values, powers, rate)
    )
    plain = tracked or torch.compiler.is_compiling() or not wants_operator(queries)
    output, lse, dropped, depth = sum_scattered(queries, given) if plain else attend_near(queries, given, index)
    sizes = (index.largest_power, float(rate.detach()))
    return Attended(output, lse, _bound(lse.detach(), dropped, depth, given, spread, largest, sizes))


def _cut(count: int, spread: float, tolerance: float, dtype: torch.dtype) -> float:
    """T with `N e^{−T} max(spread, 1) ≤ tolerance`: keys that trail the best score by more may go."""
    longest = _LONGEST_CUT[dtype]
    if tolerance == 0:
        return longest + math.log(count)
    return min(longest, max(1.0, math.log(count) + math.log(max(spread, 1.0)) - math.log(tolerance))) + 1e-6


def _bound(
    lse: Tensor,
    dropped: Tensor,
    depth: Tensor,
    given: Operands,
    spread: float,
    largest: float,
    sizes: tuple[float, float],
) -> Tensor:
    """Mass left out times the spread of the values; weights that rounded scores move; sums that round.

    *Theorem*: `window-tail` and `score-rounding`. A score is off by `(m + 6)u` of `R(|q − k|² + |p|)/2`, its exponential by 4u. If
    weights are off by factors `1 + η_j`, the mean moves by `spread·E|η|/(1 − E|η|)` at most, E the mean under the weights. That of
    `R|q − k|²/2 − Rp/2 = −s` is `H − lse`, H the entropy of the weights, which is at most `ln N`.
    """
    power, rate = sizes
    m, count, unit = given.keys.shape[1], len(given.keys), Precision.of(lse.dtype).unit
    size = math.log(count) - lse.double() + rate * power
    delta = 1.01 * ((m + 6) * unit * size + 4 * unit)
    moved = torch.where(delta < 0.1, delta / (1 - delta), 1.0) * spread
    left_out = share_left_out(lse, dropped, given, power) * spread
    summed = (depth.double() + 8) * unit * largest
    return (1.01 * (left_out + moved + summed)).to(lse.dtype)


def _require_shapes(queries: Tensor, keys: Tensor, values: Tensor) -> None:
    for name, tensor in (("queries", queries), ("values", values)):
        if not isinstance(tensor, Tensor):
            raise ShapeError(f"{name}: found {type(tensor).__name__}; expected a tensor.")
    if queries.dtype not in (torch.float64, torch.float32):
        raise ShapeError(f"queries have dtype {queries.dtype}; expected torch.float64 or torch.float32.")
    if keys.dim() != 2 or queries.dim() != 2 or queries.shape[1] != keys.shape[1]:
        raise ShapeError(
            f"queries have shape {tuple(queries.shape)}, keys {tuple(keys.shape)}; expected (Q, m) and (N, m)."
        )
    if values.dim() != 2 or len(values) != len(keys) or not values.shape[1]:
        raise ShapeError(f"values have shape {tuple(values.shape)}; expected ({len(keys)}, out) with out ≥ 1.")
    for name, tensor in (("keys", keys), ("values", values)):
        if tensor.dtype != queries.dtype or tensor.device != queries.device:
            raise ShapeError(
                f"{name} are {tensor.dtype} on {tensor.device}; expected {queries.dtype} on {queries.device}, as the queries."
            )
