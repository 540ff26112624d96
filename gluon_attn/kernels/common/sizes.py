"""The sizes of a problem as the kernels count them."""

from gluon_attn.runtime.compat import aggregate, gl, jit

from .keys import Rows, end_of_keys
from .sequence import RowBlock, whole_sequence


@aggregate
class Counts:
    """How many batches, query heads and row blocks there are. int32 scalars."""

    batches: gl.tensor
    heads: gl.tensor
    all_heads: gl.tensor  # of all batches
    row_blocks: gl.tensor  # of a head


@aggregate
class Lengths:
    """How many queries and keys every sequence has, or, if there are records (see packed.py), all sequences together:
    int32 scalars; in which blocks they come, and what is masked."""

    q_len: gl.tensor
    kv_len: gl.tensor
    BLOCK_M: gl.constexpr
    BLOCK_N: gl.constexpr
    MASK: gl.constexpr
    SCORE_MOD: gl.constexpr
    aux: gl.tuple
    records: gl.tuple  # of one: a pointer; or None

    @jit
    def row_blocks(self):
        return (self.q_len + self.BLOCK_M - 1) // self.BLOCK_M

    @jit
    def rows(self, batch, head, index):
        """The Rows of row block `index` of a head, and the keys they see."""
        return self.rows_of(whole_sequence(self.q_len, self.kv_len), batch, head, index)

    @jit
    def rows_of(self, sequence, batch, head, index):
        first = index * self.BLOCK_M
        seen = end_of_keys(first, sequence, self.MASK)
        row_block = RowBlock(batch, head, first, sequence)
        rows = Rows(row_block, first, seen, self.BLOCK_M, self.BLOCK_N, self.MASK, self.SCORE_MOD, self.aux, ())
        blocks = (sequence.k_len + self.BLOCK_N - 1) // self.BLOCK_N
        if sequence.PACKED:
            blocks = gl.maximum(blocks, 1)  # there may be no key, and one block is walked
        return rows.limited(0, blocks)


@jit
def counts_of(q_shape, lengths):
    """q_shape: (B, H, Sq, D)."""
    return Counts(q_shape[0], q_shape[1], q_shape[0] * q_shape[1], lengths.row_blocks())
