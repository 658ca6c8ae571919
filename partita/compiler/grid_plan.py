"""Planning on boxes: the fewest cells of a product grid that meet the tolerance, rounding included."""

from __future__ import annotations

import math

import numpy as np
import torch

from partita.compiler.known_regularity import Knowledge
from partita.compiler.options import Options
from partita.compiler.planned import Candidate, Plan, floor_message, rounding_of, size_text
from partita.compiler.spacing import SpacingRule
from partita.errors import SizeError, ToleranceError
from partita.functions.target import Target
from partita.geometry.grid import ProductGrid
from partita.methods.on_grid import GridRecipe, grid_facts
from partita.proofs.center_values import grid_terms
from partita.proofs.certificate import Term, total
from partita.proofs.running import UNIT_ROUNDOFF

__all__ = ["forecast_grid", "plan_grid"]


def forecast_grid(target: Target, knowledge: Knowledge, options: Options) -> Candidate:
    """The size of a hard head by the spacing rule alone: nothing is allocated, however many keys it takes."""
    counts = _rule(target, knowledge, options).counts(options.tolerance)
    keys = math.prod(counts)
    return Candidate(
        "hard",
        "proved_given" if knowledge.declared else "proved",
        "a forecast, not built",
        keys=keys,
        parameters=keys * target.num_outputs + sum(counts) + len(counts),
        largest=knowledge.magnitude,
        error=options.tolerance,
    )


def plan_grid(target: Target, knowledge: Knowledge, options: Options) -> Plan:
    """A plan on the box (or the product of two): sizes and the reasons for them."""
    rule = _rule(target, knowledge, options)
    recipe, terms = _meeting_recipe(target, knowledge, options, rule)
    counts = recipe.counts
    keys = math.prod(counts)
    parameters = keys * target.num_outputs + sum(counts) + len(counts)
    size = parameters * options.item_bytes
    window = " × ".join(str(min(2 * q, c)) for q, c in zip(recipe.half_windows, counts))
    why = (
        f"{' × '.join(map(str, counts))} = {keys:,} keys" if len(counts) > 1 else f"{keys:,} keys",
        *rule.explain(counts, terms),
        f"what is known of f is {knowledge.source}",
        f"{parameters:,} stored numbers, {size_text(size)} in {options.semantics}; a query looks at {window} of the keys",
    )
    return Plan(
        target=target,
        knowledge=knowledge,
        recipe=recipe,
        method="hard",
        kind="proved_given" if knowledge.declared else "proved",
        keys=keys,
        parameters=parameters,
        bytes=size,
        sharpness=options.hard_sharpness,
        error_bound=total(terms),
        largest=knowledge.magnitude,
        rounding=rounding_of(terms),
        why=why,
    )


def _rule(target: Target, knowledge: Knowledge, options: Options) -> SpacingRule:
    box = target.domain.bounding_box()
    return SpacingRule(knowledge.known, options.norm, options.hard_sharpness, box, target.num_outputs, options.storage)


def _meeting_recipe(
    target: Target, knowledge: Knowledge, options: Options, rule: SpacingRule
) -> tuple[GridRecipe, list[Term]]:
    """The coarsest grid whose predicted bound meets the tolerance; what rounding takes is taken from the spacing's aim."""
    aim, terms = options.tolerance, []
    for _ in range(100):
        counts = rule.counts(aim)
        _refuse_large(counts, rule, target, options)
        rates, windows = tuple(rule.rates(counts).tolist()), rule.half_windows(counts)
        recipe = GridRecipe(counts, rates, windows, options.norm, options.tolerance, options.dtype)
        terms = _predicted_terms(target, knowledge, recipe)
        bound = total(terms)
        if bound <= options.tolerance:
            return recipe, terms
        rest = bound - sum(t.value for t in terms if t.name in ("approximation", "jumps"))
        aim = min(aim * (1 - 1e-9), aim - (bound - options.tolerance) * (1 + 1e-9))
        if rest >= 0.5 * options.tolerance or aim <= 0:
            break
    raise ToleranceError(floor_message(target, options, terms))


def _predicted_terms(target: Target, knowledge: Knowledge, recipe: GridRecipe) -> list[Term]:
    """The terms of the bound, with |f| ≤ magnitude in place of the values that nobody has asked for yet."""
    box = target.domain.bounding_box()
    storage = np.float32 if recipe.dtype == torch.float32 else np.float64
    axes = ProductGrid.uniform(box, recipe.counts, dtype=storage).axes
    stored = (
        UNIT_ROUNDOFF["float32"] if storage is np.float32 else 0.0
    )  # a black box's float64 answers are stored as they are
    computed = 64 * UNIT_ROUNDOFF["float64"] if target.graph is not None else 0.0
    facts = grid_facts(
        list(axes),
        box,
        recipe,
        outputs=target.num_outputs,
        largest=knowledge.magnitude,
        spread=2 * knowledge.magnitude,
        value_error=(stored + computed) * knowledge.magnitude,
    )
    return grid_terms(facts, knowledge.known, recipe.norm)


def _head_bytes(counts: tuple[int, ...], target: Target, options: Options) -> int:
    return (math.prod(counts) * target.num_outputs + sum(counts)) * options.item_bytes


def _refuse_large(counts: tuple[int, ...], rule: SpacingRule, target: Target, options: Options) -> None:
    size = _head_bytes(counts, target, options)
    if size <= options.max_bytes:
        return
    if _head_bytes((1,) * len(counts), target, options) > options.max_bytes:
        raise SizeError(f"max_bytes = {options.max_bytes:,} does not hold even a single key.")
    low = high = options.tolerance
    while _head_bytes(rule.counts(high), target, options) > options.max_bytes:
        low, high = high, 2 * high
    for _ in range(30):
        middle = math.sqrt(low * high)
        fits = _head_bytes(rule.counts(middle), target, options) <= options.max_bytes
        low, high = (low, middle) if fits else (middle, high)
    raise SizeError(
        f"tolerance {options.tolerance:g} needs {' × '.join(map(str, counts))} = {math.prod(counts):.4g} keys, "
        f"{size_text(size)} of values; max_bytes allows {size_text(options.max_bytes)}. The best tolerance that fits "
        f"is about {high * 1.001:.4g} ({math.prod(rule.counts(high)):,} keys, one value per cell); or raise max_bytes."
    )
