"""Every kind of bad input has an error class of its own, with the numbers in the message, and nothing is half-done."""

import math
import re

import numpy as np
import pytest
import torch

import partita as pa
from partita import errors
from partita.cli import main
from partita.functions.target import make_target
from partita.methods.hard import Hard
from partita.papers import positional_head, rotary_convolution
from partita.search.grid_sizes import Sizes

BOX = pa.Box([-1, -1], [1, 1])
LINE = pa.Box([0.0], [1.0])


def compile_line(f, **options):
    return pa.compile(f, LINE, **{"tolerance": 0.1, "lipschitz": 1.0, **options})


class Noise:
    def __init__(self):
        self.rng = np.random.default_rng(0)

    def __call__(self, z):
        return z[:, 0] + self.rng.normal(size=len(z))


def writes_into_its_input(z):
    z[:, 0] = 0
    return z[:, 0]


def raises(z):
    raise RuntimeError("the simulator is down")


def sees_the_batch(z):
    return z[:, 0] - z[:, 0].mean()


@pytest.mark.parametrize(
    ("f", "error", "words"),
    [
        (lambda z: np.where(z[:, 0] > 0.5, np.nan, z[:, 0]), errors.NonFiniteValueError, "points, the first at"),
        (lambda z: 1 / np.maximum(z[:, 0] - 0.5, 0), errors.NonFiniteValueError, "infinite"),
        (raises, errors.TargetFailedError, "the simulator is down"),
        (Noise(), errors.NotDeterministicError, "same value twice"),
        (writes_into_its_input, errors.MutatedInputError, "copy"),
        (sees_the_batch, errors.NotVectorizedError, "on its own"),
        (lambda z: z.sum(), errors.NotVectorizedError, "vectorize=True"),
        (lambda z: math.sin(z[0]), errors.NotVectorizedError, "vectorize=True"),
        (lambda z: z[:, 0] + 1j, errors.TargetFailedError, "complex"),
        (lambda z: "three", errors.TargetFailedError, "real numbers"),
        (lambda z: np.zeros((len(z), 2, 2, 2)), errors.ShapeError, "tokens, dim"),
        (
            lambda z: z[:, 0] * (2 if isinstance(z, np.ndarray) else 1),
            errors.TargetFailedError,
            "numpy arrays and torch",
        ),
        (7, errors.TargetFailedError, "int"),
    ],
    ids=lambda v: getattr(v, "__name__", str(v))[:30],
)
@pytest.mark.filterwarnings("ignore:divide by zero")
def test_bad_functions(f, error, words):
    with pytest.raises(error, match=words):
        compile_line(f)


def test_each_bad_function_has_its_own_class():
    kinds = [
        errors.NonFiniteValueError,
        errors.TargetFailedError,
        errors.NotDeterministicError,
        errors.MutatedInputError,
        errors.NotVectorizedError,
    ]
    assert not any(issubclass(a, b) for a in kinds for b in kinds if a is not b)
    assert all(issubclass(getattr(errors, n), errors.PartitaError) for n in errors.__all__ if not n.endswith("Warning"))
    assert issubclass(errors.ToleranceMissedWarning, UserWarning)


def test_nan_at_a_center_only_is_still_found():
    """The probes miss it, the table does not."""
    with pytest.raises(errors.NonFiniteValueError, match="1 of"):
        compile_line(lambda z: np.where(np.abs(z[:, 0] - 0.25) < 1e-4, np.nan, z[:, 0]), tolerance=0.1)


def test_a_function_of_single_points_on_request():
    c = compile_line(lambda z: math.sin(z[0]), vectorize=True)
    assert abs(float(c(np.array([[0.3]]))[0]) - math.sin(0.3)) <= c.error_bound


def test_first_mistakes_get_the_right_advice(tmp_path):
    with pytest.raises(errors.DomainError, match=r"write Box\(\[-1\], \[1\]\)"):
        pa.Box(-1, 1)
    c = pa.compile("2*x", pa.Box([0], [1]), tolerance=0.2)
    with pytest.raises(errors.ShapeError, match=r"z\[:, None\]"):
        c(np.linspace(0, 1, 3))
    with pytest.raises(errors.ExpressionError, match="this domain has x0, x1") as caught:
        pa.compile("x2", pa.Box([0, 0], [1, 1]), tolerance=0.2)
    assert "did you mean" not in str(caught.value)
    with pytest.raises(errors.LipschitzContradictedError, match=r"declare at least (1\.9|2)"):
        pa.compile(lambda z: 2 * z[:, 0], pa.Box([0], [1]), tolerance=0.2, lipschitz=0.1, trace=False)
    with pytest.raises(errors.FormatError, match="does not exist"):
        pa.load(tmp_path / "nowhere")


@pytest.mark.parametrize("lipschitz", [1.0, [1.0, 1.0]])
def test_a_contradicted_lipschitz_constant_names_the_pair(lipschitz):
    with pytest.raises(errors.LipschitzContradictedError) as caught:
        pa.compile(lambda z: 3 * z[:, 0] + z[:, 1], BOX, method="hard", tolerance=0.1, lipschitz=lipschitz, trace=False)
    assert "between [" in str(caught.value) and "times" in str(caught.value)


def test_a_lipschitz_constant_contradicted_only_between_centers_is_found():
    """A step that random pairs are unlikely to straddle closely: the neighbouring centers show it."""
    with pytest.raises(errors.LipschitzContradictedError):
        pa.compile(lambda z: (z[:, 0] > 0.4321) * 0.4, LINE, method="hard", tolerance=0.05, lipschitz=1.0)


def test_an_expression_steeper_than_declared_is_refused():
    with pytest.raises(errors.LipschitzContradictedError, match="slope"):
        pa.compile("sin(9*x0)", LINE, method="hard", tolerance=0.1, lipschitz=2.0)


@pytest.mark.parametrize("tolerance", [0, -1, math.nan, math.inf, "small", None])
def test_bad_tolerances(tolerance):
    with pytest.raises(errors.ToleranceError, match="> 0"):
        compile_line(lambda z: z[:, 0], tolerance=tolerance)


def test_tolerance_below_the_rounding_floor_names_the_floor():
    with pytest.raises(errors.ToleranceError, match="float32 can promise") as caught:
        pa.compile(lambda z: 1e6 + z[:, 0], LINE, method="hard", tolerance=0.05, lipschitz=1.0, dtype=torch.float32)
    assert "float64" in str(caught.value)
    with pytest.raises(errors.ToleranceError, match="float64 can promise"):
        pa.compile("1e12 + x0", LINE, method="hard", tolerance=1e-4)


def test_tolerance_below_the_fill_distance_is_refused():
    cloud = pa.PointCloud(np.random.default_rng(0).normal(size=(50, 2)), fill_distance=0.2)
    with pytest.raises(errors.ToleranceError, match="fill_distance"):
        pa.compile(lambda z: z[:, 0], cloud, method="hard", tolerance=0.1, lipschitz=1.0)


def test_a_grid_that_does_not_fit_names_the_best_tolerance_that_does():
    with pytest.raises(errors.SizeError) as caught:
        pa.compile(lambda z: z[:, 0], pa.Box([-1] * 6, [1] * 6), method="hard", tolerance=1e-3, lipschitz=1.0)
    message = str(caught.value)
    assert "keys" in message and "best tolerance that fits" in message
    best = float(message.split("best tolerance that fits is about ")[1].split()[0])
    planned = pa.plan(lambda z: z[:, 0], pa.Box([-1] * 6, [1] * 6), method="hard", tolerance=best, lipschitz=1.0)
    assert planned.bytes <= 4 << 30
    with pytest.raises(errors.SizeError):
        pa.plan(lambda z: z[:, 0], pa.Box([-1] * 6, [1] * 6), method="hard", tolerance=0.8 * best, lipschitz=1.0)


def test_nothing_known_is_said_with_a_suggestion():
    with pytest.raises(errors.NothingKnownError, match="estimate"):
        pa.compile(lambda z: z[:, 0], LINE, method="hard", tolerance=0.1, trace=False)


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"norm": 0.5}, errors.UnsupportedError),
        ({"norm": "two"}, errors.UnsupportedError),
        ({"norm": math.nan}, errors.UnsupportedError),
        ({"dtype": torch.int32}, errors.UnsupportedError),
        ({"dtype": torch.complex64}, errors.UnsupportedError),
        ({"sharpness": 0.0}, errors.UnsupportedError),
        ({"sharpness": math.nan}, errors.UnsupportedError),
        ({"method": "magic"}, errors.UnsupportedError),
        ({"outside": "ignore"}, errors.UnsupportedError),
        ({"lipschitz": -1.0}, errors.DomainError),
        ({"lipschitz": math.nan}, errors.DomainError),
        ({"lipschitz": [1.0, 2.0]}, errors.ShapeError),
        ({"lipschitz": 1.0, "modulus": pa.Modulus(1.0)}, errors.UnsupportedError),
        ({"jumps": pa.Jumps(1.0, 1.0)}, errors.UnsupportedError),
        ({"lipschitz": None, "jumps": pa.Jumps(1.0, 1.0), "norm": 2}, errors.UnsupportedError),
    ],
    ids=str,
)
def test_bad_options(options, error):
    with pytest.raises(error):
        compile_line(lambda z: z[:, 0], **options)


@pytest.mark.parametrize("domain", [None, [0, 1, 2], (LINE,), (LINE, pa.PointCloud([[0.0]])), "[0,1", "(0,1)", "[1,0]"])
def test_bad_domains(domain):
    with pytest.raises(errors.DomainError):
        pa.compile("x0", domain, method="hard", tolerance=0.1)


def test_bad_moduli():
    for bad in ((-1.0, 1.0), (1.0, 0.0), (1.0, 1.5), (math.inf, 1.0)):
        with pytest.raises(errors.DomainError):
            pa.Modulus(*bad)
    with pytest.raises(errors.DomainError):
        pa.Jumps(height=-1, tube=1)


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("__import__('os').system('true')", errors.ExpressionError),
        ("x0.__class__", errors.ExpressionError),
        ("[].append(1)", errors.ExpressionError),
        ("lambda: 0", errors.ExpressionError),
        ("x0 if x0 else 1", errors.ExpressionError),
        ("x7", errors.ExpressionError),
        ("", errors.ExpressionError),
        ("x0^65", errors.ExpressionLimitError),
        ("(" * 100_000, errors.ExpressionLimitError),
        ("x0+" * 1_000_000 + "x0", errors.ExpressionLimitError),
        ("-" * 1500 + "x0", errors.ExpressionLimitError),
    ],
    ids=lambda v: str(v)[:24],
)
def test_expressions_that_are_none(text, error):
    with pytest.raises(error):
        pa.compile(text, LINE, method="hard", tolerance=0.1)


@pytest.mark.parametrize("text", ["1/x0", "9**9**9**9", "log(x0 - 0.5)", "sqrt(x0 - 2)", "tan(3*x0)"])
def test_expressions_undefined_on_the_domain(text):
    with pytest.raises(errors.NonFiniteValueError):
        pa.compile(text, LINE, method="hard", tolerance=0.1)


@pytest.mark.parametrize("text", ["step(x0 - 0.3)", "step(x0 - 0.3)*sqrt(x0)"])
def test_expressions_that_jump(text):
    with pytest.raises(errors.UnsupportedError, match=r"may jump.*norm=1"):
        pa.compile(text, LINE, method="hard", tolerance=0.1)
    assert pa.compile(text, LINE, method="hard", tolerance=0.1, norm=1).error_bound <= 0.1


def test_a_jump_in_the_supremum_norm_is_impossible():
    with pytest.raises(errors.UnsupportedError, match="L_p"):
        compile_line(lambda z: np.sign(z[:, 0] - 0.5), jumps=pa.Jumps(2.0, 1.0))


# --- calling -------------------------------------------------------------------------------------------------------


def test_inputs_outside_raise_clamp_or_pass():
    c = compile_line(lambda z: z[:, 0])
    with pytest.raises(errors.OutsideDomainError, match="1 of 2") as caught:
        c(np.array([[0.5], [1.5]]))
    assert "1.5" in str(caught.value)
    clamped, allowed = c.with_outside("clamp"), c.with_outside("allow")
    assert clamped(np.array([[1.5]])) == c(np.array([[1.0]]))
    assert np.isfinite(allowed(np.array([[1.5]]))).all()
    assert c.outside == "raise"


def test_inputs_outside_a_cloud():
    cloud = pa.PointCloud(np.array([[0.0, 0.0], [1.0, 0.0]]), fill_distance=0.1)
    c = pa.compile(lambda z: z[:, 0], cloud, method="hard", tolerance=0.3, lipschitz=1.0)
    assert c(np.array([[0.05, 0.0]])).shape == (1,)
    with pytest.raises(errors.OutsideDomainError):
        c(np.array([[0.5, 0.0]]))
    assert np.isclose(c.with_outside("clamp")(np.array([[0.3, 0.0]])), c(np.array([[0.1, 0.0]])))


@pytest.mark.parametrize("bad", [np.zeros((3, 2)), np.zeros((2, 1, 3)), np.zeros(2), np.float64(0.5)])
def test_calls_with_wrong_shapes(bad):
    with pytest.raises(errors.ShapeError):
        compile_line(lambda z: z[:, 0])(bad)


def test_calls_with_nan():
    with pytest.raises(errors.NonFiniteValueError, match="number 1"):
        compile_line(lambda z: z[:, 0])(np.array([[0.1], [np.nan]]))


def test_calls_take_arrays_tensors_lists_single_points_and_batches():
    c = pa.compile("x0 + x1", BOX, method="hard", tolerance=0.1)
    assert isinstance(c([0.1, 0.2]), np.ndarray) and c([0.1, 0.2]).shape == ()
    assert isinstance(c(torch.zeros(3, 2)), torch.Tensor) and c(torch.zeros(3, 2)).shape == (3,)
    assert c(np.zeros((4, 3, 2))).shape == (4, 3) and c(np.zeros((0, 2))).shape == (0,)
    z = torch.zeros(1, 2, dtype=torch.float64, requires_grad=True)
    c(z).sum().backward()
    assert z.grad is not None


def test_compiled_values_are_frozen():
    c = compile_line(lambda z: z[:, 0])
    with pytest.raises(AttributeError):
        c.head = None
    with pytest.raises(AttributeError):
        c.certificate.error_bound = 0.0


def test_options_are_checked_before_anything_is_asked():
    def never(z):
        raise AssertionError("asked")

    with pytest.raises(errors.ToleranceError):
        pa.compile(never, LINE, method="hard", tolerance=-1, lipschitz=1.0)
    with pytest.raises(errors.UnsupportedError, match="method is"):
        pa.compile(never, LINE, method="magic", tolerance=1, lipschitz=1.0)


def test_a_float32_module_is_asked_in_its_own_dtype():
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(1, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
    c = compile_line(net, lipschitz=20.0, tolerance=1.0)
    z = torch.rand(100, 1)
    assert c.target.output_shape == (1,)
    assert (c(z) - net(z)).abs().max() <= c.error_bound


# --- the other doors: prompts, positions, regions ---------------------------------------------------------------------------

PROMPT = pa.in_context.function(lipschitz=1.0, fill_distance=0.1, tolerance=0.15, box=pa.Box([-1], [1]))
PAIRS = np.linspace(-1, 1, 11)[:, None]
ROTARY = rotary_convolution(np.ones((3, 1, 1)))
HALF = pa.Region(LINE, "x0 <= 0.5")


def prompt(**options):
    said = {"lipschitz": 1.0, "fill_distance": 0.1, "tolerance": 0.15, "box": pa.Box([-1], [1])}
    return pa.in_context.function(**{**said, **options})


def positions(encodings, functions=("x", "-x"), **options):
    return positional_head(list(functions), encodings, pa.Box([-1], [1]), **{"tolerance": 0.1, **options})


REFUSED = {
    "queries without rows": (
        lambda: PROMPT.query_tokens([0.0]),
        errors.ShapeError,
        r"shape \(1,\); expected \(…, n, 1\)",
    ),
    "wide queries": (lambda: PROMPT.query_tokens([[0.0, 1.0]]), errors.ShapeError, "expected"),
    "outputs as text": (lambda: PROMPT.layer("a", 1), errors.DomainError, "outputs is 'a'"),
    "outputs below 1": (lambda: PROMPT.layer(-1, 1), errors.DomainError, "outputs is -1"),
    "a fraction of a query": (lambda: PROMPT.layer(1, 1.5), errors.DomainError, "queries is 1.5"),
    "y without outputs": (
        lambda: PROMPT(PAIRS, np.zeros((11, 0)), [[0.0]], check="fill"),
        errors.ShapeError,
        r"y \(11, 0\).*out ≥ 1",
    ),
    "complex y": (lambda: PROMPT(PAIRS, np.zeros(11) + 1j, [[0.0]]), errors.ShapeError, "y: .*real numbers"),
    "a bool for L": (lambda: prompt(lipschitz=True), errors.DomainError, "lipschitz is True"),
    "a bool for pairs": (lambda: prompt(max_pairs=True), errors.DomainError, "max_pairs is True"),
    "dtype as text": (lambda: prompt(dtype="float32"), errors.UnsupportedError, "'float32'; expected torch.float64"),
    "layers in text": (
        lambda: pa.compile("x", LINE, tolerance=0.1, method="hard").layers(dtype="float32"),
        errors.UnsupportedError,
        "dtype is 'float32'",
    ),
    "too many tokens": (lambda: ROTARY(torch.zeros(4, 1)), errors.ShapeError, r"expected \(…, 3, 1\)"),
    "tokens as text": (lambda: ROTARY("a"), errors.ShapeError, "found a str"),
    "a kernel of text": (lambda: rotary_convolution("a"), errors.ShapeError, "the kernel: found a str"),
    "a ragged kernel": (lambda: rotary_convolution([[1], [1, 2]]), errors.ShapeError, "equal length"),
    "a kernel that overflows": (
        lambda: rotary_convolution(np.full((3, 1, 1), 1e308)),
        errors.DomainError,
        "inf in float64",
    ),
    "a negative size": (lambda: ROTARY.error_bound_for(-1), errors.DomainError, "size is -1"),
    "ragged encodings": (lambda: positions([[0], [4, 5]]), errors.ShapeError, "encodings: .*equal length"),
    "an encoding that is NaN": (
        lambda: positions([[0.0], [math.nan]]),
        errors.NonFiniteValueError,
        r"position 1 is \[nan\]",
    ),
    "a tolerance of text": (lambda: positions([[0], [4]], tolerance="a"), errors.DomainError, "tolerance is 'a'"),
    "a region and points": (lambda: HALF | pa.PointCloud([[0.0]]), errors.DomainError, "small boxes around the points"),
    "a region and a number": (lambda: HALF | 3, errors.DomainError, "union with 3"),
    "a number and a region": (lambda: 3 | HALF, errors.DomainError, "union with 3"),
    "a ball of text": (lambda: pa.Ball("a", 1), errors.ShapeError, "Ball: center"),
    "a ragged simplex": (lambda: pa.Simplex([[0], [1, 2]]), errors.ShapeError, "Simplex: vertices"),
    "a bool for a clip": (lambda: pa.Tail(True, 0.1), errors.DomainError, "Tail: clip is True"),
    "a bool for a Lipschitz constant": (
        lambda: compile_line(np.sin, lipschitz=True),
        errors.DomainError,
        "lipschitz is True",
    ),
    "a bool for a norm": (lambda: compile_line("x0", norm=True), errors.UnsupportedError, "norm is True"),
    "a seed of text": (lambda: compile_line("x0", seed="a"), errors.UnsupportedError, "seed is 'a'"),
    "a box of text": (lambda: pa.Box(["a"], [1]), errors.ShapeError, "Box: lo"),
    "ragged points": (lambda: pa.PointCloud([[1], [1, 2]]), errors.ShapeError, "PointCloud: points"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_wrong_input_is_refused_with_an_error_of_partita(name):
    call, kind, text = REFUSED[name]
    with pytest.raises(kind, match=text):
        call()


def test_what_is_near_wrong_input_is_accepted():
    """Negative control: integers and numbers of numpy, arrays where tensors go, unions of regions."""
    assert prompt(max_pairs=np.int64(5)).max_pairs == 5
    assert isinstance(prompt(lipschitz=np.float32(1)).error_bound, float)
    assert PROMPT.query_tokens([[0.0]], np.int64(2)).shape == (4, 1)
    assert PROMPT.layer(np.int64(1), 2).w_o.shape == (2, 2)
    assert ROTARY(np.ones((3, 1))).tolist() == ROTARY(torch.ones(3, 1)).tolist()
    assert float(rotary_convolution(np.zeros((3, 1, 1)))(np.ones((3, 1))).abs().max()) == 0
    assert positions([[0], [4]]).layers(dtype=torch.float32, tolerance=1.0).dtype == torch.float32
    assert len((HALF | LINE).pieces) == 2


class Line:
    """Errors of one axis: 1/keys."""

    def fewest(self, target):
        return 1

    def error(self, keys):
        return 1 / keys

    def next_sizes(self, keys):
        return [2 * keys]


@pytest.mark.parametrize(("still", "moving"), [(70, 0), (70, 3), (0, 30)])
def test_sizes_of_grids_of_many_variables(still, moving):
    """numpy's arrays have at most 64 axes; a table of sizes has one for each variable with several sizes."""
    fixed = Line()
    fixed.error = lambda keys: 0.0
    sizes = Sizes([fixed] * still + [Line()] * moving, 0.5 * max(moving, 1))
    found = sizes.cheapest()
    if moving == 30:
        assert found is None  # 4³⁰ sizes are not compared
    else:
        assert (
            found is not None and found[:still] == (1,) * still and 0.8 * sizes.foretold(found) <= 0.5 * max(moving, 1)
        )
        sizes.reject(found)
        assert sizes.cheapest() is None or sizes.cheapest() != found


@pytest.mark.slow
def test_plans_of_many_variables():
    box = pa.Box([-1] * 66, [1] * 66)
    assert pa.plan("+".join(f"x{i}" for i in range(66)), box, tolerance=0.1).method == "pieces"


# --- messages that name the way out -----------------------------------------------------------------------------------------

SQUARE = [[1.0, 0.0], [-1.0, 0.0], [0.0, 1.0], [0.0, -1.0]]


@pytest.mark.parametrize(
    ("text", "box", "norm", "found"),
    [
        ("log(x0)", LINE, "inf", r"Or use norm=1: f is unbounded and integrable\.$"),
        ("abs(x0)**-0.25", LINE, "inf", r"Or use norm=1"),
        ("log(x0**2 + x1**2)", BOX, 1, r"integrable, declare tail=pa.Tail\(clip"),
        ("log(x0**2 + x1**2)", BOX, "inf", r"use norm=1 and declare tail=pa.Tail\(clip"),
        ("1/x0", LINE, "inf", r"so that they cancel\.$"),  # control: not integrable
        (
            "sqrt(x0)*log(x0)",
            BOX,
            1,
            r"where f is defined \(pa.Region, --region\)\.$",
        ),  # control: undefined, not infinite
    ],
)
def test_a_function_without_a_bound_is_told_how_to_be_clipped(text, box, norm, found):
    with pytest.raises(errors.NonFiniteValueError, match=found):
        pa.plan(text, box, tolerance=0.1, norm=norm)


def test_refusals_name_the_tolerance_that_was_asked_for():
    options = {"norm": 1, "method": "hard", "max_bytes": 100, "tail": pa.Tail(0.5, 0.126)}  # the true tail is 1/8
    with pytest.raises(errors.SizeError, match=r"tolerance 0\.127 needs .* best tolerance that fits is about") as small:
        pa.plan("x0", LINE, tolerance=0.127, **options)
    fits = float(str(small.value).split("about ")[1].split(" ")[0])
    assert pa.plan("x0", LINE, tolerance=1.001 * fits, **options).error_bound <= 1.001 * fits
    assert pa.plan("x0", LINE, tolerance=0.01, norm=1, method="hard").request.asked == 0.01  # control: no tail
    proved = pa.plan("log(x0)", LINE, tolerance=0.5, norm=1, method="adaptive").request
    assert proved.asked == pytest.approx(0.5) and proved.stated(2 * proved.tolerance) == pytest.approx(1.0)


def test_what_a_search_says_of_its_own_tolerance_is_explained(monkeypatch):
    def search(method, request, share, progress):
        raise errors.ToleranceError(f"tolerance {request.tolerance:.3g} is too small", "Use a larger one.")

    monkeypatch.setattr(Hard, "plan", search)
    with pytest.raises(
        errors.ToleranceError, match=r"0\.074 is too small \(of the tolerance 0\.2, the tail takes 0\.126\)\. Use"
    ):
        pa.plan("x0", LINE, tolerance=0.2, norm=1, method="hard", tail=pa.Tail(0.5, 0.126))
    with pytest.raises(errors.ToleranceError, match=r"0\.2 is too small\. Use"):  # control
        pa.plan("x0", LINE, tolerance=0.2, norm=1, method="hard")


def test_convex_heads_on_pairs_say_why_not():
    with pytest.raises(errors.PartitaError, match=r"for one box: .*depend on z_Q"):
        pa.plan("k0**2 + q0**2", (LINE, LINE), tolerance=0.1, method="convex")


def test_an_inequality_that_always_holds_keeps_the_whole_box():
    for text in ("x0 <= x0", "0 <= 0", "x0*x1 >= x0*x1 and x0 <= 1"):
        assert pa.Region(BOX, text).contains(np.array([[1.0, -1.0], [0.3, 0.2]])).all()
    with pytest.raises(errors.DomainError, match="empty"):  # controls: where a is undefined, and where it never holds
        pa.Region(pa.Box([-2.0], [-1.0]), "log(x0) <= log(x0)")
    with pytest.raises(errors.DomainError, match="empty"):
        pa.Region(BOX, "x0 <= x0 - 1")


@pytest.mark.parametrize("scale", [1e-200, 1e-20, 1.0, 1e20, 1e200])
def test_polytopes_do_not_depend_on_the_scale_of_their_rows(scale):
    plain = pa.Polytope(SQUARE, np.ones(4))
    rows = np.array([[scale], [1.0], [1.0], [1 / scale]])
    scaled = pa.Polytope(rows * SQUARE, rows[:, 0])
    points = np.random.default_rng(0).uniform(-1.5, 1.5, (500, 2))
    assert (scaled.contains(points) == plain.contains(points)).all()
    assert np.allclose(scaled.bounding_box().hi, 1, atol=1e-9)
    long = pa.Polytope(SQUARE, np.full(4, scale))
    assert np.allclose(long.bounding_box().hi / scale, 1, atol=1e-9) and bool(long.contains(np.zeros((1, 2)))[0])
    with pytest.raises(errors.DomainError, match="x1 has no bound"):  # control
        pa.Polytope(rows[:3] * SQUARE[:3], rows[:3, 0])
    with pytest.raises(errors.DomainError, match="too far apart"):
        pa.Polytope([[1e200, 1e-200], *SQUARE], np.ones(5))


def test_a_modulus_of_zero_is_one():
    for text in ("0*t", "0*t + sqrt(t)", "t*0"):
        assert pa.Modulus.of(text).at(0.0) == 0
    c = pa.compile(lambda z: 3 + 0 * z[:, 0], LINE, tolerance=0.1, modulus="0*t", trace=False, method="hard")
    assert c.num_keys == 1 and c.error_bound < 1e-12
    with pytest.raises(errors.DomainError, match="nondecreasing"):  # control
        pa.Modulus.of("-1*t")


@pytest.mark.parametrize("text", ["x0 >= 0", "x0 == 1"])
def test_comparisons_are_answered_with_where(text):
    with pytest.raises(errors.ExpressionError, match=r"where\(.*, a, b\)"):
        pa.plan(text, LINE, tolerance=0.1)
    c = make_target("where(x0 - 0.5, x0^2, 7)", LINE)
    assert c(np.array([[0.4], [0.5], [1.0]])).ravel().tolist() == [7.0, 0.25, 1.0]


@pytest.mark.parametrize(
    ("command", "found"),
    [
        ("plan log(x0) --domain [0,1] --tolerance 0.1", r"Or use --norm 1: f"),
        ("plan log(x0) --domain [0,1] --tolerance 0.1 --norm 1 --tail 5,0.001", r"Declare --tail '5,norm' with"),
        ("plan sin(x0) --domain [0,1] --tolerance 1e-5 --method hard --max-bytes 99", r"or raise --max-bytes\."),
        ("plan sign(x0) --domain [-1,1] --tolerance 0.1 --method hard", r"Use --norm 1 or --norm 2, .* --modulus '"),
        (
            "plan 1000+0.001*x0 --domain [-1,1] --tolerance 1e-6 --method hard --dtype float32",
            r"Use --dtype float64, or a tolerance",
        ),
    ],
)
def test_the_command_line_advises_options(capsys, command, found):
    with pytest.raises(SystemExit):
        main(command.split())
    said = capsys.readouterr().err
    assert re.search(found, said) and not re.search(r"\b(norm|dtype|tail|modulus)=", said)


def test_python_is_advised_in_python():
    """Negative control: the same error outside of a command."""
    with pytest.raises(errors.NonFiniteValueError, match="norm=1"):
        pa.plan("log(x0)", LINE, tolerance=0.1)
