"""How wide cells may be: the fewest cells per axis for a tolerance, from what is known about f."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from partita.arithmetic.precision import Precision
from partita.errors import DomainError, SizeError, ToleranceError
from partita.functions.moduli import Modulus
from partita.functions.regularity import AxisLipschitz, Known, RoughBoxes
from partita.geometry.domains import Array, Box
from partita.geometry.grid import ProductGrid
from partita.geometry.moments import AxisGeometry, distance_bounds, window_for
from partita.proofs.center_values import AVERAGED_UP_TO, GridFacts, grid_terms
from partita.proofs.certificate import Term, total

__all__ = ["SpacingRule"]

_SOFTEST = 1e-3  # κ
_LONGEST = math.sqrt(sys.float_info.max)  # sides whose squares float64 holds
_STRIDE = 12  # of the fractions, from coarse to fine, until one will do
_FRACTIONS = np.geomspace(1, 1e-5, 116)  # of the longest side, tried as spacings where f jumps


@dataclass(frozen=True, eq=False)
class SpacingRule:
    """`C·(unit·√Σh_i²)^α·factor ≤ ε` or `Σ L_i·unit·h_i·factor ≤ ε`, whichever needs fewer cells; with jumps, a table.

    `unit` is the moment of a grid of spacing 1 at this sharpness (½ for a hard supremum), `factor = (volume·outputs)^{1/p}`.
    """

    known: Known
    norm: float
    sharpness: float
    box: Box
    outputs: int
    storage: type[np.floating] = np.float64

    def counts(self, tolerance: float) -> tuple[int, ...]:
        """Cells per axis, as few as the known moduli allow."""
        if self.known.jumps is not None:
            return self._counts_with_jumps(tolerance)
        found = []
        try:
            with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
                if self.known.modulus is not None:
                    found.append(self._isotropic(self.known.modulus, tolerance))
                if self.known.per_axis is not None:
                    found.append(self._per_axis(self.known.per_axis, tolerance))
        except (OverflowError, ZeroDivisionError, ValueError):  # a count that no integer arithmetic of floats can hold
            if (longest := float(self.box.sides.max())) > _LONGEST:
                raise DomainError(
                    f"a side of the box is {longest:.3g} long, and its square overflows float64. Rescale the variables."
                ) from None
            raise SizeError(
                f"tolerance {tolerance:g} needs more keys than can be counted; use a larger tolerance."
            ) from None
        return min(found, key=math.prod)

    def rates(self, counts: Sequence[int]) -> Array:
        """`R_i = κ/h_i²`."""
        return Precision.of(np.dtype(self.storage)).rates(self.sharpness, self.box.sides / np.array(counts))

    def half_windows(self, counts: Sequence[int]) -> tuple[int, ...]:
        """The smallest windows that drop at most 1e-13 of the mass per axis."""
        return window_for(self._geometry(counts), self.rates(counts).tolist(), 1e-13)

    def explain(self, counts: Sequence[int], terms: Sequence[Term]) -> list[str]:
        """The number of cells in two sentences."""
        spacing, split = self.box.sides / np.array(counts), sum(c > 1 for c in counts)
        same = np.ptp(spacing) < 1e-3 * spacing.max()
        widths = f"{spacing.min():.4g}" if same else " × ".join(f"{h:.3g}" for h in spacing)
        jumps = next((t for t in terms if t.name == "jumps"), None)
        bound = self._bound_in_words(terms[0], len(counts))
        if jumps is not None:
            bound += f", and the jumps add {jumps.value:.4g}"
        order = split / (1 if self.known.modulus is None else self.known.modulus.order(float(spacing.max())))
        order *= 1 if jumps is None else self.norm
        price = (
            f"halving the tolerance multiplies the keys by about {2**order:.3g}"
            if order < 60
            else "halving the tolerance is hopeless"
        )
        return [
            f"cells are {widths} wide, because the error is at most {bound}",
            f"{price}, because f varies in {split} dimension{'' if split == 1 else 's'}",
        ]

    def _bound_in_words(self, approximation: Term, m: int) -> str:
        seen = approximation.inputs
        distance = "E|x_i − v_i|" if math.isinf(self.norm) else "(mean of E|x_i − v_i|^p)^(1/p)"
        if approximation.theorem == "axis-telescoping":
            parts = " + ".join(f"{seen[f'L{i}']:.4g}·{seen[f'distance{i}']:.3g}" for i in range(m))
            words = f"Σ_i L_i·{distance} = {parts}"
        elif self.known.modulus is not None and self.known.modulus.expression:
            name = "ρ the covering radius" if math.isinf(self.norm) else "ρ the mean distance to a center"
            words = f"ω(ρ) = ω({seen['distance']:.4g}), {name}, ω(t) = {self.known.modulus.expression}"
        else:
            power = "" if seen["exponent"] == 1 else f"^{seen['exponent']:g}"
            name = "ρ the covering radius" if math.isinf(self.norm) else "ρ the mean distance to a center"
            words = f"L·ρ{power} = {seen['constant']:.4g}·{seen['distance']:.4g}{power}, {name}"
        factor = "" if math.isinf(self.norm) else f", times (volume · outputs)^(1/{self.norm:g}) = {self._factor:.4g}"
        return f"{words}{factor}: {approximation.value:.4g}"

    @property
    def _factor(self) -> float:
        return 1.0 if math.isinf(self.norm) else (self.box.volume * self.outputs) ** (1 / self.norm)

    def _unit(self, power: float) -> float:
        if power not in self._units:
            kappa = max(self.sharpness, _SOFTEST)  # below it distances grow like 1/√κ
            long = max(64, math.ceil(24 / math.sqrt(kappa)))  # soft heads look farther
            both = distance_bounds(AxisGeometry(long, 1.0, 1.0, 0.5), kappa, power)
            self._units[power] = both[self.norm <= AVERAGED_UP_TO] * math.sqrt(kappa / self.sharpness)
        return self._units[power]

    @cached_property
    def _units(self) -> dict[float, float]:
        return {}

    def _geometry(self, counts: Sequence[int]) -> list[AxisGeometry]:
        return [
            AxisGeometry(c, s / c if c > 1 else 0.0, s / c if c > 1 else 0.0, s / c / 2)
            for c, s in zip(counts, self.box.sides)
        ]

    def _isotropic(self, modulus: Modulus, tolerance: float) -> tuple[int, ...]:
        if modulus.constant == 0:
            return (1,) * self.box.dimension
        power = max(modulus.exponent * self.norm, 2.0) if (self.norm <= AVERAGED_UP_TO) else 2.0
        allowed, unit = _quotient(tolerance, self._factor), self._unit(power)
        ratios = self.box.sides / (modulus.reach(allowed) / unit)  # Σ (ratio/count)² ≤ 1
        return _fewest(np.ceil(ratios * math.sqrt(len(ratios))), ratios, power=2)

    def _per_axis(self, lipschitz: AxisLipschitz, tolerance: float) -> tuple[int, ...]:
        allowance = _quotient(tolerance, self._unit(self.norm if (self.norm <= AVERAGED_UP_TO) else 1.0) * self._factor)
        ratios = np.array([_quotient(c, allowance) for c in lipschitz.constants]) * self.box.sides  # Σ ratio/count ≤ 1
        free = ratios > 0
        while True:  # an axis that one cell settles leaves its share to the others
            share = (1 - ratios[~free].sum()) / max(int(free.sum()), 1)
            settled = free & (ratios <= share)
            if not settled.any():
                break
            free &= ~settled
        return _fewest(np.where(free, np.ceil(ratios / share), 1.0), ratios, power=1)

    def _counts_with_jumps(self, tolerance: float) -> tuple[int, ...]:
        """The coarsest of near-cubic grids, from one cell to 1e5 per axis, that will do: jumps make the error fall like h^{1/p}."""
        first, last = -1, 0
        while self._jump_bound(last) > tolerance:
            if last == len(_FRACTIONS) - 1:
                raise ToleranceError(
                    f"tolerance {tolerance:g} in L{self.norm:g} is below {min(self._jump_bounds.values()):.3g}, the least that "
                    "is possible with what is known about the jumps",
                    "Use a larger tolerance, or declare lipschitz= and jumps= yourself.",
                )
            first, last = last, min(last + _STRIDE, len(_FRACTIONS) - 1)
        first += 1
        while first < last:
            middle = (first + last) // 2
            first, last = (first, middle) if self._jump_bound(middle) <= tolerance else (middle + 1, last)
        return self._cubic(first)

    def _cubic(self, index: int) -> tuple[int, ...]:
        counts = np.ceil(self.box.sides / (_FRACTIONS[index] * self.box.sides.max()))
        return tuple(int(c) for c in np.where(self._still, 1, counts))

    @cached_property
    def _still(self) -> NDArray[np.bool_]:
        """The axes along which f does not seem to move: slopes of 0, and rough boxes that were never cut."""
        jumps, slopes = self.known.jumps, self.known.per_axis
        if not isinstance(jumps, RoughBoxes) or slopes is None:
            return np.zeros(self.box.dimension, dtype=bool)
        uncut = (jumps.hi - jumps.lo >= self.box.sides).all(axis=0)
        return np.asarray(uncut & (np.array(slopes.constants) == 0))

    def _jump_bound(self, index: int) -> float:
        if index not in self._jump_bounds:
            counts = self._cubic(index)
            facts = GridFacts(
                axes=tuple(self._geometry(counts)),
                rates=tuple(self.rates(counts).tolist()),
                half_windows=self.half_windows(counts),
                volume=self.box.volume,
                outputs=self.outputs,
                reach=1.0,
                largest=0.0,
                spread=0.0,
                value_error=0.0,
                semantics="float64",
                centers=ProductGrid.uniform(self.box, counts, dtype=self.storage).axes,
                ends=(self.box.lo.ravel(), self.box.hi.ravel()),
            )
            self._jump_bounds[index] = total(grid_terms(facts, self.known, self.norm)) * (1 + 1e-9)
        return self._jump_bounds[index]

    @cached_property
    def _jump_bounds(self) -> dict[int, float]:
        return {}


def _quotient(a: float, b: float) -> float:
    """a/b, infinite where b vanishes or the quotient overflows."""
    return a / b if b > 0 and a < b * 1e300 else math.inf if a > 0 else 0.0


def _fewest(start: Array, ratios: Array, *, power: int) -> tuple[int, ...]:
    """Lower the counts one axis at a time while `Σ (ratio_i/count_i)^power ≤ 1`; fewest cells win."""
    if not np.isfinite(start).all() or start.max(initial=1.0) > 1e18:
        raise OverflowError
    best: tuple[int, ...] | None = None
    for order in (np.argsort(-start), np.argsort(start)):
        counts = np.maximum(start, 1.0)
        while ((ratios / counts) ** power).sum() > 1 + 1e-12:  # the starting guess was rounded
            counts = np.where(ratios > 0, counts + np.maximum(1.0, counts * 1e-12), counts)
        for i in order:
            left = 1 - np.delete((ratios / counts) ** power, i).sum()
            if left > 0:
                counts[i] = max(1.0, min(counts[i], math.ceil(ratios[i] * left ** (-1 / power) * (1 - 1e-13))))
        found = tuple(int(c) for c in counts)
        best = found if best is None or math.prod(found) < math.prod(best) else best
    return best or ()
