"""Replaces heads by their hard tables, or sharpens them, while the model runs: shows which are lookups and which are averages."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from difflib import get_close_matches
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from partita.arithmetic.arguments import is_number, is_series
from partita.arithmetic.notebook_cards import card, counted
from partita.errors import NonFiniteValueError, NotDeterministicError, ShapeError, UnsupportedError
from partita.functions.dropout import active_dropout
from partita.inspection.calls import AttentionCall, from_cast_sdpa, from_multi_head
from partita.inspection.captured_heads import HeadRecord
from partita.inspection.eager_attention import advice_on_eager
from partita.inspection.flex_calls import listening_to_flex
from partita.inspection.interception import Reader, listening, multi_head_arguments, require_readers
from partita.inspection.layer_names import LayerNames
from partita.inspection.told_attention import plain_layout
from partita.inspection.written_heads import WrittenHeads
from partita.kernels.plain_arithmetic import plain_arithmetic

__all__ = [
    "Answer",
    "HardenReport",
    "HardenedHead",
    "Ran",
    "Which",
    "base_loss",
    "chosen_heads",
    "harden",
    "hardened",
    "loss_with",
    "one_number",
    "replacing",
    "wanted_heads",
]

Which = tuple[str, int]
_SAME = 1e-5  # relative difference allowed between two losses: some GPU kernels add in varying order
BY_HAND = "Attention written by hand is replaced only if you report it with pa.inspect.record(q, k, v) or readers=."
Answer = Callable[[AttentionCall, int, Tensor], Tensor]  # (call, head, its output) to the new output


def _answer(call: AttentionCall, head: int, factor: float) -> Tensor:
    """The output of a head with its scores times `factor`: argmax for infinity, the plain mean of the values it sees for 0."""
    scores, seen = call.scores(head)
    values = call.values[:, call.key_head(head)].to(scores.dtype)
    if math.isinf(factor):
        weights = functional.one_hot(scores.argmax(dim=-1), scores.shape[-1]).to(scores.dtype)
    else:
        weights = torch.softmax(torch.where(seen, factor * scores, -torch.inf), dim=-1)
    weights = torch.where(seen.any(dim=-1, keepdim=True), weights, 0.0)  # the output of a query that sees nothing is 0
    return weights @ values


def _with_factor(factor: float) -> Answer:
    return lambda call, head, _plain: _answer(call, head, factor)


class _Replacing(TorchFunctionMode):
    """Replaces the outputs of chosen heads; layers without chosen heads pass through."""

    def __init__(self, model: nn.Module, answers: Mapping[Which, Answer], readers: Mapping[str, Reader]) -> None:
        super().__init__()
        self.answers, self.met = answers, {}  # type: ignore[var-annotated]
        self.names = LayerNames(model, leaving=lambda *call: self.written.leave(*call))
        self.written = WrittenHeads(self.names, readers, self._replaced)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if func is functional.scaled_dot_product_attention:
            return self._replace_sdpa(args, kwargs, out)
        if func is functional.multi_head_attention_forward:
            return self._replace_multi_head(multi_head_arguments(args, kwargs), out)
        return self.written.replace(func, args, kwargs, out)

    def replace_flex(self, call: Callable[[], AttentionCall], out: Tensor) -> Tensor:
        """Flex attention: `out` with the new outputs of the chosen heads."""
        made = call()
        answers = self._replaced(made, out, self.names.next_name())
        return out if answers is None else plain_layout(made, out).filled(out, answers)

    def _chosen(self, heads: int, name: str | None) -> dict[int, Answer]:
        """The chosen heads of a layer that runs, and what replaces their outputs."""
        if name is None:
            return {}
        self.met[name] = heads
        return {h: self.answers[name, h] for h in range(heads) if (name, h) in self.answers}

    def _replaced(self, call: AttentionCall, answers: Tensor, name: str | None) -> Tensor | None:
        """The outputs, `(batch, heads, tokens, value_dim)`, with those of chosen heads replaced; None if none is chosen."""
        chosen = self._chosen(call.heads, name)
        if not chosen or name is None:
            return None
        answers = answers.clone()
        with plain_arithmetic(answers.device.type):
            for head, answer in chosen.items():
                answers[:, head] = answer(call.in_layer(name), head, answers[:, head]).to(answers.dtype)
        return answers

    def _replace_sdpa(self, args: tuple[Any, ...], kwargs: dict[str, Any], out: Tensor) -> Tensor:
        calls = list(from_cast_sdpa(args, kwargs))
        if len(calls) != 1 or out.is_nested:
            if calls and self._chosen(calls[0].heads, self.names.next_name()):
                raise UnsupportedError("heads on nested tensors cannot be replaced; pad the batch instead.")
            return out
        answers = self._replaced(calls[0], plain_layout(calls[0], out).spread(out), self.names.next_name())
        return out if answers is None else answers.reshape(out.shape)

    def _replace_multi_head(self, arguments: dict[str, Any], out: tuple[Tensor, Any]) -> tuple[Tensor, Any]:
        chosen = self._chosen(arguments["num_heads"], self.names.next_name())
        if not chosen:
            return out
        call = from_multi_head(arguments)
        dim = call.values.shape[-1]
        change = torch.zeros_like(out[0])
        for head, answer in chosen.items():
            with plain_arithmetic(out[0].device.type):
                plain = _answer(call, head, 1.0)
                moved = (answer(call, head, plain) - plain).to(out[0].dtype)
            projected = functional.linear(moved, arguments["out_proj_weight"][:, head * dim : (head + 1) * dim])
            change += projected.transpose(0, 1) if out[0].dim() == 3 else projected[0]
        return out[0] + change, out[1]


@contextmanager
def hardened(
    model: nn.Module,
    heads: Iterable[Which | HeadRecord],
    *,
    factor: float = math.inf,
    readers: Mapping[str, Reader] | None = None,
) -> Iterator[dict[str, int]]:
    """Inside the `with`, the chosen heads multiply their scores by `factor`. By default they return the value of their cell.

    Torch's fused encoder layers run unfused inside, so unchanged heads may round differently. Attention weights that a layer
    returns beside its output are not changed. Attention written out by hand is replaced if `pa.inspect.record` or a reader
    reports it: through `record(…, output=)`, or by following the tensors to its last product.

    Args:
        model: the module to change.
        heads: `(layer, head)` as `capture` names them, or records.
        factor: infinity is the hard table, 1 changes nothing, 0 is the plain mean of the values.
        readers: as in `capture`.

    Yields:
        `{layer: number of heads}` of the layers that ran so far.

    Raises:
        UnsupportedError: a head did not run or cannot be replaced, a reader reports an attention other than the one its module
            computes, or factor is negative.

    >>> import torch, partita as pa
    >>> attention = torch.nn.MultiheadAttention(8, 2, batch_first=True).eval()
    >>> x = torch.randn(1, 5, 8)
    >>> with pa.inspect.hardened(attention, [("MultiheadAttention", 0)]), torch.no_grad():
    ...     hard = attention(x, x, x)[0]
    >>> bool((hard != attention(x, x, x)[0]).any())
    True
    """
    _require_factor(factor)
    which = wanted_heads(heads)
    with replacing(model, dict.fromkeys(which, _with_factor(factor)), readers, inside="hardened") as met:
        yield met


@contextmanager
def replacing(
    model: nn.Module,
    answers: Mapping[Which, Answer],
    readers: Mapping[str, Reader] | None,
    *,
    inside: str,
) -> Iterator[dict[str, int]]:
    """Inside the `with`, the outputs of heads are replaced. Yields `{layer: number of heads}` of the layers that ran so far.

    Args:
        model: the module.
        answers: for each `(layer, head)` a function of the call, the head and its output, `(batch, tokens, value_dim)`.
        readers: as in `capture`.
        inside: the name of the calling function, for the error message.

    Raises:
        UnsupportedError: a head did not run or cannot be replaced.
    """
    with _passing(model, answers, readers) as mode:
        if unknown := [layer for layer, _ in answers if not mode.names.can_name(layer)]:
            near = get_close_matches(unknown[0], mode.names.paths, 6, 0.0)
            raise UnsupportedError(
                f"layer {unknown[0]!r} is not a module of the model; expected module paths as `capture` names them. Modules with "
                f"similar paths: {', '.join(near)}."
            )
        yield mode.met
    met, reasons = mode.met, mode.written.reasons()
    which = list(answers)
    missing = [w for w in which if w[0] not in met or not 0 <= w[1] < met[w[0]]]
    if missing:
        layer, head = missing[0]
        raise UnsupportedError(
            f"head {head} of layer {layer!r} did not run inside `{inside}`, or cannot be replaced. Replaceable: "
            + (", ".join(f"{layer} ({count})" for layer, count in met.items()) or "no heads"),
            reasons.get(layer)
            or advice_on_eager(model)
            or (BY_HAND if met or reasons else f"Run the model inside. {BY_HAND}"),
        )


def _require_factor(factor: float) -> None:
    if not is_number(factor) or not (0 <= factor <= sys.float_info.max or factor == math.inf):
        raise UnsupportedError(f"factor is {factor!r}; expected a number ≥ 0, or infinity for the hard table.")


def wanted_heads(heads: Iterable[Which | HeadRecord]) -> list[Which]:
    """The chosen heads by layer and number. Raises an UnsupportedError for anything else."""
    expected = 'expected (layer, head) as `capture` names them, as in [("encoder.layers.0.self_attn", 3)], or records.'
    if not is_series(heads):
        raise UnsupportedError(f"heads is {heads!r}; {expected}")
    which = []
    for head in heads:
        match (head.layer, head.head) if isinstance(head, HeadRecord) else head:
            case (str(layer), int() | np.integer() as number) if not isinstance(number, bool):
                which.append((layer, int(number)))
            case _:
                raise UnsupportedError(f"heads contains {head!r}; {expected}")
    return which


def chosen_heads(heads: Iterable[Which | HeadRecord] | None) -> list[Which] | None:
    """The chosen heads, or None for all. Raises an UnsupportedError if none is chosen."""
    which = None if heads is None else wanted_heads(heads)
    if which is not None and not which:
        raise UnsupportedError("heads is empty; name at least one head, or leave heads out for all.")
    return which


@contextmanager
def _passing(
    model: nn.Module, answers: Mapping[Which, Answer], readers: Mapping[str, Reader] | None
) -> Iterator[_Replacing]:
    if not isinstance(model, nn.Module):
        raise UnsupportedError(f"model is of type {type(model).__name__}; expected an nn.Module.")
    mode = _Replacing(model, answers, require_readers(readers, model))
    with listening(mode.written), listening_to_flex(mode.replace_flex, mode), mode.names, mode:
        yield mode


@dataclass(frozen=True)
class HardenedHead:
    """The model's loss with one head replaced and the others unchanged.

    Attributes:
        layer: the module path of the layer.
        head: its number within the layer.
        hardened: change of the loss if the head is replaced by its table (or sharpened by `factor`).
        averaged: change of the loss if the head is replaced by the plain mean of the values it sees.
        kind: `lookup` if the table gives the smaller loss, `average` if the mean does, `either` if neither changes the loss
            by more than 1 %.
    """

    layer: str
    head: int
    hardened: float
    averaged: float
    kind: str

    @property
    def name(self) -> str:
        """ "layer:head"."""
        return f"{self.layer}:{self.head}"


def _kind(loss: float, hardened: float, averaged: float) -> str:
    if max(abs(hardened), abs(averaged)) <= 0.01 * abs(loss):
        return "either"
    return "lookup" if hardened < averaged else "average"


@dataclass(frozen=True, eq=False)
class HardenReport:
    """The change of a model's loss, per head and for all heads together.

    Attributes:
        loss: loss of the unchanged model.
        factor: factor of the scores; infinite for hard tables.
        together: change of the loss with all chosen heads hardened at once.
        averaged_together: change of the loss with all chosen heads averaged at once.
        heads: one `HardenedHead` per head.
    """

    loss: float
    factor: float
    together: float
    averaged_together: float
    heads: tuple[HardenedHead, ...]

    def rows(self) -> list[dict[str, Any]]:
        """One row per head, for `pandas.DataFrame`."""
        return [asdict(h) for h in self.heads]

    def to_json(self) -> dict[str, Any]:
        """The report as a dict of plain data; an infinite factor is None."""
        factor = None if math.isinf(self.factor) else self.factor
        names = ("loss", "together", "averaged_together")
        return {**{name: getattr(self, name) for name in names}, "factor": factor, "heads": self.rows()}

    def __repr__(self) -> str:
        return f"HardenReport({counted(len(self.heads), 'head')}; {str(self).splitlines()[0]})"

    def _repr_html_(self) -> str:
        what = "hard" if math.isinf(self.factor) else f"×{self.factor:g}"
        rows = [(h.name, f"{h.hardened:+.3g}", f"{h.averaged:+.3g}", h.kind) for h in self.heads]
        return card(str(self).splitlines()[0], columns=("head", what, "averaged", "kind"), rows=rows)

    def __str__(self) -> str:
        what = "hard" if math.isinf(self.factor) else f"×{self.factor:g}"
        width = max(len(h.name) for h in self.heads)
        lines = [f"loss {self.loss:.5g}; all {what}: {self.together:+.3g}, all averaged: {self.averaged_together:+.3g}"]
        for h in self.heads:
            lines.append(f"{h.name:<{width}}  {what} {h.hardened:+.3g}  averaged {h.averaged:+.3g}  {h.kind}")
        return "\n".join(lines)


def one_number(value: Any, found: str, hint: str = "") -> float:
    """A loss as a number. Raises a ShapeError for vectors and everything else.

    Args:
        value: a number, or a tensor or array with one element.
        found: the beginning of the error message, such as "loss is".
        hint: its advice.
    """
    try:
        return float(value.item() if hasattr(value, "item") else value)
    except (OverflowError, RuntimeError, TypeError, ValueError):
        shape = f" of shape {tuple(value.shape)}" if hasattr(value, "shape") else ""
        raise ShapeError(f"{found} {type(value).__name__}{shape}; expected one number", hint) from None


class Ran(NamedTuple):
    """The layers that ran: `{layer: number of heads}`, and for layers whose heads cannot be replaced the reason."""

    heads: dict[str, int]
    reasons: dict[str, str]


def loss_with(
    model: nn.Module,
    loss: Callable[[nn.Module], Any],
    answers: Mapping[Which, Answer],
    readers: Mapping[str, Reader] | None,
) -> tuple[float, Ran]:
    """The loss while the outputs of heads are replaced, and the layers that ran.

    Args:
        model: the module.
        loss: `loss(model)` returns a number.
        answers: for each `(layer, head)` a function of the call, the head and its output, `(batch, tokens, value_dim)`.
        readers: as in `capture`.
    """
    with torch.no_grad(), _passing(model, answers, readers) as mode:
        number = one_number(loss(model), "loss(model) returned", "Return the .mean() or the .sum() of the losses.")
    return number, Ran(dict(mode.met), mode.written.reasons())


def base_loss(
    model: nn.Module, loss: Callable[[nn.Module], Any], readers: Mapping[str, Reader] | None
) -> tuple[float, Ran]:
    """The loss of the unchanged model, and the layers that ran.

    Args:
        model: the module.
        loss: `loss(model)` returns a number.
        readers: as in `capture`.

    Raises:
        NonFiniteValueError: the loss is NaN or infinite.
        NotDeterministicError: two calls differ, for example because of dropout.
        ShapeError: loss returned a vector, or nothing.
        UnsupportedError: loss is not a function.
    """
    if not callable(loss):
        raise UnsupportedError(
            f"loss is {type(loss).__name__}; expected a function: loss(model) runs it and returns a number."
        )
    base, ran = loss_with(model, loss, {}, readers)
    if not math.isfinite(base):
        raise NonFiniteValueError(f"loss(model) is {base}; expected a finite number. Check the model and its inputs.")
    again, dropout = loss_with(model, loss, {}, readers)[0], active_dropout(model)
    rounded = not dropout and any(p.device.type != "cpu" for p in model.parameters())
    if not abs(again - base) <= (_SAME * max(abs(base), abs(again)) if rounded else 0.0):
        why = f": the model is in train mode, and dropout is on in {dropout}" if dropout else ""
        raise NotDeterministicError(
            f"loss(model) returned {base!r} and then {again!r}{why}; expected the same number twice",
            "Call model.eval() first, and compute the loss on the same data every time.",
        )
    return base, ran


def harden(
    model: nn.Module,
    loss: Callable[[nn.Module], Any],
    *,
    heads: Sequence[Which | HeadRecord] | None = None,
    factor: float = math.inf,
    readers: Mapping[str, Reader] | None = None,
    progress: Callable[[str, int, int], None] | None = None,
) -> HardenReport:
    """How the model's loss changes when heads become hard tables (or are sharpened), one by one and all together.

    Each head is also replaced by the plain mean of the values it sees. A head whose table does less harm than its mean is a
    lookup; a head whose mean does less harm is an average.

    Args:
        model: the module.
        loss: `loss(model)` runs the model on your data and returns a number. Two calls must agree, so use evaluation mode.
        heads: `(layer, head)` as `capture` names them, or records. All by default. `loss` runs twice per head.
        factor: factor of the scores; infinity is the hard table.
        readers: as in `capture`, for attention written out by hand.
        progress: called as `progress(name, done, of)`.

    Returns:
        A `HardenReport`.

    Raises:
        NonFiniteValueError: the loss of the unchanged model is NaN or infinite.
        NotDeterministicError: two calls of loss differ. If dropout is on, the message names the module.
        ShapeError: loss returned a vector, or nothing.
        UnsupportedError: no head can be replaced, a head does not exist, factor is negative, or loss is not a function.

    >>> import torch, partita as pa
    >>> attention = torch.nn.MultiheadAttention(8, 2, batch_first=True).eval()
    >>> x = torch.randn(1, 5, 8)
    >>> report = pa.inspect.harden(attention, lambda model: model(x, x, x)[0].square().mean())
    >>> len(report.heads)
    2
    """

    def measured(which: Iterable[Which], factor: float) -> float:
        return loss_with(model, loss, dict.fromkeys(which, _with_factor(factor)), readers)[0]

    _require_factor(factor)
    chosen = chosen_heads(heads)
    base, (met, reasons) = base_loss(model, loss, readers)
    which = (
        chosen
        if chosen is not None
        else [(layer, h) for layer, count in met.items() if layer not in reasons for h in range(count)]
    )
    if not which:
        raise UnsupportedError(
            "no attention that can be replaced ran inside loss(model)",
            next(iter(reasons.values()), "")
            or advice_on_eager(model)
            or f"{BY_HAND} Scripted models cannot be changed.",
        )
    if missing := [w for w in which if not 0 <= w[1] < met.get(w[0], 0)]:
        layer, head = missing[0]
        raise UnsupportedError(
            f"head {head} of layer {layer!r} did not run. Layers and their numbers of heads: {met}",
            reasons.get(layer, ""),
        )
    done = []
    for number, w in enumerate(which):
        if progress is not None:
            progress(f"{w[0]}:{w[1]}", number, len(which))
        table, mean = (measured([w], f) - base for f in (factor, 0.0))
        done.append(HardenedHead(*w, table, mean, _kind(base, table, mean)))
    if progress is not None:
        progress("", len(which), len(which))
    together, averaged = (measured(which, f) - base for f in (factor, 0.0))
    return HardenReport(base, factor, together, averaged, tuple(done))
