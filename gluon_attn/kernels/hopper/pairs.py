"""Two 16-bit values to a register: how P is carried from one step of the softmax role to the next."""

from gluon_attn.compat import gl, jit

from .inline_asm import round_pair


@jit
def pack_pairs(x, dtype: gl.constexpr):
    """[M, N] fp32 rounded to the 16-bit `dtype`, as uint32 [M, N / 2]: two neighbouring columns to a register.

    For values that a loop carries: carried as 16-bit elements, each would cost two more instructions a step.
    """
    low, high = gl.split(x.reshape([x.shape[0], x.shape[1] // 2, 2]))
    return round_pair(low, high, dtype)


@jit
def unpack_pairs(packed, dtype: gl.constexpr, LAYOUT: gl.constexpr):
    """The inverse of `pack_pairs`: [M, N] of `dtype` in LAYOUT."""
    pairs = gl.join(packed.to(gl.uint16), (packed >> 16).to(gl.uint16)).to(dtype, bitcast=True)
    return gl.convert_layout(pairs.reshape([packed.shape[0], packed.shape[1] * 2]), LAYOUT)
