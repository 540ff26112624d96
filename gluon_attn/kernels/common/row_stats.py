"""Online softmax: the running maximum and sum of each row, over scores that arrive block by block.

The method is that of Milakov and Gimelshein, "Online normalizer calculation for softmax" (2018), in base 2, as in
FlashAttention-2: the factor log2(e) goes into the scale, so that a probability costs one FMA and one exp2.
"""

from gluon_attn.compat import aggregate, gl, jit

from .thread_view import thread_sums


@aggregate
class RowStats:
    max: gl.tensor  # [M] fp32: running maximum of the raw scores, -inf as long as a row has seen no key
    sum: gl.tensor  # [M, T] fp32: running sum of the probabilities, a partial one in each of the T threads of a row


@jit
def rescale_sums(sums, alpha):
    return sums * gl.convert_layout(alpha, gl.SliceLayout(1, sums.type.layout))[:, None]


@jit
def first_probabilities(scores, scale_log2):
    """Of the first block, where nothing has to be rescaled: (probabilities [M, N] fp32, RowStats)."""
    row_max = gl.max(scores, axis=1)
    p = probabilities(scores, row_max, scale_log2, MASKED=True)
    return p, RowStats(row_max, thread_sums(p))


@jit
def next_probabilities(scores, stats, scale_log2, MASKED: gl.constexpr):
    """Of a further block: (probabilities [M, N] fp32, RowStats, the factor [M] for what was accumulated before)."""
    row_max = gl.maximum(stats.max, gl.max(scores, axis=1))
    alpha = gl.exp2((stats.max - finite(row_max, MASKED)) * scale_log2)
    p = probabilities(scores, row_max, scale_log2, MASKED)
    return p, RowStats(row_max, rescale_sums(stats.sum, alpha) + thread_sums(p)), alpha


@jit
def probabilities(scores, row_max, scale_log2, MASKED: gl.constexpr):
    return gl.exp2(scores * scale_log2 - (finite(row_max, MASKED) * scale_log2)[:, None])


@jit
def finite(row_max, MASKED: gl.constexpr):
    """-inf - (-inf) would be NaN in a row that has seen no key yet; without a mask there is no such row."""
    return gl.where(row_max == float("-inf"), 0.0, row_max) if MASKED else row_max


@jit
def normalise(acc, stats, scale_log2):
    """(O [M, D] fp32, natural-log LSE [M]) of accumulated P V. A row that saw no key: O = 0, LSE = -inf."""
    layout: gl.constexpr = gl.SliceLayout(1, acc.type.layout)
    row_sum = gl.convert_layout(gl.sum(stats.sum, axis=1), layout)  # [M]
    row_max = gl.convert_layout(stats.max, layout)
    return acc * inverse(row_sum)[:, None], log_sum_exp(row_max, row_sum, scale_log2)


@jit
def inverse(row_sum):
    """What the accumulated P V is multiplied with; 1 for a row that saw no key, whose P V is 0."""
    return 1.0 / gl.where(row_sum == 0.0, 1.0, row_sum)


@jit
def log_sum_exp(row_max, row_sum, scale_log2):
    """Natural log, of the maximum of the raw scores and the sum of exp2((score - maximum) * scale_log2)."""
    LN_2: gl.constexpr = 0.6931471805599453
    return (row_max * scale_log2 + gl.log2(row_sum)) * LN_2
