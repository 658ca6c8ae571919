"""Heads on several processes: equal to one process within the stated terms, under torchrun and, slice by slice, in this process."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from dense import Cells
from flint import ctx
from sharded_cases import CASES, GRADIENTS, corners, grid, inputs, scattered

import partita as pa
from partita.distributed import ShardedHead
from partita.errors import DomainError, UnsupportedError
from partita.heads import GridHead
from partita.heads.head import DivisibleHead
from partita.kernels.partial_sums import (
    BOUND,
    LOG_SUM,
    MAXIMUM,
    OUTPUT,
    merged,
    merged_gradient,
    nothing,
    table,
)

TESTS = Path(__file__).parent
ENVIRONMENT = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
ENVIRONMENT["PYTHONPATH"] = os.pathsep.join([str(TESTS), str(TESTS.parent), os.environ.get("PYTHONPATH", "")])


def torchrun(ranks: int, script: str, *arguments: str, timeout: int = 400) -> None:
    """Run a script on some processes of this machine; torchrun chooses a free port on the loopback device."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    done = subprocess.run(
        [*command, str(TESTS / script), *arguments], env=ENVIRONMENT, timeout=timeout, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-5000:]


@pytest.fixture(scope="module", params=[2, 3])
def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each rank found."""
    folder = tmp_path_factory.mktemp("ranks")
    torchrun(request.param, "sharded_cases.py", str(folder))
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(request.param)]


def check_ranks(found: list[dict[str, Any]]) -> None:
    """All that must hold of the cases, whatever the backend and the number of ranks."""
    for name, (make, box, count) in CASES.items():
        every, head = [rank["cases"][name] for rank in found], make()
        one = every[0]
        assert len({rank["bits"] for rank in every}) == 1, name
        assert all(rank["bound"] == one["bound"] for rank in every), name
        assert one["difference"] <= one["bound"] + one["bound of one"], name
        assert one["merged alone"] <= 2 * one["bound of one"], name
        assert one["terms"] == ["window", "score rounding", "summation"]
        assert one["left out"] <= one["window"], name
        z = inputs(head, box, count).double()
        exact = Cells.of(head.state_dict()).in_floats(z.numpy()) if count else np.zeros((0, 1))
        away = np.abs(np.reshape(one["outputs"], exact.shape) - exact).max(initial=0.0)
        assert away <= one["bound"] + 1e-13 * np.abs(head.values.double().numpy()).max(), name  # numpy rounds, too
        limit = {torch.float64: 1e-9, torch.float32: 1e-2, torch.bfloat16: 1e-2}[head.dtype]
        assert one["bound"] <= limit, name


def test_ranks_agree_with_one_process_and_with_exact_sums(found):
    check_ranks(found)


def test_every_rank_holds_its_slice_only(found):
    for name, (make, _, _) in CASES.items():
        head, every = make(), [rank["cases"][name] for rank in found]
        assert sum(rank["keys"] for rank in every) == head.num_keys, name
        for tensor, size in every[0]["of head"].items():
            held, axis = [rank["held"][tensor] for rank in every], int(head.key_counts[0] < 8 * len(found))
            axis = axis if name == "short first axis" else 0
            if tensor in head.divided(axis) or tensor in head.divided(len(head.key_counts) - 1) & {"values"}:
                assert sum(held) == size, (name, tensor)
                assert max(held) <= math.ceil(head.key_counts[axis] / len(found)) * size / head.key_counts[axis]
            else:
                assert held == [size] * len(found), (name, tensor)
        for rank in every:
            halo = sum(rank["held"].get(end, 0) for end in ("before", "after"))
            assert set(rank["held"]) - set(rank["of head"]) == (
                {"before", "after"} if isinstance(head, GridHead) else set()
            )
            assert halo <= 2


def test_gradients_are_those_of_one_process(found):
    for name in GRADIENTS:
        for rank in found:
            off = rank["gradients"][name]
            assert max(off.values()) <= 1e-12, (name, off)
            assert {"z", "inverse_temperature"} <= set(off)
    assert "value_slopes" in found[0]["gradients"]["affine grid"] and "centers_1" in found[0]["gradients"]["grid"]


def test_what_goes_wrong_on_one_rank_is_an_error_on_all_of_them(found):
    expected = {
        "other inputs": ["RanksDisagreeError"] * 2,
        "more inputs": ["RanksDisagreeError"] * 2,
        "wrong shape": ["WorkersLostError", "ShapeError"],
        "other gradients": ["RanksDisagreeError"] * 2,
        "other head": ["RanksDisagreeError"] * 2,
        "no head": ["WorkersLostError", "UnsupportedError"],
        "other call": ["RanksDisagreeError"] * 2,
        "overflow": ["DomainError"] * 2,
        "corners": ["ShapeError"] * 2,
        "failed": ["WorkersLostError", "AttributeError"],
    }
    for what, kinds in expected.items():
        assert [rank["faults"][what][0] for rank in found[:2]] == kinds, what
    assert "rank 1 of" in found[0]["faults"]["wrong shape"][1]
    assert "rank 0 and rank 1 have different inputs" in found[0]["faults"]["other inputs"][1]
    assert all(rank["faults"]["nan"] == ["3"] and rank["faults"]["afterwards"] == ["True"] for rank in found)
    assert (
        found[1]["not a member"][0] == "UnsupportedError" and "not in the process group" in found[1]["not a member"][1]
    )


def test_a_rank_that_leaves_is_an_error_and_no_hang(found):
    for rank, own in enumerate(found):
        if rank != 1:
            kind, text = own["after a death"]
            assert kind == "WorkersLostError" and f"rank {rank} of {len(found)} could not exchange numbers" in text
            assert "Start all of them again" in text


@pytest.mark.gpu
@pytest.mark.skipif(not (torch.cuda.is_available() and dist.is_nccl_available()), reason="needs a GPU with NCCL")
def test_one_rank_with_nccl(tmp_path):
    torchrun(1, "sharded_cases.py", str(tmp_path), "nccl")
    found = [json.loads((tmp_path / "0.json").read_text())]
    check_ranks(found)
    assert max(max(found[0]["gradients"][name].values()) for name in GRADIENTS) <= 1e-12


# ---- the ranks of a group, one after the other in this process --------------------------------------------------------


class InTurn:
    """A group whose ranks run in turn: keeps the table of each, and answers as if the others had nothing to say."""

    def __init__(self, rank: int, ranks: int, tables: list[torch.Tensor]) -> None:
        self.rank, self.ranks, self.tables = rank, ranks, tables

    def done(self, call: str, compute: Callable[[], tuple[Any, dict[str, int]]]) -> Any:
        return compute()[0]

    def combined(self, own: torch.Tensor, combine: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        self.tables.append(own)
        return combine(own[None])

    def facts(self, call: str, compute: Callable[[], list[float]]) -> list[list[float]]:
        self.tables.append(list(compute()))
        return [self.tables[-1]]


def slices(head: DivisibleHead, ranks: int) -> list[ShardedHead]:
    return [ShardedHead(head, InTurn(rank, ranks, [])) for rank in range(ranks)]


def tables(head: DivisibleHead, ranks: int, z: torch.Tensor) -> torch.Tensor:
    """What every rank contributes, `(ranks, n, 3 + out)`."""
    collected = []
    for part in slices(head, ranks):
        part._exchange.tables.clear()
        part.sums(z)
        collected.append(part._exchange.tables[0])
    return torch.stack(collected)


@pytest.mark.parametrize("ranks", [1, 4, 7, 25, 400])
@pytest.mark.parametrize("name", ["grid", "sharp grid", "affine grid", "long line", "scattered and affine", "two keys"])
def test_any_number_of_ranks(name, ranks):
    make, box, _ = CASES[name]
    head = make()
    z = inputs(head, box, 30)
    whole = merged(tables(head, ranks, z))
    exact = Cells.of(head.state_dict()).in_floats(z.numpy())
    lse = whole[:, MAXIMUM] + whole[:, LOG_SUM]
    assert np.abs(whole[:, OUTPUT].numpy() - exact).max() <= 1e-12
    assert np.abs(lse.numpy() - log_sum_exp(head, z)).max() <= 1e-9 * max(1.0, float(lse.abs().max()))


def log_sum_exp(head: DivisibleHead, z: torch.Tensor) -> np.ndarray:
    """`log Σ_j exp(s_j)` over all keys, by numpy."""
    cells = Cells.of(head.state_dict())
    scores = -0.5 * (cells.rates * (z.numpy()[:, None] - cells.centers) ** 2).sum(axis=2)
    scores = scores + 0.5 * cells.rates[0] * cells.powers
    top = scores.max(axis=1)
    return top + np.log(np.exp(scores - top[:, None]).sum(axis=1))


def test_far_slices_are_left_out_and_only_those():
    head = grid((400,), 8.0)
    z = inputs(head, (-1, 1), 200)
    found = tables(head, 20, z)
    out = found[:, :, MAXIMUM] == -torch.inf
    assert 0.8 < float(out.double().mean()) < 0.95  # a query is near one slice or two
    assert bool((found[out][:, BOUND] > 0).all()) and bool((found[out][:, OUTPUT] == 0).all())
    cells = Cells.of(head.state_dict())
    scores = -0.5 * (cells.rates * (z.numpy()[:, None] - cells.centers) ** 2).sum(axis=2)
    weights = np.exp(scores - scores.max(axis=1, keepdims=True))
    weights = (weights / weights.sum(axis=1, keepdims=True)).reshape(len(z), 20, 20).sum(axis=2).T
    assert (weights[out.numpy()] <= found[out][:, BOUND].numpy()).all()
    assert np.abs(merged(found)[:, OUTPUT].numpy() - cells.in_floats(z.numpy())).max() < 1e-12


def test_the_bound_holds_in_exact_arithmetic():
    """Against balls of 200 bits, at points that are hard: ties, corners, cell edges, far beyond the centers."""
    ctx.prec = 200
    try:
        for head, box in (
            (grid((12, 6), 8.0), (-1.0, 1.0)),
            (grid((12, 6), 1e4, outputs=2), (-1.0, 1.0)),
            (grid((12, 6), 0.5, window=12, affine=True), (-1.5, 1.5)),
            (grid((12,), 8.0, box=(1e7, 1e7 + 1)), (1e7, 1e7 + 1)),
            (grid((12, 6), 8.0, dtype=torch.float32), (-1.0, 1.0)),
            (scattered(40, 200.0, powers=True, affine=True), (-1.0, 1.0)),
            (scattered(40, 200.0, copies=True), (-1.0, 1.0)),
            (scattered(40, 1000.0, far=True), (-1.0, 1.0)),
        ):
            middle, width = (box[0] + box[1]) / 2, box[1] - box[0]
            special = [[box[0]] * head.dimension, [box[1]] * head.dimension, [middle] * head.dimension]
            special += [[middle + width / 12 * k, middle][: head.dimension] for k in (-1, 0.5, 2)]
            z = torch.cat([torch.tensor(special, dtype=head.dtype), inputs(head, box, 3)])
            parts = slices(head, 3)
            facts = [part._exchange.tables for part in parts]
            for part in parts:
                part.running_terms(*corners(head, box))
            rows = [some[-1] for some in facts]
            terms = merged_of(parts[0], rows, corners(head, box))
            whole = merged(tables(head, 3, z))[:, OUTPUT]
            bound = sum(terms.values())
            for point, out in zip(z.double().tolist(), whole.double().tolist()):
                for exact, own in zip(Cells.of(head.state_dict()).in_balls(point), out):
                    assert float(abs(exact - own).upper()) <= bound
    finally:
        ctx.prec = 53


def merged_of(part: ShardedHead, rows: list[list[float]], ends: tuple[list[float], list[float]]) -> dict[str, float]:
    """The running terms of all ranks, from what each of them would send."""
    part._exchange.facts = lambda call, compute: (compute(), rows)[1]  # type: ignore[method-assign]
    return {term.name: term.value for term in part.running_terms(*ends)}


def test_the_bound_grows_with_what_it_depends_on():
    """Negative control: the terms are not constants."""

    def bound(head: DivisibleHead) -> dict[str, float]:
        part = slices(head, 1)[0]
        return {term.name: term.value for term in part.running_terms(*corners(head, (-1, 1)))}

    plain = bound(grid((20, 12), 8.0))
    assert bound(grid((20, 12), 1e4))["score rounding"] > 10 * plain["score rounding"]
    assert bound(grid((20, 12), 8.0, window=2))["window"] > 1e5 * plain["window"]
    assert bound(grid((20, 12), 8.0, dtype=torch.float32))["summation"] > 1e8 * plain["summation"]


def test_certificates_take_the_terms_of_slices():
    c = pa.compile("sin(3*x0) + x1**2", "[-1,1]^2", tolerance=1e-3)
    parts = slices(c.head, 2)
    for part in parts:
        part.running_terms([-1, -1], [1, 1])
    terms = merged_of(parts[0], [part._exchange.tables[-1] for part in parts], ([-1, -1], [1, 1]))
    proved = sum(t.value for t in c.certificate.terms if t.source != "rounding") + sum(terms.values())
    z = torch.rand(2000, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) * 2 - 1
    whole = merged(tables(c.head, 2, z))[:, 3]
    assert float((whole - (torch.sin(3 * z[:, 0]) + z[:, 1] ** 2)).abs().max()) <= proved <= c.error_bound + 1e-10


def test_hard_heads_have_small_terms_where_the_mean_error_is_known():
    c = pa.compile("sin(3*x0) + x1", "[-1,1]^2", tolerance=0.05, method="hard", dtype=torch.float32)
    approximation = next(t.value for t in c.certificate.terms if t.name == "approximation")
    part, ends = slices(c.head, 1)[0], ([-1.0, -1.0], [1.0, 1.0])
    plain, told = part.rounding_bound(*ends), part.running_terms(*ends, mean_error=approximation)
    proved = (
        approximation + sum(t.value for t in told) + sum(t.value for t in c.certificate.terms if t.source == "input")
    )
    z = torch.rand(2000, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 2 - 1
    seen = merged(tables(c.head, 3, z.float()))[:, 3].double() - (torch.sin(3 * z[:, 0]) + z[:, 1])
    assert float(seen.abs().max()) <= proved < c.error_bound * 1.01
    assert sum(t.value for t in told) < plain / 4 and [t.name for t in told] == [
        "window",
        "score rounding",
        "summation",
    ]
    with pytest.raises(DomainError, match="mean_error"):
        part.running_terms(*ends, mean_error=-1.0)


# ---- merging ----------------------------------------------------------------------------------------------------------


def parts_of(scores: torch.Tensor, values: torch.Tensor, ends: list[int]) -> torch.Tensor:
    """Tables of consecutive keys, for `(n, keys)` scores."""
    found = []
    for a, b in zip([0, *ends], [*ends, scores.shape[1]]):
        if a == b:
            found.append(nothing(scores, values.shape[1]))
            continue
        some, top = scores[:, a:b], scores[:, a:b].amax(dim=1)
        output = torch.softmax(some, dim=1) @ values[a:b]
        found.append(
            table(top, torch.exp(some - top[:, None]).sum(dim=1).log(), torch.zeros(len(some)).to(top), output)
        )
    return torch.stack(found)


@pytest.mark.parametrize("ends", [[], [3], [0, 0, 5], [1, 2, 3, 4, 5, 6, 7], [8, 8]])
@pytest.mark.parametrize("shift", [0.0, -1e5, 1e5])
def test_merging_is_one_softmax(ends, shift):
    generator = torch.Generator().manual_seed(4)
    scores = 30 * torch.randn(50, 8, generator=generator, dtype=torch.float64) + shift
    values = torch.randn(8, 2, generator=generator, dtype=torch.float64)
    whole = merged(parts_of(scores, values, ends))
    assert torch.allclose(whole[:, OUTPUT], torch.softmax(scores, dim=1) @ values, rtol=0, atol=1e-14)
    lse = torch.logsumexp(scores - shift, dim=1)
    assert torch.allclose(whole[:, MAXIMUM] - shift + whole[:, LOG_SUM], lse, rtol=0, atol=1e-10)


def test_merging_merged_tables_is_merging_all():
    generator = torch.Generator().manual_seed(5)
    scores, values = torch.randn(20, 9, generator=generator).double(), torch.randn(9, 2, generator=generator).double()
    three = parts_of(scores, values, [2, 6])
    two = torch.stack([merged(three[:2]), three[2]])
    assert torch.allclose(merged(two)[:, 3:], merged(three)[:, 3:], rtol=0, atol=1e-15)


def test_bounds_merge_with_the_weights_and_missing_slices_count_in_full():
    one = table(torch.zeros(1), torch.zeros(1), torch.full((1,), 0.1), torch.zeros(1, 1))
    two = table(torch.zeros(1), torch.full((1,), math.log(3.0)), torch.full((1,), 0.2), torch.zeros(1, 1))
    gone = nothing(torch.zeros(1, 1), 1, 0.01)
    expected = 0.25 * 0.1 + 0.75 * 0.2 + 0.01
    found = float(merged(torch.stack([one, two, gone]))[0, BOUND])
    assert expected <= found <= expected * (1 + 1e-5)


def test_the_gradient_of_merging_is_that_of_autograd():
    generator = torch.Generator().manual_seed(6)
    scores, values = (
        2 * torch.randn(10, 6, generator=generator).double(),
        torch.randn(6, 2, generator=generator).double(),
    )
    three = parts_of(scores, values, [1, 4]).requires_grad_()
    whole = merged(three)
    grad = torch.randn(whole.shape, generator=generator, dtype=torch.float64)
    grad[:, [MAXIMUM, BOUND]] = 0
    (expected,) = torch.autograd.grad(whole, three, grad)
    for own, right in zip(three.detach(), expected):
        found = merged_gradient(grad, own, whole.detach())
        assert torch.allclose(found[:, LOG_SUM], right[:, LOG_SUM], rtol=0, atol=1e-14)
        assert torch.allclose(found[:, OUTPUT], right[:, OUTPUT], rtol=0, atol=1e-14)


# ---- memory, refusals, doors ------------------------------------------------------------------------------------------


def test_only_the_slice_of_a_mapped_file_is_read(tmp_path):
    rows = 1 << 16
    np.zeros(rows * 64, dtype=np.float64).tofile(tmp_path / "values")  # 32 MiB
    mapped = torch.from_file(str(tmp_path / "values"), shared=True, size=rows * 64, dtype=torch.float64)
    cells = pa.ProductGrid.uniform(pa.Box([-1, -1], [1, 1]), (1 << 13, 512))
    head = GridHead(
        cells,
        [8.0 * (1 << 12) ** 2, 8.0 * 256**2],
        mapped[:, None],
        half_windows=4,
        input_shapes=((2,),),
        output_shape=(),
    )
    before = resident("values", tmp_path)
    part = ShardedHead(head, InTurn(3, 16, []))
    assert part.values.numel() == rows * 4 and part.values.untyped_storage().nbytes() == rows * 4 * 8
    read = resident("values", tmp_path) - before
    assert read <= rows * 4 * 8 + (1 << 20)  # one sixteenth of the file, and what the kernel maps around it


def resident(name: str, folder: Path) -> int:
    """Bytes of a mapped file that this process has touched."""
    maps = Path("/proc/self/smaps")
    if not maps.exists():
        pytest.skip("needs /proc")
    found, inside = 0, False
    for line in maps.read_text().splitlines():
        if not line[:1].isupper():
            inside = line.endswith(str(folder / name))
        elif inside and line.startswith("Rss:"):
            found += 1024 * int(line.split()[1])
    return found


def test_heads_that_cannot_be_divided_are_refused_with_what_to_do():
    train = pa.compile("sin(x0 + x1 + x2)", "[-1,1]^3", tolerance=0.1, method="train").head
    network = pa.compile("sin(3*x0) + cos(3*x1)", "[-1,1]^2", tolerance=0.1, method="heads").head
    compiled = pa.compile("sin(3*x0)", "[-1,1]", tolerance=0.1)
    for head, text in ((train, "keep a copy"), (network, "network.heads"), (compiled, "c.head"), (None, "NoneType")):
        with pytest.raises(UnsupportedError, match=text):
            ShardedHead(head, InTurn(0, 2, []))


def test_without_a_group_there_is_an_error_and_no_door():
    """Importing and failing to shard opens nothing that listens, and no connection."""
    script = """
import os, partita as pa
from sharded_cases import grid
try:
    pa.distributed.shard(grid((4, 4), 8.0))
except pa.PartitaError as error:
    print(type(error).__name__, error)
print([t for f in os.listdir("/proc/self/fd") if (t := os.path.realpath(f"/proc/self/fd/{f}")).split("/")[-1].startswith("socket")])
"""
    done = subprocess.run([sys.executable, "-c", script], env=ENVIRONMENT, capture_output=True, text=True, timeout=200)
    error, sockets = done.stdout.splitlines()
    assert error.startswith("UnsupportedError found no process group") and "torchrun" in error
    assert sockets == "[]"


def test_traces_are_refused():
    part = slices(grid((8, 8), 8.0), 1)[0]
    with pytest.raises(UnsupportedError, match="cannot be traced"):
        torch.func.vmap(part)(torch.zeros(2, 3, 2, dtype=torch.float64))


def test_values_can_be_trained_and_frozen():
    part = slices(grid((8, 8), 8.0), 2)[1]
    assert not list(part.named_parameters())
    assert [name for name, _ in part.unfreeze().named_parameters()] == ["values"]
    held = set(part.state_dict())
    assert not list(part.freeze().named_parameters()) and set(part.state_dict()) == held
    trained = slices(grid((8, 8), 8.0).unfreeze(), 2)[0]
    assert [name for name, _ in trained.named_parameters()] == ["values"]


def test_changed_values_count():
    head = grid((20, 12), 8.0)
    part, z = slices(head, 1)[0], inputs(head, (-1, 1), 5)
    before = part(z)
    part.values.mul_(2)
    assert torch.equal(part(z), 2 * before)
    part.load_state_dict(slices(head, 1)[0].state_dict())
    assert torch.equal(part(z), before)
