"""What is known about a function: how fast it may change and where it may jump, proved from its graph or declared by the caller."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from partita.arithmetic.precision import Precision
from partita.arithmetic.progress import Progress
from partita.arithmetic.rounding import add_up, mul_up, pow_up, sqrt_up, up
from partita.errors import (
    DomainError,
    LipschitzContradictedError,
    NonFiniteValueError,
    NotContinuousError,
    NothingKnownError,
    PartitaError,
    ShapeError,
    UnsupportedError,
)
from partita.functions.continuity import composed_modulus
from partita.functions.curvature import Curvature
from partita.functions.derivatives import LipschitzBounds, lipschitz_bounds
from partita.functions.graph import Graph
from partita.functions.limits import Root
from partita.functions.moduli import Modulus
from partita.functions.regions import Domain
from partita.functions.tails import find_singularities
from partita.functions.target import Target
from partita.geometry.domains import Array, Box, PointCloud

__all__ = [
    "AxisLipschitz",
    "Declared",
    "Jumps",
    "Knowledge",
    "Known",
    "RoughBoxes",
    "gather",
    "knowledge_or_obstacle",
    "known_where_rounded",
    "sample_pairs",
    "where_planned",
    "where_rounded",
]

_SHOWN = 512  # points, of which all pairs are looked at


@dataclass(frozen=True)
class AxisLipschitz:
    """`|f(x) − f(y)|_∞ ≤ Σ_i constants_i |x_i − y_i|`: one Lipschitz constant per flat coordinate."""

    constants: tuple[float, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "constants", tuple(float(c) for c in self.constants))
        if not all(c >= 0 and math.isfinite(c) for c in self.constants):
            raise DomainError(f"Lipschitz constants are {self.constants}; expected finite numbers ≥ 0.")

    def __str__(self) -> str:
        return "|f(x) − f(y)|_∞ ≤ " + " + ".join(f"{c:.6g}·|x{i} − y{i}|" for i, c in enumerate(self.constants))


@dataclass(frozen=True, eq=False)
class Jumps:
    """A declared set across which f may jump. Elsewhere f obeys its modulus, and f never moves by more than `height`.

    The modulus holds for pairs of points whose segment misses the set. For every r > 0 the points within distance r of the
    set have measure at most `tube₁ r + tube₂ r² + …`. For k jumps on a line use `tube=2*k`; for a connected curve of length
    ℓ in the plane use `tube=(2*ℓ, π)`: the second term covers the ends of the curve.

    Args:
        height: `|f(x) − f(y)|_∞ ≤ height` for all x, y of the domain. Finite, ≥ 0.
        tube: the coefficients `(tube₁, tube₂, …)`; a single number is `tube₁`. Finite, ≥ 0.

    Raises:
        DomainError: a number is negative or not finite.

    >>> import partita as pa
    >>> pa.Jumps(height=1.0, tube=2.0).coefficients  # one jump on a line
    (2.0,)
    """

    height: float
    tube: float | Sequence[float]

    def __post_init__(self) -> None:
        object.__setattr__(self, "tube", tuple(np.atleast_1d(np.asarray(self.tube, dtype=float)).tolist()))
        if not all(x >= 0 and math.isfinite(x) for x in (self.height, *self.coefficients)):
            raise DomainError(f"Jumps: height is {self.height}, tube is {self.tube}; expected finite numbers ≥ 0.")

    @property
    def coefficients(self) -> tuple[float, ...]:
        """`tube` as a tuple of floats."""
        return self.tube  # type: ignore[return-value]

    def near(self, reach: Sequence[float], power: float, volume: float) -> tuple[float, float]:
        """H and an upper bound of `∫ (movement/H)^p` over the points whose window may cross the set.

        Args:
            reach: half width of the window along each axis, `(m,)`.
            power: p.
            volume: volume of the domain, the largest value returned.

        >>> Jumps(1.0, 2.0).near([0.25], 1.0, 10.0)[1] >= 0.5
        True
        """
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
        lo, hi: `(k, m)`.
        graph: f, to bound how far it can move near each box.
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


@dataclass(frozen=True, eq=False)
class Known:
    """What the bound may use about f: any of the two moduli (the better bound wins), and where f jumps."""

    modulus: Modulus | None = None
    per_axis: AxisLipschitz | None = None
    jumps: Jumps | RoughBoxes | None = None

    def to_json(self) -> dict[str, Any]:
        """Plain data for the certificate; rough boxes are found again from the graph."""
        data: dict[str, Any] = {}
        if self.modulus is not None:
            data["modulus"] = self.modulus.to_json()
        if self.per_axis is not None:
            data["per_axis"] = list(self.per_axis.constants)
        if isinstance(self.jumps, Jumps):
            data["jumps"] = {"height": self.jumps.height, "tube": list(self.jumps.coefficients)}
        elif self.jumps is not None:
            data["rough_boxes"] = len(self.jumps.lo)
        return data

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Known:
        """The moduli and declared jumps again (not the rough boxes)."""
        return cls(
            Modulus.from_json(data["modulus"]) if "modulus" in data else None,
            AxisLipschitz(tuple(data["per_axis"])) if "per_axis" in data else None,
            Jumps(**data["jumps"]) if "jumps" in data else None,
        )


@dataclass(frozen=True, eq=False)
class Knowledge:
    """The moduli to use, whether the caller vouches for them, a bound of |f| to plan with, and where they came from in words."""

    known: Known
    declared: bool
    magnitude: float
    source: str


@dataclass(frozen=True, eq=False)
class Declared:
    """What the caller declares about f, as it was given; `curvature` is the checked bound on the second derivatives."""

    lipschitz: float | Sequence[float] | None = None
    modulus: Modulus | str | None = None
    hessian: float | Sequence[float] | None = None
    jumps: Jumps | None = None
    curvature: Curvature | None = field(init=False)

    def __post_init__(self) -> None:
        if isinstance(self.modulus, str):
            object.__setattr__(self, "modulus", Modulus.of(self.modulus))
        if not isinstance(self.modulus, Modulus | None):
            raise DomainError(
                f"modulus is {self.modulus!r}; expected a Modulus, or an expression in t such as '0.5*sqrt(t) + t'."
            )
        curvature = None if self.hessian is None else Curvature(self.hessian)  # type: ignore[arg-type]
        object.__setattr__(self, "curvature", curvature)


def where_planned(target: Target, precision: Precision) -> Target:
    """The target on the boxes whose moduli a head of this precision is planned with: its own, but for half types.

    A half type moves inputs so far beyond the domain that f may change much faster there.
    """
    return where_rounded(target, precision) if precision.is_half else target


def where_rounded(target: Target, precision: Precision) -> Target:
    """The target on the boxes in which inputs and rounded inputs lie; the target itself where those are its own boxes.

    A region whose f is evaluated on the box around it (`Target.fills_box`) counts as that box. A black box has no values beyond its
    domain, and other domains are returned as they are.
    """
    if target.graph is None or isinstance(target.domain, PointCloud) or not target.fills_box:
        return target
    boxes = tuple(d if isinstance(d, Box) else target.box for d in target.domains)
    grown = tuple(Box(*precision.rounded_ends(box.lo, box.hi)) for box in boxes)
    if all(np.array_equal(a.lo, b.lo) and np.array_equal(a.hi, b.hi) for a, b in zip(boxes, grown)):
        return target
    return replace(target, domains=grown)


def known_where_rounded(target: Target, precision: Precision, known: Known, norm: float) -> Known:
    """Moduli that bound |f(x') − f(x)| for x in the domain and x' what it is rounded to.

    Moduli that are known on the domain, declared ones included, say nothing about an x' beyond its end, where f may be much
    steeper. If there are such x', the moduli are computed from the expression on the boxes that hold them all; `Known()` if they
    cannot be. *Theorem*: `score-rounding`.
    """
    on = where_rounded(target, precision)
    if on is target:
        return known
    found = _BEYOND.setdefault(target, {})
    if (precision, norm) not in found:
        try:
            found[precision, norm] = gather(on, norm=norm).known
        except PartitaError:
            found[precision, norm] = Known()
    return found[precision, norm]


# what `known_where_rounded` found: a head is proved many times
_BEYOND: WeakKeyDictionary[Target, dict[tuple[Precision, float], Known]] = WeakKeyDictionary()


def knowledge_or_obstacle(
    target: Target, *, norm: float, declared: Declared, progress: Progress | None = None
) -> tuple[Knowledge | None, PartitaError | None]:
    """`gather`, or None and the reason why nothing is known about f."""
    try:
        return gather(target, norm=norm, declared=declared, progress=progress), None
    except (NothingKnownError, NotContinuousError) as error:
        return None, error


def gather(
    target: Target, *, norm: float, declared: Declared | None = None, progress: Progress | None = None
) -> Knowledge:
    """Proved before declared: a graph's own constants are used unless the caller's are smaller and not contradicted."""
    declared = declared or Declared()
    if declared.curvature is not None:
        declared.curvature.per_axis(target.domain.dimension)  # one for each coordinate, or an error
    said = _moduli(target, declared)
    if target.graph is not None:
        return _from_graph(target, target.graph, norm, said, progress)
    if said is None:
        raise NothingKnownError(_suggestion(target))
    return _as_declared(target, said)


def _as_declared(target: Target, said: Known) -> Knowledge:
    """What the caller declares, and nothing else."""
    box, (_, values) = target.box, target.answered()
    if not len(values):
        values = target(target.domain.sample(64, np.random.default_rng(2)))
    diagonal = float(np.sqrt((box.sides**2).sum()))
    magnitude = float(np.abs(values).max()) + _largest_move(said, diagonal, box.sides)
    return Knowledge(said, True, magnitude, "declared by the caller")


def _moduli(target: Target, declared: Declared) -> Known | None:
    lipschitz, jumps = declared.lipschitz, declared.jumps
    modulus = Modulus.of(declared.modulus) if isinstance(declared.modulus, str) else declared.modulus
    per_axis = None
    try:
        constants = None if lipschitz is None else np.asarray(lipschitz, dtype=float)
        if np.asarray(lipschitz).dtype == bool:
            raise TypeError
    except (TypeError, ValueError):
        raise DomainError(f"lipschitz is {lipschitz!r}; expected a number, or one per coordinate.") from None
    if constants is not None and constants.ndim > 0:
        per_axis = AxisLipschitz(tuple(constants.ravel().tolist()))
        if len(per_axis.constants) != target.domain.dimension:
            raise ShapeError(
                f"lipschitz has {len(per_axis.constants)} constants; expected {target.domain.dimension}, one "
                "per coordinate, or one number."
            )
    elif constants is not None:
        if modulus is not None:
            raise UnsupportedError("both lipschitz and modulus are given; expected one of them.")
        modulus = Modulus(float(constants))
    if modulus is None and per_axis is None:
        if jumps is not None:
            raise UnsupportedError("jumps is given without a modulus; declare lipschitz=… or modulus=… as well.")
        return None
    return Known(modulus, per_axis, jumps)


def _from_graph(target: Target, graph: Graph, norm: float, said: Known | None, progress: Progress | None) -> Knowledge:
    box = target.box
    resolution = {1: 1e-6, 2: 1e-3}.get(box.dimension, 1e-2)  # jump sets are surfaces: finer boxes are many more boxes
    lo, hi, region = box.lo.ravel(), box.hi.ravel(), None if target.fills_box else target.region
    if region is not None and not region.is_convex:
        if said is not None:
            return _as_declared(target, said)
        raise NothingKnownError(
            f"{target.label} is not proved to be bounded on the box around the region, and the region is not proved to be convex: "
            "slopes bound f along segments inside it only. Declare lipschitz=…, or use method='adaptive'."
        )
    try:
        found = lipschitz_bounds(graph, lo, hi, rough_resolution=resolution, region=region, progress=progress)
    except NonFiniteValueError as error:
        raise NonFiniteValueError(
            error.reason, f"{error.hint}{_way_out(target, graph, norm, 'nan' in error.reason)}"
        ) from None
    composed, reason = None, "its slopes are unbounded at the edge of the region"
    if region is None and _needs_composing(target, graph, norm, found):
        try:
            composed = composed_modulus(graph, lo, hi, progress)
        except UnsupportedError as error:
            reason = str(error)
    if said is not None and not _implied(said, found, composed, float(np.sqrt((box.sides**2).sum()))):
        _refute(target, said, found)
        return Knowledge(
            said, True, found.magnitude, "declared by the caller; what interval arithmetic proves is weaker"
        )
    if found.is_lipschitz:
        smaller = found.euclidean if composed is None or not composed.is_lipschitz else composed.constant
        known = Known(Modulus(min(found.euclidean, smaller)), AxisLipschitz(tuple(found.per_axis)))
        return Knowledge(known, False, found.magnitude, f"proved by interval arithmetic on {found.boxes:,} boxes")
    if composed is not None:
        source = (
            f"composed from the moduli of its operations; its slopes are unbounded in {len(found.rough_lo):,} boxes"
        )
        return Knowledge(Known(composed), False, found.magnitude, source)
    if math.isinf(norm) or isinstance(target.domain, PointCloud) or region is not None:
        lo, hi = found.rough_lo[0], found.rough_hi[0]
        raise NotContinuousError(
            f"{target.label} is not recognised as continuous: {reason}. Its slopes are unbounded, for example between "
            f"{lo.tolist()} and {hi.tolist()} ({len(found.rough_lo):,} such boxes). Use norm=1 or norm=2, "
            "shrink the domain, or, if it is continuous, declare modulus='an expression in t', such as '2*sqrt(t)'."
        )
    rough = RoughBoxes(found.rough_lo, found.rough_hi, graph, 2 * found.magnitude)
    known = Known(Modulus(found.euclidean), AxisLipschitz(tuple(found.per_axis)), rough)
    return Knowledge(
        known,
        False,
        found.magnitude,
        f"proved by interval arithmetic on {found.boxes:,} boxes, {len(found.rough_lo):,} of them rough",
    )


def _way_out(target: Target, graph: Graph, norm: float, undefined: bool) -> str:
    """How a function without a value at single points, or without a bound, can be approximated all the same."""
    with np.errstate(all="ignore"):
        if np.isnan(graph.evaluate(target.domain.sample(512, np.random.default_rng(3)))).any():
            return ""
    if undefined and target.tail is not None:
        return " A tail covers points where f is infinite, and none where it is 0·∞: leave those out with a region."
    if undefined:
        return (
            " f has values nearby. If it has a limit, write it with u**s*log(abs(u)), abs(u)**s or sin(u)/u, whose limits at u = 0 "
            "are known."
        )
    known = None if isinstance(target.domain, PointCloud) else find_singularities(graph, target.box)
    if math.isinf(norm) and known is not None:
        integrable = all(term.power < 1 for terms in known.terms for term in terms)
        return " Or use norm=1: f is unbounded and integrable." if integrable else ""
    use = "use norm=1 and declare" if math.isinf(norm) else "declare"
    return (
        f" Or, if f is unbounded and integrable, {use} tail=pa.Tail(clip, norm): where to clip f, and a bound of what is cut "
        "off. It is found without being declared for sums of C·|u|^-a and C·log|u|, u affine in one variable."
    )


def _needs_composing(target: Target, graph: Graph, norm: float, found: LipschitzBounds) -> bool:
    """Whether the modulus of f is worth composing: for suprema if f is steep, and for lengths, whose slopes form a ball."""
    if found.is_lipschitz:
        return graph.num_inputs > 1 and any(isinstance(limit, Root) for limit in graph.limits.values())
    return math.isinf(norm) or isinstance(target.domain, PointCloud)


def _implied(said: Known, found: LipschitzBounds, composed: Modulus | None, diagonal: float) -> bool:
    """Whether at least what the caller declared is proved: by interval arithmetic, or as a composed modulus."""
    if composed is not None and not found.is_lipschitz and said.modulus is not None and said.jumps is None:
        distances = np.geomspace(max(1e-12 * diagonal, 5e-324), max(diagonal, 5e-324), 64)
        return bool((composed.at(distances) <= said.modulus.at(distances) * (1 + 1e-9)).all())
    if not found.is_lipschitz or said.jumps is not None:
        return False
    if said.modulus is not None:
        return said.modulus.is_lipschitz and found.euclidean <= said.modulus.constant
    return said.per_axis is not None and bool((found.per_axis <= np.array(said.per_axis.constants)).all())


def _refute(target: Target, said: Known, found: LipschitzBounds) -> None:
    m = said.modulus
    if m is not None and m.is_lipschitz and said.jumps is None and found.observed > m.constant * (1 + 1e-9):
        raise LipschitzContradictedError(
            f"{target.label} has a slope of {found.observed:.6g} somewhere, more than the declared Lipschitz constant "
            f"{m.constant:g}. Leave lipschitz out: interval arithmetic proves {found.euclidean:.6g}."
        )


def _largest_move(known: Known, diagonal: float, sides: np.ndarray) -> float:
    """How far f can be from a sampled value, by what is declared."""
    moves = []
    if known.modulus is not None:
        moves.append(known.modulus.at(diagonal))
    if known.per_axis is not None:
        moves.append(float(sides @ np.array(known.per_axis.constants)))
    return float(max(min(moves), known.jumps.height if known.jumps is not None else 0.0))


def _suggestion(target: Target) -> str:
    points, values = (part[:_SHOWN] for part in target.answered())
    i, j = np.triu_indices(len(points), 1)
    distance = np.sqrt(((points[i] - points[j]) ** 2).sum(axis=1))
    slopes = np.abs(values[i] - values[j]).max(axis=1) / np.maximum(distance, 1e-300)
    return (
        f"nothing is known about {target.label}, so nothing can be proved. Declare lipschitz=L with "
        f"|f(x) − f(y)| ≤ L|x − y| ({len(points):,} points show slopes up to {slopes.max(initial=0.0):.4g}, an estimate), "
        "or give f as an expression and L is computed."
    )


def sample_pairs(domain: Domain, *, pairs: int = 1024, seed: int = 1) -> tuple[Array, Array]:
    """Pairs of different domain points, far and near, `(n, m)` each: to test a modulus of continuity on."""
    rng = np.random.default_rng(seed)
    x, y = domain.sample(pairs, rng), domain.sample(pairs, rng)
    if not isinstance(domain, PointCloud):
        scale = 10.0 ** -rng.integers(0, 5, size=(pairs, 1)).astype(float)
        y = domain.clamp(x + scale * (y - x))
    else:  # half of the pairs are nearest neighbours in the cloud
        x[::2] = domain.flat[rng.integers(len(domain.flat), size=len(x[::2]))]
        y[::2] = domain.neighbours_of(x[::2])
    keep = (x != y).any(axis=1)
    return x[keep], y[keep]
