"""Finished runs on disk: one folder each, written whole or not at all, recognised by name, size, seed, settings and revision."""

from __future__ import annotations

import json
import os
import platform
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import torch

from partita.arithmetic.notebook_cards import card
from partita.errors import FormatError, PartitaError
from partita.reproduction.experiment import SIZES, Experiment, Verdict
from partita.reproduction.table import Table, Tables

__all__ = ["RESULT", "Finished", "describe_run", "find_finished", "read_finished", "write_finished"]

RESULT = "result.json"


@dataclass(frozen=True)
class Finished:
    """A run that ended: its tables, its verdict, and how it came about (size, seed, settings, versions, wall time).

    The verdict is None for a tiny run, which shows only that the experiment works.
    """

    name: str
    tables: Tables
    verdict: Verdict | None
    about: Mapping[str, Any]

    def __repr__(self) -> str:
        return f"Finished({self.name}: {self.verdict or 'a tiny run, no verdict'})"

    def _repr_html_(self) -> str:
        names = {name: f"{len(table)} rows: {', '.join(table.columns)}" for name, table in self.tables.items()}
        if self.verdict is None:
            return card(f"{self.name}: a tiny run", {"verdict": "none", **names})
        return card(f"{self.name}: {self.verdict.outcome}", {"verdict": self.verdict.sentence, **names})


def _own_version() -> str:
    try:
        return metadata.version("partita")
    except metadata.PackageNotFoundError:
        return "not installed"


def describe_run(
    experiment: Experiment, size: str, seed: int, *, device: str, wall: float, cpu: float
) -> dict[str, Any]:
    """What is written beside the tables."""
    return {
        "size": size,
        "seed": seed,
        "revision": experiment.revision,
        "settings": experiment.settings_json(size),
        "device": device,
        "wall_seconds": round(wall, 1),
        "cpu_seconds": round(cpu, 1),
        "versions": {
            "partita": _own_version(),
            "python": platform.python_version(),
            "torch": torch.__version__,
            "numpy": np.__version__,
        },
    }


def write_finished(finished: Finished, out: Path) -> Path:
    """`out/name/` with one CSV per table and result.json; an interrupted write leaves what was there before."""
    place, waiting = out / finished.name, out / f".{finished.name}.{os.getpid()}"
    out.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(waiting, ignore_errors=True)
    waiting.mkdir()
    for name, table in finished.tables.items():
        (waiting / f"{name}.csv").write_text(table.to_csv(), encoding="utf-8")
    described = {
        "name": finished.name,
        "verdict": None if finished.verdict is None else asdict(finished.verdict),
        **finished.about,
        "tables": list(finished.tables),
    }
    (waiting / RESULT).write_text(json.dumps(described, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    if place.exists():
        old = out / f".{finished.name}.{os.getpid()}.old"
        os.replace(place, old)
        os.replace(waiting, place)
        shutil.rmtree(old)
    else:
        os.replace(waiting, place)
    return place


def read_finished(place: Path) -> Finished:
    """What `write_finished` wrote.

    Raises:
        FormatError: a file is missing or is not what was written.
    """
    try:
        described = json.loads((place / RESULT).read_text(encoding="utf-8"))
        tables = {n: Table.from_csv((place / f"{n}.csv").read_text(encoding="utf-8")) for n in described.pop("tables")}
        said = described.pop("verdict")
        return Finished(described.pop("name"), tables, None if said is None else Verdict(**said), described)
    except (OSError, ValueError, KeyError, TypeError, PartitaError) as error:
        raise FormatError(
            f"{place} has no finished experiment ({type(error).__name__}: {error}); delete the folder and run it again."
        ) from None


def find_finished(experiment: Experiment, size: str, seed: int, out: Path) -> Finished | None:
    """The run of this experiment with this seed that is already there, if it is of this size or a larger one.

    A folder that cannot be read, or that another revision or other settings wrote, counts as not there.
    """
    try:
        found = read_finished(out / experiment.name)
        there = str(found.about["size"])
        same = (
            found.about["seed"] == seed
            and found.about["revision"] == experiment.revision
            and found.about["settings"] == json.loads(json.dumps(experiment.settings_json(there)))
        )
        return found if same and SIZES.index(there) >= SIZES.index(size) else None
    except (FormatError, KeyError, ValueError):
        return None
