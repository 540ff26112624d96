"""TMA copies through an acquired slot: the bytes to expect and the copy, kept together so that they cannot differ."""

from .compat import constexpr_function, fence_async_shared, gl, jit, mbarrier, tma
from .shared_memory import as_tuple


@constexpr_function
def total_bytes(tiles):
    return sum(tile.nbytes_per_cta for tile in tiles)


@jit
def load(slot, descs, coords):
    """Fill a slot. descs: the TMA descriptor of its one part, or a tuple of one for each part; coords: a tile's first
    indices in the descriptor's tensor, or a tuple of these.

    Each CTA announces the bytes that it gets, multicast or not; if multicast, one CTA issues a copy for several.
    """
    if isinstance(descs, gl.tuple):
        all_coords = coords
    else:
        all_coords = (coords,)
    parts = as_tuple(descs)
    PARTS: gl.constexpr = slot.PARTS
    gl.static_assert(len(parts) == PARTS, "descs: expected a TMA descriptor for each part of the slot")
    gl.static_assert(len(all_coords) == PARTS, "coords: expected a tile's indices for each part of the slot")
    tiles = ()
    for i in gl.static_range(PARTS):
        tiles = tiles + (slot.tile_of(parts[i], i),)
    mbarrier.expect(slot.filled, total_bytes(tiles))
    for i in gl.static_range(PARTS):
        # Found once more: kept from before the barrier on, it would change the machine code.
        tile = slot.tile_of(parts[i], i)
        tma.async_load(parts[i], all_coords[i], slot.filled, tile, multicast=slot.MULTICAST)


@jit
def store_own(desc, coords, tile):
    """Start the copy of a shared memory tile, just written by this role itself, to global memory."""
    fence_async_shared()  # the role's writes (generic proxy) before the engine's reads (async proxy)
    store(desc, coords, tile)


@jit
def store(desc, coords, tile):
    """Start the copy to global memory of a shared memory tile that another role has published."""
    tma.async_store(desc, coords, tile)


@jit
def wait_stores_read():
    """Wait until every store this role started has read its tile, which may then be written again."""
    tma.store_wait(0)
