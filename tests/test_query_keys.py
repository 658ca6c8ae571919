"""Heads on pairs: values depend on z_K alone, both forms of the layers exist, and query keys read z_Q within their bound."""

import math

import numpy as np
import pytest
import torch
from dense import Cells, layers_oracle
from method_cases import CASES, PAIRS, compiled, finished
from partita_check.cli import run
from resealing import forge

import partita as pa
from partita.errors import UnsupportedError
from partita.proofs import literal_rounding
from partita.proofs.soft_maximum import QueryKeys, pieces_terms

LINE = pa.Box([-1], [1])
FUNCTIONS = {
    "k0 + q0": 1e-3,
    "max(k0, q0)": 0.01,
    "abs(k0 - q0)": 1e-5,
    "q0": 0.01,
    "k0*q0": 0.01,
    "max(k0, 0.2) + q0": 0.01,
    "sin(3*k0)*cos(2*q0)": 0.1,
}


def split(c: pa.Compiled, points: np.ndarray) -> list[torch.Tensor]:
    cut = math.prod(c.head.input_shapes[0])
    parts = zip((points[:, :cut], points[:, cut:]), c.head.input_shapes)
    return [torch.from_numpy(p.reshape(len(p), *s)).to(c.head.dtype) for p, s in parts]


def require_cross_attention(c: pa.Compiled) -> None:
    """Values in z_K alone, as the stored tensors say, and as the layers are made: W_V meets Linear_K(Z_K), which is z_K's."""
    cut, cells = math.prod(c.head.input_shapes[0]), Cells.of(c.head.state_dict())
    assert not cells.slopes[:, :, cut:].any() and not c.head.has_query_values
    points = c.target.box.sample(30, np.random.default_rng(0)).astype(np.float32).astype(np.float64)
    points = c.target.box.clamp(points)
    inputs = split(c, points)
    for form in ("log", "indexed"):
        if form == "log" and c.num_keys * c.head.num_outputs > 300:
            continue
        network = c.layers(form, tolerance=math.inf)
        allowed = literal_rounding(network, c.target.box.lo.ravel(), c.target.box.hi.ravel())
        with torch.no_grad():
            got = network(*inputs).double().reshape(len(points), -1).numpy()
        held = cells.in_floats(np.concatenate([z.double().reshape(len(points), -1).numpy() for z in inputs], axis=1))
        assert np.abs(got - held).max() <= allowed + 2.0**-40 * np.abs(held).max()
        tensors = {k: t.double().numpy() for k, t in network.state_dict().items()}
        first = [z[0].double().numpy() for z in inputs]
        out = layers_oracle(tensors, *(z.T if z.ndim == 2 else z[:, None] for z in first))
        assert np.abs(out.T.ravel() - held[0]).max() <= allowed + 2.0**-40 * np.abs(held).max()


@pytest.mark.parametrize("text", FUNCTIONS)
def test_what_compile_returns_for_a_pair_is_cross_attention(text):
    c = pa.compile(text, (LINE, LINE), tolerance=FUNCTIONS[text])
    require_cross_attention(c)
    assert c.certificate.kind == "proved" and "not cross-attention" not in c.explain() + c.report()
    points = np.concatenate([c.target.box.sample(3000, np.random.default_rng(1)), c.target.box.corners(4)])
    held = Cells.of(c.head.state_dict()).in_floats(points)
    assert np.abs(held - c.target(points)).max() <= c.error_bound <= FUNCTIONS[text]


ON_PAIRS = [(m, case) for m, case in PAIRS if "pair" in case.kinds.split()]


@pytest.mark.parametrize(("method", "case"), ON_PAIRS, ids=[f"{type(m).__name__}-{c.name}" for m, c in ON_PAIRS])
def test_every_method_makes_cross_attention(method, case):
    found = finished(case.name, method.name)
    if not isinstance(found, pa.Compiled) or method.name == "train":
        pytest.skip("no head, or no layers for any train")
    require_cross_attention(found)


def test_all_methods_for_boxes_are_tried_on_pairs():
    assert {m.name for m, _ in ON_PAIRS} >= {"pieces", "fitted", "hard", "affine", "adaptive", "tuned", "corrected"}
    assert any("pair" in c.kinds for c in CASES)


@pytest.mark.parametrize(
    ("method", "text"), [("pieces", "max(k0, q0)"), ("affine", "k0*q0"), ("adaptive", "abs(k0-q0)*k0")]
)
def test_values_in_z_q_are_made_only_when_asked_for_and_called_so(method, text, tmp_path):
    c = pa.compile(text, (LINE, LINE), tolerance=0.1, method=method, query_values=True)
    assert c.head.has_query_values
    for told in (c.explain(), c.certificate.explain(), c.report()):
        assert "not cross-attention" in told
    for form in ("log", "indexed"):
        with pytest.raises(UnsupportedError, match="z_K alone"):
            c.layers(form)
    d = pa.load(c.save(tmp_path / "head"))
    assert "not cross-attention" in d.certificate.explain() and all(k.holds for k in pa.recheck(d))


def test_query_values_are_for_pairs():
    with pytest.raises(UnsupportedError, match="pair"):
        pa.compile("x0", LINE, tolerance=0.1, query_values=True)


# --- the keys that read z_Q --------------------------------------------------------------------------------------------


def reading(keys: QueryKeys, t: np.ndarray) -> np.ndarray:
    """m(t) by softmax over all corners, `(n, axes)`."""
    n = len(keys.axes)
    points = keys.reach * np.concatenate([np.eye(n), -np.eye(n)])
    scores = keys.tilt * t @ np.concatenate([np.eye(n), -np.eye(n)]).T
    weights = np.exp(scores)
    return weights @ points / weights.sum(axis=1, keepdims=True)


@pytest.mark.parametrize("axes", [1, 2, 5])
@pytest.mark.parametrize("allowed", [0.3, 1e-2, 1e-5])
def test_query_keys_read_within_their_bound(axes, allowed):
    keys = QueryKeys.within(tuple(range(axes)), allowed)
    rng = np.random.default_rng(axes)
    t = np.concatenate([rng.uniform(-1, 1, (20_000, axes)), np.sign(rng.uniform(-1, 1, (64, axes)))])
    t[:2000, 1:] = 0.0
    seen = np.abs(reading(keys, t) - t).max()
    assert 0.8 * keys.error() <= seen <= keys.error() <= allowed


def test_a_smaller_reach_is_not_within_the_bound():
    """Negative control of the bound: it depends on the reach."""
    keys = QueryKeys.within((0,), 1e-3)
    shorter = QueryKeys((0,), keys.tilt, 0.9 * keys.reach)
    t = np.linspace(-1, 1, 1001)[:, None]
    assert np.abs(reading(shorter, t) - t).max() > 50 * keys.error() and shorter.error() > 50 * keys.error()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("text", ["max(k0, q0 - 2*q1) - max(q1, 0)", "abs(q0) + q1 - k0, max(k0, q1)"])
def test_bounds_of_query_keys_hold_off_the_unit_box(text, dtype):
    domains = (pa.Box([5], [7]), pa.Box([-3, 100], [1, 101]))
    c = pa.compile(text, domains, tolerance=0.3, method="pieces", dtype=dtype)
    points = np.concatenate([c.target.box.sample(4000, np.random.default_rng(2)), c.target.box.corners(8)])
    with torch.no_grad():
        ran = c.head.evaluate(torch.from_numpy(points).to(dtype)).double().numpy()
    error = max(np.abs(ran - c.target(points)).max(), 0.0)
    assert 0.2 * c.error_bound < error <= c.error_bound <= 0.3
    require_cross_attention(c)


@pytest.mark.parametrize("wrong", [{"tilt": 1.001}, {"reach": 1.001}, {"tilt": 0.0}])
def test_wrong_hints_in_a_certificate_do_not_help(wrong, tmp_path):
    """Control: tilt and reach of the certificate are compared with the stored tensors."""
    c = compiled("cross pieces", "pieces")
    box, hints = c.target.box, {k: c.certificate.proof[k] for k in ("tilt", "reach")}
    honest = sum(t.value for t in pieces_terms(c.head, c.target.graph, box, **hints))
    assert honest <= c.error_bound * (1 + 1e-9)
    told = {k: v * wrong.get(k, 1.0) for k, v in hints.items()}
    try:
        found = sum(t.value for t in pieces_terms(c.head, c.target.graph, box, **told))
    except pa.PartitaError:
        found = math.inf
    assert found > c.error_bound
    folder = c.save(tmp_path / "head")
    forge(folder, error_bound=(0.9 * c.certificate.witness.error).hex())
    assert run(folder, budget=20.0)[1] != 0


def test_the_log_form_carries_affine_values_of_several_tokens():
    """Self-attention, 2 × 2: `T + E = 2` does not tell tokens apart, so every coordinate is a carrier of its own."""
    box = pa.Box.sequence(-1, 1, tokens=2, dim=2)
    c = pa.compile("max(x0, x1), x2; x3 - x0, abs(x1)", box, tolerance=0.2, method="pieces")
    network, points = c.layers("log"), box.sample(50, np.random.default_rng(4))
    assert network.num_keys == 2 * 2 * c.num_keys * 5  # 1 and four coordinates
    got = network(torch.from_numpy(points.reshape(-1, 2, 2))).reshape(50, -1).numpy()
    held = Cells.of(c.head.state_dict()).in_floats(points)
    assert np.abs(got - held).max() <= literal_rounding(network, box.lo.ravel(), box.hi.ravel())
    network.linear.right.mul_(1.01)  # negative control: the coordinates matter
    off = network(torch.from_numpy(points.reshape(-1, 2, 2))).reshape(50, -1).numpy()
    assert np.abs(off - held).max() > 1e-4


def test_pieces_are_found_without_query_keys_where_only_z_k_matters():
    c = pa.compile("max(k0, 0.2) - 3*k1", (pa.Box([-1, -1], [1, 1]), LINE), tolerance=0.01)
    assert c.num_keys == 2 and "tilt" not in c.certificate.proof


@pytest.mark.parametrize("text", ["max(k0, 100*q0)", "abs(k0-q0)"])
@pytest.mark.parametrize("tolerance", [1e-2, 1e-3])
def test_layers_of_query_keys_stay_within_their_bound_in_float32(text, tolerance):
    """The values of these keys are far from f: what rounded scores move is their distance from each other, not from f."""
    c = pa.compile(text, (LINE, LINE), tolerance=tolerance, method="pieces")
    network = c.layers("indexed", dtype=torch.float32, tolerance=math.inf)
    axis = np.linspace(-1, 1, 101)
    k, q = (torch.tensor(a.reshape(-1, 1)) for a in np.meshgrid(axis, axis))
    truth = torch.maximum(k, 100 * q) if "max" in text else (k - q).abs()
    assert (network(k, q).double() - truth[:, 0]).abs().max() <= network.error_bound
