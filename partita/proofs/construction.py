"""What every construction returns, and what they share."""

from __future__ import annotations

import platform
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from partita.arithmetic.interval import Interval
from partita.arithmetic.rounding import up
from partita.errors import LipschitzContradictedError
from partita.functions.regularity import RoughBoxes
from partita.functions.target import Target, sample_hash
from partita.geometry.domains import Array, Box, Domain
from partita.geometry.partitions import Partition
from partita.heads.head import FoldedHead
from partita.proofs.center_values import Known
from partita.proofs.certificate import Assumption, Certificate
from partita.proofs.worst_point import sample_pairs

__all__ = [
    "Construction",
    "PairTable",
    "Progress",
    "describe_domain",
    "describe_function",
    "environment",
    "platform_assumption",
    "semantics_of",
    "some_answers",
    "stored_distance",
    "undefined_roots",
    "value_size",
    "value_table",
    "vouched",
]

Progress = Callable[[str, int, int], None]  # (what, done, of)
_PLACES = 4096  # boxes in which f is looked for a value


@dataclass(frozen=True, eq=False)
class Construction:
    """A head built by formula, the partition it makes, and what is proved of it."""

    head: FoldedHead
    partition: Partition
    certificate: Certificate


def describe_domain(domain: Domain) -> dict[str, Any]:
    if isinstance(domain, Box):
        return {
            "type": "box",
            "shape": list(domain.shape),
            "lo": domain.lo.ravel().tolist(),
            "hi": domain.hi.ravel().tolist(),
        }
    return {
        "type": "point_cloud",
        "shape": list(domain.shape),
        "points": len(domain.points),
        "fill_distance": domain.fill_distance,
        "sha256": sample_hash(domain.flat, domain.flat[:0]),
    }


def describe_function(target: Target, centers: Array, values: Array) -> dict[str, Any]:
    """The graph itself, or a black box known by the hash of some of its answers."""
    if target.graph is not None:
        return {"type": "graph", "text": target.label, "graph": target.graph.to_json(), "sha256": target.graph.sha256}
    return {"type": "black box", "label": target.label, "answers": len(centers), "sha256": sample_hash(centers, values)}


def some_answers(target: Target) -> tuple[Array, Array]:
    """Some answers of a black box, by which a certificate knows it; none of a graph, which is known itself."""
    points = target.domain.sample(256, np.random.default_rng(0))[: 0 if target.graph is not None else None]
    return points, target(points)


def semantics_of(dtype: torch.dtype) -> str:
    """The dtype's name: float64 or float32."""
    return str(dtype).removeprefix("torch.")


def platform_assumption(dtype: torch.dtype) -> Assumption:
    return Assumption(
        f"{semantics_of(dtype)} arithmetic is IEEE 754 and exp is within 8 units in the last place", "platform"
    )


def environment() -> dict[str, str]:
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "machine": platform.machine(),
    }


def value_table(
    target: Target,
    centers: Callable[[int, int], Array],
    count: int,
    dtype: torch.dtype,
    *,
    rough: RoughBoxes | None = None,
    progress: Progress | None = None,
) -> tuple[torch.Tensor, float]:
    """`V_j = f(v_j)` in `dtype`, `(count, out)`, and a bound of |V_j − f(v_j)|.

    A graph is evaluated in intervals, so its rounding is enclosed; a black box is what it answers, and only storing it rounds.

    Args:
        centers: (start, stop) to the flat centers of those cells.
        rough: centers in these boxes may lie on a jump; any value between its two sides will do there, for the points that
            such a center concerns are those of the jump term.
    """
    out = torch.empty(count, target.num_outputs, dtype=dtype)
    worst, step = 0.0, 1 << 16
    for start in range(0, count, step):
        points = centers(start, min(start + step, count))
        if target.graph is not None:
            target(points)  # raises where f is not finite
            enclosure = target.graph.enclose(points, points)
            middle = enclosure.mid
            stored = torch.from_numpy(middle).to(dtype)
            kept = stored.double().numpy()
            distance = stored_distance(enclosure, kept, points, rough)
        else:
            answers = target(points)
            stored = torch.from_numpy(answers).to(dtype)
            distance = np.zeros(1) if dtype == torch.float64 else up(np.abs(stored.double().numpy() - answers))
        out[start : start + len(points)] = stored
        worst = max(worst, float(distance.max()))
        if progress is not None:
            progress("values", min(start + step, count), count)
    return out, worst


def stored_distance(enclosure: Interval, kept: Array, points: Array, rough: RoughBoxes | None) -> Array:
    """How far stored values may be from f, `(n, out)`: 0 where a center lies in a rough box."""
    distance = np.maximum(up(np.abs(enclosure.hi - kept)), up(np.abs(kept - enclosure.lo)))
    if rough is not None:
        wide = np.flatnonzero(distance.max(axis=1) > 1e-9 * np.abs(kept).max())
        distance[wide[rough.contain(points[wide])]] = 0.0
    return distance


def value_size(values: torch.Tensor) -> tuple[float, float]:
    """`max|V|` and the largest `max V − min V` of a component, rounded up."""
    table = values.detach().double()
    spread = float((table.max(dim=0).values - table.min(dim=0).values).max())
    return float(table.abs().max()), float(up(spread)) if spread else 0.0


def vouched(target: Target, known: Known, *, declared: bool, table: PairTable | None = None) -> list[Assumption]:
    """The moduli as assumptions, attacked where the caller vouches for them: on sampled pairs, and on `table` if there is one.

    Raises:
        LipschitzContradictedError: a pair of points moves faster than declared.
    """
    statements = [str(k) for k in (known.modulus, known.per_axis) if k is not None]
    partial = undefined_roots(target) + _undefined_places(target)
    if not declared:
        off = "" if known.jumps is None else f", {known.jumps}"
        return [Assumption(" and ".join(statements) + off, "interval arithmetic"), *partial]
    tables = [t for t in (_sampled_table(target), table) if t is not None]
    ratio = max((worst_ratio(target.label, known, t) for t in tables), default=0.0)
    attack = " and ".join(t.name for t in tables)
    if known.jumps is not None:
        found = [Assumption(s, "caller") for s in statements]
        found.append(Assumption(str(known.jumps), "caller", ratio, f"its height, on {attack}"))
    else:
        found = [Assumption(s, "caller", ratio, attack) for s in statements]
    found += partial
    if target.graph is None:
        found.append(Assumption("f answers the same question the same way everywhere, as it did when probed", "caller"))
    return found


def undefined_roots(target: Target) -> list[Assumption]:
    """What a claim about an expression with square roots is about."""
    if target.graph is None or all(node.operation != "sqrt" for node in target.graph.nodes):
        return []
    return [Assumption("where a square root has no value, the claim is about its extension by 0", "construction")]


def _undefined_places(target: Target) -> list[Assumption]:
    """A modulus of f speaks of where f has a value; said unless it is proved to have one everywhere."""
    if target.graph is None:
        return []
    box = target.domain.bounding_box()
    parts = max(1, int(_PLACES ** (1 / box.dimension)))
    radius = box.sides / parts / 2
    reach = radius * (1 + 1e-9) + 1e-15 * np.maximum(np.abs(box.lo), np.abs(box.hi)).ravel()
    middles = [a + r * (2 * np.arange(parts) + 1) for a, r in zip(box.lo.ravel(), radius)]
    centers = np.stack([g.ravel() for g in np.meshgrid(*middles, indexing="ij")], axis=1)
    if np.isfinite(target.graph.taylor(centers, np.broadcast_to(reach, centers.shape), 1).remainder).all():
        return []
    return [Assumption("the claim is about the points of the domain at which f has a value", "construction")]


@dataclass(frozen=True, eq=False)
class PairTable:
    """Pairs of points `(n, m)` and how far f moves between them, `(n,)`; `scale` is max|f|, to which f's own rounding relates."""

    x: Array
    y: Array
    moved: Array
    scale: float
    name: str


def _sampled_table(target: Target) -> PairTable | None:
    x, y = sample_pairs(target.domain)
    if not len(x):
        return None
    f_x, f_y = target(x), target(y)
    return PairTable(x, y, np.abs(f_x - f_y).max(axis=1), float(np.abs(f_x).max()), f"{len(x):,} pairs")


def worst_ratio(label: str, known: Known, table: PairTable) -> float:
    """The largest observed/allowed movement; an error if it exceeds 1 by more than rounding can explain."""
    step = np.abs(table.y - table.x)
    distance = np.sqrt((step**2).sum(axis=1))
    noise = 1e-14 * table.scale
    worst = 0.0
    for allowed, text in _allowances(known, step, distance):
        with np.errstate(divide="ignore", over="ignore"):
            ratio = np.where(table.moved > noise, (table.moved - noise) / np.maximum(allowed, 1e-300), 0.0)
        i = int(ratio.argmax())
        worst = max(worst, float(ratio[i]))
        if ratio[i] > 1 + 1e-9:
            raise LipschitzContradictedError(
                f"{label} moves by {table.moved[i]:.6g} between {table.x[i].tolist()} and {table.y[i].tolist()} "
                f"(distance {distance[i]:.3g}), {ratio[i]:.4g} times what the declared {text} allows; "
                f"the smallest value consistent with the samples is {ratio[i]:.6g} times larger. "
                "(Rounding inside f counts too: a function that answers in float32 needs a little more than its exact constant.)"
            )
    return worst


def _allowances(known: Known, step: Array, distance: Array) -> list[tuple[Array, str]]:
    """How far f may move between points `step` apart, by each thing that is known; across a jump by its height only."""
    if known.jumps is not None:
        return [(np.full_like(distance, known.jumps.height), f"height {known.jumps.height:g} of its jumps")]
    found = []
    if known.modulus is not None:
        found.append(
            (known.modulus.constant * distance**known.modulus.exponent, f"constant {known.modulus.constant:g}")
        )
    if known.per_axis is not None:
        found.append((step @ np.array(known.per_axis.constants), f"constants {known.per_axis.constants} per axis"))
    return found
