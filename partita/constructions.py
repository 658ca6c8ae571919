"""Deprecated name of `partita.papers` and `partita.ramps` and `partita.proofs`; see `partita/moved.py`."""

from partita.moved import forward

__getattr__ = forward("partita.constructions", "partita.papers", "partita.ramps", "partita.proofs")
