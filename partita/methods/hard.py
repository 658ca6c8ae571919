"""Theorems 4.1 and 4.2 and their corollaries: f at the centers of a product grid, and a softmax so sharp that it picks a cell."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import torch

from partita.arithmetic.precision import Precision
from partita.errors import SizeError, ToleranceError
from partita.functions.regularity import Knowledge, RoughBoxes
from partita.geometry.domains import Array
from partita.geometry.grid import ProductGrid
from partita.heads.table_blocks import largest_size
from partita.methods.grids import GridDraft
from partita.methods.method import Method, Plan, Refusal, Size, keys_text, needs_box, size_text
from partita.methods.request import Request
from partita.proofs.assumptions import PairTable, vouched
from partita.proofs.center_values import GridFacts, MomentProof, grid_terms, optimal_ratio, value_blocks
from partita.proofs.certificate import Term, total
from partita.proofs.claim import Construction, claim, describe_function
from partita.proofs.proof import Given, Progress
from partita.search.spacing import SpacingRule

__all__ = [
    "Hard",
    "floor_refusal",
    "knowledge_of",
    "predicted_terms",
    "steepest_neighbours",
    "stored_numbers",
    "values_at_centers",
    "wider_text",
]

_PAIRS_AT_ONCE = 1 << 18
_MOST_IN_TIME = 1 << 21  # centers on an axis that a limited time leaves room for: planning lists them all


class Hard(Method):
    """`net(z) = Σ_j softmax_j(R(v_j·z − |v_j|²/2)) f(v_j)` over the centers v_j of a product grid.

    Claim, with ω the modulus of f and E the mean under the softmax: `sup|net − f| ≤ ω(√Σ_i sup E(x_i − v_i)²)`, which at
    sharpness κ = R h² ≥ 8 is within 0.14 % of ω(covering radius). No rule that sees f only at those centers can promise less.

    For a pair of boxes the cells are pairs of a K-grid and a Q-grid. Folded, that is the product grid in `m_K + m_Q` dimensions,
    so the bound is the same; in the layers the part in z_K is made by `Linear_K`, and v_j sits in the key where it meets z_Q in the
    query.

    *Theorem*: `self-attention` (4.1, its proof replaced by `grid-moments`), `cross-attention` (4.2); in L_p `self-attention-lp`
    (4.1.1, by `lp-moments` and `lp-jumps`, without Lusin) and `cross-attention-lp` (4.2.1).

    Hypotheses: f obeys its modulus (interval arithmetic vouches if f is an expression, else the caller); f is finite at every
    center (checked).
    """

    name = "hard"
    halves = True
    takes_sharpness = True
    exact = True

    def applies(self, request: Request) -> Refusal | None:
        if refusal := needs_box(request):
            return refusal
        region, outputs = request.target.region, request.target.num_outputs
        if region is not None and math.isinf(request.norm):
            kept = region.volume / request.box.volume  # a ball stores its center as well
            if kept * (region.dimension + outputs) < outputs:
                return Refusal("balls that cover the region take fewer numbers than a grid on the box around it")
        return None if request.knowledge is not None else Refusal("nothing is known about how fast f changes")

    def forecast(self, request: Request) -> Size:
        """By the spacing rule alone: nothing is allocated, however many keys it takes."""
        knowledge = knowledge_of(request)
        counts = _rule(request, knowledge).counts(request.tolerance)
        kind = "proved_given" if knowledge.declared else "proved"
        return Size(
            math.prod(counts),
            stored_numbers(request, counts),
            kind,
            largest=knowledge.magnitude,
            error=request.tolerance,
        )

    def plan(self, request: Request, share: float, progress: Progress | None = None) -> Plan | Refusal:
        """The coarsest grid whose predicted bound meets the tolerance."""
        knowledge = knowledge_of(request)
        rule = _rule(request, knowledge)
        found = _meeting(request, knowledge, rule)
        if isinstance(found, Refusal):
            return found
        draft, terms = found
        parameters = stored_numbers(request, draft.counts)
        window = " × ".join(str(min(2 * q, c)) for q, c in zip(draft.half_windows, draft.counts))
        size = size_text(_bytes(request, draft.counts))
        return Plan(
            request=request,
            maker=self,
            kind="proved_given" if knowledge.declared else "proved",
            keys=math.prod(draft.counts),
            parameters=parameters,
            draft=draft,
            why=(
                keys_text(draft.counts),
                *rule.explain(draft.counts, terms),
                f"what is known about f is {knowledge.source}",
                f"{parameters:,} stored numbers, {size} in {request.precision.name}; a query reads {window} of the keys",
            ),
            error_bound=total(terms),
            sharpness=request.hard_sharpness,
            largest=knowledge.magnitude,
            rounding=sum(t.value for t in terms if t.source != "approximation"),
            counts=draft.counts,
        )

    def build(self, plan: Plan, progress: Progress | None = None, seed: int = 0) -> Construction:
        return values_at_centers(plan.request, plan.draft, knowledge_of(plan.request), progress)


def values_at_centers(
    request: Request,
    draft: GridDraft,
    knowledge: Knowledge,
    progress: Progress | None = None,
    facts: Mapping[str, float] | None = None,
) -> Construction:
    """Evaluate f at every center, attach the values, and add up the terms of the bound; `facts` join those of the certificate."""
    target, known, grid = request.target, knowledge.known, draft.grid(request)
    rough, error = known.jumps if isinstance(known.jumps, RoughBoxes) else None, 0.0

    def blocks() -> Iterator[tuple[torch.Tensor]]:
        nonlocal error
        for values, off in value_blocks(target, grid, request.dtype, rough=rough, progress=progress):
            error = max(error, off)
            yield (values,)

    head, file = draft.filled(request, blocks())
    pairs = steepest_neighbours(grid, head.values) if knowledge.declared else None
    assumptions = vouched(target, known, declared=knowledge.declared, table=pairs)
    proved = MomentProof().prove(head, target, Given(request.tolerance, request.norm, known, error))
    if len(target.domains) == 2:
        theorem = "cross-attention" if math.isinf(request.norm) else "cross-attention-lp"
    else:
        theorem = "self-attention" if math.isinf(request.norm) else "self-attention-lp"
    certificate = claim(
        head,
        describe_function(target, *_first_answers(grid, head.values)),
        target.domains,
        proved.terms,
        dtype=request.dtype,
        theorem=theorem,
        norm=request.norm,
        tolerance=request.tolerance,
        assumptions=assumptions,
        details={
            "type": "grid",
            "counts": list(draft.counts),
            "rates": list(draft.rates),
            "half_windows": list(draft.half_windows),
            "value_error": error,
        },
        known=known.to_json(),
        facts={**_facts(request, draft, grid, knowledge, proved.bound), **(facts or {})},
        proof=proved.details,
    )
    return Construction(head, grid, certificate, file)


def floor_refusal(request: Request, terms: Sequence[Term]) -> Refusal:
    """Why a tolerance cannot be met in this dtype, with the numbers."""
    rest = [t for t in terms if t.source != "approximation"]
    floor = sum(t.value for t in rest)
    parts = ", ".join(f"{t.name} {t.value:.2g}" for t in rest)
    name = request.precision.name
    factor = 2.6 if request.precision.is_half else 2.1  # rounded inputs also lie farther from the centers
    return Refusal(
        f"tolerance {request.asked:g} is below what {name} can promise for {request.target.label}: "
        f"rounding and the window alone add {floor:.3g} ({parts})",
        f"Use {wider_text(request.precision)}a tolerance above {request.stated(factor * floor):.3g}.",
        ToleranceError,
    )


def wider_text(precision: Precision) -> str:
    """What to say of the next wider dtype, before another piece of advice; nothing if there is none."""
    wider = "float32" if precision.is_half else "float64" if precision.rounds_inputs else ""
    return f"dtype=torch.{wider}, or " if wider else ""


def knowledge_of(request: Request) -> Knowledge:
    """What is known about f, or the error that says why nothing is."""
    if request.knowledge is None:
        raise request.obstacle or ToleranceError("nothing is known about how fast f changes")
    return request.knowledge


def _rule(request: Request, knowledge: Knowledge) -> SpacingRule:
    return SpacingRule(
        knowledge.known,
        request.norm,
        request.hard_sharpness,
        request.box,
        request.target.num_outputs,
        request.precision.number,
    )


def _large(count: int) -> str:
    """A number that may be beyond float64."""
    return f"{count:.4g}" if count < 10**300 else f"10^{math.log10(count):.1f}"


def stored_numbers(request: Request, counts: Sequence[int]) -> int:
    """Values, centers and inverse temperatures of a head with so many centers per axis."""
    return math.prod(counts) * request.target.num_outputs + sum(counts) + len(counts)


def _meeting(request: Request, knowledge: Knowledge, rule: SpacingRule) -> tuple[GridDraft, list[Term]] | Refusal:
    """The coarsest grid that will do; what rounding takes is taken from the spacing's aim."""
    aim, terms = request.tolerance, []
    for _ in range(100):
        counts = rule.counts(aim)
        if _bytes(request, counts) > request.max_bytes:
            return _too_large(request, knowledge, rule, counts)
        if request.best_effort and max(counts) > _MOST_IN_TIME:
            return Refusal(
                f"it needs {max(counts):,} centers on one axis, which takes longer than a budget allows",
                "Leave the budget out, or use a larger tolerance.",
                ToleranceError,
            )
        draft = GridDraft(counts, tuple(rule.rates(counts).tolist()), rule.half_windows(counts))
        terms = predicted_terms(request, knowledge, draft)
        bound = total(terms)
        if bound <= request.tolerance:
            return draft, terms
        rest = bound - sum(t.value for t in terms if t.source == "approximation")
        aim = min(aim * (1 - 1e-9), aim - (bound - request.tolerance) * (1 + 1e-9))
        if rest >= 0.5 * request.tolerance or aim <= 0:
            break
    return floor_refusal(request, terms)


def predicted_terms(request: Request, knowledge: Knowledge, draft: GridDraft) -> list[Term]:
    """The terms of the bound, with |f| ≤ magnitude in place of the values, which are not known yet."""
    precision, magnitude = request.precision, knowledge.magnitude
    stored = precision.value_unit if precision.rounds_inputs else 0.0  # float64 answers are stored as they are
    lost = precision.value_tiniest if precision.is_half else 0.0
    computed = 64 * 2.0**-53 if request.target.graph is not None else 0.0
    facts = GridFacts.planned(
        draft.grid(request).axes,
        request.box,
        rates=draft.rates,
        half_windows=draft.half_windows,
        precision=precision,
        outputs=request.target.num_outputs,
        largest=magnitude,
        spread=2 * magnitude,
        value_error=(stored + computed) * magnitude + lost,
    )
    return grid_terms(facts, knowledge.known, request.norm)


def _bytes(request: Request, counts: Sequence[int]) -> int:
    return request.precision.bytes_of(stored_numbers(request, counts), sum(counts) + len(counts))


def _too_large(request: Request, knowledge: Knowledge, rule: SpacingRule, counts: tuple[int, ...]) -> Refusal:
    """The refusal with the best tolerance that fits into max_bytes."""
    if _bytes(request, (1,) * len(counts)) > request.max_bytes:
        return Refusal(f"max_bytes = {request.max_bytes:,} does not hold even a single key", "Raise it.", SizeError)
    low = high = request.tolerance
    while _bytes(request, rule.counts(high)) > request.max_bytes:
        low, high = high, 2 * high
    for _ in range(30):
        middle = math.sqrt(low * high)
        fits = _bytes(request, rule.counts(middle)) <= request.max_bytes
        low, high = (low, middle) if fits else (middle, high)
    return Refusal(
        f"tolerance {request.asked:g} needs {' × '.join(map(str, counts))} = {_large(math.prod(counts))} keys, "
        f"{size_text(_bytes(request, counts))} of tensors; max_bytes allows {size_text(request.max_bytes)}",
        f"The best tolerance that fits is about {request.stated(high * 1.001):.4g} ({math.prod(rule.counts(high)):,} keys, "
        "one value per cell); or raise max_bytes.",
        SizeError,
        "proved_given" if knowledge.declared else "proved",
        keys=math.prod(counts),
        parameters=stored_numbers(request, counts),
        largest=knowledge.magnitude,
        reached=request.tolerance,
    )


def _first_answers(grid: ProductGrid, values: torch.Tensor) -> tuple[Array, Array]:
    """The first centers and their values: what a black box is known by."""
    count = min(grid.num_cells, 4096)
    return grid.centers_of(np.arange(count)), values[:count].double().numpy()


def _facts(
    request: Request, draft: GridDraft, grid: ProductGrid, knowledge: Knowledge, bound: float
) -> dict[str, float]:
    sharpness = [r * g.gap_min**2 for r, g in zip(draft.rates, grid.geometry) if g.count > 1]
    found = {"covering_radius": grid.covering_radius, "sharpness": min(sharpness, default=0.0)}
    ratio = optimal_ratio(bound, knowledge.known, grid.covering_radius) if math.isinf(request.norm) else None
    return found if ratio is None else {**found, "optimal_ratio": ratio}


def steepest_neighbours(grid: ProductGrid, values: torch.Tensor) -> PairTable | None:
    """Of all pairs of neighbouring centers, the one per axis between which the table moves fastest."""
    scale, precision = largest_size(values), Precision.of(values.dtype)
    slack = scale * (4 * precision.value_unit if precision.rounds_inputs else 0.0)  # storing the values moved them
    x, y, moved = [], [], []
    for i, axis in enumerate(grid.axes):
        if len(axis) < 2:
            continue
        step, steepest, at, most = math.prod(grid.counts[i + 1 :]), -math.inf, 0, 0.0
        for start in range(0, grid.num_cells - step, _PAIRS_AT_ONCE):  # cell j and cell j + step, unless j ends a line
            stop = min(start + _PAIRS_AT_ONCE, grid.num_cells - step)
            near, far = (values[a:b].double().numpy() for a, b in ((start, stop), (start + step, stop + step)))
            place = np.arange(start, stop) // step % len(axis)
            inside = np.flatnonzero(place < len(axis) - 1)
            moves = np.abs(far[inside] - near[inside]).max(axis=1)
            slopes = moves / np.diff(axis)[place[inside]]
            if len(slopes) and slopes.max() > steepest:
                k = int(slopes.argmax())
                steepest, at, most = slopes[k], start + int(inside[k]), float(moves[k])
        moved.append(max(most - slack, 0.0))
        x.append(at)
        y.append(at + step)
    if not x:
        return None
    return PairTable(grid.centers_of(x), grid.centers_of(y), np.array(moved), scale, "all neighbouring centers")
