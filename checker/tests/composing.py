"""Networks of heads, put together by hand from heads that the producer compiled, in the format of docs/format.md."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

from forging import Files, put_together, take_apart

import partita as pa
from partita.functions.expressions import parse

Number = float | Fraction
Row = tuple[Mapping[int, Number], Number]  # weights by channel, and the bias


def stored(x: Number, dtype: str) -> float:
    number = float(x)
    return float(struct.unpack("<f", struct.pack("<f", number))[0]) if dtype == "float32" else number


def affine(rows: Sequence[Row], width: int, dtype: str) -> tuple[dict[str, Any], list[float], list[float]]:
    """The record of a map, its stored weights and its stored biases."""
    listed, weights, biases, exact = [], list[float](), list[float](), []
    for place, (row, bias) in enumerate(rows):
        held = {j: stored(w, dtype) for j, w in sorted(row.items())}
        others = [j for j, w in held.items() if w not in (0.0, 1.0)]
        constant = stored(bias, dtype)
        listed.append([[j for j, w in held.items() if w == 1.0], others, constant != 0])
        weights += [held[j] for j in others]
        biases += [constant] if constant else []
        true = {**row, -1: bias}
        for column, value in true.items():
            now = Fraction(constant if column == -1 else held[column])
            if Fraction(value) != now:
                f = Fraction(value)
                exact.append([place, column, f"{f.numerator}/{f.denominator}"])
    record: dict[str, Any] = {"start": 0, "width": width, "rows": listed}
    if len(rows) and all(len(r[1]) == width and r[2] for r in listed):
        record |= {"rows": len(rows), "dense": True}
    return (record | {"exact": exact} if exact else record), weights, biases


def compose(
    folder: Path,
    place: Path,
    box: pa.Box,
    parts: Sequence[pa.Compiled],
    layers: Sequence[Sequence[tuple[int, Sequence[Row]]]],
    output: Sequence[Row],
    *,
    bound: float,
    function: str | None,
    dtype: str = "float64",
) -> Path:
    """Save a network: `layers` holds groups (head, rows); `function` None makes the wiring its own function."""
    apart = [take_apart(part.save(place / f"part-{i}", overwrite=True)) for i, part in enumerate(parts)]
    code = {"float64": "F64", "float32": "F32"}[dtype]
    tensors: dict[str, list[Any]] = {}
    for i, files in enumerate(apart):
        tensors |= {f"head.heads.{i}.{name.removeprefix('head.')}": t for name, t in files.tensors.items()}
    channels, records = box.dimension, []

    def add(name: str, rows: Sequence[Row]) -> dict[str, Any]:
        record, weights, biases = affine(rows, channels, dtype)
        for last, numbers in (("weight", weights), ("bias", biases)):
            if numbers:
                tensors[f"head.{name}.{last}"] = [code, [len(numbers)], numbers]
        return record

    for level, layer in enumerate(layers):
        groups = [{"head": head, "reads": add(f"layers.{level}.{g}", rows)} for g, (head, rows) in enumerate(layer)]
        channels += sum(len(rows) // len(apart[head].boxes[0]["lo"]) for head, rows in layer)
        records.append(groups)
    out = add("output", output)
    shape = [] if len(output) == 1 else [len(output)]
    record = {
        "type": "network",
        "heads": [files.description["head"] for files in apart],
        "layers": records,
        "output": out,
        "input_shapes": [[box.dimension]],
        "output_shape": shape,
        "dtype": dtype,
    }
    domain = {"type": "box", "shape": [box.dimension]}
    domain |= {"lo": [x.hex() for x in box.lo.tolist()], "hi": [x.hex() for x in box.hi.tolist()]}
    listed = [
        {
            "graph": files.certificate["function"]["graph"],
            "box": {end: files.boxes[0][end] for end in ("lo", "hi")},
            "certificate": files.certificate,
        }
        for files in apart
    ]
    described: dict[str, Any] = {"label": function or "by definition", "graph": None}
    if function is None:
        certified = {"type": "network", "text": "by definition", "sha256": ""}
    else:
        graph = parse(function, [f"x{i}" for i in range(box.dimension)]).to_json()
        described["graph"], certified = graph, {"type": "graph", "text": function, "graph": graph, "sha256": ""}
    certificate = {
        "schema": 2,
        "kind": "proved",
        "norm": "inf",
        "semantics": dtype,
        "tolerance": float(bound).hex(),
        "error_bound": float(bound).hex(),
        "error_estimate": None,
        "samples": 0,
        "terms": [],
        "assumptions": [],
        "theorem": "carried-errors",
        "function": certified,
        "domain": {"arguments": [domain]},
        "model": {"sha256": "", "type": "network"},
        "known": {},
        "facts": {},
        "witness": None,
        "environment": {},
        "seed": 0,
        "proof": {"method": "network", "parts": listed, "meaning": "wiring" if function is None else "graph"},
    }
    description = {
        "format": "partita-head",
        "version": 1,
        "head": record,
        "domains": [domain],
        "target": described,
        "outside": "raise",
        "why": [],
    }
    return put_together(Files(tensors, description, certificate), folder)
