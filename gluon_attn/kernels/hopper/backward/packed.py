"""Packed sequences of unlike lengths, see ../../common/packed.py: the list of their key blocks, and
the workspaces, in which the queries of each sequence are padded to whole blocks.

The rows after the last sequence are counted as one more: its queries have no keys and its keys have no queries, so that
their gradients are 0.
"""

from gluon_attn.runtime.compat import gdc_launch_dependents, gl, jit

from ...common.packed import CANDIDATES, LIST_LAYOUT, begun_by, bounds, dearer_of_others, keys_of, store_records
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
    gl.static_assert(gl.num_warps() == 4)
    candidate = gl.program_id(0) * CANDIDATES + gl.arange(0, CANDIDATES, gl.SliceLayout(1, LIST_LAYOUT))
    rest_first, rest = rest_of(cu_k_ptr, k_rows, sequences)
    begun = begun_by(candidate, cu_k_ptr, k_rows, sequences, KEYS)
    begun += (candidate >= padded_block(rest_first, sequences, KEYS)).to(gl.int32)
    number = gl.maximum(begun - 1, 0)
    known = number < sequences
    q_first, q_len = bounds(cu_q_ptr, q_rows, number, known)
    k_first, k_len = keys_of(cu_k_ptr, used_k_ptr, k_rows, number, known)
    k_first, k_len = gl.where(known, k_first, rest_first), gl.where(known, k_len, rest)
    index = candidate - padded_block(k_first, number, KEYS)
    cost = gl.where(known, cost_of(index, q_len, k_len, KEYS, reach, most_queries), 0)
    packed = (cu_q_ptr, cu_k_ptr, used_k_ptr, q_rows, k_rows)
    dearer, count = dearer_of_others(cost, number, packed, sequences, KEYS, reach, most_queries, blocks_above)
    count += (rest + KEYS - 1) // KEYS
    listed = (index >= 0) & (index < (k_len + KEYS - 1) // KEYS)
    store_records(records_ptr, count, dearer + index, (q_first, q_len, k_first, k_len, number, index), listed, capacity)
