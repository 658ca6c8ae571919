"""What crosses the wire: heads, functions, certificates, reports and errors as JSON values, and requests read back.

A head is `net(z) = Σ_j softmax_j(E_j(z)) V_j(z)` with `E_j(z) = −½ Σ_i R_i (z_i − c_{ji})² + b_j` and
`V_j(z) = v_j + Σ_i g_{ji} (z_i − c_{ji})`. Everything here is a pure function.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from partita.compiler.compiled import Compiled
from partita.errors import PartitaError
from partita.functions.graph import Graph
from partita.functions.limits import LogLimit, Quotient
from partita.functions.target import Target
from partita.geometry.domains import Array, Box
from partita.heads.grid_head import GridHead
from partita.heads.head import Head, numbers
from partita.heads.scattered_head import ScatteredHead
from partita.heads.train_head import TrainHead
from partita.methods.method import Candidate
from partita.studio.jobs import MOST_KEYS

__all__ = [
    "COLUMNS",
    "Keys",
    "RequestError",
    "box_values",
    "certificate_values",
    "choice",
    "compiled_values",
    "drawn_keys",
    "error_values",
    "function_values",
    "graph_values",
    "head_values",
    "number",
    "report_values",
    "rows",
    "text",
]

MOST_INPUTS, MOST_OUTPUTS = 2, 16
COLUMNS = ("method", "kind", "keys", "numbers", "bound", "chosen", "reason")
_LARGEST = 1e300  # of a number in a request


class RequestError(PartitaError):
    """A request that is not what the studio's page sends. `where` names the field."""

    where: str = ""

    @classmethod
    def of(cls, where: str, found: str, expected: str) -> RequestError:
        """The error about one field of a request."""
        error = cls(f"the field {where!r} of the request is {found}; expected {expected}.")
        error.where = where
        return error


def _shown(value: object) -> str:
    if isinstance(value, dict | list):
        return f"a {'list' if isinstance(value, list) else 'object'} of {len(value):,} entries"
    said = repr(value)
    return said if len(said) <= 60 else f"{said[:57]}…"


def text(asked: Mapping[str, Any], where: str, most: int, default: str | None = None) -> str:
    """A field that holds text of at most so many characters."""
    value = asked.get(where, default)
    if not isinstance(value, str) or len(value) > most:
        found = f"a text of {len(value):,} characters" if isinstance(value, str) else _shown(value)
        raise RequestError.of(where, found, f"a text of at most {most:,} characters")
    return value


def choice(asked: Mapping[str, Any], where: str, among: Sequence[str], default: str | None = None) -> str:
    """A field that holds one of a few words."""
    value = asked.get(where, default)
    if not isinstance(value, str) or value not in among:
        raise RequestError.of(where, _shown(value), f"one of {', '.join(map(repr, among))}")
    return value


def number(
    asked: Mapping[str, Any],
    where: str,
    least: float,
    most: float,
    default: float | None = None,
    *,
    whole: bool = False,
) -> float:
    """A field that holds a finite number in a range."""
    value = asked.get(where, default)
    good = isinstance(value, int if whole else int | float) and not isinstance(value, bool)
    most = min(most, _LARGEST)
    if value is None or not good or not least <= value <= most:
        raise RequestError.of(where, _shown(value), f"a {'whole ' * whole}number from {least:g} to {most:g}")
    return float(value)


def rows(value: Any, where: str, most: int, width: int | None) -> Array:
    """A list of at most `most` numbers `(n,)`, or of lists of `width` numbers `(n, width)`, all finite."""
    expected = f"a list of 1 to {most:,} " + ("numbers" if width is None else f"lists of {width} numbers")
    if not isinstance(value, list) or not 1 <= len(value) <= most:
        raise RequestError.of(where, _shown(value), expected)
    lists = [value] if width is None else value
    for row in lists:
        if not isinstance(row, list) or (width is not None and len(row) != width):
            raise RequestError.of(where, f"a list that holds {_shown(row)}", expected)
        for entry in row:
            if type(entry) not in (int, float) or not -_LARGEST <= entry <= _LARGEST:
                raise RequestError.of(where, f"a list that holds {_shown(entry)}", f"{expected}, all finite")
    return np.array(value, dtype=np.float64)


@dataclass(frozen=True, eq=False)
class Keys:
    """A head that was drawn by hand: R, centers `(N, m)`, powers `(N,)`, values `(N,)`, slopes `(N, m)`."""

    rate: float
    centers: Array
    powers: Array | None
    values: Array
    slopes: Array | None


def drawn_keys(value: Any, dimension: int) -> Keys:
    """The head of a request.

    Raises:
        RequestError: it is not such a head, or its rates differ from axis to axis.
    """
    if not isinstance(value, Mapping):
        raise RequestError.of("head", _shown(value), "an object with rates, centers, biases, values and slopes")
    rates = rows(value.get("rates"), "head.rates", dimension, None)
    if len(rates) != dimension or not (rates > 0).all() or rates.min() != rates.max():
        raise RequestError.of("head.rates", _shown(rates.tolist()), f"{dimension} equal numbers > 0")
    rate = float(rates[0])
    centers = rows(value.get("centers"), "head.centers", MOST_KEYS, dimension)
    biases, slopes, count = value.get("biases"), value.get("slopes"), len(centers)
    powers = None if biases is None else rows(biases, "head.biases", count, None) * (2 / rate)
    values = rows(value.get("values"), "head.values", count, None)
    planes = None if slopes is None else rows(slopes, "head.slopes", count, dimension)
    for name, array in (("biases", powers), ("values", values), ("slopes", planes)):
        if array is not None and len(array) != count:
            raise RequestError.of(f"head.{name}", f"a list of {len(array):,}", f"{count:,} entries, one per center")
    return Keys(rate, centers, powers, values, planes)


def head_values(head: Head) -> dict[str, Any] | None:
    """The head in the wire's form; None if it has too many inputs, outputs or keys, or is a network of heads.

    The first output is at the top. Where there are several, `outputs` lists the values and slopes of each.
    """
    if head.dimension > MOST_INPUTS or head.num_outputs > MOST_OUTPUTS or head.num_keys > MOST_KEYS:
        return None
    biases: Array | None = None
    if isinstance(head, ScatteredHead):
        rates = np.full(head.dimension, float(head.inverse_temperature))
        centers = numbers(head.centers)
        if head.powers is not None:
            biases = 0.5 * rates[0] * numbers(head.powers)
        slopes = None if head.value_slopes is None else numbers(head.value_slopes)
        values = numbers(head.values)
    elif isinstance(head, GridHead | TrainHead):
        rates = numbers(head.inverse_temperature)
        axes = [numbers(axis) for axis in head.axes]
        centers = np.stack([a.ravel() for a in np.meshgrid(*axes, indexing="ij")], axis=1)
        values, slopes = numbers(head.values), None
        if isinstance(head, GridHead) and head.value_slopes is not None and head.origin is not None:
            slopes = numbers(head.value_slopes)  # around one origin; the wire's are around each center
            values = values + np.einsum("com,cm->co", slopes, centers - numbers(head.origin))
    else:
        return None
    outputs = [
        {"values": values[:, k].tolist(), "slopes": None if slopes is None else slopes[:, k].tolist()}
        for k in range(head.num_outputs)
    ]
    return {
        "rates": np.broadcast_to(rates, head.dimension).tolist(),
        "centers": centers.tolist(),
        "biases": None if biases is None else biases.tolist(),
        **outputs[0],
        "dimension": head.dimension,
        **({"outputs": outputs} if len(outputs) > 1 else {}),
    }


def box_values(box: Box) -> dict[str, Any]:
    """The corners, flat."""
    return {"lo": box.lo.ravel().tolist(), "hi": box.hi.ravel().tolist()}


def graph_values(graph: Graph) -> dict[str, Any]:
    """The graph, with `limits`: [node, watched node, value], the value of a node where the watched one is 0 (sin(x)/x at 0)."""
    found = []
    for node, limit in graph.limits.items():
        if isinstance(limit, Quotient | LogLimit):
            watched = limit.base if isinstance(limit, Quotient) else limit.argument
            value = limit.at("numpy", np.float64(np.nan), {k: np.float64(0.0) for k in limit.reads})
            found.append([node, watched, float(value).hex()])
    return {**graph.to_json(), **({"limits": found} if found else {})}


def function_values(target: Target) -> dict[str, Any]:
    """The function of a target: its label, its graph and its box."""
    return {
        "label": target.label,
        "graph": None if target.graph is None else graph_values(target.graph),
        "box": box_values(target.box),
        "dimension": target.box.dimension,
        "outputs": target.num_outputs,
    }


def certificate_values(compiled: Compiled) -> dict[str, Any]:
    """What is claimed of a head: the bound or the estimate, its terms and assumptions, and the worst error seen."""
    certificate = compiled.certificate
    witness = certificate.witness
    return {
        "bound": _finite(certificate.error),
        "kind": certificate.kind,
        "claim": certificate.claim,
        "terms": [
            {"name": t.name, "value": _finite(t.value), "formula": t.formula, "theorem": t.theorem, "source": t.source}
            for t in certificate.terms
        ],
        "assumptions": [
            {"statement": a.statement, "vouched_by": a.vouched_by, "worst_ratio": a.worst_ratio, "attack": a.attack}
            for a in certificate.assumptions
        ],
        "theorem": certificate.theorem,
        "seen": None if witness is None else _finite(witness.error),
        "seen_at": None if witness is None else list(witness.point),
        "explain": compiled.explain(),
    }


def report_values(candidates: Sequence[Candidate]) -> dict[str, Any]:
    """Every method that was considered, as rows of a table; None where a figure is not known. `because`: why one was chosen."""
    return {
        "columns": list(COLUMNS),
        "because": next((c.because for c in candidates if c.chosen), ""),
        "rows": [
            {
                "method": c.method,
                "kind": c.kind,
                "keys": c.keys,
                "numbers": c.parameters,
                "bound": None if c.error is None else _finite(c.error),
                "chosen": c.chosen,
                "reason": c.note,
            }
            for c in candidates
        ],
    }


def compiled_values(compiled: Compiled, tolerance: float) -> dict[str, Any]:
    """A compiled head with its function, its certificate and the report of all methods, as the page shows it."""
    counts = getattr(compiled.head, "counts", None)
    return {
        "head": head_values(compiled.head),
        **function_values(compiled.target),
        **certificate_values(compiled),
        "report": report_values(compiled.candidates),
        "summary": repr(compiled),
        "method": compiled.candidates[0].method,
        "keys": compiled.num_keys,
        "keys_per_axis": None if counts is None else list(counts),
        "numbers": compiled.num_parameters,
        "tolerance": tolerance,
        "tolerance_met": compiled.tolerance_met,
        "why": list(compiled.why),
        "evaluations": compiled.evaluations,
    }


def _finite(value: float) -> float | None:
    """JSON has no infinity."""
    return float(value) if math.isfinite(value) else None


def error_values(error: BaseException, where: str | None = None) -> dict[str, Any]:
    """An error of the library: its message, the field it is about, and the place in the text if it is known.

    `short` is the message without the text and the mark below the place, for those who mark the place themselves.
    """
    start, end = getattr(error, "span", None) or (None, None)
    said = str(error)
    return {
        "type": type(error).__name__,
        "message": said,
        "short": getattr(error, "problem", "") or said,
        "where": getattr(error, "where", "") or where,
        "start": start,
        "end": end,
    }
