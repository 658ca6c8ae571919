"""Runs a model with a separate rule for each head, to measure how thresholds or other rules change its loss."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from torch import nn

from partita.errors import UnsupportedError
from partita.inspection.audited_heads import answer_under
from partita.inspection.calibration import Calibration
from partita.inspection.hardening import Which, replacing, wanted_heads
from partita.inspection.interception import Reader
from partita.inspection.rules import Rule, require_rule

__all__ = ["thinned"]


@contextmanager
def thinned(
    model: nn.Module,
    rules: Mapping[Which, Rule] | Calibration,
    *,
    readers: Mapping[str, Reader] | None = None,
) -> Iterator[dict[str, int]]:
    """Inside the `with`, each chosen head runs under its rule. Nothing becomes faster: all keys are still scored.

    Args:
        model: the module to change.
        rules: `{(layer, head): rule}` with names as in `capture`, or what `calibrate` returned.
        readers: as in `capture`.

    Yields:
        `{layer: number of heads}` of the layers that ran so far.

    Raises:
        UnsupportedError: rules has the wrong type, or a head did not run or cannot be replaced.

    >>> import torch, partita as pa
    >>> attention = torch.nn.MultiheadAttention(8, 2, batch_first=True).eval()
    >>> x = torch.randn(1, 5, 8)
    >>> with pa.inspect.thinned(attention, {("MultiheadAttention", 0): pa.inspect.TopK(1)}), torch.no_grad():
    ...     thin = attention(x, x, x)[0]
    >>> bool((thin != attention(x, x, x)[0]).any())
    True
    """
    if isinstance(rules, Calibration):
        rules = {(h.layer, h.head): rules.rule(h.layer, h.head) for h in rules.heads}
    if not isinstance(rules, Mapping):
        raise UnsupportedError(
            f"rules is {type(rules).__name__}; expected {{(layer, head): rule}}, or what `calibrate` returned."
        )
    wanted_heads(rules)
    answers = {which: answer_under(require_rule(rule)) for which, rule in rules.items()}
    with replacing(model, answers, readers, inside="thinned") as met:
        yield met
