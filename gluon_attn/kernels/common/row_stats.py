"""What becomes of the row statistics of an online softmax: the maximum of the raw scores and the sum of exponentials.

The method is that of Milakov and Gimelshein, "Online normalizer calculation for softmax" (2018), in base 2, as in
FlashAttention-2: the factor log2(e) goes into the scale, so that a probability costs one FMA and one exp2.
"""

from gluon_attn.runtime.compat import gl, jit

from .score_mod import LN_2, PROPAGATE_NAN

# Stands for the maximum of scores that are all -inf: times scale_log2 below every score that has a meaning.
LEAST_LOG2 = gl.constexpr(-(2.0**100))


@jit
def finite(row_max, MASKED: gl.constexpr):
    """-inf - (-inf) would be NaN in a row that has seen no key yet; without a mask there is no such row."""
    return gl.where(row_max == float("-inf"), 0.0, row_max) if MASKED else row_max


@jit
def first_maximum(row_max, scale_log2):
    """What the first block's maxima are kept as: finite if all scores are -inf. In later blocks, of which those without
    a mask do not ask `finite`, more of such scores would give -inf - (-inf), which is NaN."""
    return gl.maximum(row_max, LEAST_LOG2 / scale_log2, propagate_nan=PROPAGATE_NAN)


@jit
def with_sink(row_max, row_sum, scale_log2, sink, UNSHIFT: gl.constexpr):
    """The sum with the exponential of `sink`, in base 2, a score without a value; None: no such score.

    Where the sink is above the maximum by far, that exponential is infinite, and O comes out as 0.
    """
    if sink is None:
        return row_sum
    else:
        return row_sum + gl.exp2(sink - row_max * scale_log2) / UNSHIFT


@jit
def inverse(row_sum):
    """What the accumulated P V is multiplied with; 0 for a row whose scores are all -inf, as those of no key are."""
    return gl.where(row_sum == 0.0, 0.0, 1.0 / row_sum)


@jit
def log_sum_exp(row_max, row_sum, scale_log2, sink=None):
    """Natural log, of the maximum of the raw scores and the sum of exp2((score - maximum) * scale_log2).

    With a score of +inf the sum is NaN, as inf - inf is, and the logarithm is +inf. sink: in base 2, counted in the
    sum.
    """
    lse = (row_max * scale_log2 + gl.log2(row_sum)) * LN_2
    if sink is not None:
        lse = gl.where(row_sum == float("inf"), sink * LN_2, lse)
    return gl.where(row_max == float("inf"), float("inf"), lse)
