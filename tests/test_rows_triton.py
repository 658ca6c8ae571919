"""The kernel that reads heads at length, against the same sums in float64: under Triton's interpreter or on a GPU."""

from __future__ import annotations

import os
from dataclasses import fields
from importlib.util import find_spec

import pytest
import torch

CUDA = torch.cuda.is_available()
if find_spec("triton") is None:
    pytest.skip("Triton is not installed", allow_module_level=True)
if not CUDA:
    os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported

from partita.inspection import row_sums as module  # noqa: E402
from partita.inspection.calls import AttentionCall  # noqa: E402
from partita.inspection.row_sums import RowSums, row_sums  # noqa: E402
from partita.kernels import rows_triton as kernel  # noqa: E402

DEVICE = "cuda" if CUDA else "cpu"
pytestmark = pytest.mark.filterwarnings("ignore")  # the interpreter's numpy warns of infinities that are meant
TOKENS = 300 if CUDA else 70
DTYPES = (torch.float32, torch.bfloat16, torch.float16) if CUDA else (torch.float32,)


def make(dtype, *, heads=2, key_heads=2, tokens=TOKENS, keys=None, dim=20, value_dim=12, **options):
    torch.manual_seed(tokens + heads)
    made = (
        torch.randn(1, h, n, d)
        for h, n, d in ((heads, tokens, dim), (key_heads, keys or tokens, dim), (key_heads, keys or tokens, value_dim))
    )
    q, k, v = (t.to(DEVICE, dtype) for t in made)
    k[:, :, 5] = k[:, :, 3]  # equal keys: ties
    return AttentionCall(q, k, v, options.pop("scale", 0.4), **options)


def both(call, ids=None):
    (_, _, exact), *_ = row_sums(call, dtype=torch.float64, tokens=None if ids is None else ids[None])
    found = module._on_device(kernel, call, 0, slice(0, call.heads), ids)
    return exact, found


def check(call, ids=None, dtype=torch.float32):
    exact, found = both(call, ids)
    scores = call.scale * (
        call.queries.double().abs()
        @ call.keys.double().abs().amax(2)[..., None].repeat_interleave(call.heads // call.keys.shape[1], 1)
    )
    slack = 2.0 * (call.queries.shape[-1] + 4) * 2**-23 * abs(scores).amax().item() + 1e-6
    size = call.values.abs().max().item()
    for f in fields(RowSums):
        a, b = getattr(exact, f.name).double(), getattr(found, f.name).double()
        if f.name in ("winner", "runner_up"):
            ties = exact.margin < 2 * slack + 2**-15
            if f.name == "winner":
                assert torch.equal(a[~ties], b[~ties])
            continue
        if f.name == "margin":
            fine = a.isinf() & b.isinf() | ((a - b).abs() <= 2 * slack + 2**-15 * a.abs())
            assert bool(fine.all())
            continue
        scale = 1.0 if f.name in ("best",) else max(1.0, a.nan_to_num(0.0, 0.0, 0.0).abs().max().item())
        extra = 2.0**-8 * size if f.name == "output" and dtype != torch.float32 else 0.0
        torch.testing.assert_close(
            b,
            a,
            rtol=4 * slack,
            atol=4 * slack * scale + extra,
            equal_nan=True,
            msg=lambda m, name=f.name: f"{name}: {m}",
        )


CASES = {
    "plain": {},
    "causal": {"causal": True},
    "negative scale": {"scale": -0.3, "causal": True},
    "grouped": {"heads": 4, "causal": True},
    "cross": {"keys": 37},
    "longer keys": {"keys": TOKENS + 31},
    "causal window": {"causal": True, "window": 9},
    "window": {"window": 17},
    "wide": {"dim": 33, "value_dim": 40},
    "ALiBi": {"slopes": torch.tensor([0.1, 0.5]), "causal": True},
    "ALiBi both ways": {"slopes": torch.tensor([0.1, 0.5])},
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_the_sums_are_those_of_float64(name, dtype):
    options = dict(CASES[name])
    if "slopes" in options:
        options["slopes"] = options["slopes"].to(DEVICE)
    check(make(dtype, **options), dtype=dtype)


@pytest.mark.parametrize("kind", ["boolean", "padding", "bias", "hidden rows"])
def test_masks(kind):
    torch.manual_seed(4)
    n = TOKENS
    mask = {
        "boolean": torch.rand(1, 2, n, n) > 0.4,
        "padding": (torch.arange(n) < n - 11)[None, None, None],
        "bias": torch.where(torch.rand(1, 1, n, n) > 0.3, torch.randn(1, 1, n, n), -1e4),
        "hidden rows": (torch.arange(n) % 3 > 0)[None, None, :, None].expand(1, 1, n, n),
    }[kind].to(DEVICE)
    check(make(torch.float32, mask=mask))
    check(make(torch.float32, mask=mask, causal=True))


def test_tokens():
    ids = torch.randint(0, 5, (TOKENS,), device=DEVICE)
    check(make(torch.float32, causal=True), ids)
    check(make(torch.float32), ids)


def test_pairs_of_a_query_and_a_key():
    call = make(torch.float32, heads=4, causal=True, window=9)
    partners = torch.randint(-3, TOKENS + 3, (4, TOKENS), device=DEVICE)
    exact = call.pairs(0, slice(0, 4), partners, torch.float64)
    held = partners.clamp(0, TOKENS - 1)
    products = call.scale * kernel.pair_products(call.queries[0], call.keys[0], held, group=2)
    found = call.pairs(0, slice(0, 4), partners, torch.float32, products)
    torch.testing.assert_close(found.double(), exact, rtol=1e-5, atol=1e-5)
    dense = torch.stack([call.scores(h, dtype=torch.float64)[0][0].gather(1, held[h][:, None])[:, 0] for h in range(4)])
    torch.testing.assert_close(exact, dense.masked_fill(partners != held, -torch.inf))


def test_a_wrong_sum_is_noticed(monkeypatch):
    real = kernel.sum_rows
    monkeypatch.setattr(kernel, "sum_rows", lambda *a, **k: {**(found := real(*a, **k)), "rest": found["rest"] * 1.01})
    with pytest.raises(AssertionError, match="rest"):
        check(make(torch.float32))


@pytest.mark.gpu
@pytest.mark.skipif(not CUDA, reason="needs a GPU")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("dim", [64, 128])
def test_long_rows(dtype, dim):
    check(make(dtype, tokens=4999, dim=dim, value_dim=dim, scale=dim**-0.5, causal=True), dtype=dtype)
