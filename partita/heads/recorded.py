"""Heads from plain data: the one place that maps the type in a record to a class."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from partita.errors import FormatError
from partita.geometry.domains import Box
from partita.heads.grid_head import GridHead
from partita.heads.head import Head
from partita.heads.network import AttentionNetwork
from partita.heads.scattered_head import ScatteredHead
from partita.heads.train_head import TrainHead

__all__ = ["HEAD_TYPES", "head_from_record"]

HEAD_TYPES: dict[str, type[Head]] = {head.kind: head for head in (GridHead, ScatteredHead, TrainHead, AttentionNetwork)}


def head_from_record(record: Mapping[str, Any], tensors: Mapping[str, Tensor], box: Box) -> Head:
    """The head that `head.record()` and `head.state_dict()` describe; see `Head.from_record`.

    >>> import torch
    >>> head = ScatteredHead(torch.eye(2), 4.0, torch.ones(2, 1), input_shapes=((2,),), output_shape=())
    >>> again = head_from_record(head.record(), head.state_dict(), Box([-1, -1], [1, 1]))
    >>> type(again).__name__, again.record() == head.record()
    ('ScatteredHead', True)
    """
    kind = record.get("type")
    if not isinstance(kind, str) or kind not in HEAD_TYPES:
        raise FormatError(f"head record: type is {kind!r}; expected one of {', '.join(HEAD_TYPES)}.")
    return HEAD_TYPES[kind].from_record(record, tensors, box)
