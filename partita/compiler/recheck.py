"""Recheck: recomputes a certificate's hashes and terms from the stored tensors and the declared assumptions alone.

partita checks its own certificate with its own proofs. It finds changed files, terms that do not add up, and constants that
interval arithmetic does not confirm. It is not an independent proof.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from partita.arithmetic.precision import PRECISIONS
from partita.compiler.compiled import Compiled
from partita.errors import ExpressionError, PartitaError
from partita.functions.curvature import Curvature
from partita.functions.expressions import CONSTANTS, parse
from partita.functions.regularity import Known, gather, where_planned
from partita.functions.tails import find_singularities
from partita.functions.target import Target, variable_names
from partita.geometry.domains import PointCloud
from partita.heads.head import FoldedHead
from partita.proofs import PROOFS, Given, Proof
from partita.proofs.center_values import value_error
from partita.proofs.certificate import Certificate, model_digest, total
from partita.proofs.sampled import sampled_error

__all__ = ["Check", "recheck"]

_SLACK = 1 + 1e-9  # recomputed terms may differ in their last digits between platforms


@dataclass(frozen=True)
class Check:
    """One line of a recheck.

    Attributes:
        name: what was compared.
        holds: whether it agrees with the certificate.
        detail: what was found.
        checked: False if there was nothing to compare with: what the caller declared, or a function that is not stored.
    """

    name: str
    holds: bool
    detail: str
    checked: bool = True


def recheck(compiled: Compiled, *, function: Any = None) -> tuple[Check, ...]:
    """Recompute every term of a certificate from the head's tensors, and check its hashes, constants and witness.

    This is partita checking its own arithmetic, not an independent proof. `partita-check` is independent.

    Args:
        compiled: from `pa.compile` or `pa.load`.
        function: the black box that was compiled, if the head was loaded from a file. Its values are then compared with those
            that the certificate holds, and its error is sampled again.

    Raises:
        AnotherFunctionError: function is not the one that was compiled.

    Returns:
        One `Check(name, holds, detail)` per line.

    >>> import partita as pa
    >>> c = pa.compile("sin(3*x)", pa.Box([-1], [1]), tolerance=1e-3)
    >>> all(check.holds for check in pa.recheck(c))
    True
    """
    return tuple(_checks(compiled if function is None else compiled.with_function(function)))


def _checks(compiled: Compiled) -> Iterator[Check]:
    certificate, head, target = compiled.certificate, compiled.head, compiled.target
    digest = model_digest(head.state_dict())
    yield Check("tensors", digest == certificate.model.get("sha256"), f"sha256 {digest[:16]}…")
    same = list(certificate.domain.get("arguments", [])) == [d.description for d in target.domains]
    yield Check("domain", same, " and ".join(str(d) for d in target.domains))
    yield Check("arithmetic", certificate.semantics == head.semantics, f"the head is {head.semantics}")
    if target.graph is not None:
        said = certificate.function
        graph = target.stated or target.graph
        stated = said.get("sha256") == graph.sha256 and said.get("text") == target.label
        detail = f"{target.label}, graph sha256 {graph.sha256[:16]}…"
        yield Check("function", stated and _reads_as(target), detail)
    if certificate.kind == "estimated":
        yield from _estimate_again(compiled)
    else:
        yield from _proof_again(compiled)
        yield from _tail_again(compiled)
        summed = total(certificate.terms)
        yield Check("sum", summed <= certificate.error_bound, f"{summed:.6g} ≤ {certificate.error_bound:.6g}")
    met = f"{certificate.error:.6g} ≤ {certificate.tolerance:g}"
    yield Check("tolerance", certificate.error <= certificate.tolerance, met)
    if certificate.witness is not None and target.ask is not None:
        seen = float(compiled.errors_at(np.array([certificate.witness.point]))[0])
        inside = certificate.norm != "inf" or seen <= certificate.error_bound
        yield Check("witness", inside, f"error {seen:.6g} at the worst point on record")


def _proof_again(compiled: Compiled) -> Iterator[Check]:
    """Every term from the stored tensors, by the proof that the certificate names."""
    certificate, head, target = compiled.certificate, compiled.head, compiled.target
    # certificates of schema 1 did not store the names of these two
    unnamed = "cover" if isinstance(target.domain, PointCloud) else "moments"
    proof = PROOFS.get(str(certificate.proof.get("method", unnamed)))
    if proof is None:
        yield Check("proof", False, f"there is no proof called {certificate.proof.get('method')!r}")
        return
    try:
        known, source = _ground(compiled, proof)
        if source:
            declared = known is not None and (certificate.rests_on("regularity") or certificate.rests_on("curvature"))
            yield Check("knowledge", known is not None, source, checked=not declared)
            if known is None:
                return
        error, detail = _value_error(compiled, proof, known)
        if detail:
            stated_error = float(certificate.model.get("value_error", -1.0))
            yield Check("values", error is None or error <= stated_error * _SLACK, detail, checked=error is not None)
        given = Given(
            tolerance=certificate.tolerance,
            norm=_norm(certificate),
            known=known,
            value_error=error,
            details={**certificate.known, **certificate.proof},
            aim=float(certificate.proof.get("aim", certificate.terms[0].value)),
        )
        stated = {t.name: t.value for t in certificate.terms}
        terms = proof.prove(head, target, given).terms
        if any(t.value > stated.get(t.name, 0.0) * _SLACK for t in terms):  # aimed as when the head was built
            terms = proof.prove(head, target, replace(given, aim=None)).terms
    except (PartitaError, ArithmeticError, ValueError, LookupError, TypeError) as problem:
        yield Check("proof", False, f"{proof.name}: {type(problem).__name__}: {problem}")
        return
    for term in terms:
        said = stated.get(term.name, 0.0)
        yield Check(term.name, term.value <= said * _SLACK, f"{term.value:.6g} (stated {said:.6g})")


def _tail_again(compiled: Compiled) -> Iterator[Check]:
    """The tail of a clipped function from its expression, or that the certificate lists it as declared."""
    certificate, target = compiled.certificate, compiled.target
    if target.tail is None:
        return
    stated = next((t.value for t in certificate.terms if t.name == "tail"), -1.0)
    if target.tail_declared or target.stated is None:
        said = target.tail.statement(_norm(certificate))
        listed = any(a.statement == said and a.vouched_by == "caller" for a in certificate.assumptions)
        holds = listed and certificate.kind == "proved_given" and target.tail.norm <= stated * _SLACK
        yield Check("tail", holds, f"{said}: declared by the caller, not checked", checked=False)
        return
    found = find_singularities(target.stated, target.box)
    again = math.inf if found is None else found.tail(target.tail.clip, _norm(certificate))
    yield Check("tail", again <= stated * _SLACK, f"{again:.6g} (stated {stated:.6g})")


def _ground(compiled: Compiled, proof: Proof) -> tuple[Known | None, str]:
    """The moduli that the proof may use, and where they come from; an empty text if it needs none."""
    certificate = compiled.certificate
    if proof.rests_on == "curvature":
        used = str(Curvature(certificate.known["curvature"]))
        by_caller = (a for a in certificate.assumptions if a.vouched_by == "caller" and a.about == "curvature")
        listed = certificate.kind == "proved_given" and any(a.statement == used for a in by_caller)
        return (Known() if listed else None), (
            f"{used}: {'declared by the caller' if listed else 'used, but not listed as assumed'}"
        )
    if proof.rests_on == "regularity":
        return _known(compiled)
    if certificate.semantics == "float64" or proof.moves_inputs:
        return None, ""
    if certificate.rests_on("regularity"):  # the input-rounding term uses the caller's constants
        return _known(compiled)
    return _gathered(compiled), ""


def _gathered(compiled: Compiled) -> Known:
    """The moduli of f that the head was planned with."""
    certificate = compiled.certificate
    on = where_planned(compiled.target, PRECISIONS[certificate.semantics])
    return gather(on, norm=_norm(certificate)).known


def _known(compiled: Compiled) -> tuple[Known | None, str]:
    """The moduli that the certificate states, if interval arithmetic confirms them or the caller declared them.

    For a claim of kind `proved` the constants are always computed again from the graph.
    """
    certificate, target = compiled.certificate, compiled.target
    try:
        stated = Known.from_json(certificate.known)
    except (TypeError, ValueError, KeyError, PartitaError) as error:
        return None, f"the certificate's moduli cannot be read: {error}"
    if certificate.kind == "proved_given" and certificate.rests_on("regularity"):
        return stated, "declared by the caller, not checked"
    if target.graph is None:
        return None, "the certificate gives no grounds for the moduli of this black box"
    ours = _gathered(compiled)
    if ours.modulus is not None and stated.modulus is not None and ours.modulus.expression:
        same = stated.modulus == ours.modulus and stated.per_axis is None
        return (ours, "composed again from the expression") if same else (None, "the expression has another modulus")
    if ours.modulus is None or stated.modulus is None or ours.per_axis is None or stated.per_axis is None:
        return None, "the certificate states no modulus"
    pairs = [(ours.modulus.constant, stated.modulus.constant), *zip(ours.per_axis.constants, stated.per_axis.constants)]
    fits = len(pairs) == 1 + target.domain.dimension and stated.modulus.is_lipschitz
    if not fits or any(a > b * _SLACK for a, b in pairs):
        return None, "interval arithmetic does not confirm the constants"
    return Known(stated.modulus, stated.per_axis, ours.jumps), "confirmed by interval arithmetic"


def _value_error(compiled: Compiled, proof: Proof, known: Known | None) -> tuple[float | None, str]:
    """`max |V_j − f(v_j)|` again, for an expression; a black box's answers are what they were."""
    head, target = compiled.head, compiled.target
    if not isinstance(head, FoldedHead):  # the heads of a network have no centers in the domain
        return None, ""
    centers = proof.centers(head, target)
    if proof.rests_on == "curvature":
        return None, "f and its differences at the centers: declared by the caller, not checked"
    if centers is None or known is None:
        return None, ""
    if target.graph is None:
        single = compiled.certificate.semantics != "float64"
        error = float(compiled.certificate.model.get("value_error", math.inf)) if single else 0.0
    else:
        error = value_error(head, target, centers, known)
    return error, f"max |V_j − f(v_j)| ≤ {error:.3g}"


def _estimate_again(compiled: Compiled) -> Iterator[Check]:
    """Fresh samples, other than those that the estimate rests on."""
    certificate, target = compiled.certificate, compiled.target
    if target.ask is None:
        yield Check("estimate", True, "not checked: the function is not stored", checked=False)
        return
    seen = sampled_error(compiled.head, target, _norm(certificate), seed=certificate.seed + 1)
    holds = seen.estimate <= certificate.tolerance
    if not certificate.has_tolerance:  # the estimate itself, which a few fresh points may exceed
        holds = _few_exceed(compiled) if certificate.norm == "inf" else seen.estimate <= 1.1 * certificate.error
    yield Check("estimate", holds, f"{seen.estimate:.6g} at {seen.samples:,} fresh points; nothing is proved")


def _few_exceed(compiled: Compiled) -> bool:
    """Whether no more fresh points exceed an estimate than its statement about their measure allows, six deviations included."""
    certificate, target = compiled.certificate, compiled.target
    points = target.domain.sample(max(certificate.samples, 1), np.random.default_rng([certificate.seed + 1, 7]))
    allowed = certificate.exceeded_on * len(points)
    return int((compiled.errors_at(points) > certificate.error).sum()) <= allowed + 6 * math.sqrt(allowed)


def _reads_as(target: Target) -> bool:
    """Whether the text shown for f is the graph that the claim is about, is printed from it, or is only a name."""
    graph, names = target.stated, variable_names(target.domains)
    if graph is None:
        return False
    if re.fullmatch(r"<lambda>|[^\W\d]\w*", target.label) and target.label not in (*names[0], *names[1], *CONSTANTS):
        return True
    try:
        return target.label == graph.infix(names[0]) or parse(target.label, *names) == graph
    except ExpressionError:
        return False


def _norm(certificate: Certificate) -> float:
    return math.inf if certificate.norm == "inf" else float(certificate.norm)
