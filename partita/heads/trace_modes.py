"""Whether a module is being traced. Checks of numbers are then left out, because they cannot be part of its graph."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import get_proxy_mode

__all__ = ["exporting", "is_exporting", "is_traced"]

_ours = False


def is_exporting() -> bool:
    """True under torch.export, whose graphs hold no assertions. In torch 2.6, which cannot tell, only inside `exporting`.

    It looks at the flag behind `torch.compiler.is_exporting`, which older versions answer with True under torch.compile too.
    """
    return _ours or bool(getattr(torch.compiler, "_is_exporting_flag", False))


@contextmanager
def exporting() -> Iterator[None]:
    """For exports of the library's own: ONNX has no assertions."""
    global _ours
    _ours = True
    try:
        yield
    finally:
        _ours = False


def is_traced(x: Any) -> bool:
    """True under torch.compile, torch.export, torch.jit.trace, make_fx, torch.fx.symbolic_trace and torch.func transforms."""
    return bool(
        isinstance(x, fx.Proxy)
        or torch.compiler.is_compiling()
        or torch._C._get_tracing_state() is not None
        or get_proxy_mode() is not None
        or torch._C._functorch.peek_interpreter_stack()
        is not None  # vmap, grad, …: tensors without numbers of their own
    )
