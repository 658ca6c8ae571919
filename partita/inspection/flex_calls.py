"""Flex attention: calls of `torch.nn.attention.flex_attention` as an `AttentionCall`.

`flex_attention` is a Python function that passes its operator to torch.compile, which would trace our function modes. So, while
there are listeners, two globals of torch's module are replaced: the flag that makes it call the operator directly, and the
operator itself. The replacement switches our modes off, computes as torch would have, and then notifies the listeners. Models
that are already compiled run uncompiled meanwhile. The globals are restored when the last listener has left.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import flex_attention as torch_flex
from torch.overrides import TorchFunctionMode, _get_current_function_mode
from torch.overrides import _pop_mode_temporarily as _function_mode_aside

from partita.inspection.calls import AttentionCall
from partita.inspection.exchanged import Exchange, Listeners

__all__ = ["from_flex", "listening_to_flex", "set_aside"]

_OPERATOR, _DIRECT = "flex_attention_hop", "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG"
_NAMES = (
    *("query", "key", "value", "score_mod", "block_mask", "scale", "kernel_options"),
    *("score_mod_other_buffers", "mask_mod_other_buffers"),
)
Answer = Callable[[Callable[[], AttentionCall], Tensor], Tensor]


@dataclass(frozen=True, eq=False)
class _Listener:
    answer: Answer
    modes: tuple[TorchFunctionMode, ...]


_listeners: Listeners[_Listener] = Listeners()


@dataclass(frozen=True, eq=False)
class _Modified:
    """`AttentionCall.modify` of a score_mod and a mask_mod, which are written for one score and its four indices.

    A score_mod masks with −∞, or with the least number of the dtype in which it runs. It may shift or multiply all scores, so
    other large negative numbers are no masks.
    """

    score_mod: Callable[..., Tensor] | None
    mask_mod: Callable[..., Tensor] | None
    dtype: torch.dtype

    @property
    def only_masks(self) -> bool:
        """Whether scores that are not masked stay unchanged."""
        return self.score_mod is None

    def __call__(self, scores: Tensor, element: int, heads: Tensor, rows: Tensor, keys: Tensor) -> Tensor:
        from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex  # to index tables

        number = torch.tensor(element, device=scores.device)
        places = [t.expand(scores.shape) for t in (number, heads, rows, keys)]
        with TransformGetItemToIndex():
            out = scores if self.score_mod is None else _over_all(self.score_mod)(scores, *places)
            seen = None if self.mask_mod is None else _over_all(self.mask_mod)(*places)
        out = out.to(scores.dtype).masked_fill(out <= torch.finfo(self.dtype).min / 2, -torch.inf)
        return out if seen is None else torch.where(seen, out, -torch.inf)


def _over_all(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A function of one score and (batch, head, query, key), vectorised over all heads, queries and keys."""
    for _ in range(3):
        function = torch.vmap(function)
    return function


def from_flex(arguments: dict[str, Any]) -> AttentionCall:
    """The named arguments of flex attention's operator as a call."""
    query, key, value = (arguments[name] for name in _NAMES[:3])
    score_mod, mask_mod = arguments["score_mod"], arguments["block_mask"][-1]
    if key.shape[0] != query.shape[0]:
        key, value = (t.expand(query.shape[0], *t.shape[1:]) for t in (key, value))
    given = []
    for function, nothing, extra in ((score_mod, "_identity", _NAMES[7]), (mask_mod, "noop_mask", _NAMES[8])):
        more = arguments.get(extra, ())
        plain = function is getattr(torch_flex, nothing, None)
        given.append(None if plain else (lambda *args, f=function, m=more: f(*args, *m)))
    dtype = torch.promote_types(query.dtype, torch.float32)
    modify = None if given == [None, None] else _Modified(given[0], given[1], dtype)
    return AttentionCall(query, key, value, float(arguments["scale"]), modify=modify)


def _compute(*args: Any, **kwargs: Any) -> Any:
    """Computes as torch would: through its compiler, unless the caller has switched that off."""
    operator = _exchange.originals[_OPERATOR]
    if _exchange.originals[_DIRECT]:
        return operator(*args, **kwargs)

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return operator(*args, **kwargs)

    with torch.compiler.set_stance("default"):
        return torch.compile(wrapped, backend="eager", fullgraph=True)(*args, **kwargs)


def _in_its_place(*args: Any, **kwargs: Any) -> Any:
    """The replacement of the operator."""
    if torch.compiler.is_dynamo_compiling():  # not `is_compiling`, which another thread may have set
        return _exchange.originals[_OPERATOR](*args, **kwargs)
    listeners = list(_listeners.all)
    with set_aside([mode for listener in listeners for mode in listener.modes]):
        out, *rest = _compute(*args, **kwargs)
        named = {**dict(zip(_NAMES, args)), **kwargs}
        for listener in reversed(listeners):
            out = listener.answer(lambda: from_flex(named), out)
    return out, *rest


@contextmanager
def set_aside(modes: Sequence[TorchFunctionMode]) -> Iterator[None]:
    """Inside the `with`, these modes are off, unless other modes were entered after them.

    Args:
        modes: modes whose handlers would slow down every operation.
    """
    with ExitStack() as stack:
        while any(_get_current_function_mode() is mode for mode in modes):
            stack.enter_context(_function_mode_aside())
        yield


@contextmanager
def listening_to_flex(answer: Answer, *modes: TorchFunctionMode) -> Iterator[None]:
    """Inside the `with`, what flex attention returns in this thread is `answer(call, out)`.

    Args:
        answer: takes a function that makes the `AttentionCall`, and the output; returns the output to use.
        modes: switched off while flex attention runs.
    """
    with _exchange.held(), _listeners.listed(_Listener(answer, modes)):
        yield


class _Uncompiled(Exchange):
    """Models that are already compiled run uncompiled meanwhile."""

    _stance: Any = None

    def put(self) -> None:
        super().put()
        if "torch._dynamo" in sys.modules:  # else nothing has been compiled
            self._stance = torch.compiler.set_stance("force_eager")

    def put_back(self) -> None:
        super().put_back()
        if self._stance is not None:
            self._stance.__exit__(None, None, None)
            self._stance = None


_exchange = _Uncompiled(torch_flex, {_OPERATOR: _in_its_place, _DIRECT: True})  # torch 2.9 and later has both
