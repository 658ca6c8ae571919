"""Text and small HTML cards for people: what `__repr__` and `_repr_html_` return.

Cards are plain escaped tables, without scripts or colours of their own.
Text and lines take the colour of the page, so that a card is readable on light and on dark backgrounds.
"""

from __future__ import annotations

import html
import math
from collections.abc import Iterable, Mapping, Sequence

__all__ = ["aligned", "card", "counted", "short"]

_MOST_ROWS, _MOST_CHARACTERS = 50, 400
_CELL = "padding:2px 10px 2px 0;text-align:left;vertical-align:top"
_HEAD = f"{_CELL};border-bottom:1px solid currentColor"


def card(
    title: str,
    facts: Mapping[str, object] | None = None,
    *,
    columns: Sequence[str] = (),
    rows: Iterable[Sequence[object]] = (),
    note: str = "",
) -> str:
    """A title, named facts, and a table, as HTML.

    Args:
        title: shown in bold.
        facts: names and values, one line each; those that are empty are left out.
        columns: headings of the table.
        rows: cells of the table; after the first 50 rows the others are counted.
        note: a line below.

    >>> card("a < b", {"keys": 3})[:48]
    '<div style="color:inherit"><strong>a &lt; b</str'
    """
    lines, listed = [f'<div style="color:inherit"><strong>{_text(title)}</strong>'], list(rows)
    named = [(name, value) for name, value in (facts or {}).items() if value not in ("", None)]
    if named:
        lines.append(_table([], [(f"{_text(name)}", _text(value)) for name, value in named]))
    if listed:
        heads = [_text(c) for c in columns]
        lines.append(_table(heads, [[_text(x) for x in row] for row in listed[:_MOST_ROWS]]))
    rest = len(listed) - _MOST_ROWS
    for line in (f"… and {rest:,} more rows" if rest > 0 else "", note):
        lines += [f'<div style="opacity:0.75">{_text(line)}</div>'] if line else []
    return "".join([*lines, "</div>"])


def aligned(rows: Iterable[Sequence[str]]) -> list[str]:
    """Lines of a table in plain text: the first column to the left, the others to the right.

    Args:
        rows: the cells, headings first.

    >>> aligned([("", "keys"), ("head 1", "8")])
    ['          keys', 'head 1       8']
    """
    table = [tuple(row) for row in rows]
    widths = [max(len(row[k]) for row in table) + 2 for k in range(len(table[0]))]
    return [
        "".join(f"{x:<{w}}" if k == 0 else f"{x:>{w}}" for k, (x, w) in enumerate(zip(row, widths))) for row in table
    ]


def counted(number: int, noun: str) -> str:
    """A number and its noun, in the plural where it belongs.

    Args:
        number: how many.
        noun: in the singular; its plural has an s.

    >>> counted(1, "head"), counted(1200, "head")
    ('1 head', '1,200 heads')
    """
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def short(number: float) -> str:
    """A number with three digits; thousands in full, and a dash for NaN.

    Args:
        number: what to write.

    >>> short(0.12345), short(12345.6), short(float("nan"))
    ('0.123', '12,346', '–')
    """
    if math.isnan(number):
        return "–"
    return f"{number:,.0f}" if 1000 <= abs(number) < math.inf else f"{number:.3g}"


def _text(value: object) -> str:
    text = "" if value is None else str(value)
    return html.escape(text if len(text) <= _MOST_CHARACTERS else f"{text[: _MOST_CHARACTERS - 1]}…")


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table of cells that are escaped already."""
    top = "<tr>" + "".join(f'<th style="{_HEAD}">{h}</th>' for h in heads) + "</tr>" if heads else ""
    body = "".join("<tr>" + "".join(f'<td style="{_CELL}">{x}</td>' for x in row) + "</tr>" for row in rows)
    return (
        f'<table style="color:inherit;background:transparent;border-collapse:collapse;margin:4px 0">{top}{body}</table>'
    )
