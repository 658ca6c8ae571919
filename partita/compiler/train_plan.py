"""Planning tensor trains: heads with more keys than could be stored, for functions of many variables."""

from __future__ import annotations

import math

from partita.compiler.known_regularity import Knowledge
from partita.compiler.options import Options
from partita.compiler.planned import Candidate, Plan, size_text
from partita.functions.target import Target
from partita.geometry.domains import PointCloud
from partita.heads.head import count_text
from partita.methods.train import TrainRecipe, fit_train
from partita.proofs.construction import Progress

__all__ = ["MANY_VARIABLES", "plan_train"]

MANY_VARIABLES = 5  # from which on `auto` looks for a train


def plan_train(
    target: Target, knowledge: Knowledge | None, options: Options, *, progress: Progress | None = None
) -> Plan | Candidate:
    """A tensor train whose held-out error meets the tolerance: an estimate, found by cross approximation."""
    if isinstance(target.domain, PointCloud) or not math.isinf(options.norm):
        return Candidate("train", "", "for boxes, in the supremum norm")
    box = target.domain.bounding_box()
    fit = fit_train(target, box, tolerance=0.9 * options.tolerance, outputs=target.num_outputs, progress=progress)
    keys = fit.grid.num_cells
    parameters = sum(core.size for core in fit.cores) + sum(fit.grid.counts) + box.dimension
    if fit.status != "reached":
        note = f"{fit.status}: held-out error {fit.error_estimate:.3g} after {fit.evaluations:,} evaluations"
        return Candidate("train", "estimated", note, keys=keys, parameters=parameters, error=fit.error_estimate)
    spacing = [a[1] - a[0] if len(a) > 1 else 0.0 for a in fit.grid.axes]
    return Plan(
        target=target,
        knowledge=knowledge,
        recipe=TrainRecipe(fit, options.tolerance, options.dtype),
        method="train",
        kind="estimated",
        keys=keys,
        parameters=parameters,
        bytes=parameters * options.item_bytes,
        sharpness=min((float(r * h * h) for r, h in zip(fit.rates, spacing) if h), default=0.0),
        error_bound=math.inf,
        largest=fit.scale,
        rounding=0.0,
        why=(
            f"{' × '.join(map(str, fit.grid.counts))} = {count_text(keys)} keys, kept as a tensor train of rank {max(fit.ranks)}",
            f"train: values by cross approximation from {fit.evaluations:,} evaluations of f",
            f"the held-out error is {fit.error_estimate:.3g}",
            "nothing is proved: the error was looked for at fresh points, corners, and where f is large or small",
            f"{parameters:,} stored numbers, {size_text(parameters * options.item_bytes)} in {options.semantics}",
        ),
        error_estimate=fit.error_estimate,
    )
