"""Names of the user's own code on the command line: `MODULE:NAME` and `path/to/file.py:NAME`.

The code is imported and run, which is what the user asks for; what it raises is shown with its trace.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from partita.errors import PartitaError, TargetFailedError, UnsupportedError

__all__ = ["names_own_code", "object_named", "run_own"]

EXPECTED = "expected MODULE:FUNCTION or path/to/file.py:FUNCTION, such as 'my_models:encoder' or 'my_models.py:encoder'"


def names_own_code(text: str) -> bool:
    """Whether a command-line argument has the form `MODULE:NAME` or `path/to/file.py:NAME`. Expressions never have.

    Args:
        text: the argument.

    >>> [names_own_code(t) for t in ("my_models:encoder", "a folder/mine.py:f", "sin(x0)", "mine.py", "mine:f(x)")]
    [True, True, False, False, False]
    """
    place, _, name = text.rpartition(":")
    return name.isidentifier() and (place.endswith(".py") or all(part.isidentifier() for part in place.split(".")))


def object_named(spec: str) -> Any:
    """The object that `MODULE:NAME` or `path/to/file.py:NAME` names: a function, usually. It is imported, not called.

    Modules are searched in the current folder first. A file may import its neighbours, as under `python path/to/file.py`.

    Args:
        spec: the name.

    Raises:
        UnsupportedError: the text has another form, or the file, the module or the name in it does not exist.
        TargetFailedError: the user's code raised while it was imported.
    """
    place, _, name = spec.rpartition(":")
    if not place or not name:
        raise UnsupportedError(f"the name is {spec!r}; {EXPECTED}.")
    module = run_own(f"import {place}", lambda: _from_file(Path(place)) if place.endswith(".py") else _imported(place))
    if not hasattr(module, name):
        own = [n for n, value in vars(module).items() if getattr(value, "__module__", None) == module.__name__]
        held = f" It has {', '.join(own[:8])}{', …' if len(own) > 8 else ''}." if own else ""
        raise UnsupportedError(f"{place} has no function {name!r}.{held}")
    return getattr(module, name)


def run_own(what: str, call: Callable[[], Any]) -> Any:
    """What the user's code returns. What it raises is printed with its trace, and raised as `TargetFailedError`.

    Args:
        what: how the error names the call.
        call: the user's code.
    """
    try:
        return call()
    except PartitaError:
        raise
    except Exception as error:
        traceback.print_exc()
        raise TargetFailedError(f"{what} raised {type(error).__name__}: {error}") from None


def _imported(module: str) -> ModuleType:
    if "" not in sys.path:
        sys.path.insert(0, "")
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):  # another one, that theirs imports
            raise
        hint = f" For a file, write {module}.py:NAME." if "/" in module or Path(f"{module}.py").is_file() else ""
        raise UnsupportedError(
            f"there is no module {error.name!r}; expected a .py file here or an installed package.{hint}"
        ) from None


def _from_file(path: Path) -> ModuleType:
    path = path.expanduser().resolve()
    if not path.is_file():
        raise UnsupportedError(f"there is no file {path}; expected path/to/file.py:FUNCTION.")
    known = sys.modules.get(path.stem)
    if known is not None and (file := getattr(known, "__file__", None)) and Path(file).resolve() == path:
        return known  # a second name from the same file, or a module that it has imported
    name = path.stem if known is None else f"{path.stem} ({path})"  # torch.py must not replace torch
    if name in sys.modules:
        return sys.modules[name]
    if str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None  # the name ends in .py
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and torch look classes up there
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
