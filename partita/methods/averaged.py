"""Values without solving a system: f at the centers at a well-chosen temperature ("tuned"), or minus its bias ("corrected")."""

from __future__ import annotations

import math

from partita.methods.method import Plan, Refusal, Size
from partita.methods.request import Request
from partita.methods.soft_values import SoftValues, too_narrow
from partita.proofs.proof import Progress
from partita.search.averaged_values import averaged_grid, predicted_counts

__all__ = ["Corrected", "Tuned"]

_CELLS = 1 << 17
_SAMPLED_CELLS = 1 << 12  # of a head whose error is only sampled: finer ones would hide from the samples


class _Averaged(SoftValues):
    """The smallest grid whose sampled error meets the tolerance; a forecast by the theorem's leading terms comes first."""

    most_keys = 1 << 16
    takes_sharpness = True
    halves = True

    def forecast(self, request: Request) -> Size | Refusal:
        if request.target.graph is not None and request.knowledge is None:
            return Refusal("f may jump")
        if request.is_steep:
            return Refusal("f is infinitely steep somewhere, where averages of neighbours do not help")
        if not request.slopes.finite:
            return Refusal("the derivatives of f are not finite everywhere")
        counts = predicted_counts(request.slopes, request.box, self.name, request.aim)
        keys = math.prod(counts)
        return Size(keys, keys * request.target.num_outputs + sum(counts) + len(counts))

    def plan(self, request: Request, share: float, progress: Progress | None = None) -> Plan | Refusal:
        target = request.target
        if refusal := too_narrow(request, share):
            return refusal
        most = _CELLS if target.graph is not None else _SAMPLED_CELLS
        room = request.max_bytes // (request.precision.item_bytes * target.num_outputs)
        found = averaged_grid(
            target,
            request.slopes,
            self.name,
            tolerance=share * request.aim - request.set_aside,
            storage=request.precision.number,
            max_cells=min(most, room),
            sharpness=request.sharpness,
            progress=progress,
        )
        if isinstance(found, str):
            return Refusal.of_a_search(found, most=most, room=room)
        return self.planned(request, found.counts, found.ghosts, found.rates, found.values, found.error_estimate)


class Tuned(_Averaged):
    """`V_j = f(v_j)` at the sharpness where the odd terms of the average cancel: second order. *Theorem*: `tuned-values`."""

    name = "tuned"
    theorem = "tuned-values"
    made = "values of f at the centers, the temperature chosen to cancel odd terms"


class Corrected(_Averaged):
    """`V_j = f_j − δ²f_j/(2κ)`: the known bias of the average is subtracted; fourth order. *Theorem*: `corrected-values`."""

    name = "corrected"
    theorem = "corrected-values"
    made = "values of f at the centers minus the bias of the softmax average, f − δ²f/(2κ)"
