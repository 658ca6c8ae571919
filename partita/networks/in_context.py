"""Learning in context: gradient descent on the examples in a prompt, and (from `prompt_functions`) functions read from one.

w ← w − η(1/n Σ_i ∂ℓ/∂s(w·x_i, y_i) x_i + λw),   s = w·x
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor, nn

from partita.arithmetic.arguments import require_dtype
from partita.arithmetic.interval import Interval
from partita.arithmetic.precision import Precision
from partita.errors import DomainError, OutsideDomainError, ShapeError
from partita.geometry.domains import Array, Box, BoxLike
from partita.heads.head import real_tensor
from partita.kernels.guards import certified
from partita.kernels.trace_modes import is_traced
from partita.moved import renamed
from partita.networks.descent_layer import DescentLayer
from partita.networks.drift import Drift, StepFacts
from partita.networks.losses import LossSlope, loss_slope
from partita.networks.prompt_functions import PromptFunction, function
from partita.proofs.claim import require_ordinary

__all__ = ["GradientDescent", "PromptFunction", "function", "gradient_descent"]


class GradientDescent(nn.Module):
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
        """A bound of `|w_T − exact|₂` for every prompt of this length in the boxes whose iterates stay in the box of w.

        *Theorem*: `descent-drift`.

        Args:
            examples: n, the number of examples in the prompt, at least 1.

        Raises:
            DomainError: examples < 1.
        """
        if examples < 1:
            raise DomainError(f"examples is {examples!r}; expected at least 1.")
        return float(Drift.of_boxes(self.facts, self.slope, examples).after(self.steps)[-1])

    error_bound = renamed("GradientDescent", "error_bound", "error_bound_for")

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
    reach = [np.maximum(np.abs(b.lo), np.abs(b.hi)).ravel() for b in (x, y, w)]
    facts = StepFacts(
        step_size=float(step_size),
        ridge=float(ridge),
        epsilon=1.0,
        unit_roundoff=Precision.of(dtype).unit,
        initial=start,
        reach_x=reach[0],
        reach_y=float(reach[1][0]),
        reach_w=reach[2],
    )
    facts = facts.with_epsilon(facts.best_epsilon(slope, prompt_length) if epsilon is None else float(epsilon))
    require_ordinary(dtype, epsilon=facts.epsilon, step_size_over_epsilon=step_size / facts.epsilon)
    require_ordinary(dtype, largest_number=1 + facts.norm_x * (1 + float(np.linalg.norm(reach[2]))) + facts.reach_y)
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
