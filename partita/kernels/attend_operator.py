"""`torch.ops.partita.attend`: softmax attention over scattered points as one operator, with the fastest kernel for its device.

On a CPU large batches run in native loops (`scattered_native`), small ones in plain torch operations (`scattered_torch`). On a CUDA
device Triton's kernels run where there are any, else plain torch operations. Each of them forms `q − k` first and takes
weights relative to a score near the best one. A score passes through `m + 4` roundings relative to `R(|q − k|² + |p|)/2`, a weight
through those of one exponential within 2 ulp, and sums are added up in some order that depends on the shapes alone.
Autocast and torch's settings for float32 products change nothing here, also in compiled graphs.

The gradients in all tensors are an operator of their own, `partita::attend_backward`; derivatives of gradients are computed by
plain torch operations.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from partita.arithmetic.precision import Precision
from partita.kernels import native, scattered_native, scattered_torch
from partita.kernels.devices import device_kernels
from partita.kernels.differentiation import differentiated, needs_plain_operations
from partita.kernels.key_index import MOST_AXES_PRUNED, KeyIndex
from partita.kernels.plain_arithmetic import plain_arithmetic
from partita.kernels.scattered_torch import Sums

__all__ = ["LISTED_WHOLE", "Operands", "attend_near", "share_left_out", "sum_scattered"]

LISTED_WHOLE = 256  # keys: up to this many all are summed, which is faster than a search; proofs rely on it
_KEYS_READ = 64  # keys that a query reads, at least, where some are left out

_OPERANDS = "Tensor queries, Tensor keys, Tensor values, Tensor? powers, Tensor? slopes, Tensor rate, float cut"


class Operands(NamedTuple):
    """What the operator takes besides the queries.

    Attributes:
        keys: `(N, m)`. values: `(N, out)`. powers: `(N,)` or None. slopes: `(N, out, m)` or None.
        rate: R, without dimensions.
        cut: keys whose score trails the best by more may be left out.
    """

    keys: Tensor
    values: Tensor
    powers: Tensor | None
    slopes: Tensor | None
    rate: Tensor
    cut: float

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None, Tensor]:
        return self.keys, self.values, self.powers, self.slopes, self.rate


def sum_scattered(queries: Tensor, given: Operands) -> Sums:
    """`scattered_torch.Sums` by the operator."""
    found: Sums = torch.ops.partita.attend(queries, *given)
    return found


def attend_near(queries: Tensor, given: Operands, index: KeyIndex | None = None) -> Sums:
    """The same without the operator, for tensors whose derivatives nobody asks for; with an index if there is one."""
    kernels = device_kernels("scattered", queries, *given.tensors[:4])
    with torch.no_grad(), plain_arithmetic(queries.device.type):
        if not _is_ordered(given, index) or (kernels is None and not _is_large(given)):
            out, lse = scattered_torch.sum_all(queries, *given.tensors)
            return out, lse, torch.full_like(lse, -torch.inf), torch.full_like(lse, len(given.keys))
        index = index or KeyIndex(given.keys, given.powers)
        if kernels is not None:
            tables = given.values, given.slopes, given.rate, given.cut
            found: Sums = kernels.sum_on_device(queries, index.on_device, *tables)
            return found
        if runs_natively(queries, given):
            placed = index.tables(given.values, given.slopes)
            points = np.ascontiguousarray(queries.detach().double().numpy())
            sums = scattered_native.sum_natively(points, index.tree, placed, float(given.rate), given.cut)
            out, lse, dropped, depth = (torch.from_numpy(a).to(queries.dtype) for a in sums)
            return out, lse, dropped, depth
        return scattered_torch.sum_near(queries, *given.tensors, index.nodes(), given.cut)


def share_left_out(lse: Tensor, dropped: Tensor, given: Operands, largest_power: float) -> Tensor:
    """An upper bound of the share of the weights that keys left out may have, `(n,)`, float64. *Theorem*: `score-rounding`.

    The logarithm of the share is known up to the rounding of the scores it was found from: `(m + 6)u` of their size, which is at
    most `ln N − lse + R max|p|` for the keys that matter and the cut for those that do not.

    Args:
        lse: what `attend_near` returned second.
        dropped: what it returned third.
        given: what it was given.
        largest_power: max |p|.
    """
    m, unit = given.keys.shape[1], Precision.of(lse.dtype).unit
    size = math.log(len(given.keys)) - lse.double() + float(given.rate.detach()) * largest_power
    return torch.exp(dropped.double() + (m + 6) * unit * (size + given.cut)).clamp(max=1.0)


def runs_natively(queries: Tensor, given: Operands) -> bool:
    """Whether a batch over ordered keys runs in native loops: on a CPU, if it is large enough."""
    reads = min(len(given.keys), _KEYS_READ) * (given.keys.shape[1] + given.values.shape[1])
    return queries.device.type == "cpu" and _is_large(given) and native.worth_it(len(queries), reads)


def _is_large(given: Operands) -> bool:
    """Whether there are so many keys, in so few dimensions, that some may be left out."""
    return len(given.keys) > LISTED_WHOLE and given.keys.shape[1] <= MOST_AXES_PRUNED


def _is_ordered(given: Operands, index: KeyIndex | None = None) -> bool:
    """Whether the nearest keys are the best ones: R > 0 and finite numbers. An index has only those."""
    stored = [given.rate] if index is not None else [t for t in (given.rate, given.keys, given.powers) if t is not None]
    return bool(given.rate > 0) and all(bool(t.isfinite().all()) for t in stored)


@torch.library.custom_op(
    "partita::attend", mutates_args=(), schema=f"({_OPERANDS}) -> (Tensor, Tensor, Tensor, Tensor)"
)
def _attend(queries: Tensor, *operands: Any) -> Sums:
    return attend_near(queries, Operands(*operands))


@torch.library.custom_op(
    "partita::attend_backward",
    mutates_args=(),
    schema=f"(Tensor grad, Tensor grad_lse, {_OPERANDS}, Tensor output, Tensor lse, bool[] needs) -> Tensor[]",
)
def _gradients(grad: Tensor, grad_lse: Tensor, queries: Tensor, *others: Any) -> list[Tensor]:
    given, (output, lse, needs) = Operands(*others[:6]), others[6:]
    kernels = device_kernels("scattered", grad, queries, *given.tensors[:4])
    ordered = _is_ordered(given)
    if ordered and kernels is not None:
        index = KeyIndex(given.keys, given.powers)
        made = kernels.gradients_on_device(
            grad,
            grad_lse,
            queries,
            index.on_device,
            given.values,
            given.slopes,
            given.rate,
            given.cut,
            output,
            lse,
            needs,
        )
    elif ordered and runs_natively(queries, given):
        made = _native_gradients(grad, grad_lse, queries, given, output, needs)
    else:
        nodes = KeyIndex(given.keys, given.powers).nodes() if ordered and _is_large(given) else None
        with plain_arithmetic(queries.device.type):
            made = scattered_torch.gradients(grad, grad_lse, queries, given.tensors, output, lse, nodes, given.cut)
    return [g if needed and g is not None else queries.new_empty(0) for g, needed in zip(made, needs)]


def _native_gradients(
    grad: Tensor, grad_lse: Tensor, queries: Tensor, given: Operands, output: Tensor, needs: Sequence[bool]
) -> list[Tensor | None]:
    index = KeyIndex(given.keys, given.powers)
    tables = index.tables(given.values, given.slopes)
    points, *grads = (np.ascontiguousarray(t.detach().double().numpy()) for t in (queries, grad, grad_lse, output))
    keys = index.tree, tables, float(given.rate), given.cut
    found = scattered_native.gradients_natively(points, (grads[0], grads[1], grads[2]), *keys, needs)
    return [None if a is None else torch.from_numpy(a).to(queries.dtype) for a in found]


def _plain(tensors: Sequence[Any], cut: float) -> tuple[Tensor, Tensor]:
    queries, keys, values, powers, slopes, rate = tensors
    given = Operands(keys, values, powers, slopes, rate, cut)
    if _is_large(given) and _is_ordered(given):
        index = KeyIndex(given.keys.detach(), None if given.powers is None else given.powers.detach())
        out, lse, *_ = scattered_torch.sum_near(queries, *given.tensors, index.nodes(), cut)
        return out, lse
    return scattered_torch.sum_all(queries, *given.tensors)


@_attend.register_fake
def _(queries: Tensor, *operands: Any) -> Sums:
    rows, outputs = queries.shape[0], operands[1].shape[1]
    lse, dropped, depth = (queries.new_empty(rows) for _ in range(3))
    return queries.new_empty(rows, outputs), lse, dropped, depth


@_gradients.register_fake
def _(grad: Tensor, grad_lse: Tensor, queries: Tensor, *others: Any) -> list[Tensor]:
    of = zip((queries, *others[:5]), others[-1])
    return [queries.new_empty(t.shape if needed and t is not None else 0) for t, needed in of]


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Sums) -> None:
    *tensors, ctx.cut = inputs
    ctx.save_for_backward(*tensors, output[0], output[1])
    ctx.mark_non_differentiable(output[2], output[3])


def _backward(ctx: Any, grad: Tensor | None, grad_lse: Tensor | None, *_: Any) -> tuple[Any, ...]:
    *tensors, output, lse = ctx.saved_tensors
    grad = torch.zeros_like(output) if grad is None else grad
    grad_lse = torch.zeros_like(lse) if grad_lse is None else grad_lse
    needs = list(ctx.needs_input_grad[:6])
    if needs_plain_operations(grad):
        return *differentiated(lambda: _plain(tensors, ctx.cut), tensors, needs, (grad, grad_lse)), None
    made = torch.ops.partita.attend_backward(grad, grad_lse, *tensors, ctx.cut, output, lse, needs)
    return *(g if needed and t is not None else None for g, t, needed in zip(made, tensors, needs)), None


_attend.register_autograd(_backward, setup_context=_keep)
