"""A floating-point format in numbers: how it rounds, where it underflows and overflows, and how far it moves an input.

Every proof that depends on the dtype of a head uses it. `moved` and `widened` are the only implementation of one soundness rule:
below float64 an input is rounded before the head sees it, perhaps across the end of the domain.

The two half types are formats of storage. A head of such a dtype holds its values in it and rounds its inputs to it, and does
everything else, centers and temperatures included, in float32.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from partita.arithmetic.rounding import add_up, mul_up, up
from partita.errors import DomainError

__all__ = ["BFLOAT", "DOUBLE", "HALF", "PRECISIONS", "SINGLE", "Precision"]


@dataclass(frozen=True)
class Precision:
    """One of the dtypes that heads are certified in.

    Attributes:
        name: as certificates write it.
        unit: u, the unit roundoff: a rounded number is off by at most u times itself.
        smallest: the least normal number; below it the relative error is no longer bounded by u.
        tiniest: the least positive number; what one operation may lose to underflow.
        largest: the largest finite number.
        number: the numpy type that centers and temperatures are stored in.
        item_bytes: what one value takes.
        rounds_inputs: whether a float64 input is rounded before the head sees it.
        value_unit, value_tiniest, value_largest: the same as unit, tiniest and largest for values as they are stored and inputs
            as they are rounded: those of the half type if the dtype is one, with room for the float32 number in between.
    """

    name: str
    unit: float
    smallest: float
    tiniest: float
    largest: float
    number: type[np.floating[Any]]
    item_bytes: int
    rounds_inputs: bool
    value_unit: float
    value_tiniest: float
    value_largest: float

    @property
    def is_half(self) -> bool:
        """Whether values and inputs are held in a half type, and everything else in float32."""
        return self.value_unit > self.unit

    def bytes_of(self, numbers: int, others: int = 0) -> int:
        """What so many stored numbers take, `others` of them centers and temperatures.

        >>> BFLOAT.bytes_of(110, 10), SINGLE.bytes_of(110, 10)
        (240, 440)
        """
        return numbers * self.item_bytes + others * (np.dtype(self.number).itemsize - self.item_bytes)

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
        return up(reach * self.value_unit) + self.value_tiniest if self.rounds_inputs else np.zeros_like(reach)

    def moved_by(self, reach: float, dimension: int) -> float:
        """How far rounding may move a point of norm up to `reach`, rounded up.

        A subnormal coordinate moves by up to half of the tiniest number. For float32 `u·reach` covers that too, as the others
        move by at most `u/(1 + u)` of themselves, unless the reach is tiny.
        """
        if not self.is_half and reach > dimension * _SLIGHT:
            return mul_up(self.unit, reach)
        return add_up(mul_up(self.value_unit, reach), mul_up(float(dimension), self.value_tiniest))

    def rounded_ends(
        self, lo: NDArray[np.float64], hi: NDArray[np.float64]
    ) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """The smallest box known to hold the inputs in [lo, hi] and what they are rounded to; [lo, hi] itself for float64.

        Rounding keeps the order of numbers, so a rounded input lies between the rounded ends. Ends that are float32 numbers
        stay where they are.

        >>> lo, hi = SINGLE.rounded_ends(np.array([0.0, 0.7]), np.array([1.0, 0.9]))
        >>> lo.tolist(), hi.tolist()
        ([0.0, 0.699999988079071], [1.0, 0.9])
        """
        if self.is_half:
            return self.widened(lo, hi)
        return np.minimum(lo, self.rounded(lo)), np.maximum(hi, self.rounded(hi))

    def widened(
        self, lo: NDArray[np.float64], hi: NDArray[np.float64]
    ) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """The box in which rounded inputs lie, twice `moved` beyond each end, so that the sums here may round too.

        A half type moves inputs so far that twice would cost much. Rounding keeps their order, so that what it does to the ends
        is enough, and `value_unit` leaves room for the sums.
        """
        if self.is_half:
            return lo - self.moved(lo, lo) * (1 + 2.0**-40), hi + self.moved(hi, hi) * (1 + 2.0**-40)
        pad = np.maximum(np.abs(lo), np.abs(hi)) * (2 * self.value_unit) + self.value_tiniest
        return (lo - pad, hi + pad) if self.rounds_inputs else (lo, hi)


_MOST = {name: float(np.finfo(name).max) for name in ("float64", "float32", "float16")}
# times m: for a larger reach, `u·reach − u/(1 + u)·reach` exceeds what underflow moves m coordinates by
_SLIGHT = 2.0**-100
_BETWEEN = 2.0**-23  # a float64 number becomes a float32 number before it becomes one of a half type

# name, unit, smallest, tiniest, largest, number, item_bytes, rounds_inputs; value_unit, value_tiniest, value_largest
_DOUBLE = (2.0**-53, 2.0**-1022, 2.0**-1074, _MOST["float64"], np.float64)
_SINGLE = (2.0**-24, 2.0**-126, 2.0**-149, _MOST["float32"], np.float32)
DOUBLE = Precision("float64", *_DOUBLE, 8, False, 2.0**-53, 2.0**-1074, _MOST["float64"])
SINGLE = Precision("float32", *_SINGLE, 4, True, 2.0**-24, 2.0**-149, _MOST["float32"])
BFLOAT = Precision("bfloat16", *_SINGLE, 2, True, 2.0**-8 + _BETWEEN, 2.0**-133, (2 - 2.0**-7) * 2.0**127)
HALF = Precision("float16", *_SINGLE, 2, True, 2.0**-11 + _BETWEEN, 2.0**-24, _MOST["float16"])
PRECISIONS = {f"{prefix}{p.name}": p for p in (DOUBLE, SINGLE, BFLOAT, HALF) for prefix in ("", "torch.")}
