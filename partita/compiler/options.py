"""What the caller asked for, checked once."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch

from partita.errors import ToleranceError, UnsupportedError
from partita.proofs.construction import semantics_of

__all__ = ["ACCEPT", "DEFAULT_MAX_BYTES", "HARD_SHARPNESS", "METHODS", "Options"]

HARD_SHARPNESS = 64.0  # κ = R h²: two centers per axis hold all but 1e-13 of the mass
DEFAULT_MAX_BYTES = 4 << 30
METHODS = ("auto", "hard", "tuned", "corrected", "fitted", "affine", "adaptive", "pieces", "train")
ACCEPT = ("strongest", "estimated")
_TAKE_A_SHARPNESS = ("auto", "hard", "tuned", "corrected")
_NUMPY: dict[torch.dtype, type[np.floating]] = {torch.float64: np.float64, torch.float32: np.float32}


@dataclass(frozen=True)
class Options:
    """The options of `compile` and `plan` that are not about the function.

    Attributes:
        tolerance: ε. norm: p, math.inf for the supremum. dtype: of the head. max_bytes: refuse larger heads.
        sharpness: κ = R h², None for each method's own choice. method: one of METHODS, "auto" for the smallest head.
        accept: "strongest" kind of claim first, or an "estimated" one if that makes the head smaller.
    """

    tolerance: float
    norm: float = math.inf
    dtype: torch.dtype = torch.float64
    sharpness: float | None = None
    max_bytes: int = DEFAULT_MAX_BYTES
    method: str = "auto"
    accept: str = "strongest"

    @classmethod
    def checked(
        cls,
        tolerance: float,
        norm: float | str = "inf",
        dtype: torch.dtype = torch.float64,
        sharpness: float | None = None,
        max_bytes: int = DEFAULT_MAX_BYTES,
        method: str = "auto",
        accept: str = "strongest",
    ) -> Options:
        """The options, or the error that says which of them cannot be."""
        try:
            power = math.inf if norm == "inf" else float(norm)
        except (TypeError, ValueError):
            power = math.nan
        if not power >= 1:
            raise UnsupportedError(f"norm is {norm!r}; expected 'inf' or a number p ≥ 1.")
        if not (isinstance(tolerance, (int, float, np.number)) and 0 < tolerance < math.inf):
            raise ToleranceError(f"tolerance is {tolerance!r}; expected a finite number > 0.")
        if dtype not in _NUMPY:
            raise UnsupportedError(
                f"dtype is {dtype}: heads are certified in torch.float64 and torch.float32; others may be cast "
                f"afterwards, uncertified."
            )
        if method not in METHODS:
            raise UnsupportedError(f"method is {method!r}; expected one of {', '.join(map(repr, METHODS))}.")
        if accept not in ACCEPT:
            raise UnsupportedError(f"accept is {accept!r}; expected one of {', '.join(map(repr, ACCEPT))}.")
        least = 0.1 if method in ("tuned", "corrected") else 1.0
        if sharpness is not None and not (
            isinstance(sharpness, (int, float, np.number)) and least <= sharpness < math.inf
        ):
            raise UnsupportedError(
                f"sharpness is {sharpness}; expected a finite κ = R h² of at least {least:g} (from 8 on a head is called hard)."
            )
        if sharpness is not None and method not in _TAKE_A_SHARPNESS:
            raise UnsupportedError(f"method {method!r} chooses its own sharpness; leave sharpness out.")
        if not (isinstance(max_bytes, (int, float, np.number)) and 1 <= max_bytes < math.inf):
            raise UnsupportedError(f"max_bytes is {max_bytes}; expected a number of bytes ≥ 1.")
        given = None if sharpness is None else float(sharpness)
        return cls(float(tolerance), power, dtype, given, int(max_bytes), method, accept)

    @property
    def hard_sharpness(self) -> float:
        return HARD_SHARPNESS if self.sharpness is None else self.sharpness

    def domain_factor(self, volume: float, outputs: int) -> float:
        """`(volume · outputs)^{1/p}`: what carries a supremum over to L_p."""
        return 1.0 if math.isinf(self.norm) else (volume * outputs) ** (1 / self.norm)

    @property
    def storage(self) -> type[np.floating]:
        """The numpy type of the head's dtype."""
        return _NUMPY[self.dtype]

    @property
    def item_bytes(self) -> int:
        return np.dtype(self.storage).itemsize

    @property
    def semantics(self) -> str:
        return semantics_of(self.dtype)
