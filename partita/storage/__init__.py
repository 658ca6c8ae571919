"""Heads on disk: three files, no pickle, hashed, versioned, written at once or not at all (docs/format.md); ONNX and C."""

from partita.storage.c_export import export_c
from partita.storage.loading import load_parts, read_json
from partita.storage.onnx_export import export_onnx, input_names, onnx_metadata, require_rule
from partita.storage.saving import FORMAT_VERSION, require_free, save, whole_folder, write_head

__all__ = [
    "FORMAT_VERSION",
    "export_c",
    "export_onnx",
    "input_names",
    "load_parts",
    "onnx_metadata",
    "read_json",
    "require_free",
    "require_rule",
    "save",
    "whole_folder",
    "write_head",
]
