"""One plain sentence per head: what it does, only when the figures support it."""

from __future__ import annotations

import math
from typing import NamedTuple

from partita.inspection.figures import Figures, Roles

__all__ = ["sentence"]

_MOST = 0.5  # of the weight: then the head does this
_MUCH = 0.3  # then it does this among other things
_ABOVE = 0.25  # more than a random head
_LAG = 0.25  # of the queries: a lag that few of them have is not a pattern
_QUERIES = 10  # of the head, and of those that see a copy of their token: fewer carry no sentence


def sentence(figures: Figures, null: Figures, roles: Roles, null_roles: Roles) -> str:
    """What a head does. Empty if nothing stands out, if there are fewer than ten queries, or if no random head was read beside it.

    A place is named if it gets half of the weight (or nearly a third: "partly"), and a quarter more than from a random head of the
    same shape.
    Weights of a distance or of copies are means over the queries that see such a key. An average is named if the output is within a
    tenth of the plain mean, or within a quarter of it and twice as near as that of the random head.

    Args:
        figures: of the head.
        null: of the random head.
        roles: of the head.
        null_roles: of the random head.
    """
    if null.queries < _QUERIES:
        return ""  # a sentence needs something to compare with, and more than a few queries
    places = _places(roles, null_roles)
    found = [place for place in places if place.own >= _MUCH and place.own - place.random >= _ABOVE]
    if found:
        best = max(found, key=lambda place: place.own - place.random)  # of equal ones the first
        start = "Looks at" if best.own >= _MOST else "Partly looks at"
        return f"{start} {best.words}: {best.own:.0%} of its weight ({best.beside}: {best.random:.0%})."
    if figures.leakage <= 0.1 < null.leakage:
        share = 1 - figures.leakage
        return (
            f"Picks one key for each query: {share:.0%} of its weight is on it (a random head: {1 - null.leakage:.0%})."
        )
    nearest = max(0.1, min(0.25, null.mean_distance / 2))
    if figures.kind == "average" and figures.mean_distance <= nearest and figures.effective_keys >= 2:
        return (
            f"Averages: its output is within {figures.mean_distance:.0%} of the plain mean of the values it sees "
            f"(a random head: {null.mean_distance:.0%})."
        )
    return ""


class _Place(NamedTuple):
    """A place to look at, its weight, and that of a random head."""

    own: float
    random: float
    words: str
    beside: str = "a random head"


def _places(roles: Roles, null: Roles) -> list[_Place]:
    """The places whose weights are known, the simplest first."""
    said = [
        _Place(roles.on_previous, null.on_previous, "the previous token"),
        _Place(roles.on_self, null.on_self, "its own token"),
        _Place(roles.sink_mass, null.sink_mass, "the first token, whatever the query"),
    ]
    if roles.lag_share >= _LAG and roles.lag not in (0, 1):
        steps = abs(int(roles.lag))
        words = "the next token" if roles.lag == -1 else f"the token {steps} {'back' if roles.lag > 0 else 'ahead'}"
        own_distance = "a random head at its own most frequent distance"
        said.append(_Place(roles.on_lag, null.on_lag, f"{words}, where there is one", own_distance))
    if roles.copies >= _QUERIES:
        after, copies = "what followed other copies of its token (induction)", "other copies of its token"
        said += [
            _Place(roles.induction, null.induction, f"{after}, where there are any"),
            _Place(roles.duplicate_token, null.duplicate_token, f"{copies}, where there are any"),
        ]
    return [place for place in said if not math.isnan(place.own) and not math.isnan(place.random)]
