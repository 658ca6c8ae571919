"""Image files in their publishers' formats: read back exactly, and every damaged or missing one named with a way out."""

import gzip
import hashlib
import io
import struct
import tarfile

import numpy as np
import pytest

from partita.errors import DataFileError
from partita.reproduction import image_files
from partita.reproduction.download import download_images
from partita.reproduction.image_files import IMAGE_SETS, Source, load_images, read_cifar, read_idx


def idx_bytes(array):
    return b"\x00\x00\x08" + bytes([array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape) + array.tobytes()


def cifar_bytes(images, labels):
    return b"".join(bytes([label]) + image.tobytes() for image, label in zip(images, labels))


def made_images(count, shape, seed=0):
    rng = np.random.default_rng(seed)
    labels = (np.arange(count) % 10).astype(np.uint8)
    base = rng.integers(0, 256, (10, *shape))
    noise = rng.integers(-20, 21, (count, *shape))
    return np.clip(base[labels] + noise, 0, 255).astype(np.uint8), labels


def write_sets(folder, count=60):
    """Small sets that look like the real ones: ten prototypes and some noise."""
    for name in ("mnist", "fashion-mnist"):
        images, labels = made_images(count, (28, 28), seed=len(name))
        (folder / name).mkdir(parents=True)
        for member, array in zip(IMAGE_SETS[name].files, (images, labels)):
            (folder / name / f"{member}.gz").write_bytes(gzip.compress(idx_bytes(array)))
    (folder / "cifar-10").mkdir()
    images, labels = made_images(count, (3, 32, 32), seed=5)
    (folder / "cifar-10" / "data_batch_1.bin").write_bytes(cifar_bytes(images, labels))
    return folder


@pytest.mark.parametrize("shape", [(7,), (3, 4), (2, 28, 28)])
@pytest.mark.parametrize("packed", [False, True])
def test_idx_files_are_read_back(tmp_path, shape, packed):
    array = np.random.default_rng(1).integers(0, 256, shape).astype(np.uint8)
    path = tmp_path / ("a.gz" if packed else "a")
    path.write_bytes(gzip.compress(idx_bytes(array)) if packed else idx_bytes(array))
    assert np.array_equal(read_idx(path), array)


def test_cifar_files_are_read_back(tmp_path):
    images, labels = made_images(5, (3, 32, 32))
    (tmp_path / "b.bin").write_bytes(cifar_bytes(images, labels))
    got, names = read_cifar(tmp_path / "b.bin")
    assert np.array_equal(got, images) and np.array_equal(names, labels)


def test_a_set_is_found_and_a_part_of_it_says_so(tmp_path):
    write_sets(tmp_path)
    found = load_images(tmp_path, "cifar-10")
    assert found.images.shape == (60, 3, 32, 32) and found.title == "CIFAR-10 (60 of 50,000 training images)"
    assert load_images(tmp_path / "mnist", "mnist").images.shape == (60, 1, 28, 28)  # the folder itself will do


def test_torchvision_folders_are_found(tmp_path):
    write_sets(tmp_path / "made")
    (tmp_path / "MNIST").mkdir()
    (tmp_path / "made" / "mnist").rename(tmp_path / "MNIST" / "raw")
    assert len(load_images(tmp_path, "mnist").labels) == 60


def damaged(contents, how):
    return {
        "cut short": contents[: len(contents) // 2 + 1],
        "empty": b"",
        "another format": b"PK\x03\x04" + contents[4:],
    }[how]


@pytest.mark.parametrize("how", ["cut short", "empty", "another format"])
@pytest.mark.parametrize("name", ["mnist", "cifar-10"])
@pytest.mark.parametrize("packed", [False, True])
def test_a_damaged_file_is_named_with_a_way_out(tmp_path, how, name, packed):
    if name == "cifar-10" and how == "another format" and not packed:
        pytest.skip("CIFAR binary has no magic number")
    write_sets(tmp_path)
    path = next(p for p in sorted((tmp_path / name).iterdir()))
    plain = path.read_bytes() if path.suffix == ".bin" else gzip.decompress(path.read_bytes())
    path.unlink()
    target = path.with_name(path.name.removesuffix(".gz") + (".gz" if packed else ""))
    target.write_bytes(damaged(gzip.compress(plain), how) if packed else damaged(plain, how))
    with pytest.raises(DataFileError) as caught:
        load_images(tmp_path, name)
    assert str(target) in str(caught.value) and "--download" in str(caught.value)


@pytest.mark.parametrize("name", list(IMAGE_SETS))
def test_a_missing_file_is_named_with_a_way_out(tmp_path, name):
    with pytest.raises(DataFileError) as caught:
        load_images(tmp_path, name)
    message = str(caught.value)
    assert str(tmp_path) in message and IMAGE_SETS[name].files[0] in message
    assert "--download" in message and IMAGE_SETS[name].archives[0][0] in message


def test_images_and_labels_that_do_not_match_are_refused(tmp_path):
    write_sets(tmp_path)
    labels = tmp_path / "mnist" / "train-labels-idx1-ubyte.gz"
    labels.write_bytes(gzip.compress(idx_bytes(np.zeros(59, np.uint8))))
    with pytest.raises(DataFileError, match="expected"):
        load_images(tmp_path, "mnist")
    labels.write_bytes(gzip.compress(idx_bytes(np.full(60, 11, np.uint8))))
    with pytest.raises(DataFileError, match="labels 0 to 9"):
        load_images(tmp_path, "mnist")


def served(monkeypatch, contents, *, honest):
    """A set whose one archive is `contents`; its recorded checksum is right, or not."""
    md5 = hashlib.md5(contents, usedforsecurity=False).hexdigest() if honest else "0" * 32
    made = Source("CIFAR-10", ("data_batch_1.bin",), (("https://example.invalid/c.tar.gz", md5),), ("cifar-10",), 5)
    monkeypatch.setitem(image_files.IMAGE_SETS, "cifar-10", made)
    return lambda address: contents


def archive(*members):
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:gz") as tar:
        for name, data in members:
            entry = tarfile.TarInfo(name)
            entry.size = len(data)
            tar.addfile(entry, io.BytesIO(data))
    return out.getvalue()


def test_a_download_is_checked_and_put_in_place(tmp_path, monkeypatch):
    images, labels = made_images(5, (3, 32, 32))
    data = cifar_bytes(images, labels)
    contents = archive(("x/data_batch_1.bin", data), ("../evil.bin", b"no"))
    fetch = served(monkeypatch, contents, honest=True)
    download_images(tmp_path / "d", "cifar-10", fetch=fetch)
    assert np.array_equal(load_images(tmp_path / "d", "cifar-10").labels, labels)
    assert [p.name for p in tmp_path.rglob("*") if p.is_file()] == ["data_batch_1.bin"]

    def unreachable(address):
        raise AssertionError("what is there is not fetched again")

    download_images(tmp_path / "d", "cifar-10", fetch=unreachable)


def test_a_download_with_another_checksum_leaves_nothing(tmp_path, monkeypatch):
    fetch = served(monkeypatch, archive(("data_batch_1.bin", b"\x00" * 3073)), honest=False)
    with pytest.raises(DataFileError, match="MD5"):
        download_images(tmp_path, "cifar-10", fetch=fetch)
    assert list(tmp_path.iterdir()) == []
