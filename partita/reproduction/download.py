"""Downloads image files, only on request, and checks their published MD5 sums before they are put in place."""

from __future__ import annotations

import hashlib
import io
import os
import tarfile
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path

from partita.errors import DataFileError
from partita.reproduction.image_files import IMAGE_SETS, load_images

__all__ = ["download_images"]

Fetch = Callable[[str], bytes]


def _from_the_network(address: str) -> bytes:
    try:
        with urllib.request.urlopen(address, timeout=60) as answer:
            return bytes(answer.read())
    except (urllib.error.URLError, TimeoutError, OSError) as error:
        raise DataFileError(
            f"{address} could not be fetched: {error}. Get the file another way and pass its folder with --data."
        ) from None


def download_images(folder: Path, name: str, *, fetch: Fetch = _from_the_network) -> None:
    """Put a set's files into `folder`, if they are not there already.

    Raises:
        DataFileError: the address does not respond, or the checksum of the file is not the published one.
    """
    source = IMAGE_SETS[name]
    try:
        load_images(folder, name)
        return
    except DataFileError:
        pass
    place = folder / source.folders[0]
    for address, md5 in source.archives:
        content = fetch(address)
        found = hashlib.md5(content, usedforsecurity=False).hexdigest()
        if found != md5:
            raise DataFileError(
                f"{address} sent {len(content):,} bytes with MD5 {found}; expected {md5}. Nothing was written. "
                "Try again later, or get "
                "the file another way and pass its folder with --data."
            )
        members = (
            _members(content, source.files) if address.endswith(".tar.gz") else {address.rpartition("/")[2]: content}
        )
        for member, data in members.items():
            place.mkdir(parents=True, exist_ok=True)
            waiting = place / f".{member}.{os.getpid()}"
            waiting.write_bytes(data)
            os.replace(waiting, place / member)


def _members(archive: bytes, wanted: tuple[str, ...]) -> dict[str, bytes]:
    """The wanted files of a tar archive by their last name; nothing is extracted to a path that the archive names."""
    found = {}
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        for entry in tar:
            name = entry.name.rpartition("/")[2]
            held = tar.extractfile(entry) if entry.isfile() and name in wanted else None
            if held is not None:
                found[name] = held.read()
    return found
