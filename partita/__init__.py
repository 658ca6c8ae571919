"""partita: functions compiled into single attention layers, with proved error bounds, and attention read as geometry.

>>> import partita as pa
>>> c = pa.compile("sin(3*x0) + x0*cos(2*x1)", pa.Box([-1, -1], [1, 1]), tolerance=0.1)
>>> c.certificate.kind
'proved'
"""

from partita import inspection as inspect
from partita.compiler.attack import attack
from partita.compiler.compile import build, compile
from partita.compiler.compiled import Compiled, load
from partita.compiler.planner import plan
from partita.compiler.recheck import recheck
from partita.errors import PartitaError
from partita.functions.regularity import Jumps, Modulus
from partita.geometry import Box, MaxAffine, PointCloud, PowerDiagram, ProductGrid
from partita.methods import Plan
from partita.networks import attention_from_mlp, in_context

__version__ = "0.2.0"

__all__ = [
    "Box",
    "Compiled",
    "Jumps",
    "MaxAffine",
    "Modulus",
    "PartitaError",
    "Plan",
    "PointCloud",
    "PowerDiagram",
    "ProductGrid",
    "attack",
    "attention_from_mlp",
    "build",
    "compile",
    "in_context",
    "inspect",
    "load",
    "plan",
    "recheck",
]
