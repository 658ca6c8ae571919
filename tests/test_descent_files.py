"""Certificates of gradient descent in context, and the folders they are saved to."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

import partita as pa
from partita.errors import (
    AlreadyExistsError,
    DomainError,
    FormatError,
    NewerVersionError,
    TamperedFileError,
    ToleranceError,
    TruncatedFileError,
    UnsupportedError,
)
from partita.networks.descent import Descent
from partita.proofs.certificate import Certificate, total
from partita.storage.saving import canonical, write_sealed

X, W, REAL, LABELS = pa.Box([-1, -1], [1, 1]), pa.Box([-2, -2], [2, 2]), pa.Box([-1], [1]), pa.Box([0], [1])
HUBER = "where(abs(r) - 1, abs(r) - 0.5, 0.5*r^2)"
CASES = {
    "squared": ("squared", REAL, {}),
    "ridge": ("ridge", REAL, {"ridge": 0.1, "initial": [0.1, -0.3]}),
    "ridge float32": ("ridge", REAL, {"ridge": 0.1, "initial": [0.1, -0.3], "dtype": torch.float32}),
    "logistic": ("logistic", LABELS, {}),
    "residual": ("log(cosh(r))", REAL, {}),
    "residual float32": ("log(cosh(r))", REAL, {"dtype": torch.float32}),
    "two variables": ("exp(s/3) - s*y", REAL, {"epsilon": 1e-3}),
    "kinks": (HUBER, REAL, {"table_tolerance": 0.1}),
}


def build(name: str, **options):
    loss, y, own = CASES[name]
    return pa.in_context.gradient_descent(loss, 4, 0.3, x=X, y=y, w=W, prompt_length=100, **own, **options)


@pytest.mark.parametrize("name", CASES)
def test_a_certificate_has_a_term_per_cause_and_comes_back_from_disk(name, tmp_path):
    gd = build(name)
    certificate = gd.certificate_for(50)
    assert certificate.error_bound == gd.error_bound_for(50) == total(certificate.terms)
    assert certificate.theorem == "descent-drift" and certificate.norm == "inf"
    assert certificate.kind == ("proved_given" if name == "kinks" else "proved")
    names = {term.name: term.source for term in certificate.terms}
    assert names.pop("softmax difference") == "approximation" and names.pop("rounding") == "rounding"
    assert names.pop("slope table", None) == ("approximation" if "(" in CASES[name][0] else None)
    assert names.pop("stored start", None) == ("storage" if name == "ridge float32" else None) and not names
    assert certificate.facts["steps"] == 4 and certificate.facts["examples"] == 50
    assert certificate.facts["epsilon"] == gd.facts.epsilon and certificate.facts["ridge"] == gd.facts.ridge
    assert [box["lo"] for box in certificate.domain["arguments"]][2] == gd.w_box.lo.tolist()
    assert "box of w" in certificate.explain()
    assert Certificate.from_json(certificate.to_json()) == certificate

    folder = gd.save(tmp_path / "descent", examples=50)
    again = pa.in_context.load(folder)
    assert again.certificate_for(50) == certificate
    assert again.error_bound_for(7) == gd.error_bound_for(7)
    data = torch.tensor([[0.5, -0.25, 0.75], [1.0, 0.5, 0.25]], dtype=gd.dtype)
    assert torch.equal(again(data), gd(data)) and np.array_equal(again.exact(data), gd.exact(data))
    assert np.array_equal(again.error_bounds_at(data), gd.error_bounds_at(data))


def test_terms_grow_as_their_causes_do():
    def terms(examples: int, **options):
        return {term.name: term.value for term in build("squared", **options).certificate_for(examples).terms}

    few, many = terms(10, epsilon=1e-4), terms(1000, epsilon=1e-4)
    assert many["softmax difference"] == few["softmax difference"] and many["rounding"] > 10 * few["rounding"]
    wide = terms(10, epsilon=2e-4)
    assert wide["softmax difference"] == pytest.approx(4 * few["softmax difference"], rel=1e-6)
    assert wide["rounding"] < 0.7 * few["rounding"]


def test_a_changed_network_is_not_certified(tmp_path):
    changed = build("squared")
    changed.layer.read.mul_(1.001)
    with pytest.raises(UnsupportedError, match="changed after it was built"):
        changed.certificate_for(10)
    with pytest.raises(UnsupportedError, match="changed after it was built"):
        changed.save(tmp_path / "descent", examples=10)
    assert not (tmp_path / "descent").exists()
    with pytest.raises(UnsupportedError, match="changed after it was built"):
        build("squared").float().certificate_for(10)


def test_what_has_no_finite_bound_has_no_certificate():
    steep = pa.in_context.gradient_descent("squared", 3000, 3.0, x=X, y=REAL, w=W)
    assert steep.error_bound_for(10) == np.inf
    with pytest.raises(ToleranceError, match="no finite bound"):
        steep.certificate_for(10)
    single = build("ridge float32")
    with pytest.raises(ToleranceError, match="the largest part is rounding"):
        single.certificate_for(10**7)
    with pytest.raises(DomainError, match="examples"):
        single.certificate_for(0)


def test_folders_are_written_whole_and_not_over_others(tmp_path):
    gd = build("squared")
    folder = gd.save(tmp_path / "descent", examples=10)
    assert sorted(p.name for p in folder.iterdir()) == ["certificate.json", "descent.json", "descent.safetensors"]
    with pytest.raises(AlreadyExistsError):
        gd.save(folder, examples=10)
    gd.save(folder, examples=20, overwrite=True)
    assert json.loads((folder / "certificate.json").read_text())["function"]["examples"] == 20
    (tmp_path / "other").mkdir()
    with pytest.raises(AlreadyExistsError, match="not a folder with a descent"):
        gd.save(tmp_path / "other", examples=10, overwrite=True)
    with pytest.raises(TruncatedFileError, match=r"head\.json"):
        pa.load(folder)
    with pytest.raises(TruncatedFileError, match="does not exist"):
        pa.in_context.load(tmp_path / "nowhere")
    assert isinstance(pa.in_context.load(folder), Descent)


def rewritten(folder: Path, change) -> Path:
    """The folder with another certificate or description, and every hash and seal repaired."""
    certificate = json.loads((folder / "certificate.json").read_text())
    described = json.loads((folder / "descent.json").read_text())
    tensors = (folder / "descent.safetensors").read_bytes()
    change(certificate, described)
    del described["seal"], described["sha256"]
    files = {"descent.safetensors": tensors, "certificate.json": canonical(certificate)}
    write_sealed(folder, "descent.json", described, files)
    return folder


def halve(certificate, _):
    certificate["error_bound"] = (0.5 * float.fromhex(certificate["error_bound"])).hex()


def step(certificate, _):
    certificate["function"]["step_size"] = (0.2).hex()


def steps(certificate, described):
    described["model"]["steps"] = 5


def curvature(certificate, _):
    certificate["proof"]["curvature"] = [(0.9).hex(), (1.0).hex()]
    certificate["error_bound"] = (0.99 * float.fromhex(certificate["error_bound"])).hex()


def box(certificate, _):
    certificate["domain"]["arguments"][2]["hi"] = [(4.0).hex()] * 2


def start(certificate, _):
    certificate["function"]["initial"] = [(9.0).hex(), (0.0).hex()]


def graph(certificate, _):
    certificate["function"]["graph"] = {"inputs": 2}


def newer(_, described):
    described["version"] = 2


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        (halve, TamperedFileError),
        (step, TamperedFileError),
        (steps, TamperedFileError),
        (curvature, TamperedFileError),
        (box, TamperedFileError),
        (start, FormatError),
        (graph, FormatError),
        (newer, NewerVersionError),
    ],
)
def test_files_that_contradict_each_other_are_refused(change, kind, tmp_path):
    folder = build("squared").save(tmp_path / "descent", examples=10)
    assert pa.in_context.load(rewritten(folder, lambda *_: None)).steps == 4  # a repaired folder is read
    with pytest.raises(kind):
        pa.in_context.load(rewritten(folder, change))


def test_a_changed_file_is_noticed(tmp_path):
    folder = build("logistic").save(tmp_path / "descent", examples=10)
    data = bytearray((folder / "descent.safetensors").read_bytes())
    data[-1] ^= 1
    (folder / "descent.safetensors").write_bytes(data)
    with pytest.raises(TamperedFileError, match=r"descent\.safetensors"):
        pa.in_context.load(folder)
