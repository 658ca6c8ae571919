"""The command `partita bounds`: what is proved about a head besides its error."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import partita as pa
from partita.cli.common import AsJson, Folder, emit, shown_progress
from partita.errors import UnsupportedError

__all__ = ["bounds_command"]


def bounds_command(folder: Folder, as_json: AsJson = False) -> None:
    """Prove the range of every output, the error of the gradient, and where the head rises or falls."""
    compiled = pa.load(folder)
    with shown_progress("proof") as progress:
        data: dict[str, Any] = {"range": [asdict(r) for r in compiled.bound_range(progress=progress)]}
        try:
            slopes = [compiled.bound_slope(i, progress=progress) for i in range(compiled.head.dimension)]
            data["slopes"] = [[{**asdict(r), "trend": r.trend} for r in ranges] for ranges in slopes]
            data["gradient_error"] = asdict(compiled.bound_gradient_error(progress=progress))
        except UnsupportedError as error:
            data["gradients"] = str(error)
    emit(data, as_json, _in_words(data))


def _in_words(data: dict[str, Any]) -> str:
    """The same, line by line."""
    lines = [
        f"output {k} lies in [{r['lo']:.6g}, {r['hi']:.6g}]  (seen: {r['seen_lo']:.6g} to {r['seen_hi']:.6g})"
        for k, r in enumerate(data["range"])
    ]
    for i, ranges in enumerate(data.get("slopes", [])):
        for k, r in enumerate(ranges):
            trend = r["trend"] if r["trend"] != "unknown" else "no trend is proved"
            lines.append(f"∂output {k}/∂x{i} lies in [{r['lo']:.6g}, {r['hi']:.6g}]: {trend}")
    if "gradient_error" in data:
        pairs = zip(data["gradient_error"]["bounds"], data["gradient_error"]["seen"])
        lines += [f"|∂f/∂x{i} − ∂net/∂x{i}| ≤ {b:.4g}  (seen: {s:.4g})" for i, (b, s) in enumerate(pairs)]
    return "\n".join([*lines, *([data["gradients"]] if "gradients" in data else [])])
