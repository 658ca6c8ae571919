"""The experiments of both papers as named, seeded runs that return tables; nothing is drawn here."""

from partita.experiments.experiment import SIZES, Experiment, Setup, Verdict
from partita.experiments.registry import EXPERIMENTS, find_experiment
from partita.experiments.results import Finished, read_finished
from partita.experiments.running import Order, run_experiment
from partita.experiments.table import Table, Tables

__all__ = [
    "EXPERIMENTS",
    "SIZES",
    "Experiment",
    "Finished",
    "Order",
    "Setup",
    "Table",
    "Tables",
    "Verdict",
    "find_experiment",
    "read_finished",
    "run_experiment",
]
