"""The matrices of a head in the paper's form, by their symbols: those it stores, and those it forms at one input.

Every matrix knows its blocks and where the paper writes it. What is drawn, written and tabulated is this list.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from partita.compiler.compiled import Compiled
from partita.errors import NonFiniteValueError, OutsideDomainError, ShapeError, SizeError
from partita.functions.probing import split_flat
from partita.geometry.domains import Array
from partita.heads.head import count_text
from partita.heads.layers import LinearSum, LiteralNetwork, SelfNetwork
from partita.plots.head_views import partition_of

__all__ = ["Block", "LayersAt", "Matrix", "layers_at"]

MOST_NUMBERS = 1 << 24  # written and drawn, all matrices together
_ALL_COLUMNS = 512  # of KᵀQ: beyond, only those that W_O keeps are formed


@dataclass(frozen=True)
class Block:
    """A run of rows or columns: what the paper calls its length, and how long it is."""

    name: str
    size: int
    is_term: bool = False  # one P_i or Q_i: the name is not its length

    @property
    def text(self) -> str:
        """In TeX: `dG=20`, `P_1`, `1`."""
        plain = self.is_term or not self.name or self.name == str(self.size)
        return self.name if plain else f"{self.name}={self.size}"


@dataclass(frozen=True, eq=False)
class Matrix:
    """One matrix of the construction.

    Attributes:
        symbol: as the paper writes it, in TeX: `W_K`.
        file: the name of its files, without an ending.
        tensor: where the module holds it, or empty for what is formed at the input.
        place: where the paper writes it.
        meaning: one sentence.
        values: `(rows, columns)`. A sum `Σ_i P_i Z Q_i` lists its P_i side by side and its Q_i one below the other.
        rows, columns: the blocks. names: what stands in each block, in TeX, row by row.
        terms: how many P_i or Q_i stand here. arranged: how, "side by side" or "one below the other"; empty for one matrix.
    """

    symbol: str
    file: str
    tensor: str
    place: str
    meaning: str
    values: Array
    rows: tuple[Block, ...]
    columns: tuple[Block, ...]
    names: tuple[tuple[str, ...], ...]
    terms: int = 1
    arranged: str = ""

    @property
    def shape_text(self) -> str:
        """`3 × 9`, or of several terms `each 9 × 2, side by side`."""
        rows, columns = self.values.shape
        if self.arranged == "side by side":
            columns //= self.terms
        elif self.arranged:
            rows //= self.terms
        shape = f"{rows:,} × {columns:,}"
        return f"each {shape}, {self.arranged}" if self.arranged else shape

    @property
    def plain_symbol(self) -> str:
        """The symbol without TeX: `softmax(KᵀQ)`, `P_1 … P_4 of Linear`."""
        text = self.symbol.replace(r"\lim_{R\to\infty}", "limit of the ").replace(r"\ldots", "…").replace("$", "")
        text = re.sub(r"\\mathrm\{([^}]*)\}", r"\1", text).replace(r"^\top ", "ᵀ").replace(r"\circ", "∘")
        return re.sub(r"[{}]", "", text)


@dataclass(frozen=True, eq=False)
class LayersAt:
    """A head's layers and all their matrices at one input.

    Attributes:
        compiled: the head. network: its layers.
        at: the input, flat.
        matrices: in the order in which the paper defines them.
        weights, indicator: the attention matrix `softmax(KᵀQ)` in the columns that W_O keeps, and what it approximates, both
            `(columns of Linear(Z), n)`.
        mass: what the first of these columns puts on each cell, `(G,)`. cell: the cell that holds the input.
        output: what the layers return. expected: the function there, if it is known.
    """

    compiled: Compiled
    network: LiteralNetwork
    at: Array
    matrices: tuple[Matrix, ...]
    weights: Array
    indicator: Array
    mass: Array
    cell: int
    output: Array
    expected: Array | None


def layers_at(compiled: Compiled, network: LiteralNetwork, at: Sequence[float] | Array | None = None) -> LayersAt:
    """Every matrix of the layers at one input.

    Args:
        network: what `compiled.layers(…)` returned.
        at: the input, flat, `(m,)`; three tenths of the way along every axis of the domain if None.

    Raises:
        SizeError: together the matrices have more than 2²⁴ numbers.
        OutsideDomainError: the input lies outside the domain.
        ShapeError: the input has another length.
    """
    _require_size(network)
    point = _point(compiled, at)
    keys_from, queries_from = network.linears
    inputs = [torch.from_numpy(z).to(network.dtype) for z in split_flat(point[None], network.input_shapes)]
    z = [m.reshape(-1, s[0] if len(s) == 2 else 1, s[-1]).transpose(1, 2) for m, s in zip(inputs, network.input_shapes)]
    with torch.no_grad():
        attention, y_k, y_q = network.attention, keys_from(z[0])[0], queries_from(z[-1])[0]
        k, q, v = attention.w_k @ y_k, attention.w_q @ y_q, attention.w_v @ y_k
        scores = k.T @ q[:, : _columns_shown(network)]
        weights = torch.softmax(scores, dim=0)
        output = network(*inputs)
    formed = {"Y": y_k, "Y_Q": y_q, "K": k, "Q": q, "KQ": scores, "A": weights, "V": v}
    arrays = {name: t.double().numpy() for name, t in formed.items()} | {
        name: t.double().numpy() for name, t in network.state_dict().items()
    }
    arrays["out"] = _matrix(output.double().numpy()[0], network.output_shape)
    tokens, cells = attention.w_o.shape[1], compiled.num_keys
    cell = int(partition_of(compiled, "the layers").cell(point[None])[0])
    target, of_cell = _approximated(arrays, network, cell, cells, tokens)
    kept = arrays["A"][:, :tokens]
    mass = np.zeros(cells)
    np.add.at(mass, of_cell, kept[:, 0])
    expected = compiled.target(point[None])[0] if compiled.target.ask is not None else None
    matrices = _Layout(network, arrays, cells, target).matrices()
    shown = output.double().numpy()[0]
    return LayersAt(compiled, network, point, tuple(matrices), kept, target, mass, cell, shown, expected)


def _point(compiled: Compiled, at: Sequence[float] | Array | None) -> Array:
    box = compiled.target.box
    if at is None:
        points = getattr(compiled.target.domain, "flat", None)
        return np.array(points[0]) if points is not None else (box.lo + 0.3 * (box.hi - box.lo)).ravel()
    point = np.asarray(at, dtype=np.float64).ravel()
    if point.shape != (compiled.head.dimension,):
        raise ShapeError(f"the input has {point.size} numbers; this head takes {compiled.head.dimension}.")
    if not np.isfinite(point).all():
        raise NonFiniteValueError(f"the input is not finite: {point.tolist()}.")
    if not compiled.target.domain.contains(point[None])[0]:
        raise OutsideDomainError(
            f"the input {point.tolist()} lies outside {compiled.target.domain}. Choose one inside."
        )
    return point


def _columns_shown(network: LiteralNetwork) -> int:
    """Of KᵀQ and its softmax: all, or the n that W_O keeps where all would be too many."""
    asked = network.linears[1].constant.shape[1]
    return asked if asked <= _ALL_COLUMNS else network.attention.w_o.shape[1]


def _require_size(network: LiteralNetwork) -> None:
    columns, (keys_from, queries_from) = network.num_keys, network.linears
    formed = keys_from.constant.numel() + 2 * columns * _columns_shown(network)
    formed += 0 if isinstance(network, SelfNetwork) else queries_from.constant.numel()
    numbers = network.num_parameters + formed
    if numbers > MOST_NUMBERS:
        raise SizeError(
            f"the {network.form} form of this head has {count_text(columns)} columns: its matrices would be "
            f"{count_text(numbers)} numbers; the limit is {MOST_NUMBERS:,}",
            ("Use form='indexed', or a" if network.form == "log" else "A") + " head with fewer keys.",
        )


def _matrix(value: Array, shape: tuple[int, ...]) -> Array:
    """An output as the paper's `d × n`."""
    return value.T if len(shape) == 2 else value.reshape(-1, 1)


def _approximated(
    arrays: dict[str, Array], network: LiteralNetwork, cell: int, cells: int, tokens: int
) -> tuple[Array, np.ndarray]:
    """What the attention matrix tends to as R grows, in the columns that W_O keeps, and the cell of each of its rows.

    Only the rows of the input's cell are not zero: in the log form (B.10), `T/2d` and `E/2d`; in the indexed form a column of q.
    """
    columns = network.num_keys
    if network.form == "log":
        d = network.attention.w_v.shape[0]
        of_cell = np.tile(np.repeat(np.arange(cells), d), columns // (d * cells))
    else:
        of_cell = np.repeat(np.arange(cells), columns // cells)
    scores = np.where((of_cell == cell)[:, None], arrays["KQ"][:, :tokens], -np.inf)
    exponentials = np.exp(scores - scores.max(axis=0))
    return exponentials / exponentials.sum(axis=0), of_cell


class _Layout:
    """Which blocks each matrix of a form has, and where the paper writes it."""

    def __init__(self, network: LiteralNetwork, arrays: dict[str, Array], cells: int, target: Array) -> None:
        self.network, self.arrays, self.target = network, arrays, target
        self.is_self, self.is_log = isinstance(network, SelfNetwork), network.form == "log"
        self.d, self.n = network.attention.w_v.shape[0], network.attention.w_o.shape[1]
        self.half = self.d * cells
        self.wide = network.num_keys
        self.m_q = 0 if self.is_self else int(np.prod(network.input_shapes[1]))

    def matrices(self) -> list[Matrix]:
        return [*self._linears(), *self._attention()]

    def _linears(self) -> list[Matrix]:
        made = []
        for prefix, symbol, linear in self._named_linears():
            rows, columns = self._linear_rows(symbol), self._linear_columns(symbol)
            letter = symbol[-1] if "_" in symbol else ""
            z, below = ("Z" if not letter else f"Z_{letter}"), "" if not letter else f"_{letter.lower()}"
            where = self._place("Linear, above (B.5)", "(B.28)" if letter != "Q" else "(B.29)")
            terms, _, d = linear.left.shape
            tokens = linear.right.shape[1]
            stacked = self.arrays[f"{prefix}.left"].transpose(1, 0, 2).reshape(-1, terms * d)
            listed = self.arrays[f"{prefix}.right"].reshape(terms * tokens, -1)
            made += [
                self._made(
                    rf"{_listed('P', terms)}$ of $\mathrm{{{symbol}}}",
                    f"linear{below}_p",
                    f"{prefix}.left",
                    where,
                    f"Left factors of {symbol}({z}) = Σ_i P_i {z} Q_i + C: which input "
                    "coordinate term i reads, and into which row it writes.",
                    stacked,
                    rows,
                    _numbered("P", terms, d),
                    terms=terms,
                    arranged="side by side",
                ),
                self._made(
                    rf"{_listed('Q', terms)}$ of $\mathrm{{{symbol}}}",
                    f"linear{below}_q",
                    f"{prefix}.right",
                    where,
                    "Right factors: each Q_i has one row per token and holds the coordinates "
                    "of the centers that multiply input coordinate i.",
                    listed,
                    _numbered("Q", terms, tokens),
                    columns,
                    terms=terms,
                    arranged="one below the other",
                ),
                self._made(
                    rf"C$ of $\mathrm{{{symbol}}}",
                    f"linear{below}_c",
                    f"{prefix}.constant",
                    where,
                    "The constant of the Linear.",
                    self.arrays[f"{prefix}.constant"],
                    rows,
                    columns,
                    self._linear_names(symbol, constant=True),
                ),
                self._made(
                    rf"\mathrm{{{symbol}}}({z})",
                    f"linear{below}_at_z",
                    "",
                    self._place("(B.5)", "(B.28)" if letter != "Q" else "(B.29)"),
                    "The Linear's output at the input: the sequence that attention sees.",
                    self.arrays["Y_Q" if letter == "Q" else "Y"],
                    rows,
                    columns,
                    self._linear_names(symbol, constant=False),
                ),
            ]
        return made

    def _named_linears(self) -> list[tuple[str, str, LinearSum]]:
        if self.is_self:
            return [("linear", "Linear", self.network.linears[0])]
        return list(zip(("linear_k", "linear_q"), ("Linear_K", "Linear_Q"), self.network.linears))

    def _place(self, of_self: str, of_cross: str) -> str:
        if not self.is_log:
            return "ours: docs/theorems.md, indexed-form"
        return of_self if self.is_self else of_cross

    def _key_blocks(self) -> tuple[Block, ...]:
        if self.is_log:
            return Block("dG", self.half), Block("dG", self.half)
        return (Block("nG", self.wide),)

    def _query_columns(self, count: int) -> tuple[Block, ...]:
        rest = count - self.n
        return (Block("n", self.n), *([Block("2dG-n" if self.is_log else "nG-n", rest)] if rest else []))

    def _linear_rows(self, symbol: str) -> tuple[Block, ...]:
        if symbol == "Linear_Q":
            return Block("m_Q", self.m_q), Block("1", 1), Block("n", self.n)
        if self.is_log:
            blocks = [Block("1", 1), Block("dG", self.half), Block("dG", self.half)]
            return tuple(blocks if self.is_self else blocks[1:] + blocks[:1])
        if self.is_self:
            return Block("1", 1), Block("n", self.n), Block("d", self.d), Block("1", 1), Block("n", self.n)
        return Block("1", 1), Block("m_Q", self.m_q), Block("n", self.n), Block("d", self.d)

    def _linear_columns(self, symbol: str) -> tuple[Block, ...]:
        if symbol == "Linear_Q":
            return self._query_columns(self.network.linears[1].constant.shape[1])
        if self.is_log or not self.is_self:
            return self._key_blocks()
        return self._query_columns(self.wide)

    def _linear_names(self, symbol: str, *, constant: bool) -> list[list[str]]:
        if symbol == "Linear_Q":
            rest = len(self._linear_columns(symbol)) - 1
            first = "0" if constant else r"\tilde Z_Q"
            return [[name, *["0"] * rest] for name in (first, "1", "I_n")]
        if self.is_log:
            row = [("0" if constant else "X_0" if self.is_self else "X_K")] * 2
            identity = [["I_{dG}", "0"], ["0", "I_{dG}"]]
            return [row, *identity] if self.is_self else [*identity, row]
        offsets = r"-\|v_j\|^2/2" if constant else "s_j(z)"
        if not self.is_self:
            return [[offsets], ["v_Q"], ["e_i"], ["V_j"]]
        rest = len(self._linear_columns(symbol)) - 1
        names = [[offsets], ["e_i"], ["V_j"]]
        return [*([name] * (1 + rest) for (name,) in names), ["1", *["0"] * rest], ["I_n", *["0"] * rest]]

    def _attention_rows(self) -> tuple[tuple[Block, ...], list[str], list[str]]:
        """Rows of K and Q: their sizes, what K holds, what Q holds."""
        cross = [] if self.is_self else [Block("m_Q", self.m_q)]
        if self.is_log:
            return (
                (Block("1", 1), Block("1", 1), *cross, Block("n", self.n)),
                [
                    r"v_j\cdot z" if self.is_self else "X_K",
                    r"-\|v_j\|^2/2" if self.is_self else "W_0",
                    *["v_Q"] * len(cross),
                ],
                ["R", "R", *[r"R\tilde Z_Q"] * len(cross), "I_n"],
            )
        return (
            (Block("1", 1), *cross, Block("n", self.n)),
            ["s_j(z)", *["v_Q"] * len(cross), "e_i"],
            ["R", *[r"R\tilde Z_Q"] * len(cross), r"S\,I_n" if self.n > 1 else "0"],
        )

    def _attention(self) -> list[Matrix]:
        arrays, keys = self.arrays, self._key_blocks()
        rows, in_k, in_q = self._attention_rows()
        linear_k, linear_q = self._named_linears()[0][1], self._named_linears()[-1][1]
        k_rows, q_rows = self._linear_rows(linear_k), self._linear_rows(linear_q)
        if self.is_log and self.is_self:  # W_Q reads the first n columns of the identity
            q_rows = (Block("1", 1), *self._query_columns(2 * self.half))
        asked = self._query_columns(arrays["Q"].shape[1])
        empty = ["0"] * (len(asked) - 1)
        twice = len(keys) == 2
        k_names = [[name] * len(keys) for name in in_k]
        if self.is_log:
            k_names.append([r"\ln T^\top", r"\ln E^\top"])
        signs = [["X_1", "-X_1"]] if twice else [["V_j"]]
        if twice and not np.isin(np.abs(arrays["V"]), (0, 1)).all():  # values affine in z
            signs = [["", ""]]
        mixed = "dB\\,I_n" if self.is_log else "q^{-1}"
        halves = [[r"R s_j + \ln T"], [r"R s_j + \ln E"]] if twice else [[r"R s_j + S\,[i=t]"]]
        after = [[r"\frac{w_j}{2d}T"], [r"\frac{w_j}{2d}E"]] if twice else [[r"w_j\,q_{it}"]]
        near = [[r"\frac{1}{2d}T(v_s)"], [r"\frac{1}{2d}E(v_s)"]] if twice else [["e_s"]]
        even = [r"\frac{1}{2dG}"] if twice else [r"\frac{1}{nG}"]
        above = self._place("above (B.6)", "(B.30)")
        tail, drawn = len(asked) - 1, self._query_columns(arrays["KQ"].shape[1])
        aside = " Only the n columns that W_O keeps are shown." if len(drawn) < len(asked) else ""
        beyond = len(drawn) - 1
        return [
            self._made(
                "W_K",
                "w_k",
                "attention.w_k",
                above,
                "Keys from the Linear's output; T and E are those of (B.1) and (B.2)."
                if self.is_log
                else "Keys: the score and the token of a column.",
                arrays["attention.w_k"],
                rows,
                k_rows,
                self._weight_names("k", len(rows), len(k_rows)),
            ),
            self._made(
                "W_Q",
                "w_q",
                "attention.w_q",
                self._place("above (B.6)", "section B.3, below (B.30)"),
                "Queries from the Linear's output. It holds the inverse temperature R.",
                arrays["attention.w_q"],
                rows,
                q_rows,
                self._weight_names("q", len(rows), len(q_rows)),
            ),
            self._made(
                "W_V",
                "w_v",
                "attention.w_v",
                self._place("above (B.14)", "section B.3"),
                "Values: the first half of the columns counts as +1, the second as −1."
                if self.is_log
                else "Values: the rows of the Linear that hold V_j.",
                arrays["attention.w_v"],
                (Block("d", self.d),),
                k_rows,
                self._weight_names("v", 1, len(k_rows)),
            ),
            self._made(
                "W_O",
                "w_o",
                "attention.w_o",
                self._place("below (B.14)", "section B.3"),
                "Mixes tokens, from the right: it keeps the first n columns and restores the scale."
                if self.is_log
                else "Mixes tokens, from the right: it keeps the first n columns and undoes the leak between tokens.",
                arrays["attention.w_o"],
                asked,
                (Block("n", self.n),),
                [[mixed], *([["0"]] * tail)],
            ),
            self._made(
                "K",
                "k",
                "",
                self._place("above (B.6)", "section B.3"),
                "K = W_K Linear(Z), a key per column.",
                arrays["K"],
                rows,
                keys,
                k_names,
            ),
            self._made(
                "Q",
                "q",
                "",
                self._place("above (B.6)", "section B.3"),
                "Q = W_Q Linear(Z). Only the first n columns are queries; the others are zero.",
                arrays["Q"],
                rows,
                asked,
                [[name, *empty] for name in in_q],
            ),
            self._made(
                "V",
                "v",
                "",
                self._place("(B.14)", "section B.3"),
                "V = W_V Linear(Z).",
                arrays["V"],
                (Block("d", self.d),),
                keys,
                signs,
            ),
            self._made(
                r"K^\top Q",
                "scores",
                "",
                self._place("(B.6), the sum of (B.7) and (B.8)", "section B.3, above (B.32)"),
                "Scores: down a column, how well each key fits that query." + aside,
                arrays["KQ"],
                keys,
                drawn,
                [[*name, *["0"] * beyond] for name in halves],
            ),
            self._made(
                r"\mathrm{softmax}(K^\top Q)",
                "softmax",
                "",
                self._place("(B.13)", "(B.32) and (B.33)"),
                "The attention matrix. Columns that ask nothing weigh all keys equally; W_O drops them." + aside,
                arrays["A"],
                keys,
                drawn,
                [[*name, *(even * beyond)] for name in after],
            ),
            self._made(
                r"\lim_{R\to\infty}\mathrm{softmax}",
                "indicator",
                "",
                self._place("(B.10)", "section B.3"),
                "What the first n columns of the attention matrix approximate: all weight on the cell that holds the input.",
                self.target,
                keys,
                (Block("n", self.n),),
                near,
            ),
            self._made(
                r"\mathrm{Attn}\circ\mathrm{Linear}(Z)",
                "output",
                "",
                self._place("(B.15)", "(B.39)"),
                "The output, V softmax(KᵀQ) W_O.",
                arrays["out"],
                (Block("d", self.d),),
                (Block("n", self.n),),
                [[""]],
            ),
        ]

    def _weight_names(self, which: str, rows: int, columns: int) -> list[list[str]]:
        """Names of the blocks of W_K, W_Q and W_V; everything that is not named is 0."""
        names = [["0"] * columns for _ in range(rows)]
        last = rows - 1
        if self.is_log:
            score, first = (
                (0, 1) if self.is_self else (2, 0)
            )  # the column block of the score, and of the first identity
            if which == "v":
                names[0][first], names[0][first + 1] = "X_1", "-X_1"
            elif which == "k":
                names[0][score] = "1"
                for at, half in enumerate((r"\ln T^\top", r"\ln E^\top")):
                    names[1][first + at], names[last][first + at] = r"-\|v_j\|^2/2" if self.is_self else "W_0", half
                    if not self.is_self:
                        names[2][first + at] = "v_Q"
            elif self.is_self:
                names[0][1] = names[1][1] = "R"
                names[last][1] = "I_n"
            else:
                names[0][1] = names[1][1] = "R"
                names[2][0], names[3][2] = r"R\,I", "I_n"
            return names
        if which == "v":
            names[0][2 if self.is_self else 3] = "I_d"
        elif which == "k":
            for at in range(rows):
                names[at][at] = "I"
        elif self.is_self:
            names[0][3], names[1][4] = "R", r"S\,I_n" if self.n > 1 else "0"
        else:
            names[0][1], names[1][0], names[2][2] = "R", r"R\,I", r"S\,I_n" if self.n > 1 else "0"
        return names

    def _made(
        self,
        symbol: str,
        file: str,
        tensor: str,
        place: str,
        meaning: str,
        values: Array,
        rows: Sequence[Block],
        columns: Sequence[Block],
        names: Sequence[Sequence[str]] = (),
        *,
        terms: int = 1,
        arranged: str = "",
    ) -> Matrix:
        """The matrix, its blocks unnamed where they do not fill it (a form that has been extended)."""
        fits = sum(b.size for b in rows) == values.shape[0] and sum(b.size for b in columns) == values.shape[1]
        if not fits:
            rows, columns, names = [Block("", values.shape[0])], [Block("", values.shape[1])], ()
        if (len(names), len(names[0]) if names else 0) != (len(rows), len(columns)):
            names = [[""] * len(columns) for _ in rows]
        blocks = tuple(rows), tuple(columns), tuple(map(tuple, names))
        return Matrix(symbol, file, tensor, place, meaning, values, *blocks, terms, arranged if terms > 1 else "")


def _numbered(letter: str, count: int, size: int) -> tuple[Block, ...]:
    """One block per term, or all of them together where they are many."""
    if count > 12:
        return (Block(_listed(letter, count), count * size, is_term=True),)
    return tuple(Block(f"{letter}_{{{i + 1}}}", size, is_term=True) for i in range(count))


def _listed(letter: str, count: int) -> str:
    """`P_1`, `P_1, P_2`, or `P_1 … P_9` in TeX."""
    between = {1: "", 2: f", {letter}_2"}.get(count, rf" \ldots {letter}_{{{count}}}")
    return f"{letter}_1{between}"
