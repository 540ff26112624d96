"""Functions in Gluon that the bench gives attention as masks."""

from channels.compat import gl, jit


@jit
def near(q_index, k_index, head, batch, LEFT: gl.constexpr):
    return q_index - k_index <= LEFT


@jit
def near_keys(first_row, last_row, q_len, k_len, head, batch, LEFT: gl.constexpr):
    return first_row - LEFT, k_len, last_row - LEFT, k_len


@jit
def near_rows(first_key, last_key, q_len, k_len, kv_head, batch, LEFT: gl.constexpr):
    return 0, last_key + LEFT + 1, 0, first_key + LEFT + 1
