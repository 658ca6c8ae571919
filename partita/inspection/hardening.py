"""Replaces heads by their hard tables, or sharpens them, while the model runs: shows which are lookups and which are averages."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from partita.arithmetic.notebook_cards import card
from partita.errors import NonFiniteValueError, NotDeterministicError, ShapeError, UnsupportedError
from partita.functions.dropout import active_dropout
from partita.inspection.calls import AttentionCall, from_multi_head, from_sdpa
from partita.inspection.captured_heads import HeadRecord
from partita.inspection.eager_attention import advice_on_eager
from partita.inspection.interception import multi_head_arguments
from partita.inspection.layer_names import LayerNames

__all__ = ["HardenReport", "HardenedHead", "harden", "hardened"]

Which = tuple[str, int]


def _answer(call: AttentionCall, head: int, factor: float) -> Tensor:
    """What the head says with its scores times `factor`: argmax for infinity, the plain mean of what it sees for 0."""
    scores, seen = call.scores(head)
    values = call.values[:, call.key_head(head)].to(scores.dtype)
    if math.isinf(factor):
        weights = functional.one_hot(scores.argmax(dim=-1), scores.shape[-1]).to(scores.dtype)
    else:
        weights = torch.softmax(torch.where(seen, factor * scores, -torch.inf), dim=-1)
    weights = torch.where(seen.any(dim=-1, keepdim=True), weights, 0.0)  # a query that sees nothing says 0
    return weights @ values


class _Replacing(TorchFunctionMode):
    """Replaces the answers of chosen heads; layers that are not chosen are passed through."""

    def __init__(self, names: LayerNames, factors: dict[Which, float]) -> None:
        super().__init__()
        self.names, self.factors, self.met = names, factors, {}  # type: ignore[var-annotated]

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if func is functional.scaled_dot_product_attention:
            return self._replace_sdpa(args, kwargs, out)
        if func is functional.multi_head_attention_forward:
            return self._replace_multi_head(multi_head_arguments(args, kwargs), out)
        return out

    def _chosen(self, heads: int) -> dict[int, float]:
        """The factors of this layer's heads."""
        name = self.names.next_name()
        if name is None:
            return {}
        self.met[name] = heads
        return {h: self.factors[name, h] for h in range(heads) if (name, h) in self.factors}

    def _replace_sdpa(self, args: tuple[Any, ...], kwargs: dict[str, Any], out: Tensor) -> Tensor:
        calls = list(from_sdpa(*args, **kwargs))
        chosen = self._chosen(calls[0].heads) if calls else {}
        if not chosen:
            return out
        if len(calls) > 1 or out.is_nested:
            raise UnsupportedError("heads on nested tensors cannot be replaced; pad the batch instead.")
        view = out.clone().reshape(calls[0].batch, calls[0].heads, *out.shape[-2:])
        for head, factor in chosen.items():
            view[:, head] = _answer(calls[0], head, factor).to(out.dtype)
        return view.reshape(out.shape)

    def _replace_multi_head(self, arguments: dict[str, Any], out: tuple[Tensor, Any]) -> tuple[Tensor, Any]:
        chosen = self._chosen(arguments["num_heads"])
        if not chosen:
            return out
        call = from_multi_head(arguments)
        dim = call.values.shape[-1]
        change = torch.zeros_like(out[0])
        for head, factor in chosen.items():
            moved = (_answer(call, head, factor) - _answer(call, head, 1.0)).to(out[0].dtype)
            projected = functional.linear(moved, arguments["out_proj_weight"][:, head * dim : (head + 1) * dim])
            change += projected.transpose(0, 1) if out[0].dim() == 3 else projected[0]
        return out[0] + change, out[1]


@contextmanager
def hardened(
    model: nn.Module, heads: Iterable[Which | HeadRecord], *, factor: float = math.inf
) -> Iterator[dict[str, int]]:
    """Inside the `with`, the chosen heads multiply their scores by `factor`. By default they return the value of their cell.

    Torch's fused encoder layers run unfused inside, so unchanged heads may round differently. Attention weights that a layer
    returns beside its output are not changed.

    Args:
        model: the module to change.
        heads: `(layer, head)` as `capture` names them, or records.
        factor: infinity is the hard table, 1 changes nothing, 0 is the plain mean of the values.

    Yields:
        `{layer: number of heads}` of the layers that ran so far.

    Raises:
        UnsupportedError: a head did not run or cannot be replaced, or factor is negative.

    >>> import torch, partita as pa
    >>> attention = torch.nn.MultiheadAttention(8, 2, batch_first=True).eval()
    >>> x = torch.randn(1, 5, 8)
    >>> with pa.inspect.hardened(attention, [("MultiheadAttention", 0)]), torch.no_grad():
    ...     hard = attention(x, x, x)[0]
    >>> bool((hard != attention(x, x, x)[0]).any())
    True
    """
    which = _wanted(heads, factor)
    with _passing(model, dict.fromkeys(which, factor)) as met:
        yield met
    missing = [w for w in which if w[0] not in met or not 0 <= w[1] < met[w[0]]]
    if missing and met:
        raise UnsupportedError(
            f"head {missing[0][1]} of layer {missing[0][0]!r} did not run inside `hardened`. Replaceable: "
            + ", ".join(f"{layer} ({count})" for layer, count in met.items())
            + ". Attention written out by hand can be recorded but not replaced."
        )


def _wanted(heads: Iterable[Which | HeadRecord], factor: float) -> list[Which]:
    """The chosen heads by layer and number. Raises an UnsupportedError for anything else."""
    if math.isnan(factor) or factor < 0:
        raise UnsupportedError(f"factor is {factor}; expected a number ≥ 0, or infinity for the hard table.")
    which = []
    for head in heads:
        pair = (head.layer, head.head) if isinstance(head, HeadRecord) else head
        if not isinstance(pair, tuple) or len(pair) != 2:
            raise UnsupportedError(
                f"heads contains {head!r}; expected (layer, head) as `capture` names them, or records."
            )
        which.append((pair[0], int(pair[1])))
    return which


@contextmanager
def _passing(model: nn.Module, factors: dict[Which, float]) -> Iterator[dict[str, int]]:
    names = LayerNames(model)
    mode = _Replacing(names, factors)
    with names, mode:
        yield mode.met


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
        return f"HardenReport({len(self.heads)} heads; {str(self).splitlines()[0]})"

    def _repr_html_(self) -> str:
        what = "hard" if math.isinf(self.factor) else f"×{self.factor:g}"
        rows = [(f"{h.layer}:{h.head}", f"{h.hardened:+.3g}", f"{h.averaged:+.3g}", h.kind) for h in self.heads]
        return card(str(self).splitlines()[0], columns=("head", what, "averaged", "kind"), rows=rows)

    def __str__(self) -> str:
        what = "hard" if math.isinf(self.factor) else f"×{self.factor:g}"
        width = max(len(f"{h.layer}:{h.head}") for h in self.heads)
        lines = [f"loss {self.loss:.5g}; all {what}: {self.together:+.3g}, all averaged: {self.averaged_together:+.3g}"]
        for h in self.heads:
            name = f"{h.layer}:{h.head}"
            lines.append(f"{name:<{width}}  {what} {h.hardened:+.3g}  averaged {h.averaged:+.3g}  {h.kind}")
        return "\n".join(lines)


def _one_number(value: Any) -> float:
    """What loss(model) returned, as a number. Raises a ShapeError for vectors and everything else."""
    try:
        return float(value.item() if hasattr(value, "item") else value)
    except (RuntimeError, TypeError, ValueError):
        shape = f" of shape {tuple(value.shape)}" if hasattr(value, "shape") else ""
        raise ShapeError(
            f"loss(model) returned {type(value).__name__}{shape}; expected one number",
            "Return the .mean() or the .sum() of the losses.",
        ) from None


def harden(
    model: nn.Module,
    loss: Callable[[nn.Module], Any],
    *,
    heads: Sequence[Which | HeadRecord] | None = None,
    factor: float = math.inf,
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
        progress: called as `progress(name, done, of)`.

    Returns:
        A `HardenReport`.

    Raises:
        NonFiniteValueError: the loss of the unchanged model is NaN or infinite.
        NotDeterministicError: dropout is on, and two calls of loss differ. The message names the module.
        ShapeError: loss returned a vector, or nothing.
        UnsupportedError: no head can be replaced, a head does not exist, factor is negative, or loss is not a function.

    >>> import torch, partita as pa
    >>> attention = torch.nn.MultiheadAttention(8, 2, batch_first=True).eval()
    >>> x = torch.randn(1, 5, 8)
    >>> report = pa.inspect.harden(attention, lambda model: model(x, x, x)[0].square().mean())
    >>> len(report.heads)
    2
    """

    def measured(factors: dict[Which, float]) -> tuple[float, dict[str, int]]:
        with torch.no_grad(), _passing(model, factors) as met:
            number = _one_number(loss(model))
            return number, dict(met)

    if not callable(loss):
        raise UnsupportedError(
            f"loss is {type(loss).__name__}; expected a function: loss(model) runs it and returns a number."
        )
    chosen = _wanted(heads or (), factor)
    base, met = measured({})
    if not math.isfinite(base):
        raise NonFiniteValueError(f"loss(model) is {base}; expected a finite number. Check the model and its inputs.")
    if (dropout := active_dropout(model)) and measured({})[0] != base:
        raise NotDeterministicError(
            f"loss(model) returned two different numbers: the model is in train mode, and dropout is on in {dropout}",
            "Call model.eval() first.",
        )
    which = chosen if heads is not None else [(layer, h) for layer, count in met.items() for h in range(count)]
    if heads is not None and not which:
        raise UnsupportedError("heads is empty; name at least one head, or leave heads out for all.")
    if not which:
        raise UnsupportedError(
            "no attention that can be replaced ran inside loss(model)",
            advice_on_eager(model) or "Attention written by hand or scripted cannot be replaced.",
        )
    if missing := [w for w in which if not 0 <= w[1] < met.get(w[0], 0)]:
        raise UnsupportedError(
            f"head {missing[0][1]} of layer {missing[0][0]!r} did not run. Layers and their numbers of heads: {met}."
        )
    done = []
    for number, w in enumerate(which):
        if progress is not None:
            progress(f"{w[0]}:{w[1]}", number, len(which))
        table, mean = (measured({w: f})[0] - base for f in (factor, 0.0))
        done.append(HardenedHead(*w, table, mean, _kind(base, table, mean)))
    together, averaged = (measured(dict.fromkeys(which, f))[0] - base for f in (factor, 0.0))
    return HardenReport(base, factor, together, averaged, tuple(done))
