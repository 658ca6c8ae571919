"""Reading heads at length: figures of a streamed head against sums written out in float64, and against the dense reading."""

import dataclasses
import math

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

import partita as pa
from partita.errors import NonFiniteValueError, ShapeError, SizeError, UnsupportedError
from partita.inspection import row_sums as row_sums_module
from partita.inspection.calls import AttentionCall
from partita.inspection.reading import Reading, read_call
from partita.inspection.sentences import sentence
from partita.kernels import native
from partita.kernels.plain_arithmetic import product_setting

INF = math.inf


def weights_of(q, k, scale, allowed, bias):
    """The softmax, one query at a time, in float64."""
    rows = []
    for i in range(len(q)):
        s = np.array([scale * float(q[i] @ k[j]) + bias[i, j] if allowed[i, j] else -INF for j in range(len(k))])
        top = s.max()
        e = np.exp(s - top) if top > -INF else np.zeros(len(k))
        rows.append((s, e / e.sum() if e.sum() else e))
    return rows


def expected(q, k, v, scale, allowed, bias, tokens):
    """Every number of a `Reading` that is not a bound, written out."""
    out = []
    rows = weights_of(q, k, scale, allowed, bias)
    order = [[(i - j) for j in range(len(k))] for i in range(len(q))]
    winners = [int(np.argmax(s)) for s, _ in rows]
    lags = [i - w for i, w in enumerate(winners) if allowed[i].any() and allowed[:, i].any()]
    common = max(sorted(set(lags), key=abs), key=lags.count)
    for i, (s, w) in enumerate(rows):
        seen = np.flatnonzero(allowed[i])
        if not len(seen):
            continue
        best = winners[i]
        ranked = sorted(s[seen])[::-1]
        answer, mean = w @ v, v[seen].mean(axis=0)

        def at(j, w=w, i=i):
            return w[j] if 0 <= j < len(k) and allowed[i, j] else math.nan

        def total(js, w=w):
            return sum(w[j] for j in js) if len(js) else math.nan

        same = [j for j in seen if tokens[j] == tokens[i]]
        after = [j for j in seen if j > 0 and tokens[j - 1] == tokens[i] and j - 1 != i]
        out.append(
            {
                "cells": best,
                "margins": ranked[0] - ranked[1] if len(seen) > 1 else INF,
                "leakage": sum(w[j] for j in seen if j != best),
                "spread": np.std(s[seen]),
                "entropy": -sum(x * math.log(x) for x in w[seen] if x > 0),
                "effective_keys": 1 / (w**2).sum(),
                "changed": float(((answer - v[best]) ** 2).sum()),
                "averaged": float(((answer - mean) ** 2).sum()),
                "answered": float((answer**2).sum()),
                "value_spread": float(((v[seen] - mean) ** 2).sum(axis=1).mean()),
                "seen": len(seen),
                "sink": at(0),
                "distance": sum(w[j] * abs(order[i][j]) for j in seen),
                "on_self": at(i),
                "on_previous": at(i - 1),
                "lags": i - best,
                "on_lag": at(i - common),
                "same_token": total(same),
                "duplicate_token": total([j for j in same if j != i]),
                "induction": total(after),
            }
        )
    return out


def case(name, heads=4, key_heads=2, tokens=37, dim=6):
    """A call with one sequence, and what is allowed and added, written out: `(heads, tokens, keys)`."""
    rng = np.random.default_rng(len(name))
    torch.manual_seed(len(name))
    q, k, v = (
        torch.randn(1, heads, tokens, dim),
        1.5 * torch.randn(1, key_heads, tokens, dim),
        torch.randn(1, key_heads, tokens, 3),
    )
    i, j = np.arange(tokens)[:, None], np.arange(tokens)[None]
    allowed, bias, options = np.ones((heads, tokens, tokens), bool), np.zeros((heads, tokens, tokens)), {}
    if "causal" in name:
        options["causal"] = True
        allowed &= j <= i
    if "window" in name:
        options["window"] = 5
        allowed &= abs(i - j) < 5
    if "padded" in name:
        padded = j >= tokens - 6
        options["mask"] = torch.from_numpy(~padded)[None, None]
        allowed &= ~padded
    if "ALiBi" in name:
        slopes = np.array([0.05 * (h + 1) for h in range(heads)])
        options["slopes"] = torch.from_numpy(slopes)
        bias -= slopes[:, None, None] * abs(i - j)
    if "relative bias" in name:
        added = rng.normal(size=(heads, tokens, tokens))
        options["mask"] = torch.from_numpy(added)[None]
        bias += added
    if "mask of rows" in name:
        shown = rng.random((1, tokens, tokens)) > 0.3
        options["mask"] = torch.from_numpy(shown)[None]
        allowed &= shown
    if "hidden rows" in name:
        shown = np.ones((1, tokens, tokens), bool)
        shown[:, ::5] = False
        options["mask"] = torch.from_numpy(shown)[None]
        allowed &= shown
    return AttentionCall(q, k, v, 0.6, **options), allowed, bias


CASES = [
    *("plain", "causal", "causal window", "window", "padded", "padded causal", "ALiBi causal", "ALiBi"),
    *("relative bias", "causal relative bias", "mask of rows", "causal mask of rows", "hidden rows"),
]


@pytest.fixture(params=["torch", "native"])
def loops(request, monkeypatch):
    """What runs the sums over tiles."""
    if request.param == "native":
        pytest.importorskip("numba")
    monkeypatch.setattr(native, "WORTH", 0 if request.param == "native" else 1 << 60)
    return request.param


@pytest.fixture(params=[False, True], ids=["one tile", "small tiles"])
def tiles(request, monkeypatch):
    if request.param:
        monkeypatch.setattr(row_sums_module, "_ROWS", 8)
        monkeypatch.setattr(row_sums_module, "_KEYS", 16)
        monkeypatch.setattr(row_sums_module, "_SEGMENT", 4)


@pytest.mark.parametrize("name", CASES)
def test_every_number_of_every_query(name, tiles, loops):
    call, allowed, bias = case(name)
    ids = torch.from_numpy(np.random.default_rng(1).integers(0, 6, size=(1, 37)))
    found = {}
    for _, heads, several in read_call(call, dtype=torch.float64, tokens=ids):
        found.update({head: several.head(k, slice(None)) for k, head in enumerate(range(4)[heads])})
    assert sorted(found) == [0, 1, 2, 3]
    q, k, v = (t[0].double().numpy() for t in (call.queries, call.keys, call.values))
    for head, reading in found.items():
        rows = expected(q[head], k[head // 2], v[head // 2], 0.6, allowed[head], bias[head], ids[0].tolist())
        counted = reading.of(np.flatnonzero(reading.seen > 0))
        if "padded" in name:  # padding is read, too, but counts nowhere
            counted, rows = counted.of(np.arange(31)), rows[:31]
        assert len(rows) == len(counted.cells)
        for key in rows[0]:
            want = np.array([row[key] for row in rows], dtype=float)
            if name.startswith(("mask of rows", "causal mask")) and key in (
                "duplicate_token",
                "induction",
                "same_token",
            ):
                continue  # under such masks a copy may be seen although the nearest one is not
            if "window" in name and key in ("duplicate_token", "induction", "same_token"):
                continue
            np.testing.assert_allclose(getattr(counted, key), want, rtol=1e-9, atol=1e-9, err_msg=f"{head} {key}")
        assert (counted.leakage <= counted.leakage_bound).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("case", ["ties", "equal keys", "huge", "far apart", "token −1", "one key", "65 keys"])
def test_native_loops_agree_with_torch(case, dtype, tiles, monkeypatch):
    """The same keys win, also where scores are equal, and the sums differ by rounding alone."""
    pytest.importorskip("numba")
    torch.manual_seed(7)
    count = {"one key": 1, "65 keys": 65}.get(case, 150)
    q, k, v = (torch.randn(1, 3, n, 5, dtype=dtype) for n in (count, count, count))
    ids = torch.randint(0, 9, (1, count))
    if case == "ties":
        q, k = q.round(), k.round()
    if case == "equal keys":
        k[:] = k[:, :, :1]
    if case == "huge":
        q, k = 1e10 * q, 1e10 * k
    if case == "far apart":
        q[:, :, ::2] *= 40
    if case == "token −1":
        ids[0, 0] = -1
    call = AttentionCall(q, k, v, 1.0, causal=case != "ties")
    found = []
    for worth in (0, 1 << 60):
        monkeypatch.setattr(native, "WORTH", worth)
        (_, _, sums), *_ = row_sums_module.row_sums(call, tokens=ids)
        found.append(sums)
    size = 1e-5 if dtype == torch.float32 else 1e-13
    for field in dataclasses.fields(found[0]):
        fast, plain = (getattr(sums, field.name) for sums in found)
        if field.name in ("best", "winner", "margin", "runner_up", "seen"):
            assert torch.equal(fast, plain), field.name
        else:
            scale = max(1.0, float(plain.abs().max()))
            torch.testing.assert_close(fast, plain, rtol=size, atol=size * scale, msg=field.name)
    before = ids[0, :-1]
    for i in {0, count // 2, count - 1}:  # a token that equals the filling before the first key is not one
        seen = slice(0, i + 1) if call.causal else slice(None)
        follows = [False, *(before == ids[0, i]).tolist()]
        assert bool(found[0].after_same[0, i] > 0) <= any(follows[seen])


@pytest.mark.parametrize("causal", [False, True])
def test_of_equal_scores_the_earlier_keys_come_first(causal, tiles, loops):
    """In one tile and in several: the cell, then the runner-up. Scores are small integers, so that there are many ties."""
    generator = torch.Generator().manual_seed(2)
    q, k = (torch.randint(-1, 2, (1, 2, n, 3), generator=generator).float() for n in (100, 100))
    call = AttentionCall(q, k, torch.randn(1, 2, 100, 2), 1.0, causal=causal)
    scores = (q @ k.mT)[0]
    scores = scores.masked_fill(torch.ones(100, 100, dtype=torch.bool).triu(1), -INF) if causal else scores
    order = scores.sort(dim=-1, descending=True, stable=True).indices[..., :2]
    ((_, heads, reading),) = read_call(call)
    assert heads == slice(0, 2) and torch.equal(reading.cells, order[..., 0])
    several = slice(1, None) if causal else slice(None)  # the first query sees one key
    assert torch.equal(reading.runner_up[:, several], order[:, several, 1])
    assert not causal or (reading.runner_up[:, 0] == -1).all()


def test_runners_up_of_long_sequences_are_those_of_the_dense_reading():
    """More keys than a tile has; all of them are copies of a few."""
    generator = torch.Generator().manual_seed(4)
    q = torch.randn(1, 1, 9, 4, generator=generator)
    few, which = torch.randn(1, 1, 7, 4, generator=generator), torch.randint(0, 7, (5000,), generator=generator)
    k = few[:, :, which]
    found = []
    for stream in (False, True):
        with pa.inspect.capture(stream=stream, queries=stream) as heads:
            pa.inspect.record(q, k, k)
        found.append(heads["attention", 0].queries())
    order = (q @ few.mT)[0, 0][:, which].sort(dim=-1, descending=True, stable=True).indices
    for each in found:
        assert np.array_equal(each["cells"], order[:, 0]) and np.array_equal(each["runner_up"], order[:, 1])
        assert not each["margins"].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("size", [30.0, 3e3, 1e5])
def test_the_bound_of_leakage_allows_for_rounded_scores(size, dtype, loops):
    """Large scores and tiny margins: what is nearer than rounding may be the other way round."""
    generator = torch.Generator().manual_seed(int(size))
    q = size * torch.ones(1, 1, 300, 64)  # so that keys with the same coordinates in another order tie
    sizes = size * 2.0 ** torch.randint(-6, 2, (64,), generator=generator)  # digits of products that sums lose
    k = (sizes * torch.randn(1, 1, 1, 64, generator=generator)).expand(1, 1, 3, 64).clone()
    k[:, :, 1], k[:, :, 2] = k[:, :, 0].roll(29, dims=-1), k[:, :, 0].flip(-1)
    if dtype == torch.float32:
        q += 0.1 * torch.randn(q.shape, generator=generator) / size
    q *= torch.rand(1, 1, 300, 1, generator=generator) + 0.5
    q, k = q.to(dtype), k.to(dtype)
    with pa.inspect.capture(stream=True, queries=True, null=False) as heads:
        pa.inspect.record(q, k, torch.randn(1, 1, 3, 2).to(dtype), scale=0.125)
    found = heads["attention", 0].queries()
    weights = torch.softmax(0.125 * (q.double() @ k.double().mT)[0, 0], dim=-1).numpy()  # 1e-5 nats off at most
    exact = 1 - weights[np.arange(300), found["cells"]]
    assert (exact * (1 - 1e-4) <= found["leakage_bound"]).all()
    assert size < 1e5 or (exact > 2.2 * np.exp(-found["margins"])).any()  # rounded margins alone are not enough


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_stated_error_covers_biases_that_grow_with_the_distance(dtype, loops):
    """ALiBi beside products that are nearly 0: what rounding does to the scores is what it does to the slopes."""
    torch.manual_seed(0)
    q, k = (1e-3 * torch.randn(1, 3, 700, 4, dtype=dtype) for _ in range(2))
    slopes = torch.tensor([0.1, 0.7, -0.3], dtype=torch.float64)
    apart = (torch.arange(700)[:, None] - torch.arange(700)).abs()
    far = apart >= 350  # near keys, whose biases are small, are hidden
    with pa.inspect.capture(stream=True, queries=True, null=False) as heads:
        pa.inspect.record(q, k, k, attn_mask=far, slopes=slopes, scale=1.0)
    exact = (q.double() @ k.double().mT)[0] - slopes[:, None, None] * apart
    for number, head in enumerate(pa.inspect.read(heads, budget=0).heads):
        found = heads["attention", number].queries()
        rows = np.arange(700)
        best, second = (exact[number].numpy()[rows, found[name]] for name in ("cells", "runner_up"))
        several = found["seen"] > 1
        off = np.abs(found["margins"] - (best - second))[several] - 2.0**-22 * found["margins"][several]
        assert off.max() <= 2 * head.score_error < 1e-2
        assert off.max() > 1e-6  # rounding is seen


def test_a_wrong_row_would_be_noticed():
    call, allowed, bias = case("causal")
    ((_, _, reading), *_) = read_call(dataclasses.replace(call, causal=False), dtype=torch.float64)
    q, k, v = (t[0].double().numpy() for t in (call.queries, call.keys, call.values))
    rows = expected(q[0], k[0], v[0], 0.6, allowed[0], bias[0], list(range(37)))
    assert not np.allclose(reading.entropy[0], [row["entropy"] for row in rows])


class Attending(nn.Module):
    """Rotary, grouped queries, causal."""

    def __init__(self, width=32, heads=4, key_heads=2):
        super().__init__()
        self.heads, self.key_heads, dim = heads, key_heads, width // heads
        self.q, self.k, self.v = (
            nn.Linear(width, width),
            nn.Linear(width, key_heads * dim),
            nn.Linear(width, key_heads * dim),
        )

    def forward(self, x):
        q, k, v = (
            p(x).unflatten(-1, (n, -1)).transpose(1, 2)
            for p, n in ((self.q, self.heads), (self.k, self.key_heads), (self.v, self.key_heads))
        )
        angles = torch.arange(x.shape[1], dtype=x.dtype)[:, None] * 100 ** -torch.linspace(
            0, 1, q.shape[-1] // 2, dtype=x.dtype
        )
        cos, sin = angles.cos(), angles.sin()

        def turned(t):
            a, b = t.chunk(2, dim=-1)
            return torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1)

        out = functional.scaled_dot_product_attention(turned(q), turned(k), v, is_causal=True, enable_gqa=True)
        return x + out.transpose(1, 2).flatten(2)


class Model(nn.Module):
    def __init__(self, words=11):
        super().__init__()
        torch.manual_seed(0)
        self.words, self.layers = nn.Embedding(words, 32), nn.Sequential(Attending(), Attending())

    def forward(self, ids):
        return self.layers(3 * self.words(ids))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_streamed_figures_are_those_of_the_dense_reading_within_the_stated_error(dtype, loops):
    model, ids = Model().to(dtype).eval(), torch.randint(0, 11, (1, 512), generator=torch.Generator().manual_seed(5))
    with torch.no_grad():
        plain = model(ids)
        with pa.inspect.capture(model) as dense:
            first = model(ids)
        with pa.inspect.capture(model, stream=True) as streamed:
            second = model(ids)
    assert torch.equal(plain, first) and torch.equal(plain, second)
    assert streamed.bytes_held < 0.4 * dense.bytes_held and not any(record.snapshots for record in streamed)
    exact, found = pa.inspect.read(dense, budget=0), pa.inspect.read(streamed)
    assert len(found.heads) == 8
    for a, b in zip(exact.heads, found.heads):
        assert (a.name, a.dimension, a.value_dimension, a.per_position, a.kind) == (
            b.name,
            b.dimension,
            b.value_dimension,
            b.per_position,
            b.kind,
        )
        assert b.score_error < 1e-4 and (dtype != torch.float64 or b.score_error < 1e-13)
        for x, y in ((a.figures, b.figures), (a.roles, b.roles)):
            for field in dataclasses.fields(x):
                want, got = getattr(x, field.name), getattr(y, field.name)
                if field.name in ("reachable", "dead", "undecided"):
                    assert math.isnan(got)
                    continue
                stated = 4 * b.score_error * max(1.0, abs(want)) + 1e-6 * abs(want)
                if field.name in ("cells", "unvisited", "effective_cells", "largest_cell") and dtype != torch.float64:
                    stated += 4  # queries between two cells, nearer than the error of their scores
                assert got == pytest.approx(want, abs=stated, nan_ok=True), field.name
    both = [
        (getattr(h.null, n), getattr(g.null, n))
        for h, g in zip(exact.heads, found.heads)
        for n in ("leakage", "entropy", "effective_keys")
    ]
    assert all(b == pytest.approx(a, rel=0.4) for a, b in both)  # other random heads of the same kind


def test_random_heads_of_both_readings_are_of_one_kind():
    """Means over several random heads; queries, keys and values are far from 0, each by an offset of its own."""
    torch.manual_seed(0)
    sizes = torch.tensor([0.5, 2.0])[:, None, None]
    q, k, v = (sizes * torch.randn(1, 2, 40, 4) + offset for offset in (1.0, 3.0, 20.0))
    found = {}
    for stream in (False, True):
        for seed in range(10):
            with pa.inspect.capture(stream=stream, seed=seed) as heads:
                pa.inspect.record(q, k, v, is_causal=True)
            for head in pa.inspect.read(heads, budget=0, seed=seed).heads:
                found.setdefault((head.head, stream), []).append(head.null)
    for head in (0, 1):
        for name, off in {
            **dict.fromkeys(
                ("leakage", "entropy", "effective_keys", "table_distance", "table_distance_of_values"), 0.2
            ),
            **dict.fromkeys(("margin", "inverse_temperature", "mean_distance"), 0.4),
        }.items():
            dense, streamed = (np.mean([getattr(null, name) for null in found[head, s]]) for s in (False, True))
            assert streamed == pytest.approx(dense, rel=off), (head, name)


def figures_of(heads):
    return [[*vars(h.figures).values(), *vars(h.roles).values(), *vars(h.null).values()] for h in heads]


@pytest.mark.parametrize("setting", ["autocast", "medium"])
def test_settings_of_torch_change_no_figure(setting, loops, monkeypatch):
    """Under autocast, and where float32 products may be cut to bfloat16, the same bits are read."""
    q, k, v = torch.randn(3, 1, 2, 600, 24, generator=torch.Generator().manual_seed(0))
    mask, seen, matmul = torch.rand(1, 2, 600, 600, generator=torch.Generator().manual_seed(1)) > 0.3, [], torch.matmul

    def watched(*args, **kwargs):
        seen.append((torch.is_autocast_enabled("cpu"), product_setting("cpu")[0]))
        return matmul(*args, **kwargs)

    def taken():
        with pa.inspect.capture(stream=True, queries=True) as heads:
            pa.inspect.record(q, k, v, is_causal=True)
            pa.inspect.record(q, k, v, attn_mask=mask)
        readings = [head.queries() for head in heads]
        return readings, figures_of(pa.inspect.read(heads, budget=0).heads)

    plain, figures = taken()
    monkeypatch.setattr(torch, "matmul", watched)
    before = torch.get_float32_matmul_precision()
    try:
        if setting == "medium":
            torch.set_float32_matmul_precision("medium")
            outside = product_setting("cpu")[0]
            changed, same = taken()
            assert product_setting("cpu")[0] == outside
        else:
            with torch.autocast("cpu", torch.bfloat16):
                changed, same = taken()
                assert torch.is_autocast_enabled("cpu")
    finally:
        torch.set_float32_matmul_precision(before)
    assert seen and all(not cast and products in ("none", "ieee", "highest") for cast, products in seen)
    for one, other in zip(plain, changed, strict=True):
        for name, array in one.items():
            np.testing.assert_array_equal(array, other[name], err_msg=name)
    np.testing.assert_array_equal(np.array(figures, dtype=float), np.array(same, dtype=float))


@pytest.mark.parametrize("threads", [1, 2])
def test_no_graph_is_kept(threads, loops):
    """Also if the model is trained meanwhile, and in threads of our own, whose gradients torch has switched on."""
    made = [torch.randn(1, 2, 600, 4, requires_grad=True) for _ in range(3)]
    call, before = AttentionCall(*made, 0.5, causal=True), torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        assert native.each_on_one_thread([0, 1, 2, 3], lambda _: torch.is_grad_enabled()) == [False] * 4
        for _, _, sums in row_sums_module.row_sums(call):
            assert not any(tensor.requires_grad for tensor in vars(sums).values())
        ((_, _, reading),) = read_call(call)
        assert not any(tensor.requires_grad for tensor in vars(reading).values())
        with pa.inspect.capture(stream=True, queries=True) as tracked:
            pa.inspect.record(*made, is_causal=True, scale=0.5)
        with pa.inspect.capture(stream=True, queries=True) as plain:
            pa.inspect.record(*(t.detach() for t in made), is_causal=True, scale=0.5)
        assert torch.get_num_threads() == threads and torch.is_grad_enabled()
    finally:
        torch.set_num_threads(before)
    for one, other in zip(tracked, plain, strict=True):
        numbers = other.queries()
        for name, array in one.queries().items():
            np.testing.assert_array_equal(array, numbers[name], err_msg=name)
    np.testing.assert_array_equal(
        *(np.array(figures_of(pa.inspect.read(h).heads), dtype=float) for h in (tracked, plain))
    )


@pytest.mark.parametrize("values", ["random", "equal"])
def test_means_of_many_values_are_told_from_rounding(values):
    """Means over n random values are 1/√n in size, which is no rounding error; equal values differ by nothing."""
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((n, 4)).astype(np.float32) for n in (8, 1 << 17, 1 << 17))
    v = v if values == "random" else np.repeat(v[:1], len(v), axis=0)
    with pa.inspect.capture(stream=True, null=False) as heads:
        pa.inspect.record(*(torch.from_numpy(t)[None, None] for t in (q, k, v)))
    figures = pa.inspect.read(heads).heads[0].figures
    weights = np.exp(q.astype(np.float64) @ k.T.astype(np.float64) / 2)
    outputs = weights / weights.sum(axis=1, keepdims=True) @ v.astype(np.float64)
    moved = ((outputs - v.astype(np.float64).mean(axis=0)) ** 2).sum(axis=1).mean()
    wanted = np.sqrt(moved / (outputs**2).sum(axis=1).mean()) if values == "random" else 0.0
    assert figures.mean_distance == pytest.approx(wanted, rel=1e-2)
    assert values == "equal" or wanted > 0.5


class Largest(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.numbers = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for t in out if isinstance(out, tuple | list) else [out]:
            if isinstance(t, torch.Tensor) and not t._is_view() and t.stride() and 0 not in t.stride():
                self.numbers = max(self.numbers, t.numel())
        return out


@pytest.mark.parametrize(
    "options", [{"is_causal": True}, {"is_causal": True, "window": 500}, {"slopes": torch.tensor([0.01])}], ids=str
)
def test_nothing_as_large_as_queries_times_keys_is_formed(options, loops):
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 1, 6000, 8) for _ in range(3))
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)  # a mode sees what its own thread does
        with Largest() as largest, pa.inspect.capture(stream=True, null=False) as heads:
            pa.inspect.record(q, k, v, **options)
    finally:
        torch.set_num_threads(threads)
    assert 1 << 19 < largest.numbers <= 1 << 21 < 6000**2 / 16  # the tiles are seen
    assert pa.inspect.read(heads).heads[0].figures.queries == 6000
    with Largest() as dense:
        functional.softmax(q @ k.mT, dim=-1)
    assert dense.numbers == 6000**2  # the measure would see it


def planted(kind, tokens=60, dim=64):
    """A head that looks where it is told to, by one-hot positions or tokens, and its tokens."""
    rng = np.random.default_rng(3)
    half = rng.integers(0, 40, size=tokens // 2)
    ids = np.concatenate([half, half])
    place, word = np.eye(max(tokens, dim))[:tokens], np.eye(64)[ids]
    before = np.vstack([np.zeros((1, 64)), word[:-1]])
    shifted = {"previous": 1, "back 15": 15, "self": 0}
    if kind in shifted:
        n = shifted[kind]
        q, k = np.vstack([place[:1]] * n + [place[: tokens - n]]) if n else place, place
    elif kind == "first":
        q, k = np.ones((tokens, 1)), np.eye(tokens)[:, :1]
    elif kind == "duplicate":
        q, k = np.hstack([word, place]), np.hstack([word, -0.5 * place])
    elif kind == "same":
        q, k = word, word
    elif kind == "induction":
        q, k = word, before
    else:
        q, k = np.zeros((tokens, 2)), np.zeros((tokens, 2))
    rng = np.random.default_rng(7)
    return (torch.from_numpy(a).float()[None, None] for a in (30 * q, k, rng.normal(size=(tokens, 4)))), ids


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("previous", "Looks at the previous token: 100% of its weight"),
        ("back 15", "Looks at the token 15 back, where there is one: 100% of its weight (a random head at its own"),
        ("self", "Looks at its own position: 100%"),
        ("first", "Looks at the first token: 100%"),
        ("induction", "Looks at what followed other copies of its token (induction), where there are any: "),
        ("duplicate", "Looks at other copies of its token, where there are any: "),
        ("same", "Looks at tokens equal to its own, itself included: 100%"),
        ("nothing", "Averages: its output is within 0%"),
    ],
)
def test_the_sentence_says_what_was_planted(kind, words, stream):
    (q, k, v), ids = planted(kind)
    with pa.inspect.capture(stream=stream, tokens=ids) as heads:
        pa.inspect.record(q, k, v, is_causal=True, scale=1.0)
    head = pa.inspect.read(heads, budget=0).heads[0]
    assert head.sentence.startswith(words), (head.sentence, head.roles)
    assert head.row()["sentence"] == head.sentence and (kind == "nothing") == (head.kind == "average")
    if kind == "back 15":
        assert head.roles.lag == 15 and head.roles.on_lag == pytest.approx(1.0) and head.null_roles.on_lag < 0.2
        assert head.roles.lag_share == pytest.approx(0.75)


@pytest.mark.parametrize("stream", [False, True])
def test_a_lag_of_a_few_queries_is_not_what_the_head_does(stream):
    """All queries look at the first token, at lags that all differ, but the last one, which has the lag of the one before."""
    keys = torch.eye(80)
    target = torch.zeros(80, dtype=torch.long)
    target[79] = 1
    with pa.inspect.capture(stream=stream) as heads:
        pa.inspect.record(60 * keys[target][None, None], keys[None, None], keys[None, None], is_causal=True, scale=1.0)
    head = pa.inspect.read(heads, budget=0).heads[0]
    assert head.roles.lag == 78 and head.roles.lag_share == pytest.approx(2 / 80)
    assert head.sentence.startswith("Looks at the first token")


def test_an_average_is_named_if_it_is_clear_or_clearer_than_that_of_a_random_head():
    (q, k, v), _ = planted("nothing")
    with pa.inspect.capture() as heads:
        pa.inspect.record(q, k, v, is_causal=True)
    head = pa.inspect.read(heads, budget=0).heads[0]
    for own, random, named in ((0.09, 0.05, True), (0.2, 0.17, False), (0.2, 0.5, True), (0.3, 0.9, False)):
        figures, null = (dataclasses.replace(f, mean_distance=d) for f, d in ((head.figures, own), (head.null, random)))
        assert bool(sentence(figures, null, head.roles, head.null_roles)) == named


def test_a_few_queries_carry_no_sentence():
    keys = torch.eye(12)
    for tokens in (8, 12):
        previous = keys[:tokens].roll(1, dims=0)  # looks at the previous token
        with pa.inspect.capture() as heads:
            pa.inspect.record(
                60 * previous[None, None], keys[None, None, :tokens], keys[None, None, :tokens], is_causal=True
            )
        assert bool(pa.inspect.read(heads, budget=0).heads[0].sentence) == (tokens > 10)


def test_nothing_is_said_of_a_random_head():
    torch.manual_seed(2)
    with pa.inspect.capture() as heads:
        pa.inspect.record(*(2.0 * torch.randn(1, 6, 80, 16) for _ in range(3)), is_causal=True)
    assert [h.sentence for h in pa.inspect.read(heads, budget=0).heads] == [""] * 6


class Embedded(nn.Module):
    """Tokens, positions and segments reach embeddings, tokens last."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.position, self.segment, self.word = nn.Embedding(64, 16), nn.Embedding(2, 16), nn.Embedding(9, 16)

    def forward(self, ids):
        batch, count = ids.shape
        x = self.position(torch.arange(count).expand(batch, -1)) + self.segment(torch.zeros_like(ids)) + self.word(ids)
        x = x.unflatten(-1, (2, 8)).transpose(1, 2)
        return functional.scaled_dot_product_attention(x, x, x)


@pytest.mark.parametrize("stream", [False, True])
def test_tokens_are_read_off_the_embedding_of_each_pass(stream):
    model, generator = Embedded().eval(), torch.Generator().manual_seed(0)
    passes = [torch.randint(0, 9, (2, n), generator=generator) for n in (20, 20, 31)]
    with torch.no_grad(), pa.inspect.capture(model, stream=stream) as heads:
        for ids in passes:
            model(ids)
    rows = [row for ids in passes for row in ids.tolist()]
    copies = sum(row.count(t) > 1 for row in rows for t in row)
    for head in pa.inspect.read(heads, budget=0).heads:
        assert head.roles.copies == copies
    if not stream:
        assert [s.tokens.tolist() for s in heads["Embedded", 0].snapshots] == rows


def test_labels_and_ids_of_tokens_are_the_same_to_the_figures():
    (q, k, v), ids = planted("induction")
    with pa.inspect.capture() as heads:
        pa.inspect.record(q, k, v, is_causal=True, scale=1.0)
    plain, by_id, by_label = (
        pa.inspect.read(heads, tokens=t, budget=0).heads[0].roles for t in (None, ids, [f"word {t}" for t in ids])
    )
    assert math.isnan(plain.induction) and by_id == by_label and by_id.induction > 0.9


@pytest.mark.parametrize(
    ("tokens", "error", "words"),
    [
        ([1, 2, 3], ShapeError, "has 3 tokens"),
        (np.zeros((2, 60)), UnsupportedError, "contains float; expected a list of strings or of token ids"),
        (object(), UnsupportedError, "tokens is of type object; expected a list"),
        ([[1] * 60, [1] * 60, [[1]]], UnsupportedError, "contains list; expected"),
    ],
)
def test_tokens_that_do_not_fit(tokens, error, words):
    (q, k, v), _ = planted("induction")
    with pa.inspect.capture() as heads:
        pa.inspect.record(q, k, v)
    with pytest.raises(error, match=words):
        pa.inspect.read(heads, tokens=tokens)


def test_tokens_come_too_late_for_heads_that_were_streamed():
    (q, k, v), ids = planted("induction")
    with pa.inspect.capture(stream=True) as heads:
        pa.inspect.record(q, k, v)
    with pytest.raises(UnsupportedError, match="cannot be applied now"):
        pa.inspect.read(heads, tokens=ids)


def test_what_is_kept_when_streaming():
    model, ids = Model().eval(), torch.arange(90)[None] % 11
    with torch.no_grad():
        with pa.inspect.capture(model, stream=True, keep=True, heads=[1, 3], null=False) as kept:
            model(ids)
        with pa.inspect.capture(model, heads=[1, 3]) as dense:
            model(ids)
    assert [r.name for r in kept] == [r.name for r in dense]
    record = kept["layers.0", 3]
    reading = record.streamed[0].reading
    assert isinstance(reading, Reading) and len(reading.runner_up) == 90 and len(record.snapshots) == 1
    assert np.array_equal(record.snapshots[0].keys, dense["layers.0", 3].snapshots[0].keys)
    null = pa.inspect.read(kept)["layers.0", 3].null
    assert null.queries == 0 and math.isnan(null.leakage) and math.isnan(null.leakage_bound)
    with (
        torch.no_grad(),
        pytest.raises(SizeError, match="max_bytes allows"),
        pa.inspect.capture(model, stream=True, max_bytes=99),
    ):
        model(ids)


def test_numbers_of_every_query_without_keeping_vectors():
    model, ids = Model().eval().double(), torch.arange(90)[None].repeat(2, 1) % 11
    found = []
    for options in ({"stream": True, "queries": True, "null": False}, {}, {"stream": True}):
        with torch.no_grad(), pa.inspect.capture(model, tokens=40, **options) as heads:
            model(ids)
        found.append(heads)
    streamed, dense, bare = (heads["layers.0", 3] for heads in found)
    assert not streamed.snapshots and found[0].bytes_held > found[2].bytes_held
    own, wanted = streamed.queries(), dense.queries()
    positions = np.tile(dense.snapshots[0].positions, 2)
    for name in ("sequence", "positions", *(f.name for f in dataclasses.fields(Reading))):
        assert own[name].shape == wanted[name].shape == (80,), name
        np.testing.assert_allclose(own[name], wanted[name], rtol=1e-9, atol=1e-9, err_msg=name)
    assert np.array_equal(own["positions"], positions) and own["sequence"].tolist() == [0] * 40 + [1] * 40
    assert (own["cells"] != own["runner_up"]).all() and (own["margins"] >= 0).all()
    with pytest.raises(UnsupportedError, match="stream=True, queries=True"):
        bare.queries()
    with pa.inspect.capture(stream=True, queries=True, null=False) as crossed:
        pa.inspect.record(torch.randn(1, 1, 3, 4), *torch.randn(2, 1, 1, 7, 4))
    assert crossed["attention", 0].queries()["positions"].tolist() == [0, 1, 2]


@pytest.mark.parametrize("name", ["keep", "queries"])
def test_options_of_streams_need_a_stream(name):
    with (
        pytest.raises(UnsupportedError, match=f"{name} is True without stream=True"),
        pa.inspect.capture(**{name: True}),
    ):
        pass


def test_fewer_queries_all_keys():
    model, ids = Model().eval(), torch.arange(90)[None] % 11
    reports = []
    for stream in (False, True):
        with torch.no_grad(), pa.inspect.capture(model, stream=stream, tokens=7) as heads:
            model(ids)
        reports.append(pa.inspect.read(heads, budget=0))
    for a, b in zip(*(r.heads for r in reports)):
        assert a.figures.queries == b.figures.queries == 7 and a.figures.entropy == pytest.approx(b.figures.entropy)
        assert a.roles.on_self == pytest.approx(b.roles.on_self) and a.figures.keys == b.figures.keys


def test_a_diverged_model_and_an_empty_one():
    q = torch.full((1, 1, 4, 2), math.nan)
    with pytest.raises(NonFiniteValueError, match="NaN or infinity"), pa.inspect.capture(stream=True):
        pa.inspect.record(q, q, q)
    for tokens, keys in ((0, 3), (3, 0), (1, 1)):
        with pa.inspect.capture(stream=True) as heads:
            pa.inspect.record(torch.ones(1, 1, tokens, 2), torch.ones(1, 1, keys, 2), torch.ones(1, 1, keys, 2))
        if tokens * keys:
            assert pa.inspect.read(heads).heads[0].figures.leakage == 0.0
        else:
            with pytest.raises(UnsupportedError, match="no query sees a key"):
                pa.inspect.read(heads)


def test_windows_and_slopes_are_written_out_for_snapshots():
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 2, 30, 4) for _ in range(3))
    options = {"is_causal": True, "window": 6, "slopes": torch.tensor([0.2, 0.7])}
    found = []
    for stream in (False, True):
        with pa.inspect.capture(stream=stream) as heads:
            pa.inspect.record(q, k, v, **options)
        found.append(pa.inspect.read(heads, budget=0).heads)
    for a, b in zip(*found):
        assert a.figures.entropy == pytest.approx(b.figures.entropy) and a.roles.distance == pytest.approx(
            b.roles.distance
        )
    assert found[0][0].figures.entropy != pytest.approx(found[0][1].figures.entropy)


def test_equal_keys_are_counted_and_share_a_cell(loops):
    torch.manual_seed(0)
    k = torch.randn(1, 1, 50, 4)
    k[:, :, 30:40] = k[:, :, :10]
    with pa.inspect.capture(stream=True) as heads:
        pa.inspect.record(torch.randn(1, 1, 200, 4), k, torch.randn(1, 1, 50, 2))
    head = pa.inspect.read(heads).heads[0]
    assert head.figures.repeated == 10 and all(not 30 <= cell.key < 40 for cell in head.cells)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_copies_of_round_keys(dtype):
    for seed in range(10):
        g = torch.Generator().manual_seed(seed)
        keys = torch.randint(-2, 3, (60, 4), generator=g).to(dtype)
        queries, values = torch.randn(3, 4, generator=g).to(dtype), torch.randn(60, 1, generator=g).to(dtype)
        with pa.inspect.capture(stream=True, null=False) as heads:
            pa.inspect.record(queries[None, None], keys[None, None], values[None, None])
        assert pa.inspect.read(heads).heads[0].figures.repeated == 60 - len(keys.unique(dim=0))


@pytest.mark.parametrize("stream", [False, True])
def test_copies_count_among_keys_that_are_seen_and_with_their_biases(stream):
    torch.manual_seed(0)
    q, k, v = torch.randn(1, 1, 20, 4), torch.ones(1, 1, 20, 4), torch.randn(1, 1, 20, 2)
    k[:, :, :5] = torch.randn(1, 1, 5, 4)
    found = {}
    slopes, distance = torch.tensor([0.5]), torch.arange(20) - torch.arange(20)[:, None]
    for name, options in {
        "all": {},
        "padded": {"attn_mask": torch.arange(20) < 8},
        "biased": {"attn_mask": torch.arange(20.0)},
        "ALiBi": {"is_causal": True, "slopes": slopes},
        "ALiBi as a mask": {"attn_mask": torch.where(distance <= 0, 0.5 * distance, -INF)[None, None]},
        "two-sided ALiBi": {"slopes": slopes},
    }.items():
        with pa.inspect.capture(stream=stream) as heads:
            pa.inspect.record(q, k, v, **options)
        head = pa.inspect.read(heads, budget=0).heads[0]
        found[name] = head.figures.repeated, head.per_position
    assert found == {
        "all": (14, False),
        "padded": (2, False),
        "biased": (0, False),
        "ALiBi": (0, False),
        "ALiBi as a mask": (0, False),
        "two-sided ALiBi": (14, True),
    }


@pytest.mark.parametrize("causal", [False, True])
def test_keys_between_windows_are_not_seen(causal):
    q = torch.randn(1, 1, 40, 4)
    figures = []
    for stream in (False, True):
        with pa.inspect.capture(stream=stream, tokens=4) as heads:
            pa.inspect.record(q, q, q, window=3, is_causal=causal)
        figures.append(pa.inspect.read(heads, budget=0).heads[0].figures)
    assert figures[0].keys == figures[1].keys < 20 and figures[0].unvisited == figures[1].unvisited


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("dim", [1, 3, 8, 31, 64, 128])
def test_equal_keys_have_equal_scores(dtype, dim):
    """Whatever the number of keys: the last columns of a matrix product are not summed in another order."""
    for count in (2, 5, 20, 63, 64, 65, 100, 130, 200, 512, 700):
        torch.manual_seed(count)
        q, k = torch.randn(1, 1, 70, dim, dtype=dtype), torch.randn(1, 1, 1, dim, dtype=dtype).expand(-1, -1, count, -1)
        scores = AttentionCall(q, k, k, 0.37).scores(0)[0]
        assert (scores == scores[..., :1]).all(), count


def test_patterns_have_labels():
    (q, k, v), ids = planted("previous")
    with pa.inspect.capture(tokens=ids) as heads:
        pa.inspect.record(q, k, v, is_causal=True, scale=1.0)
    snapshot = heads["attention", 0].snapshots[0]
    found = pa.inspect.pattern(snapshot, tokenizer=lambda t: f"<{t}>")
    assert found.key_labels == found.query_labels == tuple(f"<{t}>" for t in ids)
    assert found.weights[5, 4] == pytest.approx(1.0) and np.allclose(found.weights.sum(axis=1), 1.0)
    assert pa.inspect.pattern(snapshot).key_labels[:2] == ("0", "1")
    with pytest.raises(ShapeError, match="expected 60"):
        pa.inspect.pattern(snapshot, tokens=["a"])


def test_without_a_random_head_nothing_is_said():
    (q, k, v), ids = planted("nothing")
    with pa.inspect.capture(stream=True, null=False, tokens=ids) as heads:
        pa.inspect.record(q, k, v, is_causal=True)
    report = pa.inspect.read(heads)
    assert report.heads[0].sentence == "" and math.isnan(report.heads[0].null.table_distance)
    assert "(" not in str(report) and "random" not in str(report) + report._repr_html_()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("name", "crosses"),
    [
        *(("encoder_attn", True), ("crossattention", True), ("EncDecAttention", True), ("cross_attn", True)),
        *(("self_attn", False), ("attn", False), ("my_encoder_attn", False), ("encoder", False)),
    ],
)
def test_layers_whose_name_says_so_are_cross_attention_whatever_the_lengths(name, crosses, stream):
    (q, k, v), ids = planted("previous")

    class Layer(nn.Module):
        def forward(self):
            return torch.nn.functional.scaled_dot_product_attention(q, k, v)

    model = nn.ModuleDict({name: Layer()})
    with pa.inspect.capture(model, stream=stream, tokens=ids) as heads:
        model[name]()
    (head,) = pa.inspect.read(heads).heads[:1]
    assert math.isnan(head.roles.on_previous) == math.isnan(head.roles.induction) == crosses
    assert ("previous" in head.sentence) != crosses


@pytest.mark.parametrize(
    "use",
    [
        lambda heads: pa.inspect.activation_cache(heads)["pattern", 0],
        lambda heads: pa.inspect.recover(next(iter(heads))),
        lambda heads: pa.inspect.export_patterns(heads, "never-written.json"),
        lambda heads: pa.inspect.audit(heads, rule=pa.inspect.TopK(3)),
        lambda heads: pa.inspect.moves(*[next(iter(heads))] * 2),
    ],
)
def test_what_needs_keys_says_that_they_were_not_kept(use):
    (q, k, v), _ = planted("previous")
    with pa.inspect.capture(stream=True) as heads:
        pa.inspect.record(q, k, v)
    with pytest.raises(UnsupportedError, match="their keys were not kept"):
        use(heads)


def both(q, k, v, *, limit=None, **options):
    """The reports of the dense reading and of the streamed one."""
    reports = []
    for stream in (False, True):
        with pa.inspect.capture(stream=stream, tokens=limit) as heads:
            pa.inspect.record(q, k, v, **options)
        reports.append(pa.inspect.read(heads, budget=0).heads)
    return zip(*reports)


@pytest.mark.parametrize("case", ["masks of their own", "cross-attention", "few queries", "left padding"])
def test_padding_is_the_same_in_both_readings(case):
    torch.manual_seed(3)
    q, k, v = (torch.randn(1, 2, 12, 4) for _ in range(3))
    options = {}
    if case == "masks of their own":
        options["attn_mask"] = torch.ones(1, 2, 1, 12, dtype=torch.bool)
        options["attn_mask"][0, 1, 0, :3] = False
    elif case == "cross-attention":
        q = torch.randn(1, 2, 7, 4)
        options["attn_mask"] = torch.arange(12)[None] >= 4
    elif case == "few queries":
        options = {"attn_mask": torch.eye(12, dtype=torch.bool) | (torch.arange(12) == 5), "limit": 3}
    else:
        options = {
            "attn_mask": (torch.arange(12) >= 4) & torch.ones(12, 12, dtype=torch.bool).tril(),
            "is_causal": False,
        }
    for dense, streamed in both(q, k, v, **options):
        for a, b in ((dense.figures, streamed.figures), (dense.roles, streamed.roles)):
            for field in dataclasses.fields(a):
                if field.name not in ("reachable", "dead", "undecided"):
                    want, got = getattr(a, field.name), getattr(b, field.name)
                    assert got == pytest.approx(want, rel=1e-4, abs=1e-5, nan_ok=True), field.name
        assert not math.isnan(streamed.roles.sink_mass)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("tokens", [16, 24, 64])
def test_random_heads_get_no_sentence_however_sharp(tokens, stream):
    """Their scores make each query pick a key, but those of the random heads beside them do so as well."""
    torch.manual_seed(3)
    q, k, v = 10 * torch.randn(1, 100, tokens, 16), torch.randn(1, 100, tokens, 16), torch.randn(1, 100, tokens, 16)
    with pa.inspect.capture(stream=stream, tokens=torch.randint(6, (tokens,)).tolist()) as heads:
        pa.inspect.record(q, k, v, is_causal=True)
    said = [h.sentence for h in pa.inspect.read(heads, budget=0).heads]
    assert sum(map(bool, said)) <= 1, said  # of a hundred


def looking_at(weights):
    """The head whose queries divide their weight between keys as these rows say."""
    logs, keys = torch.log(torch.as_tensor(weights) + 1e-9), torch.eye(len(weights), dtype=torch.float64)
    with pa.inspect.capture() as heads:
        pa.inspect.record(logs[None, None], keys[None, None], keys[None, None], is_causal=True, scale=1.0)
    return pa.inspect.read(heads, budget=0).heads[0].sentence


def test_places_that_share_the_weight_are_all_named():
    half = 0.5 * np.eye(80, k=-1)
    half[:, 0] += 0.5
    said = looking_at(half)
    assert said.startswith("Looks at the ") and "the previous token: 5" in said and "the first token: 5" in said
    said = looking_at((np.eye(80) + np.eye(80, k=-1) + np.eye(80, k=-2)) / 3)
    assert all(words in said for words in ("its own position: 3", "the previous token: 3", "the token 2 back")), said
    previous = np.eye(80, k=-1)
    previous[0, 0] = 1
    assert looking_at(previous).count("%") == 2  # its own, and that of the random head


def test_a_head_that_picks_the_same_key_for_all_queries_says_so():
    q, k = torch.ones(1, 1, 60, 4), torch.zeros(1, 1, 60, 4)
    k[0, 0, 7] = 6.0
    with pa.inspect.capture() as heads:
        pa.inspect.record(q, k, torch.randn(1, 1, 60, 4))
    said = pa.inspect.read(heads, budget=0).heads[0].sentence
    assert said.startswith("Picks one key, the same one for 100% of a sequence's queries: "), said


class Plain(nn.Module):
    def forward(self, x):
        return functional.scaled_dot_product_attention(x[:, None], x[:, None], x[:, None])[:, 0]


class Translator(nn.Module):
    """Two sequences of one length, each with an embedding and an attention of its own."""

    def __init__(self, upfront):
        super().__init__()
        self.source, self.target, self.upfront = nn.Embedding(50, 8), nn.Embedding(50, 8), upfront
        self.encoder, self.decoder = Plain(), Plain()

    def forward(self, a, b):
        y = self.target(b) if self.upfront else None
        x = self.encoder(self.source(a))
        return x + self.decoder(self.target(b) if y is None else y)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("layers", [None, "decoder"])
def test_tokens_are_those_of_the_right_sequence_or_unknown(layers, stream):
    a, b = torch.randperm(40)[:12][None], torch.tensor([[7, 3] * 6])
    for upfront, copies in ((False, 12.0), (True, math.nan)):
        model = Translator(upfront)
        with torch.no_grad(), pa.inspect.capture(model, layers=layers, stream=stream) as heads:
            model(a, b)
        assert pa.inspect.read(heads, budget=0)["decoder", 0].roles.copies == pytest.approx(copies, nan_ok=True)


class Several(nn.Module):
    """Something else is embedded before the tokens."""

    def __init__(self, other, rows):
        super().__init__()
        self.given, self.attend = other, Plain()
        self.other, self.words = nn.Embedding(rows or int(other.max()) + 1, 8), nn.Embedding(100, 8)

    def forward(self, ids):
        return self.attend(self.other(self.given) + self.words(ids))


@pytest.mark.parametrize(
    "other",
    [
        [[1, 1, 1, 0, 1, 2, 3, 4], [0, 1, 2, 3, 4, 5, 6, 7]],  # positions, padded on the left
        [[2, 3, 4, 5, 6, 7, 1, 1], [2, 3, 4, 5, 6, 7, 8, 9]],  # on the right
        [[0, 0, 0, 0, 1, 1, 1, 1], [0, 0, 1, 1, 1, 1, 1, 1]],  # segments
        [[0, 1, 1, 0, 1, 0, 0, 1], [1, 0, 0, 0, 1, 1, 0, 1]],  # anything, in a table of two rows
        [[0, 1, 2, 3, 0, 1, 2, 3], [0, 1, 2, 3, 4, 0, 1, 2]],  # positions of packed documents
        [[1, 1, 1, 1, 1, 1, 0, 1], [0, 1, 2, 3, 4, 5, 6, 7]],  # few tokens, padded
    ],
)
def test_positions_and_segments_are_not_tokens(other):
    ids = torch.tensor([[9, 8, 9, 7, 9, 8, 7, 6], [5, 5, 6, 7, 5, 6, 7, 8]])
    for rows in (None, 1024):  # tables of positions may be larger than the vocabulary
        model = Several(torch.tensor(other), rows)
        with torch.no_grad(), pa.inspect.capture(model) as heads:
            model(ids)
        found = [s.tokens for s in heads["attend", 0].snapshots]
        if rows is None or max(map(max, other)) > 1:  # numbers without order in a large table may be tokens
            assert np.array_equal(found, ids)


def test_passes_without_attention_do_not_pile_up():
    words = nn.Embedding(50, 8)
    with pa.inspect.capture() as heads:
        for _ in range(200):
            words(torch.randperm(40)[:12][None])
    assert len(heads._tokens._found) <= 64


def test_heads_are_read_whatever_the_default_device():
    with pa.inspect.capture() as heads:
        pa.inspect.record(*torch.randn(3, 1, 2, 20, 8))
    wanted = str(pa.inspect.read(heads).rows())
    with torch.device("meta"):
        assert str(pa.inspect.read(heads).rows()) == wanted


EXTREMES = {
    "slopes, queries beyond the keys": (torch.float32, 1e-3, 1e-3, 1.0, 0.125),
    "slopes in float64": (torch.float64, 1e-3, 1e-3, 1.0, 0.125),
    "squares vanish": (torch.float32, 1e-24, 1e18, 1e6, 0.0),
    "squares vanish in float64": (torch.float64, 1e-170, 1e150, 1e20, 0.0),
    "squares vanish and overflow": (torch.float32, 1e-30, 1e30, 1.0, 0.0),
    "products underflow": (torch.float32, 1.0, 1e18, 1e-42, 0.0),
}


@pytest.mark.parametrize("name", EXTREMES)
def test_the_error_of_the_scores_is_a_bound_for_all_sizes(name):
    dtype, size, other, scale, slope = EXTREMES[name]
    torch.manual_seed(0)
    dim = 1 if slope else 3
    q, k = ((s * torch.randn(1, 1, n, dim, dtype=torch.float64)).to(dtype) for s, n in ((size, 2000), (other, 10)))
    slope = slope and float(np.float32(slope - 0.0015433))  # no power of two
    with pa.inspect.capture(stream=True, queries=True, null=False) as heads:
        pa.inspect.record(
            q, k, torch.randn(1, 1, 10, 2, dtype=dtype), scale=scale, slopes=torch.tensor([slope]) if slope else None
        )
    head, each = pa.inspect.read(heads).heads[0], heads["attention", 0].queries()
    a, b = (t[0, 0].double().numpy().astype(np.longdouble) for t in (q, k))
    away = np.abs(np.arange(2000)[:, None] - np.arange(10))
    scores = np.sort(np.longdouble(scale) * (a @ b.T) - np.longdouble(slope) * away, axis=1)
    margins = scores[:, -1] - scores[:, -2]
    relative = 2.0**-50 if dtype == torch.float64 else 2.0**-22
    assert 0 < head.score_error < math.inf
    assert (np.abs(each["margins"] - margins) <= 2 * each["score_error"] + relative * margins).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_alibi_is_recorded_in_float64(dtype):
    torch.manual_seed(0)
    q, k, v = ((1e-3 * torch.randn(1, 1, n, 1)).to(dtype) for n in (2000, 10, 10))
    slopes = torch.tensor([0.1234567])
    with pa.inspect.capture() as heads:
        pa.inspect.record(q, k, v, scale=1.0, slopes=slopes)
    a, b = (t[0, 0, :, 0].double().numpy() for t in (q, k))
    away = np.abs(np.arange(2000)[:, None] - np.arange(10))
    scores = np.sort(a[:, None] * b - slopes.double().item() * away, axis=1)
    assert np.abs(heads["attention", 0].queries()["margins"] - (scores[:, -1] - scores[:, -2])).max() < 1e-12


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("wrong", [math.nan, math.inf])
def test_masks_that_are_not_finite_are_refused(wrong, stream):
    mask = torch.zeros(20, 20)
    mask[3, 4] = wrong
    with pytest.raises(NonFiniteValueError, match="mask of a head"), pa.inspect.capture(stream=stream) as heads:
        pa.inspect.record(*torch.randn(3, 1, 2, 20, 8), attn_mask=mask)
        pa.inspect.read(heads)


def test_scores_that_overflow_are_refused():
    q, k, v = torch.randn(3, 1, 2, 20, 8)
    with pytest.raises(NonFiniteValueError, match="overflow"), pa.inspect.capture(stream=True):
        pa.inspect.record(1e25 * q, 1e25 * k, v)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("stream", [False, True])
def test_random_heads_beside_flex_attention_that_changes_the_scores(stream):
    if tuple(map(int, torch.__version__.split(".")[:2])) < (2, 9):
        pytest.skip("flex attention is seen from torch 2.9 on")
    from torch.nn.attention.flex_attention import flex_attention

    def capped(score, b, h, i, j):
        return 5 * torch.tanh(score / 5)

    q, k, v = 4 * torch.randn(3, 1, 2, 100, 16)
    for mod, known in ((capped, stream), (lambda score, b, h, i, j: score - (i - j), True)):
        with pa.inspect.capture(stream=stream) as heads:
            flex_attention(q, k, v, score_mod=mod)
        report = pa.inspect.read(heads, budget=0)
        null = report.heads[0].null
        assert (null.queries > 0) == known and str(report)
        assert math.isnan(null.effective_keys) != known
        if mod is capped and known:
            assert null.effective_keys > 1.5  # its own scores are capped


@pytest.mark.parametrize("share", [0.36, 0.45, 0.54])
def test_one_key_is_not_named_twice(share):
    """In text that repeats, what followed the other copy is also at one distance."""
    ids, rng = np.tile(np.random.default_rng(0).permutation(16), 3), np.random.default_rng(1)
    weights = np.full((48, 48), (1 - share) / 48)
    weights[np.arange(16, 48), np.arange(1, 33)] += share
    logs = torch.from_numpy(np.log(weights))[None, None]
    keys, values = torch.eye(48, dtype=torch.float64)[None, None], torch.from_numpy(rng.normal(size=(1, 1, 48, 4)))
    with pa.inspect.capture(tokens=ids.tolist()) as heads:
        pa.inspect.record(logs, keys, values, is_causal=True, scale=1.0)
    head = pa.inspect.read(heads, budget=0).heads[0]
    assert head.sentence.count("%") == 2 and head.sentence.startswith("Looks") == (head.roles.induction >= 0.5)


def test_a_distance_that_few_queries_have_is_not_named():
    torch.manual_seed(0)
    q = torch.randn(1, 1, 12, 12)
    q[0, 0, :4] = 60 * torch.eye(12)[8:]  # eight ahead, where there is one
    with pa.inspect.capture() as heads:
        pa.inspect.record(q, torch.eye(12)[None, None], torch.randn(1, 1, 12, 4), scale=1.0)
    head = pa.inspect.read(heads, budget=0).heads[0]
    assert head.roles.lag == -8 and head.roles.on_lag > 0.99 and "ahead" not in head.sentence
