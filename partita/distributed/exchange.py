"""What the processes of a group tell each other: whether they agree, and rows of numbers, combined in the order of the ranks.

Every exchange begins with a few integers from each process. A process that failed says so there, so that the others raise an error
instead of waiting for it, and different inputs are noticed before they are mixed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from partita.errors import RanksDisagreeError, UnsupportedError, WorkersLostError
from partita.kernels import partial_sums

__all__ = ["Exchange", "digest_of_bits", "digest_of_text", "gradients_summed", "merged_over_ranks"]

_Found = TypeVar("_Found")
_TOLD = 5  # integers that every process sends before an exchange


class Exchange:
    """The processes of a group.

    Args:
        group: a group of torch.distributed, or None for all processes.

    Attributes:
        group: the same.
        rank: the number of this process in the group.
        ranks: how many there are.

    Raises:
        UnsupportedError: there is no process group, or this process is not in it.
    """

    def __init__(self, group: Any = None) -> None:
        if not (dist.is_available() and dist.is_initialized()):
            raise UnsupportedError(
                "found no process group; expected one that is initialised",
                "Start the script with torchrun and call torch.distributed.init_process_group('gloo') first, or 'nccl' for GPUs.",
            )
        self.group, self.rank = group, dist.get_rank(group)
        if self.rank < 0:
            raise UnsupportedError(
                f"process {dist.get_rank()} is not in the process group that was given; expected a group that it belongs to",
                "Call shard only on the processes that dist.new_group was given.",
            )
        self.ranks: int = dist.get_world_size(group)

    def done(self, call: str, compute: Callable[[], tuple[_Found, dict[str, int]]]) -> _Found:
        """What `compute` found, once all processes are known to have computed theirs from the same inputs.

        Args:
            call: what is being done; it must be the same everywhere.
            compute: done before anything is exchanged. Returns what it found, and at most three numbers that must be the same
                everywhere, by what they are.

        Raises:
            WorkersLostError: another process failed, or is gone.
            RanksDisagreeError: the numbers differ.
            Exception: whatever `compute` raised.
        """
        problem: Exception | None = None
        found: Any = None
        told: dict[str, int] = {}
        try:
            found, told = compute()
        except Exception as error:
            problem = error
        numbers = [int(problem is not None), digest_of_text(call), *told.values()]
        everyone = self._gathered(torch.tensor(numbers + [0] * (_TOLD - len(numbers)), dtype=torch.int64)).tolist()
        if problem is not None:
            raise problem
        failed = [rank for rank, row in enumerate(everyone) if row[0]]
        if failed:
            raise WorkersLostError(
                f"{call}: rank {', '.join(map(str, failed))} of {self.ranks} failed, so there is no result",
                "The error that was raised there says why.",
            )
        for i, what in enumerate(("calls", *told), start=1):
            given = [row[i] for row in everyone]
            if len(set(given)) > 1:
                other = next(rank for rank, number in enumerate(given) if number != given[0])
                raise RanksDisagreeError(
                    f"{call}: rank 0 and rank {other} have different {what}; expected the same on all {self.ranks} ranks",
                    "Every process must shard the same head and call it with the same inputs, in the same order.",
                )
        return cast(_Found, found)

    def facts(self, call: str, compute: Callable[[], Sequence[float]]) -> list[list[float]]:
        """Floats from every process, in the order of the ranks.

        Args:
            call: what they are for.
            compute: returns those of this process.
        """
        found = self.done(call, lambda: ((floats := list(compute())), {"counts of numbers": len(floats)}))
        rows: list[list[float]] = self._gathered(torch.tensor(found, dtype=torch.float64)).tolist()
        return rows

    def combined(self, own: Tensor, combine: Callable[[Tensor], Tensor]) -> Tensor:
        """Rows of numbers, one table from each process, as one table; the same bits everywhere.

        Every process combines an equal share of the rows, from all tables in the order of the ranks, and sends the result to all.
        So a process sends and receives about twice its table, however many others there are.

        Args:
            own: `(n, columns)`, the same shape everywhere.
            combine: `(ranks, k, columns)` to `(k, columns)`, row by row.
        """
        n, columns = own.shape
        rows = -(-n // self.ranks)
        sent = self._carried(
            own.new_zeros(rows * self.ranks, columns).index_copy_(0, torch.arange(n, device=own.device), own)
        )
        received = torch.empty_like(sent)
        with self._running():
            dist.all_to_all_single(received, sent, group=self.group)
        mine = combine(received.to(own.device).view(self.ranks, rows, columns))
        return self._gathered(mine).to(own.device).flatten(0, 1)[:n]

    def _gathered(self, mine: Tensor) -> Tensor:
        """`(…)` from every process, `(ranks, …)`."""
        sent = self._carried(mine).contiguous()
        found = sent.new_empty(self.ranks * sent.numel())
        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # renamed in torch 2.13
        with self._running():
            gather(found, sent.reshape(-1), group=self.group)
        return found.view(self.ranks, *sent.shape)

    def _carried(self, tensor: Tensor) -> Tensor:
        """The tensor where the group's backend can read it."""
        backend = dist.get_backend(self.group)
        if backend == "nccl":
            return tensor if tensor.is_cuda else tensor.cuda()
        return tensor.cpu() if backend == "gloo" else tensor

    @contextmanager
    def _running(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:  # gloo and NCCL raise it when a process is gone or does not answer in time
            raise WorkersLostError(
                f"rank {self.rank} of {self.ranks} could not exchange numbers with the others: {str(error).splitlines()[0]}",
                "A process may have died, or is not at the same call. Start all of them again.",
            ) from error


def _summed(tables: Tensor) -> Tensor:
    """The sum over the first axis, in its order."""
    total = tables[0]
    for table in tables[1:]:
        total = total + table
    return total


class _MergedOverRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, own: Tensor, exchange: Exchange) -> Tensor:
        whole = exchange.combined(own, partial_sums.merged)
        ctx.save_for_backward(own, whole)
        return whole

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return partial_sums.merged_gradient(grad, *ctx.saved_tensors), None


class _GradientsSummed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, exchange: Exchange, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.exchange = exchange
        return tuple(t.view_as(t) for t in tensors)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        total = ctx.exchange.combined(torch.cat([g.reshape(-1) for g in grads])[:, None], _summed)
        parts = total[:, 0].split([g.numel() for g in grads])
        return None, *(part.view_as(g) for part, g in zip(parts, grads))


def merged_over_ranks(own: Tensor, exchange: Exchange) -> Tensor:
    """The tables of all ranks, merged (`partial_sums.merged`). Its backward pass needs no exchange.

    Args:
        own: this rank's table.
        exchange: the ranks.
    """
    merge: Any = _MergedOverRanks.apply
    return cast(Tensor, merge(own, exchange))


def gradients_summed(exchange: Exchange, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """The same tensors; in the backward pass their gradients are summed over the ranks, in one exchange.

    Args:
        exchange: the ranks.
        tensors: those that every rank holds alike, of one dtype.
    """
    link: Any = _GradientsSummed.apply
    return cast(tuple[Tensor, ...], link(exchange, *tensors))


def digest_of_bits(tensor: Tensor) -> int:
    """A number that differs, almost surely, where tensors differ in a bit: the bits, weighted by odd numbers, modulo 2⁶⁴.

    Args:
        tensor: float64, float32 or a half type.

    >>> a = torch.tensor([0.0, 1.0])
    >>> digest_of_bits(a) == digest_of_bits(a.clone()), digest_of_bits(a) == digest_of_bits(a.flip(0))
    (True, False)
    """
    integers = {8: torch.int64, 4: torch.int32, 2: torch.int16}[tensor.element_size()]
    bits = tensor.detach().contiguous().reshape(-1).view(integers).long()
    mixed = (bits ^ (bits >> 29)) * -4658895280553007687
    places = torch.arange(len(bits), device=bits.device) * 0x5851F42D4C957F2D + 1
    return int(((mixed ^ (mixed >> 32)) * (places | 1)).sum())


def digest_of_text(text: str) -> int:
    """The same of a text.

    Args:
        text: any.
    """
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big", signed=True)
