"""A time budget in seconds, which stops work that reports its progress."""

from __future__ import annotations

import math
import time

from partita.errors import BudgetSpentError, UnsupportedError
from partita.proofs.proof import Progress

__all__ = ["Clock"]


class Clock:
    """Started when it is made. `until(share)` passes progress on, and raises BudgetSpentError once that share is used up."""

    def __init__(self, seconds: float | None, progress: Progress | None) -> None:
        if seconds is not None and not 0 < seconds < math.inf:
            raise UnsupportedError(f"budget is {seconds}; expected a number of seconds > 0.")
        self.seconds, self.progress, self.start = seconds, progress, time.monotonic()

    def until(self, share: float) -> Progress | None:
        if self.seconds is None:
            return self.progress
        end = self.start + share * self.seconds

        def report(what: str, done: int, of: int) -> None:
            if self.progress is not None:
                self.progress(what, done, of)
            if time.monotonic() > end:
                raise BudgetSpentError(f"the budget of {self.seconds:g} seconds ran out during: {what}.")

        return report
