"""One sequence of a batch, a row block of it, and where their tiles and rows lie in the tensors."""

from gluon_attn.runtime.compat import aggregate, gl, jit


@aggregate
class Sequence:
    """The queries and keys of one sequence, as positions along the tensors' third dimension. All int32 scalars."""

    q_first: gl.tensor
    q_len: gl.tensor
    k_first: gl.tensor
    k_len: gl.tensor


@aggregate
class RowBlock:
    """One block of query rows of one query head: what a program computes at a time. int32 scalars."""

    batch: gl.tensor
    head: gl.tensor
    first_row: gl.tensor  # of its sequence
    sequence: Sequence


@jit
def query_coords(row_block, row):
    """Of the tile of Q, or of O, that begins with query `row` of the row block's sequence."""
    return [row_block.batch, row_block.head, row_block.sequence.q_first + row, 0]


@jit
def key_coords(row_block, kv_head, key):
    """Of the tile of K, or of V, that begins with key `key` of the row block's sequence."""
    return [row_block.batch, kv_head, row_block.sequence.k_first + key, 0]


@jit
def transposed_value_coords(row_block, kv_head, key):
    """As `key_coords`, of V transposed: (B, Hkv, D, Sk)."""
    return [row_block.batch, kv_head, 0, row_block.sequence.k_first + key]


@jit
def store_lse(lse_ptr, q_shape, rows, lse):
    """Store the LSE of `rows`; nothing, if lse_ptr is null, as nobody asked for it.

    lse_ptr: (B, H, Sq) fp32; q_shape: (B, H, Sq, D); lse: [ROWS] fp32, in whatever layout.
    """
    block, row = rows.block, rows.first + gl.arange(0, rows.ROWS, lse.type.layout)
    head = (block.batch * q_shape[1] + block.head).to(gl.int64)
    asked = lse_ptr.to(gl.int64) != 0
    inside = (row < block.sequence.q_len) & asked
    gl.store(lse_ptr + head * q_shape[2] + block.sequence.q_first + row, lse, mask=inside)
