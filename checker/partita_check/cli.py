"""`partita-check head/ [--function EXPR] [--sampled [N]] [--budget SECONDS] [--json]`."""

from __future__ import annotations

import argparse
import json
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from partita_check import __version__
from partita_check.clock import TimeOver, clock
from partita_check.descent import DESCRIPTION, Descent, about, check_descent, read_descent
from partita_check.graph import Graph, Malformed, parse
from partita_check.network import NetworkVerdict, check_network, other_function
from partita_check.reading import Stored, StoredNetwork, read_folder
from partita_check.verdict import MALFORMED, REFUTED, UNKNOWN, VERIFIED, Verdict, check

__all__ = ["main", "run"]

SHOWN = 40  # lines of a list; JSON has all of them
CODES, USAGE = {VERIFIED: 0, REFUTED: 1, UNKNOWN: 2, MALFORMED: 3}, 64


class _Arguments(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(USAGE, f"{self.format_usage()}{self.prog}: {message}\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """0 verified, 1 refuted, 2 unknown, 3 malformed, 64 wrong usage."""
    parser = _Arguments(
        prog="partita-check",
        description="Recompute the error bound of a saved head in ball arithmetic, without trusting its certificate.",
        epilog="Exit status: 0 verified, 1 refuted, 2 unknown, 3 malformed, 64 wrong usage.",
    )
    parser.add_argument("head", type=Path, help="folder of the saved head, or of a saved descent in context")
    parser.add_argument("--function", metavar="EXPR", help="also require that the claim is about this function")
    parser.add_argument(
        "--sampled",
        nargs="?",
        type=int,
        const=1000,
        default=0,
        metavar="N",
        help="only look for a violation at N points (1000); proves nothing",
    )
    parser.add_argument("--budget", type=float, default=300.0, metavar="SECONDS", help="stop after this time (300)")
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    parser.add_argument("--version", action="version", version=__version__)
    given = parser.parse_args(arguments)
    if given.sampled < 0 or not 0 < given.budget < math.inf:
        parser.error("--sampled and --budget take positive numbers")
    try:
        report, code = run(given.head, given.function, given.sampled, given.budget)
    except SyntaxError as problem:
        parser.error(f"--function: {problem}")
    width = max(map(len, report))
    for name, value in report.items() if not given.json else ():
        lines = value if isinstance(value, list) else [value]
        lines = lines if len(lines) <= SHOWN else [*lines[: SHOWN - 1], f"… and {len(lines) - SHOWN + 1} more (--json)"]
        print("\n".join(f"{name if k == 0 else '':<{width}}  {line}" for k, line in enumerate(lines)))
    if given.json:
        print(json.dumps(report, indent=1, ensure_ascii=False))
    return code


def run(
    folder: Path, function: str | None = None, sampled: int = 0, budget: float = 300.0
) -> tuple[dict[str, Any], int]:
    """The report on a folder and the exit code; returns within the budget whatever the folder holds."""
    report: dict[str, Any] = {"head": str(folder)}
    clock.start(budget)
    try:
        stored: Stored | StoredNetwork | Descent
        if os.path.exists(folder / DESCRIPTION):
            stored = read_descent(folder)
            report |= about(stored)
            verdict = _other_function(stored, function) or check_descent(stored, sampled=sampled)
        else:
            stored = read_folder(folder)
            report |= _about(stored)
            own = check_network if isinstance(stored, StoredNetwork) else check
            verdict = _other_function(stored, function) or own(stored, sampled=sampled)  # type: ignore[arg-type]
    except TimeOver:
        verdict = Verdict(UNKNOWN, "the time budget ran out before the files were read")
    except Malformed as problem:
        verdict = Verdict(MALFORMED, str(problem))
    except (ArithmeticError, LookupError, TypeError, ValueError, AttributeError, MemoryError, RecursionError) as error:
        verdict = Verdict(UNKNOWN, f"the check stopped with {type(error).__name__}: {str(error)[:200]}")
    finally:
        clock.stop()
    if verdict.where is not None:
        report["worst point"] = ", ".join(f"{x:.9g}" for x in verdict.where)
    if verdict.outcome == VERIFIED and verdict.where is not None:
        low, high = verdict.seen, stored.claim.bound or 0.0
        supremum = f"{low:.6g} ≤ largest error ≤ {high:.6g}" + (f", ratio {high / low:.4f}" if low > 0 else "")
        mean = f"L{stored.claim.norm:g} error ≤ {high:.6g}; largest error seen at a point {low:.6g}"
        report["bracket"] = supremum if math.isinf(stored.claim.norm) else mean
    if isinstance(verdict, NetworkVerdict):
        report |= {name: lines for name in ("parts", "propagation") if (lines := getattr(verdict, name))}
    if verdict.method:
        report["method"] = f"{verdict.method}; proved {verdict.proved:.6g}"
    given = ["verified, given:", *(f"  {line}" for line in verdict.given)]
    text = "spot check" if sampled and verdict.outcome == UNKNOWN else verdict.outcome
    report["verdict"] = given if verdict.outcome == VERIFIED and verdict.given else text
    if verdict.reason:
        report["reason"] = verdict.reason
    return report, CODES[verdict.outcome]


def _about(stored: Stored | StoredNetwork) -> dict[str, Any]:
    claim = stored.claim
    ends = [f"{name} in [{a:.9g}, {b:.9g}]" for name, a, b in zip(stored.names, stored.lo, stored.hi)]
    alike = len(ends) > 8 and len(set(zip(stored.lo, stored.hi))) == 1  # too many to list
    box = f"{stored.names[0]}, …, {ends[-1]}" if alike else ", ".join(ends)
    region = stored.region is not None and stored.region.infix(stored.names)
    norm = "sup" if math.isinf(claim.norm) else f"L{claim.norm:g}"
    computing = claim.semantics if claim.semantics in ("real", "float64") else "float32"
    said = f"|f − head| ≤ {claim.bound:.9g}" if claim.bound is not None else f"error ≈ {claim.estimate:.6g} (estimate)"
    if isinstance(stored, StoredNetwork):
        uses, cloud = stored.wiring.uses, ""
        keys = (
            f"{sum(stored.heads[use.head].keys for use in uses):,} in {len(uses):,} uses of {len(stored.heads):,} heads"
        )
        kind = f"{keys}, {stored.wiring.layers} layers, {stored.dtype}, network"
    else:
        cloud = (
            f"{len(stored.points):,} points and all within {stored.fill:g} of them" if stored.points is not None else ""
        )
        kind = f"{stored.head.keys:,}, {stored.head.dtype}, {stored.head.kind}"
    return {
        "function": _text(stored),
        "domain": cloud or region or box,
        "keys": kind,
        "claim": f"{claim.kind}: {norm} {said}, in {claim.semantics} arithmetic",
        "platform": f"assumes IEEE 754 {computing} and exp within 8 units in the last place",
    }


def _text(stored: Stored | StoredNetwork | Descent) -> str:
    if stored.graph is not None:
        return stored.graph.infix(stored.names)
    if isinstance(stored, StoredNetwork) and stored.parts:
        return f"the linear maps and parts below, by definition (called {stored.label[:80]!r})"
    about_table = not isinstance(stored, Descent) and stored.claim.is_about_table
    return "a table of samples, not stored" if about_table else "a black box, not stored"


def _other_function(stored: Stored | StoredNetwork | Descent, function: str | None) -> Verdict | None:
    """A refusal if the claim is not about the requested function."""
    if function is None:
        return None
    try:
        wanted = parse(function, stored.names)
    except Malformed as problem:
        raise SyntaxError(str(problem)) from None
    if _same(stored, wanted):
        return None
    shown = f"expected {wanted.infix(stored.names)}, found {_text(stored)}"
    return Verdict(REFUTED, f"the claim is about another function: {shown}")


def _same(stored: Stored | StoredNetwork | Descent, wanted: Graph) -> bool:
    if stored.graph is not None:
        key = stored.graph.canonical()
        return key is not None and key == wanted.canonical()
    if not isinstance(stored, StoredNetwork) or len(wanted.outputs) != len(stored.wiring.output) or not stored.parts:
        return False
    return other_function(stored, wanted) == ""
