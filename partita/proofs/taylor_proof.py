"""Heads on a product grid with constant values, whatever the values are: f and net as Taylor polynomials on boxes."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from partita.arithmetic.precision import PRECISIONS
from partita.arithmetic.progress import Progress, report
from partita.arithmetic.rounding import add_up, div_down, mul_up, sub_down
from partita.errors import BudgetSpentError, UnsupportedError
from partita.functions.target import Target
from partita.heads.grid_head import GridHead
from partita.heads.head import FoldedHead
from partita.proofs.center_values import GridFacts, domain_factor, soft_terms
from partita.proofs.certificate import Term
from partita.proofs.grid_proof import GridProof, SoftGrid, prove_grid
from partita.proofs.proof import Given, Proof, Proved

__all__ = ["TaylorProof", "soft_grid_of"]

_SHARPENINGS, _SMALL = 8, 0.02  # proofs tried; a bound below that share of what rounding adds is near enough
_SHARP_PIECES = 1 << 14
_CLOSE, _CLOSER = 1.08, 1.04  # times a value attained: bounds that close are left alone, and what to aim at


class TaylorProof(Proof):
    """`net = (⊗_i A_i) V` against f by Taylor models on boxes, then what running adds. *Theorem*: `taylor-proof`.

    The proof aims at what the tolerance leaves after the running terms. Below float64 an input is rounded before the head sees
    it, perhaps across the end of the domain, so the box is widened by that.
    """

    name = "taylor"

    def handles(self, head: FoldedHead) -> bool:
        return isinstance(head, GridHead) and head.value_slopes is None

    def _prove(self, head: FoldedHead, target: Target, given: Given) -> Proved:
        if not isinstance(head, GridHead) or target.graph is None:
            raise UnsupportedError("a Taylor proof needs a grid head and an expression.")
        box = target.box
        lo, hi = PRECISIONS[str(head.dtype)].widened(box.lo.ravel(), box.hi.ravel())
        facts = GridFacts.of(head, box, volume=target.volume)
        running, factor = soft_terms(facts, given.known, given.norm), domain_factor(facts, given.norm)
        added = add_up(*(t.value for t in running))
        aim = sub_down(given.tolerance, added) if given.aim is None else given.aim
        goal = div_down(max(aim, 0.0), factor)
        prove = partial(
            prove_grid,
            soft_grid_of(head),
            target.graph,
            lo,
            hi,
            region=target.region,
            shift=None if target.region is None else PRECISIONS[str(head.dtype)].moved(box.lo.ravel(), box.hi.ravel()),
            progress=given.progress,
        )
        floor = div_down(_SMALL * added, factor)
        proof = (
            _near_the_truth(prove, goal, floor=floor, progress=given.progress) if given.sharpen else prove(goal=goal)
        )
        details = {"method": self.name, "degree": proof.degree, "boxes": proof.boxes, "pieces": proof.pieces}
        return Proved([_approximation(proof, factor), *running], details, settled=proof.settled)


def soft_grid_of(head: FoldedHead) -> SoftGrid:
    """The head in exact arithmetic, or an UnsupportedError: it must be a grid with constant values."""
    if not isinstance(head, GridHead) or head.value_slopes is not None:
        raise UnsupportedError(
            "gradients are proved for heads on a product grid with constant values; those with affine values or scattered "
            "centers jump from cell to cell",
            "Compile with method='fitted'.",
        )
    rates = tuple(head.inverse_temperature.double().tolist())
    values = head.values.detach().double().numpy().reshape(*head.counts, -1)
    return SoftGrid(tuple(a.double().numpy() for a in head.axes), rates, values)


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
