"""The experiments of both papers as named, seeded runs that return tables; nothing is drawn here."""

from partita.reproduction.experiment import SIZES, Experiment, Setup, Verdict
from partita.reproduction.registry import EXPERIMENTS, find_experiment
from partita.reproduction.results import Finished, read_finished
from partita.reproduction.runs import Order, run_experiment
from partita.reproduction.table import Table, Tables

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
