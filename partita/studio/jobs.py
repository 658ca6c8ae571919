"""Jobs: worker processes in lanes, a bounded queue for each, deadlines, memory, cancelling and progress.

Quick work has workers of its own, so it never waits behind a compile. Everything here runs on the server's event loop and
imports nothing heavy; `work.py` is what the processes run.
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import shutil
import signal
import struct
import sys
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

__all__ = [
    "LANES",
    "LIMITS",
    "MOST_DOMAIN",
    "MOST_GRID",
    "MOST_KEYS",
    "MOST_NODES",
    "MOST_POINTS",
    "MOST_TEXT",
    "Full",
    "Job",
    "Jobs",
    "Limits",
    "Stored",
    "plain_error",
]

MOST_TEXT, MOST_DOMAIN = 2_000, 10_000  # characters
MOST_NODES = 500  # operations of a function, which the page evaluates itself
MOST_POINTS, MOST_GRID, MOST_KEYS = 65_536, 512 * 512, 4_096  # of one request

State = Literal["waiting", "running", "done", "failed", "cancelled"]


@dataclass(frozen=True)
class Limits:
    """What one server allows.

    Attributes:
        body: bytes of a request.
        bodies: bytes of requests that are being read or wait, together.
        arrival: seconds for a request to arrive, headers and body each, and for its answer to be taken.
        connections: open at once.
        function, sample, bound, compile, check, export: the most seconds of each kind of work.
        default_bound, default_compile: the seconds where the client names none.
        grace: seconds after those until the worker is killed.
        memory: bytes that a worker may take beyond what its imports took.
        waiting: jobs that may wait, by lane.
        jobs, results: finished jobs that are remembered, and their bytes.
        heads, head_bytes: compiled heads that are kept, and their bytes on disk.
        downloads, download_bytes: files for download that are kept, and their bytes.
    """

    body: int = 4 << 20
    bodies: int = 64 << 20
    arrival: float = 10.0
    connections: int = 256
    function: float = 5.0
    sample: float = 10.0
    bound: float = 20.0
    compile: float = 120.0
    check: float = 60.0
    export: float = 60.0
    default_bound: float = 3.0
    default_compile: float = 30.0
    grace: float = 5.0
    memory: int = 2 << 30
    waiting: dict[str, int] = field(default_factory=lambda: {"quick": 256, "short": 128, "long": 16})
    jobs: int = 512
    results: int = 64 << 20
    heads: int = 32
    head_bytes: int = 256 << 20
    downloads: int = 16
    download_bytes: int = 256 << 20


LIMITS = Limits()
LANES = {
    "function": "quick",
    "sample": "quick",
    "bound": "short",
    "check": "short",
    "export": "short",
    "compile": "long",
}
_FRAME = struct.Struct(">cI")
_LARGEST_FRAME = 64 << 20
_INTERRUPT = 0.5  # seconds that a cancelled worker has to stop by itself
_STARTUP = 120.0  # seconds that a worker may take to start
_BOOT = "import sys; p = sys.argv.pop(1); p in sys.path or sys.path.insert(0, p); from partita.studio.work import main; main()"


class Full(Exception):
    """The queue of a lane is full. `waiting` jobs are ahead, and `seconds` is a guess when to ask again."""

    def __init__(self, waiting: int, seconds: int) -> None:
        super().__init__(
            f"The studio is busy: {waiting} jobs wait already, and the queue is full. Try again in {seconds} seconds."
        )
        self.waiting, self.seconds = waiting, seconds


@dataclass(eq=False)
class Job:
    """One piece of work. `given` is what the server tells the worker, `body` what the client sent."""

    kind: str
    given: dict[str, Any]
    body: bytes
    client: str
    seconds: float
    id: str = field(default_factory=lambda: secrets.token_urlsafe(16))
    state: State = "waiting"
    progress: bytes = b"null"
    result: bytes = b""
    error: dict[str, Any] | None = None
    status: int = 200
    over: asyncio.Event = field(default_factory=asyncio.Event)
    place: Path | None = None  # what the worker writes; deleted unless the job is done
    keep: Callable[[Job], None] | None = None  # called when it is done

    def finish(self, state: State, *, error: dict[str, Any] | None = None, status: int = 200) -> None:
        """The last state. What was cancelled stays so, whatever the worker says afterwards."""
        if self.over.is_set():
            return
        self.state, self.error, self.status, self.body = state, error, status, b""
        if state == "done" and self.keep is not None:
            self.keep(self)
        self.over.set()

    def fail(self, kind: str, message: str, status: int) -> None:
        """An error that is not the library's."""
        self.finish("failed", error=plain_error(kind, message), status=status)


def plain_error(kind: str, message: str, where: str | None = None) -> dict[str, Any]:
    """An error of the server in the form that every error has."""
    return {"type": kind, "message": message, "short": message, "where": where, "start": None, "end": None}


class Lane:
    """Jobs that wait for the same workers, in turn between the clients."""

    def __init__(self, most: int) -> None:
        self.most, self.clients, self.count = most, OrderedDict[str, deque[Job]](), 0
        self.filled = asyncio.Event()
        self.pace = 1.0  # seconds per job, lately

    def put(self, job: Job) -> None:
        if self.count >= self.most:
            raise Full(self.count, max(1, min(60, round(self.count * self.pace))))
        self.clients.setdefault(job.client, deque()).append(job)
        self.count += 1
        self.filled.set()

    async def wait(self) -> None:
        """Until a job waits."""
        if not self.count:
            self.filled.clear()
        await self.filled.wait()

    def take(self) -> Job:
        """The next job."""
        client, jobs = next(iter(self.clients.items()))
        job = jobs.popleft()
        self.clients.pop(client)
        if jobs:
            self.clients[client] = jobs  # the others have their turn first
        self.count -= 1
        return job

    def remove(self, job: Job) -> None:
        jobs = self.clients.get(job.client)
        if jobs is not None and job in jobs:
            jobs.remove(job)
            self.count -= 1
            if not jobs:
                del self.clients[job.client]

    def place(self, job: Job) -> int:
        """How many jobs are served up to this one; 0 if it does not wait."""
        own = self.clients.get(job.client, deque())
        if job not in own:
            return 0
        before = own.index(job) + 1
        return before + sum(min(len(jobs), before) for c, jobs in self.clients.items() if c != job.client)


async def _first(*waits: Coroutine[Any, Any, object]) -> None:
    """Until one of them is over; the others are cancelled."""
    tasks = [asyncio.ensure_future(wait) for wait in waits]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()


class Slot:
    """One worker process, replaced when it dies or is killed, and the loop that gives it jobs."""

    def __init__(self, lane: Lane, memory: int, threads: int, grace: float, *, loops: bool) -> None:
        self.lane, self.memory, self.threads, self.grace, self.loops = lane, memory, threads, grace, loops
        self.process: asyncio.subprocess.Process | None = None
        self.job: Job | None = None
        self.warm = asyncio.Event()

    async def run(self, after: asyncio.Event | None = None) -> None:
        """For ever. The first start waits until another slot is warm, unless there is work."""
        if after is not None:
            await _first(after.wait(), self.lane.filled.wait())
        failures = 0
        while True:
            if self.process is None:
                try:
                    await self._start()
                    failures = 0
                except (OSError, TimeoutError, asyncio.IncompleteReadError):
                    self.kill()
                    failures += 1
                    if failures >= 3 and self.lane.count:  # say so rather than wait for ever
                        self.lane.take().fail("WorkerError", "No worker process could be started.", 503)
                    await asyncio.sleep(min(failures, 5))
                    continue
            assert self.process is not None
            while not self.lane.count and self.process.returncode is None:
                await _first(self.lane.wait(), self.process.wait())
            if self.process.returncode is not None:  # it died without work
                self.kill()
                continue
            self.job = job = self.lane.take()
            began = time.monotonic()
            try:
                await self._work(job)
            finally:
                self.job = None
                if job.place is not None and job.state != "done":
                    remove(job.place)
            self.lane.pace += 0.2 * (time.monotonic() - began - self.lane.pace)

    async def _start(self) -> None:
        names = ("OMP", "MKL", "OPENBLAS", "NUMEXPR", "NUMBA", "VECLIB_MAXIMUM")
        environment = os.environ | {f"{name}_NUM_THREADS": str(self.threads) for name in names}
        root = str(Path(__file__).resolve().parents[2])
        self.process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-P",
            "-c",
            _BOOT,
            root,
            str(self.memory),
            str(self.threads),
            str(int(self.loops)),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
            env=environment | {"MPLBACKEND": "agg"},
            start_new_session=True,
        )
        async with asyncio.timeout(_STARTUP):
            await self._read()
        self.warm.set()

    async def _read(self) -> tuple[bytes, bytes]:
        assert self.process is not None and self.process.stdout is not None
        letter, length = _FRAME.unpack(await self.process.stdout.readexactly(_FRAME.size))
        if length > _LARGEST_FRAME:
            raise ConnectionError("a worker sent too much")
        return letter, await self.process.stdout.readexactly(length)

    async def _send(self, given: dict[str, Any], body: bytes) -> None:
        assert self.process is not None and self.process.stdin is not None
        head = json.dumps(given).encode()
        self.process.stdin.write(struct.pack(">II", len(head), len(body)) + head + body)
        await self.process.stdin.drain()

    async def _work(self, job: Job) -> None:
        job.state = "running"
        try:
            async with asyncio.timeout(job.seconds + self.grace):
                await self._send({**job.given, "id": job.id, "kind": job.kind}, job.body)
                while True:
                    letter, payload = await self._read()
                    if letter != b"P":
                        break
                    job.progress = payload
        except TimeoutError:
            self.kill()
            said = f"This job was stopped when it reached its limit of {job.seconds + self.grace:g} seconds."
            job.fail("TimeError", f"{said} Ask for less: a larger tolerance, fewer keys, a smaller domain.", 504)
        except (asyncio.IncompleteReadError, OSError):
            self.kill()
            said = "The worker process ended during this job. A new one has been started."
            job.fail("WorkerError", f"{said} Try again; if it happens again, ask for less.", 500)
        else:
            self._finish(job, letter, payload)

    def _finish(self, job: Job, letter: bytes, payload: bytes) -> None:
        if letter == b"D":
            job.result = payload
            job.finish("done")
        elif letter == b"F":
            job.finish("failed", error=json.loads(payload), status=422)
        elif letter == b"C":
            job.finish("cancelled")
        elif letter == b"M":
            self.kill()
            said = f"This job needs more memory than its limit of {self.memory >> 20} MiB."
            job.fail("MemoryError", f"{said} Ask for less: a larger tolerance, fewer keys, a smaller domain.", 422)
        else:
            told = json.loads(payload)
            with suppress(OSError):  # nobody may be reading
                print(told["trace"], file=sys.stderr, flush=True)
            job.fail("InternalError", f"A bug in partita stopped this job: {told['said']}. Please report it.", 500)

    def interrupt(self, job: Job) -> None:
        """Stop working on a job: at its next report of progress, or by killing the process."""

        async def stop() -> None:
            with suppress(OSError, AssertionError):
                await self._send({"cancel": job.id}, b"")
            await asyncio.sleep(_INTERRUPT)
            if self.job is job:
                self.kill()

        task = asyncio.create_task(stop())
        _background.add(task)
        task.add_done_callback(_background.discard)

    def kill(self) -> None:
        """End the process and everything that it started."""
        process, self.process = self.process, None
        if process is None:
            return
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL) if hasattr(os, "killpg") else process.kill()


_background: set[asyncio.Task[None]] = set()


@dataclass(frozen=True)
class Stored:
    """A head or a file for download: its place, its size and the name that a browser gives it."""

    place: Path
    size: int
    name: str = ""


class Shelf:
    """Files by id, bounded in number and bytes: the oldest are forgotten, and deleted."""

    def __init__(self, most: int, bytes_: int) -> None:
        self.most, self.bytes, self.held = most, bytes_, OrderedDict[str, Stored]()

    def put(self, key: str, stored: Stored) -> None:
        self.held[key] = stored
        while len(self.held) > 1 and (
            len(self.held) > self.most or sum(s.size for s in self.held.values()) > self.bytes
        ):
            _, old = self.held.popitem(last=False)
            remove(old.place)

    def get(self, key: str) -> Stored | None:
        found = self.held.get(key)
        if found is not None:
            self.held.move_to_end(key)
        return found


def remove(place: Path) -> None:
    """Delete a file or a folder that the server made."""
    if place.is_dir():
        shutil.rmtree(place, ignore_errors=True)
    else:
        place.unlink(missing_ok=True)


class Jobs:
    """All lanes, all workers, what is remembered of finished jobs, and the heads and files that they made."""

    def __init__(self, folder: Path, limits: Limits = LIMITS, cores: int | None = None) -> None:
        cores = cores or os.cpu_count() or 1
        self.limits, self.folder = limits, folder
        self.lanes = {name: Lane(most) for name, most in limits.waiting.items()}
        workers = {"quick": 1 + (cores >= 8), "short": 1 + (cores >= 8), "long": max(1, min(4, cores // 2))}
        threads = max(1, min(4, cores // 4))
        self.slots = {
            name: [
                Slot(lane, limits.memory, threads, limits.grace, loops=name != "quick") for _ in range(workers[name])
            ]
            for name, lane in self.lanes.items()
        }
        self.jobs = OrderedDict[str, Job]()
        self.heads = Shelf(limits.heads, limits.head_bytes)
        self.downloads = Shelf(limits.downloads, limits.download_bytes)
        self.tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Start the workers one after another, those for quick work first."""
        before: asyncio.Event | None = None
        for slot in (s for slots in self.slots.values() for s in slots):
            self.tasks.append(asyncio.create_task(slot.run(before)))
            before = slot.warm

    async def close(self) -> None:
        """Kill every worker."""
        slots = [slot for slots in self.slots.values() for slot in slots]
        processes = [slot.process for slot in slots if slot.process is not None]
        for task in self.tasks:
            task.cancel()
        for job in self.jobs.values():
            job.fail("Closed", "The studio was stopped.", 503)
        for slot in slots:
            slot.kill()
        await asyncio.gather(*self.tasks, return_exceptions=True)
        for slot in slots:  # one that was just being started
            slot.kill()
        with suppress(TimeoutError):
            async with asyncio.timeout(1.0):
                await asyncio.gather(*(process.wait() for process in processes))

    def waiting_bytes(self) -> int:
        """Of the requests that wait or run."""
        return sum(len(job.body) for job in self.jobs.values())

    def put(self, job: Job) -> Job:
        """Let a job wait for a worker.

        Raises:
            Full: too many jobs wait already, or too many bytes.
        """
        lane = self.lanes[LANES[job.kind]]
        if self.waiting_bytes() + len(job.body) > self.limits.bodies:
            raise Full(lane.count, 5)
        lane.put(job)
        self.jobs[job.id] = job
        self._forget()
        return job

    def _forget(self) -> None:
        finished = [job for job in self.jobs.values() if job.over.is_set()]
        size = sum(len(job.result) for job in finished)
        for job in finished:
            if len(finished) <= self.limits.jobs and size <= self.limits.results:
                break
            finished = finished[1:]
            size -= len(job.result)
            del self.jobs[job.id]

    def drop(self, job: Job) -> None:
        """Forget a job whose answer has been sent."""
        self.jobs.pop(job.id, None)

    def place(self, job: Job) -> int:
        return self.lanes[LANES[job.kind]].place(job)

    def cancel(self, job: Job) -> None:
        """Stop a job, wherever it is."""
        if job.over.is_set():
            return
        lane = LANES[job.kind]
        self.lanes[lane].remove(job)
        running = next((slot for slot in self.slots[lane] if slot.job is job), None)
        job.finish("cancelled")
        if running is not None:
            running.interrupt(job)
