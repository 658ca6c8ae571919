"""The command line. Results go to stdout, progress to stderr; every command accepts `--json`; usage errors exit 64.

Each command is a module of its own, imported when it is run: `partita --help` and `partita --version` do not load torch.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Annotated, Any

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

    Exit codes: 0 success, 1 refused or not true, 2 nothing is claimed (attack), 64 wrong usage.
    """


def _as_options(text: str, arguments: Sequence[str]) -> str:
    """Advice to Python's callers as advice to those of a command: `dtype=torch.float64` becomes `--dtype float64`.

    Only arguments that the command has options for are translated.
    """
    name = next((a for a in arguments if a in COMMANDS), None)
    command = None if name is None else _Commands().get_command(None, name)
    options = {p.name: p.opts[0] for p in command.params if p.opts[0].startswith("--")} if command is not None else {}
    if not options:
        return text

    def option(found: re.Match[str]) -> str:
        value = found["value"] or ""
        if value.startswith(("Tail(", "pa.Tail(")):
            value = "'" + ",".join(part.strip() for part in value[value.index("(") + 1 : -1].split(",")) + "'"
        return f"{options[found['name']]} {value.removeprefix('torch.').removeprefix('math.')}".rstrip()

    value = r"""(?P<value>'[^']*'|"[^"]*"|(?:pa\.)?Tail\([^()]*\)|…|[\w.+-]*\w)?"""
    text = re.sub(rf"\b(?P<name>{'|'.join(options)})=(?![=<>]){value}", option, text)
    for name in ("max_bytes", "max_value"):
        text = re.sub(rf"\b{name}\b", options.get(name, name), text)
    return text


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and exit: 64 for what cannot be read, 1 for what partita refuses, with the reason on stderr.

    Args:
        arguments: instead of those of the process.
    """
    command = typer.main.get_command(app)
    try:
        given = None if arguments is None else list(arguments)
        sys.exit(command.main(given, prog_name="partita", standalone_mode=False) or 0)
    except typer.Abort:
        sys.exit(130)
    except typer.Exit as stop:
        sys.exit(stop.exit_code)
    except PartitaError as error:
        _complain(
            f"{type(error).__name__}: {_as_options(str(error), sys.argv[1:] if arguments is None else arguments)}"
        )
        sys.exit(USAGE_ERROR if isinstance(error, DomainError | ExpressionError | UnsupportedError) else REFUSED)
    except OSError as error:
        _complain(f"{type(error).__name__}: {error}")
        sys.exit(REFUSED)
    except Exception as error:  # click's usage errors, whichever click typer uses
        if not hasattr(error, "format_message"):
            raise
        if type(error).__name__ == "NoArgsIsHelpError":
            print(error.format_message())
        else:
            _complain(f"{error.format_message()}\nTry 'partita --help'.")
        sys.exit(USAGE_ERROR)


def _complain(message: str) -> None:
    from partita.cli.common import stderr

    stderr.print(message, style="red", highlight=False, markup=False, soft_wrap=True)
