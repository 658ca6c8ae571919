"""What every process of `test_sharded_heads.py` runs under torchrun: it shards heads, and writes what it found as JSON.

torchrun --standalone --nproc-per-node 2 tests/sharded_cases.py FOLDER [gloo|nccl]
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

import partita as pa
from partita.errors import PartitaError
from partita.heads import GridHead, ScatteredHead
from partita.heads.head import DivisibleHead

Box = tuple[float, float]


def numbers(generator: torch.Generator, *shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)


def grid(
    counts: tuple[int, ...],
    sharpness: float,
    *,
    box: Box = (-1.0, 1.0),
    outputs: int = 1,
    window: int = 4,
    affine: bool = False,
    dtype: torch.dtype = torch.float64,
) -> GridHead:
    generator, m = torch.Generator().manual_seed(1), len(counts)
    number = np.float64 if dtype == torch.float64 else np.float32
    cells = pa.ProductGrid.uniform(pa.Box([box[0]] * m, [box[1]] * m), counts, dtype=number)
    values = numbers(generator, cells.num_cells, outputs, dtype=dtype)
    return GridHead(
        cells,
        [sharpness * (count / (box[1] - box[0])) ** 2 for count in counts],
        values,
        value_slopes=numbers(generator, cells.num_cells, outputs, m, dtype=dtype) if affine else None,
        half_windows=window,
        input_shapes=((m,),),
        output_shape=(outputs,),
    )


def scattered(
    count: int,
    rate: float,
    *,
    dimension: int = 2,
    outputs: int = 1,
    affine: bool = False,
    powers: bool = False,
    far: bool = False,
    copies: bool = False,
    dtype: torch.dtype = torch.float64,
) -> ScatteredHead:
    generator = torch.Generator().manual_seed(2)
    centers = torch.rand(count, dimension, generator=generator, dtype=torch.float64).to(dtype) * 2 - 1
    if far:  # the second half of the keys: scores near −10⁵ wherever the queries are
        centers[count // 2 :] += 14
    if copies:  # ties: every key once in each half
        centers[count // 2 :] = centers[: count - count // 2]
    return ScatteredHead(
        centers,
        rate,
        numbers(generator, count, outputs, dtype=dtype),
        powers=0.01 * numbers(generator, count, dtype=dtype).abs() if powers else None,
        value_slopes=numbers(generator, count, outputs, dimension, dtype=dtype) if affine else None,
        input_shapes=((dimension,),),
        output_shape=(outputs,),
    )


# name: head, box of the inputs, how many inputs
CASES: dict[str, tuple[Callable[[], DivisibleHead], Box, int]] = {
    "grid": (lambda: grid((20, 12), 8.0, outputs=2), (-1.2, 1.2), 40),
    "sharp grid": (lambda: grid((30, 4), 1e3), (-1, 1), 40),
    "soft grid": (lambda: grid((20, 12), 0.1, window=20), (-1, 1), 40),
    "affine grid": (lambda: grid((20, 12), 4.0, outputs=2, affine=True), (-1, 1), 40),
    "short first axis": (lambda: grid((2, 40), 8.0), (-1, 1), 40),
    "long line": (lambda: grid((400,), 8.0), (-1, 1), 40),
    "large coordinates": (lambda: grid((40, 4), 8.0, box=(1e6, 1e6 + 1)), (1e6, 1e6 + 1), 40),
    "float32": (lambda: grid((20, 12), 8.0, outputs=2, dtype=torch.float32), (-1, 1), 40),
    "bfloat16": (lambda: grid((20, 12), 8.0, dtype=torch.bfloat16), (-1, 1), 40),
    "two keys": (lambda: grid((2, 1), 8.0), (-1, 1), 40),
    "one key": (lambda: grid((1, 1), 8.0), (-1, 1), 5),
    "one input": (lambda: grid((20, 12), 8.0), (-1, 1), 1),
    "no input": (lambda: grid((20, 12), 8.0), (-1, 1), 0),
    "scattered": (lambda: scattered(300, 300.0, outputs=3), (-1, 1), 40),
    "scattered and affine": (lambda: scattered(300, 300.0, affine=True, powers=True), (-1, 1), 40),
    "scattered float32": (lambda: scattered(300, 300.0, powers=True, dtype=torch.float32), (-1, 1), 40),
    "far keys": (lambda: scattered(40, 1000.0, far=True), (-1, 1), 40),
    "ties": (lambda: scattered(40, 300.0, copies=True), (-1, 1), 40),
    "one scattered key": (lambda: scattered(1, 10.0), (-1, 1), 5),
}
GRADIENTS = "grid", "affine grid", "two keys", "scattered and affine", "one scattered key", "far keys"


def inputs(head: DivisibleHead, box: Box, count: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(3)
    z = torch.rand(count, head.dimension, generator=generator, dtype=torch.float64)
    return (box[0] + z * (box[1] - box[0])).to(head.dtype)


def corners(head: DivisibleHead, box: Box) -> tuple[list[float], list[float]]:
    return [box[0]] * head.dimension, [box[1]] * head.dimension


def compared(name: str, device: str, alone: Any) -> dict[str, Any]:
    """One case: outputs, bounds and sizes on this rank."""
    make, box, count = CASES[name]
    head = make().to(device)
    z = inputs(head, box, count).to(device)
    whole, sharded = pa.distributed.shard(head, alone), pa.distributed.shard(head)
    out, one, table = sharded(z), head(z), sharded.sums(z)
    held = {key: t.numel() for key, t in sharded.state_dict().items()}
    return {
        "bits": hashlib.sha256(out.cpu().numpy().tobytes() + table.cpu().numpy().tobytes()).hexdigest(),
        "outputs": out.double().tolist(),
        "difference": float((out - one).abs().max()) if count else 0.0,
        "merged alone": float((whole(z) - one).abs().max()) if count else 0.0,
        "bound": sharded.rounding_bound(*corners(head, box)),
        "bound of one": whole.rounding_bound(*corners(head, box)),
        "terms": [term.name for term in sharded.running_terms(*corners(head, box))],
        "left out": float(table[:, 2].max()) if count else 0.0,
        "window": sharded.running_terms(*corners(head, box))[0].inputs["mass"],
        "keys": sharded.own_keys,
        "all keys": head.num_keys,
        "held": held,
        "of head": {key: t.numel() for key, t in head.state_dict().items()},
    }


def trained(module: Any, z: torch.Tensor) -> dict[str, torch.Tensor]:
    """The gradients of a loss in inputs and all tensors."""
    module.unfreeze()
    for key, buffer in module.named_buffers():
        if key not in ("before", "after", "origin"):
            buffer.requires_grad_()
    z = z.clone().requires_grad_()
    (module(z) ** 2).sum().backward()
    tensors = {**dict(module.named_parameters()), **dict(module.named_buffers()), "z": z}
    return {key: t.grad for key, t in tensors.items() if t.grad is not None}


def gradients(name: str, device: str) -> dict[str, float]:
    """How far the gradients on this rank are from those of one process, relative to the largest."""
    make, box, count = CASES[name]
    head = make().to(device)
    z = inputs(head, box, count).to(device)
    sharded = pa.distributed.shard(head)
    own, expected, found = trained(sharded, z), trained(head, z), {}
    for key, grad in expected.items():
        if key in head.divided(sharded.axis):
            places = torch.arange(head.num_keys).reshape(head.key_counts)
            cut = places.narrow(sharded.axis, sharded.start, sharded.stop - sharded.start).flatten()
            part = grad[sharded.start : sharded.stop] if key.startswith("centers") else grad[cut.to(device)]
            if not part.numel():
                continue
        else:
            part = grad
        off = float((own[key] - part).abs().max())
        found[key] = off / float(grad.abs().max()) if grad.abs().max() > 0 else off
    return found


def refused(call: Callable[[], object]) -> list[str]:
    """The class and the text of the error that a call raises."""
    try:
        call()
    except (PartitaError, ZeroDivisionError) as error:
        return [type(error).__name__, str(error)]
    return []


def faults(rank: int) -> dict[str, list[str]]:
    """What goes wrong on one rank only; the group can be used afterwards."""
    head = grid((20, 12), 8.0)
    sharded = pa.distributed.shard(head)
    z = inputs(head, (-1, 1), 8)

    def fails() -> torch.Tensor:
        if rank == 1:
            sharded._buffers["values"] = None  # a process that cannot compute its part
        try:
            return sharded(z)
        finally:
            if rank == 1:
                sharded._buffers["values"] = kept

    kept = sharded._buffers["values"]
    found = {
        "other inputs": refused(lambda: sharded(z + (rank == 1) * 1e-15)),
        "more inputs": refused(lambda: sharded(z[: len(z) - rank])),
        "wrong shape": refused(lambda: sharded(z[:, : 2 - (rank == 1)])),
        "other gradients": refused(lambda: sharded(z.clone().requires_grad_(rank == 1))),
        "other head": refused(lambda: pa.distributed.shard(grid((20, 12), 8.0 + (rank == 1)))),
        "no head": refused(lambda: pa.distributed.shard("head" if rank == 1 else head)),
        "other call": refused(lambda: sharded.rounding_bound([-1, -1], [1, 1]) if rank == 1 else sharded(z)),
        "overflow": refused(lambda: sharded(z * 1e200)),
        "corners": refused(lambda: sharded.rounding_bound([-1], [1])),
    }
    try:
        fails()
    except Exception as error:
        found["failed"] = [type(error).__name__, str(error)]
    nan = z.clone()
    nan[3] = torch.nan
    rows = sharded(nan).isnan().any(dim=1).tolist()
    found["nan"] = [str(i) for i, row in enumerate(rows) if row]
    found["afterwards"] = [str(float((sharded(z) - head(z)).abs().max()) < 1e-13)]
    return found


def main() -> None:
    folder, backend = Path(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else "gloo"
    if backend == "nccl":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group(backend, timeout=timedelta(seconds=60))
    rank, device = dist.get_rank(), "cuda" if backend == "nccl" else "cpu"
    alone = [dist.new_group([r]) for r in range(dist.get_world_size())][rank]
    found = {
        "cases": {name: compared(name, device, alone) for name in CASES},
        "gradients": {name: gradients(name, device) for name in GRADIENTS},
        "faults": faults(rank) if dist.get_world_size() > 1 else {},
    }
    if dist.get_world_size() > 1:
        others = dist.new_group([0])
        found["not a member"] = refused(lambda: pa.distributed.shard(grid((4, 4), 8.0), others)) if rank else []
    sharded, z = pa.distributed.shard(grid((20, 12), 8.0).to(device)), torch.zeros(3, 2).to(device).double()
    if rank == 1:  # which dies here, without a word
        (folder / f"{rank}.json").write_text(json.dumps(found))
        os._exit(0)
    found["after a death"] = refused(lambda: sharded(z))
    (folder / f"{rank}.json").write_text(json.dumps(found))
    os._exit(0)  # a group without one of its processes cannot be closed


if __name__ == "__main__":
    main()
