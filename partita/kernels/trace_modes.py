"""Whether a module is being traced. Checks of numbers are then left out, because they cannot be part of its graph."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import get_proxy_mode

__all__ = ["exporting", "is_exporting", "is_traced", "wants_operator"]

_exporting_here = False


def is_exporting() -> bool:
    """True under torch.export. Torch 2.6 cannot tell; there it is True only inside `exporting`.

    This reads the flag behind `torch.compiler.is_exporting`, because older versions return True under torch.compile as well.
    """
    return _exporting_here or bool(getattr(torch.compiler, "_is_exporting_flag", False))


@contextmanager
def exporting() -> Iterator[None]:
    """Marks an export by the library itself. ONNX has no assertions, so the graph must not contain any."""
    global _exporting_here
    _exporting_here = True
    try:
        yield
    finally:
        _exporting_here = False


def is_traced(x: Any) -> bool:
    """True under torch.compile, torch.export, torch.jit.trace, make_fx, torch.fx.symbolic_trace and torch.func transforms."""
    return bool(
        isinstance(x, fx.Proxy)
        or torch.compiler.is_compiling()
        or torch._C._get_tracing_state() is not None
        or get_proxy_mode() is not None
        # vmap, grad, …: tensors without numbers of their own
        or torch._C._functorch.peek_interpreter_stack() is not None
    )


def wants_operator(x: Any) -> bool:
    """Whether one of partita's own operators (`torch.ops.partita`) may take the place of plain torch operations for this input.

    `torch.compile` takes an operator as one node of its graph. Plain operations are kept where others must be able to read
    the graph (`torch.export`, ONNX, `torch.jit.trace`, `make_fx`) and where more than one backward pass is taken through
    it (`torch.func`, forward-mode derivatives).
    """
    if torch.compiler.is_compiling():
        return not is_exporting()
    return not is_traced(x) and forward_ad._current_level < 0
