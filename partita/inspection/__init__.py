"""Attention heads of trained models, read back as the partitions they make. Public as `pa.inspect`.

with pa.inspect.capture(model) as heads:
    model(inputs)
report = pa.inspect.read(heads)
"""

from partita.inspection.captured_heads import CapturedHeads, HeadRecord, capture
from partita.inspection.figures import Cell, Figures
from partita.inspection.hardening import HardenedHead, HardenReport, harden, hardened
from partita.inspection.interception import record
from partita.inspection.planes import PlaneView, view
from partita.inspection.report import HeadReport, ModelReport, read
from partita.inspection.round_trip import CellMove, Recovered, Temperature, moves, recover, temperature
from partita.inspection.snapshots import Snapshot

__all__ = [
    "CapturedHeads",
    "Cell",
    "CellMove",
    "Figures",
    "HardenReport",
    "HardenedHead",
    "HeadRecord",
    "HeadReport",
    "ModelReport",
    "PlaneView",
    "Recovered",
    "Snapshot",
    "Temperature",
    "capture",
    "harden",
    "hardened",
    "moves",
    "read",
    "record",
    "recover",
    "temperature",
    "view",
]
