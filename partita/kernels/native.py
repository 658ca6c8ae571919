"""When a batch is run by native loops instead of torch, and how: threads, and a word on stderr while numba compiles.

The loops (extra: `fast`) are compiled by numba when a batch is first worth it, once per installation, and loaded from numba's
cache afterwards. Smaller batches go through torch, always: the two differ in the last digits, so that what a batch gives must not
depend on what was computed before it. Certificates hold for both.
"""

from __future__ import annotations

import itertools
import os
import sys
import threading
from collections.abc import Callable, Hashable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any, TypeVar

import torch
from numpy.typing import NDArray

from partita.errors import MissingExtraError

__all__ = ["AVAILABLE", "CHUNK", "WORTH", "Floats", "compiled_once", "each_on_one_thread", "in_parts", "worth_it"]

AVAILABLE = find_spec("numba") is not None  # the torch path does the same, slower

# A batch that reads so many stored numbers is run natively: torch would need half a second. 0: every batch
WORTH = 1 << 23
_LEAST_READS = 1 << 8  # a query costs torch as much as so many reads, or more
CHUNK = 2048  # queries that are worth a thread

_SECONDS = 5  # that compiling takes on one core

Floats = NDArray[Any]  # float64 or float32, as the head

Task = TypeVar("Task")
Result = TypeVar("Result")

_compiling = threading.Lock()
_used: set[Hashable] = set()  # loops that this process has used, by name and types


def _after_fork() -> None:
    """Threads of the process that forked this one are not here: torch would wait for them forever, and so would a held lock."""
    global _compiling
    _compiling = threading.Lock()
    torch.set_num_threads(1)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def worth_it(queries: int, reads: int) -> bool:
    """Whether to use the native loops for a batch of so many queries, each of which reads so many stored numbers."""
    return AVAILABLE and queries * max(reads, _LEAST_READS) >= WORTH


def compiled_once(key: Hashable, first_call: Callable[[], object]) -> None:
    """Run `first_call`, which compiles or loads a loop, unless a loop of that key was used before; say so if it compiles.

    Raises:
        MissingExtraError: numba is not installed.
    """
    if not AVAILABLE:
        raise MissingExtraError.of("the native kernel needs", "fast")
    if key in _used:
        return
    with _compiling:  # threads that import numba at the same time wait for each other forever
        if key not in _used:
            with _announced():
                first_call()
            _used.add(key)


def in_parts(queries: int, run: Callable[[slice], object], *, least: int = CHUNK) -> None:
    """Call `run(rows)` for contiguous parts of the queries, one per torch thread; `least` queries are worth a thread.

    The parts depend on the number of queries and threads alone, so that the same batch gives the same bits again.
    """
    threads = min(torch.get_num_threads(), queries // least)
    if threads < 2:
        run(slice(0, queries))
        return
    ends = [queries * k // threads for k in range(threads + 1)]
    with ThreadPoolExecutor(threads) as pool:  # the loops release the interpreter lock
        list(pool.map(run, [slice(a, b) for a, b in itertools.pairwise(ends)]))


def each_on_one_thread(tasks: Sequence[Task], run: Callable[[Task], Result]) -> list[Result]:
    """`[run(task) for task in tasks]`, as many at a time as torch has threads, where torch uses one thread for each.

    Threads that never wait for each other are twice as fast as threads that share every operation, and the bits of a result do not
    depend on their number. Inside, gradients are off. Modes of torch that belong to the calling thread do not apply there.
    """

    def alone(task: Task) -> Result:
        with torch.no_grad():
            return run(task)

    threads = torch.get_num_threads()
    if min(threads, len(tasks)) < 2:
        return [alone(task) for task in tasks]
    try:
        with ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,)) as pool:
            return list(pool.map(alone, tasks))
    finally:
        torch.set_num_threads(threads)


@contextmanager
def _announced() -> Iterator[None]:
    """Says on stderr that numba compiles, if it does: most often the loops come from its cache."""
    from numba.core import event

    from partita.kernels.native_code import CACHED

    class Announcement(event.Listener):
        told = False

        def on_start(self, event: object) -> None:
            if not self.told:
                often = "once" if CACHED else "no folder for numba's cache can be written; set NUMBA_CACHE_DIR"
                print(f"partita: compiling native kernels ({often}, about {_SECONDS} s) …", file=sys.stderr, flush=True)
            self.told = True

        def on_end(self, event: object) -> None:
            pass

    with event.install_listener("numba:compile", Announcement()):
        yield
