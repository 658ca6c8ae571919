"""Errors carried through a network: intervals of the exact values, and how far the deployed ones may be from them.

Layer by layer, for a batch of boxes at once: `|ũ − u| ≤ |W|e + (k + 4)u(|W||a| + |b|)`, then
`|õ − act(u)| ≤ sup|act'|·|ũ − u| + gap + rounding`, suprema over the interval of u widened by the error so far. *Theorem*:
`carried-errors`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from partita.arithmetic.interval import Interval
from partita.arithmetic.rounding import down, up
from partita.geometry.domains import Array
from partita.networks.gates import RANGE, Gate

__all__ = ["Carried", "Layer", "amplification", "carry", "enclose_affine"]

_U = 2.0**-53


@dataclass(frozen=True, eq=False)
class Layer:
    """`act(W z + b)` in float64 numbers, `W` None for an activation alone, `gate` None for a linear map alone."""

    weight: Array | None
    bias: Array | None
    gate: Gate | None


@dataclass(frozen=True, eq=False)
class Carried:
    """After a layer: the pre-activation's interval, widened by its error, the exact output's interval, and the error."""

    reach: Interval
    values: Interval
    error: Array


def enclose_affine(weight: Array, bias: Array, z: Interval) -> Interval:
    """`W z + b` over boxes, `(batch, in)` to `(batch, out)`, with the rounding of its own matrix products outside."""
    middle, radius = z.mid, z.radius
    size = np.abs(weight)
    padding = 4 * (weight.shape[1] + 8) * _U * ((np.abs(middle) + radius) @ size.T + np.abs(bias)) + 1e-300
    center, spread = middle @ weight.T + bias, radius @ size.T + padding
    return Interval(center - spread - padding, center + spread + padding)


@np.errstate(invalid="ignore", over="ignore")
def carry(
    layers: Sequence[Layer], z: Interval, *, unit_roundoff: float, with_gaps: bool = True, error: Array | None = None
) -> list[Carried]:
    """Every layer's interval and error, `(batch, neurons)`; with unit roundoff 0 what exact arithmetic would leave.

    Products below the normal numbers lose up to `least`; where sums may overflow nothing is known, and the error is infinite.
    """
    error = np.zeros(z.shape) if error is None else error
    least, most = RANGE[unit_roundoff]
    carried = []
    for layer in layers:
        u = z if layer.weight is None or layer.bias is None else enclose_affine(layer.weight, layer.bias, z)
        if layer.weight is not None and layer.bias is not None:
            size, terms = np.abs(layer.weight), layer.weight.shape[1] + 4
            values = z.magnitude + error
            magnitude = values @ size.T + np.abs(layer.bias)
            lost = least * (values.sum(axis=1, keepdims=True) + size.sum(axis=1) + terms)
            error = _padded(error @ size.T + 1.01 * terms * unit_roundoff * magnitude + lost, terms)
            overflows = (magnitude > most) | (size.max(axis=1) > most) | (values.max(axis=1, keepdims=True) > most)
            error = np.where(overflows, np.inf, error)
        reach = Interval(down(u.lo - error), up(u.hi + error))
        if layer.gate is None:
            z = u
        else:
            gate, z = layer.gate, layer.gate.enclose(u)
            gap = gate.gap(reach) if with_gaps else np.zeros(u.shape)
            error = _padded(gate.steepest(reach) * error + gap + gate.rounding(unit_roundoff, reach) + 8 * least, 8)
        carried.append(Carried(reach, z, error))
    return carried


def _padded(positive: Array, terms: int) -> Array:
    """Rounded up beyond what a sum of so many nonnegative products can lose; 0·∞ counts as ∞: nothing is known then."""
    positive = np.where(np.isnan(positive), np.inf, positive)
    return up(positive * (1 + 8 * terms * _U), 8) * (positive > 0)


def amplification(layers: Sequence[Layer], steepest: Sequence[Array]) -> list[float]:
    """For each layer: how far one unit of error at all of its outputs can move an output of the network."""
    outputs = next(layer for layer in reversed(layers) if layer.weight is not None).weight
    assert outputs is not None
    onward = np.eye(len(outputs))
    found = []
    for layer, slope in zip(reversed(layers), reversed(steepest)):
        found.append(float(onward.sum(axis=1).max()))
        onward = onward * slope
        if layer.weight is not None:
            onward = onward @ np.abs(layer.weight)
    return found[::-1]
