"""Grid heads of this checkout beside those of another one: two processes that answer in turn, for `speed.py --before FOLDER`.

As a program it is one of the two: it makes the heads, and for every line on its input it times each of them once.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

GRIDS = [(m, round(10 ** (power / m))) for m in range(1, 7) for power in (4, 7)]
QUICK = [(2, 8), (3, 4)]


def compare(before: Path, quick: bool, repeats: int = 15) -> list[tuple[int, int, float, float]]:
    """m, centers per axis, nanoseconds per query there and here: the fastest of the repeats."""
    here = Path(__file__).parent.parent
    running = []
    for folder in (before, here):
        environment = {**os.environ, "PYTHONPATH": str(folder)}
        command = [sys.executable, __file__, "quick" if quick else "full"]
        running.append(
            subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)
        )
    taken: list[list[list[float]]] = [[], []]
    for process in running:  # both are ready before either is timed
        assert process.stdout is not None
        process.stdout.readline()
    for _ in range(3 if quick else repeats):
        for process, times in zip(running, taken):
            assert process.stdin is not None and process.stdout is not None
            process.stdin.write("again\n")
            process.stdin.flush()
            times.append(json.loads(process.stdout.readline()))
    for process in running:
        process.communicate()
    there, now = ([min(each) for each in zip(*times)] for times in taken)
    return [(m, count, a, b) for (m, count), a, b in zip(QUICK if quick else GRIDS, there, now)]


def serve(quick: bool) -> None:
    """Answer on the output, one list of nanoseconds per line."""
    import time

    import numpy as np
    import torch

    import partita as pa
    from partita.heads import GridHead

    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    jobs = []
    for m, count in QUICK if quick else GRIDS:
        rng = np.random.default_rng(0)
        grid = pa.ProductGrid.uniform(pa.Box([0.0] * m, [1.0] * m), count, dtype=np.float64)
        values, shapes = torch.from_numpy(rng.random((count**m, 1))), {"input_shapes": ((m,),), "output_shape": ()}
        head = GridHead(grid, 64.0 * count**2, values, half_windows=1, **shapes)
        z = torch.from_numpy(rng.random((4_000 if quick else 100_000, m)))
        head(z)
        jobs.append((head, z))
    print("ready", flush=True)
    for _ in sys.stdin:
        found = []
        for head, z in jobs:
            began = time.perf_counter()
            head(z)
            found.append((time.perf_counter() - began) / len(z) * 1e9)
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    serve(sys.argv[1] == "quick")
