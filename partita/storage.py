"""Heads on disk: three files, no pickle, hashed, versioned, written at once or not at all (docs/format.md)."""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import shutil
import tempfile
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
import safetensors.torch
import torch

from partita.attention.grid_head import GridHead
from partita.attention.head import FoldedHead
from partita.attention.scattered_head import ScatteredHead
from partita.certify.certificate import Certificate, model_digest
from partita.errors import (
    FormatError,
    MissingExtraError,
    NewerVersionError,
    PartitaError,
    TamperedFileError,
    TruncatedFileError,
)
from partita.geometry.domains import Box, Domain, PointCloud, product
from partita.geometry.grid import ProductGrid
from partita.targets.graph import Graph
from partita.targets.target import Target, make_target

__all__ = ["FORMAT_VERSION", "Stored", "export_onnx", "load_parts", "read_json", "save"]

FORMAT_VERSION = 1
TENSORS, DESCRIPTION, CERTIFICATE = "head.safetensors", "head.json", "certificate.json"
_JSON_BYTES, _JSON_DEPTH = 64 << 20, 64

Stored = tuple[FoldedHead, Certificate, Target, str, tuple[str, ...]]


def save(
    head: FoldedHead,
    certificate: Certificate,
    target: Target,
    folder: str | os.PathLike[str],
    *,
    outside: str,
    why: Sequence[str],
    overwrite: bool = False,
) -> Path:
    """Write the folder. It appears whole or not at all; an existing head is replaced only with `overwrite`."""
    place = Path(folder)
    if place.exists() and not overwrite:
        raise FormatError(f"{place} exists already; choose another name, or save with overwrite=True.")
    if place.exists() and not (place / DESCRIPTION).exists():
        raise FormatError(f"{place} is not a folder that holds a head; it is left alone.")
    place.parent.mkdir(parents=True, exist_ok=True)
    draft = Path(tempfile.mkdtemp(prefix=f".{place.name}-", dir=place.parent))
    draft.chmod(0o755)
    try:
        _write(draft, head, certificate, target, outside, why)
        if place.exists():
            old = Path(tempfile.mkdtemp(prefix=f".{place.name}-old-", dir=place.parent)) / "head"
            place.rename(old)
            draft.rename(place)
            shutil.rmtree(old.parent)
        else:
            draft.rename(place)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return place


def _write(
    draft: Path, head: FoldedHead, certificate: Certificate, target: Target, outside: str, why: Sequence[str]
) -> None:
    tensors = {f"head.{name}": t.detach().cpu().contiguous() for name, t in head.state_dict().items()}
    for i, domain in enumerate(target.domains):
        if isinstance(domain, PointCloud):
            tensors[f"domain.{i}.points"] = torch.tensor(domain.points)
    _flush(draft / TENSORS, safetensors.torch.save(tensors))
    _flush(draft / CERTIFICATE, _canonical(certificate.to_json()))
    description = {
        "format": "partita-head",
        "version": FORMAT_VERSION,
        "head": _describe_head(head),
        "domains": [_describe_domain(d) for d in target.domains],
        "target": {"label": target.label, "graph": None if target.graph is None else target.graph.to_json()},
        "outside": outside,
        "why": list(why),
        "sha256": {name: hashlib.sha256((draft / name).read_bytes()).hexdigest() for name in (TENSORS, CERTIFICATE)},
    }
    description["seal"] = hashlib.sha256(_canonical(description)).hexdigest()
    _flush(draft / DESCRIPTION, json.dumps(description, indent=1, ensure_ascii=False, allow_nan=False).encode())


def _describe_head(head: FoldedHead) -> dict[str, Any]:
    common = {
        "input_shapes": [list(s) for s in head.input_shapes],
        "output_shape": list(head.output_shape),
        "dtype": str(head.dtype).removeprefix("torch."),
    }
    if isinstance(head, GridHead):
        return {"type": "grid", "half_windows": list(head.half_windows), **common}
    return {"type": "scattered", **common}


def _describe_domain(domain: Domain) -> dict[str, Any]:
    if isinstance(domain, Box):
        shape = list(domain.shape)
        return {
            "type": "box",
            "shape": shape,
            "lo": [x.hex() for x in domain.lo.ravel().tolist()],
            "hi": [x.hex() for x in domain.hi.ravel().tolist()],
        }
    return {"type": "point_cloud", "fill_distance": domain.fill_distance.hex()}


def _flush(path: Path, data: bytes) -> None:
    with open(path, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _canonical(data: Any) -> bytes:
    return json.dumps(data, sort_keys=True, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()


# --- reading: nothing from outside is trusted, evaluated or unpickled ----------------------------------------------


def load_parts(folder: str | os.PathLike[str]) -> Stored:
    """Head, certificate, target, `outside` and `why` from a folder, every hash and shape checked."""
    place = Path(folder)
    if not place.is_dir():
        raise TruncatedFileError(
            f"{place} is not a folder; expected one with {TENSORS}, {DESCRIPTION} and {CERTIFICATE}."
        )
    description = _checked_description(place)
    certificate = Certificate.from_json(read_json(place / CERTIFICATE))
    tensors = _read_tensors(place / TENSORS)
    try:
        domains = tuple(
            _read_domain(d, tensors.get(f"domain.{i}.points")) for i, d in enumerate(description["domains"])
        )
        head = _read_head(
            description["head"],
            {k.removeprefix("head."): t for k, t in tensors.items() if k.startswith("head.")},
            domains,
        )
        target = _read_target(description["target"], domains, head)
        outside, why = str(description["outside"]), tuple(map(str, description["why"]))
    except PartitaError:
        raise
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, RuntimeError) as error:
        raise FormatError(f"{place / DESCRIPTION}: {type(error).__name__}: {error}") from None
    if certificate.model.get("sha256") != model_digest(head.state_dict()):
        raise TamperedFileError(
            f"{place / CERTIFICATE} speaks of other tensors than {TENSORS} holds: this certificate is not about this head."
        )
    return head, certificate, target, outside, why


def _checked_description(place: Path) -> dict[str, Any]:
    description = read_json(place / DESCRIPTION)
    if description.get("format") != "partita-head":
        raise FormatError(f"{place / DESCRIPTION}: format is {description.get('format')!r}, expected 'partita-head'.")
    version = description.get("version")
    if not isinstance(version, int) or version < 1:
        raise FormatError(f"{place / DESCRIPTION}: version is {version!r}, expected a whole number ≥ 1.")
    if version > FORMAT_VERSION:
        raise NewerVersionError(
            f"{place / DESCRIPTION} has format version {version}; this partita reads up to {FORMAT_VERSION}. Install a newer one."
        )
    seal = description.pop("seal", None)
    if seal != hashlib.sha256(_canonical(description)).hexdigest():
        raise TamperedFileError(f"{place / DESCRIPTION} was changed after it was written: its seal does not match.")
    for name in (TENSORS, CERTIFICATE):
        found = hashlib.sha256(_read(place / name)).hexdigest()
        if found != description["sha256"].get(name):
            raise TamperedFileError(
                f"{place / name} was changed or cut off after it was written: its sha256 is {found[:12]}…, "
                f"recorded {str(description['sha256'].get(name))[:12]}…."
            )
    return description


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        raise TruncatedFileError(
            f"{path} is missing; a head is a folder with {TENSORS}, {DESCRIPTION} and {CERTIFICATE}."
        ) from None


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object; NaN, Infinity, duplicate keys, deep nesting and huge files are refused."""
    data = _read(path)
    if len(data) > _JSON_BYTES:
        raise FormatError(f"{path} has {len(data):,} bytes; at most {_JSON_BYTES:,} are read.")
    try:
        text = data.decode()
        if _depth(text) > _JSON_DEPTH:
            raise FormatError(f"{path} is nested more than {_JSON_DEPTH} deep.")
        parsed = json.loads(text, object_pairs_hook=_no_duplicates, parse_constant=_no_constants)
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise TruncatedFileError(f"{path} is not complete JSON: {error}.") from None
    if not isinstance(parsed, dict):
        raise FormatError(f"{path} holds a {type(parsed).__name__}; expected an object.")
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
    raise FormatError(f"JSON holds {name}; expected finite numbers.")


def _read_tensors(path: Path) -> dict[str, torch.Tensor]:
    try:
        tensors = safetensors.torch.load(_read(path))
    except safetensors.SafetensorError as error:
        raise TruncatedFileError(f"{path} is not a complete safetensors file: {error}.") from None
    for name, tensor in tensors.items():
        if tensor.dtype not in (torch.float64, torch.float32) or not bool(torch.isfinite(tensor).all()):
            raise FormatError(
                f"{path}: tensor {name} is {tensor.dtype} or holds NaN or infinity; expected finite float64 or float32."
            )
    return tensors


def _read_domain(data: Mapping[str, Any], points: torch.Tensor | None) -> Domain:
    if data["type"] == "box":
        shape = tuple(data["shape"])
        return Box(*(np.array([float.fromhex(x) for x in data[end]]).reshape(shape) for end in ("lo", "hi")))
    if data["type"] == "point_cloud" and points is not None:
        return PointCloud(points.numpy(), float.fromhex(data["fill_distance"]))
    raise FormatError(f"{DESCRIPTION}: domain of type {data['type']!r}; expected box, or point_cloud with its points.")


def _read_head(data: Mapping[str, Any], tensors: Mapping[str, torch.Tensor], domains: tuple[Domain, ...]) -> FoldedHead:
    inputs, output = tuple(tuple(s) for s in data["input_shapes"]), tuple(data["output_shape"])
    if inputs != tuple(d.shape for d in domains):
        raise FormatError(f"{DESCRIPTION}: the head takes {inputs} and the domains have {[d.shape for d in domains]}.")
    if data["type"] == "scattered":
        known = {"centers", "inverse_temperature", "values", "powers", "value_slopes"}
        _require_names(tensors, known, {"centers", "inverse_temperature", "values"})
        return ScatteredHead(
            tensors["centers"],
            float(tensors["inverse_temperature"]),
            tensors["values"],
            powers=tensors.get("powers"),
            value_slopes=tensors.get("value_slopes"),
            input_shapes=inputs,
            output_shape=output,
        )
    if data["type"] != "grid":
        raise FormatError(f"{DESCRIPTION}: head of type {data['type']!r}; expected grid or scattered.")
    m = sum(math.prod(s) for s in inputs)
    names = {f"centers_{i}" for i in range(m)} | {"inverse_temperature", "values"}
    _require_names(tensors, names, names)
    box = domains[0] if len(domains) == 1 else product(*domains)  # type: ignore[arg-type]
    grid = ProductGrid(box.bounding_box(), tuple(tensors[f"centers_{i}"].double().numpy() for i in range(m)))
    rates = tensors["inverse_temperature"].double().numpy()
    windows = data["half_windows"]
    return GridHead(grid, rates, tensors["values"], half_windows=windows, input_shapes=inputs, output_shape=output)


def _require_names(tensors: Mapping[str, torch.Tensor], known: set[str], needed: set[str]) -> None:
    if not needed <= set(tensors) <= known:
        raise FormatError(f"{TENSORS} holds {sorted(tensors)}; expected {sorted(needed)}.")


def _read_target(data: Mapping[str, Any], domains: tuple[Domain, ...], head: FoldedHead) -> Target:
    if data["graph"] is None:
        return Target(domains, head.output_shape, None, None, str(data["label"]))
    graph = Graph.from_json(data["graph"])
    target = make_target(graph, domains[0] if len(domains) == 1 else domains)  # type: ignore[arg-type]
    return Target(domains, graph.output_shape, graph, target.ask, str(data["label"]))


# --- ONNX ----------------------------------------------------------------------------------------------------------


def export_onnx(head: FoldedHead, path: str | os.PathLike[str]) -> Path:
    """The head as an ONNX graph with a dynamic batch axis; inputs are named z, or z_k and z_q."""
    try:
        import onnx  # noqa: F401
        import onnxscript  # noqa: F401
    except ImportError as error:
        raise MissingExtraError("ONNX export needs the extra 'onnx': pip install 'partita[onnx]'.") from error
    place = Path(path)
    place.parent.mkdir(parents=True, exist_ok=True)
    names = ["z"] if len(head.input_shapes) == 1 else ["z_k", "z_q"]
    examples = tuple(torch.zeros(3, *shape, dtype=head.dtype) for shape in head.input_shapes)
    batch = torch.export.Dim("batch")
    with _quiet_exporter(), tempfile.TemporaryDirectory(dir=place.parent) as draft:
        program = torch.onnx.export(
            head.eval(),
            examples,
            input_names=names,
            output_names=["value"],
            dynamic_shapes=(tuple({0: batch} for _ in examples),),  # one level more: forward takes *inputs
            dynamo=True,
            verbose=False,
        )
        if program is None:
            raise FormatError("torch.onnx.export returned nothing.")
        program.save(Path(draft) / "head.onnx")
        os.replace(Path(draft) / "head.onnx", place)
    return place


@contextmanager
def _quiet_exporter() -> Iterator[None]:
    """The exporter warns of optional packages that nothing here uses."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)
