"""Which queries see a block of keys: the row blocks that every role of a backward walks, and the mask within them."""

from gluon_attn.runtime.compat import aggregate, constexpr_function, gl, jit

from .keys import chunk_start, start_of_keys
from .mask_mod import lets_through, limits_of_rows
from .score_mod import derived, is_by_distance, modified, taken_by_distance
from .sequence import Sequence
from .thread_view import keep_columns, keep_columns_from, rows_of

# How many row blocks of a query head are walked before those of the next one, where late keys are hidden. On an H200,
# causal, 8 query heads to a KV head: 1 is slower at 8192 tokens, and 32 at 2048.
AT_ONCE = gl.constexpr(4)


@aggregate
class QueryRange:
    """The row blocks that some keys walk in each of `group` query heads, first ... end - 1, and those among them of
    which each query sees every key, unmasked_first ... unmasked_end - 1. All int32 scalars. There may be none.

    They are walked in steps, of one head after the other: those without a mask, and then those with one, which come
    before them in the sequence. Within both, the last block comes first, so that under a causal mask programs that have
    different keys of a head walk the same rows. Only do they begin apart, so as not to wait for each other: the first
    `rotation` blocks without a mask come after the others.

    Where late keys are hidden, keys have unlike numbers of row blocks. One head after the other, programs with few
    would get ahead of the others by whole heads, and L2 would have to hold the rows of them all. So there the steps
    without a mask go through all heads with AT_ONCE blocks of each, and then with the next ones; and the first
    `rotation` steps come after the others. And of several heads, keys in the later half walk those blocks `upwards`,
    from the first one to the last. Where they are paired, a program has them after keys as far from the other end. So
    programs that have such keys at a time walk the same rows, and end together.

    If a mask hides early keys, late queries see later keys only. Then the steps begin with the blocks that have a mask
    for that, and each head's blocks are walked from the last to the first. Later keys end later, so that programs with
    different keys begin apart by themselves: who walks a row block next gets there when the one before is done with it.
    In the order without, or from the first to the last, each would wait for the whole walk of the one before if sums
    are in a fixed order.
    """

    first: gl.tensor
    end: gl.tensor
    unmasked_first: gl.tensor
    unmasked_end: gl.tensor
    rotation: gl.tensor
    upwards: gl.tensor
    group: gl.tensor
    MASK: gl.constexpr  # a Mask

    @jit
    def steps(self):
        return (self.end - self.first) * self.group

    @jit
    def unmasked_steps(self):
        """Of all heads."""
        return (self.unmasked_end - self.unmasked_first) * self.group

    @jit
    def masked_steps(self):
        """Of a head, after those without a mask."""
        return self.unmasked_first - self.first

    @jit
    def masked_steps_before(self):
        """Of a head, before those without a mask; none unless the mask hides early keys."""
        return self.end - self.unmasked_end

    @jit
    def masked_block(self, step, after):
        """The row block of a step, of those of a head with a mask: before those without one (0), or after (1)."""
        if self.MASK.hides_early_keys:
            return gl.where(after == 0, self.end, self.unmasked_first) - 1 - step
        else:
            return self.unmasked_first - 1 - step

    @jit
    def visit(self, step):
        """(which head of the group, which row block) a step is about."""
        unmasked, masked = self.unmasked_end - self.unmasked_first, self.masked_steps()
        if self.MASK.hides_early_keys:
            before = self.masked_steps_before()
            is_before, is_after = step < before * self.group, step >= (before + unmasked) * self.group
            of_its_kind = step - gl.where(is_before, 0, gl.where(is_after, before + unmasked, before)) * self.group
            blocks = gl.maximum(gl.where(is_before, before, gl.where(is_after, masked, unmasked)), 1)
            end = gl.where(is_before, self.end, gl.where(is_after, self.unmasked_first, self.unmasked_end))
            return of_its_kind // blocks, end - 1 - of_its_kind % blocks
        else:
            all_unmasked = unmasked * self.group
            is_masked = step >= all_unmasked
            of_its_kind = step - gl.where(is_masked, all_unmasked, 0)
            if self.MASK.hides_late_keys:
                turned = of_its_kind + self.rotation
                turned -= gl.where(turned >= all_unmasked, all_unmasked, 0)
                of_its_kind = gl.where(is_masked, of_its_kind, turned)
                before = gl.where(is_masked, 0, turned // (AT_ONCE * self.group) * AT_ONCE)
                of_its_kind -= before * self.group
                blocks = gl.where(is_masked, gl.maximum(masked, 1), gl.minimum(unmasked - before, AT_ONCE))
                place = before + of_its_kind % blocks
            else:
                blocks = gl.maximum(gl.where(is_masked, masked, unmasked), 1)
                place = of_its_kind % blocks
                turned = place + self.rotation
                turned -= gl.where(turned >= unmasked, unmasked, 0)
                place = gl.where(is_masked, place, turned)
            row_block = gl.where(is_masked, self.unmasked_first, self.end) - 1 - place
            row_block = gl.where(self.upwards & ~is_masked, self.unmasked_first + place, row_block)
            return of_its_kind // blocks, row_block


@constexpr_function
def leaves_out_rows(mask):
    """Whether its function says of blocks of keys which queries see them."""
    return mask.function is not None and mask.function.rows is not None


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
    part: gl.tensor  # of the key blocks that programs share, which they compute of these, see shares.py
    shares: gl.tensor  # of their row blocks, in as many equal shares: those from share_first to share_end
    share_first: gl.tensor
    share_end: gl.tensor
    MASK: gl.constexpr  # a Mask
    ROTATED: gl.constexpr  # every block of keys begins two steps after the one before, and some walk `upwards`
    SCORE_MOD: gl.constexpr  # a ScoreFunction, or None
    aux: gl.tuple  # pointers to the tensors that it and MASK.function read, None where there is none
    limits: gl.tuple  # of one `Limits`, if MASK.function leaves out queries; else of none

    @jit
    def limited(self):
        """With the queries that MASK.function leaves to these keys. Not for sums in a fixed order: a row block would
        have to know how many other key blocks walk it."""
        if leaves_out_rows(self.MASK) and self.ROTATED:
            sequence = self.sequence
            last = gl.minimum(self.first + self.KEYS, sequence.k_len) - 1
            first = gl.minimum(self.first, last)
            head, batch = self.kv_head, self.batch
            limits = limits_of_rows(self.MASK.function, self.SCORE_MOD, first, last, sequence, head, batch, self.aux)
            return gl.aggregate_replace(self, limits=(limits,))
        else:
            return self

    @jit
    def head(self, member):
        """The query head that is the `member`-th of the group."""
        return self.kv_head * self.group + member

    @jit
    def row_blocks(self):
        """Of a query head, seen or not."""
        return (self.sequence.q_len + self.BLOCK_M - 1) // self.BLOCK_M

    @jit
    def first_query(self, key):
        """The first query that sees a key, a scalar or a tensor."""
        sequence = self.sequence
        shift = sequence.k_len - sequence.q_len
        if self.MASK.causal:
            return gl.maximum(key - shift, 0)
        first = key * 0
        if self.MASK.right is not None:
            right = gl.minimum(self.MASK.right, sequence.q_len)  # more hides nothing, and would overflow
            first = gl.maximum(first, key - shift - right)
        if self.MASK.chunk is not None:
            first = gl.maximum(first, chunk_start(key, self.MASK) - shift)
        return first

    @jit
    def end_of_queries(self, key):
        """The query after the last one that sees a key, a scalar or a tensor; zero or negative for none."""
        sequence = self.sequence
        end = sequence.q_len + key * 0
        if self.MASK.left is not None:
            left = gl.minimum(self.MASK.left, sequence.k_len)  # as above
            end -= gl.maximum(sequence.k_len - 1 - key - left, 0)
        if self.MASK.chunk is not None:
            start = chunk_start(key, self.MASK)
            of_chunk = start + gl.minimum(self.MASK.chunk, sequence.k_len - start)
            end = gl.minimum(end, of_chunk - (sequence.k_len - sequence.q_len))
        return end

    @jit
    def query_range(self):
        """The QueryRange that they walk: their shares of the row blocks that see them. The last block of keys alone
        may have fewer than KEYS, and is masked throughout."""
        sequence = self.sequence
        end = self.row_blocks()
        first = gl.to_tensor(0)
        unmasked_first = gl.to_tensor(0)
        if self.MASK.hides_late_keys:
            first = self.first_query(self.first) // self.BLOCK_M
            last_key = self.first + self.KEYS - 1
            unmasked_first = gl.minimum((self.first_query(last_key) + self.BLOCK_M - 1) // self.BLOCK_M, end)
            unmasked_first = gl.maximum(unmasked_first, first)
        unmasked_end = end
        if self.MASK.hides_early_keys:
            see_first_key = gl.maximum(self.end_of_queries(self.first), 0)
            unmasked_end = gl.where(see_first_key < sequence.q_len, see_first_key // self.BLOCK_M, end)
            see_last_key = gl.maximum(self.end_of_queries(self.first + self.KEYS - 1), 0)
            end = gl.maximum((see_last_key + self.BLOCK_M - 1) // self.BLOCK_M, first)
        if self.MASK.function is not None:
            if len(self.limits) > 0:
                limits = self.limits[0]
                first = gl.maximum(first, limits.first // self.BLOCK_M)
                end = gl.maximum(gl.minimum(end, (limits.end + self.BLOCK_M - 1) // self.BLOCK_M), first)
                unmasked_first = gl.maximum(unmasked_first, (limits.full_first + self.BLOCK_M - 1) // self.BLOCK_M)
                full_end = gl.where(limits.full_end < sequence.q_len, limits.full_end // self.BLOCK_M, end)
                unmasked_end = gl.minimum(unmasked_end, full_end)
            else:
                unmasked_first = end
        whole = self.first + self.KEYS <= sequence.k_len
        unmasked_first = gl.where(whole, unmasked_first, end)
        if self.shares > 1:
            seen = end - first
            end = first + seen * self.share_end // self.shares
            first += seen * self.share_first // self.shares
            unmasked_first = gl.minimum(gl.maximum(unmasked_first, first), end)
        rotation = gl.to_tensor(0)
        upwards = first < 0  # false, as a tensor
        if self.MASK.hides_early_keys:
            unmasked_first = gl.minimum(gl.maximum(unmasked_first, first), end)
            unmasked_end = gl.minimum(gl.maximum(unmasked_end, unmasked_first), end)
        else:
            unmasked_end = end
            if self.ROTATED:
                number, steps = self.first // self.KEYS, end - unmasked_first
                if self.MASK.hides_late_keys:
                    steps *= self.group
                    upwards = (self.group > 1) & (2 * self.first >= sequence.k_len)
                    number = gl.where(upwards, (sequence.k_len - 1) // self.KEYS - number, number)
                rotation = 2 * number % gl.maximum(steps, 1)
        return QueryRange(first, end, unmasked_first, unmasked_end, rotation, upwards, self.group, self.MASK)

    @jit
    def key_blocks_before(self, row_block):
        """How many blocks of keys before these a row block sees. They see it from the first one on that does."""
        number = self.first // self.KEYS
        if self.MASK.has_early_limit:
            hidden = start_of_keys(row_block * self.BLOCK_M, self.sequence, self.MASK)
            number -= gl.maximum(hidden, 0) // self.KEYS
        return number

    @jit
    def mask(self, scores, row, head):
        """Scores [KEYS, BLOCK_M] of the queries from `row` on, -inf where a query does not see a key. head: of the
        queries, counted for a function alone."""
        sequence = self.sequence
        if self.MASK.function is not None:
            q_index, k_index, head, batch = self.place(scores, row, head)
            seen = lets_through(self.MASK.function, self.SCORE_MOD, q_index, k_index, head, batch, sequence, self.aux)
            scores = gl.where(seen, scores, float("-inf"))
        if self.MASK.has_early_limit or self.MASK.has_row_limits:
            key = self.first + rows_of(scores)
            first = gl.where(key < sequence.k_len, self.first_query(key) - row, self.BLOCK_M)
            end = self.end_of_queries(key) - row if self.MASK.has_early_limit else None
            return keep_columns(scores, first, end, float("-inf"))
        query = self.first + sequence.q_len - sequence.k_len - row  # the column that first sees key 0 of the block
        keys = sequence.k_len - self.first
        return keep_columns_from(scores, query, keys, float("-inf"), DIAGONAL=self.MASK.causal)

    @jit
    def place(self, scores, row, head):
        """What a function is told of scores [KEYS, BLOCK_M] of a query head, from query `row` on."""
        LAYOUT: gl.constexpr = scores.type.layout
        key = gl.arange(0, scores.shape[0], gl.SliceLayout(1, LAYOUT))[:, None]
        query = gl.arange(0, scores.shape[1], gl.SliceLayout(0, LAYOUT))[None, :]
        return row + query, self.first + key, head, self.batch

    @jit
    def modified(self, scores, row, head, before):
        """As `Rows.modified` has it, of scores that lie the other way round."""
        if self.SCORE_MOD is None:
            return scores
        elif is_by_distance(self.SCORE_MOD):
            start = row + (self.sequence.k_len - self.sequence.q_len) - self.first
            SHAPE: gl.constexpr = scores.shape
            LAYOUT: gl.constexpr = scores.type.layout
            return scores + taken_by_distance(start, before, -1, self.MASK.causal, SHAPE, LAYOUT)
        else:
            place = self.place(scores, row, head)
            return modified(self.SCORE_MOD, scores * before, place, self.sequence, self.aux)

    @jit
    def derived(self, dscores, scores, changed, row, head, before):
        """The gradient of raw scores, times the softmax scale, from that of what `modified` made of them."""
        if self.SCORE_MOD is None or is_by_distance(self.SCORE_MOD):
            return dscores
        else:
            place = self.place(scores, row, head)
            return derived(self.SCORE_MOD, dscores, scores * before, changed, place, self.sequence, self.aux)
