"""The head as an ONNX graph, which says in its metadata what is claimed about it."""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import stat
import tempfile
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from partita.arithmetic.precision import Precision
from partita.errors import AlreadyExistsError, FormatError, MissingExtraError, SizeError, UnsupportedError
from partita.functions.regions import Domain, Piece, Region
from partita.functions.target import Target
from partita.geometry.domains import Box, PointCloud
from partita.heads.head import Head, require_full
from partita.kernels.trace_modes import exporting
from partita.proofs.certificate import Certificate
from partita.storage.files import kind_of_file
from partita.storage.saving import canonical

__all__ = [
    "ONNX_OPSET",
    "ONNX_OUTSIDE",
    "export_onnx",
    "input_names",
    "onnx_metadata",
    "require_replaceable",
    "require_rule",
]

ONNX_OUTSIDE = ("allow", "clamp", "mark")
ONNX_OPSET = 18  # the latest that tract is tested with; ONNX Runtime and its build for browsers read it too
_IR_VERSION = 8  # of the file format that came with opset 18

_LARGEST = (1 << 31) - (1 << 24)  # an ONNX file is one protocol buffer of at most 2 GiB


def onnx_metadata(certificate: Certificate, target: Target) -> dict[str, str]:
    """What the file says about the claim. Numbers are decimal and exact; a bound is there only if it is proved.

    `partita.certificate_sha256` is the sha256 of the `certificate.json` that saving the head writes.
    """
    found = {
        "function": target.label,
        "domain": json.dumps([d.description for d in target.domains], ensure_ascii=False),
        "kind": certificate.kind,
        "norm": certificate.norm,
        "tolerance": repr(certificate.tolerance),
        "dtype": certificate.semantics,
        "certificate_sha256": hashlib.sha256(canonical(certificate.to_json())).hexdigest(),
    }
    if math.isfinite(certificate.error_bound):
        found["error_bound"] = repr(certificate.error_bound)
    if certificate.error_estimate is not None:
        found["error_estimate"] = repr(certificate.error_estimate)
    return {f"partita.{name}": text for name, text in found.items()}


def input_names(head: Head) -> list[str]:
    """What the inputs are called in an ONNX file."""
    return ["z"] if len(head.input_shapes) == 1 else ["z_k", "z_q"]


def export_onnx(
    head: Head,
    path: str | os.PathLike[str],
    *,
    domain: Domain | None = None,
    outside: str = "allow",
    metadata: Mapping[str, str] | None = None,
    description: str = "",
) -> Path:
    """Write the head as an ONNX graph with a dynamic batch axis; inputs are named z, or z_k and z_q, and have the head's dtype.

    The graph has opset 18 and operators that ONNX Runtime, onnxruntime-web and tract read, and no functions of its own.

    Args:
        path: the file to write. It appears whole or not at all; an existing regular file is replaced.
        domain: the flat domain, for `outside`.
        outside: "allow" evaluates the head everywhere, "clamp" moves inputs into the box, "mark" returns NaN outside the domain.
        metadata: becomes the `metadata_props` of the file; `partita.outside` is added.
        description: Markdown for people, which becomes the `doc_string` of the file.

    Raises:
        UnsupportedError: there is no such rule for inputs outside this domain, or the values are of a half type.
        AlreadyExistsError: something else than a regular file is there: a folder, device, pipe, or a link to one.
        MissingExtraError: the extra `onnx` is not installed.
        SizeError: more than an ONNX file can hold.
    """
    require_full(head, "an ONNX file")
    place, model = require_replaceable(Path(path)), _guarded(head, domain, outside)
    try:
        import onnx  # noqa: F401
        import onnxscript  # noqa: F401
    except ImportError as error:
        raise MissingExtraError.of("ONNX export needs", "onnx") from error
    size = sum(t.numel() * t.element_size() for t in head.state_dict().values())
    if size > _LARGEST:
        raise SizeError(f"the head has {size / 2**30:.2f} GiB of tensors; an ONNX file can have at most 2 GiB.")
    place.parent.mkdir(parents=True, exist_ok=True)
    examples = tuple(torch.zeros(3, *shape, dtype=head.dtype) for shape in head.input_shapes)
    batch = torch.export.Dim("batch", max=1 << 40)  # without a limit torch 2.6 and 2.7 fix the size of the example
    with exporting(), _quiet_exporter(), tempfile.TemporaryDirectory(dir=place.parent) as draft:
        program = torch.onnx.export(
            model.eval(),
            examples,
            input_names=input_names(head),
            output_names=["value"],
            opset_version=ONNX_OPSET,
            dynamic_shapes=(tuple({0: batch} for _ in examples),),  # one level more: forward takes *inputs
            dynamo=True,
            verbose=False,
        )
        if program is None:
            raise FormatError("torch.onnx.export returned nothing.")
        _strip(program.model)
        program.model.doc_string = description or None
        program.model.metadata_props.update({**(metadata or {}), "partita.outside": outside})
        program.save(Path(draft) / "head.onnx")
        os.replace(Path(draft) / "head.onnx", require_replaceable(place))
    return place


def _strip(model: Any) -> None:
    """Set the version of the format, and take out the exporter's notes: they name source files of this machine."""
    model.ir_version = _IR_VERSION
    model.metadata_props.clear()
    graph = model.graph
    graph.metadata_props.clear()
    for node in graph:
        node.metadata_props.clear()
        node.doc_string = None
    values = [*graph.inputs, *graph.outputs, *graph.initializers.values()]
    for value in [*values, *(value for node in graph for value in node.outputs)]:
        value.metadata_props.clear()


class _Guarded(nn.Module):
    """A head that moves inputs into a box first, or returns NaN for inputs outside of all pieces of a domain."""

    def __init__(self, head: Head, domain: Box | Region, *, mark: bool) -> None:
        super().__init__()
        self.head, self.precision, self.mark = head, Precision.of(head.dtype), mark
        self.pieces = domain.pieces if isinstance(domain, Region) else (Piece(domain, ()),)

    def forward(self, *inputs: Tensor) -> Tensor:
        flat, lead = self.head.flatten(*inputs)
        shape = (*lead, *self.head.output_shape)
        if not self.mark:
            low, high = (self._numbers(end) for end in (self.pieces[0].box.lo, self.pieces[0].box.hi))
            return self.head.evaluate(torch.minimum(torch.maximum(flat, low), high)).reshape(shape)
        missed = [self._missed(piece, flat) for piece in self.pieces]
        inside = torch.stack(missed).amin(dim=0) == 0 if len(missed) > 1 else missed[0] == 0
        return torch.where(inside[:, None], self.head.evaluate(flat), math.nan).reshape(shape)

    def _numbers(self, given: np.ndarray) -> Tensor:
        return torch.from_numpy(np.array(given, dtype=np.float64).ravel()).to(self.head.dtype)

    def _missed(self, piece: Piece, flat: Tensor) -> Tensor:
        """How many conditions of the piece each input misses; below float64 rounding may move an input out of it by itself.

        Counted in floats, because sums of truth values take operators that fewer runtimes have.
        """
        lo, hi = piece.box.lo.ravel(), piece.box.hi.ravel()
        moved, (low, high) = self.precision.moved(lo, hi), self.precision.widened(lo, hi)
        within = (flat >= self._numbers(low)) & (flat <= self._numbers(high))
        missed = torch.where(within, 0.0, 1.0).sum(dim=1)
        for constraint in piece.constraints:
            _, slopes = constraint.graph.enclose_gradient(lo[None], hi[None])
            added = float((slopes.magnitude.reshape(-1) * moved).sum()) if self.precision.rounds_inputs else 0.0
            limit = constraint.slack + (added if math.isfinite(added) else 0.0)
            kept = constraint.graph.evaluate_torch(flat.double()).reshape(-1) <= limit
            missed = missed + torch.where(kept, 0.0, 1.0)
        return missed


def require_rule(outside: str, domain: Domain | None, file: str = "an ONNX file") -> None:
    """Raise an UnsupportedError if a file of this kind has no such rule for inputs outside this domain."""
    if outside not in ONNX_OUTSIDE:
        raise UnsupportedError(f"outside is {outside!r}; expected one of {', '.join(map(repr, ONNX_OUTSIDE))}.")
    if outside == "allow":
        return
    if domain is None or isinstance(domain, PointCloud) or (outside == "clamp" and not isinstance(domain, Box)):
        kinds = "a box" if outside == "clamp" else "a box or a region"
        raise UnsupportedError(
            f"outside={outside!r} in {file} needs {kinds}; the domain is {domain}",
            "Use outside='mark' or outside='allow'." if isinstance(domain, Region) else "Use outside='allow'.",
        )


def _guarded(head: Head, domain: Domain | None, outside: str) -> nn.Module:
    require_rule(outside, domain)
    if outside == "allow" or domain is None or isinstance(domain, PointCloud):
        return head
    return _Guarded(head, domain, mark=outside == "mark")


def require_replaceable(place: Path) -> Path:
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
