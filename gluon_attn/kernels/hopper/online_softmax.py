"""Online softmax over scores that arrive block by block, as a warpgroup holds them on Hopper."""

from gluon_attn.compat import aggregate, gl, jit

from ..common.row_stats import finite, inverse, log_sum_exp
from ..common.thread_view import thread_view


@aggregate
class RowStats:
    max: gl.tensor  # [M] fp32: running maximum of the raw scores, -inf as long as a row has seen no key
    sum: gl.tensor  # [M, T] fp32: running sum of the probabilities, a partial one in each of the T threads of a row


@jit
def rescale_sums(sums, alpha):
    return sums * gl.convert_layout(alpha, gl.SliceLayout(1, sums.type.layout))[:, None]


@jit
def first_probabilities(scores, scale_log2, SHIFT_LOG2: gl.constexpr):
    """Of the first block, where nothing has to be rescaled: (probabilities [M, N] fp32, RowStats)."""
    row_max = gl.max(scores, axis=1)
    p = probabilities(scores, row_max, scale_log2, SHIFT_LOG2, MASKED=True)
    return p, RowStats(row_max, thread_sums(p))


@jit
def next_maximum(scores, stats, scale_log2, MASKED: gl.constexpr):
    """With a further block: (row maxima [M], the factor [M] for what was accumulated before)."""
    row_max = gl.maximum(stats.max, gl.max(scores, axis=1))
    return row_max, gl.exp2((stats.max - finite(row_max, MASKED)) * scale_log2)


@jit
def next_probabilities(scores, stats, row_max, alpha, scale_log2, SHIFT_LOG2: gl.constexpr, MASKED: gl.constexpr):
    """Of a further block, `row_max` and `alpha` as from `next_maximum`: (probabilities [M, N] fp32, RowStats)."""
    p = probabilities(scores, row_max, scale_log2, SHIFT_LOG2, MASKED)
    return p, RowStats(row_max, rescale_sums(stats.sum, alpha) + thread_sums(p))


@jit
def probabilities(scores, row_max, scale_log2, SHIFT_LOG2: gl.constexpr, MASKED: gl.constexpr):
    """Times two to the power of SHIFT_LOG2."""
    return gl.exp2(scores * scale_log2 - (finite(row_max, MASKED) * scale_log2 - SHIFT_LOG2)[:, None])


@jit
def thread_sums(x):
    """Row sums as far as a thread gets alone: [M, N] -> [M, T]."""
    return gl.sum(gl.sum(thread_view(x), axis=1), axis=2)


@jit
def normalise(acc, stats, scale_log2, output_scale, UNSHIFT: gl.constexpr):
    """(O [M, D] fp32, natural-log LSE [M]) of accumulated P V. A row that saw no key: O = 0, LSE = -inf.

    output_scale: what O is multiplied with. UNSHIFT: takes a power of two out of the row sums.
    """
    layout: gl.constexpr = gl.SliceLayout(1, acc.type.layout)
    row_sum = gl.convert_layout(gl.sum(stats.sum, axis=1), layout)  # [M]
    row_max = gl.convert_layout(stats.max, layout)
    return acc * (inverse(row_sum) * output_scale)[:, None], log_sum_exp(row_max, row_sum * UNSHIFT, scale_log2)
