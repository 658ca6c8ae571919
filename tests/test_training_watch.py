"""Watching heads while a model is trained: the training does not change by a bit, and the log says what the heads do."""

import json
import random

import numpy as np
import pytest
import torch
from torch import nn

import partita as pa
from partita.errors import NonFiniteValueError, ShapeError, UnsupportedError
from partita.plots import plot_training


class Model(nn.Module):
    """Dropout, batch statistics, a buffer that every forward pass writes into, and noise of three generators."""

    def __init__(self):
        super().__init__()
        self.encoder = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.3, batch_first=True)
        self.norm = nn.BatchNorm1d(8)
        self.frozen = nn.Dropout(0.5).eval()
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("last", None)

    def forward(self, x):
        self.calls += 1
        self.last = x.detach().mean()
        noise = torch.randn(()) + random.random() + np.random.rand()
        return self.norm(self.frozen(self.encoder(x)).mean(dim=1) + 0.01 * noise)


def trained(watch_every=None, *, autocast=False, pending=False, steps=12):
    """The state after training, with or without a watch."""
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    model = Model()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    probe = torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(3))
    watch = None if watch_every is None else pa.inspect.TrainingWatch(model, probe, every=watch_every)
    for step in range(steps):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            if watch is not None and autocast:
                watch(step)  # inside: casts of weights are cached there
            loss = model(torch.randn(4, 5, 8)).square().mean() + model.calls * 0
            if watch is not None and pending:
                watch(step, loss=loss)  # between forward and backward
        loss.backward()
        optimizer.step()
        if watch is not None and not autocast and not pending:
            watch(step, loss=loss)
    state = {k: v.clone() for k, v in model.state_dict().items()}
    state |= {f"grad {n}": p.grad.clone() for n, p in model.named_parameters()}
    state["random"] = torch.tensor([torch.rand(()), random.random(), np.random.rand()], dtype=torch.float64)
    flags = [m.training for m in model.modules()]
    return state, flags, watch


@pytest.mark.parametrize("options", [{}, {"autocast": True}, {"pending": True}], ids=str)
def test_training_with_a_watch_gives_the_same_bits(options):
    plain, flags, _ = trained(**options)
    watched, same_flags, watch = trained(3, **options)
    assert plain.keys() == watched.keys() and len(watch.steps) == 4
    for name, tensor in plain.items():
        assert torch.equal(tensor, watched[name]), name
    assert flags == same_flags and flags[0] and not all(flags)  # the frozen module is still frozen


class Twice(nn.Module):
    """One attention layer, used twice: autocast casts its weights once, and adds up their gradients in few digits."""

    def __init__(self):
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True)

    def forward(self, x):
        return self.layer(self.layer(x))


def trained_under_autocast(watched=False, *, cache=True):
    """The weights after training, with a watch at three places of the block or without, and the cache's state in the probe."""
    torch.manual_seed(0)
    model, found = Twice(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def probe(m):
        found.append(torch.is_autocast_cache_enabled())
        m(torch.ones(1, 4, 8))

    watch = pa.inspect.TrainingWatch(model, probe, every=1)
    for step in range(4):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=cache):
            for part in range(2):
                if watched:
                    watch(3 * step + part)
                model(torch.randn(4, 5, 8)).square().mean().backward()
                assert torch.is_autocast_cache_enabled() == cache
            if watched:
                watch(3 * step + 2)
        optimizer.step()
    return [p.detach().clone() for p in model.parameters()], found


@pytest.mark.parametrize("cache", [True, False])
def test_the_cache_of_autocast_is_what_it_was(cache):
    plain, _ = trained_under_autocast(cache=cache)
    watched, found = trained_under_autocast(True, cache=cache)
    assert all(torch.equal(a, b) for a, b in zip(plain, watched, strict=True))
    assert found == [False] * 12  # older torch keeps casts that were made without gradients
    other, _ = trained_under_autocast(cache=not cache)
    assert not all(torch.equal(a, b) for a, b in zip(plain, other, strict=True))  # the cache decides about bits here


def test_a_probe_that_is_run_carelessly_changes_the_training():
    """The control: the same comparison notices a plain forward pass."""
    plain, _, _ = trained()
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    model = Model()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for _ in range(12):
        optimizer.zero_grad()
        model(torch.randn(4, 5, 8)).square().mean().backward()
        optimizer.step()
        with torch.no_grad():
            model(torch.ones(2, 5, 8))
    assert any(not torch.equal(plain[n], t) for n, t in model.state_dict().items())


def test_the_log_is_what_capture_and_read_say():
    torch.manual_seed(0)
    model, probe = Model(), torch.randn(2, 5, 8)
    watch = pa.inspect.TrainingWatch(model, probe, every=2, heads=[1])
    assert [watch(step, loss=torch.tensor([float(step)])) for step in range(4)] == [True, False, True, False]
    model.eval()
    with torch.no_grad(), pa.inspect.capture(model, heads=[1], stream=True) as heads:
        model(probe)
    expected = pa.inspect.read(heads, budget=0)["encoder.self_attn", 1]
    first, second = watch.rows()
    assert first["step"] == 0 and second["step"] == 2 and second["loss"] == 2.0
    assert second["layer"] == "encoder.self_attn" and second["head"] == 1
    for name in ("margin", "cells", "inverse_temperature", "null_leakage"):
        assert second[name] == expected.row()[name]
    assert watch.heads == (("encoder.self_attn", 1),) and watch.losses == (0.0, 2.0)
    assert np.array_equal(watch.series("encoder.self_attn", 1, "margin"), [first["margin"], second["margin"]])
    null = watch.series("encoder.self_attn", 1, "margin", null=True)
    assert np.array_equal(null, [first["null_margin"], second["null_margin"]])
    assert "2 steps" in repr(watch)


def test_the_log_is_saved_as_plain_json(tmp_path):
    _, _, watch = trained(4)
    data = json.loads(watch.save(tmp_path / "new" / "watch.json").read_text())
    assert data["format"] == "partita-training" and data["version"] == 1 and len(data["rows"]) == 3 * 2
    assert data["rows"][0]["step"] == 0 and data == watch.to_json()
    quiet = pa.inspect.TrainingWatch(Model(), torch.randn(1, 4, 8))
    quiet(0)
    assert quiet.to_json()["rows"][0]["loss"] is None


def test_memory_is_bounded():
    model = nn.MultiheadAttention(4, 1, batch_first=True)
    watch = pa.inspect.TrainingWatch(model, lambda m: m(*[torch.ones(1, 3, 4)] * 3), every=1, limit=8)
    for step in range(100):
        watch(step)
    assert len(watch.steps) <= 8 and watch.steps == tuple(range(0, 100, 16))


@pytest.mark.parametrize(("every", "start", "step"), [(50, 50, 100), (1, 1, 2), (3, 6, 7)])
def test_thinning_keeps_every_second_of_the_steps_that_were_recorded(every, start, step):
    """Also if all steps are odd multiples of `every`."""
    model = nn.MultiheadAttention(4, 2, batch_first=True)
    watch = pa.inspect.TrainingWatch(model, lambda m: m(*[torch.ones(1, 3, 4)] * 3), every=every, limit=4)
    due = [s for s in range(start, start + 40 * step, step) if s % every == 0]
    for s in range(start, start + 40 * step, step):
        watch(s)
    apart = due.index(watch.steps[1]) if len(watch.steps) > 1 else len(due)
    assert watch.steps == tuple(due[::apart]) and 2 <= len(watch.steps) <= 4


def test_probes_of_every_kind():
    model = nn.MultiheadAttention(4, 2, batch_first=True)
    x = torch.randn(1, 3, 4)
    for probe in ((x, x, x), [x, x, x], {"query": x, "key": x, "value": x}, lambda m: m(x, x, x)):
        watch = pa.inspect.TrainingWatch(model, probe)
        assert watch(0) and len(watch.rows()) == 2
    watch = pa.inspect.TrainingWatch(nn.TransformerEncoderLayer(4, 2, 8), torch.randn(3, 1, 4))
    assert watch(0) and len(watch.rows()) == 2


def test_a_model_that_diverges_leaves_gaps():
    model = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True)
    watch = pa.inspect.TrainingWatch(model, torch.randn(1, 3, 4), every=1)
    watch(0)
    with torch.no_grad():
        model.self_attn.in_proj_weight.fill_(torch.nan)
    assert watch(1, loss=float("nan"))
    assert np.isnan(watch.series("self_attn", 0, "margin")).tolist() == [False, True]
    assert watch.to_json()["rows"][-1]["margin"] is None and model.training
    with pytest.raises(NonFiniteValueError):
        pa.inspect.TrainingWatch(model, torch.randn(1, 3, 4))(0)


def test_mistakes_are_named_and_everything_is_put_back():
    model, probe = Model(), torch.randn(2, 5, 8)
    for options, words in (
        ({"every": 0}, "every is 0"),
        ({"limit": 1}, "limit is 1"),
        ({"every": 2.5}, r"every is 2\.5"),
        ({"budget": "a"}, "budget is 'a'; expected a whole number ≥ 0"),
    ):
        with pytest.raises(UnsupportedError, match=words):
            pa.inspect.TrainingWatch(model, probe, **options)
    with pytest.raises(UnsupportedError, match="probe is of type int"):
        pa.inspect.TrainingWatch(model, 3)
    with pytest.raises(UnsupportedError, match="model is of type int"):
        pa.inspect.TrainingWatch(3, probe)
    watch = pa.inspect.TrainingWatch(model, probe, every=1)
    watch(5)
    with pytest.raises(UnsupportedError, match="step is 5 after 5"):
        watch(5)
    with pytest.raises(UnsupportedError, match=r"step is 1\.5"):
        watch(1.5)
    with pytest.raises(ShapeError, match=r"loss is Tensor of shape \(2,\)"):
        watch(6, loss=torch.ones(2))
    with pytest.raises(UnsupportedError, match="figure is 'mood'"):
        watch.series("encoder.self_attn", 0, "mood")
    with pytest.raises(UnsupportedError, match="no head"):
        watch.series("encoder", 0, "margin")
    with pytest.raises(UnsupportedError, match="no attention was recorded"):
        pa.inspect.TrainingWatch(nn.Linear(2, 2), torch.ones(1, 2))(0)
    state = torch.get_rng_state()
    with pytest.raises(RuntimeError):
        pa.inspect.TrainingWatch(model, torch.ones(1, 2, 3))(0)  # the probe does not fit
    assert torch.equal(torch.get_rng_state(), state) and model.training and torch.is_grad_enabled()
    assert float(model.calls) == 0 and model.last is None and torch.is_autocast_cache_enabled()


def test_the_picture(tmp_path):
    _, _, watch = trained(2)
    figure = plot_training(watch, tmp_path / "watch.svg")
    titles = [panel.get_title() for panel in figure.axes]
    assert titles == ["loss", "cells", "margin", "inverse temperature"] and (tmp_path / "watch.svg").exists()
    lines = {line.get_label(): line for line in figure.axes[2].get_lines()}
    assert np.array_equal(lines["encoder.self_attn:0"].get_ydata(), watch.series("encoder.self_attn", 0, "margin"))
    assert np.array_equal(lines["encoder.self_attn:0"].get_xdata(), watch.steps)
    silent = pa.inspect.TrainingWatch(Model(), torch.randn(1, 4, 8), every=1)
    with pytest.raises(UnsupportedError, match="nothing was recorded"):
        plot_training(silent)
    silent(0)
    other = plot_training(silent, figures=["leakage"])
    assert [panel.get_title() for panel in other.axes] == ["leakage"]  # no loss was given
    with pytest.raises(UnsupportedError, match="figure is 'mood'"):
        plot_training(watch, figures=["mood"])
    with pytest.raises(UnsupportedError, match="ends in"):
        plot_training(watch, tmp_path / "watch.txt")
    with pytest.raises(UnsupportedError, match="watch is int"):
        plot_training(3)
    assert plot_training(silent, figures=["on_previous"]).axes  # a field of Roles


@pytest.mark.parametrize("layers", [1, 3, 4])
def test_random_heads_of_few_layers_have_a_line_each(layers):
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), layers)
    watch = pa.inspect.TrainingWatch(model, torch.randn(2, 5, 8), every=1)
    watch(0)
    watch(1)
    figure = plot_training(watch, figures=["margin"])
    dotted = [line for line in figure.axes[0].get_lines() if line.is_dashed()]
    names = list(dict.fromkeys(layer for layer, _ in watch.heads))
    nulls = [np.mean([watch.series(n, h, "margin", null=True) for h in (0, 1)], axis=0) for n in names]
    expected = nulls if layers == 3 else [np.mean(nulls, axis=0)]
    assert np.allclose([line.get_ydata() for line in dotted], expected)
    labels = [text.get_text() for text in figure.legends[0].get_texts()]
    assert [t for t in labels if t.startswith("random")] == (
        [f"random heads, {name}" for name in names] if layers == 3 else ["random heads, mean"]
    )
    assert len({line.get_color() for line in dotted}) == len(dotted)
