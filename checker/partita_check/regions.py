"""Regions: unions of boxes that are cut by inequalities `g ≤ slack`. Balls decide which boxes hold no point of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from flint import arb

from partita_check.clock import clock
from partita_check.graph import MAX_TYPED, Graph, need, parse, read_graph, read_hex
from partita_check.polynomials import Ends, halves

__all__ = ["Piece", "Region", "read_region"]

MOST_PIECES, MOST_CONSTRAINTS, MEASURED, HALVINGS = 1000, 10_000, 8_000, 200


class Piece(NamedTuple):
    """The points of a box at which every g is at most its slack."""

    ends: Ends
    constraints: tuple[tuple[Graph, float], ...]

    def outside(self, ends: Ends) -> bool:
        """Whether a box is proved to hold no point of the piece."""
        cut = [(max(a, c), min(b, d)) for (a, b), (c, d) in zip(ends, self.ends)]
        if any(a > b for a, b in cut):
            return True
        box = [arb(a).union(arb(b)) for a, b in cut]
        return any(bool(g.evaluate(box)[0] > slack) for g, slack in self.constraints)

    def holds(self, point: Sequence[float]) -> bool:
        """Whether a point is proved to lie in the piece."""
        at = [arb(x) for x in point]
        inside = all(a <= x <= b for x, (a, b) in zip(point, self.ends))
        return inside and all(bool(g.evaluate(at)[0] <= slack) for g, slack in self.constraints)


class Region(NamedTuple):
    """A union of pieces."""

    pieces: tuple[Piece, ...]

    @property
    def ends(self) -> Ends:
        """The box around all pieces."""
        rows = list(zip(*(piece.ends for piece in self.pieces)))
        return tuple((min(a for a, _ in row), max(b for _, b in row)) for row in rows)

    def outside(self, ends: Ends) -> bool:
        clock.tick()
        return all(piece.outside(ends) for piece in self.pieces)

    def holds(self, point: Sequence[float]) -> bool:
        return any(piece.holds(point) for piece in self.pieces)

    def volume(self) -> arb:
        """At least the volume of the region: that of boxes which cover it, halved until there are many."""
        sides, level = [b - a for a, b in self.ends], [self.ends]
        for _ in range(HALVINGS):
            if not 0 < len(level) < MEASURED:
                break
            ends = level[0]  # all have one size
            axis = max(range(len(ends)), key=lambda i: (ends[i][1] - ends[i][0]) / sides[i])
            level = [half for part in level for half in halves(part, axis) if not self.outside(half)]
        return sum((math.prod((arb(b) - arb(a) for a, b in ends), start=arb(1)) for ends in level), arb(0))

    def infix(self, names: Sequence[str]) -> str:
        shown = []
        for piece in self.pieces:
            parts = [f"{name} in [{a:.9g}, {b:.9g}]" for name, (a, b) in zip(names, piece.ends)]
            parts += [f"{g.infix(names)} <= {slack:.3g}" for g, slack in piece.constraints]
            shown.append(", ".join(parts))
        return "; or ".join(shown)


def read_region(data: Any, m: int) -> Region:
    """The region that a file describes. The text of a constraint is read here again and must be its graph."""
    need(isinstance(data["pieces"], list) and 0 < len(data["pieces"]) <= MOST_PIECES, "region: expected some pieces")
    names, pieces = [f"x{i}" for i in range(m)], []
    for part in data["pieces"]:
        lo, hi = ([read_hex(x, end) for x in part[end]] for end in ("lo", "hi"))
        need(len(lo) == len(hi) == m and all(a < b for a, b in zip(lo, hi)), "region: expected lo < hi on every axis")
        need(len(part["constraints"]) <= MOST_CONSTRAINTS, "region: too many constraints")
        found = []
        for row in part["constraints"]:
            graph, slack, text = read_graph(row["graph"]), read_hex(row["slack"], "slack"), str(row["text"])
            need(graph.inputs == m and graph.shape == (), "region: a constraint has the wrong variables or shape")
            need(slack >= 0 and text.endswith(" <= 0"), "region: a slack is negative, or a text is no inequality")
            if len(text) <= MAX_TYPED:
                read = parse(text.removesuffix(" <= 0"), names).canonical()
                need(read is not None and read == graph.canonical(), f"region: {text[:80]} is not its graph")
            found.append((graph, slack))
        pieces.append(Piece(tuple(zip(lo, hi)), tuple(found)))
    return Region(tuple(pieces))
