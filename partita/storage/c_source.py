"""A head as C99: one function that computes what the native loops compute for one point, and the tables that it reads.

The C stays within what a certificate allows every evaluator to round (docs/certificates.md), so the bound of the head is a bound of
its C. Differences `z − c` come first, then `R/2·d·d`, or `|d|² − p` times R/2; the exponential is part of the file and within 2
units in the last place; sums run axis after axis, so that a term passes through fewer roundings than are counted. Fused
multiply-adds are allowed. All arithmetic is in the head's own dtype. Nothing is allocated, and nothing is written but the outputs
and local arrays, whose sizes are known when the file is made.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from partita.errors import SizeError, UnsupportedError
from partita.geometry.domains import Array
from partita.heads.grid_head import GridHead
from partita.heads.head import Head, numbers, require_full
from partita.heads.network import AttentionNetwork
from partita.heads.scattered_head import ScatteredHead, exponent_cut
from partita.heads.train_head import TrainHead
from partita.heads.wiring import Affine
from partita.kernels import exponential
from partita.kernels.key_index import MOST_AXES_PRUNED
from partita.kernels.key_tree import LEAF, KeyTree

__all__ = ["CSource"]

_NUMBERS_AT_MOST = 1 << 21  # of a file: some 50 MB of text
_LOCAL_AT_MOST = 1 << 16  # of the arrays of one call
_NEAR = math.log(2.0)  # if the scores of the nearest centers are no larger in all, the weights need no reference
_WHOLE = 64  # keys from which on a search costs less than looking at all of them
_SEARCH_SLACK = 64.0  # units that a bound and a square may be off: both pass through m + 3 roundings, m at most 8


@dataclass(frozen=True)
class _Real:
    """How C spells the numbers of a dtype."""

    name: str  # of the type
    suffix: str  # of constants
    bits: str  # the integer type of the same size
    mantissa: int  # bits of it that are stored
    bias: int
    lanes: int  # sums that run side by side
    unit: float
    largest: float

    def literal(self, number: float) -> str:
        """The number in C, exactly."""
        if abs(number) < 1 << 20 and float(number).is_integer() and (number or math.copysign(1, number) > 0):
            return f"{int(number)}.0{self.suffix}"
        mantissa, exponent = float(number).hex().split("p")
        return f"{mantissa.rstrip('0').rstrip('.')}p{exponent}{self.suffix}"


_DOUBLE = _Real("double", "", "uint64_t", 52, 1023, 4, 2.0**-53, float(np.finfo(np.float64).max))
_SINGLE = _Real("float", "f", "uint32_t", 23, 127, 8, 2.0**-24, float(np.finfo(np.float32).max))


class CSource:
    """The C of one head, without comment or self-test.

    Args:
        head: a `GridHead`, `ScatteredHead`, `TrainHead`, or an `AttentionNetwork` of such, in float64 or float32.
        name: the prefix of every name in the file.

    Attributes:
        text: the tables and functions; the last one, `NAME_head(z, out)`, is the head.
        real: "double" or "float".
        numbers: how many numbers the tables hold.
        local: how many numbers the arrays of one call hold, at most.

    Raises:
        UnsupportedError: another kind of head, or another dtype.
        SizeError: more numbers than a C file should hold.
    """

    def __init__(self, head: Head, name: str) -> None:
        require_full(head, "a C file")
        self._real, self._prefix = {torch.float64: _DOUBLE, torch.float32: _SINGLE}[head.dtype], name
        self._tables: list[str] = []
        self._parts: list[str] = []
        self._helpers: dict[str, str] = {}
        self.real, self.numbers, self.local = self._real.name, 0, 0
        self._head(head, "head")
        self.text = "\n\n".join([*self._tables, *self._helpers.values(), *self._parts])

    def _head(self, head: Head, function: str) -> int:
        """Add a function for a head; returns how many numbers its local arrays hold."""
        known: dict[type, Callable[[Any, str], int]] = {
            GridHead: self._grid,
            ScatteredHead: self._scattered,
            TrainHead: self._train,
            AttentionNetwork: self._network,
        }
        if type(head) not in known:
            raise UnsupportedError(
                f"no C can be written for a {type(head).__name__}; expected one of "
                f"{', '.join(kind.__name__ for kind in known)}",
                "Export it to ONNX.",
            )
        self._require_size(sum(t.numel() for t in head.state_dict().values()))
        local = known[type(head)](head, function)
        self.local = max(self.local, local)
        if self.local > _LOCAL_AT_MOST:
            raise SizeError(
                f"one call would need {self.local:,} numbers on the stack; a C file may need {_LOCAL_AT_MOST:,} at most",
                "Export the head to ONNX.",
            )
        return local

    def _require_size(self, more: int) -> None:
        if self.numbers + more > _NUMBERS_AT_MOST:
            raise SizeError(
                f"the head has {self.numbers + more:,} numbers; a C file can have at most {_NUMBERS_AT_MOST:,}",
                "Export it to ONNX, or read the saved tensors, which programs can map into memory.",
            )

    # ---- pieces of text

    def _add(self, text: str, **parts: object) -> None:
        self._parts.append(self._filled(text, **parts))

    def _filled(self, text: str, **parts: object) -> str:
        """Text with `@name` replaced by the parts, `@real` by the type and `@_` by the prefix."""
        known = {"real": self._real.name, "_": f"{self._prefix}_", **parts}
        out = textwrap.dedent(text).strip("\n")
        for key in sorted(known, key=len, reverse=True):
            out = out.replace(f"@{key}", str(known[key]))
        return out

    def _table(self, name: str, given: Any, *, pad: int = 0) -> str:
        """A table of numbers, zeros added at its end; returns its name."""
        flat = np.concatenate([np.asarray(given, dtype=np.float64).ravel(), np.zeros(pad)])
        self._require_size(flat.size)
        self.numbers += flat.size
        return self._listed(self._real.name, name, [self._real.literal(x) for x in flat], 4)

    def _integers(self, name: str, given: Iterable[int]) -> str:
        return self._listed("int", name, [str(int(k)) for k in given], 16)

    def _listed(self, kind: str, name: str, texts: Sequence[str], across: int) -> str:
        symbol = f"{self._prefix}_{name}"
        rows = [", ".join(texts[k : k + across]) for k in range(0, len(texts), across)]
        body = ",\n    ".join(rows)
        self._tables.append(f"static const {kind} {symbol}[{len(texts)}] = {{\n    {body}}};")
        return symbol

    def _padded(self, count: int) -> int:
        return -(-count // self._real.lanes) * self._real.lanes

    # ---- helpers, written once

    def _need(self, name: str) -> None:
        """Add a helper, and those that it needs, unless it is there."""
        if name in self._helpers:
            return
        text, needs = (_EXPONENTIALS[self._real.name], ()) if name == "exponential" else _HELPERS[name]
        for other in needs:
            self._need(other)
        self._helpers[name] = self._filled(
            text,
            lanes=self._real.lanes,
            sum_of_lanes=_sum_of_lanes([f"s[{i}]" for i in range(self._real.lanes)]),
            zero=self._real.literal(0.0),
            one=self._real.literal(1.0),
            **self._constants(),
        )

    def _constants(self) -> dict[str, str]:
        if self._real is _DOUBLE:
            pairs = {f"c{i}{j}": exponential.DOUBLE[i][j] for i in range(5) for j in range(2)}
            named = {"least_x": exponential.LEAST, "shifter": exponential.SHIFTER, "log2e": exponential.RATE}
            high, low = exponential.LN_2
        else:
            pairs = {f"c{i}": float(c) for i, c in enumerate(exponential.SINGLE)}
            named = {
                "least_x": float(exponential.LEAST_SINGLE),
                "shifter": float(exponential.SHIFTER_SINGLE),
                "log2e": float(exponential.RATE_SINGLE),
            }
            high, low = map(float, exponential.LN_2_SINGLE)
        return {k: self._real.literal(v) for k, v in {**pairs, **named, "ln2_high": high, "ln2_low": low}.items()}

    # ---- heads

    def _grid(self, head: GridHead, function: str) -> int:
        counts, widths, m, outs = head.counts, head.widths, head.dimension, head.num_outputs
        rates, axes = numbers(head.inverse_temperature) / 2, [numbers(a) for a in head.axes]
        near = sum(r * (np.diff(a).max(initial=0.0) / 2) ** 2 for r, a in zip(rates, axes)) <= _NEAR
        near = near and head.largest_value(*_ends(axes)) * math.prod(widths) < self._real.largest / 16
        lines, local = [], 0
        for i, (axis, width) in enumerate(zip(axes, widths)):
            lines += self._axis(function, i, axis, width, float(rates[i]), near=near)
            local += self._padded(width)
        first = "start0"
        for i in range(1, m):
            first = f"({first} * {counts[i]} + start{i})"
        lines.append(f"const int cell = {first};")
        body, more = self._window_sum(function, "values", numbers(head.values), counts, widths, outs, "out")
        lines, local = [*lines, *body], local + more
        if head.value_slopes is not None and head.origin is not None:
            slopes, origin = numbers(head.value_slopes), self._table(f"{function}_origin", numbers(head.origin))
            lines.append(f"{self._real.name} slope[{outs * m}];")
            body, more = self._window_sum(function, "slopes", slopes, counts, widths, outs * m, "slope")
            lines += [
                *body,
                f"for (int o = 0; o < {outs}; o++)",
                f"    for (int i = 0; i < {m}; i++)",
                f"        out[o] += (z[i] - {origin}[i]) * slope[{m} * o + i];",
            ]
            local += more + outs * m
        if near:
            total = " * ".join(f"total{i}" for i in range(m))
            lines.append(f"for (int o = 0; o < {outs}; o++) out[o] /= {total};")
        what = " x ".join(map(str, counts))
        self._function(function, f"{what} keys on a product grid: one softmax per axis, then the values.", lines)
        return local

    def _axis(self, function: str, i: int, axis: Array, width: int, rate: float, *, near: bool = False) -> list[str]:
        """The weights of one axis in `w{i}`, which start at center `start{i}`.

        They are normalised, or, if there is always a center near, divided by `total{i}` at the end.
        """
        count, real = len(axis), self._real
        table, size = self._table(f"{function}_centers{i}", axis), self._padded(width)
        start = "0"
        if width < count:
            self._need("start")
            scale = real.literal((count - 1) / (axis[-1] - axis[0]))
            start = f"{self._prefix}_start(z[{i}], {table}, {count}, {width}, {scale})"
        lines = [f"const int start{i} = {start};", f"{real.name} w{i}[{size}];"]
        given = f"z[{i}], {table} + start{i}, {width}, {real.literal(rate)}"
        if near:
            self._need("weights_near")
            ends = f"{table}[0], {table}[{count - 1}]"
            lines.append(f"const {real.name} total{i} = {self._prefix}_weights_near({given}, {ends}, w{i});")
        else:
            self._need("weights")
            lines.append(f"{self._prefix}_weights({given}, w{i});")
        if size > width:
            lines.append(f"for (int k = {width}; k < {size}; k++) w{i}[k] = {real.literal(0.0)};")
        return lines

    def _window_sum(
        self,
        function: str,
        name: str,
        table: Array,
        counts: Sequence[int],
        widths: Sequence[int],
        columns: int,
        into: str,
    ) -> tuple[list[str], int]:
        """`into[o] = Σ Π_i w_i·table[cell][o]`, axis after axis, the first one last; with how many numbers it holds.

        With one column the lanes are neighbours on the last axis, else the columns of a cell.
        """
        real, m = self._real, len(counts)
        single = columns == 1
        lanes, axes = (real.lanes, m - 1) if single else (columns, m)
        held = self._table(f"{function}_{name}", table, pad=real.lanes - 1 if single else 0)
        strides = [math.prod(counts[i + 1 :]) * columns for i in range(m)]
        each = f"for (int l = 0; l < {lanes}; l++)"
        out, depth = [], 0

        def line(text: str) -> None:
            out.append("    " * depth + text)

        zero = real.literal(0.0)
        if single:
            line(f"{real.name} {into}_lanes[{lanes}] = {{{zero}}};")
            line(f"for (int j = 0; j < {self._padded(widths[-1])}; j += {lanes}) {{")
            depth += 1
        sums = [f"{into}{i}" for i in range(axes + 1)]
        for i in range(axes):
            line(f"{real.name} {sums[i]}[{lanes}] = {{{zero}}};")
            line(f"for (int k{i} = 0; k{i} < {widths[i]}; k{i}++) {{")
            depth += 1
        place = " + ".join(
            [f"cell * {columns}" if columns > 1 else "cell", *(f"k{i} * {strides[i]}" for i in range(axes))]
        )
        line(f"const {real.name} *{sums[axes]} = {held} + {place}{' + j' if single else ''};")
        for i in reversed(range(axes)):
            line(f"{each} {sums[i]}[l] += w{i}[k{i}] * {sums[i + 1]}[l];")
            depth -= 1
            line("}")
        if single:
            line(f"{each} {into}_lanes[l] += w{m - 1}[j + l] * {sums[0]}[l];")
            depth -= 1
            line("}")
            self._need("total")
            line(f"{into}[0] = {self._prefix}_total({into}_lanes, {lanes});")
        else:
            line(f"{each} {into}[l] = {sums[0]}[l];")
        return out, lanes * (axes + 1)

    def _train(self, head: TrainHead, function: str) -> int:
        ranks, counts, rates = head.ranks, head.counts, numbers(head.inverse_temperature) / 2
        self._need("advance")
        widest, real = max(ranks), self._real
        lines, local = [f"{real.name} row[{widest}] = {{{real.literal(1.0)}}}, next[{widest}];"], 3 * widest
        for i, (axis, core) in enumerate(zip(map(numbers, head.axes), map(numbers, head.cores))):
            lines += self._axis(function, i, axis, counts[i], float(rates[i]))
            held = self._table(f"{function}_core{i}", core)
            given = f"w{i}, {held}, {ranks[i]}, {counts[i]}, {ranks[i + 1]}"
            source, target = ("row", "next") if i % 2 == 0 else ("next", "row")
            lines.append(f"{self._prefix}_advance({source}, {given}, {target});")
            local += self._padded(counts[i])
        last = "next" if len(counts) % 2 else "row"
        lines.append(f"for (int o = 0; o < {ranks[-1]}; o++) out[o] = {last}[o];")
        what = " x ".join(map(str, counts))
        self._function(function, f"{what} keys whose values are a tensor train: a product of averaged matrices.", lines)
        return local

    def _scattered(self, head: ScatteredHead, function: str) -> int:
        tables = _ScatteredTables.of(head)
        searched = head.num_keys > _WHOLE and head.dimension <= MOST_AXES_PRUNED
        return self._searched(head, tables, function) if searched else self._listed_keys(tables, function)

    def _listed_keys(self, tables: _ScatteredTables, function: str) -> int:
        """A head of few keys: all of them."""
        real, size = self._real, self._padded(tables.keys)
        m, outs = tables.dimension, tables.outputs
        for name in ("exponential", "least", "total"):
            self._need(name)
        centers = self._table(f"{function}_centers", tables.centers.T)
        values = self._table(f"{function}_values", tables.values.T)
        zero = real.literal(0.0)
        lines = [f"{real.name} w[{size}], least;"]
        if tables.powers is None:
            lines.append(f"for (int k = 0; k < {tables.keys}; k++) w[k] = {zero};")
        else:
            powers = self._table(f"{function}_powers", -tables.powers)
            lines.append(f"for (int k = 0; k < {tables.keys}; k++) w[k] = {powers}[k];")
        lines += [
            f"for (int i = 0; i < {m}; i++)",
            f"    for (int k = 0; k < {tables.keys}; k++) {{",
            f"        const {real.name} d = z[i] - {centers}[{tables.keys} * i + k];",
            "        w[k] += d * d;",
            "    }",
            f"least = {self._prefix}_least(w, {tables.keys});",
            f"for (int k = 0; k < {tables.keys}; k++)",
            f"    w[k] = {self._prefix}_exponential({real.literal(tables.rate)} * (least - w[k]));",
            f"const {real.name} scale = {real.literal(1.0)} / {self._prefix}_total(w, {tables.keys});",
            f"for (int o = 0; o < {outs}; o++) {{",
            f"    {real.name} terms[{size}];",
        ]
        if tables.slopes is None:
            lines.append(
                f"    for (int k = 0; k < {tables.keys}; k++) terms[k] = w[k] * {values}[{tables.keys} * o + k];"
            )
        else:
            slopes = self._table(f"{function}_slopes", tables.slopes.transpose(1, 2, 0))
            at = f"{tables.keys} * ({m} * o + i) + k"
            lines += [
                f"    for (int k = 0; k < {tables.keys}; k++) terms[k] = {values}[{tables.keys} * o + k];",
                f"    for (int i = 0; i < {m}; i++)",
                f"        for (int k = 0; k < {tables.keys}; k++)",
                f"            terms[k] += {slopes}[{at}] * (z[i] - {centers}[{tables.keys} * i + k]);",
                f"    for (int k = 0; k < {tables.keys}; k++) terms[k] *= w[k];",
            ]
        lines += [f"    out[o] = {self._prefix}_total(terms, {tables.keys}) * scale;", "}"]
        self._function(function, f"{tables.keys} keys anywhere: all of them are summed.", lines)
        return 2 * size

    def _searched(self, head: ScatteredHead, tables: _ScatteredTables, function: str) -> int:
        """A head of many keys: those that matter are found in a tree of boxes."""
        real, m, outs = self._real, tables.dimension, tables.outputs
        tree = KeyTree.of(tables.centers, tables.powers)
        self._need("exponential")

        def finite(given: Array) -> Array:
            return np.minimum(given, real.largest)  # −p is infinite where there is no key

        keys = self._table(f"{function}_keys", finite(tree.keys[:-1]))
        boxes = self._table(f"{function}_boxes", finite(tree.boxes))
        values = self._table(f"{function}_values", tree.placed(tables.values, outs)[:-1])
        starts = self._integers(f"{function}_levels", tree.levels[:-1])
        sizes = self._integers(f"{function}_sizes", tree.sizes)
        levels, rate = len(tree.sizes), tables.rate
        off = _SEARCH_SLACK * real.unit
        slack = off * (0.0 if tables.powers is None else float(np.abs(tables.powers).max()))
        slopes = None
        if tables.slopes is not None:
            slopes = self._table(f"{function}_slopes", tree.placed(tables.slopes, outs * m)[:-1])
        centers = f"{keys}[{LEAF * (1 + m)} * leaf + {LEAF} * (1 + i) + k]"
        tilt = (
            ""
            if slopes is None
            else f"""
                        for (int i = 0; i < {m}; i++)
                            value += {slopes}[{LEAF * m * outs} * leaf + {LEAF} * ({m} * o + i) + k] * (z[i] - {centers});"""
        )
        helpers = {
            "f": f"{self._prefix}_{function}",
            "m": m,
            "leaf_size": LEAF * (1 + m),
            "group_size": LEAF * (1 + 2 * m),
            "eight": LEAF,
            "keys": keys,
            "boxes": boxes,
            "levels": starts,
            "sizes": sizes,
            "top": levels - 1,
            "stack": LEAF * levels,
            "zero": real.literal(0.0),
        }
        self._add(_TREE, **helpers)
        lines = self._filled(
            """
            int leaf = @f_nearest(z), stack[@stack], held;
            @real least = @huge, limit, total = @zero;
            /* the best score of all, from the nearest box on; then the sum over the keys that trail it by at most the cut */
            for (int pass = 0; pass < 2; pass++) {
                limit = least;
                if (pass == 0) {
                    @real excess[@eight];
                    @f_excess(z, leaf, excess);
                    for (int k = 0; k < @eight; k++) least = excess[k] < least ? excess[k] : least;
                    limit = least;
                    held = @f_push(z, @top, 0, limit, stack, 0);
                } else {
                    const @real size = least < @zero ? -least : least;
                    limit = least + @reach + @slack + @off * (size + @reach);
                    held = @f_push(z, @top, 0, limit, stack, 0);
                }
                while (held > 0) {
                    const int node = stack[--held], level = node % @levels_count;
                    if (level > 0) {
                        held = @f_push(z, level - 1, node / @levels_count, limit, stack, held);
                        continue;
                    }
                    leaf = node / @levels_count;
                    @real excess[@eight];
                    @f_excess(z, leaf, excess);
                    if (pass == 0) {
                        for (int k = 0; k < @eight; k++) least = excess[k] < least ? excess[k] : least;
                        limit = least;
                        continue;
                    }
                    for (int k = 0; k < @eight; k++) excess[k] = @_exponential(@rate * (least - excess[k]));
                    for (int k = 0; k < @eight; k++) total += excess[k];
                    for (int o = 0; o < @outs; o++)
                        for (int k = 0; k < @eight; k++) {
                            @real value = @values[@value_size * leaf + @eight * o + k];@tilt
                            sums[o] += excess[k] * value;
                        }
                }
            }
            for (int o = 0; o < @outs; o++) out[o] = sums[o] / total;
            """,
            **helpers,
            reach=real.literal(min(exponent_cut(tables.keys) / rate, real.largest / 4)),
            slack=real.literal(slack),
            off=real.literal(off),
            huge=real.literal(real.largest),
            rate=real.literal(rate),
            outs=outs,
            values=values,
            value_size=LEAF * outs,
            levels_count=levels,
            tilt=tilt,
        )
        opening = f"{real.name} sums[{outs}] = {{{real.literal(0.0)}}};"
        what = f"{tables.keys} keys anywhere: those that matter are found in a tree of boxes."
        self._function(function, what, [opening, *lines.split("\n")])
        return 2 * LEAF + outs + LEAF * levels

    def _network(self, network: AttentionNetwork, function: str) -> int:
        local = 0
        for g, head in enumerate(network.parts):
            local = max(local, self._head(head, f"{function}{g}"))
        self._need("affine")
        wiring, real, lines = network.wiring, self._real, []
        channels = wiring.inputs + sum(
            group.reads.rows // network.parts[group.head].dimension for layer in wiring.layers for group in layer
        )
        lines.append(f"{real.name} c[{channels}];")
        lines.append(f"for (int i = 0; i < {wiring.inputs}; i++) c[i] = z[i];")
        held, widest, now = wiring.inputs, 1, 0
        for layer in wiring.layers:
            for group in layer:
                k, name = network.parts[group.head].dimension, f"reads{now}"
                uses = group.reads.rows // k
                arguments = self._affine(f"{function}_{name}", group.reads)
                widest, now = max(widest, group.reads.rows), now + 1
                lines += [
                    "{",
                    f"    {real.name} u[{group.reads.rows}];",
                    f"    {self._prefix}_affine(c, {arguments}, u);",
                    f"    for (int k = 0; k < {uses}; k++) {self._prefix}_{function}{group.head}(u + {k} * k, c + {held} + k);",
                    "}",
                ]
                held += uses
        lines.append(f"{self._prefix}_affine(c, {self._affine(f'{function}_output', wiring.output)}, out);")
        what = f"{len(network.parts)} heads, used {channels - wiring.inputs} times: every use appends one number to c."
        self._function(function, what, lines)
        return local + int(channels) + widest

    def _affine(self, name: str, given: Affine) -> str:
        """The tables of a map, as arguments of `affine`."""
        rows, columns = np.nonzero(given.weight)
        starts = np.concatenate([[0], np.cumsum(np.bincount(rows, minlength=given.rows))])
        # a table needs an entry: a map of constants alone has no weight
        weight = given.weight[rows, columns] if len(rows) else np.zeros(1)
        tables = (
            self._integers(f"{name}_starts", starts),
            self._integers(f"{name}_columns", columns + given.start if len(rows) else [0]),
            self._table(f"{name}_weight", weight),
            self._table(f"{name}_bias", given.bias),
        )
        return ", ".join([str(given.rows), *tables])

    def _function(self, name: str, what: str, lines: Sequence[str]) -> None:
        body = "\n".join(f"    {line}" if line else "" for line in lines)
        real = self._real.name
        self._parts.append(
            f"/* {what} */\nstatic void {self._prefix}_{name}(const {real} *z, {real} *out)\n{{\n{body}\n}}"
        )


def _ends(axes: Sequence[Array]) -> tuple[Array, Array]:
    return np.array([a[0] for a in axes]), np.array([a[-1] for a in axes])


def _sum_of_lanes(terms: Sequence[str]) -> str:
    """The sum of a power of two of terms as a tree: far ones first, as vector registers are folded."""
    if len(terms) == 1:
        return terms[0]
    half = len(terms) // 2
    return _sum_of_lanes([f"({a} + {b})" for a, b in zip(terms, terms[half:])])


@dataclass(frozen=True, eq=False)
class _ScatteredTables:
    """The tensors of a scattered head as float64: centers `(N, m)`, values `(N, out)`, powers, slopes `(N, out, m)`; rate R/2."""

    centers: Array
    values: Array
    powers: Array | None
    slopes: Array | None
    rate: float

    @property
    def keys(self) -> int:
        return len(self.centers)

    @property
    def dimension(self) -> int:
        return int(self.centers.shape[1])

    @property
    def outputs(self) -> int:
        return int(self.values.shape[1])

    @classmethod
    def of(cls, head: ScatteredHead) -> _ScatteredTables:
        def held(given: Tensor | None) -> Array | None:
            return None if given is None else numbers(given)

        rate = float(numbers(head.inverse_temperature)) / 2
        return cls(numbers(head.centers), numbers(head.values), held(head.powers), held(head.value_slopes), rate)


_EXPONENTIALS = {
    "double": """
/* e^x for x <= 0, within 2 units in the last place; 0 below @least_x. It is 2^n e^r with |r| <= ln(2)/2. */
static inline double @_exponential(double x)
{
    const double t = x < @least_x ? @least_x : x;
    const double shifted = t * @log2e + @shifter;
    const double n = shifted - @shifter;
    const double r = (t - n * @ln2_high) - n * @ln2_low;
    const double square = r * r;
    double p = @c00 * r + @c01, power;
    uint64_t bits;
    p = p * square + (@c10 * r + @c11);
    p = p * square + (@c20 * r + @c21);
    p = p * square + (@c30 * r + @c31);
    p = p * square + (@c40 * r + @c41);
    memcpy(&bits, &shifted, sizeof bits);
    bits = (bits + 1023u) << 52;
    memcpy(&power, &bits, sizeof power);
    return x < @least_x ? 0.0 : (p * square + (r + 1.0)) * power;
}
""",
    "float": """
/* e^x for x <= 0, within 2 units in the last place; 0 below @least_x. It is 2^n e^r with |r| <= ln(2)/2. */
static inline float @_exponential(float x)
{
    const float t = x < @least_x ? @least_x : x;
    const float shifted = t * @log2e + @shifter;
    const float n = shifted - @shifter;
    const float r = (t - n * @ln2_high) - n * @ln2_low;
    float p = @c0 * r + @c1, power;
    uint32_t bits;
    p = p * r + @c2;
    p = p * r + @c3;
    p = p * r + @c4;
    memcpy(&bits, &shifted, sizeof bits);
    bits = (bits + 127u) << 23;
    memcpy(&power, &bits, sizeof power);
    return x < @least_x ? 0.0f : ((p * r + 1.0f) * r + 1.0f) * power;
}
""",
}

# text, and the helpers that it calls
_HELPERS: dict[str, tuple[str, tuple[str, ...]]] = {
    "total": (
        """
        /* The sum of n numbers, in @lanes partial sums. */
        static inline @real @_total(const @real *x, int n)
        {
            @real s[@lanes] = {@zero};
            int k = 0;
            for (; k + @lanes <= n; k += @lanes)
                for (int l = 0; l < @lanes; l++) s[l] += x[k + l];
            for (; k < n; k++) s[0] += x[k];
            return @sum_of_lanes;
        }
        """,
        (),
    ),
    "least": (
        """
        /* The least of n numbers, n >= 1. */
        static inline @real @_least(const @real *x, int n)
        {
            @real least = x[0];
            for (int k = 1; k < n; k++) least = x[k] < least ? x[k] : least;
            return least;
        }
        """,
        (),
    ),
    "weights_near": (
        """
        /* e^(-rate (x - c)^2) for n centers of an axis from `low` to `high`, of which one is always near unless x lies beyond
           the ends: then relative to the nearer end. Returns the sum. */
        static inline @real @_weights_near(@real x, const @real *c, int n, @real rate, @real low, @real high, @real *w)
        {
            const @real below = low - x, above = x - high;
            @real beyond = below > above ? below : above, least;
            beyond = beyond > @zero ? beyond : @zero;
            least = rate * beyond * beyond;
            for (int k = 0; k < n; k++) {
                const @real d = x - c[k];
                w[k] = @_exponential(least - rate * d * d);
            }
            return @_total(w, n);
        }
        """,
        ("exponential", "total"),
    ),
    "weights": (
        """
        /* The softmax of -rate (x - c)^2 over n centers, relative to the best score. */
        static inline void @_weights(@real x, const @real *c, int n, @real rate, @real *w)
        {
            @real least, scale;
            for (int k = 0; k < n; k++) {
                const @real d = x - c[k];
                w[k] = rate * d * d;
            }
            least = @_least(w, n);
            for (int k = 0; k < n; k++) w[k] = @_exponential(least - w[k]);
            scale = @one / @_total(w, n);
            for (int k = 0; k < n; k++) w[k] *= scale;
        }
        """,
        ("exponential", "least", "total"),
    ),
    "start": (
        """
        /* Where the window of n centers around x starts, on an axis of `count` nearly equally spaced ones. */
        static inline int @_start(@real x, const @real *c, int count, int n, @real scale)
        {
            const @real guess = (x - c[0]) * scale;
            int k = 0;
            if (guess >= (@real)(count - 2)) k = count - 2;
            else if (guess > @zero) k = (int)guess;
            if (k > 0 && x < c[k]) k--;
            if (k < count - 2 && x >= c[k + 1]) k++;
            k -= n / 2 - 1;
            return k < 0 ? 0 : k > count - n ? count - n : k;
        }
        """,
        (),
    ),
    "advance": (
        """
        /* next[r] = sum over l of row[l] times the mean of core[l][.][r], for a core of shape (left, n, right). */
        static inline void @_advance(const @real *row, const @real *w, const @real *core, int left, int n, int right, @real *next)
        {
            for (int r = 0; r < right; r++) next[r] = @zero;
            for (int l = 0; l < left; l++)
                for (int r = 0; r < right; r++) {
                    @real mean = @zero;
                    for (int k = 0; k < n; k++) mean += w[k] * core[(l * n + k) * right + r];
                    next[r] += row[l] * mean;
                }
        }
        """,
        (),
    ),
    "affine": (
        """
        /* out[i] = bias[i] + the sum of weight[k] c[column[k]] over the k of row i. */
        static void @_affine(const @real *c, int rows, const int *start, const int *column, const @real *weight, const @real *bias,
                             @real *out)
        {
            for (int i = 0; i < rows; i++) {
                @real sum = bias[i];
                for (int k = start[i]; k < start[i + 1]; k++) sum += weight[k] * c[column[k]];
                out[i] = sum;
            }
        }
        """,
        (),
    ),
}

_TREE = """
/* |z - box|^2 - the largest power in it, for the eight boxes of a group: no key in a box has less. */
static inline void @f_boxes_from(const @real *z, int group, @real *distance)
{
    const @real *box = @boxes + @group_size * group;
    for (int k = 0; k < @eight; k++) distance[k] = box[k];
    for (int i = 0; i < @m; i++)
        for (int k = 0; k < @eight; k++) {
            const @real below = box[@eight * (1 + i) + k] - z[i], above = z[i] - box[@eight * (1 + @m + i) + k];
            @real gap = below > above ? below : above;
            gap = gap > @zero ? gap : @zero;
            distance[k] += gap * gap;
        }
}

/* |z - c|^2 - p for the eight keys of a leaf. */
static inline void @f_excess(const @real *z, int leaf, @real *excess)
{
    const @real *key = @keys + @leaf_size * leaf;
    for (int k = 0; k < @eight; k++) excess[k] = key[k];
    for (int i = 0; i < @m; i++)
        for (int k = 0; k < @eight; k++) {
            const @real d = z[i] - key[@eight * (1 + i) + k];
            excess[k] += d * d;
        }
}

/* Put the nodes of a group that lie within the limit on the stack, as node * levels + level; returns how many it holds then. */
static inline int @f_push(const @real *z, int level, int group, @real limit, int *stack, int held)
{
    @real distance[@eight];
    const int first = @eight * group, left = @sizes[level] - first;
    @f_boxes_from(z, @levels[level] + group, distance);
    for (int k = 0; k < @eight && k < left; k++)
        if (distance[k] <= limit) stack[held++] = (first + k) * (@top + 1) + level;
    return held;
}

/* The leaf that is reached through the nearest box of every level. */
static inline int @f_nearest(const @real *z)
{
    int node = 0;
    for (int level = @top; level >= 0; level--) {
        @real distance[@eight];
        int best = 0;
        @f_boxes_from(z, @levels[level] + node, distance);
        for (int k = 1; k < @eight && @eight * node + k < @sizes[level]; k++)
            if (distance[k] < distance[best]) best = k;
        node = @eight * node + best;
    }
    return node;
}
"""
