"""Outward rounding, intervals and slopes over boxes; knows nothing of attention."""

from partita.arithmetic.dual import Dual
from partita.arithmetic.interval import Interval

__all__ = ["Dual", "Interval"]
