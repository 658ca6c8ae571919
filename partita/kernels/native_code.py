"""How the native loops are compiled by numba, the exponential that they share, and four numbers side by side (`four`).

Imported only where numba is, when a batch is worth it.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic, lower_builtin, models, overload, register_model, type_callable

from partita.kernels.exponential import (
    DOUBLE,
    LEAST,
    LEAST_SINGLE,
    LN_2,
    LN_2_SINGLE,
    RATE,
    RATE_SINGLE,
    SHIFTER,
    SHIFTER_SINGLE,
    SINGLE,
)

__all__ = [
    "CACHED",
    "append_set",
    "at_most",
    "exp2_four",
    "exp2_short",
    "exp_native",
    "four",
    "fours_from",
    "fused",
    "fused_part",
    "inlined_part",
    "larger_four",
    "least_of",
    "least_part",
    "loop",
    "part",
    "prefetch",
    "put_four",
    "smaller_four",
    "summed_part",
    "total_of",
]


def _can_be_cached() -> bool:
    """Whether numba finds a folder to keep machine code in: beside this file, or the user's own cache."""
    try:
        njit(cache=True)(_can_be_cached)
    except RuntimeError:  # neither can be written
        return False
    return True


CACHED = _can_be_cached()

# numpy's error model: a division does not branch, so that loops vectorise
_PLAIN: dict[str, Any] = {"nogil": True, "error_model": "numpy"}
_FUSED: dict[str, Any] = {**_PLAIN, "fastmath": {"contract"}}  # a·b + c may round once
# and sums may take any order
_SUMMED: dict[str, Any] = {**_PLAIN, "fastmath": {"contract", "reassoc"}}
# and no number is NaN, so that the least of them is found in any order
_LEAST_OF: dict[str, Any] = {**_PLAIN, "fastmath": {"contract", "reassoc", "nnan", "nsz"}}
# Arguments that are literals are wrapped, np.int64(0), because numba would compile once more for them.
# For functions that other loops call and Python does not: no machine code of their own is made or kept, half the time
_INNER: dict[str, Any] = {"no_cpython_wrapper": True, "no_cfunc_wrapper": True}

loop: Callable[..., Any] = njit(cache=CACHED, **_PLAIN)
fused: Callable[..., Any] = njit(cache=CACHED, **_FUSED)
part: Callable[..., Any] = njit(**_PLAIN, **_INNER)
inlined_part: Callable[..., Any] = njit(forceinline=True, **_PLAIN, **_INNER)
fused_part: Callable[..., Any] = njit(**_FUSED, **_INNER)
summed_part: Callable[..., Any] = njit(**_SUMMED, **_INNER)
least_part: Callable[..., Any] = njit(**_LEAST_OF, **_INNER)


def exp_native(x: Any) -> Any:
    """`e^x` for x ≤ 0, within 2 ulp of the argument's dtype, to be called in native loops; NaN stays NaN.

    How: `partita.kernels.exponential`.
    """
    raise NotImplementedError("exp_native is for native loops; call numpy's exp elsewhere.")


@overload(exp_native, jit_options=_FUSED)  # type: ignore[arg-type]
def _exp(x):
    return _exp_single if x == types.float32 else _exp_double


def _exp_double(x):
    t = LEAST if x < LEAST else np.float64(x)
    shifted = t * RATE + SHIFTER
    n = shifted - SHIFTER
    r = (t - n * LN_2[0]) - n * LN_2[1]
    square = r * r
    p = DOUBLE[0][0] * r + DOUBLE[0][1]
    p = p * square + (DOUBLE[1][0] * r + DOUBLE[1][1])
    p = p * square + (DOUBLE[2][0] * r + DOUBLE[2][1])
    p = p * square + (DOUBLE[3][0] * r + DOUBLE[3][1])
    p = p * square + (DOUBLE[4][0] * r + DOUBLE[4][1])
    power = np.int64((np.float64(shifted).view(np.int64) + 1023) << 52).view(np.float64)
    return 0.0 if x < LEAST else (p * square + (r + 1)) * power


def _exp_single(x):
    t = LEAST_SINGLE if x < LEAST_SINGLE else x
    shifted = t * RATE_SINGLE + SHIFTER_SINGLE
    n = shifted - SHIFTER_SINGLE
    r = (t - n * LN_2_SINGLE[0]) - n * LN_2_SINGLE[1]
    p = SINGLE[0] * r + SINGLE[1]
    p = p * r + SINGLE[2]
    p = p * r + SINGLE[3]
    p = p * r + SINGLE[4]
    bits = np.float32(shifted).view(np.int32) + np.int32(127)
    power = np.int32(bits << np.int32(23)).view(np.float32)
    one = np.float32(1)
    return np.float32(0) if x < LEAST_SINGLE else ((p * r + one) * r + one) * power


# Four float64 side by side, one vector register where there are such: `+`, `-` and `*` of two of them are taken lane by lane, and
# a·b + c may round once. Loops over them run as they are written; nothing depends on what the compiler can vectorise.
_LANES = 4
_VECTOR, _WHOLE = ir.VectorType(ir.DoubleType(), _LANES), ir.VectorType(ir.IntType(64), _LANES)
_INT = ir.IntType(64)
_primitive: Callable[[Callable[..., Any]], Callable[..., Any]] = intrinsic


class _Four(types.Type):
    def __init__(self) -> None:
        super().__init__(name="Four")


_FOUR = _Four()


@register_model(_Four)
class _FourModel(models.PrimitiveModel):
    def __init__(self, manager: Any, kind: Any) -> None:
        super().__init__(manager, kind, _VECTOR)


def _define_operator(symbol: Callable[..., Any], name: str) -> None:
    @type_callable(symbol)
    def typed(context):
        return lambda a, b: _FOUR if a == _FOUR and b == _FOUR else None

    @lower_builtin(symbol, _FOUR, _FOUR)
    def lowered(context, builder, signature, args):
        return getattr(builder, name)(*args, flags=("contract",))


for _symbol, _name in ((operator.add, "fadd"), (operator.sub, "fsub"), (operator.mul, "fmul")):
    _define_operator(_symbol, _name)


def _place(context, builder, array_type, array, index, kind):
    data = cgutils.create_struct_proxy(array_type)(context, builder, value=array).data
    return builder.bitcast(builder.gep(data, [index], inbounds=True), kind.as_pointer())


@_primitive
def four(typing, x):
    """The same number four times."""

    def lowered(context, builder, signature, args):
        one = builder.insert_element(ir.Constant(_VECTOR, ir.Undefined), args[0], ir.Constant(ir.IntType(32), 0))
        every = ir.Constant(ir.VectorType(ir.IntType(32), _LANES), [0] * _LANES)
        return builder.shuffle_vector(one, ir.Constant(_VECTOR, ir.Undefined), every)

    return _FOUR(types.float64), lowered


@_primitive
def fours_from(typing, array, index):
    """`array[index : index + 4]` of a flat array, without a check."""

    def lowered(context, builder, signature, args):
        return builder.load(_place(context, builder, signature.args[0], args[0], args[1], _VECTOR), align=8)

    return _FOUR(array, types.int64), lowered


@_primitive
def put_four(typing, array, index, x):
    """`array[index : index + 4] = x`, without a check."""

    def lowered(context, builder, signature, args):
        builder.store(args[2], _place(context, builder, signature.args[0], args[0], args[1], _VECTOR), align=8)

    return types.void(array, types.int64, _FOUR), lowered


@_primitive
def prefetch(typing, array, index):
    """Start to read `array[index]` into the cache; an index beyond the array does no harm."""

    def lowered(context, builder, signature, args):
        data = cgutils.create_struct_proxy(signature.args[0])(context, builder, value=args[0]).data
        place = builder.bitcast(builder.gep(data, [args[1]]), ir.IntType(8).as_pointer())
        number = ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [place.type, number, number, number])
        function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
        builder.call(function, [place, number(0), number(3), number(1)])

    return types.void(array, types.int64), lowered


def _chosen_by(comparison: str) -> Callable[..., Any]:
    def chosen(typing, a, b):
        def lowered(context, builder, signature, args):
            return builder.select(builder.fcmp_ordered(comparison, *args), *args)

        return _FOUR(_FOUR, _FOUR), lowered

    return _primitive(chosen)


larger_four = _chosen_by(">")  # lane by lane; the second one where either is NaN
smaller_four = _chosen_by("<")


def _gathered(combine: Callable[[Any, Any, Any], Any]) -> Callable[..., Any]:
    def gathered(typing, x):
        def lowered(context, builder, signature, args):
            a, b, c, d = (builder.extract_element(args[0], ir.Constant(ir.IntType(32), i)) for i in range(_LANES))
            return combine(builder, combine(builder, a, c), combine(builder, b, d))

        return types.float64(_FOUR), lowered

    return _primitive(gathered)


total_of = _gathered(lambda builder, a, b: builder.fadd(a, b))
least_of = _gathered(lambda builder, a, b: builder.select(builder.fcmp_ordered("<", a, b), a, b))


@_primitive
def at_most(typing, a, b):
    """The set of lanes where a ≤ b, as the bits of an integer."""

    def lowered(context, builder, signature, args):
        bits = builder.bitcast(builder.fcmp_ordered("<=", *args), ir.IntType(_LANES))
        return builder.zext(bits, _INT)

    return types.int64(_FOUR, _FOUR), lowered


@_primitive
def append_set(typing, array, held, first, bits):
    """Write `first + j` for the elements j of a set of lanes to `array[held:]`, without a branch; four places may be written.

    Returns the new number of entries.
    """

    def lowered(context, builder, signature, args):
        _, held, first, bits = args
        rows = [[j for j in range(_LANES) if number >> j & 1] for number in range(1 << _LANES)]
        table = ir.Constant(
            ir.ArrayType(_WHOLE, len(rows)), [ir.Constant(_WHOLE, row + [0] * (_LANES - len(row))) for row in rows]
        )
        held_table = cgutils.global_constant(builder.module, "lanes_of_a_set", table)
        row = builder.load(builder.gep(held_table, [ir.Constant(_INT, 0), bits], inbounds=True), align=8)
        one = builder.insert_element(ir.Constant(_WHOLE, ir.Undefined), first, ir.Constant(ir.IntType(32), 0))
        every = ir.Constant(ir.VectorType(ir.IntType(32), _LANES), [0] * _LANES)
        places = builder.add(row, builder.shuffle_vector(one, ir.Constant(_WHOLE, ir.Undefined), every))
        builder.store(places, _place(context, builder, signature.args[0], args[0], held, _WHOLE), align=8)
        return builder.add(held, builder.ctpop(bits))

    return types.int64(array, types.int64, types.int64, types.int64), lowered


@_primitive
def _times_power(typing, x, shifted):
    """`x·2ⁿ` for an n that was rounded by adding `SHIFTER`; x and the product are normal numbers."""

    def lowered(context, builder, signature, args):
        x, shifted = (builder.bitcast(a, _WHOLE) for a in args)
        return builder.bitcast(builder.add(x, builder.shl(shifted, ir.Constant(_WHOLE, [52] * _LANES))), _VECTOR)

    return _FOUR(_FOUR, _FOUR), lowered


@part
def exp2_four(x):
    """`2^x` for x ≤ 1000, within 2 ulp; `2^{−1020}` for smaller x than that. NaN is not kept.

    `2ⁿ·(1 + r g(r))`, `|r| ≤ 1/2` exact, g of degree 10 through `(2^r − 1)/r` at Chebyshev points, relative error below 2·10⁻¹⁷.
    Its terms are gathered in fours (Estrin's scheme): a short chain of operations leaves more of them to run side by side.
    """
    t = larger_four(x, four(-1020.0))
    shifted = t + four(SHIFTER)
    r = t - (shifted - four(SHIFTER))
    square = r * r
    fourth = square * square
    low = (four(0.24022650695910097) * r + four(0.6931471805599453)) + square * (
        four(0.009618129107606888) * r + four(0.0555041086648216)
    )
    middle = (four(0.00015403530441736326) * r + four(0.0013333558146416936)) + square * (
        four(1.3215442587752943e-06) * r + four(1.5252733829836267e-05)
    )
    high = (four(7.072585983019291e-09) * r + four(1.0178062445755827e-07)) + square * four(4.4549606161761816e-10)
    return _times_power((low + fourth * (middle + fourth * high)) * r + four(1.0), shifted)


@part
def exp2_short(x):
    """The same within 6·10⁻⁹: g has degree 5."""
    t = larger_four(x, four(-1020.0))
    shifted = t + four(SHIFTER)
    r = t - (shifted - four(SHIFTER))
    g = four(0.0001545316294512069) * r + four(0.0013390863364671234)
    g = g * r + four(0.009618082557277852)
    g = g * r + four(0.05550357114219078)
    g = g * r + four(0.24022650760568126)
    g = g * r + four(0.6931471880262288)
    return _times_power(g * r + four(1.0), shifted)
