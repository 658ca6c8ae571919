"""Theorems rather than methods of the compiler: lookups, reassignments, two keys, positions, lower bounds."""

from partita.papers.activation_heads import max_affine_head, relu_head, sigmoid_head, silu_head, tanh_head
from partita.papers.additive_positions import PositionalHead, positional_head
from partita.papers.equivariance import EquivarianceGap, equivariance_gap
from partita.papers.indicator_head import indicator
from partita.papers.lower_bounds import AdditiveGap, additive_gap, least_numbers, product_gap
from partita.papers.one_hot_positions import PositionalAttention, SharedNetwork, linear_as_attention, shared_weights
from partita.papers.reassigned_values import reassignment, reassignment_layers
from partita.papers.rotary_positions import RotaryConvolution, rotary_convolution

__all__ = [
    "AdditiveGap",
    "EquivarianceGap",
    "PositionalAttention",
    "PositionalHead",
    "RotaryConvolution",
    "SharedNetwork",
    "additive_gap",
    "equivariance_gap",
    "indicator",
    "least_numbers",
    "linear_as_attention",
    "max_affine_head",
    "positional_head",
    "product_gap",
    "reassignment",
    "reassignment_layers",
    "relu_head",
    "rotary_convolution",
    "shared_weights",
    "sigmoid_head",
    "silu_head",
    "tanh_head",
]
