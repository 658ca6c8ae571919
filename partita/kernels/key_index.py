"""Keys prepared once and queried often: what is sorted, boxed and copied for the kernels of each device."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from partita.errors import DomainError, ShapeError
from partita.kernels.key_tree import LEAF, KeyTree
from partita.kernels.scattered_native import Tables
from partita.kernels.scattered_torch import Nodes

__all__ = ["MOST_AXES_PRUNED", "KeyIndex"]

MOST_AXES_PRUNED = 8  # beyond, boxes of a few keys are so wide that nothing is left out
_NODE = LEAF * LEAF  # keys whose box the torch path looks at


class KeyIndex:
    """Keys sorted into boxes, so that each query looks only at those that can matter: for `partita.attend`.

    The numbers are copied: changing `keys` in place afterwards changes nothing here. Gradients still reach the tensors given.

    Args:
        keys: `(N, m)`, float64 or float32, finite, N ≥ 1.
        powers: p, `(N,)`, or None for zero.

    Raises:
        ShapeError: tensors of other shapes, dtypes or devices.
        DomainError: numbers that are not finite.

    >>> import torch, partita as pa
    >>> index = pa.KeyIndex(torch.tensor([[0.0], [1.0], [5.0]]))
    >>> index
    KeyIndex(3 keys in R^1, torch.float32, cpu)
    """

    def __init__(self, keys: Tensor, powers: Tensor | None = None) -> None:
        if (
            not isinstance(keys, Tensor)
            or keys.dim() != 2
            or not len(keys)
            or keys.dtype not in (torch.float32, torch.float64)
        ):
            found = f"{tuple(keys.shape)}, {keys.dtype}" if isinstance(keys, Tensor) else type(keys).__name__
            raise ShapeError(f"keys: found {found}; expected a tensor (N, m) with N ≥ 1, float32 or float64.")
        if powers is not None and (
            powers.shape != keys.shape[:1] or powers.dtype != keys.dtype or powers.device != keys.device
        ):
            raise ShapeError(
                f"powers: found {tuple(powers.shape)}, {powers.dtype} on {powers.device}; expected ({len(keys)},), {keys.dtype} on "
                f"{keys.device}, as the keys."
            )
        for name, tensor in (("keys", keys), ("powers", powers)):
            if tensor is not None and not bool(tensor.isfinite().all()):
                raise DomainError(f"{name}: found NaN or infinity; expected finite numbers.")
        self._held = keys.detach().clone(), None if powers is None else powers.detach().clone()
        self.keys = keys if keys.requires_grad else self._held[0]
        self.powers = powers if powers is not None and powers.requires_grad else self._held[1]
        self._tree: KeyTree | None = None
        self._tables: tuple[Tensor, Tensor | None, Tables] | None = None
        self._on_device: Any = None

    def __len__(self) -> int:
        return len(self.keys)

    def __repr__(self) -> str:
        return f"KeyIndex({len(self):,} keys in R^{self.dimension}, {self.keys.dtype}, {self.keys.device.type})"

    @property
    def dimension(self) -> int:
        """m."""
        return int(self.keys.shape[1])

    @property
    def largest_power(self) -> float:
        """The largest |p|."""
        return 0.0 if self._held[1] is None else float(self._held[1].abs().max())

    def holds(self, keys: Tensor, powers: Tensor | None) -> bool:
        """Whether the index was made of these numbers.

        Args:
            keys: `(N, m)`.
            powers: `(N,)` or None.
        """
        pairs = zip(self._held, (keys, powers))
        return all(
            (old is None and new is None)
            or (old is not None and new is not None and old.device == new.device and torch.equal(old, new.detach()))
            for old, new in pairs
        )

    @property
    def tree(self) -> KeyTree:
        """For the CPU."""
        if self._tree is None:
            keys, powers = (None if t is None else t.double().cpu().numpy() for t in self._held)
            assert keys is not None
            self._tree = KeyTree.of(keys, powers)
        return self._tree

    def tables(self, values: Tensor, slopes: Tensor | None) -> Tables:
        """Values in the order of the tree; the last ones are kept, and made again if the numbers differ.

        Args:
            values: `(N, out)`.
            slopes: `(N, out, m)` or None.
        """
        kept = self._tables
        if kept is None or not _same(kept[0], values) or not _same(kept[1], slopes):
            held = [None if t is None else t.detach().clone() for t in (values, slopes)]
            numbers = [None if t is None else t.double().numpy() for t in held]
            assert held[0] is not None and numbers[0] is not None
            kept = self._tables = held[0], held[1], Tables.of(self.tree, numbers[0], numbers[1])
        return kept[2]

    @property
    def on_device(self) -> Any:
        """For Triton (`scattered_triton.DeviceIndex`)."""
        if self._on_device is None:
            from partita.kernels.scattered_triton import build_index

            self._on_device = build_index(*self._held)
        return self._on_device

    def nodes(self) -> Nodes:
        """For plain torch operations."""
        tree, device = self.tree, self.keys.device
        level = min(1, len(tree.sizes) - 1)
        size = LEAF if level == 0 else _NODE
        order = np.full(int(tree.sizes[level]) * size, -1)
        order[: len(tree.order)] = tree.order
        lo, hi, top = (torch.from_numpy(np.ascontiguousarray(a)).to(device) for a in tree.level(level))
        return Nodes(torch.from_numpy(order).to(device).view(-1, size), lo, hi, top)


def _same(old: Tensor | None, new: Tensor | None) -> bool:
    if old is None or new is None:
        return old is new
    return old.dtype == new.dtype and old.shape == new.shape and torch.equal(old, new.detach())
