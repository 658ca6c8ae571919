"""The report of the experiments: what is claimed, what was run, the figure, what was found, also where the claim fails."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from partita.plots.html_blocks import Block, Code, Grid, Heading, Picture, Text, as_html, as_markdown
from partita.reproduction import Experiment, Finished, Table
from partita.storage.files import write_whole

__all__ = ["write_pages"]

_TITLE = "Two papers on softmax attention, reproduced"
_ROWS_SHOWN = 16
_PAPERS = {
    "2504.19901": "Attention Mechanism, Max-Affine Partition, and Universal Approximation (arXiv 2504.19901)",
    "2504.15956": "Universal Approximation with Softmax Attention (arXiv 2504.15956)",
}


def write_pages(
    out: Path, done: Sequence[tuple[Experiment, Finished]], *, missing: Sequence[str] = ()
) -> tuple[Path, Path]:
    """`report.md` and `report.html` in `out`, beside the experiments' folders."""
    blocks = [*_opening(done, missing), *(block for pair in done for block in _section(*pair, out))]
    places = (out / "report.md", out / "report.html")
    write_whole(places[0], as_markdown(blocks, out))
    write_whole(places[1], as_html(blocks, _TITLE))
    return places


def _opening(done: Sequence[tuple[Experiment, Finished]], missing: Sequence[str]) -> list[Block]:
    outcomes = ["none" if f.verdict is None else f.verdict.outcome for _, f in done]
    counts = {o: outcomes.count(o) for o in ("holds", "mixed", "fails")}
    rows = [[e.name, e.source, o, str(f.about["size"]), _time(f.about)] for (e, f), o in zip(done, outcomes)]
    blocks: list[Block] = [
        Heading(1, _TITLE),
        Text(
            f"Every verdict below was computed from the tables beside it by the criterion of its section: {counts['holds']} claims "
            f"hold, {counts['mixed']} hold in part, {counts['fails']} fail. Where a criterion was changed after the data had been "
            "seen, the section says so, with the verdict of the earlier one. Neither paper publishes tables, so trends are "
            "what can be matched. Each criterion has a synthetic control for which the claim is false, and the tests check that "
            "the criterion rejects it. Times are for one processor core unless a device is named."
        ),
        Code(
            "partita reproduce --all --out DIR --data IMAGES   # this page; --list shows the names, --full the large sizes"
        ),
        Grid(["experiment", "paper", "verdict", "size", "time"], rows),
    ]
    if "none" in outcomes:
        blocks.append(
            Text(f"{outcomes.count('none')} tiny runs carry no verdict: they show only that an experiment works.")
        )
    if missing:
        blocks.append(Text(f"Not run, because no image files were given: {', '.join(missing)}."))
    return blocks


def _section(experiment: Experiment, finished: Finished, out: Path) -> list[Block]:
    about = finished.about
    flags = f"{' --full' if about['size'] == 'full' else ' --tiny' if about['size'] == 'tiny' else ''}"
    flags += f" --seed {about['seed']}" + (" --data IMAGES" if experiment.needs_data else "")
    flags += f" --device {about['device']}" if about["device"] != "cpu" else ""
    paper = next((title for key, title in _PAPERS.items() if key in experiment.source), experiment.source)
    blocks: list[Block] = [
        Heading(2, experiment.title),
        Text(f"{paper}; {experiment.source.partition(', ')[2]}."),
        Text(experiment.claim, "Claimed."),
        *(Text(str(quotation), "Quoted.") for quotation in experiment.quotations),
        Text(experiment.method, "Run."),
        Text(experiment.criterion, "Criterion."),
        *([Text(experiment.amended, "Changed after the data had been seen.")] if experiment.amended else []),
    ]
    figure = out / experiment.name / "figure.svg"
    if figure.exists():
        blocks.append(Picture(figure, experiment.title))
    verdict = finished.verdict
    blocks += [
        Text("a tiny run shows only that the experiment works.", "No verdict:")
        if verdict is None
        else Text(verdict.sentence, f"Found: the claim {_SAID[verdict.outcome]}."),
        Code(f"partita reproduce {experiment.name}{flags}   # {_time(about)}, {about['size']} size"),
    ]
    if experiment.digest is not None:
        blocks.append(_grid(experiment.digest(finished.tables)))
    for name, table in finished.tables.items():
        if len(table) <= _ROWS_SHOWN:
            blocks.append(_grid(table))
        else:
            blocks.append(Text(f"{experiment.name}/{name}.csv: {len(table):,} rows of {', '.join(table.columns)}."))
    return blocks


def _time(about: Mapping[str, Any]) -> str:
    """What it cost: processor seconds, or the wall's on a device."""
    if about["device"] != "cpu" or "cpu_seconds" not in about:
        return f"{about['wall_seconds']:.0f} s on {about['device']}"
    return f"{about['cpu_seconds']:.0f} s"


_SAID = {"holds": "holds", "mixed": "holds in part", "fails": "fails"}


def _grid(table: Table) -> Grid:
    def shown(value: object) -> str:
        return f"{value:.4g}" if isinstance(value, float) else "–" if value is None else str(value)

    return Grid(list(table.columns), [[shown(v) for v in row.values()] for row in table.rows()])
