"""The Triton kernels for grids, tensor trains and ramps: their laws (`triton_laws.py`) by Triton's interpreter and on a GPU."""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent
pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")


def hold_the_laws(**settings: str) -> None:
    """In a process of its own: Triton decides at import whether kernels are compiled or interpreted."""
    environment = {**os.environ, **settings}
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", str(HERE / "triton_laws.py")]
    answer = subprocess.run(command, capture_output=True, text=True, cwd=HERE.parent, env=environment)
    assert answer.returncode == 0, answer.stdout[-4000:] + answer.stderr[-1000:]


def test_laws_hold_under_the_interpreter():
    hold_the_laws(TRITON_INTERPRET="1")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
def test_laws_hold_on_a_gpu():
    hold_the_laws(TRITON_INTERPRET="0")
