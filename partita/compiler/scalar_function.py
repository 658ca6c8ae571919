"""A compiled head as a function of plain floats, for callers that ask for one point at a time."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from partita.arithmetic.arguments import real_array
from partita.errors import ShapeError
from partita.geometry.domains import Box
from partita.heads.one_point import OnePoint

if TYPE_CHECKING:
    from partita.compiler.compiled import Compiled

__all__ = ["ScalarFunction"]


class ScalarFunction:
    """`f(x0, x1, …)` of plain floats: what `Compiled.scalar` returns.

    Args:
        compiled: the head with its domain. It must not be changed afterwards.

    Attributes:
        dimension: m, how many floats a call takes.

    >>> import partita as pa
    >>> f = pa.compile("x*y", "[0,1]^2", tolerance=1e-3).scalar()
    >>> f.dimension, abs(f(0.5, 0.5) - 0.25) <= 1e-3
    (2, True)
    """

    def __init__(self, compiled: Compiled) -> None:
        self._compiled, head = compiled, compiled.head
        self.dimension = head.dimension
        self._is_single = head.output_shape == ()
        self._pack = struct.Struct(f"{self.dimension}d").pack
        total = None
        if isinstance(compiled.target.domain, Box):
            semantics = compiled.certificate.semantics
            total = OnePoint(head, semantics, compiled.target.domain, compiled.outside).current()
        self._into: Callable[[bytes, Any], float] | None = None
        if total is not None:
            total.compile()
            self._into = total.into
            self._unused = np.empty(head.num_outputs)  # written by every thread, read by none

    def __reduce__(self) -> tuple[Any, ...]:
        return ScalarFunction, (self._compiled,)

    def __call__(self, *z: float) -> float | tuple[float, ...]:
        """The value at one point: a float, or a tuple of floats, flat, if there are several outputs."""
        try:
            packed = self._pack(*z)
        except (struct.error, OverflowError):
            return self._slowly(z)
        if self._into is None:
            return self._slowly(z)
        out = self._unused if self._is_single else np.empty(len(self._unused))
        first = self._into(packed, out)
        if first != first:  # NaN: an error to report, or numbers that need another order of operations
            return self._slowly(z)
        return first if self._is_single else tuple(out.tolist())

    def _slowly(self, z: tuple[Any, ...]) -> float | tuple[float, ...]:
        """The same through the compiled head, which raises its errors."""
        if len(z) != self.dimension:
            raise ShapeError(f"found {len(z)} argument(s); this function takes {self.dimension} floats.")
        rest, inputs = real_array("the arguments", z), []
        if rest.shape != (self.dimension,):
            raise ShapeError(f"the arguments have shape {rest.shape}; expected {self.dimension} floats.")
        for shape in self._compiled.head.input_shapes:
            size = math.prod(shape)
            inputs.append(rest[:size].reshape(shape))
            rest = rest[size:]
        out = self._compiled(*inputs)
        return float(out) if self._is_single else tuple(np.ravel(out).tolist())

    def __repr__(self) -> str:
        c = self._compiled
        return f"ScalarFunction({c.target.label!r}: {self.dimension} float{'s' * (self.dimension > 1)}, outside={c.outside!r})"
