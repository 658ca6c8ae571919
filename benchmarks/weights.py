"""The pictures of docs/weights.md.

python benchmarks/weights.py --out docs/images    # seconds; writes weights_log.svg, weights_indexed.svg, weights_attention.svg
"""

from __future__ import annotations

import argparse
from pathlib import Path

import partita as pa
from partita.plots import layers_figure
from partita.plots.layer_matrices import layers_at
from partita.plots.layer_plots import attention_figure
from partita.plots.style import save, styled

AT = [0.3, 0.4]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("docs/images"), help="where the pictures go")
    out = parser.parse_args().out
    c = pa.compile("x0*x1", pa.Box([-1, -1], [1, 1]), tolerance=1.2, method="hard")
    larger = pa.compile("x0*x1", pa.Box([-1, -1], [1, 1]), tolerance=0.3, method="hard", sharpness=8.0)
    with styled():
        for form in ("log", "indexed"):
            save(layers_figure(c, form=form, at=AT), out / f"weights_{form}.svg")
        found = layers_at(larger, larger.layers("log"), AT)
        save(attention_figure(found), out / "weights_attention.svg")


if __name__ == "__main__":
    main()
