"""Parts of one check, for several machines: which boxes of a domain belong to which of them.

A domain is cut before anything is measured, by halving the numbers that are stored, so that every machine cuts it alike. The
cells of a shard lie all over the domain, as what takes long is often in one place.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from partita_check.polynomials import Ends, halves

__all__ = ["MOST_SHARDS", "WHOLE", "Shard"]

MOST_SHARDS = 100_000
EACH, MOST_CELLS = 8, 4096  # cells of a shard, so that long and short ones mix; cells of a domain


class Shard(NamedTuple):
    """Part `number`, counted from 1, of a check that is cut into `of` parts."""

    number: int
    of: int

    def __str__(self) -> str:
        return f"{self.number}/{self.of}"

    def count(self, divided: bool) -> int:
        """Into how many cells a domain is cut: a power of two, and 1 for one shard, or where the proof cannot be divided."""
        if self.of == 1 or not divided:
            return 1
        return int(min(2 ** math.ceil(math.log2(EACH * self.of)), MOST_CELLS))

    def own(self, divided: bool) -> list[int]:
        """The numbers of the cells of this shard. Every cell belongs to one shard, and what is not divided to the first one."""
        return list(range(self.number - 1, self.count(divided), self.of))

    def cells(self, stored: Ends, ends: Ends, widths: Sequence[float]) -> list[Ends]:
        """The boxes of this shard: those of its numbers, of the cells into which `stored` is cut.

        Every halving takes the side that is longest in `widths`. `ends` is the domain as the head sees it, no smaller than
        `stored` and perhaps rounded outward differently on another machine: only the outer cells reach to its ends.
        """
        parts = [stored]
        while len(parts) < self.count(True):
            axis = max(range(len(stored)), key=lambda i: (parts[0][i][1] - parts[0][i][0]) / widths[i])
            parts = [half for part in parts for half in halves(part, axis)]
        outer = [tuple(zip(pair, moved)) for pair, moved in zip(stored, ends)]

        def reach(part: Ends) -> Ends:
            return tuple(
                (low[1] if a == low[0] else a, high[1] if b == high[0] else b)
                for (a, b), (low, high) in zip(part, outer)
            )

        return [reach(parts[k]) for k in self.own(True)]


WHOLE = Shard(1, 1)
