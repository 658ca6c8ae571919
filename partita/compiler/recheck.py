"""Doing the sums again: a certificate's hashes and arithmetic, from the stored tensors and the declared assumptions alone.

This is the producer checking its own books, with its own functions. It catches files that changed, terms that do not add up,
constants that interval arithmetic does not confirm; it is not an independent proof.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from scipy.spatial import KDTree

from partita.arithmetic.rounding import up
from partita.attention.grid_head import GridHead
from partita.attention.scattered_head import ScatteredHead
from partita.certify.certificate import Term, model_digest, total
from partita.certify.grid_bounds import Known, grid_terms
from partita.certify.scattered_bounds import scattered_terms
from partita.compiler.compiled import Compiled
from partita.compiler.knowledge import gather
from partita.constructions.construction import value_size
from partita.constructions.on_grid import GridRecipe, head_facts
from partita.constructions.small_domain import CoverRecipe, scattered_facts
from partita.geometry.covers import Cover
from partita.geometry.domains import Array, PointCloud
from partita.geometry.grid import ProductGrid

__all__ = ["Check", "recheck"]

_SLACK = 1 + 1e-9  # recomputed terms may differ in their last digits between platforms


@dataclass(frozen=True)
class Check:
    """One line of a re-check: what was compared and whether it holds."""

    name: str
    holds: bool
    detail: str


def recheck(compiled: Compiled) -> tuple[Check, ...]:
    """Recompute every term from the head's tensors, compare, and re-verify hashes, constants and the witness."""
    return tuple(_checks(compiled))


def _checks(compiled: Compiled) -> Iterator[Check]:
    certificate, head = compiled.certificate, compiled.head
    digest = model_digest(head.state_dict())
    yield Check("tensors", digest == certificate.model["sha256"], f"sha256 {digest[:16]}…")
    if compiled.target.graph is not None:
        graph = compiled.target.graph.sha256
        yield Check("function", graph == certificate.function.get("sha256"), f"graph sha256 {graph[:16]}…")
    known, source = _known(compiled)
    yield Check("knowledge", known is not None, source)
    if known is None:
        return
    error = _value_error(compiled)
    yield Check("values", error <= certificate.model["value_error"] * _SLACK, f"max |V_j − f(v_j)| ≤ {error:.3g}")
    stated = {t.name: t.value for t in certificate.terms}
    for term in _terms(compiled, known, error):
        said = stated.get(term.name, 0.0)
        yield Check(term.name, term.value <= said * _SLACK, f"{term.value:.6g} (stated {said:.6g})")
    summed = total(certificate.terms)
    yield Check("sum", summed <= certificate.error_bound, f"{summed:.6g} ≤ {certificate.error_bound:.6g}")
    yield Check(
        "tolerance",
        certificate.error_bound <= certificate.tolerance,
        f"{certificate.error_bound:.6g} ≤ {certificate.tolerance:g}",
    )
    if certificate.witness is not None and compiled.target.ask is not None:
        seen = float(compiled.errors_at(np.array([certificate.witness.point]))[0])
        inside = certificate.norm != "inf" or seen <= certificate.error_bound
        yield Check("witness", inside, f"error {seen:.6g} at the worst point on record")


def _known(compiled: Compiled) -> tuple[Known | None, str]:
    """The moduli the certificate states, if they are still warranted: by interval arithmetic, or by whoever declared them."""
    certificate = compiled.certificate
    stated = Known.from_json(certificate.known)
    norm = math.inf if certificate.norm == "inf" else float(certificate.norm)
    if any(a.vouched_by == "caller" and a.worst_ratio is not None for a in certificate.assumptions):
        return stated, "declared by the caller: not re-checked, only used"
    again = gather(compiled.target, norm=norm, lipschitz=None, modulus=None, jumps=None)
    ours = again.known
    if ours.modulus is None or stated.modulus is None or ours.per_axis is None or stated.per_axis is None:
        return None, "the certificate states no modulus"
    weaker = ours.modulus.constant <= stated.modulus.constant * _SLACK
    weaker &= all(a <= b * _SLACK for a, b in zip(ours.per_axis.constants, stated.per_axis.constants, strict=True))
    return (
        (Known(stated.modulus, stated.per_axis, ours.jumps), again.source)
        if weaker
        else (None, "interval arithmetic does not confirm the constants")
    )


def _value_error(compiled: Compiled) -> float:
    """`max |V_j − f(v_j)|` again, for a graph; a black box's answers are what they were."""
    graph, head = compiled.target.graph, compiled.head
    if graph is None:
        return 0.0 if head.dtype == torch.float64 else compiled.certificate.model["value_error"]
    worst, step = 0.0, 1 << 16
    for start in range(0, head.num_keys, step):
        points = _centers(compiled, start, min(start + step, head.num_keys))
        enclosure = graph.enclose(points, points)
        kept = head.values[start : start + len(points)].detach().double().numpy()
        worst = max(worst, float(up(np.maximum(np.abs(enclosure.hi - kept), np.abs(kept - enclosure.lo))).max()))
    return worst


def _centers(compiled: Compiled, start: int, stop: int) -> Array:
    if isinstance(compiled.partition, ProductGrid):
        return compiled.partition.centers_of(np.arange(start, stop))
    assert isinstance(compiled.head, ScatteredHead) and isinstance(compiled.target.domain, PointCloud)
    return _cover_again(compiled.head, compiled.target.domain).centers[start:stop]


def _terms(compiled: Compiled, known: Known, value_error: float) -> list[Term]:
    head, certificate, domain = compiled.head, compiled.certificate, compiled.target.domain
    norm = math.inf if certificate.norm == "inf" else float(certificate.norm)
    if isinstance(head, GridHead):
        rates = tuple(head.inverse_temperature.double().tolist())
        recipe = GridRecipe(head.counts, rates, head.half_windows, norm, certificate.tolerance, head.dtype)
        return grid_terms(head_facts(head, domain.bounding_box(), recipe, value_error), known, norm)
    assert isinstance(head, ScatteredHead) and isinstance(domain, PointCloud) and known.modulus is not None
    cover = _cover_again(head, domain)
    recipe_on_cover = CoverRecipe(cover, float(head.inverse_temperature), certificate.tolerance, head.dtype)
    largest, spread = value_size(head.values)
    return scattered_terms(
        scattered_facts(domain, recipe_on_cover, largest=largest, spread=spread, value_error=value_error), known.modulus
    )


def _cover_again(head: ScatteredHead, cloud: PointCloud) -> Cover:
    """The cover that the stored centers make of the cloud: each center is the listed point it was rounded from."""
    stored = head.centers.double().numpy()
    _, labels = KDTree(cloud.flat).query(stored)
    centers = cloud.flat[labels]
    distance, _ = KDTree(centers).query(cloud.flat)
    return Cover(centers, labels, float(up(distance.max(), 8)) if distance.max() else 0.0)
