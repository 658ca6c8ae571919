"""One request to the user's function: here or on the workers, tried again where it raised, or recalled from a checkpoint."""

from __future__ import annotations

import builtins
import os
import socket
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from partita import errors
from partita.arithmetic.progress import Progress
from partita.errors import CheckpointError, MutatedInputError, PartitaError, ShapeError
from partita.functions.failures import RowFailed, numbers_in, split_flat
from partita.geometry.domains import Array
from partita.workers import Checkpoint, Crew, Uncertain, content_of, keyed

__all__ = ["Call", "OneByOne", "RecalledAnswers", "whole_batch"]

_TASK = 0.2  # seconds that one task should take: long against its way to a worker, short against a request
_BATCHES, _FEWEST = (
    64,
    16,
)  # batches of a request to a function that cannot be divided freely, and the fewest points in one
_SAMPLED = 3  # answers of a checkpoint that are compared with what f returns now
_PAUSE, _LONGEST_PAUSE = 0.05, 5.0  # seconds before f is tried again, twice as many each time


@dataclass(frozen=True, eq=False)
class Answer:
    """What came of one call of f: `values`, the batch first, or what it raised at `row` after the answers `before`.

    `rows`: points that f received, those of failed tries included. `seconds`: spent in f. `raised`: the error, on its way from a
    worker.
    """

    values: np.ndarray | None
    rows: int
    seconds: float
    error: Exception | None = None
    row: int | None = None
    before: np.ndarray | None = None
    raised: _Raised | None = None

    def require(self) -> np.ndarray:
        """The values; what f raised is raised here."""
        if self.values is not None:
            return self.values
        assert self.error is not None
        if self.row is not None and self.before is not None:
            raise RowFailed(self.row, self.error, self.before) from self.error
        raise self.error


@dataclass(frozen=True, eq=False)
class OneByOne:
    """A function of single points as a function of a batch."""

    function: Callable[..., Any]
    label: str

    def __call__(self, *inputs: Any) -> np.ndarray:
        rows: list[np.ndarray] = []
        for i in range(len(inputs[0])):
            try:
                rows.append(numbers_in(self.function(*(z[i] for z in inputs)), self.label))
            except Exception as error:
                before = stacked(rows, self.label).reshape(i, -1) if i else np.zeros((0, 1))
                raise RowFailed(i, error, before) from error
        return stacked(rows, self.label)


@dataclass(frozen=True, eq=False)
class Call:
    """f with arrays of one kind, as it is sent to workers: "numpy", "torch" or "torch float32"."""

    function: Callable[..., Any]
    shapes: tuple[tuple[int, ...], ...]
    kind: str
    label: str

    @property
    def is_one_by_one(self) -> bool:
        return isinstance(self.function, OneByOne)

    def answer(self, points: Array, retries: int) -> Answer:
        """Call f on a batch; where it raises, once more for every retry, from the point on that it raised at."""
        rows, seconds, pause = 0, 0.0, _PAUSE
        known: list[np.ndarray] = []  # what was answered before the row that raised
        while True:
            found = self._once(points[sum(map(len, known)) :])
            rows, seconds = rows + found.rows, seconds + found.seconds
            known += [] if found.before is None or not len(found.before) else [found.before]
            if found.values is not None or not retries or isinstance(found.error, MutatedInputError):
                break
            retries -= 1
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)
        found = replace(found, rows=rows, seconds=seconds)
        if not known:
            return found
        before = np.concatenate(known)
        if found.values is None:
            return replace(found, row=len(before), before=before)
        return replace(found, values=np.concatenate([before.reshape(-1, *found.values.shape[1:]), found.values]))

    def _once(self, points: Array) -> Answer:
        number = np.float32 if self.kind == "torch float32" else np.float64
        inputs = [part.astype(number) for part in split_flat(points, self.shapes)]
        given = [a.copy() if self.kind == "numpy" else torch.from_numpy(a.copy()) for a in inputs]
        start = time.perf_counter()
        try:
            with torch.no_grad():
                answer = self.function(*given)
        except RowFailed as stopped:
            return Answer(
                None, stopped.row + 1, time.perf_counter() - start, stopped.error, stopped.row, stopped.before
            )
        except Exception as error:
            return Answer(None, len(points), time.perf_counter() - start, error)
        seconds = time.perf_counter() - start
        if any(not np.array_equal(np.asarray(g), a, equal_nan=True) for g, a in zip(given, inputs)):
            hint = "work on a copy: z = z.clone() or z.copy()."
            return Answer(None, len(points), seconds, MutatedInputError(f"{self.label} writes into its input; {hint}"))
        try:
            return Answer(numbers_in(answer, self.label), len(points), seconds)
        except Exception as error:
            return Answer(None, len(points), seconds, error)

    def answers(
        self,
        points: Array,
        crew: Crew,
        speed: float,
        *,
        batch: int | None,
        arrived: Callable[[slice, Answer], None],
        progress: Progress | None,
    ) -> Iterator[tuple[slice, Answer]]:
        """f at all points, in parts and in their order.

        Args:
            points: `(n, m)`.
            crew: who calls f.
            speed: points a second that f takes; 0 if that is not known.
            batch: points in one call of f, if its values depend on that; None to divide the points freely.
            arrived: called with every part and its answers as soon as they are there, in any order.
            progress: called while this process waits.
        """
        parts = self._freely(len(points), crew, speed) if batch is None else batches(len(points), batch)
        if crew.door is None:
            for part in parts:
                found = self.answer(points[part], crew.retries)
                arrived(part, found)
                yield part, found
            return
        tasks = [(points[part], crew.retries) for part in parts]

        def came(i: int, answer: Answer) -> None:
            arrived(parts[i], answer)

        for part, found in zip(parts, crew.spread(_answer, self, tasks, progress, kept=False, arrived=came)):
            yield part, found if found.raised is None else replace(found, error=found.raised.again())

    def _freely(self, count: int, crew: Crew, speed: float) -> list[slice]:
        """Parts that suit whoever calls f: of nearly the same size, so that workers end together."""
        size = count
        if crew.door is not None:
            size = max(1, min(-(-count // crew.width), int(_TASK * speed)))
        elif crew.checkpoint is not None and self.is_one_by_one:
            size = 1  # every answer is kept as it comes
        parts = min(count, -(-count // (size * crew.width)) * crew.width)
        return [slice(k * count // parts, (k + 1) * count // parts) for k in range(parts)]


def whole_batch(count: int) -> int:
    """How many of `count` points are sent in one call to a function whose values depend, in their last bits, on what else is in
    the batch, as those of matrix products do.

    It depends on nothing but the number of points, so that whoever calls the function gets the same bits.
    """
    return max(_FEWEST, -(-count // _BATCHES))


def batches(count: int, size: int) -> list[slice]:
    """Parts of this size; the last one may be smaller."""
    return [slice(start, min(start + size, count)) for start in range(0, count, size)]


def _answer(call: Call, task: tuple[Array, int], _: Progress | None) -> Answer:
    """One task on a worker. What f raised travels as text: the class of an exception may be unknown elsewhere."""
    found = call.answer(*task)
    if found.error is None:
        return found
    where = f"on a worker (process {os.getpid()} of {socket.gethostname()}):"
    return replace(found, error=None, raised=_Raised.of(found.error, where))


@dataclass(frozen=True)
class _Raised:
    """An exception as text."""

    module: str
    name: str
    args: tuple[str, ...]
    note: str

    @classmethod
    def of(cls, error: Exception, where: str) -> _Raised:
        kind, trace = type(error), "".join(traceback.format_exception(error))
        said = error.args if isinstance(error, PartitaError) else (error,)
        return cls(kind.__module__, kind.__qualname__, tuple(map(str, said)), f"{where}\n{trace}")

    def again(self) -> Exception:
        """An exception of the same name and text; of the same class if Python or partita has it."""
        home = {"builtins": builtins, errors.__name__: errors}.get(self.module)
        kind = getattr(home, self.name, None)
        if not (isinstance(kind, type) and issubclass(kind, Exception)):
            kind = type(self.name, (Exception,), {})
        try:
            found: Exception = kind(*self.args)
        except TypeError:  # UnicodeDecodeError takes five arguments, for example
            found = RuntimeError(f"{self.name}: {' '.join(self.args)}")
        found.add_note(self.note)
        return found


def stacked(rows: list[np.ndarray], label: str) -> np.ndarray:
    """The values at single points as one array, the batch first."""
    shapes = list(dict.fromkeys(r.shape for r in rows))
    if len(shapes) > 1:
        raise ShapeError(
            f"{label} returned values of the shapes {shapes[0]} and {shapes[1]} at different points; expected one shape."
        )
    return np.stack(rows) if rows else np.zeros((0, 1))


class RecalledAnswers:
    """The answers of f in a checkpoint. Each request for a point gets the next answer that f gave there, so that a run which is
    repeated meets the same answers in the same order, and a function that varies is still found out.

    Args:
        checkpoint: where they are kept.
        function: f, as the user gave it.
        label: its name, for errors.

    Attributes:
        sample: the first points that had an answer, `(k, m)`, and their values; None as long as there were none.
        doubted: whether f was asked again at these.

    Raises:
        CheckpointError: what f computes cannot be read from it.
    """

    sample: tuple[Array, np.ndarray] | None

    def __init__(self, checkpoint: Checkpoint, function: Callable[..., Any], label: str) -> None:
        self.checkpoint = checkpoint
        try:
            content = keyed(function.function if isinstance(function, OneByOne) else function)
        except Uncertain as problem:
            raise CheckpointError(
                f"the checkpoint cannot tell {label} from other functions: it holds {problem}, whose content cannot be read",
                f"Name its content: {label}.checkpoint_key = 'version 1', and change the name whenever the function changes.",
            ) from None
        self._key = content_of("answers", content, isinstance(function, OneByOne))
        self.doubted, self.sample = False, None  # set once answers were given
        self._known: dict[tuple[str, bytes], list[tuple[np.ndarray, float]]] = {}
        self._given: dict[tuple[str, bytes], int] = {}
        for kind, points, values, seconds in checkpoint.results(self._key):
            self._learn(kind, points, values, seconds)

    def _learn(self, kind: str, points: Array, values: np.ndarray, seconds: float) -> None:
        for point, value in zip(points, values):
            self._known.setdefault((kind, point.tobytes()), []).append((value[None], seconds / len(points)))
        if len(points) > 1:
            self._known.setdefault((kind, points.tobytes()), []).append((values, seconds))

    def take(self, kind: str, points: Array, batch: int | None) -> tuple[NDArray[np.bool_], list[np.ndarray], float]:
        """Which of the points have an answer left, `(n,)`, the answers, and how long f took for them.

        Args:
            kind: of arrays.
            points: `(n, m)`.
            batch: points that are asked together, if the values of f depend on that; their answers are then taken together.
        """
        found, values, seconds = np.zeros(len(points), bool), [], 0.0
        for part in batches(len(points), 1 if batch is None else batch):
            place = (kind, points[part].tobytes())
            given, known = self._given.get(place, 0), self._known.get(place, ())
            if given < len(known):
                self._given[place] = given + 1
                found[part], seconds = True, seconds + known[given][1]
                values += list(known[given][0])
        if self.sample is None and values:
            self.sample = points[found][:_SAMPLED], np.stack(values[:_SAMPLED])
        return found, values, seconds

    def keep(self, kind: str, points: Array, values: np.ndarray, seconds: float) -> None:
        """Keep new answers; they are not given out again in this run."""
        self.checkpoint.append(self._key, (kind, points, values, seconds))
        self._learn(kind, points, values, seconds)
        for place in {(kind, asked.tobytes()) for asked in (points, *points)}:
            self._given[place] = self._given.get(place, 0) + 1
