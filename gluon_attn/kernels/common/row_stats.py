"""What becomes of the row statistics of an online softmax: the maximum of the raw scores and the sum of exponentials.

The method is that of Milakov and Gimelshein, "Online normalizer calculation for softmax" (2018), in base 2, as in
FlashAttention-2: the factor log2(e) goes into the scale, so that a probability costs one FMA and one exp2.
"""

from gluon_attn.runtime.compat import gl, jit


@jit
def finite(row_max, MASKED: gl.constexpr):
    """-inf - (-inf) would be NaN in a row that has seen no key yet; without a mask there is no such row."""
    return gl.where(row_max == float("-inf"), 0.0, row_max) if MASKED else row_max


@jit
def inverse(row_sum):
    """What the accumulated P V is multiplied with; 1 for a row that saw no key, whose P V is 0."""
    return 1.0 / gl.where(row_sum == 0.0, 1.0, row_sum)


@jit
def log_sum_exp(row_max, row_sum, scale_log2):
    """Natural log, of the maximum of the raw scores and the sum of exp2((score - maximum) * scale_log2)."""
    LN_2: gl.constexpr = 0.6931471805599453
    return (row_max * scale_log2 + gl.log2(row_sum)) * LN_2
