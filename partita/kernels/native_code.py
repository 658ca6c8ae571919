"""How the native loops are compiled by numba, and the exponential that they share.

Imported only where numba is, when a batch is worth it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numba import njit, types
from numba.extending import overload

__all__ = ["CACHED", "exp2_native", "exp_native", "fused", "fused_part", "least_part", "loop", "part", "summed_part"]

_LEAST = -708.0  # e^x below is taken as 0: it would soon be subnormal
_LEAST_SINGLE = np.float32(-87.0)
_SHIFTER = 6755399441055744.0  # 1.5·2⁵²: adding it rounds to an integer and leaves that integer in the low bits
_SHIFTER_SINGLE = np.float32(12582912.0)  # 1.5·2²³
# (e^r − 1 − r)/r² at Chebyshev points of |r| ≤ ln 2/2, rounded: from the highest power down
_DOUBLE = (
    (2.510037583265122e-08, 2.7620075880100385e-07),
    (2.7557268480309837e-06, 2.4801521322368448e-05),
    (0.00019841269863040545, 0.0013888888917196719),
    (0.008333333333330065, 0.041666666666624164),
    (0.16666666666666669, 0.5000000000000001),
)
_SINGLE = tuple(np.float32(c) for c in (0.00139261759, 0.00836317334, 0.0416665561, 0.166665778, 0.5))
_RATE_SINGLE, _HIGH_SINGLE, _LOW_SINGLE = (np.float32(c) for c in (1.4426950408889634, 0.693359375, -2.12194440e-4))


def _can_be_cached() -> bool:
    """Whether numba finds a folder to keep machine code in: beside this file, or the user's own cache."""
    try:
        njit(cache=True)(_can_be_cached)
    except RuntimeError:  # neither can be written
        return False
    return True


CACHED = _can_be_cached()

# numpy's error model: a division does not branch, so that loops vectorise
_PLAIN: dict[str, Any] = {"nogil": True, "error_model": "numpy"}
_FUSED: dict[str, Any] = {**_PLAIN, "fastmath": {"contract"}}  # a·b + c may round once
# and sums may take any order
_SUMMED: dict[str, Any] = {**_PLAIN, "fastmath": {"contract", "reassoc"}}
# and no number is NaN, so that the least of them is found in any order
_LEAST_OF: dict[str, Any] = {**_PLAIN, "fastmath": {"contract", "reassoc", "nnan", "nsz"}}
# Arguments that are literals are wrapped, np.int64(0), because numba would compile once more for them.
# For functions that other loops call and Python does not: no machine code of their own is made or kept, half the time
_INNER: dict[str, Any] = {"no_cpython_wrapper": True, "no_cfunc_wrapper": True}

loop: Callable[..., Any] = njit(cache=CACHED, **_PLAIN)
fused: Callable[..., Any] = njit(cache=CACHED, **_FUSED)
part: Callable[..., Any] = njit(**_PLAIN, **_INNER)
fused_part: Callable[..., Any] = njit(**_FUSED, **_INNER)
summed_part: Callable[..., Any] = njit(**_SUMMED, **_INNER)
least_part: Callable[..., Any] = njit(**_LEAST_OF, **_INNER)


def exp_native(x: Any) -> Any:
    """`e^x` for x ≤ 0, within 2 ulp of the argument's dtype, to be called in native loops; NaN stays NaN.

    It is `2ⁿ·e^r`, `|r| ≤ ln 2/2`, with ln 2 subtracted in two parts, the first short enough that n times it is exact. `e^r` is
    `1 + r + r²p(r)`, of degree 11 in float64 and 6 in float32; the relative error of the polynomial is below 2·10⁻¹⁷ and
    10⁻⁸, a sixth of a unit roundoff.
    """
    raise NotImplementedError("exp_native is for native loops; call numpy's exp elsewhere.")


@overload(exp_native, jit_options=_FUSED)  # type: ignore[arg-type]
def _exp(x):
    return _exp_single if x == types.float32 else _exp_double


def _exp_double(x):
    t = _LEAST if x < _LEAST else np.float64(x)
    shifted = t * 1.4426950408889634 + _SHIFTER
    n = shifted - _SHIFTER
    r = (t - n * 6.93147180369123816490e-01) - n * 1.90821492927058770002e-10
    square = r * r
    p = _DOUBLE[0][0] * r + _DOUBLE[0][1]
    p = p * square + (_DOUBLE[1][0] * r + _DOUBLE[1][1])
    p = p * square + (_DOUBLE[2][0] * r + _DOUBLE[2][1])
    p = p * square + (_DOUBLE[3][0] * r + _DOUBLE[3][1])
    p = p * square + (_DOUBLE[4][0] * r + _DOUBLE[4][1])
    power = np.int64((np.float64(shifted).view(np.int64) + 1023) << 52).view(np.float64)
    return 0.0 if x < _LEAST else (p * square + (r + 1)) * power


def _exp_single(x):
    t = _LEAST_SINGLE if x < _LEAST_SINGLE else x
    shifted = t * _RATE_SINGLE + _SHIFTER_SINGLE
    n = shifted - _SHIFTER_SINGLE
    r = (t - n * _HIGH_SINGLE) - n * _LOW_SINGLE
    p = _SINGLE[0] * r + _SINGLE[1]
    p = p * r + _SINGLE[2]
    p = p * r + _SINGLE[3]
    p = p * r + _SINGLE[4]
    bits = np.float32(shifted).view(np.int32) + np.int32(127)
    power = np.int32(bits << np.int32(23)).view(np.float32)
    one = np.float32(1)
    return np.float32(0) if x < _LEAST_SINGLE else ((p * r + one) * r + one) * power


@fused_part
def exp2_native(x):
    """`2^x` for x ≤ 1000, in float64 within 2 ulp; `2^{−1020}` for smaller x than that. NaN is not kept.

    `2ⁿ·(1 + r g(r))`, `|r| ≤ 1/2` exact, g of degree 10 through `(2^r − 1)/r` at Chebyshev points, relative error below 2·10⁻¹⁷.
    Its terms are gathered in fours (Estrin's scheme): a short chain of operations leaves more of them to run side by side.
    """
    t = max(x, -1020.0)
    shifted = t + _SHIFTER
    r = t - (shifted - _SHIFTER)
    square = r * r
    fourth = square * square
    low = (0.24022650695910097 * r + 0.6931471805599453) + square * (0.009618129107606888 * r + 0.0555041086648216)
    middle = (0.00015403530441736326 * r + 0.0013333558146416936) + square * (
        1.3215442587752943e-06 * r + 1.5252733829836267e-05
    )
    high = (7.072585983019291e-09 * r + 1.0178062445755827e-07) + square * 4.4549606161761816e-10
    g = low + fourth * (middle + fourth * high)
    power = np.int64((np.float64(shifted).view(np.int64) + 1023) << 52).view(np.float64)
    return g * (r * power) + power
