"""Row blocks of packed sequences: a kernel that lists them, those with most keys first, and a walk through the list.

What the sequences' lengths are is known on the card alone, and may be others in each replay of a graph. So a small
kernel before attention writes a record for each row block, and attention's grid does not depend on how many there are.
"""

from gluon_attn.runtime.compat import aggregate, gdc_launch_dependents, gdc_wait, gl, jit

from .sequence import Sequence
from .sizes import Lengths

RECORD = gl.constexpr(8)  # int32 of a record, 32 bytes: six are used, and one sector of the cache holds it
CANDIDATES = gl.constexpr(32)  # that a program of the kernel below looks at
SEQUENCES = gl.constexpr(128)  # that it compares them with at a time


@aggregate
class PackedWork:
    """The row block at hand, as `Work` of either architecture has it. Immutable: `next()` returns the next.

    Items are numbered through a head before the next, so that its K and V stay in L2; in a head, as the list has them,
    longest first, so that the last ones are short. Programs go there and back through them, as an ox ploughs.
    """

    number: gl.tensor
    way_back: gl.tensor
    count: gl.tensor  # of row blocks of a head
    heads: gl.tensor
    records: gl.tensor  # pointer
    lengths: Lengths

    @jit
    def is_left(self):
        return self.number < self.count * self.heads

    @jit
    def rows(self):
        """Every role reads the record for itself: the load role is the first, and the others find it in L1."""
        head = self.number // self.count
        record = self.records + (1 + self.number - head * self.count) * RECORD
        q_first, q_len = gl.load(record), gl.load(record + 1)
        k_first, k_len = gl.load(record + 2), gl.load(record + 3)
        sequence = Sequence(q_first, q_len, k_first, k_len, True)
        return self.lengths.rows_of(sequence, gl.load(record + 4), head, gl.load(record + 5))

    @jit
    def next(self):
        there, back = 2 * (gl.num_programs(0) - gl.program_id(0)) - 1, 2 * gl.program_id(0) + 1
        number = self.number + gl.where(self.way_back, back, there)
        return PackedWork(number, ~self.way_back, self.count, self.heads, self.records, self.lengths)


@jit
def first_packed_work(lengths, heads):
    gdc_wait()  # for the kernel that makes the list, beside whose end this one begins
    records = lengths.records[0]
    number = gl.program_id(0)
    return PackedWork(number, number < 0, gl.load(records), heads, records, lengths)


@jit
def bounds(starts_ptr, rows, number, mask):
    """(first row, how many) of sequences, within `rows` whatever the tensor holds."""
    first = gl.minimum(gl.maximum(gl.load(starts_ptr + number, mask=mask, other=0), 0), rows)
    end = gl.minimum(gl.load(starts_ptr + number + 1, mask=mask, other=0), rows)
    return first, gl.maximum(end - first, 0)


@jit
def keys_of(cu_k_ptr, used_k_ptr, rows, number, mask):
    """(first key, how many count) of sequences."""
    first, length = bounds(cu_k_ptr, rows, number, mask)
    if used_k_ptr is not None:
        length = gl.maximum(gl.minimum(length, gl.load(used_k_ptr + number, mask=mask, other=0)), 0)
    return first, length


@jit
def sequence_of_keys(cu_k_ptr, used_k_ptr, rows, sequences, block, BLOCK_N: gl.constexpr):
    """(sequence, first key) of a block of its keys, as `padded_keys` numbers them; a block that none has is beyond the
    keys of one."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    begun = gl.to_tensor(0)
    for start in range(0, sequences, SEQUENCES):
        other = start + gl.arange(0, SEQUENCES, LAYOUT)
        first, _ = bounds(cu_k_ptr, rows, other, other < sequences)
        before = (other < sequences) & (first // BLOCK_N + other <= block)
        begun += gl.sum(before.to(gl.int32), axis=0)
    number = gl.maximum(begun - 1, 0)
    k_first, k_len = keys_of(cu_k_ptr, used_k_ptr, rows, number, number < sequences)
    key = (block - (k_first // BLOCK_N + number)) * BLOCK_N
    none = gl.to_tensor(0)
    return Sequence(none, none, k_first, k_len, True), key


@jit
def blocks_above(cost, q_len, k_len, block_m, reach, most_keys):
    """How many row blocks of a sequence cost more than `cost`, see `cost_of`, of which later ones never cost less."""
    blocks = (q_len + block_m - 1) // block_m
    end = gl.maximum(cost - (k_len - q_len) - reach, 0)
    end = gl.where(reach < 0, 0, end)
    cheaper = gl.minimum(end // block_m, gl.maximum(blocks - 1, 0))  # of all but the last
    return gl.where(cost < 0, blocks, gl.where(gl.minimum(k_len, most_keys) > cost, blocks - cheaper, 0))


@jit
def cost_of(index, q_len, k_len, block_m, reach, most_keys):
    """Keys up to the last that a row block sees, but no more than any of them may see."""
    end = gl.minimum((index + 1) * block_m, q_len) + (k_len - q_len) + reach
    end = gl.where(reach < 0, k_len, gl.maximum(gl.minimum(end, k_len), 0))
    return gl.minimum(end, most_keys)


@jit(do_not_specialize=["sequences", "q_rows", "k_rows", "block_m", "reach", "most_keys", "capacity"])
def list_row_blocks(
    cu_q_ptr,  # (sequences + 1,) int32: where each begins, and where the last ends
    cu_k_ptr,
    used_k_ptr,  # (sequences,) int32: how many keys of each count; None: all
    records_ptr,  # ((1 + capacity) RECORD,) int32: how many records follow; then the records, see `PackedWork.rows`
    sequences,
    q_rows,
    k_rows,
    block_m,
    reach,  # how many keys after its own position a query sees; -1: all
    most_keys,  # that a row block sees
    capacity,  # records that there is room for
):
    """The kernel. Row block i of sequence b is candidate cu_q[b] // block_m + b + i: each has one, and some numbers are
    nobody's. A program counts, for each of its candidates, the row blocks before it: those that cost more, or as much
    and are of an earlier sequence, or later in its own. So there is nothing to sort."""
    gdc_launch_dependents()
    LAYOUT: gl.constexpr = gl.BlockedLayout([8, 1], [1, 32], [4, 1], [1, 0])
    gl.static_assert(gl.num_warps() == 4)
    candidate = gl.program_id(0) * CANDIDATES + gl.arange(0, CANDIDATES, gl.SliceLayout(1, LAYOUT))
    column = gl.arange(0, SEQUENCES, gl.SliceLayout(0, LAYOUT))
    begun = candidate * 0
    for start in range(0, sequences, SEQUENCES):
        other = start + column
        exists = other < sequences
        first, _ = bounds(cu_q_ptr, q_rows, other, exists)
        before = exists[None, :] & ((first // block_m + other)[None, :] <= candidate[:, None])
        begun += gl.sum(before.to(gl.int32), axis=1)

    number = gl.maximum(begun - 1, 0)
    of_list = number < sequences
    q_first, q_len = bounds(cu_q_ptr, q_rows, number, of_list)
    k_first, k_len = keys_of(cu_k_ptr, used_k_ptr, k_rows, number, of_list)
    index = candidate - (q_first // block_m + number)
    blocks = (q_len + block_m - 1) // block_m
    cost = cost_of(index, q_len, k_len, block_m, reach, most_keys)
    place = blocks - 1 - index
    count = column * 0
    for start in range(0, sequences, SEQUENCES):
        other = start + column
        exists = other < sequences
        _, other_q_len = bounds(cu_q_ptr, q_rows, other, exists)
        _, other_k_len = keys_of(cu_k_ptr, used_k_ptr, k_rows, other, exists)
        count += (other_q_len + block_m - 1) // block_m
        least = cost[:, None] - (other[None, :] < number[:, None]).to(gl.int32)
        above = blocks_above(least, other_q_len[None, :], other_k_len[None, :], block_m, reach, most_keys)
        place += gl.sum(gl.where(exists[None, :] & (other[None, :] != number[:, None]), above, 0), axis=1)

    listed = (index >= 0) & (index < blocks) & (place < capacity)
    record = records_ptr + (1 + place) * RECORD
    gl.store(record, q_first, mask=listed)
    gl.store(record + 1, q_len, mask=listed)
    gl.store(record + 2, k_first, mask=listed)
    gl.store(record + 3, k_len, mask=listed)
    gl.store(record + 4, number, mask=listed)
    gl.store(record + 5, index, mask=listed)
    if gl.program_id(0) == 0:
        gl.store(records_ptr, gl.minimum(gl.sum(count, axis=0), capacity))
