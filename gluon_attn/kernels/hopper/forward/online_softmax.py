"""Online softmax over scores that arrive block by block, as a warpgroup holds them on Hopper."""

from gluon_attn.runtime.compat import aggregate, constexpr_function, gl, jit

from ...common.operands import probability_dtype, shift_log2
from ...common.row_stats import finite, inverse, log_sum_exp, with_sink
from ..exp2 import half_by_polynomial
from ..packing import pack

LARGER_P_LOG2 = gl.constexpr(8.0)  # P may be larger than 1 by two to this power: fp16 ends at 2^16


@aggregate
class RowStats:
    max: gl.tensor  # [M] fp32: running maximum of the raw scores; see `first_maximum`
    sum: gl.tensor  # [M, T] fp32: running sum of the probabilities, a partial one in each of the T threads of a row


@constexpr_function
def needs_no_maximum(function, dtype):
    """Whether 0 is taken for the maximum of every row.

    O and LSE are the same whatever is taken from all scores of a row, as long as no exponential overflows, and none
    underflows that counts. bf16 has the range for that where scores are near 0, as most soft caps keep them.
    """
    return function is not None and function.near_zero and dtype.name == "bf16"


@jit
def no_maximum(scores):
    return gl.zeros([scores.shape[0]], gl.float32, gl.SliceLayout(1, scores.type.layout))


@jit
def next_maximum(scores, stats, scale_log2, MASKED: gl.constexpr, AS_INTEGERS: gl.constexpr):
    """With a further block: (row maxima [M], the factor [M] for what was accumulated before).

    AS_INTEGERS: compare the scores' bits as integers, which the hardware does three to an instruction, and floats two.
    Where a score is not negative, the order is the same, as no negative one is above it. Of a row all negative this
    finds some score, and the maximum comes out between the one before and 0: see `may_compare_as_integers`.
    """
    if AS_INTEGERS:
        largest = gl.max(scores.to(gl.int32, bitcast=True), axis=1).to(gl.float32, bitcast=True)
    else:
        largest = gl.max(scores, axis=1)
    row_max = gl.maximum(stats.max, largest)
    return row_max, gl.exp2((stats.max - finite(row_max, MASKED)) * scale_log2)


@jit
def may_compare_as_integers(row_max, scale_log2):
    """Whether later maxima may come AS_INTEGERS: no row's maximum so far is below 0 by more than P may exceed 1. Asked
    of all rows of a role at once; a scalar."""
    near = row_max * scale_log2 > -LARGER_P_LOG2
    return gl.min(near.to(gl.int32), axis=0) != 0


@jit
def probabilities(
    in_quarters,
    row_max,
    scale_log2,
    dtype: gl.constexpr,
    MASKED: gl.constexpr,
    HALF_BY_POLYNOMIAL: gl.constexpr = False,
):
    """Of quarters of a block's scores, [M, N] each, for values of `dtype`: P of each as `pack` makes it, and its
    row sums as far as a thread gets alone, [M, T]: two tuples."""
    packed, sums = in_quarters[:0], in_quarters[:0]
    for i in gl.static_range(len(in_quarters)):
        largest = gl.convert_layout(row_max, gl.SliceLayout(1, in_quarters[i].type.layout), assert_trivial=True)
        shift = finite(largest, MASKED) * scale_log2 - shift_log2(dtype)
        x = in_quarters[i] * scale_log2 - shift[:, None]
        p = half_by_polynomial(x) if HALF_BY_POLYNOMIAL else gl.exp2(x)
        packed += (pack(p, probability_dtype(dtype)),)
        sums += (thread_sums(p),)
    return packed, sums


@jit
def thread_sums(x):
    # As thread_view, which knows no layout of a quarter: four threads to a row, two columns of every eight each.
    SHAPE: gl.constexpr = [x.shape[0], x.shape[1] // 8, 4, 2]
    return gl.sum(gl.sum(x.reshape(SHAPE), axis=1), axis=2)


@jit
def total(sums):
    """Of the four quarters of a block."""
    return (sums[0] + sums[1]) + (sums[2] + sums[3])


@jit
def rescale(sums, alpha):
    return sums * gl.convert_layout(alpha, gl.SliceLayout(1, sums.type.layout))[:, None]


@jit
def finish(stats, scale_log2, sink, output_scale, UNSHIFT: gl.constexpr, LAYOUT: gl.constexpr):
    """(what accumulated P V is multiplied with [M], natural-log LSE [M]), in LAYOUT. A row that saw no key: 1 times
    its P V, which is 0, and LSE = -inf.

    sink: see `with_sink`. output_scale: what O is multiplied with. UNSHIFT: takes a power of two out of the row sums.
    """
    row_sum = gl.convert_layout(gl.sum(stats.sum, axis=1), LAYOUT)
    row_max = gl.convert_layout(stats.max, LAYOUT)
    row_sum = with_sink(row_max, row_sum, scale_log2, sink, UNSHIFT)
    return inverse(row_sum) * output_scale, log_sum_exp(row_max, row_sum * UNSHIFT, scale_log2, sink)
