"""What the caller asked for, checked once."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch

from partita.constructions.construction import semantics_of
from partita.errors import ToleranceError, UnsupportedError

__all__ = ["DEFAULT_MAX_BYTES", "DEFAULT_SHARPNESS", "METHODS", "Options"]

DEFAULT_SHARPNESS = 64.0  # κ = R h²: two centers per axis hold all but 1e-13 of the mass
DEFAULT_MAX_BYTES = 4 << 30
METHODS = ("auto", "hard")
_NUMPY: dict[torch.dtype, type[np.floating]] = {torch.float64: np.float64, torch.float32: np.float32}


@dataclass(frozen=True)
class Options:
    """The options of `compile` and `plan` that are not about the function.

    Attributes:
        tolerance: ε. norm: p, math.inf for the supremum. dtype: of the head. sharpness: κ = R h². max_bytes: refuse larger heads.
    """

    tolerance: float
    norm: float
    dtype: torch.dtype
    sharpness: float
    max_bytes: int

    @classmethod
    def checked(
        cls, tolerance: float, norm: float | str, dtype: torch.dtype, sharpness: float, max_bytes: int, method: str
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
        if not (isinstance(sharpness, (int, float, np.number)) and 1 <= sharpness < math.inf):
            raise UnsupportedError(
                f"sharpness is {sharpness}; expected a finite κ = R h² of at least 1 (from 8 on a head is called hard)."
            )
        if not (isinstance(max_bytes, (int, float, np.number)) and 1 <= max_bytes < math.inf):
            raise UnsupportedError(f"max_bytes is {max_bytes}; expected a number of bytes ≥ 1.")
        if method not in METHODS:
            raise UnsupportedError(f"method is {method!r}; expected one of {', '.join(map(repr, METHODS))}.")
        return cls(float(tolerance), power, dtype, float(sharpness), int(max_bytes))

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
