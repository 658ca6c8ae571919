"""Compiled: a head with its domain, its partition and its certificate, as one frozen value."""

from __future__ import annotations

import copy
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from partita import storage
from partita.arithmetic.arguments import require_dtype
from partita.arithmetic.notebook_cards import card
from partita.compiler.bounds import GradientError, Range, bound_gradient_error, bound_range, bound_slope
from partita.compiler.claim_card import claim_card
from partita.compiler.given_function import given_function, require_same_table
from partita.compiler.network_bounds import claimed_range, network_gradient_error, network_range, network_slope
from partita.compiler.scalar_function import ScalarFunction
from partita.errors import NonFiniteValueError, OutsideDomainError, UnsupportedError
from partita.functions.regions import Region
from partita.functions.samples import Table
from partita.functions.target import Target
from partita.geometry.domains import Box, PointCloud, column_ranges
from partita.geometry.partitions import Partition
from partita.heads.forms import literal_layers
from partita.heads.grid_head import GridHead
from partita.heads.head import Head, count_text, flatten_inputs, require_folded
from partita.heads.layers import CrossNetwork, SelfNetwork
from partita.heads.network import AttentionNetwork
from partita.heads.one_point import OnePoint
from partita.kernels.guards import require_covered
from partita.methods.chosen import head_at
from partita.methods.method import Candidate, candidate_rows
from partita.methods.planner import report
from partita.networks.from_mlp import ConvertedNetwork
from partita.proofs import PROOFS
from partita.proofs.certificate import Certificate, Witness, model_digest
from partita.proofs.layers_claim import claim_layers
from partita.proofs.network_budget import budget_text
from partita.proofs.proof import Progress
from partita.proofs.worst_point import errors_at, search_worst

__all__ = ["OUTSIDE", "Compiled", "load", "require_outside"]

OUTSIDE = ("raise", "clamp", "allow")


def require_outside(rule: str) -> None:
    """Raise an UnsupportedError unless `rule` is one of "raise", "clamp", "allow"."""
    if rule not in OUTSIDE:
        raise UnsupportedError(f"outside is {rule!r}; expected one of {', '.join(map(repr, OUTSIDE))}.")


@dataclass(frozen=True, eq=False, repr=False)
class Compiled:
    """A compiled head with its domain, partition and certificate: what `compile` returns.

    Call it with what the function takes: arrays or tensors, a batch or a single point.

    Attributes:
        head: the attention head, or a network of heads, an `nn.Module`.
        partition: the cells that the head makes. None for a network, whose heads, `c.head.heads`, have one each.
        certificate: what is claimed about the head, and on which grounds.
        target: the function and its domain. A black box that was loaded from a file has no function.
        outside: what to do with inputs outside the domain: "raise", "clamp", or "allow" (the certificate does not cover them).
        why: the plan's explanation, one sentence per item.
        candidates: every method that was considered, this one first. Not stored in files.
        table: the table that the head was fitted to, if it was compiled from one. Not stored in files.

    >>> import partita as pa
    >>> c = pa.compile("2*x", pa.Box([0], [1]), tolerance=0.15, method="hard")
    >>> c
    Compiled('2*x': 7 keys, proved error ≤ 0.142857 in Linf, float64)
    >>> bool(abs(c([0.5]) - 1.0) <= c.error_bound)
    True
    """

    head: Head
    partition: Partition | None
    certificate: Certificate
    target: Target
    outside: str = "raise"
    why: tuple[str, ...] = ()
    candidates: tuple[Candidate, ...] = ()
    table: Table | None = None

    def __post_init__(self) -> None:
        require_outside(self.outside)

    @property
    def is_changed(self) -> bool:
        """Whether a tensor of the head was changed after the head was certified.

        >>> import partita as pa
        >>> c = pa.compile("2*x", pa.Box([0], [1]), tolerance=0.15, method="hard")
        >>> c.is_changed
        False
        """
        return self.certificate.model.get("sha256") != model_digest(self.head.state_dict())

    def require_unchanged(self) -> Compiled:
        """The object itself, if the head is the one that was certified.

        Raises:
            UnsupportedError: a tensor of the head was changed, so its certificate does not apply.

        >>> import partita as pa
        >>> c = pa.compile("2*x", pa.Box([0], [1]), tolerance=0.15, method="hard")
        >>> c.require_unchanged() is c
        True
        """
        if self.is_changed:
            raise UnsupportedError(
                "the head was changed after it was certified, so its certificate does not apply",
                "Compile again, or use c.head, which the certificate does not cover.",
            )
        return self

    @property
    def error_bound(self) -> float:
        """The proved bound of `‖f − head‖` on the domain, rounding included. Infinite if nothing is proved.

        Raises:
            UnsupportedError: the head was changed after it was certified.

        >>> import partita as pa
        >>> c = pa.compile("2*x", pa.Box([0], [1]), tolerance=0.15, method="hard")
        >>> c.error_bound <= 0.15
        True
        """
        return self.require_unchanged().certificate.error_bound

    @property
    def error_estimate(self) -> float | None:
        """The largest sampled error, if the claim is an estimate. None if there is a bound.

        Raises:
            UnsupportedError: the head was changed after it was certified.

        >>> import partita as pa
        >>> c = pa.compile("2*x", pa.Box([0], [1]), tolerance=0.15, method="hard")
        >>> c.error_estimate is None
        True
        """
        return self.require_unchanged().certificate.error_estimate

    @property
    def tolerance_met(self) -> bool:
        """Whether the bound, or the estimate, is within the tolerance. False only if `budget` or `max_evaluations` was too small.

        >>> import partita as pa
        >>> c = pa.compile("2*x", pa.Box([0], [1]), tolerance=0.15, method="hard")
        >>> c.tolerance_met
        True
        """
        return self.certificate.error <= self.certificate.tolerance

    @property
    def evaluations(self) -> int:
        """How many points the caller's function received until the head was finished, the first probes included. 0 for expressions.

        >>> import partita as pa
        >>> c = pa.compile(lambda z: z[:, 0].round(3), pa.Box([0], [1]), tolerance=0.1)
        >>> 0 < c.evaluations < 500
        True
        """
        text = self.certificate.function.get("type") in ("graph", "network") and not self.target.calls.rows
        return 0 if text else int(self.certificate.facts.get("evaluations", 0))

    @property
    def excluded(self) -> np.ndarray:
        """The points at which f failed, flat, `(k, m)`; none unless it was compiled with on_error="exclude". Not stored in files.

        >>> import partita as pa
        >>> f = lambda z: np.where(abs(z[:, 0] - 0.3) < 0.01, np.nan, z[:, 0])
        >>> c = pa.compile(f, pa.Box([0], [1]), tolerance=0.05, on_error="exclude")
        >>> bool((abs(c.excluded - 0.3) < 0.01).all()), len(c.excluded) == c.certificate.facts["points_excluded"]
        (True, True)
        """
        left_out = self.target.excluding
        return np.zeros((0, self.target.domain.dimension)) if left_out is None else left_out.points

    @property
    def num_keys(self) -> int:
        """The number of keys, which is the number of cells, ghosts included.

        >>> import partita as pa
        >>> c = pa.compile("2*x", pa.Box([0], [1]), tolerance=0.15, method="hard")
        >>> c.num_keys
        7
        """
        return self.head.num_keys

    @property
    def num_parameters(self) -> int:
        """The number of scalars that the head stores.

        >>> import partita as pa
        >>> c = pa.compile("2*x", pa.Box([0], [1]), tolerance=0.15, method="hard")
        >>> c.num_parameters < 50
        True
        """
        return self.head.num_parameters

    def __call__(self, *inputs: Any) -> Any:
        """The head's values, `(…, *output_shape)`: tensors for tensors, arrays for everything else.

        Args:
            inputs: one argument `(…, *domain.shape)` per domain.

        Raises:
            OutsideDomainError: an input lies outside the domain and `outside` is "raise".
            NonFiniteValueError: an input is NaN or infinite.
            UnsupportedError: the head was cast to another dtype, or lies with the inputs on a device that the certificate does
                not cover, or on another device than they do.
        """
        if self._direct and (found := self._one_point(inputs)) is not None:
            return found
        place = self.head.device
        require_covered(place, *(z.device for z in inputs if isinstance(z, Tensor)))
        if self.head.semantics != self.certificate.semantics:
            raise UnsupportedError(
                f"the head was cast to {self.head.semantics} after it was certified in {self.certificate.semantics}; "
                "compile with dtype=… instead, or call c.head, which the certificate does not cover."
            )
        flat, lead = flatten_inputs(inputs, self.head.input_shapes, torch.float64, shared=True)
        flat, shape = self._inside(flat), (*lead, *self.head.output_shape)
        if any(isinstance(z, Tensor) for z in inputs):
            return self.head.evaluate(flat.to(self.head.dtype)).reshape(shape)
        if len(flat) == 1 and (found := self._one_point.at(flat.numpy().tobytes())) is not None:
            return found.reshape(shape)
        return self.head.evaluate(flat.to(place, self.head.dtype)).reshape(shape).detach().cpu().numpy()

    def scalar(self) -> ScalarFunction:
        """The head as a function of plain floats, `f(x0, x1, …)`, for one point at a time: no arrays and no tensors.

        Returns a callable. It gives a float, or a tuple of floats (flat) if there are several outputs, the same numbers as
        `c([x0, x1, …])`. Points outside the domain, NaN and infinity are treated as `c` treats them. The arguments of two domains
        and the coordinates of tokens follow each other.

        It is a snapshot: it holds a copy of the head, and later changes of the head do not reach it. With the extra `fast` the
        sum is compiled at once, which takes a few seconds the first time on a machine. Without it the sum is interpreted.

        Raises:
            UnsupportedError: the head was changed after it was certified.

        >>> import partita as pa
        >>> c = pa.compile("sin(x)*y", pa.Box([0, 0], [1, 1]), tolerance=1e-3)
        >>> f = c.scalar()
        >>> bool(f(0.25, 0.5) == c([0.25, 0.5]))
        True
        >>> c.with_outside("clamp").scalar()(0.25, 1.5) == f(0.25, 1.0)
        True
        """
        return ScalarFunction(replace(self, head=copy.deepcopy(self.require_unchanged().head)))

    @cached_property
    def _direct(self) -> bool:
        """Whether single points can be checked by comparing numbers; those of other domains are looked at first."""
        return isinstance(self.target.domain, Box)

    @cached_property
    def _one_point(self) -> OnePoint:
        rule = self.outside if self._direct else "allow"
        return OnePoint(self.head, self.certificate.semantics, self.target.box, rule)

    def with_outside(self, outside: str) -> Compiled:
        """The same head with another rule for inputs outside the domain.

        Args:
            outside: "raise", "clamp" or "allow".

        >>> import partita as pa
        >>> c = pa.compile("2*x", pa.Box([0], [1]), tolerance=0.15, method="hard")
        >>> bool(c.with_outside("clamp")([7.0]) == c([1.0]))
        True
        """
        return replace(self, outside=outside)

    def with_sharpness(
        self, sharpness: float | Sequence[float], *, progress: Progress | None = None, seed: int = 0
    ) -> Compiled:
        """The same head, with the same centers and values, at another temperature, certified again.

        `κ = R h²`, h the spacing of the centers on an axis. No tolerance is needed: the certificate states the bound that the head
        has at this temperature. *Theorem*: `chosen-temperature`.

        Args:
            sharpness: κ > 0, one number or one per axis.
            progress: called as `progress(what, done, of)`.
            seed: random seed of the attack on the head.

        Raises:
            UnsupportedError: κ is not a number > 0, the centers are not on a grid, this is a network of heads, the head was changed
                after it was certified, or the claim needs a black box that is not stored with the head.

        >>> import partita as pa
        >>> c = pa.head("sin(3*x)", pa.Box([-1], [1]), keys=8, sharpness=2.0)
        >>> [f"{c.with_sharpness(k).error_bound:.2f}" for k in (0.5, 2.0, 64.0)]
        ['0.54', '0.41', '0.35']
        """
        head = require_folded(self.require_unchanged().head, "with_sharpness()")
        made = head_at(head, self.certificate, self.target, sharpness, seed=seed, progress=progress)
        found = made.construction
        return replace(
            self,
            head=found.head,
            partition=found.partition,
            certificate=found.certificate,
            why=made.why,
            candidates=made.candidates,
        )

    def layers(
        self, form: str = "indexed", *, dtype: torch.dtype | None = None, tolerance: float | None = None
    ) -> SelfNetwork | CrossNetwork:
        """The same head as the paper writes it: a Linear layer and an attention layer in one module, every tensor named.

        Its `error_bound` is proved for these layers as they run, in the norm of the certificate: `‖f − head‖ + ‖head − layers‖`.
        The second is `rounding`, of this form and dtype. The bound is infinite where the head's own error is an estimate;
        `rounding` is proved even then.

        Args:
            form: "indexed" (ours) or "log" (the paper's).
            dtype: of the layers, `torch.float64` or `torch.float32`; that of the head if None.
            tolerance: the largest error bound to accept; the tolerance that the head was compiled with if None, and any if it
                was compiled without one (`pa.head`). `math.inf` accepts any.

        Raises:
            ToleranceError: the error bound exceeds the tolerance.
            SizeError: the tensors would be too large.
            UnsupportedError: there is no such form of this head, this is a network of heads (see `c.head.as_attention()`), or a
                tensor was changed after it was certified.

        >>> import partita as pa
        >>> c = pa.compile("2*x", pa.Box([0], [1]), tolerance=0.15, method="hard")
        >>> layers = c.layers("log")
        >>> type(layers).__name__, c.error_bound < layers.error_bound < 0.15
        ('SelfNetwork', True)
        """
        if dtype is not None:
            require_dtype(dtype)
        certificate = self.require_unchanged().certificate
        if isinstance(self.head, AttentionNetwork):
            raise UnsupportedError(
                "layers(): found a network of heads; the papers' forms are those of a single head",
                "Use c.head.as_attention(), one nn.MultiheadAttention for each layer.",
            )
        head = require_folded(self.head, "layers()")
        proof = PROOFS.get(str(certificate.proof.get("method")))
        return claim_layers(
            literal_layers(head, form, dtype),
            head,
            certificate.terms,
            self.target.box,
            tolerance=certificate.limit if tolerance is None else tolerance,
            norm=certificate.norm,
            estimate=certificate.error_estimate,
            mean_distance=math.inf if proof is None else proof.mean_distance_in(certificate.proof),
        )

    def explain(self) -> str:
        """Why the head has these sizes, and what is claimed on which grounds, as text.

        For a network of heads: also what each head is for, its own error, and what that adds to the bound.

        Raises:
            UnsupportedError: the head was changed after it was certified.

        >>> import partita as pa
        >>> c = pa.compile("2*x", pa.Box([0], [1]), tolerance=0.15, method="hard")
        >>> print(c.explain().splitlines()[0])
        7 keys
        """
        asked = f"f was evaluated {self.evaluations:,} times in all" if self.evaluations else ""
        certificate = self.require_unchanged().certificate
        budget = budget_text(self.head, certificate) if isinstance(self.head, AttentionNetwork) else ""
        lines = [*self.why, asked, budget, certificate.explain()]
        return "\n".join(line for line in lines if line)

    def card(self, *, onnx: str | None = "head.onnx", c: str | None = None, outside: str = "allow") -> str:
        """The claim as Markdown for people who get the head: the function and its domain, what is proved or estimated with its
        terms and assumptions, inputs and outputs, code that runs the head, and how to check it.

        Args:
            onnx: the name of the ONNX file in the code, or None if there is none.
            c: NAME of the C function `NAME_eval`, if there is a C file.
            outside: what the files do with inputs outside the domain, see `export_onnx`.

        Raises:
            UnsupportedError: the head was changed after it was certified, or the domain does not allow such a rule.

        >>> import partita as pa
        >>> c = pa.compile("2*x", pa.Box([0], [1]), tolerance=0.15, method="hard")
        >>> print(c.card().split("## ")[1].splitlines()[2])
        **Proved:** on the whole domain no output differs from the function by more than 0.142858. Rounding is included.
        """
        certificate = self.require_unchanged().certificate
        return claim_card(self.head, self.target, certificate, onnx=onnx, c=c, outside=outside)

    def report(self) -> str:
        """A table of every candidate with keys, stored numbers, largest value, rounding and error. An arrow marks this head.

        Then one head, several heads and several layers side by side, and one sentence why this one was chosen.

        >>> import partita as pa
        >>> c = pa.compile("2*x", pa.Box([0], [1]), tolerance=0.15, method="hard")
        >>> c.report().splitlines()[0].split()
        ['method', 'claim', 'keys', 'stored', 'numbers', 'max', '|V|', 'rounding', 'error']
        """
        if not self.candidates:
            return (
                "There are no other methods to show: files do not store them, and converted networks have none. "
                "Compile it again to compare them."
            )
        left_out = self.certificate.excluded
        return report(self.candidates, built=True) + (f"\n{left_out}" if left_out else "")

    def attack(self, *, samples: int = 4096, seed: int = 0, function: Any = None) -> Witness:
        """The worst error found by a search over random points, corners, cell corners and a local search: a lower estimate.

        Args:
            samples: random points.
            seed: random seed.
            function: the black box that was compiled, if the head was loaded from a file (see `with_function`).

        >>> import partita as pa
        >>> c = pa.compile("2*x", pa.Box([0], [1]), tolerance=0.15, method="hard")
        >>> c.attack(samples=256).error <= c.error_bound
        True
        """
        target = self.target if function is None else self.with_function(function).target
        error = partial(errors_at, self.head, target)
        return search_worst(error, self.target.domain, partition=self.partition, samples=samples, seed=seed)

    def errors_at(self, points: np.ndarray, *, function: Any = None) -> np.ndarray:
        """`|f − head|_∞` at points, `(n,)`. For an expression the error of evaluating f in float64 is subtracted.
        With on_error="exclude", NaN where f fails.

        Args:
            points: flat points, `(n, m)`.
            function: the black box that was compiled, if the head was loaded from a file (see `with_function`).

        >>> import partita as pa
        >>> c = pa.compile("2*x", pa.Box([0], [1]), tolerance=0.15, method="hard")
        >>> bool(c.errors_at(np.array([[0.5]]))[0] <= c.error_bound)
        True
        """
        target = self.target if function is None else self.with_function(function).target
        return errors_at(self.head, target, points)

    def with_function(self, function: Any, *, vectorize: bool = False) -> Compiled:
        """The same head with the black box that it approximates, or the table that it was fitted to, which files do not store.

        The function is called at a few points: its values must have the right shape, and be those that the certificate holds.
        Of a table the certificate holds the hash.

        Args:
            function: the function or the table that was compiled.
            vectorize: call it once per point, for functions that do not take batches.

        Raises:
            AnotherFunctionError: its values are not those of the function that was compiled.
            ShapeError: its values have another shape.
            UnsupportedError: the head's function is an expression, which is stored with the head.

        >>> import partita as pa, tempfile, pathlib
        >>> def f(z):
        ...     return np.sin(3 * z[:, 0])
        >>> c = pa.compile(f, pa.Box([0], [1]), tolerance=0.1, lipschitz=3.0)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     loaded = pa.load(c.save(pathlib.Path(folder) / "head"))
        >>> bool(loaded.with_function(f).errors_at(np.array([[0.5]]))[0] <= c.error_bound)
        True
        """
        if self.target.is_table:
            return replace(self, table=require_same_table(function, self.certificate.function))
        return replace(
            self, target=given_function(self.target, self.head, self.certificate, function, vectorize=vectorize)
        )

    def bound_range(self, *, progress: Progress | None = None) -> tuple[Range, ...]:
        """Proved lower and upper bounds of each output on the domain, for the head as it runs.

        Args:
            progress: called as `progress(what, done, of)`.

        Raises:
            UnsupportedError: the domain is a point cloud.

        >>> import partita as pa
        >>> c = pa.compile("sin(3*x)", pa.Box([-1], [1]), tolerance=1e-3)
        >>> -1.01 < c.bound_range()[0].lo <= -0.999
        True
        """
        self._bounded_domain()
        if isinstance(self.head, AttentionNetwork):
            return network_range(self.head, self.target, self.require_unchanged().certificate)
        found = bound_range(require_folded(self.head, "bound_range()"), self.target, progress=progress)
        proved = self.certificate.kind == "proved" and self.certificate.norm == "inf" and self._direct
        if isinstance(self.head, GridHead) or not proved or self.is_changed or self.target.graph is None:
            return found
        claimed = claimed_range(self.target, self.certificate)  # where keys lie far apart their values say little
        ends = zip(found, claimed.lo.tolist(), claimed.hi.tolist())
        return tuple(replace(own, lo=max(own.lo, low), hi=min(own.hi, high)) for own, low, high in ends)

    def bound_gradient_error(self, *, progress: Progress | None = None) -> GradientError:
        """Proved bounds of `|∂head/∂z_i − ∂f/∂z_i|`, one per coordinate, for the stored tensors in exact arithmetic.

        Args:
            progress: called as `progress(what, done, of)`.

        Raises:
            UnsupportedError: the domain is a point cloud, or f is a black box.

        >>> import partita as pa
        >>> c = pa.compile("sin(3*x)", pa.Box([-1], [1]), tolerance=1e-3)
        >>> c.bound_gradient_error().bounds[0] < 0.05
        True
        """
        self._bounded_domain()
        if isinstance(self.head, AttentionNetwork):
            certificate = self.require_unchanged().certificate
            return network_gradient_error(self.head, self.target, certificate, progress=progress)
        return bound_gradient_error(require_folded(self.head, "bound_gradient_error()"), self.target, progress=progress)

    def bound_slope(self, axis: int, *, progress: Progress | None = None) -> tuple[Range, ...]:
        """Proved lower and upper bounds of `∂head/∂z_axis`, one per output. `.trend` says whether the head rises or falls.

        Args:
            axis: flat coordinate, counted from 0.
            progress: called as `progress(what, done, of)`.

        Raises:
            UnsupportedError: the domain is a point cloud, or there is no such axis.

        >>> import partita as pa
        >>> pa.compile("tanh(x)", pa.Box([-1], [1]), tolerance=1e-3).bound_slope(0)[0].trend
        'increasing'
        """
        domain = self._bounded_domain()
        if isinstance(self.head, AttentionNetwork):
            certificate = self.require_unchanged().certificate
            return network_slope(self.head, self.target, certificate, axis, progress=progress)
        return bound_slope(require_folded(self.head, "bound_slope()"), domain, axis, progress=progress)

    def _bounded_domain(self) -> Box | Region:
        if isinstance(self.target.domain, PointCloud):
            raise UnsupportedError(
                f"the domain is {self.target.domain}; ranges and slopes are proved over a Box or a Region only."
            )
        return self.target.domain

    @classmethod
    def of_network(cls, network: ConvertedNetwork) -> Compiled:
        """A converted network as what `compile` returns: to save it, recheck it, attack it, plot it, export it.

        Args:
            network: from `pa.attention_from_mlp`.

        >>> import partita as pa, tempfile, pathlib
        >>> mlp = torch.nn.Sequential(torch.nn.Linear(2, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1))
        >>> c = pa.Compiled.of_network(pa.attention_from_mlp(mlp, pa.Box([-1, -1], [1, 1]), 1e-3))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     pa.load(c.save(pathlib.Path(folder) / "network")).error_bound <= 1e-3
        True
        """
        plain = AttentionNetwork(
            network.parts,
            network.wiring,
            dtype=network.dtype,
            input_shapes=network.input_shapes,
            output_shape=network.output_shape,
        )
        return cls(plain, None, network.certificate, network.target)

    def save(self, folder: str | os.PathLike[str], *, overwrite: bool = False) -> Path:
        """Write `head.safetensors`, `head.json` and `certificate.json` (docs/format.md) to a folder, all of them or none.

        Args:
            folder: where to write. Parents are created.
            overwrite: replace a folder that exists.

        Raises:
            AlreadyExistsError: the folder exists and overwrite is False.
            UnsupportedError: the head was changed after it was certified.

        >>> import partita as pa, tempfile, pathlib
        >>> c = pa.compile("2*x", pa.Box([0], [1]), tolerance=0.15, method="hard")
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     pa.load(c.save(pathlib.Path(folder) / "head")).error_bound == c.error_bound
        True
        """
        return storage.save(
            self.head, self.certificate, self.target, folder, outside=self.outside, why=self.why, overwrite=overwrite
        )

    def export_onnx(self, path: str | os.PathLike[str], *, outside: str = "allow") -> Path:
        """Write the head as an ONNX file with a dynamic batch axis. Inputs and outputs have the dtype of the head.

        onnxruntime reproduces the head within the rounding terms of the certificate. The file's description (`doc_string`) is
        `card()`, for people; its metadata (`metadata_props`) is for programs:
        `partita.function`, `.domain` (JSON), `.kind`, `.norm`, `.tolerance`, `.dtype`, `.outside`, `.error_bound` where it is
        proved, `.error_estimate` where it was sampled, and `.certificate_sha256`, the hash of the saved `certificate.json`.

        Args:
            path: the file to write.
            outside: what the file does with inputs outside the domain: "allow" computes a value that the certificate does not
                cover, "clamp" moves them to the nearest point of the box, "mark" returns NaN.

        Raises:
            MissingExtraError: the `onnx` extra is not installed.
            UnsupportedError: the head was changed after it was certified, or the domain does not allow such a rule: "clamp" is
                for boxes, "mark" for boxes and regions.
        """
        self.require_unchanged()
        said = storage.onnx_metadata(self.certificate, self.target)
        told = self.card(onnx=Path(path).name, outside=outside)
        return storage.export_onnx(
            self.head, path, domain=self.target.domain, outside=outside, metadata=said, description=told
        )

    def export_c(self, path: str | os.PathLike[str], *, name: str | None = None, outside: str = "allow") -> Path:
        """Write the head as one C99 file with a function `void NAME_eval(const double *in, double *out)`, `float` in float32.

        The file needs no library, allocates nothing and keeps no state. Its comment holds the certificate, whose bound covers the
        C: its loops round no more than the certificate counts. Compiled with `-DNAME_SELFTEST` (in capitals) it is a program
        that compares itself with the head.

        Args:
            path: the file to write.
            name: NAME, up to 63 letters, digits and underscores; the stem of the file if None.
            outside: as for `export_onnx`; "clamp" and "mark" are for boxes.

        Raises:
            UnsupportedError: the head was changed after it was certified, a name that C does not take, a rule that the domain
                does not allow, or a head in half precision.
            SizeError: more than 2²¹ numbers, or more local arrays than a stack should hold.

        >>> import partita as pa, tempfile, pathlib
        >>> c = pa.compile("sin(x)", "[0,1]", tolerance=1e-6)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     text = c.export_c(pathlib.Path(folder) / "sine.c").read_text()
        >>> "void sine_eval(const double *in, double *out)" in text
        True
        """
        self.require_unchanged()
        return storage.export_c(
            self.head, path, certificate=self.certificate, target=self.target, name=name, outside=outside
        )

    def _inside(self, flat: Tensor) -> Tensor:
        domain = self.target.domain
        if self._all_inside(flat):
            return flat
        points = flat.detach().cpu().numpy()
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
            f"{points[row].tolist()}; the certificate does not cover them",
            "To get values there, compile with outside='clamp' or outside='allow', or use c.with_outside(…).",
        )

    def _all_inside(self, flat: Tensor) -> bool:
        """Whether all points are finite and lie in the box, from the least and the largest number of each column."""
        if flat.device.type != "cpu" and len(flat):
            least, largest = (end.cpu().numpy() for end in torch.aminmax(flat.detach(), dim=0))
        else:
            least, largest = column_ranges(flat.detach().cpu().numpy())
        if self.outside == "allow":
            return bool((least > -math.inf).all() and (largest < math.inf).all())
        domain = self.target.domain
        return isinstance(domain, Box) and bool(
            (least >= domain.lo.ravel()).all() and (largest <= domain.hi.ravel()).all()
        )

    def __repr__(self) -> str:
        c, keys = self.certificate, f"{count_text(self.num_keys)} key{'' if self.num_keys == 1 else 's'}"
        if self.is_changed:
            return f"Compiled({self.target.label!r}: {keys}, changed after it was certified: the certificate does not apply)"
        return f"Compiled({self.target.label!r}: {keys}, {c.kind} error {c.claim} in L{c.norm}, {c.semantics})"

    def _repr_html_(self) -> str:
        c, seen = self.certificate, self.certificate.witness
        asked = f"tolerance {c.tolerance:g}" if c.has_tolerance else "no tolerance was set"
        claim = f"{c.kind}: {'sup' if c.norm == 'inf' else f'L{c.norm}'} error {c.claim} ({asked})"
        facts = {
            "function": self.target.label,
            "domain": " and ".join(str(d) for d in self.target.domains),
            "claim": "changed after it was certified: the certificate does not apply" if self.is_changed else claim,
            "worst error seen": None if seen is None else f"{seen.error:.4g}",
            "keys": count_text(self.num_keys),
            "stored numbers": f"{self.num_parameters:,} ({c.semantics})",
            "evaluations of f": f"{self.evaluations:,}" if self.evaluations else None,
        }
        columns, *rows = candidate_rows(self.candidates, built=True)
        because = next((row.because for row in self.candidates if row.chosen), "")
        what = "Compiled network of heads" if isinstance(self.head, AttentionNetwork) else "Compiled head"
        return card(what, facts, columns=columns, rows=rows, note=because)


def load(folder: str | os.PathLike[str]) -> Compiled:
    """A head that `Compiled.save` wrote, with every hash, shape and number checked.

    Expressions are restored. Black boxes come back without their function: give it to `with_function`, or as `function=`.

    Args:
        folder: the folder that `Compiled.save` wrote.

    Raises:
        FormatError: a file is missing, cut short, changed, or of a newer version.

    >>> import partita as pa, tempfile, pathlib
    >>> c = pa.compile("2*x", pa.Box([0], [1]), tolerance=0.15, method="hard")
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     pa.load(c.save(pathlib.Path(folder) / "head")).num_keys == c.num_keys
    True
    """
    head, certificate, target, outside, why = storage.load_parts(folder)
    return Compiled(head, head.partition(target.box), certificate, target, outside, why)
