"""The table of docs/methods.md that sets Yun et al.'s layers beside the keys of one attention layer."""

from __future__ import annotations

import importlib.util
import itertools
import math
import sys
from functools import cache
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

import partita as pa
from partita.functions.target import make_target

ROOT = Path(__file__).parent.parent


@cache
def benchmark() -> ModuleType:
    spec = importlib.util.spec_from_file_location("layer_counts", ROOT / "benchmarks" / "layer_counts.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look it up
    spec.loader.exec_module(module)
    return module


def table() -> list[str]:
    page = (ROOT / "docs" / "methods.md").read_text(encoding="utf-8")
    return page.split("<!-- rows of: python benchmarks/layer_counts.py -->\n")[1].split("\n\n")[0].splitlines()


def test_the_table_has_a_row_per_case():
    header, _, *rows = table()
    assert header == benchmark().HEADER and len(rows) == len(benchmark().CASES) and header.count("|") == 14


@pytest.mark.parametrize("index", range(5))
def test_the_rows_are_what_the_script_prints(index):
    assert table()[2:][index] == benchmark().row(*benchmark().CASES[index])


def test_another_tolerance_is_another_row():
    """Control."""
    assert table()[2] != benchmark().row(1, 2, 0.15)


@pytest.mark.parametrize("dim, tokens, cells", [(1, 2, 4), (1, 3, 5), (2, 2, 3)])
def test_the_value_layers_are_one_per_cell_and_token(dim, tokens, cells):
    """Lemma 7 needs a layer for every token of every grid point, points that permute each other counted once."""
    columns = list(itertools.product(range(cells), repeat=dim))
    distinct = math.comb(len(columns), tokens)  # sequences of different tokens, up to their order
    everything = len(list(itertools.product(columns, repeat=tokens)))
    equivariant, general = (benchmark().deep_count(dim, tokens, cells, equivariant=e) for e in (True, False))
    rounding = dim * cells + dim
    assert general.feed_forward - rounding == tokens * everything
    assert tokens * distinct <= equivariant.feed_forward - rounding <= tokens * everything
    assert equivariant.attention == len(columns) + 1 and general.attention == tokens * len(columns) + 1
    assert general.numbers == general.attention * 8 * dim + general.feed_forward * (9 * dim + 4)


@pytest.mark.parametrize("dim, tokens", [(1, 2), (2, 2)])
def test_the_function_of_the_table_is_as_it_is_said_to_be(dim, tokens):
    """Equivariant, and moving by at most |X − Y|_∞: refuted for 0.9 of that."""
    f = make_target(benchmark().function(dim, tokens), pa.Box.sequence(0, 1, tokens=tokens, dim=dim))
    rng = np.random.default_rng(0)
    x = rng.random((400, tokens, dim))
    assert np.allclose(f(x[:, ::-1].reshape(400, -1)), f(x.reshape(400, -1)))
    y = np.clip(x + 0.01 * np.sign(rng.random((400, 1, 1)) - 0.5), 0, 1)
    moved = np.abs(f(x.reshape(400, -1)) - f(y.reshape(400, -1))).max(axis=1)
    slopes = moved / np.abs(x - y).max(axis=(1, 2))
    assert 0.9 < slopes.max() <= 1


def test_the_paper_and_yun_store_one_thing_per_cell():
    """What the page concludes: keys of `paper` and layers for any f have the same order, hard and auto far fewer."""
    for case in benchmark().CASES:
        found = benchmark().figures(*case)
        cells = (3 / found["epsilon"]) ** (found["d"] * found["n"])
        assert cells <= found["paper_keys"] <= 1.5 * cells
        assert found["n"] * cells <= found["layers"] <= 1.1 * found["n"] * cells
        assert found["paper_keys"] > 20 * found["hard_keys"] and found["hard_keys"] > 4 * found["auto_keys"]
