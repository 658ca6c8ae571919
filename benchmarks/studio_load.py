"""The studio under load: a hundred clients that evaluate and ten that compile, on the loopback of this machine alone.

    python benchmarks/studio_load.py [--seconds 30] [--clients 100] [--compilers 10]

It starts a studio of its own and ends it. Each client sends one request after another until the time is over or it has sent its
share. Printed: requests per second, percentiles of the time to an answer by kind, refusals that name their reason, errors, and
the memory of the server and its workers before, at the peak and after. The exit status is 1 if something crashed, a client
starved or memory grew beyond its bound.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

MOST_REQUESTS = 40  # of one client
PAUSE = 0.05  # seconds between two requests of a client
FUNCTIONS = ("sin(3*x) + x*cos(2*y)", "exp(-x^2 - y^2)", "abs(x) - y", "x*y", "tanh(5*x) + y^3")
DOMAIN = "[-1,1]^2"
SERVER_BOUND, WORKER_BOUND = 400, 2600  # MiB: the server with what it keeps, one worker with its imports


def tree(root: int) -> dict[int, float]:
    """MiB of memory of a process and all its descendants."""
    parents: dict[int, int] = {}
    sizes: dict[int, float] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rsplit(")", 1)[1].split()
                parents[int(entry.name)] = int(fields[1])
                sizes[int(entry.name)] = int((entry / "statm").read_text().split()[1]) * 4096 / (1 << 20)
            except OSError:
                continue
    found = {root: sizes.get(root, 0.0)}
    while True:
        more = {p: sizes[p] for p, parent in parents.items() if parent in found and p not in found}
        if not more:
            return found
        found |= more


@dataclass
class Load:
    """What happened."""

    client: httpx.AsyncClient
    end: float
    times: dict[str, list[float]] = field(default_factory=dict)
    refused: Counter[str] = field(default_factory=Counter)
    errors: Counter[str] = field(default_factory=Counter)
    served: Counter[str] = field(default_factory=Counter)
    requests: int = 0

    async def ask(self, who: str, method: str, path: str, body: Any = None) -> httpx.Response | None:
        """One request; a refusal with a sentence is waited out, as its header asks."""
        self.requests += 1
        try:
            answer = await self.client.request(method, path, json=body, headers={"X-Partita-Client": who})
        except httpx.HTTPError as error:
            self.errors[type(error).__name__] += 1
            await asyncio.sleep(0.5)
            return None
        if answer.status_code == 503 and answer.json()["error"]["message"]:
            self.refused[answer.json()["error"]["type"]] += 1
            await asyncio.sleep(min(2.0, float(answer.headers.get("Retry-After", "1"))))
            return None
        if answer.status_code >= 400:
            self.errors[f"{answer.status_code} {answer.json()['error']['message'][:80]}"] += 1
            return None
        return answer

    async def job(self, who: str, kind: str, body: dict[str, Any]) -> None:
        """A job from its submission to its end."""
        began = time.monotonic()
        answer = await self.ask(who, "POST", "/api/jobs", {"kind": kind, **body})
        if answer is None:
            return
        place = f"/api/jobs/{answer.json()['id']}"
        while True:
            found = await self.ask(who, "GET", place)
            state = found.json() if found is not None else {"state": "waiting"}
            if state["state"] == "done":
                break
            if state["state"] == "failed":
                self.errors[f"{kind}: {state['error']['message'][:80]}"] += 1
                return
            await asyncio.sleep(0.25)
        self.took(who, kind, began)

    def took(self, who: str, kind: str, began: float) -> None:
        self.served[who] += 1
        self.times.setdefault(kind, []).append(time.monotonic() - began)

    async def evaluate(self, who: str) -> None:
        chance = random.Random(who)
        await asyncio.sleep(chance.random())
        for turn in range(MOST_REQUESTS):
            text = chance.choice(FUNCTIONS)
            began = time.monotonic()
            if turn % 8 == 7:
                keys = 16
                centers = [[chance.uniform(-1, 1), chance.uniform(-1, 1)] for _ in range(keys)]
                values = [chance.uniform(-1, 1) for _ in range(keys)]
                head = {"rates": [20.0, 20.0], "centers": centers, "biases": None, "values": values, "slopes": None}
                await self.job(who, "bound", {"text": text, "domain": DOMAIN, "head": head, "seconds": 0.5})
            elif turn % 8 == 0:
                if await self.ask(who, "POST", "/api/function", {"text": text, "domain": DOMAIN}):
                    self.took(who, "function", began)
            else:
                body = {"text": text, "domain": DOMAIN, "grid": [64, 64]}
                if await self.ask(who, "POST", "/api/sample", body):
                    self.took(who, "sample", began)
            if time.monotonic() > self.end and self.served[who]:
                return
            await asyncio.sleep(PAUSE)

    async def compile(self, who: str) -> None:
        for turn in range(3):
            body = {"text": FUNCTIONS[turn % len(FUNCTIONS)], "domain": DOMAIN, "tolerance": 0.1, "budget": 5.0}
            await self.job(who, "compile", body)
            if time.monotonic() > self.end and self.served[who]:
                return


async def watch(root: int, peaks: dict[str, float]) -> None:
    while True:
        sizes = tree(root)
        peaks["server"] = max(peaks["server"], sizes.pop(root))
        peaks["worker"] = max([peaks["worker"], *sizes.values()])
        peaks["all"] = max(peaks["all"], sum(sizes.values()) + peaks["server"])
        await asyncio.sleep(0.25)


async def run(address: str, root: int, given: argparse.Namespace) -> int:
    token, base = address.split("token=")[1], address.split("/?")[0]
    limits = httpx.Limits(max_connections=given.clients + given.compilers)
    async with httpx.AsyncClient(
        base_url=base, headers={"X-Partita-Token": token}, limits=limits, timeout=120, trust_env=False
    ) as client:
        for kind in ("function", "compile", "bound"):  # the workers are warm
            load = Load(client, time.monotonic())
            if kind == "function":
                await load.ask("warm", "POST", "/api/function", {"text": "x", "domain": "[0,1]"})
            elif kind == "compile":
                await load.job("warm", kind, {"text": "x", "domain": "[0,1]", "tolerance": 0.1})
            else:
                head = {"rates": [20.0], "centers": [[0.5]], "biases": None, "values": [0.0], "slopes": None}
                await load.job("warm", kind, {"text": "x", "domain": "[0,1]", "head": head, "seconds": 0.5})
        before = tree(root)
        peaks = {"server": 0.0, "worker": 0.0, "all": 0.0}
        watching = asyncio.create_task(watch(root, peaks))
        start = time.monotonic()
        load = Load(client, start + given.seconds)
        names = [f"evaluating-{k}" for k in range(given.clients)], [f"compiling-{k}" for k in range(given.compilers)]
        await asyncio.gather(*map(load.evaluate, names[0]), *map(load.compile, names[1]))
        spent = time.monotonic() - start
        watching.cancel()
        await asyncio.sleep(1.0)
        after = tree(root)
    starved = [who for who in (*names[0], *names[1]) if not load.served[who]]
    counts = [load.served[who] for who in names[0]]
    print(f"{load.requests:,} requests in {spent:.1f} s: {load.requests / spent:.0f} per second")
    print(
        f"answers per evaluating client: least {min(counts)}, median {statistics.median(counts):g}, most {max(counts)}"
    )
    for kind, times in sorted(load.times.items()):
        ordered = sorted(times)
        p50, p95 = ordered[len(ordered) // 2], ordered[min(len(ordered) - 1, int(0.95 * len(ordered)))]
        print(f"{kind:10} {len(times):6,} answers   p50 {1000 * p50:8.0f} ms   p95 {1000 * p95:8.0f} ms")
    print(f"refused with a sentence: {dict(load.refused)}   errors: {dict(load.errors)}   starved: {len(starved)}")
    for name, sizes in (("before", before), ("after", after)):
        print(
            f"memory {name}: server {sizes[root]:.0f} MiB, workers {[round(s) for p, s in sizes.items() if p != root]} MiB"
        )
    print(
        f"memory at the peak: server {peaks['server']:.0f} MiB, one worker {peaks['worker']:.0f} MiB, all {peaks['all']:.0f} MiB"
    )
    bad = {
        "errors": bool(load.errors),
        "starved": bool(starved),
        "crashed": set(before) - set(after),
        "server memory": peaks["server"] > SERVER_BOUND,
        "worker memory": peaks["worker"] > WORKER_BOUND,
    }
    failed = [name for name, is_bad in bad.items() if is_bad]
    print("failed: " + ", ".join(failed) if failed else "no crash, no starvation, memory bounded")
    return int(bool(failed))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=30.0, help="how long clients go on asking, at most 600")
    parser.add_argument("--clients", type=int, default=100, help="that evaluate, at most 200")
    parser.add_argument("--compilers", type=int, default=10, help="that compile, at most 16")
    given = parser.parse_args()
    given.seconds, given.clients = min(given.seconds, 600.0), min(given.clients, 200)
    given.compilers = min(given.compilers, 16)
    command = [sys.executable, "-m", "partita", "studio", "--no-browser"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        try:
            code = asyncio.run(run(server.stdout.readline().strip(), server.pid, given))
        finally:
            server.terminate()
        code |= server.wait(timeout=20) != 0
    return code


if __name__ == "__main__":
    sys.exit(main())
