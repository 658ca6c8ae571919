"""What is proved about a network of heads: the claims of its heads, the errors carried through it, and which function it is.

A network with a claim for each of its heads approximates the function that its wiring makes of the heads' functions. That is f,
because the exact affine forms of both are the same, or because f is defined so.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise
from typing import Any

import numpy as np

from partita.arithmetic.precision import PRECISIONS
from partita.errors import FormatError, PartitaError, ShapeError, ToleranceError, UnsupportedError
from partita.functions.affine_forms import Form, Interner, forms_of
from partita.functions.definedness import has_values
from partita.functions.graph import Graph
from partita.functions.logarithms import Logarithms
from partita.functions.ranges import positive_nodes
from partita.functions.target import Target, graph_target
from partita.geometry.domains import Array, Box
from partita.heads.head import FoldedHead
from partita.heads.network import AttentionNetwork
from partita.heads.wiring import Affine, Wiring
from partita.proofs.carried_errors import (
    MOST_BOXES,
    Carried,
    cut_boxes,
    joint_ranges,
    propagate,
    require_bounded,
    shown,
)
from partita.proofs.certificate import Certificate, Term, model_digest, plain_floats, total
from partita.proofs.proof import Given, Proof, Proved
from partita.proofs.proving_again import ONE_HEAD, Check, proof_again

__all__ = ["NetworkProof", "Part", "carried_over", "part_checks", "same_as_wiring"]

_MEANINGS = ("graph", "wiring")


@dataclass(frozen=True, eq=False)
class Part:
    """What is claimed about one head of a network: `|head − g| ≤ certificate.error_bound` on the box.

    Attributes:
        graph: g, with one output.
        box: where the claim holds.
        certificate: the head's own.
    """

    graph: Graph
    box: Box
    certificate: Certificate

    def to_json(self) -> dict[str, Any]:
        """As the certificate of the network holds it."""
        return {
            "graph": self.graph.to_json(),
            "box": {"lo": self.box.lo.ravel().tolist(), "hi": self.box.hi.ravel().tolist()},
            "certificate": plain_floats(self.certificate.to_json()),
        }

    @classmethod
    def from_json(cls, data: Any) -> Part:
        """The part that `to_json` wrote, before or after a certificate was read. Raises `FormatError` for anything else."""
        if not isinstance(data, Mapping) or set(data) != {"graph", "box", "certificate"}:
            raise FormatError(f"part of a network: found {str(data)[:100]}; expected graph, box and certificate.")
        try:
            corners = [[_number(x) for x in data["box"][end]] for end in ("lo", "hi")]
            return cls(Graph.from_json(data["graph"]), Box(*corners), Certificate.from_json(data["certificate"]))
        except (KeyError, TypeError, ValueError, OverflowError, PartitaError) as error:
            raise FormatError(f"part of a network: {type(error).__name__}: {error}") from None

    @classmethod
    def all_from_json(cls, data: Any, heads: Sequence[FoldedHead]) -> tuple[Part, ...]:
        """One part for each head. Raises `FormatError` if there are more or fewer."""
        if not isinstance(data, (list, tuple)) or len(data) != len(heads):
            count = len(data) if isinstance(data, (list, tuple)) else "no"
            raise FormatError(f"the certificate has {count} parts; expected {len(heads)}, one for each head.")
        return tuple(map(cls.from_json, data))

    @property
    def label(self) -> str:
        """g and the box, for messages."""
        return f"{shown(self.graph)} on {self.box}"

    def require_claim(self, head: FoldedHead) -> None:
        """Check that the certificate is a proved claim about this head, this function and this box.

        Raises:
            UnsupportedError: it is about something else, or it is not proved in the supremum norm.
        """
        said = self.certificate
        sizes = {self.graph.num_inputs, self.box.dimension, head.dimension}
        arguments = list(said.domain.get("arguments", []))
        for holds, problem in (
            (
                len(sizes) == 1 and self.graph.output_shape == head.output_shape == (),
                "numbers of inputs or outputs differ",
            ),
            (said.kind == "proved" and said.norm == "inf", f"the claim is {said.kind} in norm {said.norm}"),
            (said.semantics == head.semantics, f"the head is {head.semantics} and the claim {said.semantics}"),
            (said.function.get("sha256") == self.graph.sha256, "the claim is about another function"),
            (arguments == [self.box.description], "the claim is about another box"),
            (said.model.get("sha256") == model_digest(head.state_dict()), "the claim is about other tensors"),
            (total(said.terms) <= said.error_bound, "its terms exceed its bound"),
        ):
            if not holds:
                raise UnsupportedError(
                    f"the head for {self.label}: {problem}; expected a claim that is proved in the supremum norm, about this head, "
                    "function and box"
                )


def _number(x: Any) -> float:
    return float.fromhex(x) if isinstance(x, str) else float(x)


def part_checks(part: Part, head: FoldedHead) -> Iterator[Check]:
    """The proof of one head of a network done again.

    Args:
        part: what is claimed.
        head: as it is stored.

    Yields:
        One `Check` for the claim itself, and one for each of its terms.
    """
    try:
        part.require_claim(head)
        target = graph_target(part.graph, (part.box,), str(part.certificate.function.get("text", "")))
    except (PartitaError, ValueError, TypeError) as error:
        yield Check(f"head for {part.label}", False, str(error))
        return
    proof = ONE_HEAD.get(str(part.certificate.proof.get("method", "moments")))
    if proof is None:
        yield Check(f"head for {part.label}", False, f"there is no proof called {part.certificate.proof['method']!r}")
        return
    for check in proof_again(proof, head, target, part.certificate):
        yield Check(f"head for {part.label}, {check.name}", check.holds, check.detail, check.checked)


def same_as_wiring(
    graph: Graph, wiring: Wiring, graphs: Sequence[Graph], box: Box, *, undefined: Collection[int] = ()
) -> bool:
    """Whether f and the function that a wiring makes of the heads' functions have the same exact forms.

    They are then equal wherever f is defined on the box. Products of numbers that are positive there may be written with
    logarithms.

    Args:
        graph: f.
        wiring: of the network, with its exact coefficients.
        graphs: the function of each head.
        box: the domain.
        undefined: heads whose functions are not known to have values wherever they are read. √a·√a is not a where a < 0 and the
            root counts as 0, and nothing is learned from their logarithms.
    """
    if _agree(graph, wiring, graphs, Interner(), frozenset(), undefined):
        return True
    return _agree(graph, wiring, graphs, Logarithms(), positive_nodes(graph, box.lo, box.hi), undefined)


def _agree(
    graph: Graph,
    wiring: Wiring,
    graphs: Sequence[Graph],
    interner: Interner,
    positive: frozenset[int],
    undefined: Collection[int],
) -> bool:
    channels = [interner.input(i) for i in range(wiring.inputs)]
    wanted = forms_of(graph, channels[:], interner, positive)
    for groups in wiring.layers:
        made = list[Form]()
        for group in groups:
            reads, part = _forms(group.reads, channels), graphs[group.head]
            interner.defined = group.head not in undefined
            for i in range(0, len(reads), part.num_inputs):
                made += forms_of(part, reads[i : i + part.num_inputs], interner)
        channels += made
    return _forms(wiring.output, channels) == wanted


def _forms(given: Affine, channels: Sequence[Form]) -> list[Form]:
    """The rows of an affine map with exact coefficients, as forms."""
    found = []
    for row in range(given.rows):
        terms = [
            (given.exact.get((row, c), Fraction(float(given.weight[row, c]))), channels[given.start + c])
            for c in map(int, np.flatnonzero(given.weight[row]))
        ]
        bias = given.exact.get((row, -1), Fraction(float(given.bias[row])))
        found.append(Form.total([*terms, (Fraction(1), Form(bias))]))
    return found


class NetworkProof(Proof):
    """Heads with claims of their own, and errors carried from one to the next. *Theorem*: `carried-errors`.

    `given.details["parts"]` are the claims about the heads, as JSON; `given.earlier` are `Part`s whose proofs were done in this
    process and are not done again. `given.details["meaning"]` is "graph" if the network must be shown to compute the expression
    f, and "wiring" if f is defined as what the wiring makes of the heads' functions. The default is "graph" for an expression.
    `given.details["cuts"]` are points on each axis that cut the domain into boxes; the bound is the largest on any of them.
    """

    name = "network"
    takes = AttentionNetwork
    moves_inputs = True

    def _prove(self, head: AttentionNetwork, target: Target, given: Given) -> Proved:
        if not math.isinf(given.norm):
            raise UnsupportedError(f"the errors of a network are carried in the supremum norm; found L{given.norm:g}.")
        parts = self._parts(head, given)
        graphs, wiring = [part.graph for part in parts], head.wiring
        meaning = str(given.details.get("meaning", "wiring" if target.graph is None else "graph"))
        if meaning not in _MEANINGS or (meaning == "wiring") != (target.graph is None):
            raise UnsupportedError(
                f"the certificate says that f is the {meaning}, which does not fit {target!r}; expected graph or wiring."
            )
        undefined = [i for i, part in enumerate(parts) if not has_values(part.graph, part.box)]
        if target.graph is not None and not same_as_wiring(
            target.graph, wiring, graphs, target.box, undefined=undefined
        ):
            raise UnsupportedError(
                f"the network was not shown to compute {target.label[:200]}: their exact affine forms differ."
            )
        carried, cuts = carried_over(head, parts, target.box, {**given.details, "meaning": meaning})
        details: dict[str, Any] = {"method": self.name, "parts": [part.to_json() for part in parts], "meaning": meaning}
        if any(cuts):
            details["cuts"] = cuts
        return Proved(_terms(carried, parts), details)

    @staticmethod
    def _parts(head: AttentionNetwork, given: Given) -> tuple[Part, ...]:
        """The claims about the heads, proved here unless they were before."""
        if given.earlier is not None:
            parts = tuple(given.earlier)
            if len(parts) != len(head.parts):
                raise ShapeError(f"found claims about {len(parts)} heads; expected {len(head.parts)}.")
            for part, own in zip(parts, head.parts):
                part.require_claim(own)
            return parts
        parts = Part.all_from_json(given.details.get("parts"), head.parts)
        for part, own in zip(parts, head.parts):
            wrong = next((check for check in part_checks(part, own) if not check.holds), None)
            if wrong is not None:
                raise ToleranceError(f"{wrong.name}: the claim is not confirmed: {wrong.detail}")
        return parts


def carried_over(
    head: AttentionNetwork, parts: Sequence[Part], box: Box, details: Mapping[str, Any]
) -> tuple[Carried, list[list[float]]]:
    """Ranges and errors of every channel of a network over a box, and the points at which its axes are cut.

    Args:
        head: the network.
        parts: the claim about each of its heads.
        box: the domain.
        details: of the proof; `cuts` are the points that cut each axis. Where its `meaning` is "wiring", the network is a
            converted one, of thousands of terms, and ranges are those of the layers alone.

    Raises:
        UnsupportedError: a range or an error without a bound, or a head that may read a point outside its box.
        FormatError: points that do not increase inside the box, or too many.
    """
    wiring, graphs, lo, hi = head.wiring, [part.graph for part in parts], box.lo.ravel(), box.hi.ravel()
    cuts = _cuts(details.get("cuts", []), lo, hi)
    carried = propagate(
        wiring,
        graphs,
        [part.certificate.error_bound for part in parts],
        *cut_boxes(lo, hi, cuts),
        precision=PRECISIONS[str(head.dtype)],
        ranges=None if details.get("meaning") == "wiring" else joint_ranges(wiring, graphs, lo, hi),
    )
    require_bounded(carried, graphs)
    _require_inside(carried, parts)
    return carried, cuts


def _cuts(data: Any, lo: Array, hi: Array) -> list[list[float]]:
    """Points that cut the axes of a box, from what a certificate stores. Raises `FormatError` unless they increase inside it."""
    try:
        cuts = [[_number(x) for x in axis] for axis in data] or [[] for _ in lo]
        ends = [[a, *axis, b] for a, axis, b in zip(lo, cuts, hi, strict=True)]
    except (TypeError, ValueError, OverflowError) as error:
        raise FormatError(f"cuts of a network's domain: {type(error).__name__}: {error}") from None
    if not all(a < b for axis in ends for a, b in pairwise(axis)) or math.prod(len(c) + 1 for c in cuts) > MOST_BOXES:
        raise FormatError(
            f"cuts of a network's domain: found {str(data)[:100]}; expected increasing points inside, and at most {MOST_BOXES:,} "
            "boxes."
        )
    return cuts


def _require_inside(carried: Carried, parts: Sequence[Part]) -> None:
    """Check that every head reads points of the box for which it is proved.

    Raises:
        UnsupportedError: a use of a head may read a point outside.
    """
    for _, group, reads in carried.groups():
        box = parts[group.head].box
        outside = (reads.reach_lo < box.lo.ravel()) | (reads.reach_hi > box.hi.ravel())
        if outside.any():
            where, use, i = (int(index[0]) for index in np.nonzero(outside))
            lo, hi = float(reads.reach_lo[where, use, i]), float(reads.reach_hi[where, use, i])
            raise UnsupportedError(
                f"network: use {use} of the head for {parts[group.head].label} may read input {i} anywhere in [{lo!r}, {hi!r}], "
                "which its box does not hold",
                "Compile this head on a larger box.",
            )


def _terms(carried: Carried, parts: Sequence[Part]) -> list[Term]:
    """One term for each head, one for inexact coefficients, one for rounding: for the box and the output with the largest sum."""
    shares = carried.shares(len(parts))
    box, worst = np.unravel_index(int(np.argmax(shares.total)), shares.total.shape)
    key, heads = "carried-errors", shares.heads[box, worst]
    uses = [0] * len(parts)
    for _, group, reads in carried.groups():
        uses[group.head] += len(reads.moves)
    terms = [
        Term(
            f"head {i}",
            float(value),
            f"Σ gain·ε over the uses of {shown(part.graph)}",
            key,
            {"bound": part.certificate.error_bound, "uses": float(count)},
        )
        for i, (part, value, count) in enumerate(zip(parts, heads, uses))
    ]
    rounded, stored = float(shares.rounding[box, worst]), float(shares.coefficients[box, worst])
    if stored:
        terms.append(Term("coefficients", stored, "Σ gain·(|w̃ − w||c| + |b̃ − b|)", key, source="storage"))
    terms.append(Term("rounding", rounded, "Σ gain·n·u(|w̃||c̃| + |b̃|) over the affine maps", key, source="rounding"))
    moved = float(shares.inputs[box, worst])
    if moved:
        terms.append(Term("input rounding", moved, "Σ gain·u max|z_i|", key, source="input"))
    return terms
