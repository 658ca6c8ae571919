"""Overflow, underflow and 0·∞ in every evaluator: the right number or a clear error, never NaN.

Domains, inverse temperatures, values, slopes, powers and cores are scaled towards both ends of the dtype's range. The
reference is one softmax over all cells in extended precision, whose range is far wider.
"""

import warnings
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch import nn

import partita as pa
from partita.errors import DomainError, PartitaError, ShapeError
from partita.geometry import Box, ProductGrid
from partita.heads import FoldedHead, GridHead, ScatteredHead, TrainHead, literal_layers
from partita.kernels import grid_torch, native
from partita.ramps import ramp

if np.finfo(np.longdouble).maxexp < 16000:
    pytest.skip("needs an extended precision with a wider range", allow_module_level=True)

SINGLE, DOUBLE = torch.float32, torch.float64
SCALES = {
    SINGLE: [1e-44, 1e-38, 1e-30, 1e-20, 1e-19, 1e-10, 1.0, 1e10, 1e18, 1e19, 1e20, 1e30, 1e37, 3e38],
    DOUBLE: [5e-324, 1e-308, 1e-250, 1e-160, 1e-154, 1e-50, 1.0, 1e50, 1e150, 1e154, 1e160, 1e250, 1e305, 1.7e308],
}
SHAPES = {"input_shapes": ((2,),), "output_shape": (2,)}
rng = np.random.default_rng(7)
UNIT = {name: rng.uniform(-1, 1, shape) for name, shape in (
    ("centers", (300, 2)), ("values", (300, 2)), ("slopes", (300, 2, 2)), ("powers", (300,)),
    ("grid values", (54, 2)), ("grid slopes", (54, 2, 2)), ("core 0", (1, 9, 3)), ("core 1", (3, 6, 2)),
)}  # fmt: skip
POINTS = np.concatenate([rng.uniform(-1, 1, (40, 2)), [[-1, -1], [1, 1], [0, 0]]])


def tensor(array: np.ndarray, scale: float, dtype: torch.dtype) -> torch.Tensor:
    with np.errstate(all="ignore"):
        return torch.from_numpy(array * scale).to(dtype)


def make(
    kind: str, dtype: torch.dtype, domain: float, rate: float, value: float, slope: float, other: float
) -> FoldedHead:
    """A head over [−domain, domain]² whose R, values, slopes and powers (or first core) are scaled; all 1 is a mild head."""
    if kind == "scattered":
        return ScatteredHead(
            tensor(UNIT["centers"], domain, dtype),
            float(np.float64(800.0 * rate) / domain / domain),
            tensor(UNIT["values"], value, dtype),
            powers=tensor(UNIT["powers"] / 400, other * domain * domain, dtype),
            value_slopes=tensor(UNIT["slopes"], slope / domain, dtype),
            **SHAPES,
        )
    grid = ProductGrid.uniform(
        Box([-domain] * 2, [domain] * 2), [9, 6], dtype=np.float32 if dtype == SINGLE else np.float64
    )
    rates = np.array([8 * 4.5**2, 8 * 3.0**2]) * rate / domain / domain
    if kind == "train":
        cores = [tensor(UNIT["core 0"], other, dtype), tensor(UNIT["core 1"], value / other, dtype)]
        return TrainHead(grid, rates, cores, **SHAPES)
    slopes = tensor(UNIT["grid slopes"], slope / domain, dtype)
    windows = (3, 3) if rate >= 1 else (9, 9)
    return GridHead(
        grid, rates, tensor(UNIT["grid values"], value, dtype), value_slopes=slopes, half_windows=windows, **SHAPES
    )


def cases(kind: str, dtype: torch.dtype) -> Iterator[dict[str, float]]:
    mild = {"domain": 1.0, "rate": 1.0, "value": 1.0, "slope": 1.0, "other": 1.0}
    for name in mild:
        for scale in SCALES[dtype]:
            yield mild | {name: scale}
    for domain in SCALES[dtype]:
        for scale in SCALES[dtype][::3]:
            yield mild | {"domain": domain, "rate": scale}
            yield mild | {"value": domain, "other": scale}


def wide(t: torch.Tensor | None) -> np.ndarray:
    assert t is not None
    return t.detach().double().numpy().astype(np.longdouble)


def reference(head: FoldedHead, z: torch.Tensor) -> tuple[np.ndarray, float]:
    """The softmax over all cells in extended precision, and the largest number that is averaged."""
    x = wide(z)
    if isinstance(head, ScatteredHead):
        difference = x[:, None, :] - wide(head.centers)
        scores = wide(head.inverse_temperature) / 2 * (wide(head.powers) - (difference**2).sum(axis=2))
        values = wide(head.values) + (wide(head.value_slopes) * difference[:, :, None, :]).sum(axis=3)
    else:
        rates = wide(head.inverse_temperature)
        first, second = (-r / 2 * (x[:, i, None] - wide(a)) ** 2 for i, (r, a) in enumerate(zip(rates, head.axes)))
        scores = (first[:, :, None] + second[:, None, :]).reshape(len(x), -1)
        if isinstance(head, GridHead):
            tilt = (wide(head.value_slopes) * (x - wide(head.origin))[:, None, None, :]).sum(axis=3)
            values = wide(head.values) + tilt
        else:
            table = np.einsum("aib,bjc->ijc", *(wide(c) for c in head.cores)).reshape(-1, 2)
            values = np.broadcast_to(table, (len(x), *table.shape))
    weights = np.exp(scores - scores.max(axis=1, keepdims=True))
    weights /= weights.sum(axis=1, keepdims=True)
    return (weights[:, :, None] * values).sum(axis=1), float(np.abs(values).max())


def evaluators(head: FoldedHead, z: torch.Tensor, monkeypatch) -> Iterator[tuple[str, torch.Tensor]]:
    """Every path through the head; a PartitaError counts as an answer."""
    monkeypatch.setattr(native, "WORTH", 0, raising=False)  # small batches go through torch otherwise
    ways = {"default": lambda: head.evaluate(z), "dense": lambda: head.evaluate_dense(z)}
    ways["tracked"] = lambda: head.evaluate(z.clone().requires_grad_()).detach()
    for name, work in ways.items():
        for cells in (0.0, 1e9) if isinstance(head, GridHead) and name != "dense" else (None,):
            if cells is not None:  # gather windows, or run over all cells
                monkeypatch.setattr(grid_torch, "_CELLS_PER_READ", {"native": cells, "torch": cells})
            try:
                yield f"{name} {cells}", work()
            except PartitaError:
                yield f"{name} {cells}", z.new_zeros(0)


@pytest.mark.parametrize("dtype", [SINGLE, DOUBLE], ids=str)
@pytest.mark.parametrize("kind", ["grid", "scattered", "train"])
def test_heads_give_the_right_number_or_a_clear_error(kind, dtype, monkeypatch):
    right = refused = 0
    for case in cases(kind, dtype):
        try:
            with np.errstate(all="ignore"):
                head = make(kind, dtype, **case)
        except (PartitaError, OverflowError):
            refused += 1
            continue
        z = tensor(POINTS, case["domain"], dtype)
        try:
            head.check_range(np.full(2, -case["domain"]), np.full(2, case["domain"]))
            fits = True
        except DomainError:
            refused, fits = refused + 1, False
        with np.errstate(all="ignore"):
            truth, largest = reference(head, z)
        tiny = float(np.finfo(np.float32 if dtype == SINGLE else np.float64).smallest_subnormal)
        allowed = (3e-4 if dtype == SINGLE else 1e-11) * largest + 64 * tiny
        for name, found in evaluators(head, z, monkeypatch):
            assert not found.isnan().any() and not found.isinf().any(), (case, name)
            if fits:
                assert len(found) == len(z), (case, name)
                assert np.abs(found.double().numpy() - truth).max() <= allowed, (case, name)
        right += fits
    assert right >= 25 and refused >= 15  # neither answer is given to everything


@pytest.mark.parametrize("dtype", [SINGLE, DOUBLE], ids=str)
@pytest.mark.parametrize("form", ["dot products", "indexed", "log"])
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy says so when tensors are made of overflowing numbers
def test_layers_give_numbers_or_a_clear_error(form, dtype):
    for case in cases("grid", dtype):
        try:
            with np.errstate(all="ignore"):
                base = make("grid", dtype, **case)
                head = GridHead(
                    base.partition(Box([-case["domain"]] * 2, [case["domain"]] * 2)),
                    base.inverse_temperature.double().numpy(),
                    base.values,
                    half_windows=9,
                    **SHAPES,
                )
                module: nn.Module = head.as_attention() if form == "dot products" else literal_layers(head, form)
            found = module(tensor(POINTS, case["domain"], dtype))
        except (PartitaError, OverflowError):
            continue
        assert bool(found.isfinite().all()), case


def test_each_rule_of_the_range_is_named():
    """One head per rule: what is too large or too small is said, with its size and the limit."""
    mild = {"domain": 1.0, "rate": 1.0, "value": 1.0, "slope": 1.0, "other": 1.0}
    for kind, change, box, match in [
        ("grid", {}, 1e38, r"may reach 1e\+38 and overflows float32"),
        ("grid", {}, 1e19, r"R_i\(z_i − c_i\)²/2 may reach"),
        ("grid", {"rate": 1e-40}, 1.0, "half the inverse temperature .* is not a normal float32"),
        ("grid", {"value": 1e38}, 1.0, "a value may reach"),
        ("grid", {"slope": 1e38}, 1.0, "a slope may reach"),
        ("scattered", {}, 1e19, r"\|z − c\|² with the powers may reach"),
        ("scattered", {"other": 1e38, "rate": 1e3}, 1.0, "a score may reach"),
        ("scattered", {"rate": 3.7e34}, 0.05, "underflow in float32 may change scores"),
        ("train", {"other": 1e20, "value": 1e38}, 1.0, "product of the cores"),
        ("train", {"other": 1e-42, "value": 1e-5}, 1.0, "underflow in float32 may change"),
    ]:
        head = make(kind, SINGLE, **mild | change)
        with pytest.raises(DomainError, match=match):
            head.check_range([-box] * 2, [box] * 2)
        make(kind, SINGLE, **mild).check_range([-1, -1], [1, 1])
    with pytest.raises(ShapeError, match="expected 2"):
        make("grid", SINGLE, **mild).check_range([0], [1])


@pytest.mark.parametrize("dtype", [SINGLE, DOUBLE], ids=str)
def test_ramps_keep_their_bound_or_refuse(dtype):
    kept = 0
    for scale in SCALES[dtype]:
        for size in SCALES[dtype][::2]:
            try:
                with np.errstate(all="ignore"):
                    box = Box([-1 / scale], [1 / scale])
                    built = ramp([scale * size], 0.0, (-0.5 * size, 0.75 * size), anchors=9, domain=box, dtype=dtype)
                x = np.linspace(-1 / scale, 1 / scale, 41)[:, None]
                found = built.head(torch.from_numpy(x))[:, 0].double().numpy()
            except (PartitaError, OverflowError):
                continue
            exact = np.clip(x[:, 0].astype(np.longdouble) * scale * size, -0.5 * size, 0.75 * size)
            assert np.abs(found - exact).max() <= built.error_bound, (scale, size)
            kept += 1
    assert kept >= 10


@pytest.mark.parametrize("dtype", [SINGLE, DOUBLE], ids=str)
@pytest.mark.parametrize(
    "activation", [nn.ReLU, nn.Tanh, nn.SiLU, pytest.param(nn.GELU, marks=pytest.mark.slow), nn.Hardtanh]
)
def test_networks_keep_their_bound_or_refuse(activation, dtype):
    torch.manual_seed(1)
    kept = 0
    for scale in SCALES[dtype][::2]:
        mlp = nn.Sequential(nn.Linear(2, 4), activation(), nn.Linear(4, 1)).double().eval()
        with torch.no_grad(), np.errstate(all="ignore"), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            mlp[0].weight /= scale
            mlp[2].weight *= min(scale, 1e30)
            z = POINTS * scale
            try:
                net = pa.attention_from_mlp(
                    mlp, Box([-scale] * 2, [scale] * 2), 1e-2 * min(scale, 1e30) + 1e-3, dtype=dtype
                )
                found = net(z).double().numpy()
            except PartitaError:
                continue
            exact = mlp(torch.from_numpy(z)).numpy()
        assert np.abs(found - exact).max() <= net.error_bound, scale
        kept += 1
    assert kept >= 1


@pytest.mark.parametrize("dtype", [SINGLE, DOUBLE], ids=str)
@pytest.mark.parametrize("loss", ["squared", "logistic"])
def test_descents_stay_finite_or_refuse(loss, dtype):
    kept = 0
    for scale in SCALES[dtype]:
        try:
            with np.errstate(all="ignore"):
                boxes = {"x": Box([-scale] * 2, [scale] * 2), "w": Box([-3 / scale] * 2, [3 / scale] * 2)}
                step = min(max(0.1 / scale / scale, 5e-324), 1e308)
                net = pa.in_context.gradient_descent(loss, 3, step, y=Box([0], [1]), **boxes, dtype=dtype)
            found = net(np.column_stack([POINTS * scale, np.abs(POINTS[:, 0])]))
        except (PartitaError, OverflowError, ZeroDivisionError):
            continue
        assert bool(found.isfinite().all()), scale
        kept += 1
    assert kept >= 1
