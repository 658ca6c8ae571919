"""A target: the function to be approximated, its domain, and a checked way to evaluate it."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from partita.arithmetic.arguments import require_number
from partita.arithmetic.progress import Progress
from partita.errors import (
    DomainError,
    NonFiniteValueError,
    NotTraceableError,
    ShapeError,
    TargetFailedError,
    UnsupportedError,
)
from partita.functions.definedness import is_bounded, undefined_root
from partita.functions.expressions import parse, rounded_literals
from partita.functions.failures import Excluding
from partita.functions.graph import Graph
from partita.functions.probing import Asker, Calls, probe, require_finite
from partita.functions.regions import Domain, DomainLike, Region
from partita.functions.samples import Table
from partita.functions.sympy_trees import from_sympy, is_sympy
from partita.functions.tracing import TRACED_ROWS, compare, trace
from partita.geometry.domains import Array, Box, PointCloud, product
from partita.workers import crew

__all__ = [
    "Tail",
    "Target",
    "graph_target",
    "graph_values",
    "make_target",
    "require_boxes",
    "sample_hash",
    "variable_names",
]

_POINTS_AT_ONCE = 1 << 17
_BENT = frozenset(("abs", "max", "min", "relu", "clamp", "floor", "where"))
_SHORT = 60  # nodes, of formulas that are shown
_COMPARED, _COMPARED_IF_SLOW, _FEW = 10_000, 256, 7  # points at which a trace is compared with its function
_SLOW = 1e-3  # seconds for one point


@dataclass(frozen=True)
class Tail:
    """f is clipped to [−clip, clip], and what is cut off is small: `‖(|f| − clip)₊‖_p ≤ norm`, summed over outputs as the norm is.

    For functions without a bound, in a finite norm. The head approximates the clipped function; `norm` is added to its bound.

    Args:
        clip: M, finite, > 0.
        norm: τ, finite, ≥ 0, in the norm that `compile` is asked for.

    Raises:
        DomainError: a number is out of range.

    >>> import partita as pa
    >>> pa.Tail(clip=10.0, norm=1e-3).clip
    10.0
    """

    clip: float
    norm: float

    def __post_init__(self) -> None:
        for name, value in (("clip", self.clip), ("norm", self.norm)):
            object.__setattr__(self, name, require_number(f"Tail: {name}", value, zero=name == "norm"))

    def statement(self, norm: float) -> str:
        """The assumption in words.

        Args:
            norm: p.
        """
        return f"‖(|f| − {self.clip:.6g})₊‖_{norm:g} ≤ {self.norm:.6g}"


@dataclass(frozen=True, eq=False)
class Target:
    """f on a domain, evaluated on batches of flat points.

    Attributes:
        domains: one domain, or two boxes for `g(z_k, z_q)`.
        output_shape: `()`, `(out,)` or `(tokens, dim)`.
        graph: the expression graph of f, or None for a black box.
        ask: flat float64 points `(n, m)` to values `(n, out)`; None for a target read back from a file.
        label: the text that is shown for f.
        origin: where the graph comes from, or why there is none; empty for expressions.
        meaning: how the graph differs from what was written or coded, a sentence for certificates; empty where it does not.
        calls: how often the caller's function was evaluated, and how often it may be; for an expression never.
        is_table: whether this stands for a table of samples, which has values at its rows only.
        interpolated: whether this is a polynomial in place of a black box, for searching: it costs nothing to evaluate.
        tail: for a function without a bound, where it is clipped and the norm of what is cut off; then `graph` and `ask` are those
            of the clipped function, and `unclipped` is the graph of f. tail_declared: whether the caller vouches for it.
            tail_ratio: seen/declared in the attack on a declared tail; None if it was not attacked.
        excluding: the points at which f failed, if they are left out; None if a failure is an error.
        input_shapes: one shape per argument.
        num_outputs: scalar outputs.
        domain: the flat domain: the only one, or the product of both.
        box: the box around it.
        region: the domain, if it is a Region; None otherwise.
        volume: of the domain, rounded up; for a region at most that of the box.
        stated: the graph of f as it is claimed about, before clipping.
        is_bent: whether that graph has operations with kinks or jumps (abs, max, min, relu, clamp, floor, where).
        fills_box: whether f may be evaluated anywhere in the box: it is the domain, or f is an expression that is proved to be
            bounded there.
    """

    domains: tuple[Domain, ...]
    output_shape: tuple[int, ...]
    graph: Graph | None
    ask: Callable[[Array], Array] | None
    label: str
    origin: str = ""
    meaning: str = ""
    tail: Tail | None = None
    tail_declared: bool = False
    tail_ratio: float | None = None
    unclipped: Graph | None = None
    calls: Calls = field(default_factory=Calls)
    interpolated: bool = False
    is_table: bool = False
    excluding: Excluding | None = None
    input_shapes: tuple[tuple[int, ...], ...] = field(init=False)
    num_outputs: int = field(init=False)
    domain: Domain = field(init=False)
    box: Box = field(init=False)
    region: Region | None = field(init=False)
    volume: float = field(init=False)
    stated: Graph | None = field(init=False)
    is_bent: bool = field(init=False)

    def __post_init__(self) -> None:
        domain = self.domains[0] if len(self.domains) == 1 else product(*require_boxes(*self.domains))
        object.__setattr__(self, "input_shapes", tuple(d.shape for d in self.domains))
        object.__setattr__(self, "num_outputs", math.prod(self.output_shape))
        object.__setattr__(self, "domain", domain)
        object.__setattr__(self, "box", domain if isinstance(domain, Box) else domain.bounding_box())
        object.__setattr__(self, "region", domain if isinstance(domain, Region) else None)
        object.__setattr__(self, "volume", domain.volume if isinstance(domain, Region) else self.box.volume)
        stated = self.graph if self.unclipped is None else self.unclipped
        object.__setattr__(self, "stated", stated)
        object.__setattr__(
            self, "is_bent", stated is not None and not _BENT.isdisjoint(n.operation for n in stated.nodes)
        )

    def __repr__(self) -> str:
        return f"Target({self.label!r} on {' and '.join(str(d) for d in self.domains)})"

    @cached_property
    def fills_box(self) -> bool:
        return self.region is None or (self.graph is not None and is_bounded(self.graph, self.box))

    def for_workers(self) -> Target:
        """The same function for other processes: an expression without what belongs to this process."""
        return self if self.graph is None else replace(self, ask=graph_values(self.graph), calls=Calls())

    def look_again(self) -> None:
        """Compare what workers return now with their first answers, if they call a black box.

        Raises:
            NotDeterministicError: they differ.
        """
        ask = self.ask.ask if isinstance(self.ask, Excluding) else self.ask
        if isinstance(ask, Asker):
            ask.look_again()

    def answered(self) -> tuple[Array, Array]:
        """Points of the domain `(n, m)` at which a black box was evaluated before, and its values `(n, out)`."""
        if isinstance(self.ask, (Asker, Excluding)):
            return self.ask.answered()
        return np.zeros((0, self.box.dimension)), np.zeros((0, self.num_outputs))

    def __call__(self, points: Array) -> Array:
        """Values `(n, out)` at flat points `(n, m)`, finite or a NonFiniteValueError that says where."""
        if not len(points):
            return np.empty((0, self.num_outputs))
        if self.is_table:
            raise TargetFailedError(
                f"{self.label} is a table of samples: it has values at its rows only, so it cannot be evaluated elsewhere",
                "Compare with rows that you have: abs(c(X) - y).",
            )
        if self.ask is None:
            raise TargetFailedError(
                "this head was read from a file, which does not store the black-box function that it approximates: it cannot be "
                "evaluated. Give the function: c.with_function(f), or function=f."
            )
        cut = [points[i : i + _POINTS_AT_ONCE] for i in range(0, len(points), _POINTS_AT_ONCE)]
        if self.graph is not None and len(cut) > 1:  # the calls of a black box are spread by themselves
            parts = list(crew().spread(_values, self.graph, cut))
        else:
            parts = [self.ask(some) for some in cut]
        values = np.concatenate(parts) if len(parts) > 1 else parts[0]
        require_finite(values, points, self.label)
        return values

    def failed(self, points: Array) -> NDArray[np.bool_]:
        """At which of these points f was asked and failed, `(n,)`: its values there are stand-ins, to be compared with nothing."""
        return np.zeros(len(points), dtype=bool) if self.excluding is None else self.excluding.failed(points)


def require_boxes(first: Domain, second: Domain) -> tuple[Box, Box]:
    """The pair, if both are boxes; a DomainError otherwise."""
    if not (isinstance(first, Box) and isinstance(second, Box)):
        raise DomainError(f"cross-attention: found the domains {first!r} and {second!r}, expected two boxes.")
    return first, second


def make_target(
    function: Any,
    domain: DomainLike,
    *,
    vectorize: bool = False,
    trace: bool | None = None,
    calls: Calls | None = None,
    max_excluded: float | None = None,
) -> Target:
    """A target from an expression, a Graph, a sympy tree, or a torch or numpy function of a batch.

    Functions are called on a few points first: they must be vectorised over the batch, deterministic and finite, and must not write
    into their input. Torch functions and modules are traced and become graphs; those that cannot be traced, or return something
    else than their trace, are evaluated as black boxes. Functions under `torch.compile` are used as they were written.

    Args:
        function: what to approximate.
        domain: a Box, what `Box.of` reads as one, a PointCloud, a Region, or a pair of boxes (keys, queries).
        vectorize: whether the function takes single points; it is then called once per point.
        trace: True makes a function that cannot be traced an error, False traces nothing.
        calls: counts and limits the evaluations of the function.
        max_excluded: the share of the domain where a function may fail; such points are left out. None: a failure is an error.

    Raises:
        NotTraceableError: with `trace=True`, the reason why the function cannot be traced.
        TargetFailedError, NotVectorizedError, NotDeterministicError, NonFiniteValueError: the function cannot be used.
    """
    domains = _domains(domain)
    names, aliases = variable_names(domains)
    if max_excluded is not None and (isinstance(function, (str, Graph)) or is_sympy(function)):
        raise UnsupportedError(
            "on_error is 'exclude' for an expression, which is known at every point; expected a function",
            "Leave on_error out, and restrict the domain to where the expression is defined.",
        )
    if isinstance(function, str):
        graph, rounded = parse(function, names, aliases), rounded_literals(function, [*names, *aliases])
        meaning = f"in the expression, {', '.join(rounded)} mean{'s' * (len(rounded) == 1)} the nearest float64 number"
        return replace(graph_target(graph, domains, function), meaning=meaning if rounded else "")
    if isinstance(function, Graph):
        if function.num_inputs != len(names):
            raise ShapeError(
                f"the graph has {function.num_inputs} inputs and the domain {len(names)} coordinates; expected the same number."
            )
        return graph_target(function, domains, function.infix(names))
    if is_sympy(function):
        graph = from_sympy(function, names, aliases)
        return graph_target(graph, domains, _shown(graph, names, "sympy"))
    if isinstance(function, Table):
        raise UnsupportedError(
            f"found {function!r} where a function is expected: a table has values at its rows only",
            "Give a table to pa.compile, which fits a head to it.",
        )
    if not callable(function):
        raise TargetFailedError(
            f"the target is a {type(function).__name__}; expected an expression (text, a Graph, a sympy tree) or a function of a "
            "batch of points."
        )
    return _from_function(
        function, domains, calls or Calls(), vectorize=vectorize, trace_it=trace, max_excluded=max_excluded
    )


def _from_function(
    function: Callable[..., Any],
    domains: tuple[Domain, ...],
    calls: Calls,
    *,
    vectorize: bool,
    trace_it: bool | None,
    max_excluded: float | None,
) -> Target:
    function = _as_written(function)
    label = getattr(function, "__name__", type(function).__name__)
    asker, output_shape, excluding = probe(
        function, domains, label, calls, vectorize=vectorize, max_excluded=max_excluded
    )
    origin = f"{label} is evaluated as a black box (not traced)"
    if trace_it is not False:
        try:
            traced = _traced(function, asker, domains, label)
            if excluding is None or (traced.graph is not None and is_bounded(traced.graph, traced.box)):
                return traced
            raise NotTraceableError(f"the trace of {label} is not proved to be defined on the whole domain.")
        except NotTraceableError as error:
            if trace_it:
                raise
            origin = f"evaluated as a black box: {error}"
        except TargetFailedError:
            if excluding is None:
                raise
    return Target(domains, output_shape, None, excluding or asker, label, origin, calls=calls, excluding=excluding)


def _as_written(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function or module that `torch.compile` was given, which computes the same up to rounding."""
    for name in ("_orig_mod", "_torchdynamo_orig_callable"):
        written = getattr(function, name, None)
        if callable(written):
            return _as_written(written)
    return function


def _traced(function: Callable[..., Any], asker: Asker, domains: tuple[Domain, ...], label: str) -> Target:
    """The target whose graph is the trace of f, after both gave the same values in two batch sizes, corners included."""
    if asker.one_by_one:
        raise NotTraceableError(f"{label} cannot be traced: it is called once per point (vectorize=True).")
    dtype = torch.float32 if asker.kind == "torch float32" else torch.float64
    asker.calls.take(TRACED_ROWS)
    graph = trace(function, asker.shapes, dtype=dtype)
    rng = np.random.default_rng(1)
    slow = asker.calls.seconds > _SLOW * asker.calls.rows or asker.calls.left < 4 * _COMPARED
    points = np.column_stack([d.sample(_COMPARED_IF_SLOW if slow else _COMPARED, rng) for d in domains])
    if all(isinstance(d, Box) and d.dimension <= 12 for d in domains):
        points = np.concatenate([points, _corners(domains)])
    answers = asker(points)
    few = asker(points[-_FEW:])
    batches = ((points, answers), (points[-_FEW:], few))
    differ = next((d for z, a in batches if (d := compare(graph, a, z, dtype=dtype))), None)
    if differ is not None:
        raise NotTraceableError(f"{label} differs from its trace: {differ}.")
    shown = _shown(graph, variable_names(domains)[0], label)
    number = str(dtype).removeprefix("torch.")
    return replace(
        graph_target(graph, domains, shown),
        calls=asker.calls,
        origin=f"traced through torch: {len(graph.nodes):,} operations, compared with {label} at {len(points):,} points",
        meaning=f"f is what {label} computes in exact arithmetic: torch's own rounding in {number} is not part of it",
    )


def _shown(graph: Graph, names: list[str], label: str) -> str:
    """The formula if it is short, else the name."""
    if len(graph.nodes) > _SHORT:
        return label
    text = graph.infix(names)
    return text if len(text) <= 2 * _SHORT else label


def _corners(domains: tuple[Domain, ...]) -> Array:
    domain = domains[0] if len(domains) == 1 else product(*require_boxes(*domains))
    return domain.corners()


def graph_target(graph: Graph, domains: tuple[Domain, ...], label: str) -> Target:
    """A target whose function is known as a graph, shown as `label`."""
    target = Target(domains, graph.output_shape, graph, graph_values(graph), label)
    problem = "" if target.region is None else undefined_root(graph, target.region)
    if problem:
        raise NonFiniteValueError(
            f"{label}: {problem}; expected f to be defined wherever the constraints of the region hold. Add the constraint that "
            "the root needs, or shrink the region."
        )
    return target


def _values(graph: Graph, points: Array, _: Progress | None) -> Array:
    return _evaluate(graph, points)


def graph_values(graph: Graph) -> Callable[[Array], Array]:
    """The function `ask` of a target whose function is known as a graph."""
    return partial(_evaluate, graph)


def _evaluate(graph: Graph, points: Array) -> Array:
    return graph.evaluate(points).reshape(len(points), -1)


def _domains(domain: Any) -> tuple[Domain, ...]:
    if isinstance(domain, (Box, PointCloud, Region)):
        return (domain,)
    if isinstance(domain, tuple) and len(domain) == 2 and any(_is_whole(d) for d in domain):
        return require_boxes(*(d if isinstance(d, (PointCloud, Region)) else Box.of(d) for d in domain))
    if isinstance(domain, (str, list, tuple, np.ndarray)):
        return (Box.of(domain),)
    raise DomainError(
        f"the domain is {domain!r}; expected a Box, text such as '[-1,1]^2', a pair (lo, hi) for each axis, a PointCloud, a "
        "Region, or a pair of boxes (keys, queries)."
    )


def _is_whole(domain: Any) -> bool:
    """Whether one of a pair is a domain itself, and not an end of an interval or a pair (lo, hi)."""
    return isinstance(domain, (Box, PointCloud, Region)) or (isinstance(domain, str) and "[" in domain)


def variable_names(domains: tuple[Domain, ...]) -> tuple[list[str], dict[str, str]]:
    """x0, x1, … (also x, y, z up to three); for pairs k0, k1, …, q0, q1, …, also numbered through as x0, x1, …"""
    if len(domains) == 2:
        names = [f"k{i}" for i in range(domains[0].dimension)] + [f"q{i}" for i in range(domains[1].dimension)]
        return names, {f"x{i}": name for i, name in enumerate(names)}
    m = domains[0].dimension
    return [f"x{i}" for i in range(m)], {letter: f"x{i}" for i, letter in enumerate("xyz"[:m])} if m <= 3 else {}


def sample_hash(points: Array, values: Array) -> str:
    """sha256 of a black box's values at the centers: how a certificate identifies it."""
    return hashlib.sha256(np.ascontiguousarray(points).tobytes() + np.ascontiguousarray(values).tobytes()).hexdigest()
