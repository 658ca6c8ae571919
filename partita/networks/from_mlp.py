"""A feed-forward network as a network of heads: every activation becomes a small head, layer by layer, with a proved bound."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from partita.arithmetic.arguments import require_dtype
from partita.arithmetic.precision import Precision
from partita.arithmetic.rounding import up
from partita.errors import DomainError, OutsideDomainError, PartitaError, ShapeError, ToleranceError
from partita.functions.graph import Graph, GraphBuilder
from partita.functions.ranges import enclose_each
from partita.functions.target import Target, graph_target
from partita.geometry.domains import Array, Box, BoxLike
from partita.heads.head import FoldedHead, flatten_inputs
from partita.heads.network import AttentionNetwork, exact_values
from partita.heads.wiring import Affine, Group, Wiring
from partita.kernels.guards import certified
from partita.kernels.trace_modes import is_traced
from partita.methods.fitted import Fitted
from partita.methods.lines import Lines
from partita.methods.pieces import Pieces
from partita.methods.planner import best_plan, constructed
from partita.methods.request import Request
from partita.methods.two_keys import TwoKeys
from partita.networks.chains import Activation, Stage, read_chain
from partita.proofs.carried_errors import Carried, LocalError, propagate
from partita.proofs.certificate import Certificate, Term
from partita.proofs.claim import Construction, claim
from partita.proofs.form_rounding import line_rounding
from partita.proofs.local_errors import local_error
from partita.proofs.network_proof import NetworkProof, Part
from partita.proofs.proof import Given

__all__ = ["ConvertedNetwork", "activation_graph", "attention_from_mlp"]

# shares of the tolerance that are tried for the heads, rounding gets the rest; and the least gain that a head is taken to have
_TRIALS = ((0.3, 1.0), (0.9, 1.0), (0.5, 0.0), (0.2, 1.0), (0.2, 0.0))
_MARGIN = 2.0  # times the errors planned for: how far the boxes of heads reach beyond the ranges of what they read
_GELU_REACH = 12.0  # beyond it GELU is a line to more digits than float64 has; its head reaches as far at least
_LIBRARY = 16.0  # units in the last place that torch's own activations may err by, for `reference_error_at`
_POINTS_AT_ONCE = 256
_MOST_MULTIPLIED = 1 << 22  # products of numbers, to make one linear map of two exactly
_NAMES = {"gelu": "GELU", "gelu_tanh": "GELU", "silu": "SiLU", "relu": "ReLU", "leaky": "leaky ReLU"}


class ConvertedNetwork(AttentionNetwork):
    """An attention-only network with a proved distance to the feed-forward network it was made from.

    Traced, its graph has matrix products, additions, softmax and reshaping only: scores are dot products of (u, 1) and keys
    (α_j, β_j). Called, it runs as every network of heads does. The bound covers both. Outside a trace it refuses inputs outside the
    domain, which the bound does not cover.

    Attributes:
        domain: the box where the bound holds.
        certificate: the claim. Its terms are what the heads and the rounding add.
        target: the function that the claim is about: the exact activations, wired as the network is.
        parts_claimed: what is claimed about each distinct head.

    To save it, and for everything else that heads have: `pa.Compiled.of_network(net)`.
    """

    certificate: Certificate
    target: Target

    def __init__(
        self,
        made: Sequence[Construction],
        parts: Sequence[Part],
        wiring: Wiring,
        written: _Written,
        domain: Box,
        dtype: torch.dtype,
    ) -> None:
        heads = [one.head for one in made]
        super().__init__(heads, wiring, input_shapes=(domain.shape,), output_shape=(wiring.output.rows,), dtype=dtype)
        self.domain, self.parts_claimed, self._written = domain, tuple(parts), written
        self._plain = [_Plain.of(group, self.parts) for layer in self.wiring.layers for group in layer]
        self._last = _matrix(self.wiring.output, dtype)
        self._graphs = [part.graph for part in parts]

    @property
    def error_bound(self) -> float:
        """A bound of `|network(x) − mlp(x)|_∞` on the domain: mlp in exact arithmetic, the network as it runs."""
        return self.certificate.error_bound

    @property
    def keys(self) -> int:
        """The number of keys of all heads, one head per neuron."""
        return self.num_keys

    def forward(self, x: Tensor) -> Tensor:
        """The network's values, `(…, out)`.

        Args:
            x: inputs, `(…, *domain.shape)`.

        Raises:
            OutsideDomainError: an input lies outside the domain.
        """
        if is_traced(x):  # (batch, *domain.shape), in the network's dtype
            return self._chain(x if len(self.domain.shape) == 1 else x.flatten(1))
        self._require_inside(x)
        z, lead = flatten_inputs((x,), (self.domain.shape,), self.dtype)
        return self.evaluate(z).reshape(*lead, self.num_outputs)

    @certified
    def _chain(self, z: Tensor) -> Tensor:
        """The same with scores as dot products: every layer reads the one before it."""
        device = self.device
        for gate in self._plain:
            z = gate.on(device)(z)
        return _applied(z, (self._last[0].to(device), self._last[1].to(device)))

    def error_bound_at(self, x: Any) -> Array:
        """The same bound for each input alone, `(n,)`. It is smaller, because at one point most neurons are far from their kinks.

        Args:
            x: inputs, `(n, *domain.shape)`.
        """
        errors = [part.certificate.error_bound + more for part, more in zip(self.parts_claimed, self._products)]
        local = [
            _plus(local_error(head, part.graph, part.certificate), more)
            for head, part, more in zip(self.parts, self.parts_claimed, self._products)
        ]
        return self._carried_at(x, self.wiring, self._graphs, errors, local, Precision.of(self.dtype))

    def reference_error_at(self, x: Any, dtype: torch.dtype = torch.float32) -> Array:
        """A bound of the rounding error of the feed-forward network itself, run by torch in `dtype`, `(n,)`.

        Assumes that torch's activations are accurate to 16 units in the last place.

        Args:
            x: inputs, `(n, *domain.shape)`.
            dtype: torch.float64 or torch.float32.
        """
        written, precision = self._written, Precision.of(dtype)
        local = [partial(_library_error, graph, precision.unit) for graph in written.graphs]
        return self._carried_at(x, written.wiring, written.graphs, [math.inf] * len(local), local, precision)

    @property
    def _products(self) -> list[float]:
        """What scores as dot products round beyond what the claims about the heads allow for."""
        return [_beyond(head, part) for head, part in zip(self.parts, self.parts_claimed)]

    def _carried_at(
        self,
        x: Any,
        wiring: Wiring,
        graphs: Sequence[Graph],
        errors: Sequence[float],
        local: Sequence[LocalError | None],
        precision: Precision,
    ) -> Array:
        points, found = self._points(x), []
        for start in range(0, len(points), _POINTS_AT_ONCE):
            some = points[start : start + _POINTS_AT_ONCE]
            carried = propagate(wiring, graphs, errors, some, some, precision=precision, local=local)
            found.append(carried.output_error.max(axis=1))
        return np.concatenate([*found, np.zeros(0)])

    def _points(self, x: Any) -> Array:
        points = np.asarray(x.detach().cpu().numpy() if isinstance(x, Tensor) else x, dtype=np.float64)
        if points.shape[-len(self.domain.shape) :] != self.domain.shape:
            raise ShapeError(
                f"inputs have shape {points.shape}; expected (…, {', '.join(map(str, self.domain.shape))})."
            )
        return points.reshape(-1, self.domain.dimension)

    def _require_inside(self, x: Any) -> None:
        points = self._points(x)
        bad = np.flatnonzero(~self.domain.contains(points))
        if bad.size:
            raise OutsideDomainError(
                f"{bad.size:,} of {len(points):,} inputs lie outside the domain, the first is "
                f"{np.round(points[bad[0]][:8], 6).tolist()}; "
                "the bound does not cover them. Clamp the inputs, or convert with a larger domain."
            )


def attention_from_mlp(
    mlp: nn.Module, domain: BoxLike, tolerance: float, *, dtype: torch.dtype = torch.float64
) -> ConvertedNetwork:
    """An attention-only network within `tolerance` of a feed-forward network on a box, end to end, rounding included.

    Linear maps stay. Every activation becomes a head that all its neurons share: ReLU, leaky ReLU, hard tanh and clamp get two to
    four keys with affine values, error `0.2785/β`; tanh, sigmoid and SiLU get two keys and are exact; GELU gets six to twelve
    lines. Errors are carried through the layers on propagated ranges, and the tolerance is split among the heads by what an error
    at each of them does to the outputs. Two linear layers in a row become one where that stores fewer numbers.

    *Theorem*: `carried-errors`, by `max-affine-values`, `two-keys` and, for GELU, `straight-ends`.

    Args:
        mlp: an `nn.Module` that is a chain of supported layers, nested or written with functions.
        domain: the box of its inputs.
        tolerance: the largest error of any output on the whole domain, > 0.
        dtype: dtype of the network, torch.float64 or torch.float32.

    Returns:
        A `ConvertedNetwork`, which is an `AttentionNetwork` with its claim.

    Raises:
        UnsupportedError: a layer has no head. The message names it.
        ToleranceError: the tolerance is smaller than the dtype allows, or a layer overflows it.
        DomainError: the domain is not a box.
        ShapeError: the widths of the layers and the domain do not fit.

    >>> import partita as pa
    >>> mlp = nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 1))
    >>> pa.attention_from_mlp(mlp, pa.Box([-1, -1], [1, 1]), 1e-3).error_bound <= 1e-3
    True
    """
    domain = Box.of(domain)
    require_dtype(dtype)
    if not 0 < tolerance < math.inf:
        raise ToleranceError(f"tolerance is {tolerance!r}; expected a finite number > 0.")
    if not isinstance(domain, Box):
        raise DomainError(f"the domain is {domain!r}; expected a Box, say pa.Box([-1, -1], [1, 1]).")
    stages = read_chain(mlp)
    _require_widths(stages, domain)
    search = _Search(stages, domain, tolerance, dtype, type(mlp).__name__)
    reached: list[float] = []
    problem: PartitaError | None = None
    for share, least_gain in _TRIALS:
        try:
            network = search.network(share, least_gain)
        except ToleranceError as error:
            problem = error
            continue
        if network.error_bound <= tolerance:
            return network
        reached.append(network.error_bound)
    name, floor = Precision.of(dtype).name, search.floor
    kinds = ", ".join(sorted({_NAMES.get(s.activation.kind, s.activation.kind) for s in stages if s.activation}))
    least = f"{min(reached):.3g}" if reached else f"no heads for {kinds} are close enough ({problem})"
    raise ToleranceError(
        f"tolerance {tolerance:g} is below what can be proved here in {name}: {least}; {floor:.2g} of it is rounding of the linear "
        f"maps. Use a larger tolerance{', float64' if dtype == torch.float32 else ''} or a smaller domain."
    )


class _Search:
    """The heads of one network, for shares of the tolerance."""

    def __init__(self, stages: Sequence[Stage], domain: Box, tolerance: float, dtype: torch.dtype, label: str) -> None:
        self.domain, self.tolerance, self.dtype, self.label = domain, tolerance, dtype, label
        self.lo, self.hi = domain.lo.reshape(1, -1), domain.hi.reshape(1, -1)
        self.written = _Written.of(stages, domain.dimension)
        first = self._carry(self.written.wiring, self.written.graphs, [0.0] * len(self.written.graphs))
        self.floor = float(first.output_error.max())
        if not math.isfinite(self.floor):
            raise ToleranceError(
                f"tolerance {tolerance:g} is below what can be proved here in {Precision.of(dtype).name}: inf, as a layer may "
                f"overflow, or has no bound. Use a smaller domain{', or float64' if dtype == torch.float32 else ''}."
            )
        self.wiring, self.graphs = _joined(stages, domain.dimension)
        same = len(self.wiring.layers) == len(self.written.wiring.layers)  # no linear maps were multiplied out
        self.first = first if same else self._carry(self.wiring, self.graphs, [0.0] * len(self.graphs))
        self._built: dict[tuple[Graph, Box, float], Construction] = {}

    def network(self, share: float, least_gain: float) -> ConvertedNetwork:
        """The network whose heads take this share of the tolerance in all, and its claim."""
        allowed = share * (self.tolerance - self.floor)
        count = len(self.graphs)
        if not allowed > 0:
            raise ToleranceError("the linear maps round more than the tolerance")
        budgets = _budgets(self.first, count, allowed, least_gain)
        reach = self._carry(self.wiring, self.graphs, [_MARGIN * b for b in budgets])
        boxes = _boxes(reach, self.graphs)
        budgets = _budgets(reach, count, allowed, least_gain)
        made = [self._part(*given) for given in zip(self.graphs, boxes, budgets)]
        parts = [Part(graph, box, one.certificate) for graph, box, one in zip(self.graphs, boxes, made)]
        network = ConvertedNetwork(made, parts, self.wiring, self.written, self.domain, self.dtype)
        ask = partial(exact_values, self.wiring, self.graphs)
        network.target = Target((self.domain,), network.output_shape, None, ask, self.label)
        proved = NetworkProof().prove(network, network.target, Given(self.tolerance, earlier=tuple(parts)))
        terms = [*proved.terms, _products_term(network, reach)]
        digest = network.function_sha256([graph.to_json() for graph in self.graphs])
        network.certificate = claim(
            network,
            {"type": "network", "text": self.label, "sha256": digest},
            [self.domain],
            [t for t in terms if t.value or t.name != "dot products"],
            dtype=self.dtype,
            theorem="carried-errors",
            details={"type": "network", "method": "mlp"},
            facts={"keys": float(network.keys), "layers": float(network.num_layers), "heads": float(len(parts))},
            tolerance=self.tolerance,
            proof=proved.details,
        )
        return network

    def _carry(self, wiring: Wiring, graphs: Sequence[Graph], errors: Sequence[float]) -> Carried:
        return propagate(wiring, graphs, errors, self.lo, self.hi, precision=Precision.of(self.dtype))

    def _part(self, graph: Graph, box: Box, tolerance: float) -> Construction:
        """The head of an activation: pieces, two keys, or lines; fitted values where none of these is close enough."""
        key = graph, box, tolerance
        if key not in self._built:
            target = graph_target(graph, (box,), graph.infix())
            request = Request(target, tolerance, dtype=self.dtype)
            methods = [m for m in (Pieces(), TwoKeys(), Lines(), Fitted()) if m.applies(request) is None]
            problem: PartitaError | None = None
            for method in methods:
                try:
                    found, _ = constructed(best_plan(request, methods=[method]))
                except PartitaError as error:
                    problem = problem or error
                    continue
                if found.certificate.kind == "proved" and found.certificate.error_bound <= tolerance:
                    self._built[key] = found
                    break
            else:
                raise ToleranceError(f"{target.label} within {tolerance:.2g} on {box}: {problem}")
        return self._built[key]


def _budgets(carried: Carried, heads: int, tolerance: float, least_gain: float) -> list[float]:
    """Errors of the heads that add equal shares to the output that they move most.

    A head that moves no output gets what one that passes its error on unchanged would: neurons that are dead must stay so. For the
    same reason gains below 1 count as 1, unless no head is that close.
    """
    gains, moved = carried.gains[0], np.zeros((carried.gains.shape[1], heads))
    for channel, group, reads in carried.groups():
        moved[:, group.head] += gains[:, channel : channel + len(reads.moves)].sum(axis=1)
    found = np.maximum(moved.max(axis=0), least_gain)
    return [tolerance / max(1, heads) / (float(gain) or 1.0) for gain in found]


def _boxes(carried: Carried, graphs: Sequence[Graph]) -> list[Box]:
    """For every head an interval that holds all it reads; for GELU one whose ends are straight."""
    boxes = []
    for k, graph in enumerate(graphs):
        reads = [reads for _, group, reads in carried.groups() if group.head == k]
        lo, hi = (
            min(float(r.reach_lo.min()) for r in reads),
            max(float(r.reach_hi.max()) for r in reads),
        )
        if graph in _GELU_GRAPHS:
            lo, hi = min(lo, -_GELU_REACH), max(hi, _GELU_REACH)
        pad = max(1e-9 * max(abs(lo), abs(hi)), 1e-3 * (hi - lo), 1e-12 if lo == hi else 0.0)
        boxes.append(Box([lo - pad], [hi + pad]))
    return boxes


def _products_term(network: ConvertedNetwork, carried: Carried) -> Term:
    """What dot products add at the output where that is most, if errors are at most those that the ranges were widened by."""
    gains, more = carried.gains[0], network._products
    found = np.zeros(len(gains))
    for channel, group, reads in carried.groups():
        found += gains[:, channel : channel + len(reads.moves)].sum(axis=1) * more[group.head]
    value = float(found.max(initial=0.0)) * (1 + 1e-9)
    return Term(
        "dot products", value, "Σ gain·(what scores as dot products round)", "carried-errors", source="rounding"
    )


def _beyond(head: FoldedHead, part: Part) -> float:
    """What a head as products and a softmax rounds beyond what its claim has for rounding."""
    lo, hi = float(part.box.lo.ravel()[0]), float(part.box.hi.ravel()[0])
    (low,), (high,) = Precision.of(head.dtype).widened(np.array([lo]), np.array([hi]))
    counted = sum(t.value for t in part.certificate.terms if t.source == "rounding")
    return max(line_rounding(head.affine_scores(), float(low), float(high), head.dtype) - counted, 0.0) * (1 + 1e-9)


def _plus(local: LocalError | None, more: float) -> LocalError | None:
    return None if local is None else lambda lo, hi: np.asarray(up(local(lo, hi) + more))


def _library_error(graph: Graph, unit: float, lo: Array, hi: Array) -> Array:
    """What torch's own activation may err by: some units in the last place of its value and its argument."""
    size = enclose_each(graph, lo, hi)[0].magnitude
    return np.asarray(_LIBRARY * unit * (size + np.maximum(np.abs(lo), np.abs(hi)).max(axis=1)) * (1 + 1e-9))


@dataclass(frozen=True, eq=False)
class _Plain:
    """The uses of one head in one layer as products, additions and a softmax: its query is (u, 1), its keys are (α_j, β_j)."""

    map: tuple[Tensor, Tensor] | None
    keys: Tensor
    offsets: Tensor
    slopes: Tensor | None
    constants: Tensor

    @classmethod
    def of(cls, group: Group, heads: Sequence[FoldedHead]) -> _Plain:
        head = heads[group.head]
        scores, dtype = head.affine_scores(), head.dtype
        numbers = [scores.slopes[:, 0], scores.offsets - scores.offsets.mean(), scores.values[:, 0]]
        keys, offsets, constants = (torch.tensor(x, dtype=dtype) for x in numbers)
        slopes = None if scores.value_slopes is None else torch.tensor(scores.value_slopes[:, 0, 0], dtype=dtype)[None]
        chosen = group.reads.chosen is not None
        return cls(None if chosen else _matrix(group.reads, dtype), keys[None], offsets, slopes, constants)

    def on(self, device: torch.device) -> _Plain:
        """The same where the network is."""
        maps = None if self.map is None else (self.map[0].to(device), self.map[1].to(device))
        slopes = None if self.slopes is None else self.slopes.to(device)
        return _Plain(maps, self.keys.to(device), self.offsets.to(device), slopes, self.constants.to(device))

    def __call__(self, z: Tensor) -> Tensor:
        u = z if self.map is None else _applied(z, self.map)
        query = u.unsqueeze(-1)
        weights = torch.softmax(query @ self.keys + self.offsets, dim=-1)
        if self.slopes is None:
            return (weights @ self.constants.unsqueeze(-1)).squeeze(-1)
        values = query @ self.slopes + self.constants
        return (weights.unsqueeze(-2) @ values.unsqueeze(-1)).squeeze(-1).squeeze(-1)


def _matrix(given: Affine, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return torch.tensor(given.weight.T.copy(), dtype=dtype), torch.tensor(given.bias, dtype=dtype)


def _applied(z: Tensor, numbers: tuple[Tensor, Tensor]) -> Tensor:
    return z @ numbers[0] + numbers[1]


@dataclass(frozen=True, eq=False)
class _Written:
    """The feed-forward network as it is written, one layer for each of its stages; a linear stage has the identity behind it."""

    wiring: Wiring
    graphs: list[Graph]

    @classmethod
    def of(cls, stages: Sequence[Stage], inputs: int) -> _Written:
        graphs: list[Graph] = []
        layers: list[tuple[Group, ...]] = []
        start, width = 0, inputs
        for stage in stages:
            reads = _stage_map(stage, start, width)
            layers.append((Group(_place(graphs, activation_graph(stage.activation)), reads),))
            start, width = start + width, reads.rows
        return cls(Wiring(inputs, tuple(layers), _identity(start, width)), graphs)


def _joined(stages: Sequence[Stage], inputs: int) -> tuple[Wiring, list[Graph]]:
    """The wiring with one head per activation, and the functions of the heads.

    Linear maps in a row are multiplied out, exactly, unless their product would have more numbers than they have.
    """
    graphs: list[Graph] = []
    layers: list[tuple[Group, ...]] = []
    start, width, waiting = 0, inputs, None
    for stage in stages:
        reads = _stage_map(stage, start, width if waiting is None else waiting.rows)
        if waiting is not None and stage.weight is not None:
            product = _multiplied(reads, waiting)
            if product is None:
                layers.append((Group(_place(graphs, activation_graph(None)), waiting),))
                start, width = start + width, waiting.rows
                reads = replace(reads, start=start)
            else:
                reads = product
        elif waiting is not None:
            reads = waiting
        waiting = reads if stage.activation is None else None
        if stage.activation is not None:
            layers.append((Group(_place(graphs, activation_graph(stage.activation)), reads),))
            start, width = start + width, reads.rows
    return Wiring(inputs, tuple(layers), _identity(start, width) if waiting is None else waiting), graphs


def _place(graphs: list[Graph], graph: Graph) -> int:
    if graph not in graphs:
        graphs.append(graph)
    return graphs.index(graph)


def _stage_map(stage: Stage, start: int, width: int) -> Affine:
    if stage.weight is None or stage.bias is None:
        return _identity(start, width)
    return Affine(stage.weight.double().numpy(), stage.bias.double().numpy(), start)


def _identity(start: int, width: int) -> Affine:
    return Affine(np.eye(width), np.zeros(width), start)


def _multiplied(after: Affine, before: Affine) -> Affine | None:
    """`W₂(W₁ z + b₁) + b₂` with exact coefficients; None if that has more numbers, or takes too long."""
    rows, columns, between = after.rows, before.weight.shape[1], before.rows
    if rows * columns > between * (rows + columns) or rows * columns * between > _MOST_MULTIPLIED:
        return None
    first, last = (np.column_stack([_exact(m, part="weight"), _exact(m, part="bias")]) for m in (before, after))
    product = last[:, :-1] @ first
    product[:, -1] += last[:, -1]
    weight, exact = product.astype(np.float64), {}
    for row, column in np.argwhere(np.frompyfunc(Fraction, 1, 1)(weight) != product):
        exact[int(row), int(column) if column < columns else -1] = product[row, column]
    return Affine(weight[:, :-1], weight[:, -1], before.start, exact)


def _exact(map_: Affine, *, part: str) -> np.ndarray[Any, np.dtype[Any]]:
    """The exact coefficients as Fractions."""
    found = np.asarray(np.frompyfunc(Fraction, 1, 1)(getattr(map_, part)), dtype=object)
    for (row, column), fraction in map_.exact.items():
        if (column < 0) == (part == "bias"):
            found[row if column < 0 else (row, column)] = fraction
    return found


def activation_graph(activation: Activation | None) -> Graph:
    """The exact activation as a function of one variable; None is the identity."""
    builder = GraphBuilder(1)
    x = builder.add("input", parameters=(0,))

    def number(value: float) -> int:
        return builder.add("const", parameters=(float(value),))

    kind, given = ("identity", ()) if activation is None else (activation.kind, activation.parameters)
    out = x
    if kind in ("relu", "tanh", "sigmoid"):
        out = builder.add(kind, x)
    elif kind == "silu":
        out = builder.add("mul", x, builder.add("sigmoid", x))
    elif kind == "leaky":
        out = builder.add("max" if given[0] <= 1 else "min", x, builder.add("mul", number(given[0]), x))
    elif kind == "clamp":
        low, high = given
        if math.isinf(low) or math.isinf(high):
            out = builder.add("max", x, number(low)) if math.isinf(high) else builder.add("min", x, number(high))
        else:
            out = builder.add("clamp", x, parameters=(float(low), float(high)))
    elif kind == "gelu":
        inner = builder.add("erf", builder.add("div", x, builder.add("sqrt", number(2.0))))
        out = builder.add("mul", builder.add("mul", number(0.5), x), builder.add("add", number(1.0), inner))
    elif kind == "gelu_tanh":
        cubic = builder.add("mul", number(0.044715), builder.add("pow", x, parameters=(3,)))
        inner = builder.add("mul", number(0.79788456080286536), builder.add("add", x, cubic))
        inner = builder.add("tanh", inner)
        out = builder.add("mul", builder.add("mul", number(0.5), x), builder.add("add", number(1.0), inner))
    return builder.finish([out], ())


_GELU_GRAPHS = (activation_graph(Activation("gelu")), activation_graph(Activation("gelu_tanh")))


def _require_widths(stages: Sequence[Stage], domain: Box) -> None:
    width, before = domain.dimension, "the domain has dimension"
    for weight in (s.weight for s in stages if s.weight is not None):
        if weight.shape[1] != width:
            raise ShapeError(f"a Linear layer has {weight.shape[1]} inputs, but {before} {width}.")
        width, before = len(weight), "the number of outputs before it is"
