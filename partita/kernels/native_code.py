"""How the native loops are compiled by numba, and the exponential that they share.

Imported only where numba is, when a batch is worth it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numba import njit

__all__ = ["CACHED", "exp_native", "fused", "loop"]

_SMALLEST_EXPONENT = -708.0  # e^x below is taken as 0
_SHIFTER = 6755399441055744.0  # 1.5·2⁵²: adding it rounds to an integer and leaves that integer in the low bits


def _can_be_cached() -> bool:
    """Whether numba finds a folder to keep machine code in: beside this file, or the user's own cache."""
    try:
        njit(cache=True)(_can_be_cached)
    except RuntimeError:  # neither can be written
        return False
    return True


CACHED = _can_be_cached()

# numpy's error model: a division does not branch, so that loops vectorise
loop: Callable[..., Any] = njit(cache=CACHED, nogil=True, error_model="numpy")
# a·b + c may round once
fused: Callable[..., Any] = njit(cache=CACHED, nogil=True, error_model="numpy", fastmath={"contract"})


@fused
def exp_native(x):
    """`e^x` for x ≤ 0, in float64 within 2 ulp: `2ⁿ·e^r`, `|r| ≤ ln 2/2`, by Taylor's polynomial of degree 13.

    The remainder is below `0.35¹⁴/14! < 5·10⁻¹⁸`; ln 2 is subtracted in two parts, the first short enough that n
    times it is exact. NaN stays NaN.
    """
    t = _SMALLEST_EXPONENT if x < _SMALLEST_EXPONENT else np.float64(x)
    shifted = t * 1.4426950408889634 + _SHIFTER
    n = shifted - _SHIFTER
    r = (t - n * 6.93147180369123816490e-01) - n * 1.90821492927058770002e-10
    p = r / 6227020800 + 1 / 479001600
    p = p * r + 1 / 39916800
    p = p * r + 1 / 3628800
    p = p * r + 1 / 362880
    p = p * r + 1 / 40320
    p = p * r + 1 / 5040
    p = p * r + 1 / 720
    p = p * r + 1 / 120
    p = p * r + 1 / 24
    p = p * r + 1 / 6
    p = p * r + 1 / 2
    power = np.int64((np.float64(shifted).view(np.int64) + 1023) << 52).view(np.float64)
    return 0.0 if x < _SMALLEST_EXPONENT else ((p * r + 1) * r + 1) * power
