"""Networks of heads: layers of folded heads with affine maps between them, as one module with one record."""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from fractions import Fraction
from itertools import pairwise
from typing import Any, Self, TypeGuard, cast

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor, nn

from partita.arithmetic.precision import Precision
from partita.errors import DomainError, FormatError, PartitaError, ShapeError, SizeError, UnsupportedError
from partita.functions.graph import Graph
from partita.geometry.domains import Array, Box
from partita.heads.grid_head import GridHead
from partita.heads.head import FoldedHead, Head, numbers, recorded_form, require_stored, short_text
from partita.heads.scattered_head import ScatteredHead
from partita.heads.wiring import Affine, Group, Wiring
from partita.kernels.guards import certified
from partita.kernels.trace_modes import is_exporting

__all__ = ["AffineMap", "AttentionLayer", "AttentionNetwork", "exact_values"]

_PARTS: dict[str, type[FoldedHead]] = {head.kind: head for head in (GridHead, ScatteredHead)}
_ENTRIES_AT_MOST = 1 << 25  # coefficients of all maps, zeros included
_INPUTS_AT_MOST = 1 << 10  # of one recorded head
_DIGITS_AT_MOST = 4000  # of a numerator or a denominator; Python itself reads at most 4300
_FRACTION = re.compile(r"-?[0-9]{1,4000}/[0-9]{1,4000}", re.ASCII)
_LISTED_AT_MOST = 1 << 27  # numbers of one layer of as_attention()
_MARGIN = 1 / 8  # of the largest number of the dtype: sums are rounded on the way, and bounded here in float64

Exact = Mapping[tuple[int, int], Fraction]


class AffineMap(nn.Module):
    """`W c + b` of channels c, holding only the numbers that are not structure: weights other than 0 and 1, biases other than 0.

    Args:
        start: the first channel that is read.
        codes: `(rows, width)`, which number each weight is: 0 for zero, 1 for one, 2 + i for `weight[i]`, counted row by row.
        bias_codes: `(rows,)`, 0 for zero, 1 + i for `bias[i]`.
        weight: the stored weights, 1-D; None if there are none.
        bias: the stored biases, 1-D; None if there are none.
        dtype: of the stored numbers.
        exact: coefficients of the exact function that the dtype cannot hold; see `Affine.exact`.
    """

    weight: Tensor | None
    bias: Tensor | None
    constants: Tensor
    choice: Tensor | None
    places: Tensor | None
    bias_places: Tensor | None

    def __init__(
        self,
        start: int,
        codes: NDArray[np.int64],
        bias_codes: NDArray[np.int64],
        weight: Tensor | None,
        bias: Tensor | None,
        dtype: torch.dtype,
        exact: Exact,
    ) -> None:
        super().__init__()
        self.start, (self.rows, self.width) = start, codes.shape
        self._codes, self._bias_codes, self._exact = codes, bias_codes, dict(exact)
        self.register_buffer("weight", weight)
        self.register_buffer("bias", bias)
        self.register_buffer("constants", torch.tensor([0.0, 1.0], dtype=dtype), persistent=False)
        single = (codes != 0).sum(axis=1) == 1
        chosen = bool((single & (codes.max(axis=1, initial=0) == 1) & (bias_codes == 0)).all())
        self.is_dense = bool((codes > 1).all() and (bias_codes > 0).all())
        # dense matrices are gathered from the stored numbers at every call, so that they are always those of state_dict
        self._index("choice", start + np.argmax(codes, axis=1) if chosen else None)
        self._index("places", None if chosen or bool((codes > 1).all()) else codes.ravel())
        self._index("bias_places", None if not bias_codes.any() or bool((bias_codes > 0).all()) else bias_codes)

    def _index(self, name: str, found: NDArray[np.int64] | None) -> None:
        held = None if found is None else torch.from_numpy(np.ascontiguousarray(found, dtype=np.int64))
        self.register_buffer(name, held, persistent=False)

    @classmethod
    def of(cls, given: Affine, dtype: torch.dtype) -> Self:
        """The map that stores these numbers, rounded to the dtype where it cannot hold them."""
        rounded = Precision.of(dtype).rounded
        with np.errstate(over="ignore"):
            weight, bias = rounded(given.weight), rounded(given.bias)
        if not (np.isfinite(weight).all() and np.isfinite(bias).all()):
            raise DomainError(
                f"an affine map has a coefficient that is not a finite {Precision.of(dtype).name} number."
            )
        lost = ((weight == 0) & (given.weight != 0)).any() or ((bias == 0) & (given.bias != 0)).any()
        if lost:  # a term of the function would be left out of the network
            raise DomainError(
                f"an affine map has a coefficient that underflows {Precision.of(dtype).name}; rescale the variables."
            )
        exact = {(int(i), int(j)): Fraction(float(given.weight[i, j])) for i, j in np.argwhere(weight != given.weight)}
        exact |= {(int(i), -1): Fraction(float(given.bias[i])) for i in np.flatnonzero(bias != given.bias)}
        for place, fraction in given.exact.items():
            stored = _entry(given.weight, given.bias, place)
            if not stored or not (_nearest(fraction) == stored or _rounds_to(fraction, stored, rounded)):
                raise DomainError(
                    f"exact coefficient {short_text(fraction)} at {place}: the number there is {stored}; expected the nearest "
                    f"float64 number, or that rounded to {Precision.of(dtype).name}, and not 0."
                )
            exact[place] = fraction
        stored = (weight != 0) & (weight != 1)
        codes, bias_codes = (weight == 1).astype(np.int64), np.zeros(len(bias), dtype=np.int64)
        codes[stored] = 2 + np.arange(int(stored.sum()))
        bias_codes[bias != 0] = 1 + np.arange(int(np.count_nonzero(bias)))
        held = [torch.tensor(x, dtype=dtype) if x.size else None for x in (weight[stored], bias[bias != 0])]
        exact = {place: f for place, f in sorted(exact.items()) if f != Fraction(_entry(weight, bias, place) or 0.0)}
        return cls(given.start, codes, bias_codes, held[0], held[1], dtype, exact)

    def affine(self) -> Affine:
        """The map as plain data, with the numbers that are stored now; without exact coefficients that do not round to them."""
        weight = self._table([0.0, 1.0], self.weight)[self._codes]
        bias = self._table([0.0], self.bias)[self._bias_codes]
        rounds = Precision.of(self.constants.dtype).rounded
        exact = {p: f for p, f in self._exact.items() if _rounds_to(f, _entry(weight, bias, p), rounds)}
        return Affine(weight, bias, self.start, exact)

    @staticmethod
    def _table(constants: list[float], stored: Tensor | None) -> Array:
        return np.concatenate([constants, np.empty(0) if stored is None else numbers(stored)])

    def forward(self, channels: Tensor) -> Tensor:
        """`(n, channels)` to `(n, rows)`."""
        if self.choice is not None:
            return channels.index_select(1, self.choice)
        part = channels if self.width == channels.shape[1] else channels[:, self.start : self.start + self.width]
        weight = self.weight
        if self.places is not None:
            table = self.constants if weight is None else torch.cat([self.constants, weight])
            weight = table.index_select(0, self.places)
        bias = self.bias
        if self.bias_places is not None and bias is not None:
            bias = torch.cat([self.constants[:1], bias]).index_select(0, self.bias_places)
        assert weight is not None  # a map without zeros and ones stores all its weights
        weight = weight.reshape(self.rows, self.width)
        if is_exporting():  # without Gemm, of which runtimes read fewer forms
            return part @ weight.T if bias is None else part @ weight.T + bias
        return nn.functional.linear(part, weight, bias)

    def extra_repr(self) -> str:
        return f"{self.width} channels from {self.start} → {self.rows}"

    def record(self) -> dict[str, Any]:
        """The structure as plain data for JSON; `from_record` reads it."""
        found: dict[str, Any] = {"start": self.start, "width": self.width}
        if self.is_dense:
            found |= {"rows": self.rows, "dense": True}
        else:
            found["rows"] = [
                [np.flatnonzero(row == 1).tolist(), np.flatnonzero(row > 1).tolist(), bool(bias)]
                for row, bias in zip(self._codes, self._bias_codes)
            ]
        exact = self.affine().exact
        if exact:
            found["exact"] = [[row, column, f"{f.numerator}/{f.denominator}"] for (row, column), f in exact.items()]
        return found

    @classmethod
    def from_record(
        cls, where: str, record: Any, tensors: Mapping[str, Tensor], dtype: torch.dtype, channels: int, most: int
    ) -> Self:
        """The map that a record and its tensors describe. Nothing in them is trusted.

        Args:
            where: what errors call it.
            record: what `record()` returned.
            tensors: `weight` and `bias`, where there are any, of the right dtype and finite.
            dtype: of the network.
            channels: how many channels there are to read.
            most: the largest number of coefficients, zeros included.

        Raises:
            FormatError: columns, counts or fractions that do not fit.
        """
        names = {"start", "width", "rows", "dense", "exact"}
        if not isinstance(record, Mapping) or not set(record) <= names:
            raise FormatError(
                f"{where}: found {short_text(record)}; expected a record with {', '.join(sorted(names))}."
            )
        if not set(tensors) <= {"weight", "bias"}:
            raise FormatError(f"{where}: found tensors {short_text(sorted(tensors))}; expected weight and bias.")
        start, width, rows = record.get("start"), record.get("width"), record.get("rows")
        if not (_is_count(start) and _is_count(width) and width >= 1 and start + width <= channels):
            raise FormatError(
                f"{where}: start {short_text(start)} and width {short_text(width)}; expected channels from 0 to {channels - 1}."
            )
        if record.get("dense", False) is True:
            if not _is_count(rows) or not 1 <= rows <= most // width:
                raise FormatError(
                    f"{where}: rows is {short_text(rows)}; expected an integer from 1, for at most {most:,} coefficients."
                )
            codes = 2 + np.arange(rows * width, dtype=np.int64).reshape(rows, width)
            bias_codes = 1 + np.arange(rows, dtype=np.int64)
        else:
            if not isinstance(rows, list) or not 1 <= len(rows) <= most // width or "dense" in record:
                raise FormatError(
                    f"{where}: rows is {short_text(rows)}; expected a list of rows, for at most {most:,} coefficients."
                )
            codes, bias_codes = _codes(where, rows, width)
        held = []
        for name, found in (("weight", codes[codes > 1]), ("bias", bias_codes[bias_codes > 0])):
            tensor = tensors.get(name)
            if (0 if tensor is None else tensor.dim()) != int(found.size > 0) or (
                tensor is not None and tensor.numel() != found.size
            ):
                shape = None if tensor is None else tuple(tensor.shape)
                raise FormatError(
                    f"{where}: tensor {name} has shape {shape}; expected {(found.size,)}, as in its rows."
                )
            held.append(tensor)
        made = cls(start, codes, bias_codes, held[0], held[1], dtype, {})
        made._exact = _read_exact(where, record.get("exact", []), made.affine(), Precision.of(dtype).rounded)
        return made


def _codes(where: str, rows: list[Any], width: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Which number each weight and bias is, from the rows of a record."""
    codes, bias_codes = np.zeros((len(rows), width), dtype=np.int64), np.zeros(len(rows), dtype=np.int64)
    weights = biases = 0
    for i, row in enumerate(rows):
        if not (isinstance(row, list) and len(row) == 3 and type(row[2]) is bool and all(map(_is_columns, row[:2]))):
            raise FormatError(
                f"{where}: row {i} is {short_text(row)}; expected columns of ones, columns of stored weights, each increasing, and "
                "true or false."
            )
        ones, stored, has_bias = row
        if any(columns and columns[-1] >= width for columns in (ones, stored)) or set(ones) & set(stored):
            raise FormatError(f"{where}: row {i} is {short_text(row)}; expected different columns below {width}.")
        codes[i, ones] = 1
        codes[i, stored] = 2 + weights + np.arange(len(stored))
        weights += len(stored)
        bias_codes[i] = 1 + biases if has_bias else 0
        biases += has_bias
    return codes, bias_codes


def _is_count(found: object) -> TypeGuard[int]:
    return type(found) is int and 0 <= found < 1 << 40


def _is_columns(found: object) -> TypeGuard[list[int]]:
    return isinstance(found, list) and all(map(_is_count, found)) and all(a < b for a, b in pairwise(found))


def _read_exact(
    where: str, entries: Any, stored: Affine, rounds: Callable[[Array], Array]
) -> dict[tuple[int, int], Fraction]:
    """The exact coefficients of a record, each of which must round to the stored number."""
    if not isinstance(entries, list):
        raise FormatError(f"{where}: exact is {short_text(entries)}; expected a list.")
    found: dict[tuple[int, int], Fraction] = {}
    for entry in entries:
        if not (
            isinstance(entry, list)
            and len(entry) == 3
            and type(entry[0]) is int
            and type(entry[1]) is int
            and isinstance(entry[2], str)
            and len(entry[2]) <= 2 * _DIGITS_AT_MOST + 2
            and _FRACTION.fullmatch(entry[2])
        ):
            raise FormatError(f'{where}: an exact coefficient is {short_text(entry)}; expected [row, column, "p/q"].')
        top, bottom = map(int, entry[2].split("/"))
        place = (entry[0], entry[1])
        number = _entry(stored.weight, stored.bias, place)
        if not number or place in found or bottom < 1 or math.gcd(top, bottom) != 1:
            raise FormatError(
                f"{where}: an exact coefficient is {short_text(entry)}; expected a coefficient other than 0, once, in lowest terms."
            )
        if not _rounds_to(Fraction(top, bottom), number, rounds):
            raise FormatError(
                f"{where}: an exact coefficient is {short_text(entry)}, which does not round to {number!r}."
            )
        found[place] = Fraction(top, bottom)
    return dict(sorted(found.items()))


def _entry(weight: Array, bias: Array, place: tuple[int, int]) -> float | None:
    """The coefficient at (row, column), column −1 being the bias; None if there is none."""
    row, column = place
    if not (0 <= row < len(bias) and -1 <= column < weight.shape[1]):
        return None
    return float(bias[row] if column == -1 else weight[row, column])


def _nearest(fraction: Fraction) -> float:
    try:
        return float(fraction)
    except OverflowError:
        return math.inf


def _rounds_to(fraction: Fraction, number: float | None, rounds: Callable[[Array], Array]) -> bool:
    """Whether the number is the fraction rounded to float64, and then to the dtype."""
    with np.errstate(over="ignore"):
        return number is not None and float(rounds(np.array(_nearest(fraction)))) == number


class AttentionNetwork(Head):
    """Layers of heads with affine maps between them: channels go in, every use of a head appends one, the output reads them all.

    `c = z; for every layer: c = [c, head_g(W_g c + b_g) for every use]; net(z) = W c + b`. A head may be used many times and is
    stored once. A coordinate that is read by its index costs no stored number (`wiring`).

    Args:
        heads: the distinct heads, `GridHead` or `ScatteredHead`, with one output each, all float64 or all float32. The network
            takes them as they are and does not copy them.
        wiring: who reads what. Coefficients are rounded to the dtype of the network.
        input_shapes: one shape per argument, as of every head.
        output_shape: as of every head.
        dtype: `torch.float64` or `torch.float32`; None for that of the heads, or float64 if there are none.

    Raises:
        ShapeError: a map that reads channels that do not exist, or has a wrong number of rows; a head that is never used.
        DomainError: a coefficient that is not finite, or an exact one that does not round to the stored number.
        UnsupportedError: heads of other kinds or of another dtype.
        SizeError: maps with more than 2²⁵ coefficients in all, zeros included.

    `state_dict` holds the tensors of `heads.0`, …, and of every map only the numbers that are not structure: `layers.0.1.weight`
    (1-D, row by row) and `layers.0.1.bias` for the second group of the first layer, `output.weight` and `output.bias`.

    >>> from partita.geometry import ProductGrid
    >>> grid = ProductGrid.uniform(Box([-1], [1]), 9)
    >>> values = torch.from_numpy(np.sin(grid.axes[0])[:, None])
    >>> head = GridHead(grid, 40.0, values, half_windows=9, input_shapes=((1,),), output_shape=())
    >>> reads = Affine(np.eye(3), np.zeros(3))
    >>> total = Affine(np.array([[0.0, 0.0, 0.0, 1.0, 1.0, 1.0]]), np.zeros(1))
    >>> net = AttentionNetwork([head], Wiring(3, ((Group(0, reads),),), total), input_shapes=((3,),), output_shape=())
    >>> net.num_keys, net.num_parameters, f"{net(torch.tensor([0.5, 0.5, -0.5], dtype=torch.float64)):.2f}"
    (27, 19, '0.47')
    """

    kind = "network"
    heads: nn.ModuleList
    layers: nn.ModuleList
    output: AffineMap

    def __init__(
        self,
        heads: Sequence[Head],
        wiring: Wiring,
        *,
        input_shapes: tuple[tuple[int, ...], ...],
        output_shape: tuple[int, ...],
        dtype: torch.dtype | None = None,
    ) -> None:
        found = dtype or (heads[0].dtype if heads else torch.float64)
        maps = [*(group.reads for layer in wiring.layers for group in layer), wiring.output]
        size = sum(np.size(map_.weight) for map_ in maps)
        if size > _ENTRIES_AT_MOST:
            raise SizeError(
                f"the affine maps have {size:,} coefficients, zeros included; at most {_ENTRIES_AT_MOST:,} are supported",
                "Let every map read only the channels it needs (start).",
            )
        layers = [[(group.head, _made(group.reads, found)) for group in layer] for layer in wiring.layers]
        self._assemble(heads, layers, _made(wiring.output, found), found, input_shapes, output_shape)
        if wiring.inputs != self.dimension:
            raise ShapeError(f"the wiring has {wiring.inputs} inputs; expected {self.dimension}, as in {input_shapes}.")

    def _assemble(
        self,
        heads: Sequence[Head],
        layers: Sequence[Sequence[tuple[int, AffineMap]]],
        output: AffineMap,
        dtype: torch.dtype,
        input_shapes: tuple[tuple[int, ...], ...],
        output_shape: tuple[int, ...],
    ) -> None:
        super().__init__(input_shapes=input_shapes, output_shape=output_shape)
        _require_parts(heads, dtype)
        self.heads = nn.ModuleList(heads)
        self.layers = nn.ModuleList(nn.ModuleList(reads for _, reads in layer) for layer in layers)
        self.output = output
        self._used = tuple(tuple(head for head, _ in layer) for layer in layers)
        channels = self.dimension
        for level, layer in enumerate(layers):
            if not layer:
                raise ShapeError(f"layer {level} has no heads; expected at least one.")
            added = 0
            for g, (index, reads) in enumerate(layer):
                if not 0 <= index < len(heads):
                    raise ShapeError(f"layer {level}, group {g}: head {index}; expected 0 to {len(heads) - 1}.")
                k = heads[index].dimension
                _require_fits(f"layer {level}, group {g}", reads, channels, f"a multiple of {k}", reads.rows % k == 0)
                added += reads.rows // k
            channels += added
        _require_fits("the output", output, channels, str(self.num_outputs), output.rows == self.num_outputs)
        unused = set(range(len(heads))) - {index for layer in self._used for index in layer}
        if unused:
            raise ShapeError(f"heads {sorted(unused)} are never used; expected every head to be used.")

    @property
    def parts(self) -> tuple[FoldedHead, ...]:
        """The distinct heads: those of `heads`."""
        return tuple(cast(FoldedHead, head) for head in self.heads)

    def _groups(self) -> Iterator[list[tuple[int, FoldedHead, AffineMap]]]:
        """Layer by layer: the index of each group's head, the head, and what it reads."""
        for used, layer in zip(self._used, self.layers):
            maps = cast(Iterable[AffineMap], layer)
            yield [(i, cast(FoldedHead, self.heads[i]), reads) for i, reads in zip(used, maps)]

    @property
    def wiring(self) -> Wiring:
        """Who reads what, with the coefficients that are stored now."""
        layers = tuple(tuple(Group(i, reads.affine()) for i, _, reads in layer) for layer in self._groups())
        return Wiring(self.dimension, layers, self.output.affine())

    @property
    def num_layers(self) -> int:
        return len(self._used)

    @property
    def num_uses(self) -> int:
        """How often heads are used: the heads of all layers, as multi-head attention counts them."""
        return sum(reads.rows // head.dimension for layer in self._groups() for _, head, reads in layer)

    @property
    def num_keys(self) -> int:
        return sum(reads.rows // head.dimension * head.num_keys for layer in self._groups() for _, head, reads in layer)

    @property
    def dtype(self) -> torch.dtype:
        return self.output.constants.dtype

    @property
    def device(self) -> torch.device:
        return self.output.constants.device

    @property
    def semantics(self) -> str:
        names = sorted(
            {str(t.dtype).removeprefix("torch.") for t in (*self.state_dict().values(), self.output.constants)}
        )
        return " with ".join(names)

    @certified
    def channels(self, flat: Tensor) -> Tensor:
        """All channels: `(n, m)` inputs to `(n, m + uses)`, the inputs and then the uses of heads in the order of the wiring."""
        return self._channels(flat, lambda head, z: head.evaluate(z))

    @certified
    def evaluate(self, flat: Tensor) -> Tensor:
        out: Tensor = self.output(self._channels(flat, lambda head, z: head.evaluate(z)))
        return out

    @certified
    def evaluate_dense(self, flat: Tensor) -> Tensor:
        out: Tensor = self.output(self._channels(flat, lambda head, z: head.evaluate_dense(z)))
        return out

    def _channels(self, flat: Tensor, run: Callable[[FoldedHead, Tensor], Tensor]) -> Tensor:
        for layer in self._groups():
            found = [flat]
            for _, head, reads in layer:
                values = run(head, reads(flat).reshape(-1, head.dimension))
                found.append(values.reshape(-1, reads.rows // head.dimension))
            flat = torch.cat(found, dim=1)
        return flat

    def partition(self, box: Box) -> None:
        """None: every head has its own partition, `network.heads[i].partition(box)` with the box that it is used on."""

    def record(self) -> dict[str, Any]:
        common = super().record()
        layers = [[{"head": i, "reads": reads.record()} for i, _, reads in layer] for layer in self._groups()]
        heads = [head.record() for head in self.parts]
        return {"type": common.pop("type"), "heads": heads, "layers": layers, "output": self.output.record(), **common}

    @classmethod
    def from_record(cls, record: Mapping[str, Any], tensors: Mapping[str, Tensor], box: Box) -> Self:
        shapes, name = recorded_form(record, box)
        if name not in ("float64", "float32"):
            raise FormatError(f"head record: dtype is {name!r}; expected float64 or float32 for a network.")
        require_stored(tensors, name)
        dtype = getattr(torch, name)
        own = _sorted_by_owner(tensors)
        heads = [
            _read_part(f"head {i}", part, own.pop(f"heads.{i}", {}), name)
            for i, part in enumerate(_list(record, "heads"))
        ]
        channels, left, layers = box.dimension, _ENTRIES_AT_MOST, []
        for level, layer in enumerate(_list(record, "layers")):
            groups, added = [], 0
            for g, group in enumerate(layer if isinstance(layer, list) else [None]):
                where = f"layer {level}, group {g}"
                if not isinstance(group, Mapping) or set(group) != {"head", "reads"}:
                    raise FormatError(f"{where} is {short_text(group)}; expected a record with head and reads.")
                index = group["head"]
                if type(index) is not int or not 0 <= index < len(heads):
                    raise FormatError(f"{where}: head {short_text(index)}; expected 0 to {len(heads) - 1}.")
                held = own.pop(f"layers.{level}.{g}", {})
                reads = AffineMap.from_record(where, group["reads"], held, dtype, channels, left)
                left -= reads.rows * reads.width
                groups.append((index, reads))
                added += reads.rows // heads[index].dimension
            layers.append(groups)
            channels += added
        output = AffineMap.from_record("the output", record.get("output"), own.pop("output", {}), dtype, channels, left)
        if own:
            raise FormatError(f"head tensors: found {short_text(sorted(own))}, which the record does not mention.")
        made = cls.__new__(cls)
        try:
            made._assemble(heads, layers, output, dtype, **shapes)
        except PartitaError as error:
            raise FormatError(f"head record: {error}") from None
        return made

    def function_sha256(self, graphs: Sequence[Any]) -> str:
        """The hash of the function that the wiring defines with part functions in place of the heads.

        Certificates have it where f is such a function: a network that was converted.

        Args:
            graphs: the part function of each head, as JSON (`Graph.to_json`).
        """
        return _sha256({"wiring": self._wiring_record(), "parts": list(graphs)})

    def wiring_sha256(self) -> str:
        """The hash of who reads what, which `state_dict` does not hold. Certificates have it beside that of the tensors."""
        return _sha256(self._wiring_record())

    def _wiring_record(self) -> dict[str, Any]:
        return {name: entry for name, entry in self.record().items() if name != "heads"}

    def check_range(self, lo: ArrayLike, hi: ArrayLike) -> None:
        for where, head, low, high in self._reach(*self._corners(lo, hi)):
            try:
                head.check_range(low, high)
            except DomainError as error:
                raise DomainError(f"{where}: {error}") from None

    def largest_value(self, lo: ArrayLike, hi: ArrayLike) -> float:
        return max(
            (head.largest_value(low, high) for _, head, low, high in self._reach(*self._corners(lo, hi))), default=0.0
        )

    def _reach(self, lo: Array, hi: Array) -> Iterator[tuple[str, FoldedHead, Array, Array]]:
        """Every group, its head, and a box that holds what all its uses read, for z in [lo, hi]; up to rounding.

        A head averages its values, so no channel exceeds the largest of them.

        Raises:
            DomainError: a sum that may overflow.
        """
        reach = np.maximum(np.abs(lo), np.abs(hi))
        signed = lo, hi
        for level, layer in enumerate(self._groups()):
            found = []
            for g, (_, head, reads) in enumerate(layer):
                where = f"layer {level}, group {g}"
                low, high = self._summed(where, reads.affine(), reach, signed)
                low, high = (end.reshape(-1, head.dimension) for end in (low, high))
                low, high = low.min(axis=0), high.max(axis=0)
                yield where, head, low, high
                found.append(np.full(reads.rows // head.dimension, head.largest_value(low, high)))
            added = np.concatenate(found)
            reach = np.concatenate([reach, added])
            signed = np.concatenate([signed[0], -added]), np.concatenate([signed[1], added])
        self._summed("the output", self.output.affine(), reach, signed)

    def _summed(self, where: str, map_: Affine, reach: Array, ends: tuple[Array, Array]) -> tuple[Array, Array]:
        """The range of an affine map, as far as float64 knows it."""
        part = slice(map_.start, map_.start + map_.weight.shape[1])
        precision, size = Precision.of(self.dtype), np.abs(map_.weight)
        with np.errstate(over="ignore", invalid="ignore"):
            largest = float((size @ reach[part] + np.abs(map_.bias)).max())
            rise, fall = np.maximum(map_.weight, 0.0), np.minimum(map_.weight, 0.0)
            low = rise @ ends[0][part] + fall @ ends[1][part] + map_.bias
            high = rise @ ends[1][part] + fall @ ends[0][part] + map_.bias
        if not largest <= _MARGIN * precision.largest:
            raise DomainError(
                f"{where}: an affine map may reach {largest:.3g} and overflows {precision.name}, whose limit is "
                f"{precision.largest:.3g}; rescale the variables{', or use float64' if precision.rounds_inputs else ''}."
            )
        return low, high

    def unfreeze(self) -> Self:
        """Make the values of the heads, and the stored weights and biases, trainable parameters."""
        for head in self.parts:
            head.unfreeze()
        for map_ in self._maps():
            for name in ("weight", "bias"):
                held = map_._buffers.get(name)
                if held is not None:
                    del map_._buffers[name]
                    map_.register_parameter(name, nn.Parameter(held.detach().clone()))
        return self

    def freeze(self) -> Self:
        for head in self.parts:
            head.freeze()
        for map_ in self._maps():
            for name in ("weight", "bias"):
                held = map_._parameters.pop(name, None)
                if held is not None:
                    map_.register_buffer(name, held.detach().clone())
        return self

    def _maps(self) -> list[AffineMap]:
        return [*(reads for layer in self._groups() for _, _, reads in layer), self.output]

    def as_attention(self) -> tuple[AttentionLayer, ...]:
        """The same network as plain multi-head attention, one module around an `nn.MultiheadAttention` for each layer.

        Layer after layer, channels go in and come out with one more for each head: `for layer in layers: c = layer(c)`. Then
        `network.output(c)` are the outputs. The numbers are those of the network as it is now. Scores are dot products here, which
        round more than the network does. The certificate is about the network itself.

        Raises:
            SizeError: the keys and values of a layer, listed, have more than 2²⁷ numbers.
        """
        layers, channels = [], self.dimension
        for layer in self._groups():
            layers.append(AttentionLayer([(head, reads.affine()) for _, head, reads in layer], channels))
            channels += sum(reads.rows // head.dimension for _, head, reads in layer)
        return tuple(layers)

    def extra_repr(self) -> str:
        heads, layers = (
            f"{n:,} {what}{'s' * (n != 1)}" for n, what in ((self.num_uses, "head"), (self.num_layers, "layer"))
        )
        return f"{heads} in {layers}, {super().extra_repr()}"


class AttentionLayer(nn.Module):
    """One layer of a network as multi-head attention: `c → [c, Σ_j softmax_j(q_h·k_{h,j}) v_{h,j}(c) for every head h]`.

    `q_h = [u_h − o_h, 1]`, `u_h = W_h c + b_h` what the head reads and o_h the middle of its centers; `k_{h,j} = [s_j, t_j]`, its
    scores as affine functions of `u − o`; `v_{h,j}(c)` its value, or `V_j + J_j u_h` where values are affine. Each head has 4, 16,
    64, … coordinates, so that the scale 1/√d of `nn.MultiheadAttention` is a power of two and rounds nothing. A head with fewer
    keys than the others repeats its first one; the copies share its weight, `t − ln(copies)` each.

    Args:
        uses: the heads of the layer, with what each reads: one row per input of each use.
        channels: how many channels go in.

    Attributes:
        attention: `nn.MultiheadAttention`, one of its heads for each use of a head. It projects queries only: W_K and W_V are the
            identity, and W_O collects the heads' first coordinates.
        keys: the key tokens, `(keys, embedding)`.
        values: the value tokens, `(keys, embedding)`.
        value_slopes: what the channels add to them, `(keys, embedding, channels)`; None for constant values.
    """

    keys: Tensor
    values: Tensor
    value_slopes: Tensor | None

    def __init__(self, uses: Sequence[tuple[FoldedHead, Affine]], channels: int) -> None:
        super().__init__()
        dtype, device = uses[0][0].dtype, uses[0][0].device
        heads = [head for head, reads in uses for _ in range(reads.rows // head.dimension)]
        count, most = max(head.num_keys for head in heads), max(head.dimension for head in heads)
        size = 4
        while size < most + 1 or size * len(heads) < channels:
            size *= 4
        embedding = size * len(heads)
        slopes = any(head.state_dict().get("value_slopes") is not None for head in heads)
        if count * embedding * (2 + slopes * channels) + 4 * embedding**2 > _LISTED_AT_MOST:
            raise SizeError(
                f"as_attention() would list {count:,} keys for {len(heads):,} heads over {channels:,} channels; call the network "
                "instead, which does not list them."
            )
        self.channels, self.num_heads = channels, len(heads)
        queries, starts = np.zeros((embedding, embedding)), np.zeros(embedding)
        keys, values = np.zeros((count, embedding)), np.zeros((count, embedding))
        tilts = np.zeros((count, embedding, channels)) if slopes else None
        first = 0
        for head, reads in uses:
            k, scores, middle = head.dimension, head.affine_scores(shift=True), head.middle()
            index, lowered = _padded(head.num_keys, count)
            for row in range(0, reads.rows, k):
                weight, bias = np.zeros((k, channels)), reads.bias[row : row + k]
                weight[:, reads.start : reads.start + reads.weight.shape[1]] = reads.weight[row : row + k]
                queries[first : first + k, :channels] = weight
                starts[first : first + k], starts[first + k] = bias - middle, 1.0
                keys[:, first : first + k] = scores.slopes[index]
                keys[:, first + k] = scores.offsets[index] - lowered
                values[:, first] = scores.values[index, 0]
                if scores.value_slopes is not None and tilts is not None:  # they multiply u − o
                    tilt = scores.value_slopes[index, 0]
                    values[:, first] += tilt @ (bias - middle)
                    tilts[:, first] = tilt @ weight
                first += size
        collected = np.zeros((embedding, embedding))
        collected[np.arange(len(heads)), size * np.arange(len(heads))] = 1.0
        scale, one = math.sqrt(size), np.eye(embedding)
        self.attention = nn.MultiheadAttention(embedding, len(heads), batch_first=True, device=device, dtype=dtype)
        rows = {
            "in_proj_weight": np.concatenate([scale * queries, one, one]),
            "in_proj_bias": np.concatenate([scale * starts, np.zeros(2 * embedding)]),
            "out_proj.weight": collected,
            "out_proj.bias": np.zeros(embedding),
        }
        self.attention.load_state_dict({name: torch.tensor(array, dtype=dtype) for name, array in rows.items()})
        for name, array in (("keys", keys), ("values", values), ("value_slopes", tilts)):
            self.register_buffer(name, None if array is None else torch.tensor(array, dtype=dtype, device=device))
        self.requires_grad_(False)

    @certified
    def forward(self, channels: Tensor) -> Tensor:
        """`(n, channels)` to `(n, channels + heads)`."""
        padded = nn.functional.pad(channels, (0, self.keys.shape[1] - self.channels))
        if self.value_slopes is None:  # the same tokens for every query: a batch of queries is one sequence
            out = self.attention(padded[None], self.keys[None], self.values[None], need_weights=False)[0][0]
        else:
            values = self.values + torch.einsum("jec,nc->nje", self.value_slopes, channels)
            keys = self.keys.expand_as(values)
            out = self.attention(padded[:, None], keys, values, need_weights=False)[0][:, 0]
        return torch.cat([channels, out[:, : self.num_heads]], dim=1)

    def extra_repr(self) -> str:
        return f"{self.channels} channels, {self.num_heads} heads with {len(self.keys)} keys each"


def _padded(keys: int, count: int) -> tuple[NDArray[np.int64], Array]:
    """Which key each of `count` keys is, and by how much its score is lowered: the first one is repeated."""
    index, lowered = np.maximum(np.arange(count) - (count - keys), 0), np.zeros(count)
    lowered[: count - keys + 1] = math.log(count - keys + 1)
    return index, lowered


def exact_values(wiring: Wiring, graphs: Sequence[Graph], points: Array) -> Array:
    """The function that a network approximates, in float64: part functions in place of heads, exact coefficients.

    Args:
        wiring: who reads what.
        graphs: the part function of each head, with one output.
        points: flat, `(n, m)`.

    Returns:
        `(n, outputs)`.
    """
    channels = points
    for layer in wiring.layers:
        found = [channels]
        for group in layer:
            graph = graphs[group.head]
            reads = _applied(group.reads, channels).reshape(-1, graph.num_inputs)
            found.append(graph.evaluate(reads).reshape(len(points), -1))
        channels = np.concatenate(found, axis=1)
    return _applied(wiring.output, channels)


def _applied(map_: Affine, channels: Array) -> Array:
    weight, bias = map_.weight.copy(), map_.bias.copy()
    for (row, column), fraction in map_.exact.items():
        if column == -1:
            bias[row] = float(fraction)
        else:
            weight[row, column] = float(fraction)
    out: Array = channels[:, map_.start : map_.start + weight.shape[1]] @ weight.T + bias
    return out


def _sha256(data: Any) -> str:
    text = json.dumps(data, sort_keys=True, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def _made(given: Affine, dtype: torch.dtype) -> AffineMap:
    """The map of a wiring, whose arrays must fit together."""
    if dtype not in (torch.float64, torch.float32):
        raise UnsupportedError(f"a network of dtype {dtype}; expected torch.float64 or torch.float32.")
    weight, bias = np.asarray(given.weight), np.asarray(given.bias)
    if weight.ndim != 2 or bias.shape != weight.shape[:1] or not weight.size or given.start < 0:
        raise ShapeError(
            f"an affine map has weights of shape {weight.shape}, biases of shape {bias.shape} and start {given.start}; "
            "expected (rows, width) and (rows,), none of them 0, and a start ≥ 0."
        )
    return AffineMap.of(given, dtype)


def _require_parts(heads: Sequence[Head], dtype: torch.dtype) -> None:
    name = str(dtype).removeprefix("torch.")
    for i, head in enumerate(heads):
        if type(head) not in _PARTS.values() or head.output_shape != () or head.semantics != name:
            raise UnsupportedError(
                f"head {i} is a {type(head).__name__} with outputs of shape {head.output_shape} in {head.semantics}; expected "
                f"a GridHead or ScatteredHead with one output, output_shape (), in {name}."
            )


def _require_fits(where: str, reads: AffineMap, channels: int, rows: str, fits: bool) -> None:
    if reads.start + reads.width > channels:
        raise ShapeError(
            f"{where} reads channels {reads.start} to {reads.start + reads.width - 1}; there are {channels} before it."
        )
    if not fits:
        raise ShapeError(f"{where} has {reads.rows} rows; expected {rows}.")


def _list(record: Mapping[str, Any], name: str) -> list[Any]:
    found = record.get(name)
    if not isinstance(found, list):
        raise FormatError(f"head record: {name} is {short_text(found)}; expected a list.")
    return found


def _sorted_by_owner(tensors: Mapping[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    """`heads.0.values` to `{"heads.0": {"values": …}}`."""
    found: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        owner, _, own = name.rpartition(".")
        found.setdefault(owner, {})[own] = tensor
    return found


def _read_part(where: str, record: Any, tensors: Mapping[str, Tensor], dtype: str) -> FoldedHead:
    """A head of the network, over a box that is not known here: only its dimension counts."""
    if not isinstance(record, Mapping) or not isinstance(record.get("type"), str) or record["type"] not in _PARTS:
        raise FormatError(f"{where} is {short_text(record)}; expected a record of type {' or '.join(_PARTS)}.")
    shapes = record.get("input_shapes")
    k = (
        shapes[0][0]
        if isinstance(shapes, list) and len(shapes) == 1 and isinstance(shapes[0], list) and len(shapes[0]) == 1
        else None
    )
    if (
        type(k) is not int
        or not 1 <= k <= _INPUTS_AT_MOST
        or record.get("output_shape") != []
        or record.get("dtype") != dtype
    ):
        raise FormatError(
            f"{where}: found shapes {short_text(shapes)} and {short_text(record.get('output_shape'))}, dtype "
            f"{short_text(record.get('dtype'))}; expected [[k]] and [], {dtype}, k from 1 to {_INPUTS_AT_MOST}."
        )
    try:
        return _PARTS[record["type"]].from_record(record, tensors, Box(np.zeros(k), np.ones(k)))
    except PartitaError as error:
        raise FormatError(f"{where}: {error}") from None
