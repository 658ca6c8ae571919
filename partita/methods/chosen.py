"""A head whose keys, temperature and kind of values the caller chooses, certified as it is: no tolerance is asked for.

The values are made as the methods make them, and the bound is that of whichever proof comes closest.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import torch

from partita.arithmetic.arguments import is_number
from partita.arithmetic.precision import Precision
from partita.errors import DomainError, ShapeError, SizeError, UnsupportedError
from partita.functions.curvature import LINES, attack_curvature
from partita.functions.regularity import Knowledge, Known
from partita.functions.target import Target
from partita.geometry.domains import Array, Box, PointCloud
from partita.geometry.grid import ProductGrid
from partita.geometry.moments import window_for
from partita.heads.grid_head import GridHead
from partita.heads.head import FoldedHead
from partita.heads.scattered_head import ScatteredHead
from partita.methods.grids import GridDraft
from partita.methods.hard import steepest_neighbours
from partita.methods.method import Candidate, keys_text, needs_box, size_text
from partita.methods.request import Request
from partita.methods.soft_values import can_be_proved, input_assumptions
from partita.methods.tangents import curvature_assumptions, tangent_values
from partita.proofs.assumptions import PairTable, undefined_roots, vouched
from partita.proofs.cell_proof import CellProof, CurvatureProof, is_hard, largest_value, overlaps_for
from partita.proofs.center_values import MomentProof, lp_factor, value_size, value_table
from partita.proofs.certificate import Assumption, Certificate
from partita.proofs.claim import Construction, claim, function_of
from partita.proofs.proof import Given, Progress, Proof, Proved, tightest
from partita.proofs.sampled import sampled_error
from partita.proofs.taylor_proof import TaylorProof, running_soft
from partita.proofs.worst_point import attacked, require_unrefuted
from partita.search.affine_cells import affine_cells
from partita.search.averaged_values import corrected_values, tuned_values
from partita.search.grid_fit import fit_values
from partita.search.interpolant import interpolate

__all__ = ["VALUES", "Chosen", "chosen_head", "head_at", "reported"]

VALUES = ("centers", "corrected", "fitted", "affine")
_THEOREM = "chosen-temperature"
_LEFT_OUT = 1e-17  # of the mass on an axis, that windows may leave out
_CLOSE, _CLOSE_IN_SPACE = (
    1.02,
    1.1,
)  # times the worst error seen: bounds that close will do, in up to two variables and in more
_MOST_BOXES = 1 << 15  # expected, of a proof by polynomials where another proof has a bound already
_SPREAD = 1e4  # times the range of f, that fitted values may spread
_MOST_FITTED = 256  # keys on an axis
_STAND_IN, _FITTED_POINTS = (
    1e-7,
    5_000,
)  # of the range of f, by which an interpolant may miss it; points for it, at most
_SEEN = 48  # points that tell this range
_NO_TOLERANCE = "chosen by the caller: no tolerance was set"


@dataclass(frozen=True, eq=False)
class Chosen:
    """A head that the caller chose, attacked and certified, with what its report says."""

    construction: Construction
    why: tuple[str, ...]
    candidates: tuple[Candidate, ...]


@dataclass(frozen=True, eq=False)
class _Values:
    """The tensors of a head, `(cells, out)` and `(cells, out, m)`, and what a claim about them may rest on.

    Attributes:
        error: a bound of `|V_j − f(v_j)|` where the values are f at the centers. table: of pairs of values, to attack a modulus.
        known: what the proof by declared second derivatives needs; empty where none are declared.
        assumptions: what the caller vouched for, where f need not be evaluated again.
    """

    values: torch.Tensor
    slopes: torch.Tensor | None = None
    error: float | None = None
    table: PairTable | None = None
    known: Mapping[str, Any] = field(default_factory=dict)
    assumptions: tuple[Assumption, ...] = ()


def chosen_head(
    request: Request,
    keys: int | Sequence[int],
    sharpness: float | Sequence[float],
    values: Any,
    ghosts: int | Sequence[int] = 0,
    *,
    seed: int = 0,
    progress: Progress | None = None,
) -> Chosen:
    """The head with these keys per axis, ghosts included, at this sharpness κ_i = R_i h_i².

    Raises:
        UnsupportedError, ShapeError, DomainError: an option is out of range, or does not fit the domain.
        SizeError: the head would take more than max_bytes.
    """
    if not isinstance(values, str) or values not in VALUES:
        shown = repr(values) if isinstance(values, str) else f"a {type(values).__name__}"
        raise UnsupportedError(f"values is {shown}; with keys=, expected one of {', '.join(map(repr, VALUES))}.")
    box, m = request.box, request.box.dimension
    if isinstance(request.target.domain, PointCloud):
        raise UnsupportedError("pa.head needs a box or a region, not a point cloud", "Use pa.compile.")
    if refusal := needs_box(request):
        raise UnsupportedError(f"{request.target.label}: a head on a grid {refusal.reason}", "Choose a smaller box.")
    if request.target.tail is not None:
        raise UnsupportedError(
            f"{request.target.label} is not bounded on the domain; it must be clipped, and pa.head cannot choose the clip without "
            "a tolerance",
            "Use pa.compile.",
        )
    counts, beyond = _integers("keys", keys, m, least=1), _integers("ghosts", ghosts, m, least=0)
    if any(p - 2 * g < min(1 + g, 2) for p, g in zip(counts, beyond)) or (any(beyond) and values == "affine"):
        raise DomainError(
            f"ghosts is {ghosts} with keys {keys} and values {values!r}; expected keys ≥ 2·ghosts + 2 on axes with ghosts "
            "(ghosts are among the keys), and none for affine values."
        )
    kappas = _sharpness(sharpness, m)
    spacing = box.sides / (np.array(counts) - 2 * np.array(beyond))
    rates = tuple(request.precision.rates(np.array(kappas), spacing).tolist())
    slopes = request.box.dimension if values == "affine" else 0
    stored = math.prod(counts) * request.target.num_outputs * (1 + slopes) + sum(counts) + m
    if stored * request.precision.item_bytes > request.max_bytes:
        raise SizeError(
            f"{keys_text(counts)} take {size_text(stored * request.precision.item_bytes)}; max_bytes allows "
            f"{size_text(request.max_bytes)}",
            "Use fewer keys, or raise max_bytes.",
        )
    draft = GridDraft(counts, rates, (), beyond if any(beyond) else None)
    grid = draft.grid(request)
    found = _values(request, grid, values, beyond, kappas, rates, seed, progress)
    origin = None if found.slopes is None else _origin(request)
    head = _grid_head(grid, rates, found.values, found.slopes, origin, request.target)
    made = {"type": "grid", "method": "chosen", "made": values}
    certificate = _certified(head, request, found, made, seed, progress)
    return reported(head, certificate, request.target, values, keys_text(counts), _lines(certificate, beyond))


def head_at(
    head: FoldedHead,
    certificate: Certificate,
    target: Target,
    sharpness: float | Sequence[float],
    *,
    seed: int = 0,
    progress: Progress | None = None,
) -> Chosen:
    """The same centers and values at another temperature, certified again.

    Raises:
        UnsupportedError: the centers do not lie on a grid, or the claim would need the function, which is not stored.
    """
    if not isinstance(head, GridHead):
        raise UnsupportedError(
            f"this {type(head).__name__} has no spacing h, so that κ = R h² is not defined; expected a head on a product grid",
            "Make it again at another temperature, with pa.head(…, centers=…, inverse_temperature=R).",
        )
    if target.tail is not None:
        raise UnsupportedError(
            f"{target.label} is not bounded on the domain; the temperature of a clipped head cannot be changed."
        )
    m, precision = len(head.counts), Precision.of(head.dtype)
    axes = [a.double().cpu().numpy() for a in head.axes]
    sides = target.box.sides.tolist()
    spacing = np.array([(a[-1] - a[0]) / (len(a) - 1) if len(a) > 1 else s for a, s in zip(axes, sides)])
    rates = tuple(precision.rates(np.array(_sharpness(sharpness, m)), spacing).tolist())
    grid = head.partition(target.box)
    slopes = None if head.value_slopes is None else head.value_slopes.detach().cpu().clone()
    origin = None if head.origin is None else head.origin.cpu().clone()
    values = head.values.detach().cpu().clone()
    again = _grid_head(grid, rates, values, slopes, origin, target)
    request = _request_again(certificate, target, head.dtype)
    known = dict(certificate.known) if "curvature" in certificate.known else {}
    error = None
    if "value_error" in certificate.model:
        error = float(certificate.model["value_error"])
    kept = tuple(a for a in certificate.assumptions if a.about != "platform")
    found = _Values(values, slopes, error, None, known, kept)
    made = {k: certificate.model[k] for k in ("type", "method", "made") if k in certificate.model}
    stated = certificate.function
    renewed = _certified(again, request, found, {"type": "grid", **made}, seed, progress, function=stated)
    name = str(made.get("made", made.get("method", "centers")))
    note = "the same centers and values at another temperature"
    return reported(again, renewed, target, name, keys_text(head.counts), _lines(renewed, ()), note)


def _per_axis(given: Any, m: int) -> list[Any]:
    """One number for all axes or a sequence of them as a list; empty for anything else."""
    return [given] * m if is_number(given) else list(given) if isinstance(given, Sequence | np.ndarray) else []


def _integers(name: str, given: int | Sequence[int], m: int, *, least: int) -> tuple[int, ...]:
    listed = _per_axis(given, m)
    if len(listed) != m or not all(is_number(n) and least <= n < math.inf and n == math.floor(n) for n in listed):
        axes = f"one for all {m} axes, or {m} of them" if m > 1 else "one"
        raise ShapeError(f"{name} is {given!r}; expected whole numbers ≥ {least}: {axes}.")
    return tuple(int(n) for n in listed)


def _sharpness(given: float | Sequence[float], m: int) -> tuple[float, ...]:
    listed = _per_axis(given, m)
    if len(listed) != m or not all(is_number(k) and 0 < k < math.inf for k in listed):
        axes = f", one for all {m} axes or {m} of them" if m > 1 else ""
        raise UnsupportedError(f"sharpness is {given!r}; expected a finite κ = R h² > 0{axes}.")
    return tuple(float(k) for k in listed)


@np.errstate(all="ignore")  # numbers out of range end in an error of the head's
def _values(
    request: Request,
    grid: ProductGrid,
    values: str,
    ghosts: tuple[int, ...],
    kappas: tuple[float, ...],
    rates: tuple[float, ...],
    seed: int,
    progress: Progress | None,
) -> _Values:
    target, dtype = request.target, request.dtype
    if values == "centers" and not any(ghosts):
        table, error = value_table(target, grid, dtype, progress=progress)
        declared = request.knowledge is not None and request.knowledge.declared
        return _Values(table, None, error, steepest_neighbours(grid, table) if declared else None)
    if values == "affine":
        curvature = request.declared.curvature
        if curvature is None or target.graph is not None:
            level, slopes = affine_cells(target, grid, request.value_axes)
            return _Values(torch.tensor(level).to(dtype), torch.tensor(slopes).to(dtype))
        attacks = target.calls.allowance(3 * LINES) // 3
        ratio = attack_curvature(target, curvature, lines=attacks, seed=seed)
        level, slopes, known = tangent_values(target, grid, request.value_axes, curvature, progress)
        stated = curvature_assumptions(curvature, ratio, attacks)
        return _Values(torch.tensor(level).to(dtype), torch.tensor(slopes).to(dtype), known=known, assumptions=stated)
    if values == "fitted":
        made = _fitted(request, grid.counts, ghosts, rates)
    else:
        made = tuned_values(target, grid) if values == "centers" else corrected_values(target, grid, ghosts, kappas)
    return _Values(torch.tensor(made).to(dtype))


def _fitted(request: Request, counts: tuple[int, ...], ghosts: tuple[int, ...], rates: tuple[float, ...]) -> Array:
    target, domain = request.target, request.target.domain
    if max(counts) > _MOST_FITTED:
        raise UnsupportedError(
            f"values are fitted on up to {_MOST_FITTED} keys per axis; keys has {max(counts):,}",
            "Use fewer keys, or values='corrected'.",
        )
    seen = target(np.concatenate([domain.sample(_SEEN, np.random.default_rng(3)), domain.corners(16)]))
    size = max(float(np.ptp(seen, axis=0).max()), 1e-12 * float(np.abs(seen).max()), 1e-300)
    # a black box is interpolated first: a fit evaluates its function thousands of times
    function: Callable[[Array], Array] = target
    if target.graph is None and isinstance(domain, Box):
        most = int(min(_FITTED_POINTS, target.calls.left))
        function = interpolate(target, domain, outputs=target.num_outputs, tolerance=_STAND_IN * size, most=most)
    fit = fit_values(
        function,
        request.box,
        counts,
        outputs=target.num_outputs,
        ghosts=ghosts,
        rates=rates,
        storage=request.precision.number,
        max_spread=_SPREAD * size,
    )
    if not fit.values.size:
        raise SizeError(
            f"no values could be fitted to {target.label} on {keys_text(counts)}: {fit.status}", "Use fewer keys."
        )
    return fit.values


def _origin(request: Request) -> torch.Tensor:
    return torch.tensor((request.box.lo.ravel() + request.box.hi.ravel()) / 2).to(request.dtype)


def _grid_head(
    grid: ProductGrid,
    rates: tuple[float, ...],
    values: torch.Tensor,
    slopes: torch.Tensor | None,
    origin: torch.Tensor | None,
    target: Target,
) -> GridHead:
    """The head, with windows that leave out next to nothing."""
    whole = [(n + 1) // 2 for n in grid.counts]
    windows = [min(q, w) for q, w in zip(window_for(grid.geometry, rates, _LEFT_OUT), whole)]
    head = GridHead(
        grid,
        rates,
        values,
        value_slopes=slopes,
        origin=origin,
        half_windows=windows,
        input_shapes=target.input_shapes,
        output_shape=target.output_shape,
    )
    box = target.box
    head.check_range(*Precision.of(head.dtype).widened(box.lo.ravel(), box.hi.ravel()))
    return head


def _request_again(certificate: Certificate, target: Target, dtype: torch.dtype) -> Request:
    """A request that a certificate answers: declared moduli are taken from it, those of an expression are computed again."""
    norm = math.inf if certificate.norm == "inf" else float(certificate.norm)
    found: dict[str, Any] = {}
    if "curvature" in certificate.known:
        found = {"knowledge": (None, None)}
    elif certificate.rests_on("regularity"):
        known = Known.from_json(certificate.known)
        found = {"knowledge": (Knowledge(known, True, math.inf, "declared by the caller"), None)}
    return Request(target, certificate.tolerance, norm, dtype, _found=found)


def _certified(
    head: GridHead,
    request: Request,
    found: _Values,
    made: dict[str, Any],
    seed: int,
    progress: Progress | None,
    function: Mapping[str, Any] | None = None,
) -> Certificate:
    """What can be claimed about a head that exists: the smallest proved bound, or else an estimate; attacked either way."""
    target, grid = request.target, head.partition(request.box)
    witness = attacked(head, target, grid, seed) if target.graph is not None else None  # a black box may be slow
    knowledge, largest = request.knowledge, largest_value(head, request.box)
    known = None if knowledge is None else knowledge.known
    spacing = [float(g.gap_min) for g in grid.geometry]
    rates = head.inverse_temperature.double().tolist()
    sharp = [r * h * h for r, h in zip(rates, spacing) if h]
    common: dict[str, Any] = {
        "dtype": head.dtype,
        "theorem": _THEOREM,
        "norm": request.norm,
        "known": {} if known is None else known.to_json(),
        "details": made,
        "facts": {
            "sharpness": min(sharp, default=0.0),
            "covering_radius": grid.covering_radius,
            "largest_value": largest,
        },
    }
    function = function_of(target) if function is None else function
    seen = math.inf if witness is None else witness.error
    best = _smallest_bound(head, request, found, seen, largest, progress)
    if best is not None:
        proved, assumptions = best
        common |= {"known": dict(found.known)} if found.known else {}
        if proved.details.get("method") == MomentProof.name:
            common["details"] = {**made, "value_error": _stored_error(proved)}
        certificate = claim(
            head, function, target.domains, proved.terms, assumptions=assumptions, proof=proved.details, **common
        )
    else:
        if target.ask is None:
            raise UnsupportedError(
                f"{target.label} is not stored with this head, so that its error cannot be sampled again",
                "Make the head again from the function, with pa.head.",
            )
        sampled = sampled_error(head, target, request.norm, seed=seed)
        terms = running_soft(head, request.box, known, request.norm)
        worst = witness.error if witness is not None and math.isinf(request.norm) else 0.0
        error = max(sampled.estimate, worst)
        certificate = claim(head, function, target.domains, terms, seen=sampled, tolerance=error, **common)
        certificate = certificate.with_estimate(error)
        witness = certificate.witness if witness is None else witness  # the worst fresh sample will do
    if witness is None and target.ask is not None:
        witness = attacked(head, target, grid, seed)
    if witness is not None:
        require_unrefuted(head, target, certificate, witness, seed)
    counted = {"evaluations": float(target.calls.rows)} if target.calls.rows else {}
    return replace(certificate, witness=witness, seed=seed, facts={**certificate.facts, **counted})


def _smallest_bound(
    head: GridHead,
    request: Request,
    found: _Values,
    seen: float,
    largest: float,
    progress: Progress | None,
) -> tuple[Proved, tuple[Assumption, ...]] | None:
    """The smallest bound that a proof gives, and what it assumes; None where nothing can be proved."""
    target, knowledge, norm = request.target, request.knowledge, request.norm
    known = None if knowledge is None else knowledge.known
    if found.known:
        given = Given(norm=norm, details=found.known)
        return CurvatureProof().prove(head, target, given), found.assumptions
    provable = can_be_proved(request)
    candidates: list[tuple[Proved, tuple[Assumption, ...]]] = []
    if knowledge is not None and _holds_f(head, request, found) and (provable or knowledge.declared):
        error = None if target.graph is not None else found.error
        proved = MomentProof().prove(head, target, Given(norm=norm, known=known, value_error=error))
        stated = found.assumptions  # of a function that is not at hand: as they were
        if target.ask is not None:
            stated = tuple(vouched(target, knowledge.known, declared=knowledge.declared, table=found.table))
        candidates.append((proved, stated))
    factor = 1.0 if math.isinf(norm) else lp_factor(target.volume, target.num_outputs, norm)
    floor = max(1e-14 * largest, 1e-298) * factor
    enough = _CLOSE if len(head.counts) <= 2 else _CLOSE_IN_SPACE
    limit = min(1 << 17, (1 << 13) + 2 * math.ceil(min(_expected_boxes(head), 1e9)))
    given = Given(norm=norm, known=known, sharpen=False, max_boxes=limit, progress=progress)
    tries: list[tuple[Proof, Given]] = []
    if provable and head.value_slopes is not None and is_hard(head):
        tries = [(CellProof(), replace(given, details={"overlap": s})) for s in overlaps_for(head)]
    tries += [(TaylorProof(), given)] if provable else []
    for proof, using in tries:
        bound = min((pair[0].bound for pair in candidates), default=math.inf)
        dear = proof.name == TaylorProof.name and _expected_boxes(head) > _MOST_BOXES
        if bound <= enough * seen * factor or (math.isfinite(bound) and dear):
            break
        prove = partial(_proved, proof, head, target, using)
        proved = tightest(prove, min(seen, 1e300) * factor, floor, enough=enough)
        candidates.append((proved, (*input_assumptions(request), *undefined_roots(target))))
    finite = [pair for pair in candidates if math.isfinite(pair[0].bound)]
    return min(finite, key=lambda pair: pair[0].bound, default=None)


def _proved(proof: Proof, head: GridHead, target: Target, given: Given, goal: float) -> Proved:
    """The proof with this goal, which the certificate keeps: another would lead to other boxes."""
    found = proof.prove(head, target, replace(given, aim=goal))
    return replace(found, details={**found.details, "aim": goal})


def _expected_boxes(head: GridHead) -> float:
    """About how many boxes polynomials need: κ/2 for every cell of an axis, and one at least."""
    rates = head.inverse_temperature.double().tolist()
    gaps = ((float(a[-1]) - float(a[0])) / max(len(a) - 1, 1) for a in head.axes)
    return math.prod(max(1.0, n * max(1.0, r * h * h / 2)) for n, r, h in zip(head.counts, rates, gaps))


def _stored_error(proved: Proved) -> float:
    """`max |V_j − f(v_j)|` as the proof used it."""
    return next((t.inputs["error"] for t in proved.terms if t.name == "stored values"), 0.0)


def _holds_f(head: GridHead, request: Request, found: _Values) -> bool:
    """Whether the values are, up to an error, those of f at centers in the box: what a proof by moments needs."""
    if head.value_slopes is not None or (found.error is None and request.target.graph is None):
        return False
    known = None if request.knowledge is None else request.knowledge.known
    if known is None or (known.jumps is not None and math.isinf(request.norm)):
        return False
    lo, hi = request.box.lo.ravel(), request.box.hi.ravel()
    ends = ((float(a[0]), float(a[-1])) for a in head.axes)
    return all(a >= x and b <= y for (a, b), x, y in zip(ends, lo, hi))


def _lines(certificate: Certificate, ghosts: Sequence[int]) -> list[str]:
    """What is said about a temperature on a grid."""
    beyond = f", with {', '.join(map(str, ghosts))} ghosts beyond each end of the axes" if any(ghosts) else ""
    return [f"sharpness κ = R h² is {certificate.facts['sharpness']:.3g}{beyond}"]


def reported(
    head: GridHead | ScatteredHead,
    certificate: Certificate,
    target: Target,
    name: str,
    keys: str,
    lines: Sequence[str],
    note: str = "",
) -> Chosen:
    """The certified head with its report; `name` is the kind of its values, `keys` and `lines` are what is said about it."""
    precision = Precision.of(head.dtype)
    why = [
        keys,
        f"{note or _NO_TOLERANCE}; values: {name}",
        *lines,
        f"{head.num_parameters:,} stored numbers, {size_text(head.num_parameters * precision.item_bytes)} in {precision.name}",
    ]
    largest = value_size(head.values)[0] if head.value_slopes is None else certificate.facts["largest_value"]
    row = Candidate(
        name,
        certificate.kind,
        note or _NO_TOLERANCE,
        head.num_keys,
        head.num_parameters,
        largest,
        certificate.rounding,
        certificate.error,
        chosen=True,
        evaluations=None if target.graph is not None else target.calls.rows,
    )
    origin = (target.origin,) if target.origin else ()
    return Chosen(Construction(head, head.partition(target.box), certificate), (*why, *origin), (row,))
