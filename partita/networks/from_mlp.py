"""A feed-forward network as attention: every activation becomes a small head per neuron, layer by layer, with a proved bound."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from partita.arithmetic.arguments import require_dtype
from partita.arithmetic.interval import Interval
from partita.arithmetic.precision import Precision
from partita.arithmetic.rounding import up
from partita.errors import DomainError, OutsideDomainError, ShapeError, ToleranceError
from partita.geometry.domains import Array, Box, BoxLike
from partita.heads.head import flatten_inputs
from partita.kernels.guards import certified
from partita.kernels.trace_modes import is_traced
from partita.networks.chains import Stage, read_chain
from partita.networks.gates import Gate, gate_for
from partita.networks.propagation import Carried, Layer, amplification, carry
from partita.proofs.certificate import Certificate, Term, model_digest, total
from partita.proofs.claim import claim

__all__ = ["AttentionNetwork", "GateLayer", "attention_from_mlp"]

_SHARES = (0.9, 0.5, 0.1)  # of the tolerance that are tried for the gates; rounding gets the rest
_LIBRARY = 16.0  # units in the last place that torch's own activations may err by, for `reference_error_at`


class GateLayer(nn.Module):
    """`gate(W z + b)`: a linear map and one head per neuron; either may be missing."""

    weight: Tensor | None
    bias: Tensor | None

    def __init__(self, weight: Tensor | None, bias: Tensor | None, gate: nn.Module | None) -> None:
        super().__init__()
        self.register_buffer("weight", weight)
        self.register_buffer("bias", bias)
        self.gate = gate

    def forward(self, z: Tensor) -> Tensor:
        u = z if self.weight is None or self.bias is None else z @ self.weight.transpose(0, 1) + self.bias
        return u if self.gate is None else self.gate(u)


class AttentionNetwork(nn.Module):
    """An attention-only network with a proved distance to the feed-forward network it was made from.

    Its graph has matrix products, additions, softmax and reshaping only. Outside a trace it refuses inputs outside the
    domain, which the bound does not cover.

    Attributes:
        domain: the box where the bound holds.
        certificate: the claim. Its terms are the gates' errors and the rounding.
        layers: the `GateLayer`s.
        keys: the number of keys of all heads.
    """

    certificate: Certificate

    def __init__(self, layers: Sequence[GateLayer], facts: Sequence[Layer], domain: Box, dtype: torch.dtype) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.facts, self.domain, self.dtype = tuple(facts), domain, dtype

    @property
    def error_bound(self) -> float:
        """A bound of `|network(x) − mlp(x)|_∞` on the domain: mlp in exact arithmetic, the network as it runs."""
        return self.certificate.error_bound

    @property
    def keys(self) -> int:
        """The number of keys of all heads, one head per neuron."""
        widths = _widths(self.facts, self.domain.dimension)
        return sum(width * layer.gate.keys for width, layer in zip(widths, self.facts) if layer.gate is not None)

    def forward(self, x: Tensor) -> Tensor:
        """The network's values, `(…, out)`.

        Args:
            x: inputs, `(…, *domain.shape)`.

        Raises:
            OutsideDomainError: an input lies outside the domain.
        """
        if is_traced(x):  # (batch, *domain.shape), in the network's dtype
            return self._chain(x if len(self.domain.shape) == 1 else x.flatten(1))
        self._require_inside(x)
        z, lead = flatten_inputs((x,), (self.domain.shape,), self.dtype)
        out = self._chain(z)
        return out.reshape(*lead, out.shape[-1])

    @certified
    def _chain(self, z: Tensor) -> Tensor:
        for layer in self.layers:
            z = layer(z)
        return z

    def error_bound_at(self, x: Any) -> Array:
        """The same bound for each input alone, `(n,)`. It is smaller, because at one point most neurons are far from their kinks.

        Args:
            x: inputs, `(n, *domain.shape)`.
        """
        lo = self._points(x)
        return np.asarray(_final(self.facts, Interval(lo, lo), self.dtype).error.max(axis=1))

    def reference_error_at(self, x: Any, dtype: torch.dtype = torch.float32) -> Array:
        """A bound of the rounding error of the feed-forward network itself, run by torch in `dtype`, `(n,)`.

        Assumes that torch's activations are accurate to 16 units in the last place.

        Args:
            x: inputs, `(n, *domain.shape)`.
            dtype: torch.float64 or torch.float32.
        """
        lo, u = self._points(x), Precision.of(dtype).unit
        layers = [Layer(f.weight, f.bias, None if f.gate is None else _as_run(f.gate)) for f in self.facts]
        start = u * np.abs(lo) if dtype == torch.float32 else np.zeros_like(lo)
        return np.asarray(carry(layers, Interval(lo, lo), unit_roundoff=u, error=start)[-1].error.max(axis=1))

    def _points(self, x: Any) -> Array:
        points = np.asarray(x.detach().cpu().numpy() if isinstance(x, Tensor) else x, dtype=np.float64)
        if points.shape[-len(self.domain.shape) :] != self.domain.shape:
            raise ShapeError(
                f"inputs have shape {points.shape}; expected (…, {', '.join(map(str, self.domain.shape))})."
            )
        return points.reshape(-1, self.domain.dimension)

    def _require_inside(self, x: Any) -> None:
        points = self._points(x)
        bad = np.flatnonzero(~self.domain.contains(points))
        if bad.size:
            raise OutsideDomainError(
                f"{bad.size:,} of {len(points):,} inputs lie outside the domain, the first is "
                f"{np.round(points[bad[0]][:8], 6).tolist()}; "
                "the bound does not cover them. Clamp the inputs, or convert with a larger domain."
            )


def attention_from_mlp(
    mlp: nn.Module, domain: BoxLike, tolerance: float, *, dtype: torch.dtype = torch.float64
) -> AttentionNetwork:
    """An attention-only network within `tolerance` of a feed-forward network on a box, end to end, rounding included.

    Linear maps stay. Every activation becomes one head per neuron: ReLU, leaky ReLU, hard tanh and clamp get two to four
    keys with affine values, error `0.2785/β`; tanh, sigmoid and SiLU get two keys and are exact; GELU gets a fitted table of
    about twenty keys. Errors are carried through the layers on propagated intervals, and β and the tables are chosen so that
    the sum meets the tolerance.

    *Theorem*: `carried-errors`, by `soft-maximum`, `max-affine-values`, `two-keys` and, for GELU, `taylor-proof`.

    Args:
        mlp: an `nn.Module` that is a chain of supported layers, nested or written with functions.
        domain: the box of its inputs.
        tolerance: the largest error of any output on the whole domain, > 0.
        dtype: dtype of the network, torch.float64 or torch.float32.

    Returns:
        An `AttentionNetwork`.

    Raises:
        UnsupportedError: a layer has no head. The message names it.
        ToleranceError: the tolerance is smaller than the dtype allows.
        DomainError: the domain is not a box.
        ShapeError: the widths of the layers and the domain do not fit.

    >>> import partita as pa
    >>> mlp = nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 1))
    >>> pa.attention_from_mlp(mlp, pa.Box([-1, -1], [1, 1]), 1e-3).error_bound <= 1e-3
    True
    """
    domain = Box.of(domain)
    require_dtype(dtype)
    if not 0 < tolerance < math.inf:
        raise ToleranceError(f"tolerance is {tolerance!r}; expected a finite number > 0.")
    if not isinstance(domain, Box):
        raise DomainError(f"the domain is {domain!r}; expected a Box, say pa.Box([-1, -1], [1, 1]).")
    stages = read_chain(mlp)
    _require_widths(stages, domain)
    facts, terms = _within(stages, domain, tolerance, dtype)
    network = AttentionNetwork(_modules(stages, facts, dtype), facts, domain, dtype)
    network.certificate = claim(
        network,
        {"type": "mlp", "sha256": model_digest(mlp.state_dict())},
        [domain],
        terms,
        dtype=dtype,
        theorem="carried-errors",
        details={"type": "attention network"},
        facts={"keys": float(network.keys), "layers": float(len(facts))},
        tolerance=tolerance,
    )
    return network


def _within(
    stages: Sequence[Stage], domain: Box, tolerance: float, dtype: torch.dtype
) -> tuple[list[Layer], tuple[Term, Term]]:
    """Layers whose terms meet the tolerance; gates get the less of it the more rounding takes."""
    box = Interval(domain.lo.reshape(1, -1), domain.hi.reshape(1, -1))
    for share in _SHARES:
        facts = _chosen(stages, box, share * tolerance, dtype)
        terms = _terms(facts, box, dtype)
        if not math.isfinite(total(terms)):  # a table was asked beyond its range: take those that have none
            facts = _chosen(stages, box, share * tolerance, dtype, reach=math.inf)
            terms = _terms(facts, box, dtype)
        if total(terms) <= tolerance:
            return facts, terms
    u = Precision.of(dtype).unit
    floor = float(carry(facts, box, unit_roundoff=u, with_gaps=False)[-1].error.max())
    raise ToleranceError(
        f"tolerance {tolerance:g} is below what can be proved here in {Precision.of(dtype).name}: {total(terms):.3g}, of which "
        f"{floor:.2g} is rounding. Use a larger tolerance{', float64' if dtype == torch.float32 else ''} or a smaller domain."
    )


def _terms(facts: Sequence[Layer], box: Interval, dtype: torch.dtype) -> tuple[Term, Term]:
    """What the gates leave in exact arithmetic, and what rounding adds to that."""
    whole = float(_final(facts, box, dtype).error.max())
    exact = min(whole, float(carry(facts, box, unit_roundoff=0.0)[-1].error.max()))
    return (
        Term("gates", exact, "gaps carried through the layers", "carried-errors"),
        Term(
            "rounding",
            float(up(whole - exact)) if math.isfinite(exact) else 0.0,
            "roundings carried through the layers",
            "carried-errors",
            source="rounding",
        ),
    )


def _widths(layers: Sequence[Layer | Stage], width: int) -> list[int]:
    """Neurons after every layer."""
    found = []
    for layer in layers:
        width = width if layer.weight is None else len(layer.weight)
        found.append(width)
    return found


def _require_widths(stages: Sequence[Stage], domain: Box) -> None:
    width, before = domain.dimension, "the domain has dimension"
    for weight in (s.weight for s in stages if s.weight is not None):
        if weight.shape[1] != width:
            raise ShapeError(f"a Linear layer has {weight.shape[1]} inputs, but {before} {width}.")
        width, before = len(weight), "the number of outputs before it is"


def _numbers(stage: Stage, gate: Gate | None) -> Layer:
    if stage.weight is None or stage.bias is None:
        return Layer(None, None, gate)
    return Layer(stage.weight.double().numpy(), stage.bias.double().numpy(), gate)


def _chosen(
    stages: Sequence[Stage], box: Interval, allowed: float, dtype: torch.dtype, *, reach: float = 0.0
) -> list[Layer]:
    """Gates whose gaps, amplified by the layers behind them, share what is allowed evenly.

    A first pass with sharp gates finds the intervals and slopes that the shares depend on; `reach` is how far tables must.
    """
    sharp = [
        _numbers(s, None if s.activation is None else gate_for(s.activation, 1e-3 * allowed, math.inf)) for s in stages
    ]
    first = carry(sharp, box, unit_roundoff=Precision.of(dtype).unit, with_gaps=False)
    slopes = [np.ones(1) if f.gate is None else f.gate.steepest(c.reach)[0] for f, c in zip(sharp, first)]
    gains = amplification(sharp, slopes)
    curved = max(1, sum(s.activation is not None for s in stages))
    layers = []
    for stage, gain, carried in zip(stages, gains, first):
        gate = None
        if stage.activation is not None:
            share = allowed / curved / max(gain, 1.0)  # no gain while neurons are dead: they must stay so
            widest = float(carried.reach.magnitude.max()) + 2 * allowed / max(gain, 1e-3)
            gate = gate_for(stage.activation, share, max(reach, widest))
        layers.append(_numbers(stage, gate))
    return layers


def _modules(stages: Sequence[Stage], facts: Sequence[Layer], dtype: torch.dtype) -> list[GateLayer]:
    return [
        GateLayer(
            None if s.weight is None else s.weight.to(dtype).clone(),
            None if s.bias is None else s.bias.to(dtype).clone(),
            None if f.gate is None else f.gate.make(dtype),
        )
        for s, f in zip(stages, facts)
    ]


def _final(facts: Sequence[Layer], box: Interval, dtype: torch.dtype) -> Carried:
    u = Precision.of(dtype).unit
    start = u * box.magnitude if dtype == torch.float32 else np.zeros(box.shape)
    return carry(facts, box, unit_roundoff=u, error=start)[-1]


def _as_run(gate: Gate) -> Gate:
    """The activation as torch runs it: no gap, some units in the last place of its value."""
    return Gate(
        gate.make,
        gate.keys,
        gate.enclose,
        gate.steepest,
        lambda u: np.zeros(u.shape),
        lambda u0, u: _LIBRARY * u0 * (gate.enclose(u).magnitude + u.magnitude),
    )
