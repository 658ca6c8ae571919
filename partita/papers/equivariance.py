"""What a layer without positions cannot do: a proved lower bound on the error of every layer that respects a symmetry."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from partita.errors import DomainError, NothingKnownError, ShapeError, UnsupportedError
from partita.functions.graph import Graph
from partita.functions.target import Target, make_target
from partita.geometry.domains import Array, Box, BoxLike

__all__ = ["EquivarianceGap", "equivariance_gap"]

_ALL_ORDERS_UP_TO = 5  # tokens; beyond, swaps of two tokens, shifts, and random orders
_ROUNDS = 12


@dataclass(frozen=True, eq=False)
class EquivarianceGap:
    """A sequence at which a function breaks a symmetry, and what this costs every function that keeps it.

    Attributes:
        lower_bound: proved: every function with the symmetry is at least this far from f at `point` or at `point[order]`.
        point: Z, `(tokens, dim)`.
        order: π; token i of the other sequence is token π(i) of Z.
        output: the entry of f's output at which the two differ, flat.
        group: "permutations" or "shifts".
        acts_on_output: True where the outputs are one row per token, and are permuted with them (equivariance); False where the
            output does not belong to tokens (invariance).
    """

    lower_bound: float
    point: Array
    order: tuple[int, ...]
    output: int
    group: str
    acts_on_output: bool


def equivariance_gap(
    function: Any,
    domain: BoxLike,
    *,
    group: Literal["permutations", "shifts"] = "permutations",
    samples: int = 2000,
    seed: int = 0,
) -> EquivarianceGap:
    """A proved lower bound on the error of every permutation-equivariant (or shift-equivariant) function, layers included.

    If `g(ZΠ) = g(Z)Π`, then `max(|f − g|(Z), |f − g|(ZΠ)) ≥ ½|f(ZΠ) − f(Z)Π|_∞`. Points are searched, the best one is enclosed in
    intervals. A bound of 0 proves nothing.

    *Theorem*: `equivariance-gap`.

    Args:
        function: an expression, a Graph, or a torch function that can be traced.
        domain: a box of sequences, `(tokens, dim)`.
        group: "permutations" of the tokens, or "shifts", the cyclic ones.
        samples: points that are tried.
        seed: random seed.

    Raises:
        NothingKnownError: f is a black box.
        ShapeError: the domain is not a box of sequences of at least two tokens.
        DomainError: the tokens' boxes have no common point.

    >>> gap = equivariance_gap("x1; x1", Box([[-1], [-1]], [[1], [1]]))  # token 2, everywhere
    >>> round(gap.lower_bound, 6), gap.order
    (1.0, (1, 0))
    """
    domain = Box.of(domain)
    if not isinstance(domain, Box) or domain.lo.ndim != 2 or len(domain.lo) < 2:
        raise ShapeError(f"the domain is {domain!r}; expected a box of sequences (tokens, dim) of at least two tokens.")
    if group not in ("permutations", "shifts"):
        raise UnsupportedError(f"group is {group!r}; expected 'permutations' or 'shifts'.")
    target = make_target(function, domain)
    if target.graph is None:
        raise NothingKnownError(
            "equivariance_gap needs f as an expression, which is enclosed at the point that is found."
        )
    lo, hi = domain.lo.max(axis=0), domain.hi.min(axis=0)
    if not (lo <= hi).all():
        raise DomainError(
            "the boxes of the tokens have no common point, so no sequence can be permuted within the domain",
            "Nothing follows from the symmetry here: the boxes themselves tell the positions.",
        )
    rng = np.random.default_rng(seed)
    tokens, acts = len(domain.lo), len(target.output_shape) == 2 and target.output_shape[0] == len(domain.lo)
    orders = _orders(tokens, group, rng)
    points = _points((lo, hi), tokens, samples, rng)
    best = _search(target, points, orders, acts)
    for round_ in range(_ROUNDS):
        near = best[1] + rng.standard_normal((64, *best[1].shape)) * (hi - lo) * 0.5 ** (round_ + 1)
        best = max(best, _search(target, near.clip(lo, hi), best[2][None], acts), key=lambda found: found[0])
    _, point, order, output = best
    return EquivarianceGap(
        _proved(target.graph, point, order, output, acts), point, tuple(map(int, order)), output, group, acts
    )


def _orders(tokens: int, group: str, rng: np.random.Generator) -> NDArray[np.int64]:
    """Orders other than the identity, `(k, tokens)`."""
    shifts = (np.arange(tokens)[:, None] + np.arange(tokens))[1:] % tokens
    if group == "shifts":
        return shifts
    if tokens <= _ALL_ORDERS_UP_TO:
        return np.array(list(itertools.permutations(range(tokens)))[1:])
    pairs = list(itertools.combinations(range(tokens), 2))
    if len(pairs) > 64:
        pairs = [pairs[k] for k in rng.choice(len(pairs), 64, replace=False)]
    swaps = np.tile(np.arange(tokens), (len(pairs), 1))
    for row, (a, b) in zip(swaps, pairs):
        row[[a, b]] = b, a
    return np.concatenate([swaps, shifts[:16], np.array([rng.permutation(tokens) for _ in range(32)])])


def _points(ends: tuple[Array, Array], tokens: int, count: int, rng: np.random.Generator) -> Array:
    """Random sequences, a third of them with tokens at corners of their box."""
    lo, hi = ends
    inside = rng.random((max(count, 3), tokens, len(lo)))
    third = len(inside) // 3
    inside[:third] = np.round(inside[:third])
    return np.asarray((lo + inside * (hi - lo)).clip(lo, hi))


def _search(
    target: Target, points: Array, orders: NDArray[np.int64], acts: bool
) -> tuple[float, Array, NDArray[np.int64], int]:
    """The largest `|f(ZΠ) − f(Z)Π|` among these: its size, Z, π and the output."""
    here = target(points.reshape(len(points), -1))
    best: tuple[float, Array, NDArray[np.int64], int] | None = None
    for order in orders:
        there = target(points[:, order].reshape(len(points), -1))
        found = np.abs(there - here[:, _moved(order, here.shape[1], acts)])
        row, output = np.unravel_index(int(found.argmax()), found.shape)
        if best is None or found[row, output] > best[0]:
            best = float(found[row, output]), points[row], order, int(output)
    assert best is not None
    return best


def _moved(order: NDArray[np.int64], outputs: int, acts: bool) -> NDArray[np.int64]:
    """The columns of f(Z)Π among those of f(Z), flat and token-major."""
    if not acts:
        return np.arange(outputs)
    return np.arange(outputs).reshape(len(order), -1)[order].ravel()


def _proved(graph: Graph, point: Array, order: NDArray[np.int64], output: int, acts: bool) -> float:
    """`½|f(ZΠ) − f(Z)Π|`, rounded down, from enclosures of f at the two points."""
    here, there = point.reshape(1, -1), point[order].reshape(1, -1)
    count = math.prod(graph.output_shape)
    first = graph.enclose(there, there)[0, output]
    second = graph.enclose(here, here)[0, int(_moved(order, count, acts)[output])]
    return float((first - second).mignitude) / 2
