"""How kernels call the functions that change scores, see `ScoreMod` in gluon_attn/score_mod.py."""

from gluon_attn.runtime.compat import aggregate, constexpr_function, gl, jit

LOG2_E = gl.constexpr(1.4426950408889634)
LN_2 = gl.constexpr(0.6931471805599453)


@aggregate
class ScoreScale:
    """What scores are multiplied with, fp32 scalars. Without a ScoreFunction, `log2` alone counts."""

    before: gl.tensor  # raw scores, before the function
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
def score_scale_of(scale_log2, SCORE_MOD: gl.constexpr):
    """scale_log2: the softmax scale times log2(e)."""
    if SCORE_MOD is None:
        return ScoreScale(scale_log2, scale_log2)
    else:
        return ScoreScale(scale_log2 * before_of(SCORE_MOD), gl.to_tensor(after_of(SCORE_MOD)))


@constexpr_function
def number_of_tensors(function):
    return len(function.tensors)


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
