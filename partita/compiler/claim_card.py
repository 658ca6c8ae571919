"""The claim of a compiled head as Markdown for people: what it computes, how accurately and why, how to run it and check it.

Whatever the caller wrote (labels of functions, domains, statements) is shown as text: it cannot become Markdown or HTML.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from decimal import ROUND_CEILING, Context, Decimal

import numpy as np

from partita.arithmetic.precision import Precision
from partita.functions.target import Target
from partita.heads.head import Head, count_text
from partita.proofs.certificate import QUERY_VALUES, Certificate
from partita.storage import input_names, onnx_metadata, require_rule

__all__ = ["claim_card"]

_MOST_CHARACTERS = 2000  # of a function; longer ones are in head.json
_SOURCES = {
    "approximation": "how far the exact head is from the function",
    "storage": "numbers as they are stored",
    "rounding": "arithmetic while it runs",
    "input": "inputs that are rounded",
}
_OUTSIDE = {
    "allow": "The head returns a value there. This card says nothing about it.",
    "clamp": "Inputs are moved to the nearest point of the box first.",
    "mark": "The head returns NaN there.",
}


def claim_card(
    head: Head,
    target: Target,
    certificate: Certificate,
    *,
    onnx: str | None = "head.onnx",
    c: str | None = None,
    outside: str = "allow",
) -> str:
    """The card; see `Compiled.card`."""
    require_rule(outside, target.domain)
    sections = [
        ["# Card of an attention head", *_what(head, target)],
        ["## What is claimed", *_claim(certificate)],
        ["## Where the number comes from", *_terms(certificate)],
        ["## What it rests on", *_assumptions(certificate)],
        ["## Inputs and outputs", *_shapes(head, outside)],
        ["## How to run it", *_running(head, target, certificate, onnx), *_in_c(head, c)],
        ["## How to check it", *_checking(target, certificate)],
    ]
    return "\n\n".join(part for section in sections for part in section) + "\n"


# ---- text that stays text --------------------------------------------------------------------------------------------


def _text(given: object) -> str:
    """One line of plain text: every character that Markdown or HTML could read otherwise is escaped."""
    escaped = re.sub(r"([\\`*_{}\[\]<>#|~$&])", r"\\\1", " ".join(str(given).split()))
    return re.sub(r"^(\d*)([-+=.)])", r"\1\\\2", escaped)  # no list and no line at its start


def _literal(given: object) -> str:
    """A paragraph that is shown letter by letter: an indented line of code, which nothing in it can end."""
    found = " ".join(str(given).split())
    if len(found) > _MOST_CHARACTERS:
        found = f"{found[:_MOST_CHARACTERS]}… ({len(found):,} characters; all of them are in certificate.json)"
    return f"    {found}"


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def _at_most(number: float) -> str:
    """Six digits, rounded up, so that what is printed is true if the number is."""
    return f"{float(Context(prec=6, rounding=ROUND_CEILING).create_decimal(Decimal(number))):.6g}"


# ---- sections --------------------------------------------------------------------------------------------------------


def _what(head: Head, target: Target) -> Iterator[str]:
    yield "It approximates the function"
    yield _literal(target.label)
    yield "for inputs from" if len(target.domains) == 1 else "for pairs of inputs from"
    yield from (_literal(domain) for domain in target.domains)
    keys = f"{count_text(head.num_keys)} key{'' if head.num_keys == 1 else 's'}"
    yield f"with {keys} and {head.num_parameters:,} stored numbers."


def _claim(certificate: Certificate) -> Iterator[str]:
    if certificate.kind == "estimated":
        seen = f"{certificate.error:.4g}"
        what = "The largest error" if certificate.norm == "inf" else f"The L{certificate.norm} norm of the error"
        yield (
            f"**Estimated from samples.** {what} in {certificate.samples:,} points drawn after the head was finished is {seen}. At "
            "points that were not drawn the error may be larger."
        )
        if certificate.norm == "inf":
            where = "the part of the domain where the function has values" if certificate.excluded else "the domain"
            yield (
                f"With confidence {certificate.confidence:.6g} the error is larger than that on less than "
                f"{100 * certificate.exceeded_on:.2g} % of {where}."
            )
    else:
        grounds = "Proved" if certificate.kind == "proved" else "Proved, if the assumptions of the caller below hold"
        bound = _at_most(certificate.error_bound)
        what = (
            f"on the whole domain no output differs from the function by more than {bound}"
            if certificate.norm == "inf"
            else f"the L{certificate.norm} norm of the difference from the function on the domain is at most {bound}"
        )
        yield f"**{grounds}:** {what}. Rounding is included."
    facts = [
        ("kind", f"`{certificate.kind}`"),
        ("norm", "supremum" if certificate.norm == "inf" else f"L{certificate.norm}"),
    ]
    if certificate.error_estimate is None:
        facts.append(("error bound", _at_most(certificate.error_bound)))
    else:
        facts.append(("largest error seen", f"{certificate.error_estimate:.4g}"))
    facts.append(("tolerance", f"{certificate.tolerance:g}" if certificate.has_tolerance else "none was set"))
    facts.append(("arithmetic", certificate.semantics))
    yield _table(("", ""), facts)
    if certificate.excluded:
        yield _text(certificate.excluded) + "."
    if certificate.function.get("meaning"):
        yield _text(certificate.function["meaning"]) + "."
    if certificate.model.get("values") == QUERY_VALUES:
        yield "This is not cross-attention: its values depend on the query."
    if certificate.witness is not None and certificate.kind != "estimated":
        yield f"The largest pointwise error that a search has found is {certificate.witness.error:.4g}."


def _terms(certificate: Certificate) -> Iterator[str]:
    if certificate.kind == "estimated":
        yield "From comparing the finished head with the function at random points. Nothing else was added to it."
        return
    rows = [
        (_text(t.name), _at_most(t.value), _SOURCES[t.source], _text(t.formula), _text(t.theorem))
        for t in certificate.terms
    ]
    yield _table(("term", "at most", "cause", "formula", "theorem"), rows)
    yield "The bound is the sum, rounded up. The theorems are in partita's docs/theorems.md."


def _assumptions(certificate: Certificate) -> Iterator[str]:
    lines = []
    for a in certificate.assumptions:
        attacked = "" if a.worst_ratio is None else f"; a search for a counterexample reached {a.worst_ratio:.4g} of it"
        lines.append(f"- {_text(a.statement)} (vouched for by: {_text(a.vouched_by)}{attacked})")
    yield "\n".join(lines) if lines else "No assumptions are listed."


def _shapes(head: Head, outside: str) -> Iterator[str]:
    kind = str(head.dtype).removeprefix("torch.")
    result = "float32" if Precision.of(head.dtype).is_half else kind

    def shape(given: Sequence[int]) -> str:
        return f"({', '.join(['batch', *map(str, given)])}{'' if given else ','})"

    rows = [("input", f"`{name}`", shape(s), kind) for name, s in zip(input_names(head), head.input_shapes)]
    yield _table(("", "name", "shape", "dtype"), [*rows, ("output", "`value`", shape(head.output_shape), result)])
    rounded = " Inputs given in float64 are rounded first; what is claimed includes that." if kind != "float64" else ""
    yield f"`batch` is any number of points.{rounded}"
    yield f"Outside the domain: {_OUTSIDE[outside]}"


def _running(head: Head, target: Target, certificate: Certificate, onnx: str | None) -> Iterator[str]:
    names, kind = input_names(head), str(head.dtype).removeprefix("torch.")
    points = _one_point(head, target)
    if Precision.of(head.dtype).is_half:
        yield f"There is no ONNX file of a head in {kind}."
    elif onnx is not None:
        lines = [
            "import numpy as np",
            "import onnxruntime",
            "",
            f"session = onnxruntime.InferenceSession({json.dumps(onnx, ensure_ascii=False)})",
        ]
        lines += [f"{name} = np.array({point.tolist()}, dtype=np.{kind})" for name, point in zip(names, points)]
        given = ", ".join(f'"{name}": {name}' for name in names)
        lines.append(f'print(session.run(["value"], {{{given}}})[0])')
        yield _code("python", lines)
        yield from _runtimes(certificate)
    yield "With partita, from the folder that it was saved in:"
    given = ", ".join(str(point.tolist()) for point in points)
    yield _code("python", ["import partita", "", 'c = partita.load("head/")', f"print(c({given}))"])


def _in_c(head: Head, name: str | None) -> Iterator[str]:
    if name is None:
        return
    number = "double" if str(head.dtype) == "torch.float64" else "float"
    yield f"In C, from the file that has this function, one point ({head.dimension} in, {head.num_outputs} out) at a time:"
    yield _code("c", [f"void {name}_eval(const {number} *in, {number} *out);"])
    yield f"Compiled with `-D{name.upper()}_SELFTEST` the file is a program that compares itself with the head."


def _runtimes(certificate: Certificate) -> Iterator[str]:
    if certificate.kind == "estimated":
        yield "The error was measured with partita's own kernels. Other programs round differently in the last digits."
        return
    yield (
        f"The bound covers every program that runs the file's operations in IEEE {certificate.semantics}, with sums in any order, "
        "with or without fused products and sums, and with exponentials within 7 units in the last place. partita's "
        "docs/certificates.md has the list. ONNX Runtime was measured to do so on CPUs and in WebAssembly; this is not proved. The "
        "bound does not cover TF32 (for CUDA set `use_tf32` to 0), products in float16 or bfloat16, approximate exponentials, or a "
        "quantized copy of the file."
    )


def _checking(target: Target, certificate: Certificate) -> Iterator[str]:
    yield "The sha256 of `certificate.json` in the saved folder, also in the metadata of the ONNX file, is"
    yield _literal(onnx_metadata(certificate, target)["partita.certificate_sha256"])
    if certificate.kind == "estimated":
        yield "`partita-check head/` checks the files. An estimate can be repeated with fresh samples; it cannot be verified."
    else:
        yield (
            "`partita-check` checks the claim with code that it does not share with partita. It ends with verified, refuted, or "
            "unknown if its time was too short:"
        )
        yield _code("sh", ["partita-check head/"])


def _code(language: str, lines: Sequence[str]) -> str:
    return "\n".join([f"```{language}", *lines, "```"])


def _one_point(head: Head, target: Target) -> list[np.ndarray]:
    """A point of the domain, an array `(1, *shape)` for each input: the middle of a box, with few digits if it stays inside."""
    point = target.domain.sample(1, np.random.default_rng(0))
    middle = (target.box.lo.ravel() + target.box.hi.ravel())[None] / 2
    for candidate in (middle.round(2), middle):
        if bool(target.domain.contains(candidate).all()):
            point = candidate
            break
    cuts = np.cumsum([int(np.prod(s)) for s in head.input_shapes])[:-1]
    return [part.reshape(1, *shape) for part, shape in zip(np.split(point, cuts, axis=1), head.input_shapes)]
