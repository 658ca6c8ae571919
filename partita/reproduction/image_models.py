"""One attention head and a feed-forward network on images, as many copies as there are settings, trained as one batched model.

An image is a sequence of its rows. `Attn(Z) = W_V Z softmax((W_K Z)ᵀ W_Q Z)` without scale, as the paper writes it, then one hidden
layer on the flattened result. Pixels lie in [0, 1]; noise is `level · N(0, 1)`, drawn once per image and seed, the same
draw at every level, unless it is asked for fresh in every step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from partita.reproduction.batched import BatchedAdam, column, spectral_norms, uniform_layer
from partita.reproduction.image_files import ImageSet

__all__ = ["SEEN", "Copy", "Schedule", "Snapshot", "rows_of", "train_copies"]

# what a snapshot holds of attention and accuracy, on held-out images noised as in training and clean
SEEN = (
    "train_loss",
    "w_k",
    "w_k_frobenius",
    "w_q",
    "w_q_frobenius",
    "spread",
    "entropy",
    "accuracy",
    "spread_clean",
    "entropy_clean",
    "accuracy_clean",
)
_MOST = 0.99

_CLASSES = 10
_DECAYED = {"w_k", "w_q", "w_v", "w_1", "w_2"}


@dataclass(frozen=True)
class Copy:
    """What one copy of the model is trained with."""

    seed: int
    input_noise: float = 0.0
    label_noise: float = 0.0
    weight_decay: float = 0.0
    rate: float = 1e-3
    fresh: bool = False


@dataclass(frozen=True)
class Schedule:
    """How long and how wide: epochs, images per step, attention width, hidden units; the epochs after which to look."""

    epochs: int
    batch: int
    width: int
    hidden: int
    look_after: tuple[int, ...]
    held_out: int
    device: str = "cpu"


@dataclass(frozen=True, eq=False)
class Snapshot:
    """Numbers per copy, `(copies,)` each, after an epoch."""

    epoch: int
    numbers: dict[str, Tensor]


def rows_of(images: ImageSet, *, pool: int, limit: int) -> tuple[Tensor, Tensor]:
    """Sequences `(n, rows, channels · columns)` in [0, 1] and labels `(n,)`: the first `limit`, pool × pool pixels averaged."""
    pixels = torch.from_numpy(images.images[:limit].copy()).float() / 255
    if pool > 1:
        pixels = functional.avg_pool2d(pixels, pool)
    n, channels, height, width = pixels.shape
    rows = pixels.permute(0, 2, 1, 3).reshape(n, height, channels * width).contiguous()
    return rows, torch.from_numpy(images.labels[:limit].copy()).long()


@dataclass(frozen=True, eq=False)
class _Data:
    """Images, labels and what is drawn for each seed, on the device; the last `held_out` images are not trained on."""

    rows: Tensor  # (n, T, d)
    labels: Tensor  # (n,)
    noise: Tensor  # (seeds, n, T, d)
    coin: Tensor  # (seeds, n): compared with the share of wrong labels
    other: Tensor  # (seeds, n): the label taken then
    trained: int

    @classmethod
    def draw(cls, rows: Tensor, labels: Tensor, seeds: list[int], schedule: Schedule) -> _Data:
        noise, coin, other = [], [], []
        for seed in seeds:
            g = torch.Generator().manual_seed(7919 * seed + 1)
            noise.append(torch.randn(rows.shape, generator=g))
            coin.append(torch.rand(len(rows), generator=g))
            other.append(torch.randint(_CLASSES, (len(rows),), generator=g))
        held = min(schedule.held_out, len(rows) // 5)
        own = [torch.stack(drawn).to(schedule.device) for drawn in (noise, coin, other)]
        return cls(rows.to(schedule.device), labels.to(schedule.device), own[0], own[1], own[2], len(rows) - held)

    def orders(self, seeds: list[int], epoch: int) -> Tensor:
        """A shuffled order of the training images for each seed, `(seeds, trained)`."""
        generators = [torch.Generator().manual_seed(104_729 * seed + epoch) for seed in seeds]
        return torch.stack([torch.randperm(self.trained, generator=g) for g in generators]).to(self.rows.device)


class _Copies:
    """The parameters of all copies and their forward pass."""

    def __init__(self, copies: list[Copy], data: _Data, schedule: Schedule) -> None:
        self.seeds = sorted({c.seed for c in copies})
        place = {seed: i for i, seed in enumerate(self.seeds)}
        self.which = [place[c.seed] for c in copies]
        device = schedule.device
        self.seed_of = torch.tensor(self.which, device=device)
        self.level = torch.tensor([c.input_noise for c in copies], device=device)
        self.label_share = torch.tensor([c.label_noise for c in copies], device=device)
        self.fresh = torch.tensor([c.fresh for c in copies], device=device)
        self.draw = torch.Generator(device).manual_seed(sum(self.seeds) + 17)
        tokens, dim = data.rows.shape[1:]
        shapes = {
            "w_k": (dim, schedule.width),
            "w_q": (dim, schedule.width),
            "w_v": (dim, schedule.width),
            "w_1": (tokens * schedule.width, schedule.hidden),
            "w_2": (schedule.hidden, _CLASSES),
        }
        generators = [torch.Generator().manual_seed(seed) for seed in self.seeds]
        made = {n: uniform_layer(len(copies), *s, generators, self.which) for n, s in shapes.items()}
        made["b_1"] = torch.zeros(len(copies), 1, schedule.hidden)
        made["b_2"] = torch.zeros(len(copies), 1, _CLASSES)
        self.parameters = {n: p.to(device).requires_grad_() for n, p in made.items()}
        rates = torch.tensor([c.rate for c in copies], device=device)
        decays = torch.tensor([c.weight_decay for c in copies], device=device)
        self.adam = BatchedAdam(self.parameters, rates, decays, decayed=_DECAYED)

    def inputs(self, data: _Data, index: Tensor, *, clean: bool = False) -> Tensor:
        """`(copies, B, T, d)` for image numbers `(seeds, B)`, each copy with its own noise."""
        rows = data.rows[index][self.seed_of]
        if clean:
            return rows
        own = torch.arange(len(self.seeds), device=index.device)[:, None]
        noise = data.noise[own, index][self.seed_of]
        if bool(self.fresh.any()):
            drawn = torch.randn(noise.shape, generator=self.draw, device=noise.device)
            noise = torch.where(column(self.fresh, noise), drawn, noise)
        return rows + column(self.level, noise) * noise

    def labels(self, data: _Data, index: Tensor) -> Tensor:
        """`(copies, B)`, a share of them replaced by random ones."""
        own = torch.arange(len(self.seeds), device=index.device)[:, None]
        wrong = data.coin[own, index][self.seed_of] < self.label_share[:, None]
        return torch.where(wrong, data.other[own, index][self.seed_of], data.labels[index][self.seed_of])

    def keys_and_queries(self, z: Tensor) -> tuple[Tensor, Tensor]:
        p = self.parameters
        return z @ p["w_k"][:, None], z @ p["w_q"][:, None]

    def logits(self, z: Tensor) -> Tensor:
        p = self.parameters
        k, q = self.keys_and_queries(z)
        read = functional.scaled_dot_product_attention(q, k, z @ p["w_v"][:, None], scale=1.0)
        hidden = torch.relu(read.flatten(2) @ p["w_1"] + p["b_1"])
        return hidden @ p["w_2"] + p["b_2"]

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Mean cross-entropy per copy, `(copies,)`."""
        each = functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
        return each.reshape(labels.shape).mean(dim=1)


def train_copies(
    rows: Tensor,
    labels: Tensor,
    copies: list[Copy],
    schedule: Schedule,
    progress: Callable[[float, float], None] = lambda done, of: None,
) -> Iterator[Snapshot]:
    """Train all copies together; a Snapshot at the start and after each epoch of `look_after`.

    Args:
        rows: `(n, T, d)`.
        labels: `(n,)`.
        copies: their noise, decay, rate and seed.
    """
    seeds = sorted({c.seed for c in copies})
    data = _Data.draw(rows, labels, seeds, schedule)
    model = _Copies(copies, data, schedule)
    yield Snapshot(0, _look(model, data, torch.full((len(copies),), float("nan"))))
    steps = max(1, data.trained // schedule.batch)
    for epoch in range(1, schedule.epochs + 1):
        order = data.orders(seeds, epoch)
        lost = torch.zeros(len(copies), device=schedule.device)
        for step in range(steps):
            index = order[:, step * schedule.batch : (step + 1) * schedule.batch]
            loss = model.loss(model.logits(model.inputs(data, index)), model.labels(data, index))
            model.adam.step(loss.sum())
            lost += loss.detach()
            progress((epoch - 1) * steps + step + 1, schedule.epochs * steps)
        if epoch in schedule.look_after:
            yield Snapshot(epoch, _look(model, data, lost / steps))


@torch.no_grad()
def _look(model: _Copies, data: _Data, train_loss: Tensor) -> dict[str, Tensor]:
    """Norms, the scores' spread and entropy on held-out images (noised as in training, and clean), loss and accuracy.

    Beside `SEEN`: the Frobenius norms in the directions that hold little of the clean rows (`_outside`), the weight that
    a row gives itself (`own_row`) and the cosine between W_K and W_Q (`alignment`).
    """
    p, held = model.parameters, len(data.rows) - data.trained
    index = (data.trained + torch.arange(min(held, 256), device=data.rows.device)).expand(len(model.seeds), -1)
    numbers = {"train_loss": train_loss}
    little = _directions_of_little(data.rows)
    for name in ("w_k", "w_q"):
        numbers[name] = spectral_norms(p[name])
        numbers[f"{name}_frobenius"] = p[name].flatten(1).norm(dim=1)
        numbers[f"{name}_outside"] = (little.T @ p[name]).flatten(1).norm(dim=1)
    numbers["alignment"] = functional.cosine_similarity(p["w_k"].flatten(1), p["w_q"].flatten(1))
    for ending, clean in (("", False), ("_clean", True)):
        z = model.inputs(data, index, clean=clean)
        k, q = model.keys_and_queries(z)
        scores = k @ q.transpose(-1, -2)  # (copies, B, keys, queries)
        weights = torch.softmax(scores, dim=-2)
        entropy = -(weights * weights.clamp_min(1e-30).log()).sum(dim=-2)
        numbers[f"own_row{ending}"] = weights.diagonal(dim1=-2, dim2=-1).mean(dim=(1, 2))
        numbers[f"spread{ending}"] = scores.std(dim=-2).mean(dim=(1, 2))
        numbers[f"entropy{ending}"] = entropy.mean(dim=(1, 2)) / torch.log(torch.tensor(float(z.shape[2])))
        truth = data.labels[index][model.seed_of]
        numbers[f"accuracy{ending}"] = (model.logits(z).argmax(-1) == truth).float().mean(dim=1)
    return {name: value.detach().double().cpu() for name, value in numbers.items()}


def _directions_of_little(rows: Tensor) -> Tensor:
    """Orthonormal directions `(d, k)` beside the leading ones that hold 99 % of the clean rows' second moment."""
    flat = rows.reshape(-1, rows.shape[-1]).double().cpu()
    moments, directions = torch.linalg.eigh(flat.T @ flat)
    share = moments.flip(0).cumsum(0) / moments.sum().clamp_min(1e-300)
    leading = min(int((share < _MOST).sum()) + 1, len(moments))
    out: Tensor = directions.flip(1)[:, leading:].to(rows)
    return out
