"""A target: the function to be approximated, its domain, and a way to ask it that has been checked."""

from __future__ import annotations

import hashlib
import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn

from partita.errors import (
    DomainError,
    MutatedInputError,
    NonFiniteValueError,
    NotDeterministicError,
    NotVectorizedError,
    ShapeError,
    TargetFailedError,
)
from partita.geometry.domains import Array, Box, Domain, PointCloud, product
from partita.targets.expressions import parse
from partita.targets.graph import Graph

__all__ = ["Target", "graph_target", "make_target", "require_boxes", "sample_hash", "split_flat", "variable_names"]

_POINTS_AT_ONCE = 1 << 17
_PROBES = 17


@dataclass(frozen=True, eq=False)
class Target:
    """f on a domain, asked for batches of flat points.

    Attributes:
        domains: one domain, or two boxes for `g(z_k, z_q)`.
        output_shape: `()`, `(out,)` or `(tokens, dim)`.
        graph: the intermediate representation if f is known as an expression, else None.
        ask: flat float64 points `(n, m)` to values `(n, out)`; None for a target read back from a file.
        label: how f is shown to people.
    """

    domains: tuple[Domain, ...]
    output_shape: tuple[int, ...]
    graph: Graph | None
    ask: Callable[[Array], Array] | None
    label: str

    @property
    def input_shapes(self) -> tuple[tuple[int, ...], ...]:
        return tuple(d.shape for d in self.domains)

    @property
    def domain(self) -> Domain:
        """The flat domain: the only one, or the product of both."""
        if len(self.domains) == 1:
            return self.domains[0]
        return product(*require_boxes(*self.domains))

    @property
    def num_outputs(self) -> int:
        return math.prod(self.output_shape)

    def __call__(self, points: Array) -> Array:
        """Values `(n, out)` at flat points `(n, m)`, finite or a NonFiniteValueError that says where."""
        if not len(points):
            return np.empty((0, self.num_outputs))
        if self.ask is None:
            raise TargetFailedError(
                "this head was read from a file; the black-box function it approximates was not stored with it."
            )
        parts = [self.ask(points[i : i + _POINTS_AT_ONCE]) for i in range(0, max(len(points), 1), _POINTS_AT_ONCE)]
        values = np.concatenate(parts) if len(parts) > 1 else parts[0]
        _require_finite(values, points, self.label)
        return values


def require_boxes(first: Domain, second: Domain) -> tuple[Box, Box]:
    """The pair, if both are boxes; a DomainError otherwise."""
    if not (isinstance(first, Box) and isinstance(second, Box)):
        raise DomainError(f"cross-attention is built over a pair of boxes, found {first!r} and {second!r}.")
    return first, second


def _require_finite(values: Array, points: Array, label: str) -> None:
    bad = np.flatnonzero(~np.isfinite(values).all(axis=1))
    if bad.size:
        shown = "; ".join(str(np.round(points[i], 6).tolist()) for i in bad[:3])
        raise NonFiniteValueError(
            f"{label} is NaN or infinite at {bad.size:,} of {len(points):,} points asked, the first at {shown}; "
            "expected finite values on the whole domain. Shrink the domain or mend the function there."
        )


def make_target(function: Any, domain: Domain | tuple[Box, Box], *, vectorize: bool = False) -> Target:
    """A target from an expression, a Graph, or a torch or numpy function of a batch.

    Functions are probed: they must be vectorised over the batch, deterministic, finite, and must leave their input alone.
    With `vectorize=True` a function of single points is called once per point instead.
    """
    domains = _domains(domain)
    names, aliases = variable_names(domains)
    if isinstance(function, str):
        graph = parse(function, names, aliases)
        return graph_target(graph, domains, function)
    if isinstance(function, Graph):
        if function.num_inputs != len(names):
            raise ShapeError(f"the graph has {function.num_inputs} inputs and the domain {len(names)} coordinates.")
        return graph_target(function, domains, function.infix(names))
    if not callable(function):
        raise TargetFailedError(
            f"the target is a {type(function).__name__}; expected an expression or a function of a batch."
        )
    return _probed(function, domains, vectorize)


def graph_target(graph: Graph, domains: tuple[Domain, ...], label: str) -> Target:
    """A target whose function is known as a graph, shown as `label`."""
    return Target(domains, graph.output_shape, graph, partial(_evaluate, graph), label)


def _evaluate(graph: Graph, points: Array) -> Array:
    return graph.evaluate(points).reshape(len(points), -1)


def _domains(domain: Any) -> tuple[Domain, ...]:
    if isinstance(domain, (Box, PointCloud)):
        return (domain,)
    if isinstance(domain, tuple) and len(domain) == 2:
        return require_boxes(*domain)
    raise DomainError(f"the domain is {domain!r}; expected a Box, a PointCloud, or a pair of boxes (keys, queries).")


def variable_names(domains: tuple[Domain, ...]) -> tuple[list[str], dict[str, str]]:
    """x0, x1, … (also x, y, z up to three); for pairs k0, k1, …, q0, q1, …, also numbered through as x0, x1, …"""
    if len(domains) == 2:
        names = [f"k{i}" for i in range(domains[0].dimension)] + [f"q{i}" for i in range(domains[1].dimension)]
        return names, {f"x{i}": name for i, name in enumerate(names)}
    m = domains[0].dimension
    return [f"x{i}" for i in range(m)], {letter: f"x{i}" for i, letter in enumerate("xyz"[:m])} if m <= 3 else {}


def split_flat(points: Array, shapes: tuple[tuple[int, ...], ...]) -> list[Array]:
    """Flat points `(n, m)` as one array `(n, *shape)` per argument."""
    cuts = np.cumsum([math.prod(s) for s in shapes])[:-1]
    return [part.reshape(len(points), *s) for part, s in zip(np.split(points, cuts, axis=1), shapes)]


class _Asker:
    """Calls the user's function with arrays of one kind and returns `(n, out)` float64."""

    def __init__(
        self, function: Callable[..., Any], shapes: tuple[tuple[int, ...], ...], kind: str, label: str
    ) -> None:
        self.function, self.shapes, self.kind, self.label = function, shapes, kind, label

    def raw(self, points: Array) -> np.ndarray:
        """The function's answer as an array whose first axis is the batch; its input checked for being left alone."""
        number = np.float32 if self.kind == "torch float32" else np.float64
        inputs = [part.astype(number) for part in split_flat(points, self.shapes)]
        given = [a.copy() if self.kind == "numpy" else torch.from_numpy(a.copy()) for a in inputs]
        with torch.no_grad():
            answer = self.function(*given)
        if any(not np.array_equal(np.asarray(g), a, equal_nan=True) for g, a in zip(given, inputs)):
            raise MutatedInputError(
                f"{self.label} writes into the array it is given; work on a copy: z = z.clone() or z.copy()."
            )
        array = answer.detach().cpu().numpy() if isinstance(answer, torch.Tensor) else np.asarray(answer)
        if array.dtype.kind not in "fiub":
            raise TargetFailedError(f"{self.label} returned {array.dtype} values; expected real numbers.")
        return array.astype(np.float64)

    def __call__(self, points: Array) -> Array:
        try:
            answer = self.raw(points)
        except MutatedInputError:
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


def _probed(function: Callable[..., Any], domains: tuple[Domain, ...], vectorize: bool) -> Target:
    label = getattr(function, "__name__", type(function).__name__)
    call = _one_by_one(function) if vectorize else function
    shapes = tuple(d.shape for d in domains)
    rng = np.random.default_rng(0)
    points = np.column_stack([d.sample(_PROBES, rng) for d in domains])
    asker, answer = _choose_kind(call, shapes, label, points, torch_only=isinstance(function, nn.Module))
    if answer.shape[:1] != (_PROBES,):
        raise NotVectorizedError(
            f"{label} returned shape {answer.shape} for a batch of {_PROBES} points of shape {shapes}; expected ({_PROBES}, …): "
            "one value per row. For a function of a single point pass vectorize=True."
        )
    if answer.ndim > 3 or answer.size == 0:
        raise ShapeError(
            f"{label} returns values of shape {answer.shape[1:]}; expected a scalar, a vector or (tokens, dim)."
        )
    target = Target(domains, answer.shape[1:], None, asker, label)
    _check_repeatable(target, points, answer.reshape(_PROBES, -1))
    return target


def _choose_kind(
    function: Callable[..., Any], shapes: tuple[tuple[int, ...], ...], label: str, points: Array, *, torch_only: bool
) -> tuple[_Asker, np.ndarray]:
    """Numpy arrays if the function takes them, else torch tensors; refused when it takes both and they disagree."""
    answers: dict[str, tuple[_Asker, np.ndarray]] = {}
    failures: dict[str, Exception] = {}
    for kind in ("numpy", "torch", "torch float32"):  # float32 for modules whose weights are, when nothing else will do
        if (torch_only and kind == "numpy") or (kind == "torch float32" and answers):
            continue
        asker = _Asker(function, shapes, kind, label)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                answers[kind] = (asker, asker.raw(points))
        except MutatedInputError:
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
        if fits != [True, True]:  # z.max(1), say, means something else to torch: the kind that keeps the batch is meant
            return answers["torch"] if fits[1] else answers["numpy"]
        scale = 1e-9 * np.abs(first[np.isfinite(first)]).max(initial=0)
        same = first.shape == second.shape and np.allclose(first, second, rtol=1e-6, atol=scale, equal_nan=True)
        if not same and np.array_equal(first, asker.raw(points), equal_nan=True):  # else it is random: said elsewhere
            raise TargetFailedError(
                f"{label} answers differently for numpy arrays and torch tensors; say which it means inside: "
                "z = np.asarray(z), or z = torch.as_tensor(z)."
            )
    return next(iter(answers.values()))


def _takes_single_points(function: Callable[..., Any], shapes: tuple[tuple[int, ...], ...], point: Array) -> bool:
    try:
        answer = function(*(part[0] for part in split_flat(point[None], shapes)))
        return np.isfinite(np.asarray(answer, dtype=float)).all().item()
    except Exception:
        return False


def _check_repeatable(target: Target, points: Array, answer: Array) -> None:
    again = target(points)
    _require_finite(answer, points, target.label)
    if not np.array_equal(answer, again):
        i = int(np.abs(answer - again).max(axis=1).argmax())
        raise NotDeterministicError(
            f"{target.label} gave {answer[i].tolist()} and then {again[i].tolist()} at {points[i].tolist()}; "
            "expected one answer. Fix its random seed inside, or average the noise out first."
        )
    single = np.concatenate([target(points[i : i + 1]) for i in (0, 7)] + [target(points[3:6])])
    batch = answer[[0, 7, 3, 4, 5]]
    scale = 1e-6 * np.abs(answer).max()
    if not np.allclose(single, batch, rtol=1e-6, atol=scale):
        i = int(np.abs(single - batch).max(axis=1).argmax())
        raise NotVectorizedError(
            f"{target.label} gives {batch[i].tolist()} inside a batch of {_PROBES} and {single[i].tolist()} on "
            f"its own, at the same point; "
            "rows must not see each other (use dim=1, not dim=None, in reductions), or pass vectorize=True."
        )


def sample_hash(points: Array, values: Array) -> str:
    """sha256 of what a black box answered at the centers: what the certificate knows it by."""
    return hashlib.sha256(np.ascontiguousarray(points).tobytes() + np.ascontiguousarray(values).tobytes()).hexdigest()
