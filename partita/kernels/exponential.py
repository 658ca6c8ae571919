"""The numbers of the exponential that partita writes itself, for native loops and for C: `2ⁿ·e^r`, `|r| ≤ ln 2/2`.

ln 2 is subtracted in two parts, the first short enough that n times it is exact. `e^r = 1 + r + r²p(r)`, of degree 11 in float64
and 6 in float32; the relative error of the polynomial is below 2·10⁻¹⁷ and 10⁻⁸, a sixth of a unit roundoff. Roundings
included, `e^x` is within 2 units in the last place of the dtype for every x ≤ 0 whose result is not taken as 0.
"""

from __future__ import annotations

import numpy as np

__all__ = [
    "DOUBLE",
    "LEAST",
    "LEAST_SINGLE",
    "LN_2",
    "LN_2_SINGLE",
    "RATE",
    "RATE_SINGLE",
    "SHIFTER",
    "SHIFTER_SINGLE",
    "SINGLE",
]

LEAST, LEAST_SINGLE = -708.0, np.float32(-87.0)  # e^x below is taken as 0: it would soon be subnormal
SHIFTER = 6755399441055744.0  # 1.5·2⁵²: adding it rounds to an integer and leaves that integer in the low bits
SHIFTER_SINGLE = np.float32(12582912.0)  # 1.5·2²³
RATE, RATE_SINGLE = 1.4426950408889634, np.float32(1.4426950408889634)  # log₂e
LN_2 = (6.93147180369123816490e-01, 1.90821492927058770002e-10)
LN_2_SINGLE = (np.float32(0.693359375), np.float32(-2.12194440e-4))
# (e^r − 1 − r)/r² at Chebyshev points, rounded: from the highest power down, the even and odd ones in pairs
DOUBLE = (
    (2.510037583265122e-08, 2.7620075880100385e-07),
    (2.7557268480309837e-06, 2.4801521322368448e-05),
    (0.00019841269863040545, 0.0013888888917196719),
    (0.008333333333330065, 0.041666666666624164),
    (0.16666666666666669, 0.5000000000000001),
)
SINGLE = tuple(np.float32(c) for c in (0.00139261759, 0.00836317334, 0.0416665561, 0.166665778, 0.5))
