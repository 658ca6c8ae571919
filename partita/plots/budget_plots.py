"""The error budget of a certificate: the terms of the bound on a logarithmic axis, with the tolerance and the worst error seen."""

from __future__ import annotations

import os
import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol, get_args

import numpy as np

from partita.compiler.compiled import Compiled
from partita.errors import UnsupportedError
from partita.plots.colours import BACKGROUND, INK, MUTED, RULE
from partita.plots.head_panels import claim_text, rounded_up
from partita.plots.head_plots import head_words, header
from partita.plots.style import mark, new_figure, require_vector_or_pixels, save, styled
from partita.proofs.certificate import Certificate, Source, Term

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["Certified", "plot_error_budget"]

_WORDS: dict[Source, str] = {
    "approximation": "approximation of the function",
    "storage": "storage of the numbers",
    "rounding": "rounding while it runs",
    "input": "rounding of the input",
}
_WIDTH, _ROW, _AROUND = 8.0, 0.44, 1.35  # inches: of the figure, of a term, of what is above and below them
_LETTERS = 58  # of a formula, in a line


class Certified(Protocol):
    """Whatever has a certificate: a compiled head, or a network of heads."""

    @property
    def certificate(self) -> Certificate: ...


def plot_error_budget(
    about: Certified | Certificate,
    path: str | os.PathLike[str] | None = None,
    *,
    size: tuple[float, float] | None = None,
    titles: bool = True,
    legend: bool = True,
) -> Figure:
    """Draw the terms of an error bound, their sum, the tolerance and the worst error seen, on one logarithmic axis.

    The terms add up to the bound, `error_bound = Σ_t value_t`. Colours and marks say what causes a term: the approximation of the
    function, the storage of numbers in the dtype, rounding, or the rounding of the input. Terms are rounded up. A certificate of
    kind `estimated` has no bound: the figure says so, there is no sum, and the mark of the estimate is hollow.

    Args:
        about: a compiled head, a network with a certificate, or a certificate.
        path: a file to write as well, .svg, .png or .pdf. It is replaced if it exists; parents are created.
        size: width and height of the figure in inches.
        titles: write a title.
        legend: explain colours and lines.

    Returns:
        The figure.

    Raises:
        UnsupportedError: another kind of file, or something that has no certificate.
        MissingExtraError: matplotlib is not installed.

    >>> import partita as pa
    >>> from partita.plots import plot_error_budget
    >>> c = pa.compile("sin(3*x)", "[-1,1]", tolerance=1e-3)
    >>> figure = plot_error_budget(c)  # plot_error_budget(c, "budget.svg") also writes a file
    >>> figure.axes[0].get_xlabel()
    'size of the term (share of the sum)'
    """
    if path is not None:
        require_vector_or_pixels(path)
    certificate = about if isinstance(about, Certificate) else getattr(about, "certificate", None)
    if not isinstance(certificate, Certificate):
        raise UnsupportedError(
            f"an error budget is drawn of a certificate, and this is {type(about).__name__}, which has none",
            "Pass what pa.compile, pa.head or pa.load returned, or its .certificate.",
        )
    terms = sorted(certificate.terms, key=lambda t: -t.value)
    rows = len(terms) + 1
    with styled():
        figure, grid = new_figure(1, width=_WIDTH, height=_AROUND + _ROW * rows, size=size)
        panel = grid[0, 0]
        lines = _lines(certificate)
        _scale(
            panel,
            [t.value for t in terms] + [value for _, value, _ in lines],
            rows,
            bounded=certificate.kind != "estimated",
        )
        marks = [_draw_term(panel, row, term, certificate) for row, term in enumerate(terms)]
        _draw_sum(panel, len(terms), certificate)
        _write(panel, terms, certificate)
        for label, value, dash in lines:
            if value > 0:
                marks.append(panel.axvline(value, color=INK, lw=1.0, ls=dash, zorder=1.5))
            else:
                marks += panel.plot([], [], color=INK, lw=1.0, ls=dash)
            marks[-1].set_label(label)
        if titles:
            said = (
                head_words(about, 0) if isinstance(about, Compiled) and about.head.num_outputs == 1 else _words(about)
            )
            header(
                figure, [*said, claim_text(certificate), *(["no bound is proved"] * (certificate.kind == "estimated"))]
            )
        if legend:
            shown = {str(m.get_label()): m for m in marks}
            order = [*(w for w in _WORDS.values() if w in shown), *(label for label, _, _ in lines)]
            figure.legend(handles=[shown[k] for k in order], loc="outside lower center", ncols=2, fontsize=8)
        if path is not None:
            save(figure, path)
    return figure


def _words(about: Certified | Certificate) -> list[str]:
    """The function of the certificate, as far as it is known."""
    certificate = about if isinstance(about, Certificate) else about.certificate
    label = str(certificate.function.get("label") or "")
    keys = [head_words(about, 0)[1]] if isinstance(about, Compiled) else []
    return [label if len(label) <= 60 else label[:59] + "…", *keys] if label else keys


def _lines(certificate: Certificate) -> list[tuple[str, float, Any]]:
    """The vertical lines: their words, where they stand, and their dashes."""
    found: list[tuple[str, float, Any]] = []
    if certificate.has_tolerance:
        found.append((f"tolerance {certificate.tolerance:g}", certificate.tolerance, "--"))
    witness = certificate.witness
    if witness is not None and certificate.norm == "inf":  # pointwise errors do not compare with other norms
        found.append((f"worst error seen {witness.error:.3g}, in {witness.samples:,} samples", witness.error, ":"))
    return found


def _scale(panel: Axes, numbers: Sequence[float], rows: int, *, bounded: bool) -> None:
    """Decades from below the smallest number to above the largest, with room for what is written beside the marks."""
    sizes = np.log10([n for n in numbers if n > 0] or [1e-16, 1.0])
    lo, hi = max(float(np.floor(sizes.min() - 0.4)), -307.0), float(sizes.max())  # float64 ends there
    panel.set_xscale("log")
    panel.set_xlim(10**lo, 10 ** (hi + 0.04 * max(hi - lo, 1.0)))
    panel.set_ylim(rows - 0.4, -0.6)
    panel.set_xlabel("size of the term (share of the sum)" if bounded else "size of the term")
    panel.axhline(rows - 1.5, color=RULE, lw=1.0)


def _draw_term(panel: Axes, row: int, term: Term, certificate: Certificate) -> Any:
    look = mark(1 + get_args(Source).index(term.source))
    face = BACKGROUND if _is_estimate(term, certificate) else look["color"]
    if term.value > 0:
        panel.plot([panel.get_xlim()[0], term.value], [row, row], color=look["color"], lw=2.2, zorder=2)
    dots = panel.plot(
        [term.value] if term.value > 0 else [],
        [row] if term.value > 0 else [],
        ls="",
        marker=look["marker"],
        color=look["color"],
        mfc=face,
        ms=6.5,
        zorder=3,
        label=_WORDS[term.source],
    )
    return dots[0]


def _draw_sum(panel: Axes, row: int, certificate: Certificate) -> None:
    value = certificate.error_bound
    if 0 < value < np.inf:
        panel.plot([panel.get_xlim()[0], value], [row, row], color=INK, lw=2.2, zorder=2)
        panel.plot([value], [row], ls="", marker="|", color=INK, ms=11, mew=2.2, zorder=3)


def _is_estimate(term: Term, certificate: Certificate) -> bool:
    return certificate.kind == "estimated" and term.source == "approximation"


def _write(panel: Axes, terms: Sequence[Term], certificate: Certificate) -> None:
    """Names and formulas left of the axis, numbers right of it."""
    bound = certificate.error_bound
    texts = [(t.name, t.formula, _number(t, certificate)) for t in terms]
    if certificate.kind == "estimated":
        texts.append(("no bound", "f was sampled: nothing is proved about the largest error", ""))
    else:
        given = ", if what was declared is true" if certificate.kind == "proved_given" else ""
        texts.append(("sum", "the proved bound" + given, rounded_up(bound)))
    rows = np.arange(len(texts))
    right = panel.twinx()
    right.set(ylim=panel.get_ylim())
    right.grid(False)
    formulas = ["\n".join(textwrap.wrap(formula, _LETTERS)[:2]) for _, formula, _ in texts]
    more = np.array([formula.count("\n") for formula in formulas])
    panel.set_yticks(rows - 0.17 - 0.13 * more, [name for name, _, _ in texts])
    panel.set_yticks(rows + 0.2 - 0.02 * more, formulas, minor=True)
    right.set_yticks(rows, [number for _, _, number in texts])
    panel.grid(False, axis="y")
    panel.tick_params(axis="y", which="both", length=0)
    panel.tick_params(axis="y", which="minor", labelsize=7, labelcolor=MUTED)
    right.tick_params(axis="y", length=0, labelsize=8)
    for one in (panel, right):
        one.spines[:].set_visible(False)
        one.get_yticklabels()[-1].set_fontweight("bold")
    panel.spines["bottom"].set_visible(True)


def _number(term: Term, certificate: Certificate) -> str:
    """The size of a term, rounded up, and its share of the bound where that is not negligible."""
    if _is_estimate(term, certificate):
        return f"≈ {term.value:.3g}"
    share = term.value / certificate.error_bound if 0 < certificate.error_bound < np.inf else 0.0
    percent = ">99" if 0.99 < share < 1 else f"{100 * share:.0f}"
    return rounded_up(term.value) + (f"  ({percent} %)" if share >= 0.01 else "")
