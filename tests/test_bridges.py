"""Attention by hand and flex attention, recorded and replaced; names of TransformerLens; exports. Oracles are plain torch."""

import contextlib
import json
import math

import jsonschema
import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.attention import flex_attention as torch_flex
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import partita as pa
from partita.errors import ShapeError, SizeError, UnsupportedError
from partita.inspection.eager_attention import EagerAttention
from partita.inspection.interception import watching

KEEP = torch.ones(6, 6, dtype=torch.bool).tril()
ADDED = torch.randn(6, 6, generator=torch.Generator().manual_seed(8))


def joined(t):
    return t.flatten(0, 1)


def einsum(q, k, v):
    scores = torch.einsum("bqhd,bkhd->bhqk", q.transpose(1, 2), k.transpose(1, 2)) / math.sqrt(q.shape[-1])
    return torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), v.transpose(1, 2)).transpose(1, 2)


def heads_outside(q, k, v):
    """(heads·batch, tokens, dim)"""
    q, k, v = (t.transpose(0, 1).flatten(0, 1) for t in (q, k, v))
    out = torch.bmm(torch.softmax(torch.bmm(q, k.mT) / math.sqrt(q.shape[-1]), -1), v)
    return out.unflatten(0, (4, -1)).transpose(0, 1)


def through_baddbmm(q, k, v):
    empty = torch.empty(1, dtype=q.dtype)
    scores = torch.baddbmm(empty, joined(q), joined(k).mT, beta=0, alpha=1 / math.sqrt(q.shape[-1]))
    return (torch.softmax(scores.view(-1, 4, 6, 6), dim=-1) @ v).contiguous()


def softmax_module(q, k, v):
    return nn.Softmax(dim=-1)((q / math.sqrt(q.shape[-1])) @ k.transpose(-1, -2)).matmul(v)


def one_head_by_keyword(q, k, v):
    scores = torch.matmul(joined(q), other=joined(k).mT).mul_(1 / math.sqrt(q.shape[-1]))
    return torch.bmm(functional.softmax(scores, -1), mat2=joined(v)).unflatten(0, (-1, 4))


def masked(step):
    def attend(q, k, v):
        return torch.softmax(step(q @ k.mT / math.sqrt(q.shape[-1])), dim=-1) @ v

    return attend


# how attention is written, and the mask that it applies
WAYS = {
    "matmul": (masked(lambda s: s), None),
    "einsum": (einsum, None),
    "bmm": (lambda q, k, v: masked(lambda s: s)(*map(joined, (q, k, v))).unflatten(0, (-1, 4)), None),
    "bmm, heads outside": (heads_outside, None),
    "baddbmm": (through_baddbmm, None),
    "nn.Softmax": (softmax_module, None),
    "keywords": (one_head_by_keyword, None),
    "masked_fill": (masked(lambda s: s.masked_fill(~KEEP, -torch.inf)), KEEP),
    "masked_fill by keyword": (masked(lambda s: s.masked_fill(mask=~KEEP, value=-1e9)), KEEP),
    "where": (masked(lambda s: torch.where(KEEP, s, -torch.inf)), KEEP),
    "where not": (masked(lambda s: torch.where(~KEEP, torch.tensor(-1e9, dtype=s.dtype), s)), KEEP),
    "where of a tensor": (masked(lambda s: s.where(KEEP, -torch.inf)), KEEP),
    "added": (masked(lambda s: s + ADDED), ADDED),
    "added to": (masked(lambda s: ADDED.to(s.dtype) + s), ADDED),
    "taken away": (masked(lambda s: s - ADDED), -ADDED),
    "in place": (masked(lambda s: s.add_(ADDED)), ADDED),
}


def truth(q, k, v, mask, hard):
    """Attention with the softmax of these heads replaced by argmax."""
    scores = q @ k.mT / math.sqrt(q.shape[-1])
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
    weights = torch.softmax(scores, dim=-1)
    for head in hard:
        weights[:, head] = functional.one_hot(scores[:, head].argmax(dim=-1), scores.shape[-1]).to(weights.dtype)
    return weights @ v


class Layer(nn.Module):
    """Attention by hand, told or not."""

    def __init__(self, attend, tell="before", mask=None):
        super().__init__()
        torch.manual_seed(0)
        self.qkv = nn.Linear(16, 48)
        self.attend, self.tell, self.mask = attend, tell, mask

    def split(self, x):
        return [t.unflatten(-1, (4, 4)).transpose(1, 2) for t in self.qkv(x).chunk(3, dim=-1)]

    def forward(self, x):
        q, k, v = self.split(x)
        if self.tell == "before":
            pa.inspect.record(q, k, v, attn_mask=self.mask)
        out = self.attend(q, k, v)
        if self.tell == "after":
            pa.inspect.record(q, k, v, attn_mask=self.mask)
        if self.tell == "output":
            out = pa.inspect.record(q, k, v, attn_mask=self.mask, output=out)
        self.out = out
        return out.transpose(1, 2).flatten(2)


@pytest.fixture
def x():
    return torch.randn(3, 6, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("way", WAYS)
def test_attention_by_hand_is_hardened_where_record_tells_of_it(way, x):
    attend, mask = WAYS[way]
    layer = Layer(attend, mask=mask).double().eval()
    with torch.no_grad():
        plain = layer(x)
        q, k, v = layer.split(x)
        with pa.inspect.hardened(layer, [("Layer", 1), ("Layer", 3)]) as met:
            layer(x)
        assert torch.allclose(layer.out, truth(q, k, v, mask, (1, 3))) and met == {"Layer": 4}
        assert not torch.allclose(layer.out[:, 1], truth(q, k, v, mask, ())[:, 1])  # the control: it did change
        untouched = layer.out[:, ::2].clone()
        layer(x)
        assert torch.equal(untouched, layer.out[:, ::2])  # other heads to the last bit
        with pa.inspect.hardened(layer, []):
            assert torch.equal(layer(x), plain)
        with pa.inspect.capture(layer) as heads:
            assert torch.equal(layer(x), plain)
    assert [len(r.snapshots) for r in heads] == [3] * 4  # once, not twice


@pytest.mark.parametrize("way", ["matmul", "bmm", "einsum", "masked_fill"])
def test_the_output_that_record_returns_is_hardened(way, x):
    attend, mask = WAYS[way]
    layer = Layer(lambda q, k, v: torch.cat([attend(q, k, v)]), tell="output", mask=mask).double().eval()
    q, k, v = layer.split(x)
    with torch.no_grad():
        plain = layer(x)
        with pa.inspect.hardened(layer, [("Layer", 2)]):
            layer(x)
        assert torch.allclose(layer.out, truth(q, k, v, mask, (2,)))
        with pa.inspect.capture(layer) as heads:
            assert torch.equal(layer(x), plain)
    assert len(heads) == 4
    report = pa.inspect.harden(layer, lambda m: m(x).square().mean())
    assert len(report.heads) == 4 and report.heads[0].hardened != 0


def test_record_returns_its_output_outside_and_checks_it_inside():
    q = torch.randn(2, 4, 6, 4)
    out = torch.randn(2, 4, 6, 4)
    assert pa.inspect.record(q, q, q, output=out) is out and pa.inspect.record(q, q, q) is None
    with pa.inspect.capture(), pytest.raises(ShapeError, match=r"expected the attention's own output, \(…, 4, 6, 4\)"):
        pa.inspect.record(q, q, q, output=out.transpose(1, 2).flatten(2))


def capped(q, k, v):
    return torch.softmax(torch.tanh(q @ k.mT / math.sqrt(q.shape[-1])), dim=-1) @ v


def written_into(q, k, v):
    scores = q @ k.mT / math.sqrt(q.shape[-1])
    scores[..., 0] = 3.0
    return torch.softmax(scores, dim=-1) @ v


def written_into_a_view(q, k, v):
    scores = q @ k.mT / math.sqrt(q.shape[-1])
    scores.diagonal(dim1=-2, dim2=-1).zero_()
    return torch.softmax(scores, dim=-1) @ v


@pytest.mark.parametrize("attend", [capped, written_into, written_into_a_view])
def test_other_steps_end_the_trail_and_nothing_is_replaced(attend, x):
    layer = Layer(attend).double().eval()
    with torch.no_grad():
        plain = layer(x)
    with (
        pytest.raises(UnsupportedError, match=r"head 0 of layer 'Layer'.*no product after it.*output=out"),
        pa.inspect.hardened(layer, [("Layer", 0)]),
    ):
        assert torch.equal(layer(x), plain)
    with pytest.raises(UnsupportedError, match=r"no attention that can be replaced.*before the product"):
        pa.inspect.harden(layer, lambda m: m(x).sum())
    layer.tell = "output"  # and this way they can be
    with pa.inspect.hardened(layer, [("Layer", 0)]):
        assert not torch.equal(layer(x), plain)


def test_the_follower_does_not_believe_scores_that_were_written_into():
    """The five steps by themselves, in the order in which the mode passes them on."""
    q = torch.randn(1, 1, 3, 3)
    for change, followed in ((lambda s: None, True), (lambda s: s.fill_(0), False), (lambda s: s[0].zero_(), False)):
        follower, scores = EagerAttention(), q @ q.mT
        follower.follow("matmul", (q, q.mT), {}, scores)
        change(scores)
        weights = torch.softmax(scores, dim=-1)
        follower.follow("softmax", (scores, -1), {}, weights)
        assert (follower.follow("matmul", (weights, q), {}, weights @ q) is not None) == followed


def test_a_record_that_tells_of_something_else_replaces_nothing(x):
    layer = Layer(WAYS["masked_fill"][0], mask=None).double().eval()  # the mask is not told
    with pytest.raises(UnsupportedError, match="no product after it"), pa.inspect.hardened(layer, [("Layer", 0)]):
        layer(x)
    late = Layer(WAYS["matmul"][0], tell="after").double().eval()
    with (
        pytest.raises(UnsupportedError, match="Call record before the product"),
        pa.inspect.hardened(late, [("Layer", 0)]),
    ):
        late(x)


def reader(module, args, kwargs, output):
    return dict(zip(("query", "key", "value"), module.split(args[0])))


def test_a_reader_lets_heads_be_hardened_without_touching_the_model(x):
    model = nn.Sequential(Layer(WAYS["matmul"][0], tell=""), Layer(WAYS["einsum"][0], tell="")).double().eval()
    readers = {"[01]": reader}
    with torch.no_grad():
        plain = model(x)
        with pa.inspect.hardened(model, [("0", 1)], readers=readers) as met:
            model(x)
        assert torch.allclose(model[0].out, truth(*model[0].split(x), None, (1,))) and met == {"0": 4, "1": 4}
        with pa.inspect.hardened(model, [("1", 2)], readers=readers):
            model(x)
        assert torch.allclose(model[1].out, truth(*model[1].split(model[0](x)), None, (2,)))
        with pa.inspect.hardened(model, [], readers=readers):
            assert torch.equal(model(x), plain)
        with pa.inspect.thinned(model, {("0", 1): pa.inspect.TopK(1)}, readers=readers):
            model(x)
        assert torch.allclose(model[0].out, truth(*model[0].split(x), None, (1,)))  # the best key alone
    told = []
    report = pa.inspect.harden(
        model, lambda m: m(x).square().mean(), readers=readers, progress=lambda *step: told.append(step)
    )
    assert len(report.heads) == 8 and told[0] == ("0:0", 0, 8) and told[-1] == ("", 8, 8)
    with pytest.raises(UnsupportedError, match="readers="):
        pa.inspect.harden(model, lambda m: m(x).square().mean())


def test_a_reader_that_tells_of_another_attention_is_refused(x):
    model = nn.Sequential(Layer(WAYS["matmul"][0], tell="")).double().eval()

    def wrong(module, args, kwargs, output):
        return {**reader(module, args, kwargs, output), "is_causal": True}

    for told, attend in ((wrong, "matmul"), (lambda *a: [], "matmul"), (reader, "bmm")):  # bmm: heads are not known
        model[0].attend = WAYS[attend][0]
        with (
            pytest.raises(UnsupportedError, match=r"layer '0' cannot be replaced.*reader of '0' reports \d"),
            pa.inspect.hardened(model, [("0", 0)], readers={"0": told}),
        ):
            model(x)
    model[0].attend = capped
    with pytest.raises(UnsupportedError, match=r"0 products were followed.*'tanh'"):
        pa.inspect.harden(model, lambda m: m(x).sum(), readers={"0": reader})


def as_transformers(**options):
    """The layer, of a class that says that it is from the transformers package."""
    return type("Layer", (Layer,), {"__module__": "transformers.models.layer"})(**options).double().eval()


@pytest.mark.parametrize("tell", ["", "before", "after", "output"])
def test_hugging_face_layers_are_seen_once_whoever_tells(tell, x):
    model = nn.Sequential(as_transformers(attend=WAYS["added"][0], tell=tell, mask=ADDED)).eval()
    with torch.no_grad():
        plain = model(x)
        with pa.inspect.capture(model) as heads:
            assert torch.equal(model(x), plain)
        with pa.inspect.hardened(model, [("0", 1)]) as met:
            model(x)
        assert torch.allclose(model[0].out, truth(*model[0].split(x), ADDED, (1,)))
    assert heads.layers == ("0",) and met == {"0": 4} and len(heads["0", 0].snapshots) == 3


def test_gradients_pass_through_what_is_replaced(x):
    layer = Layer(WAYS["einsum"][0]).double()
    with pa.inspect.hardened(layer, [("Layer", 0)], factor=2.0):
        layer(x).sum().backward()
    assert layer.qkv.weight.grad.abs().max() > 0


@pytest.mark.parametrize("way", ["matmul", "in place", "keywords"])
def test_inference_mode(way, x):
    """Its tensors do not count writes, so a write that is not followed ends every trail."""
    attend, mask = WAYS[way]
    layer = Layer(attend, mask=mask).double().eval()
    with torch.inference_mode(), pa.inspect.hardened(layer, [("Layer", 0)]):
        layer(x)
        assert torch.allclose(layer.out, truth(*layer.split(x), mask, (0,)))
    layer.attend = written_into
    with (
        pytest.raises(UnsupportedError, match="no product after it"),
        torch.inference_mode(),
        pa.inspect.hardened(layer, [("Layer", 0)]),
    ):
        layer(x)


# Flex attention

SLOPES = torch.tensor([0.1, 0.2, 0.4, 0.8])


def alibi(score, b, h, i, j):
    return score - SLOPES[h] * (i - j).abs()


def capping(score, b, h, i, j):
    return 2.0 * torch.tanh(score / 2.0)


def window(score, b, h, i, j):
    return torch.where((i - j).abs() <= 2, score, -torch.inf)


def least_in_window(score, b, h, i, j):
    return torch.where((i - j).abs() <= 2, score, torch.finfo(torch.float32).min)


def causal(b, h, i, j):
    return i >= j


ROW, COLUMN = torch.arange(6)[:, None], torch.arange(6)
FLEX = {  # score_mod, mask_mod, and what they make of the scores (batch, heads, 6, 6)
    "plain": (None, None, lambda s: s),
    "table": (alibi, None, lambda s: s - SLOPES[:, None, None] * (ROW - COLUMN).abs()),
    "soft cap": (capping, None, lambda s: 2 * torch.tanh(s / 2)),
    "masks in score_mod": (window, None, lambda s: s.masked_fill((ROW - COLUMN).abs() > 2, -torch.inf)),
    "least number": (least_in_window, None, lambda s: s.masked_fill((ROW - COLUMN).abs() > 2, -torch.inf)),
    "block mask": (None, causal, lambda s: s.masked_fill(ROW < COLUMN, -torch.inf)),
    "both": (capping, causal, lambda s: (2 * torch.tanh(s / 2)).masked_fill(ROW < COLUMN, -torch.inf)),
    "per sequence": (None, lambda b, h, i, j: j <= b + 2 * (h > 1), None),
}


class Flex(nn.Module):
    def __init__(self, name, key_heads=4, attend=flex_attention):
        super().__init__()
        torch.manual_seed(0)
        score_mod, mask_mod, _ = FLEX[name]
        block = None if mask_mod is None else create_block_mask(mask_mod, 3, 4, 6, 6, device="cpu")
        self.q, self.kv = nn.Linear(16, 16), nn.Linear(16, 8 * key_heads)
        self.options = {"score_mod": score_mod, "block_mask": block, "enable_gqa": key_heads < 4}
        self.attend = attend

    def split(self, x):
        keys, values = self.kv(x).chunk(2, dim=-1)
        return [t.unflatten(-1, (-1, 4)).transpose(1, 2) for t in (self.q(x), keys, values)]

    def forward(self, x):
        self.out = self.attend(*self.split(x), **self.options)
        return self.out.transpose(1, 2).flatten(2)


def answers(snapshot):
    """From the recorded numbers alone, in numpy."""
    scores = snapshot.scale * snapshot.queries.astype(np.float64) @ snapshot.keys.astype(np.float64).T
    if snapshot.mask is not None:
        scores += np.where(snapshot.mask, 0.0, -np.inf) if snapshot.mask.dtype == bool else snapshot.mask
    weights = np.exp(scores - scores.max(axis=1, keepdims=True))
    return weights / weights.sum(axis=1, keepdims=True) @ snapshot.values.astype(np.float64)


pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")


@pytest.mark.parametrize("name", FLEX)
def test_flex_attention_is_recorded_as_it_is_computed(name, x):
    model, x = nn.Sequential(Flex(name)).eval(), x.float()
    with torch.no_grad():  # torch has no backward pass of it on the CPU
        before = model(x)
        with pa.inspect.capture(model) as heads:
            after = model(x)
    assert torch.equal(before, after) and [r.name for r in heads] == ["0:0", "0:1", "0:2", "0:3"]
    for record in heads:
        for element, snapshot in enumerate(record.snapshots):
            expected = model[0].out[element, record.head].detach().numpy()
            assert np.abs(answers(snapshot) - expected).max() < 1e-5
    assert len(pa.inspect.read(heads).heads) == 4
    assert (heads["0", 0].snapshots[0].mask is None) == (name == "plain")
    if name == "block mask":
        assert heads["0", 0].snapshots[0].mask.dtype == bool


@pytest.mark.parametrize("name", [n for n in FLEX if FLEX[n][2]])
def test_flex_attention_can_be_hardened(name, x):
    model = Flex(name).double().eval()
    with torch.no_grad():
        plain = model(x)
        with pa.inspect.hardened(model, [("Flex", 2)]) as met:
            model(x)
        got = model.out
        with pa.inspect.hardened(model, []):
            assert torch.equal(model(x), plain)
    q, k, v = model.split(x)
    scores = FLEX[name][2](q @ k.mT / 2)
    weights = torch.softmax(scores, dim=-1)
    soft = weights @ v
    weights[:, 2] = functional.one_hot(scores[:, 2].argmax(dim=-1), 6).double()
    assert torch.allclose(got, weights @ v) and not torch.allclose(got, soft) and met == {"Flex": 4}


def test_flex_attention_with_grouped_queries_and_half_precision(x):
    for dtype in (torch.bfloat16, torch.float64):
        model = Flex("table", key_heads=2).to(dtype).eval()
        with torch.no_grad(), pa.inspect.capture(model) as heads:
            model(x.to(dtype))
        expected = model.out[1, 3].double().numpy()
        close = 0.02 if dtype == torch.bfloat16 else 1e-6
        assert np.abs(answers(heads["Flex", 3].snapshots[1]) - expected).max() < close
        assert heads["Flex", 3].snapshots[0].dtype == str(dtype).removeprefix("torch.")


def test_flex_attention_is_put_back(x):
    model = Flex("both").eval()
    before = torch_flex.flex_attention_hop, torch_flex._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG
    x = x.float()
    with torch.no_grad(), pa.inspect.capture(model) as outer, pa.inspect.hardened(model, [("Flex", 0)]):
        with pa.inspect.capture(model) as inner:
            model(x)
        model(x)
        assert torch_flex.flex_attention_hop is not before[0]
    assert (torch_flex.flex_attention_hop, torch_flex._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG) == before
    assert len(outer["Flex", 0].snapshots) == 6 and len(inner["Flex", 0].snapshots) == 3
    with pytest.raises(ZeroDivisionError), pa.inspect.capture(model):
        1 / 0  # noqa: B018
    assert torch_flex.flex_attention_hop is before[0]


@pytest.mark.filterwarnings("ignore:Using `torch.compile")
def test_compiled_flex_attention_is_seen_uncompiled(x):
    model = Flex("both").eval()
    compiled, x = torch.compile(model, backend="eager"), x.float()
    with torch.no_grad():
        before = compiled(x)
        with pa.inspect.capture(model) as heads:
            after = compiled(x)
        assert torch.equal(before, after) and len(heads) == 4
        assert torch.equal(compiled(x), before)
        model.attend = torch.compile(flex_attention, backend="eager")
        with pa.inspect.capture(model) as heads:
            assert torch.equal(model(x), before) and len(heads) == 4


@pytest.mark.filterwarnings("ignore:Using `torch.compile")
@pytest.mark.parametrize("fails", [False, True])
def test_models_are_compiled_again_after_a_capture(fails):
    """A compiled model runs uncompiled while it is recorded, compiled afterwards, and new shapes are compiled, too."""
    graphs, runs = [], []

    def backend(graph, inputs):
        graphs.append(graph)
        return lambda *args: runs.append(1) or graph(*args)

    def attend(x):
        return functional.scaled_dot_product_attention(x, x, x)

    torch._dynamo.reset()
    compiled, x = torch.compile(attend, backend=backend, dynamic=False), torch.randn(1, 2, 5, 4)
    try:
        compiled(x)
        assert (len(graphs), len(runs)) == (1, 1)
        with (
            contextlib.suppress(ZeroDivisionError),
            pa.inspect.capture() as outer,
            pa.inspect.capture(stream=True) as inner,
        ):
            compiled(x)
            if fails:
                1 / 0  # noqa: B018
        assert len(outer) == len(inner) == 2 and (len(graphs), len(runs)) == (1, 1)
        compiled(x)
        assert (len(graphs), len(runs)) == (1, 2)
        compiled(torch.randn(1, 2, 6, 4))
        assert (len(graphs), len(runs)) == (2, 3)
    finally:
        torch._dynamo.reset()


def test_the_stance_of_the_compiler_is_put_back():
    """Also one that was set before the capture, and after captures inside each other."""
    from torch._dynamo import eval_frame

    def stance():
        return eval_frame._stance.stance

    plain = stance()
    with torch.compiler.set_stance("eager_on_recompile"):
        with pa.inspect.capture():
            assert stance() == "force_eager"
            with pa.inspect.capture(stream=True):
                assert stance() == "force_eager"
            assert stance() == "force_eager"
        assert stance() == "eager_on_recompile"
    assert stance() == plain != "force_eager"


def test_the_size_of_flex_masks_is_counted(x):
    model, plain = Flex("table").eval(), Flex("plain").eval()
    with torch.no_grad(), pa.inspect.capture(model) as heads, pa.inspect.capture(plain) as bare:
        model(x.float())
        plain(x.float())
    assert heads.bytes_held == bare.bytes_held + 4 * 3 * 4 * 6 * 6
    with torch.no_grad(), pytest.raises(SizeError), pa.inspect.capture(model, max_bytes=heads.bytes_held - 1):
        model(x.float())


def test_flex_scores_are_computed_for_some_rows_alone(x):
    model, found = Flex("both").eval(), []
    with torch.no_grad(), watching(model, lambda layer, call: found.append(call)):
        model(x.float())
    whole, seen = found[0].scores(1)
    part, _ = found[0].scores(1, slice(2, 4))
    assert torch.allclose(whole[:, 2:4], part) and part.shape == (3, 2, 6)
    assert torch.equal(seen, (ROW >= COLUMN).expand(3, 6, 6))
    q, k, _ = model.split(x.float())
    assert torch.allclose(whole[seen], FLEX["both"][2](q @ k.mT / 2)[:, 1][seen], atol=1e-6)


# Names of TransformerLens


class Grouped(nn.Module):
    """Two layers under a causal mask, by scaled_dot_product_attention; keeps what it computes."""

    def __init__(self, key_heads=4):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(
            nn.ModuleDict({"q": nn.Linear(16, 16), "kv": nn.Linear(16, 8 * key_heads)}) for _ in "ab"
        )
        self.kept = []

    def forward(self, x):
        self.kept = []
        for layer in self.layers:
            keys, values = layer["kv"](x).chunk(2, dim=-1)
            q, k, v = (t.unflatten(-1, (-1, 4)).transpose(1, 2) for t in (layer["q"](x), keys, values))
            out = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=k.shape[1] < 4)
            self.kept.append((q, k, v, out))
            x = x + out.transpose(1, 2).flatten(2)
        return x


@pytest.mark.parametrize("key_heads", [4, 2])
def test_activations_have_the_names_and_shapes_of_transformer_lens(key_heads, x):
    model, x = Grouped(key_heads).eval(), x.float()
    with torch.no_grad(), pa.inspect.capture(model) as heads:
        model(x)
    cache = pa.inspect.activation_cache(heads)
    assert cache.layers == ("Grouped", "Grouped#1") and len(cache) == len(list(cache)) == 12
    for number, (q, k, v, out) in enumerate(model.kept):
        k, v = (t.repeat_interleave(4 // key_heads, dim=1) for t in (k, v))
        scores = (q @ k.mT / 2).masked_fill(ROW < COLUMN, -torch.inf)
        expected = {"q": q.transpose(1, 2), "k": k.transpose(1, 2), "v": v.transpose(1, 2), "z": out.transpose(1, 2)}
        expected |= {"attn_scores": scores, "pattern": torch.softmax(scores, dim=-1)}
        for kind, tensor in expected.items():
            found = cache[f"blocks.{number}.attn.hook_{kind}"]
            assert found.shape == tensor.shape and found.dtype == torch.float32
            assert torch.allclose(found, tensor, atol=1e-5), kind
            assert torch.equal(found, cache[kind, number])
    assert torch.equal(cache["attn", -1], cache["pattern", 1, "attn"]) and ("query", 0) in cache
    assert "blocks.0.hook_resid_pre" not in cache and cache.get("blocks.2.attn.hook_q", 3) == 3
    for wrong in ("blocks.2.attn.hook_q", "pattern", ("pattern", 2), ("pattern", 0, "mlp"), 3, ("q", "0")):
        with pytest.raises(UnsupportedError, match="the cache has no"):
            cache[wrong]
        assert wrong not in cache


def test_activations_of_unequal_length_and_of_masked_queries(x):
    model = Grouped().double().eval()
    with torch.no_grad(), pa.inspect.capture(model) as heads:
        model(x)
        model(x[:, :4])
    cache = pa.inspect.activation_cache(heads)
    with pytest.raises(ShapeError, match="4×4, 6×6; expected one length"):
        cache["pattern", 0]
    with pa.inspect.capture() as heads:
        functional.scaled_dot_product_attention(*[x[:, None]] * 3, attn_mask=torch.arange(6)[:, None].expand(6, 6) > 0)
    blind = pa.inspect.activation_cache(heads)["pattern", 0]
    assert not blind[:, :, 0].any() and torch.allclose(blind[:, :, 1:].sum(-1), torch.ones(3, 1, 5).double())
    for nothing, words in (
        ([], "holds no records"),
        ([3], "heads is of type list"),
        (None, "NoneType"),
        (model, "a model"),
    ):
        with pytest.raises(UnsupportedError, match=words):
            pa.inspect.activation_cache(nothing)


# Exports


def checked(data, schema):
    jsonschema.Draft202012Validator.check_schema(schema)
    jsonschema.Draft202012Validator(schema).validate(data)


@pytest.mark.parametrize("values", [False, True])
def test_reports_fit_their_schema(values, x, tmp_path):
    model = Flex("table").eval()  # per position: some figures are not defined
    with torch.no_grad(), pa.inspect.capture(model) as heads:
        model(x.float())
    report = pa.inspect.read(heads)
    folder = report.save(tmp_path, values=values)
    data, schema = (json.loads((folder / name).read_text()) for name in ("report.json", "report.schema.json"))
    assert schema == pa.inspect.report_schema() and data["heads"][0]["figures"]["dead"] is None
    checked(data, schema)
    for spoil in (
        lambda d: d["heads"][0]["figures"].pop("margin"),
        lambda d: d["heads"][0]["figures"].update(mood=1.0),
        lambda d: d["heads"][0].update(layer=3),
        lambda d: d["layers"][0].update(cells="many"),
        lambda d: d["heads"][0]["cells"][0].update(key=0.5),
        lambda d: d.update(version=2),
    ):
        wrong = json.loads(json.dumps(data))
        spoil(wrong)
        with pytest.raises(jsonschema.ValidationError):
            checked(wrong, schema)


def test_every_field_of_the_schema_is_described():
    figures = pa.inspect.report_schema()["$defs"]["Figures"]
    assert set(figures["properties"]) == set(pa.inspect.Figures.__dataclass_fields__)
    assert figures["properties"]["cells"]["description"] == "keys that some query fell into."
    assert "root mean square of the output" in figures["properties"]["table_distance"]["description"]  # two lines
    assert figures["properties"]["cells"]["type"] == "integer"

    def bare(schema, name):
        found = []
        for key, inner in schema.get("properties", {}).items():
            found += [f"{name}.{key}"] * ("description" not in inner) + bare(inner, f"{name}.{key}")
        return found + (bare(schema["items"], f"{name}[]") if "items" in schema else [])

    for schema in (pa.inspect.report_schema(), pa.inspect.pattern_schema()):
        assert [w for name, s in {"": schema, **schema["$defs"]}.items() for w in bare(s, name)] == []
    assert bare({"properties": {"x": {}}}, "") == [".x"]  # the control


def test_patterns_are_exported_with_their_tokens(x, tmp_path):
    model = Grouped().eval()
    with torch.no_grad(), pa.inspect.capture(model, batch=2, heads=[1, 2]) as heads:
        model(x.float())
    tokens = [list("abcdef"), ["the", " cat", "Ġsat", "##s", "<s>", "é"]]
    path = pa.inspect.export_patterns(heads, tmp_path / "new" / "p.json", tokens=tokens, digits=5)
    data = json.loads(path.read_text(encoding="utf-8"))
    checked(data, json.loads(path.with_suffix(".schema.json").read_text()))
    assert data["format"] == "partita-patterns" and data["tokens"] == tokens and data["digits"] == 5
    assert data["layers"] == ["Grouped", "Grouped#1"] and [(h["layer"], h["head"]) for h in data["heads"]][2] == (1, 1)
    cache = pa.inspect.activation_cache(heads)
    for head in data["heads"]:
        for k, pattern in enumerate(head["patterns"]):
            truth = cache["pattern", head["layer"]][k, head["head"] - 1].numpy()
            assert pattern["sequence"] == k and np.abs(np.array(pattern["weights"]) - truth).max() < 1e-5
            assert pattern["query_positions"] == list(range(6))
    wrong = json.loads(path.read_text())
    wrong["heads"][0]["patterns"][0]["weights"][0][0] = "1"
    with pytest.raises(jsonschema.ValidationError):
        checked(wrong, pa.inspect.pattern_schema())
    one = pa.inspect.export_patterns(heads["Grouped", 1], tmp_path / "one.json")
    assert json.loads(one.read_text())["tokens"] is None
    checked(json.loads(one.read_text()), pa.inspect.pattern_schema())


def test_patterns_that_cannot_be_exported(x, tmp_path):
    model = Grouped().eval()
    with torch.no_grad(), pa.inspect.capture(model) as heads:
        model(x.float())
    with pytest.raises(ShapeError, match="the sequences have 6 tokens; Grouped:0 has 6, 6, 6 keys"):
        pa.inspect.export_patterns(heads, tmp_path / "p.json", tokens=list("abcdef"))
    with pytest.raises(SizeError, match=r"8 heads have 864 weights.*fewer digits"):
        pa.inspect.export_patterns(heads, tmp_path / "p.json", max_bytes=1000)
    for options, words in (({"digits": 0}, "digits is 0"), ({"digits": True}, "digits is True")):
        with pytest.raises(UnsupportedError, match=words):
            pa.inspect.export_patterns(heads, tmp_path / "p.json", **options)
    with pytest.raises(UnsupportedError, match=r"ends in \.json"):
        pa.inspect.export_patterns(heads, tmp_path / "p.txt")
    for nothing, words in (([], "holds no records"), (None, "NoneType"), (model, "a model")):
        with pytest.raises(UnsupportedError, match=words):
            pa.inspect.export_patterns(nothing, tmp_path / "p.json")
    assert list(tmp_path.iterdir()) == []


def test_flex_attention_is_seen_while_another_thread_compiles(x, monkeypatch):
    layer = Flex("both")
    monkeypatch.setattr(torch.compiler, "_is_compiling_flag", True)  # of the whole process
    with pa.inspect.capture(layer) as heads, torch.no_grad():
        layer(x.float())
    assert len(heads) == 4


def test_capped_scores_are_recorded_alike_under_autocast(x):
    layer = Flex("soft cap")
    weights = []
    for enabled in (False, True):
        with pa.inspect.capture() as heads, torch.no_grad():
            q, k, v = layer.split(30 * x.float())
            with torch.autocast("cpu", enabled=enabled):
                layer.attend(q, k, v, **layer.options)
        weights.append(next(iter(heads)).snapshots[0].weights())
    assert np.abs(weights[0] - weights[1]).max() < 1e-6


def test_hard_tables_are_those_of_exact_scores_under_autocast():
    q, k, v = torch.randn(3, 1, 2, 256, 64, generator=torch.Generator().manual_seed(0))

    class Attention(nn.Module):
        def forward(self):
            return functional.scaled_dot_product_attention(q, k, v)

    with torch.no_grad(), torch.autocast("cpu"), pa.inspect.hardened(model := Attention(), [("Attention", 0)]):
        out = model()
    nearest = torch.cdist(out[0, 0].double(), v[0, 0].double()).argmin(dim=-1)
    seen = [
        t[0, 0].bfloat16().double() for t in (q, k)
    ]  # autocast rounds queries and keys; the scores are not rounded again
    assert torch.equal(nearest, (seen[0] @ seen[1].mT).argmax(dim=-1))
