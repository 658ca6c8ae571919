"""How the native loops are compiled by numba, and the exponential that they share.

Imported only where numba is, when a batch is worth it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numba import njit

__all__ = ["CACHED", "exp2_native", "exp_native", "fused", "loop", "summing"]

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
# sums may be added up in any order, so that they vectorise too
summing: Callable[..., Any] = njit(
    cache=CACHED, nogil=True, error_model="numpy", fastmath={"contract", "reassoc", "nsz"}
)
# a·b + c may round once
fused: Callable[..., Any] = njit(cache=CACHED, nogil=True, error_model="numpy", fastmath={"contract"})


@fused
def exp_native(x):
    """`e^x` for x ≤ 700, in float64 within 2 ulp: `2ⁿ·e^r`, `|r| ≤ ln 2/2`, `e^r ≈ 1 + r + r² g(r)`, g of degree 9.

    g interpolates `(e^r − 1 − r)/r²` at Chebyshev points; the relative error of the sum is below 2·10⁻¹⁷ in exact arithmetic.
    ln 2 is subtracted in two parts, the first short enough that n times it is exact. NaN stays NaN.
    """
    t = _SMALLEST_EXPONENT if x < _SMALLEST_EXPONENT else np.float64(x)
    shifted = t * 1.4426950408889634 + _SHIFTER
    n = shifted - _SHIFTER
    r = (t - n * 6.93147180369123816490e-01) - n * 1.90821492927058770002e-10
    g = r * 2.5100375924709717e-08 + 2.762007599981065e-07
    g = g * r + 2.7557268480116333e-06
    g = g * r + 2.4801521322116825e-05
    g = g * r + 0.0001984126986304067
    g = g * r + 0.0013888888917196881
    g = g * r + 0.008333333333330065
    g = g * r + 0.041666666666624164
    g = g * r + 0.16666666666666669
    g = g * r + 0.5000000000000001
    power = np.int64((np.float64(shifted).view(np.int64) + 1023) << 52).view(np.float64)
    return 0.0 if x < _SMALLEST_EXPONENT else ((g * r + 1) * r + 1) * power


@fused
def exp2_native(x):
    """`2^x` for x ≤ 1000, in float64 within 2 ulp; `2^{−1020}` for smaller x than that. NaN is not kept.

    `2ⁿ·(1 + r g(r))`, `|r| ≤ 1/2` exact, g of degree 10 through `(2^r − 1)/r` at Chebyshev points: relative error below 2·10⁻¹⁷.
    """
    t = max(x, -1020.0)
    shifted = t + _SHIFTER
    r = t - (shifted - _SHIFTER)
    g = r * 4.4549606161761816e-10 + 7.072585983019291e-09
    g = g * r + 1.0178062445755827e-07
    g = g * r + 1.3215442587752943e-06
    g = g * r + 1.5252733829836267e-05
    g = g * r + 0.00015403530441736326
    g = g * r + 0.0013333558146416936
    g = g * r + 0.009618129107606888
    g = g * r + 0.0555041086648216
    g = g * r + 0.24022650695910097
    g = g * r + 0.6931471805599453
    power = np.int64((np.float64(shifted).view(np.int64) + 1023) << 52).view(np.float64)
    return (g * r + 1) * power
