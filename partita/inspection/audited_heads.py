"""What dropping keys costs the heads of a model: share skipped, mass lost, a proved bound on the change, and the change itself.

Everything is computed in float64, for some queries and all keys at a time. The heads see the inputs that they see in the
unchanged model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import cached_property
from numbers import Integral
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from partita.arithmetic.notebook_cards import aligned, card, counted, short
from partita.errors import DomainError, NonFiniteValueError, UnsupportedError
from partita.geometry.domains import Array
from partita.inspection.calls import AttentionCall
from partita.inspection.captured_heads import (
    CapturedHeads,
    DropoutWarning,
    HeadRecord,
    are_captured,
    no_query,
    records_of,
    require_kept,
)
from partita.inspection.eager_attention import advice_on_eager
from partita.inspection.hardening import Answer, Which, base_loss, chosen_heads, loss_with
from partita.inspection.interception import Reader, watching
from partita.inspection.reading import padding_of
from partita.inspection.rules import DroppingRule, Quantized, Rule, kept_keys, require_rule
from partita.inspection.snapshots import Snapshot
from partita.kernels.dropped_keys import (
    LOG2_E,
    change_bound,
    distances,
    norms,
    score_drift,
    tile_sums,
    tiles_of,
    upper_masses,
    value_balls,
    value_extent,
)

__all__ = ["Audit", "AuditedHead", "answer_under", "audit", "one_tile"]

_SCORES_AT_ONCE = 1 << 21
_UNIT = 2.0**-53
_LARGEST = 1e302  # of keys, values and scores
_QUANTILES = (0.5, 0.9, 0.99)
_PER_QUERY = ("skipped", "oracle", "mass_lost", "error_bound", "error", "output_norm")


@dataclass(frozen=True, eq=False)
class AuditedHead:
    """What one rule costs one head, query by query. Every array is `(queries,)`.

    Attributes:
        layer: the module path of the layer.
        head: its number within the layer.
        rule: the rule.
        skipped: share of the visible tiles that were skipped; for rules that drop single keys, share of the visible keys.
        oracle: the largest such share that any rule could skip at the same lost mass.
        mass_lost: softmax weight of the dropped keys.
        error_bound: proved upper bound on the change of the output.
        error: Euclidean norm of the change of the output.
        output_norm: norm of the unchanged output.
        positions: number of each query in its call.
        sequence: number of the sequence that each query belongs to.
        tiles: number of tiles of keys in the longest sequence; for rules that drop single keys, number of keys.
        loss_change: change of the model's loss with the rule applied to this head alone; None without a loss.
    """

    layer: str
    head: int
    rule: Rule
    skipped: Array
    oracle: Array
    mass_lost: Array
    error_bound: Array
    error: Array
    output_norm: Array
    positions: NDArray[np.int64]
    sequence: NDArray[np.int64]
    tiles: int
    loss_change: float | None = None

    @property
    def name(self) -> str:
        """ "layer:head"."""
        return f"{self.layer}:{self.head}"

    def row(self) -> dict[str, Any]:
        """One flat row: means of the shares, maxima of mass and errors, and quantiles of these as `…_q50`, `…_q90`, `…_q99`."""
        out: dict[str, Any] = {"layer": self.layer, "head": self.head, "rule": str(self.rule)}
        out |= {"queries": len(self.error), "skipped": float(self.skipped.mean()), "oracle": float(self.oracle.mean())}
        for name in ("mass_lost", "error_bound", "error"):
            numbers = getattr(self, name)
            out[name] = float(numbers.max())
            out |= {f"{name}_q{100 * q:.0f}": float(np.quantile(numbers, q)) for q in _QUANTILES}
        out["output_norm"] = float(self.output_norm.mean())
        return out if self.loss_change is None else {**out, "loss_change": self.loss_change}

    def __repr__(self) -> str:
        return f"AuditedHead({self.name}, {self.rule}, {len(self.error)} queries)"


@dataclass(frozen=True, eq=False)
class Audit:
    """What rules cost the heads of a model.

    Attributes:
        rules: the rules.
        heads: one `AuditedHead` per rule and head, rule by rule.
        loss: loss of the unchanged model, or None.
        together: for each rule the change of the loss with the rule applied to all heads at once; empty without a loss.
    """

    rules: tuple[Rule, ...]
    heads: tuple[AuditedHead, ...]
    loss: float | None = None
    together: tuple[float, ...] = ()

    def rows(self) -> list[dict[str, Any]]:
        """One row per rule and head, for `pandas.DataFrame(audit.rows())`."""
        return [head.row() for head in self.heads]

    def of(self, layer: str, head: int, *, rule: int = 0) -> AuditedHead:
        """What a rule costs one head.

        Args:
            layer: the module path of the layer.
            head: its number within the layer.
            rule: number of the rule.

        Raises:
            UnsupportedError: there is no such head.
            DomainError: there is no such rule.
        """
        if isinstance(rule, bool) or not isinstance(rule, Integral) or not 0 <= rule < len(self.rules):
            names = ", ".join(f"{k} ({one})" for k, one in enumerate(self.rules))
            raise DomainError(f"rule is {rule!r}; expected the number of a rule: {names}.")
        for found in self.heads:
            if (found.layer, found.head) == (layer, head) and found.rule is self.rules[rule]:
                return found
        names = ", ".join(h.name for h in self.heads[:6])
        raise UnsupportedError(f"head {head} of layer {layer!r} was not audited. Audited: {names}, ….")

    def queries(self, layer: str, head: int, *, rule: int = 0) -> dict[str, NDArray[Any]]:
        """The arrays of one `AuditedHead` by name, `(queries,)` each.

        Args:
            layer: the module path of the layer.
            head: its number within the layer.
            rule: number of the rule.
        """
        found = self.of(layer, head, rule=rule)
        return {name: getattr(found, name) for name in (*_PER_QUERY, "positions", "sequence")}

    def to_json(self) -> dict[str, Any]:
        """The audit as a dict of plain data, without the arrays."""
        rules = [str(rule) for rule in self.rules]
        return {"rules": rules, "loss": self.loss, "together": list(self.together), "heads": self.rows()}

    def _shown(self) -> Iterator[tuple[str, ...]]:
        losses = ("loss change",) if self.loss is not None else ()
        several = len(self.rules) > 1
        yield "", *(("rule",) if several else ()), "skipped", "oracle", "mass lost", "bound", "error", *losses
        for head in self.heads:
            row = head.row()
            shares = (f"{row[name]:.1%}" for name in ("skipped", "oracle"))
            numbers = (short(row[name]) for name in ("mass_lost", "error_bound", "error"))
            change = (f"{head.loss_change:+.3g}",) if head.loss_change is not None else ()
            yield head.name, *((str(head.rule),) if several else ()), *shares, *numbers, *change

    def _title(self) -> str:
        heads = len({head.name for head in self.heads})
        losses = f"; all heads: loss {self.together[0]:+.3g}" if len(self.together) == 1 else ""
        rules = str(self.rules[0]) if len(self.rules) == 1 else f"{len(self.rules)} rules"
        return f"{rules} on {counted(heads, 'head')}{losses}"

    def _below(self) -> list[str]:
        """The lines below the table: the loss with each rule on all heads if there are several rules, and a note."""
        several = zip(self.rules, self.together) if len(self.together) > 1 else ()
        whole = [rule for rule in self.rules if isinstance(rule, DroppingRule) and rule.whole_tiles]
        alone = [rule for rule in whole if all(h.tiles == 1 for h in self.heads if h.rule is rule)]
        return [
            *(f"{rule} on all heads: loss {change:+.3g}" for rule, change in several),
            *(f"{rule}: {one_tile(rule.tile)}" for rule in alone),
            _NOTE,
        ]

    def __repr__(self) -> str:
        return f"Audit({self._title()}; print it for the figures)"

    def _repr_html_(self) -> str:
        columns, *rows = self._shown()
        return card(self._title(), columns=columns, rows=rows, note="; ".join(self._below()))

    def __str__(self) -> str:
        return "\n".join([self._title(), *aligned(self._shown()), *self._below()])


def one_tile(tile: tuple[int, int]) -> str:
    """What to say if every sequence fits in one tile.

    Args:
        tile: queries and keys of a block.
    """
    return f"all keys fit in one tile of {tile[1]}, so nothing can be skipped; use a smaller tile=(queries, keys)"


_NOTE = "shares are means over queries; mass, bound and error are the largest of any query"


def audit(
    model: nn.Module | CapturedHeads | HeadRecord | Iterable[HeadRecord],
    inputs: Any = None,
    rule: Rule | Sequence[Rule] | None = None,
    loss: Callable[[nn.Module], Any] | None = None,
    *,
    heads: Sequence[Which | HeadRecord] | None = None,
    readers: Mapping[str, Reader] | None = None,
    progress: Callable[[str, int, int], None] | None = None,
) -> Audit:
    """What a rule that drops keys, or stores them in fewer bits, costs each head of a model, query by query.

    For a rule that drops keys, o and Z are the output and the mass of the keys that are kept. The change is
    `Δo = Σ_j p_j(v_j − o)/(Z + Σ_j p_j)` over dropped keys j. It is bounded without exponentials of dropped scores, by
    `|Δo| ≤ Σ_b U_b(|o − c_b| + r_b)/(Z + Σ_b L_b)` over tiles b with dropped keys, whose masses lie between L_b and U_b and
    whose values lie within r_b of c_b. *Theorem*: `dropped-keys`. `Quantized` has its own bound. *Theorem*: `quantized-keys`.
    The bounds include rounding, also for two outputs that you compute in float64 and subtract. They do not cover how a score_mod
    of flex attention amplifies rounded scores.

    Padding and queries that see no key are not counted. If a rule drops every key that a query sees, the output is 0.

    Args:
        model: the module; or what `capture` recorded, and then no inputs are needed.
        inputs: a tensor for `model(inputs)`, a tuple for `model(*inputs)`, a dict for `model(**inputs)`, or a list of these.
        rule: `SkipBlocks`, `TopK`, `Window`, `KeepMask` or `Quantized`; or a list of rules.
        loss: `loss(model)` runs the model on your data and returns a number. Its change is then measured with each rule on each
            head alone, and on all heads together.
        heads: `(layer, head)` as `capture` names them, or records. All by default.
        readers: as for `capture`, for attention written out by hand.
        progress: called as `progress(name, done, of)`.

    Returns:
        An `Audit`.

    Raises:
        UnsupportedError: no head ran, a head does not exist, or an argument is invalid.
        NonFiniteValueError: queries, keys or values are NaN or infinite, or the loss is.
        ShapeError: the mask of `KeepMask` does not fit, or loss returned a vector.

    Warns:
        UserWarning: dropout is on.

    >>> import torch, partita as pa
    >>> attention = torch.nn.MultiheadAttention(8, 2, batch_first=True).eval()
    >>> x = torch.randn(1, 5, 8)
    >>> report = pa.inspect.audit(attention, (x, x, x), pa.inspect.TopK(2))
    >>> [bool(row["error"] <= row["error_bound"]) for row in report.rows()]
    [True, True]
    """
    rules = _rules(rule)
    wanted = chosen_heads(heads)
    held = _Tables(rules, None if wanted is None else set(wanted))
    if isinstance(model, nn.Module):
        _run(model, inputs, held, readers, progress)
    else:
        _walk(model, inputs, loss, held, progress)
    if missing := [w for w in wanted or () if w not in held.heads]:
        layer, head = missing[0]
        near = sorted(held.ran, key=lambda which: which[0] != layer)  # those of its layer first
        names = ", ".join(f"{layer}:{head}" for layer, head in near[:12]) + (", …" if len(near) > 12 else "")
        raise UnsupportedError(f"head {head} of layer {layer!r} did not run. Heads that ran: {names or 'none'}.")
    if not held.heads:
        advice = advice_on_eager(model) if isinstance(model, nn.Module) else getattr(model, "advice", "")
        raise UnsupportedError(
            "no attention was recorded", advice or "For attention written by hand use pa.inspect.record or readers=."
        )
    done = held.finished()
    if loss is None:
        return Audit(rules, done)
    assert isinstance(model, nn.Module)
    return _with_loss(model, loss, rules, done, readers, progress)


def _rules(rule: Any) -> tuple[Rule, ...]:
    rules = tuple(rule) if isinstance(rule, (list, tuple)) else (rule,)
    if not rules:
        raise UnsupportedError("rule is an empty list; expected a rule, or a list of rules.")
    return tuple(copy(require_rule(one)) for one in rules)  # copies, so that a rule given twice counts as two


def _run(model: nn.Module, inputs: Any, held: _Tables, readers: Any, progress: Any) -> None:
    if are_captured(inputs):
        raise UnsupportedError(
            "inputs are captured heads; expected what the model runs on. Pass captured heads as `model`, without inputs."
        )
    if inputs is None:
        raise UnsupportedError("inputs is None; pass model inputs, or pass captured heads as `model`.")
    dropout = DropoutWarning(model, "audited")
    runs = inputs if isinstance(inputs, list) else [inputs]
    for number, one in enumerate(runs):

        def seen(layer: str, call: AttentionCall, number: int = number) -> None:
            if any(held.wants(layer, head) for head in range(call.heads)):
                dropout.of_call(layer, call.dropout)
            if progress is not None:
                progress(layer, number, len(runs))
            for head in range(call.heads):
                if held.wants(layer, head):
                    held.add(layer, head, _Sequences.of_call(call, head))

        with torch.no_grad(), watching(model, seen, readers):
            model(**one) if isinstance(one, dict) else model(*one) if isinstance(one, tuple) else model(one)
    if progress is not None:
        progress("", len(runs), len(runs))


def _walk(heads: Any, inputs: Any, loss: Any, held: _Tables, progress: Any) -> None:
    records = records_of(heads, name="model", wanted="an nn.Module, or ")
    if inputs is not None or loss is not None:
        raise UnsupportedError("inputs and loss need the model; with captured heads give the rule alone, rule=….")
    require_kept(records)
    for number, record in enumerate(records):
        if progress is not None:
            progress(record.name, number, len(records))
        if held.wants(record.layer, record.head):
            for snapshot in record.snapshots:
                held.add(record.layer, record.head, _Sequences.of_snapshot(snapshot, record.head))
    if progress is not None:
        progress("", len(records), len(records))


def _with_loss(
    model: nn.Module,
    loss: Callable[[nn.Module], Any],
    rules: tuple[Rule, ...],
    done: tuple[AuditedHead, ...],
    readers: Mapping[str, Reader] | None,
    progress: Any,
) -> Audit:
    base, ran = base_loss(model, loss, readers)
    if not ran.heads:
        raise UnsupportedError("loss(model) ran no attention", "Call the model that is passed to loss.")
    if missing := [h for h in done if not 0 <= h.head < ran.heads.get(h.layer, 0) or h.layer in ran.reasons]:
        raise UnsupportedError(
            f"head {missing[0].head} of layer {missing[0].layer!r} cannot be replaced inside loss(model), or does not run there. "
            f"Layers and their numbers of heads: {ran.heads}",
            ran.reasons.get(missing[0].layer) or "Choose heads=, or leave loss out.",
        )
    changed = []
    for number, head in enumerate(done):
        if progress is not None:
            progress(head.name, number, len(done))
        own, _ = loss_with(model, loss, {(head.layer, head.head): answer_under(head.rule)}, readers)
        changed.append(replace(head, loss_change=own - base))
    if progress is not None:
        progress("", len(done), len(done))
    together = []
    for rule in rules:
        answers = {(h.layer, h.head): answer_under(rule) for h in done if h.rule is rule}
        together.append(loss_with(model, loss, answers, readers)[0] - base)
    return Audit(rules, tuple(changed), base, tuple(together))


def answer_under(rule: Rule) -> Answer:
    """Output of a head under a rule: the original output minus the change, so that unchanged outputs stay exact.

    Args:
        rule: the rule.
    """

    def answer(call: AttentionCall, head: int, plain: Tensor) -> Tensor:
        sequences, out = _Sequences.of_call(call, head), plain.clone()
        for part in sequences.parts(_height(rule)):
            change = part.measured(rule)["change"]
            out[:, part.rows] -= change.to(out.dtype).to(out.device)
        return out

    return answer


def _height(rule: Rule) -> int:
    """How many consecutive positions the rule must see at once."""
    return rule.tile[0] if isinstance(rule, DroppingRule) and rule.whole_tiles else 1


class _Tables:
    """The arrays of every rule and head, filled call by call."""

    def __init__(self, rules: tuple[Rule, ...], wanted: set[Which] | None) -> None:
        self.rules, self.wanted = rules, wanted
        self.ran: dict[Which, None] = {}  # all heads in order, also those that are not audited
        self.heads: dict[Which, int] = {}  # number of sequences of each audited head
        self._parts: dict[tuple[int, Which], list[dict[str, np.ndarray]]] = {}
        self._keys: dict[Which, int] = {}  # of the longest sequence

    def wants(self, layer: str, head: int) -> bool:
        """Whether a head that runs is to be audited."""
        self.ran[layer, head] = None
        return self.wanted is None or (layer, head) in self.wanted

    def add(self, layer: str, head: int, sequences: _Sequences) -> None:
        which, (batch, _, tokens, _) = (layer, head), sequences.call.queries.shape
        first = self.heads.get(which, 0)
        self.heads[which] = first + batch
        self._keys[which] = max(self._keys.get(which, 0), sequences.call.keys.shape[2])
        # allocated before the first part: small arrays kept between large temporary ones would fragment the memory
        tables = np.zeros((len(self.rules), len(_PER_QUERY), batch, tokens))
        counted = np.zeros((batch, tokens), dtype=bool)
        heights = sorted({_height(rule) for rule in self.rules} - {1}) or [1]
        for height in heights:
            own = {height, 1} if height == heights[0] else {height}
            for part in sequences.parts(height):
                counted[:, part.rows] = part.counted.cpu().numpy()
                for number in (n for n, rule in enumerate(self.rules) if _height(rule) in own):
                    found = part.measured(self.rules[number])
                    for table, name in zip(tables[number], _PER_QUERY):
                        table[:, part.rows] = found[name].cpu().numpy()
        positions = np.broadcast_to(sequences.positions.cpu().numpy(), counted.shape)
        sequence = np.broadcast_to(np.arange(first, first + batch)[:, None], counted.shape)
        for number, each in enumerate(tables):
            taken = {name: table[counted] for name, table in zip(_PER_QUERY, each)}
            taken |= {"positions": positions[counted], "sequence": sequence[counted]}
            self._parts.setdefault((number, which), []).append(taken)

    def finished(self) -> tuple[AuditedHead, ...]:
        out = []
        for number, rule in enumerate(self.rules):
            for which in self.heads:
                parts = self._parts[number, which]
                arrays: Any = {name: np.concatenate([p[name] for p in parts]) for name in parts[0]}
                if not len(arrays["error"]):
                    raise no_query(f"{which[0]}:{which[1]}")
                width = rule.tile[1] if isinstance(rule, DroppingRule) and rule.whole_tiles else 1
                out.append(AuditedHead(*which, rule, **arrays, tiles=-(-self._keys[which] // width)))
        return tuple(out)


@dataclass(frozen=True, eq=False)
class _Sequences:
    """One head on a batch of sequences of one length: a call with one head, and the positions of its queries."""

    call: AttentionCall
    head: int
    positions: Tensor
    padding: Tensor | None  # (batch, queries)
    fixed: bool = False  # flex attention changed the scores, and its effect on other scores is unknown

    @classmethod
    def of_call(cls, call: AttentionCall, head: int) -> _Sequences:
        device = "cpu" if call.queries.device.type == "mps" else call.queries.device  # mps has no float64
        alone = call.subset(None, [head])
        queries, keys, values = (t.to(device, torch.float64) for t in (alone.queries, alone.keys, alone.values))
        mask = None if alone.mask is None else alone.mask.to(device)
        alone = replace(alone, queries=queries, keys=keys, values=values, mask=mask)
        hidden = [padding_of(alone, element, slice(0, 1)).queries for element in range(alone.batch)]
        known = [torch.zeros_like(alone.places, dtype=torch.bool) if h is None else h[0] for h in hidden]
        padding = torch.stack(known) if any(h is not None for h in hidden) else None
        return cls(alone, head, alone.places, padding).checked()

    @classmethod
    def of_snapshot(cls, snapshot: Snapshot, head: int) -> _Sequences:
        """Recorded queries with all keys."""
        call = snapshot.as_call()
        padding = None if snapshot.padding is None else torch.from_numpy(np.ascontiguousarray(snapshot.padding))[None]
        return cls(call, head, call.places, padding, snapshot.follows_scores).checked()

    def checked(self) -> _Sequences:
        for name in ("queries", "keys", "values"):
            if not bool(torch.isfinite(getattr(self.call, name)).all()):
                raise NonFiniteValueError(f"{name} of a head contain NaN or infinity; check the model's activations.")
        for name in ("keys", "values"):
            numbers = getattr(self.call, name)
            largest = float(numbers.detach().abs().max()) if numbers.numel() else 0.0
            if largest > _LARGEST:
                raise NonFiniteValueError(
                    f"{name} of a head reach {largest:.3g}, so that sums of them overflow float64; expected at most {_LARGEST:g}."
                )
        return self

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """The position of query 0 among the keys of each sequence."""
        return self.call.first_positions

    @cached_property
    def first_keys(self) -> Tensor:
        """The first key that any query sees, `(batch,)`."""
        return torch.cat([padding_of(self.call, e, slice(0, 1)).first[0] for e in range(self.call.batch)])

    def parts(self, height: int) -> Iterator[_Part]:
        """Some queries and all keys at a time. Blocks of `height` positions are never split."""
        batch, keys = len(self.call.queries), self.call.keys.shape[2]
        if not keys or not batch:
            return
        most = max(1, _SCORES_AT_ONCE // (batch * keys))
        values = _Values(self.call.values[:, 0])
        places = self.positions.cpu().numpy() // height
        start = last = 0
        for end in [*(np.flatnonzero(np.diff(places)) + 1).tolist(), len(places)]:
            if end - start > most and last > start:
                yield _Part(self, values, slice(start, last))
                start = last
            last = end
        if last > start:
            yield _Part(self, values, slice(start, last))


class _Values:
    """The values of a batch of sequences relative to their mean, to avoid cancellation where they are far from the origin."""

    def __init__(self, values: Tensor) -> None:
        self.original = values  # for rounding to fewer bits; adding the mean back to `moved` would change ties
        self.middle = values.mean(dim=1, keepdim=True)
        self.moved = values - self.middle
        self.largest = norms(values).amax(dim=-1)[:, None]
        self._balls: dict[int, tuple[Tensor, Tensor, Tensor]] = {}

    def balls(self, width: int) -> tuple[Tensor, Tensor, Tensor]:
        """Centers, radii, and the largest distance between means of values, `(batch, 1)`."""
        if width not in self._balls:
            centers, radii = value_balls(self.moved, width)
            self._balls[width] = centers, radii, value_extent(self.moved, centers, radii)[0][:, None]
        return self._balls[width]


class _Part:
    """Some queries of one head on a batch of sequences, and what rules do to them. Tensors are `(batch, rows, …)`, float64."""

    def __init__(self, sequences: _Sequences, values: _Values, rows: slice) -> None:
        call = sequences.call
        self.sequences, self.head, self.values = sequences, sequences.head, values
        self.rows, self.positions = rows, sequences.positions[rows]
        self.queries, self.keys, self.scale = call.queries[:, 0, rows], call.keys[:, 0], call.scale
        self.scores, self.seen = call.scores(0, rows, torch.float64)
        top = self.scores.amax(dim=-1, keepdim=True)
        sizes = abs(self.scale) * norms(self.queries) * norms(self.keys).amax(dim=-1)[:, None]
        if not bool((top < torch.inf).all()) or (not bool((sizes < _LARGEST).all()) and self._overflows()):
            raise NonFiniteValueError(
                "scores of a head are NaN or overflow; check the model's activations and its mask."
            )
        self.behind = self.scores - torch.where(top > -torch.inf, top, 0.0)
        self.masses = torch.exp(self.behind)
        if call.slopes is not None:  # a mask may cancel the ALiBi bias
            sizes = sizes + call.slopes.abs().double().max() * (1 + max(call.last_place, self.keys.shape[1]))
        highest = torch.where(self.seen, self.scores.abs(), 0.0).amax(dim=-1)
        self.drift = score_drift(sizes, highest, self.keys.shape[-1], _UNIT)
        self.terms = self.keys.shape[1] + values.moved.shape[-1] + 16
        self.counted = self.seen.any(dim=-1)
        if sequences.padding is not None:
            self.counted = self.counted & ~sequences.padding[:, rows]
        self._orders: dict[int, Tensor] = {}

    def _overflows(self) -> bool:
        """Whether the score of a visible key is −∞."""
        call = self.sequences.call
        shown = [call.visible(element, slice(0, 1), self.rows)[0] for element in range(call.batch)]
        return bool((torch.stack(shown) & ~self.seen).any())

    @cached_property
    def upper(self) -> Tensor:
        return upper_masses(self.behind * LOG2_E)

    def measured(self, rule: Rule) -> dict[str, Tensor]:
        """What the rule costs each query, `(batch, rows)`, and the change itself, `(batch, rows, value_dim)`."""
        if isinstance(rule, Quantized):
            return self._quantized(rule)
        assert isinstance(rule, DroppingRule)
        return self._dropped(rule)

    def _dropped(self, rule: DroppingRule) -> dict[str, Tensor]:
        of = self.sequences
        keep = kept_keys(rule, self.scores, self.positions, of.offsets, of.first_keys, self.head) & self.seen
        drop = self.seen & ~keep
        none, values, width = ~keep.any(dim=-1), self.values, min(rule.tile[1], self.keys.shape[1])
        # relative to the kept maximum: kept scores may be far below the overall one
        weights = torch.softmax(self.scores.masked_fill(~keep, -torch.inf), dim=-1)
        output = torch.where(none[..., None], -values.middle, torch.nan_to_num(weights) @ values.moved)
        gone = self.masses * drop
        kept, lost = (self.masses * keep).sum(dim=-1), gone.sum(dim=-1)
        total = torch.where(kept + lost > 0, kept + lost, 1.0)
        change = (gone @ values.moved - lost[..., None] * output) / total[..., None]
        centers, radii, spread = values.balls(width)
        upper = tile_sums(self.upper * drop, width)
        reach = distances(output, centers) + radii[:, None]
        farthest = torch.where(none, values.largest, spread)
        bound = change_bound(
            (upper * reach).sum(dim=-1),
            upper.sum(dim=-1),
            kept,
            drift=self.drift,
            spread=farthest,
            largest=values.largest.expand_as(lost),
            terms=self.terms,
        )
        moved, counts = torch.expm1(4 * self.drift) * farthest, width if rule.whole_tiles else 1
        dropped, visible = (tiles_of(t.double(), counts, 0.0).amax(dim=-1).sum(dim=-1) for t in (drop, self.seen))
        return {
            "change": change,
            "skipped": dropped / visible.clamp(min=1.0),
            "oracle": torch.where(lost > 0, self._most_at(lost, counts), dropped) / visible.clamp(min=1.0),
            "mass_lost": lost / total,
            "error_bound": torch.where(drop.any(dim=-1), self._measurable(bound, farthest, values.largest, moved), 0.0),
            "error": norms(change),
            "output_norm": self._norms(output + values.middle + change),
        }

    def _most_at(self, lost: Tensor, width: int) -> Tensor:
        """The largest number of visible tiles whose total mass is at most the lost mass."""
        if width not in self._orders:
            unseen = tiles_of(self.seen.double(), width, 0.0).amax(dim=-1) == 0
            masses = tile_sums(self.masses, width).masked_fill(unseen, torch.inf)
            self._orders[width] = masses.sort(dim=-1).values.cumsum(dim=-1)
        sums = self._orders[width]
        return torch.searchsorted(sums, (lost * (1 + 1e-9))[..., None], right=True)[..., 0].double()

    def _quantized(self, rule: Quantized) -> dict[str, Tensor]:
        """*Theorem*: `quantized-keys`."""
        values = self.values
        original = values.original
        keys, stored = rule.of(self.keys), rule.of(original)
        off_keys, off_values = norms(keys - self.keys)[:, None], norms(stored - original)[:, None]
        moved = stored - values.middle
        scores, added = self._with_keys(keys)
        before, after = (torch.nan_to_num(torch.softmax(s, dim=-1)) for s in (self.scores, scores))
        output, whole = after @ moved, before @ values.moved
        farthest = values.balls(1)[2] + off_values.amax(dim=-1)
        apart = farthest + off_values.amax(dim=-1)  # of two stored values
        largest = torch.maximum(values.largest, norms(stored).amax(dim=-1)[:, None])
        steps = abs(self.scale) * norms(self.queries)[..., None] * off_keys
        most = steps.amax(dim=-1)  # the stored keys and their scores are larger by this at most
        drift = self.drift + score_drift(most, most, self.keys.shape[-1], _UNIT)
        shift = steps + added + 2 * drift[..., None]
        # The output is rounded, and its distance from a value may be multiplied by a large exponential. Where one key has nearly
        # all of the weight, the weight of the others bounds this distance without cancellation.
        rounding, tiny = 4 * self.terms * _UNIT, self.terms * torch.finfo(torch.float64).tiny
        off_output = torch.expm1(4 * drift) * apart + rounding * largest + tiny
        reach = distances(output, moved) * (1 + rounding) + off_output[..., None]
        winner = after.argmax(dim=-1, keepdim=True)
        others = after.scatter(-1, winner, 0.0).sum(dim=-1) * (1 + rounding + torch.expm1(4 * drift)) + tiny
        nearest = torch.fmin(reach.gather(-1, winner), (others * apart * (1 + rounding) + tiny)[..., None])
        reach = reach.scatter(-1, winner, nearest)
        # relative to the largest term of the denominator: weights that underflow still matter if their scores may have moved far
        least = (scores - shift).amax(dim=-1, keepdim=True)
        grown = torch.exp(scores + shift - least) * (off_values - torch.expm1(-shift) * reach)
        found = grown.sum(dim=-1) / torch.exp(scores - shift - least).sum(dim=-1)
        changed = (self.seen & ~((off_keys == 0) & (off_values == 0))).any(dim=-1)
        nothing = torch.zeros_like(found)
        return {
            "change": whole - output,
            "skipped": nothing,
            "oracle": nothing,
            "mass_lost": nothing,
            "error_bound": torch.where(
                changed, self._measurable(found, farthest, largest, torch.expm1(4 * drift) * apart), 0.0
            ),
            "error": norms(whole - output),
            "output_norm": self._norms(whole + values.middle),
        }

    def _with_keys(self, keys: Tensor) -> tuple[Tensor, Tensor | float]:
        """The scores with other keys, and how far they moved because the score_mod changes with them."""
        scores, call = self.scores + self.scale * (self.queries @ (keys - self.keys).mT), self.sequences.call
        if self.sequences.fixed:
            raise UnsupportedError(
                "flex attention changes the scores of these heads, and its effect on other scores was not recorded",
                "For Quantized, pass the model and its inputs to pa.inspect.audit.",
            )
        if not call.changes_scores:
            return scores, 0.0
        found, _ = replace(call, keys=keys[:, None]).scores(0, self.rows, torch.float64)
        return found, torch.where(self.seen, (found - scores).abs(), 0.0).nan_to_num(nan=torch.inf)

    def _norms(self, outputs: Tensor) -> Tensor:
        return torch.where(self.seen.any(dim=-1), norms(outputs), 0.0)

    def _measurable(self, bound: Tensor, farthest: Tensor, largest: Tensor, moved: Tensor) -> Tensor:
        """The bound plus the rounding of two outputs that are computed in float64, each from its own scores, and subtracted.

        Args:
            bound: on the change in exact arithmetic, `(batch, rows)` like the others.
            farthest: another bound on it.
            largest: largest norm of a value.
            moved: how far rounded scores may move the outputs.
        """
        rounding = 4 * self.terms * _UNIT
        found = torch.fmin(bound * (1 + rounding) + moved, farthest * (1 + rounding))
        return found + rounding * largest + torch.finfo(found.dtype).tiny
