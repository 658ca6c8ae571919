"""Parts of a fit at the same time: what `n_jobs` means, through joblib and whatever backend is chosen there."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any, TypeVar

from joblib import Parallel, delayed, effective_n_jobs
from threadpoolctl import threadpool_limits

from partita.errors import UnsupportedError

__all__ = ["ALONE", "Jobs"]

Task = TypeVar("Task")
Result = TypeVar("Result")

_ROUND = 4  # tasks for each worker in one call of joblib, which takes ten milliseconds


@dataclass(frozen=True)
class Jobs:
    """How many parts of a fit run at the same time. The result is the same bits in any case.

    Args:
        count: as everywhere in scikit-learn: None for 1, or for what `joblib.parallel_config` says; −1 for all processors.

    Raises:
        UnsupportedError: count is neither None nor an integer other than 0.
    """

    count: int | None = None

    def __post_init__(self) -> None:
        whole = isinstance(self.count, Integral) and not isinstance(self.count, bool)
        if self.count is not None and not (whole and self.count != 0):
            raise UnsupportedError(f"n_jobs is {self.count!r}; expected None, or an integer other than 0.")

    @property
    def width(self) -> int:
        """How many tasks run at the same time, under the backend of joblib that is in force."""
        return max(int(effective_n_jobs(self.count)), 1)

    def map(self, function: Callable[[Task], Result], tasks: Sequence[Task]) -> Iterator[Result]:
        """`function(task)` for every task, in the order of the tasks.

        Threads do the work unless a backend of joblib is chosen: nearly all of it is linear algebra, which lets go of the
        interpreter. A few tasks for each worker are computed before their results are taken, so that few results are held.

        Args:
            function: depends on nothing but its argument.
            tasks: one argument each.
        """
        width = min(self.width, len(tasks))
        if width < 2:
            yield from map(function, tasks)
            return
        home = os.getpid()
        with Parallel(n_jobs=self.count, prefer="threads") as workers:
            for start in range(0, len(tasks), _ROUND * width):
                some = tasks[start : start + _ROUND * width]
                yield from workers(delayed(_run)(function, task, home) for task in some)


ALONE = Jobs(1)


def _run(function: Callable[[Any], Any], task: Any, home: int) -> Any:
    """One task. In another process, too, linear algebra uses one thread: sums of several are rounded in another order."""
    if os.getpid() == home:
        return function(task)
    with threadpool_limits(limits=1):
        return function(task)
