"""Torch's fused encoder layer and fused multi-head attention, seen where torch's layers call them.

Layers call these two operators as attributes of torch, which are replaced while there are listeners. (A dispatch mode would see
the operators too, but it changes what others compute: in inference mode `linear` takes another path, and under autocast the
products inside a fused layer are not cast.)
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch

from partita.inspection.exchanged import Exchange, listed

__all__ = ["listening_to_fused"]

Listener = Callable[[Any, tuple[Any, ...], dict[str, Any]], None]
_listeners: ContextVar[tuple[list[Listener], ...]] = ContextVar("partita_fused_listeners", default=())


def _in_its_place(name: str) -> Callable[..., Any]:
    operator = getattr(torch.ops.aten, name).default

    def call(*args: Any, **kwargs: Any) -> Any:
        for listener in itertools.chain(*_listeners.get()):
            listener(operator, args, kwargs)
        return _exchange.originals[name](*args, **kwargs)

    return call


_NAMES = ("_transformer_encoder_layer_fwd", "_native_multi_head_attention")
_exchange = Exchange(torch, {name: _in_its_place(name) for name in _NAMES})


@contextmanager
def listening_to_fused(listener: Listener) -> Iterator[None]:
    """Inside the `with`, `listener(operator, args, kwargs)` is called before each fused layer or attention of this thread.

    Args:
        listener: the function.
    """
    with _exchange.held(), listed(listener, _listeners):
        yield
