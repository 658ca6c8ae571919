"""The loops of `point_loops` compiled by numba. Imported only where numba is."""

from __future__ import annotations

from numba.extending import register_jitable

from partita.kernels import point_loops
from partita.kernels.native_code import loop

__all__ = ["ENTRIES", "exponentials"]

for _function in (
    point_loops.axis_weights,
    point_loops.window_sum,
    point_loops.grid_point,
    point_loops.scattered_point,
    point_loops.train_point,
    point_loops.placed,
    point_loops.finished,
):
    register_jitable(_function)

exponentials = loop(point_loops.exponentials)
ENTRIES = {
    "grid": loop(point_loops.grid_entry),
    "scattered": loop(point_loops.scattered_entry),
    "train": loop(point_loops.train_entry),
}
