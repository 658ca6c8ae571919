"""What a worker process does: parse, sample, bound, compile, check and export. `jobs.py` starts it and gives it work.

Requests arrive as frames on standard input and answers leave on standard output. Text becomes a function through the parser
alone; the only paths are those that the server gives.
"""

from __future__ import annotations

import json
import math
import os
import queue
import signal
import struct
import subprocess
import sys
import threading
import time
import traceback
import warnings
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch

from partita.compiler.chosen_head import head as chosen_head
from partita.compiler.compile import compile as compiled_head
from partita.compiler.compiled import Compiled, load
from partita.compiler.request_options import method_names
from partita.errors import (
    ExpressionLimitError,
    MissingExtraError,
    PartitaError,
    ToleranceMissedWarning,
    UnsupportedError,
)
from partita.functions.graph import Graph
from partita.functions.target import Target, make_target
from partita.geometry.domains import Array, Box
from partita.kernels.key_tree import KeyTree
from partita.studio.jobs import MOST_DOMAIN, MOST_GRID, MOST_NODES, MOST_POINTS, MOST_TEXT
from partita.studio.wire import (
    RequestError,
    certificate_values,
    choice,
    compiled_values,
    drawn_keys,
    error_values,
    function_values,
    number,
    rows,
    text,
)

__all__ = ["WORK", "main"]

Values = dict[str, Any]
Told = Callable[[str, int, int], None]

_MOST_BYTES = 64 << 20  # of a head
_DTYPES = ("float64", "float32", "bfloat16", "float16")
_OUTCOMES = {0: "verified", 1: "refuted", 2: "unknown", 3: "malformed"}
_BETWEEN = 0.05  # seconds between two reports of progress


class Cancelled(BaseException):
    """The client wants no answer any more. Not an `Exception`: nothing on the way may catch it."""


class GoneError(PartitaError):
    """A head that was forgotten while the request for it waited."""


class Problem(Exception):
    """An error of the library with the field of the request that it is about."""

    def __init__(self, error: PartitaError, where: str) -> None:
        super().__init__(str(error))
        self.error, self.where = error, where


@contextmanager
def _about(where: str) -> Iterator[None]:
    try:
        yield
    except PartitaError as error:
        raise Problem(error, where) from error


@lru_cache(maxsize=64)
def _target(function: str, domain: str) -> Target:
    with _about("domain"):
        box = Box.of(domain)
    with _about("function"):
        target = make_target(function, box)
        if target.graph is not None and len(target.graph.nodes) > MOST_NODES:
            raise ExpressionLimitError(
                f"expression: found {len(target.graph.nodes):,} operations, expected at most {MOST_NODES:,} in the studio",
                "Compile it in Python, where 10,000 are allowed.",
            )
        return target


def _asked_target(asked: Mapping[str, Any]) -> Target:
    return _target(text(asked, "text", MOST_TEXT), text(asked, "domain", MOST_DOMAIN))


@lru_cache(maxsize=4)
def _loaded(folder: str) -> Compiled:
    return load(folder)


def _folder(given: Mapping[str, Any]) -> Path:
    folder = Path(given["folder"])
    if not folder.is_dir():
        raise GoneError("this head is no longer kept", "Compile it again.")
    return folder


def _stored(given: Mapping[str, Any]) -> Compiled:
    return _loaded(str(_folder(given)))


def _output(asked: Mapping[str, Any], target: Target) -> int:
    return int(number(asked, "output", 0, target.num_outputs - 1, 0, whole=True))


def function(asked: Values, given: Values, told: Told) -> Values:
    """The function that a text means."""
    return function_values(_asked_target(asked))


def sample(asked: Values, given: Values, told: Told) -> Values:
    """Values of f, or of a stored head, at points or at the pixel centers of a grid; null where f has no value."""
    compiled = _stored(given) if given.get("folder") else None
    target = _asked_target(asked) if compiled is None else compiled.target
    points, output = _points(asked, target.box), _output(asked, target)
    if compiled is not None:
        with torch.no_grad():
            values = compiled.head.evaluate(torch.from_numpy(points).to(compiled.head.dtype)).double().numpy()
    elif target.graph is not None:
        values = target.graph.evaluate(points).reshape(len(points), -1)
    else:  # an expression always has a graph
        raise UnsupportedError("the function is a black box; expected an expression.")
    column = values[:, output]
    return {"values": [v if ok else None for v, ok in zip(column.tolist(), np.isfinite(column).tolist())]}


def _points(asked: Values, box: Box) -> Array:
    m, grid = box.dimension, asked.get("grid")
    if grid is None:
        return rows(asked.get("points"), "points", MOST_POINTS, m)
    counts = rows(grid, "grid", 2, None)
    axes = rows(asked["axes"], "axes", 2, None) if asked.get("axes") is not None else np.arange(len(counts))
    if (counts != np.floor(counts)).any() or (counts < 1).any() or counts.prod() > MOST_GRID:
        raise RequestError.of(
            "grid", str(grid), f"one or two whole numbers ≥ 1 with a product of at most {MOST_GRID:,}"
        )
    if len(axes) != len(counts) or len(set(axes.tolist())) != len(axes) or not set(axes.tolist()) <= set(range(m)):
        raise RequestError.of("axes", str(asked.get("axes")), f"{len(counts)} different axes, from 0 to {m - 1}")
    lo, hi = box.lo.ravel(), box.hi.ravel()
    at = (lo + hi) / 2 if asked.get("at") is None else rows(asked["at"], "at", m, None)
    if len(at) != m:
        raise RequestError.of("at", f"a list of {len(at)}", f"{m} numbers")
    lines = [lo[i] + (hi[i] - lo[i]) * (np.arange(n) + 0.5) / n for i, n in zip(axes.astype(int), counts.astype(int))]
    points = np.tile(at, (int(counts.prod()), 1))
    for i, line in zip(axes.astype(int), np.meshgrid(*lines, indexing="ij")):
        points[:, i] = line.ravel()
    return points


def bound(asked: Values, given: Values, told: Told) -> Values:
    """The proved bound of a head that was drawn by hand, with its terms."""
    target = _asked_target(asked)
    keys = drawn_keys(asked.get("head"), target.box.dimension)
    start = time.monotonic()
    compiled = chosen_head(
        _one_output(target, _output(asked, target)),
        target.box,
        centers=keys.centers,
        powers=keys.powers,
        values=keys.values,
        slopes=keys.slopes,
        inverse_temperature=keys.rate,
        budget=given["seconds"],
        progress=told,
    )
    complete = compiled.certificate.facts.get("complete", 1.0) > 0
    return {**certificate_values(compiled), "seconds": time.monotonic() - start, "complete": complete}


def _one_output(target: Target, output: int) -> Any:
    """The text of a scalar function; the graph of one output of a vector."""
    graph = target.graph
    if graph is None or target.num_outputs == 1:
        return target.label
    return Graph(graph.num_inputs, graph.nodes, (graph.outputs[output],), ())


def compile_head(asked: Values, given: Values, told: Told) -> Values:
    """A head for a tolerance, saved in the folder that the server gives."""
    target = _asked_target(asked)
    norm = "inf" if asked.get("norm") is None else asked["norm"]
    start = time.monotonic()
    with _about("tolerance"):
        tolerance = number(asked, "tolerance", 0.0, math.inf)
    compiled = compiled_head(
        target.label,
        target.box,
        tolerance=tolerance,
        method=choice(asked, "method", method_names(), "auto"),
        dtype=getattr(torch, choice(asked, "dtype", _DTYPES, "float64")),
        norm=norm if norm == "inf" else number(asked, "norm", 1.0, 1e6),
        budget=given["seconds"],
        max_bytes=_MOST_BYTES,
        progress=told,
    )
    compiled.save(given["place"])
    spent = time.monotonic() - start
    return {"head_id": given["head_id"], **compiled_values(compiled, tolerance), "seconds": spent}


def check(asked: Values, given: Values, told: Told) -> Values:
    """The verdict of partita-check, a program of its own, on the saved head."""
    if find_spec("partita_check") is None:
        raise MissingExtraError(
            "the checker partita-check is not installed",
            "Install the folder `checker` of partita's repository with pip.",
        )
    told("checking in ball arithmetic", 0, 0)
    place = _folder(given)
    command = [sys.executable, "-m", "partita_check", place.name, "--budget", f"{given['seconds']:g}"]
    answer = subprocess.run(command, cwd=place.parent, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    if answer.returncode not in _OUTCOMES:
        raise UnsupportedError(f"partita-check stopped with status {answer.returncode}: {answer.stderr.strip()[-400:]}")
    return {"verdict": _OUTCOMES[answer.returncode], "text": answer.stdout.rstrip()}


def export(asked: Values, given: Values, told: Told) -> Values:
    """A file for download: the saved folder as a zip file, ONNX, or a picture."""
    what, folder, place = given["what"], _folder(given), Path(given["place"])
    told(f"writing {what}", 0, 0)
    if what == "head":
        with zipfile.ZipFile(place, "w", zipfile.ZIP_DEFLATED) as archive:
            for path in sorted(folder.iterdir()):
                archive.write(path, f"head/{path.name}")
    elif what == "onnx":
        _stored(given).export_onnx(place)
    else:
        from partita.plots.head_plots import plot_head

        plot_head(_stored(given), place)
    return {"download": given["download"], "name": given["name"], "bytes": place.stat().st_size}


WORK: Mapping[str, Callable[[Values, Values, Told], Values]] = {
    "function": function,
    "sample": sample,
    "bound": bound,
    "compile": compile_head,
    "check": check,
    "export": export,
}


class Pipe:
    """Frames to and from the server: a letter, a length, JSON. Only `send` may be called from several threads."""

    def __init__(self, source: BinaryIO, sink: BinaryIO) -> None:
        self.source, self.sink, self.lock = source, sink, threading.Lock()

    def send(self, letter: bytes, value: Any) -> None:
        data = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()
        with self.lock:
            self.sink.write(struct.pack(">cI", letter, len(data)) + data)
            self.sink.flush()

    def receive(self) -> tuple[Values, bytes]:
        """What the server says and the body of the request; EOFError when the server is gone."""
        head, body = struct.unpack(">II", self._exactly(8))
        return json.loads(self._exactly(head)), self._exactly(body)

    def _exactly(self, count: int) -> bytes:
        data = self.source.read(count)
        if data is None or len(data) < count:
            raise EOFError
        return data


class Worker:
    """One process that does one piece of work at a time, and reads on meanwhile to hear that it is to stop."""

    def __init__(self, pipe: Pipe) -> None:
        self.pipe, self.work = pipe, queue.SimpleQueue[tuple[Values, bytes]]()
        self.current, self.cancelled, self.last = "", "", 0.0

    def listen(self) -> None:
        """In a thread of its own. A server that is gone takes its workers, and what they started, along."""
        try:
            while True:
                given, body = self.pipe.receive()
                if "cancel" in given:
                    self.cancelled = given["cancel"]
                else:
                    self.work.put((given, body))
        except EOFError:
            _end()

    def run(self) -> None:
        threading.Thread(target=self.listen, daemon=True).start()
        self.pipe.send(b"R", {"pid": os.getpid()})
        while True:
            self.do(*self.work.get())

    def told(self, what: str, done: int, of: int) -> None:
        """Progress, and the place where a piece of work that was cancelled stops."""
        if self.cancelled == self.current:
            raise Cancelled
        now = time.monotonic()
        if now - self.last >= _BETWEEN:
            self.last = now
            self.pipe.send(b"P", {"what": what, "done": int(done), "of": int(of)})

    def do(self, given: Values, body: bytes) -> None:
        self.current, self.last = given["id"], 0.0
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", ToleranceMissedWarning)  # the result says it
                result = WORK[given["kind"]](json.loads(body), given, self.told)
            self.pipe.send(b"D", result)
        except Cancelled:
            self.pipe.send(b"C", {})
        except Problem as problem:
            self.pipe.send(b"F", error_values(problem.error, problem.where))
        except PartitaError as error:
            self.pipe.send(b"F", error_values(error))
        except (MemoryError, RuntimeError) as error:
            if isinstance(error, MemoryError) or "allocate memory" in str(error):
                self.pipe.send(b"M", {})
            else:
                self._bug(error)
        except Exception as error:
            self._bug(error)

    def _bug(self, error: Exception) -> None:
        self.pipe.send(
            b"X", {"said": f"{type(error).__name__}: {error}"[:500], "trace": traceback.format_exc()[-4000:]}
        )


def _end() -> None:
    """End this process and what it started: the server made it the leader of its own group."""
    if hasattr(os, "killpg") and os.getpgrp() == os.getpid():
        os.killpg(os.getpid(), signal.SIGKILL)
    os._exit(1)


def _limit(extra: int) -> None:
    """At most so many bytes of data beyond what the imports took; no core files."""
    try:
        import resource
    except ImportError:  # Windows
        return
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    status = Path("/proc/self/status")
    if status.exists():  # elsewhere the limit does not count what is mapped
        held = next(int(line.split()[1]) << 10 for line in status.read_text().splitlines() if line.startswith("VmData"))
        resource.setrlimit(resource.RLIMIT_DATA, (held + extra, held + extra))


def main() -> None:
    """Serve until the server goes away. Arguments: bytes of memory beyond the imports, threads, 1 to load native loops first."""
    extra, threads, loops = map(int, sys.argv[1:])
    pipe = Pipe(os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb"))
    nowhere = os.open(os.devnull, os.O_RDWR)
    os.dup2(nowhere, 0)  # nothing that a library prints may reach the frames
    os.dup2(nowhere, 1)
    torch.set_num_threads(threads)
    if loops:  # loading them takes seconds, compiling them more, and no request is to pay for that
        KeyTree.of(np.zeros((1, 1)), None)
    _limit(extra)
    Worker(pipe).run()
