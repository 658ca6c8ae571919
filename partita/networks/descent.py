"""Gradient descent on the examples in a prompt: the network, its bounds and its certificate.

w ← w − η(1/n Σ_i ∂ℓ/∂s(w·x_i, y_i) x_i + λw),   s = w·x
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from partita.arithmetic.precision import Precision
from partita.errors import DomainError, OutsideDomainError, ShapeError, ToleranceError, UnsupportedError
from partita.geometry.domains import Array, Box
from partita.heads.head import real_tensor
from partita.kernels.guards import certified
from partita.kernels.trace_modes import is_traced
from partita.moved import renamed
from partita.networks.descent_layer import DescentLayer
from partita.networks.drift import CAUSES, Drift, StepFacts
from partita.networks.losses import LossSlope
from partita.proofs.certificate import Certificate, Source, Term, model_digest, total
from partita.proofs.claim import claim

__all__ = ["Descent"]

# per cause of `CAUSES`: what is carried over the steps, the theorem that bounds it, and its source
_TERMS: tuple[tuple[str, str, Source], ...] = (
    ("Σρ^t·η·ε²(2/3)r³|x|·cosh(εr)", "descent-step", "approximation"),
    ("Σρ^t·η|x|·(error of the table)", "descent-step", "approximation"),
    (
        "Σρ^t·(η|x|·(rounding of r) + (2δ + σ/(1 − σ)²)η|x|/ε + (d + 6)u|w|(1 + ηλ)), σ = (2n(1 + εr) + 2d + 16)u",
        "descent-step",
        "rounding",
    ),
    ("ρ^T·u|w_0|", "descent-drift", "storage"),
)


class Descent(nn.Module):
    """T steps of gradient descent as T attention layers that share their tensors, for prompts of any length.

    `pa.in_context.gradient_descent` builds them; `pa.in_context.GradientDescent` adds saving.

    A prompt `(…, n, d + 1)` holds tokens `[x_i, y_i]`; the network returns the last w, `(…, d)`. Outside a trace, prompts
    are checked against the boxes of x and y, and iterates against the box of w.

    Attributes:
        layer: the attention layer, applied once per step.
        slope: what is known about the loss's slope.
        facts: step size, ridge, ε and the sizes that the bounds use.
        boxes: the boxes of x, y and w, kept as `x_box`, `y_box` and `w_box`.
        steps: T.
    """

    initial: Tensor

    def __init__(
        self, layer: DescentLayer, slope: LossSlope, facts: StepFacts, boxes: tuple[Box, Box, Box], *, steps: int
    ) -> None:
        super().__init__()
        self.layer, self.slope, self.facts, self.steps = layer, slope, facts, steps
        self.x_box, self.y_box, self.w_box = boxes
        self.dim = self.x_box.dimension
        self.register_buffer("initial", torch.tensor(facts.initial, dtype=layer.mirror.dtype))

    @property
    def dtype(self) -> torch.dtype:
        """dtype of the network."""
        return self.initial.dtype

    def extra_repr(self) -> str:
        """Steps, loss, ridge and ε, for `print(network)`."""
        f = self.facts
        return f"{self.steps} steps of {f.step_size:g}, loss {self.slope.name}, ridge {f.ridge:g}, ε = {f.epsilon:.3g}"

    def forward(self, prompt: Tensor) -> Tensor:
        """The last iterate, `(…, d)`.

        Args:
            prompt: tokens `[x_i, y_i]`, `(…, n, d + 1)`.

        Raises:
            ShapeError: tokens of another width.
            OutsideDomainError: an example or an iterate leaves its box.
        """
        if is_traced(prompt):  # (batch, examples, d + 1), in the network's dtype
            return self._iterates(prompt)[-1].squeeze(1)
        return self.trajectory(prompt)[..., -1, :]

    def trajectory(self, prompt: Any) -> Tensor:
        """Every iterate, `(…, steps + 1, d)`, the start included.

        Args:
            prompt: tokens `[x_i, y_i]`, `(…, n, d + 1)`.

        Raises:
            ShapeError: tokens of another width.
            OutsideDomainError: an example or an iterate leaves its box.
        """
        prompt = self._checked(prompt)
        found = self._iterates(prompt.reshape(-1, *prompt.shape[-2:]))
        iterates = torch.cat([found[0].expand_as(found[-1]), *found[1:]], dim=1)
        self._require_inside(iterates)
        return iterates.reshape(*prompt.shape[:-2], self.steps + 1, self.dim)

    def exact(self, prompt: Any) -> Array:
        """The iterates of gradient descent computed directly in float64, `(…, steps + 1, d)`, for comparison.

        Args:
            prompt: tokens `[x_i, y_i]`, `(…, n, d + 1)`.
        """
        examples = self._checked(prompt).double().numpy()
        x, y = examples[..., : self.dim], examples[..., self.dim]
        w = np.broadcast_to(self.facts.initial, (*x.shape[:-2], self.dim)).copy()
        found = [w]
        for _ in range(self.steps):
            r = self.slope.exact(np.einsum("...nd,...d->...n", x, w), y)
            gradient = np.einsum("...n,...nd->...d", r, x) / x.shape[-2] + self.facts.ridge * w
            w = w - self.facts.step_size * gradient
            found.append(w)
        return np.stack(found, axis=-2)

    def error_bound_for(self, examples: int) -> float:
        """A bound of `|w_T − exact|₂` for every prompt of up to this length in the boxes whose iterates stay in the box of w.

        *Theorem*: `descent-drift`.

        Args:
            examples: n, the largest number of examples in a prompt, at least 1.

        Raises:
            DomainError: examples < 1.
        """
        return total(self._terms(examples))

    error_bound = renamed("GradientDescent", "error_bound", "error_bound_for")

    def certificate_for(self, examples: int) -> Certificate:
        """The claim that `error_bound_for` is the sum of, one term per cause of drift.

        `|w_T − exact|₂ ≤ Σ_t ρ^t τ`, for prompts of at most so many examples in the boxes of x and y, as long as all iterates
        of the network and of exact gradient descent stay in the box of w. *Theorem*: `descent-drift`.

        Args:
            examples: n, the largest number of examples in a prompt, at least 1.

        Raises:
            DomainError: examples < 1.
            UnsupportedError: a tensor was changed after the network was built.
            ToleranceError: there is no finite bound.
        """
        self.require_unchanged()
        facts, slope, terms = self.facts, self.slope, self._terms(examples)
        if not np.isfinite(total(terms)):
            worst = max(terms, key=lambda term: term.value)
            raise ToleranceError(
                f"the drift of {self.steps:,} steps on {examples:,} examples has no finite bound: the largest part is "
                f"{worst.name}, and an error grows by a factor {worst.inputs['contraction']:.4g} in a step",
                "Take fewer or smaller steps, add ridge, shrink the boxes, or use float64.",
            )
        grid = {} if slope.grid is None else {"table": {name: list(of) for name, of in asdict(slope.grid).items()}}
        return claim(
            self,
            {
                "type": "gradient descent",
                "text": slope.name,
                "variables": list(slope.variables),
                "graph": slope.graph.to_json(),
                "sha256": slope.graph.sha256,
                "steps": self.steps,
                "step_size": facts.step_size,
                "ridge": facts.ridge,
                "initial": facts.initial.tolist(),
                "examples": examples,
                "meaning": f"the claim is about |w_T − exact|₂, for prompts of at most {examples:,} examples in the boxes of "
                "x and y, as long as every iterate, of the network and of exact gradient descent, is in the box of w",
            },
            (self.x_box, self.y_box, self.w_box),
            terms,
            dtype=self.dtype,
            theorem="descent-drift",
            details=self.record(),
            assumptions=slope.assumptions,
            facts={
                "steps": self.steps,
                "examples": examples,
                "step_size": facts.step_size,
                "ridge": facts.ridge,
                "epsilon": facts.epsilon,
                "contraction": terms[0].inputs["contraction"],
            },
            proof={
                "method": "descent",
                "slope_error": slope.error,
                "curvature": list(slope.curvature),
                "largest_slope": slope.largest,
                **grid,
            },
        )

    def require_unchanged(self) -> None:
        """Raise an error unless the tensors are those that the bounds are about.

        Raises:
            UnsupportedError: a tensor or the dtype was changed after the network was built.
        """
        f = self.facts
        sizes = {"step_size": f.step_size, "ridge": f.ridge, "epsilon": f.epsilon}
        built = Descent(
            DescentLayer(self.slope, self.dim, **sizes, dtype=self.dtype),
            self.slope,
            f,
            (self.x_box, self.y_box, self.w_box),
            steps=self.steps,
        )
        same = model_digest(built.state_dict()) == model_digest(self.state_dict())
        if not same or f.unit_roundoff != Precision.of(self.dtype).unit:
            raise UnsupportedError(
                "the network was changed after it was built, so its bounds do not apply",
                "Build it again with pa.in_context.gradient_descent.",
            )

    def record(self) -> dict[str, Any]:
        """What the network is, as JSON: what its tensors and its claim do not say."""
        return {
            "type": "descent",
            "steps": self.steps,
            "dimension": self.dim,
            "keys": self.slope.keys,
            "dtype": Precision.of(self.dtype).name,
        }

    def _terms(self, examples: int) -> list[Term]:
        if examples < 1:
            raise DomainError(f"examples is {examples!r}; expected at least 1.")
        facts, slope = self.facts, self.slope
        drift = Drift.of_boxes(facts, slope, examples)
        inputs = {"steps": self.steps, "examples": examples, "contraction": drift.contraction, "epsilon": facts.epsilon}
        per_step = [*drift.steps[0], drift.start]
        found = zip(CAUSES, drift.carried(self.steps)[-1], per_step, _TERMS, strict=True)
        return [
            Term(name, float(value), formula, theorem, {**inputs, "one_step": float(one)}, source)
            for name, value, one, (formula, theorem, source) in found
            if value > 0
        ]

    def error_bounds_at(self, prompt: Any) -> Array:
        """A bound of `|w_t − exact|₂` at every step for one prompt, `(steps + 1,)`, from its own residuals and gradient.

        It also proves that the exact iterates stay in the box of w. *Theorem*: `descent-drift`.

        Args:
            prompt: tokens `[x_i, y_i]`, `(n, d + 1)`.

        Raises:
            ShapeError: more than one prompt.
            OutsideDomainError: an iterate may leave the box of w.
        """
        examples = self._checked(prompt)
        if examples.dim() != 2:
            raise ShapeError(
                f"the prompt has shape {tuple(examples.shape)}; expected one prompt, (examples, {self.dim + 1})."
            )
        iterates = self.trajectory(examples).double().numpy()
        drift = Drift.of_prompt(self.facts, self.slope, examples.double().numpy(), iterates)
        bounds = drift.after(self.steps)
        lo, hi = self.w_box.lo.ravel(), self.w_box.hi.ravel()
        inside = ((iterates - bounds[:, None] >= lo) & (iterates + bounds[:, None] <= hi)).all(axis=1)
        if not inside.all():
            t = int(np.flatnonzero(~inside)[0])
            raise OutsideDomainError(
                f"step {t}: w lies within {bounds[t]:.3g} of {np.round(iterates[t][:8], 6).tolist()}, which may be outside the "
                "box of w; declare a larger box."
            )
        return bounds

    @certified
    def _iterates(self, tokens: Tensor) -> list[Tensor]:
        """From `(batch, examples, d + 1)`: the start, `(1, 1, d)`, and every w after it, `(batch, 1, d)`."""
        doubled = self.layer.mirrored(tokens)
        found = [self.initial.reshape(1, 1, self.dim)]
        for _ in range(self.steps):
            found.append(self.layer(found[-1], tokens, doubled))
        return found

    def _checked(self, prompt: Any) -> Tensor:
        z = real_tensor("the prompt", prompt)
        if z.dim() < 2 or z.shape[-1] != self.dim + 1 or z.shape[-2] < 1:
            raise ShapeError(
                f"the prompt has shape {tuple(z.shape)}; expected (…, examples, {self.dim + 1}): "
                f"tokens [x, y] with {self.dim} features."
            )
        points = z.detach().double().reshape(-1, self.dim + 1).cpu().numpy()
        inside = self.x_box.contains(points[:, : self.dim]) & self.y_box.contains(points[:, self.dim :])
        if not inside.all():
            i = int(np.flatnonzero(~inside)[0])
            raise OutsideDomainError(
                f"{int((~inside).sum()):,} of {len(points):,} examples lie outside the declared boxes of x and y, the first is "
                f"{np.round(points[i][:9], 6).tolist()}; scale them, or declare larger boxes."
            )
        return z.detach().to(self.dtype)

    def _require_inside(self, iterates: Tensor) -> None:
        points = iterates.detach().double().cpu().numpy()
        inside = self.w_box.contains(points.reshape(-1, self.dim)).reshape(points.shape[:2])
        if not inside.all():
            batch, step = np.argwhere(~inside)[0]
            raise OutsideDomainError(
                f"w leaves its box at step {step}: {np.round(points[batch, step][:8], 6).tolist()}; "
                "declare a larger box for w, or take smaller steps."
            )
