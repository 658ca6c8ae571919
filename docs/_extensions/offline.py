"""What keeps the site free of other servers: formulas as MathML, and the studio's page beside the documentation."""

from __future__ import annotations

import re
from html import escape
from pathlib import Path
from typing import Any

from docutils import nodes
from docutils.utils.math import MathError
from docutils.utils.math.latex2mathml import tex2mathml
from sphinx.application import Sphinx
from sphinx.util import logging
from sphinx.util.docutils import SphinxDirective

from partita.studio import gallery

STUDIO = "studio"  # the folder of the site that holds the studio's page


logger = logging.getLogger(__name__)


def inline_formula(translator: Any, node: nodes.math) -> None:
    """TeX as MathML, which browsers draw without a script."""
    translator.body.append(_mathml(node, displayed=False))
    raise nodes.SkipNode


def displayed_formula(translator: Any, node: nodes.math_block) -> None:
    translator.body.append(f'<div class="math">{_mathml(node, displayed=True)}</div>')
    raise nodes.SkipNode


def _mathml(node: nodes.Element, *, displayed: bool) -> str:
    tex = re.sub(r"\\(?:big|Big|bigg|Bigg)(?![A-Za-z])", "", node.astext())  # brackets grow by themselves
    try:
        return str(tex2mathml(tex, as_block=displayed))
    except MathError as error:
        logger.warning("the formula %r: %s Write it with commands that docutils knows.", tex, error, location=node)
        return f"<code>{escape(tex)}</code>"


class Studio(SphinxDirective):
    """The studio in a frame, with a link to the whole page."""

    def run(self) -> list[nodes.Node]:
        address = f"{STUDIO}/index.html"
        html = (
            f'<p><a class="open-studio" href="{address}">Open the full page</a></p>\n'
            f'<iframe class="studio" src="{address}" title="The studio without a server" loading="lazy"></iframe>'
        )
        return [nodes.raw("", html, format="html")]


def write_studio(app: Sphinx, error: Exception | None) -> None:
    """After the pages, the studio's page with its gallery of ready heads."""
    if error is None and app.builder.name == "html":
        names = app.config.studio_heads
        gallery.write_page(Path(app.outdir) / STUDIO, names.split(",") if names else None)


def setup(app: Sphinx) -> dict[str, Any]:
    app.add_html_math_renderer("mathml", (inline_formula, None), (displayed_formula, None))
    app.add_directive("studio", Studio)
    app.add_config_value("studio_heads", "", "")  # of the ready heads, those to write; all if empty
    app.connect("build-finished", write_studio)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
