"""Files, read and written whole: pipes, devices and files that are too large are refused before a byte is read."""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from io import BufferedReader
from pathlib import Path
from typing import Any

from partita.errors import FormatError, TruncatedFileError

__all__ = ["hash_regular", "kind_of_file", "open_regular", "read_regular", "whole_file", "write_json", "write_whole"]


@contextmanager
def whole_file(path: str | os.PathLike[str]) -> Iterator[Path]:
    """A name to write to, which becomes the file when the block ends: whole or not at all. Parents are created.

    Threads and processes may write to one path at the same time: the last one stays.

    Args:
        path: the file. Of a symbolic link, what it points to is replaced.
    """
    place = Path(os.path.realpath(path))
    place.parent.mkdir(parents=True, exist_ok=True)
    waiting = place.with_name(f".{secrets.token_hex(8)}{place.suffix}")
    try:
        yield waiting
        os.replace(waiting, place)
    finally:
        waiting.unlink(missing_ok=True)


def write_whole(path: str | os.PathLike[str], text: str) -> Path:
    """Write text to a file, whole or not at all; returns its path. Parents are created.

    Args:
        path: the file. It is replaced if it exists.
        text: what to write, as UTF-8.
    """
    with whole_file(path) as waiting:
        waiting.write_text(text, encoding="utf-8")
    return Path(path)


def write_json(path: str | os.PathLike[str], data: Any, *, indent: int | None = 1) -> Path:
    """Write data as JSON to a file, as `write_whole` does. NaN and infinity raise a ValueError: JSON has no such numbers.

    Args:
        path: the file.
        data: what to write.
        indent: None for the shortest text.
    """
    separators = (",", ":") if indent is None else None
    text = json.dumps(data, ensure_ascii=False, allow_nan=False, indent=indent, separators=separators)
    return write_whole(path, text + "\n")


def read_regular(path: Path, most: int) -> bytes:
    """The bytes of a regular file.

    Args:
        path: a symbolic link is followed; what it points to must be a regular file.
        most: the largest size that is read, in bytes.

    Raises:
        TruncatedFileError: nothing is there.
        FormatError: a pipe, device, socket or folder, a file that is too large, or one that may not be read.
    """
    with open_regular(path, most) as file:
        size = os.fstat(file.fileno()).st_size
        data = file.read(size + 1)
    if len(data) != size:
        raise FormatError(f"{path} changed while it was read; expected {size:,} bytes.")
    return data


def hash_regular(path: Path, most: int | None = None) -> str:
    """The sha256 of a regular file, of any size by default, without holding it in memory; raises what `read_regular` raises."""
    with open_regular(path, most) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextmanager
def open_regular(path: Path, most: int | None = None) -> Iterator[BufferedReader]:
    """A regular file of at most so many bytes, opened for reading; raises what `read_regular` raises."""
    try:
        _require_readable(path, path.stat(), most)
        with open(path, "rb", opener=_without_waiting) as file:
            _require_readable(path, os.fstat(file.fileno()), most)  # it may have been replaced since
            yield file
    except FileNotFoundError:
        raise TruncatedFileError(f"{path} is missing.") from None
    except OSError as error:
        raise FormatError(f"{path} cannot be read: {error.strerror}.") from None


def kind_of_file(mode: int) -> str:
    """The kind of a file in words, from `st_mode`."""
    kinds = {
        stat.S_IFREG: "regular file",
        stat.S_IFDIR: "folder",
        stat.S_IFIFO: "pipe",
        stat.S_IFSOCK: "socket",
        stat.S_IFCHR: "device",
        stat.S_IFBLK: "device",
        stat.S_IFLNK: "symbolic link",
    }
    return kinds.get(stat.S_IFMT(mode), "special file")


def _require_readable(path: Path, found: os.stat_result, most: int | None) -> None:
    if not stat.S_ISREG(found.st_mode):
        raise FormatError(f"{path} is a {kind_of_file(found.st_mode)}; expected a regular file.")
    if most is not None and found.st_size > most:
        raise FormatError(f"{path} has {found.st_size:,} bytes; at most {most:,} are read.")


def _without_waiting(name: str, flags: int) -> int:
    """Opening a pipe would wait for someone to write into it."""
    return os.open(name, flags | getattr(os, "O_NONBLOCK", 0))
