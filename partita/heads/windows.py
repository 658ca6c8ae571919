"""Key windows on the axes of a grid: which tensors a window was chosen for, and when it can be found by arithmetic.

A window of the `2q` centers around a coordinate leaves out a share of the softmax that depends on the inverse temperatures
and on the centers. If these tensors change, the window has to change with them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from partita.errors import ShapeError
from partita.geometry.domains import Array
from partita.geometry.moments import AxisGeometry, dropped_mass
from partita.heads.tensor_digest import model_digest

__all__ = ["Windows", "displacement", "windows_for"]


class Windows:
    """Half windows and the tensors that they belong to: `(inverse temperatures, centers of axis 0, 1, …)`.

    The windows given at first hold as long as the tensors hold the same numbers, and again once they do. For other numbers
    `windows_for` takes their place. Numbers are compared, not addresses or version counters: writing through `.data` or a
    numpy view changes neither.
    """

    def __init__(self, given: tuple[int, ...], tensors: Sequence[Tensor]) -> None:
        self.given = given
        self._given_for = model_digest(dict(enumerate(tensors)))
        self.latest, self.reference = given, [t.detach().clone() for t in tensors]

    def current(self, tensors: Sequence[Tensor]) -> tuple[int, ...]:
        """The half windows for these tensors."""
        if not all(_same(old, new) for old, new in zip(self.reference, tensors)):
            found, expected = ([tuple(t.shape) for t in some] for some in (tensors, self.reference))
            if found != expected:
                raise ShapeError(f"inverse temperatures and centers have shapes {found}; expected {expected}.")
            is_given = model_digest(dict(enumerate(tensors))) == self._given_for
            self.latest = self.given if is_given else windows_for(tensors, at_least=self.given)
            self.reference = [t.detach().clone() for t in tensors]
        return self.latest


def _same(old: Tensor, new: Tensor) -> bool:
    return old.dtype == new.dtype and old.device == new.device and torch.equal(old, new)


def windows_for(tensors: Sequence[Tensor], *, at_least: Sequence[int]) -> tuple[int, ...]:
    """Half windows that leave out less than a quarter of a unit in the last place; the whole axis where none can be used."""
    rates, *axes = (t.detach().double().cpu().numpy() for t in tensors)
    negligible = torch.finfo(tensors[0].dtype).eps / 4
    return tuple(_half_window(a, float(r), q, negligible) for a, r, q in zip(axes, rates, at_least))


def _half_window(centers: Array, rate: float, at_least: int, negligible: float) -> int:
    count = len(centers)
    whole = max(at_least, (count + 1) // 2)
    ordered = bool(np.isfinite(centers).all() and (np.diff(centers) > 0).all())
    if not (ordered and 0 < rate < math.inf) or displacement(centers) >= 1:
        return whole
    geometry = AxisGeometry.of(centers, float(centers[0]), float(centers[-1]))
    kappa = rate * geometry.gap_min**2
    if not kappa * count * count > 1:  # nearly flat weights; also where the product underflows
        return whole
    q = max(at_least, math.isqrt(int(2 / kappa)))
    while 2 * q < count and dropped_mass(geometry, rate, q) > negligible:
        q += 1 + q // 16
    return min(q, whole) if 2 * q < count else whole


def displacement(centers: Array) -> float:
    """How far a center lies from its place on an axis of equal spacing between the same ends, in spacings; inf if unusable.

    A window starts from the guess `k = ⌊(x − c_0)(P − 1)/(c_{P−1} − c_0)⌋`, corrected by one step after a comparison. The
    guess is off by at most one exactly if this displacement is at most 1; a little less leaves room for its rounding.
    """
    count = len(centers)
    if count < 2:
        return 0.0
    with np.errstate(all="ignore"):
        per_unit = (count - 1) / (centers[-1] - centers[0])
        away = np.abs((centers - centers[0]) * per_unit - np.arange(count)).max() + 8 * count * 2.0**-53
    return float(away) if math.isfinite(away) and 0 < per_unit < math.inf else math.inf
