"""Arithmetic on tiles of which a thread has a whole row, as tensor memory is loaded: nothing crosses threads."""

from gluon_attn.runtime.compat import add2, fma2, gl, jit, mul2

from ..common.exp2 import EXP2_C0, EXP2_C1, EXP2_C2, EXP2_C3, ROUND_TO_INTEGER, near_zero
from ..common.row_stats import PROPAGATE_NAN
from ..common.thread_view import halves

LEAST_EXPONENT = gl.constexpr(-125.0)


@jit
def multiply_add(x, factor, addend, PACKED: gl.constexpr):
    """x * factor + addend, with one rounding; PACKED: two columns to an instruction."""
    if PACKED:
        return fma2(x, factor, addend)
    else:
        return gl.fma(x, factor + gl.zeros_like(x), addend + gl.zeros_like(x))


@jit
def scale_rows(x, factors, PACKED: gl.constexpr):
    """x [M, N] with row m times factors[m]; in a layout of x's threads."""
    column = gl.convert_layout(factors, gl.SliceLayout(1, x.type.layout), assert_trivial=True)[:, None]
    if PACKED:
        return mul2(x, column)
    else:
        return x * column


@jit
def split_columns(x, PIECES: gl.constexpr):
    """x [M, N] as a tuple of PIECES tensors [M, N / PIECES], side by side. Costs no instruction."""
    if PIECES == 1:
        return (x,)
    else:
        left, right = halves(x)
        return split_columns(left, PIECES // 2) + split_columns(right, PIECES // 2)


@jit
def row_sums(x, PACKED: gl.constexpr):
    """[M, N] -> [M]."""
    if PACKED and x.shape[1] > 2:
        left, right = halves(x)
        return row_sums(add2(left, right), PACKED)
    else:
        return gl.sum(x, axis=1)


@jit
def larger(a, b):
    """The larger one of two numbers, NaN if one is NaN; one instruction, as without."""
    return gl.maximum(a, b, propagate_nan=PROPAGATE_NAN)


@jit
def row_maxima(x):
    """[M, N] -> [M], NaN where a column is NaN."""
    return gl.reduce(x, 1, larger)


@jit
def polynomial_exp2(x, PACKED: gl.constexpr):
    """2^x for x <= 8, on the multiply-add units; 2^-125 for all that is less, and for NaN.

    x = n + f with n the nearest integer: 2^f by a polynomial, and n added to its exponent (Cody and Waite, 1980).
    That a row has NaN is seen by its maximum, which is NaN too; that it has infinity, by a maximum of infinity.
    """
    x = gl.maximum(x, LEAST_EXPONENT)
    if PACKED:
        shifted = add2(x, ROUND_TO_INTEGER)
        f = add2(x, -add2(shifted, -ROUND_TO_INTEGER))
        p = fma2(fma2(fma2(f, EXP2_C3, EXP2_C2), f, EXP2_C1), f, EXP2_C0)
    else:
        shifted = x + ROUND_TO_INTEGER
        f = x - (shifted - ROUND_TO_INTEGER)
        p = near_zero(f)
    bits = p.to(gl.int32, bitcast=True) + (shifted.to(gl.int32, bitcast=True) << 23)
    return bits.to(gl.float32, bitcast=True)


@jit
def exp2(x, POLYNOMIAL_COLUMNS: gl.constexpr, PACKED: gl.constexpr):
    """2^x of x [M, N], POLYNOMIAL_COLUMNS of every 16 by polynomial, to spare the exponential unit.

    Both are written down for every column, and of one the compiler drops what no column is chosen from.
    """
    if POLYNOMIAL_COLUMNS == 0:
        return gl.exp2(x)
    else:
        column = gl.arange(0, x.shape[1], gl.SliceLayout(0, x.type.layout))
        return gl.where((column % 16 < POLYNOMIAL_COLUMNS)[None, :], polynomial_exp2(x, PACKED), gl.exp2(x))
