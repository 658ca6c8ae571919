"""How far gradient descent by attention drifts from exact gradient descent: one step's error, and how errors travel."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from partita.arithmetic.rounding import add_up, up
from partita.geometry.domains import Array
from partita.networks.losses import LossSlope

__all__ = ["CAUSES", "Drift", "StepFacts"]

CAUSES = ("softmax difference", "slope table", "rounding", "stored start")  # of drift, in the order of `Drift.carried`
_PAD = 1 + 1e-9  # covers the float64 rounding of the sums of nonnegative numbers below


@dataclass(frozen=True, eq=False)
class StepFacts:
    """A step in numbers: η, λ, ε, the dtype's unit roundoff, the start, and max |x_i|, |y|, |w_i| over the boxes."""

    step_size: float
    ridge: float
    epsilon: float
    unit_roundoff: float
    initial: Array
    reach_x: Array
    reach_y: float
    reach_w: Array

    def with_epsilon(self, epsilon: float) -> StepFacts:
        return replace(self, epsilon=epsilon)

    @property
    def norm_x(self) -> float:
        """max |x|₂."""
        return float(np.linalg.norm(self.reach_x)) * _PAD

    def best_epsilon(self, slope: LossSlope, examples: int) -> float:
        """The ε with the least step error over the boxes, for prompts of so many examples."""
        trials = np.geomspace(1e-8, 1.0, 161) / max(slope.largest, 1e-12)
        errors = [self.with_epsilon(float(e)).step_error_on_boxes(slope, examples).sum() for e in trials]
        return float(trials[int(np.argmin(errors))])

    def slope_error(self, slope: LossSlope) -> float:
        """`|r̃ − r|`: the table's error, and what computing it in the dtype adds."""
        return float(slope.error + self.slope_rounding(slope)) * _PAD

    def slope_rounding(self, slope: LossSlope) -> float:
        """What dot-product scores, a softmax and sums in the dtype add to a slope that is looked up; 0 for an affine slope.

        `δ/2·spread + (2K + 32)u max|V|`, `δ = u((2d + 12)·max|score| + 24)`. The sum of the K exponentials rounds by Ku, in
        any order, and so does the sum of the K values.
        """
        if not slope.keys:
            return 0.0
        u, dim = self.unit_roundoff, len(self.reach_x)
        line = float(self.reach_x @ self.reach_w)
        sizes = np.abs(slope.slopes) @ [line, self.reach_y] + np.abs(slope.offsets)
        delta = 1.01 * u * ((2 * dim + 12) * float(sizes.max()) + 24)
        largest = float(np.abs(slope.values).max())
        sums = 1.01 * u * ((2 * slope.keys + 32) * largest + 4 * float(np.abs(slope.direct).sum()) * self.reach_y)
        return (0.5 * delta * float(np.ptp(slope.values)) + sums) * _PAD

    def rounding(self, slope: LossSlope, examples: int, norm_x: float, largest: float) -> float:
        """What evaluating the step in floats adds: relative errors of the 2n weights and their sum, times `η|x|/ε`; and of w.

        A score is off by `δ = u((d + 6)ε(|w||x| + |y|) + 24)`, or `u(8ε max|r| + 24)` if r was looked up. The sum of the 2n values
        rounds by 2nu of their size, the sum of the weights by 2nu of the result, which is smaller by `tanh(ε max|r|)`.
        """
        u, dim = self.unit_roundoff, len(self.reach_x)
        line = float(self.reach_x @ self.reach_w) + self.reach_y
        delta = u * (self.epsilon * (8 * largest if slope.keys else (dim + 6) * line) + 24)
        sums = 2 * examples * (1 + min(1.0, self.epsilon * largest))
        summed = u * (sums + 2 * dim + 16)
        if summed >= 1:
            return math.inf  # too many examples for the dtype
        relative = 2.02 * delta + summed * max(1.01, (1 - summed) ** -2)
        own = 1.01 * u * (dim + 6) * float(np.linalg.norm(self.reach_w)) * (1 + self.step_size * self.ridge)
        return (relative * self.step_size * norm_x / self.epsilon * math.exp(min(2 * delta, 700.0)) + own) * _PAD

    def step_error(self, slope: LossSlope, examples: int, moments: Moments) -> Array:
        """`τ`: network's step minus the exact step from the same w, in the 2-norm, by cause: the first three of `CAUSES`.

        *Theorem*: `descent-step`.
        """
        e, step = self.epsilon, self.step_size
        with np.errstate(over="ignore"):
            grown = float(np.cosh(e * moments.largest))
        bend = e * e * (moments.cubic / 6 + moments.gradient * moments.square / 2) * grown
        run = self.rounding(slope, examples, moments.norm_x, moments.largest)
        looked_up = step * self.slope_rounding(slope) * moments.norm
        found = up(np.array([step * bend, step * slope.error * moments.norm, looked_up + run]) * _PAD)
        return np.where([True, slope.error > 0, True], found, 0.0)

    def step_error_on_boxes(self, slope: LossSlope, examples: int) -> Array:
        r, norm = slope.largest + self.slope_error(slope), self.norm_x
        return self.step_error(slope, examples, Moments(r**3 * norm, r * r, r * norm, r, norm, norm))


@dataclass(frozen=True)
class Moments:
    """Of a prompt at one w: mean(|r|³|x|), mean(r²), |mean(r x)|, max|r|, mean|x|, max|x|: of the slopes that the network sees."""

    cubic: float
    square: float
    gradient: float
    largest: float
    norm: float
    norm_x: float


@dataclass(frozen=True, eq=False)
class Drift:
    """`e_{t+1} ≤ ρ e_t + τ_t`: ρ the Lipschitz constant of an exact step in w, τ_t the error of the t-th step.

    Attributes:
        steps: τ by cause, `(1, 3)` for all steps or `(steps, 3)`.
        start: e_0, what storing w_0 moved it.
    """

    contraction: float
    steps: Array
    start: float = 0.0

    def after(self, count: int) -> Array:
        """The bound after 0, 1, …, count steps, rounded up."""
        return np.array([add_up(*row) for row in self.carried(count)])

    def carried(self, count: int) -> Array:
        """What each of `CAUSES` has added up to after 0, 1, …, count steps, `(count + 1, 4)`, rounded up."""
        found = [np.array([0.0, 0.0, 0.0, self.start])]
        for tau in np.broadcast_to(self.steps, (count, 3)):
            added = np.append(tau, 0.0)
            absent = (found[-1] == 0) & (added == 0)
            with np.errstate(over="ignore"):  # a drift that grows beyond all numbers is infinite
                found.append(np.where(absent, 0.0, up((self.contraction * found[-1] + added) * (1 + 1e-12))))
        return np.stack(found)

    @staticmethod
    def of_boxes(facts: StepFacts, slope: LossSlope, examples: int) -> Drift:
        tau = facts.step_error_on_boxes(slope, examples)
        square = facts.norm_x**2
        return Drift(_contraction(facts, slope, 0.0, square), tau[None], _stored(facts))

    @staticmethod
    def of_prompt(facts: StepFacts, slope: LossSlope, prompt: Array, iterates: Array) -> Drift:
        x, y = prompt[:, :-1], prompt[:, -1]
        norms = np.linalg.norm(x, axis=1)
        gram = x.T @ x / len(x)
        eigenvalues = np.linalg.eigvalsh(gram)
        pad = 1e-10 * (float(np.trace(gram)) + 1e-300)
        taus = []
        for w in iterates[:-1]:
            r = slope.exact(x @ w, y)
            size = (
                np.abs(r) + facts.slope_error(slope) + 1e-12 * (1 + facts.norm_x * float(np.linalg.norm(facts.reach_w)))
            )
            gradient = float(np.linalg.norm(r @ x / len(x)))
            moments = Moments(
                cubic=float((size**3 * norms).mean()) * _PAD,
                square=float((size**2).mean()) * _PAD,
                gradient=gradient * _PAD + float((size - np.abs(r)).max()) * float(norms.max()),
                largest=float(size.max()),
                norm=float(norms.mean()) * _PAD,
                norm_x=float(norms.max()) * _PAD,
            )
            taus.append(facts.step_error(slope, len(x), moments))
        low, high = max(float(eigenvalues[0]) - pad, 0.0), float(eigenvalues[-1]) + pad
        return Drift(_contraction(facts, slope, low, high), np.array(taus), _stored(facts))


def _stored(facts: StepFacts) -> float:
    """What storing w_0 in the dtype moved it."""
    return 0.0 if facts.unit_roundoff < 2.0**-40 else facts.unit_roundoff * float(np.linalg.norm(facts.initial))


def _contraction(facts: StepFacts, slope: LossSlope, low: float, high: float) -> float:
    """`max |1 − ηλ − ηκ|` over `κ` between the least and largest curvature of the mean loss: of m..M times eigenvalues
    low..high.
    """
    m, most = slope.curvature
    least = m * (low if m >= 0 else high)
    largest = most * (high if most >= 0 else low)
    ends = [1 - facts.step_size * (facts.ridge + k) for k in (least, largest)]
    return max(abs(e) for e in ends) * (1 + 1e-12)
