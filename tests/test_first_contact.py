"""First contact: what is loaded when, and that kernels are compiled only when they are worth it."""

import json
import subprocess
import sys
from importlib import import_module

import numpy as np
import pytest
import torch

import partita as pa
from partita.heads import GridHead
from partita.kernels import grid_torch, native
from partita.kernels.grid_operator import runs_natively

HEAVY = ["torch", "numpy", "scipy", "rich.progress"]
NOT_FOR_COMPILE = ["numba", "sklearn", "matplotlib", "sympy", "onnx", "partita.inspection"]


def loaded(code: str, modules: list[str]) -> list[str]:
    """Which of the modules a fresh Python holds after running the code."""
    told = f"{code}\nimport json, sys\nprint(json.dumps([m for m in {modules!r} if m in sys.modules]))"
    answer = subprocess.run([sys.executable, "-c", told], capture_output=True, text=True, check=True)
    return json.loads(answer.stdout.splitlines()[-1])


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], []], ids=str)
def test_help_and_version_load_neither_torch_nor_numpy(arguments):
    code = f"from partita.cli import main\ntry:\n    main({arguments!r})\nexcept SystemExit:\n    pass"
    assert loaded(code, HEAVY) == []


def test_compile_loads_what_it_needs():
    code = "import partita as pa\npa.compile('sin(3*x)', pa.Box([-1], [1]), tolerance=0.1)([[0.5]])"
    assert loaded(code, ["torch", *NOT_FOR_COMPILE]) == ["torch"]


def test_public_names_are_those_that_type_checkers_see():
    """`__all__`, the homes of the lazy names and the imports under TYPE_CHECKING say the same."""
    lazy = [*pa._MODULES, *(name for names in pa._HOMES.values() for name in names)]
    assert sorted(lazy) == sorted(pa.__all__) == sorted({*pa.__all__})
    for module, names in pa._HOMES.items():
        assert all(getattr(pa, name) is getattr(import_module(module), name) for name in names)
    assert set(pa.__all__) <= set(dir(pa))
    with pytest.raises(AttributeError, match="no attribute 'compose'"):
        pa.compose  # noqa: B018


def head_of(counts: tuple[int, ...]) -> GridHead:
    box = pa.Box([-1] * len(counts), [1] * len(counts))
    values = torch.linspace(0, 1, int(np.prod(counts)), dtype=torch.float64)[:, None]
    rates = 64 / (2 / np.array(counts)) ** 2
    grid = pa.ProductGrid.uniform(box, counts)
    return GridHead(grid, rates, values, half_windows=1, input_shapes=((len(counts),),), output_shape=())


needs_numba = pytest.mark.skipif(not native.AVAILABLE, reason="needs numba")


@needs_numba
def test_small_batches_go_through_torch_and_large_ones_do_not():
    assert not native.worth_it(2048, 4) and not native.worth_it(16_388, 300)
    assert native.worth_it(100_000, 2) and native.worth_it(4096, 1 << 12)
    head, z = head_of((40, 50)), torch.rand(40_000, 2, dtype=torch.float64)
    assert runs_natively(z, head.operands) and not runs_natively(z[:2048], head.operands)


@needs_numba
def test_what_a_batch_gives_does_not_depend_on_what_was_computed_before():
    head, z = head_of((40, 50)), torch.rand(40_000, 2, generator=torch.Generator().manual_seed(0)).double()
    before = head.evaluate(z[:500])
    large = head.evaluate(z)
    assert torch.equal(head.evaluate(z[:500]), before) and torch.allclose(large[:500], before, rtol=0, atol=1e-14)


@needs_numba
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_threads_share_the_queries(threads, monkeypatch):
    head, z = head_of((40, 50)), torch.rand(40_001, 2, generator=torch.Generator().manual_seed(1)).double()
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    expected = torch.cat([grid_torch.grid_sum(part, head.operands) for part in z.split(10_000)])
    assert torch.allclose(head.evaluate(z), expected, rtol=0, atol=1e-14)


@needs_numba
def test_compiling_is_announced_once_and_loading_is_not(capsys):
    from numba import njit

    with native._announced():
        pass
    assert capsys.readouterr().err == ""
    with native._announced():
        njit(lambda x: x + 1)(1)
        njit(lambda x: x + 2)(1)
    told = capsys.readouterr()
    assert told.err.count("compiling native kernels (once, about") == 1 and told.out == ""


@needs_numba
def test_places_that_cannot_be_written_are_no_error(monkeypatch, capsys):
    from numba import njit

    from partita.kernels import native_code

    def refuse(**options):
        raise RuntimeError("cannot cache function: no locator available")

    assert native_code._can_be_cached()
    monkeypatch.setattr(native_code, "njit", refuse)
    assert not native_code._can_be_cached()
    monkeypatch.setattr(native_code, "CACHED", False)
    with native._announced():
        njit(lambda x: x + 3)(1)
    assert "NUMBA_CACHE_DIR" in capsys.readouterr().err
