"""Sums and compositions: several heads in one layer, or several layers, for expressions made of functions of few variables."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence

from partita.errors import PartitaError, SizeError, ToleranceError, UnsupportedError
from partita.functions.graph import Graph
from partita.functions.structure import Structure, layered, one_layer
from partita.geometry.domains import Box
from partita.heads.network import AttentionNetwork
from partita.methods.method import FORMS, Method, Plan, Refusal, needs_box, size_text
from partita.methods.parts import Network, network_of
from partita.methods.request import Request
from partita.proofs.claim import Construction, claim, describe_function, some_answers
from partita.proofs.network_proof import NetworkProof
from partita.proofs.proof import Given, Progress

__all__ = ["Heads", "Layers", "network_not_worth"]

_MOST_VARIABLES = 3  # of one head in a network: beyond that, a grid of keys costs more than the structure saves
_LISTED = 8  # heads that an explanation names
_DRAWN, _SMALL, _SMALL_IF_DRAWN = 2, 100, 2000
# the most variables in which the cells of one head can be drawn; a head that stores no more numbers than this is small enough


class _Structured(Method):
    """What both methods share: read the structure, find the heads, carry their errors on. *Theorem*: `carried-errors`."""

    shares = (0.98, 0.8, 0.5)

    @abstractmethod
    def readings(self, graph: Graph, box: Box) -> Sequence[Structure]:
        """The ways to write f as units."""

    def applies(self, request: Request) -> Refusal | None:
        target = request.target
        if len(target.domains) == 2:
            return Refusal("a pair of boxes stays one cross-attention")
        if target.graph is None:
            return Refusal("needs an expression: the terms of a black box cannot be read")
        if not math.isinf(request.norm) or target.tail is not None:
            return Refusal("for the supremum norm")
        if request.precision.is_half:
            return Refusal(f"networks run in float64 or float32, not {request.precision.name}")
        return needs_box(request)

    def worth(self, request: Request, plans: Sequence[Plan]) -> Refusal | None:
        return network_not_worth(request, plans)

    def refused(self, structure: Structure, request: Request) -> Refusal | None:
        """Why this structure is not for this method, or beyond the caller's limits."""
        if not structure.units:
            return Refusal("f is affine: one key holds it")
        most = max(len(unit.reads) for unit in structure.units)
        if most > _MOST_VARIABLES:
            worst = next(unit for unit in structure.units if len(unit.reads) == most)
            return Refusal(
                f"a term depends on {most} variables at once ({_shown(worst.graph)}); up to {_MOST_VARIABLES} are tried"
            )
        levels = [structure.level(j) for j in range(len(structure.units))]
        widest = max((levels.count(level) for level in set(levels)), default=0)
        if request.max_heads is not None and widest > request.max_heads:
            return Refusal(f"needs {widest} heads in a layer; max_heads allows {request.max_heads}")
        if request.max_layers is not None and structure.depth > request.max_layers:
            return Refusal(f"needs {structure.depth} layers; max_layers allows {request.max_layers}")
        return None

    def plan(self, request: Request, share: float, progress: Progress | None = None) -> Plan | Refusal:
        graph = request.target.graph
        if graph is None:
            return Refusal("needs an expression: the terms of a black box cannot be read")
        structures = self.readings(graph, request.box)
        refusals = [self.refused(structure, request) for structure in structures]
        allowed = [structure for structure, refusal in zip(structures, refusals) if refusal is None]
        if not allowed:
            assert refusals[0] is not None
            return refusals[0]
        try:
            found = network_of(request, allowed, share * request.tolerance, progress)
        except (ToleranceError, SizeError, UnsupportedError) as error:
            return Refusal.of(error)
        bound = float(found.carried.output_error.max())
        if not bound <= request.tolerance:
            return Refusal(
                f"the errors of its heads add up to {bound:.3g}, above the tolerance",
                keys=found.num_keys,
                parameters=found.num_parameters,
                reached=bound,
            )
        return Plan(
            request=request,
            maker=self,
            kind="proved",
            keys=found.num_keys,
            parameters=found.num_parameters,
            draft=found,
            why=_explained(found, request),
            error_bound=bound,
            largest=max(
                (c.head.largest_value(p.box.lo, p.box.hi) for c, p in zip(found.constructions, found.parts)),
                default=0.0,
            ),
        )

    def build(self, plan: Plan, progress: Progress | None = None, seed: int = 0) -> Construction:
        request, found = plan.request, plan.draft
        target = request.target
        head = AttentionNetwork(
            [c.head for c in found.constructions],
            found.wiring,
            input_shapes=target.input_shapes,
            output_shape=target.output_shape,
            dtype=request.dtype,
        )
        details = {"cuts": found.cuts}
        given = Given(tolerance=request.tolerance, details=details, earlier=found.parts, progress=progress)
        proved = NetworkProof().prove(head, target, given)
        certificate = claim(
            head,
            describe_function(target, *some_answers(target)),
            target.domains,
            proved.terms,
            dtype=request.dtype,
            theorem="carried-errors",
            tolerance=request.tolerance,
            details={"type": "network", "method": self.name},
            facts={
                "heads": float(len(found.parts)),
                "layers": float(len(found.wiring.layers)),
                "keys": float(found.num_keys),
            },
            proof=proved.details,
        )
        return Construction(head, None, certificate)


class Heads(_Structured):
    """`net(z) = b + a·z + Σ_h w_h head_h(A_h z)`, one head per term of a sum, in as few variables as the term has.

    The bound is the sum of the heads' own bounds, each times its weight, and rounding. *Theorem*: `carried-errors`.
    """

    name = "heads"
    form = FORMS[1]

    def readings(self, graph: Graph, box: Box) -> Sequence[Structure]:
        return [one_layer(graph)]

    def refused(self, structure: Structure, request: Request) -> Refusal | None:
        variables = max((len(unit.reads) for unit in structure.units), default=0)
        if len(structure.units) <= 1 and variables == request.box.dimension:
            return Refusal("f is not a sum of functions of fewer variables")
        return super().refused(structure, request)


class Layers(_Structured):
    """Layers of heads with affine maps between: every operation that joins variables is a head of its own.

    Ranges of intermediate values are enclosed and widened by the errors that arrive there; errors are carried on by enclosed
    slopes; the tolerance is distributed by what an error at each head does to the outputs. *Theorem*: `carried-errors`.
    """

    name = "layers"
    form = FORMS[2]

    def readings(self, graph: Graph, box: Box) -> Sequence[Structure]:
        plain, logarithms = layered(graph, box), layered(graph, box, logarithms=True)
        return [plain] if plain == logarithms else [plain, logarithms]

    def refused(self, structure: Structure, request: Request) -> Refusal | None:
        if structure.depth <= 1:
            return Refusal("one layer holds all of f: see heads")
        return super().refused(structure, request)


def network_not_worth(request: Request, plans: Sequence[Plan]) -> Refusal | None:
    """Why "auto" does not look for a network; None if it does.

    In one or two variables the cells of one head can be drawn, which is worth more than saving some numbers.
    """
    if request.max_heads == 1 and request.max_layers == 1:
        return Refusal("not tried, because max_heads=1 and max_layers=1 ask for one head")
    if request.max_heads is not None or request.max_layers is not None:
        return None
    single = [p for p in plans if not p.maker.is_network]
    strongest = [p.parameters for p in single if p.kind == "proved" or request.target.graph is None]
    enough = _SMALL_IF_DRAWN if request.box.dimension <= _DRAWN else _SMALL
    if min(strongest, default=math.inf) <= enough:
        return Refusal(
            f"tried only if one head stores more than {enough:,} numbers, or if max_heads or max_layers is given"
        )
    return None


def _explained(found: Network, request: Request) -> tuple[str, ...]:
    """Sizes, and what each head is for."""
    layers, uses = len(found.wiring.layers), [0] * len(found.parts)
    for group in found.groups():
        uses[group.head] += found.uses_of(group)
    heads, depth = f"{sum(uses)} head{'s' * (sum(uses) != 1)}", f"{layers} layer{'s' * (layers != 1)}"
    alike = "all alike" if len(uses) == 1 else f"{'all' if len(uses) == sum(uses) else len(uses)} different"
    lines = [
        f"{heads} in {depth}, {alike}, {found.num_keys:,} keys",
        "f is made of functions of few variables; each gets a head, and equal ones share it",
    ]
    named = [
        f"{_shown(part.graph)} ({construction.head.num_keys:,} keys{f', used {count} times' * (count > 1)})"
        for part, construction, count in zip(found.parts, found.constructions, uses)
    ]
    more = f" and {len(named) - _LISTED:,} more" * (len(named) > _LISTED)
    lines.append(f"heads: {', '.join(named[:_LISTED])}{more}")
    size = size_text(found.num_parameters * request.precision.item_bytes)
    lines.append(f"{found.num_parameters:,} stored numbers, {size} in {request.precision.name}")
    return tuple(lines)


def _shown(graph: Graph) -> str:
    try:
        text = graph.infix()
    except PartitaError:
        text = ""
    return text if 0 < len(text) <= 80 else f"a function of {graph.num_inputs} variables"
