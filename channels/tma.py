"""TMA copies through an acquired slot: the bytes to expect and the copy, kept together so that they cannot differ."""

from .compat import fence_async_shared, gl, jit, mbarrier, tma


@jit
def expect(slot, PARTS: gl.constexpr = 1):
    """Announce the bytes of PARTS tiles on the slot's barrier. Each CTA expects its own bytes, multicast or not."""
    mbarrier.expect(slot.filled, PARTS * slot.part(0).nbytes_per_cta)


@jit
def copy(slot, desc, coords, part=0):
    """Start the copy of one tile, already announced, into the slot. If multicast, one CTA issues it for several."""
    tma.async_load(desc, coords, slot.filled, slot.tile_of(desc, part), multicast=slot.MULTICAST)


@jit
def load(slot, desc, coords):
    """Fill a slot of one tile: `coords` are the tile's first indices in the descriptor's tensor."""
    expect(slot)
    copy(slot, desc, coords)


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
