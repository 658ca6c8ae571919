"""What a stored head must satisfy so that its evaluator computes what the certificate speaks of.

Compiled heads satisfy these rules by construction; a file may hold anything. Rounding terms cover relative errors and underflow.
They do not cover overflow, an R whose half is rounded, or a window that does not hold the centers around the input.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from partita.errors import FormatError
from partita.geometry.domains import Array, Box, Domain, PointCloud
from partita.heads.grid_head import GridHead
from partita.heads.head import FoldedHead
from partita.heads.scattered_head import ScatteredHead
from partita.heads.train_head import TrainHead

__all__ = ["require_runnable"]

_MARGIN = 0.85  # of the largest number of the dtype: sums are rounded on the way
_SLACK = 1 + 1e-9  # what these checks themselves lose to rounding


def require_runnable(head: FoldedHead, domain: Domain, where: str) -> None:
    """A FormatError, naming the file `where`, unless the head can be run anywhere in the domain.

    Rules: R/2 is a normal number of the dtype; no difference, score, value or sum overflows; and where an evaluator looks at a
    window only, the centers are evenly spaced to within one place.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        problem = next(_problems(head, *_hull(domain)), None)
    if problem is not None:
        raise FormatError(f"{where}: this head cannot be run as its certificate says: {problem}.")


def _hull(domain: Domain) -> tuple[Array, Array]:
    box: Box = domain.bounding_box()
    grown = domain.fill_distance if isinstance(domain, PointCloud) else 0.0
    return box.lo.ravel() - grown, box.hi.ravel() + grown


def _problems(head: FoldedHead, lo: Array, hi: Array) -> Iterator[str]:
    dtype = str(head.dtype).removeprefix("torch.")
    limits = np.finfo(dtype)
    most, least = _MARGIN * float(limits.max), 2 * float(limits.tiny)
    rates = np.atleast_1d(_numbers(head.inverse_temperature))
    if rates.min() < least:
        yield f"the inverse temperature {rates.min():.4g} is below {least:.4g}, so that half of it is not a normal {dtype}"
    for what, size in _sizes(head, rates, lo, hi):
        if not size * _SLACK < most:
            yield f"{what} may reach {size:.4g}, and {dtype} holds numbers up to {most:.4g}"
    if isinstance(head, GridHead):
        for i, (axis, width) in enumerate(zip(head.axes, head.widths)):
            if width < len(axis) and (moved := _misplacement(_numbers(axis), limits)) > 1:
                yield (
                    f"the centers of axis {i} are not evenly spaced: one is {moved:.3g} gaps away from its place, and the window "
                    "around an input is found to within one gap"
                )


def _numbers(tensor: Tensor) -> Array:
    return np.asarray(tensor.detach().double().cpu().numpy())


def _misplacement(axis: Array, limits: np.finfo[Any]) -> float:
    """By how many places the evaluators' guess `(x − c_0)(P − 1)/(c_{P−1} − c_0)` may be off, its own rounding included."""
    count, span = len(axis), axis[-1] - axis[0]
    places = (axis - axis[0]) * ((count - 1) / span)
    rounding = count * (1.5 * float(limits.eps) + 4 * float(limits.tiny) / span)
    return float(np.abs(places - np.arange(count)).max() + rounding)


def _sizes(head: FoldedHead, rates: Array, lo: Array, hi: Array) -> Iterator[tuple[str, float]]:
    """What is formed while the head runs, and how large it may get on the box."""
    yield "an input", float(np.maximum(np.abs(lo), np.abs(hi)).max())
    if isinstance(head, ScatteredHead):
        yield from _sizes_of_cells(head, float(rates[0]), lo, hi)
    elif isinstance(head, GridHead | TrainHead):
        yield from _sizes_on_axes(head.axes, rates, lo, hi)
        if isinstance(head, GridHead):
            yield "a value", _largest_value(head, lo, hi)
        else:  # |G_1 … G_m| ≤ Π max_k ‖G_i[k]‖, the norm a largest row sum
            yield "a value", float(np.prod([np.abs(_numbers(c)).sum(axis=2).max() for c in head.cores]))


def _sizes_on_axes(axes: Sequence[Tensor], rates: Array, lo: Array, hi: Array) -> Iterator[tuple[str, float]]:
    for i, (axis, rate, a, b) in enumerate(zip(map(_numbers, axes), rates, lo, hi)):
        yield f"z − c on axis {i}", float(max(abs(b - axis[0]), abs(axis[-1] - a)))
        near = np.diff(axis).max(initial=0.0) + max(axis[0] - a, b - axis[-1], 0.0)  # of the two nearest centers
        yield f"a score on axis {i}", float(rate / 2 * near * near)


def _largest_value(head: GridHead, lo: Array, hi: Array) -> float:
    """`max|V| + Σ_i max|J_i| max|z_i − o_i|`: slopes are averaged before they are multiplied."""
    size = float(np.abs(_numbers(head.values)).max())
    if head.value_slopes is None or head.origin is None:
        return size
    steep, origin = np.abs(_numbers(head.value_slopes)).max(axis=(0, 1)), _numbers(head.origin)
    return size + float((steep * np.maximum(np.abs(lo - origin), np.abs(hi - origin))).sum())


def _sizes_of_cells(head: ScatteredHead, rate: float, lo: Array, hi: Array) -> Iterator[tuple[str, float]]:
    centers, values = _numbers(head.centers), np.abs(_numbers(head.values))
    far = np.maximum(np.abs(centers - lo), np.abs(hi - centers))
    power = 0.0 if head.powers is None else float(np.abs(_numbers(head.powers)).max())
    square = float((far * far).sum(axis=1).max() + 2 * power)
    yield "|z − c|² with the powers", square
    yield "a score", rate / 2 * square
    if head.value_slopes is not None:
        values = values + np.einsum("jom,jm->jo", np.abs(_numbers(head.value_slopes)), far)
    yield "a value", float(values.max())
