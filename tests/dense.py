"""A head as one softmax over all its cells, in numpy and in balls, from the stored tensors alone: no code of the library."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from flint import arb

Row = tuple[list[tuple[int, float]], float]  # channels with weights, and a constant


@dataclass(frozen=True)
class Cells:
    """`net(z) = Σ_j softmax_j(Σ_i −R_i(z_i − c_ji)²/2 + R p_j/2)·(V_j + J_j(z − o_j))`.

    Shapes: centers and origins `(N, m)`, rates `(m,)`, powers `(N,)`, values `(N, out)`, slopes `(N, out, m)`.
    """

    centers: np.ndarray
    rates: np.ndarray
    powers: np.ndarray
    values: np.ndarray
    slopes: np.ndarray
    origins: np.ndarray

    @classmethod
    def of(cls, tensors: Mapping[str, torch.Tensor]) -> Cells:
        """From the `state_dict` of a product grid, a scattered head or a tensor train."""
        stored = {name: t.detach().double().numpy() for name, t in tensors.items()}
        if "centers" in stored:
            centers, rates = stored["centers"], np.full(stored["centers"].shape[1], stored["inverse_temperature"])
        else:
            axes = [stored[f"centers_{i}"] for i in range(len(stored["inverse_temperature"]))]
            centers = np.stack([a.ravel() for a in np.meshgrid(*axes, indexing="ij")], axis=1)
            rates = stored["inverse_temperature"]
        values = stored["values"] if "values" in stored else _train(stored)
        n, m = centers.shape
        return cls(
            centers,
            rates,
            stored.get("powers", np.zeros(n)),
            values,
            stored.get("value_slopes", np.zeros((n, values.shape[1], m))),
            np.broadcast_to(stored.get("origin", centers), (n, m)),
        )

    def in_floats(self, points: np.ndarray) -> np.ndarray:
        """`(n, m)` to `(n, out)` in float64."""
        parts = [
            self._some(chunk) for chunk in np.array_split(points, 1 + len(points) * self.centers.size // 4_000_000)
        ]
        return np.concatenate(parts)

    def _some(self, points: np.ndarray) -> np.ndarray:
        offset = points[:, None] - self.centers
        scores = -0.5 * (self.rates * offset**2).sum(axis=2) + 0.5 * self.rates[0] * self.powers
        weights = np.exp(scores - scores.max(axis=1, keepdims=True))
        weights /= weights.sum(axis=1, keepdims=True)
        tilts = np.einsum("nj,jom,njm->no", weights, self.slopes, points[:, None] - self.origins, optimize=True)
        return weights @ self.values + tilts

    def in_balls(self, z: Sequence[float | arb]) -> list[arb]:
        """The same at one point, in balls of as many bits as are set."""
        point, rates = [x if isinstance(x, arb) else arb(x) for x in z], [arb(r) for r in self.rates.tolist()]
        scores = [
            rates[0] * arb(p) / 2 - sum((r * (x - arb(c)) ** 2 for r, x, c in zip(rates, point, center)), arb(0)) / 2
            for center, p in zip(self.centers.tolist(), self.powers.tolist())
        ]
        largest = max(scores, key=lambda s: float(s.mid()))
        weights = [(s - largest).exp() for s in scores]
        whole, tilted = sum(weights, arb(0)), bool(self.slopes.any())
        answers = []
        for k in range(self.values.shape[1]):
            answer = sum((w * arb(v) for w, v in zip(weights, self.values[:, k].tolist())), arb(0))
            if tilted:
                rows = zip(weights, self.slopes[:, k].tolist(), self.origins.tolist())
                answer += sum((w * arb(s) * (x - arb(o)) for w, j, at in rows for s, x, o in zip(j, point, at)), arb(0))
            answers.append(answer / whole)
        return answers


@dataclass(frozen=True)
class Wired:
    """A network of heads from its record and its tensors alone: channels are the inputs, then the uses of heads in order."""

    heads: list[Cells]
    layers: list[list[tuple[int, list[Row]]]]
    output: list[Row]

    @classmethod
    def of(cls, record: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> Wired:
        def under(prefix: str) -> dict[str, torch.Tensor]:
            return {k.removeprefix(prefix): t for k, t in tensors.items() if k.startswith(prefix)}

        heads = [Cells.of(under(f"heads.{i}.")) for i in range(len(record["heads"]))]
        layers = [
            [(group["head"], _rows(group["reads"], under(f"layers.{i}.{k}."))) for k, group in enumerate(layer)]
            for i, layer in enumerate(record["layers"])
        ]
        return cls(heads, layers, _rows(record["output"], under("output.")))

    def in_floats(self, points: np.ndarray) -> np.ndarray:
        """`(n, m)` to `(n, out)` in float64."""
        channels = list(points.T)
        for layer in self.layers:
            made = []
            for head, rows in layer:
                reads = [sum((w * channels[c] for c, w in terms), bias + 0 * points[:, 0]) for terms, bias in rows]
                k = self.heads[head].centers.shape[1]
                for i in range(0, len(reads), k):
                    made.append(self.heads[head].in_floats(np.stack(reads[i : i + k], axis=1))[:, 0])
            channels += made
        return np.stack([sum((w * channels[c] for c, w in t), b + 0 * points[:, 0]) for t, b in self.output], axis=1)

    def in_balls(self, z: list[float]) -> list[arb]:
        """The same at one point, in balls of as many bits as are set."""

        def read(row: Row) -> arb:
            return sum((arb(w) * channels[c] for c, w in row[0]), arb(row[1]))

        channels = [arb(x) for x in z]
        for layer in self.layers:
            made = []
            for head, rows in layer:
                reads, k = list(map(read, rows)), self.heads[head].centers.shape[1]
                made += [self.heads[head].in_balls(reads[i : i + k])[0] for i in range(0, len(reads), k)]
            channels += made
        return list(map(read, self.output))


def _rows(record: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> list[Row]:
    """The rows of an affine map: ones and zeros from the record, the other numbers from the tensors, in their order."""
    weights, biases = (iter(tensors[name].double().tolist() if name in tensors else []) for name in ("weight", "bias"))
    every = list(range(record["width"]))
    rows = [[[], every, True]] * record["rows"] if record.get("dense") else record["rows"]
    found = []
    for ones, stored, has_bias in rows:
        terms = [(record["start"] + c, 1.0) for c in ones] + [(record["start"] + c, next(weights)) for c in stored]
        found.append((terms, next(biases) if has_bias else 0.0))
    assert next(weights, None) is None and next(biases, None) is None
    return found


def oracle_of(head: Any) -> Cells | Wired:
    """One head or a network, from what its file holds."""
    tensors, record = head.state_dict(), head.record()
    return Wired.of(record, tensors) if record["type"] == "network" else Cells.of(tensors)


def _train(stored: Mapping[str, np.ndarray]) -> np.ndarray:
    """All values of a tensor train, row-major like the grid."""
    table = np.ones((1, 1))
    for i in range(len(stored["inverse_temperature"])):
        core = stored[f"core_{i}"]
        table = np.tensordot(table, core, axes=1).reshape(-1, core.shape[2])
    return table


def layers_oracle(tensors: Mapping[str, np.ndarray], *matrices: np.ndarray) -> np.ndarray:
    """`W_V Y softmax((W_K Y)ᵀ W_Q Y') W_O` for one input, the whole attention matrix, from named tensors alone."""

    def linear(prefix: str, z: np.ndarray) -> np.ndarray:
        terms = sum(p @ z @ q for p, q in zip(tensors[f"{prefix}.left"], tensors[f"{prefix}.right"]))
        return terms + tensors[f"{prefix}.constant"]

    if len(matrices) == 1:
        y_k = y_q = linear("linear", matrices[0])
    else:
        y_k, y_q = linear("linear_k", matrices[0]), linear("linear_q", matrices[1])
    w = {k: tensors[f"attention.{k}"] for k in ("w_k", "w_q", "w_v", "w_o")}
    scores = (w["w_k"] @ y_k).T @ (w["w_q"] @ y_q)
    weights = np.exp(scores - scores.max(axis=0))
    return w["w_v"] @ y_k @ (weights / weights.sum(axis=0)) @ w["w_o"]
