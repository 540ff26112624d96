"""Documents: several of them in one sequence, of which each query sees its own. A mask function like anybody's.

Which keys a block of queries sees is found before, tile by tile: a kernel of its own compares the least and the largest
id of each tile with those of every other. So blocks are left out wherever ids are sorted, or lie in long runs.
"""

from gluon_attn.runtime.compat import gdc_launch_dependents, gl, jit

TILE = gl.constexpr(64)  # positions: no role has a smaller share of a row block, and no key block is smaller
TILES = gl.constexpr(8)  # that a program looks at
OTHERS = gl.constexpr(64)  # tiles that it compares with at a time
MOST_TILES = gl.constexpr(16)  # of a block: 1024 rows of four CTAs
LEAST = gl.constexpr(-(2**31))
LARGEST = gl.constexpr(2**31 - 1)


@jit
def same_document(q_index, k_index, head, batch, q_len, k_len, q_ids, k_ids, ranges):
    """q_ids: (B, Sq) int32, k_ids: (B, Sk) int32. ranges: as `find_ranges` writes it."""
    return gl.load(q_ids + (batch * q_len + q_index)) == gl.load(k_ids + (batch * k_len + k_index))


@jit
def keys_of_documents(first_row, last_row, q_len, k_len, head, batch, q_ids, k_ids, ranges):
    return ranges_of(first_row, last_row, q_len, batch, ranges)


@jit
def rows_of_documents(first_key, last_key, q_len, k_len, kv_head, batch, q_ids, k_ids, ranges):
    return ranges_of(first_key, last_key, k_len, batch, ranges)


@jit
def ranges_of(first, last, length, batch, ranges):
    """What all tiles of a block, from position `first` to `last`, have in common."""
    tiles = (length + TILE - 1) // TILE
    tile = first // TILE + gl.arange(0, MOST_TILES, gl.BlockedLayout([1], [32], [gl.num_warps()], [0]))
    inside = tile <= last // TILE
    at = ranges + (batch * tiles + tile) * 4
    start = gl.min(gl.load(at, mask=inside, other=LARGEST), axis=0)
    end = gl.max(gl.load(at + 1, mask=inside, other=0), axis=0)
    full_start = gl.max(gl.load(at + 2, mask=inside, other=0), axis=0)
    full_end = gl.min(gl.load(at + 3, mask=inside, other=LARGEST), axis=0)
    return start, end, full_start, full_end


@jit
def least_and_largest(ids, first_tile, length, COUNT: gl.constexpr):
    """Of each of COUNT tiles of ids: int32 [COUNT] each. Of a tile without positions: the largest int32 and the
    least."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 16], [8, 4], [gl.num_warps(), 1], [1, 0])
    tile = first_tile + gl.arange(0, COUNT, gl.SliceLayout(1, LAYOUT))
    position = tile[:, None] * TILE + gl.arange(0, TILE, gl.SliceLayout(0, LAYOUT))[None, :]
    inside = position < length
    least = gl.min(gl.load(ids + position, mask=inside, other=LARGEST), axis=1)
    largest = gl.max(gl.load(ids + position, mask=inside, other=LEAST), axis=1)
    return least, largest


@jit(do_not_specialize=["length", "other_length"])
def find_ranges(
    ranges_ptr,  # (B, tiles of ids, 4) int32, to be written: first, end, full_first, full_end, as `Limits` has them
    ids_ptr,  # (B, length) int32
    other_ids_ptr,  # (B, other_length) int32
    length,
    other_length,
):
    """For each tile of ids: the positions of the other sequence between the first and the last tile that may have an id
    of this one's; and those of a run of tiles that have one id, which is all that this one has. A program for each
    TILES tiles."""
    gdc_launch_dependents()
    PAIRS: gl.constexpr = gl.BlockedLayout([1, 2], [4, 8], [2, gl.num_warps() // 2], [1, 0])
    OWN: gl.constexpr = gl.SliceLayout(1, PAIRS)
    OTHER: gl.constexpr = gl.SliceLayout(0, PAIRS)
    tiles = (length + TILE - 1) // TILE
    programs = (tiles + TILES - 1) // TILES  # of a batch
    batch, first_tile = gl.program_id(0) // programs, gl.program_id(0) % programs * TILES
    other_tiles = (other_length + TILE - 1) // TILE
    ids, other_ids = ids_ptr + batch.to(gl.int64) * length, other_ids_ptr + batch.to(gl.int64) * other_length
    least, largest = least_and_largest(ids, first_tile, length, TILES)
    least, largest = gl.convert_layout(least, OWN), gl.convert_layout(largest, OWN)

    zeros = gl.zeros([TILES], gl.int32, OWN)
    first, end = zeros + other_tiles, zeros
    full_first, full_end = zeros + other_tiles, zeros + other_tiles
    for at in range(0, other_tiles, OTHERS):
        other_least, other_largest = least_and_largest(other_ids, at, other_length, OTHERS)
        other_least = gl.convert_layout(other_least, OTHER)[None, :]
        other_largest = gl.convert_layout(other_largest, OTHER)[None, :]
        tile = (at + gl.arange(0, OTHERS, OTHER))[None, :]
        meet = (other_least <= largest[:, None]) & (other_largest >= least[:, None])
        first = gl.minimum(first, gl.min(gl.where(meet, tile, other_tiles), axis=1))
        end = gl.maximum(end, gl.max(gl.where(meet, tile + 1, 0), axis=1))
        alike = (least == largest)[:, None] & (other_least == least[:, None]) & (other_largest == least[:, None])
        full_first = gl.minimum(full_first, gl.min(gl.where(alike, tile, other_tiles), axis=1))
        ended = (tile >= full_first[:, None]) & (alike == 0)
        full_end = gl.minimum(full_end, gl.min(gl.where(ended, tile, other_tiles), axis=1))

    tile = first_tile + gl.arange(0, TILES, OWN)
    target, inside = ranges_ptr + (batch * tiles + tile) * 4, tile < tiles
    gl.store(target, first * TILE, mask=inside)
    gl.store(target + 1, gl.minimum(end * TILE, other_length), mask=inside)
    gl.store(target + 2, full_first * TILE, mask=inside)
    gl.store(target + 3, gl.minimum(full_end * TILE, other_length), mask=inside)
