"""A page as blocks: headings, paragraphs, figures and tables, written as Markdown or as one HTML file."""

from __future__ import annotations

import base64
import html
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from partita.plots.colours import INK, MUTED, PANEL, RULE

__all__ = ["Block", "Code", "Grid", "Heading", "Picture", "Text", "as_html", "as_markdown"]


@dataclass(frozen=True)
class Heading:
    level: int
    text: str


@dataclass(frozen=True)
class Text:
    """A paragraph, with an optional word in bold before it."""

    text: str
    bold: str = ""


@dataclass(frozen=True)
class Code:
    text: str


@dataclass(frozen=True)
class Picture:
    """An SVG beside the page: Markdown links to it, HTML carries it."""

    path: Path
    caption: str


@dataclass(frozen=True)
class Grid:
    head: Sequence[str]
    rows: Sequence[Sequence[str]]


Block = Heading | Text | Code | Picture | Grid

_CSS = f"""
body {{ font: 16px/1.55 Georgia, 'Times New Roman', serif; color: {INK}; max-width: 62rem; margin: 3rem auto; padding: 0 1.5rem; }}
h1 {{ font-size: 2rem; line-height: 1.2; }}
h2 {{ margin-top: 3.2rem; border-top: 1px solid {RULE}; padding-top: 1.6rem; }}
figure {{ margin: 1.6rem 0; }}
figure img {{ max-width: 100%; }}
figcaption {{ color: {MUTED}; font-size: 0.9rem; }}
table {{ border-collapse: collapse; font: 13px/1.45 ui-monospace, Menlo, Consolas, monospace; display: block; overflow-x: auto; }}
th, td {{ padding: 0.22rem 0.8rem 0.22rem 0; text-align: left; border-bottom: 1px solid {RULE}; vertical-align: top; }}
pre, code {{ font: 13px/1.45 ui-monospace, Menlo, Consolas, monospace; background: {PANEL}; }}
pre {{ padding: 0.6rem 0.8rem; }}
"""


def as_markdown(blocks: Sequence[Block], folder: Path) -> str:
    """The page as Markdown; pictures are linked relative to `folder`."""
    out = []
    for block in blocks:
        match block:
            case Heading(level, text):
                out.append(f"{'#' * level} {text}")
            case Text(text, bold):
                out.append(f"**{bold}** {text}" if bold else text)
            case Code(text):
                out.append(f"```\n{text}\n```")
            case Picture(path, caption):
                out.append(f"![{caption}]({path.relative_to(folder).as_posix()})")
            case Grid(head, rows):
                lines = [head, ["---"] * len(head), *rows]
                out.append("\n".join("| " + " | ".join(c.replace("|", "∣") for c in line) + " |" for line in lines))
    return "\n\n".join(out) + "\n"


def as_html(blocks: Sequence[Block], title: str) -> str:
    """The page as HTML with its pictures inside; it loads nothing."""
    return (
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n<title>{html.escape(title)}</title>\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n<style>{_CSS}</style>\n</head>\n<body>\n'
        + "\n".join(map(_html, blocks))
        + "\n</body>\n</html>\n"
    )


def _html(block: Block) -> str:
    match block:
        case Heading(level, text):
            return f"<h{level}>{html.escape(text)}</h{level}>"
        case Text(text, bold):
            return f"<p>{f'<strong>{html.escape(bold)}</strong> ' if bold else ''}{html.escape(text)}</p>"
        case Code(text):
            return f"<pre>{html.escape(text)}</pre>"
        case Picture(path, caption):
            held = base64.b64encode(path.read_bytes()).decode()
            label = html.escape(caption)
            return f'<figure><img alt="{label}" src="data:image/svg+xml;base64,{held}"><figcaption>{label}</figcaption></figure>'
        case Grid(head, rows):
            top = "".join(f"<th>{html.escape(c)}</th>" for c in head)
            body = "".join("<tr>" + "".join(f"<td>{html.escape(c)}</td>" for c in row) + "</tr>" for row in rows)
            return f"<table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table>"
