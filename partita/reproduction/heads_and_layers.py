"""More heads, more layers: what one head, several heads of one layer, and several layers store at equal proved error."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from partita.compiler.compile import build, plan
from partita.errors import SizeError, ToleranceError
from partita.geometry import Box
from partita.heads.network import AttentionNetwork
from partita.methods.method import Plan
from partita.papers.lower_bounds import additive_gap, least_numbers
from partita.plots.colours import COLOURS, SOFT
from partita.plots.style import clean, loosen, new_figure, series
from partita.reproduction.experiment import Experiment, Outcome, Quotation, Setup, Verdict
from partita.reproduction.statistics import log_slope, slope
from partita.reproduction.structured_functions import KNOWN_FUNCTIONS
from partita.reproduction.table import Table, Tables

__all__ = ["EXPERIMENT", "Settings", "draw_heads_and_layers"]

_WAYS = ("one head", "several heads", "several layers")
_TITLES = {
    "sum": "a sum of functions of one variable",
    "pairs": "a sum of functions of two variables",
    "bell": "a function of one sum: exp(−Σ a_i x_i²)",
    "product": "the product of all inputs",
    "any": "3^m independent coefficients",
}
_SUMS, _COMPOSITIONS, _ANY = ("sum", "pairs"), ("bell", "product"), "any"
_MOST_POWER = 1.5  # of the dimension, with which stored numbers may grow where structure is said to help


@dataclass(frozen=True)
class Settings:
    """Dimensions for structured functions, for one head and for unstructured ones, the error over the size of f, and how many keys
    of one head are built and not only planned."""

    dimensions: tuple[int, ...] = (2, 4, 6, 8, 10)
    one_head: tuple[int, ...] = (2, 3, 4, 5)
    unstructured: tuple[int, ...] = (1, 2, 3, 4)
    tolerance: float = 1e-3
    build_until: int = 200
    families: tuple[str, ...] = ("sum", "pairs", "bell", "product", "any")
    known: tuple[str, ...] = tuple(KNOWN_FUNCTIONS)


def _factor(i: int) -> str:
    """Different numbers between 1 and 2, so that no two terms are equal and none is much harder than the others."""
    return f"{1 + 0.618 * i % 1:.3f}"


def _sum(m: int) -> tuple[str, float]:
    return " + ".join(f"sin({_factor(i)}*x{i} + {i}/7)" for i in range(m)), float(m)


def _pairs(m: int) -> tuple[str, float]:
    return " + ".join(f"exp({_factor(i)}*x{i}*x{i + 1})" for i in range(m - 1)), float(m - 1)


def _bell(m: int) -> tuple[str, float]:
    return "exp(-(" + " + ".join(f"{_factor(i)}*x{i}^2" for i in range(m)) + "))", 1.0


def _product(m: int) -> tuple[str, float]:
    return "*".join(f"x{i}" for i in range(m)), 1.0


def _any(m: int) -> tuple[str, float]:
    """`Σ c_k cos(2k·x + φ_k)` over k ∈ {0, 1, 2}^m, with random c and φ."""
    rng, terms = np.random.default_rng(m), []
    for k in np.ndindex(*(3,) * m):
        wave = " + ".join(f"{2 * n}*x{i}" for i, n in enumerate(k) if n)
        terms.append(f"{rng.normal():.3f}*cos({f'{wave} + ' if wave else ''}{rng.uniform(0, 6):.3f})")
    return " + ".join(terms).replace("+ -", "- "), 3 ** (m / 2)


_FAMILIES: Mapping[str, Callable[[int], tuple[str, float]]] = {
    "sum": _sum,
    "pairs": _pairs,
    "bell": _bell,
    "product": _product,
    "any": _any,
}


def run(setup: Setup) -> Tables:
    """`sizes`: a row per family, dimension and way that was found. `refused`: why others were not. `floors`: what any network
    needs. `gaps`: how far the functions of engineering are from sums of functions of few coordinates."""
    settings: Settings = setup.settings
    rows: list[dict[str, object]] = []
    refused: list[dict[str, object]] = []
    cases = [(name, m) for name in settings.families for m in _dimensions(name, settings)]
    for done, (name, m) in enumerate(cases):
        expression, size = _FAMILIES[name](m)
        box, tolerance = Box([-1.0] * m, [1.0] * m), settings.tolerance * size
        found: dict[str, Plan] = {}
        for way in _WAYS if name == _ANY else _ways(m, settings):
            planned = _planned(expression, box, tolerance, way)
            if isinstance(planned, str):
                refused.append({"family": name, "dimension": m, "way": way, "reason": planned})
            else:
                found[way] = planned
        heads, layers = found.get(_WAYS[1]), found.get(_WAYS[2])
        if heads and (layers is None or heads.parameters < layers.parameters):
            found[_WAYS[2]] = heads  # layers may be one
        rows += [{"family": name, "dimension": m, "way": w, **_size(p, tolerance, settings)} for w, p in found.items()]
        setup.progress(done + 1, len(cases) + 1)
    return {"sizes": Table.of(rows), "refused": Table.of(refused), "floors": _floors(settings), "gaps": _gaps(settings)}


def _dimensions(name: str, settings: Settings) -> tuple[int, ...]:
    return settings.unstructured if name == _ANY else tuple(sorted({*settings.dimensions, *settings.one_head}))


def _ways(m: int, settings: Settings) -> tuple[str, ...]:
    return _WAYS[: 1 if m in settings.one_head else 0] + (_WAYS[1:] if m in settings.dimensions else ())


def _planned(expression: str, box: Box, tolerance: float, way: str) -> Plan | str:
    """The plan of the smallest proved head or network of this kind, or the reason why there is none."""
    if way == _WAYS[0]:
        options: dict[str, Any] = {"max_heads": 1, "max_layers": 1, "max_bytes": 1 << 90}
    else:
        options = {"method": "heads" if way == _WAYS[1] else "layers"}
    try:
        found = plan(expression, box, tolerance=tolerance, **options)
    except (ToleranceError, SizeError) as error:
        return str(error)
    return found if found.kind == "proved" else f"its error would be {found.kind}"


def _size(planned: Plan, tolerance: float, settings: Settings) -> dict[str, object]:
    sizes: dict[str, object] = {
        "method": planned.method,
        "stored_numbers": planned.parameters,
        "keys": float(planned.keys),
        "heads": 1,
        "layers": 1,
        "tolerance": tolerance,
        "error_bound": planned.error_bound,
        "claim": "planned",
        "worst_seen": None,
    }
    if planned.method not in ("heads", "layers") and planned.keys > settings.build_until:
        return sizes
    built = build(planned)
    if isinstance(built.head, AttentionNetwork):
        sizes |= {"heads": built.head.num_uses, "layers": built.head.num_layers}
    return sizes | {
        "stored_numbers": built.num_parameters,
        "error_bound": built.error_bound,
        "claim": built.certificate.kind,
        "worst_seen": built.attack(samples=2048).error,
    }


def _floors(settings: Settings) -> Table:
    """For all functions with `|f(x) − f(y)| ≤ |x − y|_∞` on a unit cube at ε = 0.05: what is needed, and what one hard head has."""
    tolerance, rows = 0.05, []
    for m in settings.dimensions:
        cells = math.ceil(1 / (2 * tolerance)) ** m
        rows.append({"dimension": m, "least_numbers": least_numbers(m, tolerance), "one_hard_head": float(cells)})
    return Table.of(rows)


def _gaps(settings: Settings) -> Table:
    """The lower bound for sums of functions of k coordinates, over max f − min f."""
    rows = []
    for name in settings.known:
        f = KNOWN_FUNCTIONS[name]
        for reads in range(1, f.box.dimension):
            gap = additive_gap(f.expression, f.box, reads=reads).lower_bound / f.span
            rows.append({"function": name, "reads": reads, "relative_gap": gap})
            if gap < 1e-5:
                break
    for m in settings.dimensions:
        gap = additive_gap(_product(m)[0], Box([-1.0] * m, [1.0] * m), reads=m - 1).lower_bound / 2
        rows.append({"function": f"product of {m}", "reads": m - 1, "relative_gap": gap})
    return Table.of(rows)


def _growth(table: Table, family: str, way: str) -> tuple[float, float]:
    """The factor by which stored numbers grow per dimension, and the power of the dimension with which they grow."""
    rows = table.where(family=family, way=way)
    if len(rows) < 2:
        return math.nan, math.nan
    numbers = rows["stored_numbers"].astype(float)
    return math.exp(slope(rows["dimension"], np.log(numbers)).value), log_slope(rows["dimension"], numbers).value


def verdict(tables: Tables) -> Verdict:
    """Whether heads help sums, layers help compositions, and neither helps where there is no structure, as the criterion says."""
    table, gaps = tables["sizes"], tables["gaps"]
    families = table.distinct("family")
    numbers: dict[str, float] = {}
    helped, words = [], []
    for family in [f for f in (*_SUMS, *_COMPOSITIONS) if f in families]:
        way = _WAYS[1] if family in _SUMS else _WAYS[2]
        factor, _ = _growth(table, family, _WAYS[0])
        _, power = _growth(table, family, way)
        alone = family in _SUMS or len(table.where(family=family, way=_WAYS[1])) == 0
        helped.append(factor > 2 and power <= _MOST_POWER and alone)
        numbers |= {f"{family}_one_head_factor": factor, f"{family}_power": power}
        last = table.where(family=family, way=way).rows()[-1]
        words.append(
            f"{family}: one head grows {factor:.1f}-fold per dimension, {way} like m^{power:.1f} "
            f"({last['stored_numbers']} numbers at m = {last['dimension']})"
        )
    useless = []
    for way in _WAYS:
        if _ANY in families and len(table.where(family=_ANY, way=way)) > 1:
            factor, _ = _growth(table, _ANY, way)
            useless.append(factor > 2)
            numbers[f"any_{way.replace(' ', '_')}_factor"] = factor
    words.append(
        "no structure: "
        + ", ".join(
            f"{way} {numbers[key]:.1f}-fold"
            for way in _WAYS
            if (key := f"any_{way.replace(' ', '_')}_factor") in numbers
        )
    )
    sound = all(
        row["error_bound"] <= row["tolerance"]
        and (row["worst_seen"] is None or row["worst_seen"] <= row["error_bound"])
        for row in table.rows()
    )
    products = gaps["relative_gap"][np.char.startswith(gaps["function"].astype(str), "product")]
    impossible = bool(len(products)) and float(products.min()) > 0.499
    words.append(f"no sum of functions that miss an input is nearer to the product than {2 * products.min():.3f}")
    outcome: Outcome = "fails" if not any(helped) or not sound else "mixed"
    if all(helped) and all(useless) and useless and impossible and sound:
        outcome = "holds"
    return Verdict(outcome, "At equal proved error: " + "; ".join(words) + ".", numbers)


def control(seed: int) -> Tables:
    """Heads and layers whose numbers grow as fast as those of one head."""
    rng = np.random.default_rng(seed)
    rows = [
        {
            "family": family,
            "dimension": m,
            "way": way,
            "stored_numbers": 5**m * rng.uniform(0.9, 1.1),
            "tolerance": 1e-3,
            "error_bound": 1e-3,
            "worst_seen": 5e-4,
        }
        for family in _TITLES
        for m in (2, 3, 4, 5, 6)
        for way in _WAYS
    ]
    gaps = [{"function": f"product of {m}", "reads": m - 1, "relative_gap": 0.5} for m in (2, 3, 4)]
    return {"sizes": Table.of(rows), "gaps": Table.of(gaps)}


def digest(tables: Tables) -> Table:
    """Stored numbers of the three ways, a row per family and dimension."""
    table = tables["sizes"]
    rows = []
    for family in table.distinct("family"):
        for m in table.where(family=family).distinct("dimension"):
            found = {row["way"]: row["stored_numbers"] for row in table.where(family=family, dimension=m).rows()}
            shown = {way.replace(" ", "_"): f"{found[way]:.3g}" if way in found else "–" for way in _WAYS}
            rows.append({"family": family, "dimension": m, **shown})
    return Table.of(rows)


def draw_heads_and_layers(tables: Tables) -> Any:
    """A panel per family: stored numbers against the dimension; last, the lower bounds for sums of functions of few coordinates."""
    table, floors, gaps = tables["sizes"], tables["floors"], tables["gaps"]
    families = table.distinct("family")
    columns = 3
    figure, panels = new_figure(columns, -(-(len(families) + 1) // columns), width=3.4, height=2.9)
    loosen(figure)
    places = panels.ravel()
    for panel, family in zip(places, families):
        for number, way in enumerate(_WAYS):
            rows = table.where(family=family, way=way)
            if len(rows):
                series(panel, rows["dimension"], rows["stored_numbers"], number, way)
        panel.set_yscale("log")
        clean(panel, _TITLES[family], x="dimension m", y="stored numbers")
    if _ANY in families:
        panel = places[families.index(_ANY)]
        panel.plot(floors["dimension"], floors["least_numbers"], color=SOFT, label="any network, ε = 0.05")
        panel.set_ylim(top=1e7)
        panel.set_xlim(right=max(table.where(family=_ANY)["dimension"]) + 3)
    last = places[len(families)]
    for number, name in enumerate(n for n in gaps.distinct("function") if not n.startswith("product")):
        rows = gaps.where(function=name)
        some = rows["relative_gap"] > 0
        series(last, rows["reads"][some], rows["relative_gap"][some], number, name)
    last.axhline(1e-3, color=COLOURS[0], linewidth=0.8, linestyle=":")
    last.set_yscale("log")
    last.set_ylim(1e-9, 1)
    clean(last, "error of any sum of functions of k inputs ≥", x="k", y="over max f − min f")
    last.legend(loc="lower left", ncols=2)
    for panel in places[len(families) + 1 :]:
        panel.set_visible(False)
    lines, labels = places[families.index(_ANY) if _ANY in families else 0].get_legend_handles_labels()
    figure.legend(lines, labels, loc="outside lower left", ncols=len(labels))
    return figure


EXPERIMENT = Experiment(
    name="heads-and-layers",
    title="More heads, more layers",
    source="2504.19901, section 7 (open questions)",
    claim="Several heads, or several layers, need fewer numbers than one head where the function has structure that they follow.",
    quotations=(
        Quotation(
            "Can multi-head or deeper attention layers simplify representational requirements or reduce approximation constants?",
            "section 7, Implications and Future Work",
        ),
        Quotation(
            "Our minimal-assumption design needs many partition regions to cover diverse targets. This follows naturally from "
            "the general setting we study. High-dimensional inputs or long sequences then inflate the parameter count",
            "section 7, limitations, Large Dimensions and Network Size",
        ),
    ),
    criterion=(
        "For sums, the stored numbers of several heads grow at most like m^1.5; for compositions, those of several layers do, "
        "and one layer of heads is not found; in both cases those of one head more than double with every dimension. For "
        "functions without structure those of all three more than double. Every bound is at most the tolerance, and no attack "
        "exceeds a bound. The proved lower bound for the product of all inputs and sums of functions that miss an input is 1. "
        "The claim fails if no structure helps."
    ),
    method=(
        "Four families with structure in 2 to 10 dimensions and one without in 1 to 4, on [−1, 1]^m, at an error of 10⁻³ of "
        "their size: one head as pa.compile finds it with max_heads = max_layers = 1, up to m = 5 and only planned beyond 200 "
        "keys; method heads; and the smaller of methods heads and layers. Networks are built, proved and attacked. For the "
        "product, one head with two keys per axis has 2^m keys; the search finds it up to m = 3. Lower bounds: "
        "mixed-difference for the product and for six functions of engineering, unstructured-numbers for all Lipschitz "
        "functions."
    ),
    run=run,
    verdict=verdict,
    control=control,
    settings={
        "tiny": Settings(
            dimensions=(2, 3),
            one_head=(2, 3),
            unstructured=(1, 2),
            build_until=0,
            families=("sum", "bell", "any"),
            known=("Ishigami",),
        ),
        "default": Settings(),
        "full": Settings(dimensions=(2, 4, 6, 8, 10, 15, 20), one_head=(2, 3, 4, 5, 6), build_until=1000),
    },
    seconds={"tiny": 2, "default": 85, "full": 600},
    digest=digest,
)
