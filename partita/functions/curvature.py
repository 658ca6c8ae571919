"""Declared bounds on the second derivatives of a black box, and the search for three points that contradict them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from partita.arithmetic.rounding import add_up, mul_up, sqrt_up
from partita.errors import CurvatureContradictedError, DomainError, ShapeError
from partita.functions.target import Target
from partita.geometry.domains import Array, Box

__all__ = ["ANSWER", "FIRST_LINES", "LINES", "Curvature", "attack_curvature", "worst_bend"]

ANSWER = 2.0**-51  # relative error of a black box's own answers
LINES, FIRST_LINES = 4096, 64  # that an attack looks at in all, and before the others


@dataclass(frozen=True)
class Curvature:
    """`|vᵀ∇²f_o(z)v| ≤ Σ_i M_i v_i²` for every output o, z of a box, and v: f leaves its tangents by at most half of that.

    Attributes:
        constants: `(M_1, …, M_m)`, or one number M for all axes, which says that `|∇²f_o|₂ ≤ M`.
    """

    constants: float | tuple[float, ...]

    def __post_init__(self) -> None:
        given = self.constants
        try:
            numbers = np.asarray(given, dtype=float)
            if np.asarray(given).dtype.kind not in "iuf" or numbers.ndim > 1 or not numbers.size:
                raise TypeError
        except (TypeError, ValueError):
            raise DomainError(f"hessian is {given!r}; expected a number ≥ 0, or one per coordinate.") from None
        if not ((numbers >= 0) & np.isfinite(numbers)).all():
            found = tuple(numbers.tolist()) if numbers.ndim else float(numbers)
            raise DomainError(f"hessian is {found}; expected finite numbers ≥ 0.")
        object.__setattr__(self, "constants", tuple(numbers.tolist()) if numbers.ndim else float(numbers))

    @property
    def largest(self) -> float:
        """max M_i."""
        return max(self.constants) if isinstance(self.constants, tuple) else self.constants

    def per_axis(self, dimension: int) -> Array:
        """`(M_1, …, M_m)` as an array.

        Raises:
            ShapeError: there are several constants, and not as many as coordinates.
        """
        if isinstance(self.constants, tuple) and len(self.constants) != dimension:
            raise ShapeError(
                f"hessian has {len(self.constants)} constants; expected {dimension}, one per coordinate, or one number."
            )
        return np.broadcast_to(np.asarray(self.constants, dtype=float), (dimension,))

    def form_up(self, factor: float, *lengths: Sequence[float]) -> float:
        """`factor · Σ_i M_i a_i b_i ⋯`, rounded up, for sequences a, b, … of numbers ≥ 0, one per axis."""
        if isinstance(self.constants, tuple):
            return mul_up(factor, add_up(*(mul_up(*row) for row in zip(self.constants, *lengths, strict=True))))
        return mul_up(factor, self.constants, add_up(*(mul_up(*row) for row in zip(*lengths, strict=True))))

    def turning_up(self, factor: float, lengths: Sequence[float]) -> float:
        """`factor · √(max M · Σ_i M_i a_i²)`, up to roundings: how far ∇f may move between points a_i apart along the axes."""
        if isinstance(self.constants, tuple):
            return mul_up(factor, sqrt_up(mul_up(self.largest, self.form_up(1.0, lengths, lengths))))
        return mul_up(self.constants, math.sqrt(sum(x * x for x in lengths)), factor)

    def to_json(self) -> float | list[float]:
        """One number, or a list."""
        return list(self.constants) if isinstance(self.constants, tuple) else self.constants

    @property
    def form(self) -> str:
        """`Σ_i M_i v_i²` in words, for several constants."""
        return " + ".join(f"{c:.6g}·v{i}²" for i, c in enumerate(np.atleast_1d(self.constants)))

    def __str__(self) -> str:
        if isinstance(self.constants, tuple):
            return f"|vᵀ∇²f v| ≤ {self.form} for every v, for each output"
        return f"|∇²f|₂ ≤ {self.constants:.6g}, for each output"


def attack_curvature(target: Target, curvature: Curvature, *, lines: int = LINES, seed: int = 0) -> float:
    """The largest `|f(x + d) − 2f(x) + f(x − d)|/Σ M_i d_i²` on random lines, a few of them first.

    Raises:
        CurvatureContradictedError: it exceeds 1 by more than rounding can explain.
    """
    box, rng = target.box, np.random.default_rng(seed)
    ends = box.sample(lines, rng), box.sample(lines, rng)
    share = 10.0 ** -rng.integers(0, 4, size=(lines, 1)).astype(float)
    points = _evenly(box, ends[0], ends[0] + share * (ends[1] - ends[0]))
    worst = 0.0
    for some in (slice(None, FIRST_LINES), slice(FIRST_LINES, None)):
        parts = points[0][some], points[1][some], points[2][some]
        if len(parts[0]):
            answers = target(parts[0]), target(parts[1]), target(parts[2])
            worst = max(worst, worst_bend(target.label, curvature, parts, answers))
    return worst


def worst_bend(
    label: str,
    curvature: Curvature,
    points: tuple[Array, Array, Array],
    answers: tuple[Array, Array, Array],
    *,
    roundings: float = 4.0,
) -> float:
    """The largest observed/allowed bend of f between three points on a line, `(n, m)` each, the second between the others.

    With s the place of the second, `|(1 − s)f₀ + s f₂ − f₁| ≤ ½ s(1 − s) Σ M_i v_i²`, v from the first to the last.
    Rounding inside f may explain `roundings` times 2⁻⁵¹ of its size.

    Raises:
        CurvatureContradictedError: it exceeds 1 by more than rounding can explain.
    """
    first, middle, last = points
    whole = ((last - first) ** 2).sum(axis=1)
    place = np.sqrt(((middle - first) ** 2).sum(axis=1) / np.maximum(whole, 1e-300))[:, None]
    place = np.clip(place, 0.0, 1.0)
    bend = np.abs((1 - place) * answers[0] + place * answers[2] - answers[1]).max(axis=1)
    noise = roundings * ANSWER * max(float(np.abs(a).max()) for a in answers)
    form = (curvature.per_axis(first.shape[1]) * (last - first) ** 2).sum(axis=1)
    allowed = 0.5 * (place * (1 - place))[:, 0] * form
    ratio = np.maximum(bend - noise, 0.0) / np.maximum(allowed, 1e-300)
    i = int(ratio.argmax())
    if ratio[i] > 1 + 1e-9:
        more = (2 * (bend[i] - noise) / (place[i, 0] * (1 - place[i, 0])) - form[i]) / whole[i]
        if isinstance(curvature.constants, tuple):
            said, enough = f"bound {curvature.form}", f"add at least {more:.6g} to each constant"
        else:
            said = f"bound {curvature.constants:g} on its second derivatives"
            enough = f"declare at least {curvature.constants + more:.6g}"
        raise CurvatureContradictedError(
            f"{label} bends by {2 * bend[i]:.6g} between {first[i].tolist()}, {middle[i].tolist()} and {last[i].tolist()}, "
            f"{ratio[i]:.4g} times what the declared {said} allows; {enough}."
        )
    return float(ratio[i])


def _evenly(box: Box, first: Array, last: Array) -> tuple[Array, Array, Array]:
    """First, middle and last of about these lines, all in the box, the middle exact: off by a rounding, slopes would look bent."""
    lo, hi = box.lo.ravel(), box.hi.ravel()
    unit = np.ldexp(1.0, np.frexp(np.maximum(np.abs(lo), np.abs(hi)))[1] - 51)
    middle = np.clip(np.round((first + last) / 2 / unit), np.ceil(lo / unit), np.floor(hi / unit)) * unit
    half = (last - first) / 2
    half = np.copysign(np.floor(np.maximum(np.abs(half) / unit - 1, 0)) * unit, half)
    return middle - half, middle, middle + half
