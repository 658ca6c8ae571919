"""What people do first with `pa.inspect` and `partita inspect`, and what they are told."""

import math
import sys

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

import partita as pa
from partita.cli import main
from partita.errors import NonFiniteValueError, NotDeterministicError, ShapeError, UnsupportedError
from partita.inspection.eager_attention import advice_on_eager


def encoder(dropout: float = 0.0) -> nn.TransformerEncoder:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=dropout, batch_first=True)
    return nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)


class Eager(nn.Module):
    """Attention as Hugging Face models write it with attn_implementation="eager"."""

    def __init__(self, cap: float | None = None, heads: int = 2, dim: int = 8):
        super().__init__()
        torch.manual_seed(0)
        self.cap, self.heads, self.dim = cap, heads, dim
        self.qkv = nn.Linear(heads * dim, 3 * heads * dim)

    def forward(self, x, mask=None):
        q, k, v = self.qkv(x).reshape(*x.shape[:2], 3, self.heads, self.dim).permute(2, 0, 3, 1, 4)
        scores = torch.matmul(q, k.transpose(2, 3)) * 0.25
        if self.cap is not None:
            scores = torch.tanh(scores / self.cap) * self.cap
        if mask is not None:
            scores = scores + mask
        self.weights = functional.softmax(scores, dim=-1, dtype=torch.float32).to(q.dtype)
        return torch.matmul(functional.dropout(self.weights, p=0.1, training=self.training), v)


def from_transformers(**options) -> nn.Module:
    """The layer, of a class that says that it is from the transformers package."""
    return type("EagerAttention", (Eager,), {"__module__": "transformers.models.eager"})(**options)


class Config:
    _attn_implementation = "eager"


def test_eager_attention_of_a_hugging_face_model_is_captured_as_it_is_computed():
    model, x = from_transformers().eval(), torch.randn(2, 5, 16, generator=torch.Generator().manual_seed(1))
    mask = torch.full((5, 5), torch.finfo(torch.float32).min).triu(1)[None, None]
    with torch.no_grad():
        before = model(x, mask)
        with pa.inspect.capture(model) as heads:
            assert torch.equal(model(x, mask), before)
    assert len(heads) == 2
    for record in heads:
        for element, snapshot in enumerate(record.snapshots):
            scores = snapshot.scores(np.arange(5))
            weights = np.exp(scores) / np.exp(scores).sum(axis=1, keepdims=True)
            assert np.abs(weights - model.weights[element, record.head].numpy()).max() < 1e-6
            assert snapshot.scale == 0.25 and not np.triu(weights, 1).any()
    assert len(pa.inspect.read(heads).heads) == 2


def test_eager_attention_that_is_no_plain_softmax_is_refused_with_advice():
    model, x = from_transformers(cap=5.0).eval(), torch.ones(1, 5, 16)
    model.config = Config()
    with pa.inspect.capture(model) as heads:
        model(x)
    assert len(heads) == 0
    with pytest.raises(UnsupportedError, match=r'set_attn_implementation\("sdpa"\)'):
        pa.inspect.read(heads)
    with pytest.raises(UnsupportedError, match=r'set_attn_implementation\("sdpa"\)'):
        pa.inspect.harden(model, lambda model: model(x).mean())
    model.config.attn_logit_softcapping = 5.0  # "sdpa" would not cap the scores
    assert 'set_attn_implementation("flex_attention")' in advice_on_eager(model)
    assert advice_on_eager(encoder()) == "" == advice_on_eager(None)  # other models get other advice
    model._supports_sdpa = False
    assert "readers=" in advice_on_eager(model) and "set_attn" not in advice_on_eager(model)
    model._supports_flex_attn = True  # as Gemma 2
    assert 'set_attn_implementation("flex_attention")' in advice_on_eager(model)


def test_a_reader_of_a_hugging_face_layer_replaces_what_is_recognised():
    model, x = nn.Sequential(from_transformers()).eval(), torch.ones(1, 5, 16)
    reader = lambda module, args, kwargs, output: dict.fromkeys(("query", "key", "value"), output)  # noqa: E731
    with pa.inspect.capture(model, readers={"0": reader}) as heads:
        model(x)
    assert [len(record.snapshots) for record in heads] == [1, 1]


@pytest.mark.parametrize("options", [{"layers": "decoder.*"}, {"heads": [9]}])
def test_heads_that_ran_are_named_if_none_was_chosen(options):
    model = encoder().eval()
    with pa.inspect.capture(model, **options) as heads:
        model(torch.randn(1, 4, 16))
    with pytest.raises(UnsupportedError, match=r"match no head of the model.*layers\.0\.self_attn \(2 heads\)"):
        pa.inspect.read(heads)


@pytest.mark.parametrize("given", [encoder(), nn.Sequential(nn.Linear(2, 2)), nn.ReLU(), 3, ["a"], None], ids=str)
def test_reading_a_model_without_running_it_says_how(given):
    with pytest.raises(UnsupportedError, match=r"heads is .*of type .*with pa\.inspect\.capture\(model\) as heads"):
        pa.inspect.read(given)


@pytest.mark.parametrize("read", [pa.inspect.view, pa.inspect.pattern])
def test_a_record_or_all_heads_instead_of_one_sequence_says_what_to_take(read):
    model = encoder().eval()
    with pa.inspect.capture(model) as heads:
        model(torch.randn(1, 4, 16))
    record = next(iter(heads))
    for given in (record, heads, [record], 3):
        kind = type(given).__name__
        with pytest.raises(UnsupportedError, match=rf"snapshot is of type {kind}; .*record\.snapshots\[0\]"):
            read(given)
    read(record.snapshots[0])


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"heads": 3}, r"heads is 3; expected a list of whole numbers ≥ 0"),
        ({"heads": ["a"]}, "heads contains 'a'"),
        ({"heads": "ab"}, "heads is 'ab'"),
        ({"heads": [True]}, "heads contains True"),
        ({"layers": 3}, "layers is 3; expected a pattern"),
        ({"layers": [3]}, r"layers is \[3\]"),
        ({"batch": 1.5}, "batch is 1.5; expected a whole number"),
        ({"batch": "a"}, "batch is 'a'"),
        ({"tokens": True}, "tokens is True"),
        ({"tokens": 2.5}, "tokens is 2.5"),
        ({"max_bytes": "x"}, "max_bytes is 'x'"),
        ({"seed": "a"}, "seed is 'a'"),
        ({"readers": 3}, "readers is 3"),
    ],
    ids=str,
)
def test_options_of_capture_are_checked(given, words):
    with pytest.raises(pa.PartitaError, match=words), pa.inspect.capture(encoder(), **given):
        pass


def test_numbers_of_numpy_are_numbers():
    model = encoder().eval()
    with pa.inspect.capture(
        model, heads=np.array([1]), tokens=np.int64(3), batch=np.int32(1), layers=("layers.*",)
    ) as few:
        model(torch.randn(2, 4, 16))
    (record,) = few
    assert record.head == 1 and len(record.snapshots) == 1 and len(record.snapshots[0].queries) == 3


def test_one_record_can_be_read_alone():
    model = encoder().eval()
    with pa.inspect.capture(model) as heads:
        model(torch.randn(1, 4, 16))
    assert [head.head for head in pa.inspect.read(next(iter(heads))).heads] == [0]


@pytest.mark.parametrize(
    ("loss", "error", "words"),
    [
        (
            lambda y: y.square().mean(dim=(1, 2)),
            ShapeError,
            r"returned Tensor of shape \(2,\); expected one number.*mean",
        ),
        (lambda y: y.detach().numpy(), ShapeError, r"returned ndarray of shape \(2, 4, 16\)"),
        (lambda y: None, ShapeError, "returned NoneType; expected one number"),
        (lambda y: {"loss": y.mean()}, ShapeError, "returned dict"),
        (lambda y: y.mean() * torch.nan, NonFiniteValueError, "is nan"),
    ],
)
def test_a_loss_that_is_no_number_is_named(loss, error, words):
    x = torch.randn(2, 4, 16)
    with pytest.raises(error, match=words):
        pa.inspect.harden(encoder().eval(), lambda model: loss(model(x)))
    with pytest.raises(UnsupportedError, match="loss is Tensor; expected a function"):
        pa.inspect.harden(encoder().eval(), x)


@pytest.mark.parametrize(
    "loss", [lambda y: y.mean(), lambda y: y.mean().item(), lambda y: y.detach().mean().numpy()[None]]
)
def test_numbers_of_every_kind_are_losses(loss):
    x = torch.randn(2, 4, 16)
    heads = [("layers.0.self_attn", 0)]
    assert len(pa.inspect.harden(encoder().eval(), lambda model: loss(model(x)), heads=heads).heads) == 1


def test_dropout_that_is_on_is_named_by_every_command_that_needs_a_function():
    x = torch.randn(2, 4, 16)
    with pytest.raises(NotDeterministicError, match=r"dropout is on in 'layers\.0\.self_attn' .*model\.eval\(\)"):
        pa.inspect.harden(encoder(0.1), lambda model: model(x).square().mean())
    quiet = pa.inspect.harden(encoder(0.0), lambda model: model(x).square().mean())  # train mode alone does no harm
    assert len(quiet.heads) == 2
    model = nn.Sequential(nn.Linear(2, 3), nn.Sequential(nn.Tanh(), nn.Dropout(0.2)), nn.Linear(3, 1))
    with pytest.raises(NotDeterministicError, match=r"Dropout is on in '1\.1' \(Dropout, p = 0\.2\): call \.eval\(\)"):
        pa.compile(model, pa.Box([-1, -1], [1, 1]), tolerance=0.1)


MINE = """
import torch
from neighbour import WIDTH
from torch import nn

class Tokens(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(9, WIDTH)
        self.attend = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
    def forward(self, ids):
        x = self.embed(ids)
        return self.attend(x, x, x, need_weights=False)[0]

def encoder():
    torch.manual_seed(0)
    return Tokens()

built = encoder()
ids = torch.tensor([[1, 2, 3]])
"""


@pytest.fixture
def here(tmp_path, monkeypatch, capsys):
    """`partita inspect` as typed in a folder above the user's file."""
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "mine.py").write_text(MINE)
    (tmp_path / "code" / "neighbour.py").write_text("WIDTH = 8\n")
    np.save(tmp_path / "float.npy", np.array([[1.0, 2.0]]))
    np.save(tmp_path / "ids.npy", np.array([[1, 2]]))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = set(sys.modules)

    def run(*arguments):
        with pytest.raises(SystemExit) as stop:
            main(["inspect", *arguments])
        return stop.value.code, *capsys.readouterr()

    yield run
    for name in set(sys.modules) - before:
        if getattr(sys.modules[name], "__file__", None) and str(tmp_path) in str(sys.modules[name].__file__):
            del sys.modules[name]


@pytest.mark.parametrize(
    "arguments",
    [
        ("code/mine.py:encoder", "--inputs", "ids.npy"),
        ("./code/mine.py:encoder", "--inputs", "code/mine.py:ids"),
        ("code/mine.py:built", "--inputs", "ids.npy"),
        ("code/mine.py:Tokens", "--inputs", "ids.npy"),
    ],
)
def test_the_command_takes_a_file_and_a_name_in_it(here, arguments):
    code, printed, errors = here(*arguments, "--out", "report", "--no-figures")
    assert code == 0, errors
    assert "attend:1" in printed


def test_a_file_of_the_name_of_a_module_does_not_replace_it(here, tmp_path):
    (tmp_path / "code" / "random.py").write_text((tmp_path / "code" / "mine.py").read_text())
    code, _, errors = here("code/random.py:encoder", "--inputs", "code/random.py:ids", "--out", "r", "--no-figures")
    assert code == 0, errors
    import random

    assert random.random() < 1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("code/mien.py:encoder", "--inputs", "ids.npy"), "there is no file"),
        (("code/mine.py:encodr", "--inputs", "ids.npy"), "has no function 'encodr'. It has Tokens, encoder"),
        (("code/mine:encoder", "--inputs", "ids.npy"), "For a file, write code/mine.py:NAME"),
        (("code/mine.py", "--inputs", "ids.npy"), "path/to/file.py:FUNCTION"),
        (
            ("code/mine.py:encoder", "--inputs", "float.npy"),
            "embedding 'embed' are float64; expected integers. Use ids.long()",
        ),
    ],
)
def test_mistakes_on_the_command_line_get_one_line(here, arguments, words):
    code, _, errors = here(*arguments, "--out", "report")
    assert code == 64 and words in errors and "Traceback" not in errors


class Dropping(nn.Module):
    """Dropout that no module shows, as GPT-style code writes it."""

    def __init__(self):
        super().__init__()
        self.project = nn.Linear(8, 24)

    def forward(self, x):
        q, k, v = self.project(x)[:, None].chunk(3, dim=-1)
        return functional.scaled_dot_product_attention(q, k, v, dropout_p=0.5 if self.training else 0.0)


def test_dropout_that_no_module_shows_is_named():
    model, x = Dropping().train(), torch.randn(2, 6, 8)

    def loss(model):
        return model(x).square().mean()

    with pytest.raises(NotDeterministicError, match=r"returned .* and then .*model\.eval\(\)"):
        pa.inspect.harden(model, loss)
    words = r"dropout is on in the attention of 'Dropping' \(dropout_p = 0\.5\)"
    with pytest.warns(UserWarning, match=words) as told, pa.inspect.capture(model) as heads:
        model(x)
        model(x)
    assert len(told) == 1 and len(heads) == 1
    with pytest.warns(UserWarning, match="the audited heads are random"):
        pa.inspect.audit(model, x, pa.inspect.TopK(2))
    model.eval()
    pa.inspect.audit(model, x, pa.inspect.TopK(2), loss)
    with pytest.raises(UnsupportedError, match=r"loss\(model\) ran no attention"):
        pa.inspect.audit(model, x, pa.inspect.TopK(2), lambda other: 1.0)


def test_readers_and_shapes_are_checked():
    q, k, v = torch.randn(3, 1, 2, 5, 4)
    for wrong in ((q, k[..., :3], v), (q, k, v[:, :, :4])):
        with pytest.raises(ShapeError, match="record got query"), pa.inspect.capture():
            pa.inspect.record(*wrong)
    model, x = Dropping().eval(), torch.randn(2, 6, 8)
    for name, told, words in (
        ("zzz", 3, "the pattern 'zzz' of readers matches no module"),
        ("project", 3, "returned int"),
        ("project", (1, 2), "a list with int"),
    ):
        readers = {name: lambda *_, told=told: told}
        with pytest.raises(UnsupportedError, match=words), pa.inspect.capture(model, readers=readers):
            model(x)
    with pa.inspect.capture() as heads:
        pa.inspect.record(q, k, v)
    with pytest.raises(UnsupportedError, match=r"expected report\[layer, head\], one of \('attention', 0\)"):
        pa.inspect.read(heads)[0]
    assert repr(heads["attention", 0].snapshots[0]) == "Snapshot(5 queries × 5 keys, R^4, float32)"
    with pytest.raises(UnsupportedError, match="thresholds is empty"):
        pa.inspect.calibrate(heads, error=0.1, thresholds=[])


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (
            {"attn_mask": torch.zeros(5, 9)},
            r"attn_mask has shape \(5, 9\); expected one that broadcasts to \(2, 4, 6, 9\)",
        ),
        ({"attn_mask": torch.zeros(7, 1, 1, 9)}, "broadcasts"),
        ({"attn_mask": torch.zeros(3, 4, 6, 9)}, "broadcasts"),
        ({"attn_mask": torch.zeros(0, 9)}, "broadcasts"),
        ({"attn_mask": torch.zeros(6, 9, dtype=torch.complex64)}, "attn_mask is complex64; expected real numbers"),
        ({"attn_mask": True}, "attn_mask is of type bool; expected a tensor"),
        ({"slopes": True}, "slopes is of type bool"),
        ({"slopes": torch.ones(4, dtype=torch.bool)}, "slopes is bool; expected real numbers"),
        ({"slopes": torch.tensor([math.nan, 1, 1, 1])}, "slopes contain NaN or infinity"),
        ({"enable_gqa": True, "key": torch.randn(2, 3, 9, 3), "value": torch.randn(2, 3, 9, 2)}, "must divide"),
        ({"scale": "a"}, "scale is 'a'; expected a finite number"),
        ({"scale": 10**400}, "expected a finite number"),
        ({"scale": math.nan}, "scale is nan"),
        ({"window": 1.5}, "window is 1.5; expected an integer from 1"),
        ({"window": 0}, "window is 0"),
        ({"window": True}, "window is True"),
        ({"is_causal": np.zeros(3)}, "is_causal is array.*expected True or False"),
        ({"enable_gqa": "yes"}, "enable_gqa is 'yes'"),
        ({"output": True}, "output of pa.inspect.record is bool"),
        ({"query": torch.zeros(())}, r"record got query \(\)"),
    ],
    ids=str,
)
@pytest.mark.parametrize("stream", [False, True])
def test_what_record_gets_is_checked(given, words, stream):
    arrays = {"query": torch.randn(2, 4, 6, 3), "key": torch.randn(2, 4, 9, 3), "value": torch.randn(2, 4, 9, 2)}
    with pytest.raises(pa.PartitaError, match=words), pa.inspect.capture(stream=stream):
        pa.inspect.record(**{**arrays, **given})


@pytest.mark.parametrize("factor", [None, 10**400, np.array(1), -1, math.nan, "2"], ids=str)
def test_factors_are_checked(factor):
    with (
        pytest.raises(pa.PartitaError, match=r"factor is .*; expected a number ≥ 0"),
        pa.inspect.hardened(nn.Linear(2, 2), [("Linear", 0)], factor=factor),
    ):
        raise AssertionError("refused before the model runs")


@pytest.mark.parametrize(
    ("given", "words"), [({"budget": None}, "budget is None"), ({"reach": -1}, "reach is -1"), ({"seed": 1.5}, "seed")]
)
def test_options_of_read_are_checked(given, words):
    with pa.inspect.capture() as heads:
        pa.inspect.record(*torch.randn(3, 1, 2, 5, 4))
    with pytest.raises(pa.PartitaError, match=words):
        pa.inspect.read(heads, **given)
    for index in (([], 0), ("attention", np.zeros(3)), ("attention", np.array(1))):
        with pytest.raises(pa.PartitaError, match="expected heads"):
            heads[index]
