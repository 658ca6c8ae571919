"""Gradient descent in context: T attention layers, each a step of descent up to τ, and what T steps make of their errors.

The exact step is `w − η(mean r(w·x_i, y_i)x_i + λw)`, r the slope of the loss. A layer computes
`S w − c Σ sinh(ε r̃_i)x_i / Σ cosh(ε r̃_i)`: a softmax over scores ±ε r̃_i of the examples and their mirror images. r̃ is r for
the slope s − y, and otherwise a table over (s, y) or over s − y: an attention of its own. Derived in docs/checker.md.
"""

from __future__ import annotations

import math
import random
import time
from array import array
from collections.abc import Callable, Iterator
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from flint import arb, arb_series, ctx

from partita_check.bounds import LARGEST, SMALLEST, TINIEST, UNIT, length
from partita_check.clock import TimeOver, clock
from partita_check.graph import Graph, Malformed, need, parse, read_graph, read_hex
from partita_check.polynomials import INF, Ends, balls, down, up
from partita_check.reading import (
    CERTIFICATE,
    Claim,
    Head,
    Stored,
    Tensor,
    digest_of,
    read_claim,
    read_sealed,
    sha256_of,
)
from partita_check.search import Measured, search
from partita_check.shards import WHOLE, Shard
from partita_check.verdict import LEFT, REFUTED, UNKNOWN, VERIFIED, Verdict, check

__all__ = ["DESCRIPTION", "FILES", "Descent", "about", "check_descent", "read_descent"]

DESCRIPTION, TENSORS = "descent.json", "descent.safetensors"
FILES = (DESCRIPTION, TENSORS, CERTIFICATE)
MOST_STEPS, MOST_EXAMPLES, MOST_FEATURES = 10**9, 10**12, 64
BITS, MOST_BITS = 128, 2048
PROMPTS, EXAMPLES, BRANCHES = 64, 4, 8  # prompts that are tried, the most examples in one, branches of a slope in a box
Point = list[arb]


class Layer(NamedTuple):
    """The tensors: w_0 as stored, ε, c, S, and the keys of the table: score_k = slope·s + label·y + offset. None if r̃ is s − y."""

    start: list[float]
    epsilon: float
    read: float
    shrink: float
    slopes: list[float]
    labels: list[float]
    offsets: list[float]
    values: list[float]
    direct: float


class Descent(NamedTuple):
    """The claim: T steps from `initial`, prompts of so many examples, boxes of x, y and w. graph: r, of (s, y) or of s − y."""

    claim: Claim
    bound: float
    graph: Graph
    names: tuple[str, ...]
    label: str
    x: Ends
    y: tuple[float, float]
    w: Ends
    steps: int
    examples: int
    step_size: float
    ridge: float
    initial: list[float]
    layer: Layer


def read_descent(folder: Path) -> Descent:
    """All that is stored, every hash, shape and cross reference checked; `Malformed` says what does not fit."""
    try:
        return _read(folder)
    except (LookupError, TypeError, AttributeError, ValueError, OverflowError, MemoryError, RecursionError) as error:
        raise Malformed(f"{folder} does not contain a valid descent: {type(error).__name__}: {error}") from None


def _read(folder: Path) -> Descent:
    described, certificate, tensors = read_sealed(folder, DESCRIPTION, "partita-descent", TENSORS)
    function, claim, dtype = certificate["function"], read_claim(certificate, 0), tensors["initial"].dtype
    need(function["type"] == "gradient descent" and math.isinf(claim.norm), "the claim is not about descent in context")
    need(claim.semantics in (dtype, "real"), f"semantics is {claim.semantics}, but the network is {dtype}")
    graph, names = read_graph(function["graph"]), tuple(function["variables"])
    need(function["sha256"] == sha256_of(function["graph"]), "the hash of the slope does not match")
    need(
        names in (("r",), ("s", "y")) and graph.inputs == len(names) and graph.shape == (), "invalid slope of the loss"
    )
    x, y, w = map(_ends, certificate["domain"]["arguments"])
    steps, examples, d = function["steps"], function["examples"], len(x)
    counts = ((steps, MOST_STEPS), (examples, MOST_EXAMPLES), (d, MOST_FEATURES))
    need(all(type(k) is int and 1 <= k <= most for k, most in counts), "invalid steps, examples or features")
    step_size, ridge = (read_hex(function[name], name) for name in ("step_size", "ridge"))
    initial = [read_hex(value, "initial") for value in function["initial"]]
    need(len(w) == len(initial) == d and len(y) == 1, "the boxes and w_0 do not fit each other")
    need(step_size > 0 and ridge >= 0 and claim.bound is not None, "invalid step_size, ridge or bound")
    layer, bound = _layer(tensors, d, dtype), claim.bound or 0.0
    model = {"type": "descent", "steps": steps, "dimension": d, "keys": len(layer.values), "dtype": dtype}
    need(described["model"] == model, f"{DESCRIPTION} and the other files describe different networks")
    need(certificate["model"] == {**model, "sha256": digest_of(tensors)}, "the certificate is about another network")
    about_f = (claim, bound, graph, names, str(function["text"]))
    return Descent(*about_f, x, y[0], w, steps, examples, step_size, ridge, initial, layer)


def _layer(tensors: dict[str, Tensor], d: int, dtype: str) -> Layer:
    """The numbers of a step, if the tensors are made of them as docs/format.md says, and of nothing else."""
    found = {name.removeprefix("layer."): (t.shape, list(t.numbers)) for name, t in tensors.items()}
    start, values = found["initial"][1], found["table"][1] if "table" in found else []
    epsilon, read, shrink = found["query"][1][0], -found["read"][1][0], found["shrink"][1][0]
    ones, minus = _diagonal(d + 1, 2 * d + 2, 1.0), _diagonal(d + 1, 2 * d + 2, -1.0, d + 1)
    keys, slopes, labels, offsets, direct = len(values), list[float](), list[float](), list[float](), 0.0
    form: dict[str, tuple[tuple[int, ...], list[float]]] = {
        "initial": ((d,), start),
        "mirror": ((d + 1, 2 * d + 2), [a + b for a, b in zip(ones, minus)]),
        "read": ((d + 1, d), _diagonal(d + 1, d, -read)),
        "shrink": ((d, d), _diagonal(d, d, shrink)),
        "query": ((d, d + 1), _diagonal(d, d + 1, epsilon)),
        "query_offset": ((d + 1,), [0.0] * d + [-epsilon]),
    }
    if keys:
        slopes, offsets = found["key_slopes"][1], found["key_offsets"][1]
        labels, direct = found["key_labels"][1][d * keys :], found["direct"][1][-1]
        form |= {
            "key_slopes": ((1, keys), slopes),
            "key_labels": ((d + 1, keys), [0.0] * (d * keys) + labels),
            "key_offsets": ((keys,), offsets),
            "table": ((keys, 1), values),
            "direct": ((d + 1, 1), [0.0] * d + [direct]),
            "embed": ((d + 1, d), _diagonal(d + 1, d, 1.0)),
            "signs": ((1, 2), [epsilon, -epsilon]),
        }
    wrong = ", ".join(name for name in {**form, **found} if form.get(name) != found.get(name))
    need(not wrong, f"{TENSORS}: not of the form of a step of descent: {wrong}")
    need(all(t.dtype == dtype for t in tensors.values()), f"{TENSORS}: the tensors differ in dtype")
    need(epsilon > 0 and read > 0, f"{TENSORS}: query and read have the wrong sign")
    return Layer(start, epsilon, read, shrink, slopes, labels, offsets, values, direct)


def _ends(box: Any) -> Ends:
    found = tuple((read_hex(a, "lo"), read_hex(b, "hi")) for a, b in zip(box["lo"], box["hi"], strict=True))
    need(
        box["type"] == "box" and box["shape"] == [len(found)] and all(a < b for a, b in found), "domain: expected boxes"
    )
    return found


def _diagonal(rows: int, columns: int, value: float, shift: int = 0) -> list[float]:
    return [value if i + shift == j else 0.0 for i in range(rows) for j in range(columns)]


def about(stored: Descent) -> dict[str, Any]:
    """The claim in words, for the report."""
    claim, keys, start = stored.claim, len(stored.layer.values), ", ".join(f"{v:.9g}" for v in stored.initial)
    boxes = [(f"x{i}", pair) for i, pair in enumerate(stored.x)] + [("y", stored.y)]
    boxes += [(f"w{i}", pair) for i, pair in enumerate(stored.w)]
    slope = stored.graph.infix(stored.names) + (", r = s − y" if len(stored.names) == 1 else "")
    return {
        "function": [
            f"{stored.steps:,} steps of gradient descent from w = {start}, step size {stored.step_size:.9g}, ridge "
            f"{stored.ridge:.9g}",
            f"slope of the loss at s = w·x: {slope}",
        ],
        "domain": [
            f"prompts of at most {stored.examples:,} examples whose iterates, exact and attained, stay in the box of w",
            ", ".join(f"{name} in [{a:.9g}, {b:.9g}]" for name, (a, b) in boxes),
        ],
        "keys": f"{keys:,} in a table of the slope"
        if keys
        else "the examples; the slope is a product of query and key",
        "claim": f"{claim.kind}: |w_T − exact|₂ ≤ {stored.bound:.9g}, in {claim.semantics} arithmetic",
        "platform": f"assumes IEEE 754 {claim.semantics} and exp within 8 units in the last place",
    }


class Bounds:
    """One check: sizes over the boxes, the error of a step, and its growth over the steps."""

    until = math.inf  # when an attack must end

    def __init__(self, stored: Descent) -> None:
        self.stored, semantics = stored, stored.claim.semantics
        self.unit, self.smallest, self.tiniest = UNIT[semantics], SMALLEST[semantics], TINIEST[semantics]
        self.most = LARGEST[semantics]
        reach_x, reach_w = ([arb(max(map(abs, pair))) for pair in of] for of in (stored.x, stored.w))
        self.x, self.w, self.y = length(reach_x), length(reach_w), arb(max(map(abs, stored.y)))
        self.line = sum((a * b for a, b in zip(reach_x, reach_w)), arb(0))  # of |x_1 w_1| + …
        products = [[arb(a) * b for a in p for b in q] for p, q in zip(stored.x, stored.w)]
        low, high = (sum((pick(row) for row in products), arb(0)) for pick in (min, max))
        a, b = stored.y
        pairs = ((low, high), (arb(a), arb(b))) if len(stored.names) == 2 else ((low - b, high - a),)
        self.ends: Ends = tuple((down(lo), up(hi)) for lo, hi in pairs)  # what the slope of the loss is asked for

    def gamma(self, count: int) -> arb:
        """`ku/(1 − ku)`: what k roundings in any order make of a relative error."""
        return count * self.unit / (1 - count * self.unit) if count * self.unit < 1 else INF

    def largest(self, sizes: Callable[[Point], arb], share: float, close: float = 1e-300) -> arb:
        """A bound of the supremum of `sizes` ≥ 0 over the ranges of s and y: within a share, or so close, if time allows."""
        attained = 0.0

        def measure(part: Ends, _: object) -> Measured:
            nonlocal attained
            box, middle, _ = balls(part)
            attained = max(attained, down(sizes(middle)))
            thin = [up(sizes([*box[:i], middle[i], *box[i + 1 :]])) if len(box) > 1 else 0.0 for i in range(len(box))]
            return Measured(up(sizes(box)), min(range(len(box)), key=thin.__getitem__))

        until = time.monotonic() + min(10.0, clock.left() / 8)
        return arb(search(measure, [self.ends], lambda: attained * (1 + share) + close, until)[0])

    @cached_property
    def slope(self) -> arb:
        """sup |r|: on a box by its enclosure, or by its value in the middle and the slopes along every axis."""
        graph = self.stored.graph

        def size(box: Point) -> arb:
            moved = abs(graph.evaluate([ball.mid() for ball in box])[0])
            for i, ball in enumerate(box):
                value = graph.evaluate([*box[:i], arb_series([ball, 1], 2), *box[i + 1 :]])[0]
                moved += abs(value[1] if isinstance(value, arb_series) else value * 0) * ball.rad()
            return arb(min(up(abs(graph.evaluate(box)[0])), up(moved)))

        return self.largest(size, 1e-3)

    @cached_property
    def contraction(self) -> arb:
        """ρ: `sup |1 − η(λ + κ)|`, κ between the ends of ∂r/∂s, times eigenvalues of mean x xᵀ: from 0 to max|x|²."""
        graph = self.stored.graph

        def curvature(box: Point) -> list[arb]:
            """∂r/∂s on every branch of r that may be followed in the box."""
            branches = graph.branches(box, BRANCHES)
            point = [arb_series([box[0], 1], 2), *box[1:]]
            found = [graph.evaluate(point, choices)[0] for choices in (branches if branches is not None else [None])]
            return [v[1] if isinstance(v, arb_series) else v * 0 for v in found]

        def above(sign: int, shift: arb) -> arb:
            """`sup sign·∂r/∂s`, which is at least −shift."""
            return self.largest(lambda box: worst(*(shift + sign * k for k in curvature(box))), 0.0, close) - shift

        size = self.largest(lambda box: worst(*map(abs, curvature(box))), 0.5)
        close = 0.03 / self.stored.steps * up(size)
        high, low = above(1, size), above(-1, size)
        eta, ridge, square = arb(self.stored.step_size), arb(self.stored.ridge), self.x * self.x
        ends = [1 - eta * (ridge + k * square) for k in (-worst(arb(0), low), worst(arb(0), high))]
        return worst(*map(abs, ends))

    @cached_property
    def slope_rounding(self) -> arb:
        """What scores, softmax and sums in floats add to a slope that is looked up; 0 if r̃ is s − y."""
        s, keys, d = self.stored, len(self.stored.layer.values), len(self.stored.x)
        if not keys:
            return arb(0)
        rows = zip(s.layer.slopes, s.layer.labels, s.layer.offsets)
        score = worst(*(abs(a) * self.line + abs(b) * self.y + abs(c) for a, b, c in rows))
        tall, spread = worst(*map(arb, map(abs, s.layer.values))), arb(max(s.layer.values)) - arb(min(s.layer.values))
        if not worst(score, tall, max(map(abs, s.layer.slopes)) * self.w) < self.most:
            return INF
        delta = self.gamma(d + 3) * score + self.gamma(4) * 2 * score + self.gamma(17) + self.lost
        sums = self.gamma(2 * keys + 4) * tall + self.gamma(3) * (tall + abs(s.layer.direct) * self.y)
        return delta / 2 * spread + sums + 4 * keys * (self.smallest * tall + self.tiniest)

    @property
    def lost(self) -> arb:
        """What products that underflow take from a score."""
        return self.tiniest * (2 * len(self.stored.x) + 4) * (1 + self.x)

    def step_error(self, table: arb) -> arb:
        """τ, if the exact table is within `table` of r."""
        s, d, n = self.stored, len(self.stored.x), self.stored.examples
        eta, c, shrink = arb(s.step_size), arb(s.layer.read), arb(s.layer.shrink)
        off = table + self.slope_rounding
        size = self.slope + off
        top = s.layer.epsilon * size
        if not worst(c * self.x, self.line, self.w, self.y, size, top) < self.most:
            return INF
        bend = c * self.x * worst(top.sinh() - top, top - top.tanh())  # |sinh(t)/D − t|, |t| ≤ top, 1 ≤ D ≤ cosh(top)
        stored = abs(shrink - (1 - eta * s.ridge)) * self.w + abs(c * s.layer.epsilon - eta) * size * self.x
        score = self.gamma(1) * top if s.layer.values else self.gamma(d + 2) * s.layer.epsilon * (self.line + self.y)
        delta = score + self.gamma(4) * 2 * (top + score) + self.gamma(17) + self.lost
        sums, norm = self.gamma(2 * n + 2), self.gamma(2 * n + 1)
        share = delta + sums * (1 + norm) + norm * (top.tanh() + delta)
        kept = self.gamma(2) * abs(shrink) * self.w + self.gamma(1) * c * self.x * (1 + share)
        underflow = 4 * (n + 2) * (self.smallest * c * self.x + self.tiniest * d * (1 + c))
        return stored + bend + eta * off * self.x + share * c * self.x + kept + underflow

    @cached_property
    def growth(self) -> arb:
        """`Σ_{t<T} ρ^t`."""
        rho, steps = self.contraction, self.stored.steps
        return (rho**steps - 1) / (rho - 1) if rho != 1 else arb(steps)

    def after_all_steps(self, table: arb) -> arb:
        """`e_T = ρ^T e_0 + Σ_t ρ^t τ`; not finite where no bound is found."""
        first = length([arb(a) - arb(b) for a, b in zip(self.stored.layer.start, self.stored.initial)])
        return self.contraction**self.stored.steps * first + self.growth * self.step_error(table)

    def allowed(self) -> float:
        """An error of the exact table, nearly the largest, that leaves the claim true; 0 if there is none."""
        left = arb(self.stored.bound) - self.after_all_steps(arb(0))
        most = left / (self.growth * self.stored.step_size * self.x)
        for share in (0.999, 0.99, 0.9, 0.5, 0.1) if left > 0 else ():
            if self.after_all_steps(most.lower() * share) <= self.stored.bound:
                return down(most * share)
        return 0.0

    def head(self) -> tuple[Head, arb]:
        """A grid whose scores are those of the table up to a common affine function and to δ, which is returned too.

        On axis i, `c_k = m_i + α_k/R_i`: if offsets are `−α_k²/(2R) − α_k m`, δ is rounding.
        """
        s, tables = self.stored, [self.stored.layer.slopes, self.stored.layer.labels][: len(self.ends)]
        grid = s.claim.proof["table"]
        counts = grid["counts"]
        rates, middles = ([read_hex(value, name) for value in grid[name]] for name in ("rates", "middle"))
        need(len(counts) == len(rates) == len(middles) == len(tables), "table: one number per axis is expected")
        need(all(type(k) is int and k > 0 for k in counts) and min(rates) > 0, "table: invalid counts or rates")
        need(math.prod(counts) == len(s.layer.values), "table: the counts are not those of the keys")
        stride = [math.prod(counts[i + 1 :]) for i in range(len(counts))]
        axes = tuple(
            tuple(m + of[k * step] / r for k in range(count))
            for of, m, r, step, count in zip(tables, middles, rates, stride, counts)
        )
        need(all(a < b for axis in axes for a, b in pairwise(axis)), "table: the centers of an axis do not increase")
        box, apart = balls(self.ends)[0], list[list[arb]]()
        for k in range(len(s.layer.values)):
            at = [axis[k // step % count] for axis, step, count in zip(axes, stride, counts)]
            offset = s.layer.offsets[k] + sum((arb(r) * c * c / 2 for r, c in zip(rates, at)), arb(0))
            apart.append([offset, *(of[k] - arb(r) * c for of, r, c in zip(tables, rates, at))])
        delta = arb(0)
        for row in apart:
            offset, *tilts = (a - b for a, b in zip(row, apart[0]))
            delta = worst(delta, abs(sum((a * z for a, z in zip(tilts, box)), offset)))
        whole = tuple((count + 1) // 2 for count in counts)
        return Head(
            "grid", "float64", len(s.layer.values), axes, (), tuple(rates), (s.layer.values,), None, None, None, whole
        ), delta

    def table_verdict(self, allowed: float) -> Verdict:
        """Whether the exact table is within so much of r wherever it is asked."""
        s, graph = self.stored, self.stored.graph
        head, delta = self.head()
        if len(s.names) == 1 and (s.layer.direct or any(a + b for a, b in zip(s.layer.slopes, s.layer.labels))):
            return Verdict(UNKNOWN, "the keys of the table do not read s − y")
        if s.layer.direct:  # the table holds the rest of r
            count = len(graph.nodes)
            added = (("input", (), (1,)), ("const", (), (s.layer.direct,)), ("mul", (count, count + 1), ()))
            nodes = (*graph.nodes, *added, ("sub", (graph.outputs[0], count + 2), ()))
            graph = Graph(2, nodes, (count + 3,), ())
        left = arb(allowed) - delta / 2 * (arb(max(s.layer.values)) - arb(min(s.layer.values)))
        if not left > 0:
            return Verdict(UNKNOWN, "the keys of the table are not those of a grid")
        claim = Claim("proved", math.inf, "real", down(left), None, {}, (), None, {})
        lo, hi = zip(*self.ends)
        return check(Stored(head, claim, graph, s.names, lo, hi, None, 0.0))

    def prompts(self, count: int) -> Iterator[list[tuple[Point, arb]]]:
        """Random prompts of a few examples, most numbers at the ends of the boxes."""
        source, single = random.Random(1), self.stored.claim.semantics == "float32"

        def number(pair: tuple[float, float]) -> arb:
            drawn = source.choice([*pair, *pair, pair[0] + (pair[1] - pair[0]) * source.random()])
            near = array("f", [drawn])[0] if single else drawn
            return arb(min(max(near, pair[0]), pair[1]))

        for _ in range(count):
            size = source.randint(1, min(EXAMPLES, self.stored.examples))
            yield [([number(pair) for pair in self.stored.x], number(self.stored.y)) for _ in range(size)]

    def drift(self, prompt: list[tuple[Point, arb]]) -> arb:
        """`|w_T − exact|₂` of the exact network on a prompt; not finite if an iterate is not seen to stay in the box of w."""
        s, n = self.stored, len(prompt)
        net, exact = [arb(v) for v in s.layer.start], [arb(v) for v in s.initial]
        for _ in range(s.steps):
            if time.monotonic() > self.until:
                return INF
            if not all(a <= v <= b for at in (net, exact) for v, (a, b) in zip(at, s.w)):
                return INF
            top, bottom, mean = [arb(0)] * len(net), arb(0), [arb(0)] * len(net)
            for x, y in prompt:
                attained, line = (sum((a * b for a, b in zip(x, at)), arb(0)) for at in (net, exact))
                score = s.layer.epsilon * self.looked_up(attained, y)
                slope = s.graph.evaluate([line - y] if len(s.names) == 1 else [line, y])[0]
                top = [a + score.sinh() * b for a, b in zip(top, x)]
                bottom += score.cosh()
                mean = [a + slope * b / n for a, b in zip(mean, x)]
            net = [s.layer.shrink * v - s.layer.read * a / bottom for v, a in zip(net, top)]
            exact = [v - s.step_size * (a + s.ridge * v) for v, a in zip(exact, mean)]
        inside = all(a <= v <= b for at in (net, exact) for v, (a, b) in zip(at, s.w))
        return length([a - b for a, b in zip(net, exact)]) if inside else INF

    def looked_up(self, line: arb, y: arb) -> arb:
        """r̃ of the exact network."""
        s = self.stored
        if not s.layer.values:
            return line - y
        scores = [a * line + b * y + c for a, b, c in zip(s.layer.slopes, s.layer.labels, s.layer.offsets)]
        best = max(scores, key=lambda score: float(score.mid()))
        weights = [(score - best).exp() for score in scores]
        return sum((w * v for w, v in zip(weights, s.layer.values)), arb(0)) / sum(weights, arb(0)) + s.layer.direct * y


def worst(*sizes: arb) -> arb:
    """A number that is at least every number of the balls; infinite if any is not finite."""
    return arb(max(map(up, sizes)))


def check_descent(stored: Descent, *, sampled: int = 0, shard: Shard = WHOLE) -> Verdict:
    """The verdict on a claim, in the time that the clock allows.

    Verified only if a bound recomputed here, rounding included, is at most the bound claimed. The first shard proves it alone.
    """
    ctx.prec, verdict, found = BITS, Verdict(UNKNOWN), Bounds(stored)
    if any(name in ("where", "floor") for name, _, _ in stored.graph.nodes):  # all others are continuous
        said = f"the loss {stored.label} is continuously differentiable in s"
        need(stored.claim.kind == "proved_given", f"a claim of kind proved must not rest on an assumption: {said}")
        need((said, "caller") in stored.claim.assumptions, f"used, but not listed as assumed: {said}")
        verdict.given.append(said)
    try:
        _attack(found, verdict, sampled or PROMPTS)
        if verdict.outcome == UNKNOWN and not shard.own(divided=False):
            verdict.outcome, verdict.reason, verdict.proved, verdict.method = VERIFIED, "", 0.0, LEFT
        elif verdict.outcome == UNKNOWN and not sampled:
            _prove(found, verdict)
    except TimeOver:
        verdict.reason = "the time budget ran out"
    return verdict


def _attack(found: Bounds, verdict: Verdict, count: int) -> None:
    """Run both descents on random prompts, in balls."""
    found.until, bound = time.monotonic() + min(5.0, clock.left() / 4), found.stored.bound
    ctx.prec = min(MOST_BITS, BITS + 2 * found.stored.steps)  # balls grow with every step
    for prompt in found.prompts(count):
        error = found.drift(prompt)
        if error.is_finite() and (verdict.where is None or down(error) > verdict.seen):
            verdict.seen = max(down(error), 0.0)
            verdict.where = tuple(float(v) for x, y in prompt for v in (*x, y))
        if error.is_finite() and error > bound:
            verdict.outcome = REFUTED
            verdict.reason = (
                f"after this prompt w is at least {verdict.seen:.17g} from exact descent, more than {bound:.17g}"
            )
            break
    else:
        verdict.reason = "spot check: no violation on the prompts tried; nothing is proved"
    ctx.prec = BITS


def _prove(found: Bounds, verdict: Verdict) -> None:
    """Bound the drift, and accept a claim that is not below that."""
    stored, table = found.stored, arb(0)
    if not stored.layer.values and stored.graph.canonical() != parse("s - y", ("s", "y")).canonical():
        verdict.reason = "the network has no table, and its slope s − y is not the slope of the loss"
        return
    if stored.layer.values:
        allowed = found.allowed()
        inner = found.table_verdict(allowed) if allowed > 0 else Verdict(UNKNOWN, "the rest takes all of the bound")
        ctx.prec = BITS
        verdict.method = f"table of slopes by {inner.method}; " if inner.method else ""
        if inner.outcome != VERIFIED:
            verdict.reason = f"the table of the loss's slope would have to be within {allowed:.6g}: {inner.reason}"
            return
        table = arb(allowed)
    total = found.after_all_steps(table)
    verdict.proved = up(total)
    verdict.method += f"each step within {up(found.step_error(table)):.3g}, contraction {up(found.contraction):.9g}"
    verdict.reason = f"the best bound that could be proved is {verdict.proved:.6g}"
    if total <= stored.bound:
        verdict.outcome, verdict.reason = VERIFIED, ""
