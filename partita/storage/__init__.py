"""Heads on disk: three files, no pickle, hashed, versioned, written at once or not at all (docs/format.md); and ONNX."""

from partita.storage.loading import load_parts, read_json
from partita.storage.onnx_export import export_onnx, onnx_metadata
from partita.storage.saving import FORMAT_VERSION, require_free, save, whole_folder, write_head

__all__ = [
    "FORMAT_VERSION",
    "export_onnx",
    "load_parts",
    "onnx_metadata",
    "read_json",
    "require_free",
    "save",
    "whole_folder",
    "write_head",
]
