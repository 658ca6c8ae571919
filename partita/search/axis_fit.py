"""One axis of a fitted head: how many softmax keys reach a tolerance, how far beyond the domain, how sharp.

On one axis the head is `Σ_k V_k w_k(x)`, `w = softmax_k(−R(x−c_k)²/2)`, centers uniform. With `t = e^{Rhx}` that is
`p(t)/q(t)`: p any polynomial of degree P − 1, q fixed, its zeros above and below the midpoints between centers, `πh/κ`
away from the real line. So the sharpness κ = R h² says where the poles lie and the ghosts how many of them matter: both
are searched, the values follow by least squares. Everything here is on [−1, 1].
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import scipy

from partita.geometry.domains import Array
from partita.search.tensor_fit import softmax
from partita.workers import crew

__all__ = ["AxisChoice", "AxisSearch", "chebyshev_degree", "chebyshev_points"]

_OCTAVE = 1 << 36  # sharpness lives on the lattice 2^(j/2^36)
_COARSE = range(-21 * _OCTAVE // 4, 11 * _OCTAVE // 4, _OCTAVE // 2)  # κ from 0.026 to 4.8
_NEAR = tuple(k * _OCTAVE // 4 for k in (-2, -1, 0, 1, 2))
_EXTREME = 10 * _OCTAVE
_SCANNED = 24  # with more keys than that a search starts from a neighbour's choices instead of everywhere
_MOST_GHOSTS = 9
_OVERSAMPLING = 2.5
_LINES = 24
_LAST = 4
_KEPT = 4
_EFFORT = 4e10  # floating-point operations that one search may take
_AT_ONCE = 2e8  # of them, between two reports
_STEEP = 2.5  # analytic: coefficients fall by more than that near the end of the degrees that matter


def chebyshev_points(count: int) -> Array:
    """`−cos(πj/(count−1))`, j = 0 … count − 1: both ends of [−1, 1], denser towards them; 0 for a single point."""
    return -np.cos(np.pi * np.arange(count) / (count - 1)) if count > 1 else np.zeros(1)


def _coefficients(samples: Array) -> Array:
    """Chebyshev coefficients (the two end ones doubled) of columns sampled at `chebyshev_points`."""
    out: Array = scipy.fft.dct(samples[::-1], type=1, axis=0) / (len(samples) - 1)
    return out


def chebyshev_degree(samples: Array, level: float) -> int:
    """The last degree at which a column of `samples`, taken at `chebyshev_points`, has a coefficient above the level."""
    above = np.flatnonzero((np.abs(_coefficients(samples)) > level).any(axis=1))
    return int(above[-1]) if above.size else 0


@dataclass(frozen=True)
class AxisChoice:
    """P keys, g ghosts on each side, sharpness κ; the error that least squares leaves on the lines and the spread of its values."""

    count: int
    ghosts: int
    sharpness: float
    error: float = math.inf
    spread: float = 0.0


@dataclass(eq=False)
class AxisSearch:
    """The best ghosts and sharpness for any number of keys, for f along some lines parallel to the axis.

    Args:
        lines: f at `chebyshev_points(2^L + 1)`, one column per line, `(2^L + 1, lines)`; some that stand for all are kept.
        tolerance: in the units of the lines.
        most_spread: values that spread farther count as errors.
        most_keys: no more are considered, nor more than the samples can judge; a third of them where f is rough.
        watch: called before every batch of least squares.

    Attributes:
        degree: the Chebyshev degree that resolves f on the lines.
    """

    lines: Array
    tolerance: float
    most_spread: float
    most_keys: int
    watch: Callable[[str], None] = lambda _: None
    degree: int = 0
    _rough: bool = False
    _effort: float = 0.0
    _envelope: Array = field(default_factory=lambda: np.zeros(0))
    _found: dict[int, tuple[AxisChoice, ...]] = field(default_factory=dict)
    _tried: dict[int, dict[tuple[int, int], AxisChoice]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.degree = chebyshev_degree(self.lines, self.tolerance / 10)
        self._envelope = np.abs(_coefficients(self.lines)).max(axis=1)
        d, size = self.degree, self._envelope
        self._rough = d >= 32 and size[7 * d // 10 : 6 * d // 7].max() < _STEEP * size[97 * d // 100 : d + 1].max()
        most = self.most_keys // 3 if self._rough else self.most_keys
        self.most_keys = max(2, min(most, int((len(self.lines) - 3) / _OVERSAMPLING)))
        self.lines = _representatives(self.lines, self.tolerance)

    def error(self, count: int) -> float:
        """The least-squares error of the best choice with `count` keys."""
        return self.choices(count)[0].error

    def choices(self, count: int) -> tuple[AxisChoice, ...]:
        """The best few choices with `count` keys, of different ghosts, best first."""
        if count not in self._found:
            self._found[count] = self._search(count)
        return self._found[count]

    def seen(self, count: int) -> tuple[AxisChoice, ...]:
        """Every choice with `count` keys that was looked at."""
        return (*self.choices(count), *self._tried.get(count, {}).values())

    def error_of(self, choice: AxisChoice) -> float:
        """What least squares leaves on these lines with a choice made for others."""
        if choice.count == 1:
            return self.error(1)
        pair = choice.ghosts, _index(choice.sharpness)
        self._measure(choice.count, [pair])
        return self._tried[choice.count][pair].error

    def joined(self, lines: Array) -> bool:
        """Take in the lines of another axis if f behaves alike on them: Chebyshev coefficients within a third, degree by degree."""
        if len(lines) != len(self.lines):
            return False
        own, other = np.maximum([self._envelope, np.abs(_coefficients(lines)).max(axis=1)], self.tolerance / 10)
        if np.abs(np.log(own / other)).max() > math.log(4 / 3):
            return False
        self.lines = _representatives(np.concatenate([self.lines, lines], axis=1), self.tolerance)
        return True

    def next_sizes(self, count: int) -> list[int]:
        """Numbers of keys to try after this one."""
        starts = (count + 1, count + 3, count + 4 + count // 8, count + 4 + count // 2)
        return [c for p in starts if p <= self.most_keys and self._effort < _EFFORT for c in self._pair(p)]

    def fewest(self, goal: float) -> int | None:
        """The smallest number of keys whose error is within the goal, by secants on its logarithm; None if there is none.

        Even and odd numbers of keys differ much where f is even or odd, so the better of P and P + 1 is looked at.
        """
        if self.error(1) <= goal:
            return 1

        def excess(count: int) -> float:
            best = min(self.error(c) for c in self._pair(count))
            return math.log(max(best, 1e-300) / goal)

        bracket = self._bracket(excess)
        found = None if bracket is None else _first_negative(excess, *bracket)
        return None if found is None else next(c for c in self._pair(found) if self.error(c) <= goal)

    def _bracket(self, excess: Callable[[int], float]) -> tuple[int, int] | None:
        """Two counts between which the excess falls below 0; None if it does not, or where f is rough cannot be expected to."""
        guess = max(3, min(round(0.6 * (1 + self.degree)), _SCANNED - 6))
        low, high, below = 1, 2, math.inf
        first = above = excess(2)
        while above > 0:
            ahead = high + above * (high - low) / max(below - above, 1e-9)  # where a straight line would meet 0
            slow = self._rough and high >= _SCANNED and ahead > self.most_keys
            if high >= self.most_keys or slow or self._effort > _EFFORT:
                return None
            low, below = high, above
            step = high // 4 if above < 0.8 * first else high // 2  # nothing gained yet: f oscillates or is narrow
            high = min(max(high + max(2, step), guess), self.most_keys)
            above = excess(high)
        return low, high

    def _pair(self, count: int) -> tuple[int, ...]:
        """count and count + 1, or one of them, if fewer keys showed that the other parity is hopeless."""
        if count >= self.most_keys:
            return (count,)
        known = [c for c in self._found if 4 < c < count and c + 1 in self._found][-2:]
        gains = [math.log((self.error(c) + 1e-300) / (self.error(c + 1) + 1e-300)) * (-1) ** c for c in known]
        if len(gains) == 2 and count > _SCANNED and min(map(abs, gains)) > 1.5 and gains[0] * gains[1] > 0:
            odd = (gains[0] > 0) ^ (count % 2 == 1)
            return (count + odd,)
        return (count, count + 1)

    def _search(self, count: int) -> tuple[AxisChoice, ...]:
        if count == 1:
            return (AxisChoice(1, 0, 1.0, float(np.ptp(self.lines, axis=0).max() / 2)),)
        self._measure(count, self._start(count))
        self._refine(count)
        return tuple(self._tried[count][pair] for pair in self._best(count, _KEPT))

    def _refine(self, count: int) -> None:
        """Walk κ downhill for the best few numbers of ghosts, halving the steps that lead nowhere.

        The error has cusps in κ, where its leading term changes sign: narrow, and often the only place where few keys suffice.
        """
        tried = self._tried[count]
        places = {g: (j, _OCTAVE // 8) for g, j in self._best(count, _KEPT)}
        idle, before = 0, math.inf
        while places and idle < 5:
            self._measure(count, [(g, j + s) for g, (j, step) in places.items() for s in (-step, step)])
            best = dict(self._best(count, _MOST_GHOSTS + 1))
            leader = next(iter(best))
            least = tried[leader, best[leader]].error
            for g, (j, step) in list(places.items()):
                places[g] = (best[g], step if best[g] != j else step // 2)
                far = tried[g, best[g]].error > 100 * least and step < _OCTAVE >> 4
                if far or step <= (1 if g == leader else _OCTAVE >> 10):
                    del places[g]
            fine = places.get(leader, (0, 0))[1] < _OCTAVE >> 10
            idle, before = (idle + 1, before) if fine and least > 0.9 * before else (0, least)

    def _start(self, count: int) -> list[tuple[int, int]]:
        """(ghosts, lattice index of κ) to begin with: everywhere, or about the poles that suited nearly as many keys."""
        most = min((count - 1) // 2, _MOST_GHOSTS)
        close = sorted((abs(c - count), c) for c in self._found if c > 1 and abs(c - count) <= count // 2)
        everywhere = [(g, j) for g in range(most + 1) for j in _COARSE]
        if count <= _SCANNED or not close:
            return everywhere
        alike = [c for _, c in close if (c - count) % 2 == 0] or [c for _, c in close]
        pairs = []
        for known in (choice for c in alike[:2] for choice in self._found[c]):
            inside = known.count - 2 * known.ghosts
            for g in range(max(known.ghosts - 1, 0), min(known.ghosts + 1, most) + 1):
                ratio = inside / (count - 2 * g)
                same_poles, same_rate = _index(known.sharpness * ratio), _index(known.sharpness * ratio**2)
                pairs += [(g, same_poles + step) for step in _NEAR] + [(g, same_rate)]
        return [p for p in pairs if abs(p[1]) <= _EXTREME] or everywhere

    def _best(self, count: int, kept: int) -> list[tuple[int, int]]:
        """The best sharpness for each number of ghosts, the best few of them."""
        lowest: dict[int, tuple[float, int]] = {}
        for (g, j), choice in self._tried[count].items():
            lowest[g] = min(lowest.get(g, (math.inf, 0)), (choice.error, j))
        return [(g, j) for g, (_, j) in sorted(lowest.items(), key=lambda item: item[1])[:kept]]

    def _measure(self, count: int, pairs: list[tuple[int, int]]) -> None:
        """Least squares with a ridge for many (ghosts, sharpness) at once: `min |AV − f|² + μ²|V|²` by QR of [A; μI].

        With `[A; μI] = [Q₁; Q₂]R` the fit is `Q₁Q₁ᵀf` and the values `Q₂Q₁ᵀf/μ`: no triangular system is solved.
        """
        tried = self._tried.setdefault(count, {})
        pairs = [p for p in dict.fromkeys(pairs) if p not in tried and abs(p[1]) <= _EXTREME]
        if not pairs:
            return
        stride = 1
        resolved = min(self.degree + 4, 4 * count) if self._rough else self.degree + 4
        while (len(self.lines) - 1) // (2 * stride) >= max(_OVERSAMPLING * count + 3, resolved):
            stride *= 2
        lines = self.lines[::stride]
        ridge = max(0.5 * self.tolerance / self.most_spread, 1e-15) * math.sqrt(len(lines) / count)
        each = 4.0 * (len(lines) + count) * count**2
        self._effort += each * len(pairs)
        step = max(1, int(_AT_ONCE / each))
        for start in range(0, len(pairs), step):
            self.watch(f"fitting {count} keys on lines")
            some = pairs[start : start + step]
            solve = partial(self._solved, lines, count, some, ridge)
            sharpness, errors, spreads = crew().recall(
                "axis", (lines, count, some, ridge, self.tolerance, self.most_spread), solve
            )
            figures = zip(some, sharpness.tolist(), errors.tolist(), spreads.tolist())
            tried |= {pair: AxisChoice(count, pair[0], kappa, error, spread) for pair, kappa, error, spread in figures}

    def _solved(
        self, lines: Array, count: int, pairs: list[tuple[int, int]], ridge: float
    ) -> tuple[Array, Array, Array]:
        """Sharpness, error and spread of the values for each pair."""
        ghosts = np.array([g for g, _ in pairs])
        sharpness = 2.0 ** (np.array([j for _, j in pairs]) / _OCTAVE)
        weights = _unit_matrices(chebyshev_points(len(lines)), count, ghosts, sharpness)
        eye = np.broadcast_to(ridge * np.eye(count), (len(pairs), count, count))
        q = np.linalg.qr(np.concatenate([weights, eye], axis=1))[0]
        top, low = q[:, : len(lines)], q[:, len(lines) :]
        inner = top.transpose(0, 2, 1) @ lines
        errors = np.abs(lines - top @ inner).max(axis=(1, 2))
        spreads = np.ptp(low @ inner, axis=1).max(axis=1) / ridge
        excess = spreads / self.most_spread
        errors = np.where(excess > 1, np.maximum(errors, self.tolerance * excess**2), errors)
        return sharpness, errors, spreads


def _index(sharpness: float) -> int:
    """The place of κ on the lattice."""
    return round(_OCTAVE * math.log2(sharpness))


def _first_negative(excess: Callable[[int], float], low: int, high: int) -> int:
    """The smallest count above low with `excess ≤ 0`, for one that falls about linearly and is ≤ 0 at high."""
    below, above = excess(low), excess(high)
    while high - low > 1:
        share = below / (below - max(above, -below))
        middle = min(max(low + round(share * (high - low)), low + 1), high - 1)
        value = excess(middle)
        if value <= 0:
            high, above = middle, value
        else:
            low, below = middle, value
    return high


def _unit_matrices(points: Array, count: int, ghosts: Array, sharpness: Array) -> Array:
    """Softmax matrices on [−1, 1] for many (ghosts, sharpness), `(pairs, points, count)`."""
    spacing = 2.0 / (count - 2 * ghosts)
    centers = np.arange(count) - (count - 1) / 2
    distance = points[None, :, None] / spacing[:, None, None] - centers
    return softmax(-0.5 * sharpness[:, None, None] * distance**2)


def _representatives(lines: Array, tolerance: float) -> Array:
    """Columns that stand for all: the last few, and pivots of the Chebyshev coefficients, all degrees weighing the same."""
    if lines.shape[1] <= _LINES:
        return lines
    coefficients = _coefficients(lines)
    size = np.abs(coefficients).max(axis=1)
    matters = size > tolerance / 10
    if not matters.any():
        return lines[:, -_LINES:]
    order = scipy.linalg.qr(coefficients[matters] / size[matters, None], mode="r", pivoting=True)[1]
    return lines[:, np.unique([*order[: _LINES - _LAST], *range(lines.shape[1] - _LAST, lines.shape[1])])]
