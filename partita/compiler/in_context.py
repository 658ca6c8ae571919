"""Learning in context: gradient descent on the examples in a prompt, and functions read from one; saving and loading.

w ← w − η(1/n Σ_i ∂ℓ/∂s(w·x_i, y_i) x_i + λw),   s = w·x
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from partita.arithmetic.arguments import require_dtype
from partita.arithmetic.interval import Interval
from partita.arithmetic.precision import Precision
from partita.errors import DomainError, FormatError, PartitaError, ShapeError, TamperedFileError, TruncatedFileError
from partita.functions.graph import Graph
from partita.geometry.domains import Array, Box, BoxLike
from partita.networks.descent import Descent
from partita.networks.descent_layer import DescentLayer
from partita.networks.drift import StepFacts
from partita.networks.losses import LossSlope, loss_slope
from partita.networks.prompt_functions import PromptFunction, function
from partita.networks.tables import TableGrid
from partita.proofs.certificate import Certificate, model_digest
from partita.proofs.claim import require_ordinary
from partita.storage.loading import read_json, read_sealed, read_tensors
from partita.storage.saving import CERTIFICATE, canonical, whole_folder, write_sealed

__all__ = ["GradientDescent", "PromptFunction", "function", "gradient_descent", "load"]

_FORMAT, _VERSION = "partita-descent", 1
_TENSORS, _DESCRIPTION = "descent.safetensors", "descent.json"


class GradientDescent(Descent):
    """T steps of gradient descent as T attention layers that share their tensors, for prompts of any length.

    A prompt `(…, n, d + 1)` holds tokens `[x_i, y_i]`; the network returns the last w, `(…, d)`. Outside a trace, prompts
    are checked against the boxes of x and y, and iterates against the box of w.

    Attributes:
        layer: the attention layer, applied once per step.
        slope: what is known about the loss's slope.
        facts: step size, ridge, ε and the sizes that the bounds use.
        boxes: the boxes of x, y and w, kept as `x_box`, `y_box` and `w_box`.
        steps: T.

    >>> box = Box([-1], [1])
    >>> gd = gradient_descent("squared", 3, 0.5, x=box, y=box, w=Box([-2], [2]))
    >>> gd.trajectory([[1.0, 0.5], [-1.0, -0.5]]).shape
    torch.Size([4, 1])
    >>> [term.name for term in gd.certificate_for(2).terms]
    ['softmax difference', 'rounding']
    """

    def save(self, folder: str | os.PathLike[str], *, examples: int, overwrite: bool = False) -> Path:
        """Write `descent.safetensors`, `descent.json` and `certificate.json` (docs/format.md) to a folder, all or none.

        `partita-check` verifies the folder without partita.

        Args:
            folder: where to write. Parents are created.
            examples: the certificate is about prompts of at most so many examples.
            overwrite: replace a folder that exists.

        Raises:
            AlreadyExistsError: the folder exists and overwrite is False.
            UnsupportedError: a tensor was changed after the network was built.
            ToleranceError: there is no finite bound to save.

        >>> import partita as pa, tempfile, pathlib
        >>> box = pa.Box([-1], [1])
        >>> gd = pa.in_context.gradient_descent("squared", 3, 0.5, x=box, y=box, w=pa.Box([-2], [2]))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     again = pa.in_context.load(gd.save(pathlib.Path(folder) / "descent", examples=10))
        >>> again.error_bound_for(10) == gd.error_bound_for(10)
        True
        """
        certificate = self.certificate_for(examples)
        files: dict[str, Any] = {_TENSORS: self.state_dict(), CERTIFICATE: canonical(certificate.to_json())}
        description = {"format": _FORMAT, "version": _VERSION, "model": self.record()}
        with whole_folder(folder, overwrite=overwrite, marker=_DESCRIPTION, kind="a descent") as draft:
            write_sealed(draft, _DESCRIPTION, description, files)
        return Path(folder)


def load(folder: str | os.PathLike[str]) -> GradientDescent:
    """A network that `GradientDescent.save` wrote, with every hash, shape and number checked.

    The bound on the loss's slope, and the range of its curvature, are read from the certificate; `partita-check` proves them
    again.

    Args:
        folder: the folder that `GradientDescent.save` wrote.

    Raises:
        FormatError: a file is missing, cut short, changed, or of a newer version.

    >>> import partita as pa, tempfile, pathlib
    >>> box = pa.Box([-1], [1])
    >>> gd = pa.in_context.gradient_descent("logistic", 3, 0.5, x=box, y=pa.Box([0], [1]), w=pa.Box([-2], [2]))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     pa.in_context.load(gd.save(pathlib.Path(folder) / "descent", examples=10)).steps
    3
    """
    place = Path(folder)
    if not place.is_dir():
        found = "is not a folder" if place.exists() else "does not exist"
        raise TruncatedFileError(
            f"{place} {found}; expected a folder with {_TENSORS}, {_DESCRIPTION} and {CERTIFICATE}."
        )
    try:
        described = read_sealed(
            place, _DESCRIPTION, format=_FORMAT, newest=_VERSION, tensors=_TENSORS, others=(CERTIFICATE,)
        )
        certificate = Certificate.from_json(read_json(place / CERTIFICATE))
        gd = _rebuilt(described["model"], certificate, read_tensors(place / _TENSORS))
        _require_agreement(place, gd, certificate)
    except FormatError:
        raise
    except (
        PartitaError, LookupError, TypeError, ValueError, AttributeError, RuntimeError, OSError, OverflowError,
    ) as error:  # fmt: skip
        raise FormatError(
            f"{place} does not contain a valid descent (see docs/format.md): {type(error).__name__}: {error}"
        ) from None
    return gd


def _rebuilt(model: Mapping[str, Any], certificate: Certificate, tensors: Mapping[str, Tensor]) -> GradientDescent:
    """The network that the files describe, built anew from its claim and the numbers of its table."""
    function, dtype = certificate.function, tensors["initial"].dtype
    require_dtype(dtype)
    x, y, w = (Box(*(np.reshape(b[end], b["shape"]) for end in ("lo", "hi"))) for b in certificate.domain["arguments"])
    step_size, ridge, epsilon = function["step_size"], function["ridge"], certificate.facts["epsilon"]
    start = _validated(x, y, w, model["steps"], step_size, ridge, function["initial"], function["examples"])
    slope = _read_slope(certificate, {name: t.double().numpy() for name, t in tensors.items()})
    facts = _facts((x, y, w), start, step_size, ridge, epsilon, dtype)
    layer = DescentLayer(slope, x.dimension, step_size=step_size, ridge=ridge, epsilon=epsilon, dtype=dtype)
    gd = GradientDescent(layer, slope, facts, (x, y, w), steps=model["steps"])
    if model_digest(gd.state_dict()) != model_digest(tensors):
        raise TamperedFileError(f"{_TENSORS}: the tensors are not those of the descent that {CERTIFICATE} describes.")
    return gd


def _read_slope(certificate: Certificate, tensors: Mapping[str, Array]) -> LossSlope:
    """The loss's slope: its keys from the tensors, where it has any, and what is proved about it from the certificate."""
    function, proof, table = certificate.function, certificate.proof, certificate.proof.get("table")
    keys: dict[str, Any] = {
        "slopes": np.zeros((0, 2)),
        "offsets": np.zeros(0),
        "values": np.zeros(0),
        "direct": np.array([1.0, -1.0]),
    }
    if table is not None:
        keys = {
            "slopes": np.stack([tensors["layer.key_slopes"][0], tensors["layer.key_labels"][-1]], axis=1),
            "offsets": tensors["layer.key_offsets"],
            "values": tensors["layer.table"][:, 0],
            "direct": np.array([0.0, tensors["layer.direct"][-1, 0]]),
            "grid": TableGrid(*(tuple(table[name]) for name in ("counts", "rates", "middle"))),
        }
    low, high = proof["curvature"]
    return LossSlope(
        name=str(function["text"]),
        graph=Graph.from_json(function["graph"]),
        error=proof["slope_error"],
        curvature=(low, high),
        largest=proof["largest_slope"],
        **keys,
    )


def _require_agreement(place: Path, gd: GradientDescent, certificate: Certificate) -> None:
    """A TamperedFileError unless certificate.json says what the network that was read says of itself."""
    own = gd.certificate_for(certificate.function["examples"])
    for name in ("kind", "norm", "semantics", "function", "domain", "model"):
        if getattr(own, name) != getattr(certificate, name):
            raise TamperedFileError(f"{place / CERTIFICATE}: its {name} is not that of the network in the other files.")
    if not math.isclose(own.error_bound, certificate.error_bound, rel_tol=1e-9):
        raise TamperedFileError(
            f"{place / CERTIFICATE}: error_bound is {certificate.error_bound:.6g}; its own figures give {own.error_bound:.6g}."
        )


def _facts(
    boxes: tuple[Box, Box, Box], start: Array, step_size: float, ridge: float, epsilon: float, dtype: torch.dtype
) -> StepFacts:
    reach = [np.maximum(np.abs(b.lo), np.abs(b.hi)).ravel() for b in boxes]
    return StepFacts(
        step_size=float(step_size),
        ridge=float(ridge),
        epsilon=epsilon,
        unit_roundoff=Precision.of(dtype).unit,
        initial=start,
        reach_x=reach[0],
        reach_y=float(reach[1][0]),
        reach_w=reach[2],
    )


def gradient_descent(
    loss: str,
    steps: int,
    step_size: float,
    *,
    x: BoxLike,
    y: BoxLike,
    w: BoxLike,
    ridge: float = 0.0,
    initial: ArrayLike | None = None,
    prompt_length: int = 10_000,
    epsilon: float | None = None,
    table_tolerance: float | None = None,
    dtype: torch.dtype = torch.float64,
) -> GradientDescent:
    """An attention-only network that performs `steps` steps of gradient descent on the examples in its prompt.

    `w ← w − η(1/n Σ_i ∂ℓ/∂s(w·x_i, y_i)x_i + λw)`. Drift from exact gradient descent: `e ← ρe + τ`, where ρ is the
    contraction of an exact step and `τ = η(ε²[mean(|r|³|x|)/6 + |g| mean(r²)/2] cosh(ε max|r|) + table + rounding/ε)`.
    ε balances the first term against the last.

    *Theorem*: `descent-step`, `descent-drift`.

    Args:
        loss: "squared" ((s − y)²/2), "ridge" (the same, with ridge=λ), "logistic" (log(1 + e^s) − ys, y in [0, 1]), or an
            expression of class C¹ in s and y, or in the residual r = s − y.
        steps: T, the number of steps, at least 1.
        step_size: η > 0.
        x: box of the features, `(d,)`.
        y: box of the targets, `(1,)`.
        w: box of the iterates, `(d,)`. The bounds hold while the iterates stay inside.
        ridge: λ ≥ 0.
        initial: w_0, `(d,)`; zeros by default.
        prompt_length: the number of examples that ε is chosen for.
        epsilon: ε > 0; chosen automatically by default.
        table_tolerance: error allowed of a loss slope that is tabulated; chosen automatically by default.
        dtype: dtype of the network, torch.float64 or torch.float32.

    Returns:
        A `GradientDescent` network.

    Raises:
        DomainError: steps < 1, step_size ≤ 0, or a start outside the box of w.
        ShapeError: the boxes' shapes do not fit.
        NotContinuousError: the loss is not C¹.

    >>> import partita as pa
    >>> box = pa.Box([-1], [1])
    >>> gd = pa.in_context.gradient_descent("squared", 3, 0.5, x=box, y=box, w=pa.Box([-2], [2]))
    >>> gd(torch.tensor([[1.0, 0.5], [-1.0, -0.5]], dtype=torch.float64)).shape, gd.error_bound_for(2) < 1e-6
    (torch.Size([1]), True)
    """
    x, y, w = Box.of(x), Box.of(y), Box.of(w)
    start = _validated(x, y, w, steps, step_size, ridge, initial, prompt_length)
    require_dtype(dtype)
    if loss == "logistic" and (float(y.lo.min()) < 0 or float(y.hi.max()) > 1):
        raise DomainError(f"loss 'logistic': y is in [{y.lo.item():g}, {y.hi.item():g}]; expected labels in [0, 1].")
    if loss == "ridge" and not ridge > 0:
        raise DomainError("loss 'ridge' needs ridge=λ with λ > 0; use loss='squared' for λ = 0.")
    if epsilon is not None and not 0 < epsilon < math.inf:
        raise DomainError(f"epsilon is {epsilon!r}; expected a finite number > 0.")
    x, y, w = (box.widened(Precision.of(dtype)) for box in (x, y, w))
    features = Interval(x.lo, x.hi) * Interval(w.lo, w.hi)
    pad = 1e-12 * features.magnitude.sum() + 1e-300  # covers the rounding of the sums
    s = Interval(features.lo.sum() - pad, features.hi.sum() + pad)
    slope = loss_slope("squared" if loss == "ridge" else loss, s, Interval(y.lo[0], y.hi[0]), table_tolerance)
    slope = slope.stored(Precision.of(dtype))
    facts = _facts((x, y, w), start, step_size, ridge, 1.0, dtype)
    facts = facts.with_epsilon(facts.best_epsilon(slope, prompt_length) if epsilon is None else float(epsilon))
    require_ordinary(dtype, epsilon=facts.epsilon, step_size_over_epsilon=step_size / facts.epsilon)
    require_ordinary(
        dtype, largest_number=1 + facts.norm_x * (1 + float(np.linalg.norm(facts.reach_w))) + facts.reach_y
    )
    layer = DescentLayer(slope, x.dimension, step_size=step_size, ridge=ridge, epsilon=facts.epsilon, dtype=dtype)
    return GradientDescent(layer, slope, facts, (x, y, w), steps=steps)


def _validated(
    x: Box, y: Box, w: Box, steps: int, step_size: float, ridge: float, initial: ArrayLike | None, prompt_length: int
) -> Array:
    if not all(isinstance(box, Box) for box in (x, y, w)):
        raise DomainError(f"x, y and w are {x!r}, {y!r} and {w!r}; expected boxes, say pa.Box([-1, -1], [1, 1]).")
    if x.lo.ndim != 1 or w.shape != x.shape or y.shape != (1,):
        raise ShapeError(f"x, y and w have shapes {x.shape}, {y.shape} and {w.shape}; expected (d,), (1,) and (d,).")
    if not (isinstance(steps, int) and steps >= 1 and prompt_length >= 1):
        raise DomainError(f"steps is {steps!r}, prompt_length is {prompt_length!r}; expected integers ≥ 1.")
    if not (0 < step_size < math.inf and 0 <= ridge < math.inf):
        raise DomainError(
            f"step_size is {step_size!r}, ridge is {ridge!r}; expected finite numbers, step_size > 0, ridge ≥ 0."
        )
    start = np.zeros(x.dimension) if initial is None else np.asarray(initial, dtype=np.float64)
    if start.shape != x.shape or not w.contains(start[None]).all():
        raise DomainError(f"initial is {start.tolist()}; expected a point of the box of w, {w}.")
    return start
