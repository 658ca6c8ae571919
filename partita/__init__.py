"""partita: functions compiled into single attention layers, with proved error bounds, and attention read as geometry.

Public names are imported when they are first used: `import partita` alone loads neither torch nor numpy.

>>> import partita as pa
>>> c = pa.compile("sin(3*x0) + x0*cos(2*x1)", pa.Box([-1, -1], [1, 1]), tolerance=0.1)
>>> c.certificate.kind
'proved'
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # what type checkers and editors see; `_HOMES` says the same to Python
    from partita import inspection as inspect
    from partita.compiler import in_context
    from partita.compiler.attack import attack
    from partita.compiler.chosen_head import head
    from partita.compiler.compile import build, compile, plan
    from partita.compiler.compiled import Compiled, load
    from partita.compiler.recheck import recheck
    from partita.errors import PartitaError
    from partita.functions.moduli import Modulus
    from partita.functions.regions import Ball, Polytope, Region, Simplex
    from partita.functions.regularity import Jumps
    from partita.functions.samples import Table
    from partita.functions.target import Tail
    from partita.geometry import Box, MaxAffine, PointCloud, PowerDiagram, ProductGrid
    from partita.kernels.attention import attend
    from partita.kernels.key_index import KeyIndex
    from partita.kernels.skipped_blocks import attend_blocks
    from partita.methods import Plan
    from partita.networks import attention_from_mlp

__version__ = "0.3.0"

__all__ = [
    "Ball",
    "Box",
    "Compiled",
    "Jumps",
    "KeyIndex",
    "MaxAffine",
    "Modulus",
    "PartitaError",
    "Plan",
    "PointCloud",
    "Polytope",
    "PowerDiagram",
    "ProductGrid",
    "Region",
    "Simplex",
    "Table",
    "Tail",
    "attack",
    "attend",
    "attend_blocks",
    "attention_from_mlp",
    "build",
    "compile",
    "head",
    "in_context",
    "inspect",
    "load",
    "plan",
    "recheck",
]

_HOMES = {
    "partita.compiler.attack": ("attack",),
    "partita.compiler.chosen_head": ("head",),
    "partita.compiler.compile": ("build", "compile", "plan"),
    "partita.compiler.compiled": ("Compiled", "load"),
    "partita.compiler.recheck": ("recheck",),
    "partita.errors": ("PartitaError",),
    "partita.functions.moduli": ("Modulus",),
    "partita.functions.regions": ("Ball", "Polytope", "Region", "Simplex"),
    "partita.functions.regularity": ("Jumps",),
    "partita.functions.samples": ("Table",),
    "partita.functions.target": ("Tail",),
    "partita.geometry": ("Box", "MaxAffine", "PointCloud", "PowerDiagram", "ProductGrid"),
    "partita.kernels.attention": ("attend",),
    "partita.kernels.key_index": ("KeyIndex",),
    "partita.kernels.skipped_blocks": ("attend_blocks",),
    "partita.methods": ("Plan",),
    "partita.networks": ("attention_from_mlp",),
}
_MODULES = {"in_context": "partita.compiler.in_context", "inspect": "partita.inspection"}
# rooms that are reached by their own names
_ROOMS = {"distributed": "partita.distributed", "learn": "partita.learn", "plots": "partita.plots"}


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used (PEP 562)."""
    if name in _MODULES or name in _ROOMS:
        found: Any = import_module({**_MODULES, **_ROOMS}[name])
    else:
        home = next((module for module, names in _HOMES.items() if name in names), None)
        if home is None:
            raise AttributeError(f"module 'partita' has no attribute {name!r}")
        import_module(
            "partita.compiler.compile"
        )  # whichever name comes first, the compiler's rooms are loaded together
        found = getattr(import_module(home), name)
    globals()[name] = found  # looked up once
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
