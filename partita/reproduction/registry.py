"""All experiments, in the order of the papers."""

from __future__ import annotations

import difflib

from partita.errors import UnsupportedError
from partita.reproduction import (
    attention_maps,
    descent_runs,
    dimension,
    distribution_shift,
    explicit_weights,
    heads_and_layers,
    input_noise,
    learnability,
    noise_mechanism,
    partition,
    positions,
    ramp_heads,
    ramp_rate,
    robustness,
    small_domains,
    stability,
    step_function,
    temperature,
    two_layer_networks,
    weight_scale,
)
from partita.reproduction.experiment import Experiment

__all__ = ["EXPERIMENTS", "find_experiment"]

_FIRST = (
    partition,
    weight_scale,
    noise_mechanism,
    step_function,
    explicit_weights,
    temperature,
    input_noise,
    learnability,
    dimension,
    robustness,
    distribution_shift,
    small_domains,
    positions,
    heads_and_layers,
)
_SECOND = (ramp_rate, ramp_heads, attention_maps, two_layer_networks, stability, descent_runs)
EXPERIMENTS: dict[str, Experiment] = {module.EXPERIMENT.name: module.EXPERIMENT for module in _FIRST + _SECOND}


def find_experiment(name: str) -> Experiment:
    """The experiment of this name; the error for a misspelt name suggests the nearest."""
    if name not in EXPERIMENTS:
        near = difflib.get_close_matches(name, EXPERIMENTS, n=1)
        hint = f" Did you mean {near[0]}?" if near else ""
        raise UnsupportedError(f"there is no experiment {name!r}.{hint} The experiments are {', '.join(EXPERIMENTS)}.")
    return EXPERIMENTS[name]
