"""Tables in place of functions: estimates from rows that the fit never saw, and files that are read or refused."""

from __future__ import annotations

import json
import math
import subprocess
import sys

import numpy as np
import pytest
import torch

pytest.importorskip("sklearn")

import partita as pa
from partita import learn
from partita.cli import main
from partita.errors import (
    AnotherFunctionError,
    DomainError,
    FormatError,
    MissingExtraError,
    ShapeError,
    SizeError,
    TableError,
    TargetFailedError,
    ToleranceError,
    ToleranceMissedWarning,
    UnsupportedError,
)
from partita.functions.samples import Table
from partita.proofs.certificate import Certificate


def samples(n=120, *, seed=0, outputs=0, noise=0.0):
    rng = np.random.default_rng(seed)
    x = rng.uniform(-1, 1, (n, 2))
    y = np.sin(3 * x[:, 0]) + x[:, 1] ** 2 + noise * rng.normal(size=n)
    return x, np.column_stack([y * (k + 1) for k in range(outputs)]) if outputs else y


def table(n=120, **kw):
    return Table(*samples(n, **kw), inputs=["T", "I"])


@pytest.fixture(scope="module")
def compiled():
    return pa.compile(table(), tolerance=0.1)


def error_at(c, t, rows):
    return np.abs(c(t.X[rows]).reshape(len(rows), -1) - t.columns[rows]).max()


# --- the claim -----------------------------------------------------------------------------------------------------------


def test_the_estimate_is_that_of_rows_that_the_fit_never_saw(compiled, monkeypatch):
    t, certificate = table(), compiled.certificate
    seen, held = t.split(0)
    assert certificate.kind == "estimated" and math.isinf(compiled.error_bound) and len(held) == 24
    assert compiled.error_estimate == pytest.approx(error_at(compiled, t, held), rel=1e-12)
    given = []
    original = learn.PartitionRegressor.fit

    def fit(self, X, y, *rest):
        given.append(X)
        return original(self, X, y, *rest)

    monkeypatch.setattr(learn.PartitionRegressor, "fit", fit)
    pa.compile(t, tolerance=0.1)
    told = {row.tobytes() for X in given for row in X}
    assert told == {row.tobytes() for row in t.X[seen]} and not told & {row.tobytes() for row in t.X[held]}


def test_what_was_held_out_changes_no_head():
    """Negative control of the one above: with other outputs in the held-out rows the head is the same and the estimate is not."""
    t = table()
    _, held = t.split(0)
    y = t.y.copy()
    y[held] += 0.05
    one, other = (pa.compile(given, tolerance=0.2) for given in (t, Table(t.X, y, inputs=["T", "I"])))
    assert all(torch.equal(a, b) for a, b in zip(one.head.state_dict().values(), other.head.state_dict().values()))
    assert other.error_estimate > one.error_estimate + 0.02


def test_the_certificate_says_how_many_rows_there_were(compiled):
    said = compiled.explain()
    assert "a table of 120 rows: 96 for the fit, 24 held out" in said and "Nothing is claimed between the rows" in said
    assert "less than 0.58 of such rows" in said  # ln(10⁶)/24
    assert "[held-out-rows]" in said and "independent draws" in said and "same point" not in said
    assert compiled.certificate.facts["rows"] == 120 and compiled.certificate.samples == 24
    assert compiled.evaluations == 0 and "Compiled('table'" in repr(compiled) and "table" in compiled.report()
    few = pa.compile(Table(*samples(12)), tolerance=5.0)
    assert "too few to say" in few.explain()


def test_the_fewest_keys_that_leave_room():
    sizes = [pa.compile(table(200), tolerance=t).num_keys for t in (0.5, 0.05, 0.01)]
    assert sizes[0] < sizes[1] < sizes[2]


def test_looking_twice_is_counted():
    """A head whose leave-one-out errors were small by chance is followed by a larger one, and the statement is weaker."""
    c = pa.compile(table(200), tolerance=0.01)
    assert c.certificate.facts["looks"] == 2 and "compared with 2 heads" in c.explain()
    assert c.certificate.exceeded_on == pytest.approx(math.log(2e6) / 40)
    assert pa.compile(table(200), tolerance=0.1).certificate.exceeded_on == pytest.approx(math.log(1e6) / 40)


def test_a_tolerance_that_is_out_of_reach(compiled):
    with pytest.raises(ToleranceError, match=r"errs by .* at one of 24 held-out rows, above the tolerance 1e-09.*T = "):
        pa.compile(table(), tolerance=1e-9)
    with pytest.warns(ToleranceMissedWarning, match="held-out rows"):
        best = pa.compile(table(), tolerance=1e-9, budget=600)
    assert not best.tolerance_met and best.error_estimate < compiled.error_estimate


def test_a_search_that_leads_nowhere_ends(monkeypatch):
    """Noise stays as large as it is: a few sizes that bring nothing are the last."""
    x, y = samples(400, noise=0.3)
    counts = []
    original = learn.PartitionRegressor.__init__
    monkeypatch.setattr(
        learn.PartitionRegressor, "__init__", lambda self, n, *a, **kw: counts.append(n) or original(self, n, *a, **kw)
    )
    with pytest.raises(ToleranceError):
        pa.compile(Table(x, y), tolerance=0.1)
    assert max(counts) < 320


@pytest.mark.parametrize("options", [{"dtype": torch.float32}, {"outside": "clamp"}, {"domain": "[-2,2]^2"}], ids=str)
def test_options_that_mean_something(options):
    c = pa.compile(table(), tolerance=0.1, **options)
    point = c([1.5, 0.0]) if "domain" in options or "outside" in options else c([0.5, 0.0])
    assert c.certificate.semantics == ("float32" if "dtype" in options else "float64") and np.isfinite(point)
    assert ("extrapolates" in c.explain()) == ("domain" in options)
    _, held = table().split(0)
    assert c.error_estimate == pytest.approx(error_at(c, table(), held), rel=1e-5)


def test_several_outputs_and_regions():
    x, y = samples(150, outputs=2)
    inside = (x**2).sum(axis=1) < 0.95
    c = pa.compile(Table(x[inside], y[inside]), pa.Ball([0, 0], 1.0), tolerance=0.2)
    assert c([0.1, 0.2]).shape == (2,) and "y0" not in c.explain()


WRONG = [
    ({"lipschitz": 3.0}, "nothing is proved"),
    ({"hessian": 3.0}, "nothing is proved"),
    ({"norm": 2}, "cannot be estimated"),
    ({"method": "fitted"}, "method of its own"),
    ({"executor": 2}, "no function to call"),
    ({"checkpoint": "folder"}, "no function to call"),
    ({"retries": 1}, "no function to call"),
    ({"max_evaluations": 500}, "no function to call"),
    ({"vectorize": True}, "no function to call"),
    ({"trace": True}, "no function to trace"),
    ({"on_error": "exclude"}, "no function that may fail"),
    ({"sharpness": 2.0}, "temperature is fitted"),
]


@pytest.mark.parametrize(("options", "why"), WRONG, ids=[next(iter(o)) for o, _ in WRONG])
def test_options_about_functions_are_refused(options, why):
    with pytest.raises(UnsupportedError, match=rf"{next(iter(options))} is .*{why}.*Leave {next(iter(options))} out"):
        pa.compile(table(), tolerance=0.1, **options)


def test_limits_on_the_size():
    with pytest.raises(SizeError, match="max_bytes"):
        pa.compile(table(), tolerance=0.1, max_bytes=100)
    with pytest.raises(SizeError, match="max_value"):
        pa.compile(table(), tolerance=0.1, max_value=1e-3)
    with pytest.raises(ToleranceError, match="tolerance is 0"):
        pa.compile(table(), tolerance=0)
    with pytest.raises(UnsupportedError, match="dtype"):
        pa.compile(table(), tolerance=0.1, dtype=torch.float16)


def test_domains_that_do_not_fit():
    with pytest.raises(DomainError, match=r"of 120 rows lie outside .*the first in row \d+ \(counted from 0\)"):
        pa.compile(table(), "[0,1]^2", tolerance=0.1)
    for domain in ("[0,1]", pa.PointCloud([[0.0, 1.0]], 0.1), (pa.Box([0], [1]), pa.Box([0], [1]))):
        with pytest.raises(DomainError):
            pa.compile(table(), domain, tolerance=0.1)
    with pytest.raises(DomainError, match="no domain is given"):
        pa.compile(np.sin, tolerance=0.1)


def test_a_table_is_not_a_function(compiled):
    for ask in (pa.plan, pa.head):
        with pytest.raises(UnsupportedError, match="where a function is expected"):
            ask(table(), "[-1,1]^2", **({"tolerance": 0.1} if ask is pa.plan else {"keys": 4}))
    with pytest.raises(UnsupportedError, match="no function to compare with"):
        pa.attack(compiled)
    with pytest.raises(TargetFailedError, match="values at its rows only"):
        compiled.errors_at(np.zeros((1, 2)))


def test_without_scikit_learn(monkeypatch):
    monkeypatch.setitem(sys.modules, "partita.learn", None)
    monkeypatch.delattr(pa, "learn", raising=False)
    with pytest.raises((MissingExtraError, ImportError)):
        pa.compile(table(), tolerance=0.1)
    code = (
        "import sys; sys.modules['sklearn'] = None\nimport numpy as np, partita as pa\n"
        "x = np.linspace(0, 1, 30)[:, None]\n"
        "try:\n    pa.compile(pa.Table(x, x[:, 0]), tolerance=0.1)\n"
        "except pa.PartitaError as error:\n    print(type(error).__name__, error)\n"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert said.startswith("MissingExtraError tables need the extra 'sklearn'")


# --- which rows, and noise -------------------------------------------------------------------------------------------------


def test_the_held_out_rows_do_not_depend_on_the_order():
    x, y = samples(60)
    order = np.random.default_rng(1).permutation(60)
    held, moved = Table(x, y).split(3)[1], Table(x[order], y[order]).split(3)[1]
    assert {x[i].tobytes() for i in held} == {x[order][i].tobytes() for i in moved} and len(held) == 12
    assert set(Table(x, y).split(4)[1]) != set(held) and len(Table(x, y, held_out=0.5).split(3)[1]) == 30
    assert Table(x, y).sha256 != Table(x[order], y[order]).sha256 != Table(x, y, inputs=["a", "b"]).sha256


def test_copies_of_an_input_stay_together():
    x, y = samples(40)
    t = Table(np.concatenate([x, x]), np.concatenate([y, y + 0.01]))
    seen, held = t.split(0)
    assert not {r.tobytes() for r in t.X[seen]} & {r.tobytes() for r in t.X[held]} and len(held) == 16
    c = pa.compile(t, tolerance=0.5)
    assert c.certificate.samples == 8 and c.certificate.facts["rows_held_out"] == 16


def test_noise_is_measured_and_said():
    x, y = samples(80)
    rng = np.random.default_rng(2)
    t = Table(np.repeat(x, 3, axis=0), np.repeat(y, 3) + 0.02 * rng.normal(size=240))
    noise = t.noise()
    assert noise.inputs == 80 and 0.017 < noise.deviation < 0.023
    first, second = noise.rows
    assert (t.X[first] == t.X[second]).all() and abs(t.y[first] - t.y[second]) == pytest.approx(noise.largest)
    c = pa.compile(t, tolerance=0.3)
    assert "table is noisy: 80 inputs occur" in c.explain() and "standard deviation of about 0.0" in c.explain()
    with pytest.raises(ToleranceError, match=r"is noisy: .*no function is within 0\.01 of both.*Average rows"):
        pa.compile(t, tolerance=0.01)
    assert Table(x, y).noise() is None and Table(np.repeat(x, 2, axis=0), np.repeat(y, 2)).noise() is None  # controls


# --- afterwards ------------------------------------------------------------------------------------------------------------


def test_saved_loaded_and_rechecked(compiled, tmp_path):
    loaded = pa.load(compiled.save(tmp_path / "head"))
    assert loaded([0.2, 0.3]) == compiled([0.2, 0.3]) and loaded.target.is_table and loaded.table is None
    own = {check.name: check for check in pa.recheck(compiled)}
    assert all(check.holds for check in own.values()) and own["estimate"].checked
    alone = {check.name: check for check in pa.recheck(loaded)}
    assert not alone["estimate"].checked and "the table is not stored" in alone["estimate"].detail
    assert all(check.holds and check.checked for check in pa.recheck(loaded, function=table()))
    t = table()
    for wrong in (Table(t.X, t.y + 1e-9, inputs=["T", "I"]), Table(t.X, t.y)):
        with pytest.raises(AnotherFunctionError, match="hash"):
            pa.recheck(loaded, function=wrong)
    with pytest.raises(UnsupportedError, match="was fitted to the table"):
        loaded.with_function(np.sin)
    assert loaded.bound_range()[0].hi > 1 and "estimated" in loaded.explain()


def test_an_estimate_that_was_changed_is_found(compiled):
    data = compiled.certificate.to_json()
    data["error_estimate"] = (0.5 * compiled.error_estimate).hex()
    from dataclasses import replace

    checks = pa.recheck(replace(compiled, certificate=Certificate.from_json(data)))
    assert [check.name for check in checks if not check.holds] == ["estimate"]
    data = compiled.certificate.to_json() | {"kind": "proved", "error_estimate": None, "error_bound": (1.0).hex()}
    with pytest.raises(FormatError, match="nothing can be proved"):
        Certificate.from_json(data)


def test_the_checker_has_nothing_to_verify(compiled, tmp_path):
    from partita_check.cli import run

    report, code = run(compiled.save(tmp_path / "head"))
    assert code == 2 and "nothing can be verified" in report["reason"] and "table of samples" in report["function"]
    black_box = pa.compile(lambda z: z[:, 0] ** 2, "[0,1]", tolerance=0.1, trace=False).save(tmp_path / "other")
    assert "black box" in run(black_box)[0]["function"]  # negative control


def test_onnx_and_pictures(compiled, tmp_path):
    onnxruntime = pytest.importorskip("onnxruntime")
    session = onnxruntime.InferenceSession(compiled.export_onnx(tmp_path / "head.onnx"))
    points = table().X[:5]
    assert np.allclose(session.run(None, {"z": points})[0].ravel(), compiled(points))
    pytest.importorskip("matplotlib")
    pa.plots.plot_head(compiled, tmp_path / "head.svg")


# --- files -----------------------------------------------------------------------------------------------------------------


@pytest.fixture
def runs(tmp_path):
    x, y = samples(60)
    lines = [f"{a!r},{b!r},run {i},{v!r}" for i, ((a, b), v) in enumerate(zip(x.tolist(), y.tolist()))]
    path = tmp_path / "runs.csv"
    path.write_text("T,I,note,V\n" + "\n".join(lines) + "\n")
    return path


def test_a_csv_file_is_read_as_it_is(runs):
    t = Table.from_csv(runs, inputs=["T", "I"], outputs=["V"])
    x, y = samples(60)
    assert np.array_equal(t.X, x) and np.array_equal(t.y, y) and t.name == "runs.csv" and t.y.ndim == 1
    text = runs.read_text().replace(",", ";").splitlines()
    runs.write_text(
        "\ufeff# made by hand\n\n" + "\n".join([text[0].replace("T;I", ' T ;"I"'), *text[1:5], "", *text[5:]])
    )
    again = Table.from_csv(runs, ["T", "I"], ["V"])
    assert np.array_equal(again.X, x) and again.lines[:5].tolist() == [4, 5, 6, 7, 9]
    two = Table.from_csv(runs, ["T"], ["V", "I"])
    assert two.y.shape == (60, 2) and two.outputs == ("V", "I")


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("1.0,,x,2.0", r"line 5, column 'I': the value is missing.*Fill it in"),
        ("1.0,NaN,x,2.0", r"line 5, column 'I': the value is missing"),
        ("hot,1.0,x,2.0", r"line 5, column 'T': 'hot' is not a number$"),
        ('"1,5",1.0,x,2.0', r"'1,5' is not a number. Write decimals with a point"),
        ("1.0,1.0,x", r"line 5: found 3 fields; expected 4, as in line 1"),
        ("1.0,1.0,x,inf", r"column 'V': the value in line 5 is infinite"),
        ('1.0,1.0,"x,2.0', r"cannot be read as a CSV file"),
    ],
)
def test_fields_that_are_no_numbers(line, said, runs):
    lines = runs.read_text().splitlines()
    runs.write_text("\n".join([*lines[:4], line, *lines[5:]]))
    with pytest.raises(TableError, match=said):
        Table.from_csv(runs, ["T", "I"], ["V"])


def test_files_and_columns_that_do_not_exist(runs, tmp_path):
    for path, inputs, outputs, said in [
        (tmp_path / "none.csv", ["T"], ["V"], "No such file"),
        (tmp_path, ["T"], ["V"], "cannot be read"),
        (runs, ["Temp"], ["V"], "has no column 'Temp'; its columns are T, I, note, V"),
        (runs, ["T"], ["nota"], "Did you mean 'note'"),
        (runs, ["T"], ["T"], "column 'T' is an input and an output"),
        (runs, ["T", "T"], ["V"], "column 'T' is named twice"),
    ]:
        with pytest.raises(TableError, match=said):
            Table.from_csv(path, inputs, outputs)
    for text, said in [
        ("", "is empty"),
        ("# only\n", "is empty"),
        ("T,V\n", "no rows below line 1"),
        ("1,2\n3,4\n", "found numbers where the names"),
        ("T,T,V\n1,2,3\n", "2 columns called 'T'"),
    ]:
        runs.write_text(text)
        with pytest.raises(TableError, match=said):
            Table.from_csv(runs, ["T"], ["V"])
    runs.write_bytes(b"T,V\n\xff\xfe,1\n")
    with pytest.raises(TableError, match="cannot be read"):
        Table.from_csv(runs, ["T"], ["V"])
    with pytest.raises(TableError, match="cannot be read"):
        Table.from_csv(runs, ["T"], ["V"], delimiter="ab")


@pytest.mark.parametrize(
    ("change", "error", "said"),
    [
        (lambda x, y: (np.where(x == x[3, 0], np.nan, x), y), TableError, r"'T': the value in row 3 .*missing \(NaN\)"),
        (lambda x, y: (x, np.where(y > y.mean(), np.inf, y)), TableError, r"'y0': .*infinite, and \d+ more"),
        (lambda x, y: (x * [1.0, 0.0], y), TableError, r"column 'I': the value is 0 in every row.*Leave I out"),
        (lambda x, y: (x[:9], y[:9]), TableError, "9 different inputs in 9 rows; expected at least 10"),
        (lambda x, y: (np.repeat(x[:3], 20, axis=0), y), TableError, "3 different inputs in 60 rows"),
        (lambda x, y: (x[:, 0], y), ShapeError, r"X has shape \(60,\)"),
        (lambda x, y: (x, y[:-1]), ShapeError, "X has 60 rows and y has 59"),
        (lambda x, y: (x, ["a"] * 60), ShapeError, "not an array of real numbers"),
        (lambda x, y: (x[:, :1], y), TableError, r"inputs is \['T', 'I'\]; expected 1 names"),
    ],
)
def test_arrays_that_cannot_be_used(change, error, said):
    with pytest.raises(error, match=said):
        Table(*change(*samples(60)), inputs=["T", "I"])


def test_a_share_that_is_none():
    for share in (0, 1.0, "half"):
        with pytest.raises(TableError, match="held_out"):
            Table(*samples(60), held_out=share)
    with pytest.raises(TableError, match="expected a list of names"):
        Table(*samples(60), inputs="T")


def test_parquet(tmp_path, monkeypatch):
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    x, y = samples(60)
    columns = {"T": x[:, 0], "I": x[:, 1], "V": y, "n": np.arange(60), "text": ["a"] * 60, "gap": [None, *[1.0] * 59]}
    path = tmp_path / "runs.parquet"
    parquet.write_table(arrow.table(columns), path, row_group_size=7)
    t = Table.from_parquet(path, inputs=["T", "n"], outputs=["V"])
    assert np.array_equal(t.X, np.column_stack([x[:, 0], np.arange(60)])) and np.array_equal(t.y, y)
    for inputs, said in [
        (["text"], "column 'text': it holds string; expected numbers"),
        (["gap"], r"column 'gap': the value in row 0 .*missing"),
        (["t"], "has no column 't'"),
    ]:
        with pytest.raises(TableError, match=said):
            Table.from_parquet(path, inputs, ["V"])
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(TableError, match="cannot be read as a parquet file"):
        Table.from_parquet(path, ["T"], ["V"])
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(MissingExtraError, match="parquet files need the extra 'tables'"):
        Table.from_parquet(path, ["T"], ["V"])


def test_the_command_line(runs, tmp_path, capsys):
    def run(*arguments):
        with pytest.raises(SystemExit) as ended:
            main([*map(str, arguments)])
        return ended.value.code, capsys.readouterr()

    head = tmp_path / "head"
    given = ("--table", runs, "--inputs", "T, I", "--outputs", "V", "--tolerance", "0.3")
    code, said = run("compile", *given, "--out", head, "--json")
    found = json.loads(said.out)
    assert code in (0, None) and found["kind"] == "estimated" and found["error_bound"] is None
    assert run("verify", head, "--table", runs)[0] in (
        0,
        None,
    ) and "rows that were held out" in capsys.readouterr().out + str(run("verify", head, "--table", runs)[1].out)
    text = runs.read_text().replace("run 7", "run 8")
    runs.write_text(text)
    assert run("verify", head, "--table", runs)[0] in (0, None)  # a column that was not used
    runs.write_text(text.replace("0.", "0.0", 1))
    assert "is not the table" in run("verify", head, "--table", runs)[1].err
    for wrong, said in [
        (("--out", tmp_path / "a", "--tolerance", "0.1"), "expected EXPR or --table"),
        (("x0", *given, "--out", tmp_path / "a"), "both are given"),
        ((*given[:4], "--tolerance", "0.1", "--out", tmp_path / "a"), "--outputs"),
        (("x0", "--tolerance", "0.1", "--out", tmp_path / "a"), "--domain"),
        (("x0", "--domain", "[0,1]", "--inputs", "T", "--tolerance", "0.1", "--out", tmp_path / "a"), "needs --table"),
        ((*given, "--out", tmp_path / "a", "--lipschitz", "3"), "--lipschitz is 3.0"),
    ]:
        code, printed = run("compile", *wrong)
        assert code not in (0, None) and said in printed.err, wrong
    assert not (tmp_path / "a").exists()
