"""The functions of many variables, the peers of benchmarks/structure.py, its table, and the experiment on heads and layers."""

import importlib.util
import json
import math
import sys
from functools import cache
from pathlib import Path

import numpy as np
import pytest

import partita as pa
from partita.functions.target import make_target
from partita.reproduction import EXPERIMENTS, Table
from partita.reproduction.structured_functions import (
    KNOWN_FUNCTIONS,
    bell_of,
    norm_wave_of,
    sines_of,
    unequal_sines_of,
)

ROOT = Path(__file__).parent.parent
TAU = 2 * math.pi


@cache
def benchmark(name="structure"):
    spec = importlib.util.spec_from_file_location(name, ROOT / "benchmarks" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look it up
    spec.loader.exec_module(module)
    return module


# the functions, as the literature writes them


def ishigami(x1, x2, x3):
    return np.sin(x1) + 7 * np.sin(x2) ** 2 + 0.1 * x3**4 * np.sin(x1)


def borehole(rw, r, tu, hu, tl, hl, length, kw):
    ratio = np.log(r / rw)
    return TAU * tu * (hu - hl) / (ratio * (1 + 2 * length * tu / (ratio * rw**2 * kw) + tu / tl))


def otl_circuit(rb1, rb2, rf, rc1, rc2, beta):
    vb1, gain = 12 * rb2 / (rb1 + rb2), beta * (rc2 + 9)
    total = gain + rf
    return (vb1 + 0.74) * gain / total + 11.35 * rf / total + 0.74 * rf * gain / (total * rc1)


def piston(mass, s, v0, k, p0, ta, t0):
    a = p0 * s + 19.62 * mass - k * v0 / s
    v = s / (2 * k) * (np.sqrt(a**2 + 4 * k * p0 * v0 / t0 * ta) - a)
    return TAU * np.sqrt(mass / (k + s**2 * p0 * v0 / t0 * ta / v**2))


def wing_weight(sw, wfw, a, sweep, q, taper, tc, nz, wdg, wp):
    cos = np.cos(np.radians(sweep))
    first = 0.036 * sw**0.758 * wfw**0.0035 * (a / cos**2) ** 0.6 * q**0.006 * taper**0.04
    return first * (100 * tc / cos) ** -0.3 * (nz * wdg) ** 0.49 + sw * wp


def robot_arm(*x):
    angles = np.cumsum(x[:4], axis=0)
    return np.hypot((x[4:] * np.cos(angles)).sum(axis=0), (x[4:] * np.sin(angles)).sum(axis=0))


PUBLISHED = {
    "Ishigami": ishigami,
    "borehole": borehole,
    "OTL circuit": otl_circuit,
    "piston": piston,
    "wing weight": wing_weight,
    "robot arm": robot_arm,
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_expressions_are_the_published_functions(name):
    f = KNOWN_FUNCTIONS[name]
    x = f.box.sample(2000, np.random.default_rng(0))
    assert len(f.variables) == len(f.lo) == len(f.hi) == x.shape[1]
    expected = PUBLISHED[name](*x.T)
    found = make_target(f.expression, f.box)(x)[:, 0]
    assert np.allclose(found, expected, rtol=1e-10, atol=1e-12)
    assert f.least - 1e-9 <= found.min() and found.max() <= f.largest + 1e-9
    assert not np.allclose(found, PUBLISHED[name](*(1.001 * x).T), rtol=1e-10, atol=1e-12)  # control


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_range_is_reached(name):
    """From random corners and points, a step towards each end of the range: what is recorded is not too wide."""
    f = KNOWN_FUNCTIONS[name]
    target, rng = make_target(f.expression, f.box), np.random.default_rng(1)
    lo, hi = f.box.lo, f.box.hi
    for sign, end in ((-1, f.least), (1, f.largest)):
        u = rng.random((4000, len(lo)))
        u[:2000] = np.round(u[:2000] * 2) / 2
        for scale in 0.5 ** np.arange(24):
            values = sign * target(np.clip(lo + u * (hi - lo), lo, hi))[:, 0]
            best = u[np.argsort(values)[-20:]]
            u = np.concatenate(
                [best, (best[:, None] + scale * rng.uniform(-1, 1, (20, 50, len(lo)))).reshape(-1, len(lo))]
            )
            u = np.where(rng.random(u.shape) < 0.3, np.round(u), u).clip(0, 1)
            u[:20] = best
        assert abs(sign * values.max() - end) < 1e-3 * f.span


def test_the_sums_are_what_they_are_called():
    x = np.random.default_rng(0).uniform(0.5, 1, (50, 7))
    box = pa.Box([0.5] * 7, [1.0] * 7)
    i = np.arange(7)
    for text, expected in (
        (sines_of(7), np.sin(3 * x).sum(axis=1)),
        (unequal_sines_of(7), np.sin((1 + i / 50) * x + i / 7).sum(axis=1)),
        (bell_of(7), np.exp(-(x**2).sum(axis=1))),
        (norm_wave_of(7), np.sin(np.linalg.norm(x, axis=1))),
    ):
        assert np.allclose(make_target(text, box)(x)[:, 0], expected, rtol=1e-12)


def test_more_variables_than_numpy_has_axes():
    c = pa.compile(unequal_sines_of(70), pa.Box([-1.0] * 70, [1.0] * 70), tolerance=1e-2)
    assert c.certificate.kind == "proved" and c.error_bound <= 1e-2 and c.num_parameters <= 1000
    assert c.attack(samples=2000).error <= c.error_bound


# the peers


def smooth(z):
    return np.exp(0.5 * z[:, 0]) * np.cos(z[:, 1]) + z[:, 2]


def points(m, count=500):
    return np.random.default_rng(0).uniform(-1, 1, (count, m))


def test_sparse_grids_interpolate_at_their_nodes_and_reproduce_polynomials():
    peers = benchmark("structure_peers")
    tests = points(3)
    grid = peers.SparseGrid(lambda z: 1 + z[:, 0] * z[:, 1] + z[:, 2] ** 4, tests)
    for level in range(3):
        for index in peers.levels_of(3, level):
            grid.add(index)
    assert grid.error < 1e-12  # level two has x y and z⁴
    assert len(list(peers.levels_of(3, 2))) == 6 and list(peers.levels_of(3, 0)) == [()]
    short = peers.SparseGrid(lambda z: z[:, 0] * z[:, 1], tests)
    for level in range(2):
        for index in peers.levels_of(3, level):
            short.add(index)
    assert short.error > 0.5  # control: level one has no mixed terms


def test_smolyaks_sizes_are_the_known_ones():
    """Nodes of the Clenshaw–Curtis sparse grid in d = 2: 1, 5, 13, 29, 65; in d = 10: 1, 21, 221."""
    peers = benchmark("structure_peers")
    for m, sizes in ((2, (1, 5, 13, 29, 65)), (10, (1, 21, 221))):
        total = 0
        for level, expected in enumerate(sizes):
            total += sum(math.prod(len(peers.new_nodes(k)) for _, k in index) for index in peers.levels_of(m, level))
            assert total == expected
    nodes = np.sort(np.concatenate([peers.new_nodes(k) for k in range(4)]))
    assert np.allclose(nodes, -np.cos(np.pi * np.arange(9) / 8))


def test_both_grids_meet_a_tolerance_and_the_adaptive_one_leaves_axes_out():
    peers = benchmark("structure_peers")
    tests = points(6)
    full = peers.smolyak(smooth, tests, 1e-6, 30.0)
    adaptive = peers.adaptive_grid(smooth, tests, 1e-6, 30.0)
    assert full.met and adaptive.met and max(full.error, adaptive.error) <= 1e-6
    assert adaptive.stored <= 2 * full.stored
    hopeless = peers.adaptive_grid(lambda z: np.sign(z[:, 0]), tests, 1e-6, 0.2)
    assert not hopeless.met and hopeless.error > 1e-3


def test_an_index_that_is_zero_by_symmetry_does_not_stop_the_adaptive_grid():
    peers = benchmark("structure_peers")
    found = peers.adaptive_grid(lambda z: np.sin(np.pi * z[:, 0]) + z[:, 1], points(2), 1e-3, 20.0)
    assert found.met


def test_a_network_is_trained_and_says_when_it_misses(monkeypatch):
    peers = benchmark("structure_peers")
    monkeypatch.setattr(peers, "WIDTHS", (8,))
    easy = peers.trained_network(smooth, points(3), 0.3, 2.0)
    assert easy.met and easy.error <= 0.3 and easy.stored == 8 * 3 + 8 + 8 * 8 + 8 + 8 + 1
    assert not peers.trained_network(smooth, points(3), 1e-12, 0.3).met


# the table


def row(**changes):
    module = benchmark()
    numbers = {"claim": "proved", "stored": 21, "heads": 1, "uses": 10, "layers": 1, "keys": 100, "bound": 1e-7}
    return module.Row(module.NAMES[0], 10, 1e-6, **(numbers | {"seen": 9e-8, "seconds": 1.0} | changes))


def test_the_table_says_what_holds_and_what_fails():
    module = benchmark()
    good, bad = row(asked={"proved": True}), row(asked={"proved": True, "at most 60 numbers": False})
    for found, word in ((good, "holds"), (bad, "FAILS: at most 60 numbers")):
        results = {"targets": {module.NAMES[0]: module.asdict(found)}, "peers": {}}
        lines = module.show(module.main_rows(results)).splitlines()
        assert lines[2].endswith(f"| {word} |") and found.holds is (word == "holds")


def test_a_target_is_measured_and_asked():
    module = benchmark()
    case = module.Case("small", sines_of(5), module.cube(5), 1e-2, numbers=5, seconds=1e9)
    found = module.measure(case)
    assert found.claim == "proved" and found.seen <= found.bound <= 1e-2 and found.uses == 5 and found.layers == 1
    assert found.asked == {
        "proved": True,
        "the attack stays below the bound": True,
        "at most 5 numbers": False,
        "at most 1e+09 s": True,
    }
    pole = module.measure(module.Case("pole", "1/(x0 + x1)", module.cube(2), 1e-2))
    assert pole.refused and not pole.holds


def test_the_page_shows_the_recorded_results():
    module = benchmark()
    results = json.loads(module.RESULTS.read_text(encoding="utf-8"))
    assert set(results["targets"]) == set(module.NAMES)
    page = module.PAGE.read_text(encoding="utf-8")
    assert module.with_tables(page, results) == page
    results["targets"][module.NAMES[0]]["stored"] += 1  # control
    assert module.with_tables(page, results) != page


# the experiment


def tables(**changes):
    """The control, with sizes of heads and layers that do not grow."""
    experiment = EXPERIMENTS["heads-and-layers"]
    found = dict(experiment.control(0))
    kept = []
    for line in found["sizes"].rows():
        if line["family"] in ("bell", "product") and line["way"] == "several heads":
            continue
        flat = line["way"] != "one head" and line["family"] != "any"
        kept.append(dict(line) | ({"stored_numbers": 20.0 + line["dimension"]} if flat else {}))
    return found | {"sizes": Table.of([line | changes for line in kept])}


def test_structure_that_helps_is_recognised():
    verdict = EXPERIMENTS["heads-and-layers"].verdict
    assert verdict(tables()).outcome == "holds"
    assert verdict(tables(worst_seen=1.0)).outcome == "fails"  # an attack beyond the bound
    assert verdict(tables(error_bound=2e-3)).outcome == "fails"  # a bound beyond the tolerance
    near = tables()
    near["gaps"] = Table.of([{"function": "product of 2", "reads": 1, "relative_gap": 0.3}])
    assert verdict(near).outcome == "mixed"
