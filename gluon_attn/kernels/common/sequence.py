"""One sequence of a batch, a row block of it, and where their tiles and rows lie in the tensors."""

from gluon_attn.runtime.compat import aggregate, gl, jit
from gluon_attn.runtime.descriptors import PACKED_WRAP

KEYS_MULTIPLE = gl.constexpr(128)  # keys of a block of V transposed
WRAP = gl.constexpr(PACKED_WRAP)


@aggregate
class Sequence:
    """The queries and keys of one sequence, as positions along the tensors' third dimension. All int32 scalars.

    If PACKED, sequences lie one after the other in tensors of one batch, which descriptors see as `View.packed` says.
    """

    q_first: gl.tensor
    q_len: gl.tensor
    k_first: gl.tensor
    k_len: gl.tensor
    PACKED: gl.constexpr


@jit
def whole_sequence(q_len, k_len):
    """The one sequence of a batch of tensors that are not packed."""
    return Sequence(gl.to_tensor(0), q_len, gl.to_tensor(0), k_len, False)


@aggregate
class RowBlock:
    """One block of query rows of one query head: what a program computes at a time. int32 scalars."""

    batch: gl.tensor  # if packed, the number of the sequence
    head: gl.tensor
    first_row: gl.tensor  # of its sequence
    sequence: Sequence


@jit
def packed_coords(first, length, head, row):
    """Of the tile that begins with row `row` of `length`, see `View.packed`."""
    return [WRAP, head, first + length - 1, WRAP + 1 - length + row, 0]


@jit
def query_coords(row_block, row):
    """Of the tile of Q, or of O, that begins with query `row` of the row block's sequence."""
    sequence = row_block.sequence
    if sequence.PACKED:
        return packed_coords(sequence.q_first, sequence.q_len, row_block.head, row)
    else:
        return [row_block.batch, row_block.head, sequence.q_first + row, 0]


@jit
def key_coords(row_block, kv_head, key):
    """Of the tile of K, or of V, that begins with key `key` of the row block's sequence."""
    sequence = row_block.sequence
    if sequence.PACKED:
        return packed_coords(sequence.k_first, sequence.k_len, kv_head, key)
    else:
        return [row_block.batch, kv_head, sequence.k_first + key, 0]


@jit
def transposed_value_coords(row_block, kv_head, key):
    """As `key_coords`, of V transposed: (B, Hkv, D, Sk). If packed, (1, Hkv, D, K): see `padded_keys`."""
    sequence = row_block.sequence
    if sequence.PACKED:
        return [0, kv_head, 0, padded_keys(sequence.k_first, row_block.batch) + key]
    else:
        return [row_block.batch, kv_head, 0, sequence.k_first + key]


@jit
def padded_keys(k_first, number):
    """Where the keys of sequence `number` begin, if those of each are padded to a multiple of KEYS_MULTIPLE: no two
    overlap, whatever their lengths."""
    return (k_first // KEYS_MULTIPLE + number) * KEYS_MULTIPLE


@jit
def store_lse(lse_ptr, q_shape, rows, lse):
    """Store the LSE of `rows`; nothing, if lse_ptr is null, as nobody asked for it.

    lse_ptr: (B, H, Sq) fp32; q_shape: (B, H, Sq, D); lse: [ROWS] fp32, in whatever layout.
    """
    block, row = rows.block, rows.first + gl.arange(0, rows.ROWS, lse.type.layout)
    batch = 0 if block.sequence.PACKED else block.batch
    head = (batch * q_shape[1] + block.head).to(gl.int64)
    asked = lse_ptr.to(gl.int64) != 0
    inside = (row < block.sequence.q_len) & asked
    gl.store(lse_ptr + head * q_shape[2] + block.sequence.q_first + row, lse, mask=inside)
