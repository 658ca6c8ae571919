"""Terms of the bounds, one by one, each where it matters: what is claimed holds, and without the term it would not."""

import numpy as np
import torch

import partita as pa
from partita.heads import GridHead
from partita.kernels import native
from partita.proofs import ScatteredFacts, scattered_terms


def test_summation_rounds_by_no_more_than_its_term(monkeypatch):
    """All values equal: the exact head is constant, so what is left is the rounding of weights and sums."""
    c = pa.compile(
        "3.3 + 0*x0 + 0*x1 + 0*x2 + 0*x3", pa.Box([0] * 4, [1] * 4), method="hard", tolerance=0.1, dtype=torch.float32
    )
    term = next(t for t in c.certificate.terms if t.name == "summation").value
    grid = pa.ProductGrid.uniform(pa.Box([0] * 4, [1] * 4), 5, dtype=np.float32)
    values = torch.full((grid.num_cells, 1), 3.3, dtype=torch.float32)
    head = GridHead(grid, 64 * 25.0, values, half_windows=1, input_shapes=((4,),), output_shape=())
    z = torch.rand(20000, 4, generator=torch.Generator().manual_seed(0))
    monkeypatch.setattr(native, "WORTH", 0)
    paths = {"native": head.evaluate(z), "torch": head.evaluate(z.requires_grad_()).detach()}
    operations = 2**4 + 4 * 2 + 6 * 4 + 8  # as the certificate counts them for a window of two centers on four axes
    for out in paths.values():
        rounded = (out.double() - float(values[0])).abs().max().item()
        assert 0 < rounded <= 1.01 * operations * 2.0**-24 * 3.3
    assert term >= 2.0**-24 * 3.3  # one key only: fewer operations, never none


def test_softness_of_scattered_heads_is_needed_and_enough():
    """A soft softmax looks farther than the covering radius: `E|z − v|² ≤ ρ² + 2W((N−1)/e)/R`."""
    rng = np.random.default_rng(0)
    centers, z = rng.uniform(size=(200, 2)), rng.uniform(size=(4000, 2))
    squares = ((z[:, None] - centers) ** 2).sum(axis=2)
    radius = float(np.sqrt(squares.min(axis=1)).max())
    for rate in (30.0, 300.0, 3000.0):
        weights = np.exp(-rate / 2 * (squares - squares.min(axis=1, keepdims=True)))
        seen = np.sqrt((weights * squares).sum(axis=1) / weights.sum(axis=1)).max()
        facts = ScatteredFacts(
            cells=200,
            dimension=2,
            radius=radius,
            rate=rate,
            exponent_cut=50.0,
            near_cells=200,
            reach=2.0,
            largest=1.0,
            spread=1.0,
            value_error=0.0,
            center_shift=0.0,
            semantics="float64",
        )
        bound = scattered_terms(facts, pa.Modulus(1.0))[0].value
        assert seen <= bound
        if rate == 30.0:
            assert seen > radius  # without softness the bound would be false


def test_clouds_waste_nothing_either():
    """error_bound ≤ 1.01·L·(covering radius + fill distance), also where the balls come out much smaller than allowed."""
    rng = np.random.default_rng(1)
    clumps = np.concatenate([center + 1e-3 * rng.normal(size=(50, 3)) for center in 10 * rng.normal(size=(8, 3))])
    for tolerance in (3.0, 0.1, 0.002):
        c = pa.compile(
            lambda z: z[:, 0],
            pa.PointCloud(clumps, fill_distance=1e-4),
            method="hard",
            tolerance=tolerance,
            lipschitz=1.0,
        )
        assert c.error_bound <= 1.01 * c.certificate.facts["covering_radius"] and c.error_bound <= tolerance
        assert c.attack(samples=1000).error <= c.error_bound
