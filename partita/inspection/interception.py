"""Observes every attention that a model computes while it runs, without changing a single bit of the results.

A *function mode* sees `F.scaled_dot_product_attention`, `F.multi_head_attention_forward` and the fused operators of torch's layers
with their arguments, before anything is cast or split into products. Its presence alone would make these layers leave their fused
path, so while they run it is hidden from their check. *Module hooks* say which layer is running, and pass on the arguments of
`nn.MultiheadAttention`; they are global, because a hook on a layer would also switch off its fused path. Inside Hugging Face
modules the function mode also follows attention that is written out, "eager" (eager_attention.py). Flex attention is handled in
flex_calls.py, scripted code in scripted_calls.py. A dispatch mode around the model would see as much, but it changes results in
inference mode and under autocast.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from fnmatch import fnmatchcase
from inspect import signature
from typing import Any, Protocol, overload

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode, _get_current_function_mode, _pop_mode_temporarily

from partita.arithmetic.arguments import is_number, require_count, require_flag
from partita.errors import DomainError, ShapeError, UnsupportedError
from partita.inspection.calls import (
    AttentionCall,
    from_cast_sdpa,
    from_encoder_layer,
    from_multi_head,
    from_multi_head_module,
    from_sdpa,
)
from partita.inspection.eager_attention import EagerAttention, is_hugging_face
from partita.inspection.exchanged import Exchange, Listeners
from partita.inspection.flex_calls import listening_to_flex, set_aside
from partita.inspection.layer_names import LayerNames
from partita.inspection.scripted_calls import scripts_called_from_python
from partita.inspection.told_attention import Told, require_output
from partita.kernels.plain_arithmetic import plain_arithmetic

__all__ = [
    "Reader",
    "listening",
    "multi_head_arguments",
    "read_with",
    "reader_of",
    "record",
    "require_readers",
    "watching",
]

Reader = Callable[[nn.Module, tuple[Any, ...], dict[str, Any], Any], Mapping[str, Any] | Iterable[Mapping[str, Any]]]

_SDPA, _FUSED_LAYER = "scaled_dot_product_attention", "_transformer_encoder_layer_fwd"
_FUSED_MULTI_HEAD = "_native_multi_head_attention"
_FUSED = {
    name: getattr(torch.ops.aten, name).default
    for name in (
        _FUSED_LAYER,
        _FUSED_MULTI_HEAD,
        "_scaled_dot_product_flash_attention_for_cpu",
        "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_cudnn_attention",
        "_scaled_dot_product_fused_attention_overrideable",
    )
    if hasattr(torch.ops.aten, name)
}
_WITH_FAST_PATH = (nn.MultiheadAttention, nn.TransformerEncoderLayer, nn.TransformerEncoder)
_MULTI_HEAD_NAMES = tuple(signature(functional.multi_head_attention_forward).parameters)
_hidden_modes: list[TorchFunctionMode] = []


class _Listener(Protocol):
    """Receives attention reported by `record`, and may replace its output."""

    def hear(self, calls: Callable[[], Iterable[AttentionCall]], output: Tensor | None) -> Tensor | None: ...


_listeners: Listeners[_Listener] = Listeners()


def multi_head_arguments(args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of `F.multi_head_attention_forward` by name."""
    return {**dict(zip(_MULTI_HEAD_NAMES, args)), **kwargs}


def _is_multi_head(module: nn.Module) -> bool:
    """Whether the module runs the forward of `nn.MultiheadAttention`, and not one of its own."""
    own = getattr(type(module), "forward", None)  # scripted classes have none
    return own is nn.MultiheadAttention.forward and "forward" not in vars(module)


class _FunctionMode(TorchFunctionMode):
    def __init__(self, watch: _Watch) -> None:
        super().__init__()
        self.watch = watch

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, watch = kwargs or {}, self.watch
        name = getattr(func, "__name__", "").removesuffix(".default")  # also of torch.ops.aten.…
        watch.fused_multi_head |= name == _FUSED_MULTI_HEAD
        if watch.is_inside_multi_head():
            return func(*args, **kwargs)
        if name == _SDPA:
            watch.see(lambda: from_cast_sdpa(args, kwargs))
        elif name in _FUSED:
            watch.see_operator(name, args, kwargs)
        elif func is functional.multi_head_attention_forward:
            watch.see(lambda: [from_multi_head(multi_head_arguments(args, kwargs))])
        else:
            if func is functional.embedding:
                ids = args[0] if args else kwargs.get("input")
                watch.require_integers(ids)
                watch.see_tokens(ids, args[1] if len(args) > 1 else kwargs.get("weight"))
            out = func(*args, **kwargs)
            watch.see_eager(func, args, kwargs, out)
            return out
        with watch.looking_away():  # its operators have been seen
            return func(*args, **kwargs)


@contextmanager
def _hidden(mode: TorchFunctionMode) -> Iterator[None]:
    """While it lasts, torch's layers, when they ask whether a function mode forbids their fused path, do not count this one."""
    _hidden_modes.append(mode)
    try:
        with _hiding.held():
            yield
    finally:
        _hidden_modes.remove(mode)


def _any_but_hidden(args: Iterable[Any]) -> bool:
    if _get_current_function_mode() not in _hidden_modes:
        found: bool = _hiding.originals["has_torch_function"](args)
        return found
    with _pop_mode_temporarily():
        return _any_but_hidden(args)


_hiding = Exchange(torch.overrides, {"has_torch_function": _any_but_hidden})


class _Watch:
    """The watchers together; `on_call(name, call)` is called once for every attention."""

    def __init__(
        self,
        model: nn.Module | None,
        on_call: Callable[[str, AttentionCall], None],
        readers: Mapping[str, Reader],
        on_tokens: Callable[[Tensor, int], None] | None = None,
    ) -> None:
        self.on_call, self.readers, self.away = on_call, dict(readers), 0
        self.on_tokens = on_tokens
        self.names = LayerNames(model, entering=self._entering, leaving=self._leaving)
        self.function_mode: TorchFunctionMode = _FunctionMode(self)
        self.fused_multi_head = False
        self.eager, self.told = EagerAttention(), Told(self.names)

    @contextmanager
    def looking_away(self) -> Iterator[None]:
        self.away += 1
        try:
            yield
        finally:
            self.away -= 1

    def see(self, calls: Callable[[], Iterable[AttentionCall]], suffix: str = "") -> None:
        if self.away or (name := self.names.next_name(suffix)) is None:
            return
        with self.looking_away(), set_aside([self.function_mode]), torch.no_grad():
            for call in calls():  # projected as the model does it, but not read under its autocast
                with plain_arithmetic(call.queries.device.type):
                    self.on_call(name, call.in_layer(name))

    def see_eager(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        """A function called by a Hugging Face model: the last of those that make up its attention is recorded."""
        if self.away or not self.names.is_inside(is_hugging_face) or self.names.around(self._has_reader):
            return
        with self.looking_away(), torch.no_grad():
            found = self.eager.follow(getattr(func, "__name__", ""), args, kwargs, out)
            if found is None or out.dim() != 4 or self.told.expected(out, found.order) is not None:
                return
            self.told.add_found(out, found.order)
        self.see(lambda: from_sdpa(**found.arguments))

    def hear(self, calls: Callable[[], Iterable[AttentionCall]], output: Tensor | None) -> Tensor | None:
        """Records an attention that `record` reports, unless it was already followed and recorded."""
        if not self.away and self.names.is_inside(is_hugging_face):
            with self.looking_away(), torch.no_grad():
                made = list(calls())
                if any(self.told.was_found(call) for call in made):
                    return output
                for call in made:
                    self.told.expect(None, call)
        self.see(calls)
        return output

    def see_flex(self, call: Callable[[], AttentionCall], out: Tensor) -> Tensor:
        self.see(lambda: [call()])
        return out

    def see_tokens(self, ids: Any, table: Any) -> None:
        """Passes on the ids that reach an embedding, from which equal tokens are recognised."""
        if self.on_tokens is not None and isinstance(ids, Tensor) and isinstance(table, Tensor) and not self.away:
            with self.looking_away(), torch.no_grad():
                self.on_tokens(ids, len(table))

    def require_integers(self, ids: Any) -> None:
        """Raises an UnsupportedError for token ids that are not integers."""
        if isinstance(ids, Tensor) and (ids.dtype.is_floating_point or ids.dtype == torch.bool):
            raise UnsupportedError(
                f"the token ids that reach the embedding {self.names.innermost_name or ''!r} are {_name_of(ids.dtype)}; "
                "expected integers. Use ids.long(); save arrays with ids.astype('int64')."
            )

    def is_inside_multi_head(self) -> bool:
        """Whether `nn.MultiheadAttention` itself is running: its arguments are recorded when it returns."""
        innermost = self.names.innermost
        return innermost is not None and _is_multi_head(innermost)

    def see_operator(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A fused operator is called."""
        named = {**dict(zip((a.name for a in _FUSED[name]._schema.arguments), args)), **kwargs}
        if name == _FUSED_LAYER:
            self.see(lambda: from_encoder_layer(named), suffix=".self_attn")
        elif name == _FUSED_MULTI_HEAD:  # where torch calls it, query, key and value are the same
            layer = {**named, "src": named["query"], "num_heads": named["num_head"], "norm_first": False}
            self.see(lambda: from_encoder_layer(layer))
        else:
            mask = named.get("attn_mask", named.get("attn_bias"))
            rest = {name: named[name] for name in ("is_causal", "scale") if name in named}
            self.see(lambda: from_sdpa(named["query"], named["key"], named["value"], mask, **rest))

    def _entering(self, module: nn.Module) -> Callable[[], None] | None:
        if not isinstance(module, _WITH_FAST_PATH):
            return None
        hidden = ExitStack()
        hidden.enter_context(_hidden(self.function_mode))
        return hidden.close

    def _has_reader(self, name: str | None) -> bool:
        return reader_of(self.readers, name) is not None

    def _leaving(
        self, module: nn.Module, name: str | None, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> None:
        reader = reader_of(self.readers, name)
        if reader is not None:
            with self.looking_away():
                told = list(read_with(reader, module, args, kwargs, output))
            for call in told:
                self.see(lambda call=call: [call])  # type: ignore[misc]
        elif isinstance(module, nn.MultiheadAttention) and _is_multi_head(module):
            fused, self.fused_multi_head = self.fused_multi_head, False
            self.see(lambda: from_multi_head_module(module, args, kwargs, fused=fused))


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def reader_of(readers: Mapping[str, Reader], name: str | None) -> Reader | None:
    """The reader of the module with this path, if it has one."""
    return None if name is None else next((r for p, r in readers.items() if fnmatchcase(name, p)), None)


def read_with(
    reader: Reader, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
) -> Iterator[AttentionCall]:
    """The attentions that a reader reports after its module has run."""
    allowed = ("query", "key", "value", "attn_mask", "is_causal", "scale", "enable_gqa", "window", "slopes")
    told = reader(module, args, kwargs, output)
    several = [told] if isinstance(told, Mapping) else list(told) if isinstance(told, Iterable) else [told]
    for given in several:
        if not isinstance(given, Mapping):
            raise UnsupportedError(
                f"a reader returned {'' if given is told else 'a list with '}{type(given).__name__}; expected a dict with query, "
                "key and value, or a list of such dicts."
            )
        if not set(given) <= set(allowed) or not {"query", "key", "value"} <= set(given):
            raise UnsupportedError(
                f"a reader returned {sorted(given)}; expected query, key, value and optionally {', '.join(allowed[3:])}."
            )
        yield from _reported("a reader", **given)


def _reported(
    who: str,
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    is_causal: Any = False,
    scale: Any = None,
    enable_gqa: Any = False,
    window: Any = None,
    slopes: Any = None,
) -> list[AttentionCall]:
    """What `record` or a reader reports, as calls. The arguments are checked here, because torch never sees them."""
    held, extra = {"query": query, "key": key, "value": value}, {"attn_mask": attn_mask, "slopes": slopes}
    for name, given in (held | {name: tensor for name, tensor in extra.items() if tensor is not None}).items():
        if not isinstance(given, Tensor):
            raise UnsupportedError(f"{name} is of type {type(given).__name__}; expected a tensor.")
        if given.is_complex() or (name != "attn_mask" and given.dtype == torch.bool):
            raise UnsupportedError(f"{name} is {_name_of(given.dtype)}; expected real numbers.")
    if slopes is not None and not bool(torch.isfinite(slopes).all()):
        raise DomainError("slopes contain NaN or infinity; expected finite numbers, one per head.")
    is_causal, enable_gqa, scale, window = (
        x.item() if getattr(x, "ndim", 1) == 0 else x for x in (is_causal, enable_gqa, scale, window)
    )
    causal, grouped = require_flag("is_causal", is_causal), require_flag("enable_gqa", enable_gqa)
    if scale is not None and not (is_number(scale) and abs(scale) <= sys.float_info.max):
        raise DomainError(f"scale is {scale!r:.60}; expected a finite number, or None for 1/√dim.")
    if window is not None:  # a query sees the keys j with |i − j| < window
        window = require_count("window", window)
    nested = any(t.is_nested for t in held.values())
    sizes = [() if nested else tuple(t.shape) for t in held.values()]
    made: list[AttentionCall] = []
    reason: RuntimeError | None = None
    if nested or (min(map(len, sizes)) > 1 and sizes[0][-1] == sizes[1][-1] and sizes[1][-2] == sizes[2][-2]):
        try:
            made = list(from_sdpa(query, key, value, attn_mask, 0.0, causal, scale, grouped, window, slopes))
        except RuntimeError as problem:  # leading axes that do not broadcast, for example
            reason = problem
    if not made:
        raise ShapeError(
            f"{who} got query {sizes[0]}, key {sizes[1]} and value {sizes[2]}; expected (…, heads, queries, dim), "
            "(…, heads, keys, dim) and (…, heads, keys, value_dim). For fewer key heads than query heads use enable_gqa=True."
        ) from reason
    if any(call.heads % max(1, call.keys.shape[1]) for call in made):
        raise ShapeError(
            f"{who} got query {sizes[0]} and key {sizes[1]}; with enable_gqa the key heads must divide the query heads."
        )
    return made


def require_readers(readers: Any, model: nn.Module | None) -> Mapping[str, Reader]:
    """The readers, checked; an empty dict for None.

    Args:
        readers: functions by pattern.
        model: whose modules they read; None for any.

    Raises:
        UnsupportedError: readers is not a dict of functions, or a pattern matches no module.
    """
    readers = {} if readers is None else readers
    if not isinstance(readers, Mapping) or not all(isinstance(p, str) and callable(r) for p, r in readers.items()):
        raise UnsupportedError(
            f"readers is {readers!r}; expected {{pattern: f}}, where f(module, args, kwargs, output) returns query, key and value."
        )
    paths = [] if model is None else [path for path, _ in model.named_modules()]
    for pattern in readers if paths else ():
        if not any(fnmatchcase(path, pattern) for path in paths):
            some = ", ".join(path or "'' (the model itself)" for path in paths[:8]) + (", …" if len(paths) > 8 else "")
            raise UnsupportedError(f"the pattern {pattern!r} of readers matches no module; the modules are {some}.")
    return readers


@contextmanager
def watching(
    model: nn.Module | None,
    on_call: Callable[[str, AttentionCall], None],
    readers: Mapping[str, Reader] | None = None,
    on_tokens: Callable[[Tensor, int], None] | None = None,
) -> Iterator[None]:
    """Inside the `with`, `on_call(layer, call)` is called for every attention that the model computes in this thread.

    Args:
        model: None for every attention that is computed.
        readers: for each module pattern a function that returns q, k and v of attention written out by hand.
        on_tokens: called with the ids that reach an embedding, and the number of rows of its table.
    """
    watch = _Watch(model, on_call, require_readers(readers, model), on_tokens)
    with (
        listening(watch),
        listening_to_flex(watch.see_flex, watch.function_mode),
        scripts_called_from_python(),
        watch.function_mode,
        watch.names,
    ):
        yield


@contextmanager
def listening(listener: _Listener) -> Iterator[None]:
    """Inside the `with`, `record` also calls `listener.hear(calls, output)`, and returns its result."""
    with _listeners.listed(listener):
        yield


@overload
def record(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    window: int | None = None,
    slopes: Tensor | None = None,
    output: Tensor,
) -> Tensor: ...


@overload
def record(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    window: int | None = None,
    slopes: Tensor | None = None,
    output: None = None,
) -> None: ...


def record(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    window: int | None = None,
    slopes: Tensor | None = None,
    output: Tensor | None = None,
) -> Tensor | None:
    """Report hand-written attention: one line beside `softmax(QKᵀ)V`.

    Inside `capture`, the attention is recorded. Inside `hardened`, its heads can be replaced: through `output`, or by following the
    tensors to the product with the values if record is called before it. Elsewhere record does nothing.
    Arguments and shapes are those of `F.scaled_dot_product_attention`.

    Args:
        query: `(…, heads, queries, dim)`.
        key: `(…, heads, keys, dim)`.
        value: `(…, heads, keys, value_dim)`.
        attn_mask: True where a key may be attended to, or numbers added to the scores; broadcasts to `(…, queries, keys)`.
        is_causal: query i sees keys 0 … i only.
        scale: factor of the scores; `1/√dim` by default.
        enable_gqa: several query heads share a key head.
        window: query i sees the keys j with `|i − j| < window` only.
        slopes: `(heads,)`, ALiBi: `−slope·|i − j|` is added to the scores.
        output: what the attention returned, `(…, heads, queries, value_dim)`.

    Returns:
        `output`, with the new outputs of heads that are hardened; None without `output`.

    Raises:
        ShapeError: an argument has the wrong shape. Like the others, raised only inside `capture` and `hardened`.
        UnsupportedError: an argument is not a tensor.
        DomainError: scale, window or a flag is invalid.

    >>> import partita as pa
    >>> with pa.inspect.capture() as heads:
    ...     pa.inspect.record(*[torch.ones(1, 2, 5, 4)] * 3)
    >>> len(heads)
    2
    """

    def calls() -> Iterator[AttentionCall]:
        for call in _reported("record", query, key, value, attn_mask, is_causal, scale, enable_gqa, window, slopes):
            if output is not None and not getattr(output, "is_nested", False):
                require_output(call, output)
            yield call

    for listener in reversed(_listeners.all):
        output = listener.hear(calls, output)
    return output
