"""One point at a time: the head's numbers, whatever form the point has, however the sum is run, and whatever was changed."""

import copy
import math
import pickle
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from test_changed_tensors import BUFFERS, KINDS, SQUARE, WAYS, changed_to, make
from torch.utils._python_dispatch import TorchDispatchMode

import partita as pa
from partita.errors import NonFiniteValueError, OutsideDomainError, ShapeError, UnsupportedError
from partita.geometry.domains import column_ranges
from partita.heads.one_point import OnePoint
from partita.kernels import native, point_sums
from partita.kernels.point_sums import PointSum

needs_numba = pytest.mark.skipif(not native.AVAILABLE, reason="needs numba")
NAMES = {torch.float64: "float64", torch.float32: "float32"}


@pytest.fixture(autouse=True)
def _loops_for_all_heads(monkeypatch):
    """Without numba, larger heads would go through torch, and there would be nothing to test."""
    if not native.AVAILABLE:
        monkeypatch.setitem(point_sums._MOST, False, point_sums._MOST[True])


@pytest.fixture(scope="module")
def wave() -> pa.Compiled:
    return pa.compile("sin(3*x)*y", pa.Box([0, -1], [1, 1]), tolerance=1e-3)


@pytest.fixture(scope="module")
def line() -> pa.Compiled:
    return pa.compile("2*x", pa.Box([0], [1]), tolerance=0.05, method="hard")


def one(head, rule: str = "raise") -> OnePoint:
    return OnePoint(head, NAMES[head.dtype], SQUARE, rule)


def points(count: int, seed: int = 0) -> np.ndarray:
    return SQUARE.sample(count, np.random.default_rng(seed))


def dense(head, z: np.ndarray) -> np.ndarray:
    return head.evaluate_dense(torch.from_numpy(z).to(head.dtype)).detach().numpy()


def difference(head, z: np.ndarray, found: list[np.ndarray]) -> float:
    """From one softmax over all cells, in units in the last place of the largest output."""
    expected = dense(head, z)
    size = np.abs(expected).max() * torch.finfo(head.dtype).eps
    return float(np.abs(np.stack(found).astype(np.float64) - expected).max() / size)


# ---- what a caller sees ----------------------------------------------------------------------------------------------


def test_every_form_of_one_point_gives_the_same_bits(wave):
    z = [0.3125, -0.40625]  # numbers of float32
    forms = [z, tuple(z), np.array(z), np.float32(z), [np.float64(z[0]), np.float32(z[1])], np.array(z, dtype=">f8")]
    values = [wave(form) for form in forms]
    assert all(type(v) is np.ndarray and v.shape == () and v.dtype == np.float64 for v in values)
    batches = [wave([z]), wave(np.array([z])), wave([[z]]).reshape(1)]
    assert len({float(v) for v in (*values, *(b[0] for b in batches))}) == 1
    assert batches[0].shape == (1,) and wave([[z]]).shape == (1, 1)
    assert float(wave(np.array([z, z]))[1]) == pytest.approx(float(values[0]), abs=1e-14)
    assert wave([1, 0]) == wave([1.0, 0.0]) == wave([True, False])
    frozen = np.array(z)
    frozen.flags.writeable = False
    assert wave(frozen) == wave(z) and wave(np.array([z, z])[:, ::-1][:, ::-1])[0] == pytest.approx(float(wave(z)))


def test_shapes_and_dtypes_are_those_of_a_batch():
    tokens = pa.compile("x0 - x1, x2; x3, x0 - x3", pa.Box.sequence(-1, 1, tokens=2, dim=2), tolerance=1.0)
    z = [[0.5, -0.25], [0.125, 1.0]]
    assert tokens(z).shape == (2, 2) and np.array_equal(tokens(z), tokens(np.array([z]))[0])
    assert np.array_equal(tokens(z), tokens(np.array(z))) and tokens.scalar()(0.5, -0.25, 0.125, 1.0) == tuple(
        tokens(z).ravel().tolist()
    )
    pair = pa.compile("k0*q0", (pa.Box([0], [1]), pa.Box([0], [2])), tolerance=0.1)
    assert pair([0.5], [1.5]) == pair(np.array([[0.5]]), np.array([[1.5]]))[0] == pair.scalar()(0.5, 1.5)
    single = pa.compile("sin(x)", pa.Box([0], [1]), tolerance=1e-2, dtype=torch.float32)
    assert single([0.1]).dtype == np.float32 and single([0.1]) == single.scalar()(0.1) == np.float32(
        single.scalar()(0.1)
    )
    with pytest.raises(ShapeError, match="argument"):
        pair([0.5])


CALLS = {"list": lambda c, z: c(z), "array": lambda c, z: c(np.array(z)), "scalar": lambda c, z: c.scalar()(*z)}


@pytest.mark.parametrize("call", CALLS.values(), ids=list(CALLS))
def test_errors_are_those_of_a_batch(wave, call):
    for bad in (math.nan, math.inf):
        with pytest.raises(NonFiniteValueError, match="input number 0 is not finite"):
            call(wave, [bad, 0.5])
    with pytest.raises(OutsideDomainError, match=r"the first is \[0.5, 1.5\]"):
        call(wave, [0.5, 1.5])
    for bad in ([0.5], [0.5, 0.5, 0.5], ["0.5", 0.5], [1j, 0.5]):
        with pytest.raises(ShapeError):
            call(wave, bad)


def test_arguments_that_are_no_floats(line):
    f = line.scalar()
    for bad in ([0.5, 0.5], "x", b"12345678"):
        with pytest.raises(ShapeError):
            f(bad)
    with pytest.raises(NonFiniteValueError):
        f(None)
    with pytest.raises(ShapeError):
        f(10**400)
    with pytest.raises(ShapeError):
        line([10**400])
    assert f(np.float32(0.5)) == f(torch.tensor(0.5)) == f(0.5) and f(1) == f(True) == f(1.0)


@pytest.mark.parametrize("rule", ["clamp", "allow"])
def test_the_rule_for_points_outside(wave, rule):
    c = wave.with_outside(rule)
    f = c.scalar()
    for z in ([2.0, 0.5], [-3.0, 7.0], [0.5, -1.0000001], [0.5, 0.5]):
        batch = c(np.array([z, z]))[0]
        assert c(z) == f(*z) and float(c(z)) == pytest.approx(float(batch), rel=1e-12)
        if rule == "clamp":
            assert c(z) == wave(np.clip(z, [0, -1], [1, 1]))
    with pytest.raises(NonFiniteValueError):
        f(math.inf, 0.0)
    with pytest.raises(NonFiniteValueError):
        c([math.nan, 0.0])


def test_other_domains_are_checked_too():
    ring = pa.Region(pa.Box([-2, -2], [2, 2]), "1 <= x**2 + y**2 <= 2")
    c = pa.compile("x + y", ring, tolerance=0.5)
    f = c.scalar()
    assert f(1.0, 0.5) == c([1.0, 0.5]) == c(np.array([[1.0, 0.5]]))[0]
    for call in (lambda: c([0.1, 0.1]), lambda: f(0.1, 0.1)):
        with pytest.raises(OutsideDomainError):
            call()
    assert f.dimension == 2 and "2 floats" in repr(f)


def test_flushed_subnormal_numbers_are_refused(wave):
    f = wave.scalar()
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor does not flush subnormal numbers")
    try:
        for call in (lambda: wave([0.5, 0.5]), lambda: f(0.5, 0.5)):
            with pytest.raises(UnsupportedError, match="set_flush_denormal"):
                call()
    finally:
        torch.set_flush_denormal(False)
    assert f(0.5, 0.5) == wave([0.5, 0.5])


def test_no_tensor_is_made_for_a_row_of_floats(wave):
    class Counted(TorchDispatchMode):
        calls = 0

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            Counted.calls += 1
            return function(*args, **(kwargs or {}))

    wave([0.5, 0.5])
    with Counted():
        wave([0.25, 0.5])
        wave(np.array([0.25, 0.5]))
        assert Counted.calls == 0
        wave(torch.tensor([0.25, 0.5]))
        assert Counted.calls > 0  # control


def test_trained_values_and_copies(wave):
    c = copy.deepcopy(wave)
    z = [0.3, 0.4]
    assert c(z) == wave(z)
    with torch.no_grad():
        c.head.values.mul_(2.0)
    assert c(z) == pytest.approx(2 * float(wave(z)), rel=1e-12) and c(z) != wave(z)
    again = copy.deepcopy(c)
    assert again(z) == c(z) and pickle.loads(pickle.dumps(one(make("grid")))).at(points(1).tobytes()) is not None
    c.head.unfreeze()
    assert c(z) == again(z)
    with torch.no_grad():
        c.head.values.zero_()
    assert c(z) == 0.0 and again(z) != 0.0


def test_a_function_of_floats_is_a_snapshot(line):
    c = copy.deepcopy(line)
    f, before = c.scalar(), float(line([0.4]))
    c.head.values.zero_()
    assert f(0.4) == before and c([0.4]) == 0.0
    with pytest.raises(UnsupportedError, match="changed after it was certified"):
        c.scalar()
    assert copy.deepcopy(f)(0.4) == before


def test_a_head_that_was_cast_is_refused(line):
    c = copy.deepcopy(line)
    c([0.5])
    c.head.to(torch.float32)
    with pytest.raises(UnsupportedError, match="cast"):
        c([0.5])


# ---- the sum ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_a_point_is_one_softmax_over_all_cells(kind, dtype):
    head, z = make(kind, dtype), points(100)
    found = [one(head).at(row.tobytes()) for row in z]
    assert found[0].dtype == NAMES[dtype] and difference(head, z, found) < 5e3
    shifted = copy.deepcopy(head)
    shifted.get_buffer("core_0" if kind == "train" else "values").mul_(1.01)
    assert difference(shifted, z, found) > 1e4  # control


def random_heads() -> list:
    """Heads of all kinds: sharp and soft, one to four axes, windows of two to all centers."""
    rng, heads = np.random.default_rng(11), [make(kind, dtype) for kind in KINDS for dtype in NAMES]
    for counts, kappa, q, outs in [
        ([9], 8.0, 2, 1),
        ([5, 1, 6], 0.5, 9, 3),
        ([4, 3, 5, 6], 8.0, 1, 2),
        ([30], 3e4, 1, 1),
    ]:
        m = len(counts)
        grid = pa.geometry.ProductGrid.uniform(pa.Box(-np.ones(m), np.ones(m)), counts)
        values = torch.from_numpy(rng.normal(size=(math.prod(counts), outs)) * 10.0 ** rng.integers(-9, 9))
        rates = [kappa * (c / 2) ** 2 for c in counts]
        shapes = {"input_shapes": ((m,),), "output_shape": (outs,)}
        heads.append(pa.heads.GridHead(grid, rates, values, half_windows=q, **shapes))
    return heads


@needs_numba
def test_interpreted_and_compiled_sums_have_the_same_bits():
    rng = np.random.default_rng(3)
    for head in random_heads():
        m, precise = head.dimension, head.dtype == torch.float64
        corner = np.ones(m)
        for rule in ("clamp", "allow"):
            total = PointSum(head.point_parts(), -corner, corner, rule, not precise)
            total.compile()
            assert total._native is not None
            out = np.empty(head.num_outputs)
            for z in (*rng.uniform(-1.5, 1.5, (60, m)), 1e3 * corner, -0.0 * corner, 1e-310 * corner):
                first = total.into(z.tobytes(), out)
                assert total._interpret(z.tobytes()) == out.tolist() and first == out[0]
            for bad in (math.nan, math.inf, -math.inf):
                z = np.where(np.arange(m) == m - 1, bad, 0.5)
                assert math.isnan(total.into(z.tobytes(), out)) and total._interpret(z.tobytes()) is None
        total = PointSum(head.point_parts(), -corner, corner, "raise", not precise)
        total.compile()
        for z in (np.nextafter(corner, 2), -np.nextafter(corner, 2)):
            assert math.isnan(total.into(z.tobytes(), out)) and total._interpret(z.tobytes()) is None
        assert not math.isnan(total.into(corner.tobytes(), out))


@needs_numba
def test_numba_is_asked_after_a_while_and_nothing_changes(monkeypatch):
    monkeypatch.setattr(point_sums, "_compiled", {})
    monkeypatch.setattr(point_sums, "_interpreted", {})
    head = make("grid")
    point, z = one(head), points(1)[0].tobytes()
    first = point.at(z)
    calls = 1
    while not point_sums._compiled:
        assert np.array_equal(point.at(z), first)
        calls += 1
    assert 300 < calls < 5000 and np.array_equal(point.at(z), first)
    assert point.current()._native is not None


@needs_numba
def test_another_exponential_is_never_used(monkeypatch):
    from partita.kernels import point_native

    def coarse(x, out):
        out[:] = np.float32(np.exp(x))

    # numba's cache notices changes of the file of an entry, and of no other
    assert {f.py_func.__module__ for f in point_native.ENTRIES.values()} == {"partita.kernels.point_loops"}
    monkeypatch.setattr(point_native, "exponentials", coarse)
    monkeypatch.setattr(point_sums, "_compiled", {})
    head, z = make("grid"), points(1)[0].tobytes()
    total = one(head).current()
    total.compile()
    assert total._native is None and point_sums._compiled == {("grid", False): None}
    assert not math.isnan(total.into(z, np.empty(2)))


def test_without_numba_small_sums_are_interpreted_and_large_ones_go_through_torch(monkeypatch, wave):
    z = [0.3, 0.4]
    expected = wave(z)
    monkeypatch.setattr(native, "AVAILABLE", False)
    monkeypatch.setattr(point_sums, "_compiled", {})
    monkeypatch.setitem(point_sums._MOST, False, 1 << 10)
    c = copy.deepcopy(wave)
    assert c(z) == c.scalar()(*z) == expected
    large = make("scattered")
    assert large.point_parts() is None and one(large).at(points(1)[0].tobytes()) is None


def test_overflow_on_the_way_is_left_to_the_other_sum():
    head = make("scattered")
    with torch.no_grad():
        head.values.copy_(head.values.sign() * 1e308)
        head.value_slopes.zero_()
        head.inverse_temperature.fill_(1e-3)
    assert one(head).at(points(1)[0].tobytes()) is None  # 600 values of 1e308 are added before they are divided
    assert math.isfinite(float(head.evaluate(torch.zeros(1, 2, dtype=torch.float64)).sum()))


def in_threads(call: Callable[[int], float], expected: list[float]) -> int:
    """How many of many calls in eight threads that run at the same time differ from what one thread found."""

    def wrong(first: int) -> int:
        order = [*range(first, len(expected)), *range(first)] * 25
        return sum(call(k) != expected[k] for k in order)

    with ThreadPoolExecutor(8) as pool:
        return sum(pool.map(wrong, range(0, len(expected), len(expected) // 8)))


def test_threads_do_not_disturb_each_other(wave):
    rows = pa.Box([0, -1], [1, 1]).sample(400, np.random.default_rng(0)).tolist()
    f, expected = wave.scalar(), [float(wave(z)) for z in rows]
    assert in_threads(lambda k: f(*rows[k]), expected) == 0
    assert in_threads(lambda k: float(wave(rows[k])), expected) == 0


@needs_numba
@pytest.mark.parametrize("kind", KINDS)
def test_threads_may_share_the_array_that_they_do_not_read(kind):
    """Native loops run without Python's lock: what a call returns must not come from an array that others write to."""
    total, rows, shared = one(make(kind)).current(), [z.tobytes() for z in points(80)], np.empty(2)
    total.compile()
    expected = [total.into(z, np.empty(2)) for z in rows]
    assert len(set(expected)) > 70 and in_threads(lambda k: total.into(rows[k], shared), expected) == 0


# ---- changed tensors -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", WAYS, ids=lambda w: w.__name__)
@pytest.mark.parametrize(("kind", "name"), BUFFERS)
def test_a_changed_buffer_is_used(kind, name, way):
    head, z = make(kind), points(20)
    point = one(head)
    before = [point.at(row.tobytes()) for row in z]
    assert difference(head, z, before) < 5e3
    way(head, name, changed_to(name, head.get_buffer(name).clone()))
    assert difference(head, z, before) > 1e4  # control
    assert difference(head, z, [point.at(row.tobytes()) for row in z]) < 5e3


def transposed(head):
    head.values.data = head.values.data.T


def shortened(head):
    head.values.data = head.values.data[:1]


def given_other_storage(head):
    head.values.set_(torch.ones(480, 2, dtype=torch.float64))


@pytest.mark.parametrize("change", [transposed, shortened, given_other_storage], ids=lambda f: f.__name__)
def test_changed_storage_is_noticed(change):
    head = make("grid")
    point, z = one(head), points(1)
    assert point.at(z.tobytes()) is not None
    change(head)
    found = point.at(z.tobytes())
    if change is given_other_storage:
        assert np.allclose(found, 1.0)
    else:
        assert found is None  # evaluate says what is wrong


def test_a_square_table_that_was_transposed_is_noticed():
    """Neither its pointer nor its shape tells."""
    shapes = {"input_shapes": ((1,),), "output_shape": (4,)}
    grid = pa.geometry.ProductGrid.uniform(pa.Box([-1], [1]), 4)
    head = pa.heads.GridHead(grid, 8.0, torch.arange(16, dtype=torch.float64).reshape(4, 4), half_windows=2, **shapes)
    point, z = OnePoint(head, "float64", pa.Box([-1], [1]), "raise"), np.array([[0.3]])
    assert difference(head, z, [point.at(z.tobytes())]) < 10
    head.values.data = head.values.data.T
    assert point.at(z.tobytes()) is None
    head.values.data = head.values.data.contiguous()
    assert difference(head, z, [point.at(z.tobytes())]) < 10


@pytest.mark.parametrize("rate", [-1.0, 0.0, 1e-300, math.nan])
def test_any_rate_is_summed_as_it_stands_or_not_at_all(rate):
    for kind in KINDS:
        head, z = make(kind), points(5)
        point = one(head)
        point.at(z[0].tobytes())
        head.inverse_temperature.fill_(rate)
        found = [point.at(row.tobytes()) for row in z]
        assert all(f is None for f in found) if math.isnan(rate) else difference(head, z, found) < 5e3


# ---- batches ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("m", [1, 2, 3, 7, 1100])
def test_ranges_of_columns(m):
    rng = np.random.default_rng(m)
    for count in (0, 1, 2, 500, 1024, 1025, 3000):
        z = rng.normal(size=(count, m))
        least, largest = column_ranges(z)
        assert np.array_equal(least, z.min(axis=0, initial=math.inf))
        assert np.array_equal(largest, z.max(axis=0, initial=-math.inf))
        if count:
            at = rng.integers(count), rng.integers(m)
            for bad in (math.nan, math.inf, -math.inf):
                z[at] = bad
                least, largest = column_ranges(z)
                assert not (np.isfinite(least) & np.isfinite(largest))[at[1]]
                assert (np.isfinite(least) & np.isfinite(largest)).sum() == m - 1


@pytest.mark.parametrize("row", [0, 1023, 1024, 2999])
def test_one_bad_point_of_many_is_found(wave, row):
    z = pa.Box([0, -1], [1, 1]).sample(3000, np.random.default_rng(0))
    kept = z.copy()
    assert wave(z).shape == (3000,) and np.array_equal(z, kept)
    for bad, error in ((math.nan, NonFiniteValueError), (math.inf, NonFiniteValueError), (1.5, OutsideDomainError)):
        z[row, 1] = bad
        with pytest.raises(error, match=str(bad) if error is OutsideDomainError else f"input number {row} "):
            wave(z)
    with pytest.raises(NonFiniteValueError):
        z[row, 1] = math.nan
        wave.with_outside("allow")(z)
    z[row, 1] = 1.5
    assert wave.with_outside("clamp")(z)[row] == pytest.approx(float(wave([z[row, 0], 1.0])), rel=1e-12)


def test_numba_is_not_imported_for_a_few_points():
    code = (
        "import sys, partita as pa\n"
        "c = pa.compile('2*x', pa.Box([0], [1]), tolerance=0.1, method='hard')\n"
        "[c([k / 100]) for k in range(100)]\n"
        "sys.exit('numba' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
