"""Whether a network is being traced: then checks of values, which are no part of its graph, are left out."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import get_proxy_mode

__all__ = ["is_traced"]


def is_traced(x: Any) -> bool:
    """True under torch.compile, torch.export, torch.jit.trace, make_fx and torch.fx.symbolic_trace."""
    return (
        isinstance(x, fx.Proxy)
        or torch.compiler.is_compiling()
        or torch.jit.is_tracing()
        or get_proxy_mode() is not None
    )
