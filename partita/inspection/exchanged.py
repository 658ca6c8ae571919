"""Functions of torch that are replaced while somebody listens to them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from typing import Any, TypeVar

__all__ = ["Exchange", "listed"]

_T = TypeVar("_T")


class Exchange:
    """Attributes of a module that are replaced while at least one thread is inside `held`.

    Attributes:
        originals: what the module had before the last replacement; threads may still call them afterwards.
    """

    def __init__(self, module: Any, replacements: dict[str, Any]) -> None:
        self.originals: dict[str, Any] = {}
        self._module, self._replacements = module, replacements
        self._lock, self._inside = threading.Lock(), 0

    @contextmanager
    def held(self) -> Iterator[None]:
        """Inside the `with`, the attributes are replaced. Blocks may nest, and threads may leave in any order."""
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
        if all(hasattr(self._module, name) for name in self._replacements):
            self.originals.update({name: getattr(self._module, name) for name in self._replacements})
            for name, replacement in self._replacements.items():
                setattr(self._module, name, replacement)

    def put_back(self) -> None:
        """Restore them."""
        for name, original in self.originals.items():
            setattr(self._module, name, original)


@contextmanager
def listed(listener: _T, listeners: ContextVar[tuple[list[_T], ...]]) -> Iterator[None]:
    """Inside the `with`, a listener is among those of this thread. Afterwards it is not, even if the block is left in another
    context than it was entered in, where the variable cannot be reset.

    Args:
        listener: what to add.
        listeners: lists of one listener each; an empty one belongs to a listener that has left.
    """
    held = [listener]
    token = listeners.set((*listeners.get(), held))
    try:
        yield
    finally:
        held.clear()
        with suppress(ValueError):
            listeners.reset(token)
