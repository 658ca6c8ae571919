"""A process of a group that dies: rank 1 leaves without a word, the others say what they see. For `test_sharded_heads.py`."""

from __future__ import annotations

import os
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from sharded_cases import grid

import partita as pa
from partita.errors import WorkersLostError

if __name__ == "__main__":
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    sharded, z = pa.distributed.shard(grid((20, 12), 8.0)), torch.zeros(3, 2, dtype=torch.float64)
    sharded(z)
    if dist.get_rank() == 1:
        os._exit(0)
    try:
        sharded(z)
    except WorkersLostError as error:
        (Path(sys.argv[1]) / f"{dist.get_rank()}.txt").write_text(str(error))
    os._exit(0)
