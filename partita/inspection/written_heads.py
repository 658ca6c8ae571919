"""Replaces outputs of attention that is written out by hand: at its last product, or in the output that `record` gets.

The product is found by following the tensors (eager_attention.py). Three things identify it as attention: a call of `record`
before it, a reader of the module around it, or a Hugging Face module around it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from partita.arithmetic.notebook_cards import counted
from partita.errors import UnsupportedError
from partita.inspection.calls import AttentionCall, from_sdpa
from partita.inspection.eager_attention import EagerAttention, Followed, is_hugging_face
from partita.inspection.interception import Reader, read_with, reader_of
from partita.inspection.layer_names import LayerNames
from partita.inspection.told_attention import Layout, Told, layout_of, plain_layout

__all__ = ["Replace", "WrittenHeads"]

Replace = Callable[[AttentionCall, Tensor, str | None], Tensor | None]


@dataclass(frozen=True, eq=False)
class _Product:
    """A product inside a module that has a reader."""

    frame: object
    name: str | None
    out: Tensor
    order: tuple[int, ...]
    replaced: bool


class WrittenHeads:
    """Finds written-out attention in one run and replaces its outputs.

    Args:
        names: which layer is running.
        readers: as in `capture`.
        replace: `replace(call, output, name)` returns the new output, or None to keep it.
    """

    def __init__(self, names: LayerNames, readers: Mapping[str, Reader], replace: Replace) -> None:
        self.names, self.readers, self._replace = names, dict(readers), replace
        self.follower, self.told = EagerAttention(), Told(names)
        self._products: list[_Product] = []
        self._reasons: dict[str, str] = {}
        self._away = False

    def reasons(self) -> dict[str, str]:
        """Why layers that were reported were not replaced."""
        self.told.close()
        lost = (
            "pa.inspect.record reported this attention, but no product after it returned its output.{} Call record before the "
            "product with the values, or use out = pa.inspect.record(q, k, v, output=out)."
        )
        return {**{name: lost.format(self._step()) for name in self.told.lost}, **self._reasons}

    def _step(self) -> str:
        return f" The last step that was not followed: {self.follower.ended!r}." if self.follower.ended else ""

    def replace(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> Any:
        """What a function of torch returned, or its replacement if it was the last product of a chosen attention."""
        if self._away:
            return out
        with torch.no_grad():
            found = self.follower.follow(getattr(func, "__name__", ""), args, kwargs, out)
            expected = None if found is None else self.told.expected(out, found.order)
        if found is None:
            return out
        if expected is not None:
            name, call, layout = expected
            return self._in(layout, call, out, name)
        around = self.names.around(lambda name: reader_of(self.readers, name) is not None)
        if around is not None:
            return self._in_a_reader(around[0], found, out)
        if out.dim() == 4 and self.names.is_inside(is_hugging_face):
            self.told.add_found(out, found.order)
            (call,) = from_sdpa(**found.arguments)
            return self._in(plain_layout(call, out, found.order), call, out, self.names.next_name())
        return out

    def hear(self, calls: Callable[[], Iterable[AttentionCall]], output: Tensor | None) -> Tensor | None:
        """Handles an attention that `record` reports; returns the output to use."""
        if self._away:
            return output
        with self._looking_away():
            made = list(calls())
            if any(self.told.was_found(call) for call in made):
                return output
            name = self.names.next_name()
            if len(made) == 1 and output is not None:
                return self._in(plain_layout(made[0], output), made[0], output, name)
            for call in made if len(made) == 1 else ():  # otherwise one call per sequence of nested tensors
                self.told.expect(name, call)
        return output

    def leave(
        self, module: nn.Module, name: str | None, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any
    ) -> None:
        """A module has run: if it has a reader, the products found in it must be what the reader reports.

        Raises:
            UnsupportedError: a product was replaced that is not what the reader reports.
        """
        reader = reader_of(self.readers, name)
        if reader is None or self._away:
            return
        products = [p for p in self._products if p.frame is self.names.frame]
        self._products = [p for p in self._products if p.frame is not self.names.frame]
        with self._looking_away(), torch.no_grad():
            told = list(read_with(reader, module, args, kwargs, out))
            same = [_same(call, product) for call, product in zip(told, products)]
        wrong = [p for p, fits in zip(products, [*same, *[False] * len(products)]) if not fits]
        missing = [self.names.next_name() for _ in told[len(products) :]]
        followed = f"{counted(len(products), 'product')} {'was' if len(products) == 1 else 'were'}"
        shapes = ", ".join(str(tuple(p.out.shape)) for p in products[:3]) or "none"
        reason = (
            f"The reader of {name!r} reports {counted(len(told), 'attention')}; {followed} followed in the module, of shape "
            f"{shapes}. Expected a product for each attention, in the same order, as (batch, heads, queries, dim), heads on their "
            f"own axis.{self._step()} Call pa.inspect.record(q, k, v) before the product instead, or use "
            "out = pa.inspect.record(q, k, v, output=out)."
        )
        self._reasons |= {layer: reason for layer in (*missing, *(p.name for p in wrong)) if layer is not None}
        if any(p.replaced for p in wrong):
            raise UnsupportedError(f"the heads of layer {name!r} cannot be replaced", reason)

    @contextmanager
    def _looking_away(self) -> Iterator[None]:
        self._away = True
        try:
            yield
        finally:
            self._away = False

    def _in(self, layout: Layout, call: AttentionCall, out: Tensor, name: str | None) -> Tensor:
        answers = self._replace(call, layout.spread(out), name)
        return out if answers is None else layout.filled(out, answers)

    def _in_a_reader(self, frame: object, found: Followed, out: Tensor) -> Tensor:
        (call,) = from_sdpa(**found.arguments)
        name = self.names.next_name(within=frame)
        answer = self._in(plain_layout(call, out, found.order), call, out, name)
        self._products.append(_Product(frame, name, out, found.order, answer is not out))
        return answer


def _same(call: AttentionCall, product: _Product) -> bool:
    """Whether the product returned what the reader reports, in the assumed layout."""
    shape = product.out.permute(product.order).shape
    heads = shape[-3] if len(shape) > 3 else 1
    return call.heads == heads and layout_of(call, product.out, product.order) is not None
