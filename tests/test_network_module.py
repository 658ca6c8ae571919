"""Networks of heads as modules: what they compute, store, record, trace to and refuse."""

import copy
import json
from dataclasses import replace
from fractions import Fraction

import numpy as np
import onnxruntime as ort
import pytest
import torch
from resealing import forge, reseal

import partita as pa
from partita.compiler.compiled import Compiled
from partita.errors import DomainError, FormatError, ShapeError, SizeError, TamperedFileError, UnsupportedError
from partita.functions import parse
from partita.functions.target import Target, graph_target
from partita.geometry import Box, ProductGrid
from partita.heads import (
    Affine,
    AttentionNetwork,
    GridHead,
    Group,
    ScatteredHead,
    TrainHead,
    Wiring,
    exact_values,
    head_from_record,
    network,
)
from partita.plots import plot_head, plot_surface, plot_temperatures
from partita.proofs import PROOFS
from partita.proofs.claim import claim, function_of
from partita.proofs.network_proof import NetworkProof, Part
from partita.proofs.proof import Given
from partita.storage import export_onnx
from partita.studio.wire import head_values

CUBE = Box(-np.ones(3), np.ones(3))
DTYPES = [torch.float64, torch.float32]


def make_head(kind: str, k: int, dtype: torch.dtype, seed: int = 0):
    """A head with k inputs and random values: "grid", "scattered", or with " affine" values."""
    generator = torch.Generator().manual_seed(seed)
    shapes = {"input_shapes": ((k,),), "output_shape": ()}

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    cells = 5**k
    slopes = random(cells, 1, k) if kind.endswith("affine") else None
    if kind.startswith("grid"):
        grid = ProductGrid.uniform(Box(-2 * np.ones(k), 2 * np.ones(k)), 5, dtype=np.float32)
        return GridHead(grid, 3.0, random(cells, 1), value_slopes=slopes, half_windows=3, **shapes)
    return ScatteredHead(random(cells, k), 3.0, random(cells, 1), powers=random(cells), value_slopes=slopes, **shapes)


def make(dtype: torch.dtype = torch.float64, kinds: tuple[str, str] = ("grid", "scattered affine")) -> AttentionNetwork:
    """Two layers, every kind of coefficient: chosen channels, ones, stored numbers, biases, fractions, and all stored."""
    heads = [make_head(kinds[0], 1, dtype, 1), make_head(kinds[1], 2, dtype, 2)]
    rng = np.random.default_rng(5)
    chosen = Affine(np.eye(3)[[0, 2, 2]], np.zeros(3))
    mixed = Affine(np.array([[0.5, 1.0, 0.0], [1 / 3, 0.0, 1.0]]), np.array([0.0, 0.1]), 0, {(1, 0): Fraction(1, 3)})
    late = Affine(np.array([[1.0, -0.25, 0.0, 0.75], [0.0, 1.0, 1.0, 1.0]]), np.zeros(2), 2)
    dense = Affine(rng.standard_normal((2, 8)) / 4, np.array([0.5, 1 / 7]), 0, {(1, -1): Fraction(1, 7)})
    layers = ((Group(0, chosen), Group(1, mixed)), (Group(1, late),))
    return AttentionNetwork(heads, Wiring(3, layers, dense), input_shapes=((3,),), output_shape=(2,))


def points(dtype: torch.dtype = torch.float64, count: int = 40) -> torch.Tensor:
    return torch.from_numpy(CUBE.sample(count, np.random.default_rng(7))).to(dtype)


def by_hand(head, u: np.ndarray) -> np.ndarray:
    """`Σ_j softmax_j(−Σ_i R_i (u_i − c_{j,i})²/2 + R p_j/2) V_j(u)` in float64, from the stored tensors."""
    held = {name: t.double().numpy() for name, t in head.state_dict().items()}
    if isinstance(head, GridHead):
        axes = [held[f"centers_{i}"] for i in range(head.dimension)]
        centers = np.stack([a.ravel() for a in np.meshgrid(*axes, indexing="ij")], axis=1)
        about = np.broadcast_to(held.get("origin", np.zeros(head.dimension)), centers.shape)
    else:
        centers, about = held["centers"], held["centers"]
    rates = np.broadcast_to(held["inverse_temperature"], head.dimension)
    away = u[:, None] - centers
    scores = -0.5 * (rates * away * away).sum(axis=2) + 0.5 * rates[0] * held.get("powers", np.zeros(len(centers)))
    weights = np.exp(scores - scores.max(axis=1, keepdims=True))
    values = np.broadcast_to(held["values"][:, 0], weights.shape)
    if "value_slopes" in held:
        values = values + np.einsum("jm,njm->nj", held["value_slopes"][:, 0], u[:, None] - about)
    return (weights * values).sum(axis=1) / weights.sum(axis=1)


def channels_by_hand(net: AttentionNetwork, z: np.ndarray) -> np.ndarray:
    """Channel by channel, use by use, from the record's own tensors."""
    for layer in net.wiring.layers:
        found = [z]
        for group in layer:
            head, reads = net.heads[group.head], group.reads
            width = reads.weight.shape[1]
            for row in range(0, reads.rows, head.dimension):
                part = slice(row, row + head.dimension)
                u = z[:, reads.start : reads.start + width] @ reads.weight[part].T + reads.bias[part]
                found.append(by_hand(head, u)[:, None])
        z = np.concatenate(found, axis=1)
    return z


@pytest.mark.parametrize("kinds", [("grid", "scattered affine"), ("scattered", "grid affine"), ("grid affine", "grid")])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_it_computes_what_its_wiring_says(dtype, kinds):
    net, z = make(dtype, kinds), points(dtype)
    wanted = channels_by_hand(net, z.double().numpy())
    slack = 1e-12 if dtype == torch.float64 else 2e-4
    assert np.abs(net.channels(z).double().numpy() - wanted).max() < slack
    output = net.wiring.output
    outputs = wanted @ output.weight.T + output.bias
    for evaluate in (net, net.evaluate, net.evaluate_dense):
        assert np.abs(evaluate(z).double().numpy() - outputs).max() < slack
    other = make(dtype, kinds)
    next(iter(other.parts[0].buffers())).mul_(1.01)  # negative control: another center
    assert np.abs(other.channels(z).double().numpy() - wanted).max() > slack


def test_one_head_and_an_identity_are_that_head():
    head = make_head("grid affine", 2, torch.float64)
    output = Affine(np.array([[0.0, 0.0, 1.0]]), np.zeros(1))
    wiring = Wiring(2, ((Group(0, Affine(np.eye(2), np.zeros(2))),),), output)
    net = AttentionNetwork([head], wiring, input_shapes=((2,),), output_shape=())
    z = points()[:, :2]
    assert torch.equal(net(z), head(z)) and net.num_parameters == head.num_parameters and net.num_keys == head.num_keys


def test_shapes_of_batches_arguments_and_outputs():
    net = make()
    assert net(torch.zeros(3, dtype=torch.float64)).shape == (2,)
    assert net(torch.zeros(4, 5, 3)).shape == (4, 5, 2) and net(torch.zeros(0, 3)).shape == (0, 2)
    tokens = AttentionNetwork(net.parts, net.wiring, input_shapes=((1,), (2,)), output_shape=(1, 2))
    z = points()
    assert torch.equal(tokens(z[:, :1], z[:, 1:]).reshape(-1, 2), net(z))
    with pytest.raises(ShapeError):
        net(torch.zeros(5, 4))


def test_no_head_at_all_is_an_affine_function():
    wiring = Wiring(2, (), Affine(np.array([[2.0, 1.0]]), np.array([0.5])))
    net = AttentionNetwork([], wiring, input_shapes=((2,),), output_shape=(), dtype=torch.float32)
    assert net(torch.tensor([1.0, 3.0])) == 5.5 and net.num_keys == 0 and net.num_parameters == 2
    assert net.dtype == torch.float32 and net.largest_value(-np.ones(2), np.ones(2)) == 0.0
    again = head_from_record(json.loads(json.dumps(net.record())), net.state_dict(), Box([-1, -1], [1, 1]))
    assert again.record() == net.record() and again.dtype == torch.float32 and again.as_attention() == ()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_stored_numbers_are_those_of_the_state_dict(dtype):
    net = make(dtype)
    stored = sum(t.numel() for t in net.state_dict().values())
    wiring = net.wiring
    maps = [*(group.reads for layer in wiring.layers for group in layer), wiring.output]
    assert (
        net.num_parameters
        == stored
        == sum(h.num_parameters for h in net.parts) + sum(map_.num_parameters for map_ in maps)
    )
    sizes = {n: tuple(t.shape) for n, t in net.state_dict().items() if not n.startswith("heads.")}
    assert sizes == {
        "layers.0.1.weight": (2,),
        "layers.0.1.bias": (1,),
        "layers.1.0.weight": (2,),
        "output.weight": (16,),
        "output.bias": (2,),
    }
    assert net.num_keys == 3 * 5 + 25 + 25 and net.num_uses == 5 and net.num_layers == 2


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_it_comes_back_from_its_record_bit_for_bit(dtype):
    net = make(dtype)
    record = json.loads(json.dumps(net.record()))
    again = head_from_record(record, net.state_dict(), CUBE)
    assert type(again) is AttentionNetwork and json.dumps(again.record()) == json.dumps(net.record())
    assert list(again.state_dict()) == list(net.state_dict())
    assert all(torch.equal(t, net.state_dict()[name]) for name, t in again.state_dict().items())
    assert torch.equal(again(points(dtype)), net(points(dtype)))
    assert record["layers"][0][1]["reads"]["exact"] == [[1, 0, "1/3"]] or dtype == torch.float32
    assert record["output"]["dense"] is True and record["output"]["rows"] == 2
    assert again.partition(CUBE) is None


def test_float32_coefficients_remember_what_they_were_rounded_from():
    wide, narrow = make(torch.float64).wiring, make(torch.float32).wiring
    for one, other in zip((*wide.layers[0], *wide.layers[1]), (*narrow.layers[0], *narrow.layers[1])):
        weight, bias = other.reads.weight, other.reads.bias
        assert np.array_equal(weight.astype(np.float32), weight) and np.array_equal(bias.astype(np.float32), bias)
        for place in np.ndindex(weight.shape):
            stored = Fraction(float(one.reads.weight[place]))
            meant = one.reads.exact.get(place, stored)
            assert other.reads.exact.get(place, Fraction(float(weight[place]))) == meant
    assert narrow.layers[0][1].reads.exact[1, 0] == Fraction(1, 3)


def test_a_stored_one_stays_stored():
    """Structure comes from the record, not from the numbers: training may pass through 1."""
    net = make()
    changed = net.state_dict() | {"layers.1.0.weight": torch.tensor([1.0, 0.0], dtype=torch.float64)}
    again = head_from_record(net.record(), changed, CUBE)
    assert again.record()["layers"] == net.record()["layers"] and again.num_parameters == net.num_parameters
    assert torch.equal(again.wiring.layers[1][0].reads.weight is not None and again.state_dict()["layers.1.0.weight"],
                       changed["layers.1.0.weight"])  # fmt: skip


def test_the_wiring_follows_the_stored_numbers():
    net = make()
    assert net.wiring.output.exact == {(1, -1): Fraction(1, 7)}
    with torch.no_grad():
        net.output.bias[1] += 1e-9
    assert net.wiring.output.exact == {} and net.wiring.output.bias[1] == 1 / 7 + 1e-9


def test_gradients_are_those_of_finite_differences():
    net, z = make().unfreeze(), points(count=6).requires_grad_()
    loss = (net(z) * torch.tensor([1.0, -2.0], dtype=torch.float64)).sum()
    loss.backward()

    def value(moved: torch.Tensor) -> float:
        return float((net(moved) * torch.tensor([1.0, -2.0], dtype=torch.float64)).sum())

    with torch.no_grad():
        for place in [(0, 0), (3, 1), (5, 2)]:
            step = torch.zeros_like(z)
            step[place] = 1e-6
            assert abs((value(z + step) - value(z - step)) / 2e-6 - float(z.grad[place])) < 1e-6
        for name in ("layers.0.1.weight", "layers.0.1.bias", "output.weight", "heads.1.values", "heads.0.values"):
            held = net.get_parameter(name)
            flat, grad = held.view(-1), held.grad.view(-1)
            flat[0] += 1e-6
            high = value(z)
            flat[0] -= 2e-6
            low = value(z)
            flat[0] += 1e-6
            assert abs((high - low) / 2e-6 - float(grad[0])) < 1e-6, name
    assert set(dict(net.named_parameters())) < set(net.state_dict())
    assert not list(net.freeze().parameters()) and net.num_parameters == make().num_parameters


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kinds", [("grid", "scattered affine"), ("scattered", "grid affine")])
def test_it_traces_whole(dtype, kinds):
    net, z = make(dtype, kinds), points(dtype)
    slack = 1e-13 if dtype == torch.float64 else 2e-5
    compiled = torch.compile(net, fullgraph=True, backend="aot_eager")
    assert (compiled(z) - net(z)).abs().max() < slack
    batch = torch.export.Dim("batch", max=1 << 40)
    program = torch.export.export(net, (z,), dynamic_shapes=(({0: batch},),))
    more = points(dtype, 7)
    assert (program.module()(more) - net(more)).abs().max() < slack


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_onnxruntime_reproduces_it(dtype, tmp_path):
    net, z = make(dtype), points(dtype)
    path = export_onnx(net, tmp_path / "net.onnx")
    session = ort.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    found = session.run(None, {"z": z.numpy()})[0]
    assert np.abs(found - net(z).numpy()).max() < (1e-12 if dtype == torch.float64 else 1e-4)
    assert session.run(None, {"z": z[:1].numpy()})[0].shape == (1, 2)


@pytest.mark.parametrize(
    "kinds", [("grid", "grid"), ("scattered", "scattered"), ("grid", "scattered affine"), ("grid affine", "grid")]
)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_layers_of_multi_head_attention_reproduce_the_channels(dtype, kinds):
    net, z = make(dtype, kinds), points(dtype)
    found = z
    layers = net.as_attention()
    for layer in layers:
        assert type(layer.attention) is torch.nn.MultiheadAttention and layer.attention.in_proj_weight is not None
        found = layer(found)
    slack = 1e-12 if dtype == torch.float64 else 3e-4
    assert found.shape == (40, 8) and (found - net.channels(z)).abs().max() < slack
    assert (net.output(found) - net.evaluate(z)).abs().max() < slack
    assert [layer.attention.num_heads for layer in layers] == [4, 1]
    assert all((layer.value_slopes is None) == (not any("affine" in kinds[i] for i in used))
               for layer, used in zip(layers, [(0, 1), (1,)]))  # fmt: skip
    with torch.no_grad():
        layers[0].keys[0, 1] += 1.0  # negative control: the offset of one copy of a key
    assert (layers[0](z) - net.channels(z)[:, :7]).abs().max() > slack


def test_layers_that_would_be_huge_are_refused():
    head = make_head("grid affine", 1, torch.float64)
    reads = Affine(np.eye(2000), np.zeros(2000))
    total = Affine(np.ones((1, 4000)), np.zeros(1))
    net = AttentionNetwork([head], Wiring(2000, ((Group(0, reads),),), total), input_shapes=((2000,),), output_shape=())
    with pytest.raises(SizeError, match="as_attention"):
        net.as_attention()


def test_the_device_and_dtype_move_as_one():
    net, z = make(), points()
    single = copy.deepcopy(net).float()
    assert single.semantics == "float32" and single(z.float()).dtype == torch.float32 and net.semantics == "float64"
    single.heads[0].double()
    assert single.semantics not in ("float32", "float64")
    assert net.device == torch.device("cpu") and net.to("meta").device.type == "meta"


# what is refused when it is built


def wiring_with(**changes) -> Wiring:
    plain = make().wiring
    return Wiring(changes.get("inputs", 3), changes.get("layers", plain.layers), changes.get("output", plain.output))


@pytest.mark.parametrize(
    ("changes", "error", "said"),
    [
        ({"inputs": 4}, ShapeError, "inputs"),
        ({"layers": (*make().wiring.layers, ())}, ShapeError, "no heads"),
        ({"layers": make().wiring.layers[:1]}, ShapeError, "channels 0 to 7"),
        ({"layers": ((Group(7, Affine(np.eye(3), np.zeros(3))),),)}, ShapeError, "head 7"),
        ({"layers": ((Group(1, Affine(np.eye(3), np.zeros(3))),),)}, ShapeError, "multiple of 2"),
        ({"layers": ((Group(0, Affine(np.eye(3), np.zeros(3), 1)),),)}, ShapeError, "there are 3"),
        ({"layers": ((Group(0, Affine(np.eye(3), np.zeros(3))),),), "output": Affine(np.ones((2, 6)), np.zeros(2))},
         ShapeError, "never used"),
        ({"output": Affine(np.ones((3, 8)), np.zeros(3))}, ShapeError, "3 rows"),
        ({"output": Affine(np.ones((2, 8)), np.zeros(3))}, ShapeError, "biases"),
        ({"output": Affine(np.full((2, 8), np.nan), np.zeros(2))}, DomainError, "finite"),
        ({"output": Affine(np.ones((2, 8)), np.zeros(2), 0, {(0, 0): Fraction(1, 3)})}, DomainError, "exact"),
        ({"output": Affine(np.ones((2, 8)), np.zeros(2), 0, {(0, 8): Fraction(1)})}, DomainError, "exact"),
        ({"output": Affine(np.ones((2, 8)), np.zeros(2), 0, {(0, 0): Fraction(10) ** 400})}, DomainError, "exact"),
        ({"output": Affine(np.ones((2, 8)), np.zeros(2), 0, {(0, -1): Fraction(1, 10**400)})}, DomainError, "not 0"),
    ],
)  # fmt: skip
def test_wirings_that_do_not_fit_are_refused(changes, error, said):
    with pytest.raises(error, match=said):
        AttentionNetwork(make().parts, wiring_with(**changes), input_shapes=((3,),), output_shape=(2,))


def test_a_coefficient_that_underflows_is_refused():
    tiny = Affine(np.array([[1e-60, 1.0]]), np.zeros(1))
    with pytest.raises(DomainError, match="underflows float32"):
        AttentionNetwork([], Wiring(2, (), tiny), input_shapes=((2,),), output_shape=(), dtype=torch.float32)
    AttentionNetwork([], Wiring(2, (), tiny), input_shapes=((2,),), output_shape=())


def test_heads_that_do_not_fit_are_refused():
    net = make()
    shapes = {"input_shapes": ((3,),), "output_shape": (2,)}
    cores = [torch.ones(1, 5, 1, dtype=torch.float64)]
    train = TrainHead(ProductGrid.uniform(Box([-2], [2]), 5), 3.0, cores, input_shapes=((1,),), output_shape=())
    single, vector = make_head("grid", 1, torch.float32), copy.deepcopy(net.parts[0])
    vector.output_shape = (1,)
    for other in (train, single, vector, net):
        with pytest.raises(UnsupportedError, match="head 0"):
            AttentionNetwork([other, net.parts[1]], net.wiring, **shapes, dtype=torch.float64)
    with pytest.raises(UnsupportedError, match="dtype"):
        AttentionNetwork(net.parts, net.wiring, **shapes, dtype=torch.bfloat16)
    wide = Affine(np.ones((1, 1 << 13)), np.zeros(1))
    many = Wiring(1 << 13, tuple((Group(0, wide),) for _ in range(1 << 13)), wide)
    with pytest.raises(SizeError, match="coefficients"):
        AttentionNetwork(net.parts[:1], many, input_shapes=((1 << 13,),), output_shape=())


# hostile records


def changed(*path, to):
    """A record with one entry replaced; `to` may be a function of the old one."""

    def change(record):
        place = record
        for key in path[:-1]:
            place = place[key]
        place[path[-1]] = to(place[path[-1]]) if callable(to) else to

    return change


READS = ("layers", 0, 1, "reads")
HOSTILE = {
    "no heads": changed("heads", to=None),
    "heads that are a text": changed("heads", to="heads"),
    "a head too few": changed("heads", to=lambda h: h[:1]),
    "a head twice": changed("heads", to=lambda h: [*h, h[0]]),
    "a network in a network": changed("heads", 0, "type", to="network"),
    "a train in a network": changed("heads", 0, "type", to="train"),
    "a head that is a list": changed("heads", 0, to=[]),
    "a head with many inputs": changed("heads", 0, "input_shapes", to=[[10**9]]),
    "a head with two arguments": changed("heads", 0, "input_shapes", to=[[1], [1]]),
    "a head with a vector": changed("heads", 0, "output_shape", to=[1]),
    "a head of another dtype": changed("heads", 0, "dtype", to="float32"),
    "a head with text as shape": changed("heads", 0, "input_shapes", to="ab"),
    "layers that are an object": changed("layers", to={}),
    "a layer that is a number": changed("layers", 0, to=3),
    "a layer without heads": changed("layers", to=lambda layers: [*layers, []]),
    "a group without reads": changed("layers", 0, 0, to={"head": 0}),
    "a group with more": changed("layers", 0, 0, to=lambda g: {**g, "code": "print()"}),
    "a head that is not there": changed("layers", 0, 0, "head", to=2),
    "a negative head": changed("layers", 0, 0, "head", to=-1),
    "a Boolean head": changed("layers", 0, 0, "head", to=True),
    "a head as text": changed("layers", 0, 0, "head", to="0"),
    "channels of its own layer": changed(*READS, "width", to=4),
    "channels from before the first": changed(*READS, "start", to=-1),
    "a start beyond the last": changed(*READS, "start", to=10**30),
    "a fractional width": changed(*READS, "width", to=3.0),
    "a width of 0": changed(*READS, "width", to=0),
    "an integer of many digits": changed(*READS, "width", to=10**5000),
    "an output of later channels": changed("output", "width", to=9),
    "rows that are a number": changed(*READS, "rows", to=2),
    "a huge number of rows": changed("output", "rows", to=10**12),
    "a negative number of rows": changed("output", "rows", to=-2),
    "another number of rows": changed("output", "rows", to=3),
    "dense that is 1": changed("output", "dense", to=1),
    "dense that is false": changed("output", "dense", to=False),
    "a row too few": changed(*READS, "rows", to=lambda r: r[:1]),
    "a row too many": changed(*READS, "rows", to=lambda r: [*r, [[], [], False]]),
    "a row without bias": changed(*READS, "rows", 0, to=[[1], [0]]),
    "a bias that is a number": changed(*READS, "rows", 0, 2, to=0),
    "a bias more": changed(*READS, "rows", 0, 2, to=True),
    "a column beyond": changed(*READS, "rows", 0, 1, to=[3]),
    "a negative column": changed(*READS, "rows", 0, 1, to=[-1]),
    "a column twice": changed(*READS, "rows", 0, 1, to=[0, 0]),
    "columns out of order": changed(*READS, "rows", 0, 0, to=[2, 1]),
    "a one that is stored": changed(*READS, "rows", 0, 0, to=[0, 1]),
    "a column that is true": changed(*READS, "rows", 0, 1, to=[False]),
    "a stored weight more": changed(*READS, "rows", 0, 1, to=[0, 2]),
    "a stored weight less": changed(*READS, "rows", 0, 1, to=[]),
    "an unknown entry": changed(*READS, "exec", to=lambda _: 1),
    "exact that is an object": changed(*READS, "exact", to={}),
    "an exact number": changed(*READS, "exact", to=[[1, 0, 1 / 3]]),
    "a division by zero": changed(*READS, "exact", to=[[1, 0, "1/0"]]),
    "not in lowest terms": changed(*READS, "exact", to=[[1, 0, "2/6"]]),
    "a negative denominator": changed(*READS, "exact", to=[[1, 0, "-1/-3"]]),
    "another fraction": changed(*READS, "exact", to=[[1, 0, "1/4"]]),
    "nearly the fraction": changed(*READS, "exact", to=[[1, 0, "333333333333333/1000000000000000"]]),
    "a million digits": changed(*READS, "exact", to=[[1, 0, "1/3" + "3" * 10**6]]),
    "thousands of digits": changed(*READS, "exact", to=[[1, 0, f"{10**3999}/3"]]),
    "other digits": changed(*READS, "exact", to=[[1, 0, "١/٣"]]),
    "a fraction with spaces": changed(*READS, "exact", to=[[1, 0, "1/ 3"]]),
    "a fraction with a newline": changed(*READS, "exact", to=[[1, 0, "1/3\n"]]),
    "an expression": changed(*READS, "exact", to=[[1, 0, "__import__('os')"]]),
    "a coefficient twice": changed(*READS, "exact", to=[[1, 0, "1/3"], [1, 0, "1/3"]]),
    "a coefficient beyond": changed(*READS, "exact", to=[[1, 3, "1/3"]]),
    "a coefficient of no row": changed(*READS, "exact", to=[[2, 0, "1/3"]]),
    "an exact number in place of 0": changed(*READS, "exact", to=[[0, -1, f"1/{10**400}"]]),
    "a coefficient before the bias": changed(*READS, "exact", to=[[1, -2, "1/3"]]),
    "no output": changed("output", to=None),
    "another output shape": changed("output_shape", to=[3]),
    "another input shape": changed("input_shapes", to=[[4]]),
    "half precision": changed("dtype", to="bfloat16"),
    "another dtype": changed("dtype", to="float32"),
}


@pytest.mark.parametrize("what", HOSTILE)
def test_hostile_records_are_refused(what):
    net = make()
    record = json.loads(json.dumps(net.record()))
    if what == "an unknown entry":
        record["layers"][0][1]["reads"]["exec"] = None
    HOSTILE[what](record)
    with pytest.raises(FormatError):
        head_from_record(record, net.state_dict(), CUBE)


@pytest.mark.parametrize(
    ("name", "tensor"),
    [
        ("layers.0.1.weight", None),
        ("output.bias", None),
        ("heads.0.values", None),
        ("layers.0.0.weight", torch.zeros(1, dtype=torch.float64)),
        ("layers.9.0.weight", torch.zeros(1, dtype=torch.float64)),
        ("extra", torch.zeros(1, dtype=torch.float64)),
        ("heads.2.values", torch.zeros(1, dtype=torch.float64)),
        ("output.places", torch.zeros(16, dtype=torch.float64)),
        ("layers.0.1.weight", torch.zeros(3, dtype=torch.float64)),
        ("layers.0.1.weight", torch.zeros(2, 1, dtype=torch.float64)),
        ("layers.0.1.weight", torch.zeros(2)),
        ("layers.0.1.weight", torch.tensor([np.nan, 1.0], dtype=torch.float64)),
        ("output.weight", torch.full((16,), np.inf, dtype=torch.float64)),
        ("heads.0.inverse_temperature", torch.tensor([-1.0], dtype=torch.float64)),
        ("heads.0.values", torch.zeros(6, 1, dtype=torch.float64)),
    ],
)
def test_hostile_tensors_are_refused(name, tensor):
    net = make()
    tensors = {n: t for n, t in (net.state_dict() | {name: tensor}).items() if t is not None}
    with pytest.raises(FormatError):
        head_from_record(net.record(), tensors, CUBE)


def test_maps_are_limited_together(monkeypatch):
    """Every map alone is small enough; a file of a few kilobytes must not take gigabytes."""
    monkeypatch.setattr(network, "_ENTRIES_AT_MOST", 1 << 12)
    m = 1 << 6
    head = make_head("grid", 1, torch.float64)
    record = {"type": "grid", **head.record()}
    rows = [[[], [], False] for _ in range(1 << 3)]
    reads = {"start": 0, "width": m, "rows": rows}
    layers = [[{"head": 0, "reads": reads}] for _ in range(16)]
    hostile = {"type": "network", "heads": [record], "layers": layers, "output": {"start": 0, "width": 1, "rows": [rows[0]]},
               "input_shapes": [[m]], "output_shape": [], "dtype": "float64"}  # fmt: skip
    tensors = {f"heads.0.{n}": t for n, t in head.state_dict().items()}
    with pytest.raises(FormatError, match="coefficients"):
        head_from_record(hostile, tensors, Box(-np.ones(m), np.ones(m)))
    monkeypatch.undo()
    assert head_from_record(hostile, tensors, Box(-np.ones(m), np.ones(m))).num_uses == 128


# the range of what it forms


def test_overflow_on_the_way_is_found():
    head = make_head("grid affine", 1, torch.float32)

    def net(weight: float) -> AttentionNetwork:
        reads, output = Affine(np.array([[weight]]), np.zeros(1)), Affine(np.array([[0.0, weight]]), np.zeros(1))
        wiring = Wiring(1, ((Group(0, reads),),), output)
        return AttentionNetwork([head], wiring, input_shapes=((1,),), output_shape=())

    net(1.5).check_range([-1], [1])
    with pytest.raises(DomainError, match=r"layer 0, group 0.*score"):
        net(1e19).check_range([-1], [1])
    with pytest.raises(DomainError, match=r"the output.*affine map"):
        net(1e38).check_range([-1e-38], [1e-38])
    with pytest.raises(DomainError, match="affine map"):
        net(1e19).check_range([-1e20], [1e20])
    with pytest.raises(ShapeError):
        net(1.0).check_range([-1, -1], [1, 1])
    reach = net(1.5).largest_value([-1], [1])
    assert reach == head.largest_value([-1.5], [1.5])


def test_no_channel_exceeds_the_largest_value():
    net = make()
    most = net.largest_value(CUBE.lo, CUBE.hi)
    assert float(net.channels(points(count=2000))[:, 3:].abs().max()) <= most


# compiled networks

TEXT = "sin(x0) + sin(x1) + cos(x0 + x1)"
SQUARE = Box([-1, -1], [1, 1])
PARTS = ("sin(x0)", "cos(x0)")


def compiled(dtype: torch.dtype = torch.float64, *, wired: bool = False) -> Compiled:
    """A sum of three heads, two of them equal; f is an expression, or the wiring itself."""
    boxes = Box([-1], [1]), Box([-2.001], [2.001])  # sums are rounded
    made = [
        pa.compile(t, b, tolerance=1e-4 if dtype == torch.float64 else 1e-3, dtype=dtype, method="fitted")
        for t, b in zip(PARTS, boxes)
    ]
    parts = [Part(c.target.graph, box, c.certificate) for c, box in zip(made, boxes)]
    layer = (Group(0, Affine(np.eye(2), np.zeros(2))), Group(1, Affine(np.ones((1, 2)), np.zeros(1))))
    wiring = Wiring(2, (layer,), Affine(np.array([[0.0, 0.0, 1.0, 1.0, 1.0]]), np.zeros(1)))
    net = AttentionNetwork([c.head for c in made], wiring, input_shapes=((2,),), output_shape=())
    graphs = [part.graph for part in parts]
    target = graph_target(parse(TEXT, ["x0", "x1"]), (SQUARE,), TEXT)
    function = function_of(target)
    if wired:
        target = Target((SQUARE,), (), None, lambda z: exact_values(net.wiring, graphs, z), "three waves")
        digest = net.function_sha256([graph.to_json() for graph in graphs])
        function = {"type": "network", "text": "three waves", "sha256": digest}
    proved = NetworkProof().prove(net, target, Given(earlier=parts))
    certificate = claim(
        net,
        function,
        (SQUARE,),
        proved.terms,
        dtype=dtype,
        theorem="carried-errors",
        details={"type": "network"},
        proof=proved.details,
    )
    return Compiled(net, net.partition(SQUARE), certificate, target)


@pytest.fixture(scope="module")
def sum_of_heads() -> Compiled:
    return compiled()


def test_it_is_called_like_a_head(sum_of_heads):
    c = sum_of_heads
    z = SQUARE.sample(500, np.random.default_rng(0))
    truth = np.sin(z[:, 0]) + np.sin(z[:, 1]) + np.cos(z.sum(axis=1))
    assert np.abs(c(z) - truth).max() <= c.error_bound and isinstance(c(z), np.ndarray)
    assert isinstance(c(torch.from_numpy(z)), torch.Tensor) and c.partition is None
    assert abs(c([0.5, -0.25]) - (np.sin(0.5) + np.sin(-0.25) + np.cos(0.25))) <= c.error_bound
    f = c.scalar()
    assert f(0.5, -0.25) == c([0.5, -0.25]) and isinstance(f(0.5, -0.25), float)
    with pytest.raises(pa.errors.OutsideDomainError):
        f(2.0, 0.0)
    assert c.with_outside("clamp").scalar()(2.0, 0.0) == c([1.0, 0.0])
    assert c.errors_at(z).max() <= c.error_bound and str(c.num_keys) in repr(c)
    assert c.evaluations == 0 and "head 1" in c.explain()
    assert f"{c.num_parameters:,}" in c._repr_html_()


def test_attacks_need_no_partition(sum_of_heads):
    c = sum_of_heads
    found = pa.attack(c, samples=512, restarts=8)
    assert not found.refuted and 0 < found.error <= c.error_bound
    assert c.attack(samples=256).error <= c.error_bound
    assert pa.attack(c, bound=found.error / 2, samples=512, restarts=8).refuted


def test_changed_coefficients_are_noticed():
    c = compiled()
    assert not c.is_changed
    with torch.no_grad():
        c.head.heads[1].values[0] += 1e-9
    assert c.is_changed
    with pytest.raises(UnsupportedError, match="changed"):
        c.save("nowhere")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_it_is_saved_and_loaded(dtype, tmp_path):
    c = compiled(dtype)
    again = pa.load(c.save(tmp_path / "net"))
    z = SQUARE.sample(50, np.random.default_rng(0))
    assert type(again.head) is AttentionNetwork and again.partition is None and np.array_equal(again(z), c(z))
    assert again.head.record() == c.head.record() and again.certificate.to_json() == c.certificate.to_json()
    assert again.errors_at(z).max() <= again.error_bound
    path = again.export_onnx(tmp_path / "net.onnx", outside="clamp")
    session = ort.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    number = np.float64 if dtype == torch.float64 else np.float32
    found = session.run(None, {"z": (3 * z).astype(number)})[0]
    assert np.abs(found - c.with_outside("clamp")(3 * z)).max() < (1e-12 if dtype == torch.float64 else 1e-5)


def test_a_network_whose_wiring_is_the_function_is_saved_and_loaded(tmp_path):
    c = compiled(wired=True)
    again = pa.load(c.save(tmp_path / "net"))
    z = SQUARE.sample(50, np.random.default_rng(0))
    truth = np.sin(z[:, 0]) + np.sin(z[:, 1]) + np.cos(z.sum(axis=1))
    assert np.abs(again.target(z)[:, 0] - truth).max() < 1e-14 and again.evaluations == 0
    assert again.errors_at(z).max() <= again.error_bound and not pa.attack(again, samples=256, restarts=4).refuted
    with pytest.raises(UnsupportedError, match="stored with it"):
        again.with_function(lambda z: z)
    parts = json.loads((tmp_path / "net" / "certificate.json").read_text())["proof"]
    swapped = {**parts, "parts": parts["parts"][::-1]}
    forge(tmp_path / "net", proof=swapped)
    with pytest.raises(TamperedFileError, match="sha256 of the function"):
        pa.load(tmp_path / "net")
    forge(tmp_path / "net", proof={**parts, "parts": parts["parts"][:1]})
    with pytest.raises(FormatError, match="parts"):
        pa.load(tmp_path / "net")


def test_a_changed_wiring_is_noticed_on_disk(tmp_path):
    c = compiled()
    place = c.save(tmp_path / "net")
    record = json.loads((place / "head.json").read_text())["head"]
    record["layers"][0][0]["reads"]["rows"][1] = [[], [], False]
    reseal(place, head=record)
    with pytest.raises(TamperedFileError, match="wiring"):
        pa.load(place)
    model = json.loads((place / "certificate.json").read_text())["model"]
    digest = head_from_record(record, c.head.state_dict(), SQUARE).wiring_sha256()
    forge(place, model={**model, "wiring_sha256": digest})
    assert pa.attack(pa.load(place), samples=256, restarts=4).refuted  # only the claim itself shows it now
    record["layers"][0][0]["reads"]["rows"][1] = [[], [0], False]
    reseal(place, head=record)
    with pytest.raises(FormatError):
        pa.load(place)


@pytest.mark.parametrize(
    "ask",
    [
        lambda c: c.layers(),
        lambda c: c.with_sharpness(2.0),
        lambda c: plot_head(c, panels="cells"),
        lambda c: plot_head(c, panels=("head", "weights")),
        lambda c: plot_temperatures(c),
    ],
)
def test_what_needs_one_softmax_says_so(ask, sum_of_heads):
    with pytest.raises(UnsupportedError, match=r"network of heads|AttentionNetwork"):
        ask(sum_of_heads)


def test_pictures_without_cells_are_drawn(sum_of_heads):
    pytest.importorskip("matplotlib")
    titles = [panel.get_title() for panel in plot_head(sum_of_heads).axes]
    assert "what the head computes" in titles and "distance from the function" in titles
    assert not any("cells" in title for title in titles)
    figure = plot_surface(sum_of_heads)
    assert any("no cells" in text.get_text() for text in figure.axes[0].texts)
    assert head_values(sum_of_heads.head) is None


def test_proofs_of_one_head_refuse_a_network(sum_of_heads):
    for name in ("moments", "taylor"):
        with pytest.raises(UnsupportedError, match="expected a FoldedHead"):
            PROOFS[name].prove(sum_of_heads.head, sum_of_heads.target, Given())


# further bounds


@pytest.mark.parametrize("wired", [False, True])
def test_ranges_hold_what_is_computed(wired):
    c = compiled(wired=wired)
    (found,) = c.bound_range()
    z = torch.from_numpy(SQUARE.sample(20_000, np.random.default_rng(1)))
    values = c.head.evaluate(z)
    assert found.lo <= float(values.min()) and float(values.max()) <= found.hi
    assert found.lo <= found.seen_lo <= found.seen_hi <= found.hi
    if not wired:  # the maximum is 2 sin(x) + cos(2x) at sin(x) = 1/2
        assert found.hi < 1.5 + 0.05


def test_slopes_hold_those_of_autograd(sum_of_heads):
    c = sum_of_heads
    z = torch.from_numpy(SQUARE.sample(5000, np.random.default_rng(1))).requires_grad_()
    slopes = torch.autograd.grad(c.head.evaluate(z).sum(), z)[0]
    for axis in (0, 1):
        (found,) = c.bound_slope(axis)
        assert found.lo <= float(slopes[:, axis].min()) and float(slopes[:, axis].max()) <= found.hi
        assert found.hi < 2.2 and found.lo > -0.7  # cos(x) − sin(x + y), each over its own range
    with pytest.raises(DomainError, match="axis"):
        c.bound_slope(2)


def test_slopes_through_two_layers(nested):
    c = nested
    z = torch.from_numpy(SQUARE.sample(5000, np.random.default_rng(1))).requires_grad_()
    slopes = torch.autograd.grad(c.head.evaluate(z).sum(), z)[0]
    for axis in (0, 1):
        (found,) = c.bound_slope(axis)
        assert found.lo <= float(slopes[:, axis].min()) and float(slopes[:, axis].max()) <= found.hi
        assert max(-found.lo, found.hi) < 1.01 * np.exp(1.2)


@pytest.fixture(scope="module")
def nested() -> Compiled:
    """exp(sin(x0) + x1/3): two layers, an exact fraction, and reads that are off."""
    text, dtype = "exp(sin(x0) + x1/3)", torch.float64
    boxes = Box([-1], [1]), Box([-1.2], [1.2])
    made = [pa.compile(t, b, tolerance=1e-5, method="fitted") for t, b in zip(("sin(x0)", "exp(x0)"), boxes)]
    parts = [Part(c.target.graph, box, c.certificate) for c, box in zip(made, boxes)]
    first = Group(0, Affine(np.array([[1.0, 0.0]]), np.zeros(1)))
    second = Group(1, Affine(np.array([[1 / 3, 1.0]]), np.zeros(1), 1, {(0, 0): Fraction(1, 3)}))
    wiring = Wiring(2, ((first,), (second,)), Affine(np.array([[1.0]]), np.zeros(1), 3))
    net = AttentionNetwork([c.head for c in made], wiring, input_shapes=((2,),), output_shape=())
    target = graph_target(parse(text, ["x0", "x1"]), (SQUARE,), text)
    proved = NetworkProof().prove(net, target, Given(earlier=parts))
    shared = {"dtype": dtype, "theorem": "carried-errors", "details": {"type": "network"}, "proof": proved.details}
    return Compiled(net, None, claim(net, function_of(target), (SQUARE,), proved.terms, **shared), target)


def test_errors_of_gradients_hold_those_of_autograd(sum_of_heads, nested):
    def gradient(points: np.ndarray, c: Compiled) -> np.ndarray:
        z = torch.from_numpy(points).requires_grad_()
        return torch.autograd.grad(c.head.evaluate(z).sum(), z)[0].numpy()

    points = SQUARE.sample(5000, np.random.default_rng(2))
    x, y = points.T
    truths = {
        sum_of_heads: np.stack([np.cos(x) - np.sin(x + y), np.cos(y) - np.sin(x + y)], axis=1),
        nested: np.exp(np.sin(x) + y / 3)[:, None] * np.stack([np.cos(x), np.full_like(x, 1 / 3)], axis=1),
    }
    for c, truth in truths.items():
        error = np.abs(gradient(points, c) - truth).max(axis=0)
        found = c.bound_gradient_error()
        assert (error <= np.array(found.bounds)).all() and max(found.bounds) < 0.2
        assert all(seen <= bound for seen, bound in zip(found.seen, found.bounds))
    with pytest.raises(UnsupportedError, match="expression"):
        compiled(wired=True).bound_gradient_error()


def test_an_estimate_bounds_nothing(sum_of_heads):
    certificate = replace(sum_of_heads.certificate, kind="estimated", error_bound=np.inf)
    c = replace(sum_of_heads, certificate=certificate)
    for ask in (c.bound_range, c.bound_gradient_error, lambda: c.bound_slope(0)):
        with pytest.raises(UnsupportedError, match="kind estimated"):
            ask()
