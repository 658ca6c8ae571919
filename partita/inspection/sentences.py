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
_QUERIES = 10  # of the head, of those that have a lag, of those that see a copy of their token: fewer carry no sentence
_ERRORS = 3  # standard errors by which a head must differ from the random one
_OVERLAP = 1.1  # of the weight: places with more between them share keys
_SAME_KEY = 0.9  # of the queries in one cell


def sentence(figures: Figures, null: Figures, roles: Roles, null_roles: Roles) -> str:
    """What a head does. Empty if nothing stands out, if there are fewer than ten queries, or if no random head was read beside it.

    A place is named if it gets half of the weight (or nearly a third: "partly"), and a quarter more than from a random head of the
    same shape, and three standard errors more, which are at most `√(p(1 − p)/n)` for a mean p of n weights in [0, 1].
    Further places are named if the weight is shared between them. Weights of a distance or of copies are means over the queries
    that see such a key. An average is named if the output is within a tenth of the plain mean, or within a quarter of it and
    twice as near as that of the random head.

    Args:
        figures: of the head.
        null: of the random head.
        roles: of the head.
        null_roles: of the random head.
    """
    if null.queries < _QUERIES:
        return ""  # a sentence needs something to compare with, and more than a few queries
    places = _places(figures.queries, roles, null_roles)
    found = [p for p in places if p.own >= _MUCH and _stands_out(p.own, p.random, p.queries)]
    if found:
        found.sort(key=lambda place: place.random - place.own)  # of equal ones the first
        named = found[:1]
        for place in found[1:]:
            copies = place.of_copies and any(p.of_copies for p in named)  # in text that repeats they are the same keys
            if not copies and sum(p.own for p in named) + place.own <= _OVERLAP:
                named.append(place)
        start = "Looks at" if sum(place.own for place in named) >= _MOST else "Partly looks at"
        best, *others = named
        more = "".join(f", and at {p.words}: {p.own:.0%} ({p.random:.0%})" for p in others)
        return f"{start} {best.words}: {best.own:.0%} of its weight ({best.beside}: {best.random:.0%}){more}."
    share, random = 1 - figures.leakage, 1 - null.leakage
    if share >= 0.9 and _stands_out(share, random, figures.queries):
        same = figures.largest_cell >= _SAME_KEY and figures.effective_cells < null.effective_cells
        which = f"the same one for {figures.largest_cell:.0%} of a sequence's queries" if same else "for each query"
        return f"Picks one key{',' if same else ''} {which}: {share:.0%} of its weight is on it (a random head: {random:.0%})."
    nearest = max(0.1, min(0.25, null.mean_distance / 2))
    if figures.kind == "average" and figures.mean_distance <= nearest and figures.effective_keys >= 2:
        return (
            f"Averages: its output is within {figures.mean_distance:.0%} of the plain mean of the values it sees "
            f"(a random head: {null.mean_distance:.0%})."
        )
    return ""


def _stands_out(own: float, random: float, queries: float) -> bool:
    """Whether a mean of weights is larger than that of the random head by more than chance."""
    spread = sum(max(0.0, p * (1 - p)) for p in (own, random))  # rounding may take p beyond 1
    return own - random >= max(_ABOVE, _ERRORS * math.sqrt(spread / queries))


class _Place(NamedTuple):
    """A place to look at, its weight, that of a random head, and how many queries the means are over."""

    own: float
    random: float
    queries: float
    words: str
    beside: str = "a random head"
    of_copies: bool = False


def _places(queries: int, roles: Roles, null: Roles) -> list[_Place]:
    """The places whose weights are known, the simplest first."""
    said = [
        _Place(roles.on_previous, null.on_previous, queries, "the previous token"),
        _Place(roles.on_self, null.on_self, queries, "its own token"),
        _Place(roles.sink_mass, null.sink_mass, queries, "the first token"),
    ]
    at_lag = roles.lag_share * queries
    if roles.lag_share >= _LAG and roles.lag not in (0, 1) and at_lag >= _QUERIES:
        steps = abs(int(roles.lag))
        words = "the next token" if roles.lag == -1 else f"the token {steps} {'back' if roles.lag > 0 else 'ahead'}"
        own_distance = "a random head at its own most frequent distance"
        said.append(_Place(roles.on_lag, null.on_lag, at_lag, f"{words}, where there is one", own_distance, True))
    if roles.copies >= _QUERIES:
        after, copies = "what followed other copies of its token (induction)", "other copies of its token"
        said += [
            _Place(roles.induction, null.induction, roles.copies, f"{after}, where there are any", of_copies=True),
            _Place(
                roles.duplicate_token,
                null.duplicate_token,
                roles.copies,
                f"{copies}, where there are any",
                of_copies=True,
            ),
        ]
    return [place for place in said if not math.isnan(place.own) and not math.isnan(place.random)]
