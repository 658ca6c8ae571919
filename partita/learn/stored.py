"""Estimators on disk: a sealed description and a safetensors file; nothing is unpickled."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from partita.errors import FormatError, PartitaError, TruncatedFileError, UnsupportedError
from partita.geometry.domains import Array
from partita.storage.loading import read_sealed, read_tensors
from partita.storage.saving import whole_folder, write_sealed

__all__ = ["Record", "decoded_labels", "encoded_labels", "read_record", "write_record"]

_VERSION = 1
_TENSORS, _DESCRIPTION = "estimator.safetensors", "estimator.json"
_LABEL_TYPES = re.compile(r"[<>|=][biuf][0-9]{1,2}|[<>|=]U[0-9]{1,5}|object")


@dataclass(frozen=True, eq=False)
class Record:
    """What a file holds.

    Attributes:
        kind: the name of the class.
        parameters: what the constructor was given; None, booleans, numbers, strings, lists of them, or an array.
        numbers: floats, by name.
        facts: anything that is JSON.
        arrays: finite float64, by name.
    """

    kind: str
    parameters: Mapping[str, Any]
    numbers: Mapping[str, float]
    facts: Mapping[str, Any]
    arrays: Mapping[str, Array]


def write_record(record: Record, folder: str | os.PathLike[str], *, overwrite: bool) -> Path:
    """Write the folder. It appears whole or not at all."""
    given = {name: _plain(name, value) for name, value in record.parameters.items()}
    tensors = {f"fitted.{name}": np.asarray(array, np.float64) for name, array in record.arrays.items()}
    tensors |= {f"parameter.{name}": value for name, value in given.items() if isinstance(value, np.ndarray)}
    description = {
        "format": "partita-estimator",
        "version": _VERSION,
        "estimator": record.kind,
        "parameters": {name: value for name, value in given.items() if not isinstance(value, np.ndarray)},
        "numbers": {name: float(value).hex() for name, value in record.numbers.items()},
        "facts": dict(record.facts),
    }
    copies = {name: torch.tensor(np.ascontiguousarray(array)) for name, array in tensors.items()}
    with whole_folder(folder, overwrite=overwrite, marker=_DESCRIPTION, kind="an estimator") as draft:
        write_sealed(draft, _DESCRIPTION, description, {_TENSORS: copies})
    return Path(folder)


def read_record(folder: str | os.PathLike[str]) -> Record:
    """Read what `write_record` wrote. Raises what `partita.load` raises."""
    place = Path(folder)
    if not place.is_dir():
        what = "is not a folder" if place.exists() else "does not exist"
        raise TruncatedFileError(f"{place} {what}; expected a folder with {_TENSORS} and {_DESCRIPTION}.")
    try:
        found = read_sealed(place, _DESCRIPTION, format="partita-estimator", newest=_VERSION, tensors=_TENSORS)
        tensors = {name: tensor.numpy() for name, tensor in read_tensors(place / _TENSORS).items()}
        arrays = {head: _named(tensors, head) for head in ("fitted.", "parameter.")}
        return Record(
            str(found["estimator"]),
            {**{name: _read_plain(value) for name, value in found["parameters"].items()}, **arrays["parameter."]},
            {name: float.fromhex(value) for name, value in found["numbers"].items()},
            found["facts"],
            arrays["fitted."],
        )
    except PartitaError:
        raise
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise FormatError(f"{place} does not contain a valid estimator: {type(error).__name__}: {error}") from None


def _named(tensors: Mapping[str, Array], head: str) -> dict[str, Array]:
    return {name.removeprefix(head): tensor for name, tensor in tensors.items() if name.startswith(head)}


def _plain(name: str, value: Any) -> Any:
    """A parameter as something that JSON or a tensor can hold."""
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, Mapping):  # class_weight
        return [[_label(k), float(v)] for k, v in value.items()]
    try:
        array = np.asarray(value, dtype=np.float64)
    except (TypeError, ValueError):
        raise UnsupportedError(
            f"parameter {name} is a {type(value).__name__}, which is not saved; expected None, a number, a string or an array",
            f"Set it first: model.set_params({name}=None). Fitted values do not depend on it.",
        ) from None
    return array


def _read_plain(value: Any) -> Any:
    return {_read_label(label): weight for label, weight in value} if isinstance(value, list) else value


def _label(label: Any) -> list[str]:
    """A label as its type and text."""
    label = label.item() if isinstance(label, np.generic) else label
    if type(label) not in (str, int, bool, float):
        raise UnsupportedError(
            f"label {label!r} is a {type(label).__name__}; only str, int, float and bool labels are saved."
        )
    return [type(label).__name__, label.hex() if isinstance(label, float) else str(label)]


def _read_label(parts: Any) -> Any:
    """The label that `_label` wrote."""
    kind, text = parts
    if kind not in ("str", "int", "bool", "float") or not isinstance(text, str):
        raise FormatError(f"a label has the type {kind!r}; expected str, int, bool or float.")
    if kind == "bool":
        return {"True": True, "False": False}[text]
    return text if kind == "str" else int(text) if kind == "int" else float.fromhex(text)


def encoded_labels(labels: NDArray[Any]) -> dict[str, Any]:
    """Class labels as JSON, with their dtype."""
    dtype = "object" if labels.dtype == object else labels.dtype.str
    if not _LABEL_TYPES.fullmatch(dtype):
        raise UnsupportedError(
            f"labels have dtype {labels.dtype}; only str, int, float, bool and object labels are saved."
        )
    return {"dtype": dtype, "labels": [_label(label) for label in labels.tolist()]}


def decoded_labels(data: Mapping[str, Any]) -> NDArray[Any]:
    """The labels that `encoded_labels` wrote."""
    if not _LABEL_TYPES.fullmatch(str(data["dtype"])):
        raise FormatError(f"labels have dtype {data['dtype']!r}; expected a dtype of str, int, float, bool or object.")
    labels = [_read_label(parts) for parts in data["labels"]]
    out = np.empty(len(labels), dtype=np.dtype(str(data["dtype"])))
    out[:] = labels
    return out
