"""Train a small language model on the text of these docs, on one core, and read its heads.

    python examples/inspect_language_model.py [--out FOLDER] [--text FOLDER] [--copies 0.5] [--quick]
    python examples/inspect_language_model.py --weights FOLDER/language_model.safetensors

The model predicts the next character. It is a decoder like those of current language models: rotary positions,
grouped-query attention (6 heads share 2 key heads), RMSNorm, four layers; 840,000 parameters. It is trained on
README.md and docs/*.md of this checkout, or of --text, in five minutes on one core. The last tenth of every page is
held out. Half of the training pieces repeat their beginning, so that copying is worth learning; --copies changes this
share. --out saves the weights and writes a page about the heads. --weights loads saved weights instead of training.
--quick trains a single layer for 20 steps, as the tests do.
"""

import argparse
import math
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn import functional

import partita as pa
from partita.plots import plot_training
from partita.plots.model_page import write_inspection

CONTEXT, STEPS = 256, 1800


class Attention(nn.Module):
    """Causal attention with rotary positions. Several query heads share one key head."""

    def __init__(self, width: int, heads: int, key_heads: int, dim: int) -> None:
        super().__init__()
        self.dim = dim
        self.queries = nn.Linear(width, heads * dim, bias=False)
        self.keys = nn.Linear(width, key_heads * dim, bias=False)
        self.values = nn.Linear(width, key_heads * dim, bias=False)
        self.out = nn.Linear(heads * dim, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        projections = (self.queries, self.keys, self.values)
        q, k, v = (f(x).unflatten(-1, (-1, self.dim)).transpose(1, 2) for f in projections)
        mixed = functional.scaled_dot_product_attention(rotate(q), rotate(k), v, is_causal=True, enable_gqa=True)
        return self.out(mixed.transpose(1, 2).flatten(-2))


def rotate(x: torch.Tensor) -> torch.Tensor:
    """Turn the pairs of coordinates in the first half of every vector by its position times their speed."""
    pairs = x.shape[-1] // 4
    angles = torch.arange(x.shape[-2])[:, None] * 1000.0 ** (-torch.arange(pairs) / pairs)
    a, b, unturned = x.split([pairs, pairs, 2 * pairs], dim=-1)
    return torch.cat([a * angles.cos() - b * angles.sin(), a * angles.sin() + b * angles.cos(), unturned], dim=-1)


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.attention = Attention(width, heads=6, key_heads=2, dim=32)
        self.before, self.between = nn.RMSNorm(width), nn.RMSNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.before(x))
        return x + self.mlp(self.between(x))


class LanguageModel(nn.Module):
    """Logits of the next character at every position."""

    def __init__(self, characters: str, width: int = 128, layers: int = 4) -> None:
        super().__init__()
        self.number = {c: i for i, c in enumerate(characters)}
        self.embedding = nn.Embedding(len(characters), width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.norm = nn.RMSNorm(width)
        self.logits = nn.Linear(width, len(characters), bias=False)
        for name, weight in self.named_parameters():
            if weight.dim() == 2:
                nn.init.normal_(weight, std=0.02 if name.startswith("embedding") else 1 / math.sqrt(weight.shape[1]))
            if name.endswith(("out.weight", "mlp.2.weight", "logits.weight")):
                nn.init.zeros_(weight)  # so that every block starts as the identity

    def ids(self, text: str) -> torch.Tensor:
        return torch.tensor([self.number.get(c, 0) for c in text])

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        return self.logits(self.norm(x))


def texts(root: Path) -> tuple[str, str]:
    """Training text and held-out text: the first nine tenths of every page, and the last tenth."""
    pages = [p.read_text(encoding="utf-8") for p in [root / "README.md", *sorted((root / "docs").glob("*.md"))]]
    cuts = [len(page) * 9 // 10 for page in pages]
    return "".join(p[:c] for p, c in zip(pages, cuts)), "".join(p[c:] for p, c in zip(pages, cuts))


def bits_of_counts(text: str, held_out: str, length: int) -> float:
    """Bits per character of a model that counts strings of `length` characters, backing off to shorter ones (Witten and Bell)."""
    counts: dict[str, Counter[str]] = {}
    for before in range(length):
        for i in range(before, len(text)):
            counts.setdefault(text[i - before : i], Counter())[text[i]] += 1
    total = 0.0
    for i, character in enumerate(held_out):
        p = 1 / len(counts[""])
        for before in range(min(length, i + 1)):
            if seen := counts.get(held_out[i - before : i]):
                p = (seen[character] + len(seen) * p) / (seen.total() + len(seen))
        total -= math.log2(p)
    return total / len(held_out)


class Muon(torch.optim.Optimizer):
    """Optimizer by K. Jordan whose steps are orthogonal matrices. It needs far fewer steps here than Adam."""

    def __init__(self, weights: Iterable[nn.Parameter], lr: float) -> None:
        super().__init__(weights, {"lr": lr})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for weight in group["params"]:
                mean = self.state[weight].setdefault("mean", torch.zeros_like(weight))
                mean.lerp_(weight.grad, 0.05)
                step = weight.grad.lerp(mean, 0.95)
                wide = step.mT if step.shape[0] > step.shape[1] else step
                wide = wide / wide.norm().clamp_min(1e-7)
                for _ in range(5):  # Newton and Schulz: singular values go to about 1
                    square = wide @ wide.mT
                    wide = 3.4445 * wide + (2.0315 * square @ square - 4.775 * square) @ wide
                size = max(1.0, step.shape[0] / step.shape[1]) ** 0.5
                weight -= group["lr"] * size * (wide.mT if step.shape[0] > step.shape[1] else wide)


def train(
    model: LanguageModel,
    ids: torch.Tensor,
    steps: int,
    copies: float = 0.5,
    watch: Callable[..., object] | None = None,
) -> None:
    """1024 characters per step, in pieces that grow from CONTEXT/4 to CONTEXT. Some pieces repeat their beginning."""
    matrices = [p for name, p in model.named_parameters() if p.dim() == 2 and name.startswith("blocks")]
    others = [p for name, p in model.named_parameters() if p.dim() != 2 or not name.startswith("blocks")]
    optimizers = [Muon(matrices, lr=0.03), torch.optim.AdamW(others, lr=0.02, betas=(0.9, 0.95), weight_decay=0.0)]
    schedules = [
        torch.optim.lr_scheduler.LambdaLR(o, lambda step: min(20 * (step + 1) / steps, 1 - step / steps))
        for o in optimizers
    ]
    for step in range(steps):
        length = CONTEXT // 4 if 2 * step < steps else CONTEXT // 2 if 4 * step < 3 * steps else CONTEXT
        rows = (1024 // length, 1)
        periods = torch.randint(length // 4, length // 2, rows)
        periods[torch.rand(rows) >= copies] = length + 1
        starts = torch.randint(len(ids) - length, rows)
        batch = ids[starts + torch.arange(length + 1) % periods]
        loss = functional.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer, schedule in zip(optimizers, schedules):
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
        if watch is not None:
            watch(step + 1, loss=loss)
        if (step + 1) % 100 == 0:
            print(f"  step {step + 1}: {loss.item() / math.log(2):.2f} bits per character")


def bits(model: LanguageModel, pieces: torch.Tensor) -> np.ndarray:
    """Bits of each character but the first, given those before it in its piece: `(pieces, length − 1)`."""
    with torch.no_grad():
        losses = [functional.cross_entropy(model(p[:, :-1]).mT, p[:, 1:], reduction="none") for p in pieces.split(16)]
    return torch.cat(losses).numpy() / math.log(2)


def read(model: LanguageModel, pieces: torch.Tensor) -> pa.inspect.CapturedHeads:
    """Read every head on held-out text, then on repeated text, where induction heads would show."""
    with torch.no_grad(), pa.inspect.capture(model) as heads:
        model(pieces)
    print(f"\n{len(pieces)} pieces of held-out text\n{pa.inspect.read(heads)}")
    half = CONTEXT // 2
    random = torch.randint(len(model.number), (len(pieces), half))
    print(f"\n{half} characters, and then the same again: bits per character, and the heads with the most induction")
    for name, once in (("random characters", random), ("held-out text", pieces[:, :half])):
        twice = once.repeat(1, 2)
        cost = bits(model, twice)
        with torch.no_grad(), pa.inspect.capture(model, stream=True) as copying:
            model(twice)
        most = sorted(pa.inspect.read(copying).heads, key=lambda h: -h.roles.induction)[:3]
        shown = ", ".join(f"{h.name} {h.roles.induction:.2f} ({h.null_roles.induction:.2f})" for h in most)
        print(
            f"  {name}: {cost[:, : half - 1].mean():.2f} the first time, {cost[:, half:].mean():.2f} the second; {shown}"
        )
    return heads


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--text", type=Path, default=Path(__file__).parents[1], help="a folder with README.md and docs")
    parser.add_argument("--weights", type=Path, help="load weights that --out saved, instead of training")
    parser.add_argument("--copies", type=float, default=0.5, help="share of the pieces that repeat their beginning")
    parser.add_argument("--out", type=Path, help="where to write the weights and the page")
    parser.add_argument("--quick", action="store_true", help="train a single layer for 20 steps")
    options = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    text, held_out = texts(options.text)
    if options.quick:
        text, held_out = text[:40_000], held_out[: 4 * CONTEXT]
    model = LanguageModel("".join(sorted(set(text))), layers=1 if options.quick else 4)
    held_out = "".join(c for c in held_out if c in model.number)
    pieces = model.ids(held_out)[: len(held_out) // CONTEXT * CONTEXT].view(-1, CONTEXT)
    probe = pieces[:8, : CONTEXT // 2].repeat(1, 2)
    watch = pa.inspect.TrainingWatch(model, probe, every=10 if options.quick else 50)
    if options.weights:
        model.load_state_dict(load_file(options.weights))
    else:
        print(f"training on {len(text):,} characters")
        train(model, model.ids(text), 20 if options.quick else STEPS, options.copies, watch)
    model.eval()
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters; bits per character of held-out text:")
    print(f"  the model {bits(model, pieces).mean():.2f}")
    for length in (1, 3, 5):
        print(f"  counts of {length} characters {bits_of_counts(text, held_out, length):.2f}")
    heads = read(model, pieces[::12])
    if options.out:
        options.out.mkdir(parents=True, exist_ok=True)
        save_file(model.state_dict(), options.out / "language_model.safetensors")
        page = write_inspection(heads, options.out, title="A language model of these docs")
        if watch.steps:
            plot_training(watch, options.out / "training.svg", figures=("on_previous", "induction"))
        print(f"\nwrote {options.out / 'language_model.safetensors'}, training.svg and {page.files[0]}")


if __name__ == "__main__":
    main()
