"""The floating-point environment that proofs and heads rely on: gradual underflow (IEEE 754 subnormal numbers)."""

from __future__ import annotations

import sys

from partita.errors import UnsupportedError

__all__ = ["flushes_denormals", "require_gradual_underflow"]

_HALF = 0.5


def flushes_denormals() -> bool:
    """Whether this thread replaces subnormal numbers by zero, as results or as operands.

    The processor has one setting per thread, which Python, numpy and torch share; `torch.set_flush_denormal(True)` and
    libraries compiled with -ffast-math change it. The test is one multiplication.

    >>> flushes_denormals()
    False
    """
    return sys.float_info.min * _HALF == 0.0  # a name, so that Python cannot multiply when it compiles


def require_gradual_underflow() -> None:
    """Raise an UnsupportedError if this thread flushes subnormal numbers to zero."""
    if flushes_denormals():
        raise UnsupportedError(
            "this thread flushes subnormal numbers to zero; partita's bounds are proved for IEEE 754 arithmetic, which keeps them",
            "Call torch.set_flush_denormal(False) first.",
        )
