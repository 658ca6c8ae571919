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
from test_data_files import write_sets
from typer.testing import CliRunner

from partita.cli import app
from partita.errors import DataFileError, FormatError, ShapeError, UnsupportedError
from partita.geometry import MaxAffine
from partita.reproduction import EXPERIMENTS, Order, Setup, Table, find_experiment, read_finished, run_experiment
from partita.reproduction.batched import BatchedAdam, spectral_norms
from partita.reproduction.figure_list import FIGURES, draw_figure
from partita.reproduction.function_heads import FunctionHeads, turning_points
from partita.reproduction.image_models import Copy, Schedule, train_copies
from partita.reproduction.page import write_pages
from partita.reproduction.statistics import log_slope, more_often, rank_correlation, slope

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


def test_there_are_seventeen_with_a_figure_each():
    assert len(NAMES) == 17 and set(FIGURES) == set(NAMES)
    for e in EXPERIMENTS.values():
        assert re.fullmatch(r"[a-z0-9-]+", e.name) and all((e.title, e.source, e.claim, e.criterion, e.method))
        assert e.seconds["default"] <= 240
    assert sum(e.seconds["default"] for e in EXPERIMENTS.values()) <= 2400


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


def test_weight_scale_says_yes_where_the_claim_is_true():
    """The other control: norms that do fall."""
    e = EXPERIMENTS["weight-scale"]
    norms = e.control(0)["norms"]
    falling = {k: tuple(v) for k, v in norms.columns.items()}
    for name in ("w_k", "w_q"):
        falling[name] = tuple(w * (1 - 0.5 * x) for w, x in zip(norms.columns[name], norms.columns["level"]))
    assert e.verdict({"norms": Table(falling)}).outcome == "holds"


# running, resuming, interrupting


def order(tmp_path, **more):
    return Order(tmp_path / "out", "tiny", **more)


def test_a_finished_run_is_not_run_again(tmp_path):
    e = EXPERIMENTS["attention-maps"]
    first, there = run_experiment(e, order(tmp_path))
    assert not there

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
    e = EXPERIMENTS["attention-maps"]
    run_experiment(e, Order(tmp_path, "default"))
    assert run_experiment(e, Order(tmp_path, "tiny"))[1]


def test_an_interrupted_run_loses_nothing_that_was_finished(tmp_path, monkeypatch):
    names = ["partition", "attention-maps"]

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
    e = EXPERIMENTS["attention-maps"]
    run_experiment(e, order(tmp_path))
    monkeypatch.setattr(Table, "to_csv", lambda self: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError):
        run_experiment(e, order(tmp_path, again=True))
    monkeypatch.undo()
    assert run_experiment(e, order(tmp_path))[1]


@pytest.mark.parametrize("damage", ["cut", "missing table", "not json"])
def test_a_damaged_result_counts_as_not_there(tmp_path, damage):
    e = EXPERIMENTS["attention-maps"]
    run_experiment(e, order(tmp_path))
    place = tmp_path / "out" / e.name
    if damage == "missing table":
        (place / "columns.csv").unlink()
    else:
        (place / "result.json").write_text('{"name": ' if damage == "cut" else "no")
    with pytest.raises(FormatError, match=str(place)):
        read_finished(place)
    assert run_experiment(e, order(tmp_path))[1] is False


def test_a_result_says_how_it_came_about(tmp_path):
    finished, _ = run_experiment(EXPERIMENTS["attention-maps"], order(tmp_path, seed=3))
    written = json.loads((tmp_path / "out" / "attention-maps" / "result.json").read_text())
    assert written["seed"] == 3 and written["size"] == "tiny" and written["wall_seconds"] >= 0
    assert {"partita", "torch", "numpy", "python"} <= set(written["versions"])
    assert written["settings"]["tokens"] == 30 and written["verdict"]["sentence"] == finished.verdict.sentence


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
    arguments = ["reproduce", "attention-maps", "partition", "--tiny", "--out", str(tmp_path / "o"), "--json"]
    told = runner.invoke(app, arguments)
    assert told.exit_code == 0, told.output
    assert set(json.loads(told.stdout)) == {"attention-maps", "partition"}
    assert {p.name for p in (tmp_path / "o" / "partition").iterdir()} == {
        "cells.csv", "figure.svg", "picture.csv", "result.json", "tolerances.csv",
    }  # fmt: skip
    again = runner.invoke(app, arguments[:-1])
    assert "attention-maps (finished before)" in again.stderr
    assert again.stdout.count("fails attention-maps") == 1 and "Inside [a, b]" in again.stdout  # results on stdout


def test_all_leaves_out_what_needs_images_and_says_so(tmp_path, monkeypatch, images):
    from partita.cli import reproduce_command as command

    few = {name: EXPERIMENTS[name] for name in ("attention-maps", "weight-scale")}
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

    few = {
        "attention-maps": EXPERIMENTS["attention-maps"],
        "partition": replace(EXPERIMENTS["partition"], run=interrupted),
    }
    monkeypatch.setattr(command, "EXPERIMENTS", few)
    told = CliRunner().invoke(app, ["reproduce", "--all", "--tiny", "--out", str(tmp_path)])
    assert told.exit_code != 0 and {p.name for p in tmp_path.iterdir()} == {"attention-maps"}
    assert read_finished(tmp_path / "attention-maps").verdict.sentence


def test_wrong_requests_are_refused_with_a_hint():
    with pytest.raises(UnsupportedError, match="Did you mean weight-scale"):
        find_experiment("weigth-scale")
    for arguments in (
        ["reproduce"],
        ["reproduce", "--all", "partition"],
        ["reproduce", "partition", "--full", "--tiny"],
    ):
        assert isinstance(CliRunner().invoke(app, arguments).exception, UnsupportedError)


def test_the_report_tells_everything_and_loads_nothing(tmp_path):
    done = []
    for name in ("attention-maps", "partition"):
        finished, _ = run_experiment(EXPERIMENTS[name], Order(tmp_path, "tiny"))
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
CHEAP = ("partition", "attention-maps", "in-context")


@pytest.mark.skipif(not REPORT.exists(), reason="the report is not written yet")
class TestTheCommittedReport:
    def test_it_tells_of_all_sixteen_and_its_verdicts_are_those_of_its_tables(self):
        text = (REPORT / "report.md").read_text()
        for name, e in EXPERIMENTS.items():
            finished = read_finished(REPORT / name)
            verdict = e.verdict(finished.tables)
            assert verdict.outcome == finished.verdict.outcome
            assert verdict.sentence in text and finished.about["size"] in ("default", "full")
            assert (REPORT / name / "figure.svg").exists()
            assert finished.about["settings"] == json.loads(json.dumps(e.settings_json(finished.about["size"])))

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
        assert {"spread", "entropy", "w_k", "w_q"} <= set(norms.columns)

    def test_it_is_small(self):
        assert sum(p.stat().st_size for p in REPORT.rglob("*") if p.name != "report.html") < 3_000_000


def test_heads_of_a_sequence_model_are_those_of_torch():
    """The first layer against nn.MultiheadAttention's arithmetic: queries per token, keys and values given, heads split alike."""
    from partita.reproduction.sequence_models import SequenceCopy, Task, _Networks

    g = torch.Generator().manual_seed(0)
    task = Task(torch.randn(1, 10, 3, 2, generator=g), torch.randn(1, 10, 3, 5, generator=g), (0, 0))
    net = _Networks([SequenceCopy(7, 4, 0), SequenceCopy(4, 4, 1)], task, width=8, layers=1, device="cpu")
    x = task.inputs.expand(2, -1, -1, -1)
    got = net(x)
    for i, columns in enumerate((7, 4)):
        p = {name: value[i] for name, value in net.parameters.items()}
        q = torch.einsum("btd,tdw->btw", x[i], p["a"]) + p["c"]
        k, v = (p[name][:columns].expand(10, -1, -1) for name in ("keys", "values"))
        heads = [t.unflatten(-1, (4, 2)).transpose(1, 2) for t in (q, k, v)]
        read = torch.nn.functional.scaled_dot_product_attention(*heads).transpose(1, 2).flatten(2)
        assert torch.allclose(torch.einsum("btw,two->bto", read, p["out"]), got[i], atol=1e-5)
