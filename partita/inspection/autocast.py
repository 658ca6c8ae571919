"""Autocast inside the operators that a dispatch mode calls.

Torch calls a dispatch mode with autocast switched off. Most operators do not notice: autocast has already cast their arguments.
But some run other operators that autocast would cast: the products inside a fused encoder layer, a GRU or a bilinear layer.
So that watching a model changes none of its numbers, autocast is switched on again inside such operators.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from typing import Any

import torch

__all__ = ["OuterAutocast"]

_KEYS = {"cpu": torch._C.DispatchKey.AutocastCPU, "cuda": torch._C.DispatchKey.AutocastCUDA}


class OuterAutocast:
    """The devices whose autocast applies inside what the model is calling."""

    def __init__(self) -> None:
        self._devices: tuple[str, ...] = ()
        self._operator: Any = None

    def called(self, function: str) -> None:
        """The model calls a function of torch. Torch switches autocast off inside those whose arguments it casts.

        Args:
            function: its name.
        """
        on, self._operator = _devices(), None
        self._devices = tuple(d for d in on if function not in _cast_functions(d)) if on else on

    def entered(self, operator: Any) -> None:
        """A module begins whose functions are not seen. It may call this operator directly.

        Args:
            operator: an overload of an operator.
        """
        self._devices, self._operator = _devices(), operator

    @contextmanager
    def inside(self, operator: Any) -> Iterator[None]:
        """In the `with`, autocast is as it would be inside this operator without the dispatch mode.

        Args:
            operator: an overload of an operator, as a dispatch mode gets it.
        """
        with ExitStack() as stack:
            for device in self._devices if self._operator in (None, operator) else ():
                if operator.name() not in _cast_operators(device):
                    stack.enter_context(torch._C._SetExcludeDispatchKeyGuard(_KEYS[device], False))
            yield


def _devices() -> tuple[str, ...]:
    return tuple(device for device in _KEYS if torch.is_autocast_enabled(device))


@cache
def _cast_operators(device: str) -> frozenset[str]:
    """Names of the operators whose arguments autocast casts, as in `aten::conv1d.padding`."""
    return frozenset(torch._C._dispatch_get_registrations_for_dispatch_key(f"Autocast{device.upper()}"))


@cache
def _cast_functions(device: str) -> frozenset[str]:
    """The same without namespaces and overloads."""
    return frozenset(name.partition("::")[2].partition(".")[0] for name in _cast_operators(device))
