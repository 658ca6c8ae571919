"""Models that run with a rule for each head: against masks put in by hand."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

import partita as pa

TOKENS = 9


class Attention(nn.Module):
    """Two heads over one key head; `keep` is the mask that a test puts in by hand."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        noise = torch.Generator().manual_seed(seed)
        self.queries, self.keys, self.values = (
            nn.Parameter(torch.randn(8, width, dtype=torch.float64, generator=noise)) for width in (8, 4, 4)
        )
        self.keep = torch.ones(2, TOKENS, TOKENS, dtype=torch.bool)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = ((x @ w).unflatten(-1, (-1, 4)).transpose(1, 2) for w in (self.queries, self.keys, self.values))
        mixed = functional.scaled_dot_product_attention(
            q, k, v, attn_mask=self.keep & torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril(), enable_gqa=True
        )
        return mixed.transpose(1, 2).flatten(-2)


def model() -> nn.Sequential:
    return nn.Sequential(Attention(0), nn.Tanh(), Attention(1)).eval()


def inputs(sequences: int = 3) -> torch.Tensor:
    return torch.randn(sequences, TOKENS, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(2))


def window(sinks: int, recent: int) -> torch.Tensor:
    i, j = np.indices((TOKENS, TOKENS))
    return torch.from_numpy((j < sinks) | (abs(i - j) < recent))


def test_each_head_follows_its_own_rule():
    plain, by_hand, x = model(), model(), inputs()
    by_hand[0].keep[1], by_hand[2].keep[0] = window(1, 2), window(0, 3)
    rules = {("0", 1): pa.inspect.Window(1, 2), ("2", 0): pa.inspect.Window(0, 3)}
    with torch.no_grad():
        before = plain(x)
        with pa.inspect.thinned(plain, rules) as met:
            thin = plain(x)
        wanted = by_hand(x)
        assert met == {"0": 2, "2": 2}
        torch.testing.assert_close(thin, wanted, rtol=0, atol=1e-13)
        assert torch.equal(plain(x), before)  # the model is as it was
        with pa.inspect.thinned(plain, {("0", 0): rules["0", 1], ("2", 0): rules["2", 0]}):
            assert (plain(x) - wanted).abs().max() > 1e-3  # negative control: the same rule on the other head


def test_rules_that_drop_nothing_change_no_bit():
    plain, x = model(), inputs()
    with (
        torch.no_grad(),
        pa.inspect.thinned(plain, {("0", 0): pa.inspect.TopK(TOKENS), ("2", 1): pa.inspect.Window(0, TOKENS)}),
    ):
        thin = plain(x)
    assert torch.equal(thin, plain(x))
    with torch.no_grad(), pa.inspect.thinned(plain, {}):
        assert torch.equal(plain(x), thin)


def test_calibrated_thresholds_do_what_the_audit_says_together():
    plain, x = model(), inputs(4)

    def loss(m: nn.Module) -> torch.Tensor:
        return m(x).square().mean()

    rule = pa.inspect.SkipBlocks(1.0, tile=(1, 2))
    found = pa.inspect.calibrate(plain, x, rule, error=1e3, thresholds=[1.0])  # any change is allowed
    assert {h.threshold for h in found.heads} == {1.0}
    with torch.no_grad(), pa.inspect.thinned(plain, found):
        change = loss(plain) - loss(model())
    assert change.item() == pytest.approx(pa.inspect.audit(plain, x, rule, loss).together[0], abs=1e-13)
    assert abs(change) > 1e-6


@pytest.mark.parametrize(
    ("rules", "words"),
    [
        (pa.inspect.TopK(1), "rules is TopK; expected"),
        ({("0", 0): 3}, r"rule is 3; expected SkipBlocks\(threshold\)"),
        ({"0": pa.inspect.TopK(1)}, "expected .layer, head."),
        ({("0", 2): pa.inspect.TopK(1)}, "head 2 of layer '0' did not run"),
        ({("1", 0): pa.inspect.TopK(1)}, "head 0 of layer '1' did not run"),
        ({("0", "a"): pa.inspect.TopK(1)}, r"heads contains \('0', 'a'\); expected \(layer, head\)"),
    ],
)
def test_mistakes_are_named(rules, words):
    plain = model()
    with pytest.raises(pa.errors.UnsupportedError, match=words), torch.no_grad(), pa.inspect.thinned(plain, rules):
        plain(inputs())


def test_only_a_module_can_be_thinned():
    with pytest.raises(pa.errors.UnsupportedError, match="model is of type int"), pa.inspect.thinned(3, {}):
        pass


@pytest.mark.parametrize("layer", ["3", "0.attn", "", "Attention", "0#x"])
def test_a_layer_that_does_not_exist_is_refused_before_the_model_runs(layer):
    entered = False
    with (
        pytest.raises(pa.errors.UnsupportedError, match=rf"layer '{layer}' is not a module .*: .*0"),
        pa.inspect.thinned(model(), {(layer, 0): pa.inspect.TopK(1)}),
    ):
        entered = True
    assert not entered


@pytest.mark.parametrize("layer", ["0", "2#1", "Sequential", "Sequential#3", "1.self_attn", "attention", "attention#1"])
def test_names_that_capture_could_give_are_not_refused_before_the_model_runs(layer):
    entered = False
    with (
        pytest.raises(pa.errors.UnsupportedError, match="did not run inside `thinned`"),
        pa.inspect.thinned(model(), {(layer, 0): pa.inspect.TopK(1)}),
    ):
        entered = True  # and the model does not run, or another one does
    assert entered


class Far(pa.inspect.DroppingRule):
    """A rule as users write it: a plain class, which drops the keys next to the query."""

    def __init__(self, least: int) -> None:
        self.least = least

    def keeps(self, scores: torch.Tensor, positions: torch.Tensor, head: int) -> torch.Tensor:
        keys = torch.arange(scores.shape[-1])
        return (positions[:, None] - keys).abs() >= self.least


@pytest.mark.parametrize("rule", [Far(1), pa.inspect.KeepMask(~window(0, 1))], ids=str)
def test_a_rule_of_your_own_does_what_its_mask_does(rule):
    plain, by_hand, x = model(), model(), inputs()
    by_hand[2].keep[1] = ~window(0, 1)
    with torch.no_grad(), pa.inspect.thinned(plain, {("2", 1): rule}):
        thin = plain(x)[:, 1:]  # the first query of a causal head sees itself only
    with torch.no_grad():
        torch.testing.assert_close(thin, by_hand(x)[:, 1:], rtol=0, atol=1e-13)


class Cached(nn.Module):
    """Causal attention of one head that can remember its keys: `start` is how many tokens came before these."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Parameter(torch.randn(6, 18, dtype=torch.float64, generator=torch.Generator().manual_seed(3)))
        self.kept: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor, start: int = 0, hidden: int = 0) -> torch.Tensor:
        q, k, v = (x @ self.mix)[:, None].chunk(3, dim=-1)
        self.kept = self.kept[: start and 2]
        if start:
            k, v = (torch.cat([old, new], dim=2) for old, new in zip(self.kept, (k, v)))
        self.kept = [k, v]
        keys, places = torch.arange(k.shape[2]), start + torch.arange(q.shape[2])
        seen = (keys <= places[:, None]) & (keys >= hidden)
        mask = None if q.shape[2] == 1 and not hidden else seen  # models decode one token without a mask
        return functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)[:, 0]


class Even(pa.inspect.DroppingRule):
    def keeps(self, scores, positions, head):
        keys = torch.arange(scores.shape[-1])
        return (keys % 2 == 0) | (keys == positions[:, None])


@pytest.mark.parametrize("rule", [pa.inspect.Window(1, 3), pa.inspect.Window(0, 2), Even()], ids=str)
@pytest.mark.parametrize("cut", [(8, 1, 1, 1, 1), (5, 4, 3), (1,) * 12])
def test_a_cache_of_keys_changes_nothing(rule, cut):
    plain, x = Cached(), torch.randn(2, 12, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(4))
    with torch.no_grad(), pa.inspect.thinned(plain, {("Cached", 0): rule}):
        whole = plain(x)
        starts = np.cumsum((0, *cut))
        steps = [plain(x[:, a:b], int(a)) for a, b in itertools.pairwise(starts)]
    torch.testing.assert_close(torch.cat(steps, dim=1), whole, rtol=0, atol=1e-13)
    with torch.no_grad():
        assert (plain(x) - whole).abs().max() > 0.1
    last = starts[-2]
    with torch.no_grad(), pa.inspect.capture(plain) as heads:
        plain(x[:, :last])
        plain(x[:, last:], int(last))
    late = pa.inspect.audit(heads, rule=rule).heads[0].error[-2 * cut[-1] :]  # the steps of the two sequences
    early = pa.inspect.audit(plain, x, rule).heads[0].error.reshape(2, 12)[:, last:].ravel()
    np.testing.assert_allclose(late, early, atol=1e-13)


def test_queries_of_another_sequence_stand_at_their_own_places():
    """Fewer queries than keys are the last tokens, but not in a layer whose name says that it is cross-attention."""

    class Decoder(nn.Module):
        def __init__(self, name):
            super().__init__()
            self.name = name
            self.add_module(name, Step())

        def forward(self, x, y):
            return self.get_submodule(self.name)(x, y)

    class Step(nn.Module):
        def forward(self, x, y):
            return functional.scaled_dot_product_attention(x, y, y)

    x, y = torch.randn(2, 1, 3, 4, dtype=torch.float64), torch.randn(2, 1, 9, 4, dtype=torch.float64)
    kept = {}
    for name in ("attn", "encoder_attn"):
        found = pa.inspect.audit(Decoder(name), (x, y), pa.inspect.Window(0, 1)).heads[0]
        by_hand = pa.inspect.KeepMask(np.eye(9, dtype=bool)[6:] if name == "attn" else np.eye(9, dtype=bool)[:3])
        wanted = pa.inspect.audit(Decoder(name), (x, y), by_hand).heads[0]
        np.testing.assert_array_equal(found.error, wanted.error)
        kept[name] = found.error
    assert (kept["attn"] != kept["encoder_attn"]).all()


@pytest.mark.parametrize("rule", [pa.inspect.Window(1, 3), pa.inspect.Window(2, 1)], ids=str)
def test_padding_before_a_sequence_is_no_sink(rule):
    plain, x = Cached(), torch.randn(1, 7, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    padded = torch.cat([torch.ones(1, 4, 6, dtype=torch.float64), x], dim=1)
    alone = pa.inspect.audit(plain, x, rule).heads[0]
    behind = pa.inspect.audit(plain, {"x": padded, "hidden": 4}, rule).heads[0]
    with torch.no_grad(), pa.inspect.capture(plain) as heads:
        plain(padded, hidden=4)
    for found in (behind, pa.inspect.audit(heads, rule=rule).heads[0]):
        for name in ("skipped", "mass_lost", "error"):
            np.testing.assert_allclose(getattr(found, name), getattr(alone, name), atol=1e-13)
    with torch.no_grad(), pa.inspect.thinned(plain, {("Cached", 0): rule}):
        torch.testing.assert_close(plain(padded, hidden=4)[:, 4:], plain(x), rtol=0, atol=1e-13)


@pytest.mark.parametrize("changed", [pa.inspect.thinned, pa.inspect.hardened])
def test_heads_that_cannot_be_replaced_are_named_even_if_no_other_can(changed):
    class ByHand(nn.Module):
        def forward(self, x):
            return torch.softmax(x @ x.mT, dim=-1) @ x

    plain, rules = ByHand(), {("ByHand", 0): pa.inspect.TopK(1)}
    with pytest.raises(pa.errors.UnsupportedError, match=r"did not run .* cannot be replaced.*no heads.*by hand"):  # noqa: SIM117
        with changed(plain, rules):
            plain(torch.randn(1, 3, 2))
