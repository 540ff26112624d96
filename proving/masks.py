"""A mask in Gluon that leaves out blocks of keys: what the proof of such kernels is about."""

from gluon_attn.runtime.compat import gl, jit


@jit
def prefix(q_index, k_index, head, batch, LENGTH: gl.constexpr):
    return (k_index < LENGTH) | (k_index <= q_index)


@jit
def keys_of_prefix(first_row, last_row, q_len, k_len, head, batch, LENGTH: gl.constexpr):
    return 0, gl.maximum(LENGTH, last_row + 1)
