"""A head as one C99 file: its certificate in the comment, its code, and a self-test behind a macro."""

from __future__ import annotations

import os
import re
import textwrap
from pathlib import Path

import numpy as np
import torch

from partita.arithmetic.precision import Precision
from partita.errors import UnsupportedError
from partita.functions.regions import Domain
from partita.functions.target import Target
from partita.geometry.domains import Array, Box
from partita.heads.head import Head
from partita.proofs.certificate import Certificate
from partita.storage.c_source import CSource
from partita.storage.files import write_whole
from partita.storage.onnx_export import onnx_metadata, require_replaceable, require_rule

__all__ = ["export_c"]

_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_]{0,62}", re.ASCII)
_WIDTH = 110
_TESTED = 64  # points of the self-test
_MOVED = 16  # units of its size by which the self-test moves an input
_PLAIN = str.maketrans(
    {
        "≤": "<=",
        "≥": ">=",
        "·": "*",
        "−": "-",
        "×": "x",
        "√": "sqrt",
        "∞": "inf",
        "²": "^2",
        "³": "^3",
        "Σ": "sum",
        "…": "...",
        "δ": "delta",
        "γ": "gamma",
        "κ": "kappa",
        "ω": "omega",
        "λ": "lambda",
        "σ": "sigma",
        "ε": "epsilon",
        "∇": "grad ",
        "₂": "_2",
    }
)


def export_c(
    head: Head,
    path: str | os.PathLike[str],
    *,
    certificate: Certificate,
    target: Target,
    name: str | None = None,
    outside: str = "allow",
) -> Path:
    """Write `void NAME_eval(const double *in, double *out)` as one C99 file, `float` for heads in float32.

    Args:
        path: the file to write. It appears whole or not at all; an existing regular file is replaced.
        certificate, target: what is claimed of the head, and of which function.
        name: NAME; None for the stem of the file.
        outside: "allow" evaluates the head everywhere, "clamp" moves inputs into the box, "mark" returns NaN outside of it.

    Raises:
        UnsupportedError: a name that C does not take, a rule that the domain does not allow, or a kind of head without C.
        AlreadyExistsError: something else than a regular file is there.
        SizeError: more numbers than a C file should hold.
    """
    place = require_replaceable(Path(path))
    name = _required_name(name, Path(path).stem)
    lines = _guard(head, target.domain, outside)
    source = CSource(head, name)
    parts = [
        _comment(head, certificate, target, name, outside, source),
        _OPENING.replace("NAME", name).replace("REAL", source.real),
        _DOUBLES if source.real == "double" else _FLOATS,
        source.text,
        _entry(head, name, source.real, lines),
        _self_test(head, target, name, source.real),
    ]
    return write_whole(place, "\n\n".join(parts) + "\n")


def _required_name(given: str | None, stem: str) -> str:
    name = stem if given is None else given
    if _NAME.fullmatch(name):
        return name
    what = f"the name {name!r}" if given is not None else f"the file's stem {stem!r}"
    plain = re.sub(r"[^A-Za-z0-9_]+", "_", name, flags=re.ASCII).strip("_")[:63]
    plain = plain if _NAME.fullmatch(plain) else f"head_{plain}"[:63].rstrip("_")
    raise UnsupportedError(
        f"{what} cannot begin the name of a C function; expected up to 63 letters, digits and underscores, a letter first",
        f"Choose a name, {plain} for example.",
    )


def _guard(head: Head, domain: Domain, outside: str) -> list[str]:
    """What the function does first with its input, as C; it then goes on with z."""
    require_rule(outside, domain, "a C file")
    if outside == "allow":
        return []
    if not isinstance(domain, Box):
        raise UnsupportedError(
            f"outside={outside!r} in a C file needs a box; the domain is {domain}",
            "Use outside='allow' and check the inputs before the call.",
        )
    precision, real, suffix = Precision.of(head.dtype), "double", ""
    if head.dtype == torch.float32:
        real, suffix = "float", "f"
    lo, hi = domain.lo.ravel(), domain.hi.ravel()
    ends = precision.widened(lo, hi) if outside == "mark" else (precision.rounded(lo), precision.rounded(hi))
    low, high = (", ".join(f"{float(x).hex()}{suffix}" for x in end) for end in ends)
    m = domain.dimension
    found = [f"static const {real} low[{m}] = {{{low}}}, high[{m}] = {{{high}}};"]
    if outside == "clamp":
        return [
            *found,
            f"{real} z[{m}];",
            f"for (int i = 0; i < {m}; i++) z[i] = in[i] < low[i] ? low[i] : in[i] > high[i] ? high[i] : in[i];",
        ]
    return [
        *found,
        f"for (int i = 0; i < {m}; i++)",
        "    if (!(in[i] >= low[i] && in[i] <= high[i])) {",
        f"        for (int o = 0; o < {head.num_outputs}; o++) out[o] = NAN;",
        "        return;",
        "    }",
    ]


def _comment(head: Head, certificate: Certificate, target: Target, name: str, outside: str, source: CSource) -> str:
    """What the file is, what is claimed of it, and what the claim rests on."""
    real, m = source.real, head.dimension
    known = onnx_metadata(certificate, target)
    rules = {
        "allow": "Outside the domain it returns a value that the certificate does not cover.",
        "clamp": "Inputs outside the domain are moved to the nearest point of it.",
        "mark": "Outside the domain it returns NaN.",
    }
    covered = (
        "The bound covers this C, its roundings included, on every machine and with every compiler that keeps to these rules:"
        if np.isfinite(certificate.error_bound)
        else "The error was sampled, so there is no bound. The code computes what the head computes if these rules are kept:"
    )
    paragraphs = [
        f"{name}: {target.label}",
        f"void {name}_eval(const {real} *in, {real} *out)",
        f"    in: {_counted(m)}{_shapes(head)}. out: {_counted(head.num_outputs)}{_rows(head)}.",
        f"    {rules[outside]} NaN or infinity in gives NaN out.",
        "    It allocates nothing, keeps no state, and needs nothing of a library but memcpy. "
        f"It uses about {_kilobytes(source)} of stack.",
        f"    Compile with -D{name.upper()}_SELFTEST for a program that tests this file.",
        "",
        "Certificate",
        *(f"    {line}" for line in certificate.explain().splitlines()),
        f"    domain: {known['partita.domain']}",
        f"    sha256 of certificate.json: {known['partita.certificate_sha256']}",
        "",
        covered,
        f"    - {real} is IEEE 754, results are rounded to nearest, and subnormal numbers are kept.",
        "    - No option that changes what arithmetic means, such as -ffast-math. Fused multiply-adds are allowed.",
        "    - Nothing is assumed of a library: the exponential is part of this file, within 2 units in the last place.",
    ]
    rows = [row for text in paragraphs for row in _wrapped(_safe(text))]
    return "\n".join(["/*", *(f" * {row}".rstrip() for row in rows), " */"])


def _counted(count: int) -> str:
    return f"{count} number{'s' * (count != 1)}"


def _shapes(head: Head) -> str:
    """How the inputs lie in `in`, where that is not plain."""
    shapes = head.input_shapes
    if len(shapes) == 2:
        return f", first the {shapes[0]} of z_k and then the {shapes[1]} of z_q"
    return f", the rows of a {shapes[0][0]} x {shapes[0][1]} array" if len(shapes[0]) == 2 else ""


def _rows(head: Head) -> str:
    return (
        f", the rows of a {head.output_shape[0]} x {head.output_shape[1]} array" if len(head.output_shape) == 2 else ""
    )


def _kilobytes(source: CSource) -> str:
    size = source.local * (8 if source.real == "double" else 4)
    return f"{-(-size // 1024)} KiB"


def _safe(text: str) -> str:
    """Text that can stand in a C comment: ASCII, without comment marks and trigraphs."""
    plain = text.translate(_PLAIN).encode("ascii", "backslashreplace").decode()
    plain = "".join(c if c.isprintable() else " " for c in plain)
    for mark in ("/*", "*/", "??"):
        while mark in plain:
            plain = plain.replace(mark, " ".join(mark))
    return plain


def _wrapped(text: str) -> list[str]:
    indent = " " * (len(text) - len(text.lstrip()))
    return textwrap.wrap(text, _WIDTH, subsequent_indent=indent + "  ", break_long_words=True) or [""]


def _entry(head: Head, name: str, real: str, guard: list[str]) -> str:
    given = "z" if any(line.startswith(f"{real} z[") for line in guard) else "in"
    body = [*guard, f"{name}_head({given}, out);"]
    lines = "\n".join(f"    {line}" for line in body)
    return f"void {name}_eval(const {real} *in, {real} *out)\n{{\n{lines}\n}}"


def _self_test(head: Head, target: Target, name: str, real: str) -> str:
    """A program that compares the function with the head at points of the domain.

    Two ways of summing may differ by what roundings do to the scores. Moving an input by some units of its size does at least as
    much, so what that changes, and some units of the values, is allowed.
    """
    domain = target.domain
    box = domain if isinstance(domain, Box) else domain.bounding_box()
    precision = Precision.of(head.dtype)
    drawn = np.concatenate([domain.sample(_TESTED - 4, np.random.default_rng(0)), domain.corners(4)])
    points = precision.rounded(drawn)
    sides = np.maximum(box.hi.ravel() - box.lo.ravel(), np.maximum(np.abs(box.lo.ravel()), np.abs(box.hi.ravel())))
    step = _MOVED * precision.unit * sides

    def at(z: Array) -> Array:
        with torch.no_grad():
            return np.asarray(head.evaluate(torch.from_numpy(z).to(head.dtype)).double().cpu().numpy())

    expected = at(points)
    moved = [np.abs(at(points + sign * step * axis) - expected).max() for axis in np.eye(len(step)) for sign in (-1, 1)]
    units = _MOVED * precision.unit * max(head.largest_value(box.lo, box.hi), float(np.abs(expected).max()))
    allowed = 2.0 * (max(moved) + sum(moved) + 8 * units)
    suffix = "f" if real == "float" else ""

    def rows(table: Array) -> str:
        return ",\n    ".join("{" + ", ".join(f"{float(x).hex()}{suffix}" for x in row) + "}" for row in table)

    m, outs, count = head.dimension, head.num_outputs, len(points)
    return (
        f"#ifdef {name.upper()}_SELFTEST\n"
        f"#include <stdio.h>\n\n"
        f"static const {real} {name}_points[{count}][{m}] = {{\n    {rows(points)}}};\n\n"
        f"static const {real} {name}_expected[{count}][{outs}] = {{\n    {rows(expected)}}};\n\n"
        "int main(void)\n{\n"
        f"    const double allowed = {allowed.hex()}; /* {allowed:.3g}: how far two ways of summing may differ */\n"
        "    int failed = 0;\n"
        f"    for (int n = 0; n < {count}; n++) {{\n"
        f"        {real} out[{outs}];\n"
        "        double worst = 0.0;\n"
        f"        {name}_eval({name}_points[n], out);\n"
        f"        for (int o = 0; o < {outs}; o++) {{\n"
        f"            const double away = (double)out[o] - (double){name}_expected[n][o];\n"
        "            if (!(away <= allowed && away >= -allowed)) worst = away < 0.0 ? -away : away;\n"
        "            if (away != away) worst = allowed + 1.0;\n"
        "        }\n"
        "        if (worst > allowed) {\n"
        '            printf("point %d: off by %.3g, allowed %.3g\\n", n, worst, allowed);\n'
        "            failed++;\n"
        "        }\n"
        "    }\n"
        f'    printf("{name}: %d passed, %d failed\\n", {count} - failed, failed);\n'
        "    return failed != 0;\n"
        "}\n"
        "#endif"
    )


_OPENING = """#include <float.h>
#include <math.h>
#include <stdint.h>
#include <string.h>

#if defined(__FAST_MATH__) || (defined(__FINITE_MATH_ONLY__) && __FINITE_MATH_ONLY__)
#error "The certificate does not cover -ffast-math. Compile this file without it."
#endif
#if FLT_EVAL_METHOD == 1 || FLT_EVAL_METHOD == 2 || FLT_EVAL_METHOD == -1
#error "The certificate needs arithmetic without extra precision: on 32-bit x86 compile with -msse2 -mfpmath=sse."
#endif

void NAME_eval(const REAL *in, REAL *out);"""
_DOUBLES = """#if FLT_RADIX != 2 || DBL_MANT_DIG != 53 || DBL_MAX_EXP != 1024
#error "The certificate needs double to be IEEE 754 binary64."
#endif"""
_FLOATS = """#if FLT_RADIX != 2 || FLT_MANT_DIG != 24 || FLT_MAX_EXP != 128
#error "The certificate needs float to be IEEE 754 binary32."
#endif"""
