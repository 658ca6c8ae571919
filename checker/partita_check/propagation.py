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
from functools import cached_property
from typing import NamedTuple

from flint import arb

from partita_check.bounds import LARGEST, STORED, TINIEST, UNIT, length
from partita_check.clock import clock
from partita_check.graph import Graph, Node
from partita_check.moduli import Composed
from partita_check.polynomials import Ends, balls, up
from partita_check.ranges import above, below, largest_slope, span
from partita_check.wiring import Row, Wiring

__all__ = ["Carried", "Part", "Propagation", "Stuck"]

MOST_WORK = 200_000  # nodes times inputs of a channel that is enclosed from the inputs' box
EFFORTS = ((4, 1, 0), (64, 64, 4), (256, 1024, 64), (2048, 8192, 512))  # pieces: of ranges, slopes, and from the inputs


class Stuck(Exception):
    """Why no bound can be given."""


class Part(NamedTuple):
    """What a head stands for: its function, the box of its claim, and the error that it claims."""

    graph: Graph
    ends: Ends
    error: float


class Read(NamedTuple):
    """A row over a box of channels: the range of its exact value, and what its error is made of."""

    low: arb
    high: arb
    inherited: arb
    coefficients: arb
    rounding: arb

    @property
    def error(self) -> arb:
        return self.inherited + self.coefficients + self.rounding


class Carried(NamedTuple):
    """One use of a head: what it reads, along which inputs the error arrives, with which slopes.

    moved: what takes the place of the slopes where one is infinite.
    """

    reads: tuple[Read, ...]
    reach: tuple[tuple[arb, arb], ...]
    slopes: tuple[arb, ...]
    moved: arb


@dataclass
class Propagation:
    """The channels of a wiring over a box, one after the other. `effort` says how hard ranges and slopes are looked at."""

    wiring: Wiring
    parts: Sequence[Part]
    box: Ends
    semantics: str
    effort: int = 0
    low: list[arb] = field(default_factory=list)
    high: list[arb] = field(default_factory=list)
    size: list[arb] = field(default_factory=list)
    error: list[arb] = field(default_factory=list)
    uses: list[Carried] = field(default_factory=list)
    outputs: list[Read] = field(default_factory=list)
    _ranges: dict[tuple[int, Ends], tuple[float, float]] = field(default_factory=dict)
    _steep: dict[tuple[int, Ends, int], arb] = field(default_factory=dict)

    def __post_init__(self) -> None:
        by, least, most = STORED[self.semantics]
        narrow = self.semantics not in ("real", "float64")
        for a, b in self.box:
            size = arb(max(abs(a), abs(b)))
            if not size < most:
                raise Stuck(f"inputs of {above(size):.4g} overflow {self.semantics}")
            self._append(arb(a), arb(b), (size * by + least).upper() if narrow else arb(0))

    def _append(self, low: arb, high: arb, error: arb) -> None:
        self.low.append(low)
        self.high.append(high)
        self.size.append(max(abs(low), abs(high), key=up))
        self.error.append(error)

    def run(self) -> list[arb]:
        """A bound of the error of every output; `Stuck` says where there is none."""
        for n in range(len(self.wiring.uses)):
            self._use(n)
        self.outputs = [self._read(row, f"output {k}") for k, row in enumerate(self.wiring.output)]
        return [read.error.upper() for read in self.outputs]

    def _read(self, row: Row, where: str) -> Read:
        """One row of an affine map over the ranges of its channels."""
        clock.tick()
        if row.plain:
            (j,) = row.columns
            return Read(self.low[j], self.high[j], self.error[j], arb(0), arb(0))
        true, bias = row.truth()
        low = high = bias
        inherited, size, apart = arb(0), abs(row.bias), abs(row.bias - bias)
        for w, exact, j in zip(row.weights, true, row.columns):
            first, second, steep = exact * self.low[j], exact * self.high[j], abs(w)
            low, high = (low + first, high + second) if exact > 0 else (low + second, high + first)
            inherited += steep * self.error[j]
            size += steep * (self.size[j] + self.error[j])
            if exact is not w:
                apart += abs(w - exact) * self.size[j]
        u = row.roundings * UNIT[self.semantics]
        rounding = size * u / (1 - u) + row.products * TINIEST[self.semantics] * (1 + 2 * u)
        if not (2 * size < LARGEST[self.semantics] and size.is_finite() and u < 0.5):
            raise Stuck(f"{where}: sums may reach {above(size):.4g}, which overflows {self.semantics}")
        return Read(low.lower(), high.upper(), inherited.upper(), apart.upper(), rounding.upper())

    def _use(self, n: int) -> None:
        use = self.wiring.uses[n]
        part, where = self.parts[use.head], f"use {n} of layer {use.layer} (head {use.head})"
        reads, reach, arriving = list[Read](), list[tuple[arb, arb]](), list[arb]()
        for i, row in enumerate(use.rows):
            read = self._read(row, where)
            read = self._from_inputs(("read", n, i), read)
            covered = row.plain and row.columns[0] < self.wiring.inputs
            delta = arb(0) if covered else read.error.upper()
            reads.append(read)
            arriving.append(delta)
            reach.append(((read.low - delta).lower(), (read.high + delta).upper()))
            (a, b), (lo, hi) = reach[i], part.ends[i]
            if not (a >= lo and b <= hi):
                said = f"may read [{below(a):.9g}, {above(b):.9g}] as input {i}"
                raise Stuck(f"{where} {said}, and its part's claim is about [{lo:.9g}, {hi:.9g}]")
        ends = tuple((max(below(a), lo), min(above(b), hi)) for (a, b), (lo, hi) in zip(reach, part.ends))
        slopes = tuple(arb(0) if delta == 0 else self._slope(use.head, ends, i) for i, delta in enumerate(arriving))
        moved = sum((s * d for s, d in zip(slopes, arriving)), arb(0))
        if not moved.is_finite():
            moved = Composed(part.graph, balls(ends)[0]).at(length(arriving))
            slopes = tuple(arb(0) for _ in slopes)
            if not moved.is_finite():
                raise Stuck(f"{where}: its part has no bounded slope where it reads")
        else:
            moved = arb(0)
        exact = tuple((below(read.low), above(read.high)) for read in reads)
        low, high = self._range(use.head, exact)
        found = self._from_inputs(("channel", n, 0), Read(arb(low), arb(high), arb(0), arb(0), arb(0)))
        if not (found.low.is_finite() and found.high.is_finite()):
            raise Stuck(f"{where}: its part is not seen to be finite on {_shown(exact)}: a pole may lie there")
        error = sum((s * d for s, d in zip(slopes, arriving)), arb(part.error) + moved).upper()
        self.uses.append(Carried(tuple(reads), tuple(reach), slopes, moved))
        self._append(found.low, found.high, error)

    def _range(self, head: int, ends: Ends) -> tuple[float, float]:
        if (head, ends) not in self._ranges:
            self._ranges[head, ends] = span(self.parts[head].graph, ends, EFFORTS[self.effort][0])
        return self._ranges[head, ends]

    def _slope(self, head: int, ends: Ends, axis: int) -> arb:
        key = (head, ends, axis)
        if key not in self._steep:
            self._steep[key] = largest_slope(self.parts[head].graph, ends, axis, EFFORTS[self.effort][1])
        return self._steep[key]

    def _from_inputs(self, which: tuple[str, int, int], read: Read) -> Read:
        """The range of a read or a channel, also as a function of the inputs: what depends on an input twice is seen to."""
        pieces = EFFORTS[self.effort][2]
        if pieces == 0:
            return read
        nodes, places = self._whole
        position = places[which]
        graph, used = Graph(self.wiring.inputs, nodes[: position + 1], (position,), ()).component(0)
        if len(graph.nodes) * len(used) > MOST_WORK or graph.nodes[graph.outputs[0]][0] == "input" or not used:
            return read
        a, b = span(graph, tuple(self.box[i] for i in used), pieces)
        low = arb(a) if a > read.low else read.low
        high = arb(b) if b < read.high else read.high
        return read._replace(low=low, high=high)

    @cached_property
    def _whole(self) -> tuple[tuple[Node, ...], dict[tuple[str, int, int], int]]:
        """All channels as one graph of the inputs, and where every read and every channel is in it."""
        places = dict[tuple[str, int, int], int]()
        nodes: list[Node] = [("input", (), (i,)) for i in range(self.wiring.inputs)]
        channels = list(range(self.wiring.inputs))
        for n, use in enumerate(self.wiring.uses):
            clock.tick()
            graph, heads = self.parts[use.head].graph, list[int]()
            for i, row in enumerate(use.rows):
                if row.plain:
                    heads.append(channels[row.columns[0]])
                else:
                    weights, bias = row.truth()
                    nodes.append(("linear", tuple(channels[j] for j in row.columns), (*weights, bias)))
                    heads.append(len(nodes) - 1)
                places["read", n, i] = heads[-1]
            order = list[int]()
            for name, args, params in graph.nodes:
                if name == "input":
                    order.append(heads[params[0]])
                else:
                    nodes.append((name, tuple(order[k] for k in args), params))
                    order.append(len(nodes) - 1)
            channels.append(order[graph.outputs[0]])
            places["channel", n, 0] = channels[-1]
        return tuple(nodes), places

    def budget(self) -> tuple[int, Mapping[str, arb]]:
        """The output with the largest bound, and what it is made of: per head, inputs, coefficients and rounding."""
        worst = max(range(len(self.outputs)), key=lambda k: up(self.outputs[k].error))
        gains = [arb(0)] * len(self.low)
        shares: dict[str, arb] = {f"head {p}": arb(0) for p in range(len(self.parts))}
        shares |= {"inputs": arb(0), "coefficients": arb(0), "rounding of linear maps": arb(0), "moduli": arb(0)}

        def back(row: Row, read: Read, gain: arb) -> None:
            for w, j in zip(row.weights, row.columns):
                gains[j] += gain * abs(w)
            shares["coefficients"] += gain * read.coefficients
            shares["rounding of linear maps"] += gain * read.rounding

        back(self.wiring.output[worst], self.outputs[worst], arb(1))
        for n in reversed(range(len(self.uses))):
            use, carried, gain = self.wiring.uses[n], self.uses[n], gains[self.wiring.inputs + n]
            shares[f"head {use.head}"] += gain * self.parts[use.head].error
            shares["moduli"] += gain * carried.moved
            for row, read, slope in zip(use.rows, carried.reads, carried.slopes):
                back(row, read, gain * slope)
        shares["inputs"] = sum((g * e for g, e in zip(gains[: self.wiring.inputs], self.error)), arb(0))
        return worst, {name: x for name, x in shares.items() if x != 0}


def _shown(ends: Ends) -> str:
    return " × ".join(f"[{a:.6g}, {b:.6g}]" for a, b in ends)
