"""A table: named columns of equal length, of numbers, words or truths; what an experiment returns and a figure is drawn from."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from partita.arithmetic.notebook_cards import card
from partita.errors import ShapeError

__all__ = ["Cell", "Table", "Tables"]

Cell = float | int | str | bool | None
_DIGITS = 8  # significant: what is judged and drawn is exactly what is written


def _plain(value: Any) -> Cell:
    """A number, word or truth of the language itself; floats to eight digits, None for nothing."""
    if value is None or isinstance(value, (str, bool)):
        return value
    if isinstance(value, np.bool_):
        return bool(value)
    if isinstance(value, (int, np.integer)):
        return int(value)
    number = float(value)
    return float(f"{number:.{_DIGITS}g}") if math.isfinite(number) else number


@dataclass(frozen=True)
class Table:
    """Columns by name. Floats are kept to eight significant digits, so that reading what was written changes nothing.

    >>> t = Table.of([{"keys": 4, "error": 0.1}, {"keys": 16, "error": 0.05}])
    >>> t["error"].tolist(), t.where(keys=16)["error"].tolist()
    ([0.1, 0.05], [0.05])
    """

    columns: Mapping[str, tuple[Cell, ...]]

    def __post_init__(self) -> None:
        lengths = {name: len(column) for name, column in self.columns.items()}
        if len(set(lengths.values())) > 1:
            raise ShapeError(f"the columns have lengths {lengths}; expected one length.")

    @classmethod
    def of(cls, rows: Iterable[Mapping[str, Any]]) -> Table:
        """From rows that all have the same names."""
        listed = list(rows)
        names = list(listed[0]) if listed else []
        if any(list(row) != names for row in listed):
            raise ShapeError(f"the rows have different names; expected {names} in each.")
        return cls({name: tuple(_plain(row[name]) for row in listed) for name in names})

    def __repr__(self) -> str:
        return f"Table({len(self)} rows: {', '.join(self.columns)})"

    def _repr_html_(self) -> str:
        return card(f"{len(self)} rows", columns=list(self.columns), rows=zip(*self.columns.values(), strict=True))

    def __len__(self) -> int:
        return len(next(iter(self.columns.values()), ()))

    def __getitem__(self, name: str) -> NDArray[Any]:
        """A column as an array; nothing (None) becomes NaN among numbers."""
        column = self.columns[name]
        if any(isinstance(v, str) for v in column):
            return np.array(column, dtype=object)
        return np.array([math.nan if v is None else v for v in column])

    def where(self, **wanted: Cell) -> Table:
        """The rows in which every named column has the given value."""
        keep = [i for i in range(len(self)) if all(self.columns[name][i] == v for name, v in wanted.items())]
        return self.take(keep)

    def take(self, rows: Sequence[int]) -> Table:
        """These rows, in this order."""
        return Table({name: tuple(column[i] for i in rows) for name, column in self.columns.items()})

    def distinct(self, name: str) -> list[Any]:
        """The values of a column, each once, in the order in which they appear."""
        return list(dict.fromkeys(self.columns[name]))

    def rows(self) -> list[dict[str, Any]]:
        return [{name: column[i] for name, column in self.columns.items()} for i in range(len(self))]

    def to_csv(self) -> str:
        """Comma-separated, names first, nothing as an empty field."""
        out = io.StringIO()
        writer = csv.writer(out, lineterminator="\n")
        writer.writerow(self.columns)
        writer.writerows([["" if v is None else v for v in row.values()] for row in self.rows()])
        return out.getvalue()

    @classmethod
    def from_csv(cls, text: str) -> Table:
        """What `to_csv` wrote: words that read as whole numbers, numbers or truths become those."""
        lines = list(csv.reader(io.StringIO(text)))
        if not lines or any(len(line) != len(lines[0]) for line in lines):
            raise ShapeError("the text is not a table: its lines have different numbers of fields, or there are none.")
        return cls({name: tuple(_read(line[i]) for line in lines[1:]) for i, name in enumerate(lines[0])})


def _read(field: str) -> Cell:
    if field in ("True", "False"):
        return field == "True"
    for kind in (int, float):
        try:
            return kind(field)
        except ValueError:
            continue
    return field or None


Tables = Mapping[str, Table]
