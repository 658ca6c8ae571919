"""A real Dask cluster of processes: the same bits, workers that are killed, and a scheduler that goes away."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import slow_functions
from slow_functions import Counted, Once, kills, waves

import partita as pa
from partita.cli import main
from partita.errors import TargetFailedError, WorkersLostError
from partita.workers import crew_of

distributed = pytest.importorskip("distributed")
pytestmark = pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::DeprecationWarning")

SQUARE = pa.Box([-1, -1], [1, 1])
MODULE = Path(slow_functions.__file__)
SETTINGS = {
    "distributed.comm.timeouts.connect": "5s",
    "distributed.scheduler.allowed-failures": 1,
    "distributed.admin.tick.limit": "60s",  # nothing is logged about two slow cores
    "logging.distributed": "critical",
}


@pytest.fixture(scope="module")
def client():
    import dask

    paths = f"{MODULE.parent}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    with (
        dask.config.set(SETTINGS | {"distributed.nanny.environ.PYTHONPATH": paths}),
        distributed.LocalCluster(
            n_workers=2, threads_per_worker=1, processes=True, dashboard_address=None, silence_logs=50
        ) as cluster,
        distributed.Client(cluster, set_as_default=False) as found,
    ):
        yield found


def made_of(c):
    return c.certificate.to_json() | {"why": c.why}, {n: t.numpy().tobytes() for n, t in c.head.state_dict().items()}


@pytest.mark.parametrize("as_executor", [False, True], ids=["client", "get_executor"])
def test_a_client_changes_no_bit(client, as_executor):
    executor = client.get_executor() if as_executor else client
    options = {"tolerance": 0.05, "trace": False}
    alone = pa.compile(waves, SQUARE, **options)
    c = pa.compile(waves, SQUARE, executor=executor, **options)
    assert made_of(c) == made_of(alone) and c.evaluations == alone.evaluations
    found = pa.attack(c, samples=500, restarts=2)
    assert pa.attack(c, samples=500, restarts=2, executor=executor) == found
    assert client.status == "running"  # it belongs to the caller


def test_a_function_without_a_name_travels(client):
    exponent = 2
    c = pa.compile(lambda z: z[:, 0] ** exponent, SQUARE, tolerance=0.1, trace=False, executor=client)
    assert c.certificate.kind == "estimated"


def test_a_long_proof_on_dask(client, monkeypatch):
    from partita.proofs import bisection, grid_proof

    for module in (bisection, grid_proof):
        monkeypatch.setattr(module, "ROUND", 4)
    monkeypatch.setattr(grid_proof._Difference, "boxes_at_once", lambda self: 16)
    text, options = "1/(1 + 25*(x0^2 + x1^2))", {"tolerance": 1e-3, "method": "fitted"}
    assert made_of(pa.compile(text, SQUARE, executor=client, **options)) == made_of(pa.compile(text, SQUARE, **options))


def test_a_large_shared_value_is_sent_once(client):
    import numpy as np

    with crew_of(client).at_work() as mine:
        shared = np.arange(400_000.0)
        assert list(mine.spread(_plus, shared, list(range(20)))) == [shared.sum() + k for k in range(20)]
        assert mine.door._sent[0] is shared
        small = np.ones(3)
        assert list(mine.spread(_plus, small, [1, 2])) == [4, 5] and mine.door._sent[0] is shared


def _plus(shared, task, progress):
    return float(shared.sum()) + task


def test_a_killed_worker_is_replaced(client, tmp_path):
    mark = tmp_path / "mark"
    mark.touch()
    c = pa.compile(Once(str(mark), kills=True), SQUARE, tolerance=0.2, trace=False, executor=client)
    assert not mark.exists()
    assert made_of(c)[1] == made_of(pa.compile(waves, SQUARE, tolerance=0.2, trace=False))[1]


def test_a_worker_killed_from_outside(client, tmp_path):
    """A worker dies while it calls f; nothing is asked twice but what was under way."""
    f = Counted(str(tmp_path / "log"), 0.004)
    alone = pa.compile(waves, SQUARE, tolerance=0.003, trace=False)
    killed = []

    def progress(*what):
        if not killed and f.calls > 100:
            pid = next(iter(client.run(os.getpid).values()))
            killed.append(pid)
            os.kill(pid, signal.SIGKILL)

    c = pa.compile(f, SQUARE, tolerance=0.003, trace=False, executor=client, progress=progress)
    assert killed and made_of(c)[1] == made_of(alone)[1]
    assert c.evaluations >= alone.evaluations


def test_a_function_that_kills_every_worker_is_named(client):
    with pytest.raises(WorkersLostError, match="the executor stopped working") as raised:
        pa.compile(kills, SQUARE, tolerance=0.2, trace=False, executor=client)
    assert "checkpoint=DIR" in raised.value.hint


def test_an_error_of_f_comes_from_the_worker(client, tmp_path):
    mark = tmp_path / "mark"
    mark.touch()
    with pytest.raises(TargetFailedError, match="the licence server did not answer"):
        pa.compile(Once(str(mark)), SQUARE, tolerance=0.2, trace=False, executor=client)


# --- a scheduler that was started elsewhere ---------------------------------------------------------------------------


@pytest.fixture
def cluster(tmp_path):
    """A scheduler and two workers, as the `dask` commands start them: the file with the address, and the processes."""
    environment = {
        **os.environ,
        "PYTHONPATH": f"{MODULE.parent}{os.pathsep}{os.environ.get('PYTHONPATH', '')}",
        "DASK_DISTRIBUTED__COMM__TIMEOUTS__CONNECT": "5s",
        "DASK_DISTRIBUTED__DEPLOY__LOST_WORKER_TIMEOUT": "5s",
    }
    place = tmp_path / "scheduler.json"
    started = [_dask("scheduler", "--host", "127.0.0.1", "--port", "0", "--scheduler-file", place, env=environment)]
    try:
        started += [
            _dask("worker", "--nthreads", "1", "--host", "127.0.0.1", "--scheduler-file", place, "--local-directory",
                  tmp_path, env=environment)
            for _ in range(2)
        ]  # fmt: skip
        yield place, started
    finally:
        for process in started:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _dask(*arguments, env):
    command = [sys.executable, "-m", "dask", *map(str, arguments), "--no-dashboard"]
    quiet = subprocess.DEVNULL
    return subprocess.Popen(command, env=env, start_new_session=True, stdout=quiet, stderr=quiet)


def test_a_scheduler_on_the_command_line_and_after_it_is_lost(cluster, tmp_path, capfd):
    place, (scheduler, *_) = cluster
    ended = time.monotonic() + 60
    while not place.exists():
        assert time.monotonic() < ended and scheduler.poll() is None
        time.sleep(0.1)
    address = json.loads(place.read_text())["address"]
    common = ["--domain", "[-1,1]^2", "--tolerance", "0.2", "--json"]
    for name, where in (("first", str(place)), ("second", address)):
        with pytest.raises(SystemExit) as stop:
            main(["compile", f"{MODULE}:waves", *common, "--out", str(tmp_path / name), "--scheduler", where])
        said = capfd.readouterr()
        assert stop.value.code == 0 and json.loads(said.out)["kind"] == "estimated", said.err
    alone = pa.compile(waves, SQUARE, tolerance=0.2, trace=False)
    assert made_of(pa.load(tmp_path / "first"))[1] == made_of(alone)[1]

    f = Counted(str(tmp_path / "log"), 0.01)

    def progress(*what):
        if f.calls > 60 and scheduler.poll() is None:
            os.killpg(scheduler.pid, signal.SIGKILL)
            scheduler.wait()

    client = distributed.Client(address, set_as_default=False, timeout="10s")
    options = {"tolerance": 0.003, "trace": False, "checkpoint": tmp_path / "kept"}
    with pytest.raises(WorkersLostError, match="the executor stopped working") as raised:
        pa.compile(f, SQUARE, executor=client, progress=progress, **options)
    assert "checkpoint=DIR" in raised.value.hint
    client.close(timeout=1)
    before = f.calls
    c = pa.compile(f, SQUARE, **options)  # goes on without the cluster
    assert made_of(c)[1] == made_of(pa.compile(waves, SQUARE, tolerance=0.003, trace=False))[1]
    assert f.calls - before < c.evaluations - 30

    with pytest.raises(WorkersLostError, match="there is no Dask scheduler at"):
        pa.compile("x0", "[0,1]", tolerance=0.1, executor=pa_scheduler(address))


def pa_scheduler(address):
    from partita.workers import scheduler

    return scheduler(address)


def test_an_estimator_through_joblib(client, monkeypatch):
    """`n_jobs` of partita.learn is joblib's, whose work Dask takes if it is told to."""
    joblib = pytest.importorskip("joblib")
    np = pytest.importorskip("numpy")
    learn = pytest.importorskip("partita.learn")
    from partita.learn import smoothing

    monkeypatch.setattr(smoothing, "AT_ONCE", 4000)  # several blocks of rows
    x = np.random.default_rng(0).normal(size=(700, 2))
    model = learn.PartitionRegressor(20, random_state=0, scaling="standard", inverse_temperature=2.0, ridge=0.1)
    alone = model.fit(x, np.sin(2 * x[:, 0])).loo_predictions_
    with joblib.parallel_config(backend="dask", client=client, wait_for_workers_timeout=30):
        shared = model.set_params(n_jobs=2).fit(x, np.sin(2 * x[:, 0])).loo_predictions_
    assert shared.tobytes() == alone.tobytes()
