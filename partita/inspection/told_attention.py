"""Matches attention that is reported (by `record` or a reader) with the product that the follower finds.

They are the same attention if the product equals the output of the reported call. So no attention is counted twice, and a product
is replaced only if it is what was reported.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from partita.errors import ShapeError
from partita.inspection.calls import AttentionCall
from partita.inspection.layer_names import LayerNames

__all__ = ["Layout", "Told", "layout_of", "plain_layout", "require_output"]

_CLOSE = {torch.float64: 1e-8, torch.float32: 5e-3}  # of the output's root mean square; others are half precision
_CLOSE_IN_HALF = 3e-2


@dataclass(frozen=True, eq=False)
class Layout:
    """How a tensor holds the output of a call.

    Attributes:
        spread: converts the tensor to `(batch, heads, queries, value_dim)`.
        folded: converts it back.
    """

    spread: Callable[[Tensor], Tensor]
    folded: Callable[[Tensor], Tensor]

    def filled(self, like: Tensor, answers: Tensor) -> Tensor:
        """The output in this layout, with the strides of another tensor.

        Args:
            like: tensor whose dtype, shape and strides are used.
            answers: `(batch, heads, queries, value_dim)`.
        """
        return torch.empty_like(like).copy_(self.folded(answers))


def plain_layout(
    call: AttentionCall, out: Tensor, order: tuple[int, ...] | None = None, *, heads_first: bool = False
) -> Layout:
    """`(…, heads, queries, value_dim)`, as `F.scaled_dot_product_attention` returns it.

    Args:
        call: the call whose output the tensor holds.
        out: the tensor.
        order: the order of its axes, if they are permuted.
        heads_first: heads and batch share one axis, heads first: `(heads·batch, queries, value_dim)`.
    """
    order = tuple(range(out.dim())) if order is None else order
    shape, back = out.permute(order).shape, sorted(range(out.dim()), key=lambda k: order[k])
    lead = (call.heads, call.batch) if heads_first else (call.batch, call.heads)

    def turned(tensor: Tensor) -> Tensor:
        return tensor.transpose(0, 1) if heads_first else tensor

    return Layout(
        lambda t: turned(t.permute(order).reshape(*lead, *shape[-2:])),
        lambda a: turned(a).reshape(shape).permute(back),
    )


def layout_of(call: AttentionCall, out: Tensor, order: tuple[int, ...]) -> Layout | None:
    """The layout in which the tensor holds the call's output, up to rounding; None if it does not.

    Args:
        call: the attention.
        out: what a product returned.
        order: `out.permute(order)` is `(…, queries, value_dim)`.
    """
    rows = call.queries.shape[2], call.values.shape[-1]
    if tuple(out.permute(order).shape[-2:]) != rows or out.numel() != call.batch * call.heads * rows[0] * rows[1]:
        return None
    layouts = [plain_layout(call, out, order)]
    if out.dim() == 3 and call.heads > 1 and call.batch > 1:
        layouts.append(plain_layout(call, out, order, heads_first=True))
    return next((layout for layout in layouts if _holds(call, layout.spread(out))), None)


@torch.no_grad()
def _holds(call: AttentionCall, answers: Tensor) -> bool:
    """Whether this is the output of the call. Queries that see no key are ignored."""
    wrong = size = 0.0
    with torch._C.DisableTorchFunction():  # modes that follow the model's own products must not see these
        for head in range(call.heads):
            scores, seen = call.scores(head)
            expected = torch.softmax(scores, dim=-1) @ call.values[:, call.key_head(head)].to(scores.dtype)
            counted = seen.any(dim=-1)
            expected, found = expected[counted], answers[:, head].to(scores.dtype)[counted]
            wrong += float((found - expected).square().sum())
            size += float(expected.square().sum())
    dtypes = (call.queries.dtype, answers.dtype)
    close = max(_CLOSE.get(dtype, _CLOSE_IN_HALF) for dtype in dtypes)
    return wrong <= close**2 * size


def require_output(call: AttentionCall, output: Any) -> None:
    """Raises a ShapeError if the output given to `record` cannot be that of the call."""
    expected = (call.heads, call.queries.shape[2], call.values.shape[-1])
    size = call.batch * call.heads * expected[1] * expected[2]
    shape = tuple(getattr(output, "shape", ()))
    if not isinstance(output, Tensor) or shape[-2:] != expected[-2:] or output.numel() != size:
        raise ShapeError(
            f"output of pa.inspect.record is {type(output).__name__} {shape}; expected the attention's own output, "
            f"(…, {', '.join(map(str, expected))})",
            "Pass it before heads are joined.",
        )


@dataclass(frozen=True, eq=False)
class _Entry:
    frame: object
    name: str | None
    call: AttentionCall | None = None
    out: Tensor | None = None
    order: tuple[int, ...] = ()


class Told:
    """Attentions that were reported but not found yet, or found but not reported yet, while their module runs.

    Attributes:
        lost: names of attentions that were reported and never found.
    """

    def __init__(self, names: LayerNames) -> None:
        self.names = names
        self._told: list[_Entry] = []
        self._found: list[_Entry] = []
        self.lost: list[str] = []

    def _forget(self) -> None:
        """Drops entries of modules that have ended."""
        self.lost += [e.name for e in self._told if e.name is not None and not self.names.is_running(e.frame)]
        self._told, self._found = (
            [e for e in held if self.names.is_running(e.frame)] for held in (self._told, self._found)
        )

    def expect(self, name: str | None, call: AttentionCall) -> None:
        """An attention was reported before its product was found."""
        self._told.append(_Entry(self.names.frame, name, call))

    def add_found(self, out: Tensor, order: tuple[int, ...]) -> None:
        """An attention was found before it was reported."""
        self._forget()
        self._found.append(_Entry(self.names.frame, None, None, out, order))

    def was_found(self, call: AttentionCall) -> bool:
        """Whether the attention that is reported now has already been found."""
        self._forget()
        for entry in self._found:
            if entry.out is not None and layout_of(call, entry.out, entry.order) is not None:
                self._found.remove(entry)
                return True
        return False

    def expected(self, out: Tensor, order: tuple[int, ...]) -> tuple[str | None, AttentionCall, Layout] | None:
        """The reported attention whose output this product is: name, call and layout; None if there is none."""
        self._forget()
        for entry in reversed(self._told):
            if entry.call is not None and (layout := layout_of(entry.call, out, order)) is not None:
                self._told.remove(entry)
                return entry.name, entry.call, layout
        return None

    def close(self) -> None:
        """The run is over: attentions that were reported but not found are lost."""
        self.lost += [e.name for e in self._told if e.name is not None]
        self._told, self._found = [], []
