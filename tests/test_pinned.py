"""The recorded heads again: the same tensors, bounds and terms, bit for bit on the machine that recorded them."""

from __future__ import annotations

import json
from functools import cache

import numpy as np
import pytest
import torch
from partita_check.cli import run
from pinned import FOLDER, ROWS, Row, compiled, machine

import partita as pa

SAME_MACHINE = json.loads((FOLDER / "machine.json").read_text()) == machine()


@cache
def rebuilt(name: str) -> pa.Compiled:
    return compiled(next(r for r in ROWS if r.name == name))


def differences(row: Row, old: pa.Compiled, new: pa.Compiled, *, exact: bool) -> list[str]:
    """What changed, one line each; `exact` compares bits, otherwise numbers may move by `row.slack` units in the last place."""
    found = []
    a, b = old.head.state_dict(), new.head.state_dict()
    if a.keys() != b.keys() or any(a[k].shape != b[k].shape or a[k].dtype != b[k].dtype for k in a):
        return [
            f"tensors {[(k, tuple(t.shape)) for k, t in b.items()]}, recorded {[(k, tuple(t.shape)) for k, t in a.items()]}"
        ]
    for name, tensor in a.items():
        unit = torch.finfo(tensor.dtype).eps * max(float(tensor.abs().max()), 1e-300)
        moved = float((tensor.double() - b[name].double()).abs().max())
        if not (torch.equal(tensor, b[name]) if exact else moved <= row.slack * unit):
            found.append(f"{name} moved by {moved / unit:.3g} units in the last place")
    c, d = old.certificate, new.certificate
    for name in ("kind", "norm", "semantics", "theorem"):
        if getattr(c, name) != getattr(d, name):
            found.append(f"{name} is {getattr(d, name)!r}, recorded {getattr(c, name)!r}")
    loose = 0.0 if exact else 1e-12 * row.slack
    allowed = loose * c.error
    if not exact and c.kind == "estimated":  # a sampled error is the difference of f and an output in the head's dtype
        output = float(np.abs(old(np.array(c.witness.point))).max())
        allowed = max(allowed, 4 * torch.finfo(getattr(torch, c.semantics)).eps * output)
    if not np.isclose(d.error, c.error, rtol=0.0, atol=allowed):
        found.append(f"error {d.error!r}, recorded {c.error!r}")
    if [(t.name, t.formula, t.theorem) for t in c.terms] != [(t.name, t.formula, t.theorem) for t in d.terms]:
        found.append(f"terms {[t.name for t in d.terms]}, recorded {[t.name for t in c.terms]}")
    for t, u in zip(c.terms, d.terms):
        if t.inputs.keys() != u.inputs.keys() or not np.isclose(u.value, t.value, rtol=loose, atol=allowed):
            found.append(f"{t.name} {u.value!r}, recorded {t.value!r}")
        elif exact and dict(t.inputs) != dict(u.inputs):
            found.append(f"{t.name} from {dict(u.inputs)}, recorded {dict(t.inputs)}")
    return found


@pytest.mark.parametrize("row", ROWS, ids=lambda r: r.name)
def test_recorded_heads_are_built_again(row: Row) -> None:
    assert differences(row, pa.load(FOLDER / row.name), rebuilt(row.name), exact=SAME_MACHINE) == []


# The checker takes seconds for each of these; the method laws let it look at smaller heads of the same kinds.
LONG = ("affine-cross", "hard-l2-cross", "affine", "affine-float32", "corrected", "pieces-float32", "paper")


@pytest.mark.parametrize(
    "row", [pytest.param(r, marks=pytest.mark.slow) if r.name in LONG else r for r in ROWS], ids=lambda r: r.name
)
def test_the_independent_checker_verifies_recorded_files(row: Row) -> None:
    report, code = run(FOLDER / row.name)
    kind = pa.load(FOLDER / row.name).certificate.kind
    assert code == (2 if kind == "estimated" else 0), report  # an estimate is unknown to it, everything else verified


def test_an_estimate_that_rounding_does_not_explain_is_noticed() -> None:
    row = next(r for r in ROWS if r.name == "train-float32")
    old, new = (pa.load(FOLDER / row.name) for _ in range(2))
    for moved, exact, noticed in ((1e-7, True, True), (1e-7, False, False), (1e-6, False, True)):
        object.__setattr__(new.certificate, "error_estimate", old.certificate.error_estimate + moved)
        assert bool(differences(row, old, new, exact=exact)) == noticed, moved


def test_a_changed_digit_is_noticed() -> None:
    row, old, new = ROWS[0], pa.load(FOLDER / ROWS[0].name), pa.load(FOLDER / ROWS[0].name)
    assert differences(row, old, new, exact=True) == []
    new.head.values[3] = np.nextafter(float(new.head.values[3]), 9.0)
    assert differences(row, old, new, exact=True) and not differences(row, old, new, exact=False)
    new.head.values[3] += 1e-10
    assert differences(row, old, new, exact=False)
