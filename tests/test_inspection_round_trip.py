"""There and back: compiled heads read without help, trained copies measured, heads hardened."""

import copy
import math

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

import partita as pa
from partita.errors import ShapeError, UnsupportedError
from partita.functions.probing import split_flat
from partita.geometry import polygons
from partita.inspection.reading import read_queries
from partita.inspection.round_trip import temperature
from partita.papers import indicator, reassignment


def inspected(module, *inputs):
    with torch.no_grad(), pa.inspect.capture(module) as heads:
        module(*inputs)
    (record,) = heads
    return record


def scattered(points=11, seed=0):
    rng = np.random.default_rng(seed)
    return pa.PowerDiagram(rng.uniform(-1, 1, (points, 2)))


COMPILED = {
    "typed 2-D": lambda: pa.compile(
        "sin(3*x0) + x0*cos(2*x1)", pa.Box([-1, -1], [1, 1]), tolerance=0.05, method="hard"
    ),
    "soft": lambda: pa.compile("sin(3*x0) + x0*cos(2*x1)", pa.Box([-1, -1], [1, 1]), tolerance=1e-2),
    "one axis": lambda: pa.compile("sin(5*x)", pa.Box([-2], [2]), tolerance=0.2, method="hard"),
    "sequence": lambda: pa.compile(
        "x0*x1, x2; x3, x0 - x3", pa.Box.sequence(-1, 1, tokens=2, dim=2), tolerance=1.0, method="hard"
    ),
    "cross": lambda: pa.compile(
        lambda k, q: np.abs(k - q), (pa.Box([-1], [1]), pa.Box([0], [2])), tolerance=0.5, lipschitz=2.0, method="hard"
    ),
    "float32": lambda: pa.compile("x0*x1", pa.Box([-1, -1], [1, 1]), tolerance=0.3, dtype=torch.float32, method="hard"),
}


@pytest.mark.parametrize("name", COMPILED)
def test_a_compiled_head_comes_back(name):
    """Cells, values and temperature of `as_attention()`, from q, k and v alone."""
    compiled = COMPILED[name]()
    plain = compiled.head.as_attention()
    z = torch.from_numpy(compiled.target.domain.sample(500, np.random.default_rng(0))).to(plain.key.dtype)
    z = z.reshape(500, -1)
    record = inspected(plain, *map(torch.as_tensor, split_flat(z.numpy(), plain.input_shapes)))
    back, snapshot = pa.inspect.recover(record), record.snapshots[0]
    inside = snapshot.points  # the inputs, less the origin that as_attention takes off
    assert np.allclose(inside + plain.origin.double().numpy(), z.double().numpy(), atol=1e-6)
    margin = compiled.partition.margin(z.double().numpy())
    clear = margin > (1e-4 if plain.key.dtype == torch.float32 else 1e-12) * margin.max()
    cells = compiled.partition.cell(z.double().numpy())
    assert clear.mean() > 0.95 and back.partition.cell(inside)[clear].tolist() == cells[clear].tolist()
    assert np.array_equal(back.values, plain.value.double().numpy())
    rates = np.broadcast_to(compiled.head.inverse_temperature.double().numpy(), back.partition.dimension)
    assert np.allclose(back.temperature.rates, rates, rtol=1e-3 if plain.key.dtype == torch.float32 else 1e-6)
    assert not back.temperature.reason
    wrong = pa.MaxAffine(back.partition.slopes[::-1], back.partition.offsets)  # negative control
    assert wrong.cell(inside)[clear].tolist() != cells[clear].tolist()


def test_the_polygons_are_the_same():
    diagram = scattered()
    head = indicator(diagram, pa.Box([-1, -1], [1, 1]), margin=0.05, epsilon=1e-3).head
    plain = head.as_attention()
    record = inspected(plain, torch.from_numpy(np.random.default_rng(1).uniform(-1, 1, (50, 2))))
    origin = plain.origin.numpy()
    found = polygons(pa.inspect.recover(record).partition, pa.Box([-1, -1] - origin, [1, 1] - origin))
    for mine, truth in zip(found, polygons(diagram, pa.Box([-1, -1], [1, 1]))):
        assert len(mine) == len(truth)
        assert np.allclose(
            sorted(map(tuple, np.round(mine + origin, 9))), sorted(map(tuple, np.round(truth, 9))), atol=1e-8
        )


def test_the_temperature_of_equal_powers():
    back = temperature(pa.MaxAffine(*affine(scattered().centers, 3.7)))
    assert back.inverse_temperature == pytest.approx(3.7) and back.rates.shape == (2,)
    shift = back.centers - scattered().centers
    assert np.allclose(shift, shift[0])  # centers up to a common shift


def affine(centers, rate, common=(0.4, -1.0)):
    """Scores −R|x − c|²/2 less their common square, plus a common affine function."""
    return rate * centers + np.array(common), -rate * (centers**2).sum(axis=1) / 2 + 0.7


@pytest.mark.parametrize(
    ("slopes", "offsets", "words"),
    [
        ([[0.0, 0.0], [1.0, 0.0]], [0.0, -0.5], "sphere"),
        ([[-1.0, -1.0], [-1.0, 1.0], [1.0, -1.0], [1.0, 1.0]], [0.0] * 4, "sphere"),
        ([[1.0, 2.0]] * 3, [0.0, 1.0, 2.0], "same slope"),
        (
            [[0.0, 0.0], [1.0, 0.3], [0.2, 1.0], [-1.0, 0.5], [0.4, -1.1], [2.0, 2.0]],
            [0.0, 3.0, -2.0, 1.0, 0.5, 0.1],
            "not Voronoi",
        ),
        ([[-1.0], [0.0], [2.0]], [1.0, 0.0, 4.0], "not Voronoi"),
    ],
    ids=["two keys", "corners of a box", "no slopes", "other powers", "negative rate"],
)
def test_when_the_temperature_cannot_be_told(slopes, offsets, words):
    found = temperature(pa.MaxAffine(slopes, offsets))
    assert found.rates is None and found.inverse_temperature is None and words in found.reason


def test_on_a_sphere_every_temperature_makes_the_same_weights():
    """Why it cannot be told: another R with centers to match gives the same scores up to a common function."""
    corners = np.array([[-1.0, -1.0], [-1.0, 1.0], [1.0, -1.0], [1.0, 1.0]])
    x = np.random.default_rng(0).normal(size=(20, 2))
    for rate in (0.5, 2.0, 9.0):
        distance = ((x[:, None] - corners / rate) ** 2).sum(axis=2)
        scores = -rate * distance / 2
        assert np.allclose(scores - scores[:, :1], x @ corners.T - (x @ corners.T)[:, :1])


def test_a_rate_per_axis_is_found():
    rng = np.random.default_rng(0)
    centers, rates = rng.normal(size=(30, 3)), np.array([1.0, 4.0, 9.0])
    found = temperature(pa.MaxAffine(centers * rates, -(centers**2 * rates).sum(axis=1) / 2))
    assert np.allclose(found.rates, rates) and found.inverse_temperature is None


class Trainable(nn.Module):
    """A copy of a compiled head whose keys and values are parameters."""

    def __init__(self, plain):
        super().__init__()
        self.register_buffer("origin", plain.origin.clone())
        self.key, self.value = nn.Parameter(plain.key.clone()), nn.Parameter(plain.value.clone())

    def forward(self, z):
        q = torch.cat([z - self.origin, torch.ones_like(z[:, :1])], dim=1)
        return functional.scaled_dot_product_attention(q[None], self.key[None], self.value[None], scale=1.0)[0]


def test_a_trained_copy_shows_how_far_each_cell_moved():
    diagram, rng = scattered(), np.random.default_rng(2)
    values = rng.normal(size=(11, 1))
    head = reassignment(diagram.to_max_affine(), values, pa.Box([-1, -1], [1, 1]), margin=0.05, tolerance=0.05).head
    plain = head.as_attention()
    z = torch.from_numpy(rng.uniform(-1, 1, (400, 2)))
    before = inspected(plain, z)
    still = Trainable(plain)
    same = pa.inspect.moves(before, inspected(still, z))
    assert all(
        m.overlap == 1 and m.drift == 0 and m.value_change == 0 and m.slope_change < 1e-12 for m in same if m.before
    )
    optimizer = torch.optim.Adam(still.parameters(), lr=0.02)
    for _ in range(30):
        optimizer.zero_grad()
        (still(z) - torch.sin(3 * z[:, :1])).square().mean().backward()
        optimizer.step()
    after = inspected(still, z)
    moved = pa.inspect.moves(before, after)
    first, second = read_queries(before.snapshots[0]).cells, read_queries(after.snapshots[0]).cells
    assert sum(m.before for m in moved) == sum(m.after for m in moved) == 400 and len(moved) == 11
    for m in moved:
        was, now = set(np.flatnonzero(first == m.key)), set(np.flatnonzero(second == m.key))
        assert m.overlap == pytest.approx(len(was & now) / len(was | now)) if was | now else math.isnan(m.overlap)
        assert m.value_change == pytest.approx(float((still.value.detach() - plain.value)[m.key].norm()))
    assert (
        any(m.overlap < 1 for m in moved)
        and any(m.drift > 0 for m in moved)
        and set(moved[0].row()) >= {"key", "overlap"}
    )
    with pytest.raises(ShapeError, match="two versions of one head"):
        pa.inspect.moves(before, inspected(still, z[:10]))


def hard_by_hand(q, k, v, heads):
    """Attention with these heads' softmax replaced by argmax."""
    scores = q @ k.mT / math.sqrt(q.shape[-1])
    weights = torch.softmax(scores, dim=-1)
    one_hot = functional.one_hot(scores.argmax(dim=-1), scores.shape[-1]).to(weights.dtype)
    chosen = torch.tensor([h in heads for h in range(q.shape[1])])[None, :, None, None]
    return torch.where(chosen, one_hot, weights) @ v


class Two(nn.Module):
    """Two attention layers that can be told to be hard by hand: the oracle of `hardened`."""

    def __init__(self):
        super().__init__()
        self.qkv = nn.ModuleList(nn.Linear(8, 24) for _ in range(2))
        self.hard = ((), ())

    def forward(self, x):
        for layer, hard in zip(self.qkv, self.hard):
            q, k, v = (t.unflatten(-1, (4, 2)).transpose(1, 2) for t in layer(x).chunk(3, dim=-1))
            out = hard_by_hand(q, k, v, hard) if hard else functional.scaled_dot_product_attention(q, k, v)
            x = x + out.transpose(1, 2).flatten(2)
        return x


@pytest.fixture
def model():
    torch.manual_seed(0)
    return Two().double().eval()


@pytest.fixture
def x():
    return torch.randn(3, 6, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def test_hardened_heads_answer_with_their_tables(model, x):
    with torch.no_grad():
        plain = model(x)
        with pa.inspect.hardened(model, [("Two", 1), ("Two#1", 3)]):
            got = model(x)
        model.hard = ((1,), (3,))
        assert torch.allclose(got, model(x)) and not torch.allclose(got, plain)
        model.hard = ((), ())
        assert torch.equal(model(x), plain)  # and afterwards nothing is left


@pytest.mark.parametrize("factor", [0.0, 0.5, 1.0, 3.0, math.inf])
def test_multi_head_modules_and_factors(factor, x):
    """nn.MultiheadAttention against the same with its queries multiplied; the mean at 0, the table at infinity."""
    torch.manual_seed(0)
    layer = nn.MultiheadAttention(8, 4, batch_first=True).double().eval()
    mask = torch.ones(6, 6).triu(1).bool()
    with torch.no_grad(), pa.inspect.hardened(layer, [("MultiheadAttention", 2)], factor=factor) as met:
        got, _ = layer(x, x, x, attn_mask=mask)
    assert met == {"MultiheadAttention": 4}
    q, k, v = (
        functional.linear(x, w, b).unflatten(-1, (4, 2)).transpose(1, 2)
        for w, b in zip(layer.in_proj_weight.chunk(3), layer.in_proj_bias.chunk(3))
    )
    scores = (q @ k.mT / math.sqrt(2)).masked_fill(mask, -torch.inf)
    weights = torch.softmax(scores, dim=-1)
    if math.isinf(factor):
        weights[:, 2] = functional.one_hot(scores[:, 2].argmax(dim=-1), 6).double()
    else:
        weights[:, 2] = torch.softmax(
            torch.where(mask, -torch.inf, factor * scores[:, 2].nan_to_num(neginf=0.0)), dim=-1
        )
    expected = layer.out_proj((weights @ v).transpose(1, 2).flatten(2))
    assert torch.allclose(got, expected)


def test_harden_reports_the_change_of_the_loss(model, x):
    target = torch.randn(3, 6, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(2))

    def loss(m):
        return (m(x) - target).square().mean()

    report = pa.inspect.harden(model, loss)
    with torch.no_grad():
        base = float(loss(model))
        assert report.loss == pytest.approx(base) and len(report.heads) == 8
        for row in report.heads:
            model.hard = ((row.head,), ()) if row.layer == "Two" else ((), (row.head,))
            assert row.hardened == pytest.approx(float(loss(model)) - base)
        model.hard = (tuple(range(4)), tuple(range(4)))
        assert report.together == pytest.approx(float(loss(model)) - base)
    model.hard = ((), ())
    few = pa.inspect.harden(model, loss, heads=[("Two", 2)], factor=2.0)
    assert len(few.heads) == 1 and few.heads[0].averaged == pytest.approx(report.heads[2].averaged)
    assert few.together == pytest.approx(few.heads[0].hardened) and few.to_json()["factor"] == 2.0
    unchanged = pa.inspect.harden(model, loss, heads=[("Two", 2)], factor=1.0)
    assert abs(unchanged.heads[0].hardened) < 1e-12 < abs(few.heads[0].hardened)
    assert "loss" in str(report) and {"layer", "head", "hardened", "averaged", "kind"} == set(report.rows()[0])


def test_a_lookup_and_an_average_are_told_apart():
    """One head with sharp scores, one with none, in one layer; the loss needs both."""

    class Pair(nn.Module):
        def forward(self, x):
            sharp = torch.stack([30 * x, 0 * x], dim=1)
            return functional.scaled_dot_product_attention(
                sharp, torch.stack([x, x], dim=1), torch.stack([x, x], dim=1)
            )

    x = torch.randn(2, 7, 5, generator=torch.Generator().manual_seed(0))
    model = Pair()
    wanted = model(x)
    report = pa.inspect.harden(model, lambda m: (m(x) - wanted).square().mean())
    assert [h.kind for h in report.heads] == ["lookup", "average"]
    flat = pa.inspect.harden(model, lambda m: m(x).square().mean() * 0 + 1)  # a loss that no head matters to
    assert [h.kind for h in flat.heads] == ["either", "either"]
    assert report.heads[0].hardened < report.heads[0].averaged / 10 and report.heads[1].averaged < 1e-12


def test_hardening_leaves_masks_alone():
    """Masked keys, however they are masked, are in no table and in no mean."""
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 1, 5, 4, generator=g) for _ in range(3))
    keep = torch.tensor([True, True, False, True, False])

    class One(nn.Module):
        def forward(self, mask):
            return functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)

    for mask in (
        keep.expand(5, 5),
        torch.where(keep, 0.0, -torch.inf).expand(5, 5),
        torch.where(keep, 0.0, torch.finfo(torch.float32).min).expand(5, 5),
    ):
        one = One()
        with pa.inspect.hardened(one, [("One", 0)], factor=0.0):
            assert torch.allclose(one(mask), v[:, :, keep].mean(dim=2, keepdim=True).expand(1, 1, 5, 4))
        with pa.inspect.hardened(one, [("One", 0)]):
            best = (q @ k[:, :, keep].mT).argmax(dim=-1)[0, 0]
            assert torch.allclose(one(mask)[0, 0], v[0, 0, keep][best])
        nobody = torch.zeros(5, 5, dtype=torch.bool)
        with pa.inspect.hardened(one, [("One", 0)]):
            assert not one(nobody).any()


def test_hardening_refuses_with_reasons(model, x):
    with (
        pytest.raises(UnsupportedError, match=r"head 7 of layer 'Two'.*Two#1"),
        pa.inspect.hardened(model, [("Two", 7)]),
    ):
        model(x)
    with pytest.raises(UnsupportedError, match="≥ 0"):
        pa.inspect.harden(model, lambda m: m(x).sum(), factor=-1.0)
    with pytest.raises(UnsupportedError, match="head 0 of layer 'Three'"):
        pa.inspect.harden(model, lambda m: m(x).sum(), heads=[("Three", 0)])
    with pytest.raises(UnsupportedError, match=r"heads contains 'Two'; expected \(layer, head\)"):
        pa.inspect.harden(model, lambda m: m(x).sum(), heads=["Two"])
    with pytest.raises(UnsupportedError, match="heads is empty"):
        pa.inspect.harden(model, lambda m: m(x).sum(), heads=[])
    with pytest.raises(UnsupportedError, match="by hand"):
        pa.inspect.harden(nn.Linear(2, 2), lambda m: m(torch.ones(1, 2)).sum())


def test_a_copy_of_the_model_hardens_the_same(model, x):
    twin = copy.deepcopy(model)
    one, two = (pa.inspect.harden(m, lambda m: m(x).square().mean(), heads=[("Two", 0)]) for m in (model, twin))
    assert one.heads == two.heads
