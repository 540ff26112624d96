"""Online softmax over scores that arrive block by block, as a warpgroup holds them on Hopper."""

from gluon_attn.compat import aggregate, gl, jit

from ..common.operands import probability_dtype, shift_log2
from ..common.row_stats import finite, inverse, log_sum_exp
from .inline_asm import uniform
from .packing import pack

# P may be smaller by two to this power: in fp16 it is still a normal number for what matters beside the largest.
SMALLER_P_LOG2 = gl.constexpr(8.0)


@aggregate
class RowStats:
    max: gl.tensor  # [M] fp32: running maximum of the raw scores, -inf as long as a row has seen no key
    sum: gl.tensor  # [M, T] fp32: running sum of the probabilities, a partial one in each of the T threads of a row


@jit
def next_maximum(scores, stats, scale_log2, MASKED: gl.constexpr, AS_INTEGERS: gl.constexpr):
    """With a further block: (row maxima [M], the factor [M] for what was accumulated before).

    AS_INTEGERS: compare the scores' bits as integers, which the hardware does three to an instruction, and floats two.
    The order is the same from 0 on, and of negative numbers none is above: a row all negative counts as one with a 0.
    """
    if AS_INTEGERS:
        bits = gl.maximum(gl.max(scores.to(gl.int32, bitcast=True), axis=1), 0)
        largest = bits.to(gl.float32, bitcast=True)
    else:
        largest = gl.max(scores, axis=1)
    row_max = gl.maximum(stats.max, largest)
    return row_max, gl.exp2((stats.max - finite(row_max, MASKED)) * scale_log2)


@jit
def order_as_integers(row_max, scale_log2):
    """Whether maxima may come AS_INTEGERS from now on: in no row is the maximum so far below 0 by so much that it
    mattered for P in 16 bits if it were 0 instead. A scalar."""
    near = row_max * scale_log2 > -SMALLER_P_LOG2
    return uniform(gl.min(near.to(gl.int32), axis=0)) != 0


@jit
def probabilities(parts, row_max, scale_log2, dtype: gl.constexpr, MASKED: gl.constexpr):
    """Of parts of a block's scores, [M, N] each, for values of `dtype`: P of each part as `pack` makes it, and its row
    sums as far as a thread gets alone, [M, T]: two tuples."""
    packed, sums = parts[:0], parts[:0]
    for i in gl.static_range(len(parts)):
        largest = gl.convert_layout(row_max, gl.SliceLayout(1, parts[i].type.layout), assert_trivial=True)
        shift = finite(largest, MASKED) * scale_log2 - shift_log2(dtype)
        p = gl.exp2(parts[i] * scale_log2 - shift[:, None])
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
def finish(stats, scale_log2, output_scale, UNSHIFT: gl.constexpr, LAYOUT: gl.constexpr):
    """(what accumulated P V is multiplied with [M], natural-log LSE [M]), in LAYOUT. A row that saw no key: 1 times
    its P V, which is 0, and LSE = -inf.

    output_scale: what O is multiplied with. UNSHIFT: takes a power of two out of the row sums.
    """
    row_sum = gl.convert_layout(gl.sum(stats.sum, axis=1), LAYOUT)
    row_max = gl.convert_layout(stats.max, LAYOUT)
    return inverse(row_sum) * output_scale, log_sum_exp(row_max, row_sum * UNSHIFT, scale_log2)
