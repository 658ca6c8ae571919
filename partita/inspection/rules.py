"""Rules that `audit` evaluates. They drop keys of an attention head, or store keys and values in fewer bits."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, is_dataclass
from typing import Any, ClassVar, final

import torch
from torch import Tensor

from partita.arithmetic.arguments import is_number, require_count
from partita.errors import DomainError, ShapeError, UnsupportedError
from partita.kernels.dropped_keys import needed_tiles, tiles_of
from partita.kernels.skipped_blocks import require_tile

__all__ = ["DroppingRule", "KeepMask", "Quantized", "Rule", "SkipBlocks", "TopK", "Window", "kept_keys", "require_rule"]

_TILE = (64, 128)


class Rule:
    """What is done to the keys and values of a head. To write a rule of your own, subclass `DroppingRule`."""

    def __str__(self) -> str:
        return repr(self) if is_dataclass(self) else type(self).__name__


class DroppingRule(Rule, ABC):
    """A rule that drops keys; softmax then runs over the others. To write a rule of your own, subclass it and define `keeps`.

    Attributes:
        tile: queries and keys of a block, (64, 128) by default. The bound encloses the values of each tile in a ball.
        whole_tiles: whether keys are dropped in tiles; shares then count tiles, otherwise keys.

    >>> class Even(DroppingRule):
    ...     def keeps(self, scores, positions, head):
    ...         return torch.arange(scores.shape[-1], device=scores.device) % 2 == 0
    >>> print(Even())
    Even
    """

    tile: tuple[int, int] = _TILE
    whole_tiles: ClassVar[bool] = False

    @abstractmethod
    def keeps(self, scores: Tensor, positions: Tensor, head: int) -> Tensor:
        """Which keys are kept: a boolean tensor that broadcasts to `(batch, rows, keys)`. Its entries at masked keys do not matter.

        Args:
            scores: `(batch, rows, keys)`, −∞ where masked; every recorded row of each block of queries.
            positions: `(rows,)`, ascending positions of the queries among the keys. With fewer queries than keys, as with a cache
                of keys, the queries are the last tokens.
            head: number of the head within its layer.
        """


def require_rule(rule: Any) -> Rule:
    """The rule itself. Raises an UnsupportedError for anything that is not a rule."""
    if not isinstance(rule, (DroppingRule, Quantized)):
        found = repr(rule) if len(repr(rule)) < 80 else f"of type {type(rule).__name__}"
        raise UnsupportedError(
            f"rule is {found}; expected SkipBlocks(threshold), TopK(k), Window(sinks, recent), KeepMask(mask), Quantized(bits), "
            "a DroppingRule of your own, or a list of these."
        )
    if isinstance(rule, DroppingRule):
        require_tile(rule.tile)
    return rule


def kept_keys(
    rule: DroppingRule, scores: Tensor, numbers: Tensor, offsets: Sequence[int], first: Tensor, head: int
) -> Tensor:
    """The mask that `rule.keeps` returns. Raises a ShapeError if it is not a mask that fits the scores.

    Args:
        rule: the rule.
        scores: `(batch, rows, keys)`, −∞ where masked.
        numbers: `(rows,)`, ascending numbers of the queries in their call.
        offsets: for each sequence the position of query 0 among the keys.
        first: `(batch,)`, the first key that any query sees.
        head: number of the head within its layer.
    """
    if isinstance(rule, (SkipBlocks, TopK, KeepMask)):
        kept = rule.keeps(scores, numbers, head)
    elif len(set(offsets)) > 1:
        each = zip(scores.split(1), offsets, first.split(1))
        return torch.cat([kept_keys(rule, s, numbers, [o], f, head).expand(s.shape) for s, o, f in each])
    elif isinstance(rule, Window):
        kept = rule.keeps(scores, numbers + offsets[0], head, first)
    else:
        kept = rule.keeps(scores.clone(), numbers + offsets[0], head)
    ends = zip(reversed(kept.shape), reversed(scores.shape)) if isinstance(kept, Tensor) else ()
    if (
        not isinstance(kept, Tensor)
        or kept.dtype != torch.bool
        or kept.dim() > scores.dim()
        or any(own not in (1, whole) for own, whole in ends)
    ):
        found = f"{kept.dtype} of shape {tuple(kept.shape)}" if isinstance(kept, Tensor) else type(kept).__name__
        raise ShapeError(
            f"{rule}.keeps returned {found}; expected torch.bool that broadcasts to {tuple(scores.shape)} (batch, rows, keys), "
            "True where a key is kept."
        )
    return kept


@final
@dataclass(frozen=True)
class SkipBlocks(DroppingRule):
    """Skips blocks as skip-softmax kernels do. For each block of queries, tiles of keys are visited one after the other.

    A tile is skipped if `exp(tile max − running max) < threshold` in every row of the block that sees it. The running maximum
    includes the tile, so the first tile that a query sees is never skipped.

    Attributes:
        threshold: from 0, which skips nothing, to 1.
        tile: queries and keys of a block. Block b holds the queries from position `b·tile[0]` on; if only some positions were
            recorded, it holds only these.
        descending: begin with the last tile instead of the first, so that heads that look at recent tokens find their maximum
            early.

    >>> print(SkipBlocks(0.001))
    SkipBlocks(0.001, 64×128)
    """

    threshold: float
    tile: tuple[int, int] = _TILE
    descending: bool = False
    whole_tiles: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not is_number(self.threshold) or not 0 <= self.threshold <= 1:
            raise DomainError(f"threshold is {self.threshold!r}; expected a number from 0 to 1.")
        object.__setattr__(self, "threshold", float(self.threshold))
        object.__setattr__(self, "tile", require_tile(self.tile))
        if not isinstance(self.descending, bool):
            raise DomainError(f"descending is {self.descending!r}; expected True or False.")

    def __str__(self) -> str:
        order = ", descending" if self.descending else ""
        return f"SkipBlocks({self.threshold:.3g}, {self.tile[0]}×{self.tile[1]}{order})"

    def keeps(self, scores: Tensor, positions: Tensor, head: int) -> Tensor:
        """Which keys are kept.

        Args:
            scores: `(batch, rows, keys)`, −∞ where masked; whole blocks.
            positions: `(rows,)`, ascending.
            head: not used.
        """
        width = min(self.tile[1], max(1, scores.shape[-1]))
        heights = tiles_of(scores, width, -torch.inf).amax(dim=-1)
        needed = needed_tiles(heights.flip(-1) if self.descending else heights, self.threshold)
        needed = needed.flip(-1) if self.descending else needed
        _, block = torch.unique_consecutive(positions // self.tile[0], return_inverse=True)
        votes = needed.new_zeros(
            len(scores), int(block.max()) + 1 if len(block) else 0, needed.shape[-1], dtype=torch.int
        )
        kept = votes.index_add_(1, block, needed.int())[:, block] > 0
        return kept.repeat_interleave(width, dim=-1)[..., : scores.shape[-1]]


@final
@dataclass(frozen=True)
class TopK(DroppingRule):
    """Keeps the k largest scores of each query; ties go to the earlier keys.

    Attributes:
        k: number of keys to keep, at least 1.
        tile: queries and keys of a block, for the bound.

    >>> print(TopK(8))
    TopK(8)
    """

    k: int
    tile: tuple[int, int] = _TILE

    def __post_init__(self) -> None:
        object.__setattr__(self, "k", require_count("k", self.k))
        object.__setattr__(self, "tile", require_tile(self.tile))

    def __str__(self) -> str:
        return f"TopK({self.k})"

    def keeps(self, scores: Tensor, positions: Tensor, head: int) -> Tensor:
        """Which keys are kept.

        Args:
            scores: `(batch, rows, keys)`, −∞ where masked.
            positions: not used.
            head: not used.
        """
        if self.k >= scores.shape[-1]:
            return torch.ones_like(scores, dtype=torch.bool)
        last = scores.topk(self.k, sorted=False).values.amin(dim=-1, keepdim=True)
        above, equal = scores > last, scores == last
        rest = self.k - above.sum(dim=-1, keepdim=True)
        return above | (equal & (equal.cumsum(dim=-1) <= rest))


@final
@dataclass(frozen=True)
class Window(DroppingRule):
    """Keeps the first keys and those near the query: key j is kept for query i if `j < sinks` or `|i − j| < recent`.

    Keys are counted from the first one that any query sees, so that padding before the sequence does not count. With fewer queries
    than keys, as with a cache of keys, the queries are the last tokens. In cross-attention the distance has no meaning.

    Attributes:
        sinks: number of first keys that are always kept; may be 0.
        recent: keys at a distance below this are kept; 1 keeps only the query's own position, 0 none.
        tile: queries and keys of a block, for the bound.

    >>> print(Window(4, 256))
    Window(4, 256)
    """

    sinks: int
    recent: int
    tile: tuple[int, int] = _TILE

    def __post_init__(self) -> None:
        for name in ("sinks", "recent"):
            object.__setattr__(self, name, require_count(name, getattr(self, name), least=0))
        object.__setattr__(self, "tile", require_tile(self.tile))

    def __str__(self) -> str:
        return f"Window({self.sinks}, {self.recent})"

    def keeps(self, scores: Tensor, positions: Tensor, head: int, first: Tensor | None = None) -> Tensor:
        """Which keys are kept.

        Args:
            scores: `(batch, rows, keys)`.
            positions: `(rows,)`.
            head: not used.
            first: `(batch,)`, where sinks begin; 0 by default.
        """
        keys = torch.arange(scores.shape[-1], device=scores.device)
        sinks = self.sinks if first is None else self.sinks + first[:, None, None]
        return (keys < sinks) | ((positions[:, None] - keys).abs() < self.recent)


@final
@dataclass(frozen=True, eq=False)
class KeepMask(DroppingRule):
    """Keeps the keys that a mask selects.

    Attributes:
        mask: boolean array or tensor, True where a key is kept. `(keys,)`, `(queries, keys)` or `(heads, queries, keys)`; axes of
            length 1 broadcast.
        tile: queries and keys of a block, for the bound.

    >>> print(KeepMask([True, False]))
    KeepMask(2)
    """

    mask: Any
    tile: tuple[int, int] = _TILE

    def __post_init__(self) -> None:
        try:
            mask = torch.as_tensor(self.mask).detach()
        except (TypeError, ValueError, RuntimeError) as problem:
            raise UnsupportedError(
                f"mask is {type(self.mask).__name__}; expected a boolean array or tensor, True where a key is kept."
            ) from problem
        if mask.dtype != torch.bool or not mask.dim():
            raise UnsupportedError(
                f"mask is {str(mask.dtype).removeprefix('torch.')} of shape {tuple(mask.shape)}; expected booleans, True where "
                "a key is kept, of shape (keys,), (queries, keys) or (heads, queries, keys)."
            )
        while mask.dim() > 3 and mask.shape[0] == 1:
            mask = mask[0]
        if mask.dim() > 3:
            raise ShapeError(
                f"mask has shape {tuple(mask.shape)}; expected (keys,), (queries, keys) or (heads, queries, keys): one mask "
                "serves every sequence."
            )
        object.__setattr__(self, "mask", mask.reshape((1,) * (3 - mask.dim()) + tuple(mask.shape)))
        object.__setattr__(self, "tile", require_tile(self.tile))

    def __str__(self) -> str:
        return f"KeepMask({'×'.join(str(n) for n in self.mask.shape if n > 1) or 1})"

    def keeps(self, scores: Tensor, positions: Tensor, head: int) -> Tensor:
        """Which keys are kept.

        Args:
            scores: `(batch, rows, keys)`.
            positions: `(rows,)`.
            head: number of the head.

        Raises:
            ShapeError: the mask is too small for the head, or has the wrong number of keys.
        """
        heads, queries, keys = self.mask.shape
        last = int(positions.max()) if len(positions) else 0
        if keys not in (1, scores.shape[-1]) or (heads != 1 and head >= heads) or (queries != 1 and last >= queries):
            raise ShapeError(
                f"the mask of KeepMask has shape {(heads, queries, keys)} (heads, queries, keys); head {head} has queries up to "
                f"position {last} and {scores.shape[-1]} keys. Each axis must match or have length 1."
            )
        chosen: Tensor = self.mask[head if heads > 1 else 0].to(scores.device)
        return chosen[positions] if queries > 1 else chosen


@final
@dataclass(frozen=True)
class Quantized(Rule):
    """Stores keys and values in fewer bits: each vector in `2^bits` levels from its least to its largest coordinate, to nearest.

    Attributes:
        bits: from 1 to 16.

    >>> print(Quantized(8))
    Quantized(8)
    """

    bits: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "bits", require_count("bits", self.bits, most=16))

    def __str__(self) -> str:
        return f"Quantized({self.bits})"

    def of(self, vectors: Tensor) -> Tensor:
        """The vectors after they are stored and read back, `(…, dim)`.

        Args:
            vectors: `(…, dim)`, floating point.
        """
        if not vectors.shape[-1]:
            return vectors
        least, most = vectors.aminmax(dim=-1, keepdim=True)
        step = (most - least) / (2**self.bits - 1)
        levels = ((vectors - least) / torch.where(step > 0, step, 1.0)).round()
        return torch.where(step > 0, least + levels * step, vectors)
