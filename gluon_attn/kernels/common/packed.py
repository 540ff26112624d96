"""Row blocks of packed sequences: a kernel that lists them, those with most keys first, and a walk through the list.

What the sequences' lengths are is known on the card alone, and may be others in each replay of a graph. So a small
kernel before attention writes a record for each row block, and attention's grid does not depend on how many there are.
"""

from gluon_attn.runtime.compat import aggregate, gdc_launch_dependents, gdc_wait, gl, jit

from .sequence import Sequence
from .sizes import Lengths

RECORD = gl.constexpr(8)  # int32 of a record, 32 bytes: six are used, and one sector of the cache holds it
CANDIDATES = gl.constexpr(8)  # that a program of a kernel that lists looks at: many programs, each done soon
SEQUENCES = gl.constexpr(128)  # that it compares them with at a time
LIST_LAYOUT = gl.constexpr(gl.BlockedLayout([2, 1], [1, 32], [4, 1], [1, 0]))  # [candidates, sequences]


@aggregate
class PackedWork:
    """The row block at hand, as `Work` of either architecture has it. Immutable: `next()` returns the next.

    A few heads at a time, so that their K and V stay in L2; of these the first records come first, then the second
    ones, and so on: longest first, so that the last ones are short. Programs go there and back through the places of
    such a group, as an ox ploughs. Each group begins anew, and with other programs than the one before. Else the same
    ones may get the longest row blocks of every head: with eight equal sequences of 16 row blocks, 16 heads and a
    causal mask, 132 programs would have up to 1.4 times the mean.
    """

    place: gl.tensor  # in the group
    way_back: gl.tensor
    first_head: gl.tensor  # of the group
    turn: gl.tensor  # where the program begins in it, counted from its end in every other group
    turned: gl.tensor  # whether this is one of these
    at_once: gl.tensor  # heads of a group, of which the last may have fewer
    count: gl.tensor  # of row blocks of a head
    heads: gl.tensor
    records: gl.tensor  # pointer
    lengths: Lengths

    @jit
    def heads_here(self):
        return gl.minimum(self.at_once, self.heads - self.first_head)

    @jit
    def is_left(self):
        return self.place < self.count * self.heads_here()

    @jit
    def rows(self):
        """Every role reads the record for itself: the load role is the first, and the others find it in L1."""
        heads = self.heads_here()
        number = self.place // heads
        head = self.first_head + self.place - number * heads
        record = self.records + (1 + number) * RECORD
        q_first, q_len = gl.load(record), gl.load(record + 1)
        k_first, k_len = gl.load(record + 2), gl.load(record + 3)
        sequence = Sequence(q_first, q_len, k_first, k_len, True)
        return self.lengths.rows_of(sequence, gl.load(record + 4), head, gl.load(record + 5))

    @jit
    def next(self):
        programs = gl.num_programs(0)
        place = self.place + gl.where(self.way_back, 2 * self.turn + 1, 2 * (programs - self.turn) - 1)
        ends = place >= self.count * self.heads_here()
        first_head = self.first_head + gl.where(ends, self.at_once, 0)
        turn = self.turn + gl.where(ends & self.turned, programs // 4, 0)
        turn -= gl.where(turn >= programs, programs, 0)
        turned = self.turned ^ ends
        place = gl.where(ends, gl.where(turned, programs - 1 - turn, turn), place)
        way_back = gl.where(ends, turned, ~self.way_back)
        rest = (self.at_once, self.count, self.heads, self.records, self.lengths)
        return PackedWork(place, way_back, first_head, turn, turned, *rest)


@jit
def heads_at_once(count, heads):
    """Of which each program has about two row blocks, or a little more; a head has `count`. Never less than one, but in
    the last group."""
    at_once = (4 * gl.num_programs(0) + count) // (2 * gl.maximum(count, 1))
    groups = heads // gl.minimum(gl.maximum(at_once, 1), heads)
    return (heads + groups - 1) // groups


@jit
def first_packed_work(lengths, heads):
    gdc_wait()  # for the kernel that makes the list, beside whose end this one begins
    records = lengths.records[0]
    count, program = gl.load(records), gl.program_id(0)
    none = program < 0
    rest = (heads_at_once(count, heads), count, heads, records, lengths)
    return PackedWork(program, none, gl.to_tensor(0), program, none, *rest)


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
def begun_by(candidate, starts_ptr, rows, sequences, BLOCK: gl.constexpr):
    """How many sequences have their first block, of BLOCK rows, at one of these candidates or before: that of
    sequence b is candidate starts[b] // BLOCK + b."""
    column = gl.arange(0, SEQUENCES, gl.SliceLayout(0, LIST_LAYOUT))
    begun = candidate * 0
    for start in range(0, sequences, SEQUENCES):
        other = start + column
        exists = other < sequences
        first, _ = bounds(starts_ptr, rows, other, exists)
        before = exists[None, :] & ((first // BLOCK + other)[None, :] <= candidate[:, None])
        begun += gl.sum(before.to(gl.int32), axis=1)
    return begun


@jit
def dearer_of_others(cost, number, packed, sequences, BLOCK: gl.constexpr, reach, most, ABOVE: gl.constexpr):
    """(of each block, how many of other sequences come before it: those that cost more, or as much and are of an
    earlier sequence; how many blocks there are at all, in parts to be added).

    cost, number: of the block and of its sequence. packed: cu_q, cu_k, used_k, q_rows and k_rows. ABOVE: says how many
    blocks of a sequence cost more than something, given that, its queries, its keys, BLOCK, reach and most.
    """
    cu_q_ptr, cu_k_ptr, used_k_ptr, q_rows, k_rows = packed
    column = gl.arange(0, SEQUENCES, gl.SliceLayout(0, LIST_LAYOUT))
    dearer, count = cost * 0, column * 0
    for start in range(0, sequences, SEQUENCES):
        other = start + column
        exists = other < sequences
        _, q_len = bounds(cu_q_ptr, q_rows, other, exists)
        _, k_len = keys_of(cu_k_ptr, used_k_ptr, k_rows, other, exists)
        count += ABOVE(column * 0 - 1, q_len, k_len, BLOCK, reach, most)
        least = cost[:, None] - (other[None, :] < number[:, None]).to(gl.int32)
        above = ABOVE(least, q_len[None, :], k_len[None, :], BLOCK, reach, most)
        dearer += gl.sum(gl.where(exists[None, :] & (other[None, :] != number[:, None]), above, 0), axis=1)
    return dearer, gl.sum(count, axis=0)


@jit
def store_records(records_ptr, count, place, numbers, listed, capacity):
    """numbers: of each record, see `PackedWork.rows`. listed: which there are. count: of all programs together."""
    record = records_ptr + (1 + place) * RECORD
    listed = listed & (place < capacity)
    for i in gl.static_range(len(numbers)):
        gl.store(record + i, numbers[i], mask=listed)
    if gl.program_id(0) == 0:
        gl.store(records_ptr, gl.minimum(count, capacity))


@jit
def blocks_above(cost, q_len, k_len, BLOCK_M: gl.constexpr, reach, most_keys):
    """How many row blocks of a sequence cost more than `cost`, see `cost_of`, of which later ones never cost less."""
    blocks = (q_len + BLOCK_M - 1) // BLOCK_M
    end = gl.maximum(cost - (k_len - q_len) - reach, 0)
    end = gl.where(reach < 0, 0, end)
    cheaper = gl.minimum(end // BLOCK_M, gl.maximum(blocks - 1, 0))  # of all but the last
    return gl.where(cost < 0, blocks, gl.where(gl.minimum(k_len, most_keys) > cost, blocks - cheaper, 0))


@jit
def cost_of(index, q_len, k_len, BLOCK_M: gl.constexpr, reach, most_keys):
    """Keys up to the last that a row block sees, but no more than any of them may see."""
    end = gl.minimum((index + 1) * BLOCK_M, q_len) + (k_len - q_len) + reach
    end = gl.where(reach < 0, k_len, gl.maximum(gl.minimum(end, k_len), 0))
    return gl.minimum(end, most_keys)


@jit(do_not_specialize=["sequences", "q_rows", "k_rows", "reach", "most_keys", "capacity"])
def list_row_blocks(
    cu_q_ptr,  # (sequences + 1,) int32: where each begins, and where the last ends
    cu_k_ptr,
    used_k_ptr,  # (sequences,) int32: how many keys of each count; None: all
    records_ptr,  # ((1 + capacity) RECORD,) int32: how many records follow; then the records, see `PackedWork.rows`
    sequences,
    q_rows,
    k_rows,
    reach,  # how many keys after its own position a query sees; -1: all
    most_keys,  # that a row block sees
    capacity,  # records that there is room for
    BLOCK_M: gl.constexpr,  # rows of a block
):
    """The kernel. Row block i of sequence b is candidate cu_q[b] // BLOCK_M + b + i: each has one, and some numbers are
    nobody's. A program counts, for each of its candidates, the row blocks before it: `dearer_of_others`, and those
    later in its own sequence. So there is nothing to sort."""
    gdc_launch_dependents()
    gl.static_assert(gl.num_warps() == 4)
    candidate = gl.program_id(0) * CANDIDATES + gl.arange(0, CANDIDATES, gl.SliceLayout(1, LIST_LAYOUT))
    number = gl.maximum(begun_by(candidate, cu_q_ptr, q_rows, sequences, BLOCK_M) - 1, 0)
    exists = number < sequences
    q_first, q_len = bounds(cu_q_ptr, q_rows, number, exists)
    k_first, k_len = keys_of(cu_k_ptr, used_k_ptr, k_rows, number, exists)
    index = candidate - (q_first // BLOCK_M + number)
    blocks = (q_len + BLOCK_M - 1) // BLOCK_M
    cost = cost_of(index, q_len, k_len, BLOCK_M, reach, most_keys)
    packed = (cu_q_ptr, cu_k_ptr, used_k_ptr, q_rows, k_rows)
    dearer, count = dearer_of_others(cost, number, packed, sequences, BLOCK_M, reach, most_keys, blocks_above)
    listed = (index >= 0) & (index < blocks)
    numbers = (q_first, q_len, k_first, k_len, number, index)
    store_records(records_ptr, count, dearer + blocks - 1 - index, numbers, listed, capacity)
