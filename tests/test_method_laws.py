"""Laws that every method obeys: one table of METHODS × cases (tests/method_cases.py), one parametrised test per law.

A method is under all of them by being in METHODS. Every law has a negative control, which shows that it can fail.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from balls import bits, values
from dense import Cells, oracle_of
from dense import layers_oracle as oracle
from flint import arb
from method_cases import CASES, PAIRS, Case, applies, compiled, finished, inputs_for, planned, request, sample
from partita_check.cli import run
from resealing import forge

import partita as pa
from partita import errors
from partita.arithmetic.precision import Precision
from partita.geometry.moments import AxisGeometry, dropped_mass
from partita.heads.head import FoldedHead
from partita.methods import METHODS, Method, Plan, Refusal, Request
from partita.methods.planner import best_plan
from partita.plots import plot_head
from partita.proofs import dot_product_rounding, literal_rounding
from partita.proofs.running import summed

VERIFIED, UNKNOWN = 0, 2


def name_of(method: Method) -> str:
    return type(method).__name__


# a third kink, a second smooth square, a third L_p, more regions
LONGER = {"cone 3-D", "mixed", "L3.5 typed", "union L2", "cone typed"}
PAPER_LONGER = {"cube", "torch 2-D", "L2 single"}  # thousands of keys by the paper's recipe


def is_longer(method: Method, case: Case) -> bool:
    return case.name in LONGER or (method.name == "paper" and case.name in PAPER_LONGER)


TABLE = pytest.mark.parametrize(
    ("method", "case"),
    [pytest.param(m, c, id=f"{name_of(m)}-{c.name}", marks=[pytest.mark.slow] * is_longer(m, c)) for m, c in PAIRS],
)


@pytest.fixture
def c(method: Method, case: Case) -> pa.Compiled:
    """The finished head of a pair of the table; pairs without one are judged by the law of refusals alone."""
    found = finished(case.name, method.name)
    if not isinstance(found, pa.Compiled):
        pytest.skip(f"{type(found).__name__}: {found}")
    return found


def examples(method: Method) -> list[Case]:
    """The first case with a head in each dtype: for laws that compile again, and for controls."""
    found: dict[torch.dtype, Case] = {}
    for case in CASES:
        if (
            case.dtype not in found
            and applies(method, case)
            and isinstance(finished(case.name, method.name), pa.Compiled)
        ):
            found[case.dtype] = case
    return list(found.values())


EVERY_METHOD = pytest.mark.parametrize("method", METHODS, ids=name_of)


# --- the table itself --------------------------------------------------------------------------------------------------


@EVERY_METHOD
def test_every_method_is_in_the_table(method: Method) -> None:
    found = examples(method)
    assert found, f"no case in tests/method_cases.py has a plan by {name_of(method)}: add one"
    assert all(planned(case.name, method.name).maker is method for case in found)


KINDS = (
    "1-D 2-D 3-D sequence pair cloud region expression undeclared declared hessian float32 Lp jump kink hölder constant scaled "
    "vector"
)


@pytest.mark.parametrize("kind", KINDS.split())
def test_every_kind_of_case_is_in_the_table(kind: str) -> None:
    assert any(kind in case.kinds.split() for case in CASES)


@TABLE
def test_refusals_say_why(method: Method, case: Case) -> None:
    plan, found = planned(case.name, method.name), finished(case.name, method.name)
    assert not isinstance(plan, Plan) or plan.maker is method
    assert isinstance(found, pa.Compiled) or len(str(found)) > 20


class Silent(Method):
    """A method that refuses everything and gives no reason."""

    name = "hard"

    def applies(self, request: Request) -> Refusal | None:
        return None

    def plan(self, request: Request, share: float, progress: Any = None) -> Plan | Refusal:
        return Refusal("")

    def build(self, plan: Plan, progress: Any = None, seed: int = 0) -> Any:
        raise NotImplementedError


def test_a_method_without_a_case_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Control: what is appended to METHODS is judged, and found to have no head."""
    monkeypatch.setattr("partita.methods.METHODS", [Silent()])
    with pytest.raises(errors.ToleranceError):
        best_plan(request("hard", CASES[0].name))


# --- the bound is above every error ------------------------------------------------------------------------------------


def places(c: pa.Compiled, case: Case, count: int = 200, seed: int = 5) -> np.ndarray:
    """Points of the domain: random ones, corners, and what lies at centers or about halfway between them, where heads err most, and
    the worst point that the certificate names."""
    rng, domain = np.random.default_rng(seed), c.target.domain
    if isinstance(domain, pa.PointCloud):
        points = np.array(domain.points, dtype=np.float64)
        return points.reshape(len(points), -1)[:: max(1, len(points) // count)]
    box = c.target.box
    lo, hi = box.lo.ravel(), box.hi.ravel()
    random = rng.uniform(lo, hi, (count, len(lo)))
    corners = np.where(rng.random((32, len(lo))) < 0.5, lo, hi)
    columns = []
    oracle = oracle_of(c.head)
    centers = oracle.centers.T if isinstance(oracle, Cells) else np.linspace(lo, hi, 9).T
    for k, axis in enumerate(map(np.unique, centers)):
        shares = np.array([0.0, 0.4, 0.5, 0.6])[:, None]  # of the way to the next center
        ends = np.concatenate([(axis[:-1] + shares * np.diff(axis)).ravel(), axis[-1:], lo[k : k + 1], hi[k : k + 1]])
        columns.append(rng.choice(np.clip(ends, lo[k], hi[k]), count))
    points = np.concatenate([random, corners, np.stack(columns, axis=1), np.array([c.certificate.witness.point])])
    return points[case.kept(points)]


def truth(c: pa.Compiled, case: Case, z: np.ndarray) -> list[arb]:
    """f at a point: in balls where it is an expression, else as the function itself answers."""
    if c.target.graph is not None:
        return values(c.target.graph, z.tolist())
    return [arb(float(y)) for y in answers(case, c, z[None])[0]]


def answers(case: Case, c: pa.Compiled, points: np.ndarray) -> np.ndarray:
    """f at points in floats, `(n, out)`: the black box itself, or the graph evaluated by the library."""
    if c.target.graph is not None:
        return c.target(points)
    arguments = [t.numpy() for t in inputs_for(c, points, torch.float64)]
    try:
        found = case.function(*arguments)
    except (TypeError, AttributeError):
        found = case.function(*map(torch.from_numpy, arguments))
    return np.asarray(found, dtype=np.float64).reshape(len(points), -1)


def run_head(c: pa.Compiled, points: np.ndarray) -> np.ndarray:
    with torch.no_grad():
        return c.head.evaluate(torch.from_numpy(points).to(c.head.dtype)).double().numpy()


def worst_error(c: pa.Compiled, case: Case, shift: float = 0.0) -> float:
    """The largest |net + shift − f| at the places, a lower bound of it.

    The net twice: as it runs in its dtype, and as one softmax of the stored tensors in balls; f as `truth` says.
    """
    points, cells = places(c, case), oracle_of(c.head)
    ran, f = run_head(c, points), answers(case, c, points)
    error = np.maximum(np.abs(ran + shift - f), np.abs(cells.in_floats(points) + shift - f)).max(axis=1)
    worst = 0.0
    with bits(160):
        for i in np.argsort(error)[-2:]:
            exact = truth(c, case, points[i])
            for net in ([arb(y) for y in ran[i].tolist()], cells.in_balls(points[i].tolist())):
                off = [abs(y + arb(shift) - x) for y, x in zip(net, exact, strict=True)]
                worst = max(worst, *(float(d.abs_lower()) if d.is_finite() else math.inf for d in off))
    noise = 0.0 if c.target.graph is not None else 8 * 2.0**-53 * float(np.abs(f).max())  # of the black box itself
    return worst * (1 - 2.0**-50) - noise


def mean_error(c: pa.Compiled, case: Case, shift: float = 0.0) -> float:
    """`(∫ Σ_outputs |net + shift − f|^p)^{1/p}` by the midpoint rule, on a grid that the cells do not divide."""
    box, p = c.target.box, float(c.certificate.norm)
    n = 20_011 if box.dimension == 1 else 149
    axes = [lo + (hi - lo) * (np.arange(n) + 0.5) / n for lo, hi in zip(box.lo.ravel(), box.hi.ravel())]
    points = np.stack([a.ravel() for a in np.meshgrid(*axes, indexing="ij")], axis=1)
    kept = case.kept(points)
    off = np.abs(run_head(c, points[kept]) + shift - answers(case, c, points[kept]))
    return float((off**p).sum() / len(points) * np.prod(box.hi - box.lo)) ** (1 / p)


def error_of(c: pa.Compiled, case: Case, shift: float = 0.0) -> float:
    return worst_error(c, case, shift) if c.certificate.norm == "inf" else mean_error(c, case, shift)


@TABLE
def test_the_bound_is_above_every_error_found(method: Method, case: Case, c: pa.Compiled) -> None:
    found = error_of(c, case)
    if c.certificate.kind == "estimated":
        assert math.isinf(c.error_bound) and c.error_estimate <= case.tolerance
        assert found <= 2 * case.tolerance  # nothing is claimed, but an estimate is worth something
    else:
        assert found <= c.error_bound <= case.tolerance and c.error_estimate is None
        assert c.certificate.norm != "inf" or c.certificate.witness.error <= c.error_bound


@TABLE
def test_the_oracle_sees_a_shift(method: Method, case: Case, c: pa.Compiled) -> None:
    """Control: three tolerances more or less at every point are found."""
    assert error_of(c, case, shift=3 * case.tolerance * (1 + c.head.num_outputs)) > 2 * case.tolerance


@EVERY_METHOD
def test_half_the_bound_is_refuted(method: Method) -> None:
    """Control: in some case the errors found are so close to the bound that half of it would be a false claim."""
    found = [(finished(case.name, method.name), case) for m, case in PAIRS if m is method]
    proved = [(c, case) for c, case in found if isinstance(c, pa.Compiled) and c.certificate.kind != "estimated"]
    assert not proved or any(error_of(c, case) > c.error_bound / 2 for c, case in proved)


@TABLE
def test_certificates_say_what_they_rest_on(method: Method, case: Case, c: pa.Compiled) -> None:
    certificate, text = c.certificate, c.explain()
    declared = any(a.vouched_by == "caller" for a in certificate.assumptions)
    if certificate.kind != "estimated":
        assert certificate.kind == ("proved_given" if declared else "proved")
        assert c.target.graph is not None or declared
        assert math.fsum(t.value for t in certificate.terms) <= certificate.error_bound
    assert all(t.theorem and t.formula for t in certificate.terms)
    known = {"caller", "interval arithmetic", "construction", "platform"}
    assert {a.vouched_by for a in certificate.assumptions} <= known
    assert all(a.worst_ratio is None or a.worst_ratio <= 1 + 1e-9 for a in certificate.assumptions)
    assert certificate.kind in text and "key" in text and method.name in c.report()


@TABLE
def test_the_plan_is_what_is_built(method: Method, case: Case, c: pa.Compiled) -> None:
    """Unless the finished head missed the tolerance and was planned again: then the explanation is that of the later plan."""
    plan = planned(case.name, method.name)
    assert plan.kind == c.certificate.kind and c.certificate.error <= case.tolerance
    assert f"{c.num_keys:,} key" in c.why[0] and len(plan.why) >= 4 and str(plan)
    if c.why == plan.why:
        assert (plan.keys, plan.parameters, plan.bytes) == (c.num_keys, c.num_parameters, stored_bytes(c))
        assert c.certificate.error_bound <= plan.error_bound * (1 + 1e-9) and plan.to_json()["keys"] == plan.keys
    else:
        assert len(method.shares) > 1


# --- files -------------------------------------------------------------------------------------------------------------


@TABLE
def test_a_saved_head_comes_back_and_is_confirmed(method: Method, case: Case, c: pa.Compiled, tmp_path: Path) -> None:
    d, points = pa.load(c.save(tmp_path / "head")), sample(c, 50)
    assert torch.equal(c.head(*inputs_for(c, points)), d.head(*inputs_for(c, points)))
    assert d.certificate == c.certificate and d.why == c.why and d.outside == c.outside
    assert d.num_keys == c.num_keys and d.num_parameters == c.num_parameters
    if c.partition is None:
        assert d.partition is None and method.is_network
    else:
        assert np.array_equal(d.partition.cell(points[:20]), c.partition.cell(points[:20]))
    assert c.target.graph is None or np.array_equal(d.target(points), c.target(points))
    checks = pa.recheck(d)
    assert len(checks) >= 5 and [check for check in checks if not check.holds] == []


def copied(c: pa.Compiled) -> pa.Compiled:
    return replace(c, head=copy.deepcopy(c.head))


def changed(c: pa.Compiled, tensor: str) -> pa.Compiled:
    """A copy with one number of one tensor moved by one unit in its last place."""
    d = copied(c)
    flat = d.head.state_dict()[tensor].view(-1)
    flat[0] = torch.nextafter(flat[0], flat[0] + 1)
    return d


def plot(c: pa.Compiled, folder: Path) -> object:
    return plot_head(c, folder / "head.png")


def export(c: pa.Compiled, folder: Path) -> object:
    pytest.importorskip("onnx")
    return c.export_onnx(folder / "head.onnx")


STATE_A_CLAIM: dict[str, Callable[[pa.Compiled, Path], object]] = {
    "save": lambda c, folder: c.save(folder / "head"),
    "error_bound": lambda c, _: c.error_bound,
    "error_estimate": lambda c, _: c.error_estimate,
    "explain": lambda c, _: c.explain(),
    "card": lambda c, _: c.card(),
    "attack": lambda c, _: pa.attack(c, samples=64, restarts=2),
    "plot_head": plot,
    "export_onnx": export,
}


@EVERY_METHOD
@pytest.mark.parametrize("door", STATE_A_CLAIM)
def test_a_changed_tensor_is_noticed_wherever_a_claim_is_stated(method: Method, door: str, tmp_path: Path) -> None:
    """Control of the files, and a law of its own: what `save` refuses, nothing else vouches for."""
    for case in examples(method):
        c = compiled(case.name, method.name)
        for tensor in c.head.state_dict():
            d = changed(c, tensor)
            assert d.is_changed and "does not apply" in repr(d) and not c.is_changed
            with pytest.raises(errors.UnsupportedError, match="it was certified"):
                STATE_A_CLAIM[door](d, tmp_path)


@EVERY_METHOD
def test_a_changed_tensor_fails_the_recheck(method: Method) -> None:
    c = compiled(examples(method)[0].name, method.name)
    checks = pa.recheck(changed(c, next(iter(c.head.state_dict()))))
    assert "tensors" in {check.name for check in checks if not check.holds}


@EVERY_METHOD
def test_a_forged_bound_fails_the_recheck(method: Method, tmp_path: Path) -> None:
    """Control: half the bound, or a bound where nothing was proved, with every hash and seal repaired."""
    for k, case in enumerate(examples(method)):
        c = compiled(case.name, method.name)
        folder = c.save(tmp_path / str(k))
        forge(folder, kind="proved", error_bound=(c.certificate.error / 2).hex(), error_estimate=None)
        assert not all(check.holds for check in pa.recheck(pa.load(folder)))


@pytest.mark.parametrize("budget", [0.3, pytest.param(2.0, marks=pytest.mark.slow)])
@TABLE
def test_the_independent_checker_does_not_disagree(
    method: Method, case: Case, c: pa.Compiled, budget: float, tmp_path: Path
) -> None:
    """Within its budget it verifies the claim or leaves it open: kinks and four variables can take it minutes."""
    report, code = run(c.save(tmp_path / "head"), budget=budget)
    assert code in (VERIFIED, UNKNOWN) and (code == UNKNOWN or c.certificate.kind != "estimated"), report
    assert code == UNKNOWN or ("given" in str(report["verdict"])) == (c.certificate.kind == "proved_given")


@EVERY_METHOD
def test_the_independent_checker_verifies_proofs(method: Method, tmp_path: Path) -> None:
    case = examples(method)[0]
    c = compiled(case.name, method.name)
    report, code = run(c.save(tmp_path / "head"), budget=120.0)
    assert code == (UNKNOWN if c.certificate.kind == "estimated" else VERIFIED), report


@pytest.mark.parametrize("budget", [2.0, pytest.param(20.0, marks=pytest.mark.slow)])
@EVERY_METHOD
def test_a_forged_file_is_not_verified(method: Method, budget: float, tmp_path: Path) -> None:
    """Control: a bound below the error seen, and an estimate that is called a proof.

    No point refutes a bound of a mean, or one below what rounding does: on such files the checker spends its whole budget.
    """
    for k, case in enumerate(examples(method)):
        c = compiled(case.name, method.name)
        folder = c.save(tmp_path / str(k))
        seen = c.certificate.witness.error if c.certificate.norm == "inf" else mean_error(c, case)
        error = 0.9 * seen  # the witness is a point: below its error, a claim about a mean may be true
        forge(folder, kind="proved", error_bound=error.hex(), error_estimate=None)
        assert run(folder, budget=budget)[1] != VERIFIED


# --- one point at a time -----------------------------------------------------------------------------------------------


def method_is_network(c: pa.Compiled) -> bool:
    return c.head.record()["type"] == "network"


def network_rounding(c: pa.Compiled) -> float:
    """What rounding takes of a network's bound: of each head what its own certificate says, times its gain, and the affine maps."""
    if c.certificate.kind == "estimated":  # its heads read inputs as they are, and the last map adds them up
        box, total = c.target.domain.bounding_box().widened(Precision.of(c.head.dtype)), 0.0
        for group in (g for layer in c.head.wiring.layers for g in layer):
            head = c.head.parts[group.head]
            read = group.reads.start + np.argmax(np.abs(group.reads.weight), axis=1).reshape(-1, head.dimension)
            for columns in read:
                ends = box.lo.ravel()[columns], box.hi.ravel()[columns]
                total += head_rounding(head, *ends) + 64 * Precision.of(head.dtype).unit * head.largest_value(*ends)
        return total
    parts = c.certificate.proof["parts"]
    own = [sum(t["value"] for t in p["certificate"]["terms"] if t["source"] == "rounding") for p in parts]
    heads = [t for t in c.certificate.terms if t.name.startswith("head ")]
    others = sum(t.value for t in c.certificate.terms if t.source == "rounding")
    return others + sum(t.value / t.inputs["bound"] * rounding for t, rounding in zip(heads, own, strict=True))


def running_error(c: pa.Compiled) -> float:
    """How far a windowed sum of the head may be from the exact one: `window-tail`, and `score-rounding`, 3."""
    box = c.target.domain.bounding_box().widened(Precision.of(c.head.dtype))
    return network_rounding(c) if method_is_network(c) else head_rounding(c.head, box.lo.ravel(), box.hi.ravel())


def head_rounding(head: FoldedHead, lo: np.ndarray, hi: np.ndarray) -> float:
    m, u = head.dimension, Precision.of(head.dtype).unit
    largest, rates = head.largest_value(lo, hi), head.inverse_temperature.double().numpy()
    if head.kind == "scattered":
        centers = head.centers.double().numpy()
        far = (np.maximum(np.abs(centers - lo), np.abs(hi - centers)) ** 2).sum(axis=1)
        power = 0.0 if head.powers is None else np.abs(head.powers.double().numpy())
        delta = 1.01 * u * ((m + 6) * float(rates) / 2 * float((far + power).max()) + 17)
        return delta * largest + summed(2 * head.num_keys + m + 16, u, largest) + 2 * math.exp(-45) * largest
    mass, scores, terms = 0.0, 0.0, 8 * m + 10 + sum(getattr(head, "ranks", ()))
    for i, axis in enumerate(a.double().numpy() for a in head.axes):
        width = len(axis) if head.kind == "train" else head.widths[i]
        gap = np.diff(axis).max(initial=0.0)
        reach = min(max(hi[i] - axis[0], axis[-1] - lo[i]), width * gap + max(axis[0] - lo[i], hi[i] - axis[-1], 0))
        scores, terms = scores + rates[i] * reach**2 / 2, terms + 2 * width
        if width < len(axis):
            mass += dropped_mass(AxisGeometry.of(axis, lo[i], hi[i]), rates[i] * (1 - 1e-6), width // 2)
    return u * (8 * scores + 16 * m) * largest + summed(terms, u, largest) + 2 * mass * largest


def by_points(c: pa.Compiled, points: np.ndarray) -> np.ndarray:
    """The head called with one point after the other, `(n, out)`."""
    rows = zip(*(t.numpy() for t in inputs_for(c, points, torch.float64)))
    return np.array([np.ravel(c(*(z.tolist() for z in row))) for row in rows], dtype=np.float64)


@TABLE
def test_one_point_is_the_batch_within_the_running_terms(method: Method, case: Case, c: pa.Compiled) -> None:
    points = sample(c, 4)[:8]
    found, f = by_points(c, points), c.scalar()
    assert np.abs(found - run_head(c, points)).max() <= 2 * running_error(c)
    assert [list(np.ravel(f(*z))) for z in points.tolist()] == found.tolist()
    if c.certificate.norm == "inf" and c.target.ask is not None and c.certificate.kind != "estimated":
        assert np.abs(found - c.target(points)).max() <= c.error_bound + 2.0**-45 * np.abs(found).max()


@EVERY_METHOD
def test_one_point_is_the_exact_head_within_the_running_terms(method: Method) -> None:
    for case in examples(method):
        c = compiled(case.name, method.name)
        points = sample(c, 3)[:3]
        exact, allowed = exact_head(c, points), running_error(c)
        assert np.abs(by_points(c, points) - exact).max() <= allowed + 2.0**-52 * np.abs(exact).max()
        other = copied(c)
        for head in other.head.parts if method_is_network(other) else [other.head]:
            slopes = ["value_slopes"] * (getattr(head, "value_slopes", None) is not None)
            for name in (*head.value_names[:1], *slopes):
                head.get_buffer(name).mul_(1 + 2.0**-12)  # control
        assert np.abs(by_points(other, points) - exact).max() > allowed or not np.abs(exact).max() > 2.0**13 * allowed


# --- layers ------------------------------------------------------------------------------------------------------------


def as_matrix(row: np.ndarray) -> np.ndarray:
    """A token-major argument as the paper's `dim × tokens`."""
    return row.T if row.ndim == 2 else row[:, None]


def exact_head(c: pa.Compiled, points: np.ndarray) -> np.ndarray:
    """The stored tensors as one softmax, in balls, to the nearest float, where inputs lie after they are rounded."""
    cells = oracle_of(c.head)
    rounded = torch.from_numpy(points).to(c.head.dtype).double()
    with bits(160):
        return np.array([[float(y.mid()) for y in cells.in_balls(z)] for z in rounded.tolist()])


LOG_KEYS = 300  # beyond, the log form has (2 d N)² numbers and takes seconds


@TABLE
@pytest.mark.parametrize("form", ["log", "indexed"])
def test_layers_are_the_head(method: Method, case: Case, c: pa.Compiled, form: str) -> None:
    """Where the form exists: as a module, and by an oracle that reads nothing but its named tensors."""
    if form == "log" and c.num_keys * c.head.num_outputs > LOG_KEYS:
        pytest.skip(f"{c.num_keys} keys")
    try:
        network = c.layers(form, tolerance=math.inf)
    except errors.UnsupportedError as error:
        pytest.skip(str(error))
    points = sample(c, 40)
    inputs, few = inputs_for(c, points), inputs_for(c, points[:2])
    box = c.target.domain.bounding_box()
    pointwise = literal_rounding(network, box.lo.ravel(), box.hi.ravel())
    allowed = network.rounding if network.norm == "inf" else pointwise
    assert (network.error_bound < math.inf) == (c.certificate.kind != "estimated")
    with torch.no_grad():
        got = network(*inputs).double().reshape(len(points), -1).numpy()
    expected, slack = exact_head(c, points[:2]), 2.0**-50 * np.abs(got).max()
    assert np.abs(got - Cells.of(c.head.state_dict()).in_floats(points)).max() <= allowed + 2.0**-40 * np.abs(got).max()
    if network.norm == "inf" and c.target.ask is not None:
        assert np.abs(got - c.target(points)).max() <= network.error_bound + 2.0**-40 * np.abs(got).max()
    assert np.abs(got[:2] - expected).max() <= allowed + slack
    tensors = {k: t.double().numpy() for k, t in network.state_dict().items()}
    for i, row in enumerate(expected):
        out = oracle(tensors, *(as_matrix(z[i].double().numpy()) for z in few))
        assert np.abs(out.T.ravel() - row).max() <= allowed + slack


@TABLE
def test_plain_attention_is_the_head(method: Method, case: Case, c: pa.Compiled) -> None:
    try:
        attention = c.head.as_attention()
    except errors.UnsupportedError as error:
        pytest.skip(str(error))
    if isinstance(attention, tuple):
        pytest.skip("a network has one for each layer: test_network_module.py")
    points = sample(c, 40)
    with torch.no_grad():
        got = attention(*inputs_for(c, points)).double().reshape(len(points), -1).numpy()
    box = c.target.domain.bounding_box()
    allowed = dot_product_rounding(attention, box.lo.ravel(), box.hi.ravel())
    assert np.abs(got[:2] - exact_head(c, points[:2])).max() <= allowed + 2.0**-50 * np.abs(got).max()
    assert attention.key.shape == (c.num_keys, c.head.dimension + 1)


@EVERY_METHOD
def test_a_changed_layer_is_noticed(method: Method) -> None:
    """Control: one twentieth more on the values is more than rounding, in float64; test_layers.py has every tensor."""
    case = next((k for k in examples(method) if k.dtype == torch.float64), None)
    assert case is not None
    c = compiled(case.name, method.name)
    if method.is_network:
        pytest.skip("a network has one nn.MultiheadAttention for each layer: test_network_module.py")
    points = sample(c, 40)
    for name in ("attention.w_v", "attention.w_o"):
        network = c.layers("indexed")
        network.state_dict()[name].mul_(1.05)
        got = network(*inputs_for(c, points)).reshape(len(points), -1).numpy()
        off = np.abs(got - Cells.of(c.head.state_dict()).in_floats(points)).max()
        assert off > c.layers("indexed").rounding + 2.0**-40 * np.abs(got).max()


# --- dtype, bytes, budgets ---------------------------------------------------------------------------------------------


@TABLE
def test_the_head_has_the_dtype_asked_for(method: Method, case: Case, c: pa.Compiled) -> None:
    full = torch.float32 if case.dtype == torch.bfloat16 else case.dtype  # values alone are of a half type
    held = {name: t.dtype for name, t in c.head.state_dict().items()}
    assert {held.pop(name) for name in ("values", "value_slopes") if name in held} <= {case.dtype}
    assert set(held.values()) == {full}
    assert str(case.dtype) == f"torch.{c.certificate.semantics}" and c.head.dtype == case.dtype
    assert c(*inputs_for(c, sample(c, 3), torch.float64)).dtype == full
    other = torch.float32 if case.dtype == torch.float64 else torch.float64
    cast = replace(c, head=copy.deepcopy(c.head).to(other))  # control: of another dtype nothing is claimed
    with pytest.raises(errors.UnsupportedError, match="cast"):
        cast(*inputs_for(c, sample(c, 3), torch.float64))


def stored_bytes(c: pa.Compiled) -> int:
    return sum(t.numel() * t.element_size() for t in c.head.state_dict().values())


@EVERY_METHOD
def test_max_bytes_is_obeyed(method: Method) -> None:
    for case in examples(method):
        size = stored_bytes(compiled(case.name, method.name))
        assert stored_bytes(case.compile(method=method.name, max_bytes=size)) <= size
        with pytest.raises(errors.SizeError, match="max_bytes"):
            case.compile(method=method.name, max_bytes=min(100, size - 1))


@EVERY_METHOD
def test_a_build_that_outgrows_its_plan_is_refused(method: Method) -> None:
    """Control: the tensors that were made are counted, not only what the plan said of them."""
    case = examples(method)[0]
    plan = planned(case.name, method.name)
    with pytest.raises(errors.SizeError, match="max_bytes allows"):
        pa.build(replace(plan, request=replace(plan.request, max_bytes=plan.bytes - 1)))


OPTIONS = ("target", "tolerance", "norm", "dtype", "sharpness", "max_bytes", "method", "accept", "declared")


@EVERY_METHOD
def test_planning_again_keeps_the_options(method: Method) -> None:
    asked = replace(request(method.name, examples(method)[0].name), max_bytes=123_456_789, accept="estimated")
    again = method.plan(asked, method.shares[-1])
    assert isinstance(again, Plan) and all(getattr(again.request, name) is getattr(asked, name) for name in OPTIONS)


@EVERY_METHOD
def test_a_head_that_missed_is_planned_again_with_the_options(method: Method, monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole way through `build`: the first head is made to miss, and every later plan has the same request."""
    case, kept = examples(method)[0], []
    honest, plan = type(method).build, replace(planned(case.name, method.name))
    asked = replace(plan.request, max_bytes=123_456_789)

    def spied(self: Method, plan: Plan, *rest: Any) -> Any:
        kept.append(plan.request)
        built = honest(self, plan, *rest)
        worse = (
            {"error_bound": 10 * case.tolerance}
            if plan.kind != "estimated"
            else {"error_estimate": 10 * case.tolerance}
        )
        return replace(built, certificate=replace(built.certificate, **worse)) if len(kept) == 1 else built

    monkeypatch.setattr(type(method), "build", spied)
    with suppress(errors.ToleranceError):  # of a method that has nothing else to offer
        pa.build(replace(plan, request=asked))
    assert len(kept) >= min(2, len(method.shares))
    assert all(getattr(r, name) is getattr(asked, name) for r in kept for name in OPTIONS)


@EVERY_METHOD
def test_a_spent_budget_ends_in_an_error_or_a_true_claim(method: Method) -> None:
    for case in examples(method):
        try:
            c = case.compile(method=method.name, budget=1e-9)
        except errors.BudgetSpentError as error:
            assert "budget of 1e-09 seconds" in str(error)
        except errors.ToleranceError as error:  # a proof that was stopped says what it had reached
            assert "bound" in str(error) or "proof" in str(error)
        else:
            assert error_of(c, case) <= max(c.error_bound if c.error_estimate is None else 0.0, case.tolerance)
        assert case.compile(method=method.name, budget=600.0).num_keys == compiled(case.name, method.name).num_keys


# --- bad input ---------------------------------------------------------------------------------------------------------


@TABLE
def test_bad_calls_are_refused(method: Method, case: Case, c: pa.Compiled) -> None:
    point = sample(c, 3)[:1]
    single = [t[0].numpy() for t in inputs_for(c, point, torch.float64)]
    assert np.isfinite(c(*single)).all() and c(*single).shape == c.head.output_shape  # control: a good call
    for bad, error in ((np.nan, errors.NonFiniteValueError), (np.inf, errors.NonFiniteValueError)):
        with pytest.raises(error):
            c(*(np.full_like(z, bad) for z in single))
    with pytest.raises(errors.OutsideDomainError):
        c(*(z + 1e9 for z in single))
    assert np.isfinite(c.with_outside("clamp")(*(z + 1e9 for z in single))).all()
    for wrong in ([z[..., :-1] for z in single], [*single, single[0]], [np.array("text")] * len(single)):
        with pytest.raises(errors.ShapeError):
            c(*wrong)


def not_a_number(z: np.ndarray) -> np.ndarray:
    return np.where(z[:, 0] > 0.2, np.nan, z[:, 0])


def broken(z: np.ndarray) -> np.ndarray:
    raise RuntimeError("the simulator is down")


def of_the_batch(z: np.ndarray) -> np.ndarray:
    return z[:, 0] - z[:, 0].mean()


BAD = {
    not_a_number: errors.NonFiniteValueError,
    broken: errors.TargetFailedError,
    of_the_batch: errors.NotVectorizedError,
    "log(x0)": errors.NonFiniteValueError,
    "x0.__class__": errors.ExpressionError,
}


@EVERY_METHOD
@pytest.mark.parametrize("f", BAD, ids=lambda f: getattr(f, "__name__", f))
def test_bad_functions_are_refused(method: Method, f: Any) -> None:
    options = {} if isinstance(f, str) else {"lipschitz": 1.0, "trace": False}
    with pytest.raises(BAD[f]):
        pa.compile(f, pa.Box([-1], [1]), tolerance=0.1, method=method.name, **options)


@EVERY_METHOD
@pytest.mark.parametrize(
    "bad", [{"tolerance": -1.0}, {"norm": 0.5}, {"dtype": torch.complex64}, {"max_bytes": 0}], ids=str
)
def test_bad_options_are_refused_before_f_is_called(method: Method, bad: dict[str, Any]) -> None:
    with pytest.raises((errors.ToleranceError, errors.UnsupportedError)):
        pa.compile(broken, pa.Box([-1], [1]), method=method.name, **{"tolerance": 0.1, **bad})
