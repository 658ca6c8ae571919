"""What inspection costs: capture against the forward pass, and capture plus report of a 12 × 12-head encoder on 512 tokens.

    python benchmarks/inspection.py [--tokens 512] [--repeats 5] [--json FILE]

The encoder is randomly initialised (width 768, 12 layers of 12 heads), in evaluation mode, so torch takes its fused path.
Forward passes with and without capture alternate; the ratio is that of the medians. "processor" is the time of this process
on all its threads, which other work on the machine does not lengthen; "wall" is what one waits.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress
from torch import nn

import partita as pa
from partita.plots.model_page import write_inspection


def timed(call: Callable[[], Any]) -> tuple[float, float, Any]:
    """Processor seconds, wall seconds, and what came back."""
    processor, wall = time.process_time(), time.perf_counter()
    answer = call()
    return time.process_time() - processor, time.perf_counter() - wall, answer


def encoder(*, fused: bool) -> nn.TransformerEncoder:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(768, 12, 3072, batch_first=True)
    model = nn.TransformerEncoder(layer, 12, enable_nested_tensor=False)
    for parameter in model.parameters():  # the layers are copies of one; make them differ
        if parameter.dim() > 1:
            nn.init.xavier_uniform_(parameter)
    return model.eval().requires_grad_(not fused)


def capture_ratio(model: nn.Module, x: torch.Tensor, repeats: int) -> dict[str, float]:
    """Medians of a forward pass without and with capture, and their ratio."""

    def plain() -> None:  # nothing is returned: graphs and records that pile up would be timed too
        model(x)

    def captured() -> None:
        with pa.inspect.capture(model):
            model(x)

    plain()
    captured()  # the first capture imports what torch's modes need
    pairs = [(timed(plain)[0], timed(captured)[0]) for _ in range(repeats)]
    before, after = (statistics.median(p[k] for p in pairs) for k in range(2))
    return {"forward": before, "captured": after, "ratio": after / before}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    out, x = Console(), torch.randn(1, options.tokens, 768, generator=torch.Generator().manual_seed(1))
    results: dict[str, Any] = {"tokens": options.tokens, "threads": torch.get_num_threads()}
    for name, fused in (("fused", True), ("unfused, with gradients", False)):
        results[name] = row = capture_ratio(encoder(fused=fused), x, options.repeats)
        out.print(
            f"{name}: forward {row['forward']:.2f} s, with capture {row['captured']:.2f} s processor: {row['ratio']:.2f}×"
        )
    model = encoder(fused=True)

    def everything() -> pa.inspect.ModelReport:
        with pa.inspect.capture(model) as heads:
            model(x)
        with Progress(console=Console(stderr=True)) as bar:
            task = bar.add_task("reading", total=144)
            return pa.inspect.read(heads, progress=lambda _, done, of: bar.update(task, completed=done, total=of))

    processor, wall, report = timed(everything)
    model_row = report.model()
    results["capture and report"] = {"processor": processor, "wall": wall, "programs": model_row["programs"]}
    out.print(
        f"{len(report.heads)} heads on {options.tokens} tokens captured and reported: {processor:.1f} s processor, "
        f"{wall:.1f} s wall; "
        f"{model_row['programs']:.0f} linear programs, {model_row['undecided']:.0f} keys undecided"
    )
    with pa.inspect.capture(model) as heads:
        model(x)
    with tempfile.TemporaryDirectory() as folder:
        processor, wall, page = timed(lambda: write_inspection(heads, Path(folder) / "page"))
        size = page.files[0].stat().st_size
    results["report and page"] = {"processor": processor, "wall": wall, "bytes of index.html": size}
    out.print(
        f"the same with its page (SVG, PNG, HTML): {processor:.1f} s processor, {wall:.1f} s wall; "
        f"index.html {size / 1e6:.2f} MB"
    )
    if options.json:
        options.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
