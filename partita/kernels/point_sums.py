"""A head's sum for one point, without a tensor: interpreted at first, compiled by numba once that is worth it.

Both run the loops of `point_loops` and give the same bits, so that it makes no difference to a call what was computed before it.
"""

from __future__ import annotations

import math
import struct
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from partita.arithmetic.environment import flushes_denormals
from partita.kernels import native, point_loops
from partita.kernels.native import Floats

__all__ = ["RULES", "PointParts", "PointSum", "worth_a_loop"]

RULES = ("raise", "clamp", "allow")  # what to do with a point outside the box, by number

_MOST = {True: 1 << 16, False: 1 << 10}  # steps, with numba and without: beyond, torch takes less time
_WARM_UP = 1 << 18  # steps that are interpreted before numba is asked to compile, some 20 milliseconds
_CALL = 64  # steps that a call costs besides
_LISTED = 1 << 12  # numbers: longer parts are read where they are, which takes longer than from a list
_LOOPS: dict[str, Callable[..., None]] = {
    "grid": point_loops.grid_point,
    "scattered": point_loops.scattered_point,
    "train": point_loops.train_point,
}
_interpreted: dict[tuple[str, bool], int] = {}  # steps so far, by kind and whether tables are in float32
_compiled: dict[tuple[str, bool], Callable[..., float] | None] = {}  # None: its bits differ, so it is never used


def worth_a_loop(steps: int) -> bool:
    """Whether a sum of so many steps for one point takes less time here than through torch: by its size and numba alone."""
    return steps <= _MOST[native.AVAILABLE]


class PointParts(NamedTuple):
    """What a loop of `point_loops` takes, in the order of its arguments.

    kind: of the head.
    integers: sizes.
    numbers: float64 copies of stored tensors, flat.
    tables: stored tensors that are read where they are, flat, in the dtype of the head; `live` are their names.
    length: of the scratch space.
    outputs: numbers that come out.
    steps: multiplications and exponentials.
    """

    kind: str
    integers: tuple[Sequence[int], ...]
    numbers: tuple[Floats, ...]
    tables: tuple[Floats, ...]
    live: tuple[str, ...]
    length: int
    outputs: int
    steps: int


class PointSum:
    """A head's outputs at one point, which is checked on the way.

    Args:
        parts: of the head.
        lo, hi: corners of the domain, `(m,)` each.
        rule: "raise", "clamp" or "allow".
        single: the head is in float32: inputs and outputs are rounded to it, and the sum itself runs in float64.
    """

    def __init__(self, parts: PointParts, lo: Floats, hi: Floats, rule: str, single: bool) -> None:
        self.parts, self._rule, self.single, self._m = parts, rule, single, len(lo)
        self._unpack, self._narrow = struct.Struct(f"{self._m}d").unpack, struct.Struct(f"{self._m}f")
        header = [RULES.index(rule), int(single), parts.length, self._m]
        self._integers = np.array([*header, *(k for part in parts.integers for k in part)], dtype=np.int64)
        self._numbers = np.concatenate([[sys.float_info.min], lo, hi, *parts.numbers])
        self._sides = list(zip(lo.tolist(), hi.tolist()))
        self._interpreted_parts = (
            *map(list, parts.integers),
            *map(_readable, parts.numbers),
            *map(_view, parts.tables),
        )
        self._key = parts.kind, single and bool(parts.tables)
        self._native = _compiled.get(self._key)

    def into(self, packed: bytes, out: Floats) -> float:
        """Fill `out`, `(outputs,)` in float64, with the outputs at a point, m packed float64 numbers; returns the first.

        NaN stands for everything out of the ordinary: a point that is not finite or not in the domain, a thread that flushes
        subnormal numbers, an output that is not finite.
        """
        if self._native is not None:
            return self._native(packed, out, self._integers, self._numbers, *self.parts.tables)
        done = _interpreted.get(self._key, 0) + self.parts.steps + _CALL
        _interpreted[self._key] = done
        if done > _WARM_UP and native.AVAILABLE and self._key not in _compiled:
            self.compile()
        self._native = _compiled.get(self._key)
        found = self._interpret(packed)
        if found is None:
            return math.nan
        out[:] = found
        return found[0]

    def compile(self) -> None:
        """Compile the loop, or load it from numba's cache, if there is numba."""
        if native.AVAILABLE and self._key not in _compiled:
            out = np.empty(self.parts.outputs)
            _compiled[self._key] = _entry(self._key, (b"", out, self._integers, self._numbers, *self.parts.tables))
        self._native = _compiled.get(self._key)

    def _interpret(self, packed: bytes) -> list[float] | None:
        """The outputs by the interpreter, or None."""
        if flushes_denormals():
            return None
        x = []
        for t, (lo, hi) in zip(self._unpack(packed), self._sides):
            if lo <= t <= hi:
                x.append(t)
            elif self._rule == "raise" or not math.isfinite(t):
                return None
            else:
                x.append(t if self._rule == "allow" else lo if t < lo else hi)
        try:
            z: Sequence[float] = self._narrow.unpack(self._narrow.pack(*x)) if self.single else x
            found = [0.0] * self.parts.outputs
            _LOOPS[self.parts.kind](z, [0.0] * self.parts.length, found, *self._interpreted_parts)
            if self.single:
                narrow = struct.Struct(f"{len(found)}f")
                found = list(narrow.unpack(narrow.pack(*found)))
        except OverflowError:  # float32
            return None
        return found if all(map(math.isfinite, found)) else None


def _readable(numbers: Floats) -> Any:
    return numbers.tolist() if len(numbers) <= _LISTED else _view(np.ascontiguousarray(numbers, dtype=np.float64))


def _view(numbers: Floats) -> memoryview[float]:
    return memoryview(numbers)  # type: ignore[arg-type]  # its elements are Python floats


def _entry(key: tuple[str, bool], arguments: tuple[Any, ...]) -> Callable[..., float] | None:
    """The compiled loop; None where its exponential is not Python's, bit for bit."""
    from partita.kernels import point_native

    entry: Callable[..., float] = point_native.ENTRIES[key[0]]
    x: NDArray[np.float64] = -np.geomspace(1e-9, 745, 1024)
    found = np.empty_like(x)
    native.compiled_once(("point", *key), lambda: (entry(*arguments), point_native.exponentials(x, found)))
    point_native.exponentials(x, found)
    same = found.tolist() == [math.exp(t) for t in x.tolist()]
    return entry if same else None
