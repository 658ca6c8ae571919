"""`partita-check head/ [--function EXPR] [--sampled] [--budget SECONDS] [--json]`."""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from partita_check import __version__
from partita_check.graph import Malformed, parse
from partita_check.reading import Stored, read_folder
from partita_check.verdict import MALFORMED, REFUTED, UNKNOWN, VERIFIED, Verdict, check

__all__ = ["main", "run"]

CODES = {VERIFIED: 0, REFUTED: 1, UNKNOWN: 2, MALFORMED: 3}
USAGE = 64


class _Arguments(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(USAGE, f"{self.format_usage()}{self.prog}: {message}\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """0 verified, 1 refuted, 2 unknown, 3 malformed, 64 wrong usage."""
    parser = _Arguments(prog="partita-check", description="Check the error bound of a saved head in ball arithmetic.")
    parser.add_argument("head", type=Path, help="the folder that holds it")
    parser.add_argument("--function", metavar="EXPR", help="the function that the claim must be about")
    parser.add_argument(
        "--sampled", nargs="?", type=int, const=1000, default=0, metavar="N", help="a spot check at N points"
    )
    parser.add_argument("--budget", type=float, default=300.0, metavar="SECONDS", help="give up after this long (300)")
    parser.add_argument("--json", action="store_true", help="print the verdict as JSON")
    parser.add_argument("--version", action="version", version=__version__)
    given = parser.parse_args(arguments)
    if given.sampled < 0 or not 0 < given.budget < math.inf:
        parser.error("--sampled and --budget take positive numbers")
    report, verdict = run(given.head, function=given.function, sampled=given.sampled, budget=given.budget)
    if given.json:
        print(json.dumps(report, indent=1, ensure_ascii=False))
    else:
        width = max(map(len, report))
        for name, value in report.items():
            lines = value if isinstance(value, list) else [value]
            print("\n".join(f"{name if k == 0 else '':<{width}}  {line}" for k, line in enumerate(lines)))
    return CODES[verdict.outcome]


def run(
    folder: Path, *, function: str | None = None, sampled: int = 0, budget: float = 300.0
) -> tuple[dict[str, object], Verdict]:
    """The report and the verdict on a folder; whatever is in it, this returns."""
    report: dict[str, object] = {"head": str(folder)}
    try:
        stored = read_folder(folder)
        report |= _about(stored)
        verdict = _other_function(stored, function) or check(stored, budget=budget, sampled=sampled)
    except Malformed as problem:
        verdict = Verdict(MALFORMED, str(problem))
    except (ArithmeticError, LookupError, TypeError, ValueError, AttributeError, MemoryError, RecursionError) as error:
        verdict = Verdict(UNKNOWN, f"the check broke off: {type(error).__name__}: {str(error)[:200]}")
    if verdict.where is not None:
        report["worst point"] = ", ".join(f"{x:.9g}" for x in verdict.where)
    if verdict.outcome == VERIFIED and stored.claim.bound is not None and stored.graph is not None:
        bracket, bound = f"{verdict.seen:.6g} ≤ largest error ≤ {stored.claim.bound:.6g}", stored.claim.bound
        pointwise = "" if math.isinf(stored.claim.norm) else " (the lower end is a pointwise error)"
        report["bracket"] = bracket + (f", ratio {bound / verdict.seen:.4f}" if verdict.seen > 0 else "") + pointwise
    if verdict.method:
        report["method"] = f"{verdict.method}; proved {verdict.proved:.6g}"
    text: object = "spot check" if sampled and verdict.outcome == UNKNOWN else verdict.outcome
    if verdict.outcome == VERIFIED and verdict.given:
        text = ["verified, given:", *(f"  {line}" for line in verdict.given)]
    report["verdict"] = text
    if verdict.reason:
        report["reason"] = verdict.reason
    return report, verdict


def _about(stored: Stored) -> dict[str, object]:
    claim, head = stored.claim, stored.head
    known = "a black box, not stored" if stored.graph is None else stored.graph.infix(stored.names)
    ends = [f"{name} in [{a:.9g}, {b:.9g}]" for name, a, b in zip(stored.names, stored.lo, stored.hi)]
    where = (
        ", ".join(ends)
        if stored.points is None
        else f"{len(stored.points):,} points and all within {stored.fill:g} of them"
    )
    norm = "sup" if math.isinf(claim.norm) else f"L{claim.norm:g}"
    said = (
        f"{norm} |f − head| ≤ {claim.bound:.9g}"
        if claim.bound is not None
        else f"{norm} error ≈ {claim.estimate:.6g} (estimate)"
    )
    return {
        "function": known,
        "domain": where,
        "keys": f"{head.keys:,}, {head.dtype}, {head.kind}",
        "claim": f"{claim.kind}: {said}, in {claim.semantics} arithmetic",
        "platform": f"assumes IEEE 754 {claim.semantics} and exp within 8 units in the last place",
    }


def _other_function(stored: Stored, function: str | None) -> Verdict | None:
    """A refusal if the claim is not about the function that was asked for: a proof about another function is no proof."""
    if function is None:
        return None
    try:
        wanted = parse(function, stored.names)
    except (Malformed, RecursionError, ValueError) as problem:
        print(f"partita-check: --function: {problem}", file=sys.stderr)
        raise SystemExit(USAGE) from None
    if stored.graph is not None and wanted.canonical() == stored.graph.canonical():
        return None
    shown = "a black box" if stored.graph is None else stored.graph.infix(stored.names)
    return Verdict(
        REFUTED, f"a proof about another function is no proof: asked for {wanted.infix(stored.names)}, found {shown}"
    )
