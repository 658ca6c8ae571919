"""Distribution shift: what a head does outside its domain, against the distance from it, with bounds where there are some."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from partita.compiler.compile import compile as compile_function
from partita.compiler.compiled import Compiled
from partita.geometry import Box
from partita.geometry.moments import AxisGeometry, distance_bounds
from partita.heads import GridHead
from partita.heads.head import require_folded
from partita.reproduction.experiment import Experiment, Outcome, Quotation, Setup, Verdict
from partita.reproduction.table import Table, Tables

__all__ = ["EXPERIMENT", "Settings", "outside_reach", "points_outside"]

# expression, Lipschitz constant in the 2-norm and bound on the Hessian's norm, both on the whole plane
_FUNCTIONS = {"wave": ("sin(2*x0) + cos(2*x1)", math.sqrt(8), 4.0), "plane": ("x0 - 0.5*x1", math.sqrt(1.25), 0.0)}
_AT_CENTERS = ("hard", "tuned", "affine")  # values, and slopes, of f at the centers
_ROUNDING = 1e-9


@dataclass(frozen=True)
class Settings:
    """Methods and tolerances, distances from the box, and points at each."""

    heads: tuple[tuple[str, float], ...] = (("hard", 0.3), ("tuned", 0.05), ("fitted", 1e-3), ("affine", 0.05))
    distances: tuple[float, ...] = (0.0, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0)
    points: int = 4000


def points_outside(box: Box, distance: float, count: int, rng: np.random.Generator) -> np.ndarray:
    """Points `(count, m)` whose Euclidean distance from the box is the one given, beside faces, edges and corners alike."""
    m = len(box.lo)
    inside = rng.uniform(box.lo, box.hi, (count, m))
    out = rng.random((count, m)) < 0.5
    out[np.arange(count), rng.integers(m, size=count)] = True
    steps = np.abs(rng.standard_normal((count, m))) * out
    steps *= distance / np.linalg.norm(steps, axis=1, keepdims=True)
    up = rng.random((count, m)) < 0.5
    moved: np.ndarray = np.where(out, np.where(up, box.hi + steps, box.lo - steps), inside)
    return moved if distance else inside


def outside_reach(axes: Sequence[np.ndarray], rates: Sequence[float], box: Box, distance: float) -> float | None:
    """`t + s`, a bound of `√E|z − v|²` at distance t from the box, `s² = Σ_i sup_B E(x_i − v_i)²`; None if a center lies outside.

    *Theorem*: `outside-domain`. Values of f at the centers are off by at most `ω(t + s)`, tangents by `½M(t + s)²`.

    Args:
        axes: the centers of a product grid, sorted, per axis.
        rates: R_i, per axis.
        box: the domain B.
        distance: t, from the box.
    """
    if not all(a[0] >= lo and a[-1] <= hi for a, lo, hi in zip(axes, box.lo, box.hi)):
        return None
    ends = zip(axes, rates, box.lo, box.hi)
    lengths = [distance_bounds(AxisGeometry.of(a, lo, hi), r, 2.0)[0] for a, r, lo, hi in ends]
    return distance + math.hypot(*lengths)


def _bound(c: Compiled, box: Box, distance: float, lipschitz: float, curvature: float) -> float | None:
    """The bound of `outside-domain` for a head that holds values or tangents of f at centers in the box."""
    if not isinstance(c.head, GridHead):
        return None
    reach = outside_reach([a.numpy() for a in c.head.axes], c.head.inverse_temperature.tolist(), box, distance)
    if reach is None:
        return None
    return lipschitz * reach if c.head.value_slopes is None else 0.5 * curvature * reach**2


def run(setup: Setup) -> Tables:
    """A row per function, head and distance: the largest error seen, the certified bound inside, and bounds outside."""
    settings: Settings = setup.settings
    box, rows = Box([-1.0, -1.0], [1.0, 1.0]), []
    for number, (name, (expression, lipschitz, curvature)) in enumerate(_FUNCTIONS.items()):
        for method, tolerance in settings.heads:
            c = compile_function(expression, box, tolerance=tolerance, method=method, seed=setup.seed)
            rng = np.random.default_rng(setup.seed)
            for distance in settings.distances:
                x = points_outside(box, distance, settings.points, rng)
                truth = c.target(x).reshape(-1)
                with torch.no_grad():
                    computed = c.head.evaluate(torch.from_numpy(x)).reshape(-1).numpy()
                error = np.abs(computed - truth)
                bound = _bound(c, box, distance, lipschitz, curvature) if method in _AT_CENTERS else None
                clamped = np.abs(np.asarray(replace(c, outside="clamp")(x)).reshape(-1) - truth)
                rows.append(
                    {
                        "function": name,
                        "head": method,
                        "keys": c.num_keys,
                        "distance": distance,
                        "error": error.max(),
                        "bound_inside": c.error_bound,
                        "bound_outside": bound,
                        "hull_bound": _hull(c, truth),
                        "clamped_error": clamped.max(),
                        "clamped_bound": c.error_bound + lipschitz * distance,
                        "share_beyond": (error > c.error_bound).mean(),
                    }
                )
        setup.progress(number + 1, len(_FUNCTIONS))
    return {"shift": Table.of(rows)}


def _hull(c: Compiled, truth: np.ndarray) -> float | None:
    """The farthest that f lies from an end of the values, which the output lies between; None for values affine in z."""
    scores = require_folded(c.head, "the hull of the values").affine_scores()
    if scores.value_slopes is not None:
        return None
    return float(max(scores.values.max() - truth.min(), truth.max() - scores.values.min()))


def verdict(tables: Tables) -> Verdict:
    """Outside the domain the certified bound is lost, for every function and head; and no bound of ours is broken."""
    t = tables["shift"]
    kept = (
        _kept(t, "error", "bound_outside")
        & _kept(t, "error", "hull_bound")
        & _kept(t, "clamped_error", "clamped_bound")
    )
    lost, words = [], []
    for name in t.distinct("function"):
        for head in t.where(function=name).distinct("head"):
            rows = t.where(function=name, head=head)
            far = int(rows["distance"].argmax())
            lost.append(bool(rows["error"][far] > rows["bound_inside"][far]))
            beyond = rows["distance"][rows["error"] > rows["bound_inside"]]
            one = int(np.abs(rows["distance"] - 1).argmin())
            first = f"from distance {beyond.min():g}" if len(beyond) else "never"
            words.append(
                f"{head} on the {name} {first} (inside {rows['bound_inside'][0]:.2g}, at distance "
                f"{rows['distance'][one]:g} {rows['error'][one]:.2g}, at {rows['distance'][far]:g} {rows['error'][far]:.2g}, "
                f"clamped {rows['clamped_error'][far]:.2g})"
            )
    outcome: Outcome = "holds" if all(lost) else "mixed" if any(lost) else "fails"
    if not kept.all():
        outcome = "fails"
    sentence = (
        f"The certified bound is exceeded outside the domain in {sum(lost)} of {len(lost)} cases: "
        + "; ".join(words)
        + f". {int(kept.sum())} of {len(t)} largest errors are within the bounds that hold outside."
    )
    return Verdict(outcome, sentence, {"lost": float(np.mean(lost)), "kept": float(kept.mean())})


def _kept(t: Table, error: str, column: str) -> np.ndarray:
    bound = t[column].astype(float)
    out: np.ndarray = np.isnan(bound) | (t[error] <= bound + _ROUNDING)
    return out


def control(seed: int) -> Tables:
    """Heads that are as good outside as inside."""
    rng = np.random.default_rng(seed)
    return {
        "shift": Table.of(
            {
                "function": "wave",
                "head": head,
                "distance": d,
                "error": 0.1 * rng.uniform(0.5, 1.0),
                "bound_inside": 0.1,
                "bound_outside": 0.1 + d,
                "hull_bound": 2.0,
                "clamped_error": 0.1,
                "clamped_bound": 0.1 + d,
            }
            for head in ("hard", "fitted")
            for d in Settings().distances
        )
    }


EXPERIMENT = Experiment(
    name="distribution-shift",
    title="Outside the domain",
    source="2504.19901, section 7 (limitations)",
    claim="The approximation is guaranteed on the compact domain only; outside it, nothing is accounted for.",
    quotations=(
        Quotation(
            "Like many universal approximation results, our approach does not account for distribution shifts or "
            "generalization beyond the compact domain used for training.",
            "section 7, limitations, Data Distribution Shifts",
        ),
    ),
    criterion=(
        "For each function and head: at the largest distance from the domain the largest error seen exceeds the bound "
        "certified inside. The claim holds if this is so in all cases, fails if in none, mixed otherwise. It also fails if an "
        "error exceeds a bound of ours that holds outside: L(t + s) for values at the centers of a grid in the domain, "
        "½M(t + s)² for tangents there, t the distance and s² the largest mean squared distance of a point of the domain from "
        "the centers; for constant values the farther end of the values; and for inputs clamped to the domain the certified bound "
        "plus L·t."
    ),
    method=(
        "sin 2x + cos 2y (wave) and x − y/2 (plane), compiled on [−1, 1]² as hard, tuned, fitted and affine heads; random points "
        "at Euclidean distances 0 to 16 beside faces and corners. The functions are known outside, the heads are not told."
    ),
    run=run,
    verdict=verdict,
    control=control,
    settings={
        "tiny": Settings(heads=(("hard", 0.8), ("fitted", 0.1)), distances=(0.0, 0.1, 1.0, 4.0), points=200),
        "default": Settings(),
        "full": Settings(heads=(("hard", 0.1), ("tuned", 0.01), ("fitted", 1e-6), ("affine", 0.01)), points=200_000),
    },
    seconds={"tiny": 1, "default": 5, "full": 60},
)
