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
from partita_check.moduli import Composed
from partita_check.polynomials import Ends, balls, up
from partita_check.ranges import above, below, largest_slope, span
from partita_check.wiring import Row, Wiring

__all__ = ["EFFORTS", "Carried", "Part", "Propagation", "Stuck"]

MOST_NODES = 6_000  # of a network that is looked at as one function of its inputs, weights of linear maps included


class Effort(NamedTuple):
    """How many pieces of a box are looked at: for ranges and slopes of parts, which have to be so close to what is attained, and
    for ranges as functions of the inputs."""

    pieces: int
    close: float
    inputs: int


EFFORTS = (
    Effort(1, 1e-2, 0),
    Effort(64, 1e-3, 0),
    Effort(256, 1e-5, 64),
    Effort(4096, 0.0, 512),
    Effort(4096, 0.0, 4096),
)


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
    """One use of a head: what it reads, and how steep its part is along inputs on which errors arrive.

    moved: what takes the place of slopes where one is infinite.
    """

    reads: tuple[Read, ...]
    slopes: tuple[arb, ...]
    moved: arb


@dataclass
class Propagation:
    """The channels of a wiring over a box, one after the other.

    Attributes:
        low, high: ends of the range of the exact value of every channel.
        size: the largest modulus of that.
        error: how far the running network may be from it.
    """

    wiring: Wiring
    parts: Sequence[Part]
    box: Ends
    semantics: str
    effort: Effort
    low: list[arb] = field(default_factory=list)
    high: list[arb] = field(default_factory=list)
    size: list[arb] = field(default_factory=list)
    error: list[arb] = field(default_factory=list)
    uses: list[Carried] = field(default_factory=list)
    outputs: list[Read] = field(default_factory=list)

    def __post_init__(self) -> None:
        by, least, most = STORED[self.semantics]
        narrow = self.semantics not in ("real", "float64")
        self._ranges, self._steep = dict[tuple[int, Ends], tuple[float, float]](), dict[tuple[int, Ends, int], arb]()
        self._whole = _Whole(self.wiring, self.parts, self.box, self.effort)
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
            (j,), (w,) = row.columns, row.weights
            low, high = (self.low[j], self.high[j]) if w > 0 else (-self.high[j], -self.low[j])
            return Read(low, high, self.error[j], arb(0), arb(0))
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
        part, where = self.parts[use.head], f"use {n} (head {use.head}, layer {use.layer})"
        reads, reach, arriving = list[Read](), list[tuple[float, float]](), list[arb]()
        for i, (row, (lo, hi)) in enumerate(zip(use.rows, part.ends)):
            read = self._read(row, where)
            low, high = self._whole.read(row, read.low, read.high)
            reads.append(read := read._replace(low=low, high=high))
            covered = row.plain and row.columns[0] < self.wiring.inputs
            arriving.append(arb(0) if covered else read.error.upper())
            a, b = read.low - arriving[i], read.high + arriving[i]
            if not (a >= lo and b <= hi):
                said = f"may read [{below(a):.9g}, {above(b):.9g}] as input {i}"
                raise Stuck(f"{where} {said}, and its part's claim is about [{lo:.9g}, {hi:.9g}]")
            reach.append((max(below(a), lo), min(above(b), hi)))
        exact = tuple((below(read.low), above(read.high)) for read in reads)
        least, most = self._range(use.head, exact)
        low, high = self._whole.channel(part.graph, arb(least), arb(most))
        if not (low.is_finite() and high.is_finite()):
            shown = " × ".join(f"[{a:.6g}, {b:.6g}]" for a, b in exact)
            raise Stuck(f"{where}: its part is not seen to be finite on {shown}: a pole may lie there")
        slopes = [self._slope(use.head, tuple(reach), i) if d != 0 else arb(0) for i, d in enumerate(arriving)]
        moved, found = arb(0), sum((s * d for s, d in zip(slopes, arriving)), arb(0))
        if not found.is_finite():
            found = moved = Composed(part.graph, balls(tuple(reach))[0]).at(length(arriving)).upper()
            slopes = [arb(0)] * len(slopes)
            if not found.is_finite():
                raise Stuck(f"{where}: its part has no bounded slope where it reads")
        self.uses.append(Carried(tuple(reads), tuple(slopes), moved))
        self._append(low, high, (found + part.error).upper())

    def _range(self, head: int, ends: Ends) -> tuple[float, float]:
        if (head, ends) not in self._ranges:
            self._ranges[head, ends] = span(self.parts[head].graph, ends, self.effort.pieces, self.effort.close)
        return self._ranges[head, ends]

    def _slope(self, head: int, ends: Ends, axis: int) -> arb:
        key, effort = (head, ends, axis), self.effort
        if key not in self._steep:
            self._steep[key] = largest_slope(self.parts[head].graph, ends, axis, effort.pieces, effort.close)
        return self._steep[key]

    def budget(self) -> tuple[int, Mapping[str, arb]]:
        """The output with the largest bound, and what it is made of: per head, inputs, coefficients and rounding."""
        worst = max(range(len(self.outputs)), key=lambda k: up(self.outputs[k].error))
        gains = [arb(0)] * len(self.low)
        shares: dict[str, arb] = {f"head {p}": arb(0) for p in range(len(self.parts))}
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
            shares[f"head {use.head}"] += gain * self.parts[use.head].error
            shares["moduli"] += gain * carried.moved
            for row, read, slope in zip(use.rows, carried.reads, carried.slopes):
                back(row, read, gain * slope)
        shares["inputs"] = sum((g * e for g, e in zip(gains[: self.wiring.inputs], self.error)), arb(0))
        return worst, {name: x for name, x in shares.items() if x != 0}


class _Whole:
    """The exact network as one function of its inputs: channels that share an input are then not taken to be independent.

    What is known of a read or a channel is kept, so that a range that is too wide on the way to a later one does no harm.
    """

    def __init__(self, wiring: Wiring, parts: Sequence[Part], box: Ends, effort: Effort) -> None:
        size = sum(sum(len(row.columns) for row in use.rows) for use in wiring.uses)
        size += sum(len(parts[use.head].graph.nodes) for use in wiring.uses)
        self.box, self.effort, self.idle = box, effort, effort.inputs == 0 or size > MOST_NODES
        self.nodes: list[Node] = [("input", (), (i,)) for i in range(wiring.inputs)]
        self.channels = list(range(wiring.inputs))
        self.seen = [1 << i for i in range(wiring.inputs)]  # the inputs that a channel depends on, as bits
        self.twice = [False] * wiring.inputs  # whether it depends on one of them on two ways
        self.reads: list[tuple[int, int, bool]] = []  # of the next use of a head: node, inputs, and the same of these

    def read(self, row: Row, low: arb, high: arb) -> tuple[arb, arb]:
        """The range of the next read of a use, given one that is found with independent channels."""
        if self.idle:
            return low, high
        weights, bias = row.truth()
        node = self._add("linear", tuple(self.channels[j] for j in row.columns), (*weights, bias))
        seen, twice = _joined([(self.seen[j], self.twice[j]) for j in row.columns])
        return self._known(node, seen, twice, low, high, self.reads)

    def channel(self, graph: Graph, low: arb, high: arb) -> tuple[arb, arb]:
        """The range of the use whose reads were the last ones, given one that is found with independent reads."""
        if self.idle:
            return low, high
        order, made = list[int](), list[tuple[int, int, bool]]()
        for name, args, params in graph.nodes:
            inside = tuple(order[k] for k in args)
            order.append(self.reads[params[0]][0] if name == "input" else self._add(name, inside, params))
        seen, twice = _joined([(bits, again) for _, bits, again in self.reads])
        found = self._known(order[graph.outputs[0]], seen, twice, low, high, made)
        self.reads = []
        self.channels.append(made[0][0])
        self.seen.append(seen)
        self.twice.append(twice)
        return found

    def _add(self, name: str, args: tuple[int, ...], params: tuple[object, ...]) -> int:
        self.nodes.append((name, args, params))
        return len(self.nodes) - 1

    def _known(
        self, node: int, seen: int, twice: bool, low: arb, high: arb, to: list[tuple[int, int, bool]]
    ) -> tuple[arb, arb]:
        if twice:
            graph, used = Graph(len(self.box), tuple(self.nodes[: node + 1]), (node,), ()).component(0)
            a, b = span(graph, tuple(self.box[i] for i in used), self.effort.inputs, 0.0)
            low, high = (
                arb(a) if a > low or not low.is_finite() else low,
                arb(b) if b < high or not high.is_finite() else high,
            )
        if low.is_finite() and high.is_finite():
            node = self._add("meet", (node,), (low, high))
        to.append((node, seen, twice))
        return low, high


def _joined(parts: Sequence[tuple[int, bool]]) -> tuple[int, bool]:
    """The inputs of some quantities together, and whether two of them share one, or one of them depends on one twice."""
    union, twice = 0, False
    for bits, again in parts:
        twice |= again or bool(union & bits)
        union |= bits
    return union, twice
