"""An experiment: a claim of a paper, the criterion by which it is judged, the run, and data for which the claim is false."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from partita.errors import UnsupportedError
from partita.reproduction.table import Table, Tables

__all__ = ["SIZES", "Experiment", "Outcome", "Quotation", "Setup", "Verdict"]

SIZES = ("tiny", "default", "full")
Outcome = Literal["holds", "mixed", "fails"]


@dataclass(frozen=True)
class Setup:
    """What a run is given.

    Attributes:
        settings: the experiment's own frozen dataclass of numbers, one per size.
        seed: random seed.
        progress: called with (done, of).
        device: where networks are trained.
        data: the folder of the image files; None where none was given.
    """

    settings: Any
    seed: int = 0
    progress: Callable[[float, float], None] = lambda done, of: None
    device: str = "cpu"
    data: Path | None = None


@dataclass(frozen=True)
class Verdict:
    """Whether the claim holds, computed from tables by the criterion; one sentence, and the numbers in it."""

    outcome: Outcome
    sentence: str
    numbers: Mapping[str, float] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.outcome}: {self.sentence}"


@dataclass(frozen=True)
class Quotation:
    """A sentence of a paper, word for word, and where it stands. Spaces and line breaks do not count.

    Attributes:
        text: as it is printed.
        place: section, page, caption or equation.
        of_summary: whether a summary of the paper is quoted instead of the paper itself.
    """

    text: str
    place: str
    of_summary: bool = False

    def __str__(self) -> str:
        return f"“{self.text}” ({'summary, ' if self.of_summary else ''}{self.place})"


@dataclass(frozen=True)
class Experiment:
    """One figure or claim of a paper as a named, seeded run.

    Attributes:
        name: on the command line.
        title: of the figure.
        source: paper and place.
        claim: what is said there, in our words.
        quotations: what is said there, in the paper's words; the verdict is about these sentences.
        criterion: what `verdict` computes.
        amended: what of the criterion was changed after the data had been seen, and the verdict without it; empty if nothing was.
        method: what is run, and what the paper leaves open.
        run: Setup to tables.
        verdict: tables to Verdict.
        control: seed to tables for which the claim is false.
        settings: one dataclass per size.
        seconds: what each size takes, roughly, on two cores.
        revision: raised when the same settings would give other tables.
        needs_data: image files.
        digest: a small table of large ones, for the page.
    """

    name: str
    title: str
    source: str
    claim: str
    criterion: str
    method: str
    run: Callable[[Setup], Tables]
    verdict: Callable[[Tables], Verdict]
    control: Callable[[int], Tables]
    settings: Mapping[str, Any]
    seconds: Mapping[str, float]
    revision: int = 1
    needs_data: bool = False
    digest: Callable[[Tables], Table] | None = None
    quotations: tuple[Quotation, ...] = ()
    amended: str = ""

    def __post_init__(self) -> None:
        if set(self.settings) != set(SIZES) or set(self.seconds) != set(SIZES):
            raise UnsupportedError(f"experiment {self.name}: expected settings and seconds for {', '.join(SIZES)}.")

    def settings_json(self, size: str) -> dict[str, Any]:
        """The settings of a size as plain values, lists for tuples: what results are recognised by."""
        return {k: list(v) if isinstance(v, tuple) else v for k, v in asdict(self.settings[size]).items()}
