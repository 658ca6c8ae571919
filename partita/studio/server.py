"""The studio's server: routes, the token, Host and Origin, sizes, headers, and how it starts and stops.

It binds to 127.0.0.1 alone. Everything but the page's own files needs the token of the address that was printed. No path
from a request reaches the file system: files are looked up in tables by name or id. Heavy modules are never imported here;
worker processes parse, evaluate and compile (`jobs.py`, `work.py`).
"""

from __future__ import annotations

import asyncio
import errno
import hmac
import json
import re
import secrets
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
import webbrowser
from collections.abc import AsyncIterator, Awaitable, Callable, MutableMapping
from contextlib import asynccontextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import parse_qsl

import uvicorn
from fastapi import FastAPI, Request, Response
from starlette.exceptions import HTTPException
from uvicorn.protocols.http.h11_impl import H11Protocol

import partita.errors
from partita.errors import UnsupportedError
from partita.studio import PAGE
from partita.studio.jobs import (
    LIMITS,
    MOST_DOMAIN,
    MOST_GRID,
    MOST_KEYS,
    MOST_POINTS,
    MOST_TEXT,
    Full,
    Job,
    Jobs,
    Limits,
    Stored,
    plain_error,
)

__all__ = ["METHODS_SAY", "Studio", "serve_until_stopped"]

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

METHODS_SAY = {
    "auto": "Compares the methods that apply and takes the smallest head.",
    "pieces": "One key per affine piece, for piecewise affine functions.",
    "two_keys": "Two keys: tanh, sigmoid and SiLU exactly, a product of two factors nearly.",
    "lines": "A few lines, for functions of one variable that are straight at both ends.",
    "fitted": "Values from a least-squares fit, at a soft temperature.",
    "hard": "f at the centers, temperature near 0, as in the paper.",
    "affine": "f and its slopes in every cell.",
    "convex": "A maximum of planes, for convex or concave functions.",
    "adaptive": "Affine values on scattered centers, placed where they are needed.",
    "heads": "Several heads in one layer, one per term of a sum.",
    "layers": "Several layers of heads, for functions of functions.",
    "tuned": "f at the centers, at the best temperature.",
    "corrected": "As tuned, with the bias of the softmax subtracted.",
    "train": "A tensor train, for many dimensions.",
    "paper": "The grid, the temperature and the values of the paper's proof, corrected.",
}
DOWNLOADS = {"head": ".zip", "onnx": ".onnx", "svg": ".svg", "png": ".png"}
_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".json": "application/json",
    ".svg": "image/svg+xml",
    ".png": "image/png",
    ".txt": "text/plain; charset=utf-8",
}
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_HEADERS = {
    "Content-Security-Policy": _POLICY,
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), microphone=(), geolocation=()",
}
_ID = re.compile(r"[A-Za-z0-9_-]{22}", re.ASCII)
_LONGEST_URL, _LARGEST_HEADERS = 8_192, 16_384
_IDLE = 15  # seconds that a connection may stay open unused


class Refused(Exception):
    """A request that is answered with an error."""

    def __init__(self, status: int, kind: str, message: str, where: str | None = None, **headers: str) -> None:
        super().__init__(message)
        self.status, self.error = status, plain_error(kind, message, where)
        self.headers = {name.replace("_", "-"): value for name, value in headers.items()}


def _encoded(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False, allow_nan=False).encode()


def _json(body: bytes, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(body, status, headers, media_type="application/json")


class Guard:
    """The door in front of every route: address, Host, Origin, token, and the headers of every answer."""

    def __init__(self, app: Any, token: str, port: int) -> None:
        self.app, self.token = app, token.encode()
        self.hosts = {f"127.0.0.1:{port}", f"localhost:{port}"}
        self.origins = {f"http://{host}" for host in self.hosts}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        is_api = scope["path"].startswith("/api/")

        async def guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                named = {name.lower() for name, _ in message["headers"]}
                extra = {**_HEADERS, "Cache-Control": "no-store" if is_api else "no-cache"}
                message["headers"] = [
                    *message["headers"],
                    *((k.encode(), v.encode()) for k, v in extra.items() if k.lower().encode() not in named),
                ]
            await send(message)

        try:
            self._check(scope, is_api=is_api)
        except Refused as refused:  # its body, if it has one, is not read
            refused.headers["Connection"] = "close"
            answer = _refusal(refused)
            if scope["path"] == "/":
                answer = Response(f"{refused}\n", refused.status, refused.headers, media_type="text/plain")
            await answer(scope, receive, guarded)
            return
        await self.app(scope, receive, guarded)

    def _check(self, scope: Scope, *, is_api: bool) -> None:
        headers: dict[bytes, list[str]] = {}
        for name, value in scope["headers"]:
            headers.setdefault(name.lower(), []).append(value.decode("latin-1"))
        if len(scope["raw_path"]) + len(scope["query_string"]) > _LONGEST_URL:
            raise Refused(414, "TooLarge", f"The address has more than {_LONGEST_URL:,} characters.")
        if sum(len(name) + len(value) for name, value in scope["headers"]) > _LARGEST_HEADERS:
            raise Refused(431, "TooLarge", f"The headers have more than {_LARGEST_HEADERS:,} characters.")
        if headers.get(b"host", [""]) not in [[host] for host in self.hosts]:
            raise Refused(403, "Forbidden", f"The studio answers at {' and '.join(sorted(self.hosts))} only.")
        if any(origin not in self.origins for origin in headers.get(b"origin", [])):
            raise Refused(
                403, "Forbidden", "This request comes from another page. The studio answers its own page only."
            )
        is_page = scope["path"] == "/"
        if not is_page and any(s not in ("same-origin", "none") for s in headers.get(b"sec-fetch-site", [])):
            raise Refused(
                403, "Forbidden", "This request comes from another site. The studio answers its own page only."
            )
        if is_page:
            query = parse_qsl(scope["query_string"].decode("latin-1"), keep_blank_values=True)
            self._check_token([value for name, value in query if name == "token"])
        elif is_api:
            self._check_token(headers.get(b"x-partita-token", []))

    def _check_token(self, given: list[str]) -> None:
        if len(given) != 1 or not hmac.compare_digest(given[0].encode(), self.token):
            said = "Open the address that `partita studio` printed, with its token."
            raise Refused(403, "Forbidden", f"The token is missing or wrong. {said}")


def _refusal(refused: Refused) -> Response:
    return _json(_encoded({"error": refused.error}), refused.status, {**refused.headers})


class Studio:
    """The application: the routes over a table of the page's files and the jobs."""

    def __init__(self, folder: Path, limits: Limits = LIMITS) -> None:
        self.folder, self.limits = folder, limits
        for name in ("heads", "downloads"):
            (folder / name).mkdir()
        self.jobs = Jobs(folder, limits)
        self.page = {p.name: (p.read_bytes(), _TYPES[p.suffix]) for p in PAGE.iterdir() if p.suffix in _TYPES}
        self.reading = 0  # bytes of bodies that are being read

    def routes(self) -> FastAPI:
        app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None, redirect_slashes=False)
        app.add_api_route("/", self.index, methods=["GET"])
        app.add_api_route("/api/hello", self.hello, methods=["GET"])
        app.add_api_route("/api/function", self.function, methods=["POST"])
        app.add_api_route("/api/sample", self.sample, methods=["POST"])
        app.add_api_route("/api/jobs", self.submit, methods=["POST"], status_code=202)
        app.add_api_route("/api/jobs/{job_id}", self.job, methods=["GET"])
        app.add_api_route("/api/jobs/{job_id}", self.cancel, methods=["DELETE"])
        app.add_api_route("/api/downloads/{download_id}", self.download, methods=["GET"])
        app.add_api_route("/{name}", self.file, methods=["GET"])
        app.add_exception_handler(Refused, _on_refused)
        app.add_exception_handler(HTTPException, _on_http)
        app.add_exception_handler(Exception, _on_bug)
        return app

    async def index(self) -> Response:
        return await self.file("index.html")

    async def file(self, name: str) -> Response:
        if name not in self.page:
            raise Refused(404, "NotFound", "There is no such file.")
        data, kind = self.page[name]
        return Response(data, headers={"Content-Type": kind})

    async def hello(self) -> Response:
        limits = self.limits
        told = {
            "version": partita.__version__,
            "methods": [{"name": name, "says": says} for name, says in METHODS_SAY.items()],
            "limits": {
                "body_bytes": limits.body,
                "text": MOST_TEXT,
                "domain": MOST_DOMAIN,
                "points": MOST_POINTS,
                "grid": MOST_GRID,
                "keys": MOST_KEYS,
                "memory_bytes": limits.memory,
                "waiting": limits.waiting,
                "seconds": {
                    k: getattr(limits, k) for k in ("function", "sample", "bound", "compile", "check", "export")
                },
                "default_seconds": {"bound": limits.default_bound, "compile": limits.default_compile},
            },
            "downloads": list(DOWNLOADS),
        }
        return _json(_encoded(told))

    async def function(self, request: Request) -> Response:
        _, body = await self._asked(request)
        return await self._answer(request, Job("function", {}, body, _client(request), self.limits.function))

    async def sample(self, request: Request) -> Response:
        asked, body = await self._asked(request)
        given = {} if asked.get("head") is None else {"folder": str(self._head(asked).place / "head")}
        return await self._answer(request, Job("sample", given, body, _client(request), self.limits.sample))

    async def _answer(self, request: Request, job: Job) -> Response:
        """The result of quick work, in the same request. A client that goes away takes its job along."""
        self._put(job)
        gone, over = asyncio.ensure_future(_gone(request)), asyncio.ensure_future(job.over.wait())
        try:
            await asyncio.wait([gone, over], return_when=asyncio.FIRST_COMPLETED)
        finally:
            gone.cancel()
            over.cancel()
            self.jobs.cancel(job)
            self.jobs.drop(job)
        if job.state == "done":
            return _json(job.result)
        error = job.error or plain_error("Cancelled", "The request was cancelled.")
        return _json(_encoded({"error": error}), job.status if job.error else 499)

    async def submit(self, request: Request) -> Response:
        asked, body = await self._asked(request)
        kind = asked.get("kind")
        if kind not in ("bound", "compile", "check", "export"):
            raise Refused(422, "RequestError", "The field 'kind' is not bound, compile, check or export.", "kind")
        limits, job = self.limits, Job(kind, {}, body, _client(request), 0.0)
        if kind == "bound":
            job.seconds = _seconds(asked, "seconds", limits.default_bound, limits.bound)
        elif kind == "compile":
            job.seconds = _seconds(asked, "budget", limits.default_compile, limits.compile)
            job.place = self.folder / "heads" / job.id
            job.given = {"head_id": job.id, "place": str(job.place / "head")}
            job.keep = self._keep_head
        else:
            job.given = {"folder": str(self._head(asked).place / "head")}
            job.seconds = limits.check if kind == "check" else limits.export
        if kind == "export":
            what = asked.get("what")
            if not isinstance(what, str) or what not in DOWNLOADS:
                raise Refused(422, "RequestError", f"The field 'what' is not one of {', '.join(DOWNLOADS)}.", "what")
            job.place = self.folder / "downloads" / f"{job.id}{DOWNLOADS[what]}"
            name = f"partita-head{DOWNLOADS[what]}"
            job.given |= {"what": what, "place": str(job.place), "download": job.id, "name": name}
            job.keep = self._keep_download
        job.given["seconds"] = job.seconds
        self._put(job)
        return _json(_encoded({"id": job.id}), 202)

    def _keep_head(self, job: Job) -> None:
        assert job.place is not None
        size = sum(p.stat().st_size for p in job.place.rglob("*") if p.is_file())
        self.jobs.heads.put(job.id, Stored(job.place, size))

    def _keep_download(self, job: Job) -> None:
        assert job.place is not None
        self.jobs.downloads.put(job.id, Stored(job.place, job.place.stat().st_size, job.given["name"]))

    async def job(self, job_id: str) -> Response:
        job = self._known(job_id)
        place = self.jobs.place(job)
        parts = [f'{{"state":"{job.state}","place":{place},"progress":'.encode(), job.progress]
        if job.state == "done":
            parts += [b',"result":', job.result]
        if job.error is not None:
            parts += [b',"error":', _encoded(job.error)]
        return _json(b"".join([*parts, b"}"]))

    async def cancel(self, job_id: str) -> Response:
        job = self._known(job_id)
        self.jobs.cancel(job)
        return _json(_encoded({"state": job.state}))

    async def download(self, download_id: str) -> Response:
        stored = self.jobs.downloads.get(_require_id(download_id))
        if stored is None:
            raise Refused(410, "Gone", "This file is no longer kept. Export the head again.")
        headers = {"Content-Disposition": f'attachment; filename="{stored.name}"'}
        data = await asyncio.to_thread(stored.place.read_bytes)
        return Response(data, headers=headers, media_type="application/octet-stream")

    def _known(self, job_id: str) -> Job:
        job = self.jobs.jobs.get(_require_id(job_id))
        if job is None:
            raise Refused(410, "Gone", "This job is no longer kept: it finished long ago, or the studio was restarted.")
        return job

    def _head(self, asked: dict[str, Any]) -> Stored:
        head_id = asked.get("head")
        stored = self.jobs.heads.get(_require_id(head_id)) if isinstance(head_id, str) else None
        if stored is None:
            raise Refused(410, "Gone", "This head is no longer kept. Compile it again.", "head")
        return stored

    def _put(self, job: Job) -> None:
        try:
            self.jobs.put(job)
        except Full as full:
            error = Refused(503, "Busy", str(full), Retry_After=str(full.seconds))
            error.error["place"] = full.waiting + 1
            raise error from None

    async def _asked(self, request: Request) -> tuple[dict[str, Any], bytes]:
        """The JSON object of a request, and its bytes."""
        if request.headers.get("content-type", "").split(";")[0].strip().lower() != "application/json":
            raise Refused(415, "RequestError", "The request is not application/json.", Connection="close")
        body = await self._body(request)
        try:
            asked = json.loads(body, parse_constant=_no_constant)
        except RecursionError:
            raise Refused(422, "RequestError", "The request is nested too deeply.") from None
        except ValueError as error:
            raise Refused(422, "RequestError", f"The request is not JSON: {str(error)[:200]}.") from None
        if not isinstance(asked, dict):
            raise Refused(422, "RequestError", "The request is not a JSON object.")
        return asked, body

    async def _body(self, request: Request) -> bytes:
        most, parts, size = self.limits.body, list[bytes](), 0
        large = Refused(413, "TooLarge", f"The request has more than {most:,} bytes.", Connection="close")
        said = request.headers.get("content-length", "0")
        if not said.isdecimal() or len(said) > 12 or int(said) > most:
            raise large
        try:
            async with asyncio.timeout(self.limits.arrival):
                async for part in request.stream():
                    size += len(part)
                    self.reading += len(part)
                    parts.append(part)
                    if size > most:
                        raise large
                    if self.reading > self.limits.bodies:
                        raise Refused(
                            503, "Busy", "The studio is busy. Try again.", Retry_After="1", Connection="close"
                        )
        except TimeoutError:
            said = f"The request took more than {self.limits.arrival:g} seconds to arrive."
            raise Refused(408, "TimeError", said, Connection="close") from None
        finally:
            self.reading -= size
        return b"".join(parts)


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not a number in JSON")


def _require_id(text: str) -> str:
    if not _ID.fullmatch(text):
        raise Refused(404, "NotFound", "There is nothing with this id.")
    return text


def _seconds(asked: dict[str, Any], name: str, default: float, most: float) -> float:
    value = asked.get(name)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= most:
        said = f"The field {name!r} is not a number of seconds from 0 to {most:g}."
        raise Refused(422, "RequestError", said, name)
    return float(value)


def _client(request: Request) -> str:
    """Who asks: a name that the page chose, so that tabs take turns."""
    return request.headers.get("x-partita-client", "")[:64]


async def _gone(request: Request) -> None:
    """Until the client closes its connection. The body has been read."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _on_refused(request: Request, refused: Exception) -> Response:
    assert isinstance(refused, Refused)
    return _refusal(refused)


async def _on_http(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    said = {404: "There is nothing at this address.", 405: "This address does not accept this kind of request."}
    return _refusal(Refused(error.status_code, "NotFound", said.get(error.status_code, str(error.detail))))


async def _on_bug(request: Request, error: Exception) -> Response:
    with suppress(OSError):  # nobody may be reading
        traceback.print_exception(error)
    return _refusal(Refused(500, "InternalError", "A bug in the studio's server stopped this request."))


class Connection(H11Protocol):
    """uvicorn's connection, with a limit on their number and on the time that a slow or silent client may hold one."""

    limits: ClassVar[Limits]

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self.partial, self.left = (
            True,
            0,
        )  # whether a request is arriving, and the bytes of an answer that were not taken
        self.since = time.monotonic()
        if len(self.connections) > self.limits.connections:
            error = plain_error("Busy", f"The studio has {self.limits.connections} connections open. Try again.")
            body = _encoded({"error": error})
            head = f"HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
            transport.write(head.encode() + b"\r\nRetry-After: 1\r\nConnection: close\r\n\r\n" + body)
            transport.close()
        self._watch()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        arriving = not self._is_working()
        if arriving and not self.partial:
            self.since = time.monotonic()
        self.partial = arriving

    def _is_working(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _watch(self) -> None:
        """Every second: end a connection whose request does not arrive, or whose answer is not taken, in time."""
        left, now = self.transport.get_write_buffer_size(), time.monotonic()
        if self._is_working() or not (self.partial or left) or left < self.left:
            self.since = now
        self.left = left
        if now - self.since > self.limits.arrival:
            self.transport.abort()
        elif left or not self.transport.is_closing():
            self.loop.call_later(1.0, self._watch)


class _Server(uvicorn.Server):
    """uvicorn's server, which says when it is ready and leaves signals to us."""

    def __init__(self, config: uvicorn.Config, ready: Callable[[], None]) -> None:
        super().__init__(config)
        self.ready = ready

    def capture_signals(self) -> Any:
        return nullcontext()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.ready()


def _bound_socket(port: int) -> socket.socket:
    """A socket on 127.0.0.1, at the port or at a free one."""
    if not 0 <= port <= 65_535:
        raise UnsupportedError(f"port is {port}; expected a number from 0 to 65535, 0 for any free one.")
    found = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    if sys.platform != "win32":
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        found.bind(("127.0.0.1", port))
    except OSError as error:
        found.close()
        reason = {errno.EADDRINUSE: "is in use", errno.EACCES: "may not be used"}.get(error.errno or 0, str(error))
        raise UnsupportedError(f"port {port} {reason}", "Choose another, or leave --port out for a free one.") from None
    return found


@asynccontextmanager
async def _stopping(server: _Server) -> AsyncIterator[None]:
    """Ctrl-C, SIGTERM and a closed terminal end the server; a second one does not wait for connections."""
    loop = asyncio.get_running_loop()

    def stop(*_: Any) -> None:
        server.force_exit = server.should_exit
        server.should_exit = True

    old = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    hangup = getattr(signal, "SIGHUP", None)  # not on Windows
    if hangup is not None and signal.getsignal(hangup) is not signal.SIG_IGN:  # nohup
        old[hangup] = signal.getsignal(hangup)
    for number in old:
        signal.signal(number, lambda *_: loop.call_soon_threadsafe(stop))
    try:
        yield
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)


def serve_until_stopped(port: int, *, browser: bool, say: Callable[[str], str] = str, limits: Limits = LIMITS) -> None:
    """What `partita.studio.serve` does, FastAPI and uvicorn being installed."""
    listening, token = _bound_socket(port), secrets.token_urlsafe(24)
    number = listening.getsockname()[1]
    address = f"http://127.0.0.1:{number}/?token={token}"
    folder = Path(tempfile.mkdtemp(prefix="partita-studio-"))

    def ready() -> None:
        with suppress(OSError):
            print(say(address), flush=True)
        if browser:
            threading.Thread(target=webbrowser.open, args=(address,), daemon=True).start()

    async def run() -> None:
        studio = Studio(folder, limits)
        config = uvicorn.Config(
            Guard(studio.routes(), token, number),
            http=type("Limited", (Connection,), {"limits": limits}),
            ws="none",
            loop="asyncio",
            lifespan="off",
            interface="asgi3",
            log_config=None,
            log_level="critical",
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_keep_alive=_IDLE,
            timeout_graceful_shutdown=1,
            h11_max_incomplete_event_size=_LARGEST_HEADERS,
        )
        server = _Server(config, ready)
        async with _stopping(server):
            studio.jobs.start()
            try:
                await server.serve(sockets=[listening])
            finally:
                await studio.jobs.close()

    try:
        asyncio.run(run())
    finally:
        listening.close()
        shutil.rmtree(folder, ignore_errors=True)
