"""Heads that are built in a file: the same bits as in memory, little memory, and no half-written files."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import textwrap
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch

import partita as pa
from partita import errors
from partita.geometry.grid import ProductGrid
from partita.heads import grid_head, table_blocks, tensor_file
from partita.heads.table_blocks import all_finite, blocks_of, largest_size
from partita.heads.tensor_file import TensorFile, map_tensors, write_tensors
from partita.methods import hard
from partita.methods.affine import Affine
from partita.proofs import center_values
from partita.search import affine_cells
from partita.storage import loading

WAVES, SQUARE = "sin(3*x0) + x0*cos(2*x1)", "[-1,1]^2"
FILES = ["certificate.json", "head.json", "head.safetensors"]
CASES = {
    "hard": {"method": "hard", "tolerance": 0.05},
    "hard float32": {"method": "hard", "tolerance": 0.1, "dtype": torch.float32},
    "hard bfloat16": {"method": "hard", "tolerance": 0.3, "dtype": torch.bfloat16},
    "hard, declared": {"method": "hard", "tolerance": 0.2, "lipschitz": 4.5},
    "hard in L1": {"method": "hard", "tolerance": 0.3, "norm": 1},
    "paper": {"method": "paper", "tolerance": 0.3},
    "affine": {"method": "affine", "tolerance": 2e-3},
    "affine float32": {"method": "affine", "tolerance": 2e-3, "dtype": torch.float32},
    "affine, estimated": {"method": "affine", "tolerance": 0.05, "trace": False},
    "not in a table of a grid": {"method": "auto", "tolerance": 1e-4},
}


def files_of(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def compiled(name, **more):
    def waves(z):
        return np.sin(3 * z[:, 0]) + z[:, 0] * np.cos(2 * z[:, 1])

    options = CASES[name]
    black_box = "lipschitz" in options or "trace" in options
    return pa.compile(waves if black_box else WAVES, SQUARE, **{**options, **more})


@pytest.fixture
def small_blocks(monkeypatch):
    """Blocks that do not divide any of the tables."""
    monkeypatch.setattr(center_values, "_CELLS_AT_ONCE", 97)
    monkeypatch.setattr(affine_cells, "_CELLS_AT_ONCE", 89)
    monkeypatch.setattr(table_blocks, "_NUMBERS_AT_ONCE", 83)
    monkeypatch.setattr(hard, "_PAIRS_AT_ONCE", 79)


# --- the same bits ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CASES)
def test_a_head_built_in_a_folder_is_the_head_built_in_memory(name, tmp_path, monkeypatch, small_blocks):
    built = compiled(name, folder=tmp_path / "built")
    monkeypatch.undo()
    whole = compiled(name)
    whole.save(tmp_path / "saved")
    assert files_of(tmp_path / "built") == files_of(tmp_path / "saved")
    assert sorted(files_of(tmp_path / "built")) == FILES
    assert sorted(p.name for p in tmp_path.iterdir()) == ["built", "saved"]
    z = torch.rand(100, 2, dtype=torch.float64) * 2 - 1
    assert torch.equal(built(z), whole(z)) and np.array_equal(built(z.numpy()[0]), whole(z.numpy()[0]))
    assert not built.is_changed and all(check.holds for check in pa.recheck(built))


def test_the_files_of_another_head_differ(tmp_path):
    compiled("hard", folder=tmp_path / "one")
    compiled("hard", folder=tmp_path / "two", tolerance=0.049)
    assert files_of(tmp_path / "one") != files_of(tmp_path / "two")


def test_affine_cells_beyond_the_limit_of_memory_are_computed_in_blocks(tmp_path, monkeypatch, small_blocks):
    whole = compiled("affine")
    monkeypatch.setattr("partita.methods.affine._MOST_CELLS", 500)
    monkeypatch.setattr(affine_cells, "_LISTED_AT_MOST", 100)
    with pytest.raises(errors.PartitaError, match="more than 500 keys"):
        compiled("affine")
    made, compute = [], affine_cells.affine_cells

    def watched(target, grid, sloped=None, cells=None):
        made.append(None if cells is None else len(cells))
        return compute(target, grid, sloped, cells)

    monkeypatch.setattr(affine_cells, "affine_cells", watched)
    built = compiled("affine", folder=tmp_path / "built")
    assert built.certificate == whole.certificate and torch.equal(built.head.values, whole.head.values)
    rounds = -(-built.num_keys // 89)
    assert made[-rounds:] == [89] * (rounds - 1) + [built.num_keys % 89] and None not in made[-rounds - 1 :]
    assert pa.load(tmp_path / "built").certificate == whole.certificate


def test_max_bytes_limits_affine_tables_in_a_folder(tmp_path):
    with pytest.raises(errors.SizeError, match="max_bytes"):
        compiled("affine", folder=tmp_path / "built", max_bytes=5000)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["hard", "affine"])
def test_workers_give_the_same_files(name, tmp_path, monkeypatch):
    compiled(name, folder=tmp_path / "alone", checkpoint=tmp_path / "kept")
    monkeypatch.setattr(center_values, "_CELLS_AT_ONCE", 1500)
    compiled(name, folder=tmp_path / "shared", executor=2)
    assert files_of(tmp_path / "alone") == files_of(tmp_path / "shared")


def test_a_plan_is_built_in_a_folder_too(tmp_path):
    plan = pa.plan(WAVES, SQUARE, tolerance=0.05, method="hard")
    pa.build(plan, folder=tmp_path / "built")
    compiled("hard").save(tmp_path / "saved")
    assert files_of(tmp_path / "built") == files_of(tmp_path / "saved")


@pytest.mark.parametrize("held", [False, True])
def test_a_head_that_misses_the_tolerance_leaves_no_file(held, tmp_path, monkeypatch):
    """The first head misses and is planned again. Its file goes as soon as nobody has it, and with the folder at the latest."""
    build, made, files = Affine.build, [], []

    def missing_once(self, plan, progress=None, seed=0):
        found = build(self, plan, progress, seed)
        files.append(len(list(plan.request.folder.iterdir())))
        if len(files) == 1:
            found = replace(found, certificate=replace(found.certificate, error_bound=1.0))
        made.append(found if held else None)
        return found

    monkeypatch.setattr(Affine, "build", missing_once)
    built = compiled("affine", folder=tmp_path / "built")
    assert files == [1, 2] and built.tolerance_met
    assert (
        sorted(files_of(tmp_path / "built")) == FILES and pa.load(tmp_path / "built").certificate == built.certificate
    )


def test_the_file_of_a_head_goes_with_the_head(tmp_path):
    request = replace(pa.plan(WAVES, SQUARE, tolerance=0.05, method="hard").request, folder=tmp_path)
    plan = pa.plan(WAVES, SQUARE, tolerance=0.05, method="hard")
    found = plan.maker.build(replace(plan, request=request))
    assert found.file in tmp_path.iterdir()
    del found
    assert not list(tmp_path.iterdir())


def test_steepest_neighbours_are_those_of_the_whole_table(monkeypatch):
    grid = ProductGrid.uniform(pa.Box([-1, 0, 2], [1, 1, 7]), (5, 1, 9))
    table = torch.from_numpy(np.random.default_rng(0).normal(size=(45, 2)))
    expected = []
    for i in (0, 2):
        cube = table.numpy().reshape(5, 1, 9, 2)
        moves = np.abs(np.diff(cube, axis=i)).max(axis=-1)
        gaps = np.diff(grid.axes[i]).reshape([-1 if k == i else 1 for k in range(3)])
        index = np.unravel_index((moves / gaps).argmax(), moves.shape)
        expected.append((np.ravel_multi_index(index, grid.counts), moves[index]))
    for at_once in (4, 7, 1 << 18):
        monkeypatch.setattr(hard, "_PAIRS_AT_ONCE", at_once)
        found = hard.steepest_neighbours(grid, table)
        assert np.array_equal(found.x, grid.centers_of([cell for cell, _ in expected]))
        assert found.moved.tolist() == [moved for _, moved in expected]


# --- the file --------------------------------------------------------------------------------------------------------

TENSORS = {
    "head.values": torch.arange(6, dtype=torch.bfloat16).reshape(3, 2),
    "head.centers_0": torch.linspace(0, 1, 3),
    "b": torch.zeros(0, 4, dtype=torch.float64),
    'é"x': torch.tensor(1.5),
    "i": torch.arange(3),
    "h": torch.ones(3, dtype=torch.float16),
    "flag": torch.tensor([True, False, True]),
}


def test_files_are_those_of_the_library_of_the_format(tmp_path):
    path = tmp_path / "a.safetensors"
    for tensors in (TENSORS, {"one": torch.ones(1)}, dict(reversed(TENSORS.items()))):
        write_tensors(path, tensors)
        assert path.read_bytes() == safetensors.torch.save(tensors)
        with open(path, "rb") as file:
            mapped = map_tensors(file)
        assert mapped.keys() == tensors.keys()
        assert all(torch.equal(mapped[n], t) and mapped[n].dtype == t.dtype for n, t in tensors.items())


def test_tensors_that_lie_across_words_are_copied(tmp_path):
    path, data = tmp_path / "a.safetensors", safetensors.torch.save({"x": torch.arange(3.0)})
    header = data[8:-12].rstrip() + b" "  # of an odd length, as other programs may write it
    header += b" " * (len(header) % 2 == 0)
    path.write_bytes(len(header).to_bytes(8, "little") + header + data[-12:])
    with open(path, "rb") as file:
        found = map_tensors(file)["x"]
    assert found.tolist() == [0, 1, 2] and found.data_ptr() % 4 == 0


def broken(header, body=b"\0" * 8):
    return len(header).to_bytes(8, "little") + header + body


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\1",
        b"\377" * 16,
        broken(b"[1]"),
        broken(b"{}"),
        broken(b'{"x": 1}'),
        broken(b'{"x": {"dtype": "F64", "shape": [1]}}'),
        broken(b'{"x": {"dtype": "F64", "shape": [2], "data_offsets": [0, 8]}}'),
        broken(b'{"x": {"dtype": "F64", "shape": [-1], "data_offsets": [0, 8]}}'),
        broken(b'{"x": {"dtype": "F64", "shape": [1.0], "data_offsets": [0, 8]}}'),
        broken(b'{"x": {"dtype": "F64", "shape": [1], "data_offsets": [8, 16]}}'),
        broken(b'{"x": {"dtype": "F64", "shape": [1], "data_offsets": [0, 8]}}', b"\0" * 9),
        broken(b'{"x": {"dtype": "C64", "shape": [1], "data_offsets": [0, 8]}}'),
    ],
)
def test_other_bytes_are_refused(data, tmp_path):
    path = tmp_path / "a.safetensors"
    path.write_bytes(data)
    with open(path, "rb") as file, pytest.raises(errors.FormatError, match=r"a\.safetensors"):
        map_tensors(file)
    path.write_bytes(broken(b'{"x": {"dtype": "F64", "shape": [1], "data_offsets": [0, 8]}}'))  # the control
    with open(path, "rb") as file:
        assert map_tensors(file)["x"].tolist() == [0.0]


def test_writing_to_a_mapped_tensor_changes_no_file_and_is_noticed(tmp_path, monkeypatch):
    monkeypatch.setattr(loading, "_MAPPED_FROM", 0)
    compiled("hard", folder=tmp_path / "built")
    before, c = files_of(tmp_path / "built"), pa.load(tmp_path / "built")
    assert not c.is_changed
    c.head.values[7] += 1
    assert c.is_changed and files_of(tmp_path / "built") == before and not pa.load(tmp_path / "built").is_changed


def test_a_mapped_head_outlives_its_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(loading, "_MAPPED_FROM", 0)
    built = compiled("hard", folder=tmp_path / "built")
    loaded = pa.load(tmp_path / "built")
    compiled("affine", folder=tmp_path / "built", overwrite=True)
    assert not built.is_changed and not loaded.is_changed
    assert pa.load(tmp_path / "built").certificate.theorem == "affine-values"
    with pytest.raises(errors.AlreadyExistsError):
        compiled("hard", folder=tmp_path / "built")
    loaded.save(tmp_path / "again")
    assert torch.equal(pa.load(tmp_path / "again").head.values, built.head.values)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_numbers_that_are_not_finite_are_found_in_any_block(bad, small_blocks):
    table = torch.linspace(-3, 2, 500).reshape(250, 2)
    assert all_finite(table) and largest_size(table) == 3.0
    table[237, 1] = bad
    assert not all_finite(table) and not largest_size(table) <= 3.0
    assert torch.equal(torch.cat([block for (block,) in blocks_of(table[:100])]), table[:100])


@pytest.mark.parametrize(("method", "tolerance"), [("hard", 0.2), ("affine", 0.06)])
def test_half_tables_are_widened_where_they_are_read(method, tolerance, monkeypatch):
    head = pa.compile(WAVES, SQUARE, tolerance=tolerance, method=method, dtype=torch.bfloat16).head
    z, copied, widen = torch.rand(500, 2) * 2 - 1, [], torch.Tensor.to
    expected = head(z)
    monkeypatch.setattr(grid_head, "_WIDENED_AT_MOST", 0)
    monkeypatch.setattr(
        torch.Tensor, "to", lambda t, *given, **named: (copied.append(t.shape), widen(t, *given, **named))[1]
    )
    assert torch.equal(head(z), expected) and copied and head.values.shape not in copied
    monkeypatch.setattr(grid_head, "_WIDENED_AT_MOST", 1 << 24)  # the control
    assert torch.equal(head(z), expected) and head.values.shape in copied
    monkeypatch.undo()
    assert torch.allclose(head.evaluate_dense(z)[:, 0], expected, atol=1e-5)


# --- failures --------------------------------------------------------------------------------------------------------


def test_a_tensor_file_is_whole_or_not_there(tmp_path):
    path = tmp_path / "a.safetensors"
    with pytest.raises(ValueError, match="x were not written"), TensorFile(path, {"x": torch.ones(4)}) as file:
        file.append("x", torch.ones(3))
    assert not path.exists()
    with pytest.raises(KeyError), TensorFile(path, {"x": torch.ones(4)}) as file:
        file.append("x", torch.ones(4))
        raise KeyError
    assert not path.exists()
    for block in (torch.ones(5), torch.ones(4, dtype=torch.float64)):
        with pytest.raises(ValueError, match="does not fit"), TensorFile(path, {"x": torch.ones(4)}) as file:
            file.append("x", block)
    with TensorFile(path, {"x": torch.ones(4)}) as file:
        file.append("x", torch.ones(3))
        file.append("x", torch.zeros(1))
    assert path.read_bytes() == safetensors.torch.save({"x": torch.tensor([1.0, 1, 1, 0])})


def test_a_disk_without_room_is_refused_at_once(tmp_path, monkeypatch):
    usage = type("Usage", (), {"free": 1000})
    monkeypatch.setattr(tensor_file.shutil, "disk_usage", lambda _: usage)
    with pytest.raises(
        errors.NotWrittenError, match=r"does not fit: .* bytes are needed and 1,000 are free.*Free some"
    ):
        compiled("hard", folder=tmp_path / "built")
    assert not list(tmp_path.iterdir())


def test_a_disk_that_fills_up_leaves_nothing(tmp_path, monkeypatch):
    written, pwrite = [], os.pwrite

    def full(file, data, at):
        written.append(len(data))
        if sum(written) > 50_000:
            raise OSError(errno.ENOSPC, "No space left on device")
        return pwrite(file, data, at)

    monkeypatch.setattr(os, "pwrite", full)
    monkeypatch.setattr(center_values, "_CELLS_AT_ONCE", 1000)
    with pytest.raises(errors.NotWrittenError, match="does not fit: No space left on device; nothing of it is left"):
        compiled("hard", folder=tmp_path / "built")
    assert written and not list(tmp_path.iterdir())


@pytest.mark.skipif(not hasattr(signal, "SIGXFSZ"), reason="needs limits of file sizes")
def test_a_limit_of_file_sizes_leaves_nothing(tmp_path):
    """The limit of the operating system, on a process of its own."""
    code = f"""
    import resource
    import partita as pa
    from partita.errors import NotWrittenError
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
    try:
        pa.compile({WAVES!r}, {SQUARE!r}, tolerance=0.05, method="hard", folder={str(tmp_path / "built")!r})
    except NotWrittenError as error:
        print(error)
    """
    said = python(code).stdout
    assert "does not fit: File too large; nothing of it is left" in said and not list(tmp_path.iterdir())


def test_a_folder_that_may_not_be_written_to(tmp_path, monkeypatch):
    def refused(*_):
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(tensor_file.os, "open", refused)
    with pytest.raises(errors.NotWrittenError, match="cannot be written: Permission denied"):
        write_tensors(tmp_path / "a.safetensors", {"x": torch.ones(1)})


def python(code, *more, **options):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])}
    command = [sys.executable, "-c", textwrap.dedent(code), *more]
    return subprocess.run(command, capture_output=True, text=True, env=environment, check=True, **options)


KILLED = """
import os, signal, sys
import partita as pa
from partita.proofs import center_values
center_values._CELLS_AT_ONCE = 400
seen = []
def watch(what, done, of):
    seen.append(what)
    if seen.count("values") == int(sys.argv[2]):
        os.kill(os.getpid(), signal.SIGKILL)
original = center_values._block_of_values
calls = []
def counted(*given):
    calls.append(given[1])
    import time; time.sleep(0.006)  # results that take less are not kept
    return original(*given)
counted.__module__, counted.__qualname__ = original.__module__, original.__qualname__
center_values._block_of_values = counted
pa.compile(FUNCTION, DOMAIN, tolerance=0.05, method="hard", folder=sys.argv[1], checkpoint=sys.argv[3], progress=watch)
print(len(calls), seen.count("values"))
""".replace("FUNCTION", repr(WAVES)).replace("DOMAIN", repr(SQUARE))


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="needs SIGKILL")
def test_a_killed_compile_leaves_no_folder_and_goes_on_where_it_was(tmp_path):
    built, kept = str(tmp_path / "built"), str(tmp_path / "kept")
    with pytest.raises(subprocess.CalledProcessError) as died:
        python(KILLED, built, "20", kept)
    assert died.value.returncode == -signal.SIGKILL and not os.path.exists(built)
    again, total = map(int, python(KILLED, built, "-1", kept).stdout.split())
    assert 0 < again <= total - 19 and total > 25  # what was kept is not computed again
    compiled("hard").save(tmp_path / "saved")
    assert files_of(tmp_path / "built") == files_of(tmp_path / "saved")


# --- memory ----------------------------------------------------------------------------------------------------------

MEASURED = """
import sys, threading, time
from pathlib import Path
import numpy as np, torch
import partita as pa
from partita.storage import loading

loading._MAPPED_FROM = 0

def anonymous():
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("RssAnon")).split()[1]) // 1024

most = 0
def watch():
    global most
    while True:
        most = max(most, anonymous())
        time.sleep(0.005)

def build(**more):
    return pa.compile("sin(x0) + x1", "[0,1]^2", tolerance=TOLERANCE, method="hard", max_bytes=1 << 40, **more)

small = pa.compile("sin(x0) + x1", "[0,1]^2", tolerance=0.05, method="hard")
z = torch.rand(100_000, 2, dtype=torch.float64)
small(z), small([0.5, 0.5]), pa.attack(small), small.save(Path(sys.argv[1]) / f"small, {sys.argv[2]}"), pa.recheck(small)
before = most = anonymous()
threading.Thread(target=watch, daemon=True).start()
if sys.argv[2] == "memory":
    c = build()
else:
    c = build(folder=Path(sys.argv[1]) / "built")
    c = pa.load(Path(sys.argv[1]) / "built")
    c(z), c([0.5, 0.5]), c.error_bound, repr(c), pa.attack(c), pa.recheck(c)
    c.head(z.float().double()), c.save(Path(sys.argv[1]) / "copy")
size = sum(t.nbytes for t in c.head.state_dict().values()) >> 20
print(size, most - before)
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux")
def test_a_table_takes_no_memory(tmp_path):
    """Building, loading, evaluating, attacking, rechecking and saving a table of 48 MiB; built in memory it takes that much."""
    code = MEASURED.replace("TOLERANCE", "4e-4")
    size, grown = map(int, python(code, str(tmp_path), "folder").stdout.split()[-2:])
    assert size > 40 and grown < size // 2
    size, grown = map(int, python(code, str(tmp_path), "memory").stdout.split()[-2:])
    assert grown >= size > 40
