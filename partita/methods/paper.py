"""The corrected proof's own recipe for Theorems 4.1 and 4.2: build what the paper's theorem says, and see what it costs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from partita.arithmetic.rounding import add_up, exp_up, mul_down, mul_up, sqrt_up, sub_down, up
from partita.errors import DomainError, SizeError
from partita.functions.regularity import Knowledge, Known
from partita.geometry.grid import ProductGrid
from partita.geometry.moments import window_for
from partita.methods.grids import GridDraft, sharpness_of
from partita.methods.hard import floor_refusal, knowledge_of, predicted_terms, stored_numbers, values_at_centers
from partita.methods.method import Method, Plan, Refusal, Size, keys_text, needs_box, size_text
from partita.methods.request import Request
from partita.proofs.certificate import total
from partita.proofs.claim import Construction
from partita.proofs.proof import Progress

__all__ = ["Paper", "cells_in_paper_order"]

_LEFT_OUT = 1e-16  # of the mass per axis: the paper sums over all cells
_MOST_DIGITS = 300  # of a number of keys, so that floats can hold it


class Paper(Method):
    """The head that the paper's proof builds, with the corrections of docs/errata.md and nothing else changed.

    1. δ: `|x − y|_∞ ≤ δ` makes `|f(x) − f(y)|_∞ ≤ ε/3`, from the modulus of f (above Definition B.2).
    2. A uniform grid, P the least integer above 2D/δ on every axis of the cube [−D, D]^{dn}, so `G = P^{dn}` keys (G² for a
       pair) and cells narrower than δ. Values are f at the midpoints of the cells.
    3. One R for all axes and keys, `R = 8/(3δ²)·ln(6B₀G/ε)`, B₀ a bound of |f| (erratum 7). The logarithm is at least 1.

    The repaired proof (erratum 8) then gives `ε/3` from the cells within δ of z and `ε/3` from all others. These two numbers
    are facts of the certificate. What certifies the head is `grid-moments`, rounding included, which is about ε/6 for
    Lipschitz functions: the recipe is six times finer per axis than it has to be. In L_p the tolerance of the supremum is
    `ε/(volume · outputs)^{1/p}`, as in the proofs of Corollaries 4.1.1 and 4.2.1 for continuous f.

    On a box that is not a cube, P_i is the least integer above `side_i/δ`: the repaired proof asks for cells of at most δ on
    every axis and nothing else, and f is not evaluated outside the box. Cells are numbered row-major, as everywhere here;
    `cells_in_paper_order` gives the order of Remark B.1. "auto" lists this method as a forecast and never builds it.

    *Theorem*: `nearest-cell-gap`, `self-attention` (4.1), `cross-attention` (4.2).
    """

    name = "paper"
    exact = True
    most_keys = 0  # under "auto" a row of the report, by formula

    def applies(self, request: Request) -> Refusal | None:
        if refusal := needs_box(request):
            return refusal
        if request.knowledge is None:
            return Refusal("nothing is known about how fast f changes")
        if request.knowledge.known.jumps is not None:
            return Refusal("the paper's proof needs a continuous f, and this one may jump", 'Use method="hard".')
        return None

    def forecast(self, request: Request) -> Size | Refusal:
        found = _recipe(request)
        if isinstance(found, Refusal):
            return Refusal(found.reason)
        knowledge = knowledge_of(request)
        kind = "proved_given" if knowledge.declared else "proved"
        parameters = stored_numbers(request, found.counts)
        return Size(found.keys, parameters, kind, largest=knowledge.magnitude, error=request.tolerance)

    def plan(self, request: Request, share: float, progress: Progress | None = None) -> Plan | Refusal:
        found = _recipe(request)
        if isinstance(found, Refusal):
            return found
        knowledge, parameters = knowledge_of(request), stored_numbers(request, found.counts)
        size = size_text(parameters * request.precision.item_bytes)
        if parameters * request.precision.item_bytes > request.max_bytes:
            return Refusal(
                f"the paper's recipe for tolerance {request.asked:g} needs {keys_text(found.counts)}, {size} of tensors; "
                f"max_bytes allows {size_text(request.max_bytes)}",
                'Use a larger tolerance, raise max_bytes, or use method="hard": its cells may be about six times wider.',
                SizeError,
                keys=found.keys,
                parameters=parameters,
            )
        draft = found.draft(request)
        terms = predicted_terms(request, knowledge, draft)
        if total(terms) > request.tolerance:
            return floor_refusal(request, terms)
        facts = _paper_facts(request, knowledge, found, draft)
        columns = 2 * (request.target.output_shape[-1] if request.target.output_shape else 1) * found.keys
        spacing = request.box.sides / np.array(found.counts)
        return Plan(
            request=request,
            maker=self,
            kind="proved_given" if knowledge.declared else "proved",
            keys=found.keys,
            parameters=parameters,
            draft=(draft, facts),
            why=(
                keys_text(found.counts),
                f"δ = {found.delta:.4g}: points within δ of each other in the ∞-norm have values within ε/3 = "
                f"{request.aim / 3:.4g}; the widest cells are {spacing.max():.4g} wide",
                f"one R = 8/(3δ²)·ln(6·B₀·G/ε) = {draft.rates[0]:.6g}, because |f| ≤ B₀ = {knowledge.magnitude:.4g}",
                f"the paper's own bound, repaired: {facts['paper_near']:.4g} from cells within δ and {facts['paper_far']:.4g} "
                f"from all others; the moments of the softmax give {terms[0].value:.4g}",
                f"what is known about f is {knowledge.source}",
                f"{parameters:,} stored numbers, {size} in {request.precision.name}; the paper's layers have {columns:,} columns",
            ),
            error_bound=total(terms),
            sharpness=min(sharpness_of(request.box, draft), default=0.0),
            largest=knowledge.magnitude,
            rounding=sum(t.value for t in terms if t.source != "approximation"),
            counts=found.counts,
        )

    def build(self, plan: Plan, progress: Progress | None = None, seed: int = 0) -> Construction:
        draft, facts = plan.draft
        return values_at_centers(plan.request, draft, knowledge_of(plan.request), progress, facts)


def cells_in_paper_order(grid: ProductGrid, arguments: Sequence[int] = ()) -> NDArray[np.int64]:
    """Our label of the cell that Remark B.1 calls s, for s = 0, 1, …: `s = Σ_i k_i P^{i−1}`, the first axis fastest.

    With unequal counts the base of axis i is its own P_i. Cells of a pair of inputs are ordered as in (B.38): the cell of
    z_K slowest, and Remark B.1 within each.

    Args:
        grid: a product grid, `c.partition`.
        arguments: numbers of coordinates of the two inputs, `(m_K, m_Q)`; by default there is one input.

    Returns:
        `(cells,)`.

    Raises:
        DomainError: the numbers of coordinates do not add up to the dimension of the grid.

    >>> import partita as pa
    >>> grid = pa.ProductGrid.uniform(pa.Box([0, 0], [1, 1]), [2, 3])
    >>> cells_in_paper_order(grid).tolist()
    [0, 3, 1, 4, 2, 5]
    """
    sizes = list(arguments) or [grid.dimension]
    if sum(sizes) != grid.dimension:
        raise DomainError(f"arguments are {sizes}; expected numbers of coordinates that add up to {grid.dimension}.")
    axes: list[int] = []
    for size in sizes:
        axes += range(len(axes) + size - 1, len(axes) - 1, -1)
    out: NDArray[np.int64] = np.arange(grid.num_cells).reshape(grid.counts).transpose(axes).ravel()
    return out


@dataclass(frozen=True)
class _Recipe:
    """δ, cells per axis, and the logarithm in R."""

    delta: float
    counts: tuple[int, ...]
    log: float

    @property
    def keys(self) -> int:
        return math.prod(self.counts)

    def draft(self, request: Request) -> GridDraft:
        """One R, rounded up to the dtype of the head."""
        number = request.precision.number
        rate = float(request.precision.rates(8 / 3 * self.log, np.array([self.delta]))[0])
        rates = (float(np.nextafter(number(rate), number(np.inf))),) * len(self.counts)
        geometry = ProductGrid.uniform(request.box, self.counts, dtype=number).geometry
        return GridDraft(self.counts, rates, window_for(geometry, rates, _LEFT_OUT))


def _recipe(request: Request) -> _Recipe | Refusal:
    """Steps 1 to 3 by formula: nothing is allocated."""
    knowledge, sides = knowledge_of(request), request.box.sides
    delta = _closeness(knowledge.known, request.aim / 3, len(sides))
    with np.errstate(over="ignore", divide="ignore"):
        cells = np.floor(sides / delta) + 1
        digits = float(np.log10(cells).sum())
    if not digits < _MOST_DIGITS or cells.max() > 1e15:
        return Refusal("the paper's recipe needs more keys than can be counted", "Use a larger tolerance.", SizeError)
    counts = tuple(int(n) for n in cells)
    log = math.log(6) + math.log(math.prod(counts)) - math.log(request.aim)
    log += math.log(knowledge.magnitude) if knowledge.magnitude > 0 else -math.inf
    return _Recipe(min(delta, float(sides.max())), counts, max(log, 1.0))


def _closeness(known: Known, allowed: float, dimension: int) -> float:
    """δ with `|f(x) − f(y)| ≤ allowed` for `|x − y|_∞ ≤ δ`: the larger of what the moduli give; infinite for a constant f."""
    found = [0.0]
    if known.modulus is not None:
        found.append(known.modulus.reach(allowed) / math.sqrt(dimension))
    if known.per_axis is not None:
        slope = math.fsum(known.per_axis.constants)
        found.append(allowed / slope if slope else math.inf)
    return max(found)


def _paper_facts(request: Request, knowledge: Knowledge, recipe: _Recipe, draft: GridDraft) -> dict[str, float]:
    """The two parts of the repaired proof for the grid and R as stored, in exact arithmetic: `nearest-cell-gap`."""
    known, delta, moves = knowledge.known, recipe.delta, []
    if known.modulus is not None:
        distance = mul_up(sqrt_up(float(len(recipe.counts))), delta)
        moves.append(known.modulus.above(distance))
    if known.per_axis is not None:
        moves.append(mul_up(add_up(*known.per_axis.constants), delta))
    reach = max(axis.covering_radius for axis in draft.grid(request).geometry)
    gap = max(sub_down(mul_down(delta, delta), mul_up(reach, reach)), 0.0)
    leaked = mul_up(float(recipe.keys - 1), exp_up(-mul_down(0.5, draft.rates[0], gap)))
    far = mul_up(2.0, knowledge.magnitude, min(leaked, 1.0))
    near, far = (mul_up(part, up(request.domain_factor, 8)) for part in (min(moves), far))
    return {
        "closeness": delta,
        "inverse_temperature": draft.rates[0],
        "bound_of_f": knowledge.magnitude,
        "paper_near": near,
        "paper_far": far,
        "paper_bound": add_up(near, far),
    }
