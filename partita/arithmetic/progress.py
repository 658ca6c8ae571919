"""Progress reports: long computations call `progress` often, and a caller that wants to stop one raises an exception there."""

from __future__ import annotations

from collections.abc import Callable

__all__ = ["Progress", "report"]

Progress = Callable[[str, int, int], None]  # (what, done, of)


def report(progress: Progress | None, what: str, done: int = 0, of: int = 0) -> None:
    """Call `progress` if it is given; done and of are 0 where nothing is counted.

    Raises:
        BudgetSpentError: the caller's time budget is spent.
    """
    if progress is not None:
        progress(what, done, of)
