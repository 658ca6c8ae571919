"""How often one compile changes rooms: a reader who follows it through the code has to move as often."""

from __future__ import annotations

import sys
from itertools import pairwise
from types import FrameType
from typing import Any

import partita as pa

# 95 in version 0.2.0; 41 before limits on values, evaluations and time; 46 before kernels had a room that every evaluation
# enters, and before half types, which precision is asked about; 52 before work could leave the process; 58 before tables were
# looked at in blocks and functions asked again at the end
CEILING = 64


def functions_called(work: Any) -> list[tuple[str, str]]:
    """(module, function) of partita in order of first call."""
    found: dict[tuple[str, str], None] = {}

    def note(frame: FrameType, event: str, _: object) -> None:
        module = frame.f_globals.get("__name__", "")
        if event == "call" and module.startswith("partita."):
            found.setdefault((module, frame.f_code.co_qualname))

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        work()
    finally:
        sys.setprofile(before)
    return list(found)


def moves(calls: list[tuple[str, str]]) -> int:
    """How often neighbours are in different rooms, a room being the second part of a module's name."""
    rooms = [module.split(".")[1] for module, _ in calls]
    return sum(a != b for a, b in pairwise(rooms))


def one_compile() -> None:
    pa.compile("sin(3*x0) + x0*cos(2*x1)", pa.Box([-1, -1], [1, 1]), tolerance=1e-4)


def test_a_compile_changes_rooms_no_more_than_it_did() -> None:
    one_compile()  # what is imported or kept for later is there now, whichever tests ran before
    calls = functions_called(one_compile)
    print(f"{len(calls)} functions in {len({m for m, _ in calls})} files, {moves(calls)} changes of rooms")
    assert 20 < moves(calls) <= CEILING


def test_changes_of_rooms_are_counted() -> None:
    """Control: two rooms and back are two changes; files of one room are none."""
    there = [("partita.methods.hard", "a"), ("partita.search.leaves", "b"), ("partita.search.spacing", "c")]
    assert moves(there) == 1 and moves([*there, there[0]]) == 2 and moves(there[1:]) == 0
