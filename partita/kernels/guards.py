"""The arithmetic that certificates assume, set up around every evaluation: no autocast, no TF32, no flushed subnormals."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from typing import Any, Concatenate, ParamSpec, TypeVar, cast

import numpy as np
import torch
from torch import Tensor, nn

from partita.arithmetic.environment import require_gradual_underflow
from partita.errors import DomainError, UnsupportedError
from partita.kernels.plain_arithmetic import plain_arithmetic
from partita.kernels.trace_modes import is_traced

__all__ = ["DEVICES", "certified", "require_covered", "require_finite"]

# types of devices whose arithmetic certificates are about, and what holds there while a head runs
DEVICES = {"cpu": "CPU", "cuda": "CUDA with IEEE float32 and float64 products"}

_Module = TypeVar("_Module", bound=nn.Module)
_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result", Tensor, list[Tensor])


def certified(
    method: Callable[Concatenate[_Module, _Arguments], _Result],
) -> Callable[Concatenate[_Module, _Arguments], _Result]:
    """Run a module's method in the arithmetic that its certificate is about.

    Autocast is switched off and float32 products are computed in float32, whatever torch's settings say. Subnormal numbers
    must not be flushed to zero, and finite inputs must not give NaN or infinity. In a trace (`torch.compile`,
    `torch.export`, …) only autocast is switched off: the other checks look at numbers, which a graph does not have.

    Raises:
        UnsupportedError: this thread flushes subnormal numbers.
        DomainError: a number on the way overflows.
    """

    @functools.wraps(method)
    def run(self: _Module, /, *args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Result:
        first = args[0] if args else None
        device = first.device.type if isinstance(first, Tensor) else "cpu"
        if is_traced(first):
            with torch.autocast(device, enabled=False) if torch.is_autocast_enabled(device) else nullcontext():
                return method(self, *args, **kwargs)
        require_gradual_underflow()
        with plain_arithmetic(device):
            out = method(self, *args, **kwargs)
        require_finite(self, out if isinstance(out, list) else [out], args)
        return out

    return cast(Callable[Concatenate[_Module, _Arguments], _Result], run)


def require_covered(*devices: torch.device) -> None:
    """Check that certificates are about the arithmetic of these devices, and that all of them are the same.

    Raises:
        UnsupportedError: a device is of a type that is not in `DEVICES`, or two devices differ.

    >>> require_covered(torch.device("cpu"), torch.device("cpu"))
    """
    for device in devices:
        if device.type not in DEVICES:
            raise UnsupportedError(
                f"found the device {device}, whose arithmetic certificates do not cover; expected {', or '.join(DEVICES.values())}",
                "Move the head and its inputs there, or call c.head, which the certificate does not cover.",
            )
        if device != devices[0]:
            raise UnsupportedError(
                f"found the devices {devices[0]} and {device}; expected the head and its inputs on one device",
                f"Use c.head.to({str(devices[-1])!r}), which moves the head there.",
            )


def require_finite(module: nn.Module, outputs: Iterable[Tensor], inputs: Iterable[Any]) -> None:
    """A DomainError if outputs are not finite although the inputs are.

    Args:
        module: what the error names.
        outputs: what it returned.
        inputs: what it was given, tensors or arrays.
    """
    for out in outputs:
        if math.isfinite(float(out.detach().sum())) or bool(out.isfinite().all()):  # one pass is enough nearly always
            continue
        if all(_is_finite(given) for given in inputs):
            bad = int((~out.isfinite()).sum())
            raise DomainError(
                f"{type(module).__name__}: {bad:,} of {out.numel():,} outputs are not finite although all "
                "inputs are: an intermediate "
                f"number overflows {str(out.dtype).removeprefix('torch.')}, or a stored tensor is not finite. Rescale the "
                "variables, or use float64."
            )


def _is_finite(given: Any) -> bool:
    return bool(given.isfinite().all() if isinstance(given, Tensor) else np.isfinite(given).all())
