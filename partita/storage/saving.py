"""Writing a head."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from partita.errors import AlreadyExistsError, NotWrittenError, UnsupportedError
from partita.functions.target import Target
from partita.geometry.domains import PointCloud
from partita.heads.head import Head
from partita.heads.tensor_file import stored_name, write_tensors
from partita.proofs.certificate import Certificate, hex_floats, model_digest
from partita.storage.files import hash_regular

__all__ = [
    "CERTIFICATE",
    "DESCRIPTION",
    "FORMAT_VERSION",
    "TENSORS",
    "canonical",
    "require_free",
    "save",
    "whole_folder",
    "write_head",
    "write_sealed",
]

FORMAT_VERSION = 1
TENSORS, DESCRIPTION, CERTIFICATE = "head.safetensors", "head.json", "certificate.json"


def save(
    head: Head,
    certificate: Certificate,
    target: Target,
    folder: str | os.PathLike[str],
    *,
    outside: str,
    why: Sequence[str],
    overwrite: bool = False,
) -> Path:
    """Write the folder. It appears whole or not at all; an existing head is replaced only with `overwrite`."""
    if certificate.model.get("sha256") != model_digest(head.state_dict()):
        raise UnsupportedError(
            "the head was changed after it was certified, so its certificate does not apply",
            "Compile again, or save its state_dict instead.",
        )
    with whole_folder(folder, overwrite=overwrite) as draft:
        write_head(draft, head, certificate, target, outside=outside, why=why)
    return Path(folder)


@contextmanager
def whole_folder(
    folder: str | os.PathLike[str], *, overwrite: bool, marker: str = DESCRIPTION, kind: str = "a head"
) -> Iterator[Path]:
    """An empty folder to write into. It takes its name when the block ends without an error, and is removed otherwise."""
    place = require_free(folder, overwrite=overwrite, marker=marker, kind=kind)
    place.parent.mkdir(parents=True, exist_ok=True)
    draft = Path(tempfile.mkdtemp(prefix=f".{place.name}-", dir=place.parent))
    draft.chmod(0o755)
    try:
        yield draft
        _move_into_place(draft, place)
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def require_free(
    folder: str | os.PathLike[str], *, overwrite: bool, marker: str = DESCRIPTION, kind: str = "a head"
) -> Path:
    """The path, if such a folder may be written there. A folder is overwritten only if it has the file `marker`."""
    place = Path(folder)
    if place.exists() and not overwrite:
        raise AlreadyExistsError(f"{place} exists already; choose another name, or use overwrite=True.")
    if place.exists() and not (place / marker).exists():
        raise AlreadyExistsError(f"{place} is not a folder with {kind}, so it is not overwritten; choose another name.")
    return place


def _move_into_place(draft: Path, place: Path) -> None:
    """One rename; over an older head two, and the older one comes back if the second fails."""
    if not place.exists():
        draft.rename(place)
        return
    shelf = Path(tempfile.mkdtemp(prefix=f".{place.name}-old-", dir=place.parent))
    place.rename(shelf / "head")
    try:
        draft.rename(place)
    except BaseException:
        (shelf / "head").rename(place)
        raise
    finally:
        shutil.rmtree(shelf, ignore_errors=True)


def write_head(
    draft: Path,
    head: Head,
    certificate: Certificate,
    target: Target,
    *,
    outside: str,
    why: Sequence[str],
    file: Path | None = None,
) -> None:
    """Write the three files of a head that was just certified.

    Args:
        draft: a folder that holds nothing else that is wanted.
        file: the file in that folder with its tensors, if it was written while the head was built.
    """
    tensors = {stored_name(name): t for name, t in head.state_dict().items()}
    for i, domain in enumerate(target.domains):
        if isinstance(domain, PointCloud):
            tensors[f"domain.{i}.points"] = torch.tensor(domain.points)
    description = {
        "format": "partita-head",
        "version": FORMAT_VERSION,
        "head": head.record(),
        "domains": [hex_floats(d.description) for d in target.domains],
        "target": _described(target),
        "outside": outside,
        "why": list(why),
    }
    contents = tensors if file is None else file.rename(draft / TENSORS)
    for other in draft.iterdir():  # tables of heads that missed the tolerance
        if other != contents:
            other.unlink()
    write_sealed(draft, DESCRIPTION, description, {TENSORS: contents, CERTIFICATE: canonical(certificate.to_json())})


def write_sealed(
    draft: Path, name: str, description: dict[str, Any], files: Mapping[str, bytes | Mapping[str, Tensor] | Path]
) -> None:
    """Write the files, and the description with their hashes and its own.

    Args:
        draft: an existing folder.
        name: the file for the description.
        description: becomes JSON.
        files: contents by file name: bytes, tensors for a safetensors file, or the path of the file itself if it is there already.
    """
    hashes = {}
    for own, contents in files.items():
        if isinstance(contents, bytes):
            _flush(draft / own, contents)
        elif isinstance(contents, Mapping):
            write_tensors(draft / own, contents)
        hashes[own] = hash_regular(draft / own)
    sealed = {**description, "sha256": hashes}
    sealed["seal"] = hashlib.sha256(canonical(sealed)).hexdigest()
    _flush(draft / name, json.dumps(sealed, indent=1, ensure_ascii=False, allow_nan=False).encode())


def _described(target: Target) -> dict[str, Any]:
    """The function by name and graph; with its tail if it was clipped."""
    stated, tail = target.stated, target.tail
    found = {"label": target.label, "graph": None if stated is None else stated.to_json()}
    if tail is None:
        return found
    return {**found, "tail": {"clip": tail.clip.hex(), "norm": tail.norm.hex(), "declared": target.tail_declared}}


def _flush(path: Path, data: bytes) -> None:
    try:
        with open(path, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise NotWrittenError.of(path, error) from None


def canonical(data: Any) -> bytes:
    """JSON with sorted keys and no spaces: what hashes are taken of."""
    return json.dumps(data, sort_keys=True, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()
