"""A plan: a head before it exists, and the words for its sizes."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from partita.compiler.known_regularity import Knowledge
from partita.compiler.options import Options
from partita.functions.target import Target
from partita.methods.adaptive import AdaptiveRecipe
from partita.methods.affine_grid import AffineRecipe
from partita.methods.affine_pieces import PiecesRecipe
from partita.methods.cover import CoverRecipe
from partita.methods.on_grid import GridRecipe
from partita.methods.soft_grid import SoftRecipe
from partita.methods.tangents import CurvedRecipe
from partita.methods.train import TrainRecipe
from partita.proofs.certificate import Term
from partita.proofs.construction import Progress

__all__ = ["Candidate", "Plan", "floor_message", "report", "rounding_of", "size_text"]

Recipe = (
    GridRecipe | CoverRecipe | SoftRecipe | PiecesRecipe | AffineRecipe | CurvedRecipe | AdaptiveRecipe | TrainRecipe
)


@dataclass(frozen=True)
class Candidate:
    """One way to make the head, as the report shows it; None where a figure was not found out.

    `error` is a bound where `kind` is proved, else an estimate; `chosen` marks the one that was built.
    """

    method: str
    kind: str
    note: str
    keys: int | None = None
    parameters: int | None = None
    largest: float | None = None
    rounding: float | None = None
    error: float | None = None
    chosen: bool = False


@dataclass(frozen=True, eq=False)
class Plan:
    """A head before it exists: how large, how sharp, how good, and why.

    Attributes:
        method: how its values are chosen. kind: of the claim that building it will give.
        keys, parameters, bytes: of the folded head. sharpness: κ, the smallest of its axes.
        error_bound: what the certificate will say or slightly more; infinite if the claim will be an estimate.
        error_estimate: the largest error sampled while planning, None if nothing was sampled.
        largest: of the values. rounding: the part of the error that running in floats adds.
        why: sentences that explain the numbers.
        candidates: every method that was considered.
        plan_without: plans again without the methods named, for when these were built and missed; None if one was asked for.
    """

    target: Target
    knowledge: Knowledge | None
    recipe: Recipe
    method: str
    kind: str
    keys: int
    parameters: int
    bytes: int
    sharpness: float
    error_bound: float
    largest: float
    rounding: float
    why: tuple[str, ...]
    error_estimate: float | None = None
    candidates: tuple[Candidate, ...] = ()
    plan_without: Callable[[frozenset[str], Progress | None], Plan] | None = None

    @property
    def counts(self) -> tuple[int, ...] | None:
        """Keys per axis; None for scattered centers."""
        if isinstance(self.recipe, SoftRecipe | AffineRecipe | CurvedRecipe):
            return self.recipe.grid.counts
        return self.recipe.counts if isinstance(self.recipe, GridRecipe) else None

    def as_candidate(self, note: str = "", *, chosen: bool = False) -> Candidate:
        """The plan as a row of the report."""
        error = self.error_bound if self.error_estimate is None else self.error_estimate
        return Candidate(
            self.method, self.kind, note, self.keys, self.parameters, self.largest, self.rounding, error, chosen
        )

    def to_json(self) -> dict[str, Any]:
        return {
            "function": self.target.label,
            "domain": [str(d) for d in self.target.domains],
            "tolerance": self.recipe.tolerance,
            "method": self.method,
            "kind": self.kind,
            "keys": self.keys,
            "keys_per_axis": self.counts,
            "parameters": self.parameters,
            "bytes": self.bytes,
            "sharpness": self.sharpness,
            "dtype": self.recipe.semantics,
            "error_bound": None if math.isinf(self.error_bound) else self.error_bound,
            "error_estimate": self.error_estimate,
            "why": list(self.explanation),
            "candidates": [asdict(c) for c in self.candidates],
        }

    @property
    def explanation(self) -> tuple[str, ...]:
        """Why these numbers, and where the function comes from."""
        return (*self.why, self.target.origin) if self.target.origin else self.why

    def __str__(self) -> str:
        return "\n".join(self.explanation)


def report(candidates: Sequence[Candidate]) -> str:
    """A table of what was considered, the chosen one marked."""
    rows: list[tuple[str, ...]] = [
        ("", "method", "claim", "keys", "stored numbers", "max |V|", "rounding", "error", "")
    ]
    for c in candidates:
        sign = "≈ " if c.kind == "estimated" or not c.chosen else "≤ "
        figures = (
            "" if x is None else f"{x:,}" if isinstance(x, int) and x < 10**9 else f"{x:.2g}"
            for x in (c.keys, c.parameters, c.largest, c.rounding)
        )
        rows.append(
            (
                "→" if c.chosen else "",
                c.method,
                c.kind,
                *figures,
                "" if c.error is None else f"{sign}{c.error:.3g}",
                c.note,
            )
        )
    widths = [max(len(r[i]) for r in rows) for i in range(8)]
    lines = [
        "  ".join(
            (*(x.ljust(w) for x, w in zip(r[:3], widths)), *(x.rjust(w) for x, w in zip(r[3:8], widths[3:])), r[8])
        )
        for r in rows
    ]
    return "\n".join(line.rstrip() for line in lines)


def rounding_of(terms: Sequence[Term]) -> float:
    """What the terms other than the approximation itself sum to."""
    return float(sum(t.value for t in terms if t.name not in ("approximation", "jumps", "temperature", "seen")))


def size_text(count: float) -> str:
    """Bytes in words: 1536 is "1.5 KiB"."""
    for unit in ("bytes", "KiB", "MiB", "GiB", "TiB"):
        if count < 1024 or unit == "TiB":
            return f"{count:.4g} {unit}"
        count /= 1024
    return ""


def floor_message(target: Target, options: Options, terms: list[Term]) -> str:
    """Why a tolerance cannot be met in this dtype, with the numbers."""
    floor = sum(t.value for t in terms if t.name not in ("approximation", "jumps"))
    parts = ", ".join(f"{t.name} {t.value:.2g}" for t in terms if t.name not in ("approximation", "jumps"))
    advice = " Use dtype=torch.float64, or ask" if options.dtype == torch.float32 else " Ask"
    return (
        f"tolerance {options.tolerance:g} is below what {options.semantics} can promise for {target.label}: "
        f"rounding and window alone are {floor:.3g} ({parts}).{advice} for more than {2.1 * floor:.3g}."
    )
