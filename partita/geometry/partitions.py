"""Partitions that scores make: max-affine functions and power diagrams, two names for one thing."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from partita.errors import DomainError, ShapeError
from partita.geometry.domains import Array, frozen_array

__all__ = ["MaxAffine", "Partition", "PowerDiagram", "points_in"]

_SCORES_AT_ONCE = 1 << 22  # lookups never hold points × cells whole


def points_in(points: ArrayLike, dimension: int) -> Array:
    """`points` as a float64 array of shape `(n, dimension)`, or a ShapeError."""
    array = np.asarray(points, dtype=np.float64)
    if array.ndim != 2 or array.shape[1] != dimension:
        raise ShapeError(f"points have shape {array.shape}; this lives in R^{dimension}, expected (n, {dimension}).")
    return array


class Partition(ABC):
    """Cells `U_j = {x : score j is the largest}`. Subclasses say how many there are and what the scores are."""

    @property
    @abstractmethod
    def num_cells(self) -> int: ...

    @property
    @abstractmethod
    def dimension(self) -> int:
        """m: the cells live in R^m."""

    @abstractmethod
    def scores(self, points: ArrayLike) -> Array:
        """`(n, cells)`; only their differences matter."""

    @abstractmethod
    def to_max_affine(self) -> MaxAffine: ...

    @abstractmethod
    def to_power_diagram(self) -> PowerDiagram: ...

    @abstractmethod
    def cell(self, points: ArrayLike) -> NDArray[np.int64]:
        """The label of the largest score, ties to the smallest label (Definition 3.2), `(n,)`."""

    @abstractmethod
    def margin(self, points: ArrayLike) -> Array:
        """Largest minus second largest score, `(n,)`; infinite where there is one cell only."""

    def indicator(self, points: ArrayLike) -> Array:
        """`E(x)`: one-hot rows that name the cell (Definition 3.2), `(n, cells)`."""
        labels = self.cell(points)
        out = np.zeros((len(labels), self.num_cells))
        out[np.arange(len(labels)), labels] = 1.0
        return out

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.num_cells:,} cells in R^{self.dimension})"

    def _cell_by_score(self, points: ArrayLike) -> NDArray[np.int64]:
        return self._reduce(points, lambda scores: scores.argmax(axis=1))

    def _margin_by_score(self, points: ArrayLike) -> Array:
        if self.num_cells == 1:
            return np.full(len(points_in(points, self.dimension)), np.inf)
        return self._reduce(points, lambda scores: np.diff(np.partition(scores, -2, axis=1)[:, -2:], axis=1)[:, 0])

    def _reduce(self, points: ArrayLike, reduce: Callable[[Array], NDArray[Any]]) -> NDArray[Any]:
        array = points_in(points, self.dimension)
        step = max(1, _SCORES_AT_ONCE // self.num_cells)
        return np.concatenate([reduce(self.scores(array[i : i + step])) for i in range(0, max(len(array), 1), step)])


def _check_finite(first: Array, second: Array, names: tuple[str, str]) -> None:
    if first.ndim != 2 or second.shape != first.shape[:1] or first.size == 0:
        raise ShapeError(
            f"{names[0]} of shape {first.shape} and {names[1]} of shape {second.shape}; expected (cells, m) and (cells,)."
        )
    if not (np.isfinite(first).all() and np.isfinite(second).all()):
        raise DomainError(f"{names[0]} and {names[1]} must be finite numbers.")


@dataclass(frozen=True, eq=False, repr=False)
class MaxAffine(Partition):
    """`MaxAff(x) = max_j (a_j·x + b_j)`; cell `U_j` is where score j is largest (Definition 3.1).

    *Theorem*: `max-affine-partition` (Proposition 3.1): the cells cover R^m, and two of them meet only where their
    scores tie. A common affine function added to every score changes no cell.

    Args:
        slopes: `(cells, m)`, the a_j.
        offsets: `(cells,)`, the b_j.

    >>> steps = MaxAffine([[0.0], [1.0]], [0.0, -0.5])
    >>> steps.cell([[0.2], [0.9]]).tolist()
    [0, 1]
    """

    slopes: Array
    offsets: Array

    if TYPE_CHECKING:

        def __init__(self, slopes: ArrayLike, offsets: ArrayLike) -> None: ...

    def __post_init__(self) -> None:
        object.__setattr__(self, "slopes", frozen_array(self.slopes))
        object.__setattr__(self, "offsets", frozen_array(self.offsets))
        _check_finite(self.slopes, self.offsets, ("slopes", "offsets"))

    @property
    def num_cells(self) -> int:
        return len(self.offsets)

    @property
    def dimension(self) -> int:
        return int(self.slopes.shape[1])

    def scores(self, points: ArrayLike) -> Array:
        """`a_j·x + b_j`."""
        return points_in(points, self.dimension) @ self.slopes.T + self.offsets

    def cell(self, points: ArrayLike) -> NDArray[np.int64]:
        return self._cell_by_score(points)

    def margin(self, points: ArrayLike) -> Array:
        return self._margin_by_score(points)

    def value(self, points: ArrayLike) -> Array:
        """`MaxAff(x)`, `(n,)`."""
        return self._reduce(points, lambda scores: scores.max(axis=1))

    def to_max_affine(self) -> MaxAffine:
        return self

    def to_power_diagram(self) -> PowerDiagram:
        """Centers `c_j = a_j` and powers `p_j = 2 b_j + |a_j|²`: the same cells."""
        return PowerDiagram(self.slopes, 2 * self.offsets + (self.slopes**2).sum(axis=1))


@dataclass(frozen=True, eq=False, repr=False)
class PowerDiagram(Partition):
    """Cells `{x : |x − c_j|² − p_j is smallest}`: the Laguerre diagram of centers c_j with powers p_j.

    Scores are `(p_j − |x − c_j|²)/2`, which differ from `c_j·x + (p_j − |c_j|²)/2` by the common `−|x|²/2`: so these are
    the cells of a max-affine function, and conversely. Equal powers give Voronoi cells. Differences are centred
    (`x − c_j` is formed first), which keeps lookups accurate far from the origin.

    Args:
        centers: `(cells, m)`.
        powers: `(cells,)`; zeros when left out.
    """

    centers: Array
    powers: Array = None  # type: ignore[assignment]  # zeros, once checked

    if TYPE_CHECKING:

        def __init__(self, centers: ArrayLike, powers: ArrayLike | None = None) -> None: ...

    def __post_init__(self) -> None:
        object.__setattr__(self, "centers", frozen_array(self.centers))
        powers = np.zeros(self.centers.shape[:1]) if self.powers is None else self.powers
        object.__setattr__(self, "powers", frozen_array(powers))
        _check_finite(self.centers, self.powers, ("centers", "powers"))

    @property
    def num_cells(self) -> int:
        return len(self.centers)

    @property
    def dimension(self) -> int:
        return int(self.centers.shape[1])

    def scores(self, points: ArrayLike) -> Array:
        """`(p_j − |x − c_j|²)/2`."""
        array = points_in(points, self.dimension)
        out = np.empty((len(array), self.num_cells))
        step = max(1, _SCORES_AT_ONCE // self.centers.size)
        for i in range(0, len(array), step):
            difference = array[i : i + step, None, :] - self.centers
            out[i : i + step] = (self.powers - np.einsum("ncm,ncm->nc", difference, difference)) / 2
        return out

    def cell(self, points: ArrayLike) -> NDArray[np.int64]:
        return self._cell_by_score(points)

    def margin(self, points: ArrayLike) -> Array:
        return self._margin_by_score(points)

    def to_max_affine(self) -> MaxAffine:
        """Slopes `a_j = c_j`, offsets `b_j = (p_j − |c_j|²)/2`."""
        return MaxAffine(self.centers, (self.powers - (self.centers**2).sum(axis=1)) / 2)

    def to_power_diagram(self) -> PowerDiagram:
        return self
