"""One head on several processes, each with a slice of its keys.

    torchrun --standalone --nproc-per-node 2 examples/sharded_head.py

On several machines, name the first one: torchrun --nnodes 4 --nproc-per-node 1 --rdzv-backend c10d --rdzv-endpoint HOST:29500 …
Without torchrun this is a group of one process.
"""

import os

import torch
import torch.distributed as dist

import partita as pa


def main() -> None:
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    first = dist.get_rank() == 0

    c = pa.compile("sin(3*x0) + x1**2", "[-1,1]^2", tolerance=0.01, method="hard")
    sharded = pa.distributed.shard(c.head)
    for rank in range(sharded.ranks):  # one after the other
        dist.barrier()
        if rank == sharded.rank:
            print(f"rank {rank} holds {sharded.own_keys:,} of {sharded.num_keys:,} keys", flush=True)

    generator = torch.Generator().manual_seed(0)
    z = torch.rand(10_000, 2, dtype=torch.float64, generator=generator) * 2 - 1
    out = sharded(z)
    away = float((out - c.head(z)).abs().max())
    approximation = sum(t.value for t in c.certificate.terms if t.source != "rounding")
    rounding = sharded.rounding_bound([-1, -1], [1, 1])
    if first:
        print(f"differs from one process by {away:.0e} at most")
        print(f"proved error: {approximation:.6f} of the head + {rounding:.0e} of running it in slices")

    sharded.unfreeze()  # training: every process moves its own values
    optimizer = torch.optim.Adam(sharded.parameters(), lr=1e-3)
    target = torch.sin(3 * z[:, 0]) + z[:, 1] ** 2
    for _ in range(20):
        loss = ((sharded(z) - target) ** 2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    if first:
        before = float(((out - target) ** 2).mean())
        print(f"mean squared error {before:.2e} before, {float(loss.detach()):.2e} after 20 steps")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
