"""From a function and a tolerance to a head: plan, build, and what comes back."""

from partita.compiler.attack import Attack, attack
from partita.compiler.compile import build, compile
from partita.compiler.compiled import Compiled, load
from partita.compiler.plan import plan
from partita.compiler.planned import Plan
from partita.compiler.recheck import Check, recheck

__all__ = ["Attack", "Check", "Compiled", "Plan", "attack", "build", "compile", "load", "plan", "recheck"]
