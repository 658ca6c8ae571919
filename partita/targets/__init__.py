"""What is to be approximated: functions as expression graphs, and what is proved of them."""

from partita.targets.derivatives import LipschitzBounds, lipschitz_bounds
from partita.targets.expressions import parse
from partita.targets.graph import Graph

__all__ = ["Graph", "LipschitzBounds", "lipschitz_bounds", "parse"]
