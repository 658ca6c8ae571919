"""The executors that users bring, behind one door: `submit` a task, get a `concurrent.futures.Future`.

`concurrent.futures`, loky, mpi4py and ipyparallel have this door already. A Dask `Client` and a multiprocessing `Pool` get one
here. How functions and arrays travel to other processes is the executor's business.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import BrokenExecutor, Future, InvalidStateError, ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np

from partita.arithmetic.environment import require_gradual_underflow
from partita.errors import MissingExtraError, UnsupportedError, WorkersLostError
from partita.workers.content import library_content

__all__ = ["Door", "door_to", "processes", "scheduler"]

_LARGE = 1 << 20  # bytes in arrays that are sent to Dask's workers once, not with every task
_RESTARTS = 3  # of a pool of our own whose processes die
_CLOSED = ("closed", "closing", "newly-created")  # of a Dask client


class Door:
    """Submits tasks to an executor.

    Attributes:
        executor: with `submit`, as in `concurrent.futures`.
        width: about how many tasks run at the same time.
        client: the Dask client behind it, if there is one.
        end: closes what was opened for this door; None for an executor of the caller, which is left alone.
    """

    def __init__(self, executor: Any, width: int, client: Any = None, end: Callable[[], object] | None = None) -> None:
        self.executor, self.width, self.client, self._end = executor, max(int(width), 1), client, end
        # what was sent to Dask's workers last, and the name that it has there
        self._sent: tuple[Any, Any] | None = None
        self._latest: list[Any] = []  # futures of Dask

    def close(self) -> None:
        """End the processes, or the connection, that were started for this door."""
        if self._end is not None:
            self._end()

    @property
    def is_open(self) -> bool:
        """Whether the scheduler behind it, if there is one, can be reached."""
        return self.client is None or self.client.status not in _CLOSED

    def submit(
        self, run: Callable[..., Any], shared: Any, tasks: Sequence[Any], *, again: bool = False
    ) -> list[Future[Any]]:
        """Start `run(shared, task, None)` for each of the tasks.

        Args:
            run: a function of a module.
            shared: what many tasks have in common.
            tasks: what each of them is about.
            again: whether an earlier try failed, perhaps because the workers lost what had been sent to them.
        """
        code = library_content()
        if self.client is None:
            return [self.executor.submit(_run, task, run, shared, code) for task in tasks]
        if _bytes_in(shared) > _LARGE:
            if again or self._sent is None or self._sent[0] is not shared:
                self._sent = shared, self.client.scatter(shared, broadcast=True, hash=False)
            shared = self._sent[1]
        # A client sends one message in ten milliseconds. These tasks go in one; that earlier ones are not needed any more, which it
        # says when they are dropped, has to wait for a later one.
        started = self.client.map(_run, tasks, run=run, shared=shared, code=code, pure=False, batch_size=None)
        self._latest = started
        return [_DaskTask(future) for future in started]


def _run(task: Any, run: Callable[..., Any], shared: Any, code: bytes) -> Any:
    """One task on a worker."""
    if code != library_content():
        raise WorkersLostError(
            "the workers run another version of partita, numpy or scipy than this process",
            "Install the same versions on all machines: results of different versions cannot be compared.",
        )
    require_gradual_underflow()
    return run(shared, task, None)


class _DaskTask(Future[Any]):
    """A future of a Dask client, which only Dask can wait for, as one of `concurrent.futures`."""

    def __init__(self, source: Any) -> None:
        super().__init__()
        self._source = source
        source.add_done_callback(self._finish)

    def cancel(self) -> bool:
        if self._source is not None:
            self._source.cancel()
        return super().cancel()

    def _finish(self, source: Any) -> None:
        with suppress(InvalidStateError):  # cancelled meanwhile
            try:
                self.set_result(source.result())
            except BaseException as error:
                self.set_exception(error)
        self._source = None


class _Pool:
    """Processes of our own on this machine, started when the first task comes, and started again if one of them is killed."""

    def __init__(self, count: int) -> None:
        self.count, self.restarts = count, 0
        self._pool: ProcessPoolExecutor | None = None

    def submit(self, function: Callable[..., Any], *args: Any) -> Future[Any]:
        with _no_ctrl_c():
            try:
                return self._started().submit(function, *args)
            except BrokenExecutor:
                if self.restarts == _RESTARTS:
                    raise
                self.restarts += 1
                self.shutdown()
                return self._started().submit(function, *args)

    def shutdown(self) -> None:
        """End the processes at once, whatever they are doing."""
        pool, self._pool = self._pool, None
        if pool is not None:
            running = list((getattr(pool, "_processes", None) or {}).values())
            pool.shutdown(wait=False, cancel_futures=True)
            for process in running:
                process.terminate()

    def _started(self) -> ProcessPoolExecutor:
        if self._pool is None:
            # a forked copy of a process with threads, torch's for example, may hang
            context = multiprocessing.get_context("spawn")
            self._pool = ProcessPoolExecutor(self.count, mp_context=context, initializer=_prepare_process)
        return self._pool


@contextmanager
def _no_ctrl_c() -> Iterator[None]:
    """Hold back Ctrl-C in this thread, and for good in the processes that it starts: the terminal sends it to them as well.

    Ctrl-C is left to the process that started them, which gets it when the block ends, and ends them.
    """
    if not hasattr(signal, "pthread_sigmask"):  # Windows
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _prepare_process() -> None:
    """What a process of a pool does first.

    It uses one thread, as there are as many processes as cores. What f prints goes to stderr, as the results of a command go to
    stdout.
    """
    import torch
    from threadpoolctl import threadpool_limits

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sys.stdout = sys.stderr
    threadpool_limits(limits=1)
    torch.set_num_threads(1)


def processes(count: int) -> Door:
    """A pool of processes on this machine. They talk through pipes; nothing listens on a network.

    Args:
        count: how many, ≥ 1.
    """
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise UnsupportedError(f"the number of workers is {count!r}; expected an integer ≥ 1.")
    pool = _Pool(count)
    return Door(pool, count, end=pool.shutdown)


def scheduler(address: str) -> Door:
    """The workers of a Dask scheduler that is running already.

    Args:
        address: as Dask prints it, `tcp://host:8786`, or the file that it wrote (`scheduler.json`).

    Raises:
        MissingExtraError: Dask is not installed.
        WorkersLostError: nobody answers at this address.
    """
    try:
        distributed = importlib.import_module("distributed")
    except ModuleNotFoundError:
        raise MissingExtraError.of("a Dask scheduler needs", "cluster") from None
    try:
        given = {"scheduler_file": address} if address.endswith(".json") else {"address": address}
        client = distributed.Client(**given, timeout="10s", set_as_default=False)
    except (OSError, ValueError, TimeoutError) as error:
        raise WorkersLostError(
            f"there is no Dask scheduler at {address} ({type(error).__name__}: {error})",
            "Start one with `dask scheduler`, and workers with `dask worker ADDRESS`.",
        ) from None
    return _dask_door(client, end=client.close)


def door_to(executor: Any) -> Door:
    """The door to what the caller gave as `executor`: an object, or a number of processes.

    Raises:
        UnsupportedError: it has neither `submit` nor `map`.
    """
    if isinstance(executor, Door):
        return executor
    if isinstance(executor, int):
        return processes(executor)
    if _is_dask(executor):
        return _dask_door(getattr(executor, "_client", executor))  # of `client.get_executor()`
    if hasattr(executor, "load_balanced_view"):  # an ipyparallel Client
        executor = executor.executor()
    if isinstance(executor, type):
        raise UnsupportedError(
            f"executor is the class {executor.__name__}; expected one of its objects: {executor.__name__}()."
        )
    if callable(getattr(executor, "submit", None)):
        return Door(executor, _width(executor))
    if callable(getattr(executor, "map", None)):
        mapped = _OnlyMap(executor)
        return Door(mapped, _width(executor), end=mapped.threads.shutdown)
    raise UnsupportedError(
        f"executor is a {type(executor).__name__}; expected an object with `submit` or `map`, or a number of processes",
        "Use concurrent.futures.ProcessPoolExecutor(), a Dask Client, or another executor.",
    )


def _dask_door(client: Any, end: Callable[[], object] | None = None) -> Door:
    return Door(client, sum(client.nthreads().values()), client, end)


class _OnlyMap:
    """`submit` for an object that has `map` only, such as a multiprocessing Pool: one thread waits for each call."""

    def __init__(self, executor: Any) -> None:
        self.executor, self.threads = executor, ThreadPoolExecutor(_width(executor))

    def submit(self, function: Callable[..., Any], *args: Any) -> Future[Any]:
        return self.threads.submit(lambda: next(iter(self.executor.map(_apply, [(function, args)]))))


def _apply(call: tuple[Callable[..., Any], tuple[Any, ...]]) -> Any:
    function, args = call
    return function(*args)


def _is_dask(executor: Any) -> bool:
    distributed = sys.modules.get("distributed")
    return distributed is not None and isinstance(getattr(executor, "_client", executor), distributed.Client)


def _width(executor: Any) -> int:
    """How many tasks an executor runs at the same time, where it says so."""
    for name in ("_max_workers", "num_workers", "_processes"):
        if isinstance(count := getattr(executor, name, None), int) and count > 0:
            return count
    return os.cpu_count() or 1


def _bytes_in(value: Any) -> int:
    """About how many bytes the arrays in a value take."""
    if isinstance(value, np.ndarray):
        return int(value.nbytes)
    if isinstance(value, Mapping):
        return sum(map(_bytes_in, value.values()))
    if isinstance(value, (tuple, list)):
        return sum(map(_bytes_in, value[:100]))
    if is_dataclass(value) and not isinstance(value, type):
        return sum(_bytes_in(getattr(value, f.name)) for f in fields(value))
    if hasattr(value, "state_dict"):
        return sum(int(t.numel() * t.element_size()) for t in value.state_dict().values())
    return _bytes_in(vars(value)) if type(value).__module__.startswith("partita.") and hasattr(value, "__dict__") else 0
