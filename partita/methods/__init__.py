"""One method, one class, one file: each turns a function, a domain and a tolerance into a head with a certificate.

A new method is a file here and a line in METHODS; `auto` then considers it, and tests/test_method_laws.py tests it.
"""

from partita.methods.adaptive import Adaptive
from partita.methods.affine import Affine
from partita.methods.averaged import Corrected, Tuned
from partita.methods.convex import Convex
from partita.methods.cover import BallCover
from partita.methods.fitted import Fitted
from partita.methods.hard import Hard
from partita.methods.lines import Lines
from partita.methods.method import Method, Plan, Refusal, Size
from partita.methods.paper import Paper, cells_in_paper_order
from partita.methods.pieces import Pieces
from partita.methods.request import Request
from partita.methods.sampled_sums import SampledSums
from partita.methods.structured import Heads, Layers
from partita.methods.tangents import Tangents
from partita.methods.train import Train
from partita.methods.two_keys import TwoKeys

__all__ = ["METHODS", "Method", "Plan", "Refusal", "Request", "Size", "cells_in_paper_order"]

# in the order in which "auto" tries them: later ones may be spared by what earlier ones found
METHODS: list[Method] = [
    Pieces(),
    TwoKeys(),
    Lines(),
    Fitted(),
    Hard(),
    BallCover(),
    Affine(),
    Tangents(),
    Convex(),
    Adaptive(),
    Heads(),
    SampledSums(),
    Layers(),
    Tuned(),
    Corrected(),
    Train(),
    Paper(),
]
