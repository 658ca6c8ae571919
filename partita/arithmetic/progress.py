"""How long work says that it is alive: it calls `progress` often, and a caller that wants it to stop raises there."""

from __future__ import annotations

from collections.abc import Callable

__all__ = ["Progress", "report"]

Progress = Callable[[str, int, int], None]  # (what, done, of)


def report(progress: Progress | None, what: str, done: int = 0, of: int = 0) -> None:
    """Tell progress, if anyone listens; done and of are 0 where nothing is counted.

    Raises:
        BudgetSpentError: the caller's time is over.
    """
    if progress is not None:
        progress(what, done, of)
