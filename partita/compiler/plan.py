"""The planner: from tolerance, domain and what is known of f to the smallest head, and why that one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from partita.compiler.affine_plan import forecast_affine_grid, plan_adaptive, plan_affine_grid, plan_curved, plan_pieces
from partita.compiler.cover_plan import plan_cover
from partita.compiler.grid_plan import forecast_grid, plan_grid
from partita.compiler.known_regularity import Declared, Knowledge, gather
from partita.compiler.options import DEFAULT_MAX_BYTES, Options
from partita.compiler.planned import Candidate, Plan
from partita.compiler.soft_plan import forecast_averaged, plan_averaged, plan_fitted
from partita.compiler.train_plan import MANY_VARIABLES, plan_train
from partita.errors import (
    BudgetSpentError,
    NotContinuousError,
    NothingKnownError,
    PartitaError,
    SizeError,
    ToleranceError,
)
from partita.functions.regularity import Curvature, Jumps, Modulus
from partita.functions.target import Target, make_target
from partita.geometry.domains import Box, Domain, PointCloud
from partita.proofs.construction import Progress

__all__ = ["make_plan", "plan"]

_MOST_KEYS = 1 << 16  # of a head whose values are found by search
_SMALL, _FEW = 2000, 3  # stored numbers up to which, and variables beyond which, no adaptive head is looked for
_SAMPLED = ("fitted", "affine", "tuned", "corrected", "train")  # estimated where they cannot be proved
_STRENGTH = {"proved": 0, "proved_given": 1, "estimated": 2}


def plan(
    function: Any,
    domain: Domain | tuple[Box, Box],
    *,
    tolerance: float,
    lipschitz: float | Sequence[float] | None = None,
    modulus: Modulus | None = None,
    hessian: float | None = None,
    jumps: Jumps | None = None,
    norm: float | str = "inf",
    method: str = "auto",
    accept: str = "strongest",
    dtype: torch.dtype = torch.float64,
    sharpness: float | None = None,
    max_bytes: int = DEFAULT_MAX_BYTES,
    vectorize: bool = False,
    trace: bool | None = None,
    progress: Progress | None = None,
) -> Plan:
    """Sizes, sharpness and error of the head that `compile` would build, and why. Arguments as in `compile`.

    A hard head is planned without asking f; the others are found by asking f at samples inside the domain.

    >>> import partita as pa
    >>> print(pa.plan("2*x0", pa.Box([0.0], [1.0]), tolerance=0.15, method="hard").why[0])
    7 keys
    """
    options = Options.checked(tolerance, norm, dtype, sharpness, max_bytes, method, accept)
    target = make_target(function, domain, vectorize=vectorize, trace=trace)
    return make_plan(target, options, Declared(lipschitz, modulus, hessian, jumps), progress=progress)


def make_plan(
    target: Target,
    options: Options,
    declared: Declared,
    *,
    without: frozenset[str] = frozenset(),
    progress: Progress | None = None,
) -> Plan:
    """The plan for a target that has been made already: the best of the methods asked for.

    `without` names methods that have been tried and missed the tolerance.

    Raises:
        PartitaError: what stood in the way, if no method will do.
    """
    knowledge, obstacle = _known(target, options, declared)
    plans: list[Plan] = []
    refused: list[Candidate] = []
    errors: list[PartitaError] = [] if obstacle is None else [obstacle]
    for method, propose in _proposers(target, knowledge, options, progress, declared.curvature):
        if method in without:
            continue
        if method in _SAMPLED and _inputs_unbounded(target, knowledge, options):
            refused.append(
                Candidate(method, "", f"f may jump: what rounding its inputs to {options.semantics} does has no bound")
            )
            continue
        try:
            found = propose(plans)
        except (SizeError, ToleranceError) as error:
            errors.append(error)
            refused.append(_refused(method, error, target, knowledge, options))
            continue
        except BudgetSpentError as error:
            errors.insert(0, error)
            refused.append(Candidate(method, "", "the budget was spent before it was planned"))
            break
        if isinstance(found, Plan):
            plans.append(found)
        else:
            refused.append(found)
    if not plans:
        raise _no_way(target, options, errors, refused)
    rank = _rank_by_size if options.accept == "estimated" else _rank_by_claim
    best, *others = sorted(plans, key=rank)
    rows = [best.as_candidate("smallest with the strongest claim" if others else "", chosen=True)]
    rows += [p.as_candidate(_compared(p, best)) for p in others] + refused
    if knowledge is not None and best.kind == "estimated" and options.accept == "strongest":
        hard = next((c.note for c in refused if c.method == "hard"), "not planned")
        best = replace(
            best, why=(*best.why, f"only an estimate, although something is known of f; the hard head: {hard}")
        )
    again = partial(_plan_again, target, options, declared, without) if options.method == "auto" else None
    return replace(best, candidates=tuple(rows), plan_without=again)


def _inputs_unbounded(target: Target, knowledge: Knowledge | None, options: Options) -> bool:
    """Whether f is an expression that could be proved but for its inputs, which are rounded: no reason to sample instead."""
    rounded = options.dtype != torch.float64 and options.accept == "strongest"
    return target.graph is not None and knowledge is None and rounded


def _plan_again(
    target: Target,
    options: Options,
    declared: Declared,
    before: frozenset[str],
    now: frozenset[str],
    progress: Progress | None,
) -> Plan:
    return make_plan(target, options, declared, without=before | now, progress=progress)


def _refused(
    method: str, error: PartitaError, target: Target, knowledge: Knowledge | None, options: Options
) -> Candidate:
    """The row of a method that raised: for a hard grid that is too large, how large."""
    if isinstance(error, SizeError) and knowledge is not None and not isinstance(target.domain, PointCloud):
        try:
            return replace(forecast_grid(target, knowledge, options), note="more keys than max_bytes hold")
        except SizeError:
            pass
    return Candidate(method, "", str(error).split(". ")[0])


def _known(
    target: Target,
    options: Options,
    declared: Declared,
) -> tuple[Knowledge | None, PartitaError | None]:
    """What is known of f, or why nothing is; a hard head cannot do without."""
    try:
        return gather(target, norm=options.norm, declared=declared), None
    except (NothingKnownError, NotContinuousError) as error:
        if options.method == "hard" or isinstance(target.domain, PointCloud):
            raise
        return None, error


Propose = Callable[[list[Plan]], Plan | Candidate]


def _proposers(
    target: Target,
    knowledge: Knowledge | None,
    options: Options,
    progress: Progress | None,
    curvature: Curvature | None,
) -> list[tuple[str, Propose]]:
    """The methods to try, in an order in which later ones may profit from earlier ones."""

    def hard(plans: list[Plan]) -> Plan | Candidate:
        if knowledge is None:
            return Candidate("hard", "", "nothing is known of how fast f moves")
        if isinstance(target.domain, PointCloud):
            return plan_cover(target, knowledge, options)
        forecast = forecast_grid(target, knowledge, options)
        if any(_is_beaten(forecast, p, options) for p in plans):
            return forecast
        return plan_grid(target, knowledge, options)

    def fitted(_: list[Plan]) -> Plan | Candidate:
        return plan_fitted(target, knowledge, options, progress=progress)

    def pieces(_: list[Plan]) -> Plan | Candidate:
        return plan_pieces(target, knowledge, options)

    def affine(plans: list[Plan]) -> Plan | Candidate:
        if curvature is not None and target.graph is None:
            return plan_curved(target, curvature, options)
        if options.method == "auto":
            if target.graph is not None and knowledge is None:
                return Candidate("affine", "", "f may jump")
            forecast = forecast_affine_grid(target, options)
            if _is_hopeless(forecast) or any(_is_beaten(forecast, p, options) for p in plans):
                return forecast
        return plan_affine_grid(target, knowledge, options)

    def scattered(plans: list[Plan]) -> Plan | Candidate:
        best = min((p.parameters for p in plans if p.kind == "proved"), default=None)
        worth = target.graph is not None and knowledge is not None and target.domain.dimension <= _FEW
        if options.method == "auto" and not (worth and (best is None or best > _SMALL)):
            return Candidate(
                "adaptive", "", f"for up to {_FEW} variables, where other proved heads store over {_SMALL:,} numbers"
            )
        limit = None if options.method != "auto" else best
        return plan_adaptive(target, knowledge, options, max_parameters=limit, progress=progress)

    def averaged(plans: list[Plan], *, method: str) -> Plan | Candidate:
        if options.method == "auto":  # a forecast is cheap, and next to always says that others are smaller
            if target.graph is not None and knowledge is None:
                return Candidate(method, "", "f may jump")
            forecast = forecast_averaged(target, options, method)
            if _is_hopeless(forecast) or any(_is_beaten(forecast, p, options) for p in plans):
                return forecast
        return plan_averaged(target, knowledge, options, method)

    def train(plans: list[Plan]) -> Plan | Candidate:
        few = target.domain.dimension < MANY_VARIABLES
        if options.method == "auto" and (few or any(p.kind != "estimated" for p in plans)):
            return Candidate("train", "", "for five variables and more, where nothing stronger is found")
        return plan_train(target, knowledge, options, progress=progress)

    every: dict[str, Propose] = {
        "pieces": pieces,
        "fitted": fitted,
        "hard": hard,
        "affine": affine,
        "adaptive": scattered,
        "tuned": partial(averaged, method="tuned"),
        "corrected": partial(averaged, method="corrected"),
        "train": train,
    }
    if options.method != "auto":
        return [(options.method, every[options.method])]
    if isinstance(target.domain, PointCloud) or options.sharpness is not None:
        return [("hard", hard)]
    return list(every.items())


def _is_hopeless(forecast: Candidate) -> bool:
    return forecast.keys is None or forecast.keys > _MOST_KEYS


def _is_beaten(forecast: Candidate, plan: Plan, options: Options) -> bool:
    """Whether a plan is smaller and its claim as strong as the forecast's could be."""
    kind = _STRENGTH.get(forecast.kind, 0 if plan.target.graph is not None else 2)
    strong_enough = _STRENGTH[plan.kind] <= kind or options.accept == "estimated"
    return strong_enough and forecast.parameters is not None and plan.parameters <= forecast.parameters


def _rank_by_claim(plan: Plan) -> tuple[int, int]:
    return _STRENGTH[plan.kind], plan.parameters


def _rank_by_size(plan: Plan) -> tuple[int, int]:
    return plan.parameters, _STRENGTH[plan.kind]


def _compared(plan: Plan, best: Plan) -> str:
    if plan.kind != best.kind and plan.parameters < best.parameters:
        return "smaller, but a weaker claim"
    ratio = plan.parameters / best.parameters
    return "as many numbers" if ratio == 1 else f"{ratio:.3g} times the numbers"


def _no_way(target: Target, options: Options, errors: list[PartitaError], refused: list[Candidate]) -> PartitaError:
    """The error that helps most: what the first obstacle says, with what the other methods found."""
    tried = "; ".join(f"{c.method}: {c.note}" for c in refused if c.note)
    if errors:
        first = errors[0]
        return type(first)(f"{first} Tried: {tried}." if tried and len(refused) > 1 else str(first))
    return ToleranceError(
        f"tolerance {options.tolerance:g} is out of reach for {target.label} with method={options.method!r}: {tried}."
    )
