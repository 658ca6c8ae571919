"""What may be used of a target: proved from its graph where that is possible, declared by the caller where not."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from partita.errors import (
    DomainError,
    LipschitzContradictedError,
    NotContinuousError,
    NothingKnownError,
    ShapeError,
    UnsupportedError,
)
from partita.functions.derivatives import LipschitzBounds, lipschitz_bounds
from partita.functions.graph import Graph
from partita.functions.regularity import AxisLipschitz, Curvature, Jumps, Modulus, RoughBoxes
from partita.functions.target import Target
from partita.geometry.domains import PointCloud
from partita.proofs.center_values import Known
from partita.proofs.worst_point import sample_pairs

__all__ = ["Knowledge", "gather"]


@dataclass(frozen=True, eq=False)
class Knowledge:
    """The moduli to use, whether the caller vouches for them, a bound of |f| to plan with, and where they came from in words."""

    known: Known
    declared: bool
    magnitude: float
    source: str


@dataclass(frozen=True, eq=False)
class Declared:
    """What the caller says of f, as it was given."""

    lipschitz: float | Sequence[float] | None = None
    modulus: Modulus | None = None
    hessian: float | None = None
    jumps: Jumps | None = None

    @property
    def curvature(self) -> Curvature | None:
        return None if self.hessian is None else Curvature(self.hessian)


def gather(target: Target, *, norm: float, declared: Declared | None = None) -> Knowledge:
    """Proved before declared: a graph's own constants are used unless the caller's are smaller and not contradicted."""
    said = _moduli(target, declared or Declared())
    if target.graph is not None:
        return _from_graph(target, target.graph, norm, said)
    if said is None:
        raise NothingKnownError(_suggestion(target))
    points = target.domain.sample(64, np.random.default_rng(2))
    box = target.domain.bounding_box()
    diagonal = float(np.sqrt((box.sides**2).sum()))
    magnitude = float(np.abs(target(points)).max()) + _largest_move(said, diagonal, box.sides)
    return Knowledge(said, True, magnitude, "declared by the caller")


def _moduli(target: Target, declared: Declared) -> Known | None:
    lipschitz, modulus, jumps = declared.lipschitz, declared.modulus, declared.jumps
    per_axis = None
    try:
        constants = None if lipschitz is None else np.asarray(lipschitz, dtype=float)
    except (TypeError, ValueError):
        raise DomainError(f"lipschitz is {lipschitz!r}; expected a number, or one per coordinate.") from None
    if constants is not None and constants.ndim > 0:
        per_axis = AxisLipschitz(tuple(constants.ravel().tolist()))
        if len(per_axis.constants) != target.domain.dimension:
            raise ShapeError(
                f"{len(per_axis.constants)} Lipschitz constants for a domain in R^{target.domain.dimension}; "
                "expected one per coordinate, or one number."
            )
    elif constants is not None:
        if modulus is not None:
            raise UnsupportedError("give lipschitz=L or modulus=Modulus(C, exponent), not both.")
        modulus = Modulus(float(constants))
    if modulus is None and per_axis is None:
        if jumps is not None:
            raise UnsupportedError("jumps= says where f leaves its modulus; declare lipschitz=… or modulus=… as well.")
        return None
    return Known(modulus, per_axis, jumps)


def _from_graph(target: Target, graph: Graph, norm: float, said: Known | None) -> Knowledge:
    box = target.domain.bounding_box()
    resolution = {1: 1e-6, 2: 1e-3}.get(box.dimension, 1e-2)  # jump sets are surfaces: finer boxes are many more boxes
    found = lipschitz_bounds(graph, box.lo.ravel(), box.hi.ravel(), rough_resolution=resolution)
    if said is not None and not _implied(said, found):
        _refute(target, said, found)
        return Knowledge(
            said, True, found.magnitude, "declared by the caller; what interval arithmetic proves is weaker"
        )
    if found.is_lipschitz:
        known = Known(Modulus(found.euclidean), AxisLipschitz(tuple(found.per_axis)))
        return Knowledge(known, False, found.magnitude, f"proved by interval arithmetic on {found.boxes:,} boxes")
    if math.isinf(norm) or isinstance(target.domain, PointCloud):
        lo, hi = found.rough_lo[0], found.rough_hi[0]
        raise NotContinuousError(
            f"{target.label} may jump or be infinitely steep, for example between {lo.tolist()} and {hi.tolist()} "
            f"({len(found.rough_lo):,} such boxes): no Lipschitz constant exists there. Ask for norm=1 or norm=2, "
            "shrink the domain, or declare modulus=Modulus(constant, exponent) if it is continuous."
        )
    rough = RoughBoxes(found.rough_lo, found.rough_hi, graph, 2 * found.magnitude)
    known = Known(Modulus(found.euclidean), AxisLipschitz(tuple(found.per_axis)), rough)
    return Knowledge(
        known,
        False,
        found.magnitude,
        f"proved by interval arithmetic on {found.boxes:,} boxes, {len(found.rough_lo):,} of them rough",
    )


def _implied(said: Known, found: LipschitzBounds) -> bool:
    """Whether interval arithmetic proves at least what the caller declared."""
    if not found.is_lipschitz or said.jumps is not None:
        return False
    if said.modulus is not None:
        return said.modulus.exponent == 1 and found.euclidean <= said.modulus.constant
    return said.per_axis is not None and bool((found.per_axis <= np.array(said.per_axis.constants)).all())


def _refute(target: Target, said: Known, found: LipschitzBounds) -> None:
    m = said.modulus
    if m is not None and m.exponent == 1 and said.jumps is None and found.observed > m.constant * (1 + 1e-9):
        raise LipschitzContradictedError(
            f"{target.label} has a slope of {found.observed:.6g} somewhere, more than the declared Lipschitz "
            f"constant {m.constant:g}; "
            f"interval arithmetic proves {found.euclidean:.6g}: leave lipschitz out and that is used."
        )


def _largest_move(known: Known, diagonal: float, sides: np.ndarray) -> float:
    """How far f can be from a sampled value, by what is declared."""
    moves = []
    if known.modulus is not None:
        moves.append(known.modulus.constant * diagonal**known.modulus.exponent)
    if known.per_axis is not None:
        moves.append(float(sides @ np.array(known.per_axis.constants)))
    return max(min(moves), known.jumps.height if known.jumps is not None else 0.0)


def _suggestion(target: Target) -> str:
    x, y = sample_pairs(target.domain)
    slopes = np.abs(target(x) - target(y)).max(axis=1) / np.sqrt(((x - y) ** 2).sum(axis=1)) if len(x) else np.zeros(1)
    return (
        f"nothing is known of {target.label}, so nothing can be proved. Declare lipschitz=L with "
        f"|f(x) − f(y)| ≤ L|x − y| ({len(x):,} sampled pairs show slopes up to {slopes.max():.4g}, an estimate), "
        "or give f as an expression and L is computed."
    )
