"""Soft heads on product grids, constant and affine values: every evaluator against an oracle, within the counted roundings."""

import copy
import hashlib
import json
from dataclasses import dataclass, replace

import mpmath
import numpy as np
import pytest
import safetensors.torch
import torch

import partita as pa
from partita import errors, storage
from partita.heads import GridHead, literal_layers
from partita.kernels import grid_torch, native
from partita.kernels.grid_operator import runs_natively
from partita.proofs import literal_rounding
from partita.proofs.certificate import model_digest

EVERYWHERE = dict.fromkeys(("native", "torch"), float("inf"))
NOWHERE = dict.fromkeys(("native", "torch"), 0.0)


@dataclass(frozen=True)
class Case:
    counts: tuple[int, ...]
    sharpness: float
    ghosts: int = 0
    half_windows: int | tuple[int, ...] = 64  # 64: the whole axis
    outputs: int = 1
    affine: bool = False
    dtype: type = np.float64
    at: float = 0.0
    largest: float = 1.0


CASES = [
    Case((9,), 0.2, ghosts=3),
    Case((64,), 2.5, ghosts=6, largest=1e4),
    Case((40,), 0.5, half_windows=12, affine=True),
    Case((1,), 1.0, affine=True),
    Case((12, 12), 0.5, ghosts=4, largest=1e4),
    Case((7, 12), 0.3, ghosts=2, affine=True, outputs=2, at=1e6),
    Case((1, 16), 1.0, affine=True, outputs=9),
    Case((24, 6), 2.0, half_windows=(5, 64), outputs=3),
    Case((5, 4, 6), 0.7, ghosts=1, affine=True, outputs=2, at=-1e6),
    Case((9, 1, 7), 4.0, half_windows=(2, 1, 64), affine=True),
    Case((3, 8, 5), 64.0, half_windows=1, outputs=8, affine=True),
    Case((4, 3, 5, 2), 0.5, outputs=4, affine=True),
    Case((6, 5, 4, 7), 0.4, ghosts=1, outputs=2),
    Case((12, 9), 0.5, ghosts=3, affine=True, outputs=3, dtype=np.float32, largest=1e2),
    Case((5, 4, 6), 1.0, half_windows=(64, 1, 2), affine=True, dtype=np.float32),
    Case((30,), 0.8, ghosts=5, dtype=np.float32, at=1e6),
    Case((4, 4, 4, 4), 0.6, outputs=4, dtype=np.float32),
]
IDS = [f"{'x'.join(map(str, c.counts))} k{c.sharpness} {'affine ' * c.affine}{c.dtype.__name__}" for c in CASES]


def build(case: Case, seed: int = 0) -> tuple[GridHead, pa.ProductGrid]:
    rng, m = np.random.default_rng(seed), len(case.counts)
    side = np.linspace(1.0, 2.0, m) * (64.0 if case.at and case.dtype == np.float32 else 1.0)
    box = pa.Box(case.at - side, case.at + side)
    ghosts = np.minimum(case.ghosts, (np.array(case.counts) - 1) // 2)
    grid = pa.ProductGrid.uniform(box, case.counts, ghosts=ghosts, dtype=case.dtype)
    spacing = box.sides / (np.array(case.counts) - 2 * ghosts)
    values = rng.normal(size=(grid.num_cells, case.outputs)) * case.largest
    slopes = rng.normal(size=(*values.shape, m)) * case.largest
    head = GridHead(
        grid,
        case.sharpness / spacing**2,
        torch.from_numpy(values.astype(case.dtype)),
        value_slopes=torch.from_numpy(slopes.astype(case.dtype)) if case.affine else None,
        half_windows=case.half_windows,
        input_shapes=((m,),),
        output_shape=(case.outputs,),
    )
    return head, grid


def points_for(case: Case, grid: pa.ProductGrid, count: int = 40) -> torch.Tensor:
    """Inside, at corners, on centers, at edges of cells and beyond the box."""
    rng = np.random.default_rng(1)
    box, axes = grid.box, [a[(a >= lo) & (a <= hi)] for a, lo, hi in zip(grid.axes, grid.box.lo, grid.box.hi)]
    edges = [(a[1:] + a[:-1]) / 2 if len(a) > 1 else a for a in axes]
    parts = [box.sample(count, rng), box.corners()]
    parts += [np.stack([rng.choice(a, 6) for a in some], axis=1) for some in (axes, edges)]
    parts.append((box.lo + box.hi) / 2 + 1.3 * (box.sample(6, rng) - (box.lo + box.hi) / 2))
    return torch.from_numpy(np.concatenate(parts).astype(case.dtype))


# ---- the oracle: extended precision, every cell listed, from the named tensors alone ------------------------------


def windows(axes: list[np.ndarray], half_windows: tuple[int, ...], z: np.ndarray) -> list[np.ndarray]:
    """Which centers of each axis count for each point, `(n, P)`: q on either side of x, pushed inside at the ends."""
    found = []
    for i, (centers, q) in enumerate(zip(axes, half_windows)):
        width, count = min(2 * q, len(centers)), len(centers)
        k = np.clip(np.searchsorted(centers, z[:, i], side="right") - 1, 0, max(count - 2, 0))
        start = np.clip(k - width // 2 + 1, 0, count - width)
        found.append((np.arange(count) >= start[:, None]) & (np.arange(count) < start[:, None] + width))
    return found


@dataclass(frozen=True)
class Exact:
    """At each point: the output `(n, out)`, and what first-order roundings may do to it, in units of u."""

    value: np.ndarray
    roundings: np.ndarray
    gradient: np.ndarray


def exact(head: GridHead, z: torch.Tensor, *, additions: int | None = None) -> Exact:
    """The head in extended precision. Roundings: `Σ_i width_i` of |V| for the sums and of |net| for the softmax denominators,
    2 per axis for the weights, `m + 2` to tilt; and scores off by `5u R d²/2 + 16u` an axis, which moves `w|V − net|`.
    """
    tensors = {k: t.double().numpy().astype(np.longdouble) for k, t in head.state_dict().items()}
    x, m = z.double().numpy().astype(np.longdouble), z.shape[1]
    axes = [tensors[f"centers_{i}"] for i in range(m)]
    inside = windows([a.astype(float) for a in axes], head.half_windows, z.double().numpy())
    weights, scores, slopes = np.ones((len(x), 1)), np.zeros((len(x), 1)), np.zeros((len(x), 1, m))
    for i, centers in enumerate(axes):
        d = x[:, i, None] - centers
        s = tensors["inverse_temperature"][i] / 2 * d**2
        e = np.where(inside[i], np.exp(np.where(inside[i], s, np.inf).min(axis=1, keepdims=True) - s), 0)
        w = e / e.sum(axis=1, keepdims=True)
        pull = -tensors["inverse_temperature"][i] * (d - (w * d).sum(axis=1, keepdims=True))  # d log w / dx
        weights = (weights[:, :, None] * w[:, None]).reshape(len(x), -1)
        scores = (scores[:, :, None] + s[:, None]).reshape(len(x), -1)
        grown = np.repeat(slopes, len(centers), axis=1)
        grown[:, :, i] = np.tile(pull, (1, slopes.shape[1]))
        slopes = grown
    values, size = tensors["values"][None], np.abs(tensors["values"])[None]
    tilt = np.zeros((len(x), *tensors["values"].shape[1:], m))
    if "origin" in tensors:
        away = x - tensors["origin"]
        values = values + np.einsum("com,nm->nco", tensors["value_slopes"], away)
        size = size + np.einsum("com,nm->nco", np.abs(tensors["value_slopes"]), np.abs(away))
        tilt = np.einsum("nc,com->nom", weights, tensors["value_slopes"])
    net = np.einsum("nc,nco->no", weights, np.broadcast_to(values, (len(x), *values.shape[1:])))
    mass = np.einsum("nc,nco->no", weights, np.broadcast_to(size, (len(x), *size.shape[1:])))
    widths = sum(min(2 * q, len(a)) for q, a in zip(head.half_windows, axes))
    spread = np.einsum("nc,nco->no", weights * (5 * scores + 16 * m), np.abs(values - net[:, None]))
    count = (widths if additions is None else additions) + 2 * m + (m + 2 if "origin" in tensors else 0)
    gradient = np.einsum("nc,ncm,nco->nom", weights, slopes, np.broadcast_to(values, (len(x), *values.shape[1:])))
    return Exact(net, count * mass + widths * np.abs(net) + spread, gradient + tilt)


def excess(got: torch.Tensor, truth: Exact, dtype: type) -> float:
    """The largest error in units of the roundings that are allowed: at most 1."""
    allowed = truth.roundings * 1.01 * np.finfo(dtype).eps / 2 + np.finfo(dtype).tiny * 1e6
    return float((np.abs(got.detach().double().numpy() - truth.value) / allowed).max())


# ---- evaluators ----------------------------------------------------------------------------------------------------


def natively(head: GridHead, z: torch.Tensor) -> torch.Tensor:
    with torch.no_grad(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(native, "WORTH", 0)  # small batches go through torch otherwise
        assert runs_natively(z, head.operands)
        return head.evaluate(z)


def by_torch(head: GridHead, z: torch.Tensor) -> torch.Tensor:
    return head.evaluate(z.clone().requires_grad_())


needs_numba = pytest.mark.skipif(not native.AVAILABLE, reason="needs numba")
EVALUATORS = [
    pytest.param(natively, None, id="native", marks=needs_numba),
    pytest.param(natively, EVERYWHERE, id="native whole", marks=needs_numba),
    pytest.param(natively, NOWHERE, id="native window", marks=needs_numba),
    pytest.param(by_torch, None, id="torch"),
    pytest.param(by_torch, EVERYWHERE, id="torch contraction"),
    pytest.param(by_torch, NOWHERE, id="torch window"),
]


def choose(monkeypatch: pytest.MonkeyPatch, rule: dict[str, float] | None) -> None:
    if rule is not None:
        monkeypatch.setattr(grid_torch, "_CELLS_PER_READ", rule)
        monkeypatch.setattr(grid_torch, "_CELLS_PER_READ_IN_1D", rule["torch"])


@pytest.mark.parametrize(("evaluate", "rule"), EVALUATORS)
@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_every_evaluator_stays_within_the_counted_roundings(case, evaluate, rule, monkeypatch):
    choose(monkeypatch, rule)
    head, grid = build(case)
    z = points_for(case, grid)
    assert excess(evaluate(head, z), exact(head, z), case.dtype) <= 1


@pytest.mark.parametrize("case", [c for c in CASES if c.half_windows == 64], ids=str)
def test_the_dense_reference_is_the_same_function(case):
    head, grid = build(case)
    z = points_for(case, grid)
    assert excess(head.evaluate_dense(z), exact(head, z, additions=2 * head.num_keys), case.dtype) <= 1


@pytest.mark.parametrize("sharpness", [0.2, 0.5, 1.0, 2.5, 8.0, 64.0])
@pytest.mark.parametrize("affine", [False, True])
def test_mpmath_agrees_at_a_few_points(sharpness, affine):
    case = Case((6, 5, 4), sharpness, ghosts=1, affine=affine)
    head, grid = build(case)
    z = points_for(case, grid, 3)[:5]
    with mpmath.workdps(40):
        for row, got in zip(z.tolist(), natively(head, z).ravel().tolist() if native.AVAILABLE else head(z).tolist()):
            weights = []
            for x, rate, centers in zip(row, head.inverse_temperature.tolist(), head.axes):
                e = [mpmath.exp(-mpmath.mpf(rate) / 2 * (mpmath.mpf(x) - mpmath.mpf(c)) ** 2) for c in centers.tolist()]
                weights.append([a / mpmath.fsum(e) for a in e])
            total = mpmath.mpf(0)
            for j, index in enumerate(np.ndindex(*head.counts)):
                value = mpmath.mpf(float(head.values[j, 0]))
                if affine:
                    tangent = zip(head.value_slopes[j, 0].tolist(), row, head.origin.tolist())
                    value += mpmath.fsum(mpmath.mpf(s) * (mpmath.mpf(x) - mpmath.mpf(o)) for s, x, o in tangent)
                total += weights[0][index[0]] * weights[1][index[1]] * weights[2][index[2]] * value
            assert abs(total - got) < 2e-14


# ---- negative controls: the law above notices -----------------------------------------------------------------------


@pytest.mark.parametrize("name", ["values", "value_slopes", "origin", "inverse_temperature", "centers_1"])
def test_a_number_that_is_slightly_off_is_noticed(name):
    case = CASES[8]
    head, grid = build(case)
    z = points_for(case, grid)
    truth = exact(head, z)
    head.get_buffer(name).view(-1)[0] *= 1 + 1e-9
    assert excess(by_torch(head, z), truth, case.dtype) > 1


def test_a_narrower_window_is_noticed(monkeypatch):
    head, grid = build(CASES[4])
    z = points_for(CASES[4], grid)
    truth = exact(head, z)
    monkeypatch.setattr(GridHead, "half_windows", (5, 5))
    assert excess(by_torch(head, z), truth, np.float64) > 1


def test_scores_that_are_not_centred_are_noticed():
    """`exp(R c x − R c²/2)` is the same weight on paper and loses its digits far from zero."""
    case = Case((9,), 0.5, ghosts=2, at=1e6)
    head, grid = build(case)
    z = points_for(case, grid)
    c, rate = head.axes[0], head.inverse_temperature[0]
    raw = torch.softmax(rate * c * z - rate * c * c / 2, dim=1) @ head.values
    assert excess(raw, exact(head, z), np.float64) > 1
    assert excess(head.evaluate(z), exact(head, z), np.float64) <= 1


def test_float32_products_are_not_cut_by_autocast():
    case = CASES[13]
    head, grid = build(case)
    z = points_for(case, grid)
    truth = exact(head, z)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert excess(by_torch(head, z), truth, np.float32) <= 1
        unguarded = grid_torch.grid_sum(z, head.operands)
        assert excess(unguarded, truth, np.float32) > 1  # negative control


# ---- batches ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("evaluate", "rule"), EVALUATORS)
def test_empty_batches_single_points_and_strides(evaluate, rule, monkeypatch):
    choose(monkeypatch, rule)
    head, grid = build(CASES[8])
    z = points_for(CASES[8], grid)
    together = evaluate(head, z)
    assert evaluate(head, z[:0]).shape == (0, 2) and head(z[:0]).shape == (0, 2) and head(z[0]).shape == (2,)
    assert torch.allclose(torch.cat([evaluate(head, z[i : i + 1]) for i in range(5)]), together[:5], rtol=1e-12)
    strided = torch.stack([z, z], dim=2)[:, :, 0]
    assert not strided.is_contiguous() and torch.allclose(evaluate(head, strided), together, rtol=1e-12)


@pytest.mark.parametrize(("evaluate", "rule"), EVALUATORS)
def test_large_batches_equal_small_ones(evaluate, rule, monkeypatch):
    """Blocks, chunks and threads."""
    choose(monkeypatch, rule)
    monkeypatch.setattr(grid_torch, "_AT_ONCE", 1 << 14)
    case = Case((5, 6), 0.5, half_windows=(64, 2), affine=True, outputs=2)
    head, grid = build(case)
    z = torch.from_numpy(grid.box.sample(5001, np.random.default_rng(2)))
    at_once = evaluate(head, z)
    assert torch.allclose(torch.cat([evaluate(head, part) for part in z.split(501)]), at_once, rtol=1e-12, atol=1e-13)
    assert excess(at_once[-300:], exact(head, z[-300:]), case.dtype) <= 1


def test_what_is_not_a_number_stays_so():
    head, _ = build(CASES[5])
    z = torch.full((3, 2), 1e6, dtype=torch.float64)
    z[1, 0] = torch.nan
    for got in (head.evaluate(z), by_torch(head, z), head.evaluate_dense(z)):
        assert got[1].isnan().all() and got[[0, 2]].isfinite().all()


def test_values_may_be_strided():
    head, grid = build(CASES[8])
    z = points_for(CASES[8], grid)
    before = head.evaluate(z)
    head.values = torch.stack([head.values, head.values], dim=2)[:, :, 0]
    head.value_slopes = torch.stack([head.value_slopes, head.value_slopes], dim=3)[..., 0]
    assert not head.values.is_contiguous() and torch.equal(head.evaluate(z), before)


# ---- gradients -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", [EVERYWHERE, NOWHERE], ids=["contraction", "window"])
@pytest.mark.parametrize("case", [c for c in CASES if c.dtype is np.float64 and len(c.counts) < 4], ids=str)
def test_gradients_in_z_equal_the_oracle(case, rule, monkeypatch):
    choose(monkeypatch, rule)
    head, grid = build(case)
    z = points_for(case, grid, 10)[:10].requires_grad_()
    truth = exact(head, z.detach())
    for o in range(case.outputs):
        (got,) = torch.autograd.grad(head.evaluate(z)[:, o].sum(), z)
        assert np.abs(got.numpy() - truth.gradient[:, o]).max() <= 1e-11 * np.abs(truth.gradient).max() + 1e-12
    assert np.abs(truth.gradient).max() > 1e-3 or case.counts == (1,)


def test_gradients_equal_finite_differences():
    head, grid = build(CASES[8])
    head.value_slopes.requires_grad_()
    head.unfreeze()
    z = points_for(CASES[8], grid, 3)[:3].requires_grad_()
    assert torch.autograd.gradcheck(head.evaluate, (z,), eps=1e-4, atol=1e-4, rtol=1e-4)
    head.evaluate(z).sum().backward()
    assert torch.isclose(head.values.grad.sum(), torch.tensor(6.0).double())  # weights sum to 1: 3 points, 2 outputs
    away = (z.detach() - head.origin).sum(dim=0)
    assert torch.allclose(head.value_slopes.grad.sum(dim=(0, 1)), 2 * away)


# ---- affine values -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("at", [0.0, 1e6])
def test_affine_functions_are_reproduced(at):
    """All cells hold the same affine function, so the weights do not matter; dropping the origin would."""
    head, grid = build(Case((6, 5), 0.5, ghosts=1, affine=True, at=at))
    assert torch.equal(head.origin, torch.full((2,), at).double())
    head.values.fill_(3.0)
    head.value_slopes.copy_(torch.tensor([2.0, -1.0]).double().expand_as(head.value_slopes))
    z = torch.from_numpy(grid.box.sample(50, np.random.default_rng(0)))
    expected = 3 + 2 * (z[:, 0] - at) - (z[:, 1] - at)
    assert torch.allclose(head(z)[:, 0], expected, rtol=0, atol=1e-13)
    head.origin += 0.5
    assert not torch.allclose(head(z)[:, 0], expected, rtol=0, atol=1e-3)  # negative control


@pytest.mark.parametrize("at", [0.0, 100.0])
@pytest.mark.parametrize("shape", [(3,), (2, 2)])
def test_both_layers_agree_and_plain_attention_refuses(shape, at):
    base, grid = build(Case((4, 5), 0.8, ghosts=1, affine=True, outputs=int(np.prod(shape)), at=at))
    parts = {"value_slopes": base.value_slopes, "half_windows": 64, "input_shapes": ((2,),), "output_shape": shape}
    head = GridHead(grid, base.inverse_temperature.numpy(), base.values, **parts)
    z = torch.from_numpy(grid.box.sample(40, np.random.default_rng(0)))
    for form in ("log", "indexed"):
        network = literal_layers(head, form)
        difference = (network(z) - head(z)).abs().max().item()
        assert difference <= literal_rounding(network, grid.box.lo, grid.box.hi) + 1e-13
        assert difference < 1e-9 and network(z).abs().max() > 0.1
    head.origin += 1e-3
    assert (literal_layers(head, "indexed")(z) - network(z)).abs().max() > 1e-4  # negative control
    with pytest.raises(errors.UnsupportedError, match="affine"):
        head.as_attention()


@pytest.mark.parametrize("shift", [False, True])
def test_affine_scores_hold_the_head(shift):
    head, grid = build(CASES[8])
    z = points_for(CASES[8], grid).numpy()[:20]
    scores = head.affine_scores(shift=shift)
    x = z - (head.middle() if shift else 0.0)
    s = x @ scores.slopes.T + scores.offsets
    w = np.exp(s - s.max(axis=1, keepdims=True))
    w /= w.sum(axis=1, keepdims=True)
    values = scores.values + np.einsum("com,nm->nco", scores.value_slopes, x)
    got = np.einsum("nc,nco->no", w, values)
    assert np.abs(got - head.evaluate(torch.from_numpy(z)).numpy()).max() < (1e-11 if shift else 1e-3)


def test_cross_attention_refuses_affine_values():
    base, grid = build(Case((4, 5), 0.8, affine=True))
    parts = {"value_slopes": base.value_slopes, "half_windows": 64, "input_shapes": ((1,), (1,)), "output_shape": ()}
    head = GridHead(grid, base.inverse_temperature.numpy(), base.values, **parts)
    assert head(torch.zeros(3, 1), torch.zeros(3, 1)).shape == (3,)
    with pytest.raises(errors.UnsupportedError, match="affine"):
        literal_layers(head, "indexed")


def test_state_dict_has_plain_names_and_everything_follows():
    head, grid = build(CASES[8])
    plain = {f"centers_{i}" for i in range(3)} | {"inverse_temperature", "values"}
    assert set(head.state_dict()) == plain | {"value_slopes", "origin"}
    assert set(build(CASES[4])[0].state_dict()) == {"centers_0", "centers_1", "inverse_temperature", "values"}
    cells = 5 * 4 * 6
    assert head.num_parameters == cells * 2 * (1 + 3) + (5 + 4 + 6) + 3 + 3
    z = points_for(CASES[8], grid)
    other = copy.deepcopy(head).unfreeze()
    assert [n for n, _ in other.named_parameters()] == ["values"] and set(other.state_dict()) == set(head.state_dict())
    assert torch.allclose(other.freeze()(z), head(z), rtol=1e-14)
    other.value_slopes.zero_()
    other.load_state_dict(head.state_dict())
    assert torch.equal(other(z), head(z))
    single, small = build(CASES[13])[0], points_for(CASES[13], build(CASES[13])[1])
    double = copy.deepcopy(single).double()
    assert double.origin.dtype == torch.float64
    assert torch.allclose(double(small), single(small).double(), rtol=1e-4, atol=1e-2)


@pytest.mark.parametrize(
    "parts",
    [
        {"value_slopes": torch.zeros(20, 2, 3).double()},
        {"value_slopes": torch.zeros(20, 2).double()},
        {"value_slopes": torch.zeros(19, 2, 2).double()},
        {"value_slopes": torch.zeros(20, 2, 2)},
        {"value_slopes": torch.zeros(20, 2, 2).double(), "origin": torch.zeros(3).double()},
        {"value_slopes": torch.zeros(20, 2, 2).double(), "origin": torch.zeros(2)},
        {"origin": torch.zeros(2).double()},
    ],
    ids=["m", "rank", "cells", "dtype", "origin", "origin dtype", "origin alone"],
)
def test_slopes_that_do_not_fit_are_refused(parts):
    grid = pa.ProductGrid.uniform(pa.Box([0, 0], [1, 1]), [4, 5])
    fixed = {"half_windows": 64, "input_shapes": ((2,),), "output_shape": (2,)}
    with pytest.raises(errors.ShapeError, match=r"slopes|origin"):
        GridHead(grid, 1.0, torch.zeros(20, 2).double(), **fixed, **parts)


# ---- files -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def certified():
    return pa.compile("x0*x1, x0 - x1", pa.Box([-1, -1], [1, 1]), tolerance=0.9, method="hard")


def stored(certified, folder, *, affine: bool = True, dtype: type = np.float64):
    """A soft head with ghosts over the certified one's domain, and a certificate that speaks of its tensors."""
    grid = pa.ProductGrid.uniform(pa.Box([-1, -1], [1, 1]), [7, 9], ghosts=2, dtype=dtype)
    rng = np.random.default_rng(3)
    head = GridHead(
        grid,
        3.0,
        torch.from_numpy(rng.normal(size=(63, 2)).astype(dtype)),
        value_slopes=torch.from_numpy(rng.normal(size=(63, 2, 2)).astype(dtype)) if affine else None,
        half_windows=(64, 3),
        input_shapes=((2,),),
        output_shape=(2,),
    )
    known = replace(
        certified.certificate,
        semantics=np.dtype(dtype).name,
        model={**certified.certificate.model, "sha256": model_digest(head.state_dict())},
    )
    storage.save(head, known, certified.target, folder, outside="raise", why=())
    return head, grid


@pytest.mark.parametrize("affine", [False, True])
@pytest.mark.parametrize("dtype", [np.float64, np.float32])
def test_soft_heads_come_back_from_files(certified, tmp_path, affine, dtype):
    head, grid = stored(certified, tmp_path / "head", affine=affine, dtype=dtype)
    again = pa.load(tmp_path / "head")
    z = torch.from_numpy(grid.box.sample(30, np.random.default_rng(0)).astype(dtype))
    assert torch.equal(again.head(z), head(z)) and again.head.half_windows == head.half_windows
    assert {k: t.tolist() for k, t in again.head.state_dict().items()} == {
        k: t.tolist() for k, t in head.state_dict().items()
    }
    assert [a.tolist() for a in again.partition.axes] == [a.tolist() for a in grid.axes]  # ghosts included
    assert json.loads((tmp_path / "head" / "head.json").read_text())["version"] == 1


def forge(folder, change) -> None:
    """Tensors, certificate, hashes and seal rewritten as someone would who knows the format."""
    tensors = safetensors.torch.load_file(folder / "head.safetensors")
    change(tensors)
    safetensors.torch.save_file(tensors, folder / "head.safetensors")
    certificate = json.loads((folder / "certificate.json").read_text())
    own = {k.removeprefix("head."): t for k, t in tensors.items()}
    certificate["model"]["sha256"] = model_digest(own)
    (folder / "certificate.json").write_text(json.dumps(certificate))
    described = json.loads((folder / "head.json").read_text())
    described.pop("seal")
    for name in ("head.safetensors", "certificate.json"):
        described["sha256"][name] = hashlib.sha256((folder / name).read_bytes()).hexdigest()
    text = json.dumps(described, sort_keys=True, ensure_ascii=False, separators=(",", ":"))
    described["seal"] = hashlib.sha256(text.encode()).hexdigest()
    (folder / "head.json").write_text(json.dumps(described))


@pytest.mark.parametrize(
    "change",
    [
        lambda t: t.pop("head.origin"),
        lambda t: t.pop("head.value_slopes"),
        lambda t: t.update({"head.origin": torch.zeros(3).double()}),
        lambda t: t.update({"head.origin": torch.zeros(2, 1).double()}),
        lambda t: t.update({"head.origin": torch.zeros(2)}),
        lambda t: t.update({"head.origin": torch.full((2,), torch.nan).double()}),
        lambda t: t.update({"head.value_slopes": torch.zeros(63, 4).double()}),
        lambda t: t.update({"head.value_slopes": torch.zeros(64, 2, 2).double()}),
        lambda t: t.update({"head.value_slopes": torch.zeros(63, 2, 3).double()}),
        lambda t: t.update({"head.value_slopes": torch.zeros(63, 2, 2)}),
        lambda t: t.update({"head.powers": torch.zeros(63).double()}),
    ],
)
def test_forged_slopes_are_refused(certified, tmp_path, change):
    stored(certified, tmp_path / "head")
    forge(tmp_path / "head", lambda t: None)
    pa.load(tmp_path / "head")  # the forger can write: what follows is refused for what it says
    forge(tmp_path / "head", change)
    with pytest.raises((errors.FormatError, errors.ShapeError)):
        pa.load(tmp_path / "head")


def test_slopes_of_another_head_are_noticed(certified, tmp_path):
    head, _ = stored(certified, tmp_path / "head")
    head.value_slopes[5] += 1e-9
    with pytest.raises(errors.UnsupportedError, match="changed after"):
        storage.save(
            head, pa.load(tmp_path / "head").certificate, certified.target, tmp_path / "b", outside="raise", why=()
        )


# ---- graphs ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(CASES[4], id="soft", marks=pytest.mark.slow),
        pytest.param(CASES[8], id="affine"),
        pytest.param(CASES[14], id="mixed single", marks=pytest.mark.slow),
    ],
)
def test_onnxruntime_stays_within_the_counted_roundings(case, tmp_path):
    ort = pytest.importorskip("onnxruntime")
    head, grid = build(case)
    session = ort.InferenceSession(storage.export_onnx(head, tmp_path / "head.onnx"))
    z = points_for(case, grid)
    for count in (1, 7, len(z)):
        (got,) = session.run(None, {"z": z[:count].numpy()})
        assert excess(torch.from_numpy(got), exact(head, z[:count]), case.dtype) <= 1


@pytest.mark.filterwarnings("ignore:.*get_attr:UserWarning")  # torch 2.6, about constants
@pytest.mark.parametrize("case", [CASES[8], CASES[13]], ids=["double", "single"])
def test_exported_programs_take_any_batch(case):
    head, grid = build(case)
    z = points_for(case, grid)
    dynamic = (({0: torch.export.Dim("batch", max=1 << 40)},),)
    program = torch.export.export(head, (z[:3],), dynamic_shapes=dynamic).module()
    for count in (1, len(z)):
        assert excess(program(z[:count]), exact(head, z[:count]), case.dtype) <= 1
