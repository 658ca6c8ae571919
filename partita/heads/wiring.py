"""How the heads of a network are wired: which channels each head reads, and what the network returns, as plain data.

A network is a list of channels. The first ones are the inputs. Every layer appends one channel for each use of a head; a head
reads affine functions of the channels before its layer. Nothing is ever overwritten, as in the residual stream of a
transformer, so that a coordinate is chosen by its index and costs no stored number.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from fractions import Fraction

import numpy as np

from partita.geometry.domains import Array

__all__ = ["Affine", "Group", "Wiring"]


@dataclass(frozen=True, eq=False)
class Affine:
    """`W c + b` over the channels c with indices start, …, start + width − 1.

    Attributes:
        weight: W as the network stores it, float64 `(rows, width)`. Entries that are 0 or 1 are structure and are not stored.
        bias: b, `(rows,)`. Entries that are 0 are not stored.
        start: the first channel that is read.
        exact: coefficients of the exact function that are not those numbers, such as 1/3, by (row, column of `weight`);
            column −1 is the bias. `weight` and `bias` hold the nearest float64 numbers, or these rounded to the network's dtype.
    """

    weight: Array
    bias: Array
    start: int = 0
    exact: Mapping[tuple[int, int], Fraction] = field(default_factory=dict)

    @property
    def rows(self) -> int:
        return len(self.bias)

    @property
    def num_parameters(self) -> int:
        """Stored numbers: weights other than 0 and 1, and biases other than 0."""
        return int(np.count_nonzero((self.weight != 0) & (self.weight != 1)) + np.count_nonzero(self.bias))

    @property
    def chosen(self) -> Array | None:
        """The channel that each row reads, if every row is one channel with weight 1 and no bias; else None."""
        single = (np.count_nonzero(self.weight, axis=1) == 1) & (self.weight.sum(axis=1) == 1) & (self.bias == 0)
        return self.start + np.argmax(self.weight != 0, axis=1) if bool(single.all()) else None


@dataclass(frozen=True, eq=False)
class Group:
    """The uses of one head in one layer.

    Attributes:
        head: its index in the network's list of heads.
        reads: one row per input of each use, use by use: `(uses · inputs of the head)` rows.
    """

    head: int
    reads: Affine


@dataclass(frozen=True, eq=False)
class Wiring:
    """Channels 0, …, inputs − 1 are the inputs; then come the uses, layer by layer, group by group, in the order of their rows.

    Attributes:
        inputs: the number of inputs.
        layers: the groups of every layer. A head reads channels of earlier layers only.
        output: the outputs, over all channels.
    """

    inputs: int
    layers: tuple[tuple[Group, ...], ...]
    output: Affine
