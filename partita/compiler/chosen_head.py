"""head: a function, a box, keys on a grid or anywhere and a temperature in; that head with its certificate out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from numpy.typing import ArrayLike

from partita.compiler.clock import Clock
from partita.compiler.compiled import Compiled, require_outside
from partita.compiler.request_options import request_for
from partita.errors import UnsupportedError
from partita.functions.moduli import Modulus
from partita.functions.regions import DomainLike
from partita.methods.chosen import chosen_head
from partita.methods.chosen_cells import CellsGiven, chosen_cells
from partita.methods.request import DEFAULT_MAX_BYTES
from partita.proofs.proof import Progress

__all__ = ["head"]

_SHARPNESS = 2.0  # κ on a grid, if none is given
_TO_READ, _TO_ATTACK = 0.2, 0.3  # of a budget: when to stop looking for moduli of f, and for its worst point


def head(
    function: Any,
    domain: DomainLike,
    *,
    keys: int | Sequence[int] | None = None,
    sharpness: float | Sequence[float] | None = None,
    values: str | ArrayLike = "centers",
    ghosts: int | Sequence[int] = 0,
    centers: ArrayLike | None = None,
    powers: ArrayLike | None = None,
    slopes: ArrayLike | None = None,
    inverse_temperature: float | None = None,
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
    budget: float | None = None,
    progress: Progress | None = None,
    seed: int = 0,
) -> Compiled:
    """Build and certify a head with the keys, sharpness and values you choose. No tolerance is needed.

    With `keys=`: `net(z) = Σ_j softmax_j(−Σ_i R_i(z_i − v_{j,i})²/2) V_j` over the centers v_j of a uniform grid,
    `R_i = κ_i/h_i²`. `c.with_sharpness(κ)` is the same head at another temperature. *Theorem*: `chosen-temperature`.

    With `centers=`: `net(z) = Σ_j softmax_j(−R(|z − c_j|² − p_j)/2) (V_j + J_j(z − c_j))` over your own keys c_j, whose cells
    are those of a power diagram. *Theorem*: `box-bisection` and `softmax-expansion`.

    The certificate states the smallest error bound that can be proved for this head, or an estimate where f is a black box
    about which nothing is declared.

    Args:
        function: as in `compile`.
        domain: as in `compile`: a box, a `Region` on whose box f is bounded, or a pair of boxes for cross-attention.
        keys: keys per axis, ghosts included: one number, or one per axis `(m,)`. Give either `keys` or `centers`.
        sharpness: κ = R h² > 0, one number or one per axis `(m,)`; 2 if None. Heads with κ ≥ 8 are called hard. With `keys`.
        values: "centers": f at the centers. "corrected": minus the bias of the average that the softmax takes.
            "fitted": by least squares, so that the head is close to f. "affine": f and its slopes in every cell.
            With `centers`: "centers", "affine", or your own numbers, `(N,)` or `(N, out)`.
        ghosts: how many of the keys lie beyond each end of an axis, one number or one per axis `(m,)`. Ghosts make soft heads
            better near the edge of the box. f is not evaluated there. With `keys`.
        centers: your own keys, anywhere, `(N, m)`. For a center outside the domain, f (and its slope) is taken at the point of the
            domain that it is clamped to.
        powers: of the centers, `(N,)`; None for Voronoi cells. With `centers`.
        slopes: J_j of your own values, `(N, m)` or `(N, out, m)`; None for constant values. With `centers`.
        inverse_temperature: R > 0. With `centers`.
        lipschitz: L with `|f(x) − f(y)|_∞ ≤ L|x − y|₂`, or one constant per coordinate, `(m,)`. Not needed for expressions.
        modulus: in place of `lipschitz`: a `Modulus`, or ω(t) as an expression such as "0.5*sqrt(t) + t".
        hessian: M with `|∇²f|₂ ≤ M` for each output of a smooth black box, or one number per coordinate. For affine values.
            What is declared gives bounds on a grid. On your own centers a black box has an estimate in any case.
        norm: "inf", or a number p ≥ 1, as in `compile`.
        dtype: dtype of the head, torch.float64 or torch.float32. Its rounding is part of the bound.
        outside: what to do with inputs outside the domain: "raise", "clamp" or "allow".
        max_bytes: largest size of the head in bytes.
        query_values: for a pair of boxes: let affine values depend on z_Q as well as on z_K.
        vectorize: call f once per point, for functions that do not take batches.
        trace: whether to trace torch functions and modules into expressions, as in `compile`.
        max_evaluations: the largest number of points at which the function may be evaluated, for functions that are slow.
        budget: seconds. When they are spent, the proof stops with the valid bound it has reached. With `centers`,
            `c.certificate.facts["complete"]` is 0 then, and `c.explain()` says so. More time gives a tighter bound.
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
    >>> c = pa.head("sin(3*x)", pa.Box([-1], [1]), centers=[[-0.9], [-0.2], [0.4]], values="affine", inverse_temperature=30)
    >>> c.num_keys, c.certificate.kind, c.attack().error <= c.error_bound
    (3, 'proved', True)
    """
    require_outside(outside)
    given = CellsGiven(centers, powers, values, slopes, inverse_temperature)
    _require_one_kind(keys, sharpness, ghosts, given)
    clock = Clock(budget, progress)
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
        needs_moduli=keys is not None,  # the proof for scattered keys reads f by itself
        asking=None if budget is None else clock.until(1.0),
        progress=clock.until(_TO_READ),
    )
    until = clock.until(1.0)
    if keys is None:
        made = chosen_cells(request, given, seed=seed, attacking=clock.until(_TO_ATTACK), progress=until)
    else:
        kappa = _SHARPNESS if sharpness is None else sharpness
        made = chosen_head(request, keys, kappa, values, ghosts, seed=seed, progress=until)
    found = made.construction
    return Compiled(found.head, found.partition, found.certificate, request.target, outside, made.why, made.candidates)


def _require_one_kind(keys: Any, sharpness: Any, ghosts: Any, given: CellsGiven) -> None:
    """Keys on a grid or centers anywhere: the options of one of them."""
    if (keys is None) == (given.centers is None):
        found = "neither keys nor centers are" if keys is None else "both keys and centers are"
        raise UnsupportedError(
            f"{found} given; expected one of them",
            "Pass keys=(8, 8) for a grid, or centers= with your own keys, (N, m).",
        )
    on_grid = {"sharpness": sharpness is not None, "ghosts": not (isinstance(ghosts, int) and ghosts == 0)}
    anywhere = {n: getattr(given, n) is not None for n in ("powers", "slopes", "inverse_temperature")}
    wrong = [name for name, is_given in (anywhere if keys is not None else on_grid).items() if is_given]
    if wrong:
        kind, other = ("keys", "centers") if keys is not None else ("centers", "keys")
        hint = "Pass inverse_temperature=R: a temperature in place of κ = R h²." if "sharpness" in wrong else ""
        raise UnsupportedError(f"{', '.join(wrong)} given with {kind}=; expected only with {other}=", hint)
