"""Packed sequences of unlike lengths, see ../../common/packed.py: the list of their key blocks, and
the workspaces, in which the queries of each sequence are padded to whole blocks.

The rows after the last sequence are counted as one more: its queries have no keys and its keys have no queries, so that
their gradients are 0.
"""

from gluon_attn.runtime.compat import gdc_launch_dependents, gl, jit

from ...common.packed import CANDIDATES, RECORD, SEQUENCES, bounds, keys_of
from ...common.sequence import RowBlock, Sequence

NUMBERS = gl.constexpr(128)  # sequences that `number_of` looks at at a time


@jit
def padded_block(first, number, BLOCK: gl.constexpr):
    """The first block of a sequence, if each is padded to whole blocks: no two have one in common."""
    return first // BLOCK + number


@jit
def rest_of(starts_ptr, rows, sequences):
    """(first row, how many) of those after the last sequence."""
    first = gl.minimum(gl.maximum(gl.load(starts_ptr + sequences), 0), rows)
    return first, rows - first


@jit
def row_blocks_of(q_rows, sequences, BLOCK: gl.constexpr):
    """How many padded row blocks a head has in the workspaces, whatever the lengths."""
    return q_rows // BLOCK + sequences + 1


@jit
def number_of(block, starts_ptr, rows, sequences, BLOCK: gl.constexpr):
    """The sequence that has padded block `block`, or the rest: `sequences`."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    begun = gl.zeros([NUMBERS], gl.int32, LAYOUT)
    for start in range(0, sequences + 1, NUMBERS):
        number = start + gl.arange(0, NUMBERS, LAYOUT)
        exists = number <= sequences
        first = gl.minimum(gl.maximum(gl.load(starts_ptr + number, mask=exists, other=0), 0), rows)
        begun += (exists & (padded_block(first, number, BLOCK) <= block)).to(gl.int32)
    return gl.maximum(gl.sum(begun, axis=0) - 1, 0)


@jit
def queries_of_block(block, head, cu_q_ptr, sequences, q_rows, BLOCK: gl.constexpr):
    """Padded row block `block` of a head, of a sequence without keys. Its first row may be past the last one."""
    number = number_of(block, cu_q_ptr, q_rows, sequences, BLOCK)
    q_first, q_len = bounds(cu_q_ptr, q_rows, number, number < sequences)
    if number == sequences:
        q_first, q_len = rest_of(cu_q_ptr, q_rows, sequences)
    no_keys = gl.to_tensor(0)
    sequence = Sequence(q_first, q_len, no_keys, no_keys, True)
    return RowBlock(number, head, (block - padded_block(q_first, number, BLOCK)) * BLOCK, sequence)


@jit
def cost_of(index, q_len, k_len, KEYS: gl.constexpr, reach, most_queries):
    """Queries from the first that sees a key block on, but no more than any block may be seen by: from one block to the
    next never more."""
    seen = gl.where(reach < 0, q_len, gl.minimum(q_len, gl.maximum(k_len + reach - index * KEYS, 0)))
    return gl.minimum(seen, most_queries)


@jit
def blocks_above(cost, q_len, k_len, KEYS: gl.constexpr, reach, most_queries):
    """How many key blocks of a sequence cost more than `cost`."""
    blocks = (k_len + KEYS - 1) // KEYS
    dear = gl.where(reach < 0, blocks, (gl.maximum(k_len + reach - cost, 0) + KEYS - 1) // KEYS)
    dear = gl.where(gl.minimum(q_len, most_queries) > cost, gl.minimum(dear, blocks), 0)
    return gl.where(cost < 0, blocks, dear)


@jit(do_not_specialize=["sequences", "q_rows", "k_rows", "reach", "most_queries", "capacity"])
def list_key_blocks(
    cu_q_ptr,  # as `list_row_blocks` has them
    cu_k_ptr,
    used_k_ptr,
    records_ptr,  # ((1 + capacity) RECORD,) int32: how many records follow; then the records, see `PackedWork.keys`
    sequences,
    q_rows,
    k_rows,
    reach,  # how many keys after its own position a query sees; -1: all
    most_queries,  # that a key block is seen by
    capacity,  # records that there is room for
    KEYS: gl.constexpr,  # of a block
):
    """The kernel, as `list_row_blocks`, but that the first block of a sequence costs the most: so they are listed in
    the order in which they add to dQ, if that is fixed."""
    gdc_launch_dependents()
    LAYOUT: gl.constexpr = gl.BlockedLayout([8, 1], [1, 32], [4, 1], [1, 0])
    gl.static_assert(gl.num_warps() == 4)
    candidate = gl.program_id(0) * CANDIDATES + gl.arange(0, CANDIDATES, gl.SliceLayout(1, LAYOUT))
    column = gl.arange(0, SEQUENCES, gl.SliceLayout(0, LAYOUT))
    rest_first, rest = rest_of(cu_k_ptr, k_rows, sequences)
    begun = (candidate >= padded_block(rest_first, sequences, KEYS)).to(gl.int32)
    for start in range(0, sequences, SEQUENCES):
        other = start + column
        exists = other < sequences
        first, _ = bounds(cu_k_ptr, k_rows, other, exists)
        before = exists[None, :] & (padded_block(first, other, KEYS)[None, :] <= candidate[:, None])
        begun += gl.sum(before.to(gl.int32), axis=1)

    number = gl.maximum(begun - 1, 0)
    known = number < sequences
    q_first, q_len = bounds(cu_q_ptr, q_rows, number, known)
    k_first, k_len = keys_of(cu_k_ptr, used_k_ptr, k_rows, number, known)
    k_first, k_len = gl.where(known, k_first, rest_first), gl.where(known, k_len, rest)
    index = candidate - padded_block(k_first, number, KEYS)
    cost = gl.where(known, cost_of(index, q_len, k_len, KEYS, reach, most_queries), 0)
    place = index
    count = column * 0
    for start in range(0, sequences, SEQUENCES):
        other = start + column
        exists = other < sequences
        _, other_q_len = bounds(cu_q_ptr, q_rows, other, exists)
        _, other_k_len = keys_of(cu_k_ptr, used_k_ptr, k_rows, other, exists)
        count += (other_k_len + KEYS - 1) // KEYS
        least = cost[:, None] - (other[None, :] < number[:, None]).to(gl.int32)
        above = blocks_above(least, other_q_len[None, :], other_k_len[None, :], KEYS, reach, most_queries)
        place += gl.sum(gl.where(exists[None, :] & (other[None, :] != number[:, None]), above, 0), axis=1)

    blocks = (k_len + KEYS - 1) // KEYS
    listed = (index >= 0) & (index < blocks) & (place < capacity)
    record = records_ptr + (1 + place) * RECORD
    gl.store(record, q_first, mask=listed)
    gl.store(record + 1, q_len, mask=listed)
    gl.store(record + 2, k_first, mask=listed)
    gl.store(record + 3, k_len, mask=listed)
    gl.store(record + 4, number, mask=listed)
    gl.store(record + 5, index, mask=listed)
    if gl.program_id(0) == 0:
        gl.store(records_ptr, gl.minimum(gl.sum(count, axis=0) + (rest + KEYS - 1) // KEYS, capacity))
