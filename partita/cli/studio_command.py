"""The command `partita studio`: a page in the browser, served on this machine alone."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from partita.studio import serve

__all__ = ["studio_command"]


def _as_json(address: str) -> str:
    return json.dumps({"address": address})


def studio_command(
    browser: Annotated[bool, typer.Option("--browser/--no-browser", help="Open the page in a browser.")] = True,
    port: Annotated[
        int, typer.Option("--port", min=0, max=65535, help="The port on 127.0.0.1.", show_default="a free one")
    ] = 0,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the address as one JSON object on stdout instead of text.")
    ] = False,
) -> None:
    """Open a page in the browser where you drag keys, compile functions and follow lessons.

    Prints its address on one line and serves until Ctrl-C. The address contains a random token, and calls without it are
    refused. Only this machine can connect, and nothing is loaded from elsewhere. What you compile is deleted when the studio
    stops, so download what you want to keep.
    """
    serve(port, browser=browser, say=_as_json if as_json else str)
