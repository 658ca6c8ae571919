"""Reading heads: every figure against numpy, dead keys against hulls and exact arithmetic, masks, biases, odd inputs."""

import dataclasses
import json
import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import linprog
from scipy.spatial import ConvexHull
from torch import nn
from torch.nn import functional

import partita as pa
from partita.errors import UnsupportedError
from partita.inspection import reachability
from partita.inspection.figures import measured
from partita.inspection.reachability import DEAD, MASKED, REACHABLE, UNDECIDED, key_reach
from partita.inspection.reading import random_snapshot, read_queries
from partita.inspection.snapshots import Snapshot


def measure(snapshots, **options):
    found = measured(snapshots, tokens=[None] * len(snapshots), **options)
    return found.figures, found.cells


def make(queries=40, keys=25, dim=6, value_dim=3, seed=0, **options):
    rng = np.random.default_rng(seed)
    q, k, v = rng.normal(size=(queries, dim)), 1.5 * rng.normal(size=(keys, dim)), rng.normal(size=(keys, value_dim))
    return Snapshot(q, k, v, 0.7, **options)


def by_rows(snapshot):
    """Every figure of every query, one query at a time, written out."""
    out = []
    for i in snapshot.counted:
        seen = [j for j in range(len(snapshot.keys)) if snapshot.active[i, j]]
        bias = (
            [0.0] * len(seen)
            if snapshot.bias is None
            else [snapshot.bias[i if len(snapshot.bias) > 1 else 0, j] for j in seen]
        )
        s = np.array([snapshot.scale * float(snapshot.queries[i] @ snapshot.keys[j]) + b for j, b in zip(seen, bias)])
        w = np.exp(s) / np.exp(s).sum()
        best = int(np.argmax(s))
        ranked = sorted(s)
        values = snapshot.values[seen]
        answer = sum(weight * value for weight, value in zip(w, values))
        out.append(
            {
                "cells": seen[best],
                "margins": ranked[-1] - ranked[-2] if len(s) > 1 else math.inf,
                "leakage": 1 - w[best],
                "spread": np.std(s),
                "entropy": -sum(x * math.log(x) for x in w if x > 0),
                "effective_keys": 1 / sum(x * x for x in w),
                "changed": float(((answer - values[best]) ** 2).sum()),
                "answered": float((answer**2).sum()),
                "value_spread": float(((values - values.mean(axis=0)) ** 2).sum(axis=1).mean()),
                "seen": len(seen),
            }
        )
    return out


def alibi(queries, keys, both_ways):
    i, j = np.arange(queries)[:, None], np.arange(keys)[None]
    return -0.3 * np.abs(i - j) if both_ways else -0.3 * (i - j)


BOOLEAN = np.random.default_rng(3).random((40, 25)) > 0.5
CASES = {
    "plain": {},
    "causal": {"causal": True},
    "boolean mask": {"mask": BOOLEAN},
    "padding": {"mask": np.arange(25)[None] < 18},
    "bias per key": {"mask": np.random.default_rng(4).normal(size=(1, 25))},
    "ALiBi": {"mask": alibi(40, 25, True)},
    "least number as mask": {"mask": np.where(BOOLEAN, 0.0, np.finfo(np.float32).min)},
    "−10000 as mask": {"mask": np.where(BOOLEAN, 0.0, -10000.0)},
}


@pytest.mark.parametrize("name", CASES)
def test_every_figure_of_every_query(name):
    snapshot = make(**CASES[name])
    reading, expected = read_queries(snapshot), by_rows(snapshot)
    for figure in expected[0]:
        got, truth = getattr(reading, figure), np.array([row[figure] for row in expected])
        assert np.allclose(got, truth, rtol=1e-9, atol=1e-12), figure


@pytest.mark.parametrize("sharpen", [0.1, 1.0, 10.0, 100.0])
def test_leakage_stays_below_the_proposition(sharpen):
    """Proposition 3.2 in exact terms: (N − 1)e^{−margin}, and the printed R ≥ Δ(…) is no such bound."""
    snapshot = dataclasses.replace(make(queries=300), scale=0.7 * sharpen)
    reading = read_queries(snapshot)
    assert (reading.leakage <= reading.leakage_bound).all()
    assert (reading.leakage_bound >= np.minimum(1, 24 * np.exp(-reading.margins))).all()


def test_a_bound_without_the_number_of_keys_would_fail():
    reading = read_queries(make(queries=300))
    assert (reading.leakage > np.exp(-reading.margins)).any()


def test_sharpening_multiplies_the_inverse_temperature_and_a_common_shift_does_not():
    snapshot = make()
    first = measure([snapshot], reach=10.0, budget=0)[0]
    sharper = measure([dataclasses.replace(snapshot, scale=2.1)], reach=10.0, budget=0)[0]
    shifted = measure([dataclasses.replace(snapshot, keys=snapshot.keys + 3.0)], reach=10.0, budget=0)[0]
    assert sharper.inverse_temperature == pytest.approx(3 * first.inverse_temperature)
    assert sharper.margin == pytest.approx(3 * first.margin) and sharper.cells == first.cells
    for name in ("inverse_temperature", "margin", "leakage", "table_distance", "effective_keys", "cells"):
        assert getattr(shifted, name) == pytest.approx(getattr(first, name)), name


def test_a_table_and_an_average_are_told_apart():
    table = measure([dataclasses.replace(make(), scale=1e4)], reach=10.0, budget=0)[0]
    average = measure([dataclasses.replace(make(keys=400), scale=1e-6)], reach=10.0, budget=0)[0]
    assert table.table_distance < 0.05 and table.leakage < 0.05 and table.effective_keys < 1.1
    assert 0.8 < average.table_distance_of_values < 1.2 and average.effective_keys == pytest.approx(400, rel=1e-3)


def hull_members(points):
    return set(ConvexHull(points).vertices.tolist())


@pytest.mark.parametrize(("keys", "dim"), [(12, 2), (60, 2), (60, 3), (150, 4)])
def test_dead_keys_are_those_inside_the_hull(keys, dim):
    points = np.random.default_rng(keys).normal(size=(keys, dim))
    found = key_reach(points, np.zeros(keys), np.ones((1, keys), bool), queries=np.zeros((0, dim)), budget=1 << 24)
    assert set(np.flatnonzero(found.status == REACHABLE)) == hull_members(points)
    assert (found.status != UNDECIDED).all() and (found.status == DEAD).sum() <= found.programs
    for key in np.flatnonzero(found.status == REACHABLE):  # the witness, in exact arithmetic
        x = [Fraction(float(c)) for c in found.witnesses[key]]
        scores = [sum(Fraction(float(a)) * b for a, b in zip(row, x)) for row in points]
        assert max(scores) == scores[key] and scores.count(scores[key]) == 1


def lead_by_another_program(slopes, offsets, key, reach):
    """The largest lead in the box, from the dual side: an oracle that shares nothing with the library."""
    others = np.delete(np.arange(len(slopes)), key)
    m, d = len(others), slopes.shape[1]
    # min Σ λ (b_key − b_k) + reach Σ(p + n),  p − n = a_key − Σ λ a_k,  λ, p, n ≥ 0, Σ λ = 1
    equal = np.zeros((d + 1, m + 2 * d))
    equal[:d, :m] = slopes[others].T
    equal[:d, m : m + d], equal[:d, m + d :] = np.eye(d), -np.eye(d)
    equal[d, :m] = 1
    costs = np.concatenate([offsets[key] - offsets[others], np.full(2 * d, reach)])
    return linprog(costs, A_eq=equal, b_eq=np.append(slopes[key], 1.0), method="highs").fun


def test_offsets_and_the_box_decide_together():
    rng = np.random.default_rng(1)
    slopes, offsets, queries = rng.normal(size=(40, 3)), 3 * rng.normal(size=40), rng.normal(size=(5, 3))
    answers = []
    for reach in (1.0, 10.0):
        found = key_reach(slopes, offsets, np.ones((1, 40), bool), queries=queries, reach=reach, budget=1 << 24)
        rho = reach * np.abs(queries).max()
        leads = np.array([lead_by_another_program(slopes, offsets, k, rho) for k in range(40)])
        assert np.array_equal(found.status == REACHABLE, leads > 1e-9) and np.array_equal(
            found.status == DEAD, leads <= 1e-9
        )
        assert np.nanmax(np.abs(found.witnesses)) <= rho * (1 + 1e-12)
        answers.append(found.status.tolist())
    assert answers[0] != answers[1]  # a larger box reaches more


def test_the_budget_is_kept_and_what_it_leaves_is_undecided():
    points = np.random.default_rng(0).normal(size=(60, 2))
    arguments = (points, np.zeros(60), np.ones((1, 60), bool))
    whole = key_reach(*arguments, queries=np.zeros((0, 2)), budget=1 << 24)
    none = key_reach(*arguments, queries=np.zeros((0, 2)), budget=0)
    some = key_reach(*arguments, queries=np.zeros((0, 2)), budget=60 * 2 * 5)
    assert none.programs == 0 and not (none.status == DEAD).any()
    assert some.programs == 5 and some.entries <= 600 and (some.status == UNDECIDED).any()
    for partial in (none, some):
        assert ((partial.status == UNDECIDED) | (partial.status == whole.status)).all()


def test_a_forged_proof_is_not_believed(monkeypatch):
    """The solver is not trusted: multipliers are checked, witnesses too."""
    points = np.random.default_rng(0).normal(size=(30, 2))
    real = reachability.linprog

    def lying(*args, **kwargs):
        answer = real(*args, **kwargs)
        answer.x = np.zeros_like(answer.x)
        answer.ineqlin.marginals = -np.random.default_rng(0).random(len(answer.ineqlin.marginals))
        return answer

    monkeypatch.setattr(reachability, "linprog", lying)
    monkeypatch.setattr(reachability, "_try_directions", lambda *_: None)
    found = key_reach(points, np.zeros(30), np.ones((1, 30), bool), queries=np.zeros((0, 2)), budget=1 << 24)
    dead = set(np.flatnonzero(found.status == DEAD))
    assert (
        not dead & hull_members(points) and not (found.status == REACHABLE).any()
    )  # a lucky guess may be right, never wrong
    steps = points[1:] - points[0]
    assert not reachability._proves(steps, np.zeros(29), np.random.default_rng(0).random(29))


def test_masks_make_one_diagram_with_an_active_set_per_query():
    """Under a causal mask a key competes with those before it: dead in the whole, alive in its prefix."""
    points = np.array([[0.0, 0.1], [1.0, 1.0], [-1.0, 1.0], [0.0, -1.0], [0.1, 0.2]])
    whole = key_reach(points, np.zeros(5), np.ones((5, 5), bool), queries=np.eye(5, 2), budget=1 << 20)
    causal = key_reach(points, np.zeros(5), np.tri(5, dtype=bool), queries=np.eye(5, 2), budget=1 << 20)
    assert whole.status.tolist() == [DEAD, REACHABLE, REACHABLE, REACHABLE, DEAD]
    assert causal.status.tolist() == [REACHABLE, REACHABLE, REACHABLE, REACHABLE, DEAD]
    padded = np.tri(5, dtype=bool) & (np.arange(5) != 1)
    assert key_reach(points, np.zeros(5), padded, queries=np.eye(5, 2)).status[1] == MASKED


def test_masks_that_are_no_chain_are_never_wrongly_dead():
    rng = np.random.default_rng(5)
    points, active = rng.normal(size=(24, 2)), rng.random((9, 24)) > 0.4
    found = key_reach(points, np.zeros(24), active, queries=rng.normal(size=(9, 2)), budget=1 << 24)
    for key in range(24):
        rows = [np.flatnonzero(row) for row in active if row[key]]
        alive = [
            lead_by_another_program(points[r], np.zeros(len(r)), int(np.flatnonzero(r == key)[0]), 1.0) > 1e-9
            for r in rows
        ]
        if found.status[key] == DEAD:
            assert not any(alive)
        if found.status[key] == REACHABLE:
            assert any(alive)
    assert (found.status == REACHABLE).any()


def test_a_key_that_always_meets_a_better_one_but_never_the_same_is_not_called_reachable():
    """Each row that holds key 0 holds a key that beats it everywhere, but no key is in both."""
    slopes, offsets = np.array([[1.0], [1.0], [1.0]]), np.array([0.0, 1.0, 2.0])
    active = np.array([[True, True, False], [True, False, True]])
    found = key_reach(slopes, offsets, active, queries=np.ones((2, 1)), budget=1 << 20)
    assert found.status.tolist() == [UNDECIDED, REACHABLE, REACHABLE]
    assert key_reach(slopes, offsets, active[:1], queries=np.ones((1, 1))).status[0] == DEAD


def test_a_key_alone_in_its_row_is_reachable():
    found = key_reach(np.ones((2, 1)), np.array([0.0, 1.0]), np.eye(2, dtype=bool), queries=np.ones((2, 1)), budget=0)
    assert found.status.tolist() == [REACHABLE, REACHABLE]


def test_keys_that_repeat_share_a_cell():
    snapshot = make(keys=10)
    keys = np.concatenate([snapshot.keys, snapshot.keys[:4]])
    doubled = dataclasses.replace(snapshot, keys=keys, values=np.concatenate([snapshot.values, snapshot.values[:4]]))
    figures, cells = measure([doubled], reach=10.0, budget=1 << 20)
    assert figures.repeated == 4 and figures.keys == 14 and {c.key for c in cells} <= set(range(10))
    single = measure([snapshot], reach=10.0, budget=1 << 20)[0]
    assert figures.cells == single.cells and figures.margin_low == 0.0 < single.margin_low
    assert figures.reachable == single.reachable + sum(
        key_reach(0.7 * snapshot.keys, np.zeros(10), np.ones((1, 10), bool), queries=snapshot.queries).status[:4]
        == REACHABLE
    )
    same = dataclasses.replace(snapshot, keys=np.ones_like(snapshot.keys))
    figures = measure([same], reach=10.0, budget=1 << 20)[0]
    assert figures.cells == 1 and figures.inverse_temperature == 0 and figures.effective_keys == pytest.approx(10)


def test_causal_alibi_is_one_diagram_and_symmetric_alibi_is_not():
    causal = make(queries=25, causal=True, mask=alibi(25, 25, False))
    assert causal.offsets is not None and causal.max_affine().num_cells == 25
    for row in (3, 20):  # the diagram answers for every position, among the keys that it sees
        seen = causal.active[row]
        answer = np.where(seen, causal.max_affine().scores(causal.queries[[row]])[0], -np.inf).argmax()
        assert answer == read_queries(causal).cells[row]
    both = make(queries=25, mask=alibi(25, 25, True))
    with pytest.raises(UnsupportedError, match=r"depends on the query's position.*max_affine\(position"):
        both.max_affine()
    for row in range(25):
        assert both.max_affine(position=row).cell(both.points[[row]])[0] == read_queries(both).cells[row]
    figures = measure([both], reach=10.0, budget=1 << 20)[0]
    assert math.isnan(figures.dead) and not math.isnan(figures.margin)


def test_a_rotary_head_is_one_diagram_turned_with_the_position():
    """Captured vectors are already turned; in unturned coordinates position i has that diagram turned back by its own angle."""
    rng = np.random.default_rng(0)
    q, k = rng.normal(size=(12, 2)), rng.normal(size=(12, 2))

    def turn(v, angle):
        c, s = np.cos(angle), np.sin(angle)
        return np.array([[c, -s], [s, c]]) @ v

    angles = 0.4 * np.arange(12)
    rotated = Snapshot(
        np.array([turn(v, a) for v, a in zip(q, angles)]), np.array([turn(v, a) for v, a in zip(k, angles)]), k, 1.0
    )
    cells = read_queries(rotated).cells
    for i in range(12):
        relative = [
            q[i] @ turn(k[j], angles[j] - angles[i]) for j in range(12)
        ]  # the scores as rotary attention defines them
        own = pa.MaxAffine([turn(v, a - angles[i]) for v, a in zip(k, angles)], np.zeros(12))
        assert int(np.argmax(relative)) == cells[i] == own.cell(q[[i]])[0]
    assert rotated.max_affine().cell(rotated.points).tolist() == cells.tolist()
    unturned = pa.MaxAffine(k, np.zeros(12)).cell(q)  # negative control: position matters
    assert unturned.tolist() != cells.tolist()


def test_the_null_has_the_same_shape_and_size_and_no_structure():
    snapshot = make(queries=200, keys=300, dim=48)
    null = random_snapshot(snapshot, 1)
    assert null.queries.shape == snapshot.queries.shape and null.keys.shape == snapshot.keys.shape
    assert np.sqrt((null.queries**2).mean()) == pytest.approx(np.sqrt((snapshot.queries**2).mean()), rel=0.1)
    assert np.array_equal(random_snapshot(snapshot, 1).keys, null.keys)
    assert not np.array_equal(random_snapshot(snapshot, 2).keys, null.keys)
    structured = dataclasses.replace(snapshot, queries=4 * snapshot.keys[:200])  # every query looks for its own key
    own, other = (measure([s], reach=10.0, budget=0)[0] for s in (structured, random_snapshot(structured, 1)))
    assert own.cells > 180 and own.leakage < other.leakage / 2


class Head(nn.Module):
    def forward(self, q, k, v, **options):
        return functional.scaled_dot_product_attention(q, k, v, **options)


def captured(q, k, v, **options):
    model = Head()
    with pa.inspect.capture(model) as heads:
        model(q, k, v, **options)
    return heads


def test_one_token():
    report = pa.inspect.read(captured(*[torch.randn(1, 2, 1, 4)] * 3))
    figures = report["Head", 0].figures
    assert figures.cells == figures.keys == figures.reachable == 1 and figures.leakage == 0 == figures.table_distance
    assert figures.effective_keys == 1 and math.isinf(figures.margin)
    assert report.to_json()["heads"][0]["figures"]["margin"] is None
    json.dumps(report.to_json(), allow_nan=False)


def test_no_tokens():
    heads = captured(*[torch.randn(1, 2, 0, 4)] * 3)
    assert len(heads) == 2
    with pytest.raises(UnsupportedError, match="no tokens"):
        pa.inspect.read(heads)
    with pytest.raises(UnsupportedError, match="no partition"):
        heads["Head", 0].snapshots[0].max_affine()


def test_batch_elements_of_different_length():
    q = torch.randn(2, 1, 6, 4, generator=torch.Generator().manual_seed(0))
    mask = torch.ones(2, 1, 1, 6, dtype=torch.bool)
    mask[1, :, :, 4:] = False
    padded = pa.inspect.read(captured(q, q, q, attn_mask=mask))["Head", 0]
    assert padded.figures.queries == 10 == padded.figures.keys and padded.sequences == 2
    alone = [
        measure(captured(*[q[b : b + 1, :, :n]] * 3)["Head", 0].snapshots, reach=10.0, budget=1 << 18)[0]
        for b, n in ((0, 6), (1, 4))
    ]
    assert padded.figures.cells == sum(a.cells for a in alone)
    assert padded.figures.entropy == pytest.approx((6 * alone[0].entropy + 4 * alone[1].entropy) / 10)


def test_a_query_that_sees_nothing_is_not_counted():
    q = torch.randn(1, 1, 4, 3)
    mask = torch.tril(torch.ones(4, 4, dtype=torch.bool), -1)  # strictly before: the first sees nothing
    report = pa.inspect.read(captured(q, q, q, attn_mask=mask))["Head", 0]
    assert report.figures.queries == 3 and report.figures.keys == 3
    with pytest.raises(UnsupportedError, match="every key was masked"):
        pa.inspect.read(captured(q, q, q, attn_mask=torch.zeros(4, 4, dtype=torch.bool)))


def test_grouped_queries_read_the_keys_of_their_group():
    g = torch.Generator().manual_seed(0)
    q, k = torch.randn(1, 4, 8, 5, generator=g), torch.randn(1, 2, 8, 5, generator=g)
    heads = captured(q, k, k, enable_gqa=True)
    for head in range(4):
        assert np.array_equal(heads["Head", head].snapshots[0].keys, k[0, head // 2].numpy())
        cells = read_queries(heads["Head", head].snapshots[0]).cells
        assert cells.tolist() == (q[0, head] @ k[0, head // 2].T).argmax(dim=1).tolist()


def test_tables_for_people_and_machines(tmp_path):
    g = torch.Generator().manual_seed(0)
    report = pa.inspect.read(captured(*(torch.randn(2, 3, 9, 4, generator=g) for _ in range(3))))
    data = json.loads(json.dumps(report.to_json(values=True), allow_nan=False))
    assert [h["head"] for h in data["heads"]] == [0, 1, 2] and len(data["layers"]) == 1
    first = data["heads"][0]
    assert sum(c["queries"] for c in first["cells"]) == 18 and len(first["cells"][0]["value"]) == 4
    assert "value" not in report.to_json()["heads"][0]["cells"][0]
    assert data["model"]["cells"] == sum(h["figures"]["cells"] for h in data["heads"])
    assert data["model"]["entropy"] == pytest.approx(np.mean([h["figures"]["entropy"] for h in data["heads"]]))
    place = report.save(tmp_path / "out")
    assert json.loads((place / "report.json").read_text())["format"] == "partita-inspection"
    pandas = pytest.importorskip("pandas")
    table = pandas.read_csv(place / "heads.csv")
    assert table.shape == (3, len(report.rows()[0])) and {"table_distance", "null_table_distance"} <= set(table)
    assert pandas.DataFrame(report.rows())["cells"].tolist() == table["cells"].tolist()
    assert "random head" in str(report)
    many = dataclasses.replace(report.heads[0].figures, unvisited=1450, dead=math.nan)
    text = str(dataclasses.replace(report, heads=(dataclasses.replace(report.heads[0], figures=many),)))
    assert "1,450 (" in text and "– (" in text and "e+03" not in text


def test_progress_is_told():
    seen = []
    pa.inspect.read(
        captured(*[torch.randn(1, 3, 5, 4)] * 3), progress=lambda name, done, of: seen.append((name, done, of))
    )
    assert seen == [("Head:0", 0, 3), ("Head:1", 1, 3), ("Head:2", 2, 3), ("", 3, 3)]


def test_thousands_of_tokens():
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 1, 3000, 8, generator=g) for _ in range(3))
    report = pa.inspect.read(captured(q, k, v, is_causal=True), budget=1 << 14)["Head", 0]
    assert (
        report.figures.queries == report.figures.keys == 3000 and report.figures.leakage <= report.figures.leakage_bound
    )


@settings(max_examples=25, deadline=None, derandomize=True)
@given(st.integers(0, 10_000), st.integers(2, 12), st.integers(1, 5), st.booleans())
def test_the_order_of_keys_and_a_common_shift_change_nothing(seed, keys, dim, causal):
    """A law of partitions: keys permuted (with their values and masks) and moved together make the same head."""
    rng = np.random.default_rng(seed)
    mask = np.tri(9, keys, dtype=bool) if causal else None
    q, k, v = rng.normal(size=(9, dim)), rng.normal(size=(keys, dim)), rng.normal(size=(keys, 2))
    order, shift = rng.permutation(keys), rng.normal(size=dim)
    first = measure([Snapshot(q, k, v, 1.0, mask=mask)], reach=10.0, budget=1 << 20)[0]
    again = Snapshot(q, k[order] + shift, v[order], 1.0, mask=None if mask is None else mask[:, order])
    second = measure([again], reach=10.0, budget=1 << 20)[0]
    for name in vars(first):
        if name != "programs":
            assert getattr(second, name) == pytest.approx(getattr(first, name), rel=1e-6, abs=1e-9), name
    scaled = measure([dataclasses.replace(again, values=v[order[::-1]])], reach=10.0, budget=0)[0]  # values left behind
    assert keys < 4 or scaled.table_distance != pytest.approx(first.table_distance, rel=1e-9)


def test_equal_values_are_a_table_whatever_the_weights():
    snapshot = dataclasses.replace(make(), values=np.full((25, 3), 0.1))
    figures = measure([snapshot], reach=10.0, budget=0)[0]
    assert figures.table_distance == figures.table_distance_of_values == 0
    assert figures.leakage > 0.1  # it is the values, not the weights


def test_equal_keys_with_different_biases():
    """The first of two equal slopes is below the second everywhere; no step leads away from it (and none divides by 0)."""
    slopes, offsets = np.array([[1.0, 0.0], [1.0, 0.0], [-1.0, 0.0], [0.0, 0.0]]), np.array([0.0, 1.0, 0.0, -1.0])
    found = key_reach(slopes, offsets, np.ones((1, 4), dtype=bool), queries=np.array([[0.1, 0.1]]))
    assert found.status.tolist() == [DEAD, REACHABLE, REACHABLE, DEAD]
