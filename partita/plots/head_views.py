"""What a picture of a head is about: which output, on which line or plane, at which temperature, and the numbers there.

The domain decides where there are numbers. Outside it the head is not evaluated and the function is not asked.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
import scipy
import torch
from numpy.typing import NDArray

from partita.arithmetic.arguments import is_number
from partita.compiler.compiled import Compiled
from partita.errors import ShapeError, UnsupportedError
from partita.geometry.domains import Array, Box, PointCloud
from partita.geometry.grid import ProductGrid
from partita.geometry.partitions import Partition
from partita.heads.head import FoldedHead, Head, computing_dtype, require_folded

__all__ = ["LISTED", "HeadView", "axis_names", "partition_of"]

LISTED = 0  # instead of a number of points across: the listed points of a cloud
_ACROSS = {1: 2001, 2: 320}  # points across a line and a plane
_ACROSS_UNKNOWN = {1: 257, 2: 40}  # where a black box is asked, whose calls may be slow
_SCORES_AT_ONCE = 1 << 22


def axis_names(compiled: Compiled) -> list[str]:
    """x0, x1, …; k0, …, q0, … for cross-attention."""
    if len(compiled.target.domains) == 1:
        return [f"x{i}" for i in range(compiled.head.dimension)]
    keys, queries = (d.dimension for d in compiled.target.domains)
    return [f"k{i}" for i in range(keys)] + [f"q{i}" for i in range(queries)]


def partition_of(compiled: Compiled, what: str) -> Partition:
    """The cells of the head; an UnsupportedError that says `what` needs them for a network of heads."""
    head, found = require_folded(compiled.head, what), compiled.partition
    return head.partition(compiled.target.box) if found is None else found


@dataclass(frozen=True, eq=False)
class HeadView:
    """One output of a head on the line or the plane that is drawn.

    Attributes:
        compiled: the head with its certificate.
        head: the same head, or a copy of it at another temperature.
        output: which scalar output.
        axes: the flat coordinates that vary, one or two.
        at: the point through which the slice goes, `(m,)`.
        sharpness: κ of `head` where it is not that of `compiled`; None where it is.
        pixels: how many points across the head is evaluated at; that of a single picture if None.
        asked: values of the function that were asked for before. All temperatures share them.
        evaluated: values of the head that were computed before.
    """

    compiled: Compiled
    head: Head
    output: int
    axes: tuple[int, ...]
    at: Array
    sharpness: float | None = None
    pixels: int | None = None
    asked: dict[int, Array] = field(default_factory=dict)
    evaluated: dict[int, Array] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        compiled: Compiled,
        *,
        output: int,
        axes: Sequence[int],
        at: Sequence[float] | Array | None,
        pixels: int | None = None,
    ) -> HeadView:
        """The view that the arguments of the plot functions describe, checked.

        Raises:
            UnsupportedError: an output or coordinate that the head does not have, a slice that misses the domain, or a head that
                was changed after it was certified.
            ShapeError: `at` has another length.
        """
        compiled.require_unchanged()
        head, box = compiled.head, compiled.target.box
        if not 0 <= output < head.num_outputs:
            raise UnsupportedError(f"output is {output}; this head has {head.num_outputs}, counted from 0.")
        if head.dimension == 1:
            shown: tuple[int, ...] = (0,)
        else:
            shown = tuple(axes)
            if len(shown) != 2 or shown[0] == shown[1] or not all(0 <= k < head.dimension for k in shown):
                raise UnsupportedError(
                    f"axes are {shown} in R^{head.dimension}; expected two different coordinates, counted from 0."
                )
        middle = box.lo.ravel() / 2 + box.hi.ravel() / 2
        place = middle if at is None else np.asarray(at, dtype=np.float64).ravel()
        if place.shape != middle.shape or not np.isfinite(place).all():
            raise ShapeError(f"at has {place.size} numbers; expected {middle.size} finite ones, a point of the domain.")
        view = cls(compiled, head, output, shown, place, pixels=pixels if len(shown) == 2 else None)
        if not view.is_cloud and not view.inside(view.points(view.across)).any():
            raise UnsupportedError(
                f"the slice{view.slice_text(' at ')} meets no point of {compiled.target.domain} that is drawn",
                "Pass at=, a point of the domain, or other axes=.",
            )
        return view

    @property
    def has_cells(self) -> bool:
        """A network of heads has no cells of its own."""
        return isinstance(self.head, FoldedHead)

    @property
    def folded(self) -> FoldedHead:
        """The head, where one softmax is needed; an UnsupportedError for a network."""
        return require_folded(self.head, "a picture of cells, weights or temperatures")

    @property
    def partition(self) -> Partition:
        """The cells; an UnsupportedError for a network."""
        return partition_of(self.compiled, "a picture of cells or weights")

    @property
    def names(self) -> list[str]:
        """The names of the coordinates that vary."""
        names = axis_names(self.compiled)
        return [names[k] for k in self.axes]

    @property
    def dimension(self) -> int:
        """1 for a line, 2 for a plane."""
        return len(self.axes)

    @property
    def window(self) -> Box:
        """The part of the domain's box that is drawn."""
        box, chosen = self.compiled.target.box, list(self.axes)
        return Box(box.lo.ravel()[chosen], box.hi.ravel()[chosen])

    @property
    def is_slice(self) -> bool:
        return self.head.dimension > len(self.axes)

    @property
    def is_cloud(self) -> bool:
        return isinstance(self.compiled.target.domain, PointCloud)

    @property
    def has_function(self) -> bool:
        """A black box that was read from a file has no function to compare with."""
        return self.compiled.target.ask is not None

    @property
    def across(self) -> int:
        """How many points across the head is evaluated at."""
        return self.pixels or _ACROSS[self.dimension]

    @property
    def across_function(self) -> int:
        """How many points across the function is asked at: fewer where it is a black box."""
        return _ACROSS_UNKNOWN[self.dimension] if self.compiled.target.graph is None else self.across

    def slice_text(self, before: str = "") -> str:
        """The coordinates that do not vary: "x2 = 0.5, x3 = 0". Empty if all of them vary."""
        names = axis_names(self.compiled)
        fixed = [k for k in range(self.head.dimension) if k not in self.axes]
        if self.is_cloud or not fixed:
            return ""
        told = ", ".join(f"{names[k]} = {self.at[k]:.3g}" for k in fixed[:3])
        return before + told.replace("-", "−") + (", …" if len(fixed) > 3 else "")

    def points(self, across: int) -> Array:
        """Flat points `(n, m)`: `across` on a line, `across²` on a plane, rows first; with LISTED those of the cloud."""
        domain = self.compiled.target.domain
        if across == LISTED and isinstance(domain, PointCloud):
            return np.asarray(domain.flat)
        window = self.window
        lines = [np.linspace(a, b, across) for a, b in zip(window.lo, window.hi)]
        points = np.tile(self.at, (across**self.dimension, 1))
        for k, grid in zip(self.axes, np.meshgrid(*lines)):
            points[:, k] = grid.ravel()
        return points

    def inside(self, points: Array) -> NDArray[np.bool_]:
        """Which points the domain holds."""
        return np.asarray(self.compiled.target.domain.contains(points))

    def computed(self, across: int) -> Array:
        """What the head computes there; NaN where the domain is not."""
        if across not in self.evaluated:
            self.evaluated[across] = self._where_inside(self.points(across), self.computed_at)
        return self.evaluated[across]

    def computed_at(self, points: Array) -> Array:
        """What the head computes at points of the domain."""
        with torch.no_grad():
            out = self.head.evaluate(torch.from_numpy(points).to(self.head.device, computing_dtype(self.head.dtype)))
        return np.asarray(out[:, self.output].double().cpu().numpy())

    def function(self, across: int) -> Array:
        """f there, and NaN where the domain is not. Within roundings of the edge of a region f is asked beside them."""
        if across not in self.asked:
            self.asked[across] = self._where_inside(self.points(across), self.function_at)
        return self.asked[across]

    def function_at(self, points: Array) -> Array:
        """f at points of the domain."""
        region = self.compiled.target.region
        return np.asarray(self.compiled.target(points if region is None else region.clamp(points))[:, self.output])

    def _where_inside(self, points: Array, measure: Callable[[Array], Array]) -> Array:
        """A measure where the domain is, NaN elsewhere."""
        inside, found = self.inside(points), np.full(len(points), np.nan)
        found[inside] = measure(points[inside])
        return found

    def error(self, across: int) -> Array:
        """`|head − f|` there."""
        return np.asarray(np.abs(self.computed(across) - self.function(across)))

    def largest_weight(self, across: int) -> Array:
        """The largest softmax weight that a key has there; NaN where the domain is not."""
        points = self.points(across)
        found = np.full(len(points), np.nan)
        inside = self.inside(points)
        found[inside] = self._largest_weight(points[inside])
        return found

    def _largest_weight(self, points: Array) -> Array:
        rates = np.broadcast_to(self._rates, self.head.dimension)
        partition = self.partition
        if isinstance(partition, ProductGrid):  # the weights factorise, and so does their maximum
            whole = np.ones(len(points))
            for x, centers, rate in zip(points.T, partition.axes, rates):
                distinct, back = np.unique(x, return_inverse=True)
                whole *= _softmax(-0.5 * rate * (distinct[:, None] - centers) ** 2).max(axis=1)[back]
            return whole
        step = max(1, _SCORES_AT_ONCE // (partition.num_cells * partition.dimension))
        parts = [points[k : k + step] for k in range(0, len(points), step)]
        return np.concatenate([_softmax(rates[0] * partition.scores(p)).max(axis=1) for p in parts])

    def weights_on_line(self, x: Array, keys: NDArray[np.int64]) -> Array:
        """The softmax weights of some keys at points of a line, `(n, keys)`."""
        return np.asarray(_softmax(float(self._rates.max()) * self.partition.scores(x[:, None]))[:, keys])

    @property
    def _rates(self) -> Array:
        return np.asarray(self.folded.inverse_temperature.detach().double().cpu().numpy())

    @cached_property
    def spacing(self) -> Array:
        """h: on a grid the gap between centers, `(m,)`; for scattered centers the median distance to the nearest other one, `()`.

        0 on an axis with a single center, whose temperature changes nothing.
        """
        partition = self.partition
        if isinstance(partition, ProductGrid):
            return np.array([float(np.diff(a).min()) if len(a) > 1 else 0.0 for a in partition.axes])
        centers = np.unique(partition.to_power_diagram().centers, axis=0)
        if len(centers) < 2:
            return np.zeros(())
        return np.asarray(np.median(scipy.spatial.KDTree(centers).query(centers, k=2)[0][:, 1]))

    @property
    def own_sharpness(self) -> float:
        """κ = R h² of the compiled head, the smallest of all axes; 0 if it has one key."""
        own = require_folded(self.compiled.head, "the sharpness")
        rates = np.asarray(own.inverse_temperature.detach().double().cpu().numpy())
        kappas = (rates * self.spacing**2)[self.spacing > 0]
        return float(kappas.min()) if kappas.size else 0.0

    def at_sharpness(self, kappa: float) -> HeadView:
        """The same centers and values at another temperature: R = κ/h² on every axis."""
        if not (is_number(kappa) and 0 < kappa < np.inf):
            raise UnsupportedError(f"sharpness is {kappa!r}; expected finite numbers κ = R h² > 0.")
        head, h = copy.deepcopy(require_folded(self.compiled.head, "another temperature")), self.spacing
        rates = np.where(h > 0, float(kappa) / np.where(h > 0, h, 1.0) ** 2, self._rates)
        with torch.no_grad():
            head.inverse_temperature.copy_(torch.from_numpy(np.asarray(rates)))
        return replace(self, head=head, sharpness=float(kappa), evaluated={})


def _softmax(scores: Array) -> Array:
    weights = np.exp(scores - scores.max(axis=1, keepdims=True))
    return np.asarray(weights / weights.sum(axis=1, keepdims=True))
