"""Heads on a product grid, whatever their values and their temperature are: f and net as Taylor polynomials on boxes."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy as np

from partita.arithmetic.precision import PRECISIONS, Precision
from partita.arithmetic.progress import Progress, report
from partita.arithmetic.rounding import add_up, div_down, mul_up, sub_down
from partita.errors import BudgetSpentError, UnsupportedError
from partita.functions.graph import Graph
from partita.functions.regularity import Known, known_where_rounded
from partita.functions.target import Target
from partita.geometry.domains import Array, Box
from partita.heads.grid_head import GridHead
from partita.heads.head import FoldedHead, Head
from partita.proofs.cell_proof import largest_value, lost_slopes
from partita.proofs.center_values import GridFacts, domain_factor, soft_terms
from partita.proofs.certificate import Term
from partita.proofs.grid_proof import GridProof, SoftGrid, prove_grid
from partita.proofs.proof import Given, Proof, Proved
from partita.proofs.running import summed
from partita.proofs.shards import shard_details
from partita.proofs.straight_ends import line_of

__all__ = ["TaylorProof", "running_soft", "soft_grid_of"]

_SHARPENINGS, _SMALL = 8, 0.02  # proofs tried; a bound below that share of what rounding adds is near enough
_SHARP_PIECES = 1 << 14
_FAR_SHARE = 1e-3  # of the goal, that keys may still hold where the last one is taken for the head
_NARROW = 0.9  # of the box: a part that is not narrower is not worth splitting it
_CLOSE, _CLOSER = 1.08, 1.04  # times a value attained: bounds that close are left alone, and what to aim at


class TaylorProof(Proof):
    """`net = (⊗_i A_i) V` against f by Taylor models on boxes, then what running adds. *Theorem*: `taylor-proof`.

    Values may be affine. Where they are, and the head is hard, `CellProof` comes first: it needs fewer boxes.

    The proof aims at what the tolerance leaves after the running terms. Below float64 an input is rounded before the head sees
    it, perhaps across the end of the domain, so the box is widened by that, and so is the box for the slopes of f.
    """

    name = "taylor"

    def handles(self, head: Head) -> bool:
        return isinstance(head, GridHead)

    def _prove(self, head: FoldedHead, target: Target, given: Given) -> Proved:
        if not isinstance(head, GridHead) or target.graph is None:
            raise UnsupportedError("a Taylor proof needs a grid head and an expression.")
        box, precision, known = target.box, PRECISIONS[str(head.dtype)], given.known
        lo, hi = precision.widened(box.lo.ravel(), box.hi.ravel())
        facts = GridFacts.of(head, box, volume=target.volume)
        if precision.rounds_inputs and known is not None:
            known = known_where_rounded(target, precision, known, given.norm)
        running, factor = running_soft(head, box, known, given.norm, facts), domain_factor(facts, given.norm)
        added = add_up(*(t.value for t in running))
        aim = sub_down(given.tolerance, added) if given.aim is None else given.aim
        goal = div_down(max(aim, 0.0), factor)
        core, far = ((lo, hi), 0.0) if target.region else _straight_ends(head, target.graph, lo, hi, goal)
        prove = partial(
            prove_grid,
            _exact(head),
            target.graph,
            core[0],
            core[1],
            region=target.region,
            shift=None if target.region is None else precision.moved(box.lo.ravel(), box.hi.ravel()),
            progress=given.progress,
            **({} if given.max_boxes is None else {"max_boxes": given.max_boxes}),
        )
        floor = div_down(_SMALL * added, factor)
        proof = (
            _near_the_truth(prove, goal, floor=floor, progress=given.progress) if given.sharpen else prove(goal=goal)
        )
        proof = replace(
            proof, bound=max(proof.bound, far), shards=(*proof.shards, far) if far and proof.shards else proof.shards
        )
        details = {"method": self.name, "degree": proof.degree, "boxes": proof.boxes, "pieces": proof.pieces}
        details |= shard_details(proof.shards, factor)
        return Proved([_approximation(proof, factor), *running], details, settled=proof.settled)


def _straight_ends(
    head: GridHead, graph: Graph, lo: Array, hi: Array, goal: float
) -> tuple[tuple[Array, Array], float]:
    """The part of the box for polynomials, and a bound of the error on what lies beyond it: all of the box, and 0, for most heads.

    A head of one variable with affine values is one line far from its centers. *Theorem*: `straight-ends`.
    """
    line = line_of(head)
    if line is None:
        return (lo, hi), 0.0
    (low,), (high,) = lo.tolist(), hi.tolist()
    first, last = line.core(low, high, _FAR_SHARE * goal)
    far = max(line.far_error(graph, first, low), line.far_error(graph, last, high))
    if not far <= goal or last - first > _NARROW * (high - low):
        return (lo, hi), 0.0
    return (np.array([first]), np.array([last])), far


def soft_grid_of(head: FoldedHead) -> SoftGrid:
    """The head in exact arithmetic, or an UnsupportedError: it must be a grid with constant values."""
    if not isinstance(head, GridHead) or head.value_slopes is not None:
        raise UnsupportedError(
            "gradients are proved for heads on a product grid with constant values, and for those with few keys; this one, with "
            "affine values or scattered centers, would jump from cell to cell",
            "Compile with method='fitted'.",
        )
    return _exact(head)


def _exact(head: GridHead) -> SoftGrid:
    rates = tuple(head.inverse_temperature.double().tolist())
    axes, shape = tuple(a.double().numpy() for a in head.axes), (*head.counts, head.values.shape[1])
    values = head.values.detach().double().numpy().reshape(shape)
    if head.value_slopes is None:
        return SoftGrid(axes, rates, values)
    slopes = head.value_slopes.detach().double().numpy().reshape(*shape, len(axes))
    return SoftGrid(axes, rates, values, slopes, head.get_buffer("origin").double().numpy())


def running_soft(
    head: GridHead, box: Box, known: Known | None, norm: float, facts: GridFacts | None = None
) -> list[Term]:
    """What running adds to the proved error of a grid head whose values, constant or affine, may be any."""
    facts = GridFacts.of(head, box) if facts is None else facts
    if head.value_slopes is None:
        return soft_terms(facts, known, norm)
    largest = largest_value(head, box)
    facts = replace(facts, largest=largest, spread=mul_up(2.0, largest))
    more = float(len(head.counts) + 4)  # z − o, products, their sum
    terms = soft_terms(facts, known, norm, more, partial(lost_slopes, head, box))
    line = line_of(head)
    if line is None:
        return terms
    lo, hi = Precision.of(head.dtype).widened(box.lo.ravel(), box.hi.ravel())
    moved, tall, delta = line.running(float(lo[0]), float(hi[0]))
    found, factor = {t.name: t for t in terms}, domain_factor(facts, norm)
    summation, scores = found["summation"], found["score rounding"]
    operations = summation.inputs["operations"]
    rounded = add_up(
        summed(operations, Precision.of(head.dtype).unit, tall, factor),
        mul_up(lost_slopes(head, box, operations, tall), factor),
    )
    formula, key = "sup (e^{2δ} − 1) Σ_j w_j|V_j − V_e|", "straight-ends"
    closer = [
        replace(summation, value=rounded, inputs={**summation.inputs, "largest": tall}, theorem=key),
        replace(scores, value=mul_up(moved, factor), formula=formula, inputs={"delta": delta}, theorem=key),
    ]
    found |= {t.name: t for t in closer if t.value < found[t.name].value}
    return list(found.values())


def _near_the_truth(
    prove: Callable[..., GridProof], goal: float, *, floor: float, progress: Progress | None
) -> GridProof:
    """A proof that meets the goal, and where the error is far below it another that says so, while there is time.

    Remainders are kept small against the goal only; heads that happen to be much better deserve a bound that shows it.
    """
    proof = prove(goal=goal)
    for _ in range(_SHARPENINGS):
        closer = max(_CLOSER * proof.least, 0.01 * proof.bound)
        if not proof.settled or proof.bound <= max(_CLOSE * proof.least, floor):
            break
        try:
            report(progress, "proof")
        except BudgetSpentError:
            break
        again = prove(goal=closer, max_boxes=4 * proof.boxes + 4096, max_pieces=_SHARP_PIECES)
        if again.bound > proof.bound:
            # something between: values attained beyond the new goal are at least known now
            if again.least <= proof.least:
                break
            proof = replace(proof, least=again.least)
        else:
            proof = replace(again, settled=True, least=max(again.least, proof.least))
    return proof


def _approximation(proof: GridProof, factor: float) -> Term:
    value = mul_up(proof.bound, factor) if math.isfinite(proof.bound) else math.inf
    inputs = {"supremum": proof.bound, "attained": proof.least, "factor": factor}
    return Term("approximation", value, "sup |f − net| by Taylor polynomials on boxes · factor", "taylor-proof", inputs)
