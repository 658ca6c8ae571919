"""How the heads of a network are wired: which channels each use of a head reads, and what the network returns.

The first channels are the inputs, and every use of a head adds one. A use reads affine functions of channels of earlier layers:
a wiring with any other reference is malformed, so that channels can be computed one after the other.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple, Protocol

from flint import arb, fmpq

from partita_check.clock import clock
from partita_check.graph import need

__all__ = ["Row", "Use", "Wiring", "fraction", "read_wiring"]

MOST_COEFFICIENTS = 1 << 21  # of all maps, those that are 0 not counted
MOST_CHANNELS = 1 << 16
_FRACTION = re.compile(r"-?[0-9]{1,4000}/[0-9]{1,4000}", re.ASCII)


class Stored(Protocol):
    """One tensor of a file."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def numbers(self) -> Sequence[float]: ...


class Row(NamedTuple):
    """`Σ_j w_j c_j + b`, as it is stored, and the exact coefficients that differ from the stored ones.

    columns: the channels. exact: by position in `columns`; −1 is the bias. products: how many weights are not ±1.
    """

    columns: tuple[int, ...]
    weights: tuple[arb, ...]
    bias: arb
    exact: Mapping[int, fmpq]
    products: int

    @property
    def plain(self) -> bool:
        """Whether the row is one channel or its negative, which is read without rounding."""
        return len(self.columns) == 1 and self.products == 0 and self.bias == 0 and not self.exact

    @property
    def roundings(self) -> int:
        """How many roundings a term passes through, in any order of summation: terms that are 0 do not round."""
        return max(0, len(self.columns) - 1) + (self.products > 0) + (self.bias != 0)

    def read(self, channels: Sequence[arb]) -> arb:
        """The row as it is stored, in balls."""
        return sum((w * channels[j] for w, j in zip(self.weights, self.columns)), self.bias)

    def read_exactly(self, channels: Sequence[arb]) -> arb:
        """The row with its exact coefficients."""
        weights, bias = self.truth()
        return sum((w * channels[j] for w, j in zip(weights, self.columns)), bias)

    def truth(self) -> tuple[Sequence[arb], arb]:
        """The exact weights and bias, in balls."""
        if not self.exact:
            return self.weights, self.bias
        places = (*enumerate(self.weights), (-1, self.bias))
        *weights, bias = [arb(self.exact[k]) if k in self.exact else x for k, x in places]
        return weights, bias

    def fractions(self) -> tuple[list[fmpq], fmpq]:
        """The same as fractions."""
        places = (*enumerate(self.weights), (-1, self.bias))
        *weights, bias = [self.exact[k] if k in self.exact else fraction(float(x)) for k, x in places]
        return weights, bias


class Use(NamedTuple):
    """One use of a head: its index, its layer counted from 1, and one row per input of the head."""

    head: int
    layer: int
    rows: tuple[Row, ...]


class Wiring(NamedTuple):
    """`uses[n]` writes channel `inputs + n`; `output` has one row per output."""

    inputs: int
    layers: int
    uses: tuple[Use, ...]
    output: tuple[Row, ...]


def fraction(x: float) -> fmpq:
    return fmpq(*x.as_integer_ratio())


def read_wiring(record: Any, tensors: Mapping[str, Stored], inputs: int, widths: Sequence[int], outputs: int) -> Wiring:
    """The wiring of a record, for heads with so many inputs each. `tensors` holds the numbers of the maps and nothing else."""
    left, uses, channels, named = MOST_COEFFICIENTS, list[Use](), inputs, set[str]()
    need(isinstance(record["layers"], list), "layers is not a list")
    for level, layer in enumerate(record["layers"]):
        need(isinstance(layer, list) and layer, f"layer {level} has no heads")
        before = channels
        for place, group in enumerate(layer):
            name = f"layers.{level}.{place}"
            need(isinstance(group, dict) and set(group) == {"head", "reads"}, f"{name}: expected head and reads")
            head = group["head"]
            need(type(head) is int and 0 <= head < len(widths), f"{name}: there is no head {head!r}")
            named |= {f"{name}.weight", f"{name}.bias"}
            rows = _rows(name, group["reads"], tensors, before, left)
            left -= sum(len(row.columns) + 1 for row in rows)
            k = widths[head]
            need(rows and len(rows) % k == 0, f"{name}: {len(rows)} rows for a head of {k} inputs")
            uses += [Use(head, level + 1, tuple(rows[i : i + k])) for i in range(0, len(rows), k)]
            channels = inputs + len(uses)
            need(channels <= MOST_CHANNELS, f"more than {MOST_CHANNELS:,} channels")
    output = _rows("output", record["output"], tensors, channels, left)
    need(len(output) == outputs, f"output: {len(output)} rows for {outputs} outputs")
    need(set(tensors) <= named | {"output.weight", "output.bias"}, "unknown tensors of affine maps")
    need({use.head for use in uses} == set(range(len(widths))), "a head is never used")
    return Wiring(inputs, len(record["layers"]), tuple(uses), tuple(output))


def _columns(value: Any, width: int) -> bool:
    """Whether it is a list of increasing columns."""
    inside = isinstance(value, list) and all(type(k) is int and 0 <= k < width for k in value)
    return inside and all(a < b for a, b in pairwise(value))


def _rows(name: str, record: Any, tensors: Mapping[str, Stored], channels: int, most: int) -> list[Row]:
    need(
        isinstance(record, dict) and set(record) <= {"start", "width", "rows", "dense", "exact"}, f"{name}: wrong keys"
    )
    start, width, rows = record["start"], record["width"], record["rows"]
    need(type(start) is int and type(width) is int and start >= 0 and width > 0, f"{name}: invalid start or width")
    need(start + width <= channels, f"{name} reads channel {start + width - 1} of {channels}: a later layer's, or none")
    if "dense" in record:
        need(record["dense"] is True and type(rows) is int and 0 < rows <= most // width, f"{name}: invalid rows")
        rows = [[[], list(range(width)), True]] * rows
    need(isinstance(rows, list) and 0 < len(rows) <= most, f"{name}: invalid rows")
    stored = {part: tensors.get(f"{name}.{part}") for part in ("weight", "bias")}
    need(all(t is None or len(t.shape) == 1 for t in stored.values()), f"{name}: expected lists of weights and biases")
    weights, biases = (list(t.numbers) if t is not None else [] for t in stored.values())
    shapes = list[tuple[list[int], list[int], bool]]()
    for row in rows:
        need(isinstance(row, list) and len(row) == 3 and type(row[2]) is bool, f"{name}: invalid row")
        need(_columns(row[0], width) and _columns(row[1], width), f"{name}: expected increasing columns below {width}")
        need(len(row[0]) + len(row[1]) == len({*row[0], *row[1]}), f"{name}: a column is read twice")
        most -= len(row[0]) + len(row[1]) + 1
        need(most >= 0, "too many coefficients")
        shapes.append(tuple(row))
        clock.tick()
    counts = sum(len(s[1]) for s in shapes), sum(s[2] for s in shapes)
    need(
        (len(weights), len(biases)) == counts, f"{name}: {len(weights)} weights and {len(biases)} biases, not {counts}"
    )
    exact, found, w, b = _exact(name, record.get("exact", []), len(shapes), width), list[Row](), 0, 0
    whole = tuple(range(start, start + width))
    for place, (ones, others, has_bias) in enumerate(shapes):
        clock.tick()
        bias, stored_here = arb(biases[b]) if has_bias else arb(0), [arb(x) for x in weights[w : w + len(others)]]
        true, w, b = exact.get(place, {}), w + len(others), b + has_bias
        held = dict.fromkeys(ones, arb(1)) | dict(zip(others, stored_here))
        held |= {column: arb(0) for column in true if column >= 0 and column not in held}
        columns = sorted(held)
        positions = {column: k for k, column in enumerate(columns)} | {-1: -1}
        channels_read = whole if len(columns) == width else tuple(start + column for column in columns)
        fractions = {positions[column]: value for column, value in true.items()}
        products = sum(abs(x) != 1 for x in stored_here)
        found.append(Row(channels_read, tuple(held[c] for c in columns), bias, fractions, products))
    return found


def _exact(name: str, entries: Any, rows: int, width: int) -> dict[int, dict[int, fmpq]]:
    """The exact coefficients by row and column."""
    need(isinstance(entries, list) and len(entries) <= MOST_COEFFICIENTS, f"{name}: exact is not a list")
    found = dict[int, dict[int, fmpq]]()
    for entry in entries:
        need(isinstance(entry, list) and len(entry) == 3, f"{name}: expected [row, column, fraction]")
        row, column, text = entry
        need(type(row) is int and type(column) is int and isinstance(text, str), f"{name}: invalid exact coefficient")
        need(0 <= row < rows and -1 <= column < width, f"{name}: an exact coefficient lies outside the map")
        need(_FRACTION.fullmatch(text), f"{name}: expected a fraction p/q, found {text[:40]}")
        top, bottom = map(int, text.split("/"))
        need(bottom > 0 and math.gcd(top, bottom) == 1, f"{name}: {text[:40]} is not in lowest terms")
        need(column not in found.setdefault(row, {}), f"{name}: an exact coefficient is given twice")
        found[row][column] = fmpq(top, bottom)
        clock.tick()
    return found
