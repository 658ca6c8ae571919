"""The studio without a server: `python -m partita.studio.gallery OUT` writes the page and its ready heads into a folder.

Everything that is evaluation runs in the browser, so the folder is a static site: playground, lessons, and a gallery of
heads that were compiled here, with their certificates. It works from any path of any web server. `--lesson-data` prints
`page/lesson_data.js`, the functions and the fitted heads that the lessons show, as Python computes them.
"""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from partita.compiler.chosen_head import head as chosen_head
from partita.compiler.compile import compile as compiled_head
from partita.compiler.compiled import Compiled
from partita.functions.target import make_target
from partita.geometry.domains import Array, Box
from partita.studio import PAGE
from partita.studio.wire import compiled_values, function_values

__all__ = ["PAGE_FUNCTIONS", "READY", "Ready", "gallery", "lesson_data", "write_page"]

PAGE_FUNCTIONS = (  # of the lessons, and the examples of playground.js
    ("sin(3*x) + x*cos(2*y)", "[-1,1]^2"),
    ("exp(-4*(x^2 + y^2))", "[-1,1]^2"),
    ("x^2 - y^2", "[-1,1]^2"),
    ("abs(x - y)", "[-1,1]^2"),
    ("where(x^2 + y^2 < 0.5, 1, 0)", "[-1,1]^2"),
    ("cos(6*sqrt(x^2 + y^2))", "[-1,1]^2"),
    ("sin(10*x)/(10*x)", "[-1,1]"),
    ("sin(3*x)*cos(2*y)", "[-1,1]^2"),
    ("max(abs(x), max(abs(y), 0.3))", "[-1,1]^2"),
    ("sin(3*x)", "[-1,1]"),
    ("1/(1 + 25*x^2)", "[-1,1]"),
    ("min(max(x, -0.5), 0.5)", "[-1,1]"),
    ("0.3 + 0.8*x", "[-1,1]"),
)
_DIGITS = 6  # that the address of the page keeps


@dataclass(frozen=True)
class Ready:
    """One head of the gallery.

    Attributes:
        name: for the address of the page.
        title: in a few words.
        says: what it shows, in a sentence or two.
        function: the expression, also of a black box.
        domain: as text.
        tolerance: of `compile`.
        method: of `compile`.
        lipschitz: declared; the function is then passed as a black box.
    """

    name: str
    title: str
    says: str
    function: str
    domain: str
    tolerance: float
    method: str
    lipschitz: float | None = None

    def compiled(self) -> Compiled:
        """The head, with its certificate."""
        options: dict[str, Any] = {} if self.lipschitz is None else {"lipschitz": self.lipschitz}
        function: str | Callable[[Array], Array] = self.function if self.lipschitz is None else self._black_box()
        return compiled_head(function, self.domain, tolerance=self.tolerance, method=self.method, **options)

    def _black_box(self) -> Callable[[Array], Array]:
        graph = make_target(self.function, Box.of(self.domain)).graph
        assert graph is not None  # an expression always has a graph
        return lambda z: graph.evaluate(np.asarray(z).reshape(len(z), -1))

    def values(self) -> dict[str, Any]:
        """What the page shows: the same as for a head that the server compiled."""
        asked = {
            "name": self.name,
            "title": self.title,
            "says": self.says,
            "text": self.function,
            "domain": self.domain,
        }
        made = {"tolerance": self.tolerance, "method": self.method, "lipschitz": self.lipschitz}
        function = function_values(make_target(self.function, Box.of(self.domain)))
        return {**compiled_values(self.compiled(), self.tolerance), **function, **asked, "asked": made}


_WAVE, _SQUARE, _LINE = "sin(3*x) + x*cos(2*y)", "[-1,1]^2", "[-1,1]"
READY = (
    Ready(
        "ring",
        "A ring, adaptive",
        "Keys with affine values gather where the function bends. The cells are small on the ring and large elsewhere.",
        "exp(-20*(x^2+y^2-0.4)^2)",
        _SQUARE,
        0.15,
        "adaptive",
    ),
    Ready(
        "smooth",
        "A smooth function, soft and fitted",
        "Eight by eight keys at a high temperature with fitted values. A hard head would need about 3·10¹³ keys for this error.",
        _WAVE,
        _SQUARE,
        1e-6,
        "fitted",
    ),
    Ready(
        "staircase",
        "The same function, hard",
        "Each cell holds the value of f at its center, and the softmax selects one cell, as in the proof of Theorem 4.1.",
        _WAVE,
        _SQUARE,
        0.4,
        "hard",
    ),
    Ready(
        "tangents",
        "The same function, affine values",
        "Each cell holds the tangent plane of f at its center. The error falls with the square of the width of the cells.",
        _WAVE,
        _SQUARE,
        0.05,
        "affine",
    ),
    Ready(
        "pieces",
        "A maximum of affine functions",
        "One key for each affine piece. The only error comes from the temperature, and it is largest on the borders.",
        "max(abs(x), max(abs(y), 0.3))",
        _SQUARE,
        0.01,
        "pieces",
    ),
    Ready(
        "convex",
        "A convex function from tangent planes",
        "A convex function is the maximum of its tangent planes, and each plane is one key.",
        "exp(x) + y^2",
        _SQUARE,
        0.05,
        "convex",
    ),
    Ready(
        "peak",
        "A narrow peak, a power diagram",
        "Powers allow a few large cells next to many small ones. A uniform grid would spend most of its keys on the flat part.",
        "exp(-((x-0.3)^2 + (y+0.2)^2)/0.02)",
        _SQUARE,
        0.05,
        "adaptive",
    ),
    Ready(
        "kink",
        "Kinks on a line",
        "Affine values follow the arcs, and cell borders sit at the kinks.",
        "abs(sin(4*x))",
        _LINE,
        0.01,
        "adaptive",
    ),
    Ready(
        "ramp",
        "A ramp in four keys",
        "With affine values, a line that is clipped at both ends takes four keys at any tolerance.",
        "min(max(x, -0.5), 0.5)",
        _LINE,
        0.01,
        "pieces",
    ),
    Ready(
        "runge",
        "Runge's function, soft and fitted",
        "Polynomials converge slowly here: Chebyshev interpolation needs more than twice as many coefficients for this error.",
        "1/(1 + 25*x^2)",
        _LINE,
        1e-6,
        "fitted",
    ),
    Ready(
        "black-box",
        "A black box with a declared slope",
        "Only values of this function were used, and the declaration that its slope is at most 4. The bound holds if this is true.",
        "abs(sin(4*x))",
        _LINE,
        0.1,
        "hard",
        lipschitz=4.0,
    ),
)


def gallery(names: Iterable[str] | None = None) -> dict[str, Any]:
    """The content of gallery.json: ready heads, all or those named."""
    wanted = {ready.name for ready in READY} if names is None else set(names)
    return {"heads": [ready.values() for ready in READY if ready.name in wanted]}


def write_page(folder: Path, names: Iterable[str] | None = None) -> Path:
    """Write the static page, with the ready heads named (all if None), into a folder, which is made if need be.

    Files of the page that are there already are replaced; other files stay.

    Returns:
        The path of its index.html.
    """
    shutil.copytree(PAGE, folder, dirs_exist_ok=True)
    text = json.dumps(_short(gallery(names)), ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    (folder / "gallery.json").write_text(text, encoding="utf-8")
    return folder / "index.html"


def _short(value: Any) -> Any:
    """Whole numbers without their decimal point; every other number keeps all its digits."""
    if isinstance(value, Mapping):
        return {key: _short(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_short(entry) for entry in value]
    return int(value) if isinstance(value, float) and value.is_integer() and abs(value) < 1e15 else value


def _fitted(function: str, keys: int, ghosts: int, sharpness: float) -> dict[str, Any]:
    """A fitted head on [-1, 1] with the digits that the page's address keeps."""
    compiled = chosen_head(function, "[-1,1]", keys=keys, ghosts=ghosts, sharpness=sharpness, values="fitted")
    head: Any = compiled.head
    numbers = {"rate": head.inverse_temperature, "centers": head.axes[0], "values": head.values}
    return {
        key: _rounded(np.asarray(value.detach(), dtype=float).ravel(), key == "rate") for key, value in numbers.items()
    }


def _rounded(numbers: Array, scalar: bool) -> Any:
    short = [float(f"{x:.{_DIGITS}g}") for x in numbers.tolist()]
    return short[0] if scalar else short


def lesson_data() -> str:
    """The text of page/lesson_data.js."""
    functions = []
    for text, domain in PAGE_FUNCTIONS:
        functions.append({"text": text, "domain": domain, **function_values(make_target(text, Box.of(domain)))})
    fitted = {
        "ghosts": [_fitted("sin(3*x)", 12, ghosts, 1.0) for ghosts in range(4)],
        "chebyshev": [
            _fitted("1/(1 + 25*x^2)", n, 0, kappa)
            for n, kappa in ((8, 1.0), (12, 1.0), (16, 0.7), (20, 0.7), (24, 0.5))
        ],
    }
    lines = [
        "/** Written by `python -m partita.studio.gallery --lesson-data`: what the lessons need from Python. Do not edit. */",
        "export const FUNCTIONS = [",
        *(f"  {json.dumps(_short(entry), ensure_ascii=False)}," for entry in functions),
        "];",
        "export const FITTED = {",
        *(line for name, heads in fitted.items() for line in _list(name, heads)),
        "};",
    ]
    return "\n".join(lines) + "\n"


def _list(name: str, heads: list[dict[str, Any]]) -> list[str]:
    return [f"  {name}: [", *(f"    {json.dumps(_short(head))}," for head in heads), "  ],"]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m partita.studio.gallery", description=__doc__.split("\n")[0])
    parser.add_argument("out", nargs="?", type=Path, help="the folder for the static page")
    parser.add_argument("--lesson-data", action="store_true", help="print page/lesson_data.js instead")
    asked = parser.parse_args()
    if asked.lesson_data:
        print(lesson_data(), end="")
    elif asked.out is None:
        parser.error("name a folder, or pass --lesson-data")
    else:
        print(write_page(asked.out))


if __name__ == "__main__":
    main()
