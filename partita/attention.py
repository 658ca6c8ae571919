"""Deprecated name of `partita.heads` and `partita.ramps`; see `partita/moved.py`."""

from partita.moved import forward

__getattr__ = forward("partita.attention", "partita.heads", "partita.ramps")
