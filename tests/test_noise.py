"""Functions that do not return the same value twice: noise and its size, last digits that differ, and what shows only later."""

from __future__ import annotations

import concurrent.futures
import random
import re
import threading

import numpy as np
import pytest
from slow_functions import Counted, depends_on_the_batch, waves

import partita as pa
from partita.errors import NotDeterministicError
from partita.functions.probing import Asker, Calls
from partita.functions.repeats import Repeats

SQUARE = pa.Box([-1, -1], [1, 1])
OPTIONS = {"tolerance": 0.1, "trace": False}


class Varying:
    """`waves`, and something else from a certain point on, or by chance. All copies have one key in a checkpoint."""

    checkpoint_key = "varying"

    def __init__(self, change, after=0, deviation=0.0):
        self.change, self.after, self.deviation = change, after, deviation
        self.calls, self.source, self.lock = 0, np.random.default_rng(0), threading.Lock()

    def __call__(self, z):
        with self.lock:
            values = waves(z)
            for i in range(len(z)):
                self.calls += 1
                values[i] = self.change(values[i]) if self.calls > self.after else values[i]
            return values + self.deviation * self.source.normal(size=len(z))


def says(f, **options):
    with pytest.raises(NotDeterministicError, match="expected the same value twice") as caught:
        pa.compile(f, SQUARE, **OPTIONS, **options)
    return str(caught.value)


@pytest.mark.parametrize("deviation", [1e-6, 0.05, 30.0])
def test_the_size_of_the_noise_is_said(deviation):
    f = Varying(lambda y: y, deviation=deviation)
    said = says(f)
    found = float(re.search(r"standard deviation of about ([-+.e\d]+)", said)[1])
    assert 0.6 * deviation < found < 1.5 * deviation  # 44 degrees of freedom
    assert "an estimate, from 5 calls at 11 points" in said and "pa.Table" in said and "seed" in said
    assert "last digits" not in said and f.calls < 8 * 11


def test_noise_in_few_evaluations():
    """Calls that measure the noise stay within max_evaluations; without room for them two calls must do."""
    rest = Asker(lambda z: z, ((2,),), "numpy", "f", Calls(rows=95, most=100, reserved=0))
    assert rest.calls.left == 5
    f = Varying(lambda y: y, deviation=0.1)
    says(f, max_evaluations=100)
    assert f.calls <= 100


@pytest.mark.parametrize("size", [1e-9, 1.0, 1e7])
def test_last_digits_are_no_noise(size):
    almost, noisy = (Varying(lambda y, by=by: y * (1 + by * (y > 0)), after=11) for by in (4e-16, 1e-12))
    said = says(lambda z: size * almost(z))
    assert "Only the last digits differ" in said and "OMP_NUM_THREADS=1" in said and "standard deviation" not in said
    places = int(re.search(r"np\.round\(y, (\d+)\)", said)[1])
    assert 1e-13 * size < 10.0**-places < 1e-10 * size
    assert "last digits" not in says(lambda z: size * noisy(z))  # negative control


def test_what_is_compared():
    points, one = np.zeros((3, 2)), np.array([[1.0, 2.0], [0.0, -3.0], [4.0, 1e-20]])
    assert Repeats("f", None, points, [one, one.copy(), one]).agree
    moved = one + np.array([[0, 0], [0, 0], [0, 1e-17]])
    found = Repeats("f", None, points, [one, moved])
    assert not found.agree and found.differ_in_last_digits
    other = Repeats("f", None, points, [one, one + 0.5, one - 0.5])
    assert not other.differ_in_last_digits and other.deviation == pytest.approx(0.5)
    small = Repeats("f", None, points, [one, one + 1e-6], np.float32)  # arithmetic of eight digits
    assert small.differ_in_last_digits and not Repeats("f", None, points, [one, one + 1e-6]).differ_in_last_digits


# --- what shows only later ---------------------------------------------------------------------------------------------


def test_what_changes_during_the_work_is_found_at_its_end():
    alone = pa.compile(Varying(lambda y: y + 0.01, after=10**9), SQUARE, **OPTIONS)
    with concurrent.futures.ThreadPoolExecutor(2) as threads:
        steady = Varying(lambda y: y + 0.01, after=10**9)
        c = pa.compile(steady, SQUARE, executor=threads, **OPTIONS)
        assert c.evaluations == alone.evaluations and steady.calls == c.evaluations + 11
        late = Varying(lambda y: y + 0.01, after=alone.evaluations - 5)
        said = says(late, executor=threads)
        assert "perhaps on another worker" in said and "must not differ in files" in said and "last digits" not in said
        said = says(Varying(lambda y: y + 4e-16 * (y > 0.5), after=alone.evaluations - 5), executor=threads)
        assert "Only the last digits differ" in said
        most = Varying(lambda y: y, after=10**9)
        pa.compile(most, SQUARE, executor=threads, max_evaluations=alone.evaluations + 4, **OPTIONS)
        assert most.calls <= alone.evaluations + 4


class Machines:
    """An executor of two machines, which take tasks by chance after the first few, which all go to one of them."""

    _max_workers = 2

    def __init__(self, alone):
        self.alone, self.chance, self.machine = alone, random.Random(0), 0

    def submit(self, function, *args):
        self.alone -= 1
        self.machine = 0 if self.alone > 0 else self.chance.randrange(2)
        future = concurrent.futures.Future()
        future.set_result(function(*args))
        return future


@pytest.mark.parametrize("alone", [0, 20], ids=["from the beginning", "late"])
def test_workers_that_differ(alone):
    """Each machine is steady by itself, and they differ from each other."""
    machines = Machines(alone)
    assert "last digits" not in says(lambda z: waves(z) + 1e-3 * machines.machine, executor=machines)
    machines = Machines(alone)
    said = says(lambda z: waves(z) * (1 + 4e-16 * machines.machine), executor=machines)
    assert "Only the last digits differ" in said
    for f in (waves, depends_on_the_batch):  # negative controls; the last digits of the second may vary
        assert pa.compile(f, SQUARE, executor=Machines(alone), **OPTIONS).certificate.kind == "estimated"


def test_a_checkpoint_that_f_contradicts(tmp_path):
    first = pa.compile(Varying(lambda y: y, after=10**9), SQUARE, checkpoint=tmp_path, **OPTIONS)
    changed = Varying(lambda y: y + 0.01)
    assert pa.compile(changed, SQUARE, checkpoint=tmp_path, **OPTIONS).error_estimate == first.error_estimate
    assert changed.calls == 0  # nothing new was asked, so nothing was compared
    finer = {"trace": False, "tolerance": 1e-3, "checkpoint": tmp_path}
    with pytest.raises(NotDeterministicError) as caught:
        pa.compile(changed, SQUARE, **finer)
    said = str(caught.value)
    assert f"from the checkpoint {tmp_path}, the second now" in said and "has changed: delete that folder" in said
    assert changed.calls == 3
    with pytest.raises(NotDeterministicError, match="Only the last digits differ"):
        pa.compile(Varying(lambda y: y * (1 + 4e-16)), SQUARE, **finer)
    with pytest.raises(NotDeterministicError, match=r"raised when it was asked again \(ValueError: no licence"):
        pa.compile(Varying(_raises), SQUARE, **finer)
    same = Varying(lambda y: y)  # negative control
    c = pa.compile(same, SQUARE, **finer)
    assert 0 < same.calls < c.evaluations


def _raises(y):
    raise ValueError("no licence")


def test_a_checkpoint_costs_three_calls(tmp_path):
    log = Counted(str(tmp_path / "log"))
    coarse = pa.compile(log, SQUARE, checkpoint=tmp_path / "kept", **OPTIONS)
    assert log.calls == coarse.evaluations
    fine = pa.compile(log, SQUARE, checkpoint=tmp_path / "kept", tolerance=1e-3, trace=False)
    assert coarse.evaluations < log.calls <= fine.evaluations + 3 + coarse.evaluations
