"""Affine values on a hard product grid: every cell stores f and its slopes, and the error is of second order."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch

from partita.methods.grids import GridDraft, sharpness_of
from partita.methods.method import Method, Plan, Refusal, Size, keys_text, needs_box, size_text
from partita.methods.request import Request
from partita.methods.soft_values import can_be_proved, input_assumptions, kind_of_claim, too_narrow
from partita.proofs.cell_proof import CellProof, largest_value
from partita.proofs.claim import Construction, claim, describe_function, some_answers
from partita.proofs.proof import Given, Progress
from partita.proofs.sampled import sampled_error
from partita.search.affine_cells import affine_blocks, smallest_affine_grid

__all__ = ["Affine", "affine_parameters", "halving_text"]

_MOST_CELLS, _ANY = 1 << 18, 1 << 62  # of a head in memory, and of one in a file, where max_bytes is the limit
_MOST_SAMPLED = 1 << 12  # cells of a head whose error is only sampled: finer ones would hide from the samples


class Affine(Method):
    """`net(z) = Σ_j w_j(z)(A_j + J_j(z − o))` on a hard grid, A and J from f at each center and at the faces of its cell.

    Proved cell by cell where f is an expression, estimated where not. *Theorem*: `affine-values`.
    """

    name = "affine"
    halves = True
    shares = (1.0, 0.85, 0.6)
    estimates = True
    most_keys = 1 << 16

    def applies(self, request: Request) -> Refusal | None:
        if refusal := needs_box(request):
            return refusal
        if request.declared.curvature is not None and request.target.graph is None:
            return Refusal("second derivatives are declared, so tangents are used, which are proved")
        return None

    @np.errstate(all="ignore")  # numbers out of range end in a refusal
    def forecast(self, request: Request) -> Size | Refusal:
        """By `Σ_i sup|∂_ii f| h_i²/16 ≤ ε`."""
        if request.target.graph is not None and request.knowledge is None:
            return Refusal("f may jump")
        if request.is_steep:
            return Refusal("f is infinitely steep somewhere, where slopes do not help")
        box, aim, second = request.box, request.aim, request.slopes.second
        curved = second * box.sides**2 > 16 * aim / box.dimension
        cells = np.where(curved, box.sides * np.sqrt(second * max(1, curved.sum()) / (16 * aim)), 1.0)
        flat = ~request.value_axes  # without slopes the error there is of first order
        cells[flat] = np.maximum(box.sides * request.slopes.first / (2 * aim), 1.0)[flat]
        if not np.isfinite(cells).all():
            return Refusal("the second derivatives of f are not finite everywhere")
        counts = tuple(math.ceil(c) for c in cells)
        return Size(math.prod(counts), affine_parameters(request, counts))

    def plan(self, request: Request, share: float, progress: Progress | None = None) -> Plan | Refusal:
        target, box, precision = request.target, request.box, request.precision
        if refusal := too_narrow(request, share):
            return refusal
        numbers = target.num_outputs * (1 + box.dimension)
        room = request.max_bytes // (precision.item_bytes * numbers)
        most = _MOST_SAMPLED if target.graph is None else _MOST_CELLS if request.folder is None else _ANY
        found = smallest_affine_grid(
            target,
            request.slopes,
            tolerance=share * request.aim - request.set_aside,
            storage=precision.number,
            max_cells=min(most, room),
            sloped=request.value_axes,
            progress=progress,
        )
        if isinstance(found, str):
            return Refusal.of_a_search(found, most=most, room=room)
        windows, in_keys = (1,) * box.dimension, "" if request.value_axes.all() else " in z_K"
        values, slopes = (found.values, found.slopes) if found.is_whole else (None, None)
        draft = GridDraft(found.counts, found.rates, windows, values=values, slopes=slopes)
        parameters = affine_parameters(request, found.counts)
        size = size_text(precision.bytes_of(parameters, sum(found.counts) + 2 * box.dimension))
        return Plan(
            request=request,
            maker=self,
            kind=kind_of_claim(request),
            keys=math.prod(found.counts),
            parameters=parameters,
            draft=draft,
            why=(
                keys_text(found.counts),
                f"affine: every cell stores f and its slopes{in_keys}; {found.error_estimate:.3g} is the largest error sampled",
                halving_text(found.counts),
                f"{parameters:,} stored numbers, {size} in {precision.name}",
            ),
            error_bound=request.tolerance if can_be_proved(request) else math.inf,
            error_estimate=found.error_estimate * request.domain_factor,
            sharpness=min(sharpness_of(box, draft), default=0.0),
            largest=float(np.abs(found.values).max()),
            counts=found.counts,
            caveat=request.caveat(found.slopes),
        )

    def build(self, plan: Plan, progress: Progress | None = None, seed: int = 0) -> Construction:
        request, draft = plan.request, plan.draft
        target, grid = request.target, draft.grid(request)
        if draft.values is None or draft.slopes is None:
            blocks = affine_blocks(target, grid, request.value_axes, request.dtype, progress)
        else:
            values, slopes = (torch.tensor(t).to(request.dtype) for t in (draft.values, draft.slopes))
            blocks = iter([(values, slopes)])
        head, file = draft.filled(request, blocks, sloped=True)
        known = None if request.knowledge is None else request.knowledge.known
        common: dict[str, Any] = {
            "dtype": request.dtype,
            "theorem": "affine-values",
            "norm": request.norm,
            "tolerance": request.tolerance,
            "details": {"type": "grid", "method": self.name},
            "known": {} if known is None else known.to_json(),
            "facts": {"largest_value": largest_value(head, request.box), "covering_radius": grid.covering_radius},
        }
        function = describe_function(target, *some_answers(target))
        if not can_be_proved(request):
            seen = sampled_error(head, target, request.norm, seed=seed)
            return Construction(head, grid, claim(head, function, target.domains, (), seen=seen, **common), file)
        given = Given(request.tolerance, request.norm, known, progress=progress)
        proved = CellProof().prove(head, target, given)
        certificate = claim(
            head,
            function,
            target.domains,
            proved.terms,
            assumptions=input_assumptions(request),
            proof=proved.details,
            **common,
        )
        return Construction(head, grid, certificate, file)


def affine_parameters(request: Request, counts: tuple[int, ...]) -> int:
    """Stored numbers of a grid with affine values: values and slopes, centers, rates and the origin."""
    m, outputs = len(counts), request.target.num_outputs
    return math.prod(counts) * outputs * (1 + m) + sum(counts) + 2 * m


def halving_text(counts: tuple[int, ...]) -> str:
    """The price of a second-order method in words."""
    return f"halving the tolerance multiplies the keys by about {2 ** (sum(c > 1 for c in counts) / 2):.3g}"
