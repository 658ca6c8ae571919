"""The papers' layers, the folded head that people run, and the forms that connect them."""

from partita.attention.forms import (
    LOG_FORM_COLUMNS,
    indexed_cross,
    indexed_self,
    literal_layers,
    log_cross,
    log_self,
    token_mixing,
)
from partita.attention.grid_head import GridHead
from partita.attention.head import DotProductAttention, FoldedHead
from partita.attention.layers import CrossAttention, CrossNetwork, LinearSum, SelfAttention, SelfNetwork
from partita.attention.ramp_head import RampHead
from partita.attention.scattered_head import ScatteredHead
from partita.attention.scores import AffineScores
from partita.attention.tokenwise import tokenwise_layers
from partita.attention.train_head import TrainHead

__all__ = [
    "LOG_FORM_COLUMNS",
    "AffineScores",
    "CrossAttention",
    "CrossNetwork",
    "DotProductAttention",
    "FoldedHead",
    "GridHead",
    "LinearSum",
    "RampHead",
    "ScatteredHead",
    "SelfAttention",
    "SelfNetwork",
    "TrainHead",
    "indexed_cross",
    "indexed_self",
    "literal_layers",
    "log_cross",
    "log_self",
    "token_mixing",
    "tokenwise_layers",
]
