"""The second paper's truncated linear functions: one head, the literal layers, several heads, two layers."""

from partita.ramps.bump_networks import BumpNetwork, two_layers
from partita.ramps.literal_ramps import ramp_layers
from partita.ramps.multi_head_ramps import (
    FoldedSharedRamp,
    MultiHeadRamp,
    SharedRamp,
    multi_head_ramp,
    sharpness_needed,
)
from partita.ramps.ramp_head import RampHead
from partita.ramps.single_ramp import Ramp, ramp

__all__ = [
    "BumpNetwork",
    "FoldedSharedRamp",
    "MultiHeadRamp",
    "Ramp",
    "RampHead",
    "SharedRamp",
    "multi_head_ramp",
    "ramp",
    "ramp_layers",
    "sharpness_needed",
    "two_layers",
]
