"""Deprecated name of `partita.reproduction`; see `partita/moved.py`."""

from partita.moved import forward

__getattr__ = forward("partita.experiments", "partita.reproduction")
