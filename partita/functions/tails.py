"""Functions without a bound in L_p: f clipped at M, and the L_p norm of what is cut off, proved from the expression or declared."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

import numpy as np

from partita.arithmetic.interval import Interval
from partita.arithmetic.rounding import add_up, div_down, div_up, exp_up, log_up, mul_up, pow_up, sub_down
from partita.errors import DomainError, LipschitzContradictedError, NonFiniteValueError
from partita.functions.graph import Graph, GraphBuilder
from partita.functions.limits import Factor, Power, atom, constant, factors
from partita.functions.operations import Node
from partita.functions.target import Tail, Target, graph_values
from partita.geometry.domains import Array, Box, PointCloud

__all__ = ["Singularities", "clipped", "clipped_for", "find_singularities", "norm_seen"]

_SHARE = 0.3  # of the tolerance that a proved tail may take
_ROUNDS, _SPLIT, _LOOKS, _SAMPLES, _LEVEL = 40, 8, 64, 1 << 14, 0.8  # of the attack on a declared tail
_CUTS = (0.1, 0.5, 0.9, 0.99, 1.0)  # quantiles of what was seen beyond the clip
_SMALLEST = 2.0**-30  # share of the box below which a part is not halved: its floats would be too few
_AFFINE = {"const", "input", "add", "sub", "neg", "sum", "mul", "div"}


@dataclass(frozen=True)
class _Singular:
    """`C·|w|^{−α}` (power α > 0), or `C·|log(c|w|^r)|` (power 0), with w = slope·x + … in one variable.

    Attributes:
        size: C, a bound of the other factors. steep: a lower bound of |slope|. sides: 1 if w has one sign, else 2.
        others: volume of the other axes. log_power: r. log_scale: an upper bound of log(1/c)/r. most: of log(c|w|^r).
        text: the factor, for errors.
    """

    size: float
    power: Fraction
    steep: float
    sides: int
    others: float
    text: str
    log_power: float = 0.0
    log_scale: float = 0.0
    most: float = 0.0

    def least_cut(self) -> float:
        """The cut from which on the formulas hold."""
        return mul_up(self.size, max(self.most, 0.0)) if self.power == 0 else self.size

    def tail(self, cut: float, p: float) -> float:
        """A bound of `‖(C·s − cut)₊‖_p`. *Theorem*: `lp-tails`."""
        if self.power == 0:
            inside = exp_up(add_up(-div_down(cut, mul_up(self.size, self.log_power)), self.log_scale))
            integral = mul_up(inside, pow_up(mul_up(self.size, self.log_power), p), float(math.factorial(math.ceil(p))))
        else:
            root = math.nextafter(float(1 / self.power), 0.0)
            inside = pow_up(div_up(self.size, cut), root)  # size ≤ cut: a smaller exponent is more
            integral = mul_up(inside, pow_up(cut, p), _beta(self.power, p))
        whole = mul_up(integral, float(self.sides), div_up(self.others, self.steep))
        return mul_up(pow_up(whole, 1 / p), 1 + 1e-12)


def _beta(power: Fraction, p: float) -> float:
    """A bound of `∫₀¹ (y^{−α} − 1)^p dy ≤ Σ_j (−1)^j (k over j)/(1 − αp + αj)`, k = ⌊p⌋, for αp < 1."""
    k, rest = min(int(p), 64), 1 - power * Fraction(p)
    exact = sum((Fraction((-1) ** j * math.comb(k, j)) / (rest + power * j) for j in range(k + 1)), Fraction(0))
    return math.nextafter(float(exact), math.inf)


@dataclass(frozen=True)
class Singularities:
    """Where an expression has no bound, output by output: bounded parts and singular terms, of which each has its own tail."""

    bounded: tuple[float, ...]
    terms: tuple[tuple[_Singular, ...], ...]

    def tail(self, clip: float, p: float) -> float:
        """A bound of `‖(|f| − clip)₊‖_p`; infinite if the clip is too low for the formulas."""
        powers = []
        for bounded, terms in zip(self.bounded, self.terms):
            if not terms:
                if bounded > clip:
                    return math.inf
                continue
            cut = sub_down(clip, bounded) / len(terms) * (1 - 1e-15)
            if not cut > 0 or any(cut < t.least_cut() for t in terms):
                return math.inf
            powers.append(pow_up(add_up(*(t.tail(cut, p) for t in terms)), p))
        return mul_up(pow_up(add_up(*powers), 1 / p), 1 + 1e-12) if powers else 0.0

    def clip_for(self, norm: float, p: float) -> float:
        """The lowest clip, up to 1 %, whose tail is at most the norm."""
        low = high = max(1.0, *self.bounded)
        while self.tail(high, p) > norm:
            low, high = high, 2 * high
            if high > 1e100:
                raise DomainError(
                    f"no clip below 1e100 makes the tail of f smaller than {norm:g} in L{p:g}; use a larger tolerance."
                )
        while high - low > 0.01 * high:
            middle = (low + high) / 2
            low, high = (low, middle) if self.tail(middle, p) <= norm else (middle, high)
        return float(f"{high * 1.001:.4g}") if self.tail(float(f"{high * 1.001:.4g}"), p) <= norm else high

    def require_in(self, p: float) -> None:
        """A NonFiniteValueError for a term that is not in L_p."""
        for term in (t for terms in self.terms for t in terms):
            if term.power * Fraction(p) >= 1:
                raise NonFiniteValueError(
                    f"{term.text} is not in L{p:g}: it grows like |u|^−{float(term.power):g}, and {float(term.power):g}·{p:g} ≥ 1",
                    (f"Use a norm p < {float(1 / term.power):g}, or keep" if term.power < 1 else "Keep")
                    + " the domain away from the pole.",
                )


def find_singularities(graph: Graph, box: Box) -> Singularities | None:
    """The singular terms of f on a box, if it has any and all are recognised: C·|u|^{−α} and C·log|u|, u affine in one variable.

    >>> from partita.functions import parse
    >>> found = find_singularities(parse("3 - 2*log(x)", ["x"]), Box([0.0], [1.0]))
    >>> found is not None and bool(0.9 < found.tail(3 + 2 * 3.0, 1.0) / (2 * np.exp(-3.0)) < 1.01)
    True
    """
    work = _Reading(graph, box)
    bounded, singular = [], []
    for k in graph.outputs:
        total, terms = 0.0, list[_Singular]()
        for part in work.summands(k):
            size = float(work.range(part).magnitude)
            if math.isfinite(size):
                total = add_up(total, size)
                continue
            term = work.singular(part)
            if term is None:
                return None
            terms.append(term)
        bounded.append(total)
        singular.append(tuple(terms))
    return Singularities(tuple(bounded), tuple(singular)) if any(singular) else None


class _Reading:
    """One expression on one box, read for its singular terms."""

    def __init__(self, graph: Graph, box: Box) -> None:
        self.graph, self.nodes, self.box = graph, graph.nodes, box

    def summands(self, k: int) -> list[int]:
        found, waiting = list[int](), [k]
        while waiting:
            k = waiting.pop()
            if self.nodes[k].operation in ("add", "sub", "neg", "sum"):
                waiting += self.nodes[k].arguments
            else:
                found.append(k)
        return found

    def range(self, k: int) -> Interval:
        found = Graph(self.graph.num_inputs, self.nodes, (k,), ()).enclose(
            self.box.lo.reshape(1, -1), self.box.hi.reshape(1, -1)
        )
        return found[0, 0]

    def singular(self, k: int) -> _Singular | None:
        """A product with exactly one factor that has no bound."""
        size, power, base = 1.0, Fraction(0), None
        log: tuple[Interval, Factor, int] | None = None
        for node, sign in factors(self.nodes, k)[1]:
            bounds = self.range(node)
            if sign > 0 and np.isfinite(bounds.magnitude):
                size = mul_up(size, float(bounds.magnitude))
                continue
            if sign < 0 and bounds.mignitude > 0:
                size = mul_up(size, div_up(1.0, float(bounds.mignitude)))
                continue
            found = self._pole(node, sign)
            if found is not None and base in (None, found[0]) and log is None:
                base, power = found[0], power + found[1]
            elif sign > 0 and self.nodes[node].operation == "log" and base is None and log is None:
                log = self._logarithm(self.nodes[node].arguments[0])
                if log is None:
                    return None
            else:
                return None
        base = log[1].node if log is not None else base
        place = None if base is None else self._line(base)
        if place is None or not 0 < size < math.inf:
            return None
        steep, sides, others = place
        text = Graph(self.graph.num_inputs, self.nodes, (k,), ()).infix()
        if log is None:
            return _Singular(size, power, steep, sides, others, text)
        scale, inner, argument = log
        rise = float(inner.power)
        if Fraction(rise) != inner.power:
            return None
        shift = (-scale / rise).hi
        top = self.range(argument).hi
        most = log_up(float(top)) if top > 0 else 0.0
        return _Singular(size, Fraction(0), steep, sides, others, text, rise, float(shift), most)

    def _pole(self, node: int, sign: int) -> tuple[int, Fraction] | None:
        """(w, α) of a factor `|w|^{−α}`."""
        found, operation = self.nodes[node], self.nodes[node].operation
        if sign < 0:
            inner = atom(self.nodes, node)
            return inner.node, inner.power
        if operation == "pow" and found.parameters[0] < 0:
            inner = atom(self.nodes, found.arguments[0])
            return inner.node, inner.power * -int(found.parameters[0])
        limit = self.graph.limits.get(node)
        if isinstance(limit, Power):
            e, inner = constant(self.nodes, limit.exponent), atom(self.nodes, limit.base)
            return (inner.node, inner.power * -e) if e is not None and e < 0 else None
        return None

    def _logarithm(self, argument: int) -> tuple[Interval, Factor, int] | None:
        """log c and the power of w in `log(c|w|^r)`."""
        scale, inner = Interval.point(0.0), None
        for k, sign in factors(self.nodes, argument)[1]:
            if self.nodes[k].operation == "const" and self.nodes[k].parameters[0] != 0:
                scale = scale + sign * Interval.point(abs(float(self.nodes[k].parameters[0]))).log()
            elif inner is None and sign > 0:
                inner = atom(self.nodes, k)
            else:
                return None
        return None if inner is None else (scale, inner, argument)

    def _line(self, base: int) -> tuple[float, int, float] | None:
        """|slope|, sides and the volume of the other axes for w affine in one variable."""
        if not all(_is_affine(self.nodes, k) for k in _below(self.nodes, base)):
            return None
        lo, hi = self.box.lo.reshape(1, -1), self.box.hi.reshape(1, -1)
        value, slopes = Graph(self.graph.num_inputs, self.nodes, (base,), ()).enclose_gradient(lo, hi)
        moving = np.flatnonzero(slopes.magnitude[0, 0] != 0.0)
        if len(moving) != 1 or not slopes.mignitude[0, 0, moving[0]] > 0:
            return None
        others = mul_up(1.0, *np.delete(self.box.sides, moving[0]).tolist())
        sides = 1 if value.lo[0, 0] >= 0.0 or value.hi[0, 0] <= 0.0 else 2
        return float(slopes.mignitude[0, 0, moving[0]]), sides, others


def _below(nodes: Sequence[Node], k: int) -> set[int]:
    found, waiting = set[int](), [k]
    while waiting:
        k = waiting.pop()
        if k not in found:
            found.add(k)
            waiting += nodes[k].arguments
    return found


def _is_affine(nodes: Sequence[Node], k: int) -> bool:
    node = nodes[k]
    if node.operation == "mul":
        return any(nodes[j].operation == "const" for j in node.arguments)
    return node.operation in _AFFINE and (node.operation != "div" or nodes[node.arguments[1]].operation == "const")


def norm_seen(sizes: Array, p: float, volume: float, shares: Array | float = 1.0) -> float:
    """`(∫ Σ_outputs |g|^p)^{1/p}` from independent random points less six standard errors: an estimate from below.

    Args:
        sizes: |g| at the points, `(n, out)`. p: of the norm. volume: of the box that the points lie in.
        shares: 1/(volume · density) at the points, `(n,)`; 1 if they are uniform.
    """
    largest = float(np.max(sizes))
    if not 0 < largest < math.inf:
        return largest
    found = ((sizes / largest) ** p).sum(axis=1) * shares
    least = float(found.mean() - 6 * found.std() / math.sqrt(len(found)))
    return largest * math.pow(max(least, 0.0) * volume, 1 / p)


def _sizes(target: Target, lo: Array, hi: Array, rng: np.random.Generator) -> tuple[Array, Array]:
    """One random point in each box, `(n, m)`, and |f| there, `(n, out)`; 0 off the domain and where f is NaN."""
    points = np.minimum(lo + rng.random(lo.shape) * (hi - lo), hi)
    inside, sizes = target.domain.contains(points), np.zeros((len(points), target.num_outputs))
    if target.ask is not None and inside.any():
        with np.errstate(all="ignore"):
            sizes[inside] = np.nan_to_num(np.abs(target.ask(target.domain.clamp(points[inside]))), nan=0.0)
    return points, sizes


def _tail_seen(target: Target, clip: float, p: float) -> float:
    """`‖(|f| − clip)₊‖_p` from below, by importance sampling.

    The box is halved where the integral of `(|f| − level)₊^p` seems largest, for a level that rises to the clip as more of the
    samples lie where |f| is large. Fresh points, drawn as the parts suggest, make the estimate.
    """
    rng, box = np.random.default_rng(0), target.box
    lo, hi, share = box.lo.reshape(1, -1), box.hi.reshape(1, -1), np.ones(1)
    places, tall = np.zeros((0, _LOOKS, box.dimension)), np.zeros((0, _LOOKS))
    for turn in range(_ROUNDS + 1):
        left, right = (np.repeat(a[len(tall) :], _LOOKS, axis=0) for a in (lo, hi))  # parts without samples
        points, sizes = _sizes(target, left, right, rng)
        inside = 2 * (points - left) / (right - left) - 1  # −1 and 1 at the ends of the part
        places = np.concatenate([places, inside.reshape(-1, _LOOKS, box.dimension)])
        tall = np.concatenate([tall, sizes.max(axis=1).reshape(-1, _LOOKS)])
        level = min(clip, float(np.quantile(tall, _LEVEL)))
        over = np.maximum(tall - level, 0.0)
        relative = (over / max(float(over.max()), 1e-300)) ** p
        mass = share * np.sqrt((relative**2).mean(axis=1))
        if turn == _ROUNDS:
            break
        halved = np.lexsort((share, mass))  # the largest last; by volume where nothing was seen
        halved = halved[share[halved] > _SMALLEST][-_SPLIT:]
        t, weight = places[halved], relative[halved][:, :, None]
        uneven = np.abs((weight * t).sum(axis=1)) + np.abs((weight * (1.5 * t**2 - 0.5)).sum(axis=1))
        uneven = uneven / np.maximum(uneven.max(axis=1, keepdims=True), 1e-300)
        axis = (uneven + (hi - lo)[halved] / box.sides / 8).argmax(axis=1)
        here, middle = np.arange(box.dimension) == axis[:, None], lo[halved] / 2 + hi[halved] / 2
        kept = np.setdiff1d(np.arange(len(share)), halved)
        lo = np.concatenate([lo[kept], lo[halved], np.where(here, middle, lo[halved])])
        hi = np.concatenate([hi[kept], np.where(here, middle, hi[halved]), hi[halved]])
        share = np.concatenate([share[kept], share[halved] / 2, share[halved] / 2])
        places, tall = places[kept], tall[kept]
    chance = share / 4 + 3 * mass / (4 * mass.sum()) if mass.any() else share
    drawn = rng.choice(len(share), _SAMPLES, p=chance / chance.sum())
    beyond = np.maximum(_sizes(target, lo[drawn], hi[drawn], rng)[1] - clip, 0.0)
    if not beyond.any():
        return 0.0
    # what is cut off again at a lower level has a smaller norm, which few points with huge values do not blur
    levels = np.quantile(beyond[beyond > 0], _CUTS)
    return max(norm_seen(np.minimum(beyond, level), p, box.volume, (share / chance)[drawn]) for level in levels)


def _require_tail(target: Target, tail: Tail, p: float) -> float:
    """The attack on a declared tail: seen/declared, at most 1."""
    seen = _tail_seen(target, tail.clip, p)
    if seen > tail.norm * (1 + 1e-6):
        raise LipschitzContradictedError(
            f"{target.label} has ‖(|f| − {tail.clip:g})₊‖_{p:g} ≥ {seen:.4g} (from {_SAMPLES:,} points, six standard errors taken "
            f"off), more than the declared tail {tail.norm:g}",
            f"Declare tail=pa.Tail({tail.clip:g}, norm) with a norm above {seen:.4g}, or a larger clip.",
        )
    return seen / tail.norm if seen else 0.0


def clipped(target: Target, tail: Tail, *, declared: bool) -> Target:
    """f clipped to [−M, M], which a head can approximate; the target remembers f itself."""
    cut = f"f has no bound: it is clipped to ±{tail.clip:g}, and what is cut off adds {tail.norm:.3g} to the bound"
    target = replace(target, origin=f"{target.origin}; {cut}" if target.origin else cut)
    if target.graph is None:
        ask = target.ask
        if ask is None:
            return replace(target, tail=tail, tail_declared=True)
        return replace(
            target, ask=lambda points: np.clip(ask(points), -tail.clip, tail.clip), tail=tail, tail_declared=True
        )
    builder = GraphBuilder(target.graph.num_inputs)
    places: list[int] = []
    for node in target.graph.nodes:
        places.append(builder.add(node.operation, *(places[j] for j in node.arguments), parameters=node.parameters))
    ends = (-tail.clip, tail.clip)
    graph = builder.finish(
        [builder.add("clamp", places[k], parameters=ends) for k in target.graph.outputs], target.graph.output_shape
    )
    return replace(
        target, graph=graph, ask=graph_values(graph), unclipped=target.graph, tail=tail, tail_declared=declared
    )


def clipped_for(target: Target, tail: Tail | None, norm: float, tolerance: float) -> tuple[Target, float]:
    """The target to build for and what its tail leaves of the tolerance: f itself unless a tail is declared or f has no bound.

    Raises:
        DomainError: a tail is declared for the supremum or a point cloud, or takes the whole tolerance.
        LipschitzContradictedError: samples of f contradict the declared tail.
        NonFiniteValueError: a singular term of f is not in L_p.
    """
    if tail is not None and (math.isinf(norm) or tail.norm >= tolerance):
        found = (
            "the norm is the supremum"
            if math.isinf(norm)
            else f"its norm {tail.norm:g} is not below the tolerance {tolerance:g}"
        )
        raise DomainError(f"tail: {found}; expected a finite norm, and a tail smaller than the tolerance.")
    if tail is not None:
        if isinstance(target.domain, PointCloud):
            raise DomainError("tail: the domain is a PointCloud, which has no volume; expected a Box or a Region.")
        ratio = _require_tail(target, tail, norm)
        return replace(clipped(target, tail, declared=True), tail_ratio=ratio), sub_down(tolerance, tail.norm)
    if math.isinf(norm) or target.graph is None or isinstance(target.domain, PointCloud):
        return target, tolerance
    if np.isfinite(target.graph.enclose(target.box.lo.reshape(1, -1), target.box.hi.reshape(1, -1)).magnitude).all():
        return target, tolerance
    found_terms = find_singularities(target.graph, target.box)
    if found_terms is None:
        return target, tolerance
    found_terms.require_in(norm)
    clip = found_terms.clip_for(_SHARE * tolerance, norm)
    cut = Tail(clip, found_terms.tail(clip, norm))
    return clipped(target, cut, declared=False), sub_down(tolerance, cut.norm)
