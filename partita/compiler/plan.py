"""The planner: from tolerance, domain and what is known of f to sizes, before anything is allocated."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from partita.compiler.cover_plan import plan_cover
from partita.compiler.grid_plan import plan_grid
from partita.compiler.knowledge import gather
from partita.compiler.options import DEFAULT_MAX_BYTES, DEFAULT_SHARPNESS, Options
from partita.compiler.planned import Plan
from partita.geometry.domains import Box, Domain, PointCloud
from partita.targets.knowledge import Jumps, Modulus
from partita.targets.target import Target, make_target

__all__ = ["make_plan", "plan"]


def plan(
    function: Any,
    domain: Domain | tuple[Box, Box],
    *,
    tolerance: float,
    lipschitz: float | Sequence[float] | None = None,
    modulus: Modulus | None = None,
    jumps: Jumps | None = None,
    norm: float | str = "inf",
    method: str = "auto",
    dtype: torch.dtype = torch.float64,
    sharpness: float = DEFAULT_SHARPNESS,
    max_bytes: int = DEFAULT_MAX_BYTES,
    vectorize: bool = False,
) -> Plan:
    """Sizes, sharpness and bound of the head that `compile` would build, and why. Arguments as in `compile`.

    >>> import partita as pa
    >>> print(pa.plan("2*x0", pa.Box([0.0], [1.0]), tolerance=0.15).why[0])
    7 keys
    """
    options = Options.checked(tolerance, norm, dtype, sharpness, max_bytes, method)
    return make_plan(make_target(function, domain, vectorize=vectorize), options, lipschitz, modulus, jumps)


def make_plan(
    target: Target,
    options: Options,
    lipschitz: float | Sequence[float] | None,
    modulus: Modulus | None,
    jumps: Jumps | None,
) -> Plan:
    """The plan for a target that has been made already: proved or declared knowledge first, then sizes."""
    knowledge = gather(target, norm=options.norm, lipschitz=lipschitz, modulus=modulus, jumps=jumps)
    return (plan_cover if isinstance(target.domain, PointCloud) else plan_grid)(target, knowledge, options)
