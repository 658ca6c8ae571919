"""Doing the sums again: a certificate's hashes and arithmetic, from the stored tensors and the declared assumptions alone.

This is the producer checking its own books, with its own functions. It catches files that changed, terms that do not add up,
constants that interval arithmetic does not confirm; it is not an independent proof.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from scipy.spatial import KDTree

from partita.arithmetic.rounding import up
from partita.compiler.compiled import Compiled
from partita.compiler.known_regularity import gather
from partita.errors import ExpressionError, FormatError, PartitaError, UnsupportedError
from partita.functions.expressions import CONSTANTS, parse
from partita.functions.regularity import Curvature, RoughBoxes
from partita.functions.target import Target, variable_names
from partita.geometry.covers import Cover
from partita.geometry.domains import Array, Domain, PointCloud
from partita.geometry.grid import ProductGrid
from partita.heads.grid_head import GridHead
from partita.heads.head import FoldedHead
from partita.heads.scattered_head import ScatteredHead
from partita.methods.affine_grid import affine_terms, graph_cells
from partita.methods.cover import CoverRecipe, scattered_facts
from partita.methods.on_grid import GridRecipe, head_facts
from partita.methods.soft_grid import proved_terms
from partita.methods.tangents import curved_terms
from partita.proofs.bisection import box_terms, prove_boxes
from partita.proofs.center_values import Known, grid_terms
from partita.proofs.certificate import Certificate, Term, model_digest, total
from partita.proofs.construction import describe_domain, semantics_of, stored_distance, value_size
from partita.proofs.cover_proof import scattered_terms
from partita.proofs.running import UNIT_ROUNDOFF
from partita.proofs.sampled import sampled_error
from partita.proofs.soft_maximum import pieces_terms

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
    certificate, head, target = compiled.certificate, compiled.head, compiled.target
    digest = model_digest(head.state_dict())
    yield Check("tensors", digest == certificate.model.get("sha256"), f"sha256 {digest[:16]}…")
    same = list(certificate.domain.get("arguments", [])) == [describe_domain(d) for d in target.domains]
    yield Check("domain", same, " and ".join(str(d) for d in target.domains))
    yield Check(
        "arithmetic", certificate.semantics == semantics_of(head.dtype), f"the head is {semantics_of(head.dtype)}"
    )
    if target.graph is not None:
        stated = (
            certificate.function.get("sha256") == target.graph.sha256
            and certificate.function.get("text") == target.label
        )
        yield Check(
            "function", stated and _reads_as(target), f"{target.label}, graph sha256 {target.graph.sha256[:16]}…"
        )
    if certificate.kind == "estimated":
        yield from _estimate_again(compiled)
    else:
        yield from _terms_again(compiled)
        summed = total(certificate.terms)
        yield Check("sum", summed <= certificate.error_bound, f"{summed:.6g} ≤ {certificate.error_bound:.6g}")
    yield Check(
        "tolerance", certificate.error <= certificate.tolerance, f"{certificate.error:.6g} ≤ {certificate.tolerance:g}"
    )
    if certificate.witness is not None and target.ask is not None:
        seen = float(compiled.errors_at(np.array([certificate.witness.point]))[0])
        inside = certificate.norm != "inf" or seen <= certificate.error_bound
        yield Check("witness", inside, f"error {seen:.6g} at the worst point on record")


def _terms_again(compiled: Compiled) -> Iterator[Check]:
    """Every term from the stored tensors, by the route that the certificate says it was found by."""
    certificate = compiled.certificate
    if certificate.proof.get("method") == "taylor":
        terms = _taylor_terms(compiled)
    elif certificate.proof.get("method") == "cells":
        terms = _cell_terms(compiled)
    elif certificate.proof.get("method") == "curvature":
        terms = _curved_terms(compiled)
        used = str(Curvature(float(certificate.known["curvature"])))
        listed = any(a.statement == used and a.vouched_by == "caller" for a in certificate.assumptions)
        yield Check(
            "knowledge", listed, f"{used}: {'declared by the caller' if listed else 'used, but not listed as assumed'}"
        )
        yield Check(
            "values", True, "f and its differences at the centers: declared by the caller, not re-checked, only used"
        )
    elif certificate.proof.get("method") == "boxes":
        terms = _box_terms(compiled)
    elif certificate.proof.get("method") == "pieces":
        terms = _pieces_terms(compiled)
    else:
        known, source = _known(compiled)
        yield Check("knowledge", known is not None, source)
        if known is None:
            return
        error = _value_error(compiled, known)
        stated_error = float(certificate.model.get("value_error", -1.0))
        yield Check("values", error <= stated_error * _SLACK, f"max |V_j − f(v_j)| ≤ {error:.3g}")
        terms = _terms(compiled, known, error)
    stated_terms = {t.name: t.value for t in certificate.terms}
    for term in terms:
        said = stated_terms.get(term.name, 0.0)
        yield Check(term.name, term.value <= said * _SLACK, f"{term.value:.6g} (stated {said:.6g})")


def _taylor_terms(compiled: Compiled) -> list[Term]:
    """The proof of a soft grid once more, from its tensors and the graph."""
    head, certificate, target = compiled.head, compiled.certificate, compiled.target
    if not isinstance(head, GridHead) or target.graph is None:
        raise UnsupportedError("a Taylor proof is about a grid head and an expression.")
    return proved_terms(head, target, _grid_recipe(head, certificate), _moduli(compiled))[0]


def _cell_terms(compiled: Compiled) -> list[Term]:
    """The proof of affine cells once more."""
    head, certificate, target = compiled.head, compiled.certificate, compiled.target
    if not isinstance(head, GridHead) or head.value_slopes is None or target.graph is None:
        raise UnsupportedError("a proof cell by cell is about a grid head with slopes and an expression.")
    box, recipe = target.domain.bounding_box(), _grid_recipe(head, certificate)
    return affine_terms(head, partial(graph_cells, head, target.graph, box, recipe), box, recipe, _moduli(compiled))


def _curved_terms(compiled: Compiled) -> list[Term]:
    """The arithmetic of a declared bound of second derivatives once more."""
    head, certificate = compiled.head, compiled.certificate
    if not isinstance(head, GridHead) or head.value_slopes is None or certificate.kind != "proved_given":
        raise UnsupportedError("a declared bound of second derivatives is used for grid heads with slopes.")
    curvature = Curvature(float(certificate.known["curvature"]))
    recipe, box = _grid_recipe(head, certificate), compiled.target.domain.bounding_box()
    return curved_terms(
        head, curvature, box, recipe, float(certificate.known["differences"]), float(certificate.known["scale"])
    )


def _moduli(compiled: Compiled) -> Known | None:
    """What rounding the inputs moves f by, for heads below float64: computed again."""
    if compiled.head.dtype == torch.float64:
        return None
    norm = _norm(compiled.certificate)
    return gather(compiled.target, norm=norm).known


def _grid_recipe(head: GridHead, certificate: Certificate) -> GridRecipe:
    rates = tuple(head.inverse_temperature.double().tolist())
    return GridRecipe(head.counts, rates, head.half_windows, _norm(certificate), certificate.tolerance, head.dtype)


def _box_terms(compiled: Compiled) -> list[Term]:
    """The bisection once more, from the tensors, the graph and the stated directions of the boxes."""
    head, certificate, target = compiled.head, compiled.certificate, compiled.target
    if not isinstance(head, ScatteredHead) or target.graph is None:
        raise UnsupportedError("a proof by bisection is about a scattered head and an expression.")
    box, m = target.domain.bounding_box(), head.dimension
    stated = np.array(certificate.proof.get("axes", []), dtype=float)
    axes = stated.reshape(m, m) if stated.size == m * m else None
    if stated.size and (axes is None or np.abs(axes @ axes.T - np.eye(m)).max() > 1e-12):
        raise FormatError("the certificate's directions of boxes are not orthogonal.")
    proof = prove_boxes(
        head,
        target.graph,
        box,
        target=certificate.terms[0].value,
        degree=int(certificate.proof.get("degree", 2)),
        max_boxes=4 * int(certificate.proof.get("boxes", 0)) + 1000,
        unit_roundoff=UNIT_ROUNDOFF[certificate.semantics],
        axes=axes,
    )
    return box_terms(head, proof, box)


def _pieces_terms(compiled: Compiled) -> list[Term]:
    head, target = compiled.head, compiled.target
    if not isinstance(head, ScatteredHead) or target.graph is None:
        raise UnsupportedError("a head made of pieces is a scattered head of an expression.")
    return pieces_terms(head, target.graph, target.domain.bounding_box())


def _estimate_again(compiled: Compiled) -> Iterator[Check]:
    """Fresh samples, other than those that the estimate rests on."""
    certificate, target = compiled.certificate, compiled.target
    if target.ask is None:
        yield Check("estimate", True, "the function was not stored: nothing to compare with")
        return
    seen = sampled_error(compiled.head, target, _norm(certificate), seed=certificate.seed + 1)
    holds = seen.estimate <= certificate.tolerance
    yield Check("estimate", holds, f"{seen.estimate:.6g} at {seen.samples:,} fresh points; nothing is proved")


def _reads_as(target: Target) -> bool:
    """Whether the text shown for f is the graph that the claim is about, is printed from it, or is only a name."""
    graph, names = target.graph, variable_names(target.domains)
    if graph is None:
        return False
    if re.fullmatch(r"<lambda>|[^\W\d]\w*", target.label) and target.label not in (*names[0], *names[1], *CONSTANTS):
        return True
    try:
        return target.label == graph.infix(names[0]) or parse(target.label, *names) == graph
    except ExpressionError:
        return False


def _known(compiled: Compiled) -> tuple[Known | None, str]:
    """The moduli the certificate states, if they are still warranted: by interval arithmetic, or by whoever declared them.

    A claim of kind `proved` is never taken at its word: its constants are computed again from the graph.
    """
    certificate, target = compiled.certificate, compiled.target
    try:
        stated = Known.from_json(certificate.known)
    except (TypeError, ValueError, KeyError, PartitaError) as error:
        return None, f"the certificate's moduli cannot be read: {error}"
    declared = any(a.vouched_by == "caller" and "≤" in a.statement for a in certificate.assumptions)
    if certificate.kind == "proved_given" and declared:
        return stated, "declared by the caller: not re-checked, only used"
    if target.graph is None:
        return None, "nobody vouches for the moduli of this black box"
    ours = gather(target, norm=_norm(certificate)).known
    if ours.modulus is None or stated.modulus is None or ours.per_axis is None or stated.per_axis is None:
        return None, "the certificate states no modulus"
    pairs = [(ours.modulus.constant, stated.modulus.constant), *zip(ours.per_axis.constants, stated.per_axis.constants)]
    fits = len(pairs) == 1 + target.domain.dimension and stated.modulus.exponent == 1
    if not fits or any(a > b * _SLACK for a, b in pairs):
        return None, "interval arithmetic does not confirm the constants"
    return Known(stated.modulus, stated.per_axis, ours.jumps), "confirmed by interval arithmetic"


def _norm(certificate: Certificate) -> float:
    return math.inf if certificate.norm == "inf" else float(certificate.norm)


def _value_error(compiled: Compiled, known: Known) -> float:
    """`max |V_j − f(v_j)|` again, for a graph; a black box's answers are what they were."""
    graph, head = compiled.target.graph, compiled.head
    if graph is None:
        return 0.0 if head.dtype == torch.float64 else float(compiled.certificate.model.get("value_error", math.inf))
    rough = known.jumps if isinstance(known.jumps, RoughBoxes) else None
    centers, worst, step = _centers(compiled), 0.0, 1 << 16
    table = head.get_buffer("values").detach()
    for start in range(0, head.num_keys, step):
        points = centers(start, min(start + step, head.num_keys))
        kept = table[start : start + len(points)].double().numpy()
        worst = max(worst, float(stored_distance(graph.enclose(points, points), kept, points, rough).max()))
    return worst


def _centers(compiled: Compiled) -> Callable[[int, int], Array]:
    """(start, stop) to the points where f was asked."""
    partition, head, domain = compiled.partition, compiled.head, compiled.target.domain
    if isinstance(partition, ProductGrid):
        return lambda start, stop: partition.centers_of(np.arange(start, stop))
    centers = _cover_again(head, domain).centers
    return lambda start, stop: centers[start:stop]


def _terms(compiled: Compiled, known: Known, value_error: float) -> list[Term]:
    head, certificate, domain = compiled.head, compiled.certificate, compiled.target.domain
    if isinstance(head, GridHead):
        recipe = _grid_recipe(head, certificate)
        return grid_terms(head_facts(head, domain.bounding_box(), recipe, value_error), known, recipe.norm)
    if not isinstance(domain, PointCloud) or known.modulus is None:
        raise UnsupportedError("a scattered head is re-checked on a PointCloud with a Euclidean modulus.")
    cover = _cover_again(head, domain)
    recipe_on_cover = CoverRecipe(cover, float(head.inverse_temperature), certificate.tolerance, head.dtype)
    largest, spread = value_size(head.get_buffer("values"))
    return scattered_terms(
        scattered_facts(domain, recipe_on_cover, largest=largest, spread=spread, value_error=value_error), known.modulus
    )


def _cover_again(head: FoldedHead, cloud: Domain) -> Cover:
    """The cover that the stored centers make of the cloud: each center is the listed point it was rounded from."""
    if not isinstance(head, ScatteredHead) or not isinstance(cloud, PointCloud):
        raise UnsupportedError("only a scattered head on a PointCloud rests on a cover.")
    stored = head.centers.double().numpy()
    _, labels = KDTree(cloud.flat).query(stored)
    centers = cloud.flat[labels]
    distance, _ = KDTree(centers).query(cloud.flat)
    return Cover(centers, labels, float(up(distance.max(), 8)) if distance.max() else 0.0)
