"""n_jobs of the estimators: the same bits however many parts of a fit run at the same time, and wherever they run."""

from __future__ import annotations

import joblib
import numpy as np
import pytest

pytest.importorskip("sklearn")

from partita.errors import UnsupportedError
from partita.learn import PartitionClassifier, PartitionRegressor, model, parallel, search, smoothing
from partita.learn.parallel import Jobs

KINDS = {
    "all rows are keys": ({}, 90),
    "few keys": ({"centers": 20, "random_state": 0, "scaling": "standard"}, 400),
    "affine values": ({"centers": 8, "values": "affine", "random_state": 0, "ridge": 0.1}, 240),
    "smoother": ({"solver": "smoother"}, 90),
}


def data(n):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(n, 3))
    return x, np.sin(2 * x[:, 0]) + x[:, 1] * x[:, 2] + 0.1 * rng.normal(size=n)


def bits(fitted):
    tensors = {name: t.numpy().tobytes() for name, t in fitted.head_.state_dict().items()}
    return tensors | {"left out": fitted.loo_predictions_.tobytes(), "penalty": fitted.ridge_}


@pytest.fixture
def cut(monkeypatch):
    """Fits of tests, cut into blocks and spread as those of long tables are; how many tasks were handed out together."""
    monkeypatch.setattr(smoothing, "AT_ONCE", 4000)
    monkeypatch.setattr(search, "AT_ONCE", 4000)
    monkeypatch.setattr(search, "_SHARED", 1)
    monkeypatch.setattr(search, "_SURVEYED", 60)
    monkeypatch.setattr(model, "_ALL_WEIGHED", 100)
    monkeypatch.setattr(model, "_KEYS_WEIGHED", 30)
    counts, original = [], Jobs.map

    def counted(self, function, tasks):
        counts.append(len(tasks) if self.width > 1 else 0)
        return original(self, function, tasks)

    monkeypatch.setattr(Jobs, "map", counted)
    return counts


@pytest.mark.parametrize("kind", KINDS)
def test_a_fit_is_the_same_however_many_jobs_there_are(kind, cut):
    given, n = KINDS[kind]
    x, y = data(n)
    alone = bits(PartitionRegressor(**given).fit(x, y))
    assert max(cut) == 0
    for count in (1, 2, 5):
        assert bits(PartitionRegressor(n_jobs=count, **given).fit(x, y)) == alone
    assert max(cut) > 2
    labels = np.where(y > 0, "up", "down")
    plain, shared = (PartitionClassifier(n_jobs=count, **given).fit(x, labels) for count in (None, 2))
    assert bits(shared) == bits(plain) and shared.proba_sharpness_ == plain.proba_sharpness_


@pytest.mark.parametrize("backend", ["threading", "loky"])
def test_the_backend_that_joblib_is_told(backend, cut):
    given, n = KINDS["few keys"]
    x, y = data(n)
    alone = bits(PartitionRegressor(**given).fit(x, y))
    with joblib.parallel_config(backend=backend, n_jobs=2):  # None leaves the number to it
        assert bits(PartitionRegressor(**given).fit(x, y)) == alone
    assert max(cut) > 2
    with joblib.parallel_backend(backend, n_jobs=3):
        assert Jobs().width == 3 and Jobs(2).width == 2 and Jobs(1).width == 1


def test_sums_in_another_order_would_be_seen(cut, monkeypatch):
    """Control: blocks that are added up in another order give other bits."""
    given, n = KINDS["few keys"]
    x, y = data(n)
    alone = bits(PartitionRegressor(**given).fit(x, y))
    original = smoothing.Rows.each
    monkeypatch.setattr(smoothing.Rows, "each", lambda *given: reversed(list(original(*given))))
    assert bits(PartitionRegressor(**given).fit(x, y)) != alone


def test_one_job_hands_nothing_out(monkeypatch):
    def never(*args, **more):
        raise AssertionError("joblib was called")

    monkeypatch.setattr(parallel, "Parallel", never)
    x, y = data(90)
    PartitionRegressor().fit(x, y)
    assert list(Jobs(2).map(abs, [-1])) == [1]  # nor does a single task
    with pytest.raises(AssertionError, match="joblib was called"):
        list(Jobs(2).map(abs, [-1, -2]))


def test_the_interpreter_is_told_to_use_one_thread_elsewhere(monkeypatch):
    """Linear algebra with several threads adds up in another order: workers are limited as this process is."""
    seen = []
    monkeypatch.setattr(parallel, "threadpool_limits", lambda limits: seen.append(limits) or _Nothing())
    assert parallel._run(abs, -1, home=parallel.os.getpid()) == 1 and seen == []
    assert parallel._run(abs, -1, home=0) == 1 and seen == [1]


class _Nothing:
    def __enter__(self): ...

    def __exit__(self, *error): ...


@pytest.mark.parametrize("count", [0, 1.5, "all", True])
def test_numbers_that_are_none(count):
    with pytest.raises(UnsupportedError, match=r"n_jobs is .*; expected None, or an integer other than 0"):
        PartitionRegressor(n_jobs=count).fit(*data(20))


def test_saved_estimators_keep_it(tmp_path):
    from partita.learn import load

    x, y = data(40)
    kept = load(PartitionRegressor(n_jobs=2).fit(x, y).save(tmp_path / "model"))
    assert kept.n_jobs == 2 and kept.get_params()["n_jobs"] == 2
