"""How long proofs are cut: into batches that workers may take side by side, and into shards that certificates list.

The cut depends on the proof alone, not on who does the work, so that the bound is the same number everywhere.
"""

from __future__ import annotations

from collections.abc import Sequence

from partita.arithmetic.rounding import mul_up

__all__ = ["ROUND", "SHARDED", "SHARDS", "shard_details"]

ROUND = 16  # batches that are measured with the same knowledge, once a proof has proved to be long
SHARDS = 16  # parts of a domain
SHARDED = 4096  # boxes from which on a certificate lists the bounds of its shards


def shard_details(bounds: Sequence[float], factor: float = 1.0) -> dict[str, list[float]]:
    """What a certificate stores of the shards: their bounds, in the norm of the claim. Nothing for short proofs.

    Args:
        bounds: per shard. factor: from a supremum to the norm of the claim.
    """
    return {"shards": [mul_up(b, factor) for b in bounds]} if bounds else {}
