"""How far exponentials on a CUDA device are off, which of them flush subnormal results, and whether certificates hold there.

Run from the repository's root: `python3 benchmarks/gpu_exponentials.py --store` where partita can compile heads, which are
written to benchmarks/heads, then `python3 benchmarks/gpu_exponentials.py` where the GPU is. It prints a table last. Every float32
number from −104 to −2⁻³⁰ is tried against float64, and float64 exponentials at 10⁶ points against 80-bit numbers on the host.
"""

from __future__ import annotations

import sys
import traceback
from pathlib import Path

import numpy as np
import torch

rows: list[tuple[str, str]] = []
HEADS = Path(__file__).parent / "heads"

if "--store" in sys.argv:
    sys.path.insert(0, "tests")
    import test_gpu_certificates as law

    import partita as pa

    HEADS.mkdir(exist_ok=True)
    for name, (text, m, options) in law.CASES.items():
        c = pa.compile(text, pa.Box([-1] * m, [1] * m), **options)
        about = {"kind": c.head.kind, "bound": c.error_bound, "shape": np.array(c.head.output_shape)}
        about["windows"] = np.array(getattr(c.head, "half_windows", (0,)))
        tensors = {k: v.numpy() for k, v in c.head.state_dict().items()}
        np.savez(HEADS / f"{name.replace(', ', '-')}.npz", **about, **tensors)
    raise SystemExit
CHUNK = 1 << 24
LOG2E = 1.4426950408889634

try:
    import triton
    import triton.language as tl

    try:
        from triton.language.extra import libdevice
    except ImportError:
        from triton.language.extra.cuda import libdevice

    @triton.jit
    def _apply(x_ptr, out_ptr, n, KIND: tl.constexpr, BLOCK: tl.constexpr):
        at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + at, mask=at < n, other=0.0)
        if KIND == 0:
            y = tl.exp(x)
        elif KIND == 1:
            y = tl.exp2(x * 1.4426950408889634)
        elif KIND == 2:
            y = tl.exp2(x)
        elif KIND == 3:
            y = libdevice.exp(x)
        elif KIND == 4:
            y = 1.0 / x
        elif KIND == 5:
            y = tl.div_rn(1.0, x)
        else:
            y = x * 0.5
        tl.store(out_ptr + at, y, mask=at < n)

    def triton_apply(kind):
        def run(x):
            out = torch.full_like(x, float("nan"))
            _apply[(triton.cdiv(x.numel(), 1024),)](x, out, x.numel(), KIND=kind, BLOCK=1024)
            return out

        return run

    TRITON = True
except Exception as problem:
    print("no triton:", problem)
    TRITON = False


def all_floats(first: float, last: float):
    """Every float32 between −first and −last, first < last, in chunks of bit patterns."""
    a, b = (int(np.float32(v).view(np.int32)) for v in (first, last))
    for start in range(a, b, CHUNK):
        bits = torch.arange(start, min(start + CHUNK, b), device="cuda", dtype=torch.int32)
        yield -bits.view(torch.float32)


def measure(name, function, reference, first=2.0**-30, last=104.0, argument=1.0):
    """Units u = 2⁻²⁴ of relative error: the worst of e^x·(1 ± a|x|u) for x ≥ −20, −87 …, and where results are flushed."""
    try:
        near = worst = per = 0.0
        flushed = 0.0
        for x in all_floats(first, last):
            got, exact = function(x).double(), reference(x.double())
            normal = exact >= 2.0**-126
            relative = ((got - exact).abs() / exact)[normal] * 2.0**24
            size = x.double().abs()[normal] * argument
            if relative.numel():
                worst = max(worst, float(relative.max()))
                close = relative[size <= 1]
                near = max(near, float(close.max()) if close.numel() else 0.0)
                per = max(per, float(((relative - 4).clamp(min=0) / size.clamp(min=1e-30)).max()))
            low = (~normal) & (exact >= 2.0**-149)
            if bool(low.any()):
                flushed = max(flushed, float((got[low] == 0).double().mean()))
        rows.append(
            (
                name,
                f"|x| ≤ 1: {near:.3f} u; x ≥ −87: {worst:.2f} u; beyond 4 u: {per:.3f} u·|x|; subnormal results 0: {flushed:.3f}",
            )
        )
    except Exception as problem:
        rows.append((name, f"failed: {type(problem).__name__}: {str(problem)[:200]}"))


measure("torch.exp float32", torch.exp, torch.exp)
measure("torch.exp2 float32", torch.exp2, torch.exp2, last=149.0, argument=0.6931)
measure(
    "torch.softmax float32 (two keys)",
    lambda x: torch.softmax(torch.stack([x, torch.zeros_like(x)], 1), 1)[:, 0],
    lambda x: torch.exp(x) / (1 + torch.exp(x)),
)
if TRITON:
    measure("tl.exp float32", triton_apply(0), torch.exp)
    measure("tl.exp2(x·log2e) float32", triton_apply(1), torch.exp)
    measure("tl.exp2 float32", triton_apply(2), torch.exp2, last=149.0, argument=0.6931)
    measure("libdevice.exp float32", triton_apply(3), torch.exp)
    for kind, name in ((4, "1/x in Triton"), (5, "tl.div_rn")):
        try:
            worst = 0.0
            for x in all_floats(1.0, 4.0):
                x = -x
                exact = 1 / x.double()
                worst = max(worst, float(((triton_apply(kind)(x).double() - exact).abs() / exact).max()) * 2.0**24)
            rows.append((name + " float32", f"{worst:.3f} u"))
        except Exception as problem:
            rows.append((name, f"failed: {problem}"))
    try:
        tiny = torch.full((1024,), 2.0**-126, device="cuda")
        rows.append(("a product in Triton, subnormal result", str(float(triton_apply(6)(tiny)[0]) != 0)))
    except Exception as problem:
        rows.append(("product", f"failed: {problem}"))

for name, function in [("torch.exp float64", torch.exp)] + (
    [
        ("tl.exp float64", triton_apply(0)),
        ("tl.exp2(x·log2e) float64", triton_apply(1)),
        ("libdevice.exp float64", triton_apply(3)),
    ]
    if TRITON
    else []
):
    try:
        x = -np.concatenate(
            [np.random.default_rng(1).uniform(0, 708, 500_000), np.random.default_rng(2).uniform(0, 1, 500_000)]
        )
        got = function(torch.from_numpy(x).cuda()).cpu().numpy().astype(np.longdouble)
        exact = np.exp(x.astype(np.longdouble))
        relative = np.abs(got - exact) / exact * 2.0**53
        rows.append((name, f"x ≥ −1: {float(relative[500_000:].max()):.3f} u; x ≥ −708: {float(relative.max()):.2f} u"))
    except Exception as problem:
        rows.append((name, f"failed: {type(problem).__name__}: {str(problem)[:200]}"))

try:  # products: what the guard must switch off
    g = torch.Generator(device="cuda").manual_seed(0)
    a, b = (torch.randn(512, 512, device="cuda", generator=g) for _ in range(2))
    exact = a.double() @ b.double()
    for setting in ("highest", "high"):
        torch.set_float32_matmul_precision(setting)
        rows.append(
            (
                f"float32 product, matmul precision {setting}",
                f"{float(((a @ b).double() - exact).abs().max() / exact.abs().max()):.2e}",
            )
        )
    torch.set_float32_matmul_precision("highest")
except Exception as problem:
    rows.append(("products", f"failed: {problem}"))

FUNCTIONS = {
    "fitted-float32": lambda x, y: np.sin(3 * x) + x * np.cos(2 * y),
    "fitted-float64": lambda x, y: np.exp(x * y) * np.cos(4 * x - y),
    "hard-float32": lambda x, y: np.tanh(x + 2 * y),
    "affine-float32": lambda x, y: np.sin(3 * x) * y,
    "pieces-float32": lambda x, y: np.abs(x + 0.7 * y - 0.1),
}


def stored_head(path):
    """A head from the arrays in a file: the machine with the GPU may lack what compiling needs."""
    from partita.geometry import Box, ProductGrid
    from partita.heads import GridHead, ScatteredHead

    found = np.load(path)
    shapes = {"input_shapes": ((2,),), "output_shape": tuple(found["shape"].tolist())}
    t = {k: torch.from_numpy(found[k]) for k in found.files if found[k].dtype.kind == "f" and k != "bound"}
    if str(found["kind"]) == "grid":
        grid = ProductGrid(Box([-1, -1], [1, 1]), tuple(t[f"centers_{i}"].double().numpy() for i in range(2)))
        rest = {"value_slopes": t.get("value_slopes"), "origin": t.get("origin"), "half_windows": found["windows"]}
        head = GridHead(grid, t["inverse_temperature"].double().numpy(), t["values"], **rest, **shapes)
    else:
        rest = {"powers": t.get("powers"), "value_slopes": t.get("value_slopes")}
        head = ScatteredHead(t["centers"], float(t["inverse_temperature"]), t["values"], **rest, **shapes)
    return head, float(found["bound"])


def certificates():
    from unittest import mock

    for name in (
        "scipy",
        "scipy.spatial",
        "scipy.linalg",
        "scipy.optimize",
        "scipy.special",
        "scipy.interpolate",
        "scipy.sparse",
        "safetensors",
        "safetensors.torch",
    ):
        try:
            __import__(name)
        except ImportError:
            sys.modules[name] = mock.MagicMock()
    from partita.heads import guards

    z = np.random.default_rng(5).uniform(-1, 1, (10**6, 2))
    z[:4] = [[-1, -1], [-1, 1], [1, -1], [1, 1]]
    there = torch.from_numpy(z).cuda()
    for path in sorted(HEADS.glob("*.npz")):
        f = FUNCTIONS[path.stem](z[:, 0], z[:, 1])
        for guarded in (True, False):
            try:
                head, bound = stored_head(path)
                head.to("cuda")
                real = guards._setting, torch.is_autocast_enabled
                if not guarded:
                    guards._setting = lambda device: ("ieee", lambda value: None)
                    torch.is_autocast_enabled = lambda device: False
                torch.set_float32_matmul_precision("high")
                with torch.autocast("cuda", dtype=torch.bfloat16):
                    out = head.evaluate(there.to(head.dtype))
                torch.set_float32_matmul_precision("highest")
                guards._setting, torch.is_autocast_enabled = real
                error = float(np.abs(out.double().cpu().numpy()[:, 0] - f).max())
                verdict = "holds" if error <= bound else "exceeded"
                rows.append(
                    (
                        f"{path.stem}{'' if guarded else ', without the guard'}",
                        f"{verdict}: worst {error:.6g}, bound {bound:.6g}",
                    )
                )
            except Exception as problem:
                traceback.print_exc()
                rows.append((path.stem, f"failed: {type(problem).__name__}: {str(problem)[:300]}"))


try:
    certificates()
except Exception as problem:
    traceback.print_exc()
    rows.append(("certificates", f"not run: {type(problem).__name__}: {str(problem)[:300]}"))

print(torch.__version__, torch.cuda.get_device_name())
for name, text in rows:
    print(f"{name:45s} {text}")
