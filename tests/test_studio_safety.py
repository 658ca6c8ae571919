"""The studio is safe by default: every sentence of that promise, attacked over real sockets."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import socket
import time
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")
from studio_process import Running, all_gone, is_alive

from partita.studio.jobs import Job, Lane, Slot

pytestmark = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="counts processes in /proc")

LIMITS = {
    "body": 1 << 20,
    "arrival": 2.0,
    "connections": 40,
    "function": 2.0,
    "default_compile": 2.0,
    "compile": 3.0,
    "grace": 0.5,
    "memory": 160 << 20,
    "waiting": {"quick": 8, "short": 3, "long": 2},
    "jobs": 12,
    "heads": 2,
    "downloads": 2,
}
# tries methods one after another for longer than any budget here
ENDLESS = {
    "kind": "compile",
    "text": "sin(30*x0)*cos(29*x1)*sin(31*x2) + abs(x0*x1 - x2)",
    "domain": "[-1,1]^3",
    "tolerance": 1e-3,
}
# an end of the domain whose exact value takes seconds
BOMB = "[0, 1" + "/7e300" * 1500 + "*9e300" * 150 + "]"
# 262,144 points of 4,096 coordinates: 8 GiB
HOG = {"text": "x0", "domain": "[0,1]^4096", "grid": [512, 512]}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Where the server keeps its files."""
    return tmp_path_factory.mktemp("temporary")


@pytest.fixture(scope="module")
def studio(place):
    with Running.limited(LIMITS, place) as running:
        yield running


def works(studio: Running) -> None:
    """The next request of everybody else is answered."""
    assert studio.post("/api/function", {"text": "x", "domain": "[0,1]"}).status == 200


def status_of(answer: bytes) -> int:
    found = re.match(rb"HTTP/1\.1 (\d+)", answer)
    return int(found[1]) if found else 0


def request(studio: Running, path: str = "/api/hello", method: str = "GET", **headers: str | None) -> bytes:
    """The bytes of a request that the server accepts, with some headers changed or left out."""
    sent = {"Host": f"127.0.0.1:{studio.port}", "X-Partita-Token": studio.token, "Connection": "close"}
    sent |= {name.replace("_", "-"): value for name, value in headers.items()}
    lines = [f"{method} {path} HTTP/1.1", *(f"{k}: {v}" for k, v in sent.items() if v is not None)]
    return ("\r\n".join(lines) + "\r\n\r\n").encode()


def test_a_right_request_is_answered(studio):  # the control of all that follow
    for host in (f"127.0.0.1:{studio.port}", f"localhost:{studio.port}"):
        assert status_of(studio.raw(request(studio, Host=host))) == 200
        assert status_of(studio.raw(request(studio, Origin=f"http://{host}", Sec_Fetch_Site="same-origin"))) == 200
    assert status_of(studio.raw(request(studio, f"/?token={studio.token}", X_Partita_Token=None))) == 200
    assert status_of(studio.raw(request(studio, f"/?token={studio.token}", Sec_Fetch_Site="none"))) == 200


def test_it_listens_on_this_machine_alone(studio):
    listening = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    own = {fields[1] for fields in listening if fields[3] == "0A" and int(fields[1].split(":")[1], 16) == studio.port}
    assert own == {f"0100007F:{studio.port:04X}"}
    with pytest.raises(OSError):
        socket.create_connection(("127.0.0.2", studio.port), timeout=2).close()


@pytest.mark.parametrize("token", [None, "", "wrong", "x" * 32, "%C3%A9"])
def test_the_token_is_needed(studio, token):
    for path, method in (("/api/hello", "GET"), ("/api/function", "POST"), ("/api/jobs/" + "a" * 22, "DELETE")):
        answer = studio.raw(request(studio, path, method, X_Partita_Token=token))
        assert status_of(answer) == 403 and b"token" in answer and studio.token.encode() not in answer
    page = studio.raw(request(studio, "/" if token is None else f"/?token={token}"))
    assert status_of(page) == 403 and b"text/plain" in page and b"<script" not in page
    assert status_of(studio.raw(request(studio, f"/?token={token}&token={studio.token}"))) == 403


def test_two_tokens_are_no_token(studio):
    twice = request(studio).replace(b"\r\n\r\n", f"\r\nX-Partita-Token: {studio.token}x\r\n\r\n".encode())
    assert status_of(studio.raw(twice)) == 403


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:{port}", "127.0.0.1", "127.0.0.1:1", "127.0.0.1.evil:{port}", "[::1]:{port}"]
)
def test_another_host_is_refused(studio, host):  # DNS rebinding
    assert status_of(studio.raw(request(studio, Host=host.format(port=studio.port)))) == 403
    assert status_of(studio.raw(request(studio, "/app.js", Host=host.format(port=studio.port)))) == 403
    assert status_of(studio.raw(request(studio, Host=None))) in (400, 403)


@pytest.mark.parametrize(
    "origin", ["http://evil.example", "null", "https://127.0.0.1:{port}", "http://127.0.0.1:1", "http://127.0.0.1"]
)
def test_another_origin_is_refused(studio, origin):
    answer = studio.raw(request(studio, Origin=origin.format(port=studio.port)))
    assert status_of(answer) == 403 and b"access-control" not in answer.lower()


def test_another_site_is_refused_and_nothing_is_shared(studio):
    for site in ("cross-site", "same-site"):
        assert status_of(studio.raw(request(studio, Sec_Fetch_Site=site))) == 403
        assert status_of(studio.raw(request(studio, "/index.html", Sec_Fetch_Site=site))) == 403
    asking = request(studio, method="OPTIONS", Origin="http://evil.example", Access_Control_Request_Method="POST")
    assert b"access-control" not in studio.raw(asking).lower()
    simple = request(studio, "/api/function", "POST", Content_Type="text/plain", Content_Length="2") + b"{}"
    assert status_of(studio.raw(simple)) == 415


def test_the_headers_of_every_answer(studio):
    for path, status in (
        ("/api/hello", 200),
        ("/index.html", 200),
        (f"/?token={studio.token}", 200),
        ("/nothing", 404),
        ("/", 403),
    ):
        answer = studio.get(path)
        assert answer.status == status
        policy = answer.headers["Content-Security-Policy"]
        assert "default-src 'none'" in policy and "script-src 'self'" in policy and "unsafe" not in policy
        assert (
            answer.headers["X-Content-Type-Options"] == "nosniff" and answer.headers["Referrer-Policy"] == "no-referrer"
        )
        assert (
            answer.headers["Cross-Origin-Resource-Policy"]
            == answer.headers["Cross-Origin-Opener-Policy"]
            == "same-origin"
        )
        assert "Access-Control-Allow-Origin" not in answer.headers and "server" not in {
            k.lower() for k in answer.headers
        }
    assert studio.get("/api/hello").headers["Cache-Control"] == "no-store"


NAMES = [
    "../../etc/passwd",
    "..%2f..%2fetc%2fpasswd",
    "%2e%2e/server.py",
    "....//server.py",
    "%00",
    "index.html%00.js",
    "/etc/passwd",
    "C:%5Cx",
    "server.py",
    "..",
]


@pytest.mark.parametrize("name", NAMES)
def test_no_path_reaches_the_file_system(studio, name):
    for place in ("/", "/api/jobs/", "/api/downloads/", "/page/", "/api/jobs/" + "a" * 22 + "/"):
        answer = studio.raw(request(studio, place + name))
        assert status_of(answer) in (400, 404), (place, answer[:80])
        assert b"root:" not in answer and b"import " not in answer
    for body in ({"kind": "check", "head": name}, {"kind": "export", "head": name, "what": "head"}):
        assert studio.post("/api/jobs", body).status in (404, 410)
    assert studio.post("/api/sample", {"head": name, "grid": [2, 2]}).status in (404, 410)
    assert studio.post("/api/sample", {"head": {"a": 1}, "grid": [2, 2]}).status == 410
    works(studio)


LIES = {"place": "/tmp/x", "head_id": "../x", "folder": "/", "seconds": 1e9, "id": "x"}


def test_a_name_of_a_file_is_never_taken_from_a_request(studio):
    told = studio.finished(
        studio.job(kind="compile", text="x", domain="[0,1]", tolerance=0.1, place="/tmp/x", head_id="../x", folder="/")
    )
    head = told["result"]["head_id"]
    assert re.fullmatch(r"[\w-]{22}", head)
    for what in ("../../x", "pdf", "", None, ["head"], "py"):
        assert studio.post("/api/jobs", {"kind": "export", "head": head, "what": what}).status == 422
    told = studio.finished(studio.job(kind="export", head=head, what="head", name="../../x", place="/tmp/x"))
    assert told["result"]["name"] == "partita-head.zip" and told["result"]["download"] != head
    assert not Path("/tmp/x").exists()


@pytest.mark.parametrize(
    "text",
    [
        "os:system",
        "x.py:f",
        "/tmp/x.py:f",
        "__import__('os')",
        "x.__class__",
        "lambda: 1",
        "exec",
        "[x for x in y]",
        "f'{x}'",
        "x;import os",
    ],
)
def test_text_is_only_parsed(studio, text, tmp_path):
    answer = studio.post("/api/function", {"text": text, "domain": "[0,1]"})
    assert answer.status == 422 and answer.error["type"] == "ExpressionError"
    answer = studio.post("/api/function", {"text": "x", "domain": text})
    assert answer.status == 422 and answer.error["type"] == "DomainError"


def test_a_file_that_a_text_names_is_not_run(studio, tmp_path):
    mark = tmp_path / "mark"
    (tmp_path / "own.py").write_text(f"open({str(mark)!r}, 'w')\ndef f(x): return x")
    for text in (f"{tmp_path}/own.py:f", "own:f"):
        told = studio.finished(studio.job(kind="compile", text=text, domain="[0,1]", tolerance=0.1))
        assert told["state"] == "failed" and told["error"]["type"] == "ExpressionError"
    assert not mark.exists()


def post(studio: Running, path: str, body: bytes, **headers: str | None) -> bytes:
    sent = {"Content_Type": "application/json", "Content_Length": str(len(body)), **headers}
    return request(studio, path, "POST", **sent) + body


def test_large_bodies_are_refused_before_they_are_read(studio):
    large = studio.raw(
        request(studio, "/api/function", "POST", Content_Type="application/json", Content_Length="2000000")
    )
    assert status_of(large) == 413 and b"1,048,576 bytes" in large
    for length in ("9" * 30, "-1", "1e3", "0x10"):
        found = studio.raw(
            request(studio, "/api/function", "POST", Content_Type="application/json", Content_Length=length)
        )
        assert status_of(found) in (400, 413), (length, found[:100])
    works(studio)


def test_an_endless_body_is_cut_off(studio):
    sent = 0
    with socket.create_connection(("127.0.0.1", studio.port), timeout=5) as link:
        chunked = {"Content_Type": "application/json", "Transfer_Encoding": "chunked", "Connection": None}
        link.sendall(request(studio, "/api/function", "POST", **chunked))
        chunk = b"10000\r\n" + b" " * 0x10000 + b"\r\n"
        with suppress(OSError):
            for _ in range(400):  # 26 MB, if it were let
                link.sendall(chunk)
                sent += len(chunk)
            pytest.fail("the server took 26 MB")
    assert sent < 16 << 20  # what the buffers of two sockets hold, beside 1 MiB
    works(studio)


def test_headers_and_addresses_are_bounded(studio):
    assert status_of(studio.raw(request(studio, "/api/hello?" + "x" * 9000))) in (400, 414)
    assert status_of(studio.raw(request(studio, X_Long="y" * 40_000))) in (400, 431, 0)
    assert status_of(studio.raw(b"GET / HTTP/9.9\r\n\r\n")) in (400, 403, 505, 0)
    assert status_of(studio.raw(b"\x16\x03\x01\x02\x00" * 40 + b"\r\n\r\n")) in (400, 0)
    works(studio)


@pytest.mark.parametrize(
    "body",
    [
        b"[" * 500_000,
        b'{"a":' * 100_000 + b"1" + b"}" * 100_000,
        b'{"text": NaN, "domain": "[0,1]"}',
        b'{"text": "x", "domain": Infinity}',
        b'{"text": 1' + b"0" * 100_000 + b"}",
        b"[]",
        b"null",
        b"",
        b"{",
        b"\xff\xfe",
        b'{"text": "x"}',
        b'{"text": ["x"], "domain": "[0,1]"}',
        b'{"text": {"x": 1}, "domain": 1}',
    ],
)
def test_bad_json_is_refused(studio, body):
    answer = studio.post("/api/function", body)
    assert answer.status == 422 and answer.error["message"], answer.body
    works(studio)


def test_numbers_are_finite_and_lists_bounded(studio):
    base = {"text": "x+y", "domain": "[0,1]^2"}
    for points in (
        b"[[1e999, 0]]",
        b"[[-1e999, 0]]",
        b"[[true, 0]]",
        b"[[null, 0]]",
        b'[["1", 0]]',
        b"[[1]]",
        b"[]",
        b"[1, 2]",
    ):
        body = json.dumps(base).encode()[:-1] + b', "points": ' + points + b"}"
        answer = studio.post("/api/sample", body)
        assert answer.status == 422 and answer.error["where"] == "points", points
    for grid in ([10**9, 10**9], [513, 512], [-1, -1], [1e308, 1], [1, 1, 1], [0]):
        assert studio.post("/api/sample", base | {"grid": grid}).status == 422, grid
    for field, value in (("seconds", 1e9), ("seconds", -1), ("seconds", "1"), ("seconds", True)):
        assert studio.post("/api/jobs", base | {"kind": "bound", "head": {}, field: value}).status == 422
    assert studio.post("/api/jobs", base | {"kind": "compile", "tolerance": 1, "budget": 1e9}).status == 422
    assert studio.post("/api/jobs", {"kind": "shell"}).status == 422


@pytest.mark.parametrize(
    ("field", "values"),
    [("tolerance", ["1e999", "1" + "0" * 400, "true", '"1"']), ("norm", ["0", "false", "[]", '""'])],
)
def test_a_number_is_a_number(studio, field, values):
    for value in values:
        body = json.dumps({"kind": "compile", "text": "x", "domain": "[0,1]", "tolerance": 1}).encode()[:-1]
        job = studio.post("/api/jobs", body + f', "{field}": {value}}}'.encode()).json["id"]
        told = studio.finished(job)
        assert told["state"] == "failed" and told["error"]["type"] == "RequestError", (value, told)
        assert told["error"]["where"] == field


@pytest.mark.parametrize(
    "text",
    [
        "x" * 1_000_000,
        "+".join(["x"] * 600),
        "(" * 900 + "x" + ")" * 900,
        "x^64^64^64^64",
        "9^9^9^9",
        "-" * 1900 + "x",
        "exp(" * 40 + "x" + ")" * 40,
        "x^99999999",
    ],
    ids=["long", "nodes", "nested", "powers", "numbers", "signs", "exponentials", "exponent"],
)
def test_laughter_is_short(studio, text):
    body = {"text": text, "domain": "[0,1]"}
    answer = studio.post("/api/function", body)
    assert answer.status in (200, 413, 422), answer.body[:200]
    if answer.status == 200:  # a function like any other: its values overflow, and that is all
        assert studio.post("/api/sample", body | {"grid": [8]}).status == 200
    assert len(answer.body) < 20_000
    works(studio)


def test_work_is_killed_when_its_seconds_are_over(studio):
    works(studio)
    before = studio.workers()
    for pid in before:
        os.kill(pid, signal.SIGSTOP)  # work that never ends
    try:
        answer = studio.post("/api/function", {"text": "x", "domain": "[0,1]"})
        end = time.monotonic() + 10
        while len(left := [pid for pid in before if is_alive(pid)]) == len(before) and time.monotonic() < end:
            time.sleep(0.05)  # the killed one is ending
    finally:
        for pid in filter(is_alive, before):
            os.kill(pid, signal.SIGCONT)
    assert answer.status == 504 and answer.error["type"] == "TimeError" and "2.5 seconds" in answer.error["message"]
    assert len(left) == len(before) - 1
    works(studio)  # by a new worker


def test_a_compile_ends_within_its_budget(studio):
    told = studio.finished(studio.job(**ENDLESS, budget=1.0), seconds=40)
    assert told["state"] in ("done", "failed"), told
    assert told["state"] == "done" or told["error"]["type"] in ("BudgetSpentError", "TimeError"), told


def test_work_that_takes_too_much_memory_ends_alone(studio):
    answer = studio.post("/api/sample", HOG)
    assert answer.status == 422 and answer.error["type"] == "MemoryError" and "160 MiB" in answer.error["message"], (
        answer.body
    )
    works(studio)
    assert studio.post("/api/sample", HOG | {"grid": [4, 4]}).status == 200  # the same, small enough


def test_the_queue_is_bounded_and_says_so(studio):
    ids = [studio.job(**ENDLESS, budget=3.0)]
    studio.until(ids[0], "running")
    ids += [studio.job(**ENDLESS, budget=3.0) for _ in range(2)]
    answer = studio.post("/api/jobs", ENDLESS)
    assert answer.status == 503 and int(answer.headers["Retry-After"]) >= 1
    assert answer.error["type"] == "Busy" and answer.error["place"] == 3 and "2 jobs wait" in answer.error["message"]
    assert [studio.get(f"/api/jobs/{job}").json["place"] for job in ids] == [0, 1, 2]
    works(studio)  # quick work does not wait behind compiles
    for job in reversed(ids):
        assert studio.ask("DELETE", f"/api/jobs/{job}").json == {"state": "cancelled"}
    assert {studio.get(f"/api/jobs/{job}").json["state"] for job in ids} == {"cancelled"}
    told = studio.finished(studio.job(kind="compile", text="x", domain="[0,1]", tolerance=0.1))
    assert told["state"] == "done"  # the next compile runs


def test_a_worker_that_is_killed_fails_its_job_alone(studio):
    job = studio.job(**ENDLESS, budget=3.0)
    studio.until(job, "running")
    other = studio.job(kind="compile", text="x", domain="[0,1]", tolerance=0.1)
    os.kill(studio.busiest(), signal.SIGKILL)
    told = studio.finished(job)
    assert told["state"] == "failed" and told["error"]["type"] == "WorkerError" and "ended" in told["error"]["message"]
    assert studio.finished(other)["state"] == "done"
    works(studio)


def test_a_worker_that_dies_without_work_is_replaced(studio):
    works(studio)
    before = studio.workers()
    os.kill(before[0], signal.SIGKILL)
    assert all_gone(before[:1])
    works(studio)
    assert studio.finished(studio.job(kind="compile", text="x", domain="[0,1]", tolerance=0.1))["state"] == "done"


def test_what_is_kept_is_bounded_and_what_is_gone_says_so(studio):
    heads = [
        studio.finished(studio.job(kind="compile", text="x", domain="[0,1]", tolerance=0.1))["result"]["head_id"]
        for _ in range(3)
    ]
    answer = studio.post("/api/sample", {"head": heads[0], "grid": [2]})
    assert answer.status == 410 and answer.error["type"] == "Gone" and "Compile it again" in answer.error["message"]
    assert studio.post("/api/sample", {"head": heads[2], "grid": [2]}).status == 200
    files = [
        studio.finished(studio.job(kind="export", head=heads[2], what="head"))["result"]["download"] for _ in range(3)
    ]
    assert [studio.get(f"/api/downloads/{f}").status for f in files] == [410, 200, 200]
    for _ in range(13):
        last = studio.job(kind="export", head=heads[2], what="head")
        studio.finished(last)
    assert studio.get(f"/api/jobs/{heads[0]}").status == 410 and studio.get(f"/api/jobs/{last}").status == 200


def test_a_slow_client_is_cut_off(studio):
    """Half a request, and then silence: the connection is closed, and a request that trickles in does not last longer."""
    started, links = time.monotonic(), []
    for data in (b"GET /api/hello HTTP/1.1\r\nHost: ", post(studio, "/api/function", b"{", Content_Length="100"), b""):
        link = socket.create_connection(("127.0.0.1", studio.port), timeout=30)
        link.sendall(data)
        links.append(link)
    answers = []
    for k, link in enumerate(links):
        with suppress(OSError):
            if k == 0:
                for _ in range(3):
                    link.sendall(b"x")
                    time.sleep(0.2)
        found = b""
        with suppress(OSError):
            while part := link.recv(4096):
                found += part
        answers.append(found)
        link.close()
    assert time.monotonic() - started < 30 and status_of(answers[1]) == 408
    works(studio)


def test_too_many_connections_are_refused(studio):
    links = []
    try:
        for _ in range(60):
            links.append(socket.create_connection(("127.0.0.1", studio.port), timeout=5))
        answers = []
        for link in links[-10:]:
            link.settimeout(3)
            with suppress(OSError):
                answers.append(link.recv(4096))
        assert any(status_of(a) == 503 and b"connections open" in a for a in answers)
    finally:
        for link in links:
            link.close()
    time.sleep(0.2)
    works(studio)


def test_a_client_that_goes_away_takes_its_work_along(studio):
    with socket.create_connection(("127.0.0.1", studio.port), timeout=5) as link:
        body = json.dumps({"text": "x", "domain": BOMB}).encode()
        link.sendall(post(studio, "/api/function", body))
        time.sleep(0.3)
    started = time.monotonic()
    works(studio)
    assert time.monotonic() - started < 20


def test_no_worker_outlives_a_server_that_is_killed():
    with Running() as running:
        end = time.monotonic() + 30
        while not running.workers():
            assert time.monotonic() < end
            time.sleep(0.05)
        workers = running.workers()
        assert running.stop(signal.SIGKILL) == (-9, "", "")
        assert all_gone(workers, 20)


def test_a_closed_terminal_ends_everything(tmp_path):
    with Running(temporary=tmp_path) as running:
        assert [oct(p.stat().st_mode & 0o777) for p in tmp_path.iterdir()] == ["0o700"]
        assert running.stop(signal.SIGHUP) == (0, "", "")
    assert not list(tmp_path.iterdir())


def test_a_bug_ends_its_job_though_nobody_reads_the_trace(monkeypatch):
    class Closed:
        def write(self, text: str) -> None:
            raise BrokenPipeError

    monkeypatch.setattr("sys.stderr", Closed())
    job, slot = Job("function", {}, b"", "", 1.0), Slot(Lane(1), 1, 1, 1.0, loops=False)
    slot._finish(job, b"X", b'{"said": "it fell", "trace": "where"}')
    assert job.state == "failed" and job.error is not None and "it fell" in job.error["message"]


@pytest.mark.skipif(find_spec("numba") is None, reason="there are no native loops without numba")
def test_no_request_pays_for_the_native_loops():
    """Bounds of many keys need them; loading takes seconds, and compiling more than a bound has by default."""

    async def loaded(*, loops: bool) -> bool:
        slot = Slot(Lane(1), 1 << 30, 1, 1.0, loops=loops)
        await slot._start()
        process = slot.process
        assert process is not None
        found = "llvmlite" in Path(f"/proc/{process.pid}/maps").read_text()
        slot.kill()
        await process.communicate()
        return found

    assert asyncio.run(loaded(loops=True)) and not asyncio.run(loaded(loops=False))


def test_an_interrupt_ends_everything(studio, place):  # the last one: it stops the server of this file
    job = studio.job(**ENDLESS, budget=3.0)
    studio.until(job, "running")
    studio.job(kind="compile", text="x", domain="[0,1]", tolerance=0.1)
    workers = studio.workers()
    assert len(workers) >= 2 and list(place.iterdir())
    with socket.create_connection(("127.0.0.1", studio.port), timeout=5) as hanging:
        hanging.sendall(b"GET /")
        start = time.monotonic()
        assert studio.stop(signal.SIGINT) == (0, "", "")
    assert time.monotonic() - start < 10
    assert all_gone(workers) and not list(place.iterdir())
