"""One point through a head without a tensor: the sum of `point_sums`, made again when the head's tensors are no longer the same."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from partita.geometry.domains import Box
from partita.heads.head import Head
from partita.kernels.native import Floats
from partita.kernels.point_sums import PointSum

__all__ = ["OnePoint"]


_DOUBLE = np.dtype(np.float64)
_NUMBERS = frozenset({float, int, bool, np.float64, np.float32, np.int64, np.int32})


class OnePoint:
    """A head's outputs at single points of a box.

    Args:
        head: the head, as it is when a point is asked for.
        dtype: name of the dtype that the head must have.
        box: the domain.
        rule: for points outside the box: "raise" (no answer), "clamp" or "allow".
    """

    def __init__(self, head: Head, dtype: str, box: Box, rule: str) -> None:
        self._given = head, dtype, box, rule
        self._latest: _Prepared | None = None
        self._outputs, self._output_shape = head.num_outputs, head.output_shape
        sizes = [math.prod(shape) for shape in head.input_shapes]
        self._arguments = [(shape, n, struct.Struct(f"{n}d").pack) for shape, n in zip(head.input_shapes, sizes)]

    def __reduce__(self) -> tuple[Any, ...]:  # copies and pickles prepare their own sum
        return OnePoint, self._given

    def __call__(self, inputs: tuple[Any, ...]) -> Floats | None:
        """The values `(*output_shape)` for arguments that are lists, tuples or arrays of one point; None for everything else."""
        if len(inputs) != len(self._arguments) or torch.compiler.is_compiling():
            return None
        packed = b""
        for given, (shape, size, pack) in zip(inputs, self._arguments):
            some = _packed(given, shape, size, pack)
            if some is None:
                return None
            packed += some
        out = self.at(packed)
        return None if out is None else out.reshape(self._output_shape)

    def at(self, packed: bytes) -> Floats | None:
        """The outputs, `(out,)`, at the point that these float64 bytes hold; None if `evaluate` has to see to it."""
        total = self.current()
        if total is None:
            return None
        out = np.empty(self._outputs)
        first = total.into(packed, out)
        if first != first:  # NaN: anything out of the ordinary
            return None
        return out.astype(np.float32) if total.single else out

    def current(self) -> PointSum | None:
        """The sum for the head's tensors as they are, None if there is none for them."""
        latest = self._latest
        if latest is None or not latest.is_current():
            latest = self._latest = _Prepared(*self._given)
        return latest.total


def _packed(given: Any, shape: tuple[int, ...], size: int, pack: Callable[..., bytes]) -> bytes | None:
    """One argument as float64 bytes; None unless it is a list, a tuple or a plain array with the shape of one point."""
    kind = type(given)
    if kind is np.ndarray:
        return given.tobytes() if given.dtype is _DOUBLE and given.shape == shape else None
    if kind is not list and kind is not tuple:
        return None
    if len(shape) == 2:
        if len(given) != shape[0] or not all(type(row) in (list, tuple) and len(row) == shape[1] for row in given):
            return None
        given = [number for row in given for number in row]
    if len(given) != size or not _NUMBERS.issuperset(map(type, given)):
        return None
    try:
        return pack(*given)
    except (OverflowError, struct.error):  # an integer beyond float64
        return None


class _Prepared:
    """A sum and the tensors that it was made from.

    A tensor may be replaced, or given other storage (`.data = …`), or written to. The first shows in the module's dictionaries, the
    second in the pointer, which cannot occur again as long as this object holds the old storage. Written numbers leave no trace:
    those that were copied or that windows were chosen for are compared, those of `PointParts.tables` are read where they are.
    """

    def __init__(self, head: Head, dtype: str, box: Box, rule: str) -> None:
        held = [(where, name, t) for where in (head._buffers, head._parameters) for name, t in where.items()]
        self._nothing = [(where, name) for where, name, t in held if t is None]
        present = [(where, name, t) for where, name, t in held if t is not None]
        self._tensors = [
            (where, name, t, t.data_ptr(), t.nbytes, t.dtype, t.is_contiguous()) for where, name, t in present
        ]
        self.total: PointSum | None = None
        self._views: list[Floats] = []
        self._numbers: list[bytes] = []
        plain = all(
            type(t.data) is Tensor and t.device.type == "cpu" and t.is_contiguous() and str(t.dtype) == f"torch.{dtype}"
            for _, _, t in present
        )
        parts = head.point_parts() if plain else None
        if parts is None:
            return
        self._views = [t.detach().numpy() for _, name, t in present if name not in parts.live]
        self._numbers = [view.tobytes() for view in self._views]
        self.total = PointSum(parts, box.lo.ravel(), box.hi.ravel(), rule, dtype == "float32")

    def is_current(self) -> bool:
        """Whether the head's tensors still hold what they held."""
        for where, name, tensor, pointer, size, dtype, is_contiguous in self._tensors:
            if (
                where.get(name) is not tensor
                or tensor.data_ptr() != pointer
                or tensor.nbytes != size
                or tensor.dtype is not dtype
                or tensor.is_contiguous() is not is_contiguous
            ):
                return False
        for where, name in self._nothing:
            if where.get(name) is not None:
                return False
        return [view.tobytes() for view in self._views] == self._numbers
