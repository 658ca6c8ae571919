"""Heads of two keys in closed form: `net = A + B tanh(φ)` with affine A, B and φ, compared with an expression of that form.

Nothing is searched. Stored numbers are compared with the exact ones in rational arithmetic. Roundings are counted slab by slab, a
slab being the points at which φ lies between two numbers: far from φ = 0 one key has all the weight, so that what is rounded in its
score does not matter, however large the box is.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from partita.arithmetic.precision import Precision
from partita.arithmetic.rounding import add_up, mul_up, sqrt_up, up
from partita.errors import UnsupportedError
from partita.functions.quotients import Logistic, Quadratic, two_key_form
from partita.functions.target import Target
from partita.geometry.domains import Array
from partita.geometry.envelopes import Rows
from partita.heads.head import FoldedHead, Head
from partita.heads.scattered_head import ScatteredHead
from partita.proofs.center_values import lp_factor
from partita.proofs.certificate import Term
from partita.proofs.proof import Given, Proof, Proved
from partita.proofs.soft_maximum import exact

__all__ = ["SMALL_TURN", "TwoKeysProof", "misread", "stored_form"]

SMALL_TURN = Fraction(1, 4)  # |φ| up to which tanh is compared with a line by its series
_INFLATE = 1 + 1e-9  # covers the float64 rounding of short sums and of tanh
_STEP, _FAR = (
    1 / 8,
    24.0,
)  # slabs of φ: equal ones up to ±24, where one key has all but 1e-20 of the weight; then they double


class TwoKeysProof(Proof):
    """`A + B tanh(φ)` against a quotient of two exponentials, which it equals but for what is stored, or against a quadratic
    polynomial, where `tanh(φ)` stands for a multiple of φ. *Theorem*: `two-keys`, `two-key-products`.
    """

    name = "two_keys"
    moves_inputs = True

    def handles(self, head: Head) -> bool:
        return isinstance(head, ScatteredHead) and head.num_keys == 2

    def _prove(self, head: FoldedHead, target: Target, given: Given) -> Proved:
        if not isinstance(head, ScatteredHead) or head.num_keys != 2 or target.graph is None:
            raise UnsupportedError("a proof for two keys needs a scattered head of two keys and an expression.")
        precision, box = Precision.of(head.dtype), target.box
        margins = precision.moved(box.lo.ravel(), box.hi.ravel()) if precision.rounds_inputs else None
        form = two_key_form(target.graph, box, margins=margins)
        stored = stored_form(head, form.middle, form.radii)
        slabs = _Slabs.of(stored.turn)
        run = _Run.of(head, stored, slabs)
        terms = _misread_terms(stored, form) if isinstance(form, Quadratic) else _stored_terms(stored, form, slabs, run)
        terms += run.terms(head, stored, slabs)
        if precision.rounds_inputs:
            moved = _moved(form, precision)
            terms.append(Term("input rounding", moved, "sup Σ_i |∂_i f| u |z_i|", "two-keys", source="input"))
        if not math.isinf(given.norm):
            factor = lp_factor(target.volume, target.num_outputs, given.norm)
            terms = [Term(t.name, mul_up(t.value, factor), t.formula, t.theorem, t.inputs, t.source) for t in terms]
        return Proved(terms, {"method": self.name}, settled=add_up(*(t.value for t in terms)) <= given.tolerance)


def stored_form(head: ScatteredHead, middle: tuple[Fraction, ...], radii: tuple[Fraction, ...]) -> Logistic:
    """The head as `A + B tanh(φ)`, exactly, in coordinates |t| ≤ 1 of the box."""
    center, sides = (np.array(x, dtype=object) for x in (middle, radii))
    away, rate = exact(head.centers) - center, Fraction(float(head.inverse_temperature))
    powers = exact(head.powers) if head.powers is not None else np.full(2, Fraction(0))
    offsets = powers - (away * away).sum(axis=1)
    turn = np.array([rate * (offsets[1] - offsets[0]) / 4, *(rate * (away[1] - away[0]) * sides / 2)], dtype=object)
    slopes = np.full((*head.values.shape, len(middle)), Fraction(0))
    if head.value_slopes is not None:
        slopes = exact(head.value_slopes)
    at_middle = exact(head.values) - (slopes * away[:, None]).sum(axis=2)
    values = np.concatenate([at_middle[:, :, None], slopes * sides], axis=2)
    level, swing = (values[0] + values[1]) / 2, (values[1] - values[0]) / 2
    return Logistic(middle, radii, turn, Fraction(0), level, swing)


def misread(slope: Fraction, reach: Fraction) -> float:
    """`sup |tanh(t) − slope·t|` for |t| ≤ reach, rounded up; a rough bound for a reach above a quarter.

    `0 ≤ tanh(t) − t + t³/3 ≤ 2t⁵/15` for t in [0, 1], and `(1 − slope)t − t³/3` is largest at `√(1 − slope)` or at the end.
    """
    if reach > SMALL_TURN:
        return _above(min(reach, Fraction(1)) + abs(slope) * reach)
    rest, high = 1 - slope, _above(abs((1 - slope) * reach - reach**3 / 3))
    if 0 < rest < reach * reach:
        high = max(high, mul_up(_above(rest), sqrt_up(_above(rest)), _above(Fraction(2, 3))))
    return add_up(high, _above(2 * reach**5 / 15))


def _misread_terms(stored: Logistic, form: Quadratic) -> list[Term]:
    """`f − A = κBφ + r` with the κ that leaves least of r, so that `|net − f| ≤ sup|B| sup|tanh(φ) − κφ| + sup|r|`."""
    reach, worst = abs(stored.turn).sum(), (0.0, 0.0, {"reach": _above(abs(stored.turn).sum())})
    for level, square, own, swing in zip(form.level, form.squares, stored.level, stored.swing):
        bent = np.multiply.outer(swing[1:], stored.turn[1:])
        bent = (bent + bent.T) / 2
        place = np.unravel_index(int(abs(bent).argmax()), bent.shape)
        slope = square[place] / bent[place] if bent[place] else Fraction(0)
        line = level - own - slope * (swing[0] * stored.turn + stored.turn[0] * swing)
        line[0] += slope * swing[0] * stored.turn[0]
        rest = abs(line).sum() + abs(square - slope * bent).sum()
        found = mul_up(_above(abs(swing).sum()), misread(slope, reach), 1 + 1e-12), _above(rest)
        worst = max(found[0], worst[0]), max(found[1], worst[1]), worst[2]
    key = "two-key-products"
    return [
        Term("reading", worst[0], "sup |B| · sup |tanh(φ) − κφ|", key, worst[2]),
        Term("stored values", worst[1], "sup |f − A − κBφ|", key, source="storage"),
    ]


def _stored_terms(stored: Logistic, form: Logistic, slabs: _Slabs, run: _Run) -> list[Term]:
    """What storing did: `|tanh(φ̃) − tanh(φ)| ≤ |φ̃ − φ|/cosh²`, and values that are mixed."""
    sign = 1 if sum(a * b for a, b in zip(stored.turn, form.turn)) >= 0 else -1  # the keys may be in either order
    away = slabs.largest((stored.turn - sign * form.turn)[None])[:, 0] + _above(form.unsure)
    scores = (slabs.largest(form.swing) * (away * slabs.mixed(away))[:, None]).max() * _INFLATE
    values = np.stack([_ends(stored, j) - _ends(form, (1 - j if sign < 0 else j)) for j in (0, 1)])
    off = sum(run.weights[j][:, None] * slabs.largest(values[j]) for j in (0, 1))
    key = "two-keys"
    return [
        Term("stored scores", _rounded(scores), "sup |B| · |φ̃ − φ|/cosh²(φ)", key, source="storage"),
        Term("stored values", _rounded(off.max() * _INFLATE), "sup Σ_j w_j |Ṽ_j − V_j|", key, source="storage"),
    ]


def _ends(form: Logistic, key: int) -> Rows:
    """The values of a key, `(out, 1 + m)`."""
    return form.level + form.swing if key else form.level - form.swing


@dataclass(frozen=True, eq=False)
class _Slabs:
    """Parts of the cube |t| ≤ 1 on which φ lies between two numbers.

    Attributes:
        lo, hi: of φ, `(slabs,)`. middle, radius: of boxes that hold the slabs, `(slabs, m)`.
    """

    lo: Array
    hi: Array
    middle: Array
    radius: Array

    @classmethod
    def of(cls, turn: Rows) -> _Slabs:
        row = turn.astype(np.float64)
        size = float(np.abs(row).sum()) * _INFLATE
        low, high = row[0] - np.abs(row[1:]).sum(), row[0] + np.abs(row[1:]).sum()
        pad = 1e-15 * (len(row) + 8) * size + 1e-300  # of sums of as many floats
        even = np.arange(-_FAR, _FAR + _STEP, _STEP)
        beyond = [_FAR * 2.0**k for k in range(1, 1000) if _FAR * 2.0 ** (k - 1) < size]
        edges = np.unique(np.clip([*(-x for x in beyond), *even, *beyond], low, high))
        edges = np.unique([low - pad, *edges[1:-1], high + pad])
        lo, hi = edges[:-1] - pad, edges[1:] + pad
        others = np.abs(row[1:]).sum() - np.abs(row[1:])
        with np.errstate(divide="ignore", invalid="ignore"):  # axes on which φ does not depend
            ends = np.stack([(lo[:, None] - row[0] - others) / row[1:], (hi[:, None] - row[0] + others) / row[1:]])
        room = np.where(row[1:] == 0, np.inf, 2 * pad / np.maximum(np.abs(row[1:]), 1e-300))
        left = np.maximum(np.nan_to_num(ends.min(axis=0), nan=-np.inf) - room, -1.0)
        right = np.minimum(np.nan_to_num(ends.max(axis=0), nan=np.inf) + room, 1.0)
        left, right = np.minimum(left, 1.0), np.maximum(right, -1.0)
        return cls(lo, hi, (left + right) / 2, np.maximum(right - left, 0.0) / 2 * _INFLATE)

    def largest(self, rows: Rows) -> Array:
        """`sup |b + a·t|` for rows `(k, 1 + m)`, `(slabs, k)`."""
        table = rows.astype(np.float64)
        found = np.abs(table[:, 0] + self.middle @ table[:, 1:].T) + self.radius @ np.abs(table[:, 1:]).T
        found = (found + 1e-13 * np.abs(table).sum(axis=1)) * _INFLATE + 1e-300
        return np.asarray(found)

    @property
    def size(self) -> Array:
        """`sup |φ|`."""
        return np.maximum(np.abs(self.lo), np.abs(self.hi))

    def mixed(self, moved: Array) -> Array:
        """`sup 1/cosh²` within `moved` of φ: how much of the weight two keys share, times 4."""
        near = np.where((self.lo <= 0) & (self.hi >= 0), 0.0, np.minimum(np.abs(self.lo), np.abs(self.hi)))
        with np.errstate(over="ignore"):
            return 1 / np.cosh(np.minimum(np.maximum(near - moved, 0.0) * (1 - 1e-9), 300.0)) ** 2 * _INFLATE


@dataclass(frozen=True, eq=False)
class _Run:
    """What running the head rounds, slab by slab.

    Attributes:
        shift: how far φ may be off as the scores are run. weights: the most that each key may hold, `(2, slabs)`.
        values: sup |V_j|, and tall: `|V_j| + |J_j||z − c_j|`, `(2, slabs, out)`.
    """

    shift: Array
    weights: Array
    values: Array
    tall: Array

    @classmethod
    @np.errstate(over="ignore", invalid="ignore")
    def of(cls, head: ScatteredHead, stored: Logistic, slabs: _Slabs) -> _Run:
        precision, m = Precision.of(head.dtype), head.dimension
        centers, rate = head.centers.detach().double().numpy(), float(head.inverse_temperature)
        sides = np.array([_above(r) for r in stored.radii])
        shifted = np.array([[float(c - Fraction(x)) for x, c in zip(row, stored.middle)] for row in centers.tolist()])
        far = np.abs(shifted[:, None] + sides * slabs.middle) + sides * slabs.radius  # (2, slabs, m)
        far = (far + 1e-13 * (np.abs(shifted)[:, None] + sides)) * _INFLATE
        powers = np.zeros(2) if head.powers is None else np.abs(head.powers.detach().double().numpy())
        scores = rate / 2 * ((far * far).sum(axis=2) + powers[:, None]) * _INFLATE + precision.smallest / precision.unit
        delta = 1.01 * precision.unit * ((m + 6) * scores + 17) + precision.tiniest * (2 + m * rate)
        shift = (delta.sum(axis=0) / 2 + 2.02 * precision.unit * slabs.size) * _INFLATE
        with np.errstate(over="ignore"):
            weights = np.stack([1 / (1 + np.exp(2 * (slabs.lo - shift))), 1 / (1 + np.exp(-2 * (slabs.hi + shift)))])
        slopes = np.zeros((*head.values.shape, m))
        if head.value_slopes is not None:
            slopes = np.abs(head.value_slopes.detach().double().numpy())
        held = np.abs(head.values.detach().double().numpy())
        tall = (held[:, None] + np.einsum("jsm,jom->jso", far, slopes)) * _INFLATE
        values = np.stack([slabs.largest(_ends(stored, j)) for j in (0, 1)])
        return cls(shift, weights * _INFLATE, np.minimum(values, tall), tall)

    @np.errstate(over="ignore", invalid="ignore")
    def terms(self, head: ScatteredHead, stored: Logistic, slabs: _Slabs) -> list[Term]:
        """`|tanh(φ + θ) − tanh(φ)| ≤ θ/cosh²(|φ| − θ)` for scores, and the counts of `max-affine-values` for values and sums."""
        precision, m = Precision.of(head.dtype), head.dimension
        scores = slabs.largest(stored.swing) * (self.shift * slabs.mixed(self.shift))[:, None]
        each = 1.01 * (m + 3) * precision.unit * self.tall + (m + 1) * precision.tiniest
        evaluated = (self.weights[:, :, None] * each).sum(axis=0)
        operations = 2.0 * head.num_keys + 8.0
        added = 1.01 * operations * precision.unit * (self.weights[:, :, None] * (self.values + each)).sum(axis=0)
        lost = 4 * head.num_keys * (precision.smallest * self.tall.max() + precision.tiniest)
        delta, key = float(self.shift.max()), "two-keys"
        rows: list[tuple[str, float, str, dict[str, float]]] = [
            ("score rounding", scores.max(), "sup |B| · δ/cosh²(|φ| − δ)", {"delta": delta}),
            ("value rounding", evaluated.max(), "γ·Σ_j w_j(|V_j| + |J_j||z − c_j|)", {}),
            ("summation", added.max() + lost, "γ_K·Σ_j w_j|V_j|", {"operations": operations}),
        ]
        return [Term(name, _rounded(x), said, key, inputs, source="rounding") for name, x, said, inputs in rows]


def _moved(form: Logistic | Quadratic, precision: Precision) -> float:
    """How far f moves when z is stored."""
    slabs = _Slabs.of(form.turn if isinstance(form, Logistic) else np.full(1 + len(form.middle), Fraction(0)))
    middle, sides = (np.array(list(map(float, x))) for x in (form.middle, form.radii))
    reach = np.abs(middle + sides * slabs.middle) + sides * slabs.radius
    reach = (reach + 1e-13 * (np.abs(middle) + sides)) * _INFLATE
    moved = precision.moved(-reach, reach) * (1 + 1e-6)  # (slabs, m); a stored input may be in the next slab
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        share = np.where(sides > 0, moved / sides, 0.0)  # in units of half a side
    if isinstance(form, Quadratic):
        slopes = abs(form.level[:, 1:]) + 2 * abs(form.squares).sum(axis=2)
        return _rounded((share.max(axis=0) * slopes.astype(np.float64)).sum(axis=1).max() * _INFLATE)
    turn = np.abs(form.turn.astype(np.float64))
    near = share @ turn[1:] + _above(form.unsure)
    ends = [np.tanh(slabs.lo - near) - 1e-12, np.tanh(slabs.hi + near) + 1e-12]
    level, swing = (rows[:, 1:].astype(np.float64) for rows in (form.level, form.swing))
    along = np.maximum(*(np.abs(level + end[:, None, None] * swing) for end in ends))
    across = (slabs.largest(form.swing) + share @ np.abs(swing).T)[:, :, None] * turn[1:]
    slopes = along + across * slabs.mixed(near)[:, None, None]
    return _rounded((slopes * share[:, None]).sum(axis=2).max() * _INFLATE)


def _above(number: Fraction) -> float:
    """A float that is at least the number."""
    return float(up(float(number))) if number else 0.0


def _rounded(number: float) -> float:
    """Infinite where something overflowed."""
    return float(number) if math.isfinite(number) else math.inf
