"""From stored files to a verdict: which proof is tried, what it proved, what it rests on."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import product

from flint import arb, arb_mat, ctx

from partita_check.cells import Cells
from partita_check.moments import Gaps, lambert, reach, steepest
from partita_check.polynomials import down, interval, transform, up
from partita_check.reading import Stored, need, read_hex
from partita_check.rounding import SMALLEST, UNIT, grid_score_error, grid_sums, input_shift, mixing, window_mass
from partita_check.search import search
from partita_check.soft import SoftGrid

__all__ = ["Verdict", "check", "error_at"]

MOST_PAIRS = 1_000_000
VERIFIED, REFUTED, UNKNOWN, MALFORMED = "verified", "refuted", "unknown", "malformed"
Point = tuple[float, ...]


@dataclass
class Verdict:
    """The outcome, with its reasons; `seen` is the largest error found in balls, `proved` the bound that was reached."""

    outcome: str
    reason: str = ""
    seen: float = 0.0
    where: Point | None = None
    proved: float = math.inf
    given: list[str] = field(default_factory=list)
    method: str = ""


class Checker:
    """One check of one head."""

    def __init__(self, stored: Stored, deadline: float) -> None:
        self.stored, self.head, self.claim, self.graph = stored, stored.head, stored.claim, stored.graph
        self.deadline, self.seen, self.where, self.given = deadline, 0.0, None, list[str]()
        self.shift = input_shift(self.claim.semantics, stored.lo, stored.hi)
        self.lo = tuple(down(arb(a) - s) if s > 0 else a for a, s in zip(stored.lo, self.shift))
        self.hi = tuple(up(arb(b) + s) if s > 0 else b for b, s in zip(stored.hi, self.shift))
        self.bound = self.claim.bound or 0.0
        self.sup = math.isinf(self.claim.norm)

    def look(self, point: Point) -> bool:
        """Evaluate the error at a point of the domain in balls; whether that refutes the claim."""
        if self.graph is None or not all(a <= x <= b for a, x, b in zip(self.stored.lo, point, self.stored.hi)):
            return False
        error = error_at(self.stored, point)
        if self.where is None or down(error) > self.seen:
            self.seen, self.where = max(down(error), 0.0), point
        return self.sup and bool(error > arb(self.bound))

    def points(self, count: int) -> Iterator[Point]:
        """The witness, listed points, corners, and random points."""
        if self.claim.witness is not None:
            yield self.claim.witness
        lo, hi, source = self.stored.lo, self.stored.hi, random.Random(1)
        if self.stored.points is not None:
            yield from (source.choice(self.stored.points) for _ in range(count))
            return
        if len(lo) <= 6:
            yield from product(*zip(lo, hi))
        for _ in range(count):
            yield tuple(a + (b - a) * source.random() for a, b in zip(lo, hi))

    def spot_check(self, count: int) -> bool:
        """Whether one of these points refutes the claim."""
        return any(time.monotonic() < self.deadline and self.look(point) for point in self.points(count))

    @property
    def factor(self) -> arb:
        """What turns a supremum into an L_p norm: (volume · outputs)^{1/p}."""
        if self.sup:
            return arb(1)
        sides = [arb(b) - arb(a) for a, b in zip(self.stored.lo, self.stored.hi)]
        return (math.prod(sides, start=arb(1)) * len(self.head.values)) ** (1 / arb(self.claim.norm))

    def moved_by_inputs(self) -> arb:
        """How far f may move when its input is stored in a narrower dtype."""
        total = arb(0)
        for i, shift in enumerate(self.shift):
            if shift > 0 and self.graph is not None:
                enough = 0.05 * self.bound / (len(self.shift) * up(shift))
                total += arb(steepest(self.graph, self.lo, self.hi, i, enough, self.share())) * shift
        return total

    def share(self) -> float:
        return min(5.0, max(0.0, self.deadline - time.monotonic()) / 4)

    def gaps(self) -> list[Gaps]:
        return [Gaps(axis, a, b) for axis, a, b in zip(self.head.axes, self.lo, self.hi)]

    def by_boxes(self) -> tuple[float, str]:
        """Bisection of the domain, with polynomials for grids of constant values, and mixtures of cells otherwise."""
        graph, semantics = self.graph, self.claim.semantics
        need(graph is not None, "no function to bisect")
        gaps = self.gaps() if self.head.axes else []
        moved = self.moved_by_inputs()
        sides = [b - a for a, b in zip(self.lo, self.hi)]
        largest = arb(max(max(map(abs, v)) for v in self.head.values))
        spread = self.spread()
        sharp = min((up(arb(r) * g.least * g.least) for r, g in zip(self.head.rates, gaps) if g.count > 1), default=0.0)
        options = {
            "norm": self.claim.norm,
            "outputs": len(self.head.values),
            "deadline": self.deadline,
            "refuted": self.look,
        }
        if self.head.kind == "grid" and self.head.slopes is None and (self.sup or sharp < 16):
            extra = window_mass(self.head, gaps) * spread + mixing(self.head, gaps, semantics) * spread
            extra = (extra + grid_sums(self.head, gaps, semantics, largest) + moved) * self.factor
            target = down(arb(self.bound) - extra)
            slack = min(max(0.2 * (target - self.seen), 1e-4 * target), 0.02 * target) if self.sup else 0.05 * target
            soft = SoftGrid(self.head, graph, sides, target=target, slack=slack / up(self.factor), exact=not self.sup)
            found = search(soft.measure, self.lo, self.hi, target=target, **options)
            return up(arb(found.bound) + extra), f"polynomials on {found.boxes:,} boxes"
        delta = grid_score_error(self.head, gaps, semantics) if gaps else None
        cells = Cells(self.head, graph, self.lo, self.hi, semantics=semantics, score_error=delta)
        extra = moved + 2 * self._cut(cells) * cells.largest
        if gaps:
            tall = max(
                (
                    cells._tall(j, o, [interval(a, b) for a, b in zip(self.lo, self.hi)])
                    for j in range(self.head.keys)
                    for o in range(cells.outputs)
                ),
                key=up,
            )
            extra += grid_sums(self.head, gaps, semantics, tall) + 2 * window_mass(self.head, gaps) * tall
        extra *= self.factor
        target = down(arb(self.bound) - extra)
        found = search(cells.measure, self.lo, self.hi, target=target, **options)
        return up(arb(found.bound) + extra), f"mixtures of cells on {found.boxes:,} boxes"

    def _cut(self, cells: Cells) -> arb:
        """The mass of scattered cells that an evaluator may leave out: those that trail by ln N + 45, as it finds them."""
        if self.head.axes or self.claim.semantics == "real":
            return arb(0)
        blur = 64 * (len(self.lo) + 8) * UNIT["float64"] * cells.exponent
        return (4 * blur - 44.99).exp()

    def modulus(self, hull: Sequence[Sequence[float]], enough: float) -> Modulus:
        """How fast f moves: from its graph, or as the certificate declares it, if the claim says that this is assumed."""
        if self.claim.kind == "proved" and self.graph is not None:
            return Modulus(steepest(self.graph, *hull, None, enough, self.share()), 1.0, None)
        known = self.claim.known.get("modulus")
        axes = self.claim.known.get("per_axis")
        found = Modulus(math.inf, 1.0, None)
        if known is not None:
            found = Modulus(read_hex(known["constant"], "modulus"), read_hex(known["exponent"], "exponent"), None)
            self.assume(
                f"|f(x) − f(y)|_∞ ≤ {found.constant:.6g}·|x − y|₂"
                + (f"^{found.exponent:g}" if found.exponent != 1 else "")
            )
        if axes is not None:
            found.axes = [read_hex(x, "per_axis") for x in axes]
            self.assume("|f(x) − f(y)|_∞ ≤ " + " + ".join(f"{c:.6g}·|x{i} − y{i}|" for i, c in enumerate(found.axes)))
        sound = found.constant >= 0 and 0 < found.exponent <= 1 and all(c >= 0 for c in found.axes or [])
        need(
            sound and (found.axes is None or len(found.axes) == len(self.lo)),
            "known: a modulus C·t^α needs C ≥ 0, 0 < α ≤ 1",
        )
        return found

    def assume(self, statement: str) -> None:
        """Rest on a statement that the certificate lists as the caller's."""
        need(
            (statement, "caller") in self.claim.assumptions,
            f"the certificate uses, but does not list as assumed: {statement}",
        )
        if statement not in self.given:
            self.given.append(statement)

    def by_moments(self) -> tuple[float, str]:
        """`V_j = f(v_j)` and a modulus of f, its own or a declared one, on a sharp grid: no box is looked at but for slopes of f."""
        gaps, p, m, name = self.gaps(), self.claim.norm, len(self.lo), "moments of the softmax and slopes of f"
        rates, average = [arb(r) for r in self.head.rates], not self.sup
        ends = [(min(a, axis[0]), max(b, axis[-1])) for axis, a, b in zip(self.head.axes, self.lo, self.hi)]
        hull = [a for a, _ in ends], [b for _, b in ends]
        semantics, spread, largest = (
            self.claim.semantics,
            self.spread(),
            arb(max(max(map(abs, v)) for v in self.head.values)),
        )
        delta = grid_score_error(self.head, gaps, semantics)
        if average:  # z is averaged over all reals, the head sees it rounded
            far = [g.most * min(2 * q, g.count) + g.overhang for g, q in zip(gaps, self.head.windows)]
            delta += sum((2 * r * s * (f + s) for r, s, f in zip(rates, self.shift, far)), arb(0))
        grown, shift = (2 * delta).exp(), [arb(0) if average else s for s in self.shift]
        added = (
            window_mass(self.head, gaps) * spread + grid_sums(self.head, gaps, semantics, largest) + self.value_error()
        )
        added *= self.factor
        squares = [reach(g, r, arb(max(p, 2.0) if average else 2), average) for g, r in zip(gaps, rates)]
        distance = sum((x ** (2 / arb(max(p, 2.0) if average else 2)) for x in squares), arb(0)).sqrt()
        left = (arb(self.bound) - added) / self.factor
        if not (distance.is_finite() and left > 0):
            return math.inf, name
        enough = left / (distance * grown + _length(shift))
        known = self.modulus(hull, down(enough))
        bound = (known.at(distance) * grown + known.at(_length(shift))) * self.factor + added
        if not bound <= self.bound and (known.axes is not None or self.claim.kind == "proved"):
            firsts = [
                reach(g, r, arb(p if average else 1), average) ** (1 / arb(p if average else 1))
                for g, r in zip(gaps, rates)
            ]
            axes = known.axes or [
                steepest(self.graph, *hull, i, down(left / (m * f * grown)), self.share()) for i, f in enumerate(firsts)
            ]
            other = (
                sum((arb(v) * (f * grown + s) for v, f, s in zip(axes, firsts, shift)), arb(0)) * self.factor + added
            )
            bound = min(bound, other, key=up)
        return up(bound + self.jumps(gaps, rates)), name

    def jumps(self, gaps: list[Gaps], rates: list[arb]) -> arb:
        """What declared jumps add in L_p: points whose relevant centers may lie across one, and the little mass beyond those."""
        declared = self.claim.known.get("jumps")
        if declared is None:
            need(
                "rough_boxes" not in self.claim.known or self.claim.kind == "proved",
                "rough boxes of an unknown function",
            )
            return arb(0)
        height, tube = read_hex(declared["height"], "height"), [read_hex(t, "tube") for t in declared["tube"]]
        text = " + ".join(f"{t:g}·r" + ("" if k == 1 else f"^{k}") for k, t in enumerate(tube, 1))
        self.assume(
            f"f moves by at most {height:g}, and obeys its modulus between points whose segment misses a set "
            f"whose r-neighbourhood has measure ≤ {text} for every r"
        )
        need(not self.sup and min([height, *tube]) >= 0, "jumps are for L_p norms")
        reaches, beyond = [], arb(0)
        for g, r, q, s in zip(gaps, rates, self.head.windows, self.shift):
            window = g.most * min(2 * q, g.count) + g.overhang if g.count > 1 else g.radius
            relevant = (g.radius * g.radius + 48 / r).sqrt()
            if g.count > 1 and relevant < window:
                beyond += 2 * arb(-24).exp() / (1 - (-r * g.least * g.least / 2).exp())
                window = relevant
            reaches.append(window + s)
        near = sum((arb(t) * _length(reaches) ** k for k, t in enumerate(tube, 1)), arb(0))
        return arb(height) * ((len(self.head.values) * near) ** (1 / arb(self.claim.norm)) + beyond * self.factor)

    def by_points(self) -> tuple[float, str]:
        """A domain that consists of its listed points: the error at each, in balls as wide as storing the point may move it."""
        spread, m = self.spread(), len(self.lo)
        largest = arb(max(max(map(abs, v)) for v in self.head.values))
        u, rate, worst = UNIT[self.claim.semantics], arb(self.head.rates[0]), arb(0)
        need(self.head.kind == "scattered" and self.head.slopes is None and self.head.powers is None, "plain centers")
        for point in self.stored.points or ():
            if time.monotonic() > self.deadline:
                return math.inf, "points"
            self.look(point)
            at = [arb(x) + s * arb(0, 1) for x, s in zip(point, self.shift)]
            nearest = self._nearest(point, self.head.centers) + _length(self.shift)
            delta = 1.01 * u * ((m + 6) * (rate * nearest * nearest / 2 + math.log(self.head.keys) + 45) + 17)
            worst = max(worst, error_at(self.stored, point, at) + delta * spread, key=up)
        sums = 1.01 * (2 * self.head.keys + m + 16) * u * largest
        return up(worst + sums + 2 * arb(-44.9).exp() * spread), f"all {len(self.stored.points or ()):,} points"

    def by_cover(self) -> tuple[float, str]:
        """A domain of listed points, each within ρ of a center, and what is said to lie around them: the soft-maximum lemma."""
        stored, head, m = self.stored, self.head, len(self.lo)
        u, rate, count, semantics = UNIT[self.claim.semantics], arb(head.rates[0]), head.keys, self.claim.semantics
        need(
            head.kind == "scattered" and head.slopes is None and head.powers is None and self.sup,
            "a cover has plain centers",
        )
        radius = (
            max((self._nearest(p, head.centers) for p in stored.points or ()), key=up)
            + stored.fill
            + _length(self.shift)
        )
        ends = [(down(arb(a) - stored.fill), up(arb(b) + stored.fill)) for a, b in zip(self.lo, self.hi)]
        distance = (radius * radius + 2 * lambert(count) / rate).sqrt()
        trail = math.log(count) + 45
        delta = 1.01 * u * ((m + 6) * (rate * radius * radius / 2 + trail) + 17)
        grown, largest = (2 * delta).exp(), arb(max(max(map(abs, v)) for v in head.values))
        limit = 2 * up(radius) + math.sqrt(2 * (math.log(count) + 40) / head.rates[0])
        near = max(sum(math.dist(a, b) <= limit * (1 + 1e-9) for b in head.centers) for a in head.centers)
        added = (
            2 * (arb(-44.9).exp() + count * SMALLEST[semantics]) * self.spread() + 5 * arb(-39.9).exp() * u * largest
        )
        added += 1.01 * (2 * near + m + 16) * u * largest + self.value_error()
        enough = (arb(self.bound) - added) / (distance * grown + _length(self.shift))
        known = self.modulus(([a for a, _ in ends], [b for _, b in ends]), down(enough))
        if self.graph is None:  # f was asked at listed points, which storing may have moved
            added += known.at(max((self._nearest(c, stored.points or ()) for c in head.centers), key=up))
        if stored.fill > 0:
            self.assume(f"every point of the domain is within {stored.fill:g} of a listed point")
        return up(
            known.at(distance) * grown + known.at(_length(self.shift)) + added
        ), "a cover and the soft-maximum lemma"

    @staticmethod
    def _nearest(point: Point, others: Sequence[Point]) -> arb:
        other = min(others, key=lambda c: math.dist(point, c))
        return _length([arb(a) - arb(b) for a, b in zip(point, other)])

    def spread(self) -> arb:
        return max((arb(max(v)) - arb(min(v)) for v in self.head.values), key=up)

    def value_error(self) -> arb:
        """`max |V_j − f(v_j)|` over all cells; of a black box only what storing its answers may have done."""
        if self.graph is None:
            self.given.append("the values stored at the centers are those of f (a black box: they cannot be checked)")
            narrow = self.claim.semantics == "float32"
            return arb(max(max(map(abs, v)) for v in self.head.values)) * (2 * UNIT["float32"]) if narrow else arb(0)
        worst, cells = arb(0), product(*self.head.axes) if self.head.axes else iter(self.head.centers)
        for j, center in enumerate(cells):
            for o, value in enumerate(self.graph.evaluate([arb(x) for x in center])):
                found = (value - arb(self.head.values[o][j])).abs_upper()
                worst = worst if found <= worst else found
        return worst

    def contradiction(self) -> str:
        """Two stored values that move faster than the declared modulus allows, or an empty text."""
        known = self.claim.known.get("modulus")
        if self.claim.kind != "proved_given" or known is None or not self.head.axes or "jumps" in self.claim.known:
            return ""
        modulus = Modulus(read_hex(known["constant"], "modulus"), read_hex(known["exponent"], "exponent"), None)
        counts = [len(a) for a in self.head.axes]
        for axis, centers in enumerate(self.head.axes):
            inner = math.prod(counts[axis + 1 :])
            for cell in range(self.head.keys):
                k = cell // inner % counts[axis]
                if k + 1 < counts[axis]:
                    allowed = modulus.at(arb(centers[k + 1]) - arb(centers[k]))
                    for v in self.head.values:
                        moved = abs(arb(v[cell + inner]) - arb(v[cell]))
                        if moved > allowed + 4 * UNIT["float32" if self.head.dtype == "float32" else "float64"] * arb(
                            max(map(abs, v))
                        ):
                            return f"neighbouring values on axis {axis} differ by {up(moved):.6g}, the declared modulus allows {up(allowed):.6g}"
        return ""


@dataclass
class Modulus:
    """`|f(x) − f(y)| ≤ constant·|x − y|^exponent`, and, if there are any, constants per axis."""

    constant: float
    exponent: float
    axes: list[float] | None

    def at(self, distance: arb) -> arb:
        if not distance > 0:
            return arb(0)
        return arb(self.constant) * (distance if self.exponent == 1 else distance ** arb(self.exponent))


def _length(steps: Sequence[arb]) -> arb:
    return sum((s * s for s in steps), arb(0)).sqrt()


def error_at(stored: Stored, point: Point, seen_at: list[arb] | None = None) -> arb:
    """A ball that holds the largest |f − net| over the outputs at one point, for the exact head; which may see it elsewhere."""
    head, at = stored.head, [arb(x) for x in point]
    truth = stored.graph.evaluate(at)
    at = seen_at or at
    if head.axes:
        rows = []
        for axis, rate, x in zip(head.axes, head.rates, at):
            row = [(-arb(rate) * (x - c) * (x - c) / 2).exp() for c in axis]
            total = sum(row, arb(0))
            rows.append(arb_mat([[w / total for w in row]]))
        nets = [transform([arb(x) for x in v], rows)[0] for v in head.values]
        if head.slopes is not None:
            out, m = len(head.values), len(at)
            for o in range(out):
                for i in range(m):
                    mean = transform([arb(x) for x in head.slopes[o * m + i :: out * m]], rows)[0]
                    nets[o] += mean * (at[i] - head.origin[i])
    else:
        nets = _scattered_at(stored, at)
    errors = [abs(a - b) for a, b in zip(truth, nets)]
    worst = max(errors, key=lambda e: float(e.mid()) if e.is_finite() else -1.0)
    return worst


def _scattered_at(stored: Stored, at: list[arb]) -> list[arb]:
    head, m, out = stored.head, len(at), len(stored.head.values)
    weights = []
    for j, c in enumerate(head.centers):
        power = arb(head.powers[j]) if head.powers is not None else arb(0)
        square = sum(((x - y) * (x - y) for x, y in zip(at, c)), arb(0))
        weights.append((arb(head.rates[0]) * (power - square) / 2).exp())
    total, nets = sum(weights, arb(0)), []
    for o in range(out):
        net = arb(0)
        for j, (w, c) in enumerate(zip(weights, head.centers)):
            value = arb(head.values[o][j])
            if head.slopes is not None:
                start = (j * out + o) * m
                value += sum((arb(head.slopes[start + i]) * (at[i] - c[i]) for i in range(m)), arb(0))
            net += w * value
        nets.append(net / total)
    return nets


def check(stored: Stored, *, budget: float, sampled: int = 0) -> Verdict:
    """The verdict on a claim. Verified only if a bound recomputed here, rounding included, is at most the bound claimed."""
    claim, head = stored.claim, stored.head
    if claim.kind == "estimated" or claim.bound is None:
        return Verdict(
            UNKNOWN,
            f"the claim is an estimate ({claim.estimate:.6g} seen): nothing is proved, so nothing can be verified",
        )
    tall = max((max(map(abs, v)) for v in head.values), default=0.0)
    ctx.prec = 64 if tall < 1e8 * claim.bound else min(256, 72 + math.ceil(math.log2(tall / max(claim.bound, 1e-300))))
    checker = Checker(stored, time.monotonic() + budget)
    verdict = Verdict(UNKNOWN, given=checker.given)
    refuted = checker.spot_check(sampled or 64)
    contradiction = "" if refuted else checker.contradiction()
    if not refuted and not contradiction and not sampled:
        for attempt in _attempts(checker):
            found, how = attempt()
            if found < verdict.proved:
                verdict.proved, verdict.method = found, how
            if verdict.proved <= claim.bound or (checker.sup and checker.seen > claim.bound):
                break
    verdict.seen, verdict.where = checker.seen, checker.where
    if contradiction:
        verdict.outcome, verdict.reason = REFUTED, contradiction
    elif checker.sup and checker.seen > claim.bound:
        verdict.outcome = REFUTED
        verdict.reason = (
            f"the error at this point is at least {checker.seen:.17g}, more than the bound {claim.bound:.17g}"
        )
    elif sampled:
        verdict.reason = "spot check: no violation found at the points tried; nothing is proved"
    elif verdict.proved <= claim.bound:
        verdict.outcome = VERIFIED
    else:
        late = ", and the time is over" if time.monotonic() >= checker.deadline else ""
        verdict.reason = f"the best bound that could be proved is {verdict.proved:.6g}{late}"
    return verdict


def _attempts(checker: Checker) -> Iterator[Callable[[], tuple[float, str]]]:
    """The proofs that fit this head, cheap ones first."""
    head, stored = checker.head, checker.stored
    if stored.points is not None:
        if stored.fill == 0 and checker.graph is not None and len(stored.points) * head.keys <= MOST_PAIRS:
            yield checker.by_points
        yield checker.by_cover
        return
    long = [(r, (a[-1] - a[0]) / (len(a) - 1)) for r, a in zip(head.rates, head.axes) if len(a) > 1]
    plain = head.kind == "grid" and head.slopes is None
    if plain and all(r * gap * gap > 3 for r, gap in long) and (checker.sup or checker.graph is None):
        yield checker.by_moments
    if checker.graph is not None and head.kind != "train" and checker.claim.kind == "proved":
        yield checker.by_boxes
