"""One function that makes certificates, and the descriptions of functions, models and machines that they contain."""

from __future__ import annotations

import math
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from partita.arithmetic.precision import PRECISIONS, Precision
from partita.arithmetic.rounding import add_up
from partita.errors import DomainError
from partita.functions.failures import Excluding
from partita.functions.limits import LogLimit
from partita.functions.probing import probe_points
from partita.functions.regions import Domain
from partita.functions.regularity import Known
from partita.functions.target import Target, sample_hash
from partita.geometry.domains import Array
from partita.geometry.partitions import Partition
from partita.heads.head import Head
from partita.heads.network import AttentionNetwork
from partita.proofs.certificate import QUERY_VALUES, Assumption, Certificate, Kind, Term, Witness, model_digest, total
from partita.proofs.sampled import SampledError, sampled_error

__all__ = [
    "Construction",
    "claim",
    "describe_function",
    "function_of",
    "norm_name",
    "require_ordinary",
    "some_answers",
    "with_excluded",
    "with_tail",
]


_REMEMBERED = 8  # values of a black box that a certificate holds, to recognise it by


@dataclass(frozen=True, eq=False)
class Construction:
    """A head, the partition it makes (None for a network of heads), and what is claimed about it.

    `file`: the safetensors file that was written while the head was built and that its tensors are mapped from, if there is one.
    """

    head: Head
    partition: Partition | None
    certificate: Certificate
    file: Path | None = None


def claim(
    model: nn.Module,
    function: Mapping[str, Any],
    domains: Sequence[Domain],
    terms: Sequence[Term],
    *,
    dtype: torch.dtype,
    theorem: str,
    details: Mapping[str, Any],
    norm: float = math.inf,
    tolerance: float | None = None,
    assumptions: Sequence[Assumption] = (),
    known: Known | Mapping[str, Any] | None = None,
    facts: Mapping[str, float] | None = None,
    proof: Mapping[str, Any] | None = None,
    seen: SampledError | None = None,
) -> Certificate:
    """The certificate of a model's tensors as they are evaluated in `dtype`; the bound is the sum of the terms.

    The kind follows from what the claim rests on: `estimated` if the error was only `seen`, `proved_given` if the caller vouches
    for any of the assumptions, `proved` otherwise.

    Args:
        function: what is approximated, as JSON (`describe_function`).
        details: what the model is, as JSON; its hash is added.
        tolerance: the error allowed; None for the bound itself.
        known: the moduli that the terms use. facts: numbers that people ask for. proof: what is needed to do the proof again.
    """
    precision = PRECISIONS[str(dtype)]
    if seen is not None:
        kind: Kind = "estimated"
        rests_on = (*assumptions, _SAME_KIND if seen.from_rows else _SAME_ANSWERS)
    else:
        kind = "proved_given" if any(a.vouched_by == "caller" for a in assumptions) else "proved"
        rests_on = (*assumptions, _platform(precision))
    bound = math.inf if seen is not None else total(terms)
    return Certificate(
        kind=kind,
        norm=norm_name(norm),
        semantics=precision.name,
        tolerance=bound if tolerance is None else float(tolerance),
        error_bound=bound,
        terms=tuple(terms) if seen is None else (seen.term(), *terms),
        assumptions=rests_on,
        theorem=theorem,
        function=function,
        domain={"arguments": [d.description for d in domains]},
        model={"sha256": model_digest(model.state_dict()), **details, **_values(model)},
        known=known.to_json() if isinstance(known, Known) else known or {},
        facts={**(facts or {}), **({} if seen is None or not seen.failed else {"share_excluded": seen.share_failed})},
        environment=_environment(),
        error_estimate=None if seen is None else seen.estimate,
        samples=0 if seen is None else seen.samples,
        proof=proof or {},
        witness=None if seen is None or not math.isinf(norm) else Witness(seen.point, seen.estimate, seen.samples),
    )


def _values(model: nn.Module) -> dict[str, str]:
    """What to say about the values of a head on pairs that is not cross-attention; who reads what in a network."""
    if isinstance(model, AttentionNetwork):
        return {"wiring_sha256": model.wiring_sha256()}
    return (
        {"values": QUERY_VALUES}
        if isinstance(model, Head) and len(model.input_shapes) == 2 and model.has_query_values
        else {}
    )


_SAME_ANSWERS = Assumption(
    "f always returns the same value at the same point, as it did when probed", "caller", about="function"
)

_SAME_KIND = Assumption(
    "the rows of the table are independent draws from what the head will be used on", "caller", about="function"
)


def describe_function(target: Target, centers: Array, values: Array) -> dict[str, Any]:
    """The graph itself, or for a black box the hash of some of its values, and a few of them."""
    meanings = [target.meaning] if target.meaning else []
    more: dict[str, Any] = {}
    if target.tail is not None:
        meanings.append(
            f"the head approximates f clipped to ±{target.tail.clip:g}; what is cut off is a term of the bound"
        )
        more["clip"] = target.tail.clip
    if target.stated is None:
        there = ~target.failed(centers)  # a value that only stands in is no answer
        centers, values = centers[there], values[there]
        named = {"type": "black box", "label": target.label, "answers": len(centers)}
        few = np.linspace(0, len(centers) - 1, min(_REMEMBERED, len(centers))).astype(int)
        sample = {"points": np.asarray(centers)[few].tolist(), "values": np.asarray(values)[few].tolist()}
        return {**named, "sha256": sample_hash(centers, values), **({"sample": sample} if len(centers) else {}), **more}
    if any(isinstance(limit, LogLimit) for limit in target.stated.limits.values()):
        meanings.append("where a factor w^s·log|w| has w = 0 its value is the limit 0")
    if meanings:
        more["meaning"] = "; ".join(meanings)
    graph = target.stated
    return {"type": "graph", "text": target.label, "graph": graph.to_json(), "sha256": graph.sha256, **more}


def estimated(construction: Construction, target: Target, *, seed: int = 0) -> Construction:
    """The same head with an estimate of its error, where its proof was stopped before it reached a bound."""
    before = construction.certificate
    seen = sampled_error(construction.head, target, float(before.norm), seed=seed)
    certificate = replace(
        before,
        kind="estimated",
        error_bound=math.inf,
        terms=(seen.term(),),
        assumptions=(_SAME_ANSWERS,),
        error_estimate=seen.estimate,
        samples=seen.samples,
        proof={},
    )
    return replace(construction, certificate=certificate)


def with_tail(certificate: Certificate, target: Target) -> Certificate:
    """The certificate of a head for a clipped function as a claim about f, with one more term. *Theorem*: `lp-tails`."""
    tail = target.tail
    if tail is None:
        return certificate
    formula = "‖(|f| − clip)₊‖_p"
    term = Term("tail", tail.norm, formula, "lp-tails", {"clip": tail.clip})
    assumed, kind = certificate.assumptions, certificate.kind
    if target.tail_declared:
        said = tail.statement(float(certificate.norm))
        attack = "" if target.tail_ratio is None else "its norm in random points, less six standard errors"
        assumed = (*assumed, Assumption(said, "caller", target.tail_ratio, attack, "tail"))
        kind = "proved_given" if kind == "proved" else kind
    terms = (*certificate.terms, term)
    return replace(
        certificate,
        kind=kind,
        terms=terms,
        assumptions=assumed,
        tolerance=add_up(certificate.tolerance, tail.norm),
        error_bound=certificate.error_bound if kind == "estimated" else total(terms),
        known={**certificate.known, "tail": {"clip": tail.clip, "norm": tail.norm, "declared": target.tail_declared}},
    )


def with_excluded(certificate: Certificate, left_out: Excluding) -> Certificate:
    """The certificate with the number of points at which f failed, which were left out: it is about the others."""
    said = Assumption(
        f"{left_out.statement}: they are left out, and the claim is about the points where f has a value",
        "caller",
        about="function",
    )
    facts = {"points_asked": left_out.asked, "points_excluded": left_out.excluded}
    return replace(certificate, assumptions=(*certificate.assumptions, said), facts={**certificate.facts, **facts})


def function_of(target: Target) -> dict[str, Any]:
    """`describe_function` with values at random points, for heads whose own centers do not identify f."""
    if target.graph is not None:
        return describe_function(target, _NO_POINTS, _NO_POINTS)
    return describe_function(target, *some_answers(target))


_NO_POINTS = np.zeros((0, 1))


def some_answers(target: Target) -> tuple[Array, Array]:
    """Some values of a black box, which identify it in a certificate; none for a graph, which is stored itself."""
    points = probe_points(target.domains)[: 0 if target.graph is not None else None]
    return points, target(points)


def norm_name(norm: float) -> str:
    """As certificates write it: "inf", or p."""
    return "inf" if math.isinf(norm) else str(int(norm)) if norm.is_integer() else repr(norm)


def require_ordinary(dtype: torch.dtype, **numbers: float) -> None:
    """A DomainError for a number so small or large that the dtype's relative precision does not hold around it.

    Proofs of rounding count relative errors; within a factor 2²⁰ of underflow and 16 of overflow they would be wrong.
    """
    precision = Precision.of(dtype)
    least, most = 2.0**20 * precision.smallest, precision.largest / 16
    for name, number in numbers.items():
        if not least <= number <= most:
            raise DomainError(
                f"{name.replace('_', ' ')} = {number:.3g} in {precision.name}; expected a number from {least:.2g} to {most:.2g}",
                f"Rescale the variables{', or use float64' if precision.rounds_inputs else ''}.",
            )


def _platform(precision: Precision) -> Assumption:
    name = "float32" if precision.is_half else precision.name
    text = f"{name} arithmetic is IEEE 754 and exp is within 8 units in the last place"
    if precision.is_half:
        text += f"; inputs are rounded to {precision.name}, and values stored in it"
    return Assumption(text, "platform", about="platform")


def _environment() -> dict[str, str]:
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "machine": platform.machine(),
    }
