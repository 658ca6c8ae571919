"""Checkpoints: work that was killed goes on to the same bits and asks f for next to nothing again; damage is found."""

from __future__ import annotations

import errno
import functools
import os
import random
import resource
import signal
import subprocess
import sys
import time
import types
from pathlib import Path

import numpy as np
import pytest
import slow_functions
import torch
from slow_functions import Counted, waves

import partita as pa
from partita.errors import CheckpointError
from partita.workers import Checkpoint, Uncertain, checkpoint, content, content_of, crew_of, in_charge, keyed
from partita.workers.checkpoint import pack, unpack

SQUARE = pa.Box([-1, -1], [1, 1])
KEY, OTHER = b"k" * 32, b"o" * 32
RESULTS = [
    None,
    True,
    -(10**30),
    0.1,
    float("inf"),
    "text: ä",
    (1, [2.5, None], {"a": (np.int64(3), np.bool_(True))}),
    np.arange(12, dtype=np.float32).reshape(3, 4),
    {"columns": np.array([[True, False]]), "empty": np.zeros((0, 3))},
]


def same(a, b):
    if isinstance(a, np.ndarray):
        return isinstance(b, np.ndarray) and a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    if isinstance(a, (tuple, list)):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[k], b[k]) for k in a)
    return a == b


def bits(c):
    return c.certificate.to_json(), {n: t.numpy().tobytes() for n, t in c.head.state_dict().items()}


# --- the folder ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("result", RESULTS, ids=repr)
def test_results_come_back_as_they_were(result, tmp_path):
    assert same(unpack(pack(result)), result)
    with_one = Checkpoint(tmp_path)
    with_one.append(KEY, result)
    with_one.append(KEY, 7)
    for place in (with_one, Checkpoint(tmp_path)):
        first, second = place.results(KEY)
        assert same(first, result) and second == 7 and OTHER not in place and not list(place.results(OTHER))


@pytest.mark.parametrize("result", [object(), {1: 2}, np.array([None]), {1, 2}], ids=lambda value: type(value).__name__)
def test_what_cannot_be_kept(result):
    with pytest.raises(TypeError, match="a checkpoint cannot keep"):
        pack(result)


def test_a_torn_record_is_ignored(tmp_path):
    kept = Checkpoint(tmp_path)
    kept.append(KEY, 1)
    kept.append(OTHER, np.ones(100))
    (path,) = tmp_path.iterdir()
    whole = path.read_bytes()
    for size in range(len(whole)):
        path.write_bytes(whole[:size])
        found = list(Checkpoint(tmp_path).results(KEY))
        assert found == [1] or (found == [] and size < len(whole) / 2)
        assert list(Checkpoint(tmp_path).results(OTHER)) == []
    path.write_bytes(whole)
    assert len(list(Checkpoint(tmp_path).results(OTHER))) == 1


def test_a_changed_byte_is_found(tmp_path):
    """Whichever byte of a record is changed: it is an error, or the record is not there; it is never another result."""
    kept = Checkpoint(tmp_path)
    kept.append(KEY, (1.25, "abc"))
    (path,) = tmp_path.iterdir()
    whole, errors = bytearray(path.read_bytes()), 0
    for place in range(len(whole)):
        whole[place] ^= 1
        path.write_bytes(whole)
        try:
            assert list(Checkpoint(tmp_path).results(KEY)) == []
        except CheckpointError as error:
            assert "is damaged at byte" in str(error) and "Delete that file" in error.hint
            errors += 1
        whole[place] ^= 1
    assert errors > len(pack((1.25, "abc")))


def test_files_of_others_are_left_alone(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "x.records").write_bytes(b"something else that is long enough to have a header of its own, as it were")
    with pytest.raises(CheckpointError, match=r"x\.records is damaged"):
        Checkpoint(tmp_path)
    (tmp_path / "x.records").unlink()
    Checkpoint(tmp_path).append(KEY, 1)
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_what_is_no_folder(tmp_path):
    (tmp_path / "file").write_text("")
    for place in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(CheckpointError, match="cannot be used"):
            pa.compile("x0", pa.Box([0], [1]), tolerance=0.1, checkpoint=place)


def test_a_full_disk(tmp_path, monkeypatch):
    """The disk fills up in the middle of a record: the error says so, what was stored stays, and the work goes on later."""
    kept = Checkpoint(tmp_path)
    kept.append(KEY, 1)
    written = os.write

    def full(file, data):
        if len(data) > 50:
            return written(file, data[:50])
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(checkpoint.os, "write", full)
    with pytest.raises(CheckpointError, match="is on a full disk; what was stored before is kept") as raised:
        kept.append(KEY, np.ones(100))
    assert "Free some space" in raised.value.hint
    monkeypatch.undo()
    kept.append(KEY, 2)
    assert list(Checkpoint(tmp_path).results(KEY)) == [1, 2]


def test_a_full_disk_stops_a_compile_and_leaves_no_half_head(tmp_path):
    """In a process whose files may have 4 kB, as if the disk were that small."""
    code = (
        "import resource, sys, partita as pa\n"
        "from slow_functions import Counted\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))\n"
        "f = Counted('/dev/null')\n"
        "try:\n"
        "    pa.compile(f, '[-1,1]^2', tolerance=0.05, trace=False, checkpoint=sys.argv[1])\n"
        "except pa.PartitaError as error:\n"
        "    print(error)\n"
        "c = pa.compile('sin(9*x0)*x1', '[-1,1]^2', tolerance=0.1, method='hard')\n"
        "try:\n"
        "    c.save(sys.argv[2])\n"
        "except pa.PartitaError as error:\n"
        "    print(type(error).__name__, error)\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent)}
    command = [sys.executable, "-c", code, tmp_path / "kept", tmp_path / "head"]
    found = subprocess.run(command, capture_output=True, text=True, env=environment, check=True)
    assert "cannot be written: File too large; what was stored before is kept" in found.stdout
    assert "NotWrittenError" in found.stdout and "does not fit: File too large; nothing of it is left" in found.stdout
    assert [p.name for p in tmp_path.iterdir()] == ["kept"]
    log = tmp_path / "log"
    c = pa.compile(Counted(str(log)), SQUARE, tolerance=0.05, trace=False, checkpoint=tmp_path / "kept")
    assert c.evaluations > Counted(str(log)).calls > 0
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] != 4096


# --- what belongs to what ---------------------------------------------------------------------------------------------


def adder(n):
    return lambda z: z[:, 0] + n


class Model:
    def __init__(self, weights):
        self.weights = weights

    def __call__(self, z):
        return z @ self.weights


class Warped(Model):
    def __call__(self, z):
        return np.sin(z @ self.weights)


GAIN = 2.0


def uses_a_global(z):
    return GAIN * z[:, 0]


def test_equal_content_has_equal_keys():
    net = torch.nn.Linear(2, 1)
    for make in (
        lambda: adder(1),
        lambda: Model(np.ones(2)),
        lambda: functools.partial(np.add, 1),
        lambda: net,
        lambda: Model([1.0, {"a": {3, 1, 2}}]).__call__,
        lambda: np.vectorize(adder(1)),
        lambda: slow_functions.waves,
    ):
        assert keyed(make()) == keyed(make())


def test_other_content_has_other_keys(monkeypatch):
    net = torch.nn.Linear(2, 1)
    listed = [
        adder(1),
        adder(2),
        adder(1.0),
        Model(np.ones(2)),
        Model(np.ones(2, np.float32)),
        Model(np.ones((1, 2))),
        Warped(np.ones(2)),
        functools.partial(np.add, 1),
        functools.partial(np.add, 2),
        functools.partial(np.multiply, 1),
        np.sin,
        np.cos,
        Model([1.0, {"a": {3, 1}}]),
        uses_a_global,
        lambda z: z[:, 0],
        lambda z: z[:, 1],
        lambda z, n=1: z[:, 0] + n,
        net,
        torch.nn.Linear(2, 1),
        types.SimpleNamespace(a=1),
    ]
    keys = [keyed(function) for function in listed]
    assert len(set(keys)) == len(listed)
    before = keyed(uses_a_global)
    monkeypatch.setitem(globals(), "GAIN", 3.0)
    assert keyed(uses_a_global) != before


def test_functions_that_installed_packages_make_differ_by_what_they_hold():
    """A closure of a library is the library's code and the user's numbers."""
    spline = pytest.importorskip("scipy.interpolate").BSpline
    one, two = (spline([0, 0, 1, 1], [0.0, c], 1) for c in (1.0, 2.0))
    assert keyed(one) == keyed(spline([0, 0, 1, 1], [0.0, 1.0], 1)) != keyed(two)
    first, second = (functools.lru_cache(maxsize=None)(adder(n)) for n in (1, 2))
    assert keyed(first) != keyed(second)


def test_what_holds_itself():
    loop = [1]
    loop.append(loop)
    other = [2]
    other.append(other)
    assert content_of(loop) == content_of(loop) != content_of(other)


def test_what_cannot_be_read_needs_a_name(tmp_path):
    function = Model(np.ones(2))
    function.connection = open(os.devnull)  # noqa: SIM115
    try:
        _needs_a_name(function, tmp_path)
    finally:
        function.connection.close()


def _needs_a_name(function, tmp_path):
    with pytest.raises(Uncertain):
        keyed(function)
    with pytest.raises(CheckpointError, match="whose content cannot be read") as raised:
        pa.compile(function, SQUARE, tolerance=0.1, trace=False, checkpoint=tmp_path)
    assert "checkpoint_key = 'version 1'" in raised.value.hint
    function.checkpoint_key = "version 1"
    pa.compile(function, SQUARE, tolerance=0.1, trace=False, checkpoint=tmp_path)
    first = keyed(function)
    function.checkpoint_key = "version 2"
    assert keyed(function) != first


def test_results_of_other_code_are_not_used(tmp_path, monkeypatch):
    with crew_of(None, tmp_path).at_work() as mine:
        assert mine.recall("sum", (1, 2), lambda: _slowly(3)) == 3
        assert mine.recall("sum", (1, 2), lambda: _slowly(4)) == 3
        assert mine.recall("sum", (1, 3), lambda: _slowly(4)) == 4
        monkeypatch.setattr(in_charge, "library_content", lambda: b"a later version")
        assert mine.recall("sum", (1, 2), lambda: _slowly(5)) == 5


def _slowly(n):
    time.sleep(0.01)
    return n


# --- going on --------------------------------------------------------------------------------------------------------

OPTIONS = {"tolerance": 0.05, "trace": False}


def test_a_second_run_asks_nothing_and_gives_the_same(tmp_path):
    alone = bits(pa.compile(waves, SQUARE, **OPTIONS))
    log = str(tmp_path / "log")
    kept = pa.compile(Counted(log), SQUARE, checkpoint=tmp_path / "kept", **OPTIONS)
    calls = Counted(log).calls
    assert bits(kept)[1] == alone[1] and calls == kept.evaluations
    again = pa.compile(Counted(log), SQUARE, checkpoint=tmp_path / "kept", **OPTIONS)
    assert bits(again) == bits(kept) and Counted(log).calls == calls and again.evaluations == kept.evaluations
    finer = pa.compile(Counted(log), SQUARE, checkpoint=tmp_path / "kept", **{**OPTIONS, "tolerance": 1e-3})
    assert 0 < Counted(log).calls - calls < finer.evaluations - 20  # runs share answers
    found = pa.attack(finer, checkpoint=tmp_path / "kept", samples=500, restarts=2)
    asked = Counted(log).calls
    assert pa.attack(finer, checkpoint=tmp_path / "kept", samples=500, restarts=2) == found
    assert Counted(log).calls == asked > calls


def test_a_function_that_varies_is_still_found_out(tmp_path):
    source = np.random.default_rng(0)
    noisy = functools.partial(_noisy, source)
    noisy_key = types.SimpleNamespace(calls=0)

    def f(z):
        noisy_key.calls += len(z)
        return noisy(z)

    f.checkpoint_key = "noisy"
    for _ in range(2):
        with pytest.raises(pa.PartitaError, match="expected the same value twice"):
            pa.compile(f, SQUARE, tolerance=0.1, trace=False, checkpoint=tmp_path)
    assert noisy_key.calls <= 7 * 11  # the size of the noise is measured, once


def _noisy(source, z):
    return z[:, 0] + source.normal(size=len(z))


def test_an_expression_goes_on_too(tmp_path, monkeypatch):
    monkeypatch.setattr(in_charge, "_WORTH_KEEPING", 0.0)  # everything is kept, however fast it was
    text, options = "1/(1 + 25*(x0^2 + x1^2))", {"tolerance": 1e-6}
    alone = bits(pa.compile(text, SQUARE, **options))
    assert bits(pa.compile(text, SQUARE, checkpoint=tmp_path, **options)) == alone
    stored = sum(p.stat().st_size for p in tmp_path.iterdir())
    assert stored > 1000
    assert bits(pa.compile(text, SQUARE, checkpoint=tmp_path, **options)) == alone
    assert sum(p.stat().st_size for p in tmp_path.iterdir()) == stored


KILLING = """
import os, random, signal, sys, time
import partita as pa
from slow_functions import Counted

place, kills, seed, workers = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
f = Counted(place + "/log", 0.002)
options = {"tolerance": 0.003, "trace": False, "vectorize": False}

def run(name):
    c = pa.compile(f, "[-1,1]^2", checkpoint=place + "/kept", executor=workers or None, **options)
    c.save(place + "/" + name)

if __name__ == "__main__":
    pa.compile("x0", "[0,1]", tolerance=0.1)  # everything is loaded before the first copy of this process
    chance = random.Random(seed)
    done = 0
    for k in range(kills):
        child = os.fork()
        if not child:
            os.setpgid(0, 0)
            run(f"early-{k}")
            os._exit(0)
        time.sleep(chance.uniform(0.0, 0.35 if not workers else 2.5))
        try:
            os.killpg(child, signal.SIGKILL)
        except ProcessLookupError:
            os.kill(child, signal.SIGKILL)
        done += os.waitpid(child, 0)[1] == 0
    run("last")
    print(done)
"""


def killed(tmp_path, kills, seed, workers=0):
    """Run a compile that is killed so many times; how often it ended before that, and how often f was called."""
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent)}
    arguments = [sys.executable, "-c", KILLING, str(tmp_path), str(kills), str(seed), str(workers)]
    if workers:  # processes that are started anew read the script
        script = tmp_path / "script.py"
        script.write_text(KILLING)
        arguments[1:3] = [str(script)]
    found = subprocess.run(arguments, capture_output=True, text=True, env=environment, check=False, timeout=300)
    assert found.returncode == 0, found.stderr
    return int(found.stdout), Counted(str(tmp_path / "log")).calls


@pytest.mark.skipif(not hasattr(os, "fork"), reason="copies processes")
@pytest.mark.parametrize("seed", [1, 2])
def test_killed_at_twenty_random_moments(tmp_path, seed):
    """The bits are those of a run that nobody killed, and every kill costs at most the answers of one call of f."""
    alone = pa.compile(waves, SQUARE, tolerance=0.003, trace=False)
    ended, calls = killed(tmp_path, 20, seed)
    last = pa.load(tmp_path / "last")
    assert bits(last)[1] == bits(alone)[1] and last.certificate.terms == alone.certificate.terms
    assert ended < 15  # most runs were killed
    assert calls <= alone.evaluations + 20 * _most_at_once()
    for place in tmp_path.glob("early-*"):  # a killed save leaves a hidden draft, and no head
        assert bits(pa.load(place)) == bits(last)


def _most_at_once():
    return 11 + 0.25 / 0.002


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="copies processes")
def test_killed_with_its_workers(tmp_path):
    alone = pa.compile(waves, SQUARE, tolerance=0.003, trace=False)
    _, calls = killed(tmp_path, 6, 3, workers=2)
    assert bits(pa.load(tmp_path / "last"))[1] == bits(alone)[1]
    assert calls <= alone.evaluations + 6 * 8 * 100


@pytest.mark.skipif(not hasattr(os, "fork"), reason="copies processes")
def test_two_processes_in_one_folder(tmp_path):
    alone = pa.compile(waves, SQUARE, **OPTIONS)
    code = (
        "import sys, partita as pa\n"
        "from slow_functions import Counted\n"
        "c = pa.compile(Counted(sys.argv[1] + '/log', 0.001), '[-1,1]^2', tolerance=0.05, trace=False, "
        "checkpoint=sys.argv[1] + '/kept')\n"
        "c.save(sys.argv[1] + '/' + sys.argv[2])\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent)}
    started = [
        subprocess.Popen([sys.executable, "-c", code, str(tmp_path), name], env=environment) for name in ("a", "b")
    ]
    assert [process.wait(timeout=120) for process in started] == [0, 0]
    heads = [bits(pa.load(tmp_path / name)) for name in ("a", "b")]
    assert heads[0] == heads[1] and heads[0][1] == bits(alone)[1]
    log = str(tmp_path / "log")
    before = Counted(log).calls
    third = pa.compile(Counted(log), SQUARE, checkpoint=tmp_path / "kept", **OPTIONS)
    assert bits(third) == heads[0] and Counted(log).calls == before


INTERRUPTED = """
import signal, sys
from partita.cli import main
signal.signal(signal.SIGINT, signal.default_int_handler)  # it is ignored where the tests run in the background of a shell
main(sys.argv[1:])
"""


@pytest.mark.parametrize("workers", [(), ("--workers", "2")], ids=["alone", "workers"])
def test_ctrl_c(tmp_path, workers):
    """It stops at once, leaves no process and no half head, and the same command goes on where it was."""
    module = Path(slow_functions.__file__)
    name = tmp_path / "mine.py"
    name.write_text(f"from slow_functions import Counted\nf = Counted({str(tmp_path / 'log')!r}, 0.01)\n")
    arguments = ["compile", f"{name}:f", "--domain", "[-1,1]^2", "--tolerance", "0.05", "--out", str(tmp_path / "head")]
    arguments += ["--checkpoint", str(tmp_path / "kept"), *workers]
    environment = {**os.environ, "PYTHONPATH": str(module.parent)}
    command = [sys.executable, "-c", INTERRUPTED, *arguments]
    log = Counted(str(tmp_path / "log"))
    process = subprocess.Popen(command, env=environment, start_new_session=True, stderr=subprocess.PIPE, text=True)
    while log.calls < 60:
        time.sleep(0.01)
        assert process.poll() is None
    os.killpg(process.pid, signal.SIGINT)
    _, said = process.communicate(timeout=20)
    assert process.returncode == 130 and "Traceback" not in said
    ended = time.monotonic() + 10
    while time.monotonic() < ended:
        try:
            os.killpg(process.pid, 0)
            time.sleep(0.05)
        except ProcessLookupError:
            break
    else:
        pytest.fail("a process is still there")
    assert not (tmp_path / "head").exists()
    before = log.calls
    assert subprocess.run(command, env=environment, check=False, capture_output=True).returncode == 0
    c = pa.load(tmp_path / "head")
    assert 0 < log.calls - before < c.certificate.facts["evaluations"] - 20


def test_the_keys_do_not_depend_on_the_process():
    """A key that depended on addresses or on the seed of hashes would never be found again."""
    code = "from test_checkpoints import *; print(content_of(Model([{'b', 'a'}, {'x': 1}]), adder(3), uses_a_global).hex())"
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent)}
    found = {
        subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            text=True,
            env={**environment, "PYTHONHASHSEED": seed},
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(found) == 1 and content.library_content() == content.library_content() and random.Random(1)
