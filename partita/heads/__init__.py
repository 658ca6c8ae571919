"""The papers' layers, the folded head that is run in practice, and the forms that connect them."""

from partita.heads.forms import (
    LOG_FORM_COLUMNS,
    indexed_cross,
    indexed_self,
    literal_layers,
    log_cross,
    log_self,
    token_mixing,
)
from partita.heads.grid_head import GridHead
from partita.heads.head import DotProductAttention, FoldedHead, Head
from partita.heads.layers import CrossAttention, CrossNetwork, LinearSum, SelfAttention, SelfNetwork
from partita.heads.network import AffineMap, AttentionLayer, AttentionNetwork, exact_values
from partita.heads.recorded import HEAD_TYPES, head_from_record
from partita.heads.scattered_head import ScatteredHead
from partita.heads.scores import AffineScores
from partita.heads.train_head import TrainHead
from partita.heads.wiring import Affine, Group, Wiring

__all__ = [
    "HEAD_TYPES",
    "LOG_FORM_COLUMNS",
    "Affine",
    "AffineMap",
    "AffineScores",
    "AttentionLayer",
    "AttentionNetwork",
    "CrossAttention",
    "CrossNetwork",
    "DotProductAttention",
    "FoldedHead",
    "GridHead",
    "Group",
    "Head",
    "LinearSum",
    "ScatteredHead",
    "SelfAttention",
    "SelfNetwork",
    "TrainHead",
    "Wiring",
    "exact_values",
    "head_from_record",
    "indexed_cross",
    "indexed_self",
    "literal_layers",
    "log_cross",
    "log_self",
    "token_mixing",
]
