"""Attention heads of trained models, read back as the partitions they make. Public as `pa.inspect`.

with pa.inspect.capture(model) as heads:
    model(inputs)
report = pa.inspect.read(heads)
"""

from partita.inspection.activation_names import ActivationCache, activation_cache
from partita.inspection.audited_heads import Audit, AuditedHead, audit
from partita.inspection.calibration import CalibratedHead, Calibration, calibrate, load_calibration
from partita.inspection.captured_heads import CapturedHeads, HeadRecord, capture
from partita.inspection.figures import Cell, Figures, Roles
from partita.inspection.hardening import HardenedHead, HardenReport, harden, hardened
from partita.inspection.interception import record
from partita.inspection.pattern_files import export_patterns, pattern_schema
from partita.inspection.patterns import Pattern, pattern
from partita.inspection.planes import PlaneView, view
from partita.inspection.report import HeadReport, ModelReport, read, report_schema
from partita.inspection.round_trip import CellMove, Recovered, Temperature, moves, recover, temperature
from partita.inspection.rules import DroppingRule, KeepMask, Quantized, Rule, SkipBlocks, TopK, Window
from partita.inspection.snapshots import Snapshot
from partita.inspection.thinned_heads import thinned
from partita.inspection.training_watch import TrainingWatch

__all__ = [
    "ActivationCache",
    "Audit",
    "AuditedHead",
    "CalibratedHead",
    "Calibration",
    "CapturedHeads",
    "Cell",
    "CellMove",
    "DroppingRule",
    "Figures",
    "HardenReport",
    "HardenedHead",
    "HeadRecord",
    "HeadReport",
    "KeepMask",
    "ModelReport",
    "Pattern",
    "PlaneView",
    "Quantized",
    "Recovered",
    "Roles",
    "Rule",
    "SkipBlocks",
    "Snapshot",
    "Temperature",
    "TopK",
    "TrainingWatch",
    "Window",
    "activation_cache",
    "audit",
    "calibrate",
    "capture",
    "export_patterns",
    "harden",
    "hardened",
    "load_calibration",
    "moves",
    "pattern",
    "pattern_schema",
    "read",
    "record",
    "recover",
    "report_schema",
    "temperature",
    "thinned",
    "view",
]
