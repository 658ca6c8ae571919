"""Outward rounding, intervals, slopes and Taylor models over boxes; knows nothing about attention."""

from partita.arithmetic.dual import Dual
from partita.arithmetic.interval import Interval
from partita.arithmetic.polynomial import Basis
from partita.arithmetic.taylor import TaylorModel, TaylorModels

__all__ = ["Basis", "Dual", "Interval", "TaylorModel", "TaylorModels"]
