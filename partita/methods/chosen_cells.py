"""A head on the caller's own scattered keys: centers, powers, values and temperature as given, certified as it is.

The proof is a bisection of the domain, which holds a valid bound at any time. Where time or boxes run out, the best so far is
stated.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from partita.arithmetic.arguments import is_number, real_array, require_dtype
from partita.arithmetic.precision import Precision
from partita.errors import DomainError, NonFiniteValueError, ShapeError, SizeError, UnsupportedError
from partita.functions.target import Target
from partita.geometry.domains import Array, PointCloud
from partita.heads.scattered_head import ScatteredHead
from partita.methods.chosen import Chosen, reported
from partita.methods.method import keys_text, size_text
from partita.methods.request import Request
from partita.proofs.assumptions import undefined_roots
from partita.proofs.bisection import BisectionProof
from partita.proofs.center_values import lp_factor
from partita.proofs.certificate import Certificate
from partita.proofs.claim import claim, function_of
from partita.proofs.proof import Given, Progress, Proved
from partita.proofs.sampled import sampled_error
from partita.proofs.worst_point import ATTACK, attacked, require_unrefuted

__all__ = ["CellsGiven", "chosen_cells"]

_THEOREM = "box-bisection"
_KINDS = ("centers", "affine")
_CLOSE = 1.05  # times the worst error seen: a bound that close will do
_PAIRS, _LEAST_SAMPLES = 1 << 21, 256  # of a sample and a key in the first look of an attack, which no clock stops
_STEP = 2.0**-17  # of a side of the box: differences of black boxes, and of expressions that have no derivative


@dataclass(frozen=True, eq=False)
class CellsGiven:
    """What the caller gives, not yet checked: `(N, m)`, `(N,)`, "centers", "affine" or `(N, out)`, `(N, out, m)` and R."""

    centers: Any
    powers: Any
    values: Any
    slopes: Any
    inverse_temperature: Any


def chosen_cells(
    request: Request,
    given: CellsGiven,
    *,
    seed: int = 0,
    attacking: Progress | None = None,
    progress: Progress | None = None,
) -> Chosen:
    """The head with these keys, attacked and certified.

    Args:
        attacking: called while the head is attacked, before the proof; where it raises BudgetSpentError the attack ends.
        progress: called otherwise; where it raises BudgetSpentError the proof ends, with the bound that it has reached.

    Raises:
        ShapeError, DomainError, NonFiniteValueError, UnsupportedError: an option is out of range, or does not fit the domain.
        SizeError: the head would take more than max_bytes.
    """
    target, m = request.target, request.box.dimension
    require_dtype(request.dtype, "Scattered heads run in these.")
    if isinstance(target.domain, PointCloud):
        raise UnsupportedError("pa.head needs a box or a region, not a point cloud", "Use pa.compile.")
    if target.tail is not None:
        raise UnsupportedError(
            f"{target.label} is not bounded on the domain; pa.head cannot clip it", "Use pa.compile."
        )
    rate = given.inverse_temperature
    if not (is_number(rate) and 0 < rate < math.inf):
        raise UnsupportedError(f"inverse_temperature is {rate!r}; expected a finite R > 0, which centers need.")
    centers = _numbers("centers", given.centers)
    centers = centers[:, None] if m == 1 and centers.ndim == 1 else centers
    if centers.ndim != 2 or centers.shape[1] != m or not len(centers):
        raise ShapeError(
            f"centers have the shape {centers.shape}; expected (N, {m}), one row per key and a column per coordinate, N ≥ 1."
        )
    powers = None if given.powers is None else _shaped("powers", given.powers, [(len(centers),)])
    made, stored = _kind(given), _stored(request, len(centers), given)
    if stored * request.precision.item_bytes > request.max_bytes:
        raise SizeError(
            f"{len(centers):,} keys take {size_text(stored * request.precision.item_bytes)}; max_bytes allows "
            f"{size_text(request.max_bytes)}",
            "Use fewer keys, or raise max_bytes.",
        )
    values, slopes = _values(request, centers, given)
    head = _head(request, centers, powers, values, slopes, float(rate))
    certificate = _certified(head, request, made, seed, attacking, progress)
    lines = [
        f"inverse temperature R is {float(head.inverse_temperature):.6g}",
        *_remarks(certificate, request, centers),
    ]
    return reported(head, certificate, target, made, keys_text((head.num_keys,)), lines)


def _numbers(name: str, given: Any) -> Array:
    found = real_array(name, given)
    if not np.isfinite(found).all():
        at = tuple(int(i) for i in np.argwhere(~np.isfinite(found))[0])
        raise NonFiniteValueError(f"{name} holds {found[at]} at index {list(at)}; expected finite numbers.")
    return found


def _shaped(name: str, given: Any, shapes: list[tuple[int, ...]]) -> Array:
    found = _numbers(name, given)
    if found.shape not in shapes:
        raise ShapeError(
            f"{name} has the shape {found.shape}; expected {' or '.join(map(str, dict.fromkeys(shapes)))}."
        )
    return found


def _kind(given: CellsGiven) -> str:
    """What the values are, in a word."""
    if isinstance(given.values, str):
        if given.values not in _KINDS:
            raise UnsupportedError(
                f"values is {given.values!r}; with centers=, expected {', '.join(map(repr, _KINDS))} or an array of values."
            )
        if given.values == "affine" and given.slopes is not None:
            raise UnsupportedError(
                "slopes are given with values='affine', which takes those of f",
                "Leave slopes out, or give the values as an array too.",
            )
        return given.values
    return "given"


def _stored(request: Request, keys: int, given: CellsGiven) -> int:
    """How many numbers the head stores."""
    m, sloped = request.box.dimension, given.slopes is not None or _kind(given) == "affine"
    return keys * (m + (given.powers is not None) + request.target.num_outputs * (1 + m * sloped)) + 1


@np.errstate(all="ignore")  # numbers out of range end in an error of the head's
def _values(request: Request, centers: Array, given: CellsGiven) -> tuple[Array, Array | None]:
    """Values `(N, out)` and slopes `(N, out, m)` or None."""
    target, keys, m, outs = request.target, len(centers), request.box.dimension, request.target.num_outputs
    if isinstance(given.values, str):
        inside = target.domain.clamp(centers)
        values = target(inside)
        if given.values == "affine":
            slopes = np.where(request.value_axes, _gradient(target, inside), 0.0)
            return values + np.einsum("jom,jm->jo", slopes, centers - inside), slopes
    else:
        shapes = [(keys,)] * (outs == 1) + [(keys, outs), (keys, *target.output_shape)]
        values = _shaped("values", given.values, shapes).reshape(keys, outs)
    if given.slopes is None:
        return values, None
    shapes = [(keys, m)] * (outs == 1) + [(keys, outs, m)]
    slopes = _shaped("slopes", given.slopes, shapes).reshape(keys, outs, m)
    if slopes[:, :, ~request.value_axes].any():
        raise UnsupportedError(
            "slopes are not 0 along z_Q; the values of cross-attention depend on z_K alone",
            "Pass query_values=True for a head that is not cross-attention.",
        )
    return values, slopes


@np.errstate(all="ignore")
def _gradient(target: Target, points: Array) -> Array:
    """Slopes of f at points of the domain, `(n, out, m)`: the middle of what interval arithmetic finds there, or differences.

    Any slope will do where f has none: the proof is about the stored numbers.
    """
    n, m = points.shape
    found = np.full((n, target.num_outputs, m), np.nan)
    if target.graph is not None:
        exact = target.graph.enclose_gradient(points, points)[1]
        found = np.asarray(0.5 * exact.lo + 0.5 * exact.hi).reshape(found.shape)
    for i, side in enumerate(target.box.sides.ravel()):
        rows = np.flatnonzero(~np.isfinite(found[:, :, i]).all(axis=1))
        if not len(rows):
            continue
        step = np.zeros(m)
        step[i] = _STEP * side
        left, right = (target.domain.clamp(points[rows] + sign * step) for sign in (-1, 1))
        apart = (right - left)[:, i]
        rise = (target(right) - target(left)) / np.where(apart > 0.5 * step[i], apart, np.inf)[:, None]
        found[rows, :, i] = np.where(np.isfinite(found[rows, :, i]), found[rows, :, i], rise)
    return np.asarray(np.where(np.isfinite(found), found, 0.0))


def _head(
    request: Request, centers: Array, powers: Array | None, values: Array, slopes: Array | None, rate: float
) -> ScatteredHead:
    target, box, dtype = request.target, request.box, request.dtype

    def tensor(numbers: Array) -> torch.Tensor:
        return torch.tensor(numbers).to(dtype)

    head = ScatteredHead(
        tensor(centers),
        rate,
        tensor(values),
        powers=None if powers is None else tensor(powers),
        value_slopes=None if slopes is None else tensor(slopes),
        input_shapes=target.input_shapes,
        output_shape=target.output_shape,
    )
    stored = float(head.inverse_temperature)
    if not 0 < stored < math.inf:
        raise DomainError(f"inverse_temperature {rate:g} is {stored:g} in {request.precision.name}", "Use float64.")
    head.check_range(*Precision.of(dtype).widened(box.lo.ravel(), box.hi.ravel()))
    return head


def _certified(
    head: ScatteredHead,
    request: Request,
    made: str,
    seed: int,
    attacking: Progress | None,
    progress: Progress | None,
) -> Certificate:
    """The bound that bisection reaches, or an estimate where f is a black box; attacked either way."""
    target, cells = request.target, head.partition(request.box)
    common: dict[str, Any] = {
        "dtype": head.dtype,
        "theorem": _THEOREM,
        "norm": request.norm,
        "details": {"type": "scattered", "method": "chosen", "made": made},
    }
    facts = {"largest_value": head.largest_value(request.box.lo, request.box.hi)}
    function = function_of(target)
    samples = max(_LEAST_SAMPLES, min(ATTACK, _PAIRS // head.num_keys))
    witness = attacked(head, target, cells, seed, attacking, samples=samples) if target.graph is not None else None
    proved = None if witness is None else _proved(head, request, witness.error, progress)
    if proved is not None:
        complete = 1.0 if proved.details["complete"] else 0.0
        certificate = claim(
            head,
            function,
            target.domains,
            proved.terms,
            assumptions=undefined_roots(target),
            proof=proved.details,
            facts={**facts, "complete": complete},
            **common,
        )
    else:
        sampled = sampled_error(head, target, request.norm, seed=seed)
        worst = witness.error if witness is not None and math.isinf(request.norm) else 0.0
        error = max(sampled.estimate, worst)
        certificate = claim(
            head, function, target.domains, (), seen=sampled, tolerance=error, facts=facts, **common
        ).with_estimate(error)
    witness = certificate.witness if witness is None else witness  # of a black box the worst fresh sample will do
    if witness is not None:
        require_unrefuted(head, target, certificate, witness, seed)
    counted = {"evaluations": float(target.calls.rows)} if target.calls.rows else {}
    return replace(certificate, witness=witness, seed=seed, facts={**certificate.facts, **counted})


def _proved(head: ScatteredHead, request: Request, seen: float, progress: Progress | None) -> Proved | None:
    """The bound, aimed close to the error that was seen; None if there is no finite one."""
    target = request.target
    factor = 1.0 if math.isinf(request.norm) else lp_factor(target.volume, target.num_outputs, request.norm)
    least = max(1e-14 * head.largest_value(request.box.lo, request.box.hi), 1e-298)
    given = Given(
        norm=request.norm,
        aim=(_CLOSE * seen + least) * factor,
        details={"expand": True},
        progress=progress,
    )
    proved = BisectionProof().prove(head, target, given)
    proved = replace(proved, details={**proved.details, "aim": given.aim})  # another would lead to other boxes
    return proved if math.isfinite(proved.bound) else None


def _remarks(certificate: Certificate, request: Request, centers: Array) -> list[str]:
    """What a reader should know about the claim."""
    said = []
    outside = int((~request.target.domain.contains(centers)).sum())
    if outside and certificate.model["made"] != "given":
        said.append(
            f"{outside:,} centers lie outside the domain: f was evaluated at the nearest points of the domain found"
        )
    if certificate.facts.get("complete") == 0.0:
        said.append("the proof stopped when its time or its boxes were spent: the bound holds, but is not the tightest")
    declared = request.declared
    vouched = any(x is not None for x in (declared.lipschitz, declared.modulus, declared.hessian))
    if certificate.kind == "estimated" and vouched:
        said.append("what was declared about f proves nothing for scattered keys: the error is an estimate")
    if certificate.kind == "estimated" and request.target.graph is not None:
        said.append("no finite bound was proved for the expression: the error is an estimate")
    return said
