"""Scripted and traced functions and modules: their operators are called from Python, where function modes see them.

A dispatch mode does this. It would change results in inference mode (where `linear` takes another path) and under autocast
(which does not reach into a dispatch mode), so it is not used there, and never around other models.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from partita.inspection.exchanged import Exchange, Listeners
from partita.kernels.plain_arithmetic import uses_autocast

__all__ = ["scripts_called_from_python"]

_DEVICES = ("cpu", "cuda", "mps", "xpu")


class _FromPython(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


_wanted: Listeners[bool] = Listeners()


def _changes_nothing() -> bool:
    """Whether a dispatch mode leaves all results as they are."""
    return not (torch.is_inference_mode_enabled() or any(map(uses_autocast, _DEVICES)))


def _call(exchange: Callable[[], Exchange]) -> Callable[..., Any]:
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        with _FromPython() if _wanted.all and _changes_nothing() else nullcontext():  # type: ignore[no-untyped-call]
            return exchange().originals["__call__"](self, *args, **kwargs)

    return call


_FUNCTIONS: Exchange = Exchange(torch._C.ScriptFunction, {"__call__": _call(lambda: _FUNCTIONS)})
_METHODS: Exchange = Exchange(torch._C.ScriptMethod, {"__call__": _call(lambda: _METHODS)})


@contextmanager
def scripts_called_from_python() -> Iterator[None]:
    """Inside the `with`, function modes of this thread see the operators of scripted and traced code."""
    with _FUNCTIONS.held(), _METHODS.held(), _wanted.listed(True):
        yield
