"""What is made of several heads: multi-head ramps, two layers, feed-forward networks as attention, gradient descent in context."""

from partita.networks.blocks import EncoderRamp, PrefixRamp, descent_attention, encoder_ramp, prefix_ramp
from partita.networks.from_mlp import AttentionNetwork, attention_from_mlp
from partita.networks.in_context import GradientDescent, gradient_descent
from partita.networks.multi_head import MultiHeadRamp, SharedRamp, multi_head_ramp, sharpness_needed
from partita.networks.two_layers import BumpNetwork, two_layers

__all__ = [
    "AttentionNetwork",
    "BumpNetwork",
    "EncoderRamp",
    "GradientDescent",
    "MultiHeadRamp",
    "PrefixRamp",
    "SharedRamp",
    "attention_from_mlp",
    "descent_attention",
    "encoder_ramp",
    "gradient_descent",
    "multi_head_ramp",
    "prefix_ramp",
    "sharpness_needed",
    "two_layers",
]
