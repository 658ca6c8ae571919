"""Deprecated name of `partita.functions`; see `partita/moved.py`."""

from partita.moved import forward

__getattr__ = forward("partita.targets", "partita.functions")
