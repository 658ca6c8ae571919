"""Sampled errors of a finished head: the largest error seen at points that were not used to build it."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch

from partita.arithmetic.environment import require_gradual_underflow
from partita.arithmetic.precision import PRECISIONS
from partita.functions.target import Target
from partita.heads.head import FoldedHead
from partita.proofs.certificate import Term

__all__ = ["SampledError", "sampled_error"]

_SAMPLES = 1 << 14


@dataclass(frozen=True)
class SampledError:
    """`estimate`: the largest |f − net|, or the L_p mean, over `samples` fresh points; `point`: where it was largest."""

    estimate: float
    samples: int
    point: tuple[float, ...]

    def term(self) -> Term:
        """The estimate as the first term of a certificate."""
        inputs = {"samples": float(self.samples)}
        return Term("seen", self.estimate, "largest |f − net| in fresh samples", "sampled-estimate", inputs)


def sampled_error(
    head: FoldedHead, target: Target, norm: float = math.inf, *, samples: int = _SAMPLES, seed: int = 0
) -> SampledError:
    """Compare head and function at fresh random points and the corners: an estimate. *Theorem*: `sampled-estimate`.

    Raises:
        UnsupportedError: subnormal numbers are flushed to zero here. DomainError: the head overflows somewhere on the domain.
    """
    domain = target.domain
    require_gradual_underflow()
    head.check_range(*PRECISIONS[str(head.dtype)].widened(target.box.lo.ravel(), target.box.hi.ravel()))
    points = np.concatenate([domain.sample(samples, np.random.default_rng([seed, 7])), domain.corners(256)])
    with torch.no_grad():
        got = head.evaluate(torch.from_numpy(points).to(head.dtype)).double().numpy()
    error = np.abs(got - target(points))
    worst = int(error.max(axis=1).argmax())
    estimate = float(error.max())
    if not math.isinf(norm) and estimate:
        mean = float(((error[:samples] / estimate) ** norm).sum(axis=1).mean())
        estimate *= (mean * target.volume) ** (1 / norm)
    return SampledError(estimate, samples, tuple(points[worst].tolist()))
