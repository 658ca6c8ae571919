"""The three files of a saved head, read as if an enemy had written them."""

from __future__ import annotations

import hashlib
import json
import math
import sys
from array import array
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from partita_check.graph import Graph, Malformed, read_graph

__all__ = ["Claim", "Head", "Malformed", "Stored", "need", "parse_json", "parse_tensors", "read_folder", "read_hex"]

TENSORS, DESCRIPTION, CERTIFICATE = "head.safetensors", "head.json", "certificate.json"
MAX_JSON, MAX_TENSORS, MAX_HEADER, MAX_DEPTH, MAX_DIMENSION = 32 << 20, 1 << 30, 1 << 20, 64, 64
_NO_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))
_DTYPES = {"F64": ("float64", "d", 8), "F32": ("float32", "f", 4)}


@dataclass(frozen=True)
class Tensor:
    """Finite numbers, row-major, as Python floats (exact for both dtypes), and the bytes that they were read from."""

    dtype: str
    shape: tuple[int, ...]
    numbers: array[float]
    raw: bytes


@dataclass(frozen=True)
class Head:
    """`net(z) = Σ_j w_j(z) V_j(z)`, `w = softmax_j(−Σ_i R_i((z_i − c_ji)² − p_j)/2)`.

    Attributes:
        kind: `grid` (centers are the product of `axes`), `scattered` (rows of `centers`) or `train`.
        rates: R_i, one per coordinate. values: one list per output, row-major over the cells.
        slopes: J, flat `(cells, outputs, m)`, or None; they multiply `z − origin` on grids and `z − c_j` elsewhere.
        windows: on grids, q_i: an evaluator may look at the 2q_i centers around z_i only.
    """

    kind: str
    dtype: str
    axes: tuple[tuple[float, ...], ...]
    centers: tuple[tuple[float, ...], ...]
    rates: tuple[float, ...]
    values: tuple[tuple[float, ...], ...]
    slopes: array[float] | None
    origin: tuple[float, ...] | None
    powers: tuple[float, ...] | None
    windows: tuple[int, ...]

    @property
    def keys(self) -> int:
        return math.prod(map(len, self.axes)) if self.axes else len(self.centers)


@dataclass(frozen=True)
class Claim:
    """What the certificate says: kind, norm (math.inf or p), semantics, bound; what it rests on; the worst point it knows."""

    kind: str
    norm: float
    semantics: str
    bound: float | None
    estimate: float | None
    known: dict[str, Any]
    assumptions: tuple[tuple[str, str], ...]
    witness: tuple[float, ...] | None


@dataclass(frozen=True)
class Stored:
    """A head, the claim about it, f as a graph (None for a black box), and where: a box, or points with a fill distance."""

    head: Head
    claim: Claim
    graph: Graph | None
    names: tuple[str, ...]
    lo: tuple[float, ...]
    hi: tuple[float, ...]
    points: tuple[tuple[float, ...], ...] | None
    fill: float


def need(condition: Any, problem: str) -> None:
    if not condition:
        raise Malformed(problem)


def _read(path: Path, most: int) -> bytes:
    try:
        need(path.is_file(), f"{path.name} is missing")
        need(path.stat().st_size <= most, f"{path.name} is larger than {most:,} bytes")
        return path.read_bytes()
    except OSError as error:
        raise Malformed(f"{path.name} cannot be read: {error.strerror}") from None


def parse_json(data: bytes, name: str) -> dict[str, Any]:
    """A JSON object without NaN, Infinity, repeated keys or deep nesting."""
    need(len(data) <= MAX_JSON, f"{name} is larger than {MAX_JSON:,} bytes")
    depth = 0
    for byte in data.translate(None, _NO_BRACKETS):
        depth += 1 if byte in b"[{" else -1
        need(depth <= MAX_DEPTH, f"{name} is nested more than {MAX_DEPTH} deep")

    def constant(text: str) -> None:
        raise Malformed(f"{name} holds {text[:40]}, expected finite numbers")

    def whole(text: str) -> int:
        need(len(text) <= 20, f"{name} holds a number of {len(text)} digits")
        return int(text)

    def number(text: str) -> float:
        value = float(text)
        return value if math.isfinite(value) else constant(text)  # type: ignore[return-value]

    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        need(len(dict(items)) == len(items), f"{name} repeats a key")
        return dict(items)

    try:
        parsed = json.loads(
            data.decode(), object_pairs_hook=pairs, parse_constant=constant, parse_int=whole, parse_float=number
        )
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise Malformed(f"{name} is not JSON: {type(error).__name__}") from None
    need(isinstance(parsed, dict), f"{name} is not an object")
    return parsed  # type: ignore[no-any-return]


def parse_tensors(data: bytes) -> dict[str, Tensor]:
    """The tensors of a safetensors file whose parts lie one after the other, without gaps, overlaps or anything behind."""
    need(len(data) >= 8, f"{TENSORS} is cut off")
    size = int.from_bytes(data[:8], "little")
    need(2 <= size <= MAX_HEADER and 8 + size <= len(data), f"{TENSORS} has a header of {size:,} bytes")
    header, body, found, spans = parse_json(data[8 : 8 + size], TENSORS), data[8 + size :], {}, []
    header.pop("__metadata__", None)
    for name, entry in header.items():
        need(isinstance(entry, dict) and set(entry) == {"dtype", "shape", "data_offsets"}, f"{TENSORS}: {name[:60]}")
        dtype, code, width = _DTYPES.get(str(entry["dtype"]), ("", "", 0))
        need(dtype, f"{TENSORS}: {name[:60]} is {str(entry['dtype'])[:20]}, expected F64 or F32")
        shape = _counts(entry["shape"], f"{TENSORS}: shape of {name[:60]}")
        offsets = entry["data_offsets"]
        ok = isinstance(offsets, list) and len(offsets) == 2 and all(type(k) is int for k in offsets)
        need(ok and 0 <= offsets[0] <= offsets[1] <= len(body), f"{TENSORS}: offsets of {name[:60]}")
        need(offsets[1] - offsets[0] == width * math.prod(shape), f"{TENSORS}: size of {name[:60]}")
        numbers: array[float] = array(code)
        numbers.frombytes(body[offsets[0] : offsets[1]])
        if sys.byteorder == "big":
            numbers.byteswap()
        need(all(map(math.isfinite, numbers)), f"{TENSORS}: {name[:60]} holds NaN or infinity")
        found[name] = Tensor(dtype, shape, numbers, body[offsets[0] : offsets[1]])
        spans.append(tuple(offsets))
    ends = [0, *(b for _, b in sorted(spans))]
    need(
        [a for a, _ in sorted(spans)] == ends[:-1] and ends[-1] == len(body), f"{TENSORS}: parts overlap or leave gaps"
    )
    return found


def _counts(value: Any, what: str, least: int = 0) -> tuple[int, ...]:
    need(isinstance(value, list) and len(value) <= 8, what)
    need(all(type(k) is int and least <= k <= 1 << 40 for k in value), what)
    return tuple(value)


def read_hex(value: Any, what: str) -> float:
    """A finite number from the only hexadecimal text that stands for it."""
    try:
        number = float.fromhex(value) if isinstance(value, str) and len(value) < 40 else math.nan
    except (ValueError, OverflowError):
        number = math.nan
    need(math.isfinite(number) and number.hex() == value, f"{what} is {str(value)[:40]!r}, expected a finite hex float")
    return number


def read_folder(folder: Path) -> Stored:
    """All that is stored, every hash, shape and cross reference checked; `Malformed` says what does not fit."""
    try:
        return _read_folder(folder)
    except (KeyError, TypeError, AttributeError, IndexError, ValueError, MemoryError, RecursionError) as error:
        raise Malformed(f"{folder} does not hold a head: {type(error).__name__}: {str(error)[:120]}") from None


def _read_folder(folder: Path) -> Stored:
    need(folder.is_dir(), f"{folder} is not a folder")
    described = parse_json(_read(folder / DESCRIPTION, MAX_JSON), DESCRIPTION)
    need(described.get("format") == "partita-head" and described.get("version") == 1, f"{DESCRIPTION}: format, version")
    seal = described.pop("seal", None)
    canonical = json.dumps(described, sort_keys=True, ensure_ascii=False, separators=(",", ":"))
    need(seal == hashlib.sha256(canonical.encode()).hexdigest(), f"{DESCRIPTION} does not match its seal")
    raw = {name: _read(folder / name, most) for name, most in ((TENSORS, MAX_TENSORS), (CERTIFICATE, MAX_JSON))}
    for name, data in raw.items():
        need(hashlib.sha256(data).hexdigest() == described["sha256"][name], f"{name} does not match its hash")
    certificate, tensors = parse_json(raw[CERTIFICATE], CERTIFICATE), parse_tensors(raw[TENSORS])
    own = {name.removeprefix("head."): t for name, t in tensors.items() if name.startswith("head.")}
    digest = hashlib.sha256()
    for name in sorted(own):
        digest.update(f"{name}|torch.{own[name].dtype}|{own[name].shape}|".encode() + own[name].raw)
    need(digest.hexdigest() == certificate["model"]["sha256"], "the certificate is about other tensors")
    lo, hi, points, fill, shapes = _domain(described["domains"], certificate["domain"]["arguments"], tensors)
    extra = {"domain.0.points"} if points is not None else set()
    need(len(own) + len(extra) == len(tensors) and extra <= set(tensors), f"{TENSORS} holds unknown tensors")
    need([list(s) for s in shapes] == described["head"]["input_shapes"], "the head's inputs are not the domain's")
    outputs = _counts(described["head"]["output_shape"], "output_shape", 1)
    head = _head(described["head"], own, len(lo), math.prod(outputs))
    graph = _function(described["target"], certificate["function"], len(lo), outputs)
    claim = _claim(certificate, len(lo))
    need(claim.semantics in (head.dtype, "real"), f"semantics {claim.semantics} of a {head.dtype} head")
    need(graph is not None or claim.kind != "proved", "nothing can be proved of a function that is not given")
    sizes = [math.prod(s) for s in shapes]
    names = [f"x{i}" for i in range(len(lo))]
    if len(sizes) == 2:
        names = [f"k{i}" for i in range(sizes[0])] + [f"q{i}" for i in range(sizes[1])]
    return Stored(head, claim, graph, tuple(names), lo, hi, points, fill)


def _domain(described: Any, certified: Any, tensors: dict[str, Tensor]) -> tuple[Any, ...]:
    """Both files must speak of the same domain: ends (or points), fill distance, shapes of the arguments."""
    need(isinstance(described, list) and len(described) == len(certified) and len(described) in (1, 2), "domains")
    if described[0]["type"] == "point_cloud":
        points, fill = tensors["domain.0.points"], read_hex(described[0]["fill_distance"], "fill_distance")
        shape = points.shape[1:]
        m = math.prod(shape)
        need(len(described) == 1 and points.dtype == "float64" and points.shape[0] and 0 < m <= MAX_DIMENSION, "points")
        said = certified[0]
        same = (said["type"], said["shape"], said["points"]) == ("point_cloud", list(shape), points.shape[0])
        need(
            same and read_hex(said["fill_distance"], "fill_distance") == fill >= 0,
            "the two files disagree on the domain",
        )
        flat = points.numbers.tolist()
        rows = tuple(tuple(flat[k : k + m]) for k in range(0, len(flat), m))
        ends = [(min(c), max(c)) for c in zip(*rows)]
        return tuple(a for a, _ in ends), tuple(b for _, b in ends), rows, fill, [shape]
    lo, hi, shapes = [], [], []
    for ours, theirs in zip(described, certified):
        need(ours["type"] == theirs["type"] == "box" and ours["shape"] == theirs["shape"], "domain: expected boxes")
        need(ours["lo"] == theirs["lo"] and ours["hi"] == theirs["hi"], "the two files disagree on the domain")
        shapes.append(_counts(ours["shape"], "shape of the domain", 1))
        need(len(ours["lo"]) == len(ours["hi"]) == math.prod(shapes[-1]) and len(shapes[-1]) in (1, 2), "domain")
        lo += [read_hex(x, "lo") for x in ours["lo"]]
        hi += [read_hex(x, "hi") for x in ours["hi"]]
    need(0 < len(lo) <= MAX_DIMENSION and all(a < b for a, b in zip(lo, hi)), "domain: expected lo < hi")
    return tuple(lo), tuple(hi), None, 0.0, shapes


def _head(described: Any, own: dict[str, Tensor], m: int, outputs: int) -> Head:
    kind = described["type"]
    need(kind in ("grid", "scattered", "train"), f"head of type {str(kind)[:40]!r}")
    dtype = own["inverse_temperature"].dtype
    need(described["dtype"] == dtype and {t.dtype for t in own.values()} == {dtype}, "the tensors differ in dtype")
    rates = tuple(own["inverse_temperature"].numbers)
    need(own["inverse_temperature"].shape == ((m,) if kind != "scattered" else ()), "inverse_temperature")
    need(all(r > 0 for r in rates), "inverse temperatures must be positive")
    axes: tuple[tuple[float, ...], ...] = ()
    centers: tuple[tuple[float, ...], ...] = ()
    if kind == "scattered":
        known, rates = {"centers", "inverse_temperature", "values", "powers", "value_slopes"}, rates * m
        flat, shape = own["centers"].numbers.tolist(), own["centers"].shape
        need(len(shape) == 2 and shape[1] == m and shape[0] >= 1, "centers")
        centers = tuple(tuple(flat[k : k + m]) for k in range(0, len(flat), m))
        cells = shape[0]
    else:
        axes = tuple(tuple(own[f"centers_{i}"].numbers) for i in range(m))
        known = {f"centers_{i}" for i in range(m)} | {"inverse_temperature"}
        known |= {f"core_{i}" for i in range(m)} if kind == "train" else {"values", "value_slopes", "origin"}
        need(all(own[f"centers_{i}"].shape == (len(a),) and a for i, a in enumerate(axes)), "centers")
        need(all(x < y for a in axes for x, y in pairwise(a)), "the centers of an axis must increase")
        cells = math.prod(map(len, axes))
    need(set(own) <= known, f"{TENSORS} holds unknown tensors")
    if kind == "train":
        return Head(kind, dtype, axes, centers, rates, ((0.0,),) * outputs, None, None, None, ())
    need(own["values"].shape == (cells, outputs), "values")
    flat = own["values"].numbers.tolist()
    values = tuple(tuple(flat[o::outputs]) for o in range(outputs))
    for name, shape in (("value_slopes", (cells, outputs, m)), ("origin", (m,)), ("powers", (cells,))):
        need(name not in own or own[name].shape == shape, name)
    need(kind == "scattered" or ("origin" in own) == ("value_slopes" in own), "slopes and origin belong together")
    part = {name: tuple(own[name].numbers) if name in own else None for name in ("origin", "powers")}
    slopes = own["value_slopes"].numbers if "value_slopes" in own else None
    windows = _counts(described["half_windows"], "half_windows", 1) if kind == "grid" else ()
    need(kind != "grid" or len(windows) == m, "half_windows")
    return Head(kind, dtype, axes, centers, rates, values, slopes, part["origin"], part["powers"], windows)


def _function(described: Any, certified: Any, m: int, outputs: tuple[int, ...]) -> Graph | None:
    if described["graph"] is None:
        need(certified["type"] == "black box", "the certificate speaks of another function")
        return None
    need(
        certified["type"] == "graph" and certified["graph"] == described["graph"], "the certificate's graph is another"
    )
    text = json.dumps(described["graph"], sort_keys=True, separators=(",", ":"))
    need(certified["sha256"] == hashlib.sha256(text.encode()).hexdigest(), "the graph does not match its hash")
    graph = read_graph(described["graph"])
    need(graph.inputs == m and graph.shape == outputs, "the graph's inputs or outputs are not the head's")
    return graph


def _claim(c: dict[str, Any], m: int) -> Claim:
    need(c["schema"] == 1 and c["kind"] in ("proved", "proved_given", "estimated"), "kind or schema of the certificate")
    need(c["semantics"] in ("real", "float64", "float32"), "semantics of the certificate")
    norm = math.inf if c["norm"] == "inf" else float(c["norm"]) if isinstance(c["norm"], str) else math.nan
    need(norm >= 1, f"norm {str(c['norm'])[:20]!r}")
    bound = None if c["error_bound"] is None else read_hex(c["error_bound"], "error_bound")
    need((bound is None) == (c["kind"] == "estimated") and (bound is None or bound >= 0), "error_bound")
    seen = None if c["error_estimate"] is None else read_hex(c["error_estimate"], "error_estimate")
    need((seen is not None) == (c["kind"] == "estimated"), "error_estimate")
    need(isinstance(c["known"], dict) and isinstance(c["assumptions"], list), "known, assumptions")
    listed = tuple((str(a["statement"]), str(a["vouched_by"])) for a in c["assumptions"])
    point = None
    if c["witness"] is not None:
        point = tuple(read_hex(x, "witness") for x in c["witness"]["point"])
        need(len(point) == m, "witness")
    return Claim(c["kind"], norm, c["semantics"], bound, seen, c["known"], listed, point)
