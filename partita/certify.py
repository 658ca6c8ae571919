"""Deprecated name of `partita.proofs` and `partita.functions.regularity`; see `partita/moved.py`."""

from partita.moved import forward

__getattr__ = forward("partita.certify", "partita.proofs", "partita.functions.regularity")
