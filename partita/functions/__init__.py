"""The functions to be approximated: read from text, sympy or torch into expression graphs, with proved bounds on their slopes."""

from partita.functions.derivatives import LipschitzBounds, lipschitz_bounds
from partita.functions.expressions import parse
from partita.functions.graph import Graph

__all__ = ["Graph", "LipschitzBounds", "lipschitz_bounds", "parse"]
