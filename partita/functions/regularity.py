"""What is known about a function: how fast it may change and where it may jump, proved from its graph or declared by the caller."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from partita.arithmetic.rounding import add_up, mul_up, pow_up, sqrt_up, up
from partita.errors import DomainError
from partita.functions.graph import Graph
from partita.geometry.domains import Array

__all__ = ["AxisLipschitz", "Curvature", "Jumps", "Modulus", "RoughBoxes"]


@dataclass(frozen=True)
class Modulus:
    """`|f(x) − f(y)|_∞ ≤ constant · |x − y|₂^exponent` on the domain; exponent 1 is a Lipschitz constant.

    Exponents in (0, 1] are Hölder moduli: concave, as the bounds need them.
    """

    constant: float
    exponent: float = 1.0

    def __post_init__(self) -> None:
        if not (self.constant >= 0 and math.isfinite(self.constant)):
            raise DomainError(f"a Lipschitz or Hölder constant must be finite and ≥ 0, found {self.constant}.")
        if not 0 < self.exponent <= 1:
            raise DomainError(f"a Hölder exponent lies in (0, 1], found {self.exponent}.")

    def __str__(self) -> str:
        power = "" if self.exponent == 1 else f"^{self.exponent:g}"
        return f"|f(x) − f(y)|_∞ ≤ {self.constant:.6g}·|x − y|₂{power}"


@dataclass(frozen=True)
class AxisLipschitz:
    """`|f(x) − f(y)|_∞ ≤ Σ_i constants_i |x_i − y_i|`: one Lipschitz constant per flat coordinate."""

    constants: tuple[float, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "constants", tuple(float(c) for c in self.constants))
        if not all(c >= 0 and math.isfinite(c) for c in self.constants):
            raise DomainError(f"Lipschitz constants must be finite and ≥ 0, found {self.constants}.")

    def __str__(self) -> str:
        return "|f(x) − f(y)|_∞ ≤ " + " + ".join(f"{c:.6g}·|x{i} − y{i}|" for i, c in enumerate(self.constants))


@dataclass(frozen=True)
class Curvature:
    """`|∇²f_o(z)|₂ ≤ constant` for every output o and every z of a box: f leaves its tangents by at most ½ constant |z − c|²."""

    constant: float

    def __post_init__(self) -> None:
        if not (isinstance(self.constant, (int, float, np.number)) and 0 <= self.constant < math.inf):
            raise DomainError(f"a bound of second derivatives must be finite and ≥ 0, found {self.constant}.")

    def __str__(self) -> str:
        return f"|∇²f|₂ ≤ {self.constant:.6g}, for each output"


@dataclass(frozen=True, eq=False)
class Jumps:
    """A set that f may jump across, declared: off it f obeys its modulus, and f never moves by more than `height`.

    The modulus holds for pairs whose segment misses the set, and for every r > 0 the points within distance r of the set have
    measure at most `tube₁ r + tube₂ r² + …`. For k jumps on a line `tube=2*k`; for a connected curve of length ℓ in the plane
    `tube=(2*ℓ, π)`; the length alone would not do, since a tiny circle still has a whole disc around it.

    Args:
        height: `|f(x) − f(y)|_∞ ≤ height` for all x, y of the domain.
        tube: the coefficients; one number stands for `tube₁`.
    """

    height: float
    tube: float | Sequence[float]

    def __post_init__(self) -> None:
        object.__setattr__(self, "tube", tuple(np.atleast_1d(np.asarray(self.tube, dtype=float)).tolist()))
        if not all(x >= 0 and math.isfinite(x) for x in (self.height, *self.coefficients)):
            raise DomainError(f"Jumps: height {self.height} and tube {self.tube} must be finite and ≥ 0.")

    @property
    def coefficients(self) -> tuple[float, ...]:
        return self.tube  # type: ignore[return-value]

    def near(self, reach: Sequence[float], power: float, volume: float) -> tuple[float, float]:
        """H and an upper bound of `∫ (movement/H)^p` over the points whose window, `reach_i` along axis i, may cross the set."""
        distance = sqrt_up(add_up(*(mul_up(r, r) for r in reach)))
        near = add_up(*(mul_up(t, pow_up(distance, k)) for k, t in enumerate(self.coefficients, 1)))
        return self.height, min(near, volume)

    def __str__(self) -> str:
        tube = " + ".join(f"{t:g}·r" + ("" if k == 1 else f"^{k}") for k, t in enumerate(self.coefficients, 1))
        return (
            f"f moves by at most {self.height:g}, and obeys its modulus between points whose segment misses a set "
            f"whose r-neighbourhood has measure ≤ {tube} for every r"
        )


@dataclass(frozen=True, eq=False)
class RoughBoxes:
    """The boxes in which interval arithmetic could not exclude a jump; off them the computed modulus holds.

    Attributes:
        lo, hi: `(k, m)`. graph: f, to bound how far it can move near each box.
        height: a bound of f's movement anywhere.
    """

    lo: Array
    hi: Array
    graph: Graph
    height: float

    def contain(self, points: Array) -> NDArray[np.bool_]:
        """Which rows of `points`, `(n, m)`, lie in one of the boxes."""
        inside = np.zeros(len(points), dtype=bool)
        for i, point in enumerate(points):
            inside[i] = ((self.lo <= point) & (point <= self.hi)).all(axis=1).any()
        return inside

    def near(self, reach: Sequence[float], power: float, volume: float) -> tuple[float, float]:
        """H and an upper bound of `∫ (movement/H)^p` over the boxes grown by the window, overlaps counted once on a lattice.

        Near a box f moves by at most the width of its enclosure over the box grown by two windows (x and its centers
        both lie there).
        """
        r = np.array(reach)
        grown = self.graph.enclose(self.lo - 2 * r, self.hi + 2 * r)
        heights = np.minimum(np.nan_to_num(up(grown.hi - grown.lo), nan=np.inf).max(axis=1), self.height)
        cell = np.maximum(r / 2, (self.hi - self.lo).max(axis=0) / 4)
        origin = self.lo.min(axis=0) - r
        first = np.floor((self.lo - r - origin) / cell).astype(np.int64) - 1  # one cell of margin for rounding
        last = np.floor((self.hi + r - origin) / cell).astype(np.int64) + 1
        shape = (last - first).max(axis=0) + 1
        if len(first) * math.prod(int(n) for n in shape) > 20_000_000:
            return self.height, volume
        offsets = np.stack(np.meshgrid(*(np.arange(n) for n in shape), indexing="ij"), axis=-1).reshape(-1, len(r))
        labels = first[:, None, :] + offsets
        keep = (labels <= last[:, None, :]).all(axis=2)
        _, inverse = np.unique(labels[keep], axis=0, return_inverse=True)
        tallest = np.zeros(int(inverse.max()) + 1)
        np.maximum.at(tallest, inverse.ravel(), np.repeat(heights, keep.sum(axis=1)))
        highest = float(tallest.max())  # relative to it powers cannot all vanish
        shares = float(((tallest / highest) ** power).sum()) if highest else 0.0
        return highest, min(mul_up(shares * (1 + 1e-12), *cell.tolist()), volume)

    def __str__(self) -> str:
        return f"off {len(self.lo):,} boxes where f may jump, and f never moves by more than {self.height:.4g}"
