"""Derivatives of an operator from plain torch operations, where its own kernels give none."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor, nn

from partita.kernels.plain_arithmetic import plain_arithmetic

__all__ = ["differentiated", "is_ordinary", "is_tracked", "needs_operator", "needs_plain_operations"]


def needs_plain_operations(grad: Tensor) -> bool:
    """Whether a backward pass may itself be differentiated or batched, so that it has to consist of plain torch operations."""
    return (
        torch.is_grad_enabled()  # create_graph=True
        or torch._C._functorch.peek_interpreter_stack() is not None
        or torch._C._functorch.is_batchedtensor(grad)
        or torch._C._functorch.is_legacy_batchedtensor(grad)  # is_grads_batched=True
    )


def differentiated(
    plain: Callable[[], Tensor | Sequence[Tensor]],
    of: Sequence[Tensor | None],
    needs: Sequence[bool],
    grad: Tensor | Sequence[Tensor],
) -> list[Tensor | None]:
    """The products of `grad` with the derivatives of `plain()`, by torch's own rules; None where none is needed.

    Args:
        plain: the same function in plain torch operations.
        of: the tensors that it is differentiated in; `plain` reads these very tensors.
        needs: which of them.
        grad: what the result is multiplied with, one tensor for each that `plain` returns.
    """
    again = torch.is_grad_enabled()
    wanted = [t for t, needed in zip(of, needs) if needed and t is not None]
    with torch.enable_grad(), plain_arithmetic(wanted[0].device.type):
        found = iter(torch.autograd.grad(plain(), wanted, grad, create_graph=again, allow_unused=True))
    return [next(found) if needed and t is not None else None for t, needed in zip(of, needs)]


def is_tracked(tensors: Iterable[Tensor | None]) -> bool:
    """Whether torch records what is computed from these tensors."""
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)


def needs_operator(*tensors: Tensor | None) -> bool:
    """Whether a call goes through torch's dispatcher, which takes longer than a small batch does.

    It has to in compiled graphs and where gradients are recorded.
    """
    return torch.compiler.is_compiling() or is_tracked(tensors)


def is_ordinary(*tensors: Tensor | None) -> bool:
    """Whether the tensors have numbers that can be read, and no mode of torch watches what is done with them."""
    plain = all(t is None or type(t) in (Tensor, nn.Parameter) for t in tensors)
    return plain and torch._C._len_torch_dispatch_stack() == 0
