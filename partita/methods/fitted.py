"""Values fitted to samples of f, so that the average of neighbouring values that the softmax takes is close to f."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from partita.arithmetic.precision import SINGLE
from partita.geometry.domains import Array, PointCloud
from partita.methods.method import Plan, Refusal
from partita.methods.request import Request
from partita.methods.soft_values import SoftValues, too_narrow
from partita.proofs.proof import Progress
from partita.search.extension import extended
from partita.search.grid_fit import GridFit, fit_grid

__all__ = ["Fitted"]

_EXTENSION_SHARE = 0.1  # of the tolerance, by which f may be left where it has to be continued beyond a region
_ROUNDING_SHARE = 0.1  # of the tolerance, that running in floats may take
_ROUNDINGS = 110  # units of roundoff per axis, times the spread of the values: about what running in floats takes
_LARGE = 10  # times |f|: values that are explained


class Fitted(SoftValues):
    """Values fitted to samples of f inside the box, on the smallest grid that the search finds. *Theorem*: `fitted-values`."""

    name = "fitted"
    halves = True
    theorem = "fitted-values"
    made = "values fitted to samples of f inside the box"
    shares = (0.97, 0.85, 0.6)

    def applies(self, request: Request) -> Refusal | None:
        return Refusal("needs a box, not a point cloud") if isinstance(request.target.domain, PointCloud) else None

    def plan(self, request: Request, share: float, progress: Progress | None = None) -> Plan | Refusal:
        """The smallest fitted grid whose sampled error is within `share` of the tolerance."""
        target, box, spare = request.target, request.box, 0.0
        ask: Callable[[Array], Array] = target
        if not target.fills_box:
            found = extended(target, _EXTENSION_SHARE * request.aim, progress)
            if found is None:
                return Refusal(
                    "f is not proved to be bounded on the box around the region, and no polynomial continues it there"
                )
            ask, spare = found, found.error
        if refusal := too_narrow(request, share):
            return refusal
        fit = fit_grid(
            ask,
            box,
            tolerance=share * request.aim - spare - request.set_aside,
            outputs=target.num_outputs,
            storage=request.precision.number,
            max_spread=_largest_spread(request),
            max_value=request.max_value,
            progress=progress,
        )
        if fit.fitted:
            plan = self.planned(request, fit.counts, fit.ghosts, fit.rates, fit.values, fit.error_estimate + spare)
            return replace(plan, caveat=_large_values(plan, fit))
        if not fit.values.size:
            return Refusal(fit.status)
        fits = math.isfinite(fit.error_estimate) and fit.largest <= request.max_value
        best = self.planned(request, fit.counts, fit.ghosts, fit.rates, fit.values, fit.error_estimate + spare)
        large = f" with values up to {fit.largest:.3g}" if fit.largest > request.max_value else ""
        return Refusal(
            f"{fit.status}: the best of the grids tried leaves an error of {fit.error_estimate:.3g}{large}",
            keys=fit.num_cells,
            reached=fit.error_estimate,
            best=best if fits and best.bytes <= request.max_bytes else None,
        )


@np.errstate(all="ignore")  # numbers out of range end in a refusal
def _largest_spread(request: Request) -> float:
    """How far fitted values may spread: rounding is proportional to it, and ten thousand times f's own range is enough."""
    box, aim, domain = request.box, request.aim, request.target.domain
    seen = request.target(np.concatenate([domain.sample(512, np.random.default_rng(3)), domain.corners(64)]))
    range_of_f = float(np.ptp(seen, axis=0).max()) + float(np.abs(seen).max())
    rounding = request.precision.unit * _ROUNDINGS * box.dimension
    if request.precision.is_half:  # storing a value costs far more than running it
        rounding = max(rounding, _ROUNDING_SHARE * request.precision.value_unit)
    return min(_ROUNDING_SHARE * aim / rounding, 1e4 * max(range_of_f, aim))


def _large_values(plan: Plan, fit: GridFit) -> str:
    """Why values are much larger than f, and what that costs; empty where they are not."""
    if not plan.largest > _LARGE * fit.size > 0:
        return ""
    cost = SINGLE.unit * _ROUNDINGS * plan.request.box.dimension * float(np.ptp(fit.values, axis=0).max())
    return (
        f"the values reach {plan.largest:.3g}, {plan.largest / fit.size:.3g} times |f|, because neighbouring keys hold values of "
        f"opposite signs that cancel in the softmax average; rounding grows with them, in float32 to an error of about {cost:.1g}; "
        "a limit (max_value) makes them smaller and the head larger"
    )
