"""For interpretability researchers: a head with a known mechanism, as ground truth for your tools.

The head is a max-affine partition of the plane with a value for each cell (Figures 1 and 2 of the paper). The example
measures its cells, margins and leakage, and exports it as plain q, k, v for any tool that expects scaled dot-product
attention.
"""

import numpy as np
import torch

import partita as pa
from partita.geometry import leakage, polygons
from partita.papers import indicator, reassignment, reassignment_layers


def main() -> None:
    rng = np.random.default_rng(0)
    partition = pa.MaxAffine(rng.normal(size=(7, 2)), 0.2 * rng.normal(size=7))
    box = pa.Box([-1, -1], [1, 1])

    cells = polygons(partition, box)
    alive = [j for j, shape in enumerate(cells) if len(shape)]
    print(f"{len(alive)} of 7 cells meet the square: {alive}")

    selector = indicator(partition, box, margin=0.1, epsilon=1e-3)
    points = box.sample(5000, rng)
    margin = partition.margin(points)
    softmax = selector.head(torch.from_numpy(points)).numpy()
    leak = 1 - softmax.max(axis=1)
    rate = float(selector.head.inverse_temperature)
    print(
        f"inverse temperature {rate:.1f}; on the {np.mean(margin >= 0.1):.0%} of the square where the margin is at least 0.1:"
    )
    print(f"  measured leakage {leak[margin >= 0.1].max():.2e}, Proposition 3.2 allows {leakage(7, rate, 0.1):.2e}")

    plain = selector.head.as_attention()
    same = (plain(torch.from_numpy(points)) - torch.from_numpy(softmax)).abs().max().item()
    print(
        f"as plain q, k, v: k {tuple(plain.key.shape)}, v {tuple(plain.value.shape)}; {same:.1e} from the folded head"
    )

    values, slopes = rng.normal(size=(7, 1)), rng.normal(size=(7, 1, 2))
    figure_2 = reassignment(partition, values, box, margin=0.1, tolerance=1e-2, value_slopes=slopes)
    layers = reassignment_layers(figure_2, tokens=4)
    sequence = torch.from_numpy(points[:4])[None]
    difference = (layers(sequence) - figure_2.head(sequence)).abs().max().item()
    print(
        f"Figure 2 as one attention layer over 4 tokens: {layers.num_keys} keys, {difference:.1e} from the folded head"
    )
    print("  its tensors:", ", ".join(f"{k} {tuple(t.shape)}" for k, t in layers.state_dict().items()))


if __name__ == "__main__":
    main()
