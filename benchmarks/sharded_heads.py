"""What a head on several processes costs: bytes and time per query of the exchange, and of the sums of each process.

    torchrun --standalone --nproc-per-node 2 benchmarks/sharded_heads.py

Prints one row per batch, and the two numbers of the line `time = latency + slope · queries`. On one machine all processes share
its cores, and the loopback device stands for the network. With OMP_NUM_THREADS=1 and at most one process per core, the slopes are
those of machines with one core and a fast network.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import torch
import torch.distributed as dist

import partita as pa
from partita.distributed.exchange import Exchange
from partita.heads import GridHead
from partita.kernels.partial_sums import NUMBERS, merged

BATCHES = 1, 1_000, 10_000, 100_000
CELLS = 1_000, 1_000


def head() -> GridHead:
    """A million cells in two variables, one output."""
    grid = pa.ProductGrid.uniform(pa.Box([-1, -1], [1, 1]), CELLS)
    values = torch.rand(grid.num_cells, 1, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    rates = [8.0 * (n / 2) ** 2 for n in CELLS]
    return GridHead(grid, rates, values, half_windows=4, input_shapes=((2,),), output_shape=())


def timed(work: Callable[[], object], repeats: int = 7) -> float:
    """The shortest of some runs, in seconds, on the slowest process."""
    work()
    best = float("inf")
    for _ in range(repeats):
        dist.barrier()
        start = time.perf_counter()
        work()
        best = min(best, time.perf_counter() - start)
    slowest = torch.tensor(best, dtype=torch.float64)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return float(slowest)


def line(times: list[float]) -> str:
    """Latency and slope, the slope from the two largest batches."""
    slope = (times[-1] - times[-2]) / (BATCHES[-1] - BATCHES[-2])
    return f"{times[0] * 1e3:.2f} ms + {slope * 1e9:,.0f} ns per query"


def main() -> None:
    dist.init_process_group("gloo")
    exchange, ranks = Exchange(), dist.get_world_size()
    whole = head()
    sharded = pa.distributed.shard(whole)
    generator = torch.Generator().manual_seed(1)
    rows, found = [], []
    for n in BATCHES:
        z = torch.rand(n, 2, generator=generator, dtype=torch.float64) * 2 - 1
        own = torch.rand(n, NUMBERS + 1, generator=generator, dtype=torch.float64)
        agreement = np.abs((sharded(z) - whole(z)).numpy()).max()
        assert agreement < 1e-13, agreement
        found.append(
            (
                timed(lambda own=own: exchange.combined(own, merged)),
                timed(lambda z=z: sharded(z)),
                timed(lambda z=z: whole(z)),
            )
        )
        rows.append(f"{n:9,} {' '.join(f'{1e3 * t:10.2f}' for t in found[-1])}")
    if dist.get_rank() == 0:
        sent = 2 * (ranks - 1) / ranks * (NUMBERS + 1) * 8
        print(f"{ranks} processes, {whole.num_keys:,} cells, {torch.get_num_threads()} thread(s) each")
        print(f"each process sends and receives {sent:.0f} bytes per query: 2 · (ranks − 1)/ranks · (3 + outputs) · 8")
        print(
            "  queries   merge ms   whole ms  alone ms   (merge: exchange only; whole: with the sums; alone: one process)"
        )
        print("\n".join(rows))
        for name, times in zip(("merge", "whole", "alone"), zip(*found)):
            print(f"{name}: {line(list(times))}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
