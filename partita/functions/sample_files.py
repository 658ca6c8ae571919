"""Columns of numbers from CSV and parquet files; every error names the file, the column and the line."""

from __future__ import annotations

import csv
import difflib
import os
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from partita.errors import MissingExtraError, TableError
from partita.geometry.domains import Array

__all__ = ["read_csv", "read_parquet"]

_DELIMITERS = ",;\t"
_MISSING = frozenset(("", "na", "n/a", "nan", "null", "none", "-", "?"))
_SHOWN = 20  # names in a message


def read_csv(
    path: str | os.PathLike[str], names: Sequence[str], delimiter: str | None = None
) -> tuple[Array, NDArray[np.int64]]:
    """The named columns of a CSV file `(n, len(names))`, and the line of every row `(n,)`.

    Args:
        path: the file, whose first line has the names of its columns.
        names: of the columns that are read.
        delimiter: what stands between fields; None for whichever of `,`, `;` and tab the first line has.

    Raises:
        TableError: anything is wrong with the file.
    """
    place = Path(path)
    try:
        with open(place, encoding="utf-8-sig", newline="") as file:
            return _columns(place.name, _Records(file, delimiter), names)
    except (OSError, UnicodeDecodeError, csv.Error, TypeError) as error:  # of a delimiter that is none
        said = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise TableError(f"{place} cannot be read as a CSV file: {said}.") from None


class _Records:
    """The records of a CSV file, without empty lines and those that start with #; `line` is where the latest one ends."""

    def __init__(self, file: Iterable[str], delimiter: str | None) -> None:
        self.line = 0
        self._lines = self._counted(file)
        first = next(self._lines, "")
        between = delimiter or max(_DELIMITERS, key=first.count)
        self._reader = csv.reader(chain([first] if first else [], self._lines), delimiter=between, strict=True)

    def _counted(self, file: Iterable[str]) -> Iterator[str]:
        for number, line in enumerate(file, 1):
            if line.strip() and not line.lstrip().startswith("#"):
                self.line = number
                yield line

    def __iter__(self) -> Iterator[list[str]]:
        return iter(self._reader)


def _columns(file: str, records: _Records, names: Sequence[str]) -> tuple[Array, NDArray[np.int64]]:
    every = iter(records)
    held = [name.strip() for name in next(every, [])]
    if not held:
        raise TableError(f"{file} is empty; expected a line with the names of its columns, then one line for each row.")
    first = records.line
    if all(_number(name) is not None for name in held):
        raise TableError(
            f"{file}, line {first}: found numbers where the names of the columns are expected",
            "Add a first line with names, or read the numbers yourself: pa.Table(X, y).",
        )
    chosen = _places(file, held, names)
    rows, numbers = [], []
    for fields in every:
        if len(fields) != len(held):
            found = f"found {len(fields)} fields; expected {len(held)}, as in line {first}"
            raise TableError(f"{file}, line {records.line}: {found}.")
        rows.append([_value(file, records.line, held[k], fields[k]) for k in chosen])
        numbers.append(records.line)
    if not rows:
        raise TableError(f"{file} has no rows below line {first}, which has the names of its columns.")
    return np.array(rows, dtype=np.float64), np.array(numbers, dtype=np.int64)


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def _value(file: str, line: int, column: str, text: str) -> float:
    where = f"{file}, line {line}, column {column!r}"
    if text.strip().lower() in _MISSING:
        raise TableError(f"{where}: the value is missing", "Fill it in, or leave this line out.")
    found = _number(text)
    if found is None:
        hint = "Write decimals with a point." if _number(text.replace(",", ".")) is not None else ""
        raise TableError(f"{where}: {text.strip()[:40]!r} is not a number", hint)
    return found


def _places(file: str, held: Sequence[str], names: Sequence[str]) -> list[int]:
    """Where the named columns stand among those that a file has."""
    found = []
    for name in names:
        if held.count(name) > 1:
            raise TableError(f"{file} has {held.count(name)} columns called {name!r}; expected one.")
        if name not in held:
            near = difflib.get_close_matches(str(name), held, 1)
            shown = ", ".join(held[:_SHOWN]) + ", …" * (len(held) > _SHOWN)
            raise TableError(
                f"{file} has no column {name!r}; its columns are {shown}", f"Did you mean {near[0]!r}?" if near else ""
            )
        found.append(held.index(name))
    return found


def read_parquet(path: str | os.PathLike[str], names: Sequence[str]) -> tuple[Array, None]:
    """The named columns of a parquet file `(n, len(names))`; its rows have no lines.

    Args:
        path: the file.
        names: of the columns that are read.

    Raises:
        MissingExtraError: the extra `tables` is not installed.
        TableError: anything is wrong with the file.
    """
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError as error:
        raise MissingExtraError.of("parquet files need", "tables") from error
    place = Path(path)
    try:
        with open(place, "rb") as opened, parquet.ParquetFile(opened) as file:
            held = file.schema_arrow
            _places(place.name, held.names, names)
            for name in names:
                kind = held.field(name).type
                if not (
                    pyarrow.types.is_integer(kind) or pyarrow.types.is_floating(kind) or pyarrow.types.is_decimal(kind)
                ):
                    raise TableError(f"{place.name}, column {name!r}: it holds {kind}; expected numbers.")
            read = file.read(columns=list(names))
            columns = [_parquet_column(place.name, name, read.column(name)) for name in names]
    except (OSError, pyarrow.ArrowException) as error:
        said = error.strerror if isinstance(error, OSError) and error.strerror else " ".join(str(error).split())
        raise TableError(f"{place} cannot be read as a parquet file: {said}.") from None
    return np.column_stack(columns), None


def _parquet_column(file: str, name: str, column: object) -> Array:
    values = column.to_numpy()  # type: ignore[attr-defined]
    if column.null_count:  # type: ignore[attr-defined]
        first = next(i for i, known in enumerate(column.is_valid().to_pylist()) if not known)  # type: ignore[attr-defined]
        raise TableError(
            f"{file}, column {name!r}: the value in row {first} (counted from 0) is missing",
            "Fill it in, or leave this row out.",
        )
    found: Array = np.asarray(values).astype(np.float64)
    return found
