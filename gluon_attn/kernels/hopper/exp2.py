"""Exponentials by the unit for them, and by polynomial on the units that multiply and add, which have time to spare
where the former is asked for more than exponentials."""

from gluon_attn.runtime.compat import gl, jit

from ..common.exp2 import ROUND_TO_INTEGER, near_zero
from ..common.thread_view import halves
from .packing import join_halves

ONE = gl.constexpr(0x3F800000)  # 1.0


@jit
def half_by_polynomial(x):
    """2^x of x [M, N], with that of the right half of the columns by polynomial: there -126 <= x <= 127."""
    low, high = halves(x)
    powers = join_halves(gl.exp2(low), polynomial_exp2(high))
    return gl.convert_layout(powers, x.type.layout, assert_trivial=True)


@jit
def polynomial_exp2(x):
    """2^x for -126 <= x <= 127; NaN for NaN.

    x = n + f with n the nearest integer: 2^f by a polynomial, times 2^n (Cody and Waite, 1980).
    """
    shifted = x + ROUND_TO_INTEGER
    f = x - (shifted - ROUND_TO_INTEGER)
    power = (shifted.to(gl.int32, bitcast=True) << 23) + ONE
    return near_zero(f) * power.to(gl.float32, bitcast=True)
