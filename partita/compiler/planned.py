"""A plan: a head before it exists, and the words for its sizes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from partita.certify.certificate import Term
from partita.compiler.knowledge import Knowledge
from partita.compiler.options import Options
from partita.constructions.on_grid import GridRecipe
from partita.constructions.small_domain import CoverRecipe
from partita.geometry.domains import PointCloud
from partita.targets.target import Target

__all__ = ["Plan", "floor_message", "size_text"]


@dataclass(frozen=True, eq=False)
class Plan:
    """A head before it exists: how large, how sharp, how good, and why.

    Attributes:
        keys, parameters, bytes: of the folded head.
        error_bound: what the certificate will say or slightly more, |f| being bounded before it is known at the centers.
        why: sentences that explain the numbers.
    """

    target: Target
    knowledge: Knowledge
    recipe: GridRecipe | CoverRecipe
    keys: int
    parameters: int
    bytes: int
    sharpness: float
    error_bound: float
    why: tuple[str, ...]

    @property
    def counts(self) -> tuple[int, ...] | None:
        """Keys per axis; None for scattered centers."""
        return self.recipe.counts if isinstance(self.recipe, GridRecipe) else None

    @property
    def kind(self) -> str:
        """The kind of claim that building it will give."""
        filled = isinstance(self.target.domain, PointCloud) and self.target.domain.fill_distance > 0
        return "proved_given" if self.knowledge.declared or filled else "proved"

    def to_json(self) -> dict[str, Any]:
        return {
            "function": self.target.label,
            "domain": [str(d) for d in self.target.domains],
            "tolerance": self.recipe.tolerance,
            "method": "hard",
            "kind": self.kind,
            "keys": self.keys,
            "keys_per_axis": self.counts,
            "parameters": self.parameters,
            "bytes": self.bytes,
            "sharpness": self.sharpness,
            "dtype": self.recipe.semantics,
            "error_bound": self.error_bound,
            "why": list(self.why),
        }

    def __str__(self) -> str:
        return "\n".join(self.why)


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
