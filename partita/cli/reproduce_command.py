"""The command `partita reproduce`: run experiments, draw figures, print verdicts, write the page."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Table as Printed

from partita.cli.common import AsJson, Seed, stderr, stdout
from partita.errors import DataFileError, UnsupportedError
from partita.reproduction import EXPERIMENTS, Experiment, Finished, Order, find_experiment, run_experiment
from partita.reproduction.download import download_images
from partita.reproduction.figure_list import draw_figure
from partita.reproduction.image_files import IMAGE_SETS
from partita.reproduction.page import write_pages

__all__ = ["reproduce_command"]

_OUT, _FIGURE = Path("reproduction"), "figure.svg"
_COLOUR = {"holds": "green", "mixed": "yellow", "fails": "red"}


def reproduce_command(
    names: Annotated[
        list[str] | None, typer.Argument(metavar="NAME…", help="Names of experiments; --list shows them.")
    ] = None,
    all_: Annotated[bool, typer.Option("--all", help="Run every experiment and write a report.")] = False,
    list_: Annotated[
        bool, typer.Option("--list", help="List the experiments: where they are in the papers and how long they take.")
    ] = False,
    full: Annotated[bool, typer.Option("--full", help="Run the large size (some experiments want a GPU).")] = False,
    tiny: Annotated[
        bool, typer.Option("--tiny", help="Run for a few seconds, to see that it works; there is no verdict.")
    ] = False,
    seed: Seed = 0,
    out: Annotated[Path, typer.Option("--out", help="The folder to write.")] = _OUT,
    data: Annotated[
        Path | None, typer.Option("--data", help="The folder of the image files (weight-scale, noise-mechanism).")
    ] = None,
    download: Annotated[bool, typer.Option("--download", help="Download image files that are not in --data.")] = False,
    device: Annotated[str, typer.Option("--device", help="cpu or cuda: where networks are trained.")] = "cpu",
    again: Annotated[bool, typer.Option("--again", help="Run finished experiments again.")] = False,
    figures: Annotated[
        bool, typer.Option("--figures/--no-figures", help="Draw figures (needs the extra 'plot').")
    ] = True,
    as_json: AsJson = False,
) -> None:
    """Reproduce the papers' figures: a table, a figure and a verdict each; with --all also report.md and report.html.

    Finished experiments are kept: an interrupted run continues where it stopped.
    """
    if list_:
        _print_list(as_json)
        return
    if all_ == bool(names) or (full and tiny):
        raise UnsupportedError("expected NAME… or --all (see --list), and not both of --full and --tiny.")
    chosen = list(EXPERIMENTS.values()) if all_ else [find_experiment(name) for name in names or []]
    if download:
        _download(data)
    size = "full" if full else "tiny" if tiny else "default"
    order = Order(out, size, seed, data, device, again)
    if all_ and data is None:
        chosen = [e for e in chosen if not e.needs_data or _is_there(e, order)]
    done = _run_all(chosen, order, figures=figures)
    left = [e.name for e in EXPERIMENTS.values() if all_ and e not in chosen]
    pages = write_pages(out, [(find_experiment(f.name), f) for f in done], missing=left) if all_ else ()
    for finished in () if as_json else done:
        _print_verdict(finished, out / finished.name)
    if as_json:
        print(
            json.dumps(
                {f.name: {**f.about, "verdict": f.verdict and asdict(f.verdict)} for f in done}, ensure_ascii=False
            )
        )
    for name in left:
        stderr.print(
            f"{name} was not run: it needs image files (--data DIR, --download).", style="yellow", highlight=False
        )
    if pages and not as_json:
        stdout.print(f"wrote {' and '.join(map(str, pages))}", highlight=False, soft_wrap=True)


def _print_verdict(finished: Finished, folder: Path) -> None:
    verdict = finished.verdict
    outcome, colour = ("tiny", "dim") if verdict is None else (verdict.outcome, _COLOUR[verdict.outcome])
    said = "No verdict: a tiny run shows only that the experiment works." if verdict is None else verdict.sentence
    stdout.print(f"[{colour}]{outcome:5}[/] [bold]{finished.name}[/]", highlight=False)
    stdout.print(f"      {said}", highlight=False, markup=False, soft_wrap=True)
    stdout.print(f"      {folder}", style="dim", highlight=False, markup=False, soft_wrap=True)


def _is_there(experiment: Experiment, order: Order) -> bool:
    from partita.reproduction.results import find_finished

    return not order.again and find_finished(experiment, order.size, order.seed, order.out) is not None


def _print_list(as_json: bool) -> None:
    if as_json:
        listed = [
            {"name": e.name, "title": e.title, "source": e.source, "claim": e.claim} for e in EXPERIMENTS.values()
        ]
        print(json.dumps(listed, ensure_ascii=False))
        return
    table = Printed(box=None, pad_edge=False)
    for heading in ("name", "what", "where", "seconds"):
        table.add_column(heading, justify="right" if heading == "seconds" else "left", no_wrap=heading == "name")
    for e in EXPERIMENTS.values():
        table.add_row(e.name, e.title, e.source, f"{e.seconds['default']:.0f}")
    stdout.print(table)


def _download(data: Path | None) -> None:
    if data is None:
        raise DataFileError("--download needs --data DIR, the folder to fetch the image files into.")
    for name in IMAGE_SETS:
        with stderr.status(f"looking for {name} in {data}, fetching it if needed"):
            download_images(data, name)


def _run_all(chosen: list[Experiment], order: Order, *, figures: bool) -> list[Finished]:
    done: list[Finished] = []
    with _bars(chosen, order.size) as show:
        for experiment in chosen:
            report = show(experiment)
            finished, there = run_experiment(experiment, order, report)
            report(1, 1)
            done.append(finished)
            place = order.out / experiment.name / _FIGURE
            if figures and not (there and place.exists()):
                draw_figure(experiment.name, finished.tables, place)
            when = "finished before" if there else f"{finished.about['wall_seconds']:.0f} s"
            stderr.print(f"{experiment.name} ({when})", highlight=False)
    return done


@contextmanager
def _bars(chosen: list[Experiment], size: str) -> Iterator[Any]:
    """A bar of the experiment that runs and one of all of them, weighted by how long each is expected to take."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.percentage:3.0f}%"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=stderr, transient=True) as bar:
        whole = bar.add_task("all", total=sum(e.seconds[size] for e in chosen), visible=len(chosen) > 1)
        one: TaskID | None = None
        before = 0.0

        def show(experiment: Experiment) -> Any:
            nonlocal one, before
            if one is not None:
                bar.remove_task(one)
            one = bar.add_task(experiment.name, total=1.0)
            begun, before = before, before + experiment.seconds[size]

            def report(done: float, of: float) -> None:
                bar.update(one, completed=done / of)
                bar.update(whole, completed=begun + done / of * experiment.seconds[size])

            return report

        yield show
