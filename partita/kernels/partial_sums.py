"""Sums over some of a head's keys, and how sums over disjoint sets of keys become the sum over all of them.

One table holds what was found for n queries, `(n, 3 + outputs)`. Its columns are the largest score, the log-sum-exp less that
score, a bound on the share of the weight that was left out, and the outputs. Tables of disjoint keys merge into a table of the
same kind, `merged`, so that keys may lie on different machines.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["BOUND", "LOG_SUM", "MAXIMUM", "NUMBERS", "OUTPUT", "merged", "merged_gradient", "nothing", "table"]

MAXIMUM, LOG_SUM, BOUND = 0, 1, 2  # columns
NUMBERS = 3  # per query, besides the outputs
OUTPUT = slice(NUMBERS, None)


def table(maximum: Tensor, log_sum: Tensor, bound: Tensor, output: Tensor) -> Tensor:
    """The four parts as one table.

    Args:
        maximum: the largest score, `(n,)`, or a number near it that the exponentials were taken relative to. Not differentiated.
        log_sum: `log Σ_j exp(s_j − maximum)`, `(n,)`.
        bound: an upper bound of the share of `Σ_j exp(s_j)` that belongs to keys left out, `(n,)`.
        output: `Σ_j softmax_j(s) V_j`, `(n, outputs)`.
    """
    return torch.cat([torch.stack([maximum.detach(), log_sum, bound.detach()], dim=1), output], dim=1)


def nothing(queries: Tensor, outputs: int, bound: float = 0.0) -> Tensor:
    """The table of no keys: the maximum is −∞, which weighs nothing.

    Args:
        queries: `(n, m)`.
        outputs: how many.
        bound: of the share of the *whole* sum, over the keys of all tables, that was left out here.
    """
    none = queries.new_zeros(len(queries), NUMBERS + outputs)
    none[:, MAXIMUM] = -torch.inf
    none[:, BOUND] = bound
    return none


def merged(tables: Tensor) -> Tensor:
    """`output = Σ_r e^{lse_r − lse} output_r`, `lse = log Σ_r e^{lse_r}`; the bounds with the same weights.

    Tables are added one after the other in the order given, so that the result depends on nothing else. *Theorem*: `merged-slices`.

    Args:
        tables: `(slices, n, 3 + outputs)`.

    Returns:
        `(n, 3 + outputs)`.

    >>> one = table(torch.tensor([-2.0]), torch.tensor([0.0]), torch.zeros(1), torch.tensor([[1.0]]))
    >>> two = table(torch.tensor([-2.0]), torch.tensor([0.0]), torch.zeros(1), torch.tensor([[3.0]]))
    >>> [round(x, 4) for x in merged(torch.stack([one, two]))[0].tolist()]
    [-2.0, 0.6931, 0.0, 2.0]
    >>> far = table(torch.tensor([-1e5]), torch.tensor([0.0]), torch.zeros(1), torch.tensor([[9.0]]))
    >>> bool(torch.equal(merged(torch.stack([one, far])), one))
    True
    """
    top = tables[:, :, MAXIMUM].amax(dim=0)
    weights = [torch.exp((part[:, MAXIMUM] - top) + part[:, LOG_SUM]) for part in tables]
    mass, output, bound = (torch.zeros_like(part) for part in (top, tables[0, :, OUTPUT], top))
    for weight in weights:
        mass = mass + weight
    for part, weight in zip(tables, weights):
        share = weight / mass
        output = output + share[:, None] * part[:, OUTPUT]
        bound = bound + torch.where(part[:, MAXIMUM] == -torch.inf, 1.0, share) * part[:, BOUND]
    rounding = 4 * (len(tables) + 8) * torch.finfo(tables.dtype).eps
    return table(top, mass.log(), bound * (1 + rounding), output)


def merged_gradient(grad: Tensor, own: Tensor, whole: Tensor) -> Tensor:
    """The gradient of `merged` in one of its tables, in the log-sum-exp and in the outputs.

    `∂L/∂output_r = w_r g` and `∂L/∂lse_r = w_r(g·(output_r − output) + g_lse)`, `w_r = e^{lse_r − lse}`.

    Args:
        grad: of the merged table.
        own: the table.
        whole: the merged table.
    """
    share = torch.exp((own[:, MAXIMUM] - whole[:, MAXIMUM]) + (own[:, LOG_SUM] - whole[:, LOG_SUM]))
    pulled = (grad[:, OUTPUT] * (own[:, OUTPUT] - whole[:, OUTPUT])).sum(dim=1)
    found = torch.zeros_like(own)
    found[:, LOG_SUM] = share * (pulled + grad[:, LOG_SUM])
    found[:, OUTPUT] = share[:, None] * grad[:, OUTPUT]
    return found
