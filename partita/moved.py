"""Names that were changed: the old ones work for one more version, with a warning that gives the new name."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from importlib import import_module
from typing import Any

__all__ = ["forward", "renamed"]


def forward(old: str, *rooms: str) -> Callable[[str], Any]:
    """A module's `__getattr__` that finds a name in the first of the rooms that has it, with a DeprecationWarning."""

    def find(name: str) -> Any:
        for room in rooms:
            if name in getattr(import_module(room), "__all__", ()):
                message = f"{old}.{name} is now {room}.{name}; the old name will be removed in partita 0.4."
                warnings.warn(message, DeprecationWarning, stacklevel=2)
                return getattr(import_module(room), name)
        raise AttributeError(f"module {old!r} has no attribute {name!r}; look in {', '.join(rooms)}.")

    return find


def renamed(owner: str, old: str, new: str) -> Callable[..., Any]:
    """A method that calls the one with the new name, with a DeprecationWarning."""

    def call(self: Any, *arguments: Any, **options: Any) -> Any:
        message = f"{owner}.{old} is now {owner}.{new}; the old name will be removed in partita 0.5."
        warnings.warn(message, DeprecationWarning, stacklevel=2)
        return getattr(self, new)(*arguments, **options)

    call.__doc__ = f"""Deprecated: use `{new}`.

    Args:
        arguments: of `{new}`.
        options: of `{new}`.
    """
    return call
