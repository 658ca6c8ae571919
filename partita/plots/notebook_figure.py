"""A matplotlib figure that notebooks display when a cell returns it, although pyplot does not manage it.

pyplot keeps every figure that it makes, shows it a second time at the end of a cell, and opens windows. The library's figures
belong to the caller alone. This module imports matplotlib, so it is imported where a figure is made.
"""

from __future__ import annotations

import io

from matplotlib.figure import Figure

__all__ = ["NotebookFigure"]


class NotebookFigure(Figure):
    """A `Figure` with the picture that IPython asks for."""

    def _repr_png_(self) -> bytes:
        with io.BytesIO() as held:
            self.savefig(held, format="png", dpi=110)
            return held.getvalue()
