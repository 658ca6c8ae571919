"""How errors travel through a network of heads: ranges of all channels, and how far the running network may be from the exact one.

The exact network has the exact coefficients, and each head's function g in the place of the head. Channel by channel, u what a
use of a head reads in the exact network and ũ what it reads as it runs:

- `|ũ_i − u_i| ≤ δ_i = Σ_j |w̃_ij| e_j + Σ_j |w̃_ij − w_ij||c_j| + |b̃_i − b_i| + rounding`, e the errors of the channels read;
- u lies in a box that is enclosed here, and ũ in that box widened by δ, which must lie in the box of the head's own claim;
- `e ≤ ε + Σ_i L_i δ_i`, ε the head's claimed error and `L_i = sup |∂_i g|` over the widened box.

An input that a head reads as it is needs no δ in float32: the head's own claim covers the rounding of its inputs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from flint import arb

from partita_check.bounds import LARGEST, STORED, TINIEST, UNIT, length
from partita_check.clock import clock
from partita_check.graph import Graph, Node
from partita_check.intervals import UNKNOWN, Interval, is_known
from partita_check.moduli import Composed
from partita_check.polynomials import Ends, balls, up
from partita_check.ranges import above, below, largest_slope, span
from partita_check.wiring import Row, Wiring

__all__ = ["Carried", "Joint", "Known", "Part", "Propagation", "Ranges", "Stuck"]


class Stuck(Exception):
    """Why no bound can be given."""


class Part(NamedTuple):
    """What a head stands for: its function, the box of its claim, and the error that it claims."""

    graph: Graph
    ends: Ends
    error: float


class Read(NamedTuple):
    """What the error of one row of an affine map is made of: errors of channels, inexact coefficients, and rounding."""

    inherited: arb
    coefficients: arb
    rounding: arb

    @property
    def error(self) -> arb:
        return self.inherited + self.coefficients + self.rounding


class Carried(NamedTuple):
    """One use of a head: what it reads, and how steep its part is along inputs on which errors arrive.

    moved: what takes the place of slopes where one is infinite.
    """

    reads: tuple[Read, ...]
    slopes: tuple[arb, ...]
    moved: arb


class Known(NamedTuple):
    """Ranges of the exact values over the whole domain, of what every use reads and of every channel."""

    reads: list[list[Interval]]
    channels: list[Interval]


class Ranges:
    """Ranges and slopes of parts, each looked for once."""

    def __init__(self, parts: Sequence[Part], pieces: int, close: float) -> None:
        self.parts, self.pieces, self.close = parts, pieces, close
        self._ranges, self._slopes = dict[tuple[int, Ends], Interval](), dict[tuple[int, Ends, int], arb]()

    def range(self, head: int, reads: Sequence[Interval]) -> Interval:
        if not all(map(is_known, reads)):
            return UNKNOWN
        ends = tuple((below(a), above(b)) for a, b in reads)
        if (head, ends) not in self._ranges:
            low, high = span(self.parts[head].graph, ends, self.pieces, self.close)
            self._ranges[head, ends] = (arb(low), arb(high))
        return self._ranges[head, ends]

    def slope(self, head: int, ends: Ends, axis: int) -> arb:
        key = (head, ends, axis)
        if key not in self._slopes:
            self._slopes[key] = largest_slope(self.parts[head].graph, ends, axis, self.pieces, self.close)
        return self._slopes[key]


def row_range(row: Row, channels: Sequence[Interval]) -> Interval:
    """The range of the exact value of a row, its channels taken to be independent."""
    if row.plain:
        (j,), (w,) = row.columns, row.weights
        return channels[j] if w > 0 else (-channels[j][1], -channels[j][0])
    weights, bias = row.truth()
    low = high = bias
    for w, j in zip(weights, row.columns):
        a, b = channels[j]
        low, high = (low + w * a, high + w * b) if w > 0 else (low + w * b, high + w * a)
    return (low.lower(), high.upper()) if low.is_finite() and high.is_finite() else UNKNOWN


@dataclass
class Propagation:
    """The channels of a wiring over a box, one after the other.

    Attributes:
        known: ranges that hold on a larger box.
        channels: the ranges of the exact values of all channels.
        size: the largest modulus in each.
        error: how far the running network may be from it.
    """

    wiring: Wiring
    ranges: Ranges
    box: Ends
    semantics: str
    known: Known | None = None
    channels: list[Interval] = field(default_factory=list)
    size: list[arb] = field(default_factory=list)
    error: list[arb] = field(default_factory=list)
    uses: list[Carried] = field(default_factory=list)
    outputs: list[Read] = field(default_factory=list)

    def run(self) -> list[arb]:
        """A bound of the error of every output; `Stuck` says where there is none."""
        by, least, most = STORED[self.semantics]
        narrow = self.semantics not in ("real", "float64")
        for a, b in self.box:
            size = arb(max(abs(a), abs(b)))
            if not size < most:
                raise Stuck(f"inputs of {above(size):.4g} overflow {self.semantics}")
            self._append((arb(a), arb(b)), (size * by + least).upper() if narrow else arb(0))
        for n in range(len(self.wiring.uses)):
            self._use(n)
        self.outputs = [self._read(row, f"output {k}") for k, row in enumerate(self.wiring.output)]
        return [read.error.upper() for read in self.outputs]

    def _append(self, value: Interval, error: arb) -> None:
        self.channels.append(value)
        self.size.append(max(abs(value[0]), abs(value[1])))
        self.error.append(error)

    def _read(self, row: Row, where: str) -> Read:
        """What the error of one row of an affine map is made of."""
        clock.tick()
        if row.plain:
            return Read(self.error[row.columns[0]], arb(0), arb(0))
        true, bias = row.truth()
        inherited, size, apart = arb(0), abs(row.bias), abs(row.bias - bias)
        for w, exact, j in zip(row.weights, true, row.columns):
            steep = abs(w)
            inherited += steep * self.error[j]
            size += steep * (self.size[j] + self.error[j])
            if exact is not w:
                apart += abs(w - exact) * self.size[j]
        u = row.roundings * UNIT[self.semantics]
        rounding = size * u / (1 - u) + row.products * TINIEST[self.semantics] * (1 + 2 * u)
        if not (2 * size < LARGEST[self.semantics] and size.is_finite() and u < 0.5):
            raise Stuck(f"{where}: sums may reach {above(size):.4g}, which overflows {self.semantics}")
        return Read(inherited.upper(), apart.upper(), rounding.upper())

    def _use(self, n: int) -> None:
        use = self.wiring.uses[n]
        part, where = self.ranges.parts[use.head], f"use {n} (head {use.head}, layer {use.layer})"
        reads, exact = list[Read](), list[Interval]()
        reach, arriving = list[tuple[float, float]](), list[arb]()
        for i, (row, (lo, hi)) in enumerate(zip(use.rows, part.ends)):
            reads.append(self._read(row, where))
            exact.append(_met(row_range(row, self.channels), self.known and self.known.reads[n][i]))
            covered = row.plain and row.columns[0] < self.wiring.inputs
            arriving.append(arb(0) if covered else reads[i].error.upper())
            a, b = exact[i][0] - arriving[i], exact[i][1] + arriving[i]
            if not (a >= lo and b <= hi):
                said = f"may read [{below(a):.9g}, {above(b):.9g}] as input {i}"
                raise Stuck(f"{where} {said}, and its part's claim is about [{lo:.9g}, {hi:.9g}]")
            reach.append((max(below(a), lo), min(above(b), hi)))
        value = _met(self.ranges.range(use.head, exact), self.known and self.known.channels[self.wiring.inputs + n])
        if not is_known(value):
            shown = " × ".join(f"[{below(a):.6g}, {above(b):.6g}]" for a, b in exact)
            raise Stuck(f"{where}: its part is not seen to be finite on {shown}: a pole may lie there")
        slopes = [self.ranges.slope(use.head, tuple(reach), i) if d != 0 else arb(0) for i, d in enumerate(arriving)]
        moved, found = arb(0), sum((s * d for s, d in zip(slopes, arriving)), arb(0))
        if not found.is_finite():
            found = moved = Composed(part.graph, balls(tuple(reach))[0]).at(length(arriving)).upper()
            slopes = [arb(0)] * len(slopes)
            if not found.is_finite():
                raise Stuck(f"{where}: its part has no bounded slope where it reads")
        self.uses.append(Carried(tuple(reads), tuple(slopes), moved))
        self._append(value, (found + part.error).upper())

    def budget(self) -> tuple[int, Mapping[str, arb]]:
        """The output with the largest bound, and what it is made of: per head, inputs, coefficients and rounding."""
        worst = max(range(len(self.outputs)), key=lambda k: up(self.outputs[k].error))
        gains = [arb(0)] * len(self.channels)
        shares: dict[str, arb] = {f"head {p}": arb(0) for p in range(len(self.ranges.parts))}
        shares |= {"moduli": arb(0), "inputs": arb(0), "coefficients": arb(0), "rounding of linear maps": arb(0)}

        def back(row: Row, read: Read, gain: arb) -> None:
            for w, j in zip(row.weights, row.columns):
                gains[j] += gain * abs(w)
            shares["coefficients"] += gain * read.coefficients
            shares["rounding of linear maps"] += gain * read.rounding

        back(self.wiring.output[worst], self.outputs[worst], arb(1))
        for n in reversed(range(len(self.uses))):
            clock.tick()
            use, carried, gain = self.wiring.uses[n], self.uses[n], gains[self.wiring.inputs + n]
            shares[f"head {use.head}"] += gain * self.ranges.parts[use.head].error
            shares["moduli"] += gain * carried.moved
            for row, read, slope in zip(use.rows, carried.reads, carried.slopes):
                back(row, read, gain * slope)
        shares["inputs"] = sum((g * e for g, e in zip(gains[: self.wiring.inputs], self.error)), arb(0))
        return worst, {name: x for name, x in shares.items() if x != 0}


def _met(x: Interval, known: Interval | None) -> Interval:
    """What two enclosures of the same numbers have in common."""
    found = x if known is None else (max(x[0], known[0]), min(x[1], known[1]))
    return found if found[0] <= found[1] else x


class Joint:
    """The exact network as one function of its inputs, so that channels that share an input are not taken to be independent.

    What is known of a read or a channel is kept, so that a range that is too wide on the way to a later one does no harm. Where
    nothing is shared the range of independent channels is that of the function, and a function of one read has its range.
    """

    def __init__(self, wiring: Wiring, ranges: Ranges, box: Ends, pieces: int, *, only_outside: bool = False) -> None:
        self.wiring, self.ranges, self.box, self.pieces = wiring, ranges, box, pieces
        self.only_outside = only_outside  # whether reads that stay in the box of their part are left as they are
        self.nodes: list[Node] = [("input", (), (i,)) for i in range(wiring.inputs)]

    def run(self) -> Known:
        """The ranges of all reads and channels."""
        found = Known([], [(arb(a), arb(b)) for a, b in self.box])
        places, inputs = list(range(self.wiring.inputs)), [1 << i for i in range(self.wiring.inputs)]
        for use in self.wiring.uses:
            clock.tick()
            reads, nodes, seen = list[Interval](), list[int](), list[int]()
            for row, ends in zip(use.rows, self.ranges.parts[use.head].ends):
                weights, bias = row.truth()
                node = self._add("linear", tuple(places[j] for j in row.columns), (*weights, bias))
                bits, shared = _union([inputs[j] for j in row.columns])
                independent = row_range(row, found.channels)
                reads.append(self._range(node, independent, shared and not self._is_inside(independent, ends)))
                nodes.append(self._kept(node, reads[-1]))
                seen.append(bits)
            order = list[int]()
            graph = self.ranges.parts[use.head].graph
            for name, args, params in graph.nodes:
                inside = tuple(order[k] for k in args)
                order.append(nodes[params[0]] if name == "input" else self._add(name, inside, params))
            bits, shared = _union(seen)
            node = order[graph.outputs[0]]
            value = self._range(node, self.ranges.range(use.head, reads), shared and not self.only_outside)
            found.reads.append(reads)
            found.channels.append(value)
            places.append(self._kept(node, value))
            inputs.append(bits)
        return found

    def _add(self, name: str, args: tuple[int, ...], params: tuple[object, ...]) -> int:
        self.nodes.append((name, args, params))
        return len(self.nodes) - 1

    def _is_inside(self, x: Interval, ends: tuple[float, float]) -> bool:
        return self.only_outside and bool(x[0] >= ends[0] and x[1] <= ends[1])

    def _kept(self, node: int, value: Interval) -> int:
        return self._add("meet", (node,), value) if is_known(value) else node

    def _range(self, node: int, independent: Interval, shared: bool) -> Interval:
        if not shared:
            return independent
        graph, used = Graph(len(self.box), tuple(self.nodes[: node + 1]), (node,), ()).component(0)
        low, high = span(graph, tuple(self.box[i] for i in used), self.pieces, 0.0)
        return _met((arb(low), arb(high)), independent)


def _union(parts: Sequence[int]) -> tuple[int, bool]:
    """The inputs of some quantities together, as bits, and whether two of them share one."""
    union, shared = 0, False
    for bits in parts:
        shared |= bool(union & bits)
        union |= bits
    return union, shared
