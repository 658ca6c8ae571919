"""compile: a function, a domain and a tolerance in; the smallest attention head with a certificate out."""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from numbers import Integral
from pathlib import Path
from typing import Any

import torch

from partita.arithmetic.progress import report
from partita.compiler.clock import Clock
from partita.compiler.compiled import Compiled, require_outside
from partita.compiler.request_options import request_for
from partita.compiler.table_head import require_table_options, table_head
from partita.errors import (
    BudgetSpentError,
    DomainError,
    NotContinuousError,
    PartitaError,
    SizeError,
    ToleranceError,
    ToleranceMissedWarning,
    UnsupportedError,
)
from partita.functions.failures import DEFAULT_MAX_EXCLUDED
from partita.functions.moduli import Modulus
from partita.functions.regions import DomainLike
from partita.functions.regularity import Jumps
from partita.functions.samples import Table
from partita.functions.target import Tail
from partita.methods.method import Candidate, Plan, size_text
from partita.methods.planner import best_plan, constructed
from partita.methods.request import DEFAULT_MAX_BYTES
from partita.proofs.certificate import Certificate
from partita.proofs.claim import Construction, estimated, with_excluded, with_tail
from partita.proofs.proof import Progress
from partita.proofs.worst_point import attacked, require_unrefuted
from partita.storage import require_free, whole_folder, write_head
from partita.workers import crew_of

__all__ = ["build", "compile", "plan"]

_TO_EVALUATE, _TO_PLAN = 0.4, 0.67  # of a budget: when planning stops evaluating a black box, and when planning ends
_USELESS = 10.0  # times the sampled error, beyond which the bound of a proof that was stopped is not stated


def compile(
    function: Any,
    domain: DomainLike | None = None,
    *,
    tolerance: float,
    lipschitz: float | Sequence[float] | None = None,
    modulus: Modulus | str | None = None,
    hessian: float | Sequence[float] | None = None,
    jumps: Jumps | None = None,
    tail: Tail | None = None,
    norm: float | str = "inf",
    method: str = "auto",
    accept: str = "strongest",
    dtype: torch.dtype = torch.float64,
    sharpness: float | None = None,
    outside: str = "raise",
    folder: str | os.PathLike[str] | None = None,
    overwrite: bool = False,
    max_bytes: int = DEFAULT_MAX_BYTES,
    max_value: float | None = None,
    max_heads: int | None = None,
    max_layers: int | None = None,
    query_values: bool = False,
    vectorize: bool = False,
    trace: bool | None = None,
    on_error: str = "raise",
    max_excluded: float = DEFAULT_MAX_EXCLUDED,
    budget: float | None = None,
    max_evaluations: int | None = None,
    executor: Any = None,
    checkpoint: str | os.PathLike[str] | None = None,
    retries: int = 0,
    progress: Progress | None = None,
    seed: int = 0,
) -> Compiled:
    """The smallest attention within `tolerance` of the function on the domain, with a certificate.

    One head is `net(z) = Σ_j softmax_j(R(v_j·z − |v_j|²/2)) V_j`. A function that is a sum of terms in few variables may
    become one layer of several heads, `Σ_h W_h head_h`, and a composition several layers. Among those that meet the tolerance
    the strongest kind of claim wins (`proved`, then `proved_given`, then `estimated`), then the fewest stored numbers.
    `c.report()` lists what was considered.

    Args:
        function: an expression in x0, x1, … (k0, …, q0, … for pairs of inputs), a sympy expression in these symbols, an
            `nn.Module`, or a torch or numpy function of a batch `(n, *domain.shape)`. In expressions `where(c, a, b)` is a where
            c ≥ 0 and b elsewhere, and `where(x0 > 0.5, a, b)` is a where the comparison holds. Or a `Table` of samples: the head
            is then fitted to most of its rows, and its error is an estimate from the others. Options that are about functions
            are refused.
        domain: a `Box`, a `Region` (`Ball`, `Simplex`, `Polytope`), a `PointCloud`, or a pair of boxes for cross-attention.
            A box may be typed as text, `"[-1,1]^2"` or `"[0, pi] x [0,2]"`, or as a pair `(lo, hi)` for each axis,
            `[(0, 3), (273, 323)]`: see `Box.of`. None for a table only: the box around its rows.
        tolerance: the largest error allowed, > 0.
        lipschitz: L with `|f(x) − f(y)|_∞ ≤ L|x − y|₂`, or one constant per coordinate, `(m,)`. Not needed for expressions.
        modulus: in place of `lipschitz`: a `Modulus`, or ω(t) as an expression such as "0.5*sqrt(t) + t".
        hessian: M with `|∇²f|₂ ≤ M` for each output of a smooth black box, or one number per coordinate, `(M_1, …, M_m)`, with
            `|vᵀ∇²f v| ≤ Σ_i M_i v_i²` for every v. For f = Σ_i f_i(x_i) take `M_i = max |f_i''|`; in general
            `M_i = max Σ_j |∂_i∂_j f|` will do. Not used for expressions.
        jumps: where f may jump. Finite norms only.
        tail: for a function without a bound, where to clip it and the norm of what is cut off. Finite norms only.
        norm: "inf", the largest error of any output anywhere, or a number p ≥ 1: `(∫ Σ_outputs |f − net|^p)^{1/p}`.
        method: how the values are chosen. "hard": f at the centers, sharp, as in the paper. "tuned": f at the centers, with
            the best temperature. "corrected": "tuned" with its bias removed. "fitted": by solving a linear program.
            "affine": f and its slopes in every cell. "adaptive": "affine" on scattered centers, placed where they are
            needed. "pieces": exact, for piecewise affine expressions. "two_keys": tanh, sigmoid and SiLU exactly, products
            and squares nearly so. "lines": a few lines, for functions of one variable that are straight at both ends.
            "convex": a maximum of planes, for convex or concave expressions. "heads": a layer of several heads, one per
            term of a sum. "layers": several layers, for compositions. "train": a tensor train, for many dimensions.
            "paper": the grid, the temperature and the values of the paper's proof, corrected. "auto": the smallest head
            among all of these but "paper", which it only lists.
        accept: "strongest", or "estimated" to prefer a smaller head whose error is only sampled.
        dtype: dtype of the head, torch.float64 or torch.float32. Its rounding is part of the bound. With torch.bfloat16 or
            torch.float16, heads on product grids hold their values in that type, round their inputs to it, compute in float32
            and return float32.
        sharpness: κ = R h², for methods whose values are f at the centers. Chosen by the method by default.
        outside: what to do with inputs outside the domain: "raise", "clamp" or "allow".
        folder: where to save the head, as `Compiled.save` does. The tables of "hard" and "affine" heads are then written
            there while they are computed, block after block, and the head that is returned has them mapped into memory:
            they may be larger than memory, if `max_bytes` allows it. Nothing appears under this name until the head is
            finished.
        overwrite: replace a folder that exists.
        max_bytes: largest size of the head in bytes.
        max_value: the largest |V| of any key, > 0; for values that depend on z, `|V_j| + |J_j||z − c_j|` on the box around the
            domain. It must exceed max |f|, less the tolerance. Fitted heads of few keys may have values much larger than f.
        max_heads: the most heads that one layer may have; 1 for a single head per layer. None leaves the choice open.
        max_layers: the most layers. With max_heads=1 and max_layers=1 the result is one softmax, as in the theorem. None leaves
            the choice open: networks are then tried in three variables or more if one head stores more than 100 numbers, and
            in one or two variables, where the cells of one head can be drawn, if it stores more than 2,000. Any
            limit that is given has them tried.
        query_values: for a pair of boxes: let the values be affine in z_Q as well as in z_K. Such a head can be smaller, but it
            is not cross-attention, whose values depend on z_K alone, and `layers()` does not exist for it.
        vectorize: call f once per point, for functions that do not take batches.
        trace: whether to trace torch functions and modules into expressions, about which claims are proved. None tries and
            falls back to a black box, False never traces, True raises if tracing fails.
        on_error: what to do where f raises, or returns NaN, infinity or None. "raise": stop with an error that names the point.
            "exclude": leave such points out, for black boxes only. The claim is then an estimate over the points where f
            has values; the certificate states at how many points f failed.
        max_excluded: with on_error="exclude", the largest share of the domain that may be left out, estimated from random points.
        budget: seconds. Planning stops after two thirds of them with the best plan so far; a proof stops with the valid
            bound that it has reached. If that is above the tolerance, the head is still returned, with a
            `ToleranceMissedWarning`, and `c.tolerance_met` is False.
        max_evaluations: the largest number of points at which the function may be evaluated, for functions that are slow.
            If it is reached, the best head so far is returned as with `budget`. With a large limit, what is
            declared about a black box is tested at more points.
        executor: who runs calls of a slow f and long proofs: an object with `submit` or `map`, such as a
            `concurrent.futures.ProcessPoolExecutor` or a Dask `Client`, or a number of processes to start on this machine. The
            result is the same bits with and without it.
        checkpoint: a folder that keeps the answers of f and the results of long steps. After a crash, the same call goes on
            where it was; other calls with the same function share its answers.
        retries: how often f is called again where it raised, ≥ 0.
        progress: called as `progress(what, done, of)`.
        seed: random seed of the attack on the finished head, ≥ 0.

    Returns:
        A `Compiled`: the head, its partition and its certificate.

    Raises:
        PartitaError: one subclass per kind of bad input (`partita.errors`).

    >>> import partita as pa
    >>> c = pa.compile("sin(3*x0) + x0*cos(2*x1)", pa.Box([-1, -1], [1, 1]), tolerance=1e-6)
    >>> c.certificate.kind, c.error_bound <= 1e-6, c.num_keys <= 144
    ('proved', True, True)
    """
    require_outside(outside)
    if isinstance(seed, bool) or not isinstance(seed, Integral) or seed < 0:
        raise UnsupportedError(f"seed is {seed!r}; expected an integer ≥ 0.")
    clock = Clock(budget, progress)
    if isinstance(function, Table):
        given = {
            "lipschitz": lipschitz,
            "modulus": modulus,
            "hessian": hessian,
            "jumps": jumps,
            "tail": tail,
            "norm": norm,
            "method": method,
            "sharpness": sharpness,
            "query_values": query_values,
            "vectorize": vectorize,
            "trace": trace,
            "on_error": on_error,
            "max_evaluations": max_evaluations,
            "executor": executor,
            "checkpoint": checkpoint,
            "retries": retries,
        }
        require_table_options(function, given)
        if folder is not None:
            require_free(folder, overwrite=overwrite)
        limits = {"tolerance": tolerance, "dtype": dtype, "max_bytes": max_bytes, "max_value": max_value}
        found, missed = table_head(
            function, domain, outside=outside, seed=int(seed), progress=clock.until(1.0), **limits
        )
        if missed is not None and budget is None:
            raise missed
        if missed is not None:
            warnings.warn(ToleranceMissedWarning(missed), stacklevel=2)
        if folder is not None:
            found.save(folder, overwrite=overwrite)
        return found
    if domain is None:
        raise DomainError(
            "no domain is given; expected a box such as '[-1,1]^2'", "Only a table has a domain of its own."
        )
    planning, building = clock.until(_TO_PLAN), clock.until(1.0)
    with crew_of(executor, checkpoint, retries).at_work(), _draft_of(folder, overwrite) as draft:
        request = request_for(
            function,
            domain,
            tolerance=tolerance,
            norm=norm,
            dtype=dtype,
            sharpness=sharpness,
            max_bytes=max_bytes,
            method=method,
            accept=accept,
            declared={"lipschitz": lipschitz, "modulus": modulus, "hessian": hessian, "jumps": jumps},
            tail=tail,
            vectorize=vectorize,
            trace=trace,
            on_error=on_error,
            max_excluded=max_excluded,
            query_values=query_values,
            max_evaluations=max_evaluations,
            best_effort=budget is not None,
            asking=clock.until(_TO_EVALUATE),
            max_value=max_value,
            max_heads=max_heads,
            max_layers=max_layers,
            folder=draft,
            progress=planning,
        )
        planned = best_plan(request, progress=planning)
        request.target.calls.progress = building
        return _steady(_finished_or_next(planned, outside, building, seed))


def plan(
    function: Any,
    domain: DomainLike,
    *,
    tolerance: float,
    lipschitz: float | Sequence[float] | None = None,
    modulus: Modulus | str | None = None,
    hessian: float | Sequence[float] | None = None,
    jumps: Jumps | None = None,
    tail: Tail | None = None,
    norm: float | str = "inf",
    method: str = "auto",
    accept: str = "strongest",
    dtype: torch.dtype = torch.float64,
    sharpness: float | None = None,
    max_bytes: int = DEFAULT_MAX_BYTES,
    max_value: float | None = None,
    max_heads: int | None = None,
    max_layers: int | None = None,
    query_values: bool = False,
    vectorize: bool = False,
    trace: bool | None = None,
    on_error: str = "raise",
    max_excluded: float = DEFAULT_MAX_EXCLUDED,
    max_evaluations: int | None = None,
    executor: Any = None,
    checkpoint: str | os.PathLike[str] | None = None,
    retries: int = 0,
    progress: Progress | None = None,
) -> Plan:
    """Size, sharpness and error of the head that `compile` would build, and the reasons.

    "hard" heads are planned without evaluating f. The other methods evaluate f inside the domain. `plan.evaluations` says how often
    a black box is evaluated in all if the head is built; `plan.candidates` compares the methods.

    Args:
        function: an expression in x0, x1, … (k0, …, q0, … for pairs of inputs), a sympy expression in these symbols, an
            `nn.Module`, or a torch or numpy function of a batch `(n, *domain.shape)`. In expressions `where(c, a, b)` is a where
            c ≥ 0 and b elsewhere, and `where(x0 > 0.5, a, b)` is a where the comparison holds.
        domain: a `Box`, a `Region` (`Ball`, `Simplex`, `Polytope`), a `PointCloud`, or a pair of boxes for cross-attention.
            A box may be typed as text, `"[-1,1]^2"` or `"[0, pi] x [0,2]"`, or as a pair `(lo, hi)` for each axis,
            `[(0, 3), (273, 323)]`: see `Box.of`.
        tolerance: the largest error allowed, > 0.
        lipschitz: L with `|f(x) − f(y)|_∞ ≤ L|x − y|₂`, or one constant per coordinate, `(m,)`. Not needed for expressions.
        modulus: in place of `lipschitz`: a `Modulus`, or ω(t) as an expression such as "0.5*sqrt(t) + t".
        hessian: M with `|∇²f|₂ ≤ M` for each output of a smooth black box, or one number per coordinate, `(M_1, …, M_m)`, with
            `|vᵀ∇²f v| ≤ Σ_i M_i v_i²` for every v. For f = Σ_i f_i(x_i) take `M_i = max |f_i''|`; in general
            `M_i = max Σ_j |∂_i∂_j f|` will do. Not used for expressions.
        jumps: where f may jump. Finite norms only.
        tail: for a function without a bound, where to clip it and the norm of what is cut off. Finite norms only.
        norm: "inf", the largest error of any output anywhere, or a number p ≥ 1: `(∫ Σ_outputs |f − net|^p)^{1/p}`.
        method: as in `compile`: how the values are chosen.
        accept: "strongest", or "estimated" to prefer a smaller head whose error is only sampled.
        dtype: dtype of the head, as for `compile`.
        sharpness: κ = R h², for methods whose values are f at the centers.
        max_bytes: largest size of the head in bytes.
        max_value: the largest |V| of any key, > 0; for values that depend on z, `|V_j| + |J_j||z − c_j|` on the box around the
            domain. It must exceed max |f|, less the tolerance. Fitted heads of few keys may have values much larger than f.
        max_heads: the most heads that one layer may have; 1 for a single head per layer. None leaves the choice open.
        max_layers: the most layers. With max_heads=1 and max_layers=1 the result is one softmax, as in the theorem. None leaves
            the choice open: networks are then tried in three variables or more if one head stores more than 100 numbers, and
            in one or two variables, where the cells of one head can be drawn, if it stores more than 2,000. Any
            limit that is given has them tried.
        query_values: for a pair of boxes: let the values be affine in z_Q as well as in z_K. Such a head can be smaller, but it
            is not cross-attention, whose values depend on z_K alone, and `layers()` does not exist for it.
        vectorize: call f once per point, for functions that do not take batches.
        trace: whether to trace torch functions and modules into expressions, as in `compile`.
        on_error: what to do where f fails, as in `compile`: "raise" or "exclude".
        max_excluded: with on_error="exclude", the largest share of the domain that may be left out, estimated from random points.
        max_evaluations: the largest number of points at which the function may be evaluated, building included.
        executor: who runs calls of a slow f and long proofs: an object with `submit` or `map`, such as a
            `concurrent.futures.ProcessPoolExecutor` or a Dask `Client`, or a number of processes to start on this machine. The
            result is the same bits with and without it.
        checkpoint: a folder that keeps the answers of f and the results of long steps. After a crash, the same call goes on
            where it was; other calls with the same function share its answers.
        retries: how often f is called again where it raised, ≥ 0.
        progress: called as `progress(what, done, of)`.

    Returns:
        A `Plan`, which `pa.build` turns into a head.

    Raises:
        PartitaError: as in `compile`.

    >>> import partita as pa
    >>> print(pa.plan("2*x0", pa.Box([0.0], [1.0]), tolerance=0.15, method="hard").why[0])
    7 keys
    """
    with crew_of(executor, checkpoint, retries).at_work():
        request = request_for(
            function,
            domain,
            tolerance=tolerance,
            norm=norm,
            dtype=dtype,
            sharpness=sharpness,
            max_bytes=max_bytes,
            method=method,
            accept=accept,
            declared={"lipschitz": lipschitz, "modulus": modulus, "hessian": hessian, "jumps": jumps},
            tail=tail,
            vectorize=vectorize,
            trace=trace,
            on_error=on_error,
            max_excluded=max_excluded,
            query_values=query_values,
            max_evaluations=max_evaluations,
            asking=progress,
            max_value=max_value,
            max_heads=max_heads,
            max_layers=max_layers,
            progress=progress,
        )
        return best_plan(request, progress=progress)


def build(
    plan: Plan,
    *,
    outside: str = "raise",
    folder: str | os.PathLike[str] | None = None,
    overwrite: bool = False,
    executor: Any = None,
    checkpoint: str | os.PathLike[str] | None = None,
    retries: int = 0,
    progress: Progress | None = None,
    seed: int = 0,
) -> Compiled:
    """Build the head of a plan, attack it once, and return it with its certificate.

    If the finished head misses the tolerance, it is planned again for a smaller share of the tolerance. With
    method="auto" the other methods are tried next.

    Args:
        plan: from `pa.plan`.
        outside: what to do with inputs outside the domain: "raise", "clamp" or "allow".
        folder: where to save the head, and to write its tables while they are computed, as for `compile`.
        overwrite: replace a folder that exists.
        executor: who runs calls of a slow f and long proofs, as for `compile`.
        checkpoint: a folder that keeps the answers of f and the results of long steps, as for `compile`.
        retries: how often f is called again where it raised, ≥ 0.
        progress: called as `progress(what, done, of)`.
        seed: random seed of the attack on the finished head, ≥ 0.

    Raises:
        ToleranceError: no head that was built meets the tolerance.
        PartitaError: as in `compile`.

    >>> import partita as pa
    >>> pa.build(pa.plan("2*x0", pa.Box([0.0], [1.0]), tolerance=0.15, method="hard")).num_keys
    7
    """
    with crew_of(executor, checkpoint, retries).at_work(), _draft_of(folder, overwrite) as draft:
        plan = replace(plan, request=replace(plan.request, folder=draft))
        return _steady(_finished_or_next(plan, outside, progress, seed))


def _steady(compiled: Compiled) -> Compiled:
    """The same, if the function still returns what it returned at first, whoever is asked."""
    compiled.target.look_again()
    return compiled


def _draft_of(folder: str | os.PathLike[str] | None, overwrite: bool) -> AbstractContextManager[Path | None]:
    """Where the files of the head are written, if they are wanted; the folder takes its name when the head is finished."""
    return nullcontext() if folder is None else whole_folder(folder, overwrite=overwrite)


def _finished_or_next(plan: Plan, outside: str, progress: Progress | None, seed: int) -> Compiled:
    """The first head that meets the tolerance: of this plan, or, if the method was left open, of the plans without it.

    If time or evaluations run out first, the best head that was built.
    """
    missed: list[Candidate] = []
    errors: list[PartitaError] = []
    built: list[tuple[Construction, Plan]] = []
    while True:
        try:
            built.append(constructed(plan, progress, seed))
            return _finished(*built[-1], outside, seed, missed)
        except (SizeError, ToleranceError) as error:
            errors.append(error)
            missed.append(plan.as_candidate(error.reason, missed=True))
        except BudgetSpentError as error:
            if not built:
                if plan.fallback is None or not plan.request.best_effort:
                    raise
                built.append(constructed(replace(plan.fallback, candidates=plan.candidates), progress, seed))
            errors.append(error)
        try:  # what was only forecast, or makes a weaker claim, has its turn now
            if not plan.request.is_auto or isinstance(errors[-1], BudgetSpentError):
                raise errors[0]
            report(progress, "next method")
            plan = best_plan(plan.request, without=frozenset(c.method for c in missed), progress=progress)
        except NotContinuousError:
            raise  # says more than that a tolerance was missed
        except PartitaError:
            if plan.request.best_effort:
                return _best_of(built, outside, seed, missed)
            raise errors[0] from None


def _best_of(
    built: Sequence[tuple[Construction, Plan]], outside: str, seed: int, missed: Sequence[Candidate]
) -> Compiled:
    """The head with the smallest error, which misses the tolerance, with a warning; an estimate where the proof got nowhere."""
    construction, plan = min(built, key=lambda pair: pair[0].certificate.error)
    if construction.certificate.kind != "estimated":
        sampled = estimated(construction, plan.target, seed=seed)
        if construction.certificate.error > _USELESS * sampled.certificate.error:
            construction = sampled
    compiled = _finished(construction, plan, outside, seed, missed, must_meet=False)
    if not compiled.tolerance_met:
        warnings.warn(ToleranceMissedWarning(_missed(plan, compiled.certificate)), stacklevel=4)
    return compiled


def _finished(
    construction: Construction,
    plan: Plan,
    outside: str,
    seed: int,
    missed: Sequence[Candidate],
    *,
    must_meet: bool = True,
) -> Compiled:
    """The head, attacked; or the error that says why it cannot be handed out."""
    certificate, request = construction.certificate, plan.request
    size = sum(t.numel() * t.element_size() for t in construction.head.state_dict().values())
    if size > request.max_bytes:
        raise SizeError(
            f"the finished {plan.method} head takes {size_text(size)}; max_bytes allows {size_text(request.max_bytes)}",
            "Use a larger tolerance, or raise max_bytes.",
        )
    largest = construction.head.largest_value(request.box.lo, request.box.hi)
    if largest > request.max_value:
        raise SizeError(
            f"the values of the finished {plan.method} head reach {largest:.6g}; max_value allows {request.max_value:g}",
            "Use a larger tolerance, or raise max_value.",
        )
    error = certificate.error_bound if certificate.error_estimate is None else certificate.error_estimate
    if must_meet and error > request.tolerance:
        raise _missed(plan, certificate)
    if request.target.tail is not None:
        certificate = with_tail(certificate, request.target)
        error = certificate.error
    told = {plan.method, *(c.method for c in missed)}
    others = [c for c in plan.candidates if c.method not in told]
    planned = next((c for c in plan.candidates if c.method == plan.method), plan.as_candidate())
    rounding = float(sum(t.value for t in certificate.terms if t.source != "approximation"))
    note, because = "the next best" if missed else planned.note, _because(planned, missed)
    compiled = Compiled(construction.head, construction.partition, certificate, request.target, outside, plan.why)
    witness = certificate.witness if certificate.kind == "estimated" and request.target.graph is None else None
    if witness is None:  # the worst fresh sample of a black box will do
        witness = attacked(construction.head, request.target, construction.partition, seed)
    require_unrefuted(construction.head, request.target, certificate, witness, seed)
    if certificate.kind == "estimated" and certificate.norm == "inf":
        certificate = certificate.with_estimate(max(error, witness.error))
        if must_meet and certificate.error > certificate.tolerance:
            raise _missed(plan, certificate)
        error = certificate.error
    chosen = Candidate(
        plan.method,
        certificate.kind,
        note,
        plan.keys,
        plan.parameters,
        largest,
        rounding,
        error,
        chosen=True,
        form=plan.maker.form,
        because=because,
    )
    if request.target.calls.rows:
        certificate = replace(certificate, facts={**certificate.facts, "evaluations": float(request.target.calls.rows)})
    chosen = replace(chosen, evaluations=None if request.target.graph is not None else request.target.calls.rows)
    certificate = replace(certificate, witness=witness, seed=seed)
    if request.target.excluding is not None:
        certificate = with_excluded(certificate, request.target.excluding)
    compiled = replace(compiled, certificate=certificate, candidates=(chosen, *missed, *others))
    if request.folder is not None:
        draft, why, file = request.folder, compiled.why, construction.file
        write_head(draft, compiled.head, certificate, request.target, outside=outside, why=why, file=file)
    return compiled


def _because(planned: Candidate, missed: Sequence[Candidate]) -> str:
    """Why this head was returned: what the plan says, and what was built before it and missed the tolerance."""
    if not planned.because:
        return "A limit on time or evaluations was reached; of what was built, this head has the smallest error."
    if not missed:
        return planned.because
    names = " and ".join(c.method for c in missed)
    return f"{names} {'was' if len(missed) == 1 else 'were'} built and missed the tolerance. {planned.because}"


def _missed(plan: Plan, certificate: Certificate) -> ToleranceError:
    """Why a finished head is not good enough, and what to ask for instead."""
    label, request = plan.target.label, plan.request
    tolerance, tail = request.asked, 0.0 if plan.target.tail is None else plan.target.tail.norm
    if certificate.kind == "estimated":
        return ToleranceError(
            f"{label}: the finished {plan.method} head errs by {certificate.error + tail:.6g} at fresh points, above the tolerance "
            f"{tolerance:g}: f is rougher than its samples showed",
            f"Use tolerance={request.stated(1.1 * certificate.error):.3g}.",
        )
    if not math.isfinite(certificate.error_bound):
        return ToleranceError(
            f"{label}: the proof for the {plan.method} head ({plan.keys:,} keys) ran out of boxes before it covered the domain",
            "Use accept='estimated', another method, or a larger tolerance.",
        )
    worst = max(certificate.terms, key=lambda t: t.value)
    return ToleranceError(
        f"{label}: the finished {plan.method} head has the bound {certificate.error_bound + tail:.6g}, above the tolerance "
        f"{tolerance:g}: {worst.name} took more than was planned",
        f"Use tolerance={request.stated(1.01 * certificate.error_bound):.3g}.",
    )
