"""Heads with bfloat16 or float16 values: what is stored, what is claimed, and that the claim holds."""

import copy
import json
import subprocess
import sys

import numpy as np
import pytest
import safetensors.torch
import torch

import partita as pa
from partita import errors
from partita.arithmetic.precision import BFLOAT, HALF, PRECISIONS, SINGLE, Precision

BF, FP = torch.bfloat16, torch.float16
SQUARE = pa.Box([-1, -1], [1, 1])
WAVES = "sin(3*x0) + x0*cos(2*x1)"


def waves(z):
    return np.sin(3 * z[:, 0]) + z[:, 0] * np.cos(2 * z[:, 1])


# text, f, domain, tolerance, options
CASES = {
    "hard": (WAVES, waves, SQUARE, 0.4, {"method": "hard", "dtype": BF}),
    "fitted": (WAVES, waves, SQUARE, 0.1, {"method": "fitted", "dtype": BF}),
    "affine": (WAVES, waves, SQUARE, 0.1, {"method": "affine", "dtype": BF}),
    "tuned": (WAVES, waves, SQUARE, 0.1, {"method": "tuned", "dtype": BF}),
    "corrected": (WAVES, waves, SQUARE, 0.02, {"method": "corrected", "dtype": FP}),
    "fitted-float16": (WAVES, waves, SQUARE, 0.01, {"method": "fitted", "dtype": FP}),
    "auto": (WAVES, waves, SQUARE, 0.1, {"dtype": BF}),
    "black-box": (waves, waves, SQUARE, 0.5, {"method": "hard", "lipschitz": 4.6, "trace": False, "dtype": FP}),
    "far-away": ("exp(x0 - 3)", lambda z: np.exp(z[:, 0] - 3), pa.Box([2.93], [4.1]), 0.2, {"dtype": BF}),
    "kink": (
        "abs(x0 - 0.3)",
        lambda z: np.abs(z[:, 0] - 0.3),
        pa.Box([-1], [1]),
        0.05,
        {"method": "affine", "dtype": BF},
    ),
    "tiny-domain": ("1e5*x0", lambda z: 1e5 * z[:, 0], pa.Box([0], [1e-6]), 0.03, {"method": "hard", "dtype": FP}),
    "constant": (
        "1.003 + 0*x0",
        lambda z: 1.003 + 0 * z[:, 0],
        pa.Box([-1], [1]),
        0.01,
        {"method": "hard", "dtype": BF},
    ),
}


@pytest.fixture(scope="module")
def compiled():
    made = {}

    def get(name):
        if name not in made:
            text, _, domain, tolerance, options = CASES[name]
            made[name] = pa.compile(text, domain, tolerance=tolerance, **options)
        return made[name]

    return get


def errors_of(c, name, count=100_000):
    _, f, domain, _, _ = CASES[name]
    z = np.concatenate([domain.sample(count, np.random.default_rng(4)), domain.corners(4)])
    return np.abs(c(torch.from_numpy(z)).double().numpy().reshape(-1) - f(z))


@pytest.mark.parametrize("name", CASES)
def test_the_bound_holds(compiled, name):
    c = compiled(name)
    assert c.certificate.kind == ("proved_given" if name == "black-box" else "proved")
    assert errors_of(c, name).max() <= c.error_bound <= CASES[name][3]
    assert c.attack(samples=512).error <= c.error_bound
    assert c.certificate.semantics == str(CASES[name][4]["dtype"]).removeprefix("torch.")


@pytest.mark.parametrize(
    ("name", "term"),
    [("fitted", "input rounding"), ("fitted-float16", "input rounding"), ("constant", "stored values")],
)
def test_without_its_term_the_bound_would_be_exceeded(compiled, name, term):
    """Negative control: inputs and values that are rounded move the error beyond what the other terms allow."""
    c = compiled(name)
    rest = c.error_bound - next(t.value for t in c.certificate.terms if t.name == term)
    assert errors_of(c, name).max() > rest


def test_values_alone_are_of_the_half_type(compiled):
    c = compiled("affine")
    held = {name: t.dtype for name, t in c.head.state_dict().items()}
    assert held.pop("values") == held.pop("value_slopes") == BF and set(held.values()) == {torch.float32}
    assert c.head.dtype == BF and c.head.semantics == "bfloat16"
    assert c(torch.zeros(3, 2)).dtype == torch.float32


@pytest.mark.parametrize("name", ["fitted", "affine", "corrected"])
def test_a_half_head_is_the_float32_head_with_its_values_at_its_rounded_inputs(compiled, name):
    c = compiled(name)
    z = SQUARE.sample(500, np.random.default_rng(1))
    wide = c.head._widened()
    assert wide.dtype == torch.float32
    rounded = torch.from_numpy(z).to(c.head.dtype).float()
    assert torch.equal(c(torch.from_numpy(z)), wide(rounded))
    assert not torch.equal(wide(torch.from_numpy(z)), wide(rounded))
    assert torch.allclose(c.head.evaluate(rounded), c.head.evaluate_dense(rounded), atol=1e-5)


def test_saved_loaded_rechecked_and_checked(compiled, tmp_path):
    for name in ("fitted", "affine", "fitted-float16", "constant"):
        c = compiled(name)
        folder = c.save(tmp_path / name)
        again = pa.load(folder)
        z = torch.from_numpy(CASES[name][2].sample(100, np.random.default_rng(2)))
        assert again.certificate == c.certificate and torch.equal(again(z), c(z))
        assert all(check.holds for check in pa.recheck(again))
        done = subprocess.run(
            [sys.executable, "-m", "partita_check", str(folder), "--budget", "60"], capture_output=True, text=True
        )
        assert done.returncode == 0, done.stdout
        stored = safetensors.torch.load_file(folder / "head.safetensors")
        assert stored["head.values"].dtype == CASES[name][4]["dtype"]
        assert json.loads((folder / "head.json").read_text())["head"]["dtype"] == c.certificate.semantics


def test_gradients_reach_inputs_and_values(compiled):
    head = copy.deepcopy(compiled("affine").head).unfreeze()
    z = torch.full((4, 2), 0.3, requires_grad=True)
    head(z).sum().backward()
    assert z.grad.abs().min() > 0 and head.values.grad.dtype == BF and head.values.grad.abs().max() > 0


@pytest.mark.slow
def test_a_compiled_graph_gives_the_same(compiled):
    head, z = compiled("fitted").head, torch.rand(64, 2) * 2 - 1
    torch._dynamo.reset()
    assert torch.equal(torch.compile(head, backend="eager", fullgraph=True)(z), head(z))


def test_a_head_that_was_cast_is_refused(compiled):
    c = copy.deepcopy(compiled("fitted"))
    c.head.to(BF)  # centers too
    assert c.is_changed
    with pytest.raises(errors.UnsupportedError, match=r"bfloat16 values with torch\.bfloat16 centers"):
        c(torch.zeros(1, 2))


@pytest.mark.parametrize("method", ["hard", "fitted", "affine", "tuned", "corrected", "auto"])
def test_a_tolerance_below_the_half_type_is_refused_with_one_that_works(method):
    with pytest.raises(
        errors.ToleranceError, match=r"below what bfloat16 can promise.*dtype=torch\.float32, or a tolerance above"
    ) as refused:
        pa.compile("sin(3*x)", pa.Box([-1], [1]), tolerance=1e-3, method=method, dtype=BF)
    stated = float(str(refused.value).split("a tolerance above ")[1].split()[0].rstrip("."))
    assert pa.compile("sin(3*x)", pa.Box([-1], [1]), tolerance=1.01 * stated, method=method, dtype=BF).tolerance_met


@pytest.mark.parametrize("method", ["pieces", "adaptive", "train", "paper"])
def test_other_methods_say_that_they_have_no_half_heads(method):
    with pytest.raises(errors.UnsupportedError, match=r"no such heads with float16 values.*'fitted'"):
        pa.compile("abs(x)", pa.Box([-1], [1]), tolerance=0.2, method=method, dtype=FP)


def test_layers_and_attention_need_full_heads(compiled):
    c = compiled("fitted")
    for call in (c.layers, c.head.as_attention, lambda: c.layers(dtype=torch.float32)):
        with pytest.raises(errors.UnsupportedError, match="bfloat16 values; expected float64 or float32"):
            call()


def test_numbers_beyond_float16_are_refused():
    with pytest.raises(errors.PartitaError, match="float16"):
        pa.compile("1e6*x", pa.Box([0], [1]), tolerance=1e4, method="hard", dtype=FP)
    with pytest.raises(errors.PartitaError, match="float16"):
        pa.compile("x/1e6", pa.Box([0], [1e6]), tolerance=0.1, method="hard", dtype=FP)
    assert pa.compile("1e6*x", pa.Box([0], [1]), tolerance=2e4, method="fitted", dtype=BF).tolerance_met


def test_slopes_are_those_of_where_inputs_are_rounded_to():
    """Just beyond the domain f is steep; bfloat16 moves inputs there."""
    text = "relu(50*(x - 1.001))"
    flat = pa.compile(text, pa.Box([0.5], [1.0005]), tolerance=0.01, dtype=torch.float32)
    assert flat.error_bound <= 0.01
    with pytest.raises(errors.PartitaError):
        pa.compile(text, pa.Box([0.5], [1.0005]), tolerance=0.01, dtype=BF)
    held = pa.compile(text, pa.Box([0.5], [1.0005]), tolerance=1.5, dtype=BF)
    assert next(t.value for t in held.certificate.terms if t.name == "input rounding") > 0.1


@pytest.mark.parametrize(("precision", "dtype"), [(BFLOAT, BF), (HALF, FP)])
def test_inputs_move_no_farther_than_stated(precision, dtype):
    """Halfway cases included: a float64 number is rounded to float32 first, perhaps across the middle of two neighbours."""
    rng = np.random.default_rng(0)
    steps = torch.from_numpy(rng.uniform(1, 2, 20_000)).to(dtype)
    eps = torch.finfo(dtype).eps
    middles = steps.double().numpy() + eps / 2 + rng.choice([-1e-9, 0, 1e-9], len(steps))
    x = np.concatenate([middles, rng.normal(size=20_000), rng.normal(size=20_000) * 1e-7, [0.0, 2.0**-140, 2.0**-26]])
    moved = np.abs(torch.from_numpy(x).to(dtype).double().numpy() - x)
    assert (moved <= precision.moved(x, x)).all()
    assert (moved > np.abs(x) * (eps / 2) * (1 - 1e-6)).any() or moved.max() > 0.49 * eps
    lo, hi = precision.widened(x, x)
    assert (lo <= x - moved).all() and (hi >= x + moved).all()


def test_full_types_are_as_before():
    assert (SINGLE.value_unit, SINGLE.value_tiniest, SINGLE.value_largest) == (
        SINGLE.unit,
        SINGLE.tiniest,
        SINGLE.largest,
    )
    assert Precision.of(torch.bfloat16) is BFLOAT and PRECISIONS["float16"] is HALF and not SINGLE.is_half
