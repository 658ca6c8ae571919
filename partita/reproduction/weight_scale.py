"""Figure 3 of the first paper: do W_K and W_Q shrink as the training data get noisier, and is it the temperature that changes?"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from partita.errors import DataFileError
from partita.reproduction.experiment import Experiment, Outcome, Setup, Verdict
from partita.reproduction.image_files import load_images
from partita.reproduction.image_models import Copy, Schedule, rows_of, train_copies
from partita.reproduction.statistics import group_means, rank_correlation
from partita.reproduction.table import Table, Tables

__all__ = ["EXPERIMENT", "VARIANTS", "Settings", "correlations"]

_LEVELS = tuple(round(0.03 * k, 2) for k in range(25))
_DECAY = 0.1
MEASURES = ("w_k", "w_q", "spread", "entropy")
# what is done at the control levels beside the plain runs: (label noise instead of input noise, decay, rate, fresh)
VARIANTS = {
    "input noise": (False, 0.0, 1.0, False),
    "input noise, weight decay": (False, _DECAY, 1.0, False),
    "label noise": (True, 0.0, 1.0, False),
    "label noise, weight decay": (True, _DECAY, 1.0, False),
    "input noise, fresh each step": (False, 0.0, 1.0, True),
    "input noise, a third of the rate": (False, 0.0, 1 / 3, False),
}


@dataclass(frozen=True)
class Settings:
    """Sizes of the run; `images` per set at most, `pool` × `pool` pixels averaged, `epochs` and `hidden` per set."""

    sets: tuple[str, ...] = ("mnist", "fashion-mnist", "cifar-10")
    levels: tuple[float, ...] = _LEVELS
    control_levels: tuple[float, ...] = (0.0, 0.18, 0.36, 0.54, 0.72)
    seeds: int = 5
    images: int = 60_000
    held_out: int = 2_000
    pool: int = 1
    width: int = 32
    hidden: tuple[int, ...] = (64, 64, 128)
    epochs: tuple[int, ...] = (20, 20, 40)
    batch: int = 128
    rate: float = 1e-3


def _copies(settings: Settings, first_seed: int) -> list[tuple[str, float, Copy]]:
    found = []
    for variant, (labels, decay, rate, fresh) in VARIANTS.items():
        for level in settings.levels if variant == "input noise" else settings.control_levels:
            for seed in range(first_seed, first_seed + settings.seeds):
                noise = {"label_noise": level} if labels else {"input_noise": level}
                copy = Copy(seed, weight_decay=decay, rate=rate * settings.rate, fresh=fresh, **noise)
                found.append((variant, level, copy))
    return found


def run(setup: Setup) -> Tables:
    """`norms`: every model at the end of training. `history`: the norms at the start, in the middle and at the end."""
    settings: Settings = setup.settings
    if setup.data is None:
        raise DataFileError(
            "weight-scale needs the image files of MNIST, Fashion-MNIST and CIFAR-10; pass their folder with "
            "--data DIR, and add --download to fetch them into it."
        )
    listed = _copies(settings, setup.seed)
    norms, history = [], []
    loaded = [load_images(setup.data, name) for name in settings.sets]
    for number, images in enumerate(loaded):
        rows, labels = rows_of(images, pool=settings.pool, limit=settings.images)
        epochs = settings.epochs[number]
        schedule = Schedule(
            epochs,
            settings.batch,
            settings.width,
            settings.hidden[number],
            tuple(sorted({max(1, epochs // 2), epochs})),
            settings.held_out,
            setup.device,
        )

        def report(done: float, of: float, before: int = number) -> None:
            setup.progress(before + done / of, len(loaded))

        for seen in train_copies(rows, labels, [c for _, _, c in listed], schedule, report):
            for i, (variant, level, copy) in enumerate(listed):
                one = {"set": images.title, "variant": variant, "level": level, "seed": copy.seed}
                each = {name: float(value[i]) for name, value in seen.numbers.items()}
                history.append({**one, "epoch": seen.epoch, "w_k": each["w_k"], "w_q": each["w_q"]})
                if seen.epoch == epochs:
                    norms.append({**one, **each})
    return {"norms": Table.of(norms), "history": _averaged(Table.of(history))}


def _averaged(history: Table) -> Table:
    """Over seeds: how norms move during training, one row per set, variant, level and epoch."""
    groups: dict[tuple[Any, ...], list[int]] = {}
    for i, row in enumerate(history.rows()):
        groups.setdefault((row["set"], row["variant"], row["level"], row["epoch"]), []).append(i)
    names = ("set", "variant", "level", "epoch")
    w_k, w_q = history["w_k"], history["w_q"]
    return Table.of(
        {**dict(zip(names, key)), "w_k": w_k[rows].mean(), "w_q": w_q[rows].mean()} for key, rows in groups.items()
    )


def correlations(norms: Table) -> Table:
    """Spearman's ρ with the level, its one-sided p-values, and the mean at the largest over the mean at the smallest level."""
    found = []
    for name in norms.distinct("set"):
        for variant in norms.distinct("variant"):
            rows = norms.where(set=name, variant=variant)
            for measure in MEASURES if len(rows) else ():
                rank = rank_correlation(rows["level"], rows[measure])
                ends = [
                    rows[measure][rows["level"] == end].mean() for end in (rows["level"].max(), rows["level"].min())
                ]
                found.append(
                    {
                        "set": name,
                        "variant": variant,
                        "measure": measure,
                        "rho": rank.rho,
                        "p_falls": rank.p_falls,
                        "p_rises": rank.p_rises,
                        "last_over_first": ends[0] / ends[1] if ends[1] else np.nan,
                    }
                )
    return Table.of(found)


def digest(tables: Tables) -> Table:
    """A row per set and variant: the last level's mean over the first's, and ρ with the level, for each measure."""
    found, rows = correlations(tables["norms"]), []
    for name in found.distinct("set"):
        for variant in found.where(set=name).distinct("variant"):
            some = {r["measure"]: r for r in found.where(set=name, variant=variant).rows()}
            cells = {m: f"×{some[m]['last_over_first']:.2f} (ρ {some[m]['rho']:+.2f})" for m in MEASURES}
            rows.append({"set": name, "variant": variant, **cells})
    return Table.of(rows)


def verdict(tables: Tables) -> Verdict:
    """Both norms on every set: ρ < 0 with p < 0.01, and the last level at least 5 % below the first."""
    found = correlations(tables["norms"])
    plain = [r for r in found.where(variant="input noise").rows() if r["measure"] in ("w_k", "w_q")]
    falls = [r["p_falls"] < 0.01 and r["last_over_first"] < 0.95 for r in plain]
    rises = [r["p_rises"] < 0.01 and r["last_over_first"] > 1.05 for r in plain]
    outcome: Outcome = "holds" if all(falls) else "mixed" if any(falls) else "fails"
    sentence = (
        f"{sum(falls)} of {len(falls)} norms fall with input noise, {sum(rises)} rise. From the lowest to the highest "
        "level "
        + "; ".join(_in_words(found, name) for name in found.distinct("set"))
        + "."
        + _softness_in_words(found)
        + _label_noise_in_words(found)
        + _peaks_in_words(tables["norms"])
    )
    numbers = {f"{r['set']} · {r['variant']} · {r['measure']} ρ": float(r["rho"]) for r in found.rows()}
    return Verdict(outcome, sentence, numbers)


def _in_words(found: Table, name: str) -> str:
    rows = {r["measure"]: r for r in found.where(set=name, variant="input noise").rows()}
    labels = {"w_k": "‖W_K‖", "w_q": "‖W_Q‖", "spread": "the scores' spread", "entropy": "the weights' entropy"}
    words = ", ".join(f"{labels[m]} ×{rows[m]['last_over_first']:.2f} (ρ {rows[m]['rho']:+.2f})" for m in MEASURES)
    return f"on {name}: {words}"


def _softness_in_words(found: Table) -> str:
    """The paper's reading of the norms: attention softer, its entropy higher, on inputs as they were trained."""
    rows = found.where(variant="input noise", measure="entropy").rows()
    softer, sharper = (sum(r[p] < 0.01 for r in rows) for p in ("p_rises", "p_falls"))
    return f" Attention gets softer (entropy, p < 0.01) on {softer} of {len(rows)} sets, sharper on {sharper}."


def _label_noise_in_words(found: Table) -> str:
    rows = [r for r in found.where(variant="label noise").rows() if r["measure"] in ("w_k", "w_q")]
    falls = sum(float(r["p_falls"]) < 0.01 and float(r["last_over_first"]) < 0.95 for r in rows)
    return f" With label noise instead, {falls} of {len(rows)} norms fall." if rows else ""


def _peaks_in_words(norms: Table) -> str:
    """Where a decline is not monotone: the level at which the mean product of the norms is largest."""
    found = []
    for name in norms.distinct("set"):
        rows = norms.where(set=name, variant="input noise")
        level, mean, _ = group_means(rows["level"], rows["w_k"] * rows["w_q"])
        if mean.argmax() > 0:
            found.append(f"on {name} ‖W_K‖·‖W_Q‖ is largest at level {level[mean.argmax()]:g}")
    return f" Not monotone: {'; '.join(found)}." if found else ""


def control(seed: int) -> Tables:
    """Norms that do not depend on the noise: every set's plain runs are one number and its scatter."""
    rng, rows = np.random.default_rng(seed), []
    for name in ("one", "two"):
        for level in _LEVELS:
            for s in range(3):
                drawn = 2 + 0.1 * rng.standard_normal(4)
                rows.append(
                    {"set": name, "variant": "input noise", "level": level, "seed": s} | dict(zip(MEASURES, drawn))
                )
    return {"norms": Table.of(rows)}


EXPERIMENT = Experiment(
    name="weight-scale",
    title="Weight scale against noise",
    source="2504.19901, section 6, Figure 3",
    claim=(
        "On MNIST, CIFAR-10 and Fashion-MNIST the 2-norms of W_K and W_Q decline as noise in the training data grows "
        "(the caption says label noise, the text Gaussian noise). The paper's reading: a noisier input is harder to "
        "partition, so the model raises the temperature."
    ),
    criterion=(
        "Plain runs (Gaussian input noise, Adam, no weight decay), each norm on each set: Spearman's ρ with the "
        "level is negative with one-sided p < 0.01 and the mean at the highest level is at least 5 % below the mean "
        "at the lowest. Holds if all do, fails if none does, mixed otherwise. Whether attention also becomes softer "
        "(scores less spread, entropy higher), and what label noise does, is reported beside the verdict."
    ),
    method=(
        "An image is the sequence of its rows, pixels in [0, 1]; one head without scale, one hidden ReLU layer, "
        "cross-entropy. All levels, seeds and controls are trained as one batched model. The paper gives no learning "
        "rate, decay, length or noise schedule: ours are Adam at 10⁻³ (3·10⁻³ in the default size, which sees fewer "
        "images), no decay, noise drawn once per image. Controls at five levels: decoupled weight decay 0.1, label "
        "noise (a share of labels drawn anew) instead of input noise, both, noise drawn fresh in every step, a third "
        "of the rate. Beside the norms (spectral; Frobenius in the table) the scores' standard deviation over keys "
        "and the entropy of the attention weights (1 is uniform), on held-out images noised as in training and clean."
    ),
    run=run,
    verdict=verdict,
    control=control,
    settings={
        "tiny": Settings(
            levels=(0.0, 0.36, 0.72),
            control_levels=(0.0, 0.72),
            seeds=2,
            images=60,
            held_out=12,
            pool=4,
            width=4,
            hidden=(8, 8, 8),
            epochs=(2, 2, 2),
            batch=16,
        ),
        "default": Settings(
            levels=_LEVELS[::3],
            seeds=3,
            images=2_500,
            held_out=500,
            pool=2,
            width=16,
            hidden=(32, 32, 32),
            epochs=(10, 10, 10),
            batch=32,
            rate=3e-3,
        ),
        "full": Settings(),
    },
    seconds={"tiny": 2, "default": 150, "full": 1200},
    needs_data=True,
    digest=digest,
)
