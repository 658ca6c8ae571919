"""What the caller asked for: function, domain, tolerance, options, and what is declared about the function."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from partita.arithmetic.precision import PRECISIONS, Precision
from partita.arithmetic.progress import Progress, report
from partita.errors import PartitaError
from partita.functions.probing import Calls
from partita.functions.regularity import Declared, Knowledge, knowledge_or_obstacle, where_planned
from partita.functions.target import Target
from partita.geometry.domains import Array, Box, PointCloud
from partita.search.averaged_values import Slopes
from partita.search.extension import extended
from partita.search.interpolant import interpolate

__all__ = ["DEFAULT_MAX_BYTES", "HARD_SHARPNESS", "Request"]

HARD_SHARPNESS = 64.0  # κ = R h²: two centers per axis hold all but 1e-13 of the mass
DEFAULT_MAX_BYTES = 4 << 30
_STAND_IN_SHARE = 0.1  # of the tolerance, by which an interpolant may differ from f
_STAND_IN_POINTS = 20_000  # at which f is evaluated for it
_TRIALS = 3


@dataclass(frozen=True, eq=False)
class Request:
    """A request to `compile` or `plan`. Plans carry it, so that nothing is lost when a plan is made again.

    Attributes:
        target: f and its domain.
        tolerance: ε. norm: p, math.inf for the supremum. dtype: of the head.
        sharpness: κ = R h², None for each method's own choice.
        max_value: the largest |V| that the head may have, `FoldedHead.largest_value`.
        max_heads, max_layers: the most heads of a layer, and the most layers; None if the caller set no limit.
        max_bytes: the most that all tensors of the head's state_dict may take together.
        method: the name of a method, "auto" for the smallest head.
        accept: "strongest" kind of claim first, or an "estimated" one if that makes the head smaller.
        declared: what the caller declares about f.
        query_values: for a pair of boxes, whether values may be affine in z_Q too. Such a head is not cross-attention.
        folder: where tables of values are written that may be larger than memory; None to build heads in memory.
        best_effort: whether a head that misses the tolerance is better than none: the caller limited time or evaluations.
        precision: of the head's dtype. hard_sharpness: κ of a hard head. is_auto: whether the planner chooses the method.
        box: the box around the domain. seen: its ends as the dtype rounds them, outward, flat.
        domain_factor: `(volume · outputs)^{1/p}`, what carries a supremum over to L_p.
        aim: the tolerance for the supremum: what meets it meets the tolerance in the norm asked for.
        value_axes: the flat coordinates in which values may be affine, `(m,)`: those of z_K for a pair, unless `query_values`.
        progress: called while `knowledge` and `slopes` are computed.
    """

    target: Target
    tolerance: float
    norm: float = math.inf
    dtype: torch.dtype = torch.float64
    sharpness: float | None = None
    max_bytes: int = DEFAULT_MAX_BYTES
    method: str = "auto"
    accept: str = "strongest"
    declared: Declared = field(default_factory=Declared)
    progress: Progress | None = None
    query_values: bool = False
    best_effort: bool = False
    max_value: float = math.inf
    max_heads: int | None = None
    max_layers: int | None = None
    folder: Path | None = None
    _seen: tuple[Array, Array] | None = None
    _found: dict[str, Any] = field(default_factory=dict, repr=False)  # what was found out of f; shared with copies
    precision: Precision = field(init=False)
    hard_sharpness: float = field(init=False)
    is_auto: bool = field(init=False)
    box: Box = field(init=False)
    seen: tuple[Array, Array] = field(init=False)
    domain_factor: float = field(init=False)
    aim: float = field(init=False)
    value_axes: NDArray[np.bool_] = field(init=False)

    def __post_init__(self) -> None:
        box, outputs = self.target.box, self.target.num_outputs
        precision = PRECISIONS[str(self.dtype)]
        factor = 1.0 if math.isinf(self.norm) else (self.target.volume * outputs) ** (1 / self.norm)
        for name, value in (
            ("precision", precision),
            ("hard_sharpness", HARD_SHARPNESS if self.sharpness is None else self.sharpness),
            ("is_auto", self.method == "auto"),
            ("box", box),
            ("seen", self._seen or precision.widened(box.lo.ravel(), box.hi.ravel())),
            ("domain_factor", factor),
            ("aim", self.tolerance / factor),
            ("value_axes", self._value_axes()),
        ):
            object.__setattr__(self, name, value)

    def _value_axes(self) -> NDArray[np.bool_]:
        domains = self.target.domains
        restricted = len(domains) == 2 and not self.query_values
        return np.arange(self.target.box.dimension) < (domains[0].dimension if restricted else math.inf)

    def caveat(self, slopes: ArrayLike | None) -> str:
        """What is to be said about values with these slopes, `(cells, out, m)`: empty unless they depend on z_Q."""
        domains = self.target.domains
        if len(domains) == 1 or slopes is None or not np.asarray(slopes)[:, :, domains[0].dimension :].any():
            return ""
        return "values are affine in z_Q: not cross-attention, and without layers()"

    @property
    def asked(self) -> float:
        """The tolerance that the caller asked for, tail included."""
        return self.stated(self.tolerance)

    def stated(self, tolerance: float) -> float:
        """The tolerance to ask for, so that the tail leaves this much; a proved tail takes the same share of any tolerance."""
        tail = self.target.tail
        if tail is None:
            return tolerance
        return tolerance + tail.norm if self.target.tail_declared else tolerance * (1 + tail.norm / self.tolerance)

    @property
    def knowledge(self) -> Knowledge | None:
        """What is known about how fast f changes; None if nothing is (`obstacle` says why)."""
        return self._gathered()[0]

    @property
    def set_aside(self) -> float:
        """What a half type takes from the aim: f moves when its input is rounded, and values when they are stored.

        0 for float64 and float32, which take next to nothing.
        """
        if not self.precision.is_half or self.knowledge is None:
            return 0.0
        known = self.knowledge.known
        moved = self.precision.moved_by(
            float(np.sqrt((np.abs(np.array(self.seen)).max(axis=0) ** 2).sum())), len(self.seen[0])
        )
        moves = [] if known.modulus is None else [known.modulus.above(moved)]
        moves += [] if known.per_axis is None else [moved * sum(known.per_axis.constants)]
        return (
            min(moves, default=0.0)
            + self.precision.value_unit * self.knowledge.magnitude
            + self.precision.value_tiniest
        )

    @property
    def is_steep(self) -> bool:
        """Whether f is known to be continuous and not known to be Lipschitz: equal cells do not suit it."""
        known = None if self.knowledge is None else self.knowledge.known
        return (
            known is not None and known.modulus is not None and bool(known.modulus.expression) and known.jumps is None
        )

    @property
    def refusals(self) -> dict[Any, Any]:
        """What methods refused, by what they were asked: for the planner."""
        found: dict[Any, Any] = self._found.setdefault("refusals", {})
        return found

    @property
    def obstacle(self) -> PartitaError | None:
        """Why nothing is known about f."""
        return self._gathered()[1]

    def _gathered(self) -> tuple[Knowledge | None, PartitaError | None]:
        if "knowledge" not in self._found:
            self._found["knowledge"] = knowledge_or_obstacle(
                where_planned(self.target, self.precision),
                norm=self.norm,
                declared=self.declared,
                progress=self.progress,
            )
        found: tuple[Knowledge | None, PartitaError | None] = self._found["knowledge"]
        return found

    def for_search(self) -> Request:
        """The request with an interpolant in place of a black box, and the tolerance that the interpolant leaves.

        Searches evaluate f hundreds of thousands of times. The interpolant needs tens to thousands of evaluations, and what it
        misses is found when the finished head is compared with f. The request itself, if f is an expression, or has no
        interpolant: on point clouds, and where f is too rough.
        """
        target = self.target
        if (
            target.graph is not None
            or target.ask is None
            or target.interpolated
            or isinstance(target.domain, PointCloud)
        ):
            return self
        if "interpolant" not in self._found:
            self._found["interpolant"] = self._interpolated()
        found = self._found["interpolant"]
        if found is None:
            return self
        function, spare = found
        return replace(self, target=function, tolerance=self.tolerance - spare * self.domain_factor)

    def _interpolated(self) -> tuple[Target, float] | None:
        """A target whose function is an interpolant of f, and how far it is from f."""
        target, calls = self.target, self.target.calls
        trial: int = self._found.setdefault("trials", 0)
        if trial == _TRIALS and math.isinf(calls.most):
            return None
        share = _STAND_IN_SHARE * self.aim / 4**trial

        if target.region is not None or target.excluding is not None:  # where f may have no values
            polynomial = extended(target, share, self.progress)
            if polynomial is None:
                return None
            return replace(target, ask=polynomial, calls=Calls(), interpolated=True), min(
                0.5 * polynomial.error, 0.5 * self.aim
            )

        def watch(error: float) -> None:
            report(self.progress, f"{calls.rows:,} evaluations of f, interpolated within {error:.2g}")

        found = interpolate(
            target,
            self.box,
            outputs=target.num_outputs,
            tolerance=share,
            most=int(min(_STAND_IN_POINTS, calls.left)),
            known=target.answered(),
            watch=watch,
        )
        if not found.resolved and math.isinf(calls.most) and not found.stopped:
            return None
        spare = min(0.5 * found.error, 0.5 * self.aim)
        return replace(target, ask=found, calls=Calls(), interpolated=True), spare

    def distrust(self) -> bool:
        """Have the interpolant made again, closer to f, after a head found with it missed the tolerance; False if there is none."""
        if self._found.get("interpolant") is None or self._found["trials"] == _TRIALS:
            return False
        self._found["trials"] += 1
        for name in ("interpolant", "slopes"):
            self._found.pop(name, None)
        return True

    @property
    def slopes(self) -> Slopes:
        """Sampled estimates of the derivatives of f: for sizes, never for claims."""
        if "slopes" not in self._found:
            self._found["slopes"] = Slopes.of(self.target, progress=self.progress)
        found: Slopes = self._found["slopes"]
        return found
