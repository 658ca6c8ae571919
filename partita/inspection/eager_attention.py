"""Attention that a Hugging Face model writes out (`attn_implementation="eager"`): q·kᵀ, scale, mask, softmax, times v.

The five steps are followed from tensor to tensor. A step that is not one of them (a cap on the scores, an extra column of
scores) ends the trail, so that nothing is recorded that the model does not compute.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from partita.inspection.calls import MASKED_BELOW

__all__ = ["EagerAttention", "advice_on_eager", "is_hugging_face"]

_PACKAGES = ("transformers", "transformers_modules")  # the second holds code that is downloaded with a model
_PRODUCT = {"matmul", "__matmul__"}
_TIMES = {"mul", "__mul__", "__rmul__", "__imul__", "mul_", "multiply"}
_OVER = {"div", "__truediv__", "__itruediv__", "div_", "divide", "true_divide"}
_PLUS = {"add", "__add__", "__radd__", "__iadd__", "add_"}
_SAME = {"to", "type", "type_as", "float", "half", "bfloat16", "double", "contiguous", "clone", "dropout"}


@dataclass(frozen=True, eq=False)
class _Trail:
    """What a tensor is known to be: `scale·q kᵀ + mask`, or the softmax of that."""

    query: Tensor
    key: Tensor
    scale: float = 1.0
    mask: Tensor | None = None
    weights: bool = False


class EagerAttention:
    """Follows the tensors of one run."""

    def __init__(self) -> None:
        self._trails: Any = WeakTensorKeyDictionary()

    def follow(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> dict[str, Any] | None:
        """The arguments of `scaled_dot_product_attention` if this call was the last of the five steps, else None.

        Args:
            name: of the function or method of torch.
            args: its arguments.
            kwargs: its keyword arguments.
            out: what it returned.
        """
        if not isinstance(out, Tensor) or not args or not isinstance(args[0], Tensor):
            return None
        first, second = args[0], args[1] if len(args) > 1 else None
        trail: _Trail | None = self._trails.get(first)
        found: _Trail | None = None
        if name in _PRODUCT and isinstance(second, Tensor) and first.dim() == second.dim() == 4:
            if trail is not None and trail.weights:
                held = {"query": trail.query, "key": trail.key, "value": second, "scale": trail.scale}
                return {**held, "attn_mask": trail.mask}
            found = _Trail(first, second.mT)
        elif trail is not None:
            found = _next(trail, name, args, kwargs, out)
        if found is not None:
            self._trails[out] = found
        elif trail is not None and out is first:
            del self._trails[first]  # written over by a step that is not followed
        return None


def _next(trail: _Trail, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], out: Tensor) -> _Trail | None:
    """What the result of a step is, if the step is followed. `args[0]` is the tensor of the trail."""
    first: Tensor = args[0]
    second: Any = args[1] if len(args) > 1 else None
    if out.shape != first.shape:
        return None
    if name in _SAME:
        return trail
    if trail.weights:
        return None
    if name in _TIMES | _OVER and (factor := _number(second)) is not None and not kwargs:
        factor = factor if name in _TIMES else 1 / factor
        mask = None if trail.mask is None else trail.mask * factor
        return replace(trail, scale=trail.scale * factor, mask=mask)
    if name in _PLUS and isinstance(second, Tensor) and second.dim() and not kwargs:
        mask = second if trail.mask is None else trail.mask + second
        return replace(trail, mask=mask)
    if name in ("masked_fill", "masked_fill_") and len(args) == 3 and float(args[2]) < MASKED_BELOW:
        mask = torch.zeros(second.shape, dtype=first.dtype, device=first.device) if trail.mask is None else trail.mask
        return replace(trail, mask=mask.masked_fill(second, -torch.inf))
    if name == "softmax" and kwargs.get("dim", second) in (-1, first.dim() - 1):
        return replace(trail, weights=True)
    return None


def _number(value: Any) -> float | None:
    if isinstance(value, Tensor):
        return float(value) if value.numel() == 1 and value.dim() == 0 else None
    return float(value) if isinstance(value, int | float) else None


def is_hugging_face(module: nn.Module) -> bool:
    """Whether the module's class, or a base of it, is from the transformers package.

    Args:
        module: any module.
    """
    return any(base.__module__.split(".")[0] in _PACKAGES for base in type(module).__mro__)


def advice_on_eager(model: nn.Module | None) -> str:
    """What to do about a Hugging Face model whose attention is not "sdpa". Empty for other models.

    Args:
        model: the model, or None.
    """
    for module in () if model is None else model.modules():
        used = getattr(getattr(module, "config", None), "_attn_implementation", None)
        if isinstance(used, str) and used != "sdpa" and is_hugging_face(module):
            if not getattr(module, "_supports_sdpa", True):
                return f'{type(module).__name__} writes its attention out and has no "sdpa"; use pa.inspect.record or readers=.'
            return (
                f'The model uses attn_implementation="{used}". Call model.set_attn_implementation("sdpa"), or load it with '
                'attn_implementation="sdpa".'
            )
    return ""
