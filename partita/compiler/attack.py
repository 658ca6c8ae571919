"""Attack: the search for a point where a claim is false, for certificates of partita and for claims about other models."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn

from partita.arithmetic.notebook_cards import card
from partita.arithmetic.progress import Progress
from partita.compiler.compiled import Compiled
from partita.errors import DomainError, UnsupportedError
from partita.functions.regions import DomainLike
from partita.functions.target import Target, make_target
from partita.geometry.domains import Array
from partita.geometry.partitions import Partition
from partita.heads.head import Head
from partita.proofs.balls import balls_at_hand, value_in_balls
from partita.proofs.worst_point import search_worst
from partita.workers import crew, crew_of

__all__ = ["Attack", "attack"]

_STEPS = 60
_AT_ONCE = 1 << 13  # points of one part of an attack on an expression
_FIRST_STEP, _LAST_STEP = 0.05, 1e-7  # of the domain's sides


@dataclass(frozen=True)
class Attack:
    """The worst point that was found, and whether it refutes the claim.

    Attributes:
        point: the point, flat, `(m,)`.
        error: `|f − net|_∞` there, the head as it runs, f in floating point.
        lowest: a proved lower bound of that error. None for a black box.
        highest: a proved upper bound of that error. None for a black box.
        arithmetic: how f was enclosed: "ball arithmetic" (needs python-flint), "interval arithmetic", or "floats".
        bound: the claimed bound.
        samples: the number of points tried.
        claimed: False if the certificate is an estimate, which claims no bound.
    """

    point: tuple[float, ...]
    error: float
    lowest: float | None
    highest: float | None
    arithmetic: str
    bound: float
    samples: int
    claimed: bool = True

    @property
    def refuted(self) -> bool:
        """Whether the error at the point is certainly above the claimed bound, or the head has no value there."""
        worst = self.error if self.lowest is None else self.lowest
        return self.claimed and not worst <= self.bound  # also where the net has no value

    @property
    def ratio(self) -> float:
        """bound/error. Below 1 the claim is false."""
        return self.bound / self.error if self.error > 0 else math.inf

    def __repr__(self) -> str:
        return f"Attack({self})"

    def _repr_html_(self) -> str:
        verdict = "REFUTED" if self.refuted else "not refuted" if self.claimed else "nothing to refute"
        between = None if self.lowest is None else f"{self.lowest:.9g} to {self.highest:.9g} ({self.arithmetic})"
        facts = {
            "worst error found": f"{self.error:.6g}",
            "enclosed": between,
            "at": ", ".join(f"{x:.6g}" for x in self.point),
            "claimed" if self.claimed else "seen before": f"{'≤ ' * self.claimed}{self.bound:.6g}",
            "points tried": f"{self.samples:,}",
        }
        return card(f"Attack: {verdict}", facts)

    def __str__(self) -> str:
        place = ", ".join(f"{x:.6g}" for x in self.point)
        known = (
            "" if self.lowest is None else f", in {self.arithmetic} between {self.lowest:.9g} and {self.highest:.9g}"
        )
        found = f"error {self.error:.6g} at ({place}){known}"
        if not self.claimed:
            return (
                f"nothing to refute: the certificate is an estimate ({self.bound:.6g} was seen) and claims no bound; {found}; "
                f"{self.samples:,} points"
            )
        verdict = "REFUTED" if self.refuted else "not refuted"
        return f"{verdict}: {found}; claimed ≤ {self.bound:.6g}; {self.samples:,} points"


def attack(
    claim: Compiled | Callable[..., Any],
    function: Any = None,
    domain: DomainLike | None = None,
    *,
    bound: float | None = None,
    samples: int = 1 << 14,
    restarts: int = 64,
    executor: Any = None,
    checkpoint: str | os.PathLike[str] | None = None,
    retries: int = 0,
    seed: int = 0,
) -> Attack:
    """Search for a point that violates a claim: random points, corners, cell corners, gradient ascent, then ball arithmetic.

    If f is an expression, its value at the worst point is enclosed, so `refuted` is certain. Finding nothing proves
    nothing. An estimate claims no bound, so it cannot be refuted; `claimed` is then False.

    Args:
        claim: a `Compiled`, or any module or function of a batch that is claimed to be within `bound` of `function`.
        function: the function, as in `compile`. Needed unless `claim` is a `Compiled` that has its function: of one that was
            loaded from a file and approximates a black box, give that black box.
        domain: its domain, as in `compile`. Needed unless `claim` is a `Compiled`.
        bound: the claimed bound. For a `Compiled` the certificate's, by default.
        samples: random points.
        restarts: points that gradient ascent starts from: half near the worst point found, half random. 0 for none: of a black
            box, each takes hundreds of evaluations.
        executor: who evaluates f and the head at many points, as for `compile`.
        checkpoint: a folder that keeps the answers of f, as for `compile`.
        retries: how often f is called again where it raised, ≥ 0.
        seed: random seed.

    Returns:
        An `Attack` with the worst point.

    Raises:
        UnsupportedError: the head was changed after it was certified, or function=, domain= or bound= is missing.
        DomainError: bound is negative.
        AnotherFunctionError: function is not the one that a loaded head was compiled from.

    >>> import partita as pa
    >>> c = pa.compile("sin(3*x)", pa.Box([-1], [1]), tolerance=1e-3)
    >>> pa.attack(c).refuted, pa.attack(c, bound=c.error_bound / 2).refuted
    (False, True)
    """
    with crew_of(executor, checkpoint, retries).at_work():
        if isinstance(claim, Compiled):
            opponent = _opponent_of(claim if function is None else claim.with_function(function), bound)
        else:
            if function is None or domain is None or bound is None:
                raise UnsupportedError("the claim is not a Compiled; give function=, domain= and bound= as well.")
            target = make_target(function, domain)
            opponent = _Opponent(
                target, make_target(claim, domain, trace=False), _differentiable(claim), None, float(bound)
            )
        if not opponent.bound >= 0:
            raise DomainError(f"bound is {opponent.bound}; expected a number ≥ 0.")
        found = search_worst(
            opponent.errors, opponent.target.domain, partition=opponent.partition, samples=samples, seed=seed
        )
        worst = np.array(found.point)
        return opponent.report(_climb(opponent, worst, restarts, seed) if restarts else worst, found.samples)


@dataclass(frozen=True, eq=False)
class _Opponent:
    """What is attacked: f, the net as it runs, the same as a torch function if it has gradients, its cells, and the claim."""

    target: Target
    run: Callable[[Array], Array]
    torch_run: Callable[[torch.Tensor], torch.Tensor] | None
    partition: Partition | None
    bound: float
    claimed: bool = True

    def errors(self, points: Array) -> Array:
        """`|f − net|_∞` at points `(n, m)`; for an expression in parts, which workers may take."""
        if self.target.graph is None or len(points) <= _AT_ONCE:  # the calls of a black box are spread by themselves
            return self._errors(points)
        away = replace(self, torch_run=None, target=self.target.for_workers())
        parts = [points[i : i + _AT_ONCE] for i in range(0, len(points), _AT_ONCE)]
        return np.concatenate(list(crew().spread(_errors_of, away, parts)))

    def _errors(self, points: Array) -> Array:
        error = np.abs(self.run(points) - self.target(points)).max(axis=1)
        return np.where(self.target.failed(points), 0.0, np.where(np.isnan(error), np.inf, error))

    def slopes(self, points: Array) -> Array:
        """The gradient of the error at points, by autograd where both sides are torch, else by differences."""
        graph = self.target.graph
        if graph is None or self.torch_run is None:
            return self._differences(points)
        z = torch.from_numpy(points.copy()).requires_grad_()
        off = self.torch_run(z).reshape(len(z), -1) - graph.evaluate_torch(z).reshape(len(z), -1)
        if not off.requires_grad:
            return np.zeros_like(points)
        found = torch.autograd.grad(off.abs().amax(dim=1).sum(), z)[0].numpy()
        out: Array = np.nan_to_num(found, nan=0.0, posinf=0.0, neginf=0.0)
        return out

    def _differences(self, points: Array) -> Array:
        step = 1e-5 * self.target.box.sides
        ends = np.stack([self.target.domain.clamp(points + move) for h in np.diag(step) for move in (h, -h)])
        errors = self.errors(ends.reshape(-1, len(step))).reshape(len(step), 2, len(points))
        apart = np.abs(ends[::2] - ends[1::2])[np.arange(len(step)), :, np.arange(len(step))]
        return ((errors[:, 0] - errors[:, 1]) / np.maximum(apart, 1e-300)).T

    def report(self, point: Array, samples: int) -> Attack:
        """The error at the point, f enclosed there if it is an expression."""
        net, error = self.run(point[None])[0], float(self.errors(point[None])[0])
        graph = self.target.graph
        if graph is None:
            return Attack(tuple(point.tolist()), error, None, None, "floats", self.bound, samples, self.claimed)
        if balls_at_hand():
            ends, arithmetic = np.array(value_in_balls(graph, point.tolist())), "ball arithmetic"
        else:
            enclosure = graph.enclose(point[None], point[None])
            ends, arithmetic = np.stack([enclosure.lo[0], enclosure.hi[0]], axis=1), "interval arithmetic"
        if not np.isfinite(net).all():
            return Attack(tuple(point.tolist()), np.inf, np.inf, np.inf, arithmetic, self.bound, samples, self.claimed)
        low = np.maximum(np.maximum(ends[:, 0] - net, net - ends[:, 1]), 0.0)
        high = np.maximum(np.abs(ends[:, 0] - net), np.abs(ends[:, 1] - net))
        lowest = float(np.nextafter(np.nextafter(low.max(), -1.0), -1.0)) if low.max() > 0 else 0.0
        highest = float(np.nextafter(high.max(), np.inf))
        return Attack(tuple(point.tolist()), error, lowest, highest, arithmetic, self.bound, samples, self.claimed)


def _errors_of(opponent: _Opponent, points: Array, _: Progress | None) -> Array:
    return opponent._errors(points)


def _run_head(head: Head, points: Array) -> Array:
    with torch.no_grad():
        return head.evaluate(torch.from_numpy(np.ascontiguousarray(points)).to(head.dtype)).double().numpy()


def _opponent_of(claim: Compiled, bound: float | None) -> _Opponent:
    certificate, head = claim.require_unchanged().certificate, claim.head
    if claim.target.is_table:
        raise UnsupportedError(
            f"{claim.target.label} is a table of samples: there is no function to compare with at other points",
            "Compare with rows that you have, abs(c(X) - y), or recheck the estimate: pa.recheck(c, function=table).",
        )
    if certificate.norm != "inf" and bound is None:
        raise UnsupportedError(
            f"the certificate bounds an L{certificate.norm} norm, which a single point cannot refute; "
            "give bound= to attack pointwise errors."
        )

    def torch_run(z: torch.Tensor) -> torch.Tensor:
        return head.evaluate(z.to(head.dtype)).double()

    limit = certificate.error if bound is None else float(bound)
    claimed = bound is not None or certificate.kind != "estimated"
    return _Opponent(claim.target, partial(_run_head, head), torch_run, claim.partition, limit, claimed)


def _differentiable(claim: Any) -> Callable[[torch.Tensor], torch.Tensor] | None:
    """A module of one argument as a function of flat points; others are climbed by differences."""
    if not isinstance(claim, nn.Module):
        return None
    dtype = next((p.dtype for p in claim.parameters()), torch.float64)
    return lambda z: claim(z.to(dtype)).double()


def _climb(opponent: _Opponent, start: Array, restarts: int, seed: int) -> Array:
    """Gradient ascent from `start` and from random points, each with its own step: longer after a gain, shorter after none."""
    domain = opponent.target.domain
    sides = domain.bounding_box().sides
    rng = np.random.default_rng(seed + 1)
    near = domain.clamp(start + 0.02 * sides * rng.standard_normal((restarts // 2, len(start))))
    points = np.concatenate([start[None], near, domain.sample(max(restarts - restarts // 2, 1), rng)])
    best, step = opponent.errors(points), np.full(len(points), _FIRST_STEP)
    for _ in range(_STEPS):
        uphill = opponent.slopes(points) * sides
        length = np.abs(np.hypot.reduce(uphill, axis=1, keepdims=True))  # squares may overflow
        trial = domain.clamp(points + step[:, None] * sides * uphill / np.maximum(length, 1e-300))
        errors = opponent.errors(trial)
        better = errors > best
        points, best = np.where(better[:, None], trial, points), np.where(better, errors, best)
        step = np.clip(np.where(better, 1.3 * step, 0.5 * step), _LAST_STEP, 1.0)
    out: Array = points[int(best.argmax())]
    return out
