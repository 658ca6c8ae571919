"""Train a small Transformer on scikit-learn's digits and read its heads as partitions: before training, after, and hardened.

    python examples/inspect_digits.py [--epochs 12] [--out FOLDER]

Every image is 16 patches of 2 × 2 pixels. The model has two layers of four heads. 12 epochs take ten seconds on one
core. --out writes a page about the trained model (index.html, report.json, heads.csv, heads.svg, heads.png).
"""

import argparse
import copy
from pathlib import Path

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import nn

import partita as pa
from partita.plots.model_page import write_inspection


class DigitTransformer(nn.Module):
    """Patches with learned positions, two encoder layers, the mean over the tokens, ten classes."""

    def __init__(self, width: int = 32, heads: int = 4) -> None:
        super().__init__()
        self.patch = nn.Linear(4, width)
        self.position = nn.Parameter(0.1 * torch.randn(16, width))
        layer = nn.TransformerEncoderLayer(width, heads, 2 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.classes = nn.Linear(width, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        patches = images.unflatten(-1, (4, 2)).unflatten(-3, (4, 2)).movedim(-2, -3).flatten(-2).flatten(1, 2)
        return self.classes(self.encoder(self.patch(patches) + self.position).mean(dim=1))


def digits() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Images in [0, 1] and labels, for training and for testing."""
    data = load_digits()
    order = np.random.default_rng(0).permutation(len(data.target))
    images = torch.tensor(data.images[order] / 16.0, dtype=torch.float32)
    labels = torch.tensor(data.target[order])
    return images[:1300], labels[:1300], images[1300:], labels[1300:]


def train(model: nn.Module, images: torch.Tensor, labels: torch.Tensor, epochs: int) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=1e-2)
    steps = epochs * (len(images) // 50)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=3e-3, total_steps=steps)
    for _ in range(epochs):
        for batch in torch.randperm(len(images))[: len(images) // 50 * 50].split(50):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(images[batch]), labels[batch]).backward()
            optimizer.step()
            schedule.step()


def captured(model: nn.Module, images: torch.Tensor) -> pa.inspect.CapturedHeads:
    model.eval()
    with torch.no_grad(), pa.inspect.capture(model) as heads:
        model(images)
    return heads


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    images, labels, test_images, test_labels = digits()
    model = DigitTransformer()
    untrained = copy.deepcopy(model)
    train(model, images, labels, options.epochs)
    model.eval()
    with torch.no_grad():
        right = (model(test_images).argmax(dim=1) == test_labels).float().mean().item()
    print(
        f"{sum(p.numel() for p in model.parameters()):,} parameters, {right:.1%} of {len(test_labels)} test digits right"
    )

    shown = test_images[:40]
    before, heads = captured(untrained, shown), captured(model, shown)
    for name, records in (("untrained", before), ("trained", heads)):
        print(f"\n{name}:\n{pa.inspect.read(records)}")

    def loss(m: nn.Module) -> torch.Tensor:
        return nn.functional.cross_entropy(m(test_images), test_labels)

    print(f"\nhardened, one head at a time, test loss:\n{pa.inspect.harden(model, loss)}")
    sharper = pa.inspect.harden(model, loss, factor=4.0)
    print(f"all heads sharpened by 4: {sharper.together:+.3g}")

    layer = heads.layers[0]
    print(f"\nhow far training moved the cells of {layer} on the first test image, head by head:")
    for head in range(4):
        moved = pa.inspect.moves(before[layer, head], heads[layer, head])
        kept = np.nanmean([m.overlap for m in moved])
        print(
            f"  head {head}: cells entered {sum(m.after > 0 for m in moved)} of 16, mean overlap with before {kept:.2f}"
        )
    if options.out:
        page = write_inspection(heads, options.out, title="A Transformer on digits")
        print("\nwrote " + ", ".join(str(p) for p in page.files))


if __name__ == "__main__":
    main()
