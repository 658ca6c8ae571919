"""Losses for gradient descent in context: how the network computes `∂ℓ/∂s`, and bounds on its derivative."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, replace

import numpy as np

from partita.arithmetic.interval import Interval
from partita.arithmetic.precision import Precision
from partita.errors import ExpressionError, NotContinuousError, SizeError
from partita.functions.differentiate import derivative
from partita.functions.expressions import parse
from partita.functions.graph import Graph, GraphBuilder
from partita.geometry.domains import Array, Box
from partita.networks.tables import Table, TableGrid, tabulate
from partita.proofs.certificate import Assumption

__all__ = ["LossSlope", "loss_slope", "squared_slope"]

_SMOOTH_TOLERANCE = {1: 1e-7, 2: 1e-5}  # of the largest slope
_KEYS_AT_KINKS = 1024
_PIECES = {1: 8192, 2: 256}


@dataclass(frozen=True, eq=False)
class LossSlope:
    """`r = ∂ℓ/∂s` at (s, y), as `Σ_k softmax_k(slopes_k·(s, y) + offsets_k)·values_k + direct·(s, y)`, within `error` on the box.

    Attributes:
        graph: r as a function of (s, y), or of s − y.
        slopes: `(keys, 2)`.
        offsets, values: `(keys,)`.
        direct: `(2,)`. Without keys the slope is affine and exact.
        curvature: [m, M] encloses ∂²ℓ/∂s².
        largest: sup |r|.
        grid: the grid of the keys; None without keys.
    """

    name: str
    graph: Graph
    slopes: Array
    offsets: Array
    values: Array
    direct: Array
    error: float
    curvature: tuple[float, float]
    largest: float
    grid: TableGrid | None = None

    @property
    def keys(self) -> int:
        return len(self.values)

    @property
    def variables(self) -> tuple[str, ...]:
        """The names of the graph's inputs."""
        return ("s", "y") if self.graph.num_inputs == 2 else ("r",)

    @property
    def assumptions(self) -> tuple[Assumption, ...]:
        """What the caller vouches for: that a slope with branches does not jump. Other operations are continuous."""
        if not any(node.operation in ("where", "floor") for node in self.graph.nodes):
            return ()
        said = f"the loss {self.name} is continuously differentiable in s"
        return (Assumption(said, "caller", attack="enclosures of the slope on shrinking boxes", about="regularity"),)

    def stored(self, precision: Precision) -> LossSlope:
        """The slope with the numbers that tensors of this precision hold."""
        return replace(
            self,
            slopes=precision.rounded(self.slopes),
            offsets=precision.rounded(self.offsets),
            values=precision.rounded(self.values),
            direct=precision.rounded(self.direct),
        )

    def exact(self, s: Array, y: Array) -> Array:
        """r in float64, elementwise: what the network is compared with."""
        points = np.stack([s.ravel(), y.ravel()], axis=1)
        columns = points if self.graph.num_inputs == 2 else points[:, :1] - points[:, 1:]
        return self.graph.evaluate(columns).reshape(s.shape)


def squared_slope(s: Interval, y: Interval) -> LossSlope:
    """`ℓ = (s − y)²/2`, r = s − y: affine, no keys."""
    none = np.zeros(0)
    return LossSlope(
        name="squared",
        graph=parse("s - y", ["s", "y"]),
        slopes=np.zeros((0, 2)),
        offsets=none,
        values=none,
        direct=np.array([1.0, -1.0]),
        error=0.0,
        curvature=(1.0, 1.0),
        largest=float((s - y).magnitude.max()),
    )


def _logistic_slope(s: Interval, y: Interval) -> LossSlope:
    """`ℓ = log(1 + e^s) − ys`, y in [0, 1], r = sigmoid(s) − y: two keys, exact."""
    return LossSlope(
        name="logistic",
        graph=parse("sigmoid(s) - y", ["s", "y"]),
        slopes=np.array([[0.0, 0.0], [1.0, 0.0]]),
        offsets=np.zeros(2),
        values=np.array([0.0, 1.0]),
        direct=np.array([0.0, -1.0]),
        error=0.0,
        curvature=(0.0, 0.25),
        largest=float((s.sigmoid() - y).magnitude.max()),
        grid=TableGrid((2, 1), (1.0, 1.0), (-0.5, 0.0)),
    )


def loss_slope(loss: str, s: Interval, y: Interval, tolerance: float | None) -> LossSlope:
    """The slope of a named loss, or of an expression in (s, y) or in the residual r = s − y, tabulated over s and y.

    Args:
        loss: "squared", "logistic", or an expression, say "log(cosh(r))" or "sqrt(1 + (s - y)^2)".
        tolerance: of the table; if not given, 1e-7 of the largest slope for a smooth one in r and 1e-5 in (s, y), and what a
            thousand keys give at kinks.

    Raises:
        NotContinuousError: the slope jumps: ℓ is not C¹.
        ExpressionError: the loss is not a valid expression.
    """
    if loss == "squared":
        return squared_slope(s, y)
    if loss == "logistic":
        return _logistic_slope(s, y)
    graph = _of_residual(loss)
    residual = graph is not None
    graph = graph if graph is not None else parse(loss, ["s", "y"])
    r = s - y
    ends = [(r.lo, r.hi)] if residual else [(s.lo, s.hi), (y.lo, y.hi)]
    box = Box([float(lo) for lo, _ in ends], [float(hi) for _, hi in ends])
    return _tabulated(loss, graph, box, residual, tolerance)


def _of_residual(loss: str) -> Graph | None:
    """The loss as a function of r alone, if it is written so, or if s and y occur in s − y and y − s only."""
    try:
        return parse(loss, ["r"])
    except ExpressionError:
        graph = parse(loss, ["s", "y"])
    inputs = {k for k, node in enumerate(graph.nodes) if node.operation == "input"}
    builder = GraphBuilder(1)
    r, copies = builder.add("input", parameters=(0,)), {}
    for k, node in enumerate(graph.nodes):
        if k in inputs:
            continue
        if inputs.intersection(node.arguments):
            which = [graph.nodes[a].parameters[0] if a in inputs else None for a in node.arguments]
            if node.operation != "sub" or sorted(map(str, which)) != ["0", "1"]:
                return None
            copies[k] = r if which == [0, 1] else builder.add("neg", r)
        else:
            copies[k] = builder.add(node.operation, *(copies[a] for a in node.arguments), parameters=node.parameters)
    return (
        builder.finish([copies[graph.outputs[0]]], ())
        if graph.outputs[0] in copies and len(graph.outputs) == 1
        else None
    )


def _tabulated(loss: str, graph: Graph, box: Box, residual: bool, tolerance: float | None) -> LossSlope:
    slope = derivative(graph, 0)
    bends = [derivative(slope, i) for i in range(graph.num_inputs)]
    values, second = _pieces(slope, box), [_pieces(b, box) for b in bends]
    steep = tuple(float(b.magnitude.max()) for b in second)
    explained = sum(b.magnitude * (side / _PIECES[box.dimension]) for b, side in zip(second, box.sides))
    _require_continuous(loss, slope, values, box, steep, np.asarray(explained))
    curvature = float(second[0].lo.min()), float(second[0].hi.max())
    largest = float(values.magnitude.max())
    table = _table(slope, box, tolerance, steep, largest)
    across = -table.slopes[:, 0] if residual else table.slopes[:, 1]
    return LossSlope(
        name=loss,
        graph=slope,
        slopes=np.stack([table.slopes[:, 0], across], axis=1),
        offsets=table.offsets,
        values=table.values,
        direct=np.zeros(2),
        error=table.error,
        curvature=curvature,
        largest=largest,
        grid=table.grid,
    )


def _table(slope: Graph, box: Box, tolerance: float | None, steep: tuple[float, ...], largest: float) -> Table:
    if tolerance is not None:
        return tabulate(slope, box, tolerance, lipschitz=steep)
    with suppress(SizeError):  # raised at kinks
        return tabulate(slope, box, _SMOOTH_TOLERANCE[box.dimension] * (largest or 1.0), lipschitz=steep)
    variation = float(np.prod([c * w for c, w in zip(steep, box.sides)])) ** (1 / box.dimension)
    allowed = 0.6 * box.dimension * variation / _KEYS_AT_KINKS ** (1 / box.dimension)
    best = tabulate(slope, box, allowed, lipschitz=steep)
    for _ in range(8):
        with suppress(SizeError):
            finer = tabulate(slope, box, best.error / 3, lipschitz=steep)
            if len(finer.values) <= _KEYS_AT_KINKS:
                best = finer
                continue
        break
    return best


def _pieces(graph: Graph, box: Box) -> Interval:
    """Enclosures of a scalar graph over the cells of a fine grid of the box."""
    count = _PIECES[box.dimension]
    edges = [np.linspace(a, b, count + 1) for a, b in zip(box.lo, box.hi)]
    lo = np.stack([a.ravel() for a in np.meshgrid(*(e[:-1] for e in edges), indexing="ij")], axis=1)
    hi = np.stack([a.ravel() for a in np.meshgrid(*(e[1:] for e in edges), indexing="ij")], axis=1)
    found = graph.enclose(lo, hi)[:, 0]
    if not np.isfinite(found.magnitude).all():
        i = int(np.flatnonzero(~np.isfinite(found.magnitude))[0])
        raise NotContinuousError(
            f"a derivative of the loss, {graph.infix()[:120]}, has no finite bound near {lo[i].tolist()}; "
            "gradient descent in context needs a loss whose slope is Lipschitz on the declared boxes."
        )
    return found


def _require_continuous(
    loss: str, slope: Graph, values: Interval, box: Box, steep: tuple[float, ...], explained: Array
) -> None:
    """A jump shows as an enclosure that stays wide however small the box: the pieces that exceed most what the second derivative
    explains are halved a few times.
    """
    count = _PIECES[box.dimension]
    widest = np.argsort(explained - (values.hi - values.lo))[:64]
    index = np.stack(np.unravel_index(widest, (count,) * box.dimension), axis=1)
    step = box.sides / count
    lo, hi = box.lo.ravel() + index * step, box.lo.ravel() + (index + 1) * step
    scale = max(float(values.magnitude.max()), 1e-300)
    for _ in range(30 * box.dimension):
        axis = int(np.argmax((hi - lo).max(axis=0) / box.sides))
        middle = (lo[:, axis] + hi[:, axis]) / 2
        lower, upper = hi.copy(), lo.copy()
        lower[:, axis], upper[:, axis] = middle, middle
        lo, hi = np.concatenate([lo, upper]), np.concatenate([lower, hi])
        found = slope.enclose(lo, hi)[:, 0]
        width = found.hi - found.lo
        keep = np.argsort(-width)[:64]
        lo, hi, width = lo[keep], hi[keep], width[keep]
    allowed = 4 * sum(c * float(d) for c, d in zip(steep, (hi - lo).max(axis=0))) + 1e-6 * scale
    if width[0] > allowed:
        raise NotContinuousError(
            f"the loss {loss} could not be shown to be continuously differentiable in s: near {lo[0].tolist()} "
            f"its slope may jump by "
            f"{width[0]:.3g}. Smooth the corner, or write branches whose slopes meet, as in where(abs(r) - 1, "
            f"abs(r) - 0.5, 0.5*r^2)."
        )
