"""The verdict on a network of heads: every head's own claim, how errors travel through the wiring, and which function it is.

A network is verified only if its wiring, with exact coefficients and the parts' functions in the place of heads, is the function
of the claim (by canonical forms, or by definition); if every part's claim is verified as that of any head; if every head reads
only what its claim is about; and if the errors add up to at most the bound claimed.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise, product
from typing import NamedTuple

from flint import arb, ctx

from partita_check.clock import TimeOver, clock
from partita_check.forms import same_function
from partita_check.graph import Graph, read_hex
from partita_check.intervals import is_known, values_over
from partita_check.polynomials import Ends, down, up
from partita_check.propagation import Joint, Known, Part, Propagation, Ranges, Stuck
from partita_check.reading import Stored, StoredNetwork
from partita_check.shards import WHOLE, Shard
from partita_check.verdict import REFUTED, UNKNOWN, VERIFIED, Point, Verdict, check, net_at

__all__ = ["NetworkVerdict", "check_network", "other_function"]

PRECISION = 128  # bits: several heads behind each other
MOST_BOXES = 4096  # into which a domain is cut
MOST_NODES = 6000  # of a network that is looked at as one function of its inputs, weights of linear maps included
CORNERS = 32  # that are tried; all of them in a few dimensions


class Effort(NamedTuple):
    """How many pieces of a box are looked at: for ranges and slopes of parts, which have to be so close to what is attained (the
    first try, and what follows where it does not do), and for ranges as functions of the inputs."""

    parts: tuple[tuple[int, float], ...]
    inputs: int


EFFORTS = (
    Effort(((1, 1e-2),), 0),
    Effort(((64, 1e-3),), 0),
    Effort(((1, 1e-2), (256, 1e-5)), 64),
    Effort(((1, 1e-2), (4096, 0.0)), 512),
    Effort(((1, 1e-2), (4096, 0.0)), 2048),
    Effort(((1, 1e-2), (4096, 0.0)), 8192),
)


@dataclass
class NetworkVerdict(Verdict):
    """With what was found of every part, and what the bound is made of."""

    parts: list[str] = field(default_factory=list)
    propagation: list[str] = field(default_factory=list)


def check_network(stored: StoredNetwork, *, sampled: int = 0, shard: Shard = WHOLE) -> NetworkVerdict:
    """The verdict on a network's claim, in the time that the clock allows. Shards share the proofs of the parts."""
    claim = stored.claim
    if claim.bound is None:
        said = f"the claim is an estimate ({claim.estimate:.6g} seen)"
        return NetworkVerdict(UNKNOWN, f"{said}: nothing is proved, so nothing can be verified")
    verdict, ctx.prec = NetworkVerdict(UNKNOWN), PRECISION
    try:
        with clock.share(clock.left() / 4), suppress(TimeOver):
            _attack(stored, claim.bound, sampled or 64, verdict)
        if verdict.outcome == REFUTED or sampled:
            verdict.reason = verdict.reason or "spot check: no violation at the points tried; nothing is proved"
            return verdict
        function = (
            "" if stored.graph is None else other_function(stored, stored.graph)
        )  # it is what it is by definition
        reasons = [function, _propagated(stored, claim.bound, verdict), _parts(stored, verdict, shard)]
        ctx.prec = PRECISION
    except TimeOver:
        reasons = ["the time budget ran out"]
    if verdict.outcome != REFUTED:
        verdict.reason = "; ".join(filter(None, reasons))
        verdict.outcome = UNKNOWN if verdict.reason else VERIFIED
    return verdict


def _points(stored: StoredNetwork, count: int) -> Iterator[Point]:
    """The witness, corners and random points."""
    source, pairs = random.Random(1), list(zip(stored.lo, stored.hi))
    if stored.claim.witness is not None:
        yield stored.claim.witness
    few = 2 ** min(len(pairs), 64) <= CORNERS
    yield from product(*pairs) if few else (tuple(map(source.choice, pairs)) for _ in range(CORNERS))
    for _ in range(count):
        yield tuple(a + (b - a) * source.random() for a, b in pairs)


def _attack(stored: StoredNetwork, bound: float, count: int, verdict: NetworkVerdict) -> None:
    """Evaluate the exact network and its function at points of the domain, in balls."""
    wiring, sup = stored.wiring, math.isinf(stored.claim.norm)
    for point in _points(stored, count):
        inside = all(a <= x <= b for a, x, b in zip(stored.lo, point, stored.hi))
        if not inside or (stored.region is not None and not stored.region.holds(point)):
            continue
        deployed, exact = [arb(x) for x in point], [arb(x) for x in point]
        for use in wiring.uses:
            clock.tick()
            deployed += net_at(stored.heads[use.head], [row.read(deployed) for row in use.rows])
            if stored.graph is None:
                exact += stored.parts[use.head].function.evaluate([row.read_exactly(exact) for row in use.rows])
        truth = (
            stored.graph.evaluate(exact) if stored.graph is not None else [r.read_exactly(exact) for r in wiring.output]
        )
        errors: list[arb] = [abs(a - row.read(deployed)) for a, row in zip(truth, wiring.output)]
        error = max(errors, key=lambda e: float(e.mid()) if e.is_finite() else math.inf)
        if verdict.where is None or down(error) > verdict.seen:
            verdict.seen, verdict.where = max(down(error), 0.0), point
        if sup and error > arb(bound):
            verdict.outcome = REFUTED
            verdict.reason = (
                f"the error at this point is at least {verdict.seen:.17g}, more than the bound {bound:.17g}"
            )
            return


def other_function(stored: StoredNetwork, graph: Graph) -> str:
    """Why the wiring, with exact parts, is not seen to be a function on the domain; an empty string if it is."""
    positive = [i for i, low in enumerate(stored.lo) if low > 0]
    undefined = [i for i, part in enumerate(stored.parts) if not _is_defined(part.function, part.lo, part.hi)]
    found = same_function(graph, stored.wiring, [p.function for p in stored.parts], positive, undefined)
    if found == "undefined":
        defined = _is_defined(graph, stored.lo, stored.hi)
        found = "" if defined else "the function is not seen to be defined everywhere"
    return found


def _is_defined(graph: Graph, lo: Sequence[float], hi: Sequence[float]) -> bool:
    """Whether all operations are seen to be defined on a box, roots too, which count as 0 elsewhere."""
    values = values_over(graph, [*zip(map(arb, lo), map(arb, hi))])
    starts = [(values[args[0]][0], int(name == "acosh")) for name, args, _ in graph.nodes if name in ("sqrt", "acosh")]
    return all(map(is_known, values)) and all(low >= least for low, least in starts)


class _Domain:
    """Errors on the domain of a network, or on boxes into which its certificate cuts it: that is only a hint where to look."""

    def __init__(self, stored: StoredNetwork, bound: float) -> None:
        self.stored, self.wiring, self.bound = stored, stored.wiring, bound
        self.parts = [Part(p.function, tuple(zip(p.lo, p.hi)), p.claim.bound or 0.0) for p in stored.parts]
        self.edges = _edges(stored)
        self.worst, self.budget, self.problem = arb(0), list[str](), "the time budget ran out"
        volume = math.prod((arb(b) - arb(a) for a, b in zip(stored.lo, stored.hi)), start=arb(len(self.wiring.output)))
        self.factor = arb(1) if math.isinf(stored.claim.norm) else volume ** (1 / arb(stored.claim.norm))

    def meets(self, effort: Effort) -> bool:
        """Whether the errors on all boxes are at most the bound; `problem` says why not."""
        ranges = [Ranges(self.parts, pieces, close) for pieces, close in effort.parts]
        whole = tuple((axis[0], axis[-1]) for axis in self.edges)
        known = Joint(self.wiring, ranges[-1], whole, effort.inputs).run() if effort.inputs else None
        self.worst, waiting = arb(0), [tuple((0, len(axis) - 1) for axis in self.edges)]
        while waiting:
            cells = waiting.pop()
            box = tuple((axis[i], axis[j]) for axis, (i, j) in zip(self.edges, cells))
            longest = max(range(len(cells)), key=lambda k: cells[k][1] - cells[k][0])
            first, last = cells[longest]
            if self._box(box, ranges[:1] if last - first > 1 else ranges, known):
                continue
            if last - first == 1:
                if not effort.inputs or not self._alone(box, ranges[-1], effort.inputs):
                    return False
                continue
            middle = (first + last) // 2
            waiting += [(*cells[:longest], half, *cells[longest + 1 :]) for half in ((first, middle), (middle, last))]
        return True

    def _alone(self, box: Ends, ranges: Ranges, pieces: int) -> bool:
        """The same with ranges for this box alone: first of what may leave the box of a part, then of everything."""
        for joint in (
            Joint(self.wiring, ranges, box, 16 * pieces, only_outside=True),
            Joint(self.wiring, ranges, box, pieces),
        ):
            if self._box(box, [ranges], joint.run()):
                return True
        return False

    def _box(self, box: Ends, ranges: Sequence[Ranges], known: Known | None) -> bool:
        """Whether the errors on one box are at most the bound, looking harder and harder."""
        for looked in ranges:
            tried = Propagation(self.wiring, looked, box, self.stored.claim.semantics, known)
            try:
                found = max(tried.run(), key=up) * self.factor
            except Stuck as reason:
                self.problem = str(reason)
                continue
            if found <= self.bound:
                if found > self.worst:
                    self.worst, self.budget = found, _budget(tried, self.stored)
                return True
            self.problem = f"the errors were seen to add up to {up(found):.6g}, more than the bound {self.bound:.6g}"
            self.budget = _budget(tried, self.stored)
        return False


def _edges(stored: StoredNetwork) -> list[list[float]]:
    """Where the axes of the domain are cut, its ends included."""
    cuts, whole = stored.claim.proof.get("cuts"), [[a, b] for a, b in zip(stored.lo, stored.hi)]
    if not isinstance(cuts, list) or len(cuts) != len(whole):
        return whole
    found = [[a, *(read_hex(x, "cuts") for x in axis), b] for (a, b), axis in zip(whole, cuts)]
    inside = all(x < y for axis in found for x, y in pairwise(axis))
    return found if inside and math.prod(len(axis) - 1 for axis in found) <= MOST_BOXES else whole


def _propagated(stored: StoredNetwork, bound: float, verdict: NetworkVerdict) -> str:
    """Carry the errors through the wiring, looking harder until the bound is met; why it is not met."""
    domain = _Domain(stored, bound)
    size = sum(len(row.columns) for use in stored.wiring.uses for row in use.rows)
    size += sum(len(stored.parts[use.head].function.nodes) for use in stored.wiring.uses)
    with clock.share(clock.left() / 2), suppress(TimeOver):
        for effort in EFFORTS if size <= MOST_NODES else EFFORTS[:2]:
            if domain.meets(effort):
                verdict.proved, verdict.method = up(domain.worst), "every part, and errors carried through the wiring"
                verdict.propagation = domain.budget
                return ""
    verdict.propagation = domain.budget
    return domain.problem


def _budget(tried: Propagation, stored: StoredNetwork) -> list[str]:
    """What the bound of the worst output is made of."""
    worst, shares = tried.budget()
    count, lines = Counter(use.head for use in stored.wiring.uses), list[str]()
    for name, value in sorted(shares.items(), key=lambda item: -up(item[1])):
        uses = count[int(name.split()[1])] if name.startswith("head ") else 0
        times = f" ({uses:,} uses)" if uses > 1 else ""
        lines.append(f"{name}{times}: {up(value):.6g}")
    return [f"output {worst}, error ≤ {up(tried.outputs[worst].error):.6g}:", *(f"  {line}" for line in lines)]


def _parts(stored: StoredNetwork, verdict: NetworkVerdict, shard: Shard) -> str:
    """Check every part as a head of its own, easy ones first, each with its share of the time; which of them fail."""
    count, failed = Counter(use.head for use in stored.wiring.uses), list[str]()
    order = sorted(range(len(stored.parts)), key=lambda i: (len(stored.parts[i].lo), stored.parts[i].head.keys))
    lines = dict[int, str]()
    for done, i in enumerate(order):
        part = stored.parts[i]
        with clock.share(clock.left() / (len(order) - done)):
            found = check(part, shard=shard)
        about = _about(part, count[i])
        lines[i] = f"{i}: {about}: {found.outcome}" + (f" ({found.method})" if found.outcome == VERIFIED else "")
        if found.outcome == REFUTED:
            verdict.outcome, verdict.where, verdict.seen = REFUTED, None, 0.0
            where = ", ".join(f"{x:.9g}" for x in found.where or ())
            verdict.reason = f"part {i}, at {where}: {found.reason}"
            break
        if found.outcome != VERIFIED:
            failed.append(f"part {i} is {found.outcome}: {found.reason}")
    verdict.parts = [lines.get(i, f"{i}: {_about(part, count[i])}: not checked") for i, part in enumerate(stored.parts)]
    return "; ".join(failed[:3]) + (f"; and {len(failed) - 3} more parts" if len(failed) > 3 else "")


def _about(part: Stored, uses: int) -> str:
    ends = ", ".join(f"{name} in [{a:.6g}, {b:.6g}]" for name, a, b in zip(part.names, part.lo, part.hi))
    text = part.function.infix(part.names)
    times = "once" if uses == 1 else f"{uses:,} times"
    return f"{text} for {ends}, {part.head.keys:,} keys, used {times}, error ≤ {part.claim.bound:.6g}"
