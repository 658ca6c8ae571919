"""Whether a head can be run anywhere on a box: what rounding terms do not cover.

Rounding terms cover relative errors and underflow of results. They do not cover overflow, nor an R whose half is rounded because it
is subnormal. Proofs and loading ask here before they rely on the terms.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from partita.arithmetic.precision import Precision
from partita.errors import DomainError
from partita.geometry.domains import Array, Box
from partita.heads.head import FoldedHead

__all__ = ["numbers", "require_runnable"]

_MARGIN = 0.85  # of the largest number of the dtype: sums are rounded on the way
_SLACK = 1 + 1e-9  # what these checks themselves lose to rounding


def require_runnable(head: FoldedHead, box: Box) -> None:
    """A DomainError unless R/2 is a normal number of the dtype and nothing that the head forms on the box overflows."""
    if head.dtype not in (torch.float64, torch.float32):
        raise DomainError(f"the head is {head.dtype}; heads are certified in torch.float64 and torch.float32.")
    precision, rates = Precision.of(head.dtype), np.atleast_1d(numbers(head.inverse_temperature))
    least, most = 2 * precision.smallest, _MARGIN * precision.largest
    if not (rates.min() >= least and np.isfinite(rates).all()):
        raise DomainError(
            f"the inverse temperature {rates.min():.4g} is below {least:.4g}: half of it is not a normal {precision.name}",
            "Rescale the variables.",
        )
    lo, hi = precision.widened(box.lo.ravel(), box.hi.ravel())
    with np.errstate(over="ignore", invalid="ignore"):
        largest_input = float(np.maximum(np.abs(lo), np.abs(hi)).max())
        for what, size in (("an input", largest_input), *head.sizes_on(lo, hi)):
            if not size * _SLACK < most:
                raise DomainError(
                    f"{what} may reach {size:.4g} while the head runs, and {precision.name} holds numbers up to {most:.4g}",
                    "Rescale the variables or the function.",
                )


def numbers(tensor: Tensor) -> Array:
    """A tensor as a float64 array."""
    return np.asarray(tensor.detach().double().cpu().numpy())
