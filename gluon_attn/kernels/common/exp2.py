"""What exponentials by polynomial have in common."""

from gluon_attn.runtime.compat import gl, jit

# 2^f on [-1/2, 1/2] to a relative error of 7.5e-5, by Remez' exchange: P is rounded to 4.9e-4 (fp16) or 3.9e-3 (bf16).
EXP2_C0 = gl.constexpr(0.99992806)
EXP2_C1 = gl.constexpr(0.69326097)
EXP2_C2 = gl.constexpr(0.24261113)
EXP2_C3 = gl.constexpr(0.05517167)
# Added to a number of small magnitude, 1.5 * 2^23 leaves its nearest integer in the low bits of the sum.
ROUND_TO_INTEGER = gl.constexpr(12582912.0)


@jit
def near_zero(f):
    """2^f on [-1/2, 1/2]."""
    return ((f * EXP2_C3 + EXP2_C2) * f + EXP2_C1) * f + EXP2_C0
