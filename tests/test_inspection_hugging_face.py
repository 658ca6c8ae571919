"""Hugging Face models: captured through their own attention, bits unchanged. Skipped where transformers is not installed."""

import warnings

import numpy as np
import pytest
import torch

import partita as pa

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.filterwarnings("ignore")


def bert():
    sizes = {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 64,
        "vocab_size": 50,
    }
    return transformers.BertModel(transformers.BertConfig(**sizes))


def llama():
    sizes = {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 64,
        "vocab_size": 50,
    }
    return transformers.LlamaModel(transformers.LlamaConfig(num_key_value_heads=2, **sizes))


def gpt2():
    return transformers.GPT2Model(
        transformers.GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=50, n_positions=64)
    )


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("make", [bert, llama, gpt2])
def test_what_is_recorded_reproduces_the_models_own_attention_weights(make, implementation):
    torch.manual_seed(0)
    model = make().eval()
    model.set_attn_implementation(implementation)
    ids = torch.randint(0, 50, (2, 9), generator=torch.Generator().manual_seed(1))
    mask = torch.ones(2, 9, dtype=torch.long)
    mask[1, 6:] = 0
    with torch.no_grad():
        before = model(input_ids=ids, attention_mask=mask).last_hidden_state
        with pa.inspect.capture(model) as heads:
            after = model(input_ids=ids, attention_mask=mask).last_hidden_state
        model.set_attn_implementation("eager")
        truth = model(input_ids=ids, attention_mask=mask, output_attentions=True).attentions
    assert torch.equal(before, after) and len(heads) == 8 and len(heads.layers) == 2
    for number, layer in enumerate(heads.layers):
        for head in range(4):
            for element, snapshot in enumerate(heads[layer, head].snapshots):
                assert len(snapshot.counted) == (9, 6)[element]  # padding is no query
                scores = snapshot.scores(snapshot.counted)
                e = np.exp(scores - scores.max(axis=1, keepdims=True))
                expected = truth[number][element, head].numpy()[snapshot.counted]
                assert np.abs(e / e.sum(axis=1, keepdims=True) - expected).max() < 1e-5
    assert len(pa.inspect.read(heads).heads) == 8
