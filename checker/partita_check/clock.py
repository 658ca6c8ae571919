"""The time that a check may take. Every long loop calls `tick`, so that a budget is kept to within a fraction of a second."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["TimeOver", "clock"]


class TimeOver(Exception):
    """The budget is spent. Whatever was proved before still holds."""


class Clock:
    """One deadline for the whole process, in the seconds of `time.monotonic`."""

    def __init__(self) -> None:
        self.deadline = math.inf

    def start(self, seconds: float) -> None:
        self.deadline = time.monotonic() + seconds

    def stop(self) -> None:
        """No deadline any more: what is called next in this process has its own time."""
        self.deadline = math.inf

    @contextmanager
    def share(self, seconds: float) -> Iterator[None]:
        """A nearer deadline for what is done inside, so that something is left for what comes after it."""
        whole, self.deadline = self.deadline, min(self.deadline, time.monotonic() + seconds)
        try:
            yield
        finally:
            self.deadline = whole

    def left(self) -> float:
        return max(0.0, self.deadline - time.monotonic())

    def over(self) -> bool:
        return time.monotonic() >= self.deadline

    def tick(self) -> None:
        if self.over():
            raise TimeOver


clock = Clock()
