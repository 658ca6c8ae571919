"""How well a softmax over equally spaced anchors reproduces a truncated line: proved constants of one dimension.

Anchors 0, 1, …, p − 1 with scores `−κ(x − k)²/2` and values k give `E(x) = Σ_k w_k k`, to be compared with `clamp(x, 0, p − 1)`. A
ramp over [a, b] is this in units of its spacing.
"""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np

from partita.arithmetic.rounding import add_up, mul_up, sqrt_up, up
from partita.errors import DomainError
from partita.geometry.domains import Array

__all__ = [
    "SHARPEST",
    "SOFTEST",
    "best_sharpness",
    "fixed_beta_error",
    "half_window_for",
    "ramp_constant",
    "sharing_excess",
    "soft_ramp_constant",
    "window_excess",
]

SHARPEST = 1e6  # κ beyond this changes nothing: 0.49999 of a spacing
SOFTEST = 1e-6  # 800 spacings; the window of a softer head would be longer than anybody's row of anchors
_BISECTED = 1e-3  # below this κ the closed form is within 2 % of the supremum, and bisection would be slow
_PIECES_PER_CELL = 32
_SLACK = 1e-5  # of the constant, between what is proved and what is attained


def _mean(x: Array, anchors: int, sharpness: float) -> Array:
    """E(x) for each x."""
    k = np.arange(anchors)
    exponent = -0.5 * sharpness * (x[:, None] - k) ** 2
    exponent -= exponent.max(axis=1, keepdims=True)
    weights = np.exp(exponent)
    return np.asarray((weights @ k) / weights.sum(axis=1))


@lru_cache(maxsize=256)
def ramp_constant(anchors: int, sharpness: float) -> float:
    """Upper bound of `sup_x |E(x) − clamp(x, 0, p − 1)|` over all real x, within 1e-5 of it.

    `E′ = κ Var ≥ 0`: E is increasing, so on a piece [x₁, x₂] the error is at most `max(E(x₂) − x₁, x₂ − E(x₁))`; pieces are halved
    until that is what is attained. Beyond the ends E only comes closer to the end. By symmetry half of the anchors suffice.
    For long rows of anchors it is `max(ρ₁(κ), Σ_k k e^{−κk²/2}/Σ_k e^{−κk²/2})`, ρ₁ the bias of an endless row.
    Below κ = 0.001 it is `soft_ramp_constant`. *Theorem*: `ramp`.

    >>> round(ramp_constant(64, 4.0), 3), round(ramp_constant(64, 5.4), 3), round(ramp_constant(64, 8.0), 3)
    (0.12, 0.063, 0.135)
    """
    require_ramp(anchors, sharpness)
    if sharpness < _BISECTED:
        return min(soft_ramp_constant(sharpness), float(anchors - 1))
    row = min(
        anchors, 4 * half_window_for(sharpness)
    )  # in a longer row the middle sees no end: `window_excess` bounds the rest
    padding = 1e-13 * row * max(1.0, row / 200) + 1e-15 * sharpness  # rounding of E: only weights near x matter
    cells = (row - 1) / 2
    points = np.linspace(0.0, cells, 1 + math.ceil(_PIECES_PER_CELL * cells * min(1.0, math.sqrt(sharpness))))
    left, right = points[:-1], points[1:]
    at_left, at_right = _mean(left, row, sharpness), _mean(right, row, sharpness)
    attained, settled = 0.0, 0.0
    while len(left):
        attained = max(attained, float(np.abs(at_left - left).max()), float(np.abs(at_right - right).max()))
        bound = np.maximum(at_right - left, right - at_left)
        open_ = bound > attained * (1 + _SLACK) + 4 * padding
        settled = max(settled, float(bound[~open_].max(initial=0.0)))
        left, right, at_left, at_right = (array[open_] for array in (left, right, at_left, at_right))
        middle = (left + right) / 2
        at_middle = _mean(middle, row, sharpness)
        left, right = np.concatenate([left, middle]), np.concatenate([middle, right])
        at_left, at_right = np.concatenate([at_left, at_middle]), np.concatenate([at_middle, at_right])
    excess = 0.0 if row == anchors else window_excess(sharpness, row // 2)
    return add_up(float(up(max(settled, attained), 4)), padding, excess)


def soft_ramp_constant(sharpness: float) -> float:
    """`√(2/(πκ)) + ½`, rounded up: a bound of the same supremum for every κ > 0 and every number of anchors.

    It is the first term that counts in soft heads: the mean of half a Gaussian, which is what an end anchor sees.
    *Theorem*: `ramp-fixed-beta`.

    >>> round(soft_ramp_constant(1e-4), 1)
    80.3
    """
    return add_up(sqrt_up(float(up(2 / math.pi / sharpness, 2))), 0.5)


def fixed_beta_error(spacing: float, beta: float) -> float:
    """`√(Δ/(πβ)) + Δ/2`: the error of a ramp at the paper's inverse temperature β, at most. *Theorem*: `ramp-fixed-beta`.

    As Δ falls the error tends to the first term, so at a fixed β it falls like p^{−1/2}.

    Args:
        spacing: Δ, of the anchors.
        beta: β; scores are `−β k(L_0 + L_k − 2u)`, so `κ = 2βΔ`.

    >>> round(fixed_beta_error(0.01, 25.0), 5)  # 0.01128 + 0.005
    0.01628
    """
    return add_up(sqrt_up(float(up(spacing / math.pi / beta, 2))), mul_up(0.5, spacing))


def require_ramp(anchors: int, sharpness: float) -> None:
    if not (isinstance(anchors, int) and anchors >= 2):
        raise DomainError(f"the number of anchors is {anchors!r}; expected an integer ≥ 2, both ends included.")
    if not SOFTEST <= sharpness <= SHARPEST:
        raise DomainError(
            f"sharpness κ = RΔ² = 2βΔ is {sharpness!r}; expected a number from {SOFTEST:g} to {SHARPEST:g}, 'best' or "
            "'hard'. At a fixed β fewer anchors make a head sharper."
        )


def half_window_for(sharpness: float) -> int:
    """q such that anchors beyond the `2q` around x hold next to nothing: `e^{−κq²/2} ≤ e^{−50}`."""
    return 2 + math.ceil(math.sqrt(100.0 / sharpness))


def window_excess(sharpness: float, half_window: int) -> float:
    """How much a mean over the 2q anchors around x differs from that over any longer row: `Σ_{i≥q} 2(i + q + 1)e^{−κi²/2}`.

    An anchor outside lies i ≥ q spacings behind the nearer one, weighs at most `e^{−κi²/2}`, and is that far from the mean.
    """
    steps = half_window + np.arange(
        0, 64 + math.ceil(64 / (sharpness * half_window))
    )  # the next weigh e^{−64} of the first
    return float(up((2 * (steps + half_window + 1) * np.exp(-0.5 * sharpness * steps**2.0)).sum() * (1 + 1e-9), 4))


@lru_cache(maxsize=64)
def best_sharpness(anchors: int) -> float:
    """The κ with the least `ramp_constant`, to three digits: 5.4 for long rows of anchors."""
    golden = (math.sqrt(5) - 1) / 2
    low, high = 4.0, 9.0
    while high - low > 2e-3:
        first, second = high - golden * (high - low), low + golden * (high - low)
        if ramp_constant(anchors, first) <= ramp_constant(anchors, second):
            high = second
        else:
            low = first
    return round((low + high) / 2, 3)


def sharing_excess(sharpness: float) -> float:
    """`S(κ) = Σ_{α,β≥1} e^{−καβ} = Σ_α 1/(e^{κα} − 1)`: what sharing the anchors among heads adds, in units of b − a.

    *Theorem*: `shared-anchors`.
    """
    steps = np.arange(1, 800)
    with np.errstate(over="ignore"):
        return float(up((1 / np.expm1(sharpness * steps)).sum() * (1 + 1e-9), 4))
