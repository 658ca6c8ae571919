"""The sections of benchmarks/speed.py that run on one CPU thread."""

from __future__ import annotations

import json
import math
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial, reduce
from pathlib import Path
from typing import Any

import numpy as np
import torch
from speed_before import compare
from speed_fitted import fitted_head
from speed_measure import Array, Job, Section, interleaved, largest, nanoseconds, whole_batches
from speed_peers import (
    FAMILIES,
    MOST_NUMBERS,
    NEEDS,
    at_points,
    dense,
    flex,
    installed,
    interpn_grid,
    keops,
    on_product,
    peers,
    sdpa,
)

import partita as pa
from partita.heads import GridHead, ScatteredHead
from partita.kernels import native

QUERIES = 100_000
CHECKED = 1_000  # queries compared with the exact answer
GIB = 1 << 30


def tensor(z: Array) -> torch.Tensor:
    """For heads."""
    return torch.from_numpy(np.ascontiguousarray(z))


@contextmanager
def without_native_loops() -> Iterator[None]:
    """The torch path, as where numba is not installed."""
    available, native.AVAILABLE = native.AVAILABLE, False
    try:
        yield
    finally:
        native.AVAILABLE = available


def in_torch(head: Any) -> Callable[[Any], Any]:
    """The head by plain torch operations."""

    def run(z: Any) -> Any:
        with without_native_loops():
            return head(z)

    return run


# ---- time against error ------------------------------------------------------------------------------

FUNCTIONS: list[tuple[str, str, int, Callable[..., Array]]] = [
    ("1/(1+25x²)", "1/(1+25*x0^2)", 1, lambda x: 1 / (1 + 25 * x * x)),
    ("sin 3x + x cos 2y", "sin(3*x0) + x0*cos(2*x1)", 2, lambda x, y: np.sin(3 * x) + x * np.cos(2 * y)),
    ("1/(1+25(x²+y²))", "1/(1+25*(x0^2+x1^2))", 2, lambda x, y: 1 / (1 + 25 * (x * x + y * y))),
    (
        "exp(−x²−2y²) sin 4z",
        "exp(-x0^2-2*x1^2)*sin(4*x2)",
        3,
        lambda x, y, z: np.exp(-x * x - 2 * y * y) * np.sin(4 * z),
    ),
    (
        "exp(−x²−y²) cos(z+w)",
        "exp(-x0^2-x1^2)*cos(x2+x3)",
        4,
        lambda x, y, z, w: np.exp(-x * x - y * y) * np.cos(z + w),
    ),
]
TOLERANCES = (1e-2, 1e-3, 1e-5, 1e-7, 1e-9)
METHODS = ("fitted", "affine", "train", "hard")


def our_ways(expression: str, m: int, tolerance: float, methods: tuple[str, ...]) -> Iterator[tuple[str, Any]]:
    """Compiled heads of at most 10⁷ numbers whose claim, a bound or an estimate, is within the tolerance."""
    for method in methods:
        try:
            c = pa.compile(
                expression, pa.Box([-1] * m, [1] * m), tolerance=tolerance, method=method, max_bytes=8 * MOST_NUMBERS
            )
        except pa.PartitaError:
            continue
        if c.tolerance_met:
            yield method, c


def error_section(options: Any) -> Section:
    """Time against error."""
    section = Section(
        "error", "the fastest way to evaluate f within a tolerance: nanoseconds per query, numbers stored, error"
    )
    functions, tolerances = (FUNCTIONS[1:2], (1e-2, 1e-5)) if options.quick else (FUNCTIONS, TOLERANCES)
    rng = np.random.default_rng(0)
    rows, every = [], []
    for name, expression, m, f in functions:
        z = rng.uniform(-1, 1, (4_000 if options.quick else QUERIES, m))
        checked = rng.uniform(-1, 1, (20_000, m))
        exact, known = f(*checked.T), peers(m)
        for tolerance in tolerances:
            ways: dict[tuple[str, str], tuple[Job, dict[str, Any]]] = {}
            ways["f itself", "numpy"] = Job(at_points(f)), {"numbers": None, "error": 0.0}
            for method, c in our_ways(expression, m, tolerance, METHODS[:1] if options.quick else METHODS):
                job = Job(c.head.evaluate, tensor, whole=True)
                found = {"numbers": c.num_parameters, "error": largest(job(checked)[:, 0] - exact)}
                if found["error"] <= tolerance:  # an estimate may be wrong
                    ways[f"partita, {c.certificate.kind}", method] = job, {**found, "claimed": c.certificate.error}
            for peer in known:
                counts = peer.counts(f, m, tolerance, checked, exact)
                if counts is not None:
                    found = {"numbers": math.prod(counts), "error": peer.errors[counts]}
                    ways[peer.family, peer.name] = peer.make(f, counts), found
            taken = nanoseconds({"/".join(k): job for k, (job, _) in ways.items()}, z, 3 if options.quick else 5, 0.03)
            best: dict[str, dict[str, Any]] = {}
            for (family, way), (_, found) in ways.items():
                ns = taken[f"{family}/{way}"][0]
                every.append([name, m, tolerance, family, way, ns, found["numbers"], found["error"]])
                if family not in best or ns < best[family]["ns"]:
                    best[family] = {**found, "ns": ns, "way": way}
            cells = [best.get(k, "not installed" if not installed(NEEDS.get(k, "numpy")) else None) for k in FAMILIES]
            ours = [best.get(f"partita, {kind}") for kind in ("proved", "estimated")]
            proved = ours[0]["way"] if ours[0] else None
            rows.append([name, m, tolerance, best["f itself"]["ns"], ours[0], proved, ours[1], *cells])
    section.table(
        "Nanoseconds per query, numbers stored, largest error at 20,000 points (–: more than 10⁷ numbers, or no such peer)",
        [
            ("function", "text"),
            ("m", "count"),
            ("tolerance", "error"),
            ("f itself", "number"),
            ("partita, proved", "way"),
            ("method", "text"),
            ("partita, estimated", "way"),
            *((k, "way") for k in FAMILIES),
        ],
        rows,
    )
    head = ["function", "m", "tolerance", "family", "way", "ns", "numbers", "error"]
    kinds = ["text", "count", "error", "text", "text", "number", "count", "error"]
    section.table("Every way", list(zip(head, kinds)), every, shown=False)
    section.notes.append(
        "Of each family the fastest way within the tolerance, which is proved for the first column and measured for all others."
    )
    return section


# ---- scattered heads -----------------------------------------------------------------------------------


def scattered_points(n: int, queries: int, m: int, kappa: float, seed: int = 0) -> tuple[Array, Array, Array, float]:
    """Uniform keys, values and queries in the unit cube, and R = κ N^{2/m}."""
    rng = np.random.default_rng(seed)
    keys = rng.random((n, m))
    return keys, np.sin(3 * keys.sum(axis=1, keepdims=True)), rng.random((queries, m)), kappa * n ** (2 / m)


def scattered_jobs(keys: Array, values: Array, rate: float, tolerance: float = 1e-9) -> dict[str, Job]:
    """Our two ways; the index is made before the clock starts."""
    m = keys.shape[1]
    head = ScatteredHead(tensor(keys), rate, tensor(values), input_shapes=((m,),), output_shape=())
    index, v = pa.KeyIndex(tensor(keys)), tensor(values)
    attend = lambda z: pa.attend(z, index, v, inverse_temperature=rate, tolerance=tolerance).output  # noqa: E731
    return {"full": Job(head.evaluate, tensor), "tolerance": Job(attend, tensor)}


FULL_TARGETS = {2: 10.0, 3: 3.0, 4: 1.0}
LOOSE_TARGETS = {2: 12.0, 3: 4.5, 4: 1.6}


def scattered_section(options: Any) -> Section:
    """Scattered heads beside cKDTree, dense attention and KeOps."""
    from scipy.spatial import cKDTree

    section = Section("scattered", "softmax over scattered keys, κ = 6, float64")
    n, many = (3_000, 30_000) if options.quick else (100_000, 10_000_000)
    queries = 2_000 if options.quick else QUERIES
    rows, dense_rows, growth = [], [], []
    for m in (2, 3, 4):
        keys, values, z, rate = scattered_points(n, queries, m, 6.0)
        jobs = scattered_jobs(keys, values, rate)
        tree = cKDTree(keys)
        jobs["cKDTree"] = Job(lambda z, tree=tree: tree.query(z, k=32)[0])
        taken = {k: ns / 1e3 for k, ns in whole_batches(jobs, z, 2 if options.quick else 5).items()}
        exact = dense(z[: CHECKED // 4], keys, values, rate)
        wrong = {k: largest(jobs[k](z)[: CHECKED // 4] - exact) for k in ("full", "tolerance")}
        ratios = [taken["cKDTree"] / taken[k] for k in ("full", "tolerance")]
        rows.append(
            [m, n, taken["full"], wrong["full"], taken["tolerance"], wrong["tolerance"], taken["cKDTree"], *ratios]
        )
        section.target(f"m = {m}, full precision, cKDTree's time over ours", ratios[0], FULL_TARGETS[m], least=True)
        section.target(f"m = {m}, tolerance 1e-9, cKDTree's time over ours", ratios[1], LOOSE_TARGETS[m], least=True)
        if m == 3:
            ours = taken["full"], wrong["full"]
            dense_rows = dense_peers(section, (keys, values, rate), z, exact, ours, options)
        more, at, _, higher = scattered_points(many, 1, m, 6.0)
        began = time.perf_counter()
        head = ScatteredHead(tensor(more), higher, tensor(at), input_shapes=((m,),), output_shape=())
        head.evaluate(tensor(z))
        built = time.perf_counter() - began
        again = whole_batches({"few": jobs["full"], "many": Job(head.evaluate, tensor)}, z, 2)
        wrong_far = largest(head.evaluate(tensor(z)).numpy()[:5] - dense(z[:5], more, at, higher))
        few_us, many_us = again["few"] / 1e3, again["many"] / 1e3
        growth.append([m, n, few_us, many, many_us, wrong_far, built, many_us / few_us])
        section.target(f"m = {m}, time at {many:,} keys over the time at {n:,}", many_us / few_us, 3.0)
        del head, more, at
    section.table(
        f"Microseconds per query, {queries:,} queries a call, index prepared; cKDTree finds 32 neighbours and sums nothing",
        [
            ("m", "count"),
            ("keys", "count"),
            ("full", "number"),
            ("error", "error"),
            ("at 1e-9", "number"),
            ("error", "error"),
            ("cKDTree", "number"),
            ("cKDTree/full", "number"),
            ("cKDTree/1e-9", "number"),
        ],
        rows,
    )
    section.table(
        "Dense peers, m = 3 (they read every key; few queries)",
        [("way", "text"), ("queries", "count"), ("µs a query", "number"), ("error", "error"), ("over ours", "number")],
        dense_rows,
    )
    section.table(
        "How the time grows with the keys, full precision",
        [
            ("m", "count"),
            ("keys", "count"),
            ("µs", "number"),
            ("keys", "count"),
            ("µs", "number"),
            ("error", "error"),
            ("build and first call s", "number"),
            ("ratio", "number"),
        ],
        growth,
    )
    return section


def dense_peers(
    section: Section, given: tuple[Array, Array, float], z: Array, exact: Array, ours: tuple[float, float], options: Any
) -> list[list[Any]]:
    """SDPA, FlexAttention and KeOps on the same keys, as rows."""
    keys, values, rate = given
    few, single = 64, torch.float32
    k, v = tensor(keys), tensor(values)
    padded = len(keys) // 128 * 128  # FlexAttention takes whole blocks
    ways: list[tuple[str, Callable[[], Callable[[Any], Any]], torch.dtype, int]] = [
        ("SDPA math, float64", lambda: sdpa("MATH", torch.float64, k, v, rate), torch.float64, few),
        ("SDPA flash, float64", lambda: sdpa("FLASH_ATTENTION", torch.float64, k, v, rate), torch.float64, few),
        ("SDPA flash, float32", lambda: sdpa("FLASH_ATTENTION", single, k, v, rate), torch.float64, few),
        ("SDPA efficient, float32", lambda: sdpa("EFFICIENT_ATTENTION", single, k, v, rate), torch.float64, few),
    ]
    if not options.quick:
        ways.append(
            (
                "FlexAttention, block mask, float32",
                lambda: flex(k.float()[:padded], v.float()[:padded], rate, 30.0),
                single,
                CHECKED // 4 // 128 * 128,
            )
        )
    rows = [["partita, full", len(z), *ours, 1.0]]
    if installed("pykeops") and not options.quick:
        ways.append(("KeOps, float64", lambda: keops(k, v, rate), torch.float64, CHECKED // 4))
    for name, make, dtype, count in ways:
        try:
            job, q = make(), tensor(z[:count]).to(dtype)
            got = job(q)
            seconds = interleaved({name: lambda job=job, q=q: job(q)}, 2)[name]
        except Exception as problem:
            rows.append([name, None, "failed", None, None])
            section.notes.append(f"{name}: {first_line(problem)}")
            continue
        want = exact[:count]
        if name.startswith("Flex"):
            want = dense(z[:count], keys[:padded], values[:padded], rate)
        us = seconds / len(q) * 1e6
        rows.append([name, len(q), us, largest(np.asarray(got.double()) - want), us / ours[0]])
    if not installed("pykeops"):
        rows.append(["KeOps", None, "not installed", None, None])
    return rows


def first_line(problem: Exception) -> str:
    """What an error says, in short."""
    text = str(problem).strip().splitlines()
    return f"{type(problem).__name__}: {text[0][:110]}" if text else type(problem).__name__


# ---- grids -----------------------------------------------------------------------------------------------

SHARPNESS = 64.0


def factor(axis: int, x: Array) -> Array:
    """The function on the grids is the product of these over the axes."""
    return 1.0 + 0.5 * np.sin(3.0 * x + axis)


def smooth(*coordinates: Array) -> Array:
    """Π (1 + ½ sin(3x_i + i))."""
    return reduce(np.multiply, (factor(i, x) for i, x in enumerate(coordinates)))


def grid_head(m: int, count: int, dtype: Any = np.float64, values: Array | None = None) -> GridHead:
    """Sharpness 64 and two centers per axis, on the unit cube."""
    grid = pa.ProductGrid.uniform(pa.Box([0.0] * m, [1.0] * m), count, dtype=dtype)
    if values is None:
        values = on_product(smooth, list(grid.axes)).astype(dtype, copy=False)
    numbers = torch.from_numpy(values.reshape(-1, 1))
    return GridHead(grid, SHARPNESS * count**2, numbers, half_windows=1, input_shapes=((m,),), output_shape=())


def exact_grid(head: GridHead, z: Array) -> Array:
    """The head in extended precision: four centers per axis, the rest holds less than e^{−100} of the mass."""
    total, cells = np.ones((len(z), 1), np.longdouble), np.zeros((len(z), 1), np.int64)
    rates = head.inverse_temperature.numpy().astype(np.longdouble)
    for i, centers in enumerate(a.numpy().astype(np.longdouble) for a in head.axes):
        x, width = z[:, i].astype(np.longdouble), min(4, len(centers))
        start = np.clip(np.searchsorted(centers, x) - 2, 0, len(centers) - width)
        index = start[:, None] + np.arange(width)
        scores = -rates[i] / 2 * (x[:, None] - centers[index]) ** 2
        share = np.exp(scores - scores.max(axis=1, keepdims=True))
        share /= share.sum(axis=1, keepdims=True)
        total = (total[:, :, None] * share[:, None, :]).reshape(len(z), -1)
        cells = (cells[:, :, None] * len(centers) + index[:, None, :]).reshape(len(z), -1)
    return (total * head.values.numpy()[cells, 0]).sum(axis=1)


def morton_order(z: Array) -> Array:
    """The order of points of the unit cube along a Morton curve."""
    m = z.shape[1]
    bits = min(20, 62 // m)
    k, code = (z * (1 << bits)).astype(np.int64), np.zeros(len(z), np.int64)
    for bit in range(bits):
        for i in range(m):
            code |= ((k[:, i] >> bit) & 1) << (bit * m + i)
    return np.argsort(code, kind="stable")


def unit_cube(job: Job) -> Job:
    """A peer on [−1, 1]^m for points of [0, 1]^m."""
    return Job(job.run, lambda z: job.prepare(2 * z - 1))


def grids_section(options: Any) -> Section:
    """Product grids, and fitted heads beside one matrix product."""
    section = Section("grids", "product grids: κ = 64, two centers per axis, float64")
    rows, wrong = [], []
    for m in (2, 3) if options.quick else range(1, 7):
        for power in (3,) if options.quick else (4, 7):
            one_grid(section, m, power, rows, wrong, options)
    columns = [
        ("m", "count"),
        ("cells", "count"),
        *((k, "number") for k in ("ours", "spatial", "torch", "scipy", "spatial")),
    ]
    columns += [(k, "number") for k in ("interpn", "grid_sample", "sdpa", "scipy/ours", "spatial")]
    section.table("Nanoseconds per query: random order, and sorted along a curve (spatial)", columns, rows)
    errors = [
        ("m", "count"),
        ("cells", "count"),
        *((k, "error") for k in ("ours", "torch", "sdpa", "scipy", "interpn")),
    ]
    section.table(
        "Largest error: ours, torch and sdpa against the exact head; the linear peers against f",
        [*errors, ("grid_sample", "error"), ("peak MiB", "number")],
        wrong,
    )
    compared_with_before(section, options)
    contraction(section, options)
    return section


def compared_with_before(section: Section, options: Any) -> None:
    """The same heads in another checkout, `--before`."""
    if options.before is None:
        section.notes.append("Grids of an earlier checkout: not compared (--before FOLDER)")
        return
    rows = []
    for m, count, there, here in compare(options.before.resolve(), options.quick):
        rows.append([m, count**m, there, here, here / there])
        section.target(f"m = {m}, {count**m:,} cells: time over that of the earlier checkout", here / there, 1.15)
    columns = [("m", "count"), ("cells", "count"), ("earlier", "number"), ("now", "number"), ("ratio", "number")]
    section.table("An earlier checkout and this one, ns per query, two processes in turn", columns, rows)


def one_grid(section: Section, m: int, power: int, rows: list[Any], wrong: list[Any], options: Any) -> None:
    """Add the rows of one grid."""
    from scipy.interpolate import RegularGridInterpolator

    count = round(10 ** (power / m))
    head, cells = grid_head(m, count), count**m
    z = np.random.default_rng(0).random((4_000 if options.quick else QUERIES, m))
    near = z[morton_order(z)]
    axes, table = [a.numpy() for a in head.axes], head.values.numpy().reshape(head.counts)
    scipy = RegularGridInterpolator(axes, table, bounds_error=False, fill_value=None)
    over = lambda *x: smooth(*((1 + c) / 2 for c in x))  # noqa: E731
    jobs = {"ours": Job(head, tensor, whole=True), "torch": Job(in_torch(head), tensor), "scipy": Job(scipy)}
    if installed("interpn"):
        jobs["interpn"] = unit_cube(interpn_grid("Multilinear")(over, (count,) * m))
    if m in (2, 3):
        from speed_peers import grid_sample

        jobs["grid_sample"] = unit_cube(grid_sample("bilinear")(over, (count,) * m))
    if cells <= 20_000:
        jobs["sdpa"] = Job(head.as_attention(), tensor, most=200)
    sorted_jobs = {
        f"{k} spatial": Job(j.run, lambda z, j=j: j.prepare(near[: len(z)]), whole=j.whole) for k, j in jobs.items()
    }
    both = {**jobs, **{k: j for k, j in sorted_jobs.items() if k.split()[0] in ("ours", "scipy")}}
    taken = {k: ns for k, (ns, _) in nanoseconds(both, z, 3 if options.quick else 7, 0.08).items()}
    ratios = [taken[f"scipy{order}"] / taken[f"ours{order}"] for order in ("", " spatial")]
    peers_ns = [
        taken.get(k, None if k != "interpn" or installed(k) else "not installed")
        for k in ("interpn", "grid_sample", "sdpa")
    ]
    ours = [taken[k] for k in ("ours", "ours spatial", "torch", "scipy", "scipy spatial")]
    rows.append([m, cells, *ours, *peers_ns, *ratios])
    exact, target = exact_grid(head, z[:CHECKED]), smooth(*z[:CHECKED].T)
    found = {}
    for k, job in jobs.items():
        some = slice(0, min(CHECKED, job.most))
        found[k] = largest(job(z[some])[:, 0] - (exact if k in ("ours", "torch", "sdpa") else target)[some])
    memory = None
    if power == 7:
        memory = memory_elsewhere(m, count)
        section.target(f"m = {m}, {cells:,} cells: peak memory, imports included", memory / GIB, 1.0, " GiB")
    wrong.append([m, cells, *(found.get(k) for k in ("ours", "torch", "sdpa", "scipy", "interpn", "grid_sample"))])
    wrong[-1].append(None if memory is None else memory / (1 << 20))


def memory_elsewhere(m: int, count: int) -> int:
    """The most bytes that a fresh process held which builds the head and evaluates 10⁵ queries natively and in torch."""
    program = Path(__file__).with_name("speed.py")
    done = subprocess.run(
        [sys.executable, str(program), "--memory-of", f"{m},{count}"], capture_output=True, text=True, check=True
    )
    return int(json.loads(done.stdout.splitlines()[-1]))


def memory_of(m: int, count: int) -> int:
    """The peak of this process. On Linux VmHWM starts from zero, ru_maxrss from the parent's size."""
    import resource

    head, z = grid_head(m, count), tensor(np.random.default_rng(0).random((QUERIES, m)))
    head(z)
    in_torch(head)(z)
    status = Path("/proc/self/status")
    if status.exists():
        return next(int(s.split()[1]) for s in status.read_text().splitlines() if s.startswith("VmHWM")) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


# ---- fitted heads beside one matrix product ------------------------------------------------------------


def exact_fitted(head: GridHead, z: Array) -> Array:
    """The head in extended precision, every cell."""
    total = np.ones((len(z), 1), np.longdouble)
    for i, centers in enumerate(a.numpy().astype(np.longdouble) for a in head.axes):
        rate = np.longdouble(float(head.inverse_temperature[i]))
        scores = -rate / 2 * (z[:, i, None].astype(np.longdouble) - centers) ** 2
        share = np.exp(scores - scores.max(axis=1, keepdims=True))
        share /= share.sum(axis=1, keepdims=True)
        total = (total[:, :, None] * share[:, None, :]).reshape(len(z), -1)
    return total @ head.values.numpy()[:, 0].astype(np.longdouble)


def contraction(section: Section, options: Any) -> None:
    """Fitted heads beside a matrix product with as many multiplications: `(n, P₁) @ (P₁, P₂ ⋯ P_m)`, in chunks."""
    cases = [((8, 8), FUNCTIONS[1][3]), ((38, 38), FUNCTIONS[2][3]), ((7, 9, 10), FUNCTIONS[3][3])]
    cases += [((12, 12, 12), FUNCTIONS[3][3]), ((10, 10, 10, 10), FUNCTIONS[4][3])]
    rows, step = [], 1024
    for counts, f in cases[:1] if options.quick else cases:
        head = fitted_head(counts, f)
        m, cells = len(counts), math.prod(counts)
        z = np.random.default_rng(0).uniform(-1, 1, (4_000 if options.quick else QUERIES, m))
        weights = torch.from_numpy(np.random.default_rng(1).random((len(z), counts[0])))
        table = head.values.reshape(counts[0], -1).contiguous()
        buffer = torch.empty((step, table.shape[1]), dtype=torch.float64)

        def product(z: Any, weights: Any = weights, table: Any = table, buffer: Any = buffer) -> None:
            for part in weights[: len(z)].split(step):
                torch.mm(part, table, out=buffer[: len(part)])

        taken = nanoseconds(
            {"head": Job(head.evaluate, tensor, whole=True), "product": Job(product)}, z, 3 if options.quick else 9, 0.3
        )
        few = z[:400]
        exact, got = exact_fitted(head, few), head.evaluate(tensor(z)).numpy()[:400, 0]
        ratio = taken["head"][0] / taken["product"][0]
        size = float(head.values.abs().max())
        rows.append([" × ".join(map(str, counts)), cells, taken["head"][0], taken["product"][0], ratio])
        rows[-1] += [largest((got - exact).astype(float)), size, largest(got - f(*few.T))]
        if m > 1 and cells >= 500:
            section.target(f"fitted, {rows[-1][0]} keys: time over one matrix product of its size", ratio, 2.0)
    section.table(
        "Fitted heads, all keys of every axis, ns per query, beside one matrix product with as many multiplications",
        [
            ("keys", "text"),
            ("cells", "count"),
            ("head", "number"),
            ("product", "number"),
            ("ratio", "number"),
            ("rounding", "error"),
            ("max |V|", "number"),
            ("head − f", "error"),
        ],
        rows,
    )


# ---- one point -----------------------------------------------------------------------------------------


def each_call(calls: dict[str, Callable[[], Any]], repeats: int, times: int) -> dict[str, float]:
    """Microseconds of one call, the fastest of the repeats of a loop."""

    def loop(run: Callable[[], Any]) -> Callable[[], None]:
        def many() -> None:
            for _ in range(times):
                run()

        return many

    return {k: s / times * 1e6 for k, s in interleaved({k: loop(r) for k, r in calls.items()}, repeats).items()}


def from_row(run: Callable[[Any], Any], row: Array) -> Any:
    """interpn at one point, given as `c` takes it: an array per coordinate, and a new array for the answer."""
    return run(([row[i : i + 1] for i in range(len(row))], None))


def point_section(options: Any) -> Section:
    """One point at a time, and what the domain check costs."""
    section = Section("point", "one point a call, float64")
    rows, batches = [], []
    for (name, expression, m, f), tolerance in ((FUNCTIONS[1], 1e-6), (FUNCTIONS[3], 1e-5))[
        : 1 if options.quick else 2
    ]:
        c = pa.compile(expression, pa.Box([-1] * m, [1] * m), tolerance=tolerance)
        one = np.random.default_rng(0).uniform(-1, 1, (1, m))
        row, exact = one[0], float(f(*one[0]))
        point, coordinates = torch.from_numpy(row), row.tolist()
        ways: dict[str, Callable[[], Any]] = {
            "c(z)": lambda c=c, row=row: c(row),
            "c([x, …])": lambda c=c, given=coordinates: c(given),
            "c.head(z)": lambda c=c, point=point: c.head(point),
        }
        if hasattr(c, "scalar"):
            scalar = c.scalar()
            ways["c.scalar()(x, …)"] = lambda scalar=scalar, given=coordinates: scalar(*given)
        ways["f itself, numpy"] = lambda f=f, given=coordinates: f(*given)
        if installed("interpn"):
            for kind in ("Multilinear", "Multicubic"):
                job = interpn_grid(kind)(f, (64,) * m)
                ways[f"interpn {kind}, 64^{m}, from a row"] = partial(from_row, job.run, row)
                ways[f"interpn {kind}, 64^{m}, arrays ready"] = partial(job.run, job.prepare(one))
        taken = each_call(ways, 5, 100 if options.quick else 2_000)
        peer = taken.get(f"interpn Multilinear, 64^{m}, from a row")
        for k, us in taken.items():
            wrong = abs(float(np.asarray(ways[k]()).ravel()[0]) - exact)
            rows.append([name, c.num_keys, k, us, wrong, None if peer is None else us / peer])
        section.target(f"{c.num_keys} keys: c(z)", min(taken["c(z)"], taken["c([x, …])"]), 10.0, " µs")
        section.target(f"{c.num_keys} keys: c.scalar()", taken.get("c.scalar()(x, …)"), 3.0, " µs")
        ratio = None if peer is None else min(taken["c(z)"], taken["c([x, …])"]) / peer
        section.target(f"{c.num_keys} keys: c(z) over interpn", ratio, 4.0)
        z = np.random.default_rng(1).uniform(-1, 1, (4_000 if options.quick else QUERIES, m))
        both = nanoseconds(
            {"c": Job(c, whole=True), "evaluate": Job(c.head.evaluate, tensor, whole=True)},
            z,
            5 if options.quick else 15,
            0.5,
        )
        ratio = both["c"][0] / both["evaluate"][0]
        batches.append([name, len(z), both["c"][0], both["evaluate"][0], ratio, largest(c(z) - f(*z.T))])
        section.target(f"{c.num_keys} keys: c(array) over head.evaluate", ratio, 1.3)
    if not installed("interpn"):
        section.notes.append("interpn: not installed")
    section.table(
        "Microseconds a call",
        [
            ("function", "text"),
            ("keys", "count"),
            ("way", "text"),
            ("µs", "number"),
            ("error", "error"),
            ("over interpn", "number"),
        ],
        rows,
    )
    section.table(
        "A batch, nanoseconds per query: c(array) checks the domain, head.evaluate does not",
        [
            ("function", "text"),
            ("queries", "count"),
            ("c(array)", "number"),
            ("evaluate", "number"),
            ("ratio", "number"),
            ("error", "error"),
        ],
        batches,
    )
    return section


# ---- growth --------------------------------------------------------------------------------------------


def growth_section(options: Any) -> Section:
    """How the time of a query grows with keys, queries and dimension."""
    section = Section("growth", "how the time of a query grows")
    queries = 4_000 if options.quick else QUERIES
    repeats = 3 if options.quick else 7
    columns = [("m", "count"), ("ns a query", "number"), ("error", "error")]

    rows = []
    for power in range(3, 5 if options.quick else 10 if options.large else 9):
        rows.append(
            [3, round(10 ** (power / 3)) ** 3, *mapped_grid(round(10 ** (power / 3)), queries, repeats), power > 7]
        )
    for row in rows:
        row[-1] = "mapped file" if row[-1] else "memory"
    title = "Keys: grid head, m = 3, float32, window 2; the largest tables lie in a file that is mapped into memory"
    section.table(title, [("m", "count"), ("cells", "count"), *columns[1:], ("values in", "text")], rows)

    rows = []
    for power in range(3, 5 if options.quick else 7):
        keys, values, z, rate = scattered_points(10**power, queries, 3, 6.0)
        rows.append(
            [
                3,
                10**power,
                *timed(scattered_jobs(keys, values, rate)["full"], z, dense(z[:50], keys, values, rate), repeats),
            ]
        )
    section.table(
        "Keys: scattered head, m = 3, κ = 6, full precision", [("m", "count"), ("keys", "count"), *columns[1:]], rows
    )

    rows = []
    head = grid_head(3, 10 if options.quick else 100)
    for power in range(0, 4 if options.quick else 8):
        z = np.random.default_rng(power).random((10**power, 3))
        rows.append([10**power, *timed(Job(head.evaluate, tensor), z, exact_grid(head, z[:CHECKED])[:, None], 3)])
    section.table(
        f"Queries in one call: grid head, m = 3, {head.num_keys:,} cells, float64",
        [("queries", "count"), *columns[1:]],
        rows,
    )

    rows = []
    for m in range(1, 4 if options.quick else 9):
        head = grid_head(m, round((10**3 if options.quick else 10**6) ** (1 / m)))
        z = np.random.default_rng(m).random((queries, m))
        grid = timed(Job(head.evaluate, tensor), z, exact_grid(head, z[:200])[:, None], repeats)
        n = 3_000 if options.quick else 30_000
        keys, values, z, rate = scattered_points(n, min(queries, QUERIES if m < 4 else 30_000), m, 6.0)
        scattered = timed(scattered_jobs(keys, values, rate)["full"], z, dense(z[:50], keys, values, rate), 1)
        rows.append([m, head.num_keys, *grid, n, *scattered])
    section.table(
        "Dimension: grid heads, float64, window 2, and scattered heads, κ = 6, full precision",
        [
            ("m", "count"),
            ("cells", "count"),
            ("grid ns", "number"),
            ("error", "error"),
            ("keys", "count"),
            ("scattered ns", "number"),
            ("error", "error"),
        ],
        rows,
    )
    if not options.large:
        section.notes.append("10⁹ cells: not run (--large; 4 GB on disk)")
    return section


def timed(job: Job, z: Array, exact: Array, repeats: int) -> tuple[float, float]:
    """Nanoseconds per query of the whole batch, and the largest error at its first queries."""
    return whole_batches({"job": job}, z, repeats)["job"], largest(job(z)[: len(exact)] - exact.astype(float))


def mapped_grid(count: int, queries: int, repeats: int) -> tuple[float, float]:
    """A float32 head of count³ cells; more than 10⁷ values are written to a file, in slabs, and mapped."""
    grid = pa.ProductGrid.uniform(pa.Box([0.0] * 3, [1.0] * 3), count, dtype=np.float32)
    z = np.random.default_rng(0).random((queries, 3), dtype=np.float32)
    with tempfile.TemporaryDirectory() as folder:
        if count**3 <= 2 * 10**7:
            values = on_product(smooth, list(grid.axes)).astype(np.float32)
        else:
            values = np.memmap(Path(folder) / "values", np.float32, "w+", shape=(count,) * 3)
            first, *rest = (a.astype(np.float64) for a in grid.axes)
            for i, x in enumerate(first):
                values[i] = on_product(lambda y, w, x=x: smooth(x, y, w), rest)
        head = grid_head(3, count, np.float32, values)
        exact = exact_grid(head, z[:CHECKED])[:, None]
        found = timed(Job(head.evaluate, tensor), z, exact, repeats)
        del head, values
    return found


SECTIONS: dict[str, Callable[[Any], Section]] = {
    "error": error_section,
    "scattered": scattered_section,
    "grids": grids_section,
    "point": point_section,
    "growth": growth_section,
}
