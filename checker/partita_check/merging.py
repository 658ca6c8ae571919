"""Results of shards as files, and the verdict of a merge: that of the whole check, if the shards cover all of it exactly once.

Nothing in a file shows that somebody ran the checker. What can be compared is: the head, the version, the cells, the claim.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from partita_check import __version__
from partita_check.descent import Descent
from partita_check.graph import Malformed, need, read_hex
from partita_check.reading import Stored, StoredNetwork, parse_json, read_file, sha256_of
from partita_check.shards import MOST_SHARDS, Shard
from partita_check.verdict import LEFT, REFUTED, UNKNOWN, VERIFIED, Point, Verdict, is_divided

__all__ = ["AnyStored", "Result", "merged", "read_result", "write_result"]

FORMAT, VERSION, MAX_FILE = "partita-check-shard", 1, 8 << 20
SHOWN = 10  # shards of which it is said that they are missing
AnyStored = Stored | StoredNetwork | Descent
_HEX = set("0123456789abcdef")


class Result(NamedTuple):
    """What one shard found, and of what: the hashes of the files that it read, and the cells that it covered.

    ground: name of a head → (into how many cells its domain is cut, those of this shard). claimed: the bound of the certificate.
    """

    shard: Shard
    files: dict[str, str]
    ground: dict[str, tuple[int, list[int]]]
    claimed: float | None
    outcome: str
    reason: str
    method: str
    proved: float
    seen: float
    where: Point | None
    given: list[str]

    @classmethod
    def of(cls, stored: AnyStored, shard: Shard, files: dict[str, str], found: Verdict) -> Result:
        """The verdict on a shard. The bound of what is verified was compared in balls, before it was rounded up."""
        bound = stored.claim.bound
        proved = found.proved if found.outcome != VERIFIED or bound is None else min(found.proved, bound)
        cells, text = ground(divisions(stored), shard), (found.outcome, found.reason, found.method)
        return cls(shard, files, cells, bound, *text, proved, found.seen, found.where, found.given)

    @property
    def covered(self) -> str:
        """The share of the cells, in words."""
        own, cells = (sum(counts) for counts in zip(*((len(own), cells) for cells, own in self.ground.values())))
        return f"{own:,} of {cells:,} cells"

    def to_json(self) -> dict[str, Any]:
        """Plain data with every float as a hexadecimal string, sealed against accidents."""
        data = {
            "format": FORMAT,
            "version": VERSION,
            "checker": __version__,
            "shard": self.shard.number,
            "of": self.shard.of,
            "files": self.files,
            "ground": {name: {"cells": cells, "own": own} for name, (cells, own) in self.ground.items()},
            "claimed": None if self.claimed is None else self.claimed.hex(),
            "outcome": self.outcome,
            "reason": self.reason,
            "method": self.method,
            "proved": self.proved.hex() if math.isfinite(self.proved) else None,
            "seen": self.seen.hex(),
            "where": None if self.where is None else [x.hex() for x in self.where],
            "given": self.given,
        }
        return {**data, "seal": sha256_of(data)}


def divisions(stored: AnyStored) -> dict[str, bool]:
    """What is covered, the domain or those of the parts of a network, and whether shards share its proof."""
    if isinstance(stored, StoredNetwork) and stored.parts:
        return {f"part {k}": is_divided(part) for k, part in enumerate(stored.parts)}
    return {"domain": isinstance(stored, Stored) and is_divided(stored)}


def ground(divided: dict[str, bool], shard: Shard) -> dict[str, tuple[int, list[int]]]:
    """What a shard covers: into how many cells every domain is cut, and which of them are its own."""
    return {name: (shard.count(shared), shard.own(shared)) for name, shared in divided.items()}


def write_result(result: Result, path: Path) -> None:
    """The file appears whole or not at all."""
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        beside.write_text(json.dumps(result.to_json(), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        os.replace(beside, path)
    finally:
        beside.unlink(missing_ok=True)


def read_result(path: Path) -> Result:
    """A result that `write_result` wrote; `Malformed` says what does not fit."""
    try:
        return _result(parse_json(bytes(read_file(path, MAX_FILE)), path.name), path.name)
    except (LookupError, TypeError, AttributeError, ValueError, OverflowError) as error:
        raise Malformed(f"{path.name} is not the result of a shard: {type(error).__name__}: {error}") from None


def _result(data: dict[str, Any], name: str) -> Result:
    need(
        data.get("format") == FORMAT,
        f"{name} is not the result of a shard: `partita-check HEAD --shard i/n` writes them",
    )
    need(data["version"] == VERSION, f"{name} has version {data['version']!r} of the format, expected {VERSION}")
    said = data["checker"]
    need(said == __version__, f"{name} was written by partita-check {said!r}, and this is {__version__}: run it again")
    seal = data.pop("seal")
    need(seal == sha256_of(data), f"{name} does not match its seal: it was damaged or edited. Run that shard again")
    shard = Shard(data["shard"], data["of"])
    whole = all(type(k) is int for k in shard)
    need(whole and 1 <= shard.number <= shard.of <= MOST_SHARDS, f"{name}: {shard} is not the number of a shard")
    files, covered = data["files"], dict[str, tuple[int, list[int]]]()
    need(all(len(h) == 64 and set(h) <= _HEX for h in files.values()), f"{name}: files: expected sha256 hashes")
    for part, entry in data["ground"].items():
        cells, own = entry["cells"], entry["own"]
        need(set(entry) == {"cells", "own"} and isinstance(own, list), f"{name}: ground: expected cells and own")
        need(all(type(k) is int for k in (cells, *own)), f"{name}: ground: expected whole numbers")
        covered[part] = cells, own
    claimed, proved = (None if data[k] is None else read_hex(data[k], f"{name}: {k}") for k in ("claimed", "proved"))
    seen, where = read_hex(data["seen"], f"{name}: seen"), data["where"]
    point = None if where is None else tuple(read_hex(x, f"{name}: where") for x in where)
    need(seen >= 0 and (proved is None or proved >= 0), f"{name}: an error is negative")
    outcome, reason, method, given = (data[k] for k in ("outcome", "reason", "method", "given"))
    need(outcome in (VERIFIED, REFUTED, UNKNOWN), f"{name}: unknown outcome {outcome!r}")
    need(isinstance(given, list), f"{name}: given: expected a list")
    texts = all(isinstance(text, str) for text in (reason, method, *given))
    need(texts and (reason == "") == (outcome == VERIFIED), f"{name}: the reason does not fit the outcome")
    bound = math.inf if proved is None else proved
    enough = outcome != VERIFIED or (claimed is not None and bound <= claimed)
    need(enough, f"{name} is called verified, but its bound {bound:.6g} is above the bound claimed")
    found = Result(shard, files, covered, claimed, outcome, reason, method, bound, seen, point, given)
    need(found.to_json() == {**data, "seal": seal}, f"{name} has other fields than the result of a shard")
    return found


def merged(stored: AnyStored, files: dict[str, str], paths: Sequence[Path]) -> tuple[Verdict, list[str]]:
    """The verdict on a claim from the results of all shards of one check of it, in any order, and a line about each."""
    results, divided = dict[int, tuple[Result, str]](), divisions(stored)
    for path in paths:
        found = read_result(path)
        first, before = next(iter(results.values()), (found, path.name))
        number, of = found.shard
        for name in {**files, **found.files}:
            same = files.get(name) == found.files.get(name)
            need(same, f"{path.name} is about another head: its {name} has another hash than the one in this folder")
        need(
            of == first.shard.of,
            f"{path.name} is shard {found.shard}, and {before} shard {first.shard}: other cuts overlap",
        )
        twice = results.get(number, (found, ""))[1]
        need(number not in results, f"shard {found.shard} is there twice: {twice} and {path.name}")
        need(found.claimed == stored.claim.bound, f"{path.name} is about another bound than the certificate's")
        need(
            found.ground == ground(divided, found.shard), f"{path.name} does not cover the cells of shard {found.shard}"
        )
        unassumed = stored.claim.kind == "proved_given" or not (found.outcome == VERIFIED and found.given)
        need(unassumed, f"{path.name} rests on assumptions, but the claim is of kind {stored.claim.kind}")
        need(_is_inside(stored, found.where), f"{path.name}: the worst point is not a point of the domain")
        results[number] = found, path.name
    of = next(iter(results.values()))[0].shard.of
    missing = [str(Shard(k, of)) for k in range(1, of + 1) if k not in results]
    more = f" and {len(missing) - SHOWN:,} more" if len(missing) > SHOWN else ""
    need(not missing, f"not all of the domain is covered. Missing: shard {', '.join(missing[:SHOWN])}{more}")
    ordered = [results[k][0] for k in range(1, of + 1)]
    return _joined(ordered), [_line(r) for r in ordered]


def _is_inside(stored: AnyStored, point: Point | None) -> bool:
    """Of a descent the worst point is a prompt of any length."""
    if isinstance(stored, Descent) or point is None:
        return True
    return len(point) == len(stored.lo) and all(a <= x <= b for a, x, b in zip(stored.lo, point, stored.hi))


def _joined(results: Sequence[Result]) -> Verdict:
    """Refuted if a shard is, verified if all are; what was seen and proved is the largest of all."""
    worst = max(results, key=lambda r: r.seen)
    verdict = Verdict(VERIFIED, "", worst.seen, worst.where, max(r.proved for r in results))
    verdict.method = f"the proofs of {len(results):,} shards"
    verdict.given = list(dict.fromkeys(line for r in results for line in r.given))
    for outcome in (REFUTED, UNKNOWN):
        those = [r for r in results if r.outcome == outcome]
        if those:
            more = f"; and {len(those) - 1:,} more shards" if len(those) > 1 else ""
            verdict.outcome, verdict.reason = outcome, f"shard {those[0].shard}: {those[0].reason}{more}"
            if outcome == REFUTED:
                verdict.seen, verdict.where = those[0].seen, those[0].where
            break
    return verdict


def _line(result: Result) -> str:
    how = f"; {result.method}" if result.method else ""
    bound = f"; proved {result.proved:.6g}" if result.method not in ("", LEFT) else ""
    return f"{result.shard}: {result.outcome}, {result.covered}{how}{bound}"
