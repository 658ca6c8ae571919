"""Networks of several heads: feed-forward networks as attention, gradient descent and functions in context."""

from partita.moved import forward
from partita.networks.blocks import (
    EncoderRamp,
    PrefixRamp,
    descent_attention,
    encoder_ramp,
    prefix_ramp,
    prompt_attention,
)
from partita.networks.from_mlp import AttentionNetwork, attention_from_mlp
from partita.networks.in_context import GradientDescent, gradient_descent
from partita.networks.prompt_functions import PromptFunction

__all__ = [
    "AttentionNetwork",
    "EncoderRamp",
    "GradientDescent",
    "PrefixRamp",
    "PromptFunction",
    "attention_from_mlp",
    "descent_attention",
    "encoder_ramp",
    "gradient_descent",
    "prefix_ramp",
    "prompt_attention",
]

__getattr__ = forward("partita.networks", "partita.ramps")  # multi-head ramps and two layers moved there
