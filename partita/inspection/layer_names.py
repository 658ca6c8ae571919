"""Which layer of a model is running: module paths, from global hooks, which leave torch's fused paths alone."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.nn.modules import module as torch_module
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

__all__ = ["LayerNames", "names_cross_attention"]

_CROSSING = re.compile(r"(^|[._])(cross_?att|enc_?dec_?att|src_att)|(^|\.)encoder_attn($|[.#])", re.IGNORECASE)


def names_cross_attention(layer: str) -> bool:
    """Whether models name a cross-attention like this, as in `decoder.layers.0.encoder_attn`, `h.0.crossattention` or
    `EncDecAttention`.

    Args:
        layer: the module path.
    """
    return _CROSSING.search(layer) is not None


@dataclass(eq=False)
class _Frame:
    module: nn.Module
    name: str | None  # None: not a module of the model
    calls: int = 0
    undo: Callable[[], None] | None = None


class LayerNames:
    """Which layer of the model is running, in the thread that asked: module paths, from global module hooks.

    `entering` and `leaving` are called for every module of that thread; what `entering` returns is undone on the way out.
    """

    def __init__(
        self,
        model: nn.Module | None,
        *,
        entering: Callable[[nn.Module], Callable[[], None] | None] | None = None,
        leaving: Callable[[nn.Module, str | None, tuple[Any, ...], dict[str, Any], Any], None] | None = None,
    ) -> None:
        self._names = {} if model is None else {id(m): name for name, m in model.named_modules()}
        self._anywhere, self._root = model is None, type(model).__name__
        self._entering, self._leaving = entering, leaving
        self._frames: list[_Frame] = []
        self._outside_calls = 0
        self._thread = threading.get_ident()

    def can_name(self, layer: str) -> bool:
        """Whether `next_name` may give this name to an attention of the model.

        Args:
            layer: the name.
        """
        path = re.sub(r"#\d+$", "", layer)
        # "attention": outside modules; "self_attn": in a fused encoder layer that is the model itself
        known = {"attention", "self_attn", *self.paths}
        return path in known or path.removesuffix(".self_attn") in known

    def __enter__(self) -> LayerNames:
        self._handles = [
            register_module_forward_pre_hook(self._enter),
            register_module_forward_hook(self._leave, with_kwargs=True, always_call=True),
        ]
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()
            # torch forgets this entry, and warns of global hooks at every later call of a compiled module
            torch_module._global_forward_hooks_with_kwargs.pop(handle.id, None)
        while self._frames:  # an interrupt left some open
            self._close(self._frames.pop())

    @property
    def paths(self) -> tuple[str, ...]:
        """The paths of all modules of the model; its class for the model itself."""
        return tuple(name or self._root for name in self._names.values())

    @property
    def innermost(self) -> nn.Module | None:
        return self._frames[-1].module if self._frames else None

    @property
    def innermost_name(self) -> str | None:
        """The path of the running module; None outside the model."""
        return self._frames[-1].name if self._frames else None

    def is_inside(self, kind: Callable[[nn.Module], bool]) -> bool:
        """Whether the running module, or one around it, is of a kind."""
        return any(kind(frame.module) for frame in reversed(self._frames))

    @property
    def frame(self) -> object:
        """An object that identifies the running call of a module; None outside all modules."""
        return self._frames[-1] if self._frames else None

    def is_running(self, frame: object) -> bool:
        """Whether a call of a module, as `frame` identifies it, is still running. Always True for None."""
        return frame is None or any(f is frame for f in self._frames)

    def around(self, kind: Callable[[str | None], bool]) -> tuple[object, nn.Module] | None:
        """The innermost running call of a module whose path is of a kind, and the module."""
        return next(((f, f.module) for f in reversed(self._frames) if kind(f.name)), None)

    def next_name(self, suffix: str = "", within: object = None) -> str | None:
        """The name of the attention that is being computed: its layer's path, with `#1`, `#2` … for the second, third … of a pass.

        None if the running module is not part of the model.

        Args:
            suffix: appended to the path.
            within: the running call whose attention it is, from `around`; by default the innermost one in the model.
        """
        frame = next((f for f in reversed(self._frames) if f.name is not None and within in (None, f)), None)
        if frame is None:
            if self._frames and not self._anywhere:
                return None
            count, self._outside_calls = self._outside_calls, self._outside_calls + 1
            return "attention" + (f"#{count}" if count else "")
        count, frame.calls = frame.calls, frame.calls + 1
        name = f"{frame.name}{suffix}".lstrip(".") or type(frame.module).__name__
        return name + (f"#{count}" if count else "")

    def _enter(self, module: nn.Module, _args: tuple[Any, ...]) -> None:
        if threading.get_ident() != self._thread:
            return
        undo = self._entering(module) if self._entering else None
        self._frames.append(_Frame(module, self._names.get(id(module)), undo=undo))

    def _leave(self, module: nn.Module, args: tuple[Any, ...], *rest: Any) -> None:
        """`rest` is (kwargs, output), or the output alone when forward raised."""
        if threading.get_ident() != self._thread or not any(f.module is module for f in self._frames):
            return
        try:
            if self._leaving is not None and len(rest) == 2:
                self._leaving(module, self._names.get(id(module)), args, rest[0], rest[1])
        finally:
            while True:
                frame = self._frames.pop()
                self._close(frame)
                if frame.module is module:
                    break

    @staticmethod
    def _close(frame: _Frame) -> None:
        if frame.undo is not None:
            frame.undo()
