"""How far bounds are from the truth: proved bound over worst error found, for every target of the accuracy benchmark and more.

python benchmarks/brackets.py              # a few minutes on one core
python benchmarks/brackets.py --markdown   # as it stands in docs/certificates.md
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass

import numpy as np
from accuracy import FUNCTIONS, must_hold

import partita as pa

CUBE = [pa.Box([-1] * m, [1] * m) for m in range(1, 5)]
KINKS = [
    ("|x − 0.3|", "abs(x0 - 0.3)", 1, (1e-2,)),
    ("|x| sin 3x + x²", "abs(x0)*sin(3*x0) + x0^2", 1, (1e-2, 1e-3)),
    ("relu(x − 0.2) + sin 5x", "relu(x0 - 0.2) + sin(5*x0)", 1, (1e-2,)),
    ("max(x, y²)", "max(x0, x1^2)", 2, (3e-2,)),
    ("|x + 0.7y − 0.1|", "abs(x0 + 0.7*x1 - 0.1)", 2, (1e-2,)),
    ("max(x + y, 0.3x − y) + sin x", "max(x0 + x1, 0.3*x0 - x1) + sin(x0)", 2, (2e-2,)),
    ("|x² + y − 0.2|", "abs(x0^2 + x1 - 0.2)", 2, (3e-2,)),
    ("clamp(3xy, −½, ½)", "clamp(3*x0*x1, -0.5, 0.5)", 2, (3e-2,)),
]
HIGHER = [
    ("cos(x + 2y) + xy", "cos(x0 + 2*x1) + x0*x1", 2, (1e-4, 1e-8)),
    ("e^{x − y} sin 2x", "exp(x0 - x1)*sin(2*x0)", 2, (1e-3, 1e-6, 1e-8)),
    ("tanh(2x + y), xy", "tanh(2*x0 + x1), x0*x1", 2, (1e-3, 1e-5)),
    ("1/(2 + x + y + z)", "1/(4 + x0 + x1 + x2)", 3, (1e-3, 1e-5)),
    ("sin(x + y) cos z", "sin(x0 + x1)*cos(x2)", 3, (1e-3, 1e-6)),
    ("e^{−|z|²}", "exp(-x0^2 - x1^2 - x2^2)", 3, (1e-4,)),
    ("xyzw + sin x", "x0*x1*x2*x3 + sin(x0)", 4, (1e-2, 1e-3)),
    ("tanh(x + y − z) + w²", "tanh(x0 + x1 - x2) + x3^2", 4, (1e-2,)),
]


@dataclass(frozen=True)
class Bracket:
    """One certificate: its bound, the worst error found, and how it came about."""

    name: str
    tolerance: float
    method: str
    kind: str
    keys: int
    bound: float
    found: float
    seconds: float

    @property
    def ratio(self) -> float:
        return self.bound / self.found


def targets() -> list[tuple[str, str, pa.Box, float]]:
    rows = [(r.name, r.expression, r.domain, r.tolerance) for r in must_hold()]
    rows += [(f.name, f.expression, CUBE[f.dimension - 1], t) for f in FUNCTIONS for t in (1e-4, 1e-6, 1e-8)]
    rows += [(name, text, CUBE[m - 1], t) for name, text, m, all_t in KINKS + HIGHER for t in all_t]
    return rows


def measure(name: str, text: str, box: pa.Box, tolerance: float) -> Bracket:
    begin = time.perf_counter()
    c = pa.compile(text, box, tolerance=tolerance)
    seconds = time.perf_counter() - begin
    found = max(c.certificate.witness.error, pa.attack(c).error)
    return Bracket(
        name, tolerance, c.candidates[0].method, c.certificate.kind, c.num_keys, c.error_bound, found, seconds
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--markdown", action="store_true", help="a Markdown table")
    options = parser.parse_args()
    rows = []
    if options.markdown:
        print(
            "| target | tolerance | method | keys | bound | worst found | ratio | s |\n|---|---|---|---|---|---|---|---|"
        )
    for name, text, box, tolerance in targets():
        r = measure(name, text, box, tolerance)
        rows.append(r)
        cells = (
            r.name,
            f"{r.tolerance:g}",
            r.method,
            f"{r.keys:,}",
            f"{r.bound:.3g}",
            f"{r.found:.3g}",
            f"{r.ratio:.3f}",
            f"{r.seconds:.1f}",
        )
        print(
            "| " + " | ".join(c.replace("|", "\\|") for c in cells) + " |" if options.markdown else "  ".join(cells),
            flush=True,
        )
        assert r.kind == "proved", r
    ratios = np.array([r.ratio for r in rows])
    median, high = np.quantile(ratios, [0.5, 0.95])
    print(
        f"\n{len(rows)} brackets, all proved: bound/worst found is {median:.3f} in the median (1.10 allowed), {high:.3f} at 95 % "
        f"(2 allowed), {ratios.max():.3f} at most, never below {ratios.min():.4f}; bounds from {min(r.bound for r in rows):.2g}"
    )


if __name__ == "__main__":
    main()
