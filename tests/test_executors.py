"""Work outside the process: the same bits whoever does it, faults that are survived or named, and no listener on a network."""

from __future__ import annotations

import concurrent.futures
import json
import multiprocessing
import os
import subprocess
import sys
import threading
import time
from concurrent.futures import Future
from pathlib import Path

import numpy as np
import pytest
import slow_functions
import torch
from slow_functions import Locked, Once, always_raises, depends_on_the_batch, peak, prints, raises_strangely, waves

import partita as pa
from partita.cli import main
from partita.errors import NotDeterministicError, PartitaError, TargetFailedError, UnsupportedError, WorkersLostError
from partita.functions import probing
from partita.proofs import bisection, cell_proof, grid_proof
from partita.workers import Crew, crew, crew_of, processes
from partita.workers.executors import Door

SQUARE = pa.Box([-1, -1], [1, 1])


@pytest.fixture(scope="module")
def pool():
    door = processes(2)
    yield door
    door.close()


class Backwards:
    """An executor that runs tasks in one thread, the latest first, so that results arrive out of order."""

    _max_workers = 3

    def __init__(self):
        self.waiting, self.done, self.lock = [], [], threading.Condition()
        threading.Thread(target=self.run, daemon=True).start()

    def submit(self, function, *args):
        future = Future()
        with self.lock:
            self.waiting.append((len(self.done) + len(self.waiting), future, function, args))
            self.lock.notify()
        return future

    def run(self):
        while True:
            with self.lock:
                self.lock.wait_for(lambda: self.waiting)
                self.lock.wait(0.005)  # for more to arrive
                number, future, function, args = self.waiting.pop()
            self.done.append(number)
            if future.set_running_or_notify_cancel():
                future.set_result(function(*args))


class OnlyMap:
    """What a multiprocessing Pool has, without processes."""

    def map(self, function, items):
        return list(map(function, items))


EXECUTORS = {
    "threads": lambda: concurrent.futures.ThreadPoolExecutor(3),
    "backwards": Backwards,
    "map": OnlyMap,
}


def made_of(c):
    """Everything that a compiled head consists of, but for versions and machines."""
    return c.certificate.to_json() | {"why": c.why}, {n: t.numpy().tobytes() for n, t in c.head.state_dict().items()}


@pytest.fixture
def short_batches(monkeypatch):
    """Proofs of ordinary tests, cut into batches as those of large heads are."""
    monkeypatch.setattr(grid_proof._Difference, "boxes_at_once", lambda self: 16)
    monkeypatch.setattr(grid_proof, "ROUND", 2)
    monkeypatch.setattr(bisection, "_BOXES_AT_ONCE", 16)
    monkeypatch.setattr(bisection, "ROUND", 4)
    monkeypatch.setattr(cell_proof, "_CELLS_AT_ONCE", 16)
    monkeypatch.setattr(cell_proof, "ROUND", 3)


@pytest.fixture
def spreads(monkeypatch):
    """How many tasks were handed out together, each time."""
    counts, original = [], Crew.spread

    def spread(self, run, shared, tasks, *others, **more):
        counts.append(len(tasks))
        return original(self, run, shared, tasks, *others, **more)

    monkeypatch.setattr(Crew, "spread", spread)
    return counts


PROOFS = [
    ("1/(1 + 25*(x0^2 + x1^2))", {"tolerance": 1e-3, "method": "fitted"}),
    ("abs(x0^2 + x1 - 0.2)", {"tolerance": 0.1, "method": "adaptive"}),
    ("sin(3*x0)*x1", {"tolerance": 0.01, "method": "affine"}),
    ("sin(3*x0) + x0*cos(2*x1)", {"tolerance": 0.05, "method": "hard", "dtype": torch.float32}),
    ("exp(x0)*x1", {"tolerance": 1e-4, "norm": 2, "method": "fitted"}),
]


@pytest.mark.usefixtures("short_batches")
@pytest.mark.parametrize(("text", "options"), PROOFS, ids=[text for text, _ in PROOFS])
def test_a_proof_is_the_same_whoever_makes_it(text, options, pool, spreads):
    alone = made_of(pa.compile(text, SQUARE, **options))
    assert max(spreads, default=0) > 1 or options["method"] == "hard" or "norm" in options
    for executor in [pool, *(make() for make in EXECUTORS.values())]:
        c = pa.compile(text, SQUARE, executor=executor, **options)
        assert made_of(c) == alone
    checks = pa.recheck(c)
    assert [(k.name, k.detail) for k in pa.recheck(c, executor=pool)] == [(k.name, k.detail) for k in checks]
    assert pa.attack(c, bound=1.0, executor=pool) == pa.attack(c, bound=1.0)


@pytest.mark.parametrize("options", [{}, {"lipschitz": 6.0}, {"method": "train"}, {"vectorize": True}], ids=str)
def test_a_black_box_is_the_same_whoever_calls_it(options, pool):
    function = (lambda p: waves(p[None])[0]) if "vectorize" in options else waves
    given = {"tolerance": 0.2, "trace": False, **options}
    alone = pa.compile(function, SQUARE, **given)
    for executor in [*(make() for make in EXECUTORS.values()), *([pool] if function is waves else [])]:
        c = pa.compile(function, SQUARE, executor=executor, **given)
        assert made_of(c) == made_of(alone) and c.evaluations == alone.evaluations
    found = pa.attack(alone, bound=1.0, samples=500, restarts=4)
    assert pa.attack(c, bound=1.0, samples=500, restarts=4, executor=executor) == found
    assert pa.plan(function, SQUARE, executor=executor, **given).why == pa.plan(function, SQUARE, **given).why


@pytest.mark.parametrize("free", [False, True], ids=["as it is", "control"])
def test_last_digits_that_depend_on_the_batch(free, pool, tmp_path, monkeypatch):
    """Workers and later runs call such a function with the same batches; one that is divided freely gives other bits."""
    if free:
        check = probing._check_repeatable
        monkeypatch.setattr(probing, "_check_repeatable", lambda *given: check(*given) in (True, False))
    options = {"tolerance": 0.05, "trace": False}
    alone = made_of(pa.compile(depends_on_the_batch, SQUARE, **options))
    if free:
        with pytest.raises(NotDeterministicError, match="expected the same value twice"):
            pa.compile(depends_on_the_batch, SQUARE, executor=pool, **options)
        return
    shared = [made_of(pa.compile(depends_on_the_batch, SQUARE, executor=executor, **options)) for executor in (pool, 5)]
    assert shared == [alone, alone]
    kept = {**options, "checkpoint": tmp_path}
    for grown in range(1, 8, 3):
        with pytest.raises(KeyboardInterrupt):
            pa.compile(depends_on_the_batch, SQUARE, progress=_Stop(grown), **kept)
        assert list(tmp_path.iterdir())
    assert made_of(pa.compile(depends_on_the_batch, SQUARE, executor=pool, **kept)) == alone


class _Stop:
    """Progress that stops the work after so many reports."""

    def __init__(self, after):
        self.left = after

    def __call__(self, *what):
        self.left -= 1
        if self.left < 0:
            raise KeyboardInterrupt


def test_a_result_that_depends_on_the_order_of_arrival_would_be_seen(monkeypatch):
    """Control: a list of answers in the order in which they arrive is another list."""
    tasks, executor = list(range(40)), Backwards()
    there = Crew(Door(executor, 3))
    assert list(there.spread(_square, None, tasks)) == [k * k for k in tasks]
    assert executor.done != sorted(executor.done)


def _square(shared, task, progress):
    return task * task


def test_a_number_is_that_many_processes():
    before = set(multiprocessing.active_children())
    c = pa.compile(peak, SQUARE, tolerance=0.02, executor=2, trace=False)
    assert made_of(c) == made_of(pa.compile(peak, SQUARE, tolerance=0.02, trace=False))
    ended = time.monotonic() + 20
    while set(multiprocessing.active_children()) > before and time.monotonic() < ended:
        time.sleep(0.05)
    assert set(multiprocessing.active_children()) <= before


def test_joblib_and_multiprocessing():
    loky = pytest.importorskip("joblib.externals.loky")
    alone = made_of(pa.compile(peak, SQUARE, tolerance=0.02, trace=False))
    with loky.ProcessPoolExecutor(2) as executor:  # it also takes functions that have no name
        assert made_of(pa.compile(peak, SQUARE, tolerance=0.02, trace=False, executor=executor)) == alone
        nameless = pa.compile(lambda z: z[:, 0] ** 2, SQUARE, tolerance=0.1, trace=False, executor=executor)
        assert nameless.certificate.kind == "estimated"
    with multiprocessing.get_context("spawn").Pool(2) as executor:
        assert made_of(pa.compile(peak, SQUARE, tolerance=0.02, trace=False, executor=executor)) == alone


def test_threads_of_blas_change_no_bit(tmp_path):
    """A process that uses both cores and workers that use one each agree."""
    code = (
        "import partita as pa, sys\n"
        "from slow_functions import peak\n"
        "if __name__ == '__main__':\n"
        "    c = pa.compile('1/(1 + 25*(x0^2 + x1^2))', '[-1,1]^2', tolerance=1e-6, executor=int(sys.argv[1]) or None)\n"
        "    c.save(sys.argv[2])\n"
    )
    folders = []
    for workers, threads in (("0", "2"), ("2", "2"), ("0", "1")):
        folders.append(tmp_path / f"{workers}-{threads}")
        limits = {f"{library}_NUM_THREADS": threads for library in ("OMP", "MKL", "OPENBLAS", "NUMBA")}
        environment = {**os.environ, **limits, "PYTHONPATH": str(Path(__file__).parent)}
        script = tmp_path / "script.py"
        script.write_text(code)
        subprocess.run([sys.executable, script, workers, folders[-1]], check=True, env=environment)
    kept = [[(f / name).read_bytes() for name in ("head.safetensors", "certificate.json")] for f in folders]
    assert kept[0] == kept[1] == kept[2]


# --- faults ----------------------------------------------------------------------------------------------------------


def test_a_function_that_raises_once_is_called_again(tmp_path, pool):
    expected = made_of(pa.compile(waves, SQUARE, tolerance=0.2, trace=False))[1]
    for executor in (None, pool):
        mark = tmp_path / "mark"
        mark.touch()
        c = pa.compile(Once(str(mark)), SQUARE, tolerance=0.2, trace=False, executor=executor, retries=1)
        assert not mark.exists() and made_of(c)[1] == expected
        mark.touch()
        with pytest.raises(TargetFailedError, match="the licence server did not answer"):
            pa.compile(Once(str(mark)), SQUARE, tolerance=0.2, trace=False, executor=executor)


def test_a_killed_worker_does_not_stop_the_work(tmp_path):
    mark = tmp_path / "mark"
    mark.touch()
    door = processes(2)
    c = pa.compile(Once(str(mark), kills=True), SQUARE, tolerance=0.2, trace=False, executor=door)
    assert not mark.exists() and door.executor.restarts == 1
    assert made_of(c)[1] == made_of(pa.compile(waves, SQUARE, tolerance=0.2, trace=False))[1]
    door.close()


def test_a_pool_of_the_caller_that_breaks_is_named(tmp_path):
    mark = tmp_path / "mark"
    mark.touch()
    with (
        concurrent.futures.ProcessPoolExecutor(2, mp_context=multiprocessing.get_context("spawn")) as executor,
        pytest.raises(WorkersLostError, match="the executor stopped working") as raised,
    ):
        pa.compile(Once(str(mark), kills=True), SQUARE, tolerance=0.2, trace=False, executor=executor)
    assert "checkpoint=DIR" in raised.value.hint


def test_an_executor_that_was_shut_down_is_named():
    executor = concurrent.futures.ThreadPoolExecutor(2)
    executor.shutdown()
    with pytest.raises(WorkersLostError, match="cannot schedule new futures"):
        pa.compile(waves, SQUARE, tolerance=0.2, trace=False, executor=executor)


def test_what_f_raises_on_a_worker_is_what_it_raises_here(pool):
    messages = []
    for executor in (None, pool):
        with pytest.raises(PartitaError) as raised:
            pa.compile(always_raises, SQUARE, tolerance=0.2, trace=False, executor=executor)
        messages.append(str(raised.value))
    assert messages[0] == messages[1] and "no licence" in messages[0]
    notes = "\n".join(raised.value.__cause__.__notes__)
    assert "on a worker (process" in notes and "slow_functions.py" in notes
    with pytest.raises(PartitaError, match="Strange"):
        pa.compile(raises_strangely, SQUARE, tolerance=0.2, trace=False, executor=pool)


def test_what_cannot_travel_is_named(pool):
    with pytest.raises(UnsupportedError, match="cannot be sent to other processes") as raised:
        pa.compile(lambda z: z[:, 0], SQUARE, tolerance=0.2, trace=False, executor=pool)
    assert "top of a module" in raised.value.hint
    with pytest.raises(UnsupportedError, match="cannot be sent to other processes"):
        pa.compile(Locked(), SQUARE, tolerance=0.2, trace=False, executor=pool)


@pytest.mark.parametrize("executor", [0, -1, True, 1.5, "2", OnlyMap], ids=str)
def test_what_is_no_executor(executor):
    with pytest.raises(UnsupportedError, match=r"executor is|number of workers is"):
        pa.compile("x0", pa.Box([0], [1]), tolerance=0.1, executor=executor)


@pytest.mark.parametrize("retries", [-1, 0.5, True, "1"], ids=repr)
def test_what_is_no_number_of_retries(retries):
    with pytest.raises(UnsupportedError, match="retries is"):
        pa.compile("x0", pa.Box([0], [1]), tolerance=0.1, retries=retries)


def test_workers_of_another_version_are_refused(monkeypatch):
    from partita.workers import executors

    own = executors.library_content()
    answers = iter([b"older"])
    monkeypatch.setattr(executors, "library_content", lambda: next(answers, own))
    with pytest.raises(WorkersLostError, match="another version of partita"):
        list(Crew(Door(concurrent.futures.ThreadPoolExecutor(1), 1)).spread(_square, None, [1, 2]))


def test_a_crew_is_in_charge_for_a_while():
    assert crew().door is None
    with crew_of(OnlyMap()).at_work() as mine:
        assert crew() is mine
        with crew_of().at_work():  # what a function of the library does that got no executor of its own
            assert crew() is mine
    assert crew().door is None


# --- the command line ------------------------------------------------------------------------------------------------

MODULE = Path(slow_functions.__file__)


def test_workers_on_the_command_line(tmp_path, capfd):
    name, domain = f"{MODULE}:prints", ["--domain", "[-1,1]^2", "--tolerance", "0.2"]
    plain, shared = tmp_path / "plain", tmp_path / "shared"
    for place, more in ((plain, []), (shared, ["--workers", "2", "--retries", "1"])):
        with pytest.raises(SystemExit) as stop:
            main(["compile", name, *domain, "--out", str(place), "--json", *more])
        assert stop.value.code == 0
        captured = capfd.readouterr()
        assert json.loads(captured.out)["kind"] == "estimated" and "printed by f" in captured.err
    assert (plain / "certificate.json").read_bytes() == (shared / "certificate.json").read_bytes()
    for command in (
        ["attack", str(shared), "--bound", "1", "--samples", "200", "--restarts", "2"],
        ["verify", str(shared)],
    ):
        with pytest.raises(SystemExit) as stop:
            main([*command, "--function", name, "--json", "--workers", "2"])
        assert stop.value.code == 0 and json.loads(capfd.readouterr().out)
    assert prints(np.zeros((1, 2))) == waves(np.zeros((1, 2)))


def test_workers_and_a_scheduler(capfd):
    with pytest.raises(SystemExit) as stop:
        main(
            [
                "plan",
                "x0",
                "--domain",
                "[0,1]",
                "--tolerance",
                "0.1",
                "--workers",
                "2",
                "--scheduler",
                "tcp://127.0.0.1:1",
            ]
        )
    assert stop.value.code == 64 and "not both" in capfd.readouterr().err


LISTENING = """
import partita as pa, pathlib, os
from slow_functions import peak

def listeners():
    own = set()
    for folder in [pathlib.Path(f"/proc/{p}/fd") for p in [os.getpid(), *children()]]:
        for name in os.listdir(folder):
            try:
                own.add(os.readlink(folder / name))
            except FileNotFoundError:  # closed meanwhile
                pass
    found = []
    for table in ("tcp", "tcp6", "udp", "udp6"):
        for line in pathlib.Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if (fields[3] == "0A" or table.startswith("udp")) and f"socket:[{fields[9]}]" in own:
                found.append(line)
    return found

def children():
    import multiprocessing
    return [c.pid for c in multiprocessing.active_children()]

seen = []
if __name__ == "__main__":
    import socket
    watched = []
    def progress(*what):
        watched.append(len(children())); seen.extend(listeners())
    pa.compile(peak, "[-1,1]^2", tolerance=0.02, executor=2, trace=False, progress=progress)
    assert max(watched) == 2 and not seen, (watched, seen)
    with socket.socket() as own:  # control
        own.bind(("127.0.0.1", 0)); own.listen()
        assert len(listeners()) == 1
    print("silent")
"""


@pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="reads Linux's tables of sockets")
def test_nothing_listens_on_a_network(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(LISTENING)
    environment = {**os.environ, "PYTHONPATH": str(MODULE.parent)}
    found = subprocess.run([sys.executable, script], capture_output=True, text=True, env=environment, check=False)
    assert found.stdout.strip() == "silent", found.stderr
