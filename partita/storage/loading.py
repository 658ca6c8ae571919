"""Reading a head: nothing from outside is trusted, evaluated or unpickled."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from partita.arithmetic.precision import PRECISIONS
from partita.errors import (
    DomainError,
    FormatError,
    NewerVersionError,
    PartitaError,
    ShapeError,
    TamperedFileError,
    TruncatedFileError,
)
from partita.functions.graph import Graph
from partita.functions.regions import Domain, Region
from partita.functions.tails import clipped
from partita.functions.target import Tail, Target, graph_target, require_boxes
from partita.geometry.domains import Array, Box, PointCloud, product
from partita.heads.head import Head
from partita.heads.network import AttentionNetwork, exact_values
from partita.heads.recorded import head_from_record
from partita.heads.table_blocks import all_finite
from partita.heads.tensor_file import map_tensors, parse_tensors, stored_name
from partita.proofs.certificate import Certificate, model_digest
from partita.storage.files import hash_regular, open_regular, read_regular
from partita.storage.saving import CERTIFICATE, DESCRIPTION, FORMAT_VERSION, TENSORS, canonical

__all__ = ["Stored", "load_parts", "read_json", "read_sealed", "read_tensors"]

_JSON_BYTES, _JSON_DEPTH = 64 << 20, 64
_MAPPED_FROM = (
    64 << 20
)  # bytes of a file of tensors beyond which it is mapped: smaller ones are read, and may then be replaced

Stored = tuple[Head, Certificate, Target, str, tuple[str, ...]]


def load_parts(folder: str | os.PathLike[str]) -> Stored:
    """Read a saved head.

    Every hash and shape is checked, the three files must agree with each other, and the head must be one that can be run.

    Args:
        folder: what `save` wrote.

    Returns:
        head, certificate, target, `outside` and `why`.

    Raises:
        TruncatedFileError: a file is missing or cut off.
        TamperedFileError: parts that do not belong together.
        NewerVersionError: the format is newer than this version.
        FormatError: anything else that docs/format.md rules out.
    """
    place = Path(folder)
    if not place.is_dir():
        found = "is not a folder" if place.exists() else "does not exist"
        raise TruncatedFileError(f"{place} {found}; expected a folder with {TENSORS}, {DESCRIPTION} and {CERTIFICATE}.")
    try:
        description = read_sealed(
            place, DESCRIPTION, format="partita-head", newest=FORMAT_VERSION, tensors=TENSORS, others=(CERTIFICATE,)
        )
        certificate = Certificate.from_json(read_json(place / CERTIFICATE))
        tensors = read_tensors(place / TENSORS)
        named = enumerate(description["domains"])
        domains = tuple(_read_domain(d, tensors.get(f"domain.{i}.points")) for i, d in named)
        prefix = stored_name("")
        own = {name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)}
        box = (domains[0] if len(domains) == 1 else product(*require_boxes(*domains))).bounding_box()
        head = head_from_record(description["head"], own, box)
        if head.input_shapes != tuple(d.shape for d in domains):
            raise FormatError(
                f"{DESCRIPTION}: the head's inputs have shapes {head.input_shapes}; expected the shapes of the domains."
            )
        target = _read_target(description["target"], domains, head, certificate)
        outside, why = str(description["outside"]), tuple(map(str, description["why"]))
        _require_agreement(place, description["head"], head, target, certificate)
        hull = _hull(target.domain)
        head.check_range(hull.lo, hull.hi)
    except (DomainError, ShapeError) as error:
        raise FormatError(f"{place}: the head cannot run in the arithmetic of its certificate: {error}") from None
    except PartitaError:
        raise
    except (LookupError, TypeError, ValueError, AttributeError, RuntimeError, OSError, OverflowError) as error:
        raise FormatError(
            f"{place} does not contain a valid head (see docs/format.md): {type(error).__name__}: {error}"
        ) from None
    return head, certificate, target, outside, why


def _require_agreement(
    place: Path, described: Mapping[str, Any], head: Head, target: Target, certificate: Certificate
) -> None:
    """A TamperedFileError unless certificate.json is about the head, the domain and the function of the other two files."""
    function, model = certificate.function, certificate.model
    wired = function.get("type") == "network" and isinstance(head, AttentionNetwork)
    named = ("text" if wired or target.graph is not None else "label"), target.label
    unknown = "table" if target.is_table else "black box"
    kind = "graph" if target.graph is not None else "network" if wired else unknown
    pairs: list[tuple[str, Any, Any]] = [
        ("sha256 of the tensors", model.get("sha256"), model_digest(head.state_dict())),
        ("type of head", model.get("type", described["type"]), described["type"]),
        ("domain", list(certificate.domain.get("arguments", [])), [d.description for d in target.domains]),
        ("arithmetic", certificate.semantics, head.semantics),
        ("type of function", function.get("type"), kind),
        ("name of the function", function.get(named[0]), named[1]),
    ]
    if isinstance(head, AttentionNetwork):
        pairs.append(("sha256 of the wiring", model.get("wiring_sha256"), head.wiring_sha256()))
    if kind == "network" and isinstance(head, AttentionNetwork):
        digest = head.function_sha256([part["graph"] for part in certificate.proof["parts"]])
        pairs.append(("sha256 of the function", function.get("sha256"), digest))
    if target.stated is not None:
        pairs.append(("sha256 of the function", function.get("sha256"), target.stated.sha256))
        pairs.append(("function", function.get("graph"), target.stated.to_json()))
    if target.tail is not None or "clip" in function:
        stated = (
            {"clip": target.tail.clip, "norm": target.tail.norm, "declared": target.tail_declared}
            if target.tail
            else None
        )
        pairs.append(("clip", function.get("clip"), None if target.tail is None else target.tail.clip))
        pairs.append(("tail", certificate.known.get("tail"), stated))
    for what, certified, found in pairs:
        if certified != found:
            raise TamperedFileError(
                f"{place / CERTIFICATE} belongs to another head: its {what} is {_short(certified)}, the other files have "
                f"{_short(found)}. Use the certificate that was saved with the head."
            )


def _hull(domain: Domain) -> Box:
    """The box around the domain, and around what lies between the points of a cloud."""
    box, grown = domain.bounding_box(), domain.fill_distance if isinstance(domain, PointCloud) else 0.0
    return Box(box.lo - grown, box.hi + grown) if grown else box


def _short(value: object) -> str:
    text = str(value)
    return text if len(text) <= 120 else f"{text[:117]}…"


def read_sealed(
    place: Path, name: str, *, format: str, newest: int, tensors: str, others: Sequence[str] = ()
) -> dict[str, Any]:
    """The description that `write_sealed` wrote, after its version, its seal and the hashes of its files were checked.

    Args:
        place: the folder.
        name: the file with the description.
        format: what its "format" must be.
        newest: the newest version that is read.
        tensors: the name of the safetensors file.
        others: names of JSON files.

    Raises:
        TruncatedFileError: a file is missing.
        TamperedFileError: a file was changed after it was written.
        NewerVersionError: the version is newer.
        FormatError: another format.
    """
    description = read_json(place / name)
    if description.get("format") != format:
        raise FormatError(f"{place / name}: format is {description.get('format')!r}, expected {format!r}.")
    version = description.get("version")
    if type(version) is not int or version < 1:
        raise FormatError(f"{place / name}: version is {version!r}; expected an integer ≥ 1.")
    if version > newest:
        raise NewerVersionError(
            f"{place / name} has format version {version}; this partita reads up to {newest}. Install a newer one."
        )
    seal = description.pop("seal", None)
    if seal != hashlib.sha256(canonical(description)).hexdigest():
        raise TamperedFileError(f"{place / name} was changed after it was written: its seal does not match.")
    with open_regular(place / tensors) as file:
        map_tensors(file)  # a file that is not what its header says is refused before all of it is read
    for own, most in ((tensors, None), *((other, _JSON_BYTES) for other in others)):
        found = hash_regular(place / own, most)
        if found != description["sha256"].get(own):
            raise TamperedFileError(
                f"{place / own} was changed or cut off after it was written: its sha256 is {found[:12]}…, "
                f"recorded {str(description['sha256'].get(own))[:12]}…."
            )
    return description


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a regular file; NaN, Infinity, duplicate keys, deep nesting and huge files are refused."""
    try:
        text = read_regular(path, _JSON_BYTES).decode()
        if _depth(text) > _JSON_DEPTH:
            raise FormatError(f"{path} is nested more than {_JSON_DEPTH} deep.")
        parsed = json.loads(text, object_pairs_hook=_no_duplicates, parse_constant=_no_constants)
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise TruncatedFileError(f"{path} is not complete JSON: {error}.") from None
    if not isinstance(parsed, dict):
        raise FormatError(f"{path} contains a {type(parsed).__name__}; expected an object.")
    return parsed


def _depth(text: str) -> int:
    deepest = depth = 0
    for character in text:
        if character in "[{":
            depth += 1
            deepest = max(deepest, depth)
        elif character in "]}":
            depth -= 1
    return deepest


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise FormatError("a JSON object repeats a key; expected each once.")
    return found


def _no_constants(name: str) -> None:
    raise FormatError(f"JSON contains {name}; expected finite numbers.")


def read_tensors(path: Path) -> dict[str, torch.Tensor]:
    """Finite tensors from a safetensors file, mapped into memory if the file is large; anything else is a FormatError."""
    with open_regular(path) as file:
        is_large = os.fstat(file.fileno()).st_size > _MAPPED_FROM
        tensors = map_tensors(file) if is_large else parse_tensors(bytearray(file.read()), str(path))
    for name, tensor in tensors.items():
        if str(tensor.dtype) not in PRECISIONS or not all_finite(tensor):
            raise FormatError(
                f"{path}: tensor {name} is {tensor.dtype} or contains NaN or infinity; expected finite numbers, float64, "
                "float32, bfloat16 or float16."
            )
    return tensors


def _read_domain(data: Mapping[str, Any], points: torch.Tensor | None) -> Domain:
    if data["type"] == "box":
        shape = tuple(data["shape"])
        return Box(*(np.array([float.fromhex(x) for x in data[end]]).reshape(shape) for end in ("lo", "hi")))
    if data["type"] == "point_cloud" and points is not None:
        return PointCloud(points.numpy(), float.fromhex(data["fill_distance"]))
    if data["type"] == "region":
        return Region.from_description(data)
    raise FormatError(
        f"{DESCRIPTION}: domain of type {data['type']!r}; expected box, region, or point_cloud with its points."
    )


def _read_target(data: Mapping[str, Any], domains: tuple[Domain, ...], head: Head, certificate: Certificate) -> Target:
    if data["graph"] is None and certificate.function.get("type") == "network":
        ask = _wired(head, [Graph.from_json(part["graph"]) for part in certificate.proof["parts"]])
        return Target(domains, head.output_shape, None, ask, str(data["label"]))
    if data["graph"] is None:
        is_table = certificate.function.get("type") == "table"
        return _with_tail(data, Target(domains, head.output_shape, None, None, str(data["label"]), is_table=is_table))
    graph = Graph.from_json(data["graph"])
    if graph.num_inputs != head.dimension or graph.output_shape != head.output_shape:
        raise FormatError(f"{DESCRIPTION}: the graph's inputs or outputs differ from the head's; expected the same.")
    return _with_tail(data, graph_target(graph, domains, str(data["label"])))


def _wired(head: Head, graphs: list[Graph]) -> Callable[[Array], Array]:
    """f, where it is what the network's wiring says, with part functions in place of its heads."""
    found = [(graph.num_inputs, graph.output_shape) for graph in graphs]
    if not isinstance(head, AttentionNetwork) or found != [(part.dimension, part.output_shape) for part in head.parts]:
        raise FormatError(f"{CERTIFICATE}: the parts of the function do not fit the heads of the network.")
    return partial(exact_values, head.wiring, graphs)


def _with_tail(data: Mapping[str, Any], target: Target) -> Target:
    """The target, clipped where the file says so."""
    if "tail" not in data:
        return target
    tail = Tail(*(float.fromhex(data["tail"][name]) for name in ("clip", "norm")))
    return clipped(target, tail, declared=data["tail"]["declared"] is not False)
