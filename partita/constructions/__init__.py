"""One theorem, one function: each returns a head, its partition and its certificate."""

from partita.constructions.construction import Construction, Progress
from partita.constructions.cross_attention import cross_attention
from partita.constructions.indicator import indicator
from partita.constructions.on_grid import GridRecipe
from partita.constructions.reassignment import reassignment, reassignment_layers
from partita.constructions.self_attention import self_attention
from partita.constructions.small_domain import CoverRecipe, small_domain

__all__ = [
    "Construction",
    "CoverRecipe",
    "GridRecipe",
    "Progress",
    "cross_attention",
    "indicator",
    "reassignment",
    "reassignment_layers",
    "self_attention",
    "small_domain",
]
