"""Which queries see a block of keys: the row blocks that every role of a backward walks, and the mask within them."""

from gluon_attn.runtime.compat import aggregate, gl, jit

from .sequence import Sequence
from .thread_view import keep_columns_from


@aggregate
class QueryRange:
    """The row blocks that some keys walk in each of `group` query heads, first ... end - 1, and from which on each
    query sees every key. All int32 scalars.

    They are walked in steps: those without a mask, of one head after the other; then those with one, likewise. Within
    both, the last block comes first, so that under a causal mask programs that have different keys of a head walk the
    same rows. Only do they begin apart, so as not to wait for each other: the first `rotation` blocks without a mask
    come after the others.
    """

    first: gl.tensor
    end: gl.tensor
    unmasked_first: gl.tensor
    rotation: gl.tensor
    group: gl.tensor

    @jit
    def steps(self):
        return (self.end - self.first) * self.group

    @jit
    def unmasked_steps(self):
        """Of all heads."""
        return (self.end - self.unmasked_first) * self.group

    @jit
    def masked_steps(self):
        """Of a head."""
        return self.unmasked_first - self.first

    @jit
    def visit(self, step):
        """(which head of the group, which row block) a step is about."""
        unmasked, masked = self.end - self.unmasked_first, self.masked_steps()
        is_masked = step >= unmasked * self.group
        of_its_kind = step - gl.where(is_masked, unmasked * self.group, 0)
        blocks = gl.maximum(gl.where(is_masked, masked, unmasked), 1)
        place = of_its_kind % blocks
        turned = place + self.rotation
        turned -= gl.where(turned >= unmasked, unmasked, 0)
        return of_its_kind // blocks, gl.where(is_masked, self.unmasked_first - 1 - place, self.end - 1 - turned)

    @jit
    def masked_block(self, step):
        """The row block of a step, of those of a head with a mask."""
        return self.unmasked_first - 1 - step


@aggregate
class Keys:
    """KEYS consecutive keys of a sequence, from `first` on, against queries in blocks of BLOCK_M."""

    batch: gl.tensor
    kv_head: gl.tensor
    first: gl.tensor  # of the sequence
    sequence: Sequence
    KEYS: gl.constexpr
    BLOCK_M: gl.constexpr
    group: gl.tensor  # query heads of the KV head
    shares: gl.tensor  # of their row blocks, in as many equal shares: those from share_first to share_end
    share_first: gl.tensor
    share_end: gl.tensor
    MASK: gl.constexpr  # a Mask
    ROTATED: gl.constexpr  # every block of keys begins two row blocks after the one before

    @jit
    def head(self, member):
        """The query head that is the `member`-th of the group."""
        return self.kv_head * self.group + member

    @jit
    def row_blocks(self):
        """Of a query head, seen or not."""
        return (self.sequence.q_len + self.BLOCK_M - 1) // self.BLOCK_M

    @jit
    def queries(self):
        """The QueryRange that they walk: their shares of the row blocks that see them. The last block of keys alone
        may have fewer than KEYS, and is masked throughout."""
        sequence = self.sequence
        end = self.row_blocks()
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
        if self.shares > 1:
            seen = end - first
            end = first + seen * self.share_end // self.shares
            first += seen * self.share_first // self.shares
            unmasked_first = gl.minimum(gl.maximum(unmasked_first, first), end)
        rotation = gl.to_tensor(0)
        if self.ROTATED:
            rotation = 2 * (self.first // self.KEYS) % gl.maximum(end - unmasked_first, 1)
        return QueryRange(first, end, unmasked_first, rotation, self.group)

    @jit
    def mask(self, scores, row):
        """Scores [KEYS, BLOCK_M] of the queries from `row` on, -inf where a query does not see a key."""
        sequence = self.sequence
        query = self.first + sequence.q_len - sequence.k_len - row  # the column that first sees key 0 of the block
        keys = sequence.k_len - self.first
        return keep_columns_from(scores, query, keys, float("-inf"), DIAGONAL=self.MASK.causal)
