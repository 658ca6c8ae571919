"""Feed-forward networks as attention: proved end to end, and nothing but products, additions and softmax in the graph."""

import json
from pathlib import Path

import mpmath
import numpy as np
import pytest
import torch
from partita_check.cli import run
from resealing import forge
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional
from traced import ALLOWED, operations, strangers, symbolic_operations

import partita as pa
from partita.errors import (
    DomainError,
    NonFiniteValueError,
    OutsideDomainError,
    ShapeError,
    ToleranceError,
    UnsupportedError,
)
from partita.functions.expressions import parse
from partita.functions.ranges import enclose_each
from partita.networks.chains import Activation, read_chain
from partita.networks.from_mlp import activation_graph
from partita.networks.tables import Table, tabulate
from partita.proofs.network_proof import NetworkProof, Part
from partita.proofs.proof import Given

BOX = pa.Box([-1, -1], [1, 1])
ACTIVATIONS = {
    "relu": nn.ReLU(),
    "relu6": nn.ReLU6(),
    "hardtanh": nn.Hardtanh(-0.5, 0.7),
    "leaky": nn.LeakyReLU(0.1),
    "steep leaky": nn.LeakyReLU(1.7),
    "gelu": nn.GELU(),
    "gelu tanh": nn.GELU("tanh"),
    "tanh": nn.Tanh(),
    "sigmoid": nn.Sigmoid(),
    "silu": nn.SiLU(),
}

EVERY_ACTIVATION = pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] * (n == "gelu tanh")) for n in ACTIVATIONS]
)


def mlp(activation: nn.Module, width: int = 16, scale: float = 1.0, inputs: int = 2) -> nn.Sequential:
    torch.manual_seed(3)
    net = nn.Sequential(
        nn.Linear(inputs, width),
        activation,
        nn.Sequential(nn.Linear(width, width), activation, nn.Identity()),
        nn.Linear(width, 3),
    )
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.mul_(scale)
    return net.double().eval()


def attack(net, model, box=BOX, seed=0) -> tuple[np.ndarray, np.ndarray]:
    """Points and errors: random, corners, and gradient ascent on the error from the worst of them."""
    rng = np.random.default_rng(seed)
    points = torch.from_numpy(np.concatenate([box.sample(1500, rng), box.corners(16)]).astype(np.float32)).double()
    lo, hi = torch.tensor(box.lo), torch.tensor(box.hi)

    def error(x):
        return (net(x.to(net.dtype)).double() - model(x)).abs().max(dim=1).values

    with torch.no_grad():
        best = points[error(points).argsort()[-32:]].clone()
    step = 0.02 * (hi - lo)
    for _ in range(25):
        best.requires_grad_(True)
        (slope,) = torch.autograd.grad(error(best).sum(), best)
        with torch.no_grad():
            trial = (best + step * torch.sign(slope)).clamp(lo, hi).float().double().clamp(lo, hi)
            better = error(trial) > error(best)
            best = torch.where(better[:, None], trial, best).detach()
        step = step * 0.8
    everything = torch.cat([points, best])
    with torch.no_grad():
        return everything.numpy(), error(everything).numpy()


@pytest.mark.parametrize("scale", [1.0, 5.0])
@EVERY_ACTIVATION
def test_the_network_is_within_its_bound(name, scale):
    model = mlp(ACTIVATIONS[name], scale=scale)
    net = pa.attention_from_mlp(model, BOX, 1e-3)
    points, errors = attack(net, model)
    at = net.error_bound_at(points)
    assert errors.max() <= net.error_bound <= 1e-3
    assert (errors <= at).all() and (at <= net.error_bound * (1 + 1e-9)).all()
    assert net.certificate.kind == "proved" and net.certificate.error_bound == net.error_bound


@pytest.mark.parametrize("name", ["relu", "hardtanh", "gelu", "tanh", "silu"])
def test_in_single_precision(name):
    model = mlp(ACTIVATIONS[name])
    net = pa.attention_from_mlp(model, BOX, 0.05, dtype=torch.float32)
    points, errors = attack(net, model)
    assert net(torch.zeros(1, 2)).dtype == torch.float32
    assert (errors <= net.error_bound_at(points)).all() and errors.max() <= net.error_bound <= 0.05


@EVERY_ACTIVATION
def test_the_graph_is_products_additions_and_softmax(name):
    net = pa.attention_from_mlp(mlp(ACTIVATIONS[name], scale=4.0), BOX, 1e-2)
    x = torch.zeros(5, 2, dtype=torch.float64)
    found = operations(net, x)
    assert strangers(net, x) == set()
    assert found["_softmax"] >= 2
    assert set(symbolic_operations(net)) <= ALLOWED


def test_the_graph_test_sees_what_does_not_belong():
    """Negative controls: the model itself, and a clamp or a product of two activations slipped in."""
    x = torch.zeros(5, 2, dtype=torch.float64)
    assert strangers(mlp(nn.ReLU()).requires_grad_(False), x) == {"relu"}
    net = pa.attention_from_mlp(mlp(nn.ReLU()), BOX, 1e-2)
    assert strangers(lambda z: net(z).clamp(0, 1), x) == {"clamp"}
    assert {"leaky_relu", "clamp", "gelu", "tanh"} <= set(symbolic_operations(Functional())) - ALLOWED
    assert strangers(lambda z: net(z) * net(z), x) == {"mul"}


def test_the_graph_can_be_exported():
    net = pa.attention_from_mlp(mlp(nn.ReLU()), BOX, 1e-2)
    exported = torch.export.export(net, (torch.zeros(5, 2, dtype=torch.float64),)).module()
    x = torch.from_numpy(BOX.sample(5, np.random.default_rng(0)))
    assert torch.allclose(exported(x), net(x))


def test_a_smaller_bound_would_be_false():
    """One ReLU of u = x: the gate's 0.2785/β is attained, so 90 % of the bound is exceeded."""
    model = nn.Sequential(nn.Linear(1, 1), nn.ReLU(), nn.Linear(1, 1)).double()
    with torch.no_grad():
        for parameter, value in zip(model.parameters(), (1.0, 0.0, 1.0, 0.0)):
            parameter.fill_(value)
    box = pa.Box([-1], [1])
    net = pa.attention_from_mlp(model, box, 1e-2)
    x = torch.linspace(-1, 1, 20_001, dtype=torch.float64)[:, None]
    with torch.no_grad():
        error = (net(x) - model(x)).abs().max().item()
    assert 0.9 * net.error_bound < error <= net.error_bound


class Functional(nn.Module):
    """The same layers written as functions and methods."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(2, 8), nn.Linear(8, 8), nn.Linear(8, 2)

    def forward(self, x):
        z = functional.leaky_relu(self.first(x.flatten(1)), 0.2)
        z = torch.clamp(self.second(z), -0.3, 0.6).clamp(min=-0.2)
        return self.third(functional.gelu(torch.clamp(z, max=0.5), approximate="tanh")).tanh()


def test_networks_written_with_functions():
    torch.manual_seed(0)
    model = Functional().double()
    kinds = [s.activation.kind for s in read_chain(model) if s.activation]
    assert kinds == ["leaky", "clamp", "clamp", "clamp", "gelu_tanh", "tanh"]
    net = pa.attention_from_mlp(model, BOX, 1e-3)
    _, errors = attack(net, model)
    assert errors.max() <= net.error_bound <= 1e-3
    assert strangers(net, torch.zeros(2, 2, dtype=torch.float64)) == set()


def test_images_are_flattened_and_batches_keep_their_shape():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Dropout(0.5), nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 2)).double().eval()
    net = pa.attention_from_mlp(model, pa.Box.sequence(0, 1, tokens=2, dim=3), 1e-3)
    x = torch.rand(4, 2, 3, dtype=torch.float64)
    with torch.no_grad():
        assert (net(x) - model(x)).abs().max() <= net.error_bound
        assert net(x[None]).shape == (1, 4, 2) and net(x[0]).shape == (2,)


def test_two_hidden_layers_of_64():
    torch.manual_seed(0)
    for activation in (nn.ReLU(), nn.GELU()):
        model = nn.Sequential(nn.Linear(2, 64), activation, nn.Linear(64, 64), activation, nn.Linear(64, 1))
        net = pa.attention_from_mlp(model, BOX, 1e-3)  # ten seconds are asked; benchmarks/second_paper.py has the time
        x = torch.from_numpy(BOX.sample(2000, np.random.default_rng(0)))
        with torch.no_grad():
            error = (net(x) - model.double()(x)).abs().max().item()
        assert error <= net.error_bound <= 1e-3


EXACT = {
    "relu": lambda u: max(u, mpmath.mpf(0)),
    "leaky": lambda u: u if u > 0 else u * mpmath.mpf(0.1),
    "clamp": lambda u: min(max(u, mpmath.mpf(-0.5)), mpmath.mpf(0.7)),
    "tanh": mpmath.tanh,
    "sigmoid": lambda u: 1 / (1 + mpmath.exp(-u)),
    "silu": lambda u: u / (1 + mpmath.exp(-u)),
    "gelu": lambda u: u * mpmath.ncdf(u),
    "gelu_tanh": lambda u: u / 2 * (1 + mpmath.tanh(mpmath.sqrt(2 / mpmath.pi) * (u + mpmath.mpf("0.044715") * u**3))),
}
PARAMETERS = {"leaky": (0.1,), "clamp": (-0.5, 0.7)}


def activation(kind: str) -> nn.Module:
    """The activation as a module: one neuron, whose input is the network's."""
    made = {
        "relu": nn.ReLU(),
        "leaky": nn.LeakyReLU(0.1),
        "clamp": nn.Hardtanh(-0.5, 0.7),
        "tanh": nn.Tanh(),
        "sigmoid": nn.Sigmoid(),
        "silu": nn.SiLU(),
        "gelu": nn.GELU(),
        "gelu_tanh": nn.GELU("tanh"),
    }[kind]
    line = nn.Linear(1, 1).double()
    with torch.no_grad():
        line.weight.fill_(1.0)
        line.bias.fill_(0.0)
    return nn.Sequential(line, made).double()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("kind", EXACT)
@pytest.mark.parametrize("form", ["called", "traced"])
def test_every_activation_against_mpmath(kind, dtype, form):
    """The bound at each point, for u of every size, called and as products; a hundredth of it is exceeded somewhere."""
    net = pa.attention_from_mlp(
        activation(kind), pa.Box([-40], [40]), 1e-4 if dtype == torch.float64 else 1e-3, dtype=dtype
    )
    rng = np.random.default_rng(0)
    u = np.concatenate(
        [rng.uniform(-40, 40, 150), rng.normal(size=150), 1e-3 * rng.normal(size=100), [0.0, 9.0, -9.0, 9.005, 40.0]]
    )
    u = u.astype(np.float32).astype(np.float64)
    x = torch.from_numpy(u).to(dtype)[:, None]
    with torch.no_grad():
        out = (net(x) if form == "called" else make_fx(net)(x)(x))[:, 0].double().numpy()
    allowed = net.error_bound_at(u[:, None])
    with mpmath.workdps(30):
        exact = [EXACT[kind](mpmath.mpf(x)) for x in u]
        errors = np.array([float(abs(mpmath.mpf(o) - f)) for o, f in zip(out, exact)])
    assert (errors <= allowed).all() and (allowed <= net.error_bound * (1 + 1e-9)).all()
    assert (errors > 0.01 * allowed).any()  # negative control: the bound is not empty talk


@pytest.mark.parametrize("kind", EXACT)
def test_activations_are_enclosed_on_intervals_with_their_slopes(kind):
    """Ranges and slopes that errors are carried with, and the exact functions that the heads are claimed to be."""
    graph = activation_graph(Activation(kind, PARAMETERS.get(kind, ())))
    rng = np.random.default_rng(1)
    lo = np.concatenate([rng.uniform(-6, 5, 60), rng.uniform(-40, 30, 20)])
    hi = lo + rng.exponential(1.0, 80)
    ranges, slopes = enclose_each(graph, lo[:, None], hi[:, None])
    for i in range(80):
        x = np.sort(rng.uniform(lo[i], hi[i], 30))
        with mpmath.workdps(30):
            exact = [EXACT[kind](mpmath.mpf(v)) for v in x]
        f = np.array([float(v) for v in exact])
        assert np.allclose(graph.evaluate(x[:, None]), f, rtol=1e-14, atol=1e-14)
        assert all(ranges.lo[i] - mpmath.mpf(1e-15) <= v <= ranges.hi[i] + mpmath.mpf(1e-15) for v in exact)
        assert (np.abs(np.diff(f)) <= slopes.magnitude[i, 0] * np.diff(x) + 1e-14).all()
        wide = ranges.hi[i] - ranges.lo[i]
        assert wide <= 1.2 * np.ptp(f) + 0.2 * (hi[i] - lo[i])  # not empty talk either


def test_heads_are_asked_in_their_range_only():
    """Every head is proved on an interval that holds all it reads, errors included; a smaller one is refused."""
    net = pa.attention_from_mlp(mlp(nn.GELU()), BOX, 1e-3)
    (part,) = net.parts_claimed
    x = torch.from_numpy(BOX.sample(500, np.random.default_rng(0)))
    with torch.no_grad():
        channels = net.channels(x)
    for group in (group for layer in net.wiring.layers for group in layer):
        reads = channels[:, group.reads.start :][:, : group.reads.weight.shape[1]].numpy() @ group.reads.weight.T
        reads = reads + group.reads.bias
        assert part.box.lo[0] < reads.min() and reads.max() < part.box.hi[0]
    c = pa.compile(part.graph.infix(), pa.Box([-0.5], [0.5]), tolerance=1e-3)
    small = Part(c.target.graph, c.target.box, c.certificate)
    with pytest.raises(UnsupportedError, match=r"the claim is about other tensors|which its box does not hold"):
        NetworkProof().prove(net, net.target, Given(earlier=(small,)))


@pytest.mark.parametrize("reach", [60.0, 5000.0])
@pytest.mark.parametrize("kind", ["gelu", "gelu_tanh", "silu", "tanh", "relu"])
def test_wide_ranges_cost_nothing(kind, reach):
    """Pre-activations in ±60 and ±5000: as few keys, and the bound holds near the bend and at the ends."""
    model = activation(kind)
    net = pa.attention_from_mlp(model, pa.Box([-reach], [reach]), 1e-5)
    narrow = pa.attention_from_mlp(model, pa.Box([-20], [20]), 1e-5)
    assert net.keys <= narrow.keys + 1 and net.num_parameters <= narrow.num_parameters + 3
    u = np.concatenate([np.linspace(-12, 12, 1501), np.linspace(-reach, reach, 501)])
    with torch.no_grad():
        out = net(torch.from_numpy(u[:, None]))[:, 0].numpy()
    with mpmath.workdps(30):
        errors = [float(abs(mpmath.mpf(o) - EXACT[kind](mpmath.mpf(v)))) for o, v in zip(out, u)]
    assert max(errors) <= net.error_bound <= 1e-5


def test_errors_that_do_not_reach_the_output_may_exceed_a_table():
    """A neuron that nobody reads may be off by more than its table reaches; that has to be a wide one then."""
    model = nn.Sequential(nn.Linear(1, 1), nn.ReLU(), nn.Linear(1, 2), nn.GELU(), nn.Linear(2, 1)).double()
    numbers = ([[0.001]], [0.0], [[5000.0], [1.0]], [0.0, 0.0], [[0.0, 1.0]], [0.0])
    with torch.no_grad():
        for parameter, value in zip(model.parameters(), numbers):
            parameter.copy_(torch.tensor(value))
    net = pa.attention_from_mlp(model, pa.Box([-1], [1]), 1e-3)
    x = torch.linspace(-1, 1, 2001, dtype=torch.float64)[:, None]
    with torch.no_grad():
        assert (net(x) - model(x)).abs().max() <= net.error_bound <= 1e-3
    gelu = net.parts_claimed[1]
    lifted = (
        5000 * net.parts_claimed[0].certificate.error_bound
    )  # what the ReLU's error makes of the first neuron's input
    assert lifted > 1e-3 and gelu.box.hi[0] > 5 + lifted and gelu.box.lo[0] < -lifted


def table_of(text: str, low: float, high: float, tolerance: float) -> Table:
    return tabulate(parse(text, ["x"]), pa.Box([low], [high]), tolerance)


def test_tables_are_small_and_proved():
    table = table_of("x*sigmoid(3*x)", -5.0, 5.0, 1e-6)
    x = np.linspace(-5, 5, 5001)
    scores = x[:, None] * table.slopes[:, 0] + table.offsets
    weights = np.exp(scores - scores.max(axis=1, keepdims=True))
    error = np.abs(weights @ table.values / weights.sum(axis=1) - x / (1 + np.exp(-3 * x))).max()
    assert error <= table.error <= 1e-6 and len(table.values) <= 40
    kinked = table_of("abs(x)", -1.0, 1.0, 0.01)
    assert kinked.error <= 0.01 and len(kinked.values) > 2 * len(table_of("x*x", -1.0, 1.0, 0.01).values)


def test_the_bound_at_a_point_covers_the_model_as_torch_runs_it():
    model = mlp(nn.ReLU()).float()
    net = pa.attention_from_mlp(model, BOX, 1e-6)
    x = torch.from_numpy(BOX.sample(500, np.random.default_rng(0)).astype(np.float32))
    with torch.no_grad():
        error = (net(x.double()) - model(x).double()).abs().max(dim=1).values.numpy()
    allowed = net.error_bound_at(x) + net.reference_error_at(x, torch.float32)
    assert (error <= allowed).all()
    assert (error > net.error_bound_at(x)).any()  # negative control: float32 does round more than the network errs


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)

    def forward(self, x):
        return x + self.linear(x)


class Deciding(nn.Module):
    def forward(self, x):
        return x if x.sum() > 0 else -x


def hooked() -> nn.Module:
    """A hook that triples a layer's output is no part of any graph: what was proved of the rest would be false."""
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 1))
    model[0].register_forward_hook(lambda module, given, output: 3 * output)
    return model


@pytest.mark.parametrize(
    ("model", "match"),
    [
        (nn.Sequential(nn.Linear(2, 2), nn.Softplus()), r"Softplus \(layer '1'\)"),
        (nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.BatchNorm1d(2))), "BatchNorm1d"),
        (nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.5), nn.ReLU()), "eval"),
        (nn.Sequential(nn.Linear(2, 2), nn.Flatten(0)), "Flatten"),
        (nn.Sequential(nn.ReLU()), "no Linear"),
        (hooked(), r"Linear \(layer '0'\) has forward hooks"),
        (Branching(), "branches"),
        (Deciding(), "cannot be read"),
        (lambda x: x, "nn.Module"),
    ],
)
def test_unsupported_networks_are_named(model, match):
    with pytest.raises(UnsupportedError, match=match):
        pa.attention_from_mlp(model, BOX, 1e-3)


def test_bad_calls():
    model = mlp(nn.ReLU())
    with pytest.raises(ShapeError, match="has 2 inputs"):
        pa.attention_from_mlp(model, pa.Box([0], [1]), 1e-3)
    with pytest.raises(ShapeError, match="has 4 inputs, but the number of outputs before it is 3"):
        pa.attention_from_mlp(nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(4, 1)), BOX, 1e-3)
    with pytest.raises(DomainError, match="expected lo < hi"):
        pa.attention_from_mlp(model, ([-1, -1], [1, 1]), 1e-3)
    broken = mlp(nn.ReLU())
    with torch.no_grad():
        broken[0].weight[0, 0] = torch.nan
    with pytest.raises(NonFiniteValueError, match="Linear"):
        pa.attention_from_mlp(broken, BOX, 1e-3)
    with pytest.raises(OutsideDomainError):
        pa.attention_from_mlp(model, BOX, 1e-3)(torch.full((1, 2), torch.nan))
    with pytest.raises(ToleranceError, match="> 0"):
        pa.attention_from_mlp(model, BOX, 0.0)
    with pytest.raises(ToleranceError, match="is rounding"):
        pa.attention_from_mlp(model, BOX, 1e-8, dtype=torch.float32)
    with pytest.raises(UnsupportedError, match="float16"):
        pa.attention_from_mlp(model, BOX, 1e-3, dtype=torch.float16)
    with pytest.raises(ToleranceError, match="GELU"):
        pa.attention_from_mlp(mlp(nn.GELU()), BOX, 1e-13)
    net = pa.attention_from_mlp(model, BOX, 1e-3)
    with pytest.raises(OutsideDomainError, match="outside the domain"):
        net(torch.tensor([[0.0, 1.5]], dtype=torch.float64))
    with pytest.raises(ShapeError):
        net(torch.zeros(3, dtype=torch.float64))


SAVED = {
    "relu": (mlp(nn.ReLU()), 1e-3, {}),
    "wide gelu": (mlp(nn.GELU(), scale=20.0), 1e-3, {}),
    "clamp and leaky": (Functional().double(), 1e-2, {}),
    "tanh float32": (mlp(nn.Tanh()), 1e-3, {"dtype": torch.float32}),
    "linear maps": (nn.Sequential(nn.Linear(2, 5), nn.Linear(5, 3), nn.Linear(3, 2)).double(), 1e-9, {}),
}


@pytest.mark.parametrize("name", SAVED)
def test_saved_conversions_are_verified(name, tmp_path: Path):
    """Every head over the range that it is used on, and the errors that are carried, by an independent program."""
    model, tolerance, options = SAVED[name]
    net = pa.attention_from_mlp(model, BOX, tolerance, **options)
    c = pa.Compiled.of_network(net)
    folder = c.save(tmp_path / "network")
    again = pa.load(folder)
    x = torch.from_numpy(BOX.sample(64, np.random.default_rng(0)))
    assert torch.equal(again.head(x.to(net.dtype)), net(x)) and again.error_bound == net.error_bound
    assert again.num_keys == net.keys and [check for check in pa.recheck(again) if not check.holds] == []
    with torch.no_grad():
        assert (
            np.abs(again.target(x.numpy()) - model(x).numpy()).max() <= 1e-12
        )  # the claim is about the network itself
    report, code = run(folder, budget=60.0)
    assert code == 0, report
    forge(folder, error_bound=(0.4 * net.error_bound).hex())  # control: a bound that nobody has proved
    assert run(folder, budget=2.0)[1] != 0


def test_a_planted_error_in_one_head_is_caught(tmp_path: Path):
    """The claim of one head says less than it errs, every hash and seal repaired: neither recheck nor the checker takes it."""
    net = pa.attention_from_mlp(mlp(nn.GELU()), BOX, 1e-3)
    folder = pa.Compiled.of_network(net).save(tmp_path / "network")
    certificate = json.loads((folder / "certificate.json").read_text())
    part = certificate["proof"]["parts"][0]["certificate"]
    claimed = float.fromhex(part["error_bound"])
    part["error_bound"] = (claimed / 2).hex()
    for term in part["terms"]:
        term["value"] = (float.fromhex(term["value"]) / 2).hex()
    halved = (net.error_bound / 2).hex()
    for term in certificate["terms"]:
        term["value"] = (float.fromhex(term["value"]) / 2).hex()
    forge(folder, proof=certificate["proof"], terms=certificate["terms"], error_bound=halved)
    assert run(folder, budget=2.0)[1] != 0
    assert not all(check.holds for check in pa.recheck(pa.load(folder)))


def test_linear_maps_in_a_row():
    """They become one, exactly, where that stores fewer numbers; a bottleneck stays, with a head of one key between its maps."""
    torch.manual_seed(1)
    wide = nn.Sequential(nn.Linear(3, 8), nn.Linear(8, 2), nn.ReLU(), nn.Linear(2, 4), nn.Linear(4, 2)).double()
    net = pa.attention_from_mlp(wide, pa.Box([-1] * 3, [1] * 3), 1e-6)
    assert net.num_layers == 1 and net.num_parameters < 6 + 2 + 4 + 2 + 10
    narrow = nn.Sequential(nn.Linear(9, 1), nn.Linear(1, 9)).double()
    thin = pa.attention_from_mlp(narrow, pa.Box([-1] * 9, [1] * 9), 1e-9)
    assert thin.num_layers == 1 and thin.parts[0].num_keys == 1 and thin.num_parameters < 9 + 1 + 9 + 9 + 6
    for model, made in ((wide, net), (narrow, thin)):
        x = torch.rand(200, made.domain.dimension, dtype=torch.float64) * 2 - 1
        with torch.no_grad():
            error = (made(x) - model(x)).abs().max().item()
        assert error <= made.error_bound and error <= made.error_bound_at(x).max()


def test_the_bound_covers_dot_products():
    """In float32 and far from 0 a traced network rounds more than a called one; both are within the bound."""
    model = mlp(nn.GELU(), scale=3.0)
    net = pa.attention_from_mlp(model, BOX, 0.05, dtype=torch.float32)
    x = torch.from_numpy(BOX.sample(400, np.random.default_rng(0)).astype(np.float32))
    with torch.no_grad():
        called, traced, exact = net(x), make_fx(net)(x)(x), model(x.double())
    at = net.error_bound_at(x)
    for out in (called, traced):
        assert ((out.double() - exact).abs().max(dim=1).values.numpy() <= at).all()
    assert not torch.equal(called, traced)
