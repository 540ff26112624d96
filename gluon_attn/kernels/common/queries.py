"""Which queries see a block of keys: the row blocks that every role of a backward walks, and the mask within them."""

from gluon_attn.runtime.compat import aggregate, gl, jit

from .sequence import Sequence
from .thread_view import keep_columns_from


@aggregate
class QueryRange:
    """The row blocks of one head that some keys walk, first ... end - 1, and from which on each query sees every key.
    All int32 scalars.

    They are walked in steps, the last block first, so that under a causal mask the masked ones come last. `rotation`:
    how many of the unmasked ones are walked after the other unmasked ones, so that programs that have different keys of
    a head do not meet.
    """

    first: gl.tensor
    end: gl.tensor
    unmasked_first: gl.tensor
    rotation: gl.tensor

    @jit
    def steps(self):
        return self.end - self.first

    @jit
    def unmasked_steps(self):
        return self.end - self.unmasked_first

    @jit
    def block(self, step):
        unmasked = self.unmasked_steps()
        turned = step + self.rotation
        turned -= gl.where(turned >= unmasked, unmasked, 0)
        return gl.where(step < unmasked, self.end - 1 - turned, self.masked_block(step))

    @jit
    def masked_block(self, step):
        """The same, of a step after the unmasked ones."""
        return self.end - 1 - step


@aggregate
class Keys:
    """KEYS consecutive keys of a sequence, from `first` on, against queries in blocks of BLOCK_M."""

    batch: gl.tensor
    kv_head: gl.tensor
    first: gl.tensor  # of the sequence
    sequence: Sequence
    KEYS: gl.constexpr
    BLOCK_M: gl.constexpr
    MASK: gl.constexpr  # a Mask
    ROTATED: gl.constexpr  # every block of keys begins two row blocks after the one before

    @jit
    def queries(self):
        """The QueryRange that they walk, the same in each head of the group. The last block alone may have fewer than
        KEYS keys, and is masked throughout."""
        sequence = self.sequence
        end = (sequence.q_len + self.BLOCK_M - 1) // self.BLOCK_M
        first = gl.to_tensor(0)
        unmasked_first = gl.to_tensor(0)
        if self.MASK.causal:
            shift = sequence.k_len - sequence.q_len
            first = gl.maximum(self.first - shift, 0) // self.BLOCK_M
            last_key = self.first + self.KEYS - 1
            unmasked_first = gl.minimum((gl.maximum(last_key - shift, 0) + self.BLOCK_M - 1) // self.BLOCK_M, end)
            unmasked_first = gl.maximum(unmasked_first, first)
        whole = self.first + self.KEYS <= sequence.k_len
        unmasked_first = gl.where(whole, unmasked_first, end)
        rotation = gl.to_tensor(0)
        if self.ROTATED:
            rotation = 2 * (self.first // self.KEYS) % gl.maximum(end - unmasked_first, 1)
        return QueryRange(first, end, unmasked_first, rotation)

    @jit
    def mask(self, scores, row):
        """Scores [KEYS, BLOCK_M] of the queries from `row` on, -inf where a query does not see a key."""
        sequence = self.sequence
        query = self.first + sequence.q_len - sequence.k_len - row  # the column that first sees key 0 of the block
        keys = sequence.k_len - self.first
        return keep_columns_from(scores, query, keys, float("-inf"), DIAGONAL=self.MASK.causal)
