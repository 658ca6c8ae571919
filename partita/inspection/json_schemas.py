"""JSON Schemas (2020-12) of the files that inspection writes, generated from its dataclasses and their docstrings."""

from __future__ import annotations

import dataclasses
import inspect
import re
import types
from collections.abc import Mapping, Sequence
from typing import Any, Union, get_args, get_origin, get_type_hints

__all__ = ["described_object", "finish"]

_PLAIN: dict[Any, dict[str, Any]] = {
    bool: {"type": "boolean"},
    int: {"type": "integer"},
    float: {"type": ["number", "null"]},  # null: not defined, or not finite
    str: {"type": "string"},
}


def described_object(
    cls: type,
    definitions: dict[str, Any],
    *,
    written: Sequence[str] | None = None,
    optional: Mapping[type, Sequence[str]] | None = None,
) -> dict[str, Any]:
    """The schema of a dataclass as an object.

    Args:
        cls: the dataclass. Its docstring describes the fields, under "Attributes:".
        definitions: filled with the schemas of nested dataclasses, by name.
        written: the fields that are written; all by default.
        optional: fields of other dataclasses that may be missing from the file.
    """
    words, kinds = _described(cls), get_type_hints(cls)
    names = [f.name for f in dataclasses.fields(cls)] if written is None else list(written)
    properties = {}
    for name in names:
        found = _schema(kinds[name], definitions, optional or {})
        properties[name] = {**found, "description": words[name]} if words.get(name) else found
    required = [n for n in names if n not in (optional or {}).get(cls, ())]
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def _schema(kind: Any, definitions: dict[str, Any], optional: Mapping[type, Sequence[str]]) -> dict[str, Any]:
    if kind in _PLAIN:
        return dict(_PLAIN[kind])
    if dataclasses.is_dataclass(kind) and isinstance(kind, type):
        if kind.__name__ not in definitions:
            definitions[kind.__name__] = {}  # may contain itself
            definitions[kind.__name__] = described_object(kind, definitions, optional=optional)
        return {"$ref": f"#/$defs/{kind.__name__}"}
    inner = get_args(kind)
    if get_origin(kind) in (Union, types.UnionType):
        return {"anyOf": [{"type": "null"} if k is type(None) else _schema(k, definitions, optional) for k in inner]}
    if get_origin(kind) is tuple and len(inner) == 2 and inner[1] is Ellipsis:
        return {"type": "array", "items": _schema(inner[0], definitions, optional)}
    raise TypeError(
        f"no JSON Schema is known for a field of type {kind}; expected numbers, strings, tuples or dataclasses"
    )


def _described(cls: type) -> dict[str, str]:
    """The docstring's description of each attribute; empty if Python runs without docstrings."""
    text = inspect.getdoc(cls) or ""
    section = re.search(r"^Attributes:\n((?:(?: {4}.*)?\n)*)", text + "\n\n", re.M)
    found: dict[str, str] = {}
    name = ""
    for line in section.group(1).splitlines() if section else ():
        if start := re.match(r" {4}(\w+): (.*)", line):
            name = start.group(1)
            found[name] = start.group(2)
        elif line.strip() and name:
            found[name] += " " + line.strip()
    return found


def finish(
    name: str, version: int, words: str, properties: dict[str, Any], definitions: dict[str, Any]
) -> dict[str, Any]:
    """The schema of a whole file: the name and version of its format, and its other fields.

    Args:
        name: of the format.
        version: of the format.
        words: description of the file.
        properties: schemas of the other fields; all are required.
        definitions: of the dataclasses that they refer to.
    """
    head = {
        "format": {"const": name, "description": "name of the format."},
        "version": {
            "const": version,
            "description": "version of the format; readers ignore fields that they do not know.",
        },
    }
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": name,
        "description": words,
        "type": "object",
        "properties": {**head, **properties},
        "required": [*head, *properties],
        "additionalProperties": False,
        "$defs": definitions,
    }
