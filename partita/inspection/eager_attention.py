"""Attention that a model writes out: q·kᵀ, scale, mask, softmax, times v, followed from tensor to tensor.

This covers Hugging Face models with `attn_implementation="eager"`, and other models where `record` or a reader reports the
attention. Any other step (a cap on the scores, an extra column of scores, a write into the scores) ends the trail, so that only
attention that the model really computes is recorded or replaced.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from partita.inspection.calls import MASKED_BELOW

__all__ = ["EagerAttention", "Followed", "advice_on_eager", "is_hugging_face"]

_PACKAGES = ("transformers", "transformers_modules")  # the second holds code that is downloaded with a model
_PRODUCT = {"matmul", "__matmul__", "bmm"}
_TIMES = {"mul", "__mul__", "__rmul__", "__imul__", "mul_", "multiply"}
_OVER = {"div", "__truediv__", "__itruediv__", "div_", "divide", "true_divide"}
_PLUS = {"add", "__add__", "__radd__", "__iadd__", "add_"}
_MINUS = {"sub", "__sub__", "__isub__", "sub_", "subtract"}
_SAME = {"to", "type", "type_as", "float", "half", "bfloat16", "double", "contiguous", "clone", "dropout"}
_RESHAPED = {"view", "reshape", "flatten", "unflatten", "squeeze", "unsqueeze"}  # these keep the order of the numbers
_SOFTMAX = {"softmax", "special_softmax"}
# Never named as the step that ended a trail.
_NO_STEP = {"__get__", "__getitem__", "transpose", "permute", "expand", "detach", *_RESHAPED}


@dataclass(frozen=True, eq=False)
class _Trail:
    """What a tensor is known to be: `scale·q kᵀ + mask`, or the softmax of that."""

    query: Tensor
    key: Tensor
    scale: float = 1.0
    mask: Tensor | None = None
    weights: bool = False
    version: int = 0  # of the tensor


@dataclass(frozen=True, eq=False)
class Followed:
    """An attention that was followed to its last product.

    Attributes:
        arguments: query, key, value, scale and attn_mask, as `F.scaled_dot_product_attention` takes them.
        order: `out.permute(order)` of the product's result is `(…, queries, value_dim)`.
    """

    arguments: dict[str, Any]
    order: tuple[int, ...]


class EagerAttention:
    """Follows the tensors of one run.

    Attributes:
        ended: name of the last torch function that was applied to a followed tensor and could not be followed. May be empty.
    """

    def __init__(self) -> None:
        self._trails: Any = WeakTensorKeyDictionary()
        self.ended = ""

    def follow(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> Followed | None:
        """The attention if this call is the last of the five steps, else None.

        Args:
            name: of the function or method of torch.
            args: its arguments.
            kwargs: its keyword arguments.
            out: what it returned.
        """
        if args and isinstance(args[0], Tensor) and args[0].is_inference() and _writes(name):
            kept, self._trails = self._trails, WeakTensorKeyDictionary()  # no version counters: forget the rest
            if isinstance(out, Tensor) and (trail := kept.get(args[0])) is not None:
                self._keep(out, _next(trail, *_normal(name, args, kwargs), kwargs, out))
            return None
        if not isinstance(out, Tensor):
            return None
        if name == "einsum":
            return self._follow_einsum(args, out)
        name, args = _normal(name, args, kwargs)
        if not args or not isinstance(args[0], Tensor):
            return None
        second = args[1] if len(args) > 1 else None
        trail = self._trail_of(args[0], writes=int(out is args[0]))
        if trail is None and name in _PLUS | _TIMES and isinstance(second, Tensor):  # mask + scores
            args, trail = (second, args[0], *args[2:]), self._trail_of(second)
        if trail is not None and trail.weights and (product := _last_product(trail, name, args)) is not None:
            return product
        found = None if trail is not None and trail.weights else _first_product(name, args, kwargs)
        if found is None and trail is not None:
            found = _next(trail, name, args, kwargs, out)
            self.ended = name if found is None and name not in _NO_STEP else self.ended
        self._keep(out, found)
        return None

    def _follow_einsum(self, args: tuple[Any, ...], out: Tensor) -> Followed | None:
        """`torch.einsum` of two tensors, in either order, as a first or a last product."""
        operands = args[1] if len(args) == 2 and isinstance(args[1], list | tuple) else args[1:]
        inputs, arrow, right = str(args[0]).replace(" ", "").partition("->")
        letters = inputs.split(",")
        if not arrow or "." in inputs or len(letters) != 2 or len(operands) != 2:
            return None
        for (a, x), (b, y) in itertools.permutations(zip(letters, operands)):
            trail = self._trail_of(x)
            if trail is None or not trail.weights:
                continue
            if (orders := _value_orders(a, b, right)) is not None:
                return _followed(trail, y.permute(orders[0]), orders[1])
            self.ended = "einsum"
        for (a, x), (b, y) in itertools.permutations(zip(letters, operands)):
            if (orders := _score_orders(a, b, right)) is not None:
                self._keep(out, _Trail(x.permute(orders[0]), y.permute(orders[1])))
                break
        return None

    def _keep(self, out: Tensor, trail: _Trail | None) -> None:
        if trail is not None:
            self._trails[out] = replace(trail, version=_version(out))

    def _trail_of(self, tensor: Tensor, writes: int = 0) -> _Trail | None:
        """What the tensor holds, if only this step has written into it (`writes` times, 0 or 1)."""
        trail: _Trail | None = self._trails.get(tensor)
        return trail if trail is not None and trail.version + writes == _version(tensor) else None


def _version(tensor: Tensor) -> int:
    """The tensor's version counter, which counts writes into it and its views. Inference tensors have none."""
    return 0 if tensor.is_inference() else tensor._version


def _writes(name: str) -> bool:
    return name == "__setitem__" or name.endswith("_") != name.startswith("__") or name[:3] == "__i"


def _normal(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[str, tuple[Any, ...]]:
    """`torch.where` rewritten as `masked_fill` of the scores, and keyword arguments put in their places."""
    if name == "where" and len(args) == 3 and not kwargs:
        chosen, yes, no = args if not _is_mask(args[1]) else (args[1], args[0], args[2])  # x.where(mask, number)
        if isinstance(chosen, Tensor) and chosen.dtype == torch.bool:
            if _number(no) is not None:
                return "masked_fill", (yes, ~chosen, no)
            if _number(yes) is not None:
                return "masked_fill", (no, chosen, yes)
    if name in ("masked_fill", "masked_fill_"):
        return name, (*args, *(kwargs[k] for k in ("mask", "value") if k in kwargs))
    if name in _PRODUCT | _SOFTMAX | {"baddbmm"}:
        return name, (*args, *(kwargs[k] for k in ("input", "other", "mat2", "batch1", "batch2") if k in kwargs))
    return name, args


def _is_mask(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dtype == torch.bool


def _first_product(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Trail | None:
    """The scores, if these two tensors are multiplied as queries and keys are."""
    second = args[1] if len(args) > 1 else None
    if not isinstance(second, Tensor):
        return None
    if name in _PRODUCT and args[0].dim() == second.dim() >= 2:
        return _Trail(args[0], second.mT)
    if name == "baddbmm" and len(args) == 3 and isinstance(args[2], Tensor):
        alpha, beta = kwargs.get("alpha", 1), kwargs.get("beta", 1)
        return _Trail(second, args[2].mT, scale=float(alpha), mask=None if beta == 0 else beta * args[0])
    return None


def _last_product(trail: _Trail, name: str, args: tuple[Any, ...]) -> Followed | None:
    """Weights times values."""
    value = args[1] if len(args) > 1 else None
    if name not in _PRODUCT or not isinstance(value, Tensor) or value.dim() != args[0].dim():
        return None
    return _followed(trail, value, tuple(range(value.dim())))


def _followed(trail: _Trail, value: Tensor, order: tuple[int, ...]) -> Followed:
    held = {"query": trail.query, "key": trail.key, "value": value, "scale": trail.scale, "attn_mask": trail.mask}
    return Followed(held, order)


def _value_orders(weights: str, values: str, out: str) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """How to permute values to `(…, keys, dim)` and the product to `(…, queries, dim)`; None for another product."""
    new = [c for c in values if c not in weights]
    if len(weights) < 2 or len(new) != 1:
        return None
    *lead, query, key = list(weights)
    asked, made = [*lead, key, *new], [*lead, query, *new]
    if sorted(asked) != sorted(values) or sorted(made) != sorted(out):
        return None
    return tuple(values.index(c) for c in asked), tuple(out.index(c) for c in made)


def _score_orders(queries: str, keys: str, out: str) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """How to permute queries and keys to `(…, tokens, dim)`, if their product is `(…, queries, keys)`; else None."""
    summed = [c for c in queries if c in keys and c not in out]
    if len(summed) != 1 or len(out) < 2 or len(out) != len(queries) or len(out) != len(keys):
        return None
    *lead, query, key = list(out)
    asked = [*lead, query, *summed], [*lead, key, *summed]
    if sorted(asked[0]) != sorted(queries) or sorted(asked[1]) != sorted(keys):
        return None
    return tuple(queries.index(c) for c in asked[0]), tuple(keys.index(c) for c in asked[1])


def _next(trail: _Trail, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], out: Tensor) -> _Trail | None:
    """What the result of a step is, if the step is followed. `args[0]` is the tensor of the trail."""
    first: Tensor = args[0]
    second: Any = args[1] if len(args) > 1 else None
    if name in _RESHAPED and out.shape[-2:] == first.shape[-2:]:
        return _reshaped(trail, first, out)
    if out.shape != first.shape:
        return None
    if name in _SAME:
        return trail
    if trail.weights:
        return None
    if name in _TIMES | _OVER and (factor := _number(second)) is not None and not kwargs:
        factor = factor if name in _TIMES else 1 / factor if factor else torch.nan
        mask = None if trail.mask is None else trail.mask * factor
        return replace(trail, scale=trail.scale * factor, mask=mask)
    if name in _PLUS | _MINUS and isinstance(second, Tensor) and second.dim() and not kwargs:
        added = second if name in _PLUS else -second
        return replace(trail, mask=added if trail.mask is None else trail.mask + added)
    if name in ("masked_fill", "masked_fill_") and len(args) == 3 and (fill := _number(args[2])) is not None:
        if fill >= MASKED_BELOW:
            return None
        mask = torch.zeros((), dtype=first.dtype, device=first.device) if trail.mask is None else trail.mask
        return replace(
            trail, mask=mask.expand(torch.broadcast_shapes(mask.shape, second.shape)).masked_fill(second, -torch.inf)
        )
    if name in _SOFTMAX and kwargs.get("dim", second) in (-1, first.dim() - 1):
        return replace(trail, weights=True)
    return None


def _reshaped(trail: _Trail, first: Tensor, out: Tensor) -> _Trail | None:
    """Split or join the leading axes, including those of query, key and mask."""
    lead, new = first.shape[:-2], out.shape[:-2]

    def moved(tensor: Tensor) -> Tensor:
        return tensor.expand(*lead, *tensor.shape[-2:]).reshape(*new, *tensor.shape[-2:])

    mask = trail.mask
    if mask is not None:
        mask = moved(mask.reshape((1,) * max(0, 2 - mask.dim()) + tuple(mask.shape)))
    return replace(trail, query=moved(trail.query), key=moved(trail.key), mask=mask)


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
            flex = 'Call model.set_attn_implementation("flex_attention") (torch ≥ 2.9), or use pa.inspect.record or readers=.'
            if not getattr(module, "_supports_sdpa", True):
                other = flex if getattr(module, "_supports_flex_attn", False) else "Use pa.inspect.record or readers=."
                return f'{type(module).__name__} has no "sdpa" attention. {other}'
            if getattr(module.config, "attn_logit_softcapping", None):
                return (
                    f'The model uses attn_implementation="{used}" and caps its scores, which "sdpa" does not do. {flex}'
                )
            return (
                f'The model uses attn_implementation="{used}". Call model.set_attn_implementation("sdpa"), or load it with '
                'attn_implementation="sdpa".'
            )
    return ""
