"""Check and time softmax attention over scattered points on a GPU: `python3 device/scattered_device.py`.

Errors are against dense float64 sums over all keys. Times are medians over calls with everything included: index, sorting, lists.
"""

from __future__ import annotations

import math
import os
import sys
import time
import traceback
import types

import torch
from torch import Tensor

_HERE = os.path.dirname(os.path.abspath(__file__))
for _name, _folder in (
    ("partita", "partita"),
    ("partita.kernels", "partita/kernels"),
):  # without what the rest of it needs
    _package = types.ModuleType(_name)
    _package.__path__ = [os.path.join(_HERE, "..", _folder)]
    sys.modules[_name] = _package
from partita.kernels import scattered_triton as st  # noqa: E402

DEVICE = "cuda"
ROWS: list[str] = []
START = time.time()
LIMIT = 90


def say(line: str) -> None:
    print(line, flush=True)


def dense(q: Tensor, k: Tensor, v: Tensor, J: Tensor | None, p: Tensor | None, rate: float) -> tuple[Tensor, Tensor]:
    """The sums in float64, in chunks of queries."""
    out, sizes = [], []
    step = max(1, (1 << 27) // max(1, len(k) * k.shape[1]))
    k, v = k.double(), v.double()
    for part in q.double().split(step):
        d = part[:, None] - k[None]
        x = (d * d).sum(-1)
        s = -rate / 2 * (x if p is None else x - p.double())
        w = s.softmax(1)
        o = w @ v
        if J is not None:
            o = o + torch.einsum("ij,jod,ijd->io", w, J.double(), d)
        out.append(o)
        sizes.append(s.logsumexp(1))
    return torch.cat(out), torch.cat(sizes)


def median_ms(call, repeats: int = 15) -> tuple[float, float]:
    """Median and least time of a call in milliseconds, by events."""
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    times = []
    for _ in range(repeats):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        call()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end))
    times.sort()
    return times[len(times) // 2], times[0]


def stages(call) -> None:
    """Kernel times of one call."""
    try:
        from torch.profiler import ProfilerActivity, profile

        with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as record:
            for _ in range(5):
                call()
            torch.cuda.synchronize()
        rows = [
            (e.key, e.self_device_time_total / 5, e.count / 5)
            for e in record.key_averages()
            if e.self_device_time_total > 0
        ]
        rows.sort(key=lambda r: -r[1])
        total = sum(r[1] for r in rows)
        say(f"   kernels {total:.0f} us: " + ", ".join(f"{k[:34]} {t:.0f}us x{c:.0f}" for k, t, c in rows[:14]))
    except Exception as error:
        say(f"   profiler failed: {error!r}"[:300])


def uniform(n: int, m: int, dtype: torch.dtype = torch.float32, outs: int = 1):
    k, q = torch.rand(n, m, device=DEVICE, dtype=dtype), torch.rand(n, m, device=DEVICE, dtype=dtype)
    return q, k, torch.randn(n, outs, device=DEVICE, dtype=dtype), 8 * n ** (2 / m)


def error_of(q, k, v, rate, cut, J=None, p=None, sample=1024):
    out, lse, dropped, _ = st.sum_on_device(q, st.build_index(k, p), v, J, rate, cut)
    some = torch.randperm(len(q), device=DEVICE)[:sample]
    ref, size = dense(q[some], k, v, J, p, rate)
    return float((out[some] - ref).abs().max()), float((lse[some] - size).abs().max()), float(dropped.max())


def time_forward(n: int, m: int, cut: float, dtype=torch.float32, outs=1, label="", profile=False) -> None:
    q, k, v, rate = uniform(n, m, dtype, outs)
    try:
        err, off, dropped = error_of(q, k, v, rate, cut)

        def call():
            st.sum_on_device(q, st.build_index(k, None), v, None, rate, cut)

        middle, least = median_ms(call, 10 if n > 500_000 else 15)
        index = st.build_index(k, None)
        alone, _ = median_ms(lambda: st.build_index(k, None), 10)
        listed = next(iter(listing(q, index, rate, cut)))
        average = listed.entries.shape[0] / max(1, listed.rows) if not listed.segments else -1
        line = (
            f"fwd {label:18s} n={n} m={m} out={outs} {str(dtype)[6:]} cut={cut:.1f} total {middle:.3f} ms (min {least:.3f}) index {alone:.3f}"
            f" err {err:.1e} lse {off:.1e} dropped {dropped:.1f} blocks/row {average:.0f} items {listed.items} rows {listed.rows} flagged {listed.flagged}"
        )
        ROWS.append(line)
        say(line)
        if profile:
            stages(call)
    except Exception:
        ROWS.append(f"fwd {label} n={n} m={m} FAILED")
        say(traceback.format_exc()[-1500:])


def listing(q, index, rate, cut):
    """The lists alone, for their lengths."""
    rows = st._arranged(q, st._codes(q, index.low, index.high), None)
    keys, rate = index.points, st._rate_tensor(rate, q)
    energies = q.new_empty(rows.valid.shape[0])
    st.programs.home_kernel[(rows.super_terms.shape[0],)](
        rows.sorted, rows.codes, rows.valid, rows.size, rows.valid.shape[0], keys.sorted, keys.codes, keys.sorted, keys.size,
        keys.valid.shape[0], energies, rows.terms, rows.super_terms, keys.size.bit_length(),
        M=q.shape[1], POWERS=False, WINDOW=st.WINDOW, BLOCK=st.BLOCK, SUPER=st.SUPER, num_warps=4,
    )  # fmt: skip
    return st._lists(rows, keys, rate, cut, range(rows.blocks))


def dense_gradients(q, k, v, J, p, rate, g, gl):
    """Gradients of the sums in float64 by torch, in chunks of queries."""
    leaves = [None if a is None else a.double().clone().requires_grad_() for a in (q, k, v, p, J)]
    r = torch.tensor(float(rate), dtype=torch.float64, device=DEVICE, requires_grad=True)
    step = max(1, (1 << 25) // max(1, len(k) * k.shape[1]))
    for begin in range(0, len(q), step):
        part = slice(begin, begin + step)
        d = leaves[0][part][:, None] - leaves[1][None]
        x = (d * d).sum(-1)
        s = -r / 2 * (x if p is None else x - leaves[3])
        w = s.softmax(1)
        o = w @ leaves[2]
        if J is not None:
            o = o + torch.einsum("ij,jod,ijd->io", w, leaves[4], d)
        ((o * g[part].double()).sum() + (s.logsumexp(1) * gl[part].double()).sum()).backward()
    return [None if a is None else a.grad for a in leaves] + [r.grad]


def gradient_errors(q, k, v, J, p, rate, cut) -> str:
    """Largest error of each gradient over its largest entry."""
    g, gl = (
        torch.randn(len(q), v.shape[1], device=DEVICE, dtype=q.dtype),
        torch.randn(len(q), device=DEVICE, dtype=q.dtype),
    )
    index = st.build_index(k, p)
    out, lse, _, _ = st.sum_on_device(q, index, v, J, rate, cut)
    needs = [True, True, True, p is not None, J is not None, True]
    got = st.gradients_on_device(g, gl, q, index, v, J, rate, cut, out, lse, needs)
    again = st.gradients_on_device(g, gl, q, index, v, J, rate, cut, out, lse, needs)
    same = all(bool((a == b).all()) for a, b in zip(got, again) if a is not None)
    ref = dense_gradients(q, k, v, J, p, rate, g, gl)
    return (
        " ".join(f"{float((a - b).abs().max() / b.abs().max()):.1e}" for a, b in zip(got, ref) if a is not None)
        + f" same {same}"
    )


def time_backward(n: int, m: int, cut: float, needs: str, label: str = "", profile: bool = False) -> None:
    """needs: letters of queries, keys, values, powers, slopes, rate."""
    q, k, v, rate = uniform(n, m)
    try:
        g = torch.randn(n, 1, device=DEVICE)
        index = st.build_index(k, None)
        out, lse, _, _ = st.sum_on_device(q, index, v, None, rate, cut)
        wanted = [letter in needs for letter in "qkvpsr"]

        def call():
            st.gradients_on_device(g, None, q, index, v, None, rate, cut, out, lse, wanted)

        middle, least = median_ms(call, 10)
        forward, _ = median_ms(lambda: st.sum_on_device(q, st.build_index(k, None), v, None, rate, cut), 10)
        line = f"bwd {label:12s} n={n} m={m} {needs} cut={cut:.1f} {middle:.3f} ms (min {least:.3f}); forward {forward:.3f} ratio {middle / forward:.2f}"
        ROWS.append(line)
        say(line)
        if profile:
            stages(call)
    except Exception:
        ROWS.append(f"bwd {label} n={n} m={m} FAILED")
        say(traceback.format_exc()[-1500:])


def adversarial(dtype: torch.dtype) -> None:
    """Hard inputs, each against the dense sum."""
    torch.manual_seed(5)
    bad = []
    low = dtype == torch.float32
    close = 2e-5 if low else 1e-11

    def rand(*shape):
        return torch.rand(*shape, device=DEVICE, dtype=dtype)

    clusters = rand(50, 3).repeat_interleave(400, 0)
    line = rand(5000, 1) * torch.tensor([1.0, 2.0, -1.0], device=DEVICE, dtype=dtype)
    cases = {
        "clusters": (rand(3000, 3), clusters + 1e-6 * rand(20000, 3), 1e4, None, None),
        "queries in clusters": (
            clusters[:3000] + 1e-6 * rand(3000, 3),
            clusters + 1e-6 * rand(20000, 3),
            1e4,
            None,
            None,
        ),
        "clusters, sharp": (
            clusters[::7] + 1e-6 * rand(len(clusters[::7]), 3),
            clusters + 1e-6 * rand(20000, 3),
            1e10,
            None,
            None,
        ),
        "equal keys": (rand(333, 2), torch.full((777, 2), 0.3, device=DEVICE, dtype=dtype), 100.0, None, None),
        "one key": (rand(100, 3), rand(1, 3), 50.0, None, None),
        "line": (rand(999, 3), line, 1e4, None, None),
        "rate 1e-12": (rand(500, 3), rand(5000, 3), 1e-12, None, None),
        "rate 1e12": (rand(500, 3), rand(5000, 3), 1e12, None, None),
        "far": (1e3 * rand(300, 3) + 50, rand(5000, 3), 3e-2, None, None),
        "powers": (rand(700, 3), rand(9000, 3), 3000.0, None, 0.5 * rand(9000)),
        "powers, many signs": (
            rand(700, 2),
            rand(9000, 2),
            3000.0,
            None,
            0.05 * torch.randn(9000, device=DEVICE, dtype=dtype),
        ),
        "slopes": (rand(700, 3), rand(9000, 3), 3000.0, "slopes", None),
        "slopes, powers, 3 outputs": (rand(700, 2), rand(9000, 2), 3000.0, "slopes3", 0.01 * rand(9000)),
        "no query": (rand(0, 3), rand(100, 3), 10.0, None, None),
    }
    if "check" in sys.argv and low:
        cases = {"rate 1e12": cases["rate 1e12"], "clusters, sharp": cases["clusters, sharp"]}
    for m in (6, 8) if "check" in sys.argv and low else (1, 2, 3, 4, 6, 8) if low else (3, 5):
        cases[f"m={m}"] = (rand(1001, m), rand(20003, m), 6 * 20003 ** (2 / m), None, None)
    cases["m=12"] = (rand(301, 12), rand(3003, 12), 30.0, "slopes", 0.1 * rand(3003))
    cases["7 outputs"] = (rand(301, 3), rand(3003, 3), 2000.0, "7", None)
    for name, (q, k, rate, extra, p) in cases.items():
        if time.time() - START > LIMIT:
            bad.append("out of time")
            break
        try:
            outs = 3 if extra == "slopes3" else 7 if extra == "7" else 1
            v = torch.randn(len(k), outs, device=DEVICE, dtype=dtype)
            J = (
                torch.randn(len(k), outs, k.shape[1], device=DEVICE, dtype=dtype)
                if extra and "slopes" in extra
                else None
            )
            cut = math.log(len(k)) + (18 if low else 34)
            index = st.build_index(k, p)
            out, lse, dropped, _ = st.sum_on_device(q, index, v, J, rate, cut)
            again = st.sum_on_device(q, index, v, J, rate, cut)[0]
            ref, size = dense(q, k, v, J, p, rate)
            err = float((out - ref).abs().max()) if len(q) else 0.0
            off = float(((lse - size).abs() / (1 + size.abs())).max()) if len(q) else 0.0
            scores = float(size.abs().max()) * (4e-6 if low else 1e-14) if len(q) else 0.0
            same = bool((out == again).all())
            limit = max(close, 2 * scores) if name not in ("rate 1e12", "clusters, sharp") else math.inf
            fine = err <= limit and off < (1e-5 if low else 1e-12) and same
            say(
                f"  {'ok ' if fine else 'BAD'} {str(dtype)[6:]} {name}: err {err:.1e} lse {off:.1e} dropped {float(dropped.max()) if len(q) else 0:.1f} same {same}"
            )
            if not fine:
                bad.append(name)
            if name == "rate 1e12" or name == "clusters, sharp":  # the answer is a value, whatever the rounding
                near = (out - v[:, 0]).abs().min(1).values.max() if outs == 1 and len(k) * len(q) < 1e8 else 0
                say(
                    f"      distance to the nearest value {float(near):.1e}, fraction off {float(((out - ref).abs() > 1e-3).double().mean()):.4f}"
                )
        except Exception:
            bad.append(name)
            say(f"  BAD {name}\n" + traceback.format_exc()[-1200:])
    q, k = rand(1000, 3), rand(9000, 3)
    v = torch.randn(9000, 1, device=DEVICE, dtype=dtype)
    spoiled = q.clone()
    spoiled[::13, 1] = float("nan")
    spoiled[5, 0] = float("inf")
    index = st.build_index(k, None)
    clean, dirty = (
        st.sum_on_device(q, index, v, None, 3000.0, 40.0)[0],
        st.sum_on_device(spoiled, index, v, None, 3000.0, 40.0)[0],
    )
    hit = ~spoiled.isfinite().all(1)
    fine = bool(dirty[hit].isnan().all()) and float((dirty - clean)[~hit].abs().max()) < close
    say(f"  {'ok ' if fine else 'BAD'} NaN queries")
    if not fine:
        bad.append("NaN")
    for name, m, n, outs, pw, sl in [
        ("plain", 3, 3000, 1, 0, 0),
        ("all", 2, 2000, 2, 1, 1),
        ("m=10, 6 outputs", 10, 300, 6, 1, 1),
    ]:
        if time.time() - START > LIMIT:
            break
        try:
            q, k, v = rand(n // 2, m), rand(n, m), torch.randn(n, outs, device=DEVICE, dtype=dtype)
            J, p = torch.randn(n, outs, m, device=DEVICE, dtype=dtype) if sl else None, 0.01 * rand(n) if pw else None
            rate = 6.0 * n ** (2 / m)
            say(
                f"  gradients {dtype} {name}: {gradient_errors(q, k, v, J, p, rate, math.log(n) + (18 if low else 36))}"
            )
        except Exception:
            bad.append("gradients " + name)
            say(traceback.format_exc()[-1200:])
    ROWS.append(f"adversarial {dtype}: {'all right' if not bad else bad}")


def host_time(name: str, call, repeats: int = 30) -> None:
    """Time the host needs to launch something."""
    call()
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(repeats):
        call()
    spent = (time.perf_counter() - begin) / repeats * 1e6
    torch.cuda.synchronize()
    say(f"   host {name}: {spent:.0f} us")


def large() -> None:
    """Many queries, many keys, uneven keys: time and peak memory."""
    for name, count, keys, m, rate, spread in [
        ("1e8 queries", 100_000_000, 100_000, 2, 8e5, None), ("1e7 keys", 1_000_000, 10_000_000, 3, 8 * 1e7 ** (2 / 3), None),
        ("clusters", 262_144, 262_144, 3, 32768.0, 1e-3), ("tight clusters", 262_144, 262_144, 3, 32768.0, 1e-6),
        ("dense", 262_144, 262_144, 3, 1e-12, None), ("1-D", 262_144, 262_144, 1, 8.0 * 262_144**2, None),
    ]:  # fmt: skip
        if time.time() - START > LIMIT:
            break
        try:
            k = torch.rand(keys, m, device=DEVICE)
            q = torch.rand(count, m, device=DEVICE)
            if spread:
                k = k[:64].repeat_interleave(keys // 64, 0) + spread * k
            v = torch.randn(keys, 1, device=DEVICE)
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            st.sum_on_device(q, st.build_index(k, None), v, None, rate, 28.5)
            peak = (torch.cuda.max_memory_allocated() - before) / 2**30
            err, off, dropped = error_of(q, k, v, rate, 28.5, sample=64)
            middle, _ = median_ms(
                lambda q=q, k=k, v=v, rate=rate: st.sum_on_device(q, st.build_index(k, None), v, None, rate, 28.5), 2
            )
            ROWS.append(
                f"large {name}: {middle:.2f} ms, err {err:.1e} lse {off:.1e} dropped {dropped:.1f} peak {peak:.2f} GiB above inputs"
            )
            say(ROWS[-1])
        except Exception:
            ROWS.append(f"large {name} FAILED")
            say(traceback.format_exc()[-1200:])


def main() -> None:
    say(f"{torch.__version__} {torch.cuda.get_device_name()} triton {st.triton.__version__}")
    n = 262_144
    if "check" in sys.argv:
        for m in (3, 2, 4):
            time_forward(n, m, math.log(n) + 16, label="base")
        time_forward(1_000_000, 3, math.log(1e6) + 16, label="base")
        adversarial(torch.float32)
        adversarial(torch.float64)
        say("\n".join(ROWS))
        return
    for m in (3, 2, 4):
        time_forward(n, m, math.log(n) + 16, label="base")
    time_forward(1_000_000, 3, math.log(1e6) + 16, label="base")
    for label in ("not ahead", "ahead"):
        st.AHEAD = label == "ahead"
        for m in (3, 4):
            time_forward(n, m, math.log(n) + 16, label=label)
    for m, needs in ((3, "qkvr"), (3, "v"), (3, "qv"), (2, "qkvr"), (4, "qkvr")):
        time_backward(n, m, math.log(n) + 16, needs)
    time_backward(1_000_000, 3, math.log(1e6) + 16, "qkvr")
    plain = st._gradient_rows
    q, k, v, rate = uniform(n, 3)
    index = st.build_index(k, None)
    codes = st._codes(k, index.low, index.high)
    host_time("codes", lambda: st._codes(k, index.low, index.high))
    host_time("arranged", lambda: st._arranged(k, codes, None))
    host_time("sort", lambda: torch.sort(codes, stable=True))
    host_time("aminmax", lambda: torch.aminmax(k, dim=0))
    host_time("columns", lambda: st._columns(v, index.points))
    host_time("build_index", lambda: st.build_index(k, None))
    host_time("sum", lambda: st.sum_on_device(q, index, v, None, rate, 28.5))
    say(f"-- {time.time() - START:.0f} s")
    for rows in (8, 4, 2):
        st._gradient_rows = lambda *a, rows=rows: rows
        for m in (3, 4):
            time_backward(n, m, 28.5, "qkvr", label=f"rows {rows}")
    st._gradient_rows = plain
    say(f"-- {time.time() - START:.0f} s")
    large()
    say(f"-- {time.time() - START:.0f} s")
    time_forward(n, 3, 50.0, torch.float64, label="double")
    for outs in (4, 16, 64):
        time_forward(n, 3, 28.5, outs=outs, label="outputs")
    for ahead in (False, True):
        st.AHEAD = ahead
        for m in (3, 4):
            time_forward(n, m, 28.5, label=f"profiled {ahead}", profile=True)
    time_backward(n, 3, 28.5, "qkvr", label="profiled", profile=True)
    time_backward(n, 4, 28.5, "qkvr", label="profiled", profile=True)
    say(f"-- {time.time() - START:.0f} s")
    adversarial(torch.float32)
    say(f"-- {time.time() - START:.0f} s")
    if time.time() - START < LIMIT:
        adversarial(torch.float64)
    say("\n".join(ROWS))
    say(f"seconds: {time.time() - START:.0f}")


if __name__ == "__main__":
    main()
