"""Heads as C: every recorded head, compiled by gcc and clang at several levels, against 200 bits, the head, and the function."""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from balls import bits
from balls import values as exact_values
from dense import oracle_of
from flint import arb
from typer.testing import CliRunner

import partita as pa
from partita.cli import app
from partita.errors import AlreadyExistsError, SizeError, UnsupportedError
from partita.geometry import Box, ProductGrid
from partita.heads import GridHead, ScatteredHead, TrainHead
from partita.storage.c_source import CSource

CORPUS = Path(__file__).parent / "corpus"
WARNINGS = ["-Wall", "-Wextra", "-Wconversion", "-Wpedantic", "-Werror"]
LEVELS = {
    "gcc -O0": ["gcc", "-std=c99", "-O0"],
    "gcc -O2": ["gcc", "-std=c99", "-O2"],
    "gcc -O3": ["gcc", "-O3", "-march=native"],  # contracts to fused multiply-adds
    "clang -O0": ["clang", "-std=c99", "-O0"],
    "clang -O2": ["clang", "-std=c99", "-O2"],
    "clang -O3": ["clang", "-O3", "-march=native", "-ffp-contract=fast"],
}
SINGLE = {"dtype": torch.float32}


def _scattered(dtype: torch.dtype, keys: int = 700) -> pa.Compiled:
    """Keys that a search has to choose from, with powers, in two variables."""
    rng = np.random.default_rng(1)
    centers = torch.from_numpy(rng.uniform(-1, 1, (keys, 2))).to(dtype)
    values = torch.sin(3 * centers[:, :1]) + centers[:, :1] * centers[:, 1:]
    powers = torch.from_numpy(rng.uniform(0, 1e-3, keys)).to(dtype)
    head = ScatteredHead(centers, 3000.0, values, powers=powers, input_shapes=((2,),), output_shape=())
    c = pa.compile("x0 + x1", "[-1,1]^2", tolerance=0.5, method="affine", dtype=dtype)
    return replace(c, head=head)  # only its rounding counts here


MADE: dict[str, Callable[[], pa.Compiled]] = {
    "network of sines": lambda: pa.compile(" + ".join(f"sin(3*x{i})" for i in range(6)), "[-1,1]^6", tolerance=1e-6),
    "network in layers": lambda: pa.compile("sin(sqrt(x0^2+x1^2+x2^2+1))", "[-1,1]^3", tolerance=1e-4, max_layers=3),
    "network in float32": lambda: pa.compile("sin(3*x0) + cos(x1) + x2^2", "[-1,1]^3", tolerance=1e-3, **SINGLE),
    "two keys": lambda: pa.compile("tanh(3*x0)", "[-2,2]", tolerance=1e-6),
    "lines": lambda: pa.compile("log(1+exp(x0))", "[-12,20]", tolerance=0.05, method="lines"),
    "convex": lambda: pa.compile("x0^2+x1^2", "[-1,1]^2", tolerance=0.05, method="convex"),
    "far from the origin": lambda: pa.compile("sin(x0 - 1e6)", pa.Box([1e6], [1e6 + 2]), tolerance=1e-5),
    "tiny scale": lambda: pa.compile("1e-9*sin(1e6*x0)", pa.Box([0], [3e-6]), tolerance=1e-13),
    "vector": lambda: pa.compile("x0*x1, x0 - x1, sin(x0)", "[-1,1]^2", tolerance=1e-3),
    "disk": lambda: pa.compile("x0*x1", pa.Ball([0, 0], 1.0), tolerance=1e-3),
}


def recorded() -> list[str]:
    """The recorded heads, but for those in half precision, for which C has no type."""
    folders = sorted(p.name for p in CORPUS.iterdir() if (p / "certificate.json").exists())
    return [n for n in folders if "float16" not in (CORPUS / n / "head.json").read_text()]


ALL = [*recorded(), *MADE]


def c_name(name: str) -> str:
    return "c_" + re.sub(r"[^a-z0-9]+", "_", name.lower())


@cache
def compiled(name: str) -> pa.Compiled:
    return MADE[name]() if name in MADE else pa.load(CORPUS / name)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One C file for every head."""
    place = tmp_path_factory.mktemp("c")
    for name in ALL:
        compiled(name).export_c(place / f"{c_name(name)}.c")
    return place


def built(folder: Path, level: str, *files: str, flags: tuple[str, ...] = ()) -> ctypes.CDLL:
    """The files as one shared library; skipped where there is no such compiler."""
    command = LEVELS[level]
    if shutil.which(command[0]) is None:
        pytest.skip(f"no {command[0]}")
    library = folder / f"{level.replace(' ', '')}-{files[0]}.so"
    subprocess.run(
        [*command, *WARNINGS, *flags, "-shared", "-fPIC", *files, "-o", str(library)], cwd=folder, check=True
    )
    return ctypes.CDLL(str(library))


def evaluated(library: ctypes.CDLL, name: str, points: np.ndarray, outputs: int, dtype: torch.dtype) -> np.ndarray:
    """`(n, m)` to `(n, outputs)` by the C function."""
    number, c_number = (np.float32, ctypes.c_float) if dtype == torch.float32 else (np.float64, ctypes.c_double)
    function = getattr(library, f"{name}_eval")
    function.argtypes, function.restype = [ctypes.POINTER(c_number)] * 2, None
    given, out = np.ascontiguousarray(points, dtype=number), np.full((len(points), outputs), 7.0, dtype=number)
    size = np.dtype(number).itemsize
    for i in range(len(points)):
        places = given.ctypes.data + i * given.shape[1] * size, out.ctypes.data + i * outputs * size
        function(*(ctypes.cast(p, ctypes.POINTER(c_number)) for p in places))
    return out.astype(np.float64)


def points_of(c: pa.Compiled, count: int = 120) -> np.ndarray:
    """Points of the domain in the head's dtype: random ones, corners, and some next to the corners."""
    domain = c.target.domain
    drawn, corners = domain.sample(count, np.random.default_rng(5)), domain.corners(16)
    near = corners + 1e-9 * (drawn[: len(corners)] - corners)
    points = np.concatenate([drawn, corners, near])
    return points.astype(np.float32).astype(np.float64) if c.head.dtype == torch.float32 else points


def rounding(c: pa.Compiled) -> float:
    """What running may add, as the certificate says; for claims that do not say, some units of the values."""
    terms = [t.value for t in c.certificate.terms if t.name in ("score rounding", "summation", "window")]
    box = c.target.box
    unit = torch.finfo(c.head.dtype).eps
    return sum(terms) if terms else 256 * unit * max(1.0, c.head.largest_value(box.lo.ravel(), box.hi.ravel()))


@pytest.mark.parametrize("level", LEVELS)
def test_every_head_in_c_is_the_head_within_the_rounding_that_its_certificate_counts(folder: Path, level: str) -> None:
    library = built(folder, level, *(f"{c_name(name)}.c" for name in ALL))
    for name in ALL:
        c, oracle = compiled(name), oracle_of(compiled(name).head)
        points = points_of(c)
        got = evaluated(library, c_name(name), points, c.head.num_outputs, c.head.dtype)
        allowed = rounding(c)
        away = np.abs(got - oracle.in_floats(points)).max(axis=1)
        with torch.no_grad():
            head = c.head.evaluate(torch.from_numpy(points).to(c.head.dtype)).double().numpy()
        assert np.abs(got - head).max() <= 2 * allowed, name
        with bits(200):
            for i in np.argsort(away)[-2:]:
                worst = max(abs(arb(a) - b) for a, b in zip(got[i].tolist(), oracle.in_balls(points[i].tolist())))
                assert worst <= arb(allowed), (name, points[i], worst, allowed)


@pytest.mark.parametrize("level", ["gcc -O3", "clang -O3"])
def test_the_bound_of_the_certificate_covers_the_c(folder: Path, level: str) -> None:
    library = built(folder, level, *(f"{c_name(name)}.c" for name in ALL))
    checked = 0
    for name in ALL:
        c = compiled(name)
        if c.target.graph is None or c.certificate.norm != "inf" or c.certificate.kind != "proved":
            continue
        points = points_of(c, 1000)
        got = evaluated(library, c_name(name), points, c.head.num_outputs, c.head.dtype)
        away = np.abs(got - c.target.graph.evaluate(points).reshape(got.shape)).max(axis=1)
        with bits(300):
            i = int(np.nan_to_num(away).argmax())
            pairs = zip(got[i].tolist(), exact_values(c.target.graph, points[i].tolist()))
            assert max(abs(arb(a) - f) for a, f in pairs) <= arb(c.error_bound), name
        checked += 1
    assert checked >= 20


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_a_search_among_many_keys_finds_those_that_matter(tmp_path: Path, dtype: torch.dtype) -> None:
    c = _scattered(dtype)
    (tmp_path / "many.c").write_text(_file(c.head, "many"))
    library = built(tmp_path, "gcc -O2", "many.c")
    points = np.concatenate([points_of(c, 400), points_of(c, 20) * 50])  # far outside, too
    got = evaluated(library, "many", points, 1, dtype)
    expected = oracle_of(c.head).in_floats(points)
    unit = torch.finfo(dtype).eps
    spread, score = 3.0, 3000 / 2 * 8.0
    assert np.abs(got - expected)[:400].max() <= 4 * unit * (score + 16) * spread
    assert np.isfinite(got).all()


def _file(head: object, name: str) -> str:
    """A head without certificate as C."""
    source = CSource(head, name)
    real = source.real
    opening = "#include <float.h>\n#include <stdint.h>\n#include <string.h>\n"
    entry = f"void {name}_eval(const {real} *in, {real} *out);\nvoid {name}_eval(const {real} *in, {real} *out)"
    return f"{opening}\n{source.text}\n{entry} {{ {name}_head(in, out); }}\n"


SHAPES = [(3, 1, 1), (9, 1, 3), (40, 2, 1), (5, 3, 2), (17, 2, 4)]  # keys on an axis, axes, outputs


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("affine", [False, True])
@pytest.mark.parametrize("window", [1, 4, 100])
@pytest.mark.parametrize(("count", "m", "outs"), SHAPES)
def test_grids_of_any_shape(
    tmp_path: Path, count: int, m: int, outs: int, window: int, affine: bool, dtype: torch.dtype
) -> None:
    """Windows, slopes and vectors, sharp and soft, at points in and far outside the domain."""
    rng = np.random.default_rng(count)
    grid = ProductGrid.uniform(Box(-np.ones(m), np.ones(m)), count)
    values = torch.from_numpy(rng.normal(size=(grid.num_cells, outs))).to(dtype)
    slopes = torch.from_numpy(rng.normal(size=(grid.num_cells, outs, m))).to(dtype) if affine else None
    rate = (count / 2) ** 2 * (40.0 if window < 100 else 0.7)
    head = GridHead(
        grid, rate, values, value_slopes=slopes, half_windows=window, input_shapes=((m,),), output_shape=(outs,)
    )
    (tmp_path / "grid.c").write_text(_file(head, "grid"))
    library = built(tmp_path, "gcc -O2", "grid.c")
    inside = torch.from_numpy(rng.uniform(-1, 1, (200, m))).to(dtype)
    points = torch.cat([inside, 3 * inside[:50], head.axes[0][:1].expand(1, m), head.axes[0][-1:].expand(1, m)])
    with torch.no_grad():
        expected = head.evaluate(points).double().numpy()
    got = evaluated(library, "grid", points.double().numpy(), outs, dtype)
    score = rate / 2 * m * (16.0 if window == 100 else (2 * window / count) ** 2 + 9.0)
    allowed = 8 * torch.finfo(dtype).eps * (score + 32 * m) * 4 * (1 + 4 * m * affine)
    assert np.abs(got - expected).max() <= allowed


def test_a_train_in_c(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    grid = ProductGrid.uniform(Box(-np.ones(4), np.ones(4)), 6)
    ranks = [1, 3, 5, 2, 2]
    cores = [torch.from_numpy(rng.normal(size=(a, 6, b))) for a, b in pairwise(ranks)]
    head = TrainHead(grid, 9.0, cores, input_shapes=((4,),), output_shape=(2,))
    (tmp_path / "train.c").write_text(_file(head, "train"))
    library = built(tmp_path, "gcc -O2", "train.c")
    points = rng.uniform(-1, 1, (100, 4))
    with torch.no_grad():
        expected = head.evaluate(torch.from_numpy(points)).numpy()
    got = evaluated(library, "train", points, 2, torch.float64)
    assert np.abs(got - expected).max() <= 1e-13 * head.largest_value(-np.ones(4), np.ones(4))


def test_the_exponential_is_within_two_units_of_the_last_place(tmp_path: Path) -> None:
    """At 30,000 points of all sizes, and at those next to where n changes; with one coefficient off by 2⁻⁴⁰ it is not."""
    for dtype, real in ((torch.float64, "double"), (torch.float32, "float")):
        head = ScatteredHead(
            torch.zeros(1, 1, dtype=dtype), 1.0, torch.ones(1, 1, dtype=dtype), input_shapes=((1,),), output_shape=()
        )
        text = CSource(head, "e").text
        found = text[text.index("/* e^x") :]
        found = found[: found.index("\n}\n") + 3]
        signature = f"void e_eval(const {real} *in, {real} *out)"
        entry = f"{signature};\n{signature} {{ *out = e_exponential(*in); }}\n"
        opening = "#include <stdint.h>\n#include <string.h>\n"
        (tmp_path / f"{real}.c").write_text(opening + found + entry)
        wrong = re.sub(
            r"double p = 0x1\.a", "double p = 0x1.b", found.replace("0x1.0000000000001p-1", "0x1.0000001p-1")
        )
        (tmp_path / f"{real}_wrong.c").write_text(opening + wrong + entry)
        low, eps = (-707.9, 2.0**-52) if real == "double" else (-86.9, 2.0**-23)
        rng = np.random.default_rng(3)
        steps = np.arange(1, -low / np.log(2)) * -np.log(2) + np.log(2) / 2
        x = np.concatenate([rng.uniform(low, 0, 15_000), -np.geomspace(1e-30, -low, 15_000), steps, [0.0]])
        x = x.astype(np.float32).astype(np.float64) if real == "float" else x
        for level in ("gcc -O0", "gcc -O3"):
            library = built(tmp_path, level, f"{real}.c")
            assert _units(evaluated(library, "e", x[:, None], 1, dtype)[:, 0], x, eps) <= 2.0
        if real == "double":
            library = built(tmp_path, "gcc -O0", f"{real}_wrong.c")
            assert _units(evaluated(library, "e", x[:, None], 1, dtype)[:, 0], x, eps) > 2.0


def _units(got: np.ndarray, x: np.ndarray, eps: float) -> float:
    """The largest error in units of the last place, by 200 bits where longdouble sees it."""
    exact = np.exp(x.astype(np.longdouble))
    unit = eps * 2.0 ** np.floor(np.log2(exact.astype(np.float64)))
    rough = np.abs((got - exact).astype(np.float64)) / unit
    worst = 0.0
    with bits(200):
        for i in np.argsort(rough)[-5:]:
            worst = max(worst, float(abs(arb(float(got[i])) - arb(float(x[i])).exp()) / arb(float(unit[i]))))
    return worst


@pytest.mark.parametrize("level", ["gcc -O2", "clang -O2"])
def test_self_tests_pass_without_undefined_behaviour(folder: Path, tmp_path: Path, level: str) -> None:
    command = LEVELS[level]
    if shutil.which(command[0]) is None:
        pytest.skip(f"no {command[0]}")
    strict = "-fsanitize=address,undefined,float-cast-overflow"
    for name in ("fitted", "hard-line", "adaptive-float32", "train", "network of sines", "affine-cross", "pieces"):
        stem, program = c_name(name), tmp_path / c_name(name)
        flags = [strict, "-fno-sanitize-recover=all", f"-D{stem.upper()}_SELFTEST"]
        done = subprocess.run([*command, *WARNINGS, *flags, f"{stem}.c", "-o", str(program)], cwd=folder)
        if done.returncode and command[0] == "clang":
            pytest.skip("this clang has no sanitizers")
        assert done.returncode == 0
        ran = subprocess.run([str(program)], capture_output=True, text=True)
        assert ran.returncode == 0 and " 0 failed" in ran.stdout, (name, ran.stdout, ran.stderr)


def test_numbers_that_are_not_finite_give_nan_and_no_undefined_behaviour(folder: Path, tmp_path: Path) -> None:
    for name in ("fitted", "hard-line", "adaptive-kink", "train", "network of sines"):
        stem, c = c_name(name), compiled(name)
        m, outs = c.head.dimension, c.head.num_outputs
        program = f"""
            #include "{folder / stem}.c"
            #include <stdio.h>
            int main(void) {{
                const double odd[] = {{NAN, -NAN, INFINITY, -INFINITY, 1e308, -1e308, 1e-320, 0.0, -0.0}};
                for (int k = 0; k < 9; k++) for (int i = 0; i < {m}; i++) {{
                    double z[{m}] = {{0}}, out[{outs}];
                    z[i] = odd[k];
                    {stem}_eval(z, out);
                    if (k < 4 && out[0] == out[0]) {{ printf("%d %d %g\\n", k, i, out[0]); return 1; }}
                }}
                return 0;
            }}"""
        (tmp_path / "odd.c").write_text(program)
        strict = ["-fsanitize=address,undefined,float-cast-overflow", "-fno-sanitize-recover=all"]
        subprocess.run([*LEVELS["gcc -O2"], *strict, "odd.c", "-lm", "-o", "odd"], cwd=tmp_path, check=True)
        ran = subprocess.run(["./odd"], cwd=tmp_path, capture_output=True, text=True)
        assert ran.returncode == 0, (name, ran.stdout, ran.stderr)


def test_a_file_has_one_symbol_and_needs_none(folder: Path) -> None:
    for name in ("fitted", "adaptive-float32", "network of sines"):
        subprocess.run([*LEVELS["gcc -O2"], "-c", f"{c_name(name)}.c", "-o", "one.o"], cwd=folder, check=True)
        found = subprocess.run(["nm", "one.o"], cwd=folder, check=True, capture_output=True, text=True).stdout
        kinds = [line.split()[-2:] for line in found.splitlines()]
        assert [s for kind, s in kinds if kind.isupper() and kind != "U"] == [f"{c_name(name)}_eval"]
        assert {s for kind, s in kinds if kind == "U"} <= {"memcpy", "memset"}  # which compilers call for arrays
        assert not [s for kind, s in kinds if kind in "bBdD"]  # nothing that is written


def test_fast_math_is_refused_and_a_wrong_table_fails_the_self_test(folder: Path, tmp_path: Path) -> None:
    gcc, stem = LEVELS["gcc -O2"], c_name("fitted")
    refused = subprocess.run([*gcc, "-ffast-math", "-c", f"{stem}.c", "-o", "x.o"], cwd=folder, capture_output=True)
    assert refused.returncode != 0 and b"does not cover -ffast-math" in refused.stderr
    text = (folder / f"{stem}.c").read_text()
    place = text.index("{", text.index(f"{stem}_head_values")) + 1
    (tmp_path / "wrong.c").write_text(text[:place] + " 1.0 +" + text[place:])
    subprocess.run([*gcc, f"-D{stem.upper()}_SELFTEST", "wrong.c", "-o", "wrong"], cwd=tmp_path, check=True)
    ran = subprocess.run(["./wrong"], cwd=tmp_path, capture_output=True, text=True)
    assert ran.returncode == 1 and "off by" in ran.stdout


def test_comments_hold_the_certificate_and_cannot_be_left(tmp_path: Path) -> None:
    def f(z):
        return z[:, 0] ** 2

    f.__name__ = "a */ int evil(void) { return 1; } /* ??/ \\ Ω ‮"
    c = pa.compile(f, "[0,1]", tolerance=0.01, hessian=2.0, trace=False)
    text = c.export_c(tmp_path / "f.c").read_text()
    assert text.isascii() and text.count("/*") == text.count("*/") and "int evil(void) {" in text
    subprocess.run([*LEVELS["gcc -O2"], *WARNINGS, "-c", "f.c"], cwd=tmp_path, check=True)
    symbols = subprocess.run(["nm", "-g", "f.o"], cwd=tmp_path, check=True, capture_output=True, text=True).stdout
    assert "evil" not in symbols
    comment = text[: text.index("*/")]
    assert "proved_given: sup error <=" in comment and f"{c.error_bound:.6g}" in comment
    assert "within 2 units in the last place" in comment


def test_an_estimate_is_not_called_a_bound(tmp_path: Path) -> None:
    c = pa.compile(lambda z: np.sin(3 * z[:, 0]), "[0,1]", tolerance=0.01, trace=False)
    comment = c.export_c(tmp_path / "f.c").read_text().split("*/")[0]
    assert c.certificate.kind == "estimated" and "The bound covers" not in comment and "there is no bound" in comment


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_inputs_outside_the_domain(tmp_path: Path, dtype: torch.dtype) -> None:
    c = pa.compile("x0 + sin(x1)", pa.Box([0, 0.1], [1, 1.1]), tolerance=1e-3, dtype=dtype)
    for rule in ("allow", "clamp", "mark"):
        c.export_c(tmp_path / f"{rule}.c", outside=rule)
    library = built(tmp_path, "gcc -O2", "allow.c", "clamp.c", "mark.c")
    z = np.array([[0.5, 0.5], [1.5, 0.5], [0.5, -3.0], [np.nan, 0.5], [1.0, 1.1], [0.0, 0.1]])
    allow, clamp, mark = (evaluated(library, rule, z, 1, dtype)[:, 0] for rule in ("allow", "clamp", "mark"))
    assert np.isfinite(allow[[0, 1, 2, 4, 5]]).all() and np.isnan(allow[3])
    inside = evaluated(library, "allow", np.clip(z, [0, 0.1], [1, 1.1]), 1, dtype)[:, 0]
    np.testing.assert_array_equal(clamp, inside)
    np.testing.assert_array_equal(np.isnan(mark), [False, True, True, True, False, False])
    np.testing.assert_array_equal(mark[[0, 4, 5]], allow[[0, 4, 5]])


def test_what_c_cannot_have_is_refused_and_nothing_is_written(tmp_path: Path) -> None:
    c = pa.compile("x0*x1", pa.Ball([0, 0], 1.0), tolerance=0.01)
    place = tmp_path / "no.c"
    with pytest.raises(UnsupportedError, match="needs a box"):
        c.export_c(place, outside="mark")
    with pytest.raises(UnsupportedError, match="expected one of 'allow'"):
        c.export_c(place, outside="guess")
    for name in ("2x", "a-b", "", "_x", "ä", "a" * 64):
        with pytest.raises(UnsupportedError, match="Choose a name"):
            c.export_c(place, name=name)
    with pytest.raises(UnsupportedError, match=r"file's stem 'my-head'.*my_head"):
        c.export_c(tmp_path / "my-head.c")
    half = pa.compile("x0", "[0,1]", tolerance=0.1, dtype=torch.bfloat16, method="hard")
    with pytest.raises(UnsupportedError, match="expected float64 or float32"):
        half.export_c(place)
    grid = ProductGrid.uniform(Box([0, 0], [1, 1]), 1500)
    values = torch.zeros(grid.num_cells, 1, dtype=torch.float64)
    large = GridHead(grid, 1e6, values, half_windows=2, input_shapes=((2,),), output_shape=())
    with pytest.raises(SizeError, match="a C file can have at most"):
        CSource(large, "large")
    (tmp_path / "folder.c").mkdir()
    with pytest.raises(AlreadyExistsError, match="is a folder"):
        c.export_c(tmp_path / "folder.c")
    assert not place.exists() and sorted(p.name for p in tmp_path.iterdir()) == ["folder.c"]
    changed = pa.compile("x0", "[0,1]", tolerance=0.1)
    next(iter(changed.head.buffers())).add_(1.0)
    with pytest.raises(UnsupportedError, match="changed"):
        changed.export_c(place)


def test_the_command(tmp_path: Path) -> None:
    pa.compile("sin(3*x0)", "[-1,1]", tolerance=1e-6).save(tmp_path / "head")
    run = CliRunner().invoke
    place = tmp_path / "wave.c"
    done = run(app, ["export", str(tmp_path / "head"), "--c", str(place)])
    assert done.exit_code == 0, done.output
    assert "void wave_eval(const double *in, double *out);" in place.read_text()
    again = run(app, ["export", str(tmp_path / "head"), "--c", str(place), "--name", "other"])
    assert again.exit_code != 0  # it would be overwritten
    done = run(app, ["export", str(tmp_path / "head"), "--c", str(place), "--name", "other", "--overwrite"])
    assert done.exit_code == 0 and "void other_eval(" in place.read_text()
    nothing = run(app, ["export", str(tmp_path / "head")])
    assert nothing.exit_code == 2 and "--onnx" in nothing.output and "--c" in nothing.output
