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
from partita.networks.descent import Descent
from partita.networks.from_mlp import ConvertedNetwork, attention_from_mlp
from partita.networks.prompt_functions import PromptFunction

__all__ = [
    "ConvertedNetwork",
    "Descent",
    "EncoderRamp",
    "PrefixRamp",
    "PromptFunction",
    "attention_from_mlp",
    "descent_attention",
    "encoder_ramp",
    "prefix_ramp",
    "prompt_attention",
]

# multi-head ramps and two layers moved to ramps, gradient descent to the compiler's room
__getattr__ = forward("partita.networks", "partita.ramps", "partita.compiler.in_context")
