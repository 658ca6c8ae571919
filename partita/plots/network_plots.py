"""The graph of a network of heads: inputs, heads layer by layer, outputs, and what each head adds to the error bound."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from partita.compiler.compiled import Compiled
from partita.errors import PartitaError, UnsupportedError
from partita.functions.graph import Graph
from partita.heads.head import count_text
from partita.heads.network import AttentionNetwork
from partita.heads.wiring import Affine
from partita.plots.colours import ACCENT, BACKGROUND, INK, MUTED, PANEL, RULE, SOFT, TINTS
from partita.plots.head_panels import claim_text, rounded_up
from partita.plots.head_plots import head_words, header
from partita.plots.style import new_figure, require_vector_or_pixels, save, styled
from partita.proofs.network_budget import use_shares
from partita.proofs.network_proof import Part

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["plot_network"]

_MOST_ROWS = 12  # nodes in a column: beyond, equal heads share one, and then the smallest shares do
_ROW, _LANE = 0.62, 0.22  # inches: of a node with the room around it, and of an edge that passes a column
_WIDE, _TALL, _GAP = 1.72, 0.46, 0.95  # inches: of the node of a head, and between columns
_PILL, _PILL_TALL = 0.62, 0.3  # inches: of an input
_LETTERS = 24  # of a function
_ARGUMENTS = ("u", "v", "w")


@dataclass(eq=False)
class _Node:
    """One box of the picture, or, with no lines, a place where an edge passes a column.

    `channels` are those that it stands for, `reads` the ones that it reads.
    """

    lines: tuple[str, ...]
    channels: frozenset[int] = frozenset()
    reads: frozenset[int] = frozenset()
    share: float | None = None
    fill: str = PANEL
    wide: float = _WIDE
    tall: float = _TALL
    sources: list[_Node] = field(default_factory=list)
    x: float = 0.0
    y: float = 0.0

    @property
    def room(self) -> float:
        return (_ROW if self.tall == _TALL else 0.42) if self.lines else _LANE


def plot_network(
    compiled: Compiled,
    path: str | os.PathLike[str] | None = None,
    *,
    size: tuple[float, float] | None = None,
    titles: bool = True,
    legend: bool = True,
) -> Figure:
    """Draw how the heads of a network are wired: inputs on the left, layer by layer, the output on the right.

    Every node is one use of a head, with its function, its keys and its share of the error bound, `gain·ε/bound`; the bar below
    is as long as the share. An edge is what a node reads. Nodes of one colour use the same stored head. In a layer with
    more than 12 uses the uses of one head share a node, "sin(u) × 100"; beyond 12 such nodes those with the smallest shares do too.

    Args:
        compiled: a network of heads, from `pa.compile` or `pa.Compiled.of_network`.
        path: a file to write as well, .svg, .png or .pdf. It is replaced if it exists; parents are created.
        size: width and height of the figure in inches.
        titles: write a title, and the names of the layers.
        legend: explain bars and colours.

    Returns:
        The figure.

    Raises:
        UnsupportedError: a single head, another kind of file, or a network that was changed after it was certified.
        MissingExtraError: matplotlib is not installed.

    >>> import partita as pa
    >>> from partita.plots import plot_network
    >>> c = pa.compile("sin(3*x0) + sin(3*x1) + exp(x2)", "[-1,1]^3", tolerance=1e-3, method="heads")
    >>> figure = plot_network(c)  # plot_network(c, "network.svg") also writes a file
    >>> [text.get_text() for text in figure.axes[0].texts if "exp" in text.get_text()]
    ['exp(x2)']
    """
    if path is not None:
        require_vector_or_pixels(path)
    network = compiled.require_unchanged().head
    if not isinstance(network, AttentionNetwork):
        raise UnsupportedError(
            f"the graph of a network: found one head, a {type(network).__name__}, which is a single node",
            "Draw it with plot_head, or --kind head.",
        )
    columns = _columns(compiled, network)
    _connect(columns)
    _order(columns)
    width, height = _place(columns)
    with styled():
        figure, grid = new_figure(1, width=max(width, 4.6), height=height + 0.45 * titles + 0.35 * legend, size=size)
        panel = grid[0, 0]
        panel.set(xlim=(0, width), ylim=(0, height), aspect="equal")
        panel.set_axis_off()
        for column in columns:
            for node in column:
                for source in node.sources:
                    _draw_edge(panel, source, node)
        for column in columns:
            for node in column:
                if node.lines:
                    _draw_node(panel, node)
                else:
                    panel.plot(
                        [node.x, node.x + node.wide], [node.y] * 2, color=SOFT, lw=0.8, solid_capstyle="butt", zorder=1
                    )
        if titles:
            for number, column in enumerate(columns[1:-1], 1):
                middle = column[0].x + column[0].wide / 2
                panel.text(middle, height - 0.02, f"layer {number}", ha="center", va="top", fontsize=8, color=MUTED)
            label = compiled.target.label
            shown = label if len(label) <= 60 else label[:59] + "…"
            claim = [claim_text(compiled.certificate)] * (network.num_outputs > 1)
            header(figure, [shown, head_words(compiled, 0)[1], _counts(network), *claim])
        if legend:
            _explain(figure, columns, several=network.num_outputs > 1)
        if path is not None:
            save(figure, path)
    return figure


def _counts(network: AttentionNetwork) -> str:
    uses, layers, stored = network.num_uses, network.num_layers, len(network.heads)
    heads = f"{uses:,} head{'s' * (uses != 1)} in {layers:,} layer{'s' * (layers != 1)}"
    return heads if stored == uses else f"{heads}, {stored:,} stored"


def _columns(compiled: Compiled, network: AttentionNetwork) -> list[list[_Node]]:
    """Inputs, the heads of every layer, outputs."""
    certificate, wiring, m = compiled.certificate, network.wiring, network.dimension
    known = certificate.kind == "proved" and "parts" in certificate.proof
    graphs = (
        [part.graph for part in Part.all_from_json(certificate.proof["parts"], network.parts)]
        if known
        else [None] * len(network.heads)
    )
    shares = [list(u.shares) for u in use_shares(network, certificate, compiled.target.box)] if known else None
    columns, channel, number, fills = [_inputs(m)], m, 0, _fills(network)
    for layer in wiring.layers:
        single, grouped = list[_Node](), list[_Node]()
        for group in layer:
            head, graph = network.parts[group.head], graphs[group.head]
            k, own = head.dimension, None if shares is None else shares[number]
            uses, rows = group.reads.rows // k, _read(group.reads)
            keys, fill = f"{count_text(head.num_keys)} key{'s' * (head.num_keys != 1)}", fills[group.head]
            for use in range(uses):
                reads = rows[use * k : use * k + k]
                share = None if own is None else float(own[use])
                function = _function(graph, group.head, _names(group.reads, use, k, m))
                at, lines = frozenset([channel + use]), (function, keys + _percent(share))
                single.append(_Node(lines, at, frozenset().union(*reads), share, fill))
            if uses == 1:
                grouped.append(single[-1])
            else:
                share = None if own is None else float(sum(own))
                lines = _function(graph, group.head, _ARGUMENTS, f" × {uses:,}"), f"{keys} each{_percent(share)}"
                at = frozenset(range(channel, channel + uses))
                grouped.append(_Node(lines, at, frozenset().union(*rows), share, fill))
            channel, number = channel + uses, number + 1
        columns.append(single if len(single) <= _MOST_ROWS else _fewer(grouped))
    return [*columns, _outputs(compiled, network)]


def _fills(network: AttentionNetwork) -> list[str]:
    """The colour of each stored head. Where there are too many heads, those that are used once have none."""
    uses = [0] * len(network.heads)
    for layer in network.wiring.layers:
        for group in layer:
            uses[group.head] += group.reads.rows // network.parts[group.head].dimension
    coloured = [i for i, count in enumerate(uses) if count > 1 or len(uses) <= len(TINTS)]
    found = dict(zip(coloured, TINTS))
    return [found.get(i, BACKGROUND) for i in range(len(uses))]


def _fewer(nodes: list[_Node]) -> list[_Node]:
    """At most as many nodes as a column holds: those with the smallest shares become one."""
    if len(nodes) <= _MOST_ROWS:
        return nodes
    kept = sorted(nodes, key=lambda n: -(n.share or 0.0))[: _MOST_ROWS - 1]
    rest = [n for n in nodes if n not in kept]
    share = None if rest[0].share is None else sum(n.share or 0.0 for n in rest)
    channels = frozenset().union(*(n.channels for n in rest))
    lines = (f"{len(channels):,} other heads", f"smaller shares{_percent(share)}" if share is not None else "")
    return [
        *(n for n in nodes if n in kept),
        _Node(lines, channels, frozenset().union(*(n.reads for n in rest)), share),
    ]


def _inputs(m: int) -> list[_Node]:
    if m <= _MOST_ROWS:
        return [_Node((f"x{i}",), frozenset([i]), wide=_PILL, tall=_PILL_TALL) for i in range(m)]
    return [_Node((f"x0 … x{m - 1}", f"{m:,} inputs"), frozenset(range(m)), wide=1.15)]


def _outputs(compiled: Compiled, network: AttentionNetwork) -> list[_Node]:
    """One node for each output, or one for all; the last line of the first says what the affine maps add."""
    rows, certificate = _read(network.wiring.output), compiled.certificate
    bound, estimate = certificate.error_bound, certificate.error_estimate
    claim = f"error ≤ {rounded_up(bound)}" if estimate is None else f"error ≈ {estimate:.2g}"
    other = sum(t.value for t in certificate.terms if t.source != "approximation")
    added = () if estimate is not None else (f"rounding{_percent(other / bound if bound > 0 else 0.0)}",)
    lines, tall = (claim, *added), _TALL + 0.16 * len(added)
    if len(rows) <= _MOST_ROWS:
        names = ["output"] if len(rows) == 1 else [f"output {i}" for i in range(len(rows))]
        alone = len(rows) == 1
        return [
            _Node((n, *lines) if alone else (n,), reads=r, wide=1.3, tall=tall if alone else _PILL_TALL)
            for n, r in zip(names, rows)
        ]
    return [_Node((f"{len(rows):,} outputs", *lines), reads=frozenset().union(*rows), wide=1.3, tall=tall)]


def _read(map_: Affine) -> list[frozenset[int]]:
    """The channels that each row reads."""
    return [frozenset((map_.start + np.flatnonzero(row)).tolist()) for row in map_.weight]


def _names(map_: Affine, use: int, inputs: int, m: int) -> tuple[str, ...]:
    """The arguments of one use: the input that is read as it is, or a letter."""
    found = []
    for i in range(inputs):
        row, bias = map_.weight[use * inputs + i], map_.bias[use * inputs + i]
        (places,) = np.nonzero(row)
        plain = len(places) == 1 and row[places[0]] == 1 and bias == 0 and map_.start + places[0] < m
        letter = _ARGUMENTS[i] if inputs <= len(_ARGUMENTS) else f"u{i}"
        found.append(f"x{map_.start + places[0]}" if plain else letter)
    return tuple(found)


def _function(graph: Graph | None, head: int, names: Sequence[str], times: str = "") -> str:
    """The function of a head in these arguments, cut short; its number and arguments if it is not known."""
    if graph is None:
        return f"head {head}: {', '.join(names)}{times}"
    try:
        own = names if graph.num_inputs <= len(names) else [f"u{i}" for i in range(graph.num_inputs)]
        text = graph.infix(list(own)[: graph.num_inputs]).replace("*", "·").replace("^2", "²").replace("^3", "³")
    except PartitaError:
        text = f"head {head}"
    room = _LETTERS - len(times)
    return (text if len(text) <= room else text[: room - 1] + "…") + times


def _percent(share: float | None) -> str:
    if share is None:
        return ""
    return f" · {100 * share:.0f} %" if share >= 0.0995 else f" · {100 * share:.1f} %" if share >= 1e-3 else " · <0.1 %"


def _connect(columns: list[list[_Node]]) -> None:
    """Sources of every node, and lanes through the columns that an edge passes."""
    for number, column in enumerate(columns[1:], 1):
        for node in column:
            for earlier in range(number):
                for source in [n for n in columns[earlier] if n.lines and n.channels & node.reads]:
                    for between in range(earlier + 1, number):
                        source = _lane(columns[between], source)
                    node.sources.append(source)


def _lane(column: list[_Node], source: _Node) -> _Node:
    """The lane of a source through a column, shared by all edges that come from it."""
    for node in column:
        if not node.lines and node.sources == [source]:
            return node
    made = _Node((), source.channels, sources=[source])
    column.append(made)
    return made


def _order(columns: list[list[_Node]]) -> None:
    """Sort every column by where its edges come from and go to, a few times, so that few edges cross."""
    for _ in range(4):
        for column in columns[1:]:
            _sort(column, {id(n): n.sources for n in column}, columns)
        for column, after in zip(columns[-2::-1], columns[::-1]):
            targets: dict[int, list[_Node]] = {id(n): [] for n in column}
            for node in after:
                for source in node.sources:
                    targets[id(source)].append(node)
            if column is not columns[0]:
                _sort(column, targets, columns)


def _sort(column: list[_Node], neighbours: dict[int, list[_Node]], columns: list[list[_Node]]) -> None:
    """Stable, by the mean height of the neighbours."""
    at = {id(n): (i + 0.5) / len(c) for c in columns for i, n in enumerate(c)}
    mean = {key: float(np.mean([at[id(n)] for n in found])) for key, found in neighbours.items() if found}
    column.sort(key=lambda n: round(mean.get(id(n), at[id(n)]), 9))


def _place(columns: list[list[_Node]]) -> tuple[float, float]:
    """Where every node lies: columns side by side, each in the middle of the height. The size of all of it in inches."""
    heights = [sum(n.room for n in column) for column in columns]
    height, x = max(heights) + 0.3, 0.08
    for column, own in zip(columns, heights):
        wide = max(n.wide for n in column)
        apart = min((max(heights) - own) / len(column), 0.2)  # small nodes spread out where there is room
        y = (height - 0.3 + own + apart * len(column)) / 2
        for node in column:
            node.wide = wide if not node.lines else node.wide
            node.x, node.y = x + (wide - node.wide) / 2, y - (node.room + apart) / 2
            y -= node.room + apart
        x += wide + _GAP
    return x - _GAP + 0.08, height


def _draw_edge(panel: Axes, source: _Node, node: _Node) -> None:
    from matplotlib.patches import PathPatch
    from matplotlib.path import Path

    a, b = source.x + source.wide, node.x
    middle = (a + b) / 2
    curve = Path(
        [(a, source.y), (middle, source.y), (middle, node.y), (b, node.y)],
        [Path.MOVETO, Path.CURVE4, Path.CURVE4, Path.CURVE4],
    )
    panel.add_patch(PathPatch(curve, fc="none", ec=SOFT, lw=0.8, capstyle="round", zorder=1))


def _draw_node(panel: Axes, node: _Node) -> None:
    from matplotlib.patches import FancyBboxPatch, Rectangle

    corner = node.x, node.y - node.tall / 2
    box = FancyBboxPatch(
        corner, node.wide, node.tall, boxstyle=f"round,pad=0,rounding_size={0.08 if node.share is not None else 0.12}",
        fc=node.fill, ec=SOFT, lw=0.7, zorder=2,
    )  # fmt: skip
    panel.add_patch(box)
    first, *others = node.lines
    middle, step = node.x + node.wide / 2, 0.155
    top = node.y + step * len(others) / 2 + (0.02 if node.share is not None else 0.0)
    panel.text(middle, top, first, ha="center", va="center", fontsize=8.5, color=INK, zorder=4)
    for i, line in enumerate(others, 1):
        panel.text(middle, top - i * step, line, ha="center", va="center", fontsize=7, color=MUTED, zorder=4)
    if node.share is not None:
        left, long, y = node.x + 0.1, node.wide - 0.2, corner[1] + 0.035
        track = RULE if node.fill == BACKGROUND else BACKGROUND
        panel.add_patch(Rectangle((left, y), long, 0.035, fc=track, ec="none", alpha=0.8, zorder=3))
        panel.add_patch(Rectangle((left, y), long * min(node.share, 1.0), 0.035, fc=ACCENT, ec="none", zorder=3.5))


def _explain(figure: Figure, columns: Sequence[Sequence[_Node]], *, several: bool) -> None:
    """Bars, colours and letters, below; `several`: whether there is more than one output."""
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    nodes = [n for column in columns[1:-1] for n in column if n.lines]
    marks: list[Patch | Line2D] = []
    if any(n.share is not None for n in nodes):
        marks.append(
            Line2D([], [], color=ACCENT, lw=3, label=f"share of the error bound{' of the worst output' * several}")
        )
    tints = [n.fill for n in nodes if n.fill in TINTS]
    shared = next((tint for tint in tints if tints.count(tint) > 1), None)
    if shared is not None:
        marks.append(Patch(fc=shared, ec=SOFT, lw=0.7, label="same colour: the same stored head"))
    marks.append(Line2D([], [], color=SOFT, lw=0.8, label="what is read; u, v, w: sums of it"))
    letters = sum(len(str(mark.get_label())) + 8 for mark in marks)
    rows = -(-letters // max(1, int(13 * figure.get_figwidth())))
    figure.legend(handles=marks, loc="outside lower center", ncols=-(-len(marks) // rows), fontsize=8)
