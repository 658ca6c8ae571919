"""The studio: a page in the browser to see attention cut space, and the local server behind it (`partita studio`).

`page/` is the front end: hand-written modules without a build step, which also run without a server in the documentation.
"""

from collections.abc import Callable
from pathlib import Path

from partita.errors import MissingExtraError

__all__ = ["PAGE", "serve"]

PAGE = Path(__file__).parent / "page"  # its files


def serve(port: int = 0, *, browser: bool = True, say: Callable[[str], str] = str) -> None:
    """Serve the studio on 127.0.0.1 until it is interrupted, and print its address on one line.

    Args:
        port: the port; 0 takes a free one.
        browser: whether to open the page in a browser.
        say: the line to print for an address.

    Raises:
        MissingExtraError: FastAPI or uvicorn is not installed.
        UnsupportedError: the port is in use, or may not be used.
    """
    try:
        from partita.studio.server import serve_until_stopped
    except ImportError as error:
        if (error.name or "").split(".")[0] not in ("fastapi", "starlette", "uvicorn", "h11", "pydantic"):
            raise
        raise MissingExtraError.of("the studio needs", "studio") from None
    serve_until_stopped(port, browser=browser, say=say)
