"""Capture: every door to attention is seen, once, with the numbers that were used; nothing that the model computes changes."""

import contextvars
import math
import subprocess
import sys
import threading
from typing import ClassVar

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.attention import flex_attention as torch_flex
from torch.nn.attention.bias import causal_lower_right
from torch.utils._pytree import tree_leaves

import partita as pa
from partita.errors import NonFiniteValueError, SizeError, UnsupportedError
from partita.inspection.calls import from_sdpa


def softmax_attention(snapshot):
    """The head's answers, from the recorded numbers alone, in numpy."""
    scores = snapshot.scale * snapshot.queries.astype(np.float64) @ snapshot.keys.astype(np.float64).T
    if snapshot.mask is not None:
        extra = np.where(snapshot.mask, 0.0, -np.inf) if snapshot.mask.dtype == bool else snapshot.mask
        scores = scores + extra
    if snapshot.causal:
        scores[np.arange(scores.shape[1]) > snapshot.positions[:, None]] = -np.inf
    weights = np.exp(scores - scores.max(axis=1, keepdims=True))
    return weights / weights.sum(axis=1, keepdims=True) @ snapshot.values.astype(np.float64)


class Plain(nn.Module):
    """Projections and one of several ways to attend."""

    def __init__(self, attend, dim=16, heads=4, key_heads=None):
        super().__init__()
        self.heads, self.key_heads, self.attend = heads, key_heads or heads, attend
        self.q = nn.Linear(dim, dim)
        self.kv = nn.Linear(dim, 2 * dim * self.key_heads // heads)
        self.out = None

    def forward(self, x):
        q = self.q(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        k, v = (t.unflatten(-1, (self.key_heads, -1)).transpose(1, 2) for t in self.kv(x).chunk(2, dim=-1))
        self.out = self.attend(q, k, v)
        return self.out.transpose(1, 2).flatten(2)


def by_hand(q, k, v):
    return torch.softmax(q @ k.mT / math.sqrt(q.shape[-1]), dim=-1) @ v


def by_hand_and_told(q, k, v):
    pa.inspect.record(q, k, v)
    return by_hand(q, k, v)


def sdpa(**options):
    return lambda q, k, v: functional.scaled_dot_product_attention(q, k, v, **options)


BIAS = torch.randn(7, 7, generator=torch.Generator().manual_seed(5))
ALLOWED = torch.rand(1, 4, 7, 7, generator=torch.Generator().manual_seed(6)) > 0.3
ALLOWED[..., 0] = True
PLAIN = {
    "plain": (sdpa(), None),
    "causal": (sdpa(is_causal=True), None),
    "scaled": (sdpa(scale=0.5), None),
    "float mask": (sdpa(attn_mask=BIAS), None),
    "boolean mask per head": (sdpa(attn_mask=ALLOWED), None),
    "grouped queries": (sdpa(enable_gqa=True), 2),
    "told": (by_hand_and_told, None),
    "by hand in a keyword": (lambda q, k, v: functional.scaled_dot_product_attention(query=q, key=k, value=v), None),
}


@pytest.fixture
def x():
    return torch.randn(3, 7, 16, generator=torch.Generator().manual_seed(0))


def build(make, seed=0):
    torch.manual_seed(seed)
    return make()


@pytest.mark.parametrize("grad", [False, True], ids=["no grad", "grad"])
@pytest.mark.parametrize("name", PLAIN)
def test_what_is_recorded_reproduces_the_answers(name, grad, x):
    attend, key_heads = PLAIN[name]
    layer = build(lambda: Plain(attend, key_heads=key_heads))
    with torch.set_grad_enabled(grad):
        before = layer(x)
        with pa.inspect.capture(layer) as heads:
            after = layer(x)
    assert torch.equal(before, after)
    assert [r.name for r in heads] == [f"Plain:{h}" for h in range(4)]
    for record in heads:
        assert len(record.snapshots) == 3
        for element, snapshot in enumerate(record.snapshots):
            expected = layer.out[element, record.head].detach().numpy()
            assert np.abs(softmax_attention(snapshot) - expected).max() < 1e-5


def test_attention_by_hand_is_not_seen_unless_told(x):
    layer = build(lambda: Plain(by_hand))
    with pa.inspect.capture(layer) as heads:
        layer(x)
    assert len(heads) == 0
    with pytest.raises(UnsupportedError, match=r"no attention was recorded.*by hand"):
        pa.inspect.read(heads)


def test_a_reader_tells_of_attention_by_hand_without_touching_the_model(x):
    model = nn.Sequential(build(lambda: Plain(by_hand)), nn.Linear(16, 16))

    def reader(module, args, kwargs, output):
        q = module.q(args[0]).unflatten(-1, (4, -1)).transpose(1, 2)
        k, v = (t.unflatten(-1, (4, -1)).transpose(1, 2) for t in module.kv(args[0]).chunk(2, dim=-1))
        return {"query": q, "key": k, "value": v}

    plain = model(x)
    with pa.inspect.capture(model, readers={"0": reader}) as heads:
        assert torch.equal(model(x), plain)
    assert [r.name for r in heads] == ["0:0", "0:1", "0:2", "0:3"]
    assert np.abs(softmax_attention(heads["0", 2].snapshots[1]) - model[0].out[1, 2].detach().numpy()).max() < 1e-5
    with (
        pytest.raises(UnsupportedError, match="expected query, key, value"),
        pa.inspect.capture(model, readers={"0": lambda *_: {"q": x}}),
    ):
        model(x)


def encoder(norm_first=False, batch_first=True, layers=2):
    layer = nn.TransformerEncoderLayer(16, 4, 32, batch_first=batch_first, norm_first=norm_first)
    return nn.TransformerEncoder(layer, layers, enable_nested_tensor=not norm_first and batch_first)


def padding(batch=3, tokens=7):
    mask = torch.zeros(batch, tokens, dtype=torch.bool)
    mask[1, 4:] = mask[2, 6:] = True
    return mask


CAUSAL = torch.ones(7, 7).triu(1).bool()
ENCODERS = {
    "fused": (encoder, {}),
    "fused, norm first": (lambda: encoder(norm_first=True), {}),
    "fused, causal": (encoder, {"mask": CAUSAL, "is_causal": True}),
    "fused, padding without nesting": (lambda: encoder(norm_first=True), {"src_key_padding_mask": padding()}),
    "nested": (encoder, {"src_key_padding_mask": padding()}),
    "tokens first": (lambda: encoder(batch_first=False), {}),
}


def weights_asked_for(model, x, options):
    """Attention weights of the first layer, by torch's unfused path, `(batch, heads, tokens, keys)`: the oracle."""
    layer = model.layers[0]
    first = layer.norm1(x) if layer.norm_first else x
    with torch.no_grad():
        _, weights = functional.multi_head_attention_forward(
            *[first.transpose(0, 1) if layer.self_attn.batch_first else first] * 3,
            16,
            4,
            layer.self_attn.in_proj_weight,
            layer.self_attn.in_proj_bias,
            None,
            None,
            False,
            0.0,
            layer.self_attn.out_proj.weight,
            layer.self_attn.out_proj.bias,
            training=False,
            key_padding_mask=options.get("src_key_padding_mask"),
            attn_mask=options.get("mask"),
            average_attn_weights=False,
        )
    return weights.numpy()


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
@pytest.mark.parametrize("name", ENCODERS)
def test_encoder_layers_on_both_paths(name, training, x):
    make, options = ENCODERS[name]
    if training and name == "nested":
        pytest.skip("torch nests in evaluation only")
    model = build(make).train(training)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        if isinstance(module, nn.MultiheadAttention):
            module.dropout = 0.0
    with torch.set_grad_enabled(training):
        before = model(x, **options)
        with pa.inspect.capture(model) as heads:
            after = model(x, **options)
    assert torch.equal(before, after)
    assert heads.layers == ("layers.0.self_attn", "layers.1.self_attn") and len(heads) == 8
    expected = weights_asked_for(model, x, options)
    for head in range(4):
        record = heads["layers.0.self_attn", head]
        batch = 3 if model.layers[0].self_attn.batch_first else 7
        assert len(record.snapshots) == batch
        for element, snapshot in enumerate(record.snapshots):
            weights = np.zeros((len(snapshot.queries), len(snapshot.keys)))
            scores = snapshot.scores(snapshot.counted)
            e = np.exp(scores - scores.max(axis=1, keepdims=True))
            weights[snapshot.counted] = e / e.sum(axis=1, keepdims=True)
            truth = expected[element, head][snapshot.counted][:, : len(snapshot.keys)]
            assert np.abs(weights[snapshot.counted] - truth).max() < 1e-5
            if options.get("src_key_padding_mask") is not None:
                real = int((~options["src_key_padding_mask"][element]).sum())
                assert len(snapshot.counted) == real  # padding is no query, whether torch nested the batch or not


@pytest.mark.parametrize("kind", ["mask", "src_key_padding_mask"])
def test_the_fused_layer_takes_finite_masks_for_boolean_ones_and_is_recorded_as_it_is(kind, x):
    """torch's fused encoder layer masks whatever is not 0; unfused it adds it."""
    model = build(lambda: encoder(norm_first=True, layers=1)).eval()
    given = BIAS.clone() if kind == "mask" else torch.full((3, 7), 0.5)
    given[..., :3] = 0.0
    with torch.no_grad():
        assert torch.equal(model(x, **{kind: given}), model(x, **{kind: given != 0}))
        with pa.inspect.capture(model) as heads:
            model(x, **{kind: given})
        torch.backends.mha.set_fastpath_enabled(False)
        try:
            with pa.inspect.capture(model) as unfused:
                model(x, **{kind: given})
        finally:
            torch.backends.mha.set_fastpath_enabled(True)
    assert heads["layers.0.self_attn", 0].snapshots[1].active.sum(axis=1).tolist() == [3] * 7
    assert unfused["layers.0.self_attn", 0].snapshots[1].active.all()


@pytest.mark.parametrize(
    "options", [{}, {"need_weights": False}, {"key_padding_mask": padding()}, {"attn_mask": CAUSAL}], ids=str
)
def test_self_attention_on_the_fused_operator(options, x):
    layer = build(lambda: nn.MultiheadAttention(16, 4, batch_first=True)).eval()
    with torch.inference_mode():
        before = layer(x, x, x, **options)
        with pa.inspect.capture(layer) as heads:
            after = layer(x, x, x, **options)
        _, weights = layer(x, x, x, **{**options, "need_weights": True}, average_attn_weights=False)
    assert torch.equal(before[0], after[0])
    for record in heads:
        for element, snapshot in enumerate(record.snapshots):
            scores = snapshot.scores(snapshot.counted)
            e = np.exp(scores - scores.max(axis=1, keepdims=True))
            truth = weights[element, record.head].numpy()[snapshot.counted]
            assert np.abs(e / e.sum(axis=1, keepdims=True) - truth).max() < 1e-5


def test_encoders_and_decoders(x):
    model = build(lambda: nn.Transformer(16, 4, 1, 1, 32, batch_first=True)).eval()
    mask = nn.Transformer.generate_square_subsequent_mask(5)
    with torch.no_grad():
        before = model(x, x[:, :5], tgt_mask=mask)
        with pa.inspect.capture(model) as heads:
            assert torch.equal(model(x, x[:, :5], tgt_mask=mask), before)
    own, cross = (
        heads["decoder.layers.0.self_attn", 0].snapshots[0],
        heads["decoder.layers.0.multihead_attn", 0].snapshots[0],
    )
    assert heads.layers[0] == "encoder.layers.0.self_attn" and len(heads) == 12
    assert own.active.tolist() == np.tri(5, dtype=bool).tolist() and cross.active.shape == (5, 7) and cross.active.all()


def test_padded_keys_of_another_sequence_leave_all_queries(x):
    """Cross-attention with as many queries as keys: padding is of the keys alone."""
    layer = build(lambda: nn.MultiheadAttention(16, 4, batch_first=True)).eval()
    with torch.no_grad(), pa.inspect.capture(layer) as heads:
        layer(x.flip(0), x, x, key_padding_mask=padding())
        layer(x, x, x, key_padding_mask=padding())
    counts = [len(s.counted) for s in heads["MultiheadAttention", 0].snapshots]
    assert counts == [7, 7, 7, 7, 4, 6]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tokens", [0, 1])
def test_fused_layers_with_no_token_or_one(tokens, dtype, x):
    model = build(encoder).eval().to(dtype)
    few = x[:, :tokens].to(dtype)
    with torch.no_grad():
        before = model(few)
        with pa.inspect.capture(model) as heads:
            assert torch.equal(model(few), before)
    assert all(len(s.queries) == tokens for r in heads for s in r.snapshots) and len(heads) == 8


def test_the_fused_path_is_really_taken_and_a_function_mode_would_leave_it(x):
    """The negative control of bit-identity: what capture avoids does happen to a plain function mode."""
    from torch.overrides import TorchFunctionMode
    from torch.utils._python_dispatch import TorchDispatchMode

    class Seen(TorchDispatchMode):
        names: ClassVar[list[str]] = []

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.names.append(str(func))
            return func(*args, **(kwargs or {}))

    class Through(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            return func(*args, **(kwargs or {}))

    model = build(encoder).eval()
    fused = "aten._transformer_encoder_layer_fwd.default"
    with torch.no_grad():
        with pa.inspect.capture(model), Seen() as seen:
            model(x)
        assert seen.names.count(fused) == 2
        Seen.names = []
        with Through(), Seen() as seen:
            model(x)
        assert fused not in seen.names


OPTIONS = {
    "plain": ({}, {}),
    "weights": ({}, {"need_weights": True}),
    "no weights": ({}, {"need_weights": False}),
    "bias keys and zero attention": ({"add_bias_kv": True, "add_zero_attn": True}, {}),
    "other key and value widths": ({"kdim": 6, "vdim": 10}, {}),
    "no biases": ({"bias": False}, {}),
    "float mask": ({}, {"attn_mask": BIAS[:5]}),
    "float mask per head": ({}, {"attn_mask": torch.randn(12, 5, 7, generator=torch.Generator().manual_seed(8))}),
    "padding": ({}, {"key_padding_mask": padding()}),
    "padding, bias keys": ({"add_bias_kv": True}, {"key_padding_mask": padding(), "attn_mask": ~ALLOWED[0, 0, :5]}),
}


@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
@pytest.mark.parametrize("name", OPTIONS)
def test_multi_head_attention_with_its_options(name, training):
    make, call = OPTIONS[name]
    layer = build(lambda: nn.MultiheadAttention(16, 4, batch_first=True, **make)).train(training)
    generator = torch.Generator().manual_seed(3)
    query = torch.randn(3, 5, 16, generator=generator)
    key, value = (torch.randn(3, 7, make.get(w, 16), generator=generator) for w in ("kdim", "vdim"))
    with torch.no_grad():
        before = layer(query, key=key, value=value, **call)
        with pa.inspect.capture(layer) as heads:
            after = layer(query, key=key, value=value, **call)
        _, weights = layer(query, key, value, **{**call, "need_weights": True}, average_attn_weights=False)
    assert torch.equal(before[0], after[0])
    assert (before[1] is None and after[1] is None) or torch.equal(before[1], after[1])
    for record in heads:
        for element, snapshot in enumerate(record.snapshots):
            scores = snapshot.scores(snapshot.counted)
            e = np.exp(scores - scores.max(axis=1, keepdims=True))
            assert len(scores) == 5
            got, truth = e / e.sum(axis=1, keepdims=True), weights[element, record.head].numpy()
            assert np.abs(got - truth).max() < 1e-5


def test_self_attention_by_the_fused_operator_and_unbatched(x):
    layer = build(lambda: nn.MultiheadAttention(16, 4, batch_first=True)).eval()
    with torch.no_grad(), pa.inspect.capture(layer) as heads:
        layer(x, x, x)
        layer(x[0], x[0], x[0])
    for record in heads:
        batched, alone = record.snapshots[0], record.snapshots[3]
        assert np.abs(batched.keys - alone.keys).max() < 1e-6 and len(record.snapshots) == 4


def test_dropout_draws_the_same_numbers(x):
    model = build(encoder).train()
    torch.manual_seed(1)
    before = model(x)
    torch.manual_seed(1)
    named = r"train mode: dropout is on in 'layers.0.self_attn' \(MultiheadAttention, p = 0.1\) and 7 more"
    with pytest.warns(UserWarning, match=named), pa.inspect.capture(model) as heads:
        assert torch.equal(model(x), before)
    assert len(heads) == 8


def test_gradients_are_the_same(x):
    model = build(encoder).train(False)
    model(x).square().sum().backward()
    before = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    with pa.inspect.capture(model):
        model(x).square().sum().backward()
    assert all(torch.equal(a, p.grad) for a, p in zip(before, model.parameters()))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_dtypes_are_held_exactly(dtype, x):
    layer = build(lambda: Plain(sdpa())).to(dtype)
    with torch.no_grad():
        before = layer(x.to(dtype))
        with pa.inspect.capture(layer) as heads:
            assert torch.equal(layer(x.to(dtype)), before)
        q = layer.q(x.to(dtype)).unflatten(-1, (4, -1)).transpose(1, 2)
    snapshot = heads["Plain", 1].snapshots[2]
    assert np.array_equal(snapshot.queries, q[2, 1].to(torch.float64).numpy()) and f"torch.{snapshot.dtype}" == str(
        dtype
    )
    report = pa.inspect.read(heads)
    assert report["Plain", 1].dtype == snapshot.dtype and report["Plain", 1].figures.cells >= 1


def test_autocast(x):
    layer = build(lambda: Plain(sdpa()))
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        before = layer(x)
        with pa.inspect.capture(layer) as heads:
            assert torch.equal(layer(x), before)
    assert heads["Plain", 0].snapshots[0].dtype == "bfloat16"


def test_only_what_is_asked_for_is_kept(x):
    model = build(encoder).eval()
    with torch.no_grad():
        with pa.inspect.capture(model, layers="layers.1.*", heads=[1, 3, 9], tokens=3, batch=2) as few:
            model(x)
        with pa.inspect.capture(model) as all_of_it:
            model(x)
    assert [r.name for r in few] == ["layers.1.self_attn:1", "layers.1.self_attn:3"]
    snapshot, whole = few["layers.1.self_attn", 3].snapshots[1], all_of_it["layers.1.self_attn", 3].snapshots[1]
    assert len(few["layers.1.self_attn", 3].snapshots) == 2
    assert snapshot.positions.tolist() == [0, 3, 6] and np.array_equal(snapshot.queries, whole.queries[[0, 3, 6]])
    assert np.array_equal(snapshot.keys, whole.keys)  # fewer keys would be another partition
    assert few.bytes_held < all_of_it.bytes_held / 4


def test_memory_is_bounded_and_said_so(x):
    model = build(encoder).eval()
    refusal = pytest.raises(SizeError, match=r"max_bytes.*tokens=")
    with torch.no_grad(), refusal, pa.inspect.capture(model, max_bytes=5_000):
        model(x)
    model(x)  # and the hooks are gone
    with pytest.raises(UnsupportedError, match="at least 1"), pa.inspect.capture(model, tokens=0):
        pass
    with pytest.raises(UnsupportedError, match="counted within a layer"), pa.inspect.capture(model, heads=[-1]):
        pass
    with pytest.raises(UnsupportedError, match=r"nn\.Module"), pa.inspect.capture(lambda z: z):
        pass


def test_records_are_copies(x):
    layer = build(lambda: Plain(sdpa()))
    with torch.no_grad(), pa.inspect.capture(layer) as heads:
        layer(x)
        held = heads["Plain", 0].snapshots[0].keys.copy()
        layer.kv.weight.zero_()
        layer(x)
    assert np.array_equal(heads["Plain", 0].snapshots[0].keys, held)
    assert not np.array_equal(heads["Plain", 0].snapshots[3].keys, held) and len(heads["Plain", 0].snapshots) == 6


@pytest.mark.filterwarnings("ignore:Using `torch.compile")
def test_compiled_models_are_seen_uncompiled(x):
    layer = build(lambda: Plain(sdpa()))
    compiled = torch.compile(layer, backend="eager")
    with torch.no_grad():
        before = compiled(x)
        with pa.inspect.capture(layer) as heads:
            after = compiled(x)
    assert torch.equal(before, after) and len(heads) == 4


def test_names_of_layers(x):
    class Twice(nn.Module):
        def forward(self, t):
            once = functional.scaled_dot_product_attention(t, t, t)
            return functional.scaled_dot_product_attention(once, t, t)

    inner = nn.Sequential(Twice(), Twice())
    other = Twice()
    with pa.inspect.capture(inner) as heads:
        inner(x)
        other(x)  # no part of the model
        inner(x)
    assert heads.layers == ("0", "0#1", "1", "1#1")
    assert all(len(r.snapshots) == 6 for r in heads)
    with pa.inspect.capture() as everything:
        other(x)
        functional.scaled_dot_product_attention(x, x, x)
    assert len(everything) == 3
    with pytest.raises(UnsupportedError, match=r"head 0 of layer '2'.*0#1"):
        heads["2", 0]


def test_other_threads_are_left_alone(x):
    layer = build(lambda: Plain(sdpa()))
    with pa.inspect.capture(layer) as heads:
        thread = threading.Thread(target=lambda: layer(x))
        thread.start()
        thread.join()
    assert len(heads) == 0


def test_captures_nest_and_an_error_in_the_model_leaves_nothing_behind(x):
    layer = build(encoder).eval()
    with torch.no_grad(), pa.inspect.capture(layer) as outer:
        with pa.inspect.capture(layer, heads=[0]) as inner:
            layer(x)
        with pytest.raises(RuntimeError):
            layer(x[..., :3])
        layer(x)
    assert len(inner) == 2 and len(outer) == 8
    assert len(outer["layers.0.self_attn", 0].snapshots) == 6
    from torch.nn.modules import module as torch_module
    from torch.overrides import _get_current_function_mode

    left = [name for name in vars(torch_module) if name.startswith("_global_forward") and getattr(torch_module, name)]
    assert not left
    assert _get_current_function_mode() is None


def test_another_function_mode_on_top_does_not_double_records(x):
    layer = build(encoder).eval()
    with torch.no_grad(), pa.inspect.capture(layer) as heads, torch.device("cpu"):
        layer(x)
    assert len(heads) == 8 and all(len(r.snapshots) == 3 for r in heads)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage")  # said once per process
def test_nested_tensors_in_plain_attention():
    parts = [torch.randn(4, n, 8, generator=torch.Generator().manual_seed(n)) for n in (3, 5)]
    nested = torch.nested.nested_tensor([p.transpose(0, 1) for p in parts], layout=torch.jagged).transpose(1, 2)
    before = functional.scaled_dot_product_attention(nested, nested, nested)
    with pa.inspect.capture() as heads:
        after = functional.scaled_dot_product_attention(nested, nested, nested)
    assert all(torch.equal(a, b) for a, b in zip(before.unbind(), after.unbind()))
    assert [len(s.queries) for s in heads["attention", 3].snapshots] == [3, 5]
    assert np.array_equal(heads["attention", 3].snapshots[1].keys, parts[1][3].numpy())


def test_leading_axes_of_any_number():
    q = torch.randn(2, 3, 4, 5, 8)
    (call,) = from_sdpa(q, q[:, :1], q[:1, :1], torch.randn(2, 1, 1, 5, 5))
    assert call.queries.shape == (6, 4, 5, 8) and call.keys.shape == (6, 4, 5, 8) and call.mask.shape == (6, 1, 5, 5)
    (flat,) = from_sdpa(q[0, 0, 0], q[0, 0, 0], q[0, 0, 0])
    assert flat.queries.shape == (1, 1, 5, 8)
    scores, _ = call.scores(2)
    assert scores.shape == (6, 5, 5)


def test_infinite_activations_are_named(x):
    layer = build(lambda: Plain(sdpa()))
    with torch.no_grad():
        layer.q.weight.fill_(torch.inf)
    with pytest.raises(NonFiniteValueError, match="queries"), pa.inspect.capture(layer):
        layer(x)


CAUSAL = torch.ones(7, 7, dtype=torch.bool).triu(1)
HINTED = {  # masks that the hint agrees with, that it drops a bias from, and that it contradicts
    "causal": CAUSAL,
    "causal with a bias": BIAS.masked_fill(CAUSAL, -torch.inf),
    "not causal": torch.zeros(7, 7, dtype=torch.bool),
}


@pytest.mark.parametrize("grad", [False, True], ids=["fused if it can be", "with gradients"])
@pytest.mark.parametrize("options", [{}, {"add_bias_kv": True, "add_zero_attn": True}], ids=["", "more keys"])
@pytest.mark.parametrize("mask", HINTED)
def test_the_hint_of_causality_is_recorded_as_it_is_taken(mask, options, grad, x):
    layer = build(lambda: nn.MultiheadAttention(16, 4, batch_first=True, **options)).eval()
    with torch.set_grad_enabled(grad), pa.inspect.capture(layer) as heads:
        out, _ = layer(x, x, x, attn_mask=HINTED[mask], is_causal=True, need_weights=False)
    for element in range(3):
        said = np.concatenate([softmax_attention(record.snapshots[element]) for record in heads], axis=1)
        rebuilt = said @ layer.out_proj.weight.detach().double().numpy().T + layer.out_proj.bias.detach().numpy()
        assert np.abs(rebuilt - out[element].detach().numpy()).max() < 1e-5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_minus_ten_thousand_is_a_mask_in_every_dtype_and_under_a_bias(dtype):
    mask = torch.zeros(1, 1, 5, 5, dtype=dtype)
    mask[..., 3:] = -10000
    mask = mask + torch.arange(5, dtype=dtype)  # −9,997 and −9,996; in bfloat16 both are −9,984
    q = torch.randn(1, 2, 5, 4, generator=torch.Generator().manual_seed(0)).to(dtype)
    with pa.inspect.capture() as heads:
        functional.scaled_dot_product_attention(q, q, q, attn_mask=mask)
    snapshot = heads["attention", 1].snapshots[0]
    assert snapshot.active.tolist() == [[True] * 3 + [False] * 2] * 5
    assert snapshot.counted.tolist() == [0, 1, 2]
    assert snapshot.bias.max() == 2


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch.jit says that it is deprecated
def test_traced_models_run_and_are_seen_where_they_reach_a_fused_operator(x):
    layer = build(lambda: Plain(sdpa())).eval().requires_grad_(False)
    traced = torch.jit.trace(layer, x)
    with pa.inspect.capture(traced) as heads:
        out = traced(x)
    assert torch.equal(out, layer(x)) and len(heads) == 4


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_scripted_layers_are_seen_unless_that_changed_a_bit(autocast, mode):
    torch.manual_seed(0)
    layer = torch.jit.script(nn.TransformerEncoderLayer(64, 4, 32, batch_first=True).eval())
    x = torch.randn(7, 50, 64)
    with mode(), torch.autocast("cpu", enabled=autocast):
        before = layer(x)
        with pa.inspect.capture(layer) as heads:
            after = layer(x)
    assert before.dtype == after.dtype and torch.equal(before, after)
    assert len(heads) == (4 if mode is torch.no_grad and not autocast else 0)


@pytest.mark.filterwarnings("ignore:The tensor attribute self.out was assigned")
def test_exported_models_are_seen(x):
    layer = build(lambda: Plain(sdpa())).eval().requires_grad_(False)
    exported = torch.export.export(layer, (x,)).module()
    with pa.inspect.capture(exported) as heads:
        out = exported(x)
    assert torch.equal(out, exported(x)) and len(heads) == 4


def test_heads_asked_for_in_another_way_and_tensors_without_numbers(x):
    layer = build(lambda: Plain(sdpa()))
    with pa.inspect.capture(layer) as heads:
        layer(x)
    for which in (0, "Plain", ("Plain", 0, 0)):
        with pytest.raises(UnsupportedError, match=r"expected heads\[layer, head\]. Recorded: Plain \(4\)"):
            heads[which]
    with pytest.raises(UnsupportedError, match="cannot be copied"), pa.inspect.capture(layer):
        torch.vmap(lambda one: layer(one[None]))(x)


class OwnAttention(nn.MultiheadAttention):
    """A subclass that goes through torch's forward, with an attention of its own beside it."""

    def forward(self, query, key, value, **options):
        own = functional.scaled_dot_product_attention(query[:, None], key[:, None], value[:, None], scale=0.1)
        return super().forward(query, key, value, **options)[0] + own[:, 0]


class OwnLayer(nn.TransformerEncoderLayer):
    def forward(self, *args, **options):
        return super().forward(*args, **options)


@pytest.mark.parametrize("grad", [False, True], ids=["fused", "with gradients"])
@pytest.mark.parametrize("padded", [False, True], ids=["", "padded"])
def test_subclasses_with_a_forward_of_their_own_stay_on_their_path(padded, grad, x):
    attention = build(lambda: OwnAttention(16, 4, batch_first=True)).eval()
    layer = build(lambda: OwnLayer(16, 4, 32, batch_first=True)).eval()
    asked = torch.overrides.has_torch_function
    with torch.set_grad_enabled(grad):
        options = {"key_padding_mask": padding() if padded else None, "need_weights": False}
        before = attention(x, x, x, **options)
        with pa.inspect.capture(attention) as heads:
            after = attention(x, x, x, **options)
        assert torch.equal(before, after) and heads.layers == ("OwnAttention", "OwnAttention#1")
        own = torch.stack([torch.from_numpy(softmax_attention(s)) for s in heads["OwnAttention", 0].snapshots])
        parts = [heads["OwnAttention#1", h].snapshots for h in range(4)]
        said = torch.stack([torch.from_numpy(np.hstack([softmax_attention(p[e]) for p in parts])) for e in range(3)])
        weight, bias = attention.out_proj.weight.double(), attention.out_proj.bias.double()
        assert (functional.linear(said, weight, bias) + own - after).abs().max() < 1e-5
        before = layer(x, src_key_padding_mask=padding() if padded else None)
        with pa.inspect.capture(layer) as other, pa.inspect.capture(layer) as heads:  # they end in any order
            after = layer(x, src_key_padding_mask=padding() if padded else None)
    assert (
        torch.equal(before, after) and heads.layers == other.layers == ("self_attn",) and len(heads) == len(other) == 4
    )
    assert torch.overrides.has_torch_function is asked


@pytest.mark.parametrize("make", [encoder, lambda: Attending(16, 4)], ids=["encoder", "attention"])
def test_captures_that_nest_stay_on_the_fused_path(make, x):
    model = build(make).eval()
    with torch.no_grad():
        before = model(x)
        with pa.inspect.capture(model) as outer, pa.inspect.capture(model) as inner:
            after = model(x)
    assert torch.equal(before, after) and [r.name for r in outer] == [r.name for r in inner] and len(inner)


class Attending(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.attention = nn.MultiheadAttention(dim, heads, batch_first=True)

    def forward(self, x):
        return self.attention(x, x, x)[0]


class Autocast(nn.TransformerEncoderLayer):
    """Switches autocast on or off for its fused layer."""

    def __init__(self, enabled):
        super().__init__(64, 4, 32, batch_first=True)
        self.enabled = enabled

    def forward(self, x):
        with torch.autocast("cpu", enabled=self.enabled):
            return super().forward(x)


class Direct(nn.TransformerEncoderLayer):
    """Calls the fused operator itself."""

    def __init__(self, operator):
        super().__init__(64, 4, 32, batch_first=True)
        self.operator = operator

    def forward(self, x):
        own, norms = self.self_attn, (self.norm1, self.norm2)
        first = (x, 64, 4, own.in_proj_weight, own.in_proj_bias, own.out_proj.weight, own.out_proj.bias, False, False)
        scales = (p for norm in norms for p in (norm.weight, norm.bias))
        last = (self.linear1.weight, self.linear1.bias, self.linear2.weight, self.linear2.bias)
        with torch.no_grad():
            return self.operator()(*first, self.norm1.eps, *scales, *last)


MODELS = {
    "off inside": lambda: Autocast(False),
    "on inside": lambda: Autocast(True),
    "fused operator": lambda: Direct(lambda: torch._transformer_encoder_layer_fwd),
    "fused aten operator": lambda: Direct(lambda: torch.ops.aten._transformer_encoder_layer_fwd),
    "encoder": lambda: nn.TransformerEncoder(
        nn.TransformerEncoderLayer(64, 4, 32, batch_first=True), 2, enable_nested_tensor=False
    ),
    "decoder": lambda: nn.TransformerDecoder(nn.TransformerDecoderLayer(64, 4, 32, batch_first=True), 2),
    "attention": lambda: nn.MultiheadAttention(64, 4, bias=False, batch_first=True),
    "linear": lambda: nn.Linear(64, 64),
    "bilinear": lambda: nn.Bilinear(64, 64, 3),
    "gru": lambda: nn.GRU(64, 8),
    "lstm": lambda: nn.LSTM(64, 8),
}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("autocast", [None, torch.bfloat16], ids=str)
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
@pytest.mark.parametrize("axes", [(0, 1), (1, 0)], ids=["batch first", "tokens first"])
def test_autocast_and_inference_mode_give_the_same_bits(name, autocast, mode, axes):
    torch.manual_seed(0)
    model, x = MODELS[name]().eval(), torch.randn(7, 50, 64).permute(*axes, 2)
    given = {"decoder": 2, "attention": 3, "bilinear": 2}.get(name, 1)
    with mode(), torch.autocast("cpu", dtype=autocast, enabled=autocast is not None):
        plain = model(*[x] * given)
        with pa.inspect.capture(model) as heads:
            seen = model(*[x] * given)
    for a, b in zip(tree_leaves(plain), tree_leaves(seen), strict=True):
        assert a is b is None or (a.dtype == b.dtype and torch.equal(a, b))
    assert len(heads) == {"encoder": 8, "decoder": 16, "bilinear": 0, "linear": 0, "gru": 0, "lstm": 0}.get(name, 4)


def test_a_capture_that_is_left_in_another_context_leaves_nothing_behind():
    before = {
        name: getattr(torch_flex, name) for name in ("flex_attention_hop", "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG")
    }
    held = pa.inspect.capture()
    contextvars.copy_context().run(held.__enter__)
    assert torch_flex.flex_attention_hop is not before["flex_attention_hop"]
    held.__exit__(None, None, None)
    assert {name: getattr(torch_flex, name) for name in before} == before
    with pa.inspect.capture() as heads:
        pa.inspect.record(*torch.randn(3, 1, 2, 5, 4))
    assert len(heads) == 2


class Rotated(nn.TransformerEncoderLayer):
    """Runs torch's forward, with an attention of its own."""

    def _sa_block(self, x, attn_mask, key_padding_mask, is_causal=False):
        return attended(x)


def attended(x, *_):
    q = x.unflatten(-1, (4, -1)).transpose(1, 2)
    return functional.scaled_dot_product_attention(q, q, q).transpose(1, 2).flatten(2)


def alone(q: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.scaled_dot_product_attention(q, q, q)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:flex_attention called without torch.compile")
def test_a_capture_inside_another_does_not_end_it(x):
    model, heads = build(Scripted), x.unflatten(-1, (4, -1)).transpose(1, 2)
    with torch.no_grad(), pa.inspect.capture(model) as outer:
        with pa.inspect.capture(model) as inner:
            model(x)
            pa.inspect.record(*torch.randn(3, 1, 2, 5, 4))
        model(x)
        pa.inspect.record(*torch.randn(3, 1, 2, 5, 4))
        torch_flex.flex_attention(heads, heads, heads)
    assert [len(record.snapshots) for record in inner] == [3] * 4 + [1] * 2
    assert [len(record.snapshots) for record in outer] == [6] * 4 + [1] * 4 + [3] * 4


class Scripted(nn.Module):
    def __init__(self):
        super().__init__()
        self.attend = torch.jit.script(alone)

    def forward(self, x):
        return self.attend(x.unflatten(-1, (4, -1)).transpose(1, 2))


def patched():
    layer = nn.MultiheadAttention(16, 4, batch_first=True)
    layer.forward = attended  # on the instance
    return layer


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch.jit
@pytest.mark.parametrize(
    ("make", "layers"),
    [
        (
            lambda: nn.TransformerEncoder(Rotated(16, 4, batch_first=True), 2, enable_nested_tensor=False),
            "layers.0 layers.1",
        ),
        (lambda: nn.Sequential(patched()), "0"),
        (lambda: nn.Sequential(Scripted()), "0"),
    ],
    ids=["own block", "own forward", "scripted function"],
)
def test_attention_inside_layers_that_torch_and_others_wrote_together(make, layers, x):
    model = build(make).eval()  # with gradients, since torch's fused path ignores a block of one's own
    before = model(x)
    with pa.inspect.capture(model) as heads:
        after = model(x)
    assert torch.equal(before, after) and heads.layers == tuple(layers.split()) and len(heads) == 4 * len(heads.layers)


def test_the_first_capture_of_a_process_leaves_the_compiler_whole():
    """Dynamo and torch.jit remember the functions of torch that they find when they are first used."""
    code = """
import torch, warnings
from torch import nn
from torch.nn.attention.flex_attention import flex_attention
import partita as pa
warnings.simplefilter("ignore")
layer, x = nn.TransformerEncoderLayer(16, 4, batch_first=True).eval(), torch.randn(2, 6, 16)
with torch.no_grad(), pa.inspect.capture(layer) as heads:
    layer(x)
    flex_attention(*torch.randn(3, 1, 2, 16, 16))
    torch.jit.script(nn.MultiheadAttention(16, 4, batch_first=True).eval())
with torch.no_grad():
    torch.compile(layer, backend="eager", fullgraph=True)(x)
print(len(heads))
"""
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert found.returncode == 0 and found.stdout.strip() == "6", found.stderr


def test_a_capture_entered_in_another_context_sees_fused_layers(x):
    layer = build(lambda: nn.TransformerEncoderLayer(16, 4, 32, batch_first=True)).eval()
    held = pa.inspect.capture(layer)
    heads = contextvars.Context().run(held.__enter__)
    with torch.no_grad():
        layer(x)
    held.__exit__(None, None, None)
    assert heads.layers == ("self_attn",)


def test_models_on_devices_without_autocast(x):
    here, there = Plain(sdpa()), Plain(sdpa()).to("meta")
    with pa.inspect.capture(here), torch.no_grad():
        assert there(x.to("meta")).shape == x.shape  # another model
    with pytest.raises(UnsupportedError, match="cannot be copied"), pa.inspect.capture(there), torch.no_grad():
        there(x.to("meta"))


def test_a_replacement_that_somebody_puts_back_by_mistake_is_not_called_by_itself(x):
    layer = build(lambda: nn.TransformerEncoderLayer(16, 4, 32, batch_first=True)).eval()
    asked = torch.overrides.has_torch_function
    with torch.no_grad(), pa.inspect.capture(layer):
        kept = []
        layer.register_forward_pre_hook(lambda *_: kept.append(torch.overrides.has_torch_function))
        layer(x)
    try:
        torch.overrides.has_torch_function = kept[0]
        with torch.no_grad(), pa.inspect.capture(layer) as heads:
            layer(x)
    finally:
        torch.overrides.has_torch_function = asked
    assert len(heads) == 4


@pytest.mark.parametrize(
    ("shapes", "options"),
    [
        (((1, 4, 3, 8), (1, 4, 5, 8), (1, 4, 5, 2)), {"attn_mask": causal_lower_right(3, 5)}),
        (((2, 1, 4, 5, 8), (2, 3, 4, 5, 8), (2, 3, 4, 5, 2)), {"attn_mask": torch.arange(75.0).view(3, 1, 5, 5) / 10}),
        (((4, 5, 8), (2, 5, 8), (2, 5, 2)), {"enable_gqa": True}),
    ],
    ids=["causal bias", "several leading axes", "grouped without a batch"],
)
def test_shapes_that_torch_takes(shapes, options):
    torch.manual_seed(0)
    q, k, v = (torch.randn(*shape) for shape in shapes)
    with pa.inspect.capture() as heads:
        out = functional.scaled_dot_product_attention(q, k, v, **options)
    found = [heads["attention", h].snapshots for h in range(len(heads))]
    said = torch.stack([torch.stack([torch.from_numpy(softmax_attention(s)) for s in head]) for head in found], dim=1)
    assert torch.allclose(said.reshape(out.shape), out.double(), atol=1e-5)
