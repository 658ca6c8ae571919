"""A folder that keeps the results of tasks, so that work which was stopped can go on where it was.

Every process appends to a file of its own, so processes that share a folder cannot damage each other's records. A record is a key,
which says what was computed, and a result; a hash of both is checked whenever a record is read. What a killed process left of its
last record is ignored.
"""

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
import secrets
import struct
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from partita.errors import CheckpointError

__all__ = ["Checkpoint", "pack", "unpack"]

_SUFFIX = ".records"
_START = b"ptr1"
_HEAD = struct.Struct("<4s32sQ16s")  # start, key, length of the result, hash of key and result
_KINDS = "fiub"  # of numpy arrays
_SYNCED = 1.0  # seconds between two calls that wait for the disk


@dataclass(frozen=True)
class _Place:
    """Where a result lies."""

    path: Path
    start: int
    length: int
    check: bytes


class Checkpoint:
    """Results by key, in a folder. Several results may have one key: they stay in the order in which they were written.

    Args:
        folder: created if it is missing.

    Raises:
        CheckpointError: the folder cannot be used, or a file in it is damaged.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            files = sorted(p for p in self.folder.iterdir() if p.suffix == _SUFFIX)
            probe = self.folder / f".{secrets.token_hex(8)}"
            probe.touch()
            probe.unlink()
        except OSError as error:
            raise CheckpointError(
                f"the checkpoint folder {self.folder} cannot be used: {error.strerror or error}",
                "Give the name of a folder that this process may write to.",
            ) from None
        self._places: dict[bytes, list[_Place]] = {}
        self._file: int | None = None
        self._size, self._synced, self._lock = 0, time.monotonic(), threading.Lock()
        for path in files:
            for key, place in _records(path):
                self._places.setdefault(key, []).append(place)

    def __contains__(self, key: bytes) -> bool:
        return key in self._places

    def results(self, key: bytes) -> Iterator[Any]:
        """All results of this key, the first that was written first.

        Raises:
            CheckpointError: a record is damaged.
        """
        for place in self._places.get(key, ()):
            yield unpack(_read(place, key))

    def append(self, key: bytes, result: Any) -> None:
        """Keep a result: None, numbers, text and arrays, and tuples, lists and dicts of them.

        Raises:
            CheckpointError: the disk is full, or the folder is gone.
        """
        data = pack(result)
        record = _HEAD.pack(_START, key, len(data), _check(key, data)) + data
        with self._lock:
            try:
                self._write(record)
            except OSError as error:
                full = error.errno in (errno.ENOSPC, errno.EDQUOT)
                said = "is on a full disk" if full else f"cannot be written: {error.strerror or error}"
                raise CheckpointError(
                    f"the checkpoint folder {self.folder} {said}; what was stored before is kept",
                    f"{'Free some space' if full else 'Make it writable'} and start again: the work goes on where it stopped.",
                ) from None
            place = _Place(self._path, self._size - len(data), len(data), record[_HEAD.size - 16 : _HEAD.size])
            self._places.setdefault(key, []).append(place)

    def close(self) -> None:
        """Close the file of this process. A later append opens another one."""
        with self._lock:
            if self._file is not None:
                os.close(self._file)
                self._file = None

    def _write(self, record: bytes) -> None:
        """One record, whole or not at all as far as this process can see to that."""
        if self._file is None:
            name = f"{time.time_ns():020d}-{os.getpid()}-{secrets.token_hex(4)}{_SUFFIX}"
            self._path = self.folder / name
            self._file = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o644)
            self._size = 0
        try:
            done = 0
            while done < len(record):
                done += os.write(self._file, record[done:])
            if time.monotonic() - self._synced > _SYNCED:
                os.fsync(self._file)
                self._synced = time.monotonic()
        except OSError:
            os.ftruncate(self._file, self._size)
            raise
        self._size += len(record)


def _records(path: Path) -> Iterator[tuple[bytes, _Place]]:
    """The keys and places of a file. What follows the last whole record was being written when its process died."""
    try:
        with open(path, "rb") as file:
            size, start = os.fstat(file.fileno()).st_size, 0
            while start + _HEAD.size <= size:
                file.seek(start)
                mark, key, length, check = _HEAD.unpack(file.read(_HEAD.size))
                if mark != _START:
                    raise _damaged(path, start)
                start += _HEAD.size
                if start + length > size:
                    return
                yield key, _Place(path, start, length, check)
                start += length
    except OSError as error:
        raise CheckpointError(f"the checkpoint file {path} cannot be read: {error.strerror or error}.") from None


def _read(place: _Place, key: bytes) -> bytes:
    try:
        with open(place.path, "rb") as file:
            file.seek(place.start)
            data = file.read(place.length)
    except OSError as error:
        raise CheckpointError(f"the checkpoint file {place.path} cannot be read: {error.strerror or error}.") from None
    if _check(key, data) != place.check:
        raise _damaged(place.path, place.start)
    return data


def _check(key: bytes, data: bytes) -> bytes:
    return hashlib.blake2b(key + data, digest_size=16).digest()


def _damaged(path: Path, start: int) -> CheckpointError:
    return CheckpointError(
        f"the checkpoint file {path} is damaged at byte {start:,}",
        "Delete that file: what it holds is then computed again.",
    )


# --- results as bytes ------------------------------------------------------------------------------------------------


def pack(value: Any) -> bytes:
    """A result as bytes: a length, a JSON text, and the arrays that it mentions. Nothing in it is ever executed.

    >>> unpack(pack((1, 2.5, None, [True, "a"], {"x": np.arange(3)})))
    (1, 2.5, None, [True, 'a'], {'x': array([0, 1, 2])})
    """
    blocks: list[bytes] = []
    text = json.dumps(_plain(value, blocks), separators=(",", ":")).encode()
    return struct.pack("<Q", len(text)) + text + b"".join(blocks)


def _plain(value: Any, blocks: list[bytes]) -> Any:
    if value is None or isinstance(value, (bool, str)) or type(value) is int:
        return value
    if isinstance(value, float):
        return {"float": float(value).hex()}
    if isinstance(value, np.integer):
        return int(value)
    if isinstance(value, np.bool_):
        return bool(value)
    if isinstance(value, np.ndarray) and value.dtype.kind in _KINDS:
        start = sum(map(len, blocks))
        blocks.append(np.ascontiguousarray(value).tobytes())
        return {"array": [value.dtype.str, list(value.shape), start]}
    if isinstance(value, (tuple, list)):
        return {type(value).__name__: [_plain(v, blocks) for v in value]}
    if isinstance(value, dict) and all(isinstance(k, str) for k in value):
        return {"dict": [[k, _plain(v, blocks)] for k, v in value.items()]}
    raise TypeError(f"a checkpoint cannot keep a {type(value).__name__}")


def unpack(data: bytes) -> Any:
    """What `pack` was given. Arrays may be written to."""
    (length,) = struct.unpack_from("<Q", data)
    return _value(json.loads(data[8 : 8 + length]), data, 8 + length)


def _value(plain: Any, data: bytes, blocks: int) -> Any:
    if not isinstance(plain, dict):
        return plain
    ((kind, held),) = plain.items()
    if kind == "float":
        return float.fromhex(held)
    if kind == "array":
        number, shape = np.dtype(held[0]), tuple(held[1])
        return np.frombuffer(data, number, math.prod(shape), blocks + held[2]).reshape(shape).copy()
    if kind == "dict":
        return {k: _value(v, data, blocks) for k, v in held}
    parts = [_value(v, data, blocks) for v in held]
    return tuple(parts) if kind == "tuple" else parts
