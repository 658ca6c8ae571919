"""Checks of arguments that many rooms share: numbers, counts, arrays of real numbers, and the dtype of a head."""

from __future__ import annotations

import math
from collections.abc import Iterable
from numbers import Integral
from typing import Any

import numpy as np
from numpy.typing import NDArray

from partita.errors import DomainError, ShapeError, UnsupportedError

__all__ = ["is_number", "is_series", "real_array", "require_count", "require_dtype", "require_flag", "require_number"]


def is_number(value: object) -> bool:
    """Whether it is a real number, of Python or numpy, and not a bool."""
    return isinstance(value, (int, float, np.integer, np.floating)) and not isinstance(value, bool)


def _shown(value: Any) -> str:
    return repr(value) if len(repr(value)) < 40 else f"{repr(value)[:20]}…"


def require_number(name: str, value: Any, *, zero: bool = False) -> float:
    """A finite number > 0, or ≥ 0 with `zero`, as a float; a DomainError otherwise.

    >>> require_number("tolerance", np.float32(0.5))
    0.5
    """
    try:
        found = float(value) if is_number(value) else math.nan
    except OverflowError:  # a huge integer
        found = math.inf
    if not (0 < found < math.inf or (zero and found == 0)):
        raise DomainError(f"{name} is {_shown(value)}; expected a finite number {'≥' if zero else '>'} 0.")
    return found


def require_flag(name: str, value: Any) -> bool:
    """True or False, of Python or numpy, as a bool; a DomainError otherwise.

    >>> require_flag("stream", np.True_)
    True
    """
    if not isinstance(value, (bool, np.bool_)):
        raise DomainError(f"{name} is {_shown(value)}; expected True or False.")
    return bool(value)


def is_series(value: object) -> bool:
    """Whether it can be looped over, and is not a string. Arrays without axes cannot.

    >>> is_series([1]), is_series("ab"), is_series(np.array(1))
    (True, False, False)
    """
    return isinstance(value, Iterable) and not isinstance(value, (str, bytes)) and getattr(value, "ndim", 1) != 0


def require_count(name: str, value: Any, *, least: int = 1, most: int = 10**9) -> int:
    """An integer from `least` to `most`, of Python or numpy, as an int; a DomainError otherwise.

    >>> require_count("queries", np.int64(3))
    3
    """
    found = int(value) if isinstance(value, Integral) and not isinstance(value, bool) else least - 1
    if not least <= found <= most:
        raise DomainError(f"{name} is {value!r}; expected an integer from {least} to {most:,}.")
    return found


def require_dtype(dtype: Any, hint: str = "", *, halves: bool = False) -> None:
    """An UnsupportedError for anything but torch.float64 and torch.float32.

    Args:
        hint: what to do about another dtype.
        halves: whether torch.bfloat16 and torch.float16 will do too.

    >>> require_dtype("float32")
    Traceback (most recent call last):
        ...
    partita.errors.UnsupportedError: dtype is 'float32'; expected torch.float64 or torch.float32
    """
    allowed = [f"torch.{p}" for p in ("float64", "float32", "bfloat16", "float16")[: 4 if halves else 2]]
    if isinstance(dtype, str) or str(dtype) not in allowed:
        raise UnsupportedError(f"dtype is {dtype!r}; expected {', '.join(allowed[:-1])} or {allowed[-1]}", hint)


def real_array(name: str, values: Any) -> NDArray[np.float64]:
    """The values as a float64 array; a ShapeError if they are no array of real numbers.

    >>> real_array("points", [[1, 2], [3]])
    Traceback (most recent call last):
        ...
    partita.errors.ShapeError: points: found a list that is not an array of real numbers; expected numbers in rows of equal length
    """
    try:
        found = np.asarray(values.detach().cpu() if hasattr(values, "detach") else values)
        if found.dtype.kind in "fiubO":
            return found.astype(np.float64)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        pass
    raise ShapeError(
        f"{name}: found a {type(values).__name__} that is not an array of real numbers; expected numbers in rows of equal length"
    )
