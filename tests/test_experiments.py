"""Every experiment: tiny runs on data made here, verdicts that can say no, runs that survive interruptions, pages and figures."""

import csv
import io
import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.special import lambertw
from test_data_files import write_sets
from typer.testing import CliRunner

import partita as pa
from partita.cli import app
from partita.errors import DataFileError, FormatError, ShapeError, UnsupportedError
from partita.geometry import MaxAffine
from partita.reproduction import EXPERIMENTS, Order, Setup, Table, find_experiment, read_finished, run_experiment
from partita.reproduction.batched import BatchedAdam, spectral_norms
from partita.reproduction.distribution_shift import outside_reach, points_outside
from partita.reproduction.figure_list import FIGURES, draw_figure
from partita.reproduction.function_heads import FunctionHeads, TokenHeads, cells_found, turning_points
from partita.reproduction.image_models import Copy, Schedule, train_copies
from partita.reproduction.page import write_pages
from partita.reproduction.results import find_finished
from partita.reproduction.robustness import LayerTensors
from partita.reproduction.sequence_models import Job, NetworkShape, Task, _Networks, train_networks
from partita.reproduction.statistics import against_decline, log_slope, more_often, rank_correlation, slope

NAMES = list(EXPERIMENTS)


@pytest.fixture(scope="session")
def images(tmp_path_factory):
    return write_sets(tmp_path_factory.mktemp("images"))


@pytest.fixture(scope="session")
def tiny(images):
    """The tables of every experiment in its tiny size, each run once."""
    kept = {}

    def run(name):
        if name not in kept:
            e = EXPERIMENTS[name]
            kept[name] = e.run(Setup(e.settings["tiny"], data=images))
        return kept[name]

    return run


def test_every_experiment_is_described_and_has_a_figure():
    assert set(FIGURES) == set(NAMES)
    for e in EXPERIMENTS.values():
        assert re.fullmatch(r"[a-z0-9-]+", e.name) and all((e.title, e.source, e.claim, e.criterion, e.method))
        assert e.seconds["default"] <= 240
    assert sum(e.seconds["default"] for e in EXPERIMENTS.values()) <= 900  # a quarter of an hour


@pytest.mark.parametrize("name", NAMES)
def test_a_tiny_run_is_judged_drawn_and_written(name, tiny, tmp_path):
    tables = tiny(name)
    verdict = EXPERIMENTS[name].verdict(tables)
    assert verdict.outcome in ("holds", "mixed", "fails") and verdict.sentence
    assert all(np.isfinite(v) or np.isnan(v) for v in verdict.numbers.values())
    figure = draw_figure(name, tables, tmp_path / "f.svg").read_text()
    assert (figure.startswith("<?xml") and "<image" not in figure) or name in ("attention-maps",)
    again = {n: Table.from_csv(t.to_csv()) for n, t in tables.items()}
    assert EXPERIMENTS[name].verdict(again) == verdict  # what is judged is what is written


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", NAMES)
def test_the_verdict_says_no_where_the_claim_is_false(name, seed):
    assert EXPERIMENTS[name].verdict(EXPERIMENTS[name].control(seed)).outcome == "fails"


CLAIMS_THAT_MUST_HOLD = (
    "partition",
    "dimension",
    "small-domains",
    "positions",
    "heads-and-layers",
    "in-context",
)  # theorems: also in the tiny size


@pytest.mark.parametrize("name", CLAIMS_THAT_MUST_HOLD)
def test_what_is_a_theorem_holds_in_the_tiny_size(name, tiny):
    assert EXPERIMENTS[name].verdict(tiny(name)).outcome == "holds"


@pytest.mark.parametrize("name", ["weight-scale", "step-function", "ramp-rate", "in-context"])
def test_a_seed_decides_everything(name, tiny, images):
    e = EXPERIMENTS[name]
    once, twice = tiny(name), e.run(Setup(e.settings["tiny"], data=images))
    other = e.run(Setup(e.settings["tiny"], seed=1, data=images))
    assert all(once[n].to_csv() == twice[n].to_csv() for n in once)
    assert any(once[n].to_csv() != other[n].to_csv() for n in once)


def scaled_norms(factor):
    """The control of weight-scale, its norms multiplied by a function of the level."""
    norms = EXPERIMENTS["weight-scale"].control(0)["norms"]
    columns = dict(norms.columns)
    for name in ("w_k_frobenius", "w_q_frobenius"):
        columns[name] = tuple(w * factor(x) for w, x in zip(columns[name], columns["level"]))
    return {"norms": Table(columns)}


def test_weight_scale_says_yes_where_the_claim_is_true():
    """The other control: norms that do fall, and without a rise."""
    verdict = EXPERIMENTS["weight-scale"].verdict(scaled_norms(lambda x: 1 - 0.5 * x))
    assert verdict.outcome == "holds" and verdict.numbers["not_monotone"] == 0


def test_norms_that_first_rise_do_not_decline_monotonically():
    """They fall by the rank test and by the ends, as those of the paper's setting do, but the caption says monotonically."""
    verdict = EXPERIMENTS["weight-scale"].verdict(scaled_norms(lambda x: 1 + x if x < 0.24 else 1.48 - x))
    assert verdict.outcome == "mixed"
    assert (verdict.numbers["by_rank"], verdict.numbers["by_ends"], verdict.numbers["not_monotone"]) == (4, 4, 4)


def test_spectral_norms_do_not_decide_about_figure_3():
    norms = EXPERIMENTS["weight-scale"].control(0)["norms"]
    columns = dict(norms.columns)
    for name in ("w_k", "w_q"):
        columns[name] = tuple(w * (1 - 0.5 * x) for w, x in zip(columns[name], columns["level"]))
    assert EXPERIMENTS["weight-scale"].verdict({"norms": Table(columns)}).outcome == "fails"


@pytest.mark.parametrize(
    "name, table, column", [("robustness", "perturbations", "predicted_used"), ("distribution-shift", "shift", "error")]
)
def test_a_broken_bound_of_ours_fails_the_verdict(name, table, column, tiny):
    tables = dict(tiny(name))
    columns = dict(tables[table].columns)
    columns[column] = (*columns[column][:-1], 1e3)
    assert EXPERIMENTS[name].verdict(tables).outcome != "fails"
    assert EXPERIMENTS[name].verdict({table: Table(columns)}).outcome == "fails"


# running, resuming, interrupting


def order(tmp_path, **more):
    return Order(tmp_path / "out", "tiny", **more)


def quick(name):
    """The experiment with its tiny settings as its default size: such a run has a verdict."""
    e = EXPERIMENTS[name]
    return replace(e, settings=dict(e.settings) | {"default": e.settings["tiny"]})


def test_a_finished_run_is_not_run_again(tmp_path):
    e = EXPERIMENTS["stability"]
    first, there = run_experiment(e, order(tmp_path))
    assert not there and first.verdict is None
    judged, _ = run_experiment(quick("stability"), Order(tmp_path / "judged"))
    assert run_experiment(quick("stability"), Order(tmp_path / "judged")) == (judged, True) and judged.verdict.sentence

    def never(setup):
        raise AssertionError("it was finished")

    second, there = run_experiment(replace(e, run=never), order(tmp_path))
    assert there and second.verdict == first.verdict and second.about == first.about
    for change in ({"seed": 1}, {"again": True}):
        with pytest.raises(AssertionError):
            run_experiment(replace(e, run=never), order(tmp_path, **change))
    with pytest.raises(AssertionError):  # another revision
        run_experiment(replace(e, run=never, revision=99), order(tmp_path))
    with pytest.raises(AssertionError):  # a larger size is more than was done
        run_experiment(replace(e, run=never), Order(tmp_path / "out", "default"))


def test_a_smaller_size_is_content_with_a_larger_run(tmp_path):
    e = EXPERIMENTS["stability"]
    e = replace(e, settings=dict(e.settings) | {"default": replace(e.settings["tiny"], queries=403)})
    run_experiment(e, Order(tmp_path, "default"))
    assert run_experiment(e, Order(tmp_path, "tiny"))[1]


def test_an_interrupted_run_loses_nothing_that_was_finished(tmp_path, monkeypatch):
    names = ["partition", "stability"]

    def interrupted(setup):
        raise KeyboardInterrupt

    run_experiment(EXPERIMENTS[names[0]], order(tmp_path))
    before = sorted((p.name, p.read_bytes()) for p in (tmp_path / "out" / names[0]).iterdir())
    with pytest.raises(KeyboardInterrupt):
        run_experiment(replace(EXPERIMENTS[names[1]], run=interrupted), order(tmp_path))
    with pytest.raises(KeyboardInterrupt):  # also when it is being run again
        run_experiment(replace(EXPERIMENTS[names[0]], run=interrupted), order(tmp_path, again=True))
    assert sorted((p.name, p.read_bytes()) for p in (tmp_path / "out" / names[0]).iterdir()) == before
    assert not (tmp_path / "out" / names[1]).exists()
    assert run_experiment(EXPERIMENTS[names[0]], order(tmp_path))[1]


def test_a_write_that_breaks_off_leaves_what_was_there(tmp_path, monkeypatch):
    e = EXPERIMENTS["stability"]
    run_experiment(e, order(tmp_path))
    monkeypatch.setattr(Table, "to_csv", lambda self: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError):
        run_experiment(e, order(tmp_path, again=True))
    monkeypatch.undo()
    assert run_experiment(e, order(tmp_path))[1]


@pytest.mark.parametrize("damage", ["cut", "missing table", "not json"])
def test_a_damaged_result_counts_as_not_there(tmp_path, damage):
    e = EXPERIMENTS["stability"]
    run_experiment(e, order(tmp_path))
    place = tmp_path / "out" / e.name
    if damage == "missing table":
        (place / "edges.csv").unlink()
    else:
        (place / "result.json").write_text('{"name": ' if damage == "cut" else "no")
    with pytest.raises(FormatError, match=str(place)):
        read_finished(place)
    assert run_experiment(e, order(tmp_path))[1] is False


def test_a_result_says_how_it_came_about(tmp_path):
    finished, _ = run_experiment(quick("stability"), Order(tmp_path / "out", seed=3))
    written = json.loads((tmp_path / "out" / "stability" / "result.json").read_text())
    assert written["seed"] == 3 and written["size"] == "default" and written["wall_seconds"] >= 0
    assert {"partita", "torch", "numpy", "python"} <= set(written["versions"])
    assert written["settings"]["queries"] == 401 and written["verdict"]["sentence"] == finished.verdict.sentence


def test_missing_images_are_named_before_anything_is_trained(tmp_path):
    with pytest.raises(DataFileError, match="--data DIR"):
        run_experiment(EXPERIMENTS["weight-scale"], order(tmp_path))
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataFileError, match="train-images-idx3-ubyte"):
        run_experiment(EXPERIMENTS["weight-scale"], order(tmp_path, data=tmp_path / "empty"))
    with pytest.raises(DataFileError, match="expected the folder"):
        order(tmp_path, data=tmp_path / "nowhere")
    with pytest.raises(UnsupportedError, match="cuda"):
        order(tmp_path, device="tpu")


# the command line and the page


def test_the_command_line_lists_runs_and_resumes(tmp_path):
    runner = CliRunner()
    listed = runner.invoke(app, ["reproduce", "--list", "--json"])
    assert [e["name"] for e in json.loads(listed.stdout)] == NAMES
    arguments = ["reproduce", "stability", "partition", "--tiny", "--out", str(tmp_path / "o"), "--json"]
    told = runner.invoke(app, arguments)
    assert told.exit_code == 0, told.output
    assert set(json.loads(told.stdout)) == {"stability", "partition"}
    assert {p.name for p in (tmp_path / "o" / "partition").iterdir()} == {
        "cells.csv", "figure.svg", "margins.csv", "picture.csv", "result.json", "tolerances.csv",
    }  # fmt: skip
    again = runner.invoke(app, arguments[:-1])
    assert "stability (finished before)" in again.stderr
    assert again.stdout.count("tiny  stability") == 1 and "Near a and b" not in again.stdout


def test_results_of_the_command_line_go_to_stdout(tmp_path, monkeypatch):
    from partita.cli import reproduce_command as command

    monkeypatch.setattr(command, "find_experiment", quick)
    told = CliRunner().invoke(app, ["reproduce", "stability", "--no-figures", "--out", str(tmp_path)])
    assert told.stdout.count("mixed stability") == 1 and "Near a and b" in told.stdout


def test_tiny_runs_carry_no_verdict(tmp_path, monkeypatch):
    """On stdout, under --json, in result.json and on the page; a run of the default size, which is the control, has one."""
    from partita.cli import reproduce_command as command

    def judged(*arguments):
        out = tmp_path / "_".join(arguments)
        told = CliRunner().invoke(app, ["reproduce", *arguments, "--no-figures", "--out", str(out)])
        data = CliRunner().invoke(app, ["reproduce", *arguments, "--no-figures", "--out", str(out), "--json"])
        written = json.loads((out / "stability" / "result.json").read_text())["verdict"]
        assert json.loads(data.stdout)["stability"]["verdict"] == written
        return written, told.stdout + (out / "report.md").read_text()

    monkeypatch.setattr(command, "EXPERIMENTS", {"stability": quick("stability")})
    monkeypatch.setattr(command, "find_experiment", quick)
    control = judged("--all")
    sentence = EXPERIMENTS["stability"].verdict(read_finished(tmp_path / "--all" / "stability").tables).sentence
    assert control[0]["sentence"] == sentence and sentence in control[1] and "mixed" in control[1]
    none, text = judged("--all", "--tiny")
    assert none is None and sentence not in text and "No verdict" in text and "mixed stability" not in text


def test_all_leaves_out_what_needs_images_and_says_so(tmp_path, monkeypatch, images):
    from partita.cli import reproduce_command as command

    few = {name: EXPERIMENTS[name] for name in ("stability", "weight-scale")}
    monkeypatch.setattr(command, "EXPERIMENTS", few)
    told = CliRunner().invoke(app, ["reproduce", "--all", "--tiny", "--out", str(tmp_path)])
    assert told.exit_code == 0 and "weight-scale was not run" in told.stderr
    assert "Not run, because no image files were given: weight-scale." in (tmp_path / "report.md").read_text()
    told = CliRunner().invoke(app, ["reproduce", "--all", "--tiny", "--out", str(tmp_path), "--data", str(images)])
    assert told.exit_code == 0 and "not run" not in told.stderr
    told = CliRunner().invoke(app, ["reproduce", "--all", "--tiny", "--out", str(tmp_path)])  # it is there now
    assert "not run" not in told.stderr and "60 of 50,000" in (tmp_path / "report.md").read_text()


def test_an_interruption_on_the_command_line_keeps_what_was_finished(tmp_path, monkeypatch):
    from partita.cli import reproduce_command as command

    def interrupted(setup):
        raise KeyboardInterrupt

    few = {"stability": quick("stability"), "partition": replace(EXPERIMENTS["partition"], run=interrupted)}
    monkeypatch.setattr(command, "EXPERIMENTS", few)
    told = CliRunner().invoke(app, ["reproduce", "--all", "--out", str(tmp_path)])
    assert told.exit_code != 0 and {p.name for p in tmp_path.iterdir()} == {"stability"}
    assert read_finished(tmp_path / "stability").verdict.sentence


def test_wrong_requests_are_refused_with_a_hint():
    with pytest.raises(UnsupportedError, match="Did you mean weight-scale"):
        find_experiment("weigth-scale")
    for arguments in (
        ["reproduce"],
        ["reproduce", "--all", "partition"],
        ["reproduce", "partition", "--full", "--tiny"],
    ):
        assert isinstance(CliRunner().invoke(app, arguments).exception, UnsupportedError)


def test_the_report_says_which_criteria_were_changed_after_the_data_had_been_seen():
    text = (Path(__file__).parent.parent / "docs/reproduction/report.md").read_text()
    changed = {name for name, e in EXPERIMENTS.items() if e.amended}
    assert changed == {"attention-maps", "weight-scale", "step-function"}
    assert all(EXPERIMENTS[name].amended in text for name in changed) and "fixed before the run" not in text


def test_the_report_tells_everything_and_loads_nothing(tmp_path):
    done = []
    for name in ("stability", "partition"):
        finished, _ = run_experiment(quick(name), Order(tmp_path))
        draw_figure(name, finished.tables, tmp_path / name / "figure.svg")
        done.append((EXPERIMENTS[name], finished))
    markdown, html = write_pages(tmp_path, done, missing=["weight-scale"])
    page = html.read_text()
    assert page.count("data:image/svg+xml;base64,") == 2
    assert not re.search(r'(src|href)="(?!data:)', page) and "<script" not in page and "@import" not in page
    text = markdown.read_text()
    for experiment, finished in done:
        for told in (
            experiment.claim,
            experiment.criterion,
            finished.verdict.sentence,
            f"partita reproduce {experiment.name}",
        ):
            assert told in text
        assert (tmp_path / re.search(rf"\]\(({experiment.name}/figure.svg)\)", text)[1]).exists()
    assert "Not run, because no image files were given: weight-scale" in text


# tables and statistics against oracles


def test_tables_are_written_as_any_csv_reader_reads_them():
    t = Table.of([{"name": "a, b", "x": 0.1 + 0.2, "n": 3, "none": None, "yes": True}])
    assert list(csv.DictReader(io.StringIO(t.to_csv()))) == [
        {"name": "a, b", "x": "0.3", "n": "3", "none": "", "yes": "True"}
    ]
    assert Table.from_csv(t.to_csv()) == t
    with pytest.raises(ShapeError):
        Table.of([{"a": 1}, {"b": 1}])
    with pytest.raises(ShapeError):
        Table.from_csv("a,b\n1\n")


def test_slopes_cover_the_truth_as_often_as_they_say():
    rng, x = np.random.default_rng(0), np.arange(12.0)
    inside = [slope(x, 2 * x + rng.standard_normal(12)) for _ in range(1000)]
    share = np.mean([s.low <= 2 <= s.high for s in inside])
    assert 0.93 < share < 0.97
    assert log_slope([1, 10, 100], [5, 50, 500]).within(0.999, 1.001)
    assert not slope([1, 2], [1, 2]).within(-100, 100)  # two points have no interval


def test_rank_correlation_is_right_as_often_as_it_says():
    rng = np.random.default_rng(0)
    chance = [rank_correlation(range(15), rng.standard_normal(15)) for _ in range(2000)]
    assert 0.03 < np.mean([r.p_falls < 0.05 for r in chance]) < 0.07
    assert rank_correlation(range(10), range(10, 0, -1)).p_falls < 1e-6
    assert rank_correlation([1, 2, 3], [1, 1, 1]).p_falls == 1.0
    assert more_often(9, 10) == pytest.approx(11 / 1024)


def test_a_decline_is_rejected_as_often_as_it_says():
    rng, seeds, levels = np.random.default_rng(0), np.repeat(range(5), 9), np.tile(range(9), 5)
    own = 3 * rng.standard_normal(5)[seeds]
    flat = [against_decline(seeds, levels, own + rng.standard_normal(45)) for _ in range(400)]
    assert np.mean([p < 0.05 for p in flat]) < 0.09  # constant means are the least favourable decline
    falls = [against_decline(seeds, levels, own - levels + rng.standard_normal(45)) for _ in range(50)]
    assert min(falls) > 0.01
    hump = own - np.abs(levels - 3) + 0.5 * rng.standard_normal(45)
    shuffled = rng.permutation(45)
    assert against_decline(seeds, levels, hump) < 0.01
    assert against_decline(seeds[shuffled], levels[shuffled], hump[shuffled]) == against_decline(seeds, levels, hump)
    with pytest.raises(ShapeError, match="every seed once at every level"):
        against_decline(seeds[:-1], levels[:-1], hump[:-1])


def test_the_nearest_decline_is_isotonic_regression():
    from scipy import optimize

    from partita.reproduction.statistics import _distance_from_decline

    if not hasattr(optimize, "isotonic_regression"):
        pytest.skip("scipy is older than 1.12")
    rng = np.random.default_rng(0)
    for _ in range(20):
        table = rng.standard_normal((4, 7))
        centred = table - table.mean(axis=1, keepdims=True)
        means = centred.mean(axis=0)
        nearest = optimize.isotonic_regression(means, increasing=False).x
        residual = ((centred - means) ** 2).sum() / (3 * 6)
        assert _distance_from_decline(table[None])[0] == pytest.approx(
            ((means - nearest) ** 2).sum() / residual, rel=1e-9
        )


# what trains


def test_batched_adam_is_torch_adamw_for_every_model():
    g = torch.Generator().manual_seed(0)
    start, target = torch.randn(3, 4, 2, generator=g), torch.randn(3, 4, 2, generator=g)
    rates, decays = torch.tensor([0.1, 0.01, 0.05]), torch.tensor([0.0, 0.3, 0.1])
    mine = start.clone().requires_grad_()
    adam = BatchedAdam({"w": mine}, rates, decays)
    for _ in range(20):
        adam.step(((mine - target) ** 4).sum())
    for i in range(3):
        w = start[i].clone().requires_grad_()
        reference = torch.optim.AdamW([w], lr=float(rates[i]), weight_decay=float(decays[i]))
        for _ in range(20):
            reference.zero_grad()
            ((w - target[i]) ** 4).sum().backward()
            reference.step()
        assert torch.allclose(mine[i], w, atol=1e-5)


def test_models_in_a_batch_do_not_feel_each_other():
    g = torch.Generator().manual_seed(0)
    rows, labels = torch.rand(60, 5, 4, generator=g), torch.randint(10, (60,), generator=g)
    schedule = Schedule(2, 8, 4, 6, (2,), 10)
    copies = [Copy(0), Copy(0, input_noise=0.5), Copy(1, label_noise=0.9, weight_decay=0.1)]
    together = list(train_copies(rows, labels, copies, schedule))[-1].numbers
    for i, copy in enumerate(copies):
        alone = list(train_copies(rows, labels, [copy], schedule))[-1].numbers
        for name, value in alone.items():
            assert torch.allclose(value[0], together[name][i], rtol=1e-4, atol=1e-6), name
    assert not torch.allclose(together["w_k"][0], together["w_k"][1])  # and noise does something


def test_one_batched_model_is_a_plain_attention_network():
    """The forward pass against modules of torch: attention without scale, softmax over keys."""
    from partita.reproduction.image_models import _Copies, _Data

    g = torch.Generator().manual_seed(0)
    rows, labels = torch.rand(20, 5, 4, generator=g), torch.randint(10, (20,), generator=g)
    schedule = Schedule(1, 8, 3, 6, (1,), 4)
    model = _Copies([Copy(0), Copy(1)], _Data.draw(rows, labels, [0, 1], schedule), schedule)
    z = rows[None].expand(2, -1, -1, -1)
    got = model.logits(z)
    for i in range(2):
        p = {n: t[i] for n, t in model.parameters.items()}
        for b in range(20):
            x = rows[b].T  # the paper's orientation: dim × tokens
            weights = torch.softmax((p["w_k"].T @ x).T @ (p["w_q"].T @ x), dim=0)
            read = (p["w_v"].T @ x) @ weights
            hidden = torch.relu(read.T.reshape(1, -1) @ p["w_1"] + p["b_1"])
            assert torch.allclose(hidden @ p["w_2"] + p["b_2"], got[i, b][None], atol=1e-5)


def test_noise_is_what_was_asked_for():
    from partita.reproduction.image_models import _Copies, _Data

    rows, labels = torch.zeros(400, 6, 5), torch.zeros(400, dtype=torch.long)
    schedule = Schedule(1, 8, 3, 6, (1,), 4)
    data = _Data.draw(rows, labels, [0], schedule)
    model = _Copies([Copy(0), Copy(0, input_noise=0.3), Copy(0, label_noise=0.5)], data, schedule)
    index = torch.arange(400)[None]
    x, y = model.inputs(data, index), model.labels(data, index)
    assert (x[0] == 0).all() and (x[2] == 0).all() and x[1].std() == pytest.approx(0.3, rel=0.05)
    assert (y[:2] == 0).all() and (y[2] != 0).float().mean() == pytest.approx(0.45, abs=0.08)


def test_spectral_norms_are_the_largest_singular_values():
    m = torch.randn(3, 4, 6, generator=torch.Generator().manual_seed(0))
    assert torch.allclose(spectral_norms(m), torch.linalg.svdvals(m.double())[:, 0])


def test_turning_points_against_a_fine_grid():
    rng, x = np.random.default_rng(0), np.linspace(-1, 1, 200_001)
    for _ in range(20):
        f = MaxAffine(rng.standard_normal((6, 1)), 0.3 * rng.standard_normal(6))
        cells = f.cell(x[:, None])
        seen = x[1:][np.diff(cells) != 0]
        got = turning_points(f, -1.0, 1.0)
        assert len(got) == len(seen) and np.allclose(got, seen, atol=2e-5)


def test_a_constructed_head_has_the_theorems_cells_and_values():
    centers = np.random.default_rng(0).uniform(-1, 1, (7, 2))
    heads = FunctionHeads.constructed(centers, 1e6, np.arange(7.0))
    x = np.random.default_rng(1).uniform(-1, 1, (50, 2))
    nearest = ((x[:, None] - centers) ** 2).sum(axis=2).argmin(axis=1)
    assert (heads.partition(0).cell(x) == nearest).all()
    assert np.abs(heads(torch.from_numpy(x))[0].numpy() - nearest).max() < 0.5


def test_cells_are_compared_up_to_what_scores_leave_open():
    """A common affine function added to all scores, their scale and the order of the keys change nothing."""
    rng = np.random.default_rng(0)
    slopes, offsets = rng.standard_normal((9, 2)), rng.standard_normal(9)
    x = rng.uniform(-1, 1, (2000, 2))
    cells = MaxAffine(slopes, offsets).cell(x)
    order = rng.permutation(9)
    other = MaxAffine(3 * slopes[order] + [0.7, -2.0], 3 * offsets[order] + 5).cell(x)
    same, random = cells_found(cells, other, 9), cells_found(cells, rng.integers(9, size=2000), 9)
    assert same["cells_found"] == 1.0 and same["distance"] == 0.0
    assert random["cells_found"] == 0.0 and random["distance"] > 0.5


def test_a_standard_head_is_the_papers_attention_on_its_tokens():
    heads = TokenHeads.random(2, 5, 2, width=3, seed=0)
    x = torch.rand(4, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    got = heads(x)
    for i in range(2):
        for b in range(4):
            y = (torch.cat([x[b], torch.ones(1, dtype=torch.float64)]) @ heads.linear[i]).reshape(5, 3).T  # D × n
            weights = torch.softmax((heads.w_k[i].T @ y).T @ (heads.w_q[i].T @ y), dim=0)
            read = (heads.w_v[i].T @ y @ weights).T.reshape(-1)
            assert torch.allclose(read @ heads.w_o[i], got[i, b], atol=1e-12)


def test_plain_gradient_descent_takes_the_gradient():
    heads = TokenHeads.random(2, 4, 2, width=3, seed=0)
    x, y = torch.rand(6, 2, dtype=torch.float64), torch.rand(6, dtype=torch.float64)
    *_, (_, once) = heads.trained(lambda step: (x, y), steps=1, rate=0.1, look_at=set())
    moved = 1e-5 * torch.randn(3, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))

    def loss(w_k):
        return float(((TokenHeads(heads.linear, w_k, heads.w_q, heads.w_v, heads.w_o)(x)[0] - y) ** 2).mean())

    shift = torch.stack([moved, torch.zeros_like(moved)])
    slope = (loss(heads.w_k + shift) - loss(heads.w_k - shift)) / 2
    assert float((moved * (heads.w_k[0] - once.w_k[0]) / 0.1).sum()) == pytest.approx(slope, rel=1e-4)
    assert torch.equal(once.linear, heads.linear)


def test_what_a_snapshot_says_of_directions_and_rows():
    from partita.reproduction.image_models import _directions_of_little

    rows = torch.zeros(50, 6, 5)
    rows[..., :2] = torch.rand(50, 6, 2, generator=torch.Generator().manual_seed(0))
    rows[..., 3] = 1e-3
    little = _directions_of_little(rows)
    assert torch.allclose(little.T @ little, torch.eye(little.shape[1]), atol=1e-5)
    assert torch.allclose((little @ little.T)[4], torch.eye(5)[4], atol=1e-5)  # a pixel that is always 0
    schedule = Schedule(1, 8, 3, 6, (1,), 10)
    labels = torch.zeros(50, dtype=torch.long)
    seen = list(train_copies(rows, labels, [Copy(0), Copy(0, input_noise=1.0)], schedule))[-1].numbers
    assert (seen["w_k_outside"] <= seen["w_k_frobenius"]).all() and (seen["own_row"] <= 1).all()
    assert (seen["alignment"].abs() <= 1).all()


# bounds: perturbed layers, and points outside the domain


@pytest.fixture(scope="module")
def networks():
    c = pa.compile("sin(3*x0) + x0*cos(2*x1)", pa.Box([-1, -1], [1, 1]), tolerance=0.6, method="tuned")
    return {form: c.layers(form=form) for form in ("log", "indexed")}


@pytest.mark.parametrize("form", ["log", "indexed"])
def test_layer_tensors_compute_what_the_layers_do(form, networks):
    x = np.random.default_rng(0).uniform(-1, 1, (7, 2))
    tensors = LayerTensors.of(networks[form])
    got = tensors.at(torch.from_numpy(x)[:, :, None], tensors.used()).output()
    assert np.allclose(got, np.asarray(networks[form](x)).reshape(-1), atol=1e-10)


@pytest.mark.parametrize("form", ["log", "indexed"])
@pytest.mark.parametrize("name", ["P", "Q", "C", "W_K", "W_Q", "W_V", "W_O"])
def test_no_perturbation_moves_the_output_beyond_its_bounds(form, name, networks):
    """Corners of the allowed perturbations, which are worse than normal draws; half of a bound is too little for W_O."""
    rng, tensors = np.random.default_rng(0), LayerTensors.of(networks[form])
    z = torch.from_numpy(rng.uniform(-1, 1, (10, 2)))[:, :, None]
    start = tensors.at(z, torch.arange(len(tensors.W_O)))
    used = 0.0
    for size in (1e-4, 1e-2, 0.3):
        limit = size * getattr(tensors, name).abs()
        for signs in (np.ones(limit.shape), rng.choice([-1.0, 1.0], limit.shape)):
            changed = getattr(tensors, name) + limit * torch.from_numpy(signs)
            moved = replace(tensors, **{name: changed}).at(z, start.used)
            change = (moved.output() - start.output()).abs()
            seen, _ = start.change_bound(moved)
            predicted = start.predicted_bound(name, limit, z)
            assert (change <= seen + 1e-9).all() and (seen <= predicted + 1e-9).all()
            used = max(used, float((change / (seen + 1e-12)).max()))
    assert used > 0.5 or name != "W_O"


@pytest.mark.parametrize(
    "box",
    [pa.Box([0.5], [1.5]), pa.Box([-1, 0], [1, 0.25]), pa.Box([-1, -1, -1], [1, 1, 1])],
    ids=["1-D", "2-D", "3-D"],
)
@pytest.mark.parametrize("kappa", [1.0, 8.0, 64.0])
def test_outside_the_domain_errors_stay_within_the_bound(box, kappa):
    """For several Lipschitz functions, some of which attain it nearly; and the bound without the distance is too small."""
    rng, m = np.random.default_rng(0), len(box.lo)
    sides = [5, 4, 3][:m]
    axes = [lo + (hi - lo) * (np.arange(n) + 0.5) / n for lo, hi, n in zip(box.lo, box.hi, sides)]
    centers = np.stack([g.ravel() for g in np.meshgrid(*axes, indexing="ij")], axis=1)
    rate = [kappa / (a[1] - a[0]) ** 2 for a in axes]
    corner = np.asarray(box.hi)
    functions = [
        lambda x: np.linalg.norm(x - corner, axis=1),
        lambda x: np.linalg.norm(x - np.clip(x, box.lo, box.hi), axis=1),
        lambda x: np.sin(x.sum(axis=1) / np.sqrt(m)),
    ]
    beyond_without = 0
    for f in functions:
        for distance in (0.0, 0.1, 1.0, 30.0):
            x = points_outside(box, distance, 400, rng)
            nearest = np.clip(x, box.lo, box.hi)
            assert np.allclose(np.linalg.norm(x - nearest, axis=1), distance, atol=1e-12)
            exponents = sum(-0.5 * r * (x[:, i, None] - centers[:, i]) ** 2 for i, r in enumerate(rate))
            weights = np.exp(exponents - exponents.max(axis=1, keepdims=True))
            computed = (weights / weights.sum(axis=1, keepdims=True)) @ f(centers)  # an implementation of its own
            error = np.abs(computed - f(x)).max()
            assert error <= outside_reach(axes, rate, box, distance) + 1e-9
            beyond_without += error > outside_reach(axes, rate, box, 0.0)
    assert beyond_without


def test_centers_outside_the_box_have_no_bound_outside():
    assert outside_reach([np.linspace(-0.5, 1.5, 5)], [9.0], pa.Box([0.0], [1.0]), 1.0) is None


def test_scattered_centers_outside_the_domain():
    """Statement 4 of `outside-domain`: the cover's radius plus the distance, and the temperature's share."""
    rng = np.random.default_rng(0)
    centers = rng.uniform(-1, 1, (40, 2))
    dense = rng.uniform(-1, 1, (20_000, 2))
    radius = np.sqrt(((dense[:, None] - centers) ** 2).sum(axis=2).min(axis=1).max()) * 1.05
    box = pa.Box([-1, -1], [1, 1])
    for rate in (5.0, 100.0):
        lost = 2 * float(lambertw(39 / np.e).real) / rate
        for f in (lambda x: np.linalg.norm(x - 1, axis=1), lambda x: x[:, 0]):
            for distance in (0.0, 0.3, 5.0):
                x = points_outside(box, distance, 300, rng)
                exponents = -0.5 * rate * ((x[:, None] - centers) ** 2).sum(axis=2)
                weights = np.exp(exponents - exponents.max(axis=1, keepdims=True))
                computed = (weights / weights.sum(axis=1, keepdims=True)) @ f(centers)
                assert np.abs(computed - f(x)).max() <= np.sqrt((distance + radius) ** 2 + lost) + 1e-9


def test_the_optimum_is_scikit_learns():
    linear = pytest.importorskip("sklearn.linear_model")
    from partita.reproduction.descent_runs import _optimum

    rng = np.random.default_rng(0)
    x = rng.uniform(-1, 1, (40, 3))
    y, labels = x @ [1.0, -2.0, 0.5] + 0.1 * rng.standard_normal(40), (rng.random(40) < 0.5).astype(float)
    plain = linear.LinearRegression(fit_intercept=False).fit(x, y).coef_
    ridge = linear.Ridge(alpha=40 * 0.2, fit_intercept=False).fit(x, y).coef_
    classes = linear.LogisticRegression(C=1 / (40 * 0.05), fit_intercept=False, tol=1e-10, max_iter=1000).fit(x, labels)
    assert np.allclose(_optimum(x, y, "squared", 0.0), plain, atol=1e-8)
    assert np.allclose(_optimum(x, y, "squared", 0.2), ridge, atol=1e-8)
    assert np.allclose(_optimum(x, labels, "logistic", 0.05), classes.coef_[0], atol=1e-5)


# the committed report


REPORT = Path(__file__).parent.parent / "docs" / "reproduction"
CHEAP = ("partition", "in-context")


@pytest.mark.skipif(not REPORT.exists(), reason="the report is not written yet")
class TestTheCommittedReport:
    def test_it_tells_of_all_and_its_verdicts_are_those_of_its_tables(self):
        text = (REPORT / "report.md").read_text()
        for name, e in EXPERIMENTS.items():
            finished = read_finished(REPORT / name)
            verdict = e.verdict(finished.tables)
            assert verdict.outcome == finished.verdict.outcome
            assert verdict.sentence in text and finished.about["size"] in ("default", "full")
            assert (REPORT / name / "figure.svg").exists()
            assert finished.about["settings"] == json.loads(json.dumps(e.settings_json(finished.about["size"])))

    @pytest.mark.parametrize("name", NAMES)
    def test_its_runs_are_recognised(self, name):
        """So that `partita reproduce` judges and draws them from their tables instead of running them again."""
        about = read_finished(REPORT / name).about
        assert find_finished(EXPERIMENTS[name], about["size"], about["seed"], REPORT) is not None

    @pytest.mark.parametrize("name", CHEAP)
    def test_the_cheap_ones_come_out_the_same(self, name):
        e, there = EXPERIMENTS[name], read_finished(REPORT / name)
        again = e.run(Setup(e.settings[there.about["size"]], seed=there.about["seed"]))
        for table, rows in there.tables.items():
            for column in rows.columns:
                old, new = rows[column], again[table][column]
                if old.dtype == object:
                    assert (old == new).all(), column
                elif "drift" not in column:  # rounding, of which only the size is meant
                    assert np.allclose(old, new, rtol=1e-5, atol=1e-9, equal_nan=True), column
        assert e.verdict(again).outcome == there.verdict.outcome

    def test_figure_3_is_a_full_run_on_real_images(self):
        norms = read_finished(REPORT / "weight-scale").tables["norms"]
        assert [s.partition(" ")[0] for s in norms.distinct("set")] == ["MNIST", "Fashion-MNIST", "CIFAR-10"]
        plain = norms.where(variant="input noise")
        assert len(set(plain["level"])) == 25 and len(set(plain["seed"])) >= 3
        assert all(len(set(norms.where(variant=v)["level"])) >= 5 for v in norms.distinct("variant"))
        assert {"spread", "entropy", "w_k", "w_q", "w_k_frobenius", "w_q_frobenius"} <= set(norms.columns)

    def test_it_is_small(self):
        assert sum(p.stat().st_size for p in REPORT.rglob("*") if p.name != "report.html") < 3_000_000


# the second paper's networks


def published(heads, layers, *, columns=5, beta=1.0, anchored=False, copies=2):
    """Copies of one network, a task for them, and inputs."""
    g = torch.Generator().manual_seed(0)
    task = Task(torch.randn(2, 20, 3, 2, generator=g), torch.randn(2, 20, 3, 8, generator=g))
    shape = NetworkShape(columns, heads, 8, layers, beta, anchored)
    jobs = [Job(shape, seed, seed % 2, (-1.0, 1.0 + seed)) for seed in range(copies)]
    return jobs, task, _Networks(jobs, task, "cpu")


@pytest.mark.parametrize("heads", [1, 4])
@pytest.mark.parametrize("layers", [1, 2])
def test_published_networks_are_modules_of_torch(heads, layers):
    """Mapping, added tokens and attention against nn.Linear and nn.MultiheadAttention with the same tensors."""
    _, _, net = published(heads, layers)
    x = torch.randn(2, 6, 3, 2, generator=torch.Generator().manual_seed(1))
    got, weights = net(x)
    for i in range(2):
        p = {name: value[i].detach() for name, value in net.parameters.items()}
        h = (x[i] @ p["map"] + p["map_bias"]) * p["modulation"]
        h = torch.cat([h, p["extra"].expand(6, -1, -1)], dim=1)
        for layer in range(layers):
            if layer:
                h = h @ p["between"] + p["between_bias"]
            attention = torch.nn.MultiheadAttention(8, heads, batch_first=True)
            parts = [f"{part}{layer}" for part in ("query", "key", "value")]
            attention.load_state_dict(
                {
                    "in_proj_weight": torch.cat([p[part].T for part in parts]),
                    "in_proj_bias": torch.cat([p[f"{part}_bias"] for part in parts]),
                    "out_proj.weight": p[f"out{layer}"].T,
                    "out_proj.bias": p[f"out{layer}_bias"],
                }
            )
            h, seen = attention(h, h, h, average_attn_weights=False)
            if layer == 0:
                assert torch.allclose(weights[i], seen[:, :, : weights.shape[3]], atol=1e-6)
        expected = h[:, :3] if layers == 1 else h[:, :3] @ p["last"] + p["last_bias"]
        assert torch.allclose(expected, got[i], atol=1e-5)
    assert not torch.allclose(got[0], got[1], atol=1e-3)  # negative control: copies differ


def test_published_networks_start_as_the_authors_did():
    _, _, net = published(2, 1, copies=40)
    p = {name: value.detach() for name, value in net.parameters.items()}
    assert (p["modulation"] == 1).all() and torch.equal(p["extra"][0, :, 0], torch.linspace(-1, 1, 2))
    assert (p["extra"] == p["extra"][:, :, :1]).all()
    for name, reach in (("map", 2**-0.5), ("query0", (1.5 / 8) ** 0.5), ("out0", 8**-0.5)):
        assert 0.95 * reach < p[name].abs().max() <= reach
    assert not p["query0_bias"].any() and not p["out0_bias"].any() and p["map_bias"].any()


def test_a_head_with_anchors_holds_them_in_one_key_and_one_value_channel():
    jobs, _, net = published(1, 1, columns=3, beta=25.0, anchored=True)
    x = torch.randn(2, 6, 3, 2, generator=torch.Generator().manual_seed(1))
    _, weights = net(x)
    for i, job in enumerate(jobs):
        p = {name: value[i].detach() for name, value in net.parameters.items()}
        h = (x[i] @ p["map"] + p["map_bias"]) * p["modulation"]
        points, k = torch.linspace(*job.ends, 3), torch.arange(3)
        keys = h @ p["key0"] + p["key0_bias"]
        keys[..., -1] = k * (points + points[0]) - 2 * k
        scores = (h @ p["query0"] + p["query0_bias"]) @ keys.transpose(1, 2) * 25 / 8**0.5
        assert torch.allclose(torch.softmax(scores, dim=-1), weights[i, :, 0], atol=1e-5)
        plain = torch.softmax((h @ p["query0"]) @ (h @ p["key0"]).transpose(1, 2) * 25 / 8**0.5, dim=-1)
        assert not torch.allclose(plain, weights[i, :, 0], atol=1e-2)  # negative control


def test_networks_trained_together_are_those_trained_alone():
    jobs, task, _ = published(2, 1)
    together = train_networks(jobs, task, epochs=2, batch=8)
    for job, found in zip(jobs, together):
        (alone,) = train_networks([job], task, epochs=2, batch=8)
        assert torch.allclose(alone.predicted, found.predicted, atol=1e-5)
    before = train_networks(jobs, task, epochs=0)
    assert not torch.allclose(before[0].predicted, together[0].predicted, atol=1e-3)  # and training does something


def test_ramp_verdicts_say_yes_where_the_claims_are_true():
    """The other controls: tables in which the rates hold, maps that are one-hot, networks that learn."""
    e = EXPERIMENTS["ramp-rate"]
    good = {name: t.columns for name, t in e.control(0).items()}
    for name in ("constructed", "lengths"):
        good[name] = dict(good[name]) | {"worst_seen": tuple(1 / (p - 1) for p in good[name]["anchors"])}
    good["trained"] = dict(good["trained"]) | {"relative_rmse": tuple(p**-2.0 for p in good["trained"]["columns"])}
    assert e.verdict({n: Table(c) for n, c in good.items()}).outcome == "holds"
    good["trained"] = e.control(0)["trained"].columns
    assert e.verdict({n: Table(c) for n, c in good.items()}).outcome == "mixed"
    e = EXPERIMENTS["ramp-heads"]
    good = {name: dict(t.columns) for name, t in e.control(0).items()}
    good["constructed"]["worst_seen"] = tuple(1 / (p - 1) for p in good["constructed"]["anchors"])
    for power, outcome in ((-1.0, "holds"), (-0.4, "mixed")):
        good["trained"]["relative_rmse"] = tuple(h**power for h in good["trained"]["heads"])
        assert e.verdict({n: Table(c) for n, c in good.items()}).outcome == outcome
    e = EXPERIMENTS["attention-maps"]
    columns = dict(e.control(0)["columns"].columns)
    for share, nearest, outcome in (
        (0.95, 0.95, "holds"),
        (0.95, 0.1, "mixed"),
        (0.7, 0.95, "mixed"),
        (0.4, 0.1, "fails"),
    ):
        columns["share_above_0.9"] = (share,) * len(columns["range"])
        columns["share_nearest"] = (nearest,) * len(columns["range"])
        assert e.verdict({"columns": Table(columns)}).outcome == outcome
    e = EXPERIMENTS["two-layers"]
    good = {name: dict(t.columns) for name, t in e.control(0).items()}
    good["constructed"]["worst_seen"] = tuple(t / 2 for t in good["constructed"]["tolerance"])
    good["bumps"]["worst_seen"] = tuple(1 / c for c in good["bumps"]["cells"])
    for level, outcome in ((0.1, "holds"), (0.9, "mixed")):
        good["trained"]["relative_mse"] = (level,) * len(good["trained"]["level"])
        assert e.verdict({n: Table(c) for n, c in good.items()}).outcome == outcome
