"""Recheck: recomputes a certificate's hashes and terms from the stored tensors and the declared assumptions alone.

partita checks its own certificate with its own proofs. It finds changed files, terms that do not add up, and constants that
interval arithmetic does not confirm. It is not an independent proof.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator
from typing import Any

import numpy as np

from partita.compiler.compiled import Compiled
from partita.compiler.table_head import held_out_error
from partita.errors import ExpressionError, FormatError
from partita.functions.expressions import CONSTANTS, parse
from partita.functions.tails import find_singularities
from partita.functions.target import Target, variable_names
from partita.geometry.domains import PointCloud
from partita.heads.network import AttentionNetwork
from partita.heads.scattered_head import ScatteredHead
from partita.proofs import PROOFS
from partita.proofs.certificate import model_digest, total
from partita.proofs.network_proof import Part, part_checks
from partita.proofs.proving_again import SLACK, Check, norm_of, proof_again
from partita.proofs.sampled import sampled_error
from partita.workers import crew_of

__all__ = ["Check", "recheck"]


def recheck(
    compiled: Compiled,
    *,
    function: Any = None,
    executor: Any = None,
    checkpoint: str | os.PathLike[str] | None = None,
    retries: int = 0,
) -> tuple[Check, ...]:
    """Recompute every term of a certificate from the head's tensors, and check its hashes, constants and witness.

    This is partita checking its own arithmetic, not an independent proof. `partita-check` is independent.

    Args:
        compiled: from `pa.compile` or `pa.load`.
        function: the black box that was compiled, if the head was loaded from a file. Its values are then compared with those
            that the certificate holds, and its error is sampled again. For a head that was fitted to a table: the table.
        executor: who runs calls of a slow f and long proofs, as for `compile`.
        checkpoint: a folder that keeps the answers of f and the results of long steps, as for `compile`.
        retries: how often f is called again where it raised, ≥ 0.

    Raises:
        AnotherFunctionError: function is not the one that was compiled.

    Returns:
        One `Check(name, holds, detail)` per line.

    >>> import partita as pa
    >>> c = pa.compile("sin(3*x)", pa.Box([-1], [1]), tolerance=1e-3)
    >>> all(check.holds for check in pa.recheck(c))
    True
    """
    with crew_of(executor, checkpoint, retries).at_work():
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
    if isinstance(head, AttentionNetwork):
        yield from _wiring_again(compiled, head)
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


def _wiring_again(compiled: Compiled, head: AttentionNetwork) -> Iterator[Check]:
    """That the certificate is about this wiring, and, where f is defined by it, about this function."""
    certificate, digest = compiled.certificate, head.wiring_sha256()
    yield Check("wiring", certificate.model.get("wiring_sha256") == digest, f"sha256 {digest[:16]}…")
    if compiled.target.graph is not None or certificate.kind == "estimated":
        return
    try:
        made = head.function_sha256([part["graph"] for part in certificate.proof["parts"]])
    except (KeyError, TypeError) as error:
        yield Check("function", False, f"the certificate's parts cannot be read: {type(error).__name__}: {error}")
        return
    said = certificate.function
    same = said.get("type") == "network" and said.get("sha256") == made
    yield Check("function", same, f"what the wiring makes of the heads' functions, sha256 {made[:16]}…")


def _proof_again(compiled: Compiled) -> Iterator[Check]:
    """Every term from the stored tensors, by the proof that the certificate names; for a network also those of its heads."""
    certificate, head, target = compiled.certificate, compiled.head, compiled.target
    # certificates of schema 1 did not store the names of these two
    unnamed = "cover" if isinstance(target.domain, PointCloud) else "moments"
    proof = PROOFS.get(str(certificate.proof.get("method", unnamed)))
    if proof is None:
        yield Check("proof", False, f"there is no proof called {certificate.proof.get('method')!r}")
        return
    parts = None
    if isinstance(head, AttentionNetwork):
        try:
            parts = Part.all_from_json(certificate.proof.get("parts"), head.parts)
        except FormatError as error:
            yield Check("parts", False, str(error))
            return
        for part, part_head in zip(parts, head.parts):
            yield from part_checks(part, part_head)
    yield from proof_again(proof, head, target, certificate, earlier=parts)


def _tail_again(compiled: Compiled) -> Iterator[Check]:
    """The tail of a clipped function from its expression, or that the certificate lists it as declared."""
    certificate, target = compiled.certificate, compiled.target
    if target.tail is None:
        return
    stated = next((t.value for t in certificate.terms if t.name == "tail"), -1.0)
    if target.tail_declared or target.stated is None:
        said = target.tail.statement(norm_of(certificate))
        listed = any(a.statement == said and a.vouched_by == "caller" for a in certificate.assumptions)
        holds = listed and certificate.kind == "proved_given" and target.tail.norm <= stated * SLACK
        yield Check("tail", holds, f"{said}: declared by the caller, not checked", checked=False)
        return
    found = find_singularities(target.stated, target.box)
    again = math.inf if found is None else found.tail(target.tail.clip, norm_of(certificate))
    yield Check("tail", again <= stated * SLACK, f"{again:.6g} (stated {stated:.6g})")


def _estimate_again(compiled: Compiled) -> Iterator[Check]:
    """Fresh samples, other than those that the estimate rests on."""
    certificate, target = compiled.certificate, compiled.target
    if target.is_table:
        yield from _rows_again(compiled)
        return
    if target.ask is None:
        yield Check("estimate", True, "not checked: the function is not stored", checked=False)
        return
    seen = sampled_error(compiled.head, target, norm_of(certificate), seed=certificate.seed + 1)
    holds = seen.estimate <= certificate.tolerance
    if not certificate.has_tolerance:  # the estimate itself, which a few fresh points may exceed
        holds = _few_exceed(compiled) if certificate.norm == "inf" else seen.estimate <= 1.1 * certificate.error
    yield Check("estimate", holds, f"{seen.estimate:.6g} at {seen.samples:,} fresh points; nothing is proved")


def _rows_again(compiled: Compiled) -> Iterator[Check]:
    """The error at the rows that were held out, which the certificate and the table determine."""
    certificate, table, head = compiled.certificate, compiled.table, compiled.head
    if table is None or not isinstance(head, ScatteredHead):
        yield Check("estimate", True, "not checked: the table is not stored", checked=False)
        return
    found = held_out_error(head, table, certificate.seed, float(certificate.function["held_out"]))
    same = math.isclose(found, certificate.error, rel_tol=1e-6, abs_tol=1e-12)
    rows = int(certificate.facts.get("rows_held_out", 0))
    yield Check("estimate", same, f"{found:.6g} at the {rows:,} rows that were held out; nothing is proved")


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
