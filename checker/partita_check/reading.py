"""Reads the three files of a saved head. Nothing in them is trusted: every size, hash, shape and cross reference is checked."""

from __future__ import annotations

import hashlib
import json
import math
import mmap
import os
import stat
import struct
import sys
from array import array
from collections.abc import Sequence
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, NamedTuple

from partita_check.clock import clock
from partita_check.graph import Graph, Malformed, need, read_graph, read_hex
from partita_check.regions import Region, read_region
from partita_check.wiring import Wiring, read_wiring

__all__ = [
    "CERTIFICATE",
    "FILES",
    "Claim",
    "Head",
    "Stored",
    "StoredNetwork",
    "Tensor",
    "digest_of",
    "hashes_of",
    "nearby",
    "parse_json",
    "parse_tensors",
    "read_claim",
    "read_file",
    "read_folder",
    "read_sealed",
    "sha256_of",
    "stamps_of",
]

TENSORS, DESCRIPTION, CERTIFICATE = "head.safetensors", "head.json", "certificate.json"
FILES = (DESCRIPTION, TENSORS, CERTIFICATE)
MAX_JSON, MAX_HEADER, MAX_DEPTH, MAX_DIMENSION = 32 << 20, 1 << 20, 64, 64
READ_UP_TO = 64 << 20  # bytes of tensors; larger files are mapped
AT_ONCE = 1 << 20  # bytes or numbers between two looks at the clock
MAX_INPUTS, MAX_HEADS = 1024, 4096  # of a network
MAX_SHARDS = 4096  # whose bounds a certificate lists
_NO_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))
_DTYPES = {
    "F64": ("float64", "d", 8),
    "F32": ("float32", "f", 4),
    "BF16": ("bfloat16", "", 2),
    "F16": ("float16", "", 2),
}
_HALVES = ("bfloat16", "float16")

KINDS = ("proved", "proved_given", "estimated")
SCHEMAS = (1, 2)  # of certificates; 2 adds words to terms and assumptions, which are not used here


class Tensor(NamedTuple):
    dtype: str
    shape: tuple[int, ...]
    numbers: Sequence[float]
    raw: bytes | memoryview


class Head(NamedTuple):
    """`net(z) = Σ_j w_j(z) V_j(z)`, `w = softmax_j(−Σ_i R_i((z_i − c_ji)² − p_j)/2)`.

    kind: grid (centers are the product of `axes`), scattered (rows of `centers`) or train. values: one sequence per output,
    row-major over the cells. slopes: J, flat (cells, outputs, m), or None; they multiply z − origin on grids and z − c_j
    elsewhere. windows: q_i, an evaluator of a grid looks at the 2q_i centers around z_i only.
    """

    kind: str
    dtype: str
    keys: int
    axes: tuple[Sequence[float], ...]
    centers: tuple[tuple[float, ...], ...]
    rates: tuple[float, ...]
    values: tuple[Sequence[float], ...]
    slopes: Sequence[float] | None
    origin: Sequence[float] | None
    powers: Sequence[float] | None
    windows: tuple[int, ...]


class Claim(NamedTuple):
    """What the certificate says. norm: math.inf or p. assumptions: pairs (statement, who vouches). witness: a point.

    proof: how the producer proved it. Nothing in it is trusted; it may say where to look.
    """

    kind: str
    norm: float
    semantics: str
    bound: float | None
    estimate: float | None
    known: dict[str, Any]
    assumptions: tuple[tuple[str, str], ...]
    witness: tuple[float, ...] | None
    proof: dict[str, Any]
    is_about_table: bool = False


class Stored(NamedTuple):
    """graph: None for a black box. [lo, hi]: the domain, or a box around its `points`, all within `fill` of one of them,
    or around its `region`."""

    head: Head
    claim: Claim
    graph: Graph | None
    names: tuple[str, ...]
    lo: tuple[float, ...]
    hi: tuple[float, ...]
    points: tuple[tuple[float, ...], ...] | None
    fill: float
    region: Region | None = None

    @property
    def function(self) -> Graph:
        """f, where it has to be known."""
        if self.graph is None:
            raise TypeError("a black box has no graph")
        return self.graph


class StoredNetwork(NamedTuple):
    """A network of heads. parts: every head with its function, box and claim; none where the network's claim is an estimate.

    graph: None if the function is by definition the wiring, with its exact coefficients and the parts' functions for heads,
    or if it is a black box.
    """

    heads: tuple[Head, ...]
    wiring: Wiring
    parts: tuple[Stored, ...]
    dtype: str
    claim: Claim
    graph: Graph | None
    label: str
    names: tuple[str, ...]
    lo: tuple[float, ...]
    hi: tuple[float, ...]
    region: Region | None


def read_file(path: Path, most: int, *, map_larger: bool = False) -> bytes | memoryview:
    """The bytes of a regular file. Pipes and devices are refused, before and after opening.

    Files of more than `most` bytes are refused, or mapped into memory. A mapped file must not be changed during the check.
    """

    def regular(found: os.stat_result) -> None:
        need(stat.S_ISREG(found.st_mode), f"{path.name} is not a regular file")
        need(
            map_larger or found.st_size <= most,
            f"{path.name} has {found.st_size:,} bytes, expected at most {most:,}",
        )

    def without_waiting(name: str, flags: int) -> int:
        return os.open(name, flags | getattr(os, "O_NONBLOCK", 0))

    try:
        regular(path.stat())
        with open(path, "rb", opener=without_waiting) as file:
            found = os.fstat(file.fileno())
            regular(found)  # it may have been replaced since
            large = found.st_size > most
            data = (
                memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
                if large
                else file.read(found.st_size + 1)
            )
    except FileNotFoundError:
        raise Malformed(f"{path.name} is missing") from None
    except OSError as error:
        raise Malformed(f"{path.name} cannot be read: {error.strerror}") from None
    need(len(data) == found.st_size, f"{path.name} changed while it was read")
    clock.tick()
    return data


def parse_json(data: bytes, name: str) -> dict[str, Any]:
    """A JSON object without NaN, Infinity, repeated keys, numbers beyond binary64, or deep nesting."""
    depths = accumulate(1 if byte in b"[{" else -1 for byte in data.translate(None, _NO_BRACKETS))
    need(max(depths, default=0) <= MAX_DEPTH, f"{name} is nested more than {MAX_DEPTH} deep")

    def number(text: str) -> float:
        value = float(text)
        need(math.isfinite(value), f"{name} holds {text[:40]}, expected finite numbers")
        return value

    def whole(text: str) -> int:
        need(len(text) <= 20, f"{name} holds a number of {len(text)} digits")
        return int(text)

    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        need(len(dict(items)) == len(items), f"{name} repeats a key")
        return dict(items)

    try:
        parsed: Any = json.loads(
            data.decode(), object_pairs_hook=pairs, parse_constant=number, parse_int=whole, parse_float=number
        )
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise Malformed(f"{name} is not JSON: {type(error).__name__}") from None
    if not isinstance(parsed, dict):
        raise Malformed(f"{name} is not an object")
    clock.tick()
    return parsed


def hash_of(data: bytes | memoryview, digest: Any = None) -> Any:
    """The sha256 of bytes, or of what `digest` has taken and these, while there is time."""
    digest = digest or hashlib.sha256()
    for start in range(0, len(data), AT_ONCE):
        digest.update(data[start : start + AT_ONCE])
        clock.tick()
    return digest


def parse_tensors(data: bytes | memoryview, file: str = TENSORS) -> dict[str, Tensor]:
    """The tensors of a safetensors file whose parts lie one after the other, without gaps, overlaps or anything behind."""
    size = int.from_bytes(data[:8], "little")
    need(len(data) >= 8 and 2 <= size <= MAX_HEADER and 8 + size <= len(data), f"{file} or its header is cut off")
    header, body = parse_json(bytes(data[8 : 8 + size]), file), memoryview(data)[8 + size :]
    found, spans = dict[str, Tensor](), list[tuple[int, int]]()
    header.pop("__metadata__", None)
    for name, entry in header.items():
        what = f"{file}: {name[:60]}"
        need(isinstance(entry, dict) and set(entry) == {"dtype", "shape", "data_offsets"}, f"{what}: wrong keys")
        need(str(entry["dtype"]) in _DTYPES, f"{what}: expected {', '.join(_DTYPES)}")
        dtype, code, width = _DTYPES[entry["dtype"]]
        shape, (start, end) = _counts(entry["shape"], what), _counts(entry["data_offsets"], what)
        need(start <= end <= len(body) and end - start == width * math.prod(shape), f"{what}: the offsets do not fit")
        numbers = _numbers(body[start:end], dtype, code)
        for k in range(0, len(numbers), AT_ONCE):
            need(all(map(math.isfinite, numbers[k : k + AT_ONCE])), f"{what} contains NaN or infinity")
            clock.tick()
        found[name] = Tensor(dtype, shape, numbers, body[start:end])
        spans.append((start, end))
    joints = [(0, 0), *sorted(spans), (len(body), len(body))]
    need(all(a[1] == b[0] for a, b in pairwise(joints)), f"{file} has gaps or overlaps")
    return found


def nearby(x: float, dtype: str) -> float:
    """A number of a half type next to x; x itself for other dtypes."""
    if dtype not in _HALVES or abs(x) > (65000 if dtype == "float16" else 3e38):
        return x
    half, code = (struct.pack("<e", x), "e") if dtype == "float16" else (bytes(2) + struct.pack("<f", x)[2:], "f")
    return float(struct.unpack(f"<{code}", half)[0])


def _numbers(data: memoryview, dtype: str, code: str) -> Sequence[float]:
    """The numbers in these bytes: of the full types where they lie, without a copy."""
    if dtype == "float16":
        return array("d", struct.unpack(f"<{len(data) // 2}e", data))
    if dtype == "bfloat16":  # the first two bytes of a float32 number
        spread = bytearray(2 * len(data))
        spread[2::4], spread[3::4] = data[::2], data[1::2]
        data, code = memoryview(spread), "f"
    if sys.byteorder == "little":
        return data.cast(code)  # type: ignore[call-overload, no-any-return]
    numbers: array[float] = array(code)
    numbers.frombytes(data)
    numbers.byteswap()
    return numbers


def _counts(value: Any, what: str, least: int = 0) -> tuple[int, ...]:
    need(isinstance(value, list) and len(value) <= MAX_DIMENSION, f"{what}: expected a short list")
    need(all(type(k) is int and least <= k <= 1 << 40 for k in value), f"{what}: expected whole numbers ≥ {least}")
    return tuple(value)


def read_folder(folder: Path) -> Stored | StoredNetwork:
    """All that is stored, every hash, shape and cross reference checked; `Malformed` says what does not fit."""
    try:
        return _read_folder(folder)
    except (LookupError, TypeError, AttributeError, ValueError, OverflowError, MemoryError, RecursionError) as error:
        raise Malformed(f"{folder} does not contain a valid head: {type(error).__name__}: {error}") from None


def sha256_of(data: Any) -> str:
    """The hash of canonical JSON."""
    text = json.dumps(data, sort_keys=True, ensure_ascii=False, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def digest_of(tensors: dict[str, Tensor]) -> str:
    """The hash of named tensors that certificates hold."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        digest.update(f"{name}|torch.{tensors[name].dtype}|{tensors[name].shape}|".encode())
        digest = hash_of(tensors[name].raw, digest)
    return str(digest.hexdigest())


def hashes_of(folder: Path, names: Sequence[str]) -> dict[str, str]:
    """The sha256 of the bytes of files that were read before."""
    return {name: hash_of(read_file(folder / name, READ_UP_TO, map_larger=True)).hexdigest() for name in names}


def stamps_of(folder: Path, names: Sequence[str]) -> list[tuple[int, ...] | None]:
    """What changes when files are replaced or written to; None for a file that is missing."""
    found: list[tuple[int, ...] | None] = []
    for name in names:
        try:
            about = os.stat(folder / name)
            found.append((about.st_dev, about.st_ino, about.st_size, about.st_mtime_ns, about.st_ctime_ns))
        except OSError:
            found.append(None)
    return found


def read_sealed(folder: Path, description: str, format: str, tensors: str) -> tuple[Any, Any, dict[str, Tensor]]:
    """The description, the certificate and the tensors of a folder, after the seal and the hashes were checked."""
    described = parse_json(bytes(read_file(folder / description, MAX_JSON)), description)
    need(described["format"] == format and described["version"] == 1, f"{description}: wrong format or version")
    need(described.pop("seal") == sha256_of(described), f"{description} does not match its seal")
    certificate = bytes(read_file(folder / CERTIFICATE, MAX_JSON))
    held = read_file(folder / tensors, READ_UP_TO, map_larger=True)
    if len(held) > READ_UP_TO:
        parse_tensors(held, tensors)  # a file of the wrong size is refused before gigabytes are hashed
    for name, data in ((CERTIFICATE, certificate), (tensors, held)):
        need(hash_of(data).hexdigest() == described["sha256"][name], f"{name} does not match its hash")
    return described, parse_json(certificate, CERTIFICATE), parse_tensors(held, tensors)


def _read_folder(folder: Path) -> Stored | StoredNetwork:
    described, certificate, tensors = read_sealed(folder, DESCRIPTION, "partita-head", TENSORS)
    cloud = tensors.pop("domain.0.points", None)
    need(all(name.startswith("head.") for name in tensors), f"{TENSORS} holds unknown tensors")
    own, record = {name.removeprefix("head."): t for name, t in tensors.items()}, described["head"]
    _same_model(certificate["model"], record, own)
    network = record["type"] == "network"
    most = MAX_INPUTS if network else MAX_DIMENSION
    lo, hi, points, fill, shapes, region = _domain(
        described["domains"], certificate["domain"]["arguments"], cloud, most
    )
    need(shapes == record["input_shapes"], "the head's inputs are not the domain's")
    outputs, claim = _counts(record["output_shape"], "output_shape", 1), read_claim(certificate, len(lo))
    parts = zip("kq" if len(shapes) == 2 else "x", map(math.prod, shapes))
    names = tuple(f"{letter}{i}" for letter, count in parts for i in range(count))
    need(claim.semantics in (record["dtype"], "real"), f"semantics is {claim.semantics}, the head is {record['dtype']}")
    if network:
        need(points is None, "a network needs a domain of boxes or a region")
        return _network(described, certificate, own, claim, names, lo, hi, region)
    head = _head(record, own, len(lo), math.prod(outputs))
    graph = _function(described["target"], certificate["function"], len(lo), outputs)
    need(graph is not None or claim.kind != "proved", "the claim is proved, but its function is not stored")
    return Stored(head, claim, graph, names, lo, hi, points, fill, region)


def _same_model(model: Any, record: Any, own: dict[str, Tensor]) -> None:
    """Whether a certificate is about these tensors."""
    need(digest_of(own) == model["sha256"], "the certificate is about other tensors")
    for name in ("type", "half_windows"):  # not every method writes them into its certificate
        same = name not in model or model[name] == record.get(name)
        need(same, f"the certificate's {name} is not the head's")


def _network(
    described: Any,
    certificate: Any,
    own: dict[str, Tensor],
    claim: Claim,
    names: tuple[str, ...],
    lo: tuple[float, ...],
    hi: tuple[float, ...],
    region: Region | None,
) -> StoredNetwork:
    """The heads, how they are wired, and what is claimed of each."""
    record, function = described["head"], certificate["function"]
    dtype, outputs = record["dtype"], _counts(record["output_shape"], "output_shape", 1)
    need(dtype in ("float64", "float32"), f"a network of dtype {dtype!r}")
    need(isinstance(record["heads"], list) and len(record["heads"]) <= MAX_HEADS, "heads: expected a list")
    sorted_own = dict[str, dict[str, Tensor]]()
    for name, tensor in own.items():
        need(tensor.dtype == dtype, f"{name[:60]} is {tensor.dtype}, the network {dtype}")
        owner, _, last = name.rpartition(".") if name.startswith("heads.") else ("", "", name)
        sorted_own.setdefault(owner, {})[last] = tensor
    maps, heads, parts, widths = sorted_own.pop("", {}), list[Head](), list[Stored](), list[int]()
    listed = claim.proof["parts"] if claim.bound is not None else []
    need(len(listed) == len(record["heads"]) or claim.bound is None, "the certificate does not list every head")
    for i, part in enumerate(record["heads"]):
        clock.tick()
        shapes, held = [_counts(x, f"head {i}", 1) for x in part["input_shapes"]], sorted_own.pop(f"heads.{i}", {})
        need(part["dtype"] == dtype and part["output_shape"] == [], f"head {i}: expected one output, {dtype}")
        need(part["type"] in ("grid", "scattered"), f"head {i}: unknown type {part['type']!r}")
        widths.append(sum(map(math.prod, shapes)))
        need(0 < widths[i] <= MAX_DIMENSION, f"head {i}: invalid inputs")
        heads.append(_head(part, held, widths[i], 1))
        if claim.bound is not None:
            _same_model(listed[i]["certificate"]["model"], part, held)
            parts.append(_part(f"part {i}", listed[i], heads[i], widths[i], claim))
    need(not sorted_own, f"{TENSORS} holds unknown tensors")
    wiring = read_wiring(record, maps, len(lo), widths, math.prod(outputs))
    wired = {name: value for name, value in record.items() if name != "heads"}
    need(certificate["model"]["wiring_sha256"] == sha256_of(wired), "the certificate is about another wiring")
    if function["type"] == "network":
        defined = {"wiring": wired, "parts": [part["graph"] for part in listed]}
        need(function["sha256"] == sha256_of(defined), "the certificate is about another function")
        need(described["target"]["graph"] is None and claim.bound is not None, "a network that is its own function")
        graph, label = None, str(function["text"])
    else:
        graph, label = _function(described["target"], function, len(lo), outputs), ""
        need(graph is not None or claim.kind == "estimated", "a bound, but the function is not stored")
    return StoredNetwork(tuple(heads), wiring, tuple(parts), dtype, claim, graph, label, names, lo, hi, region)


def _part(what: str, part: Any, head: Head, k: int, claim: Claim) -> Stored:
    """What the certificate of a network says of one head: a claim like that of any head, on its own box."""
    graph, certificate = read_graph(part["graph"]), part["certificate"]
    need(graph.inputs == k and graph.shape == (), f"{what}: its function has other inputs or outputs than its head")
    lo, hi = (tuple(read_hex(x, what) for x in part["box"][end]) for end in ("lo", "hi"))
    need(len(lo) == len(hi) == k and all(a < b for a, b in zip(lo, hi)), f"{what}: expected lo < hi on every axis")
    arguments, function = certificate["domain"]["arguments"], certificate["function"]
    said = [tuple(read_hex(x, what) for d in arguments for x in d[end]) for end in ("lo", "hi")]
    need(said == [lo, hi] and all(d["type"] == "box" for d in arguments), f"{what}: its claim is about another box")
    sealed = function["sha256"] == sha256_of(part["graph"])
    need(function["type"] == "graph" and function["graph"] == part["graph"] and sealed, f"{what}: another function")
    own = read_claim(certificate, k)
    need(own.kind == "proved" and math.isinf(own.norm), f"{what}: expected a proved bound in the sup norm")
    need(own.semantics == claim.semantics, f"{what}: its claim is about {own.semantics} arithmetic")
    return Stored(head, own, graph, tuple(f"x{j}" for j in range(k)), lo, hi, None, 0.0)


def _domain(described: Any, certified: Any, cloud: Tensor | None, most: int) -> tuple[Any, ...]:
    """Both files must describe the same domain: ends (or points), fill distance, shapes of the arguments."""
    need(len(described) == len(certified) and len(described) in (1, 2), "expected one or two domains")
    if cloud is not None:
        shape, fill = cloud.shape[1:], read_hex(described[0]["fill_distance"], "fill_distance")
        ours = {"type": "point_cloud", "shape": list(shape), "points": cloud.shape[0], "fill_distance": fill.hex()}
        ours["sha256"] = hashlib.sha256(cloud.raw).hexdigest()
        said = {k: certified[0][k] for k in ours}
        m, flat = math.prod(shape), list(cloud.numbers)
        alone = len(described) == 1 and described[0]["type"] == "point_cloud"
        need(ours == said and alone, "the two files describe different domains")
        need(fill >= 0 and flat and 0 < m <= most and cloud.dtype == "float64", "domain: invalid points")
        rows = tuple(tuple(flat[k : k + m]) for k in range(0, len(flat), m))
        return tuple(map(min, zip(*rows))), tuple(map(max, zip(*rows))), rows, fill, [list(shape)], None
    need(described == certified, "the two files describe different domains")
    if described[0]["type"] == "region":
        shape = _counts(described[0]["shape"], "domain", 1)
        need(len(described) == 1 and 0 < math.prod(shape) <= most, "domain: expected one region")
        region = read_region(described[0], math.prod(shape))
        return *map(tuple, zip(*region.ends)), None, 0.0, [list(shape)], region
    need(all(d["type"] == "box" for d in described), "expected boxes")
    lo, hi = (tuple(read_hex(x, end) for d in described for x in d[end]) for end in ("lo", "hi"))
    sizes = [math.prod(_counts(d["shape"], "domain", 1)) for d in described]
    need(sizes == [len(d["lo"]) for d in described] and len(lo) == len(hi), "domain: the shapes do not fit")
    need(0 < len(lo) <= most and all(a < b for a, b in zip(lo, hi)), "domain: expected lo < hi")
    return lo, hi, None, 0.0, [d["shape"] for d in described], None


def _head(described: Any, own: dict[str, Tensor], m: int, outputs: int) -> Head:
    kind, dtype, rates = described["type"], str(described["dtype"]), tuple(own["inverse_temperature"].numbers)
    need(kind in ("grid", "scattered", "train"), f"head: unknown type {kind!r}")
    full = "float32" if dtype in _HALVES else dtype  # values alone are of a half type
    held = {name: dtype if name.startswith(("value", "core_")) else full for name in own}
    need(full in ("float64", "float32"), f"head: unknown dtype {dtype!r}")
    need(all(own[name].dtype == held[name] for name in own), "the tensors differ in dtype")
    need(
        own["inverse_temperature"].shape == ((m,) if kind != "scattered" else ()), "wrong shape of inverse_temperature"
    )
    need(min(rates) > 0, "inverse_temperature is not positive")
    axes, centers, windows = tuple[Sequence[float], ...](), tuple[tuple[float, ...], ...](), tuple[int, ...]()
    if kind == "scattered":
        known, rates, flat = {"centers", "values", "powers", "value_slopes"}, rates * m, list(own["centers"].numbers)
        centers = tuple(tuple(flat[k : k + m]) for k in range(0, len(flat), m))
        need(own["centers"].shape == (len(centers), m) and centers, "centers has the wrong shape")
    else:
        axes, names = tuple(own[f"centers_{i}"].numbers for i in range(m)), [f"centers_{i}" for i in range(m)]
        known = {*names, *(("values", "value_slopes", "origin") if kind == "grid" else (f"core_{i}" for i in range(m)))}
        need(
            all(own[name].shape == (len(a),) and a for name, a in zip(names, axes)), "wrong shape of an axis of centers"
        )
        need(all(x < y for a in axes for x, y in pairwise(a)), "the centers of an axis must increase")
        windows = _counts(described["half_windows"], "half_windows", 1) if kind == "grid" else (1,) * m
        need(len(windows) == m, "half_windows has the wrong length")
    keys = math.prod(map(len, axes)) if axes else len(centers)
    need(set(own) <= known | {"inverse_temperature"}, f"{TENSORS} holds unknown tensors")
    if kind == "train":
        return Head(kind, dtype, keys, axes, centers, rates, ((0.0,),) * outputs, None, None, None, windows)
    shapes = {"values": (keys, outputs), "value_slopes": (keys, outputs, m), "origin": (m,), "powers": (keys,)}
    need("values" in own and all(own[k].shape == shapes[k] for k in shapes if k in own), "wrong shape of a tensor")
    need(kind == "scattered" or ("origin" in own) == ("value_slopes" in own), "slopes without origin, or vice versa")
    part = {name: own[name].numbers for name in shapes if name in own}
    values = tuple(own["values"].numbers[o::outputs] for o in range(outputs))
    rest = (part.get("value_slopes"), part.get("origin"), part.get("powers"), windows)
    return Head(kind, dtype, keys, axes, centers, rates, values, *rest)


def _function(described: Any, certified: Any, m: int, outputs: tuple[int, ...]) -> Graph | None:
    kind, graph = certified["type"], described["graph"]
    kinds = ("black box", "table") if graph is None else ("graph",)
    need(kind in kinds, "the certificate is about another function")
    said = certified["label" if graph is None else "text"]
    need(said == described["label"], f"the certificate calls the function {said!r}, the head {described['label']!r}")
    if graph is None:
        return None
    sealed = certified["sha256"] == sha256_of(graph)
    need(certified["graph"] == graph and sealed, "the certificate has another graph, or its hash does not match")
    read = read_graph(graph)
    need(read.inputs == m and read.shape == outputs, "the graph's inputs or outputs are not the head's")
    return read


def read_claim(c: dict[str, Any], m: int) -> Claim:
    """What a certificate says of a function of m variables."""
    need(c["schema"] in SCHEMAS and c["kind"] in KINDS, "certificate: unknown kind or schema")
    need(c["semantics"] in ("real", "float64", "float32", *_HALVES), "unknown semantics")
    need(isinstance(c["norm"], str), "unknown norm")
    norm, estimated = float(c["norm"]), c["kind"] == "estimated"
    bound, seen = (None if c[k] is None else read_hex(c[k], k) for k in ("error_bound", "error_estimate"))
    need((bound is None) == estimated == (seen is not None), "certificate: kind, bound and estimate do not fit")
    need(norm >= 1 and (bound is None or bound >= 0), "certificate: the norm is below 1, or error_bound is negative")
    need(isinstance(c["known"], dict), "known is not an object")
    need(all(isinstance(x, dict) for name in ("terms", "assumptions") for x in c[name]), "invalid terms or assumptions")
    listed = tuple((str(a["statement"]), str(a["vouched_by"])) for a in c["assumptions"])
    point = None if c["witness"] is None else tuple(read_hex(x, "witness") for x in c["witness"]["point"])
    need(point is None or len(point) == m, "the witness has the wrong dimension")
    proof = c["proof"] if isinstance(c.get("proof"), dict) else {}
    if "shards" in proof:
        _same_maximum(proof["shards"], c["terms"])
    table = c["function"].get("type") == "table"
    need(estimated or not table, "a bound, but the function is a table of samples")
    return Claim(c["kind"], norm, c["semantics"], bound, seen, c["known"], listed, point, proof, table)


def _same_maximum(listed: Any, terms: Sequence[dict[str, Any]]) -> None:
    """Of a long proof a certificate lists the bounds of its shards: the largest must be the term that they prove."""
    need(isinstance(listed, list) and 0 < len(listed) <= MAX_SHARDS, "proof: shards: expected a list of bounds")
    bounds = [read_hex(x, "a bound of a shard") for x in listed]
    proved = [read_hex(t["value"], "the value of a term") for t in terms if t.get("name") == "approximation"]
    need(min(bounds) >= 0 and len(proved) == 1, "proof: shards: expected bounds ≥ 0 of one term, approximation")
    differ = f"the largest bound of a shard is {max(bounds):.17g}, but the term approximation is {proved[0]:.17g}"
    need(max(bounds) == proved[0], differ)
