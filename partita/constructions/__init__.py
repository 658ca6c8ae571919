"""One theorem, one function: each returns a head, its partition and its certificate."""

from partita.constructions.affine_grid import AffineRecipe, affine_grid
from partita.constructions.construction import Construction, Progress
from partita.constructions.cross_attention import cross_attention
from partita.constructions.indicator import indicator
from partita.constructions.on_grid import GridRecipe
from partita.constructions.piecewise_affine import PiecesRecipe, piecewise_affine
from partita.constructions.ramp import Ramp, ramp
from partita.constructions.ramp_layers import RampLayers, ramp_layers
from partita.constructions.reassignment import reassignment, reassignment_layers
from partita.constructions.self_attention import self_attention
from partita.constructions.small_domain import CoverRecipe, small_domain
from partita.constructions.soft_grid import SoftRecipe, soft_grid
from partita.constructions.tensor_train import TrainRecipe, fit_train, tensor_train
from partita.constructions.two_keys import max_affine_head, relu_head, sigmoid_head, silu_head, tanh_head

__all__ = [
    "AffineRecipe",
    "Construction",
    "CoverRecipe",
    "GridRecipe",
    "PiecesRecipe",
    "Progress",
    "Ramp",
    "RampLayers",
    "SoftRecipe",
    "TrainRecipe",
    "affine_grid",
    "cross_attention",
    "fit_train",
    "indicator",
    "max_affine_head",
    "piecewise_affine",
    "ramp",
    "ramp_layers",
    "reassignment",
    "reassignment_layers",
    "relu_head",
    "self_attention",
    "sigmoid_head",
    "silu_head",
    "small_domain",
    "soft_grid",
    "tanh_head",
    "tensor_train",
]
