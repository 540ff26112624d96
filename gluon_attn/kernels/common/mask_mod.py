"""How kernels call the functions that say which keys a query sees, see `MaskMod` in gluon_attn/mask_mod.py."""

from gluon_attn.runtime.compat import aggregate, constexpr_function, gl, jit


@aggregate
class Limits:
    """Of positions along a sequence, those that some of a block may see, first ... end - 1, and among them those that
    all of it sees, full_first ... full_end - 1: of the keys for a block of queries, or the other way round. int32
    scalars."""

    first: gl.tensor
    end: gl.tensor
    full_first: gl.tensor
    full_end: gl.tensor


@constexpr_function
def tensors_of(function, score_mod):
    """The place of its tensors among the kernel's, which come after those of the ScoreFunction: (first, end)."""
    first = 0 if score_mod is None else len(score_mod.tensors)
    return first, first + len(function.tensors)


@constexpr_function
def found_before(mask):
    """Whether a function of the mask reads what the kernel before has made."""
    return mask.function is not None and mask.function.found_before


@jit
def tensors_from(aux, PLACE: gl.constexpr):
    return aux[PLACE[0] : PLACE[1]]


@jit
def lets_through(FUNCTION: gl.constexpr, SCORE_MOD: gl.constexpr, q_index, k_index, head, batch, sequence, aux):
    """Whether queries see keys, as the function says. It is asked of none beyond the last: the index is then that of
    the last, or 0 if there is none, unless what it reads is padded."""
    read = tensors_from(aux, tensors_of(FUNCTION, SCORE_MOD))
    if not FUNCTION.found_before:
        q_index = gl.minimum(q_index, sequence.q_len - 1)
        last_key = sequence.k_len - 1
        if sequence.PACKED:
            last_key = gl.maximum(last_key, 0)  # there may be none
        k_index = gl.minimum(k_index, last_key)
    if FUNCTION.aligned:
        q_index += sequence.k_len - sequence.q_len
    place = (q_index, k_index, head, batch, sequence.q_len, sequence.k_len)
    GIVEN: gl.constexpr = 6 if FUNCTION.lengths else 4
    return FUNCTION.function(*place[:GIVEN], *FUNCTION.constants, *read)


@jit
def limits_of_keys(FUNCTION: gl.constexpr, SCORE_MOD: gl.constexpr, first, last, sequence, head, batch, aux):
    """The Limits of the keys for queries `first` to `last`."""
    read = tensors_from(aux, tensors_of(FUNCTION, SCORE_MOD))
    place = (sequence.q_len, sequence.k_len, head, batch)
    return limits_from(FUNCTION.keys(first, last, *place, *FUNCTION.constants, *read), sequence.k_len, "keys")


@jit
def limits_of_rows(FUNCTION: gl.constexpr, SCORE_MOD: gl.constexpr, first, last, sequence, kv_head, batch, aux):
    """The Limits of the queries for keys `first` to `last`."""
    read = tensors_from(aux, tensors_of(FUNCTION, SCORE_MOD))
    place = (sequence.q_len, sequence.k_len, kv_head, batch)
    return limits_from(FUNCTION.rows(first, last, *place, *FUNCTION.constants, *read), sequence.q_len, "rows")


@constexpr_function
def count_refusal(name, count):
    return (
        f"mask_mod: expected {name} to return two or four numbers, got {count}; return (first, end), or (first, end, "
        "full_first, full_end)"
    )


@jit
def limits_from(said, length, NAME: gl.constexpr):
    """What the function of that name has said, made positions of a sequence of that length, whatever it is."""
    COUNT: gl.constexpr = len(said) if isinstance(said, gl.tuple) else 1
    gl.static_assert(COUNT == 2 or COUNT == 4, count_refusal(NAME, COUNT))
    first, end = gl.minimum(gl.maximum(said[0], 0), length), gl.minimum(gl.maximum(said[1], 0), length)
    if COUNT == 4:
        full_first, full_end = gl.maximum(said[2], first), gl.minimum(said[3], end)
    else:
        full_first, full_end = first, first
    return Limits(first, end, full_first, full_end)
