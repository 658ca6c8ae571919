"""A hash of named tensors: how claims say which numbers they are about."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import torch

from partita.heads.table_blocks import blocks_of

__all__ = ["model_digest"]


def model_digest(tensors: Mapping[str, torch.Tensor] | Mapping[int, torch.Tensor]) -> str:
    """sha256 over names, dtypes, shapes and bytes, in the order of the names."""
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name}|{tensor.dtype}|{tuple(tensor.shape)}|".encode())
        for (block,) in blocks_of(tensor.detach().reshape(-1)):
            digest.update(block.cpu().contiguous().view(torch.uint8).numpy().data)
    return digest.hexdigest()
