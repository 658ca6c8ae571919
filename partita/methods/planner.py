"""The planner: asks every method for a head, and takes the smallest one with the strongest claim."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from partita import methods as registry
from partita.arithmetic.progress import report as report_progress
from partita.arithmetic.rounding import add_up
from partita.errors import (
    BudgetSpentError,
    DomainError,
    EvaluationsSpentError,
    PartitaError,
    SizeError,
    ToleranceError,
    UnsupportedError,
)
from partita.functions.curvature import FIRST_LINES, attack_curvature
from partita.geometry.domains import Box, PointCloud
from partita.heads.head import count_text
from partita.methods.method import (
    FORMS,
    Candidate,
    Method,
    Plan,
    Refusal,
    Size,
    candidate_rows,
    choice_rows,
    size_text,
)
from partita.methods.request import Request
from partita.proofs.assumptions import steepest_table, vouched
from partita.proofs.claim import Construction
from partita.proofs.proof import Progress

__all__ = ["best_plan", "constructed", "report"]

_MANY = 4  # variables, from which on networks are planned first
_STRENGTH = {"proved": 0, "proved_given": 1, "estimated": 2}
_MOST_EVALUATIONS = 1 << 17  # of a black box that "auto" chooses to make, unless max_evaluations grants more


def best_plan(
    request: Request,
    *,
    methods: Sequence[Method] | None = None,
    without: frozenset[str] = frozenset(),
    progress: Progress | None = None,
) -> Plan:
    """The best of the methods asked for.

    If time or evaluations run out before a head is found that meets the tolerance, the plan is that of the best head so far.

    Args:
        methods: those to choose from, in this order; all of METHODS if None.
        without: names of methods that were built and missed the tolerance.

    Raises:
        PartitaError: what stood in the way, if no method has a head.
    """
    request = replace(request, progress=progress)
    with suppress(BudgetSpentError):
        _test_declared(request)
    plans: list[Plan] = []
    rows: list[Candidate] = []
    refusals: list[Refusal] = []
    untried: dict[str, str] = {}  # of each form the first reason
    spent: BudgetSpentError | None = None
    for name, namesakes in _methods_by_name(request, registry.METHODS if methods is None else methods):
        if name in without:
            continue
        form = namesakes[0].form
        try:
            report_progress(progress, f"planning: {name}")
            found = _proposal(namesakes, request, plans, progress)
        except BudgetSpentError as error:
            spent = error
            rows.append(Refusal("the budget was spent before it was planned").row(name, form))
            break
        if isinstance(found, Plan):
            plans.append(found)
        else:
            rows.append(replace(found.row(name, form), evaluations=_evaluations(namesakes, request, found.keys)))
            refusals += [found] if isinstance(found, Refusal) else []
            if isinstance(found, Refusal) and not found.tried:
                untried.setdefault(form, found.reason)
    missing = [replace(r.best, request=request) for r in refusals if r.best is not None]
    sure = bool(plans)
    fallback = min(missing, key=lambda p: p.error_estimate or 0.0, default=None)
    if not plans and fallback is not None:
        close = (fallback.error_estimate or 0.0) <= request.tolerance  # there is a chance that its bound is too
        limited = spent is not None or request.target.graph is None
        if close or (limited and request.best_effort):
            plans = [fallback]
    if not plans:
        raise _no_head(request, refusals, rows, spent)
    best, *others = sorted(plans, key=lambda p: _rank(p, request))
    because = _because(best, others, untried, sure=sure)
    first = best.as_candidate("smallest with the strongest claim" if others else "", because=because)
    table = (first, *(p.as_candidate(_compared(p, best)) for p in others), *rows)
    if best.kind == "estimated" and request.accept == "strongest" and request.knowledge is not None:
        names = {"hard": "the hard head", "heads": "several heads", "layers": "several layers"}
        said = "; ".join(f"{names[c.method]}: {c.note}" for c in rows if c.method in names) or "no proof was planned"
        note = f"only an estimate, although something is known about f; {said}"
        best = replace(best, why=(*best.why, note))
    return replace(best, why=_why(best), candidates=table, fallback=fallback)


def _test_declared(request: Request) -> None:
    """Look for a contradiction between a black box and what is declared about it, before f is evaluated at length.

    Raises:
        LipschitzContradictedError: two points at which f moves faster than declared.
        CurvatureContradictedError: three points at which f bends more than declared.
    """
    target, curvature = request.target, request.declared.curvature
    if target.graph is None and curvature is not None and isinstance(target.domain, Box):
        attack_curvature(target, curvature, lines=target.calls.allowance(3 * FIRST_LINES) // 3)
    if target.graph is not None or request.knowledge is None:
        return
    known = request.knowledge.known
    vouched(request.target, known, declared=True)
    model = request.for_search().target if request.is_auto else request.target
    if model.interpolated:
        vouched(request.target, known, declared=True, table=steepest_table(request.target, model))


def constructed(plan: Plan, progress: Progress | None = None, seed: int = 0) -> tuple[Construction, Plan]:
    """The plan's head, and the plan it was built from: planned again for a smaller share where a proof misses the tolerance."""
    maker, request, trial = plan.maker, plan.request, 0
    best = plan.maker.build(plan, progress, seed), plan
    shares = list(maker.shares)
    while best[0].certificate.error > request.tolerance:
        if maker.exact or not request.distrust():
            shares = shares[1:]
        trial += 1
        try:
            again = _planned(maker, request, shares[0], progress) if shares else None
            if not isinstance(again, Plan) or _beyond_limits(again) is not None:
                break
            plan = replace(again, why=_why(again), candidates=plan.candidates)
            found = maker.build(plan, progress, seed + trial), plan  # an estimate needs points that no plan has seen
        except BudgetSpentError:
            break
        best = min(best, found, key=lambda pair: pair[0].certificate.error)
    return best


def _why(plan: Plan) -> tuple[str, ...]:
    """The explanation of a plan, with what is to be said about its values and where f comes from."""
    return (*plan.why, *(text for text in (plan.caveat, plan.request.target.origin) if text))


def _methods_by_name(request: Request, methods: Sequence[Method]) -> Iterator[tuple[str, list[Method]]]:
    """The methods to try; several of one name serve different domains or functions."""
    if not request.is_auto:
        names = [request.method]
    elif isinstance(request.target.domain, PointCloud) or request.sharpness is not None:
        names = ["hard"]
    else:
        names = list(dict.fromkeys(m.name for m in methods))
        if (
            request.box.dimension >= _MANY
        ):  # one head is a long shot, and what a network stores limits the search for one
            networks = {m.name for m in methods if m.is_network}
            names.sort(key=lambda name: name not in networks)
    for name in names:
        yield name, [m for m in methods if m.name == name]


def _proposal(
    methods: Sequence[Method], request: Request, plans: Sequence[Plan], progress: Progress | None
) -> Plan | Size | Refusal:
    """The plan of the first of these methods that applies, or why there is none."""
    if request.is_auto and (hopeless := _hopeless(methods[0], request, plans)) is not None:
        return hopeless
    refusals = [_half_refusal(m, request) or m.applies(request) for m in methods]
    method = next((m for m, refusal in zip(methods, refusals) if refusal is None), None)
    if method is None:
        # the one that came closest names its own error; domains that belong to another method come first
        return next((r for r in reversed(refusals) if r is not None and r.error), refusals[0]) or Refusal("")
    if method.estimates and _inputs_unbounded(request):
        return Refusal(f"f may jump, so the effect of rounding its inputs to {request.precision.name} has no bound")
    try:
        if request.is_auto:
            seen = request if method.exact else request.for_search()
            if (idle := method.worth(seen, plans)) is not None:
                return replace(idle, tried=False)
            forecast = method.forecast(seen)
            if isinstance(forecast, Refusal) or (forecast is not None and _is_beaten(forecast, method, plans, request)):
                return forecast
        found = _planned(method, request, method.shares[0], progress, plans)
    except (SizeError, ToleranceError, DomainError) as error:
        found = Refusal.of(error)
        if request.target.tail is not None:  # a search knows the clipped function only
            asked, tail = request.asked, request.target.tail.norm
            found = replace(found, reason=f"{found.reason} (of the tolerance {asked:g}, the tail takes {tail:.3g})")
    if isinstance(found, Plan):
        given, cut = request.target.tail_declared and found.kind == "proved", request.target.tail
        found = replace(found, kind="proved_given" if given else found.kind)
        if cut is not None:
            found = replace(found, error_bound=add_up(found.error_bound, cut.norm))
        beyond = _beyond_limits(found)
        if beyond is not None:
            return beyond
        if found.maker.exact and (found.evaluations or 0) > _granted(request):
            return _too_many(found)
    return found


def _hopeless(method: Method, request: Request, plans: Sequence[Plan]) -> Refusal | None:
    """Why one head in many variables is not looked for, given a network with a claim that no head could surpass; None if it is.

    Of a black box about which nothing is declared, every head has an estimate.
    """
    graph = request.target.graph
    sampled = graph is None and request.knowledge is None and request.declared.curvature is None
    networks = [p.parameters for p in plans if p.maker.is_network and (p.kind == "proved" or sampled)]
    if not networks or method.is_network or request.box.dimension < _MANY or (graph is None and not sampled):
        return None
    variables = request.box.dimension
    if graph is not None:
        variables = len({node.parameters for node in graph.nodes if node.operation == "input"})
    if 2**variables <= min(networks):
        return None
    return Refusal(
        f"not looked for: in {variables} variables a grid has {count_text(2**variables)} keys or more, and a network stores "
        f"{min(networks):,} numbers",
        tried=False,
    )


def _half_refusal(method: Method, request: Request) -> Refusal | None:
    """Why a head of this method cannot hold its values in a half type; None if it can, or need not."""
    if not request.precision.is_half or (method.halves and isinstance(request.target.domain, Box)):
        return None
    able = ", ".join(dict.fromkeys(repr(m.name) for m in registry.METHODS if m.halves))
    return Refusal(
        f"there are no such heads with {request.precision.name} values, only heads on product grids over boxes",
        f"Use dtype=torch.float32, or a box and one of the methods {able}.",
        None if request.is_auto and isinstance(request.target.domain, Box) else UnsupportedError,
    )


def _planned(
    method: Method, request: Request, share: float, progress: Progress | None, plans: Sequence[Plan] = ()
) -> Plan | Refusal:
    """A plan for the request; where the method allows it, found with an interpolant in place of a black box.

    What was refused once, with as much room, is refused again without a search.
    """
    limited = _limited(request if method.exact else request.for_search(), plans)
    question = (method, share, limited.max_bytes, limited.target)
    refusals: dict[Any, Refusal] = request.refusals
    if question not in refusals:
        found = method.plan(limited, share, progress)
        if isinstance(found, Plan):
            found = replace(found, request=request)
            return replace(found, evaluations=_evaluations([method], request, found.keys))
        refusals[question] = found
    return refusals[question]


def _evaluations(methods: Sequence[Method], request: Request, keys: int | None) -> int | None:
    """How often a black box is evaluated in all if a head of the first that applies is built; None for expressions."""
    if request.target.graph is not None or keys is None:
        return None
    method = next((m for m in methods if m.applies(request) is None), methods[0])
    return request.target.calls.rows + method.evaluations_to_build(request.target, keys)


def _granted(request: Request) -> float:
    """How often a black box may be evaluated for a claim that the caller's declarations make possible."""
    most = request.target.calls.most
    return _MOST_EVALUATIONS if request.is_auto and math.isinf(most) else most


def _too_many(found: Plan) -> Refusal:
    return Refusal(
        f"its head of {found.keys:,} keys needs {found.evaluations:,} evaluations of f; {_granted(found.request):,} are allowed",
        "Use a larger tolerance, or raise max_evaluations.",
        EvaluationsSpentError,
        found.kind,
        found.keys,
        found.parameters,
    )


def _inputs_unbounded(request: Request) -> bool:
    """Whether f is an expression that could be proved but for its inputs, which are rounded: no reason to sample instead."""
    rounded = request.precision.rounds_inputs and request.accept == "strongest"
    return request.target.graph is not None and request.knowledge is None and rounded


def _is_beaten(forecast: Size, method: Method, plans: Sequence[Plan], request: Request) -> bool:
    """Whether the head would be too large to look for, or a plan is smaller with a claim as strong as it could make."""
    if method.most_keys is not None and forecast.keys > method.most_keys:
        return True
    strongest = _STRENGTH.get(forecast.kind, 0 if request.target.graph is not None else 2)
    return any(
        p.parameters <= forecast.parameters and (_STRENGTH[p.kind] <= strongest or request.accept == "estimated")
        for p in plans
    )


def _limited(request: Request, plans: Sequence[Plan]) -> Request:
    """The request with no more room than the smallest proved head takes: larger heads need not be searched for."""
    proved = [p.bytes for p in plans if p.kind == "proved"]
    return replace(request, max_bytes=min(request.max_bytes, *proved)) if request.is_auto and proved else request


def _beyond_limits(found: Plan) -> Refusal | None:
    """Why the head is larger than max_bytes, or its values than max_value, allow; None if it is not.

    Where f is evaluated at the centers when the head is built, the values are looked at then.
    """
    request, size = found.request, (found.kind, found.keys, found.parameters, found.largest)
    if found.bytes > request.max_bytes:
        reason = f"its head of {found.keys:,} keys takes {size_text(found.bytes)}; max_bytes allows {size_text(request.max_bytes)}"
        return Refusal(reason, "Use a larger tolerance, or raise max_bytes.", SizeError, *size[:3])
    if getattr(found.draft, "values", None) is not None and found.largest > request.max_value:
        reason = f"its values reach {found.largest:.4g}; max_value allows {request.max_value:g}"
        return Refusal(reason, "Use a larger tolerance, or raise max_value.", SizeError, *size)
    return None


def _rank(found: Plan, request: Request) -> tuple[int, int]:
    strength = _STRENGTH[found.kind]
    return (found.parameters, strength) if request.accept == "estimated" else (strength, found.parameters)


def _compared(found: Plan, best: Plan) -> str:
    if found.kind != best.kind and found.parameters < best.parameters:
        return "smaller, but a weaker claim"
    ratio = found.parameters / best.parameters
    return "as many stored numbers" if ratio == 1 else f"{ratio:.3g} times as many stored numbers"


def _because(best: Plan, others: Sequence[Plan], untried: Mapping[str, str], *, sure: bool) -> str:
    """Why this plan was chosen among one head, several heads and several layers, in one sentence.

    Args:
        best: the plan.
        others: the other plans, best first.
        untried: for each form of which some method was not tried, why.
        sure: whether the plan meets the tolerance.
    """
    request, form = best.request, best.maker.form
    if not request.is_auto:
        return f"method={request.method!r} was asked for, and no other method was tried."
    if isinstance(request.target.domain, PointCloud):
        return "Heads for point clouds are hard heads, so no other method was tried."
    if request.sharpness is not None:
        return "Under a sharpness that is given only hard heads are looked for, so no other method was tried."
    one = form == FORMS[0]
    limits = [f"{name}={x}" for name in ("max_heads", "max_layers") if (x := getattr(request, name)) is not None]
    said = f"within {' and '.join(limits)} " * bool(limits) + f"{form} {'was' if one else 'were'} chosen"
    said, store = said[0].upper() + said[1:], f"{'it stores' if one else 'they store'} {best.parameters:,} numbers"
    if not sure:
        return f"{said}: no head was found that is sure to meet the tolerance, and this one comes closest."
    rival = next((p for p in others if p.maker.form != form), None)
    if rival is not None:
        other = f"{rival.maker.form} {'stores' if rival.maker.form == FORMS[0] else 'store'} {rival.parameters:,}"
        if _STRENGTH[rival.kind] > _STRENGTH[best.kind] and rival.parameters < best.parameters:
            return f"{said}, because the error is {best.kind}: {other}, but with an error that is only {rival.kind}."
        claims = f"both errors are {best.kind}"
        if rival.kind != best.kind:
            claims = f"the error is {best.kind}, and would be {rival.kind} otherwise"
        if rival.parameters == best.parameters:
            return f"{said}, because {store}, and {rival.maker.form} would store no fewer; {claims}."
        return f"{said}, because {store} and {other}; {claims}."
    networks = next((untried[other] for other in FORMS[1:] if other in untried), "")
    if one and networks:
        return f"{said}; {store}, and networks of heads are {networks}."
    if not one and FORMS[0] in untried:
        return f"{said}; one head was {untried[FORMS[0]]}."
    return f"{said}, because it is the only one of the three choices that was found."


def _no_head(
    request: Request, refusals: Sequence[Refusal], rows: Sequence[Candidate], spent: BudgetSpentError | None
) -> PartitaError:
    """The error that helps most, with what the other methods found: time or room that was missing, then the first obstacle.

    Where a method was asked for that needs no knowledge about f, a lack of knowledge is no obstacle, and its own reason is given.
    """
    tried = "; ".join(f"{row.method}: {row.note}" for row in rows if row.note)
    no_room = next((r.exception() for r in refusals if r.error is SizeError), None)
    others = [r.exception() for r in refusals if r.error is not None]
    samples = not request.is_auto and any(m.estimates for m in registry.METHODS if m.name == request.method)
    obstacle = None if samples and refusals else request.obstacle
    first = next((e for e in (spent, no_room, obstacle, *others) if e is not None), None)
    named = first is None
    if first is None:
        label, asked = request.target.label, f"with method={request.method!r}"
        first = ToleranceError(f"tolerance {request.asked:g} is out of reach for {label} {asked}: {tried}.")
    reached = [(r.error, r.method) for r in rows if r.error is not None and request.tolerance < r.error < math.inf]
    if reached:
        least, method = min(reached)
        advice = f"The smallest error that was reached is {request.stated(least):.3g} (method {method}): "
        first = type(first)(first.reason.rstrip("."), f"{advice}try tolerance={request.stated(1.2 * least):.2g}.")
    return type(first)(f"{first} Tried: {tried}.") if tried and len(rows) > 1 and not named else first


def report(candidates: Sequence[Candidate], *, built: bool) -> str:
    """What was considered, the chosen one marked: every method, then the three choices side by side, then why, in one sentence.

    Only the bound of a head that was built is proved.
    """
    tables = [_aligned(candidate_rows(candidates, built=built), 3), _aligned(choice_rows(candidates, built=built), 4)]
    because = next((c.because for c in candidates if c.chosen), "")
    return "\n\n".join(text for text in (*tables, because) if text)


def _aligned(rows: Sequence[tuple[str, ...]], words: int) -> str:
    """Rows as lines; the first columns are words, then come figures, and a remark at the end."""
    widths = [max(len(x) for x in column) for column in zip(*(r[:-1] for r in rows))]
    lines = (
        (
            *(x.ljust(w) for x, w in zip(r[:words], widths)),
            *(x.rjust(w) for x, w in zip(r[words:-1], widths[words:])),
            r[-1],
        )
        for r in rows
    )
    return "\n".join("  ".join(line).rstrip() for line in lines)
