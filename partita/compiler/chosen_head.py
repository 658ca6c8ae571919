"""head: a function, a box, the keys per axis and a temperature in; that head with its certificate out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from partita.compiler.compiled import Compiled, require_outside
from partita.compiler.request_options import request_for
from partita.functions.moduli import Modulus
from partita.functions.regions import DomainLike
from partita.methods.chosen import chosen_head
from partita.methods.request import DEFAULT_MAX_BYTES
from partita.proofs.proof import Progress

__all__ = ["head"]


def head(
    function: Any,
    domain: DomainLike,
    *,
    keys: int | Sequence[int],
    sharpness: float | Sequence[float] = 2.0,
    values: str = "centers",
    ghosts: int | Sequence[int] = 0,
    lipschitz: float | Sequence[float] | None = None,
    modulus: Modulus | str | None = None,
    hessian: float | Sequence[float] | None = None,
    norm: float | str = "inf",
    dtype: torch.dtype = torch.float64,
    outside: str = "raise",
    max_bytes: int = DEFAULT_MAX_BYTES,
    query_values: bool = False,
    vectorize: bool = False,
    trace: bool | None = None,
    max_evaluations: int | None = None,
    progress: Progress | None = None,
    seed: int = 0,
) -> Compiled:
    """Build and certify a head with the keys, sharpness and values you choose. No tolerance is needed.

    `net(z) = Σ_j softmax_j(−Σ_i R_i(z_i − v_{j,i})²/2) V_j` over the centers v_j of a uniform grid, `R_i = κ_i/h_i²`. The
    certificate states the smallest error bound that can be proved for this head, or an estimate where f is a black box
    about which nothing is declared. `c.with_sharpness(κ)` is the same head at another temperature.
    *Theorem*: `chosen-temperature`.

    Args:
        function: as in `compile`.
        domain: as in `compile`: a box, a `Region` on whose box f is bounded, or a pair of boxes for cross-attention.
        keys: keys per axis, ghosts included: one number, or one per axis `(m,)`.
        sharpness: κ = R h² > 0, one number or one per axis `(m,)`. Heads with κ ≥ 8 are called hard.
        values: "centers": f at the centers. "corrected": minus the bias of the average that the softmax takes.
            "fitted": by least squares, so that the head is close to f. "affine": f and its slopes in every cell.
        ghosts: how many of the keys lie beyond each end of an axis, one number or one per axis `(m,)`. Ghosts make soft heads
            better near the edge of the box. f is not evaluated there.
        lipschitz: L with `|f(x) − f(y)|_∞ ≤ L|x − y|₂`, or one constant per coordinate, `(m,)`. Not needed for expressions.
        modulus: in place of `lipschitz`: a `Modulus`, or ω(t) as an expression such as "0.5*sqrt(t) + t".
        hessian: M with `|∇²f|₂ ≤ M` for each output of a smooth black box, or one number per coordinate. For affine values.
        norm: "inf", or a number p ≥ 1, as in `compile`.
        dtype: dtype of the head, torch.float64 or torch.float32. Its rounding is part of the bound.
        outside: what to do with inputs outside the domain: "raise", "clamp" or "allow".
        max_bytes: largest size of the head in bytes.
        query_values: for a pair of boxes: let affine values depend on z_Q as well as on z_K.
        vectorize: call f once per point, for functions that do not take batches.
        trace: whether to trace torch functions and modules into expressions, as in `compile`.
        max_evaluations: the largest number of points at which the function may be evaluated, for functions that are slow.
        progress: called as `progress(what, done, of)`.
        seed: random seed of the attack on the finished head, ≥ 0.

    Returns:
        A `Compiled`. Its certificate has no tolerance of its own: `c.certificate.has_tolerance` is False.

    Raises:
        PartitaError: one subclass per kind of bad input (`partita.errors`).

    >>> import partita as pa
    >>> c = pa.head("sin(3*x0) + x0*cos(2*x1)", pa.Box([-1, -1], [1, 1]), keys=(8, 8), sharpness=2.0)
    >>> c.num_keys, c.certificate.kind, c.error_bound < 0.8
    (64, 'proved', True)
    """
    require_outside(outside)
    request = request_for(
        function,
        domain,
        tolerance=1.0,  # none is asked; nothing below looks at it
        norm=norm,
        dtype=dtype,
        sharpness=None,
        max_bytes=max_bytes,
        method="auto",
        accept="strongest",
        declared={"lipschitz": lipschitz, "modulus": modulus, "hessian": hessian, "jumps": None},
        vectorize=vectorize,
        trace=trace,
        max_evaluations=max_evaluations,
        query_values=query_values,
        progress=progress,
    )
    made = chosen_head(request, keys, sharpness, values, ghosts, seed=seed, progress=progress)
    found = made.construction
    return Compiled(found.head, found.partition, found.certificate, request.target, outside, made.why, made.candidates)
