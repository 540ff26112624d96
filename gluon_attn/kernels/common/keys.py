"""Which keys a block of query rows sees: the blocks of keys that every role walks, and the mask within them.

The backward has queries.py instead: which queries see a block of keys.
"""

from gluon_attn.runtime.compat import aggregate, constexpr_function, gl, jit

from .mask_mod import lets_through, limits_of_keys
from .score_mod import is_by_distance, modified, taken_by_distance
from .sequence import RowBlock
from .thread_view import hide_first_columns, keep_columns, keep_first_columns, rows_of


@jit
def chunk_start(position, MASK: gl.constexpr):
    """The first key of the chunk of a position, a scalar or a tensor; of a negative one, key 0."""
    inside = gl.maximum(position, 0)
    return inside - inside % MASK.chunk


@jit
def start_of_keys(row, sequence, MASK: gl.constexpr):
    """The first key that a query, a scalar or a tensor, sees, if it sees any; zero or negative if it sees key 0."""
    position = row + (sequence.k_len - sequence.q_len)
    start = row * 0
    if MASK.left is not None:
        start = position - gl.minimum(MASK.left, sequence.k_len)  # more hides nothing, and would overflow
    if MASK.chunk is not None:
        start = gl.maximum(start, chunk_start(position, MASK))
    return start


@jit
def end_of_keys(row, sequence, MASK: gl.constexpr):
    """The key after the last one that a query, a scalar or a tensor, sees; zero or negative for none."""
    end = sequence.k_len
    if MASK.causal:
        end = gl.minimum(end, row + (sequence.k_len - sequence.q_len) + 1)
    if MASK.right is not None:
        right = gl.minimum(MASK.right, sequence.q_len)  # as above
        end = end - gl.maximum(sequence.q_len - 1 - row - right, 0)
    if MASK.chunk is not None and not MASK.causal:  # causal ends before its chunk does
        position = row + (sequence.k_len - sequence.q_len)
        start = chunk_start(position, MASK)
        of_chunk = start + gl.minimum(MASK.chunk, sequence.k_len - start)
        end = gl.minimum(end, gl.where(position < 0, 0, of_chunk))
    return end


@aggregate
class KeyRange:
    """The key blocks that some rows walk, first ... end - 1, and those among them that every row sees entirely,
    unmasked_first ... unmasked_end - 1. All int32 scalars.

    first <= unmasked_first <= unmasked_end <= end, and first < end. They are walked in steps, the last block first. A
    role counts steps, and `block` says which block a step is about. Steps are masked ones, then unmasked ones, then
    masked ones again, each maybe none. The last kind there is only if the mask hides early keys: otherwise first and
    unmasked_first are 0, and no role is compiled with a loop for it.
    """

    first: gl.tensor
    end: gl.tensor
    unmasked_first: gl.tensor
    unmasked_end: gl.tensor

    @jit
    def steps(self):
        return self.end - self.first

    @jit
    def block(self, step):
        return self.end - 1 - step

    @jit
    def masked_steps(self):
        """Steps before the first block that every row sees entirely; may be 0. If there is no such block, some of the
        steps, as many as `unmasked_end_step` says."""
        return self.end - self.unmasked_end

    @jit
    def masked_as(self, other):
        """The same steps, for rows of which `other` is the range that they see themselves, a part of this one."""
        return KeyRange(self.first, self.end, other.unmasked_first, other.unmasked_end)

    @jit
    def unmasked_end_step(self):
        """The step after the last block that every row sees entirely; `masked_steps` if there is none."""
        return self.end - self.unmasked_first


@constexpr_function
def leaves_out_keys(mask):
    """Whether its function says of blocks of queries which keys they see."""
    return mask.function is not None and mask.function.keys is not None


@aggregate
class Rows:
    """ROWS consecutive query rows of a row block, from `first` on, against keys in blocks of BLOCK_N.

    Row first + i sees keys hidden(i) ... visible(i) - 1, none if there are none between the two.
    """

    block: RowBlock
    first: gl.tensor  # of the sequence
    seen: gl.tensor  # visible(0)
    ROWS: gl.constexpr
    BLOCK_N: gl.constexpr
    MASK: gl.constexpr  # a Mask
    SCORE_MOD: gl.constexpr  # a ScoreFunction, or None
    aux: gl.tuple  # pointers to the tensors that it and MASK.function read, None where there is none
    limits: gl.tuple  # of none; or, if MASK.function leaves out keys, of one `Limits`, the first block, and the end

    @jit
    def visible(self, i):
        """The key after the last one that row first + i (i a scalar or a tensor) sees; zero or negative for none."""
        if self.MASK.has_row_limits:
            return end_of_keys(self.first + i, self.block.sequence, self.MASK)
        elif self.MASK.causal:
            return gl.minimum(self.block.sequence.k_len, self.seen + i)
        else:
            return self.seen + i * 0

    @jit
    def hidden(self, i):
        """How many of the first keys row first + i (i a scalar or a tensor) does not see; zero or negative for none."""
        if self.MASK.chunk is not None:
            return start_of_keys(self.first + i, self.block.sequence, self.MASK)
        elif self.MASK.left is not None:
            return start_of_keys(self.first, self.block.sequence, self.MASK) + i
        else:
            return i * 0

    @jit
    def limited(self, first_block, end_block):
        """With the keys that MASK.function leaves to these rows. They are part of a row block that walks key blocks
        first_block to end_block - 1, and walk no others."""
        if leaves_out_keys(self.MASK):
            sequence = self.block.sequence
            last = gl.minimum(self.first + self.ROWS, sequence.q_len) - 1
            first = gl.minimum(self.first, last)
            head, batch = self.block.head, self.block.batch
            limits = limits_of_keys(self.MASK.function, self.SCORE_MOD, first, last, sequence, head, batch, self.aux)
            return gl.aggregate_replace(self, limits=(limits, first_block, end_block))
        else:
            return self

    @jit
    def slice(self, offset, ROWS: gl.constexpr):
        """ROWS of these rows, from row first + offset on."""
        first, seen = self.first + offset, self.visible(offset)
        rows = gl.aggregate_replace(self, first=first, seen=seen, ROWS=ROWS, limits=())
        if leaves_out_keys(self.MASK):
            key_range = self.key_range()
            return rows.limited(key_range.first, key_range.end)
        else:
            return rows

    @jit
    def key_range(self):
        """The KeyRange that they walk: at least one block, even if all of it is masked, as its statistics are then
        those of no key."""
        seen_end, unmasked_end = self.visible(self.ROWS - 1), gl.maximum(self.seen, 0) // self.BLOCK_N
        if leaves_out_keys(self.MASK):
            seen_end = gl.minimum(seen_end, self.limits[0].end)
        end = (gl.maximum(seen_end, 1) + self.BLOCK_N - 1) // self.BLOCK_N
        first, unmasked_first = gl.to_tensor(0), gl.to_tensor(0)
        if leaves_out_keys(self.MASK):
            limits, first_block, end_block = self.limits
            end = gl.minimum(gl.maximum(end, first_block + 1), end_block)
            first = gl.maximum(limits.first // self.BLOCK_N, first_block)
        if self.MASK.hides_early_keys:
            first = gl.minimum(gl.maximum(first, gl.maximum(self.hidden(0), 0) // self.BLOCK_N), end - 1)
            last = gl.minimum(self.ROWS, self.block.sequence.q_len - self.first) - 1  # nobody stores rows past it
            unmasked_first = (gl.maximum(self.hidden(last), 0) + self.BLOCK_N - 1) // self.BLOCK_N
        if self.MASK.function is not None:
            if leaves_out_keys(self.MASK):
                full_first = (self.limits[0].full_first + self.BLOCK_N - 1) // self.BLOCK_N
                unmasked_first = gl.maximum(unmasked_first, full_first)
                unmasked_end = gl.minimum(unmasked_end, gl.maximum(self.limits[0].full_end, 0) // self.BLOCK_N)
                unmasked_end = gl.minimum(gl.maximum(unmasked_end, first), end)
            else:
                unmasked_end = first
        if self.MASK.hides_early_keys:
            unmasked_first = gl.minimum(gl.maximum(unmasked_first, first), unmasked_end)
        return KeyRange(first, end, unmasked_first, unmasked_end)

    @jit
    def mask(self, scores, block, FIRST_COLUMN: gl.constexpr = 0):
        """Scores of key block `block`, -inf where a row does not see a key: [ROWS, BLOCK_N], or some of the columns
        from FIRST_COLUMN on."""
        if self.MASK.function is not None:
            q_index, k_index, head, batch = self.place(scores, block, FIRST_COLUMN)
            sequence = self.block.sequence
            seen = lets_through(self.MASK.function, self.SCORE_MOD, q_index, k_index, head, batch, sequence, self.aux)
            scores = gl.where(seen, scores, float("-inf"))
        if self.MASK.has_row_limits:
            row, start = rows_of(scores), block * self.BLOCK_N + FIRST_COLUMN
            first = self.hidden(row) - start if self.MASK.has_early_limit else None
            return keep_columns(scores, first, self.visible(row) - start, float("-inf"))
        # Not visible(i): only rows past the last query would see less by it, and nobody stores those.
        columns = self.seen - (block * self.BLOCK_N + FIRST_COLUMN)
        scores = keep_first_columns(scores, columns, float("-inf"), DIAGONAL=self.MASK.causal)
        if self.MASK.has_early_limit:
            columns = self.hidden(0) - (block * self.BLOCK_N + FIRST_COLUMN)
            scores = hide_first_columns(scores, columns, float("-inf"))
        return scores

    @jit
    def place(self, scores, block, FIRST_COLUMN: gl.constexpr):
        """What a function is told of scores [ROWS, N] of key block `block`."""
        LAYOUT: gl.constexpr = scores.type.layout
        row = gl.arange(0, scores.shape[0], gl.SliceLayout(1, LAYOUT))[:, None]
        column = gl.arange(0, scores.shape[1], gl.SliceLayout(0, LAYOUT))[None, :]
        q_index, k_index = self.first + row, block * self.BLOCK_N + FIRST_COLUMN + column
        return q_index, k_index, self.block.head, self.block.batch

    @jit
    def added(self, block, slope, SHAPE: gl.constexpr, LAYOUT: gl.constexpr, FIRST_COLUMN: gl.constexpr = 0):
        """What a SCORE_MOD by distance adds to raw scores of key block `block`. slope: in their units."""
        sequence = self.block.sequence
        start = self.first + (sequence.k_len - sequence.q_len) - (block * self.BLOCK_N + FIRST_COLUMN)
        return taken_by_distance(start, slope, 1, self.MASK.causal, SHAPE, LAYOUT)

    @jit
    def modified(self, scores, block, before, FIRST_COLUMN: gl.constexpr = 0):
        """Raw scores q · k [ROWS, N] of key block `block` as SCORE_MOD makes them, before the mask; in its units, see
        `ScoreScale`. before: what they are multiplied with first."""
        if self.SCORE_MOD is None:
            return scores
        elif is_by_distance(self.SCORE_MOD):
            return scores + self.added(block, before, scores.shape, scores.type.layout, FIRST_COLUMN)
        else:
            place = self.place(scores, block, FIRST_COLUMN)
            return modified(self.SCORE_MOD, scores * before, place, self.block.sequence, self.aux)
