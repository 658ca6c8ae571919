"""Failures of a user's function: what it returned instead of numbers, at which point it raised, and points that are left out."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from partita.errors import (
    BudgetSpentError,
    CheckpointError,
    MutatedInputError,
    NotDeterministicError,
    NotSendableError,
    PartitaError,
    TargetFailedError,
    WorkersLostError,
)
from partita.functions.stand_ins import StandIns
from partita.geometry.domains import Array, Box

__all__ = [
    "DEFAULT_MAX_EXCLUDED",
    "PASSED_ON",
    "Excluding",
    "RowFailed",
    "argument_advice",
    "cause_advice",
    "cause_of",
    "failing_row",
    "form_advice",
    "numbers_in",
    "raised_at",
    "shown_point",
    "split_flat",
]

DEFAULT_MAX_EXCLUDED = 0.1  # of the domain
# what a request to f may raise that says nothing about f at a point
PASSED_ON = (
    BudgetSpentError,
    CheckpointError,
    MutatedInputError,
    NotDeterministicError,
    NotSendableError,
    WorkersLostError,
)
_FIRST = 200  # points, of which half may fail before work is stopped: fits ask more often where f behaves badly
_SHOWN = 8  # coordinates of a point in a message
_LEAVE_OUT = "Fix the function there, shrink the domain, or pass on_error='exclude' to leave such points out."

Shapes = tuple[tuple[int, ...], ...]


def split_flat(points: Array, shapes: Shapes) -> list[Array]:
    """Flat points `(n, m)` as one array `(n, *shape)` per argument."""
    cuts = np.cumsum([math.prod(s) for s in shapes])[:-1]
    return [part.reshape(len(points), *s) for part, s in zip(np.split(points, cuts, axis=1), shapes)]


def shown_point(point: Array, shapes: Shapes) -> str:
    """A flat point `(m,)` as the function receives it, in full up to eight coordinates: it can be copied into Python."""
    if len(point) > _SHOWN:
        return f"[{', '.join(repr(float(x)) for x in point[:_SHOWN])}, … ({len(point)} coordinates)]"
    return ", ".join(str(part[0].tolist()) for part in split_flat(point[None], shapes))


# --- what f returned -------------------------------------------------------------------------------------------------


def numbers_in(answer: Any, label: str) -> np.ndarray:
    """What a function returned as an array of float64; None inside a list becomes NaN.

    Raises:
        TargetFailedError: it is not made of real numbers. The message says what it is and what to return instead.
    """
    if isinstance(answer, torch.Tensor):
        if answer.is_complex():
            raise _complex(label, str(answer.dtype).removeprefix("torch."))
        return answer.detach().cpu().to(torch.float64).numpy()
    if answer is None:
        raise TargetFailedError(
            f"{label} returned None; expected real numbers", "Does it end without a return statement?"
        )
    if isinstance(answer, Mapping):
        keys = ", ".join(map(repr, list(answer)[:6]))
        name = next(iter(map(repr, answer)), "'name'")
        raise TargetFailedError(
            f"{label} returned a dict with the keys {keys}; expected real numbers",
            f"Return one of its values: lambda z: {_callable(label)}(z)[{name}].",
        )
    if isinstance(answer, (set, frozenset)) or hasattr(answer, "__next__"):
        raise TargetFailedError(
            f"{label} returned a {type(answer).__name__}; expected real numbers", "Return a list or an array."
        )
    try:
        array = np.asarray(answer)
    except (ValueError, TypeError, RuntimeError) as error:
        raise TargetFailedError(
            f"{label} returned a {type(answer).__name__} that is not an array of numbers ({error})",
            "Return an array with one row per point, all rows of the same length.",
        ) from None
    if array.dtype.kind == "c":
        raise _complex(label, str(array.dtype))
    if array.dtype.kind == "O":
        array = _from_objects(array, label)
    if array.dtype.kind not in "fiub":
        text = array.dtype.kind in "SU"
        first = array.ravel()[:1].tolist()
        what = f"text{f' ({first[0]!r})' if first else ''}" if text else f"{array.dtype} values"
        raise TargetFailedError(
            f"{label} returned {what}; expected real numbers",
            "Return numbers: float(…) reads them from text." if text else "Convert them to float first.",
        )
    return np.asarray(array, dtype=np.float64)


def _complex(label: str, dtype: str) -> TargetFailedError:
    return TargetFailedError(
        f"{label} returned {dtype} values; expected real numbers",
        "Return the real and imaginary parts, np.stack([v.real, v.imag], axis=1), or abs(v).",
    )


def _from_objects(array: np.ndarray, label: str) -> np.ndarray:
    """Objects that convert to float, such as Decimal; None becomes NaN."""
    out = np.full(array.shape, np.nan)
    for place, item in np.ndenumerate(array):
        if item is None:
            continue
        try:
            if isinstance(item, (str, bytes)):
                raise TypeError
            out[place] = float(item)
        except (TypeError, ValueError):
            raise TargetFailedError(
                f"{label} returned {array.dtype} values, among them {item!r:.60}; expected real numbers",
                "Return numbers, one row per point, all rows of the same length.",
            ) from None
    return out


# --- where f raised --------------------------------------------------------------------------------------------------


class RowFailed(Exception):
    """A function that is called once per point raised `error` at this row of a batch, the `point`.

    `before`: the answers up to there.
    """

    def __init__(self, row: int, error: Exception, before: Array) -> None:
        super().__init__(row)
        self.row, self.error, self.before, self.point = row, error, before, np.zeros(0)


def cause_of(error: Exception) -> Exception | None:
    """What the user's function raised, for a traceback; None if it only returned something wrong, which the message says."""
    raised = error.error if isinstance(error, RowFailed) else error
    return None if isinstance(raised, PartitaError) else raised


def failing_row(run: Callable[[Array], Any], points: Array, error: Exception) -> tuple[int | None, Exception]:
    """The row of a batch at which `run` raises, by halving, and what it raises there; None if it takes every row by itself.

    It needs ⌈log₂ n⌉ calls, and one more where the last row is left by elimination.

    Args:
        run: raises on the batch.
        points: the batch, `(n, m)`.
        error: what it raised.
    """
    if isinstance(error, RowFailed):
        return error.row, error.error
    low, high, seen = 0, len(points), True  # seen: this part of the batch was seen to fail
    while high - low > 1:
        middle = (low + high) // 2
        try:
            run(points[low:middle])
            low, seen = middle, False
        except PASSED_ON:
            raise
        except Exception as found:
            high, seen, error = middle, True, found
    if not seen:
        try:
            run(points[low:high])
            return None, error
        except PASSED_ON:
            raise
        except Exception as found:
            error = found
    return low, error


def raised_at(label: str, point: Array, shapes: Shapes, error: Exception) -> TargetFailedError:
    """The error that names the point at which f raised."""
    if isinstance(error, TargetFailedError):  # f returned something that is not a number
        return TargetFailedError(f"{error.reason}, at the point {shown_point(point, shapes)}", error.hint or _LEAVE_OUT)
    return TargetFailedError(
        f"{label} raised {type(error).__name__} at the point {shown_point(point, shapes)}{_said(error)}", _LEAVE_OUT
    )


def _said(error: Exception) -> str:
    text = " ".join(str(error).split()).rstrip(".")
    return f": {text}" if text else ""


# --- how f wants to be called ----------------------------------------------------------------------------------------


def _callable(label: str) -> str:
    return label if label.isidentifier() else "f"


def argument_advice(function: Callable[..., Any], shapes: Shapes, label: str) -> tuple[str, str] | None:
    """What to say about a function that takes another number of arguments than it is given: reason and hint; None if it fits."""
    names = _required(function)
    if names is None or len(names) == len(shapes):
        return None
    listed = f" ({', '.join(names)})" if names else ""
    takes = f"{label} takes {len(names)} argument{'s' * (len(names) != 1)}{listed}"
    if len(shapes) == 2:
        return (
            f"{takes}; for a pair of boxes it is called with two, z_K and z_Q",
            "Give it two arguments, or give one box.",
        )
    size = math.prod(shapes[0])
    given = f"one array of shape (n, {', '.join(map(str, shapes[0]))}), {size} coordinate{'s' * (size != 1)} per point"
    return f"{takes}; for one box it is called with {given}", "Write it as a function of one array: def f(z)."


def _required(function: Callable[..., Any]) -> list[str] | None:
    """The names of the arguments without a default, if Python knows them."""
    if isinstance(function, np.ufunc):
        return [f"x{i}" for i in range(function.nin)]
    try:
        found = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return None
    if any(p.kind is p.VAR_POSITIONAL for p in found):
        return None
    positional = [p for p in found if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    needed = [p.name for p in positional if p.default is p.empty]
    return needed if needed or not positional else [positional[0].name]  # all have defaults: one is enough


def form_advice(function: Callable[..., Any], shapes: Shapes, label: str, points: Array, *, one_by_one: bool) -> str:
    """How a function that failed on a batch can be used, found by trying: a hint, or "" if no other way works either."""
    name, size = _callable(label), points.shape[1]
    flat = len(shapes) == 1 and len(shapes[0]) == 1
    first = [part[0] for part in split_flat(points[:1], shapes)]
    columns = ", ".join(f"z[:, {i}]" for i in range(size)) if size <= 4 else "*z.T"
    numbers = "z[0]" if size == 1 else "*z"
    if one_by_one and _works(lambda: function(*split_flat(points, shapes)), len(points)):
        return "It takes a batch: leave vectorize=True out."
    if not one_by_one and _works(lambda: function(*first)):
        return "It does take a single point: pass vectorize=True, or write it for a batch."
    if flat and not one_by_one and _works(lambda: function(*points.T), len(points)):
        return f"It takes one array per coordinate: pass lambda z: {name}({columns})."
    if flat and _works(lambda: function(*(float(x) for x in points[0]))):
        single = f"lambda z: {name}({numbers})"
        if one_by_one:
            return f"It takes {'a number' if size == 1 else f'{size} numbers'}: pass {single}."
        batch = "z[:, 0]" if size == 1 else columns
        return (
            f"It takes {'one number' if size == 1 else f'{size} numbers'} at a time: pass {single} with vectorize=True; or write "
            f"it for a batch with numpy (np.sin in place of math.sin, np.where in place of if) and use {batch}."
        )
    return ""


def cause_advice(errors: Sequence[Exception], label: str, *, alone: bool) -> str:
    """What usually causes such errors on a batch: a hint, or "".

    Args:
        alone: the function takes batches of one point.
    """
    said = " ".join(str(e) for e in errors)
    if "ambiguous" in said:
        return "A batch has no single truth value: write np.where(condition, a, b) in place of if."
    if "Python scalar" in said or "must be real number" in said:
        return "math functions and float() take one number: write np.sin(z[:, 0]) in place of math.sin(z)."
    return (
        f"It takes one row at a time: pass lambda z: {_callable(label)}(z[None])[0] with vectorize=True."
        if alone
        else ""
    )


def _works(call: Callable[[], Any], rows: int | None = None) -> bool:
    """Whether the call returns finite numbers: with that many rows, or of any shape."""
    try:
        answer = numbers_in(call(), "")
    except Exception:
        return False
    return bool(np.isfinite(answer).all()) and answer.size > 0 and (rows is None or answer.shape[:1] == (rows,))


# --- points that are left out ----------------------------------------------------------------------------------------


class Answers(Protocol):
    """Calls a function on a batch, and keeps its answers."""

    def __call__(self, points: Array) -> Array:
        """Values `(n, out)` at points `(n, m)`; what the function raises is passed on."""

    def is_known(self, points: Array) -> NDArray[np.bool_]:
        """Which of the points were asked for before."""

    def answered(self) -> tuple[Array, Array]:
        """All points that were asked for, and the answers."""


class Excluding:
    """A function that may fail at some points: they are recorded, and a value from other answers stands in for them.

    A point fails if f raises there, or returns NaN, infinity or None. It is not asked again. Some searches need a number on every
    node of a grid: `StandIns` has one. It is never compared with a finished head: `failed` says which points to leave out.

    Args:
        ask: f on a batch.
        label: the name of f. shapes: of its arguments. box: around the domain.
        most: the largest share of the domain where f may fail.

    Attributes:
        asked: points that f was asked for.
    """

    def __init__(self, ask: Answers, label: str, shapes: Shapes, box: Box, most: float) -> None:
        self.ask, self.label, self.shapes, self.most = ask, label, shapes, most
        self.asked = self._width = 0
        self._lo, self._sides = box.lo.ravel(), box.sides
        self._failed: dict[bytes, Array] = {}
        self._first = ""
        self._stand_ins = StandIns()

    @property
    def excluded(self) -> int:
        """How many of the points failed."""
        return len(self._failed)

    @property
    def points(self) -> Array:
        """The points at which f failed, `(k, m)`."""
        return np.array(list(self._failed.values())).reshape(-1, len(self._lo))

    @property
    def statement(self) -> str:
        """How many points are left out, as a sentence without its end."""
        share = self.excluded / max(self.asked, 1)
        return f"f failed at {self.excluded:,} of the {self.asked:,} points evaluated ({100 * share:.2g} %)"

    def failed(self, points: Array) -> NDArray[np.bool_]:
        """At which of these points f is known to have failed, `(n,)`."""
        rows = np.ascontiguousarray(points, dtype=np.float64)
        return np.array([bool(self._failed) and row.tobytes() in self._failed for row in rows], dtype=bool)

    def answered(self) -> tuple[Array, Array]:
        """All points `(n, m)` at which f has a value, as far as it was asked, and the values `(n, out)`."""
        points, values = self.ask.answered()
        good = np.isfinite(values).all(axis=1)
        return points[good], values[good]

    def __call__(self, points: Array) -> Array:
        """Values `(n, out)`, with a stand-in where f failed.

        Raises:
            TargetFailedError: f failed at too many points.
        """
        values, bad = self.answers(points)
        if bad.any():
            values[bad] = self._stand_ins.at(self._scaled(points[bad]))
        return values

    def _scaled(self, points: Array) -> Array:
        """Points of the box carried to [−1, 1]^m."""
        out: Array = 2 * (points - self._lo) / self._sides - 1
        return out

    def answers(self, points: Array) -> tuple[Array, NDArray[np.bool_]]:
        """Values `(n, out)`, NaN where f failed, and where that is."""
        points = np.ascontiguousarray(points, dtype=np.float64)
        new = ~(self.failed(points) | self.ask.is_known(points))
        self.asked += len({row.tobytes() for row in points[new]})
        self._settle(points[new])
        bad = self.failed(points)
        values = np.full((len(points), self._width), np.nan)
        if not bad.all():
            found = self.ask(points[~bad])
            self._width = found.shape[1]
            values = np.full((len(points), self._width), np.nan)
            values[~bad] = found
        if not self._width:
            raise self.too_many(f"every one of a batch of {len(points):,} points")
        for i in np.flatnonzero(~bad & ~np.isfinite(values).all(axis=1)):
            self._note(points[i], None)
            values[i], bad[i] = np.nan, True
        self._stand_ins.learn(self._scaled(points[new & ~bad]), values[new & ~bad])
        return values, bad

    def require_few(self, failed: int, points: int) -> None:
        """A TargetFailedError if f failed at more of these random points than are allowed, and three standard deviations more.

        Args:
            failed: how many of them failed.
            points: how many there were.
        """
        if failed > self.most * points + 3 * math.sqrt(points * self.most * (1 - self.most)):
            raise self.too_many(f"{failed:,} of {points:,} points drawn at random")

    def too_many(self, found: str) -> TargetFailedError:
        """The error that says that f failed too often.

        Args:
            found: at which points.
        """
        return TargetFailedError(
            f"{self.label} failed at {found}, more than max_excluded={self.most:g} allows; the first failure was {self._first}",
            "Restrict the domain to where the function has values (pa.Region), fix the function, or raise max_excluded.",
        )

    def _settle(self, points: Array, *, fails: bool = False) -> bool:
        """Ask f until each point has an answer or has failed, and say whether any failed. A batch that failed is halved.

        Args:
            fails: the batch must fail, because it is what is left of one that did. A single point is asked all the same.
        """
        found = False
        while len(points) and (not fails or len(points) == 1):
            try:
                self.ask(points)
                return found
            except RowFailed as stopped:  # what came before it has answers now
                self._note(stopped.point, stopped.error)
            except Exception as error:
                if isinstance(error, PartitaError) and not isinstance(error, TargetFailedError):
                    raise
                if len(points) > 1:
                    break
                self._note(points[0], error)
            found = True
            points = points[~self.failed(points)]
        if not len(points):
            return found
        half = len(points) // 2
        first = self._settle(points[:half])
        self._settle(points[half:], fails=not first)
        return True

    def _note(self, point: Array, error: Exception | None) -> None:
        self._failed[point.tobytes()] = point.copy()
        if not self._first:
            place = shown_point(point, self.shapes)
            raised = "NaN or infinity" if error is None else f"{type(error).__name__}{_said(error)}"
            self._first = f"{raised} at {place}"
        if self.excluded > max(self.most, 0.5) * max(self.asked, _FIRST):
            raise self.too_many(f"{self.excluded:,} of {self.asked:,} points")
