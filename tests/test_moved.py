"""Rooms that were renamed answer under their old names, with a warning that says where things are now."""

from __future__ import annotations

import importlib

import pytest

MOVED = {
    "attention": ["GridHead", "ScatteredHead", "RampHead"],
    "certify": ["Certificate", "Known", "Term"],
    "constructions": ["indicator", "reassignment", "ramp", "relu_head"],
    "experiments": ["EXPERIMENTS"],
    "networks": ["multi_head_ramp", "two_layers"],
    "targets": ["parse", "lipschitz_bounds"],
}


@pytest.mark.parametrize(("room", "name"), [(room, name) for room, names in MOVED.items() for name in names])
def test_old_names_work_and_warn(room: str, name: str) -> None:
    module = importlib.import_module(f"partita.{room}")
    with pytest.warns(DeprecationWarning, match=rf"partita\.{room}\.{name} is now partita\."):
        assert getattr(module, name) is not None


def test_names_that_never_were_are_errors() -> None:
    with pytest.raises(AttributeError, match="look in"):
        importlib.import_module("partita.attention").Magic  # noqa: B018
