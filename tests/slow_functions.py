"""Functions that tests send to other processes. Calls leave a mark in a file, so they are counted wherever they happen."""

from __future__ import annotations

import os
import signal
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np


def waves(z):
    """A black box of two variables, for numpy arrays and tensors."""
    z = np.asarray(z)
    return np.sin(3 * z[:, 0]) + z[:, 0] * np.cos(2 * z[:, 1])


def peak(z):
    """A black box with a peak, which takes some hundred evaluations."""
    z = np.asarray(z)
    return 1 / (1 + 25 * (z[:, 0] ** 2 + z[:, 1] ** 2))


@dataclass(frozen=True)
class Counted:
    """`waves`, with a line in a file for every point that it received, written before it answers."""

    log: str
    seconds: float = 0.0

    checkpoint_key = "waves, counted"

    def __call__(self, z):
        with open(self.log, "a") as file:
            for _ in range(len(z)):
                if self.seconds:
                    time.sleep(self.seconds)
                file.write("x")
                file.flush()
        return waves(z)

    @property
    def calls(self) -> int:
        return os.path.getsize(self.log) if os.path.exists(self.log) else 0


@dataclass(frozen=True)
class Once:
    """`waves`, but for what happens the first time that it gets a point near a corner: a file is removed, and the function raises,
    or its process is killed.
    """

    mark: str
    kills: bool = False

    checkpoint_key = "waves, once"

    def __call__(self, z):
        if (np.asarray(z) > 0.9).all(axis=1).any() and Path(self.mark).exists():
            try:
                os.unlink(self.mark)  # one process can do this
            except FileNotFoundError:
                return waves(z)
            if self.kills:
                os.kill(os.getpid(), signal.SIGKILL)
            raise ValueError("the licence server did not answer")
        return waves(z)


def depends_on_the_batch(z):
    """`waves`, but for last digits that depend on how many points there are: so does every matrix product."""
    return waves(z) + 1e-13 * len(z)


def kills(z):
    """It takes the process with it, as a crash in compiled code does."""
    if (np.asarray(z) > 0.9).all(axis=1).any():
        os.kill(os.getpid(), signal.SIGKILL)
    return waves(z)


class Locked:
    """`waves`, with something that no other process can have."""

    def __init__(self):
        self.lock = threading.Lock()

    def __call__(self, z):
        return waves(z)


def always_raises(z):
    raise ValueError("no licence")


class Strange(Exception):
    """An exception that other processes may not know."""

    def __init__(self, a, b):
        super().__init__(a, b)


def raises_strangely(z):
    raise Strange("a", {"b": 1})


def prints(z):
    print("printed by f")
    return waves(z)
