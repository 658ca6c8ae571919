"""The interface of a method, which turns (function, domain, tolerance) into (head, certificate), as the planner uses it."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, Literal

from partita.arithmetic.notebook_cards import card
from partita.errors import PartitaError, SizeError, ToleranceError
from partita.functions.regularity import Knowledge
from partita.functions.target import Target
from partita.geometry.domains import Box, PointCloud
from partita.methods.request import Request
from partita.proofs.certificate import Kind
from partita.proofs.claim import Construction
from partita.proofs.proof import Progress
from partita.proofs.sampled import fresh_points

__all__ = [
    "FORMS",
    "Candidate",
    "Method",
    "Plan",
    "Refusal",
    "Size",
    "candidate_rows",
    "choice_rows",
    "keys_text",
    "needs_box",
    "search_text",
    "size_text",
]


FORMS = ("one head", "several heads in one layer", "several layers")
Status = Literal["found", "forecast", "refused", "not tried"]


@dataclass(frozen=True)
class Candidate:
    """One way to make the head, as the report shows it; None where a figure is not known.

    `error` is a bound where `kind` is proved, else an estimate; `chosen` marks the one that was built. `evaluations`: how often a
    black box is evaluated in all if this one is built; None for expressions. `form` is one of FORMS. `status` says whether such a
    head was found, only forecast, refused, or not tried. `because`: why it was chosen, one sentence; empty for the others.
    """

    method: str
    kind: str
    note: str
    keys: int | None = None
    parameters: int | None = None
    largest: float | None = None
    rounding: float | None = None
    error: float | None = None
    chosen: bool = False
    evaluations: int | None = None
    form: str = FORMS[0]
    status: Status = "found"
    because: str = ""


def candidate_rows(candidates: Sequence[Candidate], *, built: bool) -> list[tuple[str, ...]]:
    """The table of candidates as text: headings, then rows, the chosen one marked.

    Only the bound of a head that was built is proved.
    """
    asks = any(c.evaluations is not None for c in candidates)  # an expression is not evaluated by the caller
    names = ("keys", "stored numbers", *("evaluations",) * asks, "max |V|", "rounding", "error", "")
    rows: list[tuple[str, ...]] = [("", "method", "claim", *names)]
    for c in candidates:
        figures = map(_figure, (c.keys, c.parameters, *(c.evaluations,) * asks, c.largest, c.rounding))
        rows.append(("→" if c.chosen else "", c.method, c.kind, *figures, _error(c, built=built), c.note))
    return rows


def choice_rows(candidates: Sequence[Candidate], *, built: bool) -> list[tuple[str, ...]]:
    """One head, several heads and several layers side by side: headings, then the best candidate of each, or why there is none.

    Empty if only one of the three was considered.
    """
    forms = [[c for c in candidates if c.form == form] for form in FORMS]
    if sum(map(bool, forms)) < 2:
        return []
    rows: list[tuple[str, ...]] = [("", "choice", "method", "claim", "stored numbers", "error", "")]
    for form, own in zip(FORMS, forms):
        found = [c for c in own if c.status == "found"]  # the chosen one first, then the best
        forecasts = sorted((c for c in own if c.status == "forecast"), key=lambda c: c.parameters or 0)
        if found or forecasts:
            c, note = (found[0], "") if found else (forecasts[0], forecasts[0].note)
            figures = _figure(c.parameters), _error(c, built=built)
            rows.append(("→" if c.chosen else "", form, c.method, c.kind, *figures, note))
        else:
            reasons = {c.note for c in own} or {"the budget was spent before it was planned"}
            said = reasons.pop() if len(reasons) == 1 else "no method has such a head; the table above says why"
            tried = any(c.status == "refused" for c in own)
            rows.append(("", form, "", "refused" if tried else "not tried", "", "", said))
    return rows


def _figure(x: float | None) -> str:
    return "" if x is None else f"{x:,}" if isinstance(x, int) and x < 10**9 else f"{x:.2g}"


def _error(c: Candidate, *, built: bool) -> str:
    sign = "≤ " if built and c.chosen and c.kind != "estimated" else "≈ "
    return "" if c.error is None else f"{sign}{c.error:.3g}"


@dataclass(frozen=True)
class Size:
    """A forecast of a method's head: nothing was built. `kind` is empty where the claim cannot be foreseen."""

    keys: int
    parameters: int
    kind: Kind | str = ""
    largest: float | None = None
    error: float | None = None

    def row(self, method: str, form: str = FORMS[0]) -> Candidate:
        return Candidate(
            method,
            self.kind,
            "a forecast, not built",
            self.keys,
            self.parameters,
            self.largest,
            error=self.error,
            form=form,
            status="forecast",
        )


@dataclass(frozen=True)
class Refusal:
    """Why a method has no head for a request.

    Attributes:
        reason: as a row of the report shows it. hint: what to do about it.
        error: the exception that is raised if no other method has a head either; None leaves that to the planner.
        keys, parameters, reached: how large a head was found and what error it reached, if that is known.
        best: the head itself as a plan, to be built where nothing better was found before a budget was spent.
        tried: False if the method was not asked for a head, because of what others found or of what the caller asked for.
    """

    reason: str
    hint: str = ""
    error: type[PartitaError] | None = None
    kind: str = ""
    keys: int | None = None
    parameters: int | None = None
    largest: float | None = None
    reached: float | None = None
    best: Plan | None = None
    tried: bool = True

    @classmethod
    def of_a_search(cls, reason: str, *, most: int, room: int) -> Refusal:
        """The refusal of a search that tried as many keys as it may, at most `most`, and as many as max_bytes leaves `room` for."""
        return cls(reason, "Use a larger tolerance, or raise max_bytes.", SizeError) if room < most else cls(reason)

    @classmethod
    def of(cls, error: PartitaError) -> Refusal:
        """What an exception says, as data."""
        return cls(error.reason, error.hint, type(error))

    def row(self, method: str, form: str = FORMS[0]) -> Candidate:
        return Candidate(
            method,
            self.kind,
            self.reason,
            self.keys,
            self.parameters,
            self.largest,
            error=self.reached,
            form=form,
            status="refused" if self.tried else "not tried",
        )

    def exception(self) -> PartitaError:
        return (self.error or ToleranceError)(self.reason, self.hint)


@dataclass(frozen=True, eq=False)
class Plan:
    """A head before it is built: its size, sharpness, expected error, and the reasons. `pa.plan` makes it, `pa.build` builds it.

    Attributes:
        request: what the caller asked for.
        maker: the method that made the plan and will build it.
        kind: the kind of claim that building it will give.
        keys: number of keys.
        parameters: number of scalars that the head stores.
        draft: what the method needs to build it.
        why: sentences that explain the numbers and say where the function comes from.
        error_bound: the bound that the certificate will state, or slightly more; infinite if the claim will be an estimate.
        error_estimate: the largest error sampled while planning; None if nothing was sampled.
        sharpness: κ = R h², the smallest of all axes.
        counts: keys per axis; None if the centers are scattered.
        largest: the largest absolute value.
        rounding: the part of the error that comes from running in floating point; None if it is computed when the head is built.
        candidates: every method that was considered.
        caveat: what a reader of the report must know about the head; empty for most.
        fallback: a head that misses the tolerance, for a budget that is spent before this one is built.
        evaluations: a forecast of how often a black box is evaluated in all, planning included, if this head is built. None for
            expressions.

    >>> import partita as pa
    >>> plan = pa.plan("2*x0", pa.Box([0.0], [1.0]), tolerance=0.15, method="hard")
    >>> plan.keys, plan.kind, plan.error_bound <= 0.15
    (7, 'proved', True)
    """

    request: Request
    maker: Method
    kind: Kind
    keys: int
    parameters: int
    draft: Any
    why: tuple[str, ...]
    error_bound: float = math.inf
    error_estimate: float | None = None
    sharpness: float = 0.0
    largest: float = math.nan
    rounding: float | None = None
    counts: tuple[int, ...] | None = None
    candidates: tuple[Candidate, ...] = ()
    caveat: str = ""
    fallback: Plan | None = None
    evaluations: int | None = None

    @property
    def method(self) -> str:
        """Name of the method, as in `compile(method=…)`."""
        return self.maker.name

    @property
    def target(self) -> Target:
        """The function and its domain."""
        return self.request.target

    @property
    def knowledge(self) -> Knowledge | None:
        """What is known about the function; None if nothing is."""
        return self.request.knowledge

    @property
    def bytes(self) -> int:
        """Size of all tensors of the head in bytes."""
        counts = self.counts or ()
        others = sum(counts) + len(counts) * (1 if getattr(self.draft, "slopes", None) is None else 2)
        return self.request.precision.bytes_of(self.parameters, others)

    def as_candidate(self, note: str = "", *, because: str = "", missed: bool = False) -> Candidate:
        """The plan as a row of the report.

        Args:
            note: a remark for the last column.
            because: why this is the head that is built, one sentence; empty if it is not.
            missed: whether it was built and missed the tolerance.
        """
        error = self.error_bound if self.error_estimate is None else self.error_estimate
        note = "; ".join(text for text in (note, self.caveat) if text)
        return Candidate(
            self.method,
            self.kind,
            note,
            self.keys,
            self.parameters,
            self.largest,
            self.rounding,
            error,
            bool(because),
            self.evaluations,
            self.maker.form,
            "refused" if missed else "found",
            because,
        )

    @property
    def _size(self) -> str:
        keys = f"{self.keys:,} key{'' if self.keys == 1 else 's'}"
        return f"{keys}, {self.parameters:,} stored numbers, {self.bytes:,} bytes in {self.request.precision.name}"

    @property
    def _claim(self) -> str:
        row = self.as_candidate()
        error = "" if row.error is None or not math.isfinite(row.error) else f"≈ {row.error:.3g}, "
        return f"{error}the certificate will be {self.kind}"

    def __repr__(self) -> str:
        domain = " and ".join(str(d) for d in self.target.domains)
        return (
            f"Plan for {self.target.label!r} on {domain}, tolerance {self.request.asked:g}\n"
            f"  {self.method}: {self._size}\n"
            f"  error {self._claim}\n"
            "  pa.build(plan) builds it; print(plan) says why it has this size"
        )

    def _repr_html_(self) -> str:
        facts = {
            "function": self.target.label,
            "domain": " and ".join(str(d) for d in self.target.domains),
            "tolerance": f"{self.request.asked:g}",
            "method": self.method,
            "size": self._size,
            "error": self._claim,
            "evaluations of f": None if self.evaluations is None else f"{self.evaluations:,}",
        }
        columns, *rows = candidate_rows(self.candidates, built=False)
        because = next((c.because for c in self.candidates if c.chosen), "")
        note = f"{because} pa.build(plan) builds it.".strip()
        return card("Plan", facts, columns=columns, rows=rows, note=note)

    def to_json(self) -> dict[str, Any]:
        """The plan as plain data, for `--json`."""
        return {
            "function": self.target.label,
            "domain": [str(d) for d in self.target.domains],
            "tolerance": self.request.tolerance,
            "method": self.method,
            "kind": self.kind,
            "keys": self.keys,
            "keys_per_axis": self.counts,
            "parameters": self.parameters,
            "bytes": self.bytes,
            "sharpness": self.sharpness,
            "dtype": self.request.precision.name,
            "error_bound": None if math.isinf(self.error_bound) else self.error_bound,
            "error_estimate": self.error_estimate,
            "evaluations": self.evaluations,
            "why": list(self.why),
            "candidates": [asdict(c) for c in self.candidates],
        }

    @property
    def explanation(self) -> tuple[str, ...]:
        """The same as `why`."""
        return self.why

    def __str__(self) -> str:
        return "\n".join(self.why)


class Method(ABC):
    """One way to choose centers, temperature and values. The planner calls, in this order: applies, worth, forecast, plan, build.

    Attributes:
        name: as the caller writes it. Methods of one name share it between kinds of domains or functions.
        shares: of the tolerance, to plan for: the first, then smaller ones if the finished head misses it.
        estimates: whether its claims about expressions fall back to an estimate where no proof is possible.
        most_keys: forecasts beyond are not planned under "auto".
        takes_sharpness: whether the caller may choose κ, any number > 0; other methods choose their own.
        exact: whether its claim needs values of f itself, so that an interpolant will not do.
        halves: whether its values may be held in bfloat16 or float16.
        form: what it makes, one of FORMS.
    """

    name: ClassVar[str]
    shares: ClassVar[tuple[float, ...]] = (1.0,)
    estimates: ClassVar[bool] = False
    most_keys: ClassVar[int | None] = None
    takes_sharpness: ClassVar[bool] = False
    exact: ClassVar[bool] = False
    halves: ClassVar[bool] = False
    form: ClassVar[str] = FORMS[0]

    @property
    def is_network(self) -> bool:
        """Whether it makes a network of several heads; the others make one head."""
        return self.form != FORMS[0]

    def evaluations_to_build(self, target: Target, keys: int) -> int:
        """How often `build` evaluates a black box: at the fresh points of an estimate, or at every center."""
        return fresh_points(target) + (keys if self.exact else 0)

    @abstractmethod
    def applies(self, request: Request) -> Refusal | None:
        """Why this method does not apply to such a domain, norm or function; None if it does."""

    def worth(self, request: Request, plans: Sequence[Plan]) -> Refusal | None:
        """Called under "auto" only: why it is not worth trying, given what other methods found."""
        return None

    def forecast(self, request: Request) -> Size | Refusal | None:
        """The size of its head by formula, before anything is sampled at length; None if there is no formula."""
        return None

    @abstractmethod
    def plan(self, request: Request, share: float, progress: Progress | None = None) -> Plan | Refusal:
        """The head that meets this share of the tolerance, not built yet.

        Raises:
            SizeError, ToleranceError, DomainError: taken by the planner as refusals.
        """

    @abstractmethod
    def build(self, plan: Plan, progress: Progress | None = None, seed: int = 0) -> Construction:
        """The head of a plan with its certificate, which may exceed the tolerance."""


def needs_box(request: Request) -> Refusal | None:
    """Why a method that evaluates f on the whole box around the domain does not apply; None if it does.

    On a region the box serves if f is proved to be bounded on all of it and nothing is declared, for what the caller declares
    holds on the region only. A bound over the box is one over the region. *Theorem*: `regions`.
    """
    domain, declared = request.target.domain, request.declared
    if isinstance(domain, Box):
        return None
    if isinstance(domain, PointCloud):
        return Refusal("needs a box, not a point cloud")
    if not request.target.fills_box:
        return Refusal("needs f on the whole box around the region, where it is not proved to be bounded")
    if any(x is not None for x in (declared.lipschitz, declared.modulus, declared.hessian, declared.jumps)):
        return Refusal("what is declared of f holds on the region only, and this method needs the box around it")
    return None


def search_text(target: Target, evaluations: int) -> str:
    """How often f was evaluated, by a search that may have had an interpolant in its place."""
    what = "an interpolant of f" if target.interpolated else "f"
    return f"{what} was evaluated {evaluations:,} times"


def keys_text(counts: Sequence[int]) -> str:
    """ "3 × 4 = 12 keys", or "7 keys" on one axis."""
    keys = math.prod(counts)
    return f"{' × '.join(map(str, counts))} = {keys:,} keys" if len(counts) > 1 else f"{keys:,} keys"


def size_text(count: float) -> str:
    """Bytes in words: 1536 is "1.5 KiB"."""
    for unit in ("bytes", "KiB", "MiB", "GiB", "TiB"):
        if count < 1024 or unit == "TiB":
            return f"{count:.4g} {unit}" if count < 10**300 else f"10^{math.log10(count):.1f} {unit}"
        count = count / 1024 if count < 10**300 else int(count) // 1024
    return ""
