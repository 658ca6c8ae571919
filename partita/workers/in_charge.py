"""The crew: who does the work while a function of the library runs, and where results are kept."""

from __future__ import annotations

import concurrent.futures
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import BrokenExecutor, CancelledError, Future
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from numbers import Integral
from typing import Any, TypeVar

from partita.arithmetic.progress import Progress, report
from partita.errors import NotSendableError, PartitaError, UnsupportedError, WorkersLostError
from partita.workers.checkpoint import Checkpoint
from partita.workers.content import content_of, library_content
from partita.workers.executors import Door, door_to

__all__ = ["Crew", "crew", "crew_of"]

Result = TypeVar("Result")

_AHEAD = 4  # tasks for each worker that are submitted before the first of them is needed
_WAITING = 4  # times as many tasks as run may be ahead of the result that is needed
_TICK = 0.2  # seconds between two looks at the clock while tasks run
_AGAIN = 3  # times that a task whose worker died is submitted again
_DIED = (CancelledError, BrokenExecutor)
_DASK_GAVE_UP = "KilledWorker"  # Dask has tried a task on several workers
_DIED_ON_DASK = (_DASK_GAVE_UP, "CommClosedError", "FutureCancelledError")
_WORTH_KEEPING = 0.005  # seconds: results that take less are computed again rather than kept


@dataclass(frozen=True, eq=False)
class Crew:
    """Who does the work, and where its results are kept.

    Attributes:
        door: to the caller's executor; None to work in this process.
        checkpoint: the folder that keeps results; None to keep none.
        retries: how often the caller's function is called again where it raised.
        closes: whether the door was made for this crew, which closes it when its work is done.
    """

    door: Door | None = None
    checkpoint: Checkpoint | None = None
    retries: int = 0
    closes: bool = False

    @property
    def width(self) -> int:
        """About how many tasks run at the same time."""
        return 1 if self.door is None else self.door.width

    def spread(
        self,
        run: Callable[[Any, Any, Progress | None], Result],
        shared: Any,
        tasks: Sequence[Any],
        progress: Progress | None = None,
        *,
        kept: bool = True,
        arrived: Callable[[int, Result], None] | None = None,
    ) -> Iterator[Result]:
        """`run(shared, task, progress)` for every task, in the order of the tasks, wherever each of them is computed.

        A caller that stops taking results cancels the rest. Results come from the checkpoint where it has them.

        Args:
            run: a function of a module. It depends on nothing but its arguments; `progress` is None where it cannot be called.
            shared: what all tasks have in common. It is sent to each worker once.
            tasks: one argument each.
            progress: called while this process waits; an error that it raises cancels the rest.
            kept: whether results are kept in the checkpoint. They must then be numbers, text, arrays, and tuples of them.
            arrived: called with the number of a task and its result as soon as the result is there, in any order.

        Raises:
            WorkersLostError: the executor stopped working.
            CheckpointError: the checkpoint cannot be written or read.
        """
        keeper = _Keeper(self.checkpoint, run, shared, tasks) if kept and self.checkpoint is not None else None
        if self.door is None or (kept and len(tasks) < 2):  # one task alone is faster done than sent
            for i, task in enumerate(tasks):
                if keeper is not None and (held := keeper.held(i)) is not None:
                    yield held[0]
                    continue
                start = time.perf_counter()
                result = run(shared, task, progress)
                if keeper is not None:
                    keeper.keep(i, result, time.perf_counter() - start)
                if arrived is not None:
                    arrived(i, result)
                yield result
            return
        yield from _Spreading(self.door, run, shared, tasks, keeper, progress, arrived).results()

    def recall(self, name: str, given: Any, compute: Callable[[], Result]) -> Result:
        """What `compute()` returns, or what it returned earlier if the checkpoint has it.

        Args:
            name: what is computed.
            given: all that the result depends on.
            compute: does the work, in this process. It returns numbers, text, arrays, or tuples of them.
        """
        if self.checkpoint is None:
            return compute()
        key = content_of(library_content(), name, given)
        for held in self.checkpoint.results(key):
            return held  # type: ignore[no-any-return]
        start = time.perf_counter()
        result = compute()
        if time.perf_counter() - start >= _WORTH_KEEPING:
            self.checkpoint.append(key, result)
        return result

    @contextmanager
    def at_work(self) -> Iterator[Crew]:
        """Put this crew in charge for a while. An idle one leaves the crew in charge that is there already."""
        if self.door is None and self.checkpoint is None and not self.retries:
            yield crew()
            return
        token = _in_charge.set(self)
        try:
            yield self
        finally:
            _in_charge.reset(token)
            if self.checkpoint is not None:
                self.checkpoint.close()
            if self.closes and self.door is not None:
                self.door.close()


_ALONE = Crew()
_in_charge: ContextVar[Crew] = ContextVar("partita_crew", default=_ALONE)


def crew() -> Crew:
    """The crew in charge; without one, a crew that works in this process and keeps nothing."""
    return _in_charge.get()


def crew_of(executor: Any = None, checkpoint: str | os.PathLike[str] | None = None, retries: int = 0) -> Crew:
    """The crew for the arguments of `compile`.

    Raises:
        UnsupportedError: an argument is of the wrong kind.
        CheckpointError: the folder cannot be used.
    """
    if isinstance(retries, bool) or not isinstance(retries, Integral) or retries < 0:
        raise UnsupportedError(f"retries is {retries!r}; expected an integer ≥ 0.")
    kept = None if checkpoint is None else Checkpoint(checkpoint)
    door = None if executor is None else door_to(executor)
    return Crew(door, kept, int(retries), closes=not isinstance(executor, Door))


class _Keeper:
    """The results of one list of tasks in a checkpoint."""

    def __init__(self, checkpoint: Checkpoint, run: Callable[..., Any], shared: Any, tasks: Sequence[Any]) -> None:
        self.checkpoint, self.tasks = checkpoint, tasks
        self.about = content_of(library_content(), run.__module__, run.__qualname__, shared)
        self.keys: dict[int, bytes] = {}

    def held(self, i: int) -> tuple[Any] | None:
        """The result of task i, if it is there."""
        self.keys[i] = content_of(self.about, self.tasks[i])
        return next(((result,) for result in self.checkpoint.results(self.keys[i])), None)

    def keep(self, i: int, result: Any, seconds: float) -> None:
        key = self.keys.pop(i)
        if seconds >= _WORTH_KEEPING:
            self.checkpoint.append(key, result)


class _Spreading:
    """One list of tasks on its way through an executor."""

    def __init__(
        self,
        door: Door,
        run: Callable[..., Any],
        shared: Any,
        tasks: Sequence[Any],
        keeper: _Keeper | None,
        progress: Progress | None,
        arrived: Callable[[int, Any], None] | None,
    ) -> None:
        self.door, self.tasks, self.keeper, self.progress = door, tasks, keeper, progress
        self.run, self.shared, self.arrived = run, shared, arrived
        self.running: dict[Future[Any], int] = {}
        self.tries = [0] * len(tasks)
        self.finished: dict[int, Any] = {}
        self.done = 0

    def results(self) -> Iterator[Any]:
        """In the order of the tasks."""
        submitted, room = 0, _AHEAD * self.door.width
        try:
            for i in range(len(self.tasks)):
                while i not in self.finished:
                    # one slow task does not let the results of all others pile up
                    while submitted < min(len(self.tasks), i + _WAITING * room) and len(self.running) < room:
                        more = range(submitted, min(len(self.tasks), submitted + room - len(self.running)))
                        self._start(more)
                        submitted = more.stop
                    if i not in self.finished:
                        self._wait()
                yield self.finished.pop(i)
        finally:
            for future in self.running:
                future.cancel()

    def _start(self, tasks: Iterable[int]) -> None:
        """Submit these tasks, but for those whose results the checkpoint has."""
        wanted: list[int] = []
        for i in tasks:
            held = None if self.keeper is None or self.tries[i] else self.keeper.held(i)
            if held is None:
                wanted.append(i)
            else:
                self.finished[i] = held[0]
        if not wanted:
            return
        try:
            again = any(self.tries[i] for i in wanted)
            started = self.door.submit(self.run, self.shared, [self.tasks[i] for i in wanted], again=again)
        except Exception as error:  # an executor that was shut down, for example
            raise _cannot_travel(error) or self._lost(error) from error
        self.running |= zip(started, wanted)

    def _wait(self) -> None:
        """Take what is finished, and look at the clock."""
        done, _ = concurrent.futures.wait(self.running, _TICK, concurrent.futures.FIRST_COMPLETED)
        for future in done:
            self._take(future, self.running.pop(future))
        if not done and not self.door.is_open:
            raise self._lost(ConnectionError("the Dask client has lost its scheduler"))
        report(self.progress, "tasks", self.done, len(self.tasks))

    def _take(self, future: Future[Any], i: int) -> None:
        try:
            result = future.result()
        except PartitaError:
            raise
        except Exception as error:  # what the caller's function raises comes back as a value: this is about the worker
            self.tries[i] += 1
            hopeless = _cannot_travel(error)
            if hopeless is not None:
                raise hopeless from None
            if self.tries[i] <= _AGAIN and self.door.is_open and type(error).__name__ != _DASK_GAVE_UP:
                self._start([i])
                return
            if isinstance(error, _DIED) or type(error).__name__ in _DIED_ON_DASK:
                raise self._lost(error) from None
            raise
        self.done += 1
        if self.keeper is not None:
            self.keeper.keep(i, result, _WORTH_KEEPING)
        if self.arrived is not None:
            self.arrived(i, result)
        self.finished[i] = result

    def _lost(self, error: BaseException) -> WorkersLostError:
        said = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}".removesuffix(": ")
        return WorkersLostError(
            f"the executor stopped working after {self.done:,} of {len(self.tasks):,} tasks ({said})",
            "Start its workers again, and use checkpoint=DIR to go on where the work stopped.",
        )


def _cannot_travel(error: Exception) -> NotSendableError | None:
    """The error for a function or value that an executor cannot send; None if this is about something else."""
    said = f"{type(error).__name__}: {error}"
    if not any(word in said.lower() for word in ("pickl", "serializ")):
        return None
    return NotSendableError(
        f"a function or value cannot be sent to other processes ({' '.join(said.split())[:200]})",
        "Define the function at the top of a module, or use threads or Dask, which takes lambdas too.",
    )
