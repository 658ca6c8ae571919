"""`partita-check head/`, in one piece, in shards (`--shard i/n`), or from the results of all shards (`--merge FILE …`)."""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from partita_check import __version__
from partita_check.clock import TimeOver, clock
from partita_check.descent import DESCRIPTION, Descent, about, check_descent, read_descent
from partita_check.descent import FILES as FILES_OF_DESCENT
from partita_check.graph import Graph, Malformed, need, parse
from partita_check.merging import AnyStored, Result, merged, write_result
from partita_check.network import NetworkVerdict, check_network, other_function
from partita_check.reading import FILES, Stored, StoredNetwork, hashes_of, read_folder, stamps_of
from partita_check.shards import MOST_SHARDS, WHOLE, Shard
from partita_check.verdict import MALFORMED, REFUTED, UNKNOWN, VERIFIED, Verdict, check

__all__ = ["main", "run", "run_merge", "run_shard"]

Hashes = Callable[[], dict[str, str]]

SHOWN = 40  # lines of a list; JSON has all of them
CODES, USAGE = {VERIFIED: 0, REFUTED: 1, UNKNOWN: 2, MALFORMED: 3}, 64
EPILOG = """\
A long check on several machines: every machine has the head and checks one shard of its domain. One of them merges the results.

  partita-check head/ --shard 1/3 --out 1.json      on the first machine
  partita-check head/ --shard 2/3 --out 2.json      on the second
  partita-check head/ --shard 3/3 --out 3.json      on the third
  partita-check head/ --merge 1.json 2.json 3.json  anywhere: the verdict on the head, in seconds

A shard alone says nothing about the head, whatever its exit status. A merge needs every shard exactly once, in any order, of this
head and from this version of partita-check. It cannot see whether a file was really written by a check: files are not signed.
Merge only what you trust, and run a shard again where you are in doubt.

Exit status: 0 verified (with --shard: on that shard), 1 refuted, 2 unknown, 3 malformed files or results that do not fit
together, 64 wrong usage.
"""


class _Arguments(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(USAGE, f"{self.format_usage()}{self.prog}: {message}\n")


def _parser() -> _Arguments:
    parser = _Arguments(
        prog="partita-check",
        description="Recompute the error bound of a saved head in ball arithmetic, without trusting its certificate.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
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
    budget = "stop after this time (300); every shard has its own"
    parser.add_argument("--budget", type=float, default=300.0, metavar="SECONDS", help=budget)
    parser.add_argument("--shard", metavar="i/n", help="check part i of n of the domain, i from 1 to n")
    parser.add_argument(
        "--out", type=Path, metavar="FILE", help="where to write the result of the shard; else it is printed"
    )
    parser.add_argument(
        "--merge", type=Path, nargs="+", metavar="FILE", help="the results of all shards: their verdict"
    )
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    parser.add_argument("--version", action="version", version=__version__)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """0 verified, 1 refuted, 2 unknown, 3 malformed, 64 wrong usage."""
    parser = _parser()
    given = parser.parse_args(arguments)
    if given.sampled < 0 or not 0 < given.budget < math.inf:
        parser.error("--sampled and --budget take positive numbers")
    if given.merge is not None and (given.shard is not None or given.sampled):
        parser.error("--merge reads what shards found: it goes with neither --shard nor --sampled")
    if given.shard is not None and (given.function is not None or given.sampled):
        parser.error("--shard goes with neither --sampled nor --function; give --function to the merge")
    if given.out is not None and (given.shard is None or not given.out.parent.is_dir() or given.out.is_dir()):
        parser.error("--out takes a file in a folder that exists, and goes with --shard")
    try:
        if given.shard is not None:
            return _shard(parser, given)
        if given.merge is not None:
            report, code = run_merge(given.head, given.merge, given.function, given.budget)
        else:
            report, code = run(given.head, given.function, given.sampled, given.budget)
    except SyntaxError as problem:
        parser.error(f"--function: {problem}")
    _show(report, given.json)
    return code


def _shard(parser: _Arguments, given: argparse.Namespace) -> int:
    """Check a shard, and write its result or print it; a head that cannot be read has none, only a report."""
    numbers = re.fullmatch(r"([1-9][0-9]{0,5})/([1-9][0-9]{0,5})", given.shard)
    shard = Shard(*map(int, numbers.groups())) if numbers else Shard(1, 0)
    if not shard.number <= shard.of <= MOST_SHARDS:
        parser.error(f"--shard is {given.shard!r}; expected i/n with 1 ≤ i ≤ n ≤ {MOST_SHARDS}, like 2/3")
    report, code, result = run_shard(given.head, shard, given.budget)
    if result is None or given.out is not None:
        _show(report, given.json)
    if result is None:
        return code
    try:
        if given.out is not None:
            write_result(result, given.out)
            return code
    except OSError as problem:
        print(f"partita-check: {given.out}: {problem.strerror}; this is the result of the shard:", file=sys.stderr)
        code = USAGE
    print(json.dumps(result.to_json(), indent=1, ensure_ascii=False))
    return code


def _show(report: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print(json.dumps(report, indent=1, ensure_ascii=False))
        return
    width = max(map(len, report))
    for name, value in report.items():
        lines = value if isinstance(value, list) else [value]
        lines = lines if len(lines) <= SHOWN else [*lines[: SHOWN - 1], f"… and {len(lines) - SHOWN + 1} more (--json)"]
        print("\n".join(f"{name if k == 0 else '':<{width}}  {line}" for k, line in enumerate(lines)))


def run(
    folder: Path, function: str | None = None, sampled: int = 0, budget: float = 300.0
) -> tuple[dict[str, Any], int]:
    """The report on a folder and the exit code; returns within the budget whatever the folder holds."""
    report: dict[str, Any] = {"head": str(folder)}

    def judge(stored: AnyStored, hashes: Hashes) -> Verdict:
        return _other_function(stored, function) or _checked(stored, sampled, WHOLE)

    stored, verdict = _judged(folder, budget, report, judge)
    _conclude(report, stored, verdict, "spot check" if sampled and verdict.outcome == UNKNOWN else verdict.outcome)
    return report, CODES[verdict.outcome]


def run_shard(folder: Path, shard: Shard, budget: float = 300.0) -> tuple[dict[str, Any], int, Result | None]:
    """The report on a shard, its exit code, and its result; None if the files were malformed or the check broke off."""
    report: dict[str, Any] = {"head": str(folder)}
    results = list[Result]()

    def judge(stored: AnyStored, hashes: Hashes) -> Verdict:
        verdict = _checked(stored, 0, shard)
        clock.stop()
        results.append(Result.of(stored, shard, hashes(), verdict))
        return verdict

    _, verdict = _judged(folder, budget, report, judge)
    result = results[0] if results and verdict.outcome != MALFORMED else None
    report["shard"] = str(shard) + (f": {result.covered}" if result is not None else "")
    _conclude(report, None, verdict, f"{verdict.outcome}, on this shard alone")
    return report, CODES[verdict.outcome], result


def run_merge(
    folder: Path, files: Sequence[Path], function: str | None = None, budget: float = 300.0
) -> tuple[dict[str, Any], int]:
    """The report on a folder whose shards were checked, as far as their results say, and the exit code."""
    report: dict[str, Any] = {"head": str(folder)}

    def judge(stored: AnyStored, hashes: Hashes) -> Verdict:
        other = _other_function(stored, function)
        verdict, report["shards"] = merged(stored, hashes(), files)
        return other or verdict

    stored, verdict = _judged(folder, budget, report, judge)
    _conclude(report, stored, verdict, verdict.outcome)
    return report, CODES[verdict.outcome]


def _judged(
    folder: Path, budget: float, report: dict[str, Any], judge: Callable[[AnyStored, Hashes], Verdict]
) -> tuple[AnyStored | None, Verdict]:
    """What a folder holds, and a verdict on it from that and, if asked for, the hashes of its files, whatever happens."""
    stored: AnyStored | None = None
    clock.start(budget)
    try:
        is_descent = os.path.exists(folder / DESCRIPTION)
        names = FILES_OF_DESCENT if is_descent else FILES
        stamps = stamps_of(folder, names)
        read = read_descent(folder) if is_descent else read_folder(folder)
        report |= about(read) if isinstance(read, Descent) else _about(read)
        stored = read
        verdict = judge(stored, lambda: hashes_of(folder, names))
        need(stamps_of(folder, names) == stamps, "the files changed while they were checked")
    except TimeOver:
        late = "the time budget ran out" + (" before the files were read" if stored is None else "")
        verdict = Verdict(UNKNOWN, late)
    except Malformed as problem:
        verdict = Verdict(MALFORMED, str(problem))
    except (ArithmeticError, LookupError, TypeError, ValueError, AttributeError, MemoryError, RecursionError) as error:
        verdict = Verdict(UNKNOWN, f"the check stopped with {type(error).__name__}: {str(error)[:200]}")
    finally:
        clock.stop()
    return stored, verdict


def _checked(stored: AnyStored, sampled: int, shard: Shard) -> Verdict:
    if isinstance(stored, Descent):
        return check_descent(stored, sampled=sampled, shard=shard)
    if isinstance(stored, StoredNetwork):
        return check_network(stored, sampled=sampled, shard=shard)
    return check(stored, sampled=sampled, shard=shard)


def _conclude(report: dict[str, Any], stored: AnyStored | None, verdict: Verdict, text: str) -> None:
    """Add what was found to a report. A bracket is shown where the whole claim was judged, which `stored` stands for."""
    if verdict.where is not None:
        report["worst point"] = ", ".join(f"{x:.9g}" for x in verdict.where)
    if verdict.outcome == VERIFIED and verdict.where is not None and stored is not None:
        low, high = verdict.seen, stored.claim.bound or 0.0
        supremum = f"{low:.6g} ≤ largest error ≤ {high:.6g}" + (f", ratio {high / low:.4f}" if low > 0 else "")
        mean = f"L{stored.claim.norm:g} error ≤ {high:.6g}; largest error seen at a point {low:.6g}"
        report["bracket"] = supremum if math.isinf(stored.claim.norm) else mean
    if isinstance(verdict, NetworkVerdict):
        report |= {name: lines for name in ("parts", "propagation") if (lines := getattr(verdict, name))}
    if verdict.method:
        report["method"] = f"{verdict.method}; proved {verdict.proved:.6g}"
    given = [f"{text}, given:", *(f"  {line}" for line in verdict.given)]
    report["verdict"] = given if verdict.outcome == VERIFIED and verdict.given else text
    if verdict.reason:
        report["reason"] = verdict.reason


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


def _text(stored: AnyStored) -> str:
    if stored.graph is not None:
        return stored.graph.infix(stored.names)
    if isinstance(stored, StoredNetwork) and stored.parts:
        return f"the linear maps and parts below, by definition (called {stored.label[:80]!r})"
    about_table = not isinstance(stored, Descent) and stored.claim.is_about_table
    return "a table of samples, not stored" if about_table else "a black box, not stored"


def _other_function(stored: AnyStored, function: str | None) -> Verdict | None:
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


def _same(stored: AnyStored, wanted: Graph) -> bool:
    if stored.graph is not None:
        key = stored.graph.canonical()
        return key is not None and key == wanted.canonical()
    if not isinstance(stored, StoredNetwork) or len(wanted.outputs) != len(stored.wiring.output) or not stored.parts:
        return False
    return other_function(stored, wanted) == ""
