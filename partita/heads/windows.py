"""Key windows on the axes of a grid: which tensors a window was chosen for.

A window of the `2q` centers around a coordinate leaves out a share of the softmax that depends on the inverse temperatures
and on the centers. If these tensors change, the window has to change with them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from partita.arithmetic.rounding import add_up
from partita.errors import ShapeError
from partita.geometry.moments import AxisGeometry, dropped_mass
from partita.heads.tensor_digest import model_digest
from partita.kernels.axis_windows import half_window

__all__ = ["Windows", "windows_for"]


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
        self._dropped: tuple[list[Tensor], float] | None = None

    def current(self, tensors: Sequence[Tensor]) -> tuple[int, ...]:
        """The half windows for these tensors."""
        if not _same(self.reference, tensors):
            found, expected = ([tuple(t.shape) for t in some] for some in (tensors, self.reference))
            if found != expected:
                raise ShapeError(f"inverse temperatures and centers have shapes {found}; expected {expected}.")
            is_given = model_digest(dict(enumerate(tensors))) == self._given_for
            self.latest = self.given if is_given else windows_for(tensors, at_least=self.given)
            self.reference = [t.detach().clone() for t in tensors]
        return self.latest

    def dropped(self, tensors: Sequence[Tensor]) -> float:
        """An upper bound of the share of the softmax that the windows for these tensors leave out. *Theorem*: `window-tail`."""
        windows = self.current(tensors)
        if self._dropped is None or self._dropped[0] is not self.reference:
            rates, *axes = (t.detach().double().cpu().numpy() for t in tensors)
            geometry = [AxisGeometry.of(a, float(a[0]), float(a[-1])) for a in axes]
            shares = (dropped_mass(g, float(r), q) for g, r, q in zip(geometry, rates, windows))
            self._dropped = self.reference, add_up(*shares)
        return self._dropped[1]


def _same(old: Sequence[Tensor], new: Sequence[Tensor]) -> bool:
    pairs = list(zip(old, new))
    if not all(a.dtype == b.dtype and a.device == b.device and a.shape == b.shape for a, b in pairs):
        return False
    if all(a.device.type == "cpu" for a in old):
        return all(torch.equal(a, b) for a, b in pairs)
    flat = (torch.cat([t.detach().flatten() for t in some]) for some in (old, new))
    return torch.equal(*flat)  # one answer to wait for, not one for each tensor


def windows_for(tensors: Sequence[Tensor], *, at_least: Sequence[int]) -> tuple[int, ...]:
    """Half windows that leave out less than a quarter of a unit in the last place; the whole axis where none can be used."""
    rates, *axes = (t.detach().double().cpu().numpy() for t in tensors)
    negligible = torch.finfo(tensors[0].dtype).eps / 4
    return tuple(half_window(a, float(r), q, negligible) for a, r, q in zip(axes, rates, at_least))
