"""A head that follows f closely with few keys, made without the compiler, which machines with GPUs may lack."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from speed_measure import Array
from speed_peers import on_product

from partita.geometry import Box, ProductGrid
from partita.heads import GridHead


def fitted_head(counts: tuple[int, ...], f: Callable[..., Array], kappa: float = 0.7, ghosts: int = 2) -> GridHead:
    """All keys of every axis in the window; values by one pseudo-inverse per axis from samples of f on [−1, 1]^m."""
    axes, inverses, rates, samples = [], [], [], []
    for n in counts:
        h = 2 / (n - 2 * ghosts)
        centers = -1 - ghosts * h + h / 2 + h * np.arange(n)
        at = np.cos(np.pi * (np.arange(3 * n) + 0.5) / (3 * n))
        weights = np.exp(-kappa / h**2 / 2 * (at[:, None] - centers) ** 2)
        inverses.append(np.linalg.pinv(weights / weights.sum(axis=1, keepdims=True), rcond=1e-12))
        axes.append(centers)
        rates.append(kappa / h**2)
        samples.append(at)
    table = on_product(f, samples)
    for i, inverse in enumerate(inverses):
        table = np.moveaxis(np.tensordot(inverse, table, axes=(1, i)), 0, i)
    m = len(counts)
    grid = ProductGrid(Box([-1.0] * m, [1.0] * m), tuple(axes))
    values = torch.from_numpy(np.ascontiguousarray(table).reshape(-1, 1))
    return GridHead(grid, rates, values, half_windows=max(counts), input_shapes=((m,),), output_shape=())
