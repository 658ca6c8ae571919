"""Single heads on points of R^m, as many copies as one likes, trained together.

`net(x) = Σ_j softmax_j(k_j·W_Qᵀ[x; 1]) V_j`: the layer of Propositions 3.2 and 3.3, whose Linear holds constants, so that W_K
is a table of keys. Its max-affine function has slopes and offsets `W_Q k_j`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import scipy
import torch
from torch import Tensor

from partita.geometry.partitions import MaxAffine
from partita.reproduction.batched import BatchedAdam, spectral_norms

__all__ = ["FunctionHeads", "TokenHeads", "cells_found", "turning_points"]


@dataclass(frozen=True, eq=False)
class FunctionHeads:
    """Copies of one head: `w_k` `(copies, keys, width)`, `w_q` `(copies, m + 1, width)`, `values` `(copies, keys)`."""

    w_k: Tensor
    w_q: Tensor
    values: Tensor

    @classmethod
    def random(
        cls, copies: int, keys: int, dimension: int, *, width: int, seed: int, scale: float = 1.0
    ) -> FunctionHeads:
        """Normal entries: keys of length about `scale`, queries of length about `scale`, small values; copy i has seed + i."""
        made = []
        for i in range(copies):
            g = torch.Generator().manual_seed(seed + i)
            draws = [torch.randn(*s, generator=g) for s in ((keys, width), (dimension + 1, width), (keys,))]
            made.append((draws[0] * scale / width**0.5, draws[1] * scale, 0.1 * draws[2]))
        return cls(*(torch.stack(part).double() for part in zip(*made)))

    @classmethod
    def constructed(
        cls, centers: np.ndarray, inverse_temperature: float, values: np.ndarray, copies: int = 1
    ) -> FunctionHeads:
        """`√R[v_j, −|v_j|²/2]` against `√R[x, 1]`: the theorem's scores, both sides of one scale."""
        root = inverse_temperature**0.5
        keys = torch.from_numpy(np.column_stack([centers, -0.5 * (centers**2).sum(axis=1)])) * root
        queries = torch.eye(centers.shape[1] + 1, dtype=torch.float64) * root
        parts = (keys, queries, torch.from_numpy(np.asarray(values, dtype=float)))
        return cls(*(p.expand(copies, *p.shape).clone() for p in parts))

    @classmethod
    def joined(cls, parts: Sequence[FunctionHeads]) -> FunctionHeads:
        """Heads of the same sizes as one batch."""
        return cls(*(torch.cat([getattr(p, name) for p in parts]) for name in ("w_k", "w_q", "values")))

    def only(self, copy: int) -> FunctionHeads:
        """One of the copies."""
        return FunctionHeads(*(p[copy : copy + 1] for p in (self.w_k, self.w_q, self.values)))

    @property
    def copies(self) -> int:
        return len(self.w_k)

    def weights(self, x: Tensor) -> Tensor:
        """Softmax over keys, `(copies, points, keys)`, for points `(points, m)` or `(copies, points, m)`."""
        ones = torch.ones(*x.shape[:-1], 1, dtype=x.dtype)
        return torch.softmax((torch.cat([x, ones], dim=-1) @ self.w_q) @ self.w_k.transpose(1, 2), dim=-1)

    def __call__(self, x: Tensor) -> Tensor:
        """`(copies, points)`."""
        return (self.weights(x) @ self.values[..., None])[..., 0]

    def trained(
        self,
        batch: Callable[[int], tuple[Tensor, Tensor]],
        *,
        steps: int,
        rate: float,
        look_at: set[int] | None = None,
    ) -> Iterator[tuple[int, FunctionHeads]]:
        """Adam on the mean squared error, rate falling to a tenth (cosine); (step, heads) at the steps to look at and at the end.

        Args:
            batch: step to points `(points, m)` or `(copies, points, m)` and what the heads should say, `(…, points)`.
        """
        heads = FunctionHeads(*(p.clone().requires_grad_() for p in (self.w_k, self.w_q, self.values)))
        parameters = {"w_k": heads.w_k, "w_q": heads.w_q, "values": heads.values}
        adam = BatchedAdam(parameters, torch.full((self.copies,), rate, dtype=torch.float64))
        for step in range(steps + 1):
            if step == steps or step in (look_at or ()):
                yield step, FunctionHeads(*(p.detach().clone() for p in parameters.values()))
            if step == steps:
                return
            x, y = batch(step)
            loss = ((heads(x) - y) ** 2).mean(dim=1).sum()
            adam.step(loss, scale=0.55 + 0.45 * float(np.cos(np.pi * step / steps)))

    def norms(self) -> tuple[Tensor, Tensor]:
        """The spectral norms of W_K and W_Q, `(copies,)` each."""
        return spectral_norms(self.w_k), spectral_norms(self.w_q)

    def frobenius(self) -> tuple[Tensor, Tensor]:
        """The Frobenius norms of W_K and W_Q, `(copies,)` each."""
        return self.w_k.flatten(1).norm(dim=1), self.w_q.flatten(1).norm(dim=1)

    def entropy(self, x: Tensor) -> Tensor:
        """Mean entropy of the weights over ln(keys), `(copies,)`: 0 selects, 1 averages all."""
        w = self.weights(x)
        out: Tensor = -(w * w.clamp_min(1e-300).log()).sum(dim=-1).mean(dim=1) / np.log(w.shape[-1])
        return out

    def partition(self, copy: int) -> MaxAffine:
        """The cells of one copy."""
        affine = (self.w_k[copy] @ self.w_q[copy].T).numpy()
        return MaxAffine(affine[:, :-1], affine[:, -1])


@dataclass(frozen=True, eq=False)
class TokenHeads:
    """Copies of one standard self-attention head on tokens that are affine in the input: the paper's `Attn ∘ Linear`.

    `Y = Linear([x; 1])` has n tokens of width D; `net(x) = w_o · (softmax(Y W_Q (Y W_K)ᵀ) Y W_V)`, softmax over keys.

    Attributes:
        linear: `(copies, m + 1, n·D)`, not trained, so that the scale of W_K and W_Q alone sets the temperature.
        w_k, w_q, w_v: `(copies, D, width)`.
        w_o: `(copies, n·width)`.
    """

    linear: Tensor
    w_k: Tensor
    w_q: Tensor
    w_v: Tensor
    w_o: Tensor

    @classmethod
    def random(cls, copies: int, tokens: int, dimension: int, *, width: int, seed: int) -> TokenHeads:
        """Normal entries, scaled so that tokens, keys and queries have entries of about 1; copy i has seed + i."""
        made = []
        for i in range(copies):
            g = torch.Generator().manual_seed(seed + i)
            linear = torch.randn(dimension + 1, tokens * width, generator=g) / (dimension + 1) ** 0.5
            square = [torch.randn(width, width, generator=g) / width**0.5 for _ in range(3)]
            w_o = torch.randn(tokens * width, generator=g) / (tokens * width) ** 0.5
            made.append((linear, *square, w_o))
        return cls(*(torch.stack(part).double() for part in zip(*made)))

    def tokens(self, x: Tensor) -> Tensor:
        """`(copies, points, n, D)` for points `(points, m)`."""
        affine = torch.cat([x, torch.ones(len(x), 1, dtype=x.dtype)], dim=1) @ self.linear
        return affine.reshape(len(self.w_k), len(x), -1, self.w_k.shape[1])

    def weights(self, x: Tensor) -> Tensor:
        """`(copies, points, queries, keys)`."""
        y = self.tokens(x)
        return torch.softmax((y @ self.w_q[:, None]) @ (y @ self.w_k[:, None]).transpose(-1, -2), dim=-1)

    def __call__(self, x: Tensor) -> Tensor:
        """`(copies, points)`."""
        read = self.weights(x) @ (self.tokens(x) @ self.w_v[:, None])
        return (read.flatten(2) @ self.w_o[..., None])[..., 0]

    def trained(
        self, batch: Callable[[int], tuple[Tensor, Tensor]], *, steps: int, rate: float, look_at: set[int]
    ) -> Iterator[tuple[int, TokenHeads]]:
        """Plain stochastic gradient descent on the mean squared error; (step, heads) at the steps to look at and at the end."""
        names = ("w_k", "w_q", "w_v", "w_o")
        heads = TokenHeads(self.linear, *(getattr(self, n).clone().requires_grad_() for n in names))
        trained = [getattr(heads, n) for n in names]
        for step in range(steps + 1):
            if step == steps or step in look_at:
                yield step, TokenHeads(self.linear, *(p.detach().clone() for p in trained))
            if step == steps:
                return
            x, y = batch(step)
            gradients = torch.autograd.grad(((heads(x) - y) ** 2).mean(dim=1).sum(), trained)
            with torch.no_grad():
                for p, g in zip(trained, gradients):
                    p.sub_(rate * g)

    def frobenius(self) -> tuple[Tensor, Tensor]:
        """The Frobenius norms of W_K and W_Q, `(copies,)` each."""
        return self.w_k.flatten(1).norm(dim=1), self.w_q.flatten(1).norm(dim=1)

    def entropy(self, x: Tensor) -> Tensor:
        """Mean entropy of the weights over ln(keys), `(copies,)`: 0 selects, 1 averages all."""
        w = self.weights(x)
        out: Tensor = -(w * w.clamp_min(1e-300).log()).sum(dim=-1).mean(dim=(1, 2)) / np.log(w.shape[-1])
        return out


def cells_found(wanted: np.ndarray, got: np.ndarray, cells: int) -> dict[str, float]:
    """How much of one partition another has, from the labels that both give to the same points, `(points,)` each.

    Cells are matched one to one so that the overlaps add up to the most points. A wanted cell is found if it and its
    match share at least half of the points in either. `distance` is the share of points outside the match.

    >>> cells_found(np.array([0, 0, 1, 1]), np.array([3, 3, 2, 0]), 4)
    {'cells_met': 3, 'cells_found': 1.0, 'distance': 0.25}
    """
    shared = np.zeros((cells, cells))
    np.add.at(shared, (wanted, got), 1)
    rows, columns = scipy.optimize.linear_sum_assignment(shared, maximize=True)
    sizes = shared.sum(axis=1)
    union = sizes[rows] + shared.sum(axis=0)[columns] - shared[rows, columns]
    there = sizes[rows] > 0
    found = there & (2 * shared[rows, columns] >= union)
    return {
        "cells_met": len(np.unique(got)),
        "cells_found": float(found.sum() / there.sum()),
        "distance": float(1 - shared[rows, columns].sum() / len(wanted)),
    }


def turning_points(partition: MaxAffine, lo: float, hi: float) -> np.ndarray:
    """Where a max-affine function of one variable turns, inside (lo, hi): the edges of its cells, sorted."""
    slopes, offsets = partition.slopes[:, 0], partition.offsets
    found, x = [], lo
    at = int(np.lexsort((slopes, slopes * x + offsets))[-1])
    while True:
        steeper = np.flatnonzero(slopes > slopes[at])
        if not len(steeper):
            break
        meets = (offsets[at] - offsets[steeper]) / (slopes[steeper] - slopes[at])
        x = float(meets.min())
        if x >= hi:
            break
        at = int(steeper[np.flatnonzero(meets <= x + 1e-12)][np.argmax(slopes[steeper[meets <= x + 1e-12]])])
        if x > lo:
            found.append(x)
    return np.array(found)
