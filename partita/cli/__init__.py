"""The command line. Results go to stdout, progress to stderr; every command accepts `--json`; usage errors exit 64.

Under `--json` an error is an object on stdout as well: `{"error": {"type": …, "message": …, "exit_code": …}}`.

Each command is a module of its own, imported when it is run: `partita --help` and `partita --version` do not load torch.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperGroup

import partita
from partita.cli.exits import REFUSED, USAGE_ERROR
from partita.errors import DomainError, ExpressionError, PartitaError, UnsupportedError

__all__ = ["COMMANDS", "app", "main"]

COMMANDS = {
    "plan": "Show the sizes before anything is built.",
    "compile": "Build a head, certify it, attack it, save it.",
    "head": "Build the head you choose, at any temperature.",
    "eval": "Evaluate a head at the points of a CSV file.",
    "plot": "Draw a head, its cells and its error.",
    "layers": "Write and draw every weight matrix of a head.",
    "export": "Write a head as an ONNX file.",
    "verify": "Check a certificate's hashes and arithmetic again.",
    "attack": "Search for a point where the claim is false.",
    "bounds": "Prove ranges, slopes and gradient errors.",
    "reproduce": "Run the papers' experiments.",
    "inspect": "Read the attention heads of a model.",
    "studio": "Open a page to drag keys, compile functions and follow lessons.",
}


class _Commands(TyperGroup):
    """A group whose commands are imported when they are run; `partita.cli.x_command.x_command` is the command x."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in COMMANDS:
            return None
        name = f"{cmd_name}_command"
        alone = typer.Typer(add_completion=False, rich_markup_mode=None)
        alone.command(cmd_name)(getattr(import_module(f"partita.cli.{name}"), name))
        return typer.main.get_command(alone)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))


app = typer.Typer(cls=_Commands, no_args_is_help=True, add_completion=False, rich_markup_mode=None)


def _print_version(asked: bool) -> None:
    if asked:
        print(partita.__version__)
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", is_eager=True, callback=_print_version)
    ] = False,
) -> None:
    """Compile functions into single attention layers with proved error bounds.

    Start with:  partita plan "sin(3*x0) + x0*cos(2*x1)" --domain "[-1,1]^2" --tolerance 0.05

    Exit codes: 0 success, 1 refused or not true, 2 nothing is claimed (attack), 64 wrong usage. With --json, errors are JSON too.
    """


def _as_options(text: str, arguments: Sequence[str]) -> str:
    """Advice to Python's callers as advice to those of a command: `dtype=torch.float64` becomes `--dtype float64`.

    Only arguments that the command or `partita compile` has options for are translated.
    """
    name = next((a for a in arguments if a in COMMANDS), None)
    if name is None:
        return text
    parameters = [p for c in ("compile", name) for p in _Commands().get_command(None, c).params]
    options: dict[str, str] = {p.name: p.opts[0] for p in parameters if p.opts[0].startswith("--")}
    flags = {p.name for p in parameters if getattr(p, "is_flag", False)}

    def option(found: re.Match[str]) -> str:
        name, value = str(found["name"]), found["value"] or ""
        if name in flags and value == "True":
            return options[name]
        if value.startswith(("Tail(", "pa.Tail(")):
            value = "'" + ",".join(part.strip() for part in value[value.index("(") + 1 : -1].split(",")) + "'"
        elif re.fullmatch(r"'[\w.+-]+'", value):
            value = value[1:-1]
        return f"{options[name]} {value.removeprefix('torch.').removeprefix('math.')}".rstrip()

    names = "|".join(options)
    value = r"""(?P<value>'[^']*'|"[^"]*"|(?:pa\.)?Tail\([^()]*\)|…|[\w.+-]*\w)?"""
    text = re.sub(rf"\b(?P<name>{names})=(?![=<>]){value}", option, text)
    text = re.sub(rf"^({names}) is ", lambda found: f"{options[found[1]]} is ", text)
    text = re.sub(r"\bpa\.Region\b", "--region", text)
    compound = "|".join(n for n in options if "_" in n)  # other names are words too
    return re.sub(rf"(?<![\w-])({compound})\b", lambda found: options[found[1]], text)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and exit: 64 for what cannot be read, 1 for what partita refuses, with the reason on stderr.

    Under `--json` the reason is an object on stdout instead.

    Args:
        arguments: instead of those of the process.
    """
    given = sys.argv[1:] if arguments is None else list(arguments)
    command = typer.main.get_command(app)
    try:
        sys.exit(command.main(given, prog_name="partita", standalone_mode=False) or 0)
    except typer.Abort:
        _stop("Aborted", "interrupted", 130, given, quietly=True)
    except typer.Exit as stop:
        sys.exit(stop.exit_code)
    except PartitaError as error:
        wrong = isinstance(error, DomainError | ExpressionError | UnsupportedError)
        _stop(type(error).__name__, _as_options(str(error), given), USAGE_ERROR if wrong else REFUSED, given)
    except OSError as error:
        _stop(type(error).__name__, str(error), REFUSED, given)
    except Exception as error:  # click's usage errors, whichever click typer uses
        if not hasattr(error, "format_message"):
            raise
        if type(error).__name__ == "NoArgsIsHelpError":
            print(error.format_message())
            sys.exit(USAGE_ERROR)
        _stop("", f"{error.format_message()}\nTry 'partita --help'.", USAGE_ERROR, given)


def _stop(kind: str, message: str, code: int, arguments: Sequence[str], *, quietly: bool = False) -> NoReturn:
    """Say why on stderr, or, under `--json`, on stdout as an object, and exit."""
    if "--json" in arguments:
        print(
            json.dumps(
                {"error": {"type": kind or "UsageError", "message": message, "exit_code": code}}, ensure_ascii=False
            )
        )
    elif not quietly:
        from partita.cli.common import stderr

        text = f"{kind}: {message}" if kind else message
        stderr.print(text, style="red", highlight=False, markup=False, soft_wrap=True)
    sys.exit(code)
