"""The heads of a network: which uses share one, which affine maps move into them, and how the tolerance is split among them."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray

from partita.arithmetic.progress import Progress, report
from partita.errors import PartitaError, SizeError, ToleranceError, UnsupportedError
from partita.functions.affine_forms import Form
from partita.functions.graph import Graph, GraphBuilder
from partita.functions.operations import Node
from partita.functions.structure import Structure, Unit
from partita.functions.target import graph_target
from partita.geometry.domains import Array, Box
from partita.heads.network import AffineMap
from partita.heads.wiring import Affine, Group, Wiring
from partita.methods.adaptive import Adaptive
from partita.methods.affine import Affine as AffineCells
from partita.methods.averaged import Corrected
from partita.methods.convex import Convex
from partita.methods.fitted import Fitted
from partita.methods.method import Method
from partita.methods.pieces import Pieces
from partita.methods.planner import best_plan, constructed
from partita.methods.request import Request
from partita.methods.two_keys import TwoKeys, two_keys_draft
from partita.proofs.carried_errors import (
    MOST_BOXES,
    Carried,
    Ranges,
    cut_boxes,
    joint_ranges,
    propagate,
    require_bounded,
)
from partita.proofs.claim import Construction
from partita.proofs.network_proof import Part

__all__ = ["Network", "fold", "network_of", "wire"]

_QUICK: list[Method] = [Pieces(), TwoKeys(), Fitted()]
# for what has kinks or a range of many scales, or where the large values of fitted heads round too much in float32
_PATIENT: list[Method] = [Corrected(), AffineCells(), Convex(), Adaptive()]
_MARGIN = 2.0  # times the errors planned for: how far the boxes of parts reach, so that budgets can move afterwards
_COMPARABLE = 2.5  # times the bits of the best structure: another one that needs no more is tried as well
_ALIKE = 2.0  # uses whose reads differ in size by less than this factor gain nothing from heads of their own
_LEFT_OVER = 1.5  # times its error: a smaller head is looked for only if it may have more than that
_CUT_WORK = 200_000  # nodes of all units times boxes: the most on which errors are carried
_WORTH_CUTTING = 0.25  # bits, times the root of the number of units: what twice as many boxes must save
_STEPS = 8  # per power of two: how finely budgets are graded
_GRID = 64  # steps: how finely the ends of ranges are graded
_SPAN = 32  # uses of one head for a logarithm, a root or a reciprocal read numbers within this factor of each other
_ROOM = 2.0**-9  # of a range, added at each end: another machine may compute its ends with other last digits
_LONG = 200  # characters of a label
_THIN = 1e-9  # of its ends: a range so narrow is widened, because a box needs some width


@dataclass(frozen=True, eq=False)
class Network:
    """A network that is planned: its wiring, and for each distinct head what is claimed about it.

    Attributes:
        parts: one per head, in the order of the wiring's indices.
        constructions: their heads.
        carried: errors, ranges and gains.
        cuts: points on each axis of the domain, between which errors are carried.
    """

    wiring: Wiring
    parts: tuple[Part, ...]
    constructions: tuple[Construction, ...]
    carried: Carried
    cuts: list[list[float]]

    @property
    def num_parameters(self) -> int:
        """Stored numbers, linear maps included."""
        maps = [group.reads for layer in self.wiring.layers for group in layer]
        return sum(c.head.num_parameters for c in self.constructions) + sum(
            a.num_parameters for a in (*maps, self.wiring.output)
        )

    @property
    def num_keys(self) -> int:
        """Keys of all uses."""
        return sum(self.constructions[g.head].head.num_keys * self.uses_of(g) for g in self.groups())

    def groups(self) -> Iterator[Group]:
        for layer in self.wiring.layers:
            yield from layer

    def uses_of(self, group: Group) -> int:
        """How often the head of the group is used in it."""
        return group.reads.rows // self.parts[group.head].graph.num_inputs


def network_of(
    request: Request, structures: Sequence[Structure], tolerance: float, progress: Progress | None = None
) -> Network:
    """The network with the fewest stored numbers that is found for one of the structures, its bound at most the tolerance.

    Every head h gets a budget ε_h with `Σ_h A_h ε_h ≤ tolerance`, A_h being what one unit of error at all uses of h does to an
    output. The number of keys of a smooth head grows with `log(1/ε_h)`, at the same rate for all, so that the sum of all
    keys is least where every head takes an equal share `A_h ε_h`. What heads leave unused is then offered to the largest ones.

    Args:
        request: what is asked for; its dtype and limits hold for every head.
        structures: ways to write f as units that read affine functions of earlier ones. One whose heads seem to need far more
            bits than those of another, or whose domain must be cut, is tried only if that fails.
        tolerance: for the heads; rounding of the affine maps comes on top.

    Raises:
        ToleranceError, SizeError, UnsupportedError: a range or a slope has no bound, or no head is close enough. The message
            names the unit.
    """
    searches = [_Search(request, fold(structure), tolerance, progress) for structure in structures]
    if len(searches) == 1:
        return searches[0].best()
    searches.sort(key=lambda search: search.bits)
    found, problem = None, None
    for search in searches:
        if found is not None and not (search.bits <= _COMPARABLE * searches[0].bits and search.is_tame):
            continue
        try:
            other = search.best()
        except (SizeError, ToleranceError, UnsupportedError) as error:
            problem = problem or error
        else:
            found = other if found is None else min(found, other, key=lambda network: network.num_parameters)
    if found is None:
        assert problem is not None
        raise problem
    return found


class _NoHeadError(Exception):
    """No head serves all uses of one function.

    Args:
        head: which. problem: why. sizes: how large what each use reads can be, use by use.
    """

    def __init__(self, head: int, problem: PartitaError, sizes: Array) -> None:
        super().__init__(str(problem))
        self.head, self.problem, self.sizes = head, problem, sizes

    @property
    def alike(self) -> bool:
        """Whether all uses read numbers of about one size."""
        return _are_alike(self.sizes)


def _are_alike(sizes: Array) -> bool:
    return bool(sizes.max() <= _ALIKE * sizes.min())


def _split(uses: Sequence[int], sizes: Array) -> list[list[int]]:
    """Two groups of uses, on either side of the widest gap between their sizes on a scale of logarithms."""
    order = np.argsort(sizes)
    cut = 1 + int(np.argmax(np.diff(np.log(np.maximum(sizes[order], 1e-300)))))
    return [[uses[i] for i in sorted(part)] for part in (order[:cut].tolist(), order[cut:].tolist())]


def _sizes(carried: Carried, head: int) -> Array:
    """The product of the largest sizes of what each use of a head reads."""
    found = [
        np.maximum(np.abs(read.reach_lo), np.abs(read.reach_hi)).max(axis=0).prod(axis=1)
        for _, group, read in carried.groups()
        if group.head == head
    ]
    return np.concatenate(found)


def _rounded_down(budget: float) -> float:
    """A little less, so that budgets that hardly differ are the same and heads are found once."""
    return float(2.0 ** (math.floor(_STEPS * math.log2(budget)) / _STEPS))


class _Search:
    """One search for the heads of a network."""

    def __init__(self, request: Request, structure: Structure, tolerance: float, progress: Progress | None) -> None:
        self.request, self.structure, self.tolerance, self.progress = request, structure, tolerance, progress
        self.lo, self.hi = request.box.lo.ravel(), request.box.hi.ravel()
        self._built: dict[tuple[Graph, bytes, bytes], list[tuple[float, Construction]]] = defaultdict(list)
        self._refused: dict[tuple[Graph, bytes, bytes, bool], list[tuple[float, SizeError | ToleranceError]]] = (
            defaultdict(list)
        )

    @property
    def _whole(self) -> list[list[float]]:
        """No cuts."""
        return [[] for _ in self.lo]

    @cached_property
    def bits(self) -> float:
        """About how much the heads have to store: the sum of `log2(A_h·|range of h| / tolerance)` over different functions.

        It is infinite where an error has no bound.
        """
        graphs, carried = self._own[1], self._without_errors(self._whole)
        weights, found = _weights(carried, len(graphs)).max(axis=0), dict[Graph, float]()
        for channel, group, _ in carried.groups():
            values = carried.values[:, channel]
            steps = weights[group.head] * float(values.hi.max() - values.lo.min()) / self.tolerance
            need = math.log2(1 + steps) if steps < math.inf else math.inf
            found[graphs[group.head]] = max(need, found.get(graphs[group.head], 0.0))
        return sum(found.values())

    def best(self) -> Network:
        """The network whose uses of one function share one head, or two where no head serves them all, and so on.

        Uses that are alike gain nothing from heads of their own. Their head gets a share of the tolerance for each use instead.
        """
        units = self.structure.units
        graphs = list(dict.fromkeys(unit.graph for unit in units))
        clusters = [
            group
            for graph in graphs
            for group in self._by_scale([j for j, unit in enumerate(units) if unit.graph == graph])
        ]
        by_use = False
        while True:
            head_of = {j: k for k, cluster in enumerate(clusters) for j in cluster}
            try:
                return self._network(
                    [units[c[0]].graph for c in clusters], [head_of[j] for j in range(len(units))], by_use=by_use
                )
            except _NoHeadError as error:
                k = error.head
                if len(clusters[k]) > 1 and error.alike and not by_use:
                    by_use = True
                    continue
                if len(clusters[k]) == 1:
                    raise error.problem from None
                clusters[k : k + 1] = _split(clusters[k], error.sizes)

    def _by_scale(self, uses: list[int]) -> list[list[int]]:
        """Uses of a function with a pole or a root at 0, in groups that read numbers of about one size.

        One head for numbers of very different sizes would be large.
        """
        graph = self.structure.units[uses[0]].graph
        if len(uses) == 1 or graph.num_inputs > 1 or not any(map(_depends_on_scale, graph.nodes)):
            return [uses]
        ends = {
            group.head: (read.lo.min(), read.hi.max()) for _, group, read in self._without_errors(self._whole).groups()
        }
        if not all(0 < ends[j][0] <= ends[j][1] < math.inf for j in uses):
            return [uses]
        groups = list[list[int]]()
        least = most = 0.0
        for j in sorted(uses, key=lambda j: ends[j]):
            if groups and max(most, ends[j][1]) <= _SPAN * least:
                groups[-1].append(j)
                most = max(most, ends[j][1])
            else:
                groups.append([j])
                least, most = ends[j]
        return [sorted(group) for group in groups]

    def _network(self, graphs: Sequence[Graph], head_of: Sequence[int], *, by_use: bool = False) -> Network:
        """The network whose unit j uses head `head_of[j]`, of the function `graphs[head_of[j]]`.

        Args:
            by_use: whether a head gets as many shares of the tolerance as it has uses, instead of one.
        """
        wiring = wire(self.structure, head_of, self.request.dtype)
        # those that the proof will find: ranges depend a little on the order of the channels, and boxes must hold what is read
        ranges = joint_ranges(wiring, graphs, self.lo, self.hi)
        first = self._carry(wiring, graphs, [0.0] * len(graphs), ranges)
        shares = np.array([float(head_of.count(k)) if by_use else 1.0 for k in range(len(graphs))])
        budgets = _split_evenly(_weights(first, len(graphs)), shares, self.tolerance)
        reach = self._carry(wiring, graphs, [_MARGIN * b for b in budgets], ranges)
        boxes, weights = _boxes(reach, len(graphs)), _weights(reach, len(graphs))
        made = []
        for k, (graph, box, budget) in enumerate(zip(graphs, boxes, _split_evenly(weights, shares, self.tolerance))):
            report(self.progress, f"head {k + 1} of {len(graphs)}", k, len(graphs))
            sizes = _sizes(reach, k)
            # several uses that no quick method serves are split first, unless they are alike
            patient = len(sizes) == 1 or (by_use and _are_alike(sizes))
            try:
                made.append(self._part(graph, box, _rounded_down(budget), patient=patient))
            except (SizeError, ToleranceError) as error:
                raise _NoHeadError(k, error, sizes) from None
        for heads in (self._leaner(graphs, boxes, weights, made), made):
            carried = self._carry(wiring, graphs, [c.certificate.error_bound for c in heads], ranges)
            if _fits(carried, boxes):  # errors of leaner heads may lead out of a box
                break
        else:
            raise UnsupportedError(
                "with the errors of earlier heads, a head may read numbers outside the range that it was planned for"
            )
        parts = tuple(Part(g, b, c.certificate) for g, b, c in zip(graphs, boxes, heads))
        return Network(wiring, parts, tuple(heads), carried, self.cuts)

    @cached_property
    def _own(self) -> tuple[Wiring, list[Graph]]:
        """The wiring with a head for every unit."""
        graphs = [unit.graph for unit in self.structure.units]
        return wire(self.structure, range(len(graphs)), self.request.dtype), graphs

    @cached_property
    def _own_ranges(self) -> Ranges:
        """Ranges of what every unit reads on the whole domain."""
        return joint_ranges(*self._own, self.lo, self.hi)

    @cached_property
    def cuts(self) -> list[list[float]]:
        """Where to cut the domain so that errors are carried on narrow ranges.

        The number of keys grows with the logarithm of a gain, so that cuts are worth what they take off the sum of these.
        """
        cuts, graphs = self._whole, self._own[1]
        if self.structure.depth == 1:
            return cuts

        boxes, least, every = 1, self._cost(cuts), sum(len(graph.nodes) for graph in graphs)
        while 2 * boxes * every <= _CUT_WORK and boxes < MOST_BOXES:
            report(self.progress, f"carrying errors on {2 * boxes} boxes")
            trial, cost = self._one_cut(cuts)
            if not cost <= least - self._worth_cutting:
                break
            cuts, least = trial, cost
            boxes = math.prod(len(axis) + 1 for axis in cuts)
        return cuts

    @cached_property
    def is_tame(self) -> bool:
        """Whether errors are carried on the whole domain about as well as on a half of it."""
        return (
            self.structure.depth == 1 or self._one_cut(self._whole)[1] > self._cost(self._whole) - self._worth_cutting
        )

    @property
    def _worth_cutting(self) -> float:
        return _WORTH_CUTTING * math.sqrt(len(self.structure.units))

    def _one_cut(self, cuts: list[list[float]]) -> tuple[list[list[float]], float]:
        """The best axis cut once more, and what that costs."""
        trials = [[*cuts[:i], self._halved(i, cuts[i]), *cuts[i + 1 :]] for i in range(len(cuts))]
        costs = [self._cost(trial) for trial in trials]
        best = int(np.argmin(costs))
        return trials[best], costs[best]

    def _cost(self, cuts: Sequence[Sequence[float]]) -> float:
        """The sum of the logarithms of all gains."""
        weights = _weights(self._without_errors(cuts), len(self.structure.units))
        with np.errstate(divide="ignore"):
            bits = np.log2(weights.max(axis=0))
        return float(np.where(bits > -math.inf, bits, 0.0).sum())

    def _without_errors(self, cuts: Sequence[Sequence[float]]) -> Carried:
        """What is carried if every unit has a head of its own without an error."""
        (wiring, graphs), ends = self._own, cut_boxes(self.lo, self.hi, cuts)
        precision, ranges = self.request.precision, self._own_ranges
        return propagate(wiring, graphs, [0.0] * len(graphs), *ends, precision=precision, ranges=ranges)

    def _halved(self, axis: int, cuts: Sequence[float]) -> list[float]:
        """Each piece of an axis in two, at its geometric mean if it spans several scales."""
        ends = [self.lo[axis], *cuts, self.hi[axis]]
        found = list(cuts)
        for a, b in pairwise(ends):
            middle = math.sqrt(a) * math.sqrt(b) if 0 < 4 * a < b else a + (b - a) / 2
            found += [middle] if a < middle < b else []
        return sorted(float(x) for x in found)

    def _carry(self, wiring: Wiring, graphs: Sequence[Graph], errors: Sequence[float], ranges: Ranges) -> Carried:
        precision = self.request.precision
        ends = cut_boxes(self.lo, self.hi, self.cuts)
        carried = propagate(wiring, graphs, errors, *ends, precision=precision, ranges=ranges)
        require_bounded(carried, graphs)
        return carried

    def _part(self, graph: Graph, box: Box, tolerance: float, *, patient: bool = False) -> Construction:
        """The smallest proved head for a part; one that was built before, if it is good enough and none smaller was asked for.

        Args:
            patient: whether methods may be tried that can take minutes, if no other has a head.
        """
        key = graph, box.lo.tobytes(), box.hi.tobytes()
        for asked, construction in self._built[key]:
            if construction.certificate.error_bound <= tolerance <= asked * (1 + 1e-12):
                return construction
        label = graph.infix() if len(graph.nodes) <= _LONG else "part"
        target = graph_target(graph, (box,), label if len(label) <= _LONG else "part")
        request = replace(
            Request(target, tolerance, dtype=self.request.dtype, max_bytes=self.request.max_bytes),
            max_value=self.request.max_value,
        )
        refused = self._refused[(*key, patient)]
        problem = next((error for asked, error in refused if tolerance <= asked), None)
        if problem is not None:
            raise problem
        try:
            if graph.num_inputs > 1:  # a tolerance that two keys miss for a product is out of reach of grids too
                with suppress(UnsupportedError):
                    two_keys_draft(target, tolerance=tolerance, dtype=self.request.dtype)
            construction = self._proved(request, _QUICK)
        except (SizeError, ToleranceError) as error:
            problem = error
        if problem is not None and patient:
            try:
                construction, problem = self._proved(request, _PATIENT), None
            except (SizeError, ToleranceError) as error:
                problem = error
        if problem is not None:
            reason = f"no head was found for {target.label} within {tolerance:.2g} on {box}: {problem.reason}"
            problem = type(problem)(reason, problem.hint)
            refused.append((tolerance, problem))
            raise problem
        self._built[key].append((tolerance, construction))
        return construction

    def _proved(self, request: Request, methods: Sequence[Method]) -> Construction:
        """The smallest head of these methods, proved within the tolerance.

        Raises:
            ToleranceError, SizeError: none has one.
        """
        missed = dict[str, float]()  # heads that round more than was planned, and what they leave
        while len(missed) < len(methods):
            try:
                plan = best_plan(request, methods=methods, without=frozenset(missed), progress=self.progress)
            except (SizeError, ToleranceError):
                if not missed:
                    raise
                break
            construction, plan = constructed(plan, self.progress)
            certificate = construction.certificate
            if certificate.kind == "proved" and certificate.error_bound <= request.tolerance:
                return construction
            missed[plan.maker.name] = certificate.error
        raise ToleranceError(f"the best head has an error of {min(missed.values()):.2g}", "Use a larger tolerance.")

    def _leaner(
        self, graphs: Sequence[Graph], boxes: Sequence[Box], weights: Array, made: Sequence[Construction]
    ) -> list[Construction]:
        """Smaller heads where others left some of their budget unused, the largest first."""
        made = list(made)
        for k in sorted(range(len(made)), key=lambda k: -made[k].head.num_parameters):
            own = made[k].certificate.error_bound
            left = self.tolerance - weights @ np.array([c.certificate.error_bound for c in made])
            reached = weights[:, k] > 0
            allowed = own + float(
                (left[reached] / weights[reached, k]).min(initial=0.0 if not reached.any() else np.inf)
            )
            if made[k].head.num_keys <= 2 or not _LEFT_OVER * own < allowed < math.inf:
                continue
            try:
                other = self._part(graphs[k], boxes[k], allowed)
            except PartitaError:
                continue
            if other.head.num_parameters < made[k].head.num_parameters:
                made[k] = other
        return made


def _depends_on_scale(node: Node) -> bool:
    return node.operation in ("log", "sqrt", "div") or (node.operation == "pow" and node.parameters[0] < 0)


def _weights(carried: Carried, heads: int) -> Array:
    """How far one unit of error at all uses of a head can move each output on each box, `(boxes · outputs, heads)`."""
    gains = carried.gains.reshape(-1, carried.gains.shape[-1])
    found = np.zeros((len(gains), heads))
    for channel, group, read in carried.groups():
        found[:, group.head] += gains[:, channel : channel + len(read.moves)].sum(axis=1)
    return found


def _split_evenly(weights: Array, shares: Array, tolerance: float) -> list[float]:
    """Budgets that give the heads behind each output these shares of its error; heads that no output depends on get all of it."""
    every = (weights > 0) @ shares
    found = (weights * every[:, None] / shares).max(axis=0)
    if not np.isfinite(found).all():  # without errors a read does not move, and no slope is asked for
        raise UnsupportedError(
            "network: a head reads another one where its slope has no bound, so that no error of that one is small enough",
            "Use a smaller domain, or another way to write the function.",
        )
    return [tolerance / float(share) if share > 0 else tolerance for share in found]


def _boxes(carried: Carried, heads: int) -> list[Box]:
    """For every head a box that holds all its reads."""
    found: list[list[Array]] = [[] for _ in range(heads)]
    moves: list[list[NDArray[np.bool_]]] = [[] for _ in range(heads)]
    for _, group, read in carried.groups():
        moves[group.head].append(read.moves)
        found[group.head] += [ends.reshape(-1, ends.shape[-1]) for ends in (read.reach_lo, read.reach_hi)]
    boxes = []
    for k, ends in enumerate(found):
        lo, hi = (np.concatenate(ends).min(axis=0), np.concatenate(ends).max(axis=0))
        thin = hi - lo <= _THIN * np.maximum(np.abs(lo), np.abs(hi))
        pad = np.where(thin, _THIN * np.maximum(np.abs(lo), np.abs(hi)) + np.where(lo == hi, _THIN, 0.0), 0.0)
        room = _ROOM * np.minimum(hi - lo, np.minimum(np.abs(lo), np.abs(hi)))
        pad = np.where(np.concatenate(moves[k]).any(axis=0), np.maximum(pad, room), pad)
        boxes.append(Box(_graded(lo - pad, hi + pad, -1), _graded(hi + pad, lo - pad, 1)))
    return boxes


def _fits(carried: Carried, boxes: Sequence[Box]) -> bool:
    """Whether every head reads points of its box only."""
    return all(
        (read.reach_lo >= boxes[group.head].lo.ravel()).all() and (read.reach_hi <= boxes[group.head].hi.ravel()).all()
        for _, group, read in carried.groups()
    )


def _graded(end: Array, other: Array, side: int) -> Array:
    """Ends of ranges moved outward to a coarse grid, so that ranges that hardly differ are the same; never across 0."""
    size = np.minimum(np.abs(end - other), np.abs(end))
    step = 2.0 ** np.floor(np.log2(np.where(size > 0, size, 1.0) / _GRID))
    return np.where(size > 0, side * np.ceil(side * end / step) * step, end)


def fold(structure: Structure) -> Structure:
    """The same function, with what all uses of a unit's graph have in common moved into that graph.

    If most reads of an input have the weight s, and all the same constant b, then `g(s v + b)` takes the place of g and reads
    `v = (form − b)/s`: weights that become 1 and constants that become 0 need not be stored.
    """
    members = defaultdict(list)
    for j, unit in enumerate(structure.units):
        members[unit.graph].append(j)
    units = list(structure.units)
    for graph, group in members.items():
        maps = [_common([structure.units[j].reads[i] for j in group]) for i in range(graph.num_inputs)]
        if all(scale == 1 and shift == 0 for scale, shift in maps):
            continue
        folded = _substituted(graph, maps)
        for j in group:
            reads = tuple(
                Form((form.constant - b) / s, {c: w / s for c, w in form.terms.items()})
                for form, (s, b) in zip(units[j].reads, maps)
            )
            units[j] = Unit(folded, reads)
    return replace(structure, units=tuple(units))


def _common(forms: Sequence[Form]) -> tuple[Fraction, Fraction]:
    """The scale and the constant to take out of these forms; 1 and 0 where that saves nothing."""
    counts = Counter(w for form in forms for w in form.terms.values())
    scale, often = max(counts.items(), key=lambda item: item[1], default=(Fraction(1), 0))
    scale = scale if often > counts[Fraction(1)] and _is_written(scale) else Fraction(1)
    constants = {form.constant for form in forms}
    constant = constants.pop() if len(constants) == 1 else Fraction(0)
    return scale, constant if _is_written(constant) else Fraction(0)


def _is_written(number: Fraction) -> bool:
    """Whether a graph can hold it as a constant, or as a quotient of two."""
    try:
        return all(Fraction(float(part)) == part for part in (number.numerator, number.denominator))
    except OverflowError:
        return False


def _substituted(graph: Graph, maps: Sequence[tuple[Fraction, Fraction]]) -> Graph:
    """`g(s_0 x_0 + b_0, s_1 x_1 + b_1, …)`."""
    builder = GraphBuilder(graph.num_inputs)

    def constant(number: Fraction) -> int:
        if Fraction(float(number)) == number:
            return builder.add("const", parameters=(float(number),))
        parts = (builder.add("const", parameters=(float(p),)) for p in (number.numerator, number.denominator))
        return builder.add("div", *parts)

    places: list[int] = []
    for node in graph.nodes:
        if node.operation == "input":
            scale, shift = maps[int(node.parameters[0])]
            place = builder.add("input", parameters=node.parameters)
            if scale == -1:
                place = builder.add("neg", place)
            elif scale != 1:
                place = builder.add("mul", constant(scale), place)
            places.append(place if shift == 0 else builder.add("add", place, constant(shift)))
        else:
            places.append(builder.add(node.operation, *(places[k] for k in node.arguments), parameters=node.parameters))
    return builder.finish([places[k] for k in graph.outputs], graph.output_shape)


def _groups(structure: Structure, head_of: Sequence[int]) -> list[list[tuple[int, list[int]]]]:
    """For every layer its heads, and the units that use each, in the order of the wiring."""
    layers: list[dict[int, list[int]]] = [defaultdict(list) for _ in range(structure.depth)]
    for j in range(len(structure.units)):
        layers[structure.level(j) - 1][head_of[j]].append(j)
    return [sorted(groups.items()) for groups in layers]


def wire(structure: Structure, head_of: Sequence[int], dtype: torch.dtype) -> Wiring:
    """The structure as a wiring, unit j using head `head_of[j]`, with coefficients as the dtype stores them."""
    channel = {i: i for i in range(structure.inputs)}
    layers: list[tuple[Group, ...]] = []
    for groups in _groups(structure, head_of):
        layers.append(
            tuple(
                Group(h, _affine([form for j in group for form in structure.units[j].reads], channel, dtype))
                for h, group in groups
            )
        )
        for _, group in groups:
            for j in group:
                channel[structure.inputs + j] = len(channel)
    return Wiring(structure.inputs, tuple(layers), _affine(structure.outputs, channel, dtype))


def _affine(forms: Sequence[Form], channel: Mapping[int, int], dtype: torch.dtype) -> Affine:
    """Forms over the structure's channels as rows over those of the wiring, coefficients rounded where they must be."""
    read = sorted({channel[c] for form in forms for c in form.terms})
    start = read[0] if read else 0
    weight, bias = np.zeros((len(forms), read[-1] + 1 - start if read else 1)), np.zeros(len(forms))
    exact: dict[tuple[int, int], Fraction] = {}
    for row, form in enumerate(forms):
        entries = [(channel[c] - start, w) for c, w in form.terms.items()]
        for column, number in (*entries, (-1, form.constant)):
            if Fraction(float(number)) != number:
                exact[row, column] = number
            if column < 0:
                bias[row] = float(number)
            else:
                weight[row, column] = float(number)
    return AffineMap.of(Affine(weight, bias, start, exact), dtype).affine()
