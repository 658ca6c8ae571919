"""What a task is about, as a hash: arrays by their bytes, functions by their code, objects by what they hold."""

from __future__ import annotations

import functools
import hashlib
import inspect
import site
import struct
import sys
import sysconfig
from collections.abc import Iterable, Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import cache
from pathlib import Path
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import scipy

__all__ = ["Uncertain", "content_of", "keyed", "library_content"]

_KEY = "checkpoint_key"  # attribute of a function by which its author names its content
_BYTES = 32


class Uncertain(Exception):
    """The content of an object cannot be read: the message says of which."""


def content_of(*values: Any) -> bytes:
    """32 bytes that are the same for the same content, in this process and in later ones.

    Numbers, text, arrays, tensors, containers and dataclasses count by value. A Python function counts by its code, its
    defaults, the variables that it closes over, and the functions and values that it uses from its module. Files and services
    that it reads are not seen. An attribute `checkpoint_key` of a function stands for all of its content.

    Raises:
        Uncertain: an object has no content that can be read.

    >>> content_of(1.5, "a") == content_of(1.5, "a"), content_of(1.5) == content_of(1)
    (True, False)
    >>> content_of(lambda z: z + 1) == content_of(lambda z: z + 1), content_of(lambda z: z + 1) == content_of(lambda z: z + 2)
    (True, False)
    """
    return _Reader().read(values)


def keyed(function: Any) -> bytes:
    """The content of a user's function, as checkpoints know it."""
    return content_of("function", function)


@cache
def library_content() -> bytes:
    """The content of partita's own code and of the numpy and scipy that it runs on: results of other code are not used again."""
    hashed = hashlib.blake2b(f"{np.__version__} {scipy.__version__}".encode(), digest_size=_BYTES)
    for path in sorted(Path(__file__).parent.parent.rglob("*.py")):
        hashed.update(path.read_bytes())
    return hashed.digest()


class _Reader:
    """One walk through an object. Objects that contain themselves are named by their place in the walk."""

    def __init__(self) -> None:
        self.open: dict[int, int] = {}

    def read(self, value: Any) -> bytes:
        place = self.open.get(id(value))
        if place is not None:
            return self._of("again", place)
        self.open[id(value)] = len(self.open)
        try:
            return self._content(value)
        finally:
            del self.open[id(value)]

    def _of(self, kind: str, *parts: Any) -> bytes:
        """The hash of plain parts and of hashes."""
        hashed = hashlib.blake2b(kind.encode(), digest_size=_BYTES)
        for part in parts:
            data = part if isinstance(part, (bytes, memoryview)) else repr(part).encode()
            hashed.update(struct.pack("<q", data.nbytes if isinstance(data, memoryview) else len(data)))
            hashed.update(data)
        return hashed.digest()

    def _all(self, kind: str, values: Iterable[Any]) -> bytes:
        return self._of(kind, *map(self.read, values))

    def _mapping(self, kind: str, given: Mapping[Any, Any]) -> bytes:
        pairs = sorted((self.read(k), self.read(v)) for k, v in given.items())
        return self._of(kind, *(part for pair in pairs for part in pair))

    def _content(self, value: Any) -> bytes:
        if isinstance(value, Enum) or value is None or type(value) in (bool, int, str, complex):
            return self._of(type(value).__qualname__, value)
        if type(value) is float:
            return self._of("float", value.hex())
        if isinstance(value, (bytes, bytearray)):
            return self._of("bytes", bytes(value))
        if isinstance(value, np.generic):
            return self._of("scalar", value.dtype.str, value.tobytes())
        if isinstance(value, np.ndarray) and not value.dtype.hasobject:
            array = np.ascontiguousarray(value)
            return self._of("array", value.dtype.str, value.shape, array.reshape(-1).view(np.uint8).data)
        if isinstance(value, (tuple, list)):
            return self._all(type(value).__qualname__, value)
        if isinstance(value, Mapping):
            return self._mapping("mapping", value)
        if isinstance(value, (set, frozenset)):
            return self._of("set", *sorted(map(self.read, value)))
        if isinstance(value, ModuleType):
            return self._module(value)
        if (own := getattr(value, _KEY, None)) is not None:
            return self._of(_KEY, str(own))
        return self._object(value)

    def _object(self, value: Any) -> bytes:
        """Functions, tensors, classes and instances."""
        if isinstance(value, functools.partial):
            return self._all("partial", (value.func, value.args, value.keywords))
        if isinstance(value, MethodType):
            return self._all("method", (value.__func__, value.__self__))
        for name in ("py_func", "pyfunc", "__wrapped__"):  # numba, np.vectorize, functools
            if callable(inner := getattr(value, name, None)) and not isinstance(value, type):
                return self._of("wrapped", self.read(inner))
        if isinstance(value, FunctionType):
            return self._function(value)
        if isinstance(value, np.ufunc) or inspect.isbuiltin(value) or inspect.ismethoddescriptor(value):
            return self._of("builtin", getattr(value, "__module__", ""), getattr(value, "__qualname__", repr(value)))
        if hasattr(value, "detach") and hasattr(value, "numpy"):  # a tensor; torch need not be loaded to say so
            plain = value.detach().cpu().contiguous()
            return self._of("tensor", str(value.dtype), tuple(value.shape), self.read(_tensor_bytes(plain)))
        if isinstance(value, type):
            return self._class(value)
        if is_dataclass(value):
            return self._of(
                "dataclass", _named(type(value)), *(self.read(getattr(value, f.name)) for f in fields(value))
            )
        return self._instance(value)

    def _instance(self, value: Any) -> bytes:
        """An object by its class and by what a copy of it would hold."""
        try:
            made, given, *rest = value.__reduce_ex__(4)  # how a copy is made; nothing is made here
            listed = [list(part) for part in rest[1:3] if part is not None]
        except Exception:
            raise Uncertain(f"a {_named(type(value))}") from None
        return self._of("copied", self._class(type(value)), self.read((made, given, rest[:1], listed)))

    def _class(self, cls: type) -> bytes:
        """A class by its name and, for the user's own classes, by the code of its methods."""
        methods = []
        for base in cls.__mro__:
            if _is_installed(sys.modules.get(base.__module__)):
                continue
            own = (
                member.__func__ if isinstance(member, (staticmethod, classmethod)) else member
                for member in vars(base).values()
            )
            methods += [self.read(m) for m in own if isinstance(m, FunctionType)]
        return self._of("class", _named(cls), *methods)

    def _function(self, function: FunctionType) -> bytes:
        cells = [_cell(cell) for cell in function.__closure__ or ()]
        seen = [self._code(function.__code__), self.read(function.__defaults__), self.read(function.__kwdefaults__)]
        seen += map(self.read, cells)
        if _is_installed(sys.modules.get(function.__module__ or "")):
            return self._of(
                "installed", function.__module__, function.__qualname__, _version(function.__module__), *seen
            )
        used = {n: function.__globals__[n] for n in sorted(_names(function.__code__)) if n in function.__globals__}
        return self._of("def", *seen, *(self._used(n, v) for n, v in used.items()))

    def _used(self, name: str, value: Any) -> bytes:
        """A global that a function uses; of what cannot be read, such as an open connection, the kind."""
        try:
            return self._of("global", name, self.read(value))
        except Uncertain as problem:
            return self._of("global", name, str(problem))

    def _code(self, code: CodeType) -> bytes:
        constants = [self._code(c) if isinstance(c, CodeType) else self.read(c) for c in code.co_consts]
        return self._of("code", code.co_code, code.co_names, code.co_varnames, code.co_argcount, *constants)

    def _module(self, module: ModuleType) -> bytes:
        """Installed modules by name and version, the user's own by the text of their file."""
        file = getattr(module, "__file__", None)
        if _is_installed(module) or file is None:
            return self._of("module", module.__name__, _version(module.__name__))
        try:
            return self._of("module file", module.__name__, Path(file).read_bytes())
        except OSError:
            return self._of("module", module.__name__)


def _names(code: CodeType) -> set[str]:
    """The global names that a function and the functions inside it may use."""
    inner = [c for c in code.co_consts if isinstance(c, CodeType)]
    return set(code.co_names).union(*map(_names, inner))


def _cell(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not filled yet
        return None


def _named(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def _tensor_bytes(tensor: Any) -> Any:
    import torch

    return tensor.reshape(-1).view(torch.uint8).numpy() if tensor.numel() else np.zeros(0, np.uint8)


def _version(module: str) -> str:
    return str(getattr(sys.modules.get(module.partition(".")[0]), "__version__", ""))


@cache
def _installed_places() -> tuple[str, ...]:
    named = (sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib"))
    return tuple({p for p in (*named, *site.getsitepackages(), site.getusersitepackages()) if p})


def _is_installed(module: ModuleType | None) -> bool:
    """Whether a module belongs to Python, to an installed package or to partita, rather than to the user."""
    if module is None:
        return False
    file = getattr(module, "__file__", None)
    if module.__name__.partition(".")[0] == "partita" or (file is None and module.__name__ != "__main__"):
        return True
    return file is not None and file.startswith(_installed_places())
