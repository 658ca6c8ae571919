"""Calls a user's function: finds out which arrays it takes, and checks that its values can be relied on."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from partita.arithmetic.progress import Progress, report
from partita.errors import (
    EvaluationsSpentError,
    MutatedInputError,
    NonFiniteValueError,
    NotDeterministicError,
    NotVectorizedError,
    ShapeError,
    TargetFailedError,
)
from partita.functions.dropout import active_dropout
from partita.functions.regions import Domain
from partita.geometry.domains import Array

__all__ = ["Asker", "Calls", "probe", "probe_points", "require_finite", "split_flat"]

_PROBES = 11
_KEPT = 1 << 18  # answers
_AT_ONCE = 0.25  # seconds in f between two reports of progress
_TEST = 128  # evaluations that a test takes unless more are granted


def split_flat(points: Array, shapes: tuple[tuple[int, ...], ...]) -> list[Array]:
    """Flat points `(n, m)` as one array `(n, *shape)` per argument."""
    cuts = np.cumsum([math.prod(s) for s in shapes])[:-1]
    return [part.reshape(len(points), *s) for part, s in zip(np.split(points, cuts, axis=1), shapes)]


def require_finite(values: Array, points: Array, label: str) -> None:
    """A NonFiniteValueError that says where, if any value is not finite."""
    bad = np.flatnonzero(~np.isfinite(values).all(axis=1))
    if bad.size:
        shown = "; ".join(str(np.round(points[i], 6).tolist()) for i in bad[:3])
        raise NonFiniteValueError(
            f"{label} is NaN or infinite at {bad.size:,} of {len(points):,} points, the first at {shown}; "
            "expected finite values on the whole domain. Shrink the domain or fix the function there."
        )


@dataclass(eq=False)
class Calls:
    """How often the user's function was evaluated, and how often it may be.

    Attributes:
        rows: points that the function received, those of failed calls included.
        most: the largest number that the caller grants; infinite if nothing was said.
        reserved: of these, kept for the final check of the head.
        progress: called after every batch. seconds: spent in the function.
    """

    rows: int = 0
    most: float = math.inf
    reserved: int = 0
    progress: Progress | None = None
    seconds: float = 0.0

    @property
    def left(self) -> float:
        """Points that the function may still receive."""
        return max(self.most - self.reserved - self.rows, 0)

    def allowance(self, wanted: int) -> int:
        """How many points a test may use: a few, or up to `wanted` and a quarter of what is left if the caller set a limit."""
        return min(wanted, _TEST if math.isinf(self.most) else int(self.left // 4))

    def take(self, count: int) -> None:
        """Count points that the function is about to receive.

        Raises:
            EvaluationsSpentError: they are more than are left.
        """
        if count > self.left:
            raise EvaluationsSpentError(
                f"f was evaluated {self.rows:,} times, and {count:,} more exceed the {self.most:,.0f} of max_evaluations"
            )
        self.rows += count


class Asker:
    """Calls the user's function with arrays of one kind and returns `(n, out)` float64. Every answer is kept."""

    def __init__(
        self, function: Callable[..., Any], shapes: tuple[tuple[int, ...], ...], kind: str, label: str, calls: Calls
    ) -> None:
        self.function, self.shapes, self.kind, self.label, self.one_by_one = function, shapes, kind, label, False
        self.calls = calls
        self._answers: dict[bytes, Array] = {}

    def raw(self, points: Array) -> np.ndarray:
        """The function's answer as an array whose first axis is the batch; its input must stay unchanged."""
        number = np.float32 if self.kind == "torch float32" else np.float64
        inputs = [part.astype(number) for part in split_flat(points, self.shapes)]
        given = [a.copy() if self.kind == "numpy" else torch.from_numpy(a.copy()) for a in inputs]
        self.calls.take(len(points))
        start = time.perf_counter()
        with torch.no_grad():
            answer = self.function(*given)
        self.calls.seconds += time.perf_counter() - start
        if any(not np.array_equal(np.asarray(g), a, equal_nan=True) for g, a in zip(given, inputs)):
            raise MutatedInputError(f"{self.label} writes into its input; work on a copy: z = z.clone() or z.copy().")
        array = answer.detach().cpu().numpy() if isinstance(answer, torch.Tensor) else np.asarray(answer)
        if array.dtype.kind not in "fiub":
            raise TargetFailedError(f"{self.label} returned {array.dtype} values; expected real numbers.")
        return array.astype(np.float64)

    def __call__(self, points: Array) -> Array:
        """Values `(n, out)` at flat points `(n, m)`: those that were asked for before come from memory."""
        points = np.ascontiguousarray(points, dtype=np.float64)
        keys = [row.tobytes() for row in points]
        new = {k: i for i, k in enumerate(keys) if k not in self._answers}
        if len(new) == len(points):
            answers = self._in_batches(points)
        elif new:
            asked = dict(zip(new, self._in_batches(points[list(new.values())])))
            answers = np.stack([asked[k] if k in asked else self._answers[k] for k in keys])
        else:
            answers = np.stack([self._answers[k] for k in keys])
        return answers

    def remember(self, points: Array, answers: Array) -> None:
        """Keep values `(n, out)` of f at points `(n, m)`."""
        if len(self._answers) < _KEPT:
            self._answers |= {row.tobytes(): answer for row, answer in zip(points, answers)}

    def answered(self) -> tuple[Array, Array]:
        """All points `(n, m)` that are remembered, and their values `(n, out)`."""
        points = [np.frombuffer(k) for k in self._answers]
        return np.stack(points), np.stack(list(self._answers.values()))

    def _in_batches(self, points: Array) -> Array:
        """f at all points; if f is slow, in batches of a fraction of a second, so that progress is seen and budgets are kept."""
        speed = self.calls.rows / max(self.calls.seconds, 1e-9)
        step = max(1, int(_AT_ONCE * speed))
        parts = []
        for start in range(0, len(points), step):
            some = points[start : start + step]
            parts.append(self.fresh(some))
            self.remember(some, parts[-1])
            report(self.calls.progress, f"{self.calls.rows:,} evaluations of f")
        return np.concatenate(parts) if len(parts) > 1 else parts[0]

    def fresh(self, points: Array) -> Array:
        """f at the points, whether it was evaluated there before or not."""
        try:
            answer = self.raw(points)
        except (MutatedInputError, EvaluationsSpentError):
            raise
        except Exception as error:
            raise TargetFailedError(
                f"{self.label} raised {type(error).__name__} on a batch of {len(points)}: {error}"
            ) from error
        if answer.shape[:1] != (len(points),):
            raise NotVectorizedError(f"{self.label} returned shape {answer.shape} for a batch of {len(points)} points.")
        return answer.reshape(len(points), -1)


def _one_by_one(function: Callable[..., Any]) -> Callable[..., Any]:
    def batched(*inputs: Any) -> np.ndarray:
        rows = [function(*(z[i] for z in inputs)) for i in range(len(inputs[0]))]
        return np.stack(
            [r.detach().numpy() if isinstance(r, torch.Tensor) else np.asarray(r, dtype=float) for r in rows]
        )

    return batched


def probe_points(domains: tuple[Domain, ...]) -> Array:
    """The first points at which a function is evaluated, `(n, m)`: its values there identify it."""
    rng = np.random.default_rng(0)
    return np.column_stack([d.sample(_PROBES, rng) for d in domains])


def probe(
    function: Callable[..., Any], domains: tuple[Domain, ...], label: str, calls: Calls, *, vectorize: bool
) -> tuple[Asker, tuple[int, ...]]:
    """A way to call the function, checked on a few points, and the shape of its values."""
    shapes = tuple(d.shape for d in domains)
    call = _one_by_one(function) if vectorize else function
    points = probe_points(domains)
    asker, answer = _choose_kind(call, shapes, label, points, calls, torch_only=isinstance(function, nn.Module))
    if answer.shape[:1] != (_PROBES,):
        raise NotVectorizedError(
            f"{label} returned shape {answer.shape} for a batch of {_PROBES} points of shape {shapes}; expected ({_PROBES}, …): "
            "one value per row. For a function of a single point pass vectorize=True."
        )
    if answer.ndim > 3 or answer.size == 0:
        raise ShapeError(
            f"{label} returns values of shape {answer.shape[1:]}; expected a scalar, a vector or (tokens, dim)."
        )
    asker.one_by_one = vectorize
    _check_repeatable(asker, points, answer.reshape(_PROBES, -1))
    return asker, answer.shape[1:]


def _choose_kind(
    function: Callable[..., Any],
    shapes: tuple[tuple[int, ...], ...],
    label: str,
    points: Array,
    calls: Calls,
    *,
    torch_only: bool,
) -> tuple[Asker, np.ndarray]:
    """Numpy arrays if the function takes them, else torch tensors; refused when it takes both and they disagree."""
    answers: dict[str, tuple[Asker, np.ndarray]] = {}
    failures: dict[str, Exception] = {}
    for kind in ("numpy", "torch", "torch float32"):  # float32 only for modules with float32 weights
        if (torch_only and kind == "numpy") or (kind == "torch float32" and answers):
            continue
        asker = Asker(function, shapes, kind, label, calls)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                answers[kind] = (asker, asker.raw(points))
        except (MutatedInputError, EvaluationsSpentError):
            raise
        except Exception as error:
            failures[kind] = error
    if not answers:
        reasons = "; ".join(f"with {kind} arrays: {type(e).__name__}: {e}" for kind, e in failures.items())
        message = f"{label} raised on a batch of {len(points)} points of shape {shapes}: {reasons}"
        if _takes_single_points(function, shapes, points[0]):
            raise NotVectorizedError(
                f"{message}. It does take a single point: pass vectorize=True, or write it for a batch."
            )
        raise TargetFailedError(message) from failures["torch"]
    if len(answers) == 2:
        (asker, first), (_, second) = answers["numpy"], answers["torch"]
        fits = [a.shape[:1] == (len(points),) for a in (first, second)]
        if fits != [True, True]:  # z.max(1) means something else in torch: use the kind that keeps the batch
            return answers["torch"] if fits[1] else answers["numpy"]
        scale = 1e-9 * np.abs(first[np.isfinite(first)]).max(initial=0)
        same = first.shape == second.shape and np.allclose(first, second, rtol=1e-6, atol=scale, equal_nan=True)
        if not same and np.array_equal(
            first, asker.raw(points), equal_nan=True
        ):  # else it is random, which another check reports
            raise TargetFailedError(
                f"{label} returns different values for numpy arrays and torch tensors; convert its input first: "
                "z = np.asarray(z), or z = torch.as_tensor(z)."
            )
    return next(iter(answers.values()))


def _takes_single_points(function: Callable[..., Any], shapes: tuple[tuple[int, ...], ...], point: Array) -> bool:
    try:
        answer = function(*(part[0] for part in split_flat(point[None], shapes)))
        return bool(np.isfinite(np.asarray(answer, dtype=float)).all())
    except Exception:
        return False


def _check_repeatable(ask: Asker, points: Array, answer: Array) -> None:
    again = ask.fresh(points)
    require_finite(answer, points, ask.label)
    if not np.array_equal(answer, again):
        i = int(np.abs(answer - again).max(axis=1).argmax())
        raise NotDeterministicError(
            f"{ask.label} gave {answer[i].tolist()} and then {again[i].tolist()} at {points[i].tolist()}; "
            "expected the same value twice. "
            + (
                f"Dropout is on in {dropout}: call .eval() first."
                if (dropout := active_dropout(ask.function))
                else "Fix its random seed inside, average the noise out, or call .eval() on a module."
            )
        )
    single = np.concatenate([ask.fresh(points[i : i + 1]) for i in (0, 7)] + [ask.fresh(points[3:6])])
    batch = answer[[0, 7, 3, 4, 5]]
    scale = 1e-6 * np.abs(answer).max()
    if not np.allclose(single, batch, rtol=1e-6, atol=scale):
        i = int(np.abs(single - batch).max(axis=1).argmax())
        raise NotVectorizedError(
            f"{ask.label} gives {batch[i].tolist()} inside a batch of {_PROBES} and {single[i].tolist()} on "
            f"its own, at the same point; "
            "rows must not depend on each other (use dim=1, not dim=None, in reductions), or pass vectorize=True."
        )
    ask.remember(points, answer)
