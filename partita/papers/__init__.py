"""The first paper's constructions that are theorems rather than methods of the compiler: lookups, reassignments, two keys."""

from partita.papers.indicator_head import indicator
from partita.papers.reassigned_values import reassignment, reassignment_layers
from partita.papers.two_keys import max_affine_head, relu_head, sigmoid_head, silu_head, tanh_head

__all__ = [
    "indicator",
    "max_affine_head",
    "reassignment",
    "reassignment_layers",
    "relu_head",
    "sigmoid_head",
    "silu_head",
    "tanh_head",
]
