"""TMA copies through an acquired slot: the bytes to expect and the copy, kept together so that they cannot differ."""

import math

from .compat import constexpr_function, fence_async_shared, gl, jit, mbarrier, tma
from .shared_memory import as_tuple


@constexpr_function
def total_bytes(tiles):
    return sum(tile.nbytes_per_cta for tile in tiles)


@constexpr_function
def described(x, shape):
    """A tile's dtype and shape, as a message names them."""
    return f"{x.dtype} {[int(size) for size in shape]}"


@constexpr_function
def wrong_descs(descs, tiles, PARTS):
    """What is wrong with the descriptors for a slot of these rings (`SharedMemoryChannel.tiles`), or None.

    Tiles of two shapes or layouts may alternate in a ring of one kind, see `Slot.tile_of`: only their dtype and size
    are looked at there.
    """
    if len(descs) != PARTS:
        return f"descs: expected a TMA descriptor for each of the slot's {PARTS} parts, got {len(descs)}"
    for i, desc in enumerate(descs):
        ring = tiles[i if len(tiles) > 1 else 0]
        shape = list(ring.shape)
        same = desc.dtype == ring.dtype and math.prod(desc.block_shape) == math.prod(shape[1:])
        if len(tiles) > 1:
            same = same and list(desc.block_shape) == shape[1:] and desc.layout == ring.layout
        if not same:
            want, got = described(ring, shape[1:]), described(desc, desc.block_shape)
            layouts = f" in another layout, {desc.layout}" if got == want else ""
            return f"descs: part {i} was allocated for {want}, got a descriptor of {got}{layouts}"
    return None


@constexpr_function
def wrong_coords(all_coords, descs):
    """What is wrong with the coordinates for tiles of these descriptors, or None."""
    if len(all_coords) != len(descs):
        return f"coords: expected a tile's first indices for each of {len(descs)} descriptors, got {len(all_coords)}"
    for i, (coords, desc) in enumerate(zip(all_coords, descs)):  # noqa: B905  # of Triton's tuples, equally long
        rank = len(desc.block_shape)
        if not hasattr(coords, "__len__"):
            return f"coords: expected a list of {rank} indices for part {i}, got a single one"
        if len(coords) != rank:
            return f"coords: expected {rank} indices for part {i}, as its descriptor has dimensions, got {len(coords)}"
    return None


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
    gl.static_assert(wrong_descs(parts, slot.tiles, PARTS) is None, wrong_descs(parts, slot.tiles, PARTS))
    gl.static_assert(wrong_coords(all_coords, parts) is None, wrong_coords(all_coords, parts))
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
    gl.static_assert(wrong_coords((coords,), (desc,)) is None, wrong_coords((coords,), (desc,)))
    tma.async_store(desc, coords, tile)


@jit
def add(desc, coords, tile):
    """Start adding a shared memory tile that another role has published to what global memory holds. Of several that
    add to one place, none is lost; their order is open, and with it how the sum is rounded."""
    gl.static_assert(wrong_coords((coords,), (desc,)) is None, wrong_coords((coords,), (desc,)))
    tma.async_atomic_add(desc, coords, tile)


@jit
def wait_stores_done():
    """Wait until every store or addition this role started is in global memory, where others see it."""
    tma.store_wait(0, read_only=False)


@jit
def wait_stores_but_newest_done():
    """The same for every one but the newest, which may still be on its way."""
    tma.store_wait(1, read_only=False)


@jit
def wait_stores_read():
    """Wait until every store or addition this role started has read its tile, which may then be written again.

    All of them, not the first alone: none that is newer stays in flight.
    """
    tma.store_wait(0)


@jit
def wait_stores_but_newest_read():
    """The same for every one but the newest, which may still read."""
    tma.store_wait(1)
