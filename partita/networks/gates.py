"""Gates: one small head per neuron. `u ↦ Σ_j softmax_j(α_j u + β_j)·(γ_j u + ε_j)`, and what is proved about each activation.

In the graph of a network a gate is matrix products, additions and a softmax. Its query is (u, 1), its keys are (α_j, β_j).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from partita.arithmetic.interval import Interval
from partita.arithmetic.rounding import up
from partita.errors import SizeError, ToleranceError
from partita.geometry.domains import Array
from partita.geometry.moments import soft_maximum_gap
from partita.networks.chains import Activation
from partita.networks.tables import tabulate_text

__all__ = ["GELU_REACH", "GELU_TEXTS", "RANGE", "Gate", "SoftGate", "WideGate", "gate_for"]

GELU_TEXTS = {
    "gelu": "0.5*x*(1 + erf(x*0.70710678118654752))",
    "gelu_tanh": "0.5*x*(1 + tanh(0.79788456080286536*(x + 0.044715*x^3)))",
}
# by unit roundoff: what a product may lose to underflow, and a size that no sum may exceed
RANGE = {2.0**-53: (2.0**-1074, 2.0**1020), 2.0**-24: (2.0**-149, 2.0**124), 0.0: (0.0, math.inf)}
GELU_REACH = 9.0  # beyond, GELU is 0 or u up to 1e-15
_GELU_TAIL = 1e-15
_GELU_LOWEST, _SILU_LOWEST = -0.1701, -0.27847
_GELU_STEEPEST, _SILU_STEEPEST = 1.1291, 1.0999


class SoftGate(nn.Module):
    """A gate with K keys; constant values if all γ are 0.

    Buffers: `keys`, `key_offsets`, `slopes`, `constants`: α, β, γ, ε. Shapes: `(batch, neurons)` to the same.
    """

    keys: Tensor
    key_offsets: Tensor
    slopes: Tensor
    constants: Tensor

    def __init__(self, alpha: Array, beta: Array, gamma: Array, epsilon: Array, dtype: torch.dtype) -> None:
        super().__init__()
        self.is_affine = bool(np.any(gamma))
        self.register_buffer("keys", torch.tensor(alpha, dtype=dtype).reshape(1, -1))
        self.register_buffer("key_offsets", torch.tensor(beta, dtype=dtype))
        self.register_buffer("slopes", torch.tensor(gamma, dtype=dtype).reshape(1, -1))
        self.register_buffer("constants", torch.tensor(epsilon, dtype=dtype))

    def forward(self, u: Tensor) -> Tensor:
        query = u.unsqueeze(-1)
        weights = torch.softmax(query @ self.keys + self.key_offsets, dim=-1)
        if not self.is_affine:
            return (weights @ self.constants.unsqueeze(-1)).squeeze(-1)
        values = query @ self.slopes + self.constants
        return (weights.unsqueeze(-2) @ values.unsqueeze(-1)).squeeze(-1).squeeze(-1)


class WideGate(nn.Module):
    """`table(clamp(u, −c, c)) + relu(u − c)`: a table that is evaluated inside its box only, and a line beyond it."""

    def __init__(self, clamp: SoftGate, line: SoftGate, table: SoftGate) -> None:
        super().__init__()
        self.clamp, self.line, self.table = clamp, line, table

    def forward(self, u: Tensor) -> Tensor:
        out: Tensor = self.table(self.clamp(u)) + self.line(u)
        return out


@dataclass(frozen=True, eq=False)
class Gate:
    """A gate's module and what is proved about it, elementwise on intervals of its input.

    Attributes:
        enclose: the activation's exact range over an interval.
        steepest: sup of its slope's modulus.
        gap: `sup |gate − activation|` in exact arithmetic.
        rounding: what evaluating the module in floats adds, given u and the interval.
    """

    make: Callable[[torch.dtype], nn.Module]
    keys: int
    enclose: Callable[[Interval], Interval]
    steepest: Callable[[Interval], Array]
    gap: Callable[[Interval], Array]
    rounding: Callable[[float, Interval], Array]


def gate_for(activation: Activation, tolerance: float, reach: float) -> Gate:
    """A gate within `tolerance` of the activation wherever `|u| ≤ reach`, in exact arithmetic. *Theorem*: `two-keys`,
    `max-affine-values`.
    """
    kind = activation.kind
    if kind in ("tanh", "sigmoid", "silu"):
        return _EXACT[kind]()
    if kind in GELU_TEXTS:
        return _gelu(kind, tolerance, reach)
    return _max_affine(activation, soft_maximum_gap(2) / tolerance)


def _softmax_gate(
    alpha: list[float], beta: list[float], gamma: list[float], epsilon: list[float]
) -> Callable[[torch.dtype], SoftGate]:
    a, b, c, d = (np.array(x, dtype=np.float64) for x in (alpha, beta, gamma, epsilon))
    return lambda dtype: SoftGate(a, b, c, d, dtype)


def _pair_gap(distance: Interval, rate: float) -> Array:
    """`sup t·sigmoid(−βt)` over t in |distance|: `W(1/e)/β` at t = (1 + W(1/e))/β, falling beyond."""
    top = soft_maximum_gap(2)
    t = np.maximum(distance.mignitude, 0.0)
    peak = (1 + top) / rate
    with np.errstate(over="ignore", under="ignore"):
        beyond = t / (1 + np.exp(rate * t)) * (1 + 1e-9)
    return np.where(t <= peak * (1 + 1e-6), top / rate, beyond)


def _max_affine(activation: Activation, rate: float) -> Gate:
    """ReLU, leaky ReLU and clamp: differences of maxima of affine functions, `(W(1/e) + 2δ)/β` with scores off by δ."""
    if activation.kind == "clamp":
        low, high = activation.parameters
        if math.isinf(low) or math.isinf(high):
            return _one_sided(low, high, rate)
        return _clamp(low, high, rate)
    slope = 0.0 if activation.kind == "relu" else activation.parameters[0]
    sign = 1.0 if slope <= 1 else -1.0
    make = _softmax_gate([sign * rate * slope, sign * rate], [0.0, 0.0], [slope, 1.0], [0.0, 0.0])
    larger = max(1.0, abs(slope))

    def enclose(u: Interval) -> Interval:
        other = u * slope
        return u.maximum(other) if slope <= 1 else u.minimum(other)

    def steepest(u: Interval) -> Array:
        return np.where(u.hi <= 0, abs(slope), np.where(u.lo >= 0, 1.0, larger))

    return Gate(
        make, 2, enclose, steepest,
        lambda u: _pair_gap(u * (1 - slope), rate),
        lambda u0, u: _pair_rounding(u0, larger * u.magnitude, rate, 2),
    )  # fmt: skip


def _pair_rounding(u0: float, size: Array, rate: float, keys: int) -> Array:
    """`2δ/β` with `δ = u(8β·size + 24)`, and `(K + 24)u·size` for values and sums; infinite where scores may overflow."""
    found = 1.01 * u0 * ((40 + keys) * size + 48 / rate)
    return np.where(size > RANGE[u0][1] / rate / 4, np.inf, found)


def _one_sided(low: float, high: float, rate: float) -> Gate:
    """`max(u, low)` or `min(u, high)`."""
    end, sign = (low, 1.0) if math.isinf(high) else (high, -1.0)
    make = _softmax_gate([sign * rate, 0.0], [0.0, sign * rate * end], [1.0, 0.0], [0.0, end])

    def enclose(u: Interval) -> Interval:
        return u.maximum(end) if sign > 0 else u.minimum(end)

    def steepest(u: Interval) -> Array:
        return np.where(u.hi <= end if sign > 0 else u.lo >= end, 0.0, 1.0)

    return Gate(
        make, 2, enclose, steepest,
        lambda u: _pair_gap(u - end, rate),
        lambda u0, u: _pair_rounding(u0, u.magnitude + abs(end), rate, 2),
    )  # fmt: skip


def _clamp(low: float, high: float, rate: float) -> Gate:
    """`max(u, a) − max(u − b, 0)`: one key per pair of pieces, scores the pieces' sums (less u), values their differences."""
    make = _softmax_gate(
        [-rate, 0.0, 0.0, rate],
        [rate * low, 0.0, rate * (low - high), -rate * high],
        [0.0, 1.0, -1.0, 0.0],
        [low, 0.0, low + high, high],
    )
    ends = abs(low) + abs(high)

    def steepest(u: Interval) -> Array:
        return np.where((u.hi <= low) | (u.lo >= high), 0.0, 1.0)

    return Gate(
        make, 4, lambda u: u.clamp(low, high), steepest,
        lambda u: np.maximum(_pair_gap(u - low, rate), _pair_gap(u - high, rate)),
        lambda u0, u: _pair_rounding(u0, u.magnitude + ends, rate, 4),
    )  # fmt: skip


def _nothing(u: Interval) -> Array:
    return np.zeros(u.shape)


def _tanh() -> Gate:
    def steepest(u: Interval) -> Array:
        return up(1 - np.tanh(u.mignitude) ** 2 + 1e-15, 8)

    make = _softmax_gate([-1.0, 1.0], [0.0, 0.0], [0.0, 0.0], [-1.0, 1.0])
    return Gate(make, 2, Interval.tanh, steepest, _nothing, lambda u0, u: np.full(u.shape, 1.01 * u0 * 64))


def _sigmoid() -> Gate:
    def steepest(u: Interval) -> Array:
        half = np.tanh(u.mignitude / 2)
        return up((1 - half**2) / 4 + 1e-15, 8)

    make = _softmax_gate([0.0, 1.0], [0.0, 0.0], [0.0, 0.0], [0.0, 1.0])
    return Gate(make, 2, Interval.sigmoid, steepest, _nothing, lambda u0, u: np.full(u.shape, 1.01 * u0 * 48))


def _silu() -> Gate:
    make = _softmax_gate([0.0, 1.0], [0.0, 0.0], [0.0, 1.0], [0.0, 0.0])
    return Gate(
        make, 2,
        lambda u: _dips(lambda v: v * v.sigmoid(), u, _SILU_LOWEST),
        lambda u: np.full(u.shape, _SILU_STEEPEST),
        _nothing,
        lambda u0, u: 1.01 * u0 * (30 + 32 * u.magnitude),
    )  # fmt: skip


def _dips(f: Callable[[Interval], Interval], u: Interval, lowest: float) -> Interval:
    """Range of SiLU or GELU, which falls to `lowest`, between −1.3 and −0.7, and rises elsewhere."""
    left, right = f(Interval.point(u.lo)), f(Interval.point(u.hi))
    turns = (u.lo <= -0.7) & (u.hi >= -1.3)
    return Interval(np.where(turns, lowest, np.minimum(left.lo, right.lo)), np.maximum(left.hi, right.hi))


def _gelu(kind: str, tolerance: float, reach: float) -> Gate:
    """A fitted table on the pre-activations' range, or on ±9 with a clamp before it and the line u − 9 beside it."""
    wide = reach > GELU_REACH
    half = GELU_REACH + 0.01 if wide else max(reach, 0.1) * 1.001
    try:
        table = tabulate_text(GELU_TEXTS[kind], -half, half, (0.6 if wide else 1.0) * tolerance)
    except SizeError:
        raise ToleranceError(
            f"GELU within {tolerance:.2g}, which this layer needs, is below what fitted tables reach. "
            "Use a larger tolerance, or shrink the domain."
        ) from None
    rate = soft_maximum_gap(2) / min(0.15 * tolerance, 1e-3)
    clamp, line = _clamp(-GELU_REACH, GELU_REACH, rate), _one_sided_relu(GELU_REACH, rate)
    exact = _EXACT_GELU[kind]

    def gap(u: Interval) -> Array:
        own = np.where(u.magnitude <= half, table.error, np.inf) if not wide else np.full(u.shape, table.error)
        return own + _GELU_TAIL + (1.15 * clamp.gap(u) + line.gap(u) if wide else 0.0)

    def rounding(u0: float, u: Interval) -> Array:
        own = np.full(u.shape, table.rounding("float64" if u0 < 1e-12 else "float32")) if u0 else np.zeros(u.shape)
        return own + (
            1.2 * clamp.rounding(u0, u) + line.rounding(u0, u) + 1.1 * u0 * (u.magnitude + 10) if wide else 0.0
        )

    def make(dtype: torch.dtype) -> nn.Module:
        own = SoftGate(table.slopes[:, 0], table.offsets, 0 * table.values, table.values, dtype)
        return WideGate(clamp.make(dtype), line.make(dtype), own) if wide else own  # type: ignore[arg-type]

    keys = len(table.values) + (6 if wide else 0)
    return Gate(
        make, keys, lambda u: _dips(exact, u, _GELU_LOWEST), lambda u: np.full(u.shape, _GELU_STEEPEST), gap, rounding
    )


def _one_sided_relu(end: float, rate: float) -> Gate:
    """`max(u − c, 0)`."""
    make = _softmax_gate([rate, 0.0], [-rate * end, 0.0], [1.0, 0.0], [-end, 0.0])
    return Gate(
        make, 2, lambda u: (u - end).relu(), lambda u: np.where(u.hi <= end, 0.0, 1.0),
        lambda u: _pair_gap(u - end, rate),
        lambda u0, u: _pair_rounding(u0, u.magnitude + end, rate, 2),
    )  # fmt: skip


def _exact_gelu(u: Interval) -> Interval:
    return u * ((u * 0.70710678118654752).erf() + 1.0) * 0.5


def _exact_gelu_tanh(u: Interval) -> Interval:
    return u * (((u + u.pow_int(3) * 0.044715) * 0.79788456080286536).tanh() + 1.0) * 0.5


_EXACT: dict[str, Callable[[], Gate]] = {"tanh": _tanh, "sigmoid": _sigmoid, "silu": _silu}
_EXACT_GELU = {"gelu": _exact_gelu, "gelu_tanh": _exact_gelu_tanh}
