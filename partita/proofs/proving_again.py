"""A certificate's proof done again, from the head's tensors and what the certificate states: the lines of a recheck.

Compiling a network and rechecking it both need this for every head of the network.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from partita.arithmetic.precision import PRECISIONS
from partita.errors import PartitaError
from partita.functions.curvature import Curvature
from partita.functions.regularity import Known, gather, where_planned
from partita.functions.target import Target
from partita.heads.head import FoldedHead, Head
from partita.proofs.bisection import BisectionProof
from partita.proofs.cell_proof import CellProof, CurvatureProof
from partita.proofs.center_values import MomentProof, value_error
from partita.proofs.certificate import Certificate
from partita.proofs.cover_proof import CoverProof
from partita.proofs.proof import Given, Proof
from partita.proofs.soft_maximum import PiecesProof
from partita.proofs.taylor_proof import TaylorProof
from partita.proofs.two_key_proof import TwoKeysProof

__all__ = ["ONE_HEAD", "SLACK", "Check", "norm_of", "proof_again"]

# the proofs of single heads, by the names that certificates store
ONE_HEAD: dict[str, Proof] = {
    proof.name: proof
    for proof in (
        MomentProof(),
        CoverProof(),
        CellProof(),
        TaylorProof(),
        CurvatureProof(),
        BisectionProof(),
        PiecesProof(),
        TwoKeysProof(),
    )
}
SLACK = 1 + 1e-9  # recomputed terms may differ in their last digits between platforms


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


def proof_again(
    proof: Proof, head: Head, target: Target, certificate: Certificate, *, earlier: Any = None
) -> Iterator[Check]:
    """Every term of a certificate from the stored tensors.

    Args:
        proof: the one that the certificate names.
        head: as it is stored.
        target: the function and the domain that the certificate is about.
        certificate: what is claimed.
        earlier: what the proof need not find again (`Given.earlier`).

    Yields:
        One `Check` per term, and for what the terms rest on.
    """
    try:
        known, source = _ground(proof, target, certificate)
        if source:
            declared = known is not None and (certificate.rests_on("regularity") or certificate.rests_on("curvature"))
            yield Check("knowledge", known is not None, source, checked=not declared)
            if known is None:
                return
        error, detail = _value_error(proof, head, target, certificate, known)
        if detail:
            stated_error = float(certificate.model.get("value_error", -1.0))
            yield Check("values", error is None or error <= stated_error * SLACK, detail, checked=error is not None)
        given = Given(
            tolerance=certificate.tolerance,
            norm=norm_of(certificate),
            known=known,
            value_error=error,
            details={**certificate.known, **certificate.proof},
            aim=float(certificate.proof.get("aim", certificate.terms[0].value)),
            earlier=earlier,
        )
        stated = {t.name: t.value for t in certificate.terms}
        terms = proof.prove(head, target, given).terms
        if any(t.value > stated.get(t.name, 0.0) * SLACK for t in terms):  # aimed as when the head was built
            terms = proof.prove(head, target, replace(given, aim=None)).terms
    except (PartitaError, ArithmeticError, ValueError, LookupError, TypeError) as problem:
        yield Check("proof", False, f"{proof.name}: {type(problem).__name__}: {problem}")
        return
    for term in terms:
        said = stated.get(term.name, 0.0)
        yield Check(term.name, term.value <= said * SLACK, f"{term.value:.6g} (stated {said:.6g})")


def _ground(proof: Proof, target: Target, certificate: Certificate) -> tuple[Known | None, str]:
    """The moduli that the proof may use, and where they come from; an empty text if it needs none."""
    if proof.rests_on == "curvature":
        used = str(Curvature(certificate.known["curvature"]))
        by_caller = (a for a in certificate.assumptions if a.vouched_by == "caller" and a.about == "curvature")
        listed = certificate.kind == "proved_given" and any(a.statement == used for a in by_caller)
        return (Known() if listed else None), (
            f"{used}: {'declared by the caller' if listed else 'used, but not listed as assumed'}"
        )
    if proof.rests_on == "regularity":
        return _known(target, certificate)
    if certificate.semantics == "float64" or proof.moves_inputs:
        return None, ""
    if certificate.rests_on("regularity"):  # the input-rounding term uses the caller's constants
        return _known(target, certificate)
    return _gathered(target, certificate), ""


def _gathered(target: Target, certificate: Certificate) -> Known:
    """The moduli of f that the head was planned with."""
    on = where_planned(target, PRECISIONS[certificate.semantics])
    return gather(on, norm=norm_of(certificate)).known


def _known(target: Target, certificate: Certificate) -> tuple[Known | None, str]:
    """The moduli that the certificate states, if interval arithmetic confirms them or the caller declared them.

    For a claim of kind `proved` the constants are always computed again from the graph.
    """
    try:
        stated = Known.from_json(certificate.known)
    except (TypeError, ValueError, KeyError, PartitaError) as error:
        return None, f"the certificate's moduli cannot be read: {error}"
    if certificate.kind == "proved_given" and certificate.rests_on("regularity"):
        return stated, "declared by the caller, not checked"
    if target.graph is None:
        return None, "the certificate gives no grounds for the moduli of this black box"
    ours = _gathered(target, certificate)
    if ours.modulus is not None and stated.modulus is not None and ours.modulus.expression:
        same = stated.modulus == ours.modulus and stated.per_axis is None
        return (ours, "composed again from the expression") if same else (None, "the expression has another modulus")
    if ours.modulus is None or stated.modulus is None or ours.per_axis is None or stated.per_axis is None:
        return None, "the certificate states no modulus"
    pairs = [(ours.modulus.constant, stated.modulus.constant), *zip(ours.per_axis.constants, stated.per_axis.constants)]
    fits = len(pairs) == 1 + target.domain.dimension and stated.modulus.is_lipschitz
    if not fits or any(a > b * SLACK for a, b in pairs):
        return None, "interval arithmetic does not confirm the constants"
    return Known(stated.modulus, stated.per_axis, ours.jumps), "confirmed by interval arithmetic"


def _value_error(
    proof: Proof, head: Head, target: Target, certificate: Certificate, known: Known | None
) -> tuple[float | None, str]:
    """`max |V_j − f(v_j)|` again, for an expression; a black box's answers are what they were."""
    if not isinstance(head, FoldedHead):  # the heads of a network have no centers in the domain
        return None, ""
    centers = proof.centers(head, target)
    if proof.rests_on == "curvature":
        return None, "f and its differences at the centers: declared by the caller, not checked"
    if centers is None or known is None:
        return None, ""
    if target.graph is None:
        single = certificate.semantics != "float64"
        error = float(certificate.model.get("value_error", math.inf)) if single else 0.0
    else:
        error = value_error(head, target, centers, known)
    return error, f"max |V_j − f(v_j)| ≤ {error:.3g}"


def norm_of(certificate: Certificate) -> float:
    """The norm of a claim: math.inf, or p."""
    return math.inf if certificate.norm == "inf" else float(certificate.norm)
