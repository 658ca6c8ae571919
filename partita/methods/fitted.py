"""Values fitted to samples of f, so that the average of neighbouring values that the softmax takes is close to f."""

from __future__ import annotations

import numpy as np

from partita.methods.method import Plan, Refusal
from partita.methods.request import Request
from partita.methods.soft_values import SoftValues
from partita.proofs.proof import Progress
from partita.search.grid_fit import fit_grid

__all__ = ["Fitted"]

_ROUNDING_SHARE = 0.1  # of the tolerance, that running in floats may take


class Fitted(SoftValues):
    """Values fitted to samples of f inside the box, on the smallest grid that the search finds. *Theorem*: `fitted-values`."""

    name = "fitted"
    theorem = "fitted-values"
    made = "values fitted to samples of f inside the box"
    shares = (0.97, 0.85, 0.6)

    def plan(self, request: Request, share: float, progress: Progress | None = None) -> Plan | Refusal:
        """The smallest fitted grid whose sampled error is within `share` of the tolerance."""
        target, box = request.target, request.box
        fit = fit_grid(
            target,
            box,
            tolerance=share * request.aim,
            outputs=target.num_outputs,
            storage=request.precision.number,
            max_spread=_largest_spread(request),
            progress=progress,
        )
        if fit.fitted:
            return self.planned(request, fit.counts, fit.ghosts, fit.rates, fit.values, fit.error_estimate)
        if not fit.values.size:
            return Refusal(fit.status)
        return Refusal(
            f"{fit.status}: the best of the grids tried leaves an error of {fit.error_estimate:.3g}",
            keys=fit.num_cells,
            reached=fit.error_estimate,
        )


@np.errstate(all="ignore")  # numbers out of range end in a refusal
def _largest_spread(request: Request) -> float:
    """How far fitted values may spread: rounding is proportional to it, and ten thousand times f's own range is enough."""
    box, aim = request.box, request.aim
    seen = request.target(np.concatenate([box.sample(512, np.random.default_rng(3)), box.corners(64)]))
    range_of_f = float(np.ptp(seen, axis=0).max()) + float(np.abs(seen).max())
    rounding = request.precision.unit * 110 * box.dimension
    return min(_ROUNDING_SHARE * aim / rounding, 1e4 * max(range_of_f, aim))
