"""What is to be approximated: functions as expression graphs, and what is proved of them."""

from partita.functions.derivatives import LipschitzBounds, lipschitz_bounds
from partita.functions.expressions import parse
from partita.functions.graph import Graph

__all__ = ["Graph", "LipschitzBounds", "lipschitz_bounds", "parse"]
