"""Sampled errors of a finished head: the largest error seen at points that were not used to build it."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch

from partita.arithmetic.environment import require_gradual_underflow
from partita.arithmetic.precision import PRECISIONS
from partita.errors import BudgetSpentError, EvaluationsSpentError
from partita.functions.target import Target
from partita.geometry.domains import Array
from partita.heads.head import Head
from partita.proofs.certificate import Term

__all__ = ["SampledError", "fresh_points", "sampled_error"]

_SAMPLES, _FEWEST = 1 << 14, 256
_CORNERS = 16  # of the domain of a black box
_LEAST = 32  # below which a budget that is spent leaves no estimate
_PART = 1 / 8  # of the evaluations before, that are made again to check a head: a function that took many is rough


def fresh_points(target: Target) -> int:
    """How many random points an estimate of the error rests on: few for a black box, which may be slow."""
    if target.graph is not None or target.interpolated:
        return _SAMPLES
    room = int(min(_SAMPLES, target.calls.most - target.calls.rows))
    return max(min(_FEWEST, room), min(room, int(_PART * target.calls.rows)))


@dataclass(frozen=True)
class SampledError:
    """`estimate`: the largest |f − net|, or the L_p mean, over `samples` fresh points; `point`: where it was largest.

    `failed`: how many further points do not count, because f has no value there. `from_rows`: whether the points are rows of a
    table that the fit did not see.
    """

    estimate: float
    samples: int
    point: tuple[float, ...]
    failed: int = 0
    from_rows: bool = False

    @property
    def share_failed(self) -> float:
        """The share of the fresh points that do not count."""
        return self.failed / max(self.samples + self.failed, 1)

    def term(self) -> Term:
        """The estimate as the first term of a certificate."""
        inputs = {"samples": float(self.samples)}
        if self.from_rows:
            return Term(
                "seen", self.estimate, "largest |y − net| in rows that the fit did not see", "held-out-rows", inputs
            )
        return Term("seen", self.estimate, "largest |f − net| in fresh samples", "sampled-estimate", inputs)


def sampled_error(
    head: Head, target: Target, norm: float = math.inf, *, samples: int | None = None, seed: int = 0
) -> SampledError:
    """Compare head and function at fresh random points and the corners: an estimate. *Theorem*: `sampled-estimate`.

    Where a budget is spent on the way, the estimate rests on fewer points. Points at which f failed do not count; an L_p mean is
    over the part of the domain where f has values.

    Args:
        samples: random points; as many as `fresh_points` says if None.

    Raises:
        TargetFailedError: f failed at more of the points than may be left out.
        UnsupportedError: subnormal numbers are flushed to zero here. DomainError: the head overflows somewhere on the domain.
    """
    domain = target.domain
    require_gradual_underflow()
    head.check_range(*PRECISIONS[str(head.dtype)].widened(target.box.lo.ravel(), target.box.hi.ravel()))
    fresh = domain.sample(fresh_points(target) if samples is None else samples, np.random.default_rng([seed, 7]))
    points = np.concatenate([fresh, domain.corners(256 if target.graph is not None else _CORNERS)])
    points, answers = _answers(target, points)
    samples = min(len(fresh), len(points))
    if math.isinf(norm):  # what is known already costs nothing
        points, answers = (np.concatenate(pair) for pair in zip((points, answers), target.answered()))
    with torch.no_grad():
        got = head.evaluate(torch.from_numpy(points).to(head.dtype)).double().numpy()
    error = np.abs(got - answers)
    missing = target.failed(points)
    error[missing] = 0.0  # f has no value there
    failed = int(missing[:samples].sum())
    if target.excluding is not None:
        target.excluding.require_few(failed, samples)
    worst = int(error.max(axis=1).argmax())
    estimate = float(error.max())
    if not math.isinf(norm) and estimate:
        mean = float(((error[:samples] / estimate) ** norm).sum(axis=1).mean())
        estimate *= (mean * target.volume) ** (1 / norm)
    return SampledError(estimate, samples - failed, tuple(points[worst].tolist()), failed)


def _answers(target: Target, points: Array) -> tuple[Array, Array]:
    """The points `(n, m)` and f there, `(n, out)`: the first of them only, if a budget is spent after that."""
    if target.graph is not None:
        return points, target(points)
    calls, parts = target.calls, []
    reserved, calls.reserved = calls.reserved, 0  # for this
    points = points[: int(min(len(points), calls.left))]
    step = max(_LEAST, len(points) // 16)
    progress, calls.progress = calls.progress, None  # the first of them are needed, whatever the time
    try:
        for start in range(0, len(points), step):
            parts.append(target(points[start : start + step]))
            calls.progress = progress
    except BudgetSpentError:
        if not parts:
            raise
    finally:
        calls.reserved, calls.progress = reserved, progress
    if not parts:
        raise EvaluationsSpentError(
            f"f was evaluated {calls.rows:,} times, and max_evaluations is used up, so the head cannot be checked"
        )
    answers = np.concatenate(parts)
    return points[: len(answers)], answers
