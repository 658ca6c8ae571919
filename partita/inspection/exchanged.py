"""Functions of torch that are replaced while somebody listens to them, and the listeners of each thread."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Generic, TypeVar

__all__ = ["Exchange", "Listeners"]

_T = TypeVar("_T")


class Exchange:
    """Attributes of a module or class that are replaced while at least one thread is inside `held`.

    Attributes:
        originals: what was there before; threads may still call them after they are restored.
    """

    def __init__(self, owner: Any, replacements: dict[str, Any]) -> None:
        self.originals: dict[str, Any] = {}
        self._owner, self._replacements = owner, replacements
        self._lock, self._inside = threading.Lock(), 0

    @contextmanager
    def held(self) -> Iterator[None]:
        """Inside the `with`, the attributes are replaced. Threads may leave in any order."""
        with self._lock:
            if not self._inside:
                self.put()
            self._inside += 1
        try:
            yield
        finally:
            with self._lock:
                self._inside -= 1
                if not self._inside:
                    self.put_back()

    def put(self) -> None:
        """Replace the attributes, if this version of torch has all of them."""
        if all(hasattr(self._owner, name) for name in self._replacements):
            for name, replacement in self._replacements.items():
                found = getattr(self._owner, name)
                if found is not replacement or not callable(found):  # somebody may have put ours back by mistake
                    self.originals[name] = found
                setattr(self._owner, name, replacement)

    def put_back(self) -> None:
        """Restore those that nobody else has replaced since."""
        for name, original in self.originals.items():
            if getattr(self._owner, name) is self._replacements[name]:
                setattr(self._owner, name, original)


class Listeners(threading.local, Generic[_T]):
    """The listeners of the current thread.

    Attributes:
        all: oldest first.
    """

    def __init__(self) -> None:
        self.all: list[_T] = []

    @contextmanager
    def listed(self, listener: _T) -> Iterator[None]:
        """Inside the `with`, a listener is one of them. The block may be left in another context or thread.

        Args:
            listener: what to add.
        """
        own = self.all
        own.append(listener)
        try:
            yield
        finally:
            del own[max(k for k, other in enumerate(own) if other is listener)]
