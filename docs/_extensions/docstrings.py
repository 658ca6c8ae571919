"""Docstrings as the house writes them, turned into reStructuredText for Sphinx.

They hold paragraphs with code in single backticks, sections (Args, Attributes, Returns, Raises) with one name per line,
lists, indented blocks, and examples that begin with `>>>`. Everything that is not code is text: no character of it is markup,
except *emphasis*. Keys after *Theorem*: become links to their sections.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from citations import CITATION, KEY

__all__ = ["to_rst"]

_FIELDS = {"Args": "param", "Attributes": "ivar", "Raises": "raises"}
_RESULTS = {"Returns": "returns", "Yields": "yields"}
_ENTRY = re.compile(r"\*{0,2}(\w+(?:, \*{0,2}\w+)*): (.*)", re.DOTALL)
_INLINE = re.compile(
    r"``(?P<double>.+?)``|`(?P<code>[^`]+)`|(?<![\w*])\*(?P<emphasis>[A-Za-z][^*`\n]*)\*(?![\w*])", re.DOTALL
)
_LIST = re.compile(r"(?:[-*]|\d+\.) ")


def to_rst(text: str) -> str:
    """The docstring, without its indentation, as reStructuredText."""
    return "\n\n".join(_blocks(text.strip("\n").split("\n"))) + "\n"


def _blocks(lines: list[str]) -> Iterator[str]:
    for block in _paragraphs(lines):
        heading = re.fullmatch(r"(\w+):", block[0])
        body = _outdented(block[1:])
        if heading and heading[1] in _FIELDS:
            yield "\n".join(_field(_FIELDS[heading[1]], entry) for entry in _entries(body))
        elif heading and heading[1] in _RESULTS:
            yield f":{_RESULTS[heading[1]]}: {_indented(inline(_joined(body)))}"
        elif block[0].startswith(">>> "):
            yield "\n".join([".. code-block:: pycon", "", *(f"    {line}" for line in block)])
        elif block[0].startswith(" "):
            yield "\n".join([".. code-block:: text", "", *(f"    {line}" for line in _outdented(block))])
        elif _LIST.match(block[0]):
            yield "\n".join(_items(block))
        else:
            prose = [line for line in block if not line.startswith(" ")]
            if prose == block:
                yield inline(_joined(block))
            else:  # a paragraph that goes over into an indented formula
                first = next(i for i, line in enumerate(block) if line.startswith(" "))
                yield inline(_joined(block[:first]))
                yield from _blocks(block[first:])


def _paragraphs(lines: list[str]) -> Iterator[list[str]]:
    """Lines up to the next empty one; a section goes on over empty lines as long as it is indented; examples stand alone."""
    block: list[str] = []
    for line in [*lines, ""]:
        section = bool(block) and re.fullmatch(r"\w+:", block[0]) is not None
        example = bool(block) and block[0].startswith(">>> ")
        ends = not line.strip() and not section
        ends |= section and bool(line.strip()) and not line.startswith(" ")
        ends |= line.startswith(">>> ") and not example
        ends |= bool(block) and not section and block[0][:1] == " " and bool(line.strip()) and not line.startswith(" ")
        ends |= re.fullmatch(r"(?:Args|Attributes|Raises|Returns|Yields):", line) is not None
        if ends and block:
            yield _stripped(block)
            block = []
        if line.strip() or block:
            block.append(line)
    if block:
        yield _stripped(block)


def _stripped(block: list[str]) -> list[str]:
    while not block[-1].strip():
        block = block[:-1]
    return block


def _outdented(lines: list[str]) -> list[str]:
    depth = min((len(line) - len(line.lstrip()) for line in lines if line.strip()), default=0)
    return [line[depth:] for line in lines]


def _joined(lines: list[str]) -> str:
    return "\n".join(line.strip() for line in lines if line.strip())


def _indented(text: str) -> str:
    return text.replace("\n", "\n    ")


def _entries(lines: list[str]) -> Iterator[str]:
    """The entries of a section: each begins at the margin."""
    entry: list[str] = []
    for line in lines:
        if line.strip() and not line.startswith(" ") and entry:
            yield _joined(entry)
            entry = []
        entry.append(line)
    if entry:
        yield _joined(entry)


def _field(kind: str, entry: str) -> str:
    found = _ENTRY.fullmatch(entry)
    if found is None:
        raise ValueError(f"{entry!r} is not an entry of a section; expected `name: what it is`.")
    return f":{kind} {found[1]}: {_indented(inline(found[2]))}"


def _items(lines: list[str]) -> Iterator[str]:
    for entry in _entries(lines):
        mark, text = entry.split(" ", 1)
        yield f"{'-' if mark in '-*' else mark} {text and inline(text).replace(chr(10), chr(10) + ' ' * (len(mark) + 1))}"


def inline(text: str) -> str:
    """One paragraph: code in backticks as literals, keys of theorems as links, the rest as plain text."""
    cited = {key.span() for found in CITATION.finditer(text) for key in KEY.finditer(text, *found.span(1))}
    parts, end = [], 0
    for found in _INLINE.finditer(text):
        before, after = text[: found.start()][-1:], text[found.end() :][:1]
        if found.span() in cited:
            markup = f":theorem:`{found['code']}`"
        elif found["emphasis"]:
            markup = f"*{_escaped(found['emphasis'])}*"
        else:
            markup = _literal(found["double"] or found["code"])
        left = "\\ " if before.strip() else ""
        right = "\\ " if after.strip() else ""
        parts += [_escaped(text[end : found.start()]), left, markup, right]
        end = found.end()
    result = "".join([*parts, _escaped(text[end:])])
    return re.sub(r"^([-+•:]|\.\.|\d+[.)])(?=\s)", r"\\\1", result)  # no list, comment or field


def _literal(code: str) -> str:
    code = " ".join(code.split())
    return f"``{code}``" if "``" not in code and not code.endswith("`") else _escaped(code)


def _escaped(text: str) -> str:
    return re.sub(r"([\\*`|_<>]|:(?=:))", r"\\\1", text)
