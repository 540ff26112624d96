"""How kernels call the functions that change scores, see `ScoreMod` in gluon_attn/score_mod.py."""

from gluon_attn.runtime.compat import PropagateNan, aggregate, constexpr_function, gl, jit

from .thread_view import ramp

LOG2_E = gl.constexpr(1.4426950408889634)
LN_2 = gl.constexpr(0.6931471805599453)
PROPAGATE_NAN = gl.constexpr(PropagateNan.ALL)
LEAST_SCALE_LOG2 = gl.constexpr(1e-30)  # by distance: below it scores weigh nothing; slope / scale would be infinite


@aggregate
class ScoreScale:
    """What scores are multiplied with, fp32 scalars. Without a ScoreFunction, `log2` alone counts."""

    before: gl.tensor  # raw scores, before the function; by distance, it is the slope, in units of raw scores
    log2: gl.tensor  # raw scores, or those that it has made, before exp2


@constexpr_function
def before_of(function):
    return LN_2.value * function.before


@constexpr_function
def after_of(function):
    return LOG2_E.value * function.after


@constexpr_function
def of_gradient(function):
    return function.before * function.after


@jit
def score_scale_of(scale_log2, SCORE_MOD: gl.constexpr, head, batch, aux):
    """scale_log2: the softmax scale times log2(e). head, batch: of the queries; they count by distance alone."""
    if SCORE_MOD is None:
        return ScoreScale(scale_log2, scale_log2)
    elif SCORE_MOD.by_distance:
        read = aux[: number_of_tensors(SCORE_MOD)]
        slope = SCORE_MOD.forward(head, batch, *SCORE_MOD.constants, *read)
        scale_log2 = gl.maximum(scale_log2, LEAST_SCALE_LOG2, propagate_nan=PROPAGATE_NAN)
        return ScoreScale(slope * (LOG2_E / scale_log2), scale_log2)
    else:
        return ScoreScale(scale_log2 * before_of(SCORE_MOD), gl.to_tensor(after_of(SCORE_MOD)))


@constexpr_function
def number_of_tensors(function):
    return len(function.tensors)


@constexpr_function
def is_by_distance(function):
    return function is not None and function.by_distance


@jit
def taken_by_distance(
    start, slope, ROW: gl.constexpr, NEVER_NEGATIVE: gl.constexpr, SHAPE: gl.constexpr, LAYOUT: gl.constexpr
):
    """-slope * |start + ROW * m - ROW * n| at row m, column n; ROW: 1 or -1. One instruction each if it is known that
    the distance is NEVER_NEGATIVE where it counts, and otherwise two."""
    first = start.to(gl.float32)
    if NEVER_NEGATIVE:
        return ramp(-slope * first, -slope * ROW, slope * ROW, SHAPE, LAYOUT)
    else:
        return -slope * gl.abs(ramp(first, gl.to_tensor(1.0 * ROW), gl.to_tensor(-1.0 * ROW), SHAPE, LAYOUT))


@jit
def aligned(SCORE_MOD: gl.constexpr, place, sequence):
    q_index, k_index, head, batch = place
    if SCORE_MOD.aligned:
        q_index += sequence.k_len - sequence.q_len
    return q_index, k_index, head, batch


@jit
def modified(SCORE_MOD: gl.constexpr, scores, place, sequence, aux):
    """Scores as the function makes them, in their layout. place: (q_index, k_index, head, batch), as it is given."""
    given = aligned(SCORE_MOD, place, sequence)
    read = aux[: number_of_tensors(SCORE_MOD)]
    changed = SCORE_MOD.forward(scores, *given, *SCORE_MOD.constants, *read)
    return gl.convert_layout(changed, scores.type.layout)


@jit
def derived(SCORE_MOD: gl.constexpr, dscores, scores, changed, place, sequence, aux):
    """The gradient of raw scores times the softmax scale, from that of `changed`, which `modified` made of `scores`."""
    given = aligned(SCORE_MOD, place, sequence)
    read = aux[: number_of_tensors(SCORE_MOD)]
    grad = SCORE_MOD.backward(dscores, scores, changed, *given, *SCORE_MOD.constants, *read)
    FACTOR: gl.constexpr = of_gradient(SCORE_MOD)
    if FACTOR != 1.0:
        grad = grad * FACTOR
    return gl.convert_layout(grad, dscores.type.layout)
