"""Functions that hide something small: compile resolves it or refuses, and never certifies it away.

The place is drawn from the seed in the test's name. What is claimed is judged in balls, at the hidden place and around it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from balls import errors, is_refuted
from flint import arb

import partita as pa
from partita.compiler.compiled import Compiled

METHODS = ("auto", "fitted", "affine", "adaptive", "hard")
MAX_BYTES = 8 << 20  # of a head: a spike may cost a million keys, which CI need not build
Hidden = tuple[str, list[float]]  # the expression and where to look


def gaussian(p: list[float], width: float) -> Hidden:
    far = " + ".join(f"((x{i} - ({c!r}))/{width!r})^2" for i, c in enumerate(p))
    return f"0.3*sin(x0) + 0.5*exp(-({far}))", p


def lorentzian(p: list[float], width: float) -> Hidden:
    far = " + ".join(f"((x{i} - ({c!r}))/{width!r})^2" for i, c in enumerate(p))
    return f"0.3*x0 + 0.5/(1 + {far})", p


def tent(p: list[float], width: float) -> Hidden:
    far = " + ".join(f"abs(x{i} - ({c!r}))" for i, c in enumerate(p))
    return f"0.3*x0 + relu(0.5 - ({far})/{width!r})", p


def clipped(p: list[float], width: float) -> Hidden:
    """Two ramps that cancel but between them."""
    ramp = f"(x0 - ({p[0]!r}))/{width!r}"
    return f"0.3*x{len(p) - 1} + clamp({ramp}, 0, 0.5) - clamp({ramp} - 1, 0, 0.5)", [p[0] + 0.75 * width, *p[1:]]


def bump(p: list[float], width: float) -> Hidden:
    ramp = f"(x0 - ({p[0]!r}))/{width!r}"
    return f"0.3*x{len(p) - 1} + 0.3*(tanh({ramp}) - tanh({ramp} - 2))", [p[0] + width, *p[1:]]


def pulse(p: list[float], width: float) -> Hidden:
    """A jump up and a jump down: no continuous head can be near it in the supremum."""
    return f"0.3*x{len(p) - 1} + where({width!r} - abs(x0 - ({p[0]!r})), 0.5, 0)", p


SPIKES: dict[str, Callable[[list[float], float], Hidden]] = {
    "gaussian": gaussian,
    "lorentzian": lorentzian,
    "tent": tent,
    "clipped": clipped,
    "bump": bump,
    "pulse": pulse,
}
# expression, where to look: places known, signs that cancel, waves and poles
TRAPS: dict[str, Hidden] = {
    "fast wave": ("sin(10000*x0)", [0.7071]),
    "wave in a window": ("exp(-(10*x0)^2)*sin(3000*x0)", [0.0523]),
    "cancelling at 1e8": ("(100000000 + sin(3*x0)) - 100000000", [0.123456]),
    "cancelling at 1e15": ("(1e15 + sin(3*x0)) - 1e15", [0.123456]),
    "nearly equal exponentials": ("exp(20 + 1e-9*x0) - exp(20)", [0.9]),
    "pole just outside": ("1e-7/(1.0000001 - x0)", [1.0]),
    "logarithm just inside": ("0.05*log(1.0000001 - x0)", [1.0]),
    "root at the end": ("sqrt(1 - x0)", [1.0]),
    "steep clamp": ("x0 + clamp(1e6*(x0 - 0.123456), 0, 1)", [0.1234565]),
    "needle of a minimum": ("min(abs(x0 - 0.3)*1e5, 0.5)", [0.3]),
    "maximum of many": ("max(0.1*x0, 0.2 - 1e4*abs(x0 - 0.5), 0.3 - 1e5*abs(x0 + 0.25))", [-0.25]),
    "product of underflows": ("(1e-200*(x0 + 2))*1e-200*1e200*1e200", [0.5]),
    "small sum": (
        "sum(1e-200*(1e-200*x0), 1e-200*(1e-200*sin(x0)), 1e-200*(1e-200), 1e-200*(1e-200*x0^2))*1e200*1e200",
        [0.5],
    ),
    "undefined in a gap": ("x0 + 0*log(abs(x0 - 0.3) - 1e-9)", [0.3]),
    "undefined in a sum": ("sum(0*log(abs(x0 - 0.3) - 1e-9), x0, sin(x0), x0^2)", [0.3]),
}


def hidden(kind: str, dim: int, width: float, seed: int) -> Hidden:
    """A spike of the kind at a random place, its width varied too."""
    rng = np.random.default_rng([seed, dim])
    return SPIKES[kind](rng.uniform(-0.95, 0.95, dim).tolist(), float(width * rng.uniform(0.5, 1.0)))


def suspects(c: Compiled, place: list[float], width: float) -> np.ndarray:
    """The hidden place, its neighbourhood, corners, random points, and the worst of an attack."""
    rng, box = np.random.default_rng(0), c.target.domain.bounding_box()
    near = np.array(place) + width * rng.normal(size=(40, len(place))) * rng.choice([1.0, 0.1, 1e-3], (40, 1))
    worst = c.attack(samples=1000, seed=1).point
    return np.concatenate([[place], box.clamp(near), box.corners(), box.sample(40, rng), [worst]])


def verdict(text: str, dim: int, place: list[float], width: float, *, tolerance: float = 0.2, **options) -> str:
    """`refused`, `true`, or `false`: what became of the claim. An expression is never sampled unasked."""
    try:
        c = pa.compile(text, pa.Box([-1] * dim, [1] * dim), tolerance=tolerance, max_bytes=MAX_BYTES, **options)
    except pa.PartitaError:
        return "refused"
    assert c.certificate.kind == "proved" and c.error_bound <= tolerance
    points = suspects(c, place, width)
    if not all(error.is_finite() for error in errors(c, points[:1])):  # f has no value there: the claim must say so
        said = any("at which f is defined" in a.statement for a in c.certificate.assumptions)
        return "true" if said else "false"
    return "false" if is_refuted(c, points) else "true"


CI = [("gaussian", 1, 1e-6, 0), ("tent", 1, 1e-6, 2), ("clipped", 1, 1e-4, 3)]
CI += [("pulse", 1, 1e-4, 5), ("gaussian", 2, 1e-2, 6), ("lorentzian", 2, 1e-3, 7)]
ALL = [(k, d, w, s) for s in (10, 11) for k in SPIKES for d in (1, 2) for w in (1e-2, 1e-4, 1e-6)]
QUICK = ("hard",)  # in two dimensions: the others take seconds


@pytest.mark.parametrize(("kind", "dim", "width", "seed"), CI)
def test_spikes(kind: str, dim: int, width: float, seed: int) -> None:
    text, place = hidden(kind, dim, width, seed)
    found = {m: verdict(text, dim, place, width, method=m) for m in (METHODS[1 - seed % 2 :] if dim == 1 else QUICK)}
    assert "false" not in found.values(), (text, found)
    if dim == 1 and kind != "pulse":
        assert "true" in found.values(), (text, found)  # something was proved, so something could have been false


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "dim", "width", "seed"), ALL)
def test_many_spikes(kind: str, dim: int, width: float, seed: int) -> None:
    text, place = hidden(kind, dim, width, seed)
    for dtype in (torch.float64, torch.float32)[: 3 - dim]:
        found = {m: verdict(text, dim, place, width, method=m, dtype=dtype) for m in METHODS}
        assert "false" not in found.values(), (text, found)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # from samples of f where it has no value
@pytest.mark.parametrize("name", TRAPS)
def test_traps(name: str) -> None:
    text, place = TRAPS[name]
    found = {m: verdict(text, 1, place, 1e-6, method=m) for m in ("affine", "hard")}
    assert "false" not in found.values(), (text, found)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("name", TRAPS)
@pytest.mark.parametrize("method", METHODS)
def test_traps_by_every_method(name: str, method: str) -> None:
    text, place = TRAPS[name]
    for tolerance in (0.2, 1e-3):
        found = verdict(text, 1, place, 1e-6, method=method, tolerance=tolerance)
        assert found != "false", text


def test_traps_are_not_all_refused() -> None:
    """Cancelling terms, poles and waves are within reach of at least one method."""
    for name in ("cancelling at 1e8", "fast wave", "needle of a minimum"):
        text, place = TRAPS[name]
        assert "true" in {verdict(text, 1, place, 1e-6, method=m) for m in ("affine", "hard")}, name


@pytest.mark.parametrize("kind", ["tent", *(pytest.param(k, marks=pytest.mark.slow) for k in ("gaussian", "bump"))])
def test_negative_control_a_claim_that_overlooks_the_spike_is_refuted(kind: str) -> None:
    """The head of the function without its spike, with its true claim, handed over to the function with it."""
    text, place = hidden(kind, 1, 1e-6, seed=7)
    plain = pa.compile("0.3*x0" if kind != "gaussian" else "0.3*sin(x0)", pa.Box([-1], [1]), tolerance=0.01)
    spiked = pa.compile(text, pa.Box([-1], [1]), tolerance=0.2, method="adaptive")
    false = replace(plain, target=spiked.target)
    assert false.attack(samples=4000).error <= false.error_bound  # hidden it is
    assert is_refuted(false, suspects(false, place, 1e-6))
    assert max(errors(false, np.array([place])), key=arb.mid) > 0.2
