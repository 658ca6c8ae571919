"""A studio in a process of its own, and clients for it: HTTP by urllib, and raw bytes on a socket."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
COMMAND = [sys.executable, "-m", "partita", "studio", "--no-browser"]


class Answer:
    """What the server said."""

    def __init__(self, status: int, headers: Mapping[str, str], body: bytes) -> None:
        self.status, self.headers, self.body = status, headers, body

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        return self.json["error"]


class Running:
    """A server that was started by a command, known by the line that it printed."""

    def __init__(
        self,
        command: list[str] | None = None,
        *,
        cwd: Path | None = None,
        clean: bool = False,
        temporary: Path | None = None,
    ) -> None:
        environment = {k: v for k, v in os.environ.items() if not (clean and k.startswith("PYTHON"))}
        environment |= {} if temporary is None else {"TMPDIR": str(temporary)}
        self.process = subprocess.Popen(
            command or COMMAND, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=cwd, env=environment
        )
        assert self.process.stdout is not None
        self.address = self.process.stdout.readline().strip()
        if "token=" not in self.address:
            raise AssertionError(f"the studio did not start: {self.address} {self.process.communicate()[1]}")
        self.token = self.address.split("token=")[1]
        self.port = int(self.address.split(":")[2].split("/")[0])

    @classmethod
    def limited(cls, limits: Mapping[str, Any], temporary: Path | None = None) -> Running:
        """With other limits than those of the command."""
        code = (
            "import json, sys; from partita.studio.server import serve_until_stopped; from partita.studio.jobs import Limits; "
            "serve_until_stopped(0, browser=False, limits=Limits(**json.loads(sys.argv[1])))"
        )
        return cls([sys.executable, "-c", code, json.dumps(limits)], temporary=temporary)

    def ask(self, method: str, path: str, body: Any = None, headers: Mapping[str, str] | None = None) -> Answer:
        data = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
        sent = {"X-Partita-Token": self.token, "Content-Type": "application/json", **(headers or {})}
        url = f"http://127.0.0.1:{self.port}{path}"
        request = urllib.request.Request(url, data, {k: v for k, v in sent.items() if v}, method=method)
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return Answer(answer.status, answer.headers, answer.read())
        except urllib.error.HTTPError as error:
            return Answer(error.code, error.headers, error.read())

    def get(self, path: str, **headers: str) -> Answer:
        return self.ask("GET", path, headers=headers)

    def post(self, path: str, body: Any, **headers: str) -> Answer:
        return self.ask("POST", path, body, headers)

    def job(self, **body: Any) -> str:
        """The id of a new job."""
        answer = self.post("/api/jobs", body)
        assert answer.status == 202, answer.body
        return str(answer.json["id"])

    def finished(self, job: str, seconds: float = 60) -> dict[str, Any]:
        """The last state of a job."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            found = self.get(f"/api/jobs/{job}")
            if found.status != 200 or found.json["state"] not in ("waiting", "running"):
                return dict(found.json)
            time.sleep(0.05)
        raise AssertionError(f"job {job} did not finish: {found.body[:300]!r}")

    def until(self, job: str, state: str, seconds: float = 60) -> None:
        """Wait for a state of a job."""
        end = time.monotonic() + seconds
        while self.get(f"/api/jobs/{job}").json["state"] != state:
            assert time.monotonic() < end, self.get(f"/api/jobs/{job}").body[:300]
            time.sleep(0.02)

    def raw(self, data: bytes, seconds: float = 5) -> bytes:
        """What the server answers to bytes on a socket, until it closes or so many seconds pass."""
        with socket.create_connection(("127.0.0.1", self.port), timeout=seconds) as link:
            with suppress(OSError):
                link.sendall(data)
            found = b""
            with suppress(OSError):
                while part := link.recv(65536):
                    found += part
                    if b"\r\n\r\n" in found and b"Connection: close" not in found and len(found) > 10_000:
                        break
            return found

    def workers(self) -> list[int]:
        """The process ids of the workers: the children of the server."""
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                with suppress(OSError):
                    fields = (entry / "stat").read_text().rsplit(")", 1)[1].split()
                    if int(fields[1]) == self.process.pid and fields[0] != "Z":
                        found.append(int(entry.name))
        return sorted(found)

    def busiest(self) -> int:
        """The worker that computes."""

        def spent(pid: int) -> int:
            return sum(map(int, Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[11:13]))

        before = {pid: spent(pid) for pid in self.workers()}
        time.sleep(0.3)
        return max(before, key=lambda pid: spent(pid) - before[pid])

    def stop(self, number: int = signal.SIGINT) -> tuple[int, str, str]:
        """The exit code after a signal, and what else was printed on stdout and stderr."""
        self.process.send_signal(number)
        out, errors = self.process.communicate(timeout=20)
        return self.process.returncode, out, errors

    def __enter__(self) -> Running:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.communicate()


def is_alive(pid: int) -> bool:
    """Whether a process exists and is not a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def all_gone(pids: list[int], seconds: float = 10) -> bool:
    end = time.monotonic() + seconds
    while any(map(is_alive, pids)):
        if time.monotonic() > end:
            return False
        time.sleep(0.05)
    return True
