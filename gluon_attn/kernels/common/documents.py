"""Documents: several of them in one sequence, of which each query sees its own. A mask function like anybody's.

What it reads is made before, by a kernel of its own. Ids are copied, padded to whole blocks, and loads need no mask.
Ids are looked at in stretches of 64 positions. Each one's least and largest id is compared with those of every other,
so that blocks are left out wherever ids are sorted, or lie in long runs.

Of each batch one after the other: ids of queries, ids of keys, and ranges: for the forward those of keys, one for each
stretch of queries, for the backward those of queries, one for each stretch of keys.
"""

from gluon_attn.runtime.compat import constexpr_function, gdc_launch_dependents, gl, jit

STRETCH = gl.constexpr(64)  # positions: no role has a smaller share of a row block, and no key block is smaller
STRETCHES = gl.constexpr(8)  # that a program looks at
OTHERS = gl.constexpr(64)  # stretches that it compares with at a time
WHOLE = gl.constexpr(1024)  # positions of the largest block, of four CTAs
LEAST = gl.constexpr(-(2**31))
LARGEST = gl.constexpr(2**31 - 1)


@jit
def padded(length):
    """Ids that there is room for."""
    return (length + WHOLE - 1) // WHOLE * WHOLE


@jit
def of_batch(documents, batch, q_len, k_len):
    """Where a batch's part begins: ids, and four numbers of each stretch."""
    return documents + batch.to(gl.int64) * ((padded(q_len) + padded(k_len)) // WHOLE * (WHOLE + WHOLE // STRETCH * 4))


@jit
def same_document(q_index, k_index, head, batch, q_len, k_len, documents):
    ids = of_batch(documents, batch, q_len, k_len)
    return gl.load(ids + q_index) == gl.load(ids + padded(q_len) + k_index)


@jit
def keys_of_documents(first_row, last_row, q_len, k_len, head, batch, documents):
    return ranges_of(first_row, last_row, of_batch(documents, batch, q_len, k_len) + padded(q_len) + padded(k_len))


@jit
def rows_of_documents(first_key, last_key, q_len, k_len, kv_head, batch, documents):
    of_rows = of_batch(documents, batch, q_len, k_len) + padded(q_len) + padded(k_len)
    return ranges_of(first_key, last_key, of_rows + padded(q_len) // STRETCH * 4)


@constexpr_function
def same_everywhere(num_warps, num_ctas):
    """Numbers side by side in the threads of a warp, the same in every warp and CTA."""
    return gl.BlockedLayout([1], [32], [num_warps], [0], cga_layout=[[0]] * (num_ctas.bit_length() - 1))


@jit
def ranges_of(first, last, ranges):
    """What all stretches of a block, from position `first` to `last`, have in common."""
    TOGETHER: gl.constexpr = WHOLE // STRETCH
    stretch = first // STRETCH + gl.arange(0, TOGETHER, same_everywhere(gl.num_warps(), gl.num_ctas()))
    inside = stretch <= last // STRETCH
    at = ranges + stretch * 4
    start = gl.min(gl.load(at, mask=inside, other=LARGEST), axis=0)
    end = gl.max(gl.load(at + 1, mask=inside, other=0), axis=0)
    full_start = gl.max(gl.load(at + 2, mask=inside, other=0), axis=0)
    full_end = gl.min(gl.load(at + 3, mask=inside, other=LARGEST), axis=0)
    return start, end, full_start, full_end


@jit
def copy_ids(target, ids, first, length):
    """STRETCHES stretches of ids from position `first` on."""
    position = first + gl.arange(0, STRETCH * STRETCHES, gl.BlockedLayout([2], [32], [gl.num_warps()], [0]))
    found = gl.load(ids + position, mask=position < length, other=0)
    gl.store(target + position, found, mask=position < padded(length))


@jit
def least_and_largest(ids, first_stretch, length, COUNT: gl.constexpr):
    """Of each of COUNT stretches of ids: int32 [COUNT] each. Of a stretch without positions: the largest int32 and the
    least."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 16], [8, 4], [gl.num_warps(), 1], [1, 0])
    stretch = first_stretch + gl.arange(0, COUNT, gl.SliceLayout(1, LAYOUT))
    position = stretch[:, None] * STRETCH + gl.arange(0, STRETCH, gl.SliceLayout(0, LAYOUT))[None, :]
    inside = position < length
    least = gl.min(gl.load(ids + position, mask=inside, other=LARGEST), axis=1)
    largest = gl.max(gl.load(ids + position, mask=inside, other=LEAST), axis=1)
    return least, largest


@jit
def store_ranges(ranges, first_stretch, ids, other_ids, length, other_length):
    """For STRETCHES stretches of ids: the positions of the other sequence from the first to the last stretch that may
    have an id of this one's; and those of a run of stretches that have one id, which is all that this one has."""
    PAIRS: gl.constexpr = gl.BlockedLayout([1, 2], [4, 8], [2, gl.num_warps() // 2], [1, 0])
    OWN: gl.constexpr = gl.SliceLayout(1, PAIRS)
    OTHER: gl.constexpr = gl.SliceLayout(0, PAIRS)
    other_stretches = (other_length + STRETCH - 1) // STRETCH
    least, largest = least_and_largest(ids, first_stretch, length, STRETCHES)
    least, largest = gl.convert_layout(least, OWN)[:, None], gl.convert_layout(largest, OWN)[:, None]

    zeros = gl.zeros([STRETCHES], gl.int32, OWN)
    first, end, full_first, full_end = zeros + other_stretches, zeros, zeros + other_stretches, zeros + other_stretches
    for at in range(0, other_stretches, OTHERS):
        other_least, other_largest = least_and_largest(other_ids, at, other_length, OTHERS)
        other_least = gl.convert_layout(other_least, OTHER)[None, :]
        other_largest = gl.convert_layout(other_largest, OTHER)[None, :]
        stretch = (at + gl.arange(0, OTHERS, OTHER))[None, :]
        meet = (other_least <= largest) & (other_largest >= least)
        first = gl.minimum(first, gl.min(gl.where(meet, stretch, other_stretches), axis=1))
        end = gl.maximum(end, gl.max(gl.where(meet, stretch + 1, 0), axis=1))
        alike = (least == largest) & (other_least == least) & (other_largest == least)
        full_first = gl.minimum(full_first, gl.min(gl.where(alike, stretch, other_stretches), axis=1))
        ended = (stretch >= full_first[:, None]) & (alike == 0)
        full_end = gl.minimum(full_end, gl.min(gl.where(ended, stretch, other_stretches), axis=1))

    stretch = first_stretch + gl.arange(0, STRETCHES, OWN)
    target, inside = ranges + stretch * 4, stretch * STRETCH < length
    gl.store(target, first * STRETCH, mask=inside)
    gl.store(target + 1, gl.minimum(end * STRETCH, other_length), mask=inside)
    gl.store(target + 2, full_first * STRETCH, mask=inside)
    gl.store(target + 3, gl.minimum(full_end * STRETCH, other_length), mask=inside)


@jit(do_not_specialize=["q_len", "k_len"])
def prepare_documents(
    documents_ptr,  # int32, to be written, as this file's head has it
    q_ids_ptr,  # (B, Sq) int32
    k_ids_ptr,  # (B, Sk) int32
    q_len,
    k_len,
    OF_KEYS: gl.constexpr,  # ranges of queries for stretches of keys, as gradients need them; or the other way round
):
    """A program for each STRETCHES stretches of the longer of the two."""
    gdc_launch_dependents()
    SPAN: gl.constexpr = STRETCH * STRETCHES
    programs = gl.maximum(padded(q_len), padded(k_len)) // SPAN  # of a batch
    batch, program = gl.program_id(0) // programs, gl.program_id(0) % programs
    q_ids, k_ids = q_ids_ptr + batch.to(gl.int64) * q_len, k_ids_ptr + batch.to(gl.int64) * k_len
    target = of_batch(documents_ptr, batch, q_len, k_len)
    copy_ids(target, q_ids, program * SPAN, q_len)
    copy_ids(target + padded(q_len), k_ids, program * SPAN, k_len)
    ranges = target + padded(q_len) + padded(k_len)
    if OF_KEYS:
        if program * SPAN < k_len:
            store_ranges(ranges + padded(q_len) // STRETCH * 4, program * STRETCHES, k_ids, q_ids, k_len, q_len)
    else:
        if program * SPAN < q_len:
            store_ranges(ranges, program * STRETCHES, q_ids, k_ids, q_len, k_len)
