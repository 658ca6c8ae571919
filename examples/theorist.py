"""For theorists, students and teachers: the weights of Theorem 4.1, its constants, and its rate.

For sin x + cos y on [-1, 1]² and a range of tolerances, this prints the number of keys, the number in the paper, the
proved bound and the worst error found; then the tensors of the same head in the paper's log form and in our indexed
form.
"""

import math

import numpy as np

import partita as pa


def f(z: np.ndarray) -> np.ndarray:
    return np.sin(z[:, 0]) + np.cos(z[:, 1])


def main() -> None:
    box = pa.Box([-1, -1], [1, 1])
    print(
        f"{'tolerance':>10} {'keys':>8} {'paper: (6√m DL/ε)^m':>20} {'error bound':>12} {'worst seen':>11} {'bound/optimal':>14}"
    )
    for tolerance in (0.5, 0.2, 0.1, 0.05, 0.02):
        c = pa.compile(f, box, tolerance=tolerance, lipschitz=math.sqrt(2), method="hard")
        papers = math.ceil(6 * math.sqrt(2) * math.sqrt(2) / tolerance) ** 2
        ratio = c.certificate.facts["optimal_ratio"]
        print(
            f"{tolerance:10g} {c.num_keys:8,} {papers:20,} {c.error_bound:12.6f} {c.attack().error:11.6f} {ratio:14.7f}"
        )

    c = pa.compile(f, box, tolerance=0.5, lipschitz=math.sqrt(2), method="hard")
    for form in ("log", "indexed"):
        layers = c.layers(form)
        print(f"\n{form} form: {layers.num_keys} columns, {layers.num_parameters:,} stored numbers")
        for name, tensor in layers.state_dict().items():
            print(f"  {name:18} {tuple(tensor.shape)}")
    print("\nthe certificate:\n" + c.certificate.explain())


if __name__ == "__main__":
    main()
