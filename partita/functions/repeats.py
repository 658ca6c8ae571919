"""What f returned again at points where it had been asked before: the same, other last digits, or noise."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from partita.errors import NotDeterministicError
from partita.functions.dropout import active_dropout
from partita.geometry.domains import Array

__all__ = ["REMEDY", "Repeats"]

REMEDY = (
    "fix its random seed inside f, average the noise out inside f, or measure it once and compile the table of samples, "
    "pa.compile(pa.Table(X, y), tolerance=…), whose claim is an estimate."
)
_LAST_DIGITS = 256  # units in the last place of the largest value: what another order of summation changes


@dataclass(frozen=True, eq=False)
class Repeats:
    """Answers at the same points.

    Args:
        label: the name of f.
        function: f.
        points: `(n, m)`.
        answers: two or more arrays `(n, out)`, in the order in which they were given.
        precision: the number type that f is given.
    """

    label: str
    function: object
    points: Array
    answers: Sequence[Array]
    precision: type = np.float64

    @property
    def agree(self) -> bool:
        """Whether all answers are the same bits."""
        return all(np.array_equal(self.answers[0], other, equal_nan=True) for other in self.answers[1:])

    @property
    def differ_in_last_digits(self) -> bool:
        """Whether the differences are those of sums that are rounded in another order."""
        unit = _LAST_DIGITS * float(np.finfo(self.precision).eps)
        return bool(self._largest <= unit * self._scale)

    @property
    def deviation(self) -> float:
        """The standard deviation of f at a point, estimated from all points together; the largest of its outputs."""
        found = np.stack(self.answers)
        return float(np.sqrt(found.var(axis=0, ddof=1).mean(axis=0)).max())

    @property
    def _scale(self) -> float:
        return float(max(np.abs(np.stack(self.answers)).max(), np.finfo(float).tiny))

    @property
    def _largest(self) -> float:
        return float(np.ptp(np.stack(self.answers), axis=0).max())

    def error(self, where: str = "", hint: str = "") -> NotDeterministicError:
        """The error for answers that do not agree.

        Args:
            where: where the two answers come from, if they were not given one after the other.
            hint: what to do then, unless only the last digits differ.
        """
        first = self.answers[0]
        last = max(self.answers[1:], key=lambda other: float(np.abs(other - first).max()))
        i = int(np.abs(first - last).max(axis=1).argmax())
        gave = f"{self.label} gave {first[i].tolist()} and then {last[i].tolist()} at {self.points[i].tolist()}"
        said = [f"{gave}{where}; expected the same value twice"]
        if self.differ_in_last_digits:
            share = f"by {self._largest / self._scale:.1g} of the largest value"
            said.append(
                f"Only the last digits differ ({share}): this is no noise. Machines, library versions and numbers of threads that "
                "add up in another order do this"
            )
            same = "Use the same versions and one thread everywhere (OMP_NUM_THREADS=1), or round the result inside f"
            return NotDeterministicError(". ".join(said), f"{same}: {self._rounding}.")
        if where:
            return NotDeterministicError(". ".join(said), hint)
        dropout = active_dropout(self.function)
        hint = f"Dropout is on in {dropout}: call .eval() first." if dropout else f"{REMEDY[0].upper()}{REMEDY[1:]}"
        return NotDeterministicError(". ".join([*said, self._size()]), hint)

    def _size(self) -> str:
        values = np.stack(self.answers).mean(axis=0)
        spread = float(np.ptp(values, axis=0).max())
        share = f", {100 * self.deviation / spread:.2g} % of the range of its values there" if spread > 0 else ""
        calls = f"{len(self.answers)} calls at {len(self.points)} points"
        return f"Its noise has a standard deviation of about {self.deviation:.2g}{share} (an estimate, from {calls})"

    @property
    def _rounding(self) -> str:
        """What makes last digits disappear, most of the time."""
        digits = 12 if self.precision is np.float64 else 4
        places = int(digits - 1 - np.floor(np.log10(self._scale)))
        return f"np.round(y, {places})" if 0 <= places <= 20 else f"to {digits} significant digits"
