"""The price of dropped keys: rules against plain loops, bounds against both outputs in float64 and in many digits."""

from __future__ import annotations

import dataclasses
import json
import math
import os
from fractions import Fraction

import mpmath
import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.attention.flex_attention import flex_attention

import partita as pa
from partita.errors import NonFiniteValueError
from partita.inspection import audited_heads
from partita.kernels import dropped_keys

AT = pa.inspect


class Attention(nn.Module):
    """The inputs are q, k, v and perhaps a mask, so that tests choose them."""

    def forward(self, q, k, v, mask=None, causal=False):
        return functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal)


def plain(q, k, v, keep, bias=None):
    """Outputs over all visible and over the kept keys, float64; `(batch, queries, dim)`. Empty sums are 0."""
    scores = np.einsum("bqd,bkd->bqk", q, k) / np.sqrt(q.shape[-1])
    bias = np.zeros_like(scores) if bias is None else np.broadcast_to(bias, scores.shape)
    out = []
    for seen in (np.isfinite(bias), np.isfinite(bias) & keep):
        s = np.where(seen, scores + np.where(np.isfinite(bias), bias, 0.0), -np.inf)
        top = s.max(axis=-1, keepdims=True)
        p = np.where(seen, np.exp(s - np.where(np.isfinite(top), top, 0.0)), 0.0)
        total = p.sum(axis=-1, keepdims=True)
        out.append(np.einsum("bqk,bkd->bqd", p / np.where(total > 0, total, 1.0), v))
    return out, np.isfinite(bias)


def families(seed):
    """Random and adversarial q, k, v, biases and kept keys: `name, q, k, v, bias, keep, tile`; about 10⁵ queries in all."""
    rng = np.random.default_rng(seed)
    batch, queries, keys, dim = 1500, 4, 13, 3

    def normal(*shape, size=1.0):
        return size * rng.standard_normal((batch, *shape))

    for size in (0.1, 1.0, 5.0, 30.0, 1e3, 1e8):
        for share in (0.2, 0.8):
            keep = rng.random((queries, keys)) < share
            qkv = normal(queries, dim, size=size), normal(keys, dim, size=size), normal(keys, 2)
            yield f"size {size}", *qkv, None, keep, (2, 4)
    whole = (
        rng.integers(-2, 3, (batch, queries, dim)).astype(float),
        rng.integers(-2, 3, (batch, keys, dim)).astype(float),
    )
    yield (
        "ties",
        *whole,
        rng.integers(-1, 2, (batch, keys, 2)).astype(float),
        None,
        rng.random((queries, keys)) < 0.5,
        (1, 1),
    )
    same = np.repeat(normal(1, dim), keys, axis=1)
    yield "equal keys", normal(queries, dim), same, normal(keys, 2), None, rng.random((queries, keys)) < 0.3, (4, 128)
    far = normal(keys, 2) + 1e7
    yield (
        "far values",
        normal(queries, dim, size=3),
        normal(keys, dim),
        far,
        None,
        rng.random((queries, keys)) < 0.5,
        (2, 3),
    )
    tiny = normal(keys, 2, size=1e-200)
    yield (
        "tiny values",
        normal(queries, dim, size=3),
        normal(keys, dim),
        tiny,
        None,
        rng.random((queries, keys)) < 0.5,
        (2, 3),
    )
    masked = np.where(rng.random((batch, queries, keys)) < 0.5, -np.inf, 0.0)
    masked[:3] = -np.inf  # nothing is visible
    yield (
        "masks",
        normal(queries, dim, size=3),
        normal(keys, dim),
        normal(keys, 2),
        masked,
        rng.random(keys) < 0.5,
        (2, 2),
    )
    biased = np.where(rng.random((batch, queries, keys)) < 0.3, -np.inf, normal(queries, keys, size=9))
    yield "biases", normal(queries, dim), normal(keys, dim), normal(keys, 2), biased, rng.random(keys) < 0.5, (3, 5)
    yield "all dropped", normal(queries, dim), normal(keys, dim), normal(keys, 2), None, np.zeros(keys, bool), (2, 4)
    yield "none dropped", normal(queries, dim), normal(keys, dim), normal(keys, 2), None, np.ones(keys, bool), (2, 4)
    # one tile far from the output whose mass is known exactly, one at the output whose mass is not: U in the denominator fails
    q, k = np.ones((batch, queries, 1)), np.zeros((batch, 13, 1))
    k[:, 1:7] = -np.log(2.0) * rng.integers(1, 3, (batch, 6, 1))
    k[:, 7:] = -np.log(2.0) * (rng.integers(1, 3, (batch, 6, 1)) + 0.557 + 0.01 * rng.random((batch, 6, 1)))
    v = np.concatenate([np.zeros((batch, 1, 1)), np.ones((batch, 6, 1)), np.zeros((batch, 6, 1))], axis=1)
    yield "known and unknown", q, k, v, None, np.arange(13) < 1, (1, 1)
    for tile in ((1, 1), (3, 2), (64, 128)):
        one_hot = 40.0 * rng.standard_normal((batch, keys, dim)).round()
        yield (
            "far apart",
            normal(queries, dim, size=4),
            one_hot,
            normal(keys, 2),
            None,
            rng.random((queries, keys)) < 0.5,
            tile,
        )


def audited(q, k, v, bias, keep, tile):
    tensors = [torch.from_numpy(np.ascontiguousarray(t))[:, None] for t in (q, k, v)]
    mask = None if bias is None else torch.from_numpy(np.ascontiguousarray(bias))[:, None]
    return AT.audit(Attention(), (*tensors, mask), AT.KeepMask(keep, tile=tile)).heads[0]


def judged(seed=0):
    """For every family: name, measured changes, what the audit says, for the queries that count."""
    for name, q, k, v, bias, keep, tile in families(seed):
        (full, kept), seen = plain(q, k, v, keep, bias)
        change = np.linalg.norm(full - kept, axis=-1)
        head = audited(q, k, v, bias, keep, tile)
        yield name, change[head.sequence, head.positions], head, seen.any(axis=-1)


def test_the_bound_is_never_below_what_is_measured():
    queries = 0
    for name, change, head, seen in judged():
        assert len(change) == seen.sum(), name  # queries that see nothing are not counted
        assert (change <= head.error_bound).all(), name
        assert (head.error <= head.error_bound).all(), name
        queries += len(change)
        if name == "none dropped":
            assert not head.error_bound.any() and not head.error.any() and not head.mass_lost.any()
        if name in ("size 1.0", "biases", "masks"):
            np.testing.assert_allclose(head.error, change, atol=1e-13)
            assert np.median(head.error_bound / np.maximum(head.error, 1e-12)) < 20  # it says something, too
    assert queries > 1e5


CONTROLS = {
    "U in the denominator": {"LEAST_SHARE": 1.0},
    "radius 0": {
        "value_balls": lambda values, width: (lambda c, r: (c, 0 * r))(*dropped_keys.value_balls(values, width))
    },
    "L and U exchanged": {"LEAST_SHARE": 1 / 0.942, "upper_masses": lambda t: 0.942 * dropped_keys.upper_masses(t)},
    "centers forgotten": {"value_balls": lambda v, w: (lambda c, r: (0 * c, r))(*dropped_keys.value_balls(v, w))},
}


@pytest.mark.parametrize("name", CONTROLS)
def test_wrong_bounds_are_noticed(name, monkeypatch):
    for attribute, wrong in CONTROLS[name].items():
        module = dropped_keys if attribute == "LEAST_SHARE" else audited_heads
        monkeypatch.setattr(module, attribute, wrong)
    assert any((change > head.error_bound).any() for _, change, head, _ in judged())


def many_digits(q, k, v, keep):
    """The change of one query's output in 60 digits."""
    with mpmath.workdps(60):
        scale = 1 / mpmath.sqrt(len(q))
        p = [mpmath.exp(scale * mpmath.fdot(zip(map(mpmath.mpf, q), map(mpmath.mpf, key)))) for key in k]

        def mean(chosen):
            total = mpmath.fsum(p[j] for j in chosen) if len(chosen) else mpmath.mpf(1)
            return [mpmath.fsum(p[j] * mpmath.mpf(v[j][c]) for j in chosen) / total for c in range(len(v[0]))]

        full, kept = mean(range(len(k))), mean(np.flatnonzero(keep))
        return float(mpmath.sqrt(mpmath.fsum((a - b) ** 2 for a, b in zip(full, kept))))


def test_tiny_changes_agree_with_many_digits():
    rng = np.random.default_rng(1)
    for size in (1.0, 6.0, 20.0):
        q, k, v = (
            size * rng.standard_normal((1, 5, 3)),
            rng.standard_normal((1, 9, 3)),
            rng.standard_normal((1, 9, 2)),
        )
        keep = np.zeros((5, 9), bool)
        np.put_along_axis(
            keep, (q @ k.transpose(0, 2, 1))[0].argsort(axis=-1)[:, 3:], True, axis=-1
        )  # three least dropped
        head = audited(q, k, v, None, keep, (2, 4))
        for row in range(5):
            exact = many_digits(q[0, row].tolist(), k[0].tolist(), v[0].tolist(), keep[row])
            assert head.error[row] == pytest.approx(exact, rel=1e-9)  # also where both outputs agree to 1e-15
            assert head.error_bound[row] >= exact


@pytest.mark.parametrize("size", [1e-310, 1e-200, 1e-160, 1e160, 1e300])
def test_squares_that_overflow_or_vanish(size):
    rng = np.random.default_rng(3)
    q, k, v = (rng.standard_normal((1, n, 3)) for n in (4, 9, 9))
    keep = rng.random((4, 9)) < 0.5
    keep[0] = False  # everything is dropped
    head = audited(q, k, size * v, None, keep, (2, 4))
    for row in range(4):
        exact = many_digits(q[0, row].tolist(), k[0].tolist(), (size * v[0]).tolist(), keep[row])
        assert exact <= head.error_bound[row] < 100 * size + 1e-307
        assert head.error[row] == pytest.approx(exact, rel=1e-9, abs=1e-322)
    assert np.isfinite(head.output_norm).all() and head.output_norm.all()


def test_the_bound_covers_how_others_round():
    """Both outputs from scores of their own, summed in another order, where what is dropped weighs nothing."""
    rng = np.random.default_rng(2)
    row = 3e4 * rng.standard_normal((50, 8))
    k = np.stack(
        [row, *(rng.permuted(row, axis=1) for _ in range(4)), row - 1e4], axis=1
    )  # ties, and one key far behind
    q, v, keep = np.full((50, 1, 8), 3e4), rng.standard_normal((50, 6, 2)), np.arange(6) < 5

    def output(order, keys):
        s = sum(q[:, :, c] * k[:, keys, c] for c in order) / np.sqrt(8)
        p = np.exp(s - s.max(axis=1, keepdims=True))
        return (p[..., None] * v[:, keys]).sum(axis=1) / p.sum(axis=1)[:, None]

    change = np.linalg.norm(output(range(8), list(range(6))) - output(range(7, -1, -1), list(range(5))), axis=-1)
    assert change.max() > 1e-9  # nothing but rounding
    assert (change <= audited(q, k, v, None, keep, (1, 1)).error_bound).all()
    q, k, v = rng.standard_normal((50, 1, 3)), rng.standard_normal((50, 6, 3)), rng.standard_normal((50, 6, 2)) + 1e9
    k[:, 5] = -40 * q[:, 0] / (q[:, 0] ** 2).sum(axis=1, keepdims=True) * np.sqrt(3)
    (full, _), _ = plain(q, k, v, keep)
    (kept, _), _ = plain(q, k[:, 4::-1], v[:, 4::-1], np.ones(5, bool))
    change = np.linalg.norm(full - kept, axis=-1)[:, 0]
    head = audited(q, k, v, None, keep, (1, 1))
    assert change.max() > 1e-8 and head.error.max() < 1e-13
    assert (change <= head.error_bound).all()


@pytest.mark.parametrize("power", [20, 36, 46, 53])
def test_the_bound_allows_for_rounded_scores(power):
    """Terms of scores that vanish beside a large one: the dropped key seems to trail by 3, and in truth it may lead."""
    size, dim = 2.0**power, 256
    for large_at in (0, dim - 1):
        q, k = np.full(dim, 2.0**-6), np.tile([[-1.0], [1.0]], dim) * 0.98 * 2.0**-43 * size
        q[large_at] = 16.0  # scaled by 1/16
        k[:, large_at] = size + max(3.0, 2.0**-51 * size), size
        v, keep = np.array([[0.0], [1.0]]), np.array([True, False])
        several = np.tile(q, (1, 8, 1))  # products of few rows are summed in another order
        head = audited(several, k[None], v[None], None, keep, (1, 1))
        exact = many_digits(q.tolist(), k.tolist(), v.tolist(), keep)
        assert (head.error <= head.error_bound).all() and (exact <= head.error_bound).all()
        assert power > 40 or (head.error_bound < 0.1).all()  # it says something, too


def slow_skip(scores, threshold, rows, width):
    """Skip-softmax as it is described, in loops; True where kept. scores `(queries, keys)`, −∞ where masked."""
    keep = np.ones_like(scores, dtype=bool)
    for top in range(0, len(scores), rows):
        running = np.full(len(scores[top : top + rows]), -np.inf)
        for left in range(0, scores.shape[1], width):
            tile = scores[top : top + rows, left : left + width]
            best = tile.max(axis=1)
            running = np.maximum(running, best)
            if all(b == -np.inf or np.exp(b - r) < threshold for b, r in zip(best, running)):
                keep[top : top + rows, left : left + width] = False
    return keep


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("threshold", [0.0, 1e-3, 0.1, 1.0])
def test_blocks_are_skipped_as_described(threshold, causal):
    torch.manual_seed(3)
    k, v = 2 * torch.randn(2, 1, 1, 37, 4, dtype=torch.float64)
    q = 6 * torch.randn(5, 4, dtype=torch.float64).repeat_interleave(8, dim=0)[:37] + torch.randn(1, 1, 37, 4).double()
    head = AT.audit(Attention(), (q, k, v, None, causal), AT.SkipBlocks(threshold, tile=(8, 5))).heads[0]
    scores = (q @ k.mT)[0, 0].numpy() / 2
    if causal:
        scores[np.triu_indices(37, 1)] = -np.inf
    keep, seen = slow_skip(scores, threshold, 8, 5), np.isfinite(scores)
    p = np.exp(scores - scores.max(axis=1, keepdims=True))
    lost = (p * ~keep).sum(axis=1) / p.sum(axis=1)
    tiles = np.pad(seen, ((0, 0), (0, 3))).reshape(37, 8, 5).any(axis=-1)
    gone = np.pad(seen & ~keep, ((0, 0), (0, 3))).reshape(37, 8, 5).any(axis=-1)
    np.testing.assert_allclose(head.mass_lost, lost, atol=1e-15)
    np.testing.assert_allclose(head.skipped, gone.sum(axis=1) / tiles.sum(axis=1))
    assert (threshold == 0) == (not head.skipped.any())
    # the oracle, by trying every number of tiles
    masses = np.pad(p, ((0, 0), (0, 3))).reshape(37, 8, 5).sum(axis=-1)
    for row in range(37):
        light = np.sort(masses[row][tiles[row]]).cumsum()
        most = sum(light <= lost[row] * p[row].sum() * (1 + 1e-9))
        assert head.oracle[row] == pytest.approx(most / tiles[row].sum())
    assert (head.oracle >= head.skipped).all()


def test_rules_that_drop_single_keys():
    torch.manual_seed(4)
    q, k, v = torch.randn(3, 2, 2, 11, 4, dtype=torch.float64)
    scores = (q @ k.mT).numpy() / 2
    i, j = np.indices((11, 11))
    best = scores.argsort(axis=-1)[..., ::-1][..., :3]
    top = np.zeros_like(scores, dtype=bool)
    np.put_along_axis(top, best, True, axis=-1)
    per_head = np.random.default_rng(0).random((2, 11, 11)) < 0.5
    per_head[..., 0] = True
    cases = {
        AT.TopK(3): top,
        AT.Window(2, 3): np.broadcast_to((j < 2) | (abs(i - j) < 3), scores.shape),
        AT.KeepMask(per_head): np.broadcast_to(per_head, scores.shape),
        AT.KeepMask(torch.from_numpy(per_head[0, 0])): np.broadcast_to(per_head[0, 0], scores.shape),
    }
    report = AT.audit(Attention(), (q, k, v), list(cases))
    for number, keep in enumerate(cases.values()):
        for head in range(2):
            (full, kept), _ = plain(q[:, head].numpy(), k[:, head].numpy(), v[:, head].numpy(), keep[:, head])
            found = report.queries("Attention", head, rule=number)
            np.testing.assert_allclose(found["error"], np.linalg.norm(full - kept, axis=-1).ravel(), atol=1e-14)
            np.testing.assert_allclose(found["skipped"], 1 - keep[:, head].mean(axis=-1).ravel())
            np.testing.assert_allclose(found["output_norm"], np.linalg.norm(full, axis=-1).ravel())
            assert found["sequence"].tolist() == [0] * 11 + [1] * 11
            assert found["positions"].tolist() == [*range(11)] * 2
    assert np.allclose(
        report.of("Attention", 0).oracle, report.of("Attention", 0).skipped
    )  # the best k are the oracle's


@pytest.mark.parametrize("bits", [1, 2, 4, 8, 16])
def test_quantised_keys_and_values(bits):
    rng = np.random.default_rng(bits)
    for size, values_at in ((0.3, 0.0), (3.0, 0.0), (3.0, 100.0), (300.0, 0.0)):
        q, k = size * rng.standard_normal((300, 3, 4)), rng.standard_normal((300, 9, 4))
        v = rng.standard_normal((300, 9, 2)) + values_at
        k[0], v[0] = 1.0, 1.0  # constant vectors are stored exactly

        def stored(x):
            least, most = x.min(axis=-1, keepdims=True), x.max(axis=-1, keepdims=True)
            step = (most - least) / (2**bits - 1)
            return np.where(step > 0, least + np.round((x - least) / np.where(step > 0, step, 1)) * step, x)

        keep = np.ones(9, bool)
        (full, _), _ = plain(q, k, v, keep)
        (other, _), _ = plain(q, stored(k), stored(v), keep)
        change = np.linalg.norm(full - other, axis=-1).ravel()
        tensors = [torch.from_numpy(t)[:, None] for t in (q, k, v)]
        head = AT.audit(Attention(), tuple(tensors), AT.Quantized(bits)).heads[0]
        np.testing.assert_allclose(head.error, change, atol=1e-12)
        assert (change <= head.error_bound).all()
        assert not head.error_bound[:3].any() and not head.skipped.any() and not head.mass_lost.any()
        if size < 1 and bits >= 8:
            assert np.median(head.error_bound[3:] / change[3:]) < 10
        if size == 3.0 and not values_at:  # negative control: what the values move is not enough
            assert (change > np.repeat(np.linalg.norm(v - stored(v), axis=-1).max(axis=-1), 3)).any()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("size", [1.0, 1e2, 760.0, 2e4, 3e5, 1e9])
def test_quantised_keys_that_exchange_their_places(size, dtype):
    """Nearly equal keys and long queries: the key that has all of the weight loses all of it, whose exponential underflows."""
    rng = np.random.default_rng(int(size))
    k = np.repeat(rng.standard_normal((400, 1, 3)), 2, axis=1) + rng.choice([1e-9, 1e-4, 1e-2], (400, 1, 1)) * (
        rng.standard_normal((400, 2, 3))
    )
    near = 1e-9 if dtype == torch.float64 else 1e-6
    k[:10] = [[0.0, 0.5 + near, 1.0], [0.0, 0.5 - near, 1.0]]  # stored as 1 and 0 with one bit
    q, v = size * rng.standard_normal((400, 4, 3)), rng.standard_normal((400, 2, 2))
    q[:10, 0] = [0.0, size, 0.0]
    tensors = tuple(torch.from_numpy(t).to(dtype)[:, None] for t in (q, k, v))
    for bits in (1, 4, 8):
        head = AT.audit(Attention(), tensors, AT.Quantized(bits)).heads[0]
        assert (head.error <= head.error_bound).all()
        if bits == 1 and size == 760.0:
            assert head.error[:40:4].min() > 0.1 * np.linalg.norm(v[:10, 0] - v[:10, 1], axis=-1).min()


@pytest.mark.parametrize("size", [1e2, 1e6, 1e9, 1e12])
def test_the_bound_for_stored_keys_is_the_one_of_the_theorem(size):
    """`quantized-keys` in many digits, from exact scores; in floats each a_j grows by 2δ, and the terms of an audit are added."""
    rng = np.random.default_rng(5)
    dim, scale = 3, 1 / math.sqrt(3)
    k = np.repeat(rng.standard_normal((20, 1, dim)), 2, axis=1)
    k[:, 0, 1] += 1e-3 / size  # the middle coordinates differ, and are stored as the same number or another one
    q, v = size * rng.standard_normal((20, 1, dim)), rng.standard_normal((20, 2, 2))
    for bits in (4, 12, 16):
        rule = AT.Quantized(bits)
        stored_k, stored_v = rule.of(torch.from_numpy(k)).numpy(), rule.of(torch.from_numpy(v)).numpy()
        head = AT.audit(Attention(), tuple(torch.from_numpy(t)[:, None] for t in (q, k, v)), rule).heads[0]
        for n in range(20):
            with mpmath.workdps(60):
                query, keys, kept, values, moved = (mpmath.matrix(t[n].tolist()) for t in (q, k, stored_k, v, stored_v))
                before, after = (mpmath.mpf(scale) * keys * query.T for keys in (keys, kept))

                def norm(x):
                    return mpmath.sqrt(mpmath.fsum(c * c for c in x))

                lengths = norm(query) * max(norm(keys[j, :]) for j in (0, 1))
                delta = (dim + 16) * mpmath.mpf(2) ** -53 * (scale * lengths + max(abs(s) for s in before))
                weights = [1 / (1 + mpmath.exp(after[1 - j] - after[j])) for j in (0, 1)]
                answer = weights[0] * moved[0, :] + weights[1] * moved[1, :]
                a = [scale * norm(query) * norm(keys[j, :] - kept[j, :]) for j in (0, 1)]
                e = [norm(values[j, :] - moved[j, :]) for j in (0, 1)]
                reach = [norm(moved[j, :] - answer) for j in (0, 1)]
                spread = norm(values[0, :] - values[1, :])

                def bound(grown, a=a, e=e, reach=reach, weights=weights, spread=spread):
                    above = (mpmath.exp(x + grown) * (y + r) - r for x, y, r in zip(a, e, reach))
                    found = mpmath.fsum(w * x for w, x in zip(weights, above))
                    found /= mpmath.fsum(w * mpmath.exp(-x - grown) for w, x in zip(weights, a))
                    return min(found, spread + max(e))

                stated = bound(2 * delta) + mpmath.expm1(4 * delta) * spread
                truth = [1 / (1 + mpmath.exp(before[1 - j] - before[j])) for j in (0, 1)]
                change = norm(truth[0] * values[0, :] + truth[1] * values[1, :] - answer)
                assert change <= bound(0) * (1 + mpmath.mpf(10) ** -40)  # the theorem itself
                assert change <= head.error_bound[n] and head.error[n] <= head.error_bound[n]
                stated = min(stated, spread + max(e))  # of rounded scores, which are off by less than δ/8 here
                assert stated - min(delta / 4, 1e-9) * spread <= head.error_bound[n]


@pytest.mark.parametrize("big", [300, 3000, 30000])
@pytest.mark.parametrize("bits", [4, 8])
def test_a_stored_key_that_is_far_larger_than_the_others(bits, big):
    """It may have all of the weight after it is rounded, and none before. Its value is then the output, to rounding."""
    torch.manual_seed(0)
    q, k, v = torch.randn(1, 1, 4000, 8), torch.randn(1, 1, 16, 8), torch.randn(1, 1, 16, 8)
    k[0, 0, -1] *= big
    v[0, 0, -1] = 0
    rule = AT.Quantized(bits)
    head = AT.audit(Attention(), (q, k, v), rule).heads[0]
    q, k, v = (t[0, 0].double() for t in (q, k, v))
    outs = [
        torch.softmax(0.5 * 2**-0.5 * q @ keys.mT, dim=-1) @ values for keys, values in ((k, v), map(rule.of, (k, v)))
    ]
    change = (outs[0] - outs[1]).norm(dim=-1).numpy()
    assert (change <= head.error_bound).all() and (head.error <= head.error_bound).all()
    assert (head.error_bound < 1).mean() > 0.2  # and says something where the other keys matter


def test_values_whose_sums_overflow_are_refused():
    q, k, v = torch.randn(3, 1, 1, 8, 4, dtype=torch.float64)
    AT.audit(Attention(), (q, k, 1e299 * v), AT.TopK(2))
    with pytest.raises(NonFiniteValueError, match="sums of them overflow float64; expected at most 1e"):
        AT.audit(Attention(), (q, k, 1e303 * v.sign()), AT.TopK(2))


def test_values_half_way_between_two_levels():
    """Vectors whose coordinates lie half way between levels: each is rounded as it is."""
    rng = np.random.default_rng(4)
    v = rng.integers(-4, 5, (1, 200, 4)) / 10
    v[:, 0] = 1e3 / 3  # far from the others, and so is the mean
    q, k = np.zeros((1, 1, 2)), np.zeros((1, 200, 2))
    head = AT.audit(Attention(), tuple(torch.from_numpy(t)[:, None] for t in (q, k, v)), AT.Quantized(2)).heads[0]
    low, high = v.min(axis=-1, keepdims=True), v.max(axis=-1, keepdims=True)
    step = (high - low) / 3
    stored = np.where(step > 0, low + np.round((v - low) / np.where(step > 0, step, 1.0)) * step, v)
    change = np.linalg.norm(v.mean(axis=1) - stored.mean(axis=1))
    assert head.error[0] == pytest.approx(change, rel=1e-9)
    assert change <= head.error_bound[0]


def test_quantised_values_alone():
    rng = np.random.default_rng(0)
    q, k, v = rng.standard_normal((40, 3, 4)), rng.choice([-1.0, 1.0], (40, 9, 4)), rng.standard_normal((40, 9, 2))
    v[..., 1] = 2 * v[..., 0]
    v = np.concatenate([v, np.full((40, 9, 1), 0.3)], axis=-1)  # between least and largest, so that it is rounded
    head = AT.audit(Attention(), tuple(torch.from_numpy(t)[:, None] for t in (q, k, v)), AT.Quantized(1)).heads[0]
    assert (head.error <= head.error_bound).all() and np.median(head.error) > 0.01
    assert np.median(head.error_bound / head.error) < 3


def test_padding_and_captured_heads_agree_with_the_model():
    torch.manual_seed(5)
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).double().eval()
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()
    x, padding = torch.randn(3, 10, 8, dtype=torch.float64), torch.zeros(3, 10, dtype=torch.bool)
    padding[1, 6:] = True
    inputs = {"src": x, "src_key_padding_mask": padding}
    rules = [AT.SkipBlocks(0.5, tile=(4, 2)), AT.Window(1, 2), AT.Quantized(3)]
    live = AT.audit(model, inputs, rules)
    assert len(live.heads) == 3 * 4 and len(live.heads[0].error) == 26
    with torch.no_grad(), AT.capture(model) as heads:
        model(**inputs)
    recorded = AT.audit(heads, rule=rules)
    for one, other in zip(live.heads, recorded.heads, strict=True):
        assert (one.name, str(one.rule)) == (other.name, str(other.rule))
        for name, array in live.queries(one.layer, one.head).items():
            np.testing.assert_allclose(array, recorded.queries(one.layer, one.head)[name], atol=1e-12)
    chosen = AT.audit(model, inputs, rules[0], heads=[(live.heads[1].layer, 1)])
    assert [h.name for h in chosen.heads] == [live.heads[1].name]
    several = AT.audit(model, [inputs, inputs], rules[0])
    assert several.heads[0].sequence.max() == 5


def test_caches_of_different_lengths_in_one_batch():
    torch.manual_seed(1)
    q, (k, v) = torch.randn(2, 1, 1, 4), torch.randn(2, 2, 1, 12, 4)
    keep = torch.arange(12) < torch.tensor([12, 5])[:, None, None, None]

    class Cached(nn.Module):
        def forward(self, q, k, v, keep):
            return functional.scaled_dot_product_attention(q, k, v, attn_mask=keep)

    rules = [AT.Window(0, 3), NearPositions()]
    both = AT.audit(Cached(), (q, k, v, keep), rules)
    with AT.capture() as heads:
        Cached()(q, k, v, keep)
    for found in (both, AT.audit(heads, rule=rules)):
        for number in range(len(rules)):
            for element in range(2):
                one = slice(element, element + 1)
                alone = AT.audit(Cached(), (q[one], k[one], v[one], keep[one]), rules).heads[number]
                assert (
                    found.heads[number].mass_lost[element] == pytest.approx(alone.mass_lost[0])
                    and alone.mass_lost[0] < 1
                )


class NearPositions(AT.DroppingRule):
    def keeps(self, scores, positions, head):
        return (positions[:, None] - torch.arange(scores.shape[-1])).abs() < 2


def test_some_positions_of_a_causal_head():
    torch.manual_seed(6)
    q, k, v = torch.randn(3, 1, 1, 40, 4, dtype=torch.float64)
    with AT.capture(tokens=9) as heads:
        Attention()(q, k, v, None, True)
    some = AT.audit(heads, rule=[AT.TopK(3), AT.Window(1, 5)])
    every = AT.audit(Attention(), (q, k, v, None, True), [AT.TopK(3), AT.Window(1, 5)])
    for rule in range(2):
        found, whole = some.heads[rule], every.heads[rule]
        np.testing.assert_allclose(found.error, whole.error[found.positions], atol=1e-14)
        np.testing.assert_allclose(found.error_bound, whole.error_bound[found.positions], rtol=1e-9, atol=1e-13)


def test_blocks_of_some_positions_consist_of_those():
    """A block holds the recorded queries of its positions, however many they are."""
    torch.manual_seed(6)
    q, k, v = torch.randn(3, 1, 1, 40, 4, dtype=torch.float64)
    with AT.capture(tokens=9) as heads:
        Attention()(5 * q, k, v, None, True)
    tile = (8, 5)
    found = AT.audit(heads, rule=AT.SkipBlocks(0.2, tile=tile)).heads[0]
    assert len(found.positions) == 9 and len(set(found.positions // 8)) == 5
    scores = (5 * q @ k.mT)[0, 0].numpy() / 2
    scores[np.triu_indices(40, 1)] = -np.inf
    for block in range(5):
        rows = found.positions[found.positions // 8 == block]
        keep = slow_skip(scores[rows], 0.2, len(rows), 5)
        p = np.exp(scores[rows] - scores[rows].max(axis=1, keepdims=True))
        lost = (p * ~keep).sum(axis=1) / p.sum(axis=1)
        np.testing.assert_allclose(found.mass_lost[found.positions // 8 == block], lost, atol=1e-15)
    by_rows = slow_skip(scores[found.positions], 0.2, 8, 5)  # negative control: rows of blocks are not counted
    p = np.exp(scores[found.positions] - scores[found.positions].max(axis=1, keepdims=True))
    assert not np.allclose(found.mass_lost, (p * ~by_rows).sum(axis=1) / p.sum(axis=1))


def test_parts_do_not_matter(monkeypatch):
    torch.manual_seed(7)
    inputs = tuple(torch.randn(3, 2, 2, 50, 4, dtype=torch.float64))
    rules = [AT.SkipBlocks(0.2, tile=(8, 4)), AT.SkipBlocks(0.2, tile=(6, 4)), AT.TopK(5)]
    whole = AT.audit(Attention(), inputs, rules)
    monkeypatch.setattr(audited_heads, "_SCORES_AT_ONCE", 100)
    cut = AT.audit(Attention(), inputs, rules)
    for one, other in zip(whole.heads, cut.heads, strict=True):
        for name in ("skipped", "oracle", "mass_lost", "error", "error_bound", "positions", "sequence"):
            np.testing.assert_allclose(getattr(one, name), getattr(other, name), atol=1e-13)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_grouped_queries_in_few_digits(dtype):
    class Grouped(nn.Module):
        def forward(self, q, k, v):
            return functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)

    torch.manual_seed(8)
    q, k, v = torch.randn(1, 4, 6, 8).to(dtype), torch.randn(1, 2, 6, 8).to(dtype), torch.randn(1, 2, 6, 3).to(dtype)
    report = AT.audit(Grouped(), (q, k, v), AT.TopK(2))
    for head in range(4):
        one = [t[:, h].double().numpy() for t, h in ((q, head), (k, head // 2), (v, head // 2))]
        order = (one[0] @ one[1].transpose(0, 2, 1)).argsort(axis=-1)[..., ::-1]
        keep = np.zeros((1, 6, 6), bool)
        np.put_along_axis(keep, order[..., :2], True, axis=-1)
        (full, kept), _ = plain(*one, keep)
        np.testing.assert_allclose(
            report.of("Grouped", head).error, np.linalg.norm(full - kept, axis=-1)[0], atol=1e-13
        )


class Model(nn.Module):
    """Attention in both forms that can be replaced, and a loss."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(9)
        self.first, self.second = Attention(), nn.MultiheadAttention(8, 2, batch_first=True)
        self.double().eval()

    def forward(self, x):
        split = x.unflatten(-1, (2, 4)).transpose(1, 2)
        x = x + self.first(2 * split, split, split).transpose(1, 2).flatten(2)
        return x + self.second(x, x, x, need_weights=False)[0]


def test_the_loss_changes_as_if_the_head_were_changed():
    model, x = Model(), torch.randn(2, 7, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))

    def loss(m):
        return m(x).square().mean()

    base = float(loss(model).detach())
    report = AT.audit(model, x, [AT.Window(1, 2), AT.TopK(7)], loss)
    assert report.loss == base
    # head 1 of the first layer, by hand: the window as a mask of that head
    i, j = np.indices((7, 7))
    mask = torch.ones(2, 7, 7, dtype=torch.bool)
    mask[1] = torch.from_numpy((j < 1) | (abs(i - j) < 2))

    class Changed(Attention):
        def forward(self, q, k, v):
            return super().forward(q, k, v, mask)

    other = Model()
    other.first = Changed()
    assert report.of("first", 1).loss_change == pytest.approx(float(loss(other).detach()) - base, abs=1e-13)
    assert {h.name for h in report.heads} == {"first:0", "first:1", "second:0", "second:1"}
    assert report.together[0] != 0 and report.together[1] == 0  # nothing is dropped: not a bit changes
    assert [h.loss_change for h in report.heads if h.rule is report.rules[1]] == [0.0] * 4
    assert "loss" in str(report) and report.rows()[0]["loss_change"] == report.heads[0].loss_change


def test_reports_are_plain_data():
    model, x = Model(), torch.randn(1, 6, 8, dtype=torch.float64)
    seen = []
    report = AT.audit(model, x, AT.Window(0, 1), progress=lambda *told: seen.append(told))
    assert seen[-1] == ("", 1, 1) and seen[0] == ("first", 0, 1)
    AT.audit(model, x, AT.Window(0, 1), lambda m: m(x).sum(), progress=lambda *told: seen.append(told))
    assert seen[-1] == ("", len(report.heads), len(report.heads))
    row = report.rows()[0]
    assert list(row)[:6] == ["layer", "head", "rule", "queries", "skipped", "oracle"] and row["rule"] == "Window(0, 1)"
    assert row["error_q50"] <= row["error_q90"] <= row["error_q99"] <= row["error"] <= row["error_bound"]
    assert json.loads(json.dumps(report.to_json(), allow_nan=False))["heads"][0] == row
    assert "<table" in report._repr_html_() and "Window" in repr(report) and "skipped" in str(report)


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (lambda: AT.SkipBlocks(2.0), pa.errors.DomainError, "threshold is 2.0"),
        (lambda: AT.SkipBlocks(float("nan")), pa.errors.DomainError, "threshold"),
        (lambda: AT.SkipBlocks(0.1, tile=(0, 4)), pa.errors.DomainError, "tile"),
        (lambda: AT.SkipBlocks(0.1, tile=7), pa.errors.DomainError, "tile is 7"),
        (lambda: AT.TopK(0), pa.errors.DomainError, "k is 0"),
        (lambda: AT.Window(-1, 2), pa.errors.DomainError, "sinks"),
        (lambda: AT.Quantized(17), pa.errors.DomainError, "bits"),
        (lambda: AT.KeepMask([1, 0]), pa.errors.UnsupportedError, "booleans"),
        (lambda: AT.KeepMask(np.ones((2, 2, 2, 2), bool)), pa.errors.ShapeError, "every sequence"),
        (lambda: AT.audit(Attention(), None, AT.TopK(1)), pa.errors.UnsupportedError, "inputs is None"),
        (lambda: AT.audit(Attention(), QKV, None), pa.errors.UnsupportedError, "rule is None"),
        (lambda: AT.audit(Attention(), QKV, []), pa.errors.UnsupportedError, "rule is an empty list"),
        (lambda: AT.audit(nn.Linear(2, 2), QKV[0], AT.TopK(1)), pa.errors.UnsupportedError, "no attention"),
        (lambda: AT.audit(Attention(), QKV, AT.TopK(1), heads=[("x", 0)]), pa.errors.UnsupportedError, "did not run"),
        (
            lambda: AT.audit(Attention(), QKV, AT.TopK(1), heads=[("Attention", 7)]),
            pa.errors.UnsupportedError,
            r"head 7 of layer 'Attention' did not run. Heads that ran: Attention:0\.",
        ),
        (lambda: AT.audit(Attention(), QKV, AT.TopK(1), heads=[]), pa.errors.UnsupportedError, "heads is empty"),
        (lambda: AT.audit(Attention(), QKV, AT.TopK(1), heads=3), pa.errors.UnsupportedError, "heads is 3; expected"),
        (
            lambda: AT.audit(Attention(), QKV, AT.TopK(1), heads=[("m", "a")]),
            pa.errors.UnsupportedError,
            r"heads contains \('m', 'a'\); expected \(layer, head\)",
        ),
        (lambda: AT.audit(Attention(), QKV, AT.TopK(1), readers=[1]), pa.errors.UnsupportedError, r"readers is \[1\]"),
        (
            lambda: AT.audit(Attention(), QKV, AT.TopK(1), readers={"a": 1}),
            pa.errors.UnsupportedError,
            r"readers is .*expected \{pattern: f\}",
        ),
        (
            lambda: AT.audit(Attention(), QKV, AT.Rule()),
            pa.errors.UnsupportedError,
            "rule is .*DroppingRule of your own",
        ),
        (
            lambda: AT.audit(Attention(), captured(), AT.TopK(1)),
            pa.errors.UnsupportedError,
            "inputs are captured heads",
        ),
        (
            lambda: AT.audit(Attention(), QKV, AT.TopK(1)).queries("Attention", 0, rule="a"),
            pa.errors.DomainError,
            r"rule is 'a'; expected the number of a rule: 0 \(TopK\(1\)\)",
        ),
        (
            lambda: AT.audit(Attention(), QKV, AT.TopK(1)).of("Attention", 0, rule=1),
            pa.errors.DomainError,
            "rule is 1",
        ),
        (lambda: AT.audit(Attention(), QKV, AT.KeepMask(np.ones(7, bool))), pa.errors.ShapeError, "keys"),
        (
            lambda: AT.audit(Attention(), tuple(t * np.nan for t in QKV), AT.TopK(1)),
            pa.errors.NonFiniteValueError,
            "NaN",
        ),
        (
            lambda: AT.audit(Attention(), tuple(t.double() * 1e200 for t in QKV), AT.TopK(1)),
            pa.errors.NonFiniteValueError,
            "overflow",
        ),
        (lambda: AT.audit(3, rule=AT.TopK(1)), pa.errors.UnsupportedError, "int"),
        (
            lambda: AT.audit(Attention(), tuple(t[:, :, :0] for t in QKV), AT.TopK(1)),
            pa.errors.UnsupportedError,
            "no query",
        ),
    ],
)
def test_mistakes_are_named(make, error, words):
    with pytest.raises(error, match=words):
        make()


QKV = tuple(torch.ones(3, 1, 1, 2, 2).unbind())


def captured():
    with AT.capture() as heads:
        AT.record(*QKV)
    return heads


class Said(AT.DroppingRule):
    """A rule of a user, without tile and name: it keeps what it was told."""

    def __init__(self, kept):
        self.kept = kept

    def keeps(self, scores, positions, head):
        return self.kept


def test_a_rule_of_your_own_is_audited_like_the_same_mask():
    model, x = Model(), torch.randn(2, 7, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    mask = torch.rand(7, 7, generator=torch.Generator().manual_seed(2)) < 0.5
    own, same = Said(mask), AT.KeepMask(mask)
    report = AT.audit(model, x, [own, own, same], lambda m: m(x).square().mean())
    assert [str(rule) for rule in report.rules] == ["Said", "Said", "KeepMask(7×7)"]
    for number in (0, 1):
        for key, numbers in report.queries("first", 1, rule=number).items():
            assert np.array_equal(numbers, report.queries("first", 1, rule=2)[key])
    assert report.together[0] == report.together[1] == report.together[2] != 0


@dataclasses.dataclass
class Near(AT.DroppingRule):
    """The same as a dataclass, with tiles of its own."""

    most: int
    tile: tuple[int, int] = (2, 2)

    def keeps(self, scores, positions, head):
        return (positions[:, None] - torch.arange(scores.shape[-1])).abs() < self.most


def test_a_rule_of_your_own_may_write_into_its_scores():
    class Writes(AT.DroppingRule):
        def keeps(self, scores, positions, head):
            kept = scores - scores.amax(dim=-1, keepdim=True) > -1
            positions.add_(7)
            scores.mul_(3)
            return kept

    class Reads(AT.DroppingRule):
        def keeps(self, scores, positions, head):
            return scores - scores.amax(dim=-1, keepdim=True) > -1

    given = tuple(torch.randn(3, 1, 2, 12, 4).unbind())
    found = AT.audit(Attention(), given, [Reads(), Writes(), Reads(), AT.Window(1, 2)])
    reads, writes, again, window = ([h.error for h in found.heads if h.rule is rule] for rule in found.rules)
    alone = [h.error for h in AT.audit(Attention(), given, AT.Window(1, 2)).heads]
    for wanted, other in ((reads, writes), (reads, again), (alone, window)):
        assert all(np.array_equal(a, b) for a, b in zip(wanted, other, strict=True))


def test_a_rule_of_your_own_may_be_a_dataclass():
    q, k, v = torch.randn(3, 1, 2, 9, 4, generator=torch.Generator().manual_seed(0))
    own, same = AT.audit(Attention(), (q, k, v), [Near(3), AT.Window(0, 3, tile=(2, 2))]).heads[::2]
    assert str(own.rule) == "Near(most=3, tile=(2, 2))" and np.array_equal(own.error_bound, same.error_bound)


@pytest.mark.parametrize(
    ("kept", "words"),
    [
        ([True, False], "Said.keeps returned list; expected torch.bool"),
        (torch.ones(2), "returned torch.float32 of shape"),
        (torch.ones(3, dtype=torch.bool), r"of shape \(3,\); expected torch.bool that broadcasts to \(1, 2, 2\)"),
        (torch.ones(1, 1, 2, 2, dtype=torch.bool), r"of shape \(1, 1, 2, 2\)"),
    ],
)
def test_what_a_rule_of_your_own_returns_is_checked(kept, words):
    with pytest.raises(pa.errors.ShapeError, match=words):
        AT.audit(Attention(), QKV, Said(kept))
    rule = Said(torch.tensor(True))
    rule.tile = (0, 4)
    with pytest.raises(pa.errors.DomainError, match="tile"):
        AT.audit(Attention(), QKV, rule)


def test_the_loss_of_every_rule_is_shown():
    model, x = Model(), torch.randn(1, 6, 8, dtype=torch.float64)
    loss = lambda m: m(x).square().mean()  # noqa: E731
    one = AT.audit(model, x, AT.Window(0, 1), loss)
    assert f"Window(0, 1) on 4 heads; all heads: loss {one.together[0]:+.3g}" == str(one).splitlines()[0]
    two = AT.audit(model, x, [AT.Window(0, 1), AT.TopK(2)], loss)
    lines = [f"{rule} on all heads: loss {change:+.3g}" for rule, change in zip(two.rules, two.together)]
    assert str(two).splitlines()[0] == "2 rules on 4 heads" and str(two).splitlines()[-3:-1] == lines
    assert "; ".join(lines) in two._repr_html_() and "loss" not in repr(two)
    assert str(AT.audit(model, x, AT.Window(0, 1))).count("loss") == 0


def test_one_key_and_cross_attention():
    q, k, v = torch.randn(1, 1, 5, 3), torch.randn(1, 1, 1, 3), torch.randn(1, 1, 1, 2)
    head = AT.audit(Attention(), (q, k, v), AT.SkipBlocks(1.0)).heads[0]
    assert not head.skipped.any() and not head.error_bound.any() and len(head.error) == 5


def sharp_inputs(sequences=8, seed=10):
    """Sequences with a key that everybody wants, so that there is something to skip."""
    torch.manual_seed(seed)
    q, k, v = torch.randn(3, sequences, 2, 48, 8, dtype=torch.float64)
    k[..., 0, :], q = 0.0, 2 * q
    k[..., 0, 0], q[..., 0] = 6.0, 5.0
    return q, k, v


@pytest.mark.parametrize("per", ["head", "layer"])
@pytest.mark.parametrize("by", ["error", "error_bound"])
def test_thresholds_keep_the_error_on_what_they_were_chosen_on(per, by):
    wanted = {"error": 0.02, "error_bound": 0.2}[by]
    inputs, rule, grid = sharp_inputs(), AT.SkipBlocks(0, tile=(8, 8)), [10.0**-k for k in range(7)]
    found = AT.calibrate(Attention(), inputs, rule, error=wanted, per=per, by=by, thresholds=grid)
    assert (found.sequences, found.held_out, found.tile) == (6, 2, (8, 8))
    for head in range(2):
        one = found.heads[head]
        assert found.rule("Attention", head) == AT.SkipBlocks(one.threshold, tile=(8, 8)) and 0 < one.skipped < 1
        costs = AT.audit(Attention(), inputs, [AT.SkipBlocks(t, tile=(8, 8)) for t in (one.threshold, *sorted(grid))])
        own = costs.of("Attention", head)
        out = np.isin(own.sequence, (3, 7))
        assert (getattr(own, by)[~out] <= wanted).all()
        # what it says of the sequences that were held out
        assert one.skipped == pytest.approx(own.skipped[out].mean()) and one.queries == out.sum() == 96
        assert (
            one.beyond == (own.error[out] > wanted).mean()
            and one.beyond_bound == (own.error_bound[out] > wanted).mean()
        )
        if per == "head":  # the next larger threshold is too large, or skips no more
            larger = [n for n, t in enumerate((one.threshold, *sorted(grid))) if t > one.threshold]
            first = costs.of("Attention", head, rule=larger[0])
            assert (getattr(first, by)[~out] > wanted).any()
    if per == "layer":
        assert len({h.threshold for h in found.heads}) == 1


def test_a_head_that_skips_nothing_does_not_hold_its_layer_back():
    q, k, v = sharp_inputs()
    q[:, 1] = 0.0  # head 1 weighs all keys alike
    rule = AT.SkipBlocks(0, tile=(8, 8))
    found = AT.calibrate(Attention(), (q, k, v), rule, error=0.02, per="layer")
    alone = AT.calibrate(Attention(), (q, k, v), rule, error=0.02)
    assert [h.threshold for h in found.heads] == [alone.heads[0].threshold] * 2
    assert alone.heads[0].threshold > 0 and alone.heads[1].threshold == 0  # nothing is known of larger ones


def test_a_threshold_counts_only_if_all_smaller_ones_are_safe():
    """Two keys whose values cancel: skipping one of them moves the output, skipping both does not."""
    masses = torch.tensor([1.0, 0.01, 0.1, 0.2], dtype=torch.float64)
    k = masses.log()[:, None].expand(3, 1, 4, 1)
    v = torch.tensor([0.0, 0.0, 2.0, -1.0], dtype=torch.float64)[:, None].expand(3, 1, 4, 1)
    q, rule = torch.ones(3, 1, 2, 1, dtype=torch.float64), AT.SkipBlocks(0, tile=(2, 1))
    grid = [0.05, 0.15, 0.3]
    costs = [AT.audit(Attention(), (q, k, v), AT.SkipBlocks(t, tile=(2, 1))).heads[0] for t in grid]
    errors = [float(cost.error.max()) for cost in costs]
    assert errors[0] < 1e-12 and errors[1] > 0.1 and errors[2] < 1e-12
    for taken, per, thresholds in (
        (0.05, "head", grid),
        (0.05, "layer", grid),
        (0.0, "head", grid[1:]),
        (0.3, "head", [0.3]),
    ):
        found = AT.calibrate(Attention(), (q, k, v), rule, error=0.05, per=per, thresholds=thresholds).heads[0]
        assert found.threshold == taken and found.skipped == {0.0: 0.0, 0.05: 0.25, 0.3: 0.75}[taken]


class ByHand(nn.Module):
    def forward(self, q, k, v):
        return torch.softmax(q @ k.mT / math.sqrt(q.shape[-1]), dim=-1) @ v


def test_thresholds_of_attention_written_by_hand():
    def reader(module, args, kwargs, output):
        return dict(zip(("query", "key", "value"), args))

    inputs = sharp_inputs(2)
    options = {"error": 0.1, "rule": AT.SkipBlocks(0, tile=(8, 8)), "held_out": inputs}
    with pytest.raises(pa.errors.UnsupportedError, match="no attention"):
        AT.calibrate(ByHand(), inputs, **options)
    found = AT.calibrate(ByHand(), inputs, readers={"": reader}, **options)
    wanted = AT.calibrate(Attention(), inputs, **options)
    assert [h.threshold for h in found.heads] == [h.threshold for h in wanted.heads] and max(
        h.threshold for h in found.heads
    ) > 0


def test_thresholds_for_other_inputs():
    inputs, others = sharp_inputs(), sharp_inputs(3, seed=11)
    rule = AT.SkipBlocks(0, tile=(8, 8))
    found = AT.calibrate(Attention(), list(zip(*(t.split(2) for t in inputs))), rule, error=0.02, held_out=others)
    assert (found.sequences, found.held_out) == (8, 3)
    with AT.capture() as heads:
        Attention()(*inputs)
    with AT.capture() as held_out:
        Attention()(*others)
    recorded = AT.calibrate(heads, rule=rule, error=0.02, held_out=held_out)
    assert [h.threshold for h in recorded.heads] == [h.threshold for h in found.heads]
    nothing = AT.calibrate(Attention(), inputs, rule, error=1e-13)
    assert [(h.threshold, h.skipped, h.beyond) for h in nothing.heads] == [(0.0, 0.0, 0.0)] * 2


def test_tables_say_if_all_keys_fit_in_one_tile():
    q, k, v = sharp_inputs()
    words = "all keys fit in one tile of 128, so nothing can be skipped"
    rules = [AT.SkipBlocks(0.5), AT.SkipBlocks(0.5, tile=(8, 8)), AT.TopK(2)]
    found = AT.audit(Attention(), (q, k, v), rules)
    assert [h.tiles for h in found.heads[::2]] == [1, -(-k.shape[2] // 8), k.shape[2]]
    assert str(found).count(words) == 1 and words in found._repr_html_()
    assert words in str(AT.calibrate(Attention(), (q, k, v), error=0.1))
    assert "one tile" not in str(AT.calibrate(Attention(), (q, k, v), rules[1], error=0.1))


def test_thresholds_travel_as_json(tmp_path):
    found = AT.calibrate(Attention(), sharp_inputs(), AT.SkipBlocks(0, tile=(8, 8)), error=0.02)
    place = found.save(tmp_path / "deep" / "thresholds.json")
    again = AT.load_calibration(place)
    assert again.to_json() == found.to_json() == json.loads(place.read_text())
    assert "beyond" in str(found) and "<table" in found._repr_html_() and "2 heads" in repr(found)
    good = json.loads(place.read_text())

    def spoiled(**changes):
        place.write_text(json.dumps({**good, **changes}))
        with pytest.raises(pa.errors.FormatError) as problem:
            AT.load_calibration(place)
        return str(problem.value)

    assert "format" in spoiled(format="other")
    assert "version 9" in spoiled(version=9)
    assert "threshold is 3" in spoiled(heads=[{**good["heads"][0], "threshold": 3}])
    assert "tile" in spoiled(tile=[8])
    assert "share" in spoiled(heads=[{**good["heads"][0], "beyond": 1.5}])
    assert "twice" in spoiled(heads=[good["heads"][0]] * 2)
    assert "missing" in spoiled(heads=[{"layer": "x"}]) and "missing" in spoiled(heads=None)
    assert "error is 0" in spoiled(error=0)
    for version in (True, 0, -3, "1"):
        assert "version" in spoiled(version=version)
    for name in ("sequences", "held_out"):
        for count in (-1, 0, 2.7, "3", math.inf):
            assert f"{name} is" in spoiled(**{name: count})
    for changes, words in (
        ({"head": -1}, "head"),
        ({"head": True}, "head"),
        ({"queries": 0}, "queries"),
        ({"queries": True}, "queries"),
        ({"error": good["heads"][0]["error_bound"] + 1}, "above its bound"),
        ({"error_bound": 10**400}, "not a finite number"),
        ({"layer": "\ud800"}, "wrong type"),
    ):
        assert words in spoiled(heads=[{**good["heads"][0], **changes}])
    other = {**good["heads"][1], "threshold": good["heads"][0]["threshold"] / 2 + 0.1}
    assert "different thresholds" in spoiled(per="layer", heads=[good["heads"][0], other])
    place.write_text("[" * 100_000)
    with pytest.raises(pa.errors.FormatError, match="not JSON"):
        AT.load_calibration(place)
    place.write_text("{")
    with pytest.raises(pa.errors.FormatError, match="not JSON"):
        AT.load_calibration(place)
    with pytest.raises(pa.errors.TruncatedFileError, match="is missing"):
        AT.load_calibration(tmp_path / "none.json")
    for nothing in (5, None):
        with pytest.raises(pa.errors.UnsupportedError, match="path is of type"):
            AT.load_calibration(nothing)
    os.mkfifo(tmp_path / "pipe.json")
    for other in (tmp_path / "pipe.json", tmp_path, "/dev/zero"):
        with pytest.raises(pa.errors.FormatError, match="regular file"):
            AT.load_calibration(other)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"error": 0.0}, "error is 0"),
        ({"per": "model"}, "per is 'model'"),
        ({"by": "mass"}, "by is 'mass'"),
        ({"rule": AT.TopK}, "expected SkipBlocks"),
        ({"inputs": QKV}, "one sequence"),
        ({"thresholds": [2.0]}, "threshold is 2.0"),
        ({"thresholds": 0.5}, "thresholds is 0.5; expected a list"),
        ({"held_out": captured()}, "held_out are captured heads"),
        ({"held_out": list(captured())}, "held_out are captured heads"),
        ({"readers": 3}, "readers is 3"),
    ],
)
def test_mistakes_of_calibration_are_named(given, words):
    with pytest.raises(pa.errors.PartitaError, match=words):
        AT.calibrate(
            **{"model": Attention(), "inputs": tuple(t.expand(2, -1, -1, -1) for t in QKV), "error": 0.1, **given}
        )


def test_the_picture_shows_every_head_and_its_bound(tmp_path):
    rules = [AT.SkipBlocks(t, tile=(8, 8)) for t in (0.0, 1e-3, 1e-2, 1e-1)]
    report = AT.audit(Attention(), sharp_inputs(1), rules)
    figure = pa.plots.plot_audit(report, tmp_path / "audit.svg", title="two heads")
    costs, shares = figure.axes
    drawn = [line for line in costs.lines if len(line.get_xdata())]
    assert len(drawn) == 4 and (tmp_path / "audit.svg").stat().st_size > 1000
    row = next(r for r in report.rows() if r["rule"] == str(rules[2]))
    error, bound = drawn[:2]
    assert (
        row["error"] in error.get_ydata()
        and row["error_bound"] in bound.get_ydata()
        and row["skipped"] in error.get_xdata()
    )
    assert row["oracle"] in shares.lines[0].get_xdata() or row["oracle"] in shares.lines[1].get_xdata()
    with pytest.raises(pa.errors.UnsupportedError, match="audit"):
        pa.plots.plot_audit(3)


def drawn_lines(panel):
    return [line for line in panel.lines if len(line.get_xdata()) and type(line).__name__ == "Line2D"]


def test_a_bound_that_is_one_point_is_drawn():
    report = AT.audit(Attention(), sharp_inputs(1), AT.TopK(2, (8, 8)))
    costs, _ = pa.plots.plot_audit(report).axes
    lines = drawn_lines(costs)
    assert [len(line.get_xdata()) for line in lines] == [1] * 4
    assert all(line.get_marker() not in ("", "None", None) and line.get_markersize() > 0 for line in lines)
    hollow = [line.get_markerfacecolor() != line.get_color() for line in lines]
    assert hollow == [line.get_linestyle() == "--" for line in lines] and sum(hollow) == 2


def test_rules_of_different_kinds_are_different_lines():
    steps, tile = (0.1, 0.5, 0.9), (8, 8)
    kinds = {
        "SkipBlocks": [AT.SkipBlocks(t, tile) for t in steps],
        "SkipBlocks, descending": [AT.SkipBlocks(t, tile, descending=True) for t in steps],
        "TopK": [AT.TopK(k, tile) for k in (1, 4, 16)],
    }
    report = AT.audit(Attention(), sharp_inputs(1), [rule for rules in kinds.values() for rule in rules])
    figure = pa.plots.plot_audit(report)
    costs = figure.axes[0]
    lines = [line for line in drawn_lines(costs) if line.get_linestyle() == "-"]
    rows = report.rows()
    expected = {
        tuple(sorted(r["error"] for r in rows if r["head"] == head and r["rule"] in map(str, rules) and r["error"] > 0))
        for head in (0, 1)
        for rules in kinds.values()
    }
    assert {tuple(sorted(line.get_ydata().tolist())) for line in lines} == expected - {()}
    entries = {handle.get_label(): handle for handle in figure.legends[0].legend_handles}
    assert set(kinds) <= set(entries) and len({entries[kind].get_marker() for kind in kinds}) == 3
    assert {line.get_marker() for line in lines} == {entries[kind].get_marker() for kind in kinds}


def test_rules_that_change_the_output_without_skipping_stand_at_zero():
    rules = [AT.Quantized(4), AT.SkipBlocks(0.0, (8, 8))]  # the second changes nothing
    report = AT.audit(Attention(), sharp_inputs(1), rules)
    costs, shares = pa.plots.plot_audit(report).axes
    assert {x for line in drawn_lines(costs) for x in line.get_xdata()} == {0.0}
    points = [line for line in drawn_lines(costs) if line.get_linestyle() == "-"]
    assert sorted(y for line in points for y in line.get_ydata()) == sorted(
        row["error"] for row in report.rows() if row["rule"] == "Quantized(4)"
    )
    assert sum(len(line.get_xdata()) for line in drawn_lines(shares)) == 2


def test_a_rule_that_skips_at_no_cost_has_a_point_beside_the_oracle():
    one = 100 * torch.eye(8, dtype=torch.float64)[None, None]  # the other weights underflow
    report = AT.audit(Attention(), (one, one, one), AT.TopK(1, (8, 8)))
    assert report.rows()[0]["error"] == 0
    shares = pa.plots.plot_audit(report).axes[1]
    (line,) = [line for line in drawn_lines(shares) if line.get_linestyle() == "None"]
    assert line.get_ydata()[0] > 0.5


def test_the_labels_of_the_audit_fit_and_no_line_covers_a_point():
    figure = pa.plots.plot_audit(AT.audit(Attention(), sharp_inputs(1), AT.TopK(2, (8, 8))))
    figure.canvas.draw()
    for panel in figure.axes:
        label, box = panel.xaxis.label.get_window_extent(), panel.get_window_extent()
        assert box.x0 <= label.x0 and label.x1 <= box.x1
    shares = figure.axes[1]
    (diagonal,) = [line for line in shares.lines if type(line).__name__ == "AxLine"]
    assert all(diagonal.get_zorder() < line.get_zorder() for line in shares.lines if line is not diagonal)


def test_descending_tiles_are_ascending_tiles_of_the_keys_turned_round():
    torch.manual_seed(0)
    scores = 4 * torch.randn(2, 24, 32, dtype=torch.float64)
    positions = torch.arange(24)
    down = pa.inspect.SkipBlocks(0.2, tile=(4, 8), descending=True).keeps(scores, positions, 0)
    up = pa.inspect.SkipBlocks(0.2, tile=(4, 8)).keeps(scores.flip(-1), positions, 0).flip(-1)
    assert torch.equal(down, up) and not torch.equal(
        down, pa.inspect.SkipBlocks(0.2, tile=(4, 8)).keeps(scores, positions, 0)
    )
    with pytest.raises(pa.PartitaError, match="expected True or False"):
        pa.inspect.SkipBlocks(0.2, descending="yes")


def score_mods():
    return {
        "times 8": lambda s, b, h, i, j: 8 * s,
        "capped": lambda s, b, h, i, j: 2 * torch.tanh(s / 2),
        "shifted": lambda s, b, h, i, j: s + 0.1 * (i - j),
    }


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize("name", score_mods())
def test_fewer_bits_where_flex_attention_changes_the_scores(name, captured):
    if tuple(map(int, torch.__version__.split(".")[:2])) < (2, 9):
        pytest.skip("flex attention is seen from torch 2.9 on")
    from torch.nn.attention.flex_attention import flex_attention

    mod, rule = score_mods()[name], AT.Quantized(4)

    class Flex(nn.Module):
        def forward(self, q, k, v):
            return flex_attention(q, k, v, score_mod=mod)

    torch.manual_seed(0)
    q, k, v = torch.randn(3, 1, 1, 32, 8, dtype=torch.float64)
    i, j = torch.arange(32)[:, None], torch.arange(32)

    def output(k, v):
        return torch.softmax(mod(q @ k.mT / 8**0.5, 0, 0, i, j), dim=-1) @ v

    change = (output(k, v) - output(rule.of(k), rule.of(v))).norm(dim=-1)[0, 0].numpy()
    given = (Flex(), (q, k, v))
    if captured:
        with AT.capture() as heads:
            Flex()(q, k, v)
        given = (heads,)
        if name != "shifted":
            with pytest.raises(pa.errors.UnsupportedError, match="pass the model and its inputs"):
                AT.audit(heads, rule=rule)
            return
    head = AT.audit(*given, rule=rule).heads[0]
    np.testing.assert_allclose(head.error, change, atol=1e-13)
    assert (change <= head.error_bound).all() and (head.error_bound < 10).all()


def test_what_alibi_adds_and_a_mask_takes_away_is_rounded():
    class First(AT.DroppingRule):
        tile = (1, 1)

        def keeps(self, scores, positions, head):
            return torch.arange(scores.shape[-1]) == 0

    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 1, n, 4, dtype=torch.float64) for n in (64, 2, 2))
    slopes = torch.tensor([1e15], dtype=torch.float64)
    mask = slopes * (torch.arange(64)[:, None] - torch.arange(2)).abs()

    class Cancels(nn.Module):
        def forward(self, q):
            AT.record(q, k, v, attn_mask=mask, slopes=slopes)

    exact = torch.softmax((q @ k.mT)[0, 0] / 2, dim=-1) @ v[0, 0]
    head = AT.audit(Cancels(), q, First()).heads[0]
    assert ((exact - v[0, 0, 0]).norm(dim=-1).numpy() <= head.error_bound).all()


def test_numbers_at_the_ends_of_the_range():
    wide = torch.tensor([[1.7e308, -1.7e308], [1e308, 1e308]], dtype=torch.float64)[None, None]
    q, v = torch.full((1, 1, 2, 2), 1e-308, dtype=torch.float64), torch.randn(1, 1, 2, 2, dtype=torch.float64)
    with pytest.raises(NonFiniteValueError, match="keys of a head reach"):
        AT.audit(Attention(), (q, wide, v), AT.Quantized(4))
    scores = torch.tensor([0.0, -800.0, -900.0], dtype=torch.float64)  # the weights of two keys are 0 in float64
    given = (torch.ones(1, 1, 1, 1).double(), scores[None, None, :, None], torch.randn(1, 1, 3, 2).double())
    nothing = AT.audit(Attention(), given, AT.TopK(3)).heads[0]
    assert nothing.mass_lost == 0 and nothing.skipped == 0 and nothing.oracle == 0
    assert AT.audit(Attention(), given, AT.TopK(1, tile=(10**9, 10**9))).heads[0].skipped == pytest.approx(2 / 3)
    with pytest.raises(NonFiniteValueError, match="NaN"):
        AT.audit(Attention(), (*given, torch.full((1, 1, 1, 3), math.nan).double()), AT.TopK(1))


def test_alibi_beyond_nine_thousand_masks_nothing():
    q, k, v = torch.zeros(1, 1, 9001, 4), torch.zeros(1, 1, 2, 4), torch.tensor([[0.0], [1.0]])[None, None]
    with AT.capture(tokens=2) as heads:
        AT.record(q, k, v, slopes=torch.tensor([1.0]))
    head = AT.audit(heads, rule=AT.KeepMask([False, True], tile=(1, 1))).heads[0]
    true = 1 / (1 + math.e)  # the scores are −9000 and −8999
    assert head.error[-1] == pytest.approx(true) and head.error_bound[-1] >= head.error[-1]
    q, k, v = torch.zeros(1, 1, 40, 2), torch.zeros(1, 1, 40, 2), torch.randn(1, 1, 40, 2)
    seen = []
    for stream in (False, True):
        with AT.capture(stream=stream, queries=stream) as heads:
            AT.record(q, k, v, attn_mask=torch.full((40, 40), -8995.0), slopes=torch.ones(1))
        seen.append(heads["attention", 0].queries()["seen"])
    np.testing.assert_array_equal(*seen)
    assert (seen[0] == 40).all()


def test_alibi_that_a_mask_takes_away_is_rounded_in_recorded_heads_too():
    torch.manual_seed(0)
    q, k, v = torch.randn(1, 1, 64, 4).double(), torch.randn(1, 1, 4, 4).double(), torch.randn(1, 1, 4, 1).double()
    slope, apart = 1e14 + 0.3, (torch.arange(64)[:, None] - torch.arange(4)).abs()
    with AT.capture() as heads:
        AT.record(q, k, v, attn_mask=slope * apart, slopes=torch.tensor([slope], dtype=torch.float64))
    head = AT.audit(heads, rule=AT.KeepMask([True, True, False, False], tile=(1, 1))).heads[0]
    exact = [[Fraction(slope * int(d)) - Fraction(slope) * int(d) for d in row] for row in apart]
    scores = 0.5 * (q @ k.mT)[0, 0].numpy() + np.array([[float(x) for x in row] for row in exact])
    weights = np.exp(scores - scores.max(axis=1, keepdims=True))
    outs = [
        (weights * keep) @ v[0, 0, :, 0].numpy() / (weights * keep).sum(axis=1) for keep in (1, np.array([1, 1, 0, 0]))
    ]
    assert (np.abs(outs[0] - outs[1]) <= head.error_bound).all()


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("recorded", [False, True])
def test_a_score_mod_may_shift_and_multiply_scores_without_masking_them(recorded):
    class Flex(nn.Module):
        def __init__(self, change):
            super().__init__()
            self.change = change

        def forward(self, q, k, v):
            return flex_attention(q, k, v, score_mod=lambda s, b, h, i, j: self.change(s))

    q, k, v = torch.zeros(1, 1, 6, 4), torch.zeros(1, 1, 6, 4), torch.tensor([0.0, 0, 0, 9, 0, 9])[None, None, :, None]
    q[..., 0], k[..., 0] = 2, torch.tensor([-90.906, -90.908, -90.910, -90.912, -90.914, -90.916])
    keep = torch.tensor([True, False] * 3)
    for change in (lambda s: 100 * s, lambda s: s - 1e4, lambda s: s):
        model = Flex(change)
        with torch.no_grad(), AT.capture(model) as heads:
            model(q, k, v)
        rule = AT.KeepMask(keep, tile=(1, 1))
        head = AT.audit(heads, rule=rule).heads[0] if recorded else AT.audit(model, (q, k, v), rule).heads[0]
        scores = change((q @ k.mT).double()[0, 0] / 2)
        outs = [
            torch.softmax(s, dim=-1) @ v[0, 0, :, 0].double() for s in (scores, scores.masked_fill(~keep, -torch.inf))
        ]
        change_of_output = (outs[0] - outs[1]).abs().numpy()
        assert change_of_output.min() > 0.5
        assert (change_of_output <= head.error_bound).all()
        np.testing.assert_allclose(head.error, change_of_output, rtol=0.02)  # float32 scores, times 100


@pytest.mark.parametrize(("keys", "values"), [(2, 6), (6, 2), (3, 2), (1, 3), (2, 2)])
def test_grouped_queries_with_other_numbers_of_values_than_of_keys(keys, values):
    torch.manual_seed(1)
    q, k, v = (torch.randn(1, heads, 5, 4).double() for heads in (6, keys, values))

    class Grouped(nn.Module):
        def forward(self, q, k, v):
            return functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)

    keep = torch.arange(5) % 2 == 0
    found = AT.audit(Grouped(), (q, k, v), AT.KeepMask(keep, tile=(1, 1)))
    k, v = k.repeat_interleave(6 // keys, dim=1), v.repeat_interleave(6 // values, dim=1)
    whole, some = (
        functional.scaled_dot_product_attention(q, k, v, attn_mask=mask) for mask in (None, keep.expand(5, 5))
    )
    for head in found.heads:
        np.testing.assert_allclose(head.error, (whole - some)[0, head.head].norm(dim=-1), rtol=1e-9)
        assert (head.error <= head.error_bound).all()


def test_products_that_overflow_downwards_are_refused():
    q, k, v = torch.full((1, 1, 2, 2), -1.0).double(), torch.ones(1, 1, 3, 2).double(), torch.randn(1, 1, 3, 1).double()
    with pytest.raises(NonFiniteValueError, match="overflow"):
        AT.audit(Attention(), (1e200 * q, 1e200 * k, v), AT.TopK(1))
