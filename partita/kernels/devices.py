"""Which kernels run where: Triton's on CUDA devices that have it."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from types import ModuleType

import torch
from torch import Tensor

__all__ = ["device_kernels"]

_TRITON = find_spec("triton") is not None
_FAMILIES: dict[str, ModuleType | None] = {}  # modules that were looked for


def device_kernels(
    family: str, *tensors: Tensor | None, dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.float64)
) -> ModuleType | None:
    """The module `partita.kernels.FAMILY_triton` if it can run on these tensors, else None.

    It runs on CUDA devices that Triton supports. Nothing is imported for tensors on other devices.

    Args:
        family: "grid", "train", "ramp", "scattered" or "rows".
        tensors: everything that the kernel reads; all must be on one device and of one dtype.
        dtypes: that the kernel takes.
    """
    given = [t for t in tensors if t is not None]
    first = given[0]
    if not (_TRITON and first.is_cuda and first.dtype in dtypes):
        return None
    if any(t.dtype != first.dtype or t.device != first.device for t in given):
        return None
    if family not in _FAMILIES:
        name = f"partita.kernels.{family}_triton"
        _FAMILIES[family] = import_module(name) if find_spec(name) is not None else None
    return _FAMILIES[family]
