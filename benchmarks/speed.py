"""How fast heads are, beside their peers, with the errors beside the times and the targets beside the figures.

    python benchmarks/speed.py [--out FILE.json]          # CPU, one thread, about ten minutes
    python benchmarks/speed.py --gpu [--out FILE.json]    # a CUDA device, about three minutes
    python benchmarks/speed.py --plot                     # pictures and tables of docs/benchmarks.md from benchmarks/results/*.json

Options: `--only SECTION …`, `--quick` (tiny sizes), `--large` (10⁹ cells), `--before FOLDER` (an earlier checkout beside this one).

All evaluators of a table answer the same queries in the same run, in turn. On the CPU the fastest repeat counts, on a GPU the
median. Errors are against exact references in float64 or extended precision. Peers that are not installed are named as such:
`pip install -e ".[bench]"` installs them. The exit code is 0 even if a target is missed; the tables say which.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

for _name in ("OMP", "OPENBLAS", "MKL", "NUMBA", "RAYON"):
    os.environ.setdefault(f"{_name}_NUM_THREADS", "1")  # before numpy is imported

sys.path.insert(0, str(Path(__file__).parent))  # its neighbours, also if another program runs this file

RESULTS = Path(__file__).parent / "results"
CPU = ("error", "scattered", "grids", "point", "growth")
GPU = ("gpu-scattered", "gpu-grids", "gpu-fitted", "gpu-trains")


def arguments(given: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpu", action="store_true", help="the sections for a CUDA device")
    parser.add_argument("--quick", action="store_true", help="tiny sizes: whether it runs, not how fast")
    parser.add_argument("--large", action="store_true", help="10⁹ cells as well: 4 GB on disk")
    parser.add_argument("--only", nargs="+", choices=[*CPU, *GPU], metavar="SECTION", help=", ".join([*CPU, *GPU]))
    parser.add_argument(
        "--out", type=Path, help="write everything measured to this file; sections in it that are not run stay"
    )
    parser.add_argument(
        "--plot", action="store_true", help="draw pictures and fill docs/benchmarks.md from stored results"
    )
    parser.add_argument(
        "--device", default="cuda", help="for --gpu: `cpu` tries the sections without a GPU, with --quick"
    )
    parser.add_argument(
        "--before", type=Path, help="an earlier checkout of partita, whose grid heads are timed beside these"
    )
    parser.add_argument("--memory-of", help=argparse.SUPPRESS)
    return parser.parse_args(given)


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Run the sections, print each as it ends, and return everything."""
    import torch
    from speed_measure import machine, machine_lines, rendered

    torch.set_num_threads(1)
    torch.set_grad_enabled(options.gpu)
    if options.gpu and options.device == "cuda" and not torch.cuda.is_available():
        raise SystemExit(
            "--gpu: torch finds no CUDA device; expected one (--quick --device cpu tries the program without)."
        )
    if options.gpu:
        from speed_gpu import SECTIONS
    else:
        from speed_cpu import SECTIONS
    wanted = options.only or (GPU if options.gpu else CPU)
    if unknown := set(wanted) - set(SECTIONS):
        raise SystemExit(
            f"--only {' '.join(sorted(unknown))}: expected {', '.join(SECTIONS)} {'with' if options.gpu else 'without'} --gpu."
        )
    found = {"machine": machine(options.device if options.gpu else "cpu"), "quick": options.quick, "sections": {}}
    kept = json.loads(options.out.read_text())["sections"] if options.out and options.out.exists() else {}
    print("\n".join(machine_lines(found["machine"])), flush=True)
    for name in wanted:
        began = time.perf_counter()
        section = SECTIONS[name](options)
        section.seconds = time.perf_counter() - began
        found["sections"][name] = asdict(section)
        print(f"\n== {name}: {section.about} ({section.seconds:.0f} s)\n\n{rendered(asdict(section))}", flush=True)
        if options.out:
            options.out.parent.mkdir(parents=True, exist_ok=True)
            merged = {**found, "sections": {**kept, **found["sections"]}}
            options.out.write_text(json.dumps(merged, ensure_ascii=False) + "\n", encoding="utf-8")
    return found


def main() -> int:
    options = arguments()
    if options.memory_of:
        from speed_cpu import memory_of

        print(json.dumps(memory_of(*map(int, options.memory_of.split(",")))))
    elif options.plot:
        from speed_report import report

        for path in report(RESULTS, Path(__file__).parent.parent / "docs"):
            print(path)
    else:
        measure(options)
    return 0


if __name__ == "__main__":
    sys.exit(main())
