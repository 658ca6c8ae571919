"""Layers and numbers of Yun et al.'s universal transformer, and keys and numbers of one attention layer, at equal ε and modulus.

python benchmarks/layer_counts.py    # some seconds; prints the table of docs/methods.md

Yun et al., "Are Transformers universal approximators of sequence-to-sequence functions?" (arXiv 1912.10077), Theorems 2 and 3, on
[0, 1]^{d×n} with a grid of width δ. Their network has blocks with h = 2 heads of size m = 1 and r = 4 hidden units; the layers that
do something are counted, with constant 1 in every O(·):

    quantization (Lemma 5)        d/δ + d feed-forward layers
    contextual mapping (Lemma 6)  δ^{−d} + 1 attention layers; nδ^{−d} + 1 with positional encodings
    value mapping (Lemma 7)       n(1/δ)^{dn}/n! feed-forward layers; n(1/δ)^{dn} with positional encodings
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import partita as pa

# d, n, ε
CASES = [(1, 2, 0.1), (1, 2, 0.01), (2, 2, 0.1), (1, 4, 0.1), (2, 3, 0.1)]
HEADER = (
    "| d | n | ε | δ | Yun et al.: layers, equivariant f | layers, any f | numbers, any f | `paper`: keys | stored numbers "
    "| `hard`: keys | stored numbers | `auto`: keys | stored numbers |"
)


@dataclass(frozen=True)
class DeepCount:
    """Layers of Yun et al.'s construction that do something, and the numbers in them."""

    feed_forward: int
    attention: int
    dim: int

    @property
    def layers(self) -> int:
        return self.feed_forward + self.attention

    @property
    def numbers(self) -> int:
        """2 heads with W_Q, W_K, W_V, W_O of d numbers each; W_1, W_2, b_1, b_2 with r = 4: `8d` and `9d + 4`."""
        return self.attention * 8 * self.dim + self.feed_forward * (9 * self.dim + 4)


def deep_count(dim: int, tokens: int, cells: int, *, equivariant: bool) -> DeepCount:
    """The count for 1/δ = `cells`."""
    values = tokens * cells ** (dim * tokens)
    if equivariant:
        values = -(-values // math.factorial(tokens))
    sweeps = 1 if equivariant else tokens
    return DeepCount(dim * cells + dim + values, sweeps * cells**dim + 1, dim)


def function(dim: int, tokens: int) -> str:
    """Every output is `sin(6s)/6`, s the mean of all inputs: equivariant, and `|f(X) − f(Y)|_∞ ≤ |X − Y|_∞`."""
    m = dim * tokens
    mean = " + ".join(f"x{i}" for i in range(m))
    entry = f"sin(6*({mean})/{m})/6"
    return "; ".join([", ".join([entry] * dim)] * tokens)


def figures(dim: int, tokens: int, epsilon: float) -> dict[str, float]:
    """All numbers of a row. δ = ε/3, the width at which f moves by ε/3, for both constructions."""
    cells = round(3 / epsilon)
    box = pa.Box.sequence(0, 1, tokens=tokens, dim=dim)
    plan = pa.plan(function(dim, tokens), box, tolerance=epsilon, max_heads=1, max_layers=1)
    rows = {c.method: c for c in plan.candidates}
    equivariant, general = (deep_count(dim, tokens, cells, equivariant=e) for e in (True, False))
    found: dict[str, float] = {
        "d": dim,
        "n": tokens,
        "epsilon": epsilon,
        "delta": epsilon / 3,
        "equivariant_layers": equivariant.layers,
        "layers": general.layers,
        "numbers": general.numbers,
    }
    for name, row in (("paper", rows["paper"]), ("hard", rows["hard"]), ("auto", rows[plan.method])):
        assert row.keys is not None and row.parameters is not None
        found |= {f"{name}_keys": row.keys, f"{name}_numbers": row.parameters}
    return found


def row(dim: int, tokens: int, epsilon: float) -> str:
    """A line of the table."""
    cells = (
        f"{x:,}" if isinstance(x, int) and x < 10**7 else f"{x:.3g}" for x in figures(dim, tokens, epsilon).values()
    )
    return f"| {' | '.join(cells)} |"


def main() -> None:
    print(HEADER)
    print("|---" * 13 + "|")
    for case in CASES:
        print(row(*case), flush=True)


if __name__ == "__main__":
    main()
