"""From a function and a tolerance to a head: plan, build, and what comes back."""

from partita.compiler.compile import build, compile
from partita.compiler.compiled import Compiled
from partita.compiler.plan import Plan, plan

__all__ = ["Compiled", "Plan", "build", "compile", "plan"]
