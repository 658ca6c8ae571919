"""`pa.attend`: softmax attention over points equals one dense softmax within the bound that it states, on every path."""

from __future__ import annotations

import math
import threading

import pytest
import torch

import partita as pa
from partita.errors import DomainError, ShapeError, UnsupportedError
from partita.heads import ScatteredHead
from partita.kernels import attend_operator, attention, native
from partita.kernels.attend_operator import Operands

PATHS = [
    pytest.param(0, id="native", marks=pytest.mark.skipif(not native.AVAILABLE, reason="needs numba")),
    pytest.param(1 << 62, id="torch"),
]


@pytest.fixture(params=PATHS)
def path(request, monkeypatch):
    """Every batch through native loops, or every batch through torch."""
    monkeypatch.setattr(native, "WORTH", request.param)


def uniform(*shape, seed=0, dtype=torch.float64):
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def dense(queries, keys, values, rate, powers=None):
    """One softmax over all keys, in float64."""
    queries, keys, values = (t.double() for t in (queries, keys, values))
    squares = (queries[:, None] - keys).square().sum(dim=2) - (0 if powers is None else powers.double())
    scores = -rate / 2 * squares
    return torch.softmax(scores, dim=1) @ values, torch.logsumexp(scores, dim=1)


def values_at(keys, outputs=1):
    return torch.stack([torch.sin(5 * (o + 1) * keys.double().sum(dim=1)) for o in range(outputs)], dim=1).to(
        keys.dtype
    )


CLUSTERS = (uniform(12, 1, 2) + 1e-6 * uniform(12, 60, 2, seed=1)).reshape(-1, 2)
LINE = torch.cat([uniform(700, 1), torch.zeros(700, 1, dtype=torch.float64)], dim=1)
SITUATIONS = {
    "uniform": (uniform(400, 2, seed=2), uniform(900, 2), 6 * 900.0, None),
    "clustered keys": (uniform(400, 2, seed=2), CLUSTERS, 1e9, None),
    "all keys equal": (uniform(400, 2, seed=2), uniform(1, 2).expand(700, 2).contiguous(), 1e4, None),
    "one key": (uniform(30, 2, seed=2), uniform(1, 2), 1e4, None),
    "keys on a line": (uniform(400, 2, seed=2), LINE, 1e5, None),
    "hot": (uniform(100, 2, seed=2), uniform(900, 2), 1e-12, None),
    "cold": (uniform(400, 2, seed=2), uniform(900, 2), 1e12, None),
    "far outside": (2e3 * uniform(400, 2, seed=2) - 1e3, uniform(900, 2), 1e4, None),
    "powers": (uniform(400, 2, seed=2), uniform(900, 2), 1e4, 0.3 * uniform(900, seed=3)),
    "huge powers": (uniform(400, 2, seed=2), uniform(900, 2), 1e4, 1e3 * uniform(900, seed=3) - 500),
    "tiny numbers": (1e-150 * uniform(100, 2, seed=2), 1e-150 * uniform(900, 2), 1e300, None),
    "more axes than are pruned": (uniform(50, 12, seed=2), uniform(400, 12), 100.0, None),
}


@pytest.mark.parametrize("tolerance", [0.0, 1e-9, 1e-3])
@pytest.mark.parametrize("name", SITUATIONS)
def test_it_equals_one_dense_softmax_within_its_bound(name, tolerance, path):
    queries, keys, rate, powers = SITUATIONS[name]
    for outputs in (1, 3):
        values = values_at(keys, outputs)
        found = pa.attend(queries, keys, values, inverse_temperature=rate, powers=powers, tolerance=tolerance)
        expected, lse = dense(queries, keys, values, rate, powers)
        assert ((found.output - expected).abs().amax(dim=1) <= found.bound).all()
        assert ((found.lse - lse).abs() <= tolerance + 1e-13 * (1 + lse.abs())).all()


@pytest.mark.parametrize("name", ["uniform", "clustered keys", "far outside", "powers"])
def test_float32_too(name, path):
    queries, keys, rate, powers = (t.float() if isinstance(t, torch.Tensor) else t for t in SITUATIONS[name])
    values, rate = values_at(keys), float(torch.tensor(rate, dtype=torch.float32))
    found = pa.attend(queries, keys, values, inverse_temperature=rate, powers=powers, tolerance=1e-7)
    expected, _ = dense(queries, keys, values, rate, powers)
    assert found.output.dtype == torch.float32
    assert ((found.output - expected).abs().amax(dim=1) <= found.bound).all()


def test_the_bound_is_of_use(path):
    keys = uniform(3000, 2)
    found = pa.attend(uniform(200, 2, seed=1), keys, values_at(keys), inverse_temperature=2e4, tolerance=1e-9)
    assert found.bound.max() < 1.1e-9


def test_a_cut_that_is_too_short_breaks_the_bound(path, monkeypatch):
    """The negative control: keys are left out that matter, and the bound is not told."""
    keys, queries, rate = uniform(900, 2), uniform(400, 2, seed=2), 200.0
    values = values_at(keys)
    expected, _ = dense(queries, keys, values, rate)

    def careless(queries, given, index):
        output, lse, _, depth = attend_operator.attend_near(queries, given._replace(cut=4.0), index)
        return output, lse, torch.full_like(lse, -given.cut), depth

    right = pa.attend(queries, keys, values, inverse_temperature=rate, tolerance=1e-9)
    monkeypatch.setattr(attention, "attend_near", careless)
    wrong = pa.attend(queries, keys, values, inverse_temperature=rate, tolerance=1e-9)
    assert ((right.output - expected).abs().amax(dim=1) <= right.bound).all()
    assert ((wrong.output - expected).abs().amax(dim=1) > wrong.bound).any()


def test_nan_stays_in_its_row_and_no_query_is_no_error(path):
    keys = uniform(900, 2)
    queries = uniform(60, 2, seed=1)
    clean = pa.attend(queries, keys, values_at(keys), inverse_temperature=1e4, tolerance=1e-9).output
    queries[3, 0] = queries[17, 1] = math.nan
    found = pa.attend(queries, keys, values_at(keys), inverse_temperature=1e4, tolerance=1e-9).output
    bad = found.isnan().any(dim=1)
    assert bad.nonzero().flatten().tolist() == [3, 17] and torch.allclose(found[~bad], clean[~bad], rtol=0, atol=1e-12)
    none = pa.attend(queries[:0], keys, values_at(keys, 3), inverse_temperature=1e4, tolerance=1e-9)
    assert none.output.shape == (0, 3) and none.lse.shape == none.bound.shape == (0,)


def test_an_index_is_prepared_once_and_copied(path):
    keys, queries = uniform(900, 2), uniform(60, 2, seed=1)
    index, values = pa.KeyIndex(keys, 0.01 * uniform(900, seed=2)), values_at(keys)
    first = pa.attend(queries, index, values, inverse_temperature=1e4, tolerance=1e-9).output
    tree = index.tree
    keys.zero_()
    again = pa.attend(queries, index, 2 * values, inverse_temperature=1e4, tolerance=1e-9).output
    assert index.tree is tree and len(index) == 900
    assert torch.allclose(again, 2 * first, rtol=1e-12, atol=0)


def gradients(queries, keys, values, powers, rate, through):
    tensors = [t.clone().requires_grad_() for t in (queries, keys, values, powers, torch.tensor(rate).double())]
    q, k, v, p, r = tensors
    out, lse = through(q, k, v, p, r)
    (out * torch.linspace(-1, 1, out.numel()).reshape(out.shape)).sum().backward(retain_graph=True)
    lse.mean().backward()
    return [t.grad for t in tensors]


def test_gradients_of_everything(path):
    queries, keys, rate, powers = SITUATIONS["powers"]
    queries, keys, powers = queries[:90], keys[:400], powers[:400]

    def ours(q, k, v, p, r):
        found = pa.attend(q, k, v, inverse_temperature=r, powers=p, tolerance=1e-12)
        return found.output, found.lse

    values = values_at(keys, 5)
    for got, expected in zip(
        gradients(queries, keys, values, powers, rate / 50, ours),
        gradients(queries, keys, values, powers, rate / 50, lambda q, k, v, p, r: dense(q, k, v, r, p)),
    ):
        assert torch.allclose(got, expected, rtol=1e-9, atol=1e-10 * float(expected.abs().max()))


def test_second_derivatives():
    keys, queries = uniform(300, 2), uniform(4, 2, seed=1).requires_grad_()

    def out(q):
        return pa.attend(q, keys, values_at(keys), inverse_temperature=300.0, tolerance=1e-12).output

    assert torch.autograd.gradcheck(out, queries) and torch.autograd.gradgradcheck(out, queries)


def operands(powers=True, slopes=True, outputs=2):
    keys = uniform(400, 2)
    return Operands(
        keys.requires_grad_(),
        values_at(keys.detach(), outputs).requires_grad_(),
        (0.01 * uniform(400, seed=1)).requires_grad_() if powers else None,
        uniform(400, outputs, 2, seed=2).requires_grad_() if slopes else None,
        torch.tensor(2e3, dtype=torch.float64, requires_grad=True),
        50.0,
    )


@pytest.mark.parametrize("powers", [True, False])
def test_the_operator_passes_torchs_own_checks(powers, path):
    queries = uniform(40, 2, seed=3).requires_grad_()
    torch.library.opcheck(torch.ops.partita.attend.default, (queries, *operands(powers, powers)))


def test_affine_values_and_their_gradients(path):
    """What scattered heads use besides `attend`: values `V_j + J_j(q − k_j)`."""
    from partita.kernels.scattered_torch import sum_all

    given, queries = operands(), uniform(300, 2, seed=3).requires_grad_()
    tensors = [queries, *given.tensors]
    ours, *_ = attend_operator.sum_scattered(queries, given)
    reference, _ = sum_all(queries, *given.tensors)
    assert torch.allclose(ours, reference, rtol=0, atol=1e-12)
    weights = torch.linspace(-1, 1, ours.numel()).reshape(ours.shape).double()
    for got, expected in zip(*(torch.autograd.grad((out * weights).sum(), tensors) for out in (ours, reference))):
        assert torch.allclose(got, expected, rtol=1e-9, atol=1e-11 * float(expected.abs().max()))


def scattered_head(keys=900, outputs=1):
    centers = uniform(keys, 2)
    shape = () if outputs == 1 else (outputs,)
    return ScatteredHead(centers, 6.0 * keys, values_at(centers, outputs), input_shapes=((2,),), output_shape=shape)


def test_a_head_compiles_to_one_graph_and_exports_plain_operations():
    head, z = scattered_head(300), uniform(50, 2, seed=1)
    compiled = torch.compile(head, fullgraph=True, backend="aot_eager")
    assert torch.allclose(compiled(z), head.evaluate_dense(z)[:, 0], rtol=0, atol=1e-13)
    exported = torch.export.export(head, (z,))
    assert not any("partita" in str(node.target) for node in exported.graph.nodes)
    assert torch.allclose(exported.module()(z), head.evaluate_dense(z)[:, 0], rtol=0, atol=1e-13)


def test_threads_and_repetition_change_nothing(monkeypatch):
    monkeypatch.setattr(native, "WORTH", 0)
    head, z = scattered_head(), uniform(3000, 2, seed=1)
    alone, found = head.evaluate(z), []
    threads = [threading.Thread(target=lambda: found.append(head.evaluate(z))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4 and all(torch.equal(alone, one) for one in found)


@pytest.mark.parametrize(
    ("error", "match", "change"),
    [
        (ShapeError, "expected \\(Q, m\\) and \\(N, m\\)", {"queries": uniform(3, 3)}),
        (ShapeError, "expected \\(9, out\\)", {"values": uniform(8, 1)}),
        (ShapeError, "expected torch.float64 on cpu", {"values": uniform(9, 1, dtype=torch.float32)}),
        (ShapeError, "expected a tensor", {"values": [[1.0]] * 9}),
        (ShapeError, "found list", {"keys": [[0.0, 1.0]]}),
        (ShapeError, "N ≥ 1", {"keys": uniform(0, 2)}),
        (ShapeError, "expected \\(9,\\)", {"powers": uniform(8)}),
        (ShapeError, "expected a number", {"inverse_temperature": torch.ones(2)}),
        (DomainError, "NaN or infinity", {"keys": torch.full((9, 2), math.inf, dtype=torch.float64)}),
        (DomainError, "finite number ≥ 0", {"tolerance": -1.0}),
        (DomainError, "finite number ≥ 0", {"tolerance": math.nan}),
        (DomainError, "number > 0", {"inverse_temperature": 0.0}),
        (DomainError, "finite values", {"values": torch.full((9, 1), math.nan, dtype=torch.float64)}),
        (UnsupportedError, "KeyIndex\\(keys, powers\\)", {"keys": pa.KeyIndex(uniform(9, 2)), "powers": uniform(9)}),
    ],
)
def test_bad_input_says_what_is_wrong(error, match, change):
    given = {"queries": uniform(3, 2), "keys": uniform(9, 2), "values": uniform(9, 1)}
    given |= {"inverse_temperature": 1.0, "tolerance": 1e-3} | change
    with pytest.raises(error, match=match):
        pa.attend(given.pop("queries"), given.pop("keys"), given.pop("values"), **given)


def test_many_keys_that_trail_far_are_as_exact_as_the_best(path):
    """Their weights sum up to 10⁻⁶ of the best: the short exponential that far keys get by themselves would be off by 10⁻¹⁴."""
    rate, away = 1e4, math.sqrt(2 * 24 / 1e4)  # every key there trails by 24
    keys = torch.cat([torch.zeros(8, 2, dtype=torch.float64), 1e-5 * uniform(30_000, 2)])
    keys[8:, 0] += away
    values = torch.zeros(len(keys), 1, dtype=torch.float64)
    values[8:] = 1.0
    queries = torch.zeros(20, 2, dtype=torch.float64)
    found = pa.attend(queries, pa.KeyIndex(keys), values, inverse_temperature=rate, tolerance=1e-18)
    expected, lse = dense(queries[:1], keys, values, rate)
    assert 1e-8 < float(expected) < 1e-5
    assert float((found.output / expected - 1).abs().max()) < 1e-12
    assert float((found.lse - lse).abs().max()) < 1e-14
