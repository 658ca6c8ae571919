"""`partita.distributed.shard`: one process' slice of a head, as a module that returns the outputs of the whole head."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor, nn

from partita.arithmetic.arguments import require_number
from partita.distributed.exchange import (
    Exchange,
    digest_of_bits,
    digest_of_text,
    gradients_summed,
    merged_over_ranks,
)
from partita.distributed.sharded_terms import OwnSizes, WholeHead, merged_terms, own_sizes
from partita.errors import ShapeError, UnsupportedError
from partita.geometry.domains import Array
from partita.heads.grid_head import GridHead
from partita.heads.head import DivisibleHead, Head, as_buffers, as_parameters, count_text, flatten_inputs
from partita.heads.network import AttentionNetwork
from partita.heads.scattered_head import exponent_cut
from partita.heads.tensor_digest import model_digest
from partita.heads.train_head import TrainHead
from partita.kernels.guards import require_finite
from partita.kernels.partial_sums import OUTPUT, nothing
from partita.kernels.plain_arithmetic import plain_arithmetic
from partita.kernels.trace_modes import is_traced
from partita.proofs.certificate import Term, total

__all__ = ["ShardedHead", "shard"]

_OUTSIDE = "before", "after"  # the centers next to a slice
_LEFT_OUT = 45.0  # −ln of the share of the whole weight that slices may have which are left out, all together
_READ_WHOLE = 1 << 20  # numbers
_EVEN = 8  # keys per rank on an axis from which on slices are nearly equal


def shard(head: Head, group: Any = None) -> ShardedHead:
    """This process' slice of a head: a module that computes the whole head's outputs together with the other processes.

    `net(z) = Σ_r e^{lse_r(z) − lse(z)} net_r(z)`, `lse(z) = log Σ_r e^{lse_r(z)}`, net_r the head of the keys of rank r and
    `lse_r` the log-sum-exp of its scores. All processes of the group call `shard` with the same head, and later call the module
    with the same inputs. Each of them gets the same outputs, bit for bit, as the tables of the ranks are merged in a fixed order.
    *Theorem*: `merged-slices`.

    Only the slice is copied. A head whose tensors lie in a mapped file is not read beyond it.

    Args:
        head: a `GridHead` or a `ScatteredHead`, for example `c.head`. A grid is cut along its first axis with at least 8 centers
            per process, or else along its longest axis; scattered keys are cut in the order in which they are stored.
        group: a process group of `torch.distributed`; None for all processes.

    Returns:
        A `ShardedHead`. Slices may be empty, if there are more processes than keys.

    Raises:
        UnsupportedError: there is no process group, or the head is of another kind.
        RanksDisagreeError: the processes were given different heads.
        WorkersLostError: another process failed.

    >>> import torch, partita as pa
    >>> import torch.distributed as dist
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # torchrun does this for many processes
    >>> c = pa.compile("sin(3*x0) + x1", pa.Box([-1, -1], [1, 1]), tolerance=0.1)
    >>> sharded = pa.distributed.shard(c.head)
    >>> z = torch.tensor([[0.3, -0.4]], dtype=torch.float64)
    >>> bool((sharded(z) - c.head(z)).abs().max() <= sharded.rounding_bound([-1, -1], [1, 1]))
    True
    >>> dist.destroy_process_group()
    """
    return ShardedHead(head, Exchange(group))


class ShardedHead(nn.Module):
    """One process' part of a head. `shard` makes it.

    Its tensors have the names of the head's and are buffers; `unfreeze()` turns the values into parameters. Gradients are those of
    one process, if every process calls `backward` with the same loss: of inputs and of tensors that every process holds whole
    (`inverse_temperature`, the centers of the other axes) they are summed over the processes; of values and keys each process
    has those of its own slice. They cannot be differentiated again. The ends of neighbouring slices (`before`, `after`) tell a
    process which queries are too far from its keys to matter, so centers must not be changed.

    Args:
        head: the whole head.
        exchange: the processes.

    Attributes:
        rank, ranks: the number of this process, and how many there are.
        axis, start, stop: the keys that it holds: those numbered start to stop − 1 on an axis of the grid (0 for scattered keys).
        num_keys: of the whole head; own_keys: of this slice.
        input_shapes, output_shape, dtype: see `Head`.
    """

    def __init__(self, head: Head, exchange: Exchange) -> None:
        super().__init__()
        self._exchange = exchange
        self.rank, self.ranks = exchange.rank, exchange.ranks
        exchange.done("shard", lambda: (None, {"heads": _digest(_divisible(head))}))
        held = exchange.done("shard the keys", lambda: (self._cut(_divisible(head)), {}))
        for name, tensor in held.items():
            self.register_buffer(name, tensor)
        trained = [name for name, t in head.named_parameters() if t.requires_grad]
        self._value_names = _divisible(head).value_names
        if trained:
            self.unfreeze()

    def _cut(self, head: DivisibleHead) -> dict[str, Tensor | None]:
        """Everything about the head that this process keeps; returns the tensors."""
        self.input_shapes, self.output_shape = head.input_shapes, head.output_shape
        self.num_keys, self.dtype = head.num_keys, head.dtype
        self.axis = _axis(head.key_counts, self.ranks)
        count = head.key_counts[self.axis]
        self.start, self.stop = count * self.rank // self.ranks, count * (self.rank + 1) // self.ranks
        self.own_keys = self.num_keys // count * (self.stop - self.start)
        held = head.tensors_between(self.axis, self.start, self.stop)
        self._shared = tuple(n for n, t in held.items() if t is not None and n not in head.divided(self.axis))
        # the slice as a head without tensors, as they are this module's; in a tuple, as it is no part of the module
        present = self.stop > self.start
        self._forms = (head.of_slice(self.axis, held).with_tensors(dict.fromkeys(held)),) if present else ()
        self._whole, self._computing = WholeHead.of(head, self.ranks), head.inverse_temperature.dtype
        self._is_grid = isinstance(head, GridHead)
        if isinstance(head, GridHead):
            axis = head.axes[self.axis].detach()
            held["before"] = axis[max(self.start - 1, 0) : self.start].clone()
            held["after"] = axis[self.stop : self.stop + 1].clone()
        return held

    @property
    def device(self) -> torch.device:
        """Where its tensors are."""
        return self.get_buffer("inverse_temperature").device

    def unfreeze(self) -> Self:
        """Make the slice's values trainable parameters (same names in `state_dict`)."""
        as_parameters(self, self._value_names)
        return self

    def freeze(self) -> Self:
        """Make them constants again."""
        as_buffers(self, self._value_names)
        return self

    def extra_repr(self) -> str:
        own, whole = count_text(self.own_keys), count_text(self.num_keys)
        return f"rank {self.rank} of {self.ranks}, {own} of {whole} keys, {self.dtype}"

    def forward(self, *inputs: Any) -> Tensor:
        """`(…, *input_shape)` per argument to `(…, *output_shape)`, as the whole head does.

        Args:
            inputs: the same numbers on every process.
        """
        lead: list[tuple[int, ...]] = []

        def given() -> Tensor:
            flat, leading = flatten_inputs(inputs, self.input_shapes, self.dtype)
            lead.append(leading)
            return flat

        whole = self._sums(given)
        require_finite(self, [whole[:, OUTPUT]], [torch.as_tensor(x) for x in inputs])
        return whole[:, OUTPUT].reshape((*lead[0], *self.output_shape))

    def sums(self, flat: Tensor) -> Tensor:
        """The table over all keys: maximum, log-sum-exp less the maximum, bound and outputs, `(n, 3 + out)`.

        The bound is one on the share of the weight that belongs to keys left out: outside of windows, or too far away.

        Args:
            flat: `(n, m)`, the same numbers on every process.
        """
        return self._sums(lambda: flat.to(self.dtype))

    def _sums(self, given: Callable[[], Tensor]) -> Tensor:
        def compute() -> tuple[Tensor, dict[str, int]]:
            flat = given()
            if is_traced(flat):
                raise UnsupportedError(
                    "a head on several processes cannot be traced (torch.compile, torch.export, torch.func)",
                    "Call it as it is.",
                )
            seen = flat.to(self._computing)  # of half types: rounded inputs, computed with in float32
            held = {n: t for n, t in self._tensors() if t is not None}
            shared = [n for n in self._shared if torch.is_grad_enabled() and held[n].requires_grad]
            needs = [name in shared for name in self._shared] + [torch.is_grad_enabled() and seen.requires_grad]
            told = {
                "numbers of inputs": len(flat),
                "inputs": digest_of_bits(flat),
                "tensors that require gradients": sum(2**i for i, need in enumerate(needs) if need),
            }
            if any(needs):
                linked = gradients_summed(self._exchange, [seen, *(held[name] for name in shared)])
                seen, held = linked[0], held | dict(zip(shared, linked[1:]))
            own = self._own_sums(seen, held)
            if any(needs):  # every process takes part in the backward pass, whether its keys matter or not
                own = own + sum(t.reshape(-1)[:0].sum() for t in linked)
            return own, told

        with plain_arithmetic(self.device.type):
            return merged_over_ranks(self._exchange.done("call the head", compute), self._exchange)

    def _tensors(self) -> Iterator[tuple[str, Tensor | None]]:
        """Those of the slice."""
        for held in (self._parameters, self._buffers):
            yield from ((name, t) for name, t in held.items() if name not in _OUTSIDE)

    def _part(self, replaced: Mapping[str, Tensor] | None = None) -> DivisibleHead | None:
        """The head of this slice; None if it is empty."""
        tensors: dict[str, Tensor | None] = {**dict(self._tensors()), **(replaced or {})}
        return next((form.with_tensors(tensors) for form in self._forms), None)

    def _own_sums(self, flat: Tensor, held: Mapping[str, Tensor]) -> Tensor:
        """The table of this slice's keys."""
        outputs = math.prod(self.output_shape)
        part = self._part(held)
        if part is None:
            return nothing(flat, outputs)
        if not self._is_grid or not bool((far := self._far(flat.detach(), held)).any()):
            return part.partial_sums(flat)
        near = (~far).nonzero().squeeze(1)
        left_out = math.exp(-_LEFT_OUT) * self.own_keys / self.num_keys
        none = nothing(flat, outputs, max(left_out, torch.finfo(flat.dtype).tiny))
        none[near] = 0
        return none.index_add(0, near, part.partial_sums(flat[near])) if len(near) else none

    def _far(self, flat: Tensor, held: Mapping[str, Tensor]) -> Tensor:
        """The queries that see a neighbour's key so much better than all keys here that these do not matter, `(n,)`.

        A score is off by less than 16u of its size, so that the true one trails by more than T as well.
        """
        x, centers = flat[:, self.axis], held[f"centers_{self.axis}"].detach()
        rate = held["inverse_temperature"].detach()[self.axis]
        far = torch.zeros(len(x), dtype=torch.bool, device=x.device)
        for outside, end in ((self.get_buffer("before"), centers[0]), (self.get_buffer("after"), centers[-1])):
            if len(outside):  # positive only beyond the end, whose score is the best here
                own, theirs = (0.5 * rate * (x - center) ** 2 for center in (end, outside))
                trails = own - theirs - 32 * torch.finfo(x.dtype).eps * own
                far |= trails > exponent_cut(self.num_keys) + 1
        return far

    def running_terms(self, lo: ArrayLike, hi: ArrayLike, *, mean_error: float | None = None) -> list[Term]:
        """What running the head in slices adds to the error of exact arithmetic, for inputs in a box, as terms of a certificate.

        The sum of their values bounds `|sharded(z) − net(z)|`, net the head with the stored tensors in exact arithmetic over all
        keys, and z the input as it is rounded to the head's dtype. In a certificate they take the place of the terms whose source
        is "rounding". All processes call this together, with the same corners. *Theorem*: `merged-slices`.

        Args:
            lo, hi: the corners of the box, flat.
            mean_error: a proved bound of `Σ_j w_j|V_j − f|`, if there is one: the approximation term of a certificate whose score
                rounding is `(e^{2δ} − 1) · approximation`. Then the terms bound what is added to it, which may be much less.

        Returns:
            Terms named window, score rounding and summation.

        Raises:
            ShapeError: corners of another length.
            DomainError: a mean error that is not a number ≥ 0.
        """
        ends: list[tuple[Array, Array]] = []

        def own() -> list[float]:
            if mean_error is not None:
                require_number("mean_error", mean_error, zero=True)
            low, high = (np.asarray(end, dtype=np.float64).ravel() for end in (lo, hi))
            if low.shape != (self._whole.dimension,) or high.shape != low.shape:
                raise ShapeError(
                    f"the corners have {low.size} and {high.size} numbers; expected {self._whole.dimension} each."
                )
            ends.append(self._whole.precision.widened(low, high))
            outside = [t for name in _OUTSIDE if (t := self._buffers.get(name)) is not None]
            return own_sizes(self._part(), self.axis, outside, math.prod(self.output_shape), *ends[0]).numbers()

        slices = [OwnSizes.of(row) for row in self._exchange.facts("running_terms", own)]
        low, high = (float(end[self.axis]) for end in ends[0])
        return merged_terms(self._whole, slices, low, high, mean_error)

    def rounding_bound(self, lo: ArrayLike, hi: ArrayLike) -> float:
        """The sum of `running_terms`, rounded up.

        Args:
            lo, hi: the corners of the box, flat.
        """
        return total(self.running_terms(lo, hi))


def _divisible(head: Any) -> DivisibleHead:
    """The head, if its keys can be divided; an UnsupportedError otherwise."""
    if isinstance(head, DivisibleHead):
        return head
    found = f"found a {type(head).__name__}; expected a GridHead or a ScatteredHead"
    hints = {
        TrainHead: "A tensor train takes little memory: keep a copy in every process and divide the inputs among them.",
        AttentionNetwork: "The heads of a network are small: keep a copy in every process and divide the inputs among them. "
        "To shard one of its heads, pass network.heads[i].",
    }
    hint = next(
        (text for kind, text in hints.items() if isinstance(head, kind)),
        "Pass c.head, the head of what compile returns.",
    )
    raise UnsupportedError(found, hint)


def _digest(head: DivisibleHead) -> int:
    """A number that differs where heads differ, from their records and all tensors that are not too large to be read whole."""
    small = {name: t for name, t in head.state_dict().items() if t.numel() <= _READ_WHOLE}
    shapes = [(name, tuple(t.shape), str(t.dtype)) for name, t in head.state_dict().items()]
    return digest_of_text(json.dumps([head.record(), shapes, model_digest(small)]))


def _axis(counts: tuple[int, ...], ranks: int) -> int:
    """The axis to cut: the first with enough keys for slices of nearly the same size, or else the longest."""
    enough = [axis for axis, count in enumerate(counts) if count >= _EVEN * ranks]
    return enough[0] if enough else counts.index(max(counts))
