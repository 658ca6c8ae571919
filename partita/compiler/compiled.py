"""Compiled: a head with its domain, its partition and its certificate, as one frozen value."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from partita import storage
from partita.compiler.bounds import GradientError, Range, bound_gradient_error, bound_range, bound_slope
from partita.errors import NonFiniteValueError, OutsideDomainError, UnsupportedError
from partita.functions.target import Target
from partita.geometry.domains import Box
from partita.geometry.partitions import Partition
from partita.heads.forms import literal_layers
from partita.heads.head import FoldedHead, count_text, flatten_inputs
from partita.heads.layers import CrossNetwork, SelfNetwork
from partita.methods.method import Candidate
from partita.methods.planner import report
from partita.proofs.certificate import Certificate, Witness, model_digest
from partita.proofs.proof import Progress
from partita.proofs.worst_point import search_worst

__all__ = ["OUTSIDE", "Compiled", "load", "require_outside"]

OUTSIDE = ("raise", "clamp", "allow")


def require_outside(rule: str) -> None:
    """An UnsupportedError unless `rule` is one of "raise", "clamp", "allow"."""
    if rule not in OUTSIDE:
        raise UnsupportedError(f"outside is {rule!r}; expected one of {', '.join(map(repr, OUTSIDE))}.")


@dataclass(frozen=True, eq=False, repr=False)
class Compiled:
    """What `compile` returns. Call it with what the function takes: arrays or tensors, batched or a single point.

    Attributes:
        head: the `nn.Module`. partition: the cells it makes. certificate: what is proved of it.
        target: the function and its domains (without the function itself if it was a black box and read from a file).
        outside: what to do with inputs outside the domain: "raise", "clamp" or "allow" (then nothing is claimed of them).
        why: the plan's explanation. candidates: every method that was considered, this one first (not stored in files).
    """

    head: FoldedHead
    partition: Partition
    certificate: Certificate
    target: Target
    outside: str = "raise"
    why: tuple[str, ...] = ()
    candidates: tuple[Candidate, ...] = ()

    def __post_init__(self) -> None:
        require_outside(self.outside)

    @property
    def is_changed(self) -> bool:
        """Whether the head's tensors are no longer those that the certificate is about."""
        return self.certificate.model.get("sha256") != model_digest(self.head.state_dict())

    def require_unchanged(self) -> Compiled:
        """Itself, unless the head was changed since it was certified: then nothing is claimed of it, and this is an error.

        Raises:
            UnsupportedError: a tensor of the head was changed.
        """
        if self.is_changed:
            raise UnsupportedError(
                "this head was changed since it was certified, so its certificate is not about it",
                "Compile again, or use c.head on its own, without a claim.",
            )
        return self

    @property
    def error_bound(self) -> float:
        """The proved bound of `‖f − head‖` on the domain, rounding included; infinite where nothing is proved.

        Raises:
            UnsupportedError: the head was changed since it was certified.
        """
        return self.require_unchanged().certificate.error_bound

    @property
    def error_estimate(self) -> float | None:
        """The largest error sampled, where the claim is an estimate; None where there is a bound.

        Raises:
            UnsupportedError: the head was changed since it was certified.
        """
        return self.require_unchanged().certificate.error_estimate

    @property
    def num_keys(self) -> int:
        """Cells of the folded head, ghosts included."""
        return self.head.num_keys

    @property
    def num_parameters(self) -> int:
        """Scalars that the folded head stores."""
        return self.head.num_parameters

    def __call__(self, *inputs: Any) -> Any:
        """The head's values: tensors for tensors, arrays for anything else. Inputs outside the domain as `outside` says."""
        if str(self.head.dtype) != f"torch.{self.certificate.semantics}":
            raise UnsupportedError(
                f"the head was cast to {self.head.dtype} after it was certified in {self.certificate.semantics}; "
                "compile with dtype=… instead, or call c.head, of which nothing is claimed then."
            )
        flat, lead = flatten_inputs(inputs, self.head.input_shapes, torch.float64)
        out = self.head.evaluate(self._inside(flat).to(self.head.dtype)).reshape((*lead, *self.head.output_shape))
        return out if any(isinstance(z, Tensor) for z in inputs) else out.detach().cpu().numpy()

    def with_outside(self, outside: str) -> Compiled:
        """The same head with another rule for inputs outside the domain."""
        return replace(self, outside=outside)

    def layers(self, form: str = "indexed") -> SelfNetwork | CrossNetwork:
        """The paper's Linear and attention as one module, every tensor named: `form` is "indexed" (ours) or "log" (the paper's)."""
        return literal_layers(self.head, form)

    def explain(self) -> str:
        """Why these sizes, and what is claimed on which grounds."""
        return "\n".join([*self.why, self.require_unchanged().certificate.explain()])

    def report(self) -> str:
        """Every candidate with keys, stored numbers, size of the values, rounding and error; the arrow marks this head."""
        return report(self.candidates)

    def attack(self, *, samples: int = 4096, seed: int = 0) -> Witness:
        """Search for the worst error: random points, corners, cell corners, local search. An estimate from below."""
        return search_worst(self.errors_at, self.target.domain, partition=self.partition, samples=samples, seed=seed)

    def errors_at(self, points: np.ndarray) -> np.ndarray:
        """`|f − head|_∞` at flat points `(n, m)`; for an expression less what f's own evaluation in float64 may be off."""
        with torch.no_grad():
            z = torch.from_numpy(np.ascontiguousarray(points)).to(self.head.dtype)
            got = self.head.evaluate(z).double().numpy()
        error = np.abs(got - self.target(points))
        error = np.where(np.isnan(error), np.inf, error)  # a head that has no value is as wrong as can be
        if self.target.graph is not None:
            enclosure = self.target.graph.enclose(points, points)
            error = np.maximum(error - np.where(enclosure.is_entire, 0.0, 2 * enclosure.radius), 0.0)
        out: np.ndarray = error.max(axis=1)
        return out

    def bound_range(self, *, progress: Progress | None = None) -> tuple[Range, ...]:
        """Between which values each output lies on the domain: proved, for the head as it is run.

        >>> import partita as pa
        >>> c = pa.compile("sin(3*x)", pa.Box([-1], [1]), tolerance=1e-3)
        >>> -1.01 < c.bound_range()[0].lo <= -0.999
        True
        """
        self._box()
        return bound_range(self.head, self.target, progress=progress)

    def bound_gradient_error(self, *, progress: Progress | None = None) -> GradientError:
        """How far the head's gradient is from f's, coordinate by coordinate: proved, for the stored tensors in exact arithmetic.

        >>> import partita as pa
        >>> c = pa.compile("sin(3*x)", pa.Box([-1], [1]), tolerance=1e-3)
        >>> c.bound_gradient_error().bounds[0] < 0.05
        True
        """
        self._box()
        return bound_gradient_error(self.head, self.target, progress=progress)

    def bound_slope(self, axis: int, *, progress: Progress | None = None) -> tuple[Range, ...]:
        """Between which values `∂net/∂z_axis` lies, for each output; `.trend` says whether the head rises or falls along the axis.

        >>> import partita as pa
        >>> pa.compile("tanh(x)", pa.Box([-1], [1]), tolerance=1e-3).bound_slope(0)[0].trend
        'increasing'
        """
        return bound_slope(self.head, self._box(), axis, progress=progress)

    def _box(self) -> Box:
        if not isinstance(self.target.domain, Box):
            raise UnsupportedError(
                f"ranges and slopes are proved over boxes; this head's domain is {self.target.domain}."
            )
        return self.target.domain

    def save(self, folder: str | os.PathLike[str], *, overwrite: bool = False) -> Path:
        """Write `head.safetensors`, `head.json` and `certificate.json` (docs/format.md) at once or not at all.

        A head that was changed since it was certified (trained, say) is refused: the certificate is not about it.
        """
        return storage.save(
            self.head, self.certificate, self.target, folder, outside=self.outside, why=self.why, overwrite=overwrite
        )

    def export_onnx(self, path: str | os.PathLike[str]) -> Path:
        """Write the head as ONNX, dynamic batch; onnxruntime reproduces it within the rounding terms of the certificate."""
        return storage.export_onnx(self.require_unchanged().head, path)

    def _inside(self, flat: Tensor) -> Tensor:
        domain, points = self.target.domain, flat.detach().cpu().numpy()
        finite = np.isfinite(points).all(axis=1)
        if not finite.all():
            row = int(np.flatnonzero(~finite)[0])
            raise NonFiniteValueError(f"input number {row} is not finite: {points[row].tolist()}.")
        if self.outside == "allow":
            return flat
        inside = domain.contains(points)
        if inside.all():
            return flat
        if self.outside == "clamp":
            kept = torch.from_numpy(inside)[:, None].to(flat.device)
            return torch.where(kept, flat, torch.from_numpy(domain.clamp(points)).to(flat.device))
        row = int(np.flatnonzero(~inside)[0])
        raise OutsideDomainError(
            f"{int((~inside).sum()):,} of {len(points):,} inputs lie outside {domain}, the first is "
            f"{points[row].tolist()}; the certificate says nothing there. Use outside='clamp' or outside='allow' when "
            "compiling (or c.with_outside(…)) if you want values all the same."
        )

    def __repr__(self) -> str:
        c, keys = self.certificate, f"{count_text(self.num_keys)} key{'' if self.num_keys == 1 else 's'}"
        if self.is_changed:
            return f"Compiled({self.target.label!r}: {keys}, changed since it was certified: nothing is claimed)"
        return f"Compiled({self.target.label!r}: {keys}, {c.kind} error {c.claim} in L{c.norm}, {c.semantics})"


def load(folder: str | os.PathLike[str]) -> Compiled:
    """A head that `Compiled.save` wrote, every hash, shape and number checked.

    Expressions come back whole, black boxes without their function.
    """
    head, certificate, target, outside, why = storage.load_parts(folder)
    return Compiled(head, head.partition(target.domain.bounding_box()), certificate, target, outside, why)
