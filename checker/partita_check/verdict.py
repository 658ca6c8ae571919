"""From stored files to a verdict: which proof is tried, what it proved, what it rests on."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import islice, product
from operator import mul
from typing import Any

from flint import arb, arb_mat, ctx, fmpq

from partita_check.bounds import (
    SMALLEST,
    STORED,
    TINIEST,
    UNIT,
    Gaps,
    lambert,
    length,
    lost_in_score,
    mixing,
    score_error,
    steepest,
    sums,
    window_mass,
)
from partita_check.cells import Cells
from partita_check.clock import TimeOver, clock
from partita_check.graph import Graph, need, read_hex
from partita_check.lines import is_line, line_running
from partita_check.moduli import Composed, Expression
from partita_check.pieces import affine_pieces
from partita_check.polynomials import INF, Ends, balls, down, grown, transform, up
from partita_check.reading import Head, Stored, nearby
from partita_check.running import obstacle
from partita_check.search import Measured, search
from partita_check.shards import WHOLE, Shard
from partita_check.soft import SoftGrid
from partita_check.tails import clipped, tail_norm
from partita_check.two_keys import two_key_bound, two_key_form

__all__ = [
    "LEFT",
    "MALFORMED",
    "REFUTED",
    "UNKNOWN",
    "VERIFIED",
    "Verdict",
    "check",
    "error_at",
    "is_divided",
    "net_at",
]

VERIFIED, REFUTED, UNKNOWN, MALFORMED = "verified", "refuted", "unknown", "malformed"
MOST_PAIRS = 1_000_000  # of points and cells, to be compared one by one
MOST_CELLS = 1_000_000  # that are held as balls at once: about 200 bytes each
MOST_AXES = 9  # of boxes on which polynomials are compared: they have at least 4^m coefficients
MOST_QUERY_KEYS = 2_000
LISTED_WHOLE = 256  # cells of a scattered head, all of which are summed
SOFT_SLOPES = 100  # κ, below which affine values are compared as polynomials: many cells share the mass
LEFT = "nothing to prove: other shards cover the domain"
AT_ONCE = 1 << 16  # values of a grid that are averaged in one step
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


class Modulus:
    """`|f(x) − f(y)| ≤ constant·|x − y|^exponent`, and, if there are any, constants per axis."""

    def __init__(self, constant: arb, exponent: float = 1.0, axes: list[arb] | None = None) -> None:
        self.constant, self.exponent, self.axes = constant, exponent, axes

    def at(self, distance: arb) -> arb:
        return self.constant * distance ** arb(self.exponent) if distance > 0 else arb(0)


class Checker:
    """One check of one head. Proofs return a bound of the error of the head as it is run, and how it was found.

    For a function without a bound, `bound` and all proofs are about the clipped function.
    """

    tail_missing = ""

    def __init__(self, stored: Stored, bound: float, shard: Shard = WHOLE) -> None:
        self.stored, self.head, self.claim, self.graph = stored, stored.head, stored.claim, stored.graph
        self.shard = shard
        self.where: Point | None = None
        self.seen, self.given = 0.0, list[str]()
        self.bound, self.m, self.outputs = bound, len(stored.lo), len(self.head.values)
        if "tail" in self.claim.known:
            self.bound = self.without_tail(self.claim.known["tail"])
        self.sup, self.semantics = math.isinf(self.claim.norm), self.claim.semantics
        self.unit, self.tiniest = UNIT[self.semantics], TINIEST[self.semantics]
        plain: Ends = tuple(zip(stored.lo, stored.hi))
        self.narrow = self.semantics not in (
            "real",
            "float64",
        )  # inputs are float64: they are moved, perhaps across the ends
        by, least, _ = STORED[self.semantics]
        self.shift = [arb(max(map(abs, pair))) * by + least if self.narrow else arb(0) for pair in plain]
        self.ends = grown(plain, self.shift) if self.narrow else plain
        self.region = stored.region
        box = math.prod((arb(b) - arb(a) for a, b in plain), start=arb(1))
        self.volume = box if self.region is None or self.sup else min(box, self.region.volume(), key=up)
        self.factor = arb(1) if self.sup else (self.volume * self.outputs) ** (1 / arb(self.claim.norm))
        self.largest = arb(max(max(map(abs, v)) for v in self.head.values))
        self.spread = max((arb(max(v)) - arb(min(v)) for v in self.head.values), key=up)
        parts = zip(self.head.axes, self.ends, self.head.rates, self.head.windows)
        self.gaps = [Gaps(*part) for part in parts]

    def without_tail(self, tail: Any) -> float:
        """What is left of the bound for the clipped function: its tail is computed, or assumed where the caller declared it."""
        clip, norm = read_hex(tail["clip"], "clip"), read_hex(tail["norm"], "tail")
        need(clip > 0 and norm >= 0 and self.claim.norm < math.inf, "known: a tail needs clip > 0 and a finite norm")
        if tail["declared"] is not False:
            self.assume(f"‖(|f| − {clip:.6g})₊‖_{self.claim.norm:g} ≤ {norm:.6g}")
        elif self.graph is None:
            self.tail_missing = "the tail of a black box cannot be checked"
        else:
            ends = tuple(zip(self.stored.lo, self.stored.hi))
            sides = [arb(b) - arb(a) for a, b in ends]
            found = tail_norm(self.graph, balls(ends)[0], sides, clip, arb(self.claim.norm))
            norm = up(found) if found.is_finite() else math.inf
            self.tail_missing = "" if norm < self.bound else f"the tail of f beyond {clip:g} could not be bounded"
        self.graph = None if self.graph is None else clipped(self.graph, clip)
        return down(arb(self.bound) - norm) if norm < self.bound else 0.0

    def look(self, point: Point) -> bool:
        """Evaluate the error at a point of the domain in balls; whether that refutes the claim.

        The head sees inputs as they are stored: a half type moves them so far that only numbers of that type will do.
        """
        point = tuple(nearby(x, self.semantics) for x in point)
        inside = all(a <= x <= b for a, x, b in zip(self.stored.lo, point, self.stored.hi))
        inside = inside and (self.region is None or self.region.holds(point))
        longest = max(map(len, self.head.axes), default=self.head.keys)
        if self.graph is None or self.head.kind == "train" or longest > MOST_CELLS or not inside:
            return False
        error = error_at(self.head, self.graph, point)
        if self.where is None or down(error) > self.seen:
            self.seen, self.where = max(down(error), 0.0), point
        return self.sup and bool(error > arb(self.bound))

    def points(self, count: int) -> Iterator[Point]:
        """The witness, listed points, corners, and random points."""
        source, pairs = random.Random(1), list(zip(self.stored.lo, self.stored.hi))
        if self.claim.witness is not None and self.stored.points is None:
            yield self.claim.witness
        if self.stored.points is not None:
            yield from (source.choice(self.stored.points) for _ in range(count))
            return
        yield from product(*pairs) if self.m <= 6 else ()
        drawn = (tuple(a + (b - a) * source.random() for a, b in pairs) for _ in range(100 * count))
        yield from islice(drawn if self.region is None else filter(self.region.holds, drawn), count)

    def obstacle(self) -> str:
        """Why this head may not run as the rounding terms assume, anywhere in its domain."""
        hull = grown(self.ends, [arb(self.stored.fill)] * self.m)
        return obstacle(self.head, hull, self.gaps, self.semantics) if self.head.kind != "train" else ""

    @property
    def seconds(self) -> float:
        """What a search for slopes may take."""
        return min(2.0, clock.left() / 4)

    @property
    def function(self) -> Graph:
        """f, where a proof needs it."""
        if self.graph is None:
            raise TypeError("a black box has no graph")
        return self.graph

    def outside(self, ends: Ends, times: int = 1) -> bool:
        """Whether a box holds no point that storing may have moved there from the region."""
        return self.region is not None and self.region.outside(grown(ends, [times * s for s in self.shift]))

    def moved_by_inputs(self) -> arb:
        """How far f may move when its input is stored in a narrower dtype: along segments that begin in the domain."""
        little, away = 0.001 * self.bound / self.m, partial(self.outside, times=2)

        def one(i: int, by: arb) -> arb:
            enough = little / up(by)
            return by * steepest(self.function, self.ends, i, lambda v: max(enough, 1.01 * v), self.seconds, away)

        total = sum((one(i, s) for i, s in enumerate(self.shift) if s > 0), arb(0))
        if not total < 0.01 * self.bound and self.m > 1:  # all axes at once give less
            every = steepest(self.function, self.ends, None, lambda v: 1.001 * v, self.seconds, away)
            total = min(total, every * length(self.shift), key=up)
        return total if total.is_finite() else self.composed.at(length(self.shift))

    @cached_property
    def composed(self) -> Composed:
        """The modulus of f over the domain and the centers, where it has no Lipschitz constant."""
        axes = self.head.axes or ((),) * self.m
        hull = [(min(a, *axis, b), max(a, *axis, b)) for axis, (a, b) in zip(axes, self.ends)]
        return Composed(self.function, balls(tuple(hull))[0])

    @property
    def divided(self) -> bool:
        """Whether shards share the proof: only a supremum by bisection is as large as its largest part."""
        return self.sup and self.by_boxes in list(attempts(self))

    @cached_property
    def starts(self) -> list[Ends]:
        """The boxes that this shard has to prove the bound on."""
        if self.shard.of == 1 or not self.divided:
            return [self.ends] if self.shard.own(divided=False) else []
        plain = tuple(zip(self.stored.lo, self.stored.hi))
        widths = [
            (a[-1] - a[0]) / (len(a) - 1) if len(a) > 1 else hi - lo for a, (lo, hi) in zip(self.head.axes, plain)
        ]
        return self.shard.cells(plain, self.ends, widths or [hi - lo for lo, hi in plain])

    def by_boxes(self) -> tuple[float, str]:
        """Bisection of the domain: polynomials for grids of constant values, mixtures of cells otherwise."""
        moved, gaps = self.moved_by_inputs(), self.gaps
        sharp = min((up(g.rate * g.least * g.least) for g in gaps if g.count > 1), default=0.0)
        way: SoftGrid | Cells
        constant = self.head.slopes is None
        if gaps and ((constant and (self.sup or sharp < 16)) or (not constant and sharp < SOFT_SLOPES)):
            name, spread, largest = "polynomials", self.spread, self.largest
            reach = [arb(0)] * self.m
            if not constant and self.head.origin is not None:
                away = zip(self.ends, self.head.origin, self.shift)
                reach = [max((abs(arb(x) - o) for x in pair), key=up) + 2 * s for pair, o, s in away]
                largest = Cells(self.head, None, self.ends, self.semantics, arb(0)).largest
                spread = 2 * largest
            rounded = (window_mass(gaps) + mixing(gaps, self.semantics)) * spread + self.sums(largest)
            if is_line(self.head):
                rounded = min(rounded, line_running(self.head, *self.ends[0], self.semantics), key=up)
            extra = (rounded + moved) * self.factor
            target = down(arb(self.bound) - extra)
            slack = min(max(0.2 * (target - self.seen), 1e-4 * target), 0.1 * target) if self.sup else 0.05 * target
            way = SoftGrid(self.head, self.function, self.ends, target, slack / up(self.factor), not self.sup, reach)
        else:
            name, delta = "mixtures of cells", score_error(gaps, self.semantics) if gaps else None
            way = cells = Cells(self.head, self.graph, self.ends, self.semantics, delta)
            left_out = 2 * window_mass(gaps) if gaps else 2 * self.cut(cells.exponent)
            extra = moved + left_out * cells.largest + (self.sums(cells.largest) if gaps else 0)
            extra = extra * self.factor
            target = down(arb(self.bound) - extra)

        def measure(ends: Ends, state: Any) -> Measured:
            """In L_p a point of the box is run where storing moved it."""
            if self.outside(ends):
                return Measured(0.0, 0)
            stays = self.sup or not self.narrow
            return way.measure(ends if stays else grown(ends, self.shift), state)

        options = (clock.deadline, self.claim.norm, self.outputs, self.look)
        found, boxes = search(measure, self.starts, lambda: target, *options)
        return self.bound if found <= target else up(arb(found) + extra), f"{name} on {boxes:,} boxes"

    def sums(self, largest: arb) -> arb:
        return sums(self.head, self.ends, self.gaps, self.semantics, largest)

    def cut(self, exponent: arb) -> arb:
        """The mass of scattered cells that an evaluator may leave out: those that trail by ln N + 45, as it finds them.

        Heads of up to 256 cells are summed whole (docs/format.md).
        """
        if self.head.keys <= LISTED_WHOLE:
            return arb(0)
        return (256 * (self.m + 8) * UNIT["float64"] * exponent - 44.99).exp() if self.unit > 0 else arb(0)

    def piece_rows(self) -> tuple[int, list[arb_mat]] | None:
        """f as sign · max of affine rows (at the middle of the box, slopes); None if it is not of this form."""
        found, middle = affine_pieces(self.function), balls(self.ends)[1]
        if found is None or min(map(len, found)) > 1:
            return None
        sign, many, one = (1, *found) if len(found[1]) == 1 else (-1, found[1], found[0])
        exact = [[arb(fmpq(x.numerator, x.denominator)) for x in (a - b for a, b in zip(row, one[0]))] for row in many]
        return sign, [arb_mat([[sum(map(mul, row[1:], middle), row[0]), *row[1:]]]) for row in exact]

    def by_pieces(self) -> tuple[float, str]:
        """f a maximum of affine pieces (or minus one), values that are the pieces, scores β times them: the soft-maximum lemma.

        With `V = max_j V_j` attained at k: `V − Σ w̃_j V_j ≤ Σ w̃_j (s_k − s_j)/β + 2τ ≤ (W + 2δ)/β + 2τ`, δ what scores are off
        by and τ how far score differences are from β times value differences. Suprema of affine functions are exact.

        Where values are affine in z_K alone, every piece has a pair of keys for each axis of z_Q that it depends on. If the
        scores are S_J + t_c, the weights are a product. The piece at `z_Q = middle + p_c`, averaged over the corners c, is
        the piece at z_Q up to its slope there times `|Σ_c u_c p_c − (z_Q − middle)|`, u = softmax(t): that sum is
        `p sinh(x)/(cosh(x) + C)` with C the other axes' cosh. Given the piece, scores that are off by δ move it by `p δ` at most.
        """
        name, found, reach = (
            "affine pieces and the soft-maximum lemma",
            self.piece_rows(),
            self.claim.proof.get("reach"),
        )
        if found is None:
            return math.inf, name
        (sign, rows), m, keys = found, self.m, self.head.keys
        cells, (_, middle, radius) = Cells(self.head, None, self.ends, self.semantics, None), balls(self.ends)
        values = [sign * arb_mat([[cells.value(j, 0, middle), *cells.slope(j, 0)]]) for j in range(keys)]
        tilted = [[r * (c - x) for r, c, x in zip(cells.rates, center, middle)] for center in cells.centers]
        scores = [arb_mat([[cells.score(j, middle), *tilt]]) for j, tilt in enumerate(tilted)]

        def above(a: arb_mat, b: arb_mat) -> arb:
            """sup (a − b) over the box."""
            return a[0, 0] - b[0, 0] + sum((abs(a[0, i + 1] - b[0, i + 1]) * r for i, r in enumerate(radius)), arb(0))

        def apart(a: arb_mat, b: arb_mat) -> arb:
            return max(above(a, b), above(b, a), key=up)

        axes = list[int]()  # of z_Q, counted from 1
        if reach is not None and keys <= MOST_QUERY_KEYS:
            held, used = ([i for i in range(1, m + 1) if any(row[0, i] != 0 for row in of)] for of in (values, rows))
            axes = [i for i in used if i not in held]
        count, far = 2 * len(axes) or 1, {i: read_hex(reach, "reach") * radius[i - 1] for i in axes}
        if keys % count or not all(x > 0 for x in far.values()):
            return math.inf, name
        tilts = {i: (scores[2 * k][0, i] - scores[2 * k + 1][0, i]) / 2 for k, i in enumerate(axes)}
        pieces, tops, off_value, off_score = list[arb_mat](), list[arb_mat](), arb(0), arb(0)
        for start in range(0, keys, count):
            group = range(start, start + count)
            piece, top = (sum((of[j] for j in group), arb_mat(1, m + 1)) / count for of in (values, scores))
            for k, i in enumerate(axes):
                piece[0, i] = (values[start + 2 * k][0, 0] - values[start + 2 * k + 1][0, 0]) / (2 * far[i])
            for j in group:
                clock.tick()
                at, read = piece * 1, top * 1
                for i in axes:
                    at[0, i] = 0
                if axes:
                    i, side = axes[(j - start) // 2], (-1) ** (j - start)
                    at[0, 0], read[0, i] = at[0, 0] + side * far[i] * piece[0, i], read[0, i] + side * tilts[i]
                off_value = max(off_value, apart(values[j], at), key=up)
                off_score = max(off_score, apart(scores[j], read), key=up)
            pieces.append(piece)
            tops.append(top)
        rises = [
            (p[0, i] - pieces[0][0, i], t[0, i] - tops[0][0, i]) for p, t in zip(pieces, tops) for i in range(1, m + 1)
        ]
        rise, steeper = max(rises, key=lambda pair: abs(float(pair[0].mid())))
        beta = steeper / rise if rise != 0 else arb(1)
        if not beta > 0:
            return math.inf, name
        delta = cells.delta(cells.exponent) + off_score if keys > 1 else arb(0)
        tau = max((apart(p - pieces[0], (t - tops[0]) / beta) for p, t in zip(pieces, tops)), key=up)
        missing = [min((above(a, b) for b in pieces), key=up) for a in rows]
        missing += [min((above(a, b) for b in rows), key=up) for a in pieces]

        def along(by: dict[int, arb]) -> arb:
            """How far the pieces move by such steps of z_Q."""
            return max((sum((abs(p[0, i]) * x for i, x in by.items()), arb(0)) for p in pieces), key=up)

        soft = (lambert(len(pieces)) + 2 * delta) / beta + 2 * tau + max(arb(0), *missing, key=up)
        soft += along({i: misread(i, far[i], tilts, radius) for i in axes}) + along(far) * delta + off_value
        away = along({i: far[i] + radius[i - 1] for i in axes})
        rounded = 1.01 * (m + 3) * self.unit * cells.largest + cells.lost + (m + 1) * self.tiniest
        size = abs(self.function.evaluate(middle)[0]) + max(
            (above(a, arb_mat([[a[0, 0]] + [0] * m])) for a in rows), key=up
        )
        rounded += 1.01 * (2 * keys + 4) * self.unit * (size + 2 * soft + away + rounded)
        trail = self.cut(cells.exponent) * ((math.log(keys) + 45) / beta + 3 * soft + 2 * away)
        return up(soft + rounded + trail + self.moved_by_inputs()), name

    def by_two_keys(self) -> tuple[float, str]:
        """Two keys are `A + B tanh(φ)`, and f is of this form, or a polynomial of degree two."""
        name, form = "two keys in closed form", two_key_form(self.function)
        if form is None:
            return math.inf, name
        before, ctx.prec = ctx.prec, max(ctx.prec, 192)  # large values that cancel
        try:
            found = two_key_bound(form, Cells(self.head, None, self.ends, self.semantics, None), self.ends)
        finally:
            ctx.prec = before
        moved = self.moved_by_inputs() if form.turn is None else arb(0)
        return up((found + moved) * self.factor), name

    def assume(self, statement: str) -> None:
        """Rest on a statement that the certificate lists as the caller's."""
        need(self.claim.kind == "proved_given", f"a claim of kind proved must not rest on an assumption: {statement}")
        need((statement, "caller") in self.claim.assumptions, f"used, but not listed as assumed: {statement}")
        self.given += [] if statement in self.given else [statement]

    @property
    def vouched(self) -> bool:
        return any(who == "caller" and text.startswith("|f(x) − f(y)|") for text, who in self.claim.assumptions)

    @cached_property
    def declared(self) -> Modulus | Expression:
        """The modulus of the certificate, if its claim says that this is assumed."""
        known, per_axis = self.claim.known.get("modulus"), self.claim.known.get("per_axis")
        if known is not None and "expression" in known:
            stated = Expression.read(known["expression"])
            if stated is None:
                return Modulus(INF)
            self.assume(f"|f(x) − f(y)|_∞ ≤ ω(|x − y|₂), ω(t) = {stated.text}")
            return stated
        found = Modulus(INF)
        if known is not None:
            constant, power = read_hex(known["constant"], "modulus"), read_hex(known["exponent"], "exponent")
            need(constant >= 0 and 0 < power <= 1, "known: a modulus C·t^α needs C ≥ 0 and 0 < α ≤ 1")
            found = Modulus(arb(constant), power)
            self.assume(f"|f(x) − f(y)|_∞ ≤ {constant:.6g}·|x − y|₂" + (f"^{power:g}" if power != 1 else ""))
        if per_axis is not None:
            constants = [read_hex(x, "per_axis") for x in per_axis]
            need(len(constants) == self.m and min(constants) >= 0, "known: one constant ≥ 0 per axis")
            found.axes = list(map(arb, constants))
            self.assume("|f(x) − f(y)|_∞ ≤ " + " + ".join(f"{c:.6g}·|x{i} − y{i}|" for i, c in enumerate(constants)))
        return found

    def modulus(self, hull: Ends, enough: float) -> Modulus | Composed | Expression:
        """How fast f moves: from its graph, or, if that does not do and the caller vouches for it, as declared."""

        def goal(attained: float) -> float:
            return (
                math.inf if attained > enough > 0 else max(enough, attained * (1 + 1e-13))
            )  # hopeless, or good enough

        own = Modulus(steepest(self.graph, hull, None, goal, self.seconds)) if self.graph is not None else None
        if own is not None and not self.vouched and not own.constant.is_finite():
            return self.composed  # steep somewhere
        return own if own is not None and (own.constant <= enough or not self.vouched) else self.declared

    def by_moments(self) -> tuple[float, str]:
        """`V_j = f(v_j)` and a modulus of f, its own or a declared one, on a sharp grid: boxes are needed only for slopes."""
        gaps, average, name = self.gaps, not self.sup, "moments of the softmax and a modulus of f"
        hull = tuple((min(a, axis[0]), max(b, axis[-1])) for axis, (a, b) in zip(self.head.axes, self.ends))
        delta, shift = score_error(gaps, self.semantics), [arb(0) if average else s for s in self.shift]
        if average:  # z is averaged over all reals, the head sees it rounded
            delta += sum((2 * g.rate * s * (g.window + s) for g, s in zip(gaps, self.shift)), arb(0))
        wider, first = (2 * delta).exp(), arb(self.claim.norm if average else 1)
        second = max(first, arb(2), key=up)
        added = window_mass(gaps) * self.spread + self.sums(self.largest) + self.value_error()
        distance = sum((g.reach(second, average) ** (2 / second) for g in gaps), arb(0)).sqrt()
        left = arb(self.bound) / self.factor - added
        if not (distance.is_finite() and left > 0):
            return math.inf, name
        known = self.modulus(hull, down(left / (distance * wider + length(shift))))
        found = known.at(distance) * wider + known.at(length(shift))
        if not found <= left and (known.axes is not None or self.graph is not None):
            firsts = [g.reach(first, average) ** (1 / first) for g in gaps]

            def slope(i: int) -> arb:
                return steepest(self.function, hull, i, lambda attained: attained * (1 + 1e-13), self.seconds / 2)

            axes = known.axes or [slope(i) for i in range(self.m)]
            found = min(found, sum((v * (f * wider + s) for v, f, s in zip(axes, firsts, shift)), arb(0)), key=up)
        return up((found + added) * self.factor + self.jumps()), name

    def by_tangents(self) -> tuple[float, str]:
        """Cells hold tangents of a black box, slopes by differences over t gaps; the caller vouches for `|vᵀ∇²f v| ≤ Σ M_i v_i²`.

        `|f − V_j| ≤ Σ_i ½M_i(z_i − v_{j,i})² + (½M_i t g_i + noise/(t g_i))|z_i − v_{j,i}| + noise`, noise = 2⁻⁵¹·scale, in
        the mean. One M for all axes is `|∇²f|₂ ≤ M`. ∇f moves by at most `√(max M · Σ M_i d_i²)` between points d_i apart.
        """
        stated, delta, m = self.claim.known["curvature"], score_error(self.gaps, self.semantics), self.m
        bends = [read_hex(x, "curvature") for x in (stated if isinstance(stated, list) else [stated] * m)]
        known = [read_hex(self.claim.known.get(k), k) for k in ("differences", "scale")]
        need(min(known + bends) >= 0 and known[0] > 0, "known: curvature, differences and scale must be positive")
        need(len(bends) == m, "known: curvature must be one number, or one per axis")
        form = " + ".join(f"{c:.6g}·v{i}²" for i, c in enumerate(bends))
        each = f"|vᵀ∇²f v| ≤ {form} for every v" if isinstance(stated, list) else f"|∇²f|₂ ≤ {bends[0]:.6g}"
        self.assume(f"{each}, for each output")
        self.given.append(f"values and slopes are those of a black box of size {known[1]:.6g}, which cannot be checked")
        step, scale = map(arb, known)
        stated = self.claim.known.get("across")  # slopes of f along axes where cells hold none
        across = [arb(0)] * self.m if stated is None else [arb(read_hex(x, "across")) for x in stated]
        need(len(across) == self.m and all(x >= 0 for x in across), "known: across must have one number ≥ 0 per axis")
        gaps, noise, head = self.gaps, arb(2) ** -51 * scale, self.head
        sharp = all(g.count == 1 or g.rate * g.least * g.least > 1000 for g in gaps)
        firsts, seconds = [
            [g.sharp_reach(p) if sharp else g.reach(arb(p), average=False) for g in gaps] for p in (1, 2)
        ]
        wide = [g.most if g.count > 1 else arb(b) - arb(a) for g, (a, b) in zip(gaps, self.ends)]
        off = sum((arb(b) / 2 * s for b, s in zip(bends, seconds)), noise)
        off += sum((f * (b * step * g / 2 + noise / (step * g)) for b, f, g in zip(bends, firsts, wide)), arb(0))
        off += sum((s * f for s, f in zip(across, firsts)), arb(0))
        largest = Cells(head, None, self.ends, self.semantics, delta).largest
        added = 2 * window_mass(gaps) * largest + self.sums(largest) + 4 * STORED[self.semantics][0] * (1 + m) * scale
        slopes = head.slopes if head.slopes is not None else ()
        rows = [slopes[k : k + m] for k in range(0, len(slopes), m)]
        steep = max((length([arb(x) for x in row]) for row in rows), key=up)
        turned = [arb(b).sqrt() * (g.radius + w) for b, g, w in zip(bends, gaps, wide)]
        steep += length(across) + arb(max(bends)).sqrt() * (1 + step) * length(turned)
        added += steep * length(self.shift)
        return up((off * (2 * delta).exp() + added) * self.factor), "tangents and declared second derivatives"

    def jumps(self) -> arb:
        """What declared jumps add in L_p: points whose relevant centers may lie across one, and the little mass beyond those."""
        declared, reaches, beyond = self.claim.known.get("jumps"), list[arb](), arb(0)
        if declared is None:
            return arb(0)
        height, tube = read_hex(declared["height"], "height"), [read_hex(t, "tube") for t in declared["tube"]]
        need(not self.sup and min([height, *tube]) >= 0, "jumps are for L_p norms")
        text = " + ".join(f"{t:g}·r" + ("" if k == 1 else f"^{k}") for k, t in enumerate(tube, 1))
        self.assume(
            f"f moves by at most {height:g}, and obeys its modulus between points whose segment misses a set "
            f"whose r-neighbourhood has measure ≤ {text} for every r"
        )
        for g, s in zip(self.gaps, self.shift):
            relevant = (g.radius * g.radius + 48 / g.rate).sqrt() if g.count > 1 else g.window
            beyond += 2 * arb(-24).exp() / (1 - (-g.rate * g.least * g.least / 2).exp()) if relevant < g.window else 0
            reaches.append(min(relevant, g.window, key=up) + s)
        near = sum((arb(t) * length(reaches) ** k for k, t in enumerate(tube, 1)), arb(0))
        near = min(near, self.volume, key=up) * self.outputs
        added: arb = arb(height) * (near ** (1 / arb(self.claim.norm)) + beyond * self.factor)
        return added

    def by_points(self) -> tuple[float, str]:
        """A domain that consists of its listed points: the error at each, in balls as wide as storing the point may move it."""
        worst, points = arb(0), self.stored.points or ()
        for point in points:
            if self.look(point):
                return math.inf, "points one by one"
            at = [arb(x) + s * arb(0, 1) for x, s in zip(point, self.shift)]
            worst = max(worst, error_at(self.head, self.function, point, at), key=up)
        radius = max((nearest(p, self.head.centers) for p in points), key=up) + length(self.shift)
        return up(worst + self.delta(radius) * self.spread + self.cover_sums(radius)), f"all {len(points):,} points"

    def delta(self, radius: arb) -> arb:
        """How far a score of a cell near a point may be off, if that is within the radius of a center."""
        trail = self.head.rates[0] * radius * radius / 2 + math.log(self.head.keys) + 45
        rounded: arb = 1.01 * self.unit * ((self.m + 6) * trail + 17)
        return rounded + lost_in_score(arb(self.head.rates[0]), self.m, self.semantics)

    def cover_sums(self, radius: arb) -> arb:
        """Cells left out, and sums: adding what is next to nothing rounds by no more than that, so only near cells count."""
        centers, count = self.head.centers, self.head.keys
        limit = (2 * up(radius) + math.sqrt(2 * (math.log(count) + 40) / self.head.rates[0])) * (1 + 1e-9)
        near = 0
        for a in centers:
            clock.tick()
            near = max(near, sum(math.dist(a, b) <= limit for b in centers))
        left = 2 * arb(-44.9).exp() * self.spread if self.unit > 0 else arb(0)
        left += 4 * count * (SMALLEST[self.semantics] * self.largest + self.tiniest)
        rounded: arb = (1.01 * (2 * near + self.m + 16) + 5 * arb(-39.9).exp()) * self.unit * self.largest
        return left + rounded

    def by_cover(self) -> tuple[float, str]:
        """A domain of listed points, each within ρ of a center, and what is said to lie around them: the soft-maximum lemma."""
        points, fill, centers, shift = self.stored.points or (), self.stored.fill, self.head.centers, length(self.shift)
        covered = self.covered() if self.region is not None else max((nearest(p, centers) for p in points), key=up)
        radius = covered + fill + shift
        distance = (radius * radius + 2 * lambert(self.head.keys) / self.head.rates[0]).sqrt()
        wider, added = (2 * self.delta(radius)).exp(), self.cover_sums(radius) + self.value_error()
        hull = grown(self.ends, [arb(fill)] * self.m)
        known = self.modulus(hull, down((arb(self.bound) - added) / (distance * wider + shift)))
        if self.graph is None and points:  # f was asked at listed points, which storing may have moved
            added += known.at(max((nearest(c, points) for c in centers), key=up))
        if fill > 0:
            self.assume(f"every point of the domain is within {fill:g} of a listed point")
        found = (known.at(distance) * wider + known.at(shift) + added) * self.factor
        return up(found), "a cover and the soft-maximum lemma"

    def covered(self) -> arb:
        """The distance within which every point of the region has a center: boxes are halved until the radius claimed will do."""
        centers = self.head.centers

        def measure(ends: Ends, _: object) -> Measured:
            axis = max(range(self.m), key=lambda i: ends[i][1] - ends[i][0])
            if self.region is None or self.region.outside(ends):
                return Measured(0.0, axis)
            clock.tick()
            middle = [a / 2 + b / 2 for a, b in ends]
            best = min(centers, key=lambda c: math.dist(middle, c))
            reach = [max(abs(arb(a) - c), abs(arb(b) - c), key=up) for (a, b), c in zip(ends, best)]
            return Measured(up(length(reach)), axis)

        aim = read_hex(self.claim.proof.get("radius", (0.0).hex()), "radius") * (1 + 1e-12)
        whole = tuple(zip(self.stored.lo, self.stored.hi))
        return arb(search(measure, [whole], lambda: aim, clock.deadline)[0])

    def value_error(self) -> arb:
        """`max |V_j − f(v_j)|` over all cells; for a black box only the error of storing its values."""
        if self.graph is None:
            self.given.append("the values stored at the centers are those of f (a black box: they cannot be checked)")
            return self.largest * 2 * STORED[self.semantics][0] if self.narrow else arb(0)
        worst, cells = arb(0), product(*self.head.axes) if self.head.axes else self.head.centers
        for j, center in enumerate(cells):
            for o, value in enumerate(self.graph.evaluate([arb(x) for x in center])):
                worst = max(worst, (value - self.head.values[o][j]).abs_upper(), key=up)
        return worst

    def contradiction(self) -> str:
        """Stored values that move faster than the declared modulus allows: of cells in a row, and of random pairs."""
        if not (self.graph is None or self.vouched) or "modulus" not in self.claim.known or "jumps" in self.claim.known:
            return ""
        source, last = random.Random(2), self.head.keys - 1
        pairs = [(j, j + 1) for j in range(min(last, 20_000))] + [
            (source.randint(0, last), source.randint(0, last)) for _ in range(2000)
        ]
        for j, k in pairs:
            clock.tick()
            first, second = center_of(self.head, j), center_of(self.head, k)
            allowed = self.declared.at(length([arb(a) - arb(b) for a, b in zip(first, second)]))
            for v in self.head.values:
                moved = abs(arb(v[j]) - arb(v[k]))
                if moved > allowed * (1 + 1e-9) + 8 * UNIT[self.head.dtype] * self.largest:
                    return f"f moves by {up(moved):.6g} from {first} to {second}, declared: at most {up(allowed):.6g}"
        return ""


def misread(i: int, far: arb, tilts: dict[int, arb], radius: list[arb]) -> arb:
    """`sup |p sinh(x)/(cosh(x) + C) − z|`, x = tilt·z, |z| ≤ r: on short pieces, where `sinh(x)/x` and cosh grow with |x|."""
    tilt, pieces, least = tilts[i], 400, arb(len(tilts) - 1)
    most = sum(((tilts[k] * radius[k - 1]).cosh() for k in tilts if k != i), arb(0))
    worst = arb(0) if tilt > 0 else INF  # keys that read backwards
    for k in range(pieces):
        low, high = radius[i - 1] * k / pieces, radius[i - 1] * (k + 1) / pieces
        bottom = tilt if k == 0 else (tilt * low).sinh() / low
        top = (tilt * high).sinh() / high
        above = far * top / ((tilt * low).cosh() + least) - 1
        below = 1 - far * bottom / ((tilt * high).cosh() + most)
        worst = max(worst, above * high, below * high, key=up)
    return worst


def center_of(head: Head, cell: int) -> Point:
    if not head.axes:
        return head.centers[cell]
    found = []
    for axis in reversed(head.axes):
        cell, k = divmod(cell, len(axis))
        found.append(axis[k])
    return tuple(reversed(found))


def nearest(point: Point, others: Sequence[Point]) -> arb:
    clock.tick()
    other = min(others, key=lambda c: math.dist(point, c))
    return length([arb(a) - arb(b) for a, b in zip(point, other)])


def mean_of(values: Sequence[float], weights: Sequence[list[arb]]) -> arb:
    """`Σ_j Π_i w_i[j_i]·V_j` over a product grid, in blocks of the first axis."""
    inner = math.prod(map(len, weights[1:]))
    step, total, rest = max(1, AT_ONCE // inner), arb(0), [arb_mat([row]) for row in weights[1:]]
    for k in range(0, len(weights[0]), step):
        block = [arb(x) for x in values[k * inner : (k + step) * inner]]
        total += transform(block, [arb_mat([weights[0][k : k + step]]), *rest])[0]
    return total


def error_at(head: Head, graph: Graph, point: Point, seen_at: list[arb] | None = None) -> arb:
    """A ball that holds the largest |f − net| over the outputs at a point, for the exact head, which may see it elsewhere."""
    at = [arb(x) for x in point]
    errors: list[arb] = [abs(a - b) for a, b in zip(graph.evaluate(at), net_at(head, seen_at or at))]
    return max(errors, key=lambda e: float(e.mid()) if e.is_finite() else math.inf)


def net_at(head: Head, at: Sequence[arb]) -> list[arb]:
    """The outputs of the exact head at a point in balls."""
    m, out, nets = len(at), len(head.values), list[arb]()
    if head.axes:
        rows = []
        for axis, rate, x in zip(head.axes, head.rates, at):
            row = [(-rate * (x - c) * (x - c) / 2).exp() for c in axis]
            total = sum(row, arb(0))
            rows.append([w / total for w in row])
        for o, v in enumerate(head.values):
            nets.append(mean_of(v, rows))
            if head.slopes is not None and head.origin is not None:
                means = [mean_of(head.slopes[o * m + i :: out * m], rows) for i in range(m)]
                nets[-1] += sum((s * (x - c) for s, x, c in zip(means, at, head.origin)), arb(0))
        return nets
    total, nets = arb(0), [arb(0)] * out
    for j, center in enumerate(head.centers):
        clock.tick()
        steps = [x - c for x, c in zip(at, center)]
        power = arb(head.powers[j] if head.powers is not None else 0)
        weight = ((power - sum((d * d for d in steps), arb(0))) * head.rates[0] / 2).exp()
        total += weight
        for o, v in enumerate(head.values):
            start = (j * out + o) * m
            slopes = head.slopes[start : start + m] if head.slopes is not None else ()
            nets[o] += weight * sum((s * d for s, d in zip(slopes, steps)), arb(v[j]))
    return [net / total for net in nets]


def is_divided(stored: Stored) -> bool:
    """Whether shards of a check share its proof; if not, the first one has all of it."""
    claim = stored.claim
    return claim.bound is not None and math.isinf(claim.norm) and Checker(stored, claim.bound).divided


def check(stored: Stored, *, sampled: int = 0, shard: Shard = WHOLE) -> Verdict:
    """The verdict on a claim, in the time that the clock allows.

    Verified only if a bound recomputed here, rounding included, is at most the bound claimed: everywhere, or on the boxes of the
    shard. Whatever is not bisection is done by every shard; what rests on nothing else is left to the first one.
    """
    claim, head = stored.claim, stored.head
    if claim.bound is None:
        said = f"the claim is an estimate ({claim.estimate:.6g} seen)"
        return Verdict(UNKNOWN, f"{said}: nothing is proved, so nothing can be verified")
    tall = max(max(map(abs, v)) for v in head.values)
    ctx.prec = 64 if tall < 1e8 * claim.bound else min(256, 72 + math.ceil(math.log2(tall / max(claim.bound, 1e-300))))
    checker = Checker(stored, claim.bound, shard)
    verdict, contradiction, unfit = Verdict(UNKNOWN, given=checker.given), "", ""
    try:
        refuted = any(checker.look(point) for point in checker.points(sampled or 64))
        contradiction = "" if refuted else checker.contradiction()
        unfit = "" if refuted or contradiction else checker.obstacle()
        stopped = refuted or contradiction or unfit or sampled or checker.tail_missing
        if not (stopped or checker.starts):
            verdict.proved, verdict.method = 0.0, LEFT
        for attempt in attempts(checker) if checker.starts and not stopped else ():
            found, how = attempt()
            if checker.bound != claim.bound:  # of the clipped function
                found = claim.bound if found <= checker.bound else up(arb(found) + claim.bound - checker.bound)
            if found < verdict.proved:
                verdict.proved, verdict.method = found, how
            if found <= claim.bound or (checker.sup and checker.seen > claim.bound):
                break
    except TimeOver:
        pass  # what was proved until then stands
    verdict.seen, verdict.where = checker.seen, checker.where
    if contradiction or (checker.sup and checker.seen > claim.bound):
        worse = f"the error at this point is at least {checker.seen:.17g}, more than the bound {claim.bound:.17g}"
        verdict.outcome, verdict.reason = REFUTED, contradiction or worse
    elif checker.tail_missing:
        verdict.reason = checker.tail_missing
    elif unfit:
        verdict.reason = f"the head does not run as its claim assumes: {unfit}"
    elif verdict.proved <= claim.bound:
        verdict.outcome = VERIFIED
    else:
        late = ", and the time budget ran out" if clock.over() else ""
        spot = "spot check: no violation at the points tried; nothing is proved"
        verdict.reason = spot if sampled else f"the best bound that could be proved is {verdict.proved:.6g}{late}"
    return verdict


def attempts(checker: Checker) -> Iterator[Callable[[], tuple[float, str]]]:
    """The proofs that fit this head, cheap ones first.

    What the caller declares of a function on a region holds between points of the region: it serves a cover by centers in it.
    """
    head, points, region, vouched = checker.head, checker.stored.points, checker.region, checker.vouched
    known, few, constant = checker.graph is not None, head.keys <= MOST_CELLS, head.slopes is None
    plain = head.kind == "scattered" and constant and head.powers is None
    if points is not None:
        if plain and checker.sup and known and checker.stored.fill == 0 and len(points) * head.keys <= MOST_PAIRS:
            yield checker.by_points
        if plain and checker.sup:
            yield checker.by_cover
        return
    if region is not None:
        if plain and vouched and all(map(region.holds, head.centers)):
            yield checker.by_cover
        if vouched or not known:
            return
    sharp = all(g.rate * g.most * g.most > 3 for g in checker.gaps if g.count > 1)
    if head.kind == "grid" and constant and ((sharp and checker.sup) or not known):
        yield checker.by_moments
    if head.kind == "grid" and not constant and region is None and "curvature" in checker.claim.known and few:
        yield checker.by_tangents
    if head.kind == "scattered" and checker.outputs == 1 and checker.sup and known and few:
        yield checker.by_pieces
    if head.kind == "scattered" and head.keys == 2 and known:
        yield checker.by_two_keys
    declared_tail, few = "tail" in checker.claim.known and not vouched, few and checker.m <= MOST_AXES
    if known and head.kind != "train" and (checker.claim.kind == "proved" or declared_tail) and few:
        yield checker.by_boxes
