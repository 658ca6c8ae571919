"""Whether a module is being traced. Checks of numbers are then left out, because they cannot be part of its graph."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import get_proxy_mode

__all__ = ["is_exporting", "is_traced"]

# torch 2.6 has no question of its own for torch.export
is_exporting = getattr(torch.compiler, "is_exporting", torch.compiler.is_compiling)


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
