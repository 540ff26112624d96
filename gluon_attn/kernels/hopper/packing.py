"""P as a loop carries it: packed into 32-bit registers, two or four values of a row to each.

Carried as elements of their own type, they would cost more instructions a step.
"""

from gluon_attn.runtime.compat import gl, jit

from ..common.thread_view import halves
from .inline_asm import round_four, round_pair


@jit
def pack(x, dtype: gl.constexpr):
    """[M, N] fp32 rounded to `dtype`, as uint32: [M, N / 2] of 16-bit or [M, N / 4] of 8-bit values."""
    if dtype.primitive_bitwidth == 16:
        low, high = gl.split(x.reshape([x.shape[0], x.shape[1] // 2, 2]))
        return round_pair(low, high, dtype)
    else:
        # wgmma reads four neighbouring columns of every 16 from a thread; its accumulator has two and two. So P's
        # columns change places: 16 a + 8 b + 2 t + e, of thread t, becomes 16 a + 4 t + 2 b + e. V's rows must too.
        M: gl.constexpr = x.shape[0]
        N: gl.constexpr = x.shape[1]
        even, odd = gl.split(x.reshape([M, N // 16, 2, 4, 2]).permute((0, 1, 3, 2, 4)))
        even_low, even_high = gl.split(even)
        odd_low, odd_high = gl.split(odd)
        return round_four(even_low, odd_low, even_high, odd_high, dtype).reshape([M, N // 4])


@jit
def unpack(packed, dtype: gl.constexpr, LAYOUT: gl.constexpr):
    """The inverse of `pack`: [M, N] of `dtype` in LAYOUT; 8-bit columns stay in the places that `pack` gave them."""
    if dtype.primitive_bitwidth == 16:
        values = gl.join(packed.to(gl.uint16), (packed >> 16).to(gl.uint16))
    else:
        low = gl.join(packed.to(gl.uint8), (packed >> 16).to(gl.uint8))
        high = gl.join((packed >> 8).to(gl.uint8), (packed >> 24).to(gl.uint8))
        values = gl.join(low, high)
    PER_WORD: gl.constexpr = 32 // dtype.primitive_bitwidth
    flat = values.to(dtype, bitcast=True).reshape([packed.shape[0], packed.shape[1] * PER_WORD])
    return gl.convert_layout(flat, LAYOUT)


@jit
def quarters(x):
    """[M, N] as four [M, N / 4], columns in order. No thread gives anything away."""
    low, high = halves(x)
    return halves(low) + halves(high)


@jit
def join_quarters(four):
    """The inverse of `quarters`."""
    return join_halves(join_halves(four[0], four[1]), join_halves(four[2], four[3]))


@jit
def join_halves(low, high):
    return gl.join(low, high).permute((0, 2, 1)).reshape([low.shape[0], 2 * low.shape[1]])
