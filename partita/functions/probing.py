"""Calls a user's function: finds out which arrays it takes, and checks that its values can be relied on."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import nn

from partita.arithmetic.progress import Progress, report
from partita.errors import (
    BudgetSpentError,
    EvaluationsSpentError,
    NonFiniteValueError,
    NotDeterministicError,
    NotVectorizedError,
    PartitaError,
    ShapeError,
    TargetFailedError,
)
from partita.functions.asking import Answer, Call, OneByOne, RecalledAnswers, whole_batch
from partita.functions.failures import (
    PASSED_ON,
    Excluding,
    RowFailed,
    argument_advice,
    cause_advice,
    cause_of,
    failing_row,
    form_advice,
    raised_at,
    shown_point,
    split_flat,
)
from partita.functions.regions import Domain
from partita.functions.repeats import REMEDY, Repeats
from partita.geometry.domains import Array, Box
from partita.workers import crew

__all__ = ["Asker", "Calls", "probe", "probe_points", "require_finite", "split_flat"]

_PROBES = 11
_MORE = 3  # calls that tell how noisy a function is
_KEPT = 1 << 18  # answers
_AT_ONCE = 0.25  # seconds in f between two reports of progress
_ROUNDS_OF_TASKS = 16  # as long is a batch for workers: at its end they wait for each other
_TEST = 128  # evaluations that a test takes unless more are granted
_FIRST_LOOK = 64  # points of a first look at how often f fails


def require_finite(values: Array, points: Array, label: str) -> None:
    """A NonFiniteValueError that says where, if any value is not finite."""
    bad = np.flatnonzero(~np.isfinite(values).all(axis=1))
    if bad.size:
        shown = "; ".join(shown_point(points[i], (points.shape[1:],)) for i in bad[:3])
        raise NonFiniteValueError(
            f"{label} is NaN or infinite at {bad.size:,} of {len(points):,} points, the first at {shown}; "
            "expected finite values on the whole domain. Shrink the domain, fix the function there, or, if it is not an "
            "expression, pass on_error='exclude' to leave such points out."
        )


@dataclass(eq=False)
class Calls:
    """How often the user's function was evaluated, and how often it may be.

    Attributes:
        rows: points that the function received, those of failed calls included.
        most: the largest number that the caller grants; infinite if nothing was said.
        reserved: of these, kept for the final check of the head.
        progress: called after every batch. seconds: spent in the function.
    """

    rows: int = 0
    most: float = math.inf
    reserved: int = 0
    progress: Progress | None = None
    seconds: float = 0.0

    @property
    def left(self) -> float:
        """Points that the function may still receive."""
        return max(self.most - self.reserved - self.rows, 0)

    def allowance(self, wanted: int) -> int:
        """How many points a test may use: a few, or up to `wanted` and a quarter of what is left if the caller set a limit."""
        return min(wanted, _TEST if math.isinf(self.most) else int(self.left // 4))

    def take(self, count: int) -> None:
        """Count points that the function is about to receive.

        Raises:
            EvaluationsSpentError: they are more than are left.
        """
        if count > self.left:
            raise EvaluationsSpentError(
                f"f was evaluated {self.rows:,} times, and {count:,} more would exceed max_evaluations={self.most:.0f}"
            )
        self.rows += count


class Asker:
    """Calls the user's function with arrays of one kind and returns `(n, out)` float64. Every answer is kept.

    What the function raises becomes a TargetFailedError that names the point, or is passed on if `passes_on` is set. A function is
    `divisible` if its values are the same bits whatever else is in the batch.
    """

    def __init__(
        self, function: Callable[..., Any], shapes: tuple[tuple[int, ...], ...], kind: str, label: str, calls: Calls
    ) -> None:
        self.function, self.shapes, self.kind, self.label, self.one_by_one = function, shapes, kind, label, False
        self.calls, self.passes_on, self.divisible = calls, False, False
        self.output_shape: tuple[int, ...] = ()
        self._answers: dict[bytes, Array] = {}
        self._call = Call(function, shapes, kind, label)
        self._recalled: RecalledAnswers | None = None
        self._received = 0  # points, in this process or on workers

    def raw(self, points: Array, batch: int | None = None) -> np.ndarray:
        """The function's answer as an array whose first axis is the batch; its input must stay unchanged.

        Args:
            points: `(n, m)`.
            batch: how many of them go into one call, if the function is not divisible.
        """
        self.calls.take(len(points))
        batch = None if self._is_free else batch or whole_batch(len(points))
        recalled = self._from_checkpoint()
        if recalled is None:
            return self._asked(points, None, batch)
        known, values, seconds = recalled.take(self.kind, points, batch)
        self.calls.seconds += seconds
        if not known.all():
            self._doubt(recalled)
        try:
            fresh = self._asked(points[~known], recalled, batch) if not known.all() else np.stack(values)[:0]
        except RowFailed as stopped:  # of the rows that were not known
            row = int(np.flatnonzero(~known)[stopped.row])
            before = self._merged(known[:row], values[: int(known[:row].sum())], stopped.before)
            raise RowFailed(row, stopped.error, before) from stopped.error
        return self._merged(known, values, fresh)

    def look_again(self) -> None:
        """Ask f again at its first points, now that all workers have something to do: noise may show only then.

        These calls do not count: there are none without an executor, which changes nothing else.

        Raises:
            NotDeterministicError: another answer.
        """
        if crew().door is None or not self._received:
            return
        points, values = (part[: int(min(_PROBES, self.calls.most - self.calls.rows))] for part in self.answered())
        if len(points):
            where = " (first, and again at the end; perhaps on another worker)"
            hint = "Workers must not differ in files, settings, versions or random seeds that f uses."
            self._compare(points, values, where, f"{hint} If f is noisy by itself: {REMEDY}")

    def _doubt(self, recalled: RecalledAnswers) -> None:
        """Before f is asked anything new: whether it still returns what the checkpoint holds.

        These few calls do not count; f received fewer points than are counted, as the checkpoint answered for it.
        """
        if recalled.doubted or recalled.sample is None:
            return
        recalled.doubted = True
        points, values = recalled.sample
        where = f" (the first from the checkpoint {recalled.checkpoint.folder}, the second now)"
        hint = (
            "If f, or a file or a service that it uses, has changed: delete that folder, or give f another checkpoint_key. "
            f"If f is noisy: {REMEDY}"
        )
        self._compare(points, values.reshape(len(points), -1), where, hint)

    def _compare(self, points: Array, values: Array, where: str, hint: str) -> None:
        """Refuse a function that returns other values `(n, out)` now."""
        progress, self.calls.progress = self.calls.progress, None  # a budget that is spent does not stop this
        try:
            again = self._asked(points, None, None if self._is_free else len(points)).reshape(len(points), -1)
        except PASSED_ON:
            raise
        except Exception as error:
            raised = f"{type(error).__name__}: {error}"
            at = shown_point(points[0], self.shapes)
            raise NotDeterministicError(
                f"{self.label} had values at {at} and {len(points) - 1} more points{where}, "
                f"and raised when it was asked again ({raised})",
                hint,
            ) from cause_of(error)
        finally:
            self.calls.progress = progress
        found = self.repeats(points, [values, again])
        if not (found.agree if self._is_free else _same_row(values, again)):
            raise found.error(where, hint)

    def repeats(self, points: Array, answers: Sequence[Array]) -> Repeats:
        """Several answers `(n, out)` of this function at the same points."""
        precision = np.float32 if self.kind == "torch float32" else np.float64
        return Repeats(self.label, self.function, points, answers, precision)

    @property
    def _is_free(self) -> bool:
        """Whether the function may be called with any part of the points that are asked for."""
        return self.divisible or self._call.is_one_by_one

    def _merged(self, known: NDArray[np.bool_], values: list[np.ndarray], fresh: np.ndarray) -> np.ndarray:
        """Answers in the order of the points: those that were known, and the others."""
        if not values:
            return fresh
        merged = np.empty((len(known), *values[0].shape))
        merged[known] = values
        merged[~known] = fresh.reshape(-1, *values[0].shape)
        return merged

    def _asked(self, points: Array, recalled: RecalledAnswers | None, batch: int | None) -> np.ndarray:
        """What the function answers now, here or on the workers; every answer goes to the checkpoint as it comes."""
        speed = self.calls.rows / self.calls.seconds if self.calls.seconds else 0.0
        parts: list[np.ndarray] = []
        failed: tuple[int, Answer] | None = None
        waiting = len(points)

        def keep(part: slice, answer: Answer) -> None:
            values = answer.before if answer.values is None else answer.values
            if recalled is not None and values is not None and 0 < len(values) <= part.stop - part.start:
                recalled.keep(self.kind, points[part][: len(values)], values, answer.seconds)

        for part, answer in self._call.answers(
            points, crew(), speed, batch=batch, arrived=keep, progress=self._progress
        ):
            waiting -= part.stop - part.start
            self._received += answer.rows
            self.calls.seconds += answer.seconds
            self.calls.rows += answer.rows - (part.stop - part.start)  # tried again, or never received
            if answer.values is None:
                failed = failed or (part.start, answer)
                if not self.passes_on:
                    break
            elif failed is not None:  # not lost, though an earlier point failed
                self.remember(points[part], answer.values.reshape(len(answer.values), -1))
            else:
                parts.append(answer.values)
        self.calls.rows -= waiting
        if failed is None:
            return np.concatenate(parts) if len(parts) > 1 else parts[0]
        start, answer = failed
        if answer.error is None or answer.row is None or answer.before is None or not start:
            return answer.require()
        before = np.concatenate([part.reshape(len(part), -1) for part in (*parts, answer.before) if len(part)])
        raise RowFailed(start + answer.row, answer.error, before) from answer.error

    def _from_checkpoint(self) -> RecalledAnswers | None:
        """The answers that the checkpoint in charge holds."""
        checkpoint = crew().checkpoint
        if checkpoint is None:
            return None
        if self._recalled is None or self._recalled.checkpoint is not checkpoint:
            self._recalled = RecalledAnswers(checkpoint, self.function, self.label)
        return self._recalled

    def _progress(self, what: str, done: int, of: int) -> None:
        report(self.calls.progress, f"{self.calls.rows - of + done:,} evaluations of f" if of else what)

    def is_known(self, points: Array) -> NDArray[np.bool_]:
        """Which of these points the function was asked for before, `(n,)`."""
        return np.array([row.tobytes() in self._answers for row in points], dtype=bool)

    def __call__(self, points: Array) -> Array:
        """Values `(n, out)` at flat points `(n, m)`: those that were asked for before come from memory."""
        points = np.ascontiguousarray(points, dtype=np.float64)
        keys = [row.tobytes() for row in points]
        new = {k: i for i, k in enumerate(keys) if k not in self._answers}
        if len(new) == len(points):
            answers = self._in_batches(points)
        elif new:
            asked = dict(zip(new, self._in_batches(points[list(new.values())])))
            answers = np.stack([asked[k] if k in asked else self._answers[k] for k in keys])
        else:
            answers = np.stack([self._answers[k] for k in keys])
        return answers

    def remember(self, points: Array, answers: Array) -> None:
        """Keep values `(n, out)` of f at points `(n, m)`."""
        if len(self._answers) < _KEPT:
            self._answers |= {row.tobytes(): answer for row, answer in zip(points, answers)}

    def answered(self) -> tuple[Array, Array]:
        """All points `(n, m)` that are remembered, and their values `(n, out)`."""
        points = [np.frombuffer(k) for k in self._answers]
        return np.stack(points), np.stack(list(self._answers.values()))

    def _in_batches(self, points: Array) -> Array:
        """f at all points; if f is slow, in batches of a fraction of a second, so that progress is seen and budgets are kept."""
        speed = self.calls.rows / max(self.calls.seconds, 1e-9)
        step = max(1, int(_AT_ONCE * speed)) * (1 if crew().door is None else _ROUNDS_OF_TASKS * crew().width)
        batch = None if self._is_free else whole_batch(len(points))
        if batch is not None:
            step = -(-step // batch) * batch
        parts = []
        for start in range(0, len(points), step):
            some = points[start : start + step]
            parts.append(self.fresh(some, batch))
            self.remember(some, parts[-1])
            report(self.calls.progress, f"{self.calls.rows:,} evaluations of f")
        return np.concatenate(parts) if len(parts) > 1 else parts[0]

    def fresh(self, points: Array, batch: int | None = None) -> Array:
        """f at the points, whether it was evaluated there before or not; the arguments are those of `raw`."""
        try:
            answer = self.raw(points, batch)
        except PASSED_ON:
            raise
        except Exception as error:
            if isinstance(error, RowFailed):
                error.point = points[error.row]
                self.remember(points[: error.row], error.before)
            if self.passes_on:
                raise
            raise self._failure(points, error) from cause_of(error)
        if answer.shape[:1] != (len(points),):
            raise NotVectorizedError(f"{self.label} returned shape {answer.shape} for a batch of {len(points)} points.")
        self.output_shape = answer.shape[1:]
        return answer.reshape(len(points), -1)

    def _failure(self, points: Array, error: Exception) -> TargetFailedError:
        """The error that says where in a batch the function failed."""
        raised = f"{self.label} raised {type(error).__name__} on a batch of {len(points)} points"
        try:
            row, error = failing_row(self.raw, points, error)
        except BudgetSpentError:
            return TargetFailedError(
                f"{raised}, and max_evaluations is used up, so the point cannot be located: {error}"
            )
        if row is not None:
            return raised_at(self.label, points[row], self.shapes, error)
        return TargetFailedError(
            f"{raised}, but works for each point separately: {error}",
            "Pass vectorize=True to call it once per point.",
        )


def probe_points(domains: tuple[Domain, ...]) -> Array:
    """The first points at which a function is evaluated, `(n, m)`: its values there identify it."""
    rng = np.random.default_rng(0)
    return np.column_stack([d.sample(_PROBES, rng) for d in domains])


def probe(
    function: Callable[..., Any],
    domains: tuple[Domain, ...],
    label: str,
    calls: Calls,
    *,
    vectorize: bool,
    max_excluded: float | None = None,
) -> tuple[Asker, tuple[int, ...], Excluding | None]:
    """A way to call the function, checked on a few points, the shape of its values, and which points are left out, if any may be.

    Args:
        max_excluded: the share of the points at which the function may fail; None if it may fail nowhere.
    """
    shapes = tuple(d.shape for d in domains)
    points = probe_points(domains)
    given = _Given(function, shapes, label, points, vectorize, calls)
    excluding = None
    if max_excluded is None:
        asker, answer = _choose_kind(given)
    else:
        rng = np.random.default_rng(3)
        more = np.column_stack([d.sample(_FIRST_LOOK, rng) for d in domains])
        ends = [(d if isinstance(d, Box) else d.bounding_box()) for d in domains]
        box = Box(np.concatenate([e.lo.ravel() for e in ends]), np.concatenate([e.hi.ravel() for e in ends]))
        asker, excluding = _choose_kind_excluding(given, box, max_excluded)
        points = np.concatenate([points, more])
        values, bad = excluding.answers(points)
        excluding.require_few(int(bad.sum()), len(points))
        points, values = points[~bad][:_PROBES], values[~bad][:_PROBES]
        answer = values.reshape(-1, *asker.output_shape)
        if len(points) < _PROBES:
            raise excluding.too_many(f"{int(bad.sum())} of the first {len(bad)} points")
    if answer.shape[:1] != (len(points),):
        raise NotVectorizedError(
            f"{label} returned shape {answer.shape} for a batch of {_PROBES} points of shape {shapes}; expected ({_PROBES}, …): "
            f"one value per row. {_rows_advice(answer)}"
        )
    if answer.ndim > 3 or answer.size == 0:
        raise ShapeError(
            f"{label} returns values of shape {answer.shape[1:]}; expected a scalar, a vector or (tokens, dim)."
        )
    asker.one_by_one, asker.passes_on = vectorize, False
    asker.divisible = _check_repeatable(asker, points, answer.reshape(len(points), -1))
    asker.passes_on = excluding is not None
    return asker, answer.shape[1:], excluding


def _rows_advice(answer: np.ndarray) -> str:
    if answer.ndim == 2 and answer.shape[1] == _PROBES:
        return "Its outputs are rows: make them columns, np.stack([…, …], axis=1)."
    return "For a function of a single point pass vectorize=True."


@dataclass(frozen=True)
class _Given:
    """The function as it was given, and the points to try it on."""

    function: Callable[..., Any]
    shapes: tuple[tuple[int, ...], ...]
    label: str
    points: Array
    one_by_one: bool
    calls: Calls

    def askers(self) -> Iterator[Asker]:
        """One for each kind of array: numpy, torch, and torch in float32 for modules with such weights."""
        call = OneByOne(self.function, self.label) if self.one_by_one else self.function
        for kind in ("numpy", "torch", "torch float32"):
            if kind != "numpy" or not isinstance(self.function, nn.Module):
                yield Asker(call, self.shapes, kind, self.label, self.calls)


def _choose_kind(given: _Given) -> tuple[Asker, np.ndarray]:
    """Numpy arrays if the function takes them, else torch tensors; refused when it takes both and they disagree."""
    label, points = given.label, given.points
    answers: dict[str, tuple[Asker, np.ndarray]] = {}
    failures: list[tuple[Asker, Exception]] = []
    for asker in given.askers():
        if asker.kind == "torch float32" and answers:
            continue
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                answers[asker.kind] = (asker, asker.raw(points))
        except PASSED_ON:
            raise
        except Exception as error:
            failures.append((asker, error))
            if isinstance(error, RowFailed) and error.row:
                break  # it takes such arrays, and fails at a point
    if not answers:
        raise _unusable(given, failures) from cause_of(failures[0][1])
    if len(answers) == 2:
        (asker, first), (_, second) = answers["numpy"], answers["torch"]
        fits = [a.shape[:1] == (len(points),) for a in (first, second)]
        if fits != [True, True]:  # z.max(1) means something else in torch: use the kind that keeps the batch
            return answers["torch"] if fits[1] else answers["numpy"]
        scale = 1e-9 * np.abs(first[np.isfinite(first)]).max(initial=0)
        same = first.shape == second.shape and np.allclose(first, second, rtol=1e-6, atol=scale, equal_nan=True)
        if not same and np.array_equal(
            first, asker.raw(points), equal_nan=True
        ):  # else it is random, which another check reports
            raise TargetFailedError(
                f"{label} returns different values for numpy arrays and torch tensors; convert its input first: "
                "z = np.asarray(z), or z = torch.as_tensor(z)."
            )
    return next(iter(answers.values()))


def _choose_kind_excluding(given: _Given, box: Box, most: float) -> tuple[Asker, Excluding]:
    """The first kind of arrays with which the function has a value at any of the points."""
    failures: list[tuple[Asker, Exception]] = []
    for asker in given.askers():
        asker.passes_on = True
        excluding = Excluding(asker, given.label, given.shapes, box, most)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                excluding.answers(given.points)
            return asker, excluding
        except PASSED_ON:
            raise
        except Exception as error:
            failures.append((asker, error))
    raise _unusable(given, [(asker, _plain_failure(asker, given.points, error)) for asker, error in failures])


def _plain_failure(asker: Asker, points: Array, otherwise: Exception) -> Exception:
    """What the function raises on the batch."""
    try:
        asker.raw(points)
        return otherwise
    except PASSED_ON:
        raise
    except Exception as error:
        return error


_OF_THE_KIND = (TypeError, AttributeError)  # what a function raises that takes the other kind of arrays


def _unusable(given: _Given, failures: list[tuple[Asker, Exception]]) -> PartitaError:
    """Why a function cannot be used: the point at which it fails, or how it would have to be called."""
    label, shapes, points = given.label, given.shapes, given.points
    said, alone = argument_advice(given.function, shapes, label), False
    for asker, error in sorted(failures, key=lambda f: isinstance(f[1], _OF_THE_KIND)) if said is None else ():
        if isinstance(error, TargetFailedError):
            return error  # it returned something that is not a number
        row, found = failing_row(asker.raw, points, error)
        alone = alone or row is None
        if row is not None and (row > 0 or _succeeds(asker, points[1:2])):
            return raised_at(label, points[row], shapes, found)
    causes = [(a.kind, e.error if isinstance(e, RowFailed) else e) for a, e in failures]
    for _, cause in causes:
        if isinstance(cause, TargetFailedError):
            return cause  # at every point
    hint = form_advice(given.function, shapes, label, points, one_by_one=given.one_by_one)
    if said is not None:
        return TargetFailedError(said[0], hint or said[1])
    shown = causes if isinstance(given.function, nn.Module) else causes[:2]
    if len({type(e) for _, e in shown}) == 1 and not isinstance(given.function, nn.Module):
        shown = shown[:1]
    reasons = [f"{type(e).__name__}: {e}" if str(e) else type(e).__name__ for _, e in shown]
    if len(reasons) > 1:
        reasons = [f"with {kind} arrays: {reason}" for (kind, _), reason in zip(shown, reasons)]
    called = f"{len(points)} points, one by one" if given.one_by_one else f"a batch of {len(points)} points"
    arrays = " and ".join(str((*(() if given.one_by_one else (len(points),)), *s)) for s in shapes)
    message = f"{label} raised on {called} (shape {arrays}): {'; '.join(reasons)}".rstrip(".")
    hint = hint or cause_advice([e for _, e in causes], label, alone=alone)
    return NotVectorizedError(message, hint) if hint else TargetFailedError(f"{message}.")


def _succeeds(asker: Asker, point: Array) -> bool:
    try:
        return asker.raw(point).shape[:1] == (1,)
    except PASSED_ON:
        raise
    except Exception:
        return False


def _same_row(alone: Array, in_batch: Array) -> bool:
    """Whether values `(n, out)` are those of the same points, but for what other points in the batch may do to rounding."""
    return np.allclose(alone, in_batch, rtol=1e-6, atol=1e-6 * np.abs(in_batch).max())


def _check_repeatable(ask: Asker, points: Array, answer: Array) -> bool:
    """Refuse a function whose values vary; whether they are the same bits in smaller batches."""
    found = ask.repeats(points, [answer, ask.fresh(points)])
    for values in found.answers:
        require_finite(values, points, ask.label)
    if not found.agree:
        more = _MORE if not found.differ_in_last_digits and ask.calls.left >= _MORE * len(points) else 0
        raise ask.repeats(points, [*found.answers, *(ask.fresh(points) for _ in range(more))]).error()
    single = np.concatenate([ask.fresh(points[i : i + 1]) for i in (0, 7)] + [ask.fresh(points[3:6])])
    batch = answer[[0, 7, 3, 4, 5]]
    if not _same_row(single, batch):
        i = int(np.abs(single - batch).max(axis=1).argmax())
        raise NotVectorizedError(
            f"{ask.label} gives {batch[i].tolist()} inside a batch of {_PROBES} and {single[i].tolist()} on "
            f"its own, at the same point; "
            "rows must not depend on each other (use dim=1, not dim=None, in reductions), or pass vectorize=True."
        )
    ask.remember(points, answer)
    return np.array_equal(single, batch)
