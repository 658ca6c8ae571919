"""One theorem, one function: each returns a head, its partition and its certificate."""

from partita.methods.affine_grid import AffineRecipe, affine_grid
from partita.methods.affine_pieces import PiecesRecipe, piecewise_affine
from partita.methods.cover import CoverRecipe, small_domain
from partita.methods.cross_attention import cross_attention
from partita.methods.on_grid import GridRecipe
from partita.methods.self_attention import self_attention
from partita.methods.soft_grid import SoftRecipe, soft_grid
from partita.methods.train import TrainRecipe, fit_train, tensor_train
from partita.proofs.construction import Construction, Progress

__all__ = [
    "AffineRecipe",
    "Construction",
    "CoverRecipe",
    "GridRecipe",
    "PiecesRecipe",
    "Progress",
    "SoftRecipe",
    "TrainRecipe",
    "affine_grid",
    "cross_attention",
    "fit_train",
    "piecewise_affine",
    "self_attention",
    "small_domain",
    "soft_grid",
    "tensor_train",
]
