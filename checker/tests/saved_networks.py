"""Small networks of heads, wired by hand, with the producer's own proofs; and some that it finds by itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction as F
from typing import Any, NamedTuple

import numpy as np
import torch

import partita as pa
from partita.compiler.compiled import Compiled
from partita.functions import parse
from partita.functions.target import Target, graph_target
from partita.heads.network import AttentionNetwork
from partita.heads.wiring import Affine, Group, Wiring
from partita.proofs import PROOFS, Given
from partita.proofs.claim import claim, describe_function
from partita.proofs.network_proof import Part

Row = tuple[Mapping[int, float | F], float]  # weights by channel, and the bias


class Wired(NamedTuple):
    """A network: parts are (function, box, tolerance) of every head, layers are groups (head, rows).

    Without a function the wiring defines it.
    """

    function: str | None
    box: Sequence[Sequence[float]]
    parts: Sequence[tuple[str, Sequence[Sequence[float]], float]]
    layers: Sequence[Sequence[tuple[int, Sequence[Row]]]]
    output: Sequence[Row]
    dtype: torch.dtype = torch.float64

    def compiled(self) -> Compiled:
        box, parts, heads = pa.Box.of(self.box), list[Part](), []
        for text, domain, tolerance in self.parts:
            graph, own = parse(text, _names(len(domain))), pa.Box.of(domain)
            found = pa.compile(graph, own, tolerance=tolerance, dtype=self.dtype)
            heads.append(found.head)
            parts.append(Part(graph, own, found.certificate))
        channels, layers = box.dimension, []
        for layer in self.layers:
            layers.append(tuple(Group(head, _affine(rows, channels)) for head, rows in layer))
            channels += sum(len(rows) // len(self.parts[head][1]) for head, rows in layer)
        wiring, shape = Wiring(box.dimension, tuple(layers), _affine(self.output, channels)), ()
        shape = (len(self.output),) if len(self.output) > 1 else ()
        net = AttentionNetwork(heads, wiring, input_shapes=(box.shape,), output_shape=shape, dtype=self.dtype)
        nothing = np.zeros((0, 1))
        if self.function is None:
            target = Target((box,), shape, None, None, "hand-made")
            digest = net.function_sha256([part.graph.to_json() for part in parts])
            function: dict[str, Any] = {"type": "network", "text": "hand-made", "sha256": digest}
        else:
            target = graph_target(parse(self.function, _names(box.dimension)), (box,), self.function)
            function = describe_function(target, nothing, nothing)
        proved = PROOFS["network"].prove(net, target, Given(earlier=parts))
        rest = {"dtype": self.dtype, "theorem": "carried-errors", "details": {"type": "network"}}
        certificate = claim(net, function, target.domains, proved.terms, proof=proved.details, **rest)
        return Compiled(net, None, certificate, target)


def _names(count: int) -> list[str]:
    return [f"x{i}" for i in range(count)]


def _affine(rows: Sequence[Row], channels: int) -> Affine:
    weight, exact = np.zeros((len(rows), channels)), dict[tuple[int, int], F]()
    for i, (row, _) in enumerate(rows):
        for j, w in row.items():
            weight[i, j] = float(w)
            if F(w) != F(float(w)):
                exact[i, j] = F(w)
    return Affine(weight, np.array([float(bias) for _, bias in rows]), 0, exact)


def of(channel: int) -> Row:
    return {channel: 1.0}, 0.0


def total(channels: Sequence[int]) -> Row:
    return dict.fromkeys(channels, 1.0), 0.0


LINE, WEIGHTS = [-1.0, 1.0], [[0.5, -1.25, 0.75], [1.0, 0.25, -0.5], [-0.375, 0.625, 1.5], [0.125, -0.875, 0.25]]
LAYERS = [[(0, [of(0)])], [(1, [({2: F(1, 3), 1: F(1, 7)}, 0.0)])]]
SINES = " + ".join(f"sin({1 + i / 50}*x{i} + {i / 7})" for i in range(100))


def sines(tolerance: float) -> list[tuple[str, list[list[float]], float]]:
    return [("sin(x0)", [LINE], tolerance), ("exp(x0)", [[-0.5, 0.5]], tolerance)]


def black_box(z: np.ndarray) -> np.ndarray:
    return np.sin(z).sum(axis=1)


NETWORKS: dict[str, Callable[[], Compiled]] = {
    "sum": Wired(
        "sin(3*x0) + sin(3*x1) + sin(3*x2)",
        [LINE] * 3,
        [("sin(3*x0)", [LINE], 1e-6)],
        [[(0, [of(0), of(1), of(2)])]],
        [total([3, 4, 5])],
    ).compiled,
    "layers": Wired(
        "2*exp(sin(x0)/3 + x1/7) - x1", [LINE] * 2, sines(1e-6), LAYERS, [({3: 2.0, 1: -1.0}, 0.0)]
    ).compiled,
    "layers float32": Wired(
        "2*exp(sin(x0)/3 + x1/7) - x1", [LINE] * 2, sines(1e-3), LAYERS, [({3: 2.0, 1: -1.0}, 0.0)], torch.float32
    ).compiled,
    "product": Wired(
        "sin(x0)*exp(x1), sin(x0) - exp(x1)",
        [LINE] * 2,
        [("sin(x0)", [LINE], 1e-6), ("exp(x0)", [LINE], 1e-6), ("x0*x1", [LINE, [0.0, 3.0]], 1e-3)],
        [[(0, [of(0)]), (1, [of(1)])], [(2, [of(2), of(3)])]],
        [of(4), ({2: 1.0, 3: -1.0}, 0.0)],
    ).compiled,
    "far": Wired(  # the slopes of the second layer are large in different corners
        "exp(2*sin(x0)) + exp(-2*sin(x0))",
        [LINE] * 2,
        [("sin(x0)", [LINE], 1e-4), ("exp(2*x0)", [LINE], 1e-6)],
        [[(0, [of(0)])], [(1, [of(2), ({2: -1.0}, 0.0)])]],
        [total([3, 4])],
    ).compiled,
    "entangled": Wired(  # the range of what is inverted holds 0 unless both of its terms are seen to depend on x0
        "1/(sqrt(x0^2 + x1) - x0)",
        [[1.0, 2.0]] * 2,
        [("x0^2", [[1.0, 2.0]], 1e-6), ("sqrt(x0)", [[1.9, 6.1]], 1e-6), ("1/x0", [[0.23, 0.74]], 1e-4)],
        [[(0, [of(0)])], [(1, [total([1, 2])])], [(2, [({3: 1.0, 0: -1.0}, 0.0)])]],
        [of(4)],
    ).compiled,
    "neurons": Wired(
        None,
        [LINE] * 3,
        [("sin(x0)", [[-3.0, 3.0]], 1e-5)],
        [[(0, [(dict(enumerate(row)), 0.25) for row in WEIGHTS])]],
        [({3: 0.5, 4: -0.25, 5: 1.5, 6: 0.75}, 0.125), ({3: 0.75, 5: -0.5}, 0.0)],
    ).compiled,
    "affine": Wired("2*x0 - x1/3 + 1", [LINE] * 2, [], [], [({0: 2.0, 1: F(-1, 3)}, 1.0)]).compiled,
    "hundred": lambda: pa.compile(SINES, pa.Box([-1] * 100, [1] * 100), tolerance=1e-6),
    "circuit": lambda: pa.compile(
        "(12*x1/(x0+x1)+0.74)*x5*(x4+9)/(x5*(x4+9)+x2)+11.35*x2/(x5*(x4+9)+x2)+0.74*x2*x5*(x4+9)/((x5*(x4+9)+x2)*x3)",
        pa.Box([50, 25, 0.5, 1.2, 0.25, 50], [150, 70, 3, 2.5, 1.2, 300]),
        tolerance=5e-3,
        method="layers",
    ),
    "estimate": lambda: pa.compile(black_box, pa.Box([-1] * 6, [1] * 6), tolerance=1e-3, method="heads"),
}
