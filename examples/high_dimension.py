"""Functions of 10 and 20 variables: heads with more keys than could be stored, with values in a tensor train.

Nothing here is proved. The errors printed are estimates: the largest error at fresh points. A fit that misses its
tolerance says so.
"""

import time

import numpy as np
import torch

import partita as pa
from partita.heads import literal_layers
from partita.search.train_fit import TrainFit, TrainLimits, fit_train


def peak(z: np.ndarray) -> np.ndarray:
    return 1 / (1 + (z**2).sum(axis=1))


def logarithm(z: np.ndarray) -> np.ndarray:
    return np.log1p((z**2).sum(axis=1))


def wave(z: np.ndarray) -> np.ndarray:
    """Two outputs in one tensor train."""
    phase = z.sum(axis=1)
    return np.stack([np.cos(phase), np.sin(phase)], axis=1)


def network(z: np.ndarray) -> np.ndarray:
    """Two layers of random tanh neurons: smooth, but not of low rank."""
    rng = np.random.default_rng(0)
    inner, outer = rng.normal(size=(z.shape[1], 8)) / np.sqrt(z.shape[1]), rng.normal(size=(8, 8)) / np.sqrt(8)
    return np.tanh(np.tanh(z @ inner) @ outer).sum(axis=1)


def describe(name: str, fit: TrainFit, seconds: float) -> None:
    head = fit.head()
    print(
        f"{name}: {head.num_keys:.1e} keys in {head.num_parameters:,} stored numbers, ranks up to {max(fit.ranks)}, "
        f"{fit.evaluations:,} evaluations, {seconds:.1f} s"
    )
    print(
        f"  {fit.status}: tolerance {fit.tolerance:g}, largest error on {fit.worst.samples:,} fresh points "
        f"{fit.error_estimate:.1e} (an estimate; max |f| is about {fit.scale:.3g})"
    )


def main() -> None:
    torch.set_num_threads(1)  # the matrices are small, so threads would only slow this down
    small = TrainLimits(rank=24, evaluations=400_000)
    for name, f, dimension, tolerance, outputs in (
        ("1/(1+|x|²)", peak, 10, 1e-6, 1),
        ("log(1+|x|²)", logarithm, 20, 1e-5, 1),
        ("cos Σx, sin Σx", wave, 20, 1e-8, 2),
        ("a tanh network", network, 10, 1e-4, 1),
    ):
        box = pa.Box(-np.ones(dimension), np.ones(dimension))
        began = time.perf_counter()
        fit = fit_train(f, box, tolerance=tolerance, outputs=outputs, limits=small)
        describe(name, fit, time.perf_counter() - began)

    box = pa.Box(-np.ones(10), np.ones(10))
    head = fit_train(peak, box, tolerance=1e-6).head()
    z = torch.full((10,), 0.5, dtype=torch.float64, requires_grad=True)
    (slope,) = torch.autograd.grad(head(z), z)
    print(f"gradient of the head at (½, …, ½): {slope[0]:.6f}; of f: {-1 / 3.5**2:.6f}")
    try:
        head.as_attention()
    except pa.PartitaError as error:
        print("written out as plain attention:", error)

    little = fit_train(peak, pa.Box([-1, -1], [1, 1]), tolerance=1e-3).head()
    layers = literal_layers(little, "indexed")
    print(
        f"in two dimensions it can be written out: {layers.num_keys} columns, {layers.num_parameters:,} stored numbers"
    )


if __name__ == "__main__":
    main()
