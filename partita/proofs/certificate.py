"""Certificates: what is claimed, of what kind, made of which terms, under which assumptions."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal, get_args

from partita.arithmetic.notebook_cards import card
from partita.arithmetic.precision import PRECISIONS
from partita.arithmetic.rounding import add_up
from partita.errors import FormatError
from partita.functions.curvature import Curvature
from partita.functions.regularity import Known
from partita.heads.tensor_digest import model_digest
from partita.kernels.guards import DEVICES

__all__ = [
    "QUERY_VALUES",
    "Assumption",
    "Certificate",
    "Kind",
    "Source",
    "Term",
    "Witness",
    "hex_floats",
    "model_digest",
    "plain_floats",
    "total",
]

SCHEMA = 2
Kind = Literal["proved", "proved_given", "estimated"]
Source = Literal["approximation", "storage", "rounding", "input"]
# certificates of schema 1 did not store the source of a term; these are the terms that were not approximation
_SOURCES_OF_SCHEMA_1: Mapping[str, Source] = {
    "stored values": "storage",
    "stored centers": "storage",
    "stored scores": "storage",
    "window": "rounding",
    "score rounding": "rounding",
    "summation": "rounding",
    "value rounding": "rounding",
    "input rounding": "input",
}
QUERY_VALUES = "affine in z_K and z_Q"  # of a head on pairs that is not cross-attention
_CONFIDENCE = 1e-6  # β of the statement that an estimate makes


@dataclass(frozen=True)
class Term:
    """One summand of an error bound, rounded up, with the formula it comes from and the numbers that went in.

    `source` says what causes it: the `approximation` of f by the exact head, the `storage` of its numbers in the dtype, the
    `rounding` of running it (cells left out included), or the rounding of an `input`.
    """

    name: str
    value: float
    formula: str
    theorem: str
    inputs: Mapping[str, float] = field(default_factory=dict)
    source: Source = "approximation"


@dataclass(frozen=True)
class Assumption:
    """Something the bound rests on, and who vouches for it: `caller`, `interval arithmetic`, `construction` or `platform`.

    Attributes:
        worst_ratio: the largest observed/allowed ratio in an attack on it (above 1 would refute it); None if not attackable.
        about: what it is about, for programs: `regularity` (moduli and jumps of f), `curvature`, `function`, `domain`, `platform`,
            or empty.
    """

    statement: str
    vouched_by: str
    worst_ratio: float | None = None
    attack: str = ""
    about: str = ""


@dataclass(frozen=True)
class Witness:
    """The worst point an attack found: the claim is the bracket [error, error_bound]."""

    point: tuple[float, ...]
    error: float
    samples: int


@dataclass(frozen=True)
class Certificate:
    """A claim `‖f − net‖ ≤ error_bound` on the domain, for the stored tensors as evaluated in `semantics`.

    Attributes:
        kind: `proved` (f is known as a graph), `proved_given` (if the assumptions of the caller hold), or `estimated`
            (f was sampled: nothing is proved, the bound is infinite).
        norm: "inf", or p as a number.
        error_bound: the sum of the terms, rounded up.
        theorem: key into docs/theorems.md.
        error_estimate: for `estimated`, the largest error seen in `samples` points drawn after the head was finished.
        proof: how the approximation term was found, with what is needed to find it again.
        function, domain, model: JSON descriptions with hashes. known: the moduli that the terms use.
        facts: numbers that people ask for (covering radius, sharpness, optimal ratio, …).
    """

    kind: Kind
    norm: str
    semantics: str
    tolerance: float
    error_bound: float
    terms: tuple[Term, ...]
    assumptions: tuple[Assumption, ...]
    theorem: str
    function: Mapping[str, Any]
    domain: Mapping[str, Any]
    model: Mapping[str, Any]
    known: Mapping[str, Any] = field(default_factory=dict)
    facts: Mapping[str, float] = field(default_factory=dict)
    witness: Witness | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    seed: int = 0
    error_estimate: float | None = None
    samples: int = 0
    proof: Mapping[str, Any] = field(default_factory=dict)

    def with_estimate(self, error: float) -> Certificate:
        """The same estimate after a search that found this error: the samples are still those drawn before it."""
        seen = replace(self.terms[0], value=error)
        return replace(self, error_estimate=error, terms=(seen, *self.terms[1:]))

    def __repr__(self) -> str:
        norm = "sup" if self.norm == "inf" else f"L{self.norm}"
        counts = ((len(self.terms), "term"), (len(self.assumptions), "assumption"))
        parts = ", ".join(f"{n} {what}{'' if n == 1 else 's'}" for n, what in counts)
        return f"Certificate({self.kind}: {norm} error {self.claim}, {self._asked}, {self.semantics}; {parts})"

    def _repr_html_(self) -> str:
        norm = "sup" if self.norm == "inf" else f"L{self.norm}"
        rows = [(f"{t.value:.6g}", t.name, t.formula, t.theorem) for t in self.terms]
        assumed = "; ".join(f"{a.statement} ({a.vouched_by})" for a in self.assumptions)
        title = f"{self.kind}: {norm} error {self.claim} ({self._asked}), {self.semantics} arithmetic"
        return card(title, {"assumes": assumed}, columns=("value", "term", "formula", "theorem"), rows=rows)

    def explain(self) -> str:
        """The claim, term by term and assumption by assumption, in words."""
        norm = "sup" if self.norm == "inf" else f"L{self.norm}"
        lines = [f"{self.kind}: {norm} error {self.claim} ({self._asked}), {self.semantics} arithmetic"]
        where = "the part of the domain where f has values" if self.excluded else "the domain"
        if self.is_about_table:
            lines += self._about_rows()
        elif self.kind == "estimated":
            lines.append(
                f"  seen in {self.samples:,} samples; with confidence 1 − {_CONFIDENCE:g} the error is larger on less than "
                f"{self.exceeded_on:.2g} of {where}. Nothing is proved about its supremum"
            )
        lines += [f"  {t.value:<12.6g} {t.name}: {t.formula}  [{t.theorem}]" for t in self.terms]
        if self.model.get("values") == QUERY_VALUES:
            lines.append(
                "  not cross-attention: the values are affine in z_Q, and those of cross-attention depend on z_K alone"
            )
        lines.append(f"  runs on: {self.runs_on}")
        if self.function.get("meaning"):
            lines.append(f"  {self.function['meaning']}")
        for a in self.assumptions:
            attacked = "" if a.worst_ratio is None else f"; attacked ({a.attack}): worst ratio {a.worst_ratio:.4g}"
            lines.append(f"  assumes {a.statement}  [{a.vouched_by}{attacked}]")
        if self.witness and not (self.kind == "estimated" and self.witness.samples == self.samples):
            what = "worst error seen" if self.norm == "inf" else "largest pointwise error seen"
            what += " in a second search" if self.kind == "estimated" else ""
            lines.append(
                f"  {what}: {self.witness.error:.6g} in {self.witness.samples:,} samples (an estimate from below)"
            )
        return "\n".join(lines)

    @property
    def is_about_table(self) -> bool:
        """Whether the claim is about the rows of a table, not about a function."""
        return isinstance(self.function, Mapping) and self.function.get("type") == "table"

    def _about_rows(self) -> list[str]:
        """What was estimated from which rows, and what is not claimed."""
        rows, held = (int(self.facts.get(name, 0)) for name in ("rows", "rows_held_out"))
        share, looks = min(self.exceeded_on, 1.0), int(self.facts.get("looks", 1))
        compared = f" (they were compared with {looks} heads)" if looks > 1 else ""
        often = (
            f"if rows are independent draws, then with confidence 1 − {_CONFIDENCE:g} the error is larger at less than {share:.2g} "
            "of such rows"
            if share < 1
            else "these are too few to say at how many rows the error is larger"
        )
        lines = [
            f"  a table of {rows:,} rows: {rows - held:,} for the fit, {held:,} held out, which the estimate comes from{compared}",
            f"  {often}. Nothing is claimed between the rows",
        ]
        if "noise" in self.facts:
            deviation, inputs = self.facts["noise"], int(self.facts["inputs_repeated"])
            lines.append(
                f"  noise: rows with the same inputs differ, by a standard deviation of about {deviation:.4g} (an estimate from "
                f"{inputs:,} input{'s' * (inputs != 1)})"
            )
        return lines

    @property
    def excluded(self) -> str:
        """How many points were left out because f failed there, as a sentence; empty if none was."""
        count, asked = self.facts.get("points_excluded", 0), self.facts.get("points_asked", 0)
        if not count:
            return ""
        share = self.facts.get("share_excluded", 0.0)
        return (
            f"excluded: f failed at {int(count):,} of the {int(asked):,} points evaluated ({100 * count / asked:.2g} %), and at "
            f"{100 * share:.2g} % of those drawn at random for the estimate; nothing is claimed there"
        )

    @property
    def claim(self) -> str:
        """The number in words: "≤ 0.05" where it is proved, "≈ 0.05 (estimate)" where it was sampled."""
        if self.error_estimate is not None:
            return f"≈ {self.error_estimate:.4g} (estimate)"
        return f"≤ {self.error_bound:.6g}"

    @property
    def exceeded_on(self) -> float:
        """The share of the domain on which the error may exceed an estimate, `ln(1/β)/samples`. *Theorem*: `sampled-estimate`.

        Of rows, if the claim is about a table; K heads that were compared with them make it `ln(K/β)/samples`.
        *Theorem*: `held-out-rows`.
        """
        looks = self.facts.get("looks", 1.0) if self.is_about_table else 1.0
        return math.log(max(looks, 1.0) / _CONFIDENCE) / max(self.samples, 1)

    @property
    def confidence(self) -> float:
        """How sure the statement about `exceeded_on` is, 1 − β. *Theorem*: `sampled-estimate`."""
        return 1.0 - _CONFIDENCE

    @property
    def runs_on(self) -> str:
        """The devices that the claim covers, in words. Elsewhere `Compiled` refuses to run."""
        return "; ".join(DEVICES.values())

    @property
    def has_tolerance(self) -> bool:
        """Whether the head was built for a tolerance; where none was asked, the certificate repeats the error in its place."""
        return self.tolerance != self.error

    @property
    def _asked(self) -> str:
        return f"tolerance {self.tolerance:g}" if self.has_tolerance else "no tolerance was set"

    @property
    def limit(self) -> float:
        """The tolerance that was asked, infinite if none was."""
        return self.tolerance if self.has_tolerance else math.inf

    @property
    def exact_bound(self) -> float:
        """The bound for the stored tensors in real arithmetic: without the terms that running them in floats adds."""
        if self.error_estimate is not None:
            return math.inf
        return total(t for t in self.terms if t.source in ("approximation", "storage"))

    @property
    def rounding(self) -> float:
        """What the terms other than the approximation itself sum to."""
        return float(sum(t.value for t in self.terms if t.source != "approximation"))

    def rests_on(self, about: str) -> bool:
        """Whether the caller vouches for something of this kind (`Assumption.about`)."""
        return any(a.vouched_by == "caller" and a.about == about for a in self.assumptions)

    @property
    def error(self) -> float:
        """The bound where there is one, else the estimate: for sorting and comparing, not for claiming."""
        return self.error_bound if self.error_estimate is None else self.error_estimate

    def to_json(self) -> dict[str, Any]:
        """Plain data; every float as a hex string, so that nothing is lost."""
        data = {"schema": SCHEMA, **asdict(self)}
        if self.kind == "estimated":
            data["error_bound"] = None  # JSON has no infinity
        out: dict[str, Any] = hex_floats(data)
        return out

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Certificate:
        """The certificate that `to_json` wrote; anything else is a FormatError."""
        try:
            fields = plain_floats(dict(data))
            schema = fields.pop("schema")
            if schema not in (1, SCHEMA):
                raise FormatError(f"certificate.json: schema {schema!r}; this version reads schemas 1 and {SCHEMA}.")
            if fields["error_bound"] is None:
                fields["error_bound"] = math.inf
            if schema == 1:
                _upgrade(fields)
            fields["terms"] = tuple(Term(**t) for t in fields["terms"])
            fields["assumptions"] = tuple(Assumption(**a) for a in fields["assumptions"])
            if fields["witness"] is not None:
                fields["witness"] = Witness(**{**fields["witness"], "point": tuple(fields["witness"]["point"])})
            certificate = cls(**fields)
            problem = next(certificate._faults(), None)
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
            raise FormatError(f"certificate.json is not a valid certificate: {type(error).__name__}: {error}") from None
        if problem is not None:
            raise FormatError(f"certificate.json: {problem}.")
        return certificate

    def _faults(self) -> Iterator[str]:
        """What cannot be in a certificate, one sentence each."""
        if self.kind not in get_args(Kind):
            yield f"kind is {self.kind!r}, expected one of {', '.join(get_args(Kind))}"
        estimated = self.kind == "estimated"
        if estimated != (self.error_estimate is not None) or estimated != (self.error_bound == math.inf):
            yield "error_bound and error_estimate do not fit the kind; an estimate has no finite bound, and a proof has no estimate"
        if self.is_about_table and not estimated:
            yield f"kind is {self.kind!r}, but the function is a table of samples, of which nothing can be proved"
        if self.semantics not in PRECISIONS:
            yield f"semantics is {self.semantics!r}, expected float64, float32, bfloat16 or float16"
        if self.norm != "inf" and not float(self.norm) >= 1:
            yield f"norm is {self.norm!r}, expected inf or a number ≥ 1"
        numbers = {"tolerance": self.tolerance} | {t.name: t.value for t in self.terms}
        numbers["error"] = self.error
        unknown = {t.source for t in self.terms} - set(get_args(Source))
        if unknown:
            yield f"a term has the source {unknown.pop()!r}, expected one of {', '.join(get_args(Source))}"
        for name, value in numbers.items():
            if not (isinstance(value, float) and 0 <= value < math.inf):
                yield f"{name} is {value!r}, expected a finite number ≥ 0"
        if len({t.name for t in self.terms}) != len(self.terms) or not self.terms:
            yield "there are no terms, or two of them have the same name"
        for name in ("function", "domain", "model", "known", "facts", "environment", "proof"):
            if not isinstance(getattr(self, name), Mapping):
                yield f"{name} is {getattr(self, name)!r}, expected an object"
        if self.witness is not None and not all(
            isinstance(x, float) for x in (*self.witness.point, self.witness.error)
        ):
            yield f"the witness is {self.witness!r}, expected a point and an error"


def _upgrade(fields: dict[str, Any]) -> None:
    """Add what schema 1 did not store: the sources of terms, and which assumptions are about the moduli of f.

    Moduli are recognised by writing the stored constants out again, not by reading the statement.
    """
    known = Known.from_json(fields["known"]) if "curvature" not in fields["known"] else Known()
    moduli = {str(k) for k in (known.modulus, known.per_axis, known.jumps) if k is not None}
    curved = {str(Curvature(fields["known"]["curvature"]))} if "curvature" in fields["known"] else set()
    for term in fields["terms"]:
        term["source"] = _SOURCES_OF_SCHEMA_1.get(term["name"], "approximation")
    for a in fields["assumptions"]:
        said = a["statement"]
        a["about"] = "regularity" if said in moduli else "curvature" if said in curved else ""


def total(terms: Iterable[Term]) -> float:
    """The sum of the terms, rounded up."""
    return add_up(*(t.value for t in terms))


def hex_floats(value: Any) -> Any:
    """JSON values with every float as a hexadecimal string, so that nothing is lost."""
    if isinstance(value, bool) or value is None or isinstance(value, (str, int)):
        return value
    if isinstance(value, float):
        return value.hex()
    if isinstance(value, Mapping):
        return {k: hex_floats(v) for k, v in value.items()}
    return [hex_floats(v) for v in value]


def plain_floats(value: Any) -> Any:
    """What `hex_floats` was given, from its result."""
    if isinstance(value, str) and value.lstrip("-").startswith("0x"):
        return float.fromhex(value)
    if isinstance(value, dict):
        return {k: v if k == "graph" else plain_floats(v) for k, v in value.items()}  # a graph keeps its own notation
    if isinstance(value, list):
        return [plain_floats(v) for v in value]
    return value
