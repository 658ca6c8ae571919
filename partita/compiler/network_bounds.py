"""Further proved bounds for networks of heads: ranges from their claims, slopes and gradients by the chain rule."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from fractions import Fraction

import numpy as np
import torch

from partita.arithmetic.interval import Interval
from partita.arithmetic.progress import Progress
from partita.arithmetic.rounding import down, up
from partita.compiler.bounds import GradientError, Range, bound_gradient_error, sampled_slopes
from partita.errors import DomainError, UnsupportedError
from partita.functions.differentiate import derivative
from partita.functions.graph import Graph
from partita.functions.ranges import enclose_each, range_over
from partita.functions.target import Target, graph_target
from partita.geometry.domains import Array, Box
from partita.heads.network import AttentionNetwork
from partita.heads.wiring import Affine
from partita.proofs.carried_errors import Carried, Reads
from partita.proofs.certificate import Certificate
from partita.proofs.network_proof import Part, carried_over

__all__ = ["claimed_range", "network_gradient_error", "network_range", "network_slope"]

_SAMPLES = 4096
_UNIT = 2.0**-52


def network_range(network: AttentionNetwork, target: Target, certificate: Certificate) -> tuple[Range, ...]:
    """The range of each output over the domain, of the network as it is run: that of f, widened by the error bound."""
    _, carried = _carried(network, target, certificate, "the range")
    bound = certificate.error_bound
    lo, hi = down(carried.output.lo.min(axis=0) - bound), up(carried.output.hi.max(axis=0) + bound)
    if target.graph is not None:
        claimed = claimed_range(target, certificate)
        lo, hi = np.maximum(lo, claimed.lo), np.minimum(hi, claimed.hi)
    points = np.concatenate([target.domain.sample(_SAMPLES, np.random.default_rng(5)), target.domain.corners(256)])
    with torch.no_grad():
        seen = network.evaluate(torch.from_numpy(points).to(network.dtype)).double().numpy()
    return tuple(Range(float(a), float(b), float(s.min()), float(s.max())) for a, b, s in zip(lo, hi, seen.T))


def claimed_range(target: Target, certificate: Certificate) -> Interval:
    """The ranges of f over the box, `(outputs,)`, widened by a bound in the supremum norm: what a claim says of a head's range."""
    if target.graph is None or certificate.norm != "inf":
        raise UnsupportedError(f"{target.label}: a claim about its range needs an expression and the supremum norm.")
    found = range_over(target.graph, target.box.lo.ravel(), target.box.hi.ravel())
    return Interval(down(found.lo - certificate.error_bound), up(found.hi + certificate.error_bound))


def network_slope(
    network: AttentionNetwork,
    target: Target,
    certificate: Certificate,
    axis: int,
    *,
    progress: Progress | None = None,
) -> tuple[Range, ...]:
    """The range of `∂net/∂z_axis`, one per output, in exact arithmetic: the chain rule over the ranges of the heads' slopes.

    What a head reads lies in the box of its own claim, also in exact arithmetic, where errors are smaller than in the network as it
    runs. So its slopes there are those of its function g, widened by the error of its gradient. For an expression f the same holds
    of the whole.
    """
    domain = target.box
    if not 0 <= axis < domain.dimension:
        raise DomainError(f"axis is {axis}; expected 0 to {domain.dimension - 1}.")
    parts, _ = _carried(network, target, certificate, "slopes")
    steepness = [
        _widened([range_over(derivative(part.graph, k), part.box.lo, part.box.hi) for k in range(len(own))], own)
        for part, own in zip(parts, _own_errors(network, parts, progress))
    ]
    wiring = network.wiring
    unit = np.zeros(domain.dimension)
    unit[axis] = 1.0
    slopes = Interval(unit, unit)
    for layer in wiring.layers:
        made = [slopes]
        for group in layer:
            inner = _mapped(group.reads, slopes)
            outer = steepness[group.head]
            k = len(outer.lo)
            terms = Interval(inner.lo.reshape(-1, k), inner.hi.reshape(-1, k)) * outer
            made.append(_padded(terms.lo.sum(axis=1), terms.hi.sum(axis=1), terms.magnitude.sum(axis=1), k))
        slopes = Interval(np.concatenate([s.lo for s in made]), np.concatenate([s.hi for s in made]))
    proved, seen = _mapped(wiring.output, slopes), sampled_slopes(network, domain).values[:, :, axis]
    lo, hi = proved.lo, proved.hi
    if target.graph is not None:
        with suppress(UnsupportedError):
            off = network_gradient_error(network, target, certificate, progress=progress).bounds[axis]
            whole = range_over(derivative(target.graph, axis), domain.lo.ravel(), domain.hi.ravel())
            lo, hi = np.maximum(lo, down(whole.lo - off)), np.minimum(hi, up(whole.hi + off))
    return tuple(Range(float(a), float(b), float(s.min()), float(s.max())) for a, b, s in zip(lo, hi, seen.T))


def network_gradient_error(
    network: AttentionNetwork, target: Target, certificate: Certificate, *, progress: Progress | None = None
) -> GradientError:
    """The error of the gradient, coordinate by coordinate, for the stored tensors in exact arithmetic.

    For a use of a head with reads u, deployed ũ, `|ũ − u| ≤ δ`, and gradients `Du`, `Dũ` that differ by at most E:
    `|∂head(ũ)·Dũ − ∂g(u)·Du| ≤ Σ_i (γ_i + Σ_j H_ij δ_j)(|Du_i| + E_i) + L_i E_i`, γ the error of the head's own gradient, L and H
    the largest first and second derivatives of g over a range that holds u and ũ.
    """
    if target.graph is None:
        raise UnsupportedError(
            f"{target.label} is not an expression, so its gradient is not known. Give an expression."
        )
    parts, carried = _carried(network, target, certificate, "gradients")
    own = _own_errors(network, parts, progress)
    m = target.box.dimension
    size, error = np.eye(m), np.zeros((m, m))  # of the gradients of the channels, (channels, m)
    for layer, reads in zip(carried.wiring.layers, carried.reads):
        made = [(size, error)]
        for group, read in zip(layer, reads):
            first, second = _derivatives(parts[group.head].graph, read)
            inner, off = (table.reshape(*first.shape, m) for table in _gradients(group.reads, size, error))
            turned = (own[group.head] + second)[..., None] * (inner + off)
            with np.errstate(invalid="ignore"):
                made.append((_sum(first[..., None] * inner), _sum(turned + first[..., None] * off)))
        size, error = (np.concatenate(tables) for tables in zip(*made))
    bounds = _gradients(carried.wiring.output, size, error)[1].max(axis=0)
    if not np.isfinite(bounds).all():
        raise UnsupportedError(
            f"the gradient of {target.label}: a part of it jumps, or is too steep, where a head reads, so that its error has no "
            "bound."
        )
    slopes = sampled_slopes(network, target.box)
    truth = np.stack(
        [derivative(target.graph, i).evaluate(slopes.points).reshape(len(slopes.points), -1) for i in range(m)], axis=2
    )
    seen = np.abs(truth - slopes.values).max(axis=(0, 1))
    return GradientError(tuple(map(float, bounds)), tuple(map(float, seen)))


def _carried(
    network: AttentionNetwork, target: Target, certificate: Certificate, what: str
) -> tuple[tuple[Part, ...], Carried]:
    """The claims of the heads, and what the network makes of them on the domain.

    Raises:
        UnsupportedError: the claim is not proved in the supremum norm over a box, or what `carried_over` refuses.
    """
    if not isinstance(target.domain, Box) or certificate.norm != "inf" or not math.isfinite(certificate.error_bound):
        raise UnsupportedError(
            f"{what} of a network: found a claim of kind {certificate.kind} in L{certificate.norm} over {target.domain}; expected "
            "one that is proved in the supremum norm over a box."
        )
    parts = Part.all_from_json(certificate.proof.get("parts"), network.parts)
    for part, head in zip(parts, network.parts):
        part.require_claim(head)
    return parts, carried_over(network, parts, target.box, certificate.proof)[0]


def _own_errors(network: AttentionNetwork, parts: Sequence[Part], progress: Progress | None) -> list[Array]:
    """Bounds of the errors of each head's own gradient, `(inputs,)`."""
    found = []
    for i, (part, head) in enumerate(zip(parts, network.parts)):
        try:
            target = graph_target(part.graph, (part.box,), part.graph.infix())
            found.append(np.array(bound_gradient_error(head, target, progress=progress).bounds))
        except UnsupportedError as problem:
            raise UnsupportedError(f"head {i} of the network: {problem}") from None
    return found


def _widened(ranges: Sequence[Interval], off: Array) -> Interval:
    """Ranges of one output each, as one Interval, every one widened by its own amount."""
    lo, hi = (np.concatenate(ends) for ends in zip(*((one.lo, one.hi) for one in ranges)))
    return Interval(down(lo - off), up(hi + off))


def _mapped(given: Affine, channels: Interval) -> Interval:
    """`W c` with the stored weights, over ranges of the channels."""
    part = slice(given.start, given.start + given.weight.shape[1])
    lo, hi = channels.lo[part], channels.hi[part]
    rise, fall = np.maximum(given.weight, 0.0), np.minimum(given.weight, 0.0)
    return _padded(
        rise @ lo + fall @ hi, rise @ hi + fall @ lo, np.abs(given.weight) @ channels[part].magnitude, len(lo)
    )


def _padded(lo: Array, hi: Array, size: Array, terms: int) -> Interval:
    """Sums of so many products, whose sizes add up to `size`, rounded outward."""
    padding = up(4 * (terms + 8) * _UNIT * size) + 2.0**-1000
    return Interval(down(lo - padding), up(hi + padding))


def _derivatives(graph: Graph, reads: Reads) -> tuple[Array, Array]:
    """`L_i` and `Σ_j H_ij δ_j` of every use, `(uses, inputs)`."""
    lo, hi, off = reads.reach_lo.min(axis=0), reads.reach_hi.max(axis=0), reads.error.max(axis=0)
    first = enclose_each(graph, lo, hi)[1].magnitude
    second = np.zeros_like(first)
    if (off > 0).any():
        for i in range(graph.num_inputs):
            turning = enclose_each(derivative(graph, i), lo, hi)[1].magnitude
            with np.errstate(invalid="ignore"):
                second[:, i] = _sum(np.where(off > 0, turning * off, 0.0))
    return first, second


def _gradients(given: Affine, size: Array, error: Array) -> tuple[Array, Array]:
    """Sizes and errors of the gradients of what a map makes, from those of the channels, `(channels, m)` to `(rows, m)`."""
    part = slice(given.start, given.start + given.weight.shape[1])
    weight, off = np.abs(given.weight), np.zeros(given.weight.shape)
    for (row, column), exact in given.exact.items():
        if column >= 0:
            off[row, column] = up(float(abs(exact - Fraction(float(given.weight[row, column])))))
    return _product(up(weight + off), size[part]), _product(weight, error[part]) + _product(off, size[part])


def _product(matrix: Array, table: Array) -> Array:
    """The product of matrices of numbers ≥ 0, rounded up."""
    return np.asarray(up((matrix @ table) * (1 + 4 * (matrix.shape[1] + 8) * _UNIT)) + 2.0**-1000)


def _sum(terms: Array) -> Array:
    """The sum of numbers ≥ 0 over the second axis, rounded up, and what forming them rounded."""
    return np.asarray(up(terms.sum(axis=1) * (1 + 4 * (terms.shape[1] + 8) * _UNIT)) + 2.0**-1000)
