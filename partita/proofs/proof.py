"""A proof is one class with one entry: from a head's stored tensors, a function and what is given, to the terms of a bound.

Compiling, re-checking and bounding ranges all call the same objects; a certificate stores the name of the one it rests on.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol, TypeVar

from partita.arithmetic.environment import require_gradual_underflow
from partita.arithmetic.precision import PRECISIONS
from partita.arithmetic.progress import Progress
from partita.errors import UnsupportedError
from partita.functions.regularity import Known
from partita.functions.target import Target
from partita.geometry.domains import Array
from partita.heads.head import FoldedHead, Head
from partita.proofs.certificate import Term, total

__all__ = ["Given", "Progress", "Proof", "Proved", "tightest"]

_GOALS = (1.005, 1.03, 1.1, 1.3, 2.0, 8.0)  # times what was seen: what to aim a proof at


@dataclass(frozen=True, eq=False)
class Given:
    """What a proof may use besides the head and the function.

    Attributes:
        tolerance: what the bound should come below; proofs work harder to meet it. norm: math.inf, or p.
        known: moduli and jumps of f, where the proof needs them.
        value_error: a bound of `|V_j − f(v_j)|`; None to compute it from the expression.
        details: what an earlier proof stored in its certificate (`Proved.details` and `Certificate.known`).
        aim: what the approximation alone should come below, if an earlier proof reached it; otherwise the tolerance.
        earlier: what a search found already and need not be found again: the boxes of a bisection, a cover, the
            figures of a head made of pieces.
        sharpen: whether to look for a bound close to the truth once the tolerance is met.
        max_boxes: how many boxes polynomials may look at; None for as many as the proof takes by itself.
    """

    tolerance: float = math.inf
    norm: float = math.inf
    known: Known | None = None
    value_error: float | None = None
    details: Mapping[str, Any] = field(default_factory=dict)
    aim: float | None = None
    earlier: Any = None
    sharpen: bool = True
    max_boxes: int | None = None
    progress: Progress | None = None


@dataclass(frozen=True, eq=False)
class Proved:
    """The terms of a bound and what the certificate stores of the proof.

    `settled`: the approximation met what was aimed at, so that aiming higher would only loosen it.
    """

    terms: Sequence[Term]
    details: Mapping[str, Any] = field(default_factory=dict)
    settled: bool = True

    @property
    def bound(self) -> float:
        return total(self.terms)


class _Bounded(Protocol):
    @property
    def bound(self) -> float: ...
    @property
    def settled(self) -> bool: ...


Found = TypeVar("Found", bound=_Bounded)


def tightest(prove: Callable[[float], Found], seen: float, floor: float, *, enough: float = 0.0) -> Found:
    """The proof with the smallest bound: of goals from what was seen upwards, until one is met.

    Args:
        prove: a goal to a proof that works towards it.
        seen: an error that was observed. floor: what to aim at where none was.
        enough: a bound of so many times what was seen will do.
    """
    best: Found | None = None
    for factor in _GOALS:
        found = prove(factor * seen + floor)
        best = found if best is None or found.bound < best.bound else best
        if found.settled or best.bound <= enough * seen:
            break
    assert best is not None
    return best


class Proof(ABC):
    """One way to bound `‖f − net‖` on the domain for a head's tensors as they are run."""

    name: ClassVar[str]
    takes: ClassVar[type[Head]] = FoldedHead  # type: ignore[type-abstract]
    rests_on: ClassVar[str] = ""  # what of f it uses besides the expression: its "regularity" or its "curvature"
    moves_inputs: ClassVar[bool] = False  # whether it bounds by itself what rounded inputs do, without moduli of f
    # c with `Σ_j w_j |V_j − f| ≤ c · (its terms, less that of inputs)` in the norm of the claim; infinite where none is known
    mean_distance: ClassVar[float] = math.inf

    def mean_distance_in(self, details: Mapping[str, Any]) -> float:
        """`mean_distance` for a head whose proof has these details."""
        return self.mean_distance

    def prove(self, head: Head, target: Target, given: Given) -> Proved:
        """The terms of the bound.

        Raises:
            UnsupportedError: this proof does not apply to such a head or function, or subnormal numbers are flushed to zero here.
            DomainError: a number that the head stores or forms overflows its dtype, or is too small for relative precision.
        """
        if not isinstance(head, self.takes):
            raise UnsupportedError(
                f"the proof {self.name!r} was given a {type(head).__name__}; expected a {self.takes.__name__}."
            )
        require_gradual_underflow()
        box = target.box
        head.check_range(*PRECISIONS[str(head.dtype)].widened(box.lo.ravel(), box.hi.ravel()))
        return self._prove(head, target, given)

    @abstractmethod
    def _prove(self, head: Any, target: Target, given: Given) -> Proved:
        """The terms, for a head of the class that it takes, whose numbers are ordinary."""

    def handles(self, head: Head) -> bool:
        """Whether it bounds how far any such head is from a constant, whatever its values are."""
        return False

    def centers(self, head: Head, target: Target) -> Callable[[int, int], Array] | None:
        """(start, stop) to the points at which the stored values are those of f; None if this proof does not rely on them."""
        return None
