"""The command line: thin. Results on stdout, progress on stderr, `--json` everywhere, usage errors exit 64."""

from __future__ import annotations

import sys
from importlib import metadata
from typing import Annotated

import typer

from partita.cli.claim_commands import attack_command, bounds_command, verify_command
from partita.cli.common import REFUSED, USAGE_ERROR, parse_domain, stderr
from partita.cli.head_commands import compile_command, eval_command, export_command, plan_command, plot_command
from partita.cli.inspect_command import inspect_command
from partita.cli.reproduce_command import reproduce_command
from partita.errors import DomainError, ExpressionError, PartitaError, UnsupportedError

__all__ = ["app", "main", "parse_domain"]

app = typer.Typer(no_args_is_help=True, add_completion=False, rich_markup_mode=None)
app.command("plan", short_help="Sizes before anything is built, and why.")(plan_command)
app.command("compile")(compile_command)
app.command("eval")(eval_command)
app.command("plot")(plot_command)
app.command("export")(export_command)
app.command("verify", short_help="Re-do a certificate's hashes and arithmetic.")(verify_command)
app.command("attack", short_help="Search for a point that refutes the claim.")(attack_command)
app.command("bounds", short_help="Proved ranges, slopes, gradient errors.")(bounds_command)
app.command("reproduce", short_help="The papers' experiments, with verdicts.")(reproduce_command)
app.command("inspect")(inspect_command)


def _print_version(asked: bool) -> None:
    if asked:
        print(metadata.version("partita"))
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and leave.", is_eager=True, callback=_print_version)
    ] = False,
) -> None:
    """Compile functions into single attention layers with proved error bounds.

    Start with:  partita plan "sin(3*x0) + x0*cos(2*x1)" --domain "[-1,1]^2" --tolerance 0.05
    """


def main() -> None:
    """Run the command line: what cannot be read exits 64, what partita refuses exits 1, with the reason on stderr."""
    command = typer.main.get_command(app)
    try:
        sys.exit(command.main(standalone_mode=False) or 0)
    except typer.Abort:
        sys.exit(130)
    except typer.Exit as stop:
        sys.exit(stop.exit_code)
    except PartitaError as error:
        stderr.print(f"{type(error).__name__}: {error}", style="red", highlight=False, markup=False, soft_wrap=True)
        sys.exit(USAGE_ERROR if isinstance(error, (ExpressionError, DomainError, UnsupportedError)) else REFUSED)
    except OSError as error:
        stderr.print(f"{type(error).__name__}: {error}", style="red", highlight=False, markup=False, soft_wrap=True)
        sys.exit(REFUSED)
    except Exception as error:  # click's usage errors, whichever click typer uses
        if not hasattr(error, "format_message"):
            raise
        if type(error).__name__ == "NoArgsIsHelpError":
            print(error.format_message())
            sys.exit(USAGE_ERROR)
        stderr.print(
            f"{error.format_message()}\nTry 'partita --help'.",
            style="red",
            highlight=False,
            markup=False,
            soft_wrap=True,
        )
        sys.exit(USAGE_ERROR)


if __name__ == "__main__":
    main()
