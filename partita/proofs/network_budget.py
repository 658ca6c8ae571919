"""The error budget of a network of heads: what each head adds to the bound, in numbers and in words."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from partita.geometry.domains import Array, Box
from partita.heads.head import count_text
from partita.heads.network import AttentionNetwork
from partita.proofs.carried_errors import shown
from partita.proofs.certificate import Certificate
from partita.proofs.network_proof import Part, carried_over

__all__ = ["UseShares", "budget_text", "use_shares"]

_MOST_HEADS = 12  # that are listed in words; the others are summed


@dataclass(frozen=True, eq=False)
class UseShares:
    """What the uses of one head in one layer add to the bound.

    Attributes:
        layer: counted from 1.
        head: its index in the network's list of heads.
        first: the channel of its first use; the others follow.
        gains: how far one unit of error at each use moves the output at most, `(uses,)`.
        shares: the part of the error bound that each use causes, `(uses,)`.
    """

    layer: int
    head: int
    first: int
    gains: Array
    shares: Array


def use_shares(network: AttentionNetwork, certificate: Certificate, box: Box) -> list[UseShares]:
    """What every use of a head adds to the proved bound, on the box and for the output where the sum is largest.

    Args:
        network: the network.
        certificate: a proved one, which holds the claims of the heads.
        box: the domain.

    Returns:
        One entry for each group of the wiring, in order.
    """
    parts = Part.all_from_json(certificate.proof.get("parts"), network.parts)
    carried, _ = carried_over(network, parts, box, certificate.proof)
    total = carried.shares(len(parts)).total
    where, output = np.unravel_index(int(np.argmax(total)), total.shape)
    layers = [number for number, groups in enumerate(carried.wiring.layers, 1) for _ in groups]
    found = []
    for layer, (first, group, reads) in zip(layers, carried.groups()):
        gains = carried.gains[where, output, first : first + len(reads.moves)]
        own = reads.head_error[where]
        found.append(UseShares(layer, group.head, first, gains, gains * own / max(certificate.error_bound, 1e-300)))
    return found


def budget_text(network: AttentionNetwork, certificate: Certificate) -> str:
    """The error bound of a network, head by head: what each is for, its own error, what becomes of it on the way, and the sum.

    Everything is read from the certificate. Empty if that does not list the heads, because nothing is proved.

    Args:
        network: the network.
        certificate: its certificate.
    """
    terms = {term.name: term for term in certificate.terms}
    own = [terms.pop(f"head {i}", None) for i in range(len(network.heads))]
    if not network.heads or None in own or "parts" not in certificate.proof:
        return ""
    parts, bound = Part.all_from_json(certificate.proof["parts"], network.parts), certificate.error_bound
    layers: list[list[int]] = [[] for _ in parts]  # of every use
    for number, groups in enumerate(network.wiring.layers, 1):
        for group in groups:
            layers[group.head] += [number] * (group.reads.rows // parts[group.head].graph.num_inputs)
    listed = sorted(((t.value, i) for i, t in enumerate(own) if t is not None), key=lambda pair: (-pair[0], pair[1]))
    lines = [
        "Where the error comes from, at the output and in the part of the domain with the largest bound (x0 is what a head reads):"
    ]
    for value, i in listed[:_MOST_HEADS]:
        part, error = parts[i], parts[i].certificate.error_bound
        keys = network.parts[i].num_keys
        lines.append(
            f"  head {i}, {shown(part.graph)} on {part.box}: {count_text(keys)} key{'s' * (keys != 1)}, {_used(layers[i])}"
        )
        gain = f", multiplied by {value / error:.4g} on the way to the output" if error > 0 else ""
        together = f" ({len(layers[i]):,} uses together)" * (len(layers[i]) > 1 and error > 0)
        lines.append(
            f"    its own proved error is at most {error:.6g}{gain}{together}: {value:.6g}, {_percent(value, bound)}"
        )
    rest = [value for value, _ in listed[_MOST_HEADS:]]
    if rest:
        lines.append(f"  {len(rest):,} more heads together: {sum(rest):.6g}, {_percent(sum(rest), bound)}")
    words = {
        "coefficients": "coefficients that are not numbers of the dtype are stored rounded",
        "rounding": "the affine maps between the heads are rounded while they run",
        "input rounding": "inputs are rounded to the dtype",
    }
    lines += [f"  {words.get(t.name, t.name)}: {t.value:.6g}, {_percent(t.value, bound)}" for t in terms.values()]
    return "\n".join([*lines, f"  sum: {bound:.6g}, the error bound"])


def _used(layers: list[int]) -> str:
    """How often, and in which layers."""
    names = [str(n) for n in dict.fromkeys(layers)]
    where = f"layer {names[0]}" if len(names) == 1 else f"layers {', '.join(names[:-1])} and {names[-1]}"
    return f"used {'once' if len(layers) == 1 else f'{len(layers):,} times'} in {where}"


def _percent(value: float, bound: float) -> str:
    share = 100 * value / bound if bound > 0 else 0.0
    return "less than 0.1 % of the bound" if share < 0.1 else f"{share:.1f} % of the bound"
