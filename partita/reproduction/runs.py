"""Running an experiment: a finished result is read; otherwise it is run, judged and written before the next one begins."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from partita.errors import DataFileError, UnsupportedError
from partita.reproduction.experiment import SIZES, Experiment, Setup, Verdict
from partita.reproduction.results import Finished, describe_run, find_finished, write_finished
from partita.reproduction.table import Tables

__all__ = ["Order", "run_experiment"]


@dataclass(frozen=True)
class Order:
    """What was asked for: size, seed, where results go, where image files lie, on which device, and whether to run again."""

    out: Path
    size: str = "default"
    seed: int = 0
    data: Path | None = None
    device: str = "cpu"
    again: bool = False

    def __post_init__(self) -> None:
        if self.size not in SIZES:
            raise UnsupportedError(f"size is {self.size!r}; expected one of {', '.join(SIZES)}.")
        if self.device not in ("cpu", "cuda") or (self.device == "cuda" and not torch.cuda.is_available()):
            raise UnsupportedError(f"device is {self.device!r}; expected cpu, or cuda if torch finds one.")
        if self.data is not None and not self.data.is_dir():
            raise DataFileError(f"--data is {self.data}; expected the folder of the image files.")


def run_experiment(
    experiment: Experiment, order: Order, progress: Callable[[float, float], None] = lambda done, of: None
) -> tuple[Finished, bool]:
    """The finished run, and whether it was already there. The verdict is computed from the tables as they are written; a tiny
    run has none."""
    there = None if order.again else find_finished(experiment, order.size, order.seed, order.out)
    if there is not None:
        judged = Finished(
            there.name, there.tables, _verdict(experiment, there.tables, there.about["size"]), there.about
        )
        if judged.verdict != there.verdict:  # the words have changed since
            write_finished(judged, order.out)
        return judged, True
    began, used = time.perf_counter(), time.process_time()
    setup = Setup(experiment.settings[order.size], order.seed, progress, order.device, order.data)
    tables = experiment.run(setup)
    wall, cpu = time.perf_counter() - began, time.process_time() - used
    about = describe_run(experiment, order.size, order.seed, device=order.device, wall=wall, cpu=cpu)
    finished = Finished(experiment.name, tables, _verdict(experiment, tables, order.size), about)
    write_finished(finished, order.out)
    return finished, False


def _verdict(experiment: Experiment, tables: Tables, size: str) -> Verdict | None:
    """None for a tiny run, whose figures say nothing about the claim."""
    return None if size == "tiny" else experiment.verdict(tables)
