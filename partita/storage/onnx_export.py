"""The head as an ONNX graph."""

from __future__ import annotations

import logging
import os
import stat
import tempfile
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch

from partita.errors import AlreadyExistsError, FormatError, MissingExtraError, SizeError
from partita.heads.head import FoldedHead
from partita.heads.trace_modes import exporting
from partita.storage.files import kind_of_file

__all__ = ["export_onnx"]

_LARGEST = (1 << 31) - (1 << 24)  # an ONNX file is one protocol buffer of at most 2 GiB


def export_onnx(head: FoldedHead, path: str | os.PathLike[str], *, metadata: Mapping[str, str] | None = None) -> Path:
    """Write the head as an ONNX graph with a dynamic batch axis; inputs are named z, or z_k and z_q.

    Args:
        path: the file to write. It appears whole or not at all; an existing regular file is replaced.
        metadata: becomes the `metadata_props` of the file.

    Raises:
        AlreadyExistsError: something else than a regular file is there: a folder, device, pipe, or a link to one.
        MissingExtraError: the extra `onnx` is not installed.
        SizeError: more than an ONNX file can hold.
    """
    place = _require_replaceable(Path(path))
    try:
        import onnx  # noqa: F401
        import onnxscript  # noqa: F401
    except ImportError as error:
        raise MissingExtraError.of("ONNX export needs", "onnx") from error
    size = sum(t.numel() * t.element_size() for t in head.state_dict().values())
    if size > _LARGEST:
        raise SizeError(f"the head has {size / 2**30:.2f} GiB of tensors; an ONNX file can have at most 2 GiB.")
    place.parent.mkdir(parents=True, exist_ok=True)
    names = ["z"] if len(head.input_shapes) == 1 else ["z_k", "z_q"]
    examples = tuple(torch.zeros(3, *shape, dtype=head.dtype) for shape in head.input_shapes)
    batch = torch.export.Dim("batch", max=1 << 40)  # without a limit torch 2.6 and 2.7 fix the size of the example
    with exporting(), _quiet_exporter(), tempfile.TemporaryDirectory(dir=place.parent) as draft:
        program = torch.onnx.export(
            head.eval(),
            examples,
            input_names=names,
            output_names=["value"],
            dynamic_shapes=(tuple({0: batch} for _ in examples),),  # one level more: forward takes *inputs
            dynamo=True,
            verbose=False,
        )
        if program is None:
            raise FormatError("torch.onnx.export returned nothing.")
        program.model.metadata_props.update(metadata or {})
        program.save(Path(draft) / "head.onnx")
        os.replace(Path(draft) / "head.onnx", _require_replaceable(place))
    return place


def _require_replaceable(place: Path) -> Path:
    """The path, if nothing is there or a regular file; of a link to a regular file the file's own path."""
    try:
        found = place.lstat()
        if stat.S_ISLNK(found.st_mode):
            place = place.resolve()
            found = place.stat()
    except FileNotFoundError:  # also for a link that points nowhere
        return place
    except OSError as error:
        raise AlreadyExistsError(f"{place} cannot be written: {error.strerror}. Choose another name.") from None
    if not stat.S_ISREG(found.st_mode):
        raise AlreadyExistsError(
            f"{place} is a {kind_of_file(found.st_mode)}, so it is not overwritten; expected a new name or a regular file."
        )
    return place


@contextmanager
def _quiet_exporter() -> Iterator[None]:
    """The exporter warns of optional packages that nothing here uses."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)
