"""Functions that two keys represent: tanh, sigmoid and SiLU exactly, products and squares nearly so."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
import torch
from numpy.typing import NDArray

from partita.arithmetic.precision import Precision
from partita.errors import DomainError, SizeError, ToleranceError, UnsupportedError
from partita.functions.quotients import QUOTIENT_OPERATIONS, Logistic, Quadratic, two_key_form
from partita.functions.target import Target
from partita.geometry.domains import PointCloud
from partita.geometry.envelopes import Rows
from partita.geometry.partitions import PowerDiagram
from partita.heads.scattered_head import ScatteredHead
from partita.methods.method import Method, Plan, Refusal, size_text
from partita.methods.request import Request
from partita.proofs.certificate import Term, total
from partita.proofs.claim import Construction, claim, describe_function
from partita.proofs.proof import Given, Progress
from partita.proofs.soft_maximum import exact
from partita.proofs.two_key_proof import SMALL_TURN, TwoKeysProof, stored_form

__all__ = ["TwoKeys", "TwoKeysDraft", "two_keys_draft", "two_keys_head"]

_SHARE = 0.9  # of the tolerance is for reading a factor through tanh, the rest for rounding
_ROUNDINGS = 36.0  # units of roundoff times max|V|: about what running two keys takes


class TwoKeys(Method):
    """`net = A + B tanh(φ)`: two keys whose scores are ±φ and whose values are A ± B, with affine A, B and φ.

    A quotient `(p₀e^a + p₁e^b)/(d₀e^a + d₁e^b)` is exactly that, so tanh, sigmoid and SiLU of an affine function are stored up to
    rounding. *Theorem*: `two-keys`. In a product of two affine functions the weights read one factor, through `tanh(φ) ≈ κφ` at a
    high temperature, and the values hold the other: the error is `Φ²/12` of its range, Φ = sup |φ|, and rounding adds some units
    divided by Φ. *Theorem*: `two-key-products`.

    Hypotheses: the form is that of the graph (`two_key_form`, exact arithmetic); the domain lies in its bounding box. For a pair of
    boxes A and B must not depend on z_Q.
    """

    name = "two_keys"

    def applies(self, request: Request) -> Refusal | None:
        graph = request.target.graph
        if graph is None or isinstance(request.target.domain, PointCloud):
            return Refusal("for expressions on a box")
        varies: list[bool] = []
        for node in graph.nodes:  # what `two_key_form` refuses in any case, without its exact arithmetic
            moved = any(varies[k] for k in node.arguments)
            if moved and node.operation not in QUOTIENT_OPERATIONS:
                return Refusal(f"not a tanh, a sigmoid, a SiLU or a product: {node.operation} of variables")
            varies.append(moved or node.operation == "input")
        return None

    def plan(self, request: Request, share: float, progress: Progress | None = None) -> Plan | Refusal:
        target, precision = request.target, request.precision
        try:
            draft = two_keys_draft(
                target,
                tolerance=share * request.tolerance,
                norm=request.norm,
                dtype=request.dtype,
                value_axes=request.value_axes,
            )
        except (SizeError, ToleranceError, UnsupportedError) as error:
            return Refusal(error.reason, error.hint)
        head = draft.head
        what = "two exponentials divided by their sum" if draft.is_exact else "a product"
        read = (
            "scores and values are those of f: rounding is the only error"
            if draft.is_exact
            else f"the weights read one factor through tanh(φ), |φ| ≤ {draft.reach:.3g}, and the values hold the other"
        )
        return Plan(
            request=request,
            maker=self,
            kind="proved",
            keys=2,
            parameters=head.num_parameters,
            draft=draft,
            why=(
                "2 keys",
                f"two_keys: f is {what}",
                read,
                f"{head.num_parameters:,} stored numbers, {size_text(precision.bytes_of(head.num_parameters))} in {precision.name}",
            ),
            error_bound=total(draft.terms),
            largest=head.largest_value(*request.seen),
            caveat=request.caveat(None if head.value_slopes is None else head.value_slopes.double().numpy()),
        )

    def build(self, plan: Plan, progress: Progress | None = None, seed: int = 0) -> Construction:
        request = plan.request
        return two_keys_head(request.target, plan.draft, tolerance=request.tolerance, norm=request.norm)


@dataclass(frozen=True, eq=False)
class TwoKeysDraft:
    """A head of two keys and the terms of its bound.

    Attributes:
        reach: Φ = sup |φ|. is_exact: whether only stored and rounded numbers err. values: of the head, for limits on them.
    """

    head: ScatteredHead
    terms: tuple[Term, ...]
    reach: float
    is_exact: bool

    @property
    def values(self) -> torch.Tensor:
        return self.head.values


def two_keys_draft(
    target: Target,
    *,
    tolerance: float = math.inf,
    norm: float = math.inf,
    dtype: torch.dtype = torch.float64,
    value_axes: NDArray[np.bool_] | None = None,
) -> TwoKeysDraft:
    """The head of two keys for an expression, with the smallest values that meet the tolerance.

    Values depend on the coordinates of `value_axes` alone, `(m,)`, on all of them by default.

    Raises:
        UnsupportedError: f has another form. SizeError: it is too large for exact arithmetic.
        ToleranceError: below what the dtype can promise. DomainError: numbers out of range for the dtype.
    """
    if target.graph is None:
        raise UnsupportedError(f"{target.label} is a black box; expected an expression, whose form can be read.")
    form, given = two_key_form(target.graph, target.box), Given(tolerance, norm)
    free = np.ones(len(form.middle), bool) if value_axes is None else value_axes
    allowed = tolerance if math.isinf(norm) else tolerance / (target.volume * target.num_outputs) ** (1 / norm)
    heads = (
        iter([_exact_head(form, target, dtype, free)])
        if isinstance(form, Logistic)
        else _products(form, target, dtype, free, allowed)
    )
    best: TwoKeysDraft | None = None
    for head in heads:
        terms = tuple(TwoKeysProof().prove(head, target, given).terms)
        reach = float(abs(stored_form(head, form.middle, form.radii).turn).sum())
        found = TwoKeysDraft(head, terms, reach, isinstance(form, Logistic))
        if total(terms) <= tolerance:
            return found
        best = found if best is None or total(terms) < total(best.terms) else best
    assert best is not None
    wider = " or dtype=torch.float64" if dtype == torch.float32 else ""
    raise ToleranceError(
        f"tolerance {tolerance:g} is below what two keys in {Precision.of(dtype).name} can promise: {total(best.terms):.3g}",
        f"Use a tolerance above {1.1 * total(best.terms):.3g}{wider}.",
    )


def two_keys_head(
    target: Target, draft: TwoKeysDraft, *, tolerance: float | None = None, norm: float = math.inf
) -> Construction:
    """The head of a draft with its certificate. *Theorem*: `two-keys`, `two-key-products`."""
    head = draft.head
    centers = head.centers.double().numpy()
    certificate = claim(
        head,
        describe_function(target, centers, head.values.double().numpy()),
        target.domains,
        draft.terms,
        dtype=head.dtype,
        theorem="two-keys" if draft.is_exact else "two-key-products",
        norm=norm,
        tolerance=tolerance,
        details={"type": "scattered", "method": TwoKeys.name},
        facts={"reach": draft.reach},
        proof={"method": TwoKeysProof.name},
    )
    return Construction(head, PowerDiagram(centers), certificate)


def _exact_head(form: Logistic, target: Target, dtype: torch.dtype, free: NDArray[np.bool_]) -> ScatteredHead:
    if any(rows[:, 1:][:, ~free].any() for rows in (form.level, form.swing)):
        raise UnsupportedError("its values would depend on z_Q", "Use query_values=True, or another method.")
    centers, rate = _keys(form, dtype, far=False)
    return _head(centers, rate, form.level, form.swing, form, target, dtype)


def _products(
    form: Quadratic, target: Target, dtype: torch.dtype, free: NDArray[np.bool_], tolerance: float
) -> Iterator[ScatteredHead]:
    """Heads that read one factor at smaller and smaller φ: from the first that is near enough to the one that errs least."""
    factor, others, shift = _factors(form, free)
    held, place = np.column_stack([shift, others]), int(abs(factor).argmax())
    size = float(abs(factor).sum() * abs(held).sum(axis=1).max())
    least = (6 * _ROUNDINGS * Precision.of(dtype).unit) ** (1 / 3)
    first = max(least, math.sqrt(min(12 * _SHARE * tolerance / size, 1.0)))
    for turn in (min(Fraction(x), SMALL_TURN) for x in (first, math.sqrt(first * least), least)):
        along = np.array([Fraction(0), *(factor * (turn / abs(factor).sum()))], dtype=object)
        asked = Logistic(form.middle, form.radii, along, Fraction(0), form.level, form.level * 0)
        centers, rate = _keys(asked, dtype, far=True)
        empty = _head(centers, rate, form.level * 0, form.level * 0, form, target, dtype)
        read = stored_form(empty, form.middle, form.radii).turn  # φ as it is stored, which the values are made for
        gain, slope = read[1 + place] / factor[place], 1 - turn * turn / 4  # κ with the least sup |tanh(φ) − κφ|
        level = form.level - read[0] / gain * held
        level[:, 1:] -= shift[:, None] * factor
        yield _head(centers, rate, level, held / (slope * gain), form, target, dtype)


def _factors(form: Quadratic, free: NDArray[np.bool_]) -> tuple[Rows, Rows, Rows]:
    """`tᵀQ_o t = (p·t)(q_o·t)` with one p for all outputs: p `(m,)`, q `(out, m)` and c `(out,)`.

    `A_o + (p·t)(q_o·t) = (A_o − c_o p·t) + (p·t)(q_o·t + c_o)`, where neither `A_o − c_o p·t` nor q_o·t depends on coordinates that
    are not free.
    """
    curved = [square for square in form.squares if square.any()]
    if not curved:
        raise UnsupportedError("affine: pieces are exact with one key", "Use method='pieces'.")
    best: tuple[float, Rows, Rows, Rows] | None = None
    radii = np.array(form.radii, dtype=object)
    bound = "a sum of several products"
    for factor in _split(curved[0]):
        others = np.stack([_divided(square, factor) for square in form.squares])
        left = [
            abs(square - (np.multiply.outer(factor, q) + np.multiply.outer(q, factor)) / 2).max()
            for square, q in zip(form.squares, others)
        ]
        if max(left) > Fraction(1e-12) * abs(form.squares).max():
            continue
        shift, place = np.full(len(others), Fraction(0)), int(np.argmax(~free & (factor != 0)))
        if not free[place] and factor[place]:
            shift = form.level[:, 1 + place] / factor[place]
        rest = form.level[:, 1:] - shift[:, None] * factor
        if (others[:, ~free] != 0).any() or (rest[:, ~free] != 0).any():
            bound = "its values would depend on z_Q"
            continue
        steep = np.array([float(p / r) if p else 0.0 for p, r in zip(factor, radii)])
        # scores grow with the box, in units of what φ takes of it
        cost = float(np.linalg.norm(steep)) * float(np.linalg.norm(radii.astype(np.float64))) / float(abs(factor).sum())
        if best is None or cost < best[0]:
            best = cost, factor, others, shift
    if best is None:
        raise UnsupportedError(f"not a product of two factors: {bound}", "Use another method.")
    return best[1:]


def _split(square: Rows) -> Iterator[Rows]:
    """Both factors p and q of `tᵀQt = (p·t)(q·t)`, if there are such; q is found by division."""
    m = len(square)
    on = [i for i in range(m) if square[i, i]]
    if not on:
        i, j = (int(k) for k in np.unravel_index(int(abs(square).argmax()), square.shape))
        yield from (square[i] / square[i, j], square[j] / square[i, j])
        return
    i = on[0]
    line = square[i] / square[i, i]  # Q/Q_ii = (t_i + …)² − (r·t)², where (r·t)² has the matrix `rest`
    rest = np.multiply.outer(line, line) - square / square[i, i]
    k = int(np.argmax(rest.diagonal()))
    if rest[k, k] < 0 or (rest[k, k] == 0 and rest.any()):
        return
    other = line * 0 if rest[k, k] == 0 else rest[k] / _root(rest[k, k])
    yield line + other
    if rest.any():
        yield line - other


def _root(number: Fraction) -> Fraction:
    """A square root, exact where there is one among the rational numbers."""
    whole = Fraction(math.isqrt(number.numerator), math.isqrt(number.denominator))
    return whole if whole * whole == number else Fraction(math.sqrt(number))


def _divided(square: Rows, factor: Rows) -> Rows:
    """q of `tᵀQt = (p·t)(q·t)`, from one row of Q."""
    i = int(abs(factor).argmax())
    own = square[i, i] / factor[i]
    found: Rows = (2 * square[i] - factor * own) / factor[i]
    found[i] = own
    return found


def _keys(form: Logistic, dtype: torch.dtype, *, far: bool) -> tuple[torch.Tensor, float]:
    """Centers `p ± s w` and R = 1/s, w the slope of φ and p the zero of φ that is nearest to the middle of the box.

    s is a power of two, so that it changes no digits. Scores are least if the centers are about as far apart as the points are from
    p at which both keys matter: those with |φ| ≤ 2, or, if `far`, all of the box. *Theorem*: `two-keys`.
    """
    middle, radii, precision = (
        np.array(form.middle, dtype=object),
        np.array(form.radii, dtype=object),
        Precision.of(dtype),
    )
    slope = form.turn[1:] / radii
    zero = middle - slope * (form.turn[0] / (slope * slope).sum())
    steep, reach = (float(np.linalg.norm(x.astype(np.float64))) for x in (slope, radii))
    along = min(float(abs(form.turn[1:]).sum()) / steep, reach)
    near = reach if far else math.hypot(min(along, 2 / steep), math.sqrt(reach**2 - along**2))
    exponent = round(math.log2(near) - math.log2(steep)) - (2 if far else 1)
    if not (abs(exponent) < 1000 and precision.is_normal(2.0**-exponent)):
        raise DomainError(f"the inverse temperature is out of range for {precision.name}", "Rescale the variables.")
    scale = Fraction(2) ** exponent
    return _stored(np.stack([zero - scale * slope, zero + scale * slope]), dtype), float(1 / scale)


def _head(
    centers: torch.Tensor,
    rate: float,
    level: Rows,
    swing: Rows,
    form: Logistic | Quadratic,
    target: Target,
    dtype: torch.dtype,
) -> ScatteredHead:
    """A head with the values A ± B, `(out, 1 + m)` in coordinates |t| ≤ 1."""
    rows = np.stack([level - swing, level + swing])
    slopes = _stored(rows[:, :, 1:] / np.array(form.radii, dtype=object), dtype)
    away = exact(centers) - np.array(form.middle, dtype=object)
    return ScatteredHead(
        centers,
        rate,
        _stored(rows[:, :, 0] + (exact(slopes) * away[:, None]).sum(axis=2), dtype),
        value_slopes=slopes if bool(slopes.any()) else None,
        input_shapes=target.input_shapes,
        output_shape=target.output_shape,
    )


def _stored(numbers: Rows, dtype: torch.dtype) -> torch.Tensor:
    try:
        stored = torch.from_numpy(numbers.astype(np.float64)).to(dtype)
    except OverflowError:
        stored = torch.tensor(math.inf)
    if not stored.isfinite().all():
        raise DomainError(f"centers or values overflow {Precision.of(dtype).name}", "Rescale the variables.")
    return stored
