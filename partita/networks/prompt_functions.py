"""Functions in context: one fixed attention layer that reads f from the pairs (x_i, f(x_i)) in its prompt.

net(q) = Σ_i softmax_i(R(q·x_i − |x_i|²/2)) y_i. Nothing in the layer depends on f or on the prompt.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import scipy
import torch
from torch import Tensor, nn

from partita.arithmetic.arguments import require_count, require_dtype, require_number
from partita.arithmetic.precision import DOUBLE, Precision
from partita.arithmetic.rounding import add_up, div_up, exp_up, mul_up, sqrt_up, up
from partita.errors import (
    DomainError,
    LipschitzContradictedError,
    NonFiniteValueError,
    OutsideDomainError,
    ShapeError,
    SizeError,
    ToleranceError,
    UnsupportedError,
)
from partita.geometry.covers import fill_distance_bounds
from partita.geometry.domains import Array, Box, BoxLike
from partita.geometry.moments import soft_maximum_gap
from partita.heads.head import real_tensor
from partita.heads.layers import CrossAttention
from partita.kernels.guards import certified
from partita.kernels.trace_modes import is_traced
from partita.proofs.claim import require_ordinary
from partita.proofs.running import summed

__all__ = ["PromptFacts", "PromptFunction", "function"]

_AT_ONCE = 1 << 24  # scores that are held at a time
_NEAR = 1 + 2.0**-30  # distances are compared with the fill distance after rounding


@dataclass(frozen=True)
class PromptFacts:
    """A layer that reads functions from prompts, in numbers.

    Attributes:
        lipschitz: L.
        fill_distance: ρ, how far a query may be from the nearest pair.
        noise: η, how far a y may be from f.
        rate: R, the inverse temperature.
        radius: half the diagonal of the box.
        dimension: m.
        precision: of the dtype it runs in.
    """

    lipschitz: float
    fill_distance: float
    noise: float
    rate: float
    radius: float
    dimension: int
    precision: Precision

    @property
    def moved(self) -> float:
        """How far shifting and storing may move a point: `1.01·u·r`."""
        return add_up(mul_up(1.01, self.precision.unit, self.radius), mul_up(self.dimension, self.precision.tiniest))

    @property
    def product_error(self) -> float:
        """What rounding adds to a score, divided by R: `1.01·u·1.5(m + 12)r²`."""
        unit, size = self.precision.unit, mul_up(1.0001, self.radius, self.radius)
        tiny = mul_up(self.dimension + 2.0, self.precision.tiniest)
        return add_up(mul_up(1.515, self.dimension + 12.0, unit, size), tiny)

    def exponent_error(self, pairs: int) -> float:
        """What exp and rescaling add to a score: `1.01·u(17 + N)`."""
        return mul_up(1.01, self.precision.unit, 17.0 + pairs)

    def mean_distance(self, nearest: float, pairs: int) -> float:
        """`Σ_i w_i |q − x_i| ≤ √((ρ + 2σ)² + 2(W((N−1)/e) + 2δ)/R) + 2σ`, for a query that is ρ from the nearest pair."""
        stored = add_up(nearest, mul_up(2.0, self.moved))
        return add_up(sqrt_up(add_up(mul_up(stored, stored), self.softness(pairs))), mul_up(2.0, self.moved))

    def softness(self, pairs: int) -> float:
        """`2(W((N−1)/e) + 2δ)/R`, δ what the scores are off by."""
        soft = add_up(soft_maximum_gap(pairs), mul_up(2.0, self.exponent_error(pairs)))
        return add_up(div_up(mul_up(2.0, soft), self.rate), mul_up(4.0, self.product_error))

    def value_rounding(self, pairs: int, largest: float) -> float:
        """What storing and summing N values up to `largest` rounds, in any order."""
        vanished = mul_up(4.0, float(pairs), self.precision.smallest, largest)
        return add_up(summed(2.0 * pairs + 18, self.precision.unit, largest), vanished)

    def bound(self, distance: float, pairs: int, largest: float) -> float:
        """`L·(mean distance) + η + rounding`."""
        return add_up(mul_up(self.lipschitz, distance), self.noise, self.value_rounding(pairs, largest))


class PromptFunction(nn.Module):
    """One fixed attention layer: called as `g(X, y, Q)` it returns f at the queries Q, for every L-Lipschitz f with `y_i = f(x_i)`.

    A pair is the token `[x − o; |x − o|²; y]`, a query the token `[q − o; 1; 0]`, with o the middle of the box. The weights
    W_K, W_Q and W_V are constants. The square is part of the token: no weights on `[x; y; 1]` alone would do
    (`in-context-squares`).

    Attributes:
        facts: L, ρ, η, R and the sizes that the bounds use.
        box: where pairs and queries lie.
        tolerance: as it was asked for.
        max_pairs: the largest number of pairs that the bound covers.
        largest: the largest |y| that the bound covers.
        error_bound: proved for every prompt and every query within ρ of one of its pairs, rounding included.
        w_k: W_K on `[x − o; |x − o|²]`, `(m + 1, m + 1)`.
        w_q: W_Q on `[q − o; 1]`, `(m + 1, m + 1)`.

    *Theorem*: `in-context-function`.

    >>> g = function(lipschitz=1.0, fill_distance=0.1, tolerance=0.2, box=Box([-1], [1]))
    >>> x = np.linspace(-1, 1, 11)[:, None]
    >>> g(x, np.abs(x[:, 0]), [[0.3]]).shape, g.error_bound <= 0.2
    (torch.Size([1]), True)
    """

    w_k: Tensor
    w_q: Tensor
    origin: Tensor

    def __init__(self, facts: PromptFacts, box: Box, *, tolerance: float, max_pairs: int, largest: float) -> None:
        super().__init__()
        self.facts, self.box, self.tolerance, self.max_pairs, self.largest = facts, box, tolerance, max_pairs, largest
        self.error_bound = facts.bound(facts.mean_distance(facts.fill_distance * _NEAR, max_pairs), max_pairs, largest)
        eye = torch.eye(facts.dimension + 1, dtype=getattr(torch, facts.precision.name))
        key = eye.clone()
        key[-1, -1] = -0.5
        self.register_buffer("w_k", key)
        self.register_buffer("w_q", facts.rate * eye)
        self.register_buffer("origin", torch.from_numpy((box.lo + box.hi).ravel() / 2))

    @property
    def dtype(self) -> torch.dtype:
        """dtype of the layer and its answers."""
        return self.w_k.dtype

    @property
    def optimal_ratio(self) -> float:
        """`error_bound/(Lρ + η)`: whatever reads f from such a prompt errs by at least Lρ + η for some f."""
        least = self.facts.lipschitz * self.facts.fill_distance + self.facts.noise
        return div_up(self.error_bound, least) if least else math.inf

    def extra_repr(self) -> str:
        """The class of functions and the bound, for `print(g)`."""
        f = self.facts
        return (
            f"L = {f.lipschitz:g} on {self.box}, fill distance {f.fill_distance:g}, up to {self.max_pairs:,} pairs, "
            f"R = {f.rate:.4g}, error ≤ {self.error_bound:.4g}"
        )

    def forward(
        self, points: Any, values: Any, queries: Any, *, check: Literal["queries", "fill", "none"] = "queries"
    ) -> Tensor:
        """f at the queries, `(…, n)` or `(…, n, out)`, within `error_bound`. Differentiable in all three arguments.

        Args:
            points: X, `(…, N, m)`.
            values: y, `(…, N)` or `(…, N, out)`.
            queries: Q, `(…, n, m)`.
            check: "queries" refuses a query that is farther than ρ from every pair; "fill" proves that no point of the box is,
                and looks for two pairs that contradict L (see `check`); "none" leaves this, and |y| ≤ largest, to the caller, who
                has `error_bound_at`. A trace checks nothing.

        Raises:
            ShapeError: shapes do not fit.
            NonFiniteValueError: NaN or infinity.
            OutsideDomainError: a pair or a query outside the box, a query too far from every pair, |y| > largest.
            SizeError: more than max_pairs pairs.
        """
        x, y, q, is_scalar = self._shaped(points, values, queries)
        if not is_traced(x):
            if check not in ("queries", "fill", "none"):
                raise UnsupportedError(f"check is {check!r}; expected 'queries', 'fill' or 'none'.")
            self._require_inside(x, y, q)
            if check != "none":
                self._require_size(y)
            if check == "queries":
                self._require_near(x, y, q)
            elif check == "fill":
                self._check(x, y)
        out = self._answers(self._squared(x), y.to(self.dtype), self._shifted(q))
        return out.squeeze(-1) if is_scalar else out

    def error_bound_at(self, points: Any, values: Any, queries: Any) -> Array:
        """A proved bound for each query of this prompt, `(…, n)`, however sparse the prompt is.

        It is `L Σ_i w_i |q − x_i| + η` and rounding, from the weights themselves. *Theorem*: `in-context-function`.

        Args:
            points: X, `(…, N, m)`.
            values: y, `(…, N)` or `(…, N, out)`.
            queries: Q, `(…, n, m)`.

        Raises:
            ShapeError: shapes do not fit.
            NonFiniteValueError: NaN or infinity.
            OutsideDomainError: a pair or a query outside the box.
        """
        x, y, q, _ = self._shaped(points, values, queries)
        self._require_inside(x, y, q)
        lead = torch.broadcast_shapes(x.shape[:-2], q.shape[:-2])
        found = [self._bounds_at(*one) for one in _each(x, y, q)]
        return np.reshape(found, (*lead, q.shape[-2]))

    def check(self, points: Any, values: Any) -> float:
        """Prove that every point of the box is within ρ of a pair, and that no two pairs contradict L.

        Returns a proved upper bound of the fill distance.

        Args:
            points: X, `(…, N, m)`.
            values: y, `(…, N)` or `(…, N, out)`.

        Raises:
            OutsideDomainError: the fill distance may exceed ρ. The message says what the bound is then.
            LipschitzContradictedError: two pairs differ by more than `L|x_i − x_j| + 2η`.
        """
        x, y, q, _ = self._shaped(points, values, self.origin[None])
        self._require_inside(x, y, q)
        return self._check(x, y)

    def tokens(self, points: Any, values: Any) -> Tensor:
        """The prompt as the layer sees it, in the paper's orientation: `(…, m + 1 + out, N)`, rows x − o, |x − o|² and y.

        Args:
            points: X, `(…, N, m)`.
            values: y, `(…, N)` or `(…, N, out)`.
        """
        x, y, _, _ = self._shaped(points, values, self.origin[None])
        y = y.to(self.dtype).expand(*x.shape[:-1], y.shape[-1])
        return torch.cat([self._squared(x), y], dim=-1).transpose(-1, -2)

    def query_tokens(self, queries: Any, outputs: int = 1) -> Tensor:
        """The queries as the layer sees them, `(…, m + 1 + out, n)`, rows q − o, 1 and zeros.

        Args:
            queries: Q, `(…, n, m)`.
            outputs: out, at least 1.

        Raises:
            ShapeError: the queries have another shape.
            DomainError: outputs is no integer ≥ 1.
        """
        raw, m, outputs = real_tensor("queries", queries), self.facts.dimension, require_count("outputs", outputs)
        if raw.dim() < 2 or raw.shape[-1] != m:
            raise ShapeError(f"queries have shape {tuple(raw.shape)}; expected (…, n, {m}).")
        q = self._shifted(raw)
        return torch.cat([q, torch.ones_like(q[..., :1]), q.new_zeros(*q.shape[:-1], outputs)], dim=-1).transpose(
            -1, -2
        )

    def layer(self, outputs: int = 1, queries: int = 1) -> CrossAttention:
        """The paper's cross-attention with every weight written out: `layer(tokens, query_tokens)` is g, `(batch, out, n)`.

        `W_K = [I 0 0; 0 −½ 0]`, `W_Q = R[I 0 0; 0 1 0]`, `W_V = [0 0 I]`, `W_O = I`. Only `outputs` and `queries` set the shapes.

        Args:
            outputs: out, at least 1.
            queries: n, at least 1.

        Raises:
            DomainError: a number is no integer ≥ 1.
        """
        size, outputs, queries = (
            self.facts.dimension + 1,
            require_count("outputs", outputs),
            require_count("queries", queries),
        )
        wide = nn.ZeroPad2d((0, outputs, 0, 0))
        return CrossAttention(
            w_k=wide(self.w_k),
            w_q=wide(self.w_q),
            w_v=torch.eye(size + outputs, dtype=self.dtype)[size:],
            w_o=torch.eye(queries, dtype=self.dtype),
        )

    @certified
    def _answers(self, x: Tensor, y: Tensor, q: Tensor) -> Tensor:
        """Softmax attention, some queries at a time."""
        keys = (x @ self.w_k.T).transpose(-1, -2)
        queries = torch.cat([q, torch.ones_like(q[..., :1])], dim=-1) @ self.w_q.T
        held = x.shape[-2] * max(1, math.prod(torch.broadcast_shapes(x.shape[:-2], q.shape[:-2])))
        step = q.shape[-2] if is_traced(q) else max(1, _AT_ONCE // held)
        parts = [torch.softmax(some @ keys, dim=-1) @ y for some in torch.split(queries, max(step, 1), dim=-2)]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-2)

    def _shifted(self, x: Tensor) -> Tensor:
        return (x.double() - self.origin).to(self.dtype)

    def _squared(self, x: Tensor) -> Tensor:
        """`[x − o; |x − o|²]`, `(…, N, m + 1)`. The square is that of the stored x − o."""
        stored = self._shifted(x)
        square = stored.double().square().sum(dim=-1, keepdim=True)
        return torch.cat([stored, square.to(self.dtype)], dim=-1)

    def _shaped(self, points: Any, values: Any, queries: Any) -> tuple[Tensor, Tensor, Tensor, bool]:
        """X, y `(…, N, out)` and Q as tensors, and whether y had no output dimension."""
        if self.w_q.dtype != getattr(torch, self.facts.precision.name) or self.origin.dtype != torch.float64:
            raise UnsupportedError(
                f"this layer was built for {self.facts.precision.name} and cast to {self.w_q.dtype}; its bound does not cover that",
                "Build it with dtype= instead.",
            )
        x, y, q = real_tensor("X", points), real_tensor("y", values), real_tensor("Q", queries)
        m = self.facts.dimension
        is_scalar = y.dim() == x.dim() - 1
        fits = x.dim() >= 2 and q.dim() >= 2 and x.shape[-1] == q.shape[-1] == m and x.shape[-2] >= 1
        fits &= is_scalar or y.shape[-1:] != (0,)
        if not fits or y.dim() not in (x.dim() - 1, x.dim()) or y.shape[: x.dim() - 1] != x.shape[:-1]:
            raise ShapeError(
                f"the prompt has X {tuple(x.shape)}, y {tuple(y.shape)} and the queries Q {tuple(q.shape)}; expected "
                f"(…, N, {m}), (…, N) or (…, N, out), and (…, n, {m}) with N ≥ 1 and out ≥ 1."
            )
        if x.shape[-2] > self.max_pairs:
            raise SizeError(
                f"the prompt has {x.shape[-2]:,} pairs; the bound of this layer covers at most max_pairs = {self.max_pairs:,}",
                "Build the layer with a larger max_pairs.",
            )
        try:
            torch.broadcast_shapes(x.shape[:-2], q.shape[:-2])
        except RuntimeError:
            raise ShapeError(
                f"X has the batch shape {tuple(x.shape[:-2])}, Q {tuple(q.shape[:-2])}; expected shapes that broadcast."
            ) from None
        return x, y[..., None] if is_scalar else y, q, is_scalar

    def _require_inside(self, x: Tensor, y: Tensor, q: Tensor) -> None:
        for name, found in (("X", x), ("y", y), ("Q", q)):
            if not bool(found.isfinite().all()):
                bad = int((~found.isfinite()).sum())
                raise NonFiniteValueError(
                    f"{name} has {bad:,} numbers that are NaN or infinite; expected finite numbers."
                )
        for name, found in (("pairs", x), ("queries", q)):
            flat = found.detach().double().cpu().numpy().reshape(-1, self.facts.dimension)
            inside = self.box.contains(flat)
            if not inside.all():
                first = np.round(flat[int(np.flatnonzero(~inside)[0])][:8], 6).tolist()
                raise OutsideDomainError(
                    f"{int((~inside).sum()):,} of {len(flat):,} {name} lie outside the box {self.box}, the first is {first}",
                    "Build the layer with a larger box.",
                )

    def _require_size(self, y: Tensor) -> None:
        size = float(y.detach().abs().max()) if y.numel() else 0.0
        if size > self.largest:
            raise OutsideDomainError(
                f"y reaches {size:.4g}; rounding in {self.facts.precision.name} is bounded for |y| ≤ {self.largest:.4g}",
                "Subtract a constant from y, or build the layer with a larger largest=.",
            )

    def _require_near(self, x: Tensor, y: Tensor, q: Tensor) -> None:
        rho = self.facts.fill_distance
        for pairs, values, queries in _each(x, y, q):
            if not len(queries):
                continue
            distance = _nearest(pairs, queries)
            far = int(distance.argmax())
            if distance[far] > rho * _NEAR:
                bound = float(self._bounds_at(pairs, values, queries[far : far + 1])[0])
                raise OutsideDomainError(
                    f"query {far} is {distance[far]:.4g} from the nearest of {len(pairs):,} pairs, farther than the declared "
                    f"fill_distance {rho:g}; there the error is only proved to be ≤ {bound:.4g}, not {self.error_bound:.4g}",
                    "Add pairs near it, build the layer with a larger fill_distance, or pass check='none' and use error_bound_at.",
                )

    def _check(self, x: Tensor, y: Tensor) -> float:
        f, most = self.facts, 0.0
        for pairs, values, _ in _each(x, y, x[..., :0, :]):
            _refuse_contradiction(pairs, values, f.lipschitz, f.noise)
            lower, upper = fill_distance_bounds(pairs, self.box, enough=f.fill_distance * _NEAR)
            most = max(most, upper)
            if upper > f.fill_distance * _NEAR:
                size = float(np.abs(values).max())
                bound = f.bound(f.mean_distance(upper, len(pairs)), len(pairs), size)
                raise OutsideDomainError(
                    f"the fill distance of the prompt in {self.box} is between {lower:.4g} and {upper:.4g}, declared was "
                    f"{f.fill_distance:g}; on the whole box the error is only proved to be ≤ {bound:.4g}",
                    "Add pairs, or build the layer with this fill_distance.",
                )
        return most

    def _bounds_at(self, x: Array, y: Array, q: Array) -> Array:
        """The bounds of one prompt: by the weights, or by the soft-maximum lemma where rounding spoils them."""
        f, pairs = self.facts, len(x)
        rounding = f.value_rounding(pairs, float(np.abs(y).max(initial=0.0)))
        # δ of the run, what storing does to a score, and what this function itself rounds, twice each
        size, u = mul_up(2.0001, f.radius), DOUBLE.unit
        moved = mul_up(2.0, f.moved, add_up(size, mul_up(2.0, f.moved)))
        own = mul_up(3.0 * f.dimension + 40.0, u, size, size)
        lost = mul_up(2.0 * f.dimension + 20.0, u, size)  # in differences of distances
        delta = add_up(
            mul_up(f.rate, add_up(f.product_error, moved, own)), f.exponent_error(pairs), u * (40 + 2 * pairs)
        )
        factor = exp_up(min(mul_up(2.0, delta), 700.0))
        found = np.empty(len(q))
        for start in range(0, len(q), step := max(1, _AT_ONCE // (pairs * f.dimension))):
            some = q[start : start + step]
            distance = np.sqrt(np.square(some[:, None] - x).sum(axis=2)) * (1 + (f.dimension + 8) * u)
            least = distance.min(axis=1, keepdims=True)
            weights = np.exp(-f.rate / 2 * (distance - least) * (distance + least))
            spread = (weights * (distance - least)).sum(axis=1) / weights.sum(axis=1)
            found[start : start + step] = up(least[:, 0] + up(factor * (spread + lost), 8), 8)
        nearest = up(_nearest(x, q) * (1 + f.dimension * u), 8) + 2 * f.moved
        by_lemma = up(np.sqrt(up(nearest * nearest + f.softness(pairs), 4)), 4) + 2 * f.moved
        mean = np.minimum(found, up(by_lemma, 4))
        return up(up(f.lipschitz * mean, 2) + up(f.noise + rounding), 2)


def _each(x: Tensor, y: Tensor, q: Tensor) -> list[tuple[Array, Array, Array]]:
    """The prompts of a batch, one by one, as float64 arrays."""
    lead = torch.broadcast_shapes(x.shape[:-2], q.shape[:-2])
    wide = [t.detach().double().cpu().expand(*lead, *t.shape[-2:]).numpy() for t in (x, y, q)]
    return list(zip(*(t.reshape(math.prod(lead), *t.shape[-2:]) for t in wide)))


def _nearest(points: Array, queries: Array) -> Array:
    """Distance of each query to the nearest point."""
    _, index = scipy.spatial.KDTree(points).query(queries)
    return np.asarray(np.sqrt(np.square(queries - points[index]).sum(axis=1)))


def _refuse_contradiction(x: Array, y: Array, lipschitz: float, noise: float) -> None:
    """An error for two pairs that no L-Lipschitz function with this noise has."""
    step = max(1, _AT_ONCE // (len(x) * max(x.shape[1], y.shape[1])))
    for start in range(0, len(x), step):
        some = slice(start, start + step)
        distance = np.sqrt(np.square(x[some, None] - x).sum(axis=2))
        moved = np.abs(y[some, None] - y).max(axis=2)
        allowed = (lipschitz * distance + 2 * noise) * (1 + 1e-9) + 1e-12 * np.abs(y).max(initial=0.0)
        if (moved > allowed).any():
            i, j = np.argwhere(moved > allowed)[0]
            raise LipschitzContradictedError(
                f"pairs {start + i} and {j} are {distance[i, j]:.4g} apart and their values {moved[i, j]:.4g}; no function with "
                f"the Lipschitz constant {lipschitz:g} and noise {noise:g} has both",
                "Declare a larger lipschitz= or noise=.",
            )


def function(
    *,
    lipschitz: float,
    fill_distance: float,
    tolerance: float,
    box: BoxLike,
    max_pairs: int = 4096,
    noise: float = 0.0,
    largest: float | None = None,
    dtype: torch.dtype = torch.float64,
) -> PromptFunction:
    """One fixed attention layer g that reads f from its prompt: `|g(X, y, Q) − f(Q)| ≤ tolerance` for every L-Lipschitz f.

    `|g − f| ≤ L√(ρ² + 2W((N−1)/e)/R) + η`, W Lambert's function; R is the smallest inverse temperature for which this is at most
    the tolerance with N = max_pairs, rounding included. The layer depends on the six numbers and the box, not on f or the prompt.

    *Theorem*: `in-context-function`, `in-context-squares`.

    Args:
        lipschitz: L > 0, `|f(x) − f(x')|_∞ ≤ L|x − x'|₂` on the box. The caller guarantees it.
        fill_distance: ρ > 0. The bound covers queries within ρ of a pair.
        tolerance: must exceed Lρ + η.
        box: where pairs and queries lie, `(m,)`.
        max_pairs: the largest number of pairs in a prompt.
        noise: η ≥ 0, where `|y_i − f(x_i)|_∞ ≤ η`.
        largest: the largest |y| of a prompt; by default so large that rounding takes 5 % of tolerance − Lρ − η.
        dtype: torch.float64 or torch.float32.

    Raises:
        ToleranceError: the tolerance is at most Lρ + η, which no method can beat, or too small for the dtype.
        DomainError: a number is not positive or not finite.

    >>> import partita as pa
    >>> g = pa.in_context.function(lipschitz=1.0, fill_distance=0.1, tolerance=0.15, box=pa.Box([-1], [1]))
    >>> x = np.linspace(-1, 1, 11)[:, None]
    >>> bool(abs(float(g(x, np.sin(x[:, 0]), [[0.45]])[0]) - np.sin(0.45)) <= g.error_bound)
    True
    """
    require_dtype(dtype)
    box = Box.of(box)
    if box.lo.ndim != 1:
        raise DomainError(f"box is {box!r}; expected a box of points, say pa.Box([-1, -1], [1, 1]).")
    lipschitz, fill_distance = require_number("lipschitz", lipschitz), require_number("fill_distance", fill_distance)
    tolerance, noise = require_number("tolerance", tolerance), require_number("noise", noise, zero=True)
    largest, max_pairs = (
        None if largest is None else require_number("largest", largest),
        require_count("max_pairs", max_pairs),
    )
    precision = Precision.of(dtype)
    extent = np.maximum(np.abs(box.lo - (box.lo + box.hi) / 2), np.abs(box.hi - (box.lo + box.hi) / 2))
    longest = float(extent.max())
    radius = float(up(longest * float(np.linalg.norm(extent / longest)), 8)) * (1 + box.dimension * 1e-15)
    require_ordinary(dtype, squared_half_diagonal_of_the_box=mul_up(radius, radius))
    least = lipschitz * fill_distance + noise
    if tolerance <= least:
        raise ToleranceError(
            f"tolerance {tolerance:g} is not above lipschitz · fill_distance + noise = {least:.6g}; whatever sees f only on such "
            "a prompt errs by that much for some f",
            f"Use a larger tolerance, or denser prompts: a fill_distance below {max(0.0, (tolerance - noise) / lipschitz):.4g}.",
        )
    if largest is None:
        share = 0.05 * (tolerance - least)
        largest = min(share / (1.02 * (2 * max_pairs + 18) * precision.unit), precision.largest / (8 * max_pairs))
    facts = PromptFacts(lipschitz, fill_distance, noise, 1.0, radius, box.dimension, precision)
    facts = replace(facts, rate=_rate(facts, tolerance, max_pairs, largest))
    require_ordinary(dtype, inverse_temperature=facts.rate, largest_score=2 * facts.rate * radius**2)
    return PromptFunction(facts, box, tolerance=tolerance, max_pairs=max_pairs, largest=largest)


def _rate(facts: PromptFacts, tolerance: float, pairs: int, largest: float) -> float:
    """The smallest R, as the dtype stores it, whose bound is at most the tolerance."""
    precision, rest = facts.precision, add_up(facts.noise, facts.value_rounding(pairs, largest))
    reach = (tolerance - rest) / facts.lipschitz - 2 * facts.moved
    nearest = facts.fill_distance * _NEAR + 2 * facts.moved
    room = (reach - nearest) * (reach + nearest) - 4 * facts.product_error if reach > 0 else -1.0
    soft = soft_maximum_gap(pairs) + 2 * facts.exponent_error(pairs)
    for slack in (1e-9, 1e-7, 1e-6, 1e-4):
        if room <= 0:
            break
        wanted = max(2 * soft / room * (1 + slack), 1.0 / facts.radius**2)
        rate = float(precision.number(wanted))
        if rate > 0 and math.isfinite(rate):
            tried = replace(facts, rate=rate)
            if tried.bound(tried.mean_distance(facts.fill_distance * _NEAR, pairs), pairs, largest) <= tolerance:
                return rate
    exact = facts.lipschitz * facts.fill_distance + facts.noise
    sums = facts.value_rounding(pairs, largest)
    raise ToleranceError(
        f"tolerance {tolerance:g} leaves {tolerance - exact:.3g} above lipschitz · fill_distance + noise, too little for rounding "
        f"in {precision.name}: sums of {pairs:,} values up to {largest:.3g} take {sums:.3g}, and scores move distances by about "
        f"{2 * math.sqrt(facts.product_error):.3g}",
        f"Use a larger tolerance, a smaller largest= or max_pairs{', or float64' if precision.rounds_inputs else ''}.",
    )
