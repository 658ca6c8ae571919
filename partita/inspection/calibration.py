"""Thresholds for skipping blocks: chosen per head for a wanted error, checked on held-out inputs, saved as JSON."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import nn

from partita.arithmetic.arguments import is_number, is_series, require_count, require_number
from partita.arithmetic.notebook_cards import aligned, card, counted, short
from partita.errors import DomainError, FormatError, NewerVersionError, PartitaError, UnsupportedError
from partita.inspection.audited_heads import Audit, AuditedHead, audit, one_tile
from partita.inspection.captured_heads import CapturedHeads, HeadRecord, are_captured
from partita.inspection.hardening import Which
from partita.inspection.interception import Reader
from partita.inspection.rules import SkipBlocks
from partita.storage.files import read_regular, write_json

__all__ = ["CalibratedHead", "Calibration", "calibrate", "load_calibration"]

FORMAT, VERSION = "partita-thresholds", 1
_LARGEST_FILE = 64 << 20  # bytes
_GRID = tuple(2.0**-k for k in range(20, -1, -1))


@dataclass(frozen=True)
class CalibratedHead:
    """The threshold of one head, and its effect on held-out inputs.

    Attributes:
        layer: the module path of the layer.
        head: its number within the layer.
        threshold: threshold of `SkipBlocks`; 0 skips nothing.
        skipped: mean share of tiles that it skipped.
        mass_lost: largest lost mass.
        error: largest change of the output.
        error_bound: largest proved bound on the change.
        beyond: share of the queries whose output changed by more than the wanted error.
        beyond_bound: share of the queries for which the proved bound exceeds the wanted error.
        queries: number of queries.
    """

    layer: str
    head: int
    threshold: float
    skipped: float
    mass_lost: float
    error: float
    error_bound: float
    beyond: float
    beyond_bound: float
    queries: int

    @property
    def name(self) -> str:
        """ "layer:head"."""
        return f"{self.layer}:{self.head}"


@dataclass(frozen=True, eq=False)
class Calibration:
    """Thresholds per head or layer for a wanted error, with their effect on held-out inputs.

    Attributes:
        error: the wanted error of a head's output, as a Euclidean norm.
        per: "head" or "layer".
        by: "error" if thresholds were chosen by the measured change, "error_bound" if by its proved bound.
        tile: queries and keys of a block.
        sequences: how many sequences the thresholds were chosen on.
        held_out: how many sequences they were checked on.
        heads: one `CalibratedHead` per head.
        descending: whether the last tile of keys comes first.
        tiles: number of tiles of keys in the longest sequence; 0 if unknown.
    """

    error: float
    per: str
    by: str
    tile: tuple[int, int]
    sequences: int
    held_out: int
    heads: tuple[CalibratedHead, ...]
    descending: bool = False
    tiles: int = 0

    def rule(self, layer: str, head: int) -> SkipBlocks:
        """The rule of one head.

        Args:
            layer: the module path of the layer.
            head: its number within the layer.

        Raises:
            UnsupportedError: the head was not calibrated.
        """
        for found in self.heads:
            if (found.layer, found.head) == (layer, head):
                return SkipBlocks(found.threshold, tile=self.tile, descending=self.descending)
        names = ", ".join(h.name for h in self.heads[:6])
        raise UnsupportedError(f"head {head} of layer {layer!r} was not calibrated. Calibrated: {names}, ….")

    def rows(self) -> list[dict[str, Any]]:
        """One row per head, for `pandas.DataFrame`."""
        return [asdict(h) for h in self.heads]

    def to_json(self) -> dict[str, Any]:
        """The calibration as a dict of plain data, which `load_calibration` reads."""
        about = {name: getattr(self, name) for name in ("error", "per", "by", "sequences", "held_out", "tiles")}
        head = {"format": FORMAT, "version": VERSION, "rule": "SkipBlocks", "tile": list(self.tile)}
        return {**head, "descending": self.descending, **about, "heads": self.rows()}

    def save(self, path: str | Path) -> Path:
        """Write the calibration as JSON.

        Args:
            path: the file. It is replaced if it exists; parents are created.
        """
        return write_json(path, self.to_json())

    def _title(self) -> str:
        skipped = float(np.mean([h.skipped for h in self.heads]))
        queries = np.array([h.queries for h in self.heads], dtype=float)
        beyond, proved = (
            float(queries @ np.array([getattr(h, name) for h in self.heads]) / queries.sum())
            for name in ("beyond", "beyond_bound")
        )
        return (
            f"thresholds per {self.per} for an error of {self.error:g}: {skipped:.1%} of the tiles skipped on "
            f"{counted(self.held_out, 'held-out sequence')}, {beyond:.2%} of the queries beyond (by the proved bound {proved:.2%})"
            + (f"; {one_tile(self.tile)}" if self.tiles == 1 else "")
        )

    def _shown(self) -> list[tuple[str, ...]]:
        names = ("", "threshold", "skipped", "error", "bound", "beyond", "beyond by bound")
        rows = []
        for h in self.heads:
            shares = (f"{h.beyond:.2%}", f"{h.beyond_bound:.2%}")
            rows.append((h.name, short(h.threshold), f"{h.skipped:.1%}", short(h.error), short(h.error_bound), *shares))
        return [names, *rows]

    def __repr__(self) -> str:
        return f"Calibration({counted(len(self.heads), 'head')}; {self._title()})"

    def _repr_html_(self) -> str:
        columns, *rows = self._shown()
        return card(self._title(), columns=columns, rows=rows)

    def __str__(self) -> str:
        return "\n".join([self._title(), *aligned(self._shown())])


def calibrate(
    model: nn.Module | CapturedHeads | HeadRecord | Iterable[HeadRecord],
    inputs: Any = None,
    rule: type[SkipBlocks] | SkipBlocks = SkipBlocks,
    *,
    error: float,
    per: str = "head",
    by: str = "error",
    held_out: Any = None,
    thresholds: Sequence[float] = _GRID,
    heads: Sequence[Which | HeadRecord] | None = None,
    readers: Mapping[str, Reader] | None = None,
    progress: Callable[[str, int, int], None] | None = None,
) -> Calibration:
    """Find the largest threshold of `SkipBlocks` for each head that keeps every output within `error`.

    A threshold qualifies if it and all smaller ones in `thresholds` change every query of the calibration sequences by at most
    `error`. The largest that qualifies is taken, or 0 if none does. If smaller ones skip exactly as much, the smallest of these is
    taken, because the calibration did not test what else the larger ones would skip. Other inputs may exceed the error; the share
    of queries beyond it is measured on held-out sequences. `pa.attend_blocks` guarantees an error at run time.

    Args:
        model: the module; or what `capture` recorded, and then no inputs are needed.
        inputs: as for `audit`: a list of inputs, or inputs with a batch axis. Every fourth sequence is held out, and the last one
            if there are fewer than four, unless `held_out` is given.
        rule: `SkipBlocks`, or an instance of it, of which only tile and order are used.
        error: the wanted error of a head's output, as a Euclidean norm.
        per: "head", or "layer" for one threshold per layer.
        by: "error" to choose by the measured change, "error_bound" to choose by its proved bound, which skips less.
        held_out: inputs to check on; captured heads if `model` is captured heads.
        thresholds: the candidates; 2⁻²⁰, 2⁻¹⁹, …, 1 by default.
        heads: `(layer, head)` as `capture` names them, or records. All by default.
        readers: as for `capture`, for attention written out by hand.
        progress: called as `progress(name, done, of)`.

    Returns:
        A `Calibration`; its `save` writes JSON, and `load_calibration` reads it.

    Raises:
        UnsupportedError: there is only one sequence and no `held_out`, or an argument is invalid.
        DomainError: error is not a finite number > 0, or a threshold is outside [0, 1].

    >>> import torch, partita as pa
    >>> attention = torch.nn.MultiheadAttention(8, 2, batch_first=True).eval()
    >>> x = torch.randn(4, 32, 8)
    >>> found = pa.inspect.calibrate(attention, (x, x, x), pa.inspect.SkipBlocks(0, tile=(4, 4)), error=0.05)
    >>> found.held_out, [head.name for head in found.heads]
    (1, ['MultiheadAttention:0', 'MultiheadAttention:1'])
    """
    error = require_number("error", error)
    for name, value, allowed in (("per", per, ("head", "layer")), ("by", by, ("error", "error_bound"))):
        if not isinstance(value, str) or value not in allowed:
            raise UnsupportedError(f"{name} is {value!r}; expected {' or '.join(map(repr, allowed))}.")
    if rule is not SkipBlocks and not isinstance(rule, SkipBlocks):
        raise UnsupportedError(f"rule is {rule!r}; expected SkipBlocks, or SkipBlocks(0, tile=(queries, keys)).")
    if not is_series(thresholds):
        raise UnsupportedError(f"thresholds is {thresholds!r}; expected a list of numbers from 0 to 1.")
    if isinstance(model, nn.Module) and are_captured(held_out):
        raise UnsupportedError(
            "held_out are captured heads, but model is a module; expected inputs of the model, or captured heads for both."
        )
    pattern = rule if isinstance(rule, SkipBlocks) else SkipBlocks(0.0)
    thresholds = list(thresholds)
    if not thresholds:
        raise UnsupportedError("thresholds is empty; expected numbers from 0 to 1.")
    grid = sorted({0.0, *(replace(pattern, threshold=t).threshold for t in thresholds)})
    rules = [replace(pattern, threshold=t) for t in grid]
    options: dict[str, Any] = {"heads": heads, "readers": readers, "progress": progress}
    found = audit(model, inputs, rules, **options)
    table = _Table.of(found, len(grid))
    if held_out is None:
        chosen_on, checked = table.split()
    else:
        of_model = isinstance(model, nn.Module)
        again = audit(model if of_model else held_out, held_out if of_model else None, rules, **options)
        chosen_on, checked = table, _Table.of(again, len(grid))
        if set(checked.heads) != set(table.heads):
            raise UnsupportedError("the held-out inputs used different heads from the calibration inputs.")
    groups: dict[Any, list[Which]] = {}
    for which in table.heads:
        groups.setdefault(which[0] if per == "layer" else which, []).append(which)
    numbers = {group: chosen_on.largest(members, error, by) for group, members in groups.items()}
    picked = {which: numbers[which[0] if per == "layer" else which] for which in table.heads}
    done = [checked.checked(which, grid[number], number, error) for which, number in picked.items()]
    counts = chosen_on.sequences, checked.sequences
    tiles = max(h.tiles for h in found.heads)
    return Calibration(error, per, by, pattern.tile, *counts, tuple(done), pattern.descending, tiles)


@dataclass(frozen=True, eq=False)
class _Table:
    """For each head the effect of each threshold, on the sequences that are used."""

    heads: dict[Which, tuple[AuditedHead, ...]]
    used: NDArray[np.int64]

    @classmethod
    def of(cls, found: Audit, count: int) -> _Table:
        each = len(found.heads) // count
        rows = {(h.layer, h.head): found.heads[n::each] for n, h in enumerate(found.heads[:each])}
        return cls(rows, np.arange(1 + max(int(h.sequence.max()) for h in found.heads)))

    @property
    def sequences(self) -> int:
        return len(self.used)

    def split(self) -> tuple[_Table, _Table]:
        """The table on three quarters of the sequences, and on every fourth."""
        if self.sequences < 2:
            raise UnsupportedError(
                "there is one sequence, so none can be held out; give several inputs, or other inputs as held_out=."
            )
        out = self.used[3::4] if self.sequences > 3 else self.used[-1:]
        return _Table(self.heads, np.setdiff1d(self.used, out)), _Table(self.heads, out)

    def _numbers(self, head: AuditedHead, name: str) -> NDArray[Any]:
        numbers: NDArray[Any] = getattr(head, name)[np.isin(head.sequence, self.used)]
        if not len(numbers):
            raise UnsupportedError(f"{head.name}: no query of sequences {self.used.tolist()[:5]} sees a key.")
        return numbers

    def largest(self, members: Sequence[Which], error: float, by: str) -> int:
        """Index of the smallest threshold that skips as much as the largest safe one.

        The first one, 0, drops nothing.
        """
        each = list(zip(*(self.heads[which] for which in members)))  # the heads at each threshold
        good = [all(bool((self._numbers(head, by) <= error).all()) for head in heads) for heads in each]
        last = good.index(False) - 1 if False in good else len(good) - 1
        skipped = [sum(float(self._numbers(head, "skipped").sum()) for head in heads) for heads in each]
        return skipped.index(skipped[last])

    def checked(self, which: Which, threshold: float, number: int, error: float) -> CalibratedHead:
        names = ("skipped", "mass_lost", "error", "error_bound")
        skipped, lost, change, bound = (self._numbers(self.heads[which][number], name) for name in names)
        return CalibratedHead(
            *which,
            threshold,
            skipped=float(skipped.mean()),
            mass_lost=float(lost.max()),
            error=float(change.max()),
            error_bound=float(bound.max()),
            beyond=float((change > error).mean()),
            beyond_bound=float((bound > error).mean()),
            queries=len(change),
        )


def load_calibration(path: str | Path) -> Calibration:
    """Read a calibration that `Calibration.save` wrote, and check it.

    Args:
        path: the JSON file.

    Raises:
        TruncatedFileError: the file does not exist.
        FormatError: the file is not a calibration, cannot be read, or contains a value out of range.
        NewerVersionError: the file has a newer format.

    >>> import torch, tempfile, partita as pa
    >>> attention = torch.nn.MultiheadAttention(8, 2, batch_first=True).eval()
    >>> x = torch.randn(4, 32, 8)
    >>> found = pa.inspect.calibrate(attention, (x, x, x), error=0.05)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     again = pa.inspect.load_calibration(found.save(f"{folder}/thresholds.json"))
    >>> again.rows() == found.rows()
    True
    """
    if not isinstance(path, (str, os.PathLike)):
        raise UnsupportedError(f"path is of type {type(path).__name__}; expected the path of a JSON file.")
    try:
        data = json.loads(read_regular(Path(path), _LARGEST_FILE).decode())
    except (ValueError, RecursionError) as problem:
        raise FormatError(f"{path} is not JSON: {problem}.") from problem
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise FormatError(f"{path}: expected a JSON object with format {FORMAT!r}.")
    version = data.get("version")
    if not isinstance(version, int) or isinstance(version, bool) or version < 1:
        raise FormatError(f"{path} has version {version!r}; expected a number from 1 to {VERSION}.")
    if version > VERSION:
        raise NewerVersionError(f"{path} has version {version}; this partita reads up to {VERSION}.")
    try:
        return _from_json(data)
    except PartitaError as problem:
        raise FormatError(f"{path}: {problem.reason}") from problem
    except (KeyError, TypeError, ValueError) as problem:
        raise FormatError(f"{path}: something is missing or has the wrong type ({problem!r}).") from problem


def _from_json(data: dict[str, Any]) -> Calibration:
    if (
        data["rule"] != "SkipBlocks"
        or data["per"] not in ("head", "layer")
        or data["by"] not in ("error", "error_bound")
    ):
        raise DomainError(f"rule, per and by are {data['rule']!r}, {data['per']!r}, {data['by']!r}.")
    heads = []
    for row in data["heads"]:
        head = CalibratedHead(**row)
        rule = SkipBlocks(head.threshold, tile=tuple(data["tile"]), descending=data["descending"])
        shares = (head.skipped, head.mass_lost, head.beyond, head.beyond_bound)
        if not all(is_number(s) and 0 <= s <= 1 for s in shares) or not all(
            is_number(e) and 0 <= e <= sys.float_info.max for e in (head.error, head.error_bound)
        ):
            raise DomainError(f"{head.name}: a share is outside [0, 1], or an error is not a finite number ≥ 0.")
        if not isinstance(head.layer, str) or type(head.head) is not int or head.head < 0:
            raise DomainError(f"{head.name}: expected layer to be text and head an integer ≥ 0.")
        head.layer.encode()  # half of a surrogate pair could not be written again
        require_count("queries", head.queries)
        if head.error > head.error_bound or head.beyond > head.beyond_bound:
            raise DomainError(f"{head.name}: the error is above its bound, or beyond is larger than beyond_bound.")
        heads.append(head)
    if not heads or len({h.name for h in heads}) < len(heads):
        raise DomainError("heads is empty or names a head twice.")
    error = require_number("error", data["error"])
    if data["per"] == "layer" and len({(h.layer, h.threshold) for h in heads}) > len({h.layer for h in heads}):
        raise DomainError("per is 'layer', but heads of one layer have different thresholds.")
    counts = (require_count("sequences", data["sequences"]), require_count("held_out", data["held_out"]))
    tiles = require_count("tiles", data.get("tiles", 0), least=0)
    return Calibration(error, data["per"], data["by"], rule.tile, *counts, tuple(heads), rule.descending, tiles)
