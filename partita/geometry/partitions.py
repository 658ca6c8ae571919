"""Partitions defined by scores: max-affine functions and power diagrams, which are equivalent."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from partita.errors import DomainError, ShapeError
from partita.geometry.domains import Array, frozen_array

__all__ = ["MaxAffine", "Partition", "PowerDiagram", "points_in"]

_SCORES_AT_ONCE = 1 << 22  # lookups never hold points × cells whole


def points_in(points: ArrayLike, dimension: int) -> Array:
    """`points` as a float64 array of shape `(n, dimension)`. Raises a ShapeError for any other shape."""
    array = np.asarray(points, dtype=np.float64)
    if array.ndim != 2 or array.shape[1] != dimension:
        raise ShapeError(f"points have shape {array.shape}; expected (n, {dimension}), points of R^{dimension}.")
    return array


class Partition(ABC):
    """Cells `U_j = {x : score j is the largest}`. Subclasses say how many there are and what the scores are.

    Attributes:
        num_cells: N.
        dimension: m, the cells live in R^m.
    """

    num_cells: int
    dimension: int

    @abstractmethod
    def scores(self, points: ArrayLike) -> Array:
        """The score of every cell, `(n, cells)`. Only differences between scores matter.

        Args:
            points: `(n, m)`.
        """

    @abstractmethod
    def to_max_affine(self) -> MaxAffine:
        """The same cells as a `MaxAffine`."""

    @abstractmethod
    def to_power_diagram(self) -> PowerDiagram:
        """The same cells as a `PowerDiagram`."""

    @abstractmethod
    def cell(self, points: ArrayLike) -> NDArray[np.int64]:
        """The label of the largest score, `(n,)`. Ties go to the smallest label (Definition 3.2).

        Args:
            points: `(n, m)`.
        """

    @abstractmethod
    def margin(self, points: ArrayLike) -> Array:
        """Largest minus second largest score, `(n,)`. Infinite if there is only one cell.

        Args:
            points: `(n, m)`.
        """

    def indicator(self, points: ArrayLike) -> Array:
        """`E(x)`: the cell of each point as a one-hot row (Definition 3.2), `(n, cells)`.

        Args:
            points: `(n, m)`.

        >>> PowerDiagram([[0.0], [1.0]]).indicator([[0.9]]).tolist()
        [[0.0, 1.0]]
        """
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
            f"{names[0]} have shape {first.shape}, {names[1]} have shape {second.shape}; expected (cells, m) and (cells,)."
        )
    if not (np.isfinite(first).all() and np.isfinite(second).all()):
        raise DomainError(f"{names[0]} or {names[1]} contain NaN or infinity; expected finite numbers.")


@dataclass(frozen=True, eq=False, repr=False)
class MaxAffine(Partition):
    """`MaxAff(x) = max_j (a_j·x + b_j)`. Cell `U_j` is where score j is the largest (Definition 3.1).

    *Theorem*: `max-affine-partition` (Proposition 3.1): the cells cover R^m, and two of them meet only where their
    scores tie. Adding the same affine function to every score changes no cell.

    Args:
        slopes: the a_j, `(cells, m)`.
        offsets: the b_j, `(cells,)`.

    Raises:
        ShapeError: the shapes do not fit.
        DomainError: a number is not finite.

    >>> import partita as pa
    >>> steps = pa.MaxAffine([[0.0], [1.0]], [0.0, -0.5])
    >>> steps.cell([[0.2], [0.9]]).tolist()
    [0, 1]
    """

    slopes: Array
    offsets: Array
    num_cells: int = field(init=False)
    dimension: int = field(init=False)

    if TYPE_CHECKING:

        def __init__(self, slopes: ArrayLike, offsets: ArrayLike) -> None: ...

    def __post_init__(self) -> None:
        object.__setattr__(self, "slopes", frozen_array(self.slopes))
        object.__setattr__(self, "offsets", frozen_array(self.offsets))
        _check_finite(self.slopes, self.offsets, ("slopes", "offsets"))
        object.__setattr__(self, "num_cells", len(self.offsets))
        object.__setattr__(self, "dimension", self.slopes.shape[1])

    def scores(self, points: ArrayLike) -> Array:
        """`a_j·x + b_j` for every cell, `(n, cells)`.

        Args:
            points: `(n, m)`.

        >>> MaxAffine([[0.0], [1.0]], [0.0, -0.5]).scores([[2.0]]).tolist()
        [[0.0, 1.5]]
        """
        return points_in(points, self.dimension) @ self.slopes.T + self.offsets

    def cell(self, points: ArrayLike) -> NDArray[np.int64]:
        """The label of the largest score, `(n,)`. Ties go to the smallest label.

        Args:
            points: `(n, m)`.

        >>> MaxAffine([[0.0], [1.0]], [0.0, -0.5]).cell([[2.0], [0.5]]).tolist()
        [1, 0]
        """
        return self._cell_by_score(points)

    def margin(self, points: ArrayLike) -> Array:
        """Largest minus second largest score, `(n,)`. Infinite if there is only one cell.

        Args:
            points: `(n, m)`.

        >>> MaxAffine([[0.0], [1.0]], [0.0, -0.5]).margin([[2.0]]).tolist()
        [1.5]
        """
        return self._margin_by_score(points)

    def value(self, points: ArrayLike) -> Array:
        """`MaxAff(x)`, the largest score, `(n,)`.

        Args:
            points: `(n, m)`.

        >>> MaxAffine([[0.0], [1.0]], [0.0, -0.5]).value([[2.0], [0.0]]).tolist()
        [1.5, 0.0]
        """
        return self._reduce(points, lambda scores: scores.max(axis=1))

    def to_max_affine(self) -> MaxAffine:
        """The partition itself."""
        return self

    def to_power_diagram(self) -> PowerDiagram:
        """The same cells as a power diagram, with centers `c_j = a_j` and powers `p_j = 2 b_j + |a_j|²`.

        >>> MaxAffine([[0.0], [1.0]], [0.0, -0.5]).to_power_diagram().powers.tolist()
        [0.0, 0.0]
        """
        return PowerDiagram(self.slopes, 2 * self.offsets + (self.slopes**2).sum(axis=1))


@dataclass(frozen=True, eq=False, repr=False)
class PowerDiagram(Partition):
    """Cells `{x : |x − c_j|² − p_j is smallest}`: the Laguerre diagram of centers c_j with powers p_j.

    The scores are `(p_j − |x − c_j|²)/2`. They differ from `c_j·x + (p_j − |c_j|²)/2` by `−|x|²/2`, which is common to
    all cells, so power diagrams and max-affine functions make the same partitions. Equal powers give Voronoi cells.
    `x − c_j` is computed first, which keeps lookups accurate far from the origin.

    Args:
        centers: the c_j, `(cells, m)`.
        powers: the p_j, `(cells,)`; zeros by default.

    Raises:
        ShapeError: the shapes do not fit.
        DomainError: a number is not finite.

    >>> import partita as pa
    >>> pa.PowerDiagram([[0.0], [1.0]], [0.0, 0.5]).cell([[0.2], [0.3]]).tolist()
    [0, 1]
    """

    centers: Array
    powers: Array = None  # type: ignore[assignment]  # zeros, once checked
    num_cells: int = field(init=False)
    dimension: int = field(init=False)

    if TYPE_CHECKING:

        def __init__(self, centers: ArrayLike, powers: ArrayLike | None = None) -> None: ...

    def __post_init__(self) -> None:
        object.__setattr__(self, "centers", frozen_array(self.centers))
        powers = np.zeros(self.centers.shape[:1]) if self.powers is None else self.powers
        object.__setattr__(self, "powers", frozen_array(powers))
        _check_finite(self.centers, self.powers, ("centers", "powers"))
        object.__setattr__(self, "num_cells", len(self.centers))
        object.__setattr__(self, "dimension", self.centers.shape[1])

    def scores(self, points: ArrayLike) -> Array:
        """`(p_j − |x − c_j|²)/2` for every cell, `(n, cells)`.

        Args:
            points: `(n, m)`.

        >>> PowerDiagram([[0.0], [1.0]]).scores([[1.0]]).tolist()
        [[-0.5, 0.0]]
        """
        array = points_in(points, self.dimension)
        out = np.empty((len(array), self.num_cells))
        step = max(1, _SCORES_AT_ONCE // self.centers.size)
        for i in range(0, len(array), step):
            difference = array[i : i + step, None, :] - self.centers
            out[i : i + step] = (self.powers - np.einsum("ncm,ncm->nc", difference, difference)) / 2
        return out

    def cell(self, points: ArrayLike) -> NDArray[np.int64]:
        """The label of the largest score, `(n,)`. Ties go to the smallest label.

        Args:
            points: `(n, m)`.

        >>> PowerDiagram([[0.0], [1.0]]).cell([[0.4], [0.6]]).tolist()
        [0, 1]
        """
        return self._cell_by_score(points)

    def margin(self, points: ArrayLike) -> Array:
        """Largest minus second largest score, `(n,)`. Infinite if there is only one cell.

        Args:
            points: `(n, m)`.

        >>> PowerDiagram([[0.0], [1.0]]).margin([[1.0]]).tolist()
        [0.5]
        """
        return self._margin_by_score(points)

    def to_max_affine(self) -> MaxAffine:
        """The same cells as a max-affine function, with slopes `a_j = c_j` and offsets `b_j = (p_j − |c_j|²)/2`.

        >>> PowerDiagram([[0.0], [1.0]]).to_max_affine().offsets.tolist()
        [0.0, -0.5]
        """
        return MaxAffine(self.centers, (self.powers - (self.centers**2).sum(axis=1)) / 2)

    def to_power_diagram(self) -> PowerDiagram:
        """The partition itself."""
        return self
