"""Networks of several heads: feed-forward networks as attention, gradient descent in context."""

from partita.moved import forward
from partita.networks.blocks import EncoderRamp, PrefixRamp, descent_attention, encoder_ramp, prefix_ramp
from partita.networks.from_mlp import AttentionNetwork, attention_from_mlp
from partita.networks.in_context import GradientDescent, gradient_descent

__all__ = [
    "AttentionNetwork",
    "EncoderRamp",
    "GradientDescent",
    "PrefixRamp",
    "attention_from_mlp",
    "descent_attention",
    "encoder_ramp",
    "gradient_descent",
    "prefix_ramp",
]

__getattr__ = forward("partita.networks", "partita.ramps")  # multi-head ramps and two layers moved there
