"""A floating-point format in numbers: how it rounds, where it underflows and overflows, and how far it moves an input.

Every proof that depends on the dtype of a head uses it. `moved` and `widened` are the only implementation of one soundness rule:
below float64 an input is rounded before the head sees it, perhaps across the end of the domain.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from partita.arithmetic.rounding import up
from partita.errors import DomainError

__all__ = ["DOUBLE", "PRECISIONS", "SINGLE", "Precision"]


@dataclass(frozen=True)
class Precision:
    """One of the two dtypes that heads are certified in.

    Attributes:
        name: as certificates write it.
        unit: u, the unit roundoff: a rounded number is off by at most u times itself.
        smallest: the least normal number; below it the relative error is no longer bounded by u.
        tiniest: the least positive number; what one operation may lose to underflow.
        largest: the largest finite number.
        number: the numpy type.
        item_bytes: what one number takes.
        rounds_inputs: whether a float64 input is rounded before the head sees it.
    """

    name: str
    unit: float
    smallest: float
    tiniest: float
    largest: float
    number: type[np.floating[Any]]
    item_bytes: int
    rounds_inputs: bool

    @classmethod
    def of(cls, dtype: object) -> Precision:
        """From a torch or numpy dtype, or its name.

        >>> Precision.of("float32").unit == 2.0**-24
        True
        """
        return PRECISIONS[str(dtype)]

    def rounded(self, array: NDArray[np.float64]) -> NDArray[np.float64]:
        """What the format stores of these numbers, as float64."""
        return array.astype(self.number).astype(np.float64)

    def is_normal(self, number: float) -> bool:
        """Whether a positive number keeps its relative precision when it is halved or doubled a few times."""
        return 16 * self.smallest < number < self.largest / 16

    def rates(self, sharpness: NDArray[np.float64] | float, spacing: NDArray[np.float64]) -> NDArray[np.float64]:
        """Inverse temperatures `κ_i/h_i²` as stored, for spacings h_i of the axes.

        Raises:
            DomainError: one of them is so small or large that relative precision is lost around it.
        """
        with np.errstate(over="ignore", divide="ignore"):
            found = self.rounded(np.asarray(sharpness / spacing**2))
        bad = ~((found >= 16 * self.smallest) & (found <= self.largest))
        if bad.any():
            axis = int(np.flatnonzero(bad)[0])
            raise DomainError(
                f"cells on axis {axis} are {spacing[axis]:.3g} wide: the inverse temperature κ/h² is out of range for {self.name}",
                "Rescale that variable.",
            )
        return found

    def moved(self, lo: NDArray[np.float64], hi: NDArray[np.float64]) -> NDArray[np.float64]:
        """How far rounding may move a coordinate in [lo, hi]: `u·max(|lo|, |hi|)` and the tiniest number; 0 for float64."""
        reach = np.maximum(np.abs(lo), np.abs(hi))
        return up(reach * self.unit) + self.tiniest if self.rounds_inputs else np.zeros_like(reach)

    def widened(
        self, lo: NDArray[np.float64], hi: NDArray[np.float64]
    ) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """The box in which rounded inputs lie, twice `moved` beyond each end, so that the sums here may round too."""
        pad = np.maximum(np.abs(lo), np.abs(hi)) * (2 * self.unit) + self.tiniest
        return (lo - pad, hi + pad) if self.rounds_inputs else (lo, hi)


DOUBLE = Precision("float64", 2.0**-53, 2.0**-1022, 2.0**-1074, float(np.finfo(np.float64).max), np.float64, 8, False)
SINGLE = Precision("float32", 2.0**-24, 2.0**-126, 2.0**-149, float(np.finfo(np.float32).max), np.float32, 4, True)
PRECISIONS = {f"{prefix}{p.name}": p for p in (DOUBLE, SINGLE) for prefix in ("", "torch.")}
