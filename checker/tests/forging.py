"""An attacker's tools: change anything in a saved head, then recompute every hash and seal."""

from __future__ import annotations

import hashlib
import json
import struct
from array import array
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

WIDTH = {"F64": ("d", 8), "F32": ("f", 4)}


@dataclass
class Files:
    """A head, or a descent in context, in pieces: `tensors` as name → [dtype, shape, numbers]; `kind` is the name of its files."""

    tensors: dict[str, list[Any]]
    description: dict[str, Any]
    certificate: dict[str, Any]
    kind: str = "head"

    @property
    def bound(self) -> float:
        return float.fromhex(self.certificate["error_bound"])

    @bound.setter
    def bound(self, value: float) -> None:
        self.certificate["error_bound"] = float(value).hex()

    @property
    def graphs(self) -> list[dict[str, Any]]:
        """The graph stands in two files: both are changed."""
        return [self.description["target"]["graph"], self.certificate["function"]["graph"]]

    @property
    def boxes(self) -> list[dict[str, Any]]:
        return [self.description["domains"][0], self.certificate["domain"]["arguments"][0]]


def take_apart(folder: Path) -> Files:
    kind = "descent" if (folder / "descent.json").exists() else "head"
    data = (folder / f"{kind}.safetensors").read_bytes()
    size = int.from_bytes(data[:8], "little")
    header, body, tensors = json.loads(data[8 : 8 + size]), data[8 + size :], {}
    header.pop("__metadata__", None)
    for name, entry in header.items():
        numbers = array(WIDTH[entry["dtype"]][0])
        numbers.frombytes(body[slice(*entry["data_offsets"])])
        tensors[name] = [entry["dtype"], entry["shape"], list(numbers)]
    read = [json.loads((folder / f"{name}.json").read_text()) for name in (kind, "certificate")]
    return Files(tensors, *read, kind)


def canonical(data: Any) -> bytes:
    return json.dumps(data, sort_keys=True, ensure_ascii=False, separators=(",", ":")).encode()


def packed(dtype: str, numbers: list[float]) -> bytes:
    return struct.pack(f"<{len(numbers)}{WIDTH[dtype][0]}", *numbers)


def seal_certificate(certificate: dict[str, Any], tensors: dict[str, list[Any]], prefix: str) -> None:
    """Name the tensors that a certificate is about, and its function."""
    digest = hashlib.sha256()
    for name in sorted(name for name in tensors if name.startswith(prefix)):
        dtype, shape, numbers = tensors[name]
        torch_name = {"F64": "torch.float64", "F32": "torch.float32"}[dtype]
        digest.update(f"{name.removeprefix(prefix)}|{torch_name}|{tuple(shape)}|".encode() + packed(dtype, numbers))
    certificate.get("model", {})["sha256"] = digest.hexdigest()
    graph = certificate.get("function", {}).get("graph")
    if graph is not None:
        certificate["function"]["sha256"] = hashlib.sha256(canonical(graph)).hexdigest()


def put_together(files: Files, folder: Path) -> Path:
    """Write the head with every hash and seal as its own writer would have made them."""
    folder.mkdir(parents=True, exist_ok=True)
    header, body = {}, b""
    for name in sorted(files.tensors):
        dtype, shape, numbers = files.tensors[name]
        raw = packed(dtype, numbers)
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [len(body), len(body) + len(raw)]}
        body += raw
    text = json.dumps(header).encode()
    (folder / f"{files.kind}.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + body)
    seal_certificate(files.certificate, files.tensors, "head." if files.kind == "head" else "")
    for i, part in enumerate(files.certificate.get("proof", {}).get("parts", [])):
        seal_certificate(part["certificate"], files.tensors, f"head.heads.{i}.")
    if files.description.get("head", {}).get("type") == "network":
        wiring = {name: value for name, value in files.description["head"].items() if name != "heads"}
        files.certificate["model"]["wiring_sha256"] = hashlib.sha256(canonical(wiring)).hexdigest()
        if files.certificate["function"].get("type") == "network":
            graphs = [part["graph"] for part in files.certificate["proof"]["parts"]]
            defined = canonical({"wiring": wiring, "parts": graphs})
            files.certificate["function"]["sha256"] = hashlib.sha256(defined).hexdigest()
    (folder / "certificate.json").write_bytes(canonical(files.certificate))
    files.description["sha256"] = {
        name: hashlib.sha256((folder / name).read_bytes()).hexdigest()
        for name in (f"{files.kind}.safetensors", "certificate.json")
    }
    files.description.pop("seal", None)
    files.description["seal"] = hashlib.sha256(canonical(files.description)).hexdigest()
    (folder / f"{files.kind}.json").write_text(json.dumps(files.description, ensure_ascii=False))
    return folder


def forge(source: Path, folder: Path, change: Callable[[Files], None]) -> Path:
    files = take_apart(source)
    change(files)
    return put_together(files, folder)
