"""A head's weights as a folder: every matrix as numbers and as a picture, and a page that lists them."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from partita.compiler.compiled import Compiled
from partita.geometry.domains import Array
from partita.plots.html_blocks import Block, Code, Grid, Heading, Picture, Text, as_html
from partita.plots.layer_matrices import LayersAt, Matrix, layers_at
from partita.plots.layer_plots import HOW_TO_READ, attention_figure, draw_flow, matrix_figure
from partita.plots.style import save, styled
from partita.storage import require_free, whole_folder

__all__ = ["SUMMARY", "write_layers"]

SUMMARY = "layers.json"


def write_layers(
    compiled: Compiled,
    folder: str | os.PathLike[str],
    *,
    form: str = "log",
    at: Sequence[float] | Array | None = None,
    dtype: torch.dtype | None = None,
    tolerance: float | None = None,
    pictures: bool = True,
    overwrite: bool = False,
) -> Path:
    """Write every matrix of a head in the paper's form to a folder, all of it or nothing.

    `index.html` lists the matrices with their shapes and places in the paper and shows them. `tensors.npz` has all numbers, the
    stored tensors under their names in the module. Each matrix is also a CSV file, whose first lines start with # and name it and
    its blocks, and an SVG. `layers.svg` shows all on one page, `attention.svg` the attention matrix beside the indicator it
    approximates. `layers.json` has the figures of the page. Without pictures there is no SVG, and it takes a tenth of the time.

    Args:
        compiled: the head.
        folder: where to write. Parents are created.
        form: "log" (the paper's) or "indexed" (ours).
        at: the input, flat, `(m,)`; three tenths of the way along every axis if None.
        dtype: torch.float64 or torch.float32; that of the head if None.
        tolerance: the largest error of the layers to accept; that of the head if None.
        pictures: draw the matrices, which needs matplotlib and takes seconds.
        overwrite: replace such a folder if it exists.

    Returns:
        The folder.

    Raises:
        SizeError: the matrices have more than 2²⁴ numbers.
        ShapeError: the input has another length.
        OutsideDomainError: the input lies outside the domain.
        ToleranceError: the error bound of the layers exceeds the tolerance.
        AlreadyExistsError: the folder exists, and overwrite is False or something else is in it.
        MissingExtraError: matplotlib is not installed, and pictures are asked for.

    >>> import partita as pa, tempfile, pathlib
    >>> from partita.plots import write_layers
    >>> c = pa.compile("2*x", pa.Box([0], [1]), tolerance=0.3, method="hard")
    >>> with tempfile.TemporaryDirectory() as place:
    ...     folder = write_layers(c, pathlib.Path(place) / "weights", at=[0.4], pictures=False)
    ...     print((folder / "w_q.csv").read_text().splitlines()[0])
    # W_Q, 3 × 9, above (B.6)
    """
    place = require_free(folder, overwrite=overwrite, marker=SUMMARY, kind="layers")
    found = layers_at(compiled, compiled.layers(form, dtype=dtype, tolerance=tolerance), at)
    with whole_folder(place, overwrite=overwrite, marker=SUMMARY, kind="layers") as draft:
        np.savez_compressed(draft / "tensors.npz", **_arrays(found))  # type: ignore[arg-type]
        for matrix in found.matrices:
            (draft / f"{matrix.file}.csv").write_text(_csv(matrix), encoding="utf-8")
        if pictures:
            _draw(found, draft)
        summary = _summary(found)
        (draft / SUMMARY).write_text(json.dumps(summary, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        page = as_html(_page(found, summary, draft), f"Weights of {compiled.target.label}")
        (draft / "index.html").write_text(page, encoding="utf-8")
    return place


def _draw(found: LayersAt, folder: Path) -> None:
    with styled():
        for matrix in found.matrices:
            save(matrix_figure(matrix), folder / f"{matrix.file}.svg")
        save(draw_flow(found), folder / "layers.svg")
        save(attention_figure(found), folder / "attention.svg")


def _arrays(found: LayersAt) -> dict[str, np.ndarray]:
    """The stored tensors under their own names and in their own dtype, and what is formed at the input under its file's name."""
    stored = {name: t.numpy() for name, t in found.network.state_dict().items()}
    return stored | {m.file: m.values for m in found.matrices if not m.tensor} | {"at": found.at, "mass": found.mass}


def _csv(matrix: Matrix) -> str:
    """A header in comments, then the rows; every number as written by repr, so that nothing is lost."""
    head = [
        f"# {matrix.plain_symbol}, {matrix.shape_text}, {matrix.place}",
        f"# {matrix.meaning}",
        f"# rows: {', '.join(b.text for b in matrix.rows)}; columns: {', '.join(b.text for b in matrix.columns)}",
    ]
    return "\n".join([*head, *map(_line, matrix.values)]) + "\n"


def _line(row: Array) -> str:
    texts = ["0"] * len(row)
    for index in np.flatnonzero(row).tolist():
        texts[index] = repr(float(row[index]))
    return ",".join(texts)


def _summary(found: LayersAt) -> dict[str, Any]:
    compiled, network = found.compiled, found.network
    bound = network.error_bound
    return {
        "function": compiled.target.label,
        "form": network.form,
        "dtype": str(network.dtype).removeprefix("torch."),
        "cells": compiled.num_keys,
        "columns": network.num_keys,
        "stored_numbers": network.num_parameters,
        "error_bound": bound if math.isfinite(bound) else None,
        "rounding": network.rounding,
        "norm": network.norm,
        "at": found.at.tolist(),
        "cell": found.cell,
        "mass_on_the_cell": float(found.mass[found.cell]),
        "output": np.asarray(found.output).tolist(),
        "function_there": None if found.expected is None else found.expected.tolist(),
        "matrices": [
            {
                "symbol": m.plain_symbol,
                "file": m.file,
                "tensor": m.tensor or None,
                "shape": list(m.values.shape),
                "nonzero": int(np.count_nonzero(m.values)),
                "paper": m.place,
            }
            for m in found.matrices
        ],
    }


def _page(found: LayersAt, summary: dict[str, Any], folder: Path) -> list[Block]:
    network = found.network
    at = ", ".join(f"{x:.6g}" for x in found.at)
    proved = (
        f"error ≤ {network.error_bound:.6g} in L{network.norm}, of which {network.rounding:.3g} is the rounding of this form"
        if math.isfinite(network.error_bound)
        else f"nothing is proved of its error, but it is within {network.rounding:.3g} of the exact head"
    )
    there = "" if found.expected is None else f"; the function is {_few(found.expected)}"
    table = [
        (
            m.plain_symbol,
            m.shape_text,
            f"{np.count_nonzero(m.values):,}",
            m.tensor or "at the input",
            m.place,
        )
        for m in found.matrices
    ]
    blocks: list[Block] = [
        Heading(1, f"Weights of {found.compiled.target.label}"),
        Text(
            f"The {network.form} form in {summary['dtype']}: {summary['cells']:,} cells, {summary['columns']:,} columns, "
            f"{summary['stored_numbers']:,} stored numbers; {proved}."
        ),
        Text(
            f"At z = ({at}), which lies in cell {found.cell}, the layers give {_few(found.output)}{there}. "
            f"The first query puts {summary['mass_on_the_cell']:.6g} of its weight on that cell."
        ),
        Grid(("matrix", "shape", "not zero", "tensor", "in the paper"), table),
    ]
    if (folder / "attention.svg").exists():
        limit = "The columns that W_O keeps, their limit for large R, and the mass of the first query on each cell."
        blocks += [
            Text(HOW_TO_READ),
            Heading(2, "Attention and the indicator that it approximates"),
            Picture(folder / "attention.svg", limit),
        ]
    blocks.append(Heading(2, "Every matrix"))
    for m in found.matrices:
        caption, drawn = f"{m.plain_symbol}, {m.shape_text}, {m.place}. {m.meaning}", folder / f"{m.file}.svg"
        blocks.append(Picture(drawn, caption) if drawn.exists() else Text(caption))
    return [*blocks, Heading(2, "The numbers"), Code(_how_to_read())]


def _few(values: Any) -> str:
    flat = np.ravel(values)
    text = ", ".join(f"{x:.6g}" for x in flat[:6])
    return text if flat.size == 1 else f"({text}{', …' if flat.size > 6 else ''})"


def _how_to_read() -> str:
    return 'import numpy as np\n\ntensors = np.load("tensors.npz")  # tensors["attention.w_k"], tensors["scores"], …'
