"""A table of samples in place of a function: rows of inputs and outputs, checked once, and which of them a fit may not see."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from partita.arithmetic.arguments import is_number, real_array
from partita.errors import ShapeError, TableError
from partita.functions.sample_files import read_csv, read_parquet
from partita.geometry.domains import Array, Box

__all__ = ["Noise", "Table"]

_FEWEST = 10  # different inputs, of which two are held out


@dataclass(frozen=True)
class Noise:
    """How far rows with the same inputs differ.

    Attributes:
        inputs: how many different inputs occur in several rows with different outputs.
        deviation: the standard deviation of an output at one input, estimated from these rows together; the largest of the outputs.
        largest: the largest difference between two of them.
        rows: two rows that differ by that much.
    """

    inputs: int
    deviation: float
    largest: float
    rows: tuple[int, int]


@dataclass(frozen=True, eq=False)
class Table:
    """Samples of a function: `pa.compile(table, tolerance=…)` fits a head to them, whose claim is an estimate.

    Args:
        X: inputs `(n, m)`.
        y: outputs `(n,)` or `(n, out)`.
        inputs: names of the columns of X; None for x0, x1, …
        outputs: names of the columns of y; None for y0, y1, …
        held_out: the share of the rows that the fit does not see. The error is estimated from them.
        name: what the table is called in messages and certificates.
        lines: where each row stands in its file, `(n,)`, for messages; None to count rows from 0.

    Raises:
        TableError: missing values, a constant column of X, fewer than 10 different inputs, or names that do not fit.
        ShapeError: X and y are not arrays of numbers with one row for each sample.

    >>> import partita as pa
    >>> x = np.linspace(0, 1, 50)[:, None]
    >>> table = pa.Table(x, np.sin(3 * x[:, 0]), inputs=["t"], outputs=["u"])
    >>> table
    Table('table': 50 rows, inputs t, outputs u)
    >>> pa.compile(table, tolerance=0.01).certificate.kind
    'estimated'
    """

    X: Array
    y: Array
    inputs: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()
    held_out: float = 0.2
    name: str = "table"
    lines: NDArray[np.int64] | None = None

    if TYPE_CHECKING:

        def __init__(
            self,
            X: ArrayLike,
            y: ArrayLike,
            inputs: Sequence[str] | None = None,
            outputs: Sequence[str] | None = None,
            held_out: float = 0.2,
            name: str = "table",
            lines: ArrayLike | None = None,
        ) -> None: ...

    def __post_init__(self) -> None:
        for name, axes in (("X", (2,)), ("y", (1, 2))):
            array = np.array(real_array(f"Table: {name}", getattr(self, name)))
            if array.ndim not in axes or not array.size:
                expected = "(n, m)" if name == "X" else "(n,) or (n, out)"
                raise ShapeError(
                    f"Table: {name} has shape {array.shape}; expected {expected}, one row for each sample."
                )
            array.flags.writeable = False
            object.__setattr__(self, name, array)
        if len(self.X) != len(self.y):
            raise ShapeError(f"Table: X has {len(self.X):,} rows and y has {len(self.y):,}; expected as many.")
        for field, letter, array in (("inputs", "x", self.X), ("outputs", "y", self.columns)):
            names = self._names(field, letter, array.shape[1])
            object.__setattr__(self, field, names)
        if both := sorted({*self.inputs} & {*self.outputs}):
            raise TableError(f"{self.name}: column {both[0]!r} is an input and an output; expected one of them.")
        if not (is_number(self.held_out) and 0 < self.held_out < 1):
            raise TableError(
                f"{self.name}: held_out is {self.held_out!r}; expected a share between 0 and 1, such as 0.2."
            )
        if self.lines is not None:
            object.__setattr__(self, "lines", np.array(self.lines, dtype=np.int64))
        self._require_usable()

    @classmethod
    def from_csv(
        cls,
        path: str | os.PathLike[str],
        inputs: Sequence[str],
        outputs: Sequence[str],
        *,
        delimiter: str | None = None,
        held_out: float = 0.2,
    ) -> Table:
        """The named columns of a text file, whose first line has the names. Empty lines and those that start with # are skipped.

        Args:
            path: the file, in UTF-8.
            inputs: names of columns.
            outputs: names of columns. One output makes a function with one value, `()`.
            delimiter: what stands between numbers; None for whichever of `,`, `;` and tab the first line has.
            held_out: the share of the rows that the fit does not see.

        Raises:
            TableError: the file cannot be read, a column does not exist, or a field is missing or is not a number. The message
                names the column and the line.

        >>> import partita as pa, tempfile, pathlib
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     file = pathlib.Path(folder) / "runs.csv"
        ...     _ = file.write_text("T,V\\n" + "".join(f"{t},{2 * t}\\n" for t in range(20)))
        ...     pa.Table.from_csv(file, inputs=["T"], outputs=["V"])
        Table('runs.csv': 20 rows, inputs T, outputs V)
        """
        return cls._from(read_csv(path, (*inputs, *outputs), delimiter), path, inputs, outputs, held_out)

    @classmethod
    def from_parquet(
        cls, path: str | os.PathLike[str], inputs: Sequence[str], outputs: Sequence[str], *, held_out: float = 0.2
    ) -> Table:
        """The named columns of a parquet file, which must hold numbers. Needs the extra `tables`.

        Args:
            path: the file.
            inputs: names of columns.
            outputs: names of columns.
            held_out: the share of the rows that the fit does not see.

        Raises:
            MissingExtraError: the extra `tables` is not installed.
            TableError: the file cannot be read, a column does not exist, holds something else than numbers, or has missing values.
        """
        return cls._from(read_parquet(path, (*inputs, *outputs)), path, inputs, outputs, held_out)

    @classmethod
    def _from(
        cls,
        read: tuple[Array, NDArray[np.int64] | None],
        path: str | os.PathLike[str],
        inputs: Sequence[str],
        outputs: Sequence[str],
        held_out: float,
    ) -> Table:
        (numbers, lines), m = read, len(inputs)
        y = numbers[:, m:] if len(outputs) > 1 else numbers[:, m]
        return cls(numbers[:, :m], y, inputs, outputs, held_out, os.path.basename(path), lines)

    @property
    def columns(self) -> Array:
        """The outputs as columns, `(n, out)`."""
        return self.y.reshape(len(self.y), -1)

    @property
    def box(self) -> Box:
        """The box around the inputs."""
        return Box(self.X.min(axis=0), self.X.max(axis=0))

    @property
    def sha256(self) -> str:
        """A hash of the numbers, in their order, and of the names."""
        names = "\0".join((*self.inputs, "", *self.outputs)).encode()
        shapes = repr((self.X.shape, self.y.shape)).encode()
        return hashlib.sha256(b"\0".join((names, shapes, self.X.tobytes() + self.y.tobytes()))).hexdigest()

    def row(self, i: int) -> str:
        """Where a row stands, in words.

        Args:
            i: its number, from 0.
        """
        return f"row {i} (counted from 0)" if self.lines is None else f"line {self.lines[i]}"

    def noise(self) -> Noise | None:
        """How far rows with the same inputs differ; None if no two of them do."""
        _, group = np.unique(self.X, axis=0, return_inverse=True)
        group, values = group.ravel(), self.columns
        order = np.argsort(group, kind="stable")
        parts = [p for p in np.split(order, np.flatnonzero(np.diff(group[order])) + 1) if len(p) > 1]
        spreads = [np.ptp(values[p], axis=0) for p in parts]
        if not any(s.max() > 0 for s in spreads):
            return None
        worst = int(np.argmax([s.max() for s in spreads]))
        rows, column = parts[worst], int(spreads[worst].argmax())
        ends = int(rows[values[rows, column].argmin()]), int(rows[values[rows, column].argmax()])
        squares = sum(((values[p] - values[p].mean(axis=0)) ** 2).sum(axis=0) for p in parts)
        freedom = sum(len(p) - 1 for p in parts)
        deviation = float(np.sqrt(np.max(squares) / freedom))
        different = sum(bool(s.max() > 0) for s in spreads)
        return Noise(different, deviation, float(spreads[worst].max()), (min(ends), max(ends)))

    def split(self, seed: int, share: float | None = None) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The rows for the fit, and those that are held out. Rows with the same inputs stay together.

        Hashes of the inputs decide, so that the choice depends neither on the order of the rows nor on the version of numpy.

        Args:
            seed: another seed makes another choice.
            share: of the different inputs, that is held out; that of the table if None.
        """
        places, group = np.unique(self.X, axis=0, return_inverse=True)
        key = seed.to_bytes(16, "little")
        drawn = [hashlib.blake2b(row.tobytes(), digest_size=16, key=key).digest() for row in places + 0.0]
        count = max(1, round((self.held_out if share is None else share) * len(places)))
        held = np.zeros(len(places), dtype=bool)
        held[sorted(range(len(places)), key=drawn.__getitem__)[:count]] = True
        out = held[group.ravel()]
        return np.flatnonzero(~out), np.flatnonzero(out)

    def description(self, share: float | None = None) -> dict[str, Any]:
        """The table as certificates hold it: by its hash.

        Args:
            share: of the rows, that was held out; that of the table if None.
        """
        return {
            "type": "table",
            "label": self.name,
            "sha256": self.sha256,
            "rows": len(self.X),
            "inputs": list(self.inputs),
            "outputs": list(self.outputs),
            "held_out": float(self.held_out if share is None else share),
        }

    def __repr__(self) -> str:
        names = f"inputs {', '.join(self.inputs)}, outputs {', '.join(self.outputs)}"
        return f"Table({self.name!r}: {len(self.X):,} rows, {names})"

    def _names(self, field: str, letter: str, count: int) -> tuple[str, ...]:
        given = getattr(self, field)
        if isinstance(given, str):
            raise TableError(f"{self.name}: {field} is {given!r}; expected a list of names, such as [{given!r}].")
        names = tuple(given or [f"{letter}{i}" for i in range(count)])
        if len(names) != count or not all(isinstance(n, str) and n for n in names):
            raise TableError(f"{self.name}: {field} is {list(names)!r}; expected {count} names, one for each column.")
        if again := next((n for i, n in enumerate(names) if n in names[:i]), None):
            raise TableError(f"{self.name}: column {again!r} is named twice in {field}; expected each column once.")
        return names

    def _require_usable(self) -> None:
        named = zip((*self.inputs, *self.outputs), (*self.X.T, *self.columns.T))
        for name, column in named:
            bad = np.flatnonzero(~np.isfinite(column))
            if bad.size:
                what = "is missing (NaN)" if np.isnan(column[bad[0]]) else "is infinite"
                more = f", and {bad.size - 1:,} more" * (bad.size > 1)
                raise TableError(
                    f"{self.name}, column {name!r}: the value in {self.row(int(bad[0]))} {what}{more}; expected finite numbers",
                    "Leave these rows out, or fill them in.",
                )
        for name, column in zip(self.inputs, self.X.T):
            if (column == column[0]).all():
                raise TableError(
                    f"{self.name}, column {name!r}: the value is {column[0] + 0.0:g} in every row; nothing can be learned of how "
                    "the outputs depend on it",
                    f"Leave {name} out of the inputs.",
                )
        different = len(np.unique(self.X, axis=0))
        if different < _FEWEST:
            rows = f"{len(self.X):,} row{'s' * (len(self.X) != 1)}"
            raise TableError(
                f"{self.name} has {different} different inputs in {rows}; expected at least {_FEWEST}",
                "Add samples. A fit needs many more than that to be good.",
            )
