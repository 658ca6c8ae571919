"""Which tokens of a sequence are equal: from given ids or labels, or from the ids that reach a model's embedding."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from partita.arithmetic.notebook_cards import counted
from partita.errors import ShapeError, UnsupportedError

__all__ = ["SeenTokens", "TokenIds", "labels_of"]

Ids = NDArray[np.int64]

_MOST_TABLES = 64  # embeddings remembered before an attention
_FEW_ROWS, _MUCH_SMALLER = 16, 8  # most rows of a table of segments; a vocabulary is at least this many times as large
_FEW = 4  # tokens: shorter sequences are too short to tell


@dataclass(frozen=True, eq=False)
class TokenIds:
    """The tokens of some sequences, as numbers that are equal for equal tokens.

    Attributes:
        sequences: one array per sequence.
    """

    sequences: tuple[Ids, ...]

    @classmethod
    def of_any(cls, tokens: Any) -> TokenIds:
        """From ids or labels: one sequence, or a list of them, or an array `(sequences, tokens)`.

        Args:
            tokens: integers or strings.

        Raises:
            UnsupportedError: they are neither.
        """
        return cls(tuple(_numbers(row) for row in _rows(tokens)))

    def of(self, which: range, count: int, layer: str) -> Ids:
        """The tokens of some sequences, `(sequences, tokens)`.

        Args:
            which: numbers of the sequences.
            count: the tokens that each must have.
            layer: name used in the error message.

        Raises:
            ShapeError: a sequence is missing, or has another number of tokens.
        """
        found = []
        for number in which:
            row = self.sequences[number] if number < len(self.sequences) else None
            if row is None or len(row) != count:
                wrong = (
                    f"there are tokens for {counted(len(self.sequences), 'sequence')}; expected at least {which.stop}"
                    if row is None
                    else f"sequence {number} has {counted(len(row), 'token')}; expected {count}"
                )
                raise ShapeError(
                    f"{wrong}, as in {layer}",
                    "Give one list of ids or labels per sequence, padding included.",
                )
            found.append(row)
        return np.stack(found) if found else np.empty((0, count), dtype=np.int64)


_EXPECTED = "expected a list of strings or of token ids per sequence, or one such list"


def _rows(tokens: Any) -> list[list[Any]]:
    """The sequences as lists of strings or of integers. Raises an UnsupportedError for anything else."""
    listed = _plain(tokens)
    if not isinstance(listed, list):
        raise UnsupportedError(f"tokens is of type {type(tokens).__name__}; {_EXPECTED}.")
    rows = listed if all(isinstance(row, list) for row in listed) else [listed]
    for row in rows:
        kinds = {str if isinstance(t, str) else int if isinstance(t, int) else type(t) for t in row}
        if len(kinds) > 1 or kinds - {str, int}:
            names = ", ".join(sorted(kind.__name__ for kind in kinds))
            raise UnsupportedError(f"a sequence of tokens contains {names}; {_EXPECTED}.")
    return rows


def _plain(tokens: Any) -> Any:
    """Converts arrays, tensors and tuples to lists, at every level."""
    tokens = tokens.tolist() if hasattr(tokens, "tolist") else tokens
    return [_plain(t) for t in tokens] if isinstance(tokens, list | tuple) else tokens


def _numbers(row: list[Any]) -> Ids:
    names: dict[str, int] = {}
    return np.array([t if isinstance(t, int) else names.setdefault(t, len(names)) for t in row], dtype=np.int64)


def labels_of(tokens: Any, tokenizer: Any = None) -> list[list[str]]:
    """The labels of tokens, for people: one list of strings per sequence.

    Args:
        tokens: ids or labels, as `TokenIds.of_any` takes them.
        tokenizer: turns ids into labels: an object with `convert_ids_to_tokens` or `decode`, or a function of one id. Without
            one, ids are shown as numbers.

    Raises:
        UnsupportedError: tokens or tokenizer have the wrong type.

    >>> labels_of([5, 7], {5: "a", 7: "b"}.get)
    [['a', 'b']]
    """
    return [_words(row, tokenizer) for row in _rows(tokens)]


def _words(row: list[Any], tokenizer: Any) -> list[str]:
    if row and isinstance(row[0], str):
        return list(row)
    if tokenizer is None:
        return [str(t) for t in row]
    if hasattr(tokenizer, "convert_ids_to_tokens"):
        return [str(t) for t in tokenizer.convert_ids_to_tokens(row)]
    if not hasattr(tokenizer, "decode") and not callable(tokenizer):
        raise UnsupportedError(
            f"tokenizer is of type {type(tokenizer).__name__}; expected an object with convert_ids_to_tokens or decode, or a "
            "function of one id."
        )
    known = {t: str(tokenizer.decode([t]) if hasattr(tokenizer, "decode") else tokenizer(t)) for t in set(row)}
    return [known[t] for t in row]


@dataclass(eq=False)
class SeenTokens:
    """Ids that reached an embedding in the current pass. Positions and segments are embedded, too; they are recognised because
    they count up, are all equal, or have a table of few rows."""

    _found: deque[tuple[int, Ids]] = field(default_factory=lambda: deque(maxlen=_MOST_TABLES))
    _attended: bool = False

    def embedding_seen(self, ids: Tensor, rows: int) -> None:
        """Called with the ids that reach an embedding.

        Args:
            ids: integers of any shape.
            rows: number of rows of the table.
        """
        if self._attended:  # a new pass
            self._found.clear()
            self._attended = False
        if ids.is_nested or ids.is_meta or ids.dim() not in (1, 2) or ids.dtype not in (torch.int64, torch.int32):
            return
        held = ids.detach().cpu().numpy().astype(np.int64)
        self._found.append((rows, held[None] if held.ndim == 1 else held))

    def attention_seen(self) -> None:
        """Called at every attention. Later embeddings belong to the next pass, or do not matter."""
        self._attended = True

    def of(self, batch: int, tokens: int) -> Ids | None:
        """The ids of this shape that look like tokens, `(batch, tokens)`; None if there are none, or several different ones.

        Args:
            batch: number of sequences.
            tokens: their length.
        """
        fitting = [(rows, ids) for rows, ids in self._found if ids.shape == (batch, tokens) and tokens > 1]
        likely = [(rows, ids) for rows, ids in fitting if not _is_counted(ids)]
        largest = max((rows for rows, _ in likely), default=0)
        likely = [(rows, ids) for rows, ids in likely if rows > _FEW_ROWS or rows * _MUCH_SMALLER > largest]
        found = [ids for _, ids in likely if not _is_counted(ids, restarts=True)] or [ids for _, ids in likely]
        return found[0] if found and all(np.array_equal(ids, found[0]) for ids in found) else None


def _is_counted(ids: Ids, *, restarts: bool = False) -> bool:
    """Whether these are positions or segments: each sequence is constant, or all count up from the same number in steps of 0 or 1,
    except for constant padding at either end.

    With `restarts`, whether they count up by 1 and restart from the first number, as positions of packed documents do.
    """
    if not np.diff(ids, axis=1).any():
        return True
    if ids.shape[1] < _FEW and not (ids == ids[:1]).all():
        return False  # too short to tell
    counting = [_counting_parts(row, restarts) for row in ids]
    starts = set.intersection(*({int(part[0]) for part in parts} for parts in counting))
    long = any(len(part) > _FEW and part[0] in starts for parts in counting for part in parts)
    whole = all(len(part) == ids.shape[1] for parts in counting for part in parts[:1])
    return bool(starts) and (long or whole)


def _counting_parts(row: Ids, restarts: bool) -> list[Ids]:
    """The parts that count up, among the row and the row without a constant run at either end."""
    parts = [row, row[: len(row) - _run(row[::-1])], row[_run(row) :]]
    return [part for part in parts if len(part) and _counts_up(part, restarts)]


def _counts_up(part: Ids, restarts: bool) -> bool:
    steps = np.diff(part)
    return bool(((steps == 1) | ((part[1:] == part[0]) if restarts else (steps == 0))).all())


def _run(row: Ids) -> int:
    """Length of the constant run at the beginning; all of it if the row is constant."""
    return int(np.argmax(row != row[0])) if (row != row[0]).any() else len(row)
