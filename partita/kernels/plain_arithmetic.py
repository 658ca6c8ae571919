"""Torch's settings that change what an operation computes, and a context in which they do not: no autocast, no TF32."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext

import torch

__all__ = ["plain_arithmetic", "product_setting", "uses_autocast"]

_FULL = ("none", "ieee", "highest")  # settings of torch under which float32 products are float32 products


@contextmanager
def plain_arithmetic(device: str) -> Iterator[None]:
    """Inside, autocast is off and float32 products are computed in float32, whatever torch is set to.

    Args:
        device: the type of the device, "cpu" or "cuda".
    """
    no_autocast = torch.autocast(device, enabled=False) if uses_autocast(device) else nullcontext()
    with no_autocast, nullcontext() if product_setting(device)[0] in _FULL else _full_products(device):
        yield


def uses_autocast(device: str) -> bool:
    """Whether autocast is on. There are devices without it, such as "meta".

    Args:
        device: the type of the device.
    """
    return torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)


def product_setting(device: str) -> tuple[str, Callable[[str], None]]:
    """How float32 products are computed on a device, and the function that changes it."""
    backend = torch.backends.mkldnn if device == "cpu" else torch.backends.cuda
    matmul = getattr(backend, "matmul", None)
    if matmul is None or not hasattr(matmul, "fp32_precision"):  # torch before 2.9: one setting for all devices
        return torch.get_float32_matmul_precision(), torch.set_float32_matmul_precision
    return matmul.fp32_precision, functools.partial(setattr, matmul, "fp32_precision")


@contextmanager
def _full_products(device: str) -> Iterator[None]:
    """float32 matrix products in float32: torch may be set to cut their factors to TF32 or bfloat16."""
    before, change = product_setting(device)
    change("highest" if before in ("high", "medium") else "ieee")
    try:
        yield
    finally:
        change(before)
