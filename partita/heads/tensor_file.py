"""Safetensors files, written in blocks and mapped into memory, so that a head may be larger than memory."""

from __future__ import annotations

import errno
import json
import math
import mmap
import os
import platform
import shutil
import sys
from collections.abc import Mapping
from io import BufferedReader
from itertools import accumulate, pairwise
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor

from partita.errors import FormatError, NotWrittenError, TruncatedFileError
from partita.heads.table_blocks import blocks_of

__all__ = ["TensorFile", "map_tensors", "parse_tensors", "stored_name", "write_tensors"]

_DTYPES = {  # in the order in which the format's own library stores tensors
    "U64": torch.uint64,
    "I64": torch.int64,
    "F64": torch.float64,
    "U32": torch.uint32,
    "I32": torch.int32,
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "U16": torch.uint16,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_ORDER = list(_DTYPES)
_MOST_HEADER = 100_000_000  # bytes, as in the format's own library
# Pages of a private mapping become memory only if they are written to; without this flag the system may count them all beforehand.
_NO_RESERVE = 0x4000 if sys.platform == "linux" and platform.machine() in ("x86_64", "aarch64") else 0


class TensorFile:
    """A safetensors file that is being written: its room is taken at once, and every tensor grows block after block.

    Leaving a `with` block whose tensors are not all complete, or where an error was raised, removes the file.

    Args:
        path: the file; what is there is replaced.
        tensors: names, dtypes and shapes of what it will hold. Their numbers are not read.

    Raises:
        NotWrittenError: the disk is full, or the folder cannot be written to.
    """

    def __init__(self, path: Path, tensors: Mapping[str, Tensor]) -> None:
        header, self._starts, self.size = _layout(tensors)
        self.path, self._left = path, {name: _bytes_in(t) for name, t in tensors.items()}
        self._dtypes = {name: t.dtype for name, t in tensors.items()}
        self._file: int | None = None
        try:
            path.unlink(missing_ok=True)  # a head may have the old file mapped, and keeps it
            free = shutil.disk_usage(path.parent).free
            if free < self.size:
                raise OSError(errno.ENOSPC, f"{self.size:,} bytes are needed and {free:,} are free")
            self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(self._file, 0, self.size)
            self._write(header, 0)
        except OSError as error:
            self._abandon()
            raise NotWrittenError.of(path, error) from None

    def append(self, name: str, block: Tensor) -> None:
        """The next numbers of a tensor, of its dtype, in its order.

        Raises:
            NotWrittenError: the disk is full.
        """
        data = block.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
        if block.dtype != self._dtypes[name] or data.nbytes > self._left[name]:
            raise ValueError(f"{name}: a block of {block.dtype} does not fit; expected {self._dtypes[name]}")
        try:
            self._write(data.data, self._starts[name])
        except OSError as error:
            raise NotWrittenError.of(self.path, error) from None
        self._starts[name] += data.nbytes
        self._left[name] -= data.nbytes

    def _write(self, data: bytes | memoryview, at: int) -> None:
        assert self._file is not None
        done, view = 0, memoryview(data)
        while done < len(view):
            done += os.pwrite(self._file, view[done:], at + done)

    def _abandon(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None
        self.path.unlink(missing_ok=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        unfinished = [name for name, left in self._left.items() if left]
        if kind is not None or unfinished or self._file is None:
            self._abandon()
            if kind is None:
                raise ValueError(f"{self.path}: {', '.join(unfinished)} were not written to the end")
            return
        try:
            os.fsync(self._file)
            os.close(self._file)
            self._file = None
        except OSError as failure:
            self._abandon()
            raise NotWrittenError.of(self.path, failure) from None


def stored_name(name: str) -> str:
    """What the file of a head calls one of the head's own tensors."""
    return f"head.{name}"


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write tensors to a safetensors file, byte for byte as the format's own library does, without a copy in memory.

    Args:
        path: the file; what is there is replaced.
        tensors: by name.

    Raises:
        NotWrittenError: the disk is full, or the folder cannot be written to.
    """
    with TensorFile(path, tensors) as file:
        for name, tensor in tensors.items():
            for (block,) in blocks_of(tensor.reshape(-1)):
                file.append(name, block)


def map_tensors(file: BufferedReader) -> dict[str, Tensor]:
    """The tensors of a safetensors file, mapped: a page is read when it is looked at, and the system may drop it again.

    Writing to such a tensor copies the page that is written to; the file is never changed.

    Args:
        file: a regular file, which may be closed afterwards.

    Raises:
        TruncatedFileError, FormatError: as `parse_tensors`.
    """
    size = os.fstat(file.fileno()).st_size
    if not size:
        raise TruncatedFileError(f"{file.name} is not a complete safetensors file: it is empty.")
    if os.name == "posix":
        flags, access = mmap.MAP_PRIVATE | _NO_RESERVE, mmap.PROT_READ | mmap.PROT_WRITE
        mapped = mmap.mmap(file.fileno(), size, flags=flags, prot=access)
    else:
        mapped = mmap.mmap(file.fileno(), size, access=mmap.ACCESS_COPY)
    return parse_tensors(mapped, file.name)


def parse_tensors(data: bytearray | mmap.mmap, path: str) -> dict[str, Tensor]:
    """The tensors in the bytes of a safetensors file, which they share.

    Args:
        data: the file.
        path: its name, for messages.

    Raises:
        TruncatedFileError: the tensors do not lie one after the other up to the end of the file.
        FormatError: a tensor of a dtype that is not known here.
    """
    length = int.from_bytes(data[:8], "little")
    if not (2 <= length <= _MOST_HEADER and 8 + length <= len(data)):
        raise TruncatedFileError(
            f"{path} is not a complete safetensors file: it has {len(data):,} bytes, and {length:,} of them are its header."
        )
    try:
        header = json.loads(data[8 : 8 + length].decode())
        header.pop("__metadata__", None)
        places = {str(name): _place(entry) for name, entry in header.items()}
    except (ValueError, AttributeError, KeyError, TypeError) as error:
        raise TruncatedFileError(
            f"{path} is not a complete safetensors file: {type(error).__name__} in its header: {error}."
        ) from None
    room = len(data) - 8 - length
    joints = [(0, 0), *sorted((start, stop) for _, _, start, stop in places.values()), (room, room)]
    if any(before[1] != after[0] for before, after in pairwise(joints)):
        raise TruncatedFileError(
            f"{path} is not a complete safetensors file: its {len(places)} tensors do not fill its {len(data):,} bytes."
        )
    found = {}
    for name, (code, shape, start, stop) in places.items():
        if code not in _DTYPES:
            raise FormatError(f"{path}: tensor {name} is of dtype {code}; expected {', '.join(_DTYPES)}.")
        dtype = _DTYPES[code]
        if stop - start != math.prod(shape) * dtype.itemsize:
            raise TruncatedFileError(
                f"{path} is not a complete safetensors file: tensor {name} has {stop - start:,} bytes, which are not {shape} "
                f"numbers of {code}."
            )
        at = 8 + length + start
        if start == stop:
            found[name] = torch.empty(shape, dtype=dtype)
        elif at % dtype.itemsize:  # numbers that lie across words of the machine
            found[name] = torch.frombuffer(bytearray(data[at : at + stop - start]), dtype=dtype).reshape(shape)
        else:
            found[name] = torch.frombuffer(data, dtype=dtype, count=math.prod(shape), offset=at).reshape(shape)
    return found


def _place(entry: Any) -> tuple[str, tuple[int, ...], int, int]:
    """dtype, shape, first byte and the byte after the last of a tensor."""
    shape, (start, stop) = tuple(entry["shape"]), entry["data_offsets"]
    if not all(type(n) is int and 0 <= n < 1 << 60 for n in (*shape, start, stop)) or start > stop:
        raise ValueError(f"shape {shape} or bytes {start} to {stop}")
    return str(entry["dtype"]), shape, start, stop


def _layout(tensors: Mapping[str, Tensor]) -> tuple[bytes, dict[str, int], int]:
    """The header, where every tensor starts, and the size of the file."""
    names = sorted(tensors, key=lambda name: (_ORDER.index(_NAMES[tensors[name].dtype]), name))
    ends = list(accumulate((_bytes_in(tensors[name]) for name in names), initial=0))
    spans = dict(zip(names, pairwise(ends)))
    entries = {
        name: {"dtype": _NAMES[tensors[name].dtype], "shape": list(tensors[name].shape), "data_offsets": list(span)}
        for name, span in spans.items()
    }
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    header = len(text).to_bytes(8, "little") + text
    return header, {name: len(header) + start for name, (start, _) in spans.items()}, len(header) + ends[-1]


def _bytes_in(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
