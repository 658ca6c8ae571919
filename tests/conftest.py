"""One thread per test process: `make test` runs two of them, and threads that wait for each other take most of the time."""

import gc
import os
from importlib.util import find_spec
from typing import Any

for library in ("OMP", "MKL", "OPENBLAS", "NUMBA"):  # before torch and numpy are imported; children inherit it
    os.environ.setdefault(f"{library}_NUM_THREADS", "1")

from browser_harness import INSTALL, browser, chromium, open_page, screenshots, static_page, studio_server  # noqa: E402, F401

collect_ignore = ["conftest.py"]  # the checker has one too, and doctest imports both under one name
if find_spec("triton") is None:
    collect_ignore.append("triton_laws.py")  # which `test_grid_triton.py` runs in a process of its own


def pytest_collection_finish() -> None:
    """A million objects of torch and sympy are there to stay; looking through them again and again takes 5 % of the time."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 50)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """What is skipped for want of a browser is easily overlooked."""
    if chromium() is None or find_spec("playwright") is None:
        terminalreporter.write_line(f"The tests in a browser were skipped: {INSTALL}.", yellow=True)
