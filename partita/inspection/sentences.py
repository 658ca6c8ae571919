"""One plain sentence per head that says what it does, if the figures support it."""

from __future__ import annotations

import math
from typing import NamedTuple

from partita.inspection.figures import Figures, Roles

__all__ = ["sentence"]

_MOST = 0.5  # share of the weight for "Looks at"
_MUCH = 0.3  # share of the weight for "Partly looks at"
_ABOVE = 0.25  # least excess over the random head
_LAG = 0.25  # least share of the queries that have the most frequent lag
_QUERIES = 10  # least number of queries: of the head, with the lag, and that see a copy of their token
_ERRORS = 3  # standard errors by which a head must differ from the random one
_PART = 0.05  # least weight on its own position, and on other copies, for "tokens equal to its own"
_OVERLAP = 1.1  # places that together have more than this share of the weight must share keys
_SAME_KEY = 0.9  # share of the queries in one cell for "the same one"


def sentence(figures: Figures, null: Figures, roles: Roles, null_roles: Roles) -> str:
    """What a head does. Empty if nothing stands out, if there are fewer than ten queries, or if no random head was read beside it.

    A place is named if it gets at least 30 % of the weight, and exceeds a random head of the same shape by 0.25 and by three
    standard errors. (The standard error of a mean p of n weights in [0, 1] is at most `√(p(1 − p)/n)`.) Further places are named if
    they get a different part of the weight. If all named places get less than half of the weight, the sentence says "partly".
    Weights of a distance or of copies are means over the queries that see such a key. A head that looks at its own position and at
    other copies of its token looks at one place, the tokens equal to its own. An average is named if the output is within
    a tenth of the plain mean, or within a quarter of it and twice as near as that of the random head.

    Args:
        figures: figures of the head.
        null: figures of the random head.
        roles: roles of the head.
        null_roles: roles of the random head.
    """
    if null.queries < _QUERIES:
        return ""  # no random head to compare with, or too few queries
    places = _places(figures.queries, roles, null_roles)
    found = [p for p in places if p.own >= _MUCH and _stands_out(p.own, p.random, p.queries)]
    if found:
        found.sort(key=lambda place: place.random - place.own)  # stable: ties go to the first
        named = found[:1]
        for place in found[1:]:
            copies = place.of_copies and any(p.of_copies for p in named)  # in repeated text these are the same keys
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
    """Whether a mean of weights exceeds that of the random head by more than chance."""
    spread = sum(max(0.0, p * (1 - p)) for p in (own, random))  # rounding may make p larger than 1
    return own - random >= max(_ABOVE, _ERRORS * math.sqrt(spread / queries))


class _Place(NamedTuple):
    """A place to look at: its weight, the same for a random head, and the number of queries in these means."""

    own: float
    random: float
    queries: float
    words: str
    beside: str = "a random head"
    of_copies: bool = False


def _places(queries: int, roles: Roles, null: Roles) -> list[_Place]:
    """The places whose weights are known, simplest first."""
    own = _Place(roles.on_self, null.on_self, queries, "its own position")
    copies = []
    if roles.copies >= _QUERIES:
        count, after = roles.copies, "what followed other copies of its token (induction), where there are any"
        others, equal = "other copies of its token, where there are any", "tokens equal to its own, itself included"
        copies = [
            _Place(roles.induction, null.induction, count, after, of_copies=True),
            _Place(roles.duplicate_token, null.duplicate_token, count, others, of_copies=True),
        ]
        same = _Place(roles.same_token, null.same_token, queries, equal, of_copies=True)
        together = _PART <= own.own <= same.own - _PART and same.own >= roles.duplicate_token
        if together and _stands_out(same.own, same.random, queries):
            own, copies = same, copies[:1]
    first = _Place(roles.sink_mass, null.sink_mass, queries, "the first token")
    said = [_Place(roles.on_previous, null.on_previous, queries, "the previous token"), own, first]
    at_lag = roles.lag_share * queries
    if roles.lag_share >= _LAG and roles.lag not in (0, 1) and at_lag >= _QUERIES:
        steps = abs(int(roles.lag))
        words = "the next token" if roles.lag == -1 else f"the token {steps} {'back' if roles.lag > 0 else 'ahead'}"
        own_distance = "a random head at its own most frequent distance"
        said.append(_Place(roles.on_lag, null.on_lag, at_lag, f"{words}, where there is one", own_distance, True))
    return [place for place in (*said, *copies) if not math.isnan(place.own) and not math.isnan(place.random)]
