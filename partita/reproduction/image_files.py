"""Image sets from files in their publishers' formats: IDX (MNIST, Fashion-MNIST) and CIFAR-10 binary, plain or gzipped."""

from __future__ import annotations

import gzip
import math
import struct
import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from partita.errors import DataFileError

__all__ = ["IMAGE_SETS", "ImageSet", "Source", "load_images", "read_cifar", "read_idx"]

Bytes = NDArray[np.uint8]
_CIFAR_RECORD = 1 + 3 * 32 * 32


@dataclass(frozen=True)
class Source:
    """Where a set comes from: its files, their addresses and MD5 sums, and the folders in which they usually lie.

    Attributes:
        files: the members that are read.
        archives: (address, md5) of what is downloaded.
        folders: looked in, in this order.
        images: how many the publisher's training set has.
    """

    title: str
    files: tuple[str, ...]
    archives: tuple[tuple[str, str], ...]
    folders: tuple[str, ...]
    images: int


_IDX = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte")
_MNIST_AT = "https://ossci-datasets.s3.amazonaws.com/mnist/"
_FASHION_AT = "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/"
IMAGE_SETS: dict[str, Source] = {
    "mnist": Source(
        "MNIST",
        _IDX,
        (
            (f"{_MNIST_AT}{_IDX[0]}.gz", "f68b3c2dcbeaaa9fbdd348bbdeb94873"),
            (f"{_MNIST_AT}{_IDX[1]}.gz", "d53e105ee54ea40749a09fcbcd1e9432"),
        ),
        ("mnist", "MNIST/raw"),
        60_000,
    ),
    "fashion-mnist": Source(
        "Fashion-MNIST",
        _IDX,
        (
            (f"{_FASHION_AT}{_IDX[0]}.gz", "8d4fb7e6c68d591d4c3dfef9ec88bf0d"),
            (f"{_FASHION_AT}{_IDX[1]}.gz", "25c81989df183df01b3e8a0aad5dffbe"),
        ),
        ("fashion-mnist", "FashionMNIST/raw"),
        60_000,
    ),
    "cifar-10": Source(
        "CIFAR-10",
        tuple(f"data_batch_{i}.bin" for i in range(1, 6)),
        (("https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz", "c32a1d4ab5d03f1284b67883e8d87530"),),
        ("cifar-10", "cifar-10-batches-bin"),
        50_000,
    ),
}


@dataclass(frozen=True, eq=False)
class ImageSet:
    """Images `(n, channels, height, width)` as bytes, labels `(n,)`, and a title that says if it is a part of the set only."""

    title: str
    images: Bytes
    labels: Bytes


def load_images(folder: Path, name: str) -> ImageSet:
    """The training images of a set, from `folder` or the sub-folder with its usual name.

    Raises:
        DataFileError: a file is missing, cut short or something else; the message says which, and how to get it.
    """
    source = IMAGE_SETS[name]
    places = [_place(folder, source, member) for member in source.files]
    if name == "cifar-10":
        found = [p for p in places if p is not None]
        if not found:
            raise _missing(folder, source, source.files[0])
        images, labels = (np.concatenate(part) for part in zip(*map(read_cifar, found)))
    else:
        for member, place in zip(source.files, places):
            if place is None:
                raise _missing(folder, source, member)
        images, labels = (read_idx(p) for p in places if p is not None)
        if images.ndim != 3 or labels.shape != images.shape[:1]:
            raise DataFileError(
                f"{places[0]} and {places[1]} hold arrays of shapes {images.shape} and {labels.shape}; expected (n, "
                f"height, width) and (n,). {_how_to_get(source)}"
            )
        images = images[:, None]
    if len(labels) == 0 or labels.max() > 9:
        raise DataFileError(f"{places[-1] or folder}: expected labels 0 to 9. {_how_to_get(source)}")
    part = "" if len(labels) >= source.images else f" ({len(labels):,} of {source.images:,} training images)"
    return ImageSet(source.title + part, images, labels)


def _place(folder: Path, source: Source, member: str) -> Path | None:
    candidates = [folder / sub / (member + end) for sub in (*source.folders, "") for end in ("", ".gz")]
    return next((c for c in candidates if c.is_file()), None)


def _how_to_get(source: Source) -> str:
    addresses = ", ".join(address for address, _ in source.archives)
    return f"Add --download to fetch it, or get it from {addresses} into the folder that --data names."


def _missing(folder: Path, source: Source, member: str) -> DataFileError:
    return DataFileError(
        f"{folder / source.folders[0] / member}[.gz] is missing: {source.title} was not found in {folder}. "
        f"{_how_to_get(source)}"
    )


def _contents(path: Path) -> bytes:
    try:
        raw = path.read_bytes()
        return gzip.decompress(raw) if path.suffix == ".gz" else raw
    except (OSError, EOFError, zlib.error) as error:
        raise DataFileError(
            f"{path} cannot be read: {error}. Delete it and get it again (--download), or replace it by a complete copy."
        ) from None


def read_idx(path: Path) -> Bytes:
    """The array of an IDX file of unsigned bytes: magic 0x0000 08 rank, one big-endian length per axis, then the bytes."""
    raw = _contents(path)
    if len(raw) < 4 or raw[:3] != b"\x00\x00\x08" or not 1 <= raw[3] <= 4 or len(raw) < 4 + 4 * raw[3]:
        raise DataFileError(
            f"{path} is not an IDX file of bytes: it begins with {raw[:4].hex() or 'nothing'}; expected 000008 "
            "and the rank. Delete it and get it again (--download)."
        )
    shape = struct.unpack(f">{raw[3]}I", raw[4 : 4 + 4 * raw[3]])
    body = len(raw) - 4 - 4 * raw[3]
    if body != math.prod(shape):
        raise DataFileError(
            f"{path} has {body:,} bytes of data; its header says {math.prod(shape):,} for shape {shape}: it is "
            "cut short or damaged. Delete it and get it again (--download)."
        )
    return np.frombuffer(raw, np.uint8, offset=4 + 4 * raw[3]).reshape(shape)


def read_cifar(path: Path) -> tuple[Bytes, Bytes]:
    """Images `(n, 3, 32, 32)` and labels `(n,)` of a CIFAR-10 binary file: records of a label and 3072 bytes."""
    raw = _contents(path)
    if not raw or len(raw) % _CIFAR_RECORD:
        raise DataFileError(
            f"{path} has {len(raw):,} bytes; expected records of {_CIFAR_RECORD:,} (a label and 3 × 32 × 32 "
            "bytes): it is cut short or damaged. Delete it and get it again (--download)."
        )
    records = np.frombuffer(raw, np.uint8).reshape(-1, _CIFAR_RECORD)
    return records[:, 1:].reshape(-1, 3, 32, 32), records[:, 0]
